# SPDX-License-Identifier: Apache-2.0
"""The kernels of fp8_gemm and bf16_gemm for few tokens, compiled for Hopper. Needs CuTe DSL, no GPU."""

from __future__ import annotations

import pytest

from cute_kernels.models import MODELS

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from cute_kernels.linear import launch as calls
from cute_kernels.linear import select
from cute_kernels.linear.hopper.gemm_swap_ab import SwapAbKey
from tests.compile.reports import compile_report
from tests.compile.sampling import of_run

KEYS = list(
    dict.fromkeys(
        key
        for kernel in (calls.FP8_GEMM, calls.BF16_GEMM)
        for model, tp in (("v4-flash", 1), ("v4-pro", 1), ("v4-flash", 8))
        for key in kernel.deployment_keys(MODELS[model], tp, "sm_90a")
        if isinstance(key, SwapAbKey)
    )
)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "key" in metafunc.fixturenames:
        metafunc.parametrize("key", of_run(KEYS, metafunc.config), ids=str)


def test_weights_are_asked_for_before_the_kernel_ahead_has_ended(key: SwapAbKey) -> None:
    """Tokens and scales behind it."""
    pattern = r"cp\.async\.bulk\.tensor|griddepcontrol\.(?:wait|launch_dependents)"
    order = list(dict.fromkeys(compile_report(key).in_ptx.findall(pattern)))
    assert order == ["griddepcontrol.launch_dependents", "cp.async.bulk.tensor", "griddepcontrol.wait"]


def test_few_rows_with_k_whole() -> None:
    for rows, clusters in ((1, 128), (32, 128)):
        assert select.swap_ab_whole("bf16", rows, 8, 1024) == (
            SwapAbKey(select.HOPPER, "e4m3", "bf16", max(8, rows), 1, False),
            clusters,
        )
    assert {select.swap_ab_whole("bf16", rows, 16, 1024)[0] for rows in range(1, 33)} == set(  # type: ignore[index]
        select.swap_ab_whole_keys("bf16")
    )
    for rows, groups in ((33, 16), (1, 1)):
        assert select.swap_ab_whole("bf16", rows, groups, 1024) is None
