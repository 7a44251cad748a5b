# SPDX-License-Identifier: Apache-2.0
"""What V4's attention layers take on several GPUs: a model of bytes, measured rates and collectives.

`python -m perf scaling` prints it. A decode step is the floor of its bytes, with scores and collectives at the times
that H200s took: real steps also have the gaps between launches and what products of few rows lose, about the same in
every form, so that differences between forms are what the model is for. Nothing here was fitted to a step.

Measured: copies, scores (layers.score_rows), rates of prefill kernels (perf/REPORT.md), collectives of two GPUs in a
graph. Assumed: a collective takes as long on more GPUs of a host for the bytes that one of them receives; hosts have
GPUS_OF_HOST, and between them BETWEEN_HOSTS; nothing else overlaps than what a form says.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from cute_kernels.layers import PRESETS, DeepseekV4Config
from cute_kernels.layers.context import BORDER
from cute_kernels.layers.score_rows import DECODE_SCORES, Line, value_at
from perf.ceilings import STATED

COPY = STATED["NVIDIA H200"]["copy"] * 1e3
"""Bytes a microsecond."""

COLLECTIVES: Mapping[str, Line] = {
    "all_gather": ((2048, 8.5), (131072, 11), (1048576, 28), (8388608, 93), (33554432, 293)),
    "all_reduce": ((4096, 9), (262144, 11.5), (2097152, 30), (16777216, 76), (67108864, 249)),
    "all_to_all": ((2048, 9.3), (131072, 11), (1048576, 18), (8388608, 53), (33554432, 142)),
}
"""Microseconds by bytes that a GPU receives, of two H200s (docs/several_gpus.md)."""

GPUS_OF_HOST = 8
BETWEEN_HOSTS = 30.0, 50e3
"""Assumed: microseconds at least, and bytes a microsecond and GPU."""

SCORE_FLOPS, PAGED_FLOPS, PRODUCT_FLOPS = 0.90e9, 0.48e9, 0.90e9
"""FLOPs a microsecond of score_top_k_prefill, sparse_mla_prefill_paged and FP8 products of thousands of rows."""

ENTRY_BYTES, KEY_BYTES = 584, 132
WINDOW = 128
CHUNK = 8192
"""Rows of a prefill step, over all GPUs."""

CONTEXTS = (65536, 262144, 1048576)
BATCHES = (1, 8, 64)
GPUS = (2, 4, 8, 16, 32, 64)
DECODE_FORMS = ("tp", "tp rows", "tp keys", "dcp", "dp")
PREFILL_FORMS = ("tp", "tp rows", "pcp")
WHAT: Mapping[str, str] = {
    "tp": "tensor parallel",
    "tp rows": "tensor parallel, each rank scores its share of the indexer's rows",
    "tp keys": "tensor parallel, each rank scores its share of the keys (layers do so in dcp only)",
    "dcp": "tensor parallel, entries and keys shared out: each rank has 1 / N of the caches",
    "dp": "data parallel: whole layers for requests of their own",
    "pcp": "rows of a prefill divided in zigzag, whole layers",
}


ASSUMED = (
    "Floors of bytes and FLOPs at measured rates. Measured: copies, scores, prefill kernels, collectives of two GPUs. "
    "Assumed: collectives of more GPUs take as long for the bytes that one of them receives; between hosts of "
    f"{GPUS_OF_HOST} GPUs {BETWEEN_HOSTS[0]:.0f} us and {BETWEEN_HOSTS[1] / 1e3:.0f} GB/s a GPU."
)

MEASURED = Path(__file__).parent / "log" / "data" / "parallel_1.json"
"""Layers of v4-flash on two H200s: phase, ratio, context, rows, form and microseconds (perf.parallel)."""


@dataclass(frozen=True)
class Step:
    """Microseconds of a layer's step, and bytes that a rank receives."""

    weights: float = 0.0
    scores: float = 0.0
    attention: float = 0.0
    wire: float = 0.0
    received: float = 0.0

    @property
    def us(self) -> float:
        return self.weights + self.scores + self.attention + self.wire


def collective(kind: str, received: float, ranks: int) -> float:
    """Microseconds of a collective from which each rank receives so many bytes."""
    if ranks == 1 or received <= 0:
        return 0.0
    inside = value_at(COLLECTIVES[kind], received)
    if ranks <= GPUS_OF_HOST:
        return inside
    least, rate = BETWEEN_HOSTS
    return max(inside, least + received * (ranks - GPUS_OF_HOST) / (ranks - 1) / rate)


def weight_numbers(config: DeepseekV4Config, ratio: int) -> tuple[int, int, int]:
    """Numbers of a layer's weights: e4m3, those that tensor parallelism divides and others, and bf16."""
    heads, hidden = config.num_attention_heads * config.head_dim, config.hidden_size
    divided = config.q_lora_rank * heads + heads * config.o_lora_rank + config.o_groups * config.o_lora_rank * hidden
    whole = hidden * (config.q_lora_rank + config.head_dim)
    plain = 0
    if ratio > 1:
        plain = hidden * 2 * config.head_dim * (2 if ratio == 4 else 1)
    if ratio == 4:
        whole += config.q_lora_rank * config.index_n_heads * config.index_head_dim
        plain += hidden * (4 * config.index_head_dim + config.index_n_heads)
    return divided, whole, plain


def decode(config: DeepseekV4Config, ratio: int, form: str, context: int, requests: int, ranks: int) -> Step:
    """A decode step of one layer with a row for each request, on one host."""
    divided, whole, plain = weight_numbers(config, ratio)
    here = -(-requests // ranks) if form == "dp" else requests
    weights = (divided if form == "dp" else divided / ranks) + whole + 2 * plain
    entries, k = context // ratio if ratio > 1 else 0, config.index_topk
    keys, attended = 0, entries
    if ratio == 4:
        keys, attended = entries, min(entries, k)
    is_shared = form == "dcp"
    rows = here * ((attended / ranks if is_shared else attended) + WINDOW)
    scored, per_rank = here, keys
    if form == "tp rows":
        scored = -(-requests // ranks)
    elif form in ("tp keys", "dcp"):
        per_rank = -(-keys // ranks)
    scores = value_at(DECODE_SCORES["sm_90a"], scored * per_rank) if keys > k else 0.0
    others = ranks - 1
    sent: list[tuple[str, float]] = []
    if is_shared and ratio > 1:
        heads = config.num_attention_heads / ranks
        sent.append(("all_gather", 2 * config.head_dim * heads * requests * others))
    if keys > k and form in ("tp keys", "dcp"):
        sent.append(("all_gather", 8 * k * requests * others))
    if keys > k and form == "tp rows":
        sent.append(("all_gather", 4 * k * scored * others))
    if is_shared and ratio > 1:
        sent.append(("all_to_all", 4 * (config.head_dim + 1) * heads * requests * others))
    if form != "dp":
        sent.append(("all_reduce", 2 * 2 * config.hidden_size * requests * others / ranks))
    wire = sum(collective(kind, received, ranks) for kind, received in sent)
    return Step(weights / COPY, scores, rows * ENTRY_BYTES / COPY, wire, sum(received for _, received in sent))


def decode_model(config: DeepseekV4Config, form: str, context: int, requests: int, gpus: int) -> float:
    """Microseconds of all attention layers. Hosts are data parallel: each has its share of the requests."""
    inner = min(gpus, GPUS_OF_HOST)
    here = -(-requests // (gpus // inner))
    kinds = config.compress_ratios[: config.num_hidden_layers]
    return sum(decode(config, ratio, form, context, here, inner).us for ratio in kinds)


def cache_bytes(config: DeepseekV4Config, form: str, context: int, requests: int, gpus: int) -> float:
    """Of entries and keys on one GPU."""
    inner = min(gpus, GPUS_OF_HOST)
    requests = -(-requests // (gpus // inner))
    kinds = config.compress_ratios[: config.num_hidden_layers]
    of_token = sum((ENTRY_BYTES + KEY_BYTES * (ratio == 4)) / ratio for ratio in kinds if ratio > 1)
    if form == "dp":
        requests = -(-requests // inner)
    return context * requests * of_token / (inner if form == "dcp" else 1)


def prefill(config: DeepseekV4Config, ratio: int, form: str, context: int, ranks: int, rows: int = CHUNK) -> Step:
    """`rows` tokens of one request behind `context` others, of one layer."""
    divided, whole, plain = weight_numbers(config, ratio)
    entries, others = (context + rows / 2) / ratio if ratio > 1 else 0, ranks - 1
    attended = min(entries, config.index_topk) if ratio == 4 else entries
    share = 1 / ranks if form == "pcp" else 1.0
    products = 2 * rows * share * ((divided if form == "pcp" else divided / ranks) + whole + 2 * plain) / PRODUCT_FLOPS
    attention = rows * (attended + WINDOW) * 4 * config.num_attention_heads * config.head_dim / ranks / PAGED_FLOPS
    scores = 0.0
    if ratio == 4:
        flops = 2 * config.index_n_heads * config.index_head_dim
        scores = rows * entries * flops / SCORE_FLOPS / (1 if form == "tp" else ranks)
    sent: list[tuple[str, float]] = []
    if form == "tp rows" and ratio == 4:
        sent.append(("all_gather", 4 * config.index_topk * rows / ranks * others))
    if form == "pcp":
        segments = 2 * others
        if ratio == 4:
            sent.append(("all_gather", segments * 4 * 4 * 5 * config.head_dim))
        made = rows / ranks / ratio if ratio > 1 else 0
        records = made * (ENTRY_BYTES + (KEY_BYTES if ratio == 4 else 0)) * others + segments * BORDER * ENTRY_BYTES
        sent.append(("all_gather", records))
    else:
        sent.append(("all_reduce", 2 * 2 * config.hidden_size * rows * others / ranks))
    wire = sum(collective(kind, received, ranks) for kind, received in sent)
    return Step(products, scores, attention, wire, sum(received for _, received in sent))


def prefill_model(config: DeepseekV4Config, form: str, tokens: int, gpus: int) -> float:
    """Seconds until a prompt of so many tokens is in the caches of all layers, in steps of CHUNK rows a host."""
    kinds = config.compress_ratios[: config.num_hidden_layers]
    rows = CHUNK * max(1, gpus // GPUS_OF_HOST)
    total = 0.0
    for start in range(0, tokens, rows):
        steps = {ratio: prefill(config, ratio, form, start, gpus, rows).us for ratio in set(kinds)}
        total += sum(steps[ratio] for ratio in kinds)
    return total / 1e6


def decode_rows(model: str, gpus: tuple[int, ...] = GPUS) -> Iterator[list[str]]:
    """Lines of a table: context, requests, GPUs, microseconds of all layers by form, GB of caches whole and shared."""
    config = PRESETS[model]
    for context in CONTEXTS:
        for requests in BATCHES:
            for count in gpus:
                times = [decode_model(config, form, context, requests, count) for form in DECODE_FORMS]
                marks = ["*" if us == min(times) else "" for us in times]
                held = [cache_bytes(config, form, context, requests, count) / 1e9 for form in ("tp", "dcp", "dp")]
                yield [
                    f"{context // 1024}k", str(requests), str(count),
                    *(f"{us:.0f}{mark}" for us, mark in zip(times, marks, strict=True)),
                    *(f"{size:.2f}" for size in held),
                ]  # fmt: skip


def prefill_rows(model: str, gpus: tuple[int, ...] = GPUS) -> Iterator[list[str]]:
    """Lines of a table: tokens, GPUs, seconds of all layers by form."""
    config = PRESETS[model]
    for tokens in CONTEXTS:
        for count in (1, *gpus):
            found = [
                f"{prefill_model(config, form, tokens, count):.2f}" if takes_ranks(config, form, count) else "-"
                for form in PREFILL_FORMS
            ]
            yield [f"{tokens // 1024}k", str(count), *found]


def takes_ranks(config: DeepseekV4Config, form: str, gpus: int) -> bool:
    """Whether a prefill can be divided so: tensor parallelism divides the output groups, and stays on a host."""
    return form == "pcp" or (gpus <= GPUS_OF_HOST and config.o_groups % gpus == 0)


def measured_rows() -> Iterator[list[str]]:
    """Lines of a table: a step of one layer on two GPUs, measured and modelled microseconds, and their ratio."""
    config = PRESETS["v4-flash"]
    for cell in json.loads(MEASURED.read_text(encoding="utf-8"))["cells"]:
        ratio, context, rows, form = cell["ratio"], cell["context"], cell["rows"], cell["form"]
        form = form.removesuffix(" replicate")
        if cell["phase"] == "decode":
            step = decode(config, ratio, form, context, rows, 2)
        else:
            # one GPU is as many ranks
            step = prefill(
                config, ratio, "pcp" if form in ("one", "pcp sharded") else form, context, 1 + (form != "one"), rows
            )
        name = f"{cell['phase']} ratio {ratio}, {context // 1024}k, {rows} rows, {form}"
        yield [name, f"{cell['us']:.1f}", f"{step.us:.1f}", f"{step.us / cell['us']:.2f}"]


def draw(model: str, gpus: tuple[int, ...], path: Path) -> None:
    """Decode steps and prefills by the number of GPUs, as a PNG. Needs matplotlib."""
    from matplotlib.figure import Figure

    from perf.plots import OPS

    config = PRESETS[model]
    figure = Figure(figsize=(13, 4.2), layout="constrained")
    axes = figure.subplots(1, len(CONTEXTS) + 1)
    for axis, context in zip(axes, CONTEXTS, strict=False):
        for form, color in zip(DECODE_FORMS, OPS, strict=False):
            for requests, style in ((8, "-"), (64, ":")):
                times = [decode_model(config, form, context, requests, count) / 1e3 for count in gpus]
                axis.plot(gpus, times, style, color=color, marker="o", ms=3, label=form if requests == 8 else None)
        axis.set_title(f"decode, {context // 1024}k tokens: 8 requests, dotted 64", fontsize=9)
        axis.set_ylabel("ms of all attention layers", fontsize=8)
    for form, color in zip(PREFILL_FORMS, OPS, strict=False):
        counts = [count for count in gpus if takes_ranks(config, form, count)]
        times = [prefill_model(config, form, CONTEXTS[-1], count) for count in counts]
        axes[-1].plot(counts, times, color=color, marker="o", ms=3, label=form)
    axes[-1].set_title(f"prefill of {CONTEXTS[-1] // 1024}k tokens", fontsize=9)
    axes[-1].set_ylabel("s of all attention layers", fontsize=8)
    for axis in axes:
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xticks(gpus, [str(count) for count in gpus])
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_formatter("{x:g}")
        axis.tick_params(labelsize=7, which="both")
        axis.set_xlabel("GPUs", fontsize=8)
        axis.legend(fontsize=7)
    figure.suptitle(f"{model} on H200s, by the model of perf/scaling.py: beyond two GPUs not measured", fontsize=10)
    figure.savefig(path, dpi=110, facecolor="white")
