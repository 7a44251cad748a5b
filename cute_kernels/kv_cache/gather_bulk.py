"""Kernel of dequantize_and_gather_k_cache for many rows: bulk copies bring four neighbouring rows of a page at a time.

    a stage, in shared memory      4 x 576 bytes of data | 4 x 8 scale bytes
    a warp                         two stages, each with an mbarrier; warps have nothing to do with one another

Chunks of four rows are aligned in the request, and so in a page, whose rows are a multiple of four. The first and the
last chunk may reach beyond the rows to gather: they are copied as wholes, and what is too much is not stored.

Chunks are dealt to the warps in turn. A call that fits the grid gives a warp two of them, both under way at once; in
longer ones a stage is filled again as soon as it is used up. A chunk without a page completes its stage's barrier too,
with no bytes, so that every stage is waited for in the same way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Int32, Int64, Uint8, const_expr, range_constexpr
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from cutlass.memory import SmemAllocator

from cute_kernels.dsl import ptx
from cute_kernels.dsl.tensor import address, length, stride_bytes
from cute_kernels.formats import FP8_DS_MLA, HEAD_DIM, NOPE_DIM
from cute_kernels.kv_cache import decode, record
from cute_kernels.runtime.compile import KernelKey

MINIMUM_ARCH = 90
"""First architecture with bulk copies."""

CHUNK_ROWS = 4

ALIGNMENT = 16
"""Of pools and pages, and so of the rows and scales of a chunk."""


@dataclass(frozen=True)
class GatherBulkKey(KernelKey):
    """What distinguishes one compiled kernel from another.

    kv_format     record format id
    gathered      whether there are gather_lens; without them the first row to copy is known to be row 0
    warps         per block
    rows          per chunk: 2, 4, 8 ...; divides the rows of a page
    stages        of each warp

    Four warps with two stages of four rows were the fastest, or as fast as any, in all measured calls of 16384 rows and
    more on an H200: perf/notes/memory_bound.md.
    """

    kernel_name: ClassVar[str] = "kv_cache.gather_bulk"
    kv_format: str = FP8_DS_MLA.id
    gathered: bool = False
    warps: int = 4
    rows: int = CHUNK_ROWS
    stages: int = 2

    @property
    def instructions(self) -> tuple[str, ...]:
        return "bulk.load", "mbarrier", "cvt.e4m3", "st.global.128"

    @property
    def block_rows(self) -> int:
        """Rows of one pass of a block."""
        return self.warps * self.stages * self.rows

    @property
    def stage_bytes(self) -> int:
        return self.rows * (FP8_DS_MLA.data_bytes + FP8_DS_MLA.scale_bytes)

    @property
    def smem_bytes(self) -> int:
        return self.warps * self.stages * (self.stage_bytes + 8)

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        def stride() -> Any:
            return cute.sym_int64()

        out = make_fake_tensor(BFloat16, (cute.sym_int(), cute.sym_int(), HEAD_DIM), stride=(stride(), stride(), 1))
        lens = [make_fake_tensor(Int32, (cute.sym_int(),), stride=(1,)) for _ in range(2)]
        table = make_fake_tensor(Int32, (cute.sym_int(), cute.sym_int()), stride=(stride(), 1))
        numbers = (Int64(0), Int64(0), Int32(0), Int32(self.rows), Int32(0), Int32(1))
        return GatherBulkKernel(self), (out, *lens, table, *numbers, make_fake_stream(use_tvm_ffi_env_stream=True))


class GatherBulkKernel:
    """Entry point: as that of gather.GatherKernel."""

    def __init__(self, key: GatherBulkKey) -> None:
        self.arch = key.arch
        self.gathered = key.gathered
        self.warps = key.warps
        self.rows = key.rows
        self.stages = key.stages
        self.stage_bytes = key.stage_bytes
        self.data_bytes = key.rows * FP8_DS_MLA.data_bytes
        form = f"w{key.warps}r{key.rows}s{key.stages}" + ("_gathered" if key.gathered else "")
        self.name = f"dequantize_and_gather_k_cache_bulk_{form}"

    @cute.jit
    def __call__(
        self,
        out: cute.Tensor,
        seq_lens: cute.Tensor,
        gather_lens: cute.Tensor,
        table: cute.Tensor,
        pool: Int64,
        page_stride: Int64,
        pages: Int32,
        block_size: Int32,
        offset: Int32,
        blocks: Int32,
        stream: cuda.CUstream,
    ) -> None:
        self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        out_row = stride_bytes(out, 1)
        page_rows = cute.fast_divmod_create_divisor_v2(block_size)
        kernel = self.kernel(
            address(out) + Int64(offset) * out_row,
            stride_bytes(out, 0),
            out_row,
            length(out, 1) - offset,
            address(seq_lens),
            address(gather_lens),
            address(table),
            stride_bytes(table, 0),
            length(table, 1),
            pool,
            page_stride,
            pages,
            block_size,
            page_rows,
        )
        requests = length(seq_lens, 0)
        kernel.launch(grid=[blocks, requests, 1], block=[self.warps * 32, 1, 1], stream=stream)

    @cute.kernel
    def kernel(
        self,
        out: Int64,
        out_request: Int64,
        out_row: Int64,
        room: Int32,
        seq_lens: Int64,
        gather_lens: Int64,
        table: Int64,
        table_stride: Int64,
        width: Int32,
        pool: Int64,
        page_stride: Int64,
        pages: Int32,
        block_size: Int32,
        page_rows: cute.FastDivmodDivisorV2,
    ) -> None:
        thread, _, _ = cute.arch.thread_idx()
        block, request, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        lane = thread % 32
        warp = cute.arch.make_warp_uniform(thread // 32)
        smem = SmemAllocator()
        memory = smem.allocate_tensor(
            Uint8, cute.make_layout(self.warps * self.stages * self.stage_bytes), byte_alignment=128
        )
        ring = memory.iterator.toint() + warp * (self.stages * self.stage_bytes)
        barriers = smem.allocate_array(Int64, self.warps * self.stages) + warp * self.stages
        if lane == 0:
            for stage in range_constexpr(self.stages):
                cute.arch.mbarrier_init(barriers + stage, 1)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_warp()
        target = out + Int64(request) * out_request
        table += Int64(request) * table_stride
        cute.arch.griddepcontrol_wait()

        # all warps read the same lengths: through L1, a multiprocessor asks for them once
        count = ptx.load_global_s32_again(seq_lens + Int64(request) * 4)
        first = Int32(0)
        if const_expr(self.gathered):
            seq_len = count
            count = cutlass.min(ptx.load_global_s32_again(gather_lens + Int64(request) * 4), seq_len)
            first = seq_len - count
        # rows of the first chunk that come before the first row; rows are counted from the first chunk on
        lead = first & (self.rows - 1)
        origin = first - lead
        start = (block * self.warps + warp) * self.rows
        step = blocks * (self.warps * self.rows)
        pending = [
            self.find_page(origin + start + stage * step, table, width, pages, page_rows)
            for stage in range(self.stages)
        ]
        count = cutlass.min(count, room)
        end = lead + count if count > 0 else Int32(0)
        for stage in range_constexpr(self.stages):
            row = start + stage * step
            if lane == 0 and row < end:
                self.fetch(
                    stage, pending[stage], origin + row, ring, barriers, pool, page_stride, block_size, page_rows
                )
        phase = Int32(0)
        while start < end:
            for stage in range_constexpr(self.stages):
                if start < end:
                    page = pending[stage]
                    later = start + self.stages * step
                    pending[stage] = self.find_page(origin + later, table, width, pages, page_rows)
                    cute.arch.mbarrier_wait(barriers + stage, phase)
                    for i in range_constexpr(self.rows):
                        row = start - lead + i
                        is_wanted = page >= 0 and row >= 0 and row < count
                        self.store_row(
                            target + Int64(row) * out_row, lane, ring + stage * self.stage_bytes, i, is_wanted
                        )
                    # no lane reads the stage any more
                    cute.arch.sync_warp()
                    if lane == 0 and later < end:
                        self.fetch(
                            stage,
                            pending[stage],
                            origin + later,
                            ring,
                            barriers,
                            pool,
                            page_stride,
                            block_size,
                            page_rows,
                        )
                    start += step
            phase ^= 1

    @cute.jit
    def find_page(self, position: Any, table: Any, width: Any, pages: Any, page_rows: Any) -> Any:
        """Page of a row of the request, -1 if it has none."""
        column, _ = divmod(position, page_rows)
        entry = ptx.load_global_s32_again(table + Int64(cutlass.max(cutlass.min(column, width - 1), 0)) * 4)
        is_named = position >= 0 and column < width and entry >= 0 and entry < pages
        return entry if is_named else Int32(-1)

    @cute.jit
    def fetch(
        self,
        stage: Any,
        page: Any,
        position: Any,
        ring: Any,
        barriers: Any,
        pool: Any,
        page_stride: Any,
        block_size: Any,
        page_rows: Any,
    ) -> None:
        """By one lane: have a chunk copied into a stage, whose barrier completes when that is done."""
        barrier = barriers + stage
        if page >= 0:
            _, row = divmod(position, page_rows)
            start = pool + Int64(page) * page_stride
            scales = start + Int64(block_size) * FP8_DS_MLA.data_bytes + Int64(row) * FP8_DS_MLA.scale_bytes
            shared = ring + stage * self.stage_bytes
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, self.stage_bytes)
            data = start + Int64(row) * FP8_DS_MLA.data_bytes
            ptx.copy_bulk(shared, data, self.data_bytes, barrier.toint())
            ptx.copy_bulk(shared + self.data_bytes, scales, self.stage_bytes - self.data_bytes, barrier.toint())
        else:
            cute.arch.mbarrier_arrive(barrier)

    @cute.jit
    def store_row(self, target: Any, lane: Any, stage: Any, i: int, predicate: Any) -> None:
        """Row `i` of the stage at shared address `stage`, to `target`."""
        start = stage + i * FP8_DS_MLA.data_bytes
        is_rope = lane >= record.ROPE_LANE
        rope = start + NOPE_DIM + (lane % 8) * 16
        codes = ptx.load_shared_64(start + lane * 8)
        second = ptx.load_shared_64(rope if is_rope else start + record.HALF_CODES + lane * 8)
        scales = ptx.load_shared_64(stage + self.data_bytes + i * FP8_DS_MLA.scale_bytes)
        rope_words = second + ptx.load_shared_64(rope + 8)
        decode.store_decoded(target, lane, codes, second, rope_words, scales, predicate, self.arch)
