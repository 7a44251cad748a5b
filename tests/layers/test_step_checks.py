# SPDX-License-Identifier: Apache-2.0
"""A layer and the metadata builder refuse a step that was meant for another layer, instead of computing something."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from layers import AttentionOptions, BlockTables, DeepseekV4Metadata, DeepseekV4MetadataBuilder, LayerCaches
from tests.layers.engine import CONFIG, KINDS, hidden_rows, make_layer

ROWS = 7


def table(rows: int = 1, width: int = 16) -> torch.Tensor:
    return torch.arange(rows * width, dtype=torch.int32).view(rows, width)


def step(ratio: int, rows: int = ROWS) -> DeepseekV4Metadata:
    tables = BlockTables(table()) if ratio == 1 else BlockTables(table(), table(), table())
    return DeepseekV4MetadataBuilder(CONFIG, 64, 64).build(ratio, [rows], [rows], tables, 0)


def pools(ratio: int, **formats: str) -> LayerCaches:
    return LayerCaches.allocate(CONFIG, ratio, swa_blocks=16, compressed_blocks=16, state_blocks=16, **formats)


@pytest.mark.parametrize("ratio", KINDS)
def test_metadata_and_caches_of_another_kind(ratio: int) -> None:
    layer, hidden = make_layer(ratio), hidden_rows(ROWS, 0)
    good = step(ratio)
    layer(good.positions, hidden, good, pools(ratio))
    for other in KINDS:
        if other == ratio:
            continue
        with pytest.raises(ValueError, match=rf"attention layer: metadata: .*compress ratio {ratio}, got {other}"):
            layer(good.positions, hidden, step(other), pools(ratio))
        if (ratio, other) != (128, 4):
            name = "indexer" if (ratio, other) == (4, 128) else "compressed"
            with pytest.raises(ValueError, match=rf"attention layer: caches\.{name}: .*compress ratio {ratio}"):
                layer(good.positions, hidden, good, pools(other))


def test_metadata_without_caches() -> None:
    """Only without metadata is it the profiling run."""
    layer, good = make_layer(1), step(1)
    with pytest.raises(ValueError, match="attention layer: caches: expected the layer's caches, got None"):
        layer(good.positions, hidden_rows(ROWS, 0), good, None)


@pytest.mark.parametrize("metadata", [True, False])
def test_hidden_states(metadata: bool) -> None:
    layer, good, caches = make_layer(1), step(1) if metadata else None, pools(1)
    positions, hidden = torch.arange(ROWS), hidden_rows(ROWS, 0)
    with pytest.raises(TypeError, match=r"attention layer: hidden_states: expected dtype torch\.bfloat16"):
        layer(positions, hidden.float(), good, caches)
    for wrong in (hidden[:, :100], hidden[None]):
        with pytest.raises(ValueError, match=r"attention layer: hidden_states: expected .*\[any, 256\]"):
            layer(positions, wrong, good, caches)


@pytest.mark.parametrize("ratio", KINDS)
def test_sequences_longer_than_the_rotary_table(ratio: int) -> None:
    layer, good = make_layer(ratio, max_model_len=ROWS - 1), step(ratio)
    with pytest.raises(ValueError, match=r"attention layer: metadata: .*max_model_len = 6, got 7"):
        layer(good.positions, hidden_rows(ROWS, 0), good, pools(ratio))


def test_steps_larger_than_the_topk_buffer() -> None:
    layer, good = make_layer(4, max_num_tokens=ROWS - 1), step(4)
    with pytest.raises(ValueError, match=r"attention layer: metadata: .*max_num_tokens = 6 rows, got 7"):
        layer(good.positions, hidden_rows(ROWS, 0), good, pools(4))


def test_indexer_cache_in_another_format() -> None:
    good = step(4)
    for mine, theirs in (("fp8", "mxfp4"), ("mxfp4", "fp8")):
        layer = make_layer(4, index_cache=mine)
        with pytest.raises(ValueError, match=rf"caches\.indexer: expected format indexer_{mine}/1"):
            layer(good.positions, hidden_rows(ROWS, 0), good, pools(4, index_cache=theirs))


@pytest.mark.parametrize(
    ("buffer", "error"),
    [
        (torch.zeros(300, 5, dtype=torch.int32), ValueError),
        (torch.zeros(300, CONFIG.index_topk, dtype=torch.int64), TypeError),
        (torch.zeros(CONFIG.index_topk, 300, dtype=torch.int32).t(), ValueError),
    ],
)
def test_topk_buffer(buffer: torch.Tensor, error: type[Exception]) -> None:
    with pytest.raises(error, match="SparseAttnIndexer: topk_indices_buffer"):
        make_layer(4, topk_indices_buffer=buffer)


@pytest.mark.parametrize("name", ["max_model_len", "max_num_tokens"])
@pytest.mark.parametrize("value", [0, -1])
def test_limits_are_positive(name: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"AttentionOptions: {name}: expected a positive number, got {value}"):
        AttentionOptions(**{name: value})


def ints(*values: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"compress_ratio": 0}, r"compress_ratio: expected one of 1, 4, 128, got 0"),
        ({"compress_ratio": 7}, r"compress_ratio: expected one of 1, 4, 128, got 7"),
        ({"query_lens": [1, -1]}, r"query_lens: expected no negative entry, got -1"),
        ({"query_lens": [1, 10]}, r"seq_lens: expected at least the 10 rows of the step, got 9"),
        ({"block_tables": BlockTables(table(), table(2), table(2))}, r"block_tables\.swa: expected shape \[2, any\]"),
        ({"block_tables": BlockTables(table(2), table(3), table(2))}, r"block_tables\.compressed: expected shape"),
        ({"block_tables": BlockTables(table(2), table(2), table(2)[0])}, r"block_tables\.state: expected 2 dimensions"),
        ({"seq_lens_device": ints(5)}, r"seq_lens_device: expected shape \[2\]"),
        ({"min_restart": ints(5)}, r"min_restart: expected shape \[2\]"),
    ],
)
def test_builder(changes: dict[str, Any], message: str) -> None:
    good = {"compress_ratio": 4, "query_lens": [1, 3], "seq_lens": [5, 9], "num_decodes": 1,
            "block_tables": BlockTables(table(2), table(2), table(2))}  # fmt: skip
    builder = DeepseekV4MetadataBuilder(CONFIG, 64, 64)
    builder.build(**good)
    with pytest.raises(ValueError, match=rf"^build: {message}"):
        builder.build(**{**good, **changes})


@pytest.mark.parametrize("name", ["seq_lens_device", "min_restart", "block_tables"])
def test_builder_wants_int32(name: str) -> None:
    tables = BlockTables(table(), table(), table())
    wrong: Any = BlockTables(table().long(), table(), table()) if name == "block_tables" else ints(5, dtype=torch.int64)
    with pytest.raises(TypeError, match=rf"^build: {name}.*: expected dtype torch\.int32, got torch\.int64"):
        DeepseekV4MetadataBuilder(CONFIG, 64, 64).build(
            4, [1], [5], **{"block_tables": tables, "num_decodes": 1, name: wrong}
        )


def test_padded_requests_may_have_more_rows_than_tokens() -> None:
    metadata = DeepseekV4MetadataBuilder(CONFIG, 64, 64).build(1, [2, 2], [9, 0], BlockTables(table(2)), 2)
    assert metadata.positions.tolist() == [7, 8, -1, -1]
