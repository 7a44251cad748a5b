# SPDX-License-Identifier: Apache-2.0
"""Scores and picks in one op on a GPU: those of the pair of ops bit for bit and, of exact scores, of a stable sort."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from cute_kernels import formats
from cute_kernels.indexer import select
from cute_kernels.indexer.chunks import candidate_columns, row_bytes
from cute_kernels.indexer.verify_cases import candidates_of
from cute_kernels.runtime import trust
from cute_kernels.runtime.arch import arch_of
from cute_kernels.runtime.ops import FALLBACK_VARIABLE
from tests.indexer import meaning
from tests.indexer.meaning import HIGH, INT, LOW

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

ops: Any = importlib.import_module("cute_kernels.indexer.ops")
FMT = formats.INDEXER_FP8
FP8 = torch.float8_e4m3fn
POISON = -77_777


@pytest.fixture(autouse=True)
def own_without_fallback(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(FALLBACK_VARIABLE, raising=False)
    if not select.has_own(arch_of(0), 64):
        pytest.skip("scores have only the portable kernel")
    with trust.choose(own=True):
        yield


def gen(seed: int) -> torch.Generator:
    return torch.Generator(device="cuda").manual_seed(seed)


def int32(values: Any) -> torch.Tensor:
    return torch.as_tensor(values).to(device="cuda", dtype=INT)


def choice(values: list[float], *shape: int, seed: int) -> torch.Tensor:
    picked = torch.randint(0, len(values), shape, device="cuda", generator=gen(seed))
    return torch.tensor(values, device="cuda")[picked]


def normal_codes(*shape: int, seed: int) -> torch.Tensor:
    return (torch.randn(shape, device="cuda", generator=gen(seed)) * 8).to(FP8)


def exact_codes(*shape: int, seed: int) -> torch.Tensor:
    """Whose products are sums of few bits: scores are exact, and many are equal."""
    return choice([0.0, 0.0, 0.0, 1.0, -1.0, 2.0], *shape, seed=seed).to(FP8)


def same_codes(*shape: int, seed: int) -> torch.Tensor:
    return torch.ones(shape, device="cuda").to(FP8)


def nan_codes(*shape: int, seed: int) -> torch.Tensor:
    """With NaN in a third of the keys."""
    x = normal_codes(*shape, seed=seed)
    x.view(torch.uint8).view(-1, shape[-1])[::3, 5] = 0x7F
    return x


CODES = {"normal": normal_codes, "exact": exact_codes, "equal": same_codes, "nan": nan_codes}


def scratch(size: int) -> torch.Tensor | None:
    """Workspace with memory around it, all NaN."""
    return torch.full((size // 4 + 8,), torch.nan, device="cuda")[4:-4] if size else None


def results(rows: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    whole = torch.full((rows + 2, k + 3), POISON, dtype=INT, device="cuda")
    return whole[1:-1, 2 : k + 2], whole


def untouched(whole: torch.Tensor, view: torch.Tensor) -> bool:
    rest = whole.clone()
    rest.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(POISON)
    return bool((rest == POISON).all())


# Contiguous keys


class Prefill:
    """Queries, keys, weights and windows of all kinds."""

    def __init__(self, codes: str, rows: int, keys: int, heads: int = 64, seed: int = 0) -> None:
        self.q = (exact_codes if codes == "nan" else CODES[codes])(rows, heads, 128, seed=seed)
        self.k, self.heads = CODES[codes](keys, 128, seed=seed + 1), heads
        self.scale = choice([0.5, 1.0, 2.0] if codes != "equal" else [1.0], keys, seed=seed + 2)
        self.w = choice([0.0, 1.0, -1.0, 0.5] if codes != "equal" else [0.5], rows, heads, seed=seed + 3)
        start, end = meaning.ranges(rows, keys, seed)
        self.start, self.end = start.cuda(), end.cuda()

    def rows(self, rows: slice) -> Any:
        return self.q[rows], (self.k, self.scale), self.w[rows], self.start[rows], self.end[rows]

    def unfused(self, k: int, width: int = 0, rows: slice = slice(None)) -> torch.Tensor:
        logits = ops.mqa_logits(*self.rows(rows), False, max_seqlen_k=width)
        start, end = self.start[rows].long(), self.end[rows].long().clamp(max=len(self.k))
        if width:
            start, end = start.clamp(min=0) - start, end - start
        out = torch.full((len(start), k), POISON, dtype=INT, device="cuda")
        bounds = (x.clamp(LOW, HIGH).int() for x in (start, end))
        ops.top_k_per_row_prefill(logits, *bounds, out, len(start), logits.stride(0), logits.stride(1), k)
        return out

    def fused(self, k: int, width: int = 0, fit: int = 3, rows: slice = slice(None)) -> torch.Tensor:
        """With a workspace for `fit` rows."""
        columns = width or len(self.k)
        workspace = scratch(fit * row_bytes(columns) if columns > k else 0)
        args = self.rows(rows)
        out, whole = results(len(args[0]), k)
        ops.score_top_k_prefill(*args, k, max_seqlen_k=width, out=out, workspace=workspace)
        assert untouched(whole, out)
        return out


@pytest.mark.parametrize("codes", CODES)
@pytest.mark.parametrize(("rows", "keys", "heads"), [(1, 5000, 64), (23, 1531, 64), (40, 700, 32), (9, 70, 16)])
def test_prefill_picks_what_the_pair_does(codes: str, rows: int, keys: int, heads: int) -> None:
    data = Prefill(codes, rows, keys, heads)
    for k in (1, 64, 512):
        for width in (0, 600):
            want = data.unfused(k, width)
            for fit in (1, 3, 8, rows + 5):
                got = data.fused(k, width, fit)
                assert torch.equal(got, want), (k, width, fit, (got != want).any(1).nonzero()[:5, 0].tolist())


def test_prefill_of_several_requests() -> None:
    """Each row sees the keys of its own request, which come after those of others."""
    counts = [700, 3000, 40, 1200]
    data = Prefill("normal", 64, sum(counts))
    first = np.cumsum([0, *counts[:-1]])
    of_row = np.arange(64) // 16
    data.start = int32(first[of_row])
    data.end = int32([first[r] + max(0, counts[r] - i % 16 * 3) for i, r in enumerate(of_row)])
    want = data.unfused(512)
    assert torch.equal(data.fused(512, 0, 10), want)
    assert torch.equal(data.fused(512, 3000, 10), want)


def test_a_row_of_a_million_keys() -> None:
    data = Prefill("exact", 3, 1 << 20)
    assert torch.equal(data.fused(512, 0, 1), data.unfused(512))


def exact_scores(q: torch.Tensor, k: torch.Tensor, w: torch.Tensor, scale: torch.Tensor) -> np.ndarray:
    """float64 [rows, keys] on the CPU."""
    q, k, w, scale = (x.cpu().double() for x in (q, k, w, scale))
    return ((torch.einsum("mhd,nd->mhn", q, k).relu() * w[:, :, None]).sum(1) * scale).numpy()


def test_exact_prefill_picks_are_those_of_a_stable_sort() -> None:
    data = Prefill("exact", 30, 900)
    scores = exact_scores(data.q, data.k, data.w, data.scale)
    got = data.fused(100).cpu().numpy()
    for r, (start, end) in enumerate(zip(data.start.tolist(), data.end.tolist(), strict=True)):
        row = scores[r, max(start, 0) : max(min(end, 900), max(start, 0))]
        best = np.sort(np.argsort(-row, kind="stable")[:100])
        assert np.array_equal(got[r], np.concatenate([best, np.full(100 - len(best), -1)])), r


def test_prefill_same_bits_alone_and_every_time() -> None:
    data = Prefill("exact", 37, 3000)
    whole = data.fused(512, 0, 9)
    for i in range(20):
        assert torch.equal(data.fused(512, 0, 1 + i), whole)
    for r in range(0, 37, 5):
        assert torch.equal(data.fused(512, 0, 1, slice(r, r + 1))[0], whole[r])


# Keys in pages


class Decode:
    """Queries, pages, weights, lengths and block tables with garbage in all of them."""

    def __init__(self, codes: str, requests: int, next_n: int, columns: int, heads: int = 64, seed: int = 0) -> None:
        width, pages = -(-columns // 64) - (columns > 3000), 50
        q = exact_codes if codes == "nan" else CODES[codes]
        self.q = q(requests, next_n, heads, 128, seed=seed)
        keys, self.columns = CODES[codes](pages * 64, 128, seed=seed + 1), columns
        self.scale = choice([0.5, 1.0, 2.0] if codes != "equal" else [1.0], pages * 64, 1, seed=seed + 2)
        self.pool = FMT.allocate(pages, 64, "cuda")
        slots = torch.arange(pages * 64, device="cuda")
        FMT.write_fields(self.pool, 64, slots, keys.view(torch.uint8), self.scale.view(torch.uint8))
        self.keys = keys
        values = [0.0, 1.0, -1.0, 0.5] if codes != "equal" else [0.5]
        self.w = choice(values, requests * next_n, heads, seed=seed + 3)
        g = gen(seed + 4)
        low = 0 if codes == "equal" else -1
        self.table = torch.randint(low, pages - low, (requests, width), device="cuda", generator=g).int()
        self.lens = torch.randint(-9, columns + 9, (requests, next_n), device="cuda", generator=g).int()
        special = int32([columns, 0, LOW, HIGH, -1, 1, 512, 513, columns + 1, columns - 1])
        flat = self.lens.view(-1)
        flat[: len(special)] = special[: len(flat)]

    def requests(self, own: slice) -> Any:
        next_n = self.q.shape[1]
        rows = torch.arange(len(self.w), device="cuda").view(-1, next_n)[own].flatten()
        return self.q[own], self.pool, self.w[rows], self.lens[own], self.table[own]

    def unfused(self, k: int) -> torch.Tensor:
        logits = ops.paged_mqa_logits(*self.requests(slice(None)), None, self.columns)
        out = torch.full((len(self.w), k), POISON, dtype=INT, device="cuda")
        strides = logits.stride(0), logits.stride(1)
        ops.top_k_per_row_decode(logits, self.q.shape[1], self.lens, out, len(self.w), *strides, k)
        return out

    def fused(self, k: int, fit: int = 3, own: slice = slice(None)) -> torch.Tensor:
        """With a workspace for `fit` requests."""
        args, next_n = self.requests(own), self.q.shape[1]
        workspace = scratch(fit * next_n * row_bytes(self.columns) if self.columns > k else 0)
        out, whole = results(len(args[2]), k)
        ops.score_top_k_decode(*args, self.columns, k, out=out, workspace=workspace)
        assert untouched(whole, out)
        return out


@pytest.mark.parametrize("codes", CODES)
@pytest.mark.parametrize(
    ("requests", "next_n", "columns", "heads"),
    [(1, 1, 33000, 64), (13, 1, 3500, 64), (150, 1, 1200, 64), (7, 2, 8192, 64), (5, 3, 2000, 48), (3, 7, 900, 64)],
)
def test_decode_picks_what_the_pair_does(codes: str, requests: int, next_n: int, columns: int, heads: int) -> None:
    data = Decode(codes, requests, next_n, columns, heads)
    for k in (1, 512, 1024):
        want = data.unfused(k)
        for fit in (1, 4, requests):
            got = data.fused(k, fit)
            assert torch.equal(got, want), (k, fit, (got != want).any(1).nonzero()[:5, 0].tolist())


def test_exact_decode_picks_are_those_of_a_stable_sort() -> None:
    data, k = Decode("exact", 6, 2, 1500), 77
    got = data.fused(k).cpu().numpy()
    for row in range(12):
        length = min(max(int(data.lens.view(-1)[row]), 0), 1500)
        page = data.table[row // 2, torch.arange(1500, device="cuda") // 64]
        slots = page.long().clamp(0, 49) * 64 + torch.arange(1500, device="cuda") % 64
        query, weights = data.q[row // 2, row % 2][None], data.w[row][None]
        scores = exact_scores(query, data.keys[slots], weights, data.scale[slots, 0])[0]
        scores[((page < 0) | (page >= 50)).cpu().numpy()] = -np.inf
        best = np.sort(np.argsort(-scores[:length], kind="stable")[:k])
        assert np.array_equal(got[row], np.concatenate([best, np.full(k - len(best), -1)])), row


def test_decode_same_bits_alone_and_every_time() -> None:
    data = Decode("exact", 17, 2, 5000)
    whole = data.fused(512, 17)
    for i in range(20):
        assert torch.equal(data.fused(512, 1 + i % 17), whole)
    for r in range(0, 17, 3):
        assert torch.equal(data.fused(512, 1, slice(r, r + 1)), whole[2 * r : 2 * r + 2])


def test_no_keys_and_no_rows() -> None:
    data = Decode("normal", 4, 1, 700)
    empty = FMT.allocate(0, 64, "cuda")
    got = ops.score_top_k_decode(data.q, empty, data.w, data.lens, data.table, 700, 512)
    column = torch.arange(512, device="cuda", dtype=INT)
    assert torch.equal(got, column.where(column < data.lens.clamp(0, 512), column.new_tensor(-1)))
    assert ops.score_top_k_decode(data.q[:0], data.pool, data.w[:0], data.lens[:0], data.table[:0], 700, 9).shape == (
        0,
        9,
    )
    rows = Prefill("normal", 5, 600)
    none = rows.k[:0], rows.scale[:0]
    assert (ops.score_top_k_prefill(rows.q, none, rows.w, rows.start, rows.end, 5) == -1).all()


def test_memory_of_a_long_prefill() -> None:
    """4096 rows and 262144 keys: 4.3 GB of scores, of which 1 GB is there at a time."""
    rows, keys, k = 4096, 1 << 18, 512
    data = Prefill("normal", rows, keys)
    data.start, data.end = int32(torch.zeros(rows)), int32(torch.arange(rows) // 4 + keys - 1024)
    args = data.rows(slice(None))
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    got = ops.score_top_k_prefill(*args, k)
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before - got.nbytes <= 1 << 30
    assert ops.score_top_k_workspace_size(rows, keys, k) <= 1 << 30
    some = slice(4000, 4032)
    assert torch.equal(got[some], data.unfused(k, 0, some))


# Candidate blocks

BLOCKS, PICKS = 100, 64


def chosen_blocks(lengths: torch.Tensor) -> torch.Tensor:
    return candidates_of(torch.Generator().manual_seed(7), lengths.cpu(), BLOCKS).cuda()


def leave_out_others(logits: torch.Tensor, candidates: torch.Tensor, start: torch.Tensor) -> None:
    """Scores of keys outside candidate blocks, which are counted from the rows' starts, become -inf."""
    rows, columns = logits.shape
    key = torch.arange(columns, device="cuda") - start[:, None]
    is_in = torch.zeros(rows, columns // 8 + 2, dtype=torch.bool, device="cuda")
    is_in.scatter_(1, torch.where(candidates < 0, is_in.shape[1] - 1, candidates).long(), True)
    logits.masked_fill_(~is_in.gather(1, key.clamp(min=0) // 8) | (key < 0), -torch.inf)


@pytest.mark.parametrize("codes", ["normal", "exact", "nan"])
@pytest.mark.parametrize(
    ("requests", "next_n", "columns", "heads"),
    [(1, 1, 33000, 64), (13, 1, 3500, 32), (150, 1, 1200, 32), (7, 6, 8192, 32)],
)
def test_decode_picks_among_candidates(codes: str, requests: int, next_n: int, columns: int, heads: int) -> None:
    data = Decode(codes, requests, next_n, columns, heads)
    candidates = chosen_blocks(data.lens.clamp(0, columns))
    args = data.requests(slice(None))
    logits = ops.paged_mqa_logits(*args, None, columns)
    leave_out_others(logits, candidates, int32(torch.zeros(len(data.w))))
    want = torch.full((len(data.w), PICKS), POISON, dtype=INT, device="cuda")
    strides = logits.stride(0), logits.stride(1)
    ops.top_k_per_row_decode(logits, next_n, data.lens, want, len(data.w), *strides, PICKS)
    for fit in (1, requests):
        out, whole = results(len(data.w), PICKS)
        workspace = scratch(fit * next_n * row_bytes(candidate_columns(BLOCKS)))
        ops.score_top_k_decode(*args, columns, PICKS, out=out, workspace=workspace, candidates=candidates)
        assert untouched(whole, out)
        assert torch.equal(out, want), (fit, (out != want).any(1).nonzero()[:5, 0].tolist())


@pytest.mark.parametrize("codes", ["normal", "exact", "nan"])
@pytest.mark.parametrize(("rows", "keys", "heads"), [(1, 5000, 64), (23, 9531, 32), (300, 1700, 32)])
def test_prefill_picks_among_candidates(codes: str, rows: int, keys: int, heads: int) -> None:
    data = Prefill(codes, rows, keys, heads)
    data.start, data.end = data.start.clamp(0, keys), data.end.clamp(0, HIGH)
    candidates = chosen_blocks((data.end.clamp(max=keys) - data.start).clamp(min=0))
    args = data.rows(slice(None))
    logits = ops.mqa_logits(*args, False)
    leave_out_others(logits, candidates, data.start)
    want = torch.full((rows, PICKS), POISON, dtype=INT, device="cuda")
    bounds = data.start, data.end.clamp(max=keys)
    ops.top_k_per_row_prefill(logits, *bounds, want, rows, logits.stride(0), logits.stride(1), PICKS)
    for fit in (1, rows):
        out, whole = results(rows, PICKS)
        workspace = scratch(fit * row_bytes(candidate_columns(BLOCKS)))
        ops.score_top_k_prefill(*args, PICKS, out=out, workspace=workspace, candidates=candidates)
        assert untouched(whole, out)
        assert torch.equal(out, want), (fit, (out != want).any(1).nonzero()[:5, 0].tolist())
