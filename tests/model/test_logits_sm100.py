# SPDX-License-Identifier: Apache-2.0
"""The score kernel of Blackwell, run by the model of the GPU as the op launches it, against float64."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from cute_kernels import formats
from cute_kernels.indexer.blackwell.logits import BlackwellLogitsKey
from cute_kernels.indexer.hopper.logits import LogitsKey
from cute_kernels.indexer.hopper.logits_mxfp4 import Mxfp4LogitsKey
from cute_kernels.indexer.params import LOOKED_AT, WARP
from tests import oracle
from tests.compile.reports import compile_report
from tests.helpers import poisoned_pool
from tests.indexer import meaning
from tests.indexer.meaning import HIGH, LOW
from tests.model import trace
from tests.model.events import Record
from tests.model.logits_calls import Scores
from tests.model.ptx import Program, parse
from tests.model.replay import Replay

Key = BlackwellLogitsKey | LogitsKey | Mxfp4LogitsKey
"""Kernels that the checks here take."""

SHARE = 2.0**-20
"""Of the sum of its magnitudes, that a score may be off by: products of the model are exact, and sums are fp32."""

WIDE = (97, 139)
"""Scale bytes: 2^-30 to 2^11, side by side in one row."""


STALE = "bytes of an operand are of different versions", "bytes of an operand that nobody has written"
"""Rows of an operand whose box is not there keep what they had: scores made of them are not stored."""


@functools.cache
def program(key: Key) -> Program:
    return parse(compile_report(key).ptx)


@dataclass
class Rows:
    """Codes and scales of queries or keys, bytes: of FP8 keys a scale is an fp32, of MXFP4 it is four ue8m0."""

    codes: np.ndarray
    scales: np.ndarray
    mxfp4: bool

    @classmethod
    def make(cls, rng: np.random.Generator, mxfp4: bool, *lead: int) -> Rows:
        if mxfp4:
            codes = rng.integers(0, 256, (*lead, 64), dtype=np.uint8)
            return cls(codes, rng.integers(*WIDE, (*lead, 4), dtype=np.uint8), True)
        scales = (rng.uniform(1, 2, lead) * 2.0 ** rng.integers(-20, 10, lead)).astype(np.float32)
        return cls(meaning.e4m3_codes(rng, *lead, 128), scales[..., None].view(np.uint8), False)

    def values(self) -> np.ndarray:
        """float64 [..., 128]; of FP8 without scales."""
        if not self.mxfp4:
            return oracle.E4M3[self.codes].astype(np.float64)
        codes = meaning.E2M1_SIGNED[meaning.unpack(self.codes)].astype(np.float64)
        return codes * np.repeat(np.exp2(self.scales.astype(np.float64) - 127), 32, axis=-1)

    def words(self) -> torch.Tensor:
        dtype = torch.int32 if self.mxfp4 else torch.float32
        return torch.from_numpy(self.scales).contiguous().view(dtype)[..., 0]

    def tensor(self) -> torch.Tensor:
        found = torch.from_numpy(self.codes)
        return found if self.mxfp4 else found.view(torch.float8_e4m3fn)


def scores(q: Rows, k: Rows, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """float64 scores [rows, keys], and what they are made of."""
    one, two, w = q.values(), k.values(), weights.astype(np.float64)[..., None]
    scale = np.ones(len(two)) if k.mxfp4 else k.scales.view(np.float32)[:, 0].astype(np.float64)
    exact = (np.maximum(one @ two.T, 0) * w).sum(1) * scale
    return exact, ((np.abs(one) @ np.abs(two).T) * np.abs(w)).sum(1) * scale


def some_weights(rng: np.random.Generator, rows: int, heads: int) -> np.ndarray:
    """Of both signs, with zeros."""
    found = rng.standard_normal((rows, heads)).astype(np.float32)
    found[:, rng.integers(0, heads, heads // 4)] = 0
    return found


def assert_near(got: np.ndarray, exact: np.ndarray, size: np.ndarray) -> None:
    off = np.abs(got.astype(np.float64) - exact)
    assert np.isfinite(got).all()
    assert (off <= SHARE * size).all(), f"off by {np.max(off / np.maximum(size, 1e-300)):.2e} of the magnitudes"


# ---- contiguous keys -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "width", "seed"),
    [
        (BlackwellLogitsKey("sm_100a", 64, 4, False, False), 0, 1),
        (BlackwellLogitsKey("sm_100a", 64, 4, False, False), 70, 2),
        (BlackwellLogitsKey("sm_103a", 64, 3, False, True), 0, 3),
    ],
    ids=str,
)
def test_contiguous(key: BlackwellLogitsKey, width: int, seed: int) -> None:
    """Groups that are not full, ranges of all kinds, NaN in a key and in a query; every column is written once."""
    check_contiguous(key, width, seed, program(key))


def check_contiguous(
    key: Key,
    width: int,
    seed: int,
    ptx: Program,
    rows: int = 0,
    count: int = 300,
    blocks: int = 3,
    **options: Any,
) -> None:
    """Of so many rows and keys; two rows more than a group has, if it is not said how many."""
    rng = np.random.default_rng(seed)
    rows = rows or key.rows + 2
    mxfp4 = key.mxfp4 if isinstance(key, BlackwellLogitsKey) else isinstance(key, Mxfp4LogitsKey)
    q, k = (Rows.make(rng, mxfp4, *lead) for lead in ((rows, key.heads), (count,)))
    weights = some_weights(rng, rows, key.heads)
    bad_key, bad_row = 140, 1
    exact, size = scores(q, k, weights)
    (k.scales if mxfp4 else k.codes)[bad_key, 2] = 0xFF
    (q.scales if mxfp4 else q.codes)[bad_row, 5, 1] = 0xFF
    start, end = meaning.ranges(rows, count, seed)
    start[2:4], end[2:4] = torch.tensor([60, 3]), torch.tensor([280, count])
    out = torch.empty(rows, width or count)
    args = {
        "q": q.tensor(),
        "q_scale": q.words() if mxfp4 else None,
        "k": k.tensor(),
        "k_scale": k.words(),
        "weights": torch.from_numpy(weights),
        "cu_seq_len_k_start": start,
        "cu_seq_len_k_end": end,
        "clean_logits": True,
        "max_seqlen_k": width,
        "out": out,
    }
    call = Scores.of("mqa_logits", args, blocks, key.arch)
    assert call.key == key
    got, written = call.run(ptx, seed=seed, **options)
    # of the bad row, of the bad key's neighbours, and of no others
    assert not isinstance(key, BlackwellLogitsKey) or 0 < call.made_again < 0.8
    assert (written == 1).all()
    for row in range(rows):
        shift = int(start[row]) if width else 0
        seen = [n for n in range(max(0, int(start[row])), min(count, int(end[row]))) if n - shift < out.shape[1]]
        columns = np.array(seen, np.int64) - shift
        unseen = np.setdiff1d(np.arange(out.shape[1]), columns)
        assert np.isneginf(got[row, unseen]).all()
        if row == bad_row:
            assert np.isnan(got[row, columns]).all()
            continue
        is_bad = np.array(seen) == bad_key
        assert np.isnan(got[row, columns[is_bad]]).all()
        keys = np.array(seen, np.int64)[~is_bad]
        assert_near(got[row, columns[~is_bad]], exact[row, keys], size[row, keys])


def scores_of_all(key: BlackwellLogitsKey, q: Rows, k: Rows, weights: np.ndarray) -> np.ndarray:
    """Of rows that see all keys."""
    rows, count = len(weights), len(k.codes)
    args = {
        "q": q.tensor(),
        "q_scale": q.words() if q.mxfp4 else None,
        "k": k.tensor(),
        "k_scale": k.words(),
        "weights": torch.from_numpy(weights),
        "cu_seq_len_k_start": torch.zeros(rows, dtype=torch.int32),
        "cu_seq_len_k_end": torch.full((rows,), count, dtype=torch.int32),
        "clean_logits": False,
        "max_seqlen_k": 0,
        "out": torch.empty(rows, count),
    }
    call = Scores.of("mqa_logits", args, 1, key.arch)
    assert call.key == key
    return call.run(program(key), seed=1)[0]


@pytest.mark.parametrize("mxfp4", [False, True])
def test_sums_that_fp32_holds_are_exact(mxfp4: bool) -> None:
    """To the last bit, whichever way negative products are left out."""
    key, rng = BlackwellLogitsKey("sm_100a", 64, 3 if mxfp4 else 4, False, mxfp4), np.random.default_rng(1)
    q, k = (Rows.make(rng, mxfp4, *lead) for lead in ((key.rows, 64), (200,)))
    for one in (q, k):
        if mxfp4:
            one.scales[:] = 127
        else:
            one.codes = rng.choice(np.array([0, 0x38, 0x40, 0x44, 0xB8, 0xC0], np.uint8), one.codes.shape)
    if not mxfp4:
        k.scales = (2.0 ** rng.integers(-3, 4, 200)).astype(np.float32)[:, None].view(np.uint8)
    weights = rng.integers(-8, 9, (key.rows, 64)).astype(np.float32)
    got = scores_of_all(key, q, k, weights)
    exact, _ = scores(q, k, weights)
    assert (got == exact).all()


def test_products_at_the_ends_of_fp32() -> None:
    """-inf counts as nothing, 2^127 and more as they are, infinity and NaN spoil what they are part of."""
    key, rng = BlackwellLogitsKey("sm_100a", 64, 3, False, True), np.random.default_rng(2)
    q, k = (Rows.make(rng, True, *lead) for lead in ((3, 64), (200,)))
    q.codes[:], k.codes[:], q.scales[:] = 0, 0, 127
    # a product is the first number of the key, and its negative where a head's query is -1
    q.codes[0, :, 0], q.codes[1, :, 0], q.codes[2, ::2, 0] = 2, 10, 2
    q.codes[2, 1::2, 0] = 10
    k.codes[:, 0] = rng.integers(1, 16, 200)
    k.scales[:] = rng.choice(np.array([0, 1, 100, 252, 253, 254, 255], np.uint8), 200)[:, None]
    weights = (rng.integers(-1, 2, (3, 64)) / 64).astype(np.float32)
    got = scores_of_all(key, q, k, weights)
    scale = np.where(k.scales[:, 0] == 255, np.nan, np.exp2(k.scales[:, 0] - 127.0))
    first = meaning.E2M1_SIGNED[k.codes[:, 0]] * scale
    first = np.where(np.abs(first) >= 2.0**128, np.copysign(np.inf, first), first)
    sign = np.where(q.codes[..., 0] == 2, 1.0, -1.0)
    with np.errstate(invalid="ignore"):
        want = (np.maximum(sign[..., None] * first, 0) * weights[..., None]).sum(1).astype(np.float32)
    assert np.isneginf(first).any()
    assert (np.abs(first[np.isfinite(first)]) >= 2.0**127).any()
    assert np.array_equal(got, want, equal_nan=True)


# ---- keys in pages ---------------------------------------------------------------------------------------------------


@dataclass
class Paged:
    """A pool of poison with random keys in all its rows, and garbage in block tables past the lengths."""

    pool: torch.Tensor
    keys: Rows
    table: np.ndarray
    lens: np.ndarray
    page_rows: int
    bad: int = -1
    """Number of a key that is NaN."""

    @classmethod
    def make(cls, rng: np.random.Generator, fmt: Any, page_rows: int, lens: np.ndarray, columns: int) -> Paged:
        pages, width = 9, 64 if "mxfp4" in fmt.id else 128
        pool = poisoned_pool(fmt, pages + 2, page_rows, extra_stride=fmt.alignment)
        raw = pool.as_strided((pages + 2, page_rows * (width + 4)), (pool.stride(0), 1)).numpy()
        keys = Rows.make(rng, width == 64, pages * page_rows)
        raw[:pages, : page_rows * width] = keys.codes.reshape(pages, -1)
        raw[:pages, page_rows * width :] = keys.scales.reshape(pages, -1)
        table = np.full((len(lens), -(-columns // page_rows)), -1_000_000, np.int32)
        for request, row in enumerate(lens):
            count = min(-(-max(int(row.max()), 0) // page_rows), table.shape[1])
            table[request, :count] = rng.integers(0, pages, count)
            table[request, count:] = rng.choice([-1, -7, HIGH, LOW, pages + 2], table.shape[1] - count)
        return cls(pool, keys, table, lens, page_rows)

    def spoil(self, number: int) -> None:
        """Make a key NaN: of MXFP4 by one of its scales, of FP8 by one of its codes."""
        page, row = divmod(number, self.page_rows)
        width = 64 if self.keys.mxfp4 else 128
        at, code = (self.page_rows * width + row * 4, 0xFF) if self.keys.mxfp4 else (row * width, 0x7F)
        self.pool.as_strided((len(self.pool), at + 3), (self.pool.stride(0), 1))[page, at + 2] = code
        self.bad = number

    def place(self, request: int, n: int) -> int:
        """Number of the key that is column n of a request; negative if there is none."""
        column = n // self.page_rows
        page = int(self.table[request, column]) if column < self.table.shape[1] else -1
        return page * self.page_rows + n % self.page_rows if 0 <= page < self.pool.shape[0] - 2 else -1


def paged_call(rng: np.random.Generator, paged: Paged, fmt: Any, heads: int, columns: int, clean: bool) -> Any:
    """(arguments, queries, weights)."""
    requests, next_n = paged.lens.shape
    q = Rows.make(rng, paged.keys.mxfp4, requests, next_n, heads)
    weights = some_weights(rng, requests * next_n, heads)
    args = {
        "q": q.tensor(),
        "q_scale": q.words() if q.mxfp4 else None,
        "kv_cache": paged.pool,
        "weights": torch.from_numpy(weights),
        "context_lens": torch.from_numpy(paged.lens),
        "block_tables": torch.from_numpy(paged.table),
        "max_model_len": columns,
        "clean_logits": clean,
        "kv_format": fmt.id,
        "out": torch.empty(requests * next_n, columns),
        "use_pdl": False,
    }
    return args, q, weights


def check_paged(got: np.ndarray, written: np.ndarray, paged: Paged, q: Rows, weights: np.ndarray, clean: bool) -> None:
    next_n, columns = paged.lens.shape[1], got.shape[1]
    flat = Rows(q.codes.reshape(len(got), -1, q.codes.shape[-1]), q.scales, q.mxfp4)
    flat.scales = q.scales.reshape(len(got), -1, q.scales.shape[-1])
    exact, size = scores(flat, paged.keys, weights)
    for row in range(len(got)):
        request = row // next_n
        length = min(max(int(paged.lens[request, row % next_n]), 0), columns)
        places = np.array([paged.place(request, n) for n in range(length)], np.int64)
        assert (written[row, :length] == 1).all()
        assert np.isneginf(got[row, :length][places < 0]).all()
        assert np.isnan(got[row, :length][(places >= 0) & (places == paged.bad)]).all()
        good = (places >= 0) & (places != paged.bad)
        assert_near(got[row, :length][good], exact[row, places[good]], size[row, places[good]])
        assert (written[row, length:] == clean).all()
        assert not clean or np.isneginf(got[row, length:]).all()


@pytest.mark.parametrize(
    ("key", "fmt", "page_rows", "clean", "seed"),
    [
        (BlackwellLogitsKey("sm_100a", 64, 1, True, True), formats.INDEXER_MXFP4, 64, True, 1),
        (BlackwellLogitsKey("sm_100a", 64, 1, True, True), formats.INDEXER_MXFP4_WIDE, 192, False, 2),
        (BlackwellLogitsKey("sm_100a", 48, 3, True, False), formats.INDEXER_FP8, 64, False, 3),
        (BlackwellLogitsKey("sm_100a", 48, 3, True, False), formats.INDEXER_FP8, 128, True, 4),
    ],
    ids=str,
)
def test_pages(key: BlackwellLogitsKey, fmt: Any, page_rows: int, clean: bool, seed: int) -> None:
    """Lengths that differ between rows, are none, negative, or longer than the table and the columns; pages that are
    not there."""
    check_pages(key, fmt, page_rows, clean, seed)


def check_pages(key: Key, fmt: Any, page_rows: int, clean: bool, seed: int, next_n: int = 0) -> None:
    """Of requests of so many rows; as many as a group has, if it is not said how many."""
    rng = np.random.default_rng(seed)
    columns = 450
    longest = np.array([[333], [0], [HIGH], [-5], [129]], np.int32)
    numbers = range(next_n or key.rows)
    lens = np.concatenate([np.where(longest > 300, longest - i * 70, longest - i) for i in numbers], 1)
    paged = Paged.make(rng, fmt, page_rows, lens.astype(np.int32), columns)
    paged.table[0, 1] = -1
    paged.table = paged.table[:, : -1 if page_rows == 64 else None].copy()
    args, q, weights = paged_call(rng, paged, fmt, key.heads, columns, clean)
    call = Scores.of("paged_mqa_logits", args, 4, key.arch)
    assert call.key == key
    got, written = call.run(program(key), seed=seed)
    check_paged(got, written, paged, q, weights, clean)


def many_tiles(key: Key, fmt: Any, ptx: Program, events: Any = None, has_short_groups: bool = False) -> None:
    """A call with more tiles in a block than stages and, of one row, more groups than a warp looks at, of two more than
    it has threads; a key is NaN. With short groups in a row, queries go round before keys do."""
    rng = np.random.default_rng(7)
    skip, most = 20, (key.config.stages + 3) * key.config.keys
    lens = np.full(({1: LOOKED_AT + 2, 2: WARP + 8}.get(key.rows, 8), key.rows), 20, np.int32)
    lens[1], lens[4], lens[-1], lens[2] = 200, most, 130, 0
    if has_short_groups:
        lens[5], lens[6] = 60, 70
    paged = Paged.make(rng, fmt, 64, lens, most)
    # of its neighbours the sums are made again
    paged.spoil(paged.place(4, 200))
    args, q, weights = paged_call(rng, paged, fmt, key.heads, most, False)
    call = Scores.of("paged_mqa_logits", args, 1, key.arch, skip)
    assert call.key == key
    got, written = call.run(ptx, seed=1, laziness=0.8, events=events)
    assert not isinstance(key, BlackwellLogitsKey) or 0 < call.made_again < 0.2
    paged.lens = np.where(lens > skip, lens, 0)
    check_paged(got, written, paged, q, weights, False)


@pytest.mark.parametrize(
    ("key", "fmt"),
    [
        (BlackwellLogitsKey("sm_100a", 64, 1, True, True), formats.INDEXER_MXFP4),
        (BlackwellLogitsKey("sm_100a", 64, 2, True, False), formats.INDEXER_FP8),
        (BlackwellLogitsKey("sm_100a", 48, 3, True, False), formats.INDEXER_FP8),
    ],
    ids=str,
)
def test_many_tiles_in_one_block(key: BlackwellLogitsKey, fmt: Any) -> None:
    """All rings go round, with as many groups as have to be counted first; rows that see few keys are not scored. In
    other orders, too, nothing hangs, and nothing meets that has to be kept apart."""
    check_many_tiles(key, fmt)


def assert_no_phase_is_skipped(record: Record) -> None:
    """A warp that waits for products waits for every phase of their mbarrier: where it leaves one out that is not over
    yet, the parity of the next is that of one long over."""
    waits: dict[tuple[int, int], list[int]] = {}
    committed = set()
    for warp in record.warps:
        for event in warp.events:
            if event.kind == "tensor_commit":
                committed.add(event.args[0])
            elif event.kind == "wait":
                place, _, phase, _ = event.args
                waits.setdefault((place, warp.number), []).append(phase)
    found = {who: phases for who, phases in waits.items() if who[0] in committed}
    assert bool(found) == bool(record.program.find(r"^tcgen05\.commit"))
    for (place, number), phases in found.items():
        assert phases == list(range(len(phases))), f"mbarrier {place:#x}, warp {number}: {phases}"


def check_many_tiles(key: Key, fmt: Any) -> None:
    record = Record(program(key))
    many_tiles(key, fmt, program(key), lambda cluster: record, has_short_groups=True)
    assert_no_phase_is_skipped(record)
    assert record.bank_conflicts() == {op: (many, 0, 0) for op, (many, _, _) in record.bank_conflicts().items()}
    steps = trace.make(record)
    for seed in range(3):
        found = Replay(steps, seed, laziness=(0.5, 0.95, 0.05)[seed]).run()
        assert [one for one in found if not one.startswith(STALE)] == []
