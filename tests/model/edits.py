"""Bugs planted in PTX: numbers that say where an operand or a store lies, one at a time."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

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
}


@dataclass(frozen=True)
class Edit:
    """Of the number `argument` of instruction `op`, to `value`; without an argument the instruction goes."""

    op: int
    name: str
    argument: int = -1
    value: int = 0

    def program(self, text: str) -> Program:
        return parse(text, self._apply)

    def _apply(self, program: Program) -> None:
        op = program.ops[self.op]
        if self.argument < 0:
            op.opcode, op.args = "membar.cta", []
        else:
            op.args[self.argument] = str(self.value)


def edits(program: Program) -> Iterator[Edit]:
    """Operands of products elsewhere, or read otherwise; stores elsewhere; results and copies not waited for."""
    for op in program.find(WAITS):
        yield Edit(op.number, "no wait")
    writers = _writers(program)
    seen: set[int] = set()
    for pattern, names in ((PRODUCTS, ("32 bytes on", "1024 bytes on")), (STORES, ("another chunk",))):
        for op in program.find(pattern):
            addresses = [arg for arg in op.args[: 3 if pattern == PRODUCTS else 1] if not arg.startswith("{")]
            for number, argument, value in _numbers(program, writers, addresses, 5):
                if number in seen:
                    continue
                seen.add(number)
                is_descriptor = value >= 1 << 32
                for name in ("another stride", "no swizzle") if is_descriptor else names:
                    if name == "1024 bytes on" and program.ops[number].parts[0] == "or":
                        continue  # that bit may be set already
                    yield Edit(number, name, argument, CHANGES[name](value))


def _writers(program: Program) -> dict[str, list[Op]]:
    found: dict[str, list[Op]] = {}
    for op in program.ops:
        for name in split(op.args[0].strip("{}[] ")) if op.args else ():
            found.setdefault(name, []).append(op)
    return found


def _numbers(
    program: Program, writers: dict[str, list[Op]], operands: list[str], depth: int
) -> Iterator[tuple[int, int, int]]:
    """(instruction, argument, value) of the numbers that registers are made with."""
    for name in re.findall(r"%r[d]?\d+", " ".join(operands)):
        made = writers.get(name, [])
        for op in made if len(made) == 1 else ():
            if op.parts[0] not in ("add", "or", "xor", "mov", "cvt") or depth == 0:
                continue
            for i, arg in enumerate(op.args[1:], 1):
                if re.fullmatch(r"-?\d+", arg) and op.parts[0] != "mov":
                    yield op.number, i, int(arg) & (1 << 64) - 1
            yield from _numbers(program, writers, op.args[1:], depth - 1)
