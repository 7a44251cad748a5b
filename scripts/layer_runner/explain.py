# SPDX-License-Identifier: Apache-2.0
"""What a run says around its tables: what is run and on what, what the words mean, what to try next."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cute_kernels.layers import DeepseekV41Config
from cute_kernels.layers.config import AttentionConfig
from layer_runner.requests import Request

MOST_LENGTHS = 6
"""Requests whose lengths are named."""


def describe_width(config: AttentionConfig, published: AttentionConfig | None) -> str:
    """Hidden size, heads and top-k, beside those that a reduced width stands for."""
    names = {"hidden_size": "hidden size {}", "num_attention_heads": "{} heads", "index_topk": "top-k {}"}
    parts = []
    for field, text in names.items():
        value = getattr(config, field)
        instead = value if published is None else getattr(published, field)
        parts.append(text.format(value) + ("" if instead == value else f" instead of {instead}"))
    return ", ".join(parts)


def describe_requests(requests: Sequence[Request]) -> str:
    lengths = [f"{r.prefill} + {r.length - r.prefill}" for r in requests[:MOST_LENGTHS]]
    more = f" and {len(requests) - MOST_LENGTHS} more" if len(requests) > MOST_LENGTHS else ""
    plural = "s" * (len(requests) > 1)
    return f"{len(requests)} request{plural} of {', '.join(lengths)}{more} tokens (prefill + decode)"


def introduction(
    kinds: Sequence[str],
    device_name: str,
    weights: str,
    config: AttentionConfig,
    published: AttentionConfig | None,
    source: Path,
    is_text: bool,
    requests: Sequence[Request],
) -> list[str]:
    """What is run: layers and machine, weights, input.

    kinds       of the layers, in order
    weights     where they come from
    published   configuration that a reduced one stands for
    """
    is_v41 = isinstance(config, DeepseekV41Config)
    model, several = (
        ("DeepSeek-V4.1", "layers that share entries") if is_v41 else ("DeepSeek-V4", "a layer of each kind")
    )
    layers = (
        f"{several} ({'; '.join(kinds) if is_v41 else ', '.join(kinds)})" if len(kinds) > 1 else f"a layer ({kinds[0]})"
    )
    read = "a token per byte, embedded from a seed" if is_text else "hidden states"
    return [
        f"{model} attention, {layers}, on {device_name}: batched prefill and decode through paged caches.",
        f"Weights: {weights}: {describe_width(config, published)}.",
        f"Input: {source}, {read}; {describe_requests(requests)}.",
    ]


def legend(config: AttentionConfig) -> list[str]:
    """What the words in the tables mean."""
    by = [
        "by     kernel: a CuTe DSL kernel; reference: the op's exact meaning in torch, which is what CPUs run;",
        "       torch: a product that is no op of this project",
    ]
    if isinstance(config, DeepseekV41Config):
        blocks, size = config.candidate_topk_blocks, config.candidate_block_size
        return [
            f"window        attention to the last {config.sliding_window} tokens; all other kinds do that, too",
            f"source        stores entries of 1 or 2 tokens (ratio), and picks at most {config.index_topk} for a row",
            "index source  picks among the entries of the source before it; those behind the candidate source look in",
            f"              its {blocks} candidate blocks of {size} entries alone",
            "consumer      attends to what the layer before that picks has picked",
            f"draft         runs blocks of {config.draft_block_size} rows, each of which attends to them all; the",
            "              window in front of them is made of other layers' hidden states",
            *by,
        ]
    return [
        f"SWA    attention to the last {config.sliding_window} tokens",
        f"C4A    also to entries of 4 tokens each, of which an indexer picks at most {config.index_topk} (top-k)",
        "C128A  also to all entries of 128 tokens each",
        *by,
    ]


def truncation(rows: tuple[int, int], top_k: int) -> str:
    return (
        f"{rows[0]} of {rows[1]} rows truncated by top-k: as the model means it, a row that sees more than {top_k} "
        f"entries attends to the {top_k} best"
    )


def restriction(rows: tuple[int, int], config: DeepseekV41Config) -> str:
    blocks, size = config.candidate_topk_blocks, config.candidate_block_size
    return (
        f"{rows[0]} of {rows[1]} rows cut by candidate blocks: they see more than {blocks} blocks of {size} entries, "
        f"and pick in the {blocks} best"
    )


def next_steps(device: str, has_gpu: bool) -> list[str]:
    """Commands to try, with what they do."""
    commands = {
        "python -m cute_kernels info": "what runs on this machine",
        "scripts/quickstart.sh --html report.html": "where time and bytes go, as a picture",
        "scripts/quickstart.sh --checkpoint DIR": "the layers of a published checkpoint",
        "scripts/quickstart.sh --help": "cache formats, drafts, chunks, your own text",
    }
    if has_gpu and device == "cpu":
        commands = {
            "scripts/quickstart.sh --device cuda": "the same with this GPU's kernels",
            **commands,
        }
    width = max(map(len, commands))
    return [f"{command:{width}}  {what}" for command, what in commands.items()]
