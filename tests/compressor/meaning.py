# SPDX-License-Identifier: Apache-2.0
"""Independent meaning of the compressor, in numpy: one entry at a time, from the formulas. Plus scenes to run ops on.

A scene holds the whole history of some requests: every token's projections, page tables, a state pool full of NaN and
a poisoned pool for the entries. Steps over any ranges of positions can be cut from it, and the bytes every entry must
have are computed from the history alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from cute_kernels import formats
from tests import helpers, oracle

GARBAGE = -1_000_000
EPS = 1e-6


def mean_of_window(kv: np.ndarray, score: np.ndarray) -> np.ndarray:
    """fp32 [H] softmax-weighted mean of fp32 [n, H] rows, in float64, rounded once."""
    kv, score = kv.astype(np.float64), score.astype(np.float64)
    weight = np.exp(score - score.max(axis=0))
    return ((weight * kv).sum(axis=0) / weight.sum(axis=0)).astype(np.float32)


def entry_values(
    mean: np.ndarray, weight: np.ndarray, cos_sin: np.ndarray, turn: bool = False, eps: float = EPS
) -> np.ndarray:
    """The bf16 values, as float64 [H], that are quantized for a mean fp32 [H]; `turn` adds the Hadamard transform."""
    y = oracle.rms_norm(mean.astype(np.float64), weight, eps).astype(np.float32)
    y[-64:] = oracle.rope_f32(y[-64:], cos_sin[:32], cos_sin[32:])
    values = oracle.bf16_round(y.astype(np.float64))
    return oracle.bf16_round(oracle.hadamard(values)) if turn else values


def put_record(
    page: np.ndarray, rows: int, row: int, format_id: str, values: np.ndarray, rounding: str, fp8_scale: float
) -> None:
    """Write one record into the bytes of a page of `rows` rows."""
    if format_id == "fp8_ds_mla/1":
        codes, scales = oracle.quantize_blocks(values[None, :448], 64, "e4m3")
        page[row * 576 : row * 576 + 448] = codes[0]
        page[row * 576 + 448 : row * 576 + 576] = oracle.bf16_bytes(values[448:])
        page[rows * 576 + row * 8 : rows * 576 + row * 8 + 7] = scales[0]
        page[rows * 576 + row * 8 + 7] = 0
    elif format_id == "plain_bf16/1":
        page[row * 1024 : row * 1024 + 1024] = oracle.bf16_bytes(values)
    elif format_id == "plain_fp8/1":
        inverse = np.float32(1.0) / np.float32(fp8_scale)
        page[row * 512 : row * 512 + 512] = oracle.e4m3_encode((values.astype(np.float32) * inverse).astype(np.float64))
    elif format_id == "indexer_fp8/1":
        codes, scales = oracle.quantize_blocks(values[None], 128, "e4m3")
        page[row * 128 : row * 128 + 128] = codes[0]
        scale = np.array([2.0 ** (int(scales[0, 0]) - 127)], dtype="<f4")
        page[rows * 128 + row * 4 : rows * 128 + row * 4 + 4] = scale.view(np.uint8)
    else:
        codes, scales = oracle.quantize_blocks(values[None], 32, "e2m1", rounding=rounding)
        page[row * 64 : row * 64 + 64] = codes[0, 0::2] | (codes[0, 1::2] << 4)
        page[rows * 64 + row * 4 : rows * 64 + row * 4 + 4] = scales[0]


@dataclass
class Kind:
    """A compressor: head size, ratio, entry format and its options."""

    head_dim: int = 512
    ratio: int = 4
    format_id: str = "fp8_ds_mla/1"
    rounding: str = "ties_to_lower"
    turn: bool = False
    fp8_scale: float | None = None

    @property
    def width(self) -> int:
        return self.head_dim * (2 if self.ratio == 4 else 1)

    @property
    def window(self) -> int:
        return 8 if self.ratio == 4 else 128

    def options(self) -> dict[str, Any]:
        scale = None if self.fp8_scale is None else torch.tensor([self.fp8_scale])
        return {
            "kv_format": self.format_id,
            "e2m1_rounding": self.rounding,
            "index_hadamard": self.turn,
            "fp8_scale": scale,
        }

    def __str__(self) -> str:
        extra = ("-even" if self.rounding == "ties_to_even" else "") + ("-turn" if self.turn else "")
        return f"{self.format_id.split('/')[0]}{extra}-{self.ratio}"


KINDS = [
    Kind(),
    Kind(ratio=128),
    Kind(format_id="plain_bf16/1"),
    Kind(format_id="plain_fp8/1", fp8_scale=0.3),
    Kind(ratio=128, format_id="plain_fp8/1", fp8_scale=0.0625),
    Kind(128, 4, "indexer_fp8/1"),
    Kind(128, 4, "indexer_fp8/1", turn=True),
    Kind(128, 4, "indexer_mxfp4/1"),
    Kind(128, 4, "indexer_mxfp4/1", rounding="ties_to_even", turn=True),
    Kind(128, 4, "indexer_mxfp4_wide/1"),
]


@dataclass
class Scene:
    """The history of requests with `lengths` tokens each, and the pools a run works on."""

    kind: Kind
    lengths: list[int]
    seed: int = 0
    state_rows: int = 4
    entry_rows: int = 4
    weight_dtype: torch.dtype = torch.bfloat16
    kv: list[np.ndarray] = field(init=False)
    score: list[np.ndarray] = field(init=False)

    def __post_init__(self) -> None:
        kind, width = self.kind, self.kind.width
        g = helpers.generator(self.seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=g)

        self.kv = [normal(n, width).numpy() for n in self.lengths]
        self.score = [(normal(n, width) * 3).numpy() for n in self.lengths]
        self.ape = normal(kind.ratio, width)
        self.weight = (normal(kind.head_dim) * torch.exp2(torch.arange(kind.head_dim) % 9 - 6)).to(self.weight_dtype)
        self.cos_sin = oracle.cos_sin_table(max([*self.lengths, 1]) + 3, 160000.0)
        self.state_format = formats.compressor_state(kind.head_dim, kind.ratio)
        self.state_table = self._table([-(-n // self.state_rows) for n in self.lengths], g)
        self.entry_table = self._table([-(-(n // kind.ratio) // self.entry_rows) for n in self.lengths], g)
        self.state_cache = self.new_state()
        self.kv_cache = self.new_entries()

    def _table(self, pages: list[int], g: torch.Generator) -> torch.Tensor:
        """Pages in random order, one spare page between any two used ones, garbage after the last of a request."""
        order = (torch.randperm(sum(pages), generator=g) * 2).tolist()
        table = torch.full((len(pages), max([*pages, 0]) + 2), GARBAGE, dtype=torch.int32)
        for r, n in enumerate(pages):
            table[r, :n] = torch.tensor([order.pop() for _ in range(n)], dtype=torch.int32)
        return table

    def new_state(self) -> torch.Tensor:
        pages = 2 * sum(-(-n // self.state_rows) for n in self.lengths) + 1
        cache = helpers.poisoned_pool(self.state_format, pages, self.state_rows, 64)
        helpers.raw_bytes(cache).fill_(0xFF)
        return cache

    def new_entries(self) -> torch.Tensor:
        kind = self.kind
        pages = 2 * sum(-(-(n // kind.ratio) // self.entry_rows) for n in self.lengths) + 1
        return helpers.poisoned_pool(formats.FORMATS[kind.format_id], pages, self.entry_rows, 512)

    def biased(self, r: int, p: int) -> np.ndarray:
        """fp32 [width]: the score the state cache holds for position p."""
        return self.score[r][p] + self.ape[p % self.kind.ratio].numpy()

    def state_slot(self, r: int, p: int) -> int:
        return int(self.state_table[r, p // self.state_rows]) * self.state_rows + p % self.state_rows

    def entry_slot(self, r: int, g: int) -> int:
        return int(self.entry_table[r, g // self.entry_rows]) * self.entry_rows + g % self.entry_rows

    def fill_state(self, r: int, first: int, stop: int) -> None:
        """Put positions first .. stop - 1 of request r into the state cache."""
        for p in range(first, stop):
            page, row = divmod(self.state_slot(r, p), self.state_rows)
            self.state_cache[page, row] = torch.from_numpy(np.concatenate([self.kv[r][p], self.biased(r, p)]))

    def mean(self, r: int, g: int) -> np.ndarray:
        """fp32 [H] of entry g of request r."""
        kind, h = self.kind, self.kind.head_dim
        rows_kv, rows_score = [], []
        for p in range((g + 1) * kind.ratio - kind.window, (g + 1) * kind.ratio):
            if p < 0:
                continue
            half = slice(h, 2 * h) if kind.ratio == 4 and p >= g * 4 else slice(0, h)
            rows_kv.append(self.kv[r][p][half])
            rows_score.append(self.biased(r, p)[half])
        return mean_of_window(np.stack(rows_kv), np.stack(rows_score))

    def entry_bytes(self, entries: list[tuple[int, int]]) -> torch.Tensor:
        """All bytes of a fresh entry pool after these (request, group) entries were stored."""
        pool = self.new_entries()
        raw = helpers.raw_bytes(pool).numpy()
        stride = pool.stride(0) * pool.element_size()
        for r, g in entries:
            page, row = divmod(self.entry_slot(r, g), self.entry_rows)
            put_record(raw[page * stride :], self.entry_rows, row, self.kind.format_id, *self._put(r, g))
        return torch.from_numpy(raw)

    def _put(self, r: int, g: int) -> tuple[np.ndarray, str, float]:
        kind = self.kind
        cos_sin = self.cos_sin[g * kind.ratio].numpy()
        values = entry_values(self.mean(r, g), oracle.to_numpy(self.weight), cos_sin, kind.turn)
        return values, kind.rounding, kind.fp8_scale or 1.0

    def step(self, ranges: list[tuple[int, int, int]], pad: int = 0, pad_before: int = 0) -> SimpleNamespace:
        """The tensors of a step over (request, first position, stop) ranges; block tables have one row per range.

        `pad` rows without slots follow, filled with NaN; `pad_before` such rows come first.
        """
        width, kind = self.kind.width, self.kind
        rows: list[tuple[int, int, int]] = [(i, r, p) for i, (r, a, b) in enumerate(ranges) for p in range(a, b)]
        n = pad_before + len(rows) + pad
        wide = torch.full((n + 2, 2 * width + 3), float("nan"))
        kv_score = wide[:n, : 2 * width]
        positions, slots, entry_slots = (torch.full((n,), -1, dtype=torch.int64) for _ in range(3))
        positions[:] = kind.ratio - 1
        requests = torch.zeros(n, dtype=torch.int32)
        for t, (i, r, p) in enumerate(rows, start=pad_before):
            kv_score[t] = torch.from_numpy(np.concatenate([self.kv[r][p], self.score[r][p]]))
            positions[t], requests[t], slots[t] = p, i, self.state_slot(r, p)
            if (p + 1) % kind.ratio == 0:
                entry_slots[t] = self.entry_slot(r, p // kind.ratio)
        starts = np.cumsum([pad_before] + [b - a for _, a, b in ranges])
        chosen = [r for r, _, _ in ranges]
        return SimpleNamespace(
            kv_score=kv_score,
            positions=positions,
            token_to_req_indices=requests,
            query_start_loc=torch.tensor(starts, dtype=torch.int32),
            slot_mapping=slots,
            entry_slots=entry_slots,
            block_table=self.state_table[chosen] if chosen else self.state_table[:0],
            closed=[(r, p // kind.ratio) for _, r, p in rows if (p + 1) % kind.ratio == 0],
        )
