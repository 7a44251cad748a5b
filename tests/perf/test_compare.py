# SPDX-License-Identifier: Apache-2.0
"""How records of two runs are compared."""

from __future__ import annotations

from pathlib import Path

import pytest

from perf.compare import Change, Comparison, compare
from perf.records import RecordError
from tests.perf import synthetic
from tests.perf.synthetic import cell, record

GATHER = "dequantize_and_gather_k_cache"


@pytest.fixture
def before(tmp_path: Path) -> Path:
    root = tmp_path / "before"
    synthetic.write(root, record([cell(1, 1616, 2.0, {"a": 4.0, "b": 4.0}), cell(64, 103_424, 2.0), cell(9, 99, 2.0)]))
    synthetic.write(root, record([cell("c4", 10**6, 10.0, op=GATHER)], op=GATHER))
    return root


@pytest.fixture
def after(tmp_path: Path) -> Path:
    root = tmp_path / "after"
    cells = [cell(1, 1616, 2.3, {"a": 4.4, "b": 4.0}), cell(64, 103_424, 1.5), cell(77, 99, 2.0)]
    synthetic.write(root, record(cells))
    synthetic.write(root, record([cell("c4", 10**6, 10.4, op=GATHER)], op=GATHER))
    return root


def ratios(found: Comparison) -> dict[str, float]:
    return {change.key[2]: round(change.ratio, 3) for change in found.changes}


def test_folders(before: Path, after: Path) -> None:
    found = compare(before, after)
    assert ratios(found) == {"c4": 1.04, "T=1": 1.15, "T=64": 0.75}
    controls = {change.key[2]: change.control for change in found.changes}
    assert controls["T=1"] == pytest.approx((4.4 / 4.0) ** 0.5)
    assert controls["T=64"] is None
    assert [key[2] for key in found.only_before] == ["T=9"]
    assert [key[2] for key in found.only_after] == ["T=77"]
    assert [change.key[2] for change in found.regressions(0.05)] == ["T=1"]
    assert [change.key[2] for change in found.regressions(0.03)] == ["T=1", "c4"]
    assert found.regressions(0.16) == []


def test_files(before: Path, after: Path) -> None:
    name = f"perf/results/h200/{GATHER}.json"
    assert ratios(compare(before / name, after / name)) == {"c4": 1.04}
    assert ratios(compare(before / name, after)) == {"c4": 1.04}


def test_another_gpu_is_another_cell(tmp_path: Path, before: Path) -> None:
    other = synthetic.write(tmp_path, record([cell(1, 1616, 2.0)], gpu="NVIDIA B200"))
    with pytest.raises(RecordError, match="have no cell in common"):
        compare(before, other)


def test_rows_of_a_reference_are_not_compared(tmp_path: Path, before: Path) -> None:
    cells = [cell(1, 1616, 2.0), cell(64, 103_424, 1.5)]
    cells[0]["rows"][0]["implementation"] = "reference"
    found = compare(before, synthetic.write(tmp_path, record(cells)))
    assert ratios(found) == {"T=64": 0.75}
    assert len(found.rejected) == 1
    assert "T=1: cute_kernels ran its reference implementation" in found.rejected[0]


def test_a_cell_in_two_files_of_a_folder(before: Path) -> None:
    synthetic.write(before, record([cell(1, 1616, 2.0)]), "h200/again.json")
    with pytest.raises(RecordError, match="T=1 stands in another file"):
        compare(before, before)


def test_unreadable(tmp_path: Path, before: Path) -> None:
    with pytest.raises(RecordError, match="no such file or folder"):
        compare(before, tmp_path / "nowhere")
    bad = tmp_path / "bad.json"
    bad.write_text("{}")
    with pytest.raises(RecordError, match=r"bad.json: schema"):
        compare(before, bad)


def test_a_time_at_the_threshold_has_not_regressed() -> None:
    change = Change(("gpu", "op", "case"), before=2.0, after=3.0, control=None)
    assert not change.regressed(0.5)
    assert change.regressed(0.49)
