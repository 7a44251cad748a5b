# SPDX-License-Identifier: Apache-2.0
"""Conversions between number formats, and arithmetic on two or four numbers in one register."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.dsl.words import e2m1_code, ue8m0_byte
from tests.model.alu import FLOATS, SIGNED, apply, store
from tests.model.ptx import TYPES, Op, Run, computes, instruction
from tests.model.values import (
    E2M1_F32,
    E4M3_F32,
    F32,
    U16,
    U32,
    U64,
    from_bf16,
    from_f16,
    high,
    low,
    pack,
    to_bf16,
    to_e4m3,
    to_f16,
)

FROM: dict[str, Callable[[Any], Any]] = {"bf16x2": from_bf16, "f16x2": from_f16}
TO: dict[str, Callable[[Any], Any]] = {"bf16x2": to_bf16, "f16x2": to_f16}


@instruction("cvt", "cvta", "cvta.to")
def _convert(op: Op) -> Run:
    if op.parts[0] == "cvta":
        source = op.source(1, 64)
        return computes(op.target(), f"r[{source}]")
    kinds = [part for part in op.parts[1:] if part.rstrip("0123456789x") or part[0] in "sufb"]
    kinds = [
        part for part in kinds if part not in ("rn", "rz", "rm", "rp", "rni", "rzi", "ftz", "sat", "satfinite", "relu")
    ]
    to, of = kinds[0], kinds[1]
    packed = _packed(op, to, of)
    if packed is not None:
        return packed
    rounding = next((part for part in op.parts if part in ("rn", "rz", "rm", "rp", "rni", "rzi", "rmi", "rpi")), "")
    to_bits, of_bits = int(to[1:]), int(of[1:])
    source = op.program.slot(op.args[1], op.scope, max(of_bits, 16))
    target = op.program.slot(op.args[0], op.scope, max(to_bits, 16))
    result = TYPES[max(to_bits, 16)]
    if to == "f32" and of[0] in "su":
        kind = SIGNED[of_bits] if of[0] == "s" else TYPES[of_bits]
        return store(target, lambda r: r[source].astype(TYPES[of_bits]).view(kind).astype(F32).view(U32))
    if of == "f32" and to[0] in "su":
        integer = SIGNED[to_bits] if to[0] == "s" else TYPES[to_bits]
        limits = np.iinfo(integer)
        rounded = {"rn": np.rint, "rz": np.trunc, "rm": np.floor, "rp": np.ceil}[rounding[:2]]

        def to_integer(r: Any) -> Any:
            value = np.nan_to_num(rounded(r[source].view(F32).astype(np.float64)), nan=0.0)
            return np.clip(value, float(limits.min), float(limits.max)).astype(integer).astype(result)

        return store(target, to_integer)
    if to[0] == "f" or of[0] == "f":
        raise NotImplementedError
    kind = SIGNED[of_bits] if of[0] == "s" else TYPES[of_bits]
    narrow = TYPES[to_bits] if to[0] != "s" else SIGNED[to_bits]

    if min(of_bits, to_bits) >= 16:  # the usual case, without what changes nothing
        value = f"r[{source}]"
        if getattr(op.program.initial[source], "dtype", None) != TYPES[of_bits]:
            value += ".astype(c0)"
        if kind is not TYPES[of_bits]:
            value += ".view(c1)"
        value += ".astype(c2)" if narrow is TYPES[to_bits] else ".astype(c2).view(c3)"
        return computes(target, value, TYPES[of_bits], kind, narrow, TYPES[to_bits])

    def integers(r: Any) -> Any:
        value = r[source].astype(TYPES[of_bits]).view(kind).astype(narrow)
        return value if value.dtype == result else value.astype(result)

    return store(target, integers)


def _packed(op: Op, to: str, of: str) -> Run | None:
    """Conversions of two numbers at a time, and of fp32 to a 16-bit format."""
    if to in TO and of == "f32":
        upper, lower = op.source(1), op.source(2)
        target = op.program.slot(op.args[0], op.scope, 32)
        to_half = TO[to]
        return store(target, lambda r: pack(to_half(r[lower].view(F32)), to_half(r[upper].view(F32))))
    if (to, of) in (("bf16", "f32"), ("f16", "f32")):
        source, target = op.source(1, 32), op.program.slot(op.args[0], op.scope, 16)
        to_one = TO[f"{to}x2"]
        return store(target, lambda r: to_one(r[source].view(F32)).astype(U16))
    if (of, to) in (("bf16", "f32"), ("f16", "f32")):
        source, target = op.source(1, 16), op.program.slot(op.args[0], op.scope, 32)
        from_one = FROM[f"{of}x2"]
        return store(target, lambda r: from_one(r[source]).view(U32))
    if to in TO and of in ("e4m3x2", "e2m1x2", "ue8m0x2"):
        source = op.program.slot(op.args[1], op.scope, 8 if of == "e2m1x2" else 16)
        target, to_half = op.program.slot(op.args[0], op.scope, 32), TO[to]

        def decode(r: Any) -> Any:
            codes = r[source].astype(U32)
            if of == "e2m1x2":
                pair = E2M1_F32[codes & U32(15)], E2M1_F32[(codes >> U32(4)) & U32(15)]
            elif of == "e4m3x2":
                pair = E4M3_F32[codes & U32(255)], E4M3_F32[(codes >> U32(8)) & U32(255)]
            else:
                exponents = [(codes & U32(255)).astype(np.int64), ((codes >> U32(8)) & U32(255)).astype(np.int64)]
                one, two = (np.where(e == 255, np.nan, 2.0 ** (e - 127.0)).astype(F32) for e in exponents)
                pair = one, two
            return pack(to_half(pair[0]), to_half(pair[1]))

        return store(target, decode)
    if of == "f32" and to in ("e2m1x2", "ue8m0x2"):
        code, shift, bits = (e2m1_code, 4, 8) if to == "e2m1x2" else (ue8m0_byte, 8, 16)
        upper, lower, target = op.source(1, 32), op.source(2, 32), op.program.slot(op.args[0], op.scope, bits)
        return store(
            target,
            lambda r: (code(r[lower].view(F32)) | code(r[upper].view(F32)) << U32(shift)).astype(TYPES[bits]),
        )
    if to == "e4m3x2" and of in ("f32", *FROM):
        target = op.program.slot(op.args[0], op.scope, 16)
        if of == "f32":
            upper, lower = op.source(1, 32), op.source(2, 32)
            return store(
                target, lambda r: (to_e4m3(r[lower].view(F32)) | (to_e4m3(r[upper].view(F32)) << U32(8))).astype(U16)
            )
        both, half = op.source(1, 32), FROM[of]
        return store(
            target, lambda r: (to_e4m3(half(low(r[both]))) | (to_e4m3(half(high(r[both]))) << U32(8))).astype(U16)
        )
    return None


def _pairs(op: Op) -> Run:
    """An instruction on both halves of a word; fp32 in between, fma rounds once."""
    kind, name = op.kind, op.parts[0]
    of, to = FROM[kind], TO[kind]
    function: Callable[..., Any] = FLOATS[name]
    if name == "fma":

        def function(x: Any, y: Any, z: Any) -> Any:
            return (x.astype(np.float64) * y + z).astype(F32)

    def both(*words: Any) -> Any:
        return to(function(*(of(np.ascontiguousarray(w).view(U16)) for w in words))).astype(U16).view(U32)

    return apply(op, both, *(op.source(i, 32) for i in range(1, len(op.args))))


@instruction("max.xorsign.abs.bf16x2", "max.xorsign.abs.f16x2", "min.xorsign.abs.bf16x2", "min.xorsign.abs.f16x2")
def _magnitudes(op: Op) -> Run:
    """The larger or smaller magnitude, NaN losing, with the product of the signs."""
    choose = np.fmax if op.parts[0] == "max" else np.fmin
    of, to = FROM[op.kind], TO[op.kind]

    def half(x: Any, y: Any) -> Any:
        magnitude = to(choose(np.abs(of(x)), np.abs(of(y))))
        return magnitude | ((x ^ y) & U32(0x8000))

    def both(x: Any, y: Any) -> Any:
        return pack(half(low(x), low(y)), half(high(x), high(y)))

    return apply(op, both, op.source(1, 32), op.source(2, 32))


def _pairs_f32(op: Op) -> Run:
    """An instruction on both fp32 of 64 bits."""
    on_floats = FLOATS[op.parts[0]]

    def function(*words: Any) -> Any:
        return on_floats(*(word.view(F32) for word in words)).view(U32)

    def both(*pairs: Any) -> Any:
        lower = function(*((pair & U64(0xFFFFFFFF)).astype(U32) for pair in pairs))
        upper = function(*((pair >> U64(32)).astype(U32) for pair in pairs))
        return lower.astype(U64) | (upper.astype(U64) << U64(32))

    return apply(op, both, *(op.program.slot(op.args[i], op.scope, 64) for i in range(1, len(op.args))))


for _name in ("add", "sub", "mul", "fma", "max", "min", "neg", "abs"):
    for _modifiers in ("", ".rn", ".ftz", ".rn.ftz", ".NaN"):
        instruction(f"{_name}{_modifiers}.bf16x2", f"{_name}{_modifiers}.f16x2")(_pairs)
        instruction(f"{_name}{_modifiers}.f32x2")(_pairs_f32)
