"""How the portable kernels of prefill get their rows: the walk over a block's steps, and the copies of a step.

A step is `plan.keys` columns of an item, and columns that count are numbered, whatever cache they name: an item has as
few steps as there can be. The walk goes through the steps of all items of a block ahead of the products: by as many
steps as there are stages, but one, with rows; by one step more with what names them, and by yet one more with what
lists that, both of which lanes hold in registers. Items without columns have no steps; what is in a stage says which
item it belongs to.

Each warp has a walk of its own, in shared memory, as O and Q leave no registers: four words, the item that was reached,
its first column that is not asked for yet, the item's number among those whose columns are counted, and the item of the
step whose rows are named; then four words that rows say of each of those items, the first of them how many columns
count.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr, range_constexpr

from cute_kernels.dsl import ptx
from cute_kernels.formats import FP8_DS_MLA
from cute_kernels.sparse_mla.mma_sync.operands import CHUNK, WARPS, wide_chunk
from cute_kernels.sparse_mla.portable_prefill_plan import AT_ONCE, KEY_LANES, LOOK_AHEAD, SLABS, row_bytes

NAMED = 12
"""Place of the last word of a walk."""


class Work(NamedTuple):
    """The items of a block: numbers first, first + step ... below `end`; a query row's blocks of heads follow each
    other, and there are 1 << blocks_bits of them."""

    first: Any
    end: Any
    step: Any
    blocks_bits: Any

    def row(self, item: Any) -> Any:
        return item >> self.blocks_bits

    def head(self, item: Any, rows: int) -> Any:
        """The first head of an item of so many."""
        return (item - (self.row(item) << self.blocks_bits)) * rows


@dataclass(frozen=True)
class Walk:
    """A warp's walk.

    rows      which rows an item has, see portable_prefill_rows; sources: what it looks into
    home      address of the walk's words in shared memory
    found     three registers: what names the row of the lane's key in the next step, see rows.look_up; and what lists
              that of the step after it, see rows.ask
    memory    address of the block's shared memory
    """

    plan: Any
    rows: Any
    sources: Any
    work: Any
    home: Any
    found: Any
    memory: Any

    @property
    def own_keys(self) -> int:
        """Keys of a step that a warp copies; of 16 keys some warps copy none."""
        return max(self.plan.keys // WARPS, AT_ONCE)

    @cute.jit
    def start(self, warp: Any, lane: Any) -> None:
        """Before the first item."""
        self.look_ahead(self.work.first, lane)
        self.keep((self.work.first, Int32(0), Int32(0), self.work.end), lane)
        self.ask(warp, lane)
        self.name(warp, lane)
        self.ask(warp, lane)

    @cute.jit
    def keep(self, words: Any, lane: Any) -> None:
        cute.arch.sync_warp()
        if lane == 0:
            ptx.store_shared_128(self.home, words)
        cute.arch.sync_warp()

    @cute.jit
    def look_ahead(self, item: Any, lane: Any) -> None:
        """Count the columns of that item and the 31 behind it: asking for each in its time would take a long wait each
        time."""
        own = item + lane * self.work.step
        words = self.rows.count(self.work.row(own), own < self.work.end, self.sources)
        cute.arch.sync_warp()
        ptx.store_shared_128(self.home + 16 + lane * 16, words)
        cute.arch.sync_warp()

    @cute.jit
    def ask(self, warp: Any, lane: Any) -> None:
        """Go to the next step there is, and ask for what lists its rows."""
        item, column, number, named = ptx.load_shared_128(self.home)
        count = ptx.load_shared_s32(self.home + 16 + number * 16)
        while item < self.work.end and column >= count:
            item, column, number = item + self.work.step, Int32(0), number + 1
            if number == LOOK_AHEAD:
                self.look_ahead(item, lane)
                number = Int32(0)
            count = ptx.load_shared_s32(self.home + 16 + number * 16)
        words = ptx.load_shared_128(self.home + 16 + number * 16)
        own = column + self.own_key(warp, lane)
        is_live = item < self.work.end and own < count
        self.found[2] = self.rows.ask(self.work.row(item), own, words, is_live, self.sources)
        self.keep((item, column + self.plan.keys, number, named), lane)

    @cute.jit
    def name(self, warp: Any, lane: Any) -> None:
        """Ask for what names the rows of the step that was asked for last."""
        item, column, number, _ = ptx.load_shared_128(self.home)
        words = ptx.load_shared_128(self.home + 16 + number * 16)
        own = column - self.plan.keys + self.own_key(warp, lane)
        is_live = item < self.work.end and own < words[0]
        self.found[0], self.found[1] = self.rows.look_up(self.found[2], own, words, is_live, self.sources)
        self.keep((item, column, number, item), lane)

    def own_key(self, warp: Any, lane: Any) -> Any:
        """The key of a step that a lane knows of; others of the warp know of the same."""
        return warp * self.own_keys + (lane & (self.own_keys - 1))

    @cute.jit
    def go_on(self, stage: Any, warp: Any, lane: Any) -> None:
        """Have the rows copied to a stage that are named, and name and ask for the next ones."""
        lane = ptx.again(lane)
        if const_expr(self.plan.keys < WARPS * AT_ONCE):
            if warp < self.plan.keys // AT_ONCE:
                self.copy(stage, warp, lane)
        else:
            self.copy(stage, warp, lane)
        cute.arch.cp_async_commit_group()
        self.name(warp, lane)
        self.ask(warp, lane)

    @cute.jit
    def copy(self, stage: Any, warp: Any, lane: Any) -> None:
        """Have the warp's keys copied to a stage, zeros for those that do not count."""
        plan = self.plan
        start, scales, cache = self.rows.find(self.found[0], self.found[1], self.sources)
        is_owner = lane < self.own_keys
        key = self.own_key(warp, lane)
        if is_owner:
            ptx.store_shared_s32(self.memory + plan.masks_at + (stage * plan.keys + key) * 4, cache)
        if warp == 0 and lane == 0:
            item = ptx.load_shared_s32(self.home + NAMED)
            ptx.store_shared_s32(self.memory + plan.labels_at + stage * 4, item)
        target = self.memory + stage * plan.stage_bytes
        if const_expr(FP8_DS_MLA.id in plan.formats):
            size = const_expr(FP8_DS_MLA.scale_bytes)
            if is_owner:
                read = Int32(size) if cache != 0 else Int32(0)
                ptx.copy_async_or_zero(target + plan.scales_at + key * size, scales, size, read)
        low, high = ptx.halves(start)
        for i in range_constexpr(self.own_keys // AT_ONCE):
            owner = AT_ONCE * i + (lane // KEY_LANES)
            source = ptx.pair(cute.arch.shuffle_sync(low, owner), cute.arch.shuffle_sync(high, owner))
            which = cute.arch.shuffle_sync(cache, owner)
            self.copy_key(target, warp * self.own_keys + owner, lane & (KEY_LANES - 1), source, which)

    @cute.jit
    def copy_key(self, stage: Any, key: Any, part: Any, source: Any, which: Any) -> None:
        """The lane's part of a key: every eighth chunk of its row, the row being `source`."""
        plan = self.plan
        read = Int32(CHUNK) if which != 0 else Int32(0)
        source = source + Int64(part * CHUNK)
        if const_expr(plan.is_direct):
            target = stage + wide_chunk(key, part)
            for slab in range_constexpr(SLABS):
                ptx.copy_async_or_zero(target + slab * plan.slab_bytes, source + slab * 128, CHUNK, read)
        else:
            target = stage + key * plan.raw_row + part * CHUNK
            sizes = [row_bytes(kv_format) for kv_format in plan.formats]
            size = Int32(sizes[0])
            if const_expr(sizes[0] != sizes[-1]):
                size = Int32(sizes[-1]) if which == len(sizes) else size
            whole, most = const_expr(min(sizes) // 128), const_expr(max(sizes))
            for i in range_constexpr(whole):
                ptx.copy_async_or_zero(target + i * 128, source + i * 128, CHUNK, read)
            for i in range_constexpr(whole, -(-most // 128)):
                if i * 128 + part * CHUNK < size:
                    ptx.copy_async_or_zero(target + i * 128, source + i * 128, CHUNK, read)
