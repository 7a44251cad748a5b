"""Compressed entries from the state cache, and the checks that all ops that store entries share."""

from __future__ import annotations

from typing import Any

import torch

from cute_kernels import formats, numerics
from cute_kernels.compressor import reference
from cute_kernels.runtime import validate
from cute_kernels.runtime.checks import Checker
from cute_kernels.runtime.ops import Cost, define_op, nbytes

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


def check_store(
    c: Checker,
    state_cache: torch.Tensor,
    token_to_req_indices: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
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
) -> formats.CompressorStateFormat:
    """The arguments every op that stores entries has; returns the format of the state cache."""
    fmt = formats.get_format(c, "kv_format", kv_format, *STORE_FORMATS)
    c.one_of("compress_ratio", compress_ratio, RATIOS)
    c.one_of("e2m1_rounding", e2m1_rounding, numerics.E2M1_ROUNDINGS)
    indexer = fmt.dim == formats.INDEX_DIM
    c.require(indexer or not index_hadamard, "index_hadamard", f"False for {kv_format}", index_hadamard)
    state = formats.compressor_state(fmt.dim, compress_ratio)
    state.check(c, "state_cache", state_cache)
    c.require(state_cache.shape[1] > 0, "state_cache", "pages of at least one row", list(state_cache.shape))
    fmt.check(c, "kv_cache", kv_cache)
    c.require(kv_cache.shape[1] > 0, "kv_cache", "pages of at least one row", list(kv_cache.shape))
    c.tensor("slot_mapping", slot_mapping, torch.int64, (None,))
    rows = slot_mapping.shape[0]
    _check_rows(c, "token_to_req_indices", token_to_req_indices, torch.int32, rows)
    _check_rows(c, "positions", positions, torch.int64, rows)
    _check_rows(c, "kv_slot_mapping", kv_slot_mapping, torch.int64, rows)
    c.tensor("cos_sin_cache", cos_sin_cache, torch.float32, (None, formats.ROPE_DIM))
    c.require(cos_sin_cache.shape[0] > 0, "cos_sin_cache", "at least one position", list(cos_sin_cache.shape))
    c.tensor("rms_norm_weight", rms_norm_weight, (torch.bfloat16, torch.float32), (fmt.dim,))
    c.tensor("fp8_scale", fp8_scale, torch.float32, (1,), optional=True)
    scaled = fmt is formats.PLAIN_FP8
    expected = "a tensor" if scaled else f"None for {kv_format}"
    c.require((fp8_scale is not None) == scaled, "fp8_scale", expected, "None" if fp8_scale is None else "a tensor")
    c.require(rms_norm_eps >= 0, "rms_norm_eps", "a number >= 0", rms_norm_eps)
    return state


def entry_cost(entries: int, kv_format: str, compress_ratio: int) -> Cost:
    """Reading no state: bytes of the records, flops of the windows, with an exp counted as one."""
    fmt = formats.FORMATS[kv_format]
    if isinstance(fmt, formats.IndexerMxfp4Format):
        fmt = formats.INDEXER_MXFP4
    window = reference.window_rows(compress_ratio)
    return Cost(bytes=entries * fmt.page_bytes(1), flops=entries * fmt.dim * (6 * window + 8))


def _check_compress(
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
    c = Checker("compress_norm_rope_store")
    check_store(
        c,
        state_cache,
        token_to_req_indices,
        positions,
        slot_mapping,
        cos_sin_cache,
        kv_cache,
        kv_slot_mapping,
        rms_norm_weight,
        fp8_scale,
        rms_norm_eps,
        compress_ratio,
        kv_format,
        e2m1_rounding,
        index_hadamard,
    )
    c.tensor("block_table", block_table, torch.int32, (None, None))


def _cost_compress(
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
    *_: Any,
) -> Cost:
    tokens = reference.closing_tokens(positions, slot_mapping, kv_slot_mapping, state_cache, kv_cache, compress_ratio)
    every = reference.readable_windows(
        tokens, positions, token_to_req_indices, state_cache, block_table, compress_ratio
    )
    entries = entry_cost(every.tokens.shape[0], kv_format, compress_ratio)
    state_bytes = int(every.cached.sum()) * 2 * 4 * formats.FORMATS[kv_format].dim
    return Cost(bytes=entries.bytes + state_bytes + 3 * nbytes(slot_mapping), flops=entries.flops)


def validate_entry_slots(
    op: str, kv_cache: torch.Tensor, kv_slot_mapping: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """The slots of entries must be distinct where they are slots of the cache."""
    rows = slot_mapping.shape[0]
    capacity = kv_cache.shape[0] * kv_cache.shape[1]
    validate.distinct_slots(op, "kv_slot_mapping", kv_slot_mapping[:rows], capacity)


def _validate_compress(
    state_cache: torch.Tensor,
    token_to_req_indices: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    block_table: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    kv_cache: torch.Tensor,
    kv_slot_mapping: torch.Tensor,
    *_: Any,
) -> None:
    validate_entry_slots("compress_norm_rope_store", kv_cache, kv_slot_mapping, slot_mapping)


_compress = define_op(
    "compress_norm_rope_store(Tensor state_cache, Tensor token_to_req_indices, Tensor positions, Tensor slot_mapping, "
    "Tensor block_table, Tensor cos_sin_cache, Tensor(a!) kv_cache, Tensor kv_slot_mapping, Tensor rms_norm_weight, "
    "Tensor? fp8_scale, float rms_norm_eps, int compress_ratio, str kv_format, str e2m1_rounding, bool index_hadamard) "
    "-> ()",
    check=_check_compress,
    reference=reference.compress_norm_rope_store,
    kernel="cute_kernels.compressor.select:COMPRESS",
    cost=_cost_compress,
    validate=_validate_compress,
)


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
