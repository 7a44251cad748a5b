# SPDX-License-Identifier: Apache-2.0
"""What the indexer ops mean, in plain torch.

Scores are float64 sums in a fixed order, rounded once to fp32. The dot product of e4m3 codes fits float64 whatever its
order; so does that of a 32-column MXFP4 block, and the four blocks are added in order. The heads are added one by one,
elementwise. So a score depends neither on the rows around it, nor on the tiles, nor on where its key is stored.
"""

from __future__ import annotations

import torch

from cute_kernels import formats, numerics
from cute_kernels.indexer import chunks
from cute_kernels.paging import entries_to_slots, to_index

KEY_TILE = 1024
"""Keys that are expanded to float64 at a time."""
SCORE_TILE = 1 << 18
"""Float64 head scores held at a time: 2 MiB, so that they stay in a core's cache."""
SORT_TILE = 1 << 20
"""Scores that are ranked at a time."""


def fused_indexer_q_rope_quant_fp8(
    positions: torch.Tensor,
    index_q: torch.Tensor,
    index_q_cos_sin_cache: torch.Tensor,
    index_weights: torch.Tensor,
    index_weights_softmax_scale: float,
    index_weights_head_scale: float,
    index_hadamard: bool,
    q_quant: torch.Tensor,
    weights_out: torch.Tensor,
    round_weights: bool,
    use_pdl: bool,
) -> None:
    q = _rotated_query(positions, index_q, index_q_cos_sin_cache, index_hadamard)
    codes, byte = numerics.quantize_e4m3(q, formats.INDEX_DIM)
    q_quant.copy_(codes.view(torch.float8_e4m3fn))
    weights = _weights(index_weights, round_weights) * numerics.ue8m0_scale(byte)[..., 0].float()
    weights_out.copy_(_scaled(weights, index_weights_softmax_scale, index_weights_head_scale))


def fused_indexer_q_rope_quant_mxfp4(
    positions: torch.Tensor,
    index_q: torch.Tensor,
    index_q_cos_sin_cache: torch.Tensor,
    index_weights: torch.Tensor,
    index_weights_softmax_scale: float,
    index_weights_head_scale: float,
    e2m1_rounding: str,
    index_hadamard: bool,
    q_quant: torch.Tensor,
    q_scale: torch.Tensor,
    weights_out: torch.Tensor,
    round_weights: bool,
    use_pdl: bool,
) -> None:
    q = _rotated_query(positions, index_q, index_q_cos_sin_cache, index_hadamard)
    packed, byte = numerics.quantize_e2m1(q, e2m1_rounding)
    q_quant.copy_(packed)
    q_scale.copy_(byte.contiguous().view(torch.int32)[..., 0])
    weights_out.copy_(
        _scaled(_weights(index_weights, round_weights), index_weights_softmax_scale, index_weights_head_scale)
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


def cp_gather_indexer_k_quant_cache(
    kv_cache: torch.Tensor,
    dst_k: torch.Tensor,
    dst_scale: torch.Tensor,
    block_table: torch.Tensor,
    cu_seq_lens: torch.Tensor,
    kv_format: str,
) -> None:
    fmt = formats.FORMATS[kv_format]
    block_size = kv_cache.shape[1]
    bounds = cu_seq_lens.tolist()
    for r in range(block_table.shape[0]):
        first, last = max(bounds[r], 0), min(bounds[r + 1], dst_k.shape[0])
        if last <= first:
            continue
        rows = torch.arange(first, last, device=kv_cache.device)
        slots = entries_to_slots(rows - bounds[r], torch.full_like(rows, r), block_table, block_size)
        here = formats.valid_slots(slots, kv_cache.shape[0] * block_size)
        codes, scale = fmt.read_fields(kv_cache, block_size, slots[here])
        dst_k.view(torch.uint8)[rows[here]] = codes
        dst_scale[rows[here]] = scale


def mqa_logits(
    q: torch.Tensor,
    q_scale: torch.Tensor | None,
    k: torch.Tensor,
    k_scale: torch.Tensor,
    weights: torch.Tensor,
    cu_seq_len_k_start: torch.Tensor,
    cu_seq_len_k_end: torch.Tensor,
    clean_logits: bool,
    max_seqlen_k: int,
    out: torch.Tensor,
) -> None:
    """Only columns inside a row's range are written, and the others when `clean_logits`."""
    if clean_logits:
        out.fill_(-torch.inf)
    start, end = cu_seq_len_k_start.long(), cu_seq_len_k_end.long().clamp(max=k.shape[0])
    if max_seqlen_k > 0:
        end = torch.minimum(end, start + max_seqlen_k)
    column_zero = start.tolist() if max_seqlen_k > 0 else [0] * q.shape[0]
    ranges = list(zip(start.clamp(min=0).tolist(), end.tolist(), strict=True))
    live = [r for r in ranges if r[0] < r[1]]
    step = _rows_per_tile(q.shape[1])
    for n0 in range(min((r[0] for r in live), default=0), max((r[1] for r in live), default=0), KEY_TILE):
        n1 = min(n0 + KEY_TILE, k.shape[0])
        keys, scale = _keys(k[n0:n1], k_scale[n0:n1])
        for m0 in range(0, q.shape[0], step):
            inside = [(max(a, n0), min(b, n1)) for a, b in ranges[m0 : m0 + step]]
            low = min((a for a, b in inside if a < b), default=n1)
            high = max((b for a, b in inside if a < b), default=n1)
            if low == high:
                continue
            tile = slice(m0, m0 + step)
            queries = _queries(q[tile], None if q_scale is None else q_scale[tile])
            scores = _scores(queries, keys[low - n0 : high - n0], scale[low - n0 : high - n0], weights[tile])
            for i, (a, b) in enumerate(inside):
                if a < b:
                    out[m0 + i, a - column_zero[m0 + i] : b - column_zero[m0 + i]] = scores[i, a - low : b - low]


def paged_mqa_logits(
    q: torch.Tensor,
    q_scale: torch.Tensor | None,
    kv_cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    max_model_len: int,
    clean_logits: bool,
    kv_format: str,
    out: torch.Tensor,
) -> None:
    """Only columns below a row's length are written, and the others when `clean_logits`."""
    if clean_logits:
        out.fill_(-torch.inf)
    fmt = formats.FORMATS[kv_format]
    next_n, block_size = q.shape[1], kv_cache.shape[1]
    step = _rows_per_tile(q.shape[2])
    for b, row_lens in enumerate(context_lens.clamp(max=max_model_len).tolist()):
        for n0 in range(0, max(row_lens), KEY_TILE):
            entries = torch.arange(n0, min(n0 + KEY_TILE, max(row_lens)), device=q.device)
            slots = entries_to_slots(entries, torch.full_like(entries, b), block_tables, block_size)
            here = formats.valid_slots(slots, kv_cache.shape[0] * block_size)
            codes, raw_scale = fmt.read_fields(kv_cache, block_size, slots[here])
            scale_type = torch.float32 if q_scale is None else torch.int32
            keys, scale = _keys(codes, raw_scale.contiguous().view(scale_type)[:, 0])
            for j0 in range(0, next_n, step):
                tile = slice(j0, min(j0 + step, next_n))
                queries = _queries(q[b, tile], None if q_scale is None else q_scale[b, tile])
                row0 = b * next_n
                known = _scores(queries, keys, scale, weights[row0 + tile.start : row0 + tile.stop])
                scores = known.new_full((known.shape[0], entries.shape[0]), -torch.inf)
                scores[:, here] = known
                for i, length in enumerate(row_lens[tile]):
                    if length > n0:
                        stop = min(length - n0, entries.shape[0])
                        out[row0 + j0 + i, n0 : n0 + stop] = scores[i, :stop]


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


def top_k_per_row_prefill(
    logits: torch.Tensor,
    row_starts: torch.Tensor,
    row_ends: torch.Tensor,
    out: torch.Tensor,
    num_rows: int,
    k: int,
) -> None:
    _top_k(logits, row_starts[:num_rows].long().clamp(min=0), row_ends[:num_rows].long(), out[:num_rows, :k])


def top_k_per_row_decode(
    logits: torch.Tensor,
    seq_lens: torch.Tensor,
    out: torch.Tensor,
    num_rows: int,
    k: int,
    slot_block_table: torch.Tensor | None,
    slot_rows_per_page: int,
) -> None:
    ends = seq_lens.reshape(-1)[:num_rows].long()
    picks = out[:num_rows, :k]
    _top_k(logits, torch.zeros_like(ends), ends, picks)
    _to_slots(picks, seq_lens.shape[1], slot_block_table, slot_rows_per_page)


def all_visible_entries(
    visible: torch.Tensor, out: torch.Tensor, slot_block_table: torch.Tensor | None, slot_rows_per_page: int
) -> None:
    entry = torch.arange(out.shape[1], dtype=torch.int32, device=out.device)
    out.copy_(entry.where(entry < visible.reshape(-1, 1), torch.full_like(entry, -1)))
    _to_slots(out, visible.shape[1], slot_block_table, slot_rows_per_page)


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


def score_top_k_prefill(
    q: torch.Tensor,
    q_scale: torch.Tensor | None,
    k: torch.Tensor,
    k_scale: torch.Tensor,
    weights: torch.Tensor,
    cu_seq_len_k_start: torch.Tensor,
    cu_seq_len_k_end: torch.Tensor,
    max_seqlen_k: int,
    out: torch.Tensor,
    workspace: torch.Tensor | None,
) -> None:
    """Scores of a chunk of rows in the workspace, then its picks."""
    starts, ends = cu_seq_len_k_start, cu_seq_len_k_end.long().clamp(max=k.shape[0])
    columns = max_seqlen_k if max_seqlen_k > 0 else k.shape[0]
    for first, last, logits, is_scored in chunks.walk(workspace, q.shape[0], columns, 1, out, torch.float32):
        rows = slice(first, last)
        if is_scored:
            scale = None if q_scale is None else q_scale[rows]
            bounds = starts[rows], cu_seq_len_k_end[rows]
            mqa_logits(q[rows], scale, k, k_scale, weights[rows], *bounds, False, max_seqlen_k, logits)
        start = starts[rows].long()
        column_zero = start if max_seqlen_k > 0 else torch.zeros_like(start)
        _top_k(logits, start.clamp(min=0) - column_zero, ends[rows] - column_zero, out[rows])


def score_top_k_decode(
    q: torch.Tensor,
    q_scale: torch.Tensor | None,
    kv_cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    max_model_len: int,
    kv_format: str,
    out: torch.Tensor,
    workspace: torch.Tensor | None,
    slot_block_table: torch.Tensor | None,
    slot_rows_per_page: int,
) -> None:
    """Scores of a chunk of requests in the workspace, then their picks."""
    requests, next_n = q.shape[:2]
    for first, last, logits, is_scored in chunks.walk(workspace, requests, max_model_len, next_n, out, torch.float32):
        own, rows = slice(first, last), slice(first * next_n, last * next_n)
        lens = context_lens[own]
        if is_scored:
            scale = None if q_scale is None else q_scale[own]
            pages = weights[rows], lens, block_tables[own], max_model_len
            paged_mqa_logits(q[own], scale, kv_cache, *pages, False, kv_format, logits)
        table = None if slot_block_table is None else slot_block_table[own]
        top_k_per_row_decode(logits, lens, out[rows], logits.shape[0], out.shape[1], table, slot_rows_per_page)
