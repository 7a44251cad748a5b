"""The warps that bring the MXFP4 score kernel its keys and queries: as those of the e4m3 one, and scales of queries.
When keys have come, they look at their scales for the warpgroups that decode them."""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Int32, range_constexpr

from cute_kernels.dsl import ptx
from cute_kernels.indexer import mxfp4_codes
from cute_kernels.indexer.logits_plan import KEYS, NOTE, WARP
from cute_kernels.indexer.logits_walk import ScaledWalk, Walk
from cute_kernels.indexer.mxfp4_plan import BEHIND


class Mxfp4Walk(ScaledWalk):
    """The producers' part. BEHIND tiles after they have asked for one, they wait for it and look at its scales. How far
    they are is in shared memory, so that the loops of the walk need not know: how many tiles they are behind, and of
    the next one the stage and, in bit 8, the ring's phase there; END after the last tile."""

    END = -1

    @cute.jit
    def run_all(self, role: Any, ready: Any, rings: Any, at: Any, others: Any) -> None:
        """As `run`. ready: ring of tiles whose scales have been looked at."""
        self.context = rings[0], ready, at
        self.start(at.walks + role * 8, role)
        self.run(role, *others, rings, at)
        state = self.state()
        while state != self.END:
            state = self.step(state)

    @cute.jit
    def step(self, state: Any) -> Any:
        """Wait for a tile and look at its scales. Returns the state of the next one."""
        ring, ready, at = self.context
        lane = cute.arch.lane_idx()
        stage, phase = state & 0xFF, state >> 8
        ring.wait_full(stage, phase)
        note = at.notes + stage * (NOTE * 4)
        after = Int32(self.END)
        if ptx.load_shared_s32(note) >= 0:
            is_any_far = Int32(0)
            for i in range_constexpr(KEYS // WARP):
                key = stage * KEYS + i * WARP + lane
                places, scale, is_far = mxfp4_codes.ready_row(ptx.load_shared_s32(at.scales + key * 4))
                ptx.store_shared_64(at.ready_scales + key * 8, places, scale.bitcast(Int32))
                is_any_far = Int32(1) if is_far else is_any_far
            is_any_far = Int32(1) if cute.arch.vote_any_sync(is_any_far != 0) else Int32(0)
            if lane == 0:
                ptx.store_shared_s32(note + (NOTE - 1) * 4, is_any_far)
            following, phase = self.advance(stage, phase)
            after = following | phase << 8
        cute.arch.sync_warp()
        if lane == 0:
            cute.arch.mbarrier_arrive(ready.full(stage))
        return after

    @cute.jit
    def bring_queries(
        self,
        windows: Any,
        groups: Any,
        weights: Any,
        weights_stride: Any,
        query_copy: Any,
        ring: Any,
        at: Any,
        part: Any,
        buffer: Any,
        phase: Any,
    ) -> None:
        # the buffer may be in use by a group whose tiles wait for this warp
        if cute.arch.vote_any_sync(ring.is_empty(buffer, phase) == 0):
            self.catch_up()
        Walk.bring_queries(self, windows, groups, weights, weights_stride, query_copy, ring, at, part, buffer, phase)

    @cute.jit
    def start(self, place: Any, state: Any) -> None:
        """place: address of two words of shared memory, the warp's own"""
        self.place = place
        if cute.arch.lane_idx() == 0:
            ptx.store_shared_64(place, Int32(0), state)
        cute.arch.sync_warp()

    def state(self) -> Any:
        """Of the next tile."""
        return ptx.load_shared_64(self.place)[1]

    @cute.jit
    def follow(self) -> None:
        behind, state = ptx.load_shared_64(self.place)
        if behind < BEHIND:
            behind += 1
        else:
            state = self.step(state)
        cute.arch.sync_warp()
        if cute.arch.lane_idx() == 0:
            ptx.store_shared_64(self.place, behind, state)
        cute.arch.sync_warp()

    @cute.jit
    def catch_up(self) -> None:
        """Be no tile behind."""
        behind, state = ptx.load_shared_64(self.place)
        while behind > 0:
            state = self.step(state)
            behind -= 1
        cute.arch.sync_warp()
        if cute.arch.lane_idx() == 0:
            ptx.store_shared_64(self.place, behind, state)
        cute.arch.sync_warp()
