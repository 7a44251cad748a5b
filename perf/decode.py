# SPDX-License-Identifier: Apache-2.0
"""Benchmark of sparse MLA decode beside FlashMLA, in the cells that it is known by and in shapes of our own."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from cute_kernels.formats import FP8_DS_MLA, HEAD_DIM
from cute_kernels.runtime.arch import arch_of, multiprocessors
from cute_kernels.runtime.ops import OPS
from cute_kernels.sparse_mla.schedule import choose_splits, head_groups, may_halve, num_tiles
from perf.decode_inputs import MODES, OP, SPLITS, SPREAD, WINDOW, DecodeSet, Shape
from perf.grid import LENGTHS, ONE_LONG, draw, facts_between, of_rows
from perf.measure import compare, number_of_sets
from perf.peers import load_peer

BATCHES = (1, 8, 32, 64, 128, 256)
PEER_HEADS = 64
"""FlashMLA has kernels for 64 and 128 heads: whoever has fewer pads them."""

GRID = tuple(Shape(mode, heads, batch) for mode in MODES for heads in (64, 128) for batch in BATCHES)
OWN = (
    *(Shape("c4_128+512", heads, batch) for heads in (8, 16, 32) for batch in (64, 256)),
    *(Shape("c128_128+1024", 64, batch, dense=True) for batch in (1, 64, 256)),
    *(Shape("c4_128+512", 64, batch, tokens) for batch, tokens in ((8, 2), (64, 2), (64, 4))),
    *(Shape("c4_128+512", 64, batch, unequal=SPREAD) for batch in (64, 256)),
    *(
        Shape(mode, 64, batch, dense=mode.startswith("c128"), unequal=kind)
        for mode in ("c4_128+1024", "c128_128+1024")
        for kind in LENGTHS
        for batch in (16, 48, 192)
    ),
    *(
        Shape(mode, 64, batch, dense=mode.startswith("c128"), unequal=kind)
        for mode in ("c4_128+1024", "c128_128+1024")
        for batch, kind in ((40, ""), (40, ONE_LONG), (48, ""), (64, ONE_LONG))
    ),
    *(Shape("c4_128+512", 64, batch, splits=(("split_tokens", 256),)) for batch in (1, 32, 256)),
    *(Shape("c4_128+512", 64, 64, splits=(("num_splits", n),)) for n in (1, 2, 4)),
)
BETWEEN_SHAPES = tuple(
    Shape(mode, heads, point["batch"])
    for point, (mode, heads) in zip(
        draw(OP, 2 * len(MODES), batch=(2, 250)), ((mode, heads) for mode in MODES for heads in (64, 128)), strict=True
    )
)
PLANNED = tuple(Shape("c4_128+512", heads, batch) for heads in (64, 128) for batch in (1, 64, 256))
"""Where FlashMLA is also timed with its planner, which it runs once a step."""

Candidate = Callable[[DecodeSet], Any]


@dataclass(frozen=True)
class FlashMLA:
    """FlashMLA's kernel, as vLLM ships it. It plans in the first call of a shape and uses that plan again.

    planning     plan in every call instead
    flattening   every query row as a request of its own, as vLLM has it
    """

    module: Any
    planning: bool = False
    flattening: bool = False
    plans: dict[Shape, Any] = field(default_factory=dict)
    padded: dict[int, tuple[torch.Tensor, ...]] = field(default_factory=dict)
    rows: dict[Shape, list[torch.Tensor | None]] = field(default_factory=dict)

    def __call__(self, s: DecodeSet) -> tuple[torch.Tensor, torch.Tensor]:
        plan = None if self.planning else self.plans.get(s.shape)
        if plan is None:
            plan = self.plans[s.shape] = self.module.get_mla_metadata()[0]
        given, heads, tokens = s.given, s.shape.heads, s.shape.tokens
        q, sink, out = self._heads(given) if heads < PEER_HEADS else (given["q"], given["attn_sink"], given["out"])
        extra = given.get("extra_k_cache")
        indices, listed, counts, more_counts = given["indices"], s.listed, given["topk_length"], s.lengths
        if self.flattening:
            q, out, indices = (t.flatten(0, 1)[:, None] for t in (q, out, indices))
            listed = None if listed is None else listed.flatten(0, 1)[:, None]
            counts, more_counts = self._per_row(s)
        out, lse = self.module.flash_mla_with_kvcache(
            q=q,
            k_cache=given["k_cache"].unsqueeze(2),
            block_table=None,
            cache_seqlens=None,
            head_dim_v=HEAD_DIM,
            tile_scheduler_metadata=plan,
            softmax_scale=given["softmax_scale"],
            is_fp8_kvcache=True,
            indices=indices,
            attn_sink=sink,
            extra_k_cache=None if extra is None else extra.unsqueeze(2),
            extra_indices_in_kvcache=listed,
            topk_length=counts,
            extra_topk_length=more_counts,
            out=out,
        )
        if self.flattening:
            out, lse = out.unflatten(0, (-1, tokens)).squeeze(2), lse.squeeze(2).unflatten(0, (-1, tokens)).mT
        return out[:, :, :heads], lse[:, :heads]

    def _per_row(self, s: DecodeSet) -> list[torch.Tensor | None]:
        """Lengths of both lists by query row, made once: a step's metadata has them."""
        if s.shape not in self.rows:
            given = s.given["topk_length"], s.lengths
            self.rows[s.shape] = [None if t is None else t.repeat_interleave(s.shape.tokens) for t in given]
        return self.rows[s.shape]

    def _heads(self, given: Mapping[str, Any]) -> tuple[torch.Tensor, ...]:
        """Queries, sink and output with PEER_HEADS heads, made once: a layer would project to that many."""
        q, sink = given["q"], given["attn_sink"]
        if q.data_ptr() not in self.padded:
            more = PEER_HEADS - q.shape[2]
            wide = torch.nn.functional.pad(q, (0, 0, 0, more))
            whole = torch.nn.functional.pad(sink, (0, more), value=-torch.inf)
            self.padded[q.data_ptr()] = wide, whole, torch.empty_like(wide)
        return self.padded[q.data_ptr()]


def _flashmla() -> Any:
    """FlashMLA's interface."""
    return importlib.import_module("vllm.third_party.flashmla.flash_mla_interface")


def _candidates(shape: Shape, peers: bool, variants: bool, sms: int) -> dict[str, Candidate | str]:
    """Those of a shape by name. Explicit splits have no peers: they are about our own choice. What the op does not
    choose for long rows is measured in any case. sms: multiprocessors of the GPU"""
    found: dict[str, Candidate | str] = {}
    if variants and not shape.splits:
        for splits in SPLITS:
            name = " ".join(f"{k}={v}" for k, v in splits.items())
            found[f"ours {name}"] = partial(_call, splits)
    if may_cut(shape, sms // 2) and not shape.splits:
        found["ours long_rows=whole"] = partial(DecodeSet.call, splits={}, long_rows="whole")
    if peers and not shape.splits:
        module = load_peer("flashmla", _flashmla)
        missing = isinstance(module, str)
        name = "flashmla" if shape.heads >= PEER_HEADS else "flashmla-padded"
        found[name] = module if missing else FlashMLA(module)
        if shape.tokens > 1:
            found[f"{name}-flattened"] = module if missing else FlashMLA(module, flattening=True)
        if shape in PLANNED:
            found["flashmla-and-planner"] = module if missing else FlashMLA(module, planning=True)
    return found


def may_cut(shape: Shape, clusters: int) -> bool:
    """Whether the op may cut long rows in halves on a GPU with so many clusters, where it does not split all rows."""
    groups = head_groups(shape.heads)
    tiles = num_tiles(WINDOW) + num_tiles(MODES[shape.mode][1])
    is_whole = choose_splits(shape.rows, groups, tiles, clusters) == 1
    return is_whole and MODES[shape.mode][1] > 0 and may_halve(shape.rows * groups, clusters, tiles)


def _call(splits: Mapping[str, int], s: DecodeSet) -> None:
    s.call(splits)


def block_of(shape: Shape, arch: str) -> int:
    """Heads of a block of the kernel that a shape runs."""
    from cute_kernels.sparse_mla.select import decode_key, own_decode_kernels

    second = "none" if not MODES[shape.mode][0] else "dense" if shape.dense else "listed"
    own = next(iter(own_decode_kernels(arch, shape.heads)), "")
    key: Any = decode_key(arch, shape.heads, second, False, FP8_DS_MLA.id, FP8_DS_MLA.id, own=own)
    return int(key.heads)


def _facts(shape: Shape) -> dict[str, Any]:
    padded = round(shape.padded(block_of(shape, arch_of(0))), 4)
    facts = {"case": shape.name, "T": shape.rows, "heads": shape.heads, "padded": padded}
    if shape in BETWEEN_SHAPES:
        return facts_between(facts)
    if shape.unequal in LENGTHS:
        return {**facts, "group": shape.unequal}
    return {**facts, "group": "FlashMLA's shapes"} if shape in GRID else facts


def sweep(
    rows: tuple[int, ...] | None = None, peers: bool = False, variants: bool = False, replays: int = 21
) -> list[dict[str, Any]]:
    """Records of sparse_mla_decode, all cells or those with that many query rows, peers and variants beside it."""
    chosen = of_rows((*GRID, *OWN, *BETWEEN_SHAPES), rows)
    for shape in chosen:
        DecodeSet.make(shape, 0).ours()  # compiled before other projects change the DSL
    cost = OPS[OP].cost
    assert cost is not None
    records = []
    for shape in chosen:
        first = DecodeSet.make(shape, 0)
        work = cost(*first.arguments())
        sets = [first, *(DecodeSet.make(shape, seed) for seed in range(1, number_of_sets(work.bytes)))]
        candidates = _candidates(shape, peers, variants, multiprocessors(0))
        records.append(compare(OP, _facts(shape), sets, work, candidates, replays, products="bf16"))
    return records


SWEEPS = {OP: sweep}
QUICK = {OP: (64,)}
"""Numbers of rows of a quick look."""
