# SPDX-License-Identifier: Apache-2.0
"""The query kernels of the indexer, compiled for every architecture they claim. Needs CuTe DSL and no GPU."""

from __future__ import annotations

import pytest

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from cute_kernels.indexer import query
from cute_kernels.models import MODELS
from tests.compile.reports import compile_report


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_columns_are_on_their_way_before_anything_waits(arch: str) -> None:
    key = query.key_for(arch, "", False, query.MANY_HEADS)
    report = compile_report(key)
    if report.in_sass is None:
        pytest.skip("nvdisasm is not installed (package nvidia-cuda-nvdisasm)")
    sass = report.in_sass
    loads = sass.places(r"\bLDG\.E")
    assert sass.places(r"\bLDG\.E.*128\.STRONG") == loads[: 2 * key.groups]
    assert max(loads) < sass.first_place(r"\bEXIT|\bBRA|\bSTG|\bSHFL")


def test_deployments() -> None:
    config = MODELS["v4-flash"]
    for kernel, forms in ((query.FP8, 2), (query.MXFP4, 4)):
        keys = kernel.deployment_keys(config, 1, "sm_90a")
        assert len(set(keys)) == len(keys) == 2 * forms * len(query.SIZES)
        assert len(kernel.deployment_keys(config, 1, "sm_80")) == len(keys)


def test_sizes() -> None:
    sizes = [query.size_of(64 * tokens) for tokens in (1, 64, 127, 128, 1024, 4095, 4096, 32768)]
    several, many = query.SEVERAL_HEADS, query.MANY_HEADS
    assert sizes == [0, 0, 0, several, several, several, many, many]
