# SPDX-License-Identifier: Apache-2.0
"""What layers refuse, and what they do without metadata or with rows past the step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from layers import AttentionOptions, BlockTables, DeepseekCompressor, DeepseekV4MultiHeadLatentAttentionWrapper
from layers.mla import DeepseekV4MLAAttention
from tests.layers.engine import CONFIG, KINDS, Engine, Request, hidden_rows, make_layer


@pytest.mark.parametrize("name", ["kv_cache", "index_cache", "e2m1_rounding", "prefill", "persist"])
def test_options_name_the_choices(name: str) -> None:
    with pytest.raises(ValueError, match=rf"AttentionOptions: {name}: expected one of \(.*\), got 'other'"):
        AttentionOptions(**{name: "other"})


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: DeepseekV4MultiHeadLatentAttentionWrapper(CONFIG, 44), r"layer_index: expected 0\.\.43, got 44"),
        (lambda: DeepseekV4MultiHeadLatentAttentionWrapper(CONFIG, -1), r"layer_index: expected 0\.\.43, got -1"),
        (
            lambda: DeepseekV4MultiHeadLatentAttentionWrapper(replace(CONFIG, num_attention_heads=256), 0),
            r"num_attention_heads: expected at most 128 per rank, got 256",
        ),
        (
            lambda: DeepseekV4MultiHeadLatentAttentionWrapper(replace(CONFIG, o_lora_rank=192), 0),
            r"o_lora_rank: expected a multiple of 128 for an FP8 wo_a, got 192",
        ),
        (lambda: DeepseekCompressor(CONFIG, 4, 256, label="x"), r"head_dim: expected 512 or 128, got 256"),
        (lambda: DeepseekCompressor(CONFIG, 8, 512, label="x"), r"compress_ratio: expected 4 or 128, got 8"),
        (
            lambda: DeepseekV4MLAAttention(CONFIG, 1, 16, max_model_len=8, max_num_tokens=8, prefill="x"),
            r"prefill: expected one of \('auto', 'gathered', 'paged'\), got 'x'",
        ),
        (
            lambda: DeepseekV4MLAAttention(
                CONFIG, 1, 16, max_model_len=8, max_num_tokens=8, prefill="auto", batch_invariant=True
            ),
            r"prefill: expected one form with batch_invariant, got 'auto'",
        ),
    ],
)
def test_layers_that_cannot_be(build: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        build()
    assert "\n" not in str(caught.value)


def test_fewer_rows_than_the_step() -> None:
    layer = make_layer(1)
    engine, request = Engine(layer), Request()
    engine.step([], [(request, hidden_rows(5, 1))])
    metadata = engine.builder.build(1, [5], [5], _tables(engine, request), 0)
    for positions, hidden in ((metadata.positions, hidden_rows(4, 1)), (metadata.positions[:4], hidden_rows(5, 1))):
        with pytest.raises(ValueError, match="at least 5 rows as in the metadata"):
            layer(positions, hidden, metadata, engine.caches)


def _tables(engine: Engine, request: Request) -> BlockTables:
    swa = engine._table("swa", [request])
    assert swa is not None
    return BlockTables(swa)


@pytest.mark.parametrize("ratio", KINDS)
@pytest.mark.parametrize("kv", ["fp8_ds_mla", "bf16", "fp8"])
def test_captures_have_a_row_for_every_token(ratio: int, kv: str) -> None:
    layer, capture = make_layer(ratio, kv_cache=kv), {}
    engine, request = Engine(layer), Request()
    hidden = hidden_rows(150, 2)
    (whole,) = engine.step([], [(request, hidden)], capture=capture)
    names = {"kv", "q", "o_raw", "lse", "o", "oa"} | ({"idx_q", "topk"} if ratio == 4 else set())
    assert set(capture) == names
    assert all(rows.shape[0] == 150 for rows in capture.values())
    (plain,) = Engine(layer).step([], [(Request(), hidden)])
    assert torch.equal(plain, whole), "capturing changes nothing"


@pytest.mark.parametrize("ratio", KINDS)
def test_a_step_without_tokens(ratio: int) -> None:
    engine = Engine(make_layer(ratio))
    metadata = engine.builder.build(ratio, [], [], _empty(ratio), 0)
    out = engine.layer(metadata.positions, hidden_rows(0, 0), metadata, engine.caches)
    assert out.shape == (0, CONFIG.hidden_size)


def _empty(ratio: int) -> BlockTables:
    table = torch.zeros(0, 3, dtype=torch.int32)
    return BlockTables(table) if ratio == 1 else BlockTables(table, table, table)
