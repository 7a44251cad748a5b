# SPDX-License-Identifier: Apache-2.0
"""How near a result must be to the one that was kept."""

from __future__ import annotations

import pytest
import torch

NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NO_GPU])]


def same_bits(got: torch.Tensor, want: torch.Tensor) -> None:
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    assert torch.equal(got.contiguous().view(torch.uint8), want.contiguous().view(torch.uint8))


def steps_apart(got: torch.Tensor, want: torch.Tensor, steps: int, share: float = 1.0) -> None:
    """16 and 8 bit numbers at most so many neighbours apart, and only a share of them apart at all. Zeros are alike."""
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    off = (_ordinal(got) - _ordinal(want)).abs()
    assert int(off.max()) <= steps, f"{int(off.max())} steps apart"
    assert int((off != 0).sum()) <= share * off.numel(), f"{int((off != 0).sum())} of {off.numel()} differ"


def _ordinal(x: torch.Tensor) -> torch.Tensor:
    """Numbers as integers whose neighbours are one apart."""
    kind = {1: torch.int8, 2: torch.int16}[x.element_size()]
    bits = x.contiguous().view(kind).int()
    return torch.where(bits < 0, torch.iinfo(kind).min - bits, bits)


def near(got: torch.Tensor, want: torch.Tensor, relative: float) -> None:
    """Floats apart by a part of the largest number of their row at most; what is not finite is the same."""
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    finite = want.isfinite()
    assert torch.equal(got.float()[~finite], want.float()[~finite])
    largest = want.float().where(finite, torch.tensor(0.0)).abs().amax(dim=-1, keepdim=True)
    off = (got.float() - want.float()).where(finite, torch.tensor(0.0)).abs()
    assert bool((off <= relative * largest).all()), f"off by {float((off / largest.clamp_min(1e-30)).max()):.2e}"
