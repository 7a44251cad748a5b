# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of the layers' GEMMs, launched like the layers do: as dependents of the kernel before, but where that lets
nothing start early."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

from cute_kernels.formats import HEAD_DIM, INDEX_DIM
from cute_kernels.linear.ops import bf16_linear, fp8_linear
from cute_kernels.linear.verify_cases import FP32, PRODUCTS, ROUNDING
from cute_kernels.models import MODELS, V41Shape
from cute_kernels.runtime.ops import OPS
from perf.bench import Arguments, Bench, Case, Run, not_dependent
from perf.grid import draw_rows, mark
from perf.peers import Product, compile_products, deepgemm

TOKENS = (1, 8, 64, 256, 1024, 4096)
BF16_TOKENS = (1, 8, 64, 128, 256, 512)
FEW = 64
"""Up to so many rows, and beyond, cells are summed up together."""
SQUARES_TOKENS = (128, 512, 2048, 4096)
DUAL_TOKENS = (40, 64)
BLOCK = 128

NAMES = ("wqa_wkv", "wq_b", "indexer.wq_b", "wq_b+indexer.wq_b", "wo_a", "wo_b")


def _weights(model: str) -> list[tuple[str, int, int, int]]:
    """(name, groups, N, K) of the FP8 linears of a whole model, and of those of one rank of eight that are others."""
    from cute_kernels.linear.select import layer_gemms

    found: dict[tuple[int, int, int], str] = {}
    for tp in (1, 8):
        gemms = [each[2:] for each in layer_gemms(MODELS[model], tp) if each[:2] == ("e4m3", "bf16")]
        for name, shape in zip(NAMES, gemms, strict=True):
            found.setdefault(shape, name if tp == 1 else f"{name} tp{tp}")
    return [(name, *shape) for shape, name in found.items()]


def make_fp8(tokens: int, groups: int, outputs: int, columns: int, seed: int) -> Arguments:
    g = torch.Generator(device="cuda").manual_seed(seed)

    def codes(*shape: int) -> torch.Tensor:
        return (
            torch.empty(shape, device="cuda", dtype=torch.bfloat16)
            .normal_(generator=g)
            .mul_(100)
            .clamp_(-448, 448)
            .to(torch.float8_e4m3fn)
        )

    def powers(*shape: int) -> torch.Tensor:
        return torch.exp2(torch.randint(-12, -6, shape, device="cuda", generator=g).float())

    a_scale = powers(groups, columns // 128, -(-tokens // 4) * 4).permute(2, 0, 1)[:tokens]
    b_scale = powers(groups, -(-outputs // 128), columns // 128)
    out = torch.empty(tokens, groups, outputs, device="cuda", dtype=torch.bfloat16)
    a = codes(groups, tokens, columns).transpose(0, 1)
    return a, a_scale, codes(groups, outputs, columns), b_scale, out, None, False, True


def make_bf16(tokens: int, outputs: int, columns: int, seed: int) -> Arguments:
    g = torch.Generator(device="cuda").manual_seed(seed)
    a, b = (torch.randn(n, columns, device="cuda", generator=g).bfloat16() for n in (tokens, outputs))
    return a, b, torch.empty(tokens, outputs, device="cuda"), False, True


def deepgemm_product(use_pdl: bool) -> Run:
    """DeepGEMM's kernels as vLLM takes them: one product, or one for all groups. It chooses its configuration itself.

    use_pdl   as dependents of the kernel before
    """
    ops = deepgemm()

    def run(a: Any, a_scale: Any, b: Any, b_scale: Any, out: Any, *_: Any) -> list[torch.Tensor]:
        before = ops.get_pdl()
        ops.set_pdl(use_pdl)
        try:
            if a.shape[1] == 1:
                ops.fp8_fp4_gemm_nt(a[:, 0], a_scale[:, 0], b[0], b_scale[0], out[:, 0])
            else:
                ops.fp8_einsum("bhr,hdr->bhd", a, a_scale, b, b_scale, out, None, [1, 128, 128])
        finally:
            ops.set_pdl(before)
        return [out]

    return run


def _cublas() -> Run:
    """torch's product with block scales, group by group. It takes numbers of rows that are multiples of 4."""

    def run(a: Any, a_scale: Any, b: Any, b_scale: Any, out: Any, *_: Any) -> list[torch.Tensor]:
        blocks = F.ScalingType.BlockWise1x128, F.ScalingType.BlockWise128x128
        for g in range(a.shape[1]):
            operands = a[:, g], b[g].t(), a_scale[:, g], blocks[0], b_scale[g].t(), blocks[1]
            product = F.scaled_mm(*operands, output_dtype=torch.bfloat16)
            if a.shape[1] == 1:
                return [product.unsqueeze(1)]
            out[:, g] = product
        return [out]

    return run


def _mm() -> Run:
    return lambda a, b, out, *_: [torch.mm(a, b.t(), out_dtype=torch.float32)]


def _near(share: float, rounding: float, got: Sequence[torch.Tensor], want: Sequence[torch.Tensor]) -> bool:
    """Within what rounding explains of results whose terms are of random signs: their root mean square stands for the
    sum of magnitudes."""
    x, y = got[0].double(), want[0].double()
    spread = y.square().mean().sqrt()
    return bool(((x - y).abs() <= 2 * rounding * y.abs() + 64 * share * spread).all())


def _fp8_variants() -> Mapping[str, Run]:
    overload = OPS["fp8_gemm"].overload
    return {
        "ours without use_pdl": lambda *args: overload(*not_dependent(args)),
        "ours batch-invariant": lambda *args: overload(*args[:-2], True, args[-1]),
    }


def _bf16_variants() -> Mapping[str, Run]:
    overload = OPS["bf16_gemm"].overload
    return {
        "ours without use_pdl": lambda *args: overload(*not_dependent(args)),
        "ours batch-invariant": lambda *args: overload(*args[:-2], True, args[-1]),
    }


def _group(tokens: int) -> str:
    return f"T {'at most' if tokens <= FEW else 'more than'} {FEW}"


def _deepgemms_kernels(cases: Sequence[Case]) -> None:
    """Have DeepGEMM compile what the cases take."""
    shapes = [(case.rows, case.shape.get("groups", 1), case.shape["N"], case.shape["K"]) for case in cases]
    compile_products(Product(rows, groups, n, k, groups > 1) for rows, groups, n, k in shapes)


def _fp8_cases(several: Sequence[int]) -> tuple[Case, ...]:
    return tuple(
        Case(
            f"{model} {name} T={tokens}",
            tokens,
            partial(make_fp8, tokens, groups, outputs, columns),
            {"model": model, "linear": name, "groups": groups, "N": outputs, "K": columns, "group": _group(tokens)},
            "e4m3",
        )
        for model, described in MODELS.items()
        if not isinstance(described, V41Shape)  # whose weights are bf16 on Hopper
        for name, groups, outputs, columns in _weights(model)
        for tokens in several
    )


FP8 = Bench(
    "fp8_gemm",
    _fp8_cases(TOKENS),
    quick=(1, 64),
    between=mark(_fp8_cases(draw_rows("fp8_gemm", TOKENS))),
    ahead=_deepgemms_kernels,
    peers={
        "deepgemm": partial(deepgemm_product, False),
        "deepgemm-pdl": partial(deepgemm_product, True),
        "cublas": _cublas,
    },
    variants=_fp8_variants,
    apart=not_dependent,
    same=partial(_near, PRODUCTS, ROUNDING),
)


def make_squares(tokens: int, heads: int, outputs: int, columns: int, seed: int) -> Arguments:
    a, a_scale, weight, weight_scale, out, *_ = make_fp8(tokens, 1, outputs, columns, seed)
    squares = torch.empty(tokens, heads * HEAD_DIM // BLOCK, device="cuda")
    return a[:, 0], a_scale[:, 0], weight[0], weight_scale[0], out[:, 0], squares, True


def _product_alone(load: Callable[[], Run]) -> Run:
    """A peer's product, which makes no sums of squares: what it lacks of the op's work it is given."""
    product = load()

    def run(a: Any, a_scale: Any, weight: Any, weight_scale: Any, out: Any, *_: Any) -> list[torch.Tensor]:
        rows = a.unsqueeze(1), a_scale.unsqueeze(1)
        return [product(*rows, weight.unsqueeze(0), weight_scale.unsqueeze(0), out.unsqueeze(1))[0].squeeze(1)]

    return run


def _near_squares(got: Sequence[torch.Tensor], want: Sequence[torch.Tensor]) -> bool:
    """As `_near`, and the sums as exact as fp32 is, of the results at hand."""
    blocks = got[1].shape[1]
    exact = got[0][:, : blocks * BLOCK].double().unflatten(1, (blocks, BLOCK)).square().sum(-1)
    return _near(PRODUCTS, ROUNDING, got, want) and bool(((got[1].double() - exact).abs() <= 2.0**-20 * exact).all())


def _squares_variants() -> Mapping[str, Run]:
    overload = OPS["fp8_gemm_squares"].overload
    return {"ours without use_pdl": lambda *args: overload(*not_dependent(args))}


def _squares_cases(several: Sequence[int]) -> tuple[Case, ...]:
    return tuple(
        Case(
            f"{model} {heads} heads{' + indexer' * (others > 0)} T={tokens}",
            tokens,
            partial(make_squares, tokens, heads, heads * HEAD_DIM + others, MODELS[model].q_lora_rank),
            {"model": model, "heads": heads, "N": heads * HEAD_DIM + others, "K": MODELS[model].q_lora_rank},
            "e4m3",
        )
        for model in MODELS
        for heads in (MODELS[model].num_attention_heads,)
        for others in (0, MODELS[model].index_n_heads * INDEX_DIM)
        for tokens in several
    )


SQUARES = Bench(
    "fp8_gemm_squares",
    _squares_cases(SQUARES_TOKENS),
    quick=(512,),
    between=mark(_squares_cases(draw_rows("fp8_gemm_squares", SQUARES_TOKENS, 2))),
    ahead=_deepgemms_kernels,
    peers={
        "deepgemm": partial(_product_alone, partial(deepgemm_product, False)),
        "deepgemm-pdl": partial(_product_alone, partial(deepgemm_product, True)),
        "cublas": partial(_product_alone, _cublas),
    },
    variants=_squares_variants,
    apart=not_dependent,
    same=_near_squares,
    peer_same=partial(_near, PRODUCTS, ROUNDING),
)


def _bf16_cases(several: Sequence[int]) -> tuple[Case, ...]:
    return tuple(
        Case(
            f"{model} {name} T={tokens}",
            tokens,
            partial(make_bf16, tokens, outputs, MODELS[model].hidden_size),
            {"model": model, "linear": name, "N": outputs, "K": MODELS[model].hidden_size, "group": _group(tokens)},
            "bf16",
        )
        for model in MODELS
        for name, outputs in (("compressors+weights (C4A)", 2624), ("compressor (C128A)", 1024))
        for tokens in several
    )


BF16 = Bench(
    "bf16_gemm",
    _bf16_cases(BF16_TOKENS),
    quick=(1, 64),
    between=mark(_bf16_cases(draw_rows("bf16_gemm", BF16_TOKENS))),
    peers={"cublas": _mm},
    variants=_bf16_variants,
    apart=not_dependent,
    same=partial(_near, FP32, 0.0),
)


def make_dual(tokens: int, outputs: int, x_outputs: int, columns: int, seed: int) -> Arguments:
    a, a_scale, weight, weight_scale, out, *_ = make_fp8(tokens, 1, outputs, columns, seed)
    x, x_weight, x_out, *_ = make_bf16(tokens, x_outputs, columns, seed)
    return a[:, 0], a_scale[:, 0], weight[0], weight_scale[0], out[:, 0], x, x_weight, x_out, True


def _near_both(got: Sequence[torch.Tensor], want: Sequence[torch.Tensor]) -> bool:
    """The e4m3 product as that of `fp8_gemm`, the other one as that of `bf16_gemm`."""
    return _near(PRODUCTS, ROUNDING, got[:1], want[:1]) and _near(FP32, 0.0, got[1:], want[1:])


def _two_launches(
    a: Any, a_scale: Any, weight: Any, weight_scale: Any, out: Any, x: Any, x_weight: Any, x_out: Any, use_pdl: bool
) -> None:
    fp8_linear(a, a_scale, weight, weight_scale, out=out, use_pdl=use_pdl)
    bf16_linear(x, x_weight, out=x_out, use_pdl=use_pdl)


def _dual_variants() -> Mapping[str, Run]:
    overload = OPS["fp8_bf16_gemm"].overload
    return {
        "ours without use_pdl": lambda *args: overload(*not_dependent(args)),
        "ours in two launches": _two_launches,
    }


def _dual_cases(several: Sequence[int]) -> tuple[Case, ...]:
    return tuple(
        Case(
            f"{model} wqa_wkv and {name} T={tokens}",
            tokens,
            partial(make_dual, tokens, MODELS[model].q_lora_rank + HEAD_DIM, outputs, MODELS[model].hidden_size),
            {"model": model, "linear": name, "M": outputs, "K": MODELS[model].hidden_size, "group": _group(tokens)},
            "e4m3",
        )
        for model, described in MODELS.items()
        if not isinstance(described, V41Shape)  # whose weights are bf16 on Hopper
        for name, outputs in (("compressors+weights (C4A)", 2624), ("compressor (C128A)", 1024))
        for tokens in several
    )


DUAL = Bench(
    "fp8_bf16_gemm",
    _dual_cases(DUAL_TOKENS),
    quick=(64,),
    between=mark(_dual_cases(draw_rows("fp8_bf16_gemm", DUAL_TOKENS))),
    peers={},
    variants=_dual_variants,
    apart=not_dependent,
    same=_near_both,
)

BENCHES = (FP8, SQUARES, BF16, DUAL)
SWEEPS = {bench.op: bench.sweep for bench in BENCHES}
QUICK = {bench.op: bench.quick for bench in BENCHES}
"""Numbers of rows of a quick look."""
