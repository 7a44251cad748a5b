# SPDX-License-Identifier: Apache-2.0
"""What Blackwell's tensor cores, copies to tensor memory and tensor copies do, on numpy arrays.

Operand addresses, result places and descriptors are those of dsl.umma, which the kernels use. Sums are float64, rounded
to fp32 once: the hardware's order is its own, and only products that are exact can be compared bit for bit.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cute_kernels.dsl import umma

LANES, COLUMNS = 128, 512


@dataclass
class Block:
    """A block's memories.

    shared   uint8 [n], by shared address
    tensor   uint32 [128 lanes, 512 columns]
    """

    shared: Any
    tensor: Any


# ---- numbers ---------------------------------------------------------------------------------------------------------


@functools.cache
def values_of(name: str) -> Any:
    """fp32 of every code of a format of up to 8 bits: "e4m3", "e5m2", "e2m1", "ue8m0"."""
    if name == "ue8m0":
        return np.array([2.0 ** (code - 127) for code in range(255)] + [math.nan], np.float32)
    exponent_bits, mantissa_bits = int(name[1]), int(name[3])
    bias = (1 << exponent_bits - 1) - 1
    found = []
    for code in range(1 << exponent_bits + mantissa_bits):
        exponent, mantissa = code >> mantissa_bits, code & (1 << mantissa_bits) - 1
        fraction = mantissa / (1 << mantissa_bits) + (exponent > 0)
        found.append(fraction * 2.0 ** (max(exponent, 1) - bias))
    if name == "e4m3":
        found[-1] = math.nan
    if name == "e5m2":
        found[-4:] = [math.inf, math.nan, math.nan, math.nan]
    return np.array(found + [-value for value in found], np.float32)


def decode(codes: Any, name: str) -> Any:
    """fp32 of codes, unsigned integers; also "bf16" and "f16"."""
    if name == "bf16":
        return (codes.astype(np.uint32) << 16).view(np.float32)
    if name == "f16":
        return codes.astype(np.uint16).view(np.float16).astype(np.float32)
    return values_of(name)[codes]


BITS = {"f16": 16, "f8f6f4": 8, "mxf8f6f4": 8, "mxf4": 4}
"""Kind of a product -> bits that an element takes."""


@dataclass(frozen=True)
class Shape:
    """What an instruction descriptor says. parts: which scale of a row the first is."""

    m: int
    n: int
    formats: tuple[str, str]
    is_mn_major: tuple[bool, bool]
    parts: tuple[int, int]


@functools.lru_cache(maxsize=256)
def shape_of(instruction: int, kind: str) -> Shape:
    """Inverse of umma.instruction and umma.scaled_instruction; ValueError on what they do not make."""
    m, n = (instruction >> 24 & 31) << 4, (instruction >> 17 & 63) << 3
    names = {number: name for name, number in umma.FORMATS[kind].items()}
    a, b = names.get(instruction >> 7 & 7, ""), names.get(instruction >> 10 & 7, "")
    a_is_mn, b_is_mn = bool(instruction >> 15 & 1), bool(instruction >> 16 & 1)
    if kind in ("f16", "f8f6f4"):
        parts = 0, 0
        made = a and b and umma.instruction(kind, a, b, m, n, a_is_mn_major=a_is_mn, b_is_mn_major=b_is_mn)
    else:
        parts = instruction >> 29 & 3, instruction >> 4 & 3
        made = a and b and umma.scaled_instruction(kind, a, b, m, n, *parts)
    if made != instruction:
        raise ValueError(f"instruction: expected one of dsl.umma, got {instruction:#x} of kind {kind}")
    return Shape(m, n, (a, b), (a_is_mn, b_is_mn), parts)


@functools.lru_cache(maxsize=512)
def _plain(operand: umma.Operand, rows: int, depth: int) -> Any:
    return operand.plain(np.arange(rows)[:, None], np.arange(depth)[None, :])


def operand_addresses(descriptor: int, rows: int, depth: int, bits: int, is_mn_major: bool) -> Any:
    """umma.operand_bytes of all elements [rows, depth] of an operand."""
    operand, start = umma.operand_of(descriptor, bits, is_mn_major)
    return umma.swizzled(start + _plain(operand, rows, depth), operand.swizzle)


def elements(shared: Any, descriptor: int, rows: int, depth: int, name: str, bits: int, is_mn_major: bool) -> Any:
    """fp32 [rows, depth] that a tensor core reads through a descriptor."""
    at = operand_addresses(descriptor, rows, depth, bits, is_mn_major)
    codes = shared[at]
    if bits == 16:
        codes = codes | shared[at + 1].astype(np.uint16) << 8
    elif bits == 4:
        codes = codes >> (np.arange(depth) % 2 * 4).astype(np.uint8) & 15
    return decode(codes, name)


# ---- products --------------------------------------------------------------------------------------------------------


@np.errstate(all="ignore")
def multiply(
    blocks: Sequence[Block],
    d: int,
    a: int,
    b: int,
    instruction: int,
    accumulate: bool,
    *,
    kind: str = "f16",
    a_in_tensor_memory: bool = False,
    weight_stationary: bool = False,
    a_scales: int | None = None,
    b_scales: int | None = None,
) -> None:
    """ptx.tensor_mma and, with scales, ptx.tensor_mma_scaled, by one block or a pair of them.

    Operands with fewer rows than lanes are in tensor memory several times: each lane reads the rows of its own part.
    """
    shape, bits = shape_of(instruction, kind), BITS[kind]
    form = ("pair" if len(blocks) == 2 else "ws" if weight_stationary and shape.m < 128 else "m") + str(shape.m)
    check(form in umma.FORMS, f"{shape.m} rows, weight-stationary: {weight_stationary}, {len(blocks)} blocks")
    check(shape.n in (64, 128, 256) or not weight_stationary, f"{shape.n} columns, weight-stationary")
    check(a_scales is None or form == "m128", f"scales of {form}")
    check(shape.n % 16 == 0 or form == "m64" or a_scales is not None, f"{shape.n} columns for {form}")
    check("e2m1" not in shape.formats or bits == 4, "e2m1 a byte an element")
    check(d >> 16 == 0 and d + umma.result_columns(form, shape.n) <= COLUMNS, f"results at {d:#x}")
    check(not a_in_tensor_memory or not (form == "m64" or shape.is_mn_major[0]), "such rows in tensor memory")
    (a_name, b_name), (a_is_mn, b_is_mn), depth = shape.formats, shape.is_mn_major, umma.K_BYTES * 8 // bits
    rows, columns = shape.m // len(blocks), shape.n // len(blocks)
    parts = [elements(x.shared, b, columns, depth, b_name, bits, b_is_mn) for x in blocks]
    right = np.concatenate(parts).astype(np.float64)
    for block, (row, column, lane, place) in zip(blocks, _places(form, shape.m, shape.n, len(blocks)), strict=True):
        if a_in_tensor_memory:
            left, row = held(block.tensor, a, depth, a_name, bits).astype(np.float64), lane
        else:
            left = elements(block.shared, a, rows, depth, a_name, bits, a_is_mn).astype(np.float64)
        turned = right
        if a_scales is not None and b_scales is not None:
            left = left * scales(block, a_scales, len(left), shape.parts[0], depth)
            turned = right * scales(block, b_scales, shape.n, shape.parts[1], depth)
        values = (left @ turned.T)[row, column]
        if accumulate:
            values = values + block.tensor[lane, d + place].view(np.float32)
        block.tensor[lane, d + place] = values.astype(np.float32).view(np.uint32)


@functools.lru_cache(maxsize=64)
def _places(form: str, m: int, n: int, blocks: int) -> list[tuple[Any, Any, Any, Any]]:
    """Of every block the results it has: row among its rows of `a`, column, lane, column from the results' start."""
    rank, lane, place = umma.result_place(form, n, *np.divmod(np.arange(m * n), n))
    row, column = np.divmod(np.arange(m * n), n)
    mine = [rank == i for i in range(blocks)]
    return [(row[own] % (m // blocks), column[own], lane[own], place[own]) for own in mine]


def held(tensor: Any, address: int, depth: int, name: str, bits: int) -> Any:
    """fp32 [128, depth]: every lane's row of an operand in tensor memory, the low bits of a word first."""
    check(address >> 16 == 0 and address + umma.K_BYTES // 4 <= COLUMNS, f"an operand at {address:#x}")
    words = np.ascontiguousarray(tensor[:, address : address + umma.K_BYTES // 4])
    if bits == 4:
        nibbles = words.view(np.uint8)[:, :, None] >> np.array([0, 4], np.uint8) & 15
        return decode(nibbles.reshape(LANES, depth), name)
    return decode(words.view(np.uint16 if bits == 16 else np.uint8), name)


def scales(block: Block, address: int, rows: int, part: int, depth: int) -> Any:
    """float64 [rows, depth]: the scales of an operand's elements, one for every 32 in a row."""
    check(address >> 16 == 0 and address + -(-rows // 32) <= COLUMNS, f"scales at {address:#x}")
    row, number = np.arange(rows)[:, None], part + np.arange(depth // 32)[None, :]
    words = block.tensor[row % 32, address + row // 32]
    return np.repeat(values_of("ue8m0")[words >> (8 * number).astype(np.uint32) & 255].astype(np.float64), 32, axis=1)


def check(condition: bool, what: str) -> None:
    """NotImplementedError unless the condition holds: what no kernel here does has no meaning here."""
    if not condition:
        raise NotImplementedError(what)


# ---- copies to tensor memory, loads and stores of it -----------------------------------------------------------------

_WARPS = {"warpx4": (0, 0, 0, 0), "warpx2::02_13": (0, 1, 0, 1), "warpx2::01_23": (0, 0, 1, 1), "": (0, 1, 2, 3)}
"""How rows are repeated -> which 32 of them the lanes of each warp get."""


def copy_to_tensor_memory(block: Block, address: int, source: int, shape: str) -> None:
    """ptx.copy_to_tensor_memory."""
    size, _, repeat = shape.partition(".")
    rows, width = int(size.partition("x")[0]), int(size.partition("x")[2].rstrip("b")) // 8
    raw = np.ascontiguousarray(block.shared[operand_addresses(source, rows, width, 8, False)]).view(np.uint32)
    check(address >> 16 == 0 and address + width // 4 <= COLUMNS, f"a copy to {address:#x}")
    for warp, part in enumerate(_WARPS[repeat]):
        block.tensor[32 * warp : 32 * warp + 32, address : address + width // 4] = raw[32 * part : 32 * part + 32]


def lanes_of(warp: int, address: int, columns: int) -> tuple[slice, slice]:
    """What a warp's loads and stores of `columns` columns reach: (lanes, columns) of the image."""
    first, column = address >> 16, address & 0xFFFF
    if first != warp % 4 * 32 or column + columns > COLUMNS:
        raise IndexError(f"warp {warp}: {columns} columns at {address:#x} of tensor memory")
    return slice(first, first + 32), slice(column, column + columns)


# ---- tensor copies ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TensorMap:
    """What the descriptor of a tensor copy says; dimensions from the densest on.

    base      byte of the tensor's first element in the memory
    sizes     elements
    strides   bytes, of all dimensions but the densest
    box       elements; of gathered rows (columns, 1)
    width     bytes of an element
    swizzle   bytes, as of umma.Operand
    """

    base: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    width: int
    swizzle: int = 0


def bytes_of(map_: TensorMap, at: Sequence[int]) -> tuple[Any, Any]:
    """int64 [..., bytes of an element] and bool [..., 1], dense: positions in the memory of the box at these
    coordinates, and whether there is a tensor."""
    inside = np.ones(map_.box[::-1], np.bool_)
    byte = np.full(map_.box[::-1], map_.base, np.int64)
    for axis, (first, count) in enumerate(zip(at, map_.box, strict=True)):
        stride = map_.width if axis == 0 else map_.strides[axis - 1]
        index = (first + np.arange(count)).reshape([-1 if i == axis else 1 for i in range(len(at))][::-1])
        inside &= (index >= 0) & (index < map_.sizes[axis])
        byte = byte + index * stride
    return np.where(inside, byte, 0)[..., None] + np.arange(map_.width), inside[..., None]


def box_of(map_: TensorMap, memory: Any, at: Sequence[int]) -> Any:
    """uint8, dense: the box at these coordinates, zeros where there is no tensor."""
    bytes_, inside = bytes_of(map_, at)
    return np.where(inside, memory[bytes_], 0).astype(np.uint8).reshape(-1)


def rows_of(map_: TensorMap, memory: Any, column: int, rows: Sequence[int]) -> Any:
    """uint8, dense: what ptx.gather_rows brings of these rows."""
    return np.concatenate([box_of(map_, memory, (column, int(row))) for row in rows])


def place_box(shared: Any, address: int, found: Any, swizzle: int) -> None:
    """Write what a copy found to shared memory, swizzled by the bits of the address."""
    shared[umma.swizzled(address + np.arange(len(found)), swizzle)] = found
