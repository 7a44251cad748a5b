"""Blackwell's tensor memory, and products in it: the instructions named tcgen05.

Products, copies and commits of a thread are done in the order that it gives them, some time. A product reads its
operands, scales and what it adds to when it is done. What a warp loads it has when it has waited; until then registers
hold NaN, and the load may see what is written before the warp has waited.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

from cute_kernels.dsl import umma
from cute_kernels.dsl.ptx.tensor_memory import COLUMNS
from tests.model import mbarriers
from tests.model.hopper import UNKNOWN
from tests.model.moves import addresses
from tests.model.ptx import LANES, Op, Run, instruction
from tests.model.tasks import Task
from tests.model.values import E2M1_F32, E4M3_F32, F32, U32, from_bf16
from tests.model.warps import together

ALL_LANES = 128
NAN = 0x7FFFBAD0


class TensorMemory:
    """Of a block: words [128, 512], and columns that have been asked for: first -> how many."""

    def __init__(self) -> None:
        self.words = np.full((ALL_LANES, COLUMNS), NAN, U32)
        self.taken: dict[int, int] = {}

    def place(self, lane: int, column: int, columns: int) -> tuple[int, int]:
        inside = any(first <= column and column + columns <= first + count for first, count in self.taken.items())
        if not inside or not 0 <= lane < ALL_LANES:
            raise IndexError(f"tensor memory: lane {lane}, columns {column} to {column + columns - 1}: not allocated")
        return lane, column


def of_block(warp: Any) -> TensorMemory:
    found: TensorMemory = warp.cluster.tensor_memory.setdefault(warp.block.rank, TensorMemory())
    return found


def split(address: int) -> tuple[int, int]:
    """Lane and column."""
    return address >> 16, address & 0xFFFF


def one_block(op: Op) -> None:
    if "cta_group::2" in op.parts or "ws" in op.parts:
        raise NotImplementedError


@instruction("tcgen05.alloc")
def _allocate(op: Op) -> Run:
    one_block(op)
    target, count = op.address(0, 32), int(op.args[1])

    def allocate(warp: Any, lanes: Any) -> None:
        memory = of_block(warp)
        if memory.taken or count & (count - 1) or not 32 <= count <= COLUMNS:
            raise NotImplementedError(f"{count} columns beside {memory.taken}")
        first = warp.cluster.random.randrange(0, COLUMNS - count + 1, 32)
        memory.taken[first] = count
        position = warp.shared.position(addresses(warp, *target)[:1], 4)
        warp.shared.store(position, np.array([[first]], U32), 32)
        if warp.events:
            warp.events.write(op.number, np.arange(LANES) == 0, position, 4)

    return together(allocate)


@instruction("tcgen05.dealloc")
def _free(op: Op) -> Run:
    address, count = op.program.slot(op.args[0], op.scope, 32), int(op.args[1])

    def free(warp: Any, lanes: Any) -> None:
        memory = of_block(warp)
        first = int(warp.r[address][0])
        if memory.taken.pop(first, None) != count:
            raise IndexError(f"tensor memory: {count} columns from {first} on have not been allocated")

    return together(free)


@instruction("tcgen05.relinquish_alloc_permit", "tcgen05.fence::before_thread_sync", "tcgen05.fence::after_thread_sync")
def _nothing(op: Op) -> Run:
    return lambda warp, lanes: None


# ---- between threads and tensor memory -------------------------------------------------------------------------------


def loads_of(warp: Any) -> list[tuple[Task, dict[int, Any]]]:
    """That the warp has not waited for."""
    found: list[tuple[Task, dict[int, Any]]] = warp.__dict__.setdefault("tensor_loads", [])
    return found


@instruction("tcgen05.ld")
def _load(op: Op) -> Run:
    if "32x32b" not in op.parts:
        raise NotImplementedError
    targets = op.slots(0, 32)
    address, offset = op.address(1, 32)

    def load(warp: Any, lanes: Any) -> None:
        memory = of_block(warp)
        lane, column = split(int(warp.r[address][0]) + offset)
        if lane != warp.number % 4 * LANES:
            raise IndexError(f"tensor memory: a warp number {warp.number} reaches no lane {lane}")
        memory.place(lane, column, len(targets))
        outcome: dict[int, Any] = {}

        def do() -> None:
            words = memory.words[lane : lane + LANES, column : column + len(targets)]
            outcome.update((slot, words[:, i].copy()) for i, slot in enumerate(targets))

        task = warp.cluster.add(Task(do))
        loads_of(warp).append((task, outcome))
        for slot in targets:
            warp.pending[slot] = outcome
            warp.r[slot] = UNKNOWN

    return together(load)


@instruction("tcgen05.wait::ld")
def _wait(op: Op) -> Run:
    def wait(warp: Any, lanes: Any) -> Any:
        loads = loads_of(warp)
        if not warp.cluster.wait(warp, lambda: all(task.is_done for task, _ in loads), "tensor loads"):
            return False
        for _, outcome in loads:
            for slot, value in outcome.items():
                if warp.pending.get(slot) is outcome:
                    warp.r[slot] = value
                    del warp.pending[slot]
        loads.clear()
        return True

    return together(wait)


# ---- products --------------------------------------------------------------------------------------------------------


def start(warp: Any, lanes: Any, do: Any) -> None:
    """By one thread, behind what it has started before."""
    if (LANES if lanes is None else int(lanes.sum())) != 1:
        raise NotImplementedError("products of more than one thread")
    queue = warp.queues.setdefault(f"tcgen05 of thread {int(np.argmax(lanes))}", deque())
    warp.cluster.add(Task(do), queue)


def only(lanes: Any, vector: Any) -> int:
    return int(vector[0 if lanes is None else int(np.argmax(lanes))])


@instruction("tcgen05.commit")
def _commit(op: Op) -> Run:
    one_block(op)
    if "multicast::cluster" in op.parts:
        raise NotImplementedError
    address = op.address(0, 32)

    def commit(warp: Any, lanes: Any) -> None:
        at = np.array([only(lanes, addresses(warp, *address))], U32)
        barrier = mbarriers.find(warp, int(warp.shared.position(at, 8)[0]))
        start(warp, lanes, lambda: barrier.arrive(1) and None)

    return commit


@instruction("tcgen05.cp")
def _copy(op: Op) -> Run:
    one_block(op)
    if op.parts[-2:] != ["32x128b", "warpx4"]:
        raise NotImplementedError
    address, offset = op.address(0, 32)
    source = op.program.slot(op.args[1], op.scope, 64)

    def copy(warp: Any, lanes: Any) -> None:
        memory, descriptor = of_block(warp), only(lanes, warp.r[source])
        lane, column = memory.place(*split(only(lanes, warp.r[address]) + offset), 4)
        if lane:
            raise IndexError(f"tensor memory: a copy to lane {lane}")

        def do() -> None:
            row, byte = np.arange(32)[:, None], np.arange(16)[None]
            read = fetch(warp, umma.operand_bytes(descriptor, row, byte, 8, False))
            memory.words[:, column : column + 4] = np.tile(read.view(U32), (4, 1))

        start(warp, lanes, do)

    return copy


def fetch(warp: Any, at: Any) -> Any:
    """Bytes of the block's shared memory at these addresses."""
    inside = (at >= warp.shared.BASE) & (at < warp.shared.BASE + warp.shared.size)
    if not inside.all():
        raise IndexError(f"an operand at {int(at.min()):#x} to {int(at.max()):#x} of shared memory")
    return warp.shared.bytes[at + warp.block.rank * warp.shared.SPAN]


def numbers(warp: Any, descriptor: int, rows: int, depth: int, name: str, is_mn_major: bool) -> Any:
    """float64 [rows, depth] of an operand."""
    bits = {"bf16": 16, "e4m3": 8, "e2m1": 4}[name]
    row, k = np.arange(rows)[:, None], np.arange(depth)[None]
    at = umma.operand_bytes(descriptor, row, k, bits, is_mn_major)
    if bits == 16:
        return from_bf16(fetch(warp, at).astype(U32) | fetch(warp, at + 1).astype(U32) << U32(8)).astype(np.float64)
    found = fetch(warp, at)
    if bits == 4:
        return E2M1_F32[np.where(k % 2, found >> 4, found & 15)].astype(np.float64)
    return E4M3_F32[found].astype(np.float64)


@instruction("tcgen05.mma")
def _multiply(op: Op) -> Run:
    one_block(op)
    kind = next(part for part in op.parts if part.startswith("kind::"))[6:]
    is_scaled = "block_scale" in op.parts
    if kind not in ("f16", "f8f6f4", "mxf4") or op.args[1].startswith("["):
        raise NotImplementedError
    d, d_offset = op.address(0, 32)
    a, b = (op.program.slot(op.args[i], op.scope, 64) for i in (1, 2))
    instruction_ = op.program.slot(op.args[3], op.scope, 32)
    scales = [op.address(i, 32) for i in (4, 5)] if is_scaled else []
    accumulates = op.program.slot(op.args[6 if is_scaled else 4], op.scope, 1)
    depth = {"f16": 16, "f8f6f4": 32, "mxf4": 64}[kind]
    names = {number: name for name, number in umma.FORMATS[kind].items()}

    def multiply(warp: Any, lanes: Any) -> None:
        memory, bits = of_block(warp), only(lanes, warp.r[instruction_])
        rows, columns = (bits >> 24 & 31) << 4, (bits >> 17 & 63) << 3
        if rows != ALL_LANES:
            raise NotImplementedError(f"{rows} rows")
        lane, column = memory.place(*split(only(lanes, warp.r[d]) + d_offset), columns)
        if lane:
            raise IndexError(f"tensor memory: a product in lane {lane}")
        left, right = only(lanes, warp.r[a]), only(lanes, warp.r[b])
        formats = names[bits >> 7 & 7], names[bits >> 10 & 7]
        majors = bool(bits >> 15 & 1), bool(bits >> 16 & 1)
        adds = bool(only(lanes, warp.r[accumulates]))
        at = [split(only(lanes, warp.r[slot]) + offset)[1] for slot, offset in scales]
        parts = (bits >> 29 & 3, bits >> 4 & 3)

        def do() -> None:
            one = numbers(warp, left, rows, depth, formats[0], majors[0])
            two = numbers(warp, right, columns, depth, formats[1], majors[1])
            if is_scaled:
                one = one * scale_factors(memory, at[0], rows, parts[0], depth)
                two = two * scale_factors(memory, at[1], columns, parts[1], depth)
            total = product(one, two)
            if adds:
                total = total + memory.words[:, column : column + columns].view(F32)
            memory.words[:, column : column + columns] = total.astype(F32).view(U32)

        start(warp, lanes, do)

    return multiply


def product(one: Any, two: Any) -> Any:
    """one @ two^T. A NaN stays in its row and column."""
    bad = np.isnan(one).any(1)[:, None] | np.isnan(two).any(1)[None]
    return np.where(bad, np.nan, np.nan_to_num(one) @ np.nan_to_num(two).T)


def scale_factors(memory: TensorMemory, column: int, rows: int, part: int, depth: int) -> Any:
    """[rows, depth]: ue8m0 of every 32 elements. All four copies of a lane must be alike."""
    memory.place(0, column, -(-rows // 32))
    row = np.arange(rows)
    copies = np.stack([memory.words[row % 32 + 32 * i, column + row // 32] for i in range(4)])
    byte = np.stack([copies >> U32(8 * (part + i)) & U32(0xFF) for i in range(depth // 32)], axis=-1)
    value = np.where(byte == 255, np.nan, np.exp2(byte.astype(np.float64) - 127))
    value = np.where((byte == byte[:1]).all(0), value[0], np.nan)
    return np.repeat(value, 32, axis=1)
