# SPDX-License-Identifier: Apache-2.0
"""Block tables and batches of requests in plain torch, for references and metadata.

A block table is int32 [requests, width]: column j of a request's row names the page of its cache that holds the rows
j * rows_per_page and on; a negative number is no page. Row r of page p is slot p * rows_per_page + r of the pool.

Every product is 64-bit, nothing invalid forms an address.
"""

from __future__ import annotations

import torch

CONTEXT_PAGE = 256
"""Tokens of a page that one rank of a context group owns: 64 entries of ratio 4, 2 of ratio 128."""


def entries_to_slots(
    entries: torch.Tensor, requests: torch.Tensor, block_table: torch.Tensor, rows_per_page: int
) -> torch.Tensor:
    """Slots int64 of request-local entries (row numbers of a request's cache); -1 where there is none.

    entries and requests broadcast against each other. An entry is mapped iff it is >= 0, its request is a row of the
    table, its page column lies inside the table and the table holds a page >= 0 there.
    """
    entries = entries.long()
    requests, entries = torch.broadcast_tensors(requests.long(), entries)
    column = torch.div(entries, rows_per_page, rounding_mode="floor")
    num_requests, width = block_table.shape
    known = (entries >= 0) & (requests >= 0) & (requests < num_requests) & (column < width)
    if num_requests == 0 or width == 0:
        return torch.full_like(entries, -1)
    zero = torch.zeros_like(column)
    page = block_table[requests.where(known, zero), column.where(known, zero)].long()
    slot = page * rows_per_page + entries % rows_per_page
    return slot.where(known & (page >= 0), torch.full_like(slot, -1))


def to_index(slots: torch.Tensor) -> torch.Tensor:
    """int32 form of int64 slots for an index tensor; negative slots and those beyond int32 become -1."""
    named = (slots >= 0) & (slots <= torch.iinfo(torch.int32).max)
    return slots.where(named, torch.full_like(slots, -1)).int()


def of_request(values: torch.Tensor, requests: torch.Tensor) -> torch.Tensor:
    """int64 values[requests], 0 for a request that does not exist."""
    count = values.shape[0]
    requests = requests.long()
    known = (requests >= 0) & (requests < count)
    return torch.nn.functional.pad(values.long(), (0, 1))[requests.masked_fill(~known, count)]


def row_positions(num_rows: int, starts: torch.Tensor, seq_lens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(request, position) int64 [num_rows] of each row of a batch. A row that no request covers has position -1.

    Request r owns rows starts[r] .. starts[r + 1] - 1, starts [R + 1] ascending, and its last row is at position
    seq_lens[r] - 1: where it has more rows than context, the first ones have negative positions.
    """
    row = torch.arange(num_rows, device=seq_lens.device)
    if seq_lens.shape[0] == 0:
        return torch.zeros_like(row), torch.full_like(row, -1)
    starts = starts.long()
    request = torch.searchsorted(starts[1:].contiguous(), row, right=True).clamp(max=seq_lens.shape[0] - 1)
    position = seq_lens.long()[request] - (starts[request + 1] - row)
    return request, position.where((row >= starts[0]) & (row < starts[request + 1]), -1)


# ---- context groups: page P of a request is page P // ranks of rank P % ranks


def context_local_lens(lens: torch.Tensor, compress_ratio: int, ranks: int, rank: int) -> torch.Tensor:
    """How many of each request's (or row's) first entries are a rank's own: its entries 0 .. count - 1.

    lens             int32, any shape: entries of compress_ratio tokens each; <= 0: none
    compress_ratio   a divisor of CONTEXT_PAGE
    ranks, rank      of the context group

    Returns int32 of the same shape. Nothing waits for the device.
    """
    _check_rank("context_local_lens", ranks, rank)
    if compress_ratio < 1 or CONTEXT_PAGE % compress_ratio:
        raise ValueError(
            f"context_local_lens: compress_ratio: expected a divisor of {CONTEXT_PAGE}, got {compress_ratio}"
        )
    page = CONTEXT_PAGE // compress_ratio
    lens = lens.long().clamp(min=0)
    rounds = torch.div(lens, page * ranks, rounding_mode="floor")
    return (rounds * page + (lens % (page * ranks) - rank * page).clamp(0, page)).int()


def expand_block_table(local: torch.Tensor, ranks: int, rank: int, width: int) -> torch.Tensor:
    """A request's pages in the order of its tokens, from those that a rank owns: -1 where a page is another rank's.

    local         int32 [R, pages]: the rank's own pages of each request, in the order of tokens
    ranks, rank   of the context group
    width         columns of the result, pages of a whole request; a page that local has no column for is -1

    Returns int32 [R, width]. Ops that skip entries without a page then store and find the rank's own entries only.
    """
    _check_rank("expand_block_table", ranks, rank)
    whole = local.new_full((local.shape[0], max(width, local.shape[1] * ranks)), -1)
    whole[:, rank : local.shape[1] * ranks : ranks] = local
    return whole[:, :width]


def _check_rank(function: str, ranks: int, rank: int) -> None:
    if ranks < 1 or not 0 <= rank < ranks:
        raise ValueError(f"{function}: rank: expected one of the context group's {ranks}, got {rank}")


def whole_entries(numbers: torch.Tensor, entries_per_page: int, ranks: int, rank: int) -> torch.Tensor:
    """int64 entries of a request that a rank of a context group has these numbers for, the inverse of `own_entries`;
    -1 for negative ones."""
    numbers = numbers.long()
    page = torch.div(numbers, entries_per_page, rounding_mode="floor")
    entries = (page * ranks + rank) * entries_per_page + numbers % entries_per_page
    return entries.where(numbers >= 0, torch.full_like(entries, -1))


def own_entries(entries: torch.Tensor, entries_per_page: int, ranks: int, rank: int) -> torch.Tensor:
    """int64 numbers that a rank of a context group has for a request's entries in its own pages, -1 for entries that
    are other ranks'."""
    entries = entries.long()
    page = torch.div(entries, entries_per_page, rounding_mode="floor")
    own = torch.div(page, ranks, rounding_mode="floor") * entries_per_page + entries % entries_per_page
    return own.where((entries >= 0) & (page % ranks == rank), torch.full_like(own, -1))
