# SPDX-License-Identifier: Apache-2.0
"""Blackwell's decode kernel, as compiled, in the model of the GPU: results against float64."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from cute_kernels.dsl.ptx import LOG2_E
from cute_kernels.isa_probes.meaning import TensorMap
from cute_kernels.sparse_mla.blackwell.decode import BlackwellDecodeKey
from tests.compile.reports import compile_report
from tests.gpu import decode_cases
from tests.gpu.decode_checks import assert_near
from tests.model import orders, problems
from tests.model.launch import divisor, pack, run_grid
from tests.model.memory import GlobalMemory
from tests.model.problems import lengths, on_host, put
from tests.model.ptx import PARAMETERS, Program, parse

HEADS, ROW = 64, 576


@functools.cache
def program(second: str, out_fp32: bool, kind: type[BlackwellDecodeKey] = BlackwellDecodeKey) -> Program:
    """Of a kernel that test_compiles has compiled; both architectures get the same."""
    arch = "sm_103a" if second == "none" else "sm_100a"
    return parse(compile_report(kind(arch, second, out_fp32)).ptx)


@dataclasses.dataclass
class Decode(problems.Decode):
    """A call in the model's memory, for Blackwell's kernel with so many heads in an item: a block or a pair of them."""

    kind = BlackwellDecodeKey
    cluster, code_bytes = 1, 448

    def place(self, program: Program) -> tuple[GlobalMemory, bytes, int]:
        """See DecodeKernel.__call__."""
        call, memory = self.call, GlobalMemory()
        batch, tokens, heads, _ = call.q.shape
        blocks = -(-heads // self.heads)
        self.items = batch * tokens * blocks * self.parts
        pools = [call.pool] if call.extra is None else [call.pool, call.extra]
        bases = [put(memory, pool.bytes) for pool in pools]
        both = [*zip(pools, bases, strict=True)]
        self.maps = [self.map(memory, *each, is_rope) for is_rope in (False, True) for each in both]
        values: list[Any] = [bytes(128)] * len(self.maps)
        values += [put(memory, call.q), *(stride * 2 for stride in call.q.stride()[:3]), heads]
        for pool, base in both:
            values += [base, pool.stride, pool.pages, *divisor(pool.rows)]
        values += [pool.stride // ROW for pool in pools]
        values += self.list(memory, call.indices, 1, call.length)
        if call.extra is None:
            values += self.list(memory, call.indices, 1, None)
        elif call.extra_indices is not None:
            values += self.list(memory, call.extra_indices, 1, call.extra_length)
        else:
            table = call.table[:, None].expand(-1, tokens, -1)
            values += self.list(memory, table, call.extra.rows, call.visible)
        size = 4 if self.out_fp32 else 2
        row = heads * 512 * size
        self.out = memory.reserve(self.parts * batch * tokens * row)
        self.lse = memory.reserve(self.parts * batch * heads * tokens * 4)
        sink = put(memory, None if self.out_fp32 else call.sink)
        values += [self.out, batch * tokens * row, tokens * row, row, 512 * size]
        values += [self.lse, batch * heads * tokens * 4, heads * tokens * 4, tokens * 4, 4, sink, heads]
        values += [call.scale * LOG2_E, 0, self.items, self.ctas // self.cluster]
        for number in (blocks, self.parts, tokens):
            values += divisor(number)
        self.memory = memory
        return memory, pack(program, [*values, self.part_tiles]), self.items

    def map(self, memory: GlobalMemory, pool: decode_cases.Pool, base: int, is_rope: bool) -> TensorMap:
        rows = pool.pages * (pool.stride // ROW)
        first, columns, width, swizzle = (448, 64, 2, 128) if is_rope else (0, 112, 4, 0)
        box = columns if is_rope else self.code_bytes // 4
        return TensorMap(base - memory.BASE + first, (columns, rows), (ROW,), (box, 1), width, swizzle)

    def list(self, memory: GlobalMemory, rows: torch.Tensor, width: int, live: torch.Tensor | None) -> list[Any]:
        strides = rows.stride(0) * 4, rows.stride(1) * 4
        return [put(memory, rows), *strides, rows.shape[2] * width, *lengths(memory, live)]

    ctas: int = 2

    def run(self, own: Program | None = None, **options: Any) -> Any:
        second = "none" if self.call.extra is None else "dense" if self.call.extra_indices is None else "listed"
        own = own or program(second, self.out_fp32, self.kind)
        memory, parameters, items = self.place(own)
        maps = {PARAMETERS + own.parameters[i].offset: map_ for i, map_ in enumerate(self.maps)}
        blocks = min(self.ctas, items * self.cluster)
        size = self.kind("sm_100a", second, self.out_fp32).smem_bytes
        return run_grid(
            own, parameters, memory, blocks=blocks, cluster=self.cluster, size=size, tensor_maps=maps, **options
        )

    def whole(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Parts put together, with the sink: float64."""
        outs, lses = (x.double() for x in self.results())
        outs, lses = outs.transpose(2, 3), lses.masked_fill(lses == math.inf, -math.inf)  # [parts, b, h, s_q, ...]
        lse = lses.logsumexp(0)
        sink = torch.full_like(lse, -math.inf) if self.call.sink is None else self.call.sink.double()[None, :, None]
        total = torch.logaddexp(lse, sink)
        weights = (lses - total).exp().nan_to_num(0.0)[..., None]
        out = (outs * weights).sum(0).transpose(1, 2)
        return out, lse.masked_fill(lse == -math.inf, math.inf)

    def check(self) -> None:
        if not self.out_fp32:
            super().check()
            return
        with on_host():
            assert_near(self.whole(), self.call.expected())
        written = self.memory.written[self.memory.writable]
        assert (written == 1).all()


def make(**how: Any) -> decode_cases.Call:
    with on_host():
        return decode_cases.make(**how)


def with_lengths(call: decode_cases.Call, first: Any, second: Any) -> decode_cases.Call:
    """The call with these lengths of its lists, one row per batch."""
    call.length = torch.tensor(first, dtype=torch.int32)
    if call.extra_indices is not None:
        call.extra_length = torch.tensor(second, dtype=torch.int32)
    if call.table is not None:
        call.visible = torch.tensor(second, dtype=torch.int32)[:, None]
    with on_host():
        decode_cases.fill(call)
    return call


Case = tuple[dict[str, Any], Any, dict[str, Any]]
"""Of a call how it is made, its lengths if they are chosen, and its parts."""

MOST = 2**31 - 1
CALLS: dict[str, Case] = {
    "one list, no lengths, pages of 2": ({"b": 2, "heads": 5, "topk": 65, "rows": 2, "sink": "none"}, None, {}),
    "rows without keys, padded pages": (
        {"b": 3, "topk": 130, "rows": 7, "second": "listed", "extra_topk": 100, "extra_rows": 5, "more_stride": 576},
        ([130, 1, 0], [70, -3, 0]),
        {},
    ),
    "lists in turn, most indices bad": (
        {"b": 3, "heads": 16, "topk": 64, "second": "listed", "extra_topk": 64, "extra_rows": 2, "bad": 0.6},
        ([64, 0, -5], [0, 64, MOST]),
        {},
    ),
    "two blocks of heads, parts of 2 tiles": (
        {"b": 1, "heads": 70, "topk": 70, "rows": 64, "second": "dense", "extra_topk": 130, "extra_rows": 2},
        ([70], [129]),
        {"parts": 3, "part_tiles": 2, "out_fp32": True},
    ),
    "more parts than tiles, two tokens": (
        {"b": 1, "s_q": 2, "heads": 16, "topk": 66, "rows": 3, "second": "dense", "extra_topk": 40, "lengths": "bs"},
        None,
        {"parts": 3, "out_fp32": True},
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_results(name: str) -> None:
    check_case(name, CALLS[name], Decode, HEADS)


def check_case(name: str, case: Case, kind: type[Decode], heads: int) -> None:
    how, chosen, parts = case
    call = make(**how)
    if chosen:
        call = with_lengths(call, *chosen)
    decode = kind(call, heads, **parts)
    decode.run(seed=len(name), laziness=len(name) % 10 / 10)
    decode.check()


def test_scales_of_any_size() -> None:
    """Far beyond those of caches that this project writes, and products are exact."""
    call = make(b=1, heads=8, topk=64, rows=64, sink="none", bad=0.0)
    call.q.zero_()  # all keys weigh the same
    page, row = call.indices[0, 0].long() // 64, call.indices[0, 0].long() % 64
    call.pool.data[page, row, :448] = 0x38  # 1.0
    scales = torch.tensor([10, 100, 127, 134, 135, 150, 240, 255], dtype=torch.uint8)
    call.pool.scales[page, row] = scales
    decode = Decode(call, HEADS)
    decode.run(seed=3)
    out, _ = decode.results()
    for block in range(7):
        want = torch.tensor(2.0 ** (int(scales[block]) - 127)).bfloat16()
        assert (out[0, 0, 0, :, 64 * block : 64 * block + 64] == want).all()


def test_in_any_order() -> None:
    """Whatever the order of warps, copies and products: nothing hangs, and no bytes are read or written while something
    else writes them. No access to shared memory has bank conflicts."""
    call = make(b=2, topk=250, rows=7, second="listed", extra_topk=100, extra_rows=5)
    decode = Decode(with_lengths(call, [250, 0], [100, 64]), HEADS, ctas=1)
    records, make_record = orders.recorder(program("listed", False))
    decode.run(seed=3, events=make_record)
    decode.check()
    orders.check(records[0])
    assert not [op for op, (_, _, most) in records[0].bank_conflicts().items() if most]
