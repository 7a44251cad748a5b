# SPDX-License-Identifier: Apache-2.0
"""The kernels that merge parts of an attention, compiled for every architecture they claim. Needs CuTe DSL, no GPU."""

from __future__ import annotations

import re

import pytest

from cute_kernels.models import MODELS
from cute_kernels.runtime.compile import Report
from cute_kernels.runtime.report import problems

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from cute_kernels.sparse_mla import combine
from cute_kernels.sparse_mla.combine import CombineKey, key_for
from tests.compile.reports import compile_report

ARCHS = ("sm_90a", "sm_100a", "sm_103a", "sm_80", "sm_120a")
COUNTS = (1, 4, 5, 8, 9, 16, 17, 1000)
"""Parts, around those that another kernel is for."""


def check(report: Report) -> None:
    assert problems(report.key, report) == []
    assert report.stack == 0
    assert f".target {report.key.arch}" in report.ptx
    assert not re.search(r"\bdiv\.|\brem\.|st\.local|ld\.local", report.ptx)


def key_facts(key: CombineKey) -> tuple[int, int]:
    """(loads of a thread's first parts, threads of a head)"""
    return key.held * key.vectors, 512 // ((4 if key.fp32_parts else 8) * key.vectors)


@pytest.mark.parametrize("arch", ARCHS)
def test_deployed_kernels_compile(arch: str) -> None:
    for key in combine.deployment_keys(MODELS["v4-flash"], 1, arch):
        report = compile_report(key)
        check(report)
        loads, _ = key_facts(key)
        assert len(re.findall(r"ld\.relaxed\.gpu\.global\.\S*v4\.b32", report.ptx)) == loads * (1 + key.more)
        assert f".reqntid {32 * key.warps}" in report.ptx
        # registers for at least 48 KB in flight on an SM
        warps = 65536 // (report.registers * 32)
        assert warps * 32 * 16 * loads >= 48_000
        assert ("griddepcontrol.wait" in report.ptx) == (arch != "sm_80")
        assert ("griddepcontrol.launch_dependents" in report.ptx) == (arch != "sm_80")


@pytest.mark.parametrize("fp32_out", [False, True])
def test_bf16_parts(fp32_out: bool) -> None:
    for parts in COUNTS:
        check(compile_report(key_for("sm_90a", False, fp32_out, parts)))


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a", "sm_103a"])
def test_all_loads_are_on_their_way_before_any_of_them_is_used(arch: str) -> None:
    for key in combine.deployment_keys(MODELS["v4-flash"], 1, arch):
        report = compile_report(key)
        if report.sass is None:
            pytest.skip("nvdisasm is not installed (package nvidia-cuda-nvdisasm)")
        code = [line for line in report.sass.splitlines() if ";" in line]
        loads = [i for i, line in enumerate(code) if re.search(r"\bLDG\.E\.\S*128", line)]
        used = [i for i, line in enumerate(code) if re.search(r"\bFFMA|\bSHFL|\bSTG", line)]
        count, _ = key_facts(key)
        assert loads[count - 1] < min(used)
        assert len(loads) == count * (1 + key.more)


def test_every_number_of_parts_has_its_kernel() -> None:
    keys = set(combine.deployment_keys(None, 1, "sm_90a"))
    for fp32_out in (False, True):
        for parts in range(1, 200):
            key = key_for("sm_90a", True, fp32_out, parts)
            assert key in keys
            assert key.more == (parts > key.held)
    for quantized in (False, True):
        some = {key for key in keys if not key.fp32_out and key.quantized == quantized}
        assert {key_for("sm_90a", True, False, parts, quantized) for parts in COUNTS} == some


def test_a_head_has_whole_warps_and_a_block_whole_heads() -> None:
    for fp32_parts in (False, True):
        for parts in COUNTS:
            key = key_for("sm_90a", fp32_parts, False, parts)
            _, threads = key_facts(key)
            assert threads % 32 == 0
            assert key.warps * 32 % threads == 0
            assert key.held & (key.held - 1) == 0
