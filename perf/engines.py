# SPDX-License-Identifier: Apache-2.0
"""vLLM's DeepseekV4 attention layers beside the same layers with the plug-in over them: `python -m perf engines`.

First both sides do the same steps from the same caches, with the engine's metadata: decode, padded as for a graph,
drafted tokens, requests with unequal numbers of rows, prefill new and chunked, mixed with decode, short contexts, a
step without metadata, and a replayed graph. Attention's results, projected results, picks, and the bytes that the step
has written are compared.

Then steps of decode and of prefill are timed in CUDA graphs, by kind of layer, batch or new tokens, and heads of a
rank: the whole layer, and what is left of it without the engine's own linears.
"""

from __future__ import annotations

import gc
import re
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from cute_kernels.layers import PRESETS
from cute_kernels.runtime.record import Cost
from perf import measure
from perf.engine_layers import ENGINES, OURS, RATIOS, Batch, Engine, Sizes, restore, snapshot
from perf.grid import BETWEEN, draw
from perf.layer import least_work
from perf.peers import Product, compile_products

OP = "engines"
PEER = "vllm-classes"
LAYERS, PREFILL_LAYERS = 4, 2
CAPTURES = 3
"""Graphs of a decode step: where they lie in memory moves a short step's time. The one of median time counts."""
TENSORS = 8
"""That a layer's step takes, about: more than an op's."""
TARGET_US = 700.0
"""Of a replay, about."""
HOST_US = 10.0
"""Calls that take the GPU less are timed on the host too."""

ATTENTION, RESULT, PICKS, BYTES, STATES = 0.02, 0.06, 0.02, 0.02, 1e-5
"""What may differ: of attention and of the layer's result the relative distance; the share of picks that only one side
has; of the cache bytes that a step writes, the share; of compressor states the relative distance."""

SAME, CHAIN = 1e-6, 1.5
"""Layers one after the other: how far the engine may be from itself with the same picks, and how many times as far as
it gets by rounding its input otherwise we may be."""

KINDS = ("swa", "c4a", "c128a")


def steps(drafts: int) -> Iterator[Batch]:
    """What is compared, with so many speculative tokens."""
    rows = 1 + drafts
    yield Batch(f"decode of {rows}", ((rows, 3000),))
    yield Batch(f"decode of 33 x {rows} in a graph of 40", tuple((rows, 1900 + 61 * i) for i in range(33)), padding=7)
    if drafts:
        yield Batch(f"decode of up to {rows} rows", tuple((1 + i % rows, 2300 + 97 * i) for i in range(5)))
        return
    yield Batch("short contexts", ((1, 100), (1, 3), (1, 700)))
    yield Batch("prefill", ((300, 0), (137, 0)))
    yield Batch("chunked prefill", ((300, 2500), (129, 127)))
    yield Batch("mixed", ((1, 2600), (1, 130), (1, 4000), (150, 2200), (90, 0)))


@dataclass(frozen=True)
class Comparison:
    """Of a step of one layer. wrong: names of what differs more than it may."""

    kind: str
    step: str
    found: Mapping[str, float]
    wrong: tuple[str, ...]

    def __str__(self) -> str:
        numbers = ", ".join(f"{name} {value:.2g}" for name, value in self.found.items())
        return f"{self.kind:6} {self.step:28} {'WRONG: ' + ', '.join(self.wrong) if self.wrong else 'ok':6} {numbers}"


LIMITS = {"attention": ATTENTION, "result": RESULT, "picks": PICKS, "bytes": BYTES, "states": STATES}


def compare(engine: Engine, batch: Batch, number: int, start: Mapping[str, torch.Tensor]) -> Comparison:
    """A step of one layer by both sides, from the same bytes. A padded step is a graph's replay on our side: the graph
    was captured, as the engine does it, from a step without padding, and finds this one in the same buffers."""
    hidden = _hidden(engine, batch.rows)
    buffers: dict[Any, torch.Tensor] = {}
    kept: dict[str, list[torch.Tensor]] = {}
    most = engine.sizes.max_len if batch.padding else None
    with engine.without_linears(batch.rows, fresh=True):
        replay = None
        if batch.padding:
            full = Batch("full", batch.requests + batch.requests[:1] * batch.padding)
            run = partial(_run, engine, OURS, number, hidden, *engine.build(full, most, buffers))
            run()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                captured = run()
            replay = graph.replay
        restore(engine.sides, start)
        metadata, positions = engine.build(batch, most, buffers)
        for name, side in engine.sides.items():
            side.buffer.fill_(-1)
            if name == OURS and replay is not None:
                replay()
                found = captured
            else:
                found = _run(engine, name, number, hidden, metadata, positions)
            kept[name] = [*(x[: batch.live].float() for x in found), side.buffer[: batch.live].clone()]
    (theirs, theirs_result, theirs_picks), (ours, ours_result, ours_picks) = kept[ENGINES], kept[OURS]
    apart = {"attention": distance(ours, theirs), "result": distance(ours_result, theirs_result)}
    if engine.sides[OURS].layers[number].indexer is not None:
        apart["picks"] = picks_apart(ours_picks, theirs_picks)
    prefix = engine.sides[ENGINES].layers[number].prefix + "."
    written = differing = 0
    states = 0.0
    for (their_key, *_), (our_key, *_) in zip(engine.caches(ENGINES), engine.caches(OURS), strict=True):
        if not f"{their_key}.".startswith(prefix):
            continue
        before, after = start[their_key], engine.sides[ENGINES].storage[their_key]
        own = engine.sides[OURS].storage[our_key]
        if after.dtype == torch.float32:
            states = max(states, distance(own, after))
        else:
            written += int((before != after).sum())
            differing += int((own != after).sum())
    apart["bytes"] = differing / max(written, 1)
    if engine.sides[OURS].layers[number].compressor is not None:
        apart["states"] = states
    # a picked entry that the other side has not is a share of what is attended
    more = {name: (2 * apart.get("picks", 0.0)) ** 0.5 for name in ("attention", "result")}
    wrong = tuple(name for name, value in apart.items() if not value <= LIMITS[name] + more.get(name, 0.0))
    return Comparison(engine.sizes.kinds[number], batch.name, apart, wrong)


def _run(
    engine: Engine, name: str, number: int, hidden: torch.Tensor, metadata: Any, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(attention's result, the layer's) of a step."""
    layer = engine.sides[name].layers[number]
    seen: list[torch.Tensor] = []
    object.__setattr__(layer, "_o_proj", partial(_watch, seen, layer._o_proj))
    try:
        result = engine.run(name, number, hidden, metadata, positions)
    finally:
        object.__delattr__(layer, "_o_proj")
    return seen[0], result


def _watch(seen: list[torch.Tensor], project: Callable[..., Any], o: torch.Tensor, positions: torch.Tensor) -> Any:
    seen.append(o.clone())
    return project(o, positions)


def _hidden(engine: Engine, rows: int) -> torch.Tensor:
    g = torch.Generator(device=engine.device).manual_seed(rows)
    shape = rows, engine.sizes.hidden
    return torch.randn(shape, generator=g, device=engine.device, dtype=torch.float32).bfloat16()


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """Relative; infinite where a number is none."""
    one, other = one.double(), other.double()
    if not (one.isfinite().all() and other.isfinite().all()):
        return float("inf")
    return float((one - other).norm() / other.norm().clamp(min=1e-30))


def picks_apart(one: torch.Tensor, other: torch.Tensor) -> float:
    """Share of the picks that one of both does not have."""
    count = missing = 0
    for a, b in zip(one.tolist(), other.tolist(), strict=True):
        mine, yours = set(a) - {-1}, set(b) - {-1}
        count += len(yours)
        missing += max(len(yours - mine), len(mine - yours))
    return missing / max(count, 1)


def check_dummy(engine: Engine) -> dict[str, int]:
    """A step without metadata, as the engine makes one to see what memory it needs: bytes of scratch memory after the
    engine's own layers, and after ours."""
    from vllm.v1.worker.workspace import current_workspace_manager

    rows = engine.sizes.max_rows
    hidden, found = _hidden(engine, rows), {}
    positions = torch.zeros(rows, dtype=torch.int64, device=engine.device)
    manager = current_workspace_manager()
    with engine.without_linears(rows):
        for name, side in engine.sides.items():
            for number, layer in enumerate(side.layers):
                object.__setattr__(layer, "_o_proj", lambda o, positions: o)
                engine.run(name, number, hidden, None, positions)
                object.__delattr__(layer, "_o_proj")
            found[name] = sum(w.nbytes for w in manager._current_workspaces if w is not None)
    manager.lock()
    return found


def check_chain(engine: Engine, batch: Batch) -> dict[str, float]:
    """All layers, linears too, each with the result of the one before: relative distances behind the last one from the
    engine's own result, by what is different.

    The engine's top-k writes its picks in changing order, attention sums them up in that order, and from the second
    layer with an indexer on other entries are picked: so the engine is apart from itself, but if it is given the picks
    of its own first run it is not. With these picks ours is compared with it, and with what an input makes of which
    every number is its neighbour in bfloat16."""
    metadata, positions = engine.build(batch)
    hidden, start = _hidden(engine, batch.rows), snapshot(engine.sides)

    def run(name: str, hidden: torch.Tensor, picks: Sequence[torch.Tensor] = ()) -> tuple[torch.Tensor, list[Any]]:
        """(result, each layer's picks), with these picks if some are given."""
        side, found = engine.sides[name], []
        for number, layer in enumerate(side.layers):
            side.buffer.fill_(-1)
            given = _given_picks(layer, picks[number]) if picks else nullcontext()
            with given:
                hidden = engine.run(name, number, hidden, metadata, positions)
            found.append(side.buffer[: batch.rows].clone())
            hidden = hidden / hidden.float().square().mean(-1, keepdim=True).sqrt().bfloat16()
        restore(engine.sides, start)
        return hidden[: batch.live].float(), found

    theirs, picks = run(ENGINES, hidden)
    nudged = (hidden.view(torch.int16) ^ 1).view(torch.bfloat16)
    others = {
        "theirs again": run(ENGINES, hidden),
        "theirs, same picks": run(ENGINES, hidden, picks),
        "theirs, same picks, input one bf16 step away": run(ENGINES, nudged, picks),
        "ours": run(OURS, hidden),
        "ours, same picks": run(OURS, hidden, picks),
    }
    return {name: distance(result, theirs) for name, (result, _) in others.items()}


@contextmanager
def _given_picks(layer: Any, picks: torch.Tensor) -> Iterator[None]:
    """Picks of an earlier step in the place of the indexer's."""
    if layer.indexer is None:
        yield
        return
    op, buffer = layer.indexer.indexer_op, layer.topk_indices_buffer
    object.__setattr__(op, "forward", lambda *args, **kwargs: buffer[: picks.shape[0]].copy_(picks))
    try:
        yield
    finally:
        object.__delattr__(op, "forward")


def chain_faults(apart: Mapping[str, float]) -> list[str]:
    """What is further apart than it may be."""
    wrong = []
    if not apart["theirs, same picks"] <= SAME:
        wrong.append("the engine differs from itself with the same picks")
    if not apart["ours, same picks"] <= CHAIN * apart["theirs, same picks, input one bf16 step away"]:
        wrong.append("ours with the same picks")
    if not apart["ours"] <= CHAIN * max(apart["theirs again"], apart["theirs, same picks, input one bf16 step away"]):
        wrong.append("ours")
    return wrong


UNITS = [
    *((kinds, heads, 0) for heads in (64, 16, 8) for kinds in (("c4a",), ("c128a",), ("swa",))),
    *((("c4a",), 64, drafts) for drafts in (1, 2)),
    (("c4a", "c128a", "c4a", "swa"), 64, 0),
]
"""What is compared at a time: kinds of layers, heads, speculative tokens. Several layers run one after the other."""


def unit_name(kinds: Sequence[str], heads: int, drafts: int) -> str:
    return f"{'+'.join(kinds)} h{heads}" + (f" mtp{drafts}" if drafts else "")


def steps_of_unit(kinds: Sequence[str], drafts: int) -> list[Batch]:
    """Of several layers one step: decode of 33 requests."""
    if len(kinds) == 1:
        return list(steps(drafts))
    return [Batch("chained", tuple((1 + drafts, 1900 + 61 * i) for i in range(33)))]


def check(model: Any, pattern: str, say: Callable[[str], None]) -> int:
    """All comparisons whose unit's name the pattern finds; returns how many are wrong."""
    failed = 0
    for kinds, heads, drafts in UNITS:
        unit, begin = unit_name(kinds, heads, drafts), time.monotonic()
        if not re.search(pattern, unit):
            continue
        engine = Engine(model, Sizes(kinds, heads, heads // 8, drafts=drafts, max_rows=512, max_requests=64))
        wanted = steps_of_unit(kinds, drafts)
        engine.bind_caches(wanted)
        if not drafts:
            memory = check_dummy(engine)
            failed += memory[OURS] > memory[ENGINES]
            say(f"{unit}: scratch memory {memory[ENGINES]} bytes, with ours {memory[OURS]}")
        start = snapshot(engine.sides)
        for batch in wanted if len(kinds) == 1 else ():
            try:
                found = compare(engine, batch, 0, start)
                failed += bool(found.wrong)
                say(f"{unit}: {found}")
            except Exception as error:  # noqa: PERF203 the others are worth a look all the same
                failed += 1
                say(f"{unit}: {batch.name}: {type(error).__name__}: {error}")
                for line in traceback.format_exception(error)[-5:]:
                    say(line.rstrip())
        if len(kinds) > 1:
            (batch,) = wanted
            compile_products([product for kind in kinds for product in products_of(kind, batch.rows, 64 // heads)])
            apart = check_chain(engine, batch)
            faults = chain_faults(apart)
            failed += bool(faults)
            say(f"{unit}: chained: {'WRONG: ' + ', '.join(faults) if faults else 'ok'}")
            for name, value in apart.items():
                say(f"{unit}: chained, {name}: {value:.2g} from theirs")
        say(f"{unit}: {time.monotonic() - begin:.0f} s")
        _drop(engine)
        del engine, start
    return failed


def _drop(engine: Engine) -> None:
    """Free what layers hold, the engine's context knows them by name, and the scratch memory."""
    from vllm.v1.worker.workspace import init_workspace_manager, reset_workspace_manager

    engine.config.compilation_config.static_forward_context.clear()
    engine.sides.clear()
    engine.builders.clear()
    reset_workspace_manager()
    init_workspace_manager(torch.device(engine.device))
    gc.collect()
    torch.cuda.empty_cache()


# ---- times -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A cell: a step of a kind of layer with the heads of a rank.

    batch        requests of a decode step, of lengths of their own, up to 255 below the context
    new          0, or tokens of a prefill of one request after `context` tokens
    is_between   drawn from between those that kernels are tuned for
    """

    kind: str
    batch: int
    tp: int
    context: int = 8192
    new: int = 0
    is_between: bool = False

    def name(self, part: str) -> str:
        step = f"prefill {self.new}" if self.new else f"b{self.batch}"
        return f"{self.kind} {step} ctx{self.context} tp{self.tp} {part}" + (f" {BETWEEN}" if self.is_between else "")

    def group(self, part: str) -> str:
        """Cells that the report sums up."""
        if self.is_between:
            return f"{BETWEEN} {part}"
        return f"prefill {part}" if self.new else part

    @property
    def step(self) -> Batch:
        if self.new:
            return Batch(self.name(""), ((self.new, self.context),))
        return Batch(self.name(""), tuple((1, self.context - 1 - 61 * r % 256) for r in range(self.batch)))

    @property
    def layers(self) -> tuple[str, int, int]:
        """Cells with the same ones are measured on the same layers: kind, ranks, the longest context of the model."""
        return self.kind, self.tp, 131072 if self.new else 65536


INSIDE = "inside"
PARTS = INSIDE, "whole"
"""Of a step: all but the engine's own linears, and all of it."""


def cases() -> list[Case]:
    decode = [Case(kind, b, tp) for tp in (1, 8, 4) for kind in KINDS for b in (1, 8, 64, 256)]
    steps = (2048, 8192), (8192, 8192), (8192, 65536)
    tuned = decode + [Case(kind, 1, tp, context, new) for tp in (1, 8) for kind in KINDS for new, context in steps]
    order = list(dict.fromkeys(case.layers for case in tuned))
    return sorted([*tuned, *cases_between()], key=lambda case: order.index(case.layers))


def cases_between() -> Iterator[Case]:
    """Steps of sizes that nobody tunes for: of each kind a decode step, of all heads or of a rank, and a prefill."""
    for kind in KINDS:
        for point in draw(f"engines {kind} decode", 1, b=(2, 256), context=(2000, 65536), ranks=(1, 3)):
            tp = (1, 4, 8)[point["ranks"] - 1]
            yield Case(kind, point["b"], tp, point["context"], is_between=True)
        for point in draw(f"engines {kind} prefill", 1, rows=(128, 8192), context=(2000, 100_000)):
            yield Case(kind, 1, 1, point["context"], point["rows"], is_between=True)


def compile_ahead(wanted: Sequence[Case]) -> None:
    """Let DeepGEMM compile what the layers of some cells multiply: one by one that takes minutes."""
    compile_products([product for case in wanted for product in products_of(case.kind, case.step.rows, case.tp)])


def products_of(kind: str, rows: int, tp: int) -> list[Product]:
    """Of a layer's linears."""
    config = PRESETS["v4-flash"]
    heads, groups = config.num_attention_heads // tp, config.o_groups // tp
    found = [
        Product(rows, 1, config.q_lora_rank + config.head_dim, config.hidden_size),
        Product(rows, 1, heads * config.head_dim, config.q_lora_rank),
        Product(rows, groups, config.o_lora_rank, config.heads_per_group * config.head_dim, is_grouped=True),
        Product(rows, 1, config.hidden_size, groups * config.o_lora_rank),
    ]
    if kind == "c4a":
        found.append(Product(rows, 1, config.index_n_heads * config.index_head_dim, config.q_lora_rank))
    return found


def sweep(
    model: Any, wanted: Sequence[Case], replays: int, budget: float, report: Callable[[dict[str, Any] | str], None]
) -> tuple[list[dict[str, Any]], bool]:
    """(cells, whether some are not there). Cells of the same layers follow each other."""
    begin, is_cut = time.monotonic(), False
    cells: list[dict[str, Any]] = []
    kept: tuple[Any, Engine] | None = None
    for case in wanted:
        if time.monotonic() - begin > budget:
            return cells, True
        if kept is None or kept[0] != case.layers:
            if kept is not None:
                _drop(kept[1])
            same = [other for other in wanted if other.layers == case.layers]
            rows = max(64, *(other.step.rows for other in same))
            sizes = Sizes(
                (case.kind,) * (PREFILL_LAYERS if case.new else LAYERS), 64 // case.tp, 8 // case.tp,
                max_len=case.layers[2], max_rows=rows, max_requests=max(64, *(other.batch for other in same)),
            )  # fmt: skip
            engine = Engine(model, sizes)
            engine.bind_caches([other.step for other in same])
            check_dummy(engine)
            kept = case.layers, engine
        for part in PARTS:
            try:
                cells.append(measure_cell(kept[1], case, part, replays))
                report(cells[-1])
            except Exception as error:  # noqa: PERF203 the others are worth their time
                is_cut = True
                report(f"{case.name(part)}: {type(error).__name__}: {error}")
    if kept is not None:
        _drop(kept[1])
    return cells, is_cut


def measure_cell(engine: Engine, case: Case, part: str, replays: int) -> dict[str, Any]:
    """The step of each layer is a call. FlashMLA's plan is made once, before: the engine makes it once a step."""
    batch = case.step
    # a graph of a prefill holds what the host says of its lengths; one of a decode step any lengths
    metadata, positions = engine.build(batch, max_seq_len=None if case.new else engine.sizes.max_len)
    hidden = _hidden(engine, batch.rows)
    calls = {
        name: [partial(engine.run, name, number, hidden, metadata, positions) for number in range(len(side.layers))]
        for name, side in engine.sides.items()
    }
    work = work_of(engine, batch, part)
    named = {measure.OURS: calls[OURS], PEER: calls[ENGINES]}
    with engine.without_linears(batch.rows, fresh=True):
        results = [_run(engine, name, 0, hidden, metadata, positions)[0] for name in (ENGINES, OURS)]
        picks = picks_apart(*(side.buffer[: batch.rows][:: -(-batch.rows // 256)] for side in engine.sides.values()))
        apart = distance(*results)
        if not apart <= ATTENTION + (2 * picks) ** 0.5 or picks > PICKS:
            raise RuntimeError(f"attention is {apart:.2g} apart, {picks:.2g} of the picks; nothing was timed")
    with engine.without_linears(batch.rows) if part == INSIDE else nullcontext():
        for call in (*named[PEER], *named[measure.OURS]):  # compiles what is not there, and lets FlashMLA plan
            call()
        measure.require_kernel(named[measure.OURS][0])
        captures = [
            measure.time_graphs(named, work.bytes, replays, TARGET_US, flops_per_set=work.flops)
            for _ in range(1 if case.new else CAPTURES)
        ]
        timings = {
            name: sorted((c[name] for c in captures), key=lambda t: t.median)[len(captures) // 2] for name in named
        }
        rows = [measure.row(name, timing, work, True) for name, timing in timings.items()]
        for line in rows:
            if line["us"] < HOST_US:
                line["host"] = measure.host_cost(named[line["name"]])
        ours, theirs = (measure.peak(named[name][0]) for name in (measure.OURS, PEER))
    shape = {
        "case": case.name(part), "T": batch.rows, "kind": case.kind, "tp": case.tp,
        "group": case.group(part),
        "peak_bytes": ours, "peer_peak_bytes": theirs,
    }  # fmt: skip
    return {
        "op": OP, "shape": shape, "bytes": work.bytes, "flops": work.flops, "products": "e4m3", "tensors": TENSORS,
        "rows": rows,
    }  # fmt: skip


def work_of(engine: Engine, batch: Batch, part: str) -> Cost:
    """What no such layer can do without; between the linears all but their weights."""
    layer, sizes = engine.sides[ENGINES].layers[0], engine.sizes
    shown = SimpleNamespace(
        config=replace(PRESETS["v4-flash"], hidden_size=sizes.hidden),
        num_heads=sizes.heads,
        compress_ratio=RATIOS[sizes.kinds[0]],
        modules=list,
        o_proj=SimpleNamespace(wo_a=layer.wo_a.weight),
    )
    counts, lengths = [rows for rows, _ in batch.requests], [rows + before for rows, before in batch.requests]
    work = least_work(shown, counts, lengths)  # type: ignore[arg-type]
    if part == INSIDE:
        return work
    linears = [m.weight for m in layer.modules() if hasattr(m, "quant_method") and m is not layer.wo_a]
    return Cost(
        bytes=work.bytes + sum(w.numel() * w.element_size() for w in linears),
        flops=work.flops + 2 * batch.rows * sum(w.numel() for w in linears),
    )
