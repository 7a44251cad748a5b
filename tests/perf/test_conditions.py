# SPDX-License-Identifier: Apache-2.0
"""What a record says of the GPU's clocks."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from perf import conditions
from perf.records import RecordError, parse
from tests.perf.synthetic import cell, record

LINES = """1980, 2619, 124.97, 42
1830, 2619, 699.50, 61
[N/A], 2619, 125.00, 42
1905, 2619, 400.25, 55
19"""


def test_a_summary_leaves_out_what_is_no_sample() -> None:
    found = conditions.summary(LINES)
    assert found == {
        "samples": 3,
        "sm_mhz": [1830, 1905, 1980],
        "memory_mhz": [2619, 2619, 2619],
        "power_w": [124.97, 400.25, 699.5],
        "celsius": [42, 55, 61],
    }
    assert conditions.summary("No devices were found\n") == {}
    read = parse(record([cell(1, 1616, 1.7)], conditions=found)).conditions
    assert read is not None
    assert (read.samples, read.sm_mhz, read.celsius) == (3, (1830, 1905, 1980), (42, 55, 61))


def test_a_machine_without_nvidia_smi_says_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with conditions.watch() as found:
        pass
    assert found == {}
    assert parse(record([cell(1, 1616, 1.7)], conditions=found)).conditions is None


def test_the_watcher_ends_with_the_block(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    told = tmp_path / "nvidia-smi"
    told.write_text("#!/bin/sh\necho '1980, 2619, 124.97, 42'\nexec sleep 60\n")
    told.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with conditions.watch() as found:
        time.sleep(0.5)
    assert found["samples"] == 1


@pytest.mark.parametrize(("visible", "asked"), [(None, "0"), ("", "0"), ("1", "1"), ("GPU-8f, 0", "GPU-8f")])
def test_the_gpu_that_measures_is_watched(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, visible: str | None, asked: str
) -> None:
    told = tmp_path / "nvidia-smi"
    told.write_text(f'#!/bin/sh\necho "$*" > {tmp_path}/arguments\nexec sleep 60\n')
    told.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with conditions.watch():
        time.sleep(0.5)
    assert f"-i {asked} " in (tmp_path / "arguments").read_text()


def test_a_record_whose_samples_are_not_in_order_is_refused() -> None:
    found = {**conditions.summary(LINES), "power_w": [3, 2, 1]}
    with pytest.raises(RecordError, match="power_w: expected least, median and largest"):
        parse(record([cell(1, 1616, 1.7)], conditions=found))
