# SPDX-License-Identifier: Apache-2.0
"""Which calls of sparse_mla_decode have long rows cut in halves, by shapes and options alone. Needs CuTe DSL and no
GPU: nothing is launched."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from cute_kernels.models import MODELS
from cute_kernels.runtime.arch import small_grids
from cute_kernels.sparse_mla import combine, launch, ops, schedule, select, verify_cases
from cute_kernels.sparse_mla.call import DecodeCall
from cute_kernels.sparse_mla.hopper import decode_halves
from cute_kernels.sparse_mla.hopper.decode import DecodeKey
from tests.sparse_mla.model import BF16, FP8
from tests.sparse_mla.test_decode import arguments
from tests.sparse_mla.test_decode_launch import SMS, Launches

CLUSTERS = SMS // 2
DENSE, LISTED = "dense", "listed"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launches]:
    yield Launches(monkeypatch)
    combine._key.cache_clear()


def call_of(
    b: int = 48, s_q: int = 1, heads: int = 64, tiles: int = 18, second: str = DENSE, room: int | None = None
) -> dict[str, Any]:
    """Arguments of a call whose longest row has so many tiles, and with so many bytes of workspace, by default enough.
    Neither caches nor lists take memory."""
    q = torch.zeros(1, dtype=torch.bfloat16).expand(b, s_q, heads, 512)
    work_tiles = b * s_q * schedule.head_groups(heads)
    room = work_tiles * schedule.KEPT_BYTES if room is None else room
    columns = (tiles - 1) * 64
    given = {
        "q": q,
        "indices": torch.zeros(1, dtype=torch.int32).expand(b, s_q, 64),
        "topk_length": None,
        "attn_sink": None,
        "out": torch.zeros(1, dtype=torch.bfloat16).expand(b, s_q, heads, 512),
        "lse": torch.zeros(b, heads, s_q),
        "workspace": torch.zeros(room, dtype=torch.uint8),
        "extra_indices": torch.zeros(1, dtype=torch.int32).expand(b, s_q, columns),
        "extra_topk_length": None,
    }
    if second == DENSE:
        given |= {"extra_indices": None, "extra_length": torch.zeros(b, s_q, dtype=torch.int32)}
        # pages of the cache of test_decode.arguments have as many rows as this asks for
        given["extra_block_table"] = torch.zeros(1, dtype=torch.int32).expand(b, columns // page_rows())
    return given


def page_rows() -> int:
    return int(arguments(kv_format=FP8)["k_cache"].shape[1])


def chosen(gpu: Launches, monkeypatch: pytest.MonkeyPatch, long_rows: str = "auto", **shape: Any) -> bool:
    """Whether the kernel is that of halves, which then is given the workspace."""
    changes = call_of(**shape)
    # results overlap here, which the op's check would refuse
    monkeypatch.setattr(ops, "_check_decode", lambda call: None)
    given = arguments(**{"extra_k_cache": arguments(kv_format=FP8)["k_cache"], "extra_kv_format": FP8, **changes})
    launch.launch_decode(DecodeCall(*given.values())._replace(long_rows=long_rows))
    key, args = gpu.decodes.pop()
    if not getattr(key, "halves", False):
        return False
    assert not key.dealt
    assert args["halves"] == changes["workspace"].data_ptr()
    assert (args["parts"], args["part_tiles"]) == (1, 0)
    return True


@pytest.mark.parametrize(
    ("shape", "is_halved"),
    [
        ({}, True),
        ({"b": 34}, True),
        ({"b": schedule.MOST_RANKED}, True),
        ({"b": schedule.MOST_RANKED + 1}, False),
        ({"b": CLUSTERS}, False),
        ({"b": 24, "s_q": 2}, True),
        ({"b": 33, "s_q": 2}, False),
        ({"b": 24, "heads": 128}, True),
        ({"b": 33, "heads": 128}, False),
        ({"b": 48, "heads": 17}, True),
        ({"b": 48, "heads": 16}, False),
        ({"tiles": schedule.LEAST_HALVED}, True),
        ({"tiles": schedule.LEAST_HALVED - 1}, False),
        ({"room": 48 * schedule.KEPT_BYTES - 1}, False),
        ({"room": 0}, False),
    ],
    ids=str,
)
@pytest.mark.parametrize("second", [DENSE, LISTED])
def test_rows_are_cut_by_shapes(
    gpu: Launches, monkeypatch: pytest.MonkeyPatch, second: str, shape: dict[str, Any], is_halved: bool
) -> None:
    assert chosen(gpu, monkeypatch, "auto", second=second, **shape) == is_halved
    assert chosen(gpu, monkeypatch, "halves", second=second, **shape) == is_halved
    assert not chosen(gpu, monkeypatch, "whole", second=second, **shape)


def test_rows_that_are_split_are_not_cut(gpu: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    """The op splits few rows where the workspace has room for that."""
    assert not chosen(gpu, monkeypatch, "halves", b=8, room=1 << 26)
    assert chosen(gpu, monkeypatch, "halves", b=8)


def test_small_grids_cut_them_too(gpu: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which CTAs there are is no matter of bits: rows are not dealt in place of it."""
    with small_grids(8):
        assert chosen(gpu, monkeypatch)


@pytest.mark.parametrize("splits", [{"num_splits": 1}, {"split_tokens": 64}])
def test_nor_are_those_whose_splits_the_caller_says(splits: dict[str, int]) -> None:
    call = DecodeCall(*arguments(**call_of(), **splits).values())
    assert not call.wants_halves()


def test_partial_results_are_of_whole_rows() -> None:
    pool = arguments(kv_format=FP8)["k_cache"]
    given = arguments(**call_of(), kv_format=FP8, extra_k_cache=pool, extra_kv_format=FP8)
    call = DecodeCall(*given.values())._replace(long_rows="halves")
    assert call.is_halved(CLUSTERS, 1)
    assert not call._replace(out=call.out.float()).is_halved(CLUSTERS, 1)
    assert not call.is_halved(CLUSTERS, 2)
    assert not call._replace(extra_kv_format=BF16).is_halved(CLUSTERS, 1)


@pytest.mark.parametrize(
    ("arch", "kv_format", "extra"),
    [("sm_100a", FP8, FP8), ("sm_90a", FP8, BF16), ("sm_90a", "mxfp8_v41/1", "nvfp4_v41/1")],
)
def test_what_no_kernel_cuts_says_so(monkeypatch: pytest.MonkeyPatch, arch: str, kv_format: str, extra: str) -> None:
    Launches(monkeypatch, arch)
    given = arguments(**call_of(), kv_format=kv_format, extra_kv_format=extra).values()
    why = launch.why_not_decode(DecodeCall(*given)._replace(long_rows="halves"))
    assert why.startswith(
        f"long_rows 'halves' is supported on sm_90a with caches of {FP8}, got {arch} with {kv_format}"
    )
    assert not select.why_not_halves(DecodeCall(*given))


@pytest.mark.parametrize("rows", [1, 48, 64, 65, 200])
@pytest.mark.parametrize("heads", [17, 32, 64, 128])
@pytest.mark.parametrize("tiles", [2, 12, 18, 100])
def test_the_workspace_of_splits_has_room(rows: int, heads: int, tiles: int) -> None:
    """What sparse_mla_decode_workspace_size says is enough for halves, too."""
    kept = max(schedule.kept_bytes(n, heads, tiles, SMS) for n in range(1, rows + 1))
    assert kept <= schedule.workspace_bytes(rows, heads, tiles, 0, 0, SMS)


def test_the_op_allocates_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "_multiprocessors", lambda device: SMS)
    monkeypatch.setattr(schedule, "split_bytes", lambda *shape: 0)
    q = torch.zeros(48, 1, 64, 512, dtype=torch.bfloat16)
    found = ops._allocate_workspace(q, 18, 0, 0, may_halve=True)
    assert found is not None
    assert found.nbytes == 48 * schedule.KEPT_BYTES
    assert ops._allocate_workspace(q, 18, 0, 0, may_halve=False) is None
    assert ops._allocate_workspace(q, 18, 1, 0, may_halve=True) is None


def test_what_is_kept_has_room() -> None:
    halves = decode_halves.Halves(0)
    places = [halves.o_at(0, 0), halves.o_at(0, 1), halves.softmax_at(0, 0, 0), halves.softmax_at(0, 1, 31)]
    assert [int(place) for place in places] == [0, 32768, 65536, 65536 + 63 * 8]
    assert schedule.KEPT_BYTES % 128 == 0
    assert decode_halves.MARK != 0


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_deployments(model: str, tp: int) -> None:
    """Where hopper/decode has whole rows of a window and more."""
    keys = [key for key in launch.DECODE.deployment_keys(MODELS[model], tp, "sm_90a") if isinstance(key, DecodeKey)]
    assert not any(key.halves and (key.dealt or key.out_fp32) for key in keys)
    halved = {(key.second, key.quantized, key.raw) for key in keys if key.halves}
    heads = MODELS[model].num_attention_heads // tp
    whole = {
        (key.second, key.quantized, key.raw) for key in keys if not key.out_fp32 and key.format0 == key.format1 == FP8
    }
    assert halved == ({kind for kind in whole if kind[0] != "none"} if heads > 16 else set())


@pytest.mark.parametrize("second", [DENSE, LISTED])
@pytest.mark.parametrize("heads", [32, 64])
def test_verified_calls_have_rows_to_cut(heads: int, second: str) -> None:
    """As many as there are clusters to help, and more, with either kind of second list."""
    long_rows = []
    for example in verify_cases.decode():
        call = DecodeCall(*example.args)
        if call.long_rows == "halves" and (call.q.shape[2], call.extra) == (heads, second):
            assert call.is_halved(CLUSTERS, 1)
            lengths = call.extra_topk_length if call.extra_length is None else call.extra_length[:, 0]
            assert lengths is not None
            assert call.topk_length is not None
            rows = zip(call.topk_length.tolist(), lengths.tolist(), strict=True)
            tiles = [sum(map(schedule.num_tiles, row)) for row in rows]
            long_rows.append(sum(count >= schedule.LEAST_HALVED for count in tiles))
    helpers = CLUSTERS - 48
    assert min(long_rows) > 0
    assert min(long_rows) <= helpers < max(long_rows)
