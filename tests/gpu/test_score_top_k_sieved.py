"""Scores and picks of decode without all scores in memory, on a GPU: the picks of the pair of ops bit for bit."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from cute_kernels import formats
from cute_kernels.indexer import logits_choice
from cute_kernels.indexer.chunks import row_bytes, sieved_bytes
from cute_kernels.runtime.arch import arch_of, multiprocessors
from cute_kernels.runtime.ops import FALLBACK_VARIABLE
from tests.gpu.test_score_top_k import CODES, FP8, INT, POISON, Decode, gen, int32, results, scratch, untouched

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

ops: Any = importlib.import_module("cute_kernels.indexer.ops")
FMT, MXFP4 = formats.INDEXER_FP8, formats.INDEXER_MXFP4


@pytest.fixture(autouse=True)
def sieved(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Calls of any size are sieved; the module that does."""
    if arch_of(0) != logits_choice.ARCH:
        pytest.skip("has no such kernels")
    monkeypatch.delenv(FALLBACK_VARIABLE, raising=False)
    module: Any = importlib.import_module("cute_kernels.indexer.score_top_k_sieved")
    monkeypatch.setattr(module.chunks, "is_sieved", lambda requests, columns, next_n, k: k <= 1024)
    module.choose.cache_clear()
    yield module
    module.choose.cache_clear()


def memory(requests: int, columns: int) -> torch.Tensor:
    size = max(sieved_bytes(requests, multiprocessors(0)), row_bytes(columns))
    workspace = scratch(size)
    assert workspace is not None
    return workspace


def picks(sieved: Any, args: Any, columns: int, k: int, kv_format: str = FMT.id) -> torch.Tensor:
    """By the op, which must have sieved."""
    asked, run = [], sieved.run

    def spy(call: Any) -> bool:
        asked.append(run(call))
        return bool(asked[-1])

    out, whole = results(len(args[2]), k)
    sieved.run = spy
    try:
        workspace = memory(len(args[2]), columns)
        ops.score_top_k_decode(*args, columns, k, kv_format=kv_format, out=out, workspace=workspace)
    finally:
        sieved.run = run
    assert asked == [True]
    assert untouched(whole, out)
    return out


def pair(args: Any, columns: int, k: int, kv_format: str = FMT.id) -> torch.Tensor:
    logits = ops.paged_mqa_logits(*args, None, columns, kv_format=kv_format)
    out = torch.full((len(args[2]), k), POISON, dtype=INT, device="cuda")
    ops.top_k_per_row_decode(logits, 1, args[3], out, len(out), logits.stride(0), logits.stride(1), k)
    return out


def check(sieved: Any, args: Any, columns: int, k: int, kv_format: str = FMT.id) -> None:
    got, want = picks(sieved, args, columns, k, kv_format), pair(args, columns, k, kv_format)
    assert torch.equal(got, want), (k, (got != want).any(1).nonzero()[:5, 0].tolist())


@pytest.mark.parametrize("codes", CODES)
@pytest.mark.parametrize(
    ("requests", "columns", "heads"),
    [(1, 33000, 64), (13, 3500, 64), (40, 20000, 64), (150, 1200, 64), (7, 8192, 16), (3, 140000, 64)],
)
def test_picks_what_the_pair_does(sieved: Any, codes: str, requests: int, columns: int, heads: int) -> None:
    data = Decode(codes, requests, 1, columns, heads)
    for k in (1, 512, 1024):
        check(sieved, data.requests(slice(None)), columns, k)


@pytest.mark.parametrize("shape", ["rising", "falling", "saw", "steps", "one"])
def test_orders_that_are_hard_on_a_list(sieved: Any, shape: str) -> None:
    requests, pages, k = 5, 400, 512
    slots = torch.arange(pages * 64, device="cuda")
    scale = {
        "rising": 1.0 + slots / len(slots),
        "falling": 2.0 - slots / len(slots),
        "saw": 1.0 + slots % 3000 / 3000,
        "steps": 1.0 + slots // 5000 / 8,
        "one": torch.where(slots == 20000, 2.0, 1.0),
    }[shape].float()[:, None]
    pool = FMT.allocate(pages, 64, "cuda")
    ones = torch.ones(len(slots), 128, device="cuda").to(FP8)
    FMT.write_fields(pool, 64, slots, ones.view(torch.uint8), scale.contiguous().view(torch.uint8))
    q = torch.ones(requests, 1, 64, 128, device="cuda").to(FP8)
    w = torch.tensor([1.0, -1.0, 0.0, 1.0, -1.0], device="cuda")[:, None].expand(-1, 64).contiguous()
    lens = int32([[pages * 64], [pages * 64 - 1], [pages * 64], [513], [9000]])
    table = torch.arange(pages, device="cuda").int().repeat(requests, 1)
    args = q, pool, w, lens, table
    for picked in (k, 1024, 3):
        check(sieved, args, pages * 64, picked)


@pytest.mark.parametrize("far", [False, True])
def test_mxfp4(sieved: Any, far: bool) -> None:
    requests, columns, pages, g = 37, 9000, 60, gen(5)
    pool = MXFP4.allocate(pages, 64, "cuda")
    pool.copy_(torch.randint(0, 256, pool.shape, device="cuda", generator=g).to(torch.uint8))
    low, high = (100, 150) if far else (120, 128)
    codes, _ = MXFP4.fields(64)[1]
    whole = MXFP4.pages(pool, 64)
    whole[:, codes:] = torch.randint(low, high, (pages, whole.shape[1] - codes), device="cuda", generator=g).to(
        torch.uint8
    )
    q = torch.randint(0, 256, (requests, 1, 64, 64), device="cuda", generator=g).to(torch.uint8)
    q_scale = torch.randint(low, high, (requests, 1, 64, 4), device="cuda", generator=g).to(torch.uint8)
    w = torch.randn(requests, 64, device="cuda", generator=g)
    lens = torch.randint(-3, columns + 9, (requests, 1), device="cuda", generator=g).int()
    table = torch.randint(-1, pages + 1, (requests, -(-columns // 64)), device="cuda", generator=g).int()
    args = (q, q_scale.view(torch.int32)[..., 0]), pool, w, lens, table
    for k in (1, 512, 1024):
        check(sieved, args, columns, k, MXFP4.id)


def test_same_bits_alone_and_every_time(sieved: Any) -> None:
    data = Decode("exact", 70, 1, 6000)
    args = data.requests(slice(None))
    whole = picks(sieved, args, 6000, 512)
    for _ in range(20):
        assert torch.equal(picks(sieved, args, 6000, 512), whole)
    for r in range(0, 70, 9):
        assert torch.equal(picks(sieved, data.requests(slice(r, r + 1)), 6000, 512), whole[r : r + 1])


def test_a_small_workspace_is_for_scores(sieved: Any) -> None:
    data = Decode("exact", 20, 1, 3000)
    assert torch.equal(data.fused(512, 20), picks(sieved, data.requests(slice(None)), 3000, 512))
