# SPDX-License-Identifier: Apache-2.0
"""Calls that the kernels of this package are verified with: edge cases of values, widths and strides."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from cute_kernels.formats import round_up
from cute_kernels.linear.ops import activation_scale_shape
from cute_kernels.linear.scales import BLOCK, CHUNKS_PER_WORD, ROW_ALIGNMENT, unpack_scales
from cute_kernels.runtime.verify import Example, clone_arguments, raw_memory, same_bytes

_GAP = 8
"""Columns between rows."""


def quantize() -> Iterator[Example]:
    """quantize_fp8_1x128(x, out, scale_out, use_pdl)"""
    for tokens, columns in ((0, 512), (1, 4096), (3, 7168), (9, 8), (66, 1536), (13, 1000), (4, 136)):
        g = torch.Generator().manual_seed(tokens)
        magnitudes = torch.exp2(torch.randint(-40, 40, (tokens, columns), generator=g).float())
        values = torch.randn(tokens, columns, generator=g) * magnitudes
        values[torch.rand(tokens, columns, generator=g) < 0.3] = 0.0
        values[:, ::37] = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0, 448.0]).repeat(columns)[
            : columns // 37 + 1
        ]
        values[2::5] = 0.0
        x = torch.full((tokens, columns + _GAP), torch.nan, dtype=torch.bfloat16)[:, :-_GAP]
        x.copy_(values)
        out = torch.full((tokens, columns + _GAP), 0xA5, dtype=torch.uint8)[:, :-_GAP].view(torch.float8_e4m3fn)
        scales = torch.full(activation_scale_shape(tokens, columns), -777.0)
        yield Example(f"{tokens} rows of {columns}", (x, out, scales, tokens % 2 == 1))


_GEMMS = (
    (1, 1, 256, 512),
    (5, 2, 128, 384),
    (33, 1, 400, 1024),
    (70, 3, 256, 128),
    (61, 1, 1536, 4096),
    (130, 1, 1536, 4096),
)
"""(tokens, groups, N, K). On Hopper K of the last two is cut for many rows, into four and two splits."""

_FEW_ROWS = tuple((tokens, 1, 128, columns) for tokens in (8, 16, 24, 33) for columns in (128, 1024, 2048, 4096))
"""The same, for each kernel of few rows and each number of splits; of 33 tokens batch-invariant."""

_MANY_ROWS = (
    (33, 1, 64, 128),
    (33, 1, 64, 2560),
    (33, 1, 64, 4096),
    (33, 1, 6144, 128),
    (33, 1, 6144, 4096),
    (33, 1, 12288, 128),
    (33, 2, 64, 128),
    (33, 2, 64, 2048),
    (33, 2, 64, 4096),
    (33, 2, 2304, 128),
    (65, 1, 64, 128),
    (65, 1, 64, 2048),
    (129, 1, 1536, 2048),
    (129, 1, 2304, 2048),
    (129, 1, 3072, 128),
    (129, 1, 6144, 128),
    (129, 1, 8192, 128),
    (129, 4, 512, 4096),
    (257, 1, 64, 4096),
    (257, 1, 4352, 1664),
    (385, 1, 2304, 128),
    (513, 1, 512, 128),
    (513, 2, 512, 3584),
    (1024, 1, 1152, 128),
    (1024, 3, 192, 128),
    (1024, 3, 384, 128),
)
"""The cheapest calls for each of Hopper's kernels of many rows; one goes round the mainloop of eight chunks."""

_MANY_SQUARES = (
    (1, 1, 128, 128),
    (1, 1, 128, 256),
    (257, 1, 4096, 128),
    (1536, 1, 1536, 128),
    (1160, 1, 5120, 4096),
)

_BF16 = (
    (33, 1, 64, 128),
    (33, 1, 64, 1024),
    (65, 1, 64, 1024),
    (129, 1, 8192, 128),
    (160, 1, 1536, 2048),
    (1536, 1, 384, 128),
    (1536, 1, 384, 1024),
    (33, 1, 10240, 256),
    (513, 1, 10240, 64),
    *((tokens, 1, outputs, k) for tokens in (8, 16, 24, 33) for outputs, k in ((64, 2048), (2624, 4096))),
)

ROUNDING, PRODUCTS, FP32 = 2.0**-8, 2.0**-11, 2.0**-18
"""Shares of the exact result, and of the sum of the products' magnitudes, that a result may differ by: bf16 rounding,
the 14 bits that Hopper's tensor cores keep of a sum of e4m3 products, and what fp32 sums lose."""


def fp8_gemm() -> Iterator[Example]:
    """fp8_gemm(a, a_scale, b, b_scale, out, out_scale, batch_invariant, use_pdl)"""
    yield from _fp8_gemm(_GEMMS)
    for example in _fp8_gemm(_FEW_ROWS + _MANY_ROWS, of_kernels=True):
        *operands, out, _, batch_invariant, use_pdl = example.args
        for dtype in ("bf16", "fp32", "e4m3"):
            name = f"{example.name}, {dtype}"
            if dtype == "bf16":
                yield Example(name, example.args, _near)
            elif dtype == "fp32":
                result = torch.full(out.shape, torch.nan)
                yield Example(name, (*operands, result, None, batch_invariant, use_pdl), _near)
            elif out.shape[2] % BLOCK == 0:
                yield _of_codes(example)


def _of_codes(example: Example) -> Example:
    """The same call with a result of codes and scales."""
    *operands, out, _, batch_invariant, use_pdl = example.args
    codes = torch.full(out.shape, 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn)
    scale = torch.full(activation_scale_shape(out.shape[0], out.shape[1] * out.shape[2]), torch.nan)
    return Example(f"{example.name}, e4m3", (*operands, codes, scale, batch_invariant, use_pdl), _near_codes)


def _fp8_gemm(gemms: Sequence[tuple[int, int, int, int]], of_kernels: bool = False) -> Iterator[Example]:
    """of_kernels: batch-invariant or not as _FEW_ROWS and _MANY_ROWS have it; if not, both"""
    for tokens, groups, outputs, columns in gemms:
        g = torch.Generator().manual_seed(tokens + outputs)

        def codes(*shape: int, g: torch.Generator = g) -> torch.Tensor:
            return (torch.randn(shape, generator=g) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)

        def scales(*shape: int, g: torch.Generator = g) -> torch.Tensor:
            return torch.exp2(torch.randint(-12, 2, shape, generator=g).float())

        a, b = codes(groups, tokens, columns).transpose(0, 1), codes(groups, outputs, columns)
        a_scale = scales(groups, columns // 128, -(-tokens // 4) * 4).permute(2, 0, 1)[:tokens]
        b_scale = 1.3 * scales(groups, -(-outputs // 128), columns // 128)
        out = torch.full((tokens, groups, outputs + 16), torch.nan, dtype=torch.bfloat16)[..., :-16]
        name = f"{tokens} tokens of {groups} groups, {columns} -> {outputs}"
        shape = tokens, groups, outputs, columns
        for batch_invariant in (shape in _FEW_ROWS,) if of_kernels else (False, True):
            arguments = (a, a_scale, b, b_scale, out, None, batch_invariant, batch_invariant)
            yield Example(f"{name}{', batch-invariant' * batch_invariant}", arguments, _near)


def fp8_gemm_squares() -> Iterator[Example]:
    """fp8_gemm_squares(a, a_scale, weight, weight_scale, out, squares, use_pdl)"""
    for example in _fp8_gemm(_GEMMS + _MANY_SQUARES):
        a, a_scale, weight, weight_scale, out, _, batch_invariant, _ = example.args
        if a.shape[1] > 1 or batch_invariant:
            continue
        blocks = weight.shape[1] // 128 - (a.shape[0] > 5)
        squares = torch.full((a.shape[0], blocks + 3), torch.nan)[:, :-3]
        arguments = a[:, 0], a_scale[:, 0], weight[0], weight_scale[0], out[:, 0], squares, a.shape[0] % 2 == 1
        yield Example(f"{example.name}, squares of {blocks} blocks", arguments, _near_squares)


def bf16_gemm() -> Iterator[Example]:
    """bf16_gemm(a, b, out, batch_invariant, use_pdl)"""
    for shape in _GEMMS + _BF16:
        tokens, _, outputs, _ = shape
        is_few = shape in _BF16 and outputs in (64, 2624) and tokens <= 33
        yield from _bf16_gemm((shape,), 2 if is_few else 3)


def _bf16_gemm(gemms: Sequence[tuple[int, int, int, int]], forms: int) -> Iterator[Example]:
    """forms: how many of the results' types, batch-invariant or not"""
    every = (torch.float32, False), (torch.float32, True), (torch.bfloat16, False)
    for tokens, _, outputs, columns in gemms:
        g = torch.Generator().manual_seed(tokens + outputs)
        a, b = (torch.randn(rows, columns + 8, generator=g).bfloat16()[:, 8:] for rows in (tokens, outputs))
        for dtype, batch_invariant in every[:forms]:
            out = torch.full((tokens, outputs + 16), torch.nan, dtype=dtype)[..., :-16]
            name = f"{tokens} tokens, {columns} -> {outputs}, {dtype}{', batch-invariant' * batch_invariant}"
            yield Example(name, (a, b, out, batch_invariant, tokens == 1), _near)


_DUAL = (
    (5, 400, 1024, 16, 8),
    (33, 64, 128, 80, 1000),
    (64, 1536, 4096, 1024, 4096),
    (61, 2048, 1536, 2624, 1536),
    (70, 16, 512, 48, 64),
)
"""(tokens, N, K, M, X) of two products. Of the second some splits have no chunks."""


def fp8_bf16_gemm() -> Iterator[Example]:
    """fp8_bf16_gemm(a, a_scale, weight, weight_scale, out, x, x_weight, x_out, use_pdl)"""
    for tokens, outputs, columns, x_outputs, x_columns in _DUAL:
        first, _ = _fp8_gemm(((tokens, 1, outputs, columns),))
        second, *_ = _bf16_gemm(((tokens, 1, x_outputs, x_columns),), 1)
        a, a_scale, weight, weight_scale, out, *_ = first.args
        x, x_weight, x_out, *_ = second.args
        operands = a[:, 0], a_scale[:, 0], weight[0], weight_scale[0], out[:, 0]
        yield Example(f"{first.name}; {second.name}", (*operands, x, x_weight, x_out, tokens % 2 == 1), _near_both)


def _near_both(got: Sequence[Any], want: Sequence[Any]) -> str:
    """As `_near`, of both products."""
    operands = [x.unsqueeze(1 if i < 2 else 0) for i, x in enumerate(want[:4])]
    first = _near((*operands, got[4].unsqueeze(1)), operands)
    return first or _near((*got[5:7], got[7]), want[5:7])


def _near_squares(got: Sequence[Any], want: Sequence[Any]) -> str:
    """As `_near`, and the sums as near to those of the results at hand as fp32 is."""
    operands = [x.unsqueeze(1 if i < 2 else 0) for i, x in enumerate(want[:4])]
    difference = _near((*operands, got[4].unsqueeze(1)), operands)
    blocks = got[5].shape[1]
    exact = got[4][:, : blocks * 128].double().unflatten(1, (blocks, 128)).square().sum(-1)
    excess = (got[5].double() - exact).abs() - FP32 * exact
    return difference or ("" if bool((excess <= 0).all()) else f"squares: off by {excess.max().item():.3g} too much")


def _near(got: Sequence[Any], want: Sequence[Any]) -> str:
    """ "", or how far the output is off."""
    if want[0].dtype == torch.bfloat16:
        a, b, out, lost = want[0].double(), want[1].double(), got[2], FP32
        exact, magnitude = a @ b.t(), a.abs() @ b.abs().t()
    else:
        a = want[0].double() * want[1].double().repeat_interleave(128, -1)
        b_scale = want[3].double().repeat_interleave(128, -1).repeat_interleave(128, 1)[:, : want[2].shape[1]]
        b, out, lost = want[2].double() * b_scale, got[4], PRODUCTS
        exact, magnitude = (torch.einsum("tgk,gnk->tgn", x, y) for x, y in ((a, b), (a.abs(), b.abs())))
    rounding = ROUNDING if out.dtype == torch.bfloat16 else 0.0
    excess = (out.double() - exact).abs() - rounding * exact.abs() - lost * magnitude
    return "" if bool((excess <= 0).all()) else f"out: off by {excess.max().item():.3g} more than rounding explains"


def _near_codes(got: Sequence[Any], want: Sequence[Any]) -> str:
    """As `_near`, of e4m3 results: a code may be off by half a step of what the scale makes of it."""
    a = want[0].double() * want[1].double().repeat_interleave(128, -1)
    b_scale = want[3].double().repeat_interleave(128, -1).repeat_interleave(128, 1)[:, : want[2].shape[1]]
    b = want[2].double() * b_scale
    exact, magnitude = (torch.einsum("tgk,gnk->tgn", x, y) for x, y in ((a, b), (a.abs(), b.abs())))
    scale = got[5].t()[: len(exact)].double().repeat_interleave(BLOCK, -1).view_as(exact)
    excess = (got[4].double() * scale - exact).abs() - exact.abs() / 14 - scale / 512 - 2 * PRODUCTS * magnitude
    return "" if bool((excess <= 0).all()) else f"out: off by {excess.max().item():.3g} more than rounding explains"


_POISON = 0xA5
_EQUATION, _RECIPE, _PACKED = "bhr,hdr->bhd", [1, BLOCK, BLOCK], [1, 1, BLOCK]

_EINSUMS = (
    (1, 1, 1024, 4096),
    (3, 2, 136, 128),
    (70, 2, 1024, 1536),
    (129, 3, 264, 640),
    (300, 1, 1024, 4096),
    (1, 8, 1536, 512),
    (1, 4, 8192, 512),
    (4096, 2, 64, 512),
    (4096, 4, 64, 512),
)
"""(tokens, groups, R, K); with scales in words too, where K is a multiple of 512. The last ones take larger tiles."""


def einsum() -> Iterator[Example]:
    """deepseek_v4_fp8_einsum(a, a_scale, b, b_scale, out, equation, recipe)"""
    for tokens, groups, rank, width in _EINSUMS:
        g = torch.Generator().manual_seed(tokens + rank)
        a, b = (_codes((groups, rows, width), g) for rows in (tokens, rank))
        a_scale = _powers((groups, width // BLOCK, round_up(tokens, ROW_ALIGNMENT)), g)
        b_scale = _powers((groups, round_up(rank, BLOCK) // BLOCK, width // BLOCK), g)
        out = torch.empty(tokens + 1, groups, rank + 16, dtype=torch.bfloat16)
        raw_memory(out).fill_(_POISON)
        arguments = (a.transpose(0, 1), a_scale.permute(2, 0, 1)[:tokens], b, b_scale, out[:tokens, :, 8:-8])
        name = f"{tokens} tokens of {groups} groups, {width} -> {rank}"
        yield Example(name, (*arguments, _EQUATION, _RECIPE), _near_einsum)
        if width % (BLOCK * CHUNKS_PER_WORD) == 0:
            words = width // BLOCK // CHUNKS_PER_WORD
            a_scale, b_scale = (_words((groups, words, round_up(n, ROW_ALIGNMENT)), g) for n in (tokens, rank))
            arguments = (
                a.transpose(0, 1),
                a_scale.permute(2, 0, 1)[:tokens],
                b,
                b_scale.transpose(1, 2)[:, :rank],
                out[:tokens, :, 8:-8],
            )
            yield Example(f"{name}, scales in words", (*arguments, _EQUATION, _PACKED), _near_einsum)


def _near_einsum(got: Sequence[Any], want: Sequence[Any]) -> str:
    """ "", or how far the output is off; everything else in memory must be the same."""
    a, b = want[0].double(), want[2].double()
    a_scale, b_scale = (unpack_scales(want[i]).repeat_interleave(BLOCK, -1) for i in (1, 3))
    if want[6] == _RECIPE:
        b_scale = b_scale.repeat_interleave(BLOCK, 1)[:, : b.shape[1]]
    a, b = a * a_scale, b * b_scale
    # not the reference's result, which is rounded to bf16 itself: two roundings may lie a whole step apart
    exact, magnitude = (torch.einsum("tgk,gdk->tgd", x, y) for x, y in ((a, b), (a.abs(), b.abs())))
    excess = (got[4].double() - exact).abs() - ROUNDING * exact.abs() - PRODUCTS * magnitude
    if not bool((excess <= 0).all()):
        return f"out: off by {excess.max().item():.3g} more than rounding explains"
    cleared = [clone_arguments(arguments[:5], torch.device("cpu")) for arguments in (got, want)]
    for arguments in cleared:
        arguments[4].zero_()
    same = all(same_bytes(raw_memory(x), raw_memory(y)) for x, y in zip(*cleared, strict=True))
    return "" if same else "memory outside of out was written"


def _codes(shape: tuple[int, ...], g: torch.Generator) -> torch.Tensor:
    return (torch.randn(shape, generator=g) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)


def _powers(shape: tuple[int, ...], g: torch.Generator) -> torch.Tensor:
    return torch.exp2(torch.randint(-12, 2, shape, generator=g).float())


def _words(shape: tuple[int, ...], g: torch.Generator) -> torch.Tensor:
    return torch.randint(115, 129, (*shape, CHUNKS_PER_WORD), generator=g).to(torch.uint8).view(torch.int32)[..., 0]


_SOAK_FP8 = (
    (16, 1, 4096, 1024),
    (16, 1, 1536, 4096),
    (16, 1, 1024, 4096),
    (64, 1, 1536, 4096),
    (130, 1, 1536, 4096),
)
"""On Hopper two, four and eight splits of K for few rows, four and two for many."""

_SOAK_CODES = ((64, 2, 1024, 3072),)
"""Whose results are codes: six splits."""

_SOAK_BF16 = ((16, 1, 2624, 4096), (16, 1, 1024, 4096), (200, 1, 1024, 4096), (64, 1, 1024, 4096))
"""The same: three and eight, two and four."""


def soak_fp8_gemm() -> Iterator[Example]:
    """fp8_gemm with K cut by the CTAs of clusters, of few rows and of many."""
    yield from _fp8_gemm(_SOAK_FP8, of_kernels=True)
    yield from (_of_codes(example) for example in _fp8_gemm(_SOAK_CODES, of_kernels=True))


def soak_bf16_gemm() -> Iterator[Example]:
    """bf16_gemm, the same."""
    yield from _bf16_gemm(_SOAK_BF16, 1)


def soak_fp8_bf16_gemm() -> Iterator[Example]:
    """The same of both products in one launch."""
    yield from (example for example in fp8_bf16_gemm() if example.args[0].shape[0] > 60)


SOAK = {"fp8_bf16_gemm": soak_fp8_bf16_gemm, "fp8_gemm": soak_fp8_gemm, "bf16_gemm": soak_bf16_gemm}

EXAMPLES = {
    "quantize_fp8_1x128": quantize,
    "fp8_bf16_gemm": fp8_bf16_gemm,
    "fp8_gemm": fp8_gemm,
    "fp8_gemm_squares": fp8_gemm_squares,
    "bf16_gemm": bf16_gemm,
    "deepseek_v4_fp8_einsum": einsum,
}
