"""The front of Hopper's decode kernel: rows of the caches become bf16, and at once scores.

A thread holds a tile's raw rows in registers from one tile to the next: its share of two rows, 8 apart, is 7 words of
16 fp8 columns each and 32 rotary columns. While a slab is converted and multiplied, the slab two behind is loaded of
the tile that follows. The converted words are, as they are, the first operand of S^T = K Q^T and what stmatrix stores
as V.

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
    HEADING,
    KEYS,
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


ONES = 0x7F7F7F7F
"""Scale bytes that say 1."""

LEAST_POWER, NAN = 0x0040, 0x7FC0
"""bf16 bits of 2^-127, which is subnormal, and of a NaN: scale bytes 0 and 255."""


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
        sources = self.look_up(slot, table_phase, row, member, rings, at)
        self.load(raw, 0, SLABS - DELAY, sources)
        is_last, is_large, queries = self.take(slot, row, lane, scales, masks, at)
        self.let_go(slot, lane, rings)
        slot, table_phase = barriers.advance(slot, table_phase, TABLES)
        item = work.first
        self.load_q(warp, lane, work.place(item)[3], queries, q, at)
        self.load(raw, SLABS - DELAY, CHUNKS, sources)
        while item < work.end:
            rings.stages.wait_empty(stage, stage_phase)
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
                    sources = self.look_up(slot, table_phase, row, member, rings, at)
                elif const_expr(slab % 2 == 1 and slab < SLABS - 1):
                    # passed already; a branch, across which the assembler does not sink the loads
                    rings.stages.wait_empty(stage, stage_phase)
            self.load(raw, SLABS - DELAY, CHUNKS, sources)
            warpgroup.wait_group(0)

            if is_large:
                self.scale_again(operands[0], scores, targets, row, qk_more, q_parts, at)
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
            was_last = is_last
            is_last, is_large, queries = self.take(slot, row, lane, scales, masks, at)
            self.let_go(slot, lane, rings)
            if lane == 0:
                cute.arch.mbarrier_arrive(rings.scores.full(Int32(0)))
            slot, table_phase = barriers.advance(slot, table_phase, TABLES)
            stage, stage_phase = barriers.advance(stage, stage_phase, STAGES)
            score_phase = score_phase ^ 1
            if was_last != 0:
                item = item + work.step
                if item < work.end:
                    self.load_q(warp, lane, work.place(item)[3], queries, q, at)

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
    def look_up(self, slot: Any, phase: Any, row: Any, member: Any, rings: Rings, at: Places) -> Any:
        """Where to read this thread's share of its two rows of a table."""
        rings.tables.wait_full(slot, phase)
        sources = []
        for half in range_constexpr(2):
            low, high = ptx.load_shared_64(at.table + (slot * KEYS + row + 8 * half) * ENTRY)
            sources.append(ptx.pair(low, high & Int32(0x7FFFFFFF)) + Int64(member * 16))
        return sources

    @cute.jit
    def take(self, slot: Any, row: Any, lane: Any, scales: Any, masks: Any, at: Places) -> tuple[Any, Any, Any]:
        """A table's tile becomes the current one: whether it is the last of its item, whether it has large scales,
        where the item's queries are."""
        table = at.table + slot * (KEYS * ENTRY)
        # of other rows, so that all warps find the same
        some = [ptx.load_shared_64(table + (lane + 32 * i) * ENTRY + 8) for i in range(2)]
        large = (some[0][0] | some[1][0]) & Int32(-0x7F7F7F80) | (some[0][1] | some[1][1]) & Int32(0x00808080)
        is_large = cute.arch.vote_any_sync(large != 0)
        for half in range_constexpr(2):
            entry = ptx.load_shared_128(table + (row + 8 * half) * ENTRY)
            masks[half] = ~(entry[1] >> 31)
            for word in range_constexpr(2):
                scales[2 * half + word] = entry[2 + word]
        if is_large:
            for half in range_constexpr(2):
                ptx.store_shared_64(at.scale + (row + 8 * half) * 8, scales[2 * half], scales[2 * half + 1])
            scales.fill(ONES)
        heading = ptx.load_shared_128(at.heading + slot * HEADING)
        return heading[0], is_large, ptx.pair(heading[2], heading[3])

    @cute.jit
    def let_go(self, slot: Any, lane: Any, rings: Rings) -> None:
        cute.arch.sync_warp()
        if lane == 0:
            cute.arch.mbarrier_arrive(rings.tables.empty(slot))

    @cute.jit
    def scale_again(
        self,
        operand: Any,
        scores: Any,
        targets: Any,
        row: Any,
        qk_more: cute.TiledMma,
        q_parts: Any,
        at: Places,
    ) -> None:
        """A tile with scales of 2 or more, too large for one product in bf16: it was converted with scales of 1. Scale
        what lies in the stage, and compute the scores anew."""
        cute.arch.sync_warp()
        words = cute.recast_tensor(operand, Int32)
        scores.fill(0.0)
        for slab in cutlass.range(SLABS, unroll=1):
            factors = []
            for half in range_constexpr(2):
                four = ptx.load_shared_s32(at.scale + (row + 8 * half) * 8 + slab // 4 * 4)
                byte = Int32(127) if slab == ROPE_SLAB else (four >> (slab % 4 * 8)) & 0xFF
                power = Int32(LEAST_POWER) if byte == 0 else byte << 7
                factors.append((Int32(NAN) if byte == 255 else power) * 0x00010001)
            for step in range_constexpr(4):
                target = targets[step] + slab * SLAB_BYTES
                found = ptx.load_matrices(target)
                for i in range_constexpr(4):
                    words[4 * step + i] = multiply_bf16x2(found[i], factors[i % 2])
                ptx.store_matrices(target, [words[4 * step + i] for i in range(4)])
            warpgroup.fence()
            for step in range_constexpr(4):
                cute.gemm(qk_more, scores, operand[None, None, step], q_parts[None, None, slab * 4 + step], scores)
            warpgroup.commit_group()
            warpgroup.wait_group(0)

    @cute.jit
    def load(self, raw: Any, first: cutlass.Constexpr, end: cutlass.Constexpr, sources: Any) -> None:
        """Chunks first ... end - 1 of both rows."""
        for half in range_constexpr(2):
            for chunk in range_constexpr(first, end):
                words = ptx.load_global_128_in_order(sources[half] + chunk * 64)
                for word in range_constexpr(4):
                    raw[4 * (CHUNKS * half + chunk) + word] = words[word]

    @cute.jit
    def load_q(self, warp: Any, lane: Any, head_block: Any, queries: Any, q: Query, at: Places) -> None:
        """Bring the queries of an item, columns in the slabs' order: a lane loads the columns of a head that it has of
        a key, and stmatrix puts the words of four lanes side by side. A warp does two slabs."""
        heads = q.heads - head_block * self.heads
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
                head = cutlass.min(group * 8 + quad, heads - 1)
                head_at = queries + Int64(head) * q.head + column
                loaded.append([ptx.load_global_128_in_order(head_at + distance * half) for half in range(2)])
            for group in range_constexpr(self.heads // 8):
                row = (slab * self.heads + group * 8 + lane % 8) * 128
                for half in range_constexpr(2):
                    four = loaded[group][half]
                    pairs = (four[:2], four[2:])
                    words = [ptx.permute_bytes(*two, selector) for two in pairs for selector in selectors]
                    ptx.store_matrices(at.q + row + (((lane // 8 + 4 * half) ^ (lane % 8)) << 4), words)
        cute.arch.fence_view_async_shared()
        cute.arch.barrier(barrier_id=FRONT_BARRIER, number_of_threads=128)
