"""Rotate and quantize indexer queries."""

from __future__ import annotations

from typing import Any

import torch

from cute_kernels import formats, numerics
from cute_kernels.indexer import reference
from cute_kernels.runtime.checks import Checker
from cute_kernels.runtime.ops import Cost, define_op, nbytes

__all__ = ["fused_indexer_q_rope_quant"]

_DIM = formats.INDEX_DIM


def _check_inputs(
    c: Checker,
    positions: torch.Tensor,
    index_q: torch.Tensor,
    index_q_cos_sin_cache: torch.Tensor,
    index_weights: torch.Tensor,
) -> None:
    c.tensor("positions", positions, torch.int64, ("T",))
    c.tensor("index_q", index_q, torch.bfloat16, ("T", "HI", _DIM))
    c.tensor("index_q_cos_sin_cache", index_q_cos_sin_cache, (torch.float32, torch.bfloat16), (None, formats.ROPE_DIM))
    c.require(index_q_cos_sin_cache.shape[0] > 0, "index_q_cos_sin_cache", "at least one row", "none")
    c.tensor("index_weights", index_weights, (torch.bfloat16, torch.float32), ("T", "HI"))


def _check_fp8(
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
    c = Checker("fused_indexer_q_rope_quant_fp8")
    _check_inputs(c, positions, index_q, index_q_cos_sin_cache, index_weights)
    c.tensor("q_quant", q_quant, torch.float8_e4m3fn, ("T", "HI", _DIM))
    c.tensor("weights_out", weights_out, torch.float32, ("T", "HI"))


def _check_mxfp4(
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
    c = Checker("fused_indexer_q_rope_quant_mxfp4")
    _check_inputs(c, positions, index_q, index_q_cos_sin_cache, index_weights)
    c.one_of("e2m1_rounding", e2m1_rounding, numerics.E2M1_ROUNDINGS)
    c.tensor("q_quant", q_quant, torch.uint8, ("T", "HI", _DIM // 2))
    c.tensor("q_scale", q_scale, torch.int32, ("T", "HI"))
    c.tensor("weights_out", weights_out, (torch.float32, torch.bfloat16), ("T", "HI"))


def _cost(positions: torch.Tensor, index_q: torch.Tensor, cos_sin_cache: torch.Tensor, *rest: Any) -> Cost:
    table_rows = positions.shape[0] * formats.ROPE_DIM * cos_sin_cache.element_size()
    tensors = [t for t in rest if isinstance(t, torch.Tensor)]
    return Cost(bytes=nbytes(positions, index_q, *tensors) + table_rows)


_fp8 = define_op(
    "fused_indexer_q_rope_quant_fp8(Tensor positions, Tensor index_q, Tensor index_q_cos_sin_cache, "
    "Tensor index_weights, float index_weights_softmax_scale, float index_weights_head_scale, bool index_hadamard, "
    "Tensor(a!) q_quant, Tensor(b!) weights_out, bool round_weights, bool use_pdl) -> ()",
    check=_check_fp8,
    reference=reference.fused_indexer_q_rope_quant_fp8,
    kernel="cute_kernels.indexer.query:FP8",
    cost=_cost,
)

_mxfp4 = define_op(
    "fused_indexer_q_rope_quant_mxfp4(Tensor positions, Tensor index_q, Tensor index_q_cos_sin_cache, "
    "Tensor index_weights, float index_weights_softmax_scale, float index_weights_head_scale, str e2m1_rounding, "
    "bool index_hadamard, Tensor(a!) q_quant, Tensor(b!) q_scale, Tensor(c!) weights_out, bool round_weights, "
    "bool use_pdl) -> ()",
    check=_check_mxfp4,
    reference=reference.fused_indexer_q_rope_quant_mxfp4,
    kernel="cute_kernels.indexer.query:MXFP4",
    cost=_cost,
)


def fused_indexer_q_rope_quant(
    positions: torch.Tensor,
    index_q: torch.Tensor,
    index_q_cos_sin_cache: torch.Tensor,
    index_weights: torch.Tensor,
    index_weights_softmax_scale: float,
    index_weights_head_scale: float,
    use_fp4: bool = False,
    *,
    weights_out_dtype: torch.dtype = torch.float32,
    e2m1_rounding: str = "ties_to_lower",
    index_hadamard: bool = False,
    round_weights: bool = False,
    use_pdl: bool = False,
    out: tuple[Any, torch.Tensor] | None = None,
) -> tuple[Any, torch.Tensor]:
    """Rotate the last 64 columns of indexer queries, quantize each head, and scale the heads' weights.

    The rotation is done in fp32 and rounded to bf16; what follows sees bf16 values only.
    FP8: one scale 2^ceil(log2(max(absmax, 1e-4) / 448)) per head, folded into the weights:
    weights_out = ((w * scale) * softmax_scale) * head_scale, each product rounded to fp32.
    MXFP4: one scale 2^ceil(log2(max(absmax, 1e-4) / 6)) per 32 columns, returned;
    weights_out = (w * softmax_scale) * head_scale.
    The absmax ignores NaN; a NaN element becomes code 0x7F (e4m3) or 0 (e2m1).

    positions                     int64 [T]; a position outside the table takes the table's nearest row
    index_q                       bf16 [T, HI, 128], any strides with a dense last dimension
    index_q_cos_sin_cache         fp32 or bf16 [max_pos, 64], cos in columns 0..31, sin in 32..63
    index_weights                 bf16 or fp32 [T, HI], row-strided: columns of a wider projection will do
    index_weights_softmax_scale   factor, usually 128 ** -0.5
    index_weights_head_scale      factor, usually HI ** -0.5
    use_fp4                       MXFP4 instead of FP8
    weights_out_dtype             torch.float32; MXFP4 also torch.bfloat16 (rounded once, at the end)
    e2m1_rounding                 MXFP4 only: "ties_to_lower" or "ties_to_even" (see numerics.to_e2m1)
    index_hadamard                Hadamard-transform the rotated bf16 query in fp32 and round to bf16 before quantizing
    round_weights                 round fp32 weights to bf16 first: the bytes that bf16 weights give
    use_pdl                       start while the kernel before on the stream still runs (programmatic dependent
                                  launch), and wait for it before anything is read
    out                           (q_quant, weights_out) to write into, of the shapes and dtypes below, row-strided

    Returns (q_quant, weights_out). FP8: q_quant is float8_e4m3fn [T, HI, 128]. MXFP4: q_quant is (uint8 [T, HI, 64]
    with element 2j in the low nibble of byte j, int32 [T, HI] holding the four ue8m0 bytes, block 0 lowest).
    weights_out is [T, HI]. Raises ValueError or TypeError on arguments that do not fit.
    """
    c = Checker("fused_indexer_q_rope_quant")
    c.tensor("index_q", index_q, torch.bfloat16, (None, None, _DIM))
    c.flags(use_fp4=use_fp4)
    c.one_of("weights_out_dtype", weights_out_dtype, (torch.float32, torch.bfloat16) if use_fp4 else (torch.float32,))
    if out is None:
        rows, heads = index_q.shape[0], index_q.shape[1]
        q_quant: Any
        if use_fp4:
            packed = index_q.new_empty((rows, heads, _DIM // 2), dtype=torch.uint8)
            q_quant = (packed, index_q.new_empty((rows, heads), dtype=torch.int32))
        else:
            q_quant = index_q.new_empty((rows, heads, _DIM), dtype=torch.float8_e4m3fn)
        weights_out = index_q.new_empty((rows, heads), dtype=weights_out_dtype)
    else:
        q_quant, weights_out = c.pair("out", out, "q_quant, weights_out")
        if use_fp4:
            q_quant = c.pair("out[0]", q_quant, "packed codes, scales")
        c.tensor("out[1]", weights_out, weights_out_dtype)
    inputs = (positions, index_q, index_q_cos_sin_cache, index_weights)
    factors = (index_weights_softmax_scale, index_weights_head_scale)
    if use_fp4:
        _mxfp4(*inputs, *factors, e2m1_rounding, index_hadamard, *q_quant, weights_out, round_weights, use_pdl)
    else:
        _fp8(*inputs, *factors, index_hadamard, q_quant, weights_out, round_weights, use_pdl)
    return q_quant, weights_out
