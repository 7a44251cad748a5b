# SPDX-License-Identifier: Apache-2.0
"""Benchmark of sparse MLA over two plain caches of either format, beside prefill over the same rows of one buffer in
bf16, and of e4m3 caches beside bf16 ones with the same values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from cute_kernels.formats import FORMATS as FORMATS_BY_ID
from cute_kernels.runtime.ops import OPS
from cute_kernels.sparse_mla.converted import LEAST_HEADS
from cute_kernels.sparse_mla.ops import sparse_mla_mixed
from perf.grid import facts_between, of_rows
from perf.measure import Call, compare, number_of_sets
from perf.prefill import BETWEEN_SHAPES, PORTABLE, SHAPES, PrefillSet, Shape, in_order, portable

OP = "sparse_mla_mixed"
GATHERED = "ours gathered"
OVER_BF16 = "ours over bf16 caches"
DIRECT, CONVERTED = "ours direct", "ours converted"
"""Names of the other sides."""

FORMATS = {"plain_bf16/1": "", "plain_fp8/1": "fp8 "}
"""Formats of caches, and what the names of their cases begin with."""

WINDOW, PAGE_ROWS, REQUESTS, BEFORE = 128, 64, 8, 1000
"""Columns of the window, rows of a page of both caches, requests of equal length, and their context before the call."""

UNTUNED = (Shape(5000, 128, 1152, 65536),)
"""Beside prefill's shapes."""


@dataclass(frozen=True)
class MixedSet:
    """Inputs of one call: prefill's, whose kv is both caches end to end, and by the op's argument names, over caches in
    bf16 and in the format that is measured."""

    gathered: PrefillSet
    over_bf16: dict[str, Any]
    given: dict[str, Any]

    @classmethod
    def make(cls, shape: Shape, seed: int, kv_format: str) -> MixedSet:
        """Distinct random rows of each cache for each query row; a quarter of kv is the window's, or all."""
        gathered = PrefillSet.make(shape, seed)
        dtype = FORMATS_BY_ID[kv_format].dtype
        for name in ("q", "kv"):
            gathered.given[name] = gathered.given[name].to(dtype).bfloat16()
        kv, indices = gathered.given["kv"], gathered.given["indices"][:, 0]
        first = shape.kv_rows // 4 if shape.topk > WINDOW else shape.kv_rows
        g = torch.Generator(device="cuda").manual_seed(seed)
        for part in indices.split(512):
            keys = torch.rand(len(part), shape.kv_rows, device="cuda", generator=g)
            part[:, :WINDOW] = keys[:, :first].topk(WINDOW, sorted=False).indices
            if shape.topk > WINDOW:
                part[:, WINDOW:] = keys[:, first:].topk(shape.topk - WINDOW, sorted=False).indices + first
        slots = indices.clone()
        slots[:, WINDOW:] -= first
        pages = kv.view(-1, PAGE_ROWS, kv.shape[-1])
        starts = torch.arange(REQUESTS + 1, dtype=torch.int32, device="cuda") * (shape.rows // REQUESTS)
        over_bf16 = {
            "query": gathered.given["q"],
            "swa_kv_cache": pages[: first // PAGE_ROWS],
            "sparse_indices": slots,
            "compressed_kv_cache": pages[first // PAGE_ROWS :] if shape.topk > WINDOW else None,
            "sparse_topk_lens": gathered.given["topk_length"],
            "seq_lens": starts.diff() + BEFORE,
            "cum_seq_lens_q": starts,
            "bmm1_scale": gathered.given["sm_scale"],
            "bmm2_scale": 1.0,
            "sinks": gathered.given["attn_sink"],
            "window_size": WINDOW,
            "kv_format": "plain_bf16/1",
            "out": gathered.given["out"],
            "lse": gathered.given["lse"],
            "form": "auto",
        }
        stored = {
            name: over_bf16[name] if over_bf16[name] is None else over_bf16[name].to(dtype)
            for name in ("query", "swa_kv_cache", "compressed_kv_cache")
        }
        return cls(gathered, over_bf16, over_bf16 | stored | {"kv_format": kv_format})

    def ours(self, form: str = "auto") -> None:
        sparse_mla_mixed(**self.given | {"form": form})

    def ours_over_bf16(self) -> None:
        sparse_mla_mixed(**self.over_bf16)

    def arguments(self) -> tuple[Any, ...]:
        return in_order(OP, self.given)

    def right(self, call: Call) -> bool:
        """Whether `call` leaves what prefill's reference gives."""
        return self.gathered.right(call, ("out", "lse"))


def _variants(is_fp8: bool, heads: int) -> dict[str, Any]:
    found = {GATHERED: lambda s: s.gathered.ours(), PORTABLE: lambda s: portable("mixed_key", s.ours)}
    if is_fp8:
        found[OVER_BF16] = lambda s: s.ours_over_bf16()
    if is_fp8 and heads >= LEAST_HEADS:
        found |= {DIRECT: lambda s: s.ours("direct"), CONVERTED: lambda s: s.ours("converted")}
    return found


def sweep(
    rows: tuple[int, ...] | None = None, peers: bool = False, variants: bool = False, replays: int = 21
) -> list[dict[str, Any]]:
    """Records of sparse_mla_mixed, all shapes or those with that many query rows, over caches of both formats; as
    variants prefill, given rows, the portable kernel, and over e4m3 caches the same over bf16 ones and both forms."""
    chosen = of_rows((*SHAPES, *UNTUNED, *BETWEEN_SHAPES), rows)
    cost = OPS[OP].cost
    assert cost is not None
    records = []
    for kv_format, prefix in FORMATS.items():
        for shape in chosen:
            first = MixedSet.make(shape, 0, kv_format)
            work = cost(*first.arguments())
            others = [MixedSet.make(shape, seed, kv_format) for seed in range(1, number_of_sets(work.bytes))]
            candidates = _variants(bool(prefix), shape.heads) if variants else {}
            facts: dict[str, Any] = {"case": prefix + shape.name, "T": shape.rows, "heads": shape.heads}
            facts = facts_between(facts) if shape in BETWEEN_SHAPES else facts
            records.append(compare(OP, facts, [first, *others], work, candidates, replays, products="bf16"))
    return records


SWEEPS = {OP: sweep}
QUICK = {OP: (512,)}
"""Numbers of rows of a quick look."""
