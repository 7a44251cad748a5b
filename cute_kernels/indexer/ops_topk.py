"""The best k columns of each row of scores."""

from __future__ import annotations

from typing import Any

import torch

from cute_kernels.indexer import arguments, reference
from cute_kernels.runtime.checks import Checker
from cute_kernels.runtime.ops import Cost, define_op, nbytes

__all__ = ["all_visible_entries", "top_k_per_row_decode", "top_k_per_row_prefill"]


def _check_common(c: Checker, logits: torch.Tensor, out: torch.Tensor, num_rows: int, k: int) -> None:
    c.tensor("logits", logits, torch.float32, (None, None))
    c.tensor("out", out, torch.int32, (None, None))
    c.require(num_rows >= 0, "num_rows", "a number >= 0", num_rows)
    c.require(num_rows <= logits.shape[0], "num_rows", f"at most the {logits.shape[0]} rows of logits", num_rows)
    c.require(num_rows <= out.shape[0], "out", f"at least num_rows = {num_rows} rows", f"shape {list(out.shape)}")
    c.require(k > 0, "k", "a positive number", k)
    c.require(k <= out.shape[1], "out", f"at least k = {k} columns", f"shape {list(out.shape)}")


def _check_strides(op: str, logits: Any, stride0: int, stride1: int) -> None:
    c = Checker(op)
    c.tensor("logits", logits, torch.float32, (None, None))
    c.ints(stride0=stride0, stride1=stride1)
    for argument, axis, got in (("stride0", 0, stride0), ("stride1", 1, stride1)):
        if logits.shape[axis] > 1:
            c.require(got == logits.stride(axis), argument, f"logits.stride({axis}) = {logits.stride(axis)}", got)


def _cost(lengths: torch.Tensor, k: int, *bounds: torch.Tensor) -> Cost:
    """Rows of at most k columns need no scores."""
    return Cost(bytes=4 * int(lengths[lengths > k].sum()) + 4 * k * lengths.numel() + nbytes(*bounds))


def _check_prefill(
    logits: torch.Tensor,
    row_starts: torch.Tensor,
    row_ends: torch.Tensor,
    out: torch.Tensor,
    num_rows: int,
    k: int,
) -> None:
    c = Checker("top_k_per_row_prefill")
    _check_common(c, logits, out, num_rows, k)
    for argument, value in (("row_starts", row_starts), ("row_ends", row_ends)):
        c.tensor(argument, value, torch.int32, (None,))
        c.require(num_rows <= value.shape[0], argument, f"at least num_rows = {num_rows} rows", list(value.shape))


def _cost_prefill(
    logits: torch.Tensor, row_starts: torch.Tensor, row_ends: torch.Tensor, out: torch.Tensor, num_rows: int, k: int
) -> Cost:
    starts, ends = row_starts[:num_rows], row_ends[:num_rows]
    return _cost(ends.clamp(max=logits.shape[1]).long() - starts.clamp(min=0), k, starts, ends)


_prefill = define_op(
    "top_k_per_row_prefill(Tensor logits, Tensor row_starts, Tensor row_ends, Tensor(a!) out, SymInt num_rows, "
    "SymInt k) -> ()",
    check=_check_prefill,
    reference=reference.top_k_per_row_prefill,
    kernel="cute_kernels.indexer.topk_select:PREFILL",
    cost=_cost_prefill,
)


def top_k_per_row_prefill(
    logits: torch.Tensor,
    row_starts: torch.Tensor,
    row_ends: torch.Tensor,
    out: torch.Tensor,
    num_rows: int,
    stride0: int,
    stride1: int,
    k: int,
) -> None:
    """Pick the k largest scores among columns row_starts[r] .. row_ends[r] - 1 of each row, counted from the start.

    A row of length <= k gets 0, 1, ... length - 1 and then -1, whatever its scores. A longer row gets the k best of its
    columns in unspecified order, but always the same ones: of equal scores (-0 and +0 are equal) the lower column wins,
    -inf is a number, and NaN comes after all numbers, lower columns first.

    logits       fp32 [rows, columns], row-strided; columns outside a row's range may hold anything
    row_starts   int32 [>= num_rows]; a start below 0 counts as 0
    row_ends     int32 [>= num_rows]; an end beyond the columns counts as their number; end <= start: all -1
    out          int32 [>= num_rows, >= k], row-strided; mutated in its first num_rows rows and k columns only
    num_rows     rows to process, at most those of logits
    stride0      logits.stride(0)
    stride1      logits.stride(1), which must be 1
    k            picks per row

    Raises ValueError or TypeError on arguments that do not fit.
    """
    _check_strides("top_k_per_row_prefill", logits, stride0, stride1)
    _prefill(logits, row_starts, row_ends, out, num_rows, k)


def _check_decode(
    logits: torch.Tensor,
    seq_lens: torch.Tensor,
    out: torch.Tensor,
    num_rows: int,
    k: int,
    slot_block_table: torch.Tensor | None,
    slot_rows_per_page: int,
) -> None:
    c = Checker("top_k_per_row_decode")
    _check_common(c, logits, out, num_rows, k)
    c.tensor("seq_lens", seq_lens, torch.int32, (None, None))
    c.require(
        num_rows <= seq_lens.shape[0] * seq_lens.shape[1],
        "seq_lens",
        f"at least num_rows = {num_rows} lengths",
        f"shape {list(seq_lens.shape)}",
    )
    arguments.check_slots(c, seq_lens.shape[0], slot_block_table, slot_rows_per_page)


def _cost_decode(
    logits: torch.Tensor,
    seq_lens: torch.Tensor,
    out: torch.Tensor,
    num_rows: int,
    k: int,
    slot_block_table: torch.Tensor | None,
    slot_rows_per_page: int,
) -> Cost:
    """Of the block table at most a page a pick."""
    lengths = seq_lens.reshape(-1)[:num_rows]
    cost = _cost(lengths.clamp(max=logits.shape[1]), k, lengths)
    picks = int(lengths.clamp(0, k).sum())
    return Cost(bytes=cost.bytes + min(nbytes(slot_block_table), 4 * picks))


_decode = define_op(
    "top_k_per_row_decode(Tensor logits, Tensor seq_lens, Tensor(a!) out, SymInt num_rows, SymInt k, "
    "Tensor? slot_block_table, SymInt slot_rows_per_page) -> ()",
    check=_check_decode,
    reference=reference.top_k_per_row_decode,
    kernel="cute_kernels.indexer.topk_select:DECODE",
    cost=_cost_decode,
)


def top_k_per_row_decode(
    logits: torch.Tensor,
    next_n: int,
    seq_lens: torch.Tensor,
    out: torch.Tensor,
    num_rows: int,
    stride0: int,
    stride1: int,
    k: int,
    *,
    slot_block_table: torch.Tensor | None = None,
    slot_rows_per_page: int = 0,
) -> None:
    """Pick the k largest scores among the first seq_lens columns of each row: `top_k_per_row_prefill` with starts at 0.

    logits               fp32 [rows, columns], row-strided; row b * next_n + j belongs to token j of request b
    next_n               rows per request
    seq_lens             int32 [B, next_n]: columns each row may pick from, <= 0 for none (all -1), at most the columns
                         of logits count. [B] is accepted for next_n = 1 only: lengths do not advance by one per token
    out                  int32 [>= num_rows, >= k], row-strided; mutated in its first num_rows rows and k columns only
    num_rows             rows to process, at most B * next_n
    stride0              logits.stride(0)
    stride1              logits.stride(1), which must be 1
    k                    picks per row
    slot_block_table     int32 [B, width], row-strided: write, in place of each pick x of request b, its slot
                         table[b, x // rows] * rows + x % rows; -1, at the pick's place, where the table has no page
                         >= 0 for it or int32 cannot name the slot. The picks are the same ones, in ascending order.
                         None: picks are written as columns
    slot_rows_per_page   rows of a page, with a table

    Raises ValueError or TypeError on arguments that do not fit.
    """
    c = Checker("top_k_per_row_decode")
    c.tensor("seq_lens", seq_lens, torch.int32)
    c.ints(next_n=next_n)
    c.require(next_n > 0, "next_n", "a positive number", next_n)
    if seq_lens.dim() == 1 and next_n == 1:
        seq_lens = seq_lens[:, None]
    elif seq_lens.dim() != 2 or seq_lens.shape[1] != next_n:
        c.fail("seq_lens", f"one length per row, shape [B, next_n = {next_n}]", f"shape {list(seq_lens.shape)}")
    _check_strides("top_k_per_row_decode", logits, stride0, stride1)
    _decode(logits, seq_lens, out, num_rows, k, slot_block_table, slot_rows_per_page)


def _check_all_visible(
    visible: torch.Tensor, out: torch.Tensor, slot_block_table: torch.Tensor | None, slot_rows_per_page: int
) -> None:
    c = Checker("all_visible_entries")
    c.tensor("visible", visible, torch.int32, (None, None))
    c.tensor("out", out, torch.int32, (visible.shape[0] * visible.shape[1], None))
    arguments.check_slots(c, visible.shape[0], slot_block_table, slot_rows_per_page)


def _cost_all_visible(
    visible: torch.Tensor, out: torch.Tensor, slot_block_table: torch.Tensor | None, slot_rows_per_page: int
) -> Cost:
    entries = int(visible.clamp(0, out.shape[1]).sum())
    return Cost(bytes=nbytes(visible, out) + min(nbytes(slot_block_table), 4 * entries))


_all_visible = define_op(
    "all_visible_entries(Tensor visible, Tensor(a!) out, Tensor? slot_block_table, SymInt slot_rows_per_page) -> ()",
    check=_check_all_visible,
    reference=reference.all_visible_entries,
    kernel="cute_kernels.indexer.topk_select:ALL_VISIBLE",
    cost=_cost_all_visible,
)


def all_visible_entries(
    visible: torch.Tensor,
    k: int,
    *,
    slot_block_table: torch.Tensor | None = None,
    slot_rows_per_page: int = 0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Entries 0 .. visible - 1 of each row, then -1: what picks are where no row can see more than k entries, without
    any scores.

    visible              int32 [B, next_n], any strides, or [B] for one row of each request: entries that row
                         b * next_n + j sees; <= 0: none, more than k: the first k are written
    k                    columns of the result
    slot_block_table     int32 [B, width], row-strided: write slots in place of entries, as `top_k_per_row_decode` does
    slot_rows_per_page   rows of a page, with a table
    out                  int32 [B * next_n, k], row-strided; mutated. None: allocated

    Returns out. Raises ValueError or TypeError on arguments that do not fit.
    """
    c = Checker("all_visible_entries")
    c.tensor("visible", visible, torch.int32)
    if visible.dim() == 1:
        visible = visible[:, None]
    c.tensor("visible", visible, torch.int32, (None, None))
    c.ints(k=k)
    c.require(k > 0, "k", "a positive number", k)
    if out is None:
        out = visible.new_empty((visible.shape[0] * visible.shape[1], k))
    else:
        c.tensor("out", out, torch.int32, (None, None))
        c.require(out.shape[1] == k, "out", f"k = {k} columns", f"shape {list(out.shape)}")
    _all_visible(visible, out, slot_block_table, slot_rows_per_page)
    return out
