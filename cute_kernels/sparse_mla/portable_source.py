"""Where the portable decode kernel's cache rows come from: the walk over a block's steps, and the copies of a step.

A step is `plan.keys` neighbouring columns of one list. The walk goes through the steps of all items of a block, one
after the other, ahead of the products: by one step with the lists' entries, which threads hold in registers, and by as
many steps as there are stages, but one, with the rows themselves. Four lanes copy a key, a warp eight of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr, range_constexpr

from cute_kernels.dsl import ptx
from cute_kernels.formats import FP8_DS_MLA, NOPE_DIM, PLAIN_BF16
from cute_kernels.sparse_mla.portable_plan import CHUNK, KEY_LANES, LANES, WARPS, fp8_chunk, wide_chunk

ITEM, LIST, COLUMN, END, COLUMN_SECOND, END_SECOND, FETCHED_LIST, FETCHED_COLUMN = range(8)
ROW, ROW_SECOND, DONE, SECOND = 8, 10, 12, 13
"""Words of a warp's walk, in shared memory, as O and Q leave no registers: item and list of the next step, its first
column, the end of the item's columns in that list, the same two of the second list; list (-1: there is none) and first
column of the step that is fetched but not copied; two words each, addresses of the rows of both lists; the item whose
products are under way, and how many steps it has in the second list."""


@dataclass(frozen=True)
class Walk:
    """A warp's walk.

    home             address of its words in shared memory
    entry            register: what the lane has asked for, its entry of the list for the step that is fetched
    stages, masks    addresses in shared memory
    """

    plan: Any
    second: Any
    items: Any
    caches: Any
    lists: Any
    home: Any
    entry: Any
    stages: Any
    masks: Any

    @cute.jit
    def start(self, lane: Any) -> None:
        """Before the first item."""
        words = cute.make_rmem_tensor((12,), Int32)
        words.fill(0)
        words[ITEM] = self.items.first - self.items.step
        words[LIST] = Int32(1)
        self.keep(words, lane)

    @cute.jit
    def keep(self, words: Any, lane: Any) -> None:
        cute.arch.sync_warp()
        if lane == 0:
            for i in range_constexpr(3):
                ptx.store_shared_128(self.home + 16 * i, [words[4 * i + j] for j in range(4)])
        cute.arch.sync_warp()

    @cute.jit
    def fetch(self, warp: Any, lane: Any) -> None:
        """Go to the next step there is, and ask for its entries."""
        asked = self.entry
        words = cute.make_rmem_tensor((12,), Int32)
        for i in range_constexpr(3):
            four = ptx.load_shared_128(self.home + 16 * i)
            for j in range_constexpr(4):
                words[4 * i + j] = four[j]
        while words[COLUMN] >= words[END] and words[ITEM] < self.items.end:
            self.turn(words)
        exists = words[ITEM] < self.items.end
        column = words[COLUMN] + warp * (LANES // KEY_LANES) + (lane >> 2)
        is_live = exists and column < words[END]
        if const_expr(self.second == "dense"):
            page, _ = divmod(column, self.caches[1].rows)
            column = page if words[LIST] == 1 else column
        row = ptx.pair(words[ROW], words[ROW + 1])
        asked[0] = ptx.load_global_s32_where(is_live, row + Int64(column) * 4)
        words[FETCHED_LIST] = words[LIST] if exists else Int32(-1)
        words[FETCHED_COLUMN] = words[COLUMN]
        words[COLUMN] = words[COLUMN] + self.plan.keys
        self.keep(words, lane)

    @cute.jit
    def turn(self, words: Any) -> None:
        """To the item's second list, or to the next item's first one."""
        if const_expr(self.second == "none"):
            self.open(words)
        elif words[LIST] == 0:
            words[LIST] = Int32(1)
            words[COLUMN] = words[COLUMN_SECOND]
            words[END] = words[END_SECOND]
            words[ROW] = words[ROW_SECOND]
            words[ROW + 1] = words[ROW_SECOND + 1]
        else:
            self.open(words)

    @cute.jit
    def open(self, words: Any) -> None:
        """To the next item's first list."""
        item = words[ITEM] + self.items.step
        words[ITEM] = item
        words[LIST] = Int32(0)
        words[COLUMN] = Int32(0)
        words[END] = Int32(0)
        if item < self.items.end:
            batch, token, part, _ = self.items.coords(item)
            used = self.lists[0].live(batch, token)
            used_second = Int32(0)
            words[ROW], words[ROW + 1] = ptx.halves(self.lists[0].row(batch, token))
            if const_expr(self.second != "none"):
                used_second = self.lists[1].live(batch, token)
                words[ROW_SECOND], words[ROW_SECOND + 1] = ptx.halves(self.lists[1].row(batch, token))
            first, end, first_second, end_second = self.items.columns(part, used, used_second)
            words[COLUMN] = first
            words[END] = end
            words[COLUMN_SECOND] = first_second
            words[END_SECOND] = end_second

    @cute.jit
    def go_on(self, stage: Any, warp: Any, lane: Any) -> None:
        """Have the fetched step's rows copied to a stage, and fetch the next one."""
        self.copy(stage, warp, lane)
        self.fetch(warp, lane)

    @cute.jit
    def copy(self, stage: Any, warp: Any, lane: Any) -> None:
        """Have the fetched step's rows copied to a stage, zeros for those that are masked; a group of its own."""
        which = ptx.load_shared_s32(self.home + FETCHED_LIST * 4)
        if const_expr(self.plan.keys < WARPS * LANES // KEY_LANES):
            which = which if warp < self.plan.keys * KEY_LANES // LANES else Int32(-1)
        if const_expr(self.second == "none"):
            if which >= 0:
                self.copy_of(stage, warp, lane, 0)
        elif which == 0:
            self.copy_of(stage, warp, lane, 0)
        elif which == 1:
            self.copy_of(stage, warp, lane, 1)
        cute.arch.cp_async_commit_group()

    @cute.jit
    def copy_of(self, stage: Any, warp: Any, lane: Any, which: cutlass.Constexpr) -> None:
        plan, cache = self.plan, self.caches[which]
        lane = ptx.again(lane)
        entry = self.entry[0]
        known = cutlass.max(entry, Int32(0))
        page, row = divmod(known, cache.rows)
        key = warp * (LANES // KEY_LANES) + (lane >> 2)
        if const_expr(which == 1 and self.second == "dense"):
            page = known
            _, row = divmod(ptx.load_shared_s32(self.home + FETCHED_COLUMN * 4) + key, cache.rows)
        is_valid = entry >= 0 and page < cache.pages
        part = lane & (KEY_LANES - 1)
        if part == 0:
            ptx.store_shared_s32(self.masks + (stage * plan.keys + key) * 4, Int32(is_valid))
        start = cache.base + (Int64(page) * cache.page_stride if is_valid else Int64(0))
        row = row if is_valid else Int32(0)
        read = Int32(CHUNK) if is_valid else Int32(0)
        target = self.stages + stage * plan.stage_bytes
        if const_expr(plan.formats[which] == PLAIN_BF16.id):
            data = start + Int64(row) * (2 * PLAIN_BF16.dim) + Int64(part * CHUNK)
            near = target + wide_chunk(key, part)
            far = target + wide_chunk(key, part + KEY_LANES)
            for i in range_constexpr(2 * PLAIN_BF16.dim // (KEY_LANES * CHUNK)):
                place = (far if i % 2 else near) + i // 2 * plan.plain_bytes
                ptx.copy_async_or_zero(place, data + i * (KEY_LANES * CHUNK), CHUNK, read)
        else:
            data = start + Int64(row) * FP8_DS_MLA.data_bytes + Int64(part * CHUNK)
            codes = target + fp8_chunk(key, part)
            pieces = NOPE_DIM // (KEY_LANES * CHUNK)
            for i in range_constexpr(pieces):
                place = i * (KEY_LANES * CHUNK)
                ptx.copy_async_or_zero(codes + place, data + place, CHUNK, read)
            for i in range_constexpr(2):
                rope = target + plan.rope_at + wide_chunk(key, part + i * KEY_LANES)
                ptx.copy_async_or_zero(rope, data + (pieces + i) * (KEY_LANES * CHUNK), CHUNK, read)
            if part == 0:
                scales = start + Int64(cache.rows.divisor) * FP8_DS_MLA.data_bytes
                scales = scales + Int64(row) * FP8_DS_MLA.scale_bytes
                place = target + plan.scales_at + key * FP8_DS_MLA.scale_bytes
                ptx.copy_async_or_zero(place, scales, FP8_DS_MLA.scale_bytes, read // 2)
