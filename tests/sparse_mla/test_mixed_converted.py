# SPDX-License-Identifier: Apache-2.0
"""sparse_mla_mixed with rows that are converted first: when, into which memory, and by which kernels. Needs CuTe DSL
and no GPU: nothing is launched."""

from __future__ import annotations

import itertools
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
    (256, 64, 128, 4096): (17.7, 18.3),
    (384, 64, 128, 4096): (23.9, 23.9),
    (512, 64, 128, 4096): (30.1, 29.8),
    (776, 64, 128, 4096): (41.6, 40.4),
    (1024, 64, 128, 4096): (56.2, 54.1),
    (2048, 64, 128, 4096): (109.1, 102.9),
    (4096, 64, 128, 4096): (244.0, 227.6),
    (64, 64, 128, 16384): (11.8, 16.1),
    (512, 64, 128, 16384): (30.7, 35.1),
    (776, 64, 128, 16384): (42.4, 44.8),
    (2048, 64, 128, 16384): (105.1, 105.9),
    (4096, 64, 128, 16384): (220.6, 211.0),
    (64, 64, 640, 16384): (25.9, 27.3),
    (128, 64, 640, 16384): (26.8, 28.5),
    (384, 64, 640, 16384): (67.3, 62.3),
    (512, 64, 640, 16384): (88.4, 79.7),
    (4096, 64, 640, 16384): (661.9, 555.3),
    (64, 64, 1152, 16384): (40.2, 38.8),
    (128, 64, 1152, 16384): (41.1, 40.1),
    (64, 64, 2176, 16384): (68.8, 62.3),
    (512, 64, 2176, 16384): (262.8, 219.0),
    (4096, 64, 2176, 16384): (2192.6, 1767.0),
    (64, 64, 128, 65536): (12.0, 35.3),
    (512, 64, 128, 65536): (32.1, 57.1),
    (4096, 64, 128, 65536): (223.1, 243.8),
    (64, 64, 640, 65536): (26.2, 46.9),
    (512, 64, 640, 65536): (89.7, 107.2),
    (2048, 64, 640, 65536): (336.3, 328.2),
    (4096, 64, 640, 65536): (677.4, 620.8),
    (512, 64, 1152, 65536): (149.2, 158.1),
    (776, 64, 1152, 65536): (219.7, 219.2),
    (1024, 64, 1152, 65536): (290.0, 280.3),
    (64, 64, 2176, 65536): (69.9, 82.3),
    (384, 64, 2176, 65536): (197.6, 196.9),
    (512, 64, 2176, 65536): (266.4, 252.7),
    (4096, 64, 2176, 65536): (2314.8, 1913.9),
    (64, 64, 128, 262144): (11.9, 107.7),
    (512, 64, 128, 262144): (32.6, 132.7),
    (4096, 64, 128, 262144): (218.5, 323.9),
    (64, 64, 640, 262144): (26.2, 119.8),
    (512, 64, 640, 262144): (92.1, 194.3),
    (4096, 64, 640, 262144): (743.1, 782.6),
    (2048, 64, 1152, 262144): (640.7, 679.9),
    (4096, 64, 1152, 262144): (1313.5, 1282.0),
    (64, 64, 2176, 262144): (70.2, 155.8),
    (512, 64, 2176, 262144): (272.1, 356.4),
    (2048, 64, 2176, 262144): (1250.5, 1205.2),
    (4096, 64, 2176, 262144): (2645.6, 2343.6),
    (64, 128, 128, 4096): (14.1, 14.9),
    (128, 128, 128, 4096): (17.7, 18.2),
    (256, 128, 128, 4096): (29.9, 29.5),
    (384, 128, 128, 4096): (42.2, 40.7),
    (512, 128, 128, 4096): (54.6, 52.6),
    (776, 128, 128, 4096): (77.6, 73.4),
    (1024, 128, 128, 4096): (112.9, 105.0),
    (2048, 128, 128, 4096): (220.5, 205.1),
    (384, 128, 128, 16384): (42.5, 45.1),
    (512, 128, 128, 16384): (55.6, 56.9),
    (776, 128, 128, 16384): (78.0, 78.0),
    (2048, 128, 128, 16384): (233.4, 220.2),
    (64, 128, 640, 16384): (26.9, 28.3),
    (128, 128, 640, 16384): (47.0, 45.2),
    (64, 128, 1152, 16384): (41.4, 39.9),
    (2048, 128, 128, 65536): (222.9, 226.2),
    (384, 128, 640, 65536): (130.9, 139.9),
    (512, 128, 640, 65536): (172.2, 173.9),
    (776, 128, 640, 65536): (255.5, 245.8),
    (256, 128, 1152, 65536): (149.7, 152.1),
    (384, 128, 1152, 65536): (218.9, 211.4),
    (512, 128, 1152, 65536): (291.9, 274.6),
    (128, 128, 2176, 65536): (134.6, 138.2),
    (1024, 128, 1152, 262144): (609.7, 610.2),
    (512, 128, 2176, 262144): (532.9, 554.5),
}
"""On an H200: of the cells that the rule was fitted to (perf/log/prefill_mixed.md) those where it matters least, and
others all over the grid."""


@pytest.mark.parametrize(("shape", "times"), MEASURED.items())
def test_the_faster_form(shape: tuple[int, int, int, int], times: tuple[float, float]) -> None:
    """Or one that takes at most 2% longer."""
    rows, heads, columns, cache_rows = shape
    is_faster = converted.is_converted_faster(cache_rows, rows, heads, columns // 64, 132)
    assert times[is_faster] <= 1.02 * min(times)


def test_the_choice_beyond_what_was_measured() -> None:
    """More query rows and longer lists only speak for converting, more rows of caches only against it. One query row
    with a tile or two is not worth a launch, however small its caches, and 100000 rows of long lists are."""
    cache_rows = [1, 64, 1000, 4096, 16384, 131072, 524288, 2**22, 2**25]
    query_rows, tiles, heads = [1, 16, 132, 133, 1000, 4096, 100_000], [1, 2, 4, 10, 34, 128, 1023], [33, 64, 128]
    shapes = itertools.product(cache_rows, query_rows, heads, tiles)
    chosen = {shape: converted.is_converted_faster(*shape, 132) for shape in shapes}
    for (cached, rows, count, columns), is_faster in chosen.items():
        if is_faster:
            assert all(chosen[fewer, rows, count, columns] for fewer in cache_rows if fewer <= cached)
            assert all(chosen[cached, more, count, columns] for more in query_rows if more >= rows)
            assert all(chosen[cached, rows, count, longer] for longer in tiles if longer >= columns)
    assert not any(chosen[cached, 1, count, short] for cached in cache_rows for count in heads for short in (1, 2))
    assert all(chosen[cached, 100_000, count, 34] for cached in cache_rows[:7] for count in heads)


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
