# SPDX-License-Identifier: Apache-2.0
"""Which kernels fused_inv_rope and fused_inv_rope_fp8_quant launch. Needs CuTe DSL and no GPU: nothing is launched."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from cute_kernels.output import inv_rope
from cute_kernels.output.call import QuantizedCall, RotatedCall


def forget() -> None:
    for value in vars(inv_rope).values():
        if hasattr(value, "cache_clear"):
            value.cache_clear()


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[list[Any]]:
    """Keys of what would be launched."""
    keys: list[Any] = []
    monkeypatch.setattr(inv_rope, "arch_of", lambda index: request.getfixturevalue("arch"))
    monkeypatch.setattr(inv_rope, "launch_key", lambda key, *args: keys.append(key))
    forget()
    yield keys
    forget()


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_kernels_by_tokens_and_heads(arch: str, launched: list[Any]) -> None:
    """A warp of few heads of all tokens together has one, of more two, of many four; the kernel behind a quantizing one
    of few heads may start later where there are more than a dozen tokens."""
    nothing = torch.empty(0)
    for tokens, heads, of_warp, is_late in (
        (1, 8, 1, False),
        (12, 128, 1, False),
        (13, 8, 1, True),
        (16, 128, 1, True),
        (17, 128, 2, False),
        (31, 66, 1, True),  # 2046
        (2049, 1, 2, False),
        (32767, 1, 2, False),
        (256, 128, 4, False),
    ):
        o = torch.empty(tokens, heads, 512, device="meta")
        inv_rope.launch_quantized(QuantizedCall(o, nothing, nothing, nothing, nothing, 1, heads, False, True))
        inv_rope.launch_quantized(QuantizedCall(o, nothing, nothing, nothing, nothing, 1, heads, True, True))
        inv_rope.launch_rotated(RotatedCall(o, nothing, nothing, nothing, 1, heads, True))
        late = [is_late and arch == "sm_90a"] * 2 + [False]
        found = launched[-3:]
        assert [key.scales for key in found] == ["fp32", "packed", "none"]
        assert [(key.heads, key.one_token) for key in found] == [(of_warp, of_warp == 1)] * 3, (tokens, heads)
        assert [key.late for key in found] == late, (tokens, heads)
        for key, kernel in zip(found, (inv_rope.QUANTIZED, inv_rope.QUANTIZED, inv_rope.ROTATED), strict=True):
            assert key in kernel.deployment_keys(None, 1, arch)
    o = torch.empty(0, 8, 512, device="meta")
    inv_rope.launch_rotated(RotatedCall(o, nothing, nothing, nothing, 1, 8, True))
    assert len(launched) == 27
