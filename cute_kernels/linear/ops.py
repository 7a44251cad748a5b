# SPDX-License-Identifier: Apache-2.0
"""Ops of the linear layers: quantized activations, and the GEMMs that read them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cute_kernels import formats
from cute_kernels.formats import round_up
from cute_kernels.linear import reference
from cute_kernels.linear.call import Bf16GemmCall, DualGemmCall, EinsumCall, Fp8GemmCall, QuantizeCall, SquaresCall
from cute_kernels.linear.scales import BLOCK, CHUNKS_PER_WORD, ROW_ALIGNMENT
from cute_kernels.runtime.checks import Checker
from cute_kernels.runtime.key import OpKernel
from cute_kernels.runtime.ops import Cost, define_op, nbytes
from cute_kernels.runtime.plans import planned

__all__ = [
    "activation_scale_shape",
    "bf16_linear",
    "deepseek_v4_fp8_einsum",
    "fp8_bf16_linear",
    "fp8_grouped_linear",
    "fp8_linear",
    "fp8_linear_squares",
    "quantize_fp8_1x128",
]


# ---- quantization


def activation_scale_shape(rows: int, columns: int) -> tuple[int, int]:
    """Shape [ceil(K / 128), T rounded up to 4] of the fp32 memory that holds the scales of activations [T, K]."""
    return -(-columns // BLOCK), round_up(rows, ROW_ALIGNMENT)


def _check(call: QuantizeCall) -> None:
    c = Checker("quantize_fp8_1x128")
    c.tensor("x", call.x, torch.bfloat16, ("T", "K"))
    c.tensor("out", call.out, torch.float8_e4m3fn, ("T", "K"))
    c.tensor("scale_out", call.scale_out, torch.float32, activation_scale_shape(*call.x.shape))


def _cost(call: QuantizeCall) -> Cost:
    return Cost(bytes=nbytes(call.x, call.out, call.scale_out))


def _quantize_kernel() -> OpKernel[QuantizeCall]:
    from cute_kernels.linear.quantize import KERNEL

    return KERNEL


_quantize = define_op(
    "quantize_fp8_1x128(Tensor x, Tensor(a!) out, Tensor(b!) scale_out, bool use_pdl) -> ()",
    QuantizeCall,
    check=_check,
    reference=reference.quantize_fp8_1x128,
    kernel=_quantize_kernel,
    cost=_cost,
)


@planned
def quantize_fp8_1x128(
    x: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    scale_out: torch.Tensor | None = None,
    use_pdl: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize activations to e4m3 with one scale per row and 128 columns, as an FP8 GEMM reads them.

    Each block of 128 columns (the last one of a row may be narrower) gets the scale 2^ceil(log2(max(absmax, 1e-10) /
    448)) and is stored as e4m3 (nearest even). NaN does not count for the absmax and becomes the code 0x7F; infinity
    counts as the largest fp32 number and becomes 448.

    x           bf16 [T, K], rows of any stride
    out         e4m3 [T, K], rows of any stride, or None: allocated, contiguous; mutated
    scale_out   the memory of the scales, fp32 [ceil(K / 128), T rounded up to 4] with a dense last dimension,
                `activation_scale_shape(T, K)`, or None: allocated; mutated, all of it: the columns of rows that do not
                exist become zero
    use_pdl     start while the kernel before on the stream still runs (programmatic dependent launch), and wait for it

    Returns (out, scale [T, ceil(K / 128)]); scale is a view of scale_out, rows innermost: `a_scale` of
    `deepseek_v4_fp8_einsum` (with a group dimension). No output may share memory with x or the other. Kernels need rows
    of x that are 16-byte, and rows of out that are 8-byte aligned, and K to be a multiple of 8.
    Raises ValueError or TypeError on arguments that do not fit.
    """
    c = Checker("quantize_fp8_1x128")
    c.tensor("x", x, torch.bfloat16, (None, None))
    if out is None:
        out = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    if scale_out is None:
        scale_out = torch.empty(activation_scale_shape(*x.shape), dtype=torch.float32, device=x.device)
    _quantize(QuantizeCall(x, out, scale_out, use_pdl))
    return out, scale_out.t()[: x.shape[0]]


# ---- GEMMs


def _check_fp8(call: Fp8GemmCall) -> None:
    c = Checker("fp8_gemm")
    c.tensor("a", call.a, torch.float8_e4m3fn, ("T", "G", "K"))
    c.require(call.a.shape[2] % BLOCK == 0, "a", f"K to be a multiple of {BLOCK}", list(call.a.shape))
    chunks = call.a.shape[2] // BLOCK
    c.tensor("weight", call.weight, torch.float8_e4m3fn, ("G", "N", "K"))
    c.tensor("a_scale", call.a_scale, torch.float32, ("T", "G", chunks), dense_last=False)
    c.tensor(
        "weight_scale",
        call.weight_scale,
        torch.float32,
        ("G", -(-call.weight.shape[1] // BLOCK), chunks),
        dense_last=False,
    )
    if call.out_scale is None:
        c.tensor("out", call.out, (torch.bfloat16, torch.float32), ("T", "G", "N"))
        return
    c.tensor("out", call.out, torch.float8_e4m3fn, ("T", "G", "N"))
    c.require(
        call.weight.shape[1] % BLOCK == 0,
        "weight",
        f"N to be a multiple of {BLOCK} for an e4m3 result",
        list(call.weight.shape),
    )
    c.tensor(
        "out_scale",
        call.out_scale,
        torch.float32,
        activation_scale_shape(call.a.shape[0], call.weight.shape[0] * call.weight.shape[1]),
    )


def _cost_fp8(call: Fp8GemmCall) -> Cost:
    return Cost(
        bytes=nbytes(call.a, call.a_scale, call.weight, call.weight_scale, call.out, call.out_scale),
        flops=2 * call.out.numel() * call.a.shape[2],
    )


def _fp8_gemm_kernel() -> OpKernel[Fp8GemmCall]:
    from cute_kernels.linear.launch import FP8_GEMM

    return FP8_GEMM


_fp8_gemm = define_op(
    "fp8_gemm(Tensor a, Tensor a_scale, Tensor weight, Tensor weight_scale, Tensor(a!) out, Tensor(b!)? out_scale, "
    "bool batch_invariant, bool use_pdl) -> ()",
    Fp8GemmCall,
    check=_check_fp8,
    reference=reference.fp8_gemm,
    kernel=_fp8_gemm_kernel,
    cost=_cost_fp8,
)


@planned
def fp8_grouped_linear(
    a: torch.Tensor,
    a_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    out: torch.Tensor | None = None,
    out_scale: torch.Tensor | None = None,
    batch_invariant: bool = False,
    use_pdl: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Multiply each group of quantized rows by the group's quantized weight.

    out[t, g, n] = sum over 128-column chunks c of a_scale[t, g, c] * weight_scale[g, n // 128, c] *
                   dot(a[t, g, c], weight[g, n, c])

    a                 e4m3 [T, G, K], K a multiple of 128; any strides with a dense last dimension
    a_scale           fp32 [T, G, K / 128], any strides (`quantize_fp8_1x128` and `fused_inv_rope_fp8_quant` make such)
    weight            e4m3 [G, N, K], any strides with a dense last dimension. Constant: with use_pdl it may be read
                      before an earlier kernel of the stream has ended; whoever writes it on that stream puts a launch
                      without use_pdl in between
    weight_scale      fp32 [G, ceil(N / 128), K / 128], any strides; constant as the weight
    out_dtype         of an `out` that is None: bf16, fp32, or e4m3 for a result quantized as `quantize_fp8_1x128` does
                      to the result rounded to bf16
    out               [T, G, N] of such a type, any strides with a dense last dimension; mutated
    out_scale         with an e4m3 result (N a multiple of 128): memory of its scales, fp32 [G * N / 128, T rounded up
                      to 4], `activation_scale_shape(T, G * N)`, or None: allocated; mutated, all of it
    batch_invariant   take a kernel that adds in an order which the weight's shape alone decides, whatever T: a row's
                      bits then do not depend on T. Slower for many rows
    use_pdl           start while the kernel before on the stream still runs (programmatic dependent launch), and wait
                      for it before a or a_scale is read

    Returns (out, scale): scale fp32 [T, G * N / 128], a view of out_scale with rows innermost, or None.

    The reference sums in float64 and rounds to fp32, then to the result's type. Kernels sum a chunk on tensor cores,
    which keep about 14 bits on Hopper, and the chunks in fp32. No output may share memory with an input. Kernels need
    rows of a and weight that are 16-byte aligned, and N to be a multiple of 16.
    Raises ValueError or TypeError on arguments that do not fit.
    """
    c = Checker("fp8_gemm")
    c.tensor("a", a, torch.float8_e4m3fn, ("T", "G", "K"))
    c.tensor("weight", weight, torch.float8_e4m3fn, ("G", "N", "K"))
    c.one_of("out_dtype", out_dtype, (torch.bfloat16, torch.float32, torch.float8_e4m3fn))
    rows, groups, outputs = a.shape[0], weight.shape[0], weight.shape[1]
    if out is None:
        out = torch.empty(rows, groups, outputs, dtype=out_dtype, device=a.device)
    if out_scale is None and isinstance(out, torch.Tensor) and out.dtype == torch.float8_e4m3fn:
        shape = activation_scale_shape(rows, groups * outputs)
        out_scale = torch.empty(shape, dtype=torch.float32, device=a.device)
    _fp8_gemm(Fp8GemmCall(a, a_scale, weight, weight_scale, out, out_scale, batch_invariant, use_pdl))
    return out, None if out_scale is None else out_scale.t()[:rows]


@planned
def fp8_linear(
    a: torch.Tensor,
    a_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    out: torch.Tensor | None = None,
    batch_invariant: bool = False,
    use_pdl: bool = False,
) -> torch.Tensor:
    """Multiply quantized rows by a quantized weight: `fp8_grouped_linear` with one group.

    a              e4m3 [T, K], rows of any stride; a_scale fp32 [T, K / 128], any strides
    weight         e4m3 [N, K], weight_scale fp32 [ceil(N / 128), K / 128]; constant
    out            bf16 or fp32 [T, N], rows of any stride, or None: allocated, of out_dtype; mutated
    batch_invariant, use_pdl
                   as of `fp8_grouped_linear`

    Returns out. Raises ValueError or TypeError on arguments that do not fit.
    """
    c = Checker("fp8_gemm")
    c.tensor("a", a, torch.float8_e4m3fn, (None, None))
    c.tensor("weight", weight, torch.float8_e4m3fn, (None, None))
    c.tensor("a_scale", a_scale, torch.float32, (None, None), dense_last=False)
    c.tensor("weight_scale", weight_scale, torch.float32, (None, None), dense_last=False)
    c.one_of("out_dtype", out_dtype, (torch.bfloat16, torch.float32))
    if out is None:
        out = torch.empty(a.shape[0], weight.shape[0], dtype=out_dtype, device=a.device)
    c.tensor("out", out, (torch.bfloat16, torch.float32), (None, None))
    _fp8_gemm(
        Fp8GemmCall(
            a.unsqueeze(1),
            a_scale.unsqueeze(1),
            weight.unsqueeze(0),
            weight_scale.unsqueeze(0),
            out.unsqueeze(1),
            None,
            batch_invariant,
            use_pdl,
        )
    )
    return out


def _check_product(c: Checker, call: SquaresCall | DualGemmCall) -> None:
    """The other operands of a product whose `a` has been checked, and its result."""
    chunks = call.a.shape[1] // BLOCK
    c.tensor("weight", call.weight, torch.float8_e4m3fn, ("N", "K"))
    c.tensor("a_scale", call.a_scale, torch.float32, ("T", chunks), dense_last=False)
    c.tensor(
        "weight_scale", call.weight_scale, torch.float32, (-(-call.weight.shape[0] // BLOCK), chunks), dense_last=False
    )
    c.tensor("out", call.out, torch.bfloat16, ("T", "N"))


def _check_squares(call: SquaresCall) -> None:
    c = Checker("fp8_gemm_squares")
    c.tensor("a", call.a, torch.float8_e4m3fn, ("T", "K"))
    c.require(call.a.shape[1] % BLOCK == 0, "a", f"K to be a multiple of {BLOCK}", list(call.a.shape))
    _check_product(c, call)
    c.tensor("squares", call.squares, torch.float32, ("T", None))
    most = call.weight.shape[0] // BLOCK
    c.require(
        call.squares.shape[1] <= most, "squares", f"at most N / {BLOCK} = {most} columns", list(call.squares.shape)
    )


def _cost_squares(call: SquaresCall) -> Cost:
    moved = nbytes(call.a, call.a_scale, call.weight, call.weight_scale, call.out, call.squares)
    return Cost(bytes=moved, flops=2 * call.out.numel() * call.a.shape[1] + 2 * BLOCK * call.squares.numel())


def _fp8_gemm_squares_kernel() -> OpKernel[SquaresCall]:
    from cute_kernels.linear.launch import FP8_GEMM_SQUARES

    return FP8_GEMM_SQUARES


_fp8_gemm_squares = define_op(
    "fp8_gemm_squares(Tensor a, Tensor a_scale, Tensor weight, Tensor weight_scale, Tensor(a!) out, "
    "Tensor(b!) squares, bool use_pdl) -> ()",
    SquaresCall,
    check=_check_squares,
    reference=reference.fp8_gemm_squares,
    kernel=_fp8_gemm_squares_kernel,
    cost=_cost_squares,
)


@planned
def fp8_linear_squares(
    a: torch.Tensor,
    a_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    blocks: int,
    *,
    out: torch.Tensor | None = None,
    squares: torch.Tensor | None = None,
    use_pdl: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Multiply quantized rows by a quantized weight, and add up the squares of the results: what a norm of heads asks
    for (`sparse_mla_prefill` with q_norm).

    a              e4m3 [T, K], rows of any stride; a_scale fp32 [T, K / 128], any strides
    weight         e4m3 [N, K], weight_scale fp32 [ceil(N / 128), K / 128]; constant, as of `fp8_grouped_linear`
    blocks         of 128 columns, from the first one on, whose squares are added up; at most N / 128
    out            bf16 [T, N], rows of any stride, or None: allocated; mutated
    squares        fp32 [T, blocks], rows of any stride, or None: allocated; mutated: sums of the squares of the bf16
                   results of each row and block
    use_pdl        as of `fp8_grouped_linear`

    Returns (out, squares). out is that of `fp8_linear`, in bits too where that takes its kernel for many rows and does
    not cut K (as where K < 2048). A sum is one of fp32, in the order of cute_kernels/kv_cache/query_norm.py: a row's
    bits depend on nothing else. There is a kernel on Hopper only, made for many rows, which needs rows of a, weight and
    out that are 16-byte aligned, and N to be a multiple of 16. No output may share memory with anything else. Raises
    ValueError or TypeError on arguments that do not fit.
    """
    c = Checker("fp8_gemm_squares")
    c.tensor("a", a, torch.float8_e4m3fn, (None, None))
    c.tensor("weight", weight, torch.float8_e4m3fn, (None, None))
    if out is None:
        out = torch.empty(a.shape[0], weight.shape[0], dtype=torch.bfloat16, device=a.device)
    c.ints(blocks=blocks)
    if squares is None:
        c.require(blocks >= 0, "blocks", "a number >= 0", blocks)
        squares = torch.empty(a.shape[0], blocks, dtype=torch.float32, device=a.device)
    c.tensor("squares", squares, torch.float32, (None, blocks))
    _fp8_gemm_squares(SquaresCall(a, a_scale, weight, weight_scale, out, squares, use_pdl))
    return out, squares


def _check_bf16(call: Bf16GemmCall) -> None:
    c = Checker("bf16_gemm")
    c.tensor("a", call.a, torch.bfloat16, ("T", "K"))
    c.tensor("weight", call.weight, torch.bfloat16, ("N", "K"))
    c.tensor("out", call.out, (torch.bfloat16, torch.float32), ("T", "N"))


def _cost_bf16(call: Bf16GemmCall) -> Cost:
    return Cost(bytes=nbytes(call.a, call.weight, call.out), flops=2 * call.out.numel() * call.a.shape[1])


def _bf16_gemm_kernel() -> OpKernel[Bf16GemmCall]:
    from cute_kernels.linear.launch import BF16_GEMM

    return BF16_GEMM


_bf16_gemm = define_op(
    "bf16_gemm(Tensor a, Tensor weight, Tensor(a!) out, bool batch_invariant, bool use_pdl) -> ()",
    Bf16GemmCall,
    check=_check_bf16,
    reference=reference.bf16_gemm,
    kernel=_bf16_gemm_kernel,
    cost=_cost_bf16,
)


@planned
def bf16_linear(
    a: torch.Tensor,
    weight: torch.Tensor,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    out: torch.Tensor | None = None,
    batch_invariant: bool = False,
    use_pdl: bool = False,
) -> torch.Tensor:
    """Multiply bf16 rows by a bf16 weight, summed in fp32 and rounded once.

    a                 bf16 [T, K], rows of any stride
    weight            bf16 [N, K], rows of any stride. Constant: with use_pdl it may be read before an earlier kernel of
                      the stream has ended
    out               bf16 or fp32 [T, N], rows of any stride, or None: allocated, of out_dtype; mutated
    batch_invariant   as of `fp8_grouped_linear`
    use_pdl           start while the kernel before on the stream still runs, and wait for it before a is read

    Returns out. Made for few rows: from some hundred on a library's GEMM is faster. Kernels need rows of a and weight
    that are 16-byte aligned, and N to be a multiple of 16. Raises ValueError or TypeError on arguments that do not fit.
    """
    c = Checker("bf16_gemm")
    c.tensor("a", a, torch.bfloat16, (None, None))
    c.tensor("weight", weight, torch.bfloat16, (None, None))
    c.one_of("out_dtype", out_dtype, (torch.bfloat16, torch.float32))
    if out is None:
        out = torch.empty(a.shape[0], weight.shape[0], dtype=out_dtype, device=a.device)
    _bf16_gemm(Bf16GemmCall(a, weight, out, batch_invariant, use_pdl))
    return out


def _check_dual(call: DualGemmCall) -> None:
    c = Checker("fp8_bf16_gemm")
    c.tensor("a", call.a, torch.float8_e4m3fn, ("T", "K"))
    is_whole = call.a.shape[1] > 0 and call.a.shape[1] % BLOCK == 0
    c.require(is_whole, "a", f"K to be a positive multiple of {BLOCK}", list(call.a.shape))
    _check_product(c, call)
    c.tensor("x", call.x, torch.bfloat16, ("T", "X"))
    c.tensor("x_weight", call.x_weight, torch.bfloat16, ("M", "X"))
    c.tensor("x_out", call.x_out, torch.float32, ("T", "M"))
    for name, weight in (("weight", call.weight), ("x_weight", call.x_weight)):
        c.require(weight.numel() > 0, name, "no dimension to be 0", list(weight.shape))


def _cost_dual(call: DualGemmCall) -> Cost:
    moved = nbytes(call.a, call.a_scale, call.weight, call.weight_scale, call.out, call.x, call.x_weight, call.x_out)
    flops = 2 * call.out.numel() * call.a.shape[1] + 2 * call.x_out.numel() * call.x.shape[1]
    return Cost(bytes=moved, flops=flops)


def _dual_gemm_kernel() -> OpKernel[DualGemmCall]:
    from cute_kernels.linear.launch import DUAL_GEMM

    return DUAL_GEMM


_fp8_bf16_gemm = define_op(
    "fp8_bf16_gemm(Tensor a, Tensor a_scale, Tensor weight, Tensor weight_scale, Tensor(a!) out, Tensor x, "
    "Tensor x_weight, Tensor(b!) x_out, bool use_pdl) -> ()",
    DualGemmCall,
    check=_check_dual,
    reference=reference.fp8_bf16_gemm,
    kernel=_dual_gemm_kernel,
    cost=_cost_dual,
)


@planned
def fp8_bf16_linear(
    a: torch.Tensor,
    a_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    x: torch.Tensor,
    x_weight: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    x_out: torch.Tensor | None = None,
    use_pdl: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Multiply quantized rows by a quantized weight and, in the same launch, bf16 rows by a bf16 weight: what reads a
    layer's hidden states.

    a          e4m3 [T, K], rows of any stride; a_scale fp32 [T, K / 128], any strides
    weight     e4m3 [N, K], weight_scale fp32 [ceil(N / 128), K / 128]; constant, as of `fp8_grouped_linear`
    x          bf16 [T, X], rows of any stride
    x_weight   bf16 [M, X], rows of any stride; constant
    out        bf16 [T, N], rows of any stride, or None: allocated; mutated: that of `fp8_linear`
    x_out      fp32 [T, M], rows of any stride, or None: allocated; mutated: that of `bf16_linear`
    use_pdl    as of `fp8_grouped_linear`

    Returns (out, x_out). Made for up to 64 rows. There is a kernel on Hopper only, which cuts K into four splits, added
    up in order: a row's bits depend on nothing else. It needs rows of all but the scales that are 16-byte aligned, and
    N and M to be multiples of 16. No output may share memory with anything else. Raises ValueError or TypeError on
    arguments that do not fit.
    """
    c = Checker("fp8_bf16_gemm")
    c.tensor("a", a, torch.float8_e4m3fn, (None, None))
    c.tensor("weight", weight, torch.float8_e4m3fn, (None, None))
    c.tensor("x_weight", x_weight, torch.bfloat16, (None, None))
    if out is None:
        out = torch.empty(a.shape[0], weight.shape[0], dtype=torch.bfloat16, device=a.device)
    if x_out is None:
        x_out = torch.empty(a.shape[0], x_weight.shape[0], dtype=torch.float32, device=a.device)
    _fp8_bf16_gemm(DualGemmCall(a, a_scale, weight, weight_scale, out, x, x_weight, x_out, use_pdl))
    return out, x_out


EQUATION = "bhr,hdr->bhd"
BLOCK_RECIPE = (1, 128, 128)
PACKED_RECIPE = (1, 1, 128)


def _check_einsum(call: EinsumCall) -> None:
    c = Checker("deepseek_v4_fp8_einsum")
    c.one_of("equation", call.equation, (EQUATION,))
    c.one_of("recipe", tuple(call.recipe), (BLOCK_RECIPE, PACKED_RECIPE))
    c.tensor("a", call.a, torch.float8_e4m3fn, ("T", "G", "K"))
    packed = tuple(call.recipe) == PACKED_RECIPE
    columns = BLOCK * CHUNKS_PER_WORD if packed else BLOCK
    c.require(call.a.shape[2] % columns == 0, "a", f"K to be a multiple of {columns}", list(call.a.shape))
    scales = call.a.shape[2] // columns
    c.tensor("b", call.b, torch.float8_e4m3fn, ("G", "R", "K"))
    dtype = torch.int32 if packed else torch.float32
    scale_rows = "R" if packed else formats.round_up(call.b.shape[1], BLOCK) // BLOCK
    c.tensor("a_scale", call.a_scale, dtype, ("T", "G", scales), dense_last=False)
    c.tensor("b_scale", call.b_scale, dtype, ("G", scale_rows, scales), dense_last=False)
    c.tensor("out", call.out, torch.bfloat16, ("T", "G", "R"))


def _cost_einsum(call: EinsumCall) -> Cost:
    return Cost(
        bytes=nbytes(call.a, call.a_scale, call.b, call.b_scale, call.out), flops=2 * call.out.numel() * call.a.shape[2]
    )


def _einsum_kernel() -> OpKernel[EinsumCall]:
    from cute_kernels.linear.launch import EINSUM

    return EINSUM


_einsum = define_op(
    "deepseek_v4_fp8_einsum(Tensor a, Tensor a_scale, Tensor b, Tensor b_scale, Tensor(a!) out, str equation, "
    "int[] recipe) -> ()",
    EinsumCall,
    check=_check_einsum,
    reference=reference.deepseek_v4_fp8_einsum,
    kernel=_einsum_kernel,
    cost=_cost_einsum,
)


@planned
def deepseek_v4_fp8_einsum(
    a: torch.Tensor,
    a_scale: torch.Tensor,
    b: torch.Tensor,
    b_scale: torch.Tensor,
    out: torch.Tensor,
    equation: str,
    recipe: Sequence[int],
) -> None:
    """Multiply each group of quantized rows by the group's quantized weight.

    out[t, g, d] = sum over 128-column chunks c of a_scale[t, g, c] * b_scale[g, d, c] * dot(a[t, g, c], b[g, d, c])

    a          e4m3 [T, G, K], what `fused_inv_rope_fp8_quant` returns; any strides with a dense last dimension
    a_scale    its scales, any strides
    b          e4m3 [G, R, K], any strides with a dense last dimension
    b_scale    scales of the weight, any strides
    out        bf16 [T, G, R], any strides with a dense last dimension; mutated
    equation   "bhr,hdr->bhd": nothing else exists
    recipe     (1, 128, 128): a_scale fp32 [T, G, K / 128], b_scale fp32 [G, ceil(R / 128), K / 128], one for
               each 128 x 128 block;
               (1, 1, 128): a_scale int32 [T, G, K / 512], b_scale int32 [G, R, K / 512] (see `pack_block_scales`), four
               exponent bytes a word, the first chunk in the low byte

    The reference sums in float64, chunk by chunk, and rounds to fp32 and then to bf16. The kernels sum a chunk on
    tensor cores, and the chunks in fp32: that for Hopper, which takes the first recipe, keeps about 14 bits of a
    chunk's sum, the portable one, for calls and GPUs that have no other, those of fp32. Blackwell's own has tensor
    cores multiply packed scales along. With any, the bits of a row do not depend on the other rows. Kernels need rows
    of a, b and out that are 16-byte aligned, and R to be a multiple of 8. Raises ValueError or TypeError on arguments
    that do not fit.
    """
    _einsum(EinsumCall(a, a_scale, b, b_scale, out, equation, recipe))
