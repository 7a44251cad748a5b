# SPDX-License-Identifier: Apache-2.0
"""vLLM's calls around the compressor; import them from `cute_kernels.compat.vllm`.

Slots, positions, lengths and block tables may be int32 or int64.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from cute_kernels import formats
from cute_kernels.compat.arguments import accept_only, as_int32, as_int64, indexer_format, slots_of
from cute_kernels.compressor import ops
from cute_kernels.runtime.checks import Checker

__all__ = [
    "compress_norm_rope_store_cutedsl",
    "compress_norm_rope_store_triton",
    "fused_kv_compress_norm_rope_insert_sparse_attn_cutedsl",
    "get_compressed_slot_mapping",
    "get_compressed_slot_mapping_v033",
    "save_partial_states",
    "split_kv_compress_norm_rope_insert_sparse_attn_cutedsl",
]


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
    """`compressor.ops.save_partial_states`, the same arguments.

    pdl_kwargs is ignored; every slot outside the cache is skipped, not only negative ones. vLLM 0.33 calls an object,
    _SAVE_PARTIAL_STATES_KERNEL, with these arguments.
    """
    rows, slots = as_int64(positions), slots_of(kv, slot_mapping)
    ops.save_partial_states(
        kv, score, ape, rows, state_cache, slots, block_size, state_width, compress_ratio, pdl_kwargs
    )


def compress_norm_rope_store_triton(
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
) -> None:
    """`compress_norm_rope_store` into fp8_ds_mla (head_dim 512) or indexer records (head_dim 128).

    The same arguments. pdl_kwargs is ignored. block_size, state_width, overlap, quant_block, token_stride and scale_dim
    follow from the others; they are checked, not used. MXFP4 rows have 68 bytes or, as vLLM allocated them at first,
    132. Scales: the absmax is at least 1e-4 in every record; e2m1 ties go to the lower code, where vLLM since May 2026
    rounds them to even (`compress_norm_rope_store` has `e2m1_rounding`). FP8 indexer scales are fp32 on every
    architecture, where vLLM 0.33 packs exponent bytes on SM100.
    """
    ops.compress_norm_rope_store(
        state_cache,
        num_actual,
        as_int32(token_to_req_indices),
        as_int64(positions),
        as_int64(slot_mapping),
        as_int32(block_table),
        block_size,
        state_width,
        cos_sin_cache,
        kv_cache,
        _metadata(k_cache_metadata),
        pdl_kwargs,
        head_dim,
        rope_head_dim,
        compress_ratio,
        overlap,
        use_fp4_cache,
        rms_norm_weight,
        rms_norm_eps,
        quant_block,
        token_stride,
        scale_dim,
        kv_format=_record_format(head_dim, kv_cache, use_fp4_cache),
    )


def _metadata(k_cache_metadata: Any) -> Any:
    """What the op reads of it, with int64 slots."""
    slots = getattr(k_cache_metadata, "slot_mapping", None)
    if not isinstance(slots, torch.Tensor) or slots.dtype != torch.int32:
        return k_cache_metadata
    return SimpleNamespace(slot_mapping=as_int64(slots))


def _record_format(head_dim: int, kv_cache: torch.Tensor, use_fp4_cache: bool) -> str:
    return formats.FP8_DS_MLA.id if head_dim == formats.HEAD_DIM else indexer_format(kv_cache, use_fp4_cache)


def compress_norm_rope_store_cutedsl(
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
    store_full_kv: bool = False,
    store_full_fp8: bool = False,
    fp8_scale: torch.Tensor | None = None,
) -> None:
    """As compress_norm_rope_store_triton, and into plain caches of 512 columns.

    store_full_kv    kv_cache is bf16 [num_blocks, rows, 512]
    store_full_fp8   with store_full_kv: it is e4m3
    fp8_scale        fp32 [1], for an e4m3 cache; None: 1, allocated in each call. Ignored for other caches

    State pages of any size work, where vLLM wants 8 tokens for ratio 128. No scratch memory is allocated. vLLM 0.33
    calls an object, _SPARSE_ATTN_COMPRESSOR_CUTEDSL_KERNEL, with these arguments. Raises ValueError or TypeError on
    arguments that do not fit.
    """
    if store_full_fp8 and not store_full_kv:
        expected = "False without store_full_kv"
        Checker("compress_norm_rope_store_cutedsl").fail("store_full_fp8", expected, store_full_fp8)
    if store_full_kv:
        kv_format = (formats.PLAIN_FP8 if store_full_fp8 else formats.PLAIN_BF16).id
    else:
        kv_format = _record_format(head_dim, kv_cache, use_fp4_cache)
    if not store_full_fp8:
        fp8_scale = None
    elif fp8_scale is None:
        fp8_scale = torch.ones(1, dtype=torch.float32, device=kv_cache.device)
    ops.compress_norm_rope_store(
        state_cache,
        num_actual,
        as_int32(token_to_req_indices),
        as_int64(positions),
        as_int64(slot_mapping),
        as_int32(block_table),
        block_size,
        state_width,
        cos_sin_cache,
        kv_cache,
        _metadata(k_cache_metadata),
        pdl_kwargs,
        head_dim,
        rope_head_dim,
        compress_ratio,
        overlap,
        use_fp4_cache,
        rms_norm_weight,
        rms_norm_eps,
        quant_block,
        token_stride,
        scale_dim,
        kv_format=kv_format,
        fp8_scale=fp8_scale,
    )


def fused_kv_compress_norm_rope_insert_sparse_attn_cutedsl(
    state_cache: torch.Tensor,
    token_to_req_indices: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    rms_norm_weight: torch.Tensor,
    rms_norm_eps: float,
    cos_sin_cache: torch.Tensor,
    k_cache: torch.Tensor,
    kv_slot_mapping: torch.Tensor,
    kv_cache_block_size: int,
    kv_block_stride: int,
    head_size: int = 512,
    state_width: int = 1024,
    rope_head_dim: int = 64,
    fp8_max: float = 448.0,
    quant_block: int = 64,
    token_stride: int = 576,
    scale_dim: int = 8,
    compress_ratio: int = 4,
    overlap: bool = True,
    store_full_kv: bool = False,
    store_full_fp8: bool = False,
    fp8_scale: torch.Tensor | None = None,
) -> None:
    """The ratio-4 half of compress_norm_rope_store_cutedsl, on all rows of slot_mapping.

    kv_slot_mapping is what k_cache_metadata.slot_mapping is there. kv_cache_block_size must be k_cache.shape[1];
    kv_block_stride is read from the tensor and ignored; fp8_max must be 448. Ratio 128 works too.
    """
    op = "fused_kv_compress_norm_rope_insert_sparse_attn_cutedsl"
    _check_pages(op, k_cache, kv_cache_block_size)
    accept_only(op, formats.HEAD_DIM, head_size=head_size)
    accept_only(op, 448.0, fp8_max=fp8_max)
    compress_norm_rope_store_cutedsl(
        state_cache,
        slot_mapping.shape[0],
        token_to_req_indices,
        positions,
        slot_mapping,
        block_table,
        block_size,
        state_width,
        cos_sin_cache,
        k_cache,
        SimpleNamespace(slot_mapping=kv_slot_mapping),
        None,
        head_size,
        rope_head_dim,
        compress_ratio,
        overlap,
        False,
        rms_norm_weight,
        rms_norm_eps,
        quant_block,
        token_stride,
        scale_dim,
        store_full_kv,
        store_full_fp8,
        fp8_scale,
    )


def split_kv_compress_norm_rope_insert_sparse_attn_cutedsl(
    state_cache: torch.Tensor,
    token_to_req_indices: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    compressed_kv: torch.Tensor,
    rms_norm_weight: torch.Tensor,
    rms_norm_eps: float,
    cos_sin_cache: torch.Tensor,
    k_cache: torch.Tensor,
    kv_slot_mapping: torch.Tensor,
    kv_cache_block_size: int,
    kv_block_stride: int,
    head_size: int = 512,
    state_width: int = 512,
    rope_head_dim: int = 64,
    fp8_max: float = 448.0,
    quant_block: int = 64,
    token_stride: int = 576,
    scale_dim: int = 8,
    compress_ratio: int = 128,
    overlap: bool = False,
    store_full_kv: bool = False,
    store_full_fp8: bool = False,
    fp8_scale: torch.Tensor | None = None,
) -> None:
    """The ratio-128 half of compress_norm_rope_store_cutedsl, on compressed_kv.shape[0] rows.

    compressed_kv is scratch memory of vLLM's first kernel: here it gives the number of rows and is not written. The
    rest is as in fused_kv_compress_norm_rope_insert_sparse_attn_cutedsl. Ratio 4 works too.
    """
    op = "split_kv_compress_norm_rope_insert_sparse_attn_cutedsl"
    _check_pages(op, k_cache, kv_cache_block_size)
    accept_only(op, formats.HEAD_DIM, head_size=head_size)
    accept_only(op, 448.0, fp8_max=fp8_max)
    compress_norm_rope_store_cutedsl(
        state_cache,
        compressed_kv.shape[0],
        token_to_req_indices,
        positions,
        slot_mapping,
        block_table,
        block_size,
        state_width,
        cos_sin_cache,
        k_cache,
        SimpleNamespace(slot_mapping=kv_slot_mapping),
        None,
        head_size,
        rope_head_dim,
        compress_ratio,
        overlap,
        False,
        rms_norm_weight,
        rms_norm_eps,
        quant_block,
        token_stride,
        scale_dim,
        store_full_kv,
        store_full_fp8,
        fp8_scale,
    )


def _check_pages(op: str, k_cache: torch.Tensor, kv_cache_block_size: int) -> None:
    c = Checker(op)
    c.tensor("k_cache", k_cache, (torch.uint8, torch.bfloat16, torch.float8_e4m3fn), (None, None, None))
    rows = k_cache.shape[1]
    c.require(kv_cache_block_size == rows, "kv_cache_block_size", f"{rows}, the rows of k_cache", kv_cache_block_size)


def get_compressed_slot_mapping(
    num_tokens: int,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    compress_ratio: int,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`compressor.ops.get_compressed_slot_mapping`, but block_size counts compressed rows per page, not tokens.

    Table entries that are negative or outside the table give -1, where vLLM clamps the table to 0 before the call.
    """
    tokens = block_size * compress_ratio
    starts, lens, table = as_int32(query_start_loc), as_int32(seq_lens), as_int32(block_table)
    return ops.get_compressed_slot_mapping(num_tokens, starts, lens, table, tokens, compress_ratio, out)


def get_compressed_slot_mapping_v033(
    num_tokens: int,
    slot_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    compress_ratio: int,
    out: torch.Tensor | None = None,
    dcp_world_size: int = 1,
    cp_interleave: int = 1,
) -> torch.Tensor:
    """get_compressed_slot_mapping as vLLM 0.33 has it: a token whose own slot is negative gives -1 too.

    Raises NotImplementedError if dcp_world_size is not 1; then cp_interleave has no effect.
    """
    accept_only("get_compressed_slot_mapping", 1, dcp_world_size=dcp_world_size)
    return ops.get_compressed_slot_mapping(
        num_tokens,
        as_int32(query_start_loc),
        as_int32(seq_lens),
        as_int32(block_table),
        block_size * compress_ratio,
        compress_ratio,
        out,
        slot_mapping=as_int64(slot_mapping),
    )
