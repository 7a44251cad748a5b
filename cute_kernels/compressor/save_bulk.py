"""Kernel of save_partial_states with bulk copies: a warp takes whole rows, or equal parts of them.

    stage of a warp    columns x fp32 of kv | columns x fp32 of score | slot, position

Both halves come by bulk copies; the warp adds the bias to the second where it lies, and a bulk copy takes both to the
state cache. Blocks deal the rows among each other in turn. A warp that has sent a stage away fills the one it sent
before, whose data has left by then.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint8, const_expr, range_constexpr
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from cute_kernels.dsl import ptx
from cute_kernels.dsl.tensor import address, length, stride_bytes
from cute_kernels.runtime.compile import KernelKey

MINIMUM_ARCH = 90
"""First architecture with bulk copies."""

VECTOR_BYTES = 512
"""Bytes of a row that a warp adds to with one instruction."""


@dataclass(frozen=True)
class BulkSaveKey(KernelKey):
    """What distinguishes one compiled kernel from another.

    width      columns of the kv half, and of the score half: 1024, 512 or 256
    columns    of each half per warp: `width` or a part of it, a multiple of 128
    warps      per block, a multiple of width / columns
    stages     per warp; with several, one of them is being sent while the others are being filled
    """

    width: int
    columns: int
    warps: int = 4
    stages: int = 1

    @property
    def stage_bytes(self) -> int:
        return 2 * self.columns * 4 + 16

    @property
    def smem_bytes(self) -> int:
        return self.warps * self.stages * (self.stage_bytes + 8)

    @property
    def instructions(self) -> tuple[str, ...]:
        return "bulk.load", "bulk.store", "mbarrier", "cp.async"

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        def matrix() -> Any:
            return make_fake_tensor(Float32, (cute.sym_int(), self.width), stride=(cute.sym_int64(), 1))

        def vector() -> Any:
            return make_fake_tensor(Int64, (cute.sym_int(),), stride=(1,))

        numbers = (Int64(0), Int64(0), Int32(0), Int32(1), Int32(1), Int32(1))
        stream = make_fake_stream(use_tvm_ffi_env_stream=True)
        return BulkSaveKernel(self), (matrix(), matrix(), matrix(), vector(), vector(), *numbers, stream)


class BulkSaveKernel:
    """Entry point: (kv, score, ape, positions, slots, state cache address, page stride in bytes, rows of the pool, rows
    of a page, compress ratio, blocks, stream)."""

    def __init__(self, key: BulkSaveKey) -> None:
        self.half_row = key.width * 4
        self.part = key.columns * 4
        self.segments = key.width // key.columns
        self.warps = key.warps
        self.stages = key.stages
        self.depth = max(1, key.stages - 1)
        self.stage_bytes = key.stage_bytes
        self.smem_bytes = key.smem_bytes
        self.name = f"save_partial_states_bulk_{key.width}_c{key.columns}w{key.warps}s{key.stages}"

    @cute.jit
    def __call__(
        self,
        kv: cute.Tensor,
        score: cute.Tensor,
        ape: cute.Tensor,
        positions: cute.Tensor,
        slots: cute.Tensor,
        pool: Int64,
        page_stride: Int64,
        capacity: Int32,
        block_size: Int32,
        ratio: Int32,
        blocks: Int32,
        stream: cuda.CUstream,
    ) -> None:
        self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        page_rows = cute.fast_divmod_create_divisor_v2(block_size)
        kernel = self.kernel(
            address(kv),
            stride_bytes(kv, 0),
            address(score),
            stride_bytes(score, 0),
            address(ape),
            stride_bytes(ape, 0),
            address(positions),
            address(slots),
            length(slots, 0),
            pool,
            page_stride,
            capacity,
            ratio,
            page_rows,
        )
        kernel.launch(grid=[blocks, 1, 1], block=[self.warps * 32, 1, 1], stream=stream)

    @cute.kernel
    def kernel(
        self,
        kv: Int64,
        kv_stride: Int64,
        score: Int64,
        score_stride: Int64,
        ape: Int64,
        ape_stride: Int64,
        positions: Int64,
        slots: Int64,
        count: Int32,
        pool: Int64,
        page_stride: Int64,
        capacity: Int32,
        ratio: Int32,
        page_rows: cute.FastDivmodDivisorV2,
    ) -> None:
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        lane = thread % 32
        warp = cute.arch.make_warp_uniform(thread // 32)
        column = Int64((warp % self.segments) * self.part)
        rows_at_once = self.warps // self.segments
        row = block * rows_at_once + warp // self.segments
        step = blocks * rows_at_once

        layout = cute.make_layout(self.smem_bytes)
        shared = cutlass.memory.SmemAllocator().allocate_tensor(Uint8, layout, byte_alignment=128)
        memory = Int32(shared.iterator.toint())
        buffers = memory + warp * (self.stages * self.stage_bytes)
        barriers = memory + self.warps * self.stages * self.stage_bytes + warp * (self.stages * 8)
        if lane == 0:
            for i in range_constexpr(self.stages):
                ptx.barrier_init(barriers + i * 8, 2)
            ptx.barrier_init_done()
        cute.arch.sync_warp()
        cute.arch.griddepcontrol_wait()

        sources = (kv + column, kv_stride, score + column, score_stride, positions, slots)
        if lane == 0:
            for i in range_constexpr(self.depth):
                self.fetch(row + i * step, count, buffers + i * self.stage_bytes, barriers + i * 8, *sources)
        cute.arch.sync_warp()

        stage: Any = Int32(0)
        parity: Any = Int32(0)
        free: Any = Int32(self.stages - 1)
        ahead = row + self.depth * step
        while row < count:
            ptx.barrier_wait(barriers + stage * 8, parity)
            buffer = buffers + stage * self.stage_bytes
            slot = ptx.load_shared_s64(buffer + 2 * self.part)
            position = ptx.load_shared_s64(buffer + 2 * self.part + 8)
            # the ratio is a power of two, so this is the remainder that is never negative
            bias_row = Int32(position) & (ratio - 1)
            self.add(buffer + self.part + lane * 16, ape + Int64(bias_row) * ape_stride + column + Int64(lane * 16))
            cute.arch.fence_view_async_shared()
            cute.arch.sync_warp()
            if lane == 0:
                if slot >= 0 and slot < Int64(capacity):
                    page, page_row = divmod(Int32(slot), page_rows)
                    target = pool + Int64(page) * page_stride + Int64(page_row) * (2 * self.half_row) + column
                    if const_expr(self.segments == 1):
                        ptx.bulk_store(target, buffer, 2 * self.part)
                    else:
                        ptx.bulk_store(target, buffer, self.part)
                        ptx.bulk_store(target + self.half_row, buffer + self.part, self.part)
                ptx.bulk_store_commit()
                ptx.bulk_store_sources_read(1 if const_expr(self.stages > 1) else 0)
                self.fetch(ahead, count, buffers + free * self.stage_bytes, barriers + free * 8, *sources)
            cute.arch.sync_warp()
            row += step
            ahead += step
            free = stage if const_expr(self.stages > 1) else free
            is_last = stage == self.stages - 1
            parity = parity ^ Int32(is_last)
            stage = Int32(0) if is_last else stage + 1
        if lane == 0:
            ptx.bulk_store_sources_read()

    @cute.jit
    def fetch(
        self,
        row: Any,
        count: Any,
        buffer: Any,
        barrier: Any,
        kv: Any,
        kv_stride: Any,
        score: Any,
        score_stride: Any,
        positions: Any,
        slots: Any,
    ) -> None:
        """One thread sends for a row, if there is such a row."""
        if row < count:
            source = Int64(row)
            ptx.barrier_arrive(barrier, 2 * self.part)
            ptx.bulk_load(buffer, kv + source * kv_stride, self.part, barrier)
            ptx.bulk_load(buffer + self.part, score + source * score_stride, self.part, barrier)
            ptx.copy_global_64(buffer + 2 * self.part, slots + source * 8)
            ptx.copy_global_64(buffer + 2 * self.part + 8, positions + source * 8)
            ptx.barrier_arrive_with_copies(barrier)

    @cute.jit
    def add(self, scores: Any, bias: Any) -> None:
        """Add a lane's columns of the bias row to those of the scores in shared memory."""
        vectors = self.part // VECTOR_BYTES
        together = min(vectors, 4)
        for group in range_constexpr(vectors // together):
            start = group * together * VECTOR_BYTES
            summands = []
            for i in range_constexpr(together):
                offset = start + i * VECTOR_BYTES
                summands.append((ptx.load_shared_128(scores + offset), ptx.load_global_128_again(bias + offset)))
            # the assembler moves no load across this; else it would move them to their uses, one wait after another
            cute.arch.sync_warp()
            for i in range_constexpr(together):
                score, ape = summands[i]
                words = [
                    (a.bitcast(Float32) + b.bitcast(Float32)).bitcast(Int32) for a, b in zip(score, ape, strict=True)
                ]
                ptx.store_shared_128(scores + start + i * VECTOR_BYTES, words)
