# SPDX-License-Identifier: Apache-2.0
"""Benchmark of sparse MLA prefill beside FlashMLA, in the shapes of a model's layers."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from cute_kernels.formats import HEAD_DIM
from cute_kernels.runtime import kept
from cute_kernels.runtime.ops import OPS
from cute_kernels.sparse_mla.ops import sparse_mla_prefill
from perf.grid import draw, facts_between, of_rows
from perf.measure import Call, compare, number_of_sets
from perf.peers import load_peer

OP = "sparse_mla_prefill"
PORTABLE = "ours portable"
"""Name of the kernel for every architecture, where another one is the choice."""

RESULTS = ("out", "max_logits", "lse")

CHECKED_ROWS = 24
APART, HEAD_APART = 7e-6, 1.1e-5
"""What all of out, and the direction and length of a head of it, may be off by (1 - cosine): 2^-17 of a head if P is
rounded up by 2^-8 of itself for one key and down for another that weighs as much, and 3.3e-6 of out."""

LSE_ATOL, LSE_RTOL = 1e-6, 2.01 / 65536
"""The same of max_logits and lse."""


@dataclass(frozen=True)
class Shape:
    """A case: query rows, heads, columns of their lists, rows of kv."""

    rows: int
    heads: int
    topk: int
    kv_rows: int

    @property
    def name(self) -> str:
        return f"sq{self.rows} h{self.heads} topk{self.topk} skv{self.kv_rows}"


SHAPES = (
    *(Shape(4096, h, topk, kv) for kv in (16384, 65536) for h in (64, 128) for topk in (640, 1152, 2176)),
    *(Shape(512, h, 640, 16384) for h in (64, 128)),
    *(Shape(4096, h, 128, 16384) for h in (64, 128)),
    *(Shape(4096, h, 640, 16384) for h in (8, 16, 32)),
)

BETWEEN_SHAPES = tuple(
    Shape(point["rows"], heads, point["topk"], point["kv"])
    for heads, point in zip(
        (64, 128, 64, 128, 16),
        draw(OP, 5, rows=(304, 4000, 8), topk=(128, 2176, 128), kv=(6144, 79_872, 256)),
        strict=True,
    )
)
"""Between the tuned ones."""


@dataclass(frozen=True)
class PrefillSet:
    """Inputs of one call, by the op's argument names."""

    given: dict[str, Any]

    @classmethod
    def make(cls, shape: Shape, seed: int) -> PrefillSet:
        """Distinct random rows of kv for each query row."""
        g = torch.Generator(device="cuda").manual_seed(seed)
        q = torch.randn(shape.rows, shape.heads, HEAD_DIM, device="cuda", generator=g).bfloat16()
        kv = torch.randn(shape.kv_rows, 1, HEAD_DIM, device="cuda", generator=g).bfloat16()
        indices = torch.empty(shape.rows, 1, shape.topk, dtype=torch.int32, device="cuda")
        for part in indices.split(512):
            keys = torch.rand(len(part), shape.kv_rows, device="cuda", generator=g)
            part[:, 0] = keys.topk(shape.topk, sorted=False).indices
        return cls(
            {
                "q": q,
                "kv": kv,
                "indices": indices,
                "sm_scale": HEAD_DIM**-0.5,
                "attn_sink": torch.randn(shape.heads, device="cuda", generator=g),
                "topk_length": torch.full((shape.rows,), shape.topk, dtype=torch.int32, device="cuda"),
                "out": torch.empty_like(q),
                "max_logits": torch.empty(shape.rows, shape.heads, device="cuda"),
                "lse": torch.empty(shape.rows, shape.heads, device="cuda"),
            }
        )

    def ours(self) -> None:
        sparse_mla_prefill(**self.given)

    def arguments(self) -> tuple[Any, ...]:
        return in_order(OP, self.given)

    def right(self, call: Call, names: tuple[str, ...] = RESULTS) -> bool:
        """Whether `call` leaves or returns the reference's results in rows all over the batch, and NaN nowhere; names:
        "out", and which others `call` leaves."""
        results = {name: self.given[name] for name in names}
        for tensor in results.values():
            tensor.fill_(math.nan)
        returned = call()
        if returned is not None:
            results = dict(zip(RESULTS, returned, strict=True))
        if any(bool(tensor.isnan().any()) for tensor in results.values()):
            return False
        rows = torch.linspace(0, len(results["out"]) - 1, CHECKED_ROWS, device="cuda").long()
        some = {name: value[rows] if name in PER_ROW else value for name, value in self.given.items()}
        OPS[OP].reference(*in_order(OP, some))
        return near({name: results[name][rows] for name in results}, some)


def near(got: Mapping[str, torch.Tensor], want: Mapping[str, torch.Tensor]) -> bool:
    """Whether results are what they are to be: out, and whatever `got` has beside it."""
    x, y = got["out"].double(), want["out"].double()
    off, size = (x - y).square().sum(-1), (x.square() + y.square()).sum(-1)
    if not bool((off <= HEAD_APART * size).all() & (off.sum() <= APART * size.sum())):
        return False
    pairs = [(got[name], want[name]) for name in got if name != "out"]
    return all(bool(((x - y).abs() <= LSE_ATOL + LSE_RTOL * y.abs()).all()) for x, y in pairs)


def in_order(op: str, given: Mapping[str, Any]) -> tuple[Any, ...]:
    """All arguments of an op in the schema's order, None where nothing is given."""
    return tuple(given.get(argument.name) for argument in OPS[op].overload._schema.arguments)


PER_ROW = ("q", "indices", "topk_length", "out", "max_logits", "lse")
"""Arguments with a row per query row."""


def portable(choose: str, call: Call) -> None:
    """A call that runs the portable kernel of those that a function chooses, whatever the architecture."""
    select = importlib.import_module("cute_kernels.sparse_mla.select")
    try:
        with mock.patch.multiple(select, HOPPER="", **{choose: getattr(select, choose).__wrapped__}):
            kept.forget()  # plans of such calls run the kernels that were chosen
            call()
    finally:
        kept.forget()


def _flashmla() -> Callable[[PrefillSet], Any]:
    """FlashMLA's prefill as vLLM ships it."""
    module = importlib.import_module("vllm.third_party.flashmla.flash_mla_interface")
    names = ("q", "kv", "indices", "sm_scale", "attn_sink", "topk_length", "out")
    return lambda s: module.flash_mla_sparse_fwd(**{name: s.given[name] for name in names})


def sweep(
    rows: tuple[int, ...] | None = None, peers: bool = False, variants: bool = False, replays: int = 21
) -> list[dict[str, Any]]:
    """Records of sparse_mla_prefill, all shapes or those with that many query rows, FlashMLA beside it."""
    chosen = of_rows((*SHAPES, *BETWEEN_SHAPES), rows)
    PrefillSet.make(Shape(1, 64, 64, 64), 0).ours()  # compiled before other projects change the DSL
    cost = OPS[OP].cost
    assert cost is not None
    records = []
    for shape in chosen:
        first = PrefillSet.make(shape, 0)
        work = cost(*first.arguments())
        sets = [first, *(PrefillSet.make(shape, seed) for seed in range(1, number_of_sets(work.bytes)))]
        candidates: dict[str, Any] = {"flashmla": load_peer("flashmla", _flashmla)} if peers else {}
        if variants:
            candidates[PORTABLE] = lambda s: portable("prefill_key", s.ours)
        facts: dict[str, Any] = {"case": shape.name, "T": shape.rows, "heads": shape.heads}
        facts = facts_between(facts) if shape in BETWEEN_SHAPES else facts
        records.append(compare(OP, facts, sets, work, candidates, replays, products="bf16"))
    return records


SWEEPS = {OP: sweep}
QUICK = {OP: (512,)}
"""Numbers of rows of a quick look."""
