# SPDX-License-Identifier: Apache-2.0
"""The gather of indexer keys on a GPU, byte for byte: against the CPU implementation and by raw addresses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from cute_kernels import formats
from cute_kernels.indexer.ops import cp_gather_indexer_k_quant_cache
from cute_kernels.runtime import compile as compile_
from cute_kernels.runtime.ops import FALLBACK_VARIABLE
from cute_kernels.runtime.record import record_calls
from tests.helpers import POISON_BYTE, generator, poisoned_pool, raw_bytes
from tests.indexer.test_gather import code_bytes, expected

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

FORMATS = (formats.INDEXER_FP8, formats.INDEXER_MXFP4, formats.INDEXER_MXFP4_WIDE)
GARBAGE = (-1, -7, -1_000_000, 2**31 - 1, -(2**31))
by_format = pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.id)


@pytest.fixture(autouse=True)
def no_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FALLBACK_VARIABLE, raising=False)


def int32(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def random_pool(fmt: Any, num_blocks: int, block_size: int, extra: int = 0) -> torch.Tensor:
    """A pool on the CPU whose every byte is random."""
    pool = poisoned_pool(fmt, num_blocks, block_size, extra)
    raw = raw_bytes(pool)
    raw.copy_(torch.randint(0, 256, raw.shape, generator=generator(1), dtype=torch.uint8))
    return pool


def like(t: torch.Tensor) -> torch.Tensor:
    """A copy on the GPU with the same strides and the same bytes behind it."""
    storage = raw_bytes(t).cuda()
    return storage.as_strided(t.shape, t.stride(), t.storage_offset())


def tables(lens: list[int], block_size: int, pages: int, width: int, seed: int = 0) -> torch.Tensor:
    """Pages for each request's rows, and what must not be used past them."""
    table = torch.randint(0, pages, (len(lens), width), generator=generator(seed), dtype=torch.int32)
    for r, rows in enumerate(lens):
        past = -(-rows // block_size)
        table[r, past:] = int32(GARBAGE).repeat(width)[: max(width - past, 0)]
    return table


def destination(fmt: Any, total: int, device: str, extra: int = 16, scale_extra: int = 8) -> Any:
    """Poisoned outputs, `extra` bytes between rows of codes, and the tensors they are views of."""
    whole = (
        torch.empty(total + 2, code_bytes(fmt) + extra, dtype=torch.uint8, device=device),
        torch.empty(total + 2, 4 + scale_extra, dtype=torch.uint8, device=device),
    )
    for t in whole:
        t.fill_(POISON_BYTE)
    return (whole[0][1:-1, : code_bytes(fmt)], whole[1][1:-1, scale_extra // 2 : scale_extra // 2 + 4]), whole


def check(
    fmt: Any, pool: torch.Tensor, table: torch.Tensor, bounds: list[int], total: int, extra: int = 16
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gather on the GPU and on the CPU; every byte of the poisoned outputs must agree. Returns the CPU's."""
    results = []
    for device in ("cuda", "cpu"):
        out, whole = destination(fmt, total, device, extra)
        cache = like(pool) if device == "cuda" else pool
        with record_calls() as recording:
            cp_gather_indexer_k_quant_cache(cache, *out, table.to(device), int32(bounds).to(device), kv_format=fmt.id)
        assert [c.implementation for c in recording.calls] == ["kernel" if device == "cuda" else "reference"]
        results.append([t.cpu() for t in whole])
    for name, got, want in zip(("codes", "scales"), *results, strict=True):
        assert torch.equal(got, want), f"{name}: {(got != want).any(1).nonzero()[:5].flatten().tolist()} differ"
    return out


def ends(lens: list[int], first: int = 0) -> list[int]:
    return [first, *(first + int(n) for n in np.cumsum(lens))]


@pytest.mark.parametrize("block_size", [1, 2, 3, 64, 100])
@by_format
def test_every_byte(fmt: Any, block_size: int) -> None:
    pool = random_pool(fmt, 40, block_size, 64)
    for lens in ([1], [31], [32], [33, 0, 0, 5], [7 * block_size, 1, 0, 3 * block_size + 1, 9], [5] * 33, [3] * 200):
        width = max(-(-n // block_size) for n in lens) + 2
        bounds = ends(lens)
        for total in (bounds[-1], bounds[-1] + 70, max(bounds[-1] - 3, 1)):
            check(fmt, pool, tables(lens, block_size, 40, width), bounds, total)


@by_format
def test_by_raw_addresses(fmt: Any) -> None:
    pool, lens = random_pool(fmt, 12, 64, 64), [70, 0, 128, 3]
    table, bounds = tables(lens, 64, 12, 4), ends(lens, 2)
    codes, scales = check(fmt, pool, table, bounds, 210)
    want = [np.full((210, width), POISON_BYTE, dtype=np.uint8) for width in (code_bytes(fmt), 4)]
    expected(fmt, pool, table, bounds, *want)
    np.testing.assert_array_equal(codes.numpy(), want[0])
    np.testing.assert_array_equal(scales.numpy(), want[1])


@by_format
def test_many_rows(fmt: Any) -> None:
    pool = random_pool(fmt, 300, 64)
    for lens in ([70001], [20000, 1, 0, 51234], [64] * 1200, list(range(400))):
        width = -(-max(lens) // 64)
        check(fmt, pool, tables(lens, 64, 300, width), ends(lens), sum(lens) + 5)


@by_format
def test_every_kernel(fmt: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those for long calls too, in short ones."""
    from cute_kernels.indexer import gather

    pool = random_pool(fmt, 20, 16)
    for size in gather.SIZES:
        monkeypatch.setattr(gather, "size_of", lambda rows, size=size: size)
        for lens in ([1], [33, 0, 70], [129, 31]):
            check(fmt, pool, tables(lens, 16, 20, 10), ends(lens), sum(lens) + 3)


@by_format
def test_many_requests(fmt: Any) -> None:
    pool = random_pool(fmt, 50, 2)
    lens = [(37 * r) % 5 for r in range(5000)]
    check(fmt, pool, tables(lens, 2, 50, 3), ends(lens), sum(lens))


@by_format
def test_alignments(fmt: Any) -> None:
    """16 bytes a lane where pages and rows allow it, 4 where they do not."""
    lens = [40, 9]
    for block_size, extra_stride, extra in ((64, 0, 0), (64, 4, 0), (64, 8, 16), (16, 64, 4), (16, 4, 12), (1, 0, 0)):
        pool = random_pool(fmt, 60, block_size, extra_stride)
        check(fmt, pool, tables(lens, block_size, 60, 40), ends(lens), 60, extra)
    natural = random_pool(fmt, 30, 2, fmt.page_bytes(2) - fmt.page_stride(2))
    check(fmt, natural, tables(lens, 2, 30, 20), ends(lens), 49, 0)


@by_format
def test_bounds_and_pages_that_are_wrong(fmt: Any) -> None:
    pool = random_pool(fmt, 10, 4)
    table = int32([[3, -1, 10, 4, 2**31 - 1], [-(2**31), 9, 0, 11, 5], [1, 2, 3, 4, 5]])
    for bounds in ([0, 20, 40, 60], [5, 9, 9, 60], [-7, -3, 12, 30], [-(2**31), -5, 30, 2**31 - 1], [0, 0, 0, 0]):
        check(fmt, pool, table, bounds, 50)
        check(fmt, pool, table[:, 1:3], bounds, 50)
        check(fmt, pool, table[:, 2:3], bounds, 50)


@by_format
def test_bounds_that_are_garbage_stay_inside(fmt: Any) -> None:
    """Not ascending: any rows may be written, and nothing else."""
    pool = random_pool(fmt, 10, 4)
    g = generator(3)
    for requests in (1, 5, 40, 3000):
        table = torch.randint(-(2**31), 2**31 - 1, (requests, 5), generator=g).int()
        table[::2] = torch.randint(0, 10, table[::2].shape, generator=g).int()
        bounds = torch.randint(-(2**31), 2**31 - 1, (requests + 1,), generator=g)
        bounds[::3] = torch.randint(0, 100, bounds[::3].shape, generator=g)
        out, whole = destination(fmt, 100, "cuda")
        cp_gather_indexer_k_quant_cache(like(pool), *out, table.cuda(), bounds.int().cuda(), kv_format=fmt.id)
        for t in out:
            t.fill_(POISON_BYTE)
        assert all(bool((t == POISON_BYTE).all()) for t in whole)


@by_format
def test_pool_and_rows_beyond_two_gigabytes(fmt: Any) -> None:
    stride = fmt.page_stride(64)
    num_blocks = 2**32 // stride + 3000
    cache = fmt.allocate(num_blocks, 64, "cuda")
    small = random_pool(fmt, 5, 64)
    edges = [2**31 // stride - 1, 2**31 // stride, 2**31 // stride + 1, 2**32 // stride + 1, num_blocks - 1]
    fmt.pages(cache, 64)[torch.tensor(edges).cuda()] = fmt.pages(small, 64).cuda()
    gap = 2**31 // 100 // 16 * 16  # the rows end past 2^32 bytes
    memory = torch.empty(320 * gap, dtype=torch.uint8, device="cuda")
    codes = memory.as_strided((320, code_bytes(fmt)), (gap, 1))
    scales = torch.empty(320, 4, dtype=torch.uint8, device="cuda")
    bounds = int32([0, 320])
    cp_gather_indexer_k_quant_cache(cache, codes, scales, int32([edges]).cuda(), bounds.cuda(), kv_format=fmt.id)
    (want_codes, want_scales), _ = destination(fmt, 320, "cpu")
    table = int32([[0, 1, 2, 3, 4]])
    cp_gather_indexer_k_quant_cache(small, want_codes, want_scales, table, bounds, kv_format=fmt.id)
    assert torch.equal(codes.cpu(), want_codes)
    assert torch.equal(scales.cpu(), want_scales)


def test_float8_and_int8_codes_and_a_4d_cache() -> None:
    for fmt, dtype in ((FORMATS[0], torch.float8_e4m3fn), (FORMATS[1], torch.int8)):
        pool, table, bounds = random_pool(fmt, 6, 64), tables([130], 64, 6, 3), int32([0, 130])
        (codes, scales), _ = destination(fmt, 130, "cuda")
        args = (table.cuda(), bounds.cuda())
        cp_gather_indexer_k_quant_cache(like(pool)[:, :, None], codes.view(dtype), scales, *args, kv_format=fmt.id)
        (want, want_scales), _ = destination(fmt, 130, "cpu")
        cp_gather_indexer_k_quant_cache(pool, want, want_scales, table, bounds, kv_format=fmt.id)
        assert torch.equal(codes.cpu(), want)
        assert torch.equal(scales.cpu(), want_scales)


def test_nothing_is_launched_without_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    from cute_kernels.indexer import gather

    launches: list[Any] = []
    monkeypatch.setattr(gather, "launch_key", lambda *args: launches.append(args))
    fmt = FORMATS[0]
    pool, table, bounds = like(random_pool(fmt, 3, 4)), int32([[0, 1]]).cuda(), int32([0, 8]).cuda()
    (codes, scales), _ = destination(fmt, 8, "cuda")
    for args in (
        (pool[:0], codes, scales, table, bounds),
        (pool, codes[:0], scales[:0], table, bounds),
        (pool, codes, scales, table[:, :0], bounds),
        (pool, codes, scales, table[:0], bounds[:1]),
    ):
        cp_gather_indexer_k_quant_cache(*args)
    assert launches == []
    cp_gather_indexer_k_quant_cache(pool, codes, scales, table, bounds)
    assert len(launches) == 1


def test_shapes_and_strides_need_no_new_kernel() -> None:
    for fmt in FORMATS:
        pool = random_pool(fmt, 8, 64)
        check(fmt, pool, tables([3], 64, 8, 1), [0, 3], 3)
    before = compile_.compilations()
    for fmt in FORMATS:
        for block_size, lens in ((16, [40, 3]), (64, [100, 100, 1])):
            check(fmt, random_pool(fmt, 9, block_size), tables(lens, block_size, 9, 5), ends(lens), sum(lens), 48)
    assert compile_.compilations() == before


def test_alignment_that_is_not_supported_says_so() -> None:
    fmt = FORMATS[0]
    cache, table, bounds = like(random_pool(fmt, 3, 4)), int32([[0, 1]]).cuda(), int32([0, 8]).cuda()
    good, odd = (
        torch.empty(8, 128, dtype=torch.uint8, device="cuda"),
        torch.empty(9, 131, dtype=torch.uint8, device="cuda"),
    )
    scales = torch.empty(8, 4, dtype=torch.uint8, device="cuda")
    for codes, target, reason in (
        (odd[:8, :128], scales, "rows of dst_k must be 4-byte aligned"),
        (good, odd[:8, :4], "rows of dst_scale must be 4-byte aligned"),
    ):
        with pytest.raises(NotImplementedError, match=f"{reason}.*{FALLBACK_VARIABLE}=reference"):
            cp_gather_indexer_k_quant_cache(cache, codes, target, table, bounds)
