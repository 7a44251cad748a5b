"""The portable kernel's scores of MXFP4 queries and keys on a GPU, against float64. What does not depend on the format
is in test_indexer_logits.py, and what Hopper's own kernel computes in test_indexer_logits_mxfp4_sm90.py."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from cute_kernels import formats
from cute_kernels.indexer import logits_choice
from cute_kernels.indexer.ops import mqa_logits, paged_mqa_logits
from cute_kernels.runtime.ops import FALLBACK_VARIABLE
from tests.gpu.test_indexer_logits import (
    GARBAGE,
    PORTABLE_SHARE,
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
from tests.indexer import meaning
from tests.indexer.meaning import HIGH, INT, LOW

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

FORMATS = (formats.INDEXER_MXFP4, formats.INDEXER_MXFP4_WIDE)
NARROW = (118, 130)
"""Scale bytes of normal data, 2^-9 to 2^2."""

WIDE = (97, 138)
"""2^-30 to 2^10, side by side in one row."""


@pytest.fixture(autouse=True)
def portable_without_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FALLBACK_VARIABLE, raising=False)
    monkeypatch.setattr(logits_choice, "has_own", lambda *args: False)


def values(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """float64 [..., 128] of codes uint8 [..., 64] and scale bytes [..., 4]."""
    table = torch.from_numpy(meaning.E2M1_SIGNED).double().to(codes.device)
    each = table[torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2).long()]
    return (each.unflatten(-1, (4, 32)) * torch.exp2(scales.double() - 127)[..., None]).flatten(-2)


@dataclass
class Data:
    """Codes and scale bytes of queries [rows, heads] and keys; weights with zeros and both signs."""

    q: torch.Tensor
    q_byte: torch.Tensor
    k: torch.Tensor
    k_byte: torch.Tensor
    w: torch.Tensor

    @classmethod
    def make(cls, rows: int, heads: int, keys: int, seed: int = 0, scales: tuple[int, int] = NARROW) -> Data:
        g = gen(seed)

        def raw(low: int, high: int, *shape: int) -> torch.Tensor:
            return torch.randint(low, high, shape, device="cuda", generator=g, dtype=torch.uint8)

        w = torch.randn(rows, heads, device="cuda", generator=g)
        w[torch.rand(rows, heads, device="cuda", generator=g) < 0.1] = 0.0
        q, k = raw(0, 256, rows, heads, 64), raw(0, 256, keys, 64)
        return cls(q, raw(*scales, rows, heads, 4), k, raw(*scales, keys, 4), w)

    def query(self, *lead: int) -> tuple[torch.Tensor, torch.Tensor]:
        """As the ops take them, rows reshaped if told how."""
        scale = self.q_byte.view(torch.int32)[..., 0]
        shape = lead or (self.q.shape[0],)
        return self.q.reshape(*shape, *self.q.shape[1:]), scale.reshape(*shape, scale.shape[1])

    def kv(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.k, self.k_byte.view(torch.int32)[:, 0]

    def exact(self) -> tuple[torch.Tensor, torch.Tensor]:
        """float64 scores [rows, keys], and how far off they may be."""
        q, k, w = values(self.q, self.q_byte), values(self.k, self.k_byte), self.w.double()
        scores = torch.stack([((q[m] @ k.T).relu() * w[m][:, None]).sum(0) for m in range(len(q))])
        bounds = torch.stack([((q[m].abs() @ k.abs().T) * w[m].abs()[:, None]).sum(0) for m in range(len(q))])
        return scores, bounds * PORTABLE_SHARE


def check(data: Data, start: torch.Tensor, end: torch.Tensor, clean: bool = True, width: int = 0) -> torch.Tensor:
    rows, keys = data.q.shape[0], data.k.shape[0]
    columns = width or keys
    out, whole = poisoned(rows, columns)
    by_kernel(mqa_logits, data.query(), data.kv(), data.w, start, end, clean, max_seqlen_k=width, out=out)
    seen, key = seen_columns(start, end, keys, columns, width > 0)
    key = key.clamp(0, keys - 1).expand(rows, columns)
    scores, bounds = (t.gather(1, key) for t in data.exact())
    compare(whole, out, scores, bounds, seen, clean)
    return out


def paged(
    data: Data, fmt: Any, lengths: list[int], page_rows: int, poison: int = POISON_BYTE
) -> tuple[torch.Tensor, torch.Tensor]:
    """A poisoned pool with the keys, request after request, on shuffled pages, and its table; what lies past a
    request's pages is garbage."""
    counts = [-(-n // page_rows) for n in lengths]
    pool = poisoned_pool(fmt, sum(counts) + 2, page_rows, 576, "cuda")
    raw_bytes(pool).fill_(poison)
    order = torch.randperm(sum(counts) + 2, device="cuda", generator=gen(3))
    table = int32(GARBAGE).repeat(len(lengths), max([*counts, 0]) + 2)[:, : max([*counts, 0]) + 2].contiguous()
    used, slots = 0, []
    for r, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        table[r, :count] = order[used : used + count].to(INT)
        entries = torch.arange(length, device="cuda")
        slots.append(table[r].long()[entries // page_rows] * page_rows + entries % page_rows)
        used += count
    fmt.write_fields(pool, page_rows, torch.cat(slots), data.k, data.k_byte)
    return pool, table


def check_paged(
    data: Data, fmt: Any, keys: list[int], lens: torch.Tensor, page_rows: int = 64, clean: bool = False
) -> torch.Tensor:
    requests, next_n = lens.shape
    columns = max([1, *keys]) + 7
    pool, table = paged(data, fmt, keys, page_rows)
    out, whole = poisoned(requests * next_n, columns)
    query = data.query(requests, next_n)
    by_kernel(paged_mqa_logits, query, pool, data.w, lens, table, None, columns, clean, kv_format=fmt.id, out=out)
    scores, bounds = (torch.zeros(out.shape, dtype=torch.float64, device="cuda") for _ in range(2))
    begin = 0
    for r, count in enumerate(keys):
        rows, part = slice(r * next_n, (r + 1) * next_n), slice(begin, begin + count)
        own = Data(data.q[rows], data.q_byte[rows], data.k[part], data.k_byte[part], data.w[rows])
        scores[rows, :count], bounds[rows, :count] = own.exact()
        begin += count
    compare(whole, out, scores, bounds, torch.arange(columns, device="cuda")[None] < lens.reshape(-1, 1), clean)
    return out


@pytest.mark.parametrize("scales", [NARROW, WIDE])
@pytest.mark.parametrize(("rows", "keys"), [(1, 64), (3, 1), (7, 63), (64, 1000), (130, 4097)])
def test_whole_ranges(rows: int, keys: int, scales: tuple[int, int]) -> None:
    check(Data.make(rows, 64, keys, rows + keys, scales), *whole_range(rows, keys))


@pytest.mark.parametrize("heads", [1, 16, 24, 32, 48, 64])
@pytest.mark.parametrize("clean", [False, True])
def test_ranges_of_all_kinds(heads: int, clean: bool) -> None:
    for rows, keys in ((13, 37), (65, 700), (200, 3001)):
        check(Data.make(rows, heads, keys, rows), *ranges(rows, keys), clean)
    check(Data.make(66, heads, 700), *ranges(66, 700), clean, 333)


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.id)
@pytest.mark.parametrize("page_rows", [1, 7, 16, 64, 128])
@pytest.mark.parametrize("next_n", [1, 2, 3, 4, 7])
def test_paged(fmt: Any, page_rows: int, next_n: int) -> None:
    keys = [1, 64, 65, 0, 200, 1037, 63, 500]
    data = Data.make(len(keys) * next_n, 64, sum(keys), page_rows, WIDE)
    lens = torch.tensor(keys, dtype=INT)[:, None].repeat(1, next_n) - torch.arange(next_n, dtype=INT).flip(0)
    check_paged(data, fmt, keys, lens.cuda(), page_rows)
    check_paged(data, fmt, keys, lens.cuda(), page_rows, clean=True)


def test_every_code_and_scale_is_exact() -> None:
    """One code of the key meets a 1 of the query, for all codes and all scales whose score fp32 can hold."""
    codes, scales = (t.flatten() for t in torch.meshgrid(torch.arange(16), torch.arange(255), indexing="ij"))
    keys = len(codes)
    data = Data.make(2, 16, keys)
    data.q.zero_(), data.k.zero_()
    data.q_byte.fill_(127), data.k_byte.fill_(127)
    data.w.zero_()
    for row, byte in ((0, 125), (1, 129)):
        # element 37 of head 5, in block 1: 1.0, or -1.0 in head 6
        data.q[row, 5, 18], data.q[row, 6, 18] = 0x20, 0xA0
        data.q_byte[row, :, 1] = byte
        data.w[row, 5], data.w[row, 6] = 1.0, -1.0
    data.k[:, 18], data.k_byte[:, 1] = (codes << 4).to(torch.uint8).cuda(), scales.to(torch.uint8).cuda()
    out = mqa_logits(data.query(), data.kv(), data.w, *whole_range(2, keys))
    want = data.exact()[0]
    fits = want.abs() < 2.0**127
    assert torch.equal(out.double()[fits], want[fits])
    # roles exchanged: a query's scale
    mirrored = replace(data, q=data.k[:, None].repeat(1, 16, 1), q_byte=data.k_byte[:, None].repeat(1, 16, 1))
    mirrored = replace(mirrored, k=data.q[:, 5].clone(), k_byte=data.q_byte[:, 5].clone())
    mirrored.w = torch.zeros(keys, 16, device="cuda")
    mirrored.w[:, 9] = 1.0
    out = mqa_logits(mirrored.query(), mirrored.kv(), mirrored.w, *whole_range(keys, 2))
    want = mirrored.exact()[0]
    fits = want.abs() < 2.0**127
    assert torch.equal(out.double()[fits], want[fits])


def test_nan_stays_in_its_row_or_column() -> None:
    data = Data.make(10, 64, 200)
    start, end = whole_range(10, 200)
    first = check(data, start, end)
    data.q_byte[3, 5, 2] = 255
    data.k_byte[70, 0] = 255
    data.w[8, 63] = float("nan")
    got = mqa_logits(data.query(), data.kv(), data.w, start, end)
    is_nan = torch.zeros_like(got, dtype=torch.bool)
    is_nan[3], is_nan[8], is_nan[:, 70] = True, True, True
    assert torch.equal(got.isnan(), is_nan)
    assert torch.equal(got[~is_nan], first[~is_nan])


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.id)
@pytest.mark.parametrize("page_rows", [12, 64])
def test_lengths_and_pages_that_are_wrong(fmt: Any, page_rows: int) -> None:
    keys = [400] * 4
    data = Data.make(8, 64, 1600)
    lens = int32([[400, 399], [-1, 400], [0, 1], [LOW, 100]])
    want = check_paged(data, fmt, keys, lens, page_rows, clean=True)
    pool, table = paged(data, fmt, keys, page_rows, poison=0xFF)
    table[0, 0], table[1, 2] = -5, pool.shape[0]
    out, whole = poisoned(8, 700)
    lens = int32([[HIGH, 401], [650, 700], [701, 0], [500, 64]])
    known = 384 // page_rows * page_rows
    table = table[:, : 384 // page_rows]
    paged_mqa_logits(data.query(4, 2), pool, data.w, lens, table, None, 700, True, kv_format=fmt.id, out=out)
    gone = torch.zeros(8, 700, dtype=torch.bool, device="cuda")
    gone[:, known:] = True
    gone[:2, :page_rows] = True
    gone[2:4, 2 * page_rows : 3 * page_rows] = True
    gone |= torch.arange(700, device="cuda")[None] >= lens.reshape(-1, 1)
    assert (out[gone] == -torch.inf).all()
    assert out[~gone].isfinite().all()
    both = ~gone[:, :400] & want[:, :400].isfinite()
    assert torch.equal(bits(out[:, :400][both]), bits(want[:, :400][both]))
    assert (bits(whole[[0, -1]]) == POISON_BYTE).all()


def test_bits_do_not_depend_on_the_batch() -> None:
    rows, keys = 30, 900
    data = Data.make(rows, 64, keys, 5, WIDE)
    start, end = whole_range(rows, keys)
    first = check(data, start, end)
    for a, b in ((0, 1), (1, 3), (5, 8), (10, 30)):
        codes, scales = (t[a:b] for t in data.query())
        part = mqa_logits((codes, scales), data.kv(), data.w[a:b], start[a:b], end[a:b])
        assert torch.equal(bits(part), bits(first[a:b]))
    fmt = formats.INDEXER_MXFP4
    pool, table = paged(data, fmt, [keys], 64)
    for next_n in (1, 2, 3, 4, 30):
        codes, scales = (t[None, :next_n] for t in data.query())
        lens = torch.full((1, next_n), keys, dtype=INT, device="cuda")
        got = paged_mqa_logits((codes, scales), pool, data.w[:next_n], lens, table, None, keys, kv_format=fmt.id)
        assert torch.equal(bits(got), bits(first[:next_n])), next_n


def test_strided_inputs() -> None:
    data = Data.make(21, 64, 300)
    start, end = ranges(21, 300)
    want = check(data, start, end)
    q = torch.zeros(21, 66, 192, dtype=torch.uint8, device="cuda")[:, 1:-1, 64:128]
    k = torch.zeros(300, 272, dtype=torch.int8, device="cuda")[:, 16:80]
    scale = torch.zeros(21, 70, dtype=torch.int32, device="cuda")[:, 3:67]
    codes, scales = data.query()
    for view, value in ((q, codes), (k, data.k.view(torch.int8)), (scale, scales)):
        view.copy_(value)
    out = mqa_logits((q, scale), (k, data.kv()[1]), data.w, start, end)
    assert torch.equal(bits(out), bits(want))
