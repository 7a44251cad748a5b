"""Which rows the clusters of c128_kernel move: four warps of a block look through the cluster's tokens and list them.

They look at 128 tokens at a time, a thread at one, and then have a thread for each row of a window that these close.

In a call with many tokens, rows are saved where an entry reads them, so that they come from memory once; only those
that no entry reads make units of their own (`Step.by_entries`). With few tokens every row is saved by its own cluster:
it need not find out about entries, and the second read comes from L2.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, const_expr

from cute_kernels.compressor.c128_tables import END, ENTRY, LISTERS, RATIO, ROW_BYTES, SAVE, Handover, Tables
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


class Looked(NamedTuple):
    """What a lister knows about its token of the chunk: the token's number, what the call says about it, and in the
    fused op about its request, and about the token that closes its group."""

    token: Any
    own: Token
    request: Request
    closer: Token


class Units:
    """The warps that list units. Its methods are traced into the kernel.

    fused      whether rows of the step come from kv_score, and are saved
    handover   how they reach the other warps
    """

    def __init__(self, fused: bool, handover: Handover) -> None:
        self.fused = fused
        self.handover = handover

    @cute.jit
    def list_all(self, tokens: Tokens, state: State, step: Step, entries: Int32, tables: Tables, first: Int32) -> None:
        """All units of the tokens from `first` on. `entries`: rows of the entry cache."""
        last = cutlass.min(first + tokens.per_cluster, tokens.total)
        unit = Int32(0)
        for chunk in cutlass.range(first, last, RATIO, unroll=1):
            looked = self.look(tokens, state, step, chunk, last)
            self.note(state, entries, tables, looked, last)
            self.handover.meet()
            for warp in cutlass.range(LISTERS, unroll=1):
                for place in cutlass.range(tables.closing[warp], unroll=1):
                    unit = self.entry(tokens, state, step, tables, unit, (warp * 32 + place) * 4)
            if const_expr(self.fused):
                unit = self.save_chunk(tokens, state, step, entries, tables, unit, last, looked)
            # the next chunk's closers overwrite these
            self.handover.meet()
        self.handover.acquire(unit)
        self.handover.publish(tables, unit, Int32(END), Int64(-1), Int64(0))

    @cute.jit
    def look(self, tokens: Tokens, state: State, step: Step, chunk: Int32, last: Int32) -> Looked:
        """Ask for all about this thread's token of a chunk; a token past the end has the numbers of the last one."""
        token = chunk + self.handover.row()
        own = self.load_token(tokens, Int64(cutlass.min(token, last - 1)))
        self.warm(tokens, chunk + RATIO, last)
        request, closer = Request(Int32(0), Int32(0)), own
        if const_expr(self.fused):
            is_known = own.request >= 0 and own.request < state.requests
            request = self.load_request(step, own.request if is_known else Int32(0), is_known)
            at = token + self.ahead(own)
            exists = step.by_entries != 0 and at < tokens.total
            closer = self.load_token(tokens, Int64(at if exists else Int32(0)), exists)
        return Looked(token, own, request, closer)

    @cute.jit
    def warm(self, tokens: Tokens, chunk: Int32, last: Int32) -> None:
        """Ask for the numbers of the next chunk: threads 0 to 23 for eight times 16 int64 each, 24 to 27 for four times
        32 int32."""
        thread = self.handover.row()
        array = tokens.positions if thread < 8 else (tokens.slots if thread < 16 else tokens.entry_slots)
        at = array + Int64(chunk + thread % 8 * 16) * 8
        at = at if thread < 24 else tokens.requests + Int64(chunk + thread % 8 * 32) * 4
        exists = thread < 28 and chunk + thread % 8 * (16 if thread < 24 else 32) < last
        ptx.prefetch_l2(at, exists)

    @cute.jit
    def note(self, state: State, entries: Int32, tables: Tables, looked: Looked, last: Int32) -> None:
        """Write down the tokens of a chunk that close entries, each warp its own."""
        lane = cute.arch.lane_idx()
        warp = self.handover.row() // 32
        closes = looked.token < last and self.closes(state, entries, looked.own)
        mask = cute.arch.vote_ballot_sync(closes)
        place = (warp * 32 + cute.arch.popc(mask & ((Int32(1) << lane) - 1))) * 4
        if closes:
            tables.closers[place] = Int64(looked.token)
            tables.closers[place + 1] = looked.own.position
            tables.closers[place + 2] = looked.own.entry_slot
            tables.closers[place + 3] = Int64(looked.own.request)
        if lane == 0:
            tables.closing[warp] = cute.arch.popc(mask)

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
        token = Int32(tables.closers[place])
        position = tables.closers[place + 1]
        entry_slot = tables.closers[place + 2]
        request = Int32(tables.closers[place + 3])
        row = self.handover.row()
        behind = (RATIO - 1) - row
        at = position - Int64(behind)
        is_known = at < Int64(state.known)
        column, offset = divmod(Int32(at if is_known else Int64(0)), state.divisor)
        table = state.table + Int64(request) * state.table_stride
        page = ptx.load_global_s32_where(is_known, table + Int64(column) * 4)
        target, bias, is_saved = Int64(0), Int32(-1), Boolean(False)
        own, facts = Token(Int64(-1), Int64(-1), Int64(-1), Int32(-1)), Request(Int32(0), Int32(0))
        if const_expr(self.fused):
            own = self.load_token(tokens, Int64(cutlass.max(token - behind, 0)), step.by_entries != 0)
            facts = self.load_request(step, request, True)
        is_cached = page >= 0 and page < state.pages
        source = state.pool + Int64(page) * state.page_stride + Int64(offset) * ROW_BYTES
        source = source if is_cached else Int64(0)
        if const_expr(self.fused):
            number = token - behind
            is_new = number >= cutlass.max(facts.start, 0)
            source = step.kv_score + Int64(number) * step.kv_stride if is_new else source
            belongs = own.position == at and own.request == request
            is_kept = self.is_row(own.slot, state.capacity) and at >= self.oldest(step, facts, position, token)
            is_saved = is_new and belongs and is_kept
            target = self.state_row(state, own.slot, is_saved)
            bias = row if is_new else Int32(-1)
        kind = Int32(ENTRY)
        if self.handover.any_row(source == 0):
            kind = Int32(SAVE) if self.handover.any_row(is_saved) else Int32(END)
        if kind != END:
            self.handover.acquire(unit)
            self.handover.write(tables, unit, source, target, bias)
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
        last: Int32,
        looked: Looked,
    ) -> Int32:
        """The unit of a chunk's rows that are saved and not by entries, if there are such. Returns the number of the
        next unit."""
        token, own, closer = looked.token, looked.own, looked.closer
        is_known = own.request >= 0 and own.request < state.requests
        follows = closer.position == own.position + Int64(self.ahead(own)) and closer.request == own.request
        by_entry = follows and token >= looked.request.start and self.closes(state, entries, closer)
        is_kept = is_known and own.position >= self.oldest(step, looked.request, own.position, token)
        is_kept = is_kept or step.window == 0
        is_saved = token < last and self.is_row(own.slot, state.capacity) and is_kept and not by_entry
        if self.handover.any_row(is_saved):
            source = step.kv_score + Int64(token) * step.kv_stride
            self.handover.acquire(unit)
            self.handover.write(
                tables,
                unit,
                source if is_saved else Int64(0),
                self.state_row(state, own.slot, is_saved),
                Int32(own.position) & (RATIO - 1),
            )
            self.handover.publish(tables, unit, Int32(SAVE), Int64(-1), Int64(0))
            unit += 1
        return unit

    def ahead(self, own: Token) -> Any:
        """How many tokens after one with these numbers its group is closed."""
        return (RATIO - 1) - (Int32(own.position) & (RATIO - 1))

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
        first = position - (Int64(token) - Int64(request.start))
        first = Int64(request.restart) if step.restart != 0 else first
        return first & Int64(-RATIO) if step.window != 0 else Int64(-(2**63))

    @cute.jit
    def state_row(self, state: State, slot: Int64, exists: Boolean) -> Int64:
        """Address of a row of the state cache, 0 if it does not exist."""
        page, row = divmod(Int32(slot if exists else Int64(0)), state.divisor)
        address = state.pool + Int64(page) * state.page_stride + Int64(row) * ROW_BYTES
        return address if exists else Int64(0)
