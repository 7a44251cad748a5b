# SPDX-License-Identifier: Apache-2.0
"""What benchmarks of ops share and needs no GPU: when results count as right, poison, a call's arguments."""

from __future__ import annotations

import torch

from perf import bench


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
