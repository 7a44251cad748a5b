# SPDX-License-Identifier: Apache-2.0
"""The kernels of fused_q_kv_rmsnorm_quant, compiled for every architecture they claim. Needs CuTe DSL and no GPU."""

from __future__ import annotations

import re

import pytest

from cute_kernels.models import MODELS
from cute_kernels.support import KERNEL_ARCHS

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from cute_kernels.norm import q_kv_quant
from cute_kernels.norm.q_kv_quant import NormQuantKey
from tests.compile.reports import check_fits

ARCHS = KERNEL_ARCHS["fused_q_kv_rmsnorm_quant"]


@pytest.mark.parametrize(("arch", "model"), [*((arch, "v4-pro") for arch in ARCHS), ("sm_90a", "v4-flash")])
def test_deployed_kernels_compile(arch: str, model: str) -> None:
    keys = q_kv_quant.deployment_keys(MODELS[model], 1, arch)
    assert [key.spread for key in keys] == [True, False]
    for key in keys:
        report = check_fits(key, 32 * key.warps)
        assert f".reqntid {32 * key.warps}" in report.ptx
        assert report.smem == key.smem_bytes
        assert not re.search(r"\bdiv\.|\brem\.|\.ftz", report.ptx)
        # of both rows: vectors of a lane and their weights, all bf16
        vectors = [1, 1] if key.spread else [-(-width // 256) for width in (key.width, key.kv_width)]
        assert len(re.findall(r"ld\.relaxed\.cta\.global\.v4\.b32", report.ptx)) == 2 * sum(vectors)
        assert len(re.findall(r"st\.global\.v4\.b32", report.ptx)) == vectors[1]
        assert len(re.findall(r"st\.global\.v2\.b32", report.ptx)) == vectors[0]
        # weights are asked for before the wait, rows behind it
        has_dependency = arch not in ("sm_80", "sm_89")
        waits = (2 if key.spread else 1) * has_dependency
        assert report.ptx.count("griddepcontrol.wait") == waits
        assert report.ptx.count("griddepcontrol.launch_dependents") == waits
        if has_dependency:
            before = report.ptx.split("griddepcontrol.wait")[0]
            loads = len(re.findall(r"ld\.relaxed\.cta\.global\.v4\.b32", before))
            assert loads == (1 if key.spread else sum(vectors))
        if not key.spread:
            # registers for at least 64 KB in flight on an SM: all of both rows is loaded at once
            ctas = 65536 // (report.registers * 32 * key.warps)
            assert ctas * key.warps * 32 * 16 * sum(vectors) >= 64_000


@pytest.mark.parametrize(
    "key",
    [
        NormQuantKey("sm_90a", 8, True, 2048, True, True, True),
        NormQuantKey("sm_90a", 8, True, 2048, True, True, False),
        NormQuantKey("sm_90a", 2048, True, 24, False, True, False),
        NormQuantKey("sm_90a", 200, False, 512, True, False, True),
        NormQuantKey("sm_90a", 1032, False, 512, True, False, False),
    ],
    ids=str,
)
def test_other_widths_and_weights(key: NormQuantKey) -> None:
    check_fits(key, 32 * key.warps)
