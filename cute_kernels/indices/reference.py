# SPDX-License-Identifier: Apache-2.0
"""What the index builders mean, in plain torch. Nothing here waits for the device."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from cute_kernels.indices.call import C128aCall, CombineCall, Kind, MixedCall, StepCall, TranslateCall, WindowCall
from cute_kernels.paging import entries_to_slots, row_positions, to_index


def _columns(count: int, like: torch.Tensor) -> torch.Tensor:
    return torch.arange(count, device=like.device)


def _window(positions: torch.Tensor, window_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """First position and length of the sliding window that ends with (and includes) each position; length 0 below 0."""
    length = positions.clamp(-1, window_size - 1) + 1
    return positions + 1 - length, length


def _window_entries(positions: torch.Tensor, window_size: int) -> torch.Tensor:
    """[rows, window_size] positions in each row's window, oldest first, then -1."""
    start, length = _window(positions, window_size)
    column = _columns(window_size, positions)
    return (start[:, None] + column).masked_fill(column >= length[:, None], -1)


def _visible(positions: torch.Tensor, compress_ratio: int) -> torch.Tensor:
    """Compressed entries a row sees: the groups of compress_ratio tokens that end at or before its position.

    A ratio of 0 (no compression) is legal where no compressed entry is asked for; its value does not matter then.
    """
    return torch.div(positions.clamp(min=-1) + 1, max(compress_ratio, 1), rounding_mode="floor")


def _of_request(values: torch.Tensor, requests: torch.Tensor) -> torch.Tensor:
    """int64 values[requests], 0 for a request that does not exist."""
    count = values.shape[0]
    requests = requests.long()
    known = (requests >= 0) & (requests < count)
    return F.pad(values.long(), (0, 1))[requests.masked_fill(~known, count)]


def _row_positions(
    rows: torch.Tensor, requests: torch.Tensor, query_start_loc: torch.Tensor, seq_lens: torch.Tensor
) -> torch.Tensor:
    """int64 position of each row, -1 if the row is not among the rows of its request.

    query_start_loc may be a slice of a batch's: rows count from its first element.
    """
    starts = query_start_loc.long() - query_start_loc[:1].long()
    begin, end = _of_request(starts[:-1], requests), _of_request(starts[1:], requests)
    positions = _of_request(seq_lens, requests) - end + rows
    return positions.masked_fill((rows < begin) | (rows >= end), -1)


def compute_decode_swa_indices(call: WindowCall) -> None:
    rows = call.positions.shape[0]
    positions = call.positions.long().masked_fill(~call.is_valid_token[:rows], -1)
    entries = _window_entries(positions, call.window_size)
    call.out_indices[:, 0].copy_(
        to_index(entries_to_slots(entries, call.token_to_req_indices[:rows, None], call.block_table, call.block_size))
    )
    call.out_lens.copy_(_window(positions, call.window_size)[1])


def compute_global_topk_indices_and_lens(call: TranslateCall) -> None:
    rows = call.topk_indices.shape[0]
    slots = to_index(
        entries_to_slots(call.topk_indices, call.token_to_req_indices[:rows, None], call.block_table, call.block_size)
    )
    order = (slots < 0).int().argsort(dim=-1, stable=True)
    call.out_indices.copy_(slots.gather(-1, order))
    call.out_lens.copy_((slots >= 0).sum(dim=-1).masked_fill(~call.is_valid_token[:rows], 0))


def build_c128a_topk_metadata(call: C128aCall) -> None:
    width, split = call.max_compressed_tokens, call.num_decode_tokens
    counts = _visible(call.positions.long(), call.compress_ratio).clamp(max=width)
    column = _columns(width, call.positions)
    entries = column.masked_fill(column >= counts[:, None], -1)

    slots = entries_to_slots(
        entries[:split], call.token_to_req_indices[:split, None], call.block_table, call.block_size
    )
    call.global_decode_buffer[:split, :width].copy_(to_index(slots))
    call.decode_lens_buffer[:split].copy_(counts[:split].masked_fill(call.slot_mapping[:split] < 0, 0))
    call.prefill_buffer[: call.positions.shape[0] - split, :width].copy_(entries[split:])


def combine_topk_swa_indices(call: CombineCall) -> None:
    rows = _columns(call.topk_indices.shape[0], call.topk_indices)
    starts = call.query_start_loc.long() - call.query_start_loc[:1].long()
    requests = torch.searchsorted(starts, rows, right=True) - 1
    positions = _row_positions(rows, requests, call.query_start_loc, call.seq_lens)
    visible = _visible(positions, call.compress_ratio)
    start, num_window = _window(positions, call.window_size)
    num_chosen = visible.clamp(max=call.topk)

    width = call.out_indices.shape[1]
    column = _columns(width, call.topk_indices)
    chosen = F.pad(call.topk_indices[:, : call.topk].long(), (0, width - call.topk), value=-1)
    chosen = chosen.masked_fill(chosen >= visible.clamp(max=call.N)[:, None], -1)

    # Row i of a request's gathered tail holds position tail_start + i; it must lie between the request's N compressed
    # rows and the rows of the next request.
    tail_start = _of_request(call.seq_lens.long() - torch.minimum(call.gather_lens, call.seq_lens), requests)
    tail = (start - num_chosen - tail_start)[:, None] + column
    tail = (tail + call.N).masked_fill((tail < 0) | (tail >= call.M - call.N), -1)

    local = chosen.where(column < num_chosen[:, None], tail)
    empty = (local < 0) | (column >= (num_chosen + num_window)[:, None])
    call.out_indices.copy_(to_index((local + requests[:, None] * call.M).masked_fill(empty, -1)))
    call.out_lens.copy_(num_chosen + num_window)


def _mixed_decode_rows(
    decode_compressed_indices: torch.Tensor | None,
    decode_compressed_topk_lens: torch.Tensor | None,
    requests: torch.Tensor,
    block_table: torch.Tensor | None,
    block_size: int,
    is_local: bool,
    is_valid_token: torch.Tensor | None,
    out_compressed: torch.Tensor,
    out_count: torch.Tensor,
) -> None:
    rows = out_compressed.shape[0]
    if decode_compressed_indices is None:
        out_count.zero_()
        return
    width = decode_compressed_indices.shape[1]
    if is_local:
        assert block_table is not None
        slots = to_index(entries_to_slots(decode_compressed_indices, requests[:, None], block_table, block_size))
        out_compressed[:, :width].copy_(slots)
        out_count.copy_((slots >= 0).sum(dim=-1))
        if is_valid_token is not None:
            out_count.masked_fill_(~is_valid_token[:rows], 0)
        return
    out_compressed[:, :width].copy_(decode_compressed_indices)
    if decode_compressed_topk_lens is None:
        out_count.fill_(width)
    else:
        out_count.copy_(decode_compressed_topk_lens[:rows].clamp(0, width))


def _mixed_prefill_rows(
    prefill_topk_indices: torch.Tensor,
    positions: torch.Tensor,
    requests: torch.Tensor,
    block_table: torch.Tensor | None,
    block_size: int,
    compress_ratio: int,
    topk: int,
    out_compressed: torch.Tensor,
    out_count: torch.Tensor,
) -> None:
    visible = _visible(positions, compress_ratio)
    count = visible.clamp(max=topk)
    out_count.copy_(count)
    width = min(topk, prefill_topk_indices.shape[1])
    if block_table is None or width == 0:
        return
    column = _columns(width, positions)
    entries = prefill_topk_indices[:, :width].long()
    entries = entries.masked_fill((column >= count[:, None]) | (entries >= visible[:, None]), -1)
    out_compressed[:, :width].copy_(to_index(entries_to_slots(entries, requests[:, None], block_table, block_size)))


def build_flashinfer_mixed_sparse_indices(call: MixedCall) -> None:
    split, total = call.decode_swa_indices.shape[0], call.sparse_indices.shape[0]
    requests = call.token_to_req_indices[:total]
    rows = _columns(total, requests)[split:]
    positions = _row_positions(rows, requests[split:], call.query_start_loc, call.seq_lens)
    window = _window_entries(positions, call.window_size)

    call.sparse_indices.fill_(-1)
    call.sparse_indices[:split, : call.window_size].copy_(call.decode_swa_indices)
    call.sparse_indices[split:, : call.window_size].copy_(
        to_index(entries_to_slots(window, requests[split:, None], call.swa_block_table, call.swa_block_size))
    )
    compressed = call.sparse_indices[:, call.window_size :]
    _mixed_decode_rows(
        call.decode_compressed_indices,
        call.decode_compressed_topk_lens,
        requests[:split],
        call.compressed_block_table,
        call.compressed_block_size,
        call.decode_compressed_indices_are_local,
        call.decode_is_valid_token,
        compressed[:split],
        call.sparse_topk_lens[:split],
    )
    _mixed_prefill_rows(
        call.prefill_topk_indices,
        positions,
        requests[split:],
        call.compressed_block_table,
        call.compressed_block_size,
        call.compress_ratio,
        call.topk,
        compressed[split:],
        call.sparse_topk_lens[split:],
    )
    call.sparse_topk_lens.add_(call.window_size)


def step_views(a: StepCall, kind: int) -> dict[str, torch.Tensor]:
    """The arrays of one kind of a step's metadata, as views of all their rows."""
    layout, found = a.layout(), {}
    for name, (offset, dtype, columns) in layout.arrays(kind).items():
        element = getattr(torch, dtype)
        size = layout.room * max(columns, 1) * element.itemsize
        view = a.buffer[offset : offset + size].view(element)
        found[name] = view.view(layout.room, 1, columns) if columns else view
    return found


def build_step_metadata(a: StepCall) -> None:
    requests, tokens = a.num_requests, a.num_tokens
    starts = a.upload[: requests + 1]
    seq_lens = a.upload[requests + 1 : 2 * requests + 1] if a.seq_lens is None else a.seq_lens
    counts = starts.diff()
    before = seq_lens - counts
    owners, positions = row_positions(tokens, starts, seq_lens)
    positions = positions.clamp(min=-1)
    rows = _columns(tokens, a.upload)
    owners = owners.masked_fill((rows < starts[0]) | (rows >= starts[-1]), -1)
    restart = a.min_restart
    if restart is None:
        restart = before.clamp(min=0).where(_columns(requests, a.upload) < a.num_decodes, seq_lens)

    shared = step_views(a, 0)
    shared["query_start_loc"][: requests + 1].copy_(starts)
    shared["seq_lens"][:requests].copy_(seq_lens)
    shared["min_restart"][:requests].copy_(restart)
    shared["gather_lens"][:requests].copy_(counts + before.clamp(max=a.window_size - 1))
    shared["token_to_req_indices"][:tokens].copy_(owners)
    shared["positions"][:tokens].copy_(positions)
    for number, kind in enumerate(a.kinds()):
        _step_of_kind(a, kind, step_views(a, number), owners, positions)


def _step_of_kind(
    a: StepCall, kind: Kind, out: dict[str, torch.Tensor], owners: torch.Tensor, positions: torch.Tensor
) -> None:
    tokens, decodes, ratio = a.num_tokens, a.num_decode_tokens, kind.ratio
    assert kind.swa is not None
    slots = entries_to_slots(positions, owners, kind.swa, a.swa_block_size)
    valid = slots >= 0
    out["slot_mapping"][:tokens].copy_(slots)
    out["is_valid_token"][:tokens].copy_(valid)
    rows = positions[:decodes], owners[:decodes], valid[:decodes]
    windows = out["decode_swa_indices"][:decodes], out["decode_swa_lens"][:decodes]
    compute_decode_swa_indices(WindowCall(*rows, kind.swa, a.swa_block_size, a.window_size, *windows))
    if kind.compressed is None or kind.state is None:
        return
    out["state_slot_mapping"][:tokens].copy_(entries_to_slots(positions, owners, kind.state, kind.state_block_size))
    entries = _visible(positions, ratio)
    closes = valid & ((positions + 1) % ratio == 0)
    page_rows = a.kv_block_size // ratio
    entry_slots = entries_to_slots(entries - 1, owners, kind.compressed, page_rows)
    out["compressed_slot_mapping"][:tokens].copy_(entry_slots.masked_fill(~closes, -1))
    visible = entries.masked_fill(~valid, 0)
    out["visible"][:tokens].copy_(visible)
    out["decode_topk_lens"][:decodes].copy_(visible[:decodes].clamp(max=kind.topk))
    if ratio == 4 and a.key_starts is not None:
        starts = a.key_starts[owners.clamp(min=0).long()].masked_fill(owners < 0, 0)
        out["key_starts"][: a.num_requests + 1].copy_(a.key_starts)
        out["row_key_starts"][:tokens].copy_(starts)
        out["row_key_ends"][:tokens].copy_(starts + visible)
    if ratio != 128:
        return
    column = _columns(a.c128a_columns, positions)
    listed = column.masked_fill(column >= entries[:, None], -1)
    if a.c128a_decode_buffer is not None:
        listed_slots = entries_to_slots(listed[:decodes], owners[:decodes, None], kind.compressed, page_rows)
        a.c128a_decode_buffer[:decodes, : a.c128a_columns].copy_(to_index(listed_slots))
    if a.c128a_prefill_buffer is not None:
        a.c128a_prefill_buffer[: tokens - decodes, : a.c128a_columns].copy_(listed[decodes:])
