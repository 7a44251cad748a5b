# SPDX-License-Identifier: Apache-2.0
"""Blackwell's decode kernel: what ptxas makes of it, and its plan. Needs CuTe DSL, no GPU."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from cute_kernels.dsl import ptx, umma
from cute_kernels.formats import HEAD_DIM
from cute_kernels.isa_probes import meaning
from cute_kernels.sparse_mla.blackwell import decode as plan
from cute_kernels.sparse_mla.blackwell.decode import BlackwellDecodeKey
from tests.compile.questions import constants
from tests.compile.reports import check_fits, compile_report
from tests.compile.test_decode_small_heads import banks

KEYS_TO_COMPILE = [
    BlackwellDecodeKey("sm_100a", "listed", False),
    BlackwellDecodeKey("sm_100a", "dense", True),
    BlackwellDecodeKey("sm_103a", "none", False),
]


@pytest.mark.parametrize("key", KEYS_TO_COMPILE, ids=str)
def test_compiles(key: BlackwellDecodeKey) -> None:
    report = check_fits(key, plan.THREADS)
    assert report.smem == key.smem_bytes
    # S is started in two places
    products = 2 * len([*plan.scores_steps()]) + len([*plan.values_steps()])
    assert report.in_ptx.count(r"tcgen05\.mma\.ws\.cta_group::1\.kind::f16") == products
    assert report.instructions["tma.gather4"] == 2 * plan.KEYS // plan.GATHERED
    conversions = 2 * plan.LAST_SLAB * 8 if ptx.HAS_BF16_OF_E4M3 else 0
    assert report.in_ptx.count(r"cvt\.rn\.bf16x2\.e4m3x2") == conversions
    assert report.in_ptx.count(r"tcgen05\.alloc\S+ \[\S+\], 512;") == 1
    assert not report.in_ptx.has(r"st\.local|ld\.local|setmaxnreg")
    if report.in_sass is not None:
        assert report.in_sass.count(r"UTCHMMA\.WS") == products
        assert report.in_sass.count(r"UTMALDG\.2D\.GATHER4") == 2 * plan.KEYS // plan.GATHERED


def test_barriers_are_those_of_the_plan() -> None:
    text = compile_report(KEYS_TO_COMPILE[0]).in_ptx
    arrivals = [int(number) for number in text.ask(constants, r"mbarrier\.init\S+\s+\[\S+\], (%r\d+);")]
    rings = ((plan.SLOTS, 1, plan.HEADING_READERS), (plan.FP8_STAGES, 1, 4), (plan.STAGES, 5, 1))
    want = [count for depth, fill, empty in rings for _ in range(depth) for count in (fill, empty)]
    want += [32] * plan.SLOTS + [1] * plan.BUFFERS + [4] * plan.BUFFERS + [4]
    assert arrivals == want
    assert len(want) == plan.BARRIERS
    expected = [int(number) for number in text.ask(constants, r"arrive\.expect_tx\S+ \S+, \[\S+\], (%r\d+);")]
    assert sorted(expected) == sorted([plan.CODES_BYTES, plan.ROPE_BYTES])


def test_stores_for_tensor_cores_are_fenced() -> None:
    """Between what a thread stores where tensor cores read it and its warp's arrival there is a fence of proxies."""
    text = compile_report(KEYS_TO_COMPILE[0]).in_ptx
    steps = text.findall(r"st\.shared\.v4|fence\.proxy\.async|mbarrier\.arrive\.shared")
    unfenced = [a.startswith("st.") and b.startswith("mbarrier") for a, b in itertools.pairwise(steps)]
    assert sum(unfenced) == 1, "the scout's headings are read by threads alone"
    assert steps.count("fence.proxy.async") == 4, "a tile, P, and Q in two places"


# ---- the plan --------------------------------------------------------------------------------------------------------


def test_shared_memory() -> None:
    check_shared_memory(plan)


def check_shared_memory(plan: Any) -> None:
    """Of this plan, or that for pairs of blocks."""
    parts, at = plan.smem_parts(), plan.smem_at(0)
    assert list(parts) == list(at._fields)
    ends = [place + size for place, size in zip(at, parts.values(), strict=True)]
    assert list(at[1:]) == ends[:-1]
    assert all(place % 1024 == 0 for place in (at.kv, at.q, at.p, at.raw))
    assert all(place % 16 == 0 for place in at)
    # behind the last place come barriers; addresses fit the 14 bits of 16 bytes that a descriptor has for them
    assert plan.smem_bytes() == ends[-1] + 8 * plan.BARRIERS < 1 << 18


def test_tensor_memory() -> None:
    columns = np.zeros(meaning.COLUMNS, int)
    for step in plan.values_steps():
        columns[step.d : step.d + umma.result_columns("ws64", HEAD_DIM // 2)] |= 1
    for step in plan.scores_steps():
        if step.is_resident:
            columns[step.a : step.a + umma.K_BYTES // 4] += 2
    for buffer in range(plan.BUFFERS):
        first = plan.S_COLUMN + buffer * plan.S_COLUMNS
        columns[first : first + umma.result_columns("ws64", plan.KEYS)] += 4
    assert np.array_equal(np.unique(columns), [1, 2, 4])


def tile_stores() -> list[tuple[int, int, int, list[int]]]:
    """(thread, address read in raw, row, addresses written in kv) of the front's accesses, in order."""
    found = []
    for half, slab, thread in itertools.product(range(2), range(plan.LAST_SLAB), range(128)):
        row, member = thread // 4 + 32 * half, thread % 4
        source = plan.raw_offset(0, row) + slab * plan.SLAB + member * 16
        found.append((thread, source, row, [plan.stage_offset(0, slab, row, 2 * member + i) for i in range(2)]))
    return found


def test_the_front_and_the_gathers_fill_a_tile() -> None:
    written = np.zeros(plan.STAGE_BYTES, int)
    for _, _, _, places in tile_stores():
        for place in places:
            written[place : place + 16] += 1
    for row in range(0, plan.KEYS, plan.GATHERED):
        first = plan.rope_offset(0, row)
        written[umma.swizzled(first + np.arange(plan.GATHERED * 128), 128)] += 1
    assert (written == 1).all()


def test_no_bank_conflicts() -> None:
    accesses = tile_stores()
    for first in range(0, len(accesses), 8):
        eight = accesses[first : first + 8]
        assert len(banks([source for _, source, _, _ in eight], 16)) == 32
        for i in range(2):
            assert len(banks([places[i] for *_, places in eight], 16)) == 32
    for head, chunk in itertools.product(range(0, plan.HEADS, 8), range(8)):
        assert len(banks([plan.chunk_offset(head + i, chunk) for i in range(8)], 16)) == 32


def test_operands_are_what_was_stored() -> None:
    """Through their descriptors, tensor cores read a tile of numbers as keys and as columns, and Q and P as rows."""
    rng = np.random.default_rng(1)
    tile = rng.integers(0, 1 << 16, (plan.KEYS, HEAD_DIM)).astype(np.uint16)
    shared = np.zeros(2 * plan.STAGE_BYTES, np.uint8)
    stage = plan.STAGE_BYTES
    for row, chunk in itertools.product(range(plan.KEYS), range(HEAD_DIM // 8)):
        place = plan.stage_offset(1, chunk // 8, row, chunk % 8)
        shared[place : place + 16] = tile[row, 8 * chunk : 8 * chunk + 8].view(np.uint8)

    def read(descriptor: int, rows: int, is_mn_major: bool) -> np.ndarray:
        at = meaning.operand_addresses(descriptor, rows, 16, 16, is_mn_major)
        return shared[at] | shared[at + 1].astype(np.uint16) << 8

    for number, step in enumerate(plan.scores_steps()):
        got = read(plan.KEY_ROWS.at(stage) + step.b // 16, plan.KEYS, False)
        assert np.array_equal(got, tile[:, 16 * number : 16 * number + 16])
    for number, step in enumerate(plan.values_steps()):
        half, k = divmod(number, 4)
        got = read(plan.VALUE_ROWS.at(stage) + step.b // 16, HEAD_DIM // 2, True)
        assert np.array_equal(got, tile[16 * k : 16 * k + 16, 256 * half : 256 * half + 256].T)
        # P, and slabs of Q, are stored as a slab of keys is
        assert step.a == plan.KEY_ROWS.step(16 * k)


def test_columns_of_results() -> None:
    """A lane's blocks of O are its half of a head's columns, where the products leave them."""
    found = {}
    for half, block in itertools.product(range(2), range(plan.O_COLUMNS // plan.O_BLOCK)):
        for i in range(plan.O_BLOCK):
            found[half, block * plan.O_BLOCK + i] = plan.o_dim(half, block) + i
    assert sorted(found.values()) == list(range(HEAD_DIM))
    for step in plan.values_steps():
        first = step.b // (4 * plan.SLAB_BYTES) * (HEAD_DIM // 2)
        for column in range(HEAD_DIM // 2):
            _, lane, place = umma.result_place("ws64", HEAD_DIM // 2, 5, column)
            assert found[lane // 64, step.d + place] == first + column


def test_least_times() -> None:
    from perf.roofline import B200, bound

    (work,) = plan.work()
    clocks = bound(work)
    assert (round(clocks.hbm), clocks.mma, clocks.smem, clocks.binding) == (1279, 1024, 2304, "shared memory")
    assert B200.smem == 128
