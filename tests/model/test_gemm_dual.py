# SPDX-License-Identifier: Apache-2.0
"""Hopper's kernel of an FP8 and a bf16 product in one launch, in the model: results of both against float64, and other
orders of what the warps of a cluster do."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from cute_kernels.isa_probes.meaning import TensorMap
from cute_kernels.linear.hopper.gemm import BAND_ROWS, BOX_ROWS, HALF_ROWS, GemmKey
from cute_kernels.linear.hopper.gemm_dual import COLUMNS, ROWS, DualGemmKey
from tests.compile.reports import compile_report
from tests.model import orders
from tests.model.launch import divisor, pack, run_grid
from tests.model.memory import GlobalMemory
from tests.model.ptx import PARAMETERS, Program, parse
from tests.model.test_gemm_hopper import CHUNK_BYTES, SIZES, Call


def maps_of(call: Call, key: GemmKey, own: Program, first: int) -> dict[int, TensorMap]:
    """Tensor maps of rows and weight, whose parameters are number `first` and the next but one."""
    found = {}
    for index, codes, box in zip((first, first + 2), call.operands(key.operands), (BOX_ROWS, COLUMNS), strict=True):
        width, (_, count, row) = 1 if key.operands == "e4m3" else 2, codes.shape
        base, boxes = call.memory.put(codes) - call.memory.BASE, (CHUNK_BYTES // width, box, 1)
        sizes, strides = (row // width, count, 1), (row, count * row)
        if key.halves and index == first:
            sizes, strides = (row // width, HALF_ROWS, 2, 1), (row, (count - HALF_ROWS) * row, count * row)
            boxes = (CHUNK_BYTES // width, HALF_ROWS, 2, 1)
        place = PARAMETERS + own.parameters[index].offset
        found[place] = TensorMap(base, sizes, strides, boxes, width, 128)
    return found


def grid_of(call: Call) -> tuple[int, list[Any]]:
    """How many work tiles there are, and the kernel's TileGrid."""
    row_tiles, column_tiles = -(-call.rows // ROWS), -(-call.columns // COLUMNS)
    count, height = row_tiles * column_tiles, BAND_ROWS // ROWS
    last_row = call.first_rows(GemmKey("sm_90a", rows=ROWS))[-1]
    values = [count, row_tiles, last_row, *divisor(count), *divisor(height * column_tiles)]
    return count, [*values, *divisor((row_tiles - 1) % height + 1)]


@pytest.mark.parametrize(
    ("key", "rows", "fp8", "bf16", "laziness"),
    [
        (DualGemmKey("sm_90a"), 61, (80, 29), (72, 33), 0.5),
        (DualGemmKey("sm_90a", stages=3, bf16_depth=2), 70, (64, 2), (136, 13), 0.98),
        (DualGemmKey("sm_90a", stages=3, bf16_depth=2, halves=True), 50, (72, 9), (64, 3), 0.9),
    ],
    ids=["as deployed", "two tiles of rows", "halves"],
)
def test_both_products(
    key: DualGemmKey, rows: int, fp8: tuple[int, int], bf16: tuple[int, int], laziness: float
) -> None:
    """fp8, bf16: columns of a product, and its chunks, of which a CTA of the cluster has none, one or several."""
    program, memory = parse(compile_report(key).ptx), GlobalMemory()
    calls = Call(rows, 1, *fp8, seed=1, memory=memory), Call(rows, 1, *bf16, seed=2, memory=memory)
    maps: dict[int, TensorMap] = {}
    results: list[Any] = []
    for call, product, first in zip(calls, key.products, (0, 4), strict=True):
        maps |= maps_of(call, product, program, first)
        call.out_row = call.columns * SIZES[product.output] + 16
        call.out = memory.reserve(rows * call.out_row)
        results += [call.out, call.out_row, call.out_row, SIZES[product.output]]
    a_scale, b_scale = calls[0].scales()
    source = bytes(8 if key.halves else 12)
    values: list[Any] = [bytes(128), source, bytes(128), bytes(12)] * 2 + [bytes(1)] * 4
    values += [memory.put(a_scale), 4, a_scale[0].nbytes, rows * 4]
    values += [memory.put(b_scale), b_scale[0].nbytes, calls[0].chunks * 4, 4]
    (count, tiles), (more, x_tiles) = (grid_of(call) for call in calls)
    values += [*results, rows, *(call.columns for call in calls), *tiles, *x_tiles, *(call.chunks for call in calls)]
    records, make = orders.recorder(program)
    run_grid(
        program, pack(program, values), memory, blocks=(count + more) * key.splits, cluster=key.splits,
        size=key.smem_bytes, seed=rows, laziness=laziness, events=make, tensor_maps=maps,
    )  # fmt: skip
    for call, product in zip(calls, key.products, strict=True):
        call.check(product)
    for record in (records[0], records[-1]):  # of the bf16 product, and of the e4m3 one
        orders.check(record, schedules=2, more=4)
