# SPDX-License-Identifier: Apache-2.0
"""A benchmark of an op as data: its cases, its peers, and when a result counts as right.

Most ops are measured alike: make input sets on the GPU, let the kernel and its peers run on the same ones, compare each
with the op's reference. `Bench` says what differs from op to op, `Bench.sweep` does the rest through `perf.measure`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from cute_kernels.runtime.ops import OPS, Op
from cute_kernels.runtime.verify import clone_arguments
from perf.grid import of_rows
from perf.measure import Call, compare, number_of_sets
from perf.peers import load_peer

POISON_BYTE = 0xA5

Arguments = tuple[Any, ...]
Run = Callable[..., Any]
"""Called with an op's arguments in the schema's order; returns None if it wrote into them, else the tensors that hold
what the schema's mutated arguments would, in their order."""

Same = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], bool]
"""(what a call wrote, what the reference wrote), both in the order of the schema's mutated arguments."""


def not_dependent(args: Arguments) -> Arguments:
    """Arguments without use_pdl, the last one."""
    return (*args[:-1], False)


def same_bytes(got: Sequence[torch.Tensor], want: Sequence[torch.Tensor]) -> bool:
    """Whether all tensors agree bit for bit."""
    return len(got) == len(want) and all(_equal(g, w) for g, w in zip(got, want, strict=True))


def _equal(got: torch.Tensor, want: torch.Tensor) -> bool:
    return torch.equal(got.contiguous().view(torch.uint8), want.contiguous().view(torch.uint8))


def close(rtol: float, atol: float) -> Same:
    """All tensors agree within a tolerance; NaN agrees with NaN."""

    def same(got: Sequence[torch.Tensor], want: Sequence[torch.Tensor]) -> bool:
        return all(
            torch.allclose(g.float(), w.float(), rtol=rtol, atol=atol, equal_nan=True)
            for g, w in zip(got, want, strict=True)
        )

    return same


@dataclass(frozen=True)
class Case:
    """One shape of an op.

    name    what tells it from the op's others in tables
    rows    its T
    make    seed -> the op's arguments in the schema's order, on the GPU
    shape   further facts for the record
    products   "bf16" or "e4m3" if the FLOPs are matrix products of that kind
    """

    name: str
    rows: int
    make: Callable[[int], Arguments]
    shape: Mapping[str, Any] = field(default_factory=dict)
    products: str | None = None


@dataclass(frozen=True)
class Bench:
    """How one op is measured.

    op          its name in the schema
    cases       the shapes of the report
    between     shapes between those that are tuned for (perf.grid.mark)
    quick       numbers of rows of a quick look
    peers       name -> loader of another project's kernel; one that raises ends the sweep (perf.peers.load_peer)
    ahead       called with the cases before peers are loaded: what those compile when they are first called
    variants    loader of this project's other configurations, by name; names begin with "ours "
    apart       arguments -> those of a call behind a kernel that lets nothing start early, where they are others
    inputs      mutated arguments that the op reads too: they are not poisoned, and restored after a check
    same        when this project's results are right; the default is bit for bit
    peer_same   when a peer's are; the default is `same`
    """

    op: str
    cases: tuple[Case, ...]
    quick: tuple[int, ...]
    between: tuple[Case, ...] = ()
    peers: Mapping[str, Callable[[], Run]] = field(default_factory=dict)
    ahead: Callable[[Sequence[Case]], None] | None = None
    variants: Callable[[], Mapping[str, Run]] = dict
    apart: Callable[[Arguments], Arguments] | None = None
    inputs: tuple[str, ...] = ()
    same: Same = same_bytes
    peer_same: Same | None = None

    def sweep(
        self, rows: tuple[int, ...] | None = None, peers: bool = False, variants: bool = False, replays: int = 21
    ) -> list[dict[str, Any]]:
        """Records of the cases, or of those with that many rows."""
        op = OPS[self.op]
        chosen = of_rows((*self.cases, *self.between), rows)
        for case in chosen:
            op.overload(*case.make(0))  # compiled before other projects change the DSL
        candidates: dict[str, Any] = {}
        if variants:
            candidates.update({name: _on_set(run) for name, run in self.variants().items()})
        if peers:
            if self.ahead is not None:
                self.ahead(chosen)
            candidates.update({name: _load_peer(name, loader) for name, loader in self.peers.items()})
        return [self._measure(op, case, candidates, replays) for case in chosen]

    def _measure(self, op: Op, case: Case, candidates: Mapping[str, Any], replays: int) -> dict[str, Any]:
        first = InputSet(self, op, case.make(0))
        assert op.cost is not None
        work = op.cost(*first.args)
        sets = [first, *(InputSet(self, op, case.make(seed)) for seed in range(1, number_of_sets(work.bytes)))]
        shape = {"case": case.name, "T": case.rows, **case.shape}
        apart = None if self.apart is None else partial(self._run_apart, op)
        return compare(self.op, shape, sets, work, candidates, replays, products=case.products, apart=apart)

    def _run_apart(self, op: Op, inputs: InputSet) -> None:
        assert self.apart is not None
        op.overload(*self.apart(inputs.args))


def _on_set(run: Run) -> Callable[[InputSet], Any]:
    return lambda s: run(*s.args)


@dataclass(frozen=True)
class _Peers:
    """What a peer's kernel returned."""

    tensors: Sequence[torch.Tensor] | None


def _load_peer(name: str, loader: Callable[[], Run]) -> Callable[[InputSet], _Peers] | str:
    run = load_peer(name, loader)
    return run if isinstance(run, str) else lambda s: _Peers(run(*s.args))


@dataclass(frozen=True)
class InputSet:
    """Arguments of one call, with what `perf.measure.compare` asks of an input set."""

    bench: Bench
    op: Op
    args: Arguments

    def arguments(self) -> Arguments:
        return self.args

    def ours(self) -> None:
        self.op.overload(*self.args)

    def right(self, call: Call) -> bool:
        """Whether `call` writes what the op's reference writes, over poisoned outputs."""
        mutated = self.op.mutated(self.args)
        for name, tensor in mutated.items():
            if name not in self.bench.inputs:
                poison(tensor)
        device = next(arg.device for arg in self.args if isinstance(arg, torch.Tensor))
        want = clone_arguments(self.args, device)
        before = {name: value.clone() for name, value in self.op.mutated(want).items() if name in self.bench.inputs}
        self.op.reference(*want)
        try:
            returned, same = call(), self.bench.same
            if isinstance(returned, _Peers):
                returned, same = returned.tensors, self.bench.peer_same or same
            got = list(mutated.values()) if returned is None else list(returned)
            return same(got, list(self.op.mutated(want).values()))
        finally:
            for name, value in before.items():
                mutated[name].copy_(value)


def poison(tensor: torch.Tensor) -> None:
    """Fill a tensor with bytes that no kernel writes by accident."""
    if tensor.numel() == 0:
        return
    if tensor.stride(-1) == 1:
        tensor.view(torch.uint8).fill_(POISON_BYTE)
    else:
        tensor.fill_(POISON_BYTE)
