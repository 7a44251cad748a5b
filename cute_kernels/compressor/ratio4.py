# SPDX-License-Identifier: Apache-2.0
"""The kernels of ratio 4: a team of warps per entry, four columns a lane, all eight window rows in flight at once.

    window of the entry that a token at position p closes      columns, of kv and of score
    rows 0 .. 3    p - 7 .. p - 4, the previous group          the first halves
    rows 4 .. 7    p - 3 .. p, the own group                   the second halves

A half row belongs to one entry, and the team of that entry has it in registers: there the fused kernel saves it, so
that memory sees a row read once and written once. What belongs to no entry of the step - first halves of a request's
last group, groups that nothing closes - is copied afterwards.

Four warps are a team for 512 columns, one for 128. A team takes some consecutive tokens; how many changes no bit.

Lane l of a warp knows token first - BEHIND + l: the tokens its team takes and their neighbours. One round of loads
tells everything about all of them, other lanes' shares come by shuffles.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr, range_constexpr
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from cute_kernels.compressor import epilogue
from cute_kernels.compressor.call import CompressCall, FusedCall
from cute_kernels.dsl import convert, ptx, reduce
from cute_kernels.dsl.tensor import address, length, stride_bytes
from cute_kernels.formats import FORMATS, FP8_DS_MLA, INDEXER_FP8, INDEXER_MXFP4, PLAIN_BF16, PLAIN_FP8
from cute_kernels.models import ModelConfig
from cute_kernels.numerics import E2M1_ROUNDINGS
from cute_kernels.runtime.arch import arch_number, arch_of
from cute_kernels.runtime.compile import KernelKey
from cute_kernels.runtime.compile import launch as launch_key

# ---- config

RATIO = 4
WINDOW = 2 * RATIO

BEHIND = WINDOW - 1
"""Tokens before a team's first that its windows reach back to. As many after its last say whether a later entry of the
step covers a row."""

MOST_TOKENS = 32 - 2 * BEHIND
"""That a team can take."""

_LAST_INT32 = 0x7FFFFFFF

WARPS = 4
"""Per CTA: one team for 512 columns, four for 128."""

OWN_ROW = WARPS * 32 * 16
"""Bytes of shared memory from one row of a thread's own columns to the next."""

LARGEST_INDEX = 2**31 - 16
"""Rows of pools, block tables and rotary tables are numbered below this: 32 bits hold small sums with them."""


# ---- shared memory


class Own(NamedTuple):
    """Where a thread keeps its columns of the bias of eight window rows, and of the four halves of one token's row.

    What a thread copies there it alone reads: it waits for its own copies, and for no other thread.
    """

    bias: Any
    row: Any


def allocate_own() -> Own:
    """In a CTA's shared memory, for the calling thread."""
    thread, _, _ = cute.arch.thread_idx()
    return Own(
        cute.arch.alloc_smem(Int32, WARPS * 32 * 4 * WINDOW, 16).toint() + thread * 16,
        cute.arch.alloc_smem(Int32, WARPS * 32 * 4 * 4, 16).toint() + thread * 16,
    )


# ---- tokens and their rows


class Tokens(NamedTuple):
    """Addresses of what is known about the tokens of the step, their number, and how many a team takes."""

    slots: Int64
    entry_slots: Int64
    positions: Int64
    requests: Int64
    number: Int32
    per_team: Int32


class State(NamedTuple):
    """The state cache and its block table, int32 [requests, columns]. Strides in bytes.

    cycle   columns of the table, which come round again in the kernel for cyclic tables
    """

    pool: Int64
    page_stride: Int64
    pages: Int32
    rows: Int32
    page_rows: cute.FastDivmodDivisorV2
    table: Int64
    table_stride: Int64
    requests: Int32
    columns: Int32
    cycle: cute.FastDivmodDivisorV2

    def row(self, page: Any, row: Any, row_bytes: int) -> Any:
        """Address of a row of a page."""
        return self.pool + Int64(page) * self.page_stride + Int64(row) * row_bytes


class Step(NamedTuple):
    """What only the fused kernel reads: projections, bias, first tokens of the requests, and what is to be saved.

    min_restart is an address or 0, keep_every a number of tokens or 0, save_all 0 or 1. Strides in bytes.
    """

    kv_score: Int64
    row_stride: Int64
    ape: Int64
    ape_stride: Int64
    starts: Int64
    min_restart: Int64
    keep_every: Int64
    save_all: Int32


class Known(NamedTuple):
    """A lane's token.

    position     negative ones and those beyond int32 are brought to one near zero or near the end with the same phase
    first        first token of its request in this step, in the fused kernel
    target       where its state is saved, if it is
    """

    token: Any
    position: Any
    request: Any
    entry_slot: Any
    closes: Any
    first: Any
    is_saved: Any
    target: Any

    def of(self, lane: Any) -> Known:
        """What another lane knows. All lanes must call."""
        return Known(*(cute.arch.shuffle_sync(value, lane) for value in self))


class Loads(NamedTuple):
    """What `load_token` has loaded and `resolve_row` needs: position in full, slot or -1, what starts and min_restart
    say."""

    position: Any
    slot: Any
    first: Any
    restart: Any


@cute.jit
def load_token(
    tokens: Tokens, state: State, step: Step, cache: epilogue.Cache, token: Any, fused: bool
) -> tuple[Known, Loads]:
    """A lane's token without what `resolve_row` adds."""
    is_token = (token >= 0) & (token < tokens.number)
    source = Int64(token if is_token else Int32(0))
    position = ptx.load_global_s64_in_order(tokens.positions + source * 8)
    slot = ptx.load_global_s64_in_order(tokens.slots + source * 8)
    entry_slot = ptx.load_global_s64_in_order(tokens.entry_slots + source * 8)
    request = ptx.load_global_s32_in_order(tokens.requests + source * 4)
    has_request = (request >= 0) & (request < state.requests)
    first, restart = Int32(0), Int32(0)
    if const_expr(fused):
        # Both always load something, as a load with a predicate would be moved down to where it is used.
        offset = Int64(request if has_request else Int32(0)) * 4
        first = ptx.load_global_s32_in_order(step.starts + offset)
        restart = ptx.load_global_s32_in_order((step.min_restart if step.min_restart != 0 else step.starts) + offset)
    has_slot = is_token & (slot >= 0) & (slot < Int64(state.rows))
    has_entry_slot = (entry_slot >= 0) & (entry_slot < Int64(cache.capacity))
    phase = Int32(position) & (RATIO - 1)
    near = Int32(position)
    if position > _LAST_INT32:
        near = Int32(_LAST_INT32 - RATIO + 1)
    if position < 0:
        near = Int32(-RATIO)
    near = (near & -RATIO) | phase
    closes = has_slot & has_entry_slot & has_request & (near >= 0) & (phase == RATIO - 1)
    known = Known(
        token,
        near,
        request if has_request else Int32(-1),
        Int32(entry_slot if has_entry_slot else Int64(0)),
        Int32(1) if closes else Int32(0),
        Int32(0),
        Int32(0),
        Int64(0),
    )
    return known, Loads(position, Int32(slot) if has_slot else Int32(-1), first, restart)


@cute.jit
def resolve_row(state: State, step: Step, known: Known, loads: Loads, row_bytes: int) -> Known:
    """`known` with what the fused kernel needs besides."""
    has_request = known.request >= 0
    # what does not wait for the last loads comes first
    page, row = divmod(cutlass.max(loads.slot, 0), state.page_rows)
    target = state.row(page, row, row_bytes)
    is_kept = Boolean(False)
    if step.keep_every > 0:
        rest = loads.position % step.keep_every
        rest = rest + step.keep_every if rest < 0 else rest
        is_kept = rest >= step.keep_every - RATIO
    # in 64 bits: a start may be any number
    first_position = loads.position - (Int64(known.token) - Int64(loads.first))
    oldest = Int64(loads.restart) if step.min_restart != 0 else first_position
    is_needed = has_request & (is_kept | (loads.position >= (oldest & -RATIO) - RATIO))
    is_saved = (loads.slot >= 0) & ((step.save_all != 0) | is_needed)
    return known._replace(first=cutlass.max(loads.first, 0), is_saved=Int32(1) if is_saved else Int32(0), target=target)


@cute.jit
def is_covered(known: Known, distance: Any, group: int) -> Any:
    """Whether an entry of the step has this lane's row in its window: `group` 0 its own group's, 1 the next one's.

    distance   from the token to its own group's last
    """
    away = distance + group * RATIO
    other = known.of(cute.arch.lane_idx() + away)
    return (other.closes != 0) & (known.token >= other.first) & (other.position >= away)


def lowest_bit(mask: Any) -> Any:
    """Number of the lowest bit that is set."""
    return cute.arch.popc((mask & -mask) - 1)


# ---- kernel: softmax-weighted mean of a window, epilogue


class C4Kernel:
    """Entry point of both kernels; its arguments are those of `Tokens`, `State`, `Step` and `entry.Cache`, use_pdl and
    the stream.

    early   what describes the step is read before the wait for the kernel ahead, which does not write it
    cyclic  columns of the block table come round again
    raw     the state cache has scores without their bias"""

    def __init__(
        self,
        name: str,
        fused: bool,
        through_l1: bool,
        store: epilogue.EntryStore,
        has_dependency: bool,
        early: bool = False,
        cyclic: bool = False,
        raw: bool = False,
    ) -> None:
        self.name = name
        self.fused = fused
        self.through_l1 = through_l1
        self.store = store
        self.has_dependency = has_dependency
        self.early = early and has_dependency and fused
        self.cyclic = cyclic
        self.raw = raw
        self.lanes = store.dim // 4
        self.team = self.lanes // 32
        self.teams = WARPS // self.team
        # in bytes: half of a row's kv columns, which is half of its score columns too
        self.half = store.dim * 4
        self.behind = BEHIND if fused else 0

    @cute.jit
    def __call__(
        self,
        slots: cute.Tensor,
        entry_slots: Int64,
        positions: Int64,
        requests: Int64,
        per_team: Int32,
        block_table: cute.Tensor,
        state_pool: Int64,
        state_page_stride: Int64,
        state_pages: Int32,
        state_page_rows: Int32,
        kv_score: Int64,
        row_stride: Int64,
        ape: Int64,
        ape_stride: Int64,
        starts: Int64,
        min_restart: Int64,
        keep_every: Int64,
        save_all: Int32,
        pool: Int64,
        page_stride: Int64,
        page_rows: Int32,
        capacity: Int32,
        weight: Int64,
        table: Int64,
        table_stride: Int64,
        table_rows: Int32,
        fp8_scale: Int64,
        eps: Float32,
        use_pdl: Boolean,
        stream: cuda.CUstream,
    ) -> None:
        self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        count = length(slots, 0)
        tokens = Tokens(address(slots), entry_slots, positions, requests, count, per_team)
        state = State(
            state_pool,
            state_page_stride,
            state_pages,
            state_pages * state_page_rows,
            cute.fast_divmod_create_divisor_v2(state_page_rows),
            address(block_table),
            stride_bytes(block_table, 0),
            length(block_table, 0),
            length(block_table, 1),
            cute.fast_divmod_create_divisor_v2(cutlass.max(length(block_table, 1), 1)),
        )
        step = Step(kv_score, row_stride, ape, ape_stride, starts, min_restart, keep_every, save_all)
        cache = epilogue.make_cache(
            pool, page_stride, page_rows, capacity, weight, table, table_stride, table_rows, fp8_scale, eps
        )
        ctas = cute.ceil_div(count, per_team * self.teams)
        self.kernel(tokens, state, step, cache).launch(
            grid=[ctas, 1, 1],
            block=[WARPS * 32, 1, 1],
            stream=stream,
            use_pdl=use_pdl if const_expr(self.has_dependency) else False,
        )

    @cute.kernel
    def kernel(self, tokens: Tokens, state: State, step: Step, cache: epilogue.Cache) -> None:
        cta, _, _ = cute.arch.block_idx()
        sums = cute.arch.alloc_smem(Float32, 2 * WARPS, 8 * WARPS).toint()
        own = Own(Int32(0), Int32(0))
        if const_expr(self.fused):
            own = allocate_own()
        self.run(cta, tokens, state, step, cache, sums, own)

    @cute.jit
    def run(
        self, cta: Int32, tokens: Tokens, state: State, step: Step, cache: epilogue.Cache, sums: Any, own: Own
    ) -> None:
        """What CTA number `CTA` does. sums, own: shared memory."""
        thread, _, _ = cute.arch.thread_idx()
        lane = thread % 32
        team = cute.arch.make_warp_uniform(thread // self.lanes)
        column = thread % self.lanes * 4
        first_token = (cta * self.teams + team) * tokens.per_team
        is_alone = tokens.per_team == 1
        # the bias is a constant of the model: it comes while the kernel ahead runs
        if const_expr(self.fused):
            self.copy_bias_async(step, own, column)
        own_token = cutlass.min(first_token, tokens.number - 1)
        if const_expr(self.early):
            cute.arch.griddepcontrol_launch_dependents()
        elif const_expr(self.has_dependency):
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
        # rows of the step are what the kernel ahead has written
        copies_now = self.fused and not self.early
        if const_expr(copies_now):
            self.copy_own_async(step, own, own_token, column, is_alone)
        known, loads = load_token(tokens, state, step, cache, first_token - self.behind + lane, self.fused)
        is_own = (lane >= self.behind) & (lane < self.behind + tokens.per_team)
        pending = cute.arch.vote_ballot_sync(is_own & (known.closes != 0))
        source = lowest_bit(pending)
        # pages of the first entry are looked up at once, although rows of the step need none
        page, row = self.load_page(state, known, source, pending != 0)
        if const_expr(self.fused):
            known = resolve_row(state, step, known, loads, 4 * self.half)
            if const_expr(self.early):
                cute.arch.griddepcontrol_wait()
                self.copy_own_async(step, own, own_token, column, is_alone)
            cute.arch.cp_async_wait_group(0)
        while pending != 0:
            self.close(state, step, cache, known, source, page, row, column, own, sums)
            pending = pending & (pending - 1)
            source = lowest_bit(pending)
            page, row = self.load_page(state, known, source, pending != 0)
            # the sums of one entry and the next lie apart, so that one barrier per entry is enough
            sums = sums ^ (4 * WARPS)
        if const_expr(self.fused):
            to_end = (RATIO - 1) - (known.position & (RATIO - 1))
            is_left = is_own & (known.is_saved != 0)
            second = cute.arch.vote_ballot_sync(is_left & ~is_covered(known, to_end, 0))
            first = cute.arch.vote_ballot_sync(is_left & ~is_covered(known, to_end, 1))
            pending = first | second
            while pending != 0:
                source = lowest_bit(pending)
                pending = pending & (pending - 1)
                has_halves = (first >> source) & 1 != 0, (second >> source) & 1 != 0
                mine = known.of(source)
                if ~is_alone:
                    self.copy_row_async(step, own, mine.token, column)
                    cute.arch.cp_async_wait_group(0)
                self.copy(mine, has_halves, column, own)

    @cute.jit
    def copy_bias_async(self, step: Step, own: Own, column: Any) -> None:
        """A lane's columns of the bias of each window row."""
        for i in range_constexpr(WINDOW):
            source = step.ape + (i % RATIO) * step.ape_stride + (i // RATIO) * self.half + Int64(column * 4)
            ptx.copy_async_128(own.bias + i * OWN_ROW, source)
        cute.arch.cp_async_commit_group()

    @cute.jit
    def copy_own_async(self, step: Step, own: Own, token: Any, column: Any, is_alone: Any) -> None:
        """The row of a team's only token."""
        if is_alone:
            self.copy_row_async(step, own, token, column)

    @cute.jit
    def copy_row_async(self, step: Step, own: Own, token: Any, column: Any) -> None:
        """A lane's columns of a token's row: two halves of kv, two of score."""
        source = step.kv_score + Int64(token) * step.row_stride + Int64(column * 4)
        for i in range_constexpr(4):
            ptx.copy_async_128(own.row + i * OWN_ROW, source + i * self.half)
        cute.arch.cp_async_commit_group()

    @cute.jit
    def load_page(self, state: State, lanes: Known, source: Any, is_wanted: Any) -> tuple[Any, Any]:
        """Page, and row of the page, of one row of the window of lane `source`'s token; eight lanes see to one each."""
        position = cute.arch.shuffle_sync(lanes.position, source) - (WINDOW - 1) + cute.arch.lane_idx() % WINDOW
        column, row = divmod(cutlass.max(position, 0), state.page_rows)
        if const_expr(self.cyclic):
            _, column = divmod(column, state.cycle)
        is_inside = is_wanted & (position >= 0) & (column < state.columns)
        # a token that closes an entry has a request
        start = state.table + Int64(cute.arch.shuffle_sync(lanes.request, source)) * state.table_stride
        return ptx.load_global_s32_again_where(is_inside, start + Int64(column) * 4), row

    @cute.jit
    def close(
        self,
        state: State,
        step: Step,
        cache: epilogue.Cache,
        lanes: Known,
        source: Any,
        page: Any,
        row: Any,
        column: Any,
        own: Own,
        sums: Any,
    ) -> None:
        """Compute and store the entry of lane `source`'s token, and save what its window has of the step."""
        shuffle, ballot = cute.arch.shuffle_sync, cute.arch.vote_ballot_sync
        known = lanes.of(source)
        i = cute.arch.lane_idx() % WINDOW
        takes_part = known.position - (WINDOW - 1) + i >= 0
        is_new, start = takes_part & Boolean(False), Int64(0)
        if const_expr(self.fused):
            token = known.token - (WINDOW - 1) + i
            is_new = takes_part & (token >= known.first)
            start = step.kv_score + Int64(token) * step.row_stride
        is_old = takes_part & ~is_new
        has_page = takes_part & Boolean(False)
        # where all rows are the step's, nothing waits for the pages
        if ballot(is_old) != 0:
            has_page = is_old & (page >= 0) & (page < state.pages)
            start = state.row(page, row, 4 * self.half) if has_page else start
        is_there = is_new | has_page
        # a row that is nowhere is read like the last one, and not used
        last = shuffle(start, WINDOW - 1)
        start = start if is_there else last
        has_last = (ballot(is_there) >> (WINDOW - 1)) & 1 != 0
        is_readable = ballot(is_old & ~has_page) == 0
        taking, new = ballot(takes_part), ballot(is_new)
        saved = Int32(0)
        if const_expr(self.fused):
            saved = new & (ballot(lanes.is_saved != 0) >> (source - BEHIND)) & (2**WINDOW - 1)
        if has_last:
            load = ptx.load_global_128_cached_in_order if self.through_l1 else ptx.load_global_128_in_order
            values, scores = [], []
            for r in range_constexpr(WINDOW):
                run = shuffle(start, r) + Int64(column * 4 + r // RATIO * self.half)
                values.append(load(run))
                scores.append(load(run + 2 * self.half))
            loaded = self.store.load(cache, column, Int64(known.position - (RATIO - 1)))
            if const_expr(self.fused):
                # the assembler would add the first biases, and wait for their scores, before all loads are issued
                cute.arch.sync_warp()
                if const_expr(not self.raw):
                    for r in range_constexpr(WINDOW):
                        biased = self.add(scores[r], ptx.load_shared_128(own.bias + r * OWN_ROW))
                        scores[r] = self.choose((new >> r) & 1 != 0, biased, scores[r])
                if saved != 0:
                    for r in range_constexpr(WINDOW):
                        target = shuffle(lanes.target, source - BEHIND + r)
                        target += Int64(column * 4 + r // RATIO * self.half)
                        is_saved = (saved >> r) & 1 != 0
                        ptx.store_global_128(target, values[r], is_saved)
                        ptx.store_global_128(target + 2 * self.half, scores[r], is_saved)
                if const_expr(self.raw):
                    scores = [self.add(s, ptx.load_shared_128(own.bias + r * OWN_ROW)) for r, s in enumerate(scores)]
            nothing = (Int32(0),) * 4, (Float32(float("-inf")).bitcast(Int32),) * 4
            for r in range_constexpr(RATIO):
                is_part = (taking >> r) & 1 != 0
                values[r] = self.choose(is_part, values[r], nothing[0])
                scores[r] = self.choose(is_part, scores[r], nothing[1])
            x = [self.mean(values, scores, c) for c in range(4)]
            squares = reduce.lanes_sum(reduce.square_sum(x))
            if const_expr(self.team > 1):
                squares = self.sum_of_team(squares, sums)
            slot = Int64(known.entry_slot) if is_readable else Int64(-1)
            self.store.finish(cache, loaded, column, x, self.store.factor(cache, squares), slot)
        elif const_expr(self.team > 1):
            # the entries before and after this one use the same sums
            cute.arch.barrier()

    def mean(self, values: Any, scores: Any, c: int) -> Any:
        """A channel's mean over the window, weighted by the softmax of its scores. What is fused is said, here and in
        the other sums: the compiler might choose differently in kernels that must agree."""
        s = [words[c].bitcast(Float32) for words in scores]
        largest = s[0]
        for score in s[1:]:
            largest = ptx.max_f32(largest, score)
        weights = [ptx.exp2((score - largest) * Float32(ptx.LOG2_E)) for score in s]
        total, weighted = weights[0], ptx.mul_rn(weights[0], values[0][c].bitcast(Float32))
        for weight, words in zip(weights[1:], values[1:], strict=True):
            total = ptx.add_rn(total, weight)
            weighted = ptx.fma_rn(weight, words[c].bitcast(Float32), weighted)
        return weighted * ptx.reciprocal(total)

    @cute.jit
    def sum_of_team(self, mine: Any, sums: Any) -> Any:
        """Sum over the warps of the CTA, each with its own in all lanes; every thread of the CTA must call."""
        warp = cute.arch.warp_idx()
        ptx.store_shared_f32(sums + warp * 4, mine, cute.arch.lane_idx() == 0)
        cute.arch.barrier()
        a, b, c, d = (word.bitcast(Float32) for word in ptx.load_shared_128(sums))
        return ptx.add_rn(ptx.add_rn(a, b), ptx.add_rn(c, d))

    @cute.jit
    def copy(self, known: Known, has_halves: Any, column: Any, own: Own) -> None:
        """Save halves of the row that was fetched last."""
        target = known.target + Int64(column * 4)
        phase = known.position & (RATIO - 1)
        for h in range_constexpr(2):
            value, score = ptx.load_shared_128(own.row + h * OWN_ROW), ptx.load_shared_128(own.row + (2 + h) * OWN_ROW)
            if const_expr(not self.raw):
                score = self.add(score, ptx.load_shared_128(own.bias + (phase + h * RATIO) * OWN_ROW))
            ptx.store_global_128(target + h * self.half, value, has_halves[h])
            ptx.store_global_128(target + (2 + h) * self.half, score, has_halves[h])

    def add(self, a: Any, b: Any) -> Any:
        """fp32 sums, as words."""
        return tuple((x.bitcast(Float32) + y.bitcast(Float32)).bitcast(Int32) for x, y in zip(a, b, strict=True))

    @cute.jit
    def choose(self, condition: Any, a: Any, b: Any) -> Any:
        return (
            a[0] if condition else b[0],
            a[1] if condition else b[1],
            a[2] if condition else b[2],
            a[3] if condition else b[3],
        )


# ---- key


@dataclass(frozen=True)
class C4Key(KernelKey):
    """What distinguishes one compiled kernel from another.

    fused        whether rows of the step come from its projections, and are saved
    through_l1   whether window rows may go through L1: faster where all of many rows are saved, slower elsewhere
    cyclic       whether columns of the block table come round again
    raw          whether it has scores without their bias
    others       see entry.EntryStore
    """

    kernel_name: ClassVar[str] = "compressor.ratio4"
    tuning: ClassVar[tuple[str, ...]] = ("through_l1",)
    fused: bool
    kv_format: str
    fp32_weight: bool = False
    e2m1_rounding: str = ""
    index_hadamard: bool = False
    through_l1: bool = False
    cyclic: bool = False
    raw: bool = False

    @property
    def name(self) -> str:
        """The kernel's in a profile."""
        op = "fused_compress_c4" if self.fused else "compress_c4"
        options = (
            self.kv_format.replace("/", "_"),
            "fp32w" * self.fp32_weight,
            self.e2m1_rounding,
            "l1" * self.through_l1,
            "cyclic" * self.cyclic,
            "raw" * self.raw,
        )
        return "_".join(filter(None, (op, *options, "hadamard" * self.index_hadamard)))

    @property
    def instructions(self) -> tuple[str, ...]:
        saving = ("st.global.128",) if self.fused else ()
        e4m3 = convert.e4m3_instructions(self.arch) if self.kv_format in epilogue.E4M3 else ()
        e2m1 = convert.e2m1_instructions(self.arch) if self.e2m1_rounding else ()
        return ("ld.global.128", *saving, *e4m3, *e2m1)

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        slots = make_fake_tensor(Int64, (cute.sym_int(),), stride=(1,))
        table = make_fake_tensor(Int32, (cute.sym_int(), cute.sym_int()), stride=(cute.sym_int64(), 1))
        tokens = slots, Int64(0), Int64(0), Int64(0), Int32(1)
        state = table, Int64(0), Int64(0), Int32(0), Int32(1)
        step = Int64(0), Int64(0), Int64(0), Int64(0), Int64(0), Int64(0), Int64(0), Int32(0)
        stream = make_fake_stream(use_tvm_ffi_env_stream=True)
        store = epilogue.EntryStore(
            self.kv_format, self.fp32_weight, self.e2m1_rounding, self.index_hadamard, self.arch
        )
        has_dependency = arch_number(self.arch) >= ptx.DEPENDENT_LAUNCH_ARCH
        kernel = C4Kernel(
            self.name, self.fused, self.through_l1, store, has_dependency, cyclic=self.cyclic, raw=self.raw
        )
        return kernel, (*tokens, *state, *step, *epilogue.fake_numbers(), Boolean(False), stream)


def deployment_keys(config: ModelConfig, tp: int, arch: str, fused: bool) -> list[C4Key]:
    """For the entries of attention and those of the indexer, in every format and with every option of the layers, which
    fuse; one for each of the usual formats if not fused."""
    if 4 not in config.compress_ratios:
        return []
    kinds = [(fmt.id, E2M1_ROUNDINGS[0], False) for fmt in (FP8_DS_MLA, INDEXER_FP8, INDEXER_MXFP4)]
    if fused:
        kinds += [(fmt.id, E2M1_ROUNDINGS[0], False) for fmt in (PLAIN_BF16, PLAIN_FP8)]
        kinds += [(INDEXER_FP8.id, E2M1_ROUNDINGS[0], True)]
        options = [(rounding, turned) for turned in (False, True) for rounding in E2M1_ROUNDINGS]
        kinds += [(INDEXER_MXFP4.id, *option) for option in options[1:]]
    return [
        C4Key(arch, fused, **epilogue.store_for(kv_format, False, rounding, turned), through_l1=through_l1)
        for kv_format, rounding, turned in kinds
        for through_l1 in ((False, True) if fused else (False,))
    ]


def is_decode(count: int, requests: int) -> bool:
    """Whether a step has few tokens per request: their windows hardly overlap, and each of them is work of its own."""
    return count < 8 * requests


def tokens_per_team(count: int, requests: int, dim: int, most: int) -> int:
    """How many consecutive tokens, a power of two, a team of warps takes in a call with `count`.

    So few that every multiprocessor has teams, so many that their metadata are read seldom; `most` is 16 where little
    is saved and 4 elsewhere (perf/log/data/c4_3.txt).
    """
    if is_decode(count, requests):
        return 1
    return 1 << max(1, min(most, count * dim >> 18)).bit_length() - 1


@cache
def _key(
    device_index: int,
    fused: bool,
    kv_format: str,
    fp32_weight: bool,
    e2m1_rounding: str,
    index_hadamard: bool,
    through_l1: bool,
    cyclic: bool = False,
    raw: bool = False,
) -> C4Key:
    fields = epilogue.store_for(kv_format, fp32_weight, e2m1_rounding, index_hadamard)
    return C4Key(arch_of(device_index), fused, **fields, through_l1=through_l1, cyclic=cyclic, raw=raw)


# ---- launch


def _unaligned(**matrices: Any) -> str:
    """Why a matrix cannot be read 16 bytes at a time, if one cannot."""
    for name, matrix in matrices.items():
        if matrix.data_ptr() % 16 or (matrix.shape[0] > 1 and matrix.stride(0) % 4):
            where = f"address {matrix.data_ptr():#x} and strides {tuple(matrix.stride())}"
            return f"rows of {name} must be 16-byte aligned, got {where}"
    return ""


def why_not(call: CompressCall | FusedCall) -> str:
    """Why the kernel cannot take a (checked) call; empty if it can."""
    matrices = {"state_cache": call.state_cache}
    if isinstance(call, FusedCall):
        matrices |= {"kv_score": call.kv_score, "ape": call.ape}
    why = _unaligned(**matrices)
    if why:
        return why
    pages, rows, _ = call.state_cache.shape
    columns = call.block_table.shape[1]
    for name, count in (
        ("state_cache", pages * rows),
        ("block_table", columns * rows),
        ("cos_sin_cache", call.cos_sin_cache.shape[0]),
    ):
        if count >= LARGEST_INDEX:
            return f"{name} must have fewer than {LARGEST_INDEX} rows, got {count}"
    return epilogue.why_not(call.kv_cache, call.cos_sin_cache, call.rms_norm_weight, call.kv_format)


_NO_STEP = (0,) * 8
"""In place of what only the fused kernel reads."""


def launch_compress(call: CompressCall, *, per_team: int | None = None, through_l1: bool = False) -> None:
    """Run the kernel on the current stream. The keywords are what measurements change."""
    count = call.slot_mapping.shape[0]
    if count == 0:
        return
    device_index = call.slot_mapping.device.index
    fp32_weight = call.rms_norm_weight.element_size() == 4
    pages, page_rows, _ = call.state_cache.shape
    launch_key(
        _key(device_index, False, call.kv_format, fp32_weight, call.e2m1_rounding, call.index_hadamard, through_l1),
        device_index,
        call.slot_mapping,
        call.kv_slot_mapping.data_ptr(),
        call.positions.data_ptr(),
        call.token_to_req_indices.data_ptr(),
        per_team or tokens_per_team(count, call.block_table.shape[0], FORMATS[call.kv_format].dim, 4),
        call.block_table,
        call.state_cache.data_ptr(),
        call.state_cache.stride(0) * 4,
        pages,
        page_rows,
        *_NO_STEP,
        *epilogue.numbers(call.kv_cache, call.cos_sin_cache, call.rms_norm_weight, call.fp8_scale, call.rms_norm_eps),
        False,
    )


def launch_fused(call: FusedCall, *, per_team: int | None = None, through_l1: bool | None = None) -> None:
    """Run the kernel on the current stream. The keywords are what measurements change."""
    count = call.slot_mapping.shape[0]
    if count == 0:
        return
    device_index = call.slot_mapping.device.index
    requests, save_all = call.block_table.shape[0], call.persist == "all"
    if through_l1 is None:
        through_l1 = save_all and not is_decode(count, requests)
    fp32_weight = call.rms_norm_weight.element_size() == 4
    pages, page_rows, _ = call.state_cache.shape
    launch_key(
        _key(
            device_index,
            True,
            call.kv_format,
            fp32_weight,
            call.e2m1_rounding,
            call.index_hadamard,
            through_l1,
            call.cyclic_table,
            call.raw_scores,
        ),
        device_index,
        call.slot_mapping,
        call.kv_slot_mapping.data_ptr(),
        call.positions.data_ptr(),
        call.token_to_req_indices.data_ptr(),
        per_team or tokens_per_team(count, requests, FORMATS[call.kv_format].dim, 4 if save_all else 16),
        call.block_table,
        call.state_cache.data_ptr(),
        call.state_cache.stride(0) * 4,
        pages,
        page_rows,
        call.kv_score.data_ptr(),
        call.kv_score.stride(0) * 4,
        call.ape.data_ptr(),
        call.ape.stride(0) * 4,
        call.query_start_loc.data_ptr(),
        0 if call.min_restart is None else call.min_restart.data_ptr(),
        call.keep_every,
        save_all,
        *epilogue.numbers(call.kv_cache, call.cos_sin_cache, call.rms_norm_weight, call.fp8_scale, call.rms_norm_eps),
        call.use_pdl,
    )
