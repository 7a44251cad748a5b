# SPDX-License-Identifier: Apache-2.0
"""What sparse_mla_decode hands to its kernel and to the merge. Needs CuTe DSL and no GPU: nothing is launched."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

from cute_kernels import formats
from cute_kernels.runtime import trust
from cute_kernels.runtime.ops import OPS
from cute_kernels.sparse_mla import schedule
from cute_kernels.sparse_mla.call import DecodeCall
from tests.sparse_mla.model import BF16, FP8
from tests.sparse_mla.test_decode import arguments

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from cute_kernels.models import MODELS
from cute_kernels.sparse_mla import combine, launch, select
from cute_kernels.sparse_mla.hopper.decode import DecodeKey
from cute_kernels.sparse_mla.hopper.decode_swap_ab import DecodeSwapAbKey
from cute_kernels.sparse_mla.mma_sync.decode_small_heads import SmallHeadsDecodeKey

SMS = 132
NAMES = (
    "q", "cache0", "list0", "cache1", "list1", "out", "lse", "len0", "len0_batch", "len0_token", "len1", "len1_batch",
    "len1_token", "sink", "scale_log2", "parts", "part_tiles", "ctas",
)  # fmt: skip


class Launches:
    """Stands for a Hopper GPU: keeps what would have been launched, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, arch: str = "sm_90a") -> None:
        self.decodes: list[tuple[Any, dict[str, Any]]] = []
        self.merges: list[tuple[Any, ...]] = []
        for module in (launch, select, combine):
            monkeypatch.setattr(module, "arch_of", lambda index: arch, raising=False)
            monkeypatch.setattr(module, "multiprocessors", lambda index: SMS, raising=False)
        monkeypatch.setattr(launch, "launch_key", self.keep)
        monkeypatch.setattr(combine, "launch_key", lambda *args: self.merges.append(args))
        combine._key.cache_clear()

    def keep(self, key: Any, device_index: Any, *args: Any) -> None:
        names = (*NAMES, "constant_lists") if key.takes_constant_lists else NAMES
        names += ("halves",) * getattr(key, "halves", False)
        self.decodes.append((key, dict(zip(names, args, strict=True))))

    def run(self, long_rows: str = "auto", **changes: Any) -> dict[str, Any]:
        args = arguments(**{"extra_k_cache": arguments(kv_format=FP8)["k_cache"], "extra_kv_format": FP8, **changes})
        OPS["sparse_mla_decode"].check(*args.values())
        call = DecodeCall(*args.values(), long_rows=long_rows)
        assert launch.why_not_decode(call) == ""
        launch.launch_decode(call)
        return args


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Launches:
    yield Launches(monkeypatch)
    combine._key.cache_clear()


NO_EXTRA = {"extra_k_cache": None, "extra_indices": None, "extra_topk_length": None}
DENSE = {"extra_indices": None, "extra_topk_length": None}


def test_one_part_goes_straight_to_the_callers_results(gpu: Launches) -> None:
    args = gpu.run()
    ((key, given),) = gpu.decodes
    assert isinstance(key, DecodeKey)
    assert (key.arch, key.heads, key.second, key.out_fp32) == ("sm_90a", 16, "listed", False)
    assert gpu.merges == []
    assert [given[n] is args[m] for n, m in (("q", "q"), ("cache0", "k_cache"), ("list0", "indices"))] == [True] * 3
    assert given["cache1"] is args["extra_k_cache"]
    assert given["list1"] is args["extra_indices"]
    assert given["out"].shape == (1, 2, 1, 4, 512)
    assert given["out"].data_ptr() == args["out"].data_ptr()
    assert given["lse"].shape == (1, 2, 4, 1)
    assert given["lse"].data_ptr() == args["lse"].data_ptr()
    assert (given["len0"], given["len0_batch"], given["len0_token"]) == (args["topk_length"].data_ptr(), 1, 0)
    extra = args["extra_topk_length"]
    assert (given["len1"], given["len1_batch"], given["len1_token"]) == (extra.data_ptr(), 1, 1)
    assert given["sink"] == args["attn_sink"].data_ptr()
    assert given["scale_log2"] == pytest.approx(512**-0.5 / math.log(2))
    assert (given["parts"], given["part_tiles"], given["ctas"]) == (1, 0, SMS), "a CTA of each multiprocessor"


def test_no_second_list(gpu: Launches) -> None:
    args = gpu.run(**NO_EXTRA, topk_length=None, attn_sink=None)
    ((key, given),) = gpu.decodes
    assert key.second == "none"
    assert given["cache1"] is args["k_cache"]
    assert given["list1"] is args["indices"]
    assert [given[name] for name in NAMES[7:14]] == [0] * 7


def test_a_block_table_is_a_list_that_all_tokens_share(gpu: Launches) -> None:
    q = torch.zeros(2, 3, 4, 512, dtype=torch.bfloat16)
    wide = torch.zeros(2, 9, dtype=torch.int32)
    args = gpu.run(
        q=q,
        indices=torch.zeros(2, 3, 7, dtype=torch.int32),
        **DENSE,
        extra_block_table=wide[:, :5],
        extra_length=torch.zeros(2, 4, dtype=torch.int32)[:, 1:],
        out=torch.zeros(2, 3, 4, 512, dtype=torch.bfloat16),
        lse=torch.zeros(2, 4, 3),
    )
    ((key, given),) = gpu.decodes
    assert key.second == "dense"
    assert given["list1"].shape == (2, 3, 5)
    assert given["list1"].stride() == (9, 0, 1)
    assert given["list1"].data_ptr() == wide.data_ptr()
    length = args["extra_length"]
    assert (given["len1"], given["len1_batch"], given["len1_token"]) == (length.data_ptr(), 4, 1)


@pytest.mark.parametrize(
    ("splits", "parts", "part_tiles"),
    [({"num_splits": 2}, 2, 0), ({"num_splits": 7}, 2, 0), ({"split_tokens": 64}, 2, 1), ({"split_tokens": 128}, 1, 2)],
)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_parts_go_through_the_workspace(
    gpu: Launches, splits: dict[str, int], parts: int, part_tiles: int, dtype: torch.dtype
) -> None:
    size = 2 * 8 * schedule.SPLIT_BYTES // dtype.itemsize
    memory = torch.zeros(size + 64, dtype=dtype)
    workspace = memory[32 : 32 + size]
    args = gpu.run(**splits, workspace=workspace)
    ((key, given),) = gpu.decodes
    assert (given["parts"], given["part_tiles"]) == (parts, part_tiles)
    assert key.out_fp32
    out, lse = given["out"], given["lse"]
    assert (out.dtype, out.shape, out.is_contiguous()) == (torch.float32, (parts, 2, 1, 4, 512), True)
    assert (lse.dtype, lse.shape, lse.is_contiguous()) == (torch.float32, (parts, 2, 4, 1), True)
    assert out.data_ptr() == workspace.data_ptr()
    assert lse.data_ptr() == workspace.data_ptr() + out.nbytes
    assert out.nbytes + lse.nbytes <= workspace.nbytes
    assert given["sink"] == 0
    ((key, _, outs, lses, sink, result, total, use_pdl),) = gpu.merges
    assert key == combine.key_for("sm_90a", True, False, parts)
    assert outs is out
    assert lses is lse
    assert (sink, result is args["out"], total is args["lse"]) == (args["attn_sink"].data_ptr(), True, True)
    assert use_pdl


def test_parts_are_chosen_within_the_workspace(gpu: Launches) -> None:
    """One row of 10 tiles: as many parts if there is room for them, else what there is room for."""
    call = {
        "q": torch.zeros(1, 1, 4, 512, dtype=torch.bfloat16),
        "indices": torch.zeros(1, 1, 640, dtype=torch.int32),
        "topk_length": None,
        **NO_EXTRA,
        "out": torch.zeros(1, 1, 4, 512, dtype=torch.bfloat16),
        "lse": torch.zeros(1, 4, 1),
    }
    part = 4 * schedule.SPLIT_BYTES
    chosen = schedule.choose_splits(1, 1, 10, SMS, 8)
    assert chosen > 3
    for room, parts in ((0, 1), (part, 1), (3 * part + 1, 3), (100 * part, chosen)):
        gpu.run(**call, workspace=torch.zeros(room, dtype=torch.uint8))
        assert gpu.decodes.pop()[1]["parts"] == parts, room
    gpu.run(**call)
    assert gpu.decodes.pop()[1]["parts"] == 1


def test_a_partial_result_may_have_parts_too(gpu: Launches) -> None:
    memory = torch.zeros(2 * 8 * schedule.SPLIT_BYTES, dtype=torch.uint8)
    gpu.run(num_splits=2, workspace=memory, attn_sink=None, out=torch.zeros(2, 1, 4, 512))
    assert gpu.decodes[0][0].out_fp32
    assert gpu.merges[0][0] == combine.key_for("sm_90a", True, True, 2)
    gpu.run(attn_sink=None, out=torch.zeros(2, 1, 4, 512))
    assert gpu.decodes[1][0].out_fp32


def test_hoppers_kernel_takes_no_other_caches_and_architectures(monkeypatch: pytest.MonkeyPatch, gpu: Launches) -> None:
    plain, records = arguments()["extra_k_cache"], arguments(kv_format=FP8)["k_cache"]
    for arch, changes in (
        ("sm_90a", {"extra_k_cache": plain, "extra_kv_format": BF16}),
        ("sm_90a", {"k_cache": plain, "kv_format": BF16, **NO_EXTRA}),
        ("sm_100a", {"extra_k_cache": records, "extra_kv_format": FP8}),
    ):
        args = arguments(**changes).values()
        launches = Launches(monkeypatch, arch)
        if not launch.why_not_decode(DecodeCall(*args)):
            with trust.choose(own=False):
                launch.launch_decode(DecodeCall(*args))
            assert not isinstance(launches.decodes[0][0], DecodeKey)


def test_many_heads_are_for_hoppers_kernel(gpu: Launches) -> None:
    for rows, heads, kind in ((67, 16, DecodeSwapAbKey), (67, 17, DecodeKey), (2, 65, DecodeKey)):
        gpu.run(**of_rows(rows, heads))
        key, given = gpu.decodes[-1]
        assert isinstance(key, kind)
        assert given["ctas"] == SMS * key.ctas_per_sm


def v41(heads: int, window: Any = formats.FP8_DS_MLA, tokens: int = 1, **changes: Any) -> dict[str, Any]:
    """Arguments of a call with entries in NVFP4."""
    return {
        "q": torch.zeros(2, tokens, heads, 512, dtype=torch.bfloat16),
        "k_cache": window.allocate(5, 8),
        "kv_format": window.id,
        "indices": torch.zeros(2, tokens, 64, dtype=torch.int32),
        "extra_k_cache": formats.NVFP4_V41.allocate(3, 32),
        "extra_kv_format": formats.NVFP4_V41.id,
        "extra_indices": torch.zeros(2, tokens, 70, dtype=torch.int32),
        "topk_length": None,
        "extra_topk_length": None,
        "attn_sink": None,
        "out": torch.zeros(2, tokens, heads, 512, dtype=torch.bfloat16),
        "lse": torch.zeros(2, heads, tokens),
        **changes,
    }


def test_records_of_v41(gpu: Launches) -> None:
    """Whole rows of few heads go to the kernel with keys on the long side; few rows, splits, partial results and rows
    of uneven distances, as those of many heads, to the one for all."""
    one = {"num_splits": 1}
    wide = torch.zeros(2, 3, 8, 512, dtype=torch.bfloat16)
    partial = torch.zeros(2, 1, 8, 512)
    memory = torch.zeros(1 << 20, dtype=torch.uint8)
    table = {"extra_block_table": torch.zeros(2, 3, dtype=torch.int32), "extra_length": torch.zeros(2, 1).int()}
    for call, kind, heads in (
        (v41(8), DecodeKey, 16),
        (v41(8, tokens=40), DecodeSwapAbKey, 8),
        (v41(13, formats.MXFP8_V41, tokens=3, **one), DecodeSwapAbKey, 16),
        (v41(8, **one), DecodeSwapAbKey, 8),
        (v41(8, tokens=2, q=wide[:, :2], **one), DecodeKey, 16),
        (v41(8, num_splits=2, workspace=memory), DecodeKey, 16),
        (v41(8, split_tokens=64, workspace=memory), DecodeKey, 16),
        (v41(8, out=partial, **one), DecodeKey, 16),
        ({**v41(8, **one), **DENSE, **table}, DecodeSwapAbKey, 8),
        (v41(17), DecodeKey, 32),
        (v41(64, formats.MXFP8_V41), DecodeKey, 64),
    ):
        gpu.run(**call)
        key, given = gpu.decodes[-1]
        assert type(key) is kind
        assert key.heads == heads
        assert (key.format0, key.format1) == (call["kv_format"], formats.NVFP4_V41.id)
        assert given["cache1"] is call["extra_k_cache"]


def test_records_of_v41_have_kernels_on_hopper_alone(gpu: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    found = launch.why_not_decode(DecodeCall(*arguments(**v41(64, formats.PLAIN_BF16)).values()))
    assert found.endswith(
        "supported on sm_90a, beside fp8_ds_mla/1 or each other; got sm_90a with plain_bf16/1 and nvfp4_v41/1"
    )
    monkeypatch.setattr(select, "arch_of", lambda index: "sm_100a")
    assert "got sm_100a" in launch.why_not_decode(DecodeCall(*arguments(**v41(64)).values()))
    with pytest.raises(ValueError, match="kv_format: expected one of"):
        OPS["sparse_mla_decode"].check(*arguments(**v41(8, formats.NVFP4_V41)).values())


def test_codes_are_stored_of_every_caches_of_hopper_but_bf16(monkeypatch: pytest.MonkeyPatch, gpu: Launches) -> None:
    plain = arguments()["extra_k_cache"]
    codes = {
        "out": torch.zeros(2, 2, 1024, dtype=torch.uint8).view(torch.float8_e4m3fn),
        "positions": torch.zeros(2, dtype=torch.int64),
        "cos_sin_cache": torch.zeros(16, 64),
        "out_scale": torch.zeros(16, 8),
    }
    own = "output_quant is supported on sm_90a with caches of fp8_ds_mla/1 or of V4.1's formats, got"
    for arch, changes, why in (
        ("sm_90a", NO_EXTRA, ""),
        ("sm_90a", v41(4), ""),
        ("sm_90a", v41(4, formats.MXFP8_V41), ""),
        ("sm_90a", {"k_cache": plain, "kv_format": BF16, **NO_EXTRA}, f"{own} sm_90a with plain_bf16/1"),
        ("sm_100a", NO_EXTRA, f"{own} sm_100a with fp8_ds_mla/1"),
    ):
        monkeypatch.setattr(select, "arch_of", lambda index, arch=arch: arch)
        call = DecodeCall(**arguments(**changes) | codes)
        assert launch.why_not_decode(call) == why, (arch, changes)


def test_shapes_choose_the_kernel_that_deals_work(gpu: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def is_dealt(*shapes: int) -> bool:
        asked.append(shapes)
        return len(asked) < 3

    monkeypatch.setattr(schedule, "is_dealt", is_dealt)
    window = {**of_rows(2, 65), "num_splits": 1}
    both = {name: value for name, value in window.items() if name not in NO_EXTRA}
    gpu.run(**both)
    gpu.run(**window)
    gpu.run(**both)
    assert [key.dealt for key, _ in gpu.decodes] == [True, False, False]  # a window alone is short
    # two rows of two head groups, 66 clusters, a tile of each list, one split of no fixed size
    assert asked[0] == (4, SMS // 2, 2, 1, 0)


@pytest.mark.parametrize(
    ("heads", "rows", "tokens", "ctas"),
    [(32, 128, 256, SMS - 2), (32, 128, 320, SMS), (32, 8, 256, SMS), (8, 128, 256, None)],
)
def test_splits_of_unequal_length_go_to_all_clusters_in_turns(
    gpu: Launches, heads: int, rows: int, tokens: int, ctas: int | None
) -> None:
    """By the number of CTAs; that of kernels without clusters stays as it is."""
    given = {"indices": torch.zeros(rows, 1, 640, dtype=torch.int32), "workspace": torch.zeros(2**25)}
    gpu.run(**{**of_rows(rows, heads), **given}, split_tokens=tokens)
    ((key, given),) = gpu.decodes
    assert given["part_tiles"] == tokens // 64
    assert given["ctas"] == (SMS * key.ctas_per_sm if ctas is None else ctas)


def test_rows_choose_the_kernel_where_they_choose_the_split(gpu: Launches) -> None:
    few, room = SMS // 5, torch.zeros(2**24, dtype=torch.uint8)
    for rows, heads, columns, kind, ctas in (
        (few, 8, 257, DecodeKey, 0),
        (few, 16, 7, DecodeKey, 0),
        (few + 1, 8, 257, DecodeSwapAbKey, 2),
        (few + 1, 16, 192, DecodeSwapAbKey, 1),
        (SMS // 2, 16, 257, DecodeSwapAbKey, 2),
        (SMS // 2 + 1, 8, 257, DecodeSwapAbKey, 1),
        (SMS, 8, 257, DecodeSwapAbKey, 1),
        (SMS + 1, 8, 257, SmallHeadsDecodeKey, 0),
        (SMS + 1, 16, 257, DecodeSwapAbKey, 1),
    ):
        indices = torch.zeros(rows, 1, columns, dtype=torch.int32)
        gpu.run(**{**of_rows(rows, heads), "indices": indices, "workspace": room})
        key, given = gpu.decodes[-1]
        assert type(key) is kind
        if ctas:
            assert (key.ctas, given["parts"], given["part_tiles"]) == (ctas, 1, 0)
    # a split that the caller has fixed: rows choose nothing
    for heads, rows in itertools.product((8, 16), (2, few + 1, SMS, SMS + 1)):
        gpu.run(**of_rows(rows, heads), num_splits=1)
        assert gpu.decodes[-1][0] == DecodeSwapAbKey("sm_90a", heads, "none", FP8, FP8)
        for splits in ({"split_tokens": 64}, {"num_splits": 2}):
            indices = torch.zeros(rows, 1, 65, dtype=torch.int32)
            gpu.run(**{**of_rows(rows, heads), "indices": indices, "workspace": room, **splits})
            assert type(gpu.decodes[-1][0]) is SmallHeadsDecodeKey


def of_rows(rows: int, heads: int) -> dict[str, Any]:
    """Changes to a call: so many rows, one list."""
    q = torch.zeros(rows, 1, heads, 512, dtype=torch.bfloat16)
    return {
        "q": q,
        "indices": torch.zeros(rows, 1, 7, dtype=torch.int32),
        "topk_length": None,
        "attn_sink": None,
        **NO_EXTRA,
        "out": torch.zeros_like(q),
        "lse": torch.zeros(rows, heads, 1),
    }


@pytest.mark.parametrize(("b", "s_q"), [(2, 0), (0, 1)])
@pytest.mark.parametrize("splits", [{}, {"num_splits": 2}, {"split_tokens": 64}])
@pytest.mark.parametrize("room", [None, 0, 4096])
def test_rows_without_elements_launch_nothing(
    gpu: Launches, room: int | None, splits: dict[str, int], b: int, s_q: int
) -> None:
    gpu.run(
        q=torch.zeros(b, s_q, 4, 512, dtype=torch.bfloat16),
        indices=torch.zeros(b, s_q, 7, dtype=torch.int32),
        topk_length=None,
        **NO_EXTRA,
        **splits,
        out=torch.zeros(b, s_q, 4, 512, dtype=torch.bfloat16),
        lse=torch.zeros(b, 4, s_q),
        workspace=None if room is None else torch.zeros(room, dtype=torch.uint8),
    )
    assert gpu.decodes == gpu.merges == []


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"q": torch.zeros(2, 1, 4, 516, dtype=torch.bfloat16)[..., :512]}, "heads of q must be 16-byte aligned"),
        ({"q": torch.zeros(2, 1, 4, 520, dtype=torch.bfloat16)[..., 4:516]}, "heads of q must be 16-byte aligned"),
        ({"out": torch.zeros(2, 1, 4, 516, dtype=torch.bfloat16)[..., :512]}, "heads of out must be 16-byte aligned"),
        ({"workspace": torch.zeros(9000, dtype=torch.uint8)[1:]}, "the workspace must be 16-byte aligned"),
        (
            {"k_cache": torch.zeros(1, dtype=torch.uint8).expand(2**25, 64, 584)},
            "k_cache must have fewer than 2^30 rows",
        ),
        (
            {"indices": torch.zeros(1, dtype=torch.int32).expand(2, 1, 2**22), "num_splits": 2**15},
            "tiles of a row times parts must be less than 2^31, got 65536 times 32768",
        ),
        ({"split_tokens": 2**36}, "split_tokens must be less than 2^30 tiles"),
    ],
)
def test_what_is_not_supported_says_so(gpu: Launches, changes: dict[str, Any], why: str) -> None:
    reason = launch.why_not_decode(DecodeCall(*arguments(**NO_EXTRA, **changes).values()))
    assert reason.startswith(why)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_deployments(model: str, tp: int) -> None:
    keys = launch.DECODE.deployment_keys(MODELS[model], tp, "sm_90a")
    assert len(set(keys)) == len(keys)
    kinds = {(key.second, key.out_fp32) for key in keys if isinstance(key, (DecodeKey, SmallHeadsDecodeKey))}
    has_dense = 128 in MODELS[model].compress_ratios
    seconds = ("none", "listed", "dense") if has_dense else ("none", "listed")
    assert kinds == {(second, fp32) for second in seconds for fp32 in (False, True)}
    assert set(combine.deployment_keys(MODELS[model], tp, "sm_90a")) <= set(keys)
