"""MXFP4 scores by the architecture's own kernel, against float64, and whatever else the two ops promise.

The bound is that of FP8 scores, 2^-12 of what a score is made of, whatever the scales in a row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from cute_kernels import formats, numerics
from cute_kernels.indexer import logits_choice
from cute_kernels.indexer.ops import mqa_logits, paged_mqa_logits
from cute_kernels.runtime import trust
from cute_kernels.runtime.arch import arch_of
from cute_kernels.runtime.ops import FALLBACK_VARIABLE
from tests.gpu.test_indexer_logits import (
    GARBAGE,
    SHARE,
    by_kernel,
    compare,
    gen,
    int32,
    poisoned,
    ranges,
    seen_columns,
    whole_range,
)
from tests.helpers import POISON_BYTE, bits, poisoned_pool, raw_bytes
from tests.indexer.meaning import HIGH, INT, LOW

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@pytest.fixture(autouse=True)
def own_without_fallback(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(FALLBACK_VARIABLE, raising=False)
    if not logits_choice.has_own(arch_of(0), 64):
        pytest.skip("there is only the portable kernel")
    with trust.choose(own=True):
        yield


FORMATS = [formats.INDEXER_MXFP4, formats.INDEXER_MXFP4_WIDE]
NEAR, FAR = (112, 127), (97, 138)
"""Scale bytes (from, below) of which all of a row's fit one e4m3 row, and of which most do not: 2^-30 to 2^10."""


def rows_of(*shape: int, seed: int, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed codes [..., 64] and scales, int32 [...]. kind: "near", "far", or "some", every seventh row far."""
    g = gen(seed)
    packed = torch.randint(0, 256, (*shape, 64), device="cuda", generator=g, dtype=torch.uint8)
    near, far = (torch.randint(*r, (*shape, 4), device="cuda", generator=g, dtype=torch.uint8) for r in (NEAR, FAR))
    lone = torch.randint(0, 7, (*shape, 1), device="cuda", generator=g) == 0
    byte = {"near": near, "far": far, "some": torch.where(lone, far, near)}[kind]
    return packed, byte.view(torch.int32)[..., 0]


def values(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """float64 [..., 128]."""
    return numerics.dequantize_e2m1(packed.view(torch.uint8), scale[..., None].contiguous().view(torch.uint8))


@dataclass
class Data:
    """Queries [rows, heads] and keys, each with their scales; weights with zeros and both signs."""

    q: torch.Tensor
    q_scale: torch.Tensor
    w: torch.Tensor
    k: torch.Tensor
    k_scale: torch.Tensor

    @classmethod
    def make(cls, rows: int, heads: int, keys: int, seed: int = 0, of_q: str = "near", of_k: str = "near") -> Data:
        g = gen(seed + 1000)
        w = torch.randn(rows, heads, device="cuda", generator=g)
        w[torch.rand(rows, heads, device="cuda", generator=g) < 0.1] = 0.0
        q, q_scale = rows_of(rows, heads, seed=seed, kind="near" if of_q == "one" else of_q)
        if of_q == "one":  # the last row, in one head only
            q_scale[-1, -1] = 0x6170707F
        k, k_scale = rows_of(keys, seed=seed + 1, kind=of_k)
        if rows > 2:
            q[1] = 0
            w[2] = 0.0
        return cls(q, q_scale, w, k, k_scale)

    def part(self, rows: Any = slice(None), keys: Any = slice(None)) -> Data:
        return Data(self.q[rows], self.q_scale[rows], self.w[rows], self.k[keys], self.k_scale[keys])

    def exact(self) -> tuple[torch.Tensor, torch.Tensor]:
        """float64 scores [rows, keys], and how far off they may be."""
        q, k, w = values(self.q, self.q_scale), values(self.k, self.k_scale), self.w.double()
        scores = torch.empty(q.shape[0], k.shape[0], dtype=torch.float64, device="cuda")
        bounds = torch.empty_like(scores)
        for m in range(q.shape[0]):
            scores[m] = ((q[m] @ k.T).relu() * w[m][:, None]).sum(0)
            bounds[m] = ((q[m].abs() @ k.abs().T) * w[m].abs()[:, None]).sum(0) * SHARE
        return scores, bounds

    def score(self, start: torch.Tensor, end: torch.Tensor, clean: bool = True, **kwargs: Any) -> torch.Tensor:
        keys = self.k, self.k_scale
        return by_kernel(mqa_logits, (self.q, self.q_scale), keys, self.w, start, end, clean, **kwargs)

    def score_pages(self, pool: torch.Tensor, lens: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """args: block table, columns"""
        lead = tuple(lens.shape)
        q = self.q.view(*lead, *self.q.shape[1:]), self.q_scale.view(*lead, self.q_scale.shape[1])
        fmt = {fmt.row_elements: fmt.id for fmt in FORMATS}[pool.shape[2]]
        return by_kernel(paged_mqa_logits, q, pool, self.w, lens, args[0], None, args[1], kv_format=fmt, **kwargs)


def check(data: Data, start: torch.Tensor, end: torch.Tensor, clean: bool = True, width: int = 0) -> torch.Tensor:
    rows, keys = data.q.shape[0], data.k.shape[0]
    columns = width or keys
    out, whole = poisoned(rows, columns)
    data.score(start, end, clean, max_seqlen_k=width, out=out)
    seen, key = seen_columns(start, end, keys, columns, width > 0)
    scores, bounds = data.exact()
    key = key.clamp(0, keys - 1).expand(rows, columns)
    compare(whole, out, scores.gather(1, key), bounds.gather(1, key), seen, clean)
    return out


KINDS = [("near", "near"), ("near", "some"), ("some", "near"), ("one", "near"), ("some", "some"), ("far", "far")]


@pytest.mark.parametrize(("of_q", "of_k"), KINDS)
@pytest.mark.parametrize(("rows", "keys"), [(1, 64), (4, 128), (3, 1), (7, 63), (64, 1000), (131, 4097)])
def test_whole_ranges(rows: int, keys: int, of_q: str, of_k: str) -> None:
    check(Data.make(rows, 64, keys, seed=rows + keys, of_q=of_q, of_k=of_k), *whole_range(rows, keys))


@pytest.mark.parametrize("heads", [16, 32, 48, 64])
@pytest.mark.parametrize("clean", [False, True])
@pytest.mark.parametrize("kind", ["near", "some"])
def test_ranges_of_all_kinds(heads: int, clean: bool, kind: str) -> None:
    for rows, keys in ((13, 37), (65, 700), (200, 3001)):
        check(Data.make(rows, heads, keys, seed=rows, of_q=kind, of_k=kind), *ranges(rows, keys), clean)


@pytest.mark.parametrize("clean", [False, True])
@pytest.mark.parametrize("width", [1, 33, 700, 900])
def test_compressed_form(width: int, clean: bool) -> None:
    for rows in (5, 66):
        check(Data.make(rows, 64, 700, seed=width), *ranges(rows, 700), clean, width)


def test_every_spread_of_scales_in_a_row() -> None:
    """One block 0 to 40 binary orders below the others, or above, of keys and of queries: up to 14 in one e4m3 row."""
    for above in (False, True):
        data = Data.make(41, 16, 41, seed=3)
        far = torch.arange(41, device="cuda", dtype=INT)
        byte = torch.full((41, 4), 97 if above else 137, dtype=torch.uint8, device="cuda")
        byte[torch.arange(41), torch.arange(41) % 4] += (far if above else -far).to(torch.uint8)
        data.k_scale = byte.view(torch.int32)[:, 0]
        data.q_scale = byte.view(torch.int32)[:, :1].repeat(1, 16)
        check(data, *whole_range(41, 41))


def test_a_large_scale_over_codes_that_are_zero() -> None:
    """What remains of a row is small, and exact all the same."""
    for of_q, of_k in ((True, False), (False, True), (True, True)):
        data = Data.make(5, 32, 70, seed=5)
        for codes, scale, chosen in ((data.q, data.q_scale, of_q), (data.k, data.k_scale, of_k)):
            if chosen:
                scale.view(torch.uint8).view(*scale.shape, 4)[:] = torch.tensor([137, 97, 99, 98], device="cuda").byte()
                codes[..., :16] = 0
        check(data, *whole_range(5, 70))


def test_strided_inputs() -> None:
    data = Data.make(21, 64, 300, of_q="some", of_k="some")
    start, end = ranges(21, 300)
    want = check(data, start, end)
    byte = torch.uint8
    views = Data(
        torch.zeros(21, 66, 128, dtype=byte, device="cuda")[:, 1:-1, 16:80],
        torch.zeros(21, 71, dtype=INT, device="cuda")[:, 3:67],
        torch.zeros(21, 71, device="cuda")[:, 3:67],
        torch.zeros(300, 80, dtype=byte, device="cuda")[:, 16:].view(torch.int8),
        torch.zeros(303, dtype=INT, device="cuda")[1:301],
    )
    for name, view in vars(views).items():
        view.copy_(getattr(data, name).view(view.dtype))
    assert torch.equal(bits(views.score(start, end)), bits(want))


def test_nan_scales_and_weights() -> None:
    """NaN stays in its row or column, and none gets lost."""
    data = Data.make(10, 64, 200)
    start, end = whole_range(10, 200)
    first = check(data, start, end)
    for scale, at in ((data.q_scale[3, 5:6], 2), (data.k_scale[70:71], 0)):
        scale.view(torch.uint8)[at] = 255
    data.w[8, 63] = float("nan")
    got = data.score(start, end)
    is_nan = torch.zeros_like(got, dtype=torch.bool)
    is_nan[3], is_nan[8], is_nan[:, 70] = True, True, True
    assert torch.equal(got.isnan(), is_nan)
    assert torch.equal(got[~is_nan], first[~is_nan])


@pytest.mark.parametrize("kind", ["near", "some"])
def test_bits_do_not_depend_on_the_batch(kind: str) -> None:
    """The score of a row and a key is the same in every group, block, call and op, whatever rows are beside it."""
    rows, keys = 150, 3000
    data = Data.make(rows, 64, keys, of_q=kind, of_k=kind)
    first = check(data, *whole_range(rows, keys))
    for _ in range(20):
        assert torch.equal(bits(first), bits(data.score(*whole_range(rows, keys))))
    for a, b in ((0, 1), (1, 3), (5, 8), (17, 18), (100, 150)):
        part = data.part(slice(a, b))
        assert torch.equal(bits(part.score(*whole_range(b - a, keys))), bits(first[a:b]))
    part = data.part(keys=slice(640, 1000))
    assert torch.equal(bits(part.score(*whole_range(rows, 360))), bits(first[:, 640:1000]))
    pool, table = paged(data, [keys], 64)
    for next_n in (1, 2, 3, 4, 5, 150):
        lens = torch.full((1, next_n), keys, dtype=INT, device="cuda")
        got = data.part(slice(0, next_n)).score_pages(pool, lens, table, keys)
        assert torch.equal(bits(got), bits(first[:next_n])), next_n


# Paged keys


def paged(
    data: Data, lengths: list[int], page_rows: int, fmt: Any = FORMATS[0], poison: int = POISON_BYTE
) -> tuple[torch.Tensor, torch.Tensor]:
    """A poisoned pool with the keys, request after request, on shuffled pages, and its table; what lies past a
    request's pages is garbage."""
    counts = [-(-n // page_rows) for n in lengths]
    pool = poisoned_pool(fmt, sum(counts) + 2, page_rows, 576, "cuda")
    raw_bytes(pool).fill_(poison)
    order = torch.randperm(sum(counts) + 2, device="cuda", generator=gen(3))
    width = max([*counts, 0]) + 2
    table = int32(GARBAGE).repeat(len(lengths), width)[:, :width].contiguous()
    used, key = 0, 0
    for r, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        table[r, :count] = order[used : used + count].to(INT)
        entries = torch.arange(length, device="cuda")
        slots = table[r].long()[entries // page_rows] * page_rows + entries % page_rows
        part = slice(key, key + length)
        fmt.write_fields(pool, page_rows, slots, data.k[part], data.k_scale[part, None].contiguous().view(torch.uint8))
        used, key = used + count, key + length
    return pool, table


def check_paged(
    data: Data,
    keys: list[int],
    lens: torch.Tensor,
    page_rows: int = 64,
    clean: bool = False,
    columns: int | None = None,
    missing: Any = (),
    fmt: Any = FORMATS[0],
) -> torch.Tensor:
    """keys: of each request, in the data's order; missing: (request, column) of the table without a page."""
    requests, next_n = lens.shape
    columns = max([1, *keys]) + 7 if columns is None else columns
    pool, table = paged(data, keys, page_rows, fmt)
    for i, (r, column) in enumerate(missing):
        table[r, column] = (*GARBAGE, pool.shape[0])[i % 6]
    before = raw_bytes(pool).clone()
    out, whole = poisoned(requests * next_n, columns)
    data.score_pages(pool, lens, table, columns, clean_logits=clean, out=out)
    assert torch.equal(raw_bytes(pool), before)
    scores = torch.full((requests * next_n, columns), -torch.inf, dtype=torch.float64, device="cuda")
    bounds = torch.zeros_like(scores)
    begin = 0
    for r, count in enumerate(keys):
        rows = slice(r * next_n, (r + 1) * next_n)
        own = data.part(rows, slice(begin, begin + count)).exact()
        used = min(count, columns)
        for target, value in zip((scores, bounds), own, strict=True):
            target[rows, :used] = value[:, :used]
        begin += count
    for r, column in missing:
        rows, gone = slice(r * next_n, (r + 1) * next_n), slice(column * page_rows, (column + 1) * page_rows)
        scores[rows, gone], bounds[rows, gone] = -torch.inf, 0.0
    seen = torch.arange(columns, device="cuda")[None] < lens.reshape(-1, 1)
    compare(whole, out, scores, bounds, seen, clean)
    return out


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.id)
@pytest.mark.parametrize("page_rows", [8, 16, 64, 128, 192, 24])
@pytest.mark.parametrize("next_n", [1, 2, 3, 4])
def test_paged(page_rows: int, next_n: int, fmt: Any) -> None:
    keys = [1, 64, 65, 0, 200, 1037, 63, 500]
    data = Data.make(len(keys) * next_n, 64, sum(keys), seed=page_rows, of_k="some")
    lens = torch.tensor(keys, dtype=INT)[:, None].repeat(1, next_n) - torch.arange(next_n, dtype=INT).flip(0)
    check_paged(data, keys, lens.cuda(), page_rows, fmt=fmt)
    check_paged(data, keys, lens.cuda(), page_rows, clean=True, columns=900, fmt=fmt)


@pytest.mark.parametrize("heads", [16, 32, 48, 64])
@pytest.mark.parametrize("next_n", [1, 2, 5, 13])
def test_paged_groups_of_rows(heads: int, next_n: int) -> None:
    keys = [300, 1, 129]
    data = Data.make(3 * next_n, heads, sum(keys), seed=next_n, of_q="some", of_k="some")
    g = torch.Generator().manual_seed(next_n)
    lens = torch.stack([torch.randint(-3, n + 1, (next_n,), generator=g) for n in keys]).to(INT)
    check_paged(data, keys, lens.cuda(), clean=True)


@pytest.mark.parametrize("requests", [1, 31, 32, 33, 200, 1000])
def test_many_requests(requests: int) -> None:
    keys = [(37 * r) % 190 for r in range(requests)]
    data = Data.make(requests, 64, sum(keys) or 1, seed=requests)
    check_paged(data, keys, int32(keys)[:, None], clean=True)


def test_one_long_request_among_short_ones() -> None:
    keys = [3, 20000, 0, 64, 1]
    data = Data.make(10, 64, sum(keys))
    check_paged(data, keys, int32(keys)[:, None].repeat(1, 2), clean=True)


@pytest.mark.parametrize("page_rows", [8, 64])
def test_lengths_and_pages_that_are_wrong(page_rows: int) -> None:
    """Rows beyond the table and pages that do not exist score -inf; lengths of any size stay inside the scores."""
    keys = [400, 400, 400, 400]
    data = Data.make(8, 64, 1600)
    missing = [(0, 0), (1, 2), (1, 3), (2, 5), (3, 1), (3, 0), (0, 5)]
    lens = int32([[400, 399], [-1, 400], [0, 1], [LOW, 100]])
    check_paged(data, keys, lens, page_rows, clean=True, missing=missing)
    pool, table = paged(data, keys, page_rows)
    out, whole = poisoned(8, 700)
    lens = int32([[HIGH, 401], [650, 700], [701, 0], [500, 64]])
    data.score_pages(pool, lens, table[:, : 384 // page_rows], 700, clean_logits=True, out=out)
    seen = torch.arange(700, device="cuda")[None] < lens.reshape(-1, 1)
    beyond = torch.arange(700, device="cuda") >= 384
    assert out[:, ~beyond][seen[:, ~beyond]].isfinite().all()
    assert (out[seen & beyond] == -torch.inf).all()
    assert (out[~seen] == -torch.inf).all()
    assert (bits(whole[[0, -1]]) == POISON_BYTE).all()


def test_keys_that_are_not_addressed_may_be_nan() -> None:
    keys = [100, 70]
    data = Data.make(4, 64, 170)
    lens = int32([[100, 33], [70, 64]])
    want = check_paged(data, keys, lens, columns=130)
    pool, table = paged(data, keys, 64, poison=0xFF)
    out, _ = poisoned(4, 130)
    data.score_pages(pool, lens, table, 130, out=out)
    seen = torch.arange(130, device="cuda")[None] < lens.reshape(-1, 1)
    assert torch.equal(bits(out[seen]), bits(want[seen]))


def test_paged_same_bits_alone_and_in_a_batch() -> None:
    keys = [(211 * r) % 3000 for r in range(40)]
    data = Data.make(80, 64, sum(keys), of_q="some", of_k="some")
    lens = int32(keys)[:, None].repeat(1, 2)
    first = check_paged(data, keys, lens, columns=3000)
    pool, table = paged(data, keys, 64)
    for r in (1, 7, 39):
        out, _ = poisoned(2, 3000)
        data.part(slice(2 * r, 2 * r + 2)).score_pages(pool, lens[r : r + 1], table[r : r + 1], 3000, out=out)
        assert torch.equal(bits(out), bits(first[2 * r : 2 * r + 2]))
    for _ in range(20):
        out, _ = poisoned(80, 3000)
        data.score_pages(pool, lens, table, 3000, out=out)
        assert torch.equal(bits(out), bits(first))
