# SPDX-License-Identifier: Apache-2.0
"""The facts' experiments, as compiled, in the model of the GPU: do their kernels do what they should, in order?"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

import cutlass.cute as cute

from cute_kernels.isa_probes import check, conversions, copies, kernels, products
from cute_kernels.isa_probes.meaning import TensorMap
from cute_kernels.runtime import compile as compile_
from tests.compile.reports import compile_report
from tests.model.events import Record
from tests.model.launch import pack, run_grid
from tests.model.memory import GlobalMemory
from tests.model.ptx import PARAMETERS, Program, parse
from tests.model.replay import Replay
from tests.model.trace import make


def orders(
    kernel: Program,
    memory: GlobalMemory,
    parameters: bytes,
    blocks: int,
    size: int,
    unscoped: str = "",
    **given: Any,
) -> list[str]:
    """Run a cluster: what nothing keeps apart, in two schedules."""
    record = Record(kernel)
    given = {"blocks": blocks, "cluster": blocks, "size": size, "seed": size, **given}
    run_grid(kernel, parameters, memory, events=lambda _: record, **given)
    trace = make(record, unscoped=unscoped)
    return [problem for seed in range(2) for problem in Replay(trace, seed).run()]


def program(name: str) -> tuple[Program, int]:
    """And bytes of shared memory."""
    report = compile_report(check.key_of("sm_100a", check.PREFIX + name))
    return parse(report.ptx), report.smem


@pytest.mark.parametrize("name", ["mixed_kinds", "pair128_mn_major"])
def test_products(name: str) -> None:
    experiment, memory = products.NAMES[name], GlobalMemory()
    blocks, want = products.memories(experiment), np.stack(products.expect(experiment))
    kernel, size = program(name)
    given = [memory.put(np.stack(x)) for x in ([b.shared for b in blocks], [b.tensor for b in blocks])]
    out = memory.reserve(want.nbytes)
    assert orders(kernel, memory, pack(kernel, [*given, out]), len(blocks), size) == []
    assert check.compare(memory.get(out, want.shape, np.uint32), want) == ""


@pytest.mark.parametrize("planted", ["", "no proxy fence"])
@pytest.mark.parametrize("scope", ["cta", "cluster"])
def test_handoffs(monkeypatch: pytest.MonkeyPatch, scope: str, planted: str) -> None:
    """A few rounds of them. With the scope of the CTA, what the other one wrote is not formally handed on: whether
    a GPU hands it on is what the fact finds out."""
    for module in (products, kernels):
        monkeypatch.setattr(module, "ROUNDS", 8)
    if planted:
        monkeypatch.setattr(cute.arch, "fence_view_async_shared", lambda: None)
    name = f"handoff_{scope}"
    experiment, memory = products.NAMES[name], GlobalMemory()
    blocks, want = products.memories(experiment), np.stack(products.expect(experiment))
    report = compile_.compile_report(check.key_of("sm_100a", check.PREFIX + name))
    kernel = parse(report.ptx)
    given = [memory.put(np.stack(x)) for x in ([b.shared for b in blocks], [b.tensor for b in blocks])]
    out = memory.reserve(want.nbytes)
    parameters = pack(kernel, [*given, out])
    unscoped = "" if scope == "cluster" else "reads and fenced writes"
    found = orders(kernel, memory, parameters, len(blocks), report.smem, unscoped=unscoped)
    assert bool(found) == bool(planted)
    if scope == "cta":
        assert orders(kernel, memory, parameters, len(blocks), report.smem)
    if not planted:
        assert check.compare(memory.get(out, want.shape, np.uint32), want) == ""


@pytest.mark.parametrize("name", ["gather_pair", "gather_part", "box_64"])
def test_copies(name: str) -> None:
    transfer, memory = copies.NAMES[name], GlobalMemory()
    (rows, numbers), want = copies.source(transfer), copies.expect(transfer)
    kernel, size = program(name)
    base, index, out = memory.put(rows), memory.put(numbers), memory.reserve(want.nbytes)
    sizes, strides = (transfer.column + transfer.columns, copies.KNOWN_ROWS), (copies.ROW_BYTES,)
    box: tuple[int, ...] = transfer.columns, 1
    if not transfer.is_gathered:
        sizes, strides = (transfer.columns, copies.TILE, copies.KNOWN_PAGES), (*strides, copies.TILE * copies.ROW_BYTES)
        box = transfer.columns, copies.TILE, 1
    first = base - memory.BASE + transfer.first
    map_ = TensorMap(first, sizes, strides, box, transfer.width, transfer.swizzle)
    maps = {PARAMETERS + kernel.parameters[0].offset: map_}
    parameters = pack(kernel, [bytes(kernel.parameters[0].size), index, out])
    assert orders(kernel, memory, parameters, transfer.blocks, size, tensor_maps=maps) == []
    assert check.compare(memory.get(out, want.shape, np.uint8), want) == ""


def test_conversion() -> None:
    conversion, memory = conversions.NAMES["e4m3_times_scale"], GlobalMemory()
    given, want = conversions.source(conversion), conversions.expect(conversion)
    kernel, _ = program(conversion.name)
    base, out = memory.put(given), memory.reserve(want.nbytes)
    run_grid(kernel, pack(kernel, [base, out, len(want)]), memory, blocks=-(-len(want) // 128), size=0)
    assert check.compare(memory.get(out, want.shape, np.uint32), want) == ""
