# SPDX-License-Identifier: Apache-2.0
"""What the compressor ops mean, in plain torch.

Entry g of a request closes at its token (g + 1) * ratio - 1. Per channel it is a softmax-weighted mean over a window of
state rows (the kv half weighted by the score half), RMS-normalized, rotated with position g * ratio and stored.

    ratio 128   window = the entry's own 128 tokens
    ratio 4     window = 8 tokens: the previous group's 4 with the first half of their columns, the own group's 4 with
                the second half. Before position 0 there is nothing: the first entry has its own 4 rows only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from cute_kernels import formats, numerics
from cute_kernels.compressor.call import (
    CompressCall,
    FusedCall,
    KeyStoreCall,
    LatentCall,
    RopeInsertCall,
    SaveCall,
    SlotsCall,
)
from cute_kernels.formats import valid_slots
from cute_kernels.paging import entries_to_slots, of_request, row_positions

# Window rows handled at a time: bounds the memory of the float64 intermediates.
_ROWS_AT_ONCE = 2048


def window_rows(compress_ratio: int) -> int:
    """State rows an entry is computed from: two groups when groups overlap (ratio 4), else one."""
    return 2 * compress_ratio if compress_ratio == 4 else compress_ratio


def state_rows(
    kv: torch.Tensor, score: torch.Tensor, ape: torch.Tensor, positions: torch.Tensor, compress_ratio: int
) -> torch.Tensor:
    """fp32 [n, 2 * width]: what the state cache holds for tokens with these projections and positions."""
    return torch.cat([kv, score + ape[positions % compress_ratio]], dim=-1)


def save_partial_states(call: SaveCall) -> None:
    n = call.slot_mapping.shape[0]
    state = formats.compressor_state(call.kv.shape[1] // (2 if call.compress_ratio == 4 else 1), call.compress_ratio)
    state.write(
        call.state_cache,
        call.block_size,
        call.slot_mapping,
        state_rows(call.kv[:n], call.score[:n], call.ape, call.positions[:n], call.compress_ratio),
    )


def get_compressed_slot_mapping(call: SlotsCall) -> None:
    call.out.fill_(-1)
    request, position = row_positions(call.num_tokens, call.query_start_loc, call.seq_lens)
    closes = (position + 1) % call.compress_ratio == 0
    if call.slot_mapping is not None:
        closes &= call.slot_mapping[: call.num_tokens] >= 0
    group = torch.div(position, call.compress_ratio, rounding_mode="floor")
    slots = entries_to_slots(group, request, call.block_table, call.block_size // call.compress_ratio)
    call.out[: call.num_tokens] = slots.where(closes, torch.full_like(slots, -1))


def closing_tokens(call: CompressCall | FusedCall) -> torch.Tensor:
    """int64 [E]: the rows that close an entry: last of their group, with a valid state slot, a valid entry slot and a
    request."""
    n = call.slot_mapping.shape[0]
    acts = valid_slots(call.slot_mapping, call.state_cache.shape[0] * call.state_cache.shape[1])
    acts &= valid_slots(call.kv_slot_mapping[:n], call.kv_cache.shape[0] * call.kv_cache.shape[1])
    acts &= (call.positions[:n] >= 0) & ((call.positions[:n] + 1) % call.compress_ratio == 0)
    acts &= valid_slots(call.token_to_req_indices[:n], call.block_table.shape[0])
    return acts.nonzero().squeeze(1)


@dataclass(frozen=True)
class Windows:
    """The windows of E entries with n rows each, oldest row first.

    tokens      int64 [E], the row of the step that closes the entry
    positions   int64 [E, n]; rows with a negative position do not take part
    step_rows   int64 [E, n], the row of the step with that position, or -1: the row is read from the state cache
    slots       int64 [E, n], state slots by the block table, -1 where there is none
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    step_rows: torch.Tensor
    slots: torch.Tensor

    @property
    def cached(self) -> torch.Tensor:
        """bool [E, n]: the rows that are read from the state cache."""
        return (self.positions >= 0) & (self.step_rows < 0)

    def select(self, chosen: Any) -> Windows:
        """The windows of some entries: a mask or a slice over E."""
        return Windows(self.tokens[chosen], self.positions[chosen], self.step_rows[chosen], self.slots[chosen])

    def parts(self) -> list[Windows]:
        """The same windows in pieces small enough to compute at once."""
        size = max(1, _ROWS_AT_ONCE // self.positions.shape[1])
        return [self.select(slice(i, i + size)) for i in range(0, self.tokens.shape[0], size)]


def windows_of(call: CompressCall | FusedCall, tokens: torch.Tensor) -> Windows:
    """The windows of the entries that `tokens` close.

    Of a fused call, rows at or after the request's first position of the step come from the step.
    """
    requests = call.token_to_req_indices[tokens].long()
    reach = torch.arange(1 - window_rows(call.compress_ratio), 1, device=tokens.device)
    rows = call.positions[tokens][:, None] + reach
    step_rows = torch.full_like(rows, -1)
    if isinstance(call, FusedCall):
        here = tokens[:, None] + reach
        first = of_request(call.query_start_loc[:-1], requests)
        step_rows = here.where((here >= first[:, None]) & (rows >= 0), step_rows)
    page_rows = call.state_cache.shape[1]
    where = rows
    if isinstance(call, FusedCall) and call.cyclic_table:
        where = (rows % max(call.block_table.shape[1] * page_rows, 1)).where(rows >= 0, rows)
    slots = entries_to_slots(where, requests[:, None], call.block_table, page_rows)
    return Windows(tokens, rows, step_rows, slots)


def readable_windows(call: CompressCall | FusedCall, tokens: torch.Tensor) -> Windows:
    """`windows_of` them, without those that need a state row no valid page holds."""
    every = windows_of(call, tokens)
    valid = valid_slots(every.slots, call.state_cache.shape[0] * call.state_cache.shape[1])
    return every.select((valid | ~every.cached).all(dim=1))


def compress(rows: torch.Tensor, inside: torch.Tensor, head_dim: int, compress_ratio: int) -> torch.Tensor:
    """fp32 [E, head_dim] means of the windows' state rows fp32 [E, n, 2 * width], in float64, rounded once.

    inside bool [E, n]: the rows that take part; the others must hold zeros.
    """
    kv, score = rows.chunk(2, dim=-1)
    if compress_ratio == 4:
        kv, score = (torch.cat([x[:, :4, :head_dim], x[:, 4:, head_dim:]], dim=1) for x in (kv, score))
    score = score.double().masked_fill(~inside[..., None], -torch.inf)
    weight = torch.exp(score - score.amax(dim=1, keepdim=True))
    return (_sum_rows(weight * kv.double()) / _sum_rows(weight)).float()


def _sum_rows(x: torch.Tensor) -> torch.Tensor:
    """Sum over dimension 1 (a power of two), by halves: the order of additions never depends on the shape around it."""
    while x.shape[1] > 1:
        half = x.shape[1] // 2
        x = x[:, :half] + x[:, half:]
    return x[:, 0]


def store_entries(
    call: CompressCall | FusedCall, x: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor
) -> None:
    """Normalize, rotate and store entries fp32 [E, head_dim] that the tokens [E] at `positions` [E] close.

    The norm is never rounded below fp32; rotated columns and the others are rounded to bf16 once, then quantized.
    """
    fmt = formats.FORMATS[call.kv_format]
    y = numerics.rms_norm(x, call.rms_norm_weight, call.rms_norm_eps)
    first = torch.div(positions, call.compress_ratio, rounding_mode="floor") * call.compress_ratio
    y = numerics.to_bf16(numerics.rotate(y, first, call.cos_sin_cache))
    if call.index_hadamard:
        y = numerics.hadamard(y).to(torch.bfloat16)
    where = call.kv_cache, call.kv_cache.shape[1], call.kv_slot_mapping[tokens]
    if isinstance(fmt, formats.IndexerMxfp4Format):
        fmt.write(*where, y, call.e2m1_rounding)
    elif call.fp8_scale is not None:
        # One multiplication by the rounded inverse: a division would give other codes.
        fmt.write(*where, y.float() * call.fp8_scale.reciprocal())
    else:
        fmt.write(*where, y)


def store_windows(call: CompressCall | FusedCall, every: Windows) -> None:
    """Compress the windows and store their entries; of a fused call, rows of the step come from the step."""
    head_dim = formats.FORMATS[call.kv_format].dim
    state = formats.compressor_state(head_dim, call.compress_ratio)
    for part in every.parts():
        rows = call.state_cache.new_zeros(*part.positions.shape, state.row_elements)
        rows[part.cached] = state.read(call.state_cache, call.state_cache.shape[1], part.slots[part.cached])
        if isinstance(call, FusedCall) and call.raw_scores:
            kv, score = rows[part.cached].chunk(2, dim=1)
            rows[part.cached] = state_rows(kv, score, call.ape, part.positions[part.cached], call.compress_ratio)
        if isinstance(call, FusedCall):
            new = part.step_rows >= 0
            kv, score = call.kv_score[part.step_rows[new]].chunk(2, dim=1)
            rows[new] = state_rows(kv, score, call.ape, part.positions[new], call.compress_ratio)
        x = compress(rows, part.positions >= 0, head_dim, call.compress_ratio)
        store_entries(call, x, part.tokens, part.positions[:, -1])


def compress_norm_rope_store(call: CompressCall) -> None:
    store_windows(call, readable_windows(call, closing_tokens(call)))


def saved_tokens(call: FusedCall) -> torch.Tensor:
    """bool [T']: the rows whose state the fused op saves."""
    n = call.slot_mapping.shape[0]
    saved = valid_slots(call.slot_mapping, call.state_cache.shape[0] * call.state_cache.shape[1])
    if call.persist == "all":
        return saved
    positions, requests = call.positions[:n], call.token_to_req_indices[:n]
    num_requests = call.query_start_loc.shape[0] - 1
    if call.min_restart is None:
        token = torch.arange(n, device=positions.device)
        restart = positions - (token - of_request(call.query_start_loc[:-1], requests))
    else:
        restart = of_request(call.min_restart, requests)
    overlap = call.compress_ratio if call.compress_ratio == 4 else 0
    oldest = torch.div(restart, call.compress_ratio, rounding_mode="floor") * call.compress_ratio - overlap
    needed = positions >= oldest
    if call.keep_every > 0:
        needed |= positions % call.keep_every >= call.keep_every - overlap
    return saved & needed & valid_slots(requests, num_requests)


def fused_compress_norm_rope_store(call: FusedCall) -> None:
    state = formats.compressor_state(formats.FORMATS[call.kv_format].dim, call.compress_ratio)
    tokens = closing_tokens(call)
    every, saved = readable_windows(call, tokens), saved_tokens(call)
    store_windows(call, every)
    rows = saved.nonzero().squeeze(1)
    kv, score = call.kv_score[rows].chunk(2, dim=1)
    fresh = call.kv_score[rows]
    if not call.raw_scores:
        fresh = state_rows(kv, score, call.ape, call.positions[rows], call.compress_ratio)
    state.write(call.state_cache, call.state_cache.shape[1], call.slot_mapping[rows], fresh)


# ---- V4.1: latents, and what is stored of them


def partners(call: LatentCall) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of ratio 2: bool [T'], the rows that take part; int64 [T'], row of the step at the position before, or -1 where
    that is in the ring; int64 [T'], the slot before the row's in its ring."""
    assert call.slot_mapping is not None
    assert call.state_cache is not None
    assert call.query_start_loc is not None
    assert call.token_to_req_indices is not None
    slots = call.slot_mapping
    n, (pages, ring, _) = slots.shape[0], call.state_cache.shape
    positions, requests = call.positions[:n], call.token_to_req_indices[:n]
    acts = valid_slots(slots, pages * ring) & (positions >= 0)
    acts &= valid_slots(requests, call.query_start_loc.shape[0] - 1)
    row = torch.arange(n, device=slots.device)
    first = of_request(call.query_start_loc[:-1], requests)
    before = (row - 1).where(row > first, torch.full_like(row, -1))
    page = torch.div(slots, ring, rounding_mode="floor")
    return acts, before, page * ring + (slots - 1) % ring


def kept_rows(call: LatentCall) -> torch.Tensor:
    """bool [T']: the rows whose projections the ring keeps, the last ones of each request."""
    assert call.query_start_loc is not None
    assert call.token_to_req_indices is not None
    assert call.state_cache is not None
    acts, _, _ = partners(call)
    n = acts.shape[0]
    last = of_request(call.query_start_loc[1:], call.token_to_req_indices[:n]).clamp(max=n)
    row = torch.arange(n, device=acts.device)
    return acts & (row >= last - call.state_cache.shape[1]) & (row < last)


def compress_latent(call: LatentCall) -> None:
    weight, eps = call.norm_weight, call.eps
    if call.compress_ratio == 1:
        rows = call.kv_score.to(torch.bfloat16)
        call.out.copy_(numerics.to_bf16(numerics.rms_norm(rows, weight, eps)))
        return
    assert call.slot_mapping is not None
    assert call.state_cache is not None
    acts, before, ring_slots = partners(call)
    closing = (acts & (call.positions[: acts.shape[0]] % 2 == 1)).nonzero().squeeze(1)
    state = formats.compressor_state(formats.HEAD_DIM, call.compress_ratio)
    pair = torch.stack([torch.zeros_like(call.kv_score[closing]), call.kv_score[closing]], dim=1)
    here = before[closing] >= 0
    pair[here, 0] = call.kv_score[before[closing][here]]
    pair[~here, 0] = state.read(call.state_cache, call.state_cache.shape[1], ring_slots[closing][~here])
    mean = compress(pair, torch.ones_like(pair[..., 0], dtype=torch.bool), formats.HEAD_DIM, call.compress_ratio)
    mean = mean.to(torch.bfloat16)
    call.out[closing] = numerics.to_bf16(numerics.rms_norm(mean, weight, eps))
    kept = kept_rows(call).nonzero().squeeze(1)
    state.write(call.state_cache, call.state_cache.shape[1], call.slot_mapping[kept], call.kv_score[kept])


def stored_rows(call: RopeInsertCall | KeyStoreCall) -> tuple[torch.Tensor, torch.Tensor]:
    """int64 [n], rows that close an entry and have a slot of the cache; int64 [n], the entry's first position."""
    slots, ratio = call.slot_mapping, call.compress_ratio
    positions = call.positions[: slots.shape[0]]
    acts = valid_slots(slots, call.kv_cache.shape[0] * call.kv_cache.shape[1])
    acts &= (positions >= 0) & ((positions + 1) % ratio == 0)
    rows = acts.nonzero().squeeze(1)
    return rows, positions[rows] - positions[rows] % ratio


def rope_quant_insert(call: RopeInsertCall) -> None:
    rows, first = stored_rows(call)
    y = numerics.to_bf16(numerics.rotate(call.latent[rows], first, call.cos_sin_cache))
    formats.FORMATS[call.kv_format].write(call.kv_cache, call.kv_cache.shape[1], call.slot_mapping[rows], y)


def k_norm_rope_store(call: KeyStoreCall) -> None:
    rows, first = stored_rows(call)
    y = numerics.to_bf16(numerics.rms_norm(call.k[rows], call.norm_weight, call.eps))
    y = numerics.to_bf16(numerics.rotate(y, first, call.cos_sin_cache))
    where = call.kv_cache, call.kv_cache.shape[1], call.slot_mapping[rows]
    fmt = formats.FORMATS[call.kv_format]
    if isinstance(fmt, formats.IndexerMxfp4Format):
        fmt.write(*where, y, "ties_to_even", numerics.E2M1_FLOOR)
    else:
        fmt.write(*where, y)
