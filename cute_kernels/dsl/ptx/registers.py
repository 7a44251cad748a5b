# SPDX-License-Identifier: Apache-2.0
"""Numbers in registers: taken apart, put together, and kept where the compiler would move them."""

from __future__ import annotations

from typing import Any

from cutlass import Int32, Int64
from cutlass._mlir.dialects import llvm
from cutlass.cute.arch import inline_ptx
from cutlass.cutlass_dsl import T


def pair(low: Any, high: Any) -> Any:
    """sm_70 and up. Two words as an int64."""
    return inline_ptx(
        "mov.b64 {$w0}, {{$r0}, {$r1}};", write_only_types=[Int64], read_only_args=[Int32(low), Int32(high)]
    )


def halves(number: Any) -> tuple[Any, Any]:
    """sm_70 and up. The low and the high word of an int64."""
    return inline_ptx("mov.b64 {{$w0}, {$w1}}, {$r0};", write_only_types=[Int32, Int32], read_only_args=[Int64(number)])


def transpose_matrix(word: Any) -> Any:
    """sm_75 and up. Lane i gives elements 2 (i % 4) and the next of row i // 4 of an 8 x 8 matrix of 16-bit elements,
    and gets those of the transposed matrix. All lanes must call."""
    return inline_ptx(
        "movmatrix.sync.aligned.m8n8.trans.b16 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[Int32(word)]
    )


def again(number: Any) -> Any:
    """sm_70 and up. The number. What is computed from it is computed here, and not once and for all before a loop,
    where it would take registers."""
    return inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[Int32(number)])


def thread_again() -> Any:
    """sm_70 and up. The thread's number in its block, read here: it takes no register elsewhere."""
    return _read_special("%tid.x")


def block_again() -> Any:
    """sm_70 and up. The block's number in its grid, read here."""
    return _read_special("%ctaid.x")


def rank_again() -> Any:
    """sm_90 and up. The block's number in its cluster, read here."""
    return _read_special("%cluster_ctarank")


def _read_special(register: str) -> Any:
    # inline_ptx takes the percent sign for something else
    return Int32(llvm.inline_asm(T.i32(), [], f"mov.u32 $0, {register};", "=r", has_side_effects=True))
