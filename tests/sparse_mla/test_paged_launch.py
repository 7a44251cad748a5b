# SPDX-License-Identifier: Apache-2.0
"""What sparse_mla_prefill_paged hands to its kernel. Needs CuTe DSL and no GPU: nothing is launched."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from cute_kernels.formats import MXFP8_V41, MXFP8_V41_SPLIT, NVFP4_V41
from cute_kernels.sparse_mla import select
from cute_kernels.sparse_mla.call import PagedCall
from cute_kernels.sparse_mla.launch import PAGED
from cute_kernels.sparse_mla.mma_sync.prefill import PortablePagedKey
from tests.sparse_mla.launches import SMS, Launches, keep_launches, launch

NAMES = (
    "q", "swa_cache", "swa_block_table", "compressed_cache", "compressed_block_table", "topk_indices", "out",
    "max_logits", "lse", "starts", "seq_lens", "requests", "window_size", "ratio", "sink", "scale_log2", "blocks",
)  # fmt: skip
FP8, BF16 = "fp8_ds_mla/1", "plain_bf16/1"
ALONE = {"compressed_cache": None, "compressed_block_table": None, "topk_indices": None}


def cache(pages: int, rows: int) -> torch.Tensor:
    size = -(-rows * 584 // 576) * 576
    return torch.zeros(pages * size, dtype=torch.uint8).as_strided((pages, rows, 584), (size, 584, 1))


def arguments(**changes: Any) -> dict[str, Any]:
    """A call of 3 rows of 2 requests and 4 heads, by name in the schema's order."""
    return {
        "q": torch.zeros(3, 4, 512, dtype=torch.bfloat16),
        "swa_cache": cache(5, 64),
        "swa_block_table": torch.zeros(2, 3, dtype=torch.int32),
        "query_start_loc": torch.zeros(3, dtype=torch.int32),
        "seq_lens": torch.zeros(2, dtype=torch.int32),
        "sm_scale": 512**-0.5,
        "window_size": 128,
        "compressed_cache": cache(7, 2),
        "compressed_block_table": torch.zeros(2, 4, dtype=torch.int32),
        "compress_ratio": 4,
        "topk_indices": torch.zeros(3, 12, dtype=torch.int32),
        "attn_sink": torch.zeros(4),
        "kv_format": FP8,
        "compressed_kv_format": FP8,
        "num_splits": 0,
        "split_tokens": 0,
        "out": torch.zeros(3, 4, 512, dtype=torch.bfloat16),
        "max_logits": torch.zeros(3, 4),
        "lse": torch.zeros(3, 4),
    } | changes


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Launches:
    launches = keep_launches(monkeypatch, NAMES)
    # an architecture without a kernel of its own
    monkeypatch.setattr(select, "arch_of", lambda index: "sm_120a")
    return launches


def run(**changes: Any) -> dict[str, Any]:
    return launch("sparse_mla_prefill_paged", arguments(**changes))


def test_arguments_go_as_they_are(launched: list[Any]) -> None:
    args = run()
    ((key, given),) = launched
    assert key == PortablePagedKey("sm_120a", 16, "listed", FP8, FP8)
    for name in NAMES[:9]:
        assert given[name] is args[name]
    for name, argument in {"starts": "query_start_loc", "seq_lens": "seq_lens", "sink": "attn_sink"}.items():
        assert given[name] == args[argument].data_ptr()
    assert (given["requests"], given["window_size"], given["ratio"], given["blocks"]) == (2, 128, 4, SMS)
    assert given["scale_log2"] == pytest.approx(512**-0.5 / math.log(2))


def test_the_window_alone(launched: list[Any]) -> None:
    args = run(**ALONE, attn_sink=None, compress_ratio=0)
    ((key, given),) = launched
    assert key == PortablePagedKey("sm_120a", 16, "none", FP8, FP8)
    assert given["compressed_cache"] is args["swa_cache"]
    assert given["compressed_block_table"] is given["topk_indices"] is args["swa_block_table"]
    assert (given["ratio"], given["sink"]) == (1, 0)


def test_all_entries_and_two_formats(launched: list[Any]) -> None:
    run(topk_indices=None, swa_cache=torch.zeros(5, 64, 512, dtype=torch.bfloat16), kv_format=BF16)
    ((key, given),) = launched
    assert key == PortablePagedKey("sm_120a", 16, "all", BF16, FP8)
    assert given["topk_indices"].dtype == torch.int32


def test_records_of_v41(launched: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The portable kernel is the only one, on Hopper, too; of split pages there is none."""
    own = {"swa_cache": MXFP8_V41.allocate(5, 64), "kv_format": MXFP8_V41.id}
    own |= {"compressed_cache": NVFP4_V41.allocate(7, 32), "compressed_kv_format": NVFP4_V41.id}
    for arch in ("sm_120a", "sm_90a", "sm_100a"):
        monkeypatch.setattr(select, "arch_of", lambda index, arch=arch: arch)
        given = run(**own)
        key, placed = launched[-1]
        assert key == PortablePagedKey(arch, 16, "listed", MXFP8_V41.id, NVFP4_V41.id)
        assert placed["compressed_cache"] is given["compressed_cache"]
    split = own | {"swa_cache": MXFP8_V41_SPLIT.allocate(5, 64), "kv_format": MXFP8_V41_SPLIT.id}
    reason = PAGED.why_not(PagedCall(*arguments(**split).values()))
    assert reason.startswith("split pages of V4.1's own records are supported on a CPU, got mxfp8_v41_split/1 and")


def test_numbers_that_int32_cannot_hold(launched: list[Any]) -> None:
    run(window_size=2**31 - 1, compress_ratio=2**31 - 1)
    ((_, given),) = launched
    assert given["window_size"] == 2**30
    assert given["ratio"] == 2**31 - 1


def test_a_call_without_rows_launches_nothing(launched: list[Any]) -> None:
    names = ("q", "topk_indices", "out", "max_logits", "lse")
    run(**{name: arguments()[name][:0] for name in names})
    assert launched == []


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"q": torch.zeros(3, 4, 516, dtype=torch.bfloat16)[..., :512]}, "heads of q must be 16-byte aligned"),
        ({"out": torch.zeros(3, 4, 520, dtype=torch.bfloat16)[..., 4:516]}, "heads of out must be 16-byte aligned"),
        (
            {"topk_indices": torch.zeros(1, dtype=torch.int32).expand(3, 2**30)},
            "columns of topk_indices: expected fewer than 2^30",
        ),
        ({"num_splits": 2}, "num_splits: expected what makes at most 1 of a row's parts, got 2"),
        ({"split_tokens": 64}, "split_tokens: expected what makes at most 1 of a row's parts, got 64"),
    ],
)
def test_what_is_not_supported_says_so(launched: list[Any], changes: dict[str, Any], why: str) -> None:
    reason = PAGED.why_not(PagedCall(*arguments(**changes).values()))
    assert reason.startswith(why)


@pytest.mark.parametrize("splits", [{"num_splits": 1}, {"split_tokens": 192}])
def test_one_part_of_all(launched: list[Any], splits: dict[str, int]) -> None:
    run(**splits)
    ((key, _),) = launched
    assert key == PortablePagedKey("sm_120a", 16, "listed", FP8, FP8)
