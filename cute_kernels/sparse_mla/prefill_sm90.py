"""sparse_mla_prefill on Hopper: both products on tensor cores, rows of kv gathered into shared memory.

A block walks over work items (query row, block of 64 heads). Its four warpgroups share the work:

    scores   queries in registers, Q K^T of a tile of 64 keys, softmax
    backs    two, half of the columns each: O += P V, results
    rows     which rows a tile is made of, their way into shared memory

perf/notes/prefill.md has what was tried.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from cutlass.memory import SmemAllocator
from cutlass.utils import hopper_helpers

from cute_kernels.dsl import ptx, wgmma
from cute_kernels.dsl.tensor import address, length, stride_bytes
from cute_kernels.formats import HEAD_DIM
from cute_kernels.runtime.compile import KernelKey
from cute_kernels.sparse_mla.logs import fake_logs, logs_of
from cute_kernels.sparse_mla.prefill_sm90_back import Back
from cute_kernels.sparse_mla.prefill_sm90_plan import (
    BACK,
    BACK_REGISTERS,
    BF16,
    KEYS,
    LAUNCHED,
    ROWS,
    ROWS_GROUP,
    SIDE,
    THREADS,
    TILES,
    Output,
    Places,
    Plan,
    Query,
    Sources,
    Work,
    results_policy,
)
from cute_kernels.sparse_mla.prefill_sm90_rows import Rows
from cute_kernels.sparse_mla.prefill_sm90_scores import Scores
from cute_kernels.sparse_mla.quant_output import fake_quant, quant_of


@dataclass(frozen=True)
class PrefillKey(KernelKey):
    """What distinguishes one compiled kernel from another: nothing but the architecture."""

    kernel_name: ClassVar[str] = "sparse_mla.hopper.prefill"

    @property
    def smem_bytes(self) -> int:
        return BF16.smem_bytes

    @property
    def instructions(self) -> tuple[str, ...]:
        return "wgmma", "cp.async", "ldmatrix", "mbarrier", "setmaxnreg", "st.global.128", "griddepcontrol"

    def kernel(self) -> PrefillKernel:
        return PrefillKernel()

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        indices = make_fake_tensor(
            Int32, (cute.sym_int(), 1, cute.sym_int()), stride=(cute.sym_int64(), cute.sym_int64(), 1)
        )
        results = (fake_rows(), fake_logs(2), fake_logs(2))
        stream = make_fake_stream(use_tvm_ffi_env_stream=True)
        scalars = (Int64(0), Int64(0), Float32(0), Int32(1))
        return self.kernel(), (fake_rows(), fake_rows(), indices, *results, *scalars, stream)


@dataclass(frozen=True)
class QuantPrefillKey(PrefillKey):
    """As PrefillKey: results are turned back and become e4m3 codes, see quant_output."""

    kernel_name: ClassVar[str] = "sparse_mla.hopper.prefill_quant"

    @property
    def instructions(self) -> tuple[str, ...]:
        return *super().instructions, "cvt.e4m3"

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        _, (q, kv, indices, _, *others) = super().build()
        return QuantPrefillKernel(), (q, kv, indices, *fake_quant(), *others)


@dataclass(frozen=True)
class NormQuantPrefillKey(QuantPrefillKey):
    """As QuantPrefillKey: queries come as their projection made them, and are normed and rotated first."""

    kernel_name: ClassVar[str] = "sparse_mla.hopper.prefill_norm_quant"

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        _, (q, *others, blocks, stream) = super().build()
        shape = cute.sym_int(), cute.sym_int()
        squares = make_fake_tensor(Float32, shape, stride=(cute.sym_int64(divisibility=4), 1), assumed_align=16)
        return NormQuantPrefillKernel(), (q, squares, *others, Float32(0), blocks, stream)


def fake_rows(dtype: Any = BFloat16) -> Any:
    """[any, any, 512], strides multiples of 16 bytes."""
    row, head = (cute.sym_int64(divisibility=128 // dtype.width) for _ in range(2))
    return make_fake_tensor(dtype, (cute.sym_int(), cute.sym_int(), HEAD_DIM), stride=(row, head, 1), assumed_align=16)


class PrefillKernel:
    """Entry point:

    q, kv, indices, out, max_logits, lse
                 as the op's; strides of q, kv and out are multiples of 16 bytes
    lengths      address of topk_length, or 0: all columns count
    sink         address of fp32 [h], or 0
    scale_log2   softmax scale times log2(e)
    blocks       of the grid, at most
    stream
    """

    def __init__(self, name: str = "sparse_mla_prefill", rows: Any = None, plan: Plan = BF16) -> None:
        self.name, self.rows, self.plan = name, rows or Rows(), plan
        self.scores, self.back = Scores(plan), Back(plan)

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        kv: cute.Tensor,
        indices: cute.Tensor,
        out: cute.Tensor,
        max_logits: cute.Tensor,
        lse: cute.Tensor,
        lengths: Int64,
        sink: Int64,
        scale_log2: Float32,
        blocks: Int32,
        stream: cuda.CUstream,
    ) -> None:
        sources = self.gathered(kv, indices, lengths)
        strides, policy = (stride_bytes(out, 0), stride_bytes(out, 1)), results_policy(length(q, 0) * length(q, 1))
        results = Output(address(out), *strides, logs_of(max_logits), logs_of(lse), None, policy)
        self.launch(q, sources, results, sink, scale_log2, blocks, stream)

    def gathered(self, kv: Any, indices: Any, lengths: Any) -> Sources:
        return Sources(
            address(kv),
            stride_bytes(kv, 0),
            length(kv, 0),
            address(indices),
            stride_bytes(indices, 0),
            length(indices, 2),
            lengths,
        )

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
        norm: tuple[Any, ...] = (),
    ) -> None:
        self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        heads = length(q, 1)
        blocks_bits = Int32(1) if heads > ROWS else Int32(0)
        items = length(q, 0) << blocks_bits
        kernel = self.kernel(
            Query(address(q), stride_bytes(q, 0), stride_bytes(q, 1), heads, *norm),
            sources,
            out,
            sink,
            scale_log2,
            items,
            blocks_bits,
            self.products(),
            self.layouts(),
        )
        kernel.launch(
            **self.grid(blocks, items),
            block=[THREADS, 1, 1],
            min_blocks_per_mp=1,
            stream=stream,
            use_pdl=True,
        )

    # A block walks over items of its own. Where blocks have parts of rows the next three differ.

    def grid(self, blocks: Any, items: Any) -> dict[str, Any]:
        return {"grid": [cutlass.min(blocks, items), 1, 1]}

    def prepare(self, side: Any, work: Work, sources: Any, ready: Any, at: Places) -> None:
        """By the backs, which have nothing else to do at first."""

    def leave(self, group: Any) -> None:
        """When a warpgroup has done its share."""

    def products(self) -> tuple[Any, Any, Any, Any]:
        """S = Q K^T of queries in registers, twice, as one will accumulate, and of those in shared memory; O = P V, by
        128 columns, as an instruction with more would need more registers than a thread has before setmaxnreg."""
        keys, dims = OperandMajorMode.K, OperandMajorMode.MN
        registers, dtype = warpgroup.OperandSource.RMEM, self.plan.dtype

        def make(major: Any, columns: int, **source: Any) -> Any:
            return hopper_helpers.make_trivial_tiled_mma(
                dtype, dtype, OperandMajorMode.K, major, Float32, (1, 1, 1), (ROWS, columns), **source
            )

        held = [make(keys, KEYS, a_source=registers) for _ in range(2)]
        return *held, make(keys, KEYS), make(dims, SIDE // 2)

    def layouts(self) -> tuple[Any, Any, Any, Any]:
        """Of a tile, of half a tile's columns, of the queries that stay in shared memory, and of weights."""
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, self.plan.dtype)
        shapes = (KEYS, HEAD_DIM), (KEYS, SIDE), (ROWS, HEAD_DIM - self.plan.held), (ROWS, KEYS)
        tile, side, kept, weights = (cute.tile_to_shape(atom, shape, (0, 1)) for shape in shapes)
        return tile, side, kept, weights

    @cute.kernel
    def kernel(
        self,
        q: Query,
        sources: Any,
        out: Output,
        sink: Int64,
        scale_log2: Float32,
        items: Int32,
        blocks_bits: Int32,
        products: tuple[cute.TiledMma, cute.TiledMma, cute.TiledMma, cute.TiledMma],
        layouts: tuple[cute.ComposedLayout, cute.ComposedLayout, cute.ComposedLayout, cute.ComposedLayout],
    ) -> None:
        thread, _, _ = cute.arch.thread_idx()
        blocks, _, _ = cute.arch.grid_dim()
        group = cute.arch.make_warp_uniform(thread // wgmma.WARPGROUP)
        smem = SmemAllocator()
        places = {}
        for name, size in self.plan.memory.items():
            align = 1024 if name in TILES else 16
            place = smem.allocate_tensor(Int32, cute.make_layout(size // 4), byte_alignment=align)
            places[name] = place.iterator.toint()
        at = Places(**places)
        ready = self.plan.barriers.allocate(smem)
        if thread == 0:
            ready.initialize()
        cute.arch.sync_threads()
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()

        for product in products[1:]:
            wgmma.accumulate(product)
        # its number is read by whoever needs it: before the branches a register could be spilled
        work = Work(ptx.block_again(), items, blocks, blocks_bits)
        own = thread % wgmma.WARPGROUP
        if group < BACK:
            if const_expr(self.plan.scores_registers > LAUNCHED):
                cute.arch.setmaxregister_increase(self.plan.scores_registers)
            self.scores.run(own, work, q, out, sink, scale_log2, ready, products[:3], layouts[0], layouts[2], at)
        elif group < ROWS_GROUP:
            cute.arch.setmaxregister_increase(BACK_REGISTERS)
            side = cute.arch.make_warp_uniform(group - BACK)
            self.prepare(side, work, sources, ready, at)
            self.back.run(own, side, work, q, out, ready, products[3], layouts[3], layouts[1], at)
        else:
            cute.arch.setmaxregister_decrease(self.plan.rows_registers)
            self.rows.run(Work(ptx.block_again(), items, blocks, blocks_bits), q, sources, ready, at)
        self.leave(group)


class QuantPrefillKernel(PrefillKernel):
    """Entry point: as PrefillKernel, with codes, scales, positions and the table of cosines and sines in place of
    out."""

    def __init__(self) -> None:
        super().__init__("sparse_mla_prefill_quant")

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        kv: cute.Tensor,
        indices: cute.Tensor,
        codes: cute.Tensor,
        scales: cute.Tensor,
        positions: cute.Tensor,
        table: cute.Tensor,
        max_logits: cute.Tensor,
        lse: cute.Tensor,
        lengths: Int64,
        sink: Int64,
        scale_log2: Float32,
        blocks: Int32,
        stream: cuda.CUstream,
    ) -> None:
        quant = quant_of(codes, scales, positions, table)
        results = Output(None, None, None, logs_of(max_logits), logs_of(lse), None, quant=quant)
        self.launch(q, self.gathered(kv, indices, lengths), results, sink, scale_log2, blocks, stream)


class NormQuantPrefillKernel(PrefillKernel):
    """Entry point: as QuantPrefillKernel, with the sums of squares fp32 [rows, heads * 4] behind q, and eps of the
    queries' norm behind the scale."""

    def __init__(self) -> None:
        super().__init__("sparse_mla_prefill_norm_quant")

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        squares: cute.Tensor,
        kv: cute.Tensor,
        indices: cute.Tensor,
        codes: cute.Tensor,
        scales: cute.Tensor,
        positions: cute.Tensor,
        table: cute.Tensor,
        max_logits: cute.Tensor,
        lse: cute.Tensor,
        lengths: Int64,
        sink: Int64,
        scale_log2: Float32,
        norm_eps: Float32,
        blocks: Int32,
        stream: cuda.CUstream,
    ) -> None:
        quant = quant_of(codes, scales, positions, table)
        results = Output(None, None, None, logs_of(max_logits), logs_of(lse), None, quant=quant)
        norm = norm_eps, address(squares), stride_bytes(squares, 0)
        self.launch(q, self.gathered(kv, indices, lengths), results, sink, scale_log2, blocks, stream, norm)
