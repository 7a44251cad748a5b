"""Saving the state and storing compressed entries in one op."""

from __future__ import annotations

from typing import Any

import torch

from cute_kernels import formats
from cute_kernels.compressor import reference
from cute_kernels.compressor.ops_store import check_store, entry_cost, validate_entry_slots
from cute_kernels.runtime import validate
from cute_kernels.runtime.checks import Checker
from cute_kernels.runtime.ops import Cost, define_op, nbytes

PERSIST_MODES = ("all", "window")


def _check_fused(
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
    c = Checker("fused_compress_norm_rope_store")
    state = check_store(
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
    c.tensor("kv_score", kv_score, torch.float32, (None, state.row_elements))
    rows = slot_mapping.shape[0]
    c.require(rows <= kv_score.shape[0], "slot_mapping", f"at most the {kv_score.shape[0]} rows of kv_score", rows)
    c.tensor("ape", ape, torch.float32, (compress_ratio, state.width))
    c.tensor("block_table", block_table, torch.int32, ("R", None))
    c.tensor("query_start_loc", query_start_loc, torch.int32, (block_table.shape[0] + 1,))
    c.tensor("min_restart", min_restart, torch.int32, ("R",), optional=True)
    c.one_of("persist", persist, PERSIST_MODES)
    whole = keep_every >= 0 and keep_every % compress_ratio == 0
    c.require(whole, "keep_every", f"0 or a positive multiple of compress_ratio = {compress_ratio}", keep_every)


def _cost_fused(
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
    *_: Any,
) -> Cost:
    tokens = reference.closing_tokens(positions, slot_mapping, kv_slot_mapping, state_cache, kv_cache, compress_ratio)
    every = reference.readable_windows(
        tokens, positions, token_to_req_indices, state_cache, block_table, compress_ratio, query_start_loc
    )
    saved = reference.saved_tokens(
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
    needed = saved.clone()
    needed[every.step_rows[every.step_rows >= 0]] = True
    entries = entry_cost(every.tokens.shape[0], kv_format, compress_ratio)
    state_bytes = int(every.cached.sum()) * 2 * 4 * formats.FORMATS[kv_format].dim
    row_bytes = 4 * state_cache.shape[2]
    moved = entries.bytes + state_bytes + (int(needed.sum()) + int(saved.sum())) * row_bytes
    return Cost(bytes=moved + 3 * nbytes(slot_mapping) + nbytes(ape), flops=entries.flops)


def _validate_fused(
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
    *_: Any,
) -> None:
    op = "fused_compress_norm_rope_store"
    validate.ascending(op, "query_start_loc", query_start_loc)
    validate_entry_slots(op, kv_cache, kv_slot_mapping, slot_mapping)
    saved = reference.saved_tokens(
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
    written = slot_mapping.where(saved, torch.full_like(slot_mapping, -1))
    validate.distinct_slots(op, "slot_mapping", written, state_cache.shape[0] * state_cache.shape[1])
    tokens = reference.closing_tokens(positions, slot_mapping, kv_slot_mapping, state_cache, kv_cache, compress_ratio)
    every = reference.readable_windows(
        tokens, positions, token_to_req_indices, state_cache, block_table, compress_ratio, query_start_loc
    )
    _validate_reads(op, every, token_to_req_indices, slot_mapping[saved])


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


_fused = define_op(
    "fused_compress_norm_rope_store(Tensor kv_score, Tensor ape, Tensor positions, Tensor token_to_req_indices, "
    "Tensor query_start_loc, Tensor(a!) state_cache, Tensor slot_mapping, Tensor block_table, Tensor cos_sin_cache, "
    "Tensor(b!) kv_cache, Tensor kv_slot_mapping, Tensor rms_norm_weight, Tensor? min_restart, Tensor? fp8_scale, "
    "float rms_norm_eps, int compress_ratio, SymInt keep_every, str kv_format, str persist, str e2m1_rounding, "
    "bool index_hadamard, bool use_pdl) -> ()",
    check=_check_fused,
    reference=reference.fused_compress_norm_rope_store,
    kernel="cute_kernels.compressor.select:FUSED",
    cost=_cost_fused,
    validate=_validate_fused,
)


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
    positions              int64 [>= T'], consecutive within a request
    token_to_req_indices   int32 [>= T']; a row whose request is not in 0..R-1 closes nothing
    query_start_loc        int32 [R + 1]: request r has rows query_start_loc[r] to query_start_loc[r + 1] - 1
    state_cache            fp32 [num_blocks, block_size, 2 * width], page stride = stride(0); mutated
    slot_mapping           int64 [T'], T' <= T, state slots, distinct where valid
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

    Raises ValueError or TypeError on arguments that do not fit.
    """
    _fused(
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
    )
