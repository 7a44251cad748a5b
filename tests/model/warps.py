# SPDX-License-Identifier: Apache-2.0
"""What the threads of a warp do together: exchanges, votes, matrices in shared memory, barriers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.model.moves import addresses, put
from tests.model.ptx import LANES, Op, Run, instruction
from tests.model.values import U32

LANE = np.arange(LANES)
ROW, COLUMN = LANE // 4, LANE % 4


def together(run: Run) -> Run:
    """An instruction that all threads of a warp have to reach."""

    def checked(warp: Any, lanes: Any) -> Any:
        return run(warp, lanes) if warp.cluster.converge(warp, lanes) else False

    return checked


def exchange(op: Op, run: Run) -> Run:
    """One that lets threads see each other's registers."""

    def noted(warp: Any, lanes: Any) -> None:
        run(warp, lanes)
        if warp.events:
            warp.events.exchange(op.number, lanes)

    return together(noted)


@instruction("shfl.sync")
def _shuffle(op: Op) -> Run:
    mode = op.parts[2]
    names = op.args[0].split("|")
    target = op.program.slot(names[0], op.scope, 32)
    inside = op.program.slot(names[1], op.scope, 1) if len(names) > 1 else None
    value, by, clamp = (op.source(i, 32) for i in (1, 2, 3))

    def shuffle(warp: Any, lanes: Any) -> None:
        source, is_inside = _sources(mode, warp.r[by].tobytes(), warp.r[clamp].tobytes())
        put(warp, target, lanes, _of(lanes, warp.r[value][source]))
        if inside is not None:
            put(warp, inside, lanes, _of(lanes, is_inside))

    return exchange(op, shuffle)


@functools.lru_cache(maxsize=4096)
def _sources(mode: str, by: bytes, clamp: bytes) -> tuple[Any, Any]:
    """Lanes that a shuffle takes values of, and whether they are inside of their segments."""
    amount, limits = (np.frombuffer(words, U32).astype(np.int64) for words in (by, clamp))
    segment, most = limits >> 8 & 31, limits & 31
    first = LANE & segment
    last = first | (most & ~segment)
    source = {
        "bfly": LANE ^ amount,
        "idx": first | (amount & ~segment & 31),
        "up": LANE - amount,
        "down": LANE + amount,
    }[mode]
    is_inside = source >= last if mode == "up" else source <= last
    return np.where(is_inside, source, LANE), is_inside


def _of(lanes: Any, vector: Any) -> Any:
    return vector if lanes is None else vector[lanes]


@instruction("vote.sync")
def _vote(op: Op) -> Run:
    mode = op.parts[2]
    name = op.args[1]
    is_negated = name.startswith("!")
    source = op.program.slot(name.lstrip("!"), op.scope, 1)
    target = op.program.slot(op.args[0], op.scope, 32 if mode == "ballot" else 1)

    def vote(warp: Any, lanes: Any) -> None:
        votes = warp.r[source] ^ is_negated
        given = _of(lanes, votes)
        if mode == "ballot":
            result: Any = np.packbits(votes if lanes is None else votes & lanes, bitorder="little").view(U32)[0]
        else:
            result = {"any": given.any(), "all": given.all(), "uni": given.all() or not given.any()}[mode]
        put(warp, target, lanes, np.full(len(given), result))

    return exchange(op, vote)


@instruction("redux.sync")
def _reduce(op: Op) -> Run:
    names: dict[str, Any] = {
        "or": np.bitwise_or,
        "and": np.bitwise_and,
        "xor": np.bitwise_xor,
        "add": np.add,
        "max": np.maximum,
        "min": np.minimum,
    }
    view = {"s": np.int32, "f": np.float32}.get(op.kind[0], np.uint32)
    function, source, target = names[op.parts[2]], op.source(1), op.target()

    def reduce(warp: Any, lanes: Any) -> None:
        values = _of(lanes, warp.r[source]).view(view)
        put(warp, target, lanes, np.full(len(values), function.reduce(values), view).view(U32))

    return exchange(op, reduce)


@instruction("elect.sync")
def _elect(op: Op) -> Run:
    leader, chosen = op.args[0].split("|")
    slots = op.program.slot(leader, op.scope, 32), op.program.slot(chosen, op.scope, 1)

    def elect(warp: Any, lanes: Any) -> None:
        first = 0 if lanes is None else int(np.argmax(lanes))
        put(warp, slots[0], lanes, _of(lanes, np.full(LANES, first, np.uint32)))
        put(warp, slots[1], lanes, _of(lanes, first == LANE))

    return together(elect)


@instruction("activemask")
def _active(op: Op) -> Run:
    target = op.program.slot(op.args[0], op.scope, 32)

    def active(warp: Any, lanes: Any) -> None:
        mask = int(sum(1 << int(i) for i in _of(lanes, LANE)))
        put(warp, target, lanes, _of(lanes, np.full(LANES, mask, np.uint32)))

    return active


# ---- matrices --------------------------------------------------------------------------------------------------------


def _matrices(op: Op) -> tuple[int, bool]:
    if "m8n8" not in op.parts or op.kind != "b16":
        raise NotImplementedError
    return next(int(part[1:]) for part in op.parts if part in ("x1", "x2", "x4")), "trans" in op.parts


@instruction("ldmatrix")
def _load_matrix(op: Op) -> Run:
    count, is_transposed = _matrices(op)
    targets, address = op.slots(0, 32), op.address(1, 32)

    def load(warp: Any, lanes: Any) -> None:
        position = warp.shared.position(addresses(warp, *address)[: 8 * count], 16)
        rows = warp.shared.load(position, 16, 8).reshape(count, 8, 8).astype(U32)
        if warp.events:
            warp.events.read(op.number, 8 * count > LANE, position, 16)
        for matrix, target in zip(rows, targets, strict=True):
            matrix = matrix.T if is_transposed else matrix
            warp.r[target] = matrix[ROW, 2 * COLUMN] | (matrix[ROW, 2 * COLUMN + 1] << U32(16))

    return together(load)


@instruction("stmatrix")
def _store_matrix(op: Op) -> Run:
    count, is_transposed = _matrices(op)
    sources, address = op.slots(1, 32), op.address(0, 32)

    def store(warp: Any, lanes: Any) -> None:
        position = warp.shared.position(addresses(warp, *address)[: 8 * count], 16)
        rows = np.zeros((count, 8, 8), np.uint16)
        for matrix, source in zip(rows, sources, strict=True):
            matrix[ROW, 2 * COLUMN] = warp.r[source] & U32(0xFFFF)
            matrix[ROW, 2 * COLUMN + 1] = warp.r[source] >> U32(16)
        if is_transposed:
            rows = rows.transpose(0, 2, 1)
        warp.shared.store(position, rows.reshape(8 * count, 8), 16)
        if warp.events:
            warp.events.write(op.number, 8 * count > LANE, position, 16)

    return together(store)


@instruction("movmatrix")
def _transpose_matrix(op: Op) -> Run:
    source, target = op.source(1, 32), op.program.slot(op.args[0], op.scope, 32)

    def transpose(warp: Any, lanes: Any) -> None:
        matrix = np.zeros((8, 8), U32)
        matrix[ROW, 2 * COLUMN], matrix[ROW, 2 * COLUMN + 1] = warp.r[source] & U32(0xFFFF), warp.r[source] >> U32(16)
        warp.r[target] = matrix[2 * COLUMN, ROW] | (matrix[2 * COLUMN + 1, ROW] << U32(16))

    return together(transpose)


# ---- barriers --------------------------------------------------------------------------------------------------------


@instruction("bar.warp.sync")
def _sync_warp(op: Op) -> Run:
    def sync(warp: Any, lanes: Any) -> None:
        if warp.events:
            warp.events.sync_warp(op.number, lanes)

    return together(sync)


@instruction("bar", "barrier")
def _barrier(op: Op) -> Run:
    """bar.sync, bar.arrive, bar.red, and their other names barrier.cta and barrier; barrier.cluster."""
    parts = [part for part in op.parts[1:] if part != "cta"]
    if parts[0] == "cluster":
        return _arrive_cluster(op) if parts[1] == "arrive" else _wait_cluster(op)
    mode, reduction = parts[0], parts[1] if parts[0] == "red" else ""
    args = op.args[1:] if mode == "red" else op.args
    number = op.program.slot(args[0], op.scope, 32)
    count = op.program.slot(args[1], op.scope, 32) if len(args) > (2 if mode == "red" else 1) else None
    given = op.program.slot(op.args[-1].lstrip("!"), op.scope, 1) if mode == "red" else None
    target = op.program.slot(op.args[0], op.scope, 32 if reduction == "popc" else 1) if mode == "red" else None
    is_negated = op.args[-1].startswith("!")
    reductions: dict[str, Callable[[list[Any]], Any]] = {
        "or": lambda votes: any(vote.any() for vote in votes),
        "and": lambda votes: all(vote.all() for vote in votes),
        "popc": lambda votes: sum(int(vote.sum()) for vote in votes),
    }

    def barrier(warp: Any, lanes: Any) -> Any:
        identity = int(warp.r[number][0])
        expected = int(warp.r[count][0]) if count is not None else warp.cluster.program.threads
        state = warp.block.barriers.setdefault(identity, [0, 0, [], {}])
        key = (warp.number, op.number)
        if key not in state[3]:
            state[3][key] = state[1]
            state[0] += LANES if lanes is None else int(lanes.sum())
            if given is not None:
                state[2].append(_of(lanes, warp.r[given] ^ is_negated))
            if warp.events:
                warp.events.barrier_arrive(op.number, lanes, identity, expected, mode != "arrive")
            if state[0] > expected:
                raise AssertionError(f"barrier {identity}: {state[0]} threads of {expected}")
            if state[0] == expected:
                state[0], state[1] = 0, state[1] + 1
                state.append(state[2])
                state[2] = []
        generation = state[3][key]
        if mode == "arrive":
            del state[3][key]
            return True
        if not warp.cluster.wait(warp, lambda: state[1] > generation, f"barrier {identity} of {expected} threads"):
            return False
        del state[3][key]
        if target is not None:
            result = reductions[reduction](state[4 + generation])
            kind = np.bool_ if reduction != "popc" else np.uint32
            put(warp, target, lanes, np.full(LANES if lanes is None else int(lanes.sum()), result, kind))
        if warp.events:
            warp.events.barrier_wait(op.number, lanes, identity)
        return True

    return together(barrier)


def _arrive_cluster(op: Op) -> Run:
    order = "relaxed" if "relaxed" in op.parts else "cluster"

    def arrive(warp: Any, lanes: Any) -> None:
        cluster = warp.cluster
        warp.cluster_phase = cluster.arrived[1]
        cluster.arrived[0] += LANES if lanes is None else int(lanes.sum())
        if warp.events:
            warp.events.cluster_arrive(op.number, lanes, order)
        if cluster.arrived[0] == cluster.threads:
            cluster.arrived = [0, cluster.arrived[1] + 1]

    return together(arrive)


def _wait_cluster(op: Op) -> Run:
    def wait(warp: Any, lanes: Any) -> Any:
        phase = warp.cluster_phase
        if not warp.cluster.wait(warp, lambda: warp.cluster.arrived[1] > phase, "the cluster's barrier"):
            return False
        if warp.events:
            warp.events.cluster_wait(op.number, lanes)
        return True

    return together(wait)
