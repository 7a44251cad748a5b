# SPDX-License-Identifier: Apache-2.0
"""The kernels of everything between the first GEMMs and the scores or attention, compiled for every architecture they
claim."""

from __future__ import annotations

import re

import pytest

from cute_kernels.runtime.report import problems

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from cute_kernels.insert_compress import insert_compress
from cute_kernels.insert_compress.insert_compress_index import deployment_keys, keys_of
from cute_kernels.models import MODELS
from tests.compile.reports import compile_report


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a", "sm_103a", "sm_89", "sm_120a"])
def test_compiles(arch: str) -> None:
    # all of them, for every architecture, are among those of test_deployments.py
    for key in keys_of(arch)[:2]:
        report = compile_report(key)
        assert problems(key, report) == []
        assert (report.stack, report.spill_stores, report.spill_loads) == (0, 0, 0)
        # four blocks of four warps fit a multiprocessor; on those of sm_89 and sm_120a three
        assert report.registers <= (168 if arch in ("sm_89", "sm_120a") else 128)
        assert report.smem <= 25 * 1024
        assert not re.search(r"st\.local|ld\.local", report.ptx)
        # every kind of block waits for the kernel ahead, and lets the next one start
        # (queries and keys are one kind that waits in three places)
        starts = 0 if arch == "sm_89" else 4
        assert report.ptx.count("griddepcontrol.wait") == (starts and starts + 2)
        assert report.ptx.count("griddepcontrol.launch_dependents") == starts


def test_deployments() -> None:
    keys = deployment_keys(MODELS["v4-flash"], 1, "sm_90a")
    assert len(set(keys)) == len(keys) == 8
    assert len(deployment_keys(MODELS["v4-flash"], 1, "sm_80")) == len(keys)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a", "sm_103a"])
def test_ratio_128_compiles(arch: str) -> None:
    for key in insert_compress.keys_of(arch):
        report = compile_report(key)
        assert problems(key, report) == []
        assert (report.stack, report.spill_stores, report.spill_loads) == (0, 0, 0)
        # five CTAs of four warps fit one of Hopper's multiprocessors, four Blackwell's
        assert report.registers <= (96 if arch == "sm_90a" else 128)
        assert report.smem <= 9 * 1024
        assert not re.search(r"st\.local|ld\.local", report.ptx)
        # entries, queries and keys: each waits, and lets the next kernel start before that
        starts = [match.start() for match in re.finditer(r"griddepcontrol\.launch_dependents", report.ptx)]
        waits = [match.start() for match in re.finditer(r"griddepcontrol\.wait", report.ptx)]
        # keys wait in two places
        assert (len(starts), len(waits)) == (2, 4)
        assert "barrier.cluster" in report.ptx


def test_ratio_128_reads_the_step_before_it_waits() -> None:
    """Angles of queries and keys are loaded ahead of the wait, and their rows behind it."""
    sass = compile_report(insert_compress.keys_of("sm_90a")[0]).sass
    if sass is None:
        pytest.skip("nvdisasm is not installed")
    order = re.findall(r"ACQBULK|LDG\.E(?:\.NA)?\.(?:128|64)|EXIT", sass)
    waits = [i for i, word in enumerate(order) if word == "ACQBULK"]
    assert len(waits) == 4
    # that of the entries comes first; that of keys which are not there has no loads behind it
    loads = [i for i in waits[1:] if order[i + 1] != "EXIT"]
    assert len(loads) == 2
    for i in loads:
        assert order[i - 2 : i] == ["LDG.E.128"] * 2
        assert [word.replace(".NA", "") for word in order[i + 1 : i + 3]] == ["LDG.E.128"] * 2


def test_ratio_128_deployments() -> None:
    keys = insert_compress.deployment_keys(MODELS["v4-flash"], 1, "sm_90a")
    assert len(set(keys)) == len(keys) == 2
    assert insert_compress.deployment_keys(MODELS["v4-flash"], 1, "sm_89") == []
