# SPDX-License-Identifier: Apache-2.0
"""Small calls of prefill's ops as parameters of Blackwell's kernels, and what comes out of the model's memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from cute_kernels.dsl.ptx import LOG2_E
from cute_kernels.isa_probes.meaning import TensorMap
from tests.gpu import decode_cases, paged_cases, test_mixed, test_prefill
from tests.gpu.prefill_checks import assert_results
from tests.model.launch import divisor, pack, run_grid
from tests.model.memory import GlobalMemory
from tests.model.problems import put
from tests.model.ptx import PARAMETERS, Program


@contextmanager
def on_host() -> Iterator[None]:
    """The cases of the GPU tests, and their meaning, on the host."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (decode_cases, paged_cases, test_mixed, test_prefill):
            patch.setattr(module, "DEVICE", "cpu")
        decode_cases._codes.cache_clear()
        yield
        decode_cases._codes.cache_clear()


RECORD = 576
"""Bytes between rows of a page."""


def bytes_between(tensor: torch.Tensor, axis: int) -> int:
    return tensor.stride(axis) * tensor.element_size()


def slab_map(
    memory: GlobalMemory, address: int, sizes: Sequence[int], strides: Sequence[int], box: Sequence[int]
) -> TensorMap:
    """How a copy of slabs, 128 bytes of each row, knows a tensor."""
    return TensorMap(address - memory.BASE, tuple(sizes), tuple(strides), tuple(box), 128 // box[0], 128)


@dataclasses.dataclass
class Results:
    """out, its rows in a larger tensor, and numbers by row and head, in the model's memory."""

    memory: GlobalMemory
    shape: tuple[int, int]
    numbers: int

    def __post_init__(self) -> None:
        rows, heads = self.shape
        self.head, self.row = 512 * 2 + 32, heads * (512 * 2 + 32) + 64
        self.out = self.memory.reserve(rows * self.row)
        self.places = [self.memory.reserve(rows * heads * 4) for _ in range(self.numbers)]

    @property
    def logs(self) -> list[int]:
        """Parameters: addresses of numbers by row and head, and strides."""
        return [value for place in self.places for value in (place, self.shape[1] * 4, 4)]

    def get(self) -> tuple[torch.Tensor, ...]:
        rows, heads = self.shape
        raw = torch.from_numpy(self.memory.get(self.out, (rows * self.row // 2,), np.int16)).view(torch.bfloat16)
        out = raw.as_strided((rows, heads, 512), (self.row // 2, self.head // 2, 1))
        return out, *(torch.from_numpy(self.memory.get(place, self.shape, np.float32)) for place in self.places)

    def assert_written_once(self) -> None:
        start = self.out - self.memory.BASE
        written = self.memory.written[start : start + self.shape[0] * self.row].reshape(self.shape[0], self.row)
        written = written[:, : self.shape[1] * self.head].reshape(*self.shape, self.head)
        assert (written[..., : 512 * 2] == 1).all()
        assert (self.memory.written.sum(dtype=np.int64)) == np.prod(self.shape) * (512 * 2 + 4 * self.numbers)


@dataclasses.dataclass
class Problem:
    """A call that one of Blackwell's kernels runs in the model.

    call     of the GPU tests
    program  what the kernel is compiled to
    size     bytes of its shared memory
    cluster  blocks that share a work tile
    """

    call: Any
    program: Program
    size: int
    cluster: int = 1

    numbers = 2
    """Results by row and head."""

    @property
    def q(self) -> torch.Tensor:
        return self.call.q

    def sources(self, memory: GlobalMemory) -> tuple[list[TensorMap], list[Any], list[Any]]:
        """Tensor maps of what rows are gathered from; where rows are; what comes behind the results."""
        raise NotImplementedError

    def run(self, blocks: int, **options: Any) -> tuple[torch.Tensor, ...]:
        memory, q = GlobalMemory(1 << 25), self.q
        rows, heads, _ = q.shape
        results = Results(memory, (rows, heads), self.numbers)
        address, strides = put(memory, q), (bytes_between(q, 0), bytes_between(q, 1))
        sources, values, behind = self.sources(memory)
        width = 128 // q.element_size()
        own = slab_map(memory, address, (512, heads, rows), strides[::-1], (width, 64, 1))
        places = (PARAMETERS + parameter.offset for parameter in self.program.parameters)
        maps = dict(zip(places, [own, *sources], strict=False))
        values = [*[bytes(128)] * len(maps), address, *strides, heads, *values]
        values += [results.out, results.row, results.head, *results.logs, *behind, put(memory, self.call.sink)]
        bits = int(heads > 64 * self.cluster)
        parameters = pack(self.program, [*values, self.call.scale * LOG2_E, rows << bits, bits])
        grid = min(blocks // self.cluster, rows << bits) * self.cluster
        options |= {"cluster": self.cluster, "size": self.size, "tensor_maps": maps}
        run_grid(self.program, parameters, memory, blocks=grid, **options)
        results.assert_written_once()
        return results.get()

    def check(self, blocks: int, **options: Any) -> tuple[torch.Tensor, ...]:
        """Run it, and hold the results against float64."""
        with on_host():
            want = self.call.expected()
            got = self.run(blocks, **options)
        assert_results(got, want, self.q.float(), self.call.scale, getattr(self.call, "out_scale", 1.0))
        return got


class Prefill(Problem):
    def sources(self, memory: GlobalMemory) -> tuple[list[TensorMap], list[Any], list[Any]]:
        call = self.call
        kv, step = put(memory, call.kv), bytes_between(call.kv, 0)
        values = [kv, step, len(call.kv), put(memory, call.indices), bytes_between(call.indices, 0)]
        values += [call.indices.shape[2], put(memory, call.length)]
        return [slab_map(memory, kv, (512, len(call.kv)), (step,), (64, 1))], values, []


class Mixed(Problem):
    numbers = 1

    @property
    def q(self) -> torch.Tensor:
        query: torch.Tensor = self.call.query
        return query

    def sources(self, memory: GlobalMemory) -> tuple[list[TensorMap], list[Any], list[Any]]:
        call = self.call
        maps, values = [], []
        for pool in (call.window, call.window if call.compressed is None else call.compressed):
            pages, rows, _ = pool.shape
            base, row, step = put(memory, pool), 512 * pool.element_size(), pool.stride(0) // 512
            assert pool.stride(0) % 512 == 0
            maps.append(slab_map(memory, base, (512, (pages - 1) * step + rows), (row,), (128 // (row // 512), 1)))
            values += [base, pages * rows, *divisor(rows), step - rows]
        given = call.arguments()
        values += [put(memory, call.indices), bytes_between(call.indices, 0), call.indices.shape[1], call.window_size]
        values += [put(memory, call.lengths), put(memory, given["cum_seq_lens_q"]), put(memory, given["seq_lens"])]
        return maps, [*values, len(call.seq_lens)], [call.out_scale]


class Paged(Problem):
    def sources(self, memory: GlobalMemory) -> tuple[list[TensorMap], list[Any], list[Any]]:
        call = self.call
        given = call.arguments()
        window = call.pool, call.table
        codes, rope, values, steps = [], [], [], []
        for pool, table in (window, window if call.compressed is None else (call.compressed, call.compressed_table)):
            assert pool.stride % RECORD == 0
            base, rows = put(memory, pool.bytes), pool.pages * (pool.stride // RECORD)
            first = base - memory.BASE
            codes.append(TensorMap(first, (112, rows), (RECORD,), (112, 1), 4, 0))
            rope.append(TensorMap(first + 448, (64, rows), (RECORD,), (64, 1), 2, 128))
            values += [base, pool.stride, pool.pages, *divisor(pool.rows)]
            values += [put(memory, table), bytes_between(table, 0), table.shape[1]]
            steps.append(pool.stride // RECORD)
        columns = 0 if call.compressed is None else call.compressed_table.shape[1] * call.compressed.rows
        lists = [0, 0, columns]
        if call.topk is not None:
            count = call.topk.shape[1]
            lists = [put(memory, call.topk), bytes_between(call.topk, 0), count] if count else [0, 0, 0]
        values += [call.window_size, *lists, *divisor(call.ratio or 1), put(memory, given["query_start_loc"])]
        return [*codes, *rope], [*values, put(memory, given["seq_lens"]), len(call.seq_lens), *steps], []
