# SPDX-License-Identifier: Apache-2.0
"""Which cache rows a query row attends to: what the references and the cost estimates share.

A `Selection` names, for every query row, slots of one paged pool. Whatever is not a row of that pool is -1 and no
address is ever formed from it. Slots are computed for a few query rows at a time, so that long dense selections stay
small.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from cute_kernels import formats
from cute_kernels.formats import KVFormat
from cute_kernels.paging import entries_to_slots, row_positions

if TYPE_CHECKING:
    from cute_kernels.sparse_mla.call import DecodeCall, MixedCall, PagedCall, PrefillCall

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
    fmt: KVFormat
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


def count_rows(selection: Selection, num_rows: int) -> tuple[int, int]:
    """(pairs of a query row and a cache row it attends to, different cache rows)."""
    seen = torch.zeros(selection.capacity, dtype=torch.bool, device=selection.pool.device)
    pairs = 0
    for rows in row_chunks(num_rows, selection.width, SLOT_BUDGET):
        slots = selection.slots(rows)
        attended = slots[slots >= 0]
        pairs += attended.numel()
        seen[attended] = True
    return pairs, int(seen.sum())


def by_slot(pool: torch.Tensor, fmt: KVFormat, slots: torch.Tensor, lengths: torch.Tensor | None) -> Selection:
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
    fmt: KVFormat,
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
    pool: torch.Tensor, fmt: KVFormat, block_table: torch.Tensor, requests: torch.Tensor, lengths: torch.Tensor
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
    fmt: KVFormat,
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


def decode_selections(call: DecodeCall) -> list[Selection]:
    """The rows of `sparse_mla_decode`; query row b * s_q + s."""
    batch, tokens = call.q.shape[:2]
    lengths = _per_row(call.topk_length, batch, tokens)
    selections = [by_slot(call.k_cache, formats.FORMATS[call.kv_format], call.indices.flatten(0, 1), lengths)]
    if call.extra_k_cache is None:
        return selections
    pool, fmt = call.extra_k_cache, formats.FORMATS[call.extra_kv_format]
    if call.extra_indices is not None:
        lengths = _per_row(call.extra_topk_length, batch, tokens)
        return [*selections, by_slot(pool, fmt, call.extra_indices.flatten(0, 1), lengths)]
    assert call.extra_block_table is not None
    assert call.extra_length is not None
    requests = torch.arange(batch, device=call.q.device).repeat_interleave(tokens)
    return [*selections, by_length(pool, fmt, call.extra_block_table, requests, call.extra_length.flatten())]


def prefill_selections(call: PrefillCall) -> list[Selection]:
    """The rows of `sparse_mla_prefill`: kv [s_kv, 1, 512] is a plain pool with pages of one row."""
    return [by_slot(call.kv, formats.PLAIN_BF16, call.indices[:, 0], call.topk_length)]


def paged_selections(call: PagedCall) -> list[Selection]:
    """The rows of `sparse_mla_prefill_paged`."""
    starts = call.query_start_loc - call.query_start_loc[:1]
    requests, positions = row_positions(call.q.shape[0], starts, call.seq_lens)
    fmt = formats.FORMATS[call.kv_format]
    window = by_window(call.swa_cache, fmt, call.swa_block_table, requests, positions, call.window_size)
    if call.compressed_cache is None:
        return [window]
    assert call.compressed_block_table is not None
    pool, table = call.compressed_cache, call.compressed_block_table
    fmt = formats.FORMATS[call.compressed_kv_format]
    visible = torch.div(positions + 1, call.compress_ratio, rounding_mode="floor")
    if call.topk_indices is None:
        return [by_length(pool, fmt, table, requests, visible), window]
    return [by_entry(pool, fmt, table, requests, visible, call.topk_indices), window]


def mixed_selections(call: MixedCall) -> list[Selection]:
    """The rows of `sparse_mla_mixed`."""
    fmt, indices, window_size = formats.FORMATS[call.kv_format], call.sparse_indices, call.window_size
    starts = call.cum_seq_lens_q - call.cum_seq_lens_q[:1]
    _, positions = row_positions(call.query.shape[0], starts, call.seq_lens)
    selections = [by_slot(call.swa_kv_cache, fmt, indices[:, :window_size], positions + 1)]
    if call.compressed_kv_cache is not None:
        lengths = (call.sparse_topk_lens.long() - window_size).where(positions >= 0, 0)
        selections.append(by_slot(call.compressed_kv_cache, fmt, indices[:, window_size:], lengths))
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
