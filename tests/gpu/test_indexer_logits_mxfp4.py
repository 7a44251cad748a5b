# SPDX-License-Identifier: Apache-2.0
"""The scores of MXFP4 queries and keys on a GPU, against float64, and what else the two ops promise of them.

All tests run with the architecture's own kernel where it takes the call, and again with the portable one. Bounds are
those of FP8 scores (test_indexer_logits.py), whatever the scales in a row.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from cute_kernels import formats, numerics
from cute_kernels.indexer.ops import mqa_logits, paged_mqa_logits
from tests.gpu.ahead import compile_ahead
from tests.gpu.test_indexer_logits import (
    GARBAGE,
    by_kernel,
    compare,
    gen,
    int32,
    kernel,
    keys_of_tests,
    poisoned,
    ranges,
    seen_columns,
    share,
    whole_range,
)
from tests.helpers import POISON_BYTE, bits, poisoned_pool, raw_bytes
from tests.indexer.meaning import HIGH, INT, LOW

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


assert kernel  # the fixture, for all tests here

HEADS = [16, 32, 48, 64, 1, 24]
"""Of the tests that try several: with the last two, the portable kernel is the only one."""

PAGES = [8, 16, 64, 128, 192, 24, 1, 7]
"""Rows of a page, likewise."""

GROUPS = [(16, 13), (32, 1), (48, 5), (64, 2), (64, 7), (24, 4)]
"""Heads and rows of a request."""


@pytest.fixture(scope="session", autouse=True)
def compiled() -> None:
    """All kernels of these tests, in the disk cache."""
    compile_ahead(keys_of_tests(True, HEADS, GROUPS))


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
        at_once = max(1, 2**25 // (q.shape[1] * max(1, k.shape[0])))
        scores, bounds = [], []
        for part, weights in zip(q.split(at_once), w.split(at_once), strict=True):
            scores.append(((part @ k.T).relu() * weights[..., None]).sum(1))
            bounds.append(((part.abs() @ k.abs().T) * weights.abs()[..., None]).sum(1) * share())
        return torch.cat(scores), torch.cat(bounds)

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


@pytest.mark.parametrize("heads", HEADS)
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


def test_every_code_and_scale_is_exact(kernel: str) -> None:
    """One code of the key meets a 1 of the query, for all codes and all scales whose score fp32 can hold, then with
    roles exchanged. Hopper's kernel needs room for 2^12 times the score, and a score that is a normal number."""
    low, most = (0, 2.0**127) if kernel == "portable" else (4, 2.0**114)
    scales, codes = (t.flatten() for t in torch.meshgrid(torch.arange(low, 255), torch.arange(16), indexing="ij"))
    keys = len(codes)
    data = Data.make(2, 16, keys)
    data.q.zero_(), data.k.zero_()
    data.q_scale.fill_(0x7F7F7F7F), data.k_scale.fill_(0x7F7F7F7F)
    data.w.zero_()
    for row, byte in ((0, 125), (1, 129)):
        # element 37 of head 5, in block 1: 1.0, or -1.0 in head 6
        data.q[row, 5, 18], data.q[row, 6, 18] = 0x20, 0xA0
        data.q_scale[row] = 0x7F7F007F | byte << 8
        data.w[row, 5], data.w[row, 6] = 1.0, -1.0
    data.k[:, 18] = (codes << 4).to(torch.uint8).cuda()
    data.k_scale.view(torch.uint8).view(keys, 4)[:, 1] = scales.to(torch.uint8).cuda()
    q, q_scale = data.k[:, None].repeat(1, 16, 1), data.k_scale[:, None].repeat(1, 16)
    w = torch.zeros(keys, 16, device="cuda")
    w[:, 9] = 1.0
    mirrored = replace(data, q=q, q_scale=q_scale, w=w, k=data.q[:, 5].clone(), k_scale=data.q_scale[:, 5].clone())
    for each in (data, mirrored):
        want = each.exact()[0]
        fits = want.abs() < most
        assert torch.equal(each.score(*whole_range(*want.shape)).double()[fits], want[fits])


def test_many_groups_of_few_keys() -> None:
    """Several of them in a row are one block's."""
    check(Data.make(2500, 16, 70, of_k="some"), *whole_range(2500, 70))


def test_a_large_scale_over_codes_that_are_zero() -> None:
    """What remains of a row is small, and exact all the same."""
    for of_q, of_k in ((True, False), (False, True), (True, True)):
        data = Data.make(5, 32, 70, seed=5)
        for codes, scale, chosen in ((data.q, data.q_scale, of_q), (data.k, data.k_scale, of_k)):
            if chosen:
                scale.view(torch.uint8).view(*scale.shape, 4)[:] = torch.tensor([137, 97, 99, 98], device="cuda").byte()
                codes[..., :16] = 0
        check(data, *whole_range(5, 70))


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


def test_weights_that_are_large() -> None:
    """Up to 2^103.5 times what e4m3 codes make of a head, with codes so small that sums stay fp32 numbers."""
    data = Data.make(15, 16, 195, seed=9)
    data.q &= 0x99
    data.q_scale.fill_(0x78787878)
    data.w *= torch.linspace(112, 116.5, 15, device="cuda").exp2()[:, None] / data.w.abs().clamp(min=0.5)
    data.k_scale.view(torch.uint8)[:] -= 40
    check(data, *whole_range(15, 195))
    check_paged(data, [13] * 15, int32([13] * 15)[:, None])


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
@pytest.mark.parametrize("page_rows", PAGES)
@pytest.mark.parametrize("next_n", [1, 2, 3, 4])
def test_paged(page_rows: int, next_n: int, fmt: Any) -> None:
    keys = [1, 64, 65, 0, 200, 1037, 63, 500]
    data = Data.make(len(keys) * next_n, 64, sum(keys), seed=page_rows, of_k="some")
    lens = torch.tensor(keys, dtype=INT)[:, None].repeat(1, next_n) - torch.arange(next_n, dtype=INT).flip(0)
    check_paged(data, keys, lens.cuda(), page_rows, fmt=fmt)
    check_paged(data, keys, lens.cuda(), page_rows, clean=True, columns=900, fmt=fmt)


@pytest.mark.parametrize(("heads", "next_n"), GROUPS)
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


@pytest.mark.parametrize("page_rows", [8, 64, 12])
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
