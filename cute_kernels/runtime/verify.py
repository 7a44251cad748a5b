# SPDX-License-Identifier: Apache-2.0
"""Does a kernel do on this GPU what its reference says? Runs both on the examples of a package and compares every byte.

A package offers examples in its module `verify_cases`: EXAMPLES maps the name of an op to a function that yields
`Example`s. Where an op asks runtime.trust whether an own kernel of the architecture may run, each of them is verified
for itself, whatever is known of it, as "<op> (<kernel>)", and the portable one as "<op> (portable)".

Every example runs three times, the last time on a grid of few CTAs, which then have several work tiles; and then once
more with each kernel of a deployment that a longer or a shorter call of the same form runs (KernelKey.tuning), to the
same bytes. Kernels whose CTAs work together have larger calls in SOAK, of the same form: they run hundreds of times,
first as they are and then with random delays before every wait, and every byte must be the same each time.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch

from cute_kernels.models import MODELS
from cute_kernels.runtime import trust
from cute_kernels.runtime.arch import small_grids
from cute_kernels.runtime.compile import collect, substitute, use_folder, watch_launches
from cute_kernels.runtime.key import KernelKey, OpKernel
from cute_kernels.runtime.ops import Op
from cute_kernels.runtime.registry import all_ops

PORTABLE = "portable"
"""Stands for the name of an op's portable kernel, where the architecture has own ones as well."""

RANKS = (1, 2, 4, 8)
"""Tensor-parallel sizes whose deployments have all of their kernels run."""

SMALL_GRID = 2
"""CTAs, or one cluster, of the third run of an example."""

SOAK_RUNS = 200
"""Of a call, as many with delays and as many without."""


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
    """What came out for one kernel of an op (or a layer, or a fact).

    status   "pass", "fail", "unsupported" (the kernel takes none of the examples here), "no kernel", "no examples",
             "not run" (it was interrupted, or the GPU does not answer any more)
    cases    examples that ran
    detail   why, in one line
    op       of an own kernel: whose
    kernel   of an own kernel: its name
    """

    name: str
    status: str
    cases: int = 0
    detail: str = ""
    seconds: float = 0.0
    op: str = ""
    kernel: str = ""


@dataclass(frozen=True)
class Task:
    """What a process is asked to verify: an op; or one of its kernels; or to soak that in calls of many CTAs.

    kernel   name of an own kernel, or PORTABLE; "": whichever runs where all are trusted
    """

    op: str
    kernel: str = ""
    is_soak: bool = False

    @property
    def name(self) -> str:
        """How its verdict is called."""
        return self.op + (f" ({self.kernel})" if self.kernel else "") + (SOAKED if self.is_soak else "")

    @classmethod
    def of(cls, name: str) -> Task:
        """Inverse of `name`."""
        op, _, kernel = name.removesuffix(SOAKED).partition(" (")
        return cls(op, kernel.removesuffix(")"), name.endswith(SOAKED))


SOAKED = ", soak"


def cases_of(op: Op, kind: str = "EXAMPLES") -> Callable[[], Iterable[Example]] | None:
    """The examples, or the cases of SOAK, of the package that defines `op`, or None."""
    package = op.check.__module__.rpartition(".")[0]
    if importlib.util.find_spec(f"{package}.verify_cases") is None:
        return None
    cases = importlib.import_module(f"{package}.verify_cases")
    found: Callable[[], Iterable[Example]] | None = getattr(cases, kind, {}).get(op.name)
    return found


def examples_of(op: Op) -> Callable[[], Iterable[Example]] | None:
    """The examples of the package that defines `op`, or None."""
    return cases_of(op)


def verify_op(
    op: Op, device: torch.device, examples: Callable[[], Iterable[Example]] | None = None, kernel: str = ""
) -> Verdict:
    """Run an op's kernel on `device` and its reference on the CPU, on every example; each kernel call three times.

    kernel   as of Task; of an own kernel only the examples that it takes are run
    """
    start = time.perf_counter()
    name, is_own = Task(op.name, kernel).name, kernel not in ("", PORTABLE)
    identity = (op.name, kernel) if is_own else ("", "")
    if op.kernel is None:
        return Verdict(name, "no kernel")
    examples = examples_of(op) if examples is None else examples
    if examples is None:
        return Verdict(name, "no examples", detail=f"{op.kernel} has nothing to be verified with")
    cases, refusals, wrong = 0, [], []

    def verdict(status: str, detail: str) -> Verdict:
        return Verdict(name, status, cases, detail, time.perf_counter() - start, *identity)

    try:
        for example in examples():
            if is_own and not _takes(op, example, device, kernel):
                continue
            try:
                with trust.choose(_choice(kernel)):
                    why = _run_example(op, example, device)
            except Mismatch as error:
                wrong.append(describe(error))
                continue
            cases += why is None
            if why is not None:
                refusals.append(f"{example.name}: {why}")
    except Exception as error:
        return verdict("fail", describe(error))
    if wrong:
        others = f" (and {len(wrong) - 1} other examples)" if len(wrong) > 1 else ""
        return verdict("fail", wrong[0] + others)
    detail = f"{len(refusals)} not supported here, {refusals[0]}" if refusals else ""
    return verdict("pass" if cases else "unsupported", detail)


def _choice(kernel: str) -> bool | str:
    """What trust.choose takes for the kernel of a Task."""
    return False if kernel == PORTABLE else kernel or True


def _takes(op: Op, example: Example, device: torch.device, kernel: str) -> bool:
    """Whether an own kernel takes an example's call. What fails here fails where it runs."""
    with collect(), trust.choose(kernel) as asked, contextlib.suppress(Exception):
        _call(op, example, device)
    return (op.name, kernel) in asked


class Mismatch(Exception):
    """A kernel's result differs from the reference's."""


def describe(error: Exception) -> str:
    """What went wrong, in one line."""
    lines = str(error).strip().splitlines() or [""]
    return lines[0] if isinstance(error, Mismatch) else f"{type(error).__name__}: {lines[0]}"


def _call(op: Op, example: Example, device: torch.device) -> tuple[tuple[Any, ...], str]:
    """The arguments after a call of the kernel, and why it does not take the call, or ""."""
    kernel, args = op.load_kernel(), clone_arguments(example.args, device)
    op.check(*args)
    call = op.call_type(*args)
    why = kernel.why_not(call)
    if not why:
        kernel.launch(call)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    return args, why


def _run_example(op: Op, example: Example, device: torch.device) -> str | None:
    """None if the kernel agrees with the reference; why not, if it does not take the call. Mismatch if it is wrong."""
    want = clone_arguments(example.args, torch.device("cpu"))
    op.check(*want)
    op.reference(*want)
    runs = []
    with watch_launches() as launches:
        for most in (None, None, SMALL_GRID):
            with small_grids(most):
                args, why = _call(op, example, device)
            if why:
                return why
            runs.append(clone_arguments(args, torch.device("cpu")))
    kernels = ", ".join(dict.fromkeys(getattr(key, "kernel_name", "") for key, *_ in launches))
    where = f"{example.name} ({kernels})" if kernels else example.name
    names = [argument.name for argument in op.overload._schema.arguments]
    agree = partial(compare_arguments, names) if example.agree is None else example.agree
    first, second, few = runs
    for what, difference in (
        ("", agree(first, want)),
        ("the second run differs from the first: ", compare_arguments(names, second, first)),
        (f"on {SMALL_GRID} CTAs it differs: ", compare_arguments(names, few, first)),
    ):
        if difference:
            raise Mismatch(f"{where}: {what}{difference}")
    for instead in substitutes(op, dict.fromkeys(key for key, *_ in launches if isinstance(key, KernelKey))):
        with substitute(instead):
            args, _ = _call(op, example, device)
        difference = compare_arguments(names, clone_arguments(args, torch.device("cpu")), first)
        if difference:
            raise Mismatch(f"{where}: {', '.join(key.identity for key in instead.values())} differs: {difference}")
    return None


@cache
def deployed(kernel: Callable[[], OpKernel[Any]], arch: str) -> tuple[KernelKey, ...]:
    """Keys that a deployment of any model needs of an op's kernels."""
    declare = kernel().deployment_keys
    return tuple(dict.fromkeys(key for model in MODELS.values() for tp in RANKS for key in declare(model, tp, arch)))


def substitutes(op: Op, keys: Iterable[KernelKey]) -> list[dict[KernelKey, KernelKey]]:
    """What to run in the place of a call's kernels: each kernel of the op's deployments that may be."""
    assert op.kernel is not None
    others = {key: [other for other in deployed(op.kernel, key.arch) if other.stands_for(key)] for key in keys}
    most = max((len(found) for found in others.values()), default=0)
    return [{key: found[i] for key, found in others.items() if i < len(found)} for i in range(most)]


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


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """torch.equal of two `raw_memory`, eight bytes at a time: a sixth of its time on a CPU."""
    if a.numel() != b.numel():
        return False
    end = a.numel() // 8 * 8
    return torch.equal(a[:end].view(torch.int64), b[:end].view(torch.int64)) and torch.equal(a[end:], b[end:])


def compare_arguments(names: Sequence[str], got: Sequence[Any], want: Sequence[Any]) -> str:
    """The first difference between two sets of arguments on the CPU, or "". All memory counts, gaps and inputs too.

    Numbers agree if their bits do, or if both are NaN.
    """
    for name, g, w in zip(names, got, want, strict=True):
        if not isinstance(g, torch.Tensor):
            continue
        got_bytes, want_bytes = raw_memory(g), raw_memory(w)
        if same_bytes(got_bytes, want_bytes):
            continue
        if g.dtype in (torch.float32, torch.bfloat16):
            # not g[both] = w[both], which gives a single NaN other bits
            g.copy_(torch.where(g.isnan() & w.isnan(), w, g))
            if same_bytes(got_bytes, want_bytes):
                continue
        first = int((got_bytes != want_bytes).nonzero()[0])
        count = int((got_bytes != want_bytes).sum())
        return (
            f"{name}: {count} of {got_bytes.numel()} bytes differ, the first at byte {first}: expected "
            f"{int(want_bytes[first])}, got {int(got_bytes[first])}"
        )
    return ""


# ---- soak


def soak_op(op: Op, device: torch.device, kernel: str, delayed: str) -> Verdict:
    """Run a kernel's calls of SOAK again and again, the second half of the runs with the kernels in the folder
    `delayed`, which wait at random before they wait. The first run must agree with the reference, and all others with
    it, byte for byte."""
    start = time.perf_counter()
    name = Task(op.name, kernel, True).name
    identity = (op.name, kernel) if kernel not in ("", PORTABLE) else ("", "")
    examples, cases = cases_of(op, "SOAK"), 0
    names = [argument.name for argument in op.overload._schema.arguments]

    def verdict(status: str, detail: str) -> Verdict:
        return Verdict(name, status, cases, detail, time.perf_counter() - start, *identity)

    try:
        for example in () if examples is None else examples():
            if identity[1] and not _takes(op, example, device, kernel):
                continue
            # once there, 400 copies of them cost little
            example = replace(example, args=clone_arguments(example.args, device))
            with trust.choose(_choice(kernel)):
                first, why = _call(op, example, device)
                if why:
                    continue
                want = clone_arguments(example.args, device)
                op.reference(*want)
                on_cpu = [clone_arguments(args, torch.device("cpu")) for args in (first, want)]
                agree = partial(compare_arguments, names) if example.agree is None else example.agree
                difference = agree(*on_cpu)
                if difference:
                    return verdict("fail", f"{example.name}: {difference}")
                for what in ("", " with delays"):
                    with use_folder(delayed) if what else contextlib.nullcontext():
                        bad = _first_other(op, example, device, first)
                    if bad is not None:
                        return verdict("fail", f"{example.name}: run {bad}{what} of {SOAK_RUNS} differs from the first")
            cases += 1
    except Exception as error:
        return verdict("fail", describe(error))
    return verdict("pass" if cases else "unsupported", "")


def _first_other(op: Op, example: Example, device: torch.device, want: Sequence[Any]) -> int | None:
    """The first of many runs, from 1 on, that leaves other bytes than `want` does, or None."""
    wanted = [raw_memory(value) for value in want if isinstance(value, torch.Tensor)]
    same = torch.ones(SOAK_RUNS, dtype=torch.bool, device=device)
    kernel = op.load_kernel()
    for number in range(SOAK_RUNS):
        args = clone_arguments(example.args, device)
        kernel.launch(op.call_type(*args))
        found = [raw_memory(value) for value in args if isinstance(value, torch.Tensor)]
        same[number] = torch.stack([(a == b).all() for a, b in zip(found, wanted, strict=True)]).all()
    bad = (~same).nonzero()
    return int(bad[0]) + 1 if len(bad) else None


# ---- what a verification will compile


@dataclass(frozen=True)
class Needs:
    """What the verification of an op runs.

    keys      its kernels', the examples' and those of its soak
    deployed  keys that deployments need of them
    kernels   names of own kernels that are asked for, in the order in which they are
    soaked    keys of the calls in SOAK
    calls     how many examples there are
    """

    name: str
    keys: tuple[KernelKey, ...]
    kernels: tuple[str, ...] = ()
    soaked: tuple[KernelKey, ...] = ()
    deployed: tuple[KernelKey, ...] = ()
    calls: int = 0

    @property
    def tasks(self) -> list[Task]:
        """All that is to be verified."""
        kernels = (*self.kernels, PORTABLE) if self.kernels else ("",)
        soaks = [Task(self.name, kernel, True) for kernel in (self.kernels or ("",)) if self.soaked]
        return [*(Task(self.name, kernel) for kernel in kernels), *soaks]


def needs_of(op: Op, device: torch.device, examples: Callable[[], Iterable[Example]] | None = None) -> Needs:
    """What verify_op and soak_op will run on `device`, found by calling everything but the kernels. What fails here
    fails there."""
    examples = examples_of(op) if examples is None else examples
    if op.kernel is None or examples is None:
        return Needs(op.name, ())
    keys, kernels, calls = _keys_of(op, device, examples())
    soak = cases_of(op, "SOAK")
    soaked, *_ = _keys_of(op, device, () if soak is None else soak(), with_portable=False)
    for instead in substitutes(op, list(keys)):
        keys.update(dict.fromkeys(instead.values()))
    archs = dict.fromkeys(key.arch for key in keys)
    needed = tuple(key for arch in archs for key in deployed(op.kernel, arch))
    return Needs(op.name, tuple({**keys, **soaked}), tuple(kernels), tuple(soaked), needed, calls)


def _keys_of(
    op: Op, device: torch.device, examples: Iterable[Example], with_portable: bool = True
) -> tuple[dict[KernelKey, None], dict[str, None], int]:
    """Keys and names of own kernels that are asked for in calls, and how many calls there are."""
    keys: dict[KernelKey, None] = {}
    kernels: dict[str, None] = {}
    calls = 0

    def asked(example: Example, own: bool | str) -> list[tuple[str, str]]:
        with collect() as found, trust.choose(own) as asked_for, contextlib.suppress(Exception):
            _call(op, example, device)
        if own or with_portable or not asked_for:
            keys.update(found)
        return list(asked_for)

    for example in examples:
        calls += 1
        pairs = asked(example, False)
        own = [kernel for name, kernel in pairs if name == op.name]
        kernels.update(dict.fromkeys(own))
        if pairs and not own:  # asked in the name of another op
            asked(example, True)
        for kernel in own:
            asked(example, kernel)
    return keys, kernels, calls


# ---- by name, in a process that has nothing else to do


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def verify_by_name(name: str) -> Verdict:
    """Verdict on the current CUDA device; name: of a Task."""
    task = Task.of(name)
    op = all_ops()[task.op]
    if task.is_soak:
        return soak_op(op, _device(), task.kernel, os.environ[DELAYED_VARIABLE])
    return verify_op(op, _device(), kernel=task.kernel)


DELAYED_VARIABLE = "_CUTE_KERNELS_VERIFY_DELAYED"
"""How `verify` tells its processes the folder with kernels that have delays."""


def needs_by_name(name: str) -> Needs | Verdict:
    """What the verification of the op `name` runs on the current CUDA device; "fail" if that cannot be found out."""
    try:
        return needs_of(all_ops()[name], _device())
    except Exception as error:
        return Verdict(name, "fail", detail=describe(error))
