# SPDX-License-Identifier: Apache-2.0
"""Hopper's decode kernels over V4.1's own records, as compiled, in the model: results against float64, in any order of
what their warps do."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from cute_kernels.dsl.ptx import LOG2_E
from cute_kernels.sparse_mla.hopper.decode import DecodeKey
from cute_kernels.sparse_mla.hopper.decode_swap_ab import DecodeSwapAbKey
from tests.compile.reports import compile_report
from tests.gpu import decode_cases
from tests.gpu.decode_checks import FP8, MXFP8, MXFP8_SPLIT, NVFP4, NVFP4_SPLIT
from tests.model import orders
from tests.model.launch import divisor, pack, run_grid
from tests.model.memory import GlobalMemory
from tests.model.problems import Decode, lengths, on_host, put
from tests.model.ptx import Program, parse
from tests.model.test_hopper_codes import codes

slow = pytest.mark.slow


def v41_call(
    first: str, second: str, heads: int, rows: list[int], extra: list[int], kind: str = "listed"
) -> decode_cases.Call:
    """Rows of two lists, of slots or of pages, a tenth of them bad, in pages of 7 and 5 rows."""
    many: dict[str, Any] = {"rows": 7, "second": kind, "extra_rows": 5, "lengths": "bs", "seed": 1}
    with on_host():
        formats = {"kv_format": first, "extra_format": second}
        call = decode_cases.make(b=len(rows), heads=heads, topk=128, extra_topk=100, **formats, **many)
        call.length, call.extra_length = (torch.tensor(each).int()[:, None] for each in (rows, extra))
        decode_cases.fill(call)
    return call


@pytest.mark.parametrize(
    ("first", "second", "kind"),
    [
        (FP8, NVFP4, "listed"),
        *(pytest.param(MXFP8, other, "listed", marks=slow) for other in (NVFP4, MXFP8, FP8)),
        *(pytest.param(first, NVFP4, "dense", marks=slow) for first in (FP8, MXFP8)),
        *(pytest.param(first, NVFP4_SPLIT, "listed", marks=slow) for first in (FP8, MXFP8_SPLIT)),
        pytest.param(MXFP8_SPLIT, MXFP8_SPLIT, "dense", marks=slow),
    ],
)
def test_decode(first: str, second: str, kind: str) -> None:
    key = DecodeKey("sm_90a", 64, kind, False, format0=first, format1=second)
    decode = Decode(v41_call(first, second, 64, [70, 0], [65, -1], kind), 64)
    program = parse(compile_report(key).ptx)
    records, make = orders.recorder(program)
    decode.run(program, key.smem_bytes, pairs=1, seed=1, events=make)
    decode.check()
    # as in test_hopper
    orders.check(records[0], votes_order=True, unscoped="reads")


class WholeDecode(Decode):
    """A call of decode_swap_ab. ctas: of a row"""

    ctas = 1

    def place(self, program: Program) -> tuple[GlobalMemory, bytes, int]:
        call, memory = self.call, GlobalMemory()
        batch, tokens, heads, _ = call.q.shape
        self.items = batch * tokens
        assert call.extra is not None
        assert call.extra_indices is not None
        q = put(memory, call.q)
        sources: list[Any] = []
        lists = (call.pool, call.indices, call.length), (call.extra, call.extra_indices, call.extra_length)
        for pool, indices, length in lists:
            sources += [put(memory, pool.bytes), pool.stride, pool.pages, *divisor(pool.rows)]
            strides = indices.stride(0) * 4, indices.stride(1) * 4
            sources += [put(memory, indices), *strides, indices.shape[2], *lengths(memory, length)]
        if self.codes is None:
            self.out = memory.reserve(self.items * heads * 1024)
        self.lse = memory.reserve(self.items * heads * 4)
        row, head, *_ = (stride * 2 for stride in call.q.stride()[1:])
        values = [q, row, head, heads, q, *(stride * 2 for stride in call.q.stride()[:3]), heads, *sources]
        values += [self.out, heads * 1024, 1024] if self.codes is None else self.codes.place(memory, self.items, heads)
        values += [self.lse, self.items * heads * 4, heads * tokens * 4, tokens * 4, 4]
        values += [put(memory, call.sink), call.scale * LOG2_E, *divisor(tokens), *divisor(self.ctas), *divisor(1)]
        values += [self.items]
        self.memory = memory
        return memory, pack(program, [*values, *[0] * (len(program.parameters) - len(values))]), self.items

    def run(self, program: Program, size: int, pairs: int = 1, **options: Any) -> Any:
        memory, parameters, items = self.place(program)
        blocks = min(pairs, items) if self.ctas == 1 else self.ctas * items
        return run_grid(program, parameters, memory, blocks=blocks, cluster=self.ctas, size=size, **options)


@pytest.mark.parametrize(
    ("heads", "first", "second", "ctas"),
    [
        (8, FP8, NVFP4, 1),
        (8, FP8, FP8, 2),
        *(pytest.param(16, MXFP8, other, ctas, marks=slow) for other, ctas in ((NVFP4, 1), (MXFP8, 2), (FP8, 1))),
    ],
)
def test_decode_of_few_heads(heads: int, first: str, second: str, ctas: int) -> None:
    """Rows of several tiles, of none and of one, by a CTA; its rings go round. Or a row by several CTAs, of which some
    have nothing. One head less than there is room for."""
    key = DecodeSwapAbKey("sm_90a", heads, "listed", first, second, ctas=ctas)
    decode = WholeDecode(v41_call(first, second, heads - 1, [70, 0, 128, 1], [100, -1, 65, 0]), heads)
    decode.ctas = ctas
    program = parse(compile_report(key).ptx)
    records, make = orders.recorder(program)
    decode.run(program, key.smem_bytes, seed=1, events=make)
    decode.check()
    orders.check(records[0])


@pytest.mark.parametrize(("heads", "ctas"), [(8, 2), *(pytest.param(16, ctas, marks=slow) for ctas in (1, 2))])
def test_codes_of_few_heads(heads: int, ctas: int) -> None:
    """The bytes that bf16 results come to."""
    call = v41_call(FP8, NVFP4, heads, [70, 0, 128], [100, -1, 65])
    plain, quantized = WholeDecode(call, heads), WholeDecode(call, heads, codes=codes(1))
    for decode, is_quantized in ((plain, False), (quantized, True)):
        key = DecodeSwapAbKey("sm_90a", heads, quantized=is_quantized, ctas=ctas)
        decode.ctas = ctas
        program = parse(compile_report(key).ptx)
        records, make = orders.recorder(program)
        decode.run(program, key.smem_bytes, seed=1, events=make if is_quantized else None)
    out, lse = plain.results()
    quantized.codes.assert_those_of(out[0].flatten(0, 1), quantized.memory)
    assert torch.equal(quantized.results_of_logits(), lse)
    # where P was there is something else then
    orders.check(records[0], counts_versions=False)
