"""sparse_mla_prefill and sparse_mla_mixed on Hopper for up to 16 heads: keys on the tensor cores' long side.

A block walks over query rows. Its four warpgroups share the work:

    scores   S^T = K Q^T of a tile of 64 keys, softmax
    back     O^T += V^T P, results
    rows     two: which rows a tile is made of, their way into shared memory

perf/notes/prefill.md has what was tried.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.memory import SmemAllocator
from cutlass.utils import hopper_helpers

from cute_kernels.dsl import ptx, wgmma
from cute_kernels.dsl.tensor import address, length, stride_bytes
from cute_kernels.formats import HEAD_DIM
from cute_kernels.sparse_mla.hopper.prefill import PrefillKey
from cute_kernels.sparse_mla.hopper.prefill_mixed import MixedKey
from cute_kernels.sparse_mla.mixed_sm90 import MixedKernel
from cute_kernels.sparse_mla.prefill_args import fake_gathered, fake_mixed
from cute_kernels.sparse_mla.prefill_few_sm90_back import FewBack
from cute_kernels.sparse_mla.prefill_few_sm90_plan import (
    BACK,
    ROWS_GROUP,
    THREADS,
    TILES,
    UNIT_COLUMNS,
    Barriers,
    Places,
    Plan,
)
from cute_kernels.sparse_mla.prefill_few_sm90_rows import FewMixedRows, FewRows
from cute_kernels.sparse_mla.prefill_few_sm90_scores import FewScores
from cute_kernels.sparse_mla.prefill_sm90 import PrefillKernel, QuantPrefillKernel
from cute_kernels.sparse_mla.prefill_sm90_plan import KEYS, Output, Query, Work
from cute_kernels.sparse_mla.quant_output import fake_quant

SCORES_REGISTERS, BACK_REGISTERS, ROWS_REGISTERS = 152, 200, 80
"""Per thread, in steps of 8; all four warpgroups together have 512, what they are launched with."""

INSTRUCTIONS = ("wgmma", "cp.async", "stmatrix", "mbarrier", "setmaxnreg", "st.global.128", "griddepcontrol")


@dataclass(frozen=True)
class FewPrefillKey(PrefillKey):
    """What distinguishes one compiled kernel from another.

    heads   8 or 16: how many there are at most
    """

    kernel_name: ClassVar[str] = "sparse_mla.hopper.prefill_swap_ab"
    heads: int

    @property
    def smem_bytes(self) -> int:
        return Plan(self.heads).smem_bytes

    @property
    def instructions(self) -> tuple[str, ...]:
        return INSTRUCTIONS

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        return FewPrefillKernel(self.heads), fake_gathered()


@dataclass(frozen=True)
class QuantFewPrefillKey(FewPrefillKey):
    """As FewPrefillKey: results are turned back and become e4m3 codes, see quant_output."""

    kernel_name: ClassVar[str] = "sparse_mla.hopper.prefill_swap_ab_quant"

    @property
    def smem_bytes(self) -> int:
        return Plan(self.heads, True).smem_bytes

    @property
    def instructions(self) -> tuple[str, ...]:
        return *(name for name in INSTRUCTIONS if name != "st.global.128"), "cvt.e4m3"

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        _, (q, kv, indices, _, *others) = super().build()
        return QuantFewPrefillKernel(self.heads), (q, kv, indices, *fake_quant(), *others)


@dataclass(frozen=True)
class FewMixedKey(MixedKey):
    """As FewPrefillKey."""

    kernel_name: ClassVar[str] = "sparse_mla.hopper.prefill_mixed_swap_ab"
    heads: int

    @property
    def smem_bytes(self) -> int:
        return Plan(self.heads).smem_bytes

    @property
    def instructions(self) -> tuple[str, ...]:
        return INSTRUCTIONS

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        return FewMixedKernel(self.heads), fake_mixed(BFloat16)


class FewPrefillKernel(PrefillKernel):
    """Entry point: as PrefillKernel's."""

    def __init__(self, heads: int, quantized: bool = False) -> None:
        self.few_plan = Plan(heads, quantized)
        self.few_rows = FewRows()
        self.few_scores, self.few_back = FewScores(self.few_plan), FewBack(self.few_plan)
        self.name = f"sparse_mla_prefill_{heads}"

    @cute.jit
    def launch(
        self,
        q: cute.Tensor,
        sources: Any,
        out: Output,
        sink: Int64,
        scale_log2: Float32,
        blocks: Int32,
        stream: cuda.CUstream,
    ) -> None:
        self.few_kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        items = length(q, 0)
        kernel = self.few_kernel(
            Query(address(q), stride_bytes(q, 0), stride_bytes(q, 1), length(q, 1)),
            sources,
            out,
            sink,
            scale_log2,
            items,
            self.few_products(),
            self.few_layouts(),
        )
        kernel.launch(
            grid=[cutlass.min(blocks, items), 1, 1],
            block=[THREADS, 1, 1],
            min_blocks_per_mp=1,
            stream=stream,
            use_pdl=True,
        )

    def few_products(self) -> tuple[Any, Any, Any]:
        """S^T = K Q^T, twice, as one will accumulate; O^T = V^T P of columns as they lie."""
        keys, dims = OperandMajorMode.K, OperandMajorMode.MN

        def make(major: Any) -> Any:
            shape = (wgmma.ROWS, self.few_plan.heads)
            return hopper_helpers.make_trivial_tiled_mma(BFloat16, BFloat16, major, keys, Float32, (1, 1, 1), shape)

        return make(keys), make(keys), make(dims)

    def few_layouts(self) -> tuple[Any, Any, Any]:
        """Of a unit, of an item's queries, and of weights."""
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, BFloat16)
        shapes = (KEYS, UNIT_COLUMNS), (self.few_plan.heads, HEAD_DIM), (self.few_plan.heads, KEYS)
        unit, queries, weights = (cute.tile_to_shape(atom, shape, (0, 1)) for shape in shapes)
        return unit, queries, weights

    @cute.kernel
    def few_kernel(
        self,
        q: Query,
        sources: Any,
        out: Output,
        sink: Int64,
        scale_log2: Float32,
        items: Int32,
        products: tuple[cute.TiledMma, cute.TiledMma, cute.TiledMma],
        layouts: tuple[cute.ComposedLayout, cute.ComposedLayout, cute.ComposedLayout],
    ) -> None:
        thread, _, _ = cute.arch.thread_idx()
        blocks, _, _ = cute.arch.grid_dim()
        group = cute.arch.make_warp_uniform(thread // wgmma.WARPGROUP)
        smem = SmemAllocator()
        places = []
        for name, size in self.few_plan.parts().items():
            align = 1024 if name in TILES else 16
            place = smem.allocate_tensor(Int32, cute.make_layout(size // 4), byte_alignment=align)
            places.append(place.iterator.toint())
        at = Places(*places)
        ready = Barriers.allocate(smem)
        if thread == 0:
            ready.initialize()
        cute.arch.sync_threads()
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()

        for product in products[1:]:
            wgmma.accumulate(product)
        # an item is a query row: there is one block of heads
        work = Work(ptx.block_again(), items, blocks, Int32(0))
        own = thread % wgmma.WARPGROUP
        if group < BACK:
            cute.arch.setmaxregister_increase(SCORES_REGISTERS)
            self.few_scores.run(own, work, q, out, sink, scale_log2, ready, products[:2], layouts[:2], at)
        elif group < ROWS_GROUP:
            cute.arch.setmaxregister_increase(BACK_REGISTERS)
            self.few_back.run(own, work, q, out, ready, products[2], layouts[2], layouts[0], at)
        else:
            cute.arch.setmaxregister_decrease(ROWS_REGISTERS)
            self.few_rows.run(work, q, sources, ready, at)


class QuantFewPrefillKernel(FewPrefillKernel, QuantPrefillKernel):
    """Entry point: as QuantPrefillKernel's."""

    def __init__(self, heads: int) -> None:
        FewPrefillKernel.__init__(self, heads, True)
        self.name = f"{self.name}_quant"


class FewMixedKernel(FewPrefillKernel, MixedKernel):
    """Entry point: as MixedKernel's."""

    def __init__(self, heads: int) -> None:
        FewPrefillKernel.__init__(self, heads)
        self.few_rows: FewRows = FewMixedRows(BFloat16)
        self.name = f"sparse_mla_mixed_{heads}"
