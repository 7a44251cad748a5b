# SPDX-License-Identifier: Apache-2.0
"""What the ops that score hand to their kernels. Needs CuTe DSL and no GPU: nothing is launched."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cute_kernels import formats
from cute_kernels.runtime.ops import OPS

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from cute_kernels.indexer import launch as calls
from cute_kernels.indexer import ops as _registered  # noqa: F401
from cute_kernels.indexer import select
from cute_kernels.indexer.blackwell.logits import BlackwellLogitsKey
from cute_kernels.indexer.call import LogitsCall, PagedLogitsCall
from cute_kernels.indexer.hopper.logits import LogitsKey
from cute_kernels.indexer.hopper.logits_mxfp4 import Mxfp4LogitsKey
from cute_kernels.indexer.mma_sync.logits import PortableLogitsKey
from cute_kernels.runtime import trust

SMS = 132
KEYS_AND_WINDOWS = (
    "keys", "scales", "key_stride", "page_stride", "page_rows", "pages", "table", "table_stride", "table_columns",
    "starts", "ends", "end_request", "limit", "shifts", "skip", "clean", "blocks",
)  # fmt: skip
QUERIES = "weights", "out", "q", "q_request", "q_row", "q_head"
Q_SCALES = "q_scale", "q_scale_request", "q_scale_row", "q_scale_head"
ROWS = (*QUERIES, "requests", "row_count", *KEYS_AND_WINDOWS[:-1])
NAMES = {
    LogitsKey: (*ROWS, "use_pdl", "blocks"),
    Mxfp4LogitsKey: (*ROWS, *Q_SCALES[:-1], "use_pdl", "blocks"),
    BlackwellLogitsKey: (*ROWS, *Q_SCALES[:-1], "blocks"),
    PortableLogitsKey: (*QUERIES, *Q_SCALES, "requests", "row_count", "heads", *KEYS_AND_WINDOWS),
}
Key = LogitsKey | BlackwellLogitsKey | PortableLogitsKey
FP8 = torch.float8_e4m3fn


class Launches:
    """Stands for a GPU, Hopper's if not said otherwise: keeps what would have been launched."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, arch: str = "sm_90a", processors: int = SMS) -> None:
        self.kept: list[tuple[Any, dict[str, Any]]] = []
        monkeypatch.setattr(calls, "arch_of", lambda index: arch)
        monkeypatch.setattr(calls, "multiprocessors", lambda index: processors)
        monkeypatch.setattr(calls, "launch_key", self.keep)

    def keep(self, key: Key, device_index: Any, *args: Any) -> None:
        self.kept.append((key, dict(zip(NAMES[type(key)], args, strict=True))))

    def run(self, op: str, args: dict[str, Any], **options: Any) -> tuple[Any, dict[str, Any]]:
        """The only launch of a call."""
        OPS[op].check(*args.values())
        module = OPS[op].load_kernel()
        call = OPS[op].call_type(*args.values())
        assert module.why_not(call) == ""
        before = len(self.kept)
        module.launch(call, **options)
        assert len(self.kept) == before + 1
        return self.kept[-1]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Launches:
    return Launches(monkeypatch)


def codes(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.uint8).view(FP8)


def contiguous(rows: int = 10, keys: int = 300, heads: int = 64, width: int = 0, **changes: Any) -> dict[str, Any]:
    args = {
        "q": codes(rows, heads, 128),
        "q_scale": None,
        "k": codes(keys, 128),
        "k_scale": torch.ones(keys),
        "weights": torch.ones(rows, heads),
        "cu_seq_len_k_start": torch.zeros(rows, dtype=torch.int32),
        "cu_seq_len_k_end": torch.zeros(rows, dtype=torch.int32),
        "clean_logits": True,
        "max_seqlen_k": width,
        "out": torch.zeros(rows, width or keys),
    }
    return {**args, **changes}


def paged(
    requests: int = 3, next_n: int = 2, page_rows: int = 64, columns: int = 500, heads: int = 64, **changes: Any
) -> dict[str, Any]:
    fmt = formats.INDEXER_FP8
    args = {
        "q": codes(requests, next_n, heads, 128),
        "q_scale": None,
        "kv_cache": fmt.allocate(20, page_rows, page_stride=fmt.page_stride(page_rows) + 576),
        "weights": torch.ones(requests * next_n, heads),
        "context_lens": torch.zeros(requests, next_n, dtype=torch.int32),
        "block_tables": torch.zeros(requests, 9, dtype=torch.int32)[:, :8],
        "max_model_len": columns,
        "clean_logits": False,
        "kv_format": fmt.id,
        "out": torch.zeros(requests * next_n, columns),
        "use_pdl": False,
    }
    return {**args, **changes}


def test_contiguous_keys_are_one_page_and_rows_one_request(gpu: Launches) -> None:
    args = contiguous()
    key, got = gpu.run("mqa_logits", args)
    assert (key.heads, key.rows, key.paged) == (64, 4, False)
    assert (got["requests"], got["row_count"], got["pages"], got["page_rows"], got["limit"]) == (1, 10, 1, 300, 300)
    assert (got["q_row"], got["q_head"], got["key_stride"]) == (64 * 128, 128, 128)
    assert got["keys"] == args["k"].data_ptr()
    assert got["scales"] == args["k_scale"].data_ptr()
    assert (got["starts"], got["ends"]) == tuple(args[f"cu_seq_len_k_{name}"].data_ptr() for name in ("start", "end"))
    assert (got["shifts"], got["clean"], got["blocks"]) == (0, 1, 15)
    assert gpu.run("mqa_logits", contiguous(width=90))[1]["shifts"] == -1


def test_strides_of_views(gpu: Launches) -> None:
    q, k = codes(10, 66, 256)[:, 1:-1, 64:192], codes(300, 272)[:, 16:144]
    _, got = gpu.run("mqa_logits", contiguous(q=q, k=k))
    assert (got["q_row"], got["q_head"], got["key_stride"]) == (66 * 256, 256, 272)
    lens = torch.zeros(3, 10, dtype=torch.int32)[:, 4:6]
    _, got = gpu.run("paged_mqa_logits", paged(context_lens=lens))
    assert (got["ends"], got["end_request"]) == (lens.data_ptr(), 40)


def test_a_single_row_or_key_may_have_any_stride(gpu: Launches) -> None:
    q, k = codes(64 * 128).as_strided((1, 64, 128), (7, 128, 1)), codes(128).as_strided((1, 128), (3, 1))
    _, got = gpu.run("mqa_logits", contiguous(1, 1, q=q, k=k))
    assert all(got[name] % 16 == 0 and got[name] > 0 for name in ("q_row", "q_request", "key_stride"))


def test_pages(gpu: Launches) -> None:
    args = paged()
    key, got = gpu.run("paged_mqa_logits", args)
    assert (key.heads, key.rows, key.paged, key.box) == (64, 2, True, 64)
    pool = args["kv_cache"]
    assert (got["keys"], got["scales"]) == (pool.data_ptr(), pool.data_ptr() + 64 * 128)
    assert (got["page_stride"], got["page_rows"], got["pages"]) == (8640 + 576, 64, 20)
    assert (got["table_stride"], got["table_columns"]) == (36, 8)
    assert (got["requests"], got["row_count"], got["limit"], got["blocks"]) == (3, 2, 500, 24)


@pytest.mark.parametrize("mxfp4_codes", [False, True])
def test_the_launch_is_a_dependent_if_wanted(gpu: Launches, mxfp4_codes: bool) -> None:
    """Scores of many rows, and those that picks follow, always are."""
    for wanted in (False, True):
        args = paged(use_pdl=wanted)
        assert gpu.run("paged_mqa_logits", mxfp4(args) if mxfp4_codes else args)[1]["use_pdl"] is wanted
    assert gpu.run("mqa_logits", contiguous())[1]["use_pdl"] is True


@pytest.mark.parametrize(("page_rows", "box"), [(64, 64), (128, 64), (192, 64), (8, 8), (24, 8), (32, 8), (96, 8)])
def test_boxes_divide_pages(gpu: Launches, page_rows: int, box: int) -> None:
    assert gpu.run("paged_mqa_logits", paged(page_rows=page_rows))[0].box == box


@pytest.mark.parametrize(("next_n", "rows"), [(1, 1), (2, 2), (3, 3), (4, 4), (5, 3), (6, 3), (7, 4), (9, 3), (50, 4)])
def test_rows_of_a_group(gpu: Launches, next_n: int, rows: int) -> None:
    key, got = gpu.run("paged_mqa_logits", paged(1, next_n))
    assert key.rows == rows
    assert got["row_count"] == next_n


def test_blocks_are_as_many_as_multiprocessors_at_most(gpu: Launches) -> None:
    assert gpu.run("paged_mqa_logits", paged(1, 1, columns=8192))[1]["blocks"] == 128
    assert gpu.run("paged_mqa_logits", paged(2, 1, columns=8192))[1]["blocks"] == SMS
    assert gpu.run("mqa_logits", contiguous(1, 1))[1]["blocks"] == 1


def test_calls_without_keys_launch_nothing(gpu: Launches) -> None:
    nothing = contiguous(6, 0, width=9)
    calls.launch_logits(LogitsCall(*nothing.values()))
    assert (nothing["out"] == -torch.inf).all()
    unclean = contiguous(6, 0, width=9, clean_logits=False)
    calls.launch_logits(LogitsCall(*unclean.values()))
    assert (unclean["out"] == 0).all()
    changes: tuple[dict[str, Any], ...] = (
        {"kv_cache": formats.INDEXER_FP8.allocate(0, 64)},
        {"block_tables": torch.zeros(3, 0).int()},
    )
    for change in changes:
        args = paged(**change)
        calls.launch_paged_logits(PagedLogitsCall(*args.values()))
        assert (args["out"] == -torch.inf).all()
    calls.launch_paged_logits(PagedLogitsCall(*paged(columns=0).values()))
    assert gpu.kept == []


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"heads": 0}, "HI must be at least 1 and at most 64, got 0"),
        ({"heads": 80}, "HI must be at least 1 and at most 64, got 80"),
        ({"k": codes(300, 136)[:, :128]}, "kv\\[0\\] must be 16-byte aligned row by row"),
        ({"q": codes(10, 64, 144)[..., 8:136]}, "q must be 16-byte aligned row by row"),
    ],
)
def test_contiguous_calls_that_are_refused(gpu: Launches, change: dict[str, Any], why: str) -> None:
    reason = calls.why_not_logits(LogitsCall(*contiguous(**change).values()))
    assert why.replace("\\", "") in reason


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"heads": 65}, "HI must be at least 1 and at most 64, got 65"),
        ({"kv_cache": formats.INDEXER_FP8.allocate(4, 64, page_stride=8641)}, "kv_cache must be 16-byte aligned"),
    ],
)
def test_paged_calls_that_are_refused(gpu: Launches, change: dict[str, Any], why: str) -> None:
    reason = calls.why_not_paged_logits(PagedLogitsCall(*paged(**change).values()))
    assert why.replace("\\", "") in reason


@pytest.mark.parametrize(("keys", "why"), [(2**31 - 256, ""), (2**31 - 255, "at most 2^31 - 256 keys, got 2147483393")])
def test_most_keys(gpu: Launches, keys: int, why: str) -> None:
    call = LogitsCall(*{**contiguous(), "k": codes(1, 128).expand(keys, 128)}.values())
    call_paged = PagedLogitsCall(*{**paged(), "max_model_len": keys}.values())
    for reason in (calls.why_not_logits(call), calls.why_not_paged_logits(call_paged)):
        assert why in reason
        assert bool(why) == bool(reason)


# What Hopper's MXFP4 kernel runs


def test_mxfp4_sm90s_have_64_bytes_and_queries_scales(gpu: Launches) -> None:
    args = mxfp4(contiguous())
    key, got = gpu.run("mqa_logits", args)
    assert key == Mxfp4LogitsKey("sm_90a", 64, 4, False, 64)
    assert (got["q_row"], got["q_head"], got["key_stride"]) == (64 * 64, 64, 64)
    assert (got["keys"], got["scales"]) == (args["k"].data_ptr(), args["k_scale"].data_ptr())
    assert (got["q_scale"], got["q_scale_request"], got["q_scale_row"]) == (args["q_scale"].data_ptr(), 0, 256)
    args = mxfp4(paged())
    args["q_scale"] = torch.zeros(3, 5, 71, dtype=torch.int32)[:, 1:3, 3:67]
    key, got = gpu.run("paged_mqa_logits", args)
    assert key == Mxfp4LogitsKey("sm_90a", 64, 2, True, 64)
    strides = 5 * 71 * 4, 71 * 4
    assert (got["q_scale"], got["q_scale_request"], got["q_scale_row"]) == (args["q_scale"].data_ptr(), *strides)


@pytest.mark.parametrize("fmt", [formats.INDEXER_MXFP4, formats.INDEXER_MXFP4_WIDE], ids=lambda fmt: fmt.id)
def test_mxfp4_scales_follow_the_codes_in_both_sizes_of_rows(gpu: Launches, fmt: Any) -> None:
    args = mxfp4(paged(), fmt.id)
    _, got = gpu.run("paged_mqa_logits", args)
    pool = args["kv_cache"]
    assert (got["keys"], got["scales"], got["key_stride"]) == (pool.data_ptr(), pool.data_ptr() + 64 * 64, 64)
    assert got["page_stride"] == pool.stride(0)


@pytest.mark.parametrize(("next_n", "rows"), [(1, 1), (4, 4), (5, 3)])
def test_rows_of_a_group_of_mxfp4(gpu: Launches, next_n: int, rows: int) -> None:
    assert gpu.run("paged_mqa_logits", mxfp4(paged(next_n=next_n)))[0].rows == rows


# What the portable kernel runs


def mxfp4(args: dict[str, Any], kv_format: str = formats.INDEXER_MXFP4.id) -> dict[str, Any]:
    """The call with MXFP4 queries and keys."""
    q = torch.zeros(*args["q"].shape[:-1], 64, dtype=torch.uint8)
    changes: dict[str, Any] = {"q": q, "q_scale": torch.zeros(q.shape[:-1], dtype=torch.int32)}
    if "k" in args:
        keys = args["k"].shape[0]
        changes |= {"k": torch.zeros(keys, 64, dtype=torch.uint8), "k_scale": torch.zeros(keys, dtype=torch.int32)}
    else:
        changes["kv_format"] = kv_format
        changes["kv_cache"] = formats.FORMATS[kv_format].allocate(20, args["kv_cache"].shape[1])
    return {**args, **changes}


@pytest.mark.parametrize(
    ("op", "args", "is_portable"),
    [
        ("mqa_logits", contiguous(), False),
        ("mqa_logits", contiguous(heads=48), False),
        ("mqa_logits", contiguous(heads=24), True),
        ("mqa_logits", mxfp4(contiguous()), False),
        ("mqa_logits", mxfp4(contiguous(heads=24)), True),
        ("paged_mqa_logits", paged(page_rows=24), False),
        ("paged_mqa_logits", paged(page_rows=12), True),
        ("paged_mqa_logits", paged(heads=1), True),
        ("paged_mqa_logits", mxfp4(paged()), False),
        ("paged_mqa_logits", mxfp4(paged(page_rows=12)), True),
    ],
)
def test_hoppers_kernel_runs_what_it_can(gpu: Launches, op: str, args: dict[str, Any], is_portable: bool) -> None:
    key, got = gpu.run(op, args)
    assert isinstance(key, PortableLogitsKey) == is_portable
    if is_portable:
        heads = args["q"].shape[-2]
        assert got["heads"] == heads
        assert key.heads == formats.round_up(heads, 16)


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_100a", "sm_103a", "sm_120a"])
def test_other_architectures_run_the_portable_kernel(monkeypatch: pytest.MonkeyPatch, arch: str) -> None:
    """Blackwell as long as its own is not trusted."""
    monkeypatch.setattr(trust, "is_trusted", lambda op, kernel, index: False)
    gpu = Launches(monkeypatch, arch)
    key, _ = gpu.run("mqa_logits", contiguous())
    assert key == PortableLogitsKey(arch, 64, 4, False, False)
    key, _ = gpu.run("paged_mqa_logits", mxfp4(paged()))
    assert key == PortableLogitsKey(arch, 64, 2, True, True)


def test_switch_to_the_portable_kernel(gpu: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "HOPPER", "")
    assert isinstance(gpu.run("mqa_logits", contiguous())[0], PortableLogitsKey)
    assert isinstance(gpu.run("paged_mqa_logits", paged())[0], PortableLogitsKey)


@pytest.mark.parametrize(("next_n", "rows"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, 2), (6, 2), (7, 4), (8, 4), (50, 2)])
def test_rows_of_a_portable_group(gpu: Launches, next_n: int, rows: int) -> None:
    key, got = gpu.run("paged_mqa_logits", paged(1, next_n, page_rows=12))
    assert (key.rows, got["row_count"]) == (rows, next_n)


@pytest.mark.parametrize("fmt", [formats.INDEXER_MXFP4, formats.INDEXER_MXFP4_WIDE])
def test_mxfp4_pages(gpu: Launches, fmt: Any) -> None:
    args = mxfp4(paged(page_rows=12), fmt.id)
    _, got = gpu.run("paged_mqa_logits", args)
    pool = args["kv_cache"]
    assert (got["keys"], got["scales"]) == (pool.data_ptr(), pool.data_ptr() + 12 * 64)
    assert (got["key_stride"], got["page_stride"]) == (64, fmt.page_stride(12))
    assert (got["q_request"], got["q_row"], got["q_head"]) == (2 * 64 * 64, 64 * 64, 64)
    assert (got["q_scale_request"], got["q_scale_row"], got["q_scale_head"]) == (2 * 64 * 4, 64 * 4, 4)


def test_mxfp4_views(gpu: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "HOPPER", "")
    args = mxfp4(contiguous())
    args["q"] = torch.zeros(10, 66, 192, dtype=torch.uint8)[:, 1:-1, 64:128]
    args["q_scale"] = torch.zeros(10, 70, dtype=torch.int32)[:, 3:67]
    args["k"] = torch.zeros(300, 272, dtype=torch.int8)[:, 16:80]
    _, got = gpu.run("mqa_logits", args)
    assert (got["q"], got["q_row"], got["q_head"]) == (args["q"].data_ptr(), 66 * 192, 192)
    assert (got["q_scale"], got["q_scale_row"], got["q_scale_head"]) == (args["q_scale"].data_ptr(), 280, 4)
    assert (got["key_stride"], got["requests"], got["row_count"]) == (272, 1, 10)


# What Blackwell's kernel runs


@pytest.fixture(params=["sm_100a", "sm_103a"])
def blackwell(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Launches:
    monkeypatch.setattr(trust, "is_trusted", lambda op, kernel, index: True)
    return Launches(monkeypatch, request.param)


@pytest.mark.parametrize(
    ("op", "args", "is_own"),
    [
        ("mqa_logits", contiguous(), True),
        ("mqa_logits", contiguous(heads=48), True),
        ("mqa_logits", contiguous(heads=24), False),
        ("mqa_logits", mxfp4(contiguous()), True),
        ("paged_mqa_logits", paged(page_rows=192), True),
        ("paged_mqa_logits", paged(page_rows=96), False),
        ("paged_mqa_logits", paged(page_rows=8), False),
        ("paged_mqa_logits", paged(heads=1), False),
        ("paged_mqa_logits", mxfp4(paged()), True),
        ("paged_mqa_logits", mxfp4(paged(), formats.INDEXER_MXFP4_WIDE.id), True),
        ("paged_mqa_logits", mxfp4(paged(page_rows=32)), False),
    ],
)
def test_blackwells_kernel_runs_what_it_can(blackwell: Launches, op: str, args: dict[str, Any], is_own: bool) -> None:
    key, _ = blackwell.run(op, args)
    assert isinstance(key, BlackwellLogitsKey if is_own else PortableLogitsKey)


def test_what_blackwells_kernel_gets(blackwell: Launches) -> None:
    args = contiguous(keys=1000)
    key, got = blackwell.run("mqa_logits", args)
    assert key == BlackwellLogitsKey(key.arch, 64, 4, False, False)
    assert (got["keys"], got["key_stride"], got["row_count"]) == (args["k"].data_ptr(), 128, 10)
    assert [got[name] for name in Q_SCALES[:-1]] == [0, 0, 0]
    # three groups of rows, eight tiles of 128 keys
    assert got["blocks"] == 24
    args = mxfp4(paged(3, 3))
    key, got = blackwell.run("paged_mqa_logits", args)
    assert key == BlackwellLogitsKey(key.arch, 64, 3, True, True)
    strides = 3 * 64 * 4, 64 * 4
    assert (got["q_scale"], got["q_scale_request"], got["q_scale_row"]) == (args["q_scale"].data_ptr(), *strides)
    assert (got["key_stride"], got["page_rows"], got["blocks"]) == (64, 64, 12)


@pytest.mark.parametrize(
    ("heads", "next_n", "rows", "mxfp4_rows"),
    [(64, 1, 1, 1), (64, 3, 3, 3), (64, 4, 4, 2), (64, 7, 4, 3), (48, 4, 4, 4), (16, 9, 3, 3)],
)
def test_rows_of_a_group_on_blackwell(blackwell: Launches, heads: int, next_n: int, rows: int, mxfp4_rows: int) -> None:
    args = paged(1, next_n, heads=heads)
    assert blackwell.run("paged_mqa_logits", args)[0].rows == rows
    assert blackwell.run("paged_mqa_logits", mxfp4(args))[0].rows == mxfp4_rows


def test_each_op_is_trusted_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def is_trusted(op: str, kernel: str, index: int) -> bool:
        asked.append(op)
        return op != "paged_mqa_logits"

    monkeypatch.setattr(trust, "is_trusted", is_trusted)
    gpu = Launches(monkeypatch, "sm_100a")
    assert isinstance(gpu.run("mqa_logits", contiguous())[0], BlackwellLogitsKey)
    assert isinstance(gpu.run("paged_mqa_logits", paged())[0], PortableLogitsKey)
    calls.launch_logits(LogitsCall(*contiguous().values()), op="score_top_k_prefill")
    calls.launch_paged_logits(PagedLogitsCall(*paged().values()), op="score_top_k_decode")
    assert asked == ["mqa_logits", "paged_mqa_logits", "score_top_k_prefill", "score_top_k_decode"]
    # where the portable kernel is the only one, nobody asks
    gpu.run("paged_mqa_logits", paged(page_rows=12))
    assert len(asked) == 4
