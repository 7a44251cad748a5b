"""Calls that the kernels of deepseek_v4_fp8_einsum are verified with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from cute_kernels.formats import round_up
from cute_kernels.output.scales import BLOCK, CHUNKS_PER_WORD, ROW_ALIGNMENT, unpack_scales
from cute_kernels.runtime.verify import Example, clone_arguments, raw_memory

_POISON = 0xA5
_EQUATION, _RECIPE, _PACKED = "bhr,hdr->bhd", [1, BLOCK, BLOCK], [1, 1, BLOCK]
_SHAPES = (
    (1, 1, 1024, 4096),
    (3, 2, 136, 128),
    (70, 2, 1024, 1536),
    (129, 3, 264, 640),
    (300, 1, 1024, 4096),
)
"""(tokens, groups, R, K); with scales in words too, where K is a multiple of 512"""

ROUNDING, PRODUCTS = 2.0**-8, 2.0**-11
"""Shares of the exact result, and of the sum of the products' magnitudes, that a result may differ by: bf16 rounding,
and the 14 bits that Hopper's tensor cores keep of a sum of e4m3 products."""


def einsum() -> Iterator[Example]:
    """deepseek_v4_fp8_einsum(a, a_scale, b, b_scale, out, equation, recipe)"""
    for tokens, groups, rank, width in _SHAPES:
        g = torch.Generator().manual_seed(tokens + rank)
        a, b = (_codes((groups, rows, width), g) for rows in (tokens, rank))
        a_scale = _powers((groups, width // BLOCK, round_up(tokens, ROW_ALIGNMENT)), g)
        b_scale = _powers((groups, round_up(rank, BLOCK) // BLOCK, width // BLOCK), g)
        out = torch.empty(tokens + 1, groups, rank + 16, dtype=torch.bfloat16)
        raw_memory(out).fill_(_POISON)
        arguments = (a.transpose(0, 1), a_scale.permute(2, 0, 1)[:tokens], b, b_scale, out[:tokens, :, 8:-8])
        name = f"{tokens} tokens of {groups} groups, {width} -> {rank}"
        yield Example(name, (*arguments, _EQUATION, _RECIPE), agree)
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
            yield Example(f"{name}, scales in words", (*arguments, _EQUATION, _PACKED), agree)


def agree(got: Sequence[Any], want: Sequence[Any]) -> str:
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
    same = all(torch.equal(raw_memory(x), raw_memory(y)) for x, y in zip(*cleared, strict=True))
    return "" if same else "memory outside of out was written"


def _codes(shape: tuple[int, ...], g: torch.Generator) -> torch.Tensor:
    return (torch.randn(shape, generator=g) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)


def _powers(shape: tuple[int, ...], g: torch.Generator) -> torch.Tensor:
    return torch.exp2(torch.randint(-12, 2, shape, generator=g).float())


def _words(shape: tuple[int, ...], g: torch.Generator) -> torch.Tensor:
    return torch.randint(115, 129, (*shape, CHUNKS_PER_WORD), generator=g).to(torch.uint8).view(torch.int32)[..., 0]


EXAMPLES = {"deepseek_v4_fp8_einsum": einsum}
