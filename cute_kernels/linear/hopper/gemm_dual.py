# SPDX-License-Identifier: Apache-2.0
"""Two GEMMs of the same tokens in one launch on Hopper: one of e4m3 operands with scales, one of bf16 operands.

A layer's hidden states are multiplied by an FP8 weight, quantized, and by a bf16 one as they are. For few tokens each
product is over in 3 to 6 us, most of which is the way from the kernel before to the first chunk and from the last one.
Side by side in one launch they share that way, and neither needs a stream of its own.

    cluster       CTAs of one work tile of 64 x 64 results, which have a split of K each
    clusters      first those of the bf16 product, whose K is twice as many bytes, then those of the e4m3 product
    a cluster     runs as one of hopper/gemm.py does: roles, ring, promotion and the exchange of sums are its own
    stage         rows and weight, 64 x 128 bytes each: of either type the same bytes

A multiprocessor takes two CTAs. Results have the bits of hopper/gemm.py with the same number of splits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float8E4M3FN, Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import make_fake_stream
from cutlass.memory import SmemAllocator

from cute_kernels.dsl import barriers, wgmma
from cute_kernels.dsl.tensor import length
from cute_kernels.linear.hopper.gemm import GemmKernel, GemmKey, Scales, TileGrid, TileScheduler
from cute_kernels.linear.params import Strided
from cute_kernels.runtime.compile import KernelKey

WARP = 32
ROWS = COLUMNS = 64
"""Of a work tile of either product."""


@dataclass(frozen=True)
class DualGemmKey(KernelKey):
    """What distinguishes one compiled kernel from another.

    stages, splits      as of GemmKey, of both products
    depth, bf16_depth   the same of the e4m3 and of the bf16 product
    halves              as of GemmKey
    """

    kernel_name: ClassVar[str] = "linear.hopper.gemm_dual"
    tuning: ClassVar[tuple[str, ...]] = ("stages", "depth", "bf16_depth")
    stages: int = 6
    depth: int = 1
    bf16_depth: int = 4
    splits: int = 4
    halves: bool = False

    @property
    def products(self) -> tuple[GemmKey, GemmKey]:
        """The e4m3 one, which makes bf16 results, and the bf16 one, which makes fp32 results."""

        both: dict[str, Any] = {"rows": ROWS, "columns": COLUMNS, "warpgroups": 1}
        both |= {"stages": self.stages, "splits": self.splits, "halves": self.halves}
        return (
            GemmKey(self.arch, operands="e4m3", output="bf16", depth=self.depth, **both),
            GemmKey(self.arch, operands="bf16", output="fp32", depth=self.bf16_depth, **both),
        )

    @property
    def smem_bytes(self) -> int:
        return self.products[0].smem_bytes

    @property
    def instructions(self) -> tuple[str, ...]:
        return self.products[0].instructions

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        fp8, bf16 = self.products
        _, (a, a_scale, b, b_scale, out, *_) = fp8.build()
        _, (x, _, x_weight, _, x_out, *_) = bf16.build()
        tensors = a, a_scale, b, b_scale, out, x, x_weight, x_out
        return DualGemmKernel(self), (*tensors, Boolean(False), make_fake_stream(use_tvm_ffi_env_stream=True))


class DualGemmKernel:
    """Entry point: (a, a_scale, b, b_scale, out, x, weight of x, product of x, whether to launch as a dependent of the
    kernel before, stream). Of either product rows [T, 1, K], weight [1, N, K], result [T, 1, N]."""

    def __init__(self, key: DualGemmKey) -> None:
        self.key, self.stages, self.splits = key, key.stages, key.splits
        self.fp8, self.bf16 = (GemmKernel(product) for product in key.products)
        self.name = (
            f"gemm_dual_{ROWS}x{COLUMNS}_s{key.stages}d{key.depth}{key.bf16_depth}k{key.splits}"
            + "_halves" * key.halves
        )

    @cute.jit
    def __call__(
        self,
        a: cute.Tensor,
        a_scale: cute.Tensor,
        b: cute.Tensor,
        b_scale: cute.Tensor,
        out: cute.Tensor,
        x: cute.Tensor,
        x_weight: cute.Tensor,
        x_out: cute.Tensor,
        use_pdl: Boolean,
        stream: cuda.CUstream,
    ) -> None:
        tiles, x_tiles = (TileGrid.of(result, ROWS, COLUMNS) for result in (out, x_out))
        self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        kernel = self.kernel(
            *self.fp8.tma_atoms(a, b)[:4],
            *self.bf16.tma_atoms(x, x_weight)[:4],
            *(wgmma.make_mma(Float8E4M3FN, 1, COLUMNS) for _ in range(2)),
            *(wgmma.make_mma(BFloat16, 1, COLUMNS) for _ in range(2)),
            Strided.of(a_scale),
            Strided.of(b_scale),
            Strided.of(out),
            Strided.of(x_out),
            length(out, 0),
            length(out, 2),
            length(x_out, 2),
            tiles,
            x_tiles,
            cute.ceil_div(length(a, 2), self.fp8.chunk),
            cute.ceil_div(length(x, 2), self.bf16.chunk),
        )
        kernel.launch(
            grid=[(tiles.count + x_tiles.count) * self.splits, 1, 1],
            block=[self.key.products[0].threads, 1, 1],
            cluster=[self.splits, 1, 1],
            min_blocks_per_mp=self.key.products[0].ctas_per_multiprocessor,
            preferred_smem_carveout=100,
            stream=stream,
            use_pdl=use_pdl,
        )

    def split_of(self, tiles: TileGrid, number: Any, rank: Any, chunks: Any) -> TileScheduler:
        """The only work tile of a cluster, and a CTA's split of its chunks."""
        first = rank * chunks // self.splits
        return TileScheduler(tiles, number, tiles.count, first, (rank + 1) * chunks // self.splits - first)

    @cute.kernel
    def kernel(
        self,
        a_copy: cute.CopyAtom,
        a_source: cute.Tensor,
        b_copy: cute.CopyAtom,
        b_source: cute.Tensor,
        x_copy: cute.CopyAtom,
        x_source: cute.Tensor,
        w_copy: cute.CopyAtom,
        w_source: cute.Tensor,
        mma: cute.TiledMma,
        mma_more: cute.TiledMma,
        x_mma: cute.TiledMma,
        x_mma_more: cute.TiledMma,
        a_scale: Strided,
        b_scale: Strided,
        out: Strided,
        x_out: Strided,
        rows: Int32,
        columns: Int32,
        x_columns: Int32,
        tiles: TileGrid,
        x_tiles: TileGrid,
        chunks: Int32,
        x_chunks: Int32,
    ) -> None:
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(thread // WARP)
        lane = thread % WARP
        rank = cute.arch.make_warp_uniform(cta % self.splits)
        number = cute.arch.make_warp_uniform(cta // self.splits)

        smem = SmemAllocator()
        ring = barriers.Ring.allocate(smem, self.stages)
        bars = smem.allocate_array(Int64, 1)
        layout, x_layout = (wgmma.swizzled_tiles(dtype, ROWS, self.stages) for dtype in (Float8E4M3FN, BFloat16))
        a, b = (
            smem.allocate_tensor(Float8E4M3FN, layout.outer, byte_alignment=1024, swizzle=layout.inner)
            for _ in range(2)
        )
        # the same memory for the other type
        x, w = (
            cute.make_tensor(cute.recast_ptr(tile.iterator, x_layout.inner, dtype=BFloat16), x_layout.outer)
            for tile in (a, b)
        )
        words = cute.make_layout(self.fp8.key.received_bytes // 4)
        received = smem.allocate_tensor(Int32, words, byte_alignment=128).iterator.toint()
        if warp == 4:
            for copy in (a_copy, b_copy, x_copy, w_copy):
                cpasync.prefetch_descriptor(copy)
        if thread == 0:
            # one arrival announces the bytes of either operand; every warp that uses a stage releases it
            ring.initialize(2, 4)
            cute.arch.mbarrier_init(bars, 1)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        # nobody sends to a CTA whose barriers are not there yet: waited for behind the mainloop
        cute.arch.cluster_arrive_relaxed()
        cute.arch.griddepcontrol_launch_dependents()

        is_bf16 = number < x_tiles.count
        wgmma.accumulate(mma_more)
        wgmma.accumulate(x_mma_more)
        if warp >= 4:
            if is_bf16:
                work = self.split_of(x_tiles, number, rank, x_chunks)
                tile = x_tiles.coords(number, ROWS)
                if warp == 4:
                    self.bf16.load_weight(
                        work, ring, tile, (w_copy, *self.bf16.partition(w_copy, w_source, w, COLUMNS))
                    )
                elif warp == 5:
                    self.bf16.load_rows(work, ring, tile, self.bf16.row_copies(x_copy, x_source, x, rows))
            else:
                work = self.split_of(tiles, number - x_tiles.count, rank, chunks)
                tile = tiles.coords(work.first, ROWS)
                if warp == 4:
                    self.fp8.load_weight(work, ring, tile, (b_copy, *self.fp8.partition(b_copy, b_source, b, COLUMNS)))
                elif warp == 5:
                    self.fp8.load_rows(work, ring, tile, self.fp8.row_copies(a_copy, a_source, a, rows))
            cute.arch.cluster_wait()
        else:
            totals = cute.make_rmem_tensor((COLUMNS // 2,), Float32)
            own_row = self.fp8.own_row(thread, rows)
            if is_bf16:
                work = self.split_of(x_tiles, number, rank, x_chunks)
                tile = x_tiles.coords(number, ROWS)
                self.bf16.consume_bf16((x_mma, x_mma_more), ring, (x, w, 0), totals, barriers.start(), work.chunks)
                row = tile[1] + own_row
                self.exchange(self.bf16, totals, rank, warp, lane, received, bars, row, tile, x_out, rows, x_columns)
            else:
                work = self.split_of(tiles, number - x_tiles.count, rank, chunks)
                tile = tiles.coords(work.first, ROWS)
                scales = Scales.of_rows(a_scale, b_scale, 2)
                cute.arch.griddepcontrol_wait()
                if work.chunks > 0:
                    self.fp8.start_scales(scales, work, tile, own_row, rows, columns)
                place = barriers.start()
                self.fp8.consume((mma, mma_more), ring, (a, b, 0), scales, totals, place, work)
                row = tile[1] + own_row
                self.exchange(self.fp8, totals, rank, warp, lane, received, bars, row, tile, out, rows, columns)

    def exchange(
        self,
        gemm: GemmKernel,
        totals: Any,
        rank: Any,
        warp: Any,
        lane: Any,
        received: Any,
        bars: Any,
        row: Any,
        tile: Any,
        out: Strided,
        rows: Any,
        columns: Any,
    ) -> None:
        """Add up the cluster's sums, and store this CTA's share of them."""
        cute.arch.cluster_wait()
        gemm.combine(totals, rank, warp, lane, received, bars.toint())
        result = out, Int64(0), Int64(0), Int32(0)
        gemm.store_share(totals, lane, rank, row + rank % 2 * 8, tile, result, rows, columns)
