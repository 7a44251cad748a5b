# SPDX-License-Identifier: Apache-2.0
"""Between the first GEMMs of a layer with a compressor and its scores or attention: everything in one launch."""

from __future__ import annotations

import torch

from cute_kernels import formats
from cute_kernels.compressor import ops as _compressor  # noqa: F401
from cute_kernels.compressor.call import FusedCall
from cute_kernels.indexer import ops as _indexer  # noqa: F401
from cute_kernels.indexer.call import QueryFp8Call
from cute_kernels.insert_compress import reference
from cute_kernels.insert_compress.call import CompressCall, IndexCall
from cute_kernels.kv_cache import ops as _kv_cache  # noqa: F401
from cute_kernels.kv_cache.call import QuantInsertCall
from cute_kernels.runtime.checks import Checker
from cute_kernels.runtime.key import OpKernel
from cute_kernels.runtime.ops import OPS, Cost, define_op
from cute_kernels.runtime.plans import planned

__all__ = ["fused_qkv_insert_compress", "fused_qkv_insert_compress_index"]

_INDEX = "fused_qkv_insert_compress_index"
_COMPRESS = "fused_qkv_insert_compress"


def _check_index(call: IndexCall) -> None:
    Checker(_INDEX).one_of("index_format", call.index_format, (formats.INDEXER_FP8.id,))
    _check(_INDEX, call)


def _check_compress(call: CompressCall) -> None:
    _check(_COMPRESS, call)


def _check(op: str, call: IndexCall | CompressCall) -> None:
    Checker(op).one_of("kv_format", call.kv_format, (formats.FP8_DS_MLA.id,))
    for part in call.parts():
        _check_part(op, *part)


def _check_part(op: str, what: str, name: str, part: QuantInsertCall | FusedCall | QueryFp8Call) -> None:
    try:
        OPS[name].check(*part)
    except (ValueError, TypeError) as error:
        raise type(error)(f"{op}: {what}: {error}") from None


def _validate(call: IndexCall | CompressCall) -> None:
    for _, name, part in call.parts():
        validate = OPS[name].validate
        if validate is not None:
            validate(*part)


def _cost(call: IndexCall | CompressCall) -> Cost:
    total = Cost()
    for _, name, part in call.parts():
        cost_of = OPS[name].cost
        assert cost_of is not None
        cost = cost_of(*part)
        total = Cost(bytes=total.bytes + cost.bytes, flops=total.flops + cost.flops)
    return total


def _fused_index_kernel() -> OpKernel[IndexCall]:
    from cute_kernels.insert_compress.insert_compress_index import KERNEL

    return KERNEL


_fused_index = define_op(
    "fused_qkv_insert_compress_index(Tensor(a!) q, Tensor kv, Tensor(b!) k_cache, Tensor slot_mapping, "
    "Tensor positions, Tensor cos_sin_cache, Tensor token_to_req_indices, Tensor query_start_loc, "
    "Tensor state_slot_mapping, Tensor state_block_table, Tensor entry_slot_mapping, Tensor? min_restart, "
    "Tensor kv_score, Tensor ape, Tensor norm_weight, Tensor(c!) state_cache, Tensor(d!) entry_cache, "
    "Tensor index_kv_score, Tensor index_ape, Tensor index_norm_weight, Tensor(e!) index_state_cache, "
    "Tensor(f!) index_cache, Tensor index_q, Tensor index_weights, Tensor(g!) index_q_quant, "
    "Tensor(h!) index_weights_out, float eps, SymInt block_size, SymInt keep_every, str persist, str kv_format, "
    "str index_format, float softmax_scale, float head_scale, bool index_hadamard, bool round_weights, bool use_pdl) "
    "-> ()",
    IndexCall,
    check=_check_index,
    reference=reference.fused_qkv_insert_compress_index,
    kernel=_fused_index_kernel,
    cost=_cost,
    validate=_validate,
)


@planned
def fused_qkv_insert_compress_index(
    q: torch.Tensor,
    kv: torch.Tensor,
    k_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    token_to_req_indices: torch.Tensor,
    query_start_loc: torch.Tensor,
    state_slot_mapping: torch.Tensor,
    state_block_table: torch.Tensor,
    entry_slot_mapping: torch.Tensor,
    kv_score: torch.Tensor,
    ape: torch.Tensor,
    norm_weight: torch.Tensor,
    state_cache: torch.Tensor,
    entry_cache: torch.Tensor,
    index_kv_score: torch.Tensor,
    index_ape: torch.Tensor,
    index_norm_weight: torch.Tensor,
    index_state_cache: torch.Tensor,
    index_cache: torch.Tensor,
    index_q: torch.Tensor,
    index_weights: torch.Tensor,
    eps: float,
    block_size: int,
    softmax_scale: float,
    head_scale: float,
    *,
    min_restart: torch.Tensor | None = None,
    keep_every: int = 0,
    persist: str = "all",
    kv_format: str = formats.FP8_DS_MLA.id,
    index_format: str = formats.INDEXER_FP8.id,
    index_hadamard: bool = False,
    round_weights: bool = False,
    use_pdl: bool = False,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Four ops of a layer of ratio 4 in one launch, with the bytes that they write one after the other:
    `fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert` of q and kv, `fused_compress_norm_rope_store` of attention's
    entries and of the indexer's keys, `fused_indexer_q_rope_quant` of its queries. None reads what another writes.

    For decode steps and short chunks; the four ops have kernels for many rows of a request.

    q                      bf16 [T, H, 512], heads 16-byte aligned, any other strides; mutated: normalized and rotated
    kv                     bf16 [T, 512], normalized, row-strided
    k_cache                the window's cache, kv_format, pages of block_size rows; mutated at slot_mapping
    slot_mapping           int64 [<= T], slots of k_cache
    positions              int64 [T]
    cos_sin_cache          fp32 [max_pos, 64], cos then sin: of all four
    token_to_req_indices, query_start_loc, state_slot_mapping, state_block_table, entry_slot_mapping, min_restart,
    keep_every, persist    as of `fused_compress_norm_rope_store`; both compressors' caches share slots and tables
    kv_score               fp32 [T, 2048], columns of a wider projection if rows are 16-byte aligned
    ape, norm_weight       fp32 [4, 1024], bf16 [512]; constants
    state_cache            fp32 [pages, rows, 2048]; mutated
    entry_cache            the compressed cache, kv_format; mutated at entry_slot_mapping
    index_kv_score, index_ape, index_norm_weight, index_state_cache, index_cache
                           the same of the indexer: fp32 [T, 512], fp32 [4, 256], bf16 [128], fp32 [pages, rows, 512],
                           and its cache of index_format; both caches are mutated
    index_q, index_weights, softmax_scale, head_scale, index_hadamard, round_weights
                           as of `fused_indexer_q_rope_quant`; index_hadamard is that of its keys too
    eps                    of all three norms
    use_pdl                start while the kernel before on the stream still runs (programmatic dependent launch), and
                           wait for it before anything but constants is read: weights and what describes the step, as
                           of `fused_qkv_insert_compress`
    out                    (e4m3 [T, HI, 128], fp32 [T, HI]) to write into, row-strided; mutated. None: allocated

    Returns the indexer's quantized queries and scaled weights. Outputs may not share elements with each other or with
    an input. Raises ValueError or TypeError on arguments that do not fit.
    """
    if out is None:
        Checker(_INDEX).tensor("index_q", index_q, torch.bfloat16, (None, None, formats.INDEX_DIM))
        codes = torch.empty(index_q.shape, dtype=torch.float8_e4m3fn, device=index_q.device)
        weights = torch.empty(index_q.shape[:2], dtype=torch.float32, device=index_q.device)
    else:
        codes, weights = Checker(_INDEX).pair("out", out, "quantized queries, weights")
    _fused_index(
        IndexCall(
            q,
            kv,
            k_cache,
            slot_mapping,
            positions,
            cos_sin_cache,
            token_to_req_indices,
            query_start_loc,
            state_slot_mapping,
            state_block_table,
            entry_slot_mapping,
            min_restart,
            kv_score,
            ape,
            norm_weight,
            state_cache,
            entry_cache,
            index_kv_score,
            index_ape,
            index_norm_weight,
            index_state_cache,
            index_cache,
            index_q,
            index_weights,
            codes,
            weights,
            eps,
            block_size,
            keep_every,
            persist,
            kv_format,
            index_format,
            softmax_scale,
            head_scale,
            index_hadamard,
            round_weights,
            use_pdl,
        )
    )
    return codes, weights


def _fused_compress_kernel() -> OpKernel[CompressCall]:
    from cute_kernels.insert_compress.insert_compress import KERNEL

    return KERNEL


_fused_compress = define_op(
    "fused_qkv_insert_compress(Tensor(a!) q, Tensor kv, Tensor(b!) k_cache, Tensor slot_mapping, Tensor positions, "
    "Tensor cos_sin_cache, Tensor token_to_req_indices, Tensor query_start_loc, Tensor state_slot_mapping, "
    "Tensor state_block_table, Tensor entry_slot_mapping, Tensor? min_restart, Tensor kv_score, Tensor ape, "
    "Tensor norm_weight, Tensor(c!) state_cache, Tensor(d!) entry_cache, float eps, SymInt block_size, str persist, "
    "str kv_format, bool use_pdl) -> ()",
    CompressCall,
    check=_check_compress,
    reference=reference.fused_qkv_insert_compress,
    kernel=_fused_compress_kernel,
    cost=_cost,
    validate=_validate,
)


@planned
def fused_qkv_insert_compress(
    q: torch.Tensor,
    kv: torch.Tensor,
    k_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    token_to_req_indices: torch.Tensor,
    query_start_loc: torch.Tensor,
    state_slot_mapping: torch.Tensor,
    state_block_table: torch.Tensor,
    entry_slot_mapping: torch.Tensor,
    kv_score: torch.Tensor,
    ape: torch.Tensor,
    norm_weight: torch.Tensor,
    state_cache: torch.Tensor,
    entry_cache: torch.Tensor,
    eps: float,
    block_size: int,
    *,
    min_restart: torch.Tensor | None = None,
    persist: str = "all",
    kv_format: str = formats.FP8_DS_MLA.id,
    use_pdl: bool = False,
) -> None:
    """Two ops of a layer of ratio 128 in one launch, with the bytes that they write one after the other:
    `fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert` of q and kv and `fused_compress_norm_rope_store` of attention's
    entries. Neither reads what the other writes.

    For decode steps, where 127 of 128 tokens close no entry; the two ops have kernels for many rows of a request.

    q                      bf16 [T, H, 512], heads 16-byte aligned, any other strides; mutated: normalized and rotated
    kv                     bf16 [T, 512], normalized, row-strided
    k_cache                the window's cache, kv_format, pages of block_size rows; mutated at slot_mapping
    slot_mapping           int64 [<= T], slots of k_cache
    positions              int64 [T]
    cos_sin_cache          fp32 [max_pos, 64], cos then sin: of both
    token_to_req_indices, query_start_loc, state_slot_mapping, state_block_table, entry_slot_mapping, min_restart,
    persist                as of `fused_compress_norm_rope_store`
    kv_score               fp32 [T, 1024], columns of a wider projection if rows are 16-byte aligned
    ape, norm_weight       fp32 [128, 512], bf16 [512]
    state_cache            fp32 [pages, rows, 1024]; mutated
    entry_cache            the compressed cache, kv_format; mutated at entry_slot_mapping
    eps                    of both norms
    use_pdl                start while the kernel before on the stream still runs (programmatic dependent launch), and
                           wait for it before q, kv, kv_score and both caches are read. Constants are the weights and
                           what describes the step: ape, norm_weight, slot_mapping, positions, cos_sin_cache,
                           token_to_req_indices, query_start_loc, state_slot_mapping, state_block_table,
                           entry_slot_mapping and min_restart may be read before that. What writes them must have ended
                           before the kernel before starts to let this one start: a launch without use_pdl, as any torch
                           operation is, or one that a kernel between the two has waited for

    Outputs may not share elements with each other or with an input. Raises ValueError or TypeError on arguments that
    do not fit.
    """
    _fused_compress(
        CompressCall(
            q,
            kv,
            k_cache,
            slot_mapping,
            positions,
            cos_sin_cache,
            token_to_req_indices,
            query_start_loc,
            state_slot_mapping,
            state_block_table,
            entry_slot_mapping,
            min_restart,
            kv_score,
            ape,
            norm_weight,
            state_cache,
            entry_cache,
            eps,
            block_size,
            persist,
            kv_format,
            use_pdl,
        )
    )
