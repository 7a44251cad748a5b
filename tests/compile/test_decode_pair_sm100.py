# SPDX-License-Identifier: Apache-2.0
"""Blackwell's decode kernel for pairs of blocks: what ptxas makes of it, and its plan. Needs CuTe DSL, no GPU."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from cute_kernels.dsl import ptx as instructions
from cute_kernels.dsl import umma
from cute_kernels.formats import HEAD_DIM, NOPE_DIM
from cute_kernels.isa_probes import meaning, products
from cute_kernels.sparse_mla.blackwell import decode as single
from cute_kernels.sparse_mla.blackwell import decode_2cta as plan
from cute_kernels.sparse_mla.blackwell.decode import HEADS, KEYS, SLAB, SLAB_BYTES, THREADS
from cute_kernels.sparse_mla.blackwell.decode_2cta import BlackwellPairDecodeKey
from tests.compile.questions import constants
from tests.compile.reports import check_fits, compile_report
from tests.compile.test_decode_sm100 import check_shared_memory
from tests.compile.test_decode_small_heads import banks

KEYS_TO_COMPILE = [BlackwellPairDecodeKey("sm_100a", "listed", False), BlackwellPairDecodeKey("sm_100a", "dense", True)]


@pytest.mark.parametrize("key", KEYS_TO_COMPILE, ids=str)
def test_compiles(key: BlackwellPairDecodeKey) -> None:
    report = check_fits(key, THREADS)
    assert report.smem == key.smem_bytes
    # S is started in two places
    count = 2 * len([*plan.scores_steps()]) + len([*plan.values_steps()])
    assert report.in_ptx.count(r"tcgen05\.mma\.cta_group::2\.kind::f16") == count
    assert report.instructions["tcgen05.mma"] == count
    gathers = report.in_ptx.findall(r"tile::gather4\S*bytes(\.cta_group::2)? ")
    assert Counter(gathers) == {"": KEYS // single.GATHERED, ".cta_group::2": KEYS // single.GATHERED}
    conversions = 2 * plan.SLABS * 8 if instructions.HAS_BF16_OF_E4M3 else 0
    assert report.in_ptx.count(r"cvt\.rn\.bf16x2\.e4m3x2") == conversions
    assert report.in_ptx.count(r"tcgen05\.alloc\.cta_group::2\S+ \[\S+\], 512;") == 1
    assert not report.in_ptx.has(r"cta_group::1")
    assert report.in_ptx.count(r"tcgen05\.commit\S+multicast::cluster\.b64 \[\S+\], m;") == 3
    assert report.in_ptx.count(r"mov\.b16 m, 3;") == 3
    assert not report.in_ptx.has(r"st\.local|ld\.local|setmaxnreg")
    if report.in_sass is not None:
        assert report.in_sass.count(r"UTCHMMA\.2CTA") == count
        assert report.in_sass.count(r"UTMALDG\.2D\.GATHER4") == 2 * KEYS // single.GATHERED


def test_barriers_are_those_of_the_plan() -> None:
    ptx = compile_report(KEYS_TO_COMPILE[0]).in_ptx
    rank = ptx.findall(r"mov\.u32 (%r\d+), %cluster_ctarank;")[0]
    (readers,) = ptx.findall(rf"sub\.s32\s+(%r\d+), (\d+), {rank};")
    other = {readers[0]: f"{readers[1]} less the rank"}
    arrivals = [other.get(n, n) for n in ptx.ask(constants, r"mbarrier\.init\S+\s+\[\S+\], (%r\d+);")]
    rings = ((plan.SLOTS, 1, "11 less the rank"), (plan.FP8_STAGES, 1, 4), (plan.STAGES, 2 * 4 + 1, 1))
    want = [str(count) for depth, fill, empty in rings for _ in range(depth) for count in (fill, empty)]
    want += ["32"] * plan.SLOTS + ["1"] * single.BUFFERS + ["8"] * single.BUFFERS + ["8"]
    assert arrivals == want
    assert len(want) == plan.BARRIERS
    expected = [int(number) for number in ptx.ask(constants, r"arrive\.expect_tx\S+ \S+, \[\S+\], (%r\d+);")]
    assert sorted(expected) == sorted([plan.CODES_BYTES, plan.ROPE_BYTES])
    # queries in two places, weights, stages; the products' warp waits for queries, weights, and stages in two places
    assert ptx.count(r"mbarrier\.arrive\.shared::cluster") == 4
    assert ptx.count(r"try_wait\.parity\.acquire\.cluster") == 4


# ---- the plan --------------------------------------------------------------------------------------------------------


def test_shared_memory() -> None:
    check_shared_memory(plan)


def test_tensor_memory() -> None:
    columns = np.zeros(meaning.COLUMNS, int)
    for step in plan.values_steps():
        columns[step.d : step.d + umma.result_columns("pair128", plan.SIDE)] |= 1
    for step in plan.scores_steps():
        columns[step.a : step.a + umma.K_BYTES // 4] += 2
        assert step.d + umma.result_columns("pair128", plan.BLOCKS * KEYS) == step.d + plan.S_COLUMNS
    for buffer in range(single.BUFFERS):
        first = plan.S_COLUMN + buffer * plan.S_COLUMNS
        columns[first : first + plan.S_COLUMNS] += 4
    assert np.array_equal(np.unique(columns), [1, 2, 4])


def tile_stores(rank: int) -> list[list[tuple[int, int, int, list[int]]]]:
    """Of eight threads at a time (slab, code read, address read in raw, addresses written in kv): the front's accesses,
    in order."""
    found = []
    for step, half, first in itertools.product(range(plan.SLABS), range(2), range(0, 128, 8)):
        eight = []
        for thread in range(first, first + 8):
            row, member = thread // 4 + 32 * half, thread % 4
            slab = step ^ (row & 1)
            if rank * plan.SLABS + slab < single.LAST_SLAB:
                source = plan.raw_offset(0, row) + plan.code_offset(rank, slab) + member * 16
                code = 4 * plan.first_column(rank) + source - plan.raw_offset(0, row)
                eight.append((slab, code, source, [plan.stage_offset(0, slab, row, 2 * member + i) for i in range(2)]))
        found.append(eight)
    return found


@pytest.mark.parametrize("rank", range(plan.BLOCKS))
def test_the_front_and_the_gathers_fill_a_tile(rank: int) -> None:
    written = np.zeros(plan.STAGE_BYTES, int)
    for eight in tile_stores(rank):
        for slab, code, source, places in eight:
            assert code // SLAB == rank * plan.SLABS + slab, "a slab's columns are its codes"
            assert source % plan.CODES + 16 <= plan.CODES
            for place in places:
                written[place : place + 16] += 1
    if rank == 1:
        for row in range(0, KEYS, single.GATHERED):
            first = plan.rope_offset(0, row)
            written[umma.swizzled(first + np.arange(single.GATHERED * 128), 128)] += 1
    assert (written == 1).all()
    assert 4 * plan.first_column(rank) + plan.CODES <= NOPE_DIM


def test_no_bank_conflicts() -> None:
    for eight in [*tile_stores(0), *tile_stores(1)]:
        assert len(banks([source for _, _, source, _ in eight], 16)) == 4 * len(eight)
        for i in range(2):
            assert len(banks([places[i] for *_, places in eight], 16)) == 4 * len(eight)
    for pair, half, first in itertools.product(range(2), range(2), range(0, 32, 8)):
        assert len(banks([plan.trade_offset(pair, half, first + i) for i in range(8)], 16)) == 32


def test_products() -> None:
    """Of whole numbers, through the descriptors: S of 128 heads in two parts a lane, and P V."""
    rng = np.random.default_rng(1)
    tile = rng.integers(-4, 5, (KEYS, HEAD_DIM)).astype(np.float32)
    q = rng.integers(-4, 5, (2 * HEADS, HEAD_DIM)).astype(np.float32)
    p = rng.integers(-4, 5, (2 * HEADS, KEYS)).astype(np.float32)
    stage, p_at = plan.STAGE_BYTES, 2 * plan.STAGE_BYTES

    def bf16(numbers: np.ndarray) -> np.ndarray:
        return (np.ascontiguousarray(numbers).view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)

    blocks = []
    for rank in range(plan.BLOCKS):
        shared = np.zeros(p_at + SLAB_BYTES, np.uint8)
        tensor = np.zeros((meaning.LANES, meaning.COLUMNS), np.uint32)
        mine = slice(rank * HEADS, rank * HEADS + HEADS)
        for row, chunk in itertools.product(range(KEYS), range(plan.SIDE // 8)):
            place, column = plan.stage_offset(1, chunk // 8, row, chunk % 8), rank * plan.SIDE + 8 * chunk
            shared[place : place + 16] = bf16(tile[row, column : column + 8])
        for head, chunk in itertools.product(range(HEADS), range(KEYS // 8)):
            place = p_at + single.chunk_offset(head, chunk)
            shared[place : place + 16] = bf16(p[mine][head, 8 * chunk : 8 * chunk + 8])
        for half in range(2):
            words = bf16(q[mine, half * plan.SIDE : half * plan.SIDE + plan.SIDE]).view(np.uint32)
            tensor[half * HEADS : half * HEADS + HEADS, plan.Q_COLUMN : plan.Q_COLUMN + plan.SIDE // 2] = words
        blocks.append(meaning.Block(shared, tensor))
    for step in plan.scores_steps():
        b = single.KEY_ROWS.at(stage) + step.b // 16
        how = {"a_in_tensor_memory": True}
        meaning.multiply(blocks, step.d, step.a, b, plan.SCORES_INSTRUCTION, not step.is_first, **how)
    for step in plan.values_steps():
        a, b = single.KEY_ROWS.at(p_at) + step.a // 16, single.VALUE_ROWS.at(stage) + step.b // 16
        meaning.multiply(blocks, step.d, a, b, plan.VALUES_INSTRUCTION, not step.is_first)
    for rank, half in itertools.product(range(plan.BLOCKS), range(2)):
        mine, lanes = slice(rank * HEADS, rank * HEADS + HEADS), slice(half * HEADS, half * HEADS + HEADS)
        side = slice(half * plan.SIDE, half * plan.SIDE + plan.SIDE)
        found = blocks[rank].tensor[lanes].view(np.float32)
        assert np.array_equal(found[:, plan.S_COLUMN : plan.S_COLUMN + KEYS], q[mine, side] @ tile[:, side].T)
        whole = p[mine] @ tile
        for block in range(single.O_COLUMNS // single.O_BLOCK):
            first, column = plan.o_dim(half, block), block * single.O_BLOCK
            want = whole[:, first : first + single.O_BLOCK]
            assert np.array_equal(found[:, column : column + single.O_BLOCK], want)


def test_facts_try_these_products() -> None:
    """verify's experiments have the shapes, operands and majors that the kernel uses."""
    tried = {step.instruction for name in ("pair128_rows_of_two_halves", "pair128_mn_major") for step in
             products.NAMES[name].steps}  # fmt: skip
    assert tried == {plan.SCORES_INSTRUCTION, plan.VALUES_INSTRUCTION}


def test_least_times() -> None:
    from perf.roofline import bound

    (work,) = plan.work()
    clocks = bound(work)
    assert (round(clocks.hbm), clocks.mma, clocks.smem, clocks.binding) == (640, 1024, 1472, "shared memory")
