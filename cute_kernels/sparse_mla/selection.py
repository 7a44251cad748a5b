"""Which cache rows a query row attends to: what the references and the cost estimates share.

A `Selection` names, for every query row, slots of one paged pool. Whatever is not a row of that pool is -1 and no
address is ever formed from it. Slots are computed for a few query rows at a time, so that long dense selections stay
small.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cute_kernels import formats
from cute_kernels.paging import entries_to_slots, row_positions

SLOT_BUDGET = 1 << 21
"""Slots computed at a time: 16 MiB."""


@dataclass(frozen=True)
class Selection:
    """The rows of one pool that each query row attends to, in column order; a slot named twice counts twice.

    pool    [num_blocks, rows per page, row elements]
    fmt     record format of the pool
    width   columns
    pick    slice of query rows -> slots int64 [n, width]; a value that is not a row of the pool selects nothing
    """

    pool: torch.Tensor
    fmt: Any
    width: int
    pick: Callable[[slice], torch.Tensor]

    @property
    def capacity(self) -> int:
        """Rows in the pool."""
        return self.pool.shape[0] * self.pool.shape[1]

    @property
    def row_bytes(self) -> int:
        """Bytes of one record."""
        return self.fmt.row_elements * self.fmt.dtype.itemsize

    def slots(self, rows: slice) -> torch.Tensor:
        """Slots int64 [n, width] of some query rows, -1 where there is none."""
        slots = self.pick(rows)
        return slots.where(formats.valid_slots(slots, self.capacity), -1)

    def read(self, slots: torch.Tensor) -> torch.Tensor:
        """float64 [n, 512] of the records at `slots`, all of which must lie in the pool."""
        return self.fmt.read(self.pool, self.pool.shape[1], slots).double()


def row_chunks(num_rows: int, columns: int, budget: int) -> list[slice]:
    """Consecutive slices of query rows with about `budget` columns in all, at least one row each."""
    step = max(1, budget // max(1, columns))
    return [slice(first, min(first + step, num_rows)) for first in range(0, num_rows, step)]


def count_rows(selection: Selection, num_rows: int) -> int:
    """Pairs of a query row and a cache row it attends to."""
    chunks = row_chunks(num_rows, selection.width, SLOT_BUDGET)
    return sum(int((selection.slots(rows) >= 0).sum()) for rows in chunks)


def by_slot(pool: torch.Tensor, fmt: Any, slots: torch.Tensor, lengths: torch.Tensor | None) -> Selection:
    """Row t attends to slots[t, j] for j < lengths[t]: slots int32 [n, width], lengths [n] or None for all columns."""
    width = slots.shape[1]

    def pick(rows: slice) -> torch.Tensor:
        picked = slots[rows].long()
        if lengths is None:
            return picked
        column = torch.arange(width, device=slots.device)
        return picked.where(column < lengths[rows, None], -1)

    return Selection(pool, fmt, width, pick)


def by_window(
    pool: torch.Tensor,
    fmt: Any,
    block_table: torch.Tensor,
    requests: torch.Tensor,
    positions: torch.Tensor,
    window_size: int,
) -> Selection:
    """Row t attends to the window_size positions of its request up to positions[t]; to none if that is negative."""
    page_rows = pool.shape[1]
    width = min(window_size, block_table.shape[1] * page_rows)

    def pick(rows: slice) -> torch.Tensor:
        last = positions[rows, None]
        entries = (last - window_size + 1).clamp(min=0) + torch.arange(width, device=positions.device)
        return entries_to_slots(entries.where(entries <= last, -1), requests[rows, None], block_table, page_rows)

    return Selection(pool, fmt, width, pick)


def by_length(
    pool: torch.Tensor, fmt: Any, block_table: torch.Tensor, requests: torch.Tensor, lengths: torch.Tensor
) -> Selection:
    """Row t attends to the entries 0 .. lengths[t] - 1 of its request."""
    page_rows = pool.shape[1]
    longest = int(lengths.max()) if lengths.numel() else 0
    width = max(0, min(longest, block_table.shape[1] * page_rows))

    def pick(rows: slice) -> torch.Tensor:
        entries = torch.arange(width, device=lengths.device)
        entries = entries.where(entries < lengths[rows, None], -1)
        return entries_to_slots(entries, requests[rows, None], block_table, page_rows)

    return Selection(pool, fmt, width, pick)


def by_entry(
    pool: torch.Tensor,
    fmt: Any,
    block_table: torch.Tensor,
    requests: torch.Tensor,
    visible: torch.Tensor,
    entries: torch.Tensor,
) -> Selection:
    """Row t attends to those of entries[t, j], j < visible[t], of its request that are themselves below visible[t]."""
    width = entries.shape[1]

    def pick(rows: slice) -> torch.Tensor:
        picked, limit = entries[rows].long(), visible[rows, None]
        seen = (torch.arange(width, device=entries.device) < limit) & (picked < limit)
        return entries_to_slots(picked.where(seen, -1), requests[rows, None], block_table, pool.shape[1])

    return Selection(pool, fmt, width, pick)


def _per_row(lengths: torch.Tensor | None, batch: int, tokens: int) -> torch.Tensor | None:
    """[b] or [b, s_q] -> [b * s_q]."""
    if lengths is None:
        return None
    return (lengths if lengths.dim() == 2 else lengths[:, None]).expand(batch, tokens).reshape(-1)


def decode_selections(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    indices: torch.Tensor,
    topk_length: torch.Tensor | None,
    kv_format: str,
    extra_k_cache: torch.Tensor | None,
    extra_indices: torch.Tensor | None,
    extra_topk_length: torch.Tensor | None,
    extra_block_table: torch.Tensor | None,
    extra_length: torch.Tensor | None,
    extra_kv_format: str,
) -> list[Selection]:
    """The rows of `sparse_mla_decode`; query row b * s_q + s."""
    batch, tokens = q.shape[:2]
    lengths = _per_row(topk_length, batch, tokens)
    selections = [by_slot(k_cache, formats.FORMATS[kv_format], indices.flatten(0, 1), lengths)]
    if extra_k_cache is None:
        return selections
    fmt = formats.FORMATS[extra_kv_format]
    if extra_indices is not None:
        lengths = _per_row(extra_topk_length, batch, tokens)
        return [*selections, by_slot(extra_k_cache, fmt, extra_indices.flatten(0, 1), lengths)]
    assert extra_block_table is not None
    assert extra_length is not None
    requests = torch.arange(batch, device=q.device).repeat_interleave(tokens)
    return [*selections, by_length(extra_k_cache, fmt, extra_block_table, requests, extra_length.flatten())]


def prefill_selections(kv: torch.Tensor, indices: torch.Tensor, topk_length: torch.Tensor | None) -> list[Selection]:
    """The rows of `sparse_mla_prefill`: kv [s_kv, 1, 512] is a plain pool with pages of one row."""
    return [by_slot(kv, formats.PLAIN_BF16, indices[:, 0], topk_length)]


def paged_selections(
    q: torch.Tensor,
    swa_cache: torch.Tensor,
    swa_block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    window_size: int,
    compressed_cache: torch.Tensor | None,
    compressed_block_table: torch.Tensor | None,
    compress_ratio: int,
    topk_indices: torch.Tensor | None,
    kv_format: str,
    compressed_kv_format: str,
) -> list[Selection]:
    """The rows of `sparse_mla_prefill_paged`."""
    requests, positions = row_positions(q.shape[0], query_start_loc - query_start_loc[:1], seq_lens)
    window = by_window(swa_cache, formats.FORMATS[kv_format], swa_block_table, requests, positions, window_size)
    if compressed_cache is None:
        return [window]
    assert compressed_block_table is not None
    fmt = formats.FORMATS[compressed_kv_format]
    visible = torch.div(positions + 1, compress_ratio, rounding_mode="floor")
    if topk_indices is None:
        return [by_length(compressed_cache, fmt, compressed_block_table, requests, visible), window]
    return [by_entry(compressed_cache, fmt, compressed_block_table, requests, visible, topk_indices), window]


def mixed_selections(
    query: torch.Tensor,
    swa_kv_cache: torch.Tensor,
    sparse_indices: torch.Tensor,
    compressed_kv_cache: torch.Tensor | None,
    sparse_topk_lens: torch.Tensor,
    seq_lens: torch.Tensor,
    cum_seq_lens_q: torch.Tensor,
    window_size: int,
    kv_format: str,
) -> list[Selection]:
    """The rows of `sparse_mla_mixed`."""
    fmt = formats.FORMATS[kv_format]
    _, positions = row_positions(query.shape[0], cum_seq_lens_q - cum_seq_lens_q[:1], seq_lens)
    selections = [by_slot(swa_kv_cache, fmt, sparse_indices[:, :window_size], positions + 1)]
    if compressed_kv_cache is not None:
        lengths = (sparse_topk_lens.long() - window_size).where(positions >= 0, 0)
        selections.append(by_slot(compressed_kv_cache, fmt, sparse_indices[:, window_size:], lengths))
    return selections


def pooled_slots(selections: Sequence[Selection], rows: slice) -> torch.Tensor:
    """The slots of all selections side by side, int64 [n, columns], as if their pools lay end to end; -1 where none."""
    parts, start = [], 0
    for selection in selections:
        slots = selection.slots(rows)
        parts.append((slots + start).where(slots >= 0, -1))
        start += selection.capacity
    return used_columns(torch.cat(parts, dim=1))


def used_columns(slots: torch.Tensor) -> torch.Tensor:
    """`slots` without the columns that are -1 in every row."""
    return slots[:, (slots >= 0).any(dim=0)]


def read_pooled(selections: Sequence[Selection], slots: torch.Tensor) -> torch.Tensor:
    """float64 [n, columns, 512] of `pooled_slots`; rows at -1 are zero. A record named often is decoded once."""
    distinct, inverse = torch.unique(slots, return_inverse=True)
    values = torch.zeros(distinct.numel(), formats.HEAD_DIM, dtype=torch.float64, device=slots.device)
    start = 0
    for selection in selections:
        mine = (distinct >= start) & (distinct < start + selection.capacity)
        values[mine] = selection.read(distinct[mine] - start)
        start += selection.capacity
    return values[inverse]
