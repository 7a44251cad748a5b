# SPDX-License-Identifier: Apache-2.0
"""Pools beyond 2^31 and 2^32 bytes: the bits of the same pages, or keys, in a small one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from cute_kernels import formats
from cute_kernels.indexer import select
from cute_kernels.runtime import trust
from cute_kernels.runtime.arch import arch_of
from cute_kernels.runtime.ops import FALLBACK_VARIABLE
from tests.gpu import paged_cases
from tests.gpu.decode_cases import Pool
from tests.gpu.decode_checks import FP8, same_bits
from tests.gpu.prefill_checks import use_kernel
from tests.gpu.test_score_top_k import FMT, Decode, Prefill

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

BYTES = 2**32


@pytest.fixture(autouse=True)
def free_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(FALLBACK_VARIABLE, raising=False)
    torch.cuda.empty_cache()
    yield
    # for tests that run beside
    torch.cuda.empty_cache()


def spread(table: torch.Tensor, pages: int, many: int) -> torch.Tensor:
    """The block table of a pool of `many` pages, from one of `pages`: the first and the last stay that."""
    wide = table.long()
    far = torch.where(wide >= pages, (wide + many - pages).clamp(max=2**31 - 1), wide)
    return torch.where((wide >= 0) & (wide < pages), wide * (many - 1) // (pages - 1), far).int()


@pytest.mark.parametrize("kernel", ["own", "portable"])
@pytest.mark.parametrize(("heads", "ratio", "width"), [(64, 4, 200), (128, 4, 200), (64, 128, None)])
def test_prefill_over_large_pools(
    heads: int, ratio: int, width: int | None, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_kernel(kernel, monkeypatch)
    call = paged_cases.make(heads=heads, ratio=ratio, width=width, rows=(64, 64))
    want = paged_cases.check(call)
    assert call.compressed is not None
    assert call.compressed_table is not None
    large = []
    for pool, table in ((call.pool, call.table), (call.compressed, call.compressed_table)):
        wide = Pool(FP8, BYTES // pool.stride + 100, pool.rows)
        pages = torch.arange(pool.pages, device=table.device)
        there = spread(pages, pool.pages, wide.pages).long()
        wide.data[there], wide.scales[there] = pool.data, pool.scales
        large.append((wide, spread(table, pool.pages, wide.pages)))
    (call.pool, call.table), (call.compressed, call.compressed_table) = large
    assert same_bits(paged_cases.run(call), want)


@pytest.fixture
def own_scores() -> Iterator[None]:
    if not select.has_own(arch_of(0), 64):
        pytest.skip("scores have only the portable kernel")
    with trust.choose(own=True):
        yield


@pytest.mark.usefixtures("own_scores")
@pytest.mark.parametrize("next_n", [1, 2])
def test_picks_from_a_large_pool(next_n: int) -> None:
    data = Decode("normal", 20, next_n, 3500)
    want = data.fused(512)
    pages, small = data.pool.shape[0], formats.INDEXER_FP8.pages(data.pool, 64)
    many = BYTES // (data.pool.stride(0) * data.pool.element_size()) + 100
    pool = FMT.allocate(many, 64, "cuda")
    there = spread(torch.arange(pages, device="cuda"), pages, many).long()
    formats.INDEXER_FP8.pages(pool, 64)[there] = small
    data.pool, data.table = pool, spread(data.table, pages, many)
    assert torch.equal(data.unfused(512), want)
    assert torch.equal(data.fused(512), want)


@pytest.mark.usefixtures("own_scores")
def test_picks_of_many_keys() -> None:
    data, keys, width = Prefill("normal", 5, 900), BYTES // 128 + 1000, 600
    data.start.clamp_(min=0)
    want = data.fused(512, width)
    k = torch.zeros(keys, 128, dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn)
    scale = torch.zeros(keys, device="cuda")
    k[-900:].view(torch.uint8).copy_(data.k.view(torch.uint8))
    scale[-900:] = data.scale
    data.k, data.scale = k, scale
    for bound in (data.start, data.end):
        bound += keys - 900
    assert torch.equal(data.fused(512, width), want)
