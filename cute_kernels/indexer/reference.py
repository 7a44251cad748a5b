# SPDX-License-Identifier: Apache-2.0
"""What the indexer ops mean, in plain torch.

Scores are float64 sums in a fixed order, rounded once to fp32. The dot product of e4m3 codes fits float64 whatever its
order; so does that of a 32-column MXFP4 block, and the four blocks are added in order. The heads are added one by one,
elementwise. So a score depends neither on the rows around it, nor on the tiles, nor on where its key is stored.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from cute_kernels import formats, numerics
from cute_kernels.indexer.call import (
    AllVisibleCall,
    CandidatesDecodeCall,
    CandidatesPrefillCall,
    GatherCall,
    KeysCall,
    LogitsCall,
    MergeKeysCall,
    PagedLogitsCall,
    QueryFp8Call,
    QueryMxfp4Call,
    ScoreTopKDecodeCall,
    ScoreTopKPrefillCall,
    SelectBlocksCall,
    TopKDecodeCall,
    TopKPrefillCall,
)
from cute_kernels.indexer.chunks import CANDIDATE_BLOCK
from cute_kernels.paging import entries_to_slots, own_entries, to_index, whole_entries

KEY_TILE = 1024
"""Keys that are expanded to float64 at a time."""
SCORE_TILE = 1 << 18
"""Float64 head scores held at a time: 2 MiB, so that they stay in a core's cache."""
SORT_TILE = 1 << 20
"""Scores that are ranked at a time."""


def fused_indexer_q_rope_quant_fp8(call: QueryFp8Call) -> None:
    q = _rotated_query(call.positions, call.index_q, call.index_q_cos_sin_cache, call.index_hadamard)
    codes, byte = numerics.quantize_e4m3(q, formats.INDEX_DIM)
    call.q_quant.copy_(codes.view(torch.float8_e4m3fn))
    weights = _weights(call.index_weights, call.round_weights) * numerics.ue8m0_scale(byte)[..., 0].float()
    call.weights_out.copy_(_scaled(weights, call.index_weights_softmax_scale, call.index_weights_head_scale))


def fused_indexer_q_rope_quant_mxfp4(call: QueryMxfp4Call) -> None:
    q = _rotated_query(call.positions, call.index_q, call.index_q_cos_sin_cache, call.index_hadamard)
    packed, byte = numerics.quantize_e2m1(q, call.e2m1_rounding, floor=call.e2m1_floor)
    call.q_quant.copy_(packed)
    call.q_scale.copy_(byte.contiguous().view(torch.int32)[..., 0])
    call.weights_out.copy_(
        _scaled(
            _weights(call.index_weights, call.round_weights),
            call.index_weights_softmax_scale,
            call.index_weights_head_scale,
        )
    )


def _rotated_query(
    positions: torch.Tensor, index_q: torch.Tensor, cos_sin_cache: torch.Tensor, hadamard: bool
) -> torch.Tensor:
    q = numerics.rotate(index_q, positions, cos_sin_cache).to(torch.bfloat16)
    return numerics.hadamard(q).to(torch.bfloat16) if hadamard else q


def _weights(index_weights: torch.Tensor, round_weights: bool) -> torch.Tensor:
    """In fp32."""
    return (index_weights.bfloat16() if round_weights else index_weights).float()


def _scaled(weights: torch.Tensor, softmax_scale: float, head_scale: float) -> torch.Tensor:
    """Both factors are rounded to fp32 and applied in turn, which shows when neither is a power of two."""
    for factor in (softmax_scale, head_scale):
        weights = weights * torch.tensor(factor, dtype=torch.float32, device=weights.device)
    return weights


def cp_gather_indexer_k_quant_cache(call: GatherCall) -> None:
    fmt = formats.FORMATS[call.kv_format]
    block_size = call.kv_cache.shape[1]
    bounds = call.cu_seq_lens.tolist()
    for r in range(call.block_table.shape[0]):
        first, last = max(bounds[r], 0), min(bounds[r + 1], call.dst_k.shape[0])
        if last <= first:
            continue
        rows = torch.arange(first, last, device=call.kv_cache.device)
        slots = entries_to_slots(rows - bounds[r], torch.full_like(rows, r), call.block_table, block_size)
        here = formats.valid_slots(slots, call.kv_cache.shape[0] * block_size)
        codes, scale = fmt.read_fields(call.kv_cache, block_size, slots[here])
        call.dst_k.view(torch.uint8)[rows[here]] = codes
        call.dst_scale[rows[here]] = scale


def mqa_logits(call: LogitsCall) -> None:
    """Only columns inside a row's range are written, and the others when `clean_logits`."""
    if call.clean_logits:
        call.out.fill_(-torch.inf)
    start, end = call.cu_seq_len_k_start.long(), call.cu_seq_len_k_end.long().clamp(max=call.k.shape[0])
    if call.max_seqlen_k > 0:
        end = torch.minimum(end, start + call.max_seqlen_k)
    column_zero = start.tolist() if call.max_seqlen_k > 0 else [0] * call.q.shape[0]
    ranges = list(zip(start.clamp(min=0).tolist(), end.tolist(), strict=True))
    live = [r for r in ranges if r[0] < r[1]]
    step = _rows_per_tile(call.q.shape[1])
    for n0 in range(min((r[0] for r in live), default=0), max((r[1] for r in live), default=0), KEY_TILE):
        n1 = min(n0 + KEY_TILE, call.k.shape[0])
        keys, scale = _keys(call.k[n0:n1], call.k_scale[n0:n1])
        for m0 in range(0, call.q.shape[0], step):
            inside = [(max(a, n0), min(b, n1)) for a, b in ranges[m0 : m0 + step]]
            low = min((a for a, b in inside if a < b), default=n1)
            high = max((b for a, b in inside if a < b), default=n1)
            if low == high:
                continue
            tile = slice(m0, m0 + step)
            queries = _queries(call.q[tile], None if call.q_scale is None else call.q_scale[tile])
            scores = _scores(queries, keys[low - n0 : high - n0], scale[low - n0 : high - n0], call.weights[tile])
            for i, (a, b) in enumerate(inside):
                if a < b:
                    call.out[m0 + i, a - column_zero[m0 + i] : b - column_zero[m0 + i]] = scores[i, a - low : b - low]


def paged_mqa_logits(call: PagedLogitsCall) -> None:
    """Only columns below a row's length are written, and the others when `clean_logits`."""
    if call.clean_logits:
        call.out.fill_(-torch.inf)
    fmt = formats.FORMATS[call.kv_format]
    next_n, block_size = call.q.shape[1], call.kv_cache.shape[1]
    step = _rows_per_tile(call.q.shape[2])
    for b, row_lens in enumerate(call.context_lens.clamp(max=call.max_model_len).tolist()):
        for n0 in range(0, max(row_lens), KEY_TILE):
            entries = torch.arange(n0, min(n0 + KEY_TILE, max(row_lens)), device=call.q.device)
            slots = entries_to_slots(entries, torch.full_like(entries, b), call.block_tables, block_size)
            here = formats.valid_slots(slots, call.kv_cache.shape[0] * block_size)
            codes, raw_scale = fmt.read_fields(call.kv_cache, block_size, slots[here])
            scale_type = torch.float32 if call.q_scale is None else torch.int32
            keys, scale = _keys(codes, raw_scale.contiguous().view(scale_type)[:, 0])
            for j0 in range(0, next_n, step):
                tile = slice(j0, min(j0 + step, next_n))
                queries = _queries(call.q[b, tile], None if call.q_scale is None else call.q_scale[b, tile])
                row0 = b * next_n
                known = _scores(queries, keys, scale, call.weights[row0 + tile.start : row0 + tile.stop])
                scores = known.new_full((known.shape[0], entries.shape[0]), -torch.inf)
                scores[:, here] = known
                for i, length in enumerate(row_lens[tile]):
                    if length > n0:
                        stop = min(length - n0, entries.shape[0])
                        call.out[row0 + j0 + i, n0 : n0 + stop] = scores[i, :stop]


def _rows_per_tile(heads: int) -> int:
    return max(1, SCORE_TILE // (KEY_TILE * max(heads, 1)))


def _queries(q: torch.Tensor, q_scale: torch.Tensor | None) -> list[torch.Tensor]:
    """Float64 operands [m, heads, width], one for each column block whose dot products are exact."""
    if q_scale is None:
        return [numerics.from_e4m3(q).double()]
    return list(_dequantize_mxfp4(q, q_scale).split(32, dim=-1))


def _keys(k: torch.Tensor, k_scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Float64 keys [n, 128] and the factor [n] of their scores; MXFP4 keys, whose scales are int32, contain theirs."""
    if k_scale.dtype == torch.int32:
        return _dequantize_mxfp4(k, k_scale), torch.ones(k.shape[0], dtype=torch.float64, device=k.device)
    return numerics.from_e4m3(k).double(), k_scale.double()


def _dequantize_mxfp4(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Float64 values [..., 128] of codes [..., 64] with their four scale bytes in one 32-bit element of [...]."""
    return numerics.dequantize_e2m1(packed.view(torch.uint8), scale[..., None].contiguous().view(torch.uint8))


def _scores(
    queries: list[torch.Tensor], keys: torch.Tensor, scale: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """fp32 [m, n]: scale * sum over heads of relu(q . k) * weight."""
    rows, heads, width = queries[0].shape
    dots: torch.Tensor | None = None
    for block, q in enumerate(queries):
        by_head = q.transpose(0, 1).reshape(heads * rows, width)
        part = by_head @ keys[:, block * width : (block + 1) * width].T
        dots = part if dots is None else dots.add_(part)
    assert dots is not None
    weighted = dots.view(heads, rows, keys.shape[0]).clamp_(min=0).mul_(weights.double().T[:, :, None])
    total = weighted.new_zeros(rows, keys.shape[0])
    for head in weighted:
        total += head
    return total.mul_(scale).float()


def top_k_per_row_prefill(call: TopKPrefillCall) -> None:
    _top_k(
        call.logits,
        call.row_starts[: call.num_rows].long().clamp(min=0),
        call.row_ends[: call.num_rows].long(),
        call.out[: call.num_rows, : call.k],
    )


def top_k_per_row_decode(call: TopKDecodeCall) -> None:
    ends = call.seq_lens.reshape(-1)[: call.num_rows].long()
    picks = call.out[: call.num_rows, : call.k]
    _top_k(call.logits, torch.zeros_like(ends), ends, picks)
    _to_slots(picks, call.seq_lens.shape[1], call.slot_block_table, call.slot_rows_per_page)


def all_visible_entries(call: AllVisibleCall) -> None:
    entry = torch.arange(call.out.shape[1], dtype=torch.int32, device=call.out.device)
    call.out.copy_(entry.where(entry < call.visible.reshape(-1, 1), torch.full_like(entry, -1)))
    _to_slots(call.out, call.visible.shape[1], call.slot_block_table, call.slot_rows_per_page)


def _to_slots(entries: torch.Tensor, next_n: int, block_table: torch.Tensor | None, rows_per_page: int) -> None:
    """Slots in place of entries; rows of a request are neighbours."""
    if block_table is not None:
        requests = torch.arange(entries.shape[0], device=entries.device)[:, None] // max(next_n, 1)
        entries.copy_(to_index(entries_to_slots(entries, requests, block_table, rows_per_page)))


def _top_k(logits: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor, out: torch.Tensor) -> None:
    """The picks of a row come in ascending order."""
    k, columns = out.shape[1], logits.shape[1]
    lengths = (ends.clamp(max=columns) - starts).clamp(min=0)
    place = torch.arange(k, device=out.device)
    out.copy_(place.where(place < lengths[:, None], torch.full_like(place, -1)))
    long_rows = (lengths > k).nonzero()[:, 0]
    if len(long_rows) == 0:
        return
    width = int((starts + lengths)[long_rows].max())
    for rows in long_rows.split(max(1, SORT_TILE // width)):
        rank = _rank(logits[rows, :width], starts[rows, None], lengths[rows, None])
        picked = rank.topk(k, dim=1, sorted=False).indices.sort(dim=1).values
        out[rows] = (picked - starts[rows, None]).to(out.dtype)


def _rank(scores: torch.Tensor, starts: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Distinct int64 keys in the order of preference: score, then lower column; NaN below -inf, foreign columns last.

    fp32 bits read as integers grow with the number, or shrink when its sign is set. Adding zero makes -0 equal to +0.
    """
    bits = (scores + 0.0).view(torch.int32).long()
    order = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    order = order.where(~scores.isnan(), torch.full_like(order, -(1 << 31)))
    column = torch.arange(scores.shape[1], device=scores.device)
    inside = (column >= starts) & (column < starts + lengths)
    return ((order << 31) - column).where(inside, torch.full_like(order, torch.iinfo(torch.int64).min))


def score_keys(scores: torch.Tensor, entries: torch.Tensor) -> torch.Tensor:
    """int64 keys of entries with these scores: the larger, the better. The score's bits as a number that grows with it
    are above, 2^32 - 1 less the entry below, so that of equal scores the lower entry wins; -0 is +0, NaN below -inf."""
    bits = (scores.float() + 0.0).view(torch.int32).long()
    order = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    order = order.where(~scores.isnan(), torch.full_like(order, -(1 << 31)))
    return (order << 32) | (0xFFFFFFFF - entries.long())


def top_k_keys(call: KeysCall) -> None:
    columns = call.scores.shape[1]
    here = (call.picks >= 0) & (call.picks < columns)
    picks = call.picks.long().where(here, torch.zeros_like(call.picks, dtype=torch.int64))
    scores = call.scores.gather(1, picks) if columns else torch.zeros_like(picks, dtype=torch.float32)
    entries = whole_entries(picks, call.entries_per_page, call.ranks, call.rank)
    keys = score_keys(scores, entries)
    call.out.copy_(keys.where(here & (entries < 2**31), torch.full_like(keys, torch.iinfo(torch.int64).min)))


def merge_top_k_keys(call: MergeKeysCall) -> None:
    parts, rows, k = call.keys.shape
    keys = call.keys.transpose(0, 1).reshape(rows, parts * k)
    empty = torch.full_like(keys, torch.iinfo(torch.int64).min)
    # entries that int32 cannot name have 0 as the highest bit of their word
    keys = keys.where((keys & 0x80000000) != 0, empty)
    entries = 0xFFFFFFFF - (keys.topk(k, dim=1, sorted=False).values & 0xFFFFFFFF)
    picks = to_index(entries.sort(dim=1).values)
    if call.out is not None:
        call.out.copy_(picks)
    if call.block_table is not None:
        assert call.out_slots is not None
        assert call.out_lens is not None
        own = own_entries(picks, call.rows_per_page, call.ranks, call.rank)
        _to_slots(own, rows // max(call.block_table.shape[0], 1), call.block_table, call.rows_per_page)
        order = (own < 0).int().argsort(dim=1, stable=True)
        call.out_slots.copy_(own.gather(1, order))
        call.out_lens.copy_((own >= 0).sum(dim=1))


def score_top_k_prefill(call: ScoreTopKPrefillCall) -> None:
    """Scores of a chunk of rows in the workspace, then its picks."""
    for first, last, logits, is_scored in call.walk():
        part = call.rows(first, last)
        if is_scored:
            mqa_logits(part.scores(logits))
        start, end = part.cu_seq_len_k_start.long(), part.cu_seq_len_k_end.long().clamp(max=call.k.shape[0])
        column_zero = start if call.max_seqlen_k > 0 else torch.zeros_like(start)
        _top_k(logits, start.clamp(min=0) - column_zero, end - column_zero, part.out)


def score_top_k_decode(call: ScoreTopKDecodeCall) -> None:
    """Scores of a chunk of requests in the workspace, then their picks."""
    for first, last, logits, is_scored in call.walk():
        part = call.requests(first, last)
        if is_scored:
            paged_mqa_logits(part.scores(logits))
        slots = part.slot_block_table, part.slot_rows_per_page
        picks = TopKDecodeCall(logits, part.context_lens, part.out, logits.shape[0], part.out.shape[1], *slots, True)
        top_k_per_row_decode(picks)


# ---- candidate blocks


def select_candidate_blocks(call: SelectBlocksCall) -> None:
    lengths = call.seq_lens.reshape(-1).long().clamp(min=0, max=call.logits.shape[1])
    for rows in torch.arange(lengths.shape[0], device=lengths.device).split(_rows_at_once(call.logits.shape[1])):
        counts = blocks_of(lengths[rows])
        width = int(counts.max()) if len(rows) else 0
        scores = call.logits[rows, : CANDIDATE_BLOCK * width]
        scores = torch.nn.functional.pad(scores, (0, CANDIDATE_BLOCK * width - scores.shape[1]))
        column = torch.arange(scores.shape[1], device=scores.device)
        is_seen = (column < lengths[rows, None]) & ~scores.isnan()
        blocks = scores.where(is_seen, torch.full_like(scores, -torch.inf)).unflatten(1, (-1, CANDIDATE_BLOCK))
        maxima = blocks.amax(dim=2).clamp(max=torch.finfo(torch.float32).max)
        is_any = is_seen.unflatten(1, (-1, CANDIDATE_BLOCK)).any(dim=2)
        maxima = maxima.where(is_any, torch.full_like(maxima, torch.nan))
        block = torch.arange(width, device=scores.device)
        maxima = maxima.where(block != counts[:, None] - 1, torch.full_like(maxima, torch.inf))
        picks = torch.empty_like(call.out[rows])
        _top_k(maxima, torch.zeros_like(counts), counts, picks)
        call.out[rows] = picks


def _rows_at_once(columns: int) -> int:
    return max(1, SORT_TILE // max(columns, 1))


def blocks_of(lengths: torch.Tensor) -> torch.Tensor:
    """Of so many keys."""
    return torch.div(lengths + (CANDIDATE_BLOCK - 1), CANDIDATE_BLOCK, rounding_mode="floor")


def candidate_keys(lengths: torch.Tensor, blocks: int) -> torch.Tensor:
    """int64 number of keys in the candidates of rows that see so many keys: all of these or, of more than `blocks`
    blocks, that many, of which the newest alone may not be full."""
    missing = CANDIDATE_BLOCK * (blocks_of(lengths) - blocks).clamp(min=0)
    return lengths.long() - missing


def score_candidates_decode(call: CandidatesDecodeCall) -> None:
    fmt = formats.FORMATS[call.kv_format]
    next_n, block_size = call.q.shape[1], call.kv_cache.shape[1]
    scale_type = torch.float32 if call.q_scale is None else torch.int32

    def load(row: int, entries: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        requests = torch.full_like(entries, row // next_n)
        slots = entries_to_slots(entries, requests, call.block_tables, block_size)
        here = formats.valid_slots(slots, call.kv_cache.shape[0] * block_size)
        codes, raw_scale = fmt.read_fields(call.kv_cache, block_size, slots[here])
        return here, codes, raw_scale.contiguous().view(scale_type)[:, 0]

    lengths = call.context_lens.reshape(-1).clamp(min=0, max=call.max_model_len)
    q_scale = None if call.q_scale is None else call.q_scale.flatten(0, 1)
    _score_candidates(call, call.q.flatten(0, 1), q_scale, lengths, load)


def score_candidates_prefill(call: CandidatesPrefillCall) -> None:
    keys = call.k.shape[0]
    start = call.cu_seq_len_k_start.long()
    lengths = (call.cu_seq_len_k_end.long().clamp(max=keys) - start).clamp(min=0)
    lengths = lengths.clamp(max=call.max_seqlen_k) if call.max_seqlen_k > 0 else lengths

    def load(row: int, entries: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        place = start[row] + entries
        here = (entries >= 0) & (place >= 0) & (place < keys)
        return here, call.k[place[here]], call.k_scale[place[here]]

    _score_candidates(call, call.q, call.q_scale, lengths, load)


def _score_candidates(
    call: CandidatesDecodeCall | CandidatesPrefillCall,
    q: torch.Tensor,
    q_scale: torch.Tensor | None,
    lengths: torch.Tensor,
    load: Callable[[int, torch.Tensor], tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
) -> None:
    """Scores and picks of each row among the keys of its candidates. load: of a row's entries, which there are, and
    codes and scales of these."""
    counts = candidate_keys(lengths, call.candidates.shape[1])
    for row, count in enumerate(counts.tolist()):
        place = torch.arange(count, device=q.device)
        blocks = call.candidates[row].long()[place // CANDIDATE_BLOCK]
        entries = torch.where(blocks >= 0, blocks * CANDIDATE_BLOCK + place % CANDIDATE_BLOCK, blocks.clamp(max=-1))
        scores = torch.full((1, count), -torch.inf, device=q.device)
        if count > call.out.shape[1]:
            queries = _queries(q[row : row + 1], None if q_scale is None else q_scale[row : row + 1])
            for first in range(0, count, KEY_TILE):
                here, codes, scale = load(row, entries[first : first + KEY_TILE])
                known = _scores(queries, *_keys(codes, scale), call.weights[row : row + 1])
                scores[:, first : first + KEY_TILE][:, here] = known
        picks = torch.empty_like(call.out[row : row + 1])
        _top_k(scores, counts.new_zeros(1), counts[row : row + 1], picks)
        picked = picks[0].long()
        found = entries[picked[picked >= 0]].clamp(min=-1)
        call.out[row] = -1
        call.out[row, : found.shape[0]] = to_index(found)
