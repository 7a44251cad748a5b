# SPDX-License-Identifier: Apache-2.0
"""Benchmark of prefill straight from the caches, beside what it does in one: gather both caches, combine the indices,
and attend to the gathered rows, with FlashMLA's prefill."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch

from cute_kernels.formats import FP8_DS_MLA, HEAD_DIM
from cute_kernels.indices.ops import combine_topk_swa_indices
from cute_kernels.kv_cache.ops import dequantize_and_gather_k_cache
from cute_kernels.runtime.ops import OPS
from cute_kernels.sparse_mla.ops import sparse_mla_prefill, sparse_mla_prefill_paged
from perf.decode_inputs import _pool as random_pool
from perf.grid import draw, facts_between, of_rows
from perf.measure import Call, compare, number_of_sets, peak
from perf.peers import load_peer
from perf.prefill import CHECKED_ROWS, PORTABLE, RESULTS, in_order, near, portable

OP = "sparse_mla_prefill_paged"
GATHERED, PAGED, WHOLE = "ours gathered", "ours paged", "ours whole"
ASKED: dict[str, dict[str, Any]] = {
    GATHERED: {"form": "gathered"},
    PAGED: {"form": "paged"},
    WHOLE: {"num_splits": 1},
}
"""What callers may ask for."""

PEER = "flashmla-gathered"
DECODE_PEER = "flashmla-decode"
"""Names of the other sides. FlashMLA's gather and combination are this project's: the faster ones. Its decode kernel
takes few new tokens as rows of a decode step; lists of slots and its plan are made beforehand and not timed."""

MOST_DECODE_ROWS, LEAST_DECODE_HEADS = 256, 64
"""What FlashMLA's decode kernel is timed with: it has one for 64 heads, and one for 128."""

WINDOW, WINDOW_ROWS = 128, 64
MOST_CUT_ROWS = 64
"""That the op may split."""

PAGE_ROWS = {4: 64, 128: 2}
"""Positions of the window, rows of its cache's pages, and of those of the compressed cache by ratio."""

TOPK = 512


@dataclass(frozen=True)
class Shape:
    """A case: the last `rows` tokens of one request whose context they end; ratio 0: the window alone."""

    rows: int
    context: int
    heads: int
    ratio: int

    @property
    def name(self) -> str:
        kind = {0: "swa", 4: "c4", 128: "c128"}[self.ratio]
        return f"{kind} new{self.rows} ctx{self.context} h{self.heads}"

    @property
    def topk(self) -> int:
        """Columns that name entries: for ratio 128 all of them."""
        return {0: 0, 4: TOPK, 128: self.context // 128}[self.ratio]


SHAPES = (
    *(Shape(4096, context, h, 4) for context in (16384, 131072) for h in (64, 128)),
    *(Shape(4096, 131072, h, 128) for h in (64, 128)),
    *(Shape(rows, 131072, h, ratio) for ratio in (4, 128) for rows in (256, 64) for h in (64, 128)),
    *(Shape(16, 131072, 64, ratio) for ratio in (4, 128)),
    *(Shape(4096, 16384, h, 4) for h in (8, 16, 32)),
    *(Shape(4096, 16384, h, 0) for h in (64, 128)),
)

BETWEEN_SHAPES = tuple(
    Shape(point["rows"], point["context"], heads, ratio)
    for (heads, ratio), point in zip(
        ((64, 4), (128, 128), (128, 4), (64, 128)),
        draw(OP, 4, rows=(10, 3000), context=(8192, 120_000, 8192)),
        strict=True,
    )
)
"""Between the tuned ones."""


@dataclass(frozen=True)
class PagedSet:
    """Inputs of one call, by the op's argument names, and of the calls that take its place: the workspace that rows are
    gathered into, lists of entries, and numbers of rows that are gathered."""

    shape: Shape
    given: dict[str, Any]
    workspace: torch.Tensor
    picks: torch.Tensor
    entries: torch.Tensor
    positions: torch.Tensor

    @classmethod
    def make(cls, shape: Shape, seed: int) -> PagedSet:
        """Pages in random order; distinct random entries of those that each row sees."""
        g = torch.Generator(device="cuda").manual_seed(seed)

        def int32(*values: int) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device="cuda")

        def cache(rows: int, page_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
            pages = -(-rows // page_rows)
            pool = FP8_DS_MLA.allocate(pages, page_rows, "cuda")
            FP8_DS_MLA.pages(pool, page_rows).copy_(FP8_DS_MLA.pages(random_pool(pages, page_rows), page_rows))
            return pool, torch.randperm(pages, device="cuda", generator=g)[None].int()

        rows, context, ratio = shape.rows, shape.context, shape.ratio
        q = torch.randn(rows, shape.heads, HEAD_DIM, device="cuda", generator=g).bfloat16()
        window, table = cache(context, WINDOW_ROWS)
        given: dict[str, Any] = {
            "q": q,
            "swa_cache": window,
            "swa_block_table": table,
            "query_start_loc": int32(0, rows),
            "seq_lens": int32(context),
            "sm_scale": HEAD_DIM**-0.5,
            "window_size": WINDOW,
            "compressed_cache": None,
            "compressed_block_table": None,
            "compress_ratio": max(ratio, 1),
            "topk_indices": None,
            "attn_sink": torch.randn(shape.heads, device="cuda", generator=g),
            "kv_format": FP8_DS_MLA.id,
            "compressed_kv_format": FP8_DS_MLA.id,
            "num_splits": 0,
            "split_tokens": 0,
            "out": torch.empty_like(q),
            "max_logits": torch.empty(rows, shape.heads, device="cuda"),
            "lse": torch.empty(rows, shape.heads, device="cuda"),
            "workspace": None,
            "form": "auto",
        }
        entries = context // ratio if ratio else 0
        picks = torch.arange(shape.topk, dtype=torch.int32, device="cuda").repeat(rows, 1)
        if ratio:
            given["compressed_cache"], given["compressed_block_table"] = cache(entries, PAGE_ROWS[ratio])
        if ratio == 4:
            seen = (context - rows + torch.arange(1, rows + 1, device="cuda")) // ratio
            for part, limit in zip(picks.split(512), seen.split(512), strict=True):
                keys = torch.rand(len(part), entries, device="cuda", generator=g)
                keys[torch.arange(entries, device="cuda") >= limit[:, None]] = -1.0
                part[:] = keys.topk(shape.topk, sorted=False).indices
            given["topk_indices"] = picks
        workspace = torch.empty(1, entries + rows + WINDOW, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
        gathered = int32(min(context, rows + WINDOW - 1))
        return cls(shape, given, workspace, picks, int32(entries), gathered)

    def ours(self) -> None:
        sparse_mla_prefill_paged(**self.given)

    def asked(self, changes: dict[str, Any]) -> None:
        """As asked for."""
        sparse_mla_prefill_paged(**(self.given | changes))

    def arguments(self) -> tuple[Any, ...]:
        return in_order(OP, self.given)

    def gathered(self, attend: Callable[..., Any]) -> Any:
        """The same in several calls; attend takes sparse_mla_prefill's arguments."""
        given, ratio, entries = self.given, self.shape.ratio, self.workspace.shape[1] - self.shape.rows - WINDOW
        if ratio:
            table = given["compressed_block_table"]
            dequantize_and_gather_k_cache(
                self.workspace, given["compressed_cache"], self.entries, None, table, PAGE_ROWS[ratio], 0
            )
        lens, table = given["seq_lens"], given["swa_block_table"]
        dequantize_and_gather_k_cache(
            self.workspace, given["swa_cache"], lens, self.positions, table, WINDOW_ROWS, entries
        )
        sizes = WINDOW, given["compress_ratio"], self.shape.topk, self.workspace.shape[1], entries
        indices, counts = combine_topk_swa_indices(self.picks, given["query_start_loc"], lens, self.positions, *sizes)
        kept = {name: given[name] for name in ("q", "sm_scale", "attn_sink", "out")}
        return attend(kv=self.workspace.view(-1, 1, HEAD_DIM), indices=indices[:, None], topk_length=counts, **kept)

    @cached_property
    def lists(self) -> dict[str, torch.Tensor | None]:
        """Slots of the window and of the entries of each row, and their numbers, as FlashMLA's decode takes them."""
        given, rows, context, ratio = self.given, self.shape.rows, self.shape.context, self.shape.ratio
        last = context - rows + torch.arange(rows, device="cuda")

        def slots(table: torch.Tensor, entries: torch.Tensor, page_rows: int) -> torch.Tensor:
            return (table[0][entries // page_rows] * page_rows + entries % page_rows)[:, None].int()

        window = last[:, None] - WINDOW + 1 + torch.arange(WINDOW, device="cuda")
        found = {
            "indices": slots(given["swa_block_table"], window, WINDOW_ROWS),
            "topk_length": torch.full((rows,), WINDOW, dtype=torch.int32, device="cuda"),
            "extra_indices_in_kvcache": None,
            "extra_topk_length": None,
        }
        if ratio:
            table = given["compressed_block_table"]
            seen = ((last + 1) // ratio).clamp(max=self.shape.topk).int()
            found["extra_indices_in_kvcache"] = slots(table, self.picks.long(), PAGE_ROWS[ratio])
            found["extra_topk_length"] = seen
        return found

    def peaks(self) -> dict[str, int]:
        """Bytes that the call allocates at most beyond its results, and that gathering, combining and attending to rows
        does, with the workspace."""
        rows = partial(self.gathered, attend=partial(sparse_mla_prefill, return_lse=False))
        return {"peak": peak(self.ours), "peak_gathered": self.workspace.nbytes + peak(rows)}

    def right(self, call: Call) -> bool:
        """Whether `call` leaves or returns the reference's results in rows all over the batch, and NaN nowhere."""
        results = {name: self.given[name] for name in RESULTS}
        for tensor in results.values():
            tensor.fill_(math.nan)
        returned = call()
        if returned is not None:
            results = dict(zip(RESULTS if len(returned) == len(RESULTS) else ("out", "lse"), returned, strict=True))
        if any(bool(tensor.isnan().any()) for tensor in results.values()):
            return False
        rows = torch.linspace(0, self.shape.rows - 1, CHECKED_ROWS, device="cuda").long()
        # each of them as a request of its own
        some = dict(self.given)
        for name in ("q", "topk_indices", *RESULTS):
            some[name] = None if some[name] is None else some[name][rows]
        for name in ("swa_block_table", "compressed_block_table"):
            some[name] = None if some[name] is None else some[name].expand(CHECKED_ROWS, -1)
        some["query_start_loc"] = torch.arange(CHECKED_ROWS + 1, dtype=torch.int32, device="cuda")
        some["seq_lens"] = (self.shape.context - self.shape.rows + 1 + rows).int()
        OPS[OP].reference(*in_order(OP, some))
        return near({name: results[name][rows] for name in results}, some)


def _flashmla() -> Callable[[PagedSet], Any]:
    """Over the gathered rows FlashMLA's prefill as vLLM ships it."""
    from vllm.third_party.flashmla import flash_mla_interface

    return lambda s: s.gathered(flash_mla_interface.flash_mla_sparse_fwd)


def _flashmla_decode() -> Callable[[PagedSet], Any]:
    from vllm.third_party.flashmla import flash_mla_interface

    plans: dict[Shape, Any] = {}

    def run(s: PagedSet) -> tuple[torch.Tensor, torch.Tensor]:
        given, cache = s.given, s.given["compressed_cache"]
        if s.shape not in plans:
            plans[s.shape] = flash_mla_interface.get_mla_metadata()[0]
        out, lse = flash_mla_interface.flash_mla_with_kvcache(
            q=given["q"][:, None],
            k_cache=given["swa_cache"].unsqueeze(2),
            block_table=None,
            cache_seqlens=None,
            head_dim_v=HEAD_DIM,
            tile_scheduler_metadata=plans[s.shape],
            softmax_scale=given["sm_scale"],
            is_fp8_kvcache=True,
            attn_sink=given["attn_sink"],
            extra_k_cache=None if cache is None else cache.unsqueeze(2),
            out=given["out"][:, None],
            **s.lists,
        )
        return out[:, 0], lse[:, :, 0]

    return run


def _candidates(shape: Shape, peers: bool, variants: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if peers:
        found[PEER] = load_peer(PEER, _flashmla)
    if peers and shape.rows <= MOST_DECODE_ROWS and shape.heads >= LEAST_DECODE_HEADS:
        found[DECODE_PEER] = load_peer(DECODE_PEER, _flashmla_decode)
    if variants:
        found |= {name: partial(PagedSet.asked, changes=changes) for name, changes in ASKED.items()}
        if shape.rows > MOST_CUT_ROWS:
            del found[WHOLE]
        found[PORTABLE] = lambda s: portable("paged_key", s.ours)
    return found


def sweep(
    rows: tuple[int, ...] | None = None, peers: bool = False, variants: bool = False, replays: int = 21
) -> list[dict[str, Any]]:
    """Records of sparse_mla_prefill_paged, all shapes or those with that many new tokens; as variants both forms, rows
    that are not split, and the portable kernel. A record's facts say how many bytes either way allocates, see
    PagedSet.peaks."""
    chosen = of_rows((*SHAPES, *BETWEEN_SHAPES), rows)
    for ratio in PAGE_ROWS:
        PagedSet.make(Shape(1, 4096, 64, ratio), 0).ours()  # compiled before other projects change the DSL
    cost = OPS[OP].cost
    assert cost is not None
    records = []
    for shape in chosen:
        first = PagedSet.make(shape, 0)
        work = cost(*first.arguments())
        others = range(1, min(number_of_sets(work.bytes), 16))
        # the others' layers share one workspace as well
        sets = [first, *(replace(PagedSet.make(shape, seed), workspace=first.workspace) for seed in others)]
        facts = {"case": shape.name, "T": shape.rows, "heads": shape.heads, **first.peaks()}
        facts = facts_between(facts) if shape in BETWEEN_SHAPES else facts
        records.append(compare(OP, facts, sets, work, _candidates(shape, peers, variants), replays, products="bf16"))
    return records


SWEEPS = {OP: sweep}
QUICK = {OP: (64,)}
"""Numbers of rows of a quick look."""
