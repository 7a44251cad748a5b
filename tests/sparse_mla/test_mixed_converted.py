# SPDX-License-Identifier: Apache-2.0
"""sparse_mla_mixed with rows that are converted first: when, into which memory, and by which kernels. Needs CuTe DSL
and no GPU: nothing is launched."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from cute_kernels.formats import PLAIN_BF16
from cute_kernels.sparse_mla import converted, launch, ops, select
from cute_kernels.sparse_mla.call import MixedCall
from cute_kernels.sparse_mla.convert_mixed import ConvertMixedKey
from cute_kernels.sparse_mla.hopper.prefill_mixed import MixedFp8ConvertedKey, MixedFp8Key
from cute_kernels.sparse_mla.hopper.prefill_mixed_swap_ab import SwapAbMixedFp8Key
from cute_kernels.sparse_mla.launch import MIXED
from cute_kernels.sparse_mla.mma_sync.prefill import PortableMixedKey
from cute_kernels.sparse_mla.ops import MIXED_FORMS, sparse_mla_mixed, sparse_mla_mixed_workspace_size
from tests.sparse_mla.test_mixed_launch import BF16, CODES, FP8, arguments

BYTES = (5 * 64 + 7 * 2) * 1024
"""Of `codes()`."""

Launches = list[tuple[Any, tuple[Any, ...]]]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Launches:
    kept: Launches = []
    for module in (launch, select):
        monkeypatch.setattr(module, "multiprocessors", lambda index: 132)
    monkeypatch.setattr(select, "arch_of", lambda index: "sm_90a")
    monkeypatch.setattr(launch, "launch_key", lambda key, index, *args: kept.append((key, args)))
    return kept


def of_heads(heads: int) -> dict[str, Any]:
    query = torch.zeros(3, heads, 512)
    return {"query": query.to(FP8), "sinks": None, "out": query.to(BF16), "lse": torch.zeros(3, heads)}


def codes(**changes: Any) -> dict[str, Any]:
    """A call over e4m3 caches of 64 heads."""
    room = {"workspace": torch.zeros(BYTES, dtype=torch.uint8), "form": "converted"}
    return arguments() | CODES | of_heads(64) | room | changes


def run(**changes: Any) -> MixedCall:
    call = MixedCall(**codes(**changes))
    assert MIXED.why_not(call) == ""
    MIXED.launch(call)
    return call


def keys(launched: Launches) -> list[Any]:
    return [key for key, _ in launched]


MEASURED = {
    # query rows, heads, columns, rows of both caches: us direct, us converted
    (4096, 64, 640, 16384): (706.5, 610.0),
    (4096, 128, 1152, 65536): (2588.3, 2088.8),
    (4096, 64, 128, 16384): (211.2, 201.7),
    (512, 64, 640, 16384): (90.3, 86.3),
    (512, 128, 640, 16384): (174.3, 158.0),
    (4096, 128, 640, 16384): (1415.0, 1217.3),
    (4096, 64, 2176, 65536): (2400.5, 1921.2),
    (1024, 64, 640, 65536): (183.7, 194.9),
    (256, 64, 640, 16384): (51.4, 52.9),
    (776, 64, 128, 19712): (46.5, 53.1),
    (312, 128, 640, 8704): (109.9, 103.0),
    (1088, 64, 1024, 47104): (294.1, 278.5),
    (3328, 128, 256, 61440): (533.7, 500.6),
}
"""On an H200: those that the rule was fitted to (perf/log/prefill_mixed.md), and the record's four drawn shapes."""


@pytest.mark.parametrize(("shape", "times"), MEASURED.items())
def test_the_faster_form(shape: tuple[int, int, int, int], times: tuple[float, float]) -> None:
    rows, heads, columns, cache_rows = shape
    is_faster = converted.is_converted_faster(cache_rows, rows, heads, columns // 64, 132)
    assert is_faster == (times[1] < times[0])


def test_rows_lie_one_behind_the_other(launched: Launches) -> None:
    call = run()
    assert sparse_mla_mixed_workspace_size(5 * 64, 7 * 2) == BYTES == call.converted_bytes
    assert call.workspace is not None
    start = call.workspace.data_ptr()
    (first, converting), (second, attending) = launched
    assert (first, second) == (ConvertMixedKey("sm_90a"), MixedFp8ConvertedKey("sm_90a"))
    assert converting[0] is call.swa_kv_cache
    assert converting[1] is call.compressed_kv_cache
    for rows in (converting[2:4], attending[1:3]):
        assert [x.data_ptr() for x in rows] == [start, start + 5 * 64 * 1024]
        assert [tuple(x.shape) for x in rows] == [(5, 64, 512), (7, 2, 512)]
        assert all(x.dtype == torch.float16 and x.is_contiguous() for x in rows)
    assert converting[4] == 1
    assert attending[0] is call.query
    assert attending[3] is call.sparse_indices


def test_a_window_alone(launched: Launches) -> None:
    only = {"compressed_kv_cache": None, "sparse_indices": torch.zeros(3, 8, dtype=torch.int32)}
    call = run(**only, workspace=torch.zeros(5 * 64 * 256))
    (_, converting), (_, attending) = launched
    assert call.converted_bytes == 5 * 64 * 1024
    assert converting[4] == 0
    assert len({x.data_ptr() for x in (*converting[2:4], *attending[1:3])}) == 1


def test_caches_without_rows_are_not_converted(launched: Launches) -> None:
    run(swa_kv_cache=torch.zeros(0, 64, 512).to(FP8), compressed_kv_cache=torch.zeros(0, 2, 512).to(FP8))
    assert keys(launched) == [MixedFp8Key("sm_90a")]


def test_who_converts_where_the_op_may_choose(launched: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(converted, "is_converted_faster", lambda *shape: True)
    room = torch.zeros(BYTES + 16, dtype=torch.uint8)
    run(form="auto")
    run(form="auto", workspace=room)
    assert keys(launched) == [ConvertMixedKey("sm_90a"), MixedFp8ConvertedKey("sm_90a")] * 2
    launched.clear()
    run(form="direct")
    for memory in (None, room[: BYTES - 1], room[8:]):
        run(form="auto", workspace=memory)
    assert keys(launched) == [MixedFp8Key("sm_90a")] * 4
    launched.clear()
    run(form="auto", **of_heads(33))
    run(form="auto", **of_heads(32))
    assert keys(launched) == [
        ConvertMixedKey("sm_90a"),
        MixedFp8ConvertedKey("sm_90a"),
        SwapAbMixedFp8Key("sm_90a", 32),
    ]
    launched.clear()
    monkeypatch.setattr(select, "arch_of", lambda index: "sm_120a")
    run(form="auto")
    assert keys(launched) == [PortableMixedKey("sm_120a", 64, "plain_fp8/1")]
    monkeypatch.setattr(select, "arch_of", lambda index: "sm_90a")
    monkeypatch.setattr(converted, "is_converted_faster", lambda *shape: False)
    launched.clear()
    run(form="auto")
    assert keys(launched) == [MixedFp8Key("sm_90a")]


def test_memory_that_is_not_aligned(launched: Launches) -> None:
    call = MixedCall(**codes(workspace=torch.zeros(BYTES + 8, dtype=torch.uint8)[8:]))
    assert MIXED.why_not(call).startswith("workspace must be 16-byte aligned")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (
            arguments() | of_heads(64) | {"query": torch.zeros(3, 64, 512, dtype=BF16), "kv_format": PLAIN_BF16.id},
            "kv_format: expected plain_fp8/1 with form 'converted', got plain_bf16/1",
        ),
        (of_heads(32), "query: expected at least 33 heads with form 'converted', got 32"),
        ({}, "compressed_kv_cache: expected caches of at most 333 rows together with form 'converted', got 334"),
    ],
)
def test_what_cannot_be_converted_says_so(changes: dict[str, Any], why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before there is any memory for it."""
    monkeypatch.setattr(ops, "MOST_CONVERTED_BYTES", BYTES - 1)
    with pytest.raises(ValueError, match=re.escape(f"sparse_mla_mixed: {why}")):
        sparse_mla_mixed(**codes(**changes | {"form": "converted", "workspace": None}))


def test_other_architectures_do_not_convert(launched: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "arch_of", lambda index: "sm_100a")
    assert MIXED.why_not(MixedCall(**codes())) == "form 'converted' is supported on sm_90a, got sm_100a"


@pytest.mark.parametrize(
    ("changes", "argument", "error"),
    [
        ({"form": "gathered"}, "form", ValueError),
        ({"workspace": torch.zeros(8, dtype=torch.bfloat16)}, "workspace", TypeError),
        ({"workspace": torch.zeros(8, 8)}, "workspace", ValueError),
        ({"workspace": torch.zeros(16)[::2]}, "workspace", ValueError),
    ],
)
def test_arguments_that_do_not_fit(changes: dict[str, Any], argument: str, error: type[Exception]) -> None:
    with pytest.raises(error, match=f"sparse_mla_mixed: {argument}: expected"):
        sparse_mla_mixed(**codes(**changes))


def test_a_cpu_needs_no_workspace() -> None:
    given = codes(workspace=None, seq_lens=torch.tensor([3, 9], dtype=torch.int32))
    given["cum_seq_lens_q"] = torch.tensor([0, 1, 3], dtype=torch.int32)
    del given["out"], given["lse"]
    memory = torch.full((8,), 7, dtype=torch.uint8)
    for other in ({}, {"workspace": memory}):
        results = [sparse_mla_mixed(**given | other | {"form": form}) for form in MIXED_FORMS]
        assert all(torch.equal(a, b) for result in results[1:] for a, b in zip(results[0], result, strict=True))
    assert (memory == 7).all()
