"""What ptxas makes of Hopper's prefill kernel, and of mixed's, which are made of it: no spills, and products that run
by themselves."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from cute_kernels.models import MODELS
from cute_kernels.runtime.arch import SMEM_BYTES
from cute_kernels.runtime.compile import Report
from cute_kernels.sparse_mla import mixed, prefill, prefill_sm90_plan
from cute_kernels.sparse_mla.hopper.prefill_swap_ab import QuantSwapAbPrefillKey, SwapAbMixedKey, SwapAbPrefillKey
from cute_kernels.sparse_mla.mixed_sm90 import MixedKey
from cute_kernels.sparse_mla.mixed_sm90_fp8 import MixedFp8Key
from cute_kernels.sparse_mla.mixed_sm90_fp8_plan import FP8
from cute_kernels.sparse_mla.prefill_sm90 import NormQuantPrefillKey, PrefillKey, QuantPrefillKey
from cute_kernels.sparse_mla.prefill_sm90_plan import BF16, Plan
from tests.compile.reports import compile_report

GROUPS = 2
"""Of products: Q K^T and P V. The assembler ends each instruction with a wait of its own where it loses track."""


@pytest.fixture(scope="module", params=[PrefillKey, MixedKey, MixedFp8Key, QuantPrefillKey, NormQuantPrefillKey])
def report(request: pytest.FixtureRequest) -> Report:
    return compile_report(request.param("sm_90a"))


def test_no_spills_and_products_in_flight(report: Report) -> None:
    assert (report.spill_stores, report.spill_loads, report.stack) == (0, 0, 0)
    assert report.smem == report.key.smem_bytes <= SMEM_BYTES["sm_90a"]
    assert set(report.key.instructions) <= set(report.instructions)
    assert report.instructions["wgmma"] == 512 // 16 + 64 // 16 * 2
    if report.sass:
        products = re.findall(r"HGMMA.*", report.sass)
        assert len([line for line in products if "gsb0" in line]) == GROUPS < len(products)


@pytest.mark.parametrize("plan", [BF16, FP8])
def test_registers_are_those_of_the_launch(plan: Plan) -> None:
    used = plan.scores_registers + 2 * prefill_sm90_plan.BACK_REGISTERS + plan.rows_registers
    assert used == prefill_sm90_plan.GROUPS * (65536 // prefill_sm90_plan.THREADS // 8 * 8)


@pytest.mark.parametrize("plan", [BF16, FP8])
def test_tiles_begin_where_swizzles_do(plan: Plan) -> None:
    place = 0
    for name, size in plan.memory.items():
        assert place % (1024 if name in prefill_sm90_plan.TILES else 16) == 0, name
        place += size


@pytest.mark.parametrize("plan", [BF16, FP8])
def test_queries_and_ring_fit_the_columns(plan: Plan) -> None:
    kept = plan.memory["kept"] // (prefill_sm90_plan.ROWS * 2)
    assert plan.held + kept == prefill_sm90_plan.SLABS * prefill_sm90_plan.SLAB
    assert plan.memory["stages"] % prefill_sm90_plan.STAGE_BYTES == 0


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
    few = SwapAbPrefillKey("sm_90a", heads), SwapAbMixedKey("sm_90a", heads), QuantSwapAbPrefillKey("sm_90a", heads)
    many = PrefillKey("sm_90a"), MixedKey("sm_90a"), QuantPrefillKey("sm_90a")
    one, other, codes = few if heads <= 16 else many
    raw = [NormQuantPrefillKey("sm_90a")] if heads > 16 else []
    assert prefill.deployment_keys(MODELS[model], tp, "sm_90a") == [one, codes, *raw]
    assert mixed.deployment_keys(MODELS[model], tp, "sm_90a") == [other, MixedFp8Key("sm_90a")]
