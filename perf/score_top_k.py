# SPDX-License-Identifier: Apache-2.0
"""Benchmark of scores and picks in one op, beside the pair of ops that it replaces and DeepGEMM with vLLM's top-k.

The record's shapes say what a call allocates at most: `peak` of the op, `peak_unfused` of the pair, in bytes.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any

import torch

from cute_kernels.indexer import chunks
from cute_kernels.indexer.ops import mqa_logits, paged_mqa_logits, score_top_k_decode, score_top_k_prefill
from cute_kernels.runtime.ops import OPS
from perf import logits
from perf.grid import draw, facts_between, of_rows
from perf.logits import CONTIGUOUS, HEADS, OUT, LogitsSet
from perf.measure import Call, compare, number_of_sets, peak
from perf.peers import load_peer
from perf.topk import WORKSPACE, same_picks

PREFILL, DECODE = "score_top_k_prefill", "score_top_k_decode"
UNFUSED = "ours unfused"

PREFILLS = (
    (4096, 4096, 512),
    (4096, 16384, 512),
    (4096, 65536, 512),
    (1024, 32768, 512),
    (1024, 32768, 1024),
    (4096, 262144, 512),
    (3000, 70000, 1024),
)
"""(rows, keys, k)"""

DECODES = (
    *((batch, 1, keys, 512) for keys in (8192, 32768) for batch in (1, 8, 64, 256)),
    (64, 1, 8192, 1024),
    (64, 1, 32768, 1024),
    (64, 2, 8192, 512),
    (1, 1, 262144, 512),
    (4, 1, 4992, 512),
    (48, 1, 4992, 512),
)
"""(requests, rows of each, keys of each, k)"""

BETWEEN_PREFILLS = tuple(
    (point["rows"], point["keys"], k)
    for k, point in zip((512, 1024, 1024), draw(PREFILL, 3, rows=(300, 4000), keys=(3000, 80_000)), strict=True)
)
BETWEEN_DECODES = tuple(
    (point["batch"], 1, point["keys"], k)
    for k, point in zip((512, 1024, 512, 1024), draw(DECODE, 4, batch=(2, 200), keys=(2000, 80_000)), strict=True)
)
"""Between the tuned ones."""

MXFP4_DECODES = ((64, 1, 8192, 512), (64, 1, 32768, 512), (256, 1, 32768, 512))


@dataclass(frozen=True)
class PickSet:
    """Arguments of a call in the schema's order, and the scores that the pair of ops makes of them on the way."""

    op: str
    scored: LogitsSet
    args: tuple[Any, ...]
    k: int

    @classmethod
    def of(cls, scored: LogitsSet, k: int) -> PickSet:
        is_prefill = scored.op == CONTIGUOUS
        q, out = scored.args[0], scored.args[OUT]
        picks = torch.empty(out.shape[0], k, dtype=torch.int32, device=out.device)
        size = chunks.workspace_bytes(
            q.shape[0], out.shape[1], 1 if is_prefill else q.shape[1], k, chunks.WORKSPACE_BYTES
        )
        workspace = torch.empty(size // 4, device=out.device)
        _clean, last = scored.args[7:9]
        args = *scored.args[:7], last, picks, workspace
        return cls(PREFILL, scored, args, k) if is_prefill else cls(DECODE, scored, (*args, None, 0), k)

    @property
    def picks(self) -> torch.Tensor:
        found: torch.Tensor = self.args[8]
        return found

    def arguments(self) -> tuple[Any, ...]:
        return self.args

    def ours(self) -> None:
        OPS[self.op].overload(*self.args)

    def unfused(self) -> None:
        self.scored.ours()
        self.pick()

    def pick(self) -> None:
        """From the scores that are there."""
        out, picks = self.scored.args[OUT], self.picks
        if self.op == PREFILL:
            OPS["top_k_per_row_prefill"].overload(out, *self.args[5:7], picks, len(picks), self.k, True)
        else:
            OPS["top_k_per_row_decode"].overload(out, self.args[4], picks, len(picks), self.k, None, 0, True)

    def right(self, call: Call) -> bool:
        """Whether `call` writes the picks of the pair of ops; a peer, which returns something, nearly those."""
        picks = self.picks
        self.unfused()
        want = picks.clone()
        picks.fill_(-7)
        is_peer = call() is not None
        return same_picks([picks], [want]) if is_peer else torch.equal(picks, want)

    def peaks(self) -> dict[str, int]:
        """Of the public functions, which allocate what they need."""
        fused: Call
        scores: Call
        if self.op == PREFILL:
            q, _, k, scale, weights, start, end = self.args[:7]
            rows = q, (k, scale), weights, start, end
            fused, scores = partial(score_top_k_prefill, *rows, self.k), partial(mqa_logits, *rows, False)
        else:
            q, scale, pool, weights, lens, table, columns, kv_format = self.args[:8]
            pages = (q if scale is None else (q, scale)), pool, weights, lens, table
            fused = partial(score_top_k_decode, *pages, columns, self.k, kv_format=kv_format)
            scores = partial(paged_mqa_logits, *pages, None, columns, kv_format=kv_format)
        return {"peak": peak(fused), "peak_unfused": peak(lambda: (scores(), torch.empty_like(self.picks)))}


def prefill(rows: int, keys: int, k: int, seed: int) -> PickSet:
    return PickSet.of(logits.prefill(rows, keys, False, False, seed), k)


def decode(batch: int, next_n: int, keys: int, k: int, mxfp4: bool, seed: int) -> PickSet:
    return PickSet.of(logits.decode(batch, next_n, keys, mxfp4, seed), k)


def _peer(op: str, name: str) -> Callable[[PickSet], Any]:
    """DeepGEMM's scores and vLLM's picks."""
    scores = logits._peer(logits.CONTIGUOUS if op == PREFILL else logits.PAGED)
    importlib.import_module("vllm._C_stable_libtorch")
    kernel = getattr(torch.ops._C, name)
    workspace = torch.zeros(WORKSPACE, dtype=torch.uint8, device="cuda")

    def run(s: PickSet) -> Any:
        found, picks = scores(s.scored), s.picks
        if op == PREFILL:
            kernel(found, *s.args[5:7], picks, len(picks), *found.stride(), s.k)
        elif name == "top_k_per_row_decode":
            lens = s.args[4]
            kernel(found, lens.shape[1], lens, picks, len(picks), *found.stride(), s.k)
        else:
            kernel(found, s.args[4].view(-1), picks, workspace, s.k, found.shape[1])
        return found

    return run


PEERS = {
    PREFILL: {"deepgemm + vllm-per-row": "top_k_per_row_prefill"},
    DECODE: {
        "deepgemm + vllm-cooperative": "cooperative_topk",
        "deepgemm + vllm-persistent": "persistent_topk",
        "deepgemm + vllm-per-row": "top_k_per_row_decode",
    },
}


def _records(
    op: str, shape: dict[str, Any], make: Callable[[int], PickSet], peers: bool, replays: int
) -> dict[str, Any]:
    first = make(0)
    cost = OPS[op].cost
    assert cost is not None
    work = cost(*first.args)
    sets = [first, *(make(seed) for seed in range(1, min(logits.MOST_SETS, number_of_sets(work.bytes))))]
    candidates: dict[str, Any] = {UNFUSED: PickSet.unfused}
    if peers and first.args[1] is None:  # DeepGEMM has no MXFP4 scores on Hopper
        candidates |= {name: load_peer(name, partial(_peer, op, kernel)) for name, kernel in PEERS[op].items()}
    return compare(op, {**shape, **first.peaks()}, sets, work, candidates, replays, products="e4m3")


def prefill_name(rows: int, keys: int, k: int) -> str:
    return f"{logits.prefill_name(rows, keys, False)} k={k}"


def decode_name(batch: int, next_n: int, keys: int, k: int, mxfp4: bool = False) -> str:
    return f"{logits.decode_name(batch, next_n, keys, mxfp4)} k={k}"


def sweep_prefill(
    rows: tuple[int, ...] | None = None, peers: bool = False, variants: bool = False, replays: int = 21
) -> list[dict[str, Any]]:
    """Records of score_top_k_prefill per number of rows and keys."""
    chosen = of_rows((*PREFILLS, *BETWEEN_PREFILLS), rows, itemgetter(0))
    for m, n, k in chosen:  # compiled before other projects change the DSL
        _warm(PickSet.of(logits.prefill(m, n, False, False, 0), k))
    found = []
    for m, n, k in chosen:
        shape = {"case": prefill_name(m, n, k), "T": m, "keys": n, "heads": HEADS, "k": k}
        shape = facts_between(shape) if (m, n, k) in BETWEEN_PREFILLS else shape
        found.append(_records(PREFILL, shape, partial(prefill, m, n, k), peers, replays))
    return found


def sweep_decode(
    rows: tuple[int, ...] | None = None, peers: bool = False, variants: bool = False, replays: int = 21
) -> list[dict[str, Any]]:
    """Records of score_top_k_decode per number of requests, rows of each and keys of each."""
    of_fp8 = *DECODES, *BETWEEN_DECODES
    chosen = [(*shape, mxfp4) for mxfp4, shapes in ((False, of_fp8), (True, MXFP4_DECODES)) for shape in shapes]
    chosen = of_rows(chosen, rows, itemgetter(0))
    for shape in chosen:
        _warm(decode(*shape, 0))
    found = []
    for shape in chosen:
        batch, next_n, keys, k, _ = shape
        facts: dict[str, Any] = {
            "case": decode_name(*shape),
            "T": batch,
            "next_n": next_n,
            "keys": keys,
            "heads": HEADS,
            "k": k,
        }
        facts = facts_between(facts) if shape[:-1] in BETWEEN_DECODES else facts
        found.append(_records(DECODE, facts, partial(decode, *shape), peers, replays))
    return found


def _warm(s: PickSet) -> None:
    s.ours()
    s.unfused()


SWEEPS = {PREFILL: sweep_prefill, DECODE: sweep_decode}
QUICK = {PREFILL: (1024,), DECODE: (1, 64)}
"""Numbers of rows, or of requests, of a quick look."""
