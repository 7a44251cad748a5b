# SPDX-License-Identifier: Apache-2.0
"""Products of single warps on tensor cores (mma.sync), with operands in registers; sm_80 and up.

A product is [16 rows, 16] @ [16, 8 columns], bf16 or f16 with fp32 sums. Lane l has, with r = l // 4 and c = l % 4:

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

from cutlass import Float32, Int32

from cute_kernels.dsl.ptx import inline_ptx


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

    def two(self, first: int) -> str:
        """As an operand: register `first` and the next one."""
        return f"{{{self.name}{first}, {self.name}{first + 1}}}"

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
MULTIPLY_F16 = "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"


def multiply(a: str, b: Any, sums: Any, is_f16: bool = False) -> Any:
    """sm_80 and up. The product of a and b, plus four sums, bits of fp32 numbers, if there are any; of bf16, or of f16
    if that is said. a: Registers."""
    return _multiply(is_f16, a, "{{$r0}, {$r1}}", b, sums)


def multiply_by(a: Any, b: Any, sums: Any, is_f16: bool) -> Any:
    """sm_80 and up. As multiply, with `a` as four words and b as two or Registers."""
    named = isinstance(b, str)
    given = a if named else (*a, *b)
    text = b if named else "{{$r4}, {$r5}}"
    return _multiply(is_f16, "{{$r0}, {$r1}, {$r2}, {$r3}}", text, given, sums)


def _multiply(is_f16: bool, a: str, b: str, given: Any, sums: Any) -> Any:
    """given: the operand that is not in Registers."""
    instruction = MULTIPLY_F16 if is_f16 else MULTIPLY
    zeros = "" if sums else ".reg .b32 zero; mov.b32 zero, 0; "
    before = ", ".join(f"{{$r{len(given) + i}}}" for i in range(4)) if sums else "zero, zero, zero, zero"
    return inline_ptx(
        f"{{ {zeros}{instruction} {{{{$w0}}, {{$w1}}, {{$w2}}, {{$w3}}}}, {a}, {b}, {{{before}}}; }}",
        write_only_types=[Int32] * 4,
        read_only_args=[*given, *sums],
    )


def multiply_e4m3(a: Any, b: Any, sums: Any) -> Any:
    """sm_89 and up. Sums, four fp32, plus the product of e4m3 codes [16 rows, 32] and [32, 8 columns]. Where bf16 has
    summed 2c and 2c + 1 there are 4c to 4c + 3 here, where it has 2c + 8 there is 4c + 16."""
    return inline_ptx(
        "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {{$w0}, {$w1}, {$w2}, {$w3}}, "
        "{{$r0}, {$r1}, {$r2}, {$r3}}, {{$r4}, {$r5}}, {{$r6}, {$r7}, {$r8}, {$r9}};",
        write_only_types=[Float32] * 4,
        read_only_args=[*a, *b, *sums],
    )


def accumulate(sums: str, a: Any, b: Any, is_f16: bool = False) -> None:
    """sm_80 and up. Add the product of a and b to four sums, which are Registers."""
    inline_ptx(
        f"{MULTIPLY_F16 if is_f16 else MULTIPLY} {sums}, {{{{$r0}}, {{$r1}}, {{$r2}}, {{$r3}}}}, "
        f"{{{{$r4}}, {{$r5}}}}, {sums};",
        read_only_args=[*a, *b],
    )
