"""Does a kernel do on this GPU what its reference says? Runs both on the examples of a room and compares every byte.

A room offers examples in its module `examples`: EXAMPLES maps the name of an op to a function that yields `Example`s.
Ops are verified in a process of their own: a kernel that hangs, crashes or spoils the GPU's context fails alone.
"""

from __future__ import annotations

import importlib
import importlib.util
import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from cute_kernels.runtime.ops import Op
from cute_kernels.runtime.registry import all_ops

TIMEOUT_SECONDS = 300.0
"""After this a verification has hung. The first call of an op compiles its kernels."""

START_SECONDS = 120.0
"""How long a new process may take to import what it needs."""


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
    """What came out for one op (or layer).

    status   "pass", "fail", "unsupported" (the kernel takes none of the examples here), "no kernel", "no examples"
    cases    examples that ran
    detail   why, in one line
    """

    name: str
    status: str
    cases: int = 0
    detail: str = ""
    seconds: float = 0.0


def examples_of(op: Op) -> Callable[[], Iterable[Example]] | None:
    """The examples of the room that defines `op`, or None."""
    room = op.check.__module__.rpartition(".")[0]
    if importlib.util.find_spec(f"{room}.examples") is None:
        return None
    found: Callable[[], Iterable[Example]] | None = importlib.import_module(f"{room}.examples").EXAMPLES.get(op.name)
    return found


def verify_op(op: Op, device: torch.device, examples: Callable[[], Iterable[Example]] | None = None) -> Verdict:
    """Run an op's kernel on `device` and its reference on the CPU, on every example; each kernel call twice."""
    start = time.perf_counter()
    if op.kernel is None:
        return Verdict(op.name, "no kernel")
    examples = examples_of(op) if examples is None else examples
    if examples is None:
        return Verdict(op.name, "no examples", detail=f"{op.kernel} has nothing to be verified with")
    cases, refusals = 0, []
    try:
        for example in examples():
            why = _run_example(op, example, device)
            if why is None:
                cases += 1
            else:
                refusals.append(f"{example.name}: {why}")
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        kind = "" if isinstance(error, Mismatch) else f"{type(error).__name__}: "
        return Verdict(op.name, "fail", cases, kind + lines[0], time.perf_counter() - start)
    detail = f"{len(refusals)} not supported here, {refusals[0]}" if refusals else ""
    return Verdict(op.name, "pass" if cases else "unsupported", cases, detail, time.perf_counter() - start)


class Mismatch(Exception):
    """A kernel's result differs from the reference's."""


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
        supported, why = kernel.supports(*args)
        if not supported:
            return str(why)
        kernel.launch(*args)
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
            both = g.isnan() & w.isnan()
            g[both] = w[both]
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


# ---- in a process of their own ---------------------------------------------------------------------------------------


def verify_by_name(name: str) -> Verdict:
    """Verdict of the op `name` on the current CUDA device."""
    return verify_op(all_ops()[name], torch.device("cuda", torch.cuda.current_device()))


def run_isolated(
    names: Iterable[str], function: Callable[[str], Verdict], timeout: float = TIMEOUT_SECONDS
) -> Iterator[Verdict]:
    """Verdicts of function(name), which must be importable, from a process that is replaced when it breaks."""
    context = multiprocessing.get_context("spawn")
    worker: _Worker | None = None
    try:
        for name in names:
            if worker is None or not worker.process.is_alive():
                worker = _Worker(context, function)
            verdict = worker.ask(name, timeout)
            yield verdict
    finally:
        if worker is not None:
            worker.stop()


class _Worker:
    def __init__(self, context: Any, function: Callable[[str], Verdict]) -> None:
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, function), daemon=True)
        self.process.start()
        theirs.close()
        self.ready = False

    def ask(self, name: str, timeout: float) -> Verdict:
        try:
            if not self.ready:
                if not self.connection.poll(START_SECONDS):
                    self.stop()
                    return Verdict(name, "fail", detail=f"the process did not start within {START_SECONDS:g} s")
                self.ready = self.connection.recv()
            self.connection.send(name)
            if not self.connection.poll(timeout):
                self.stop()
                return Verdict(name, "fail", detail=f"no answer within {timeout:g} s: stopped")
            verdict: Verdict = self.connection.recv()
            if not self.connection.recv():
                self.process.join()
            return verdict
        except (EOFError, OSError):
            self.process.join()
            return Verdict(name, "fail", detail=f"the process died with exit code {self.process.exitcode}")

    def stop(self) -> None:
        self.process.kill()
        self.process.join()


def _serve(connection: Any, function: Callable[[str], Verdict]) -> None:
    connection.send(True)
    while True:
        try:
            name = connection.recv()
        except EOFError:
            return
        connection.send(function(name))
        sound = _device_is_sound()
        connection.send(sound)
        if not sound:
            os._exit(1)


def _device_is_sound() -> bool:
    """Whether the GPU still answers this process: after an illegal access it does not."""
    if not torch.cuda.is_initialized():
        return True
    try:
        torch.cuda.synchronize()
        return True
    except Exception:
        return False
