# SPDX-License-Identifier: Apache-2.0
"""The test engine as a rank of a context group: caches of its own pages, and what all ranks give together."""

from __future__ import annotations

from typing import Any

import torch

from layers import BlockTables, Communicator, ContextParallel, ContextStepBuilder, TensorParallel
from layers.attention import DeepseekV4MultiHeadLatentAttentionWrapper
from layers.caches import KV_BLOCK_SIZE
from tests.layers.engine import CONFIG, NO_PAGE, Engine, Request, hidden_rows, make_layer


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

    def window(self, request: Request) -> list[torch.Tensor]:
        return super().window(request)


def layer_of(communicator: Communicator, ratio: int, options: dict[str, Any]) -> Any:
    """A rank's layer. options: of make_layer, and with cp_ before them of ContextParallel; tp: ranks of the
    tensor-parallel group, which is the context group's where they are as many and heads are their own."""
    of_cp = {name[3:]: value for name, value in options.items() if name.startswith("cp_")}
    others = {name: value for name, value in options.items() if not name.startswith("cp_")}
    if of_cp.get("heads") == "own":
        others["tp"] = TensorParallel(group=communicator)
    return make_layer(ratio, cp=ContextParallel(group=communicator, **of_cp), **others)


def context_steps(communicator: Communicator | None, ratio: int, options: dict[str, Any]) -> dict[str, Any]:
    """Chunked prefill, steps of both, decode with drafts: outputs, picks and the bytes of all caches. Without a
    communicator one process's."""
    if communicator is None:
        others = {name: value for name, value in options.items() if not name.startswith("cp_")}
        layer = make_layer(ratio, **others)
        engine: Engine = Engine(layer, seed=5)
    else:
        layer = layer_of(communicator, ratio, options)
        layer(torch.zeros(4, dtype=torch.int64), torch.zeros(4, layer.config.hidden_size, dtype=torch.bfloat16))
        engine = ContextEngine(layer, seed=5)
    first, second, third = (Request() for _ in range(3))
    hidden = {id(r): hidden_rows(2000, seed=10 + n, config=layer.config) for n, r in enumerate((first, second, third))}
    outputs: list[torch.Tensor] = []
    picks: list[torch.Tensor] = []

    def step(decodes: list[tuple[Request, int]], prefills: list[tuple[Request, int]]) -> None:
        work = [[(r, hidden[id(r)][r.length :][:count]) for r, count in part] for part in (decodes, prefills)]
        outs = engine.step(*work)
        outputs.append(torch.cat(outs).cpu())
        if layer.indexer is not None:
            buffer = layer.indexer.indexer_op.topk_indices_buffer
            picks.append((engine.picks if communicator else buffer[: len(outputs[-1])].clone()).cpu())

    # many rows, a few, and in the next steps starts that are no multiples of anything
    step([], [(first, 1100), (second, 70)])
    step([], [(first, 131), (second, 500), (third, 3)])
    step([(third, 1)], [(second, 300)])
    every = [first, second, third]
    step([(r, 1) for r in every], [])
    step([(r, 2) for r in every], [])
    step([(r, 1 + n % 2) for n, r in enumerate(every)], [])
    return {
        "outputs": outputs,
        "picks": picks,
        "entries": [data.cpu() for r in every for data in engine.entries(r)],
        "window": [data.cpu() for r in every for data in engine.window(r)],
    }


__all__ = ["CONFIG", "ContextEngine", "context_steps", "layer_of"]
