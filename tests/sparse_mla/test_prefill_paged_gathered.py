# SPDX-License-Identifier: Apache-2.0
"""sparse_mla_prefill_paged with rows that are gathered first: when, into which memory, and by which kernels. Needs CuTe
DSL and no GPU: nothing is launched."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from cute_kernels import formats
from cute_kernels.runtime import trust
from cute_kernels.sparse_mla import gathered, launch, ops, select
from cute_kernels.sparse_mla.call import PagedCall
from cute_kernels.sparse_mla.gather_paged import GatherPagedKey
from cute_kernels.sparse_mla.hopper.prefill import NormQuantPrefillKey, PrefillKey, QuantPrefillKey
from cute_kernels.sparse_mla.hopper.prefill_paged import PagedKey
from cute_kernels.sparse_mla.hopper.prefill_paged_cluster import PagedClusterKey
from cute_kernels.sparse_mla.hopper.prefill_swap_ab import SwapAbPrefillKey
from cute_kernels.sparse_mla.launch import PAGED
from cute_kernels.sparse_mla.mma_sync.prefill import PortablePrefillKey
from cute_kernels.sparse_mla.ops import (
    PREFILL_FORMS,
    sparse_mla_prefill_paged,
    sparse_mla_prefill_paged_form,
    sparse_mla_prefill_paged_workspace_size,
)
from tests.sparse_mla.test_prefill_paged_launch import BF16, CODES, FMT, arguments, distant

SMS = 132
BYTES = (5 + 2 * (8 - 1 + 18)) * 1024 + 5 * (7 + 8 + 1) * 4 + 5 * 4
"""Of `arguments()`: 5 rows of 2 requests, a window of 8, 18 entries; lists of 7 and 8 columns, to multiples of 4."""

PLAIN = {"swa_cache": torch.zeros(5, 64, 512, dtype=BF16), "kv_format": formats.PLAIN_BF16.id}
PLAIN_ENTRIES = {
    "compressed_cache": torch.zeros(7, 2, 512, dtype=BF16),
    "compressed_kv_format": formats.PLAIN_BF16.id,
}

Launches = list[tuple[Any, tuple[Any, ...]]]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Launches:
    kept: Launches = []
    for module in (launch, select):
        monkeypatch.setattr(module, "multiprocessors", lambda index: SMS)
    monkeypatch.setattr(select, "arch_of", lambda index: "sm_90a")
    monkeypatch.setattr(launch, "launch_key", lambda key, index, *args: kept.append((key, args)))
    return kept


def run(**changes: Any) -> PagedCall:
    given = arguments() | {"workspace": torch.zeros(BYTES, dtype=torch.uint8), "form": "gathered"} | changes
    call = PagedCall(**given)
    assert PAGED.why_not(call) == ""
    PAGED.launch(call)
    return call


def keys(launched: Launches) -> list[Any]:
    return [key for key, _ in launched]


def test_size() -> None:
    size = sparse_mla_prefill_paged_workspace_size
    assert size(5, 2, 18, 7, window_size=8) == BYTES == PagedCall(**arguments()).gathered_shape.nbytes
    # all entries: lists of 18 and 8 columns
    assert size(5, 2, 18, window_size=8) == BYTES + 5 * (28 - 16) * 4
    assert PagedCall(**arguments(topk_indices=None)).gathered_shape.nbytes == size(5, 2, 18, window_size=8)
    assert size(5, 2, window_size=8) == (5 + 2 * 7) * 1024 + 5 * 8 * 4 + 5 * 4
    assert size(4096, 1, 32768, 512) == (4096 + 127 + 32768) * 1024 + 4096 * 640 * 4 + 4096 * 4
    assert size(0, 0) == 0


MEASURED = {
    # rows, heads, entries, columns: us gathered, us from the pages
    (256, 64, 32768, 512): (58.4, 54.1),
    (512, 64, 32768, 512): (94.9, 99.8),
    (256, 64, 4096, 512): (47.3, 55.7),
    (4096, 64, 4096, 512): (560.5, 717.4),
    (4096, 32, 4096, 512): (540.3, 702.3),
    (64, 8, 32768, 512): (30.7, 20.5),
    (64, 64, 1024, None): (36.9, 29.1),
    (64, 128, 1024, None): (42.9, 50.5),
    (256, 64, 1024, None): (70.3, 87.5),
    (4096, 64, 1024, None): (966.4, 1252.8),
    (256, 8, 1024, None): (52.0, 84.0),
    (1024, 64, 0, 0): (56.7, 59.5),
}
"""One request on an H200, perf/log/prefill_paged.md: prefill's kernel on rows that are gathered first, and its own."""


@pytest.mark.parametrize(("shape", "times"), MEASURED.items())
def test_the_faster_form(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int, int, int | None], times: tuple[float, float]
) -> None:
    rows, heads, entries, columns = shape
    monkeypatch.setattr(ops, "arch_of", lambda index: "sm_90a")
    monkeypatch.setattr(ops, "multiprocessors", lambda index: SMS)
    given = rows, 1, heads, entries, columns
    form = sparse_mla_prefill_paged_form(*given, device=torch.device("cuda"))
    assert form == ("gathered" if times[0] < times[1] else "paged")
    # where nothing has been measured
    assert sparse_mla_prefill_paged_form(*given, device=torch.device("cpu")) == "gathered"
    monkeypatch.setattr(ops, "arch_of", lambda index: "sm_100a")
    assert sparse_mla_prefill_paged_form(*given, device=torch.device("cuda")) == "gathered"


def test_the_faster_form_of_rows_that_are_not_split(launched: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    """64 rows of 64 heads and 1024 entries: 27.7 us from the pages if split, 50.9 if not, gathered 36.9."""
    monkeypatch.setattr(ops, "arch_of", lambda index: "sm_90a")
    monkeypatch.setattr(ops, "multiprocessors", lambda index: SMS)
    for may_split, form in ((True, "paged"), (False, "gathered")):
        shape = 64, 1, 64, 1024
        assert sparse_mla_prefill_paged_form(*shape, may_split=may_split, device=torch.device("cuda")) == form
    size = sparse_mla_prefill_paged_workspace_size(5, 2, 1024, window_size=8)
    q, table = torch.zeros(5, 64, 512, dtype=BF16), torch.zeros(2, 512, dtype=torch.int32)
    call = {"q": q, "attn_sink": torch.zeros(64), "compressed_block_table": table, "topk_indices": None}
    call |= {"form": "auto", "workspace": torch.zeros(size, dtype=torch.uint8)}
    run(**call, out=torch.empty_like(q))
    run(**call, **CODES | {"out": torch.zeros(5, 8, 4096, dtype=torch.uint8).view(torch.float8_e4m3fn)})
    kinds = [type(key) for key in keys(launched)]
    assert kinds == [PagedClusterKey, GatherPagedKey, QuantPrefillKey]


def test_rows_lists_and_lengths_lie_one_behind_the_other(launched: Launches) -> None:
    call = run()
    (first, gathered), (second, attended) = launched
    assert (first, second) == (GatherPagedKey("sm_90a", "listed", 1), SwapAbPrefillKey("sm_90a", 8))
    kv, indices, lengths, *caches = gathered
    assert call.workspace is not None
    start = call.workspace.data_ptr()
    assert (kv.data_ptr(), tuple(kv.shape)) == (start, (55, 1, 512))
    assert (indices.data_ptr(), tuple(indices.shape)) == (start + 55 * 1024, (5, 1, 16))
    assert lengths == start + 55 * 1024 + 5 * 16 * 4
    assert all(a is b for a, b in zip(caches[:4], (*call.pools[0], *call.pools[1]), strict=True))
    assert call.topk_indices is not None
    assert caches[4:8] == [call.topk_indices.data_ptr(), 48, 7, 4]
    assert caches[8:] == [call.query_start_loc.data_ptr(), call.seq_lens.data_ptr(), 2, 8]
    assert attended[0] is call.q
    assert [x.data_ptr() for x in attended[1:3]] == [kv.data_ptr(), indices.data_ptr()]
    assert attended[3] is call.out
    assert attended[6] == lengths


@pytest.mark.parametrize(
    ("columns", "stride", "offset", "width"), [(8, 12, 0, 4), (7, 12, 0, 1), (8, 13, 0, 1), (8, 12, 1, 1)]
)
def test_lists_that_are_read_four_columns_at_a_time(
    launched: Launches, columns: int, stride: int, offset: int, width: int
) -> None:
    listed = torch.zeros(5 * stride + offset, dtype=torch.int32)[offset:].view(5, stride)[:, :columns]
    run(topk_indices=listed)
    assert keys(launched)[0] == GatherPagedKey("sm_90a", "listed", width)


def test_all_entries_and_none(launched: Launches) -> None:
    run(topk_indices=None, workspace=torch.zeros(BYTES + 240))
    run(topk_indices=None, compressed_cache=None, compressed_block_table=None)
    assert keys(launched)[::2] == [GatherPagedKey("sm_90a", kind) for kind in ("all", "none")]
    assert launched[0][1][7:10] == (0, 0, 18)
    assert launched[2][1][7:11] == (0, 0, 0, 1)


def test_results_as_codes_and_raw_queries(launched: Launches) -> None:
    heads = {"q": torch.zeros(5, 32, 512, dtype=BF16), "attn_sink": torch.zeros(32)}
    codes = CODES | {"out": torch.zeros(5, 4, 4096, dtype=torch.uint8).view(torch.float8_e4m3fn)}
    run(**heads, **codes)
    run(**heads, **codes, q_squares=torch.zeros(5, 128), q_norm_eps=0.5)
    assert keys(launched)[1::2] == [QuantPrefillKey("sm_90a"), NormQuantPrefillKey("sm_90a")]
    assert any(isinstance(x, float) and x == 0.5 for x in launched[3][1])


def test_a_form_that_is_asked_for_is_taken_wherever_it_can_be(
    launched: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    for faster in (True, False):
        monkeypatch.setattr(gathered, "is_gathered_faster", lambda *shape, faster=faster: faster)
        launched.clear()
        run(form="paged", num_splits=1)
        run(num_splits=1)
        run(q=torch.zeros(5, 64, 512, dtype=BF16), out=torch.zeros(5, 64, 512, dtype=BF16))
        kinds = [PagedKey, GatherPagedKey, SwapAbPrefillKey, GatherPagedKey, PrefillKey]
        assert [type(key) for key in keys(launched)] == kinds
    monkeypatch.setattr(select, "arch_of", lambda index: "sm_80")
    launched.clear()
    run()
    assert keys(launched) == [GatherPagedKey("sm_80", "listed", 1), PortablePrefillKey("sm_80", 16)]


def test_who_gathers_where_the_op_may_choose(launched: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathered, "is_gathered_faster", lambda *shape: True)
    room = torch.zeros(BYTES + 16, dtype=torch.uint8)
    others: list[dict[str, Any]] = [
        {"workspace": None},
        {"workspace": room[: BYTES - 1]},
        {"workspace": room[8:]},
        {"num_splits": 1},
        {"split_tokens": 128},
        {"window_size": 2**31 - 1},
        PLAIN,
    ]
    for changes in others:
        run(form="auto", **changes)
    assert len(launched) == len(others)
    run(form="auto", workspace=room)
    assert len(launched) == len(others) + 2
    for arch in ("sm_80", "sm_100a"):
        monkeypatch.setattr(select, "arch_of", lambda index, arch=arch: arch)
        launched.clear()
        with trust.choose(True):
            run(form="auto")
        assert len(launched) == 1
    monkeypatch.setattr(gathered, "is_gathered_faster", lambda *shape: False)
    monkeypatch.setattr(select, "arch_of", lambda index: "sm_90a")
    launched.clear()
    run(form="auto")
    assert len(launched) == 1


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (
            PLAIN,
            "form 'gathered' is supported with caches of fp8_ds_mla/1",
        ),
        ({"swa_cache": distant(2**22)}, "form 'gathered' is supported with caches of fp8_ds_mla/1"),
        ({"workspace": torch.zeros(BYTES + 8, dtype=torch.uint8)[8:]}, "workspace must be 16-byte aligned"),
        ({"window_size": 2**30}, "gathered rows: expected fewer than 2^30"),
        ({**CODES, "q_squares": torch.zeros(5, 16)}, "q_norm is supported for more than 16 heads, got 4"),
    ],
)
def test_what_cannot_be_gathered_says_so(launched: Launches, changes: dict[str, Any], why: str) -> None:
    room = {"workspace": torch.zeros(BYTES, dtype=torch.uint8), "form": "gathered"}
    assert PAGED.why_not(PagedCall(**(arguments() | room | changes))).startswith(why)


def public(**changes: Any) -> dict[str, Any]:
    given = arguments() | changes
    return {name: given[name] for name in given if name not in ("out", "max_logits", "lse")}


@pytest.mark.parametrize(
    ("changes", "argument", "error"),
    [
        ({"form": "both"}, "form", ValueError),
        ({"form": "gathered", "num_splits": 2}, "num_splits", ValueError),
        ({"form": "gathered", "split_tokens": 64}, "split_tokens", ValueError),
        ({"form": "gathered", **PLAIN}, "kv_format", ValueError),
        ({"form": "gathered", **PLAIN_ENTRIES}, "compressed_kv_format", ValueError),
        ({"workspace": torch.zeros(8, dtype=torch.bfloat16)}, "workspace", TypeError),
        ({"workspace": torch.zeros(8, 8)}, "workspace", ValueError),
        ({"workspace": torch.zeros(16)[::2]}, "workspace", ValueError),
        ({"q_norm": (torch.zeros(5, 16), 0.1)}, "q_norm", ValueError),
        ({"q_norm": 3}, "q_norm", TypeError),
    ],
)
def test_arguments_that_do_not_fit(changes: dict[str, Any], argument: str, error: type[Exception]) -> None:
    with pytest.raises(error, match=f"sparse_mla_prefill_paged: {argument}: expected"):
        sparse_mla_prefill_paged(**public(**changes))


def test_a_cpu_needs_no_workspace() -> None:
    cache = FMT.allocate(5, 64)
    cache.zero_()
    given = public(swa_cache=cache, seq_lens=torch.tensor([3, 9], dtype=torch.int32), compressed_cache=None)
    given |= {"compressed_block_table": None, "topk_indices": None}
    given |= {"q": torch.ones(5, 4, 512, dtype=BF16), "query_start_loc": torch.tensor([0, 2, 5], dtype=torch.int32)}
    memory = torch.full((8,), 7, dtype=torch.uint8)
    results = [sparse_mla_prefill_paged(**given, form=form, workspace=memory) for form in PREFILL_FORMS]
    results.append(sparse_mla_prefill_paged(**given))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))
    assert (memory == 7).all()
