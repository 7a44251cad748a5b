"""Where a team's cache rows come from: the walk of a warp over its team's steps, and the copies of its columns of them.

A step is 16 neighbouring columns of one list. A part of a row has those of its first list and then those of its second
one; team t of T takes number t, t + T ... of them. The walk goes through the steps of all items of a block, ahead of
the products: by as many steps as a ring has stages with the rows themselves, by one more with the lists' entries, which
lanes hold in registers. A lane finds out where key lane % 16 is, and copies its scales; lane 4 r + c copies every
fourth 16 bytes of keys r and r + 8.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr, range_constexpr

from cute_kernels.dsl import ptx
from cute_kernels.formats import FP8_DS_MLA, HEAD_DIM
from cute_kernels.sparse_mla.teams_plan import (
    BLOCK,
    BLOCK_BYTES,
    CHUNK,
    KEYS,
    LANES,
    NO_SCALES,
    WARPS,
    code_place,
    rope_place,
)

ITEM, STEP, STEPS, STEPS_FIRST, COLUMN, END, COLUMN_SECOND, END_SECOND = range(8)
ROW, ROW_SECOND, WORDS = 8, 10, 12
FETCHED_LIST, FETCHED_COLUMN, UNDER_WAY = range(12, 15)
"""Words of a walk, in shared memory, as O and Q leave no registers: item, the step that is fetched, the item's steps,
those of its first list; of either list, column of its first step and end of the item's columns; two words each,
addresses of the rows of both lists; list (-1: none) and first column of the step that is fetched and not yet copied;
the item whose products are under way."""


class Own(NamedTuple):
    """What tells the warps of a team apart.

    team, rank       numbers
    is_last          whether the warp has the rotated columns
    column           its first one
    scales           byte of a key's eight from which on a word has the scales of its blocks
    mask             which bits of it mean something; of a warp alone, in the second word
    """

    team: Any
    rank: Any
    is_last: Any
    column: Any
    scales: Any
    mask: Any


class Queries(NamedTuple):
    """q: address, strides in bytes, number of heads."""

    base: Any
    batch: Any
    token: Any
    head: Any
    heads: Any

    def row(self, batch: Any, token: Any, head: Any) -> Any:
        return self.base + Int64(batch) * self.batch + Int64(token) * self.token + Int64(head) * self.head

    def left(self, head: Any, most: int) -> Any:
        """Heads of an item that begins with a head and has so many at most."""
        return cutlass.min(self.heads - head, Int32(most))


def steps_of(first: Any, end: Any) -> Any:
    return cutlass.max(end - first + (KEYS - 1), Int32(0)) >> (KEYS.bit_length() - 1)


@cute.jit
def columns_of_item(
    items: Any, lists: Any, batch: Any, token: Any, part: Any, second: cutlass.Constexpr
) -> tuple[Any, Any, Any, Any]:
    """(first, end, first, end): the columns of both lists that a part of a row has."""
    used, used_second = lists[0].used(batch, token), Int32(0)
    if const_expr(second != "none"):
        used_second = lists[1].used(batch, token)
    return items.columns(part, used, used_second)


@dataclass(frozen=True)
class Walk:
    """A warp's walk.

    home    address of its words in shared memory
    ring    address of its stages
    asked   register: what the lane has asked for, the entry of key lane % 16 of the step that is fetched
    alive   register: whether there are keys r and r + 8 of a stage, bits of its number and 8 further
    """

    plan: Any
    second: str
    items: Any
    caches: Any
    lists: Any
    queries: Queries
    own: Own
    home: Any
    ring: Any
    asked: Any
    alive: Any

    @cute.jit
    def start(self, warp: Any, lane: Any) -> None:
        """Go to the first item."""
        self.ask_for_lists(self.items.first, warp, lane)
        words = cute.make_rmem_tensor((WORDS,), Int32)
        words.fill(0)
        words[ITEM] = self.items.first - self.items.step
        self.alive[0] = Int32(0)
        self.keep(words, lane)
        self.fetch(warp, lane)

    @cute.jit
    def keep(self, words: Any, lane: Any) -> None:
        cute.arch.sync_warp()
        if lane == 0:
            for i in range_constexpr(WORDS // 4):
                ptx.store_shared_128(self.home + 16 * i, [words[4 * i + j] for j in range(4)])
        cute.arch.sync_warp()

    @cute.jit
    def fetch(self, warp: Any, lane: Any) -> None:
        """Go to the team's next step, and ask for its entries."""
        item, step, steps, steps_first = ptx.load_shared_128(self.home)
        step = step + self.plan.teams
        if step >= steps and item < self.items.end:
            item, step, steps, steps_first = self.open(item, warp, lane)
        exists = item < self.items.end
        row_low, row_high, second_low, second_high = ptx.load_shared_128(self.home + 4 * ROW)
        first, end, first_second, end_second = ptx.load_shared_128(self.home + 4 * COLUMN)
        which = Int32(0)
        if const_expr(self.second != "none"):
            is_second = step >= steps_first
            which = Int32(1) if is_second else Int32(0)
            row_low, row_high = (second_low if is_second else row_low), (second_high if is_second else row_high)
            first, end = (first_second if is_second else first), (end_second if is_second else end)
            first = first - (steps_first * KEYS if is_second else Int32(0))
        first = first + step * KEYS
        column = first + (lane & (KEYS - 1))
        is_live = exists and column < end
        if const_expr(self.second == "dense"):
            page, _ = divmod(column, self.caches[1].rows)
            column = page if which == 1 else column
        self.asked[0] = ptx.load_global_s32_where(is_live, ptx.pair(row_low, row_high) + Int64(column) * 4)
        cute.arch.sync_warp()
        if lane == 0:
            ptx.store_shared_128(self.home, (item, step, steps, steps_first))
            ptx.store_shared_64(self.home + 4 * FETCHED_LIST, which if exists else Int32(-1), first)
        cute.arch.sync_warp()

    @cute.jit
    def open(self, item: Any, warp: Any, lane: Any) -> tuple[Any, Any, Any, Any]:
        """Go to the next item that has steps for the team: item, the team's first step, the item's, its first list's.
        Behind the last item there is none, and nothing else changes."""
        words = cute.make_rmem_tensor((WORDS,), Int32)
        words.fill(0)
        words[ITEM] = item
        words[STEP] = Int32(0)
        while words[STEP] >= words[STEPS] and words[ITEM] < self.items.end:
            words[ITEM] = words[ITEM] + self.items.step
            words[STEP] = self.own.team
            words[STEPS] = Int32(0)
            if words[ITEM] < self.items.end:
                batch, token, part, head_block = self.items.place(words[ITEM])
                words[ROW], words[ROW + 1] = ptx.halves(self.lists[0].row(batch, token))
                if const_expr(self.second != "none"):
                    words[ROW_SECOND], words[ROW_SECOND + 1] = ptx.halves(self.lists[1].row(batch, token))
                self.ask_for_queries(batch, token, head_block)
                self.ask_for_lists(words[ITEM] + self.items.step, warp, lane)
                first, end, first_second, end_second = columns_of_item(
                    self.items, self.lists, batch, token, part, self.second
                )
                words[COLUMN] = first
                words[END] = end
                words[COLUMN_SECOND] = first_second
                words[END_SECOND] = end_second
                words[STEPS_FIRST] = steps_of(first, end)
                words[STEPS] = words[STEPS_FIRST] + steps_of(first_second, end_second)
        self.keep(words, lane)
        return words[ITEM], words[STEP], words[STEPS], words[STEPS_FIRST]

    @cute.jit
    def ask_for_queries(self, batch: Any, token: Any, head_block: Any) -> None:
        """L2 has the item's queries by the time they are wanted: a line or two from each thread."""
        lines, threads = const_expr(2 * HEAD_DIM // 128), const_expr(WARPS * LANES)
        head, thread = head_block * self.plan.heads, ptx.thread_again()
        for first in range_constexpr(0, self.plan.heads * lines, threads):
            line = first + thread
            row = self.queries.row(batch, token, head + line // lines)
            ptx.prefetch_l2(row + line % lines * 128, line < self.queries.left(head, self.plan.heads) * lines)

    @cute.jit
    def ask_for_lists(self, item: Any, warp: Any, lane: Any) -> None:
        """L2 has the lengths and the first columns of an item by the time they are wanted."""
        if item < self.items.end and warp == 0:
            batch, token, _, _ = self.items.place(item)
            for i in range_constexpr(1 if self.second == "none" else 2):
                lists = self.lists[i]
                columns = lists.columns
                if const_expr(i == 1 and self.second == "dense"):
                    columns, _ = divmod(columns, self.caches[1].rows)
                ptx.prefetch_l2(lists.row(batch, token) + lane * 128, lane * 32 < columns)
                offset = Int64(batch) * Int64(lists.lengths_batch) + Int64(token) * Int64(lists.lengths_token)
                ptx.prefetch_l2(lists.lengths + offset * 4, lists.lengths != 0 and lane == 0)

    @cute.jit
    def go_on(self, stage: Any, warp: Any, lane: Any) -> None:
        """Have the fetched step's rows copied to a stage, and fetch the next one."""
        self.copy(stage, lane)
        self.fetch(warp, lane)

    @cute.jit
    def copy(self, stage: Any, lane: Any) -> None:
        """Have the warp's columns of the fetched step copied to a stage, zeros where there is no key; a group of its
        own."""
        which = ptx.load_shared_s32(self.home + FETCHED_LIST * 4)
        if const_expr(self.second == "none"):
            if which >= 0:
                self.copy_of(stage, lane, 0)
        elif which == 0:
            self.copy_of(stage, lane, 0)
        elif which == 1:
            self.copy_of(stage, lane, 1)
        cute.arch.cp_async_commit_group()

    @cute.jit
    def copy_of(self, stage: Any, lane: Any, which: cutlass.Constexpr) -> None:
        plan, cache, entry = self.plan, self.caches[which], self.asked[0]
        lane = ptx.again(lane)
        r, part, key = lane >> 2, lane & 3, lane & (KEYS - 1)
        target = self.ring + stage * plan.stage_bytes
        known = cutlass.max(entry, Int32(0))
        page, inside = divmod(known, cache.rows)
        if const_expr(which == 1 and self.second == "dense"):
            page = known
            _, inside = divmod(ptx.load_shared_s32(self.home + FETCHED_COLUMN * 4) + key, cache.rows)
        is_there = entry >= 0 and page < cache.pages
        start = cache.base + (Int64(page) * cache.stride if is_there else Int64(0))
        inside = inside if is_there else Int32(0)
        if lane < KEYS:
            scales = start + Int64(cache.rows.divisor) * FP8_DS_MLA.data_bytes
            scales = scales + Int64(inside) * FP8_DS_MLA.scale_bytes
            bytes_at = target + plan.scales_at + key * FP8_DS_MLA.scale_bytes
            if is_there:
                ptx.copy_async_or_zero(bytes_at, scales, FP8_DS_MLA.scale_bytes, FP8_DS_MLA.scale_bytes)
            else:
                ptx.store_shared_64(bytes_at, NO_SCALES, NO_SCALES)
        rows = ptx.halves(start + Int64(inside) * FP8_DS_MLA.data_bytes)
        there = (cute.arch.vote_ballot_sync(is_there) >> r) & 0x0101
        self.alive[0] = (self.alive[0] & ~(Int32(0x0101) << stage)) | (there << stage)
        offset = self.own.column + part * CHUNK
        for side in range_constexpr(2):
            low, high = (cute.arch.shuffle_sync(half, 8 * side + r) for half in rows)
            data = ptx.pair(low, high) + Int64(offset)
            read = (there >> 8 * side & 1) * CHUNK
            # keys r and r + 8 have their chunks in the same order
            place = target + 8 * side * BLOCK + code_place(r, part)
            for i in range_constexpr(plan.codes):
                ptx.copy_async_or_zero(place + i * BLOCK_BYTES, data + i * BLOCK, CHUNK, read)
            if self.own.is_last:
                for i in range_constexpr(2):
                    rope = target + plan.rope_at + 8 * side * (2 * BLOCK) + rope_place(r, part + 4 * i)
                    ptx.copy_async_or_zero(rope, data + (plan.codes + i) * BLOCK, CHUNK, read)
            else:
                ptx.copy_async_or_zero(place + plan.rope_at, data + plan.codes * BLOCK, CHUNK, read)


@cute.jit
def own_of(warp: Any, plan: cutlass.Constexpr) -> Own:
    """What the warp of that number has."""
    rank = warp % plan.team
    is_last = rank == plan.team - 1
    block = rank * plan.blocks
    masks = [Int32(-1 if blocks % 4 == 0 else (1 << 8 * (blocks % 4)) - 1) for blocks in (plan.blocks, plan.codes)]
    mask = masks[1] if is_last else masks[0]
    return Own(warp // plan.team, rank, is_last, block * BLOCK, block, mask)
