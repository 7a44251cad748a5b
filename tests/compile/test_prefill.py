"""What ptxas makes of Hopper's prefill kernel, and of mixed's, which is made of it: no spills, and products that run by
themselves."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from cute_kernels.models import MODELS
from cute_kernels.runtime.arch import SMEM_BYTES
from cute_kernels.runtime.compile import Report, compile_report
from cute_kernels.sparse_mla import mixed, prefill, prefill_sm90, prefill_sm90_plan
from cute_kernels.sparse_mla.mixed_sm90 import MixedKey
from cute_kernels.sparse_mla.prefill_few_sm90 import FewMixedKey, FewPrefillKey
from cute_kernels.sparse_mla.prefill_sm90 import PrefillKey

GROUPS = 2
"""Of products: Q K^T and P V. The assembler ends each instruction with a wait of its own where it loses track."""


KEYS = PrefillKey("sm_90a"), MixedKey("sm_90a")


@pytest.fixture(scope="module", params=KEYS, ids=["prefill", "mixed"])
def report(request: pytest.FixtureRequest) -> Report:
    return compile_report(request.param)


def test_no_spills_and_products_in_flight(report: Report) -> None:
    assert (report.spill_stores, report.spill_loads, report.stack) == (0, 0, 0)
    assert report.smem == report.key.smem_bytes <= SMEM_BYTES["sm_90a"]
    assert set(report.key.instructions) <= set(report.instructions)
    assert report.instructions["wgmma"] == 512 // 16 + 64 // 16 * 2
    if report.sass:
        products = re.findall(r"HGMMA.*", report.sass)
        assert len([line for line in products if "gsb0" in line]) == GROUPS < len(products)


def test_registers_are_those_of_the_launch() -> None:
    used = prefill_sm90.SCORES_REGISTERS + 2 * prefill_sm90.BACK_REGISTERS + prefill_sm90.ROWS_REGISTERS
    assert used == prefill_sm90_plan.GROUPS * (65536 // prefill_sm90_plan.THREADS // 8 * 8)


def test_tiles_begin_where_swizzles_do() -> None:
    place = 0
    for name, size in list(prefill_sm90_plan.smem_parts().items()):
        assert place % (1024 if name in ("stages", "kept", "p") else 16) == 0, name
        place += size


def test_indices_are_asked_for_no_later_than_a_stage_comes_round() -> None:
    """Whoever fills a stage waits for all copies but those of the AHEAD - 1 stages before: these are on their way while
    the stage before them is let go of."""
    assert prefill_sm90_plan.AHEAD == prefill_sm90_plan.STAGES
    lists = prefill_sm90_plan.LISTS
    assert lists > prefill_sm90_plan.AHEAD
    assert lists & (lists - 1) == 0


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_deployments(model: str, tp: int) -> None:
    heads = MODELS[model].num_attention_heads // tp
    one, other = (FewPrefillKey("sm_90a", heads), FewMixedKey("sm_90a", heads)) if heads <= 16 else KEYS
    assert prefill.deployment_keys(MODELS[model], tp, "sm_90a") == [one]
    assert mixed.deployment_keys(MODELS[model], tp, "sm_90a") == [other]
    assert prefill.deployment_keys(MODELS[model], tp, "sm_100a") == []
    assert mixed.deployment_keys(MODELS[model], tp, "sm_100a") == []
