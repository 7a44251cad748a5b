# SPDX-License-Identifier: Apache-2.0
"""Instructions on registers alone: integers, fp32, comparisons, bits."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from tests.model.ptx import LANES, TYPES, Op, Run, computes, instruction, split
from tests.model.values import F32, U32, U64

SIGNED: dict[int, Any] = {8: np.int8, 16: np.int16, 32: np.int32, 64: np.int64}


def store(target: int, value: Callable[[Any], Any]) -> Run:
    """Write value(registers) to the lanes that run."""
    return computes(target, "c0(r)", value)


def apply(op: Op, function: Callable[..., Any], *sources: int) -> Run:
    """Write function(operands)."""
    return computes(op.target(), f"c0({registers(sources)})", function)


def registers(slots: Iterable[int], view: str = "") -> str:
    """Text of operands."""
    return ", ".join(f"r[{slot}]{view}" for slot in slots)


def apply_signed(op: Op, function: Callable[..., Any], *sources: int) -> Run:
    """Write function(operands) of the type's own integers."""
    if not op.kind.startswith("s"):
        return apply(op, function, *sources)
    operands = registers(sources, ".view(c1)")
    return computes(
        op.target(), f"c0({operands}).astype(c1, copy=False).view(c2)", function, SIGNED[op.bits], TYPES[op.bits]
    )


def _fma(x: Any, y: Any, z: Any) -> Any:
    return (x.astype(np.float64) * y + z).astype(F32)


def flushed(op: Op, function: Callable[..., Any]) -> Callable[..., Any]:
    """As it is, or where the opcode says ftz, without subnormal results."""
    if "ftz" not in op.parts:
        return function

    def flush(*values: Any) -> Any:
        result = function(*values)
        return np.where(np.abs(result) < F32(2.0**-126), F32(0), result)

    return flush


FLOATS: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "mul.sat": lambda x, y: np.clip(np.nan_to_num(np.multiply(x, y), nan=0.0, posinf=1.0, neginf=0.0), F32(0), F32(1)),
    "max": lambda *x: np.fmax(np.fmax(x[0], x[1]), x[-1]),
    "min": lambda *x: np.fmin(np.fmin(x[0], x[1]), x[-1]),
    "max.NaN": lambda *x: np.maximum(np.maximum(x[0], x[1]), x[-1]),
    "min.NaN": lambda *x: np.minimum(np.minimum(x[0], x[1]), x[-1]),
    "fma": _fma,
    "neg": np.negative,
    "abs": np.abs,
    "ex2": lambda x: np.exp2(x.astype(np.float64)).astype(F32),
    "lg2": lambda x: np.log2(x.astype(np.float64)).astype(F32),
    "rcp": lambda x: (1 / x.astype(np.float64)).astype(F32),
    "sqrt": np.sqrt,
    "rsqrt": lambda x: (1 / np.sqrt(x.astype(np.float64))).astype(F32),
    "div": np.divide,
}


@instruction("ex2", "lg2", "rcp", "sqrt", "rsqrt", "fma.rn.f32", "fma.rn.ftz.f32", "fma.rz.f32", "div.full", "div.rn")
def _float(op: Op) -> Run:
    name = op.parts[0] + "".join(f".{part}" for part in ("NaN", "sat") if part in op.parts)
    operands = registers((op.source(i) for i in range(1, len(op.args))), ".view(c1)")
    return computes(op.target(), f"c0({operands}).view(c2)", flushed(op, FLOATS[name]), F32, U32)


@instruction("add", "sub", "max", "min", "neg", "abs", "and", "or", "xor", "not")
def _arithmetic(op: Op) -> Run:
    name = op.parts[0]
    sources = [op.source(i) for i in range(1, len(op.args))]
    if op.kind == "f32":
        return _float(op)
    if op.kind in ("f32x2", "bf16x2", "f16x2", "cc", "f64") or op.parts[1] == "cc":
        raise NotImplementedError
    if op.kind == "pred" and name == "not":
        return apply(op, np.logical_not, *sources)
    simple: dict[str, Any] = {
        "add": np.add,
        "sub": np.subtract,
        "and": np.bitwise_and,
        "or": np.bitwise_or,
        "xor": np.bitwise_xor,
        "not": np.invert,
        "neg": lambda x: np.zeros_like(x) - x,
    }
    if name in simple:
        return apply(op, simple[name], *sources)
    compared = {"max": np.maximum, "min": np.minimum, "abs": np.abs}[name]
    if op.kind == "u16x2":
        return apply(op, lambda x, y: compared(x.view(np.uint16), y.view(np.uint16)).view(U32), *sources)
    if "relu" in op.parts:
        return apply_signed(op, lambda x, y: np.maximum(compared(x, y), 0), *sources)
    return apply_signed(op, compared, *sources)


@instruction("mul", "mad")
def _multiply(op: Op) -> Run:
    if op.kind == "f32":
        return _float(op)
    if op.parts[1] not in ("lo", "hi", "wide"):
        raise NotImplementedError
    bits, mode, is_signed = op.bits, op.parts[1], op.kind.startswith("s")
    a, b = op.source(1), op.source(2)
    result_bits = bits * 2 if mode == "wide" else bits
    target = op.program.slot(op.args[0], op.scope, result_bits)
    add = f" + r[{op.program.slot(op.args[3], op.scope, result_bits)}]" if op.parts[0] == "mad" else ""
    if mode == "lo":
        return computes(target, f"r[{a}] * r[{b}]{add}")
    if bits == 64:
        raise NotImplementedError
    kinds = SIGNED if is_signed else TYPES
    x, y = (f"r[{slot}].view(c0).astype(c1)" for slot in (a, b))
    shift = f" >> c1({bits})" if mode == "hi" else ""
    return computes(target, f"({x} * {y}{shift}).astype(c2){add}", kinds[bits], kinds[2 * bits], TYPES[result_bits])


@instruction("div", "rem")
def _divide(op: Op) -> Run:
    def divide(x: Any, y: Any) -> Any:
        wide_x, wide_y = x.astype(object), np.where(y == 0, 1, y).astype(object)
        quotients = [abs(p) // abs(q) * (1 if (p < 0) == (q < 0) else -1) for p, q in zip(wide_x, wide_y, strict=True)]
        if op.parts[0] == "rem":
            quotients = [p - q * r for p, q, r in zip(wide_x, quotients, wide_y, strict=True)]
        return np.array(quotients).astype(x.dtype)

    return apply_signed(op, divide, op.source(1), op.source(2))


@instruction("shl", "shr")
def _shift(op: Op) -> Run:
    bits, is_left = op.bits, op.parts[0] == "shl"
    a, amount = op.source(1), op.program.slot(op.args[2], op.scope, 32)
    kind = SIGNED[bits] if op.kind.startswith("s") else TYPES[bits]

    if op.args[2].isdigit() and int(op.args[2]) < bits:
        by = np.full(LANES, int(op.args[2]), kind)
        if is_left or kind is TYPES[bits]:
            return computes(op.target(), f"r[{a}] {'<<' if is_left else '>>'} c0", by.view(TYPES[bits]))
        return computes(op.target(), f"(r[{a}].view(c1) >> c0).view(c2)", by, kind, TYPES[bits])

    if kind is TYPES[bits] and bits == 32:  # numpy gives 0 where nothing is left, too
        return computes(op.target(), f"r[{a}] {'<<' if is_left else '>>'} r[{amount}].view(c0)", U32)

    def shift(x: Any, by: Any) -> Any:
        if is_left:
            return np.where(by < bits, x << np.minimum(by, bits - 1).astype(x.dtype), 0).astype(x.dtype)
        by = by.astype(U32)
        if kind is TYPES[bits]:
            return np.where(by < bits, x >> np.minimum(by, bits - 1).astype(x.dtype), 0).astype(x.dtype)
        return (x.view(kind) >> np.minimum(by, bits - 1).astype(kind)).view(TYPES[bits])

    return apply(op, shift, a, amount)


@instruction("shf")
def _funnel(op: Op) -> Run:
    is_left, is_wrapped = op.parts[1] == "l", op.parts[2] == "wrap"

    def funnel(low: Any, high: Any, by: Any) -> Any:
        amount = (by & U32(31) if is_wrapped else np.minimum(by, U32(32))).astype(U64)
        both = low.astype(U64) | (high.astype(U64) << U64(32))
        return ((both << amount) >> U64(32) if is_left else both >> amount).astype(U32)

    return apply(op, funnel, *(op.source(i, 32) for i in (1, 2, 3)))


COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "lo": np.less,
    "ls": np.less_equal,
    "hi": np.greater,
    "hs": np.greater_equal,
    "num": lambda x, y: ~(np.isnan(x) | np.isnan(y)),
    "nan": lambda x, y: np.isnan(x) | np.isnan(y),
}


@instruction("setp")
def _compare(op: Op) -> Run:
    name, kind = op.parts[1], op.kind
    view = F32 if kind == "f32" else SIGNED[op.bits] if kind.startswith("s") else TYPES[op.bits]
    is_unordered = kind == "f32" and name not in COMPARISONS
    function = COMPARISONS[name[:-1] if is_unordered else name]
    a, b = op.source(1), op.source(2)

    def compare(x: Any, y: Any) -> Any:
        result = function(x, y)
        if is_unordered:
            return result | np.isnan(x) | np.isnan(y)
        return result & ~(np.isnan(x) | np.isnan(y))

    is_plain = not is_unordered and not (name == "ne" and view is F32)
    same = [slot for slot in (a, b) if getattr(op.program.initial[slot], "dtype", None) == view]
    compared = f"c0({', '.join(f'r[{slot}]' if slot in same else f'r[{slot}].view(c1)' for slot in (a, b))})"
    joined = op.parts[2] if op.parts[2] in ("and", "or", "xor") else ""
    names = op.args[0].split("|")
    target = op.program.slot(names[0], op.scope, 1)
    if len(names) > 1:
        raise NotImplementedError
    if not joined:
        return computes(target, compared, function if is_plain else compare, view)
    c = op.program.slot(op.args[3], op.scope, 1)
    join = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}[joined]
    return computes(target, f"c2({compared}, r[{c}])", function if is_plain else compare, view, join)


@instruction("selp")
def _select(op: Op) -> Run:
    a, b, c = op.source(1), op.source(2), op.program.slot(op.args[3], op.scope, 1)
    return computes(op.target(), f"c0(r[{c}], r[{a}], r[{b}])", np.where)


@instruction("mov")
def _move(op: Op) -> Run:
    if op.args[0].startswith("{"):
        names = split(op.args[0].strip("{} "))
        part = op.bits // len(names)
        targets = [op.program.slot(name, op.scope, part) for name in names]
        source, kind = op.source(1), TYPES[part]

        def run(warp: Any, lanes: Any) -> None:
            word = warp.r[source]
            for i, target in enumerate(targets):
                value = (word >> word.dtype.type(i * part)).astype(kind)
                warp.r[target] = value if lanes is None else np.where(lanes, value, warp.r[target])

        return run
    if op.args[1].startswith("{"):
        names = split(op.args[1].strip("{} "))
        part, kind = op.bits // len(names), TYPES[op.bits]
        sources = [op.program.slot(name, op.scope, part) for name in names]

        def joined(r: Any) -> Any:
            total = r[sources[0]].astype(kind)
            for i, source in enumerate(sources[1:], 1):
                total = total | (r[source].astype(kind) << kind(i * part))
            return total

        return store(op.target(), joined)
    return computes(op.target(), f"r[{op.source(1)}]")
