# SPDX-License-Identifier: Apache-2.0
"""What sparse MLA decode is measured on: pools as the layers have them, and calls that read all over them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import torch

from cute_kernels.formats import FP8_DS_MLA, HEAD_DIM, ROPE_DIM, round_up
from cute_kernels.runtime.ops import OPS
from cute_kernels.sparse_mla.ops import sparse_mla_decode, sparse_mla_decode_workspace_size
from cute_kernels.sparse_mla.schedule import TILE, num_tiles
from perf.grid import lengths
from perf.measure import Call

OP = "sparse_mla_decode"
WINDOW = 128
WINDOW_PAGES, WINDOW_ROWS, WINDOW_REQUESTS = 3, 64, 2048
REQUESTS = {"c4": 256, "c128": 512}
ENTRIES = {"c4": 16384, "c128": 1024}
ROWS = {"c4": 64, "c128": 2}
"""Requests whose entries a compressed cache holds, entries of each, and rows of a page."""

MODES: Mapping[str, tuple[str, int]] = {
    "swa128": ("", 0),
    "c4_128+512": ("c4", 512),
    "c4_128+1024": ("c4", 1024),
    "c128_128+256": ("c128", 256),
    "c128_128+1024": ("c128", 1024),
}
"""Mode -> (compressed cache, entries of it that a query row attends to); 128 rows of the window besides."""

SPREAD = "unequal"

SPLITS: tuple[dict[str, int], ...] = (
    *({"num_splits": n} for n in (1, 2, 3, 4, 5, 6, 8)),
    *({"split_tokens": n} for n in (128, 256)),
)
"""Arguments of the op to compare its own choice with."""

CHECKED_ROWS = 24
ATOL, RTOL, APART = 1e-3, 2.01 / 128, 5e-6
LSE_ATOL, LSE_RTOL = 1e-6, 8.01 / 65536
"""What an element of out, the direction and length of a head of it (1 - cosine), and an lse may be off by."""


@dataclass(frozen=True)
class Shape:
    """A case. unequal: the kind of the second list's lengths (perf.grid.lengths; SPREAD: from 1 to all of it); splits:
    arguments of the op."""

    mode: str
    heads: int
    batch: int
    tokens: int = 1
    dense: bool = False
    unequal: str = ""
    splits: tuple[tuple[str, int], ...] = ()

    @property
    def name(self) -> str:
        marks = [f"s_q={self.tokens}"] * (self.tokens > 1) + ["dense"] * self.dense
        marks += [self.unequal] * bool(self.unequal)
        return " ".join([f"b{self.batch} h{self.heads} {self.mode}", *marks, *(f"{k}={v}" for k, v in self.splits)])

    @property
    def rows(self) -> int:
        return self.batch * self.tokens

    def lengths(self) -> list[int]:
        """Of the second list, by request."""
        count = MODES[self.mode][1]
        if self.unequal != SPREAD:
            return lengths(self.unequal, self.batch, count)
        # 5 has no factor in common with any batch here: neighbours differ
        return [1 + (5 * i % self.batch) * (count - 1) // max(self.batch - 1, 1) for i in range(self.batch)]

    def padded(self, block: int) -> float:
        """Share of the FLOPs of a kernel that fills up its blocks of so many heads, and its tiles of keys."""
        heads = round_up(self.heads, block)
        keys = [WINDOW + n for n in self.lengths()]
        whole = [TILE * (num_tiles(WINDOW) + num_tiles(n)) for n in self.lengths()]
        return 1 - self.heads * sum(keys) / (heads * sum(whole))


@dataclass(frozen=True)
class DecodeSet:
    """Inputs of one call, by the op's argument names.

    listed, lengths   the second list by slot, also where the op takes it densely; None without one
    """

    shape: Shape
    given: dict[str, Any]
    listed: torch.Tensor | None
    lengths: torch.Tensor | None

    @classmethod
    def make(cls, shape: Shape, seed: int) -> DecodeSet:
        """Queries and indices that other seeds do not have, on pools that they share."""
        b, s_q, h, g = shape.batch, shape.tokens, shape.heads, _generator(seed)
        q = torch.randn(b, s_q, h, HEAD_DIM, device="cuda", generator=g).bfloat16()
        request = torch.arange(b, device="cuda") + seed * b
        given: dict[str, Any] = {
            "q": q,
            "k_cache": _pool(WINDOW_REQUESTS * WINDOW_PAGES, WINDOW_ROWS),
            "indices": _window(request % WINDOW_REQUESTS, s_q, g),
            "topk_length": torch.full((b,), WINDOW, dtype=torch.int32, device="cuda"),
            "attn_sink": torch.randn(h, device="cuda", generator=g),
            "softmax_scale": HEAD_DIM**-0.5,
            "kv_format": FP8_DS_MLA.id,
            "extra_kv_format": FP8_DS_MLA.id,
            "out": torch.empty_like(q),
            "lse": torch.empty(b, h, s_q, device="cuda"),
        }
        kind, count = MODES[shape.mode]
        if not kind:
            return cls(shape, given, None, None)
        given["extra_k_cache"] = _pool(REQUESTS[kind] * ENTRIES[kind] // ROWS[kind], ROWS[kind])
        table = _table(REQUESTS[kind], ENTRIES[kind] // ROWS[kind])[request % REQUESTS[kind]]
        seen = torch.tensor(shape.lengths(), dtype=torch.int32, device="cuda")
        if kind == "c4":
            chosen = torch.rand(b, s_q, ENTRIES[kind], device="cuda", generator=g).topk(count, sorted=False).indices
            listed = _slots(table, chosen, ROWS[kind])
        else:
            listed = torch.full((b, s_q, ENTRIES[kind]), -1, dtype=torch.int32, device="cuda")
            entries = torch.arange(count, device="cuda").expand(b, s_q, count)
            listed[..., :count] = _slots(table, entries, ROWS[kind])
        if shape.dense:
            given |= {"extra_block_table": table, "extra_length": seen[:, None].expand(b, s_q).contiguous()}
        else:
            given |= {"extra_indices": listed, "extra_topk_length": seen}
        return cls(shape, given, listed, seen)

    def call(self, splits: Mapping[str, int], long_rows: str = "auto") -> None:
        """This project's op, over a workspace that all calls share."""
        workspace = _workspace(workspace_size(self.shape, splits))
        sparse_mla_decode(**{**self.given, **splits, "workspace": workspace, "long_rows": long_rows})

    def ours(self) -> None:
        self.call(dict(self.shape.splits))

    def arguments(self) -> tuple[Any, ...]:
        splits = dict(self.shape.splits)
        return in_order({**self.given, **splits, "workspace": _workspace(workspace_size(self.shape, splits))})

    def right(self, call: Call) -> bool:
        """Whether `call` leaves or returns the reference's results in rows all over the batch, and NaN nowhere."""
        out, lse = self.given["out"], self.given["lse"]
        out.fill_(math.nan)
        lse.fill_(math.nan)
        returned = call()
        if returned is not None:
            out, lse = returned
        if bool(out.isnan().any() | lse.isnan().any()):
            return False
        rows = torch.linspace(0, len(out) - 1, min(len(out), CHECKED_ROWS), device="cuda").long()
        some = {name: value[rows] if name in PER_ROW else value for name, value in self.given.items()}
        some |= {"out": torch.empty_like(some["q"], dtype=torch.float32), "lse": torch.empty_like(lse[rows])}
        OPS[OP].reference(*in_order(some))
        return near(out[rows], some["out"]) and bool(
            ((lse[rows] - some["lse"]).abs() <= LSE_ATOL + LSE_RTOL * some["lse"].abs()).all()
        )


PER_ROW = (
    "q", "indices", "topk_length", "extra_indices", "extra_topk_length", "extra_block_table", "extra_length",
)  # fmt: skip
"""Arguments with a row per request."""


def in_order(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """All arguments of the op in the schema's order, None or 0 where nothing is given."""
    rest = {"num_splits": 0, "split_tokens": 0, "constant_lists": 0, "long_rows": "auto"}
    return tuple(given.get(a.name, rest.get(a.name)) for a in OPS[OP].overload._schema.arguments)


def near(got: torch.Tensor, want: torch.Tensor) -> bool:
    x, y = got.double(), want.double()
    elements = ((x - y).abs() <= (RTOL * y.abs()).clamp(min=ATOL)).all()
    heads = ((x - y).square().sum(-1) <= APART * (x.square() + y.square()).sum(-1)).all()
    return bool(elements & heads)


def workspace_size(shape: Shape, splits: Mapping[str, int]) -> int:
    kind, count = MODES[shape.mode]
    columns = ENTRIES[kind] if kind == "c128" else count
    return sparse_mla_decode_workspace_size(
        shape.batch, shape.tokens, shape.heads, WINDOW, columns, **splits, device="cuda"
    )


@lru_cache(maxsize=32)
def _workspace(size: int) -> torch.Tensor:
    """What calls of a case share, as those of a model's layers do: 32 sizes are more than a case has."""
    return torch.empty(size, dtype=torch.uint8, device="cuda")


def _generator(seed: int) -> torch.Generator:
    return torch.Generator(device="cuda").manual_seed(seed)


@cache
def _pool(pages: int, rows: int) -> torch.Tensor:
    """Random records in pages of so many rows."""
    pool, g = FP8_DS_MLA.allocate(pages, rows, "cuda"), _generator(rows)
    whole, step = FP8_DS_MLA.pages(pool, rows), max(1, (1 << 18) // rows)
    codes, rope = rows * FP8_DS_MLA.data_bytes, FP8_DS_MLA.data_bytes - 2 * ROPE_DIM
    for part in whole.split(step):
        data = part[:, :codes].unflatten(1, (rows, FP8_DS_MLA.data_bytes))
        x = torch.randn(*data.shape[:2], HEAD_DIM, device="cuda", generator=g)
        data[..., :rope] = (x[..., :rope] * 100).clamp_(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
        data[..., rope:] = (x[..., rope:] * 0.3).bfloat16().view(torch.uint8)
        # values of 0.3 on average
        part[:, codes:] = torch.randint(118, 120, part[:, codes:].shape, device="cuda", generator=g).byte()
    return pool


@cache
def _table(requests: int, pages: int) -> torch.Tensor:
    """Pages of each request in random order, int32 [requests, pages]."""
    order = torch.randperm(requests * pages, device="cuda", generator=_generator(1))
    return order.view(requests, pages).int()


def _window(request: torch.Tensor, tokens: int, g: torch.Generator) -> torch.Tensor:
    """Slots [b, tokens, WINDOW] of the last rows of each token of a request, tokens at neighbouring positions."""
    table = _table(WINDOW_REQUESTS, WINDOW_PAGES)[request]
    latest = WINDOW_PAGES * WINDOW_ROWS - WINDOW - tokens
    start = torch.randint(0, latest, (len(request), 1, 1), device="cuda", generator=g)
    token = torch.arange(tokens, device="cuda")[:, None]
    return _slots(table, start + token + torch.arange(WINDOW, device="cuda"), WINDOW_ROWS)


def _slots(table: torch.Tensor, entries: torch.Tensor, rows: int) -> torch.Tensor:
    """int32 slots of entries [b, tokens, columns] of requests with the block tables [b, pages]."""
    flat = entries.flatten(1)
    return (table.gather(1, flat // rows) * rows + flat % rows).int().view(entries.shape)
