# SPDX-License-Identifier: Apache-2.0
"""The gather kernel on a GPU, bit for bit, against the CPU implementation and against tests/kv_cache/expected.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from cute_kernels.formats import FP8_DS_MLA
from cute_kernels.kv_cache import gather
from cute_kernels.kv_cache.ops import dequantize_and_gather_k_cache, quantize_and_insert_k_cache
from cute_kernels.runtime import compile as compile_
from cute_kernels.runtime.ops import FALLBACK_VARIABLE
from cute_kernels.runtime.record import record_calls
from tests import oracle
from tests.helpers import generator, poisoned_pool, raw_bytes, spread
from tests.kv_cache import expected

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

INT32_MAX = 2**31 - 1
SENTINEL = -77.0
POISONS = (-1_000_000, -1, INT32_MAX, -(2**31))


@pytest.fixture(autouse=True, params=["rows", "bulk", "bulk, one block"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test with the kernel of short calls, and with that of long ones where pages allow it: with blocks enough
    for all rows, and with one that goes round its stages many times."""
    monkeypatch.delenv(FALLBACK_VARIABLE, raising=False)
    monkeypatch.setattr(gather, "BULK_ROWS", dict.fromkeys((False, True), 2**62 if request.param == "rows" else 1))
    if request.param == "bulk, one block":
        monkeypatch.setattr(gather, "CTAS_PER_SM", 0)


def random_pool(num_blocks: int, block_size: int, extra: int = 0, seed: int = 0, nan: bool = False) -> torch.Tensor:
    """A pool on the CPU with any codes, any scales whose products are normal numbers, and any finite rope."""
    cache = poisoned_pool(FP8_DS_MLA, num_blocks, block_size, extra)
    g = generator(seed)
    n = num_blocks * block_size
    data = torch.randint(0, 256, (n, 576), generator=g, dtype=torch.uint8)
    if not nan:
        data[:, :448][(data[:, :448] & 0x7F) == 0x7F] = 0x38
    data[:, 448:] = torch.randn(n, 64, generator=g).bfloat16().view(torch.uint8)
    scales = torch.randint(30, 240, (n, 8), generator=g, dtype=torch.uint8)
    FP8_DS_MLA.write_fields(cache, block_size, torch.arange(n), data, scales)
    return cache


def like(t: torch.Tensor) -> torch.Tensor:
    """A copy on the GPU with the same strides and the same bytes behind it."""
    storage = torch.empty(t.untyped_storage().nbytes() // t.element_size(), dtype=t.dtype, device="cuda")
    raw_bytes(storage).copy_(raw_bytes(t))
    return storage.as_strided(t.shape, t.stride(), t.storage_offset())


def int32(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def same_bits(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Equal bits, or NaN in both: which NaN a GPU makes is its own business."""
    got = got.cpu()
    return bool(((got.view(torch.int16) == want.view(torch.int16)) | (got.isnan() & want.isnan())).all())


def check(
    cache: torch.Tensor,
    seq_lens: Any,
    gather_lens: Any,
    table: torch.Tensor,
    block_size: int,
    offset: int = 0,
    out: torch.Tensor | None = None,
    rows: int | None = None,
) -> torch.Tensor:
    """Gather on the GPU and on the CPU; every bit behind `out` must agree. Returns the CPU's `out`."""
    seqs, lens = int32(seq_lens), None if gather_lens is None else int32(gather_lens)
    if out is None:
        width = max([*seq_lens, 0]) + offset + 3 if rows is None else rows
        out = torch.full((len(seq_lens) + 1, width, 512), SENTINEL, dtype=torch.bfloat16)
    gpu_out, gpu_cache, gpu_table = like(out), like(cache), like(table)
    gpu_lens = None if lens is None else lens.cuda()
    with record_calls() as recording:
        dequantize_and_gather_k_cache(gpu_out, gpu_cache, seqs.cuda(), gpu_lens, gpu_table, block_size, offset)
    assert [call.implementation for call in recording.calls] == ["kernel"]
    dequantize_and_gather_k_cache(out, cache, seqs, lens, table, block_size, offset)
    got, want = (raw_bytes(t).view(torch.bfloat16) for t in (gpu_out, out))
    assert same_bits(got, want)
    assert torch.equal(raw_bytes(gpu_cache).cpu(), raw_bytes(cache))
    return out


def tables(requests: int, width: int, pages: int, seed: int) -> torch.Tensor:
    """Block tables of distinct pages as far as there are enough; what is too much is poison."""
    order = torch.randperm(max(pages, requests * width), generator=generator(seed))[: requests * width]
    table = order.view(requests, width).int()
    poison = int32(POISONS)[torch.arange(requests * width) % len(POISONS)].view(requests, width)
    return torch.where(table < pages, table, poison)


@pytest.mark.parametrize("extra", [0, 64, 8])
@pytest.mark.parametrize("block_size", [1, 2, 7, 64, 256])
def test_whole_requests(block_size: int, extra: int) -> None:
    pages = 700 // block_size + 3
    cache = random_pool(pages, block_size, extra)
    for requests in (1, 3):
        width = pages // requests
        table = tables(requests, width, pages, requests)
        full = width * block_size
        check(cache, [full, full - 1, 1][:requests], None, table, block_size)
        check(cache, [full, 5, 0][:requests], [full // 2, 9, 3][:requests], table, block_size, offset=2)


@pytest.mark.parametrize("view", ["2-D", "3-D"])
@pytest.mark.parametrize("stride", [584 * 64, 37440, 37440 + 576, 37440 + 8])
def test_page_strides_and_views(stride: int, view: str) -> None:
    cache = random_pool(9, 64, stride - FP8_DS_MLA.page_stride(64)) if stride >= 37440 else None
    if cache is None:
        cache = FP8_DS_MLA.allocate(9, 64, page_stride=stride)
        source = random_pool(9, 64)
        FP8_DS_MLA.pages(cache, 64).copy_(FP8_DS_MLA.pages(source, 64))
    if view == "2-D":
        cache = cache.as_strided((9, 584 * 64), (cache.stride(0), 1))
    check(cache, [190, 64, 130], None, tables(3, 3, 9, 1), 64)


def test_lengths_of_every_kind() -> None:
    cache = random_pool(40, 4)
    table = tables(8, 5, 40, 2)
    seqs = [20, 19, 1, 0, -3, 20, 7, 20]
    check(cache, seqs, None, table, 4)
    check(cache, seqs, [20, 7, 1, 5, 2, 0, -1, 1], table, 4, offset=1)
    check(cache, [INT32_MAX] * 8, [1, 2, 3, 4, 5, 6, 7, INT32_MAX], table, 4, rows=30)
    check(cache, [INT32_MAX, 20, -(2**31), 5, 20, 20, 20, 20], [-(2**31)] * 2 + [20] * 6, table, 4, rows=30)


def test_out_is_too_short() -> None:
    cache = random_pool(40, 4)
    table = tables(4, 10, 40, 3)
    for offset, rows in ((0, 9), (6, 16), (10, 9), (9, 9), (0, 0)):
        check(cache, [40, 5, 40, 12], None, table, 4, offset, rows=rows)
        check(cache, [40, 5, 40, 12], [30, 5, 11, 2], table, 4, offset, rows=rows)


def test_pages_that_are_none() -> None:
    cache = random_pool(6, 8)
    for poison in (*POISONS, 6):
        table = int32([[0, poison, 2, 3], [poison, 5, poison, 4], [poison] * 4])
        out = check(cache, [32, 31, 32], None, table, 8)
        assert not out[2, :32].any()
        check(cache, [32, 20, 17], [20, 19, 12], table, 8, offset=3)
    check(cache, [100, 100, 100], None, int32([[0, 1], [2, 3], [4, 5]]), 8)


def test_nothing_to_do() -> None:
    cache = random_pool(2, 4)
    check(cache, [], None, torch.zeros(0, 1, dtype=torch.int32), 4, rows=5)
    check(cache, [0, 0], None, torch.zeros(2, 1, dtype=torch.int32), 4, rows=3)
    check(cache, [5], None, torch.zeros(1, 0, dtype=torch.int32), 4, rows=5)
    check(FP8_DS_MLA.allocate(0, 4), [5], None, torch.zeros(1, 2, dtype=torch.int32), 4, rows=5)


def test_every_code_with_every_scale() -> None:
    """All 256 codes times all 256 scale bytes: the subnormal, the infinite and the NaN products too."""
    cache = FP8_DS_MLA.allocate(16, 64)
    n = 16 * 64
    data = torch.zeros(n, 576, dtype=torch.uint8)
    data[:, :448] = (torch.arange(448)[None] + 7 * torch.arange(n)[:, None]).to(torch.uint8)
    for row in range(n):
        data[row, :256] = torch.arange(256, dtype=torch.int16).roll(row).to(torch.uint8)
    scales = (torch.arange(n) % 256).to(torch.uint8)[:, None].repeat(1, 8)
    FP8_DS_MLA.write_fields(cache, 64, torch.arange(n), data, scales)
    check(cache, [n], None, torch.arange(16, dtype=torch.int32)[None], 64)
    scales[:, :] = (torch.arange(n)[:, None] // 4 + 37 * torch.arange(8)[None]).to(torch.uint8)
    FP8_DS_MLA.write_fields(cache, 64, torch.arange(n), data, scales)
    check(cache, [n], None, torch.arange(16, dtype=torch.int32)[None], 64)


def test_values_against_the_oracle() -> None:
    cache = random_pool(3, 64)
    out = check(cache, [150], None, int32([[2, 0, 1]]), 64)
    for row in (0, 1, 63, 64, 149):
        slot = [2, 0, 1][row // 64] * 64 + row % 64
        np.testing.assert_array_equal(oracle.to_numpy(out[0, row]), expected.read_mla(cache, 64, slot))


def test_rope_is_copied_bit_for_bit() -> None:
    cache = random_pool(16, 64)
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(1024, 64)
    data, scales = FP8_DS_MLA.read_fields(cache, 64, torch.arange(1024))
    data[:, 448:] = every.view(torch.uint8)
    FP8_DS_MLA.write_fields(cache, 64, torch.arange(1024), data, scales)
    out = torch.zeros(1, 1024, 512, dtype=torch.bfloat16, device="cuda")
    table = torch.arange(16, dtype=torch.int32, device="cuda")[None]
    dequantize_and_gather_k_cache(out, like(cache), int32([1024]).cuda(), None, table, 64, 0)
    assert torch.equal(out[0, :, 448:].contiguous().view(torch.int16).cpu(), every)


def test_nan_codes_give_nan() -> None:
    cache = random_pool(4, 16, nan=True)
    out = check(cache, [64], None, int32([[3, 1, 0, 2]]), 16)
    assert bool(out.isnan().any())


def test_strided_out_and_table() -> None:
    cache = random_pool(12, 4)
    buffer = torch.full((4, 30, 640), SENTINEL, dtype=torch.bfloat16)
    wide = torch.randint(0, 12, (3, 9), generator=generator(4), dtype=torch.int32)
    check(cache, [15, 16, 3], None, wide[:, 2:6], 4, 1, buffer[1:, ::2, 64:576])
    check(cache, [15, 16, 3], [4, 16, 2], wide[:, 2:6], 4, 0, buffer[:3, 5:, 128:])
    one = torch.full((700,), SENTINEL, dtype=torch.bfloat16).as_strided((1, 1, 512), (3, 5, 1))
    check(cache, [1], None, wide[:1], 4, 0, one)


def test_many_requests_and_long_ones() -> None:
    cache = random_pool(300, 2)
    lens = [(37 * r) % 90 for r in range(260)]
    table = torch.randint(0, 300, (260, 45), generator=generator(5), dtype=torch.int32)
    check(cache, lens, None, table, 2)
    check(cache, lens, [min(n, 13) for n in lens], table, 2, offset=4)
    pages = random_pool(64, 64)
    table = torch.randint(0, 64, (2, 400), generator=generator(6), dtype=torch.int32)
    check(pages, [25600, 77], None, table, 64)


def test_inserted_rows_come_back() -> None:
    k = spread((100, 512), seed=2)
    cache = poisoned_pool(FP8_DS_MLA, 2, 64, device="cuda")
    quantize_and_insert_k_cache(k.cuda(), cache, torch.arange(100, device="cuda"))
    out = torch.zeros(1, 100, 512, dtype=torch.bfloat16, device="cuda")
    dequantize_and_gather_k_cache(out, cache, int32([100]).cuda(), None, int32([[0, 1]]).cuda(), 64, 0)
    want = FP8_DS_MLA.decode(*FP8_DS_MLA.encode(k))
    assert torch.equal(out[0].cpu().view(torch.int16), want.view(torch.int16))


def test_pool_beyond_two_gigabytes() -> None:
    stride = FP8_DS_MLA.page_stride(64)
    num_blocks = 2**32 // stride + 3000
    cache = FP8_DS_MLA.allocate(num_blocks, 64, "cuda")
    small = random_pool(5, 64)
    edges = [2**31 // stride - 1, 2**31 // stride, 2**31 // stride + 1, 2**32 // stride + 1, num_blocks - 1]
    natural = FP8_DS_MLA.page_bytes(64)
    FP8_DS_MLA.pages(cache, 64)[torch.tensor(edges).cuda()] = FP8_DS_MLA.pages(small, 64)[:, :natural].cuda()
    out = torch.full((1, 320, 512), SENTINEL, dtype=torch.bfloat16)
    got = out.cuda()
    dequantize_and_gather_k_cache(got, cache, int32([320]).cuda(), None, int32([edges]).cuda(), 64, 0)
    dequantize_and_gather_k_cache(out, small, int32([320]), None, int32([[0, 1, 2, 3, 4]]), 64, 0)
    assert same_bits(got, out)


def test_out_beyond_two_gigabytes() -> None:
    cache = random_pool(3, 4)
    gap = 2**30 + 8  # elements: the second row starts past 2^31 bytes, the third past 2^32
    wide = torch.full((2 * gap + 512,), SENTINEL, dtype=torch.bfloat16, device="cuda")
    seqs, table = int32([12]).cuda(), int32([[2, 0, 1]]).cuda()
    want = torch.full((1, 3, 512), SENTINEL, dtype=torch.bfloat16)
    dequantize_and_gather_k_cache(want, cache, int32([12]), int32([3]), int32([[2, 0, 1]]), 4, 0)
    rows = wide.as_strided((1, 3, 512), (1024, gap, 1))
    dequantize_and_gather_k_cache(rows, like(cache), seqs, int32([3]).cuda(), table, 4, 0)
    assert same_bits(rows, want)
    rows.fill_(SENTINEL)
    assert bool((wide == SENTINEL).all())
    requests = wide.as_strided((3, 3, 512), (gap - 1024, 512, 1))
    seqs, table = int32([12, 11, 10]).cuda(), table.expand(3, 3).contiguous()
    dequantize_and_gather_k_cache(requests, like(cache), seqs, int32([3, 3, 3]).cuda(), table, 4, 0)
    for r, seq_len in enumerate((12, 11, 10)):
        want.fill_(SENTINEL)
        dequantize_and_gather_k_cache(want, cache, int32([seq_len]), int32([3]), int32([[2, 0, 1]]), 4, 0)
        assert same_bits(requests[r], want[0])


def test_nothing_is_launched_without_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    launches: list[Any] = []
    monkeypatch.setattr(gather, "launch_key", lambda *args: launches.append(args))
    out = torch.zeros(2, 8, 512, dtype=torch.bfloat16, device="cuda")
    cache, table = like(random_pool(2, 4)), int32([[0, 1], [1, 0]]).cuda()
    lens = int32([8, 8]).cuda()
    for seqs, blocks, offset in (
        (lens[:0], table[:0], 0),
        (lens, table[:, :0], 0),
        (lens, table, 8),
        (lens, table, 99),
    ):
        dequantize_and_gather_k_cache(out, cache, seqs, None, blocks, 4, offset)
    assert launches == []
    dequantize_and_gather_k_cache(out, cache, lens, None, table, 4, 7)
    assert len(launches) == 1


def test_shapes_and_strides_need_no_new_kernel() -> None:
    cache = random_pool(8, 4)
    odd = random_pool(8, 3)
    for lens in (None, [2]):
        check(cache, [4], lens, tables(1, 2, 8, 0), 4)
        check(odd, [4], lens, tables(1, 2, 8, 0), 3)
    before = compile_.compilations()
    for block_size, extra, requests in ((2, 0, 1), (64, 576, 2), (7, 64, 3)):
        cache = random_pool(12, block_size, extra)
        seqs = [3 * block_size, block_size, 1][:requests]
        check(cache, seqs, None, tables(requests, 4, 12, 1), block_size)
        check(cache, seqs, [2, 9, 1][:requests], tables(requests, 4, 12, 1), block_size, offset=5)
    assert compile_.compilations() == before


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_torch_compile(backend: str) -> None:
    def step(out: torch.Tensor, cache: torch.Tensor, seqs: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        dequantize_and_gather_k_cache(out, cache, seqs * 1, None, table, 4, 0)
        return out + 1

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=backend)
    for requests, columns in ((3, 20), (2, 33)):
        cache, table = random_pool(20, 4), tables(requests, 5, 20, columns)
        seqs = int32([20, 7, 1][:requests])
        want = torch.zeros(requests, columns, 512, dtype=torch.bfloat16)
        out = want.cuda()
        more = compiled(out, like(cache), seqs.cuda(), table.cuda())
        dequantize_and_gather_k_cache(want, cache, seqs, None, table, 4, 0)
        assert same_bits(out, want)
        assert same_bits(more, want + 1)


def test_alignment_that_is_not_supported_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = torch.zeros(60_000, dtype=torch.uint8, device="cuda")
    wide = torch.zeros(2, 8, 520, dtype=torch.bfloat16, device="cuda")
    good = memory.as_strided((2, 4, 584), (2880, 584, 1))
    out = wide[:, :, :512]
    seqs, table = int32([4, 4]).cuda(), int32([[0], [1]]).cuda()
    for this_out, cache, reason in (
        (wide[:, :, 1:513], good, "rows of out must be 16-byte aligned"),
        (torch.zeros(2, 8, 516, dtype=torch.bfloat16, device="cuda")[:, :, :512], good, "rows of out must be 16-byte"),
        (out, memory[4:].as_strided((2, 4, 584), (2880, 584, 1)), "pages of k_cache must be 8-byte aligned"),
        (out, memory.as_strided((2, 4, 584), (2884, 584, 1)), "pages of k_cache must be 8-byte aligned"),
    ):
        with pytest.raises(NotImplementedError, match=f"{reason}.*{FALLBACK_VARIABLE}=reference"):
            dequantize_and_gather_k_cache(this_out, cache, seqs, None, table, 4, 0)
    monkeypatch.setenv(FALLBACK_VARIABLE, "reference")
    with record_calls() as recording:
        dequantize_and_gather_k_cache(wide[:, :, 1:513], good, seqs, None, table, 4, 0)
    assert [call.implementation for call in recording.calls] == ["reference"]
