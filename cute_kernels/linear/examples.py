"""Calls that the kernels of this room are verified with: edge cases of values, widths and strides."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from cute_kernels.linear.ops_quantize import activation_scale_shape
from cute_kernels.runtime.verify import Example

_GAP = 8
"""Columns between rows."""


def quantize() -> Iterator[Example]:
    """quantize_fp8_1x128(x, out, scale_out, use_pdl)"""
    for tokens, columns in ((0, 512), (1, 4096), (3, 7168), (9, 8), (66, 1536), (13, 1000), (4, 136)):
        g = torch.Generator().manual_seed(tokens)
        magnitudes = torch.exp2(torch.randint(-40, 40, (tokens, columns), generator=g).float())
        values = torch.randn(tokens, columns, generator=g) * magnitudes
        values[torch.rand(tokens, columns, generator=g) < 0.3] = 0.0
        values[:, ::37] = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0, 448.0]).repeat(columns)[
            : columns // 37 + 1
        ]
        values[2::5] = 0.0
        x = torch.full((tokens, columns + _GAP), torch.nan, dtype=torch.bfloat16)[:, :-_GAP]
        x.copy_(values)
        out = torch.full((tokens, columns + _GAP), 0xA5, dtype=torch.uint8)[:, :-_GAP].view(torch.float8_e4m3fn)
        scales = torch.full(activation_scale_shape(tokens, columns), -777.0)
        yield Example(f"{tokens} rows of {columns}", (x, out, scales, tokens % 2 == 1))


EXAMPLES = {"quantize_fp8_1x128": quantize}
