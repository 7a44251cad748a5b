"""Kernel of mqa_logits and paged_mqa_logits on Hopper: e4m3 products on tensor cores, heads summed in registers.

A block's warps, in order:

    4 to 16   warpgroups that multiply, add up and store, each its own tiles (logits_scores)
    2 to 4    bring them keys and queries, one warp per warpgroup (logits_walk)
    1         writes -inf where a row sees no key, if that is wanted (logits_fill)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float8E4M3FN, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from cutlass.memory import SmemAllocator

from cute_kernels.dsl import barriers, ptx, wgmma
from cute_kernels.dsl.tensor import address, length, stride_bytes
from cute_kernels.formats import INDEX_DIM
from cute_kernels.indexer.logits_fill import Fill
from cute_kernels.indexer.logits_plan import KEYS, MANY_COLUMNS, WARP, Groups, Plan, Windows
from cute_kernels.indexer.logits_scores import Scores
from cute_kernels.indexer.logits_walk import Keys, Walk
from cute_kernels.runtime.compile import KernelKey

REGISTERS, REGISTERS_BESIDE_MORE = (40, 232), (56, 224)
"""Per thread where there are MANY_COLUMNS, of the warps beside and of those that multiply; the second pair where the
former have more to do: small boxes, and heads that are no power of two. Three warpgroups may have no more together than
they are launched with, 3 x 168, or one of them waits for ever."""


@dataclass(frozen=True)
class LogitsKey(KernelKey):
    """What distinguishes one compiled kernel from another.

    heads   of a query row: a multiple of 16, at most 64
    rows    of a group, at most 256 / heads
    paged   whether keys lie in pages
    box     keys that a copy brings, 64 or 8: pages have a multiple of it
    """

    kernel_name: ClassVar[str] = "indexer.hopper.logits"
    heads: int = 64
    rows: int = 4
    paged: bool = False
    box: int = KEYS

    @property
    def plan(self) -> Plan:
        return Plan(self.heads, self.rows, self.box)

    @property
    def smem_bytes(self) -> int:
        return self.plan.smem_bytes

    @property
    def instructions(self) -> tuple[str, ...]:
        used = "wgmma", "tma.load", "cp.async", "mbarrier", "griddepcontrol"
        return (*used, "bulk.load") if self.paged else used

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        return LogitsKernel(self), fake_arguments()


def fake_arguments(has_head_scales: bool = False) -> tuple[Any, ...]:
    """To compile LogitsKernel with, or Mxfp4LogitsKernel, which takes the queries' scales, too."""

    def matrix() -> Any:
        return make_fake_tensor(Float32, (cute.sym_int(), cute.sym_int()), stride=(cute.sym_int64(), 1))

    numbers = [Int64(0)] * 4 + [Int32(1)] * 2
    numbers += [Int64(0)] * 4 + [Int32(1)] * 2 + [Int64(0)] * 2 + [Int32(0)]
    numbers += [Int64(0)] * 3 + [Int32(0)] * 4 + [Int64(0)] * (3 if has_head_scales else 0) + [Int32(1)]
    return matrix(), matrix(), *numbers, make_fake_stream(use_tvm_ffi_env_stream=True)


class Places(NamedTuple):
    """Addresses in shared memory."""

    notes: Any
    scales: Any
    weights: Any
    windows: Any
    sums: Any


class LogitsKernel:
    """Entry point: (weights, out;
    address of the queries and their strides in bytes, by request, row and head; requests, rows of a request;
    addresses of key 0 and its scale, strides of keys and pages in bytes; keys of a page, pages; address of the block
    table, its stride in bytes and its columns;
    addresses of starts and ends, stride of the ends by request in bytes; number of keys, whether a row's columns begin
    at its start (-1) or not (0), keys up to which a row is not scored, whether to write -inf where there are no scores,
    blocks; stream).
    """

    def __init__(self, key: LogitsKey) -> None:
        self.plan, self.paged = key.plan, key.paged
        self.walk, self.fill = Walk(key.plan, key.paged), Fill(key.paged)
        self.scores = Scores(key.plan, key.paged, self.walk)
        self.registers = REGISTERS if key.box == KEYS and key.heads == 64 else REGISTERS_BESIDE_MORE
        self.has_many_columns = self.plan.columns >= MANY_COLUMNS
        kind = f"paged_mqa_logits_b{key.box}" if key.paged else "mqa_logits"
        self.name = f"{kind}_h{key.heads}r{key.rows}"

    @cute.jit
    def __call__(
        self,
        weights: cute.Tensor,
        out: cute.Tensor,
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
        starts: Int64,
        ends: Int64,
        end_request: Int64,
        limit: Int32,
        shifts: Int32,
        skip: Int32,
        clean: Int32,
        blocks: Int32,
        stream: cuda.CUstream,
    ) -> None:
        self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        plan = self.plan
        columns = plan.columns // plan.parts
        query_view = self.view(q, (Int32(plan.heads), row_count, requests), (q_head, q_row, q_request))
        key_view = self.view(keys, (page_rows, pages), (key_stride, page_stride))
        boxes = cute.fast_divmod_create_divisor_v2(cute.ceil_div(page_rows, plan.box))
        load = cpasync.CopyBulkTensorTileG2SOp()
        query_tiles = wgmma.swizzled_tiles(Float8E4M3FN, plan.heads, plan.buffers * plan.rows)
        key_tiles = wgmma.swizzled_tiles(Float8E4M3FN, plan.box, plan.stages * plan.boxes)
        query_copy, query_source = cpasync.make_tiled_tma_atom(load, query_view, query_tiles, (plan.heads, INDEX_DIM))
        key_copy, _ = cpasync.make_tiled_tma_atom(load, key_view, key_tiles, (plan.box, INDEX_DIM))
        kernel = self.kernel(
            query_copy,
            query_source,
            key_copy,
            query_tiles,
            wgmma.swizzled_tiles(Float8E4M3FN, columns, plan.buffers * plan.parts),
            wgmma.swizzled_tiles(Float8E4M3FN, KEYS, plan.stages),
            *(wgmma.make_mma(Float8E4M3FN, 1, columns) for _ in range(2)),
            Groups.of(requests, row_count, plan.rows, blocks),
            Windows(starts, ends, end_request, limit, length(out, 1), shifts, skip),
            Keys(scales, page_stride, boxes, pages, limit, table, table_stride, table_columns),
            address(weights),
            stride_bytes(weights, 0),
            address(out),
            stride_bytes(out, 0),
            clean,
        )
        kernel.launch(grid=[blocks, 1, 1], block=[plan.threads, 1, 1], min_blocks_per_mp=1, stream=stream, use_pdl=True)

    def view(self, where: Any, shape: tuple[Any, ...], strides: tuple[Any, ...]) -> Any:
        """Rows of codes in memory; the codes of a row are the second axis."""
        pointer = cute.make_ptr(Float8E4M3FN, where, cutlass.AddressSpace.gmem, assumed_align=16)
        first, *others = (cute.assume(stride, divby=16) for stride in strides)
        layout = cute.make_layout((shape[0], self.plan.row_bytes, *shape[1:]), stride=(first, 1, *others))
        return cute.make_tensor(pointer, layout)

    @cute.kernel
    def kernel(
        self,
        query_copy: cute.CopyAtom,
        query_source: cute.Tensor,
        key_copy: cute.CopyAtom,
        query_tiles: cute.ComposedLayout,
        query_layout: cute.ComposedLayout,
        key_layout: cute.ComposedLayout,
        mma: cute.TiledMma,
        mma_more: cute.TiledMma,
        groups: Groups,
        windows: Windows,
        keys: Keys,
        weights: Int64,
        weights_stride: Int64,
        out: Int64,
        out_stride: Int64,
        clean: Int32,
    ) -> None:
        plan = self.plan
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(thread // WARP)
        smem = SmemAllocator()
        rings = barriers.Ring.allocate(smem, plan.stages), barriers.Ring.allocate(smem, plan.buffers)
        words = [
            smem.allocate_tensor(Int32, cute.make_layout(count), byte_alignment=16) for count in plan.words.values()
        ]
        at = Places(*(tensor.iterator.toint() for tensor in words))
        k, q = (
            smem.allocate_tensor(Float8E4M3FN, layout.outer, byte_alignment=1024, swizzle=layout.inner)
            for layout in (key_layout, query_layout)
        )
        walk_warp, fill_warp = plan.warpgroups * 4, plan.warpgroups * 5
        if warp == walk_warp:
            for copy in (query_copy, key_copy):
                cpasync.prefetch_descriptor(copy)
        if thread == fill_warp * WARP:
            # one arrival announces bytes, one per lane what lanes copy; every warp that uses a stage lets go of it
            rings[0].initialize(1 if self.paged else 1 + WARP, 4)
            rings[1].initialize(1 + WARP, 4)
        if const_expr(self.paged):
            self.walk.warm(warp, groups, windows, keys)
        cute.arch.sync_threads()
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        if groups.total() > WARP:
            self.walk.count(warp, groups, windows, at.sums)
            cute.arch.sync_threads()

        wgmma.accumulate(mma_more)
        if warp >= walk_warp:
            if const_expr(self.has_many_columns):
                cute.arch.setmaxregister_decrease(self.registers[0])
            if warp < fill_warp:
                role = cute.arch.make_warp_uniform(warp - walk_warp)
                key_part = ptx.tensor_map(key_copy), k.iterator.toint()
                query_part = self.partition(query_copy, query_source, q, query_tiles.outer, plan.heads)
                self.walk.run(role, groups, windows, keys, weights, weights_stride, key_part, query_part, rings, at)
            elif (warp == fill_warp) & (clean != 0):
                number, warps = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
                self.fill.run(number, warps, groups, windows, out, out_stride)
        else:
            if const_expr(self.has_many_columns):
                cute.arch.setmaxregister_increase(self.registers[1])
            self.scores.run(thread, groups, windows, rings, at, (mma, mma_more), k, q, out, out_stride)

    def partition(self, copy: Any, source: Any, tile: Any, tiles: Any, rows: int) -> Any:
        """(atom, what it reads, what it writes) of a bulk copy of so many rows."""
        target = cute.make_tensor(tile.iterator, tiles)
        tail = [None] * (cute.rank(source) - 2)
        grid = cute.local_tile(source, (rows, self.plan.row_bytes), (None, None, *tail))
        write, read = cpasync.tma_partition(
            copy, 0, cute.make_layout(1), cute.group_modes(target, 0, 2), cute.group_modes(grid, 0, 2)
        )
        return copy, read, write
