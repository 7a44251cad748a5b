# SPDX-License-Identifier: Apache-2.0
"""The kernels of sparse_mla_mixed on a GPU, against float64, over caches of either format; over bf16 caches bit for bit
against sparse_mla_prefill over the same rows, too. Whatever no query row selects is NaN, between the pages too."""

from __future__ import annotations

import dataclasses
import math
import sys
from typing import Any

import pytest
import torch

from cute_kernels.runtime.arch import arch_of
from cute_kernels.runtime.record import record_calls
from cute_kernels.sparse_mla.ops import sparse_mla_mixed, sparse_mla_mixed_workspace_size, sparse_mla_prefill
from tests.gpu.decode_cases import INT_MAX, INT_MIN, SCALE, generator, int32, random_sink
from tests.gpu.decode_checks import attention, same_bits
from tests.gpu.prefill_checks import KERNELS, LARGEST, LOG_RTOL, assert_results, use_kernel

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

DEVICE = "cuda"
ROWS_AT_ONCE = 1 << 17

Results = tuple[torch.Tensor, torch.Tensor]


BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
made_of = BF16
"""What `make` makes queries and caches of."""


@pytest.fixture(autouse=True, params=KERNELS)
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    use_kernel(request.param, monkeypatch)


@pytest.fixture(autouse=True, params=[BF16, FP8], ids=["bf16", "fp8"])
def dtype(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.dtype:
    monkeypatch.setattr(sys.modules[__name__], "made_of", request.param)
    return request.param


def codes(values: torch.Tensor) -> torch.Tensor:
    """The same memory as integers, which can be indexed and filled whatever the values' type."""
    return values.view(torch.int16 if values.dtype == BF16 else torch.int8)


@dataclasses.dataclass
class Call:
    """Query rows of requests, as lists of numbers, and of nobody behind them."""

    query: torch.Tensor
    window: torch.Tensor
    compressed: torch.Tensor | None
    indices: torch.Tensor
    lengths: torch.Tensor
    query_lens: list[int]
    seq_lens: list[int]
    window_size: int
    sink: torch.Tensor | None = None
    scale: float = SCALE
    out_scale: float = 0.75
    origin: int = 0

    def arguments(self) -> dict[str, Any]:
        starts = [self.origin + sum(self.query_lens[:i]) for i in range(len(self.query_lens) + 1)]
        return {
            "query": self.query,
            "swa_kv_cache": self.window,
            "sparse_indices": self.indices,
            "compressed_kv_cache": self.compressed,
            "sparse_topk_lens": self.lengths,
            "seq_lens": int32(self.seq_lens),
            "cum_seq_lens_q": int32(starts),
            "bmm1_scale": self.scale,
            "bmm2_scale": self.out_scale,
            "sinks": self.sink,
            "window_size": self.window_size,
        }

    def pools(self) -> list[tuple[torch.Tensor, slice]]:
        """The caches and their columns."""
        whole: list[tuple[torch.Tensor, slice]] = [(self.window, slice(0, self.window_size))]
        return whole if self.compressed is None else [*whole, (self.compressed, slice(self.window_size, None))]

    def named(self) -> torch.Tensor:
        """Which columns count, bool [sum_q, columns]."""
        counts = []
        for rows, context in zip(self.query_lens, self.seq_lens, strict=True):
            counts += [min(self.window_size, max(0, context - rows + i + 1)) for i in range(rows)]
        counts += [0] * (len(self.query) - len(counts))
        seen = torch.tensor(counts, device=DEVICE)[:, None]
        column = torch.arange(self.indices.shape[1], device=DEVICE)
        inside = torch.zeros(self.indices.shape, dtype=torch.bool, device=DEVICE)
        for pool, columns in self.pools():
            slots = self.indices[:, columns].long()
            inside[:, columns] = (slots >= 0) & (slots < pool.shape[0] * pool.shape[1])
        is_compressed = (column >= self.window_size) & (column < self.lengths.long()[:, None]) & (seen > 0)
        return inside & ((column < seen) | is_compressed)

    def gathered(self, rows: slice, named: torch.Tensor) -> torch.Tensor:
        """The caches' type [n, columns, 512], zero where nothing is named."""
        k = torch.zeros(*named.shape, 512, device=DEVICE).to(self.window.dtype)
        for pool, columns in self.pools():
            chosen = named[:, columns]
            slots = self.indices[rows, columns].long()[chosen]
            part = codes(k)[:, columns]
            part[chosen] = codes(pool)[slots // pool.shape[1], slots % pool.shape[1]]
        return k

    def expected(self) -> Results:
        named = self.named()
        step = max(1, ROWS_AT_ONCE // max(1, named.shape[1]))
        parts = []
        for first in range(0, len(self.query), step):
            rows = slice(first, first + step)
            k = self.gathered(rows, named[rows]).float().double()
            parts.append(attention(self.query[rows].float().double(), k, named[rows], self.scale, self.sink))
        out, lse = (torch.cat(part) for part in zip(*parts, strict=True))
        return out * self.out_scale, lse

    def as_prefill(self) -> dict[str, Any]:
        """Arguments of sparse_mla_prefill over copies of the rows: columns that count come first, in order."""
        named = self.named()
        kv = self.gathered(slice(None), named).view(-1, 1, 512)
        column = torch.arange(named.shape[1], device=DEVICE).expand_as(named)
        order = torch.where(named, column, column + named.shape[1]).argsort(dim=1)
        number = torch.arange(len(named), device=DEVICE)[:, None] * named.shape[1] + order
        return {
            "q": self.query.bfloat16(),
            "kv": kv.bfloat16(),
            "indices": number.int()[:, None],
            "sm_scale": self.scale,
            "attn_sink": self.sink,
            "topk_length": named.sum(dim=1).int(),
        }


def make_pool(pages: int, rows: int, more_stride: int = 0) -> torch.Tensor:
    """[pages, rows, 512], all NaN, more_stride elements between pages."""
    size = rows * 512 + more_stride
    whole = torch.full(((pages * size + 16) * made_of.itemsize,), 0xFF, dtype=torch.uint8, device=DEVICE)
    return whole.view(made_of).as_strided((pages, rows, 512), (size, 512, 1), 16)


def fill(call: Call, seed: int = 0) -> Call:
    """Give every row that the call selects a value; all others are NaN."""
    named = call.named()
    for number, (pool, columns) in enumerate(call.pools()):
        codes(pool).fill_(-1)
        slots = torch.unique(call.indices[:, columns][named[:, columns]].long())
        values = torch.randn(len(slots), 512, device=DEVICE, generator=generator(seed + number))
        rows = pool.shape[1]
        codes(pool)[slots // rows, slots % rows] = codes((values.clamp_(-4, 4) * (LARGEST / 4)).to(pool.dtype))
    return call


def make(
    query_lens: tuple[int, ...] = (1, 5, 1, 0, 3),
    seq_lens: tuple[int, ...] = (300, 6, 1, 9, 2000),
    heads: int = 64,
    window_size: int = 128,
    width: int | None = 200,
    rows: tuple[int, int] = (64, 64),
    capacity: tuple[int, int] = (700, 900),
    more_stride: tuple[int, int] = (0, 0),
    padding: int = 1,
    bad: float = 0.1,
    sink: str = "mixed",
    seed: int = 0,
) -> Call:
    """A random call. Heads have queries of very different sizes: softmax is flat in some, in others close to a key.

    width     compressed columns; None: there is no compressed cache
    rows, capacity, more_stride
              of both caches
    padding   rows of nobody
    """
    g = generator(seed)
    tokens = sum(query_lens) + padding
    exponents = torch.randint(-4, 7, (tokens, heads, 1), device=DEVICE, generator=g)
    query = torch.randn(tokens, heads, 512, device=DEVICE, generator=g) * torch.exp2(exponents.float())
    pools = [make_pool(-(-n // r), r, more) for n, r, more in zip(capacity, rows, more_stride, strict=True)]
    parts = []
    for pool, columns in zip(pools, (window_size, width or 0), strict=True):
        size = pool.shape[0] * pool.shape[1]
        slots = torch.randint(0, max(size, 1), (tokens, columns), device=DEVICE, generator=g).int()
        nowhere = int32([-1, INT_MIN, INT_MAX, size, size + 1, -size, -7])
        chosen = nowhere[torch.randint(0, len(nowhere), slots.shape, device=DEVICE, generator=g)]
        parts.append(slots.where(torch.rand(slots.shape, device=DEVICE, generator=g) >= bad, chosen))
    last = window_size + (width or 0)
    odd = int32([last, 0, 1, window_size, window_size + 1, last - 1, -1, last + 1, INT_MIN, INT_MAX])
    lengths = torch.randint(window_size, last + 1, (tokens,), device=DEVICE, generator=g).int()
    some = torch.rand(tokens, device=DEVICE, generator=g) < 0.3
    lengths = odd[torch.randint(0, len(odd), (tokens,), device=DEVICE, generator=g)].where(some, lengths)
    call = Call(
        query.to(made_of),
        pools[0],
        None if width is None else pools[1],
        torch.cat(parts, dim=1),
        lengths,
        list(query_lens),
        list(seq_lens),
        window_size,
        random_sink(sink, heads),
    )
    return fill(call, seed)


def run(call: Call, **more: Any) -> Results:
    """The kernel's results, over NaN."""
    outputs = {
        "out": torch.full(call.query.shape, math.nan, dtype=torch.bfloat16, device=DEVICE),
        "lse": torch.full(call.query.shape[:2], math.nan, device=DEVICE),
        **more,
    }
    with record_calls() as recording:
        results = sparse_mla_mixed(**call.arguments(), **outputs)
    assert [done.implementation for done in recording.calls] == ["kernel"]
    return results


def check(call: Call, **more: Any) -> Results:
    got = run(call, **more)
    assert_results(got, call.expected(), call.query.float(), call.scale, call.out_scale)
    return got


@pytest.mark.parametrize("heads", [1, 8, 13, 16, 32, 63, 64, 65, 100, 128])
@pytest.mark.parametrize("width", [None, 200])
def test_heads(heads: int, width: int | None) -> None:
    check(make(heads=heads, width=width, seed=heads))


@pytest.mark.parametrize("first", [1, 2, 53, 64, 256])
@pytest.mark.parametrize("second", [1, 2, 7, 53, 64, 256])
def test_page_sizes(first: int, second: int) -> None:
    check(make(rows=(first, second), seed=first))
    for heads in (8, 128):
        check(make(rows=(first, second), more_stride=(16, 512), heads=heads, seed=second))


@pytest.mark.parametrize("width", [0, 1, 63, 64, 65, 129, 512])
@pytest.mark.parametrize("window_size", [1, 7, 64, 65, 128, 200])
def test_columns_around_tiles(window_size: int, width: int) -> None:
    seq_lens = (300, window_size + 2, 1, 9, window_size)
    for heads in (16, 64):
        check(make(seq_lens=seq_lens, heads=heads, window_size=window_size, width=width, seed=width))


def test_prefill_rows_of_one_request() -> None:
    """Windows that grow from one column on, and compressed columns from the first position on."""
    call = make((200,), (200,), width=60, padding=0)
    call.lengths = (128 + torch.arange(1, 201, device=DEVICE) // 4).int()
    check(fill(call))


@pytest.mark.parametrize("heads", [8, 16, 32, 64, 128])
@pytest.mark.parametrize("requests", [1, 31, 33, 700])
def test_more_rows_than_multiprocessors(heads: int, requests: int) -> None:
    """Requests of one row, of many and of none, in turn: decode and prefill rows side by side."""
    query_lens = tuple((1, 0, 7, 1, 40)[i % 5] if requests > 1 else 701 for i in range(requests))
    seq_lens = tuple(n + (i * 37 % 300) - 3 for i, n in enumerate(query_lens))
    check(make(query_lens, seq_lens, heads=heads, width=90, padding=5, capacity=(5000, 4000), seed=requests))


@pytest.mark.parametrize("heads", [8, 32, 128])
def test_blocks_with_more_items_than_they_look_ahead(heads: int) -> None:
    check(make((1,) * 5000, tuple(range(-2, 4998)), heads=heads, window_size=3, width=5, padding=9))


def test_starts_that_do_not_begin_at_zero() -> None:
    call = make()
    want = check(call)
    for origin in (-1, 100, INT_MIN, INT_MAX - 10):
        call.origin = origin
        assert same_bits(run(call), want)


def test_rows_without_a_position() -> None:
    """More rows than context: those before it have no columns at all."""
    for seq_lens in ((0, 3, -5, 9, 1), (INT_MIN, 5, 1, 1, 2)):
        out, lse = check(make(seq_lens=seq_lens))
        assert (out[0] == 0).all()
        assert (lse[0] == math.inf).all()


def test_nobody_has_a_row() -> None:
    for query_lens in ((), (0, 0), (0,) * 100):
        out, lse = check(make(query_lens, tuple(50 for _ in query_lens), padding=300))
        assert (out == 0).all()
        assert (lse == math.inf).all()


@pytest.mark.parametrize("capacity", [(0, 0), (0, 5), (5, 0), (1, 1)])
def test_small_caches(capacity: tuple[int, int]) -> None:
    check(make(capacity=capacity))


@pytest.mark.parametrize("sink", ["none", "minus", "finite", "plus"])
def test_sinks(sink: str) -> None:
    out, lse = check(make(sink=sink))
    without = run(make(sink="none"))
    assert same_bits((lse,), without[1:])
    if sink == "plus":
        assert (out == 0).all()
    if sink in ("none", "minus"):
        assert same_bits((out,), without[:1])


@pytest.mark.parametrize("bad", [0.5, 0.9, 1.0])
def test_slots_that_are_none(bad: float) -> None:
    check(make((1, 140), (3000, 500), width=260, bad=bad))


def test_slots_beyond_the_counts_are_not_looked_at() -> None:
    """They name rows that are NaN."""
    call = make((1, 9, 2), (40, 100, 2), bad=0.0)
    named = call.named()
    for pool, columns in call.pools():
        last = pool.shape[0] * pool.shape[1] - 1
        picks = call.indices[:, columns]
        call.indices[:, columns] = (picks % last).where(named[:, columns], torch.full_like(picks, last))
    check(fill(call))


@pytest.mark.parametrize("scale", [0.0, -SCALE, 0.3])
@pytest.mark.parametrize("out_scale", [1.0, 0.0, -2.5, 1e-3])
def test_scales(scale: float, out_scale: float) -> None:
    check(dataclasses.replace(make(sink="finite"), scale=scale, out_scale=out_scale))


@pytest.mark.parametrize("heads", [8, 16, 32, 64, 128])
@pytest.mark.parametrize("out_scale", [1.0, -0.5])
def test_bits_of_prefill(heads: int, out_scale: float, dtype: torch.dtype) -> None:
    """The same as prefill over copies of the rows: in one tile they come in the same order. Over e4m3 caches nearly the
    same: weights may be f16, tiles others, and few heads padded."""
    call = make((1, 300, 1, 50), (900, 300, 5, 1000), heads=heads, width=300, bad=0.0, rows=(53, 2))
    out, lse = run(dataclasses.replace(call, out_scale=out_scale))
    want, _, want_lse = sparse_mla_prefill(**call.as_prefill())
    if dtype == FP8:
        # fp32 sums of large products cancel
        torch.testing.assert_close(lse, want_lse, rtol=LOG_RTOL, atol=2e-4)
        assert ((out.float() - want.float() * out_scale).abs() <= LARGEST / 128).all()
        return
    assert same_bits((lse,), (want_lse,))
    if out_scale == 1.0:
        assert same_bits((out,), (want,))
    assert ((out.float() - want.float() * out_scale).abs() <= want.float().abs() / 128).all()


@pytest.mark.parametrize("heads", [8, 32, 64])
def test_every_code(heads: int, dtype: torch.dtype) -> None:
    """Each e4m3 code in every place of a row, alone: out is it."""
    if dtype != FP8:
        pytest.skip("of e4m3 caches")
    numbers = torch.tensor([code for code in range(256) if code & 0x7F != 0x7F], dtype=torch.uint8, device=DEVICE)
    count = len(numbers)
    lens = (1,) * count
    call = make(lens, lens, heads=heads, window_size=1, width=None, capacity=(count, 1), padding=0, sink="none")
    call = dataclasses.replace(call, query=torch.zeros_like(call.query.float()).to(FP8), out_scale=1.0)
    call.window.view(torch.uint8).view(-1, 512)[:count] = numbers[:, None]
    call.indices[:, 0] = torch.arange(count, device=DEVICE).int()
    out, lse = run(call)
    assert (out == numbers.view(FP8).bfloat16()[:, None, None]).all()
    assert (lse == 0).all()


@pytest.mark.parametrize(("rows", "heads"), [(64, 64), (53, 64), (53, 8)])
def test_large_caches(rows: int, heads: int) -> None:
    """Rows that lie 2^31, 2^33 and 2^34 bytes behind the first."""
    call = make(heads=heads, bad=0.0)
    gib = 1 << 30
    row = 512 * made_of.itemsize
    pages = 17 * gib // (rows * row)
    pool = torch.empty(pages, rows, 512, dtype=made_of, device=DEVICE)
    ends = [0, 2 * gib // row, 4 * gib // row, 8 * gib // row, 16 * gib // row, pages * rows]
    far = torch.tensor([end + i for end in ends for i in range(-20, 20) if 0 <= end + i < pages * rows], device=DEVICE)
    for columns in (slice(0, 128), slice(128, None)):
        picks = torch.randint(0, len(far), call.indices[:, columns].shape, device=DEVICE, generator=generator(1))
        call.indices[:, columns] = far[picks].int()
    values = torch.rand(len(far), 512, device=DEVICE, generator=generator(2)) * LARGEST
    codes(pool).view(-1, 512)[far] = codes(values.to(made_of))
    check(dataclasses.replace(call, window=pool, compressed=pool))


@pytest.mark.parametrize("heads", [8, 16, 32, 128])
def test_bits_repeat_and_do_not_depend_on_the_batch(heads: int) -> None:
    call = make((1,) * 100 + (200, 99), (700,) * 50 + (5,) * 50 + (200, 500), heads=heads, width=205, padding=0)
    want = check(call)
    for _ in range(20):
        assert same_bits(run(call), want)
    part = dataclasses.replace(
        call,
        query=call.query[7:9],
        indices=call.indices[7:9],
        lengths=call.lengths[7:9],
        query_lens=[1, 1],
        seq_lens=[700, 700],
    )
    assert same_bits(run(part), tuple(result[7:9] for result in want))


# ---- rows that are converted first


@pytest.fixture
def can_convert(kernel: None, dtype: torch.dtype) -> None:
    from cute_kernels.sparse_mla import select

    if dtype != FP8 or arch_of(0) != select.HOPPER:
        pytest.skip("Hopper's own kernel over e4m3 caches does")


def converted(call: Call) -> Results:
    """Results with rows converted into NaN, of which no more is written than it takes."""
    rows = [pool.shape[0] * pool.shape[1] for pool, _ in call.pools()]
    size = sparse_mla_mixed_workspace_size(*rows)
    room = torch.full((size + 4096,), 0xFF, dtype=torch.uint8, device=DEVICE)
    results = run(call, workspace=room, form="converted")
    assert (room[size:] == 0xFF).all()
    return results


CONVERTED: dict[str, dict[str, Any]] = {
    "window alone": {"width": None},
    "no columns": {"width": 0},
    "one row a page": {"rows": (1, 1), "more_stride": (16, 512)},
    "odd pages": {"rows": (53, 7), "more_stride": (512, 16)},
    "large pages": {"rows": (256, 64), "bad": 0.5},
    "slots that are none": {"bad": 1.0},
    "one tile and one column": {"window_size": 64, "width": 1},
    "many tiles": {"query_lens": (1, 140), "seq_lens": (3000, 500), "width": 1024, "capacity": (5000, 9000)},
    "rows without a position": {"seq_lens": (0, 3, -5, 9, 1)},
    "nobody's rows": {"query_lens": (), "seq_lens": (), "padding": 300},
    "more rows than multiprocessors": {"query_lens": (701,), "seq_lens": (900,), "width": 90, "padding": 5},
    "more items than looked ahead": {"query_lens": (1,) * 5000, "seq_lens": tuple(range(-2, 4998)), "window_size": 3},
    **{f"caches of {rows} rows": {"capacity": rows} for rows in ((0, 0), (0, 5), (5, 0), (1, 1))},
}


@pytest.mark.usefixtures("can_convert")
@pytest.mark.parametrize("heads", [33, 64, 100, 128])
@pytest.mark.parametrize("name", CONVERTED)
def test_converted_rows_give_the_same_bits(name: str, heads: int) -> None:
    call = make(heads=heads, seed=heads, **CONVERTED[name])
    assert same_bits(converted(call), run(call, form="direct"))


@pytest.mark.usefixtures("can_convert")
@pytest.mark.parametrize("heads", [64, 128])
def test_converted_rows(heads: int) -> None:
    call = make((1, 300, 1, 50), (900, 300, 5, 1000), heads=heads, width=300, rows=(53, 2))
    want = check(call, form="converted")
    for _ in range(20):
        assert same_bits(converted(call), want)
    assert same_bits(run(call), want)


@pytest.mark.usefixtures("can_convert")
def test_every_code_of_converted_rows() -> None:
    """NaN among them, which spoil the row that selects them alone, as without conversion."""
    lens = (1,) * 256
    call = make(lens, lens, heads=64, window_size=1, width=None, capacity=(256, 1), padding=0, sink="none", bad=0.0)
    call.window.view(torch.uint8).view(-1, 512)[:256] = torch.arange(256, device=DEVICE).byte()[:, None]
    call.indices[:, 0] = torch.arange(256, device=DEVICE).int()
    call = dataclasses.replace(call, query=torch.zeros_like(call.query.float()).to(FP8), out_scale=1.0)
    out, lse = converted(call)
    assert (out.isnan().all(dim=(1, 2)) == call.window.view(-1, 512)[:256, 0].float().isnan()).all()
    assert same_bits((out, lse), run(call, form="direct"))


@pytest.mark.usefixtures("can_convert")
def test_a_graph_that_converts() -> None:
    """Caches and queries change between replays; the workspace is the call's own."""
    call = make((400,), (900,), heads=64, width=600)
    out = torch.zeros_like(call.query, dtype=torch.bfloat16)
    results = {"out": out, "lse": torch.zeros(out.shape[:2], device=DEVICE)}
    given = call.arguments() | results | {"form": "converted"}
    sparse_mla_mixed(**given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sparse_mla_mixed(**given)
    for seed in range(3):
        fill(call, seed + 10)
        graph.replay()
        got = tuple(result.clone() for result in results.values())
        assert same_bits(got, run(call, form="direct"))
