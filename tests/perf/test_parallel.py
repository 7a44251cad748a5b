# SPDX-License-Identifier: Apache-2.0
"""`perf parallel`: its cells, and the steps of ranks that are threads on a CPU; no GPU."""

from __future__ import annotations

import pytest
import torch

from cute_kernels.layers import Communicator
from perf import layer, parallel
from perf.cli import main
from perf.parallel import Cell
from tests.layers.engine import CONFIG
from tests.layers.ranks import run_threads


def test_cells() -> None:
    names = [cell.name for cell in parallel.cells(2)]
    assert len(set(names)) == len(names)
    assert {cell.form for cell in parallel.cells(2)} == set(parallel.FORMS)
    assert [cell.name for cell in parallel.cells(2, "prefill c128a.* pcp")] == [
        "prefill c128a ctx262144 8192 pcp", "prefill c128a ctx262144 8192 pcp sharded",
    ]  # fmt: skip
    # requests are divided evenly, and those of one rank are never scored by several
    assert not [cell for cell in parallel.cells(3) if cell.form == "dp"]
    scored = {(cell.kind, cell.rows) for cell in parallel.cells(2) if cell.form == "tp rows"}
    assert scored == {("c4a", 8), ("c4a", 64), ("c4a", 8192)}
    assert Cell("decode", "c4a", 262144, 8, "dp").case(4).requests == 2
    assert Cell("decode", "c4a", 262144, 8, "tp").case(4).requests == 8


def _step(communicator: Communicator, cell: Cell) -> torch.Tensor:
    return parallel.make_step(cell, communicator).run(0)


@pytest.mark.parametrize("form", parallel.FORMS)
def test_ranks_run_steps(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (layer, parallel):
        monkeypatch.setattr(module, "DEVICE", "cpu")
    monkeypatch.setattr(layer, "PRESETS", {parallel.MODEL: CONFIG})
    phase, rows = ("prefill", 600) if form in parallel.PREFILLS[-2:] else ("decode", 4)
    results = run_threads(2, _step, Cell(phase, "c4a", 900, rows, form))
    for result in results:
        if isinstance(result, BaseException):
            raise result
        assert torch.isfinite(result).all()
    wanted = {"dp": 2, "pcp": 300, "pcp sharded": 300}.get(form, rows)
    assert abs(len(results[0]) - wanted) < 128
    assert len(results[0]) == wanted or phase == "prefill"
    if parallel.FORMS[form].tp is not None:
        assert torch.equal(*results)


def _compared(communicator: Communicator, form: str, other: bool) -> bool | None:
    own = torch.arange(6.0).view(2, 3)
    own[1, 2] += other * communicator.rank
    return parallel.has_same_bits(form, own, communicator)


@pytest.mark.parametrize("form", parallel.FORMS)
def test_bits_are_compared_where_ranks_share_a_result(form: str) -> None:
    compares = "tp" in form or "dcp" in form
    for other in (False, True):
        wanted = not other if compares else None
        assert run_threads(3, _compared, form, other) == [wanted] * 3


def test_other_bits_are_an_error_and_none_are_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = {"one": None, "tp": True}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(
        parallel,
        "measure",
        lambda *_: {"cells": [{"form": form, "same_bits": same} for form, same in found.items()]},
    )
    assert main(["parallel"]) == 0
    found["dcp"] = False
    assert main(["parallel"]) == 1
    assert "ranks have other bits in dcp\n" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_refusals(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in (
        ([], "there is no CUDA device here: nothing was measured"),
        (["--only", "nothing"], "--only: no cell's name has 'nothing'"),
        (["--only", "("], "is no regular expression"),
        (["--replays", "1"], "--replays: expected at least 15, got 1"),
    ):
        assert main(["parallel", *arguments]) == 2
        assert message in capsys.readouterr().err
