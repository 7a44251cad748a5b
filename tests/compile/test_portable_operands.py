# SPDX-License-Identifier: Apache-2.0
"""How the portable decode kernel's lanes find operands: its own functions, run for all lanes of a warp at once.

Needs CuTe DSL, which the functions are traced with, and no GPU: instructions are played with integers here.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests import oracle

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from cute_kernels.dsl import convert
from cute_kernels.formats import FP8_DS_MLA, PLAIN_BF16
from cute_kernels.sparse_mla.mma_sync import operands
from cute_kernels.sparse_mla.mma_sync.decode import DecodeConfig
from cute_kernels.sparse_mla.mma_sync.operands import CODES, LARGE, WIDE, fp8_chunk, wide_chunk

KEYS = 32
LANE = np.arange(32)
R, C = LANE // 4, LANE % 4
CODE_VALUES = oracle.E4M3.copy()
CODE_VALUES[[0x7F, 0xFF]] = 480, -480


def halves(words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The bf16 numbers in the low and in the high halves of words."""
    low, high = (((words >> shift & 0xFFFF) << 16).astype(np.uint32).view(np.float32) for shift in (0, 16))
    return low.astype(np.float64), high.astype(np.float64)


def bf16_bits(values: np.ndarray) -> np.ndarray:
    return torch.from_numpy(values).bfloat16().view(torch.int16).numpy().astype(np.int64) & 0xFFFF


class Memory:
    """Shared memory, and the instructions that read it or convert what was read; a value is an array over lanes."""

    def __init__(self) -> None:
        self.bytes = np.full(KEYS * 600, 0xFF, np.uint8)

    def load_shared_s32(self, at: np.ndarray) -> np.ndarray:
        assert (at % 4 == 0).all()
        return sum(self.bytes[at + i].astype(np.int64) << 8 * i for i in range(4))

    def load_shared_128(self, at: np.ndarray) -> list[np.ndarray]:
        assert (at % 16 == 0).all()
        return [self.load_shared_s32(at + 4 * i) for i in range(4)]

    def load_matrices_transposed(self, at: np.ndarray) -> list[np.ndarray]:
        assert (at % 16 == 0).all()
        rows = at.reshape(4, 8, 1) + np.arange(0, 16, 2)
        matrices = self.bytes[rows].astype(np.int64) | self.bytes[rows + 1].astype(np.int64) << 8
        return [m[2 * C, R] | m[2 * C + 1, R] << 16 for m in matrices]

    @staticmethod
    def permute_bytes(a: Any, b: Any, selector: Any) -> np.ndarray:
        a, b, selector = (np.broadcast_to(x, 32) for x in (a, b, selector))
        all_bytes = np.stack([x >> 8 * i & 0xFF for x in (a, b) for i in range(4)])
        return sum(all_bytes[selector >> 4 * i & 7, LANE] << 8 * i for i in range(4))

    @staticmethod
    def bf16x2_of_codes(words: np.ndarray, left: int) -> np.ndarray:
        codes = [words << left >> shift & 0xFF for shift in (8, 24)]
        low, high = (bf16_bits(CODE_VALUES[code] * 2.0**-120) for code in codes)
        return low | high << 16

    @staticmethod
    def multiply_bf16x2(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        low, high = (bf16_bits(x * y) for x, y in zip(halves(a), halves(b), strict=True))
        return low | high << 16


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Memory:
    memory = Memory()
    monkeypatch.setattr(operands, "ptx", memory)
    monkeypatch.setattr(operands, "Int32", int)
    shuffle = SimpleNamespace(arch=SimpleNamespace(shuffle_sync=lambda value, owner: value[owner]))
    monkeypatch.setattr(operands, "cute", shuffle)
    return memory


def fill(memory: Memory, kind: int) -> tuple[np.ndarray, list[np.ndarray], int]:
    """Random columns of a warp: their values [KEYS, 64], factors by lane, and where those of key 0 are."""
    g = np.random.default_rng(kind)
    place: Callable[[int, int], int] = wide_chunk if kind == WIDE else fp8_chunk
    start = 0 if kind == WIDE else 3 * 64
    if kind == WIDE:
        numbers = torch.from_numpy(g.standard_normal((KEYS, 64))).bfloat16()
        values, data, factors = numbers.double().numpy(), numbers.view(torch.uint8).numpy(), []
    else:
        data = g.integers(0, 256, (KEYS, 64)).astype(np.uint8)
        most = convert.LARGEST_SINGLE_SCALE
        scales = g.integers(100, most + 1 if kind == CODES else 200, KEYS)
        values = CODE_VALUES[data] * np.exp2(scales[:, None] - 127.0)
        low, high = scales[2 * LANE % KEYS], scales[(2 * LANE + 1) % KEYS]
        factors = [convert.scale_pair(np.minimum(low, most), np.minimum(high, most)) & 0xFFFFFFFF]
        if kind == LARGE:
            low, high = (bf16_bits(np.exp2(np.maximum(x - most, 0.0))) for x in (low, high))
            factors.append(low | high << 16)
    for key in range(KEYS):
        for chunk in range(data.shape[1] // 16):
            at = start + place(key, chunk)
            memory.bytes[at : at + 16] = data[key, 16 * chunk : 16 * chunk + 16]
    return values, factors, start


@pytest.mark.parametrize("kind", [WIDE, CODES, LARGE])
@pytest.mark.parametrize("formats", [(FP8_DS_MLA.id,), (PLAIN_BF16.id,)])
def test_keys(memory: Memory, kind: int, formats: tuple[str, ...]) -> None:
    """Words 2 s and 2 s + 1 for product s: columns 16 c + 4 s .. + 3 of key r, paired as those of Q are."""
    values, factors, at = fill(memory, kind)
    plan = DecodeConfig("sm_90a", 64, formats)
    if plan.is_plain and kind != WIDE:
        return
    numbers = [np.full(32, 2 * i) | np.full(32, 2 * i + 1) << 16 for i in range(8)]
    columns = [[word & 0xFFFF, word >> 16] for word in operands.paired(numbers, plan)]
    at = at + operands.keys_at(LANE, kind)
    for n in range(KEYS // 8):
        b = operands.key_operands(operands.load_keys(at, kind), kind, factors, n, LANE, plan)
        for i in range(8):
            for half, got in enumerate(halves(b[i])):
                assert np.array_equal(got, values[8 * n + R, 16 * C + columns[i][half]])
        assert sorted(int(column[0]) for pair in columns for column in pair) == list(range(16))
        at = at + 8 * operands.key_bytes(kind)


@pytest.mark.parametrize("kind", [WIDE, CODES, LARGE])
def test_values(memory: Memory, kind: int) -> None:
    """Word 4 j + 2 odd + g: keys 2 c, 2 c + 1 of 8 g .., column 2 r, or the odd one behind it, of the j-th 16."""
    values, factors, at = fill(memory, kind)
    at = at + operands.values_at(LANE, kind)
    for p in range(KEYS // 16):
        for part in range(2):
            b = operands.value_operands(operands.load_values(at, kind), kind, factors, p, LANE)
            for i in range(8):
                j, odd, g = i // 4, i // 2 % 2, i % 2
                for half, got in enumerate(halves(b[i])):
                    key, column = 16 * p + 8 * g + 2 * C + half, 16 * (2 * part + j) + 2 * R + odd
                    assert np.array_equal(got, values[key, column])
            at = at ^ operands.other_half(kind)
        at = at + 16 * operands.key_bytes(kind)
