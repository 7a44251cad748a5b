"""Operands of the portable score kernel: codes of queries and keys as f16 or bf16 pairs, exactly.

Lane l = 4 r + c has, of a key or a head, the chunks of 16 bytes that c says: c and c + 4 of e4m3 codes, c of e2m1
codes, which is one scale block. In that order the 128 columns are summed: as queries and keys agree, it may be any.

    e4m3   f16 pairs. Where the GPU converts e4m3, their values; elsewhere 2^-8 of them, by moving bits
    e2m1   bf16 pairs, a quarter of their values with the block's scale: so bf16 holds the products of all eight codes
           and all scales, 2^-127 to 2^127
"""

from __future__ import annotations

from typing import Any

from cutlass import Int32

from cute_kernels.dsl import convert, ptx
from cute_kernels.runtime.arch import arch_number

E4M3_ARCH = 89
"""First architecture that converts e4m3."""


class Fp8Operands:
    """Codes e4m3, 128 bytes. A key's scale is an fp32 number that its score is multiplied with."""

    is_f16 = True
    code_bytes = 128

    def __init__(self, arch: str) -> None:
        self.converts = arch_number(arch) >= E4M3_ARCH
        self.factor = 1.0 if self.converts else 2.0**16

    def factors(self, scale: Any, lane: Any) -> Any:
        """What `pairs` needs of a key's or a head's scales."""
        return None

    def pairs(self, word: Any, factors: Any) -> list[Any]:
        """Of a word of codes: two."""
        return list(ptx.f16x2_of_e4m3x4(word) if self.converts else convert.f16x2_of_e4m3x4_by_bits(word))


class Mxfp4Operands:
    """Codes e2m1, 64 bytes, with a ue8m0 scale for every 32 of them, four in a word."""

    is_f16 = False
    code_bytes = 64
    factor = 16.0
    """Of a product, as each operand is a quarter of its value."""

    def factors(self, scale: Any, lane: Any) -> Any:
        """What `pairs` needs of a key's or a head's scales."""
        return convert.e2m1_scale_pairs((Int32(scale) >> ((lane & 3) * 8)) & 0xFF)

    def pairs(self, word: Any, factors: Any) -> list[Any]:
        """Of a word of codes: four."""
        found = convert.bf16x2_of_e2m1x8(word)
        for factor in factors:
            found = [ptx.multiply_bf16x2(pair, factor) for pair in found]
        return found


def operands_of(mxfp4: bool, arch: str) -> Any:
    return Mxfp4Operands() if mxfp4 else Fp8Operands(arch)
