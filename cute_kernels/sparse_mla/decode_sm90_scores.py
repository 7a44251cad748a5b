"""The middle of Hopper's decode kernel: the queries of an item, Q K^T of a tile, and the scout's walk.

Products are S^T = K Q^T, with keys on the M side: fewer heads make a narrower product.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr, range_constexpr
from cutlass.cute.nvgpu import warpgroup

from cute_kernels.dsl import ptx
from cute_kernels.dsl.ptx import again
from cute_kernels.sparse_mla.decode_sm90_plan import (
    AHEAD,
    DIM,
    ENTRY,
    HEADING,
    KEYS,
    LAST,
    ROPE_SLAB,
    SCORES_BARRIER,
    SKIPS,
    SLAB,
    STAGES,
    TABLES,
    WALK,
    Places,
    Query,
    Rings,
    Sources,
    Work,
    score_pitch,
)
from cute_kernels.sparse_mla.decode_sm90_scout import Scout

ROW_BYTES = SLAB * 2
"""Of a slab's row."""


class Scores:
    def __init__(self, heads: int, second: str) -> None:
        self.heads, self.second = heads, second
        self.pitch = score_pitch(heads) * 4

    @cute.jit
    def run(
        self,
        thread: Any,
        work: Work,
        q: Query,
        sources: Sources,
        rings: Rings,
        qk: cute.TiledMma,
        qk_more: cute.TiledMma,
        q_tile: cute.Tensor,
        k_tile: cute.Tensor,
        at: Places,
    ) -> None:
        """Give away scores. By a warpgroup."""
        lane = thread % 32
        warp = cute.arch.make_warp_uniform(thread // 32)
        part = qk.get_slice(thread)
        k_parts = qk.make_fragment_A(part.partition_A(k_tile))
        q_parts = qk.make_fragment_B(part.partition_B(q_tile))
        scores = cute.make_rmem_tensor(part.partition_shape_C((KEYS, self.heads)), Float32)
        scout = Scout(self.heads, self.second, work, q, sources, thread, at.walk + warp * WALK)
        scout.enter(work.first)
        self.ask_for_q(*scout.queries(), warp, lane, q, at)
        for number in cutlass.range(AHEAD, unroll=1):
            scout.step(scout.look(), number, rings, at)
        tile = Int32(0)
        for _ in cutlass.range(work.first, work.end, work.step, unroll=1):
            self.arrange_q(warp, lane, at)
            was_last = Int32(0)
            while was_last == 0:
                stage, slot = tile % STAGES, tile % TABLES
                rings.stages.wait_full(stage, tile // STAGES & 1)
                # of what the front stored in the ordinary way
                cute.arch.fence_view_async_shared()
                warpgroup.fence()
                for step in range_constexpr(DIM // 16):
                    if const_expr(step == DIM // 32):
                        # passed already; a branch, across which the assembler does not prepare all products at once
                        rings.stages.wait_full(stage, tile // STAGES & 1)
                    chosen = qk if const_expr(step == 0) else qk_more
                    cute.gemm(chosen, scores, k_parts[None, None, step, stage], q_parts[None, None, step], scores)
                warpgroup.commit_group()
                index = scout.look()
                # the tile's table; it is there, as the scout is ahead
                rings.tables.wait_full(slot, tile // TABLES & 1)
                mark = ptx.load_shared_s32(at.heading + slot * HEADING)
                was_last = mark & LAST
                row = again(warp * 16 + lane // 4)
                signs = [ptx.load_shared_s32(at.table + (slot * KEYS + row + 8 * i) * ENTRY + 4) for i in range(2)]
                warpgroup.wait_group(0)

                if cute.arch.vote_any_sync((signs[0] | signs[1]) < 0):
                    mark = mark | SKIPS
                    for i in range_constexpr(self.heads // 2):
                        scores[i] = Float32(-Float32.inf) if signs[i // 2 % 2] < 0 else scores[i]
                rings.scores.wait_empty(Int32(0), tile & 1)
                scores_at = at.scores + row * self.pitch + lane % 4 * 8
                for half in range_constexpr(2):
                    for block in range_constexpr(self.heads // 8):
                        pair = [scores[4 * block + 2 * half + side].bitcast(Int32) for side in range(2)]
                        ptx.store_shared_64(scores_at + (half * 8 * self.pitch + block * 32), *pair)
                if lane == 0:
                    ptx.store_shared_s32(at.mark + warp * 4, mark)
                cute.arch.sync_warp()
                if lane == 0:
                    cute.arch.mbarrier_arrive(rings.scores.full(Int32(0)))
                scout.step(index, (tile + AHEAD) % TABLES, rings, at)
                tile = tile + 1
            self.ask_for_next_q(tile, warp, lane, q, rings, at)

    @cute.jit
    def ask_for_next_q(self, tile: Any, warp: Any, lane: Any, q: Query, rings: Rings, at: Places) -> None:
        """Start to copy the queries of a tile's item; of the tile behind the last there are none."""
        slot = tile % TABLES
        rings.tables.wait_full(slot, tile // TABLES & 1)
        _, heads, *words = ptx.load_shared_128(at.heading + slot * HEADING)
        # all warps are done with the queries before
        cute.arch.barrier(barrier_id=SCORES_BARRIER, number_of_threads=128)
        if heads > 0:
            self.ask_for_q(heads, ptx.pair(*words), warp, lane, q, at)

    @cute.jit
    def ask_for_q(self, heads: Any, queries: Any, warp: Any, lane: Any, q: Query, at: Places) -> None:
        """Start to copy an item's queries, as they are. A warp does two slabs, 4 heads of one at a time."""
        fours = const_expr(self.heads // 4)
        for number in cutlass.range(2 * fours, unroll=1):
            slab, head = warp * 2 + number // fours, number % fours * 4 + lane // 8
            source = queries + cutlass.Int64(cutlass.min(head, heads - 1)) * q.head + slab * ROW_BYTES
            target = at.q + (slab * self.heads + head) * ROW_BYTES
            ptx.copy_async_128_once(target + lane % 8 * 16, source + lane % 8 * 16)
        cute.arch.cp_async_commit_group()

    @cute.jit
    def arrange_q(self, warp: Any, lane: Any, at: Places) -> None:
        """Bring the columns of the queries, once they are there, into the slabs' order: a lane takes the columns of a
        head that it has of a key, and stmatrix puts the words of four lanes side by side."""
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_warp()
        quad, member = lane // 4, lane % 4
        groups = const_expr(self.heads // 8)
        # one after the other: with more at once the assembler spills
        for number in cutlass.range(2 * groups, unroll=1):
            slab = warp * 2 + number // groups
            row = at.q + (slab * self.heads + number % groups * 8) * ROW_BYTES
            is_rope = slab == ROPE_SLAB
            # of two words, columns 0, 1 and 2, 3: left alone, or 0, 2 and 1, 3
            selectors = [Int32(0x3210) if is_rope else Int32(0x5410), Int32(0x7654) if is_rope else Int32(0x7632)]
            loaded = []
            for half in range_constexpr(2):
                chunk = member + 4 * half if is_rope else 2 * member + half
                loaded.append(ptx.load_shared_128(row + quad * ROW_BYTES + chunk * 16))
            cute.arch.sync_warp()
            for half in range_constexpr(2):
                pairs = (loaded[half][:2], loaded[half][2:])
                words = [ptx.permute_bytes(*two, selector) for two in pairs for selector in selectors]
                chunk = (lane // 8 + 4 * half) ^ (lane % 8)
                ptx.store_matrices(row + lane % 8 * ROW_BYTES + chunk * 16, words)
        cute.arch.fence_view_async_shared()
        cute.arch.barrier(barrier_id=SCORES_BARRIER, number_of_threads=128)
