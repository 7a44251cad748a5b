"""Kernel of sparse_mla_decode for every architecture from sm_80 on: both products with mma.sync.

A block walks over work items (query row, part of its tiles, block of heads), in steps of some keys. Q and O stay in
registers for an item. Per step, after its rows have been copied to shared memory:

    1. the warps' shares of Q K^T, each over the warp's 64 columns, go to shared memory
    2. a warp for every 8 heads adds the shares up, moves the heads' maxima, stores P
    3. each warp adds P V to its columns of O

with the block's warps waiting for one another in between. What is where: portable_plan.py; how rows get there:
portable_source.py; the steps above: portable_operands.py, portable_products.py; what becomes of O: portable_output.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint8, const_expr, range_constexpr
from cutlass.memory import SmemAllocator

from cute_kernels.dsl import mma_sync, ptx
from cute_kernels.dsl.tensor import address, length, stride_bytes
from cute_kernels.formats import FP8_DS_MLA
from cute_kernels.runtime.arch import arch_number
from cute_kernels.sparse_mla import portable_products as products
from cute_kernels.sparse_mla.decode_args import ItemKey, fake_arguments
from cute_kernels.sparse_mla.params import EXTRA, IndexList, KVCache, TileScheduler
from cute_kernels.sparse_mla.portable_operands import columns_of, of_its_kind, paired
from cute_kernels.sparse_mla.portable_output import Output, output_of
from cute_kernels.sparse_mla.portable_plan import (
    LANES,
    ROW_STATE,
    WALK_BYTES,
    WARP_COLUMNS,
    WARPS,
    Plan,
)
from cute_kernels.sparse_mla.portable_source import DONE, SECOND, Walk


@dataclass(frozen=True)
class PortableDecodeKey(ItemKey):
    """What distinguishes one compiled kernel from another.

    heads     of a work item: 8, 16, 32 or 64
    format0   record format id of the first cache: fp8_ds_mla/1 or plain_bf16/1
    second    the second list: "none", "listed" (indices) or "dense" (a block table)
    format1   record format id of the second cache; means nothing without a second list
    out_fp32  whether out is fp32, else it is bf16
    """

    kernel_name: ClassVar[str] = "sparse_mla.mma_sync.decode"
    heads: int = 64
    format0: str = FP8_DS_MLA.id
    second: str = "listed"
    format1: str = FP8_DS_MLA.id
    out_fp32: bool = False

    def __post_init__(self) -> None:
        if self.second not in EXTRA:
            raise ValueError(f"second: expected one of {EXTRA}, got {self.second!r}")

    @property
    def formats(self) -> tuple[str, ...]:
        return (self.format0,) if self.second == "none" else (self.format0, self.format1)

    @property
    def plan(self) -> Plan:
        return Plan(self.arch, self.heads, self.formats)

    @property
    def smem_bytes(self) -> int:
        return self.plan.smem_bytes

    @property
    def instructions(self) -> tuple[str, ...]:
        loads = ("ldmatrix",) if FP8_DS_MLA.id in self.formats else ()
        return "mma.sync", "cp.async", "ex2", "ld.global.128", *loads

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        return PortableDecodeKernel(self), fake_arguments(self.out_fp32, self.format0, self.format1)


class PortableDecodeKernel:
    """Entry point: see decode_args."""

    def __init__(self, key: PortableDecodeKey) -> None:
        self.plan, self.heads, self.second, self.formats = key.plan, key.heads, key.second, key.formats
        self.tiles = self.plan.rows // 16
        self.out_fp32 = key.out_fp32
        self.has_dependency = arch_number(key.arch) >= ptx.DEPENDENT_LAUNCH_ARCH
        names = "_".join("fp8" if kv_format == FP8_DS_MLA.id else "bf16" for kv_format in key.formats)
        self.name = f"sparse_mla_decode_portable_h{key.heads}_{key.second}_{names}" + ("_fp32" if key.out_fp32 else "")

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        cache0: cute.Tensor,
        list0: cute.Tensor,
        cache1: cute.Tensor,
        list1: cute.Tensor,
        out: cute.Tensor,
        lse: cute.Tensor,
        len0: Int64,
        len0_batch: Int32,
        len0_token: Int32,
        len1: Int64,
        len1_batch: Int32,
        len1_token: Int32,
        sink: Int64,
        scale_log2: Float32,
        parts: Int32,
        part_tiles: Int32,
        ctas: Int32,
        stream: cuda.CUstream,
    ) -> None:
        self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        page_rows = length(cache1, 1) if const_expr(self.second == "dense") else 1
        items = TileScheduler.of(q, self.heads, parts, part_tiles, ctas)
        kernel = self.kernel(
            address(q),
            tuple(stride_bytes(q, axis) for axis in range(3)),
            (KVCache.of(cache0), KVCache.of(cache1)),
            (
                IndexList.of_rows(list0, (len0, len0_batch, len0_token), 1),
                IndexList.of_rows(list1, (len1, len1_batch, len1_token), page_rows),
            ),
            output_of(out, lse, sink),
            scale_log2,
            items,
        )
        kernel.launch(
            grid=[cutlass.min(ctas, items.end), 1, 1], block=[WARPS * LANES, 1, 1], min_blocks_per_mp=1, stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        q: Int64,
        q_strides: Any,
        caches: Any,
        lists: Any,
        out: Output,
        scale_log2: Float32,
        items: TileScheduler,
    ) -> None:
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        lane = thread & (LANES - 1)
        warp = cute.arch.make_warp_uniform(thread // LANES)
        plan = self.plan
        memory = SmemAllocator().allocate_tensor(Uint8, cute.make_layout(plan.smem_bytes), byte_alignment=128)
        base = memory.iterator.toint()
        if const_expr(self.has_dependency):
            cute.arch.griddepcontrol_wait()

        items = items._replace(first=block)
        walk = Walk(
            plan,
            self.second,
            items,
            caches,
            lists,
            base + plan.walks_at + warp * WALK_BYTES,
            cute.make_rmem_tensor((1,), Int32),
            base,
            base + plan.masks_at,
        )
        walk.start(lane)
        walk.fetch(warp, lane)
        for early in cutlass.range(plan.stages - 1, unroll=1):
            walk.go_on(early, warp, lane)

        q_words = mma_sync.Registers("q", self.tiles * 16)
        o = mma_sync.Registers("o", self.tiles * 32)
        q_words.declare()
        o.declare()
        factors = base + plan.factors_at
        stage: Any = Int32(0)
        item = block
        while item < items.end:
            cute.arch.sync_warp()
            ptx.store_shared_s32(walk.home + DONE * 4, item)
            lane = ptx.again(lane)
            batch, token, part, head_block = items.coords(item)
            used = lists[0].live(batch, token)
            used_second = Int32(0)
            if const_expr(self.second != "none"):
                used_second = lists[1].live(batch, token)
            first, end, first_second, end_second = items.columns(part, used, used_second)
            left = self.steps(first_second, end_second)
            ptx.store_shared_s32(walk.home + SECOND * 4, left)
            left += self.steps(first, end)
            head = head_block * self.heads
            query = q + Int64(batch) * q_strides[0] + Int64(token) * q_strides[1] + Int64(head) * q_strides[2]
            self.load_query(q_words, query, q_strides[2], cutlass.min(out.heads - head, self.heads), warp, lane)
            o.clear()
            if warp < plan.groups:
                state = base + plan.rows_at + warp * ROW_STATE + lane * 8
                ptx.store_shared_64(state, Float32(-Float32.inf).bitcast(Int32), Int32(0))
            while left > 0:
                cute.arch.cp_async_wait_group(plan.stages - 2)
                # all warps have let go of the stage before this one, and this one's rows are there for all of them
                cute.arch.sync_threads()
                self.step(walk, q_words, o, base, stage, left, scale_log2, warp, lane)
                left -= 1
                stage = Int32(0) if stage + 1 == plan.stages else stage + 1
            batch, token, part, head_block = items.coords(ptx.load_shared_s32(walk.home + DONE * 4))
            lane = ptx.again(lane)
            head = head_block * self.heads
            # without steps in between, some warps may still read what the item before has left
            cute.arch.sync_threads()
            if warp < plan.groups:
                row = warp * 8 + (lane >> 2)
                state = base + plan.rows_at + warp * ROW_STATE + lane * 8
                factor = factors + (plan.rows + row) * 4
                out.finish((part, batch, token, head + row), row < self.heads, state, factor, lane)
            cute.arch.sync_threads()
            item = ptx.load_shared_s32(walk.home + DONE * 4) + items.step
            rows = cutlass.min(out.heads - head, self.heads)
            out.store(o, (part, batch, token, head), rows, factors + plan.rows * 4, warp, lane, self.out_fp32)

    def steps(self, first: Any, end: Any) -> Any:
        return cutlass.max(end - first + (self.plan.keys - 1), Int32(0)) >> (self.plan.keys.bit_length() - 1)

    @cute.jit
    def load_query(self, q: Any, query: Any, row_bytes: Any, rows: Any, warp: Any, lane: Any) -> None:
        """The lane's operands, zeros for heads that do not exist. query: address of the item's first head."""
        start = query + Int64(lane >> 2) * row_bytes + Int64(warp * (2 * WARP_COLUMNS) + (lane & 3) * 32)
        for m in range_constexpr(self.tiles):
            for side in range_constexpr(2):
                row = 16 * m + 8 * side
                exists = row + (lane >> 2) < rows
                for i in range_constexpr(2):
                    words = paired(ptx.load_global_128_where(exists, start + row_bytes * row + 16 * i), self.plan)
                    for j in range_constexpr(4):
                        place = (m * 4 + 2 * i + j // 2) * 4 + j % 2 * 2 + side
                        q.put(place, words[j] if exists else Int32(0))

    @cute.jit
    def step(
        self,
        walk: Any,
        q: Any,
        o: Any,
        base: Any,
        stage: Any,
        left: Any,
        scale_log2: Any,
        warp: Any,
        lane: Any,
    ) -> None:
        """Both products and the softmax of a step whose rows are in a stage."""
        plan = self.plan
        lane = ptx.again(lane)
        shares = base + plan.shares_at
        own = shares + warp * plan.share_bytes + lane * 8
        weights = base + plan.weights_at
        is_second = left < 0
        if const_expr(self.formats[0] != self.formats[-1]):
            is_second = left <= ptx.load_shared_s32(walk.home + SECOND * 4)
        columns = columns_of(base + stage * plan.stage_bytes, is_second, warp, lane, plan)
        # of the two warps that share a quarter of the multiprocessor, one copies while the other one multiplies: on an
        # H200, 3% less time than if all copy first
        free = plan.stages - 1 if stage == 0 else stage - 1
        if warp < WARPS // 2:
            walk.go_on(free, warp, lane)
        of_its_kind(lambda kind: products.share_scores(q, own, columns, kind, warp, lane, plan), columns, plan)
        if warp >= WARPS // 2:
            walk.go_on(free, warp, lane)
        cute.arch.sync_threads()
        factors = base + plan.factors_at
        if warp < plan.groups:
            products.weigh(
                shares + warp * plan.group_bytes + lane * 8,
                weights + (warp >> 1) * (plan.keys // 16 * LANES * 16) + (warp & 1) * 4 + lane * 16,
                base + plan.masks_at + (stage * plan.keys + (lane & 3) * 2) * 4,
                factors + (warp * 8 + (lane >> 2)) * 4,
                base + plan.flags_at + warp * 4,
                scale_log2,
                base + plan.rows_at + warp * ROW_STATE + lane * 8,
                lane,
                plan,
            )
        cute.arch.sync_threads()
        if products.any_grows(base + plan.flags_at, plan.groups) != 0:
            products.rescale(o, factors, lane, self.tiles)
        of_its_kind(
            lambda kind: products.accumulate(o, weights + lane * 16, columns, kind, warp, lane, plan), columns, plan
        )
