"""sparse_mla_mixed for every architecture: portable_prefill's kernel over rows of two plain caches, bf16 or e4m3."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import BFloat16, Float8E4M3FN, Float32, Int32, Int64
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from cute_kernels.dsl.paging import Batch
from cute_kernels.dsl.tensor import address, length, stride_bytes
from cute_kernels.formats import HEAD_DIM, PLAIN_BF16, PLAIN_FP8
from cute_kernels.sparse_mla.logs import fake_logs, logs_of
from cute_kernels.sparse_mla.portable_prefill import PortablePrefillKernel
from cute_kernels.sparse_mla.portable_prefill_output import Results
from cute_kernels.sparse_mla.portable_prefill_rows import MixedRows, MixedSources, pool_of
from cute_kernels.sparse_mla.prefill_portable import PortableKey, fake_rows


@dataclass(frozen=True)
class PortableMixedKey(PortableKey):
    """What distinguishes one compiled kernel from another.

    kv_format   record format id of both caches, plain_bf16/1 or plain_fp8/1; query has the same elements
    """

    kernel_name: ClassVar[str] = "sparse_mla.mma_sync.prefill_mixed"
    kv_format: str = PLAIN_BF16.id

    @property
    def formats(self) -> tuple[str, ...]:
        return self.kv_format, self.kv_format

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        kind = Float8E4M3FN if self.kv_format == PLAIN_FP8.id else BFloat16
        indices = make_fake_tensor(Int32, (cute.sym_int(), cute.sym_int()), stride=(cute.sym_int64(), 1))
        tensors = (fake_rows(kind), fake_pool(kind), fake_pool(kind), indices, fake_rows(), fake_logs(2))
        scalars = (Int64(0), Int64(0), Int64(0), Int32(0), Int32(1), Int64(0), Float32(0), Float32(0), Int32(1))
        return PortableMixed(self), (*tensors, *scalars, make_fake_stream(use_tvm_ffi_env_stream=True))


def fake_pool(kind: Any, width: int = HEAD_DIM) -> Any:
    """[pages, rows of a page, width], strides of pages multiples of 16 bytes."""
    strides = (cute.sym_int64(divisibility=128 // kind.width), width, 1)
    return make_fake_tensor(kind, (cute.sym_int(), cute.sym_int(), width), stride=strides, assumed_align=16)


class PortableMixed(PortablePrefillKernel):
    """Entry point: arguments as those of mixed_sm90.MixedKernel."""

    def __init__(self, key: PortableMixedKey) -> None:
        is_fp8 = key.kv_format == PLAIN_FP8.id
        name = "sparse_mla_mixed" + ("_fp8" if is_fp8 else "")
        super().__init__(key.plan, MixedRows(key.formats), name, is_fp8)

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
            (pool_of(window), pool_of(compressed)),
            address(indices),
            stride_bytes(indices, 0),
            length(indices, 1),
            window_size,
            lengths,
            Batch(starts, seq_lens, requests),
        )
        strides = stride_bytes(out, 0), stride_bytes(out, 1)
        results = Results(address(out), *strides, None, logs_of(lse), sink, length(q, 1), scale)
        self.launch(q, sources, results, scale_log2, blocks, stream)
