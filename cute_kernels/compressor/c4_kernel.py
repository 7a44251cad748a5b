"""The kernels of ratio 4: a team of warps per entry, four columns a lane, all eight window rows in flight at once.

    window of the entry that a token at position p closes      columns, of kv and of score
    rows 0 .. 3    p - 7 .. p - 4, the previous group          the first halves
    rows 4 .. 7    p - 3 .. p, the own group                   the second halves

A half row belongs to one entry, and the team of that entry has it in registers: there the fused kernel saves it, so
that memory sees a row read once and written once. What belongs to no entry of the step - first halves of a request's
last group, groups that nothing closes - is copied afterwards.

Four warps are a team for 512 columns, one for 128. A team takes some consecutive tokens; how many changes no bit.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr, range_constexpr

from cute_kernels.compressor import entry
from cute_kernels.compressor.c4_tokens import (
    BEHIND,
    RATIO,
    WINDOW,
    Known,
    State,
    Step,
    Tokens,
    is_covered,
    look,
    lowest_bit,
    settle,
)
from cute_kernels.dsl import ptx, reduce
from cute_kernels.dsl.tensor import address, length, stride_bytes

WARPS = 4
"""Per block: one team for 512 columns, four for 128."""

OWN_ROW = WARPS * 32 * 16
"""Bytes of shared memory from one row of a thread's own columns to the next."""


class Own(NamedTuple):
    """Where a thread keeps its columns of the bias of eight window rows, and of the four halves of one token's row.

    What a thread copies there it alone reads: it waits for its own copies, and for no other thread.
    """

    bias: Any
    row: Any


def allocate_own() -> Own:
    """In a block's shared memory, for the calling thread."""
    thread, _, _ = cute.arch.thread_idx()
    return Own(
        cute.arch.alloc_smem(Int32, WARPS * 32 * 4 * WINDOW, 16).toint() + thread * 16,
        cute.arch.alloc_smem(Int32, WARPS * 32 * 4 * 4, 16).toint() + thread * 16,
    )


class C4Kernel:
    """Entry point of both kernels; its arguments are those of `Tokens`, `State`, `Step` and `entry.Cache`, use_pdl and
    the stream.

    early   what describes the step is read before the wait for the kernel ahead, which does not write it"""

    def __init__(
        self,
        name: str,
        fused: bool,
        through_l1: bool,
        store: entry.EntryStore,
        has_dependency: bool,
        early: bool = False,
    ) -> None:
        self.name = name
        self.fused = fused
        self.through_l1 = through_l1
        self.store = store
        self.has_dependency = has_dependency
        self.early = early and has_dependency and fused
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
        )
        step = Step(kv_score, row_stride, ape, ape_stride, starts, min_restart, keep_every, save_all)
        cache = entry.make_cache(
            pool, page_stride, page_rows, capacity, weight, table, table_stride, table_rows, fp8_scale, eps
        )
        blocks = cute.ceil_div(count, per_team * self.teams)
        self.kernel(tokens, state, step, cache).launch(
            grid=[blocks, 1, 1],
            block=[WARPS * 32, 1, 1],
            stream=stream,
            use_pdl=use_pdl if const_expr(self.has_dependency) else False,
        )

    @cute.kernel
    def kernel(self, tokens: Tokens, state: State, step: Step, cache: entry.Cache) -> None:
        block, _, _ = cute.arch.block_idx()
        sums = cute.arch.alloc_smem(Float32, 2 * WARPS, 8 * WARPS).toint()
        own = Own(Int32(0), Int32(0))
        if const_expr(self.fused):
            own = allocate_own()
        self.run(block, tokens, state, step, cache, sums, own)

    @cute.jit
    def run(
        self, block: Int32, tokens: Tokens, state: State, step: Step, cache: entry.Cache, sums: Any, own: Own
    ) -> None:
        """What block number `block` does. sums, own: shared memory."""
        thread, _, _ = cute.arch.thread_idx()
        lane = thread % 32
        team = cute.arch.make_warp_uniform(thread // self.lanes)
        column = thread % self.lanes * 4
        first_token = (block * self.teams + team) * tokens.per_team
        is_alone = tokens.per_team == 1
        # the bias is a constant of the model: it comes while the kernel ahead runs
        if const_expr(self.fused):
            self.fetch_bias(step, own, column)
        own_token = cutlass.min(first_token, tokens.number - 1)
        if const_expr(self.early):
            cute.arch.griddepcontrol_launch_dependents()
        elif const_expr(self.has_dependency):
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
        # rows of the step are what the kernel ahead has written
        fetches_now = self.fused and not self.early
        if const_expr(fetches_now):
            self.fetch_own(step, own, own_token, column, is_alone)
        known, loads = look(tokens, state, step, cache, first_token - self.behind + lane, self.fused)
        is_own = (lane >= self.behind) & (lane < self.behind + tokens.per_team)
        pending = cute.arch.vote_ballot_sync(is_own & (known.closes != 0))
        source = lowest_bit(pending)
        # pages of the first entry are looked up at once, although rows of the step need none
        page, row = self.find(state, known, source, pending != 0)
        if const_expr(self.fused):
            known = settle(state, step, known, loads, 4 * self.half)
            if const_expr(self.early):
                cute.arch.griddepcontrol_wait()
                self.fetch_own(step, own, own_token, column, is_alone)
            cute.arch.cp_async_wait_group(0)
        while pending != 0:
            self.close(state, step, cache, known, source, page, row, column, own, sums)
            pending = pending & (pending - 1)
            source = lowest_bit(pending)
            page, row = self.find(state, known, source, pending != 0)
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
                    self.fetch_row(step, own, mine.token, column)
                    cute.arch.cp_async_wait_group(0)
                self.copy(mine, has_halves, column, own)

    @cute.jit
    def fetch_bias(self, step: Step, own: Own, column: Any) -> None:
        """A lane's columns of the bias of each window row."""
        for i in range_constexpr(WINDOW):
            source = step.ape + (i % RATIO) * step.ape_stride + (i // RATIO) * self.half + Int64(column * 4)
            ptx.copy_async_128(own.bias + i * OWN_ROW, source)
        cute.arch.cp_async_commit_group()

    @cute.jit
    def fetch_own(self, step: Step, own: Own, token: Any, column: Any, is_alone: Any) -> None:
        """The row of a team's only token."""
        if is_alone:
            self.fetch_row(step, own, token, column)

    @cute.jit
    def fetch_row(self, step: Step, own: Own, token: Any, column: Any) -> None:
        """A lane's columns of a token's row: two halves of kv, two of score."""
        source = step.kv_score + Int64(token) * step.row_stride + Int64(column * 4)
        for i in range_constexpr(4):
            ptx.copy_async_128(own.row + i * OWN_ROW, source + i * self.half)
        cute.arch.cp_async_commit_group()

    @cute.jit
    def find(self, state: State, lanes: Known, source: Any, is_wanted: Any) -> tuple[Any, Any]:
        """Page, and row of the page, of one row of the window of lane `source`'s token; eight lanes see to one each."""
        position = cute.arch.shuffle_sync(lanes.position, source) - (WINDOW - 1) + cute.arch.lane_idx() % WINDOW
        column, row = divmod(cutlass.max(position, 0), state.page_rows)
        is_inside = is_wanted & (position >= 0) & (column < state.columns)
        # a token that closes an entry has a request
        start = state.table + Int64(cute.arch.shuffle_sync(lanes.request, source)) * state.table_stride
        return ptx.load_global_s32_again_where(is_inside, start + Int64(column) * 4), row

    @cute.jit
    def close(
        self,
        state: State,
        step: Step,
        cache: entry.Cache,
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
        """Sum over the warps of the block, each with its own in all lanes; every thread of the block must call."""
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
            biased = self.add(score, ptx.load_shared_128(own.bias + (phase + h * RATIO) * OWN_ROW))
            ptx.store_global_128(target + h * self.half, value, has_halves[h])
            ptx.store_global_128(target + (2 + h) * self.half, biased, has_halves[h])

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
