#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""Do layer steps in CUDA graphs keep giving the bits of plain steps? Runs steps of all kinds, mixed, for a while.

    python scripts/soak.py --seconds 300
    python scripts/soak.py --seconds 10 --seed 7

Each layer is there three times, with the same weights and caches of its own: plain (every step through its ops), bound
(steps whose launches are kept) and captured (decode steps of several batch sizes, and mixed steps of decode rows and
prompts, in CUDA graphs that are replayed in any order). All three take the same random steps; a result that differs in
a bit, or a cache that does after some steps, ends the run. So does memory that keeps growing.

Exit status: 0 every bit was the same, 1 one was not, or memory grew, 2 bad input, or no GPU.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from cute_kernels.layers import (
    PRESETS,
    AttentionOptions,
    BlockTables,
    DeepseekV4MetadataBuilder,
    LayerCaches,
    build_layer,
    random_layer_tensors,
)
from cute_kernels.layers.caches import KV_BLOCK_SIZE, STATE_BLOCK_SIZE, SWA_BLOCK_SIZE
from cute_kernels.layers.metadata import DeepseekV4Metadata
from cute_kernels.runtime.verify import raw_memory

DEVICE = "cuda"
FORMS = ("plain", "bound", "captured")
LAYERS: dict[str, tuple[int, dict[str, Any]]] = {
    "SWA": (1, {}),
    "C4A": (4, {}),
    "C128A": (128, {}),
    "C4A, bf16": (4, {"kv_cache": "bf16"}),
    "C4A, fp8 and mxfp4": (4, {"kv_cache": "fp8", "index_cache": "mxfp4", "index_hadamard": True}),
    "C128A, paged": (128, {"prefill": "paged"}),
}
"""Name -> compress ratio and options."""

REQUESTS = 8
LONGEST = 2048
NO_PAGE = -1_000_000
BATCHES = (1, 2, 4, 8)
"""Rows of captured decode steps; what is not a request's is padding."""

PROMPTS = (1, 3, 64, 129, 300, 511)
MIXED = ((3, (64, 5)), (1, (300,)), (6, (1, 130)))
"""Captured mixed steps: decode rows, and lengths of prompts behind them."""

STEPS_BETWEEN_CACHES = 50
MOST_GROWTH = 1 << 20
"""Bytes of GPU memory that a run may hold more at its end than after every kind of step has come."""


@dataclass
class Step:
    """What one step of a layer does: a row of each decode request, and whole prompts."""

    decodes: list[int]
    prompts: dict[int, int] = field(default_factory=dict)
    rows: int = 0
    """Of decodes, with padding."""

    @property
    def shape(self) -> tuple[int, tuple[int, ...]]:
        return self.rows, tuple(self.prompts.values())


class Form:
    """One of the three: a layer, its caches, and everything that a step reads at fixed addresses."""

    def __init__(self, name: str, ratio: int, options: dict[str, Any], seed: int) -> None:
        self.name, self.ratio = name, ratio
        config = PRESETS["v4-flash"].reduced()
        index = config.layer_of_kind(ratio)
        limits = AttentionOptions(max_model_len=LONGEST, max_num_tokens=LONGEST, bind_steps=name == "bound", **options)
        tensors = random_layer_tensors(config, index, seed)
        self.layer = build_layer(config, index, tensors, options=limits, device=DEVICE)
        self.builder = DeepseekV4MetadataBuilder(config, LONGEST, LONGEST, DEVICE)
        tokens = {"swa": SWA_BLOCK_SIZE, "compressed": KV_BLOCK_SIZE, "state": STATE_BLOCK_SIZE.get(ratio, 1)}
        pages = {group: -(-LONGEST // size) for group, size in tokens.items()}
        generator = torch.Generator().manual_seed(seed)
        self.pages = {
            group: torch.randperm(REQUESTS * count, generator=generator).int().view(REQUESTS, count).to(DEVICE)
            for group, count in pages.items()
        }
        self.caches = LayerCaches.allocate(
            config,
            ratio,
            swa_blocks=REQUESTS * pages["swa"],
            compressed_blocks=REQUESTS * pages["compressed"],
            state_blocks=REQUESTS * pages["state"],
            kv_cache=limits.kv_cache,
            index_cache=limits.index_cache,
            device=DEVICE,
        )
        self.tables = {group: torch.full_like(own, NO_PAGE) for group, own in self.pages.items()}
        self.hidden = torch.zeros(LONGEST, config.hidden_size, dtype=torch.bfloat16, device=DEVICE)
        self.graphs: dict[tuple[int, tuple[int, ...]], tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}

    def prepare(self, step: Step, lengths: Sequence[int], hidden: torch.Tensor) -> DeepseekV4Metadata:
        """The metadata of a step; lengths: of all requests, after it."""
        requests = [*step.decodes, *([None] * (step.rows - len(step.decodes))), *step.prompts]
        for group, table in self.tables.items():
            table.fill_(NO_PAGE)
            for row, request in enumerate(requests):
                if request is not None:
                    table[row].copy_(self.pages[group][request])
        self.hidden[: len(hidden)].copy_(hidden)
        ends = torch.tensor([0 if r is None else lengths[r] for r in requests], dtype=torch.int32).to(DEVICE)
        tables = {group: table[: len(requests)] for group, table in self.tables.items()}
        prompts = list(step.prompts.values())
        return self.builder.build(
            self.ratio,
            [*[1] * step.rows, *prompts],
            [*[LONGEST] * step.rows, *prompts],
            BlockTables(tables["swa"]) if self.ratio == 1 else BlockTables(**tables),
            step.rows,
            seq_lens_device=ends,
        )

    def run(self, step: Step, lengths: Sequence[int], hidden: torch.Tensor) -> torch.Tensor:
        m = self.prepare(step, lengths, hidden)
        rows = self.hidden[: len(hidden)]
        if self.name != "captured" or step.shape not in CAPTURED:
            return self.layer(m.positions, rows, m, self.caches)
        if step.shape not in self.graphs:
            self.layer(m.positions, rows, m, self.caches)  # what compiles or plans does so before the capture
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = self.layer(m.positions, rows, m, self.caches)
            self.graphs[step.shape] = graph, out
        graph, out = self.graphs[step.shape]
        out.fill_(torch.nan)
        graph.replay()
        return out

    def pools(self) -> dict[str, torch.Tensor]:
        return {name: raw_memory(cache.data) for name, cache in vars(self.caches).items() if cache is not None}


CAPTURED = {*((rows, ()) for rows in BATCHES), *MIXED}


class Soak:
    """A layer in its three forms, and its requests' lengths."""

    def __init__(self, name: str, seed: int) -> None:
        self.name = name
        self.forms = [Form(form, *LAYERS[name], seed) for form in FORMS]
        self.draw = random.Random(f"{name} {seed}")
        self.generator = torch.Generator(device=DEVICE).manual_seed(seed)
        self.lengths = [0] * REQUESTS
        self.count: Counter[str] = Counter()

    def next_step(self) -> Step:
        """Prompts for requests that have none or are too long; else decode or mixed steps of any requests."""
        over = [r for r, length in enumerate(self.lengths) if not 0 < length < LONGEST]
        if over:
            return Step([], {r: self.draw.choice(PROMPTS) for r in over[: self.draw.randint(1, 3)]})
        some = self.draw.sample(range(REQUESTS), REQUESTS)
        if self.draw.random() < 0.15:
            rows, prompts = self.draw.choice(MIXED)
            decodes, others = some[: self.draw.randint(0, rows)], some[rows : rows + len(prompts)]
            return Step(decodes, dict(zip(others, prompts, strict=True)), rows)
        rows = self.draw.choice(BATCHES)
        return Step(some[: self.draw.randint(1, rows)], {}, rows)

    def step(self) -> str:
        """Take a step. What differed, or ""."""
        step = self.next_step()
        for request in step.decodes:
            self.lengths[request] += 1
        for request, length in step.prompts.items():
            self.lengths[request] = length
        rows = step.rows + sum(step.prompts.values())
        hidden = torch.randn(
            rows, self.forms[0].hidden.shape[1], generator=self.generator, device=DEVICE, dtype=torch.bfloat16
        )
        want, *others = [form.run(step, self.lengths, hidden) for form in self.forms]
        number = sum(self.count.values())
        for form, got in zip(self.forms[1:], others, strict=True):
            if not torch.equal(got.view(torch.int16), want.view(torch.int16)):
                different = int((got.view(torch.int16) != want.view(torch.int16)).any(1).sum())
                return f"step {number}, {step}: {different} of {rows} rows of the {form.name} layer differ"
        self.count["decode" if not step.prompts else "mixed" if step.rows else "prompts"] += 1
        return "" if number % STEPS_BETWEEN_CACHES else self.compare_caches(number)

    def compare_caches(self, number: int) -> str:
        want, *others = [form.pools() for form in self.forms]
        for form, pools in zip(self.forms[1:], others, strict=True):
            for name, pool in pools.items():
                if not torch.equal(pool, want[name]):
                    return f"step {number}: the {form.name} layer's {name} cache differs"
        return ""

    @property
    def has_seen_all(self) -> bool:
        return len(self.forms[-1].graphs) == len(CAPTURED)


def run(names: Sequence[str], seconds: float, seed: int) -> dict[str, Any]:
    """Steps of the layers in turn, some at a time, until the time is over."""
    soaks = [Soak(name, seed) for name in names]
    start, settled, problem = time.perf_counter(), None, ""
    draw = random.Random(seed)
    while not problem and (time.perf_counter() - start < seconds or settled is None):
        soak = draw.choice(soaks)
        for _ in range(draw.randint(1, 20)):
            problem = soak.step()
            if problem:
                problem = f"{soak.name}: {problem}"
                break
        if settled is None and all(one.has_seen_all for one in soaks):
            settled = torch.cuda.memory_allocated()
    for soak in soaks:
        problem = problem or soak.compare_caches(sum(soak.count.values()))
    torch.cuda.synchronize()
    growth = 0 if settled is None else torch.cuda.memory_allocated() - settled
    if not problem and growth > MOST_GROWTH:
        problem = f"{growth} bytes of GPU memory more than after every kind of step had come"
    return {
        "gpu": torch.cuda.get_device_name(),
        "seed": seed,
        "seconds": round(time.perf_counter() - start, 1),
        "steps": {soak.name: dict(soak.count) for soak in soaks},
        "bytes_grown": growth,
        "problem": problem,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=300.0, help="how long, not counting compilations (300)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layer", action="append", choices=tuple(LAYERS), help="only these")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    options = parser.parse_args(arguments)
    if not options.seconds > 0:
        parser.error(f"--seconds: expected a positive number, got {options.seconds:g}")
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device here")
    result = run(options.layer or tuple(LAYERS), options.seconds, options.seed)
    if options.json:
        print(json.dumps(result, indent=2))
    else:
        print(f"{result['gpu']}, seed {result['seed']}, {result['seconds']:.0f} s")
        for name, counts in result["steps"].items():
            print(f"  {name}: " + ", ".join(f"{count} {kind}" for kind, count in counts.items()))
        print(result["problem"] or "every bit the same")
    return 1 if result["problem"] else 0


if __name__ == "__main__":
    sys.exit(main())
