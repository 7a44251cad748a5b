# SPDX-License-Identifier: Apache-2.0
"""Tensor memory of Blackwell and the tensor cores that compute in it: 128 lanes of 512 columns of 32 bits.

An address is (lane << 16) + column. Warp w of a warpgroup reaches lanes 32 (w % 4) to 32 (w % 4) + 31 of its block, the
tensor cores reach all. `blocks` is 1, or 2 where the two blocks of a cluster work as a pair: of a kernel that uses both
forms only one may be used. Products, copies and commits are one thread's, and that thread's are done in the order it
gives them; what says "warp" or "warpgroup" below has to be reached by all its threads.

What orders what (PTX ISA, "tcgen05 memory consistency model"):

    a product reads what threads stored to tensor memory   wait_tensor_stores, fence_tensor_before, a barrier of the
                                                           threads, fence_tensor_after
    threads load what a product wrote                      commit, a wait for its mbarrier, fence_tensor_after
    a product overwrites what threads have loaded          wait_tensor_loads, fence_tensor_before, barrier,
                                                           fence_tensor_after
    a product reads shared memory that threads wrote       fence.proxy.async by the writers, barrier, fence_tensor_after
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cutlass import Float32, Int32, Int64
from cutlass.cute.arch import inline_ptx

COLUMNS = 512
LANES = 128


def allocate_tensor_memory(shared: Any, columns: int, blocks: int = 1) -> None:
    """sm_100a and up, not sm_120a. By a warp (of a pair: one of each block, when both blocks are known to be running):
    write the address of `columns` columns, a power of two from 32 to 512, to a word of shared memory. Waits until they
    are free."""
    inline_ptx(
        f"tcgen05.alloc.cta_group::{blocks}.sync.aligned.shared::cta.b32 [{{$r0}}], {columns};",
        read_only_args=[Int32(shared)],
    )


def relinquish_tensor_memory(blocks: int = 1) -> None:
    """sm_100a and up, not sm_120a. By the warp that allocates: it will not again, so that another block may."""
    inline_ptx(f"tcgen05.relinquish_alloc_permit.cta_group::{blocks}.sync.aligned;")


def free_tensor_memory(address: Any, columns: int, blocks: int = 1) -> None:
    """sm_100a and up, not sm_120a. By the warp that allocated, before the kernel ends and after all its uses."""
    inline_ptx(
        f"tcgen05.dealloc.cta_group::{blocks}.sync.aligned.b32 {{$r0}}, {columns};", read_only_args=[Int32(address)]
    )


# ---- between threads and tensor memory -------------------------------------------------------------------------------


def load_tensor_memory(address: Any, columns: int, dtype: Any = Float32) -> tuple[Any, ...]:
    """sm_100a and up, not sm_120a. By a warp: thread i gets `columns` (1, 2, 4 .. 128) neighbouring columns of lane i
    of the warp's, as Float32 or Int32. Waits for them, and so for every load before."""
    return _words(
        inline_ptx(
            f"tcgen05.ld.sync.aligned.32x32b.x{columns}.b32 {_list('w', columns)}, [{{$r0}}]; "
            "tcgen05.wait::ld.sync.aligned;",
            write_only_types=[dtype] * columns,
            read_only_args=[Int32(address)],
        )
    )


def start_tensor_load(address: Any, columns: int) -> tuple[Any, ...]:
    """sm_100a and up, not sm_120a. As load_tensor_memory, without waiting: words that mean nothing before
    wait_tensor_loads has returned them."""
    return _words(
        inline_ptx(
            f"tcgen05.ld.sync.aligned.32x32b.x{columns}.b32 {_list('w', columns)}, [{{$r0}}];",
            write_only_types=[Int32] * columns,
            read_only_args=[Int32(address)],
        )
    )


def wait_tensor_loads(words: Sequence[Any] = ()) -> tuple[Any, ...]:
    """sm_100a and up, not sm_120a. By a warp: until all its loads are done. Returns the words of start_tensor_load; no
    use of what is returned can move above the wait."""
    moves = " ".join(f"mov.b32 {{$w{i}}}, {{$r{i}}};" for i in range(len(words)))
    return _words(
        inline_ptx(
            f"tcgen05.wait::ld.sync.aligned; {moves}",
            write_only_types=[Int32] * len(words),
            read_only_args=[Int32(word) for word in words],
        )
    )


def store_tensor_memory(address: Any, words: Sequence[Any]) -> None:
    """sm_100a and up, not sm_120a. By a warp: thread i's words, 1, 2, 4 .. 128 of them, Int32 or Float32, go to
    neighbouring columns of lane i of the warp's. Does not wait: wait_tensor_stores does."""
    inline_ptx(
        f"tcgen05.st.sync.aligned.32x32b.x{len(words)}.b32 [{{$r0}}], {_list('r', len(words), 1)};",
        read_only_args=[Int32(address), *words],
    )


def wait_tensor_stores() -> None:
    """sm_100a and up, not sm_120a. By a warp: until all its stores are done."""
    inline_ptx("tcgen05.wait::st.sync.aligned;")


def fence_tensor_before() -> None:
    """sm_100a and up, not sm_120a. Between a thread's uses of tensor memory and a barrier that lets another thread, or
    a product of another thread, use it."""
    inline_ptx("tcgen05.fence::before_thread_sync;")


def fence_tensor_after() -> None:
    """sm_100a and up, not sm_120a. Between a barrier and uses of tensor memory that have to come after it."""
    inline_ptx("tcgen05.fence::after_thread_sync;")


# ---- products --------------------------------------------------------------------------------------------------------


def descriptor_at(operand: Any, address: Any) -> Any:
    """Any architecture. Int64 descriptor of a dsl.umma.Operand at a shared address, whose upper bits, the number of the
    block in its cluster, do not count; adding `bytes // 16` moves it."""
    return Int64(operand.descriptor) + Int64((Int32(address) & 0x3FFFF) >> 4)


def tensor_mma(
    d: Any,
    a: Any,
    b: Any,
    instruction: Any,
    accumulate: Any,
    *,
    kind: str = "f16",
    a_in_tensor_memory: bool = False,
    weight_stationary: bool = False,
    blocks: int = 1,
    collector: str = "",
) -> None:
    """sm_100a and up, not sm_120a. One thread starts d = a @ b^T, or d += a @ b^T where `accumulate` is not 0.

    d            address in tensor memory; dsl.umma says where its rows and columns lie
    a, b         descriptors in shared memory (dsl.umma.Operand); a: an address, if a_in_tensor_memory
    instruction  descriptor (dsl.umma.instruction): shape, formats and majors
    kind         "f16" (bf16 and f16, 16 of the summed dimension) or "f8f6f4" (32)
    weight_stationary   the form that spreads M = 32 or 64 over all lanes; not for pairs
    collector    what becomes of the operand in the buffer of operands, as PTX writes it: "a::fill", "b0::use"
    """
    form = ".ws" if weight_stationary else ""
    kept = f".collector::{collector}" if collector else ""
    left = "[a]" if a_in_tensor_memory else "a"
    _with_registers(
        f"tcgen05.mma{form}.cta_group::{blocks}.kind::{kind}{kept} [d], {left}, b, i, p;",
        accumulate,
        d=Int32(d),
        a=Int32(a) if a_in_tensor_memory else Int64(a),
        b=Int64(b),
        i=Int32(instruction),
    )


def tensor_mma_scaled(
    d: Any,
    a: Any,
    b: Any,
    instruction: Any,
    a_scales: Any,
    b_scales: Any,
    accumulate: Any,
    *,
    kind: str = "mxf4",
    a_in_tensor_memory: bool = False,
    blocks: int = 1,
) -> None:
    """sm_100a and up, not sm_120a. As tensor_mma with a ue8m0 scale for every 32 elements of a row of `a` and of `b`.

    instruction         dsl.umma.scaled_instruction
    a_scales, b_scales  their addresses in tensor memory, where copy_scales put them
    kind                "mxf4" (e2m1 packed, 64 of the summed dimension) or "mxf8f6f4" (a byte an element, 32)
    """
    left = "[a]" if a_in_tensor_memory else "a"
    _with_registers(
        f"tcgen05.mma.cta_group::{blocks}.kind::{kind}.block_scale.block32 [d], {left}, b, i, [s], [t], p;",
        accumulate,
        d=Int32(d),
        a=Int32(a) if a_in_tensor_memory else Int64(a),
        b=Int64(b),
        i=Int32(instruction),
        s=Int32(a_scales),
        t=Int32(b_scales),
    )


def commit_tensor(barrier: Any, blocks: int = 1) -> None:
    """sm_100a and up, not sm_120a. Arrive on an mbarrier when all that this thread has started here is done: products
    and copies. Says fence_tensor_before by itself. The address may be map_shared's of another block."""
    inline_ptx(
        f"tcgen05.commit.cta_group::{blocks}.mbarrier::arrive::one.shared::cluster.b64 [{{$r0}}];",
        read_only_args=[Int32(barrier)],
    )


def commit_tensor_multicast(barrier: Any, mask: int, blocks: int = 2) -> None:
    """sm_100a and up, not sm_120a. As commit_tensor, on the mbarrier at this place of every block of the cluster whose
    bit is in `mask`."""
    inline_ptx(
        "{ .reg .b16 m; "
        f"mov.b16 m, {mask}; tcgen05.commit.cta_group::{blocks}.mbarrier::arrive::one.shared::cluster"
        ".multicast::cluster.b64 [{$r0}], m; }",
        read_only_args=[Int32(barrier)],
    )


SHAPES = ("128x256b", "4x256b", "128x128b", "64x128b.warpx2::02_13", "64x128b.warpx2::01_23", "32x128b.warpx4")
"""Of copy_to_tensor_memory: rows x bits of a row, and which warps' lanes get the rows again."""


def copy_to_tensor_memory(address: Any, source: Any, shape: str, blocks: int = 1) -> None:
    """sm_100a and up, not sm_120a. One thread has rows of shared memory, told of by a descriptor, copied to lanes of
    tensor memory; shape: one of SHAPES. In order with its products."""
    _with_registers(f"tcgen05.cp.cta_group::{blocks}.{shape} [d], b;", d=Int32(address), b=Int64(source))


def copy_scales(address: Any, source: Any, blocks: int = 1) -> None:
    """sm_100a and up, not sm_120a. 512 bytes of scales for tensor_mma_scaled, to four columns of the lanes of every
    warp: dsl.umma.scale_offset says where a row's scales are in them, dsl.umma.SCALES describes them."""
    copy_to_tensor_memory(address, source, "32x128b.warpx4", blocks)


def _with_registers(instruction: str, condition: Any = None, **operands: Any) -> None:
    """An instruction that takes registers of these names, where the assembler would not take (or break at) a number;
    and a predicate p, true where the condition is not 0."""
    given, moves = list(operands.values()), []
    for number, (name, value) in enumerate(operands.items()):
        moves.append(f".reg .b{value.width} {name}; mov.b{value.width} {name}, {{$r{number}}};")
    if condition is not None:
        moves.append(f".reg .pred p; setp.ne.b32 p, {{$r{len(given)}}}, 0;")
        given.append(Int32(condition))
    inline_ptx(f"{{ {' '.join(moves)} {instruction} }}", read_only_args=given)


def _list(role: str, count: int, first: int = 0) -> str:
    return "{" + ", ".join(f"{{${role}{first + i}}}" for i in range(count)) + "}"


def _words(found: Any) -> tuple[Any, ...]:
    return () if found is None else found if isinstance(found, tuple) else (found,)
