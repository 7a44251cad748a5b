# SPDX-License-Identifier: Apache-2.0
"""Small calls of ops, as a kernel's parameters, and what comes out of the model's memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from cute_kernels.dsl.ptx import LOG2_E
from cute_kernels.output.ops import fused_inv_rope_fp8_quant, output_scale_shape
from cute_kernels.sparse_mla import schedule
from tests.gpu import decode_cases
from tests.model.launch import divisor, pack, run_grid
from tests.model.memory import GlobalMemory
from tests.model.ptx import Program


def put(memory: GlobalMemory, tensor: torch.Tensor | None) -> int:
    """Address of a copy of all the bytes that lie behind a tensor, where the tensor begins; 0 of None."""
    if tensor is None:
        return 0
    raw = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage(), 0, (tensor.untyped_storage().nbytes(),))
    return memory.put(raw.numpy()) + tensor.storage_offset() * tensor.element_size()


def lengths(memory: GlobalMemory, tensor: torch.Tensor | None) -> tuple[int, int, int]:
    """(address, stride of requests, of tokens) of lengths [b] or [b, s_q]."""
    if tensor is None:
        return 0, 0, 0
    return put(memory, tensor), tensor.stride(0), tensor.stride(1) if tensor.dim() == 2 else 0


@contextmanager
def on_host() -> Iterator[None]:
    """The cases of the GPU tests, on the host."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode_cases, "DEVICE", "cpu")
        decode_cases._codes.cache_clear()
        yield
        decode_cases._codes.cache_clear()


@dataclasses.dataclass
class Codes:
    """Results as e4m3 codes: see QuantOutput."""

    positions: torch.Tensor
    table: torch.Tensor
    groups: int

    def place(self, memory: GlobalMemory, rows: int, heads: int) -> list[Any]:
        """Parameters."""
        width, padded = heads // self.groups * 512, -(-rows // 4) * 4
        self.out, self.scales = memory.reserve(rows * heads * 512), memory.reserve(heads * 4 * padded * 4)
        values = [
            *self.place_angles(memory),
            self.out,
            self.groups * width,
            width,
            self.scales,
            width // 128 * padded * 4,
            padded * 4,
        ]
        return [*values, rows, padded, *divisor(heads // self.groups)]

    def place_angles(self, memory: GlobalMemory) -> list[Any]:
        """Parameters."""
        return [put(memory, self.positions), 8, put(memory, self.table), 256, len(self.table)]

    def get(self, memory: GlobalMemory, rows: int, heads: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes uint8 [rows, groups, width] and scales [groups, width / 128, padded rows]."""
        width, padded = heads // self.groups * 512, -(-rows // 4) * 4
        codes = memory.get(self.out, (rows, self.groups, width), np.uint8)
        scales = memory.get(self.scales, (self.groups, width // 128, padded), np.float32)
        return torch.from_numpy(codes), torch.from_numpy(scales)

    def assert_those_of(self, plain: torch.Tensor, memory: GlobalMemory) -> None:
        """Of bf16 results [rows, heads, 512]; and that every byte of results was written once."""
        rows, heads, _ = plain.shape
        per_group = heads // self.groups
        codes = torch.empty(rows, self.groups, per_group * 512, dtype=torch.float8_e4m3fn)
        scales = torch.empty(output_scale_shape(rows, self.groups, per_group))
        given = plain, self.positions, self.table, self.groups, per_group
        fused_inv_rope_fp8_quant(*given, out=codes, scale_out=scales)
        mine, my_scales = self.get(memory, rows, heads)
        assert torch.equal(mine, codes.view(torch.uint8))
        assert torch.equal(my_scales, scales)
        assert (memory.written[memory.writable] == 1).all()


@dataclasses.dataclass
class Decode:
    """A call of sparse_mla_decode in the model's memory, with fp32 or bf16 results in `parts` parts."""

    call: decode_cases.Call
    heads: int
    out_fp32: bool = False
    parts: int = 1
    part_tiles: int = 0
    codes: Any = None
    """Codes, where that is what results become."""
    norm: Any = None
    """Sums of squares fp32 [rows, heads * 4] and eps, where queries are raw; with codes."""
    halves: bool = False
    """Whether long rows are cut in halves: then there may be more pairs than work items."""

    def place(self, program: Program) -> tuple[GlobalMemory, bytes, int]:
        """(memory, parameters, work items) for Hopper's kernel: see DecodeKernel.__call__."""
        call, memory = self.call, GlobalMemory()
        batch, tokens, heads, _ = call.q.shape
        head_blocks = -(-heads // self.heads)
        self.items = batch * tokens * head_blocks * self.parts
        q = put(memory, call.q)
        first = (call.pool, call.indices, call.length)
        if call.extra is None:
            second: tuple[Any, Any, Any] = first
        elif call.extra_indices is not None:
            second = (call.extra, call.extra_indices, call.extra_length)
        else:
            second = (call.extra, call.table[:, None].expand(-1, tokens, -1), call.visible)
        sources: list[Any] = []
        for pool, indices, length in (first, second):
            sources += [put(memory, pool.bytes), pool.stride, pool.pages, *divisor(pool.rows)]
            strides = indices.stride(0) * 4, indices.stride(1) * 4
            sources += [put(memory, indices), *strides, indices.shape[2], *lengths(memory, length)]
        size = 4 if self.out_fp32 else 2
        row = heads * 512 * size
        self.lse = memory.reserve(self.parts * batch * heads * tokens * 4)
        lse_strides = batch * heads * tokens * 4, heads * tokens * 4, tokens * 4, 4
        values = [q, *(stride * 2 for stride in call.q.stride()[:3]), heads]
        if self.norm is not None:
            values += [put(memory, self.norm[0]), heads * 16, self.norm[1], *self.codes.place_angles(memory)]
        values += sources
        if self.codes is None:
            self.out = memory.reserve(self.parts * batch * tokens * row)
            values += [self.out, batch * tokens * row, tokens * row, row, 512 * size]
        values += [self.lse, *lse_strides, heads]
        if self.codes is not None:
            values += self.codes.place(memory, batch * tokens, heads)
        values += [put(memory, call.sink), call.scale * LOG2_E]
        for number in (head_blocks, self.parts, tokens):
            values += divisor(number)
        values += [self.part_tiles, self.items]
        if self.halves:
            size = self.items * schedule.KEPT_BYTES
            self.kept = memory.reserve(size, align=128)
            memory.bytes[self.kept - memory.BASE :][:size] = 0xFF
            values += [0, self.kept]
        self.memory = memory
        return memory, pack(program, [*values, *[0] * (len(program.parameters) - len(values))]), self.items

    def results(self) -> tuple[torch.Tensor, torch.Tensor]:
        """out [parts, b, s_q, h, 512] and lse [parts, b, h, s_q]."""
        batch, tokens, heads, _ = self.call.q.shape
        shape = self.parts, batch, tokens, heads, 512
        if self.out_fp32:
            out = torch.from_numpy(self.memory.get(self.out, shape, np.float32))
        else:
            out = torch.from_numpy(self.memory.get(self.out, shape, np.int16)).view(torch.bfloat16)
        return out, self.results_of_logits()

    def results_of_logits(self) -> torch.Tensor:
        """lse [parts, b, h, s_q]."""
        batch, tokens, heads, _ = self.call.q.shape
        return torch.from_numpy(self.memory.get(self.lse, (self.parts, batch, heads, tokens), np.float32))

    def run(self, program: Program, size: int, pairs: int = 2, **options: Any) -> Any:
        memory, parameters, items = self.place(program)
        blocks = 2 * (pairs if self.halves else min(pairs, items))
        return run_grid(program, parameters, memory, blocks=blocks, cluster=2, size=size, **options)

    def check(self) -> None:
        """That the results are near to what the call means, and all of them were written once."""
        out, lse = self.results()
        with on_host():
            decode_cases.assert_near((out[0], lse[0]), self.call.expected())
        if self.halves:
            self.memory.writable[self.kept - self.memory.BASE :][: self.items * schedule.KEPT_BYTES] = False
        written = self.memory.written[self.memory.writable]
        assert (written == 1).all(), f"{int((written != 1).sum())} bytes of results were not written once"
