"""sparse_mla_prefill_paged on Blackwell: prefill's kernel, with rows of two fp8_ds_mla caches and warps that convert
them.

A query row with more than 64 heads is two items, side by side: rows that both need come from L2 for the second one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cute_kernels.dsl.paging import Batch
from cute_kernels.dsl.tensor import address, stride_bytes
from cute_kernels.sparse_mla.blackwell.decode import codes_copy, pitch_of, rope_copy
from cute_kernels.sparse_mla.logs import logs_of
from cute_kernels.sparse_mla.paged_sm100_plan import PAGED, Sources
from cute_kernels.sparse_mla.paged_sm100_rows import Front, PagedLists, PagedRows
from cute_kernels.sparse_mla.params import PagedCache, PagedKV
from cute_kernels.sparse_mla.prefill_args import fake_paged
from cute_kernels.sparse_mla.prefill_sm90_plan import Output
from cute_kernels.sparse_mla.prefill_sm100 import PrefillKernel, PrefillKey


@dataclass(frozen=True)
class PagedKey(PrefillKey):
    """What distinguishes one compiled kernel from another: nothing but the architecture."""

    kernel_name: ClassVar[str] = "sparse_mla.blackwell.prefill_paged"

    @property
    def smem_bytes(self) -> int:
        return PAGED.smem_bytes

    @property
    def instructions(self) -> tuple[str, ...]:
        return *super().instructions, "cp.async"

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        return PagedKernel(), fake_paged()


class PagedKernel(PrefillKernel):
    """Entry point: see prefill_args, paged. Strides of q and of pages are what prefill_sm100_choice says."""

    def __init__(self) -> None:
        super().__init__("sparse_mla_prefill_paged", PagedLists(), PAGED)
        self.rows, self.front = PagedRows(), Front()

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
        named = PagedKV(
            PagedCache.of(swa_cache, swa_block_table),
            PagedCache.of(compressed_cache, compressed_block_table),
            window_size,
            lists,
            list_row,
            columns,
            cute.fast_divmod_create_divisor_v2(compress_ratio),
            Batch(starts, seq_lens, requests),
        )
        caches = swa_cache, compressed_cache
        sources = Sources(named, *(pitch_of(cache) for cache in caches))
        results = Output(
            address(out), stride_bytes(out, 0), stride_bytes(out, 1), logs_of(max_logits), logs_of(lse), None
        )
        maps = (*(codes_copy(cache) for cache in caches), *(rope_copy(cache) for cache in caches))
        self.launch(q, maps, sources, results, sink, scale_log2, grid_blocks, stream)
