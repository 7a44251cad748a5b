# SPDX-License-Identifier: Apache-2.0
"""Hopper's GEMMs in the model: with K cut in clusters, with swapped operands, of e4m3 and bf16 numbers. Results against
float64, other orders of what the warps of a cluster do, and planted bugs, which the model has to find."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from cute_kernels.isa_probes.meaning import TensorMap
from cute_kernels.linear.hopper.gemm import BAND_ROWS, BOX_ROWS, HALF_ROWS, GemmKey
from cute_kernels.linear.hopper.gemm_swap_ab import SwapAbKey
from cute_kernels.linear.ops import activation_scale_shape, quantize_fp8_1x128
from cute_kernels.linear.scales import ROW_ALIGNMENT
from tests import oracle
from tests.compile.reports import compile_report
from tests.indexer.meaning import e4m3_codes
from tests.model import edits, mutations, orders
from tests.model.launch import divisor, pack, run_grid
from tests.model.memory import GlobalMemory
from tests.model.ptx import PARAMETERS, Program, parse
from tests.model.trace import Trace

Key = GemmKey | SwapAbKey

CHUNK_BYTES, SCALE_BLOCK = 128, 128
ROUNDING, SUMS = 2.0**-8, 2.0**-20
"""Shares of the exact result and of the sum of the products' magnitudes that a result may be off by: the model's
products are exact, and sums are fp32."""

SIZES = {"bf16": 2, "fp32": 4, "e4m3": 1}
GAP = 16
"""Bytes between rows of results, in which nothing is written."""

FORMATS = {"bf16": np.uint16, "fp32": np.float32, "e4m3": np.uint8}


@functools.cache
def program(key: Key) -> Program:
    return parse(compile_report(key).ptx)


def bf16_bytes(x: Any) -> Any:
    """uint8, of fp32 numbers cut to bf16."""
    return (x.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)


@dataclass
class Call:
    """`a` [groups, rows, K] and `b` [groups, columns, K]; of e4m3 codes with scales [groups, chunks, rows] and [groups,
    blocks, chunks]; results [rows, groups, columns and a gap]. chunks: of 128 bytes of K."""

    rows: int
    groups: int
    columns: int
    chunks: int
    seed: int = 0
    memory: GlobalMemory = field(default_factory=GlobalMemory)

    def operands(self, kind: str) -> tuple[Any, Any]:
        """Bytes of both."""
        rng = np.random.default_rng(self.seed)
        shapes = [(self.groups, count, self.chunks * CHUNK_BYTES) for count in (self.rows, self.columns)]
        if kind == "e4m3":
            a, b = (e4m3_codes(rng, *shape) for shape in shapes)
            return a, b
        a, b = (rng.standard_normal((*shape[:2], shape[2] // 2), dtype=np.float32) for shape in shapes)
        return bf16_bytes(a), bf16_bytes(b)

    def scales(self) -> tuple[Any, Any]:
        rng = np.random.default_rng(self.seed + 1)
        shapes = (self.groups, self.chunks, self.rows), (self.groups, -(-self.columns // SCALE_BLOCK), self.chunks)
        a, b = ((rng.uniform(1, 2, s) * 2.0 ** rng.integers(-12, 8, s)).astype(np.float32) for s in shapes)
        return a, b

    def place(self, key: Key, own: Program, clusters: int) -> tuple[bytes, dict[int, TensorMap]]:
        """Parameters, as the kernels' entry points make them, and tensor maps."""
        memory = self.memory = GlobalMemory()
        a, b = self.operands(key.operands)
        a_scale, b_scale = self.scales()
        width = 1 if key.operands == "e4m3" else 2
        if isinstance(key, GemmKey):
            tiles = (a, BOX_ROWS), (b, key.columns)
        else:
            tiles = (b, key.outputs), (a, key.tokens)
        maps = {}
        for index, (codes, rows) in zip((0, 2), tiles, strict=True):
            _, count, row = codes.shape
            maps[PARAMETERS + own.parameters[index].offset] = TensorMap(
                memory.put(codes) - memory.BASE,
                (row // width, count, self.groups),
                (row, count * row),
                (CHUNK_BYTES // width, rows, 1),
                width,
                128,
            )
        self.out_row = self.columns * SIZES[key.output] + GAP
        self.out = memory.reserve(self.rows * self.groups * self.out_row)
        is_staged = isinstance(key, GemmKey) and key.staged
        if is_staged:
            sizes, strides = (self.columns, self.rows, self.groups), (self.groups * self.out_row, self.out_row)
            out_map = TensorMap(self.out - memory.BASE, sizes, strides, (64, 16, 1), 2, 128)
            maps[PARAMETERS + own.parameters[4].offset] = out_map
        has_halves = isinstance(key, GemmKey) and key.halves
        if has_halves:
            _, count, row = a.shape
            sizes, strides = (row // width, HALF_ROWS, 2, self.groups), (row, (count - HALF_ROWS) * row, count * row)
            of_rows = PARAMETERS + own.parameters[0].offset
            box = CHUNK_BYTES // width, HALF_ROWS, 2, 1
            maps[of_rows] = TensorMap(maps[of_rows].base, sizes, strides, box, width, 128)
        blocks, padded = activation_scale_shape(self.rows, self.groups * self.columns)
        self.out_scale = memory.reserve(blocks * padded * 4) if key.output == "e4m3" else 0
        values: list[Any] = [bytes(128), bytes(8 if has_halves else 12)]
        values += [bytes(128), bytes(12)] * (2 if is_staged else 1) + [bytes(1), bytes(1)]
        if key.operands == "e4m3":
            values += [memory.put(a_scale), 4, a_scale[0].nbytes, self.rows * 4]
            values += [memory.put(b_scale), b_scale[0].nbytes, self.chunks * 4, 4]
        else:
            values += [0] * 8
        values += [self.out, self.groups * self.out_row, self.out_row, SIZES[key.output]]
        values += [self.out_scale, padded * 4, padded]
        if isinstance(key, GemmKey):
            row_tiles, column_tiles = -(-self.rows // key.rows), -(-self.columns // key.columns)
            per_group, height = row_tiles * column_tiles, BAND_ROWS // key.rows
            values += [self.rows, self.columns, self.groups * per_group, row_tiles, self.first_rows(key)[-1]]
            values += [*divisor(per_group), *divisor(height * column_tiles), *divisor((row_tiles - 1) % height + 1)]
            values.append(self.chunks)
        else:
            output_tiles, token_tiles = -(-self.columns // key.outputs), -(-self.rows // key.tokens)
            values += [self.rows, self.columns, self.groups * output_tiles * token_tiles]
            values += [*divisor(clusters), *divisor(output_tiles), *divisor(token_tiles), self.chunks]
        if isinstance(key, GemmKey) and key.squares:
            self.squares = memory.reserve(self.rows * self.blocks * 4)
            values += [self.squares, self.blocks * 4, self.blocks]
        return pack(own, values), maps

    def first_rows(self, key: Key) -> list[int]:
        """Of the work tiles: the last one ends with the last row, where there are as many."""
        if isinstance(key, SwapAbKey):
            return list(range(0, self.rows, key.tokens))
        last = max(-(-self.rows // ROW_ALIGNMENT) * ROW_ALIGNMENT - key.rows, 0)
        return [min(row, last) for row in range(0, self.rows, key.rows)]

    @property
    def blocks(self) -> int:
        """Of 128 columns, that have sums of squares."""
        return self.columns // SCALE_BLOCK

    def run(self, key: Key, clusters: int, own: Program | None = None, **options: Any) -> None:
        """own: another program than the key's."""
        own = own or program(key)
        parameters, maps = self.place(key, own, clusters)
        blocks = clusters * key.splits
        given = {"blocks": blocks, "cluster": key.splits, "size": key.smem_bytes, "tensor_maps": maps}
        run_grid(own, parameters, self.memory, **given, **options)

    def exact(self, key: Key) -> tuple[Any, Any]:
        """float64 [rows, groups, columns], and the sums of the products' magnitudes."""
        a, b = self.operands(key.operands)
        if key.operands == "bf16":
            a, b = ((x.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64) for x in (a, b))
        else:
            a, b = (oracle.E4M3[x].astype(np.float64) for x in (a, b))
            a_scale, b_scale = self.scales()
            a = a * np.repeat(a_scale.transpose(0, 2, 1).astype(np.float64), CHUNK_BYTES, axis=2)
            of_columns = np.repeat(b_scale, SCALE_BLOCK, axis=1)[:, : self.columns].astype(np.float64)
            b = b * np.repeat(of_columns, CHUNK_BYTES, axis=2)
        want, size = (np.einsum("gtk,gdk->tgd", x, y) for x, y in ((a, b), (np.abs(a), np.abs(b))))
        return want, size

    def results(self, key: Key) -> Any:
        """[rows, groups, columns] of the results' format; each of their bytes has been written once by every work tile
        that has its row, nothing else."""
        shape = self.rows, self.groups, self.out_row
        start, used = self.out - self.memory.BASE, self.columns * SIZES[key.output]
        written = self.memory.written[start : start + np.prod(shape)].reshape(shape)
        rows = np.arange(self.rows)
        height = key.tokens if isinstance(key, SwapAbKey) else key.rows
        first_rows = self.first_rows(key)
        if isinstance(key, GemmKey) and key.halves:
            first_rows, height = [0, self.rows - HALF_ROWS], HALF_ROWS
        times = sum(((first <= rows) & (rows < first + height)).astype(int) for first in first_rows)
        assert (written[..., :used] == times[:, None, None]).all()
        assert not written[..., used:].any()
        return self.memory.get(self.out, shape, np.uint8)[..., :used].copy().view(FORMATS[key.output])

    def check(self, key: Key) -> None:
        """That results are near to exact ones."""
        got = self.results(key)
        if key.output == "bf16":
            got = (got.astype(np.uint32) << 16).view(np.float32)
        want, size = self.exact(key)
        rounding = ROUNDING if key.output == "bf16" else 0.0
        assert (np.abs(got.astype(np.float64) - want) <= rounding * np.abs(want) + SUMS * size).all()


def gemm(operands: str, output: str, rows: int, columns: int, splits: int, **more: int) -> GemmKey:
    given = {"warpgroups": rows // 64, "stages": 3, "depth": 2} | more
    return GemmKey("sm_90a", operands, output, rows, columns, splits=splits, **given)  # type: ignore[arg-type]


def swap_ab(operands: str, output: str, tokens: int, splits: int, cooperative: bool) -> SwapAbKey:
    return SwapAbKey("sm_90a", operands, output, tokens, splits, cooperative)


CASES: dict[str, tuple[Key, Call, int]] = {
    "two splits": (gemm("e4m3", "bf16", 64, 64, 2), Call(70, 1, 80, 7, seed=1), 4),
    "a split without chunks": (gemm("e4m3", "bf16", 64, 64, 2), Call(70, 1, 80, 1, seed=16), 4),
    "four splits": (gemm("e4m3", "fp32", 64, 64, 4), Call(3, 2, 72, 9, seed=2), 4),
    "two warpgroups": (gemm("e4m3", "bf16", 128, 64, 2), Call(130, 1, 64, 4, seed=3), 2),
    "boxes across each other": (gemm("e4m3", "bf16", 192, 64, 1), Call(90, 1, 64, 5, seed=19), 1),
    "eight chunks of the mainloop's body, then four and one": (
        gemm("e4m3", "bf16", 128, 32, 1, unrolled=8),
        Call(130, 1, 40, 13, seed=24),
        1,
    ),
    "the oldest of four products promoted amid the next one": (
        gemm("e4m3", "bf16", 64, 32, 1, unrolled=8, stages=5, depth=4, interleaved=True),
        Call(70, 1, 40, 13, seed=25),
        1,
    ),
    "the oldest of two, columns of two blocks": (
        gemm("e4m3", "bf16", 128, 96, 1, unrolled=8, interleaved=True),
        Call(130, 1, 272, 13, seed=26),
        1,
    ),
    "eight chunks of the mainloop's body in a split": (
        gemm("e4m3", "bf16", 64, 64, 2, unrolled=8, stages=5, depth=4),
        Call(33, 1, 80, 19, seed=27),
        4,
    ),
    "the oldest of two amid the next one, splits": (
        gemm("e4m3", "bf16", 128, 64, 2, unrolled=8, interleaved=True),
        Call(130, 1, 80, 18, seed=28),
        4,
    ),
    "two blocks of columns": (gemm("e4m3", "bf16", 64, 96, 1), Call(70, 1, 400, 5, seed=20), 2),
    "two blocks of columns, splits": (gemm("e4m3", "fp32", 128, 96, 2), Call(40, 1, 272, 9, seed=21), 3),
    "bf16, four splits": (gemm("bf16", "fp32", 128, 128, 4), Call(100, 1, 144, 13, seed=4), 2),
    "bf16, 96 columns": (gemm("bf16", "fp32", 64, 96, 1), Call(70, 1, 200, 5, seed=17), 1),
    "halves across each other": (gemm("e4m3", "bf16", 64, 64, 2, halves=True), Call(33, 2, 80, 7, seed=22), 4),
    "bf16, halves": (gemm("bf16", "fp32", 64, 32, 1, halves=True), Call(51, 1, 40, 5, seed=23), 1),
    "bf16, 96 columns, two splits": (gemm("bf16", "bf16", 64, 96, 2), Call(40, 1, 200, 7, seed=18), 3),
    "bf16, whole": (gemm("bf16", "bf16", 64, 32, 1), Call(70, 1, 40, 5, seed=6), 1),
    "bf16, 80 columns": (gemm("bf16", "fp32", 128, 80, 1, stages=4), Call(130, 1, 200, 9, seed=2), 1),
    "swapped": (swap_ab("e4m3", "bf16", 8, 1, False), Call(5, 2, 72, 3, seed=7), 1),
    "swapped, splits": (swap_ab("e4m3", "fp32", 16, 4, False), Call(21, 1, 136, 5, seed=8), 2),
    "swapped, more splits than blocks": (swap_ab("bf16", "bf16", 16, 6, False), Call(9, 1, 200, 13, seed=9), 1),
    "swapped, cooperative": (swap_ab("bf16", "fp32", 32, 2, True), Call(40, 1, 144, 3, seed=10), 1),
}
"""Key, call, and clusters, of which each has a work tile or several."""


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("laziness", [0.02, 0.98])
def test_results(name: str, laziness: float) -> None:
    """Rows and columns that are missing in the last tiles. Work is done at once, or not before somebody waits for
    it."""
    key, call, clusters = CASES[name]
    one = replace(call, memory=GlobalMemory())
    one.run(key, clusters, seed=call.seed, laziness=laziness)
    one.check(key)


CODES = gemm("e4m3", "e4m3", 64, 128, 2)


@pytest.mark.parametrize(
    ("key", "rows", "clusters"), [(CODES, 5, 2), (CODES, 66, 4), (swap_ab("e4m3", "e4m3", 8, 2, True), 5, 2)]
)
def test_codes_are_those_of_the_rounded_result(key: Key, rows: int, clusters: int) -> None:
    call = Call(rows, 2, 128, 3, seed=11)
    call.run(replace(key, output="bf16"), clusters)
    plain = torch.from_numpy(call.results(replace(key, output="bf16")).view(np.int16)).view(torch.bfloat16)
    call.run(key, clusters, seed=1)
    codes, scales = quantize_fp8_1x128(plain.flatten(1))
    assert np.array_equal(call.results(key), codes.view(torch.uint8).numpy().reshape(rows, 2, 128))
    got = call.memory.get(call.out_scale, activation_scale_shape(rows, 256), np.float32)
    assert np.array_equal(got[:, :rows].T, scales.numpy())
    assert not got[:, rows:].any()


STAGED = gemm("e4m3", "bf16", 128, 128, 1, stages=3, depth=1, staged=True, squares=True)
"""A result that leaves through shared memory, and its sums of squares."""


def run_staged(own: Program, rows: int = 128, **options: Any) -> None:
    """By one CTA two work tiles, one of which lacks columns, or four that have rows in common."""
    call = Call(rows, 1, 200, 6, seed=15)
    call.run(STAGED, 1, own, **options)
    call.check(STAGED)
    got = call.memory.get(call.squares, (rows, call.blocks), np.float32)
    out = (call.results(STAGED).astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    want = (out[:, 0, : call.blocks * SCALE_BLOCK].reshape(rows, -1, SCALE_BLOCK) ** 2).sum(-1)
    assert (np.abs(got - want) <= SUMS * want).all()


@pytest.mark.parametrize(("rows", "laziness"), [(100, 0.02), (100, 0.98), (150, 0.5)])
def test_staged_results_and_squares(rows: int, laziness: float) -> None:
    run_staged(program(STAGED), rows, laziness=laziness)


ORDER_KEYS = {"gemm": gemm("bf16", "fp32", 64, 64, 4), "swap_ab": swap_ab("bf16", "fp32", 8, 4, False)}


class OneOfEach(Call):
    """Each of four splits has one product, of another size: their sum in fp32 is 1 in this order, and in others not."""

    def operands(self, kind: str) -> tuple[Any, Any]:
        a, b = (np.zeros((1, rows, 256), np.float32) for rows in (self.rows, self.columns))
        a[:, :, ::64], b[:, :, ::64] = [2.0**24, 1.0, -(2.0**24), 1.0], 1.0
        return bf16_bytes(a), bf16_bytes(b)


def check_order(key: Key, own: Program | None = None) -> None:
    call = OneOfEach(8, 1, 64, 4)
    call.run(key, 1, own)
    assert (call.results(key) == 1.0).all()


@pytest.mark.parametrize("name", ORDER_KEYS)
def test_sums_are_added_split_by_split(name: str) -> None:
    check_order(ORDER_KEYS[name])


@pytest.mark.parametrize("name", ORDER_KEYS)
def test_another_order_of_splits_is_found(name: str) -> None:
    key = ORDER_KEYS[name]

    program = parse(compile_report(key).ptx)
    loads = [op for op in program.ops if op.parts[0] == "ld" and "shared" in op.parts and "v4" in op.parts]
    # the addresses of the second and the third split's sums, or what is added to the first one's just before
    before = [program.ops[op.number - 1] for op in loads[1:3]]
    second, third = (add if add.opcode == "add.s32" else op for add, op in zip(before, loads[1:3], strict=True))
    for op, other in ((second, third), (third, second)):
        program = program.with_op(replace(op, args=[*op.args[:-1], other.args[-1]]))
    with pytest.raises(AssertionError):
        check_order(key, program)


# ---- orders and planted bugs -----------------------------------------------------------------------------------------


def runner(key: Key, call: Call) -> Callable[..., None]:
    def run(own: Program, **options: Any) -> None:
        one = replace(call, memory=GlobalMemory())
        one.run(key, 1, own, **options)
        one.check(key)

    return run


GEMM = gemm("e4m3", "fp32", 64, 32, 2, stages=2)
BF16 = gemm("bf16", "fp32", 64, 32, 4, stages=2, depth=1)
BF16_WHOLE = gemm("bf16", "fp32", 64, 32, 1, stages=2, depth=2)
SWAP_AB = swap_ab("e4m3", "fp32", 32, 2, False)

ORDERED: dict[str, tuple[Key, Callable[..., None], Callable[..., None]]] = {
    "gemm": (GEMM, runner(GEMM, Call(9, 1, 32, 30, seed=12)), runner(GEMM, Call(9, 1, 32, 11, seed=12))),
    "bf16": (BF16, runner(BF16, Call(9, 1, 32, 16, seed=13)), runner(BF16, Call(9, 1, 32, 6, seed=13))),
    "bf16, whole": (
        BF16_WHOLE,
        runner(BF16_WHOLE, Call(9, 1, 64, 5, seed=20)),
        runner(BF16_WHOLE, Call(9, 1, 64, 3, seed=20)),
    ),
    "swap_ab": (SWAP_AB, runner(SWAP_AB, Call(20, 1, 256, 18, seed=14)), runner(SWAP_AB, Call(20, 1, 128, 6, seed=14))),
    "staged": (STAGED, run_staged, run_staged),
}
"""Key, and what runs and checks a program, by one cluster: so that its rings go round (with swapped operands it has
four work tiles), and a shorter run."""

IMPLIED = {
    (
        "no barrier of the warp",
        "bar",
    ): "another one, or products that all of the warp wait for, come before the arrival",
    ("no barrier", "barrier"): "the cluster's: of its warps only those have to wait that send something",
}
"""What a replay rightly does not find, and of which instructions, as something else keeps the same order -> what."""


@functools.cache
def trace(name: str) -> Trace:
    key, run, _ = ORDERED[name]
    records, make = orders.recorder(program(key))
    run(program(key), seed=3, laziness=0.8, events=make)
    # that sums have been read is told to the cluster's other CTAs by an arrival of the CTA's scope
    return orders.check(records[0], unscoped="" if isinstance(key, GemmKey) else "reads")


@pytest.mark.parametrize("name", ORDERED)
def test_in_any_order(name: str) -> None:
    trace(name)


@pytest.mark.parametrize("name", ORDERED)
def test_bugs_in_the_order_are_found(name: str) -> None:
    """Waits, arrivals, barriers and fences that are missing, wait for the other parity or are another one's."""
    ops = program(ORDERED[name][0]).ops
    planted = list(mutations.mutants(trace(name), one_way=True))
    missed = [mutant for mutant in planted if not mutations.problems(trace(name), mutant)]
    assert len(planted) > 25
    assert {(mutant.name, ops[mutant.op].parts[0]) for mutant in missed} <= set(IMPLIED)
    waits = [op.number for op in ops if op.opcode == "barrier.cluster.wait"]
    assert len([mutant for mutant in missed if mutant.op in waits]) == max(len(waits) - 1, 0)


@pytest.mark.parametrize("name", ORDERED)
def test_bugs_in_the_places_are_found(name: str) -> None:
    """Of operands, products and stores, and results that are not waited for: of a sample of all there are."""
    key, _, run = ORDERED[name]
    # that of copies is implied
    own = program(key)
    planted = [edit for edit in edits.edits(own) if not own.ops[edit.op].opcode.startswith("cp.async.wait_group")]
    assert len(planted) > 15
    assert edits.unfound(planted[::3], compile_report(key).ptx, run) == []
