# SPDX-License-Identifier: Apache-2.0
"""PTX text as a list of instructions: registers and constants become slots of a warp's register file, labels numbers.

A slot holds a numpy vector of 32 lanes: bool of predicates, uint16, uint32 or uint64 of everything else. Constants, and
what a warp reads of itself (%tid.x ...), have slots like registers.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

LANES = 32
TYPES: dict[int, Any] = {1: np.bool_, 8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
"""Bits of a register -> its lanes; 1 is a predicate."""

Run = Callable[[Any, Any], Any]
"""What an instruction compiles to: (warp, lanes that run it: None is all 32, else bool [32]) -> whether it could run,
where it may have to wait; else nothing."""

TRUE, FALSE = bytes([1]) * LANES, bytes(LANES)
"""Predicates that all lanes agree on, as bytes: to compare these is much quicker than to ask numpy."""

LONGEST = 32
"""Instructions of a block at most."""

OFTEN = 16
"""Times that a block runs instruction by instruction before it becomes one function."""

_COMPILERS: dict[str, Callable[[Op], Run]] = {}


def instruction(*names: str) -> Callable[[Callable[[Op], Run]], Callable[[Op], Run]]:
    """Have a function compile the instructions whose opcodes begin with one of these names, the longest one counts."""

    def register(compiler: Callable[[Op], Run]) -> Callable[[Op], Run]:
        _COMPILERS.update(dict.fromkeys(names, compiler))
        return compiler

    return register


@functools.cache
def bits_of(kind: str) -> int:
    """Of a type's name: 32 of "b32", 1 of "pred"."""
    digits = re.search(r"(\d+)$", kind)
    return int(digits.group(1)) if digits else 1


@dataclass(frozen=True)
class Parameter:
    """Of a kernel: where it lies among all of them, and its bytes."""

    name: str
    kind: str
    offset: int
    size: int


@dataclass(eq=False)
class Op:
    """An instruction: `parts` of its opcode, operands as text, who it is among all of them."""

    program: Program
    number: int
    text: str
    opcode: str
    args: list[str]
    scope: tuple[int, ...]
    predicate: tuple[str, bool] | None = None
    """A predicate and whether it has to be false."""

    @functools.cached_property
    def parts(self) -> list[str]:
        return self.opcode.split(".")

    @functools.cached_property
    def kind(self) -> str:
        """The type it ends with."""
        return self.parts[-1]

    @property
    def bits(self) -> int:
        return bits_of(self.kind)

    def source(self, index: int, bits: int = 0) -> int:
        """Slot of an operand; of a constant with so many bits, those of the type if 0."""
        return self.program.slot(self.args[index], self.scope, bits or self.bits)

    def target(self, index: int = 0) -> int:
        return self.program.slot(self.args[index], self.scope, self.bits)

    def slots(self, index: int, bits: int = 0) -> list[int]:
        """Of {a, b ...}, or of one operand."""
        names = split(self.args[index].strip("{} "))
        return [self.program.slot(name, self.scope, bits or self.bits) for name in names]

    def address(self, index: int, bits: int) -> tuple[int, int]:
        """[register + number]: slot and number."""
        text = self.args[index].strip("[] ")
        found = re.fullmatch(r"(.+?)\s*\+\s*(-?\w+)", text)
        name, offset = (found.group(1), int(found.group(2), 0)) if found else (text, 0)
        return self.program.slot(name, self.scope, bits), offset


@dataclass(frozen=True)
class Branch:
    """Lanes whose predicate is true, or false if is_negated, go to instruction `target`, or away if that is -1."""

    predicate: int | None
    is_negated: bool
    target: int


BlockRun = Callable[[Any, list[Any], Any], int]


@dataclass(eq=False)
class Block:
    """Instructions from number `first` on that follow each other: from a label, or from what ends a block, which is a
    branch, an instruction that may have to wait, or LONGEST of them.

    runs   all of them as one function of a warp, its registers and the lanes that run, for some lanes and for all 32,
           once they have run often. It returns how many are done: fewer than all if the next one has to wait
    asked  how often they have run, for some lanes and for all
    """

    first: int
    size: int
    runs: list[BlockRun | None] = field(default_factory=lambda: [None, None])
    asked: list[int] = field(default_factory=lambda: [0, 0])


@dataclass
class Program:
    """Entry point `name` of a PTX text.

    slots     of the register file: (name, scope) -> number; lanes, or what gives them for a warp, by number
    ops       instructions, by number
    labels    (name, scope) -> number of the instruction behind it
    runs      what the instructions compile to; branches: of those that are one, who goes where
    blocks    by number of the first instruction; None where none begins
    """

    name: str
    parameters: list[Parameter]
    threads: int
    names: dict[tuple[str, tuple[int, ...]], int] = field(default_factory=dict)
    initial: list[Any] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    labels: dict[tuple[str, tuple[int, ...]], int] = field(default_factory=dict)
    shared_symbols: list[str] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    branches: list[Branch | None] = field(default_factory=list)
    blocks: list[Block | None] = field(default_factory=list)
    mentions: Counter[str] = field(default_factory=Counter)

    def slot(self, name: str, scope: tuple[int, ...], bits: int) -> int:
        """Of a register, a constant, a special register or the name of a variable."""
        known = self.known(name, scope)
        if known is not None:
            return known
        if name == "_":
            return self._add(f"_{bits}", (), np.zeros(LANES, TYPES[bits]))
        if name.startswith("%") or name in self.shared_symbols:
            return self._add(name, (), name)
        parameter = next((p for p in self.parameters if p.name == name), None)
        if parameter is not None:
            return self._add(name, (), PARAMETERS + parameter.offset)
        value = self._constant(name, bits)
        return self._add(f"{value}:{bits}", (), np.full(LANES, value, np.uint64).astype(TYPES[bits]))

    def known(self, name: str, scope: tuple[int, ...]) -> int | None:
        """Slot of a name that has one, as a scope sees it."""
        while (name, scope) not in self.names and scope:
            scope = scope[:-1]
        return self.names.get((name, scope))

    def _constant(self, text: str, bits: int) -> int:
        found = re.fullmatch(r"0[fFdD]([0-9a-fA-F]+)", text)
        value = int(found.group(1), 16) if found else int(text.rstrip("U"), 0)
        return value & ((1 << bits) - 1)

    def _add(self, name: str, scope: tuple[int, ...], value: Any) -> int:
        if (name, scope) not in self.names:
            self.names[name, scope] = len(self.initial)
            self.initial.append(value)
        return self.names[name, scope]

    def declare(self, name: str, scope: tuple[int, ...], bits: int) -> None:
        self.names[name, scope] = len(self.initial)
        self.initial.append(np.zeros(LANES, TYPES[bits]))

    def target(self, op: Op, index: int = 0) -> int:
        """Number of the instruction that a branch goes to."""
        scope = op.scope
        while (op.args[index], scope) not in self.labels:
            scope = scope[:-1]
        return self.labels[op.args[index], scope]

    def is_used(self, name: str) -> bool:
        """Whether a register that an instruction writes is named by another one, too."""
        if not self.mentions:
            self.mentions.update(re.findall(r"[%\w]+", " ".join(op.text for op in self.ops)))
        return self.mentions[name] > 1

    def with_op(self, op: Op) -> Program:
        """A copy with another instruction in place of the one of its number."""
        copy = replace(self, names=dict(self.names), initial=self.initial[:], ops=self.ops[:], runs=self.runs[:])
        copy.ops[op.number] = replace(op, program=copy)
        run = _run_of(copy.ops[op.number])
        if run is None:
            raise NotImplementedError(op.text)
        copy.runs[op.number] = run
        copy.blocks = [
            Block(block.first, block.size) if block and 0 <= op.number - block.first < block.size else block
            for block in self.blocks
        ]
        return copy

    def function(self, block: Block, of_all: bool) -> BlockRun | None:
        """Of a block for all lanes or for some, if it has run often."""
        block.asked[of_all] += 1
        if block.runs[of_all] is None and block.asked[of_all] > OFTEN:
            block.runs[of_all] = _function_of(self.runs[block.first : block.first + block.size], of_all)
        return block.runs[of_all]

    def find(self, pattern: str) -> list[Op]:
        """Instructions whose text matches."""
        return [op for op in self.ops if re.search(pattern, op.text)]


PARAMETERS = 1 << 44
"""Where a kernel's parameters lie."""


BRACKET = re.compile(r"[][{}()]")


def split(text: str) -> list[str]:
    """At commas outside of brackets."""
    if not BRACKET.search(text):
        return [part for part in map(str.strip, text.split(",")) if part]
    parts, depth, start = [], 0, 0
    for i, c in enumerate(text):
        depth += (c in "{[(") - (c in "}])")
        if c == "," and depth == 0:
            parts.append(text[start:i].strip())
            start = i + 1
    parts.append(text[start:].strip())
    return [part for part in parts if part]


@functools.lru_cache(maxsize=16)
def parse(text: str) -> Program:
    """The first entry point of a PTX text, compiled. ValueError names all opcodes that the model does not know."""
    text = re.sub(r"//[^\n]*", "", text)
    head, body = text[text.index(".entry") :].split("{", 1)
    name = head.split("(")[0].split()[1]
    threads = re.search(r"\.(?:reqntid|maxntid)\s+(\d+)", head)
    program = Program(name, _parameters(head), int(threads.group(1)) if threads else 0)
    program.shared_symbols = re.findall(r"\.shared\s[^;]*?(\w+)\[\]", text)
    scope: tuple[int, ...] = ()
    scopes, depth, statement = 0, 0, ""
    for piece in re.findall(r"[{};]|[^{};]+", body):
        if piece == "{" and not statement.strip():
            scopes += 1
            scope = (*scope, scopes)
        elif piece == "}" and not depth:
            if not scope:
                break
            scope = scope[:-1]
        elif piece == ";" and not depth:
            _statement(program, statement.strip(), scope)
            statement = ""
        else:
            depth += (piece == "{") - (piece == "}")
            statement += piece
            statement = _labels(program, statement, scope)
    _compile(program)
    return program


def _parameters(head: str) -> list[Parameter]:
    parameters, offset = [], 0
    for align, kind, name, count in re.findall(r"\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+(\w+)(?:\[(\d+)\])?", head):
        size = bits_of(kind) // 8 * int(count or 1)
        multiple = int(align or size)
        offset = -(-offset // multiple) * multiple
        parameters.append(Parameter(name, kind, offset, size))
        offset += size
    return parameters


def _labels(program: Program, statement: str, scope: tuple[int, ...]) -> str:
    """What follows the labels that a statement begins with."""
    while found := re.match(r"\s*([\w$]+)\s*:(?!:)", statement):
        program.labels[found.group(1), scope] = len(program.ops)
        statement = statement[found.end() :]
    return statement


def _statement(program: Program, text: str, scope: tuple[int, ...]) -> None:
    if not text:
        return
    if text.startswith("."):
        found = re.match(r"\.reg\s+\.(\w+)\s+(.*)", text, re.DOTALL)
        if found is None:
            return
        bits = bits_of(found.group(1))
        for name in split(found.group(2)):
            many = re.fullmatch(r"(.+)<(\d+)>", name)
            for one in [f"{many.group(1)}{i}" for i in range(int(many.group(2)))] if many else [name]:
                program.declare(one, scope, bits)
        return
    found = re.match(r"(?:@(!?)([%\w]+)\s+)?([\w.:]+)\s*(.*)$", text, re.DOTALL)
    if found is None:
        raise ValueError(f"expected an instruction, got {text!r}")
    negated, predicate, opcode, args = found.groups()
    op = Op(program, len(program.ops), " ".join(text.split()), opcode, split(args), scope)
    op.predicate = (predicate, bool(negated)) if predicate else None
    program.ops.append(op)


def _compile(program: Program) -> None:
    program.branches += [_branch_of(op) for op in program.ops]
    runs = [_run_of(op) for op in program.ops]
    unknown = {op.opcode for op, run in zip(program.ops, runs, strict=True) if run is None}
    if unknown:
        raise ValueError(f"{program.name}: expected instructions that the model knows, got {sorted(unknown)}")
    program.runs += [run for run in runs if run is not None]
    program.blocks += _blocks_of(program)


def _blocks_of(program: Program) -> list[Block | None]:
    blocks: list[Block | None] = [None] * len(program.ops)
    labels, block = {*program.labels.values()}, None
    for i, op in enumerate(program.ops):
        if is_branch(op):
            block = None
            continue
        if block is None or i in labels or block.size == LONGEST:
            block = blocks[i] = Block(i, 0)
        block.size += 1
        if op.parts[0] in ("bar", "barrier") or "wait" in op.opcode:
            block = None
    return blocks


def _function_of(runs: list[Run], of_all: bool) -> BlockRun:
    """Made of the text of what only computes, and of calls of the others. What one raises says which one in `at`."""
    names: dict[str, Any] = {"TRUE": TRUE, "FALSE": FALSE, "where": np.where}
    mask = "None" if of_all else "lanes"
    lines = [f"    {line}" for i, run in enumerate(runs) for line in (f"at = {i}", *_lines(run, i, names, mask))]
    end = ["  except Exception as error:", "    error.at = at", "    raise", f"  return {len(runs)}"]
    exec("\n".join(["def run(warp, r, lanes):", "  try:", *lines, *end]), names)
    made: BlockRun = names["run"]
    return made


def _lines(run: Run, number: int, names: dict[str, Any], lanes: str) -> list[str]:
    guard, formula = getattr(run, "guard", None), getattr(run, "formula", None)
    if guard is not None:
        predicate, is_negated, guarded = guard
        some, of_all = ([f"  {line}" for line in _lines(guarded, number, names, mask)] for mask in ("own", "None"))
        if lanes != "None":
            return [f"own = {'~' * is_negated}r[{predicate}] & lanes", "if own.tobytes() != FALSE:", *some]
        own = f"own = {'~' * is_negated}r[{predicate}]; flags = own.tobytes()"
        return [own, "if flags == TRUE:", *of_all, "elif flags != FALSE:", *some]
    if formula is None:
        names[f"run{number}"] = run
        return [f"if run{number}(warp, {lanes}) is False: return at"]
    names.update((f"{name}_{number}", value) for name, value in formula.constants.items())
    value = re.sub(r"\bc\d\b", lambda found: f"{found[0]}_{number}", formula.text)
    target = f"r[{formula.target}]"
    return [f"{target} = {value}" if lanes == "None" else f"{target} = where({lanes}, {value}, {target})"]


@dataclass(frozen=True)
class Formula:
    """What an instruction that only computes writes to a register: Python text, of registers r[slot] and of constants
    c0, c1 ..."""

    target: int
    text: str
    constants: dict[str, Any]


def computes(target: int, text: str, *constants: Any) -> Run:
    """Writes to the lanes that run: see Formula."""
    formula = Formula(target, text, {f"c{i}": value for i, value in enumerate(constants)})
    slots: list[int] = []

    def variable(found: re.Match[str]) -> str:
        slots.append(int(found[1]))
        return f"r[s{len(slots) - 1}]"

    value = _factory(re.sub(r"\br\[(\d+)\]", variable, text), len(slots), len(constants))(*slots, *constants)

    def run(warp: Any, lanes: Any) -> None:
        registers = warp.r
        new = value(registers)
        registers[target] = new if lanes is None else np.where(lanes, new, registers[target])

    run.formula = formula  # type: ignore[attr-defined]
    return run


@functools.cache
def _factory(text: str, slots: int, constants: int) -> Callable[..., Callable[[Any], Any]]:
    """From slots and constants to the function of registers."""
    names = [*(f"s{i}" for i in range(slots)), *(f"c{i}" for i in range(constants))]
    made: Callable[..., Callable[[Any], Any]] = eval(f"lambda {', '.join(names)}: lambda r: {text}")
    return made


def _run_of(op: Op) -> Run | None:
    """None of an instruction that the model does not know."""
    if is_branch(op):
        return _nothing
    parts = op.parts
    names = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
    try:
        run = next((_COMPILERS[name] for name in names if name in _COMPILERS), _refuse)(op)
    except NotImplementedError:
        return None
    except Exception as error:
        raise ValueError(f"{op.text!r}: {error!r}") from error
    return run if op.predicate is None else _predicated(op, run, *op.predicate)


def _branch_of(op: Op) -> Branch | None:
    if not is_branch(op):
        return None
    name, is_negated = op.predicate or ("", False)
    target = op.program.target(op) if op.parts[0] == "bra" else -1
    return Branch(op.program.slot(name, op.scope, 1) if name else None, is_negated, target)


def _nothing(warp: Any, lanes: Any) -> None:
    """Of a branch, which the machine takes by itself."""


def is_branch(op: Op) -> bool:
    return op.parts[0] in ("bra", "ret", "exit")


def _refuse(op: Op) -> Run:
    raise NotImplementedError


def _predicated(op: Op, run: Run, name: str, is_negated: bool) -> Run:
    slot = op.program.slot(name, op.scope, 1)

    def guarded(warp: Any, lanes: Any) -> Any:
        own = ~warp.r[slot] if is_negated else warp.r[slot]
        if lanes is not None:
            own = own & lanes
        flags = own.tobytes()
        if flags == TRUE:
            return run(warp, None)
        return run(warp, own) if flags != FALSE else True

    guarded.guard = slot, is_negated, run  # type: ignore[attr-defined]
    return guarded
