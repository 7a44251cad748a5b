# SPDX-License-Identifier: Apache-2.0
"""wgmma: a warp's 16 of the 64 rows of a product, from descriptors of shared memory or from registers. mma.sync, which
is older: 16 rows of a warp's own, from registers.

A product of wgmma is a task in the warp's own queue. It reads its operands when it is done, and its results are in
registers only when the warp has waited for its group; before, they hold NaN.
"""

from __future__ import annotations

import functools
import re
from collections import deque
from typing import Any

import numpy as np

from tests.model.ptx import LANES, Op, Run, instruction
from tests.model.tasks import Task
from tests.model.values import F32, U32, from_format
from tests.model.warps import exchange, together

ROWS = 16
LANE = np.arange(LANES)
ROW, COLUMN = LANE // 4, LANE % 4
UNKNOWN = np.full(LANES, 0x7FFFDEAD, U32)

SWIZZLES = {0: (16, 0), 1: (128, 7), 2: (64, 3), 3: (32, 1)}
"""wgmma's code -> bytes of a row of the layout's atoms, bits of the row that are swapped into the chunk's number."""

BYTES = {"bf16": 2, "f16": 2, "e4m3": 1}


@functools.lru_cache(maxsize=512)
def offsets(rows: int, depth: int, size: int, leading: int, stride: int, width: int, is_transposed: bool) -> Any:
    """Bytes from an operand's start to its elements [rows, depth], before swizzling: the canonical layouts of the PTX
    ISA. width: bytes of an atom's rows."""
    r, k = np.arange(rows)[:, None], np.arange(depth)[None, :]
    if is_transposed:
        many = width // size
        found = (r // many) * leading + (r % many) * size + (k // 8) * stride + (k % 8) * width
    elif width == 16:
        found = (r // 8) * stride + (r % 8) * 16 + (k * size // 16) * leading + (k * size) % 16
    else:
        found = (r // 8) * stride + (r % 8) * width + k * size
    return found


@functools.lru_cache(maxsize=512)
def operand(descriptor: int, first: int, rows: int, depth: int, size: int, is_transposed: bool) -> tuple[Any, Any]:
    """Offsets in the block's shared memory of rows first ... of an operand's elements, and of the 16 bytes that each is
    a part of."""
    start, leading, stride = ((descriptor >> shift & 0x3FFF) << 4 for shift in (0, 16, 32))
    if descriptor >> 49 & 7:
        raise NotImplementedError("a base offset")
    width, mask = SWIZZLES[descriptor >> 62]
    found = start + offsets(first + rows, depth, size, leading, stride, width, is_transposed)[first:]
    found ^= (found >> 7 & mask) << 4
    return found, np.unique(found // 16) * 16


def elements(warp: Any, found: Any, name: str) -> Any:
    """fp32 at these offsets of the warp's block."""
    size = BYTES[name]
    inside = (found >= warp.shared.BASE) & (found + size <= warp.shared.BASE + warp.shared.size)
    if not inside.all():
        raise IndexError(f"an operand at {int(found.min()):#x} to {int(found.max()):#x} of shared memory")
    at = found + warp.block.rank * warp.shared.SPAN
    return from_format(warp.shared.views[8 * size][at // size], name)


@instruction("wgmma.mma_async")
def _multiply(op: Op) -> Run:
    columns, depth = (int(number) for number in re.findall(r"[nk](\d+)", op.parts[4]))
    if op.parts[5] != "f32":
        raise NotImplementedError
    of = op.parts[6], op.parts[7]
    results = op.slots(0, 32)
    in_registers = op.args[1].startswith("{")
    held = op.slots(1, 32) if in_registers else []
    left = 0 if in_registers else op.program.slot(op.args[1], op.scope, 64)
    right = op.program.slot(op.args[2], op.scope, 64)
    accumulates = op.program.slot(op.args[3], op.scope, 1)
    signs = [int(text, 0) for text in op.args[4:6]]
    majors = [text == "1" for text in op.args[6:]]
    a_major = majors[0] if len(majors) == 2 else False
    b_major = majors[-1] if majors else False
    if signs != [1, 1] or (a_major and in_registers):
        raise NotImplementedError
    place = places(columns)
    held_place = held_places(len(held), BYTES[of[0]], depth) if in_registers else None

    def multiply(warp: Any, lanes: Any) -> None:
        b_at, b_chunks = operand(int(warp.r[right][0]), 0, columns, depth, BYTES[of[1]], b_major)
        a_at = a_chunks = None
        if not in_registers:
            first = warp.number % 4 * ROWS
            a_at, a_chunks = operand(int(warp.r[left][0]), first, ROWS, depth, BYTES[of[0]], a_major)
        if warp.events and in_registers:
            warp.events.exchange(op.number, lanes)  # what registers were loaded from has been read
        if warp.events:
            warp.events.product(op.number, a_chunks, b_chunks)
        adds = bool(warp.r[accumulates][0])
        before = [warp.pending.get(slot) for slot in results] if adds else []
        words = [warp.r[slot] for slot in held]
        given = [warp.r[slot] for slot in results] if adds and before[0] is None else None
        outcome: dict[int, Any] = {}

        def do() -> None:
            a = _of_registers(words, of[0], held_place, depth) if in_registers else elements(warp, a_at, of[0])
            b = elements(warp, b_at, of[1])
            total = a.astype(np.float64) @ b.T.astype(np.float64)
            if adds:
                old = given if given is not None else [entry[slot] for entry, slot in zip(before, results, strict=True)]
                found = np.empty((ROWS, columns), F32)
                found[place] = np.concatenate(old).view(F32).reshape(-1, LANES)
                total = total + found
            outcome.update(zip(results, total.astype(F32)[place].view(U32), strict=True))

        task = warp.cluster.add(Task(do), warp.queues.setdefault("wgmma", deque()))
        warp.products[-1].append((task, outcome))
        for slot in results:
            warp.pending[slot] = outcome
            warp.r[slot] = UNKNOWN

    return together(multiply)


@functools.cache
def places(columns: int) -> tuple[Any, Any]:
    """Row and column of what each accumulator holds in each thread: [columns / 2, 32]."""
    i = np.arange(columns // 2)[:, None]
    return ROW + 8 * (i // 2 % 2), 8 * (i // 4) + 2 * COLUMN + i % 2


@functools.cache
def held_places(words: int, size: int, depth: int) -> tuple[Any, ...]:
    """Row and column of each element of each of a thread's registers of the left operand: [words, elements, 32]."""
    i, j = np.arange(words)[:, None, None], np.arange(4 // size)[None, :, None]
    row, column = ROW + 8 * (i % 2), depth // 2 * (i // 2) + 4 // size * COLUMN + j
    return tuple(np.broadcast_arrays(row, column))


def _of_registers(words: list[Any], name: str, place: Any, depth: int) -> Any:
    """[16, depth] elements of the registers of each thread."""
    size = BYTES[name]
    shifts = np.arange(0, 32, 8 * size, dtype=U32)[None, :, None]
    bits = (np.stack(words)[:, None, :] >> shifts) & U32((1 << (8 * size)) - 1)
    found = np.empty((ROWS, depth), F32)
    found[place] = from_format(bits, name)
    return found


@instruction("mma.sync")
def _multiply_registers(op: Op) -> Run:
    kinds: dict[tuple[str, ...], str] = {
        ("m16n8k16", "row", "col", "f32", "f16", "f16", "f32"): "f16",
        ("m16n8k32", "row", "col", "f32", "e4m3", "e4m3", "f32"): "e4m3",
    }
    name = kinds.get(tuple(op.parts[3:]))
    if name is None:
        raise NotImplementedError
    results, left, right, sums = (op.slots(i, 32) for i in range(4))
    size = BYTES[name]
    columns, of_a_word, depth = 8, 4 // size, 32 // size
    place = places(columns)

    def multiply(warp: Any, lanes: Any) -> None:
        a = _of_registers([warp.r[slot] for slot in left], name, held_places(4, size, depth), depth)
        words = np.stack([warp.r[slot] for slot in right])
        b = np.empty((columns, depth), F32)
        for i in range(2):
            for j in range(of_a_word):
                bits = words[i] >> U32(8 * size * j) & U32((1 << 8 * size) - 1)
                b[ROW, depth // 2 * i + of_a_word * COLUMN + j] = from_format(bits, name)
        total = np.empty((ROWS, columns), F32)
        total[place] = np.stack([warp.r[slot] for slot in sums]).view(F32)
        total = (total + a.astype(np.float64) @ b.T.astype(np.float64)).astype(F32)
        for slot, value in zip(results, total[place].view(U32), strict=True):
            warp.r[slot] = value

    return exchange(op, multiply)


@instruction("wgmma.commit_group")
def _commit(op: Op) -> Run:
    def commit(warp: Any, lanes: Any) -> None:
        warp.products.append([])
        if warp.events:
            warp.events.product_commit(op.number)

    return together(commit)


@instruction("wgmma.wait_group")
def _wait(op: Op) -> Run:
    newest = int(op.args[0])

    def wait(warp: Any, lanes: Any) -> Any:
        done = warp.products[: max(0, len(warp.products) - 1 - newest)]
        tasks = [task for group in done for task, _ in group]
        if not warp.cluster.wait(warp, lambda: all(task.is_done for task in tasks), "wgmma"):
            return False
        for group in done:
            for _, outcome in group:
                for slot, value in outcome.items():
                    if warp.pending.get(slot) is outcome:
                        warp.r[slot] = value
                        del warp.pending[slot]
        warp.products = warp.products[len(done) :]
        if warp.events:
            warp.events.product_wait(op.number, newest)
        return True

    return together(wait)


@instruction("wgmma.fence")
def _fence(op: Op) -> Run:
    return together(lambda warp, lanes: None)
