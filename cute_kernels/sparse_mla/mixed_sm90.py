"""sparse_mla_mixed on Hopper: prefill's kernel, with rows of two paged caches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from cute_kernels.dsl.paging import Batch
from cute_kernels.dsl.tensor import address, length, stride_bytes
from cute_kernels.formats import HEAD_DIM
from cute_kernels.sparse_mla.logs import fake_logs, logs_of
from cute_kernels.sparse_mla.mixed_sm90_rows import MixedRows, MixedSources, pool
from cute_kernels.sparse_mla.prefill_sm90 import PrefillKernel, PrefillKey, fake_rows
from cute_kernels.sparse_mla.prefill_sm90_plan import BF16, Output, Plan, results_policy


@dataclass(frozen=True)
class MixedKey(PrefillKey):
    """What distinguishes one compiled kernel from another: nothing but the architecture."""

    kernel_name: ClassVar[str] = "sparse_mla.hopper.prefill_mixed"

    def kernel(self) -> PrefillKernel:
        return MixedKernel()

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        return self.kernel(), fake_arguments(BFloat16)


def fake_arguments(dtype: Any) -> tuple[Any, ...]:
    """Of the entry point; dtype: of queries and caches."""

    def cache() -> Any:
        strides = (cute.sym_int64(divisibility=128 // dtype.width), HEAD_DIM, 1)
        return make_fake_tensor(dtype, (cute.sym_int(), cute.sym_int(), HEAD_DIM), stride=strides, assumed_align=16)

    indices = make_fake_tensor(Int32, (cute.sym_int(), cute.sym_int()), stride=(cute.sym_int64(), 1))
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    scalars = (Int64(0), Int64(0), Int64(0), Int32(0), Int32(1), Int64(0), Float32(0), Float32(0), Int32(1))
    tensors = (fake_rows(dtype), cache(), cache(), indices, fake_rows(), fake_logs(2))
    return *tensors, *scalars, stream


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

    def __init__(self, name: str = "sparse_mla_mixed", rows: Any = None, plan: Plan = BF16) -> None:
        super().__init__(name, rows or MixedRows(BFloat16), plan)

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
