"""sparse_mla_prefill for every architecture: portable_prefill's kernel over rows of one buffer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from cute_kernels.dsl.tensor import address, length, stride_bytes
from cute_kernels.formats import HEAD_DIM, PLAIN_BF16
from cute_kernels.runtime.compile import KernelKey
from cute_kernels.sparse_mla.logs import fake_logs, logs_of
from cute_kernels.sparse_mla.portable_prefill import PortablePrefillKernel
from cute_kernels.sparse_mla.portable_prefill_output import Results
from cute_kernels.sparse_mla.portable_prefill_plan import Plan
from cute_kernels.sparse_mla.portable_prefill_rows import GatheredRows, GatheredSources


@dataclass(frozen=True)
class PortableKey(KernelKey):
    """What the kernels of portable_prefill.py are known by, and something of their own.

    heads   of an item: 16, 32 or 64
    """

    heads: int = 64

    @property
    def formats(self) -> tuple[str, ...]:
        """Record format ids of the caches."""
        raise NotImplementedError

    @property
    def plan(self) -> Plan:
        return Plan(self.arch, self.heads, self.formats)

    @property
    def smem_bytes(self) -> int:
        return self.plan.smem_bytes

    @property
    def instructions(self) -> tuple[str, ...]:
        return "mma.sync", "ldmatrix", "cp.async", "ex2", "ld.global.128", "st.global.128"


@dataclass(frozen=True)
class PortablePrefillKey(PortableKey):
    """What distinguishes one compiled kernel from another: the architecture and the heads of an item."""

    kernel_name: ClassVar[str] = "sparse_mla.mma_sync.prefill"

    @property
    def formats(self) -> tuple[str, ...]:
        return (PLAIN_BF16.id,)

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        indices = make_fake_tensor(
            Int32, (cute.sym_int(), 1, cute.sym_int()), stride=(cute.sym_int64(), cute.sym_int64(), 1)
        )
        tensors = (fake_rows(), fake_rows(), indices, fake_rows(), fake_logs(2), fake_logs(2))
        scalars = (Int64(0), Int64(0), Float32(0), Int32(1))
        return PortableGathered(self.plan), (*tensors, *scalars, make_fake_stream(use_tvm_ffi_env_stream=True))


def fake_rows(kind: Any = BFloat16) -> Any:
    """[any, any, 512], strides multiples of 16 bytes."""
    multiple = 128 // kind.width
    strides = (cute.sym_int64(divisibility=multiple), cute.sym_int64(divisibility=multiple), 1)
    return make_fake_tensor(kind, (cute.sym_int(), cute.sym_int(), HEAD_DIM), stride=strides, assumed_align=16)


class PortableGathered(PortablePrefillKernel):
    """Entry point: arguments as those of prefill_sm90.PrefillKernel."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan, GatheredRows(), "sparse_mla_prefill")

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
        sources = GatheredSources(
            address(kv),
            stride_bytes(kv, 0),
            length(kv, 0),
            address(indices),
            stride_bytes(indices, 0),
            length(indices, 2),
            lengths,
        )
        strides = stride_bytes(out, 0), stride_bytes(out, 1)
        results = Results(address(out), *strides, logs_of(max_logits), logs_of(lse), sink, length(q, 1), None)
        self.launch(q, sources, results, scale_log2, blocks, stream)
