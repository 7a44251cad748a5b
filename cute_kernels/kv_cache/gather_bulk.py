"""Kernel of dequantize_and_gather_k_cache for pages made of whole tiles, which a warp fetches with bulk copies.

A tile is a few neighbouring rows of a request that lie in one page: `rows` of them, the first one's number a multiple
of that. Its codes are one run of bytes and its scales another, so a lane fetches it with two bulk copies, and the warp
that waits for them holds no registers meanwhile. Rows of a tile that are not to be copied are fetched and dropped.

    shared memory of a warp    stages x (tiles x rows x 576 bytes of codes, tiles x rows x 8 bytes of scales)

Blocks are numbered (i, request) and a request's tiles are dealt to its blocks in turn. While a warp works on one stage
the others are on their way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Int32, Int64, Uint8, const_expr, range_constexpr
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from cute_kernels.dsl import convert, ptx
from cute_kernels.dsl.tensor import address, length, stride_bytes
from cute_kernels.formats import FP8_DS_MLA, HEAD_DIM, NOPE_DIM
from cute_kernels.kv_cache import record
from cute_kernels.runtime.compile import KernelKey

MINIMUM_ARCH = 90
"""First architecture with bulk copies."""

ROW_BYTES = HEAD_DIM * 2


@dataclass(frozen=True)
class BulkGatherKey(KernelKey):
    """What distinguishes one compiled kernel from another.

    kv_format     record format id
    gathered      whether there are gather_lens; without them the first row to copy is known to be row 0
    warps         per block
    rows          per tile: 2, 4, 8 or 16
    tiles         per warp and stage, at most 8
    stages        per warp, at most 4
    together      rows read from shared memory before the first of them is used, at most `rows`
    stores        how rows of `out` are written: "direct", or as "bulk" copies from shared memory
    """

    kv_format: str = FP8_DS_MLA.id
    gathered: bool = False
    warps: int = 4
    rows: int = 8
    tiles: int = 1
    stages: int = 1
    together: int = 2
    stores: str = "direct"

    @property
    def chunk(self) -> int:
        """Rows that a warp takes at a time."""
        return self.rows * self.tiles

    @property
    def stage_bytes(self) -> int:
        return self.chunk * (FP8_DS_MLA.data_bytes + FP8_DS_MLA.scale_bytes)

    @property
    def out_bytes(self) -> int:
        return self.chunk * ROW_BYTES if self.stores == "bulk" else 0

    @property
    def smem_bytes(self) -> int:
        return self.warps * (self.stages * (self.stage_bytes + 8) + self.out_bytes)

    @property
    def instructions(self) -> tuple[str, ...]:
        return "bulk.load", "mbarrier", "cvt.e4m3", "bulk.store" if self.stores == "bulk" else "st.global.128"

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        def stride() -> Any:
            return cute.sym_int64()

        out = make_fake_tensor(BFloat16, (cute.sym_int(), cute.sym_int(), HEAD_DIM), stride=(stride(), stride(), 1))
        lens = [make_fake_tensor(Int32, (cute.sym_int(),), stride=(1,)) for _ in range(2)]
        table = make_fake_tensor(Int32, (cute.sym_int(), cute.sym_int()), stride=(stride(), 1))
        numbers = (Int64(0), Int64(0), Int32(0), Int32(1), Int32(0), Int32(1))
        return BulkGatherKernel(self), (out, *lens, table, *numbers, make_fake_stream(use_tvm_ffi_env_stream=True))


class BulkGatherKernel:
    """Entry point: (out, seq_lens, gather_lens or anything like them, block table, cache address, page stride in bytes,
    pages of the pool, rows of a page, first row of out to write, blocks per request, stream)."""

    def __init__(self, key: BulkGatherKey) -> None:
        self.gathered = key.gathered
        self.warps = key.warps
        self.rows = key.rows
        self.tiles = key.tiles
        self.chunk = key.chunk
        self.stages = key.stages
        self.together = key.together
        self.stage_bytes = key.stage_bytes
        self.out_bytes = key.out_bytes
        self.smem_bytes = key.smem_bytes
        self.bulk_stores = key.stores == "bulk"
        self.name = (
            f"dequantize_and_gather_k_cache_bulk_w{key.warps}r{key.rows}t{key.tiles}s{key.stages}g{key.together}_{key.stores}"
            + ("_gathered" if key.gathered else "")
        )

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
        start = (block * self.warps + warp) * self.chunk
        step = blocks * (self.warps * self.chunk)

        layout = cute.make_layout(self.smem_bytes)
        shared = cutlass.memory.SmemAllocator().allocate_tensor(Uint8, layout, byte_alignment=128)
        memory = Int32(shared.iterator.toint())
        buffers = memory + warp * (self.stages * self.stage_bytes)
        staged = memory + self.warps * self.stages * self.stage_bytes + warp * self.out_bytes
        barriers = memory + self.warps * (self.stages * self.stage_bytes + self.out_bytes) + warp * (self.stages * 8)
        if lane == 0:
            for i in range_constexpr(self.stages):
                ptx.barrier_init(barriers + i * 8, self.tiles)
            ptx.barrier_init_done()
        cute.arch.sync_warp()
        target = out + Int64(request) * out_request
        table += Int64(request) * table_stride
        cute.arch.griddepcontrol_wait()

        count = ptx.load_global_s32_in_order(seq_lens + Int64(request) * 4)
        first = Int32(0)
        if const_expr(self.gathered):
            seq_len = count
            count = cutlass.min(ptx.load_global_s32_in_order(gather_lens + Int64(request) * 4), seq_len)
            first = seq_len - count
        # rows are counted from `base`, the start of a tile; the first `skipped` of them are not copied
        base: Any = first & Int32(-self.rows)
        skipped = first - base
        end = cutlass.min(count, room) + skipped

        pool_of = (table, width, pool, page_stride, pages, block_size, page_rows)
        named = Int32(0)  # eight bits per stage: which of its tiles have a page
        for i in range_constexpr(self.stages):
            at = start + i * step
            named = self.fetch(lane, i, at, end, base, buffers, barriers, named, *pool_of)

        stage: Any = Int32(0)
        parity: Any = Int32(0)
        while start < end:
            ptx.barrier_wait(barriers + stage * 8, parity)
            data = buffers + stage * self.stage_bytes
            scales = data + self.chunk * FP8_DS_MLA.data_bytes
            tile_mask = named >> (stage * 8)
            if const_expr(self.bulk_stores):
                ptx.bulk_store_sources_read()
                cute.arch.sync_warp()
            for group in cutlass.range(self.chunk // self.together, unroll=1):
                read = []
                for j in range_constexpr(self.together):
                    i = group * self.together + j
                    read.append(self.read(lane, data + i * FP8_DS_MLA.data_bytes, scales + i * FP8_DS_MLA.scale_bytes))
                # the assembler moves no load across this; else it would move them to their uses, one wait after another
                cute.arch.sync_warp()
                for j in range_constexpr(self.together):
                    i = group * self.together + j
                    low, high = self.decode(lane, *read[j])
                    if const_expr(self.bulk_stores):
                        row = staged + i * ROW_BYTES + lane * 16
                        ptx.store_shared_128(row, low)
                        ptx.store_shared_128(row + record.HALF_ROW, high)
                    else:
                        position = start + i
                        is_copied = (
                            position >= skipped and position < end and ((tile_mask >> (i // self.rows)) & 1) != 0
                        )
                        row_target = target + Int64(position - skipped) * out_row + Int64(lane * 16)
                        ptx.store_global_128(row_target, low, is_copied)
                        ptx.store_global_128(row_target + record.HALF_ROW, high, is_copied)
            if const_expr(self.bulk_stores):
                cute.arch.fence_view_async_shared()
                cute.arch.sync_warp()
                self.send(lane, staged, start, end, skipped, tile_mask, target, out_row)
            else:
                cute.arch.sync_warp()
            ahead = start + self.stages * step
            if ahead < end:
                named = self.fetch(lane, stage, ahead, end, base, buffers, barriers, named, *pool_of)
            start += step
            is_last = stage == self.stages - 1
            parity = parity ^ Int32(is_last)
            stage = Int32(0) if is_last else stage + 1
        if const_expr(self.bulk_stores):
            ptx.bulk_store_sources_read()

    @cute.jit
    def fetch(
        self,
        lane: Any,
        stage: Any,
        start: Any,
        end: Any,
        base: Any,
        buffers: Any,
        barriers: Any,
        named: Any,
        table: Any,
        width: Any,
        pool: Any,
        page_stride: Any,
        pages: Any,
        block_size: Any,
        page_rows: Any,
    ) -> Any:
        """Send for the tiles from row `start` on, one a lane. Returns `named`, brought up to date."""
        tile = start + lane * self.rows
        position = base + tile
        column, row = divmod(cutlass.max(position, 0), page_rows)
        nearest = cutlass.max(cutlass.min(column, width - 1), 0)
        page = ptx.load_global_s32_in_order(table + Int64(nearest) * 4)
        is_mine = lane < self.tiles
        is_named = (
            is_mine and tile >= 0 and tile < end and position >= 0 and column < width and page >= 0 and page < pages
        )
        bits = cute.arch.vote_ballot_sync(is_named)
        named = (named & ~(Int32(0xFF) << (stage * 8))) | (bits << (stage * 8))
        if is_mine:
            barrier = barriers + stage * 8
            ptx.barrier_arrive(
                barrier, Int32(self.rows * (FP8_DS_MLA.data_bytes + FP8_DS_MLA.scale_bytes)) if is_named else Int32(0)
            )
            if is_named:
                data = buffers + stage * self.stage_bytes
                scales = data + self.chunk * FP8_DS_MLA.data_bytes
                origin = pool + Int64(page) * page_stride
                size = self.rows * FP8_DS_MLA.data_bytes
                ptx.bulk_load(data + lane * size, origin + Int64(row) * FP8_DS_MLA.data_bytes, size, barrier)
                size = self.rows * FP8_DS_MLA.scale_bytes
                origin += Int64(block_size) * FP8_DS_MLA.data_bytes + Int64(row) * FP8_DS_MLA.scale_bytes
                ptx.bulk_load(scales + lane * size, origin, size, barrier)
        cute.arch.sync_warp()
        return named

    @cute.jit
    def read(self, lane: Any, data: Any, scales: Any) -> Any:
        """What a lane needs of a row in shared memory: scales, codes of either half, and the rest of its rope."""
        is_rope = lane >= record.ROPE_LANE
        offset = NOPE_DIM + (lane - record.ROPE_LANE) * 16
        return (
            ptx.load_shared_64(scales),
            ptx.load_shared_64(data + lane * 8),
            ptx.load_shared_64(data + (offset if is_rope else 256 + lane * 8)),
            ptx.load_shared_64(data + (offset + 8 if is_rope else lane * 8)),
        )

    @cute.jit
    def decode(self, lane: Any, scale: Any, codes: Any, second: Any, rest: Any) -> Any:
        """A lane's first and second eight columns of the row, four words each."""
        is_rope = lane >= record.ROPE_LANE
        shift = lane // 8 * 8
        factor = convert.ue8m0_value((scale[0] >> shift) & 0xFF)
        factor_second = convert.ue8m0_value((scale[1] >> shift) & 0xFF)
        words = self.values(codes, factor)
        words_second = self.values(second, factor_second)
        return words, (
            second[0] if is_rope else words_second[0],
            second[1] if is_rope else words_second[1],
            rest[0] if is_rope else words_second[2],
            rest[1] if is_rope else words_second[3],
        )

    def values(self, codes: Any, factor: Any) -> Any:
        """A lane's eight columns as four bf16 pairs."""
        return convert.bf16x4_from_e4m3(codes[0], factor) + convert.bf16x4_from_e4m3(codes[1], factor)

    @cute.jit
    def send(
        self,
        lane: Any,
        staged: Any,
        start: Any,
        end: Any,
        skipped: Any,
        tile_mask: Any,
        target: Any,
        out_row: Any,
    ) -> None:
        """Write the staged rows to `out`: all at once if all are wanted and lie side by side there."""
        position = start + lane
        is_mine = lane < self.chunk
        is_copied = (
            is_mine
            and position >= skipped
            and position < end
            and ((tile_mask >> cutlass.min(lane // self.rows, 7)) & 1) != 0
        )
        is_whole = cute.arch.vote_all_sync(is_copied or not is_mine) and out_row == ROW_BYTES
        if is_whole:
            if lane == 0:
                first = target + Int64(start - skipped) * out_row
                ptx.bulk_store(first, staged, self.chunk * ROW_BYTES)
        elif is_copied:
            ptx.bulk_store(target + Int64(position - skipped) * out_row, staged + lane * ROW_BYTES, ROW_BYTES)
        ptx.bulk_store_commit()


def supports(block_size: int, rows: int, address: int, page_stride: int) -> bool:
    """Whether tiles of that many rows fill pages, and bulk copies can read them."""
    return block_size % rows == 0 and address % 16 == 0 and page_stride % 16 == 0
