# SPDX-License-Identifier: Apache-2.0
"""The kernels of the RMS norms, compiled for every architecture they claim. Needs CuTe DSL and no GPU."""

from __future__ import annotations

import re

import pytest

from cute_kernels.models import MODELS
from cute_kernels.runtime.compile import Report
from cute_kernels.runtime.report import problems

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from cute_kernels.norm import rms
from cute_kernels.norm.rms import RmsNormKey, Row, warps_for
from tests.compile.reports import compile_report

ARCHS = ("sm_90a", "sm_100a", "sm_103a", "sm_80", "sm_120a")


def check(report: Report) -> None:
    assert problems(report.key, report) == []
    assert report.stack == 0
    assert f".target {report.key.arch}" in report.ptx
    assert not re.search(r"\bdiv\.|\brem\.|st\.local|ld\.local|\.ftz", report.ptx)


@pytest.mark.parametrize(("arch", "model"), [*((arch, "v4-pro") for arch in ARCHS), ("sm_90a", "v4-flash")])
def test_deployed_kernels_compile(arch: str, model: str) -> None:
    for kernel in (rms.Q_KV, rms.MTP_INPUT, rms.SHARED_HEAD):
        (key,) = kernel.deployment_keys(MODELS[model], 1, arch)
        report = compile_report(key)
        check(report)
        assert f".reqntid {32 * key.warps}" in report.ptx
        vectors = sum(-(-width // (256 * (key.warps if warps_for(width) > 1 else 1))) for width in key.widths)
        assert len(re.findall(r"ld\.relaxed\.cta\.global\.v4\.b32", report.ptx)) == 2 * vectors
        assert len(re.findall(r"st\.global\.v4\.b32", report.ptx)) == vectors
        # registers for at least 40 KB in flight on an SM: all of a row is loaded at once
        blocks = 65536 // (report.registers * 32 * key.warps)
        assert blocks * key.warps * 32 * 16 * -(-vectors // len(key.widths)) >= 40_000
        assert ("griddepcontrol.wait" in report.ptx) == (arch != "sm_80")
        assert ("griddepcontrol.launch_dependents" in report.ptx) == (arch != "sm_80")


@pytest.mark.parametrize(
    "key",
    [
        RmsNormKey("sm_90a", 8, True),
        RmsNormKey("sm_90a", 2056, False),
        RmsNormKey("sm_90a", 16384, True),
        RmsNormKey("sm_90a", 24, True, 4096, True),
        RmsNormKey("sm_90a", 3000, False, 12288, True),
        RmsNormKey("sm_90a", 5120, True, 5120, False, "int32"),
    ],
    ids=str,
)
def test_other_widths_and_weights(key: RmsNormKey) -> None:
    check(compile_report(key))


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a", "sm_103a"])
def test_row_and_weights_are_on_their_way_before_any_of_them_is_used(arch: str) -> None:
    report = compile_report(RmsNormKey(arch, 7168, False))
    if report.sass is None:
        pytest.skip("nvdisasm is not installed (package nvidia-cuda-nvdisasm)")
    code = [line for line in report.sass.splitlines() if ";" in line]
    loads = [i for i, line in enumerate(code) if re.search(r"\bLDG\.E\.128", line)]
    assert len(loads) * 128 * RmsNormKey(arch, 7168, False).warps == 7168
    assert max(loads) < min(i for i, line in enumerate(code) if re.search(r"\bFFMA|\bFMUL|\bSHFL|\bSTG", line))


@pytest.mark.parametrize("width", [8, 24, 256, 264, 1024, 2048, 2056, 3000, 4096, 5000, 7168, 32768])
def test_lanes_cover_a_row_once(width: int) -> None:
    warps = max(4, warps_for(width))
    row = Row(width, False, warps, True)
    assert row.rows * row.warps == warps
    covered = []
    for i in range(row.vectors):
        for lane in range(row.step):
            inside = row.is_inside(lane, i)
            if inside is None or inside:
                covered += range((lane + i * row.step) * 8, (lane + i * row.step) * 8 + 8)
    assert sorted(covered) == list(range(width))
