"""Insert into, and gather from, the paged K caches."""

from __future__ import annotations

from typing import Any

import torch

from cute_kernels import formats
from cute_kernels.kv_cache import reference
from cute_kernels.kv_cache.ops_qnorm import (
    fused_deepseek_v4_qnorm_rope_kv_rope_full_cache_bf16_insert,
    fused_deepseek_v4_qnorm_rope_kv_rope_full_cache_fp8_insert,
    fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert,
)
from cute_kernels.runtime import validate
from cute_kernels.runtime.checks import Checker
from cute_kernels.runtime.ops import Cost, define_op, nbytes

__all__ = [
    "dequantize_and_gather_k_cache",
    "fused_deepseek_v4_qnorm_rope_kv_rope_full_cache_bf16_insert",
    "fused_deepseek_v4_qnorm_rope_kv_rope_full_cache_fp8_insert",
    "fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert",
    "quantize_and_insert_k_cache",
]


def _check_insert(
    k: torch.Tensor, k_cache: torch.Tensor, slot_mapping: torch.Tensor, block_size: int, kv_format: str
) -> None:
    c = Checker("quantize_and_insert_k_cache")
    c.tensor("k", k, torch.bfloat16, ("T", formats.HEAD_DIM))
    fmt = formats.get_format(c, "kv_format", kv_format, formats.FP8_DS_MLA)
    c.require(block_size > 0, "block_size", "a positive number", block_size)
    fmt.check(c, "k_cache", k_cache, block_size)
    c.tensor("slot_mapping", slot_mapping, torch.int64, (None,))
    rows = slot_mapping.shape[0]
    c.require(rows <= k.shape[0], "slot_mapping", f"at most T = {k.shape[0]} rows", rows)


def _cost_insert(
    k: torch.Tensor, k_cache: torch.Tensor, slot_mapping: torch.Tensor, block_size: int, kv_format: str
) -> Cost:
    rows = int((slot_mapping >= 0).sum())
    return Cost(bytes=rows * (formats.HEAD_DIM * 2 + 584) + nbytes(slot_mapping))


def _validate_insert(
    k: torch.Tensor, k_cache: torch.Tensor, slot_mapping: torch.Tensor, block_size: int, kv_format: str
) -> None:
    capacity = k_cache.shape[0] * block_size
    validate.distinct_slots("quantize_and_insert_k_cache", "slot_mapping", slot_mapping, capacity)


_insert = define_op(
    "quantize_and_insert_k_cache(Tensor k, Tensor(a!) k_cache, Tensor slot_mapping, SymInt block_size, "
    "str kv_format) -> ()",
    check=_check_insert,
    reference=reference.quantize_and_insert_k_cache,
    kernel="cute_kernels.kv_cache.insert",
    cost=_cost_insert,
    validate=_validate_insert,
)


def quantize_and_insert_k_cache(
    k: torch.Tensor,
    k_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    block_size: int = 64,
    is_ue8m0: bool = True,
    *,
    kv_format: str = formats.FP8_DS_MLA.id,
) -> None:
    """Quantize rows of K and store them in a paged fp8_ds_mla cache.

    Each 64-column block of the first 448 columns gets a ue8m0 scale 2^ceil(log2(max(absmax, 1e-4) / 448)) and is stored
    as e4m3: nearest even, saturating; NaN does not count for the absmax and is stored as 0x7F. Columns 448..511,
    already rotated, are copied bit for bit. The eighth scale byte is 0.

    k              bf16 [T, 512], rows of any stride
    k_cache        uint8 [num_blocks, block_size, 584] or [num_blocks, bytes], page stride = stride(0); mutated
    slot_mapping   int64 [T'], T' <= T; row t goes to slot_mapping[t] = page * block_size + row. Slots outside the
                   cache, negative ones included, are skipped; those inside it must be distinct
    block_size     rows per page
    is_ue8m0       must be True: no other scale format exists
    kv_format      record format id

    Raises ValueError or TypeError on arguments that do not fit. Definition: formats.Fp8DsMlaFormat.
    """
    if not is_ue8m0:
        Checker("quantize_and_insert_k_cache").fail("is_ue8m0", "True", is_ue8m0)
    _insert(k, k_cache, slot_mapping, block_size, kv_format)


def _check_gather(
    out: torch.Tensor,
    k_cache: torch.Tensor,
    seq_lens: torch.Tensor,
    gather_lens: torch.Tensor | None,
    block_table: torch.Tensor,
    block_size: int,
    offset: int,
    kv_format: str,
) -> None:
    c = Checker("dequantize_and_gather_k_cache")
    c.tensor("out", out, torch.bfloat16, (None, None, formats.HEAD_DIM))
    fmt = formats.get_format(c, "kv_format", kv_format, formats.FP8_DS_MLA)
    c.require(block_size > 0, "block_size", "a positive number", block_size)
    fmt.check(c, "k_cache", k_cache, block_size)
    c.tensor("seq_lens", seq_lens, torch.int32, ("R",))
    c.tensor("gather_lens", gather_lens, torch.int32, ("R",), optional=True)
    c.tensor("block_table", block_table, torch.int32, ("R", None))
    c.require(out.shape[0] >= seq_lens.shape[0], "out", f"at least R = {seq_lens.shape[0]} rows", list(out.shape))
    c.require(offset >= 0, "offset", "a number >= 0", offset)


def _cost_gather(
    out: torch.Tensor,
    k_cache: torch.Tensor,
    seq_lens: torch.Tensor,
    gather_lens: torch.Tensor | None,
    block_table: torch.Tensor,
    block_size: int,
    offset: int,
    kv_format: str,
) -> Cost:
    lens = seq_lens if gather_lens is None else torch.minimum(gather_lens, seq_lens)
    rows = int(lens.clamp(0, max(out.shape[1] - offset, 0)).sum())
    return Cost(bytes=rows * (584 + formats.HEAD_DIM * 2) + nbytes(seq_lens, gather_lens))


def _validate_gather(
    out: torch.Tensor,
    k_cache: torch.Tensor,
    seq_lens: torch.Tensor,
    gather_lens: torch.Tensor | None,
    block_table: torch.Tensor,
    block_size: int,
    *_: Any,
) -> None:
    pages = block_table.shape[1]
    gathers = seq_lens > 0 if gather_lens is None else (seq_lens > 0) & (gather_lens > 0)
    validate.at_most(
        "dequantize_and_gather_k_cache",
        "seq_lens",
        seq_lens.where(gathers, torch.zeros_like(seq_lens)),
        pages * block_size,
        f"the rows of {pages} pages, all that block_table names",
    )


_gather = define_op(
    "dequantize_and_gather_k_cache(Tensor(a!) out, Tensor k_cache, Tensor seq_lens, Tensor? gather_lens, "
    "Tensor block_table, SymInt block_size, SymInt offset, str kv_format) -> ()",
    check=_check_gather,
    reference=reference.dequantize_and_gather_k_cache,
    kernel="cute_kernels.kv_cache.gather",
    cost=_cost_gather,
    validate=_validate_gather,
)


def dequantize_and_gather_k_cache(
    out: torch.Tensor,
    k_cache: torch.Tensor,
    seq_lens: torch.Tensor,
    gather_lens: torch.Tensor | None,
    block_table: torch.Tensor,
    block_size: int,
    offset: int,
    *,
    kv_format: str = formats.FP8_DS_MLA.id,
) -> None:
    """Copy the last rows of each request out of a paged fp8_ds_mla cache, as bf16.

    out[r, offset + i] = row seq_lens[r] - len + i of request r, for i < len = min(gather_lens[r], seq_lens[r]). Row p
    of a request lies in page block_table[r, p // block_size], row p % block_size. A row whose page the block table
    does not name, or that lies outside the pool, is zeros. Nothing else of `out` is written: rows that would fall past
    its end are skipped.

    out           bf16 [R', M, 512], R' >= R, any strides with a dense last dimension; mutated
    k_cache       uint8 [num_blocks, block_size, 584] or [num_blocks, bytes]
    seq_lens      int32 [R], rows in the cache per request; values <= 0 gather nothing
    gather_lens   int32 [R] or None (all): how many of them, counted from the end; more than seq_lens[r] means all
    block_table   int32 [R, width], row-strided; only the columns of the rows that are copied are looked at
    block_size    rows per page
    offset        first row of `out` that is written

    The values are exact: e4m3 times a power of two fits bf16. Code 0x7F or 0xFF gives NaN. Raises ValueError or
    TypeError on arguments that do not fit.
    """
    _gather(out, k_cache, seq_lens, gather_lens, block_table, block_size, offset, kv_format)
