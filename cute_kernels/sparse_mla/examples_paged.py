"""Calls of sparse_mla_prefill_paged for `python -m cute_kernels verify`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from cute_kernels import formats
from cute_kernels.runtime.verify import Example

Pools = Callable[[str, int, int, torch.Generator], torch.Tensor]

_FP8, _BF16 = formats.FP8_DS_MLA.id, formats.PLAIN_BF16.id


def paged(
    pool: Pools,
    poisoned: Callable[..., torch.Tensor],
    sink: Callable[[int], torch.Tensor],
    scale: float,
    agree: Callable[..., str],
    quantized: Callable[[Example, int], Example],
) -> Iterator[Example]:
    """sparse_mla_prefill_paged, arguments in the schema's order.

    pool       (format, pages, rows, generator) -> a cache whose last record is NaN
    poisoned   (shape, dtype) -> a result to be written
    quantized  (example, number of out) -> the call with output_quant
    """
    for query_lens, more, h, window, ratio, width, rows, fmts, *splits in (
        ((1, 1, 1), 300, 64, 128, 4, 200, (64, 64), (_FP8, _FP8)),
        ((1, 30, 0, 5, 1), 90, 8, 128, 4, 65, (53, 2), (_FP8, _FP8)),
        ((200,), 0, 128, 70, 128, None, (256, 2), (_FP8, _FP8)),
        ((3, 140), 500, 16, 128, 0, None, (64, 64), (_FP8, _FP8)),
        ((3, 140), 200, 16, 128, 1, 0, (64, 64), (_FP8, _FP8)),
        ((1, 2), 7, 100, 7, 4, None, (2, 7), (_FP8, _FP8)),
        ((150,), 200, 32, 128, 4, None, (64, 7), (_FP8, _BF16)),
        ((1, 2), 200, 13, 7, 4, 30, (2, 7), (_BF16, _FP8)),
        ((70,), 200, 64, 128, 0, None, (64, 64), (_BF16, _BF16)),
        ((), 0, 32, 64, 4, 5, (64, 64), (_FP8, _FP8)),
        ((3, 60), 500, 64, 128, 4, 200, (64, 64), (_FP8, _FP8), 1, 0),
        ((3, 60), 500, 128, 128, 4, 200, (64, 64), (_FP8, _FP8), 3, 0),
        ((1, 2, 40), 300, 16, 128, 1, None, (64, 64), (_FP8, _FP8), 0, 128),
    ):
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
            return pool(fmt, pages, page_rows, g), table

        other: tuple[Any, Any] = (None, None)
        picks = None
        if ratio:
            other = cache(fmts[1], longest // ratio, rows[1])
            if width is not None:
                picks = torch.randint(-1, max(longest // ratio, 1) + 2, (n, width), generator=g, dtype=torch.int32)
        example = Example(
            f"{query_lens} x {h}, window {window}, {width} columns of ratio {ratio}, {fmts}, pages of {rows}, {splits}",
            (
                *(q, *cache(fmts[0], longest, rows[0]), starts, seq_lens, scale, window, *other, ratio),
                *(picks, sink(h), *fmts, *(splits or (0, 0))),
                poisoned((n, h, formats.HEAD_DIM), torch.bfloat16),
                torch.full((n, h), -777.0),
                torch.full((n, h), -777.0),
                *(None, None, None),
            ),
            agree,
        )
        yield example
        if set(fmts) == {_FP8} and not any(splits):
            yield quantized(example, 16)
