# SPDX-License-Identifier: Apache-2.0
"""What ptxas makes of Hopper's decode kernel: sizes that the notes promise, and products that run by themselves."""

from __future__ import annotations

import pytest

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from cute_kernels.sparse_mla.hopper import decode_smem as decode
from cute_kernels.sparse_mla.hopper import planner
from cute_kernels.sparse_mla.hopper.decode import DecodeKey
from tests.compile.questions import parts
from tests.compile.reports import compile_report

"""Of products: Q K^T and P V. The assembler ends each instruction with a wait of its own where it loses track."""


def test_a_dequantizer_releases_what_it_has_loaded() -> None:
    """An arrival at an mbarrier can overtake loads, so it comes behind a store of what was loaded last."""
    report = compile_report(DecodeKey("sm_90a", 64, "listed", False))
    if report.in_sass is None:
        pytest.skip("nvdisasm is not there")
    starts = rf"USETMAXREG\S* {decode.DEQUANT_REGISTERS:#x} ;|USETMAXREG\S* {decode.PRODUCER_REGISTERS:#x} ;"
    _, work, _ = report.in_sass.ask(parts, starts, r"LDS\.128|STS\.128|SYNCS\.ARRIVE")
    rows = 2 * (decode.SLABS + 1)
    stores = work.index("STS.128")
    assert work[:stores] == ["LDS.128"] * rows
    assert work.index("SYNCS.ARRIVE") > stores


@pytest.mark.parametrize("second", ["none", "listed"])
def test_lists_are_read_ahead_of_the_wait_for_the_kernel_ahead(second: str) -> None:
    """constant_lists: the first tile's index is, and lengths; one of an extra list, which may not be constant, behind a
    wait of its own. All else that the producer reads is behind the wait, and all other roles begin behind one."""
    report = compile_report(DecodeKey("sm_90a", 64, second, False))
    pattern = r"griddepcontrol\.wait|cp\.async\.bulk\.shared|ld\.relaxed\.gpu\S*\.b32"
    head, *_, producer = report.in_ptx.ask(parts, r"setmaxnreg", pattern)
    wait, copy = "griddepcontrol.wait", "cp.async.bulk.shared"
    assert head[-2:] == [wait, wait], "where no lists are constant, and of roles that read none"
    index = next(found for found in producer if found != wait)
    assert index.startswith("ld")
    first = [index] if second == "none" else [wait, index]
    assert producer == [*first, wait, index, copy]


def test_registers_are_those_of_the_launch() -> None:
    groups = planner.THREADS // 128
    used = (
        decode.PING_PONG * (decode.SOFTMAX_REGISTERS + decode.DEQUANT_REGISTERS)
        + decode.PV_REGISTERS
        + decode.PRODUCER_REGISTERS
    )
    launched = 65536 // planner.THREADS // 8 * 8
    assert used == groups * launched


def test_no_tile_overtakes_a_header() -> None:
    """A tile's header is written when all that read the one 8 tiles before are done: the producer is at most the rows
    in flight ahead of the dequantizers, they a tile each ahead of the stages, and these not yet emptied."""
    ahead = decode.FP8_STAGES // 2 + decode.PING_PONG + decode.KV_STAGES
    assert ahead <= decode.HEADERS
