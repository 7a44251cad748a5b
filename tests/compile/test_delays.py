# SPDX-License-Identifier: Apache-2.0
"""Kernels with random delays, as `verify` soaks them. Needs CuTe DSL, no GPU."""

from __future__ import annotations

import pytest

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from cute_kernels.dsl import delays
from cute_kernels.linear import select
from cute_kernels.models import MODELS
from cute_kernels.runtime import registry
from cute_kernels.runtime.compile import compile_report
from tests.gpu.delays import KERNELS, kernel_of


def test_every_wait_is_preceded_by_a_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    key, _ = select.swap_ab("e4m3", "bf16", 16, 1, 1536, 32)
    plain = compile_report(key)
    for place, name in delays.WAITS:
        monkeypatch.setattr(place, name, getattr(place, name))
    delays.add_delays()
    report = compile_report(key)
    assert "nanosleep" not in plain.ptx
    waits = report.ptx.count("mbarrier.try_wait") + report.ptx.count("bar.sync") + report.ptx.count("barrier.sync")
    assert report.ptx.count("nanosleep") >= max(5, waits // 2)
    assert (report.spill_stores, report.spill_loads) == (0, 0)
    assert report.smem == plain.smem


def test_every_kernel_whose_warps_have_roles_is_paused_on_a_gpu() -> None:
    """tests/gpu/test_delays.py, which does not run here, takes those that are listed, and each is one."""
    ranks = ((model, tp) for model in MODELS.values() for tp in (1, 2, 4, 8))
    keys = {key for model, tp in ranks for key in registry.deployment_keys(model, tp, "sm_90a")}
    roles = {kernel_of(key) for key in keys if "mbarrier" in key.instructions}
    assert roles <= KERNELS.keys() <= {kernel_of(key) for key in keys}
