# SPDX-License-Identifier: Apache-2.0
"""The compressor: save projections in the state cache, close groups of tokens into compressed cache entries. Of V4.1:
latents of one or two tokens, and the two records that are stored of each.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from cute_kernels import formats, numerics
from cute_kernels.compressor import reference
from cute_kernels.compressor.call import (
    CompressCall,
    FusedCall,
    KeyStoreCall,
    LatentCall,
    RopeInsertCall,
    SaveCall,
    SlotsCall,
)
from cute_kernels.paging import of_request
from cute_kernels.runtime import checks
from cute_kernels.runtime.checks import Checker
from cute_kernels.runtime.key import OpKernel
from cute_kernels.runtime.ops import Cost, define_op, nbytes
from cute_kernels.runtime.plans import planned

__all__ = [
    "compress_latent",
    "compress_norm_rope_store",
    "fused_compress_norm_rope_store",
    "get_compressed_slot_mapping",
    "k_norm_rope_store",
    "rope_quant_insert",
    "save_partial_states",
]


# ---- what all ops that store entries share

RATIOS = (4, 128)
STORE_FORMATS = (
    formats.FP8_DS_MLA,
    formats.PLAIN_BF16,
    formats.PLAIN_FP8,
    formats.INDEXER_FP8,
    formats.INDEXER_MXFP4,
    formats.INDEXER_MXFP4_WIDE,
)
# (quant_block, token_stride, scale_dim): how callers of compress_norm_rope_store spell a format. Plain formats use none
# of the three; they go by the values of their head size.
_GEOMETRY = {
    formats.FP8_DS_MLA.id: (64, 576, 8),
    formats.PLAIN_BF16.id: (64, 576, 8),
    formats.PLAIN_FP8.id: (64, 576, 8),
    formats.INDEXER_FP8.id: (128, 128, 4),
    formats.INDEXER_MXFP4.id: (32, 64, 4),
    formats.INDEXER_MXFP4_WIDE.id: (32, 64, 4),
}


def _check_rows(c: Checker, argument: str, value: torch.Tensor, dtype: torch.dtype, rows: Any) -> None:
    c.tensor(argument, value, dtype, (None,))
    c.require(value.shape[0] >= rows, argument, f"at least {rows} rows, as in slot_mapping", value.shape[0])


def check_store(c: Checker, call: CompressCall | FusedCall) -> formats.CompressorStateFormat:
    """The arguments every op that stores entries has; returns the format of the state cache."""
    fmt = formats.get_format(c, "kv_format", call.kv_format, *STORE_FORMATS)
    c.one_of("compress_ratio", call.compress_ratio, RATIOS)
    c.one_of("e2m1_rounding", call.e2m1_rounding, numerics.E2M1_ROUNDINGS)
    indexer = fmt.dim == formats.INDEX_DIM
    c.require(indexer or not call.index_hadamard, "index_hadamard", f"False for {call.kv_format}", call.index_hadamard)
    state = formats.compressor_state(fmt.dim, call.compress_ratio)
    state.check(c, "state_cache", call.state_cache)
    c.require(call.state_cache.shape[1] > 0, "state_cache", "pages of at least one row", list(call.state_cache.shape))
    fmt.check(c, "kv_cache", call.kv_cache)
    c.require(call.kv_cache.shape[1] > 0, "kv_cache", "pages of at least one row", list(call.kv_cache.shape))
    c.tensor("slot_mapping", call.slot_mapping, torch.int64, (None,))
    rows = call.slot_mapping.shape[0]
    _check_rows(c, "token_to_req_indices", call.token_to_req_indices, torch.int32, rows)
    _check_rows(c, "positions", call.positions, torch.int64, rows)
    _check_rows(c, "kv_slot_mapping", call.kv_slot_mapping, torch.int64, rows)
    c.tensor("cos_sin_cache", call.cos_sin_cache, torch.float32, (None, formats.ROPE_DIM))
    c.require(call.cos_sin_cache.shape[0] > 0, "cos_sin_cache", "at least one position", list(call.cos_sin_cache.shape))
    c.tensor("rms_norm_weight", call.rms_norm_weight, (torch.bfloat16, torch.float32), (fmt.dim,))
    c.tensor("fp8_scale", call.fp8_scale, torch.float32, (1,), optional=True)
    scaled = fmt is formats.PLAIN_FP8
    expected = "a tensor" if scaled else f"None for {call.kv_format}"
    c.require(
        (call.fp8_scale is not None) == scaled, "fp8_scale", expected, "None" if call.fp8_scale is None else "a tensor"
    )
    c.require(call.rms_norm_eps >= 0, "rms_norm_eps", "a number >= 0", call.rms_norm_eps)
    return state


def entry_cost(entries: int, kv_format: str, compress_ratio: int) -> Cost:
    """Reading no state: bytes of the records, flops of the windows, with an exp counted as one."""
    fmt = formats.FORMATS[kv_format]
    if isinstance(fmt, formats.IndexerMxfp4Format):
        fmt = formats.INDEXER_MXFP4
    window = reference.window_rows(compress_ratio)
    return Cost(bytes=entries * fmt.page_bytes(1), flops=entries * fmt.dim * (6 * window + 8))


def validate_entry_slots(op: str, call: CompressCall | FusedCall) -> None:
    """The slots of entries must be distinct where they are slots of the cache."""
    rows = call.slot_mapping.shape[0]
    capacity = call.kv_cache.shape[0] * call.kv_cache.shape[1]
    checks.distinct_slots(op, "kv_slot_mapping", call.kv_slot_mapping[:rows], capacity)


# ---- projections saved, slots of entries


def _check_save(call: SaveCall) -> None:
    c = Checker("save_partial_states")
    c.one_of("compress_ratio", call.compress_ratio, RATIOS)
    c.tensor("kv", call.kv, torch.float32, ("T", "width"))
    head_dim = call.kv.shape[1] // (2 if call.compress_ratio == 4 else 1)
    if head_dim not in (formats.HEAD_DIM, formats.INDEX_DIM) or call.kv.shape[1] % head_dim:
        widths = " or ".join(str(formats.compressor_state(d, call.compress_ratio).width) for d in (512, 128))
        c.fail("kv", f"{widths} columns for compress_ratio {call.compress_ratio}", list(call.kv.shape))
    c.tensor("score", call.score, torch.float32, ("T", "width"))
    c.tensor("ape", call.ape, torch.float32, (call.compress_ratio, "width"))
    c.require(call.block_size > 0, "block_size", "a positive number", call.block_size)
    formats.compressor_state(head_dim, call.compress_ratio).check(c, "state_cache", call.state_cache, call.block_size)
    c.tensor("slot_mapping", call.slot_mapping, torch.int64, (None,))
    rows = call.slot_mapping.shape[0]
    c.require(rows <= call.kv.shape[0], "slot_mapping", f"at most T = {call.kv.shape[0]} rows", rows)
    c.tensor("positions", call.positions, torch.int64, (None,))
    c.require(
        call.positions.shape[0] >= rows,
        "positions",
        f"at least {rows} rows, as in slot_mapping",
        call.positions.shape[0],
    )


def _cost_save(call: SaveCall) -> Cost:
    rows = int((call.slot_mapping >= 0).sum())
    width = call.kv.shape[1]
    return Cost(bytes=rows * (16 * width + 8) + nbytes(call.ape, call.slot_mapping), flops=rows * width)


def _validate_save(call: SaveCall) -> None:
    checks.distinct_slots(
        "save_partial_states", "slot_mapping", call.slot_mapping, call.state_cache.shape[0] * call.block_size
    )


def _save_kernel() -> OpKernel[SaveCall]:
    from cute_kernels.compressor.save import KERNEL

    return KERNEL


_save = define_op(
    "save_partial_states(Tensor kv, Tensor score, Tensor ape, Tensor positions, Tensor(a!) state_cache, "
    "Tensor slot_mapping, SymInt block_size, int compress_ratio) -> ()",
    SaveCall,
    check=_check_save,
    reference=reference.save_partial_states,
    kernel=_save_kernel,
    cost=_cost_save,
    validate=_validate_save,
)


@planned
def save_partial_states(
    kv: torch.Tensor,
    score: torch.Tensor,
    ape: torch.Tensor,
    positions: torch.Tensor,
    state_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    block_size: int,
    state_width: int,
    compress_ratio: int,
    pdl_kwargs: dict[str, Any] | None = None,
) -> None:
    """Store each token's projections in the compressor's state cache; the score gets its position's bias.

    Row t goes to slot slot_mapping[t]: columns 0..width-1 = kv[t], the rest = score[t] + ape[positions[t] mod ratio].
    Copies and one fp32 addition: exact.

    kv, score        fp32 [T, width], rows of any stride (column slices of kv_score)
    ape              fp32 [ratio, width]
    positions        int64 [>= T']
    state_cache      fp32 [num_blocks, block_size, 2 * width], page stride = stride(0); mutated
    slot_mapping     int64 [T'], T' <= T, slots of the state cache: page * block_size + row. Slots outside the cache,
                     negative ones included, are skipped; those inside it must be distinct
    block_size       tokens per state page
    state_width      width: head_dim (512 or 128), twice that for ratio 4
    compress_ratio   4 or 128
    pdl_kwargs       launch options; they never change the result

    Raises ValueError or TypeError on arguments that do not fit. Layout: formats.CompressorStateFormat.
    """
    if not isinstance(kv, torch.Tensor) or kv.dim() != 2 or state_width != kv.shape[1]:
        c = Checker("save_partial_states")
        c.tensor("kv", kv, torch.float32, (None, None))
        c.fail("state_width", f"{kv.shape[1]}, the columns of kv", state_width)
    _save(SaveCall(kv, score, ape, positions, state_cache, slot_mapping, block_size, compress_ratio))


def _check_slots(call: SlotsCall) -> None:
    c = Checker("get_compressed_slot_mapping")
    c.tensor("out", call.out, torch.int64, (None,))
    c.require(call.num_tokens >= 0, "num_tokens", "a number >= 0", call.num_tokens)
    c.require(
        call.out.shape[0] >= call.num_tokens,
        "out",
        f"at least num_tokens = {call.num_tokens} rows",
        list(call.out.shape),
    )
    c.tensor("seq_lens", call.seq_lens, torch.int32, ("R",))
    c.tensor("query_start_loc", call.query_start_loc, torch.int32, (call.seq_lens.shape[0] + 1,))
    c.tensor("block_table", call.block_table, torch.int32, ("R", None))
    c.tensor("slot_mapping", call.slot_mapping, torch.int64, (None,), optional=True)
    if call.slot_mapping is not None:
        rows = call.slot_mapping.shape[0]
        c.require(rows >= call.num_tokens, "slot_mapping", f"at least num_tokens = {call.num_tokens} rows", rows)
    c.require(call.compress_ratio > 0, "compress_ratio", "a positive number", call.compress_ratio)
    whole = call.block_size > 0 and call.block_size % call.compress_ratio == 0
    c.require(whole, "block_size", f"a positive multiple of compress_ratio = {call.compress_ratio}", call.block_size)


def _cost_slots(call: SlotsCall) -> Cost:
    return Cost(bytes=nbytes(call.out, call.query_start_loc, call.seq_lens, call.slot_mapping))


def _validate_slots(call: SlotsCall) -> None:
    checks.ascending("get_compressed_slot_mapping", "query_start_loc", call.query_start_loc)


def _slots_kernel() -> OpKernel[SlotsCall]:
    from cute_kernels.compressor.slots import KERNEL

    return KERNEL


_slots = define_op(
    "get_compressed_slot_mapping(Tensor(a!) out, Tensor query_start_loc, Tensor seq_lens, Tensor block_table, "
    "Tensor? slot_mapping, SymInt num_tokens, SymInt block_size, SymInt compress_ratio) -> ()",
    SlotsCall,
    check=_check_slots,
    reference=reference.get_compressed_slot_mapping,
    kernel=_slots_kernel,
    cost=_cost_slots,
    validate=_validate_slots,
)


@planned
def get_compressed_slot_mapping(
    num_tokens: int,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    compress_ratio: int,
    out: torch.Tensor | None = None,
    *,
    slot_mapping: torch.Tensor | None = None,
) -> torch.Tensor:
    """Slots of the compressed cache that the tokens of a step fill; -1 for a token that closes no group.

    Token t of request r has position pos = seq_lens[r] - query_start_loc[r + 1] + t. If (pos + 1) mod ratio == 0 it
    closes entry g = pos // ratio, in slot block_table[r, g // rows] * rows + g % rows with rows = block_size // ratio.

    num_tokens        rows of the result; rows outside every request give -1
    query_start_loc   int32 [R + 1], ascending first rows of the requests
    seq_lens          int32 [R], context after this step
    block_table       int32 [R, width] of the compressed cache, row-strided; negative pages and columns outside give -1
    block_size        page size in tokens, a multiple of compress_ratio
    compress_ratio    tokens per entry
    out               int64 [>= num_tokens] or None (allocated); all of it is overwritten, -1 past num_tokens
    slot_mapping      int64 [>= num_tokens] or None; given, tokens whose own slot is negative give -1 too

    Returns int64 [num_tokens], the head of `out`. Raises ValueError or TypeError on arguments that do not fit.
    """
    if out is None:
        c = Checker("get_compressed_slot_mapping")
        c.tensor("query_start_loc", query_start_loc, torch.int32, (None,))
        c.ints(num_tokens=num_tokens)
        c.require(num_tokens >= 0, "num_tokens", "a number >= 0", num_tokens)
        out = torch.empty(num_tokens, dtype=torch.int64, device=query_start_loc.device)
    _slots(SlotsCall(out, query_start_loc, seq_lens, block_table, slot_mapping, num_tokens, block_size, compress_ratio))
    return out[:num_tokens]


# ---- entries from the state cache


def _check_compress(call: CompressCall) -> None:
    c = Checker("compress_norm_rope_store")
    check_store(c, call)
    c.tensor("block_table", call.block_table, torch.int32, (None, None))


def _cost_compress(call: CompressCall) -> Cost:
    tokens = reference.closing_tokens(call)
    every = reference.readable_windows(call, tokens)
    entries = entry_cost(every.tokens.shape[0], call.kv_format, call.compress_ratio)
    state_bytes = int(every.cached.sum()) * 2 * 4 * formats.FORMATS[call.kv_format].dim
    return Cost(bytes=entries.bytes + state_bytes + 3 * nbytes(call.slot_mapping), flops=entries.flops)


def _validate_compress(call: CompressCall) -> None:
    validate_entry_slots("compress_norm_rope_store", call)


def _compress_kernel() -> OpKernel[CompressCall]:
    from cute_kernels.compressor.select import COMPRESS

    return COMPRESS


_compress = define_op(
    "compress_norm_rope_store(Tensor state_cache, Tensor token_to_req_indices, Tensor positions, Tensor slot_mapping, "
    "Tensor block_table, Tensor cos_sin_cache, Tensor(a!) kv_cache, Tensor kv_slot_mapping, Tensor rms_norm_weight, "
    "Tensor? fp8_scale, float rms_norm_eps, int compress_ratio, str kv_format, str e2m1_rounding, bool index_hadamard) "
    "-> ()",
    CompressCall,
    check=_check_compress,
    reference=reference.compress_norm_rope_store,
    kernel=_compress_kernel,
    cost=_cost_compress,
    validate=_validate_compress,
)


@functools.partial(planned, reads={"k_cache_metadata": "slot_mapping"})
def compress_norm_rope_store(
    state_cache: torch.Tensor,
    num_actual: int,
    token_to_req_indices: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    state_width: int,
    cos_sin_cache: torch.Tensor,
    kv_cache: torch.Tensor,
    k_cache_metadata: Any,
    pdl_kwargs: dict[str, Any] | None,
    head_dim: int,
    rope_head_dim: int,
    compress_ratio: int,
    overlap: bool,
    use_fp4_cache: bool,
    rms_norm_weight: torch.Tensor,
    rms_norm_eps: float,
    quant_block: int,
    token_stride: int,
    scale_dim: int,
    *,
    kv_format: str | None = None,
    fp8_scale: torch.Tensor | None = None,
    e2m1_rounding: str = "ties_to_lower",
    index_hadamard: bool = False,
) -> None:
    """Compute the compressed entries that a step closes, from the state cache, and store them.

    Row t < num_actual acts iff slot_mapping[t] is a slot of the state cache, (positions[t] + 1) mod ratio == 0 and
    k_cache_metadata.slot_mapping[t] is a slot of kv_cache; that is where entry g = positions[t] // ratio goes. Per
    channel, x = sum over the window of softmax(score) * kv (ratio 128: the 128 own tokens; ratio 4: 8 tokens, the
    previous group's first halves and the own group's second halves; tokens before position 0 take no part). Then
    y = x * rsqrt(mean(x^2) + eps) * weight, its last 64 columns rotated with position g * ratio, rounded to bf16, and

        fp8_ds_mla/1         e4m3 per 64 columns, rotated columns bf16
        plain_bf16/1         as is
        plain_fp8/1          e4m3 of the bf16 value times the fp32 inverse of fp8_scale
        indexer_fp8/1        e4m3 with one scale for all 128 columns
        indexer_mxfp4/1      e2m1 per 32 columns; indexer_mxfp4_wide/1 is the same in rows of 132 bytes

    state_cache            fp32 [num_blocks, block_size, 2 * state_width], the step's own rows already saved
    num_actual             rows to look at, at most the rows of slot_mapping
    token_to_req_indices   int32 [>= num_actual]; a row whose request has no row in the table is skipped
    positions              int64 [>= num_actual]
    slot_mapping           int64 [>= num_actual], state slots
    block_table            int32 [R, columns] of the state cache, row-strided; only the windows' pages are looked up. An
                           entry whose window has a row on a page that is negative or outside the cache is skipped
    block_size             tokens per state page
    state_width            head_dim, twice that for ratio 4
    cos_sin_cache          fp32 [max_pos, 64], cos then sin
    kv_cache               the compressed cache, [num_blocks, rows, row_elements] of the format; mutated
    k_cache_metadata       object whose `slot_mapping` is int64 [>= num_actual]: slots of kv_cache, distinct where valid
    pdl_kwargs             launch options; they never change the result
    head_dim               512, or 128 for the indexer
    rope_head_dim          64
    compress_ratio         4 or 128
    overlap                compress_ratio == 4
    use_fp4_cache          the format is MXFP4 (head_dim 128 only)
    rms_norm_weight        bf16 or fp32 [head_dim]
    rms_norm_eps           added to the mean square
    quant_block            columns per scale, with token_stride (data bytes) and scale_dim (scale bytes) of a record:
                           (64, 576, 8) for head_dim 512, (128, 128, 4) for fp8 and (32, 64, 4) for MXFP4 indexer rows
    kv_format              record format id; None: fp8_ds_mla/1 for head_dim 512, else indexer_fp8/1 or indexer_mxfp4/1
    fp8_scale              fp32 [1], for plain_fp8/1 only: value = code * scale
    e2m1_rounding          "ties_to_lower" or "ties_to_even", for MXFP4
    index_hadamard         indexer only: the bf16 entry goes through a 128-point Hadamard transform in fp32 and is
                           rounded to bf16 again before it is quantized

    Raises ValueError or TypeError on arguments that do not fit.
    """
    c = Checker("compress_norm_rope_store")
    c.one_of("head_dim", head_dim, (formats.HEAD_DIM, formats.INDEX_DIM))
    c.one_of("compress_ratio", compress_ratio, RATIOS)
    if kv_format is None:
        small = formats.INDEXER_MXFP4 if use_fp4_cache else formats.INDEXER_FP8
        kv_format = formats.FP8_DS_MLA.id if head_dim == formats.HEAD_DIM else small.id
    fmt = formats.get_format(c, "kv_format", kv_format, *STORE_FORMATS)
    if fmt.dim != head_dim:
        c.fail("kv_format", f"a format with {head_dim} columns", repr(kv_format))
    fp4 = isinstance(fmt, formats.IndexerMxfp4Format)
    width = formats.compressor_state(head_dim, compress_ratio).width
    block, stride, scale = _GEOMETRY[kv_format]
    c.tensor("state_cache", state_cache, torch.float32, (None, None, None))
    c.flags(overlap=overlap, use_fp4_cache=use_fp4_cache)
    c.ints(num_actual=num_actual, rope_head_dim=rope_head_dim, block_size=block_size, state_width=state_width)
    c.ints(quant_block=quant_block, token_stride=token_stride, scale_dim=scale_dim)
    for argument, got, expected in (
        ("rope_head_dim", rope_head_dim, formats.ROPE_DIM),
        ("overlap", overlap, compress_ratio == 4),
        ("use_fp4_cache", use_fp4_cache, fp4),
        ("block_size", block_size, state_cache.shape[1]),
        ("state_width", state_width, width),
        ("quant_block", quant_block, block),
        ("token_stride", token_stride, stride),
        ("scale_dim", scale_dim, scale),
    ):
        # Messages are built on failure only: a traced call has no strings of symbolic sizes.
        if got != expected:
            sizes = f"head_dim {head_dim}, compress_ratio {compress_ratio}, pages of {state_cache.shape[1]} tokens"
            c.fail(argument, f"{expected} ({kv_format}, {sizes})", got)
    c.tensor("slot_mapping", slot_mapping, torch.int64, (None,))
    if not 0 <= num_actual <= slot_mapping.shape[0]:
        c.fail("num_actual", f"0 to {slot_mapping.shape[0]}, the rows of slot_mapping", num_actual)
    entry_slots: Any = getattr(k_cache_metadata, "slot_mapping", None)
    c.tensor("k_cache_metadata.slot_mapping", entry_slots, torch.int64, (None,))
    if entry_slots.shape[0] < num_actual:
        c.fail("k_cache_metadata.slot_mapping", f"at least num_actual = {num_actual} rows", entry_slots.shape[0])
    _compress(
        CompressCall(
            state_cache,
            token_to_req_indices,
            positions,
            slot_mapping[:num_actual],
            block_table,
            cos_sin_cache,
            kv_cache,
            entry_slots,
            rms_norm_weight,
            fp8_scale,
            rms_norm_eps,
            compress_ratio,
            kv_format,
            e2m1_rounding,
            index_hadamard,
        )
    )


# ---- saving and storing in one

PERSIST_MODES = ("all", "window")


def _check_fused(call: FusedCall) -> None:
    c = Checker("fused_compress_norm_rope_store")
    state = check_store(c, call)
    c.tensor("kv_score", call.kv_score, torch.float32, (None, state.row_elements))
    rows = call.slot_mapping.shape[0]
    c.require(
        rows <= call.kv_score.shape[0], "slot_mapping", f"at most the {call.kv_score.shape[0]} rows of kv_score", rows
    )
    c.tensor("ape", call.ape, torch.float32, (call.compress_ratio, state.width))
    c.tensor("block_table", call.block_table, torch.int32, ("R", None))
    c.tensor("query_start_loc", call.query_start_loc, torch.int32, (call.block_table.shape[0] + 1,))
    c.tensor("min_restart", call.min_restart, torch.int32, ("R",), optional=True)
    c.one_of("persist", call.persist, PERSIST_MODES)
    whole = call.keep_every >= 0 and call.keep_every % call.compress_ratio == 0
    c.require(
        whole, "keep_every", f"0 or a positive multiple of compress_ratio = {call.compress_ratio}", call.keep_every
    )
    if call.cyclic_table:
        requests, columns = call.block_table.shape
        window = reference.window_rows(call.compress_ratio)
        held = columns * call.state_cache.shape[1]
        expected = f"columns for {window} tokens or more, which a cyclic table has"
        c.require(requests == 0 or held >= window, "block_table", expected, f"pages for {held}")


def _cost_fused(call: FusedCall) -> Cost:
    tokens = reference.closing_tokens(call)
    every = reference.readable_windows(call, tokens)
    saved = reference.saved_tokens(call)
    needed = saved.clone()
    needed[every.step_rows[every.step_rows >= 0]] = True
    entries = entry_cost(every.tokens.shape[0], call.kv_format, call.compress_ratio)
    state_bytes = int(every.cached.sum()) * 2 * 4 * formats.FORMATS[call.kv_format].dim
    row_bytes = 4 * call.state_cache.shape[2]
    moved = entries.bytes + state_bytes + (int(needed.sum()) + int(saved.sum())) * row_bytes
    return Cost(bytes=moved + 3 * nbytes(call.slot_mapping) + nbytes(call.ape), flops=entries.flops)


def _validate_fused(call: FusedCall) -> None:
    op = "fused_compress_norm_rope_store"
    checks.ascending(op, "query_start_loc", call.query_start_loc)
    validate_entry_slots(op, call)
    saved = reference.saved_tokens(call)
    written = call.slot_mapping.where(saved, torch.full_like(call.slot_mapping, -1))
    checks.distinct_slots(op, "slot_mapping", written, call.state_cache.shape[0] * call.state_cache.shape[1])
    tokens = reference.closing_tokens(call)
    _validate_positions(op, call, reference.windows_of(call, tokens))
    every = reference.readable_windows(call, tokens)
    _validate_reads(op, every, call.token_to_req_indices, call.slot_mapping[saved])


def _validate_positions(op: str, call: FusedCall, every: reference.Windows) -> None:
    """Rows of the step in the window of an entry must be at the window's positions, if they have a slot."""
    capacity = call.state_cache.shape[0] * call.state_cache.shape[1]
    rows = every.step_rows.clamp(min=0)
    has_slot = (every.step_rows >= 0) & formats.valid_slots(call.slot_mapping, capacity)[rows]
    wrong = (has_slot & (call.positions[rows] != every.positions)).nonzero()
    if wrong.shape[0] == 0:
        return
    entry, place = wrong[0].tolist()
    row, closing = int(rows[entry, place]), int(every.tokens[entry])
    Checker(op).fail(
        f"positions[{row}]",
        f"{int(every.positions[entry, place])}, as positions are consecutive and row {closing} is at "
        f"{int(call.positions[closing])}",
        int(call.positions[row]),
    )


def _validate_reads(
    op: str, every: reference.Windows, token_to_req_indices: torch.Tensor, written: torch.Tensor
) -> None:
    """No row that the call reads from the state cache may lie in a slot that the call writes."""
    clash = (torch.isin(every.slots, written) & every.cached).nonzero()
    if clash.shape[0] == 0:
        return
    entry, row = clash[0].tolist()
    slot, position = int(every.slots[entry, row]), int(every.positions[entry, row])
    request = int(token_to_req_indices[every.tokens[entry]])
    Checker(op).fail(
        "slot_mapping",
        "slots that hold no state row this call still reads",
        f"slot {slot}, which holds position {position} of request {request}",
    )


def _fused_kernel() -> OpKernel[FusedCall]:
    from cute_kernels.compressor.select import FUSED

    return FUSED


_fused = define_op(
    "fused_compress_norm_rope_store(Tensor kv_score, Tensor ape, Tensor positions, Tensor token_to_req_indices, "
    "Tensor query_start_loc, Tensor(a!) state_cache, Tensor slot_mapping, Tensor block_table, Tensor cos_sin_cache, "
    "Tensor(b!) kv_cache, Tensor kv_slot_mapping, Tensor rms_norm_weight, Tensor? min_restart, Tensor? fp8_scale, "
    "float rms_norm_eps, int compress_ratio, SymInt keep_every, str kv_format, str persist, str e2m1_rounding, "
    "bool index_hadamard, bool use_pdl, bool cyclic_table, "
    "bool raw_scores) -> ()",
    FusedCall,
    check=_check_fused,
    reference=reference.fused_compress_norm_rope_store,
    kernel=_fused_kernel,
    cost=_cost_fused,
    validate=_validate_fused,
)


@planned
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
    rms_norm_eps: float,
    compress_ratio: int,
    *,
    kv_format: str,
    persist: str = "all",
    min_restart: torch.Tensor | None = None,
    keep_every: int = 0,
    index_hadamard: bool = False,
    e2m1_rounding: str = "ties_to_lower",
    fp8_scale: torch.Tensor | None = None,
    use_pdl: bool = False,
    cyclic_table: bool = False,
    raw_scores: bool = False,
) -> None:
    """save_partial_states and compress_norm_rope_store in one op, with the same bytes in kv_cache.

    Window rows that belong to this step are read from kv_score, whatever their slot; older ones from the state cache.
    A row acts as in compress_norm_rope_store; a row with an invalid state slot saves nothing and closes nothing.

    The op does not order its reads of the state cache and its writes to it: no slot written in a call may hold a row
    that the call still reads. With CUTE_KERNELS_CHECK=1 in the environment this is checked and raises ValueError.

    kv_score               fp32 [T, 2 * width], kv half then score half, rows of any stride: columns of a wider
                           projection will do (16-byte aligned on a GPU)
    ape                    fp32 [ratio, width], added to the score half of the row with that position mod ratio. A
                           constant: with use_pdl it may be read before the kernel ahead has ended
    positions              int64 [>= T'], consecutive within a request, wherever its rows have a slot
    token_to_req_indices   int32 [>= T']; a row whose request is not in 0..R-1 closes nothing
    query_start_loc        int32 [R + 1]: request r has rows query_start_loc[r] to query_start_loc[r + 1] - 1
    state_cache            fp32 [num_blocks, block_size, 2 * width], page stride = stride(0); mutated
    slot_mapping           int64 [T'], T' <= T, state slots, distinct where they are saved
    block_table            int32 [R, columns] of the state cache, row-strided; for rows older than the step. An entry
                           that needs one on a page that is negative or outside the cache is skipped
    cos_sin_cache          fp32 [max_pos, 64], cos then sin
    kv_cache               the compressed cache, [num_blocks, rows, row_elements] of kv_format; mutated
    kv_slot_mapping        int64 [>= T'], slots of kv_cache, distinct where valid
    rms_norm_weight        bf16 or fp32 [head_dim]
    rms_norm_eps           added to the mean square
    compress_ratio         4 or 128
    kv_format              record format id, as in compress_norm_rope_store; it implies head_dim
    persist                "all": every row is saved. "window": only rows that a later step can read: with
                           p = min_restart[r], positions from 4 * (p // 4) - 4 on (ratio 4), from 128 * (p // 128) on
                           (ratio 128)
    min_restart            int32 [R], the smallest position from which a request may be scheduled after this step,
                           rejected draft tokens included; None: its first position of this step
    keep_every             prefix-cache block in tokens, a multiple of compress_ratio, or 0. "window" with ratio 4 also
                           saves the last 4 positions before each of its multiples, which a request resumed there reads
    index_hadamard, e2m1_rounding, fp8_scale   as in compress_norm_rope_store
    use_pdl                start while the kernel before on the stream still runs (programmatic dependent launch), and
                           wait for it before anything but constants is read
    cyclic_table           whether columns of the block table come round again: position p is on the page of column
                           (p // rows of a page) mod columns, so that a table holds the pages of a window only. Slots of
                           a step may then repeat, where they are not saved
    raw_scores             whether the state cache holds scores without ape, which every row then gets when it is read

    Raises ValueError or TypeError on arguments that do not fit.
    """
    _fused(
        FusedCall(
            kv_score,
            ape,
            positions,
            token_to_req_indices,
            query_start_loc,
            state_cache,
            slot_mapping,
            block_table,
            cos_sin_cache,
            kv_cache,
            kv_slot_mapping,
            rms_norm_weight,
            min_restart,
            fp8_scale,
            rms_norm_eps,
            compress_ratio,
            keep_every,
            kv_format,
            persist,
            e2m1_rounding,
            index_hadamard,
            use_pdl,
            cyclic_table,
            raw_scores,
        )
    )


# ---- V4.1: latents, and what is stored of them

LATENT_RATIOS = (1, 2)
ENTRY_FORMATS = (formats.FP8_DS_MLA, *formats.V41_FORMATS)
KEY_FORMATS = (formats.INDEXER_FP8, formats.INDEXER_MXFP4)


_OF_REQUESTS = ("token_to_req_indices", "query_start_loc")


def _check_latent(call: LatentCall) -> None:
    c = Checker("compress_latent")
    c.one_of("compress_ratio", call.compress_ratio, LATENT_RATIOS)
    c.tensor("kv_score", call.kv_score, torch.float32, ("T", formats.HEAD_DIM * call.compress_ratio))
    c.tensor("out", call.out, torch.bfloat16, ("T", formats.HEAD_DIM))
    c.tensor("norm_weight", call.norm_weight, torch.bfloat16, (formats.HEAD_DIM,))
    c.require(call.eps >= 0, "eps", "a number >= 0", call.eps)
    state = {name: getattr(call, name) for name in ("state_cache", "slot_mapping", *_OF_REQUESTS)}
    if call.compress_ratio == 1:
        rows = call.kv_score.shape[0]
        for name, value in state.items():
            c.require(value is None, name, "None for compress_ratio 1", "a tensor")
    else:
        for name, value in state.items():
            c.require(value is not None, name, "a tensor for compress_ratio 2", "None")
        c.tensor("slot_mapping", call.slot_mapping, torch.int64, (None,))
        assert call.slot_mapping is not None
        assert call.state_cache is not None
        rows = call.slot_mapping.shape[0]
        c.require(rows <= call.kv_score.shape[0], "slot_mapping", f"at most T = {call.kv_score.shape[0]} rows", rows)
        formats.compressor_state(formats.HEAD_DIM, 2).check(c, "state_cache", call.state_cache)
        ring = call.state_cache.shape[1]
        c.require(ring > 0 and ring % 2 == 0, "state_cache", "pages of an even number of rows", ring)
        assert call.token_to_req_indices is not None
        assert call.query_start_loc is not None
        _check_rows(c, "token_to_req_indices", call.token_to_req_indices, torch.int32, rows)
        c.tensor("query_start_loc", call.query_start_loc, torch.int32, (None,))
        c.require(call.query_start_loc.shape[0] > 0, "query_start_loc", "R + 1 elements", "none")
    _check_rows(c, "positions", call.positions, torch.int64, rows)


def _cost_latent(call: LatentCall) -> Cost:
    if call.compress_ratio == 1:
        return Cost(bytes=nbytes(call.kv_score, call.out, call.norm_weight))
    acts, before, _ = reference.partners(call)
    closing = acts & (call.positions[: acts.shape[0]] % 2 == 1)
    kept = reference.kept_rows(call)
    read = closing | kept
    read[before[closing & (before >= 0)]] = True
    of_ring = int((closing & (before < 0)).sum())
    row = 4 * call.kv_score.shape[1]
    moved = (int(read.sum()) + of_ring + int(kept.sum())) * row + 2 * formats.HEAD_DIM * int(closing.sum())
    return Cost(bytes=moved + 20 * acts.shape[0] + nbytes(call.norm_weight, call.query_start_loc))


def _validate_latent(call: LatentCall) -> None:
    if call.compress_ratio == 1:
        return
    op = "compress_latent"
    assert call.query_start_loc is not None
    assert call.slot_mapping is not None
    assert call.state_cache is not None
    checks.ascending(op, "query_start_loc", call.query_start_loc)
    _validate_owners(op, call)
    kept = reference.kept_rows(call)
    written = call.slot_mapping.where(kept, torch.full_like(call.slot_mapping, -1))
    checks.distinct_slots(op, "slot_mapping", written, call.state_cache.shape[0] * call.state_cache.shape[1])


def _validate_owners(op: str, call: LatentCall) -> None:
    """Rows that take part must lie between the starts of their requests."""
    assert call.query_start_loc is not None
    assert call.token_to_req_indices is not None
    acts, _, _ = reference.partners(call)
    requests, row = call.token_to_req_indices[: acts.shape[0]], torch.arange(acts.shape[0], device=acts.device)
    first, end = (of_request(starts, requests) for starts in (call.query_start_loc[:-1], call.query_start_loc[1:]))
    wrong = (acts & ((row < first) | (row >= end))).nonzero()
    if wrong.shape[0]:
        at = int(wrong[0])
        whose = f"a request whose rows include row {at}"
        Checker(op).fail(
            f"token_to_req_indices[{at}]", whose, f"{int(requests[at])}, rows {int(first[at])} to {int(end[at]) - 1}"
        )


def _latent_kernel() -> OpKernel[LatentCall]:
    from cute_kernels.compressor.latent import KERNEL

    return KERNEL


_latent = define_op(
    "compress_latent(Tensor kv_score, Tensor positions, Tensor? token_to_req_indices, Tensor? query_start_loc, "
    "Tensor(a!)? state_cache, Tensor? slot_mapping, Tensor norm_weight, float eps, int compress_ratio, "
    "Tensor(b!) out, bool use_pdl) -> ()",
    LatentCall,
    check=_check_latent,
    reference=reference.compress_latent,
    kernel=_latent_kernel,
    cost=_cost_latent,
    validate=_validate_latent,
)


@planned
def compress_latent(
    kv_score: torch.Tensor,
    positions: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    compress_ratio: int,
    *,
    state_cache: torch.Tensor | None = None,
    slot_mapping: torch.Tensor | None = None,
    query_start_loc: torch.Tensor | None = None,
    token_to_req_indices: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    use_pdl: bool = False,
) -> torch.Tensor:
    """The latents of V4.1's compressor: one for each token, or for each two.

    Ratio 1: out[t] = norm(kv_score[t]). Ratio 2: a row at an odd position closes its latent, norm(m) with m, per
    channel, the mean of the kv halves of it and the row before weighted by the softmax of their gate halves. The row
    before is that of this step, or for the first row of a request that of the request's ring, which then keeps the
    request's last rows. x and m are rounded to bf16, norm(x) = x * rsqrt(mean(x^2) + eps) * weight in fp32, rounded
    once. The latent is not rotated.

    kv_score               fp32 [T, 512 * ratio], of ratio 2 kv half then gate half; rows of any stride (16-byte
                           aligned on a GPU)
    positions              int64 [>= T'], consecutive within a request
    norm_weight            bf16 [512]
    eps                    added to the mean square; 1e-20 makes zeros of a row of zeros
    compress_ratio         1, which takes none of the next four and T' = T, or 2
    state_cache            fp32 [num_blocks, rows, 1024], a block being a request's ring: the row of position p is
                           number p mod rows, which is even; page stride = stride(0); mutated
    slot_mapping           int64 [T'], T' <= T: where a row's ring has it, block * rows + p mod rows. A slot outside
                           the cache: the row closes and keeps nothing
    query_start_loc        int32 [R + 1]: request r has rows query_start_loc[r] to query_start_loc[r + 1] - 1. The last
                           min(its rows, rows of the ring) are kept
    token_to_req_indices   int32 [>= T']; a row whose request is not in 0..R-1 closes and keeps nothing
    out                    bf16 [T, 512], row-strided; of ratio 2 only the rows that close a latent are written
    use_pdl                start while the kernel before on the stream still runs (programmatic dependent launch), and
                           wait for it before anything but norm_weight is read

    Returns out. Raises ValueError or TypeError on arguments that do not fit.
    """
    if out is None:
        Checker("compress_latent").tensor("kv_score", kv_score, torch.float32, (None, None))
        out = kv_score.new_empty((kv_score.shape[0], formats.HEAD_DIM), dtype=torch.bfloat16)
    requests = token_to_req_indices, query_start_loc
    ring = state_cache, slot_mapping
    _latent(LatentCall(kv_score, positions, *requests, *ring, norm_weight, eps, compress_ratio, out, use_pdl))
    return out


def _check_stored(c: Checker, call: RopeInsertCall | KeyStoreCall, *allowed: formats.KVFormat) -> None:
    """What both ops that store something of a latent have."""
    fmt = formats.get_format(c, "kv_format", call.kv_format, *allowed)
    c.one_of("compress_ratio", call.compress_ratio, LATENT_RATIOS)
    fmt.check(c, "kv_cache", call.kv_cache)
    c.require(call.kv_cache.shape[1] > 0, "kv_cache", "pages of at least one row", list(call.kv_cache.shape))
    c.tensor("slot_mapping", call.slot_mapping, torch.int64, (None,))
    _check_rows(c, "positions", call.positions, torch.int64, call.slot_mapping.shape[0])
    c.tensor("cos_sin_cache", call.cos_sin_cache, torch.float32, (None, formats.ROPE_DIM))
    c.require(call.cos_sin_cache.shape[0] > 0, "cos_sin_cache", "at least one position", list(call.cos_sin_cache.shape))


def _cost_stored(call: RopeInsertCall | KeyStoreCall) -> Cost:
    fmt = formats.FORMATS[call.kv_format]
    rows = reference.stored_rows(call)[0].shape[0]
    read = 2 * fmt.dim + 4 * formats.ROPE_DIM
    return Cost(bytes=rows * (read + fmt.page_bytes(1)) + 16 * call.slot_mapping.shape[0])


def _validate_stored(op: str, call: RopeInsertCall | KeyStoreCall) -> None:
    """The slots that the call writes must be distinct."""
    rows, _ = reference.stored_rows(call)
    checks.distinct_slots(op, "slot_mapping", call.slot_mapping[rows], call.kv_cache.shape[0] * call.kv_cache.shape[1])


def _check_rope_insert(call: RopeInsertCall) -> None:
    c = Checker("rope_quant_insert")
    _check_stored(c, call, *ENTRY_FORMATS)
    c.tensor("latent", call.latent, torch.bfloat16, (None, formats.HEAD_DIM))
    rows = call.slot_mapping.shape[0]
    c.require(rows <= call.latent.shape[0], "slot_mapping", f"at most the {call.latent.shape[0]} rows of latent", rows)


def _validate_rope_insert(call: RopeInsertCall) -> None:
    _validate_stored("rope_quant_insert", call)


def _rope_insert_kernel() -> OpKernel[RopeInsertCall]:
    from cute_kernels.compressor.latent_store import INSERT

    return INSERT


_rope_insert = define_op(
    "rope_quant_insert(Tensor latent, Tensor positions, Tensor cos_sin_cache, Tensor(a!) kv_cache, "
    "Tensor slot_mapping, int compress_ratio, str kv_format, bool use_pdl) -> ()",
    RopeInsertCall,
    check=_check_rope_insert,
    reference=reference.rope_quant_insert,
    kernel=_rope_insert_kernel,
    cost=_cost_stored,
    validate=_validate_rope_insert,
)


@planned
def rope_quant_insert(
    latent: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    compress_ratio: int,
    *,
    kv_format: str = formats.FP8_DS_MLA.id,
    use_pdl: bool = False,
) -> None:
    """Store the entries of V4.1's compressed cache: latents, rotated, rounded to bf16, quantized.

    Row t acts iff slot_mapping[t] is a slot of the cache and (positions[t] + 1) mod ratio == 0. Its last 64 columns are
    rotated with the entry's first position, positions[t] - positions[t] mod ratio, in fp32, and rounded to bf16 before
    anything looks at their size.

    latent           bf16 [T, 512], row-strided: what `compress_latent` returns
    positions        int64 [>= T']; a position outside the table takes the table's nearest row
    cos_sin_cache    fp32 [max_pos, 64], cos then sin
    kv_cache         the compressed cache, [num_blocks, rows, row_elements] of kv_format; mutated
    slot_mapping     int64 [T'], T' <= T, slots of kv_cache, distinct where valid
    compress_ratio   1 or 2
    kv_format        record format id: "fp8_ds_mla/1", or V4.1's own "mxfp8_v41/1", "nvfp4_v41/1" or a split form
    use_pdl          as of `compress_latent`

    Raises ValueError or TypeError on arguments that do not fit.
    """
    cache = kv_cache, slot_mapping, compress_ratio, kv_format
    _rope_insert(RopeInsertCall(latent, positions, cos_sin_cache, *cache, use_pdl))


def _check_key_store(call: KeyStoreCall) -> None:
    c = Checker("k_norm_rope_store")
    _check_stored(c, call, *KEY_FORMATS)
    c.tensor("k", call.k, torch.bfloat16, (None, formats.INDEX_DIM))
    rows = call.slot_mapping.shape[0]
    c.require(rows <= call.k.shape[0], "slot_mapping", f"at most the {call.k.shape[0]} rows of k", rows)
    c.tensor("norm_weight", call.norm_weight, torch.bfloat16, (formats.INDEX_DIM,))
    c.require(call.eps >= 0, "eps", "a number >= 0", call.eps)


def _validate_key_store(call: KeyStoreCall) -> None:
    _validate_stored("k_norm_rope_store", call)


def _key_store_kernel() -> OpKernel[KeyStoreCall]:
    from cute_kernels.compressor.latent_store import STORE

    return STORE


_key_store = define_op(
    "k_norm_rope_store(Tensor k, Tensor norm_weight, float eps, Tensor positions, Tensor cos_sin_cache, "
    "Tensor(a!) kv_cache, Tensor slot_mapping, int compress_ratio, str kv_format, bool use_pdl) -> ()",
    KeyStoreCall,
    check=_check_key_store,
    reference=reference.k_norm_rope_store,
    kernel=_key_store_kernel,
    cost=_cost_stored,
    validate=_validate_key_store,
)


@planned
def k_norm_rope_store(
    k: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    compress_ratio: int,
    *,
    kv_format: str = formats.INDEXER_FP8.id,
    use_pdl: bool = False,
) -> None:
    """Store V4.1's index keys: normed, rounded to bf16, rotated, rounded to bf16, quantized.

    Rows act, and are rotated, as in `rope_quant_insert`. norm(x) = x * rsqrt(mean(x^2) + eps) * weight in fp32. MXFP4
    codes are rounded to nearest, ties to even, and the smallest absmax of a block is 6 * 2^-126; of FP8 it is 1e-4.

    k                bf16 [T, 128], row-strided: latents times the key projection
    norm_weight      bf16 [128]
    eps              added to the mean square
    positions        int64 [>= T']; a position outside the table takes the table's nearest row
    cos_sin_cache    fp32 [max_pos, 64], cos then sin
    kv_cache         the cache of keys, [num_blocks, rows, row_elements] of kv_format; mutated
    slot_mapping     int64 [T'], T' <= T, slots of kv_cache, distinct where valid
    compress_ratio   1 or 2
    kv_format        record format id: "indexer_fp8/1" or "indexer_mxfp4/1"
    use_pdl          as of `compress_latent`

    Raises ValueError or TypeError on arguments that do not fit.
    """
    rows = k, norm_weight, eps, positions, cos_sin_cache
    _key_store(KeyStoreCall(*rows, kv_cache, slot_mapping, compress_ratio, kv_format, use_pdl))
