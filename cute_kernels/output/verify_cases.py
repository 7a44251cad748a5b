# SPDX-License-Identifier: Apache-2.0
"""Calls that the kernels of this package are verified with: edge cases of values, sizes, strides and positions."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from cute_kernels.formats import HEAD_DIM, ROPE_DIM
from cute_kernels.output.ops import output_scale_shape
from cute_kernels.runtime.verify import Example, raw_memory

_POISON = 0xA5
_POSITIONS = (0, 127, 128, 511, 512, 10**6, -3, 2**32 + 1, -(2**62), 2**62)
_SHAPES = ((0, 2, 2), (1, 8, 8), (3, 2, 3), (9, 1, 5), (66, 16, 8), (131, 8, 8))
"""(tokens, groups, heads per group)"""


def _rotation(tokens: int, groups: int, per_group: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """(o, positions, table, out): the middle heads of a wider buffer, and a poisoned result with gaps."""
    g = torch.Generator().manual_seed(tokens)
    heads = groups * per_group
    magnitudes = torch.exp2(torch.randint(-40, 40, (tokens, heads + 2, 4, 1), generator=g).float())
    values = (torch.randn(tokens, heads + 2, 4, 128, generator=g) * magnitudes).reshape(tokens, heads + 2, HEAD_DIM)
    values[torch.rand(values.shape, generator=g) < 0.05] = 0.0
    positions = torch.randint(0, 512, (tokens,), generator=g)
    positions[: len(_POSITIONS)] = torch.tensor(_POSITIONS)[:tokens]
    angle = torch.arange(512)[:, None] * 10000.0 ** (-torch.arange(ROPE_DIM // 2) / 32)
    table = torch.cat([angle.cos(), angle.sin()], dim=1)
    out = torch.empty(groups, tokens + 1, per_group * HEAD_DIM + 32, dtype=dtype)
    raw_memory(out).fill_(_POISON)
    return values.bfloat16()[:, 1:-1], positions, table, out[:, :tokens, 16:-16].transpose(0, 1)


def inv_rope_quant() -> Iterator[Example]:
    """fused_inv_rope_fp8_quant(o, positions, cos_sin_cache, out, scale_out, n_groups, heads_per_group,
    tma_aligned_scales, use_pdl)"""
    for is_packed in (False, True):
        for tokens, groups, per_group in _SHAPES:
            tensors = _rotation(tokens, groups, per_group, torch.float8_e4m3fn)
            shape = output_scale_shape(tokens, groups, per_group, is_packed)
            memory = torch.empty(shape[0], shape[1] + 1, shape[2], dtype=torch.int32 if is_packed else torch.float32)
            raw_memory(memory).fill_(_POISON)
            name = f"{tokens} tokens of {groups} x {per_group} heads, {'packed' if is_packed else 'fp32'} scales"
            yield Example(name, (*tensors, memory[:, 1:], groups, per_group, is_packed, False))
    patterns = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(32, 4, HEAD_DIM)
    _, positions, table, out = _rotation(32, 2, 2, torch.float8_e4m3fn)
    scales = torch.empty(output_scale_shape(32, 2, 2))
    arguments = (patterns, positions, table, out, scales, 2, 2, False, True)
    yield Example("every bf16 number, infinities and NaN, launched as a dependent", arguments)


def inv_rope() -> Iterator[Example]:
    """fused_inv_rope(o, positions, cos_sin_cache, out, n_groups, heads_per_group, use_pdl)"""
    for tokens, groups, per_group in _SHAPES:
        tensors = _rotation(tokens, groups, per_group, torch.bfloat16)
        name = f"{tokens} tokens of {groups} x {per_group} heads"
        yield Example(name, (*tensors, groups, per_group, tokens == 9))


EXAMPLES = {"fused_inv_rope_fp8_quant": inv_rope_quant, "fused_inv_rope": inv_rope}
