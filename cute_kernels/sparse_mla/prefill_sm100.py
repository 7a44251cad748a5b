"""sparse_mla_prefill on Blackwell: prefill_sm90's structure with products in tensor memory and rows gathered by TMA.

A block walks over work items (query row, block of 64 heads). Its warps share the work:

    scores     4: softmax of a tile of 64 keys
    back       4: results
    products   a thread: S = Q K^T, O += P V
    lists      which rows a tile is made of
    rows       a thread of each of 2: queries' and rows' way into shared memory

Compiled and run in a model of the instructions, never on a GPU: perf/notes/blackwell.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, const_expr, range_constexpr
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from cutlass.memory import SmemAllocator

from cute_kernels.dsl import ptx, tensor_maps
from cute_kernels.dsl.tensor import address, length, stride_bytes
from cute_kernels.formats import HEAD_DIM
from cute_kernels.runtime.compile import KernelKey
from cute_kernels.sparse_mla.logs import fake_logs, logs_of
from cute_kernels.sparse_mla.prefill_args import fake_rows
from cute_kernels.sparse_mla.prefill_sm90_plan import ROWS, SLAB, Output, Query, Sources, Work
from cute_kernels.sparse_mla.prefill_sm100_back import Back
from cute_kernels.sparse_mla.prefill_sm100_plan import (
    BACK,
    BF16,
    FRONT,
    LISTS_WARP,
    PRODUCTS,
    ROWS_WARP,
    TILES,
    Places,
    Plan,
)
from cute_kernels.sparse_mla.prefill_sm100_products import Products
from cute_kernels.sparse_mla.prefill_sm100_rows import Lists, Rows
from cute_kernels.sparse_mla.prefill_sm100_scores import Scores


@dataclass(frozen=True)
class PrefillKey(KernelKey):
    """What distinguishes one compiled kernel from another: nothing but the architecture."""

    kernel_name: ClassVar[str] = "sparse_mla.blackwell.prefill"

    @property
    def smem_bytes(self) -> int:
        return BF16.smem_bytes

    @property
    def instructions(self) -> tuple[str, ...]:
        used = ("tcgen05.mma", "tcgen05.cp", "tcgen05.ld", "tma.gather4", "tma.load")
        return *used, "mbarrier", "st.global.128", "griddepcontrol"

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        indices = make_fake_tensor(
            Int32, (cute.sym_int(), 1, cute.sym_int()), stride=(cute.sym_int64(), cute.sym_int64(), 1)
        )
        results = (fake_rows(), fake_logs(2), fake_logs(2))
        stream = make_fake_stream(use_tvm_ffi_env_stream=True)
        scalars = (Int64(0), Int64(0), Float32(0), Int32(1))
        return PrefillKernel(), (fake_rows(), fake_rows(), indices, *results, *scalars, stream)


class PrefillKernel:
    """Entry point: as prefill_sm90's. Strides of q and of kv are multiples of 16 bytes even where they mean nothing,
    and kv has rows."""

    dtype: Any = BFloat16
    """Of queries and rows."""

    def __init__(self, name: str = "sparse_mla_prefill", lists: Any = None, plan: Plan = BF16) -> None:
        self.name, self.plan = name, plan
        self.lists, self.rows, self.products = lists or Lists(), Rows(), Products(plan)
        self.scores, self.back = Scores(plan), Back()
        self.front: Any = None

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
        sources = Sources(
            address(kv),
            stride_bytes(kv, 0),
            length(kv, 0),
            address(indices),
            stride_bytes(indices, 0),
            length(indices, 2),
            lengths,
        )
        results = Output(
            address(out), stride_bytes(out, 0), stride_bytes(out, 1), logs_of(max_logits), logs_of(lse), None
        )
        maps = (self.rows_map(kv),)
        self.launch(q, maps, sources, results, sink, scale_log2, blocks, stream)

    @property
    def columns(self) -> int:
        """Of a slab."""
        return SLAB * 16 // self.dtype.width

    def rows_map(self, source: Any, rows: Any = None) -> Any:
        """Atom of a copy that gathers four rows' part of a slab.

        rows   None: the source's first axis. Else it has pages, and so many rows follow each other without a gap
        """
        count, step = (length(source, 0), source.stride[0]) if rows is None else (rows, HEAD_DIM)
        return tensor_maps.gathered_rows(source.iterator, self.dtype, count, self.columns, step, 128, HEAD_DIM)

    def queries_map(self, q: Any) -> Any:
        """Atom of a copy of a slab of 64 heads' queries: zeros for heads that are not there."""
        layout = cute.make_layout((length(q, 1), HEAD_DIM, length(q, 0)), stride=(q.stride[1], 1, q.stride[0]))
        return tensor_maps.boxes(cute.make_tensor(q.iterator, layout), ROWS, self.columns, 128)

    @cute.jit
    def launch(
        self,
        q: cute.Tensor,
        maps: Any,
        sources: Any,
        out: Output,
        sink: Int64,
        scale_log2: Float32,
        blocks: Int32,
        stream: cuda.CUstream,
    ) -> None:
        self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        heads = length(q, 1)
        blocks_bits = Int32(1) if heads > ROWS else Int32(0)
        items = length(q, 0) << blocks_bits
        kernel = self.kernel(
            (self.queries_map(q), *maps),
            Query(address(q), stride_bytes(q, 0), stride_bytes(q, 1), heads),
            sources,
            out,
            sink,
            scale_log2,
            items,
            blocks_bits,
        )
        grid = [cutlass.min(blocks, items), 1, 1]
        kernel.launch(grid=grid, block=[self.plan.threads, 1, 1], min_blocks_per_mp=1, stream=stream)

    @cute.kernel
    def kernel(
        self,
        copies: Any,
        q: Query,
        sources: Any,
        out: Output,
        sink: Int64,
        scale_log2: Float32,
        items: Int32,
        blocks_bits: Int32,
    ) -> None:
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(thread // 32)
        smem = SmemAllocator()
        places = {}
        for name, size in self.plan.memory.items():
            align = 1024 if name in TILES else 8
            place = smem.allocate_tensor(Int32, cute.make_layout(size // 4), byte_alignment=align)
            places[name] = place.iterator.toint()
        at = Places(**places)
        ready = self.plan.barriers.allocate(smem)
        if thread == 0:
            ready.initialize()
        if warp == BACK:
            # all of it, so it begins at address 0; nobody needs to be told
            ptx.allocate_tensor_memory(at.exchange, ptx.COLUMNS)
            ptx.relinquish_tensor_memory()
        cute.arch.sync_threads()
        cute.arch.griddepcontrol_wait()

        work = Work(block, items, blocks, blocks_bits)
        if warp < BACK:
            self.scores.run(thread, work, q, out, sink, scale_log2, ready, at)
        elif warp < PRODUCTS:
            self.back.run(thread - BACK * 32, work, q, out, ready, at)
        elif warp == PRODUCTS:
            with cute.arch.elect_one():
                self.products.run(ready, at)
        elif warp == LISTS_WARP:
            self.lists.run(work, sources, ready, at)
        elif warp < FRONT:
            with cute.arch.elect_one():
                maps = [ptx.tensor_map(copy) for copy in copies]
                for i in range_constexpr(len(maps)):
                    ptx.prefetch_tensor_map(maps[i])
                self.rows.run(warp - ROWS_WARP, work, maps, ready, at)
        else:
            if const_expr(self.front is not None):
                self.front.run(thread - FRONT * 32, work, ready, at)
        cute.arch.sync_warp()
        cute.arch.sync_threads()
        if warp == BACK:
            ptx.free_tensor_memory(0, ptx.COLUMNS)
