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


def save_partial_states(
    kv: torch.Tensor,
    score: torch.Tensor,
    ape: torch.Tensor,
    positions: torch.Tensor,
    state_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    block_size: int,
    compress_ratio: int,
) -> None:
    n = slot_mapping.shape[0]
    state = formats.compressor_state(kv.shape[1] // (2 if compress_ratio == 4 else 1), compress_ratio)
    state.write(
        state_cache, block_size, slot_mapping, state_rows(kv[:n], score[:n], ape, positions[:n], compress_ratio)
    )


def get_compressed_slot_mapping(
    out: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    slot_mapping: torch.Tensor | None,
    num_tokens: int,
    block_size: int,
    compress_ratio: int,
) -> None:
    out.fill_(-1)
    request, position = row_positions(num_tokens, query_start_loc, seq_lens)
    closes = (position + 1) % compress_ratio == 0
    if slot_mapping is not None:
        closes &= slot_mapping[:num_tokens] >= 0
    group = torch.div(position, compress_ratio, rounding_mode="floor")
    slots = entries_to_slots(group, request, block_table, block_size // compress_ratio)
    out[:num_tokens] = slots.where(closes, torch.full_like(slots, -1))


def closing_tokens(
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_slot_mapping: torch.Tensor,
    state_cache: torch.Tensor,
    kv_cache: torch.Tensor,
    compress_ratio: int,
) -> torch.Tensor:
    """int64 [E]: the rows that close an entry: last of their group, with a valid state slot and a valid entry slot."""
    n = slot_mapping.shape[0]
    acts = valid_slots(slot_mapping, state_cache.shape[0] * state_cache.shape[1])
    acts &= valid_slots(kv_slot_mapping[:n], kv_cache.shape[0] * kv_cache.shape[1])
    acts &= (positions[:n] >= 0) & ((positions[:n] + 1) % compress_ratio == 0)
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


def readable_windows(
    tokens: torch.Tensor,
    positions: torch.Tensor,
    token_to_req_indices: torch.Tensor,
    state_cache: torch.Tensor,
    block_table: torch.Tensor,
    compress_ratio: int,
    query_start_loc: torch.Tensor | None = None,
) -> Windows:
    """The windows of the entries that `tokens` close, without those that need a state row no valid page holds.

    With query_start_loc, rows at or after the request's first position of the step come from the step.
    """
    requests = token_to_req_indices[tokens].long()
    reach = torch.arange(1 - window_rows(compress_ratio), 1, device=tokens.device)
    rows = positions[tokens][:, None] + reach
    step_rows = torch.full_like(rows, -1)
    if query_start_loc is not None:
        here = tokens[:, None] + reach
        first = of_request(query_start_loc[:-1], requests)
        step_rows = here.where((here >= first[:, None]) & (rows >= 0), step_rows)
    slots = entries_to_slots(rows, requests[:, None], block_table, state_cache.shape[1])
    every = Windows(tokens, rows, step_rows, slots)
    valid = valid_slots(slots, state_cache.shape[0] * state_cache.shape[1])
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


@dataclass(frozen=True)
class Store:
    """The second half of both store ops: what happens to a compressed entry, and where it goes."""

    kv_cache: torch.Tensor
    kv_slot_mapping: torch.Tensor
    cos_sin_cache: torch.Tensor
    rms_norm_weight: torch.Tensor
    fp8_scale: torch.Tensor | None
    rms_norm_eps: float
    compress_ratio: int
    kv_format: str
    e2m1_rounding: str
    index_hadamard: bool

    def entries(self, x: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor) -> None:
        """Normalize, rotate and store entries fp32 [E, head_dim] that the tokens [E] at `positions` [E] close.

        The norm is never rounded below fp32; rotated columns and the others are rounded to bf16 once, then quantized.
        """
        fmt = formats.FORMATS[self.kv_format]
        y = numerics.rms_norm(x, self.rms_norm_weight, self.rms_norm_eps)
        first = torch.div(positions, self.compress_ratio, rounding_mode="floor") * self.compress_ratio
        y = numerics.rotate(y, first, self.cos_sin_cache).to(torch.bfloat16)
        if self.index_hadamard:
            y = numerics.hadamard(y).to(torch.bfloat16)
        where = self.kv_cache, self.kv_cache.shape[1], self.kv_slot_mapping[tokens]
        if isinstance(fmt, formats.IndexerMxfp4Format):
            fmt.write(*where, y, self.e2m1_rounding)
        elif self.fp8_scale is not None:
            # One multiplication by the rounded inverse: a division would give other codes.
            fmt.write(*where, y.float() * self.fp8_scale.reciprocal())
        else:
            fmt.write(*where, y)

    def windows(
        self, every: Windows, state_cache: torch.Tensor, kv_score: torch.Tensor | None, ape: torch.Tensor | None
    ) -> None:
        """Compress the windows and store their entries; rows of the step come from kv_score and ape."""
        head_dim = formats.FORMATS[self.kv_format].dim
        state = formats.compressor_state(head_dim, self.compress_ratio)
        for part in every.parts():
            rows = state_cache.new_zeros(*part.positions.shape, state.row_elements)
            rows[part.cached] = state.read(state_cache, state_cache.shape[1], part.slots[part.cached])
            if kv_score is not None and ape is not None:
                new = part.step_rows >= 0
                kv, score = kv_score[part.step_rows[new]].chunk(2, dim=1)
                rows[new] = state_rows(kv, score, ape, part.positions[new], self.compress_ratio)
            x = compress(rows, part.positions >= 0, head_dim, self.compress_ratio)
            self.entries(x, part.tokens, part.positions[:, -1])


def compress_norm_rope_store(
    state_cache: torch.Tensor,
    token_to_req_indices: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    block_table: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    kv_cache: torch.Tensor,
    kv_slot_mapping: torch.Tensor,
    rms_norm_weight: torch.Tensor,
    fp8_scale: torch.Tensor | None,
    rms_norm_eps: float,
    compress_ratio: int,
    kv_format: str,
    e2m1_rounding: str,
    index_hadamard: bool,
) -> None:
    store = Store(
        kv_cache,
        kv_slot_mapping,
        cos_sin_cache,
        rms_norm_weight,
        fp8_scale,
        rms_norm_eps,
        compress_ratio,
        kv_format,
        e2m1_rounding,
        index_hadamard,
    )
    tokens = closing_tokens(positions, slot_mapping, kv_slot_mapping, state_cache, kv_cache, compress_ratio)
    every = readable_windows(tokens, positions, token_to_req_indices, state_cache, block_table, compress_ratio)
    store.windows(every, state_cache, None, None)


def saved_tokens(
    positions: torch.Tensor,
    token_to_req_indices: torch.Tensor,
    query_start_loc: torch.Tensor,
    state_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    min_restart: torch.Tensor | None,
    compress_ratio: int,
    persist: str,
    keep_every: int,
) -> torch.Tensor:
    """bool [T']: the rows whose state the fused op saves."""
    n = slot_mapping.shape[0]
    saved = valid_slots(slot_mapping, state_cache.shape[0] * state_cache.shape[1])
    if persist == "all":
        return saved
    positions, requests = positions[:n], token_to_req_indices[:n]
    num_requests = query_start_loc.shape[0] - 1
    if min_restart is None:
        token = torch.arange(n, device=positions.device)
        restart = positions - (token - of_request(query_start_loc[:-1], requests))
    else:
        restart = of_request(min_restart, requests)
    overlap = compress_ratio if compress_ratio == 4 else 0
    oldest = torch.div(restart, compress_ratio, rounding_mode="floor") * compress_ratio - overlap
    needed = positions >= oldest
    if keep_every > 0:
        needed |= positions % keep_every >= keep_every - overlap
    return saved & needed & valid_slots(requests, num_requests)


def fused_compress_norm_rope_store(
    kv_score: torch.Tensor,
    ape: torch.Tensor,
    positions: torch.Tensor,
    token_to_req_indices: torch.Tensor,
    query_start_loc: torch.Tensor,
    state_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    block_table: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    kv_cache: torch.Tensor,
    kv_slot_mapping: torch.Tensor,
    rms_norm_weight: torch.Tensor,
    min_restart: torch.Tensor | None,
    fp8_scale: torch.Tensor | None,
    rms_norm_eps: float,
    compress_ratio: int,
    keep_every: int,
    kv_format: str,
    persist: str,
    e2m1_rounding: str,
    index_hadamard: bool,
    use_pdl: bool,
) -> None:
    state = formats.compressor_state(formats.FORMATS[kv_format].dim, compress_ratio)
    store = Store(
        kv_cache,
        kv_slot_mapping,
        cos_sin_cache,
        rms_norm_weight,
        fp8_scale,
        rms_norm_eps,
        compress_ratio,
        kv_format,
        e2m1_rounding,
        index_hadamard,
    )
    tokens = closing_tokens(positions, slot_mapping, kv_slot_mapping, state_cache, kv_cache, compress_ratio)
    tokens = tokens[valid_slots(token_to_req_indices[tokens], query_start_loc.shape[0] - 1)]
    every = readable_windows(
        tokens, positions, token_to_req_indices, state_cache, block_table, compress_ratio, query_start_loc
    )
    saved = saved_tokens(
        positions,
        token_to_req_indices,
        query_start_loc,
        state_cache,
        slot_mapping,
        min_restart,
        compress_ratio,
        persist,
        keep_every,
    )
    store.windows(every, state_cache, kv_score, ape)
    rows = saved.nonzero().squeeze(1)
    kv, score = kv_score[rows].chunk(2, dim=1)
    fresh = state_rows(kv, score, ape, positions[rows], compress_ratio)
    state.write(state_cache, state_cache.shape[1], slot_mapping[rows], fresh)
