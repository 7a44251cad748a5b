# SPDX-License-Identifier: Apache-2.0
"""The command line of the measurements: exit status, one-line errors, what it prints and writes."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from perf import ceilings, cli, measure, peers, plots, report
from perf.records import load
from tests.perf import synthetic
from tests.perf.synthetic import INSERT, cell, record

ROOT = Path(__file__).parent.parent.parent
GATHER = "dequantize_and_gather_k_cache"


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The one line that `python -m perf ARGV` ends with, with status 2."""
    try:
        status = cli.main(argv)
    except SystemExit as error:
        status = int(error.code or 0)
    captured = capsys.readouterr()
    assert (status, captured.out) == (2, "")
    assert captured.err.startswith("python -m perf")
    assert captured.err.count("\n") == 1
    assert captured.err.endswith("\n")
    return captured.err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["dance"], "invalid choice: 'dance'"),
        (["sweep", "--op", "nope"], "invalid choice: 'nope'"),
        (["sweep", "--rows", "many"], "--rows: invalid comma-separated integers value: 'many'"),
        (["sweep", "--rows", "0,1"], "--rows: expected positive integers, got 0"),
        (["sweep", "--replays", "14"], "--replays: expected at least 15, got 14"),
        (["sweep", "--replays", "0"], "--replays: expected at least 15, got 0"),
        (["sweep", "--json", "x.json"], f"--json: expected a folder for {len(cli.MODULES)} ops, got x.json"),
        (["sweep", "--op", INSERT, "--json", "/dev/null/x"], "--json: /dev/null/x: Not a directory"),
        (["compare", "a"], "the following arguments are required: B"),
        (["compare", "/nowhere/a", "/nowhere/b"], "compare: error: /nowhere/a: no such file or folder"),
        (["compare", "a", "b", "--threshold", "-1"], "--threshold: expected a percentage >= 0, got -1.0"),
        (["show", "nope"], "invalid choice: 'nope'"),
        (["show", INSERT, "("], "CASE: '(' is no regular expression"),
        (["show", INSERT, "no such cell"], "CASE: no cell's name has 'no such cell'"),
        (["show", INSERT, "--root", "/nowhere"], f"OP: no record of {INSERT} in /nowhere/perf/results"),
        (["report", "--root", "/nowhere"], "report: error: --root: /nowhere/README.md does not exist"),
    ],
)
def test_bad_requests(capsys: pytest.CaptureFixture[str], argv: list[str], message: str) -> None:
    assert message in refused(capsys, *argv)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_sweep_needs_a_gpu(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "there is no CUDA device here" in refused(capsys, "sweep", "--json", str(tmp_path / "out"))
    assert list(tmp_path.rglob("*.json")) == []


@pytest.mark.full
def test_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "perf", "compare", "a", "b"], cwd=ROOT, capture_output=True, text=True, env=os.environ
    )
    assert done.returncode == 2
    assert done.stderr == "python -m perf compare: error: a: no such file or folder\n"


def test_every_op_has_a_sweep_and_a_quick_look() -> None:
    for op, name in cli.MODULES.items():
        module = importlib.import_module(name)
        assert op in module.SWEEPS
        assert module.QUICK[op]


# ---- sweep, with the GPU replaced ------------------------------------------------------------------------------------


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A module with one op, and a machine on which everything takes a known time."""
    asked: list[dict[str, Any]] = []

    def sweep(**options: Any) -> list[dict[str, Any]]:
        asked.append(options)
        cells = [cell(t, 1616 * t, 1.68, {"vllm-triton": 4.38}, host=7.0) for t in options.get("rows", (1, 64))]
        for one in cells:
            del one["bound"]
            for line in one["rows"]:
                del line["percent"]
        return cells if 5 not in options.get("rows", ()) else []

    fake = SimpleNamespace(SWEEPS={INSERT: sweep}, QUICK={INSERT: (1,)}, asked=asked)
    real = importlib.import_module
    monkeypatch.setattr(cli.importlib, "import_module", lambda name: fake if name == "perf.kv_cache" else real(name))
    machine = {key: synthetic.record([])[key] for key in ("gpu", "cpu", "driver", "torch", "dsl", "tvm_ffi", "python")}
    monkeypatch.setattr(measure, "environment", lambda: {**machine, "commit": "abc", "date": "2026-11-20"})
    monkeypatch.setattr(ceilings, "measure", lambda replays: synthetic.record([])["ceilings"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(measure, "cold_bytes", lambda: 180e6)
    return fake


def test_a_peer_that_cannot_be_imported_ends_a_sweep_unless_it_may_be_missing(
    module: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def loader() -> Any:
        raise AttributeError("no such op")

    def sweep(**options: Any) -> list[dict[str, Any]]:
        one = cell(1, 1616, 1.68, {"vllm-triton": 4.38, "deepgemm": str(peers.load_peer("deepgemm", loader))})
        del one["bound"]
        return [one]

    monkeypatch.setitem(module.SWEEPS, INSERT, sweep)
    path = tmp_path / "x.json"
    assert cli.main(["sweep", "--op", INSERT, "--peers", "--json", str(path)]) == 1
    said = "the peer deepgemm cannot be imported: AttributeError: no such op; --allow-missing-peers skips it"
    assert said in capsys.readouterr().err
    assert not path.exists()
    assert cli.main(["sweep", "--op", INSERT, "--peers", "--allow-missing-peers", "--json", str(path)]) == 0
    (found,) = load(path).cells
    assert (found.absent, found.gain) == (("deepgemm",), None)


def test_a_sweep_writes_a_valid_record(
    module: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "new/x.json"
    assert cli.main(["sweep", "--op", INSERT, "--peers", "--json", str(path)]) == 0
    found = load(path)
    assert (found.op, found.gpu, found.partial) == (INSERT, synthetic.GPU, False)
    assert found.yardsticks["copy"].source == "stated"
    assert found.yardsticks["e4m3"].value == synthetic.E4M3
    assert found.cells[1].ours.percent == pytest.approx(100 * 64 * 1616 / 4.312e6 / 1.68, abs=0.05)
    assert module.asked == [{"peers": True, "variants": False, "replays": 21}]
    printed = capsys.readouterr().out
    for part in ("cute_kernels", "vllm-triton", "1.68", "copy 8 GB", "RuntimeError: not here"):
        assert part in printed


def test_a_folder_gets_one_file_per_op(module: SimpleNamespace, tmp_path: Path) -> None:
    assert cli.main(["sweep", "--op", INSERT, "--variants", "--json", str(tmp_path / "out")]) == 0
    assert load(tmp_path / f"out/{INSERT}.json").op == INSERT


@pytest.mark.parametrize(
    ("flags", "rows", "replays"), [(["--quick"], (1,), 15), (["--rows", "2,4", "--replays", "30"], (2, 4), 30)]
)
def test_a_record_without_all_shapes_says_so(
    module: SimpleNamespace, tmp_path: Path, flags: list[str], rows: tuple[int, ...], replays: int
) -> None:
    assert cli.main(["sweep", "--op", INSERT, *flags, "--json", str(tmp_path)]) == 0
    assert load(tmp_path / f"{INSERT}.json").partial
    assert module.asked == [{"rows": rows, "peers": False, "variants": False, "replays": replays}]


def test_rows_that_no_shape_has(module: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"--rows: {INSERT} has no shape with that many rows" in refused(
        capsys, "sweep", "--op", INSERT, "--rows", "5"
    )


def test_a_failed_measurement_writes_nothing(
    module: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def reference(**_: Any) -> list[dict[str, Any]]:
        measure.require_kernel(lambda: None)
        return []

    module.SWEEPS[INSERT] = reference
    assert cli.main(["sweep", "--op", INSERT, "--json", str(tmp_path)]) == 1
    assert capsys.readouterr().err == (
        f"python -m perf sweep: {INSERT} failed: require_kernel: the call ran no op of this project\n"
    )
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_sweep_leaves_the_cells_that_it_has(module: SimpleNamespace, tmp_path: Path) -> None:
    def interrupted(**_: Any) -> list[dict[str, Any]]:
        for rows in (1, 8):
            found = cell(rows, 1616, 1.68)
            del found["bound"]
            keep = measure._keep.get()
            assert keep is not None
            keep(found)
        raise KeyboardInterrupt

    module.SWEEPS[INSERT] = interrupted
    with pytest.raises(KeyboardInterrupt):
        cli.main(["sweep", "--op", INSERT, "--json", str(tmp_path)])
    assert [path.name for path in tmp_path.iterdir()] == [f"{INSERT}.partial.json"]
    found = load(tmp_path / f"{INSERT}.partial.json")
    assert found.partial
    assert [one.case for one in found.cells] == ["T=1", "T=8"]


def test_a_row_of_a_reference_is_set_aside(
    module: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def reference(**_: Any) -> list[dict[str, Any]]:
        found = cell(1, 1616, 1.68)
        found["rows"][0]["implementation"] = "reference"
        return [found]

    module.SWEEPS[INSERT] = reference
    assert cli.main(["sweep", "--op", INSERT, "--json", str(tmp_path)]) == 1
    assert "sweep: rejected: T=1: cute_kernels ran its reference implementation" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == [f"{INSERT}.rejected.json"]


def test_a_record_that_contradicts_itself_is_set_aside(
    module: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def warm(**_: Any) -> list[dict[str, Any]]:
        found = cell(1, 1616, 1.68)
        found["rows"][0]["sets"] = 2
        return [found]

    module.SWEEPS[INSERT] = warm
    assert cli.main(["sweep", "--op", INSERT, "--json", str(tmp_path)]) == 1
    assert "expected input sets beyond the cache" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == [f"{INSERT}.rejected.json"]


def test_several_ops_run_in_a_process_each(
    module: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands: list[list[str]] = []

    def run(command: list[str]) -> SimpleNamespace:
        commands.append(command)
        return SimpleNamespace(returncode=1 if GATHER in command else 0)

    monkeypatch.setattr(cli.subprocess, "run", run)
    out = tmp_path / "out"
    assert cli.main(["sweep", "--peers", "--quick", "--rows", "1,2", "--json", str(out)]) == 1
    assert capsys.readouterr().err == f"python -m perf sweep: failed: {GATHER}\n"
    assert [command[5] for command in commands] == sorted(cli.MODULES)
    for command in commands:
        options = vars(cli.make_parser().parse_args(command[3:]))
        assert (options["peers"], options["quick"], options["variants"], options["rows"]) == (True, True, False, (1, 2))
        assert (options["replays"], options["json"]) == (15, out / f"{command[5]}.json")


@pytest.mark.full
def test_a_reader_that_has_enough_is_no_error() -> None:
    for size in (9, 100_000):  # written at the end, and while the command runs
        shown = f"cli.show_records = lambda options: print('x' * {size})"
        code = f"from perf import cli; {shown}; cli.main(['show', 'engines'])"
        with subprocess.Popen(
            [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            process.stdout.close()
            assert process.stderr.read() == ""


# ---- report ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def root(tmp_path: Path) -> Path:
    markers = report.HEADLINE_BEGIN, report.HEADLINE_END, report.BEGIN, report.END
    (tmp_path / "README.md").write_text("\n".join(("# x", *markers, "")))
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/engines.md").write_text("\n".join(("# y", report.GAIN_BEGIN, report.GAIN_END, "")))
    synthetic.write(tmp_path, record([cell(1, 1616, 1.9, {"vllm-triton": 4.38}), cell(64, 103_424, 2.0)]))
    return tmp_path


def test_report_writes_and_lists_losing_cells(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", "--root", str(root), "--no-plots"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("perf/REPORT.md\nREADME.md\ndocs/engines.md\n")
    assert "over the stated target of 1.80 µs" in printed
    assert "## NVIDIA H200" in (root / "perf/REPORT.md").read_text()
    assert f"`{INSERT}`" in (root / "README.md").read_text()


def test_report_rejects_rows_of_a_reference(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = record([cell(1, 1616, 1.9), cell(64, 103_424, 2.0)])
    data["records"][0]["rows"][0]["implementation"] = "reference"
    synthetic.write(root, data)
    assert cli.main(["report", "--root", str(root), "--no-plots"]) == 1
    expected = f"h200/{INSERT}.json: T=1: cute_kernels ran its reference implementation, not a kernel"
    assert capsys.readouterr().err == f"python -m perf report: rejected: {expected}\n"
    text = (root / "perf/REPORT.md").read_text()
    assert f"* {expected}" in text
    assert "| T=1 |" not in text
    assert "| T=64 |" in text


def test_report_check(root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    before = (root / "README.md").read_text()
    assert cli.main(["report", "--root", str(root), "--check"]) == 1
    assert "README.md is out of date" in capsys.readouterr().out
    assert (root / "README.md").read_text() == before
    assert cli.main(["report", "--root", str(root), "--no-plots"]) == 0
    monkeypatch.setattr(plots, "figures", lambda gpu, records: [])
    assert cli.main(["report", "--root", str(root), "--check"]) == 0


def test_report_without_matplotlib(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plots, "available", lambda: False)
    assert "the plots need matplotlib" in refused(capsys, "report", "--root", str(root))
    assert not (root / "perf/REPORT.md").exists()


def test_report_needs_the_markers(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engines = (root / "docs/engines.md").read_text()
    (root / "README.md").write_text("# x\n")
    assert "README.md: expected one <!-- headline:begin -->" in refused(
        capsys, "report", "--root", str(root), "--no-plots"
    )
    assert not (root / "perf/REPORT.md").exists()
    assert (root / "docs/engines.md").read_text() == engines


# ---- show ------------------------------------------------------------------------------------------------------------


def test_show(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cells = [
        cell("one", 1616, 2.0, {"vllm-triton": 4.0}),
        cell("two", 1616, 2.0, {"vllm-triton": 1.0}),
        cell("three", 1616, 2.0),
    ]
    synthetic.write(tmp_path, record(cells))
    assert cli.main(["show", INSERT, "--root", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "3 of 3 cells, 1.00 times as fast as the best peer in the mean of 2; 1 slower than a peer" in printed
    assert re.search(r"copy 8 GB\W+4275\W+GB/s", printed)
    assert re.search(r"add_ of 64 floats\W+1\.17\W+us", printed)
    assert cli.main(["show", INSERT, "^(one|three)$", "--root", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "2 of 3 cells, 2.00 times as fast as the best peer in the mean of 1; 0 slower than a peer" in printed
    assert "two" not in printed
    assert cli.main(["show", INSERT, "thr", "--root", str(tmp_path)]) == 0
    assert "1 of 3 cells, no peer; 0 slower" in capsys.readouterr().out


def test_without_a_command_it_helps(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    assert "{sweep,layer,engines,report,show,compiled,scaling,parallel,compare}" in capsys.readouterr().out


# ---- compare ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("us", "flags", "status", "regressions"),
    [
        (2.2, [], 0, 1),
        (2.2, ["--fail"], 1, 1),
        (2.2, ["--fail", "--threshold", "11"], 0, 0),
        (2.09, ["--fail"], 0, 0),
        (1.0, ["--fail"], 0, 0),
    ],
)
def test_compare(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], us: float, flags: list[str], status: int, regressions: int
) -> None:
    a = synthetic.write(tmp_path / "a", record([cell(1, 1616, 2.0, {"vllm-triton": 4.0}), cell(2, 1616, 2.0)]))
    b = synthetic.write(tmp_path / "b", record([cell(1, 1616, us, {"vllm-triton": 4.2}), cell(3, 1616, 2.0)]))
    assert cli.main(["compare", str(a), str(b), *flags]) == status
    printed = capsys.readouterr().out
    assert f"{us / 2:.3f}" in printed
    assert "1.050" in printed
    assert f"cells in both: 1; B/A {us / 2:.3f} on average; regressions over" in printed
    assert re.search(rf"%: {regressions}(, the worst {synthetic.GPU} {INSERT} T=1, {us / 2:.3f})?\n$", printed)
    assert (" regression" in printed.split("cells in both")[0]) == bool(regressions)
    assert f"only in A: {synthetic.GPU} {INSERT} T=2" in printed
    assert f"only in B: {synthetic.GPU} {INSERT} T=3" in printed


def test_parsed_types() -> None:
    options: argparse.Namespace = cli.make_parser().parse_args(
        ["sweep", "--op", INSERT, "--op", GATHER, "--rows", "1,2"]
    )
    assert (options.op, options.rows) == ([INSERT, GATHER], (1, 2))
    assert json.dumps(options.rows) == "[1, 2]"
