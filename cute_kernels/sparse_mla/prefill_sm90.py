"""Entry points that Hopper's prefill kernel for few heads inherits."""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cute_kernels.dsl.tensor import address, length, stride_bytes
from cute_kernels.sparse_mla.logs import logs_of
from cute_kernels.sparse_mla.prefill_sm90_plan import Output, Sources, results_policy
from cute_kernels.sparse_mla.quant_output import quant_of


class PrefillKernel:
    """Entry point: see prefill_args, gathered."""

    def launch(self, *_: Any) -> None:
        raise NotImplementedError

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
        strides, policy = (stride_bytes(out, 0), stride_bytes(out, 1)), results_policy(length(q, 0) * length(q, 1))
        results = Output(address(out), *strides, logs_of(max_logits), logs_of(lse), None, policy)
        self.launch(q, gathered(kv, indices, lengths), results, sink, scale_log2, blocks, stream)


def gathered(kv: Any, indices: Any, lengths: Any) -> Sources:
    return Sources(
        address(kv),
        stride_bytes(kv, 0),
        length(kv, 0),
        address(indices),
        stride_bytes(indices, 0),
        length(indices, 2),
        lengths,
    )


class QuantPrefillKernel(PrefillKernel):
    """Entry point: as PrefillKernel, with codes, scales, positions and the table of cosines and sines in place of
    out."""

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
        self.launch(q, gathered(kv, indices, lengths), results, sink, scale_log2, blocks, stream)
