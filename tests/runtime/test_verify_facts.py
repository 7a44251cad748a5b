# SPDX-License-Identifier: Apache-2.0
"""python -m cute_kernels verify on a Blackwell: facts first."""

from __future__ import annotations

import json
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from cute_kernels.isa_probes import check, copies
from cute_kernels.runtime import isolated as isolated_
from cute_kernels.runtime import precompile as precompile_
from cute_kernels.runtime import trust
from cute_kernels.runtime import verify as verify_
from cute_kernels.runtime.verify import Verdict
from tests.runtime.test_cli import Capture, run

pytestmark = pytest.mark.usefixtures("machine")


@pytest.mark.parametrize("capability", [(10, 0), (9, 0)])
def test_facts_come_first_where_they_are_taken_for_granted(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, gpu: SimpleNamespace, capability: tuple[int, int]
) -> None:
    pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
    gpu.capability = capability
    asked: list[str] = []

    def isolated(names: Iterable[str], function: Any, timeout: float, workers: int) -> Any:
        asked.append(function.__name__)
        if function is verify_.needs_by_name:
            return [verify_.Needs(name, ()) for name in names]
        return [Verdict(name, "fail" if name == "fact gather_dense" else "pass", 1) for name in names]

    compiled: list[Any] = []
    monkeypatch.setattr(isolated_, "run_isolated", isolated)
    monkeypatch.setattr(precompile_, "precompile", lambda keys, folder, workers, delayed: compiled.extend(keys) or [])
    monkeypatch.setattr(trust, "gpu_of", lambda index: {"name": "A GPU"})
    status, out, _ = run(capsys, "verify", "--op", "mqa_logits", "--json")
    verdicts = json.loads(out)["verdicts"]
    if capability == (9, 0):
        assert (status, "verify_fact" in asked, compiled) == (0, False, [])
        assert [v["name"] for v in verdicts] == ["mqa_logits"]
        return
    assert status == 1
    assert asked[:2] == ["needs_by_name", "verify_fact"]
    assert [v["name"] for v in verdicts] == [*sorted(check.NAMES), "mqa_logits"]
    assert {key.arch for key in compiled} == {"sm_100a"}
    assert len(compiled) == len(check.NAMES)


def test_what_a_fact_says(monkeypatch: pytest.MonkeyPatch) -> None:
    want = copies.expect(copies.NAMES["gather_dense"])
    got = want.copy()
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(check, "run", lambda name, device: (got, want))
    assert check.verify_fact("fact gather_dense").status == "pass"
    got[0, 77] ^= 1
    verdict = check.verify_fact("fact gather_dense")
    assert verdict.status == "fail"
    assert verdict.detail.startswith(
        "gathered rows one after the other: 1 of 28672 differ, from [0, 77] to [0, 77]; at "
    )

    def broken(name: str, device: Any) -> Any:
        raise RuntimeError("an illegal instruction\nwas encountered")

    monkeypatch.setattr(check, "run", broken)
    assert check.verify_fact("fact gather_dense").detail.startswith("RuntimeError: an illegal instruction; used by ")
    assert check.compare(np.zeros(3), np.zeros(3)) == ""
