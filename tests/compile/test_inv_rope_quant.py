# SPDX-License-Identifier: Apache-2.0
"""The kernels of fused_inv_rope_fp8_quant, compiled for every architecture they claim. Needs CuTe DSL and no GPU."""

from __future__ import annotations

import pytest

from cute_kernels.models import MODELS

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from cute_kernels.output.inv_rope import EARLY_TOKENS, FEW_ROWS, MANY_ROWS, QUANTIZED, ROTATED, InvRopeKey, key_for
from tests.compile.questions import parts
from tests.compile.reports import compile_report


@pytest.mark.parametrize(("arch", "scales"), [("sm_90a", "fp32"), ("sm_90a", "none"), ("sm_100a", "packed")])
def test_all_heads_are_on_their_way_before_one_is_used(arch: str, scales: str) -> None:
    report = compile_report(InvRopeKey(arch, scales, heads=4))
    if report.in_sass is None:
        pytest.skip("nvdisasm is not installed (package nvidia-cuda-nvdisasm)")
    sass = report.in_sass
    loads = sass.places(r"\bLDG\.E\.128")
    assert len(loads) == 2 * 4 + 2
    assert max(loads) < sass.first_place(r"\bSHFL|\bSTG|\bFMUL|\bFSETP")


@pytest.mark.parametrize("scales", ["none", "fp32", "packed"])
@pytest.mark.parametrize("tokens", [1, EARLY_TOKENS + 1])
def test_few_rows_do_not_wait_for_the_position(scales: str, tokens: int) -> None:
    """They are under way when it is loaded, so that nothing can wait for it ahead of them."""
    report = compile_report(key_for("sm_90a", scales, FEW_ROWS, tokens))
    if report.in_sass is None:
        pytest.skip("nvdisasm is not installed (package nvidia-cuda-nvdisasm)")
    loads = report.in_sass.places(r"\bLDG\.E\.128")
    (position,) = report.in_sass.places(r"\bLDG\.E\.64")
    assert [load < position for load in loads] == [True, True, False, False]  # a row's two, then the table's


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_late_kernels_load_before_the_next_one_may_start(arch: str) -> None:
    """And others after it: none loads before its own wait."""
    for late, loads in ((False, [0, 0, 4]), (True, [0, 4, 0])):
        ptx = compile_report(InvRopeKey(arch, "fp32", 1, True, late)).in_ptx
        of_parts = ptx.ask(parts, r"griddepcontrol\.(?:wait|launch_dependents)", r"ld\.relaxed\.cta\.global\.v4\.b32")
        assert [len(part) for part in of_parts] == loads
        order = ptx.findall(r"griddepcontrol\.(?:wait|launch_dependents)")
        assert order == sorted(("griddepcontrol.launch_dependents", "griddepcontrol.wait"), reverse=late)


def test_every_kernel_that_a_call_can_need_is_deployed() -> None:
    config = MODELS["v4-flash"]
    for arch in ("sm_90a", "sm_100a"):
        keys = QUANTIZED.deployment_keys(config, 1, arch) + ROTATED.deployment_keys(config, 1, arch)
        needed = {
            key_for(arch, s, rows, tokens)
            for s in ("fp32", "packed", "none")
            for rows in (1, FEW_ROWS, FEW_ROWS + 1, MANY_ROWS, 2**30)
            for tokens in (1, EARLY_TOKENS, EARLY_TOKENS + 1)
            if tokens <= rows
        }
        assert set(keys) == needed
        assert len(keys) == len(needed)
    assert len(QUANTIZED.deployment_keys(config, 1, "sm_80")) == len(QUANTIZED.deployment_keys(config, 1, "sm_89"))
    assert len(ROTATED.deployment_keys(config, 1, "sm_80")) == 3
