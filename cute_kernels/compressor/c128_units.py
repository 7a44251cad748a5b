"""Which rows the clusters of c128_kernel move: a warp of each block looks through the cluster's tokens and lists them.

In a call with many tokens, rows are saved where an entry reads them, so that they come from memory once; only those
that no entry reads make units of their own (`Step.by_entries`). With few tokens every row is saved by its own cluster:
it need not find out about entries, and the second read comes from L2.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, const_expr, range_constexpr

from cute_kernels.compressor.c128_tables import END, ENTRY, PER_LANE, RATIO, ROW_BYTES, SAVE, Handover, Tables
from cute_kernels.dsl import ptx


class Tokens(NamedTuple):
    """Addresses of what a call says about its tokens, and how it deals them out."""

    positions: Int64
    requests: Int64
    slots: Int64
    entry_slots: Int64
    total: Int32
    per_cluster: Int32


class Token(NamedTuple):
    """What a call says about one token."""

    position: Any
    slot: Any
    entry_slot: Any
    request: Any


class Request(NamedTuple):
    """What the fused op says about one request: its first token, and its min_restart where that counts."""

    start: Any
    restart: Any


class State(NamedTuple):
    """The state cache and its block table; strides in bytes.

    known        positions below it have a column in the table
    requests     rows of the table
    """

    pool: Int64
    page_stride: Int64
    pages: Int32
    capacity: Int32
    divisor: cute.FastDivmodDivisorV2
    table: Int64
    table_stride: Int64
    known: Int32
    requests: Int32


class Step(NamedTuple):
    """What the fused op has besides; strides in bytes.

    restart      address of min_restart, or 0
    window       whether only rows that a later step can read are saved
    by_entries   whether entries save the rows they read
    """

    kv_score: Int64
    kv_stride: Int64
    ape: Int64
    ape_stride: Int64
    starts: Int64
    restart: Int64
    window: Int32
    by_entries: Int32


class Units:
    """The warp that lists units. Its methods are traced into the kernel.

    fused      whether rows of the step come from kv_score, and are saved
    handover   how they reach the other warps
    """

    def __init__(self, fused: bool, handover: Handover) -> None:
        self.fused = fused
        self.handover = handover

    @cute.jit
    def list_all(self, tokens: Tokens, state: State, step: Step, entries: Int32, tables: Tables, first: Int32) -> None:
        """All units of the tokens from `first` on. `entries`: rows of the entry cache."""
        lane = cute.arch.lane_idx()
        last = cutlass.min(first + tokens.per_cluster, tokens.total)
        unit = Int32(0)
        for chunk in cutlass.range(first, last, RATIO, unroll=1):
            # a lane has tokens chunk + lane, + 32 and so on; those past the end have the last one's numbers
            loaded = [
                self.load_token(tokens, Int64(cutlass.min(chunk + 32 * j + lane, last - 1))) for j in range(PER_LANE)
            ]
            self.warm(tokens, chunk + RATIO, last)
            closing = Int32(0)
            for j in range_constexpr(PER_LANE):
                token = chunk + 32 * j + lane
                acts = token < last and self.closes(state, entries, loaded[j])
                mask = cute.arch.vote_ballot_sync(acts)
                place = (closing + cute.arch.popc(mask & ((Int32(1) << lane) - 1))) * 4
                if acts:
                    tables.closers[place] = Int64(token)
                    tables.closers[place + 1] = loaded[j].position
                    tables.closers[place + 2] = loaded[j].entry_slot
                    tables.closers[place + 3] = Int64(loaded[j].request)
                closing += cute.arch.popc(mask)
            cute.arch.sync_warp()
            for closer in cutlass.range(closing, unroll=1):
                unit = self.entry(tokens, state, step, tables, unit, closer * 4)
            if const_expr(self.fused):
                unit = self.save_chunk(tokens, state, step, entries, tables, unit, chunk, last, loaded)
            cute.arch.sync_warp()
        self.handover.acquire(unit)
        self.handover.publish(tables, unit, Int32(END), Int64(-1), Int64(0))

    @cute.jit
    def warm(self, tokens: Tokens, chunk: Int32, last: Int32) -> None:
        """Ask for the numbers of the next chunk: lanes 0 to 23 for eight times 16 int64 each, 24 to 27 for 32 int32."""
        lane = cute.arch.lane_idx()
        array = tokens.positions if lane < 8 else (tokens.slots if lane < 16 else tokens.entry_slots)
        at = array + Int64(chunk + lane % 8 * 16) * 8
        at = at if lane < 24 else tokens.requests + Int64(chunk + lane % 8 * 32) * 4
        exists = chunk + lane % 8 * (16 if lane < 24 else 32) < last
        ptx.prefetch_l2(at, exists)

    def load_token(self, tokens: Tokens, at: Any, condition: Any = True) -> Token:
        """What the call says about a token, -1 where the condition fails."""
        return Token(
            ptx.load_global_s64_where(condition, tokens.positions + at * 8),
            ptx.load_global_s64_where(condition, tokens.slots + at * 8),
            ptx.load_global_s64_where(condition, tokens.entry_slots + at * 8),
            ptx.load_global_s32_where(condition, tokens.requests + at * 4),
        )

    @cute.jit
    def closes(self, state: State, entries: Int32, token: Token) -> Boolean:
        """Whether a token with these numbers closes an entry."""
        ends = token.position >= 0 and (Int32(token.position) & (RATIO - 1)) == RATIO - 1
        has_slots = self.is_row(token.slot, state.capacity) and self.is_row(token.entry_slot, entries)
        return ends and has_slots and token.request >= 0 and token.request < state.requests

    @cute.jit
    def is_row(self, slot: Int64, capacity: Int32) -> Boolean:
        return slot >= 0 and slot < Int64(capacity)

    @cute.jit
    def entry(self, tokens: Tokens, state: State, step: Step, tables: Tables, unit: Int32, place: Int32) -> Int32:
        """The unit of a closer if all its rows can be read, else of the rows to save if there are such. Returns the
        number of the next unit."""
        lane = cute.arch.lane_idx()
        token = Int32(tables.closers[place])
        position = tables.closers[place + 1]
        entry_slot = tables.closers[place + 2]
        request = Int32(tables.closers[place + 3])
        table = state.table + Int64(request) * state.table_stride
        pages, rows, own = [], [], []
        for j in range_constexpr(PER_LANE):
            at = position - (RATIO - 1) + 32 * j + lane
            is_known = at < Int64(state.known)
            column, row = divmod(Int32(at if is_known else Int64(0)), state.divisor)
            pages.append(ptx.load_global_s32_where(is_known, table + Int64(column) * 4))
            rows.append(row)
        start, oldest = Int32(0), Int64(0)
        if const_expr(self.fused):
            for j in range_constexpr(PER_LANE):
                at = Int64(cutlass.max(token - (RATIO - 1) + 32 * j + lane, 0))
                own.append(self.load_token(tokens, at, step.by_entries != 0))
            facts = self.load_request(step, request, True)
            start, oldest = facts.start, self.oldest(step, facts, position, token)
        sources, targets, biases = [], [], []
        is_whole, saves = Boolean(True), Boolean(False)
        for j in range_constexpr(PER_LANE):
            is_cached = pages[j] >= 0 and pages[j] < state.pages
            source = state.pool + Int64(pages[j]) * state.page_stride + Int64(rows[j]) * ROW_BYTES
            source = source if is_cached else Int64(0)
            if const_expr(self.fused):
                at = token - (RATIO - 1) + 32 * j + lane
                is_new = at >= cutlass.max(start, 0)
                source = step.kv_score + Int64(at) * step.kv_stride if is_new else source
                belongs = own[j].position == position - Int64(token - at) and own[j].request == request
                is_kept = self.is_row(own[j].slot, state.capacity) and own[j].position >= oldest
                is_saved = is_new and belongs and is_kept
                saves = saves or is_saved
                targets.append(self.state_row(state, own[j].slot, is_saved))
                biases.append(32 * j + lane if is_new else Int32(-1))
            sources.append(source)
            is_whole = is_whole and source != 0
        kind = Int32(ENTRY)
        if not cute.arch.vote_all_sync(is_whole):
            kind = Int32(SAVE) if cute.arch.vote_any_sync(saves) else Int32(END)
        if kind != END:
            self.handover.acquire(unit)
            self.handover.write(tables, unit, sources, targets, biases)
            self.handover.publish(tables, unit, kind, entry_slot, position - (RATIO - 1))
            unit += 1
        return unit

    @cute.jit
    def save_chunk(
        self,
        tokens: Tokens,
        state: State,
        step: Step,
        entries: Int32,
        tables: Tables,
        unit: Int32,
        chunk: Int32,
        last: Int32,
        loaded: Any,
    ) -> Int32:
        """The unit of a chunk's rows that are saved and not by entries, if there are such. Returns the number of the
        next unit."""
        lane = cute.arch.lane_idx()
        is_saved, requests, closers = [], [], []
        for j in range_constexpr(PER_LANE):
            token = chunk + 32 * j + lane
            is_known = loaded[j].request >= 0 and loaded[j].request < state.requests
            requests.append(self.load_request(step, loaded[j].request if is_known else Int32(0), is_known))
            is_kept = is_known or step.window == 0
            is_saved.append(token < last and self.is_row(loaded[j].slot, state.capacity) and is_kept)
            # the token that closes the group of a token may save its row
            closer = token + self.ahead(loaded[j])
            exists = step.by_entries != 0 and is_saved[j] and closer < tokens.total
            closers.append(self.load_token(tokens, Int64(closer if exists else Int32(0)), exists))
        any_saved = Boolean(False)
        for j in range_constexpr(PER_LANE):
            token = chunk + 32 * j + lane
            follows = closers[j].position == loaded[j].position + Int64(self.ahead(loaded[j]))
            is_own = follows and closers[j].request == loaded[j].request and token >= requests[j].start
            by_entry = is_own and self.closes(state, entries, closers[j])
            oldest = self.oldest(step, requests[j], loaded[j].position, token)
            is_saved[j] = is_saved[j] and loaded[j].position >= oldest and not by_entry
            any_saved = any_saved or is_saved[j]
        if cute.arch.vote_any_sync(any_saved):
            sources, targets, biases = [], [], []
            for j in range_constexpr(PER_LANE):
                source = step.kv_score + Int64(chunk + 32 * j + lane) * step.kv_stride
                sources.append(source if is_saved[j] else Int64(0))
                targets.append(self.state_row(state, loaded[j].slot, is_saved[j]))
                biases.append(Int32(loaded[j].position) & (RATIO - 1))
            self.handover.acquire(unit)
            self.handover.write(tables, unit, sources, targets, biases)
            self.handover.publish(tables, unit, Int32(SAVE), Int64(-1), Int64(0))
            unit += 1
        return unit

    def ahead(self, loaded: Token) -> Any:
        """How many tokens after one with these numbers its group is closed."""
        return (RATIO - 1) - (Int32(loaded.position) & (RATIO - 1))

    @cute.jit
    def load_request(self, step: Step, request: Int32, exists: Any) -> Request:
        """What a call says about a request."""
        at = Int64(request) * 4
        has_restart = exists and step.window != 0 and step.restart != 0
        return Request(
            ptx.load_global_s32_where(exists, step.starts + at),
            ptx.load_global_s32_where(has_restart, step.restart + at),
        )

    @cute.jit
    def oldest(self, step: Step, request: Request, position: Int64, token: Int32) -> Int64:
        """First position of a request that is saved; `position` is that of its `token`."""
        first = Int64(request.restart) if step.restart != 0 else position - Int64(token - request.start)
        return first & Int64(-RATIO) if step.window != 0 else Int64(-(2**63))

    @cute.jit
    def state_row(self, state: State, slot: Int64, exists: Boolean) -> Int64:
        """Address of a row of the state cache, 0 if it does not exist."""
        page, row = divmod(Int32(slot if exists else Int64(0)), state.divisor)
        address = state.pool + Int64(page) * state.page_stride + Int64(row) * ROW_BYTES
        return address if exists else Int64(0)
