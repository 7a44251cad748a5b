# SPDX-License-Identifier: Apache-2.0
"""Keys merged and records packed on a GPU: sizes that verification leaves out. Other promises: test_promises.py."""

from __future__ import annotations

import itertools

import pytest
import torch

from cute_kernels import formats
from cute_kernels.indexer import reference
from cute_kernels.indexer.ops import merge_top_k_keys
from cute_kernels.kv_cache.ops import pack_records, unpack_records
from cute_kernels.runtime.ops import FALLBACK_VARIABLE
from tests.helpers import raw_bytes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

EMPTY = -(2**63)


@pytest.fixture(autouse=True)
def no_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FALLBACK_VARIABLE, raising=False)


def random_keys(parts: int, rows: int, k: int, kind: str) -> torch.Tensor:
    g = torch.Generator(device="cuda").manual_seed(parts * k)
    shape = (rows, parts * k)
    entries = torch.rand(rows, 2 * parts * k, device="cuda", generator=g).argsort(dim=1)[:, : parts * k]
    scores = torch.randn(shape, device="cuda", generator=g)
    if kind == "levels":
        scores = torch.randint(0, 3, shape, device="cuda", generator=g).float()
    keys = reference.score_keys(scores, entries)
    keys[:, ::9] = EMPTY
    return keys.view(rows, parts, k).transpose(0, 1).contiguous()


@pytest.mark.parametrize("kind", ["normal", "levels"])
@pytest.mark.parametrize("k", [1, 2, 31, 77, 512, 513, 1024, 1500, 2048])
def test_merged_keys_of_any_number(k: int, kind: str) -> None:
    for parts, rows in ((1, 5), (2, 3), (3, 200), (8, 64), (16, 9), (64, 3), (130, 2)):
        keys = random_keys(parts, rows, k, kind)
        want = merge_top_k_keys(keys.cpu())
        assert torch.equal(merge_top_k_keys(keys).cpu(), want), (parts, rows)
        table = torch.randperm(rows * 300, device="cuda").view(rows, 300).int()
        got, right = (
            merge_top_k_keys(keys_, block_table=table_, rows_per_page=8, ranks=parts, rank=parts - 1)
            for keys_, table_ in ((keys, table), (keys.cpu(), table.cpu()))
        )
        assert all(torch.equal(a.cpu(), b) for a, b in zip(got, right, strict=True)), (parts, rows)


def test_merged_keys_in_any_order_every_time() -> None:
    keys = random_keys(8, 64, 512, "levels")
    want = merge_top_k_keys(keys)
    for seed in range(20):
        g = torch.Generator(device="cuda").manual_seed(seed)
        order = torch.randperm(8, device="cuda", generator=g)
        places = torch.randperm(512, device="cuda", generator=g)
        assert torch.equal(merge_top_k_keys(keys[order][:, :, places]), want)


@pytest.mark.parametrize("kv_format", ["fp8_ds_mla/1", "indexer_fp8/1", "compressor_state_256/1"])
def test_records_of_any_number_and_alignment(kv_format: str) -> None:
    """Whole tiles and parts of one, vectors of every width: the bytes of the CPU, and no others."""
    fmt = formats.RECORD_FORMATS[kv_format]
    blocks, size = 40, fmt.record_bytes
    g = torch.Generator().manual_seed(size)
    pool = fmt.allocate(blocks, 31)
    raw_bytes(pool).random_(0, 256, generator=g)
    for records, (first, gap) in itertools.product((1, 33, 129, 1000), ((0, 0), (4, 0), (8, 8), (16, 16), (0, 4))):
        slots = torch.randperm(blocks * 31, generator=g)[:records] - 3
        memory = torch.full((first + records * (size + gap),), 7, dtype=torch.uint8)
        results = []
        for device in ("cpu", "cuda"):
            own, places, cache = memory.to(device), slots.to(device), fmt.allocate(blocks, 31, device)
            raw_bytes(cache).copy_(raw_bytes(pool))
            rows = own[first:].view(records, size + gap)[:, :size]
            pack_records(cache, places, kv_format, out=rows)
            other = fmt.allocate(blocks, 31, device)
            unpack_records(rows, other, places, kv_format)
            results.append((own.cpu(), raw_bytes(other).cpu()))
        assert all(map(torch.equal, *results)), (records, first, gap)


@pytest.mark.parametrize("kv_format", formats.RECORD_FORMATS)
def test_records_beyond_two_gigabytes(kv_format: str) -> None:
    fmt = formats.RECORD_FORMATS[kv_format]
    if torch.cuda.mem_get_info()[0] < 4 * 2**30:
        pytest.skip("needs 4 GiB of GPU memory")
    stride = 3 * 2**30 // fmt.alignment * fmt.alignment // 2
    stride -= stride % 16
    pool = fmt.allocate(2, 64, "cuda", page_stride=stride)
    slots = torch.tensor([127, 0, -1, 64, 2**40, 90], device="cuda")
    records = torch.randint(0, 256, (6, fmt.record_bytes), dtype=torch.uint8, device="cuda")
    unpack_records(records, pool, slots, kv_format)
    records[[2, 4]] = 0
    assert torch.equal(pack_records(pool, slots, kv_format), records)
    assert torch.equal(torch.cat(fmt.read_fields(pool, 64, slots[[0, 5]]), dim=1), records[[0, 5]])
