# SPDX-License-Identifier: Apache-2.0
"""Instructions on the bits of registers: bytes, fields, counts."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.model.alu import apply, store
from tests.model.ptx import LANES, Op, Run, bits_of, computes, instruction
from tests.model.values import I64, U32, U64

SHIFTS = np.arange(0, 16, 4, U32)
"""Of the selectors of prmt."""


@instruction("prmt")
def _permute(op: Op) -> Run:
    if op.parts[1:] != ["b32"]:
        raise NotImplementedError

    constant = op.args[3]
    if re.fullmatch(r"0x[0-9a-fA-F]+|[0-9]+", constant) and not int(constant, 0) & 0x8888:
        return _permute_by(op, [int(constant, 0) >> 4 * i & 7 for i in range(4)])

    def permute(low: Any, high: Any, selectors: Any) -> Any:
        both = np.stack((low, high), axis=1).view(np.uint8)
        chosen = selectors[:, None] >> SHIFTS
        found = both[np.arange(len(low))[:, None], chosen & U32(7)]
        is_sign = (chosen & U32(8)).astype(np.bool_)
        if is_sign.any():
            found = np.where(is_sign, -(found >> 7), found)
        return found.view(U32)[:, 0]

    return apply(op, permute, *(op.source(i) for i in (1, 2, 3)))


def _permute_by(op: Op, order: list[int]) -> Run:
    """Byte i of the result is byte order[i] of two words. Bytes that move alike move together."""
    moves: dict[tuple[int, int], int] = {}
    for i, byte in enumerate(order):
        move = byte // 4, i - byte % 4
        moves[move] = moves.get(move, 0) | 0xFF << 8 * i
    terms, constants = [], []
    for (word, by), mask in moves.items():
        there = (0xFFFFFFFF << 8 * by if by > 0 else 0xFFFFFFFF >> -8 * by) & 0xFFFFFFFF
        term = f"r[{op.source(1 + word)}]"
        for sign, number in (("<<" if by > 0 else ">>", abs(8 * by)), ("&", mask)):
            if number not in (0, there):
                term = f"({term} {sign} c{len(constants)})"
                constants.append(np.full(LANES, number, U32))
        terms.append(term)
    return computes(op.target(), " | ".join(terms), *constants)


OF_TWO = (
    *("zeros_like(x)", "~(x | y)", "~x & y", "~x", "x & ~y", "~y", "x ^ y", "~(x & y)", "x & y", "~(x ^ y)", "y"),
    *("~x | y", "x", "x | ~y", "x | y", "~zeros_like(x)"),
)
"""Functions of the bits of two words, by what they are where these are (0, 0), (0, 1), (1, 0), (1, 1): lowest first."""


def _of_three(table: int) -> str:
    """A function of three words: what it is where the third is 0, and what that changes where it is not."""
    zero, one = (sum((table >> 2 * i + z & 1) << i for i in range(4)) for z in (0, 1))
    if zero == one:
        return OF_TWO[zero]
    changes = {15: "z"}.get(zero ^ one, f"({OF_TWO[zero ^ one]}) & z")
    return changes if zero == 0 else f"({OF_TWO[zero]}) ^ ({changes})"


@instruction("lop3")
def _logic(op: Op) -> Run:
    words = {name: f"r[{op.source(i)}]" for i, name in enumerate("xyz", 1)}
    text = re.sub(r"\b[xyz]\b", lambda found: words[found[0]], _of_three(int(op.args[4], 0)))
    return computes(op.target(), text.replace("zeros_like", "c0"), np.zeros_like)


@instruction("bfe.u32", "bfe.s32")
def _extract(op: Op) -> Run:
    is_signed = op.kind == "s32"

    def extract(x: Any, start: Any, count: Any) -> Any:
        first, number = (start & U32(255)).astype(U64), (count & U32(255)).astype(I64)
        field = (x.astype(U64) >> np.minimum(first, U64(63))) & ((U64(1) << number.astype(U64)) - U64(1))
        if is_signed:
            field = (field.view(I64) << (64 - number)) >> (64 - number)
        return field.astype(U32)

    return apply(op, extract, *(op.program.slot(op.args[i], op.scope, 32) for i in (1, 2, 3)))


@instruction("bfi.b32")
def _insert(op: Op) -> Run:
    a, b, start, count = (op.program.slot(op.args[i], op.scope, 32) for i in (1, 2, 3, 4))

    def insert(r: Any) -> Any:
        first, number = (r[start] & U32(255)).astype(U64), (r[count] & U32(255)).astype(U64)
        mask = ((U64(1) << number) - U64(1)) << first
        return ((r[b].astype(U64) & ~mask) | ((r[a].astype(U64) << first) & mask)).astype(U32)

    return store(op.target(), insert)


@instruction("popc", "clz", "brev", "bfind", "fns")
def _count(op: Op) -> Run:
    functions: dict[str, Callable[[Any], Any]] = {
        "popc": lambda words: np.unpackbits(words.view(np.uint8).reshape(len(words), -1), axis=1).sum(axis=1),
        "clz": lambda words: op.bits - _bit_lengths(words),
        "brev": lambda words: np.array([int(f"{int(word):032b}"[::-1], 2) for word in words]),
        "bfind": lambda words: _bit_lengths(words) - 1,
    }
    if op.parts[0] not in functions or bits_of(op.kind) not in (32, 64):
        raise NotImplementedError
    target = op.program.slot(op.args[0], op.scope, 32)
    source = op.source(1)
    return computes(target, f"c0(r[{source}]).astype(c1)", functions[op.parts[0]], U32)


def _bit_lengths(words: Any) -> Any:
    half = words.dtype.type(16)  # a float64 holds each part
    upper, lower = (np.frexp(part.astype(np.float64))[1] for part in (words >> half, words & words.dtype.type(0xFFFF)))
    return np.where(upper > 0, upper + 16, lower)
