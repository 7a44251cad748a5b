# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from cute_kernels import formats
from cute_kernels.indexer.ops import cp_gather_indexer_k_quant_cache
from cute_kernels.runtime.record import record_calls
from tests.helpers import POISON_BYTE, check_op, poisoned_pool, raw_bytes

FORMATS = [formats.INDEXER_FP8, formats.INDEXER_MXFP4, formats.INDEXER_MXFP4_WIDE]
DTYPES = [torch.uint8, torch.float8_e4m3fn, torch.int8]


def code_bytes(fmt: Any) -> int:
    return 128 if fmt is formats.INDEXER_FP8 else 64


def random_pool(fmt: Any, num_blocks: int, block_size: int) -> torch.Tensor:
    pool = poisoned_pool(fmt, num_blocks, block_size, extra_stride=64)
    raw = raw_bytes(pool)
    raw.copy_(torch.randint(0, 256, raw.shape, generator=torch.Generator().manual_seed(1), dtype=torch.uint8))
    return pool


def expected(
    fmt: Any, pool: torch.Tensor, table: torch.Tensor, cu: list[int], dst_k: np.ndarray, dst_scale: np.ndarray
) -> None:
    """Fill dst_k and dst_scale, byte by byte, from raw memory."""
    raw, width, bs = raw_bytes(pool).numpy(), code_bytes(fmt), pool.shape[1]
    for r in range(len(cu) - 1):
        for i in range(cu[r + 1] - cu[r]):
            row, column = cu[r] + i, i // bs
            if not 0 <= row < len(dst_k) or column >= table.shape[1]:
                continue
            page = int(table[r, column])
            if not 0 <= page < pool.shape[0]:
                continue
            base = page * pool.stride(0)
            at = base + (i % bs) * width
            dst_k[row] = raw[at : at + width]
            at = base + bs * width + (i % bs) * 4
            dst_scale[row] = raw[at : at + 4]


def destination(fmt: Any, total: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Row-strided poisoned outputs."""
    k = torch.empty(total, code_bytes(fmt) + 16, dtype=dtype)
    scale = torch.empty(total, 12, dtype=torch.uint8)
    raw_bytes(k).fill_(POISON_BYTE)
    raw_bytes(scale).fill_(POISON_BYTE)
    return k[:, : code_bytes(fmt)], scale[:, 4:8]


@pytest.mark.parametrize("block_size", [1, 3, 64])
@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.id)
def test_rows(fmt: Any, block_size: int) -> None:
    pool = random_pool(fmt, 12, block_size)
    cu = [2, 2, 2 + 2 * block_size, 9 + 2 * block_size, 7 + 5 * block_size]
    total = cu[-1] + 5
    table = torch.randint(0, 12, (4, 9), generator=torch.Generator().manual_seed(2), dtype=torch.int32)[:, 1:8]
    before = raw_bytes(pool).clone()
    for dtype in DTYPES:
        if (dtype == torch.float8_e4m3fn) != (fmt is formats.INDEXER_FP8) and dtype != torch.uint8:
            continue
        k, scale = destination(fmt, total, dtype)
        want = [np.full((total, w), POISON_BYTE, dtype=np.uint8) for w in (code_bytes(fmt), 4)]
        expected(fmt, pool, table, cu, *want)
        lens = torch.tensor(cu, dtype=torch.int32)
        cp_gather_indexer_k_quant_cache(pool, k, scale, table, lens, kv_format=fmt.id)
        np.testing.assert_array_equal(k.view(torch.uint8).numpy(), want[0])
        np.testing.assert_array_equal(scale.numpy(), want[1])
        k.view(torch.uint8).fill_(POISON_BYTE)
        scale.fill_(POISON_BYTE)
        assert (raw_bytes(k) == POISON_BYTE).all()
        assert (raw_bytes(scale) == POISON_BYTE).all()
    assert torch.equal(raw_bytes(pool), before)


def test_four_dimensional_cache() -> None:
    pool = random_pool(formats.INDEXER_FP8, 3, 4)
    table = torch.tensor([[2, 0]], dtype=torch.int32)
    lens = torch.tensor([0, 7], dtype=torch.int32)
    results = []
    for cache in (pool, pool[:, :, None, :]):
        k, scale = destination(formats.INDEXER_FP8, 7, torch.uint8)
        cp_gather_indexer_k_quant_cache(cache, k, scale, table, lens)
        results.append((k, scale))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.id)
def test_bad_data_writes_nothing(fmt: Any) -> None:
    pool = random_pool(fmt, 4, 2)
    low, high = torch.iinfo(torch.int32).min, torch.iinfo(torch.int32).max
    table = torch.tensor([[0, -1_000_000, 3], [4, high, low], [1, 2, -1]], dtype=torch.int32)
    for cu in ([0, 6, 12, 18], [0, 5, 3, 9], [-3, 4, 40, 41], [5, 5, 5, 5], [high, low, 0, high]):
        k, scale = destination(fmt, 14, torch.uint8)
        want = [np.full((14, w), POISON_BYTE, dtype=np.uint8) for w in (code_bytes(fmt), 4)]
        if max(cu) < 100:
            expected(fmt, pool, table, cu, *want)
        else:
            expected(fmt, pool, table[2:], [0, 14], *want)
        cp_gather_indexer_k_quant_cache(pool, k, scale, table, torch.tensor(cu, dtype=torch.int32), kv_format=fmt.id)
        np.testing.assert_array_equal(k.numpy(), want[0])
        np.testing.assert_array_equal(scale.numpy(), want[1])


def test_page_beyond_four_gigabytes() -> None:
    """The memory between the pages is never touched, so it costs nothing."""
    stride = 2**31 + 64
    memory = torch.empty(2 * stride + 4 * 132, dtype=torch.uint8)
    pool = memory.as_strided((3, 4, 132), (stride, 132, 1))
    memory[2 * stride :] = torch.arange(4 * 132, dtype=torch.int32).to(torch.uint8)
    k, scale = destination(formats.INDEXER_FP8, 4, torch.uint8)
    table, lens = torch.tensor([[2]], dtype=torch.int32), torch.tensor([0, 4], dtype=torch.int32)
    cp_gather_indexer_k_quant_cache(pool, k, scale, table, lens)
    assert torch.equal(k.flatten(), memory[2 * stride : 2 * stride + 512])
    assert torch.equal(scale.flatten(), memory[2 * stride + 512 :])


def test_empty() -> None:
    pool = random_pool(formats.INDEXER_FP8, 2, 4)
    k, scale = destination(formats.INDEXER_FP8, 0, torch.uint8)
    one = torch.zeros(1, dtype=torch.int32)
    cp_gather_indexer_k_quant_cache(pool, k, scale, torch.zeros(0, 0, dtype=torch.int32), one)
    k, scale = destination(formats.INDEXER_FP8, 3, torch.uint8)
    lens = torch.tensor([0, 3], dtype=torch.int32)
    cp_gather_indexer_k_quant_cache(pool, k, scale, torch.zeros(1, 0, dtype=torch.int32), lens)
    cp_gather_indexer_k_quant_cache(pool[:0], k, scale, torch.zeros(1, 3, dtype=torch.int32), lens)
    assert (raw_bytes(k) == POISON_BYTE).all()
    assert (raw_bytes(scale) == POISON_BYTE).all()


def test_opcheck_and_compile() -> None:
    fmt = formats.INDEXER_MXFP4
    pool = random_pool(fmt, 3, 4)
    table = torch.tensor([[2, 0], [1, 1]], dtype=torch.int32)
    lens = torch.tensor([0, 7, 9], dtype=torch.int32)
    k, scale = torch.zeros(10, 64, dtype=torch.uint8), torch.zeros(10, 4, dtype=torch.uint8)
    check_op("cp_gather_indexer_k_quant_cache", pool, k, scale, table, lens, fmt.id)

    def f(pool: torch.Tensor, k: torch.Tensor, scale: torch.Tensor, table: torch.Tensor, lens: torch.Tensor) -> None:
        cp_gather_indexer_k_quant_cache(pool, k, scale, table, lens, kv_format=fmt.id)

    compiled = torch.compile(f, fullgraph=True, backend="aot_eager", dynamic=True)
    for total in (10, 13):
        outs = [(torch.zeros(total, 64, dtype=torch.uint8), torch.zeros(total, 4, dtype=torch.uint8)) for _ in "ab"]
        f(pool, *outs[0], table, lens)
        compiled(pool, *outs[1], table, lens)
        assert outs[0][0].any()
        assert all(torch.equal(a, b) for a, b in zip(*outs, strict=True))


def test_cost() -> None:
    pool = random_pool(formats.INDEXER_FP8, 3, 4)
    k, scale = destination(formats.INDEXER_FP8, 9, torch.uint8)
    table = torch.zeros(2, 2, dtype=torch.int32)
    with record_calls() as recording:
        cp_gather_indexer_k_quant_cache(pool, k, scale, table, torch.tensor([0, 7, 8], dtype=torch.int32))
    assert [c.cost.bytes for c in recording.calls] == [2 * 8 * 132]


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"kv_format": "indexer"}, ValueError, "kv_format"),
        ({"kv_format": "fp8_ds_mla/1"}, ValueError, "kv_format"),
        ({"kv_format": "indexer_mxfp4/1"}, ValueError, "kv_cache"),
        ({"kv_format": "indexer_mxfp4_wide/1"}, ValueError, "dst_k"),
        ({"kv_cache": torch.zeros(2, 4, 132)}, TypeError, "kv_cache"),
        ({"kv_cache": torch.zeros(2, 4, 2, 132, dtype=torch.uint8)}, ValueError, "kv_cache"),
        ({"kv_cache": torch.zeros(2, 0, 132, dtype=torch.uint8)}, ValueError, "kv_cache"),
        ({"kv_cache": torch.zeros(2, 4, 140, dtype=torch.uint8)[..., :132]}, ValueError, "kv_cache"),
        ({"dst_k": torch.zeros(9, 128, dtype=torch.int8)}, TypeError, "dst_k"),
        ({"dst_scale": torch.zeros(8, 4, dtype=torch.uint8)}, ValueError, "dst_scale"),
        ({"dst_scale": torch.zeros(9, 1)}, TypeError, "dst_scale"),
        ({"block_table": torch.zeros(2, 2, dtype=torch.int64)}, TypeError, "block_table"),
        ({"cu_seq_lens": torch.zeros(2, dtype=torch.int32)}, ValueError, "cu_seq_lens"),
    ],
)
def test_bad_arguments(change: dict[str, Any], error: type[Exception], says: str) -> None:
    good = {
        "kv_cache": formats.INDEXER_FP8.allocate(2, 4),
        "dst_k": torch.zeros(9, 128, dtype=torch.uint8),
        "dst_scale": torch.zeros(9, 4, dtype=torch.uint8),
        "block_table": torch.zeros(2, 2, dtype=torch.int32),
        "cu_seq_lens": torch.zeros(3, dtype=torch.int32),
    }
    with pytest.raises(error, match=f"cp_gather_indexer_k_quant_cache: {says}: expected"):
        cp_gather_indexer_k_quant_cache(**{**good, **change})
