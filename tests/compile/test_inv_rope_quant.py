# SPDX-License-Identifier: Apache-2.0
"""The kernels of fused_inv_rope_fp8_quant, compiled for every architecture they claim. Needs CuTe DSL and no GPU."""

from __future__ import annotations

import re

import pytest

from cute_kernels.models import MODELS
from cute_kernels.runtime.compile import Report
from cute_kernels.runtime.report import problems

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from cute_kernels.output.inv_rope import FEW_ROWS, MANY_ROWS, QUANTIZED, ROTATED, InvRopeKey, key_for
from tests.compile.reports import compile_report

ARCHS = ("sm_90a", "sm_100a", "sm_103a", "sm_89", "sm_120a")


def check(report: Report) -> None:
    assert problems(report.key, report) == []
    assert report.stack == 0
    assert f".target {report.key.arch}" in report.ptx
    assert not re.search(r"\bdiv\.|\brem\.|st\.local|ld\.local|\.ftz", report.ptx)


CASES = [(arch, scales, rows) for arch in ARCHS[:3] for scales in ("fp32", "packed", "none") for rows in (1, MANY_ROWS)]
CASES += [("sm_90a", "fp32", FEW_ROWS + 1), ("sm_89", "fp32", 1), ("sm_120a", "packed", MANY_ROWS)]


@pytest.mark.parametrize(("arch", "scales", "rows"), CASES)
def test_compiles(arch: str, scales: str, rows: int) -> None:
    key = key_for(arch, scales, rows)
    report = compile_report(key)
    check(report)
    # 48 KB and more in flight on an SM
    assert 65536 // (report.registers * 32) * key.heads * 1024 >= 48 * 1024
    ptx, heads = report.ptx, key.heads
    assert len(re.findall(r"ld\.relaxed\.cta\.global\.v4\.b32", ptx)) == 2 * heads + 2
    # a rotation is two products and a sum, each rounded by itself
    assert len(re.findall(r"\bmul\.rn\.f32", ptx)) == 16 * heads
    assert len(re.findall(r"\b(?:add|sub)\.rn\.f32", ptx)) == 8 * heads
    assert "fma" not in ptx
    if scales == "none":
        assert len(re.findall(r"st\.global\.v4\.b32", ptx)) == 2 * heads
        assert report.smem == 0
    else:
        assert len(re.findall(r"cvt\.rn\.satfinite\.e4m3x2\.(?:f32|bf16x2)", ptx)) == 8 * heads
        assert len(re.findall(r"st\.global\.v2\.b32", ptx)) == 2 * heads
        assert report.smem == 8 * 4 * key.words
    assert ("griddepcontrol.wait" in ptx) == ("griddepcontrol.launch_dependents" in ptx) == (arch != "sm_89")


@pytest.mark.parametrize(("arch", "scales"), [("sm_90a", "fp32"), ("sm_90a", "none"), ("sm_100a", "packed")])
def test_all_heads_are_on_their_way_before_one_is_used(arch: str, scales: str) -> None:
    report = compile_report(InvRopeKey(arch, scales, heads=4))
    if report.sass is None:
        pytest.skip("nvdisasm is not installed (package nvidia-cuda-nvdisasm)")
    code = [line for line in report.sass.splitlines() if ";" in line]
    loads = [i for i, line in enumerate(code) if re.search(r"\bLDG\.E\.128", line)]
    assert len(loads) == 2 * 4 + 2
    assert max(loads) < min(i for i, line in enumerate(code) if re.search(r"\bSHFL|\bSTG|\bFMUL|\bFSETP", line))


def test_every_kernel_that_a_call_can_need_is_deployed() -> None:
    config = MODELS["v4-flash"]
    for arch in ("sm_90a", "sm_100a"):
        keys = QUANTIZED.deployment_keys(config, 1, arch) + ROTATED.deployment_keys(config, 1, arch)
        needed = {
            key_for(arch, s, rows) for s in ("fp32", "packed", "none") for rows in (1, FEW_ROWS + 1, MANY_ROWS, 2**30)
        }
        assert set(keys) == needed
        assert len(keys) == len(needed)
    assert len(QUANTIZED.deployment_keys(config, 1, "sm_80")) == len(QUANTIZED.deployment_keys(config, 1, "sm_89"))
    assert len(ROTATED.deployment_keys(config, 1, "sm_80")) == 3


def test_without_quantization_on_old_architectures() -> None:
    for key in ROTATED.deployment_keys(MODELS["v4-pro"], 1, "sm_80"):
        report = compile_report(key)
        check(report)
        assert "griddepcontrol" not in report.ptx
