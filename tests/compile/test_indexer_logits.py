# SPDX-License-Identifier: Apache-2.0
"""The kernels of the indexer's scores, compiled for Hopper. Needs CuTe DSL, no GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cute_kernels.models import MODELS, ModelShape
from cute_kernels.runtime.arch import SMEM_BYTES

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from cute_kernels.indexer import launch, select
from cute_kernels.indexer.hopper.logits import (
    MANY_COLUMNS,
    REGISTERS,
    REGISTERS_BESIDE_MORE,
    TILES_OF_ROUND,
    LogitsConfig,
    LogitsKey,
)
from tests.compile.reports import compile_report


def deployed(model: Any, tp: int = 1) -> list[LogitsKey]:
    """Keys of Hopper's kernel."""
    found = [*launch.logits_keys(model, tp, "sm_90a"), *launch.paged_logits_keys(model, tp, "sm_90a")]
    return [key for key in found if type(key) is LogitsKey]


KEYS = deployed(MODELS["v4-flash"])


@pytest.mark.parametrize("key", [key for key in KEYS if key.config.columns >= MANY_COLUMNS], ids=str)
def test_no_warpgroup_waits_for_registers_that_nobody_gives_back(key: LogitsKey) -> None:
    assert key.config.threads == 384
    for beside, of_scores in (REGISTERS, REGISTERS_BESIDE_MORE):
        assert beside + key.config.warpgroups * of_scores <= 3 * compile_report(key).registers
        assert beside % 8 == of_scores % 8 == 0


@pytest.mark.parametrize("key", KEYS, ids=str)
def test_products_and_sums(key: LogitsKey) -> None:
    """The assembler waits for no product on its own, and sums cost two instructions a product."""
    report = compile_report(key)
    if report.in_sass is None:
        pytest.skip("nvdisasm is not installed (package nvidia-cuda-nvdisasm)")
    order = report.in_sass.findall(r"QGMMA|WARPGROUP\.DEPBAR")
    wait, product = ["WARPGROUP.DEPBAR"], ["QGMMA"] * 4
    tiles = TILES_OF_ROUND if key.paged else 2
    if key.config.accumulators == 1:
        assert order == product + wait
    else:
        last, one_more = wait * 2, wait + product
        assert order == product * 2 + (last + one_more * 2) * (tiles - 1) + last
    sums = 2 * tiles - 1 if key.config.accumulators == 2 else 1
    of_a_thread = key.config.columns // 2
    assert report.in_sass.count(r"\bFMNMX\.NAN") == sums * of_a_thread
    assert report.in_sass.count(r"\bFFMA\b") == sums * (of_a_thread - 2 * key.rows)


@pytest.mark.parametrize("rows", range(1, 5))
@pytest.mark.parametrize("heads", [16, 32, 48, 64])
@pytest.mark.parametrize("box", [8, 64])
def test_shared_memory(heads: int, rows: int, box: int) -> None:
    config = LogitsConfig(heads, rows, box)
    assert config.smem_bytes <= SMEM_BYTES["sm_90a"]
    # a stage must always be of the same warpgroup: nobody waits for the others' barriers
    assert config.stages % config.warpgroups == 0
    assert config.stages >= 8
    assert config.columns <= 256
    assert config.warps_beside + 4 * config.warpgroups <= config.threads // 32


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("tp", [1, 8])
def test_deployments(model: str, tp: int) -> None:
    config = MODELS[model]
    assert deployed(config, tp) == [replace(key, heads=config.index_n_heads) for key in KEYS]
    assert deployed(ModelShape(compress_ratios=(1, 128)), tp) == []


def test_groups_of_rows() -> None:
    assert [select.rows_of_group(n, 4) for n in range(1, 14)] == [1, 2, 3, 4, 3, 3, 4, 4, 3, 4, 4, 4, 4]
    deployed = {key.rows for key in KEYS if key.paged}
    assert {select.rows_of_group(n, 4) for n in range(1, 300)} == deployed
