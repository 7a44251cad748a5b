# SPDX-License-Identifier: Apache-2.0
"""Records as rows of bytes, and back: byte for byte, of every format."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cute_kernels import formats
from cute_kernels.kv_cache.ops import pack_records, unpack_records
from tests.helpers import check_op

BLOCKS, BLOCK_SIZE = 3, 5
WRONG = (-1, BLOCKS * BLOCK_SIZE, 2**40, -(2**62))
SIZES = {
    "fp8_ds_mla/1": 584,
    "plain_bf16/1": 1024,
    "plain_fp8/1": 512,
    "indexer_fp8/1": 132,
    "indexer_mxfp4/1": 68,
    "indexer_mxfp4_wide/1": 68,
    "compressor_state_1024/1": 8192,
    "compressor_state_512/1": 4096,
    "compressor_state_256/1": 2048,
}


def random_pool(fmt: Any, seed: int) -> torch.Tensor:
    """Bytes between pages and behind records included."""
    pool = fmt.allocate(BLOCKS, BLOCK_SIZE)
    raw = memory_of(pool)
    raw.copy_(torch.randint(0, 256, raw.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)))
    return pool


def memory_of(pool: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(pool.untyped_storage())


def record_at(pool: torch.Tensor, kv_format: str, slot: int) -> torch.Tensor:
    """By the layouts that the formats state."""
    start = slot // BLOCK_SIZE * pool.stride(0) * pool.element_size()
    row, raw = slot % BLOCK_SIZE, memory_of(pool)
    data = {"fp8_ds_mla/1": 576, "indexer_fp8/1": 128}.get(kv_format, 64 if "mxfp4" in kv_format else SIZES[kv_format])
    scale = SIZES[kv_format] - data
    scales = start + BLOCK_SIZE * data + row * scale
    return torch.cat([raw[start + row * data :][:data], raw[scales : scales + scale]])


@pytest.mark.parametrize("kv_format", SIZES)
def test_there_and_back(kv_format: str) -> None:
    fmt = formats.RECORD_FORMATS[kv_format]
    assert fmt.record_bytes == SIZES[kv_format]
    pool, other = random_pool(fmt, 1), random_pool(fmt, 2)
    slots = torch.tensor([7, *WRONG[:2], 0, 14, *WRONG[2:], 3])
    got = pack_records(pool, slots, kv_format)
    for row, slot in zip(got, slots.tolist(), strict=True):
        is_there = 0 <= slot < BLOCKS * BLOCK_SIZE
        assert torch.equal(row, record_at(pool, kv_format, slot) if is_there else torch.zeros_like(row))

    targets = slots.where(slots != 3, -5)
    before = memory_of(other).clone()
    want = {slot: row for slot, row in zip(targets.tolist(), got, strict=True) if 0 <= slot < BLOCKS * BLOCK_SIZE}
    kept = {slot: record_at(other, kv_format, slot) for slot in range(BLOCKS * BLOCK_SIZE) if slot not in want}
    unpack_records(got, other, targets, kv_format)
    for slot, row in (want | kept).items():
        assert torch.equal(record_at(other, kv_format, slot), row)
    # nothing but these records: their old bytes back, and the pool is as it was
    old = formats.RECORD_FORMATS[kv_format].allocate(BLOCKS, BLOCK_SIZE)
    memory_of(old).copy_(before)
    unpack_records(pack_records(old, targets, kv_format), other, targets, kv_format)
    assert torch.equal(memory_of(other), before)


def test_views() -> None:
    fmt = formats.FP8_DS_MLA
    pool = random_pool(fmt, 3)
    wide = torch.full((4, 600), 7, dtype=torch.uint8)
    out = wide[1:3, 8:592]
    assert pack_records(pool, torch.tensor([2, 9]), fmt.id, out=out) is out
    assert torch.equal(out, pack_records(pool, torch.tensor([2, 9]), fmt.id))
    out.fill_(7)
    assert (wide == 7).all()


@pytest.mark.parametrize(("kv_format", "apart"), [("fp8_ds_mla/1", 8), ("indexer_fp8/1", 4), ("plain_fp8/1", 16)])
def test_vectors_cut_records_of_neighbouring_rows_alone(kv_format: str, apart: int) -> None:
    """One row for all slots is not as long as they are. apart: bytes of a vector that cuts no record"""
    pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
    from cute_kernels.kv_cache.pack import vector_of

    size, cache = SIZES[kv_format], formats.RECORD_FORMATS[kv_format].allocate(1, 16)
    memory = torch.empty(9 * 1024 + 16, dtype=torch.uint8)
    memory = memory[-memory.data_ptr() % 16 :]
    for rows, stride, vector in ((9, size, 16), (9, 0, apart), (9, 1024, apart), (1, 0, 16), (1, 1024, 16)):
        assert vector_of(memory.as_strided((rows, size), (stride, 1)), cache, kv_format) == vector


def test_empty_calls() -> None:
    fmt, none = formats.INDEXER_FP8, torch.empty(0, dtype=torch.int64)
    pool = random_pool(fmt, 4)
    assert pack_records(pool, none, fmt.id).shape == (0, 132)
    before = memory_of(pool).clone()
    unpack_records(torch.empty(0, 132, dtype=torch.uint8), pool, none, fmt.id)
    assert torch.equal(memory_of(pool), before)
    assert (pack_records(pool[:0], torch.tensor([0]), fmt.id) == 0).all()


def test_op_check() -> None:
    fmt, slots = formats.FP8_DS_MLA, torch.tensor([3, -1, 11])
    records = torch.ones(3, 584, dtype=torch.uint8)
    check_op("pack_records", random_pool(fmt, 5), slots, fmt.id, records, False)
    check_op("unpack_records", records, random_pool(fmt, 5), slots, fmt.id, True)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"kv_format": "fp8/1"}, "kv_format: expected one of"),
        ({"kv_format": "indexer_fp8/1"}, "cache: expected"),
        ({"slots": torch.zeros(2, dtype=torch.int32)}, "slots: expected"),
        ({"out": torch.zeros(2, 576, dtype=torch.uint8)}, "out: expected"),
        ({"out": torch.zeros(3, 584, dtype=torch.uint8)}, "out: expected"),
    ],
)
def test_refused(changed: dict[str, Any], message: str) -> None:
    given = {"cache": random_pool(formats.FP8_DS_MLA, 6), "slots": torch.zeros(2, dtype=torch.int64)}
    with pytest.raises((ValueError, TypeError), match=f"pack_records: {message}"):
        pack_records(**{**given, "kv_format": "fp8_ds_mla/1", **changed})
