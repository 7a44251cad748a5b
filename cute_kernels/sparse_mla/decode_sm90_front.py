"""The front of Hopper's decode kernel: rows of the caches become bf16, and at once scores.

A thread holds a tile's raw rows in registers from one tile to the next: its share of two rows, 8 apart, is 7 words of
16 fp8 columns each and 32 rotary columns. While a slab is converted and multiplied, the slab two behind is loaded of the
tile that follows. The converted words are the first operand of S^T = K Q^T, as they are, and what stmatrix writes to V.

A product whose first operand is in registers keeps its warp from issuing anything else while it runs, and the
scheduler's other warps belong to the back: there is nothing to win from converting in between.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, const_expr, range_constexpr
from cutlass.cute.nvgpu import warpgroup

from cute_kernels.dsl import barriers, ptx
from cute_kernels.dsl.mma_sync import bf16x2_of_codes, multiply_bf16x2
from cute_kernels.sparse_mla.decode_sm90_plan import (
    ENTRY,
    FRONT_BARRIER,
    KEYS,
    LAST,
    ROPE_SLAB,
    SKIPS,
    SLAB,
    SLAB_BYTES,
    SLABS,
    STAGE_BYTES,
    STAGES,
    TABLES,
    Places,
    Query,
    Rings,
    Work,
    score_pitch,
)

CHUNKS = 9
"""16-byte loads of a thread per row: 7 of fp8 columns, 2 of rotary ones."""

DELAY = 2
"""Slabs by which the loads for the next tile follow the conversion."""

LOOK_UP = 1
"""The slab behind which the next tile's table is looked up."""


class Front:
    def __init__(self, heads: int) -> None:
        self.heads = heads
        self.pitch = score_pitch(heads) * 4

    @cute.jit
    def run(
        self,
        thread: Any,
        work: Work,
        q: Query,
        rings: Rings,
        qk: cute.TiledMma,
        qk_more: cute.TiledMma,
        q_tile: cute.Tensor,
        at: Places,
    ) -> None:
        """Fill stages with V, and give away scores. By a warpgroup."""
        lane = thread % 32
        warp = cute.arch.make_warp_uniform(thread // 32)
        quad, member = lane // 4, lane % 4
        row = warp * 16 + quad
        part = qk.get_slice(thread)
        q_parts = qk.make_fragment_B(part.partition_B(q_tile))
        raw = cute.make_rmem_tensor((2 * CHUNKS * 4,), Int32)
        following = cute.make_rmem_tensor((8,), Int32)
        scales = cute.make_rmem_tensor((4,), Int32)
        masks = cute.make_rmem_tensor((2,), Int32)
        operands = [cute.make_rmem_tensor(part.partition_shape_A((KEYS, SLAB)), BFloat16) for _ in range(2)]
        scores = cute.make_rmem_tensor(part.partition_shape_C((KEYS, self.heads)), Float32)
        # where the lane's row of its stmatrix lies: matrices are rows 0-7 and 8-15 of a chunk, then of the next chunk
        matrix = lane // 8
        v_at = at.v + (warp * 16 + matrix % 2 * 8 + lane % 8) * 128 + (((matrix // 2) ^ (lane % 8)) << 4)
        scores_at = at.scores + row * self.pitch + member * 8

        slot, table_phase = barriers.start()
        stage, stage_phase = barriers.start()
        score_phase = Int32(0)
        is_last = self.look_up(following, slot, table_phase, row, lane, rings, at)
        slot, table_phase = barriers.advance(slot, table_phase, TABLES)
        sources = [self.source(following, half, member) for half in range(2)]
        self.load(raw, 0, SLABS - DELAY, sources)
        item = work.first
        self.load_q(warp, lane, work, item, q, at)
        self.load(raw, SLABS - DELAY, CHUNKS, sources)
        self.take(following, scales, masks)
        while item < work.end:
            stages_empty = stage_phase
            rings.stages.wait_empty(stage, stages_empty)
            targets = [(v_at + stage * STAGE_BYTES) ^ (32 * step) for step in range(4)]
            for slab in range_constexpr(SLABS):
                operand = operands[slab % 2]
                words = cute.recast_tensor(operand, Int32)
                self.convert(words, raw, scales, masks, slab)
                for step in range_constexpr(4):
                    ptx.store_matrices(targets[step] + slab * SLAB_BYTES, [words[4 * step + i] for i in range(4)])
                if const_expr(slab >= DELAY):
                    self.load(raw, slab - DELAY, slab - DELAY + 1, sources)
                warpgroup.fence()
                for step in range_constexpr(4):
                    chosen = qk if const_expr(slab == 0 and step == 0) else qk_more
                    cute.gemm(chosen, scores, operand[None, None, step], q_parts[None, None, slab * 4 + step], scores)
                warpgroup.commit_group()
                warpgroup.wait_group(1)
                if const_expr(slab == LOOK_UP):
                    next_is_last = self.look_up(following, slot, table_phase, row, lane, rings, at)
                    sources = [self.source(following, half, member) for half in range(2)]
                elif const_expr(slab % 2 == 1 and slab < SLABS - 1):
                    # passed already; a branch, across which the assembler does not sink the loads
                    rings.stages.wait_empty(stage, stages_empty)
            self.load(raw, SLABS - DELAY, CHUNKS, sources)
            warpgroup.wait_group(0)

            mark = is_last
            if cute.arch.vote_any_sync((masks[0] & masks[1]) == 0):
                mark = mark | SKIPS
                for i in range_constexpr(self.heads // 2):
                    scores[i] = Float32(-Float32.inf) if masks[i // 2 % 2] == 0 else scores[i]
            rings.scores.wait_empty(Int32(0), score_phase)
            for half in range_constexpr(2):
                for block in range_constexpr(self.heads // 8):
                    pair = [scores[4 * block + 2 * half + side].bitcast(Int32) for side in range(2)]
                    ptx.store_shared_64(scores_at + (half * 8 * self.pitch + block * 32), *pair)
            if lane == 0:
                ptx.store_shared_s32(at.mark + warp * 4, mark)
            cute.arch.sync_warp()
            if lane == 0:
                cute.arch.mbarrier_arrive(rings.scores.full(Int32(0)))
            slot, table_phase = barriers.advance(slot, table_phase, TABLES)
            stage, stage_phase = barriers.advance(stage, stage_phase, STAGES)
            score_phase = score_phase ^ 1
            self.take(following, scales, masks)
            if is_last != 0:
                item = item + work.step
                if item < work.end:
                    self.load_q(warp, lane, work, item, q, at)
            is_last = next_is_last

    @cute.jit
    def convert(self, words: Any, raw: Any, scales: Any, masks: Any, slab: cutlass.Constexpr) -> None:
        """A slab of the thread's two rows, as the operand of four steps: chunk c of row half is word 2 c + half."""
        for half in range_constexpr(2):
            if const_expr(slab == ROPE_SLAB):
                for chunk in range_constexpr(8):
                    words[2 * chunk + half] = raw[4 * CHUNKS * half + 4 * slab + chunk] & masks[half]
            else:
                factor = ptx.bf16x2_of_ue8m0(scales[2 * half + slab // 4], slab % 4)
                for word in range_constexpr(4):
                    codes = raw[4 * CHUNKS * half + 4 * slab + word]
                    for odd in range_constexpr(2):
                        values = bf16x2_of_codes(codes, 0 if odd else 8)
                        words[2 * (2 * word + odd) + half] = multiply_bf16x2(values, factor)

    @cute.jit
    def look_up(self, following: Any, slot: Any, phase: Any, row: Any, lane: Any, rings: Rings, at: Places) -> Any:
        """Take the table's entries of this thread's two rows, and whether the tile is the last of its item."""
        rings.tables.wait_full(slot, phase)
        for half in range_constexpr(2):
            entry = ptx.load_shared_128(at.table + (slot * KEYS + row + 8 * half) * ENTRY)
            for word in range_constexpr(4):
                following[4 * half + word] = entry[word]
        mark = ptx.load_shared_s32(at.table_mark + slot * 4)
        cute.arch.sync_warp()
        if lane == 0:
            cute.arch.mbarrier_arrive(rings.tables.empty(slot))
        return mark

    def source(self, following: Any, half: int, member: Any) -> Any:
        high = following[4 * half + 1] & Int32(0x7FFFFFFF)
        return ptx.pair(following[4 * half], high) + Int64(member * 16)

    @cute.jit
    def take(self, following: Any, scales: Any, masks: Any) -> None:
        """The following tile becomes the current one."""
        for half in range_constexpr(2):
            scales[2 * half] = following[4 * half + 2]
            scales[2 * half + 1] = following[4 * half + 3]
            masks[half] = ~(following[4 * half + 1] >> 31)

    @cute.jit
    def load(self, raw: Any, first: cutlass.Constexpr, end: cutlass.Constexpr, sources: Any) -> None:
        """Chunks first ... end - 1 of both rows."""
        for half in range_constexpr(2):
            for chunk in range_constexpr(first, end):
                words = ptx.load_global_128_in_order(sources[half] + chunk * 64)
                for word in range_constexpr(4):
                    raw[4 * (CHUNKS * half + chunk) + word] = words[word]

    @cute.jit
    def load_q(self, warp: Any, lane: Any, work: Work, item: Any, q: Query, at: Places) -> None:
        """Bring the queries of an item, columns in the slabs' order: a lane loads the columns of a head that it has of a
        key, and stmatrix puts the words of four lanes side by side. A warp does two slabs."""
        batch, token, _, head_block = work.place(item)
        first = head_block * self.heads
        source = q.of(batch, token, first)
        quad, member = lane // 4, lane % 4
        cute.arch.barrier(barrier_id=FRONT_BARRIER, number_of_threads=128)
        for side in range_constexpr(2):
            slab = warp * 2 + side
            is_rope = slab == ROPE_SLAB
            column = slab * 128 + (member * 16 if is_rope else member * 32)
            distance = Int32(64) if is_rope else Int32(16)
            # of two words, columns 0, 1 and 2, 3: left alone, or 0, 2 and 1, 3
            selectors = [Int32(0x3210) if is_rope else Int32(0x5410), Int32(0x7654) if is_rope else Int32(0x7632)]
            loaded = []
            for group in range_constexpr(self.heads // 8):
                head = cutlass.min(group * 8 + quad, q.heads - first - 1)
                head_at = source + Int64(head) * q.head + column
                loaded.append([ptx.load_global_128_in_order(head_at + distance * half) for half in range(2)])
            for group in range_constexpr(self.heads // 8):
                row = (slab * self.heads + group * 8 + lane % 8) * 128
                for half in range_constexpr(2):
                    four = loaded[group][half]
                    words = [ptx.permute_bytes(four[i // 2 * 2], four[i // 2 * 2 + 1], selectors[i % 2]) for i in range(4)]
                    ptx.store_matrices(at.q + row + (((lane // 8 + 4 * half) ^ (lane % 8)) << 4), words)
        cute.arch.fence_view_async_shared()
        cute.arch.barrier(barrier_id=FRONT_BARRIER, number_of_threads=128)
