# SPDX-License-Identifier: Apache-2.0
"""Blackwell's tensor memory, products in it, and copies to it: instructions around facts.meaning.

A thread's products are done in the order it starts them, its copies to tensor memory in theirs; a product comes after
the copies before it, but a copy may overtake the products before it. What was stored to tensor memory arrives some
time before the wait for it; what is loaded is in registers behind the wait, and the load may see what is written before
it. A pair of blocks works on one product, which one thread of either starts.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

from cute_kernels.dsl import umma
from cute_kernels.isa_probes import meaning
from tests.model import mbarriers
from tests.model.events import tensor_positions
from tests.model.hopper import UNKNOWN
from tests.model.moves import addresses
from tests.model.ptx import LANES, Op, Run, instruction
from tests.model.tasks import Task
from tests.model.values import U32
from tests.model.warps import together

POISON_WORD = U32(0xFFFFFFFF)
EVERY_LANE = np.arange(meaning.LANES)


def block_of(warp: Any, rank: int | None = None) -> meaning.Block:
    """The memories of a block of the cluster, the warp's own if it is not said which."""
    rank, span = warp.block.rank if rank is None else rank, warp.shared.SPAN
    if rank not in warp.cluster.tensor_memory:
        warp.cluster.tensor_memory[rank] = np.full((meaning.LANES, meaning.COLUMNS), POISON_WORD, U32)
    return meaning.Block(warp.shared.bytes[rank * span : (rank + 1) * span], warp.cluster.tensor_memory[rank])


def ranks_of(op: Op, warp: Any) -> list[int]:
    """The blocks that an instruction works on: the warp's, or the pair that it is one of."""
    rank = warp.block.rank
    return [rank & ~1, rank | 1] if "cta_group::2" in op.parts else [rank]


def one_lane(lanes: Any) -> int:
    """Of an instruction that one thread runs."""
    if lanes is None or lanes.sum() != 1:
        raise AssertionError(f"expected one thread, got {LANES if lanes is None else int(lanes.sum())}")
    return int(np.argmax(lanes))


def _number(warp: Any, place: tuple[int, int], lane: int = 0) -> int:
    """Of a register + number."""
    return int(warp.r[place[0]][lane]) + place[1]


# ---- allocation, fences ----------------------------------------------------------------------------------------------


def _taken(warp: Any) -> dict[int, int]:
    """Columns of the block that have been asked for: first -> how many."""
    found: dict[int, int] = warp.block.columns
    return found


def check_columns(warp: Any, rank: int, first: int, count: int) -> None:
    """Raises IndexError if a block has not asked for them."""
    taken = warp.cluster.blocks[rank].columns
    if not any(start <= first and first + count <= start + many for start, many in taken.items()):
        raise IndexError(f"tensor memory: columns {first} to {first + count - 1} are not allocated, but {taken}")


@instruction("tcgen05.alloc")
def _allocate(op: Op) -> Run:
    address, columns = op.address(0, 32), op.program.slot(op.args[1], op.scope, 32)

    def allocate(warp: Any, lanes: Any) -> None:
        count, taken = int(warp.r[columns][0]), _taken(warp)
        if count & (count - 1) or not 32 <= count <= meaning.COLUMNS or taken:
            raise NotImplementedError(f"{count} columns beside {taken}")
        # where they are is a matter of chance, and the same in both blocks of a pair
        places = warp.cluster.columns
        first = places.setdefault(count, warp.cluster.random.randrange(0, meaning.COLUMNS - count + 1, 32))
        taken[first] = count
        block_of(warp)
        position = warp.shared.position(addresses(warp, *address)[:1], 4)
        warp.shared.store(position, np.array([[first]], U32), 32)
        if warp.events:
            warp.events.write(op.number, np.arange(LANES) == 0, position, 4)
            positions = tensor_positions(warp.block.rank, slice(0, 128), first, count)
            peers = [rank for rank in ranks_of(op, warp) if rank != warp.block.rank]
            warp.events.tensor_use(op.number, positions, *peers)

    return together(allocate)


@instruction("tcgen05.dealloc")
def _free(op: Op) -> Run:
    address, columns = op.program.slot(op.args[0], op.scope, 32), op.program.slot(op.args[1], op.scope, 32)

    def free(warp: Any, lanes: Any) -> None:
        first, count = int(warp.r[address][0]), int(warp.r[columns][0])
        if _taken(warp).pop(first, None) != count:
            raise IndexError(f"tensor memory: {count} columns from {first} on have not been allocated")
        block_of(warp).tensor[:, first : first + count] = POISON_WORD
        if warp.events:
            warp.events.tensor_use(op.number, tensor_positions(warp.block.rank, slice(0, 128), first, count))

    return together(free)


@instruction("tcgen05.relinquish_alloc_permit")
def _relinquish(op: Op) -> Run:
    return together(lambda warp, lanes: None)


@instruction("tcgen05.fence::before_thread_sync", "tcgen05.fence::after_thread_sync")
def _fence(op: Op) -> Run:
    kind = "tcgen05.before" if "before" in op.opcode else "tcgen05.after"

    def fence(warp: Any, lanes: Any) -> None:
        if warp.events:
            warp.events.fence(op.number, lanes, kind)

    return fence


# ---- loads and stores ------------------------------------------------------------------------------------------------


def _columns(op: Op) -> int:
    if "32x32b" not in op.parts:
        raise NotImplementedError
    return next(int(part[1:]) for part in op.parts if part[0] == "x" and part[1:].isdigit())


def _reached(warp: Any, address: tuple[int, int], columns: int) -> tuple[slice, slice]:
    where = meaning.lanes_of(warp.number, _number(warp, address), columns)
    check_columns(warp, warp.block.rank, where[1].start, columns)
    return where


@instruction("tcgen05.ld")
def _load(op: Op) -> Run:
    columns, targets, address = _columns(op), op.slots(0, 32), op.address(1, 32)

    def load(warp: Any, lanes: Any) -> None:
        where, tensor = _reached(warp, address, columns), block_of(warp).tensor
        outcome: dict[int, Any] = {}

        def land() -> None:
            outcome.update(zip(targets, tensor[where].T.copy(), strict=True))

        warp.tensor_loads.append((warp.cluster.add(Task(land)), outcome))
        for slot in targets:
            warp.pending[slot] = outcome
            warp.r[slot] = UNKNOWN
        if warp.events:
            at = tensor_positions(warp.block.rank, where[0], where[1].start, columns)
            warp.events.tensor_load(op.number, at)

    return together(load)


@instruction("tcgen05.st")
def _store(op: Op) -> Run:
    columns, sources, address = _columns(op), op.slots(1, 32), op.address(0, 32)

    def store(warp: Any, lanes: Any) -> None:
        where, tensor = _reached(warp, address, columns), block_of(warp).tensor
        values = np.stack([warp.r[slot].astype(U32) for slot in sources], axis=1)

        def land() -> None:
            tensor[where] = values

        tensor[where] = POISON_WORD
        warp.tensor_stores.append(warp.cluster.add(Task(land)))
        if warp.events:
            at = tensor_positions(warp.block.rank, where[0], where[1].start, columns)
            warp.events.tensor_store(op.number, at)

    return together(store)


@instruction("tcgen05.wait::ld", "tcgen05.wait::st")
def _wait(op: Op) -> Run:
    is_load = "wait::ld" in op.parts

    def wait(warp: Any, lanes: Any) -> Any:
        tasks = [task for task, _ in warp.tensor_loads] if is_load else warp.tensor_stores
        if not warp.cluster.wait(warp, lambda: all(task.is_done for task in tasks), "tensor memory"):
            return False
        if is_load:
            for _, outcome in warp.tensor_loads:
                for slot, value in outcome.items():
                    if warp.pending.get(slot) is outcome:
                        warp.r[slot] = value
                        del warp.pending[slot]
        (warp.tensor_loads if is_load else warp.tensor_stores).clear()
        if warp.events:
            warp.events.tensor_wait(op.number, "tensor_load" if is_load else "tensor_store")
        return True

    return together(wait)


# ---- products --------------------------------------------------------------------------------------------------------


@instruction("tcgen05.mma")
def _multiply(op: Op) -> Run:
    kind = next(part.removeprefix("kind::") for part in op.parts if part.startswith("kind::"))
    is_scaled = "block_scale" in op.parts
    in_tensor_memory, is_stationary = op.args[1].startswith("["), "ws" in op.parts
    widths = [32, 32 if in_tensor_memory else 64, 64, 32, *([32, 32] if is_scaled else [])]
    places = [op.address(i, width) for i, width in enumerate(widths)]
    condition = op.program.slot(op.args[len(widths)], op.scope, 1)

    def multiply(warp: Any, lanes: Any) -> None:
        lane = one_lane(lanes)
        d, a, b, descriptor, *factors = (_number(warp, place, lane) for place in places)
        scales = dict(zip(("a_scales", "b_scales"), factors, strict=False))
        adds = bool(warp.r[condition][lane])
        ranks = ranks_of(op, warp)
        blocks = [block_of(warp, rank) for rank in ranks]

        def do() -> None:
            meaning.multiply(
                blocks,
                d,
                a,
                b,
                descriptor,
                adds,
                kind=kind,
                a_in_tensor_memory=in_tensor_memory,
                weight_stationary=is_stationary,
                **scales,
            )

        touched = list(_touched(warp, ranks, kind, is_stationary, in_tensor_memory, d, a, b, descriptor, adds, scales))
        if warp.events:
            warp.events.tensor(op.number, lanes, touched)
        copies = tuple(task for task in warp.queues.get("tensor copies", ()) if not task.is_done)
        _started(warp, Task(do, copies), "products")

    return multiply


def _touched(
    warp: Any,
    ranks: list[int],
    kind: str,
    is_stationary: bool,
    in_tensor_memory: bool,
    d: int,
    a: int,
    b: int,
    descriptor: int,
    adds: bool,
    scales: dict[str, int],
) -> Any:
    """(is written, positions, bytes of each) of all that a product reads and writes."""
    shape, bits = meaning.shape_of(descriptor, kind), meaning.BITS[kind]
    form = ("pair" if len(ranks) == 2 else "ws" if is_stationary and shape.m < 128 else "m") + str(shape.m)
    depth, width = umma.K_BYTES * 8 // bits, umma.result_columns(form, shape.n)
    for i, rank in enumerate(ranks):
        check_columns(warp, rank, d, width)
        operands = [(b, shape.n // len(ranks), shape.is_mn_major[1])]
        if in_tensor_memory:
            check_columns(warp, rank, a, umma.K_BYTES // 4)
            yield False, tensor_positions(rank, slice(0, 128), a, umma.K_BYTES // 4), 4
        else:
            operands.append((a, shape.m // len(ranks), shape.is_mn_major[0]))
        for start, rows, is_mn_major in operands:
            at = meaning.operand_addresses(start, rows, depth, bits, is_mn_major)
            if at.min() < warp.shared.BASE or at.max() >= warp.shared.BASE + warp.shared.size:
                raise IndexError(f"an operand at {int(at.min()):#x} to {int(at.max()):#x} of shared memory")
            yield False, np.unique(at // 16) * 16 + rank * warp.shared.SPAN, 16
        for name, address in scales.items():
            count = -(-(shape.m // len(ranks) if name == "a_scales" else shape.n) // 32)
            yield False, tensor_positions(rank, slice(0, 32), address, count), 4
        _, _, lane, column = meaning._places(form, shape.m, shape.n, len(ranks))[i]
        results = tensor_positions(rank, np.unique(lane), d, width)
        del column
        if adds:
            yield False, results, 4
        yield True, results, 4


@instruction("tcgen05.cp")
def _copy(op: Op) -> Run:
    shape = ".".join(op.parts[3:])
    to, of = op.address(0, 32), op.address(1, 64)
    size = shape.partition(".")[0]
    rows, width = int(size.partition("x")[0]), int(size.partition("x")[2].rstrip("b")) // 8

    def copy(warp: Any, lanes: Any) -> None:
        lane = one_lane(lanes)
        address, source = _number(warp, to, lane), _number(warp, of, lane)
        for rank in ranks_of(op, warp):
            block = block_of(warp, rank)
            check_columns(warp, rank, address, width // 4)

            def do(block: meaning.Block = block) -> None:
                meaning.copy_to_tensor_memory(block, address, source, shape)

            if warp.events:
                read = np.unique(meaning.operand_addresses(source, rows, width, 8, False) // 16) * 16
                written = tensor_positions(rank, slice(0, 128), address, width // 4)
                touched = [(False, read + rank * warp.shared.SPAN, 16), (True, written, 4)]
                warp.events.tensor(op.number, lanes, touched, is_copy=True)
            _started(warp, Task(do), "tensor copies")

    return copy


def _started(warp: Any, task: Task, queue: str) -> None:
    warp.cluster.add(task, warp.queues.setdefault(queue, deque()))
    warp.tensor_work = [other for other in warp.tensor_work if not other.is_done] + [task]


@instruction("tcgen05.commit")
def _commit(op: Op) -> Run:
    is_multicast = "multicast::cluster" in op.parts
    address = op.address(0, 32)
    mask = op.program.slot(op.args[1], op.scope, 16) if is_multicast else None

    def commit(warp: Any, lanes: Any) -> None:
        lane = one_lane(lanes)
        place = int(warp.shared.position(addresses(warp, *address)[lane : lane + 1], 8)[0])
        places = [place]
        if mask is not None:
            chosen = int(warp.r[mask][lane])
            span, count = warp.shared.SPAN, len(warp.cluster.blocks)
            places = [place % span + rank * span for rank in range(count) if chosen >> rank & 1]
        barriers = [mbarriers.find(warp, one) for one in places]
        if warp.events:
            warp.events.tensor_commit(op.number, lanes, places)
        before = tuple(warp.tensor_work)
        for barrier in barriers:

            def land(barrier: mbarriers.Barrier = barrier) -> None:
                barrier.arrive()

            warp.cluster.add(Task(land, before))

    return commit
