# SPDX-License-Identifier: Apache-2.0
"""Kernels with random delays, as `verify` soaks them. Needs CuTe DSL, no GPU."""

from __future__ import annotations

import pytest

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from cute_kernels.dsl import delays
from cute_kernels.linear import select
from cute_kernels.runtime.compile import compile_report


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
