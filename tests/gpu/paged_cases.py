# SPDX-License-Identifier: Apache-2.0
"""Calls of sparse_mla_prefill_paged, and what they mean: float64, without the package's formats and selections.

Every byte of the caches that no query row selects is poison, and so is every entry of a block table that nobody needs:
it names no page, or one whose rows are NaN.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch

from cute_kernels.runtime.record import record_calls
from cute_kernels.sparse_mla.ops import sparse_mla_prefill_paged, sparse_mla_prefill_paged_workspace_size
from tests.gpu.decode_cases import DEVICE, INT_MAX, INT_MIN, SCALE, Pool, generator, int32, random_sink
from tests.gpu.decode_checks import FP8, attention
from tests.gpu.prefill_checks import LARGEST, assert_results

KEYS_AT_ONCE = 1 << 15
"""Of all query rows together; 128 MB in float64, of which there are some at a time."""

SPLITS = {"num_splits", "split_tokens"}

Results = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclasses.dataclass
class Call:
    """Query rows of requests, as lists of numbers, and of nobody behind them. ratio 0: there is no compressed cache."""

    q: torch.Tensor
    query_lens: list[int]
    seq_lens: list[int]
    window_size: int
    pool: Pool
    table: torch.Tensor
    ratio: int = 0
    compressed: Pool | None = None
    compressed_table: torch.Tensor | None = None
    topk: torch.Tensor | None = None
    sink: torch.Tensor | None = None
    scale: float = SCALE
    origin: int = 0

    def arguments(self) -> dict[str, Any]:
        starts = [self.origin + sum(self.query_lens[:i]) for i in range(len(self.query_lens) + 1)]
        given: dict[str, Any] = {
            "q": self.q,
            "swa_cache": self.pool.cache,
            "swa_block_table": self.table,
            "query_start_loc": int32(starts),
            "seq_lens": int32(self.seq_lens),
            "sm_scale": self.scale,
            "window_size": self.window_size,
            "attn_sink": self.sink,
        }
        if self.compressed is not None:
            given |= {
                "compressed_cache": self.compressed.cache,
                "compressed_block_table": self.compressed_table,
                "compress_ratio": self.ratio,
                "topk_indices": self.topk,
            }
        return given

    def workspace(self) -> torch.Tensor:
        """For form "gathered", full of poison."""
        columns = None if self.topk is None else self.topk.shape[1]
        entries = 0
        if self.compressed is not None:
            assert self.compressed_table is not None
            entries = self.compressed_table.shape[1] * self.compressed.rows
        size = sparse_mla_prefill_paged_workspace_size(
            len(self.q), len(self.seq_lens), entries, columns, window_size=self.window_size
        )
        return torch.full((size,), 0xFF, dtype=torch.uint8, device=DEVICE)

    def rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(request, position) of each query row; -1, -1 of those that have none."""
        found = []
        for request, (rows, length) in enumerate(zip(self.query_lens, self.seq_lens, strict=True)):
            positions = [length - rows + i for i in range(rows)]
            found += [(request, p) if p >= 0 else (-1, -1) for p in positions]
        found += [(-1, -1)] * (len(self.q) - len(found))
        whole = torch.tensor(found, device=DEVICE).view(-1, 2)
        return whole[:, 0], whole[:, 1]

    def slots(self) -> list[tuple[Pool, torch.Tensor]]:
        """Of each cache the slots int64 [T, columns] that count, else -1."""
        request, position = self.rows()
        last = position[:, None]
        columns = min(self.window_size, max([0, *self.seq_lens]))
        window = last - torch.arange(columns, device=DEVICE)
        parts = [(self.pool, slots_of(self.pool, self.table, request, window.where(window >= 0, -1)))]
        if self.compressed is None:
            return parts
        assert self.compressed_table is not None
        visible = torch.div(last + 1, self.ratio, rounding_mode="floor")
        if self.topk is None:
            column = torch.arange(max([0, *self.seq_lens]) // self.ratio, device=DEVICE)
            entries = column.expand(len(self.q), -1)
        else:
            column = torch.arange(self.topk.shape[1], device=DEVICE)
            entries = self.topk.long()
        entries = entries.where((column < visible) & (entries >= 0) & (entries < visible), -1)
        return [*parts, (self.compressed, slots_of(self.compressed, self.compressed_table, request, entries))]

    def expected(self) -> Results:
        """float64 out, max_logits, lse."""
        slots = self.slots()
        step = max(1, KEYS_AT_ONCE // max(1, sum(s.shape[1] for _, s in slots)))
        parts = []
        for first in range(0, max(1, len(self.q)), step):
            rows = slice(first, first + step)
            is_named, q = torch.cat([whole[rows] >= 0 for _, whole in slots], 1), self.q[rows].double()
            key = torch.zeros(*is_named.shape, 512, dtype=torch.float64, device=DEVICE)
            for (pool, whole), part in zip(slots, key.split([s.shape[1] for _, s in slots], 1), strict=True):
                own = whole[rows]
                part[own >= 0] = pool.read(own[own >= 0])
            scores = (q @ key.transpose(1, 2) * self.scale).masked_fill(~is_named[:, None, :], -math.inf)
            top = torch.nn.functional.pad(scores, (0, 1), value=-math.inf).amax(dim=-1)
            out, lse = attention(q, key, is_named, self.scale, self.sink)
            parts.append((out, top, lse))
        out, top, lse = (torch.cat(part) for part in zip(*parts, strict=True))
        return out, top, lse


def slots_of(pool: Pool, table: torch.Tensor, request: torch.Tensor, entries: torch.Tensor) -> torch.Tensor:
    """Slots of entries int64 [T, columns] of the rows' requests [T]; -1 where there is none."""
    column = torch.div(entries, pool.rows, rounding_mode="floor")
    ok = (entries >= 0) & (column < table.shape[1]) & (request >= 0)[:, None]
    if not ok.any():
        return torch.full_like(entries, -1)
    page = table[request.clamp(min=0)[:, None], column.where(ok, 0)].long()
    ok &= (page >= 0) & (page < pool.pages)
    return (page * pool.rows + entries % pool.rows).where(ok, -1)


def fill(call: Call, seed: int = 0) -> Call:
    """Give every row that the call selects a value; all others are poison."""
    for number, (pool, slots) in enumerate(call.slots()):
        pool.bytes.fill_(0xFF)
        pool.put(slots, seed + number, LARGEST)
    return call


def make_pool(
    needed: list[range], columns: int, rows: int, more_stride: int, g: torch.Generator
) -> tuple[Pool, torch.Tensor]:
    """A cache with the pages that each request needs, in random order, and its block table."""
    count = sum(len(pages) for pages in needed) + 2
    order = torch.randperm(count, device=DEVICE, generator=g).int()
    # the last two pages are nobody's
    nothing = torch.cat([int32([-1, INT_MIN, INT_MAX, count, count + 7, -7]), order[-2:]])
    chosen = torch.randint(0, len(nothing), (len(needed), columns), device=DEVICE, generator=g)
    table, taken = nothing[chosen], 0
    for request, pages in enumerate(needed):
        table[request, pages.start : pages.stop] = order[taken : taken + len(pages)]
        taken += len(pages)
    return Pool(FP8, count, rows, more_stride), table


def make(
    query_lens: tuple[int, ...] = (1, 5, 1, 0, 3),
    seq_lens: tuple[int, ...] = (300, 6, 1, 9, 2000),
    heads: int = 64,
    window_size: int = 128,
    ratio: int = 4,
    width: int | None = 200,
    rows: tuple[int, int] = (64, 64),
    more_stride: tuple[int, int] = (0, 0),
    padding: int = 1,
    bad: float = 0.1,
    sink: str = "mixed",
    seed: int = 0,
) -> Call:
    """A random call. Heads have queries of very different sizes: softmax is flat in some, in others close to a key.

    width   columns of the top-k; None: all visible entries
    rows, more_stride
            of pages of both caches
    """
    g = generator(seed)
    tokens = sum(query_lens) + padding
    exponents = torch.randint(-4, 7, (tokens, heads, 1), device=DEVICE, generator=g)
    q = (torch.randn(tokens, heads, 512, device=DEVICE, generator=g) * torch.exp2(exponents.float())).bfloat16()
    lens = [max(n, 0) for n in seq_lens]
    oldest = [max(n - count - window_size + 1, 0) // rows[0] for n, count in zip(lens, query_lens, strict=True)]
    needed = [range(first, -(-n // rows[0])) for first, n in zip(oldest, lens, strict=True)]
    spare = 3
    columns = max([0, *(pages.stop for pages in needed)]) + spare
    pool, table = make_pool(needed, columns, rows[0], more_stride[0], g)
    call = Call(q, list(query_lens), list(seq_lens), window_size, pool, table, sink=random_sink(sink, heads))
    if ratio:
        needed = [range(-(-(n // ratio) // rows[1])) for n in lens]
        columns = max([0, *(pages.stop for pages in needed)]) + spare
        call.ratio = ratio
        call.compressed, call.compressed_table = make_pool(needed, columns, rows[1], more_stride[1], g)
        if width is not None:
            _, position = call.rows()
            visible = ((position + 1) // ratio).clamp(min=1)[:, None]
            picks = (torch.rand(tokens, width, device=DEVICE, generator=g) * visible).int()
            nowhere = int32([-1, INT_MIN, INT_MAX, -7])[torch.randint(0, 4, picks.shape, device=DEVICE, generator=g)]
            unseen = (visible + torch.randint(0, 9, picks.shape, device=DEVICE, generator=g)).int()
            nowhere = nowhere.where(torch.rand(picks.shape, device=DEVICE, generator=g) < 0.5, unseen)
            is_bad = torch.rand(picks.shape, device=DEVICE, generator=g) < bad
            # those behind the visible count name entries that are there, and do not count
            call.topk = nowhere.where(is_bad, picks)
    return fill(call, seed)


def run(call: Call, **more: Any) -> Results:
    """The kernel's results, over NaN."""
    outputs = {
        "out": torch.full(call.q.shape, math.nan, dtype=torch.bfloat16, device=DEVICE),
        "max_logits": torch.full(call.q.shape[:2], math.nan, device=DEVICE),
        "lse": torch.full(call.q.shape[:2], math.nan, device=DEVICE),
        **more,
    }
    with record_calls() as recording:
        results = sparse_mla_prefill_paged(**call.arguments(), **outputs)
    assert [done.implementation for done in recording.calls] == ["kernel"]
    return results


def check(call: Call, **more: Any) -> Results:
    """The kernel's results; those of whole rows, and of rows that are gathered first, are checked as well."""
    got, want = run(call, **more), call.expected()
    assert_results(got, want, call.q, call.scale)
    if not SPLITS & more.keys():
        assert_results(run(call, num_splits=1), want, call.q, call.scale)
        assert_results(run(call, form="gathered", workspace=call.workspace()), want, call.q, call.scale)
    return got
