# SPDX-License-Identifier: Apache-2.0
"""What sparse_mla_mixed hands to its kernel. Needs CuTe DSL and no GPU: nothing is launched."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from cute_kernels.runtime import trust
from cute_kernels.runtime.key import KernelKey
from cute_kernels.sparse_mla import select
from cute_kernels.sparse_mla.blackwell.prefill_mixed import BlackwellMixedFp8Key, BlackwellMixedKey
from cute_kernels.sparse_mla.call import MixedCall
from cute_kernels.sparse_mla.hopper.prefill_mixed import MixedFp8Key, MixedKey
from cute_kernels.sparse_mla.hopper.prefill_mixed_swap_ab import SwapAbMixedFp8Key
from cute_kernels.sparse_mla.hopper.prefill_swap_ab import SwapAbMixedKey
from cute_kernels.sparse_mla.launch import MIXED
from cute_kernels.sparse_mla.mma_sync.prefill import PortableMixedKey
from tests.sparse_mla.launches import SMS, Launches, keep_launches, launch

NAMES = (
    "query", "swa_kv_cache", "compressed_kv_cache", "sparse_indices", "out", "lse", "lengths", "starts", "seq_lens",
    "requests", "window_size", "sink", "scale_log2", "scale", "blocks",
)  # fmt: skip
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn


def arguments(**changes: Any) -> dict[str, Any]:
    """A call of 3 rows of 2 requests and 4 heads, by name in the schema's order."""
    return {
        "query": torch.zeros(3, 4, 512, dtype=BF16),
        "swa_kv_cache": torch.zeros(5, 64, 512, dtype=BF16),
        "sparse_indices": torch.zeros(3, 12, dtype=torch.int32),
        "compressed_kv_cache": torch.zeros(7, 2, 512, dtype=BF16),
        "sparse_topk_lens": torch.zeros(3, dtype=torch.int32),
        "seq_lens": torch.zeros(2, dtype=torch.int32),
        "cum_seq_lens_q": torch.zeros(3, dtype=torch.int32),
        "bmm1_scale": 512**-0.5,
        "bmm2_scale": 0.75,
        "sinks": torch.zeros(4),
        "window_size": 8,
        "kv_format": "plain_bf16/1",
        "out": torch.zeros(3, 4, 512, dtype=BF16),
        "lse": torch.zeros(3, 4),
    } | changes


CODES = {
    "kv_format": "plain_fp8/1",
    "query": torch.zeros(3, 4, 512).to(FP8),
    "swa_kv_cache": torch.zeros(5, 64, 512).to(FP8),
    "compressed_kv_cache": torch.zeros(7, 2, 512).to(FP8),
}
"""What a call over e4m3 caches has that the one above has not."""


def distant(pages: int, rows: int, stride: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    """A pool that takes no memory."""
    return torch.empty(0, dtype=dtype, device="meta").as_strided((pages, rows, 512), (stride, 512, 1))


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Launches:
    return keep_launches(monkeypatch, NAMES)


def run(**changes: Any) -> dict[str, Any]:
    return launch("sparse_mla_mixed", arguments(**changes))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [({}, SwapAbMixedKey("sm_90a", 8)), (CODES, SwapAbMixedFp8Key("sm_90a", 8))],
    ids=["bf16", "fp8"],
)
def test_arguments_go_as_they_are(launched: list[Any], changes: dict[str, Any], expected: KernelKey) -> None:
    args = run(**changes)
    ((key, given),) = launched
    assert key == expected
    for name in NAMES[:6]:
        assert given[name] is args[name]
    for name, argument in {
        "lengths": "sparse_topk_lens", "starts": "cum_seq_lens_q", "seq_lens": "seq_lens", "sink": "sinks"
    }.items():  # fmt: skip
        assert given[name] == args[argument].data_ptr()
    assert (given["requests"], given["window_size"], given["scale"], given["blocks"]) == (2, 8, 0.75, SMS)
    assert given["scale_log2"] == pytest.approx(512**-0.5 / math.log(2))


@pytest.mark.parametrize(
    ("heads", "keys"),
    [(n, [SwapAbMixedKey("sm_90a", n), SwapAbMixedFp8Key("sm_90a", n)]) for n in (8, 16)]
    + [(n, [MixedKey("sm_90a"), SwapAbMixedFp8Key("sm_90a", 32)]) for n in (17, 32)]
    + [(n, [MixedKey("sm_90a"), MixedFp8Key("sm_90a")]) for n in (33, 64, 128)],
)
def test_kernels_by_heads(launched: list[Any], heads: int, keys: list[KernelKey]) -> None:
    query = torch.zeros(3, heads, 512, dtype=BF16)
    changes = {"query": query, "sinks": None, "out": torch.zeros_like(query), "lse": torch.zeros(3, heads)}
    run(**changes)
    run(**CODES | changes | {"query": query.to(FP8)})
    assert [launched_key for launched_key, _ in launched] == keys


def test_what_is_not_given(launched: list[Any]) -> None:
    args = run(sinks=None, compressed_kv_cache=None, sparse_indices=torch.zeros(3, 8, dtype=torch.int32))
    ((_, given),) = launched
    assert given["sink"] == 0
    assert given["compressed_kv_cache"] is args["swa_kv_cache"]


def test_a_scale_of_zero_does_not_make_nan_of_what_is_skipped(launched: list[Any]) -> None:
    run(bmm1_scale=0.0)
    ((_, given),) = launched
    assert 0 < given["scale_log2"] < 1e-30


def test_a_call_without_rows_launches_nothing(launched: list[Any]) -> None:
    names = ("query", "sparse_indices", "sparse_topk_lens", "out", "lse")
    run(**{name: arguments()[name][:0] for name in names})
    assert launched == []


@pytest.mark.parametrize(
    "changes",
    [
        {"swa_kv_cache": torch.zeros(0, 64, 512, dtype=BF16)},
        {"seq_lens": torch.zeros(0, dtype=torch.int32), "cum_seq_lens_q": torch.zeros(1, dtype=torch.int32)},
        {"bmm1_scale": -1.0},
        {"bmm2_scale": 0.0},
        {"compressed_kv_cache": torch.zeros(7, 1040, dtype=BF16)[:, :1024].unflatten(1, (2, 512))},
    ],
)
def test_odd_calls_are_the_kernels_business(launched: list[Any], changes: dict[str, Any]) -> None:
    run(**changes)
    assert len(launched) == 1


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"query": torch.zeros(3, 4, 516, dtype=BF16)[..., :512]}, "heads of query must be 16-byte aligned"),
        ({"out": torch.zeros(3, 4, 520, dtype=BF16)[..., 4:516]}, "heads of out must be 16-byte aligned"),
        (
            {"swa_kv_cache": torch.zeros(5 * 64 * 512 + 4, dtype=BF16)[4:].view(5, 64, 512)},
            "pages of swa_kv_cache must be 16-byte aligned",
        ),
        (
            {"compressed_kv_cache": torch.zeros(5 * 64 * 512 + 4, dtype=BF16)[4:].view(5, 64, 512)},
            "pages of compressed_kv_cache must be 16-byte aligned",
        ),
        (
            {"sparse_indices": torch.zeros(1, dtype=torch.int32).expand(3, 65536)},
            "sparse_indices: expected fewer than 65536 columns, got shape (3, 65536)",
        ),
        (
            {"swa_kv_cache": distant(2**19 + 1, 64, 64 * 512)},
            "swa_kv_cache: expected at most 34359738368 bytes from the first row on, got 34359803904",
        ),
        (
            {"compressed_kv_cache": distant(3, 2, 2**34)},
            "compressed_kv_cache: expected at most 34359738368 bytes from the first row on, got 68719478784",
        ),
        (
            CODES | {"query": torch.zeros(3, 4, 520).to(FP8)[..., :512]},
            "heads of query must be 16-byte aligned",
        ),
        (
            CODES | {"swa_kv_cache": distant(2**20 + 1, 64, 64 * 512, FP8)},
            "swa_kv_cache: expected at most 34359738368 bytes from the first row on, got 34359771136",
        ),
    ],
)
def test_what_is_not_supported_says_so(launched: list[Any], changes: dict[str, Any], why: str) -> None:
    reason = MIXED.why_not(MixedCall(*arguments(**changes).values()))
    assert reason.startswith(why)


def test_the_largest_pool(launched: list[Any]) -> None:
    assert MIXED.why_not(MixedCall(*arguments(swa_kv_cache=distant(2**19, 64, 64 * 512)).values())) == ""
    largest = CODES | {"swa_kv_cache": distant(2**20, 64, 64 * 512, FP8)}
    assert MIXED.why_not(MixedCall(*arguments(**largest).values())) == ""


@pytest.mark.parametrize("changes", [{}, CODES], ids=["bf16", "fp8"])
def test_other_architectures_have_the_portable_kernel(
    launched: list[Any], monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    monkeypatch.setattr(select, "arch_of", lambda index: "sm_120a")
    args = run(**changes)
    ((key, given),) = launched
    assert key == PortableMixedKey("sm_120a", 16, args["kv_format"])
    assert all(given[name] is args[name] for name in NAMES[:6])


@pytest.mark.parametrize(("changes", "own_key"), [({}, BlackwellMixedKey), (CODES, BlackwellMixedFp8Key)])
def test_blackwells_own_kernels_run_if_they_are_trusted(
    launched: list[Any], monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], own_key: Any
) -> None:
    monkeypatch.setattr(select, "arch_of", lambda index: "sm_103a")
    for own in (True, False):
        with trust.choose(own) as asked:
            args = run(**changes)
        assert list(asked) == [("sparse_mla_mixed", own_key.kernel_name)]
        assert all(launched[-1][1][name] is args[name] for name in NAMES[:6])
    assert [key for key, _ in launched] == [own_key("sm_103a"), PortableMixedKey("sm_103a", 16, args["kv_format"])]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (
            {"swa_kv_cache": torch.zeros(5, 64 * 512 + 8, dtype=BF16).as_strided((5, 64, 512), (64 * 512 + 8, 512, 1))},
            "swa_kv_cache: expected a page stride that is a multiple of 512 and at least 32768, got 32776",
        ),
        (
            {"compressed_kv_cache": torch.zeros(0, 2, 512, dtype=BF16)},
            "compressed_kv_cache must have rows, got shape (0, 2, 512)",
        ),
    ],
)
def test_what_cannot_be_gathered_is_the_portable_kernels(
    launched: list[Any], monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], why: str
) -> None:
    monkeypatch.setattr(select, "arch_of", lambda index: "sm_100a")
    assert select.why_not_own_mixed(MixedCall(*arguments(**changes).values())) == why
    with trust.choose(True) as asked:
        run(**changes)
    assert not asked
    assert [key for key, _ in launched] == [PortableMixedKey("sm_100a", 16, "plain_bf16/1")]
