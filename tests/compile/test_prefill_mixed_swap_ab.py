# SPDX-License-Identifier: Apache-2.0
"""What ptxas makes of Hopper's mixed kernels over e4m3 caches for few heads: sizes that waits rely on, and what is
released when."""

from __future__ import annotations

import pytest

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from cute_kernels.runtime.arch import SMEM_BYTES
from cute_kernels.sparse_mla.hopper import prefill_mixed_swap_ab as kernel
from cute_kernels.sparse_mla.hopper.prefill_index_loader import AHEAD
from cute_kernels.sparse_mla.hopper.prefill_mixed_swap_ab import ROLES, SwapAbMixedFp8Key
from cute_kernels.sparse_mla.hopper.prefill_swap_ab import SWIZZLED
from tests.compile.questions import parts
from tests.compile.reports import compile_report


def test_registers_are_those_of_the_launch() -> None:
    for roles in ROLES.values():
        softmax, pv, producer = roles.registers
        used = softmax + roles.pv * pv + roles.producer * producer
        assert used == roles.threads // 128 * (65536 // roles.threads // 8 * 8)


@pytest.mark.parametrize("heads", ROLES)
def test_tiles_begin_where_swizzles_do_and_all_fits(heads: int) -> None:
    key, place = SwapAbMixedFp8Key("sm_90a", heads), 0
    for name, size in kernel.smem_parts(key.config).items():
        assert place % (1024 if name in (*SWIZZLED, "q16") else 16) == 0, name
        place += size
    assert key.smem_bytes <= SMEM_BYTES["sm_90a"]


def test_copies_are_waited_for_before_their_stage_comes_round() -> None:
    """The producer waits for all copies but those of the AHEAD - 1 tiles before."""
    assert all(roles.kv_stages > AHEAD for roles in ROLES.values())


@pytest.mark.parametrize("heads", ROLES)
def test_pv_releases_what_it_has_multiplied(heads: int) -> None:
    """An arrival at an mbarrier can overtake loads whose values nobody has used yet: none stands between the first of a
    tile's loads and the last of its products."""
    report = compile_report(SwapAbMixedFp8Key("sm_90a", heads))
    if report.in_sass is None:
        pytest.skip("nvdisasm is not there")
    _, _, work, _ = report.in_sass.ask(parts, "USETMAXREG", r"LDSM|HG?MMA|SYNCS\.ARRIVE")
    products = len(work) - next(i for i, name in enumerate(reversed(work)) if name.endswith("MMA"))
    assert "SYNCS.ARRIVE" not in work[work.index("LDSM") : products]
    # of the tile before, of P, and of the work tile's last P
    assert work.count("SYNCS.ARRIVE") == 3
