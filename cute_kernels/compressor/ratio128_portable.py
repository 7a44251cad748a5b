# SPDX-License-Identifier: Apache-2.0
"""Kernel of the compressor with ratio 128 for GPUs without clusters, or with less shared memory than ratio128.py takes:
a CTA of 128 threads has a token.

Each thread has four of the 512 columns. All save the token's row; if it closes an entry, thread i finds out where row i
of the window is, and all walk over the rows, eight at a time, with a softmax that is brought up to date as it goes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr, range_constexpr
from cutlass.memory import SmemAllocator

from cute_kernels.compressor import epilogue
from cute_kernels.compressor.ratio128 import (
    HALF_ROW,
    RATIO,
    ROW_BYTES,
    Bars,
    C128Kernel,
    C128Key,
    Producer,
    Request,
    State,
    Step,
    Token,
    Tokens,
)
from cute_kernels.dsl import ptx, reduce
from cute_kernels.dsl.convert import FP32_MAX
from cute_kernels.runtime.arch import arch_number

# ---- config

THREADS = RATIO
WARPS = THREADS // 32
ROWS = 8
"""Of a window that are loaded at a time."""

MET = 1
"""Named barrier of all threads."""

SMEM_BYTES = RATIO * 8 + RATIO * 4 + 16


# ---- kernel


class PortableC128Kernel(C128Kernel):
    """Entry point as C128Kernel's."""

    threads = THREADS

    def __init__(self, name: str, fused: bool, store: epilogue.EntryStore, arch: str, cyclic: bool, raw: bool) -> None:
        self.name, self.fused, self.store = name, fused, store
        self.cluster, self.cyclic = 1, cyclic
        self.has_dependency = arch_number(arch) >= ptx.DEPENDENT_LAUNCH_ARCH
        self.producer = Producer(fused, Bars(MET, MET, MET, MET, 0, fused), cyclic, raw)

    def ctas(self, count: Any, per_cluster: Any) -> Any:
        return count

    @cute.kernel
    def kernel(self, tokens: Tokens, state: State, step: Step, cache: epilogue.Cache) -> None:
        token, _, _ = cute.arch.block_idx()
        memory = SmemAllocator()
        sources = memory.allocate_tensor(Int64, cute.make_layout(RATIO), byte_alignment=16)
        bias = memory.allocate_tensor(Int32, cute.make_layout(RATIO), byte_alignment=16)
        squares = memory.allocate_tensor(Float32, cute.make_layout(WARPS), byte_alignment=16)
        if const_expr(self.has_dependency):
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
        own = self.producer.load_token(tokens, Int64(token))
        request = Request(Int32(0), Int32(0))
        if const_expr(self.fused):
            is_known = own.request >= 0 and own.request < state.requests
            request = self.producer.load_request(step, own.request if is_known else Int32(0), is_known)
            self.save(state, step, token, own, request, is_known)
        if self.producer.closes(state, cache.capacity, own):
            source, row = self.find_row(state, step, token, own, request)
            thread, _, _ = cute.arch.thread_idx()
            sources[thread] = source
            bias[thread] = row
            if ptx.any_of_group(MET, THREADS, source == 0) == 0:
                self.close(step, cache, own, sources, bias, squares)

    @cute.jit
    def save(self, state: State, step: Step, token: Int32, own: Token, request: Request, is_known: Boolean) -> None:
        """Save the token's row, if a later step can read it."""
        thread, _, _ = cute.arch.thread_idx()
        column = Int64(thread * 16)
        is_kept = is_known and own.position >= self.producer.oldest(step, request, own.position, token)
        is_kept = is_kept or step.window == 0
        is_saved = self.producer.is_row(own.slot, state.capacity) and is_kept
        target = self.producer.state_row(state, own.slot, is_saved) + column
        source = step.kv_score + Int64(token) * step.kv_stride + column
        value = ptx.load_global_128_where(is_saved, source)
        score = ptx.load_global_128_where(is_saved, source + HALF_ROW)
        if const_expr(not self.producer.raw):
            phase = Int32(own.position) & (RATIO - 1)
            row = ptx.load_global_128_where(is_saved, step.ape + Int64(phase) * step.ape_stride + column)
            biased = self.biased([word.bitcast(Float32) for word in score], row, Int32(0))
            score = tuple(x.bitcast(Int32) for x in biased)
        ptx.store_global_128(target, value, is_saved)
        ptx.store_global_128(target + HALF_ROW, score, is_saved)

    @cute.jit
    def find_row(self, state: State, step: Step, token: Int32, own: Token, request: Request) -> tuple[Int64, Int32]:
        """Where the thread's row of the window is, 0 if nowhere; and which row of the bias it still needs, or -1."""
        thread, _, _ = cute.arch.thread_idx()
        behind = (RATIO - 1) - thread
        at = own.position - Int64(behind)
        is_listed = at < Int64(state.known)
        column, offset = divmod(Int32(at if is_listed else Int64(0)), state.divisor)
        if const_expr(self.cyclic):
            _, column = divmod(column, state.cycle)
        table = state.table + Int64(own.request) * state.table_stride
        page = ptx.load_global_s32_where(is_listed, table + Int64(column) * 4)
        is_cached = is_listed and page >= 0 and page < state.pages
        source = state.pool + Int64(page) * state.page_stride + Int64(offset) * ROW_BYTES
        source, row = source if is_cached else Int64(0), Int32(-1)
        if const_expr(self.fused):
            number = token - behind
            is_new = number >= cutlass.max(request.start, 0)
            source = step.kv_score + Int64(number) * step.kv_stride if is_new else source
            row = Int32(thread) if is_new or self.producer.raw else Int32(-1)
        return source, row

    @cute.jit
    def close(self, step: Step, cache: epilogue.Cache, own: Token, sources: Any, bias: Any, squares: Any) -> None:
        """Compute and store an entry, whose rows are all there."""
        thread, _, _ = cute.arch.thread_idx()
        column = Int64(thread * 16)
        loaded = self.store.load(cache, thread * 4, own.position - (RATIO - 1))
        # of each column the largest score, the sum of weights relative to it, and that of weighted values
        most, weight, total = (cute.make_rmem_tensor((4,), Float32) for _ in range(3))
        for c in range_constexpr(4):
            # not -inf, even if all scores are: their difference would be NaN
            most[c], weight[c], total[c] = Float32(-FP32_MAX), Float32(0), Float32(0)
        for first in cutlass.range(0, RATIO, ROWS, unroll=1):
            starts = [sources[first + i] + column for i in range(ROWS)]
            values = [ptx.load_global_128(start) for start in starts]
            words = [ptx.load_global_128(start + HALF_ROW) for start in starts]
            scores = [[word.bitcast(Float32) for word in row] for row in words]
            if const_expr(self.fused):
                for i in range_constexpr(ROWS):
                    row = bias[first + i]
                    added = ptx.load_global_128_where(row >= 0, step.ape + Int64(row) * step.ape_stride + column)
                    scores[i] = self.biased(scores[i], added, row)
            for c in range_constexpr(4):
                largest = most[c]
                for i in range_constexpr(ROWS):
                    largest = ptx.max_f32(largest, scores[i][c])
                old = ptx.exp2((most[c] - largest) * ptx.LOG2_E)
                sums = ptx.mul_rn(weight[c], old), ptx.mul_rn(total[c], old)
                for i in range_constexpr(ROWS):
                    e = ptx.exp2((scores[i][c] - largest) * ptx.LOG2_E)
                    sums = ptx.add_rn(sums[0], e), ptx.fma_rn(e, values[i][c].bitcast(Float32), sums[1])
                most[c], weight[c], total[c] = largest, sums[0], sums[1]
        x = [ptx.div_rn(total[c], weight[c]) for c in range(4)]
        squares[thread // 32] = reduce.lanes_sum(reduce.square_sum(x))
        cute.arch.sync_threads()
        whole = Float32(0)
        for warp in range_constexpr(WARPS):
            whole = ptx.add_rn(whole, squares[warp])
        self.store.finish(cache, loaded, thread * 4, x, self.store.factor(cache, whole), own.entry_slot)


# ---- key


@dataclass(frozen=True)
class PortableC128Key(C128Key):
    """As C128Key, of a kernel without clusters."""

    kernel_name: ClassVar[str] = "compressor.ratio128_portable"
    cluster: int = 1

    @property
    def smem_bytes(self) -> int:
        return SMEM_BYTES

    @property
    def instructions(self) -> tuple[str, ...]:
        return "ld.global.128", "ex2"

    def make_kernel(self, name: str, store: epilogue.EntryStore) -> Callable[..., None]:
        return PortableC128Kernel(name, self.fused, store, self.arch, self.cyclic, self.raw)
