"""Kernel of sparse_mla_decode for up to 16 heads and fp8_ds_mla caches: teams of warps, both products with mma.sync.

A block walks over work items (query row, part of its tiles, block of heads). Its teams of one or two warps (for 8
and 16 heads) share an item's steps of 16 keys. In a step each warp

    1. multiplies its columns of the keys with those of Q, and adds the other warps' parts of the scores
    2. does the softmax of all of them
    3. adds P V to its columns of O

on rows that it has copied itself; the warps of a team wait for one another once a step, and for the other teams at an
item's end alone. What is where: teams_plan.py; how rows get there: teams_source.py; queries: teams_query.py; the steps
above: teams_products.py; what becomes of O: teams_output.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint8, const_expr, range_constexpr
from cutlass.memory import SmemAllocator

from cute_kernels.dsl import mma_sync, ptx
from cute_kernels.dsl.tensor import address, length, stride_bytes
from cute_kernels.sparse_mla import portable_source, teams_output, teams_query
from cute_kernels.sparse_mla import teams_products as products
from cute_kernels.sparse_mla.decode_args import ItemKey, fake_arguments
from cute_kernels.sparse_mla.logs import logs_of
from cute_kernels.sparse_mla.portable_output import Output, output_of
from cute_kernels.sparse_mla.portable_plan import SECONDS
from cute_kernels.sparse_mla.portable_source import Items
from cute_kernels.sparse_mla.quant_output import fake_quant, quant_of
from cute_kernels.sparse_mla.teams_plan import BLOCKS_PER_SM, LANES, WALK_BYTES, WARPS, Plan
from cute_kernels.sparse_mla.teams_source import UNDER_WAY, Own, Queries, Walk, columns_of_item, own_of, steps_of

FIRST_TEAM_BARRIER = 1


def place_of(plan: Plan) -> tuple[Own, Any]:
    """What the warp has, and the thread's lane; found out again, so that it is not kept in registers."""
    thread = ptx.thread_again()
    return own_of(cute.arch.make_warp_uniform(thread >> (LANES.bit_length() - 1)), plan), thread & (LANES - 1)


@dataclass(frozen=True)
class TeamsDecodeKey(ItemKey):
    """What distinguishes one compiled kernel from another. Both caches are fp8_ds_mla.

    heads     of a work item: 8 or 16
    second    the second list: "none", "listed" (indices) or "dense" (a block table)
    out_fp32  whether out is fp32, else it is bf16
    quantized results are turned back and become e4m3 codes, see quant_output; not with out_fp32
    """

    kernel_name: ClassVar[str] = "sparse_mla.mma_sync.decode_small_heads"
    blocks_per_sm: ClassVar[int] = BLOCKS_PER_SM
    heads: int = 8
    second: str = "listed"
    out_fp32: bool = False
    quantized: bool = False

    def __post_init__(self) -> None:
        if self.second not in SECONDS:
            raise ValueError(f"second: expected one of {SECONDS}, got {self.second!r}")

    @property
    def plan(self) -> Plan:
        return Plan(self.arch, self.heads)

    @property
    def smem_bytes(self) -> int:
        return self.plan.smem_bytes

    @property
    def instructions(self) -> tuple[str, ...]:
        return "mma.sync", "cp.async", "ldmatrix", "cvt.e4m3", "ex2", "ld.global.128"

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        if not self.quantized:
            return TeamsDecodeKernel(self), fake_arguments(self.out_fp32)
        arguments = fake_arguments(False)
        return QuantTeamsDecodeKernel(self), (*arguments[:5], *fake_quant(), *arguments[6:])


class TeamsDecodeKernel:
    """Entry point: see decode_args."""

    def __init__(self, key: TeamsDecodeKey) -> None:
        self.plan, self.second, self.out_fp32 = key.plan, key.second, key.out_fp32
        self.name = f"sparse_mla_decode_teams_h{key.heads}_{key.second}" + ("_fp32" if key.out_fp32 else "")
        self.name += "_quant" if key.quantized else ""

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        cache0: cute.Tensor,
        list0: cute.Tensor,
        cache1: cute.Tensor,
        list1: cute.Tensor,
        out: cute.Tensor,
        lse: cute.Tensor,
        len0: Int64,
        len0_batch: Int32,
        len0_token: Int32,
        len1: Int64,
        len1_batch: Int32,
        len1_token: Int32,
        sink: Int64,
        scale_log2: Float32,
        parts: Int32,
        part_tiles: Int32,
        ctas: Int32,
        stream: cuda.CUstream,
    ) -> None:
        lengths = (len0, len0_batch, len0_token), (len1, len1_batch, len1_token)
        tensors = q, cache0, list0, cache1, list1
        self.launch(*tensors, output_of(out, lse, sink), *lengths, scale_log2, parts, part_tiles, ctas, stream)

    @cute.jit
    def launch(
        self,
        q: cute.Tensor,
        cache0: cute.Tensor,
        list0: cute.Tensor,
        cache1: cute.Tensor,
        list1: cute.Tensor,
        out: Output,
        lengths0: tuple[Int64, Int32, Int32],
        lengths1: tuple[Int64, Int32, Int32],
        scale_log2: Float32,
        parts: Int32,
        part_tiles: Int32,
        ctas: Int32,
        stream: cuda.CUstream,
    ) -> None:
        self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        page_rows = length(cache1, 1) if const_expr(self.second == "dense") else 1
        items = portable_source.items_of(q, self.plan.heads, parts, part_tiles, ctas)
        kernel = self.kernel(
            Queries(address(q), stride_bytes(q, 0), stride_bytes(q, 1), stride_bytes(q, 2), length(q, 2)),
            (portable_source.cache_of(cache0), portable_source.cache_of(cache1)),
            (
                portable_source.lists_of(list0, lengths0, 1),
                portable_source.lists_of(list1, lengths1, page_rows),
            ),
            out,
            scale_log2,
            items,
        )
        kernel.launch(
            grid=[cutlass.min(ctas, items.end), 1, 1],
            block=[WARPS * LANES, 1, 1],
            min_blocks_per_mp=1,
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        queries: Queries,
        caches: Any,
        lists: Any,
        out: Output,
        scale_log2: Float32,
        items: Items,
    ) -> None:
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        lane = thread & (LANES - 1)
        warp = cute.arch.make_warp_uniform(thread // LANES)
        plan = self.plan
        memory = SmemAllocator().allocate_tensor(Uint8, cute.make_layout(plan.smem_bytes), byte_alignment=128)
        base = memory.iterator.toint()
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()

        items = items._replace(first=block)
        own = own_of(warp, plan)
        ring = base + warp * plan.ring_bytes
        asked, alive, wide = (cute.make_rmem_tensor((1,), Int32) for _ in range(3))
        walk = Walk(
            plan, self.second, items, caches, lists, queries, own, base + plan.walks_at + warp * WALK_BYTES, ring,
            asked, alive,
        )  # fmt: skip
        walk.start(warp, lane)
        for early in range_constexpr(plan.stages):
            walk.go_on(Int32(early), warp, lane)

        q = mma_sync.Registers("q", plan.groups * max(plan.resident, 1) * 8)
        o = mma_sync.Registers("o", plan.groups * plan.blocks * 16)
        q.declare()
        o.declare()
        factors, tops, amounts = (cute.make_rmem_tensor((2 * plan.groups,), Float32) for _ in range(3))
        stage: Any = Int32(0)
        turn: Any = Int32(0)
        item = block
        while item < items.end:
            batch, token, part, head_block = items.place(item)
            head = head_block * plan.heads
            if lane == 0:
                ptx.store_shared_s32(walk.home + 4 * UNDER_WAY, item)
            query = queries.row(batch, token, head)
            words = teams_query.ask_query(query, queries.head, queries.left(head, plan.heads), *place_of(plan), plan)
            first, end, first_second, end_second = columns_of_item(items, lists, batch, token, part, self.second)
            steps = steps_of(first, end) + steps_of(first_second, end_second)
            left = cutlass.max(steps - own.team + (plan.teams - 1), Int32(0)) // plan.teams
            teams_query.share_query(q, factors, words, base, *place_of(plan), plan)
            o.clear()
            wide.fill(0)
            tops.fill(products.LEAST)
            amounts.fill(0.0)
            while left > 0:
                cute.arch.cp_async_wait_group(plan.stages - 1)
                cute.arch.sync_warp()
                self.step(walk, q, factors, o, wide, tops, amounts, base, stage, turn, scale_log2)
                cute.arch.sync_warp()
                walk.go_on(stage, warp, lane)
                left = left - 1
                turn = turn ^ 1
                stage = Int32(0) if stage + 1 == plan.stages else stage + 1
            item = ptx.load_shared_s32(walk.home + 4 * UNDER_WAY)
            batch, token, part, head_block = items.place(item)
            place = part, batch, token, head_block * plan.heads
            teams_output.finish(out, place, o, wide, tops, amounts, base, *place_of(plan), plan, self.out_fp32)
            item = item + items.step

    @cute.jit
    def step(
        self,
        walk: Walk,
        q: Any,
        factors: Any,
        o: Any,
        wide: Any,
        tops: Any,
        amounts: Any,
        base: Any,
        stage: Any,
        turn: Any,
        scale_log2: Any,
    ) -> None:
        """Both products and the softmax of a step whose rows are in a stage."""
        plan = self.plan
        own, lane = place_of(plan)
        at = walk.ring + stage * plan.stage_bytes
        scales = [products.scale_words(at, (lane >> 2) + 8 * side, own, plan) for side in range(2)]
        is_odd = products.are_odd([word for words in scales for word in words])
        parts = cute.make_rmem_tensor((4 * plan.groups,), Float32)
        query = teams_query.Query(q, teams_query.query_at(base, own, lane, plan))
        products.score(parts, query, factors, scales, is_odd, at, own, lane, plan)
        if const_expr(plan.team > 1):
            self.exchange(parts, base, turn, own, lane)
        products.weigh(parts, tops, amounts, o, walk.alive[0] >> stage, scale_log2, plan)
        products.accumulate(o, parts, is_odd, wide, at, own, lane, plan)

    @cute.jit
    def exchange(self, parts: Any, base: Any, turn: Any, own: Any, lane: Any) -> None:
        """Add up the parts of the scores that the warps of a team have, in the order of their ranks."""
        plan = self.plan
        team = base + plan.partials_at + (turn * WARPS + own.team * plan.team) * plan.partial_bytes + lane * 16
        mine = team + own.rank * plan.partial_bytes
        for group in range_constexpr(plan.groups):
            words = [parts[4 * group + i].bitcast(Int32) for i in range(4)]
            ptx.store_shared_128(mine + group * (LANES * 16), words)
        cute.arch.barrier(barrier_id=FIRST_TEAM_BARRIER + own.team, number_of_threads=plan.team * LANES)
        for group in range_constexpr(plan.groups):
            for rank in range_constexpr(plan.team):
                four = ptx.load_shared_128(team + rank * plan.partial_bytes + group * (LANES * 16))
                for i in range_constexpr(4):
                    value = four[i].bitcast(Float32)
                    parts[4 * group + i] = value if const_expr(rank == 0) else parts[4 * group + i] + value


class QuantTeamsDecodeKernel(TeamsDecodeKernel):
    """Entry point: as TeamsDecodeKernel, with codes, scales, positions and the table of cosines and sines in place of
    out; a row is one part."""

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        cache0: cute.Tensor,
        list0: cute.Tensor,
        cache1: cute.Tensor,
        list1: cute.Tensor,
        codes: cute.Tensor,
        scales: cute.Tensor,
        positions: cute.Tensor,
        table: cute.Tensor,
        lse: cute.Tensor,
        len0: Int64,
        len0_batch: Int32,
        len0_token: Int32,
        len1: Int64,
        len1_batch: Int32,
        len1_token: Int32,
        sink: Int64,
        scale_log2: Float32,
        parts: Int32,
        part_tiles: Int32,
        ctas: Int32,
        stream: cuda.CUstream,
    ) -> None:
        lengths = (len0, len0_batch, len0_token), (len1, len1_batch, len1_token)
        quant = quant_of(codes, scales, positions, table)
        out = Output(None, None, logs_of(lse), sink, length(q, 2), quant, length(q, 1))
        self.launch(q, cache0, list0, cache1, list1, out, *lengths, scale_log2, parts, part_tiles, ctas, stream)
