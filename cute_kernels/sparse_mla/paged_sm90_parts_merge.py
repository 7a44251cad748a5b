"""What Hopper's paged prefill kernel makes of parts of a row: the blocks of a cluster have one each, and merge them.

Each block has some of the columns. It leaves the sums O of the others' columns, in fp32 and relative to its own maxima,
where its ring of tiles was, and what its softmax came to where its queries were. Then it adds up its columns over all
blocks, and stores them.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr, range_constexpr

from cute_kernels.dsl import ptx, wgmma
from cute_kernels.sparse_mla.paged_sm90_plan import PAGED
from cute_kernels.sparse_mla.paged_sm90_scores import PagedScores
from cute_kernels.sparse_mla.prefill_sm90_back import Back
from cute_kernels.sparse_mla.prefill_sm90_plan import ROWS, SIDE, Output, Places, Query, Work
from cute_kernels.sparse_mla.prefill_sm90_scores import own_number
from cute_kernels.sparse_mla.softmax import share

BACKS_BARRIER = 2

UNIT = 32
"""Columns that a block adds up at a time: of each 8 a thread has two neighbouring ones in two rows, one load."""

UNITS = SIDE // UNIT
LOADS = UNIT // 8
LOAD_BYTES = 128 * 16
"""What a side's threads load at once."""

SIDE_BYTES = ROWS * SIDE * 4
"""Of the results of one side."""

AT_ONCE = 2
"""Blocks whose results a thread asks for at a time, while it adds up what it asked for before."""

SUMMARY = 16
"""Bytes of what a head's softmax came to: maximum that sums are relative to, sum, largest logit."""

assert PAGED.memory["stages"] >= 2 * SIDE_BYTES
assert PAGED.memory["kept"] >= ROWS * SUMMARY


@cute.jit
def meet() -> None:
    """Have all blocks of the cluster see what the others have stored before. All threads."""
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()


class PartScores(PagedScores):
    @cute.jit
    def store(
        self,
        item: Any,
        half: cutlass.Constexpr,
        most: Any,
        top: Any,
        amount: Any,
        work: Work,
        q: Query,
        out: Output,
        at: Places,
    ) -> None:
        """Leave what a head's logits come to."""
        head = (own_number() >> 5) * 16 + (own_number() >> 2 & 7) + 8 * half
        if own_number() & 3 == 0:
            words = top.bitcast(Int32), amount.bitcast(Int32), most.bitcast(Int32), Int32(0)
            ptx.store_shared_128(at.kept + head * SUMMARY, words)


class PartBack(Back):
    """blocks   of a cluster"""

    def __init__(self, plan: Any, blocks: int) -> None:
        super().__init__(plan)
        self.blocks = blocks

    @cute.jit
    def store(
        self,
        total: Any,
        shares: Any,
        item: Any,
        side: Any,
        own_row: Any,
        lane: Any,
        work: Work,
        q: Query,
        out: Output,
        at: Places,
    ) -> None:
        """Leave the block's sums, and store the cluster's share of an item's results that is the block's."""
        row, first = work.place(item)
        count = q.count(first) - own_row
        # tiles are no more needed once all products are done
        cute.arch.barrier(barrier_id=BACKS_BARRIER, number_of_threads=256)
        own_at = at.stages + side * SIDE_BYTES + own_number() * 16
        for unit in range_constexpr(UNITS):
            if unit % self.blocks != ptx.rank_again():
                for i in range_constexpr(unit * LOADS, (unit + 1) * LOADS):
                    words = [total[4 * i + j].bitcast(Int32) for j in range(4)]
                    ptx.store_shared_128(own_at + i * LOAD_BYTES, words)
        self.keep_own(total)
        logits = [self.logit(first + own_row + 8 * half, 8 * half < count, out) for half in range(2)]
        meet()

        asked = self.ask(0, 0, total, own_at)
        summaries = [ptx.map_shared(at.kept + own_row * SUMMARY, rank) for rank in range(self.blocks)]
        is_own = (side == 0) & (lane & 3 == 0) & (ptx.rank_again() == 0)
        factors = []
        for half in range_constexpr(2):
            known = [ptx.load_cluster_128(place + half * (8 * SUMMARY)) for place in summaries]
            tops, sums, mosts = ([four[i].bitcast(Float32) for four in known] for i in range(3))
            top, most, amount = tops[0], mosts[0], Float32(0.0)
            for i in range_constexpr(1, self.blocks):
                top, most = ptx.max_f32(top, tops[i]), ptx.max_f32(most, mosts[i])
            weights = [ptx.exp2(one - top) for one in tops]
            for i in range_constexpr(self.blocks):
                amount = ptx.fma_rn(weights[i], sums[i], amount)
            whole = share(amount, top, logits[half], out.sink)
            factors.append([weight * whole for weight in weights])
            lse = (top + ptx.log2(amount)) * Float32(ptx.LN_2)
            lse = Float32(Float32.inf) if amount == Float32(0.0) else lse
            # a branch, since addresses found before it would be spilled
            if is_own & (8 * half < count):
                place = row, first + own_row + 8 * half
                out.max_logits.store(place, most * Float32(ptx.LN_2), True)
                out.lse.store(place, lse, True)

        target = out.base + Int64(row) * out.row + Int64(first + own_row) * out.head + side * (SIDE * 2)
        sums = cute.make_rmem_tensor((UNIT // 2,), Float32)
        for i in range_constexpr(UNITS // self.blocks):
            sums.fill(0.0)
            for rank in range_constexpr(0, self.blocks, AT_ONCE):
                found = asked
                number, behind = (i, rank + AT_ONCE) if rank + AT_ONCE < self.blocks else (i + 1, 0)
                if const_expr(number < UNITS // self.blocks):
                    asked = self.ask(number, behind, total, own_at)
                self.add_up(sums, factors, found, rank)
            for j in range_constexpr(UNIT // 2):
                # -0 would become 0 by an empty part, and by none must do so as well
                sums[j] = ptx.add_rn(sums[j], Float32(0.0))
            unit = ptx.rank_again() + i * self.blocks
            wgmma.store_bf16(sums, lane, target + unit * (UNIT * 2), out.head, count, Int32(UNIT), UNIT)

    @cute.jit
    def keep_own(self, total: Any) -> None:
        """Put the sums of the block's own units first."""
        for i in range_constexpr(UNITS // self.blocks):
            for rank in range_constexpr(self.blocks):
                if ptx.rank_again() == rank:
                    for j in range_constexpr(UNIT // 2):
                        total[i * (UNIT // 2) + j] = total[(i * self.blocks + rank) * (UNIT // 2) + j]

    def ask(self, number: int, first: int, total: Any, own_at: Any) -> list[Any]:
        """A thread's sums of one of the block's units, from some blocks: its own are in registers."""
        unit_at = own_at + (ptx.rank_again() + number * self.blocks) * (LOADS * LOAD_BYTES)
        found: list[Any] = []
        for rank in range(first, first + AT_ONCE):
            place = ptx.map_shared(unit_at, rank)
            for i in range(LOADS):
                own = [total[number * (UNIT // 2) + 4 * i + j].bitcast(Int32) for j in range(4)]
                found += ptx.load_cluster_128_or(ptx.rank_again() != rank, place + i * LOAD_BYTES, own)
        return found

    @cute.jit
    def add_up(self, sums: Any, factors: Any, found: Any, first: cutlass.Constexpr) -> None:
        """Add a thread's columns of a unit, of some blocks in order."""
        for rank in range_constexpr(AT_ONCE):
            for i in range_constexpr(UNIT // 2):
                value = found[rank * (UNIT // 2) + i].bitcast(Float32)
                sums[i] = ptx.fma_rn(value, factors[i // 2 % 2][first + rank], sums[i])

    @cute.jit
    def logit(self, head: Any, is_there: Any, out: Output) -> Any:
        found = Int32(0)
        if out.sink != 0:
            found = ptx.load_global_s32_again_where(is_there, out.sink + Int64(head) * 4)
        return found
