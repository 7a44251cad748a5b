# SPDX-License-Identifier: Apache-2.0
"""The kernels of the RMS norms, compiled for every architecture they claim. Needs CuTe DSL and no GPU."""

from __future__ import annotations

import pytest

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from cute_kernels.norm.rms import RmsNormKey, Row, warps_for
from tests.compile.reports import compile_report


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a", "sm_103a"])
def test_row_and_weights_are_on_their_way_before_any_of_them_is_used(arch: str) -> None:
    report = compile_report(RmsNormKey(arch, 7168, False))
    if report.in_sass is None:
        pytest.skip("nvdisasm is not installed (package nvidia-cuda-nvdisasm)")
    sass = report.in_sass
    loads = sass.places(r"\bLDG\.E\.128")
    assert len(loads) * 128 * RmsNormKey(arch, 7168, False).warps == 7168
    assert max(loads) < sass.first_place(r"\bFFMA|\bFMUL|\bSHFL|\bSTG")


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
