"""Argument checks and costs that the sparse attention ops share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from cute_kernels import formats
from cute_kernels.runtime.checks import Checker
from cute_kernels.runtime.ops import Cost, nbytes
from cute_kernels.sparse_mla import schedule
from cute_kernels.sparse_mla.selection import Selection, count_rows

MAX_HEADS = 128
PLAIN_PAGE_MULTIPLE = 16
PAGED_FORMATS = (formats.FP8_DS_MLA, formats.PLAIN_BF16)


def check_query(c: Checker, argument: str, q: Any, dtypes: tuple[torch.dtype, ...], leading: Sequence[str]) -> None:
    """q [*leading, h, 512] with 1 <= h <= 128."""
    c.tensor(argument, q, dtypes, (*leading, "h", formats.HEAD_DIM))
    c.require(1 <= q.shape[-2] <= MAX_HEADS, argument, f"1 to {MAX_HEADS} heads", f"shape {list(q.shape)}")


def check_cache(c: Checker, argument: str, cache: Any, fmt: formats.KVFormat) -> None:
    """A paged cache of the given format whose pages start where kernels can address them.

    Pages of fp8_ds_mla must lie multiples of 576 bytes apart, so that the records of a whole pool form one table of
    576-byte rows; those of plain caches multiples of 16.
    """
    fmt.check(c, argument, cache)
    c.require(cache.shape[1] >= 1, argument, "at least one row per page", f"shape {list(cache.shape)}")
    multiple = fmt.alignment if fmt is formats.FP8_DS_MLA else PLAIN_PAGE_MULTIPLE
    if cache.shape[0] > 1:
        stride = cache.stride(0) * fmt.dtype.itemsize
        c.require(stride % multiple == 0, argument, f"a page stride that is a multiple of {multiple} bytes", stride)


def check_sink(c: Checker, argument: str, sink: Any) -> None:
    c.tensor(argument, sink, torch.float32, ("h",), optional=True)


def check_lengths(c: Checker, argument: str, lengths: Any) -> None:
    """int32 [b] or [b, s_q], or None."""
    by_token = isinstance(lengths, torch.Tensor) and lengths.dim() == 2
    c.tensor(argument, lengths, torch.int32, ("b", "s_q") if by_token else ("b",), optional=True)


def list_tiles(indices: Any, extra_k_cache: Any, extra_indices: Any, extra_block_table: Any) -> Any:
    """Tiles of the longest row that the widths of a decode call's lists allow.

    The arguments need not be checked: what is not a tensor has no tiles.
    """
    widths = [
        x.shape[-1] if isinstance(x, torch.Tensor) and x.dim() else 0
        for x in (indices, extra_indices, extra_block_table)
    ]
    if widths[2]:
        is_cache = isinstance(extra_k_cache, torch.Tensor) and extra_k_cache.dim() > 1
        widths[2] *= extra_k_cache.shape[1] if is_cache else 0
    return sum(schedule.num_tiles(width) for width in widths)


def check_absent(c: Checker, reason: str, **arguments: Any) -> None:
    """Every given argument must be None."""
    for argument, value in arguments.items():
        c.require(value is None, argument, f"None {reason}", "a tensor")


def check_partial(c: Checker, out: torch.Tensor, attn_sink: torch.Tensor | None) -> None:
    """fp32 output is a partial result: the sink must be left to the merge that makes the whole."""
    if out.dtype == torch.float32:
        c.require(attn_sink is None, "attn_sink", "None with an fp32 out (a partial result)", "a tensor")


def check_splits(c: Checker, num_splits: int, split_tokens: int) -> None:
    """How many parts a row is cut into, or their size; at most one of the two is not 0."""
    c.require(num_splits >= 0, "num_splits", "a number >= 0", num_splits)
    tile = schedule.TILE
    c.require(
        split_tokens >= 0 and split_tokens % tile == 0, "split_tokens", f"0 or a multiple of {tile}", split_tokens
    )
    c.require(num_splits == 0 or split_tokens == 0, "split_tokens", f"0 with num_splits = {num_splits}", split_tokens)


def check_batch(c: Checker, argument: str, starts: Any, seq_lens: Any) -> None:
    """starts int32 [R + 1] and seq_lens int32 [R]."""
    c.tensor("seq_lens", seq_lens, torch.int32, ("R",))
    c.tensor(argument, starts, torch.int32, (None,))
    c.require(
        starts.shape[0] == seq_lens.shape[0] + 1, argument, f"R + 1 = {seq_lens.shape[0] + 1} elements", starts.shape[0]
    )


def attention_cost(q: torch.Tensor, out: torch.Tensor, selections: Sequence[Selection]) -> Cost:
    """Attended cache rows, q and out must move; each attended row costs two products of 512 per head."""
    heads = q.shape[-2]
    num_rows = q.numel() // (heads * formats.HEAD_DIM)
    counts = [count_rows(s, num_rows) for s in selections]
    moved = sum(count * s.row_bytes for count, s in zip(counts, selections, strict=True))
    return Cost(bytes=moved + nbytes(q, out), flops=2 * heads * sum(counts) * 2 * formats.HEAD_DIM)
