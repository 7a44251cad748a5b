"""The kernel of prefill attention for every architecture from sm_80 on: both products with mma.sync.

A block walks over work items (query row, block of heads), in steps of some keys. Q and O stay in registers for an item.
Per step, after its rows have come to shared memory, and have become bf16 there if they were not:

    1. the warps' shares of Q K^T, each over the warp's columns for its heads, go to shared memory
    2. a warp for every 8 heads adds the shares up, moves the heads' maxima, stores P
    3. each warp adds P V to its columns of O for its heads

Between these the warps of the same heads wait for one another, and all warps of the block between two steps. What is
where: portable_prefill_plan.py; which rows an item has: portable_prefill_rows.py; how they get there:
portable_prefill_walk.py; the steps above: portable_prefill_products.py and, for softmax, mma_sync/operands.py; what
becomes of O: portable_prefill_output.py. The ops' own entry points: prefill_portable.py and mixed_portable.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint8, const_expr, range_constexpr
from cutlass.memory import SmemAllocator

from cute_kernels.dsl import mma_sync, ptx
from cute_kernels.dsl.tensor import address, length, stride_bytes
from cute_kernels.runtime.arch import arch_number
from cute_kernels.sparse_mla import portable_prefill_products as products
from cute_kernels.sparse_mla.mma_sync.operands import LANES, ROW_STATE, WARPS, any_grows, rescale, softmax
from cute_kernels.sparse_mla.portable_prefill_output import Results
from cute_kernels.sparse_mla.portable_prefill_plan import MAX_HEADS, SLAB, WALK_BYTES, Plan
from cute_kernels.sparse_mla.portable_prefill_walk import Walk, Work


class Query(NamedTuple):
    """q: address, and strides in bytes."""

    base: Any
    row: Any
    head: Any


class PortablePrefillKernel:
    """What the entry points share.

    plan      see there
    rows      which rows an item has, see portable_prefill_rows
    name      of the kernel
    is_fp8    whether q is e4m3, else it is bf16
    """

    def __init__(self, plan: Plan, rows: Any, name: str, is_fp8: bool = False) -> None:
        self.plan, self.rows, self.is_fp8 = plan, rows, is_fp8
        self.name = f"{name}_portable_h{plan.rows}"
        self.has_dependency = arch_number(plan.arch) >= ptx.DEPENDENT_LAUNCH_ARCH

    @cute.jit
    def launch(
        self, q: cute.Tensor, sources: Any, out: Results, scale_log2: Float32, blocks: Int32, stream: cuda.CUstream
    ) -> None:
        self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        blocks_bits = Int32(1) if length(q, 1) > self.plan.rows else Int32(0)
        items = length(q, 0) << blocks_bits
        query = Query(address(q), stride_bytes(q, 0), stride_bytes(q, 1))
        kernel = self.kernel(query, sources, out, scale_log2, items, blocks_bits)
        kernel.launch(
            grid=[cutlass.min(blocks, items), 1, 1], block=[WARPS * LANES, 1, 1], min_blocks_per_mp=1, stream=stream
        )

    @cute.kernel
    def kernel(
        self, q: Query, sources: Any, out: Results, scale_log2: Float32, items: Int32, blocks_bits: Int32
    ) -> None:
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        lane = thread & (LANES - 1)
        warp = cute.arch.make_warp_uniform(thread // LANES)
        plan = self.plan
        memory = SmemAllocator().allocate_tensor(Uint8, cute.make_layout(plan.smem_bytes), byte_alignment=128)
        base = memory.iterator.toint()
        if const_expr(self.has_dependency):
            cute.arch.griddepcontrol_wait()

        if thread < MAX_HEADS:
            logit = ptx.load_global_s32_where(out.sink != 0 and thread < out.heads, out.sink + Int64(thread) * 4)
            ptx.store_shared_s32(base + plan.sinks_at + thread * 4, logit)
        work = Work(block, items, blocks, blocks_bits)
        home = base + plan.walks_at + warp * WALK_BYTES
        found = cute.make_rmem_tensor((3,), Int32)
        walk = Walk(plan, self.rows, sources, work, home, found, base)
        walk.start(warp, lane)
        for early in cutlass.range(plan.stages - 1, unroll=1):
            walk.go_on(early, warp, lane)

        steps = const_expr(plan.tiles * plan.slabs * 4)
        query_words, o = mma_sync.Registers("q", steps * 4), mma_sync.Registers("o", steps * 8)
        query_words.declare()
        o.declare()
        group = warp // plan.shares
        self.wait_for_rows()
        stage: Any = Int32(0)
        item = block
        while item < items:
            lane = own_lane()
            row, head = work.row(item), work.head(item, plan.rows) + group * plan.warp_rows
            column = warp % plan.shares * (plan.slabs * SLAB)
            size = const_expr(1 if self.is_fp8 else 2)
            start = q.base + Int64(row) * q.row + Int64(head) * q.head + column * size
            products.load_query(query_words, start, q.head, out.heads - head, lane, self.is_fp8, plan)
            self.look_ahead(q, work, item + blocks, out.heads)
            o.clear()
            if warp < plan.groups:
                state = base + plan.rows_at + warp * ROW_STATE + lane * 8
                least = Float32(-Float32.inf).bitcast(Int32)
                ptx.store_shared_64(state, least, Int32(0))
                ptx.store_shared_s32(base + plan.tops_at + (warp * LANES + lane) * 4, least)
            while ptx.load_shared_s32(base + plan.labels_at + stage * 4) == item:
                self.step(walk, query_words, o, base, stage, scale_log2, warp)
                self.wait_for_rows()
                stage = Int32(0) if stage + 1 == plan.stages else stage + 1
            self.finish(o, work, item, out, base, warp)
            item += blocks

    @cute.jit
    def look_ahead(self, q: Query, work: Work, item: Any, heads: Any) -> None:
        """Ask for an item's queries: L2 has them when they are needed. On an H200, 2.5% less time at 640 keys a row."""
        line_bits = const_expr(2 if self.is_fp8 else 3)
        start = q.base + Int64(work.row(item)) * q.row
        first = work.head(item, self.plan.rows)
        for i in range_constexpr(-(-(self.plan.rows << line_bits) // (WARPS * LANES))):
            line = ptx.thread_again() + i * (WARPS * LANES)
            own = line >> line_bits
            exists = item < work.end and own < self.plan.rows and first + own < heads
            place = (line & ((1 << line_bits) - 1)) * 128
            ptx.prefetch_l2(start + Int64(first + own) * q.head + place, exists)

    @cute.jit
    def wait_for_rows(self) -> None:
        """All warps have let go of the stage before the next one, whose rows are there for all of them."""
        cute.arch.cp_async_wait_group(self.plan.stages - 2)
        cute.arch.sync_threads()

    @cute.jit
    def wait_for_group(self, warp: Any) -> None:
        """The warps of the same heads wait for one another."""
        threads = const_expr(self.plan.shares * LANES)
        cute.arch.barrier(barrier_id=1 + warp // self.plan.shares, number_of_threads=threads)

    @cute.jit
    def step(self, walk: Any, q: Any, o: Any, base: Any, stage: Any, scale_log2: Any, warp: Any) -> None:
        """Both products and the softmax of a step whose rows are in a stage."""
        plan = self.plan
        lane = own_lane()
        free = plan.stages - 1 if stage == 0 else stage - 1
        tile = base + stage * plan.stage_bytes
        masks = base + plan.masks_at + stage * (plan.keys * 4)
        # of the two warps that share a quarter of the multiprocessor, one copies while the other one multiplies
        if warp < WARPS // 2:
            walk.go_on(free, warp, lane)
        if const_expr(not plan.is_direct):
            products.to_tile(tile, base + plan.tile_at, masks, warp, lane, plan)
            tile = base + plan.tile_at
            cute.arch.sync_threads()
        group = warp // plan.shares
        columns = tile + warp % plan.shares * (plan.slabs * plan.slab_bytes)
        products.share_scores(q, base + plan.shares_at + warp * plan.share_bytes + lane * 8, columns, lane, plan)
        if warp >= WARPS // 2:
            walk.go_on(free, warp, lane)
        self.wait_for_group(warp)
        weights = base + plan.weights_at + lane * 16
        if warp < plan.groups:
            place = warp // plan.group_flags * (plan.shares * plan.share_bytes)
            place += warp % plan.group_flags * plan.group_bytes
            softmax(
                base + plan.shares_at + place + lane * 8,
                weights + (warp >> 1) * plan.operand_bytes + (warp & 1) * 4,
                masks + (lane & 3) * 8,
                base + plan.factors_at + (warp * 8 + (lane >> 2)) * 4,
                base + plan.flags_at + warp * 4,
                scale_log2,
                base + plan.rows_at + warp * ROW_STATE + lane * 8,
                lane,
                plan,
                base + plan.tops_at + (warp * LANES + lane) * 4,
            )
        self.wait_for_group(warp)
        if any_grows(base + plan.flags_at + group * (plan.group_flags * 4), plan.group_flags) != 0:
            rescale(o, base + plan.factors_at + group * (plan.warp_rows * 4), lane, plan.tiles)
        products.accumulate(o, weights + group * (plan.tiles * plan.operand_bytes), columns, lane, plan)

    @cute.jit
    def finish(self, o: Any, work: Work, item: Any, out: Results, base: Any, warp: Any) -> None:
        """Store the results of an item."""
        plan = self.plan
        lane = own_lane()
        row, head = work.row(item), work.head(item, plan.rows)
        factors = base + plan.factors_at + plan.rows * 4
        # without steps in between, some warps may still read what the item before has left
        self.wait_for_group(warp)
        if warp < plan.groups:
            own = warp * 8 + (lane >> 2)
            state = base + plan.rows_at + warp * ROW_STATE + lane * 8
            top = base + plan.tops_at + (warp * LANES + lane) * 4
            logit = ptx.load_shared_s32(base + plan.sinks_at + (head + own) * 4)
            out.finish(row, head + own, state, top, logit, factors + own * 4, lane)
        self.wait_for_group(warp)
        first = warp // plan.shares * plan.warp_rows
        column = warp % plan.shares * (plan.slabs * SLAB)
        target = out.out + Int64(row) * out.row + Int64(head + first) * out.head + column * 2
        out.store(o, target, out.heads - head - first, factors + first * 4, lane, plan.tiles)


def own_lane() -> Any:
    """The thread's lane, computed anew: products leave no registers."""
    return ptx.thread_again() & (LANES - 1)
