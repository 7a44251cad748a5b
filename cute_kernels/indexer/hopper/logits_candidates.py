# SPDX-License-Identifier: Apache-2.0
"""Scores of candidate blocks on Hopper (score_candidates_decode, score_candidates_prefill): the mainloops and the
epilogue of logits.py and logits_mxfp4.py, with keys that a row's candidates name.

    warps 0 ..     3 or 4 consumer warpgroups
    then 3 or 4    producer warps, one for each consumer warpgroup; those of MXFP4 prepare scales, too
    then 1         counts the keys in each row's candidates, for the kernel that picks

    candidates    gmem ---> block of eight keys --(block table: page)--> its address
    keys, scales  gmem --cp.async, 16 bytes a lane--> ring of keys

Rows have candidates of their own, so a group is one row. Keys are counted in the order of the candidates: with tiles of
n candidates tile t has candidates n t to n t + n - 1, and score 8 m + i is that of key i of candidate m. Scores are
compact: a row has eight for each of its candidates, and behind them, in column `columns`, how many there are.

A block of eight keys is 1 KB, of MXFP4 512 bytes. That is little for a bulk copy, which one lane after the other has to
ask for, with addresses in registers of the whole warp: two of them for codes and scales take a producer warp 190 ns. A
warp's asynchronous copies bring 512 bytes an instruction, wherever they lie.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float8E4M3FN, Float32, Int32, Int64, const_expr, range_constexpr
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from cutlass.memory import SmemAllocator

from cute_kernels.dsl import barriers, ptx, wgmma
from cute_kernels.dsl.tensor import address, stride_bytes
from cute_kernels.indexer.chunks import CANDIDATE_BLOCK
from cute_kernels.indexer.hopper import logits, logits_mxfp4
from cute_kernels.indexer.hopper.epilogue import Epilogue
from cute_kernels.indexer.hopper.logits import LogitsConfig
from cute_kernels.indexer.hopper.logits_mxfp4 import STRIP, Mxfp4Config, ScalePreparer, fill_table, sign_of
from cute_kernels.indexer.params import WARP, KeyCache, RowGroups, TileScheduler, Windows, WorkTile
from cute_kernels.indexer.producer import LINE, KeyTile, Producer, QueryCopy, advance, code_rows
from cute_kernels.runtime.compile import KernelKey

COPY = 16
"""Bytes of codes that a lane copies at a time."""

FEW_BYTES = 8 << 20
"""Of scores that L2 keeps for the kernel that picks: 4 MB cost 2.3 us less then (perf/log/candidates.md)."""

PARTIAL = 16
"""First bit of a header's boxes that says which box begins with keys that do not exist."""


class CandidateWindows(Windows):
    """Of rows that see the keys of their candidate blocks alone, counted in the order of these: a row has candidates
    for all columns, or fewer if these are all its blocks. The newest block, the last one, alone may not be full.
    `shifts` is the most keys that a row sees, counted from its start, -1 if there is no such number."""

    @cute.jit
    def keys(self, start: Any, end: Any) -> Any:
        """How many keys there are in the candidates of a row that sees so many."""
        seen = cutlass.max(Int64(cutlass.min(end, self.limit)) - Int64(start), Int64(0))
        most = Int64(self.shifts)
        seen = cutlass.min(seen, most) if most >= 0 else seen
        blocks = (seen + (CANDIDATE_BLOCK - 1)) >> CANDIDATE_BLOCK.bit_length() - 1
        missing = blocks * CANDIDATE_BLOCK - Int64(self.columns)
        return Int32(seen - cutlass.max(missing, Int64(0)))

    @cute.jit
    def clip(self, start: Any, end: Any) -> tuple[Any, Any, Any]:
        stop = self.keys(start, end)
        return Int32(0), (stop if stop > self.skip else Int32(0)), Int32(0)


class CandidateCache(NamedTuple):
    """Keys in candidate blocks, a box each.

    keys         where they are
    codes        address of those of key 0 of page 0
    key_stride   bytes from one contiguous key's codes to the next one's
    candidates   address, and `stride` bytes from one row's to the next one's
    """

    keys: KeyCache
    codes: Any
    key_stride: Any
    candidates: Any
    stride: Any

    @cute.jit
    def load_block(self, row: Any, box: Any, is_wanted: Any) -> Any:
        """Block that is candidate number `box` of the row, negative if it is not wanted."""
        source = self.candidates + Int64(row) * self.stride + Int64(box) * 4
        return ptx.load_global_s32_where(is_wanted, source, is_shared=True)

    @cute.jit
    def load_page(self, request: Any, block: Any) -> tuple[Any, Any]:
        """Page, which may not exist, and place in it of a block."""
        return self.keys.load_page(request, cutlass.max(block, Int32(0)), block >= 0)


class Box(NamedTuple):
    """Of a lane's box: whether it exists, whether it begins with keys that do not, and where it is: addresses of its
    codes and scales, a word each for the lower and the upper half; of contiguous keys the first one's number."""

    is_there: Any
    is_partial: Any
    place: tuple[Any, ...]


def from_lane(halves: tuple[Any, Any], lane: Any) -> Any:
    """An address that a lane has."""
    return ptx.pair(*(cute.arch.shuffle_sync(half, lane) for half in halves))


@dataclass(frozen=True)
class CandidateProducer(Producer):
    """A producer warp. A lane knows where every 32nd of the warp's boxes is. While boxes are copied the pages of the
    next 32 are on their way, and the candidates of those after them."""

    @property
    def lanes_copy_keys(self) -> bool:
        return True

    @cute.jit
    def load_blocks(self, work_tile: WorkTile, start: Any) -> Any:
        """A lane's candidate among those of the consumer's tiles from its number `start` on, negative if it has
        none."""
        row = work_tile.request * self.groups.count + work_tile.first_row
        return self.cache.load_block(row, *self.own_box(work_tile, start))

    @cute.jit
    def load_pages(self, work_tile: WorkTile, start: Any) -> tuple[Any, Any]:
        """Of the lanes' boxes page, which may not exist, and place in it; of contiguous keys block and the row's
        start."""
        block = self.load_blocks(work_tile, start)
        place = Int32(0)
        if const_expr(self.paged):
            block, place = self.cache.load_page(work_tile.request, block)
        else:
            place = ptx.load_global_s32_in_order(self.windows.start_address(work_tile.first_row), is_shared=True)
        return block, place

    @cute.jit
    def box(self, page: Any, place: Any) -> Box:
        """The lane's box, of what load_pages says of it."""
        keys, size = self.cache.keys, CANDIDATE_BLOCK
        if const_expr(self.paged):
            offset = Int64(page) * keys.page_stride
            codes = self.cache.codes + offset + Int64(place) * (size * self.config.row_bytes)
            scales = keys.scales + offset + Int64(place) * (size * 4)
            return Box(keys.existing(page) >= 0, None, (*ptx.halves(codes), *ptx.halves(scales)))
        key = Int64(place) + Int64(page) * size
        is_there = (page >= 0) & (key > -size) & (key < Int64(keys.count))
        return Box(is_there, is_there & (key < 0), (Int32(key),))

    @cute.jit
    def copy_tiles_async(self, work_tile: WorkTile, pages: Any, places: Any, stage: Any, phase: Any) -> Any:
        config, ring = self.config, self.bars.keys
        lane = cute.arch.lane_idx()
        per_load = WARP // config.boxes
        taken = work_tile.taken
        blocks = self.load_blocks(work_tile, Int32(per_load))
        missing = Int32(0) if self.paged else (-places & CANDIDATE_BLOCK - 1) << 1
        for start in cutlass.range(0, taken, per_load, unroll=1):
            box = self.box(pages, places)
            if const_expr(self.paged):
                pages, places = self.cache.load_page(work_tile.request, blocks)
            else:
                pages = blocks
            blocks = self.load_blocks(work_tile, start + 2 * per_load)
            are_there = cute.arch.vote_ballot_sync(box.is_there)
            for i in cutlass.range(cutlass.min(Int32(per_load), taken - start), unroll=1):
                tile, lead = work_tile.own + (start + i) * work_tile.step, i * config.boxes
                mask = self.of_tile(are_there, lead)
                boxes = mask
                if const_expr(not self.paged):
                    boxes = mask | self.of_tile(cute.arch.vote_ballot_sync(box.is_partial), lead) << PARTIAL
                ring.wait_empty(stage, phase)
                if lane == 0:
                    tagged = work_tile.tagged_key(tile) | missing
                    self.publish_header(stage, work_tile.group, tagged, boxes, work_tile.turn, 0)
                self.copy_codes_async(box.place, lead, mask, stage)
                self.copy_scales_async(box.place, lead, mask, stage)
                cute.arch.cp_async_mbarrier_arrive_noinc(ring.full(stage))
                stage, phase = advance(stage, phase, config)
                if const_expr(self.scale_preparer is not None):
                    self.scale_preparer.follow()
        return stage, phase

    def of_tile(self, ballot: Any, lead: Any) -> Any:
        """What lanes have said of the boxes of a tile, of which lane `lead` has the first."""
        return ballot >> lead & ((1 << self.config.boxes) - 1)

    @cute.jit
    def copy_codes_async(self, place: tuple[Any, ...], lead: Any, mask: Any, stage: Any) -> None:
        """Of the boxes of a tile that are in the mask."""
        config, lane = self.config, cute.arch.lane_idx()
        _, target = self.key_copy
        chunks = config.row_bytes // COPY
        row, chunk = lane // chunks, lane % chunks
        line = target + stage * (config.keys * config.row_bytes) + row * config.row_bytes
        # rows of a request share keys, which L2 should keep for them
        policy = Int64(ptx.READ_AGAIN) if self.groups.count > 1 else Int64(ptx.READ_ONCE)
        for j in range_constexpr(config.boxes):
            is_there = mask & (1 << j) != 0
            if const_expr(self.paged):
                source = from_lane(place[:2], lead + j) + Int64(lane * COPY)
            else:
                key = cute.arch.shuffle_sync(place[0], lead + j) + row
            for first in range_constexpr(0, config.box, WARP // chunks):
                if const_expr(self.paged):
                    address = source + first * config.row_bytes
                else:
                    address = self.cache.codes + Int64(key + first) * self.cache.key_stride + Int64(chunk * COPY)
                    is_there = (mask & (1 << j) != 0) & (key + first >= 0) & (key + first < self.cache.keys.count)
                # FP8 codes go where the swizzle of tensor cores' operands has them
                column = (chunk ^ row + first) if self.q_scales is None else chunk
                to = line + (j * config.box + first) * config.row_bytes + column * COPY
                ptx.copy_async_128_once(to, address, is_there, policy)

    @cute.jit
    def copy_scales_async(self, place: tuple[Any, ...], lead: Any, mask: Any, stage: Any) -> None:
        """Of the boxes of a tile that are in the mask."""
        config, lane = self.config, cute.arch.lane_idx()
        scales = self.smem.scales + stage * (config.keys * 4)
        if const_expr(self.paged):
            halves = config.box * 4 // COPY
            number, half = lane // halves, lane % halves
            source = from_lane(place[2:], lead + number) + Int64(half * COPY)
            ptx.copy_async_128(scales + lane * COPY, source, (mask >> number & 1 != 0) & (number < config.boxes))
        else:
            for first in range_constexpr(0, config.keys, WARP):
                number = first + lane
                box = number // config.box
                key = cute.arch.shuffle_sync(place[0], lead + box) + number % config.box
                is_there = (mask >> box & 1 != 0) & (key >= 0) & (key < self.cache.keys.count)
                ptx.copy_async_32(scales + number * 4, self.cache.keys.scales + Int64(key) * 4, is_there)


@dataclass(frozen=True)
class CandidateEpilogue(Epilogue):
    """The epilogue of one thread."""

    @property
    def has_holes(self) -> bool:
        return True

    def is_there(self, tile: KeyTile, own: Any) -> Any:
        boxes = tile.boxes >> own // self.config.box
        is_there = boxes & 1 != 0
        if not self.paged:
            is_missing = own % CANDIDATE_BLOCK < tile.tagged_key >> 1 & CANDIDATE_BLOCK - 1
            is_there &= (boxes >> PARTIAL & 1 == 0) | (is_missing ^ True)
        return is_there


@cute.jit
def count_keys(
    paged: cutlass.Constexpr, groups: RowGroups, windows: CandidateWindows, out: Int64, out_stride: Int64
) -> None:
    """Write how many keys each row's candidates have. By one warp of each CTA, a row a lane."""
    cta, ctas = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
    column = Int64(windows.columns) * 4
    rows = groups.requests * groups.count
    for row in cutlass.range(cta * WARP + cute.arch.lane_idx(), rows, ctas * WARP, unroll=1):
        request, number = row // groups.count, row % groups.count
        start, end = Int32(0), ptx.load_global_s32_in_order(windows.end_address(request, number))
        if const_expr(not paged):
            start = ptx.load_global_s32_in_order(windows.start_address(number))
        ptx.store_global_s32(out + Int64(row) * out_stride + column, windows.keys(start, end))


@cute.jit
def prefetch_candidates(
    warp: Any, warps: cutlass.Constexpr, groups: RowGroups, windows: CandidateWindows, cache: CandidateCache
) -> None:
    """Have L2 fetch lengths and, of a call with few rows, the candidates, as producer.prefetch_lengths does."""
    rows, per_row = groups.requests * groups.count, cute.ceil_div(windows.columns // CANDIDATE_BLOCK, LINE // 4)
    number = cute.arch.block_idx()[0] * WARP + cute.arch.lane_idx()
    row, line = number // per_row, number % per_row
    is_last = warp == warps - 1
    end = windows.end_address(number // groups.count, number % groups.count)
    ptx.prefetch_l2(end, (number < rows) & is_last)
    ptx.prefetch_l2(cache.candidates + Int64(row) * cache.stride + Int64(line) * LINE, (row < rows) & is_last)


@dataclass(frozen=True)
class CandidateConfig(LogitsConfig):
    """Of FP8 keys that a warp's lanes copy."""

    fences_keys: ClassVar[bool] = True


@dataclass(frozen=True)
class CandidateMxfp4Config(Mxfp4Config):
    """Of MXFP4 keys that a warp's lanes copy, where all warps have as many registers."""

    @property
    def warpgroups(self) -> int:
        return 3


class CandidateLogitsKernel:
    """Entry point: (weights, address of the queries and their strides in bytes, by request, row and head;
    requests, rows of a request; addresses of key 0 and its scale, strides of contiguous keys and of pages in bytes,
    keys of a page, pages; address of the block table, its stride in bytes and its columns; address and row stride of
    the candidates, blocks of a row; addresses of starts and ends, stride of the ends by request in bytes, keys that
    there are, most keys of a row or -1, keys up to which a row is not scored; address and row stride of the scores;
    address of the queries' scales and their strides in bytes, by request and row; CTAs; stream)."""

    def __init__(self, key: CandidateLogitsKey) -> None:
        self.config, self.paged, self.mxfp4 = key.config, key.paged, key.mxfp4
        kind = "paged_candidate_logits" if key.paged else "candidate_logits"
        self.name = f"{kind}_mxfp4_h{key.heads}" if key.mxfp4 else f"{kind}_h{key.heads}"

    @cute.jit
    def __call__(
        self,
        weights: cute.Tensor,
        q: Int64,
        q_request: Int64,
        q_row: Int64,
        q_head: Int64,
        requests: Int32,
        row_count: Int32,
        keys: Int64,
        scales: Int64,
        key_stride: Int64,
        page_stride: Int64,
        page_rows: Int32,
        pages: Int32,
        table: Int64,
        table_stride: Int64,
        table_columns: Int32,
        candidates: Int64,
        candidates_stride: Int64,
        blocks: Int32,
        starts: Int64,
        ends: Int64,
        end_request: Int64,
        limit: Int32,
        most: Int32,
        skip: Int32,
        out: Int64,
        out_stride: Int64,
        q_scales: Int64,
        q_scales_request: Int64,
        q_scales_row: Int64,
        ctas: Int32,
        stream: cuda.CUstream,
    ) -> None:
        self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        config, width = self.config, self.config.row_bytes
        query_rows = code_rows(q, width, (Int32(config.heads), row_count, requests), (q_head, q_row, q_request))
        if const_expr(self.mxfp4):
            query_tiles = cute.make_layout(
                (config.heads, width, config.query_stages), stride=(width, 1, config.heads * width)
            )
            operand = wgmma.swizzled_tiles(Float8E4M3FN, config.columns, config.warpgroups)
            products = [wgmma.make_mma_of_registers(Float8E4M3FN, config.columns) for _ in range(2)]
        else:
            query_tiles = wgmma.swizzled_tiles(Float8E4M3FN, config.heads, config.query_stages)
            operand = wgmma.swizzled_tiles(Float8E4M3FN, config.keys, config.stages)
            products = [wgmma.make_mma(Float8E4M3FN, 1, config.columns) for _ in range(2)]
        query_copy, query_source = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileG2SOp(), query_rows, query_tiles, (config.heads, width)
        )
        boxes = cute.fast_divmod_create_divisor_v2(cute.ceil_div(page_rows, config.box))
        in_pages = KeyCache(scales, page_stride, boxes, pages, limit, table, table_stride, table_columns)
        kernel = self.kernel(
            query_copy,
            query_source,
            query_tiles,
            operand,
            *products,
            RowGroups.of(requests, row_count, config.rows, ctas),
            CandidateWindows(starts, ends, end_request, limit, blocks * CANDIDATE_BLOCK, most, skip),
            CandidateCache(in_pages, keys, key_stride, candidates, candidates_stride),
            address(weights),
            stride_bytes(weights, 0),
            (q_scales, q_scales_request, q_scales_row),
            out,
            out_stride,
        )
        kernel.launch(grid=[ctas, 1, 1], block=[config.threads, 1, 1], min_blocks_per_mp=1, stream=stream, use_pdl=True)

    @cute.kernel
    def kernel(
        self,
        query_copy: cute.CopyAtom,
        query_source: cute.Tensor,
        query_tiles: Any,
        operand: cute.ComposedLayout,
        mma: cute.TiledMma,
        mma_more: cute.TiledMma,
        groups: RowGroups,
        windows: CandidateWindows,
        cache: CandidateCache,
        weights: Int64,
        weights_stride: Int64,
        q_scales: tuple[Int64, Int64, Int64],
        out: Int64,
        out_stride: Int64,
    ) -> None:
        """operand: how shared memory has what tensor cores read there: of FP8 the keys, of MXFP4 decoded queries."""
        config = self.config
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(thread // WARP)
        allocator = SmemAllocator()
        rings = [barriers.Ring.allocate(allocator, count) for count in (config.stages, config.query_stages)]
        if const_expr(self.mxfp4):
            rings.append(barriers.Ring.allocate(allocator, config.stages))
        words = [
            allocator.allocate_tensor(Int32, cute.make_layout(count), byte_alignment=16)
            for count in config.words.values()
        ]
        swizzled = allocator.allocate_tensor(Float8E4M3FN, operand.outer, byte_alignment=1024, swizzle=operand.inner)
        smem: Any = [tensor.iterator.toint() for tensor in words]
        bars: Any = rings
        if const_expr(self.mxfp4):
            keys = allocator.allocate_tensor(
                Float8E4M3FN, cute.make_layout(config.stages * config.keys * config.row_bytes), byte_alignment=128
            )
            queries = allocator.allocate_tensor(Float8E4M3FN, query_tiles, byte_alignment=128)
            smem = logits_mxfp4.Smem(*(*smem, keys.iterator.toint(), queries.iterator.toint()))
            bars = logits_mxfp4.Bars(*bars)
        else:
            keys = swizzled
            queries = allocator.allocate_tensor(
                Float8E4M3FN, query_tiles.outer, byte_alignment=1024, swizzle=query_tiles.inner
            )
            smem, bars = logits.Smem(*smem), logits.Bars(*bars)
        producer_warp, count_warp = config.warpgroups * 4, config.warpgroups * 5
        if warp == producer_warp:
            cpasync.prefetch_descriptor(query_copy)
        if thread == count_warp * WARP:
            # one arrival announces bytes, one per lane what lanes copy; every warp that uses a stage releases it
            bars.keys.initialize(1 + WARP, 4)
            bars.queries.initialize(1 + WARP, 4 if self.mxfp4 else 4 * config.warpgroups)
            if const_expr(self.mxfp4):
                bars.prepared.initialize(1, 4)
                fill_table(smem.table)
        prefetch_candidates(warp, config.threads // WARP, groups, windows, cache)
        cute.arch.sync_threads()
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        warps = config.threads // WARP
        scheduler = TileScheduler(config.rows, warps, self.paged, config.keys, groups, windows, smem.counts)
        if scheduler.is_counted():
            scheduler.count_tiles(warp)
            cute.arch.sync_threads()

        if const_expr(self.mxfp4):
            wgmma.overwrite(mma)
        wgmma.accumulate(mma_more)
        if warp >= producer_warp:
            if warp < count_warp:
                role = cute.arch.make_warp_uniform(warp - producer_warp)
                tiles = query_tiles if self.mxfp4 else query_tiles.outer
                query_part = QueryCopy.of(query_copy, query_source, queries, tiles, config.heads, config.row_bytes)
                work = scheduler, groups, windows, cache, smem, bars, (weights, weights_stride)
                copies = (None, keys.iterator.toint()), query_part
                if const_expr(self.mxfp4):
                    preparer = ScalePreparer(config, bars, smem, smem.progress + role * 8)
                    preparer.start(role)
                    CandidateProducer(config, self.paged, *work, *copies, q_scales, preparer).run(role)
                    preparer.finish()
                else:
                    CandidateProducer(config, self.paged, *work, *copies).run(role)
            elif warp == count_warp:
                count_keys(self.paged, groups, windows, out, out_stride)
        else:
            lane = thread % WARP
            warpgroup = cute.arch.make_warp_uniform(thread // wgmma.WARPGROUP)
            own_warp = cute.arch.make_warp_uniform(thread % wgmma.WARPGROUP // WARP)
            number = own_warp * STRIP + lane // 4 + (lane & 2) * 4
            size = Int64(groups.requests * groups.count) * out_stride
            policy = Int64(ptx.READ_SOON) if size <= FEW_BYTES else Int64(ptx.READ_AGAIN)
            place = out, out_stride, lane, number
            epilogue = CandidateEpilogue(config, self.paged, groups, windows, smem, *place, policy)
            context = bars, smem, epilogue, (mma, mma_more)
            if const_expr(self.mxfp4):
                consumer: Any = logits_mxfp4.Consumer(
                    config, warpgroup, own_warp, *context, swizzled, sign_of(smem.table)
                )
            else:
                consumer = logits.Consumer(config, warpgroup, *context, keys, queries)
            consumer.run()


@dataclass(frozen=True)
class CandidateLogitsKey(KernelKey):
    """What distinguishes one compiled kernel from another.

    heads   of a query row: a multiple of 16, at most 64
    mxfp4   whether codes are e2m1
    paged   whether keys lie in pages
    """

    kernel_name: ClassVar[str] = "indexer.hopper.logits_candidates"
    heads: int = 32
    mxfp4: bool = False
    paged: bool = True

    @property
    def config(self) -> Any:
        return (CandidateMxfp4Config if self.mxfp4 else CandidateConfig)(self.heads, 1, CANDIDATE_BLOCK)

    @property
    def smem_bytes(self) -> int:
        return int(self.config.smem_bytes)

    @property
    def instructions(self) -> tuple[str, ...]:
        used = "wgmma", "tma.load", "cp.async", "mbarrier", "griddepcontrol"
        return (*used, "mma.sync") if self.mxfp4 else used

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        weights = make_fake_tensor(Float32, (cute.sym_int(), cute.sym_int()), stride=(cute.sym_int64(), 1))
        queries = (weights, *(Int64(0) for _ in range(4)), Int32(1), Int32(1))
        pages = *(Int64(0) for _ in range(4)), Int32(8), Int32(1)
        tables = Int64(0), Int64(0), Int32(0), Int64(0), Int64(0), Int32(1)
        windows = *(Int64(0) for _ in range(3)), *(Int32(0) for _ in range(3))
        scores = [Int64(0)] * 5
        stream = make_fake_stream(use_tvm_ffi_env_stream=True)
        return CandidateLogitsKernel(self), (*queries, *pages, *tables, *windows, *scores, Int32(1), stream)
