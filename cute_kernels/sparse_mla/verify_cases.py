# SPDX-License-Identifier: Apache-2.0
"""Calls that the kernels of this package are verified with: formats, lists, head counts, lengths, holes, parts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from cute_kernels import formats
from cute_kernels.output.ops import output_scale_shape
from cute_kernels.runtime.verify import Example, clone_arguments, raw_memory, same_bytes
from cute_kernels.sparse_mla import schedule
from cute_kernels.sparse_mla.arguments import list_tiles
from cute_kernels.sparse_mla.call import MixedCall, PagedCall
from cute_kernels.sparse_mla.converted import LEAST_HEADS

_FP8, _BF16, _E4M3 = formats.FP8_DS_MLA.id, formats.PLAIN_BF16.id, formats.PLAIN_FP8.id
_MXFP8, _NVFP4 = formats.MXFP8_V41.id, formats.NVFP4_V41.id
_MXFP8_SPLIT, _NVFP4_SPLIT = formats.MXFP8_V41_SPLIT.id, formats.NVFP4_V41_SPLIT.id
_LARGEST = 1.0
"""No value of a cache is larger, so that rounding explains what the tolerances allow, also where sums cancel."""

_SCALE = 0.15
"""Of the softmax: a few columns of a row count much more than the others."""

_OUT_ABSOLUTE, _OUT_RELATIVE = 1e-3, 2.01 / 128
_LSE_ABSOLUTE, _LSE_RELATIVE = 1e-6, 8.01 / 65536
_SUMS_ABSOLUTE = 5e-6
"""2^-22 |q| |k| _SCALE: fp32 sums of products, also where they cancel and a row has few columns."""

NOT_QUANTIZED = (None, None, None)
"""positions, cos_sin_cache and out_scale of a call without output_quant."""

_BAD = (-1, -(2**31), 2**31 - 1, -7)
"""Slots and pages outside every cache."""


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
        if not same_bytes(raw_memory(mine), raw_memory(theirs)):
            return f"memory of argument {number} was written that should not"
    return ""


def _agree_decode(got: Sequence[Any], want: Sequence[Any]) -> str:
    return (
        _close("out", got[15], want[15], _OUT_ABSOLUTE, _OUT_RELATIVE)
        or _close("lse", got[16], want[16], _LSE_ABSOLUTE, _LSE_RELATIVE)
        or _untouched(got[:17], want[:17], (15, 16))
    )


def _agree_merge(got: Sequence[Any], want: Sequence[Any]) -> str:
    is_fp32 = want[3].dtype == torch.float32
    return (
        _close("out", got[3], want[3], 1e-5, 1e-5 if is_fp32 else 2.0**-7)
        or _close("lse", got[4], want[4], 1e-6, 1e-6)
        or _untouched(got, want, (3, 4))
    )


def _agree_prefill(got: Sequence[Any], want: Sequence[Any]) -> str:
    return (
        _close("out", got[6], want[6], _OUT_ABSOLUTE, _OUT_RELATIVE)
        or _close("max_logits", got[7], want[7], _SUMS_ABSOLUTE, _LSE_RELATIVE)
        or _close("lse", got[8], want[8], _SUMS_ABSOLUTE, _LSE_RELATIVE)
        or _untouched(got, want, (6, 7, 8))
    )


def _agree_paged(got: Sequence[Any], want: Sequence[Any]) -> str:
    return (
        _agree_prefill(got[10:19], want[10:19])
        or _untouched(got[:16], want[:16], ())
        or _untouched(got[20:], want[20:], ())
    )


def _agree_mixed(got: Sequence[Any], want: Sequence[Any]) -> str:
    return (
        _close("out", got[12], want[12], _OUT_ABSOLUTE, _OUT_RELATIVE)
        or _close("lse", got[13], want[13], _SUMS_ABSOLUTE, _LSE_RELATIVE)
        or _untouched(got[:14], want[:14], (12, 13))
    )


def _agree_codes(place: int, got: Sequence[Any], want: Sequence[Any]) -> str:
    """What codes and scales mean may be off by a step of e4m3; the scales' padding is zero."""
    values = []
    for codes, scales in ((args[place], args[-1]) for args in (got, want)):
        by_token = scales.permute(2, 0, 1)[: len(codes)].repeat_interleave(128, dim=2)
        values.append(codes.float() * by_token)
    padding = got[-1][..., len(got[place]) :]
    others = [i for i in range(place + 1, len(got) - 3) if got[i] is not None]  # first of them a result of logits
    return (
        _close("codes", values[0], values[1], 4e-3, 0.13)
        or _close("the scales' padding", padding, torch.zeros_like(padding), 0.0, 0.0)
        or _close("logits", got[others[0]], want[others[0]], _SUMS_ABSOLUTE, _LSE_RELATIVE)
        or _untouched(got, want, (place, *others, len(got) - 1))
    )


def quantized(example: Example, place: int) -> Example:
    """The call with output_quant. place: number of out"""
    arguments = list(example.args)
    out = arguments[place]
    heads, rows = out.shape[-2], math.prod(out.shape[:-2])
    groups = 2 if heads % 2 == 0 else 1
    g = torch.Generator().manual_seed(rows + heads)
    codes = torch.empty(rows + 1, groups, heads // groups * formats.HEAD_DIM + 16, dtype=torch.float8_e4m3fn)
    raw_memory(codes).fill_(0x7F)
    angles = torch.rand(300, formats.ROPE_DIM // 2, generator=g) * math.tau
    arguments[place] = codes[1:, :, :-16]
    arguments[-3:] = (
        torch.randint(-5, 310, (rows,), generator=g),
        torch.cat([angles.cos(), angles.sin()], dim=1),
        torch.full(output_scale_shape(rows, groups, heads // groups), math.nan),
    )
    return Example(f"{example.name}, as codes", tuple(arguments), partial(_agree_codes, place))


def _of_raw_queries(example: Example, place: int) -> Example:
    """The call, which has output_quant, with q_norm. place: number of q_squares"""
    arguments = list(example.args)
    rows = arguments[0].flatten(0, -3).double()
    arguments[place : place + 2] = rows.unflatten(2, (4, 128)).square().sum(-1).flatten(1).float(), 1e-6
    return Example(f"{example.name}, of raw queries", tuple(arguments), example.agree)


def _poisoned(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """NaN, with NaN around it that must stay."""
    wide = torch.full((shape[0] + 1, *shape[1:-2], shape[-2] + 1, shape[-1] + 8), math.nan, dtype=dtype)
    return wide[1:, ..., :-1, :-8]


def _pool(kv_format: str, pages: int, rows: int, g: torch.Generator) -> torch.Tensor:
    """A cache with NaN between its pages, a NaN record at the end, and random records before. As much as a row is
    between pages, so that copies can gather rows; less with 7 rows in pages of plain formats."""
    fmt: Any = formats.FORMATS[kv_format]
    row = 576 if kv_format == _FP8 else formats.HEAD_DIM * fmt.dtype.itemsize
    between = 64 if rows == 7 and kv_format != _FP8 else row
    cache = fmt.allocate(pages, rows, page_stride=fmt.page_stride(rows) + between)
    raw_memory(cache).fill_(0xFF)
    slots = torch.arange(pages * rows - 1)
    values = torch.randn(len(slots), formats.HEAD_DIM, generator=g) * (_LARGEST / 4)
    fmt.write(cache, rows, slots, values.clamp(-_LARGEST, _LARGEST).bfloat16())
    return cache


def _slots(shape: tuple[int, int, int], capacity: int, g: torch.Generator) -> torch.Tensor:
    """Random slots with holes between them; never that of the NaN record, which is the last."""
    slots = torch.randint(0, capacity - 1, shape, generator=g)
    holes = torch.tensor([*_BAD, capacity])[torch.randint(0, len(_BAD) + 1, shape, generator=g)]
    return torch.where(torch.rand(shape, generator=g) < 0.15, holes, slots).int()


@dataclass(frozen=True)
class _Case:
    """One call: sizes, formats and kinds of its lists, lengths, how rows are split.

    second     format of the second cache; "" there is none
    dense      whether a block table names its rows
    lengths    lengths of the first list, by request in turn; "by token" and "none" are the other forms
    partial    whether the result is fp32, without a sink
    long       rows whose second list is whole, beside short ones; 0: its lengths are as the first one's, by token if it
               is dense
    """

    heads: int
    first: str = _FP8
    second: str = ""
    dense: bool = False
    b: int = 3
    s_q: int = 1
    columns: int = 128
    extra: int = 0
    rows: tuple[int, int] = (64, 64)
    lengths: tuple[int, ...] | str = "none"
    num_splits: int = 0
    split_tokens: int = 0
    partial: bool = False
    long_rows: str = "auto"
    long: int = 0

    def _lengths(self, columns: int, g: torch.Generator) -> torch.Tensor | None:
        if isinstance(self.lengths, tuple):
            return torch.tensor(self.lengths, dtype=torch.int32)[torch.arange(self.b) % len(self.lengths)]
        if self.lengths == "by token":
            return torch.randint(-1, columns + 9, (self.b, self.s_q), generator=g, dtype=torch.int32)
        return None

    def _second_list(self, g: torch.Generator) -> tuple[Any, ...]:
        """Arguments 7 to 11."""
        if not self.second:
            return (None,) * 5
        rows = self.rows[1]
        pages = max(4, 2 * self.extra // rows)
        pool = _pool(self.second, pages, rows, g)
        long_and_short = None
        if self.long:
            long_and_short = torch.randint(0, self.extra // 8, (self.b,), generator=g, dtype=torch.int32)
            long_and_short[:: self.b // self.long] = self.extra
        if not self.dense:
            slots = _slots((self.b, self.s_q, self.extra), pages * rows, g)
            given = self._lengths(self.extra, g) if long_and_short is None else long_and_short
            return pool, slots, given, None, None
        table = torch.randint(0, pages - 1, (self.b, -(-self.extra // rows)), generator=g, dtype=torch.int32)
        table[0, ::3] = -1
        table[-1, -1:] = pages
        visible = torch.randint(-3, self.extra + 9, (self.b, self.s_q), generator=g, dtype=torch.int32)
        visible[0] = self.extra
        if long_and_short is not None:
            visible = long_and_short[:, None].repeat(1, self.s_q)
        return pool, None, None, table, visible

    def example(self, name: str) -> Example:
        g = torch.Generator().manual_seed(self.heads + self.columns)
        b, s_q, h, pages = self.b, self.s_q, self.heads, 5
        q = torch.randn(b, s_q, h + 1, formats.HEAD_DIM + 8, generator=g).bfloat16()[:, :, 1:, 8:]
        pool = _pool(self.first, pages, self.rows[0], g)
        slots = _slots((b, s_q, self.columns), pages * self.rows[0], g)
        second = self._second_list(g)
        tiles = list_tiles(slots, second[0], second[1], second[3])
        if self.num_splits or self.split_tokens:
            size = schedule.workspace_bytes(b * s_q, h, tiles, self.num_splits, self.split_tokens, 0)
        else:
            size = b * s_q * h * min(tiles, 3) * schedule.SPLIT_BYTES
        workspace = torch.full((size // 4,), math.nan)
        arguments = (
            *(q, pool, slots, self._lengths(self.columns, g), None if self.partial else _sink(h)),
            *(_SCALE, self.first, *second, self.second or _FP8, self.num_splits, self.split_tokens),
            _poisoned((b, s_q, h, formats.HEAD_DIM), torch.float32 if self.partial else torch.bfloat16),
            torch.full((b, h, s_q), -777.0),
            workspace if size else None,
            *(0, self.long_rows, None, 0.0),
            *NOT_QUANTIZED,
        )
        return Example(name, arguments, _agree_decode)


_AROUND_TILES = (0, 1, 63, 64, 65, 127, 128, 999)

_DECODE = {
    "window, lengths around tiles": _Case(64, b=8, lengths=_AROUND_TILES),
    "window, 8 heads": _Case(8, s_q=2, lengths="by token"),
    "no columns": _Case(16, columns=0),
    "window and picks": _Case(64, second=_FP8, extra=200, s_q=2, lengths="by token"),
    "128 heads": _Case(128, second=_FP8, extra=512, lengths=(128, 70)),
    "16 heads, pages of 53 and 2": _Case(16, second=_FP8, extra=77, rows=(53, 2), lengths=(5, 128)),
    "32 heads, one row": _Case(32, second=_FP8, extra=512, b=1),
    "5 heads, odd widths": _Case(5, second=_FP8, extra=3, columns=1),
    "100 heads": _Case(100, second=_FP8, extra=65, columns=129, b=2),
    "window and pages": _Case(64, second=_FP8, dense=True, extra=300, rows=(64, 2), s_q=2, lengths="by token"),
    "window, 66 heads": _Case(66, b=8, lengths=_AROUND_TILES),
    "128 heads, one part": _Case(128, second=_FP8, extra=500, lengths=(128, 0, 65), num_splits=1),
    "70 heads and pages": _Case(70, second=_FP8, dense=True, extra=400, rows=(64, 2), lengths="by token", num_splits=1),
    "parts of 70 heads and pages": _Case(70, second=_FP8, dense=True, extra=300, rows=(7, 2), num_splits=2, b=2),
    "parts of 128 heads": _Case(128, second=_FP8, extra=512, split_tokens=128, lengths=(0, 128, 70), partial=True),
    "8 heads, pages": _Case(8, second=_FP8, dense=True, extra=130, rows=(64, 64)),
    "an empty block table": _Case(8, second=_FP8, dense=True, extra=0, rows=(64, 2)),
    "3 parts": _Case(64, second=_FP8, extra=512, num_splits=3, lengths=(128, 0, 65)),
    "3 parts of pages, 16 heads": _Case(16, second=_FP8, dense=True, extra=600, rows=(64, 2), num_splits=3, b=4),
    "12 parts": _Case(16, second=_FP8, extra=700, num_splits=12, b=2),
    "20 parts": _Case(64, second=_FP8, extra=1300, num_splits=20, b=2, lengths=(128, 70)),
    "more parts than tiles": _Case(128, num_splits=9, lengths=(0, 3, 128)),
    "parts of 128 columns": _Case(40, second=_FP8, extra=512, split_tokens=128, s_q=2, lengths="by token"),
    "parts of parts": _Case(64, second=_FP8, extra=300, num_splits=2, partial=True),
    "a partial result": _Case(32, second=_FP8, dense=True, extra=70, rows=(64, 2), partial=True),
    "bf16": _Case(64, first=_BF16, lengths=_AROUND_TILES, b=8),
    "bf16 and bf16, 8 heads": _Case(8, first=_BF16, second=_BF16, extra=200, rows=(7, 53), s_q=2, lengths="by token"),
    "fp8 and bf16 pages": _Case(16, second=_BF16, dense=True, extra=130, rows=(64, 2), num_splits=2),
    "bf16 and fp8": _Case(128, first=_BF16, second=_FP8, extra=65, partial=True),
    "V4.1's window alone": _Case(64, first=_MXFP8, lengths=_AROUND_TILES, b=8),
    "V4.1's window and picks": _Case(64, first=_MXFP8, second=_NVFP4, extra=512, lengths=(128, 70, 0)),
    "fp8 and V4.1's picks, 8 heads": _Case(8, second=_NVFP4, extra=200, rows=(7, 53), s_q=2, lengths="by token"),
    "fp8 and V4.1's picks, parts": _Case(32, second=_NVFP4, extra=512, num_splits=3, b=2),
    "V4.1's rows twice": _Case(16, first=_MXFP8, second=_MXFP8, extra=300, split_tokens=128, lengths=(0, 3, 128)),
    "fp8 and V4.1's rows": _Case(100, second=_MXFP8, extra=70, partial=True),
    "V4.1's window and pages": _Case(64, first=_MXFP8, second=_NVFP4, dense=True, extra=300, rows=(64, 2), s_q=2),
    "V4.1's split window and picks": _Case(64, first=_MXFP8_SPLIT, second=_NVFP4_SPLIT, extra=512, rows=(64, 5)),
    "fp8 and V4.1's pages, parts": _Case(8, second=_NVFP4, dense=True, extra=600, rows=(64, 64), num_splits=3),
    "bf16 and fp8 pages": _Case(32, first=_BF16, second=_FP8, dense=True, extra=99, rows=(64, 2), split_tokens=64),
}


_LISTS: dict[str, dict[str, Any]] = {
    "window": {},
    "window and picks": {"second": _FP8},
    "window and pages": {"second": _FP8, "dense": True},
    "V4.1's window": {"first": _MXFP8},
    "window and V4.1's picks": {"second": _NVFP4},
    "V4.1's window and picks of its rows": {"first": _MXFP8, "second": _MXFP8},
    "V4.1's window and picks": {"first": _MXFP8, "second": _NVFP4},
}

_FORMS = {
    f"{heads} heads, {lists}, {columns} columns, {splits} splits": _Case(
        heads,
        b=2,
        columns=128 if "second" in given else columns,
        extra=columns if "second" in given else 0,
        num_splits=splits,
        **given,
    )
    for heads, (lists, given), (columns, splits) in itertools.product(
        (8, 16, 32, 64), _LISTS.items(), ((60, 0), (1200, 0), (200, 1), (200, 2))
    )
}
"""Every number of heads that kernels differ by, with every kind of list: few rows and how they are cut is the op's
choice, or the call's."""

_ROWS = {
    f"{rows} rows of {heads} heads, {lists}": _Case(
        heads, b=rows, columns=128 if "second" in given else 300, extra=300 if "second" in given else 0, **given
    )
    for heads, rows in ((8, 40), (16, 40), (8, 140))
    for lists, given in _LISTS.items()
}
"""Rows that choose the kernel of up to 16 heads."""

_HALVES = {
    f"48 rows of {heads} heads, {long} of them long, {lists}, in halves": _Case(
        heads, b=48, extra=1000, lengths=(128, 70, 0), long_rows="halves", long=long, **_LISTS[lists]
    )
    for heads in (32, 64)
    for lists in ("window and picks", "window and pages")
    for long in (3, 24)
}
"""Fewer rows than Hopper's decode takes at a time, in one split; long ones have 16 to 18 tiles. On a GPU of 132
multiprocessors there are clusters to help with three of them, and not with 24."""


def decode() -> Iterator[Example]:
    """sparse_mla_decode, arguments in the schema's order"""
    yield from _decode(_DECODE | _FORMS | _ROWS | _HALVES)


def _decode(cases: dict[str, _Case]) -> Iterator[Example]:
    for name, case in cases.items():
        example = case.example(name)
        yield example
        if case.first == _FP8 and case.second in ("", _FP8, _NVFP4) and not case.partial:
            as_codes = quantized(example, 15)
            yield as_codes
            if case.heads > 16:
                yield _of_raw_queries(as_codes, 20)


def merge() -> Iterator[Example]:
    """merge_attention_states(outs, lses, attn_sink, out, lse)"""
    fp32, bf16 = torch.float32, torch.bfloat16
    for n, b, s_q, h, parts_dtype, dtype in (
        (1, 3, 1, 5, fp32, bf16),
        (2, 0, 1, 8, fp32, bf16),
        (2, 7, 2, 64, fp32, bf16),
        (4, 3, 1, 128, bf16, bf16),
        (10, 2, 1, 16, fp32, fp32),
        (15, 2, 2, 8, fp32, bf16),
        (21, 1, 2, 9, fp32, fp32),
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


def prefill() -> Iterator[Example]:
    """sparse_mla_prefill, arguments in the schema's order"""
    for s_q, h, topk, s_kv, with_lengths in (
        (3, 64, 128, 300, False),
        (9, 128, 300, 1000, True),
        (150, 64, 130, 700, True),
        (5, 8, 640, 640, False),
        (4, 13, 77, 90, True),
        (2, 100, 65, 64, False),
        (3, 16, 0, 5, True),
        (3, 32, 7, 0, False),
        (0, 64, 7, 5, True),
    ):
        g = torch.Generator().manual_seed(s_q + h)
        q = torch.randn(s_q, h + 1, formats.HEAD_DIM + 8, generator=g).bfloat16()[:, 1:, 8:]
        kv = torch.full((s_kv, 1, formats.HEAD_DIM + 8), math.nan, dtype=torch.bfloat16)[..., 8:]
        # the last row stays NaN
        values = torch.randn(max(s_kv - 1, 0), formats.HEAD_DIM, generator=g) * (_LARGEST / 4)
        kv[:-1, 0] = values.clamp(-_LARGEST, _LARGEST).bfloat16()
        indices = _slots((s_q, 1, topk), max(s_kv, 2), g)
        indices[indices >= s_kv] = -1
        lengths = torch.randint(-1, topk + 9, (s_q,), generator=g, dtype=torch.int32) if with_lengths else None
        results = torch.full((s_q, h), -777.0), torch.full((s_q, h), -777.0)
        arguments = (q, kv, indices, _SCALE, _sink(h), lengths, _poisoned((s_q, h, formats.HEAD_DIM), torch.bfloat16))
        example = Example(
            f"{s_q} x {h}, {topk} of {s_kv}", (*arguments, *results, None, 0.0, *NOT_QUANTIZED), _agree_prefill
        )
        yield example
        if h in (64, 100, 128, 8, 16):
            as_codes = quantized(example, 6)
            yield as_codes
            if h >= 64:
                yield _of_raw_queries(as_codes, 9)


_PAGED: tuple[tuple[Any, ...], ...] = (
    ((1, 1, 1), 300, 64, 128, 4, 200, (64, 64), (_FP8, _FP8)),
    ((1, 30, 0, 5, 1), 90, 8, 128, 4, 65, (53, 2), (_FP8, _FP8)),
    ((200,), 0, 128, 70, 128, None, (256, 2), (_FP8, _FP8)),
    ((3, 140), 500, 16, 128, 0, None, (64, 64), (_FP8, _FP8)),
    ((3, 140), 200, 16, 128, 1, 0, (64, 64), (_FP8, _FP8)),
    ((1, 2), 7, 100, 7, 4, None, (2, 7), (_FP8, _FP8)),
    ((150,), 200, 32, 128, 4, None, (64, 7), (_FP8, _BF16)),
    ((1, 2), 200, 13, 7, 4, 30, (2, 7), (_BF16, _FP8)),
    ((70,), 200, 64, 128, 0, None, (64, 64), (_BF16, _BF16)),
    ((70,), 200, 64, 128, 0, None, (64, 64), (_MXFP8, _MXFP8)),
    ((3, 60), 500, 64, 128, 2, 200, (64, 7), (_MXFP8, _NVFP4)),
    ((1, 2), 200, 13, 7, 1, None, (2, 7), (_FP8, _NVFP4)),
    ((), 0, 32, 64, 4, 5, (64, 64), (_FP8, _FP8)),
    ((3, 60), 500, 64, 128, 4, 200, (64, 64), (_FP8, _FP8), 1, 0),
    ((3, 60), 500, 128, 128, 4, 200, (64, 64), (_FP8, _FP8), 3, 0),
    ((1, 2, 40), 300, 16, 128, 1, None, (64, 64), (_FP8, _FP8), 0, 128),
    ((2, 5), 700, 16, 128, 1, None, (64, 64), (_FP8, _FP8), 8, 0),
    *(
        ((2, 5), 150, h, 128, ratio, width, (64, 64), (_FP8, _FP8))
        for h, (ratio, width) in itertools.product((16, 32, 64), ((0, None), (4, 65), (128, None)))
    ),
)
"""(query_lens, earlier tokens at most, heads, window, compress ratio, columns, rows of pages, formats, splits)"""


def paged() -> Iterator[Example]:
    """sparse_mla_prefill_paged, arguments in the schema's order"""
    yield from _paged(_PAGED)


def _paged(calls: Sequence[Sequence[Any]]) -> Iterator[Example]:
    for query_lens, more, h, window, ratio, width, rows, fmts, *splits in calls:
        g = torch.Generator().manual_seed(sum(query_lens) + h)
        n = sum(query_lens) + 2  # two rows are nobody's
        q = torch.randn(n, h + 1, formats.HEAD_DIM + 8, generator=g).bfloat16()[:, 1:, 8:]
        starts = torch.tensor([0, *query_lens], dtype=torch.int32).cumsum(0, dtype=torch.int32) + 3
        seq_lens = starts.diff() + torch.randint(-2, more + 1, (len(query_lens),), generator=g, dtype=torch.int32)
        longest = max([1, *seq_lens.tolist()])

        def cache(fmt: str, entries: int, page_rows: int, g: Any = g, requests: int = len(query_lens)) -> Any:
            pages = -(-entries // page_rows) + 1
            table = torch.empty(requests, pages, dtype=torch.int32)
            for row in table:
                row.copy_(torch.randperm(pages, generator=g))
            # the last page ends with NaN: nobody has it
            table[table == pages - 1] = -1
            return _pool(fmt, pages, page_rows, g), table

        other: tuple[Any, Any] = (None, None)
        picks = None
        if ratio:
            other = cache(fmts[1], longest // ratio, rows[1])
            if width is not None:
                picks = torch.randint(-1, max(longest // ratio, 1) + 2, (n, width), generator=g, dtype=torch.int32)
        example = Example(
            f"{query_lens} x {h}, window {window}, {width} columns of ratio {ratio}, {fmts}, pages of {rows}, {splits}",
            (
                *(q, *cache(fmts[0], longest, rows[0]), starts, seq_lens, _SCALE, window, *other, ratio),
                *(picks, _sink(h), *fmts, *(splits or (0, 0))),
                _poisoned((n, h, formats.HEAD_DIM), torch.bfloat16),
                torch.full((n, h), -777.0),
                torch.full((n, h), -777.0),
                *(None, "auto", None, 0.0),
                *NOT_QUANTIZED,
            ),
            _agree_paged,
        )
        yield example
        if set(fmts) == {_FP8} and not any(splits):
            yield quantized(example, 16)
            yield from _gathered(example)


def _gathered(example: Example) -> Iterator[Example]:
    """The call of sparse_mla_prefill_paged with form "gathered", with results as codes, and of raw queries."""
    arguments = list(example.args)
    size = PagedCall(*arguments).gathered_shape.nbytes
    arguments[19:21] = torch.full((size,), 0xFF, dtype=torch.uint8), "gathered"
    found = Example(f"{example.name}, gathered", tuple(arguments), example.agree)
    yield found
    as_codes = quantized(found, 16)
    yield as_codes
    if arguments[0].shape[1] > 16:
        yield _of_raw_queries(as_codes, 21)


def mixed() -> Iterator[Example]:
    """sparse_mla_mixed, arguments in the schema's order"""
    calls = (
        ((1, 1, 1), 64, 128, 200, (64, 64)),
        ((1, 30, 0, 5, 1), 8, 128, 65, (53, 2)),
        ((200,), 128, 70, 64, (256, 64)),
        ((3, 140), 16, 128, None, (64, 64)),
        ((1, 2), 13, 7, 0, (2, 7)),
        ((), 32, 64, 5, (64, 64)),
    )
    for kv_format, (query_lens, h, window, width, rows) in itertools.product((_BF16, _E4M3), calls):
        g = torch.Generator().manual_seed(sum(query_lens) + h)
        n = sum(query_lens) + 2  # two rows are nobody's
        query = torch.randn(n, h + 1, formats.HEAD_DIM + 16, generator=g).to(formats.FORMATS[kv_format].dtype)
        query = query[:, 1:, 16:]
        pools = [_pool(kv_format, -(-300 // page_rows), page_rows, g) for page_rows in rows]
        columns = (window, width or 0)
        slots = [
            _slots((n, 1, count), pool.shape[0] * pool.shape[1], g) for pool, count in zip(pools, columns, strict=True)
        ]
        lengths = torch.randint(-1, sum(columns) + 9, (n,), generator=g, dtype=torch.int32)
        # the first rows of a request may lie before its context
        more = torch.randint(-2, 200, (len(query_lens),), generator=g, dtype=torch.int32)
        starts = torch.tensor([0, *query_lens], dtype=torch.int32).cumsum(0, dtype=torch.int32) + 3
        example = Example(
            f"{query_lens} x {h}, {window} and {width}, pages of {rows[0]} and {rows[1]}, {kv_format}",
            (
                *(query, pools[0], torch.cat(slots, dim=2)[:, 0], None if width is None else pools[1], lengths),
                *(starts.diff() + more, starts, _SCALE, 0.75, _sink(h), window, kv_format),
                _poisoned((n, h, formats.HEAD_DIM), torch.bfloat16),
                torch.full((n, h), -777.0),
                *(None, "direct"),
            ),
            _agree_mixed,
        )
        yield example
        if kv_format == _E4M3 and h >= LEAST_HEADS:
            size = MixedCall(*example.args).converted_bytes
            given = *example.args[:-2], torch.full((size,), 0xFF, dtype=torch.uint8), "converted"
            yield Example(f"{example.name}, converted", given, example.agree)


_SOAK_DECODE = {
    "200 rows of 128 heads": _Case(128, second=_FP8, extra=512, b=200, lengths=(128, 70, 0, 65)),
    "3 parts of 90 rows of 64 heads": _Case(64, second=_FP8, extra=640, b=90, num_splits=3, lengths="by token"),
    "50 rows of 8 heads": _Case(8, second=_FP8, extra=640, b=50, lengths=(128, 70, 0, 65)),
}


def soak_decode() -> Iterator[Example]:
    """sparse_mla_decode of more work tiles than there are CTAs, and of rows that two CTAs share."""
    for name, case in _SOAK_DECODE.items():
        yield case.example(name)


def soak_paged() -> Iterator[Example]:
    """sparse_mla_prefill_paged with as many clusters as run at a time: 2, 4 and 8 parts of a row."""
    for rows, splits in ((60, 2), (28, 4), (14, 8)):
        calls = (((rows,), 700, 64, 128, 4, 400, (64, 64), (_FP8, _FP8), splits, 0),)
        yield from _paged(calls)


SOAK = {"sparse_mla_decode": soak_decode, "sparse_mla_prefill_paged": soak_paged}

EXAMPLES = {
    "merge_attention_states": merge,
    "sparse_mla_decode": decode,
    "sparse_mla_mixed": mixed,
    "sparse_mla_prefill": prefill,
    "sparse_mla_prefill_paged": paged,
}
