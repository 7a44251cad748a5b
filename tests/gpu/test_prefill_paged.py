# SPDX-License-Identifier: Apache-2.0
"""The kernel of sparse_mla_prefill_paged on a GPU, against float64. Whatever no query row selects is NaN, between the
pages too."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from cute_kernels.runtime.arch import arch_of
from cute_kernels.sparse_mla.ops import sparse_mla_prefill_paged
from tests.gpu.decode_cases import INT_MAX, INT_MIN, SCALE, int32
from tests.gpu.decode_checks import same_bits
from tests.gpu.paged_cases import Call, check, fill, make, run
from tests.gpu.prefill_checks import use_kernel

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

DEVICE = "cuda"


@pytest.fixture(autouse=True)
def own_kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    use_kernel("own", monkeypatch)
    yield
    # for tests that run beside
    torch.cuda.empty_cache()


@pytest.mark.parametrize("heads", [1, 8, 13, 16, 32, 63, 64, 65, 100, 128])
@pytest.mark.parametrize(("ratio", "width"), [(0, None), (4, 200), (128, None)])
def test_heads(heads: int, ratio: int, width: int | None) -> None:
    call = make(heads=heads, ratio=ratio, width=width, seed=heads)
    check(call)
    if heads > 16 and arch_of(0) == "sm_90a":
        assert same_bits(run(call, form="gathered"), run(call, num_splits=1))


@pytest.mark.parametrize("first", [1, 2, 53, 64, 256])
@pytest.mark.parametrize("second", [1, 2, 7, 64, 256])
def test_page_sizes(first: int, second: int) -> None:
    check(make(rows=(first, second), seed=first))
    check(make(rows=(first, second), more_stride=(576, 1152), heads=128, width=None, seed=second))


@pytest.mark.parametrize("width", [0, 1, 63, 64, 65, 129, 512, None])
@pytest.mark.parametrize("window_size", [1, 7, 64, 65, 128, 200])
def test_keys_around_tiles(window_size: int, width: int | None) -> None:
    seq_lens = (300, window_size + 2, 1, 9, 3 * window_size)
    check(make(seq_lens=seq_lens, window_size=window_size, width=width, ratio=1 if width is None else 4))


@pytest.mark.parametrize("heads", [64, 128])
@pytest.mark.parametrize(("ratio", "width"), [(0, None), (4, 60), (4, None), (128, None)])
def test_a_prompt_from_its_beginning(heads: int, ratio: int, width: int | None) -> None:
    """Windows that grow from one position on, and groups that are not complete yet."""
    check(make((300, 2), (300, 2), heads=heads, ratio=ratio, width=width, padding=0))


@pytest.mark.parametrize("heads", [64, 128])
@pytest.mark.parametrize("requests", [1, 31, 33, 700])
def test_more_rows_than_multiprocessors(heads: int, requests: int) -> None:
    """Requests of one row, of many and of none, in turn."""
    query_lens = tuple((1, 0, 7, 1, 40)[i % 5] if requests > 1 else 701 for i in range(requests))
    seq_lens = tuple(n + (i * 37 % 300) - 3 for i, n in enumerate(query_lens))
    check(make(query_lens, seq_lens, heads=heads, width=90, padding=5, rows=(16, 4), seed=requests))


def test_blocks_with_more_items_than_they_look_ahead() -> None:
    check(make((1,) * 5000, tuple(range(-2, 4998)), heads=128, window_size=3, width=5, padding=9, rows=(4, 2)))
    check(make((5000,), (5001,), heads=8, window_size=3, width=5, padding=9))


@pytest.mark.parametrize(("ratio", "width"), [(4, 512), (128, None)])
@pytest.mark.parametrize("heads", [64, 128])
def test_long_contexts(ratio: int, width: int | None, heads: int) -> None:
    """Positions up to a million, contexts that begin and end in the midst of a group."""
    check(make((3, 130, 1), (1_000_003, 65_537, 99_999), heads=heads, ratio=ratio, width=width))


def test_starts_that_do_not_begin_at_zero() -> None:
    call = make()
    want = check(call)
    for origin in (-1, 100, INT_MIN, INT_MAX - 10):
        call.origin = origin
        assert same_bits(run(call), want)


def test_rows_without_a_position() -> None:
    """More rows than context: those before it have no keys at all."""
    for seq_lens in ((0, 3, -5, 9, 1), (INT_MIN, 5, 1, 1, 2)):
        out, top, lse = check(make(seq_lens=seq_lens))
        assert (out[0] == 0).all()
        assert (top[0] == -math.inf).all()
        assert (lse[0] == math.inf).all()


def test_nobody_has_a_row() -> None:
    for query_lens in ((), (0, 0), (0,) * 100):
        for heads in (64, 128):
            out, top, lse = check(make(query_lens, tuple(50 for _ in query_lens), heads=heads, padding=300))
            assert (out == 0).all()
            assert (top == -math.inf).all()
            assert (lse == math.inf).all()


@pytest.mark.parametrize("sink", ["none", "minus", "finite", "plus"])
def test_sinks(sink: str) -> None:
    out, top, lse = check(make(sink=sink))
    without = run(make(sink="none"))
    assert same_bits((top, lse), without[1:])
    if sink == "plus":
        assert (out == 0).all()
    if sink in ("none", "minus"):
        assert same_bits((out,), without[:1])


@pytest.mark.parametrize("bad", [0.5, 0.9, 1.0])
@pytest.mark.parametrize("heads", [64, 128])
def test_entries_that_are_none(bad: float, heads: int) -> None:
    check(make((1, 140), (3000, 500), width=260, bad=bad, heads=heads))


def test_lists_of_which_only_the_head_counts() -> None:
    """As top-k leaves them: what is behind the visible entries is -1."""
    call = make((40, 3), (45, 700), width=512, bad=0.0)
    assert call.topk is not None
    _, position = call.rows()
    column = torch.arange(512, device=DEVICE)
    call.topk = call.topk.where(column < ((position + 1) // 4)[:, None], -1)
    check(fill(call))


def test_an_entry_that_is_named_often() -> None:
    call = make((9,), (900,), width=300, bad=0.0)
    assert call.topk is not None
    call.topk = call.topk // 100
    check(fill(call))


@pytest.mark.parametrize("scale", [0.0, -SCALE, 0.3])
def test_scales(scale: float) -> None:
    check(dataclasses.replace(make(sink="finite"), scale=scale))


@pytest.mark.parametrize("heads", [64, 128])
def test_large_record_scales(heads: int) -> None:
    """Some rows have scales that take two factors, up to 2^20, others the smallest: their neighbours' are exact too."""
    call = make((3, 2), (900, 40), heads=heads, width=100, padding=0, bad=0.0, sink="none")
    for pool, slots in call.slots():
        named = torch.unique(slots[slots >= 0])
        some = named[::3]
        scales = pool.scales[some // pool.rows, some % pool.rows]
        scales[:, :4] = int32([147, 128, 135, 0]).byte()
        data = pool.data[some // pool.rows, some % pool.rows]
        # codes of the smallest magnitudes: values of 2^-9 times the scale
        data[:, :192] = data[:, :192] & 0x81
        pool.write(some, data, scales)
    call.q = (call.q.double() * 2.0**-16).bfloat16()
    got, want = run(call), call.expected()
    error = (got[0].double() - want[0]).abs().amax()
    assert error <= 3.01 / 128 * want[0].abs().amax()
    assert ((got[2] - want[2]).abs() <= 1e-4).all()


@pytest.mark.parametrize("form", ["paged", "gathered"])
@pytest.mark.parametrize("heads", [64, 128])
@pytest.mark.parametrize(("ratio", "width"), [(0, None), (4, 30), (4, None)])
def test_chunks_give_the_same_bits(heads: int, ratio: int, width: int | None, form: str) -> None:
    """A prompt in one go, in two chunks and token by token."""
    call = make((90,), (290,), heads=heads, ratio=ratio, width=width, padding=0)
    whole = check(call, num_splits=1, form=form)
    for edges in ([0, 13, 90], list(range(91))):
        for first, last in itertools.pairwise(edges):
            topk = None if call.topk is None else call.topk[first:last]
            changes: dict[str, Any] = {
                "q": call.q[first:last],
                "topk": topk,
                "query_lens": [last - first],
                "seq_lens": [200 + last],
            }
            got = run(dataclasses.replace(call, **changes), num_splits=1, form=form)
            assert same_bits(got, tuple(part[first:last] for part in whole))


@pytest.mark.parametrize("heads", [64, 128])
def test_bits_repeat(heads: int) -> None:
    call = make((1,) * 100 + (200, 99), (700,) * 50 + (150,) * 50 + (200, 500), heads=heads, width=205, padding=0)
    want = check(call)
    for _ in range(20):
        assert same_bits(run(call), want)


@pytest.mark.parametrize("heads", [8, 64, 128])
@pytest.mark.parametrize("rope", [True, False])
@pytest.mark.parametrize("query_lens", [(40,), (3, 1, 7), (1, 1)])
def test_nan_of_a_neighbouring_row_stays_there(heads: int, rope: bool, query_lens: tuple[int, ...]) -> None:
    """The last position of the first request, which its last row alone sees."""
    call = make(query_lens, tuple(50 + i for i in range(len(query_lens))), heads=heads, width=None, padding=1)
    want = check(call)
    last = call.seq_lens[0] - 1
    slot = call.table[0, last // call.pool.rows].long() * call.pool.rows + last % call.pool.rows
    data = call.pool.data[slot // call.pool.rows, slot % call.pool.rows]
    scales = call.pool.scales[slot // call.pool.rows, slot % call.pool.rows]
    if rope:
        data[448:] = 0xFF
    else:
        scales[:7] = 0xFF
    row = query_lens[0] - 1
    got = run(call)
    assert got[0][row].isnan().any()
    for part, old in zip(got, want, strict=True):
        assert same_bits((part[:row], part[row + 1 :]), (old[:row], old[row + 1 :]))


def test_bad_metadata_is_harmless() -> None:
    """Contexts beyond the tables, pages outside the caches, starts that do not ascend."""
    call = make((4, 4), (60, 300), bad=0.0)
    want = check(call)
    far = dataclasses.replace(call, seq_lens=[INT_MAX, 300])
    assert same_bits(tuple(part[4:8] for part in run(far)), tuple(part[4:8] for part in want))
    near = run(call, form="gathered"), run(far, form="gathered")
    assert same_bits(*(tuple(part[4:8] for part in results) for results in near))
    run(dataclasses.replace(far, window_size=2**31 - 1))
    torch.cuda.synchronize()
    for entry in (INT_MAX, INT_MIN, call.pool.pages):
        assert call.compressed_table is not None
        tables = torch.full_like(call.table, entry), torch.full_like(call.compressed_table, entry)
        lost = dataclasses.replace(call, table=tables[0], compressed_table=tables[1])
        out, _, _ = check(lost)
        assert (out == 0).all()
    given = call.arguments()
    for starts in ([0, -4, 8], [8, 0, 4], [INT_MAX, INT_MIN, 0]):
        for form in ("paged", "gathered"):
            sparse_mla_prefill_paged(**{**given, "query_start_loc": int32(starts)}, form=form)
    torch.cuda.synchronize()


@pytest.mark.parametrize(("ratio", "width"), [(0, None), (4, 200), (4, 7), (128, None)])
def test_rows_are_gathered_into_their_workspace(ratio: int, width: int | None) -> None:
    """Of many requests, into as many bytes as the workspace is said to have; the next ones stay as they are."""
    lens = tuple(range(40, 2000, 49))
    call = make((3, 0, 70, 1) * 10, lens, heads=8, ratio=ratio, width=width, bad=0.2)
    memory = call.workspace()
    size = memory.numel()
    larger = torch.full((size + 4096,), 0x7F, dtype=torch.uint8, device=DEVICE)
    results = check(call, form="gathered", workspace=larger)
    assert (larger[size:] == 0x7F).all()
    assert (larger[:size] != 0x7F).any()
    assert same_bits(run(call, form="gathered", workspace=memory), results)
    with pytest.raises(ValueError, match=f"workspace: expected at least {size} bytes"):
        run(call, form="gathered", workspace=memory[:-1])


def test_caches_without_pages() -> None:
    call = make((3,), (9,), bad=0.0)
    for pool in (call.pool, call.compressed):
        assert pool is not None
        pool.cache, pool.pages = pool.cache[:0], 0
    out, _, _ = check(call)
    assert (out == 0).all()


def test_window_alone_over_a_large_pool() -> None:
    """Rows that lie more than 2^32 bytes behind the first."""
    call: Call = make((9, 1), (500, 90), ratio=0)
    pages = (17 << 28) // call.pool.stride
    big = type(call.pool)(call.pool.kv_format, pages, call.pool.rows)
    moved = (pages - 1 - call.table).where((call.table >= 0) & (call.table < call.pool.pages), call.table)
    check(fill(dataclasses.replace(call, pool=big, table=moved)))
