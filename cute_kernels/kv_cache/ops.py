# SPDX-License-Identifier: Apache-2.0
"""Insert into, and gather from, the paged K caches; the step before attention: normalize and rotate the queries, rotate
the KV rows and insert them.
"""

from __future__ import annotations

import torch

from cute_kernels import formats
from cute_kernels.kv_cache import reference
from cute_kernels.kv_cache.call import (
    Bf16InsertCall,
    Fp8InsertCall,
    GatherCall,
    InsertCall,
    PackCall,
    QuantInsertCall,
    UnpackCall,
)
from cute_kernels.runtime import checks
from cute_kernels.runtime.checks import Checker
from cute_kernels.runtime.key import OpKernel
from cute_kernels.runtime.ops import Cost, define_op, nbytes
from cute_kernels.runtime.plans import planned

__all__ = [
    "dequantize_and_gather_k_cache",
    "fused_deepseek_v4_qnorm_rope_kv_rope_full_cache_bf16_insert",
    "fused_deepseek_v4_qnorm_rope_kv_rope_full_cache_fp8_insert",
    "fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert",
    "pack_records",
    "quantize_and_insert_k_cache",
    "unpack_records",
]


# ---- rows inserted, rows gathered


def _check_insert(call: InsertCall) -> None:
    c = Checker("quantize_and_insert_k_cache")
    c.tensor("k", call.k, torch.bfloat16, ("T", formats.HEAD_DIM))
    fmt = formats.get_format(c, "kv_format", call.kv_format, formats.FP8_DS_MLA)
    c.require(call.block_size > 0, "block_size", "a positive number", call.block_size)
    fmt.check(c, "k_cache", call.k_cache, call.block_size)
    c.tensor("slot_mapping", call.slot_mapping, torch.int64, (None,))
    rows = call.slot_mapping.shape[0]
    c.require(rows <= call.k.shape[0], "slot_mapping", f"at most T = {call.k.shape[0]} rows", rows)


def _cost_insert(call: InsertCall) -> Cost:
    rows = int((call.slot_mapping >= 0).sum())
    return Cost(bytes=rows * (formats.HEAD_DIM * 2 + 584) + nbytes(call.slot_mapping))


def _validate_insert(call: InsertCall) -> None:
    capacity = call.k_cache.shape[0] * call.block_size
    checks.distinct_slots("quantize_and_insert_k_cache", "slot_mapping", call.slot_mapping, capacity)


def _insert_kernel() -> OpKernel[InsertCall]:
    from cute_kernels.kv_cache.insert import KERNEL

    return KERNEL


_insert = define_op(
    "quantize_and_insert_k_cache(Tensor k, Tensor(a!) k_cache, Tensor slot_mapping, SymInt block_size, "
    "str kv_format) -> ()",
    InsertCall,
    check=_check_insert,
    reference=reference.quantize_and_insert_k_cache,
    kernel=_insert_kernel,
    cost=_cost_insert,
    validate=_validate_insert,
)


@planned
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
    _insert(InsertCall(k, k_cache, slot_mapping, block_size, kv_format))


GATHERED = (formats.FP8_DS_MLA, *formats.V41_FORMATS)


def _check_gather(call: GatherCall) -> None:
    c = Checker("dequantize_and_gather_k_cache")
    c.tensor("out", call.out, torch.bfloat16, (None, None, formats.HEAD_DIM))
    fmt = formats.get_format(c, "kv_format", call.kv_format, *GATHERED)
    c.require(call.block_size > 0, "block_size", "a positive number", call.block_size)
    fmt.check(c, "k_cache", call.k_cache, call.block_size)
    c.tensor("seq_lens", call.seq_lens, torch.int32, ("R",))
    c.tensor("gather_lens", call.gather_lens, torch.int32, ("R",), optional=True)
    c.tensor("block_table", call.block_table, torch.int32, ("R", None))
    c.require(
        call.out.shape[0] >= call.seq_lens.shape[0],
        "out",
        f"at least R = {call.seq_lens.shape[0]} rows",
        list(call.out.shape),
    )
    c.require(call.offset >= 0, "offset", "a number >= 0", call.offset)


def _cost_gather(call: GatherCall) -> Cost:
    lens = call.seq_lens if call.gather_lens is None else torch.minimum(call.gather_lens, call.seq_lens)
    rows = int(lens.clamp(0, max(call.out.shape[1] - call.offset, 0)).sum())
    record = formats.FORMATS[call.kv_format].record_bytes
    return Cost(bytes=rows * (record + formats.HEAD_DIM * 2) + nbytes(call.seq_lens, call.gather_lens))


def _validate_gather(call: GatherCall) -> None:
    pages = call.block_table.shape[1]
    gathers = call.seq_lens > 0 if call.gather_lens is None else (call.seq_lens > 0) & (call.gather_lens > 0)
    checks.at_most(
        "dequantize_and_gather_k_cache",
        "seq_lens",
        call.seq_lens.where(gathers, torch.zeros_like(call.seq_lens)),
        pages * call.block_size,
        f"the rows of {pages} pages, all that block_table names",
    )


def _gather_kernel() -> OpKernel[GatherCall]:
    from cute_kernels.kv_cache.gather import KERNEL

    return KERNEL


_gather = define_op(
    "dequantize_and_gather_k_cache(Tensor(a!) out, Tensor k_cache, Tensor seq_lens, Tensor? gather_lens, "
    "Tensor block_table, SymInt block_size, SymInt offset, str kv_format) -> ()",
    GatherCall,
    check=_check_gather,
    reference=reference.dequantize_and_gather_k_cache,
    kernel=_gather_kernel,
    cost=_cost_gather,
    validate=_validate_gather,
)


@planned
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
    """Copy the last rows of each request out of a paged cache, as bf16.

    out[r, offset + i] = row seq_lens[r] - len + i of request r, for i < len = min(gather_lens[r], seq_lens[r]). Row p
    of a request lies in page block_table[r, p // block_size], row p % block_size. A row whose page the block table
    does not name, or that lies outside the pool, is zeros. Nothing else of `out` is written: rows that would fall past
    its end are skipped.

    out           bf16 [R', M, 512], R' >= R, any strides with a dense last dimension; mutated
    k_cache       uint8 [num_blocks, block_size, bytes of a record], or of fp8_ds_mla/1 [num_blocks, bytes]
    seq_lens      int32 [R], rows in the cache per request; values <= 0 gather nothing
    gather_lens   int32 [R] or None (all): how many of them, counted from the end; more than seq_lens[r] means all
    block_table   int32 [R, width], row-strided; only the columns of the rows that are copied are looked at
    block_size    rows per page
    offset        first row of `out` that is written
    kv_format     record format id: fp8_ds_mla/1, mxfp8_v41/1 or nvfp4_v41/1, or their split forms

    The values are exact: all products of a code and its scale fit bf16. Code 0x7F or 0xFF of e4m3 gives NaN. Raises
    ValueError or TypeError on arguments that do not fit.
    """
    _gather(GatherCall(out, k_cache, seq_lens, gather_lens, block_table, block_size, offset, kv_format))


# ---- records as they are


def _check_records(c: Checker, call: PackCall | UnpackCall, argument: str, records: torch.Tensor) -> None:
    c.one_of("kv_format", call.kv_format, list(formats.RECORD_FORMATS))
    fmt = formats.RECORD_FORMATS[call.kv_format]
    fmt.check(c, "cache", call.cache)
    c.tensor("slots", call.slots, torch.int64, ("n",))
    c.tensor(argument, records, torch.uint8, ("n", fmt.record_bytes))


def _check_pack(call: PackCall) -> None:
    _check_records(Checker("pack_records"), call, "out", call.out)


def _check_unpack(call: UnpackCall) -> None:
    _check_records(Checker("unpack_records"), call, "records", call.records)


def _cost_pack(call: PackCall) -> Cost:
    here = formats.valid_slots(call.slots, call.cache.shape[0] * call.cache.shape[1])
    return Cost(bytes=nbytes(call.slots, call.out) + int(here.sum()) * call.out.shape[1])


def _cost_unpack(call: UnpackCall) -> Cost:
    here = formats.valid_slots(call.slots, call.cache.shape[0] * call.cache.shape[1])
    return Cost(bytes=nbytes(call.slots) + 2 * int(here.sum()) * call.records.shape[1])


def _validate_unpack(call: UnpackCall) -> None:
    checks.distinct_slots("unpack_records", "slots", call.slots, call.cache.shape[0] * call.cache.shape[1])


def _pack_kernel() -> OpKernel[PackCall]:
    from cute_kernels.kv_cache.pack import PACK

    return PACK


def _unpack_kernel() -> OpKernel[UnpackCall]:
    from cute_kernels.kv_cache.pack import UNPACK

    return UNPACK


_pack = define_op(
    "pack_records(Tensor cache, Tensor slots, str kv_format, Tensor(a!) out, bool use_pdl) -> ()",
    PackCall,
    check=_check_pack,
    reference=reference.pack_records,
    kernel=_pack_kernel,
    cost=_cost_pack,
)

_unpack = define_op(
    "unpack_records(Tensor records, Tensor(a!) cache, Tensor slots, str kv_format, bool use_pdl) -> ()",
    UnpackCall,
    check=_check_unpack,
    reference=reference.unpack_records,
    kernel=_unpack_kernel,
    cost=_cost_unpack,
    validate=_validate_unpack,
)


@planned
def pack_records(
    cache: torch.Tensor,
    slots: torch.Tensor,
    kv_format: str,
    *,
    out: torch.Tensor | None = None,
    use_pdl: bool = False,
) -> torch.Tensor:
    """Copy records out of a paged cache, byte for byte: each as one row, its data and then its scales, as ranks send
    them.

    cache       [num_blocks, block_size, row elements] of kv_format, any page stride that holds a page
    slots       int64 [n]: page * block_size + row of each record. A slot outside the cache gives zeros
    kv_format   record format id, of `formats.RECORD_FORMATS`: any cache, and compressor states
    out         uint8 [n, `formats.RECORD_FORMATS[kv_format].record_bytes`], row-strided; mutated. None: allocated
    use_pdl     start while the kernel before on the stream still runs, and wait for it before anything is read

    Returns out. On a GPU rows and pages are 4-byte aligned; pages at multiples of 16 bytes, and rows one behind the
    other from a multiple of 16 bytes on, are faster.
    Raises ValueError or TypeError on arguments that do not fit.
    """
    if out is None:
        c = Checker("pack_records")
        c.one_of("kv_format", kv_format, list(formats.RECORD_FORMATS))
        c.tensor("slots", slots, torch.int64, ("n",))
        out = slots.new_empty((slots.shape[0], formats.RECORD_FORMATS[kv_format].record_bytes), dtype=torch.uint8)
    _pack(PackCall(cache, slots, kv_format, out, use_pdl))
    return out


@planned
def unpack_records(
    records: torch.Tensor,
    cache: torch.Tensor,
    slots: torch.Tensor,
    kv_format: str,
    *,
    use_pdl: bool = False,
) -> None:
    """Copy records that `pack_records` made into a paged cache, byte for byte.

    records     uint8 [n, record bytes], row-strided
    cache       as of `pack_records`; mutated
    slots       int64 [n]: where each record goes. Slots outside the cache, negative ones included, are skipped; those
                inside it must be distinct
    kv_format   record format id
    use_pdl     as of `pack_records`

    Raises ValueError or TypeError on arguments that do not fit.
    """
    _unpack(UnpackCall(records, cache, slots, kv_format, use_pdl))


# ---- the step before attention

_QUANT_INSERT = "fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert"
_BF16_INSERT = "fused_deepseek_v4_qnorm_rope_kv_rope_full_cache_bf16_insert"
_FP8_INSERT = "fused_deepseek_v4_qnorm_rope_kv_rope_full_cache_fp8_insert"


def _check_rows(c: Checker, call: QuantInsertCall | Bf16InsertCall | Fp8InsertCall) -> None:
    c.tensor("q", call.q, torch.bfloat16, ("N", "H", formats.HEAD_DIM))
    c.tensor("kv", call.kv, torch.bfloat16, ("N", formats.HEAD_DIM))
    c.tensor("slot_mapping", call.slot_mapping, torch.int64, (None,))
    c.tensor("positions", call.positions, torch.int64, ("N",))
    c.tensor("cos_sin_cache", call.cos_sin_cache, torch.float32, (None, formats.ROPE_DIM))
    c.require(call.cos_sin_cache.shape[0] > 0, "cos_sin_cache", "at least one row", list(call.cos_sin_cache.shape))
    rows = call.slot_mapping.shape[0]
    c.require(rows <= call.q.shape[0], "slot_mapping", f"at most N = {call.q.shape[0]} rows", rows)
    c.require(call.eps >= 0, "eps", "a number >= 0", call.eps)
    c.require(call.block_size > 0, "block_size", "a positive number", call.block_size)


def _check_quant_insert(call: QuantInsertCall) -> None:
    c = Checker(_QUANT_INSERT)
    _check_rows(c, call)
    fmt = formats.get_format(c, "kv_format", call.kv_format, formats.FP8_DS_MLA, *formats.MXFP8_FORMATS)
    fmt.check(c, "k_cache", call.k_cache, call.block_size)


def _check_bf16_insert(call: Bf16InsertCall) -> None:
    c = Checker(_BF16_INSERT)
    _check_rows(c, call)
    formats.get_format(c, "kv_format", call.kv_format, formats.PLAIN_BF16).check(
        c, "kv_cache", call.kv_cache, call.block_size
    )


def _check_fp8_insert(call: Fp8InsertCall) -> None:
    c = Checker(_FP8_INSERT)
    _check_rows(c, call)
    c.tensor("q_fp8", call.q_fp8, torch.float8_e4m3fn, ("N", "H", formats.HEAD_DIM))
    c.tensor("fp8_kv_scale", call.fp8_kv_scale, torch.float32, (1,))
    c.tensor("q_scale_inv", call.q_scale_inv, torch.float32, (1,))
    formats.get_format(c, "kv_format", call.kv_format, formats.PLAIN_FP8).check(
        c, "kv_cache", call.kv_cache, call.block_size
    )


def _cost(q: torch.Tensor, slot_mapping: torch.Tensor, q_out_size: int, record_bytes: int) -> Cost:
    n, heads, dim = q.shape
    inserted = int((slot_mapping >= 0).sum())
    per_token = formats.ROPE_DIM * 4 + 8
    moved = n * heads * dim * (2 + q_out_size) + inserted * (dim * 2 + record_bytes) + n * per_token
    rope, norm = formats.ROPE_DIM * 3, dim * 3
    return Cost(bytes=moved + nbytes(slot_mapping), flops=n * heads * (norm + rope) + inserted * (rope + dim))


def _cost_quant_insert(call: QuantInsertCall) -> Cost:
    return _cost(call.q, call.slot_mapping, 2, formats.FORMATS[call.kv_format].record_bytes)


def _cost_bf16_insert(call: Bf16InsertCall) -> Cost:
    return _cost(call.q, call.slot_mapping, 2, formats.HEAD_DIM * 2)


def _cost_fp8_insert(call: Fp8InsertCall) -> Cost:
    return _cost(call.q, call.slot_mapping, 1, formats.HEAD_DIM)


def _validate_quant_insert(call: QuantInsertCall) -> None:
    capacity = call.k_cache.shape[0] * call.block_size
    checks.distinct_slots(_QUANT_INSERT, "slot_mapping", call.slot_mapping, capacity)


def _validate_bf16_insert(call: Bf16InsertCall) -> None:
    checks.distinct_slots(
        _BF16_INSERT, "slot_mapping", call.slot_mapping, call.kv_cache.shape[0] * call.kv_cache.shape[1]
    )


def _validate_fp8_insert(call: Fp8InsertCall) -> None:
    checks.distinct_slots(
        _FP8_INSERT, "slot_mapping", call.slot_mapping, call.kv_cache.shape[0] * call.kv_cache.shape[1]
    )


def _quant_insert_kernel() -> OpKernel[QuantInsertCall]:
    from cute_kernels.kv_cache.qnorm import QUANT_INSERT

    return QUANT_INSERT


_quant_insert = define_op(
    f"{_QUANT_INSERT}(Tensor(a!) q, Tensor kv, Tensor(b!) k_cache, Tensor slot_mapping, Tensor positions, "
    "Tensor cos_sin_cache, float eps, SymInt block_size, bool apply_q_norm, str kv_format, bool use_pdl) -> ()",
    QuantInsertCall,
    check=_check_quant_insert,
    reference=reference.qnorm_rope_kv_rope_quant_insert,
    kernel=_quant_insert_kernel,
    cost=_cost_quant_insert,
    validate=_validate_quant_insert,
)


def _bf16_insert_kernel() -> OpKernel[Bf16InsertCall]:
    from cute_kernels.kv_cache.qnorm import BF16_INSERT

    return BF16_INSERT


_bf16_insert = define_op(
    f"{_BF16_INSERT}(Tensor(a!) q, Tensor kv, Tensor(b!) kv_cache, Tensor slot_mapping, Tensor positions, "
    "Tensor cos_sin_cache, float eps, SymInt block_size, bool apply_q_norm, str kv_format, bool use_pdl) -> ()",
    Bf16InsertCall,
    check=_check_bf16_insert,
    reference=reference.qnorm_rope_kv_rope_full_cache_bf16_insert,
    kernel=_bf16_insert_kernel,
    cost=_cost_bf16_insert,
    validate=_validate_bf16_insert,
)


def _fp8_insert_kernel() -> OpKernel[Fp8InsertCall]:
    from cute_kernels.kv_cache.qnorm import FP8_INSERT

    return FP8_INSERT


_fp8_insert = define_op(
    f"{_FP8_INSERT}(Tensor q, Tensor kv, Tensor(a!) q_fp8, Tensor(b!) kv_cache, Tensor slot_mapping, "
    "Tensor positions, Tensor cos_sin_cache, Tensor fp8_kv_scale, Tensor q_scale_inv, float eps, SymInt block_size, "
    "bool apply_q_norm, str kv_format, bool use_pdl) -> ()",
    Fp8InsertCall,
    check=_check_fp8_insert,
    reference=reference.qnorm_rope_kv_rope_full_cache_fp8_insert,
    kernel=_fp8_insert_kernel,
    cost=_cost_fp8_insert,
    validate=_validate_fp8_insert,
)


@planned
def fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert(
    q: torch.Tensor,
    kv: torch.Tensor,
    k_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    eps: float,
    block_size: int,
    *,
    apply_q_norm: bool = True,
    kv_format: str = formats.FP8_DS_MLA.id,
    use_pdl: bool = False,
) -> None:
    """Normalize and rotate q in place; rotate kv and store it in a paged fp8_ds_mla or mxfp8_v41 cache.

    Queries: every head of every row becomes x * rsqrt(mean(x^2) + eps), without a weight, then its last 64 columns are
    rotated; fp32 throughout, rounded to bf16 once. KV: the last 64 columns are rotated in fp32, the row is rounded to
    bf16 and stored exactly as quantize_and_insert_k_cache does, or as a record of mxfp8_v41/1. The rotation is two
    rounded products and a rounded sum (numerics.rotate), so every byte of the cache is defined.

    q               bf16 [N, H, 512], any H, strided with a dense last dimension; mutated
    kv              bf16 [N, 512], already normalized, rows of any stride
    k_cache         uint8 [num_blocks, block_size, bytes of a record], or of fp8_ds_mla/1 [num_blocks, bytes], page
                    stride = stride(0); mutated
    slot_mapping    int64 [T'], T' <= N: row t < T' of kv goes to slot_mapping[t] = page * block_size + row. Rows from
                    T' on are padding: their q is processed, their kv is not. Slots outside the cache, negative ones
                    included, are skipped; those inside it must be distinct
    positions       int64 [N], the rows of cos_sin_cache to rotate by; outside of it the nearest row is taken
    cos_sin_cache   fp32 [max_pos, 64], cos in columns 0..31, sin in columns 32..63; pairs are (2i, 2i + 1)
    eps             added to the mean square
    block_size      rows per page
    apply_q_norm    False: q is only rotated
    kv_format       record format id: fp8_ds_mla/1, or V4.1's mxfp8_v41/1 or mxfp8_v41_split/1
    use_pdl         start while the kernel before on the stream still runs (programmatic dependent launch), and wait for
                    it before q, kv and the cache are touched. slot_mapping, positions and cos_sin_cache are constants:
                    they may be read before that, and what writes them must have ended before the kernel before starts
                    to let this one start (see `fused_qkv_insert_compress`)

    Raises ValueError or TypeError on arguments that do not fit.
    """
    _quant_insert(
        QuantInsertCall(
            q, kv, k_cache, slot_mapping, positions, cos_sin_cache, eps, block_size, apply_q_norm, kv_format, use_pdl
        )
    )


@planned
def fused_deepseek_v4_qnorm_rope_kv_rope_full_cache_bf16_insert(
    q: torch.Tensor,
    kv: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    eps: float,
    block_size: int,
    *,
    apply_q_norm: bool = True,
    kv_format: str = formats.PLAIN_BF16.id,
    use_pdl: bool = False,
) -> None:
    """Normalize and rotate q in place; rotate kv and store it in a paged cache of plain bf16 rows.

    As fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert, but all 512 columns of a row are stored as bf16: the first 448
    as they are, the rotated ones rounded once.

    kv_cache    bf16 [num_blocks, block_size, 512], page stride = stride(0), rows dense inside a page; mutated
    kv_format   record format id

    The other arguments and the errors are the same.
    """
    _bf16_insert(
        Bf16InsertCall(
            q, kv, kv_cache, slot_mapping, positions, cos_sin_cache, eps, block_size, apply_q_norm, kv_format, use_pdl
        )
    )


@planned
def fused_deepseek_v4_qnorm_rope_kv_rope_full_cache_fp8_insert(
    q: torch.Tensor,
    kv: torch.Tensor,
    q_fp8: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    fp8_kv_scale: torch.Tensor,
    q_scale_inv: torch.Tensor,
    eps: float,
    block_size: int,
    *,
    apply_q_norm: bool = True,
    kv_format: str = formats.PLAIN_FP8.id,
    use_pdl: bool = False,
) -> None:
    """Normalize and rotate q into q_fp8; rotate kv and store it in a paged cache of plain e4m3 rows.

    q_fp8 = e4m3(q' * q_scale_inv) and cache row = e4m3(kv' / fp8_kv_scale), where q' and kv' are the fp32 results of
    the norm and the rotation of fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert, not rounded to bf16 in between. The
    product and the quotient are rounded to fp32, then to e4m3: nearest even, saturating at 448, NaN stored as 0x7F.

    q              bf16 [N, H, 512], any H, strided with a dense last dimension; only read
    q_fp8          float8_e4m3fn [N, H, 512], strided with a dense last dimension; mutated
    kv_cache       float8_e4m3fn [num_blocks, block_size, 512], page stride = stride(0), rows dense in a page; mutated
    fp8_kv_scale   fp32 [1], what a stored KV value is multiplied by when it is read
    q_scale_inv    fp32 [1], the inverse of what a value of q_fp8 is multiplied by when it is read
    kv_format      record format id

    The other arguments and the errors are the same.
    """
    _fp8_insert(
        Fp8InsertCall(
            q,
            kv,
            q_fp8,
            kv_cache,
            slot_mapping,
            positions,
            cos_sin_cache,
            fp8_kv_scale,
            q_scale_inv,
            eps,
            block_size,
            apply_q_norm,
            kv_format,
            use_pdl,
        )
    )
