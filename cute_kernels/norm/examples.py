"""Calls that the kernels of this room are verified with: edge cases of values, widths, strides and positions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch

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
    for tokens, width, kv_width in ((0, 1024, 512), (1, 1024, 512), (67, 1536, 512), (5, 8, 3000), (6, 4096, 24)):
        qr, kv = _rows(tokens, width, seed=1), _rows(tokens, kv_width, seed=2)
        weights = _weight(width, 3), _weight(kv_width, 4, torch.float32)
        arguments = (qr, kv, *weights, _EPS, _poisoned(qr), _poisoned(kv), tokens == 5)
        yield Example(f"{tokens} rows of {width} and {kv_width}", arguments, partial(_agree, (5, 6)))


def mtp_input() -> Iterator[Example]:
    """fused_mtp_input_rmsnorm(inputs_embeds, positions, previous_hidden_states, enorm_weight, hnorm_weight, eps,
    hc_mult, enorm_out, hnorm_out, use_pdl)"""
    for tokens, width, streams, dtype in (
        (0, 4096, 4, torch.int64),
        (9, 4096, 4, torch.int32),
        (34, 7168, 3, torch.int64),
    ):
        embeds, previous = _rows(tokens, width, seed=5), _rows(tokens, streams, width, seed=6)
        positions = torch.arange(tokens, dtype=dtype) % 3
        embeds[::6] = torch.nan
        weights = _weight(width, 7, torch.float32), _weight(width, 8)
        outs = _poisoned(embeds), _poisoned(previous)
        arguments = (embeds, positions, previous, *weights, _EPS, streams, *outs, tokens == 9)
        yield Example(f"{tokens} rows of {width}, {streams} streams", arguments, partial(_agree, (7, 8)))


def shared_head() -> Iterator[Example]:
    """mtp_shared_head_rmsnorm(hidden_states, weight, eps, out, use_pdl)"""
    for tokens, width in ((0, 4096), (1, 7168), (65, 4096), (3, 40), (2, 10000)):
        x = _rows(tokens, width, seed=9)
        arguments = (x, _weight(width, 10), _EPS, _poisoned(x), tokens == 3)
        yield Example(f"{tokens} rows of {width}", arguments, partial(_agree, (3,)))


EXAMPLES = {
    "fused_q_kv_rmsnorm": q_kv,
    "fused_mtp_input_rmsnorm": mtp_input,
    "mtp_shared_head_rmsnorm": shared_head,
}
