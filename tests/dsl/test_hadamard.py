# SPDX-License-Identifier: Apache-2.0
"""The device's Hadamard transform executed on numpy arrays, against numerics."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cute_kernels import numerics
from tests.dsl import words

transforms = pytest.importorskip("cute_kernels.dsl.transforms", reason="CuTe DSL is not installed")


@pytest.fixture(autouse=True)
def on_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transforms, "ptx", words.PTX)
    monkeypatch.setattr(transforms, "cute", words.CUTE)
    monkeypatch.setattr(transforms, "Float32", np.float32)


@pytest.mark.parametrize(("held", "run"), [(4, None), (8, None), (16, 8), (16, 4), (32, None), (128, None), (8, 2)])
def test_every_layout_gives_the_same_bits(held: int, run: int | None) -> None:
    g = torch.Generator().manual_seed(held)
    rows = torch.randn(32 * held // 128 * 50, 128, generator=g)
    rows *= torch.exp2(torch.randint(-20, 20, rows.shape, generator=g).float())
    rows[3] = 0.0
    rows[4, 7], rows[5, 8], rows[6] = torch.inf, torch.nan, -0.0
    width, lanes = run or held, 128 // held
    lane = np.arange(32)
    column = [i % width + lane % lanes * width + i // width * width * lanes for i in range(held)]
    row = lane // lanes
    per_warp = rows.numpy().reshape(50, -1, 128)
    with np.errstate(all="ignore"):
        got = transforms.hadamard([per_warp[:, row, column[i]] for i in range(held)], words.Word(lane), run)
    want = numerics.hadamard(rows).numpy().reshape(50, -1, 128)
    for i in range(held):
        np.testing.assert_array_equal(got[i].view(np.int32), want[:, row, column[i]].view(np.int32))
