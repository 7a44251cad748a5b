# SPDX-License-Identifier: Apache-2.0
"""Against DeepSeek's model code: rotary tables, norms, what attention gets, and the compressor's entries."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cute_kernels import formats
from cute_kernels.compat import vllm
from cute_kernels.compressor import ops as compressor
from cute_kernels.indices.ops import combine_topk_swa_indices
from layers.config import PRESETS
from layers.rotary import RotaryEmbedding
from tests.goldens.compare import near, steps_apart
from tests.goldens.records import load

LAYER = load("deepseek_layer").cases
ENTRIES = {**load("deepseek_compressor").cases, **load("deepseek_compressor_128").cases}


@pytest.mark.parametrize("name", ["rotary table", "rotary table with YaRN"])
def test_rotary_tables(name: str) -> None:
    """DeepSeek computes angles in fp32: at position 4095 they are off by 2^-13 of a turn's unit."""
    case = LAYER[name]
    positions, want = case.result
    table = RotaryEmbedding(PRESETS["v4-pro"], case.arguments["compressed"], 4096).cos_sin_cache
    assert bool(((table[positions] - want).abs() <= 2.0**-12).all())
    assert bool(((table[positions[:3]] - want[:3]).abs() <= 2.0**-17).all())


def test_norm() -> None:
    case = LAYER["norm"]
    result, _ = case.replay(vllm.mtp_shared_head_rmsnorm)
    steps_apart(result, case.result, 1, 0.01)


def test_queries_and_keys_of_a_layer() -> None:
    """Queries have a norm without weight, keys one with; both are rotated. DeepSeek squares queries in bf16."""
    case = LAYER["attention"]
    given, want = case.arguments, case.result
    q, cache = given["q"].clone(), formats.PLAIN_BF16.allocate(2, 4)
    _, kv = vllm.fused_q_kv_rmsnorm(given["kv"], given["kv"], given["kv_weight"], given["kv_weight"], given["eps"])
    slots = torch.arange(6)
    vllm.fused_deepseek_v4_qnorm_rope_kv_rope_full_cache_bf16_insert(
        q, kv, cache, slots, slots, given["cos_sin_cache"], given["eps"], 4
    )
    near(q, want["q"], 2**-6)
    near(cache.flatten(0, 1)[:6], want["kv"], 2**-7)


def test_result_of_attention_is_rotated_back() -> None:
    case = LAYER["attention"]
    o, table = case.arguments["out"], case.arguments["cos_sin_cache"]
    got, _ = vllm.fused_inv_rope_fp8_quant(o, torch.arange(6), table, 1, 2, quantize=False)
    steps_apart(got.reshape(6, 2, 512), case.result["rotated"], 1, 0.001)


def test_window() -> None:
    """The workspace of a prompt from its start holds position i in row i."""
    case = LAYER["attention"]
    lens = torch.tensor([6], dtype=torch.int32)
    starts, nothing = torch.tensor([0, 6], dtype=torch.int32), torch.zeros(6, 0, dtype=torch.int32)
    window = case.arguments["window"]
    indices, _ = combine_topk_swa_indices(nothing, starts, lens, lens, window, 4, 0, 6, 0)
    assert torch.equal(indices[:, :6], case.result["indices"])
    assert (indices[:, 6:] == -1).all()


def entries(case: Any, fmt: Any) -> torch.Tensor:
    """The entries of a request, of a prompt and then one token at a time, read from a cache in some format."""
    given = case.arguments
    x, ratio, prompt = given["x"].float(), given["ratio"], given["prompt"]
    tokens, width, head_dim = x.shape[0], x.shape[1] // 2, fmt.dim
    rows = 8
    state = formats.compressor_state(head_dim, ratio).allocate(-(-tokens // rows), rows)
    cache = fmt.allocate(1, tokens // ratio)
    table = torch.arange(state.shape[0], dtype=torch.int32)[None]
    steps = [(0, prompt), *((position, position + 1) for position in range(prompt, tokens))]
    for first, stop in steps:
        positions = torch.arange(first, stop)
        kv, score = x[first:stop].chunk(2, dim=1)
        vllm.save_partial_states(kv, score, given["ape"], positions, state, positions, rows, width, ratio)
        closes = (positions + 1) % ratio == 0
        compressor.compress_norm_rope_store(
            state,
            stop - first,
            torch.zeros(stop - first, dtype=torch.int32),
            positions,
            positions,
            table,
            rows,
            width,
            given["cos_sin_cache"],
            cache,
            SimpleNamespace(slot_mapping=torch.where(closes, positions // ratio, -1)),
            None,
            head_dim,
            64,
            ratio,
            ratio == 4,
            "mxfp4" in fmt.id,
            given["weight"],
            given["eps"],
            *sizes(fmt),
            kv_format=fmt.id,
        )
    return fmt.read(cache, cache.shape[1], torch.arange(tokens // ratio)).bfloat16()


def sizes(fmt: Any) -> tuple[int, int, int]:
    """quant_block, token_stride and scale_dim, those of fp8_ds_mla for plain rows too."""
    return {"indexer_fp8/1": (128, 128, 4), "indexer_mxfp4/1": (32, 64, 4)}.get(fmt.id, (64, 576, 8))


@pytest.mark.parametrize("name", [name for name in ENTRIES if "indexer" not in name])
def test_entries(name: str) -> None:
    """In bf16, and in records, where e4m3 is off by half a step: 2^-5 of the largest of a block with a scale that fits,
    2^-4 with one twice as large. DeepSeek rounds the mean to bf16 before its norm, this project does not."""
    case = ENTRIES[name]
    want = case.result
    near(entries(case, formats.PLAIN_BF16), want, 2**-7)
    got = entries(case, formats.FP8_DS_MLA)
    near(got[:, 448:], want[:, 448:], 2**-7)
    near(got[:, :448].unflatten(1, (7, 64)), want[:, :448].unflatten(1, (7, 64)), 2**-4)


def test_entries_of_the_indexer() -> None:
    case = ENTRIES["the indexer's entries"]
    near(entries(case, formats.INDEXER_FP8), case.result, 2**-4)
    got = entries(case, formats.INDEXER_MXFP4)
    near(got.unflatten(1, (4, 32)), case.result.unflatten(1, (4, 32)), 1 / 4)
