# SPDX-License-Identifier: Apache-2.0
"""Bugs planted in PTX: numbers that say where an operand or a store lies, one at a time."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from tests.model.ptx import Op, Program, parse, split

PRODUCTS = r"^(wgmma\.mma_async|tcgen05\.mma)"
STORES = r"^(st\.shared|stmatrix)"
WAITS = r"^(wgmma\.wait_group|tcgen05\.wait::ld|cp\.async\.wait_group)"
CHANGES = {
    "32 bytes on": lambda number: number + 2,
    "1024 bytes on": lambda number: number + 64,
    "another stride": lambda number: number ^ 1 << 38,
    "no swizzle": lambda number: number & ~(7 << 61),
    "another chunk": lambda number: number ^ 16,
    "8 on": lambda number: number + 8,
}

FOUND = (AssertionError, IndexError, NotImplementedError, ValueError)
"""What a bug is found by."""

DEPTH = 5
"""How many instructions back a number may be."""


@dataclass(frozen=True)
class Edit:
    """Of the number `argument` of instruction `op`, to `value`; without an argument the instruction goes."""

    op: int
    name: str
    argument: int = -1
    value: int = 0

    def program(self, text: str) -> Program:
        program = parse(text)
        op = program.ops[self.op]
        if self.argument < 0:
            return program.with_op(replace(op, opcode="membar.cta", args=[]))
        return program.with_op(
            replace(op, args=[*op.args[: self.argument], str(self.value), *op.args[self.argument + 1 :]])
        )


def edits(program: Program) -> Iterator[Edit]:
    """Operands of products elsewhere, or read otherwise; stores elsewhere; results and copies not waited for."""
    for op in program.find(WAITS):
        yield Edit(op.number, "no wait")
    writers = _writers(program)
    seen: set[int] = set()
    for pattern, names in ((PRODUCTS, ("32 bytes on", "1024 bytes on")), (STORES, ("another chunk",))):
        for op in program.find(pattern):
            addresses = [arg for arg in op.args[: 4 if pattern == PRODUCTS else 1] if not arg.startswith("{")]
            for number, argument, value in _numbers(program, writers, op.scope, addresses, DEPTH):
                if number in seen:
                    continue
                seen.add(number)
                if program.ops[number].parts[0] == "mov":
                    chosen: tuple[str, ...] = ("8 on",)  # columns of tensor memory, or what an instruction is like
                else:
                    chosen = (*names, "another stride", "no swizzle") if value >= 1 << 32 else names
                for name in chosen:
                    if name == "1024 bytes on" and program.ops[number].parts[0] == "or":
                        continue  # that bit may be set already
                    yield Edit(number, name, argument, CHANGES[name](value))


def _writers(program: Program) -> dict[int, list[Op]]:
    """Slot -> instructions that write it."""
    found: dict[int, list[Op]] = {}
    for op in program.ops:
        for name in split(op.args[0].strip("{}[] ")) if op.args else ():
            slot = program.known(name, op.scope)
            if slot is not None:
                found.setdefault(slot, []).append(op)
    return found


def _numbers(
    program: Program, writers: dict[int, list[Op]], scope: tuple[int, ...], operands: list[str], depth: int
) -> Iterator[tuple[int, int, int]]:
    """(instruction, argument, value) of the numbers that registers are made with."""
    for name in re.findall(r"[%A-Za-z_]\w*", " ".join(operands)):
        slot = program.known(name, scope)
        made = [] if slot is None else writers.get(slot, [])
        for op in made if len(made) == 1 else ():
            if op.parts[0] not in ("add", "or", "xor", "mov", "cvt") or depth == 0:
                continue
            for i, arg in enumerate(op.args[1:], 1):
                if re.fullmatch(r"-?\d+", arg) and (op.parts[0] != "mov" or depth == DEPTH):
                    yield op.number, i, int(arg) & (1 << 64) - 1
            yield from _numbers(program, writers, op.scope, op.args[1:], depth - 1)


def is_found(check: Callable[..., None], *args: Any, **options: Any) -> bool:
    """Whether the check of a kernel with a bug says that there is one."""
    try:
        check(*args, **options)
    except FOUND:
        return True
    return False


def unfound(planted: Iterable[Edit], text: str, check: Callable[[Program], None]) -> list[Edit]:
    """The bugs that the check of a kernel, whose PTX is `text`, does not find."""
    return [edit for edit in planted if not is_found(check, edit.program(text))]
