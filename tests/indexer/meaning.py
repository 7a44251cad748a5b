# SPDX-License-Identifier: Apache-2.0
"""What the indexer computes, in numpy and integers, and the random data its tests share."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tests import oracle
from tests.helpers import poisoned_pool

E2M1_SIGNED = np.concatenate([oracle.E2M1, -oracle.E2M1])
NEG_INF = np.float32(-np.inf)
INT = torch.int32
LOW, HIGH = torch.iinfo(INT).min, torch.iinfo(INT).max


def e4m3_codes(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Random finite e4m3 codes, all magnitudes and both zeros alike."""
    codes = rng.integers(0, 256, shape, dtype=np.uint8)
    return np.where((codes & 0x7F) == 0x7F, np.uint8(0x80), codes)


def unpack(packed: np.ndarray) -> np.ndarray:
    """[..., n] bytes -> [..., 2 n] codes, low nibble first."""
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)


def fp8_dots(q: np.ndarray, k: np.ndarray) -> np.ndarray:
    """Exact products of e4m3 codes q [M, H, 128] and k [N, 128], by integers: float64 [M, H, N]."""
    q_int, k_int = ((oracle.E4M3[c] * 512).astype(np.int64) for c in (q, k))
    return (q_int @ k_int.T) / 2.0**18


def mxfp4_dots(q: np.ndarray, q_byte: np.ndarray, k: np.ndarray, k_byte: np.ndarray) -> np.ndarray:
    """Products of packed e2m1 codes with their scale bytes; the four blocks are exact integers, added in order."""
    q_int, k_int = ((E2M1_SIGNED[unpack(c)] * 2).astype(np.int64) for c in (q, k))
    total = np.zeros((*q.shape[:2], k.shape[0]))
    for b in range(4):
        part = q_int[..., 32 * b : 32 * b + 32] @ k_int[:, 32 * b : 32 * b + 32].T
        exponent = q_byte[..., b].astype(int)[..., None] + k_byte[:, b].astype(int) - 254
        total = total + np.ldexp(part.astype(np.float64) / 4, exponent)
    return total


def scores(dots: np.ndarray, weights: np.ndarray, k_scale: np.ndarray) -> np.ndarray:
    """fp32 [M, N]: heads one after the other in float64, the key's scale, one rounding."""
    total = np.zeros((dots.shape[0], dots.shape[2]))
    for h in range(dots.shape[1]):
        total = total + np.maximum(dots[:, h], 0.0) * weights[:, h].astype(np.float64)[:, None]
    with np.errstate(over="ignore"):
        return (total * k_scale.astype(np.float64)).astype(np.float32)


def top_k(row: Any, k: int) -> set[int]:
    """The k best columns of a row by the total order: numbers before NaN, larger first, lower column first."""
    order = sorted(range(len(row)), key=lambda n: (row[n] != row[n], 0.0 if row[n] != row[n] else -row[n], n))
    return set(order[:k])


class Case:
    """Random queries, keys and weights in one record format, as numpy, as tensors and as scores."""

    def __init__(self, kv_format: str, rows: int, heads: int, keys: int, seed: int = 0, wide: bool = False) -> None:
        rng = np.random.default_rng(seed)
        self.kv_format, self.mxfp4 = kv_format, kv_format != "indexer_fp8/1"
        self.weights = (rng.standard_normal((rows, heads)) * 2.0 ** rng.integers(-4, 4, (rows, 1))).astype(np.float32)
        if self.mxfp4:
            low, high = (0, 255) if wide else (110, 130)
            self.q = rng.integers(0, 256, (rows, heads, 64), dtype=np.uint8)
            self.k = rng.integers(0, 256, (keys, 64), dtype=np.uint8)
            self.q_byte = rng.integers(low, high, (rows, heads, 4), dtype=np.uint8)
            self.k_byte = rng.integers(low, high, (keys, 4), dtype=np.uint8)
            dots, factor = mxfp4_dots(self.q, self.q_byte, self.k, self.k_byte), np.ones(keys, np.float32)
        else:
            self.q, self.k = e4m3_codes(rng, rows, heads, 128), e4m3_codes(rng, keys, 128)
            factor = np.exp2(rng.integers(-20, 10, keys)).astype(np.float32)
            if wide:
                factor = (factor * rng.uniform(1, 2, keys)).astype(np.float32)
            self.k_byte = factor.view(np.uint8).reshape(keys, 4)
            dots = fp8_dots(self.q, self.k)
        self.scores = scores(dots, self.weights, factor)

    def query(self, rows: Any = slice(None), *lead: int) -> Any:
        """The query argument of the ops for some rows, its leading dimension reshaped to `lead` if given."""
        shape = lead or (-1,)
        q = torch.from_numpy(self.q[rows])
        q = q.reshape(*shape, *q.shape[1:])
        if not self.mxfp4:
            return q.view(torch.float8_e4m3fn)
        scale = torch.from_numpy(self.q_byte[rows]).view(torch.int32)[..., 0]
        return q, scale.reshape(*shape, scale.shape[-1])

    def kv(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The kv argument of mqa_logits."""
        k, scale = torch.from_numpy(self.k), torch.from_numpy(self.k_byte)
        if self.mxfp4:
            return k, scale.contiguous().view(torch.int32)[:, 0]
        return k.view(torch.float8_e4m3fn), scale.contiguous().view(torch.float32)[:, 0]

    def w(self, rows: Any = slice(None)) -> torch.Tensor:
        return torch.from_numpy(self.weights[rows])

    def store(self, pool: torch.Tensor, slots: np.ndarray) -> None:
        """Write key i into the row slots[i] of a pool, byte by byte."""
        block_size, width = pool.shape[1], self.k.shape[1]
        pages = pool.as_strided((pool.shape[0], block_size * (width + 4)), (pool.stride(0), 1)).numpy()
        for code, scale, slot in zip(self.k, self.k_byte, slots, strict=True):
            page, row = divmod(int(slot), block_size)
            pages[page, row * width : (row + 1) * width] = code
            base = block_size * width + row * 4
            pages[page, base : base + 4] = scale


def paged(case: Case, fmt: Any, lengths: list[int], block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A poisoned pool with the case's keys, request after request, on shuffled pages, and its block table.

    Every byte that holds no key is poison, and every table entry past a request's pages is far outside the pool.
    """
    rng = np.random.default_rng(11)
    counts = [-(-n // block_size) for n in lengths]
    pool = poisoned_pool(fmt, sum(counts) + 2, block_size, extra_stride=fmt.alignment)
    order = rng.permutation(sum(counts) + 2)
    table = np.full((len(lengths), max([*counts, 0]) + 1), -1_000_000, dtype=np.int32)
    slots, used = [], 0
    for r, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        table[r, :count] = order[used : used + count]
        used += count
        slots += [table[r, i // block_size] * block_size + i % block_size for i in range(length)]
    case.store(pool, np.array(slots, dtype=np.int64))
    return pool, torch.from_numpy(table)


def ranges(rows: int, keys: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Starts and ends of all kinds: whole, empty, reversed, beyond both sides, single keys."""
    g = torch.Generator().manual_seed(seed)
    start = torch.randint(-3, keys + 2, (rows,), generator=g)
    end = start + torch.randint(-2, keys + 4, (rows,), generator=g)
    special = [(0, keys), (5, 5), (7, 3), (-4, keys + 9), (keys - 1, keys), (LOW, HIGH), (HIGH, LOW)][:rows]
    for i, (a, b) in enumerate(special):
        start[i], end[i] = a, b
    return start.to(INT), end.to(INT)
