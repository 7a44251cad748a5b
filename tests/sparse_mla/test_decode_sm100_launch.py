# SPDX-License-Identifier: Apache-2.0
"""Which calls of sparse_mla_decode Blackwell's own kernel takes. Needs CuTe DSL and no GPU: nothing is launched."""

from __future__ import annotations

import pytest
import torch

from cute_kernels.runtime import trust
from cute_kernels.runtime.arch import small_grids
from tests.sparse_mla.model import BF16, FP8
from tests.sparse_mla.test_decode import arguments

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from cute_kernels.models import MODELS
from cute_kernels.sparse_mla import combine, schedule, select, verify_cases
from cute_kernels.sparse_mla.blackwell.decode import BlackwellDecodeKey
from cute_kernels.sparse_mla.blackwell.decode_2cta import BlackwellPairClusterDecodeKey, BlackwellPairDecodeKey
from cute_kernels.sparse_mla.call import DecodeCall
from cute_kernels.sparse_mla.launch import DECODE, launch_decode
from cute_kernels.sparse_mla.select import ungathered
from tests.sparse_mla.test_decode_launch import DENSE, NO_EXTRA, SMS, Launches, of_rows


@pytest.fixture(params=select.BLACKWELL)
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Launches:
    yield Launches(monkeypatch, request.param)
    combine._key.cache_clear()


ROOM = torch.zeros(2**24, dtype=torch.uint8)


@pytest.mark.parametrize("own", [True, False])
def test_it_runs_where_it_is_trusted(gpu: Launches, own: bool) -> None:
    with trust.choose(own) as asked:
        for changes in ({}, NO_EXTRA, DENSE | {"extra_block_table": torch.zeros(2, 5, dtype=torch.int32),
                                               "extra_length": torch.zeros(2, 1, dtype=torch.int32)}):  # fmt: skip
            gpu.run(**changes)
    assert [isinstance(key, BlackwellDecodeKey) for key, _ in gpu.decodes] == [own] * 3
    assert [key.second for key, _ in gpu.decodes] == ["listed", "none", "dense"]
    assert list(asked) == [("sparse_mla_decode", "sparse_mla.blackwell.decode")]


def test_blocks_have_64_heads_and_pairs_of_them_128(gpu: Launches) -> None:
    with trust.choose(own=True):
        for heads in (1, 64, 65, 128):
            gpu.run(**of_rows(2, heads) | {"indices": torch.zeros(2, 1, 640, dtype=torch.int32)}, workspace=ROOM)
            key, given = gpu.decodes[-1]
            assert type(key) is (BlackwellDecodeKey if heads <= 64 else BlackwellPairDecodeKey)
            assert given["ctas"] == SMS
            blocks = schedule.head_groups(heads)
            assert given["parts"] == schedule.choose_splits(2, blocks, 10, SMS, schedule.heads_of_group(heads))


@pytest.mark.parametrize(
    ("refused", "runs"),
    [
        ((), BlackwellPairDecodeKey),
        ((BlackwellPairDecodeKey,), BlackwellPairClusterDecodeKey),
        ((BlackwellPairDecodeKey, BlackwellPairClusterDecodeKey), BlackwellDecodeKey),
    ],
)
def test_a_pair_that_is_not_trusted_leaves_the_kernel_of_one_cta(
    gpu: Launches, monkeypatch: pytest.MonkeyPatch, refused: tuple[type, ...], runs: type
) -> None:
    names = [key.kernel_name for key in refused]
    monkeypatch.setattr(trust, "is_trusted", lambda op, kernel, index: kernel not in names)
    gpu.run(**of_rows(2, 128))
    assert type(gpu.decodes[-1][0]) is runs
    # 64 heads have no pairs to ask for
    gpu.run(**of_rows(2, 64))
    assert type(gpu.decodes[-1][0]) is BlackwellDecodeKey


def test_small_grids_cut_rows_as_others_do(gpu: Launches) -> None:
    with trust.choose(own=True), small_grids(2):
        gpu.run(**of_rows(2, 128) | {"indices": torch.zeros(2, 1, 640, dtype=torch.int32)}, workspace=ROOM)
    _, given = gpu.decodes[-1]
    assert given["ctas"] == 2
    assert given["parts"] == schedule.choose_splits(2, 2, 10, SMS, 64) > 1


def test_parts_are_fp32_and_merged(gpu: Launches) -> None:
    with trust.choose(own=True):
        gpu.run(split_tokens=64, workspace=torch.zeros(2 * 8 * schedule.SPLIT_BYTES, dtype=torch.uint8))
    ((key, given),) = gpu.decodes
    assert (key.out_fp32, given["parts"], given["part_tiles"], given["sink"]) == (True, 2, 1, 0)
    assert len(gpu.merges) == 1


def pool(pages: int, rows: int, stride: int, offset: int = 0) -> torch.Tensor:
    """An fp8_ds_mla cache with any page stride."""
    memory = torch.zeros(max(pages - 1, 0) * stride + rows * 584 + 16, dtype=torch.uint8)
    return memory[offset:].as_strided((pages, rows, 584), (stride, 584, 1))


@pytest.mark.parametrize(
    ("cache", "why"),
    [
        (pool(3, 64, 65 * 576), ""),
        (pool(1, 2, 3 * 576), ""),
        (pool(3, 64, 100 * 576), ""),
        (pool(0, 64, 65 * 576), "k_cache must have rows, got shape (0, 64, 584)"),
        (pool(2, 2, 1200), "k_cache: expected a page stride that is a multiple of 576 and at least 1152, got 1200"),
        (pool(1, 64, 576), "k_cache: expected a page stride that is a multiple of 576 and at least 36864, got 576"),
        (pool(1, 64, 0), "k_cache: expected a page stride that is a multiple of 576 and at least 36864, got 0"),
        (pool(2, 2, 3 * 576, offset=8), "k_cache must be 16-byte aligned"),
        (
            torch.empty_strided((2**20, 64, 584), (576 * 2048, 584, 1), dtype=torch.uint8, device="meta"),
            "k_cache must be less than 2^31 rows of 576 long, got 2147483648",
        ),
    ],
)
def test_what_cannot_be_gathered(cache: torch.Tensor, why: str) -> None:
    found = ungathered("k_cache", cache, 576)
    assert found.startswith(why)
    assert bool(found) == bool(why)


def test_calls_it_does_not_take_are_for_others(gpu: Launches) -> None:
    plain, one_page = arguments()["extra_k_cache"], pool(1, 72, 42624)
    records = arguments(kv_format=FP8)["k_cache"]
    for changes, why in (
        ({"extra_k_cache": plain, "extra_kv_format": BF16}, "extra_k_cache: expected records of fp8_ds_mla/1"),
        ({"k_cache": plain, "kv_format": BF16, **NO_EXTRA}, "k_cache: expected records of fp8_ds_mla/1"),
        ({"k_cache": one_page.as_strided((1, 72, 584), (8, 584, 1)), **NO_EXTRA}, "k_cache: expected a page stride"),
        ({"extra_k_cache": records[:0], "extra_kv_format": FP8}, "extra_k_cache must have rows"),
    ):
        args = arguments(**changes)
        assert select.why_not_own_decode(DecodeCall(*args.values())).startswith(why)
        with trust.choose(own=True) as asked:
            launch_decode(DecodeCall(*args.values()))
        assert not isinstance(gpu.decodes.pop()[0], BlackwellDecodeKey)
        assert not asked, "a warning would speak of a kernel that could not have run"


@pytest.mark.parametrize("arch", select.BLACKWELL)
@pytest.mark.parametrize(("model", "tp"), [("v4-flash", 1), ("v4-flash", 8), ("v4-pro", 1)])
def test_deployments_have_both_kernels(arch: str, model: str, tp: int) -> None:
    keys = DECODE.deployment_keys(MODELS[model], tp, arch)
    assert len(set(keys)) == len(keys)
    every = {(second, fp32) for second in ("none", "listed", "dense") for fp32 in (False, True)}
    decodes = [key for key in keys if not isinstance(key, combine.CombineKey)]
    for is_own in (True, False):
        kinds = {(k.second, k.out_fp32) for k in decodes if isinstance(k, BlackwellDecodeKey) == is_own}
        assert kinds == every
    assert all(isinstance(k, BlackwellPairDecodeKey) == (model == "v4-pro") for k in decodes if "sm100" in k.__module__)


def test_verify_asks_for_all_kernels_of_pairs(gpu: Launches) -> None:
    with trust.choose(own=True):
        for name, case in verify_cases._DECODE.items():
            if case.heads > 64:
                launch_decode(DecodeCall(*case.example(name).args))
    asked = {(k.second, k.out_fp32) for k, _ in gpu.decodes if isinstance(k, BlackwellPairDecodeKey)}
    assert asked == {(second, fp32) for second in ("none", "listed", "dense") for fp32 in (False, True)}


def test_keys() -> None:
    with pytest.raises(ValueError, match=r"second: expected one of .*'dense'.*, got 'some'"):
        BlackwellDecodeKey("sm_100a", second="some")
