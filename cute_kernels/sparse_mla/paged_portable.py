"""sparse_mla_prefill_paged for every architecture: portable_prefill's kernel over rows of two paged caches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, Uint8
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from cute_kernels.dsl.paging import Batch, matrix
from cute_kernels.dsl.tensor import address, length, stride_bytes
from cute_kernels.formats import FP8_DS_MLA, PLAIN_BF16
from cute_kernels.sparse_mla.logs import fake_logs, logs_of
from cute_kernels.sparse_mla.mixed_portable import fake_pool
from cute_kernels.sparse_mla.portable_prefill import PortablePrefillKernel
from cute_kernels.sparse_mla.portable_prefill_output import Results
from cute_kernels.sparse_mla.portable_prefill_rows import COMPRESSED, PagedRows, PagedSources, pool_of
from cute_kernels.sparse_mla.prefill_portable import PortableKey, fake_rows


@dataclass(frozen=True)
class PortablePagedKey(PortableKey):
    """What distinguishes one compiled kernel from another.

    compressed   the compressed entries that count: "none", "all" that a row sees, or "listed"
    format0      record format id of the window's cache: fp8_ds_mla/1 or plain_bf16/1
    format1      of the compressed cache; format0 if there is none
    """

    kernel_name: ClassVar[str] = "sparse_mla.mma_sync.prefill_paged"
    compressed: str = "listed"
    format0: str = FP8_DS_MLA.id
    format1: str = FP8_DS_MLA.id

    def __post_init__(self) -> None:
        if self.compressed not in COMPRESSED:
            raise ValueError(f"compressed: expected one of {COMPRESSED}, got {self.compressed!r}")

    @property
    def formats(self) -> tuple[str, ...]:
        return self.format0, self.format1

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        def pool(kv_format: str) -> Any:
            return fake_pool(BFloat16) if kv_format == PLAIN_BF16.id else fake_pool(Uint8, FP8_DS_MLA.row_elements)

        def lists() -> Any:
            return make_fake_tensor(Int32, (cute.sym_int(), cute.sym_int()), stride=(cute.sym_int64(), 1))

        tensors = (fake_rows(), pool(self.format0), lists(), pool(self.format1), lists(), lists())
        scalars = (Int64(0), Int64(0), Int32(0), Int32(1), Int32(1), Int64(0), Float32(0), Int32(1))
        results = (fake_rows(), fake_logs(2), fake_logs(2))
        return PortablePaged(self), (*tensors, *results, *scalars, make_fake_stream(use_tvm_ffi_env_stream=True))


class PortablePaged(PortablePrefillKernel):
    """Entry point:

    q, window, window_table, compressed, table, entries, out, max_logits, lse
                 as the op's, the window's cache and table again if there is no other; the window's table also for
                 entries, if nothing lists them; strides of q, out and of pages are multiples of 16 bytes
    starts       address of query_start_loc
    seq_lens     its address
    requests     how many it has
    window_size
    ratio        tokens of a compressed entry
    sink         address of fp32 [h], or 0
    scale_log2   softmax scale times log2(e)
    blocks       of the grid, at most
    stream
    """

    def __init__(self, key: PortablePagedKey) -> None:
        names = "_".join("fp8" if kv_format == FP8_DS_MLA.id else "bf16" for kv_format in key.formats)
        name = f"sparse_mla_prefill_paged_{key.compressed}_{names}"
        super().__init__(key.plan, PagedRows(key.formats, key.compressed), name)

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        window: cute.Tensor,
        window_table: cute.Tensor,
        compressed: cute.Tensor,
        table: cute.Tensor,
        entries: cute.Tensor,
        out: cute.Tensor,
        max_logits: cute.Tensor,
        lse: cute.Tensor,
        starts: Int64,
        seq_lens: Int64,
        requests: Int32,
        window_size: Int32,
        ratio: Int32,
        sink: Int64,
        scale_log2: Float32,
        blocks: Int32,
        stream: cuda.CUstream,
    ) -> None:
        sources = PagedSources(
            (pool_of(window), pool_of(compressed)),
            (matrix(window_table), matrix(table)),
            address(entries),
            stride_bytes(entries, 0),
            length(entries, 1),
            window_size,
            cute.fast_divmod_create_divisor_v2(ratio),
            Batch(starts, seq_lens, requests),
        )
        strides = stride_bytes(out, 0), stride_bytes(out, 1)
        results = Results(address(out), *strides, logs_of(max_logits), logs_of(lse), sink, length(q, 1), None)
        self.launch(q, sources, results, scale_log2, blocks, stream)
