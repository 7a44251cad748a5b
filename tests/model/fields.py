# SPDX-License-Identifier: Apache-2.0
"""Instructions on the bits of registers: bytes, fields, counts."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.model.alu import apply, store
from tests.model.ptx import Op, Run, bits_of, instruction
from tests.model.values import I64, U32, U64


@instruction("prmt")
def _permute(op: Op) -> Run:
    if op.parts[1:] != ["b32"]:
        raise NotImplementedError

    constant = op.args[3]
    if re.fullmatch(r"0x[0-9a-fA-F]+|[0-9]+", constant) and not int(constant, 0) & 0x8888:
        order = [int(constant, 0) >> 4 * i & 7 for i in range(4)]

        def choose(low: Any, high: Any) -> Any:
            both = np.stack([low, high], axis=1).view(np.uint8)
            return np.ascontiguousarray(both[:, order]).view(U32)[:, 0]

        return apply(op, choose, op.source(1), op.source(2))

    def permute(low: Any, high: Any, selectors: Any) -> Any:
        both = low.astype(U64) | (high.astype(U64) << U64(32))
        result = np.zeros(len(low), U64)
        for i in range(4):
            selector = (selectors >> U32(4 * i)).astype(U64)
            byte = (both >> ((selector & U64(7)) << U64(3))) & U64(0xFF)
            sign = np.where(byte & U64(0x80), U64(0xFF), U64(0))
            result |= np.where(selector & U64(8), sign, byte) << U64(8 * i)
        return result.astype(U32)

    return apply(op, permute, *(op.source(i) for i in (1, 2, 3)))


@instruction("lop3")
def _logic(op: Op) -> Run:
    table = int(op.args[4], 0)

    def logic(x: Any, y: Any, z: Any) -> Any:
        result = np.zeros_like(x)
        for i in range(8):
            if table >> i & 1:
                result |= (x if i & 4 else ~x) & (y if i & 2 else ~y) & (z if i & 1 else ~z)
        return result

    return apply(op, logic, *(op.source(i) for i in (1, 2, 3)))


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
    def each(function: Callable[[int], int]) -> Callable[[Any], Any]:
        return lambda words: np.array([function(int(word)) for word in words], U32)

    functions: dict[str, Callable[[int], int]] = {
        "popc": lambda x: bin(x).count("1"),
        "clz": lambda x: op.bits - x.bit_length(),
        "brev": lambda x: int(f"{x:032b}"[::-1], 2),
        "bfind": lambda x: (x.bit_length() - 1) & 0xFFFFFFFF,
    }
    if op.parts[0] not in functions or bits_of(op.kind) not in (32, 64):
        raise NotImplementedError
    target = op.program.slot(op.args[0], op.scope, 32)
    source = op.source(1)
    count = each(functions[op.parts[0]])
    return store(target, lambda r: count(r[source]))
