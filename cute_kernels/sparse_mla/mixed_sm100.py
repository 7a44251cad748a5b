"""sparse_mla_mixed on Blackwell: prefill's kernel, with rows of two paged caches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64

from cute_kernels.dsl.paging import Batch
from cute_kernels.dsl.tensor import address, length, stride_bytes
from cute_kernels.sparse_mla.logs import logs_of
from cute_kernels.sparse_mla.mixed_sm90_rows import MixedSources
from cute_kernels.sparse_mla.mixed_sm100_rows import MixedLists, row_pool, rows_of
from cute_kernels.sparse_mla.prefill_args import fake_mixed
from cute_kernels.sparse_mla.prefill_sm90_plan import Output
from cute_kernels.sparse_mla.prefill_sm100 import PrefillKernel, PrefillKey
from cute_kernels.sparse_mla.prefill_sm100_plan import BF16, Plan


@dataclass(frozen=True)
class MixedKey(PrefillKey):
    """What distinguishes one compiled kernel from another: nothing but the architecture."""

    kernel_name: ClassVar[str] = "sparse_mla.blackwell.prefill_mixed"

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        return MixedKernel(), fake_mixed(BFloat16)


class MixedKernel(PrefillKernel):
    """Entry point: as mixed_sm90's. Strides of q and of pages are what prefill_sm100_choice says."""

    def __init__(self, name: str = "sparse_mla_mixed", plan: Plan = BF16) -> None:
        super().__init__(name, MixedLists(), plan)

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        window: cute.Tensor,
        compressed: cute.Tensor,
        indices: cute.Tensor,
        out: cute.Tensor,
        lse: cute.Tensor,
        lengths: Int64,
        starts: Int64,
        seq_lens: Int64,
        requests: Int32,
        window_size: Int32,
        sink: Int64,
        scale_log2: Float32,
        scale: Float32,
        blocks: Int32,
        stream: cuda.CUstream,
    ) -> None:
        sources = MixedSources(
            row_pool(window),
            row_pool(compressed),
            address(indices),
            stride_bytes(indices, 0),
            length(indices, 1),
            window_size,
            lengths,
            Batch(starts, seq_lens, requests),
        )
        results = Output(address(out), stride_bytes(out, 0), stride_bytes(out, 1), None, logs_of(lse), scale)
        maps = tuple(self.rows_map(cache, rows_of(cache)) for cache in (window, compressed))
        self.launch(q, maps, sources, results, sink, scale_log2, blocks, stream)
