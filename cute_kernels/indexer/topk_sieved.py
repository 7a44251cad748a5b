"""Kernel that picks the best of a row from the lists that a score kernel has made of its segments (sieve_plan).

A block takes a row. Its warps copy 32 entries at a time into lists of their own, in shared memory; what is done with
these says topk_row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, range_constexpr
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from cutlass.memory import SmemAllocator

from cute_kernels.dsl import ptx
from cute_kernels.dsl.reduce import lanes_prefix
from cute_kernels.dsl.tensor import address, stride_bytes
from cute_kernels.indexer.chunks import ENTRY
from cute_kernels.indexer.sieve_plan import Lists
from cute_kernels.indexer.topk_bins import NAN_ORDER
from cute_kernels.indexer.topk_plan import LIST, Here, Plan
from cute_kernels.indexer.topk_row import RowPicks
from cute_kernels.runtime.compile import KernelKey

WARPS, VECTORS = 16, 8
TILES = (2, 16)
"""Of 16384 columns that a row has at most. For each column there is a bit that says whether it is picked."""

AT_ONCE = 8
"""Entries that a lane asks for before it looks at one."""

LANES = 32


class SievedPlan(Plan):
    """Sizes: those of the picks' other kernel, with lists as long as they can be."""

    @property
    def length(self) -> int:
        return 8192 // self.warps


@dataclass(frozen=True)
class SievedKey(KernelKey):
    """What distinguishes one compiled kernel from another.

    tiles   of 16384 columns that a row has at most
    """

    tiles: int = 2

    @property
    def plan(self) -> SievedPlan:
        """What the kernel is cut by."""
        return SievedPlan(WARPS, VECTORS, 1, self.tiles)

    @property
    def smem_bytes(self) -> int:
        return self.plan.smem_bytes

    @property
    def capacity(self) -> int:
        """Most columns of a row."""
        return self.plan.places

    @property
    def instructions(self) -> tuple[str, ...]:
        return "atomic", "griddepcontrol"

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        out = make_fake_tensor(Int32, (cute.sym_int(), cute.sym_int()), stride=(cute.sym_int64(), cute.sym_int64()))
        numbers = Int64(0), Int64(0), Int64(4), *(Int32(1) for _ in range(4))
        return SievedKernel(self), (out, *numbers, make_fake_stream(use_tvm_ffi_env_stream=True))


class Segments(NamedTuple):
    """Of a row: numbers of its lists, from `begin` to `end` - 1, and its columns, from `first` = 0 to `stop` - 1."""

    lists: Any
    begin: Any
    end: Any
    stop: Any
    first: Any


class SievedKernel:
    """Entry point: (result; address of the lists; address of the ends, their stride in bytes; what no end exceeds,
    rows, blocks of the score kernel, k; stream)."""

    def __init__(self, key: SievedKey) -> None:
        self.plan = key.plan
        self.row = SievedPicks(self.plan)
        self.name = f"top_k_of_sieved_t{key.tiles}"

    @cute.jit
    def __call__(
        self,
        out: cute.Tensor,
        memory: Int64,
        ends: Int64,
        ends_stride: Int64,
        limit: Int32,
        rows: Int32,
        blocks: Int32,
        k: Int32,
        stream: cuda.CUstream,
    ) -> None:
        self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        lists = Lists.at(memory, rows, blocks)
        kernel = self.kernel(lists, ends, ends_stride, limit, address(out), stride_bytes(out, 0), k)
        kernel.launch(grid=[rows, 1, 1], block=[self.plan.threads, 1, 1], stream=stream, use_pdl=True)

    @cute.kernel
    def kernel(
        self, lists: Lists, ends: Int64, ends_stride: Int64, limit: Int32, out: Int64, out_stride: Int64, k: Int32
    ) -> None:
        thread, _, _ = cute.arch.thread_idx()
        row, _, _ = cute.arch.block_idx()
        memory = SmemAllocator().allocate_tensor(Int32, cute.make_layout(self.plan.smem_bytes // 4), byte_alignment=16)
        at = memory.iterator.toint()
        here = Here(at, at, thread, cute.arch.make_warp_uniform(thread // LANES), thread % LANES, Int32(0))
        place = ends + Int64(row) * ends_stride
        ptx.prefetch_l2(place, thread == 0)
        self.row.clear(here)
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()

        # of a row that is not scored the blocks are anything
        end = ptx.load_global_s32_in_order(place, is_shared=True)
        first = ptx.load_global_s32_in_order(lists.firsts + Int64(row) * 4, is_shared=True)
        last = ptx.load_global_s32_in_order(lists.lasts + Int64(row) * 4, is_shared=True)
        size = cutlass.max(cutlass.min(end, limit), Int32(0))
        target = out + Int64(row) * out_stride
        if size <= k:
            for i in cutlass.range(thread, k, self.plan.threads, unroll=1):
                ptx.store_global_s32(target + Int64(i) * 4, i if i < size else Int32(-1))
        else:
            self.row.select(here, Segments(lists, first + row, last + row + 1, size, Int32(0)), k, target)


class SievedPicks(RowPicks):
    """Of a row, from its lists. Warps take turns in them, 32 entries each, a chunk."""

    lists_nan = True

    @property
    def at_once(self) -> int:
        return AT_ONCE

    @cute.jit
    def select(self, here: Here, part: Segments, k: Int32, out: Int64) -> None:
        """Write the k best of a row that has more columns."""
        # the worst number's order plus one, for which NaN has 0
        best, worst, listed = Uint32(NAN_ORDER), Uint32(0), Int32(0)
        bound, below = Uint32(NAN_ORDER), (1 << here.lane) - 1
        for begin in cutlass.range(part.begin, part.end, LANES, unroll=1):
            count, until, reached = self.chunks(here, part, begin)
            bound = Uint32(cutlass.min(bound, reached))
            total = cute.arch.shuffle_sync(until, LANES - 1)
            for chunk in cutlass.range(here.warp, total, self.plan.warps * AT_ONCE, unroll=1):
                found = self.ask(here, part, begin, count, until, chunk, total)
                orders = [ptx.descending_order(entry[1]) for entry in found]
                chosen = [found[i][0] & (orders[i] <= bound) for i in range(AT_ONCE)]
                ballots = [cute.arch.vote_ballot_sync(is_chosen) for is_chosen in chosen]
                for i in range_constexpr(AT_ONCE):
                    best = Uint32(cutlass.min(best, orders[i]))
                    worst = Uint32(cutlass.max(worst, orders[i] + Uint32(1) if chosen[i] else Uint32(0)))
                    number = listed + cute.arch.popc(ballots[i] & below)
                    target = here.at + LIST + (here.warp * self.length + number) * ENTRY
                    fits = chosen[i] & (number < self.length)
                    ptx.store_shared_64(target, found[i][1].bitcast(Int32), found[i][2], predicate=fits)
                    listed += cute.arch.popc(ballots[i])
        cute.arch.sync_warp()
        redux = cute.arch.warp_redux_sync
        best, worst = self.bins.extremes(here, Uint32(redux(best, "min")), Uint32(redux(worst, "max")))
        self.finish(here, part, k, listed, best, Uint32(worst - Uint32(1)), out)

    @cute.jit
    def chunks(self, here: Here, part: Segments, begin: Int32) -> tuple[Any, Any, Any]:
        """Entries of list number begin + lane, and chunks of the lists from number `begin` up to and with that one; an
        order that at least k scores of one of these lists reach."""
        number = begin + here.lane
        count, order = ptx.load_global_64_in_order(part.lists.count_of(cutlass.min(number, part.end - 1)))
        count = count if number < part.end else Int32(0)
        reached = Uint32(cute.arch.warp_redux_sync(Uint32(order), "min"))
        return count, lanes_prefix((count + (LANES - 1)) // LANES), reached

    @cute.jit
    def ask(
        self, here: Here, part: Segments, begin: Int32, count: Int32, until: Int32, chunk: Int32, total: Int32
    ) -> tuple[Any, ...]:
        """(whether there is such an entry, its score, its column) of the warp's next chunks, from number `chunk` on.
        Where there is none, it is another one of the row."""
        shuffle, places = cute.arch.shuffle_sync, []
        for i in range_constexpr(AT_ONCE):
            number = cutlass.min(chunk + i * self.plan.warps, total - 1)
            lane = cute.arch.popc(cute.arch.vote_ballot_sync(until <= number))
            entries, chunks = shuffle(count, lane), shuffle(until - (count + (LANES - 1)) // LANES, lane)
            entry = (number - chunks) * LANES + here.lane
            is_there = (entry < entries) & (chunk + i * self.plan.warps < total)
            entry = cutlass.min(entry, entries - 1)
            places.append((is_there, part.lists.list_of(begin + lane) + Int64(entry) * ENTRY))
        found = []
        for i in range_constexpr(AT_ONCE):
            score, column = ptx.load_global_64_in_order(places[i][1])
            found.append((places[i][0], score.bitcast(Float32), column))
        return tuple(found)

    @cute.jit
    def each_again(self, here: Here, part: Segments, work: cutlass.Constexpr) -> None:
        for begin in cutlass.range(part.begin, part.end, LANES, unroll=1):
            count, until, _reached = self.chunks(here, part, begin)
            total = cute.arch.shuffle_sync(until, LANES - 1)
            for chunk in cutlass.range(here.warp, total, self.plan.warps * AT_ONCE, unroll=1):
                for entry in self.ask(here, part, begin, count, until, chunk, total):
                    work(*entry)


def keys_of(arch: str) -> list[SievedKey]:
    """All kernels of an architecture, by capacity."""
    return [SievedKey(arch, tiles) for tiles in TILES]


def key_for(arch: str, columns: int) -> SievedKey | None:
    """The kernel for rows of so many columns, if there is one."""
    return next((key for key in keys_of(arch) if columns <= key.capacity), None)
