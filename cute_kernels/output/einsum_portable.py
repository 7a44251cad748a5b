"""Kernel of deepseek_v4_fp8_einsum for every architecture from sm_80 on: f16 products by mma.sync, summed in fp32.

A block walks over tiles of results, neighbouring columns first, so that blocks that run together read the same rows of
`a`. All of its warps do the same: they copy 128-column chunks of the tile's rows, and their scales, to a ring of stages
as far ahead as it reaches (einsum_portable_copies.py), and multiply a chunk (einsum_portable_products.py), whose
products they scale and add to their totals. Every key sums in the same order, so a row's bits do not depend on what
else is in the batch. What is where: einsum_portable_plan.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint8, const_expr, range_constexpr
from cutlass.memory import SmemAllocator

from cute_kernels.dsl import ptx
from cute_kernels.dsl.tensor import length
from cute_kernels.output.einsum_portable_copies import Copies, Operands
from cute_kernels.output.einsum_portable_plan import EinsumPlan
from cute_kernels.output.einsum_portable_products import STEPS, Products
from cute_kernels.output.einsum_tiles import CHUNK, WARP, Strided, Tiles, fake_arguments
from cute_kernels.runtime.arch import arch_number
from cute_kernels.runtime.compile import KernelKey

E4M3_ARCH = 89
"""First architecture that converts e4m3."""


@dataclass(frozen=True)
class PortableEinsumKey(KernelKey):
    """What distinguishes one compiled kernel from another.

    rows      of a tile: 16, 32, 64 or 128
    columns   of a tile: 64 or 128, so that they share a scale
    packed    whether scales are four ue8m0 bytes in a word and each column has its own, else they are fp32
    """

    kernel_name: ClassVar[str] = "output.mma_sync.einsum"
    rows: int = 128
    columns: int = 128
    packed: bool = False

    @property
    def plan(self) -> EinsumPlan:
        return EinsumPlan(self.arch, self.rows, self.columns, self.packed)

    @property
    def smem_bytes(self) -> int:
        return self.plan.smem_bytes

    @property
    def instructions(self) -> tuple[str, ...]:
        used = "mma.sync", "ldmatrix", "cp.async"
        return (*used, "cvt.e4m3") if arch_number(self.arch) >= E4M3_ARCH else used

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        return PortableEinsumKernel(self), fake_arguments(Int32 if self.packed else Float32)


class PortableEinsumKernel:
    """Entry point: (a, a_scale, b, b_scale, out, number of blocks, stream)."""

    def __init__(self, key: PortableEinsumKey) -> None:
        self.plan = key.plan
        number = arch_number(key.arch)
        self.copies = Copies(key.plan)
        self.products = Products(self.plan, number >= E4M3_ARCH)
        self.has_dependency = number >= ptx.DEPENDENT_LAUNCH_ARCH
        kind = "_packed" if key.packed else ""
        self.name = f"deepseek_v4_fp8_einsum_portable_{key.rows}x{key.columns}{kind}"

    @cute.jit
    def __call__(
        self,
        a: cute.Tensor,
        a_scale: cute.Tensor,
        b: cute.Tensor,
        b_scale: cute.Tensor,
        out: cute.Tensor,
        blocks: Int32,
        stream: cuda.CUstream,
    ) -> None:
        self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        kernel = self.kernel(
            *(Strided.of(tensor) for tensor in (a, a_scale, b, b_scale, out)),
            length(out, 0),
            length(out, 1),
            length(out, 2),
            length(a, 2) // CHUNK,
        )
        kernel.launch(grid=[blocks, 1, 1], block=[self.plan.threads, 1, 1], min_blocks_per_mp=1, stream=stream)

    @cute.kernel
    def kernel(
        self,
        a: Strided,
        a_scale: Strided,
        b: Strided,
        b_scale: Strided,
        out: Strided,
        rows: Int32,
        groups: Int32,
        columns: Int32,
        chunks: Int32,
    ) -> None:
        plan = self.plan
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        memory = SmemAllocator().allocate_tensor(Uint8, cute.make_layout(plan.smem_bytes), byte_alignment=CHUNK)
        ring = memory.iterator.toint()
        if const_expr(self.has_dependency):
            cute.arch.griddepcontrol_wait()

        of_rows = cute.ceil_div(rows, plan.rows)
        of_columns = cute.ceil_div(columns, plan.columns)
        tiles = Tiles(block, groups * of_rows * of_columns, blocks, of_rows, of_columns)
        operands = Operands(a, a_scale, b, b_scale, rows, columns, chunks)
        ahead = self.copies.seek(tiles.first, tiles, operands, thread)
        for i in cutlass.range(plan.stages, unroll=1):
            ahead = self.copies.copy(ring + i * plan.stage_bytes, ahead, tiles, operands, thread)
        cute.arch.cp_async_wait_group(plan.stages - 1)
        cute.arch.sync_threads()

        lane = cute.arch.lane_idx()
        places = self.products.places(cute.arch.make_warp_uniform(thread // WARP), lane)
        words = cute.make_rmem_tensor((self.products.words,), Int32)
        totals = cute.make_rmem_tensor((self.products.sums,), Float32)
        self.products.load(words, ring, places, 0)
        slot = Int32(0)
        for number in cutlass.range(tiles.first, tiles.end, tiles.step, unroll=1):
            totals.fill(0.0)
            for chunk in cutlass.range(chunks, unroll=1):
                stage = ring + slot * plan.stage_bytes
                slot = Int32(0) if slot + 1 == plan.stages else slot + 1
                sums = self.products.none()
                factors = self.products.load_factors(stage, places, chunk)
                for step in range_constexpr(STEPS):
                    own = [words[i] for i in range(self.products.words)]
                    if const_expr(step < STEPS - 1):
                        self.products.load(words, stage, places, step + 1)
                    else:
                        # all warps have what they need of this stage, and the next one is there
                        cute.arch.cp_async_wait_group(plan.stages - 2)
                        cute.arch.sync_threads()
                        self.products.load(words, ring + slot * plan.stage_bytes, places, 0)
                        ahead = self.copies.copy(stage, ahead, tiles, operands, thread)
                    sums = self.products.multiply(sums, own)
                self.products.add(totals, sums, factors)
            self.products.store(totals, out, tiles.place(number), places, rows, columns)
        cute.arch.cp_async_wait_group(0)
