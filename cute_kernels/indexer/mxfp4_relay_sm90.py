"""Kernel of mqa_logits and paged_mqa_logits for MXFP4 on Hopper, in groups of three and four rows: keys are decoded once
for all of them.

A block's warps, in order:

    8   two warpgroups that multiply, add up and store, each its own tiles, as e4m3 ones (logits_scores)
    2   bring them packed keys, one warp per warpgroup, and decode keys and queries (mxfp4_relay)
    2   decode with them

The latter four write -inf where a row sees no key, if that is wanted, when they are done (logits_fill).
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Float8E4M3FN, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from cute_kernels.indexer import mxx as X
from cute_kernels.dsl import barriers, ptx, wgmma
from cute_kernels.indexer import mxfp4_codes
from cute_kernels.indexer.logits_fill import Fill
from cute_kernels.indexer.logits_plan import KEYS, WARP, Groups, Windows
from cute_kernels.indexer.logits_walk import Keys
from cute_kernels.indexer.mxfp4_relay import Call, Queries, Relay, RelayScores, RelayWalk
from cute_kernels.indexer.mxfp4_relay_plan import REGISTERS, SHARERS, Places
from cute_kernels.indexer.mxfp4_sm90 import Mxfp4LogitsKernel


class Mxfp4RelayKernel(Mxfp4LogitsKernel):
    """Entry point: as Mxfp4LogitsKernel."""

    def __init__(self, key: Any) -> None:
        self.plan, self.paged = key.plan, key.paged
        self.relay, self.fill = Relay(key.plan), Fill(key.paged)
        self.walk = RelayWalk(key.plan, self.relay)
        self.scores = RelayScores(key.plan, key.paged, self.walk)
        self.name = f"mqa_logits_mxfp4_h{key.heads}r{key.rows}"

    def bound(self, key_copy: Any, queries: Any, *others: Any) -> Any:
        plan = self.plan
        columns = plan.columns // plan.parts
        return self.kernel(
            key_copy,
            wgmma.swizzled_tiles(Float8E4M3FN, columns, plan.buffers * plan.parts),
            wgmma.swizzled_tiles(Float8E4M3FN, KEYS, plan.stages),
            *(wgmma.make_mma(Float8E4M3FN, 1, columns) for _ in range(2)),
            Queries(*queries[0], *queries[1]),
            *others,
        )

    @cute.kernel
    def kernel(
        self,
        key_copy: cute.CopyAtom,
        query_layout: cute.ComposedLayout,
        key_layout: cute.ComposedLayout,
        mma: cute.TiledMma,
        mma_more: cute.TiledMma,
        queries: Queries,
        groups: Groups,
        windows: Windows,
        keys: Keys,
        weights: tuple[Int64, Int64],
        out: tuple[Int64, Int64],
        clean: Int32,
    ) -> None:
        plan = self.plan
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(thread // WARP)
        smem = SmemAllocator()
        rings = barriers.Ring.allocate(smem, plan.stages), barriers.Ring.allocate(smem, plan.buffers)
        ready = barriers.Ring.allocate(smem, plan.stages)
        words = [
            smem.allocate_tensor(Int32, cute.make_layout(count), byte_alignment=16) for count in plan.words.values()
        ]
        k, q = (
            smem.allocate_tensor(Float8E4M3FN, layout.outer, byte_alignment=1024, swizzle=layout.inner)
            for layout in (key_layout, query_layout)
        )
        packed_keys, packed_queries = (
            smem.allocate_tensor(Float8E4M3FN, cute.make_layout(rows * plan.row_bytes), byte_alignment=128)
            for rows in (plan.stages * KEYS, plan.staged)
        )
        at = Places(*(tensor.iterator.toint() for tensor in (*words, k, q, packed_keys, packed_queries)))
        walk_warp, relay_warp = plan.warpgroups * 4, plan.warpgroups * 5
        if warp == walk_warp:
            cpasync.prefetch_descriptor(key_copy)
        if thread == relay_warp * WARP:
            # one arrival announces bytes, one per lane what lanes copy; every warp that uses a stage lets go of it
            rings[0].initialize(1 + WARP, SHARERS)
            rings[1].initialize(SHARERS, 4)
            ready.initialize(SHARERS, 4)
            mxfp4_codes.fill_table(at.table)
        cute.arch.sync_threads()
        cute.arch.griddepcontrol_wait()
        if const_expr(X.PDL > 1):
            cute.arch.griddepcontrol_launch_dependents()
        if groups.total() > WARP:
            self.walk.count(warp, groups, windows, at.sums)
            cute.arch.sync_threads()

        wgmma.accumulate(mma_more)
        if warp >= walk_warp:
            cute.arch.setmaxregister_decrease(REGISTERS[0])
            call = Call(groups, windows, weights, queries, (*rings, ready), at, out)
            number = cute.arch.make_warp_uniform((warp - walk_warp) // plan.warpgroups)
            role = cute.arch.make_warp_uniform((warp - walk_warp) % plan.warpgroups)
            state = self.relay.start(role)
            if number == 0:
                state = self.walk.run_and_decode(role, keys, (ptx.tensor_map(key_copy), at.keys), call)
            self.relay.finish(state, role, number, call)
            if clean != 0:
                number = cute.arch.block_idx()[0] * plan.helpers + warp - walk_warp
                self.fill.run(number, cute.arch.grid_dim()[0] * plan.helpers, groups, windows, *out)
        else:
            cute.arch.setmaxregister_increase(REGISTERS[1])
            self.scores.run(thread, groups, windows, (ready, rings[1]), at.ready(), (mma, mma_more), k, q, *out)
