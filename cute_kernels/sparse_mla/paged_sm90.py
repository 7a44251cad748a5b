"""sparse_mla_prefill_paged on Hopper: prefill's kernel, with rows of two fp8_ds_mla caches.

The warpgroup that asks for rows converts them too.

perf/notes/prefill.md has what was tried.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint8
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from cute_kernels.dsl.paging import Batch
from cute_kernels.dsl.tensor import address, stride_bytes
from cute_kernels.formats import FP8_DS_MLA
from cute_kernels.sparse_mla.logs import fake_logs, logs_of
from cute_kernels.sparse_mla.paged_sm90_plan import PAGED, Sources, cache_of
from cute_kernels.sparse_mla.paged_sm90_rows import PagedRows
from cute_kernels.sparse_mla.paged_sm90_scores import PagedScores
from cute_kernels.sparse_mla.prefill_sm90 import PrefillKernel, PrefillKey, fake_rows
from cute_kernels.sparse_mla.prefill_sm90_plan import Output
from cute_kernels.sparse_mla.quant_output import fake_quant, quant_of


@dataclass(frozen=True)
class PagedKey(PrefillKey):
    """As PrefillKey."""

    kernel_name: ClassVar[str] = "sparse_mla.hopper.prefill_paged"

    @property
    def smem_bytes(self) -> int:
        return PAGED.smem_bytes

    @property
    def instructions(self) -> tuple[str, ...]:
        return "wgmma", "cp.async", "ldmatrix", "stmatrix", "mbarrier", "setmaxnreg", "st.global.128", "griddepcontrol"

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        return PagedKernel(), (*fake_arguments(), Int32(1), make_fake_stream(use_tvm_ffi_env_stream=True))


@dataclass(frozen=True)
class QuantPagedKey(PagedKey):
    """As PagedKey: results are turned back and become e4m3 codes, see quant_output."""

    kernel_name: ClassVar[str] = "sparse_mla.hopper.prefill_paged_quant"

    @property
    def instructions(self) -> tuple[str, ...]:
        return *super().instructions, "cvt.e4m3"

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        _, arguments = super().build()
        return QuantPagedKernel(), (*arguments[:5], *fake_quant(), *arguments[6:])


def fake_arguments() -> tuple[Any, ...]:
    """Those of the entry point up to the scale."""

    def cache() -> Any:
        shape = cute.sym_int(), cute.sym_int(), FP8_DS_MLA.row_elements
        strides = (cute.sym_int64(divisibility=16), FP8_DS_MLA.row_elements, 1)
        return make_fake_tensor(Uint8, shape, stride=strides, assumed_align=16)

    def numbers() -> Any:
        return make_fake_tensor(Int32, (cute.sym_int(), cute.sym_int()), stride=(cute.sym_int64(), 1))

    tensors = (fake_rows(), cache(), numbers(), cache(), numbers(), fake_rows(), fake_logs(2), fake_logs(2))
    scalars = (Int64(0), Int64(0), Int32(0), Int32(1), Int64(0), Int64(0), Int32(0), Int32(1))
    return *tensors, *scalars, Int64(0), Float32(0)


class PagedKernel(PrefillKernel):
    """Entry point:

    q, swa_cache, swa_block_table, compressed_cache, compressed_block_table, out, max_logits, lse
                 as the op's, the window's twice if there is no other cache; strides of q, out and of pages are
                 multiples of 16 bytes
    lists        address of topk_indices, or 0: all visible entries
    list_row     bytes from row to row of them
    columns      of them, or most entries that a query row attends to; 0 without a compressed cache
    compress_ratio
    starts, seq_lens, requests
                 addresses of query_start_loc and seq_lens, number of requests
    window_size
    sink         address of fp32 [h], or 0
    scale_log2   softmax scale times log2(e)
    grid_blocks  at most
    stream
    """

    def __init__(self, name: str = "sparse_mla_prefill_paged") -> None:
        super().__init__(name, PagedRows(), PAGED)
        self.scores = PagedScores(PAGED)

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        swa_cache: cute.Tensor,
        swa_block_table: cute.Tensor,
        compressed_cache: cute.Tensor,
        compressed_block_table: cute.Tensor,
        out: cute.Tensor,
        max_logits: cute.Tensor,
        lse: cute.Tensor,
        lists: Int64,
        list_row: Int64,
        columns: Int32,
        compress_ratio: Int32,
        starts: Int64,
        seq_lens: Int64,
        requests: Int32,
        window_size: Int32,
        sink: Int64,
        scale_log2: Float32,
        grid_blocks: Int32,
        stream: cuda.CUstream,
    ) -> None:
        window = cache_of(swa_cache, swa_block_table)
        compressed = cache_of(compressed_cache, compressed_block_table)
        ratio, batch = cute.fast_divmod_create_divisor_v2(compress_ratio), Batch(starts, seq_lens, requests)
        sources = Sources(window, compressed, window_size, lists, list_row, columns, ratio, batch)
        results = Output(
            address(out), stride_bytes(out, 0), stride_bytes(out, 1), logs_of(max_logits), logs_of(lse), None
        )
        self.launch(q, sources, results, sink, scale_log2, grid_blocks, stream)


class QuantPagedKernel(PagedKernel):
    """Entry point: as PagedKernel, with codes, scales, positions and the table of cosines and sines in place of out."""

    def __init__(self) -> None:
        super().__init__("sparse_mla_prefill_paged_quant")

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        swa_cache: cute.Tensor,
        swa_block_table: cute.Tensor,
        compressed_cache: cute.Tensor,
        compressed_block_table: cute.Tensor,
        codes: cute.Tensor,
        scales: cute.Tensor,
        positions: cute.Tensor,
        table: cute.Tensor,
        max_logits: cute.Tensor,
        lse: cute.Tensor,
        lists: Int64,
        list_row: Int64,
        columns: Int32,
        compress_ratio: Int32,
        starts: Int64,
        seq_lens: Int64,
        requests: Int32,
        window_size: Int32,
        sink: Int64,
        scale_log2: Float32,
        grid_blocks: Int32,
        stream: cuda.CUstream,
    ) -> None:
        window = cache_of(swa_cache, swa_block_table)
        compressed = cache_of(compressed_cache, compressed_block_table)
        ratio, batch = cute.fast_divmod_create_divisor_v2(compress_ratio), Batch(starts, seq_lens, requests)
        sources = Sources(window, compressed, window_size, lists, list_row, columns, ratio, batch)
        quant = quant_of(codes, scales, positions, table)
        results = Output(None, None, None, logs_of(max_logits), logs_of(lse), None, quant=quant)
        self.launch(q, sources, results, sink, scale_log2, grid_blocks, stream)
