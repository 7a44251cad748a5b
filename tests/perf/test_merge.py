# SPDX-License-Identifier: Apache-2.0
"""The shapes that merging is measured in, and when its result counts as right; what is measured needs a GPU."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from cute_kernels.runtime.ops import OPS
from cute_kernels.sparse_mla import reference
from cute_kernels.sparse_mla.call import MergeCall
from cute_kernels.sparse_mla.combine import key_for
from cute_kernels.sparse_mla.schedule import choose_splits, head_groups, num_tiles
from perf import merge
from perf.merge import BENCH, CHOSEN, HEADS, OP, PARTS, SHAPES, VARIANTS, name_of, right
from perf.targets import TARGETS_US

COPY_BYTES_PER_US, LAUNCH_US = 4.28e6, 1.2
SMS = 132


def work(batch: int, heads: int, parts: int) -> int:
    """Bytes that the op states for a shape."""
    outs, out = (torch.empty(*lead, batch, 1, heads, 512, device="meta") for lead in ((parts,), ()))
    lses, lse = (torch.empty(*lead, batch, heads, 1, device="meta") for lead in ((parts,), ()))
    cost = OPS[OP].cost
    assert cost is not None
    return int(cost(outs, lses, torch.empty(heads, device="meta"), out.bfloat16(), lse).bytes)


def test_shapes() -> None:
    names = [case.name for case in BENCH.cases]
    assert len(set(names)) == len(names) == len(SHAPES) == 54
    assert names[0] == "b1 h64 parts=2"
    assert {"b1 h128 parts=18", "b8 h64 parts=5", "b128 h128 parts=16"} <= set(names)
    assert "b8 h64 parts=18" not in names
    assert {case.rows for case in BENCH.cases} >= set(BENCH.quick)
    for case, (batch, heads, parts) in zip(BENCH.cases, SHAPES, strict=True):
        assert (case.rows, case.shape["heads"], case.shape["parts"]) == (batch, heads, parts)


def test_bytes_are_those_of_the_parts_once_and_of_the_result() -> None:
    for batch, heads, parts in SHAPES:
        assert work(batch, heads, parts) == batch * heads * (parts * (512 * 4 + 4) + 512 * 2 + 4)


@pytest.mark.parametrize("heads", HEADS)
def test_single_rows_are_cut_as_decode_cuts_them(heads: int) -> None:
    tiles = [num_tiles(128) + num_tiles(entries) for entries in (512, 1024)]
    assert tuple(choose_splits(1, head_groups(heads), count, SMS) for count in tiles) == CHOSEN


def test_targets_are_where_the_memory_leaves_room_for_them() -> None:
    targets = {case: us for (_, op, case), us in TARGETS_US.items() if op == OP}
    assert set(targets.values()) == {3.0}
    floors = {name_of(*shape): work(*shape) / COPY_BYTES_PER_US + LAUNCH_US for shape in SHAPES}
    assert targets.keys() == {case for case, floor in floors.items() if floor < 3.0}


def test_variants_are_kernels() -> None:
    """A block has whole heads, and a thread holds no more vectors than it does in the kernels in use."""
    for fields in VARIANTS:
        for parts in PARTS + CHOSEN:
            key = replace(key_for("sm_90a", True, False, parts), **fields)
            assert key.warps * 32 % (512 // (4 * key.vectors)) == 0
            assert key.held * key.vectors <= 16


def merged() -> tuple[torch.Tensor, ...]:
    """(outs, lses, sink, out, lse) of the reference."""
    g = torch.Generator().manual_seed(1)
    outs = torch.randn(3, 2, 1, 5, 512, generator=g)
    lses, sink = torch.randn(3, 2, 5, 1, generator=g), torch.randn(5, generator=g)
    out, lse = torch.empty(2, 1, 5, 512, dtype=torch.bfloat16), torch.empty(2, 5, 1)
    reference.merge_attention_states(MergeCall(outs, lses, sink, out, lse))
    return outs, lses, sink, out, lse


def test_what_counts_as_right() -> None:
    outs, lses, sink, out, lse = merged()
    weights = (
        lses.softmax(dim=0).transpose(-1, -2)[..., None] * (lse - sink[:, None]).sigmoid().transpose(-1, -2)[..., None]
    )
    assert right([(weights * outs).sum(dim=0).bfloat16(), lses.logsumexp(dim=0)], [out, lse])
    assert not right([(1.01 * weights * outs).sum(dim=0).bfloat16(), lse], [out, lse])
    assert not right([(weights[:2] * outs[:2]).sum(dim=0).bfloat16(), lse], [out, lse])
    for wrong in (lse + 1e-5, lse * math.nan):
        assert not right([out, wrong], [out, lse])
    poisoned = out.clone()
    poisoned[1, 0, 4, 511] = math.nan
    assert not right([poisoned, lse], [out, lse])


def test_variants_are_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    from cute_kernels.sparse_mla import combine

    given: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    monkeypatch.setattr(combine, "launch", lambda *args, **more: given.append((args, more)))
    found = merge._variants()
    assert len(found) == 1 + len(VARIANTS)
    found["ours use_pdl"](1, 2)
    assert given == [((1, 2), {"use_pdl": True})]


@pytest.mark.parametrize("beyond", [0, 1])
def test_a_variant_has_a_second_round_for_parts_that_it_does_not_hold(
    beyond: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cute_kernels.runtime import arch, compile

    keys: list[Any] = []
    monkeypatch.setattr(arch, "arch_of", lambda index: "sm_90a")
    monkeypatch.setattr(compile, "launch", lambda key, *args: keys.append(key))
    fields = next(fields for fields in VARIANTS if "held" in fields)
    run = merge._variants()["ours " + " ".join(f"{name}={value}" for name, value in fields.items())]
    parts = fields["held"] + beyond
    run(torch.zeros(parts, 1, 1, 1, 512), torch.zeros(parts, 1, 1, 1), *(torch.zeros(1) for _ in range(3)))
    assert [(key.held, key.more) for key in keys] == [(fields["held"], beyond == 1)]
