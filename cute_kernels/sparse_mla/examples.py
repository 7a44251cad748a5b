"""Calls that the kernels of this room are verified with."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from cute_kernels import formats
from cute_kernels.runtime.verify import Example, clone_arguments, raw_memory


def _sink(heads: int) -> torch.Tensor:
    values = [-math.inf, 0.5, math.inf, 3.0, -20.0]
    return torch.tensor([values[h % 5] for h in range(heads)])


def _close(name: str, got: Any, want: Any, absolute: float, relative: float) -> str:
    """ "", or how far a result is off: it must be within one of the two tolerances, and infinite where it should."""
    got, want = got.double(), want.double()
    apart = torch.where(got == want, 0.0, (got - want).abs())
    wrong = ~((apart <= absolute) | (apart <= relative * want.abs()))
    if not bool(wrong.any()):
        return ""
    return f"{name}: {int(wrong.sum())} of {wrong.numel()} elements are off, by up to {apart.max().item():.3g}"


def _untouched(got: Sequence[Any], want: Sequence[Any], results: Sequence[int]) -> str:
    """ "", or that memory changed apart from the results, which are given by number."""
    for number, (mine, theirs) in enumerate(zip(got, want, strict=True)):
        if not isinstance(mine, torch.Tensor):
            continue
        if number in results:
            mine, theirs = (clone_arguments((t,), torch.device("cpu"))[0].zero_() for t in (mine, theirs))
        if not torch.equal(raw_memory(mine), raw_memory(theirs)):
            return f"memory of argument {number} was written that should not"
    return ""


def _agree_merge(got: Sequence[Any], want: Sequence[Any]) -> str:
    is_fp32 = want[3].dtype == torch.float32
    return (
        _close("out", got[3], want[3], 1e-5, 1e-5 if is_fp32 else 2.0**-7)
        or _close("lse", got[4], want[4], 1e-6, 1e-6)
        or _untouched(got, want, (3, 4))
    )


def _poisoned(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """NaN, with NaN around it that must stay."""
    wide = torch.full((shape[0] + 1, *shape[1:-2], shape[-2] + 1, shape[-1] + 8), math.nan, dtype=dtype)
    return wide[1:, ..., :-1, :-8]


def merge() -> Iterator[Example]:
    """merge_attention_states(outs, lses, attn_sink, out, lse)"""
    fp32, bf16 = torch.float32, torch.bfloat16
    for n, b, s_q, h, parts_dtype, dtype in (
        (1, 3, 1, 5, fp32, bf16),
        (2, 0, 1, 8, fp32, bf16),
        (2, 7, 2, 64, fp32, bf16),
        (4, 3, 1, 128, bf16, bf16),
        (10, 2, 1, 16, fp32, fp32),
        (17, 2, 3, 3, bf16, fp32),
        (70, 1, 2, 9, fp32, bf16),
    ):
        g = torch.Generator().manual_seed(n + h)
        outs = torch.randn(n, b, s_q, h, formats.HEAD_DIM, generator=g).to(parts_dtype)
        lses = torch.randn(n, b, h, s_q, generator=g) * 5
        lses[torch.rand(lses.shape, generator=g) < 0.2] = math.inf
        lses[torch.rand(lses.shape, generator=g) < 0.1] = -math.inf
        outs[lses.isinf().transpose(-1, -2)] = math.nan
        results = _poisoned((b, s_q, h, formats.HEAD_DIM), dtype), torch.full((b, h, s_q), -777.0)
        sink = None if dtype == fp32 else _sink(h)
        yield Example(f"{n} parts of {b} x {s_q} x {h}", (outs, lses, sink, *results), _agree_merge)


EXAMPLES = {"merge_attention_states": merge}
