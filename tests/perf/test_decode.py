# SPDX-License-Identifier: Apache-2.0
"""The shapes that decode is measured in; what is measured in them needs a GPU."""

from __future__ import annotations

import pytest
import torch

from perf.decode import GRID, OP, OWN, PLANNED, block_of
from perf.decode_inputs import SPREAD, Shape, in_order, near
from perf.targets import TARGETS_US


def test_shapes_are_what_the_peers_are_known_by() -> None:
    names = [shape.name for shape in (*GRID, *OWN)]
    assert len(GRID) == 60
    assert len(set(names)) == len(names)
    assert names[:2] == ["b1 h64 swa128", "b8 h64 swa128"]
    assert "b64 h64 c4_128+512 s_q=4" in names
    assert "b256 h64 c128_128+1024 dense" in names
    assert "b32 h64 c4_128+512 split_tokens=256" in names
    assert set(PLANNED) <= set(GRID)


def test_targets_are_of_shapes_that_are_measured() -> None:
    targets = {case for _, op, case in TARGETS_US if op == OP}
    assert targets
    assert targets <= {shape.name for shape in (*GRID, *OWN)}


def test_lengths() -> None:
    assert Shape("c128_128+256", 64, 3).lengths() == [256, 256, 256]
    for batch in (1, 64, 256):
        lengths = Shape("c4_128+512", 64, batch, unequal=SPREAD).lengths()
        assert len(lengths) == batch
        assert min(lengths) == 1
        assert max(lengths) == (512 if batch > 1 else 1)
        assert len(set(lengths)) == batch


def test_padding() -> None:
    assert Shape("c4_128+512", 64, 5).padded(64) == 0
    assert Shape("c4_128+512", 8, 5).padded(16) == 0.5
    assert Shape("c4_128+512", 100, 5).padded(64) == 1 - 100 / 128
    # lengths 1 and 512: 3 tiles and 10
    assert Shape("c4_128+512", 64, 2, unequal=SPREAD).padded(64) == 1 - (129 + 640) / (13 * 64)


def test_blocks_of_heads_come_from_the_kernel() -> None:
    pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
    for shape in (*GRID, *OWN):
        assert block_of(shape, "sm_90a") in (8, 16, 32, 64)


def test_arguments_are_in_the_order_of_the_schema() -> None:
    q, out = torch.zeros(1), torch.ones(1)
    found = in_order({"out": out, "q": q, "split_tokens": 64})
    assert found[0] is q
    assert found[13:16] == (0, 64, out)
    assert found[1] is None


def test_near() -> None:
    want = torch.randn(3, 2, 512, generator=torch.Generator().manual_seed(1)) * 0.05
    assert near(want.bfloat16(), want)
    assert not near(want * 1.004, want)
    assert not near(want.index_fill(2, torch.tensor([7]), 0.3), want)
