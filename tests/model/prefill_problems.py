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
from cute_kernels.facts.meaning import TensorMap
from tests.gpu import decode_checks, test_prefill
from tests.gpu.prefill_checks import assert_results
from tests.model.launch import pack, run_grid
from tests.model.memory import GlobalMemory
from tests.model.problems import put
from tests.model.ptx import PARAMETERS, Program


@contextmanager
def on_host() -> Iterator[None]:
    """The meaning of calls, as GPU tests have it, on the host."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(test_prefill, "DEVICE", "cpu")
        yield


def bytes_between(tensor: torch.Tensor, axis: int) -> int:
    return tensor.stride(axis) * tensor.element_size()


def map_of(memory: GlobalMemory, address: int, sizes: Sequence[int], strides: Sequence[int], box: Sequence[int]) -> Any:
    """How a copy of slabs of bf16 knows a tensor."""
    return TensorMap(address - memory.BASE, tuple(sizes), tuple(strides), tuple(box), 2, 128)


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
class Prefill:
    call: test_prefill.Call
    size: int

    def run(self, program: Program, blocks: int, **options: Any) -> tuple[torch.Tensor, ...]:
        call, memory = self.call, GlobalMemory(1 << 25)
        (rows, heads, _), (count, _, columns) = call.q.shape, call.indices.shape
        results = Results(memory, (rows, heads), 2)
        q, kv = put(memory, call.q), put(memory, call.kv)
        strides = bytes_between(call.q, 0), bytes_between(call.q, 1)
        maps = [
            map_of(memory, q, (512, heads, rows), strides[::-1], (64, 64, 1)),
            map_of(memory, kv, (512, len(call.kv)), (bytes_between(call.kv, 0),), (64, 1)),
        ]
        bits = int(heads > 64)
        values = [bytes(128), bytes(128), q, *strides, heads, kv, bytes_between(call.kv, 0), len(call.kv)]
        values += [put(memory, call.indices), bytes_between(call.indices, 0), columns, put(memory, call.length)]
        values += [results.out, results.row, results.head, *results.places, put(memory, call.sink)]
        values += [call.scale * LOG2_E, count << bits, bits]
        grid = min(blocks, count << bits)
        places = (PARAMETERS + parameter.offset for parameter in program.parameters)
        run_grid(
            program,
            pack(program, values),
            memory,
            blocks=grid,
            size=self.size,
            tensor_maps=dict(zip(places, maps, strict=False)),
            **options,
        )
        results.assert_written_once()
        return results.get()

    def check(self, program: Program, blocks: int, **options: Any) -> None:
        with on_host():
            want = self.call.expected()
        assert_results(self.run(program, blocks, **options), want, self.call.q, self.call.scale)
