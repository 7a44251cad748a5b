"""The kernel of everything between the first GEMMs and the scores, compiled for every architecture it claims."""

from __future__ import annotations

import re

import pytest

from cute_kernels.runtime.report import problems

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

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
        waits = 0 if arch == "sm_89" else 4
        assert report.ptx.count("griddepcontrol.wait") == waits
        assert report.ptx.count("griddepcontrol.launch_dependents") == waits


def test_deployments() -> None:
    keys = deployment_keys(MODELS["v4-flash"], 1, "sm_90a")
    assert len(set(keys)) == len(keys) == 8
    assert deployment_keys(MODELS["v4-flash"], 1, "sm_80") == []
