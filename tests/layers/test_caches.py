# SPDX-License-Identifier: Apache-2.0
"""Sizes, strides and record formats of a layer's caches, and what their classes refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cute_kernels import formats
from layers import (
    PRESETS,
    CompressorStateCache,
    DeepseekV4CompressedCache,
    DeepseekV4IndexerCache,
    DeepseekV4SWACache,
    LayerCaches,
)
from tests.helpers import raw_bytes
from tests.layers.engine import Engine, Request, hidden_rows, make_layer

CONFIG = PRESETS["v4-flash"]
CLASSES = {
    "swa": DeepseekV4SWACache,
    "compressed": DeepseekV4CompressedCache,
    "state": CompressorStateCache,
    "indexer": DeepseekV4IndexerCache,
    "indexer_state": CompressorStateCache,
}

# (ratio, kv_cache, index_cache): {cache: (pages, rows a page, elements a row, bytes from page to page, dtype)}
KV_ROWS = {
    "fp8_ds_mla": (584, {64: 37440, 2: 1728}, torch.uint8),
    "bf16": (512, {64: 65536, 2: 2048}, torch.bfloat16),
    "fp8": (512, {64: 32768, 2: 1024}, torch.float8_e4m3fn),
}
INDEX_ROWS = {"fp8": (132, 8640), "mxfp4": (68, 4608)}


def expected(ratio: int, kv: str, index: str) -> dict[str, tuple[int, int, int, int, torch.dtype]]:
    row, strides, dtype = KV_ROWS[kv]
    result = {"swa": (7, 64, row, strides[64], dtype)}
    if ratio == 4:
        elements, stride = INDEX_ROWS[index]
        result["compressed"] = (5, 64, row, strides[64], dtype)
        result["indexer"] = (5, 64, elements, stride, torch.uint8)
        result["state"] = (11, 4, 2048, 32832, torch.float32)
        result["indexer_state"] = (11, 4, 512, 8640, torch.float32)
    if ratio == 128:
        result["compressed"] = (5, 2, row, strides[2], dtype)
        result["state"] = (11, 8, 1024, 32832, torch.float32)
    return result


@pytest.mark.parametrize("ratio", [1, 4, 128])
@pytest.mark.parametrize("kv", list(KV_ROWS))
@pytest.mark.parametrize("index", list(INDEX_ROWS))
def test_allocation(ratio: int, kv: str, index: str) -> None:
    caches = LayerCaches.allocate(
        CONFIG, ratio, swa_blocks=7, compressed_blocks=5, state_blocks=11, kv_cache=kv, index_cache=index
    )
    want = expected(ratio, kv, index)
    for name, kind in CLASSES.items():
        cache = getattr(caches, name)
        assert (cache is not None) == (name in want), name
        if cache is None:
            continue
        pages, rows, elements, stride, dtype = want[name]
        assert type(cache) is kind
        assert cache.block_size == rows
        assert cache.data.shape == (pages, rows, elements)
        assert cache.data.dtype == dtype
        size = cache.data.element_size()
        assert (cache.data.stride(0) * size, cache.data.stride(1), cache.data.stride(2)) == (stride, elements, 1)
        raw = raw_bytes(cache.data)
        assert raw.numel() == pages * stride, "the memory behind the pool holds every page in full"
        assert not raw.any()


@pytest.mark.parametrize("ratio", [1, 4, 128])
def test_addresses(ratio: int) -> None:
    """Of each cache that there is, what tells it from another one."""
    caches, others = (
        LayerCaches.allocate(CONFIG, ratio, swa_blocks=1, compressed_blocks=1, state_blocks=1) for _ in range(2)
    )
    found, other = caches.addresses, others.addresses
    assert found == caches.addresses
    for name, one, two in zip(CLASSES, found, other, strict=True):
        cache = getattr(caches, name)
        if cache is None:
            assert one is two is None
        else:
            assert one == (cache.data.data_ptr(), cache.data.shape, cache.data.stride(), cache.kv_format.id)
            assert one != two


def test_defaults_are_deepseeks_formats() -> None:
    caches = LayerCaches.allocate(CONFIG, 4, swa_blocks=1, compressed_blocks=1, state_blocks=1)
    ids = [getattr(caches, name).kv_format.id for name in CLASSES]
    assert ids == ["fp8_ds_mla/1", "fp8_ds_mla/1", "compressor_state_1024/1", "indexer_fp8/1", "compressor_state_256/1"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kv_cache": "int8"}, r"LayerCaches: kv_cache: expected one of .*'fp8_ds_mla'.*, got 'int8'"),
        ({"index_cache": "bf16"}, r"LayerCaches: index_cache: expected one of .*'mxfp4'.*, got 'bf16'"),
        ({"compress_ratio": 0}, r"LayerCaches: compress_ratio: expected one of \(1, 4, 128\), got 0"),
        ({"compress_ratio": 8}, r"LayerCaches: compress_ratio: expected one of \(1, 4, 128\), got 8"),
    ],
)
def test_unknown_choices(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LayerCaches.allocate(CONFIG, **{"compress_ratio": 4, "swa_blocks": 1, **arguments})


def shared_pool(fmt: Any, pages: int, rows: int, stride: int) -> torch.Tensor:
    return fmt.allocate(pages, rows, page_stride=stride)


def test_views_of_wider_pools_are_accepted() -> None:
    """State pages share an engine's pool with pages of 37440 bytes."""
    fmt = formats.compressor_state(512, 4)
    cache = CompressorStateCache(shared_pool(fmt, 3, 4, 37440), fmt, 4)
    assert cache.data.stride(0) * 4 == 37440


@pytest.mark.parametrize(
    ("kind", "fmt", "data", "rows", "error", "message"),
    [
        (DeepseekV4SWACache, formats.FP8_DS_MLA, torch.zeros(2, 64, 584), 64, TypeError, "data: .*uint8.*float32"),
        (DeepseekV4SWACache, formats.PLAIN_BF16, torch.zeros(2, 64, 512, dtype=torch.uint8), 64, TypeError, "data"),
        (DeepseekV4SWACache, formats.FP8_DS_MLA, torch.zeros(2, 64, 576, dtype=torch.uint8), 64, ValueError, "584"),
        (DeepseekV4SWACache, formats.FP8_DS_MLA, torch.zeros(2, 32, 584, dtype=torch.uint8), 64, ValueError, "64 rows"),
        (DeepseekV4CompressedCache, formats.PLAIN_BF16, torch.zeros(2, 2, 512), 2, TypeError, "bfloat16"),
        (DeepseekV4IndexerCache, formats.INDEXER_FP8, torch.zeros(2, 64, 68, dtype=torch.uint8), 64, ValueError, "132"),
        (DeepseekV4IndexerCache, formats.INDEXER_FP8, torch.zeros(64, 132, dtype=torch.uint8), 64, ValueError, "data"),
        (CompressorStateCache, formats.compressor_state(512, 4), torch.zeros(2, 4, 1024), 4, ValueError, "2048"),
        (
            CompressorStateCache,
            formats.compressor_state(512, 128),
            torch.zeros(2, 8, 2048)[:, :, ::2],
            8,
            ValueError,
            "stride",
        ),
    ],
)
def test_pools_of_another_shape_are_refused(
    kind: type, fmt: Any, data: torch.Tensor, rows: int, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message) as caught:
        kind(data, fmt, rows)
    assert kind.__name__ in str(caught.value)


@pytest.mark.parametrize(
    ("built", "given"),
    [
        ({"kv_cache": "fp8_ds_mla"}, {"kv_cache": "bf16"}),
        ({"kv_cache": "bf16"}, {"kv_cache": "fp8_ds_mla"}),
        ({"kv_cache": "fp8"}, {"kv_cache": "bf16"}),
        ({"index_cache": "fp8"}, {"index_cache": "mxfp4"}),
        ({"index_cache": "mxfp4"}, {"index_cache": "fp8"}),
    ],
)
def test_a_layer_refuses_caches_of_another_format(built: dict[str, str], given: dict[str, str]) -> None:
    engine = Engine(make_layer(4, **built))
    engine.caches = LayerCaches.allocate(
        engine.layer.config, 4, swa_blocks=96, compressed_blocks=96, state_blocks=1536, **given
    )
    with pytest.raises((ValueError, TypeError), match=r"format|dtype|expected"):
        engine.step([], [(Request(), hidden_rows(100, 1))])
