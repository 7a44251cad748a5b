# SPDX-License-Identifier: Apache-2.0
"""The gather kernels of indexer keys, compiled for every architecture they claim. Needs CuTe DSL and no GPU."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from cute_kernels.formats import INDEXER_FP8, INDEXER_MXFP4
from cute_kernels.indexer.gather import SIZES, deployment_keys, key_for, size_of
from cute_kernels.models import MODELS
from tests.compile.reports import compile_report


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("size", [SIZES[0], SIZES[-1]])
@pytest.mark.parametrize("fmt", [INDEXER_FP8, INDEXER_MXFP4], ids=lambda f: f.id)
def test_all_loads_come_first(fmt: Any, size: int, aligned: bool) -> None:
    key = key_for("sm_90a", fmt.id, size, aligned)
    steps = key.rows * key.code_bytes // (32 * key.access)
    code = compile_report(key).in_ptx.findall(r"ld\.relaxed|st\.global")
    assert code == ["ld.relaxed"] * (steps + 1) + ["st.global"] * (steps + 1)


def test_deployments() -> None:
    keys = deployment_keys(MODELS["v4-flash"], 1, "sm_90a")
    assert len(set(keys)) == len(keys) == 3 + 2 + 2
    assert [size_of(rows) for rows in (1, 65535, 65536, 131071, 131072, 2**30)] == [
        0,
        0,
        *SIZES[1:2] * 2,
        *SIZES[2:] * 2,
    ]
