# SPDX-License-Identifier: Apache-2.0
"""Does a kernel do on this GPU what its reference says? Runs both on the examples of a package and compares every byte.

A package offers examples in its module `verify_cases`: EXAMPLES maps the name of an op to a function that yields
`Example`s. Where an op asks runtime.trust whether the architecture's own kernel may run, both are verified: the own
kernel whatever is known of it, and the portable one, as "<op> (portable)".
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from cute_kernels.runtime import trust
from cute_kernels.runtime.compile import collect
from cute_kernels.runtime.key import KernelKey
from cute_kernels.runtime.ops import Op
from cute_kernels.runtime.registry import all_ops

PORTABLE = " (portable)"
"""Behind the name of an op: its portable kernel, where the architecture has one of its own as well."""


@dataclass(frozen=True)
class Example:
    """One call: a name and the op's arguments in the schema's order, on the CPU, poisoned outputs included.

    agree   for an op whose kernel rounds in another order than its reference: (got, want), both the arguments after the
            call, on the CPU -> the first difference that is too large, or "". None: every byte must be the same
    """

    name: str
    args: tuple[Any, ...]
    agree: Callable[[Sequence[Any], Sequence[Any]], str] | None = None


@dataclass(frozen=True)
class Verdict:
    """What came out for one op (or layer, or fact).

    status   "pass", "fail", "unsupported" (the kernel takes none of the examples here), "no kernel", "no examples"
    cases    examples that ran
    detail   why, in one line
    own      of these examples, how many asked whether the architecture's own kernel may run
    """

    name: str
    status: str
    cases: int = 0
    detail: str = ""
    seconds: float = 0.0
    own: int = 0


def examples_of(op: Op) -> Callable[[], Iterable[Example]] | None:
    """The examples of the package that defines `op`, or None."""
    package = op.check.__module__.rpartition(".")[0]
    if importlib.util.find_spec(f"{package}.verify_cases") is None:
        return None
    cases = importlib.import_module(f"{package}.verify_cases")
    found: Callable[[], Iterable[Example]] | None = cases.EXAMPLES.get(op.name)
    return found


def verify_op(
    op: Op, device: torch.device, examples: Callable[[], Iterable[Example]] | None = None, own: bool = True
) -> Verdict:
    """Run an op's kernel on `device` and its reference on the CPU, on every example; each kernel call twice.

    own   run the architecture's own kernel where there is a choice, or else the portable one; only the examples with a
          choice are counted then
    """
    start = time.perf_counter()
    name = op.name if own else op.name + PORTABLE
    if op.kernel is None:
        return Verdict(name, "no kernel")
    examples = examples_of(op) if examples is None else examples
    if examples is None:
        return Verdict(name, "no examples", detail=f"{op.kernel} has nothing to be verified with")
    cases, choices, refusals = 0, 0, []
    try:
        for example in examples():
            with trust.choose(own) as asked:
                why = _run_example(op, example, device)
            if why is None:
                choices += op.name in asked
                cases += own or op.name in asked
            else:
                refusals.append(f"{example.name}: {why}")
    except Exception as error:
        return Verdict(name, "fail", cases, describe(error), time.perf_counter() - start, choices)
    detail = f"{len(refusals)} not supported here, {refusals[0]}" if refusals else ""
    return Verdict(name, "pass" if cases else "unsupported", cases, detail, time.perf_counter() - start, choices)


class Mismatch(Exception):
    """A kernel's result differs from the reference's."""


def describe(error: Exception) -> str:
    """What went wrong, in one line."""
    lines = str(error).strip().splitlines() or [""]
    return lines[0] if isinstance(error, Mismatch) else f"{type(error).__name__}: {lines[0]}"


def _run_example(op: Op, example: Example, device: torch.device) -> str | None:
    """None if the kernel agrees with the reference; why not, if it does not take the call. Mismatch if it is wrong."""
    want = clone_arguments(example.args, torch.device("cpu"))
    op.check(*want)
    op.reference(*want)
    kernel = op.load_kernel()
    runs = []
    for _ in range(2):
        args = clone_arguments(example.args, device)
        op.check(*args)
        call = op.call_type(*args)
        why = kernel.why_not(call)
        if why:
            return why
        kernel.launch(call)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        runs.append(args)
    names = [argument.name for argument in op.overload._schema.arguments]
    first, second = (clone_arguments(run, torch.device("cpu")) for run in runs)
    agree = partial(compare_arguments, names) if example.agree is None else example.agree
    difference = agree(first, want)
    if difference:
        raise Mismatch(f"{example.name}: {difference}")
    difference = compare_arguments(names, second, first)
    if difference:
        raise Mismatch(f"{example.name}: the second run differs from the first: {difference}")
    return None


def clone_arguments(args: Sequence[Any], device: torch.device) -> tuple[Any, ...]:
    """Copies on `device` of everything the arguments can reach: views stay views, with the same strides and gaps."""
    memories: dict[int, torch.Tensor] = {}

    def clone(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        memory = raw_memory(value)
        copy = memories.get(memory.data_ptr())
        if copy is None:
            copy = memories[memory.data_ptr()] = memory.to(device, copy=True)
        typed = torch.empty(0, dtype=value.dtype, device=device)
        return typed.set_(copy.untyped_storage(), value.storage_offset(), value.shape, value.stride())

    return tuple(clone(value) for value in args)


def raw_memory(value: torch.Tensor) -> torch.Tensor:
    """All bytes behind a tensor, uint8 [n] over the same memory."""
    storage = value.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=value.device).set_(storage, 0, (storage.nbytes(),), (1,))


def compare_arguments(names: Sequence[str], got: Sequence[Any], want: Sequence[Any]) -> str:
    """The first difference between two sets of arguments on the CPU, or "". All memory counts, gaps and inputs too.

    Numbers agree if their bits do, or if both are NaN.
    """
    for name, g, w in zip(names, got, want, strict=True):
        if not isinstance(g, torch.Tensor):
            continue
        if g.dtype in (torch.float32, torch.bfloat16):
            # not g[both] = w[both], which gives a single NaN other bits
            g.copy_(torch.where(g.isnan() & w.isnan(), w, g))
        got_bytes, want_bytes = raw_memory(g), raw_memory(w)
        if torch.equal(got_bytes, want_bytes):
            continue
        first = int((got_bytes != want_bytes).nonzero()[0])
        count = int((got_bytes != want_bytes).sum())
        return (
            f"{name}: {count} of {got_bytes.numel()} bytes differ, the first at byte {first}: expected "
            f"{int(want_bytes[first])}, got {int(got_bytes[first])}"
        )
    return ""


# ---- what a verification will compile --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Needs:
    """What the verification of an op runs: its kernels' keys, and whether there is a choice between two kernels."""

    name: str
    keys: tuple[KernelKey, ...]
    has_choice: bool


def needs_of(op: Op, device: torch.device, examples: Callable[[], Iterable[Example]] | None = None) -> Needs:
    """What verify_op will run on `device`, found by calling everything but the kernels. What fails here fails there."""
    examples = examples_of(op) if examples is None else examples
    if op.kernel is None or examples is None:
        return Needs(op.name, (), False)
    keys: dict[KernelKey, None] = {}
    has_choice = False
    for example in examples():
        for own in (True, False):
            with collect() as found, trust.choose(own) as asked, contextlib.suppress(Exception):
                kernel, args = op.load_kernel(), clone_arguments(example.args, device)
                op.check(*args)
                call = op.call_type(*args)
                if not kernel.why_not(call):
                    kernel.launch(call)
            keys.update(found)
            if op.name not in asked:
                break
            has_choice = True
    return Needs(op.name, tuple(keys), has_choice)


# ---- by name, in a process that has nothing else to do ---------------------------------------------------------------


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def verify_by_name(name: str) -> Verdict:
    """Verdict of an op on the current CUDA device; of its portable kernel, if the name ends with PORTABLE."""
    own = not name.endswith(PORTABLE)
    return verify_op(all_ops()[name.removesuffix(PORTABLE)], _device(), own=own)


def needs_by_name(name: str) -> Needs | Verdict:
    """What the verification of the op `name` runs on the current CUDA device; "fail" if that cannot be found out."""
    try:
        return needs_of(all_ops()[name], _device())
    except Exception as error:
        return Verdict(name, "fail", detail=describe(error))
