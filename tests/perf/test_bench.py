# SPDX-License-Identifier: Apache-2.0
"""What benchmarks of ops share and needs no GPU: when results count as right, poison, a call's arguments."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from cute_kernels.runtime.ops import OPS
from perf import bench
from perf.bench import Bench, Case


def test_same_bytes() -> None:
    zero, minus, wide = torch.tensor([0.0]), torch.tensor([-0.0]), torch.arange(8.0)
    assert bench.same_bytes([zero, wide[::2]], [zero.clone(), wide[::2].clone()])
    assert not bench.same_bytes([zero], [minus])
    assert not bench.same_bytes([zero, wide], [zero])
    assert not bench.same_bytes([zero, minus], [zero, zero])


def test_close() -> None:
    same = bench.close(rtol=0.1, atol=0.0)
    want = torch.tensor([1.0, torch.nan])
    assert same([torch.tensor([1.09, torch.nan])], [want])
    assert not same([torch.tensor([1.2, torch.nan])], [want])
    assert not same([torch.tensor([1.0, 1.0])], [want])
    assert not same([want, torch.tensor([1.0])], [want, torch.tensor([2.0])])


def test_poison() -> None:
    memory = torch.zeros(4, 6, dtype=torch.float32)
    bench.poison(memory[:, :2])
    bench.poison(memory[0, :0])
    bits = memory.view(torch.uint8).view(4, 6, 4)
    assert (bits[:, :2] == bench.POISON_BYTE).all()
    assert (bits[:, 2:] == 0).all()
    bench.poison(memory.t()[4:])
    assert (memory[:, 4:] == bench.POISON_BYTE).all()
    assert (memory[:, 2:4] == 0).all()


OP = OPS["quantize_fp8_1x128"]


def arguments(rows: int, seed: int) -> tuple[Any, ...]:
    x = torch.randn(rows, 256, generator=torch.Generator().manual_seed(seed)).bfloat16()
    return x, torch.zeros(rows, 256).to(torch.float8_e4m3fn), torch.zeros(2, -(-rows // 4) * 4), False


def cases(*rows: int) -> tuple[Case, ...]:
    return tuple(Case(f"t{n}", n, partial(arguments, n), {"columns": 256}, "e4m3") for n in rows)


@pytest.mark.parametrize("rows", [None, (3,), (3, 9), (7,)])
@pytest.mark.parametrize("peers", [False, True])
@pytest.mark.parametrize("variants", [False, True])
def test_a_sweep_measures_what_is_asked_for(
    rows: tuple[int, ...] | None, peers: bool, variants: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And lets peers compile, by the cases that are measured, before the first of them is there."""
    said: list[Any] = []
    monkeypatch.setattr(bench, "number_of_sets", lambda size: 3)

    def compare(
        op: str, shape: Any, sets: Any, work: Any, candidates: Any, replays: int, products: str, apart: Any
    ) -> Any:
        assert (op, replays, products) == (OP.name, 5, "e4m3")
        assert (apart is not None) == (one.apart is not None)
        if apart is not None:
            apart(sets[0])
        assert len({s.args[0].sum().item() for s in sets}) == len(sets) == 3
        said.append((shape, {name: run(sets[0]) for name, run in candidates.items()}))
        return shape

    def load() -> Any:
        said.append("loaded")
        return lambda *args: [args[0]]

    monkeypatch.setattr(bench, "compare", compare)
    one = Bench(
        OP.name,
        cases(1, 3),
        quick=(1,),
        between=cases(9),
        peers={"peer": load},
        ahead=lambda chosen: said.append([case.rows for case in chosen]),
        variants=lambda: {"ours other": lambda *args: None},
    )
    wanted = [n for n in (1, 3, 9) if rows is None or n in rows]
    shapes = [{"case": f"t{n}", "T": n, "columns": 256} for n in wanted]
    assert one.sweep(rows, peers, variants, replays=5) == shapes
    before = [wanted, "loaded"] if peers else []
    assert said[: len(before)] == before
    for shape, (told, candidates) in zip(shapes, said[len(before) :], strict=True):
        assert told == shape
        assert ("ours other" in candidates, "peer" in candidates) == (variants, peers)
        assert len(candidates) == variants + peers
        assert not variants or candidates["ours other"] is None
        assert not peers or candidates["peer"].tensors[0].shape == (shape["T"], 256)
    assert replace(one, ahead=None).sweep(rows, peers, replays=5) == shapes
    seen: list[Any] = []
    one = replace(one, ahead=None, apart=lambda args: seen.append(args) or (*args[:-1], False))
    assert one.sweep(rows, replays=5) == shapes
    assert [args[0].shape[0] for args in seen] == wanted


def test_right_is_what_the_reference_writes_over_poison() -> None:
    inputs = bench.InputSet(Bench(OP.name, cases(3), quick=()), OP, arguments(3, 0))
    args = inputs.args
    assert inputs.right(inputs.ours)
    assert not inputs.right(lambda: None), "what was there before is poisoned"
    inputs.ours()
    good = [args[1].clone(), args[2].clone()]
    assert inputs.right(lambda: good), "another project returns its results"
    assert not inputs.right(lambda: [good[0], good[1] + 1])
    assert not inputs.right(lambda: bench._Peers([good[0], good[1] + 1]))
    near = replace(inputs, bench=replace(inputs.bench, peer_same=bench.close(0, 2.0)))
    assert near.right(lambda: bench._Peers([good[0], good[1] + 1]))
    assert not near.right(lambda: [good[0], good[1] + 1]), "ours must be the same"


def test_what_an_op_reads_too_is_given_back() -> None:
    inputs = bench.InputSet(Bench(OP.name, cases(3), quick=(), inputs=("out",)), OP, arguments(3, 0))
    inputs.args[1].copy_(torch.arange(768.0).view(3, 256) / 768)
    before = inputs.args[1].clone()
    assert inputs.right(inputs.ours)
    assert torch.equal(inputs.args[1].view(torch.uint8), before.view(torch.uint8))
