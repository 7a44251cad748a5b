# SPDX-License-Identifier: Apache-2.0
"""What deepseek_v4_fp8_einsum hands to its kernels. Needs CuTe DSL and no GPU: nothing is launched."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from cute_kernels.linear import launch as calls
from cute_kernels.linear.blackwell.gemm import BlackwellGemmKey
from cute_kernels.linear.call import EinsumCall
from cute_kernels.linear.hopper.gemm import GemmKey
from cute_kernels.linear.mma_sync.gemm import PortableGemmKey
from cute_kernels.runtime import trust
from tests.sparse_mla.launches import SMS, Launches, launch

OP = "deepseek_v4_fp8_einsum"
TENSORS = ("a", "a_scale", "b", "b_scale", "out")
BLOCK, PACKED = [1, 128, 128], [1, 1, 128]


def arguments(**changes: Any) -> dict[str, Any]:
    """A call of 3 rows of 2 groups, by name in the schema's order."""
    return {
        "a": torch.zeros(3, 2, 512, dtype=torch.float8_e4m3fn),
        "a_scale": torch.zeros(3, 2, 4),
        "b": torch.zeros(2, 136, 512, dtype=torch.float8_e4m3fn),
        "b_scale": torch.zeros(2, 2, 4),
        "out": torch.zeros(3, 2, 136, dtype=torch.bfloat16),
        "equation": "bhr,hdr->bhd",
        "recipe": BLOCK,
    } | changes


WORDS = {
    "a_scale": torch.zeros(3, 2, 1, dtype=torch.int32),
    "b_scale": torch.zeros(2, 136, 1, dtype=torch.int32),
    "recipe": PACKED,
}
"""What a call with scales in words has that the one above has not."""


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Launches:
    kept: Launches = []
    monkeypatch.setattr(calls, "arch_of", lambda index: "sm_90a")
    monkeypatch.setattr(calls, "multiprocessors", lambda index: SMS)

    def keep(key: Any, index: Any, *args: Any) -> None:
        names = (*TENSORS, "out_scale", "blocks", "use_pdl") if isinstance(key, GemmKey) else (*TENSORS, "blocks")
        kept.append((key, dict(zip(names, args, strict=True))))

    monkeypatch.setattr(calls, "launch_key", keep)
    return kept


@pytest.mark.parametrize(
    ("arch", "changes", "expected", "blocks"),
    [
        ("sm_90a", {}, GemmKey("sm_90a", rows=64, columns=32, warpgroups=1, stages=8, depth=2, unrolled=8), 10),
        ("sm_90a", WORDS, PortableGemmKey("sm_90a", 16, 64, True), 6),
        ("sm_80", {}, PortableGemmKey("sm_80", 16, 64, False), 6),
        ("sm_120a", WORDS, PortableGemmKey("sm_120a", 16, 64, True), 6),
        ("sm_100a", WORDS, BlackwellGemmKey("sm_100a", 64, True), 6),
        ("sm_103a", {}, BlackwellGemmKey("sm_103a", 64), 6),
    ],
)
def test_arguments_go_as_they_are(
    launched: Launches,
    monkeypatch: pytest.MonkeyPatch,
    arch: str,
    changes: dict[str, Any],
    expected: Any,
    blocks: int,
) -> None:
    monkeypatch.setattr(calls, "arch_of", lambda index: arch)
    monkeypatch.setattr(trust, "is_trusted", lambda op, kernel, index: op == OP)
    args = launch(OP, arguments(**changes))
    ((key, given),) = launched
    assert key == expected
    for name in TENSORS:
        assert given[name] is args[name]
    assert given["blocks"] == blocks


@pytest.mark.parametrize("trusted", [False, True])
def test_what_blackwell_leaves_to_the_portable_kernel(
    launched: Launches, monkeypatch: pytest.MonkeyPatch, trusted: bool
) -> None:
    """A kernel that nobody has verified, and an operand that no descriptor can tell of."""
    monkeypatch.setattr(calls, "arch_of", lambda index: "sm_100a")
    monkeypatch.setattr(trust, "is_trusted", lambda op, kernel, index: trusted)
    same_weight = torch.zeros(1, 136, 512, dtype=torch.float8_e4m3fn).expand(2, -1, -1)
    launch(OP, arguments(**({"b": same_weight} if trusted else {})))
    assert [key for key, _ in launched] == [PortableGemmKey("sm_100a", 16, 64, False)]


def test_calls_without_results_launch_nothing(launched: Launches) -> None:
    for rows, groups in ((0, 2), (3, 0)):
        tensors = {
            name: tensor[:rows, :groups] for name, tensor in arguments().items() if name in ("a", "a_scale", "out")
        }
        weights = {name: arguments()[name][:groups] for name in ("b", "b_scale")}
        launch(OP, arguments(**tensors, **weights))
    assert launched == []


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120a"])
@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"a": torch.zeros(3, 2, 528, dtype=torch.float8_e4m3fn)[:, :, 8:520]}, "a must be 16-byte aligned"),
        ({"b": torch.zeros(2, 136, 520, dtype=torch.float8_e4m3fn)[:, :, :512]}, "b must be 16-byte aligned"),
        ({"out": torch.zeros(3, 2, 140, dtype=torch.bfloat16)[:, :, :136]}, "out must be 16-byte aligned"),
        (
            {
                "b": torch.zeros(2, 132, 512, dtype=torch.float8_e4m3fn),
                "out": torch.zeros(3, 2, 136, dtype=torch.bfloat16)[:, :, :132],
            },
            "R must be a multiple of 8, got 132",
        ),
    ],
)
def test_what_is_refused(monkeypatch: pytest.MonkeyPatch, arch: str, change: dict[str, Any], why: str) -> None:
    monkeypatch.setattr(calls, "arch_of", lambda index: arch)
    reason = calls.why_not_einsum(EinsumCall(*arguments(**change).values()))
    assert reason.startswith(why)
