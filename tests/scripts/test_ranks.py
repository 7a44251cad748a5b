# SPDX-License-Identifier: Apache-2.0
"""scripts/run_layer.py over several processes: what rank 0 reports, and that a lost rank ends all of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.layers.ranks import free_port
from tests.scripts.runs import SCRIPT, status

SHORT = ("--layer", 2, "--prefill", 70, "--batch", 2, "--decode", 2)


def test_two_processes(tmp_path: Path, capfd: pytest.CaptureFixture[str], thorough: bool) -> None:
    """The layer with an indexer, whose rows they divide."""
    if not thorough:
        pytest.skip("needs --thorough")
    path = tmp_path / "report.json"
    assert status("--tp", 2, "--tp-indexer", "rows", *SHORT, "--json", path) == 0
    printed = capfd.readouterr()
    assert printed.err == ""
    assert "FAIL" not in printed.out
    assert printed.out.count("PASS 2 ranks = one process") == 1
    (layer,) = json.loads(path.read_text())["layers"]
    names = {check["name"] for check in layer["checks"] if check["passed"]}
    assert {"all ranks hold the same bytes", "caches hold the bytes of one process"} <= names
    assert len(layer["exchanged"]) == 2
    for rank in layer["exchanged"]:
        by_name = {row["collective"]: row for row in rank}
        assert set(by_name) == {"all_reduce", "all_gather"}
        assert by_name["all_reduce"]["calls"] == 3
        # bf16 partial outputs of hidden size 512: each rank receives the other's
        assert by_name["all_reduce"]["bytes"] == 2 * 512 * 2 * (70 + 2)
        assert all(row["seconds"] > 0 and row["over"] == "gloo" for row in rank)


def test_sizes_that_do_not_fit_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert status("--tp", 3) == 2
    assert capsys.readouterr().err == "run_layer.py: error: --tp: expected a divisor of the 2 output groups, got 3\n"
    assert status("--tp", 2, "--dump", "x.npz", "--layer", 0) == 2
    assert "argument --dump: not allowed with --tp" in capsys.readouterr().err
    for arguments, message in (
        (("--tp", 2, "--cp", 3), "--cp: expected a divisor of the 8 heads of a rank, got 3"),
        (("--tp", 4, "--cp", 2), "--tp: expected a divisor of the 2 output groups, got 4"),
        (("--cp", 2, "--kv-cache", "bf16"), "--cp-kv sharded: expected --kv-cache fp8_ds_mla, got bf16"),
        (("--tp", 2, "--dcp", 2, "--kv-cache", "fp8"), "--dcp: expected --kv-cache fp8_ds_mla, got fp8"),
        (("--tp", 2, "--dcp", 3), "argument --dcp: expected a divisor of the 2 ranks of --tp, got 3"),
        (("--cp", 2, "--dcp", 2), "argument --dcp: not allowed with --cp, whose ranks share out the entries already"),
        (("--model", "v4.1-flash", "--cp", 2), "--cp: layers of V4.1 do not take it"),
    ):
        assert status(*arguments) == 2
        assert capsys.readouterr().err == f"run_layer.py: error: {message}\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "ranks"),
    [
        (("--tp", 2, "--cp", 2, "--tp-indexer", "rows", "--layer", 2), 4),
        (("--cp", 2, "--cp-kv", "replicated", "--layer", 2), 2),
        (("--tp", 2, "--dcp", 2, "--layer", 3), 2),
    ],
)
def test_ranks_that_share_a_context(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], arguments: tuple[object, ...], ranks: int, thorough: bool
) -> None:
    if ranks == 2 and not thorough:
        pytest.skip("needs --thorough")
    path = tmp_path / "report.json"
    more = "--prefill", 300, "--chunk", 512, "--batch", 2, "--decode", 2, "--json", path
    assert status(*arguments, *more) == 0
    printed = capfd.readouterr()
    assert printed.err == ""
    assert "FAIL" not in printed.out
    assert printed.out.count(f"PASS {ranks} ranks = one process") == 1
    (layer,) = json.loads(path.read_text())["layers"]
    names = {check["name"] for check in layer["checks"] if check["passed"]}
    assert {"all ranks hold the same bytes", "caches hold the bytes of one process"} <= names
    assert len(layer["exchanged"]) == ranks
    sharded = "replicated" not in arguments
    assert ("PASS shared caches are one process's together" in printed.out) == sharded
    for rank in layer["exchanged"]:
        by_name = {row["collective"]: row for row in rank}
        assert all(row["seconds"] > 0 and row["over"] == "gloo" for row in rank)
        assert ("all_to_all" in by_name) == sharded
        if sharded:
            # of a head 512 values a row and LSEs for four, in fp32: steps of 1, 2 and 1 rows, from one other rank
            assert by_name["all_to_all"]["bytes"] == 16 // ranks * 4 * (4 * 512 + 3 * 4)


@pytest.mark.slow
def test_bad_input_is_said_once(capfd: pytest.CaptureFixture[str]) -> None:
    assert status("--tp", 2, "--layer", 99) == 2
    printed = capfd.readouterr()
    assert printed.err.count("\n") == 1
    assert printed.out == ""


@pytest.mark.slow
def test_under_torchrun(tmp_path: Path) -> None:
    command = ["--standalone", "--nproc-per-node", "2", str(SCRIPT), "--tp", "2"]
    command += [str(word) for word in SHORT]
    module = [sys.executable, "-m", "torch.distributed.run", *command]
    done = subprocess.run(module, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("checks passed") == 1


@pytest.mark.slow
def test_a_killed_rank_ends_the_run(tmp_path: Path) -> None:
    """Ranks as torchrun makes them, one of which is killed while it waits for the other."""
    numbers = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = [sys.executable, str(SCRIPT), "--tp", "2", "--decode", "40"]
    processes = [
        subprocess.Popen(
            command,
            cwd=tmp_path,
            env=os.environ | numbers | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        assert processes[0].stdout is not None
        while "by     kernel" not in processes[0].stdout.readline():
            assert processes[0].poll() is None
        time.sleep(1)
        processes[1].send_signal(signal.SIGKILL)
        _, errors = processes[0].communicate(timeout=100)
        assert processes[0].returncode == 1
        assert errors.count("\n") == 1
        assert "another rank raised, died or did not come in time" in errors
    finally:
        for process in processes:
            process.kill()
            process.wait()
