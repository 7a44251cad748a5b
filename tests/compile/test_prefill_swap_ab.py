# SPDX-License-Identifier: Apache-2.0
"""What ptxas makes of Hopper's prefill kernels for few heads: no spills, products that run by themselves, sizes that
waits rely on."""

from __future__ import annotations

import pytest

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from cute_kernels.runtime.arch import SMEM_BYTES
from cute_kernels.sparse_mla.hopper import prefill_swap_ab
from cute_kernels.sparse_mla.hopper.prefill_index_loader import AHEAD
from cute_kernels.sparse_mla.hopper.prefill_swap_ab import (
    HEADERS,
    HEADS,
    KV_STAGES,
    QUARTERS,
    SwapAbConfig,
)

"""Where Q K^T stands: a work tile's first tile, and the others, if they are late and if they are not."""


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
