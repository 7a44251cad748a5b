# SPDX-License-Identifier: Apache-2.0
"""Caches built byte by byte, and attention over them in plain loops, without the package's formats and references."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
import torch

from cute_kernels import formats
from tests import oracle
from tests.helpers import raw_bytes

FP8 = "fp8_ds_mla/1"
BF16 = "plain_bf16/1"
PLAIN_FP8 = "plain_fp8/1"
INT_MIN, INT_MAX = -(2**31), 2**31 - 1
SCALE = 512**-0.5


class Pool:
    """A cache whose every byte is `poison`, padding included, until records are put into it."""

    def __init__(
        self, kv_format: str, num_blocks: int, rows: int, seed: int = 0, poison: int = 0xFF, extra_stride: int = 0
    ) -> None:
        fmt = formats.FORMATS[kv_format]
        self.kv_format, self.rows, self.capacity = kv_format, rows, num_blocks * rows
        self.cache = fmt.allocate(num_blocks, rows, "cpu", fmt.page_stride(rows) + extra_stride)
        self.bytes = raw_bytes(self.cache).numpy()
        self.bytes.fill(poison)
        self.page_stride = self.cache.stride(0) * self.cache.element_size()
        self.rng = np.random.default_rng(seed)

    def _page(self, slot: int) -> tuple[int, int]:
        return (slot // self.rows) * self.page_stride, slot % self.rows

    def put(self, slot: int) -> None:
        """Store a random record of moderate values."""
        page, o = self._page(slot)
        if self.kv_format == FP8:
            data = page + o * 576
            self.bytes[data : data + 448] = self._codes(448, 0x60)
            self.bytes[data + 448 : data + 576] = self._bf16(64)
            scale = page + self.rows * 576 + o * 8
            self.bytes[scale : scale + 7] = self.rng.integers(120, 125, 7)
            self.bytes[scale + 7] = 0xFF  # the unused byte means nothing
        elif self.kv_format == BF16:
            self.bytes[page + o * 1024 : page + o * 1024 + 1024] = self._bf16(512)
        else:
            self.bytes[page + o * 512 : page + o * 512 + 512] = self._codes(512, 0x40)

    def put_all(self, slots: Iterable[int]) -> None:
        for slot in slots:
            self.put(int(slot))

    def store(self, slot: int, row: np.ndarray) -> None:
        """Store given values, which must be exact in bf16, in a plain bf16 pool."""
        assert self.kv_format == BF16
        page, o = self._page(slot)
        data = torch.from_numpy(row).to(torch.bfloat16).view(torch.uint8).numpy()
        self.bytes[page + o * 1024 : page + o * 1024 + 1024] = data

    def row(self, slot: int) -> np.ndarray:
        """float64 [512] of a record."""
        page, o = self._page(slot)
        if self.kv_format == FP8:
            data, scale = page + o * 576, page + self.rows * 576 + o * 8
            factors = 2.0 ** (self.bytes[scale : scale + 7].astype(np.float64) - 127)
            nope = oracle.E4M3[self.bytes[data : data + 448]] * np.repeat(factors, 64)
            return np.concatenate([nope, from_bf16(self.bytes[data + 448 : data + 576])])
        if self.kv_format == BF16:
            return from_bf16(self.bytes[page + o * 1024 : page + o * 1024 + 1024])
        return oracle.E4M3[self.bytes[page + o * 512 : page + o * 512 + 512]]

    def _codes(self, n: int, largest: int) -> np.ndarray:
        return (self.rng.integers(0, largest, n) | (self.rng.integers(0, 2, n) << 7)).astype(np.uint8)

    def _bf16(self, n: int) -> np.ndarray:
        return torch.from_numpy(self.rng.standard_normal(n)).to(torch.bfloat16).view(torch.uint8).numpy()


def from_bf16(raw: np.ndarray) -> np.ndarray:
    """float64 values of little-endian bf16 bytes."""
    return (raw.copy().view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def pick(pool: Pool, slots: Iterable[int], length: int | None = None) -> list[np.ndarray]:
    """The records that a row of slots names below its length, in order."""
    rows = []
    for column, slot in enumerate(slots):
        if (length is None or column < length) and 0 <= slot < pool.capacity:
            rows.append(pool.row(int(slot)))
    return rows


def paged(pool: Pool, table: Sequence[int], entries: Iterable[int]) -> list[np.ndarray]:
    """The records of a request's entries, through its row of the block table."""
    slots = []
    for entry in entries:
        column = int(entry) // pool.rows
        if entry >= 0 and column < len(table) and table[column] >= 0:
            slots.append(int(table[column]) * pool.rows + int(entry) % pool.rows)
    return pick(pool, slots)


def attention(
    q: np.ndarray, rows: list[np.ndarray], scale: float, sink: Sequence[float] | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(out [h, 512], max [h], lse [h]) in float64, one head at a time."""
    heads = q.shape[0]
    out, top, lse = np.zeros((heads, 512)), np.full(heads, -np.inf), np.full(heads, np.inf)
    if not rows:
        return out, top, lse
    for h in range(heads):
        scores = [scale * math.fsum(q[h] * k) for k in rows]
        top[h] = max(scores)
        lse[h] = top[h] + math.log(math.fsum(math.exp(s - top[h]) for s in scores))
        extra = -math.inf if sink is None else sink[h]
        if extra == math.inf:
            continue
        logits = [*scores, extra]
        exps = [math.exp(s - max(logits)) for s in logits]
        total = math.fsum(exps)
        out[h] = sum(e / total * k for e, k in zip(exps, rows, strict=False))
    return out, top, lse


def assert_bf16(out: torch.Tensor, expected: np.ndarray) -> None:
    """`out` is the expected float64 result rounded to fp32 and then to bf16, bit for bit but for the sign of zero."""
    assert out.dtype == torch.bfloat16
    np.testing.assert_array_equal(oracle.to_numpy(out), oracle.bf16_round(expected.astype(np.float32)))


def assert_fp32(value: torch.Tensor, expected: np.ndarray) -> None:
    assert value.dtype == torch.float32
    np.testing.assert_allclose(oracle.to_numpy(value), expected, rtol=1e-6, atol=1e-6)


def bf16_query(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


def int32(values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def sink_of(kind: str, heads: int) -> torch.Tensor | None:
    """None, or a sink with -inf, +inf and finite heads among it."""
    if kind == "none":
        return None
    if kind == "mixed":
        values = [-math.inf, 0.5, math.inf, 3.0, -20.0]
        return torch.tensor([values[h % 5] for h in range(heads)], dtype=torch.float32)
    return torch.full((heads,), {"minus": -math.inf, "plus": math.inf, "finite": 1.25}[kind], dtype=torch.float32)


def apart(cache: torch.Tensor, step: int) -> torch.Tensor:
    """The same pages, or rows of a buffer, `step` elements apart: any step that holds one."""
    pages, rows, size = cache.shape
    assert step >= rows * size
    moved = torch.empty(pages * step, dtype=cache.dtype).as_strided((pages, rows, size), (step, size, 1))
    return moved.copy_(cache)
