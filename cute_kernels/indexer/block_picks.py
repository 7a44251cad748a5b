# SPDX-License-Identifier: Apache-2.0
"""Kernels of select_candidate_blocks for long rows: blocks that reach a bound are marked, and the best of these picked.

    bound    a row's sample, blocks spread evenly over it --bisection--> a score that a few more than k blocks reach
    ---- kernel, launched as a dependent ----
    marks    scores (on their way before the bound is waited for) --maxima of blocks--> a bit for each block that
             reaches the bound, and its maximum
    ---- kernel ----
    picks    bits --sums over the CTA--> list of blocks, ascending, and of their maxima --topk_held.py--> picks

So most maxima are neither written nor read. The bound is a guess: where at most k blocks of a row reach it, or more
than the list holds, the last kernel computes all maxima of the row and picks among them as topk.py does. Either way the
picks are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr, range_constexpr
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from cutlass.memory import SmemAllocator

from cute_kernels.dsl import ptx
from cute_kernels.dsl.convert import FP32_MAX
from cute_kernels.dsl.reduce import lanes_prefix
from cute_kernels.dsl.tensor import address, length, stride_bytes
from cute_kernels.indexer import topk_select
from cute_kernels.indexer.call import SelectBlocksCall
from cute_kernels.indexer.chunks import (
    CANDIDATE_BLOCK,
    LONG_BLOCKS,
    MARKED,
    block_marks_at,
    block_maxima_at,
    block_row_bytes,
)
from cute_kernels.indexer.topk import CHUNK, Here, Part, RowPicks, TopKConfig, TopKKey
from cute_kernels.indexer.topk_held import HeldConfig, HeldRow
from cute_kernels.indexer.topk_slots import Slots
from cute_kernels.runtime.compile import KernelKey
from cute_kernels.runtime.compile import launch as launch_key

LISTED = 8192
"""Blocks of a row that a list holds."""

ARCHS = ("sm_90a",)
"""Where these kernels take calls with long rows."""

BOUND = 0
"""Word of a row's workspace that has its bound."""

# ---- what the kernels share


class Rows(NamedTuple):
    """What the kernels take of a call; strides in bytes.

    lengths        address, strides of requests and of their tokens, tokens of a request as a divisor
    work           address of the first row's workspace, stride; first words of maxima and marks
    selected       blocks, up to which a row is not read
    """

    scores: Int64
    stride: Int64
    columns: Int32
    lengths: Int64
    lengths_request: Int64
    lengths_token: Int64
    tokens: cute.FastDivmodDivisorV2
    work: Int64
    work_stride: Int64
    maxima: Int32
    marks: Int32
    selected: Int32

    def length_of(self, row: Any) -> Any:
        """Address of a row's length."""
        request, token = divmod(row, self.tokens)
        return self.lengths + Int64(request) * self.lengths_request + Int64(token) * self.lengths_token

    @cute.jit
    def load_length(self, row: Any) -> tuple[Any, Any]:
        """Scores that a row has, and blocks."""
        size = ptx.load_global_s32_in_order(self.length_of(row), is_shared=True)
        size = cutlass.min(cutlass.max(size, Int32(0)), self.columns)
        return size, (size + (CANDIDATE_BLOCK - 1)) // CANDIDATE_BLOCK

    def scores_of(self, row: Any) -> Any:
        return self.scores + Int64(row) * self.stride

    def work_of(self, row: Any, word: Any) -> Any:
        return self.work + Int64(row) * self.work_stride + Int64(word) * 4


def largest(words: Any) -> Any:
    """Of four scores."""
    one, two, three, four = (word.bitcast(Float32) for word in words)
    return ptx.max_f32(ptx.max_f32(one, two), ptx.max_f32(three, four))


def with_cut_vector(found: Sequence[Any], source: Any, column: Any, size: Any) -> list[Any]:
    """The largest of vectors of four scores, from a column on and 128 columns apart, which are there but for the one
    that the row's end cuts: with what that one has. What it lacks counts as NaN."""
    whole = []
    for i, best in enumerate(found):
        cut = []
        for j in range(4):
            at = column + (128 * i + j)
            is_cut = (column + (128 * i + 4) > size) & (at < size)
            cut.append(ptx.load_global_s32_where(is_cut, source + (512 * i + 4 * j)))
        whole.append(ptx.max_f32(best, largest(cut)))
    return whole


@cute.jit
def as_compared(best: Any, block: Any, count: Any) -> Any:
    """The maximum of a block, of `count` that a row has, as maxima are compared: the newest block comes first."""
    best = Float32(FP32_MAX) if best == Float32.inf else best
    return Float32.inf if block == count - 1 else best


# ---- bound

BOUND_THREADS = 512

SAMPLE = 4096
"""Blocks of a row. All blocks of a row that has no more are marked."""

PAIRS = SAMPLE // 2
"""Of neighbouring blocks, 64 bytes: memory brings no less."""

SURE = 4.5
"""Standard deviations of the sample by which more than k blocks reach the bound; of a random row the list is longer
than it may be in none of a billion."""

SLACK = 4
"""The bound is one that up to a 2^SLACK-th more of the sample reach than have to."""

HELD_ORDERS = SAMPLE // BOUND_THREADS
"""Of a thread."""

STEPS = 20
"""Of the search, each of which leaves a quarter of the orders; the last ones of those that it begins with."""

RANGES = 8 * STEPS
BOUND_BYTES = RANGES + 8 * BOUND_THREADS // 32
"""Shared memory: counts of each step, zero at first; then extremes of each warp."""

NO_ORDER = 0xFFFFFFFE
"""After the orders of all numbers (ptx.descending_order)."""


class BoundRole:
    """Finds a row's bound. By a CTA a row."""

    threads = BOUND_THREADS

    @cute.jit
    def run(self, rows: Rows, pieces: cute.FastDivmodDivisorV2, units: Int32, picks: Any) -> None:
        thread, row = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        numbers = SmemAllocator().allocate_tensor(Int32, cute.make_layout(BOUND_BYTES // 4), byte_alignment=16)
        at = numbers.iterator.toint()
        if thread < 2 * STEPS:
            ptx.store_shared_s32(at + thread * 4, Int32(0))
        ptx.prefetch_l2(rows.length_of(row), thread == 0)
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        size, count = rows.load_length(row)
        bound = Float32(-Float32.inf)
        if (count > SAMPLE) & (count > rows.selected):
            bound = self.search(rows.scores_of(row), size, count, rows.selected, at, thread)
        if thread == 0:
            ptx.store_global_f32(rows.work_of(row, BOUND), bound)

    @cute.jit
    def search(self, source: Int64, size: Int32, count: Int32, selected: Int32, at: Int32, thread: Int32) -> Any:
        """A score that enough blocks of the sample reach; -inf if it has not that many numbers."""
        lane, warp = cute.arch.lane_idx(), cute.arch.make_warp_uniform(thread // 32)
        pairs = size // (2 * CANDIDATE_BLOCK)
        # four lanes have a pair, and of every two pairs each two lanes keep one
        words = []
        for i in range_constexpr(2 * HELD_ORDERS):
            pair = Int64(i * (BOUND_THREADS // 4) + thread // 4) * Int64(pairs) // PAIRS
            words.append(ptx.load_global_128_in_order(source + pair * 64 + Int64(thread % 4) * 16))
        found = [largest(four) for four in words]
        found = [ptx.max_f32(one, cute.arch.shuffle_sync_bfly(one, 1)) for one in found]
        orders = []
        for i in range_constexpr(HELD_ORDERS):
            best = found[2 * i + 1] if lane & 1 == 1 else found[2 * i]
            orders.append(Uint32(ptx.descending_order(best)))
        first, last = orders[0], Uint32(0)
        for order in orders:
            first = cutlass.min(first, order)
            last = cutlass.max(last, Uint32(cutlass.select_(order > Uint32(NO_ORDER), Uint32(0), order)))
        redux = cute.arch.warp_redux_sync
        first, last = Uint32(redux(first, "min")), Uint32(redux(last, "umax"))
        if lane == 0:
            ptx.store_shared_64(at + RANGES + warp * 8, Int32(first), Int32(last))
        cute.arch.sync_threads()
        least, most = ptx.load_shared_64(at + RANGES + lane % (BOUND_THREADS // 32) * 8)
        low, high = Uint32(redux(Uint32(least), "min")), Uint32(redux(Uint32(most), "umax"))

        share = Float32(selected) * Float32(SAMPLE) * ptx.reciprocal(Float32(count))
        wanted = Int32(share + Float32(SURE) * share * ptx.rsqrt(share)) + 2
        is_short, step, reached = Int32(1), Int32(0), Int32(SAMPLE)
        while (reached > wanted + (wanted >> SLACK)) & (low < high) & (step < STEPS):
            quarter = (high - low) >> Uint32(2)
            one, two, three = (Uint32(low + Uint32(i) * quarter) for i in (1, 2, 3))
            both, third = Int32(0), Int32(0)
            for order in orders:
                both += Int32(order <= one) + (Int32(order <= two) << 16)
                third += Int32(order <= three)
            both, third = Int32(redux(both, "add")), Int32(redux(third, "add"))
            ptx.reduce_shared("add.u32", at + step * 8, both, lane == 0)
            ptx.reduce_shared("add.u32", at + step * 8 + 4, third, lane == 0)
            cute.arch.sync_threads()
            both, third = ptx.load_shared_64(at + step * 8)
            of_one, of_two = both & 0xFFFF, both >> 16
            if of_one >= wanted:
                high, reached, is_short = Uint32(one), of_one, Int32(0)
            elif of_two >= wanted:
                low, high, reached, is_short = Uint32(one + Uint32(1)), Uint32(two), of_two, Int32(0)
            elif third >= wanted:
                low, high, reached, is_short = Uint32(two + Uint32(1)), Uint32(three), third, Int32(0)
            else:
                low = Uint32(three + Uint32(1))
            step += 1
        # nothing was found below the last order: all numbers of the sample are fewer, or as many as are wanted
        return Float32(-Float32.inf) if is_short != 0 else ptx.of_descending_order(high)


# ---- marks

WARPS = 4
"""Per CTA."""

VECTORS = MARKED // 128
"""Of four columns that a lane has."""


class MarkRole:
    """Marks blocks. By a warp MARKED columns."""

    threads = 32 * WARPS

    @cute.jit
    def run(self, rows: Rows, pieces: cute.FastDivmodDivisorV2, units: Int32, picks: Any) -> None:
        warp = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // 32)
        unit, lane = cute.arch.block_idx()[0] * WARPS + warp, cute.arch.lane_idx()
        row, piece = divmod(cutlass.min(unit, units - 1), pieces)
        # scores and lengths are there: the kernel of the bound, which has begun, has waited for what wrote them
        size, count = rows.load_length(row)
        first = piece * MARKED
        is_wanted = (unit < units) & (first < size) & (count > rows.selected)
        column = first + lane * 4
        source = rows.scores_of(row) + Int64(column) * 4
        words = [
            ptx.load_global_128_cached_where(is_wanted & (column + (128 * i + 4) <= size), source + 512 * i)
            for i in range(VECTORS)
        ]
        found = [largest(four) for four in words]
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        if is_wanted:
            if first + MARKED > size:
                found = with_cut_vector(found, source, column, size)
            self.mark(rows, row, first, count, found)

    @cute.jit
    def mark(self, rows: Rows, row: Int32, first: Int32, count: Int32, found: Any) -> None:
        """found: for each 128 columns the largest of the lane's four, half a block."""
        lane = cute.arch.lane_idx()
        bound = ptx.load_global_s32_in_order(rows.work_of(row, BOUND), is_shared=True).bitcast(Float32)
        is_odd = lane & 1 == 1
        for i in range_constexpr(0, VECTORS, 2):
            own = found[i + 1] if is_odd else found[i]
            sent = found[i] if is_odd else found[i + 1]
            best = ptx.max_f32(own, cute.arch.shuffle_sync_bfly(sent, 1))
            # even lanes have the first 16 blocks, odd ones the others: lane l gets number l
            best = cute.arch.shuffle_sync(best, (lane & 15) * 2 + lane // 16)
            block = first // CANDIDATE_BLOCK + (16 * i + lane)
            best = as_compared(best, block, count)
            is_reached = (block < count) & (best >= bound)
            ptx.store_global_f32(rows.work_of(row, rows.maxima + block), best, is_reached)
            marks = cute.arch.vote_ballot_sync(is_reached)
            ptx.store_global_s32(
                rows.work_of(row, rows.marks + first // (32 * CANDIDATE_BLOCK) + i // 2), marks, lane == 0
            )


# ---- picks

HELD = HeldConfig(32, LISTED // (CHUNK * 32))
STREAMED = TopKConfig(32, 4, 1, 16)
"""How a list is picked from, and all maxima of a row: by CTAs of as many warps."""

LIST_BLOCKS = HELD.smem_bytes
LIST_MAXIMA = LIST_BLOCKS + 4 * LISTED
"""Byte offsets in shared memory of the listed blocks' numbers and maxima, behind what picks from them."""

WORDS = 4
"""Of marks that a thread loads at once."""


class ListedBlocks(NamedTuple):
    """What HeldRow writes in place of columns: the blocks at an address of shared memory. table: not 0."""

    table: Any
    blocks: Any

    @cute.jit
    def write(self, entries: Int32, first: Int32, step: cutlass.Constexpr, stop: Int32, out: Int64) -> None:
        for number in cutlass.range(first, stop, step, unroll=1):
            entry = ptx.load_shared_s32(entries + number * 4)
            ptx.store_global_s32(out + Int64(number) * 4, ptx.load_shared_s32(self.blocks + entry * 4))


class ListedRow(HeldRow):
    """Of a list in shared memory: a part's base is an address there."""

    @cute.jit
    def load(self, here: Here, part: Part, each: Int32, scores: cute.Tensor) -> None:
        first_place = here.warp * each * CHUNK + here.lane * 4
        for i in range_constexpr(self.vectors):
            place = first_place + i * CHUNK
            # what is behind the list may be anything
            words = ptx.load_shared_128(part.base + cutlass.min(place, Int32(LISTED - 4)) * 4)
            for j in range_constexpr(4):
                is_inside = (i < each) & (place + j < part.stop)
                scores[4 * i + j] = (words[j] if is_inside else Int32(-1)).bitcast(Float32)


class PickRole:
    """Picks blocks. By a CTA a row."""

    threads = HELD.threads
    smem_bytes = max(LIST_MAXIMA + 4 * LISTED, STREAMED.smem_bytes)

    def __init__(self) -> None:
        self.held, self.streamed = ListedRow(HELD, False), RowPicks(STREAMED)

    @cute.jit
    def run(self, rows: Rows, pieces: cute.FastDivmodDivisorV2, units: Int32, picks: Any) -> None:
        """picks: address and row stride of the result, 1 as a divisor, topk.py's groups and a warp's share of k."""
        out, out_stride, one, groups, share = picks
        thread, row = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        memory = SmemAllocator().allocate_tensor(Int32, cute.make_layout(self.smem_bytes // 4), byte_alignment=16)
        at = memory.iterator.toint()
        here = Here(at, at, thread, cute.arch.make_warp_uniform(thread // 32), thread % 32, Int32(0))
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        size, count = rows.load_length(row)
        k, target = rows.selected, out + Int64(row) * out_stride
        if count <= k:
            for i in cutlass.range(thread, k, self.threads, unroll=1):
                ptx.store_global_s32(target + Int64(i) * 4, i if i < count else Int32(-1))
        else:
            listed = self.list(here, rows, row, size)
            if (listed > k) & (listed <= LISTED):
                part = self.part(at + LIST_MAXIMA, listed, Int32(1))
                blocks: Any = ListedBlocks(Int32(1), at + LIST_BLOCKS)
                self.held.select(here, part, None, k, Int32(0), Int32(0), target, blocks)
            else:
                self.streamed.clear(here)
                self.load_maxima(rows, row, size, count, thread)
                cute.arch.sync_threads()
                part = self.part(rows.work_of(row, rows.maxima), count, (count + (STREAMED.tile - 1)) // STREAMED.tile)
                columns = Slots(Int64(0), Int64(0), Int32(0), Int32(0), one, Int32(0))
                self.streamed.select(here, part, None, k, share, groups, target, columns)

    def part(self, source: Any, stop: Any, tiles: Any) -> Part:
        each = Float32(32 / self.threads) * ptx.reciprocal(Int32(tiles))
        return Part(source, Int32(0), stop, tiles, Int32(0), CHUNK * (self.threads // 32) * tiles, each)

    @cute.jit
    def list(self, here: Here, rows: Rows, row: Int32, size: Int32) -> Any:
        """How many blocks of the row are marked; as many of them as a list holds are listed, with their maxima. What
        picks from the list is cleared."""
        words = (size + (MARKED - 1)) // MARKED * (MARKED // (32 * CANDIDATE_BLOCK))
        listed, is_odd = Int32(0), Int32(0)
        for start in cutlass.range(0, words, WORDS * self.threads, unroll=1):
            first = start + WORDS * here.thread
            loaded = ptx.load_global_128_cached_where(first < words, rows.work_of(row, rows.marks + first))
            marks = [cutlass.select_(first + i < words, loaded[i], Int32(0)) for i in range(WORDS)]
            number = Int32(0)
            for word in marks:
                number += Int32(cute.arch.popc(word))
            sums = lanes_prefix(number)
            # warps may still be reading the sums before
            at = here.at + LIST_MAXIMA + is_odd * 128
            if here.lane == 31:
                ptx.store_shared_s32(at + here.warp * 4, sums)
            cute.arch.sync_threads()
            of_warp = ptx.load_shared_s32(at + here.lane * 4)
            place = Int32(cute.arch.warp_redux_sync(of_warp if here.lane < here.warp else Int32(0), "add"))
            place = place + listed + sums - number
            listed += Int32(cute.arch.warp_redux_sync(of_warp, "add"))
            is_odd = is_odd ^ 1
            for i in range_constexpr(WORDS):
                word = marks[i]
                while word != 0:
                    bit = cute.arch.popc((word & -word) - 1)
                    word = word & (word - 1)
                    target = here.at + LIST_BLOCKS + place * 4
                    ptx.store_shared_s32_where(place < LISTED, target, (first + i) * 32 + bit)
                    place += 1
        self.held.clear(here)
        cute.arch.sync_threads()
        stop = cutlass.min(listed, Int32(LISTED))
        for start in cutlass.range(here.thread, stop, 4 * self.threads, unroll=1):
            found = []
            for i in range_constexpr(4):
                entry = start + self.threads * i
                block = ptx.load_shared_s32(here.at + LIST_BLOCKS + cutlass.min(entry, stop - 1) * 4)
                source = rows.work_of(row, rows.maxima + block)
                found.append((entry, ptx.load_global_s32_where(entry < stop, source, is_shared=True)))
            for entry, best in found:
                ptx.store_shared_s32_where(entry < stop, here.at + LIST_MAXIMA + entry * 4, best)
        cute.arch.sync_threads()
        return listed

    @cute.jit
    def load_maxima(self, rows: Rows, row: Int32, size: Int32, count: Int32, thread: Int32) -> None:
        """All maxima of the row, to the workspace."""
        scores = rows.scores_of(row)
        for block in cutlass.range(thread, count, self.threads, unroll=2):
            column, source = block * CANDIDATE_BLOCK, scores + Int64(block) * (4 * CANDIDATE_BLOCK)
            is_whole = column + CANDIDATE_BLOCK <= size
            halves = [ptx.load_global_128_cached_where(is_whole, source + 16 * i) for i in range(2)]
            best = ptx.max_f32(largest(halves[0]), largest(halves[1]))
            if column + CANDIDATE_BLOCK > size:
                for i in range_constexpr(CANDIDATE_BLOCK):
                    word = ptx.load_global_s32_where(column + i < size, source + 4 * i, is_shared=True)
                    best = ptx.max_f32(best, word.bitcast(Float32))
            best = as_compared(best, block, count)
            ptx.store_global_f32(rows.work_of(row, rows.maxima + block), best)


# ---- kernel

ROLES: dict[str, Callable[[], Any]] = {"bound": BoundRole, "marks": MarkRole, "picks": PickRole}


class BlockPicksKernel:
    """Entry point: (scores; address and strides of the lengths by request and token, tokens of a request; address and
    row stride of the workspace, first words of its maxima and marks, blocks that are selected; address and row stride
    of the result; topk.py's groups and a warp's share of the selected; stream)."""

    def __init__(self, key: BlockPicksKey) -> None:
        self.role, self.name = ROLES[key.role](), f"block_{key.role}"
        self.is_of_pieces = key.role == "marks"

    @cute.jit
    def __call__(
        self,
        scores: cute.Tensor,
        lengths: Int64,
        lengths_request: Int64,
        lengths_token: Int64,
        tokens: Int32,
        work: Int64,
        work_stride: Int64,
        maxima: Int32,
        marks: Int32,
        selected: Int32,
        out: Int64,
        out_stride: Int64,
        groups: Int32,
        share: Int32,
        stream: cuda.CUstream,
    ) -> None:
        self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        count, columns = length(scores, 0), length(scores, 1)
        divisor = cute.fast_divmod_create_divisor_v2
        seen = lengths, lengths_request, lengths_token, divisor(tokens)
        of_work = work, work_stride, maxima, marks
        rows = Rows(address(scores), stride_bytes(scores, 0), columns, *seen, *of_work, selected)
        pieces = cute.ceil_div(columns, MARKED)
        units = count * pieces
        ctas = cute.ceil_div(units, WARPS) if const_expr(self.is_of_pieces) else count
        picks = out, out_stride, divisor(Int32(1)), groups, share
        self.kernel(rows, divisor(pieces), units, picks).launch(
            grid=[ctas, 1, 1], block=[self.role.threads, 1, 1], stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(self, rows: Rows, pieces: cute.FastDivmodDivisorV2, units: Int32, picks: Any) -> None:
        self.role.run(rows, pieces, units, picks)


@dataclass(frozen=True)
class BlockPicksKey(KernelKey):
    """What distinguishes one compiled kernel from another.

    role   "bound", "marks" or "picks"
    """

    kernel_name: ClassVar[str] = "indexer.block_picks"
    role: str = "bound"

    @property
    def smem_bytes(self) -> int:
        return {"bound": BOUND_BYTES, "picks": PickRole.smem_bytes}.get(self.role, 0)

    @property
    def instructions(self) -> tuple[str, ...]:
        return ("griddepcontrol", "ld.global.128")

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        scores = make_fake_tensor(Float32, (cute.sym_int(), cute.sym_int()), stride=(cute.sym_int64(), 1))
        numbers = [Int64(0), Int64(0), Int64(0), Int32(1), Int64(0), Int64(0), Int32(1), Int32(1), Int32(1)]
        numbers += [Int64(0), Int64(0), Int32(1), Int32(1)]
        return BlockPicksKernel(self), (scores, *numbers, make_fake_stream(use_tvm_ffi_env_stream=True))


# ---- launch


def keys_of(arch: str) -> list[BlockPicksKey]:
    return [BlockPicksKey(arch, role) for role in ROLES] if arch in ARCHS else []


LEAST_ROWS = 16
"""Of a call: clusters pick among the maxima of fewer rows faster (perf/log/candidates.md)."""


def takes(arch: str, rows: int, columns: int, selected: int) -> bool:
    """Whether these kernels take so many rows of so many scores."""
    is_long = LONG_BLOCKS <= -(-columns // CANDIDATE_BLOCK) <= STREAMED.places
    return arch in ARCHS and rows >= LEAST_ROWS and is_long and selected <= topk_select.MOST_PICKS


def launch(call: SelectBlocksCall, arch: str) -> None:
    """Run the kernels on the current stream of out's device."""
    logits, lengths, out = call.logits, call.seq_lens, call.out
    columns, k = logits.shape[1], out.shape[1]
    request, token = (4 * stride for stride in lengths.stride())
    work = call.workspace.data_ptr(), block_row_bytes(columns), block_maxima_at(columns), block_marks_at(columns)
    streamed = TopKKey(arch, STREAMED.warps, STREAMED.vectors, STREAMED.cluster, STREAMED.tiles)
    shares = topk_select.groups_for(streamed, k), topk_select.share_for(streamed, k)
    seen = lengths.data_ptr(), request, token, lengths.shape[1]
    for key in keys_of(arch):
        launch_key(key, out.device.index, logits, *seen, *work, k, out.data_ptr(), out.stride(0) * 4, *shares)
