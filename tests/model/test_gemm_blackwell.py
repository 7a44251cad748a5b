# SPDX-License-Identifier: Apache-2.0
"""Blackwell's kernel of deepseek_v4_fp8_einsum, as compiled, in the model of the GPU: results against float64, other
orders of what its warps do, and bugs planted in places, which the model has to find: those in order are in
test_planted_sm100.py."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from cute_kernels.isa_probes.meaning import TensorMap
from cute_kernels.linear.blackwell.gemm import ROWS, BlackwellGemmKey, BlackwellPairGemmKey
from tests import oracle
from tests.compile.reports import compile_report
from tests.indexer.meaning import e4m3_codes
from tests.model import edits, orders
from tests.model.launch import pack, run_grid
from tests.model.memory import GlobalMemory
from tests.model.ptx import PARAMETERS, Program, parse

CHUNK = 128
ROUNDING, SUMS = 2.0**-8, 2.0**-20
"""Shares of the exact result and of the sum of the products' magnitudes that a result may be off by: the model's
products are exact, and sums are fp32."""

OPERANDS = 0, 2
"""Parameters of the kernel that are tensor maps: `a` and `b`."""


@functools.cache
def program(key: BlackwellGemmKey) -> Program:
    return parse(compile_report(key).ptx)


@dataclass
class Call:
    """Rows as the quantizer lays them out, group by group, with scales [groups, chunks, rows]; results in a pool.
    Packed: exponent bytes of scales, [groups, words, rows or columns, 4]."""

    rows: int
    groups: int
    columns: int
    chunks: int
    seed: int = 0
    packed: bool = False
    memory: GlobalMemory = field(default_factory=GlobalMemory)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        width = self.chunks * CHUNK
        self.a, self.b = (e4m3_codes(rng, self.groups, n, width) for n in (self.rows, self.columns))
        if self.packed:
            words = self.groups, self.chunks // 4
            self.a_scale, self.b_scale = (
                rng.integers(112, 134, (*words, n, 4), dtype=np.uint8) for n in (self.rows, self.columns)
            )
            return
        blocks = -(-self.columns // CHUNK)
        self.a_scale = self.scales(rng, self.groups, self.chunks, self.rows)
        self.b_scale = self.scales(rng, self.groups, blocks, self.chunks)

    @staticmethod
    def scales(rng: np.random.Generator, *shape: int) -> np.ndarray:
        return (rng.uniform(1, 2, shape) * 2.0 ** rng.integers(-12, 8, shape)).astype(np.float32)

    def exact_scales(self) -> tuple[np.ndarray, np.ndarray]:
        """float64 [groups, rows or columns, chunks] of both operands."""
        if not self.packed:
            of_columns = np.repeat(self.b_scale, CHUNK, axis=1)[:, : self.columns]
            return self.a_scale.transpose(0, 2, 1).astype(np.float64), of_columns.astype(np.float64)
        found = (np.where(each == 255, np.nan, 2.0 ** (each - 127.0)) for each in (self.a_scale, self.b_scale))
        a, b = (each.transpose(0, 2, 1, 3).reshape(self.groups, -1, self.chunks) for each in found)
        return a, b

    @property
    def out_row(self) -> int:
        """Columns from a group's results to the next one's."""
        return self.columns + 8

    def place(self, own: Program, columns: int) -> tuple[bytes, dict[int, TensorMap]]:
        """Parameters, as BlackwellGemmKernel.__call__ makes them, and tensor maps, for copies of so many columns."""
        memory, width = self.memory, self.chunks * CHUNK
        maps = {}
        for index, codes, tile in zip(OPERANDS, (self.a, self.b), (ROWS, columns), strict=True):
            count = codes.shape[1]
            base = memory.put(codes) - memory.BASE
            maps[PARAMETERS + own.parameters[index].offset] = TensorMap(
                base, (width, count, self.groups), (width, count * width), (CHUNK, tile, 1), 1, 128
            )
        self.out = memory.reserve(self.rows * self.groups * self.out_row * 2)
        values: list[Any] = [bytes(128), bytes(12), bytes(128), bytes(12)]
        values += [memory.put(self.a_scale), 4, self.a_scale[0].nbytes, self.rows * 4]
        rows = (4, self.columns * 4) if self.packed else (self.chunks * 4, 4)
        values += [memory.put(self.b_scale), self.b_scale[0].nbytes, *rows]
        values += [self.out, self.groups * self.out_row * 2, self.out_row * 2, 2]
        return pack(own, [*values, self.rows, self.groups, self.columns, self.chunks]), maps

    def run(self, key: BlackwellGemmKey, blocks: int, own: Program | None = None, **options: Any) -> None:
        """blocks: or pairs of them; own: another program than the key's."""
        own = own or program(key)
        parameters, maps = self.place(own, key.config.copied_columns)
        options |= {"cluster": key.config.blocks, "size": key.smem_bytes, "tensor_maps": maps}
        run_grid(own, parameters, self.memory, blocks=blocks * key.config.blocks, **options)

    def check(self) -> None:
        """That results are near to exact ones, and each was written once, and nothing else."""
        shape = self.rows, self.groups, self.out_row
        got = self.memory.get(self.out, shape, np.uint16)[..., : self.columns].astype(np.uint32) << 16
        a, b = (oracle.E4M3[codes].astype(np.float64) for codes in (self.a, self.b))
        a, b = (x * np.repeat(scale, CHUNK, axis=2) for x, scale in zip((a, b), self.exact_scales(), strict=True))
        want, size = (np.einsum("gtk,gdk->tgd", x, y) for x, y in ((a, b), (np.abs(a), np.abs(b))))
        off = np.abs(got.view(np.float32).astype(np.float64) - want)
        assert np.array_equal(np.isnan(off), np.isnan(want))
        assert (off <= ROUNDING * np.abs(want) + SUMS * size)[~np.isnan(off)].all()
        start = self.out - self.memory.BASE
        written = self.memory.written[start : start + 2 * np.prod(shape)].reshape(*shape, 2)
        assert (written[:, :, : self.columns] == 1).all()
        assert not written[:, :, self.columns :].any()


CALLS = {
    "64": (64, Call(3, 2, 72, 3, seed=1), 3),
    "128": (128, Call(130, 1, 200, 2, seed=2), 2),
    "256": (256, Call(100, 1, 264, 2, seed=3), 1),
    "64 packed": (64, Call(130, 1, 72, 8, seed=5, packed=True), 1),
    "128 packed": (128, Call(5, 2, 200, 4, seed=6, packed=True), 3),
    "256 packed": (256, Call(100, 1, 264, 8, seed=7, packed=True), 1),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("laziness", [0.02, 0.98])
def test_results(name: str, laziness: float) -> None:
    """Rows and columns that are missing in the last tiles, a NaN in a code of either operand and in a scale. Work is
    done at once, or not before somebody waits for it."""
    columns, call, blocks = CALLS[name]
    one = Call(call.rows, call.groups, call.columns, call.chunks, call.seed, call.packed)
    one.a[0, 1, 5], one.b[0, 2, 130] = 0x7F, 0xFF
    if one.packed:
        one.a_scale[0, 0, 2, 1], one.b_scale[0, 0, 70, 3] = 255, 255
    else:
        one.a_scale[0, 1, 2] = np.nan
    one.run(BlackwellGemmKey("sm_100a", columns, one.packed), blocks, seed=call.seed, laziness=laziness)
    one.check()


def key_of_rings(packed: bool) -> BlackwellGemmKey:
    return BlackwellGemmKey("sm_100a", 64, packed)


def run_rings(packed: bool, own: Program, events: Any) -> None:
    """By a block that has several tiles, so that all rings go round."""
    key = key_of_rings(packed)
    one = Call(20, 1, 136, 8 if packed else 5, seed=4, packed=packed)
    assert 3 * one.chunks > max(key.config.stages, key.config.scale_stages * (4 if packed else 1), key.config.buffers)
    one.run(key, 1, own=own, seed=4, laziness=0.8, events=events)
    one.check()


@pytest.mark.parametrize("packed", [False, True])
def test_in_any_order(packed: bool) -> None:
    records, make = orders.recorder(program(key_of_rings(packed)))
    run_rings(packed, program(key_of_rings(packed)), make)
    orders.check(records[0])
    assert not any(most for _, _, most in records[0].bank_conflicts().values())


PAIR = BlackwellPairGemmKey("sm_100a")


@pytest.mark.parametrize("rows", [257, 300, 512])
def test_results_of_pairs(rows: int) -> None:
    """The second block has no rows of the last tile, a part of them, or all."""
    one = Call(rows, 1, 264, 2, seed=rows)
    one.run(PAIR, 2, seed=1, laziness=0.9)
    one.check()


def run_pair_rings(own: Program, events: Any) -> None:
    """By a pair that has several tiles, so that all rings go round."""
    one = Call(150, 1, 520, 4, seed=4)
    assert 3 * one.chunks > max(PAIR.config.stages, PAIR.config.scale_stages, PAIR.config.buffers)
    one.run(PAIR, 1, own=own, seed=4, laziness=0.8, events=events)
    one.check()


def test_pairs_in_any_order() -> None:
    records, make = orders.recorder(program(PAIR))
    run_pair_rings(program(PAIR), make)
    orders.check(records[0])


@pytest.mark.parametrize("packed", [False, True])
def test_bugs_in_the_places_are_found(packed: bool) -> None:
    """Of operands, products and stores, and results that are not waited for: in a sample of all there are."""
    key = BlackwellGemmKey("sm_100a", 64, packed)
    own = program(key)
    # that of copies is implied
    planted = [edit for edit in edits.edits(own) if not own.ops[edit.op].opcode.startswith("cp.async.wait_group")]
    assert len(planted) > 20

    def check(changed: Program) -> None:
        one = Call(9, 1, 72, 4 if packed else 2, seed=5, packed=packed)
        one.run(key, 1, own=changed, seed=2)
        one.check()

    assert edits.unfound(planted[::3], compile_report(key).ptx, check) == []
