"""What ptxas makes of Hopper's prefill kernels for few heads: no spills, products that run by themselves, sizes that
waits rely on."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from cute_kernels.runtime.arch import SMEM_BYTES
from cute_kernels.sparse_mla import prefill_few_sm90, prefill_few_sm90_plan, prefill_sm90_plan
from cute_kernels.sparse_mla.prefill_few_sm90 import FewMixedKey, FewPrefillKey, QuantFewPrefillKey
from cute_kernels.sparse_mla.prefill_few_sm90_plan import FEW_HEADS, HEADINGS, PARTS, UNITS, Plan
from tests.compile.reports import compile_report

SCORES = 3
"""Where Q K^T stands: an item's first tile, and the others, if they are late and if they are not."""


@pytest.mark.parametrize(
    "key",
    [FewPrefillKey("sm_90a", 8), FewMixedKey("sm_90a", 16), *(QuantFewPrefillKey("sm_90a", n) for n in FEW_HEADS)],
    ids=["prefill8", "mixed16", *(f"codes{n}" for n in FEW_HEADS)],
)
def test_no_spills_and_products_in_flight(key: FewPrefillKey | FewMixedKey) -> None:
    report = compile_report(key)
    assert (report.spill_stores, report.spill_loads, report.stack) == (0, 0, 0)
    assert report.smem == key.smem_bytes <= SMEM_BYTES["sm_90a"]
    assert set(key.instructions) <= set(report.instructions)
    assert report.instructions["wgmma"] == SCORES * (512 // 16) + 512 // 64 * (64 // 16)
    if report.sass:
        products = re.findall(r"HGMMA.*", report.sass)
        # Q K^T, and P V of each part of a tile
        assert len([line for line in products if "gsb0" in line]) == SCORES + PARTS
        assert len([line for line in products if "tnspA" in line]) == 512 // 64 * (64 // 16)


def test_registers_are_those_of_the_launch() -> None:
    used = prefill_few_sm90.SCORES_REGISTERS + prefill_few_sm90.BACK_REGISTERS + 2 * prefill_few_sm90.ROWS_REGISTERS
    assert used == prefill_few_sm90_plan.GROUPS * (65536 // prefill_few_sm90_plan.THREADS // 8 * 8)


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("heads", FEW_HEADS)
def test_tiles_begin_where_swizzles_do_and_all_fits(heads: int, quantized: bool) -> None:
    plan, place = Plan(heads, quantized), 0
    for name, size in plan.parts().items():
        assert place % (1024 if name in prefill_few_sm90_plan.TILES else 16) == 0, name
        place += size
    assert plan.smem_bytes <= SMEM_BYTES["sm_90a"]


def test_no_tile_overtakes_a_heading_or_the_copies_before_it() -> None:
    """A heading is written when the last unit of the tile before has been asked for, so that the unit it took the place
    of is empty. Whoever asks for a tile's rows waits for all copies but those of the AHEAD - 1 tiles before."""
    assert UNITS <= (HEADINGS - 1) * PARTS
    assert prefill_sm90_plan.AHEAD * PARTS >= UNITS > 2 * PARTS
