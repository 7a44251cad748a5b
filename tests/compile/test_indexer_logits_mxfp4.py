# SPDX-License-Identifier: Apache-2.0
"""The kernels of MXFP4 scores, compiled for Hopper. Needs CuTe DSL, no GPU."""

from __future__ import annotations

import pytest

from cute_kernels.runtime.arch import SMEM_BYTES

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from cute_kernels.indexer import select
from cute_kernels.indexer.hopper.logits_mxfp4 import BEHIND, HALVES, Mxfp4Config, Mxfp4LogitsKey
from tests.compile.reports import compile_report

KEYS = [
    select.own_key("sm_90a", heads, rows, paged, page_rows, mxfp4=True)
    for heads, rows, paged, page_rows in ((64, 1, True, 64), (64, 4, False, 64), (48, 2, True, 8))
]


@pytest.mark.parametrize("key", KEYS, ids=str)
def test_no_warpgroup_waits_for_registers_that_nobody_gives_back(key: Mxfp4LogitsKey) -> None:
    (beside, of_scores), warpgroups = key.config.registers, key.config.threads // 128
    more = warpgroups - key.config.warpgroups
    assert beside * more + key.config.warpgroups * of_scores <= warpgroups * compile_report(key).registers
    assert beside % 8 == of_scores % 8 == 0


@pytest.mark.parametrize("key", KEYS, ids=str)
def test_products_and_conversions(key: Mxfp4LogitsKey) -> None:
    """The assembler waits for no product on its own, and a code costs little more than half a byte permute."""
    report = compile_report(key)
    if report.in_sass is None:
        pytest.skip("nvdisasm is not installed (package nvidia-cuda-nvdisasm)")
    half = ["QGMMA"] * 4 + ["WARPGROUP.DEPBAR"]
    assert report.in_sass.findall(r"QGMMA|WARPGROUP\.DEPBAR") == half * HALVES
    # of both halves' keys, of those of far rows and of queries: 64 codes a thread, two permutes for every four
    assert 128 <= report.in_sass.count(r"\bPRMT\b") <= 144


@pytest.mark.parametrize("rows", range(1, 5))
@pytest.mark.parametrize("heads", [16, 32, 48, 64])
@pytest.mark.parametrize("box", [8, 64])
def test_shared_memory(heads: int, rows: int, box: int) -> None:
    config = Mxfp4Config(heads, rows, box)
    assert config.smem_bytes <= SMEM_BYTES["sm_90a"]
    # a warp that waited for a tile's scales with all stages asked for would wait for ever
    assert config.stages // config.warpgroups > BEHIND[rows]
    # a stage must always be of the same warpgroup: nobody waits for the others' barriers
    assert config.stages % config.warpgroups == 0
    assert config.columns <= 256
    assert config.warps_beside + 4 * config.warpgroups <= config.threads // 32
