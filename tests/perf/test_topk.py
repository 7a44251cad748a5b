# SPDX-License-Identifier: Apache-2.0
"""The shapes that the picks of a row are measured in; what is measured needs a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cute_kernels.runtime.arch import SMEM_BYTES
from perf import topk
from perf.grid import LENGTHS
from perf.topk import (
    BENCHES,
    DECODE,
    LONG,
    PICKS,
    PREFILL,
    UNTUNED_DECODE,
    UNTUNED_PREFILL,
    VARIANTS,
    same_picks,
)


def test_shapes() -> None:
    every, decode, prefill = BENCHES
    assert every.op == "all_visible_entries"
    assert (decode.op, prefill.op) == ("top_k_per_row_decode", "top_k_per_row_prefill")
    for bench, shapes, untuned in ((decode, DECODE + LONG, UNTUNED_DECODE), (prefill, PREFILL, UNTUNED_PREFILL)):
        names = [case.name for case in bench.cases if not case.name.endswith(("slots", *LENGTHS))]
        wanted = [(*shape, k) for shape in shapes for k in PICKS]
        wanted += [(*shape, k) for shape in untuned for k in (512, 1024, 2048)]
        assert names == [f"{rows}x{columns} k={k}" for rows, columns, k in wanted]
        assert {case.rows for case in bench.cases} >= set(bench.quick)
        assert "vllm-per-row" in bench.peers
        assert all(case.name.endswith(" between") and case.shape["group"] == "between" for case in bench.between)
        assert {case.shape["k"] for case in bench.between} == {512, 1024, 2048}
    for kind in LENGTHS:
        assert len([case for case in decode.cases if case.name.endswith(kind)]) == 6


def test_variants_are_kernels() -> None:
    topk_select: Any = pytest.importorskip("cute_kernels.indexer.topk_select")
    keys = [topk_select.of_shape("sm_90a", **fields) for fields in VARIANTS]
    assert len(set(keys)) == len(keys)
    assert all(key.smem_bytes <= SMEM_BYTES["sm_90a"] for key in keys)


def test_peers_may_order_picks_as_they_like() -> None:
    want = torch.arange(2000).view(2, 1000)
    assert same_picks([want.flip(1)], [want])
    assert not same_picks([want + 1000], [want])
    other = want.clone()
    other[0, 0] = 1500
    assert same_picks([other], [want]), "one of 2000, wherever it is in order"
    other[0] = 7
    assert not same_picks([other], [want]), "a pick that comes twice"
    short = torch.full_like(want, -1)
    assert same_picks([short], [short])
    assert not same_picks([short], [want])


def test_a_pick_that_comes_twice_is_none_too_many() -> None:
    """Entry 0 counts like any other; -1, of a row that has no more, may come as often as it likes."""
    want = torch.arange(4)[None]
    for entry in range(4):
        got = want.clone()
        got[0, (entry + 1) % 4] = entry
        assert not same_picks([got], [want])
    short = torch.tensor([[5, -1, -1, -1]])
    assert same_picks([short.flip(1)], [short])


def test_variants_take_rows_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A key that holds a row, and not more than four times its columns; of decode calls those that want columns."""
    pytest.importorskip("cute_kernels.indexer.topk")
    from cute_kernels.indexer import topk_select
    from cute_kernels.runtime import arch

    kept: list[Any] = []
    monkeypatch.setattr(arch, "arch_of", lambda index: "sm_90a")
    monkeypatch.setattr(topk_select, "launch_with", lambda *args: kept.append(args))
    lens, out = torch.ones(2, 1, dtype=torch.int32), torch.zeros(2, 4, dtype=torch.int32)
    starts, ends = torch.zeros(2, dtype=torch.int32), torch.ones(2, dtype=torch.int32)
    for op, bounds, rest in (
        ("prefill", topk_select.prefill_bounds(starts, ends), (starts, ends, out, 2, 4, True)),
        ("decode", topk_select.decode_bounds(lens), (lens, out, 2, 4, None, 0, True)),
    ):
        found = topk._variants(op)
        assert len(found) == len(VARIANTS)
        run = next(iter(found.values()))
        key = topk_select.of_shape("sm_90a", **VARIANTS[0])
        for columns in (key.capacity, -(-key.capacity // 4)):
            logits = torch.zeros(2, columns)
            run(logits, *rest)
            assert kept.pop() == (key, logits, *bounds, out, 2, 4)
        for columns in (key.capacity + 1, -(-key.capacity // 4) - 1):
            with pytest.raises(NotImplementedError, match="holds rows of"):
                run(torch.zeros(2, columns), *rest)
    with pytest.raises(NotImplementedError, match="no slots"):
        run(torch.zeros(2, key.capacity), lens, out, 2, 4, torch.zeros(1, 1), 64)
    assert kept == []
