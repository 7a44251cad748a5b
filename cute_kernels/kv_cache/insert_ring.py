"""Kernel of quantize_and_insert_k_cache with few, long-lived blocks: every warp has some rows on their way.

    shared memory of a warp    stages x (row of k, its slot), two records

Rows come by bulk copies, and records leave by bulk copies. Lanes and columns: record.py and insert.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Int32, Int64, Uint8, range_constexpr
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from cute_kernels.dsl import ptx
from cute_kernels.dsl.tensor import address, length, stride_bytes
from cute_kernels.formats import FP8_DS_MLA, HEAD_DIM
from cute_kernels.kv_cache import record
from cute_kernels.kv_cache.insert import POLICIES, InsertKernel, InsertKey
from cute_kernels.runtime.compile import KernelKey

MINIMUM_ARCH = 90
"""First architecture with bulk copies."""

ROW_BYTES = HEAD_DIM * 2
STAGE_BYTES = ROW_BYTES + 16


@dataclass(frozen=True)
class RingInsertKey(KernelKey):
    """What distinguishes one compiled kernel from another.

    kv_format     record format id
    warps         per block
    stages        rows on their way per warp
    policy        of bulk stores in L2: None, "first_out", "last_out"
    """

    kv_format: str = FP8_DS_MLA.id
    warps: int = 8
    stages: int = 4
    policy: str | None = None

    @property
    def smem_bytes(self) -> int:
        return self.warps * (self.stages * (STAGE_BYTES + 8) + 2 * FP8_DS_MLA.data_bytes)

    @property
    def instructions(self) -> tuple[str, ...]:
        return "bulk.load", "bulk.store", "mbarrier", "cp.async", "cvt.e4m3"

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        stride = cute.sym_int64(divisibility=8)
        k = make_fake_tensor(BFloat16, (cute.sym_int(), HEAD_DIM), stride=(stride, 1), assumed_align=16)
        slots = make_fake_tensor(Int64, (cute.sym_int(),), stride=(1,), assumed_align=8)
        numbers = (Int64(0), Int64(0), Int32(0), Int32(1), Int32(1))
        return RingInsertKernel(self), (k, slots, *numbers, make_fake_stream(use_tvm_ffi_env_stream=True))


class RingInsertKernel:
    """Entry point: (k, slots, cache address, page stride in bytes, rows of the pool, rows of a page, blocks,
    stream)."""

    def __init__(self, key: RingInsertKey) -> None:
        self.rows = InsertKernel(InsertKey(key.arch, stores="bulk"))
        self.warps = key.warps
        self.stages = key.stages
        self.policy = POLICIES[key.policy]
        self.smem_bytes = key.smem_bytes
        self.name = f"quantize_and_insert_k_cache_ring_w{key.warps}s{key.stages}_{key.policy}"

    @cute.jit
    def __call__(
        self,
        k: cute.Tensor,
        slots: cute.Tensor,
        pool: Int64,
        page_stride: Int64,
        capacity: Int32,
        block_size: Int32,
        blocks: Int32,
        stream: cuda.CUstream,
    ) -> None:
        self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        count = length(slots, 0)
        page_rows = cute.fast_divmod_create_divisor_v2(block_size)
        kernel = self.kernel(
            address(k), stride_bytes(k, 0), address(slots), count, pool, page_stride, capacity, block_size, page_rows
        )
        kernel.launch(grid=[blocks, 1, 1], block=[self.warps * 32, 1, 1], stream=stream)

    @cute.kernel
    def kernel(
        self,
        k: Int64,
        row_bytes: Int64,
        slots: Int64,
        count: Int32,
        pool: Int64,
        page_stride: Int64,
        capacity: Int32,
        block_size: Int32,
        page_rows: cute.FastDivmodDivisorV2,
    ) -> None:
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        lane = thread % 32
        warp = cute.arch.make_warp_uniform(thread // 32)
        row = block * self.warps + warp
        step = blocks * self.warps

        layout = cute.make_layout(self.smem_bytes)
        shared = cutlass.memory.SmemAllocator().allocate_tensor(Uint8, layout, byte_alignment=128)
        memory = Int32(shared.iterator.toint())
        buffers = memory + warp * (self.stages * STAGE_BYTES)
        records = memory + self.warps * self.stages * STAGE_BYTES + warp * (2 * FP8_DS_MLA.data_bytes)
        barriers = memory + self.warps * (self.stages * STAGE_BYTES + 2 * FP8_DS_MLA.data_bytes)
        barriers += warp * (self.stages * 8)
        if lane == 0:
            for i in range_constexpr(self.stages):
                ptx.barrier_init(barriers + i * 8, 2)
            ptx.barrier_init_done()
        cute.arch.sync_warp()
        cute.arch.griddepcontrol_wait()

        if lane == 0:
            for i in range_constexpr(self.stages):
                self.fetch(row + i * step, count, buffers + i * STAGE_BYTES, barriers + i * 8, k, row_bytes, slots)
        cute.arch.sync_warp()

        stage: Any = Int32(0)
        parity: Any = Int32(0)
        out = records
        while row < count:
            barrier = barriers + stage * 8
            buffer = buffers + stage * STAGE_BYTES
            ptx.barrier_wait(barrier, parity)
            slot = ptx.load_shared_s64(buffer + ROW_BYTES)
            first = ptx.load_shared_128(buffer + lane * 16)
            second = ptx.load_shared_128(buffer + record.HALF_ROW + lane * 16)
            cute.arch.sync_warp()
            if lane == 0:
                self.fetch(row + self.stages * step, count, buffer, barrier, k, row_bytes, slots)
                ptx.bulk_store_sources_read(1)
            byte_first, byte_second = self.rows.scale_bytes(first, second)
            is_rope = lane >= record.ROPE_LANE
            scales = self.rows.collect(byte_first | (Int32(0) if is_rope else byte_second) << 16)
            codes = self.rows.codes(first, byte_first)
            codes_second = self.rows.codes(second, byte_second)
            self.rows.stage(lane, out, codes, codes_second, second)
            if lane == 0:
                if slot >= 0 and slot < Int64(capacity):
                    page, page_row = divmod(Int32(slot), page_rows)
                    start = pool + Int64(page) * page_stride
                    ptx.bulk_store(
                        start + Int64(page_row) * FP8_DS_MLA.data_bytes, out, FP8_DS_MLA.data_bytes, self.policy
                    )
                    start += Int64(block_size) * FP8_DS_MLA.data_bytes + Int64(page_row) * FP8_DS_MLA.scale_bytes
                    ptx.store_global_64(start, *scales)
                ptx.bulk_store_commit()
            cute.arch.sync_warp()
            row += step
            out = 2 * records + FP8_DS_MLA.data_bytes - out  # the other one
            is_last = stage == self.stages - 1
            parity = parity ^ Int32(is_last)
            stage = Int32(0) if is_last else stage + 1
        if lane == 0:
            ptx.bulk_store_sources_read()

    @cute.jit
    def fetch(self, row: Any, count: Any, buffer: Any, barrier: Any, k: Any, row_bytes: Any, slots: Any) -> None:
        """One thread sends for a row, if there is such a row."""
        if row < count:
            ptx.barrier_arrive(barrier, ROW_BYTES)
            ptx.bulk_load(buffer, k + Int64(row) * row_bytes, ROW_BYTES, barrier)
            ptx.copy_global_64(buffer + ROW_BYTES, slots + Int64(row) * 8)
            ptx.barrier_arrive_with_copies(barrier)
