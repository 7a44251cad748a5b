# SPDX-License-Identifier: Apache-2.0
"""Attention layers on several GPUs of one host: `python -m perf parallel`.

A process per GPU, over NCCL. Each cell is a step of one kind of layer in one form of division; three layers run one
after the other in a CUDA graph, as in perf.layer. Its time is that of the slowest rank: the largest of the ranks'
medians. `one` is all rows on each GPU by itself, `dp` its share of the requests.
"""

from __future__ import annotations

import re
import socket
import statistics
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed
import torch.multiprocessing

from cute_kernels.layers import (
    BlockTables,
    Communicator,
    ContextParallel,
    ContextStepBuilder,
    GroupCommunicator,
    TensorParallel,
)
from cute_kernels.layers.attention import DeepseekV4MultiHeadLatentAttentionWrapper
from perf.layer import DEVICE, KINDS, Case, Step, build_layers
from perf.measure import capture

MODEL = "v4-flash"
ROUNDS = 4
"""Times that a graph has all layers: what a replay itself costs is small beside them."""

TIMEOUT = timedelta(seconds=120)


@dataclass(frozen=True)
class Form:
    """How ranks divide a layer: options of TensorParallel, or None, and of ContextParallel, or None."""

    tp: Mapping[str, Any] | None = None
    cp: Mapping[str, Any] | None = None
    divides_requests: bool = False


OWN_HEADS: Mapping[str, Any] = {"kv": "sharded", "heads": "own"}
FORMS: Mapping[str, Form] = {
    "one": Form(),
    "tp": Form(tp={}),
    "tp rows": Form(tp={"indexer": "rows"}),
    "dcp": Form(tp={}, cp=OWN_HEADS),
    "dcp replicate": Form(tp={}, cp={**OWN_HEADS, "q": "replicate"}),
    "dp": Form(divides_requests=True),
    "pcp": Form(cp={"prefill": "zigzag"}),
    "pcp sharded": Form(cp={"kv": "sharded", "prefill": "zigzag"}),
}

DECODES = tuple(name for name in FORMS if name not in ("one", "pcp", "pcp sharded"))
PREFILLS = ("one", "tp", "tp rows", "pcp", "pcp sharded")
STEPS = (
    *(("decode", "c4a", context, rows) for context in (262144, 1048576) for rows in (1, 8, 64)),
    ("decode", "c128a", 1048576, 8),
    *(("prefill", kind, 262144, 8192) for kind in ("c4a", "c128a")),
)


@dataclass(frozen=True)
class Cell:
    """A step in one form: of `rows` requests, or of so many rows of one."""

    phase: str
    kind: str
    context: int
    rows: int
    form: str

    @property
    def name(self) -> str:
        return f"{self.phase} {self.kind} ctx{self.context} {self.rows} {self.form}"

    def case(self, ranks: int) -> Case:
        """What one rank runs."""
        if self.phase == "prefill":
            return Case(MODEL, self.kind, self.phase, 1, self.rows, self.context)
        count = self.rows // ranks if FORMS[self.form].divides_requests else self.rows
        return Case(MODEL, self.kind, self.phase, count, 1, self.context)


def cells(ranks: int, only: str = "") -> list[Cell]:
    """Those whose name the regular expression finds; requests that are divided are so evenly."""
    found = []
    for phase, kind, context, rows in STEPS:
        for form in DECODES if phase == "decode" else PREFILLS:
            cell = Cell(phase, kind, context, rows, form)
            is_even = not FORMS[form].divides_requests or rows % ranks == 0
            scores_rows = "indexer" not in (FORMS[form].tp or {}) or (kind == "c4a" and rows > 1)
            if is_even and scores_rows and re.search(only, cell.name):
                found.append(cell)
    return found


class GroupStep(Step):
    """A step of a rank."""

    def __init__(
        self, case: Case, layers: list[DeepseekV4MultiHeadLatentAttentionWrapper], cp: ContextParallel | None
    ) -> None:
        self.cp = cp
        super().__init__(case, layers)

    def _tables(self, ratio: int, g: torch.Generator) -> tuple[BlockTables, dict[str, Any]]:
        tables, blocks = super()._tables(ratio, g)
        cp = self.cp
        if cp is None or not cp.is_sharded or tables.compressed is None:
            return tables, blocks
        return replace(tables, compressed=tables.compressed[:, cp.rank :: cp.size].contiguous()), blocks

    def build(self) -> None:
        if self.cp is None:
            super().build()
            return
        case = self.case
        builder = ContextStepBuilder(self.config, case.tokens, max(case.lengths()), self.cp, DEVICE)
        self.metadata: Any = {
            ratio: builder.build(ratio, case.query_lengths(), case.lengths(), self.tables[ratio], case.decodes)
            for ratio in self.kinds
        }
        self.hidden = [self.metadata[self.kinds[0]].own_rows(hidden) for hidden in self.hidden]


def make_step(cell: Cell, communicator: Communicator) -> GroupStep:
    """This rank's, behind the profiling run of its layers."""
    form, case = FORMS[cell.form], cell.case(communicator.size)
    cp = None if form.cp is None else ContextParallel(group=communicator, **form.cp)
    options: dict[str, Any] = {"cp": cp}
    if form.tp is not None:
        options["tp"] = TensorParallel(group=communicator, **form.tp)
    layers = build_layers(case, max(case.lengths()) + 64, **options)
    step = GroupStep(case, layers, cp)
    for layer in layers:
        layer(step.metadata[layer.compress_ratio].positions, step.hidden[0])
    return step


def has_same_bits(form: str, own: torch.Tensor, communicator: Communicator) -> bool | None:
    """Whether all ranks hold this rank's result; None if ranks of that form share none, and nothing was compared."""
    if FORMS[form].tp is None:
        return None
    every = own.new_empty((communicator.size, *own.shape))
    communicator.all_gather(every, own)
    return all(torch.equal(every[0], other) for other in every)


def measure_cell(cell: Cell, communicator: Communicator, replays: int) -> dict[str, Any]:
    """Of this rank's step, which all ranks run; the same on all of them."""
    step = make_step(cell, communicator)
    same_bits = has_same_bits(cell.form, step.run(0), communicator)
    graph, count = capture(step.calls() * ROUNDS)
    times = []
    for _ in range(replays + 1):
        communicator.barrier()
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1e3 / count)
    own = torch.tensor([statistics.median(times[1:])], device=DEVICE)
    found = own.new_empty((communicator.size, 1))
    communicator.all_gather(found, own)
    us = float(found.amax())
    facts = {"phase": cell.phase, "ratio": KINDS[cell.kind], "context": cell.context, "rows": cell.rows}
    return {**facts, "form": cell.form, "us": round(us, 2), "same_bits": same_bits}


def _serve(rank: int, ranks: int, port: int, only: str, replays: int, out: str) -> None:
    torch.cuda.set_device(rank)
    torch.distributed.init_process_group(
        "nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks, timeout=TIMEOUT
    )
    found = []
    for cell in cells(ranks, only):
        found.append(measure_cell(cell, GroupCommunicator(), replays))
        torch.cuda.empty_cache()
        if rank == 0:
            print(f"{cell.name:48} {found[-1]['us']:10.1f} us", flush=True)
            torch.save(found, out)
    torch.distributed.destroy_process_group()


def measure(ranks: int, only: str, replays: int) -> dict[str, Any]:
    """Cells on the first `ranks` GPUs, as perf.scaling reads them."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "cells"
        torch.multiprocessing.spawn(_serve, (ranks, port, only, replays, str(out)), nprocs=ranks)
        found = torch.load(out)
    facts = {"gpu": torch.cuda.get_device_name(0), "gpus": ranks, "model": MODEL, "torch": torch.__version__}
    return {**facts, "cells": found}
