# SPDX-License-Identifier: Apache-2.0
"""The scores of indexer queries on a GPU, against float64, and whatever else the two ops promise.

A score may differ from the exact one by a share of what it is made of: the sum over heads of |weight| times the sum of
the products' magnitudes, times the key's scale. Hopper's tensor cores keep about 14 bits of a sum of e4m3 products, so
that share is 2^-12; of f16 products, as in the portable kernel, they keep as many as fp32 has, and it is 2^-16.

All tests run with the architecture's own kernel where it takes the call, and again with the portable one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from cute_kernels import formats
from cute_kernels.indexer import select
from cute_kernels.indexer.ops import mqa_logits, paged_mqa_logits
from cute_kernels.runtime import compile as compile_
from cute_kernels.runtime import trust
from cute_kernels.runtime.arch import arch_of
from cute_kernels.runtime.ops import FALLBACK_VARIABLE
from cute_kernels.runtime.record import record_calls
from tests.gpu.ahead import compile_ahead
from tests.helpers import POISON_BYTE, bits, poisoned_pool, raw_bytes
from tests.indexer import meaning
from tests.indexer.meaning import HIGH, INT, LOW

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

FMT = formats.INDEXER_FP8
SHARE = 2.0**-12
PORTABLE_SHARE = 2.0**-16
GARBAGE = (-1, -7, -1_000_000, HIGH, LOW)


HEADS = [1, 8, 16, 24, 32, 48, 63, 64]
PAGES = [8, 16, 64, 128, 192, 24, 1, 2, 7, 100]
"""Rows of a page."""

GROUPS = [(16, 13), (32, 1), (48, 5), (64, 4), (64, 7)]
"""Heads and rows of a request."""


def keys_of_tests(mxfp4: bool, heads: list[int], groups: list[tuple[int, int]]) -> list[Any]:
    """Own and portable kernels of tests with such heads and groups, and with 64 heads and up to 4 rows of a request."""
    arch = arch_of(0)
    shapes = [(n, 4, False, 64) for n in heads] + [(n, next_n, True, 64) for n, next_n in groups]
    shapes += [(64, next_n, True, page_rows) for next_n in (1, 2, 3, 4) for page_rows in (8, 64)]
    own = [shape for shape in shapes if select.has_own(arch, shape[0], shape[3])]
    keys: list[Any] = [select.own_key(arch, *shape, mxfp4) for shape in own]
    return [*keys, *(select.portable_key(arch, *shape[:3], mxfp4) for shape in shapes)]


@pytest.fixture(scope="session", autouse=True)
def compiled() -> None:
    """All kernels of these tests, in the disk cache."""
    compile_ahead(keys_of_tests(False, HEADS, GROUPS))


@pytest.fixture(autouse=True, params=["own", "portable"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Name of the kernel, without fallback: the architecture's own, trusted or not, or the portable one."""
    monkeypatch.delenv(FALLBACK_VARIABLE, raising=False)
    if request.param == "portable":
        monkeypatch.setattr(select, "has_own", lambda *args: False)
    elif not select.has_own(arch_of(0), 64):
        pytest.skip("there is only the portable kernel")
    with trust.choose(own=True):
        yield str(request.param)


def share() -> float:
    """That scores of the kernel under test may differ by."""
    return SHARE if select.has_own(arch_of(0), 64) else PORTABLE_SHARE


def gen(seed: int) -> torch.Generator:
    return torch.Generator(device="cuda").manual_seed(seed)


def int32(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=INT, device="cuda")


def codes(*shape: int, seed: int, spread: bool = False) -> torch.Tensor:
    """e4m3 values: normal ones, or every finite code alike."""
    g = gen(seed)
    if not spread:
        return (torch.randn(shape, device="cuda", generator=g) * 8).to(torch.float8_e4m3fn)
    raw = torch.randint(0, 256, shape, device="cuda", generator=g, dtype=torch.uint8)
    return raw.where((raw & 0x7F) != 0x7F, torch.full_like(raw, 0x80)).view(torch.float8_e4m3fn)


@dataclass
class Data:
    """Queries [rows, heads], keys and their scales, weights with zeros and both signs."""

    q: torch.Tensor
    w: torch.Tensor
    k: torch.Tensor
    scale: torch.Tensor

    @classmethod
    def make(cls, rows: int, heads: int, keys: int, seed: int = 0, spread: bool = False) -> Data:
        g = gen(seed + 1000)
        w = torch.randn(rows, heads, device="cuda", generator=g)
        w[torch.rand(rows, heads, device="cuda", generator=g) < 0.1] = 0.0
        scale = torch.exp2(torch.randint(-9, 9, (keys,), device="cuda", generator=g).float())
        q, k = codes(rows, heads, 128, seed=seed, spread=spread), codes(keys, 128, seed=seed + 1, spread=spread)
        if rows > 2:
            q.view(torch.uint8)[1] = 0
            w[2] = 0.0
        return cls(q, w, k, scale)

    def exact(self) -> tuple[torch.Tensor, torch.Tensor]:
        """float64 scores [rows, keys], and how far off they may be."""
        q, k = self.q.double(), self.k.double()
        w, scale = self.w.double(), self.scale.double()
        at_once = max(1, 2**25 // (q.shape[1] * max(1, k.shape[0])))
        scores, bounds = [], []
        for part, weights in zip(q.split(at_once), w.split(at_once), strict=True):
            scores.append(((part @ k.T).relu() * weights[..., None]).sum(1) * scale)
            magnitudes = ((part.abs() @ k.abs().T) * weights.abs()[..., None]).sum(1)
            bounds.append(magnitudes * scale.abs() * share())
        return torch.cat(scores), torch.cat(bounds)


def poisoned(rows: int, columns: int, extra: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores to write into, and the tensor that they are a view of."""
    whole = torch.empty(rows + 2, columns + extra, device="cuda")
    whole.view(torch.uint8).fill_(POISON_BYTE)
    return whole[1:-1, extra // 2 : extra // 2 + columns], whole


def by_kernel(op: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    with record_calls() as recording:
        out: torch.Tensor = op(*args, **kwargs)
    assert [call.implementation for call in recording.calls] == ["kernel"]
    return out


def compare(
    whole: torch.Tensor, out: torch.Tensor, scores: torch.Tensor, bounds: torch.Tensor, seen: torch.Tensor, clean: bool
) -> None:
    """Scores where a row sees a key, -inf elsewhere if `clean`, and nothing else written."""
    assert not out[seen].isnan().any()
    off = (out.double() - scores).abs()
    wrong = seen & ~((off <= bounds) | (scores == out.double()))
    assert not wrong.any(), f"{int(wrong.sum())} scores are wrong, the first at {wrong.nonzero()[0].tolist()}"
    if clean:
        assert (out[~seen] == -torch.inf).all()
    else:
        assert (bits(out[~seen]) == POISON_BYTE).all()
    rest = whole.clone()
    rest.as_strided(out.shape, out.stride(), out.storage_offset()).view(torch.uint8).fill_(POISON_BYTE)
    assert (rest.view(torch.uint8) == POISON_BYTE).all()


# Contiguous keys


def seen_columns(
    start: torch.Tensor, end: torch.Tensor, keys: int, columns: int, compressed: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Which columns of which rows hold a score, and the key of every column."""
    first, stop = start.long()[:, None], end.long().clamp(max=keys)[:, None]
    key = torch.arange(columns, device="cuda")[None] + (first if compressed else 0)
    return (key >= first.clamp(min=0)) & (key < stop), key


def check(
    data: Data, start: torch.Tensor, end: torch.Tensor, clean: bool = True, width: int = 0, extra: int = 5
) -> torch.Tensor:
    rows, keys = data.q.shape[0], data.k.shape[0]
    columns = width or keys
    out, whole = poisoned(rows, columns, extra)
    by_kernel(mqa_logits, data.q, (data.k, data.scale), data.w, start, end, clean, max_seqlen_k=width, out=out)
    seen, key = seen_columns(start, end, keys, columns, width > 0)
    scores, bounds = data.exact()
    key = key.clamp(0, keys - 1).expand(rows, columns)
    compare(whole, out, scores.gather(1, key), bounds.gather(1, key), seen, clean)
    return out


def ranges(rows: int, keys: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    start, end = meaning.ranges(rows, keys, seed)
    return start.cuda(), end.cuda()


def whole_range(rows: int, keys: int) -> tuple[torch.Tensor, torch.Tensor]:
    return int32([0] * rows), int32([keys] * rows)


@pytest.mark.parametrize("spread", [False, True])
@pytest.mark.parametrize(("rows", "keys"), [(1, 64), (4, 128), (3, 1), (7, 63), (64, 1000), (130, 4097)])
def test_whole_ranges(rows: int, keys: int, spread: bool) -> None:
    data = Data.make(rows, 64, keys, seed=rows + keys, spread=spread)
    check(data, *whole_range(rows, keys))


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("clean", [False, True])
def test_ranges_of_all_kinds(heads: int, clean: bool) -> None:
    for rows, keys in ((13, 37), (65, 700), (200, 3001)):
        check(Data.make(rows, heads, keys, seed=rows), *ranges(rows, keys), clean)


@pytest.mark.parametrize("clean", [False, True])
@pytest.mark.parametrize("width", [1, 33, 700, 900])
def test_compressed_form(width: int, clean: bool) -> None:
    for rows in (5, 66):
        check(Data.make(rows, 64, 700, seed=width), *ranges(rows, 700), clean, width)


def test_causal_prefill_of_several_requests() -> None:
    rows, keys = 600, 2000
    start = torch.tensor([0] * 100 + [300] * 260 + [1100] * 240, dtype=INT).cuda()
    lengths = torch.cat([torch.arange(n) * 3 + 1 for n in (100, 260, 240)]).to(INT).cuda()
    check(Data.make(rows, 64, keys), start, start + lengths)
    check(Data.make(rows, 64, keys), start, start + lengths, False, 800)


def test_rows_of_scores_that_are_aligned_or_not() -> None:
    data = Data.make(9, 64, 515)
    for extra in range(2, 10):
        check(data, *ranges(9, 515, extra), extra=extra)
    start, end = ranges(9, 515)
    out = by_kernel(mqa_logits, data.q, (data.k, data.scale), data.w, start, end)
    assert out.shape == (9, 515)
    assert out.stride() == (768, 1)
    assert torch.equal(bits(out), bits(check(data, start, end)))


def test_bits_do_not_depend_on_the_batch() -> None:
    """The score of a row and a key is the same in every group, block, call and op."""
    rows, keys = 150, 3000
    data = Data.make(rows, 64, keys, spread=True)
    start, end = whole_range(rows, keys)
    first = check(data, start, end)
    for _ in range(20):
        assert torch.equal(bits(first), bits(mqa_logits(data.q, (data.k, data.scale), data.w, start, end)))
    for a, b in ((0, 1), (1, 3), (5, 8), (17, 18), (100, 150)):
        part = mqa_logits(data.q[a:b], (data.k, data.scale), data.w[a:b], start[a:b], end[a:b])
        assert torch.equal(bits(part), bits(first[a:b]))
    some = mqa_logits(data.q, (data.k[640:1000], data.scale[640:1000]), data.w, *whole_range(rows, 360))
    assert torch.equal(bits(some), bits(first[:, 640:1000]))
    pool, table = paged(data, [keys], 64)
    for next_n in (1, 2, 3, 4, 5, 150):
        lens = torch.full((1, next_n), keys, dtype=INT, device="cuda")
        got = paged_mqa_logits(data.q[None, :next_n], pool, data.w[:next_n], lens, table, None, keys)
        assert torch.equal(bits(got), bits(first[:next_n])), next_n


def test_heads_of_other_rows_do_not_matter() -> None:
    """NaN stays in its row or column, and none gets lost."""
    data = Data.make(10, 64, 200)
    start, end = whole_range(10, 200)
    first = check(data, start, end)
    data.q.view(torch.uint8)[3, 5, 7] = 0x7F
    data.k.view(torch.uint8)[70, 100] = 0xFF
    data.w[8, 63] = float("nan")
    got = mqa_logits(data.q, (data.k, data.scale), data.w, start, end)
    is_nan = torch.zeros_like(got, dtype=torch.bool)
    is_nan[3], is_nan[8], is_nan[:, 70] = True, True, True
    assert torch.equal(got.isnan(), is_nan)
    assert torch.equal(got[~is_nan], first[~is_nan])


def test_large_products_beside_small_ones(kernel: str) -> None:
    """What the tensor cores drop is a share of the largest product or sum. Here one product of every 32 makes up nearly
    all of a sum, and of the others, each 2^-13 of it, most are lost."""
    data = Data.make(8, 64, 256)
    data.q.view(torch.uint8).fill_(0x38)
    data.k.view(torch.uint8).fill_(0x30)
    data.q.view(torch.uint8)[..., ::32] = 0x7E
    data.k.view(torch.uint8)[..., ::32] = 0x50
    data.w.abs_()
    out = mqa_logits(data.q, (data.k, data.scale), data.w, *whole_range(8, 256))
    scores, bounds = data.exact()
    off = (out.double() - scores).abs() / (bounds / share())
    assert off[scores > 0].max() < (2.0**-6 if kernel == "own" else PORTABLE_SHARE)
    assert kernel == "portable" or (out.double() <= scores).all()


def test_more_groups_than_are_counted_one_by_one() -> None:
    rows, keys = 4 * 32 * 256 + 5000, 70
    data = Data.make(rows, 16, keys)
    start, end = whole_range(rows, keys)
    end[7::9] = 0
    end[3::5] = 40
    out = by_kernel(mqa_logits, data.q, (data.k, data.scale), data.w, start, end)
    for a in range(0, rows, 2500):
        part = slice(a, a + 2500)
        want = mqa_logits(data.q[part], (data.k, data.scale), data.w[part], start[part], end[part])
        assert torch.equal(bits(out[part]), bits(want))


# Paged keys


def paged(
    data: Data, lengths: list[int], page_rows: int, poison: int = POISON_BYTE
) -> tuple[torch.Tensor, torch.Tensor]:
    """A poisoned pool with the keys, request after request, on shuffled pages, and its table; what lies past a
    request's pages is garbage."""
    counts = [-(-n // page_rows) for n in lengths]
    pool = poisoned_pool(FMT, sum(counts) + 2, page_rows, 576, "cuda")
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
        scale = data.scale[part].contiguous().view(torch.uint8).view(-1, 4)
        FMT.write_fields(pool, page_rows, slots, data.k[part].view(torch.uint8), scale)
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
) -> torch.Tensor:
    """keys: of each request, in the data's order; missing: (request, column) of the table without a page."""
    requests, next_n = lens.shape
    columns = max([1, *keys]) + 7 if columns is None else columns
    pool, table = paged(data, keys, page_rows)
    for i, (r, column) in enumerate(missing):
        table[r, column] = (*GARBAGE, pool.shape[0])[i % 6]
    before = raw_bytes(pool).clone()
    out, whole = poisoned(requests * next_n, columns)
    q = data.q.view(requests, next_n, *data.q.shape[1:])
    by_kernel(paged_mqa_logits, q, pool, data.w, lens, table, None, columns, clean, out=out)
    assert torch.equal(raw_bytes(pool), before)
    scores = torch.full((requests * next_n, columns), -torch.inf, dtype=torch.float64, device="cuda")
    bounds = torch.zeros_like(scores)
    begin = 0
    for r, count in enumerate(keys):
        rows = slice(r * next_n, (r + 1) * next_n)
        part = slice(begin, begin + count)
        own = Data(data.q[rows], data.w[rows], data.k[part], data.scale[part]).exact()
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


@pytest.mark.parametrize("page_rows", PAGES)
@pytest.mark.parametrize("next_n", [1, 2, 3, 4])
def test_paged(page_rows: int, next_n: int) -> None:
    keys = [1, 64, 65, 0, 200, 1037, 63, 500]
    data = Data.make(len(keys) * next_n, 64, sum(keys), seed=page_rows)
    lens = torch.tensor(keys, dtype=INT)[:, None].repeat(1, next_n) - torch.arange(next_n, dtype=INT).flip(0)
    check_paged(data, keys, lens.cuda(), page_rows)
    check_paged(data, keys, lens.cuda(), page_rows, clean=True, columns=900)


@pytest.mark.parametrize(("heads", "next_n"), GROUPS)
def test_paged_groups_of_rows(heads: int, next_n: int) -> None:
    keys = [300, 1, 129]
    data = Data.make(3 * next_n, heads, sum(keys), seed=next_n, spread=True)
    g = torch.Generator().manual_seed(next_n)
    lens = torch.stack([torch.randint(-3, n + 1, (next_n,), generator=g) for n in keys]).to(INT)
    check_paged(data, keys, lens.cuda(), clean=True)


@pytest.mark.parametrize("next_n", [1, 2, 3, 4])
def test_nan_and_large_weights_beside_good_rows(next_n: int) -> None:
    """NaN of a query's head, with even and odd numbers, also where a request's first keys are NaN; weights that are
    large, infinite or NaN: in each row what it is made of, and nothing else."""
    requests, keys = 5, 700
    data = Data.make(requests * next_n, 64, requests * keys, seed=next_n)
    lens = torch.full((requests, next_n), keys, dtype=INT, device="cuda")
    last, heads = next_n - 1, data.q.view(torch.uint8).view(requests, next_n, 64, formats.INDEX_DIM)
    heads[0, 0, 4, 7], heads[1, last, 5, 0], heads[2, 0, 63, 127], heads[2, 0, 0, 1] = 0x7F, 0xFF, 0x7F, 0xFF
    data.k.view(torch.uint8)[: keys // 2] = 0x7F
    data.k.view(torch.uint8)[2 * keys : 2 * keys + 64, 9] = 0xFF
    weights = data.w.view(requests, next_n, 64)
    heads[3] = 0
    heads[3, ..., 0] = 1
    # infinite times a product whose sign no rounding changes
    heads[4, last, 10], heads[4, last, 10, 0] = 0, 0x38
    weights[3] *= 2.0**103
    weights[4, 0, 8] = torch.nan
    weights[4, last, 10] = torch.inf
    pool, table = paged(data, [keys] * requests, 64)
    got = paged_mqa_logits(data.q.view(requests, next_n, 64, -1), pool, data.w, lens, table, None, keys)
    for r in range(requests):
        part = slice(r * keys, (r + 1) * keys)
        k, scale = data.k[part].double(), data.scale[part].double()
        for n in range(next_n):
            q, w, row = data.q[r * next_n + n].double(), weights[r, n].double()[:, None], got[r * next_n + n].double()
            dots = q @ k.T
            want, bound = (dots.clamp(min=0) * w).sum(0) * scale, (q.abs() @ k.abs().T * w.abs()).sum(0) * scale
            assert torch.equal(row.isnan(), want.isnan()), (r, n)
            assert torch.equal(row.isinf(), want.isinf()), (r, n)
            finite = want.isfinite()
            assert ((row - want).abs()[finite] <= bound[finite] * 2.0**-10).all(), (r, n)


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
    q, columns = data.q.view(4, 2, 64, 128), 700
    out, whole = poisoned(8, columns)
    lens = int32([[HIGH, 401], [650, 700], [701, 0], [500, 64]])
    paged_mqa_logits(q, pool, data.w, lens, table[:, : 384 // page_rows], None, columns, True, out=out)
    seen = torch.arange(columns, device="cuda")[None] < lens.reshape(-1, 1)
    beyond = torch.arange(columns, device="cuda") >= 384
    assert out[:, ~beyond][seen[:, ~beyond]].isfinite().all()
    assert (out[seen & beyond] == -torch.inf).all()
    assert (out[~seen] == -torch.inf).all()
    assert (bits(whole[[0, -1]]) == POISON_BYTE).all()


def test_paged_same_bits_alone_and_in_a_batch() -> None:
    keys = [(211 * r) % 3000 for r in range(40)]
    data = Data.make(80, 64, sum(keys), spread=True)
    lens = int32(keys)[:, None].repeat(1, 2)
    first = check_paged(data, keys, lens, columns=3000)
    pool, table = paged(data, keys, 64)
    q = data.q.view(40, 2, 64, 128)
    for _ in range(20):
        out, _ = poisoned(80, 3000)
        paged_mqa_logits(q, pool, data.w, lens, table, None, 3000, out=out)
        assert torch.equal(bits(out), bits(first))
    for r in (1, 7, 39):
        rows = slice(2 * r, 2 * r + 2)
        out, _ = poisoned(2, 3000)
        paged_mqa_logits(q[r : r + 1], pool, data.w[rows], lens[r : r + 1], table[r : r + 1], None, 3000, out=out)
        assert torch.equal(bits(out), bits(first[rows]))


def test_views_of_pools_beyond_two_gigabytes() -> None:
    stride = FMT.page_stride(64)
    num_blocks = 2**32 // stride + 300
    pool = FMT.allocate(num_blocks, 64, "cuda")
    edges = [2**31 // stride - 1, 2**31 // stride, 2**31 // stride + 1, 2**32 // stride + 1, num_blocks - 1]
    data = Data.make(2, 64, 320)
    slots = (torch.tensor(edges, device="cuda")[:, None] * 64 + torch.arange(64, device="cuda")).reshape(-1)
    FMT.write_fields(pool, 64, slots, data.k.view(torch.uint8), data.scale.view(torch.uint8).view(-1, 4))
    out = paged_mqa_logits(data.q[None], pool[:, :, None], data.w, int32([[320, 319]]), int32([edges]), None, 320)
    scores, bounds = data.exact()
    assert ((out.double() - scores).abs() <= bounds)[:, :319].all()


def test_scores_beyond_two_gigabytes() -> None:
    """Rows that lie far apart: addresses are 64-bit."""
    gap = 2**29 // 8 + 64
    memory = torch.empty(20 * gap, device="cuda")
    data = Data.make(20, 64, 130)
    out = memory.as_strided((20, 130), (gap, 1))
    mqa_logits(data.q, (data.k, data.scale), data.w, *whole_range(20, 130), out=out)
    scores, bounds = data.exact()
    assert ((out.double() - scores).abs() <= bounds).all()


def test_nothing_to_score() -> None:
    data = Data.make(6, 64, 100)
    empty, scale = data.k[:0], data.scale[:0]
    none = int32([])
    assert mqa_logits(data.q, (empty, scale), data.w, int32([0] * 6), int32([5] * 6)).shape == (6, 0)
    assert mqa_logits(data.q[:0], (data.k, data.scale), data.w[:0], none, none).shape == (0, 100)
    out, _ = poisoned(6, 9)
    mqa_logits(data.q, (empty, scale), data.w, int32([0] * 6), int32([5] * 6), max_seqlen_k=9, out=out)
    assert (out == -torch.inf).all()
    pool, table = paged(data, [100], 64)
    for few in ((pool[:0], table), (pool, table[:, :0])):
        out, _ = poisoned(6, 50)
        paged_mqa_logits(data.q[None], few[0], data.w, int32([[50] * 6]), few[1], None, 50, out=out)
        assert (out == -torch.inf).all()


def test_sizes_and_strides_need_no_new_kernel() -> None:
    data = Data.make(9, 64, 300)
    check(data, *ranges(9, 300))
    check_paged(Data.make(4, 64, 300), [100, 200], int32([[100, 3], [200, 1]]))
    before = compile_.compilations()
    check(Data.make(77, 64, 1300), *ranges(77, 1300))
    check(Data.make(2, 64, 13), *ranges(2, 13), width=40)
    check_paged(Data.make(6, 64, 300), [100, 0, 200], int32([[100, 3], [0, 0], [200, 1]]), 192, columns=77)
    assert compile_.compilations() == before


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("heads", "HI must be at least 1 and at most 64, got 65"),
        ("keys", r"kv\[0\] must be 16-byte aligned row by row"),
        ("queries", "q must be 16-byte aligned row by row"),
    ],
)
def test_what_no_kernel_can_take(change: str, reason: str) -> None:
    data = Data.make(5, 65 if change == "heads" else 64, 50)
    q, k, scale, w = data.q, data.k, data.scale, data.w
    if change == "keys":
        k = torch.zeros(50, 136, dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn)[:, :128]
    elif change == "queries":
        q = torch.zeros(5, 64, 144, dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn)[..., 8:136]
    with pytest.raises(NotImplementedError, match=f"{reason}.*{FALLBACK_VARIABLE}=reference"):
        mqa_logits(q, (k, scale), w, *whole_range(5, 50))
