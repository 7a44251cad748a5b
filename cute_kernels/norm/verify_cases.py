# SPDX-License-Identifier: Apache-2.0
"""Calls that the kernels of this package are verified with: edge cases of values, widths, strides and positions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch

from cute_kernels import numerics
from cute_kernels.linear.call import QuantizeCall
from cute_kernels.linear.ops import activation_scale_shape
from cute_kernels.linear.reference import quantize_fp8_1x128
from cute_kernels.linear.scales import BLOCK
from cute_kernels.runtime.verify import Example

_EPS = 1e-6
_GAP = 8
"""Columns between rows."""


def _rows(*shape: int, seed: int) -> torch.Tensor:
    """Rows of very different magnitudes with NaN between them, a zero row and zeros among them."""
    g = torch.Generator().manual_seed(seed)
    magnitudes = torch.exp2(torch.randint(-20, 20, (*shape[:-1], 1), generator=g).float())
    values = torch.randn(shape, generator=g) * magnitudes
    values[torch.rand(shape, generator=g) < 0.05] = 0.0
    values[-1:] = 0.0
    wide = torch.full((*shape[:-1], shape[-1] + _GAP), torch.nan, dtype=torch.bfloat16)
    wide[..., :-_GAP] = values
    return wide[..., :-_GAP]


def _weight(width: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(width, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _poisoned(like: torch.Tensor) -> torch.Tensor:
    wide = torch.full((*like.shape[:-1], like.shape[-1] + _GAP), -777.0, dtype=torch.bfloat16)
    return wide[..., :-_GAP]


def _agree(outputs: Sequence[int], got: Sequence[Any], want: Sequence[Any]) -> str:
    """Whether outputs, given by number, agree within one bf16 step, with everything between their rows untouched."""
    for number in outputs:
        mine, theirs = (_whole(t[number]).float() for t in (got, want))
        apart = ~((mine - theirs).abs() <= theirs.abs() * 2.0**-7)
        if bool(apart.any()):
            return f"argument {number}: {int(apart.sum())} elements are more than one bf16 step apart"
    return ""


def _whole(rows: torch.Tensor) -> torch.Tensor:
    """A result with the columns between its rows."""
    return rows.as_strided((*rows.shape[:-1], rows.shape[-1] + _GAP), rows.stride(), rows.storage_offset())


def q_kv() -> Iterator[Example]:
    """fused_q_kv_rmsnorm(qr, kv, q_weight, kv_weight, eps, qr_out, kv_out, use_pdl)"""
    for tokens, width, kv_width, kv_dtype in (
        (0, 1024, 512, torch.bfloat16),
        (1, 1024, 512, torch.bfloat16),
        (13, 1024, 512, torch.float32),
        (67, 1536, 512, torch.bfloat16),
        (5, 1280, 512, torch.bfloat16),
        (5, 8, 3000, torch.float32),
        (6, 4096, 24, torch.float32),
    ):
        qr, kv = _rows(tokens, width, seed=1), _rows(tokens, kv_width, seed=2)
        weights = _weight(width, 3), _weight(kv_width, 4, kv_dtype)
        arguments = (qr, kv, *weights, _EPS, _poisoned(qr), _poisoned(kv), tokens == 5)
        yield Example(f"{tokens} rows of {width} and {kv_width}", arguments, partial(_agree, (5, 6)))


def _agree_quantized(got: Sequence[Any], want: Sequence[Any]) -> str:
    """Whether codes and scales of a query are those of its bf16 values if these are given, and near those of the
    reference, whose values may be a bf16 step away. The rest as _agree has it."""
    query = got[8]
    difference = _agree((7,) if query is None else (7, 8), got, want)
    if difference:
        return difference
    (codes, scales), (their_codes, their_scales) = ((args[5], args[6]) for args in (got, want))
    rows, columns = codes.shape
    if bool(scales[:, rows:].any()):
        return "scale_out: the columns of tokens that do not exist are not zero"
    between = [_whole(t.view(torch.uint8))[:, columns:] for t in (codes, their_codes)]
    if not torch.equal(*between):
        return "out: bytes between the rows were written"
    if query is not None:
        nearest, exact = torch.empty_like(codes), torch.empty_like(scales)
        quantize_fp8_1x128(QuantizeCall(query, nearest, exact, False))
        if not torch.equal(exact, scales) or not torch.equal(nearest.view(torch.uint8), codes.view(torch.uint8)):
            return "out or scale_out: not what quantize_fp8_1x128 makes of qr_out"
    steps = [s[:, :rows].t().repeat_interleave(BLOCK, dim=1)[:, :columns] for s in (scales, their_scales)]
    mine, theirs = numerics.from_e4m3(codes) * steps[0], numerics.from_e4m3(their_codes) * steps[1]
    bound = torch.maximum(torch.maximum(mine.abs(), theirs.abs()) * 2.0**-3, torch.maximum(*steps) * 2.0**-9)
    apart = ~((mine - theirs).abs() <= bound)
    return f"out: {int(apart.sum())} codes are more than one step apart" if bool(apart.any()) else ""


def q_kv_quant() -> Iterator[Example]:
    """fused_q_kv_rmsnorm_quant(qr, kv, q_weight, kv_weight, eps, out, scale_out, kv_out, qr_out, use_pdl)"""
    for tokens, width, kv_width, has_query, kv_dtype in (
        (0, 1024, 512, False, torch.bfloat16),
        (1, 1024, 512, False, torch.bfloat16),
        (3, 1536, 512, True, torch.float32),
        (67, 1536, 512, False, torch.bfloat16),
        (5, 200, 2048, True, torch.float32),
        (301, 1536, 512, True, torch.float32),
        (302, 1024, 512, False, torch.bfloat16),
        (303, 1536, 512, False, torch.bfloat16),
        (2, 1280, 512, False, torch.bfloat16),
        (304, 1280, 512, False, torch.bfloat16),
        (259, 1032, 24, True, torch.float32),
    ):
        qr, kv = _rows(tokens, width, seed=11), _rows(tokens, kv_width, seed=12)
        weights = _weight(width, 13), _weight(kv_width, 14, kv_dtype)
        codes = torch.full((tokens, width + _GAP), 0xA5, dtype=torch.uint8)[:, :-_GAP].view(torch.float8_e4m3fn)
        scales = torch.full(activation_scale_shape(tokens, width), -777.0)
        query = _poisoned(qr) if has_query else None
        arguments = (qr, kv, *weights, _EPS, codes, scales, _poisoned(kv), query, tokens == 5)
        yield Example(f"{tokens} rows of {width} and {kv_width}", arguments, _agree_quantized)


def mtp_input() -> Iterator[Example]:
    """fused_mtp_input_rmsnorm(inputs_embeds, positions, previous_hidden_states, enorm_weight, hnorm_weight, eps,
    hc_mult, enorm_out, hnorm_out, use_pdl)"""
    for tokens, width, streams, dtype, weight_dtype in (
        (0, 4096, 4, torch.int64, torch.bfloat16),
        (9, 4096, 4, torch.int32, torch.float32),
        (14, 4096, 4, torch.int64, torch.bfloat16),
        (34, 7168, 3, torch.int64, torch.bfloat16),
        (2, 5120, 4, torch.int64, torch.bfloat16),
    ):
        embeds, previous = _rows(tokens, width, seed=5), _rows(tokens, streams, width, seed=6)
        positions = torch.arange(tokens, dtype=dtype) % 3
        embeds[::6] = torch.nan
        weights = _weight(width, 7, weight_dtype), _weight(width, 8)
        outs = _poisoned(embeds), _poisoned(previous)
        arguments = (embeds, positions, previous, *weights, _EPS, streams, *outs, tokens == 9)
        yield Example(f"{tokens} rows of {width}, {streams} streams", arguments, partial(_agree, (7, 8)))


def shared_head() -> Iterator[Example]:
    """mtp_shared_head_rmsnorm(hidden_states, weight, eps, out, use_pdl)"""
    for tokens, width in ((0, 4096), (1, 7168), (65, 4096), (3, 40), (2, 10000), (2, 5120), (70, 512)):
        x = _rows(tokens, width, seed=9)
        arguments = (x, _weight(width, 10), _EPS, _poisoned(x), tokens == 3)
        yield Example(f"{tokens} rows of {width}", arguments, partial(_agree, (3,)))


EXAMPLES = {
    "fused_q_kv_rmsnorm": q_kv,
    "fused_q_kv_rmsnorm_quant": q_kv_quant,
    "fused_mtp_input_rmsnorm": mtp_input,
    "mtp_shared_head_rmsnorm": shared_head,
}
