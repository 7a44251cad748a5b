# SPDX-License-Identifier: Apache-2.0
"""The script that runs sanitizers: what it reads out of their output, and what it takes for new."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from scripts import sanitize
from scripts.sanitize import ACCEPTED, Accepted, Job, Processes, Raw, Report, Results

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


SASS = """
	.section	.text.gemm_r4_0,"ax",@progbits
.text.gemm_r4_0:
        /*0a10*/              @!P0 STS.128 [R4], R8 ;
        /*0c10*/                   LDS R1, [R2] ;
.text.other_0:
        /*0d00*/                   EXIT ;
"""


def test_reports_are_named_by_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    codes = {"key": sanitize.read_opcodes(SASS), "another": {}}
    assert codes["key"] == {"gemm_r4_0": {0xA10: "STS.128", 0xC10: "LDS"}, "other_0": {0xD00: "EXIT"}}
    monkeypatch.setattr(sanitize, "opcodes_of", codes.__getitem__)
    named = [
        sanitize.name_report("racecheck", raw, sanitize.find_opcodes(["another", "key"], raw))
        for raw in sanitize.parse(OUTPUT)[0]
    ]
    assert named[0] == Report("racecheck", "race", "gemm_r4", "LDS, STS.128")
    assert named[1] == Report("racecheck", "race", "gemm_r4", "?, STS.128")


def test_code_for_a_gpu_is_found_in_an_object() -> None:
    host, device = (b"\x7fELF" + bytes(14) + machine.to_bytes(2, "little") + b"code" for machine in (62, 190))
    assert list(sanitize.cubins(host + device + b"end")) == [device + b"end"]
    assert list(sanitize.cubins(device + host + device)) == [device + host + device, device]
    assert list(sanitize.cubins(host)) == []


def test_only_what_is_listed_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        sanitize, "ACCEPTED", (Accepted("racecheck", "gemm_*", ("LDGSTS, *", "LDS*, STS*"), "because"),)
    )
    report = Report("racecheck", "race", "gemm_r4", "LDS, STS.128")
    assert sanitize.accepted(report) is not None
    for other in (
        Report("memcheck", "race", "gemm_r4", "LDS, STS.128"),
        Report("racecheck", "race", "topk_r4", "LDS, STS.128"),
        Report("racecheck", "race", "gemm_r4", "STS.128, STS"),
    ):
        assert sanitize.accepted(other) is None


SANITIZER = """#!/bin/sh
while [ "$1" != --log-file ]; do shift; done
log=$2
case "$*" in
    *races*) printf '%s\\n' '= Error: Race reported between Write access at gemm_r4_0+0xa10' \\
        '=     and Read access at gemm_r4_0+0xc10 [416 hazards]' '= RACECHECK SUMMARY: 1 hazards displayed' > $log ;;
    *clean*) echo '= ERROR SUMMARY: 0 errors' > $log ;;
    *odd*) echo '= ERROR SUMMARY: 2 errors' > $log ;;
    *dies*) echo died; exit 3 ;;
    *hangs*) printf '%s\\n' '= Error: Race reported between Write access at gemm_r4_0+0xa10' \\
        '=     and Read access at gemm_r4_0+0xa10 [1 hazards]' > $log; sleep 600 ;;
esac
"""

RACE = Report("racecheck", "race", "gemm_r4", "LDS, STS.128")
HALF = Report("racecheck", "race", "gemm_r4", "STS.128, STS.128")


@pytest.fixture
def sanitizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A tool that reports what the name of the op says."""
    monkeypatch.setattr(sanitize, "opcodes_of", {"key": sanitize.read_opcodes(SASS)}.__getitem__)
    path = tmp_path / "tool"
    path.write_text(SANITIZER)
    path.chmod(0o700)
    return str(path)


def jobs(*ops: str) -> list[Job]:
    return [Job("racecheck", op, (0, 7, 9), ("key",)) for op in ops]


def counts(results: Results) -> dict[tuple[str, Report], int]:
    return {known: places.total() for known, places in results.named.items()}


def test_runs_and_what_went_wrong(sanitizer: str, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(sanitize, "SECONDS", 2)
    results = Results()
    sanitize.run_all(Processes(), sanitizer, jobs("races", "clean", "odd", "dies", "hangs", "nothing"), 6, results)
    assert counts(results) == {("races", RACE): 1, ("hangs", HALF): 1}
    assert results.runs == 2
    assert sorted(problem.partition("calls 0, 7, 9: ")[2].partition(":")[0] for problem in results.failed) == [
        "2 reports that are not understood",
        "no end within 2 s",
        "no summary",
        "status 3",
    ]
    said = capsys.readouterr().out
    assert f"NEW      races: {RACE} (1)" in said
    assert said.count("NEW") == 2


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Also where a shell began the tests in the background, and they ignore interrupts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_keeps_what_there_is(sanitizer: str) -> None:
    results, main = Results(), threading.main_thread().ident
    assert main is not None
    timer = threading.Timer(2, signal.pthread_kill, (main, signal.SIGINT))
    timer.start()
    start = time.monotonic()
    sanitize.run_all(Processes(), sanitizer, jobs("races", "hangs", "hangs2", "clean"), 2, results)
    timer.join()
    assert time.monotonic() - start < 60
    assert counts(results) == {("races", RACE): 1, ("hangs", HALF): 1, ("hangs2", HALF): 1}
    assert set(results.named["races", RACE]) == {"gemm_r4_0+0xa10, gemm_r4_0+0xc10"}
    assert results.runs == 1
    assert [problem.rpartition(": ")[2] for problem in results.failed] == [
        "interrupted",
        "interrupted",
        "1 runs were not begun",
    ]


@dataclass(frozen=True)
class Key:
    kernel_name: str


def test_calls_are_divided_among_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    of_ops = {"a": [(0, ("k",)), (3, ("k", "l")), (4, ("m",)), (9, ("n",)), (11, ("endless",))], "b": []}
    monkeypatch.setattr(sanitize, "NEVER_END", {"racecheck": "endless".__eq__})
    assert list(sanitize.jobs_of("racecheck", of_ops)) == [
        Job("racecheck", "a", (0, 3, 4), ("k", "l", "m")),
        Job("racecheck", "a", (9,), ("n",)),
    ]
    assert list(sanitize.jobs_of("memcheck", of_ops)) == [
        Job("memcheck", "a", (0, 3, 4, 9, 11), ("k", "l", "m", "n", "endless"))
    ]


def test_calls_are_chosen_by_kernels() -> None:
    scores, sums = Key("indexer.scores"), Key("indexer.sums")
    calls = [(2, (scores,)), (5, (scores, sums)), (6, ())]
    assert sanitize.choose(calls, "*.sums") == [(5, (scores, sums))]
    assert sanitize.choose(calls, "indexer.*") == calls[:2]


def test_calls_that_ops_are_verified_with_are_found_by_number() -> None:
    op, offered = sanitize.examples("sparse_mla_mixed")
    again = sanitize.examples("sparse_mla_mixed")[1]
    assert op.name == "sparse_mla_mixed"
    assert [example.name for example in offered] == [example.name for example in again]


def test_every_accepted_report_has_a_reason() -> None:
    assert all(one.tool in sanitize.TOOLS and len(one.why) > 20 for one in ACCEPTED)
