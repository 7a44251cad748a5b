# SPDX-License-Identifier: Apache-2.0
"""`verify` on a GPU: it passes the kernels that are right and reports one that is not."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cute_kernels.runtime.isolated import run_isolated
from cute_kernels.runtime.registry import all_ops
from cute_kernels.runtime.verify import Verdict, raw_memory, verify_op

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

ROOT = Path(__file__).parent.parent.parent
WITH_KERNEL = sorted(name for name, op in all_ops().items() if op.kernel is not None)


@pytest.mark.parametrize("name", WITH_KERNEL)
def test_kernels_agree_with_their_references(name: str) -> None:
    verdict = verify_op(all_ops()[name], torch.device("cuda"))
    assert verdict.status == "pass", verdict.detail


def test_a_wrong_kernel_is_reported() -> None:
    """The insert kernel, one bit of one byte of its pool wrong."""
    op = all_ops()["quantize_and_insert_k_cache"]
    right = op.load_kernel()

    def launch(call: Any) -> None:
        right.launch(call)
        raw_memory(call.k_cache)[100] ^= 1

    wrong_kernel = replace(right, launch=launch)
    injected = replace(op, kernel=lambda: wrong_kernel)
    verdict = verify_op(injected, torch.device("cuda"))
    assert verdict.status == "fail"
    assert "k_cache: 1 of" in verdict.detail
    assert "the first at byte 100" in verdict.detail


def worker(name: str) -> Verdict:
    """Spoils the context of its process, or shows that it has a good one."""
    if name == "spoil":
        table = torch.zeros(3, device="cuda")
        try:
            table[torch.tensor([10**6], device="cuda")].sum().item()
        except Exception as error:
            return Verdict(name, "fail", detail=type(error).__name__)
    return Verdict(name, "pass" if float(torch.ones(3, device="cuda").sum()) == 3 else "fail")


def test_a_spoiled_context_is_replaced() -> None:
    assert [v.status for v in run_isolated(["a", "spoil", "b"], worker)] == ["pass", "fail", "pass"]


def test_the_command() -> None:
    command = [sys.executable, "-m", "cute_kernels", "verify", "--layers", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    verdicts = {v["name"]: v["status"] for v in json.loads(done.stdout)["verdicts"]}
    assert {name: verdicts[name] for name in WITH_KERNEL} == dict.fromkeys(WITH_KERNEL, "pass")
    assert set(verdicts.values()) <= {"pass", "no kernel"}
    assert verdicts["layer C4A"] == verdicts["layers V4.1"] == "pass"
