# SPDX-License-Identifier: Apache-2.0
"""Whole attention layers of V4.1: `python -m perf layer --model v4.1-flash`.

As perf.layer: three layers of one kind, with weights and caches of their own, one after the other in a CUDA graph. What
the layers before would hand to them, picks and candidate blocks, is drawn. Kinds are those of the model and the tokens
of an entry; an index source selects among candidate blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from cute_kernels.formats import V41_KV_CACHES
from cute_kernels.indexer.ops import paged_mqa_logits
from cute_kernels.indices.ops import compute_global_topk_indices_and_lens
from cute_kernels.layers import (
    V41_PRESETS,
    DeepseekV41Attention,
    RotaryEmbedding,
    V41Caches,
    V41Options,
    V41Selection,
    V41Step,
    V41StepBuilder,
    V41Tables,
)
from cute_kernels.layers.caches import INDEX_CACHES, SWA_BLOCK_SIZE
from cute_kernels.layers.linear import Linear
from cute_kernels.layers.mla import Workspace
from cute_kernels.layers.v41_caches import ENTRY_BLOCK_SIZE, RING_ROWS
from cute_kernels.layers.v41_config import CANDIDATE_BLOCK
from cute_kernels.runtime.record import Cost
from perf import layer
from perf.grid import draw
from perf.layer import LAYERS, Case, fill_cache, fill_module, paged
from perf.picks import TIED, is_listed, largest, shortfall

OP = "layer_v41"
MODEL = "v4.1-flash"
KINDS = {"window": 0, "source2": 2, "consumer2": 3, "source1": 20, "consumer1": 21, "index": 24, "draft": 40}
"""By kind: a layer of it."""
OWN = "own"
"""In the place of tensor-parallel ranks in names: caches of the model's own records, and MXFP4 keys."""
ROUNDED = 0.02
"""Relative difference allowed between rows in a step of many requests and in one of their own, whose products are
summed in another order: 0.004 on an H200. One pick of 512 that is another moves an output by 0.035 (perf/log/layer.md).
"""
QUANTIZED = 0.05
"""The same of scores, whose queries are quantized behind such products: 0.006 on an H200; a head of another scale is
0.03 away."""


@dataclass(frozen=True)
class V41Case(Case):
    """One cell. is_own: caches of V4.1's own records; else those that engines have on Hopper."""

    is_own: bool = False

    @property
    def name(self) -> str:
        return super().name + (f" {OWN}" if self.is_own else "")

    @property
    def index(self) -> int:
        return KINDS[self.kind]

    @property
    def ratios(self) -> tuple[int, ...]:
        return (V41_PRESETS[self.model].compress_ratio_of(self.index),) * LAYERS

    @property
    def layer_key(self) -> tuple[Any, ...]:
        return self.model, self.kind, self.is_own

    @property
    def is_draft(self) -> bool:
        return self.kind == "draft"

    @property
    def caches(self) -> dict[str, Any]:
        """Names of the formats."""
        names = ("mxfp8_v41+nvfp4_v41", "mxfp4") if self.is_own else ("fp8_ds_mla", "fp8")
        return dict(zip(("kv_cache", "index_cache"), names, strict=True))

    @property
    def record_bytes(self) -> tuple[int, int, int]:
        """Of a window's row, an entry and an index key."""
        window, entry = V41_KV_CACHES[self.caches["kv_cache"]]
        return window.row_elements, entry.row_elements, INDEX_CACHES[self.caches["index_cache"]].row_elements

    def build_layers(self, longest: int) -> list[Any]:
        return build_layers(self, longest)

    def cache_bytes(self) -> int:
        window, entry, key = self.record_bytes
        rows = self.requests * (V41_PRESETS[self.model].sliding_window + self.rows)
        ratio = self.ratios[0]
        entries = self.requests * (max(self.lengths()) // ratio) if ratio else 0
        return LAYERS * (rows * window + entries * (entry + key))

    def make_step(self, layers: list[Any]) -> Any:
        return V41LayerStep(self, layers)


def cases(full: bool = False) -> Iterator[V41Case]:
    """The cells of the report, or those of a longer look."""
    config = V41_PRESETS[MODEL]
    batches = (1, 2, 4, 8, 16, 32, 64, 128, 256) if full else (1, 64, 128)
    for kind in KINDS:
        if kind == "consumer2" and not full:  # as one of ratio 1
            continue
        rows = config.draft_block_size if kind == "draft" else 1
        scores = kind in ("source1", "index")
        contexts = (8192, 65536, 262144) if full else (8192, 65536) if scores else (8192,)
        for context in contexts:
            for b in batches:
                yield V41Case(MODEL, kind, "decode", b, rows, context)
        if scores:
            for b in (1, 8) if full or kind == "index" else (1,):
                yield V41Case(MODEL, kind, "decode", b, 1, 1048576)
        if kind == "consumer1" or (full and kind.startswith("source")):
            for b in batches:
                yield V41Case(MODEL, kind, "decode", b, 1, 8192, is_own=True)
        if scores or kind == "window" or (full and kind != "draft"):
            for context in (0, 65536):
                for n in (2048, 4096):
                    yield V41Case(MODEL, kind, "prefill", 1, n, context)
        for point in draw(f"layer {MODEL} {kind}", 1, b=(2, 256), context=layer.CONTEXTS):
            yield V41Case(MODEL, kind, "decode", point["b"], rows, point["context"], is_between=True)


def build_layers(case: V41Case, longest: int) -> list[DeepseekV41Attention]:
    """The layers of a cell, which cells of fewer rows and shorter sequences take as well."""
    config = V41_PRESETS[case.model]
    rotary = RotaryEmbedding(config, case.ratios[0] > 0, longest, layer.DEVICE)
    options = V41Options(
        max_model_len=longest, max_num_tokens=max(case.tokens, 64), workspace=Workspace(), **case.caches
    )
    built = []
    for seed in range(LAYERS):
        one = DeepseekV41Attention(config, case.index, options=options, rotary_emb=rotary, device=layer.DEVICE)
        g = torch.Generator(device=layer.DEVICE).manual_seed(seed)
        fill_module(one, one.o_proj, g)
        one.attention.attn_sink.normal_(generator=g)
        built.append(one)
    return built


class V41LayerStep:
    """Layers, caches and metadata of one cell."""

    op, products = OP, "bf16"

    def __init__(self, case: V41Case, layers: list[DeepseekV41Attention]) -> None:
        self.case, self.layers, self.config = case, layers, layers[0].config
        g = torch.Generator(device=layer.DEVICE).manual_seed(7)
        windows, window_blocks = paged(case, SWA_BLOCK_SIZE, self.config.sliding_window + case.rows, g)
        entries, entry_blocks = paged(case, ENTRY_BLOCK_SIZE, max(case.lengths()), g)
        rings = torch.arange(case.requests, dtype=torch.int32, device=layer.DEVICE)
        self.tables = V41Tables(windows, entries, rings) if case.ratios[0] else V41Tables(windows)
        blocks: dict[str, Any] = {"window_blocks": window_blocks, "entry_blocks": entry_blocks, "rings": case.requests}
        self.caches = []
        for _ in layers:
            caches = V41Caches.allocate(self.config, [case.index], **blocks, **case.caches, device=layer.DEVICE)
            pools: list[Any] = [*caches.windows.values()]
            for source in caches.sources.values():
                pools += [cache for cache in (source.entries, source.keys, source.ring) if cache is not None]
            for pool in pools:
                fill_cache(pool, g)
            self.caches.append(caches)
        self.hidden = [torch.randn(case.tokens, self.config.hidden_size, device=layer.DEVICE, generator=g).bfloat16()]
        self.builder = self._builder()
        self.build()
        self.selection = self._selection(g)

    def _builder(self) -> V41StepBuilder:
        return V41StepBuilder(self.config, max(self.case.tokens, 1), max(self.case.lengths()), layer.DEVICE)

    def _step(self, builder: V41StepBuilder, some: slice) -> V41Step:
        """Of these requests."""
        case, tables = self.case, self.tables
        entries, rings = (None if t is None else t[some] for t in (tables.entries, tables.rings))
        lengths = case.lengths()[some]
        given = case.query_lengths()[some], lengths, V41Tables(tables.windows[some], entries, rings)
        decodes = min(case.decodes, len(lengths))
        return builder.build(*given, decodes, ring_rows=RING_ROWS, is_draft=case.is_draft)

    def build(self) -> None:
        """Metadata of the step."""
        self.step = self._step(self.builder, slice(None))

    def _selection(self, g: torch.Generator) -> V41Selection | None:
        """Picks, and candidate blocks, that layers before would hand to this one; drawn."""
        ratio, config, step = self.case.ratios[0], self.config, self.step
        if self.case.kind not in ("consumer1", "consumer2", "index"):
            return None
        visible = step.entries[ratio].visible
        picks = drawn(visible, config.index_topk, g)
        blocks = -(-visible // config.candidate_block_size)
        candidates = drawn(blocks, config.candidate_topk_blocks, g)
        source, owner = config.index_source_of(self.case.index), config.candidate_source_layer_id
        return self._located(V41Selection(source, picks, candidate_of=owner, candidates=candidates), step)

    def _located(self, selection: V41Selection, step: V41Step) -> V41Selection:
        """With slots of the picks of a step's decode rows."""
        m, decodes = step.window, step.window.num_decode_tokens
        if not decodes:
            return selection
        assert step.tables.entries is not None
        slots, lens = compute_global_topk_indices_and_lens(
            selection.picks[:decodes],
            m.token_to_req_indices,
            step.tables.entries,
            ENTRY_BLOCK_SIZE // self.case.ratios[0],
            m.is_valid_token,
        )
        return replace(selection, slots=slots, lens=lens)

    def run(self, number: int) -> torch.Tensor:
        """One layer."""
        return self.layers[number](self.hidden[0], self.step, self.caches[number], self.selection)[0]

    def calls(self) -> list[Callable[[], Any]]:
        return [partial(self.run, number) for number in range(LAYERS)]

    def run_once(self) -> None:
        for call in self.calls():
            call()

    def work(self) -> Cost:
        return least_work(self.layers[0], self.case)

    def each_kind(self) -> list[tuple[int, int]]:
        return [(0, LAYERS)]

    def is_right(self) -> bool:
        """Whether rows of the first and of the last request are what they are in a step of it alone."""
        differences = (self.difference(request) for request in {0, self.case.requests - 1})
        return bool(torch.isfinite(self.run(0)).all()) and all(found.is_small for found in differences)

    def difference(self, request: int) -> Difference:
        """Of a request's rows in the whole step and in a step of it alone. The two may pick otherwise where scores
        nearly tie: picks are judged by the scores of their own run, and outputs compared with the whole step's."""
        one, caches, rows = self.layers[0], self.caches[0], self.case.rows
        own = slice(request * rows, (request + 1) * rows)
        step, hidden = self._step(self._builder(), slice(request, request + 1)), self.hidden[0][own]
        whole = self._run_rows(self.step, self.hidden[0], self.selection, own)
        indexer, found = one.indexer, Difference(torch.inf)
        if whole.scores is not None:
            before = None if self.selection is None else self._located(rows_of(self.selection, own), step)
            alone = self._run_rows(step, hidden, before, slice(rows))
            assert alone.scores is not None
            short = max(run.shortfall() for run in (whole, alone))
            found = replace(found, scores=apart(whole.scores, alone.scores), shortfall=short, moved=whole.moved(alone))
            one.indexer = None
        try:
            given = None if whole.selection is None else self._located(whole.selection, step)
            again, _ = one(hidden, step, caches, given)
        finally:
            one.indexer = indexer
        return replace(found, output=apart(whole.output, again))

    def _run_rows(self, step: V41Step, hidden: torch.Tensor, before: V41Selection | None, rows: slice) -> Run:
        """The first layer in a step, and what becomes of these rows."""
        indexer = self.layers[0].indexer
        seen: list[Any] = []
        hook = None if indexer is None else indexer.register_forward_hook(lambda _, given, out: seen.extend(given))
        out, selection = self.layers[0](hidden, step, self.caches[0], before)
        if indexer is None or hook is None:
            return Run(out[rows], None if selection is None else rows_of(selection, rows))
        hook.remove()
        qr, _, keys, _, _, table = seen
        q, weights = indexer.queries(qr, hidden, step, table)
        q = tuple(x[rows, None] for x in q) if isinstance(q, tuple) else q[rows, None]
        ratio, requests = self.case.ratios[0], step.window.token_to_req_indices[rows].long()
        assert step.tables.entries is not None
        visible = step.entries[ratio].visible[rows]
        scores = paged_mqa_logits(
            q,
            keys.data,
            weights[rows],
            visible[:, None],
            step.tables.entries[requests],
            None,
            max(self.case.lengths()) // ratio,
            clean_logits=True,
            kv_format=keys.kv_format.id,
        )
        selection = rows_of(selection, rows)
        if indexer.takes_candidates and selection.candidates is not None:
            block = torch.arange(scores.shape[1], device=scores.device) // CANDIDATE_BLOCK
            scores = scores.masked_fill(~is_listed(selection.candidates, int(block.max()) + 1)[:, block], -torch.inf)
        blocks = selection.candidates if indexer.makes_candidates else None
        return Run(out[rows], selection, scores, blocks, visible)


@dataclass(frozen=True)
class Difference:
    """Of a request's rows in a step of many requests and in one of it alone.

    output      with the same picks, relative
    scores      of an index source, relative
    shortfall   `Run.shortfall`, of both runs the larger
    moved       picks that are others
    """

    output: float
    scores: float = 0.0
    shortfall: float = 0.0
    moved: int = 0

    @property
    def is_small(self) -> bool:
        return self.output <= ROUNDED and self.scores <= QUANTIZED and self.shortfall <= TIED


@dataclass(frozen=True)
class Run:
    """What becomes of some rows in a step: their output and selection, and, of an index source, the scores of all that
    it may pick, -inf elsewhere, the candidate blocks that it made, and how many entries each row sees."""

    output: torch.Tensor
    selection: V41Selection | None
    scores: torch.Tensor | None = None
    blocks: torch.Tensor | None = None
    visible: torch.Tensor | None = None

    def shortfall(self) -> float:
        """By how much an entry left out, or a block, scores better than a pick, as part of a row's largest score."""
        assert self.scores is not None
        assert self.selection is not None
        assert self.visible is not None
        most = largest(self.scores)
        found = shortfall(self.scores, self.selection.picks) / most
        if self.blocks is not None:
            rest = -self.scores.shape[1] % CANDIDATE_BLOCK
            padded = torch.nn.functional.pad(self.scores, (0, rest), value=-torch.inf)
            maxima = padded.unflatten(1, (-1, CANDIDATE_BLOCK)).amax(dim=2)
            newest = (self.visible[:, None].long() - 1) // CANDIDATE_BLOCK
            maxima.scatter_(1, newest, maxima.amax(dim=1, keepdim=True))
            found = torch.maximum(found, shortfall(maxima, self.blocks) / most)
        return float(found.max())

    def moved(self, other: Run) -> int:
        """Picks that the other run does not have."""
        assert self.scores is not None
        assert self.selection is not None
        assert other.selection is not None
        own, others = (is_listed(x.picks, self.scores.shape[1]) for x in (self.selection, other.selection))
        return int((own & ~others).sum())


def apart(one: torch.Tensor, other: torch.Tensor) -> float:
    """Relative difference; scores that are -inf count as 0."""
    one, other = (x.double().where(x != -torch.inf, 0.0) for x in (one, other))
    return float((one - other).norm() / other.norm())


def rows_of(selection: V41Selection, rows: slice) -> V41Selection:
    """Picks and candidates of some rows."""
    return selection.of_rows(torch.arange(rows.start or 0, rows.stop, device=selection.picks.device))


def drawn(counts: torch.Tensor, most: int, g: torch.Generator) -> torch.Tensor:
    """int32 [rows, most]: of 0 .. counts - 1 so many, ascending, the last one among them, then -1."""
    widest = max(int(counts.max()), 1)
    found = torch.full((len(counts), most), -1, dtype=torch.int32, device=counts.device)
    for rows in torch.arange(len(counts), device=counts.device).split(max((1 << 27) // widest, 1)):
        order = torch.rand(len(rows), widest, device=counts.device, generator=g)
        column = torch.arange(widest, device=counts.device)
        order.masked_fill_(column >= counts[rows, None], -1.0).masked_fill_(column == counts[rows, None] - 1, 2.0)
        values, chosen = order.topk(min(most, widest), dim=1)
        chosen = torch.where(values < 0, widest, chosen).sort(dim=1).values
        found[rows, : chosen.shape[1]] = torch.where(chosen == widest, -1, chosen).int()
    return found


def least_work(one: DeepseekV41Attention, case: V41Case) -> Cost:
    """Bytes and FLOPs that a call of a cell can't do without. They are set against the rate of bf16: FLOPs of scores,
    whose products are e4m3 and take half as long, count half."""
    config, ratio = one.config, case.ratios[0]
    window_bytes, entry_bytes, key_bytes = case.record_bytes
    weights = [m.weight for m in one.modules() if isinstance(m, Linear)] + [one.o_proj.wo_a]
    numbers, tokens = sum(weight.numel() for weight in weights), case.tokens
    moved = 2 * numbers + 2 * 2 * tokens * config.hidden_size
    attended = keys = 0
    for rows, length in zip(case.query_lengths(), case.lengths(), strict=True):
        # all rows of a draft see the same
        seen = [length] * rows if case.is_draft else range(length - rows + 1, length + 1)
        visible = [count // ratio if ratio else 0 for count in seen]
        picked = sum(min(entries, config.index_topk) for entries in visible)
        block = case.rows if case.is_draft else 0
        attended += picked + sum(min(count, config.sliding_window) + block for count in seen)
        window = min(length, config.sliding_window) + block if case.is_draft else config.sliding_window + rows - 1
        moved += min(visible[-1], picked) * entry_bytes + min(length, window) * window_bytes
        if one.indexer is not None and visible[-1] > config.index_topk:
            most = (
                config.candidate_topk_blocks * config.candidate_block_size if one.indexer.takes_candidates else length
            )
            scored = sum(min(entries, most) for entries in visible if entries > config.index_topk)
            keys += scored
            moved += min(visible[-1], scored) * key_bytes
    flops = 2 * tokens * numbers + 4 * attended * one.num_heads * config.head_dim
    return Cost(moved, flops + keys * config.index_n_heads * config.index_head_dim)
