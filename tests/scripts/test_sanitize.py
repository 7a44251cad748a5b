# SPDX-License-Identifier: Apache-2.0
"""The script that runs sanitizers: what it reads out of their output, and what it takes for new."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest

from scripts import sanitize
from scripts.sanitize import ACCEPTED, Accepted, Job, Raw, Report

OUTPUT = """========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at gemm_r4_0+0xa10
=========     and Read access at gemm_r4_0+0xc10 [416 hazards]
=========     and Write access at gemm_r4_0+0xd00 [2 hazards]
========= 
========= Invalid __global__ read of size 4 bytes
=========     at gather_w4_0+0x90
=========     by thread (0,0,0) in block (0,0,0)
=========     Access at 0x7f2d00000000 is out of bounds
========= 
========= Uninitialized __global__ memory read of size 16 bytes
=========     at void copy<int, 4>(int, T2)+0x50
=========     by thread (64,0,0) in block (3,0,0)
========= 
========= ERROR SUMMARY: 3 errors
"""  # noqa: W291 (as it comes)


def test_reports_are_read() -> None:
    found, count = sanitize.parse(OUTPUT)
    assert count == 3
    assert found == [
        Raw("race", (("gemm_r4_0", 0xA10), ("gemm_r4_0", 0xC10))),
        Raw("race", (("gemm_r4_0", 0xA10), ("gemm_r4_0", 0xD00))),
        Raw("Invalid __global__ read of size N bytes", (("gather_w4_0", 0x90),)),
        Raw("Uninitialized __global__ memory read of size N bytes", (("void copy<int, 4>(int, T2)", 0x50),)),
    ]
    assert sanitize.parse("========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n") == ([], 0)


def test_reports_are_named_by_instructions() -> None:
    sass = "\t.text.gemm_r4_0:\n  /*0a10*/   @!P0 STS.128 [R4], R8 ;\n  /*0c10*/   LDS R1, [R2] ;\n"
    codes = {f"gemm_r4_0+{at:#x}": code for at in (0xA10, 0xC10) for code in sanitize._opcode(sass, "gemm_r4_0", at)}
    job = Job("racecheck", "fp8_gemm", 0, 3)
    named = [sanitize.name_report(job, raw, codes) for raw in sanitize.parse(OUTPUT)[0]]
    assert named[0] == Report("racecheck", "race", "gemm_r4", "STS.128, LDS")
    assert named[1] == Report("racecheck", "race", "gemm_r4", "STS.128, ?")


def test_only_what_is_listed_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sanitize, "ACCEPTED", (Accepted("racecheck", "gemm_*", "STS*, LDS*", "because"),))
    report = Report("racecheck", "race", "gemm_r4", "STS.128, LDS")
    assert sanitize.accepted(report) is not None
    for other in (
        Report("memcheck", "race", "gemm_r4", "STS.128, LDS"),
        Report("racecheck", "race", "topk_r4", "STS.128, LDS"),
        Report("racecheck", "race", "gemm_r4", "STS.128, STS"),
    ):
        assert sanitize.accepted(other) is None


def test_a_run_that_says_nothing_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    done = {"returncode": 0, "stdout": ""}
    monkeypatch.setattr(sanitize, "_own", lambda *a, **k: subprocess.CompletedProcess([], **done))  # type: ignore[arg-type]
    job = Job("memcheck", "fp8_gemm", 0, 3)
    assert "no summary" in sanitize.run_job("tool", job)[2]
    done |= {"returncode": 3, "stdout": "died"}
    assert sanitize.run_job("tool", job)[2] == "status 3: died"

    def hangs(*args: Any, **named: Any) -> Any:
        raise subprocess.TimeoutExpired("tool", 1)

    monkeypatch.setattr(sanitize, "_own", hangs)
    assert "no end" in sanitize.run_job("tool", job)[2]


def test_every_accepted_report_has_a_reason() -> None:
    assert all(one.tool in sanitize.TOOLS and len(one.why) > 20 for one in ACCEPTED)
