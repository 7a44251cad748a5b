"""The entry point that Hopper's mixed kernel for few heads inherits."""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cute_kernels.dsl.paging import Batch
from cute_kernels.dsl.tensor import address, length, stride_bytes
from cute_kernels.sparse_mla.logs import logs_of
from cute_kernels.sparse_mla.mixed_sm90_rows import MixedSources, pool
from cute_kernels.sparse_mla.prefill_sm90 import PrefillKernel
from cute_kernels.sparse_mla.prefill_sm90_plan import Output, results_policy


class MixedKernel(PrefillKernel):
    """Entry point:

    q, window, compressed, indices, out, lse
                 as the op's, window twice if there is no other cache; strides of q, out and of pages are multiples of
                 16 bytes
    lengths      address of sparse_topk_lens
    starts       address of cum_seq_lens_q
    seq_lens     its address
    requests     how many it has
    window_size
    sink         address of fp32 [h], or 0
    scale_log2   scale of the scores times log2(e)
    scale        of out
    blocks       of the grid, at most
    stream
    """

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
            pool(window),
            pool(compressed),
            address(indices),
            stride_bytes(indices, 0),
            length(indices, 1),
            window_size,
            lengths,
            Batch(starts, seq_lens, requests),
        )
        strides, policy = (stride_bytes(out, 0), stride_bytes(out, 1)), results_policy(length(q, 0) * length(q, 1))
        results = Output(address(out), *strides, None, logs_of(lse), scale, policy)
        self.launch(q, sources, results, sink, scale_log2, blocks, stream)
