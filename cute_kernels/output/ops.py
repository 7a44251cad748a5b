# SPDX-License-Identifier: Apache-2.0
"""Output projection: turn the rotation of the attention output back and quantize it. The GEMM that follows is one of
linear/, offered here as well."""

from __future__ import annotations

import torch

from cute_kernels import formats
from cute_kernels.linear.ops import deepseek_v4_fp8_einsum
from cute_kernels.linear.scales import BLOCK, output_scale_shape, pack_block_scales
from cute_kernels.output import reference
from cute_kernels.output.call import QuantizedCall, RotatedCall
from cute_kernels.runtime.checks import Checker
from cute_kernels.runtime.key import OpKernel
from cute_kernels.runtime.ops import Cost, define_op, nbytes
from cute_kernels.runtime.plans import planned

__all__ = ["deepseek_v4_fp8_einsum", "fused_inv_rope_fp8_quant", "output_scale_shape", "pack_block_scales"]


def _check_groups(c: Checker, n_groups: int, heads_per_group: int) -> None:
    c.ints(n_groups=n_groups, heads_per_group=heads_per_group)
    c.require(n_groups > 0, "n_groups", "a positive number", n_groups)
    c.require(heads_per_group > 0, "heads_per_group", "a positive number", heads_per_group)


def _check_rotation(c: Checker, call: QuantizedCall | RotatedCall, out_dtype: torch.dtype) -> None:
    _check_groups(c, call.n_groups, call.heads_per_group)
    c.tensor("o", call.o, torch.bfloat16, ("T", call.n_groups * call.heads_per_group, formats.HEAD_DIM))
    c.tensor("positions", call.positions, torch.int64, ("T",), dense_last=False)
    c.tensor("cos_sin_cache", call.cos_sin_cache, torch.float32, (None, formats.ROPE_DIM))
    c.require(call.cos_sin_cache.shape[0] > 0, "cos_sin_cache", "at least one row", list(call.cos_sin_cache.shape))
    c.tensor("out", call.out, out_dtype, ("T", call.n_groups, call.heads_per_group * formats.HEAD_DIM))


def _check_quant(call: QuantizedCall) -> None:
    c = Checker("fused_inv_rope_fp8_quant")
    _check_rotation(c, call, torch.float8_e4m3fn)
    shape = output_scale_shape(call.o.shape[0], call.n_groups, call.heads_per_group, call.tma_aligned_scales)
    c.tensor("scale_out", call.scale_out, torch.int32 if call.tma_aligned_scales else torch.float32, shape)


def _cost_quant(call: QuantizedCall) -> Cost:
    return Cost(
        bytes=nbytes(call.o, call.positions, call.out, call.scale_out) + call.positions.numel() * formats.ROPE_DIM * 4
    )


def _quant_kernel() -> OpKernel[QuantizedCall]:
    from cute_kernels.output.inv_rope import QUANTIZED

    return QUANTIZED


_quant = define_op(
    "fused_inv_rope_fp8_quant(Tensor o, Tensor positions, Tensor cos_sin_cache, Tensor(a!) out, Tensor(b!) scale_out, "
    "SymInt n_groups, SymInt heads_per_group, bool tma_aligned_scales, bool use_pdl) -> ()",
    QuantizedCall,
    check=_check_quant,
    reference=reference.fused_inv_rope_fp8_quant,
    kernel=_quant_kernel,
    cost=_cost_quant,
)


def _check_inv_rope(call: RotatedCall) -> None:
    c = Checker("fused_inv_rope")
    _check_rotation(c, call, torch.bfloat16)


def _cost_inv_rope(call: RotatedCall) -> Cost:
    return Cost(bytes=nbytes(call.o, call.positions, call.out) + call.positions.numel() * formats.ROPE_DIM * 4)


def _inv_rope_kernel() -> OpKernel[RotatedCall]:
    from cute_kernels.output.inv_rope import ROTATED

    return ROTATED


_inv_rope = define_op(
    "fused_inv_rope(Tensor o, Tensor positions, Tensor cos_sin_cache, Tensor(a!) out, SymInt n_groups, "
    "SymInt heads_per_group, bool use_pdl) -> ()",
    RotatedCall,
    check=_check_inv_rope,
    reference=reference.fused_inv_rope,
    kernel=_inv_rope_kernel,
    cost=_cost_inv_rope,
)


@planned
def fused_inv_rope_fp8_quant(
    o: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    n_groups: int,
    heads_per_group: int,
    nope_dim: int = formats.NOPE_DIM,
    rope_dim: int = formats.ROPE_DIM,
    quant_group_size: int = BLOCK,
    tma_aligned_scales: bool = False,
    *,
    quantize: bool = True,
    out: torch.Tensor | None = None,
    scale_out: torch.Tensor | None = None,
    use_pdl: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Turn the rotation of the attention output back and quantize it, group by group, for the output projection.

    The last 64 columns of each head are rotated by minus the row's position, in fp32. Each 128-column chunk of the fp32
    values gets a scale 2^ceil(log2(max(absmax, 1e-10) / 448)) and is stored as e4m3 (nearest even). Head h lies in
    group h // heads_per_group, at column (h % heads_per_group) * 512.

    o                    bf16 [T, H, 512], H = n_groups * heads_per_group, any strides with a dense last dimension (the
                         first heads of a padded buffer, for example)
    positions            int64 [T]; one outside the table takes the table's nearest row
    cos_sin_cache        fp32 [max_pos, 64]: cos in columns 0..31, sin in 32..63
    n_groups             groups G
    heads_per_group      heads of a group; K = heads_per_group * 512
    nope_dim, rope_dim, quant_group_size
                         448, 64 and 128: nothing else exists
    tma_aligned_scales   False: one fp32 scale per chunk. True: one int32 word per head; byte j from the low end holds
                         the exponent + 127 of chunk j
    quantize             False: only rotate; the result is rounded to bf16
    out                  e4m3 (bf16 without quantization) [T, G, K] with a dense last dimension; mutated. By default it
                         is allocated, each group's rows together: strides (K, T * K, 1)
    scale_out            the memory of the scales, fp32 or int32 [G, S, T rounded up to 4], `output_scale_shape(...)`;
                         mutated, all of it: the padding columns become zero. Allocated by default
    use_pdl              start while the kernel before on the stream still runs (programmatic dependent launch), and
                         wait for it

    Returns (o_fp8 [T, G, K], o_scale [T, G, S]); o_scale is a view of the scale memory with strides (1, S * Tal, Tal).
    Without quantization: (bf16 [T, G, K], an empty tensor).

    Raises ValueError or TypeError on arguments that do not fit.
    """
    c = Checker("fused_inv_rope_fp8_quant")
    c.one_of("nope_dim", nope_dim, (formats.NOPE_DIM,))
    c.one_of("rope_dim", rope_dim, (formats.ROPE_DIM,))
    c.one_of("quant_group_size", quant_group_size, (BLOCK,))
    c.flags(quantize=quantize, tma_aligned_scales=tma_aligned_scales)
    _check_groups(c, n_groups, heads_per_group)
    c.tensor("o", o, torch.bfloat16, (None, n_groups * heads_per_group, formats.HEAD_DIM))
    if out is None:
        dtype = torch.float8_e4m3fn if quantize else torch.bfloat16
        memory = torch.empty(n_groups, o.shape[0], heads_per_group * formats.HEAD_DIM, dtype=dtype, device=o.device)
        out = memory.transpose(0, 1)
    if not quantize:
        c.require(scale_out is None, "scale_out", "None without quantization", "a tensor")
        _inv_rope(RotatedCall(o, positions, cos_sin_cache, out, n_groups, heads_per_group, use_pdl))
        return out, torch.empty(0, dtype=torch.float32, device=o.device)
    if scale_out is None:
        shape = output_scale_shape(o.shape[0], n_groups, heads_per_group, tma_aligned_scales)
        scale_out = torch.empty(shape, dtype=torch.int32 if tma_aligned_scales else torch.float32, device=o.device)
    _quant(
        QuantizedCall(
            o, positions, cos_sin_cache, out, scale_out, n_groups, heads_per_group, tma_aligned_scales, use_pdl
        )
    )
    return out, scale_out.permute(2, 0, 1)[: o.shape[0]]
