# SPDX-License-Identifier: Apache-2.0
"""Kernel of merge_top_k_keys: one CTA takes one row's keys, of all ranks, and writes the picks of the best of them.

    element     a key as two numbers, the smaller the better: its order, the complement of the high word, and its entry
    round       E elements a thread, in registers. The first round has keys alone. If a row has more keys than that, the
                best so far wait in shared memory, and each further round takes them together with the next keys
    winners     the k best elements of a round, in any order

1. What is to be found: the order, and if many share it the entry, between which and the best one the winners lie. A
   histogram of 512 bins between the extremes leaves one bin; while more than RANKED elements are in it, it gets a
   histogram of its own, and if all of them have one order, their entries do.
2. Winners go into a list: a prefix over the warp's counts and one atomic add a warp give them places. The RANKED or
   fewer elements of the last bin are ranked by one warp.
3. Entries of the winners are sorted: a bitonic network over the CTA, of neighbouring places of a thread. Steps within
   a thread's places are its own, those within a warp's shuffles. What has no entry sorts as 2^32 - 1, behind all
   others, and is written as -1.

The order of atomic adds decides nothing but places in the list, which is a set: the same keys give the same bits, in
whatever order, and from whichever rank, they come.

For the local form each entry's rank follows from its page's number, and the pages of the rank's own entries are looked
up in the row's request of the block table; a prefix over the CTA moves slots to the left.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32, const_expr, range_constexpr
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from cutlass.memory import SmemAllocator

from cute_kernels.dsl import ptx
from cute_kernels.dsl.reduce import lanes_prefix, pairwise
from cute_kernels.dsl.tensor import address, stride_bytes
from cute_kernels.indexer import topk
from cute_kernels.indexer.call import MergeKeysCall
from cute_kernels.indexer.topk import CANDIDATES, EQUALS_LENGTH, NAN_ORDER, RANKED, Bins, Here, Scale, finest
from cute_kernels.indexer.topk_slots import Slots
from cute_kernels.models import ModelConfig
from cute_kernels.runtime.arch import arch_number, arch_of
from cute_kernels.runtime.compile import KernelKey
from cute_kernels.runtime.compile import launch as launch_key
from cute_kernels.runtime.key import OpKernel

# ---- config, shared memory

SORTED = (512, 1024, 2048)
"""Places of the sorting network: the first that holds k."""

MOST_PICKS = SORTED[-1]

MOST_KEYS, MOST_ROWS = 2**30, 2**28

# byte offsets: behind the bins and their counters (topk.py) lie the elements of the last bin, extremes of warps, counts
# of slots, winners, and two arrays for exchanges of the network
LISTED = topk.BEFORE
"""Counter of winners."""
LAST_BIN = topk.EQUALS
EXTREMES = LAST_BIN + 8 * RANKED
SLOT_COUNTS = EXTREMES + 16 * 32
WINNERS = SLOT_COUNTS + 4 * 32


class Local(NamedTuple):
    """Which entries are a rank's own, and where they are.

    rank, ranks   of the context group; ranks and rows of a page as divisors
    slots         the request's row of the rank's block table
    """

    rank: Any
    ranks: Any
    page_rows: Any
    slots: Slots

    @cute.jit
    def load(self, entry: Any, is_wanted: Any) -> tuple[Any, Any]:
        """(page, row of the page) of an entry; the page is negative if it is another rank's, or has none."""
        known = entry if is_wanted else Int32(0)
        number, row = divmod(known, self.page_rows)
        column, owner = divmod(number, self.ranks)
        return self.slots.load_page(column * self.page_rows.divisor + row, is_wanted & (owner == self.rank))


# ---- kernel


class MergeKeysKernel:
    """Entry point: (keys; loads of a row, of a part's row; address of out or 0, its stride in bytes; address of the
    slots, their stride, address of lens; address of the block table or 0, its stride, columns, rows of a request; rows
    of a page, ranks, rank; rows, k, stream)."""

    def __init__(self, key: MergeKeysKey) -> None:
        self.places, self.warps, self.each, self.width = key.places, key.warps, key.each, key.width
        self.threads, self.cluster = 32 * key.warps, 1
        self.sorted_each = key.places // self.threads
        self.kept_loads = -(-self.sorted_each // self.width)
        self.smem_bytes = key.smem_bytes
        self.bins = Bins(self)
        self.has_dependency = arch_number(key.arch) >= ptx.DEPENDENT_LAUNCH_ARCH
        self.name = f"merge_top_k_keys_n{key.places}w{key.warps}e{key.each}x{key.width}"

    @cute.jit
    def __call__(
        self,
        keys: cute.Tensor,
        loads: Int32,
        part_loads: Int32,
        out: Int64,
        out_stride: Int64,
        slots: Int64,
        slots_stride: Int64,
        lens: Int64,
        table: Int64,
        table_stride: Int64,
        table_columns: Int32,
        tokens: Int32,
        page_rows: Int32,
        ranks: Int32,
        rank: Int32,
        rows: Int32,
        k: Int32,
        stream: cuda.CUstream,
    ) -> None:
        self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        divisor = cute.fast_divmod_create_divisor_v2
        kernel = self.kernel(
            address(keys),
            stride_bytes(keys, 0),
            stride_bytes(keys, 1),
            loads,
            divisor(part_loads),
            out,
            out_stride,
            slots,
            slots_stride,
            lens,
            table,
            table_stride,
            table_columns,
            divisor(tokens),
            divisor(page_rows),
            Int32(0x7FFFFFFF) // page_rows + 1,
            divisor(ranks),
            rank,
            k,
        )
        kernel.launch(grid=[rows, 1, 1], block=[self.threads, 1, 1], stream=stream, use_pdl=self.has_dependency)

    @cute.kernel
    def kernel(
        self,
        keys: Int64,
        part_stride: Int64,
        row_stride: Int64,
        loads: Int32,
        part_loads: cute.FastDivmodDivisorV2,
        out: Int64,
        out_stride: Int64,
        slots: Int64,
        slots_stride: Int64,
        lens: Int64,
        table: Int64,
        table_stride: Int64,
        table_columns: Int32,
        tokens: cute.FastDivmodDivisorV2,
        page_rows: cute.FastDivmodDivisorV2,
        named_pages: Int32,
        ranks: cute.FastDivmodDivisorV2,
        rank: Int32,
        k: Int32,
    ) -> None:
        thread, _, _ = cute.arch.thread_idx()
        row, _, _ = cute.arch.block_idx()
        memory = SmemAllocator().allocate_tensor(Int32, cute.make_layout(self.smem_bytes // 4), byte_alignment=16)
        at = memory.iterator.toint()
        here = Here(at, at, thread, cute.arch.make_warp_uniform(thread // 32), thread % 32, Int32(0))
        if const_expr(self.has_dependency):
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()

        source = keys + Int64(row) * row_stride
        orders = cute.make_rmem_tensor((self.each,), Int32)
        entries = cute.make_rmem_tensor((self.each,), Int32)
        taken, kept = Int32(0), Int32(0)
        while taken < loads:
            # of further rounds the first loads are those of the list
            base = taken - (Int32(0) if taken == 0 else Int32(self.kept_loads * self.threads))
            self.load(here, source, part_stride, base, loads, part_loads, taken == 0, orders, entries)
            if taken > 0:
                self.load_kept(here, kept, orders, entries)
            kept = self.select(here, k, orders, entries)
            taken = base + (self.each // self.width) * self.threads

        picks = self.sort(here, kept)
        for j in range_constexpr(self.sorted_each):
            place = thread * self.sorted_each + j
            ptx.store_global_s32(out + Int64(row) * out_stride + Int64(place) * 4, picks[j], (out != 0) & (place < k))
        if table != 0:
            request, _ = divmod(row, tokens)
            pages = Slots(table, table_stride, request, table_columns, page_rows, named_pages)
            local = Local(rank, ranks, page_rows, pages)
            count = self.write_slots(here, picks, local, k, slots + Int64(row) * slots_stride)
            ptx.store_global_s32(lens + Int64(row) * 4, count, thread == 0)

    # -- elements

    @cute.jit
    def load(
        self,
        here: Here,
        source: Int64,
        part_stride: Int64,
        base: Int32,
        loads: Int32,
        part_loads: cute.FastDivmodDivisorV2,
        is_first: Boolean,
        orders: Any,
        entries: Any,
    ) -> None:
        """The keys of a round: load number `base + i * threads + thread` of the row is a thread's i-th one."""
        found: list[Any] = []
        for i in range_constexpr(self.each // self.width):
            number = base + (here.thread + i * self.threads)
            is_there = number < loads
            if const_expr(i < self.kept_loads):
                is_there = is_there & is_first
            part, place = divmod(number if is_there else Int32(0), part_loads)
            address = source + Int64(part) * part_stride + Int64(place) * (8 * self.width)
            if const_expr(self.width == 2):
                found.append((is_there, ptx.load_global_128_where(is_there, address)))
            else:
                key = ptx.load_global_s64_where(is_there, address)
                found.append((is_there, ptx.halves(key)))
        for i in range_constexpr(len(found)):
            is_there, words = found[i]
            for j in range_constexpr(self.width):
                entry = ~words[2 * j]
                # a key that is empty, or whose entry int32 cannot name, is no element
                entries[i * self.width + j] = entry if is_there & (entry >= 0) else Int32(-1)
                orders[i * self.width + j] = words[2 * j + 1] ^ 0x7FFFFFFF

    @cute.jit
    def load_kept(self, here: Here, kept: Int32, orders: Any, entries: Any) -> None:
        """The winners so far, as elements that `load` has left out."""
        for i in range_constexpr(self.sorted_each):
            number = here.thread + i * self.threads
            order, entry = ptx.load_shared_64(here.at + WINNERS + number * 8)
            orders[i] = order
            entries[i] = entry if number < kept else Int32(-1)

    # -- selection

    @cute.jit
    def select(self, here: Here, k: Int32, orders: Any, entries: Any) -> Int32:
        """List the k best elements, or all if there are no more; how many are listed. A barrier comes before the list
        changes, and behind it."""
        self.bins.clear(here, CANDIDATES, topk.ZEROS)
        first, last, size = self.extremes(here, orders, entries, Int32(0), Uint32(0))
        # elements with orders (or, of the order `tied`, entries) before `low` win; those of the 2^shift ones from there
        # on are in the last bin, `count` of them, of which the `wanted` best win
        of_entries, tied, low, shift = Int32(0), Uint32(0), Uint32(0), Int32(0)
        wanted, count = k, size
        is_searched = size > k
        while is_searched:
            scale = finest(first, last)
            for i in range_constexpr(self.each):
                order, entry = Uint32(orders[i]), Uint32(entries[i])
                is_wanted = entries[i] >= 0 and (of_entries == 0 or order == tied)
                self.bins.push(here, scale, entry if of_entries != 0 else order, is_wanted, False)
            number, before, count = self.bins.find(here, wanted)
            wanted -= before
            low, shift = scale.start(number), scale.shift
            is_searched = count > RANKED
            if is_searched:
                if shift > 0:
                    first, last = low, low + ((Uint32(1) << Uint32(shift)) - Uint32(1))
                elif of_entries == 0:
                    of_entries, tied = Int32(1), low
                    first, last, _size = self.extremes(here, orders, entries, Int32(1), tied)
                else:
                    is_searched = Boolean(False)
            if is_searched:
                self.bins.clear_again(here)

        # who wins, and who is in the last bin
        is_short = size <= k
        wins, ties = Int32(0), Int32(0)
        for i in range_constexpr(self.each):
            order, entry = Uint32(orders[i]), Uint32(entries[i])
            is_there = entries[i] >= 0
            is_eligible = of_entries == 0 or order == tied
            word = entry if of_entries != 0 else order
            is_better = (of_entries != 0 and order < tied) or (is_eligible and word < low)
            is_tied = is_eligible and Scale(low, shift).bin(word) == Uint32(0)
            wins = wins | (Int32(is_there and (is_short or is_better)) << i)
            ties = ties | (Int32(is_there and not is_short and is_tied) << i)
        own = Int32(cute.arch.popc(wins))
        prefix = lanes_prefix(own)
        start = Int32(0)
        if here.lane == 31:
            start = ptx.fetch_add_shared(here.at + LISTED, prefix, False)
        place = cute.arch.shuffle_sync(start, 31) + prefix - own
        for i in range_constexpr(self.each):
            if (wins >> i) & 1 != 0:
                ptx.store_shared_64(here.at + WINNERS + place * 8, orders[i], entries[i])
                place += 1
        if ties != 0:
            number = ptx.fetch_add_shared(here.at + EQUALS_LENGTH, Int32(cute.arch.popc(ties)), False)
            for i in range_constexpr(self.each):
                if (ties >> i) & 1 != 0:
                    if count <= RANKED:
                        ptx.store_shared_64(here.at + LAST_BIN + number * 8, orders[i], entries[i])
                    elif number < wanted:
                        # more equal elements than can be ranked: keys that came twice
                        ptx.store_shared_64(here.at + WINNERS + (k - wanted + number) * 8, orders[i], entries[i])
                    number += 1
        cute.arch.sync_threads()
        if here.warp == 0 and not is_short and count <= RANKED:
            self.rank(here, count, wanted, here.at + WINNERS + (k - wanted) * 8)
        cute.arch.sync_threads()
        return size if is_short else k

    @cute.jit
    def rank(self, here: Here, count: Int32, wanted: Int32, target: Int32) -> None:
        """By one warp: the `wanted` best of the `count` elements of the last bin go to the list's end."""
        order, entry = ptx.load_shared_64(here.at + LAST_BIN + here.lane * 8)
        better = Int32(0)
        for i in cutlass.range(Int32(0), count, 1, unroll=4):
            other, other_entry = cute.arch.shuffle_sync(order, i), cute.arch.shuffle_sync(entry, i)
            is_same = other == order
            is_earlier = (other_entry < entry) | ((other_entry == entry) & (i < here.lane))
            better += Int32((Uint32(other) < Uint32(order)) | (is_same & is_earlier))
        if here.lane < count and better < wanted:
            ptx.store_shared_64(target + better * 8, order, entry)

    @cute.jit
    def extremes(self, here: Here, orders: Any, entries: Any, of_entries: Int32, tied: Uint32) -> tuple[Any, Any, Any]:
        """(best, worst) order of all elements, or entry of those with the order `tied`; how many they are. All threads
        have read the last extremes by then."""
        redux = cute.arch.warp_redux_sync
        low, high, size = [], [], Int32(0)
        for i in range_constexpr(self.each):
            order = Uint32(orders[i])
            is_there = entries[i] >= 0 and (of_entries == 0 or order == tied)
            word = Uint32(entries[i]) if of_entries != 0 else order
            low.append(word if is_there else Uint32(NAN_ORDER))
            high.append(word if is_there else Uint32(0))
            size += Int32(is_there)
        # of constants the minimum would be a signed one
        first, last = pairwise(low, cutlass.min), pairwise(high, cutlass.max)
        first, last, size = Uint32(redux(first, "min")), Uint32(redux(last, "max")), Int32(redux(size, "add"))
        if here.lane == 0:
            words = [Int32(first), Int32(last), size, Int32(0)]
            ptx.store_shared_128(here.at + EXTREMES + here.warp * 16, words)
        cute.arch.sync_threads()
        one, other, size, _ = ptx.load_shared_128(here.at + EXTREMES + here.lane % self.warps * 16)
        size = size if here.lane < self.warps else Int32(0)
        return Uint32(redux(Uint32(one), "min")), Uint32(redux(Uint32(other), "max")), Int32(redux(size, "add"))

    # -- entries in ascending order

    @cute.jit
    def sort(self, here: Here, kept: Int32) -> Any:
        """The winners' entries in ascending order: of neighbouring places, so that exchanges between the nearest ones
        are a thread's own and fewer go through shared memory."""
        values, each = [], self.sorted_each
        first = here.thread * each
        for j in range_constexpr(each):
            _order, entry = ptx.load_shared_64(here.at + WINNERS + (first + j) * 8)
            values.append(Uint32(entry) if first + j < kept else Uint32(NAN_ORDER))
        steps = network(self.places)
        exchanges = 0
        for number in range_constexpr(len(steps)):
            size, distance = steps[number]
            others = []
            if const_expr(distance < each):
                others = [values[j ^ distance] for j in range(each)]
            elif const_expr(distance < 32 * each):
                shuffle = cute.arch.shuffle_sync_bfly
                others = [Uint32(shuffle(Int32(value), distance // each)) for value in values]
            else:
                # the array of the exchange before last, which all threads have read by the last one's barrier
                array = here.at + WINNERS + 8 * self.places + exchanges % 2 * 4 * self.places
                for j in range_constexpr(each):
                    ptx.store_shared_s32(array + (here.thread + j * self.threads) * 4, Int32(values[j]))
                cute.arch.sync_threads()
                partner = here.thread ^ (distance // each)
                for j in range_constexpr(each):
                    others.append(Uint32(ptx.load_shared_s32(array + (partner + j * self.threads) * 4)))
                exchanges += 1
            sorted_ = []
            for j in range_constexpr(each):
                is_smaller = (((first + j) & size) == 0) == (((first + j) & distance) == 0)
                low, high = cutlass.min(values[j], others[j]), cutlass.max(values[j], others[j])
                sorted_.append(low if is_smaller else high)
            values = sorted_
        return [Int32(value) for value in values]

    # -- slots of the rank's own entries

    @cute.jit
    def write_slots(self, here: Here, picks: Any, local: Local, k: Int32, out: Int64) -> Int32:
        """Write the slots of the rank's own picks, then -1; how many they are."""
        found = [local.load(picks[j], picks[j] >= 0) for j in range(self.sorted_each)]
        slots = [local.slots.slot(one) for one in found]
        number, count = Int32(0), Int32(0)
        for j in range_constexpr(self.sorted_each):
            kept = cute.arch.vote_ballot_sync(slots[j] >= 0)
            number += Int32(cute.arch.popc(kept & ((Int32(1) << here.lane) - 1)))
            count += Int32(cute.arch.popc(kept))
        if here.lane == 0:
            ptx.store_shared_s32(here.at + SLOT_COUNTS + here.warp * 4, count)
        cute.arch.sync_threads()
        count = ptx.load_shared_s32(here.at + SLOT_COUNTS + here.lane % self.warps * 4)
        count = count if here.lane < self.warps else Int32(0)
        redux = cute.arch.warp_redux_sync
        total = Int32(redux(count, "add"))
        number += Int32(redux(count if here.lane < here.warp else Int32(0), "add"))
        for j in range_constexpr(self.sorted_each):
            ptx.store_global_s32(out + Int64(number) * 4, slots[j], slots[j] >= 0)
            number += Int32(slots[j] >= 0)
            place = here.thread * self.sorted_each + j
            ptx.store_global_s32(out + Int64(place) * 4, Int32(-1), (place >= total) & (place < k))
        return total


def network(places: int) -> list[tuple[int, int]]:
    """Steps of a bitonic sort: (size of the runs that become sorted, distance of the places that are compared)."""
    sizes = [2**i for i in range(1, places.bit_length())]
    return [(size, 2**i) for size in sizes for i in reversed(range(size.bit_length() - 1))]


# ---- key


@dataclass(frozen=True)
class MergeKeysKey(KernelKey):
    """What distinguishes one compiled kernel from another.

    places   of the sorting network, at least k, and at least as many as there are threads
    warps    of the CTA
    each     elements of a thread
    width    keys of a load: 2, or 1 where rows of keys are not 16-byte aligned
    """

    kernel_name: ClassVar[str] = "indexer.merge_keys"
    tuning: ClassVar[tuple[str, ...]] = ("warps", "each")
    places: int = 512
    warps: int = 16
    each: int = 8
    width: int = 2

    @property
    def tile(self) -> int:
        """Elements of a round."""
        return 32 * self.warps * self.each

    @property
    def smem_bytes(self) -> int:
        return WINNERS + 16 * self.places

    @property
    def instructions(self) -> tuple[str, ...]:
        return ("ld.global.128", "atomic") if self.width == 2 else ("atomic",)

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        shape, strides = (tuple(make() for _ in range(3)) for make in (cute.sym_int, cute.sym_int64))
        source = make_fake_tensor(Int64, shape, stride=strides), Int32(1), Int32(1)
        results = Int64(0), Int64(4), Int64(0), Int64(4), Int64(0)
        local = Int64(0), Int64(4), Int32(1), Int32(1), Int32(1), Int32(1), Int32(0)
        numbers = *source, *results, *local, Int32(1), Int32(1)
        return MergeKeysKernel(self), (*numbers, make_fake_stream(use_tvm_ffi_env_stream=True))


SHAPES = {512: ((16, 4), (16, 8), (16, 16)), 1024: ((32, 4), (32, 8)), 2048: ((32, 8),)}
"""Places -> (warps, elements of a thread), the fewest elements first."""


def keys_of(arch: str, places: int, width: int = 2) -> list[MergeKeysKey]:
    """Those for so many places, by the elements of a round."""
    return [MergeKeysKey(arch, places, *shape, width) for shape in SHAPES[places]]


def key_for(arch: str, keys: int, k: int, width: int) -> MergeKeysKey:
    """The kernel for rows of so many keys: it takes them in one round, or in as few as possible."""
    places = next(places for places in SORTED if k <= places)
    keys_ = keys_of(arch, places, width)
    return next((key for key in keys_ if keys <= key.tile), keys_[-1])


@lru_cache(256)
def choose(device_index: int, keys: int, k: int, width: int) -> MergeKeysKey:
    """The kernel for a call on a device."""
    return key_for(arch_of(device_index), keys, k, width)


def deployment_keys(config: ModelConfig, tp: int, arch: str) -> list[MergeKeysKey]:
    """Layers with an indexer, with any number of ranks; lists of an even number of keys."""
    k = int(config.index_topk)
    if 4 not in config.compress_ratios or not 0 < k <= MOST_PICKS:
        return []
    return keys_of(arch, next(places for places in SORTED if k <= places), 1 if k % 2 else 2)


# ---- launch


def width_of(call: MergeKeysCall) -> int:
    """Keys of a load."""
    keys = call.keys
    is_even = keys.shape[2] % 2 == 0 and keys.data_ptr() % 16 == 0
    return 2 if is_even and all(keys.shape[i] == 1 or keys.stride(i) % 2 == 0 for i in (0, 1)) else 1


def why_not(call: MergeKeysCall) -> str:
    """Why no kernel can take a (checked) call; empty if one can."""
    parts, rows, k = call.keys.shape
    if k > MOST_PICKS:
        return f"k must be at most {MOST_PICKS}, got {k}"
    if rows >= MOST_ROWS:
        return f"there must be fewer than {MOST_ROWS} rows, got {rows}"
    if parts * k > MOST_KEYS:
        return f"a row must have at most {MOST_KEYS} keys, got {parts} parts of {k}"
    return ""


def launch(call: MergeKeysCall) -> None:
    """Run the kernel on the current stream of the keys' device."""
    parts, rows, k = call.keys.shape
    if rows == 0 or (call.out is None and call.block_table is None):
        return
    launch_with(choose(call.keys.device.index, parts * k, k, width_of(call)), call)


def launch_with(key: MergeKeysKey, call: MergeKeysCall) -> None:
    """`launch` with a kernel of the caller's choice, whose network has room for k: for benchmarks."""
    parts, rows, k = call.keys.shape
    out = (0, 0) if call.out is None else (call.out.data_ptr(), call.out.stride(0) * 4)
    local: tuple[int, ...] = (0, 0, 0, 0, 0, 0, 1, 1, 1, 0)
    if call.block_table is not None:
        slots, lens, table = call.out_slots, call.out_lens, call.block_table
        assert slots is not None
        assert lens is not None
        # the address of a table without columns may be 0, which means none; nobody reads from it
        pages = table.data_ptr() or 4, table.stride(0) * 4, table.shape[1], rows // table.shape[0]
        numbers = call.rows_per_page, call.ranks, call.rank
        local = slots.data_ptr(), slots.stride(0) * 4, lens.data_ptr(), *pages, *numbers
    launch_key(
        key,
        call.keys.device.index,
        call.keys,
        parts * k // key.width,
        k // key.width,
        *out,
        *local,
        rows,
        k,
    )


KERNEL = OpKernel(launch, why_not, deployment_keys)
