# SPDX-License-Identifier: Apache-2.0
"""The kernels of fp8_gemm and bf16_gemm for few tokens, compiled for Hopper. Needs CuTe DSL, no GPU."""

from __future__ import annotations

import re

import pytest

from cute_kernels.models import MODELS
from cute_kernels.runtime.arch import SMEM_BYTES

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from cute_kernels.linear import launch as calls
from cute_kernels.linear.hopper.gemm_swap_ab import SwapAbKey
from tests.compile.reports import compile_report

KEYS = list(
    dict.fromkeys(
        key
        for kernel in (calls.FP8_GEMM, calls.BF16_GEMM)
        for model, tp in (("v4-flash", 1), ("v4-pro", 1), ("v4-flash", 8))
        for key in kernel.deployment_keys(MODELS[model], tp, "sm_90a")
        if isinstance(key, SwapAbKey)
    )
)


@pytest.mark.parametrize("key", KEYS, ids=str)
def test_compiles(key: SwapAbKey) -> None:
    report = compile_report(key)
    assert (report.spill_stores, report.spill_loads, report.stack) == (0, 0, 0)
    assert report.smem <= SMEM_BYTES[key.arch]
    assert report.smem == key.smem_bytes
    assert set(key.instructions) <= set(report.instructions)
    assert not re.search(r"st\.local|ld\.local", report.ptx)
    # weights are asked for before the kernel ahead has ended, tokens and scales behind it
    first_copy, wait = report.ptx.index("cp.async.bulk.tensor"), report.ptx.index("griddepcontrol.wait")
    assert report.ptx.index("griddepcontrol.launch_dependents") < first_copy < wait
    if key.ctas_per_multiprocessor == 2:
        # two CTAs of ten warps fit into a multiprocessor
        assert report.registers <= 96
        assert 2 * (report.smem + 1024) <= 228 * 1024
    if report.sass is not None:
        # the assembler waits for products only where the kernel says so
        products = re.findall(r"[QH]GMMA|WARPGROUP\.DEPBAR", report.sass)
        depth = 2 if key.operands == "e4m3" else 4
        assert products.count("WARPGROUP.DEPBAR") == depth + 1
