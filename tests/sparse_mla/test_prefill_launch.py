# SPDX-License-Identifier: Apache-2.0
"""What sparse_mla_prefill hands to its kernel. Needs CuTe DSL and no GPU: nothing is launched."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.sparse_mla.test_prefill import arguments

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from cute_kernels.runtime import trust
from cute_kernels.sparse_mla import select
from cute_kernels.sparse_mla.blackwell.prefill import BlackwellPrefillKey
from cute_kernels.sparse_mla.call import PrefillCall
from cute_kernels.sparse_mla.hopper.prefill import PrefillKey
from cute_kernels.sparse_mla.hopper.prefill_swap_ab import SwapAbPrefillKey
from cute_kernels.sparse_mla.launch import PREFILL
from cute_kernels.sparse_mla.mma_sync.prefill import PortablePrefillKey
from tests.sparse_mla.launches import SMS, Launches, keep_launches, launch

NAMES = (
    "q", "kv", "indices", "out", "max_logits", "lse", "lengths", "sink", "scale_log2", "blocks",
)  # fmt: skip


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Launches:
    return keep_launches(monkeypatch, NAMES)


def run(**changes: Any) -> dict[str, Any]:
    return launch("sparse_mla_prefill", arguments(**changes))


def test_arguments_go_as_they_are(launched: list[Any]) -> None:
    args = run()
    ((key, given),) = launched
    assert key == SwapAbPrefillKey("sm_90a", 8)
    for name in NAMES[:6]:
        assert given[name] is args[name]
    assert given["lengths"] == args["topk_length"].data_ptr()
    assert given["sink"] == args["attn_sink"].data_ptr()
    assert given["scale_log2"] == pytest.approx(512**-0.5 / math.log(2))
    assert given["blocks"] == SMS


@pytest.mark.parametrize(
    ("heads", "key"),
    [(n, SwapAbPrefillKey("sm_90a", 8)) for n in (1, 7, 8)]
    + [(n, SwapAbPrefillKey("sm_90a", 16)) for n in (9, 16)]
    + [(n, PrefillKey("sm_90a")) for n in (17, 32, 64, 65, 128)],
)
def test_kernels_by_heads(launched: list[Any], heads: int, key: PrefillKey) -> None:
    q = torch.zeros(3, heads, 512, dtype=torch.bfloat16)
    numbers = {name: torch.zeros(3, heads) for name in ("max_logits", "lse")}
    run(q=q, attn_sink=None, out=torch.zeros_like(q), **numbers)
    ((launched_key, _),) = launched
    assert launched_key == key


def test_what_is_not_given_is_zero(launched: list[Any]) -> None:
    run(attn_sink=None, topk_length=None)
    ((_, given),) = launched
    assert (given["lengths"], given["sink"]) == (0, 0)


def test_a_scale_of_zero_does_not_make_nan_of_what_is_skipped(launched: list[Any]) -> None:
    run(sm_scale=0.0)
    ((_, given),) = launched
    assert 0 < given["scale_log2"] < 1e-30


def test_a_call_without_rows_launches_nothing(launched: list[Any]) -> None:
    empty = {name: tensor[:0] for name, tensor in arguments().items() if name in ("q", "indices", "topk_length")}
    run(**empty, out=arguments()["out"][:0], max_logits=torch.zeros(0, 4), lse=torch.zeros(0, 4))
    assert launched == []


@pytest.mark.parametrize("changes", [{"kv": torch.zeros(0, 1, 512, dtype=torch.bfloat16)}, {"sm_scale": -1.0}])
def test_odd_calls_are_the_kernels_business(launched: list[Any], changes: dict[str, Any]) -> None:
    run(**changes)
    assert len(launched) == 1


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"q": torch.zeros(3, 4, 516, dtype=torch.bfloat16)[..., :512]}, "heads of q must be 16-byte aligned"),
        ({"q": torch.zeros(3, 4, 520, dtype=torch.bfloat16)[..., 4:516]}, "heads of q must be 16-byte aligned"),
        ({"out": torch.zeros(3, 4, 516, dtype=torch.bfloat16)[..., :512]}, "heads of out must be 16-byte aligned"),
        ({"kv": torch.zeros(12, 1, 520, dtype=torch.bfloat16)[..., 4:516]}, "rows of kv must be 16-byte aligned"),
        (
            {"indices": torch.zeros(1, dtype=torch.int32).expand(3, 1, 2**30)},
            "columns of indices: expected fewer than 2^30",
        ),
    ],
)
def test_what_is_not_supported_says_so(launched: list[Any], changes: dict[str, Any], why: str) -> None:
    reason = PREFILL.why_not(PrefillCall(*arguments(**changes).values()))
    assert reason.startswith(why)


def run_on(arch: str, monkeypatch: pytest.MonkeyPatch, heads: int = 4, **changes: Any) -> dict[str, Any]:
    monkeypatch.setattr(select, "arch_of", lambda index: arch)
    rows = torch.zeros(3, heads, 512, dtype=torch.bfloat16)
    numbers = {"attn_sink": torch.zeros(heads), "max_logits": torch.zeros(3, heads), "lse": torch.zeros(3, heads)}
    return run(**({"q": rows, "out": rows.clone()} | numbers | changes))


@pytest.mark.parametrize(("heads", "of_item"), [(1, 16), (16, 16), (17, 32), (33, 64), (128, 64)])
def test_other_architectures_have_the_portable_kernel(
    launched: list[Any], monkeypatch: pytest.MonkeyPatch, heads: int, of_item: int
) -> None:
    args = run_on("sm_120a", monkeypatch, heads)
    ((key, given),) = launched
    assert key == PortablePrefillKey("sm_120a", of_item)
    assert all(given[name] is args[name] for name in NAMES[:6])


@pytest.mark.parametrize("arch", ["sm_100a", "sm_103a"])
def test_blackwells_own_kernel_runs_if_it_is_trusted(
    launched: list[Any], monkeypatch: pytest.MonkeyPatch, arch: str
) -> None:
    for own in (True, False):
        with trust.choose(own) as asked:
            args = run_on(arch, monkeypatch, 64)
        assert list(asked) == [("sparse_mla_prefill", "sparse_mla.blackwell.prefill")]
        assert all(launched[-1][1][name] is args[name] for name in NAMES[:6])
    assert [key for key, _ in launched] == [BlackwellPrefillKey(arch), PortablePrefillKey(arch, 64)]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"kv": torch.zeros(0, 1, 512, dtype=torch.bfloat16)}, "kv must have elements"),
        (
            {"kv": torch.zeros(1, 1, 512, dtype=torch.bfloat16).as_strided((1, 1, 512), (3, 512, 1))},
            "kv must be 16-byte aligned row by row, got",
        ),
        (
            {"q": torch.zeros(3, 4, 512, dtype=torch.bfloat16).as_strided((3, 4, 512), (0, 512, 1))},
            "q must be 16-byte aligned row by row, got",
        ),
    ],
)
def test_what_no_descriptor_tells_of_is_the_portable_kernels(
    launched: list[Any], monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], why: str
) -> None:
    with trust.choose(True) as asked:
        args = run_on("sm_100a", monkeypatch, **changes)
    assert not asked
    assert select.why_not_own_prefill(PrefillCall(*args.values())).startswith(why)
    assert [key for key, _ in launched] == [PortablePrefillKey("sm_100a", 16)]
