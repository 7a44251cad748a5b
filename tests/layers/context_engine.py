# SPDX-License-Identifier: Apache-2.0
"""The test engine as a rank of a context group: caches of its own pages, and what all ranks give together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from layers import BlockTables, Communicator, ContextParallel, ContextStepBuilder, TensorParallel
from layers.attention import DeepseekV4MultiHeadLatentAttentionWrapper
from layers.caches import KV_BLOCK_SIZE
from tests.layers.engine import NO_PAGE, Engine, Request, hidden_rows, make_layer


class ContextEngine(Engine):
    """Runs its rank's part of steps that it is given whole. Its outputs are the whole steps'."""

    def __init__(self, layer: DeepseekV4MultiHeadLatentAttentionWrapper, *, pages: int = 96, seed: int = 0) -> None:
        cp = layer.options.cp
        assert cp is not None
        self.cp = cp
        super().__init__(layer, pages=pages, seed=seed + cp.rank)
        options = layer.options
        self.context_builder = ContextStepBuilder(
            layer.config, options.max_num_tokens, options.max_model_len, cp, self.device
        )

    def _owns(self, logical: int) -> bool:
        return not self.cp.is_sharded or logical % self.cp.size == self.cp.rank

    def _grow(self, request: Request, upto: int) -> None:
        super()._grow(request, upto)
        pages = request.pages["compressed"]
        for logical in [p for p in pages if not self._owns(p)]:
            self.free["compressed"].insert(0, pages.pop(logical))

    def _table(self, group: str, requests: list[Request]) -> torch.Tensor | None:
        if group != "compressed" or not self.cp.is_sharded or not self.pools[group]:
            return super()._table(group, requests)
        ranks = self.cp.size
        width = max(-(-r.length // KV_BLOCK_SIZE) for r in requests) // ranks + 8
        table = torch.full((len(requests), width), NO_PAGE, dtype=torch.int32)
        for row, request in enumerate(requests):
            for logical, page in request.pages[group].items():
                table[row, logical // ranks] = page
        return table.to(self.device)

    def step(
        self,
        decodes: list[tuple[Request, torch.Tensor]],
        prefills: list[tuple[Request, torch.Tensor]] = [],  # noqa: B006 (never mutated)
        *,
        restart: list[int] | None = None,
        recycle: bool = True,
        capture: dict[str, torch.Tensor] | None = None,
    ) -> list[torch.Tensor]:
        work = decodes + prefills
        requests, counts = [r for r, _ in work], [len(rows) for _, rows in work]
        starts = [r.length for r in requests]
        for request, count in zip(requests, counts, strict=True):
            self._grow(request, request.length + count)
        swa = self._table("swa", requests)
        assert swa is not None
        tables = BlockTables(swa, self._table("compressed", requests), self._table("state", requests))
        lengths = [s + c for s, c in zip(starts, counts, strict=True)]
        step = self.context_builder.build(self.ratio, counts, lengths, tables, len(decodes))
        hidden = torch.cat([rows for _, rows in work]).to(self.device)
        out = step.whole_rows(self.layer(step.positions, step.own_rows(hidden), step, self.caches))
        self.picks = torch.empty(0)
        if self.layer.indexer is not None:
            buffer = self.layer.indexer.indexer_op.topk_indices_buffer
            self.picks = step.whole_rows(buffer[: step.num_tokens].clone())
        for number, request in enumerate(requests):
            request.length = lengths[number]
            self._recycle(request, starts[number] if number < len(decodes) else request.length)
        return list(out.split(counts))

    def entries(self, request: Request, count: int | None = None) -> list[torch.Tensor]:
        """Those of the rank; others' are zeros."""
        entries = request.length // self.ratio if count is None else count
        result = []
        for cache in self.pools["compressed"]:
            table, rows = request.pages["compressed"], cache.block_size
            own = [e for e in range(entries) if e // rows in table]
            slots = torch.tensor([table[e // rows] * rows + e % rows for e in own], dtype=torch.int64)
            for part in cache.kv_format.read_fields(cache.data, rows, slots.to(self.device)):
                whole = part.new_zeros(entries, *part.shape[1:])
                whole[torch.tensor(own, dtype=torch.int64, device=self.device)] = part
                result.append(whole)
        return result


def layer_of(
    communicator: Communicator | None, ratio: int, options: dict[str, Any]
) -> DeepseekV4MultiHeadLatentAttentionWrapper:
    """A rank's layer behind its profiling run, or one process's. options: of make_layer, and with cp_ before them of
    ContextParallel; where ranks have heads of their own they are a tensor-parallel group too."""
    of_cp = {name[3:]: value for name, value in options.items() if name.startswith("cp_")}
    others = {name: value for name, value in options.items() if not name.startswith("cp_")}
    if communicator is None:
        return make_layer(ratio, **others)
    if of_cp.get("heads") == "own":
        others["tp"] = TensorParallel(group=communicator)
    layer = make_layer(ratio, cp=ContextParallel(group=communicator, **of_cp), **others)
    device = layer.q_norm_weight.device
    hidden = torch.zeros(4, layer.config.hidden_size, dtype=torch.bfloat16, device=device)
    layer(torch.zeros(4, dtype=torch.int64, device=device), hidden)
    return layer


Steps = Sequence[tuple[list[tuple[int, int]], list[tuple[int, int]]]]

STEPS: Steps = (
    ([], [(0, 520), (1, 70)]),
    ([], [(0, 131), (1, 260), (2, 3)]),
    ([(2, 1)], [(1, 130)]),
    ([(0, 1), (1, 1), (2, 1)], []),
    ([(0, 2), (1, 2), (2, 2)], []),
    ([(0, 1), (1, 2), (2, 1)], []),
)
"""(decodes, prefills), each a request and its rows: many rows, a few, none of some ranks; in later steps requests begin
at no multiple of anything; drafts, and decodes of different lengths."""


def context_steps(
    communicator: Communicator | None, ratio: int, options: dict[str, Any], steps: Steps = STEPS
) -> dict[str, Any]:
    """Outputs and picks of steps, and the bytes of all caches afterwards. Without a communicator one process's."""
    layer = layer_of(communicator, ratio, options)
    layer.mla_attn.takes_slots = False  # one process's picks are entries, as a group's
    engine = Engine(layer, seed=5) if communicator is None else ContextEngine(layer, seed=5)
    requests = [Request() for _ in range(1 + max(n for parts in steps for part in parts for n, _ in part))]
    total = [sum(rows for parts in steps for part in parts for n, rows in part if n == r) for r in range(len(requests))]
    hidden = [hidden_rows(rows, seed=10 + n, config=layer.config) for n, rows in enumerate(total)]
    outputs: list[torch.Tensor] = []
    picks: list[torch.Tensor] = []
    for parts in steps:
        work = [[(requests[n], hidden[n][requests[n].length :][:rows]) for n, rows in part] for part in parts]
        outputs.append(torch.cat(engine.step(*work)).cpu())
        if isinstance(engine, ContextEngine):
            picks.append(engine.picks.cpu())
        elif layer.indexer is not None:
            picks.append(layer.indexer.indexer_op.topk_indices_buffer[: len(outputs[-1])].clone().cpu())
    return {
        "outputs": outputs,
        "picks": picks if layer.indexer is not None else [],
        "entries": [data.cpu() for r in requests for data in engine.entries(r)],
        "window": [data.cpu() for r in requests for data in engine.window(r)],
    }


def together(results: Sequence[dict[str, Any]], options: dict[str, Any]) -> list[torch.Tensor]:
    """The entries of all ranks."""
    every = [held["entries"] for held in results]
    if options.get("cp_kv") != "sharded":
        return list(every[0])
    return [torch.stack(parts).sum(0, dtype=parts[0].dtype) for parts in zip(*every, strict=True)]
