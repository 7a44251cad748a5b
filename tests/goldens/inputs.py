# SPDX-License-Identifier: Apache-2.0
"""Arguments of the calls that are kept. Values that do not matter are few different ones: files are compressed."""

from __future__ import annotations

from typing import Any

import torch

from tests import helpers


def levels(shape: tuple[int, ...], seed: int, count: int) -> torch.Tensor:
    """fp32, an odd `count` of values half a unit apart around zero."""
    drawn = torch.randint(0, count, shape, generator=helpers.generator(seed))
    return (drawn - count // 2).float() / 2


def record_pages(fmt: Any, num_blocks: int, block_size: int) -> torch.Tensor:
    """Poisoned whole pages, uint8 [num_blocks, page stride]."""
    stride = fmt.page_stride(block_size)
    return torch.full((num_blocks, stride), helpers.POISON_BYTE, dtype=torch.uint8)


def repeated(x: torch.Tensor, heads: int) -> torch.Tensor:
    """Heads of a query [..., h, d] or of a sink [h], over and over."""
    dim = max(x.dim() - 2, 0)
    return torch.cat([x] * (heads // x.shape[dim]), dim=dim)
