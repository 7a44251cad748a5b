# SPDX-License-Identifier: Apache-2.0
"""Products of a warpgroup's tensor cores with both operands in shared memory, and what becomes of them. sm_90a only.

An operand's tile is [rows, 128 bytes of the summed dimension], in the layout that the 128-byte swizzle of a bulk tensor
copy leaves: `swizzled_tiles`. Of the 64 x N products, thread t of the warpgroup holds rows 16 (t // 32) + t % 32 // 4
and the one 8 below; of every 8 columns it holds 2 (t % 4) and the next one:

    index      0         1             2             3          4, 5, 6, 7      ...
    row        r         r             r + 8         r + 8      as 0, 1, 2, 3
    column     c         c + 1         c             c + 1      8 more

A warpgroup may start several products before it waits for the first. It has to wait for all of them before a loop goes
round, unless the loop does nothing with accumulators but add products to them: the assembler does not follow others
that are in flight across a branch back, and then waits after each instruction instead (its remark C7514).
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, range_constexpr
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.utils import hopper_helpers

from cute_kernels.dsl import ptx
from cute_kernels.dsl.reduce import exchange_in_quad

ROW_BYTES = 128
WARPGROUP = 128
ROWS = 64
"""Rows of a warpgroup's products."""

STEPS = 4
"""Instructions that take 128 bytes of K, 32 each."""

wait = warpgroup.wait_group


def swizzled(dtype: Any, *shape: int) -> Any:
    """Shared-memory layout of rows, columns and, if given, stages, in slabs of 128 bytes of columns; the memory must be
    1024-byte aligned."""
    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, dtype)
    return cute.tile_to_shape(atom, shape, tuple(range(len(shape))))


def swizzled_tiles(dtype: Any, rows: int, stages: int) -> Any:
    """The same of `stages` tiles of [rows, 128 bytes]."""
    return swizzled(dtype, rows, ROW_BYTES * 8 // dtype.width, stages)


def uniform_tile(address: Any, layout: Any, dtype: Any) -> Any:
    """The tile of that layout at an address in shared memory that all lanes of a warp have. The reduction over lanes
    leaves it in a register of the whole warp, where descriptors for tensor cores are made of it with no more ado; from
    a register per lane each of them would be moved there, between two products."""
    place = cute.arch.warp_redux_sync(address, "or")
    pointer = cute.make_ptr(dtype, place, cutlass.AddressSpace.smem, assumed_align=1024, swizzle_=layout.inner)
    return cute.make_tensor(pointer, layout.outer)


def number_of_warpgroup(thread: Any) -> Any:
    """Of a thread, in a register of the whole warp, as in `uniform_tile`: else the assembler works it out anew from the
    thread's number, and moves it there, between two products."""
    return cute.arch.warp_redux_sync(thread // WARPGROUP, "or")


def make_mma(dtype: Any, warpgroups: int, columns: int, columns_lie: bool = False, **source: Any) -> Any:
    """The product of `warpgroups` times 64 rows with `columns` columns, each warpgroup doing its rows; fp32 sums.

    columns_lie   columns are next to each other in memory, not what is summed over
    a_source      registers, if that is where rows are
    """
    summed = OperandMajorMode.K
    major = OperandMajorMode.MN if columns_lie else summed
    return hopper_helpers.make_trivial_tiled_mma(
        dtype, dtype, summed, major, Float32, (warpgroups, 1, 1), (ROWS, columns), **source
    )


def accumulate(mma: Any) -> None:
    """Have `mma` add to what the accumulators hold. In a kernel, before any branch; a new one overwrites."""
    mma.set(warpgroup.Field.ACCUMULATE, True)


def overwrite(mma: Any) -> None:
    """Have `mma` overwrite what the accumulators hold, which a new one does too: but only here, in a kernel and before
    any branch, does the compiler learn of it, and keeps no registers for them where they hold nothing."""
    mma.set(warpgroup.Field.ACCUMULATE, False)


def accumulators(mma: Any, rows: int, columns: int) -> Any:
    """Registers for a thread's share of [rows, columns] products, indexed as above."""
    return cute.make_rmem_tensor(mma.get_slice(0).partition_shape_C((rows, columns)), Float32)


def scale_rows(values: Any, factors: Any) -> None:
    """Multiply a thread's two rows."""
    for i in range(cute.size(values)):
        values[i] = values[i] * factors[i // 2 % 2]


@cute.jit
def multiply(
    mma: cute.TiledMma,
    mma_more: cute.TiledMma,
    products: cute.Tensor,
    warpgroup_number: Any,
    a: cute.Tensor,
    b: cute.Tensor,
    stage: Any,
    b_stage: Any = None,
    steps: cutlass.Constexpr = None,
) -> None:
    """Start products = a[stage] @ b[b_stage]^T over the whole tile width, a group of its own for `wait`.

    mma_more           an `mma` that accumulates
    warpgroup_number   whose rows of `a`; the compiler must know that it is the same in a warp
    b_stage            None: `stage`
    steps              which ones of the STEPS that a stage's 128 bytes of K take, in order; None: all
    """
    if cutlass.const_expr(b_stage is None):
        b_stage = stage
    slice_ = mma.get_slice(warpgroup_number * WARPGROUP)
    a_parts = mma.make_fragment_A(slice_.partition_A(a))
    b_parts = mma.make_fragment_B(slice_.partition_B(b))
    own = range(STEPS) if cutlass.const_expr(steps is None) else steps
    if cutlass.const_expr(own.start == 0):
        warpgroup.fence()
    for k in range_constexpr(own.start, own.stop):
        chosen = mma if cutlass.const_expr(k == 0) else mma_more
        cute.gemm(chosen, products, a_parts[None, None, k, stage], b_parts[None, None, k, b_stage], products)
    warpgroup.commit_group()


def make_mma_of_registers(dtype: Any, columns: int) -> Any:
    """The product of a warpgroup's 64 rows, which are in its registers, with `columns` columns."""
    return make_mma(dtype, 1, columns, a_source=warpgroup.OperandSource.RMEM)


def row_registers(mma: Any, dtype: Any) -> tuple[Any, Any]:
    """Registers for a thread's share of the 64 rows of `mma`, and the same as words. Bytes 4c .. 4c + 3 and 4c + 16 ..
    4c + 19 of every 32 are those of a thread with t % 4 = c: of each 32 the words (row r, 4c), (r + 8, 4c),
    (r, 4c + 16), (r + 8, 4c + 16)."""
    held = cute.make_rmem_tensor(mma.get_slice(0).partition_shape_A((ROWS, ROW_BYTES * 8 // dtype.width)), dtype)
    return held, cute.recast_tensor(held, Int32)


@cute.jit
def multiply_registers(
    mma: cute.TiledMma, mma_more: cute.TiledMma, products: cute.Tensor, held: cute.Tensor, b: cute.Tensor, b_stage: Any
) -> None:
    """As `multiply`, with rows in registers. The warp goes on when they have been read."""
    b_parts = mma.make_fragment_B(mma.get_slice(0).partition_B(b))
    warpgroup.fence()
    for k in range_constexpr(cute.size(held, mode=[2])):
        chosen = mma if cutlass.const_expr(k == 0) else mma_more
        cute.gemm(chosen, products, held[None, None, k], b_parts[None, None, k, b_stage], products)
    warpgroup.commit_group()


@cute.jit
def store_bf16(
    values: cute.Tensor,
    lane: Any,
    target: Any,
    row_bytes: Any,
    rows: Any,
    columns: Any,
    count: cutlass.Constexpr,
    policy: Any = None,
) -> None:
    """Write a thread's rows of `count` columns, a multiple of 32, as bf16 with whole sectors.

    target   address of column 0 in the thread's first row, 16-byte aligned like row_bytes
    rows     how many rows there are from the thread's first one on; columns: from column 0 on, a multiple of 8
    policy   of L2, or None

    Four threads share a row: they exchange words until each has 8 neighbouring columns of every 32.
    """
    column = lane % 4 * 8
    for block in range_constexpr(count // 32):
        at = column + block * 32
        for half in range_constexpr(2):
            first = [16 * block + 4 * i + 2 * half for i in range(4)]
            words = exchange_in_quad(lane, [ptx.bf16x2(values[i], values[i + 1]) for i in first])
            address = target + row_bytes * (8 * half) + at * 2
            ptx.store_global_128(address, words, 8 * half < rows and at < columns, policy)


@cute.jit
def store_bf16_paired(
    values: cute.Tensor, lane: Any, target: Any, row_bytes: Any, rows: Any, count: cutlass.Constexpr, policy: Any = None
) -> None:
    """As `store_bf16` of all columns, where of every 16 columns the pairs 0, 2, 4, 6, 1, 3, 5, 7 lie in this order: a
    thread has four neighbouring ones, and exchanges half of its words with one other.
    """
    is_upper = lane & 1 != 0
    at = (lane & 1) * 16 + (lane & 2) * 4
    for block in range_constexpr(count // 32):
        for half in range_constexpr(2):
            first = [16 * block + 4 * i + 2 * half for i in range(4)]
            words = [ptx.bf16x2(values[i], values[i + 1]) for i in first]
            got = []
            for i in range_constexpr(2):
                sent = words[i] if is_upper else words[2 + i]
                got.append(cute.arch.shuffle_sync_bfly(sent, offset=1))
            low = [got[i] if is_upper else words[i] for i in range(2)]
            high = [words[2 + i] if is_upper else got[i] for i in range(2)]
            address = target + row_bytes * (8 * half) + (at + block * 32) * 2
            ptx.store_global_128(address, (*low, *high), 8 * half < rows, policy)


@cute.jit
def store_bf16_transposed(
    values: cute.Tensor, lane: Any, warp: Any, target: Any, row_bytes: Any, rows: Any, columns: cutlass.Constexpr
) -> None:
    """Write the first `rows` of `columns` columns of a thread's products as rows of bf16, with whole sectors.

    values   of an even number of times 64 rows, which become columns
    warp     the thread's, of its warpgroup
    target   address of what row 0 of the products becomes, 16-byte aligned like row_bytes
    """
    for pair in range_constexpr(cute.size(values) // columns):
        for block in range_constexpr(columns // 8):
            words = transposed_bf16(values, lane, pair, block, columns)
            at = (2 * pair + lane % 4 // 2) * ROWS + warp * 16 + lane % 2 * 8
            row = block * 8 + lane // 4
            ptx.store_global_128(target + row_bytes * row + at * 2, words, row < rows)


def transposed_bf16(values: cute.Tensor, lane: Any, pair: int, block: int, columns: int) -> Any:
    """Of a pair of 64 rows of products and 8 of their columns, 8 neighbouring rows of one column as bf16: those from
    64 (2 pair + lane % 4 // 2) + 16 warp + 8 (lane % 2) on, of column 8 block + lane // 4."""
    first = [(2 * pair + i // 2) * (columns // 2) + 4 * block + 2 * (i % 2) for i in range(4)]
    return exchange_in_quad(lane, [ptx.transpose_matrix(ptx.bf16x2(values[i], values[i + 1])) for i in first])
