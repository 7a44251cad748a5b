# SPDX-License-Identifier: Apache-2.0
"""The portable kernel of sparse_mla_prefill_paged on a GPU, against float64. What no query row selects is poison."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from cute_kernels.runtime.record import record_calls
from cute_kernels.sparse_mla.ops import sparse_mla_prefill_paged
from tests.gpu.decode_cases import DEVICE, INT_MAX, INT_MIN, SCALE, Pool, generator, int32, random_sink
from tests.gpu.decode_cases import LARGEST as LARGEST_OF_POOLS
from tests.gpu.decode_checks import BF16, FP8, MXFP8, NVFP4, attention, same_bits
from tests.gpu.prefill_checks import LARGEST, assert_results, use_kernel

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

Results = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
ROWS_AT_ONCE = 1 << 17


@pytest.fixture(autouse=True)
def kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    use_kernel("portable", monkeypatch)


@dataclasses.dataclass
class Call:
    """Query rows of requests, as lists of numbers, and of nobody behind them."""

    q: torch.Tensor
    pools: list[Pool]
    tables: list[torch.Tensor]
    query_lens: list[int]
    seq_lens: list[int]
    window_size: int
    ratio: int
    entries: torch.Tensor | None
    sink: torch.Tensor | None = None
    scale: float = SCALE
    origin: int = 0

    def arguments(self) -> dict[str, Any]:
        starts = [self.origin + sum(self.query_lens[:i]) for i in range(len(self.query_lens) + 1)]
        given = {
            "q": self.q,
            "swa_cache": self.pools[0].cache,
            "swa_block_table": self.tables[0],
            "query_start_loc": int32(starts),
            "seq_lens": int32(self.seq_lens),
            "sm_scale": self.scale,
            "window_size": self.window_size,
            "topk_indices": self.entries,
            "attn_sink": self.sink,
            "kv_format": self.pools[0].kv_format,
        }
        if len(self.pools) > 1:
            given |= {
                "compressed_cache": self.pools[1].cache,
                "compressed_block_table": self.tables[1],
                "compress_ratio": self.ratio,
                "compressed_kv_format": self.pools[1].kv_format,
            }
        return given

    def slots(self) -> list[torch.Tensor]:
        """int64 [T, columns] of each pool, -1 where there is none."""
        requests, positions = [], []
        for i, (rows, context) in enumerate(zip(self.query_lens, self.seq_lens, strict=True)):
            requests += [i] * rows
            positions += [context - rows + j for j in range(rows)]
        missing = len(self.q) - len(requests)
        request = torch.tensor(requests + [0] * missing, device=DEVICE)[:, None]
        position = torch.tensor(positions + [-1] * missing, device=DEVICE)[:, None]
        wanted = position - self.window_size + 1 + torch.arange(self.window_size, device=DEVICE)
        found = [self._mapped(0, request, wanted.where((wanted >= 0) & (position >= 0), -1))]
        if len(self.pools) > 1:
            visible = torch.where(position >= 0, (position + 1) // self.ratio, 0)
            column = torch.arange(int(visible.max()) if len(visible) else 0, device=DEVICE).expand(len(self.q), -1)
            named = column
            if self.entries is not None:
                named = self.entries.long()
                column = torch.arange(named.shape[1], device=DEVICE).expand(len(self.q), -1)
            named = named.where((named >= 0) & (named < visible) & (column < visible), -1)
            found.append(self._mapped(1, request, named))
        return found

    def _mapped(self, which: int, request: torch.Tensor, entries: torch.Tensor) -> torch.Tensor:
        pool, table = self.pools[which], self.tables[which]
        if table.numel() == 0:
            return torch.full_like(entries, -1)
        column = entries // pool.rows
        inside = (entries >= 0) & (column < table.shape[1])
        page = table[request, column.where(inside, 0)].long()
        inside &= (page >= 0) & (page < pool.pages)
        return (page * pool.rows + entries % pool.rows).where(inside, -1)

    def expected(self) -> Results:
        slots, parts = self.slots(), []
        step = max(1, ROWS_AT_ONCE // max(1, sum(part.shape[1] for part in slots)))
        for first in range(0, len(self.q), step):
            rows = slice(first, first + step)
            ks, names = [], []
            for pool, own in zip(self.pools, slots, strict=True):
                named = own[rows] >= 0
                k = torch.zeros(*named.shape, 512, dtype=torch.float64, device=DEVICE)
                k[named] = pool.read(own[rows][named])
                ks.append(k)
                names.append(named)
            k, named, q = torch.cat(ks, dim=1), torch.cat(names, dim=1), self.q[rows].double()
            out, lse = attention(q, k, named, self.scale, self.sink)
            scores = (q @ k.transpose(1, 2) * self.scale).masked_fill(~named[:, None, :], -math.inf)
            parts.append((out, torch.nn.functional.pad(scores, (0, 1), value=-math.inf).amax(-1), lse))
        out, top, lse = (torch.cat(part) for part in zip(*parts, strict=True))
        return out, top, lse


def fill(call: Call) -> Call:
    for seed, (pool, slots) in enumerate(zip(call.pools, call.slots(), strict=True)):
        pool.put(slots, seed)
    return call


def make(
    query_lens: tuple[int, ...] = (1, 5, 1, 0, 3),
    seq_lens: tuple[int, ...] = (300, 6, 1, 9, 2000),
    heads: int = 64,
    window_size: int = 128,
    compressed: str = "listed",
    width: int = 200,
    ratio: int = 4,
    rows: tuple[int, int] = (64, 64),
    formats: tuple[str, str] = (FP8, FP8),
    more_stride: int = 0,
    padding: int = 1,
    bad: float = 0.1,
    sink: str = "mixed",
    seed: int = 0,
) -> Call:
    """A random call. compressed: "none", "all" or "listed", with so many columns (width)."""
    g = generator(seed)
    tokens = sum(query_lens) + padding
    exponents = torch.randint(-4, 7, (tokens, heads, 1), device=DEVICE, generator=g)
    q = torch.randn(tokens, heads, 512, device=DEVICE, generator=g) * torch.exp2(exponents.float())
    pools, tables = [], []
    for own, kv_format, divisor in zip(rows, formats, (1, ratio), strict=True):
        longest = max([0, *(n // divisor for n in seq_lens)])
        columns = -(-longest // own)
        pages = max(2, min(2 * columns, 40))
        pools.append(Pool(kv_format, pages, own, more_stride))
        table = torch.randint(0, pages, (len(seq_lens), columns), device=DEVICE, generator=g).int()
        nowhere = int32([-1, INT_MIN, INT_MAX, pages, -pages])
        chosen = nowhere[torch.randint(0, 5, table.shape, device=DEVICE, generator=g)]
        tables.append(table.where(torch.rand(table.shape, device=DEVICE, generator=g) >= bad, chosen))
    entries = None
    if compressed == "listed":
        most = max([1, *(n // ratio for n in seq_lens)])
        entries = torch.randint(0, most, (tokens, width), device=DEVICE, generator=g).int()
        nowhere = int32([-1, INT_MIN, INT_MAX, most, -7])
        chosen = nowhere[torch.randint(0, 5, entries.shape, device=DEVICE, generator=g)]
        entries = entries.where(torch.rand(entries.shape, device=DEVICE, generator=g) >= bad, chosen)
    count = 1 if compressed == "none" else 2
    lists = list(query_lens), list(seq_lens)
    given = pools[:count], tables[:count], *lists, window_size, ratio, entries, random_sink(sink, heads)
    return fill(Call(q.bfloat16(), *given))


def run(call: Call, **more: Any) -> Results:
    """The kernel's results, over NaN."""
    outputs = {
        "out": torch.full(call.q.shape, math.nan, dtype=torch.bfloat16, device=DEVICE),
        "max_logits": torch.full(call.q.shape[:2], math.nan, device=DEVICE),
        "lse": torch.full(call.q.shape[:2], math.nan, device=DEVICE),
        **more,
    }
    with record_calls() as recording:
        results = sparse_mla_prefill_paged(**call.arguments(), **outputs)
    assert [done.implementation for done in recording.calls] == ["kernel"]
    return results


def check(call: Call, **more: Any) -> Results:
    got = run(call, **more)
    # values are as large as if out were multiplied with so much
    assert_results(got, call.expected(), call.q, call.scale, LARGEST_OF_POOLS / LARGEST)
    return got


@pytest.mark.parametrize("heads", [1, 16, 17, 64, 65, 128])
@pytest.mark.parametrize("compressed", ["none", "all", "listed"])
def test_heads(heads: int, compressed: str) -> None:
    check(make(heads=heads, compressed=compressed, seed=heads))


V41_PAIRS = [(MXFP8, MXFP8), (MXFP8, NVFP4), (FP8, NVFP4), (FP8, MXFP8)]


@pytest.mark.parametrize("formats", [(FP8, BF16), (BF16, FP8), (BF16, BF16), *V41_PAIRS])
@pytest.mark.parametrize("compressed", ["all", "listed"])
def test_formats(formats: tuple[str, str], compressed: str) -> None:
    check(make(formats=formats, compressed=compressed))


@pytest.mark.parametrize("formats", V41_PAIRS)
@pytest.mark.parametrize("heads", [8, 32])
def test_records_of_v41(heads: int, formats: tuple[str, str]) -> None:
    """Odd pages and strides, entries of one and of two tokens, chosen as ever: no kernel of Hopper's own takes them."""
    use = {"formats": formats, "heads": heads}
    check(make(rows=(7, 5), ratio=2, more_stride=16, **use))
    check(make(query_lens=(140,), seq_lens=(700,), ratio=1, width=512, **use))
    if formats[0] == MXFP8:
        check(make(compressed="none", **use))


@pytest.mark.parametrize("first", [1, 2, 53, 64, 256])
@pytest.mark.parametrize("second", [2, 7, 64])
def test_page_sizes(first: int, second: int) -> None:
    check(make(rows=(first, second), seed=first))
    check(make(rows=(first, second), compressed="all", ratio=128, more_stride=576, seed=second))


@pytest.mark.parametrize("width", [0, 1, 63, 64, 65, 512])
@pytest.mark.parametrize("window_size", [1, 64, 65, 128, 2**31 - 1])
def test_columns_around_tiles(window_size: int, width: int) -> None:
    call = make(seq_lens=(300, 67, 1, 9, 130), window_size=min(window_size, 4096), width=width, seed=width)
    want = check(call)
    if window_size > 4096:
        call.window_size = window_size
        assert same_bits(run(call), want)


@pytest.mark.parametrize("compressed", ["none", "all", "listed"])
def test_rows_of_one_request(compressed: str) -> None:
    """Windows that grow from one column on, and entries from none on."""
    check(make((300,), (300,), compressed=compressed, padding=0, ratio=1 if compressed == "all" else 4))


@pytest.mark.parametrize("heads", [64, 128])
@pytest.mark.parametrize("requests", [1, 33, 400])
def test_more_rows_than_multiprocessors(heads: int, requests: int) -> None:
    """Requests of one row, of many and of none, in turn."""
    query_lens = tuple((1, 0, 7, 1, 40)[i % 5] if requests > 1 else 701 for i in range(requests))
    seq_lens = tuple(n + (i * 37 % 300) - 3 for i, n in enumerate(query_lens))
    check(make(query_lens, seq_lens, heads=heads, width=90, padding=5, seed=requests))


def test_starts_that_do_not_begin_at_zero() -> None:
    call = make()
    want = check(call)
    for origin in (-1, 100, INT_MIN, INT_MAX - 10):
        call.origin = origin
        assert same_bits(run(call), want)


def test_rows_without_a_position() -> None:
    """More rows than context."""
    for seq_lens in ((0, 3, -5, 9, 1), (INT_MIN, 5, 1, 1, 2)):
        out, top, lse = check(make(seq_lens=seq_lens))
        assert (out[0] == 0).all()
        assert (top[0] == -math.inf).all()
        assert (lse[0] == math.inf).all()


def test_nobody_has_a_row() -> None:
    for query_lens in ((), (0, 0)):
        out, _, lse = check(make(query_lens, tuple(50 for _ in query_lens), padding=300))
        assert (out == 0).all()
        assert (lse == math.inf).all()


@pytest.mark.parametrize("sink", ["none", "minus", "finite", "plus"])
def test_sinks(sink: str) -> None:
    out, *logits = check(make(sink=sink))
    assert same_bits(tuple(logits), run(make(sink="none"))[1:])
    if sink == "plus":
        assert (out == 0).all()


@pytest.mark.parametrize("bad", [0.5, 0.9, 1.0])
def test_entries_and_pages_that_are_none(bad: float) -> None:
    check(make((1, 140), (3000, 500), width=260, bad=bad))


def test_entries_that_a_row_does_not_see() -> None:
    """They name rows that are poison."""
    call = make((1, 9, 2), (40, 100, 2), width=30, bad=0.0)
    assert call.entries is not None
    call.entries[:] = torch.randint(0, 25, call.entries.shape, device=DEVICE, generator=generator(1)).int()
    for pool in call.pools:
        pool.bytes.fill_(0xFF)
    check(fill(call))


@pytest.mark.parametrize("scale", [0.0, -SCALE, 0.3])
def test_scales(scale: float) -> None:
    check(dataclasses.replace(make(sink="finite"), scale=scale))


def test_scales_of_records_of_all_sizes() -> None:
    """Exponents that one bf16 factor cannot have beside 2^120, and the smallest."""
    call = make(bad=0.0, sink="none")
    for pool, slots in zip(call.pools, call.slots(), strict=True):
        used = torch.unique(slots[slots >= 0])
        codes = torch.zeros(len(used), 576, dtype=torch.uint8, device=DEVICE)
        # codes of 2^-9 to 2^-6 with scales that bring them near to 1, others tiny
        codes[:, :448] = torch.randint(1, 8, (len(used), 448), device=DEVICE, generator=generator(3)).byte()
        scales = int32([130, 133, 134, 135, 0, 64, 120]).byte().repeat(len(used), 1)
        pool.write(used, codes, torch.nn.functional.pad(scales, (0, 1), value=255))
    call.q = (call.q * 0.01).bfloat16()
    out, top, lse = run(call)
    want = call.expected()
    assert ((out.double() - want[0]).abs() <= 3.01 / 128 * want[0].abs() + 2e-3).all()
    assert ((lse == want[2]) | ((lse - want[2]).abs() <= 1e-3 + 1e-4 * want[2].abs())).all()
    assert not top.isnan().any()


def test_bits_repeat_and_do_not_depend_on_the_batch() -> None:
    call = make((1,) * 100 + (200, 99), (700,) * 50 + (5,) * 50 + (200, 500), heads=128, width=205, padding=0)
    want = check(call)
    for _ in range(20):
        assert same_bits(run(call), want)
    assert call.entries is not None
    part = dataclasses.replace(
        call,
        q=call.q[7:9],
        entries=call.entries[7:9],
        tables=[table[7:9] for table in call.tables],
        query_lens=[1, 1],
        seq_lens=[700, 700],
    )
    assert same_bits(run(part), tuple(result[7:9] for result in want))
