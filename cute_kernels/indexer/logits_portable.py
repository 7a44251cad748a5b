"""Kernel of mqa_logits and paged_mqa_logits for every architecture from sm_80 on: f16 or bf16 products by mma.sync.

All warps of a block do the same: they count tiles (logits_shares.py), write -inf where a row sees no key, if that is
wanted (logits_fill.py), and then score (portable_team.py). What is where: portable_plan.py; how codes become operands:
portable_operands.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint8, const_expr
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from cutlass.memory import SmemAllocator

from cute_kernels.dsl import mma_sync, ptx
from cute_kernels.dsl.tensor import address, length, stride_bytes
from cute_kernels.indexer.logits_fill import Fill
from cute_kernels.indexer.logits_plan import KEYS, WARP, Groups, Windows
from cute_kernels.indexer.logits_shares import Shares
from cute_kernels.indexer.portable_operands import operands_of
from cute_kernels.indexer.portable_plan import WARPS, PortablePlan
from cute_kernels.indexer.portable_team import Keys, Queries, Team
from cute_kernels.runtime.arch import arch_number
from cute_kernels.runtime.compile import KernelKey


@dataclass(frozen=True)
class PortableLogitsKey(KernelKey):
    """What distinguishes one compiled kernel from another.

    heads   of a query row, a multiple of 16 up to 64: those that a call has not are left out
    rows    of a group: 1, 2 or 4
    paged   whether keys lie in pages
    mxfp4   whether queries and keys are MXFP4, else they are FP8
    """

    kernel_name: ClassVar[str] = "indexer.mma_sync.logits"
    heads: int = 64
    rows: int = 4
    paged: bool = False
    mxfp4: bool = False

    @property
    def plan(self) -> PortablePlan:
        return PortablePlan(self.arch, self.heads, self.rows, operands_of(self.mxfp4, self.arch).code_bytes)

    @property
    def smem_bytes(self) -> int:
        return self.plan.smem_bytes

    @property
    def instructions(self) -> tuple[str, ...]:
        used = "mma.sync", "cp.async", "ld.global.128"
        return used if self.mxfp4 or not operands_of(False, self.arch).converts else (*used, "cvt.e4m3")

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        def matrix() -> Any:
            return make_fake_tensor(Float32, (cute.sym_int(), cute.sym_int()), stride=(cute.sym_int64(), 1))

        queries = [Int64(0)] * 8 + [Int32(1)] * 3
        keys = [Int64(0)] * 4 + [Int32(1)] * 2 + [Int64(0)] * 2 + [Int32(0)]
        windows = [Int64(0)] * 3 + [Int32(0)] * 4 + [Int32(1)]
        return PortableLogitsKernel(self), (
            matrix(),
            matrix(),
            *queries,
            *keys,
            *windows,
            make_fake_stream(use_tvm_ffi_env_stream=True),
        )


class PortableLogitsKernel:
    """Entry point: (weights, out;
    address of the queries and their strides in bytes, by request, row and head, the same of their scales; requests,
    rows of a request, heads;
    addresses of key 0 and its scale, strides of keys and pages in bytes; keys of a page, pages; address of the block
    table, its stride in bytes and its columns;
    addresses of starts and ends, stride of the ends by request in bytes; number of keys, whether a row's columns begin
    at its start (-1) or not (0), keys up to which a row is not scored, whether to write -inf where there are no scores,
    blocks; stream).
    """

    def __init__(self, key: PortableLogitsKey) -> None:
        self.plan, self.paged = key.plan, key.paged
        self.shares, self.fill = Shares(key.rows, WARPS, key.paged, KEYS), Fill(key.paged)
        self.team = Team(key.plan, operands_of(key.mxfp4, key.arch), self.shares, key.paged)
        self.has_dependency = arch_number(key.arch) >= ptx.DEPENDENT_LAUNCH_ARCH
        kind = ("paged_" if key.paged else "") + "mqa_logits_portable" + ("_mxfp4" if key.mxfp4 else "_fp8")
        self.name = f"{kind}_h{key.heads}r{key.rows}"

    @cute.jit
    def __call__(
        self,
        weights: cute.Tensor,
        out: cute.Tensor,
        q: Int64,
        q_request: Int64,
        q_row: Int64,
        q_head: Int64,
        q_scale: Int64,
        q_scale_request: Int64,
        q_scale_row: Int64,
        q_scale_head: Int64,
        requests: Int32,
        row_count: Int32,
        heads: Int32,
        keys: Int64,
        scales: Int64,
        key_stride: Int64,
        page_stride: Int64,
        page_rows: Int32,
        pages: Int32,
        table: Int64,
        table_stride: Int64,
        table_columns: Int32,
        starts: Int64,
        ends: Int64,
        end_request: Int64,
        limit: Int32,
        shifts: Int32,
        skip: Int32,
        clean: Int32,
        blocks: Int32,
        stream: cuda.CUstream,
    ) -> None:
        self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        rows = cute.fast_divmod_create_divisor_v2(page_rows)
        kernel = self.kernel(
            Groups.of(requests, row_count, self.plan.rows, blocks),
            Windows(starts, ends, end_request, limit, length(out, 1), shifts, skip),
            Queries(
                (q, q_request, q_row, q_head),
                (q_scale, q_scale_request, q_scale_row, q_scale_head),
                address(weights),
                stride_bytes(weights, 0),
                heads,
            ),
            Keys(keys, scales, key_stride, page_stride, rows, pages, table, table_stride, table_columns),
            address(out),
            stride_bytes(out, 0),
            clean,
            blocks,
        )
        kernel.launch(grid=[blocks, 1, 1], block=[self.plan.threads, 1, 1], min_blocks_per_mp=1, stream=stream)

    @cute.kernel
    def kernel(
        self,
        groups: Groups,
        windows: Windows,
        queries: Queries,
        keys: Keys,
        out: Int64,
        out_stride: Int64,
        clean: Int32,
        blocks: Int32,
    ) -> None:
        plan = self.plan
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(thread // WARP)
        memory = SmemAllocator().allocate_tensor(Uint8, cute.make_layout(plan.smem_bytes), byte_alignment=128)
        base = memory.iterator.toint()
        if const_expr(self.has_dependency):
            cute.arch.griddepcontrol_wait()
        if groups.total() > WARP:
            self.shares.count(warp, groups, windows, base + plan.sums_at)
            cute.arch.sync_threads()
        q = mma_sync.Registers("q", plan.tiles * 32)
        q.declare()
        if clean != 0:
            self.fill.run(block * WARPS + warp, blocks * WARPS, groups, windows, out, out_stride)
        self.team.run(warp, groups, windows, queries, keys, q, base, out, out_stride)
