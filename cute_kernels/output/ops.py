"""Output projection: turn the rotation of the attention output back, quantize it, multiply each group by its weight."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cute_kernels import formats
from cute_kernels.output import reference
from cute_kernels.output.scales import BLOCK, CHUNKS_PER_WORD, ROW_ALIGNMENT, pack_block_scales
from cute_kernels.runtime.checks import Checker
from cute_kernels.runtime.ops import Cost, define_op, nbytes

__all__ = ["deepseek_v4_fp8_einsum", "fused_inv_rope_fp8_quant", "output_scale_shape", "pack_block_scales"]

EQUATION = "bhr,hdr->bhd"
BLOCK_RECIPE = (1, 128, 128)
PACKED_RECIPE = (1, 1, 128)


def output_scale_shape(
    num_tokens: int, n_groups: int, heads_per_group: int, tma_aligned_scales: bool = False
) -> tuple[int, int, int]:
    """Shape [G, S, T rounded up to 4] of the memory that `fused_inv_rope_fp8_quant` writes its scales to.

    S is heads_per_group * 4 fp32 scales or, with tma_aligned_scales, heads_per_group int32 words of four.
    """
    per_head = 1 if tma_aligned_scales else formats.HEAD_DIM // BLOCK
    return n_groups, heads_per_group * per_head, formats.round_up(num_tokens, ROW_ALIGNMENT)


def _check_groups(c: Checker, n_groups: int, heads_per_group: int) -> None:
    c.ints(n_groups=n_groups, heads_per_group=heads_per_group)
    c.require(n_groups > 0, "n_groups", "a positive number", n_groups)
    c.require(heads_per_group > 0, "heads_per_group", "a positive number", heads_per_group)


def _check_rotation(
    c: Checker,
    o: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    out: torch.Tensor,
    n_groups: int,
    heads_per_group: int,
    out_dtype: torch.dtype,
) -> None:
    _check_groups(c, n_groups, heads_per_group)
    c.tensor("o", o, torch.bfloat16, ("T", n_groups * heads_per_group, formats.HEAD_DIM))
    c.tensor("positions", positions, torch.int64, ("T",), dense_last=False)
    c.tensor("cos_sin_cache", cos_sin_cache, torch.float32, (None, formats.ROPE_DIM))
    c.require(cos_sin_cache.shape[0] > 0, "cos_sin_cache", "at least one row", list(cos_sin_cache.shape))
    c.tensor("out", out, out_dtype, ("T", n_groups, heads_per_group * formats.HEAD_DIM))


def _check_quant(
    o: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    out: torch.Tensor,
    scale_out: torch.Tensor,
    n_groups: int,
    heads_per_group: int,
    tma_aligned_scales: bool,
    use_pdl: bool,
) -> None:
    c = Checker("fused_inv_rope_fp8_quant")
    _check_rotation(c, o, positions, cos_sin_cache, out, n_groups, heads_per_group, torch.float8_e4m3fn)
    shape = output_scale_shape(o.shape[0], n_groups, heads_per_group, tma_aligned_scales)
    c.tensor("scale_out", scale_out, torch.int32 if tma_aligned_scales else torch.float32, shape)


def _cost_quant(
    o: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    out: torch.Tensor,
    scale_out: torch.Tensor,
    *_: object,
) -> Cost:
    return Cost(bytes=nbytes(o, positions, out, scale_out) + positions.numel() * formats.ROPE_DIM * 4)


_quant = define_op(
    "fused_inv_rope_fp8_quant(Tensor o, Tensor positions, Tensor cos_sin_cache, Tensor(a!) out, Tensor(b!) scale_out, "
    "SymInt n_groups, SymInt heads_per_group, bool tma_aligned_scales, bool use_pdl) -> ()",
    check=_check_quant,
    reference=reference.fused_inv_rope_fp8_quant,
    kernel="cute_kernels.output.inv_rope_quant",
    cost=_cost_quant,
)


def _check_inv_rope(
    o: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    out: torch.Tensor,
    n_groups: int,
    heads_per_group: int,
    use_pdl: bool,
) -> None:
    c = Checker("fused_inv_rope")
    _check_rotation(c, o, positions, cos_sin_cache, out, n_groups, heads_per_group, torch.bfloat16)


def _cost_inv_rope(
    o: torch.Tensor, positions: torch.Tensor, cos_sin_cache: torch.Tensor, out: torch.Tensor, *_: object
) -> Cost:
    return Cost(bytes=nbytes(o, positions, out) + positions.numel() * formats.ROPE_DIM * 4)


_inv_rope = define_op(
    "fused_inv_rope(Tensor o, Tensor positions, Tensor cos_sin_cache, Tensor(a!) out, SymInt n_groups, "
    "SymInt heads_per_group, bool use_pdl) -> ()",
    check=_check_inv_rope,
    reference=reference.fused_inv_rope,
    kernel="cute_kernels.output.inv_rope",
    cost=_cost_inv_rope,
)


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
        _inv_rope(o, positions, cos_sin_cache, out, n_groups, heads_per_group, use_pdl)
        return out, torch.empty(0, dtype=torch.float32, device=o.device)
    if scale_out is None:
        shape = output_scale_shape(o.shape[0], n_groups, heads_per_group, tma_aligned_scales)
        scale_out = torch.empty(shape, dtype=torch.int32 if tma_aligned_scales else torch.float32, device=o.device)
    _quant(o, positions, cos_sin_cache, out, scale_out, n_groups, heads_per_group, tma_aligned_scales, use_pdl)
    return out, scale_out.permute(2, 0, 1)[: o.shape[0]]


def _check_einsum(
    a: torch.Tensor,
    a_scale: torch.Tensor,
    b: torch.Tensor,
    b_scale: torch.Tensor,
    out: torch.Tensor,
    equation: str,
    recipe: Sequence[int],
) -> None:
    c = Checker("deepseek_v4_fp8_einsum")
    c.one_of("equation", equation, (EQUATION,))
    c.one_of("recipe", tuple(recipe), (BLOCK_RECIPE, PACKED_RECIPE))
    c.tensor("a", a, torch.float8_e4m3fn, ("T", "G", "K"))
    packed = tuple(recipe) == PACKED_RECIPE
    columns = BLOCK * CHUNKS_PER_WORD if packed else BLOCK
    c.require(a.shape[2] % columns == 0, "a", f"K to be a multiple of {columns}", list(a.shape))
    scales = a.shape[2] // columns
    c.tensor("b", b, torch.float8_e4m3fn, ("G", "R", "K"))
    dtype = torch.int32 if packed else torch.float32
    scale_rows = "R" if packed else formats.round_up(b.shape[1], BLOCK) // BLOCK
    c.tensor("a_scale", a_scale, dtype, ("T", "G", scales), dense_last=False)
    c.tensor("b_scale", b_scale, dtype, ("G", scale_rows, scales), dense_last=False)
    c.tensor("out", out, torch.bfloat16, ("T", "G", "R"))


def _cost_einsum(
    a: torch.Tensor, a_scale: torch.Tensor, b: torch.Tensor, b_scale: torch.Tensor, out: torch.Tensor, *_: object
) -> Cost:
    return Cost(bytes=nbytes(a, a_scale, b, b_scale, out), flops=2 * out.numel() * a.shape[2])


_einsum = define_op(
    "deepseek_v4_fp8_einsum(Tensor a, Tensor a_scale, Tensor b, Tensor b_scale, Tensor(a!) out, str equation, "
    "int[] recipe) -> ()",
    check=_check_einsum,
    reference=reference.deepseek_v4_fp8_einsum,
    kernel="cute_kernels.output.einsum",
    cost=_cost_einsum,
)


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
    _einsum(a, a_scale, b, b_scale, out, equation, recipe)
