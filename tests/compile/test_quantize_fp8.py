# SPDX-License-Identifier: Apache-2.0
"""The kernel of quantize_fp8_1x128, compiled for every architecture it claims. Needs CuTe DSL and no GPU."""

from __future__ import annotations

import re

import pytest

from cute_kernels.models import MODELS
from cute_kernels.support import KERNEL_ARCHS

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from cute_kernels.linear import quantize
from tests.compile.reports import check_fits


@pytest.mark.parametrize("arch", KERNEL_ARCHS["quantize_fp8_1x128"])
def test_deployed_kernel_compiles(arch: str) -> None:
    (key,) = quantize.deployment_keys(MODELS["v4-pro"], 1, arch)
    threads = 32 * quantize.TOKENS
    report = check_fits(key, threads)
    assert f".reqntid {threads}" in report.ptx
    assert not re.search(r"\bdiv\.|\brem\.|\.ftz", report.ptx)
    assert len(re.findall(r"ld\.relaxed\.cta\.global\.v4\.b32", report.ptx)) == quantize.VECTORS
    has_dependency = arch not in ("sm_80", "sm_89")
    assert report.ptx.count("griddepcontrol.wait") == has_dependency
    assert report.ptx.count("griddepcontrol.launch_dependents") == has_dependency
    assert report.smem == key.smem_bytes == 4 * 4 * quantize.TOKENS
    # six CTAs and more: 48 KB of loads in flight on an SM
    assert report.registers <= 40
