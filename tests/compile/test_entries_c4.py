# SPDX-License-Identifier: Apache-2.0
"""The kernels of ratio 4, compiled for the architectures they claim. Needs CuTe DSL and no GPU."""

from __future__ import annotations

import pytest

from cute_kernels.models import MODELS

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from cute_kernels.compressor.epilogue import store_for
from cute_kernels.compressor.ratio4 import BEHIND, MOST_TOKENS, WINDOW, C4Key, deployment_keys, tokens_per_team
from tests.compile.reports import compile_report


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kv_format", ["fp8_ds_mla/1", "indexer_fp8/1"])
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_the_window_is_under_way_before_any_of_it_is_used(arch: str, kv_format: str, fused: bool) -> None:
    report = compile_report(C4Key(arch, fused, **store_for(kv_format, False, "", False)))
    if report.in_sass is None:
        pytest.skip("nvdisasm is not installed (package nvidia-cuda-nvdisasm)")
    sass = report.in_sass
    loads = sass.places(r"LDG\.E\S*\.128")[: 2 * WINDOW]
    assert not any(loads[0] <= i < loads[-1] for i in sass.places(r"MUFU|FADD|FMUL|STG|BAR|EXIT"))


def test_neighbours_fit_into_a_warp() -> None:
    assert MOST_TOKENS + 2 * BEHIND <= 32
    for count in (1, 7, 1023, 8192, 10**7):
        for requests in (0, 1, count):
            tokens = {tokens_per_team(count, requests, dim, most) for dim in (128, 512) for most in (4, 16)}
            assert tokens <= {1, 2, 4, 8, 16}
            assert tokens == {1} or count >= 8 * requests
    assert MOST_TOKENS >= 16


def test_deployments() -> None:
    """Fused, for every cache format and option of the layers: three main formats, two plus four of the indexer."""
    for arch in ("sm_90a", "sm_89", "sm_80"):
        for fused, count in ((False, 3), (True, 2 * 9)):
            keys = deployment_keys(MODELS["v4-flash"], 1, arch, fused)
            assert len(set(keys)) == len(keys) == count
            assert all(key.fused is fused for key in keys)
