# SPDX-License-Identifier: Apache-2.0
"""What the tests of prefill and mixed attention hold results against."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cute_kernels.runtime import trust
from cute_kernels.runtime.arch import BLACKWELL, arch_of
from cute_kernels.runtime.ops import FALLBACK_VARIABLE

KERNELS: dict[str, dict[str, Any]] = {"own": {}, "portable": {"HOPPER": ""}}
"""Kernels to run the tests with -> what to change where one is chosen. "own": those that calls on Hopper run, or on
Blackwell, trusted or not, whatever their heads and caches."""

LARGEST = 0.35
"""No value of kv is larger. Rounding P to bf16 moves an output by 2^-9 of the mean magnitude of what it sums up at
most, so that the tolerances allow what it does, also where sums cancel."""

ATOL, RTOL, ASIDE = 8e-4, 3.01 / 128, 7e-6
LOG_ATOL, LOG_RTOL = 1e-6, 2.01 / 65536
SUM_RTOL = 2.0**-22
"""Of |q| |k| scale: what fp32 sums of products may be off by, also where they cancel."""


def use_kernel(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have calls run the kernel of that name, and no reference."""
    from cute_kernels.sparse_mla import select

    monkeypatch.delenv(FALLBACK_VARIABLE, raising=False)
    if name == "own" and arch_of(0) not in ("sm_90a", *BLACKWELL):
        pytest.skip("the kernels are Hopper's and Blackwell's")
    monkeypatch.setattr(trust, "is_trusted", lambda op, kernel, index: name == "own")
    for attribute, value in KERNELS[name].items():
        monkeypatch.setattr(select, attribute, value)
    for choose in (select.prefill_key, select.paged_key, select.mixed_key):
        # what has been chosen is kept
        monkeypatch.setattr(select, choose.__name__, choose.__wrapped__)


def assert_results(
    got: tuple[torch.Tensor, ...],
    want: tuple[torch.Tensor, ...],
    q: torch.Tensor,
    scale: float,
    out_scale: float = 1.0,
) -> None:
    """out, which has been multiplied with out_scale, and max_logits and lse or the latter alone. What fp32 sums leave
    uncertain of a score moves its weight by as much, and out by that of the largest value; and out itself is rounded.
    """
    of_sums = SUM_RTOL * abs(scale) * q.double().norm(dim=-1) * (LARGEST * 512**0.5)
    x, y = got[0].double(), want[0]
    allowed = (RTOL * y.abs()).clamp(min=ATOL * abs(out_scale)) + of_sums[..., None] * (LARGEST * abs(out_scale))
    allowed += 2.0**-9 * y.abs()
    wrong = ~((x - y).abs() <= allowed)
    assert not wrong.any(), f"out: {int(wrong.sum())} elements, first at {wrong.nonzero()[0].tolist()}"
    if y.norm() > 0:
        aside = ((x / x.norm() - y / y.norm()) ** 2).sum() / 2  # 1 - cosine
        assert aside <= ASIDE, f"out is {aside:.2g} aside"
    for name, mine, true in zip(("max_logits", "lse")[-len(want) + 1 :], got[1:], want[1:], strict=True):
        wrong = ~((mine == true) | ((mine - true).abs() <= LOG_ATOL + LOG_RTOL * true.abs() + of_sums))
        assert not wrong.any(), f"{name}: {int(wrong.sum())} elements, first at {wrong.nonzero()[0].tolist()}"
