"""Products of single warps on tensor cores (mma.sync), with operands in registers; sm_80 and up.

A product is [16 rows, 16] @ [16, 8 columns], bf16 with fp32 sums. Lane l has, with r = l // 4 and c = l % 4:

    a[0]  row r,      summed 2c, 2c + 1             b[0]  summed 2c, 2c + 1,         column r
    a[1]  row r + 8,  summed 2c, 2c + 1             b[1]  summed 2c + 8, 2c + 9,     column r
    a[2]  row r,      summed 2c + 8, 2c + 9         sums[0], sums[1]  row r,      columns 2c, 2c + 1
    a[3]  row r + 8,  summed 2c + 8, 2c + 9         sums[2], sums[3]  row r + 8,  columns 2c, 2c + 1

In which order the summed dimension is numbered is free, as long as `a` and `b` agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cute_kernels.dsl.ptx import E4M3_AS_BF16, inline_ptx

LARGEST_SINGLE_SCALE = 254 - E4M3_AS_BF16
"""The largest ue8m0 byte whose scale times 2^120 is a finite bf16: codes of larger scales are multiplied twice."""


@dataclass(frozen=True)
class Registers:
    """Registers of the assembler with names of their own, `name`0 and so on, 32 bits each.

    What lives through many loops and branches is in them: of values that it knows, the compiler makes pairs for
    Blackwell's paired arithmetic, and then moves them to and from the registers that a product takes. A kernel declares
    them once, before any branch.
    """

    name: str
    count: int

    def declare(self) -> None:
        inline_ptx(f".reg .b32 {self.name}<{self.count}>;")

    def four(self, first: int) -> str:
        """As an operand: register `first` and the next three."""
        return "{" + ", ".join(f"{self.name}{first + i}" for i in range(4)) + "}"

    def put(self, number: int, word: Any) -> None:
        inline_ptx(f"mov.b32 {self.name}{number}, {{$r0}};", read_only_args=[Int32(word)])

    def clear(self) -> None:
        inline_ptx(" ".join(f"mov.b32 {self.name}{i}, 0;" for i in range(self.count)))

    def scale(self, numbers: Sequence[int], factor: Any) -> None:
        """Multiply some, as fp32."""
        text = " ".join(f"mul.f32 {self.name}{i}, {self.name}{i}, {{$r0}};" for i in numbers)
        inline_ptx(text, read_only_args=[Float32(factor)])

    def get(self, numbers: Sequence[int]) -> Any:
        """Four of them."""
        text = " ".join(f"mov.b32 {{$w{i}}}, {self.name}{number};" for i, number in enumerate(numbers))
        return inline_ptx(text, write_only_types=[Int32] * 4)


MULTIPLY = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"


def multiply(a: str, b: Any, sums: Any) -> Any:
    """sm_80 and up. The product of a and b, plus four sums, bits of fp32 numbers, if there are any. a: Registers."""
    zeros = "" if sums else ".reg .b32 zero; mov.b32 zero, 0; "
    before = "{$r2}, {$r3}, {$r4}, {$r5}" if sums else "zero, zero, zero, zero"
    return inline_ptx(
        f"{{ {zeros}{MULTIPLY} {{{{$w0}}, {{$w1}}, {{$w2}}, {{$w3}}}}, {a}, {{{{$r0}}, {{$r1}}}}, {{{before}}}; }}",
        write_only_types=[Int32] * 4,
        read_only_args=[*b, *sums],
    )


def accumulate(sums: str, a: Any, b: Any) -> None:
    """sm_80 and up. Add the product of a and b to four sums, which are Registers."""
    inline_ptx(
        f"{MULTIPLY} {sums}, {{{{$r0}}, {{$r1}}, {{$r2}}, {{$r3}}}}, {{{{$r4}}, {{$r5}}}}, {sums};",
        read_only_args=[*a, *b],
    )


def load_matrices_transposed(address: Any) -> Any:
    """sm_75 and up. Four 8 x 8 matrices of 16-bit elements in shared memory, transposed: lane i gets elements
    [2 (i % 4), i // 4] and [2 (i % 4) + 1, i // 4] of each, and gives the address of row i % 8 of matrix i // 8."""
    return inline_ptx(
        "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Int32] * 4,
        read_only_args=[Int32(address)],
    )


def copy_async_or_zero(shared: Any, source: Any, size: int, read: Any) -> None:
    """sm_80 and up. `size` bytes, 8 or 16, from global to shared memory, asynchronously; of those only the first `read`
    are read, the others become zero. Both addresses are multiples of `size`."""
    cache = "cg" if size == 16 else "ca"
    inline_ptx(
        f"cp.async.{cache}.shared.global [{{$r0}}], [{{$r1}}], {size}, {{$r2}};",
        read_only_args=[Int32(shared), Int64(source), Int32(read)],
    )


def multiply_bf16x2(a: Any, b: Any) -> Any:
    """sm_80 and up. Products of both halves, nearest even; subnormal numbers count. What is added is -0."""
    return inline_ptx(
        "{ .reg .b32 zero; mov.b32 zero, 0x80008000; fma.rn.bf16x2 {$w0}, {$r0}, {$r1}, zero; }",
        write_only_types=[Int32],
        read_only_args=[Int32(a), Int32(b)],
    )


def bf16x2_of_codes(word: Any, left: int) -> Any:
    """sm_70 and up. The e4m3 codes in bytes 1 and 3 of (word << left), left = 0 or 8, as bf16, times 2^-120. Exact;
    codes 0x7F and 0xFF count as 480 and -480."""
    shift = "shr.u32 t, {$r0}, 4; mov.b32 s, {$r0};" if left == 0 else "shl.b32 t, {$r0}, 4; shl.b32 s, {$r0}, 8;"
    return inline_ptx(
        f"{{ .reg .b32 s, t; {shift} and.b32 t, t, 0x07f007f0; lop3.b32 {{$w0}}, s, 0x80008000, t, 0xea; }}",
        write_only_types=[Int32],
        read_only_args=[Int32(word)],
    )


def scale_pair(low: Any, high: Any) -> Any:
    """bf16 pair of 2^(byte - 127 + 120) for two ue8m0 bytes of at most LARGEST_SINGLE_SCALE."""
    return (low | (high << 16)) * 128 + E4M3_AS_BF16 * 0x00800080


def excess_pair(low: Any, high: Any) -> Any:
    """bf16 pair of what scale_pair leaves out of two ue8m0 bytes: 1, or a power of two; NaN of byte 255."""
    return _excess(low) | (_excess(high) << 16)


@cute.jit
def _excess(byte: Any) -> Any:
    exponent = (cutlass.max(byte - LARGEST_SINGLE_SCALE, Int32(0)) + 127) << 7
    return Int32(0x7FC0) if byte == 255 else exponent


def permute(pair: Any, selector: Any) -> Any:
    """sm_70 and up. Bytes of a word in the order that the selector's nibbles say, which need not be known before."""
    return inline_ptx(
        "prmt.b32 {$w0}, {$r0}, {$r0}, {$r1};", write_only_types=[Int32], read_only_args=[Int32(pair), Int32(selector)]
    )


def halves(number: Any) -> Any:
    """sm_70 and up. The low and the high word of an int64."""
    return inline_ptx("mov.b64 {{$w0}, {$w1}}, {$r0};", write_only_types=[Int32, Int32], read_only_args=[Int64(number)])


def again(number: Any) -> Any:
    """sm_70 and up. The number. What is computed from it is computed here, and not once and for all before a loop,
    where it would take registers."""
    return inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[Int32(number)])
