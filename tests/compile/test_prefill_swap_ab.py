# SPDX-License-Identifier: Apache-2.0
"""What ptxas makes of Hopper's prefill kernels for few heads: no spills, products that run by themselves, sizes that
waits rely on."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from cute_kernels.runtime.arch import SMEM_BYTES
from cute_kernels.sparse_mla.hopper import prefill_swap_ab
from cute_kernels.sparse_mla.hopper.index_loader import AHEAD
from cute_kernels.sparse_mla.hopper.prefill_swap_ab import (
    HEADERS,
    HEADS,
    KV_STAGES,
    QUARTERS,
    QuantSwapAbPrefillKey,
    SwapAbConfig,
    SwapAbMixedKey,
    SwapAbPrefillKey,
)
from tests.compile.reports import compile_report

QK = 3
"""Where Q K^T stands: a work tile's first tile, and the others, if they are late and if they are not."""


@pytest.mark.parametrize(
    "key",
    [SwapAbPrefillKey("sm_90a", 8), SwapAbMixedKey("sm_90a", 16), *(QuantSwapAbPrefillKey("sm_90a", n) for n in HEADS)],
    ids=["prefill8", "mixed16", *(f"codes{n}" for n in HEADS)],
)
def test_no_spills_and_products_in_flight(key: SwapAbPrefillKey) -> None:
    report = compile_report(key)
    assert (report.spill_stores, report.spill_loads, report.stack) == (0, 0, 0)
    assert report.smem == key.smem_bytes <= SMEM_BYTES["sm_90a"]
    assert set(key.instructions) <= set(report.instructions)
    assert report.instructions["wgmma"] == QK * (512 // 16) + 512 // 64 * (64 // 16)
    if report.sass:
        products = re.findall(r"HGMMA.*", report.sass)
        # Q K^T, and P V of each quarter of a tile
        assert len([line for line in products if "gsb0" in line]) == QK + QUARTERS
        assert len([line for line in products if "tnspA" in line]) == 512 // 64 * (64 // 16)


def test_registers_are_those_of_the_launch() -> None:
    used = prefill_swap_ab.SOFTMAX_REGISTERS + prefill_swap_ab.PV_REGISTERS + 2 * prefill_swap_ab.PRODUCER_REGISTERS
    assert used == prefill_swap_ab.WARPGROUPS * (65536 // prefill_swap_ab.THREADS // 8 * 8)


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("heads", HEADS)
def test_tiles_begin_where_swizzles_do_and_all_fits(heads: int, quantized: bool) -> None:
    config, place = SwapAbConfig("sparse_mla_prefill", heads, quantized), 0
    for name, size in prefill_swap_ab.smem_parts(config).items():
        assert place % (1024 if name in prefill_swap_ab.SWIZZLED else 16) == 0, name
        place += size
    assert prefill_swap_ab.smem_bytes(config) <= SMEM_BYTES["sm_90a"]


def test_no_tile_overtakes_a_header_or_the_copies_before_it() -> None:
    """A header is written when the last quarter of the tile before is on its way, so that the stage it took is empty.
    The producer waits for all copies but those of the AHEAD - 1 tiles before."""
    assert KV_STAGES <= (HEADERS - 1) * QUARTERS
    assert AHEAD * QUARTERS >= KV_STAGES > 2 * QUARTERS
