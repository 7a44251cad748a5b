# SPDX-License-Identifier: Apache-2.0
"""Operands, instructions and results of Blackwell's tensor cores: the numbers that tell a product where its data lie.
Plain Python: what a kernel traces with registers, a test evaluates with numbers or numpy arrays.

An operand is a matrix [rows, summed dimension] in shared memory, made of pieces of 8 x 16 bytes or, swizzled, of 8 rows
of 32, 64 or 128 bytes. K-major: a row's neighbours in the summed dimension are neighbours in memory. MN-major: the
neighbours are rows. A product reads 32 bytes of every row's summed dimension (K_BYTES). wgmma reads the same layouts
through the same descriptors, without VERSION.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

K_BYTES = 32
"""Of the summed dimension in one product: 16 bf16, 32 e4m3, 64 packed e2m1."""

VERSION = 1 << 46
"""Says that a descriptor is one of tcgen05."""

_SWIZZLES = {0: 0, 128: 2, 64: 4, 32: 6}
"""Bytes of a swizzled row -> number in a descriptor."""


def swizzled(address: Any, swizzle: int) -> Any:
    """Where the byte of a (32-bit shared) address is when rows of `swizzle` bytes are swizzled: 16-byte chunk c of a
    row is at chunk c ^ (number of the 128-byte line, as far as the row has chunks). Tensor copies write so, too."""
    if swizzle == 0:
        return address
    return address ^ (((address >> 7) & (swizzle // 16 - 1)) << 4)


@dataclass(frozen=True)
class Operand:
    """How an operand lies in shared memory, from an address that is a multiple of 8 * swizzle (unswizzled: of 16).

    swizzle      bytes of a swizzled row: 128, 64, 32; 0: none
    bits         of an element: 16, 8, or 4 where two share a byte
    is_mn_major
    leading      bytes. MN-major: from `swizzle` bytes of rows to the next ones. K-major and unswizzled: from 16 bytes
                 of the summed dimension to the next. K-major and swizzled: not used
    stride       bytes. K-major: from 8 rows to the next 8. MN-major: from 8 of the summed dimension to the next 8.
                 (Unswizzled and MN-major, the two change roles.)
    """

    bits: int
    swizzle: int = 128
    is_mn_major: bool = False
    leading: int = 16
    stride: int = 1024

    def __post_init__(self) -> None:
        if self.swizzle not in _SWIZZLES:
            raise ValueError(f"Operand: swizzle: expected one of {', '.join(map(str, _SWIZZLES))}, got {self.swizzle}")
        for name in ("leading", "stride"):
            value = getattr(self, name)
            if value % 16 or not 0 <= value < 1 << 18:
                raise ValueError(f"Operand: {name}: expected a multiple of 16 below 2^18, got {value}")

    @property
    def descriptor(self) -> int:
        """That of an operand at address 0, as an int64; `at` adds the address, in a kernel ptx.descriptor_at does."""
        return _signed(self.leading >> 4 << 16 | self.stride >> 4 << 32 | VERSION | _SWIZZLES[self.swizzle] << 61)

    def at(self, address: Any) -> Any:
        """Descriptor of the operand at a shared address below 2^18."""
        return self.descriptor + (address >> 4)

    def plain(self, row: Any, k: Any) -> Any:
        """As `offset`, if nothing were swizzled."""
        width = self.swizzle or 16
        if self.is_mn_major:
            rows = width * 8 // self.bits
            leading, stride = (self.leading, self.stride) if self.swizzle else (self.stride, self.leading)
            return row // rows * leading + row % rows * self.bits // 8 + k // 8 * stride + k % 8 * width
        byte = k * self.bits // 8
        line = row // 8 * self.stride + row % 8 * width
        return line + (byte if self.swizzle else byte // 16 * self.leading + byte % 16)

    def offset(self, row: Any, k: Any) -> Any:
        """Byte of element [row, k] from the operand's start; of two elements that share it, the even k is low."""
        return swizzled(self.plain(row, k), self.swizzle)

    def step(self, k: int) -> int:
        """Bytes to add to the operand's start for the product that begins at k, a multiple of what one product sums.
        K-major and swizzled: inside a row; what is further is another operand."""
        if self.swizzle and not self.is_mn_major and k * self.bits // 8 >= self.swizzle:
            raise ValueError(f"Operand.step: k: expected below {self.swizzle * 8 // self.bits}, got {k}")
        return int(self.plain(0, k))


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number


def operand_of(descriptor: int, bits: int, is_mn_major: bool) -> tuple[Operand, int]:
    """The operand that a descriptor tells of, and its address: the inverse of Operand.at. A descriptor of wgmma, which
    has no VERSION, is read too."""
    version, rest = descriptor >> 46 & 7, descriptor >> 49 & 0xFFF
    swizzle = next((k for k, v in _SWIZZLES.items() if v == descriptor >> 61 & 7), None)
    if version > 1 or rest or swizzle is None:
        raise ValueError(f"operand_of: expected a descriptor without base offset, got {descriptor:#x}")
    leading, stride = ((descriptor >> bit & 0x3FFF) << 4 for bit in (16, 32))
    return Operand(bits, swizzle, is_mn_major, leading, stride), (descriptor & 0x3FFF) << 4


def operand_bytes(descriptor: int, row: Any, k: Any, bits: int, is_mn_major: bool) -> Any:
    """Shared address of element [row, k] of the operand that a descriptor tells of, as a tensor core computes it: the
    swizzle follows the bits of the address, so that an operand may start inside a swizzled row."""
    operand, start = operand_of(descriptor, bits, is_mn_major)
    return swizzled(start + operand.plain(row, k), operand.swizzle)


def k_major(bits: int, swizzle: int = 128) -> Operand:
    """Rows of `swizzle` bytes of the summed dimension, one after the other."""
    return Operand(bits, swizzle, False, 16, 8 * swizzle)


def mn_major(bits: int, leading: int, swizzle: int = 128) -> Operand:
    """The same bytes seen from the other side: as rows of `swizzle` bytes of operand rows, one for each of the summed
    dimension; `leading` bytes on come the next operand rows."""
    return Operand(bits, swizzle, True, leading, 8 * swizzle)


# ---- instructions ----------------------------------------------------------------------------------------------------

FORMATS = {
    "f16": {"f16": 0, "bf16": 1},
    "f8f6f4": {"e4m3": 0, "e5m2": 1, "e2m1": 5},
    "mxf8f6f4": {"e4m3": 0, "e5m2": 1, "e2m1": 5},
    "mxf4": {"e2m1": 1},
}
"""Kind of a product -> formats of its operands, with their numbers. e2m1 takes a byte an element but for mxf4."""

_FP32 = 1 << 4
_UE8M0 = 1 << 23


def instruction(
    kind: str,
    a: str,
    b: str,
    m: int,
    n: int,
    *,
    a_is_mn_major: bool = False,
    b_is_mn_major: bool = False,
) -> int:
    """Descriptor of products [m, n] of operands in formats `a` and `b`, with fp32 sums; kind: "f16" or "f8f6f4". Of a
    pair of blocks, m and n are those of both."""
    return _shape(kind, a, b, m, n) | _FP32 | a_is_mn_major << 15 | b_is_mn_major << 16


def scaled_instruction(kind: str, a: str, b: str, m: int, n: int, a_part: int = 0, b_part: int = 0) -> int:
    """As `instruction`, with ue8m0 scales; kind: "mxf8f6f4" or "mxf4", K-major.

    a_part, b_part   which of the four scales of a row (scale_offset's `block`) the first of this product is: of mxf4,
                     which takes two, 0 or 2
    """
    return _shape(kind, a, b, m, n) | _UE8M0 | b_part << 4 | a_part << 29


def _shape(kind: str, a: str, b: str, m: int, n: int) -> int:
    formats = FORMATS[kind]
    if m not in (32, 64, 128, 256) or n % 8 or not 8 <= n <= 256:
        raise ValueError(f"instruction: m, n: expected m = 32, 64, 128 or 256 and n = 8, 16 .. 256, got {m}, {n}")
    return formats[a] << 7 | formats[b] << 10 | n >> 3 << 17 | m >> 4 << 24


# ---- results, and what else lies in tensor memory --------------------------------------------------------------------

FORMS = ("m128", "m64", "ws64", "ws32", "pair256", "pair128")
"""Of a product: m rows in one block, weight-stationary with m rows, m rows over a pair of blocks."""


def result_place(form: str, n: int, row: Any, column: Any) -> tuple[Any, Any, Any]:
    """Block of the pair (else 0), lane, and column from the start of the result, of element [row, column] of [m, n]
    results. n is a multiple of the number of parts that a row is cut into: 4 of ws32, 2 of ws64 and pair128."""
    zero = row * 0
    if form == "m128":
        return zero, row, column
    if form == "m64":
        return zero, row // 16 * 32 + row % 16, column
    if form == "pair256":
        return row // 128, row % 128, column
    parts, rows = (4, 32) if form == "ws32" else (2, 64)
    block, inside = (row // 64, row % 64) if form == "pair128" else (zero, row)
    width = n // parts
    return block, inside + rows * (column // width), column % width


def result_columns(form: str, n: int) -> int:
    """Columns of tensor memory that [m, n] results take."""
    return n // {"ws64": 2, "pair128": 2, "ws32": 4}.get(form, 1)


SCALES = Operand(8, 0, False, 0, 128)
"""Scales of 128 rows for ptx.copy_scales: 512 bytes of 32 lanes x 16, unswizzled."""


def scale_offset(row: Any, block: Any) -> Any:
    """Byte of the scale of row `row` (of 128) for block `block` (of 4) of 32 elements in those 512 bytes."""
    return row % 32 * 16 + row // 32 * 4 + block
