"""Kernel of the picks of a row whose scores came with the maxima of each 8 neighbouring ones: a block picks a row's.

As topk_row says, but the bound comes from these maxima, an eighth of the row, and only groups whose maximum reaches it
are read. Thread t has the maxima of 32 neighbouring columns at a time, and the next warp those of the next 32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32, range_constexpr
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from cutlass.memory import SmemAllocator

from cute_kernels.dsl import ptx
from cute_kernels.dsl.reduce import lanes_prefix
from cute_kernels.dsl.tensor import address, stride_bytes
from cute_kernels.formats import round_up
from cute_kernels.indexer.chunks import GROUP
from cute_kernels.indexer.topk import groups_for, share_for
from cute_kernels.indexer.topk_plan import GROUPS, LIST, Here, Part, Plan
from cute_kernels.indexer.topk_row import RowPicks
from cute_kernels.runtime.arch import arch_of
from cute_kernels.runtime.compile import KernelKey
from cute_kernels.runtime.compile import launch as launch_key

ARCH = "sm_90a"
SHAPES = ((8, 8), (16, 8), (32, 8), (32, 16))
"""(warps, vectors of a thread): of up to 8192, 16384, 32768 and 65536 columns."""

MOST_PICKS = 1024
FEWEST_GROUPS = 2
"""For each pick: with fewer groups in a row most of its columns would be candidates."""

HITS_AT_ONCE = 2
"""Groups whose halves a lane reads before it looks at one."""


@dataclass(frozen=True)
class MaximaKey(KernelKey):
    """What distinguishes one compiled kernel from another.

    warps     of a block, at most 32
    vectors   of four columns that a thread may have to look at: a multiple of 8
    """

    warps: int = 32
    vectors: int = 8

    @property
    def plan(self) -> Plan:
        return Plan(self.warps, self.vectors, 1, 1)

    @property
    def cluster(self) -> int:
        """Blocks that share a row."""
        return 1

    @property
    def capacity(self) -> int:
        """Most columns of a row."""
        return self.plan.places

    @property
    def hits(self) -> int:
        """Byte offset of the warps' lists of groups that reach the bound."""
        return round_up(self.plan.smem_bytes, 16)

    @property
    def smem_bytes(self) -> int:
        return self.hits + self.capacity // GROUP * 8

    @property
    def instructions(self) -> tuple[str, ...]:
        return "ld.global.128", "atomic", "griddepcontrol"

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        out = make_fake_tensor(Int32, (cute.sym_int(), cute.sym_int()), stride=(cute.sym_int64(), cute.sym_int64()))
        numbers = (
            *(Int64(0) for _ in range(3)),
            Int32(1),
            *(Int64(0) for _ in range(3)),
            *(Int32(1) for _ in range(5)),
        )
        return MaximaKernel(self), (out, *numbers, Boolean(False), make_fake_stream(use_tvm_ffi_env_stream=True))


class GroupPicks(RowPicks):
    """Of a row, by one block that knows the maxima of its groups."""

    def __init__(self, key: MaximaKey) -> None:
        super().__init__(key.plan)
        self.hits, self.warps, self.loads = key.hits, key.warps, key.vectors // 8

    def column(self, here: Here, load: Any) -> Any:
        """First of the 32 columns whose maxima a thread's load number `load` brings."""
        return ((load * 32 + here.lane) * self.warps + here.warp) * (4 * GROUP)

    @cute.jit
    def select_by_maxima(
        self, here: Here, part: Part, maxima: Int64, k: Int32, share: Int32, groups: Int32, out: Int64
    ) -> None:
        """As `select`, with the address of the row's maxima."""
        own = cute.make_rmem_tensor((4 * self.loads,), Float32)
        best = cute.make_rmem_tensor((GROUPS,), Float32)
        for i in range_constexpr(self.loads):
            column = self.column(here, i)
            words = ptx.load_global_128_cached_where(column < part.stop, maxima + Int64(column // GROUP) * 4)
            for j in range_constexpr(4):
                # the last group may be the row's, and the others of the load nobody's
                is_there = column + j * GROUP < part.stop
                own[4 * i + j] = words[j].bitcast(Float32) if is_there else Int32(-1).bitcast(Float32)
        for i in range_constexpr(GROUPS):
            best[i] = Int32(-1).bitcast(Float32)
        for i in range_constexpr(4 * self.loads):
            best[i % GROUPS] = ptx.max_f32(best[i % GROUPS], own[i])
        top, bound = self.bins.extremes(here, *self.bound(best, groups, share))
        found = self.find_groups(here, own, bound)
        cute.arch.sync_warp()
        listed = Int32(0)
        for first in cutlass.range(Int32(0), found, 16 * HITS_AT_ONCE, unroll=1):
            listed = self.collect_groups(here, part, first, found, bound, listed)
        self.settle(here, part, k, listed, top, bound, out)

    @cute.jit
    def find_groups(self, here: Here, own: cute.Tensor, bound: Uint32) -> Int32:
        """List the warp's groups whose maxima reach the bound: how many there are."""
        least, number = ptx.of_descending_order(bound), Int32(0)
        for i in range_constexpr(4 * self.loads):
            number = ptx.count_where_at_least(number, own[i], least)
        sums = lanes_prefix(number)
        target = self.hit(here, sums - number)
        for i in range_constexpr(4 * self.loads):
            column = self.column(here, i // 4) + i % 4 * GROUP
            target = ptx.append_where_at_least(target, own[i], least, column)
        return cute.arch.shuffle_sync(sums, 31)

    def hit(self, here: Here, number: Any) -> Any:
        """Address of what is known of the warp's group number `number` of those it lists: its maximum, its column."""
        return here.at + self.hits + (here.warp * (128 * self.loads) + number) * 8

    @cute.jit
    def collect_groups(self, here: Here, part: Part, first: Int32, found: Int32, bound: Uint32, listed: Int32) -> Int32:
        """As `collect`, of the columns of groups `first` and the next ones of the warp's list; a lane takes half of a
        group."""
        scores = cute.make_rmem_tensor((4 * HITS_AT_ONCE,), Float32)
        columns = []
        for i in range_constexpr(HITS_AT_ONCE):
            number = first + 16 * i + here.lane // 2
            _, column = ptx.load_shared_64(self.hit(here, cutlass.min(number, found - 1)))
            column += here.lane % 2 * (GROUP // 2)
            columns.append(column if number < found else part.stop)
        words = [ptx.load_global_128_cached_where(at < part.stop, part.base + Int64(at) * 4) for at in columns]
        for i in range_constexpr(4 * HITS_AT_ONCE):
            is_there = columns[i // 4] + i % 4 < part.stop
            scores[i] = words[i // 4][i % 4].bitcast(Float32) if is_there else Int32(-1).bitcast(Float32)
        least, number = ptx.of_descending_order(bound), Int32(0)
        for i in range_constexpr(4 * HITS_AT_ONCE):
            number = ptx.count_where_at_least(number, scores[i], least)
        sums = listed + lanes_prefix(number)
        least = cutlass.select_(sums <= self.length, least, Int32(-1).bitcast(Float32))
        target = here.at + LIST + (here.warp * self.length + sums - number) * 8
        for i in range_constexpr(4 * HITS_AT_ONCE):
            target = ptx.append_where_at_least(target, scores[i], least, columns[i // 4] + i % 4)
        return cute.arch.shuffle_sync(sums, 31)

    def load_again(self, here: Here, part: Part, vector: Any) -> list[Any]:
        """Of the columns of the thread's maxima."""
        found = []
        for j in range(4):
            place = self.column(here, vector // 8) + vector % 8 * 4 + j
            is_there = place < part.stop
            word = ptx.load_global_s32_where(is_there, part.base + Int64(place) * 4, is_shared=True)
            found.append((is_there, word.bitcast(Float32), place))
        return found


class MaximaKernel:
    """Entry point: (result; address of the scores, stride of their rows in bytes, bytes from a row's scores to its
    maxima, columns; address of the ends, strides of requests and of their tokens, tokens of a request; rows, k, a
    warp's share of k, groups of a thread whose maxima bound it; whether to start before the kernel ahead has ended;
    stream). Rows, and so their maxima, are 16-byte aligned."""

    def __init__(self, key: MaximaKey) -> None:
        self.key, self.row, self.threads = key, GroupPicks(key), key.plan.threads
        self.name = f"top_k_by_maxima_w{key.warps}v{key.vectors}"

    @cute.jit
    def __call__(
        self,
        out: cute.Tensor,
        scores: Int64,
        scores_stride: Int64,
        maxima: Int64,
        columns: Int32,
        ends: Int64,
        ends_request: Int64,
        ends_token: Int64,
        tokens: Int32,
        rows: Int32,
        k: Int32,
        share: Int32,
        groups: Int32,
        use_pdl: Boolean,
        stream: cuda.CUstream,
    ) -> None:
        self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        kernel = self.kernel(
            scores,
            scores_stride,
            maxima,
            columns,
            ends,
            ends_request,
            ends_token,
            cute.fast_divmod_create_divisor_v2(tokens),
            address(out),
            stride_bytes(out, 0),
            k,
            share,
            groups,
        )
        kernel.launch(grid=[rows, 1, 1], block=[self.threads, 1, 1], stream=stream, use_pdl=use_pdl)

    @cute.kernel
    def kernel(
        self,
        scores: Int64,
        scores_stride: Int64,
        maxima: Int64,
        columns: Int32,
        ends: Int64,
        ends_request: Int64,
        ends_token: Int64,
        tokens: cute.FastDivmodDivisorV2,
        out: Int64,
        out_stride: Int64,
        k: Int32,
        share: Int32,
        groups: Int32,
    ) -> None:
        thread, _, _ = cute.arch.thread_idx()
        row, _, _ = cute.arch.block_idx()
        memory = SmemAllocator().allocate_tensor(Int32, cute.make_layout(self.key.smem_bytes // 4), byte_alignment=16)
        at = memory.iterator.toint()
        here = Here(at, at, thread, cute.arch.make_warp_uniform(thread // 32), thread % 32, Int32(0))
        self.row.clear(here)
        cute.arch.griddepcontrol_wait()
        request, token = divmod(row, tokens)
        end = ptx.load_global_s32_in_order(
            ends + Int64(request) * ends_request + Int64(token) * ends_token, is_shared=True
        )
        size = cutlass.max(cutlass.min(end, columns), Int32(0))
        if size <= k:
            target = out + Int64(row) * out_stride
            for i in cutlass.range(thread, k, self.threads, unroll=1):
                ptx.store_global_s32(target + Int64(i) * 4, i if i < size else Int32(-1))
        else:
            source = scores + Int64(row) * scores_stride
            part = Part(source, Int32(0), size, Int32(1), Int32(0))
            self.row.select_by_maxima(here, part, source + maxima, k, share, groups, out + Int64(row) * out_stride)


def keys_of(arch: str) -> list[MaximaKey]:
    """All kernels of an architecture, by capacity."""
    return [MaximaKey(ARCH, *shape) for shape in SHAPES] if arch == ARCH else []


@lru_cache(maxsize=1024)
def key_for(arch: str, columns: int, k: int) -> MaximaKey | None:
    """The kernel for rows of so many columns, or None if they are better, or only, picked without maxima."""
    if k > MOST_PICKS or columns < FEWEST_GROUPS * GROUP * k:
        return None
    return next((key for key in keys_of(arch) if columns <= key.capacity), None)


def launch(key: MaximaKey, logits: Any, maxima: int, ends: tuple[int, ...], out: Any, k: int) -> None:
    """Launch on the current stream of out's device, before the kernel ahead has ended.

    maxima   bytes from a row's first score to its maxima
    ends     address of the first end, strides of requests and of their tokens in bytes, and tokens of a request
    """
    rows, columns = logits.shape
    scores = logits.data_ptr(), logits.stride(0) * 4, maxima, columns
    shares = share_for(key, k), groups_for(key, k)
    launch_key(key, out.device.index, out, *scores, *ends, rows, k, *shares, True)


def maxima_key(device_index: int, columns: int, k: int) -> MaximaKey | None:
    """`key_for` the device's architecture."""
    return key_for(arch_of(device_index), columns, k)
