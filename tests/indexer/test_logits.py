# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from cute_kernels import formats
from cute_kernels.indexer import reference
from cute_kernels.indexer.ops import (
    cp_gather_indexer_k_quant_cache,
    mqa_logits,
    paged_mqa_logits,
    top_k_per_row_decode,
    top_k_per_row_prefill,
)
from cute_kernels.runtime.record import record_calls
from tests import oracle
from tests.helpers import POISON_BYTE, bits, check_op, raw_bytes
from tests.indexer.meaning import HIGH, INT, NEG_INF, Case, e4m3_codes, fp8_dots, paged, ranges, scores

FORMATS = [formats.INDEXER_FP8, formats.INDEXER_MXFP4, formats.INDEXER_MXFP4_WIDE]
CONTIGUOUS = FORMATS[:2]


def ids(fmt: Any) -> str:
    return fmt.id


def same(got: torch.Tensor, want: np.ndarray) -> None:
    """Bitwise equality of fp32."""
    np.testing.assert_array_equal(got.numpy().view(np.int32), np.ascontiguousarray(want).view(np.int32))


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("heads", [1, 3, 8])
@pytest.mark.parametrize("fmt", CONTIGUOUS, ids=ids)
def test_scores(fmt: Any, heads: int, wide: bool) -> None:
    rows, keys = 13, 37
    case = Case(fmt.id, rows, heads, keys, seed=heads, wide=wide)
    start, end = ranges(rows, keys)
    want = np.full((rows, keys), NEG_INF)
    for m in range(rows):
        a, b = max(int(start[m]), 0), max(min(int(end[m]), keys), 0)
        want[m, a:b] = case.scores[m, a:b]
    got = mqa_logits(case.query(), case.kv(), case.w(), start, end)
    assert got.stride() == (256, 1)
    same(got, want)
    unclean = mqa_logits(case.query(), case.kv(), case.w(), start, end, False)
    inside = want != NEG_INF
    same(unclean[torch.from_numpy(inside)], want[inside])


@pytest.mark.parametrize("width", [1, 11])
@pytest.mark.parametrize("fmt", CONTIGUOUS, ids=ids)
def test_compressed_form(fmt: Any, width: int) -> None:
    rows, keys = 13, 37
    case = Case(fmt.id, rows, 4, keys, seed=2)
    start, end = ranges(rows, keys, seed=1)
    want = np.full((rows, width), NEG_INF)
    for m in range(rows):
        for j in range(width):
            n = int(start[m]) + j
            if 0 <= n < min(int(end[m]), keys):
                want[m, j] = case.scores[m, n]
    got = mqa_logits(case.query(), case.kv(), case.w(), start, end, max_seqlen_k=width)
    same(got, want)


def test_score_is_the_real_number_rounded() -> None:
    rng = np.random.default_rng(4)
    q, k = e4m3_codes(rng, 3, 5, 128), e4m3_codes(rng, 9, 128)
    w = rng.standard_normal((3, 5)).astype(np.float32)
    scale = np.exp2(rng.integers(-9, 9, 9)).astype(np.float32)
    full = torch.tensor([0] * 3, dtype=INT), torch.tensor([9] * 3, dtype=INT)
    tensors = [torch.from_numpy(t) for t in (q, k, scale, w)]
    tensors[:2] = [t.view(torch.float8_e4m3fn) for t in tensors[:2]]
    got = mqa_logits(tensors[0], (tensors[1], tensors[2]), tensors[3], *full)
    for m in range(3):
        for n in range(9):
            total, size = Fraction(0), Fraction(0)
            for h in range(5):
                a, b = ([Fraction(v) for v in oracle.E4M3[c].tolist()] for c in (q[m, h], k[n]))
                dot = sum((x * y for x, y in zip(a, b, strict=True)), Fraction(0))
                term = max(Fraction(0), dot) * Fraction(float(w[m, h]))
                total, size = total + term, size + abs(term)
            total, size = total * Fraction(float(scale[n])), size * Fraction(float(scale[n]))
            error = abs(Fraction(got[m, n].item()) - total)
            assert error <= abs(total) * Fraction(1, 2**24) + size * Fraction(1, 2**50)


def test_heads_are_added_in_order() -> None:
    """Each head has a twin of opposite weight: what is left of the sum is rounding, so any other order shows."""
    rng = np.random.default_rng(6)
    q, k = e4m3_codes(rng, 3, 64, 128), e4m3_codes(rng, 50, 128)
    w = (rng.standard_normal((3, 64)) * np.exp2(rng.integers(-20, 20, (3, 64)))).astype(np.float32)
    order = rng.permutation(32) + 32
    q[:, order], w[:, order] = q[:, :32].copy(), -w[:, :32]
    scale = np.ones(50, np.float32)
    tensors = [torch.from_numpy(t) for t in (q, k, scale, w)]
    tensors[:2] = [t.view(torch.float8_e4m3fn) for t in tensors[:2]]
    full = torch.zeros(3, dtype=INT), torch.full((3,), 50, dtype=INT)
    got = mqa_logits(tensors[0], (tensors[1], tensors[2]), tensors[3], *full)
    assert got.count_nonzero() > 50
    same(got, scores(fp8_dots(q, k), w, scale))


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("fmt", CONTIGUOUS, ids=ids)
def test_bits_do_not_depend_on_batch_or_tiles(fmt: Any, wide: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, keys = 11, 1300
    case = Case(fmt.id, rows, 6, keys, seed=7, wide=wide)
    g = torch.Generator().manual_seed(3)
    start = torch.randint(0, 100, (rows,), generator=g).to(INT)
    end = torch.randint(900, keys + 1, (rows,), generator=g).to(INT)
    whole = mqa_logits(case.query(), case.kv(), case.w(), start, end)
    inside = whole != -torch.inf
    same(whole[inside], case.scores[inside.numpy()])
    for m in range(rows):
        one = slice(m, m + 1)
        alone = mqa_logits(case.query(one), case.kv(), case.w(one), start[one], end[one])
        assert torch.equal(bits(alone[0]), bits(whole[m]))
    for key_tile, score_tile in ((33, 33 * 6 * 4), (1, 1), (5000, 1 << 22)):
        monkeypatch.setattr(reference, "KEY_TILE", key_tile)
        monkeypatch.setattr(reference, "SCORE_TILE", score_tile)
        chosen = slice(None) if key_tile > 1 else slice(0, 2)
        tiled = mqa_logits(case.query(chosen), case.kv(), case.w(chosen), start[chosen], end[chosen])
        assert torch.equal(bits(tiled), bits(whole[chosen]))


def decode_case(fmt: Any, lens: list[list[int]], heads: int, seed: int = 0) -> tuple[Case, list[int], np.ndarray]:
    """A case with one query row per length, the requests' key counts, and each row's first key."""
    counts = [max([0, *row]) for row in lens]
    case = Case(fmt.id, sum(map(len, lens)), heads, sum(counts), seed)
    first = np.repeat(np.concatenate([[0], np.cumsum(counts)[:-1]]), len(lens[0]))
    return case, counts, first


@pytest.mark.parametrize(
    ("block_size", "lens"),
    [
        (64, [[70], [0], [64], [129], [1]]),
        (3, [[9, 8, 10], [-4, 0, 2], [7, 7, 7]]),
        (1, [[3, 5]]),
        (16, [[17, 0, 31, 2, 40], [1, 2, 3, 4, 5]]),
    ],
)
@pytest.mark.parametrize("fmt", FORMATS, ids=ids)
def test_paged_scores(fmt: Any, block_size: int, lens: list[list[int]]) -> None:
    case, counts, first = decode_case(fmt, lens, 5)
    pool, table = paged(case, fmt, counts, block_size)
    before = raw_bytes(pool).clone()
    next_n, width = len(lens[0]), max(counts) + 7
    want = np.full((len(first), width), NEG_INF)
    for row, length in enumerate(n for request in lens for n in request):
        want[row, : max(length, 0)] = case.scores[row, first[row] : first[row] + max(length, 0)]
    q = case.query(slice(None), len(lens), next_n)
    args = (case.w(), torch.tensor(lens, dtype=INT), table, None, width)
    got = paged_mqa_logits(q, pool, *args, True, kv_format=fmt.id)
    assert got.stride() == (256, 1)
    same(got, want)
    inside = torch.from_numpy(want != NEG_INF)
    unclean = paged_mqa_logits(q, pool[:, :, None], *args, kv_format=fmt.id)
    same(unclean[inside], want[inside.numpy()])
    assert torch.equal(raw_bytes(pool), before)


@pytest.mark.parametrize("fmt", FORMATS, ids=ids)
def test_decode_equals_prefill_bitwise(fmt: Any) -> None:
    lens = [[1100, 1099, 1024], [0, 3, 2], [640, 641, 639]]
    case, counts, first = decode_case(fmt, lens, 4, seed=5)
    pool, table = paged(case, fmt, counts, 64)
    total, codes = sum(counts), 64 if case.mxfp4 else 128
    k, scale = torch.zeros(total, codes, dtype=torch.uint8), torch.zeros(total, 4, dtype=torch.uint8)
    cu = torch.tensor(np.concatenate([[0], np.cumsum(counts)]), dtype=INT)
    cp_gather_indexer_k_quant_cache(pool, k, scale, table, cu, kv_format=fmt.id)
    kv = (k, scale.view(INT)[:, 0]) if case.mxfp4 else (k.view(torch.float8_e4m3fn), scale.view(torch.float32)[:, 0])
    start = torch.from_numpy(first).to(INT)
    lengths = torch.tensor(lens, dtype=INT)
    end = start + lengths.flatten()
    contiguous = mqa_logits(case.query(), kv, case.w(), start, end, False)
    compressed = mqa_logits(case.query(), kv, case.w(), start, end, max_seqlen_k=1100)
    decode = paged_mqa_logits(
        case.query(slice(None), 3, 3), pool, case.w(), lengths, table, None, 1100, True, kv_format=fmt.id
    )
    assert torch.equal(bits(decode), bits(compressed))
    for row, length in enumerate(lengths.flatten().tolist()):
        a = int(start[row])
        assert torch.equal(bits(decode[row, :length]), bits(contiguous[row, a : a + length]))
    picks = [torch.zeros(9, 512, dtype=INT) for _ in range(3)]
    top_k_per_row_decode(decode, 3, lengths, picks[0], 9, decode.stride(0), 1, 512)
    top_k_per_row_prefill(contiguous, start, end, picks[1], 9, contiguous.stride(0), 1, 512)
    top_k_per_row_prefill(compressed, torch.zeros_like(start), end - start, picks[2], 9, compressed.stride(0), 1, 512)
    ordered = [p.sort(dim=1).values for p in picks]
    assert torch.equal(ordered[0], ordered[1])
    assert torch.equal(ordered[0], ordered[2])
    for row in range(9):
        alone = torch.zeros(1, 512, dtype=INT)
        b, j = divmod(row, 3)
        q = case.query(slice(row, row + 1), 1, 1)
        one = lengths[b : b + 1, j]
        score = paged_mqa_logits(
            q, pool, case.w(slice(row, row + 1)), one, table[b : b + 1], None, 1100, True, kv_format=fmt.id
        )
        assert torch.equal(bits(score[0]), bits(decode[row]))
        top_k_per_row_decode(score, 1, one, alone, 1, score.stride(0), 1, 512)
        assert torch.equal(alone.sort(dim=1).values[0], ordered[0][row])


@pytest.mark.parametrize("fmt", FORMATS, ids=ids)
def test_paged_bad_data_is_harmless(fmt: Any) -> None:
    case, counts, _ = decode_case(fmt, [[20], [20]], 3)
    pool, table = paged(case, fmt, counts, 4)
    for page, value in ((1, -1_000_000), (3, HIGH), (4, pool.shape[0])):
        table[0, page] = value
    lengths = torch.tensor([[24], [HIGH]], dtype=INT)
    got = paged_mqa_logits(
        case.query(slice(None), 2, 1), pool, case.w(), lengths, table, None, 23, False, kv_format=fmt.id
    )
    want = np.full((2, 23), NEG_INF)
    for n in range(20):
        if n // 4 in (0, 2):
            want[0, n] = case.scores[0, n]
        want[1, n] = case.scores[1, 20 + n]
    same(got, want)
    nowhere = paged_mqa_logits(
        case.query(slice(None), 2, 1), pool[:0], case.w(), lengths, table[:, :0], None, 23, kv_format=fmt.id
    )
    assert (nowhere == -torch.inf).all()


def test_memory_outside_the_lengths_may_be_nan() -> None:
    """0xFF is NaN as a code and as a scale."""
    lens = [[5, 3], [0, 6]]
    for fmt in FORMATS:
        case, counts, _ = decode_case(fmt, lens, 3)
        pool, table = paged(case, fmt, counts, 4)
        args = (case.query(slice(None), 2, 2), pool, case.w(), torch.tensor(lens, dtype=INT), table, None, 9, True)
        clean = paged_mqa_logits(*args, kv_format=fmt.id)
        raw_bytes(pool).fill_(0xFF)
        slots = [int(table[r, i // 4]) * 4 + i % 4 for r, n in enumerate(counts) for i in range(n)]
        case.store(pool, np.array(slots))
        got = paged_mqa_logits(*args, kv_format=fmt.id)
        assert not got.isnan().any()
        assert torch.equal(bits(got), bits(clean))


@pytest.mark.parametrize("fmt", CONTIGUOUS, ids=ids)
def test_nan_stays_in_its_row_or_column(fmt: Any) -> None:
    case = Case(fmt.id, 6, 4, 40, seed=3)
    start, end = torch.zeros(6, dtype=INT), torch.full((6,), 40, dtype=INT)
    want = case.scores.copy()
    if not case.mxfp4:
        case.k[7, 100], case.k[9, 0] = 0x7F, 0xFF
        case.q[2, 3, 5] = 0x7F
    else:
        case.k_byte[7, 2], case.k_byte[9, 0] = 255, 255
        case.q_byte[2, 3, 1] = 255
    case.weights[4, 1], case.weights[5, 0] = np.nan, np.inf
    got = mqa_logits(case.query(), case.kv(), case.w(), start, end)
    keep = np.ones((6, 40), dtype=bool)
    keep[[2, 4, 5]] = False
    keep[:, [7, 9]] = False
    same(got[torch.from_numpy(keep)], want[keep])
    assert got[:, [7, 9]].isnan().all()
    assert got[[2, 4]].isnan().all()


def test_relu_is_per_head_and_weights_may_be_negative() -> None:
    q = np.zeros((1, 2, 128), np.uint8)
    q[0, 0, 0], q[0, 1, 0] = 0x38, 0xB8  # +1 and -1
    k = np.zeros((3, 128), np.uint8)
    k[0, 0], k[1, 0] = 0x40, 0xC0  # +2 and -2
    k[2, 0] = 0x38
    w = torch.tensor([[-3.0, 5.0]])
    scale = torch.tensor([1.0, 0.5, -4.0])
    fp8 = [torch.from_numpy(t).view(torch.float8_e4m3fn) for t in (q, k)]
    got = mqa_logits(fp8[0], (fp8[1], scale), w, torch.zeros(1, dtype=INT), torch.full((1,), 3, dtype=INT))
    assert got.tolist() == [[-6.0, 5.0, 12.0]]
    same(got, scores(fp8_dots(q, k), w.numpy(), scale.numpy()))


@pytest.mark.parametrize("fmt", CONTIGUOUS, ids=ids)
def test_strided_inputs_and_out(fmt: Any) -> None:
    case = Case(fmt.id, 5, 3, 20, seed=1)
    start, end = torch.zeros(5, dtype=INT), torch.full((5,), 20, dtype=INT)

    def spaced(t: torch.Tensor) -> torch.Tensor:
        """The same values with a gap in every dimension but the last."""
        big = torch.empty([2 * n for n in t.shape[:-1]] + [t.shape[-1] + 3], dtype=t.dtype)
        raw_bytes(big).fill_(0xFF)
        view = big[tuple(slice(0, n) for n in t.shape)]
        view.copy_(t)
        return view

    q, kv, w = case.query(), case.kv(), spaced(case.w())
    q = tuple(spaced(t) for t in q) if case.mxfp4 else spaced(q)
    if case.mxfp4:
        q = (q[0].view(torch.int8), q[1])
    buffer = torch.empty(9, 40)
    raw_bytes(buffer).fill_(POISON_BYTE)
    out = buffer[2:7, 9:29]
    got = mqa_logits(q, (spaced(kv[0]), kv[1]), w, start, end, out=out)
    assert got is out
    same(out, case.scores)
    out.view(torch.uint8).fill_(POISON_BYTE)
    assert (raw_bytes(buffer) == POISON_BYTE).all()
    pool, table = paged(case, fmt, [20], 8)
    q = tuple(t[None] for t in q) if case.mxfp4 else q[None]
    lengths = torch.full((1, 5), 20, dtype=INT)
    paged_mqa_logits(q, pool, w, lengths, table, None, 20, True, kv_format=fmt.id, out=out)
    same(out, case.scores)
    out.view(torch.uint8).fill_(POISON_BYTE)
    assert (raw_bytes(buffer) == POISON_BYTE).all()


def test_empty() -> None:
    for fmt in CONTIGUOUS:
        case = Case(fmt.id, 2, 3, 4)
        none, two = torch.zeros(0, dtype=INT), torch.tensor([0, 4], dtype=INT)
        empty = slice(0, 0)
        q = tuple(t[:0] for t in case.query()) if case.mxfp4 else case.query()[:0]
        assert mqa_logits(q, case.kv(), case.w(empty), none, none).shape == (0, 4)
        no_keys = tuple(t[:0] for t in case.kv())
        assert mqa_logits(case.query(), no_keys, case.w(), two, two).shape == (2, 0)
        assert (mqa_logits(case.query(), no_keys, case.w(), two, two, max_seqlen_k=3) == -torch.inf).all()
        pool, table = paged(case, fmt, [4], 8)
        q = tuple(t[:0, None] for t in case.query()) if case.mxfp4 else case.query()[:0, None]
        no_length = torch.zeros(0, 1, dtype=INT)
        got = paged_mqa_logits(q, pool, case.w(empty), no_length, table[:0], None, 6, kv_format=fmt.id)
        assert got.shape == (0, 6)
        q = case.query(slice(None), 1, 2)
        lengths = torch.tensor([[3, -1]], dtype=INT)
        got = paged_mqa_logits(q, pool, case.w(), lengths, table, None, 0, kv_format=fmt.id)
        assert got.shape == (2, 0)


@pytest.mark.parametrize("fmt", CONTIGUOUS, ids=ids)
def test_opcheck(fmt: Any) -> None:
    case = Case(fmt.id, 4, 2, 9)
    start, end = torch.tensor([0, 2, 9, 1], dtype=INT), torch.tensor([9, 5, 9, 4], dtype=INT)
    q, scale = case.query() if case.mxfp4 else (case.query(), None)
    check_op("mqa_logits", q, scale, *case.kv(), case.w(), start, end, True, 0, torch.zeros(4, 9))
    check_op("mqa_logits", q, scale, *case.kv(), case.w(), start, end, False, 3, torch.zeros(4, 3))
    pool, table = paged(case, fmt, [5, 4], 4)
    lengths = torch.tensor([[5, 2], [0, 4]], dtype=INT)
    q, scale = case.query(slice(None), 2, 2) if case.mxfp4 else (case.query(slice(None), 2, 2), None)
    out = torch.zeros(4, 6)
    check_op("paged_mqa_logits", q, scale, pool, case.w(), lengths, table, 6, True, fmt.id, out, False)


@pytest.mark.full
@pytest.mark.parametrize("fmt", CONTIGUOUS, ids=ids)
def test_compile(fmt: Any) -> None:
    def f(q: Any, kv: Any, w: Any, start: Any, end: Any, pool: Any, lengths: Any, table: Any) -> Any:
        rows = w.shape[0]
        batched = (q[0].unflatten(0, (rows, 1)), q[1].unflatten(0, (rows, 1))) if isinstance(q, tuple) else q[:, None]
        return (
            mqa_logits(q, kv, w, start, end),
            mqa_logits(q, kv, w, start, end, max_seqlen_k=7),
            paged_mqa_logits(batched, pool, w, lengths, table, None, 11, True, kv_format=fmt.id),
        )

    compiled = torch.compile(f, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows, keys in ((4, 9), (7, 12)):
        case = Case(fmt.id, rows, 3, keys * rows)
        pool, table = paged(case, fmt, [keys] * rows, 4)
        start = torch.arange(rows, dtype=INT) * keys
        lengths = torch.full((rows, 1), keys, dtype=INT)
        args = (case.query(), case.kv(), case.w(), start, start + keys, pool, lengths, table)
        for a, b in zip(f(*args), compiled(*args), strict=True):
            assert a.stride() == b.stride()
            assert torch.equal(bits(a), bits(b))


def test_cost() -> None:
    case = Case("indexer_fp8/1", 3, 2, 10)
    start, end = torch.tensor([-2, 6, 4], dtype=INT), torch.tensor([4, 99, 4], dtype=INT)
    mx = Case("indexer_mxfp4/1", 3, 2, 10)
    pool, table = paged(mx, formats.INDEXER_MXFP4, [6, 0, 4], 4)
    lengths = torch.tensor([[6], [-1], [4]], dtype=INT)
    with record_calls() as recording:
        mqa_logits(case.query(), case.kv(), case.w(), start, end)
        mqa_logits(case.query(), case.kv(), case.w(), start, end, False, max_seqlen_k=3)
        paged_mqa_logits(
            mx.query(slice(None), 3, 1), pool, mx.w(), lengths, table, None, 5, kv_format="indexer_mxfp4/1"
        )
    reads = 3 * 2 * 128 + 3 * 2 * 4 + 2 * 12
    assert [(c.cost.bytes, c.cost.flops) for c in recording.calls] == [
        (reads + 8 * 132 + 30 * 4, 8 * 2 * 256),
        (reads + 4 * 132 + 4 * 4, 4 * 2 * 256),
        (3 * 2 * (64 + 4) + 3 * 2 * 4 + 12 + 9 * 68 + 9 * 4, 9 * 2 * 256),
    ]


def test_bad_arguments_contiguous() -> None:
    fp8, mx = Case("indexer_fp8/1", 3, 2, 5), Case("indexer_mxfp4/1", 3, 2, 5)
    bounds = torch.zeros(3, dtype=INT)
    good = {"q": fp8.query(), "kv": fp8.kv(), "weights": fp8.w()}
    good |= {"cu_seq_len_k_start": bounds, "cu_seq_len_k_end": bounds}
    k, scale = fp8.kv()
    packed, blocks = mx.query()
    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"q": fp8.query().float()}, TypeError, "q"),
        ({"q": fp8.query()[0]}, ValueError, "q"),
        ({"q": [fp8.query()]}, TypeError, "q"),
        ({"q": mx.query()[0]}, TypeError, "q"),
        ({"q": mx.query()}, TypeError, r"kv\[0\]"),
        ({"q": mx.query(), "kv": (mx.kv()[0], scale)}, TypeError, r"kv\[1\]"),
        ({"q": (packed, blocks[:2]), "kv": mx.kv()}, ValueError, r"q\[1\]"),
        ({"q": (packed[..., :32], blocks), "kv": mx.kv()}, ValueError, r"q\[0\]"),
        ({"kv": k}, TypeError, "kv"),
        ({"kv": (k, scale[:3])}, ValueError, r"kv\[1\]"),
        ({"kv": (k.view(torch.uint8), scale)}, TypeError, r"kv\[0\]"),
        ({"weights": fp8.w().double()}, TypeError, "weights"),
        ({"weights": fp8.w()[:2]}, ValueError, "weights"),
        ({"cu_seq_len_k_start": bounds.long()}, TypeError, "cu_seq_len_k_start"),
        ({"cu_seq_len_k_end": bounds[:2]}, ValueError, "cu_seq_len_k_end"),
        ({"max_seqlen_k": -1}, ValueError, "max_seqlen_k"),
        ({"out": torch.zeros(3, 6)}, ValueError, "out"),
        ({"out": torch.zeros(3, 5), "max_seqlen_k": 4}, ValueError, "out"),
        ({"out": torch.zeros(2, 5)}, ValueError, "out"),
        ({"out": torch.zeros(3, 5).half()}, TypeError, "out"),
    ]
    for change, error, says in cases:
        with pytest.raises(error, match=f"^mqa_logits: {says}: expected"):
            mqa_logits(**{**good, **change})


def test_bad_arguments_paged() -> None:
    fp8, mx = Case("indexer_fp8/1", 6, 2, 5), Case("indexer_mxfp4/1", 6, 2, 5)
    pool, table = paged(fp8, formats.INDEXER_FP8, [5, 0], 4)
    q, mx_q = fp8.query(slice(None), 2, 3), mx.query(slice(None), 2, 3)
    lengths = torch.zeros(2, 3, dtype=INT)
    good: dict[str, Any] = {"q": q, "kv_cache": pool, "weights": fp8.w(), "context_lens": lengths}
    good |= {"block_tables": table, "schedule_metadata": None, "max_model_len": 5}
    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"q": None}, TypeError, "q"),
        ({"q": fp8.query()}, ValueError, "q"),
        ({"q": mx_q}, ValueError, "q"),
        ({"q": q[:, :0], "context_lens": lengths[:, :0], "weights": fp8.w()[:0]}, ValueError, "q"),
        ({"kv_cache": pool[:, :, :131]}, ValueError, "kv_cache"),
        ({"kv_cache": pool[:, :, None].expand(-1, -1, 2, -1)}, ValueError, "kv_cache"),
        ({"kv_format": "plain_bf16/1"}, ValueError, "kv_format"),
        ({"kv_format": "indexer_mxfp4/1", "q": mx_q}, ValueError, "kv_cache"),
        ({"kv_format": "indexer_mxfp4_wide/1"}, TypeError, r"q\[0\]"),
        ({"kv_format": "indexer_mxfp4_wide/1", "q": mx_q[0]}, TypeError, r"q\[1\]"),
        ({"weights": fp8.w()[:5]}, ValueError, "weights"),
        ({"context_lens": lengths.long()}, TypeError, "context_lens"),
        ({"context_lens": lengths[:, 0].contiguous()}, ValueError, "context_lens"),
        ({"context_lens": lengths.T.contiguous()}, ValueError, "context_lens"),
        ({"block_tables": table[:1]}, ValueError, "block_tables"),
        ({"max_model_len": -1}, ValueError, "max_model_len"),
        ({"out": torch.zeros(6, 4)}, ValueError, "out"),
        ({"out": torch.zeros(2, 3, 5)}, ValueError, "out"),
    ]
    for change, error, says in cases:
        with pytest.raises(error, match=f"^paged_mqa_logits: {says}: expected"):
            paged_mqa_logits(**{**good, **change})
