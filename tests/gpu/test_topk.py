# SPDX-License-Identifier: Apache-2.0
"""The picks of a row on a GPU: against a stable sort by score and column, in every shape of block and cluster."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from cute_kernels.indexer.ops import all_visible_entries, top_k_per_row_decode, top_k_per_row_prefill
from cute_kernels.runtime import compile as compile_
from cute_kernels.runtime.ops import FALLBACK_VARIABLE

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

POISON = -77_777
INT = torch.int32
INF, NAN = float("inf"), float("nan")


@pytest.fixture(autouse=True)
def no_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FALLBACK_VARIABLE, raising=False)


def generator(seed: int) -> torch.Generator:
    return torch.Generator(device="cuda").manual_seed(seed)


def expected(scores: np.ndarray, start: int, end: int, k: int) -> np.ndarray:
    """Picks of a row in ascending order, then -1."""
    start, end = max(start, 0), min(end, len(scores))
    row = scores[start : max(end, start)]
    columns = np.arange(len(row))
    if len(row) > k:
        is_nan = np.isnan(row)
        order = np.lexsort((columns, np.where(is_nan, 0, -row), is_nan))
        columns = np.sort(order[:k])
    return np.concatenate([columns, np.full(k - len(columns), -1)]).astype(np.int32)


def check(got: torch.Tensor, logits: torch.Tensor, starts: Any, ends: Any, k: int, what: Any = "") -> None:
    scores, got = logits.cpu().numpy(), got.cpu().numpy()
    for r, (start, end) in enumerate(zip(starts, ends, strict=True)):
        want = expected(scores[r], int(start), int(end), k)
        assert np.array_equal(got[r], want), (what, r, start, end, k, np.flatnonzero(got[r] != want)[:5])


def prefill(logits: torch.Tensor, starts: Any, ends: Any, k: int) -> torch.Tensor:
    rows = len(starts)
    out = torch.full((rows + 2, k + 3), POISON, dtype=INT, device="cuda")
    bounds = [torch.as_tensor(x, dtype=INT).cuda() for x in (starts, ends)]
    top_k_per_row_prefill(logits, *bounds, out, rows, logits.stride(0), logits.stride(1), k)
    assert (out[rows:] == POISON).all()
    assert (out[:, k:] == POISON).all()
    return out[:rows, :k]


def of_bits(rows: int, columns: int, seed: int) -> torch.Tensor:
    """Every kind of fp32: subnormal, infinite, NaN of either sign."""
    bits = torch.randint(-(2**31), 2**31, (rows, columns), device="cuda", generator=generator(seed))
    return bits.to(INT).view(torch.float32)


def mixed(choices: list[float], weights: list[float]) -> Callable[[int, int, int], torch.Tensor]:
    def make(rows: int, columns: int, seed: int) -> torch.Tensor:
        chances = torch.tensor(weights, device="cuda")
        picked = torch.multinomial(chances, rows * columns, replacement=True, generator=generator(seed))
        return torch.tensor(choices, device="cuda")[picked].view(rows, columns)

    return make


def normal(scale: float, offset: float) -> Callable[[int, int, int], torch.Tensor]:
    def make(rows: int, columns: int, seed: int) -> torch.Tensor:
        return torch.randn(rows, columns, device="cuda", generator=generator(seed)) * scale + offset

    return make


def ramp(sign: float) -> Callable[[int, int, int], torch.Tensor]:
    return lambda rows, columns, seed: (sign * torch.arange(columns, device="cuda").float()).repeat(rows, 1)


def blocks(rows: int, columns: int, seed: int) -> torch.Tensor:
    """Runs of 128 equal scores."""
    levels = torch.randn(rows, -(-columns // 128), device="cuda", generator=generator(seed))
    return levels.repeat_interleave(128, dim=1)[:, :columns].contiguous()


def outlier(rows: int, columns: int, seed: int) -> torch.Tensor:
    x = normal(1e-20, 0.0)(rows, columns, seed)
    x[:, columns // 3] = 3e38
    return x


def sixteenth(rows: int, columns: int, seed: int) -> torch.Tensor:
    """Each thread that holds four vectors has one of the best scores: as many as threads reach the worst of these."""
    x, column = normal(1.0, 0.0)(rows, columns, seed), torch.arange(columns, device="cuda")
    x[:, (column % 4 == 1) & (column // 128 % 4 == 2)] += 100
    return x


PATTERNS: dict[str, Callable[[int, int, int], torch.Tensor]] = {
    "normal": normal(1.0, 0.0),
    "near": normal(1.0, 100.0),
    "nearer": normal(1e-4, 100.0),
    "negative": normal(1.0, -1000.0),
    "small": normal(1e-40, 0.0),
    "bits": of_bits,
    "equal": mixed([1.5], [1.0]),
    "zeros": mixed([0.0, -0.0], [1.0, 1.0]),
    "few": mixed([0.0, -0.0, 1.0, -1.0, 2.0], [8.0, 8.0, 1.0, 1.0, 0.001]),
    "infinite": mixed([-INF, INF, 0.5, 2.0], [50.0, 0.1, 1.0, 1.0]),
    "mostly nan": mixed([NAN, 1.0, -INF, -2.0], [100.0, 1.0, 1.0, 1.0]),
    "all nan": mixed([NAN], [1.0]),
    "rising": ramp(1.0),
    "falling": ramp(-1.0),
    "blocks": blocks,
    "outlier": outlier,
    "sixteenth": sixteenth,
}


def keys() -> list[Any]:
    from cute_kernels.indexer.topk import TopKKey
    from cute_kernels.indexer.topk_held import AnyTopKKey
    from cute_kernels.indexer.topk_select import keys_of
    from cute_kernels.runtime.arch import arch_of

    arch = arch_of(0)
    more = [TopKKey(arch, 16, 4, 2), TopKKey(arch, 8, 2, 4, 3)] if keys_of(arch)[-1].cluster > 1 else []
    small = AnyTopKKey(arch, 16, 8, 1, 16)  # where there is less shared memory than on some
    return list(dict.fromkeys((*keys_of(arch), *more, small)))


@pytest.mark.parametrize("pattern", PATTERNS)
def test_every_kernel_picks_what_a_stable_sort_does(pattern: str) -> None:
    from cute_kernels.indexer import topk_select

    for number, key in enumerate(keys()):
        most = min(key.capacity, 200_000)
        for k, columns in (
            (512, most),
            (1024, min(most, 5000)),
            (2048, min(most, 2051)),
            (7, min(most, 4000)),
            (1, 300),
            (4096, most),
        ):
            logits = PATTERNS[pattern](3, columns, 10 * number + k % 7)
            starts = torch.tensor([0, columns // 5 + 1, 2], dtype=INT).cuda()
            ends = torch.tensor([columns, columns - 3, min(k + 4, columns)], dtype=INT).cuda()
            out = torch.full((3, k), POISON, dtype=INT, device="cuda")
            bounds = topk_select.prefill_bounds(starts, ends)
            topk_select.launch_with(key, logits, *bounds, out, 3, k)
            check(out, logits, starts.tolist(), ends.tolist(), k, key)


@pytest.mark.parametrize("columns", [1, 2, 3, 5, 127, 128, 511, 513, 1000, 4095, 4096, 4097, 8191, 16385, 32769, 70001])
def test_columns_and_alignments(columns: int) -> None:
    for offset, gap in ((0, 0), (1, 0), (2, 3), (3, 6)):
        whole = torch.full((6, offset + columns + gap), INF, device="cuda")
        logits = whole[:, offset : offset + columns]
        logits.copy_(normal(1.0, 0.0)(6, columns, columns + offset))
        starts = [0, 1, 2, 3, columns // 2, columns - 1]
        ends = [columns, columns - 1, columns, columns + 5, columns, columns]
        for k in (1, 512):
            check(prefill(logits, starts, ends, k), logits, starts, ends, k)


def test_bounds_that_are_no_bounds() -> None:
    columns, k = 3000, 512
    logits = normal(1.0, 0.0)(8, columns, 1)
    low, high = -(2**31), 2**31 - 1
    starts = [low, high, -5, 7, columns, high, 2000, low]
    ends = [high, low, columns, 5, high, high, 2100, low]
    check(prefill(logits, starts, ends, k), logits, starts, ends, k)


def test_rows_that_are_fetched_for_later() -> None:
    """More rows than multiprocessors, the last with columns up to the end of what is allocated."""
    rows, columns, k = 300, 17_001, 300
    logits = normal(1.0, 0.0)(rows, columns, 3)
    starts = [r * 7 % 100 for r in range(rows)]
    ends = [columns - r * 113 % columns for r in range(rows)]
    check(prefill(logits, starts, ends, k), logits, starts, ends, k)


@pytest.mark.parametrize(("rows", "columns"), [(64, 16_384), (128, 16_384), (128, 12_001)])
def test_held_rows_of_unequal_lengths(rows: int, columns: int) -> None:
    """Of calls whose rows are loaded before their bounds are known, and of larger ones."""
    k = 512
    logits = normal(1.0, 0.0)(rows, columns, rows)
    ends = [max(columns // (r + 1), k - 5 + r) for r in range(rows)]
    starts = [r * 97 % 300 if r % 3 == 0 else 0 for r in range(rows)]
    check(prefill(logits, starts, ends, k), logits, starts, ends, k)


@pytest.mark.parametrize("length", [600, 8191, 8192, 8193, 16_384, 16_385])
def test_rows_that_a_cta_of_a_cluster_holds(length: int) -> None:
    columns, k = 70_000, 512
    logits = PATTERNS["normal"](5, columns, length)
    logits[2] = 1.0
    starts, ends = [0, 1, 0, 3, 60_000], [length, length, length, columns, 60_000 + min(length, 10_000)]
    check(prefill(logits, starts, ends, k), logits, starts, ends, k)


def test_longest_rows() -> None:
    columns = 1 << 20
    for k in (512, 2048, 4096):
        logits = normal(1.0, 0.0)(2, columns, k)
        logits[1] = 3.0
        starts, ends = [0, 5], [columns, columns]
        check(prefill(logits, starts, ends, k), logits, starts, ends, k)


def test_unsupported_arguments_say_why() -> None:
    logits = torch.zeros(1, 4096, device="cuda")
    with pytest.raises(NotImplementedError, match="k must be at most 4096, got 4097"):
        prefill(logits, [0], [4096], 4097)
    logits = torch.zeros(1, (1 << 20) + 1, device="cuda")
    with pytest.raises(NotImplementedError, match=r"columns on sm_.*, got 1048577"):
        prefill(logits, [0], [4096], 512)


def test_decode_uses_one_length_per_row() -> None:
    batch, next_n, columns, k = 5, 3, 6000, 512
    logits = mixed([0.0, 1.0, 2.0, NAN], [1.0, 1.0, 0.1, 0.1])(batch * next_n, columns, 3)
    lengths = torch.tensor([0, -1, 6000, 512, 513, 511, 9000, 5999, 1, 600, 4096, -(2**31), 2**31 - 1, 700, 2])
    wide = torch.zeros(batch, next_n + 2, dtype=INT, device="cuda")
    wide[:, 1 : 1 + next_n] = lengths.view(batch, next_n).cuda()
    for num_rows in (0, 1, 14, 15):
        out = torch.full((17, k + 1), POISON, dtype=INT, device="cuda")
        top_k_per_row_decode(logits, next_n, wide[:, 1 : 1 + next_n], out, num_rows, columns, 1, k)
        assert (out[num_rows:] == POISON).all()
        assert (out[:, k:] == POISON).all()
        check(out[:num_rows, :k], logits, [0] * num_rows, lengths[:num_rows].tolist(), k)


def slots_of(entries: np.ndarray, next_n: int, table: np.ndarray, page_rows: int) -> np.ndarray:
    column = np.where(entries >= 0, entries // page_rows, table.shape[1])
    requests = np.arange(len(entries))[:, None] // next_n
    padded = np.pad(table.astype(np.int64), ((0, 0), (0, 1)), constant_values=-1)
    page = padded[requests, np.minimum(column, table.shape[1])]
    slot = page * page_rows + entries % page_rows
    return np.where((page >= 0) & (slot < 2**31), slot, -1).astype(np.int32)


def tables(requests: int, width: int, page_rows: int, seed: int) -> torch.Tensor:
    """With pages that do not exist, or whose rows int32 cannot number; a view of a wider one."""
    most = (2**31 - 1) // page_rows
    whole = torch.randint(0, most + 1, (requests, width + 5), device="cuda", generator=generator(seed))
    special = torch.tensor([-1, -(2**31), 2**31 - 1, most + 1, most], device="cuda")
    for i, value in enumerate(special):
        whole[:, i::11] = value.clamp(max=2**31 - 1)
    return whole.to(INT)[:, 2 : 2 + width]


@pytest.mark.parametrize("page_rows", [64, 1, 3, 256, 2**30])
@pytest.mark.parametrize("pattern", ["normal", "few", "rising", "all nan"])
def test_slots_of_picks(pattern: str, page_rows: int) -> None:
    from cute_kernels.indexer import topk_select

    for number, key in enumerate(keys()):
        columns, next_n = min(key.capacity, 100_000), 2
        width = max(columns * 3 // 4 // page_rows, 1)
        table = tables(3, width, page_rows, number)
        logits = PATTERNS[pattern](6, columns, number)
        for k in (512, 2048, 1, 77):
            lengths = torch.tensor([[columns, columns - 1], [k, k + 1], [0, columns // 2]], dtype=INT).cuda()
            out, picks = (torch.full((6, k), POISON, dtype=INT, device="cuda") for _ in range(2))
            bounds = topk_select.decode_bounds(lengths)
            topk_select.launch_with(key, logits, *bounds, picks, 6, k)
            topk_select.launch_with(key, logits, *bounds, out, 6, k, topk_select.slots(table, page_rows))
            want = slots_of(picks.cpu().numpy(), next_n, table.cpu().numpy(), page_rows)
            assert np.array_equal(out.cpu().numpy(), want), (key, k)


def test_slots_of_the_public_ops() -> None:
    logits = normal(1.0, 0.0)(6, 9000, 1)
    lengths = torch.tensor([[9000, 400], [0, 513], [512, 8000]], dtype=INT, device="cuda")
    out = torch.full((8, 515), POISON, dtype=INT, device="cuda")
    rows, stream = slice(1, 7), torch.cuda.Stream()
    for table in (tables(3, 140, 64, 1), tables(3, 9, 64, 2), torch.zeros(3, 0, dtype=INT, device="cuda")):
        slots = {"slot_block_table": table, "slot_rows_per_page": 64}
        picks = torch.empty(6, 512, dtype=INT, device="cuda")
        top_k_per_row_decode(logits, 2, lengths, picks, 6, 9000, 1, 512)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            top_k_per_row_decode(logits, 2, lengths, out[rows], 6, 9000, 1, 512, **slots)
        torch.cuda.current_stream().wait_stream(stream)
        want = slots_of(picks.cpu().numpy(), 2, table.cpu().numpy(), 64)
        assert np.array_equal(out[rows, :512].cpu().numpy(), want)

        visible = lengths.clamp(max=512)
        got = all_visible_entries(visible, 512)
        column = torch.arange(512, dtype=INT, device="cuda")
        assert torch.equal(got, column.where(column < visible.view(-1, 1), column.new_tensor(-1)))
        out[rows, :512] = POISON
        all_visible_entries(visible, 512, out=out[rows, :512], **slots)
        want = slots_of(got.cpu().numpy(), 2, table.cpu().numpy(), 64)
        assert np.array_equal(out[rows, :512].cpu().numpy(), want)
        out[rows, :512] = POISON
        assert (out == POISON).all()


@pytest.mark.parametrize("k", [1, 100, 512, 1023, 2048, 4096])
@pytest.mark.parametrize("rows", [1, 15, 600, 5000])
def test_rows_that_are_picked_whole(rows: int, k: int) -> None:
    """No score is read, whatever its pointer's alignment and the result's; with a table, slots."""
    ends = torch.arange(rows, dtype=INT, device="cuda") * 7 % (k + 9) - 4
    starts = torch.arange(rows, dtype=INT, device="cuda") % 5 - 1
    logits = torch.full((1, k), NAN, device="cuda").expand(rows, k)
    column = torch.arange(k, dtype=INT, device="cuda")
    for gap, use_pdl in ((0, True), (3, False)):
        out = torch.full((rows + 2, k + gap), POISON, dtype=INT, device="cuda")
        bounds = starts, ends
        top_k_per_row_prefill(logits, *bounds, out[:rows], rows, logits.stride(0), 1, k, use_pdl=use_pdl)
        size = ends.clamp(max=k) - starts.clamp(min=0)
        assert torch.equal(out[:rows, :k], column.where(column < size[:, None], column.new_tensor(-1)))
        assert (out[rows:] == POISON).all()
        assert (out[:, k:] == POISON).all()
        table = tables(rows, max(1, k // 70), 64, rows)
        out.fill_(POISON)
        slots = {"slot_block_table": table, "slot_rows_per_page": 64}
        top_k_per_row_decode(logits, 1, ends[:, None], out[:rows], rows, logits.stride(0), 1, k, **slots)
        picks = column.where(column < ends[:, None], column.new_tensor(-1))
        want = slots_of(picks.cpu().numpy(), 1, table.cpu().numpy(), 64)
        assert np.array_equal(out[:rows, :k].cpu().numpy(), want)
        assert (out[rows:] == POISON).all()
        assert (out[:, k:] == POISON).all()


@pytest.mark.parametrize("columns", [4000, 30000, 100_000])
def test_same_bits_alone_and_every_time(columns: int) -> None:
    rows, k = 150, 512
    logits = mixed([0.0, 1.0, 2.0, 3.0], [1.0, 1.0, 0.01, 0.01])(rows, columns, 5)
    logits[::2] = normal(1.0, 0.0)(rows // 2, columns, 6)
    whole = prefill(logits, [0] * rows, [columns] * rows, k)
    for _ in range(20):
        assert torch.equal(prefill(logits, [0] * rows, [columns] * rows, k), whole)
    for r in range(0, rows, 7):
        assert torch.equal(prefill(logits[r : r + 1], [0], [columns], k)[0], whole[r])
        wider = torch.full((1, 5 * columns), NAN, device="cuda")
        wider[0, 1 : 1 + columns] = logits[r]
        assert torch.equal(prefill(wider, [1], [1 + columns], k)[0], whole[r])


def test_rows_beyond_two_gigabytes() -> None:
    rows, columns, k = 5, 40_000, 512
    if torch.cuda.mem_get_info()[0] < 6 * 2**30:
        pytest.skip("needs 5 GiB of GPU memory")
    stride = 2**28
    whole = torch.empty(rows * stride, device="cuda")
    logits = whole.as_strided((rows, columns), (stride, 1))
    logits.copy_(normal(1.0, 0.0)(rows, columns, 1))
    check(prefill(logits, [0] * rows, [columns] * rows, k), logits, [0] * rows, [columns] * rows, k)


def test_no_new_kernel_for_other_numbers() -> None:
    for columns in (4000, 8000, 16000, 32000, 40_000):
        prefill(normal(1.0, 0.0)(2, columns, 1), [0] * 2, [columns] * 2, 512)
    before = compile_.compilations()
    for columns in (3000, 7000, 15000, 31000, 39_000):
        for k in (5, 2048):
            prefill(normal(1.0, 0.0)(3, columns, 1), [1] * 3, [columns] * 3, k)
    assert compile_.compilations() == before
