# SPDX-License-Identifier: Apache-2.0
"""What ptxas makes of Hopper's paged prefill kernels: no spills, products that run by themselves, and shared memory
that is read before it is filled anew."""

from __future__ import annotations

import re
from typing import Any

import pytest

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from cute_kernels.models import MODELS
from cute_kernels.sparse_mla import select
from cute_kernels.sparse_mla.gather_paged import GatherPagedKey
from cute_kernels.sparse_mla.hopper import prefill_paged
from cute_kernels.sparse_mla.hopper.prefill_paged import PagedKey, QuantPagedKey
from cute_kernels.sparse_mla.hopper.prefill_paged_cluster import PagedClusterKey
from cute_kernels.sparse_mla.schedule import CLUSTERS
from tests.compile.reports import Asked, compile_report

"""Of products: Q K^T, half by half, and P V. The assembler ends each instruction with a wait of its own where it loses
track."""


KEYS = (
    PagedKey("sm_90a"),
    QuantPagedKey("sm_90a"),
    *(PagedClusterKey("sm_90a", blocks) for blocks in CLUSTERS),
)


@pytest.fixture(scope="module", params=KEYS, ids=["whole", "codes", *(f"cluster{n}" for n in CLUSTERS)])
def report(request: pytest.FixtureRequest) -> Asked:
    return compile_report(request.param)


def accesses_of_the_last_role(sass: str) -> list[Any]:
    """(kind, register, offset) of its accesses to shared memory, and its jumps."""
    _, code = sass.rsplit("USETMAXREG", 1)
    return re.findall(r"(LDS\.128 \w+, |STS\.128 |LDGSTS\.E\.BYPASS\.128 |BRA)(?:\[(\w+?)(?:\+0x(\w+))?\])?", code)


def test_codes_are_stored_before_their_room_is_filled_anew(report: Asked) -> None:
    """Of a tile, in one straight line: all that is made of a slab's codes is stored before the next tile's are asked
    for in their place."""
    if report.in_sass is None:
        pytest.skip("nvdisasm is not there")
    found = report.in_sass.ask(accesses_of_the_last_role)
    kinds = [kind.split(".")[0].strip() for kind, _, _ in found]
    places = [(register, int(offset or "0", 16)) for _, register, offset in found]
    slabs, groups = prefill_paged.LAST_SLAB, prefill_paged.GROUPS
    copies = [i for i, kind in enumerate(kinds) if kind == "LDGSTS"][-slabs * groups - 2 * groups :]
    register, start = places[copies[0]]
    room = prefill_paged.GROUP * prefill_paged.CODES
    codes = [
        (register, start + slab * prefill_paged.SLAB + group * room) for slab in range(slabs) for group in range(groups)
    ]
    assert [places[i] for i in copies if places[i] in codes] == codes
    stores = [i for i, kind in enumerate(kinds) if kind == "STS" and i < copies[-1]]
    for number, place in enumerate(codes):
        copy = next(i for i in copies if places[i] == place)
        load = max(i for i in range(copy) if kinds[i] == "LDS" and places[i] == place)
        behind = [i for i in stores if copy < i < copies[-1]]
        assert load < copy
        assert len(behind) == 2 * groups * (slabs - 1 - number // groups)
        assert "BRA" not in kinds[copy : copies[-1]]


def test_registers_are_those_of_the_launch() -> None:
    launched = 65536 // prefill_paged.THREADS
    assert launched == prefill_paged.SOFTMAX_REGISTERS
    used = prefill_paged.SOFTMAX_REGISTERS + 2 * prefill_paged.PV_REGISTERS + prefill_paged.PRODUCER_REGISTERS
    assert used == prefill_paged.WARPGROUPS * launched


def test_tiles_begin_where_swizzles_do() -> None:
    place = 0
    for name, size in prefill_paged.smem_parts().items():
        assert place % (1024 if name in prefill_paged.SWIZZLED else 16) == 0, name
        place += size


def test_a_list_is_not_written_while_a_tile_needs_it() -> None:
    """A warp that begins a list four tiles ahead may be two tiles before another."""
    lists = prefill_paged.ROW_LISTS
    assert lists > prefill_paged.PRODUCER_WARPS + 2
    assert lists & (lists - 1) == 0


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("tp", [1, 8])
def test_deployments(model: str, tp: int) -> None:
    kinds = {4: "listed", 128: "all"}
    gathering = {GatherPagedKey("sm_90a", kinds.get(ratio, "none")) for ratio in MODELS[model].compress_ratios}
    assert set(select.paged_keys(MODELS[model], tp, "sm_90a")) == {*KEYS, *gathering}


def test_a_cluster_of_another_size_is_none() -> None:
    with pytest.raises(ValueError, match="blocks: expected one of"):
        PagedClusterKey("sm_90a", 3)
