# SPDX-License-Identifier: Apache-2.0
"""What sparse_mla_prefill_paged hands to Hopper's kernel, and which calls it leaves to the portable one. Needs CuTe DSL
and no GPU: nothing is launched."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from cute_kernels import formats
from cute_kernels.runtime import trust
from cute_kernels.sparse_mla import select
from cute_kernels.sparse_mla.blackwell.prefill_paged import BlackwellPagedKey
from cute_kernels.sparse_mla.call import PagedCall
from cute_kernels.sparse_mla.hopper.prefill_paged import PagedKey
from cute_kernels.sparse_mla.hopper.prefill_paged_cluster import PagedClusterKey
from cute_kernels.sparse_mla.launch import PAGED
from cute_kernels.sparse_mla.mma_sync.prefill import PortablePagedKey
from tests.sparse_mla.launches import SMS, Launches, keep_launches, launch

NAMES = (
    "q", "swa_cache", "swa_block_table", "compressed_cache", "compressed_block_table", "out", "max_logits", "lse",
    "lists", "list_row", "columns", "compress_ratio", "starts", "seq_lens", "requests", "window_size", "sink",
    "scale_log2", "blocks",
)  # fmt: skip
PORTABLE_NAMES = (
    "q", "swa_cache", "swa_block_table", "compressed_cache", "compressed_block_table", "topk_indices", "out",
    "max_logits", "lse", "starts", "seq_lens", "requests", "window_size", "ratio", "sink", "scale_log2", "blocks",
)  # fmt: skip
PART_NAMES = (*NAMES[:-1], "parts", "part_tiles")
FMT, BF16_ID = formats.FP8_DS_MLA, formats.PLAIN_BF16.id
BF16 = torch.bfloat16


def arguments(**changes: Any) -> dict[str, Any]:
    """A call of 5 rows of 2 requests and 4 heads, by name in the schema's order."""
    heads = changes.pop("heads", 4)
    return {
        "q": torch.zeros(5, heads, 512, dtype=BF16),
        "swa_cache": FMT.allocate(5, 64),
        "swa_block_table": torch.zeros(2, 3, dtype=torch.int32),
        "query_start_loc": torch.zeros(3, dtype=torch.int32),
        "seq_lens": torch.zeros(2, dtype=torch.int32),
        "sm_scale": 512**-0.5,
        "window_size": 8,
        "compressed_cache": FMT.allocate(7, 2),
        "compressed_block_table": torch.zeros(2, 9, dtype=torch.int32),
        "compress_ratio": 4,
        "topk_indices": torch.zeros(5, 12, dtype=torch.int32)[:, :7],
        "attn_sink": torch.zeros(heads),
        "kv_format": FMT.id,
        "compressed_kv_format": FMT.id,
        "num_splits": 0,
        "split_tokens": 0,
        "out": torch.zeros(5, heads, 512, dtype=BF16),
        "max_logits": torch.zeros(5, heads),
        "lse": torch.zeros(5, heads),
    } | changes


def distant(rows: int) -> torch.Tensor:
    """A pool of pages with so many rows that takes no memory."""
    stride = FMT.page_stride(rows)
    return torch.empty(0, dtype=torch.uint8, device="meta").as_strided((3, rows, 584), (stride, 584, 1))


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Launches:
    return keep_launches(monkeypatch, NAMES)


def run(**changes: Any) -> dict[str, Any]:
    return launch("sparse_mla_prefill_paged", arguments(**changes))


def test_arguments_go_as_they_are(launched: list[Any]) -> None:
    args = run()
    ((key, given),) = launched
    assert key == PagedKey("sm_90a")
    for name in NAMES[:8]:
        assert given[name] is args[name]
    for name, argument in {
        "lists": "topk_indices", "starts": "query_start_loc", "seq_lens": "seq_lens", "sink": "attn_sink"
    }.items():  # fmt: skip
        assert given[name] == args[argument].data_ptr()
    assert (given["list_row"], given["columns"], given["compress_ratio"]) == (48, 7, 4)
    assert (given["requests"], given["window_size"], given["blocks"]) == (2, 8, SMS)
    assert given["scale_log2"] == pytest.approx(512**-0.5 / math.log(2))


@pytest.mark.parametrize("heads", [1, 64, 65, 128])
def test_one_kernel_for_all_lists_and_heads(launched: list[Any], heads: int) -> None:
    run(heads=heads)
    run(heads=heads, topk_indices=None)
    run(heads=heads, topk_indices=None, compressed_cache=None, compressed_block_table=None)
    assert [key for key, _ in launched] == [PagedKey("sm_90a")] * 3


def test_all_entries_are_as_many_as_the_table_has_room_for(launched: list[Any]) -> None:
    run(topk_indices=None)
    ((_, given),) = launched
    assert (given["lists"], given["columns"]) == (0, 18)


def test_no_columns_of_top_k_are_no_entries(launched: list[Any]) -> None:
    run(topk_indices=torch.zeros(5, 0, dtype=torch.int32))
    ((_, given),) = launched
    assert (given["lists"], given["columns"]) == (0, 0)


def test_what_is_not_given(launched: list[Any]) -> None:
    args = run(compressed_cache=None, compressed_block_table=None, topk_indices=None, attn_sink=None, compress_ratio=0)
    ((_, given),) = launched
    assert given["compressed_cache"] is args["swa_cache"]
    assert (given["columns"], given["compress_ratio"], given["sink"]) == (0, 1, 0)


def test_large_numbers_become_what_an_int32_holds(launched: list[Any]) -> None:
    run(window_size=2**31 - 1, compress_ratio=2**31 - 1, num_splits=1)
    ((_, given),) = launched
    assert given["window_size"] == given["compress_ratio"] == 2**30


def test_a_scale_of_zero_does_not_make_nan_of_what_is_skipped(launched: list[Any]) -> None:
    run(sm_scale=0.0)
    ((_, given),) = launched
    assert 0 < given["scale_log2"] < 1e-30


def test_a_call_without_rows_launches_nothing(launched: list[Any]) -> None:
    names = ("q", "topk_indices", "out", "max_logits", "lse")
    run(**{name: arguments()[name][:0] for name in names})
    assert launched == []


WIDE: dict[str, Any] = {"window_size": 192, "topk_indices": torch.zeros(5, 512, dtype=torch.int32)}
"""Eleven tiles."""


@pytest.mark.parametrize(
    ("splits", "blocks", "parts", "part_tiles"),
    [
        ({}, 4, 4, 0),
        ({"num_splits": 2}, 2, 2, 0),
        ({"num_splits": 3}, 4, 3, 0),
        ({"num_splits": 7}, 8, 7, 0),
        ({"split_tokens": 128}, 8, 6, 2),
        ({"split_tokens": 704}, 2, 1, 11),
        ({"split_tokens": 6400}, 2, 1, 100),
    ],
)
def test_rows_in_parts(
    monkeypatch: pytest.MonkeyPatch, splits: dict[str, int], blocks: int, parts: int, part_tiles: int
) -> None:
    launched = keep_launches(monkeypatch, PART_NAMES)
    args = run(**WIDE, **splits)
    ((key, given),) = launched
    assert key == PagedClusterKey("sm_90a", blocks)
    assert (given["parts"], given["part_tiles"], given["sink"]) == (parts, part_tiles, args["attn_sink"].data_ptr())
    for name in NAMES[:8]:
        assert given[name] is args[name]


def test_many_rows_stay_whole(launched: list[Any]) -> None:
    names = "q", "topk_indices", "out", "max_logits", "lse"
    run(**(WIDE | {name: arguments(**WIDE)[name].repeat_interleave(14, dim=0) for name in names}))
    run(**WIDE, num_splits=1)
    assert [key for key, _ in launched] == [PagedKey("sm_90a")] * 2


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"num_splits": 9}, "num_splits: expected what makes at most 8 of a row's parts, got 9, which makes 9"),
        ({"split_tokens": 64}, "split_tokens: expected what makes at most 8 of a row's parts, got 64, which makes 11"),
        ({"split_tokens": 2**36}, "split_tokens: expected less than 2^30 tiles"),
        (
            {"num_splits": 2, "kv_format": BF16_ID, "swa_cache": torch.zeros(5, 64, 512, dtype=BF16)},
            "num_splits: expected what makes at most 1 of a row's parts, got 2",
        ),
    ],
)
def test_parts_that_are_not_supported(launched: list[Any], changes: dict[str, Any], why: str) -> None:
    reason = PAGED.why_not(PagedCall(*arguments(**WIDE, **changes).values()))
    assert reason.startswith(why)


def test_the_longest_parts(launched: list[Any]) -> None:
    assert PAGED.why_not(PagedCall(*arguments(**WIDE, split_tokens=2**36 - 64).values())) == ""


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"q": torch.zeros(5, 4, 516, dtype=BF16)[..., :512]}, "heads of q must be 16-byte aligned"),
        ({"out": torch.zeros(5, 4, 520, dtype=BF16)[..., 4:516]}, "heads of out must be 16-byte aligned"),
        (
            {"swa_cache": torch.zeros(5 * 37440 + 8, dtype=torch.uint8)[8:].as_strided((5, 64, 584), (37440, 584, 1))},
            "pages of swa_cache must be 16-byte aligned",
        ),
    ],
)
def test_what_is_not_supported_says_so(launched: list[Any], changes: dict[str, Any], why: str) -> None:
    reason = PAGED.why_not(PagedCall(*arguments(**changes).values()))
    assert reason.startswith(why)


@pytest.mark.parametrize(
    ("changes", "formats_of_key"),
    [
        ({"kv_format": BF16_ID, "swa_cache": torch.zeros(5, 64, 512, dtype=BF16)}, (BF16_ID, FMT.id)),
        ({"compressed_kv_format": BF16_ID, "compressed_cache": torch.zeros(7, 2, 512, dtype=BF16)}, (FMT.id, BF16_ID)),
        ({"swa_cache": distant(2**22)}, (FMT.id, FMT.id)),
        (
            {"compressed_cache": distant(2**21), "compressed_block_table": torch.zeros(2, 256, dtype=torch.int32)},
            (FMT.id, FMT.id),
        ),
        ({"topk_indices": torch.zeros(1, dtype=torch.int32).expand(5, 2**29)}, (FMT.id, FMT.id)),
    ],
)
def test_what_the_portable_kernel_runs(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], formats_of_key: tuple[str, str]
) -> None:
    launched = keep_launches(monkeypatch, PORTABLE_NAMES)
    # some of these pools lie on no device that the op would take
    args = arguments(**changes)
    assert PAGED.why_not(PagedCall(*args.values())) == ""
    PAGED.launch(PagedCall(*args.values()))
    ((key, given),) = launched
    assert key == PortablePagedKey("sm_90a", 16, "listed", *formats_of_key)
    assert given["topk_indices"] is args["topk_indices"]


def test_other_architectures_have_the_portable_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    launched = keep_launches(monkeypatch, PORTABLE_NAMES)
    monkeypatch.setattr(select, "arch_of", lambda index: "sm_120a")
    run()
    ((key, _),) = launched
    assert key == PortablePagedKey("sm_120a", 16, "listed", FMT.id, FMT.id)


def test_blackwells_own_kernel_runs_if_it_is_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    for own, names in ((True, NAMES), (False, PORTABLE_NAMES)):
        launched = keep_launches(monkeypatch, names)
        monkeypatch.setattr(select, "arch_of", lambda index: "sm_100a")
        with trust.choose(own) as asked:
            args = run(heads=128)
        assert list(asked) == [("sparse_mla_prefill_paged", "sparse_mla.blackwell.prefill_paged")]
        ((key, given),) = launched
        portable = PortablePagedKey("sm_100a", 64, "listed", FMT.id, FMT.id)
        assert key == (BlackwellPagedKey("sm_100a") if own else portable)
        assert given["compressed_cache"] is args["compressed_cache"]
        assert given["window_size"] == 8


@pytest.mark.parametrize(
    ("changes", "reasons"),
    [
        ({"swa_cache": distant(2**22)}, []),
        (
            {
                "swa_cache": torch.zeros(3, 64 * 584, dtype=torch.uint8).as_strided(
                    (2, 64, 584), (64 * 584 + 16, 584, 1)
                )
            },
            ["swa_cache: expected a page stride that is a multiple of 576 and at least 36864, got 37392"],
        ),
        ({"compressed_cache": FMT.allocate(0, 2)}, ["compressed_cache must have rows, got shape (0, 2, 584)"]),
    ],
)
def test_what_cannot_be_gathered_is_the_portable_kernels(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], reasons: list[str]
) -> None:
    launched = keep_launches(monkeypatch, PORTABLE_NAMES)
    monkeypatch.setattr(select, "arch_of", lambda index: "sm_100a")
    found: list[str] = []

    def is_own(op: str, own: Any, device_index: int, why_not: str, real: Any = select.is_own) -> bool:
        found.append(why_not)
        return bool(real(op, own, device_index, why_not))

    monkeypatch.setattr(select, "is_own", is_own)
    with trust.choose(True) as asked:
        PAGED.launch(PagedCall(*arguments(**changes).values()))
    assert not asked
    assert found == reasons
    assert [key for key, _ in launched] == [PortablePagedKey("sm_100a", 16, "listed", FMT.id, FMT.id)]


CODES = {
    "out": torch.zeros(5, 4, 512, dtype=torch.uint8).view(torch.float8_e4m3fn),
    "positions": torch.zeros(5, dtype=torch.int64),
    "cos_sin_cache": torch.zeros(16, 64),
    "out_scale": torch.zeros(16, 8).t(),
}


@pytest.mark.parametrize(
    ("arch", "changes", "why"),
    [
        ("sm_90a", {}, ""),
        ("sm_90a", {"num_splits": 1}, ""),
        ("sm_90a", {"num_splits": 2}, "output_quant: expected rows in one part"),
        ("sm_90a", {"split_tokens": 64}, "output_quant: expected rows in one part"),
        ("sm_90a", {"kv_format": BF16_ID, "swa_cache": torch.zeros(5, 64, 512, dtype=BF16)}, "output_quant is supp"),
        ("sm_100a", {}, "output_quant is supported on sm_90a with caches of fp8_ds_mla/1"),
        ("sm_80", {}, "output_quant is supported on sm_90a with caches of fp8_ds_mla/1"),
    ],
)
def test_who_stores_codes(
    launched: Launches, monkeypatch: pytest.MonkeyPatch, arch: str, changes: dict[str, Any], why: str
) -> None:
    monkeypatch.setattr(select, "arch_of", lambda index: arch)
    reason = PAGED.why_not(PagedCall(**(arguments() | CODES | changes)))
    assert reason.startswith(why)
    assert bool(reason) == bool(why)
