# SPDX-License-Identifier: Apache-2.0
"""The kernels that merge parts of an attention, compiled for every architecture they claim. Needs CuTe DSL, no GPU."""

from __future__ import annotations

import pytest

from cute_kernels.models import MODELS

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from cute_kernels.sparse_mla import combine
from cute_kernels.sparse_mla.combine import CombineKey, key_for
from tests.compile.reports import compile_report
from tests.compile.sampling import of_run

COUNTS = (1, 4, 5, 8, 9, 16, 17, 1000)
"""Parts, around those that another kernel is for."""


def key_facts(key: CombineKey) -> tuple[int, int]:
    """(loads of a thread's first parts, threads of a head)"""
    return key.held * key.vectors, 512 // ((4 if key.fp32_parts else 8) * key.vectors)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a", "sm_103a"])
def test_all_loads_are_on_their_way_before_any_of_them_is_used(arch: str, pytestconfig: pytest.Config) -> None:
    keys = of_run(list(combine.deployment_keys(MODELS["v4-flash"], 1, arch)), pytestconfig)
    # of one source: what differs on Blackwell is the assembler's work alone
    for key in keys if arch == "sm_90a" else (keys[0], keys[-1]):
        report = compile_report(key)
        if report.in_sass is None:
            pytest.skip("nvdisasm is not installed (package nvidia-cuda-nvdisasm)")
        sass = report.in_sass
        loads = sass.places(r"\bLDG\.E\.\S*128")
        used = sass.places(r"\bFFMA|\bSHFL|\bSTG")
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
