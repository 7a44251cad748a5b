# SPDX-License-Identifier: Apache-2.0
"""What top_k_per_row_prefill and _decode hand to their kernel. Needs CuTe DSL and no GPU: nothing is launched."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from cute_kernels.indexer import topk_select
from cute_kernels.indexer.call import AllVisibleCall, ScoreTopKPrefillCall, TopKDecodeCall, TopKPrefillCall
from cute_kernels.indexer.topk_held import HeldTopKKey
from cute_kernels.indexer.topk_whole import WholeRowsKey
from cute_kernels.models import MODELS

NAMES = (
    "out", "scores", "scores_stride", "columns", "starts", "starts_stride", "ends", "ends_request", "ends_token",
    "tokens", "limit", "shifts", "table", "table_stride", "table_columns", "page_rows", "rows", "k", "share", "groups",
    "early_lines", "use_pdl",
)  # fmt: skip
WHOLE_NAMES = (
    "out", "columns", "starts", "starts_stride", "ends", "ends_request", "ends_token", "tokens", "limit", "shifts",
    "table", "table_stride", "table_columns", "page_rows", "rows", "k", "use_pdl",
)  # fmt: skip
INT = torch.int32


def names_of(key: Any) -> tuple[str, ...]:
    """Arguments of a kernel's entry point."""
    return WHOLE_NAMES if isinstance(key, WholeRowsKey) else NAMES


class Launches:
    """Stands for a GPU: keeps what would have been launched."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, arch: str = "sm_90a") -> None:
        self.kept: list[tuple[Any, dict[str, Any]]] = []
        monkeypatch.setattr(topk_select, "arch_of", lambda index: arch)
        monkeypatch.setattr(topk_select, "launch_key", self.keep)
        topk_select.choose.cache_clear()

    def keep(self, key: Any, device_index: Any, *args: Any) -> None:
        self.kept.append((key, dict(zip(names_of(key), args, strict=True))))

    def last(self) -> tuple[Any, dict[str, Any]]:
        return self.kept[-1]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launches]:
    yield Launches(monkeypatch)
    topk_select.choose.cache_clear()


def prefill(logits: torch.Tensor, rows: int, k: int) -> tuple[torch.Tensor, ...]:
    starts, ends = torch.zeros(rows, 2, dtype=INT)[:, 0], torch.zeros(rows, dtype=INT)
    out = torch.zeros(rows, k, dtype=INT)
    assert topk_select.why_not_prefill(TopKPrefillCall(logits, starts, ends, out, rows, k, True)) == ""
    topk_select.launch_prefill(TopKPrefillCall(logits, starts, ends, out, rows, k, True))
    return starts, ends, out


def test_prefill(gpu: Launches) -> None:
    logits = torch.zeros(7, 5008)[:, 8:5001]
    starts, ends, out = prefill(logits, 6, 512)
    key, given = gpu.last()
    assert given["out"] is out
    assert given["scores"] == logits.data_ptr()
    assert (given["scores_stride"], given["columns"]) == (4 * 5008, 4993)
    assert (given["starts"], given["starts_stride"]) == (starts.data_ptr(), 8)
    assert (given["ends"], given["ends_request"], given["ends_token"], given["tokens"]) == (ends.data_ptr(), 4, 0, 1)
    assert (given["rows"], given["k"], given["share"]) == (6, 512, -(-512 // key.warps))
    assert (key.warps, key.vectors, key.cluster, key.tiles) == (20, 2, 1, 1)


def test_decode(gpu: Launches) -> None:
    logits, lengths, out = torch.zeros(6, 100), torch.zeros(3, 5, dtype=INT)[:, 1:3], torch.zeros(6, 9, dtype=INT)
    assert topk_select.why_not_decode(TopKDecodeCall(logits, lengths, out, 5, 7, None, 0, False)) == ""
    topk_select.launch_decode(TopKDecodeCall(logits, lengths, out, 5, 7, None, 0, False))
    _, given = gpu.last()
    assert given["table"] == 0
    assert (given["starts"], given["starts_stride"]) == (0, 0)
    assert given["ends"] == lengths.data_ptr()
    assert (given["ends_request"], given["ends_token"], given["tokens"]) == (20, 4, 2)
    assert (given["rows"], given["k"], given["share"], given["groups"]) == (5, 7, 1, 1)
    assert not given["use_pdl"]


def test_slots(gpu: Launches) -> None:
    logits, lengths, out = torch.zeros(6, 100), torch.zeros(3, 2, dtype=INT), torch.zeros(6, 9, dtype=INT)
    table = torch.zeros(3, 8, dtype=INT)[:, 1:7]
    topk_select.launch_decode(TopKDecodeCall(logits, lengths, out, 5, 7, table, 64, True))
    _, given = gpu.last()
    assert (given["table"], given["table_stride"]) == (table.data_ptr(), 32)
    assert (given["table_columns"], given["page_rows"], given["use_pdl"]) == (6, 64, True)
    # the address of a table without columns may be 0: it is a table none the less
    topk_select.launch_decode(TopKDecodeCall(logits, lengths, out, 5, 7, torch.zeros(3, 0, dtype=INT), 64, True))
    _, given = gpu.last()
    assert given["table"] != 0
    assert given["table_columns"] == 0


def test_all_visible_entries(gpu: Launches) -> None:
    lengths, table = torch.zeros(3, 4, dtype=INT)[:, :2], torch.zeros(3, 8, dtype=INT)
    out = torch.zeros(6, 600, dtype=INT)[:, 8:520]
    for given_table, page_rows in ((None, 0), (table, 2)):
        assert topk_select.why_not_all_visible(AllVisibleCall(lengths, out, given_table, page_rows)) == ""
        topk_select.launch_all_visible(AllVisibleCall(lengths, out, given_table, page_rows))
        key, given = gpu.last()
        assert key in topk_select.deployment_keys(MODELS["v4-flash"], 1, "sm_90a")
        assert given["out"] is out
        assert (given["ends"], given["ends_request"], given["ends_token"]) == (lengths.data_ptr(), 16, 4)
        assert (given["tokens"], given["rows"], given["k"], given["columns"], given["limit"]) == (2, 6, 512, 512, 512)
        assert (given["table"] != 0) == (given_table is not None)
        assert isinstance(key, WholeRowsKey)
        assert (given["starts"], given["shifts"], given["use_pdl"]) == (0, 0, True)
    topk_select.launch_all_visible(AllVisibleCall(lengths[:0], out[:0], None, 0))
    assert len(gpu.kept) == 2


def test_nothing_is_launched_without_rows(gpu: Launches) -> None:
    prefill(torch.zeros(3, 10), 0, 4)
    assert gpu.kept == []


def test_rows_that_are_not_aligned_need_room_for_what_is_before_them(gpu: Launches) -> None:
    for columns, offset, capacity in (
        (4096, 0, 4096),
        (4096, 1, 5120),
        (4093, 1, 4096),
        (32765, 3, 262144),
    ):
        prefill(torch.zeros(64, columns + 4)[:, offset : offset + columns], 64, 512)
        assert gpu.last()[0].capacity == capacity
    # the rows of a matrix with an odd stride begin anywhere, that of a single row does not count
    prefill(torch.zeros(64, 4097)[:, :4096], 64, 512)
    assert gpu.last()[0].capacity == 5120
    prefill(torch.zeros(1, 4097)[:, :4096], 1, 512)
    assert gpu.last()[0].capacity == 4096


def test_rows_are_fetched_early_if_a_call_has_few_scores(gpu: Launches) -> None:
    for rows, columns, lines in ((1, 8200, 256), (128, 8192, 256), (129, 8192, 0), (1, 543, 16)):
        prefill(torch.empty(rows, columns), rows, 512)
        assert gpu.last()[1]["early_lines"] == lines


def test_few_rows_are_spread_and_many_share(gpu: Launches) -> None:
    """A block for each multiprocessor, or four."""
    for rows, columns, shape, is_spread in (
        (1, 1024, (8, 1, 1, 1), True),
        (1, 2048, (16, 1, 1, 1), True),
        (128, 2049, (16, 2, 1, 1), True),
        (128, 8192, (16, 4, 1, 1), True),
        (129, 8192, (16, 4, 1, 1), False),
        (129, 1024, (8, 1, 1, 1), False),
        (200, 5000, (10, 4, 1, 1), False),
        (132, 16385, (32, 8, 1, 8), False),
        (133, 16385, (16, 8, 1, 16), False),
        (200, 18433, (8, 4, 1, 8), False),
        (263, 20481, (16, 8, 1, 16), False),
        (133, 24576, (8, 4, 1, 8), False),
        (263, 24577, (16, 8, 1, 16), False),
        (264, 32768, (8, 4, 1, 8), False),
        (132, 32769, (32, 4, 1, 16), False),
        (133, 32769, (16, 8, 1, 16), False),
        (39, 196609, (32, 8, 1, 8), False),
        (66, 65537, (32, 4, 1, 16), False),
        (104, 262144, (16, 8, 1, 16), False),
        (105, 262144, (32, 4, 1, 16), False),
        (64, 262145, (32, 4, 1, 32), False),
        (264, 1024, (4, 2, 1, 1), False),
        (264, 2048, (4, 4, 1, 1), False),
        (264, 4096, (8, 4, 1, 1), False),
        (264, 17408, (8, 4, 1, 8), False),
        (300, 131073, (32, 4, 1, 16), False),
    ):
        prefill(torch.empty(rows, columns), rows, 512)
        key, _ = gpu.last()
        assert (key.shape, key.is_spread) == (shape, is_spread)


def test_rows_are_numbered_in_32_bits(gpu: Launches) -> None:
    """Views of no memory: nobody looks into them."""
    for rows in (topk_select.MOST_ROWS - 1, topk_select.MOST_ROWS):
        why = (
            f"there must be fewer than {topk_select.MOST_ROWS} rows, got {rows}"
            if rows == topk_select.MOST_ROWS
            else ""
        )
        out, lens = torch.zeros(1, 4, dtype=INT).expand(rows, 4), torch.zeros(1, 1, dtype=INT).expand(rows, 1)
        assert topk_select.why_not_all_visible(AllVisibleCall(lens, out, None, 0)) == why
        logits = torch.zeros(1, 8).expand(rows, 8)
        assert topk_select.why_not_decode(TopKDecodeCall(logits, lens, out, rows, 4, None, 0, True)) == why
        assert topk_select.why_not_prefill(TopKPrefillCall(logits, lens[:, 0], lens[:, 0], out, rows, 4, True)) == why


def test_columns_of_scores_are_those_that_are_asked_for() -> None:
    """Or all keys."""
    keys, rows = torch.zeros(9, 128), torch.zeros(3)
    for asked, columns in ((0, 9), (1, 1), (2, 2), (12, 12)):
        call = ScoreTopKPrefillCall(keys, None, keys, keys, rows, rows, rows, asked, rows, None)
        assert call.columns == columns


def test_many_picks_have_longer_lists(gpu: Launches) -> None:
    for rows, columns, k, shape in (
        (104, 65537, 1025, (32, 4, 1, 16)),
        (264, 32769, 1025, (16, 8, 1, 8)),
        (132, 8193, 2049, (12, 8, 1, 1)),
        (132, 16384, 4096, (16, 8, 1, 1)),
        (64, 8193, 2049, (20, 4, 1, 1)),
        (132, 16385, 2049, (32, 8, 1, 8)),
        (264, 16385, 2049, (16, 8, 1, 8)),
        (264, 65537, 2049, (32, 8, 1, 8)),
        (264, 131073, 4096, (32, 4, 1, 16)),
    ):
        prefill(torch.empty(rows, columns), rows, k)
        key, _ = gpu.last()
        assert key.shape == shape


@pytest.mark.parametrize("rows", [topk_select.SPREAD_ROWS + 1, topk_select.MANY_ROWS - 1, topk_select.MANY_ROWS, 9999])
def test_many_rows_of_two_tiles_are_held_for_many_picks_alone(gpu: Launches, rows: int) -> None:
    most = topk_select.PICKS // 2
    for columns, shape in topk_select.HELD_BY_TWO:
        for k in (most, most + 1):
            prefill(torch.empty(1, columns).expand(rows, columns), rows, k)
            key, _ = gpu.last()
            is_held = rows < topk_select.MANY_ROWS or k > most
            assert isinstance(key, HeldTopKKey) == is_held, (columns, k)
            assert not is_held or (key.warps, key.vectors) == shape


def test_rows_that_are_whole_have_no_scores_to_read(gpu: Launches) -> None:
    """And as many chunks of a warp as there are picks for."""
    for rows, columns, k, chunks in ((1, 512, 512, 1), (511, 100, 128, 1), (512, 1, 128, 4), (9999, 4096, 4096, 4)):
        starts, ends, out = prefill(torch.empty(1, columns).expand(rows, columns), rows, k)
        key, given = gpu.last()
        assert key == WholeRowsKey("sm_90a", chunks)
        assert key in topk_select.deployment_keys(MODELS["v4-flash"], 1, "sm_90a")
        assert (given["starts"], given["ends"]) == (starts.data_ptr(), ends.data_ptr())
        assert (given["rows"], given["k"], given["columns"], given["limit"]) == (rows, k, columns, columns)
        assert given["out"] is out
    prefill(torch.empty(3, 513), 3, 512)
    assert isinstance(gpu.last()[0], HeldTopKKey)


def test_launches_are_dependents_if_asked_for(gpu: Launches) -> None:
    bounds, out = torch.zeros(2, dtype=INT), torch.zeros(2, 9, dtype=INT)
    for use_pdl in (True, False):
        for columns in (9, 10):
            logits = torch.empty(2, columns)
            topk_select.launch_prefill(TopKPrefillCall(logits, bounds, bounds, out, 2, 9, use_pdl))
            assert gpu.last()[1]["use_pdl"] is use_pdl
            topk_select.launch_decode(TopKDecodeCall(logits, bounds[:, None], out, 2, 9, None, 0, use_pdl))
            assert gpu.last()[1]["use_pdl"] is use_pdl


def test_calls_without_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    out, bounds = torch.zeros(1, 4097, dtype=INT), torch.zeros(1, dtype=INT)
    for arch, columns in (("sm_90a", 1 << 20), ("sm_80", 1 << 19), ("sm_120a", 1 << 18)):
        Launches(monkeypatch, arch)
        assert (
            topk_select.why_not_prefill(TopKPrefillCall(torch.empty(1, columns), bounds, bounds, out, 1, 4096, True))
            == ""
        )
        for k, width, why in (
            (4097, columns, "k must be at most 4096, got 4097"),
            (4096, columns + 1, f"rows must have at most {columns} columns on {arch}, got {columns + 1}"),
        ):
            assert (
                topk_select.why_not_prefill(TopKPrefillCall(torch.empty(1, width), bounds, bounds, out, 1, k, True))
                == why
            )
    topk_select.choose.cache_clear()
