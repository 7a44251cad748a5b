# SPDX-License-Identifier: Apache-2.0
"""The model itself: small programs that are right, and the same with a bug each."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from tests.model import orders, ptx, trace
from tests.model.launch import pack, run_grid
from tests.model.machine import Hang
from tests.model.memory import GlobalMemory
from tests.model.ptx import Program, parse
from tests.model.replay import Replay

HEAD = """
.version 9.0
.target sm_90a
.extern .shared .align 1024 .b8 shared_memory[];
.visible .entry small( .param .u64 small_param_0, .param .u64 small_param_1 )
.reqntid 64, 1, 1
{
    .reg .pred %p<9>; .reg .b32 %r<99>; .reg .b64 %rd<9>;
    ld.param.b64 %rd1, [small_param_0];
    ld.param.b64 %rd2, [small_param_1];
    mov.b32 %r1, shared_memory;
    mov.u32 %r2, %tid.x;
    shl.b32 %r3, %r2, 2;
    add.s32 %r4, %r1, %r3;
    cvt.u64.u32 %rd3, %r3;
    add.s64 %rd4, %rd1, %rd3;
    add.s64 %rd5, %rd2, %rd3;
    setp.ne.b32 %p1, %r2, 0;
    setp.lt.u32 %p2, %r2, 32;
"""

TURNED = """
    ld.global.b32 %r5, [%rd4];
    st.shared.b32 [%r4], %r5;
    bar.sync 0;
    sub.s32 %r6, 252, %r3;
    add.s32 %r7, %r1, %r6;
    ld.shared.b32 %r8, [%r7];
    st.global.b32 [%rd5], %r8;
    ret;
}
"""
"""Each thread has what another one has loaded."""

PARTED = """
    ld.global.b32 %r5, [%rd4];
    and.b32 %r6, %r2, 1;
    setp.ne.b32 %p3, %r6, 0;
    setp.lt.u32 %p4, %r2, 8;
    @%p3 bra odd;
    add.s32 %r5, %r5, 500;
    @%p4 add.s32 %r5, %r5, 2000;
    odd:
    add.s32 %r5, %r5, 1;
    @!%p3 add.s32 %r5, %r5, 7;
    st.global.b32 [%rd5], %r5;
    ret;
}
"""
"""Threads of a warp go two ways."""

HANDED = """
    @%p1 bra made;
    mbarrier.init.shared.b64 [%r1+512], 1;
    made:
    bar.sync 0;
    @%p2 bra first;
    { .reg .pred done; again: mbarrier.try_wait.parity.shared::cta.b64 done, [%r1+512], 0; @!done bra again; }
    ld.shared.b32 %r8, [%r4+-128];
    st.global.b32 [%rd5], %r8;
    ret;
    first:
    ld.global.b32 %r5, [%rd4];
    st.shared.b32 [%r4], %r5;
    bar.warp.sync -1;
    @%p1 bra over;
    mbarrier.arrive.shared.b64 _, [%r1+512];
    over:
    st.global.b32 [%rd5], %r5;
    ret;
}
"""
"""The second warp has what the first has loaded."""

COPIED = """
    @%p1 bra made;
    mbarrier.init.shared.b64 [%r1+512], 1;
    made:
    bar.sync 0;
    st.shared.b32 [%r4], 0;
    fence.proxy.async.shared::cta;
    bar.sync 0;
    @%p1 bra asked;
    mbarrier.arrive.expect_tx.shared.b64 _, [%r1+512], 256;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%rd1], 256, [%r1+512];
    asked:
    { .reg .pred done; again: mbarrier.try_wait.parity.shared::cta.b64 done, [%r1+512], 0; @!done bra again; }
    ld.shared.b32 %r8, [%r4];
    st.global.b32 [%rd5], %r8;
    ret;
}
"""
"""A copy over what threads have written."""

PAIRED = """
    mov.u32 %r9, %ctaid.y;
    mul.wide.u32 %rd6, %r9, 256;
    add.s64 %rd5, %rd5, %rd6;
    xor.b32 %r10, %r9, 1;
    add.s32 %r11, %r1, 512;
    mapa.shared::cluster.u32 %r12, %r11, %r10;
    mapa.shared::cluster.u32 %r13, %r4, %r10;
    @%p1 bra made;
    mbarrier.init.shared.b64 [%r11], 64;
    fence.mbarrier_init.release.cluster;
    made:
    barrier.cluster.arrive;
    barrier.cluster.wait;
    ld.global.b32 %r5, [%rd4];
    mad.lo.s32 %r5, %r9, 100, %r5;
    st.shared.b32 [%r4], %r5;
    mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r12];
    {
        .reg .pred done;
        again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%r11], 0;
        @!done bra again;
    }
    and.b32 %r6, %r2, 1;
    setp.ne.b32 %p3, %r6, 0;
    @%p3 ld.shared::cluster.b32 %r8, [%r13];
    @!%p3 ld.shared.b32 %r8, [%r4];
    st.global.b32 [%rd5], %r8;
    barrier.cluster.arrive.relaxed;
    barrier.cluster.wait;
    ret;
}
"""
"""Odd threads have what those of the other block have loaded, which comes from another row of the grid."""

RELAXED = PAIRED.replace("cluster.arrive;", "cluster.arrive.relaxed;")
"""What makes an mbarrier has a fence behind it."""

TAKEN = """
    mov.u32 %r9, %ctaid.y;
    mul.wide.u32 %rd6, %r9, 256;
    add.s64 %rd5, %rd5, %rd6;
    st.global.b32 [%rd5], %r3;
    barrier.cluster.arrive.relaxed;
    barrier.cluster.wait;
    @!%p2 bra over;
    tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [%r1], 64;
    over:
    barrier.cluster.arrive;
    barrier.cluster.wait;
    @!%p2 bra freed;
    ld.shared.b32 %r5, [%r1];
    tcgen05.dealloc.cta_group::2.sync.aligned.b32 %r5, 64;
    freed:
    ret;
}
"""
"""Blocks that take tensor memory as a pair."""

SOURCE = np.arange(64, dtype=np.uint32) + 1000
OF_PARTED = SOURCE + np.where(np.arange(64) % 2, 1, np.where(np.arange(64) < 8, 2508, 508)).astype(np.uint32)


@pytest.fixture(autouse=True, params=[0, 10**9], ids=["blocks", "instructions"])
def often(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Blocks are functions at once, or never."""
    monkeypatch.setattr(ptx, "OFTEN", request.param)
    parse.cache_clear()
    yield request.param
    parse.cache_clear()


def without(body: str, line: str) -> str:
    assert line in body
    return body.replace(line, "", 1)


def run(
    body: str, seed: int = 0, source: int = 64, blocks: int = 1, **how: str
) -> tuple[Program, np.ndarray, list[str]]:
    """The program, its results, and what is wrong with its order in any of some schedules."""
    program, memory = parse(HEAD + body), GlobalMemory(1 << 16)
    out = memory.reserve(256 * blocks)
    parameters = pack(program, [memory.put(SOURCE[:source]), out])
    records, make = orders.recorder(program)
    run_grid(program, parameters, memory, blocks=blocks, cluster=blocks, rows=blocks, size=1024, seed=seed, events=make)
    steps = trace.make(records[0], **how)
    found = {problem for schedule in range(4) for problem in Replay(steps, schedule).run()}
    return program, memory.get(out, (64 * blocks,), np.uint32), sorted(found)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (TURNED, SOURCE[::-1]),
        (PARTED, OF_PARTED),
        (HANDED, np.concatenate([SOURCE[:32], SOURCE[:32]])),
        (COPIED, SOURCE),
    ],
)
def test_right_programs(body: str, expected: np.ndarray) -> None:
    for seed in range(3):
        _, out, problems = run(body, seed)
        assert (out == expected).all()
        assert problems == []


@pytest.mark.parametrize("body", [TURNED, PARTED, HANDED, COPIED, PAIRED])
def test_blocks_run_what_their_instructions_run(body: str, often: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As often, in the same order, with the same results."""
    blocks, found = 1 + (body is PAIRED), []
    for number in (often, 10**9):
        monkeypatch.setattr(ptx, "OFTEN", number)
        program, memory = parse(HEAD + body), GlobalMemory(1 << 16)
        parameters = pack(program, [memory.put(SOURCE), memory.reserve(256 * blocks)])
        shape = {"blocks": blocks, "cluster": blocks, "rows": blocks, "size": 1024}
        records, make = orders.recorder(program)
        counts = [run_grid(program, parameters, memory, seed=seed, events=make, **shape) for seed in range(4)]
        events = [(e.op, e.kind, e.lanes) for record in records for warp in record.warps for e in warp.events]
        found.append((np.array(counts).tolist(), events, memory.bytes.tobytes()))
        parse.cache_clear()
    assert found[0] == found[1]


def test_a_changed_instruction_changes_its_block(often: int) -> None:
    assert (run(TURNED)[1] == SOURCE[::-1]).all()
    program = parse(HEAD + TURNED)
    (op,) = program.find(r"^sub\.s32 %r6")
    changed, memory = program.with_op(replace(op, args=["%r6", "%r3", "0"])), GlobalMemory(1 << 16)
    for one, expected in ((changed, SOURCE), (program, SOURCE[::-1])):
        parameters = pack(one, [memory.put(SOURCE), out := memory.reserve(256)])
        run_grid(one, parameters, memory, blocks=1, size=1024)
        assert (memory.get(out, (64,), np.uint32) == expected).all()


def test_an_error_names_its_instruction(often: int) -> None:
    for line in ("ld.global.b32 %r5, [%rd4];", "st.shared.b32 [%r4], %r5;", "ld.shared.b32 %r8, [%r7];"):
        wrong = line.replace("]", "+2]")
        with pytest.raises(IndexError, match=re.escape(wrong.rstrip(";"))):
            run(TURNED.replace(line, wrong))


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (without(TURNED, "bar.sync 0;"), "not after"),
        (HANDED.replace("@!done bra again;", "", 1), "not after"),
        (without(HANDED, "bar.warp.sync -1;"), "not after"),
        (without(COPIED, "fence.proxy.async.shared::cta;"), "not after the write"),
    ],
)
def test_accesses_that_nothing_orders(body: str, problem: str) -> None:
    _, _, problems = run(body)
    assert problems
    assert all(problem in one for one in problems)


def test_pairs_of_blocks() -> None:
    rows = SOURCE + np.array([[0], [100]], np.uint32)
    for seed, body in enumerate((PAIRED, PAIRED, RELAXED)):
        _, out, problems = run(body, seed, blocks=2)
        assert (out.reshape(2, 64) == np.where(SOURCE % 2, rows[::-1], rows)).all()
        assert problems == []


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        # without a scope it is the block's
        (PAIRED.replace("arrive.release.cluster.", "arrive."), "not after the write"),
        (PAIRED.replace("parity.acquire.cluster.", "parity."), "not after the write"),
        (PAIRED.replace("arrive.release.cluster.", "arrive.relaxed.cluster."), "not after the write"),
        (RELAXED.replace("fence.mbarrier_init.release.cluster;", ""), "not after the mbarrier was made"),
        (without(PAIRED, "barrier.cluster.arrive.relaxed;\n    barrier.cluster.wait;"), "has left"),
    ],
)
def test_what_nothing_orders_between_blocks(body: str, problem: str) -> None:
    _, _, problems = run(body, blocks=2)
    assert problems
    assert all(problem in one for one in problems)


def test_a_pair_has_started_before_it_allocates() -> None:
    assert run(TAKEN, blocks=2)[2] == []
    meeting = "barrier.cluster.arrive.relaxed;\n    barrier.cluster.wait;"
    for less in ("", "bar.sync 0;"):
        _, _, problems = run(TAKEN.replace(meeting, less, 1), blocks=2)
        assert [problem.partition(":")[0] for problem in problems] == ["the pair's other block may not have started"]
    alone = TAKEN.replace(meeting, "", 1).replace("cta_group::2", "cta_group::1")
    assert run(alone, blocks=2)[2] == []


TOLD = """
    mbarrier.arrive.shared::cluster.b64 _, [%r12];
    { .reg .pred done; again: mbarrier.try_wait.parity.shared::cta.b64 done, [%r11], 0; @!done bra again; }
"""


@pytest.mark.parametrize(
    ("unscoped", "before", "problem"),
    [
        ("", "ld.shared.b32 %r8, [%r4];", "write not after the"),
        ("reads", "ld.shared.b32 %r8, [%r4];", ""),
        ("reads", "mov.b32 %r8, %r5;", "write not after the write"),
        ("reads and fenced writes", "mov.b32 %r8, %r5;", "write not after the write"),
    ],
)
def test_arrivals_without_the_clusters_scope(unscoped: str, before: str, problem: str) -> None:
    """What they hand on is that a block has read what it wrote, not what it wrote."""
    body = PAIRED.replace("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r12];", before + TOLD, 1)
    start, stop = body.index("{", body.index(TOLD) + len(TOLD)), body.index("barrier.cluster.arrive.relaxed;")
    body = body[:start] + "st.shared::cluster.b32 [%r13], %r5;\n    st.global.b32 [%rd5], %r8;\n    " + body[stop:]
    _, _, problems = run(body, blocks=2, unscoped=unscoped)
    assert bool(problems) == bool(problem)
    assert all(one.startswith(problem) for one in problems)


def test_waits_for_mbarriers_of_other_blocks() -> None:
    with pytest.raises(IndexError, match="another block"):
        run(PAIRED.replace("done, [%r11]", "done, [%r12]"), blocks=2)


@pytest.mark.parametrize(
    ("body", "error", "message"),
    [
        (without(HANDED, "mbarrier.arrive.shared.b64 _, [%r1+512];"), Hang, "mbarrier"),
        (COPIED.replace("[%r1+512], 256;", "[%r1+512], 272;"), Hang, "mbarrier"),
        (HANDED.replace("@%p1 bra over;", "", 1), AssertionError, "more arrivals"),
        (HANDED.replace("[%r1+512], 1;", "[%r1+512], 2;"), Hang, "mbarrier"),
        (TURNED.replace("[%r4], %r5", "[%r4+2], %r5"), IndexError, "misaligned"),
        (TURNED.replace("[%r4], %r5", "[%r4+900], %r5"), IndexError, "shared access"),
        (TURNED.replace("[%rd5], %r8", "[%rd5+4], %r8"), IndexError, "global write"),
        (TURNED.replace("[%rd5], %r8", "[%rd4], %r8"), IndexError, "global write"),
        (TURNED.replace("bar.sync 0;", "@%p2 bar.sync 0;"), Hang, "barrier"),
    ],
)
def test_errors(body: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        run(body)


def test_inputs_end_where_they_end() -> None:
    with pytest.raises(IndexError, match="global read"):
        run(TURNED, source=63)


def test_unknown_instructions_are_named() -> None:
    with pytest.raises(ValueError, match="unheard"):
        parse(HEAD + TURNED.replace("ret;", "unheard.of.b32 %r1; ret;"))
