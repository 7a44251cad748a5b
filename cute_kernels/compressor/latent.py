# SPDX-License-Identifier: Apache-2.0
"""Kernel of compress_latent: the four warps of a CTA share a row, of many rows two, one after the other.

    columns of a thread, of each half of a row      4 * thread .. + 3

Of ratio 1 that is all: a row is loaded, rounded, normed, stored. Its threads tell each other what they have rounded, so
that each warp sums the squares of the whole row. Of ratio 2 a row that closes a latent needs the row before as well,
from the step or from the request's ring, and a row that the ring keeps is stored there. Rows are asked for before it is
known whether anybody needs them. Of few rows, each may be a request of its own: a CTA takes one, and asks for the row
before in the step and, as soon as its slot is known, in the ring. Of many rows, most have the row before beside them: a
CTA takes two, and lane i of a warp finds out what there is to know of row i.

The first row of a request may read what one of its last rows overwrites, where a chunk goes round the ring. That row is
stored by the first row's CTA, which has read before: a thread reads and writes the same columns. A row without a
request is none of these.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float32, Int32, Int64, const_expr, range_constexpr
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from cutlass.memory import SmemAllocator

from cute_kernels.compressor.call import LatentCall
from cute_kernels.dsl import convert, ptx, reduce
from cute_kernels.dsl.tensor import address
from cute_kernels.formats import HEAD_DIM
from cute_kernels.models import ModelConfig, latent_ratios
from cute_kernels.runtime.arch import arch_number, arch_of
from cute_kernels.runtime.compile import KernelKey
from cute_kernels.runtime.compile import launch as launch_key
from cute_kernels.runtime.key import OpKernel

WARPS = 4
"""Of a row."""

THREADS = 32 * WARPS

HALF_ROW = HEAD_DIM * 4
"""Bytes from a row's kv half to its gate half."""

LATENT = HEAD_DIM * 2
"""Bytes of a rounded latent in shared memory."""

MOST_KNOWN = 32
"""Of fewer requests each lane of a warp knows where one begins, and the last where they end, before it is known whose
a row is: else the first rows of a call would wait for that as well (perf/log/latents.md)."""

FEW_ROWS = {1: 2048, 2: 512}
"""By ratio: with more, a CTA takes two rows, and those of ratio 1 may go through L1 (perf/log/latents.md)."""


class Rows(NamedTuple):
    """What the kernel takes, in plain numbers; strides in bytes. Of ratio 1 the last nine are unused.

    total      rows, of ratio 2 those that have a slot
    requests   that there are
    ring       rows of a ring, as a divisor; capacity: of all rings
    """

    kv_score: Int64
    row_stride: Int64
    weight: Int64
    out: Int64
    out_stride: Int64
    eps: Float32
    total: Int32
    positions: Int64
    slots: Int64
    owners: Int64
    starts: Int64
    requests: Int32
    state: Int64
    page_stride: Int64
    ring: cute.FastDivmodDivisorV2
    capacity: Int32


class LatentKernel:
    """Entry point: (weight of the norm, address and row stride of the projections, address and row stride of the
    latents, eps, rows; addresses of positions, slots, requests of the rows and their starts, number of requests;
    address and page stride of the rings, rows of one and of all; use_pdl, stream)."""

    def __init__(self, key: LatentKey) -> None:
        self.ratio, self.rows = key.ratio, 2 if key.pairs else 1
        self.through_l1 = key.ratio == 1 and key.pairs
        self.has_dependency = arch_number(key.arch) >= ptx.DEPENDENT_LAUNCH_ARCH
        self.name = f"compress_latent_r{key.ratio}" + "_pairs" * key.pairs

    @cute.jit
    def __call__(
        self,
        weight: cute.Tensor,
        kv_score: Int64,
        row_stride: Int64,
        out: Int64,
        out_stride: Int64,
        eps: Float32,
        count: Int32,
        positions: Int64,
        slots: Int64,
        owners: Int64,
        starts: Int64,
        requests: Int32,
        state: Int64,
        page_stride: Int64,
        ring: Int32,
        capacity: Int32,
        use_pdl: Boolean,
        stream: cuda.CUstream,
    ) -> None:
        self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        divisor = cute.fast_divmod_create_divisor_v2(ring)
        latents = address(weight), out, out_stride, eps, count
        step = positions, slots, owners, starts, requests
        rows = Rows(kv_score, row_stride, *latents, *step, state, page_stride, divisor, capacity)
        self.kernel(rows).launch(
            grid=[cute.ceil_div(count, self.rows), 1, 1],
            block=[THREADS, 1, 1],
            stream=stream,
            use_pdl=use_pdl if const_expr(self.has_dependency) else False,
        )

    @cute.kernel
    def kernel(self, rows: Rows) -> None:
        cta, _, _ = cute.arch.block_idx()
        shared = SmemAllocator().allocate_array(Int32, self.rows * LATENT // 4).toint()
        # a constant of the model: it comes while the kernel ahead runs
        gains = ptx.load_global_64_in_order(rows.weight + self.offset() // 2, is_shared=True)
        if const_expr(self.has_dependency):
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
        row = cta * self.rows
        own = [
            self.load(self.row_address(rows, cutlass.min(row + i, rows.total - 1)), self.ratio)
            for i in range(self.rows)
        ]
        if const_expr(self.ratio == 1):
            values = [[word.bitcast(Float32) for word in words] for words in own]
            latents = [self.share(values[i], shared + i * LATENT) for i in range(self.rows)]
            cute.arch.sync_threads()
            for i in range_constexpr(self.rows):
                self.store_latent(rows, row + i, latents[i], shared + i * LATENT, gains, row + i < rows.total)
        else:
            self.run_rows(rows, row, own, gains, shared)

    @cute.jit
    def run_rows(self, rows: Rows, row: Int32, own: list[Any], gains: Any, shared: Any) -> None:
        """Of ratio 2: the CTA's rows from this one on, which have been asked for. Lane i looks after row i: latents
        that rows close, by the row before, and rows that the ring keeps."""
        number = row + cutlass.min(cute.arch.lane_idx(), self.rows - 1)
        beside: Any = None
        in_ring: Any = None
        if const_expr(self.rows == 1):
            beside = self.load(self.row_address(rows, cutlass.max(row - 1, 0)), 2)
        position, slot, owner = self.load_numbers(rows, cutlass.min(number, rows.total - 1))
        starts: Any = None
        if const_expr(self.rows > 1):
            lane = cutlass.min(cute.arch.lane_idx(), rows.requests)
            starts = ptx.load_global_s32_in_order(rows.starts + Int64(lane) * 4, is_shared=True)
        is_slot, place, place_before = self.locate(rows, slot)
        is_odd = Int32(position) & 1 == 1
        if const_expr(self.rows == 1):
            in_ring = self.load_where(is_slot & is_odd, place_before + self.offset())

        is_owned = (owner >= 0) & (owner < rows.requests)
        request = owner if is_owned else Int32(0)
        first, last = Int32(0), Int32(0)
        if const_expr(starts is None):
            first, last = self.load_starts(rows, request)
        elif rows.requests < MOST_KNOWN:
            first, last = [cute.arch.shuffle_sync(starts, request + i) for i in range(2)]
        else:
            first, last = self.load_starts(rows, request)
        # a negative end would make the number of rows wrap around
        last = cutlass.max(cutlass.min(last, rows.total), Int32(0))
        is_there = is_slot & is_owned & (position >= 0) & (number < rows.total)
        keeps = is_there & (number >= last - rows.ring.divisor) & (number < last)
        # of a chunk that goes round the ring: the row that overwrites what the request's first row reads
        turns = cutlass.max(last - first, Int32(0)) // rows.ring
        late = first - 1 + turns * rows.ring.divisor
        is_late = keeps & (turns > 0) & (number == late) & (first >= 0)
        of_first = ptx.load_global_s32_where(is_late, rows.owners + Int64(first) * 4)
        goes_round = (number == first) & is_owned & (turns > 0) & (number < rows.total)
        # a bit for each row
        vote = cute.arch.vote_ballot_sync
        closing, firsts = vote(is_there & is_odd), vote((number <= first) | (number <= 0))
        kept, round_ = vote(keeps & ((is_late ^ True) | (of_first != owner))), vote(goes_round)

        for i in range_constexpr(self.rows):
            if closing & (1 << i) != 0:
                is_first = firsts & (1 << i) != 0
                if const_expr(self.rows == 1):
                    before = [Int32(cutlass.select_(is_first, *two)) for two in zip(in_ring, beside, strict=True)]
                elif const_expr(i == 0):
                    source = self.row_address(rows, row - 1)
                    if is_first:
                        source = self.of_row(place_before, i) + self.offset()
                    before = self.load(source, 2)
                else:
                    before = own[i - 1]
                    if is_first:
                        before = self.load(self.of_row(place_before, i) + self.offset(), 2)
                words = self.share(self.weighted(before, own[i]), shared + i * LATENT)
                cute.arch.sync_threads()
                self.store_latent(rows, row + i, words, shared + i * LATENT, gains, None)
            if kept & (1 << i) != 0:
                self.keep(self.of_row(place, i), own[i], None)
        if round_ != 0:
            for i in cutlass.range(self.rows, unroll=1):
                if round_ >> i & 1 != 0:
                    self.keep_late(rows, *(cute.arch.shuffle_sync(x, i) for x in (late, owner)))

    @cute.jit
    def keep_late(self, rows: Rows, row: Any, owner: Any) -> None:
        """Keep a row of this request, if it is one, for the request's first row."""
        position, slot, of_row = self.load_numbers(rows, row)
        is_slot, place, _ = self.locate(rows, slot)
        words = self.load(self.row_address(rows, row), 2)
        self.keep(place, words, is_slot & (position >= 0) & (of_row == owner))

    def load_numbers(self, rows: Rows, row: Any) -> Any:
        """Position, slot and request of a row."""
        position, slot = (ptx.load_global_s64_in_order(at + Int64(row) * 8) for at in (rows.positions, rows.slots))
        return position, slot, ptx.load_global_s32_in_order(rows.owners + Int64(row) * 4)

    def load_starts(self, rows: Rows, request: Any) -> list[Any]:
        """First rows of a request and of the one behind it."""
        start = rows.starts + Int64(request) * 4
        return [ptx.load_global_s32_in_order(start + 4 * i, is_shared=True) for i in range(2)]

    @cute.jit
    def locate(self, rows: Rows, slot: Any) -> Any:
        """Whether there is such a slot, and where in its ring are this and the one before."""
        is_slot = (slot >= 0) & (slot < Int64(rows.capacity))
        page, number = divmod(Int32(slot if is_slot else Int64(0)), rows.ring)
        ring = rows.state + Int64(page) * rows.page_stride
        before = number - 1 if number > 0 else rows.ring.divisor - 1
        return is_slot, *(ring + Int64(n) * (2 * HALF_ROW) for n in (number, before))

    def of_row(self, number: Any, i: int) -> Any:
        """What the lane that looks after row i has as this number."""
        if self.rows == 1:
            return number
        return ptx.pair(*(cute.arch.shuffle_sync(half, i) for half in ptx.halves(number)))

    def offset(self) -> Any:
        """Bytes from the beginning of half a row to the thread's columns."""
        thread, _, _ = cute.arch.thread_idx()
        return Int64(thread * 16)

    def row_address(self, rows: Rows, row: Any) -> Any:
        """Of a thread's first columns."""
        return rows.kv_score + Int64(row) * rows.row_stride + self.offset()

    def load(self, start: Any, halves: int) -> list[Any]:
        """A thread's columns of a row, of its kv half and then of its gate half, as words."""
        return [
            word
            for half in range(halves)
            for word in ptx.load_global_128_in_order(start + half * HALF_ROW, self.through_l1)
        ]

    def load_where(self, condition: Any, start: Any) -> list[Any]:
        """The same of both halves, anything where the condition fails."""
        return [word for at in (start, start + HALF_ROW) for word in ptx.load_global_128_where(condition, at)]

    def keep(self, place: Any, words: list[Any], is_wanted: Any) -> None:
        for half in range(2):
            at = place + self.offset() + half * HALF_ROW
            ptx.store_global_128(at, words[4 * half : 4 * half + 4], is_wanted)

    def weighted(self, before: list[Any], own: list[Any]) -> list[Any]:
        """Means of the kv halves of two rows, by the softmax of their gate halves."""
        means = []
        for i in range(4):
            gap = ptx.sub_rn(own[4 + i].bitcast(Float32), before[4 + i].bitcast(Float32))
            # exp of minus the distance, so that nothing overflows
            less = ptx.exp2(ptx.mul_rn((gap.bitcast(Int32) & 0x7FFFFFFF).bitcast(Float32), Float32(-ptx.LOG2_E)))
            most = ptx.reciprocal_normal(ptx.add_rn(less, Float32(1.0)))
            less = ptx.mul_rn(less, most)
            is_newer = gap >= Float32(0.0)
            old, new = before[i].bitcast(Float32), own[i].bitcast(Float32)
            of_new, of_old = cutlass.select_(is_newer, most, less), cutlass.select_(is_newer, less, most)
            means.append(ptx.fma_rn(new, of_new, ptx.mul_rn(old, of_old)))
        return means

    def share(self, values: list[Any], shared: Any) -> list[Any]:
        """Round a thread's columns, and tell the CTA's other threads. A barrier follows."""
        words = convert.bf16_words(values)
        ptx.store_shared_64(shared + Int32(self.offset()) // 2, *words)
        return words

    def store_latent(self, rows: Rows, row: Any, words: list[Any], shared: Any, gains: Any, is_wanted: Any) -> None:
        """Norm and store a thread's rounded columns. Each warp sums the squares of the row: lane l those of columns
        128 w + 4 l .. + 3 for w = 0 to 3, in this order."""
        own = shared + cute.arch.lane_idx() * 8
        whole = [word for warp in range(WARPS) for word in ptx.load_shared_64(own + 256 * warp)]
        total = reduce.lanes_sum(reduce.square_sum(convert.bf16_floats(whole)))
        factor = ptx.rsqrt(ptx.fma_rn(total, Float32(1.0 / HEAD_DIM), rows.eps))
        pairs = zip(convert.bf16_floats(words), convert.bf16_floats(gains), strict=True)
        low, high = convert.bf16_words([ptx.mul_rn(ptx.mul_rn(x, factor), gain) for x, gain in pairs])
        target = rows.out + Int64(row) * rows.out_stride + self.offset() // 2
        ptx.store_global_64(target, low, high, is_wanted)


@dataclass(frozen=True)
class LatentKey(KernelKey):
    """What distinguishes one compiled kernel from another.

    ratio    1 or 2
    pairs    whether a CTA takes two rows
    """

    kernel_name: ClassVar[str] = "compressor.latent"
    tuning: ClassVar[tuple[str, ...]] = ("pairs",)
    ratio: int = 1
    pairs: bool = False

    @property
    def smem_bytes(self) -> int:
        return (2 if self.pairs else 1) * LATENT

    @property
    def instructions(self) -> tuple[str, ...]:
        return "ld.global.128", *(("ex2", "st.global.128") if self.ratio == 2 else ())

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        weight = make_fake_tensor(BFloat16, (HEAD_DIM,), stride=(1,))
        latents = (weight, *(Int64(0) for _ in range(4)), Float32(0), Int32(1))
        numbers = *(Int64(0) for _ in range(4)), Int32(0), Int64(0), Int64(0), Int32(1), Int32(0), Boolean(False)
        return LatentKernel(self), (*latents, *numbers, make_fake_stream(use_tvm_ffi_env_stream=True))


def key_for(arch: str, ratio: int, rows: int) -> LatentKey:
    """The kernel of calls of so many rows."""
    return LatentKey(arch, ratio, pairs=rows > FEW_ROWS[ratio])


def deployment_keys(config: ModelConfig, tp: int, arch: str) -> list[LatentKey]:
    """Those of the model's ratios, for few rows and for more."""
    keys = [key_for(arch, ratio, rows) for ratio in latent_ratios(config) for rows in (1, FEW_ROWS[ratio] + 1)]
    return list(dict.fromkeys(keys))


@cache
def _key(device_index: int, ratio: int, is_few: bool) -> LatentKey:
    return key_for(arch_of(device_index), ratio, 1 if is_few else FEW_ROWS[ratio] + 1)


def why_not(call: LatentCall) -> str:
    """Why no kernel can take a (checked) call; empty if one can."""
    for name, tensor, what in (
        ("kv_score", call.kv_score, "rows"),
        ("out", call.out, "rows"),
        ("state_cache", call.state_cache, "pages"),
        ("norm_weight", call.norm_weight, "columns"),
    ):
        if tensor is None:
            continue
        alignment = 16 if tensor.element_size() == 4 else 8
        stride = tensor.stride(0) * tensor.element_size() if tensor.dim() > 1 and tensor.shape[0] > 1 else 0
        if tensor.data_ptr() % alignment or stride % alignment:
            return (
                f"{what} of {name} must be {alignment}-byte aligned, got address {tensor.data_ptr():#x} and strides "
                f"{tuple(tensor.stride())}"
            )
    if call.state_cache is not None and call.state_cache.shape[0] * call.state_cache.shape[1] >= 2**31:
        return f"state_cache must have fewer than 2^31 rows, got shape {list(call.state_cache.shape)}"
    return ""


def launch(call: LatentCall) -> None:
    """Run the kernel on the current stream of out's device."""
    state, slots, starts, owners = call.state_cache, call.slot_mapping, call.query_start_loc, call.token_to_req_indices
    count = call.kv_score.shape[0] if slots is None else slots.shape[0]
    if count == 0:
        return
    step: tuple[int, ...] = (0,) * 5
    ring: tuple[int, ...] = 0, 0, 1, 0
    if state is not None and slots is not None and starts is not None and owners is not None:
        step = call.positions.data_ptr(), slots.data_ptr(), owners.data_ptr(), starts.data_ptr(), starts.shape[0] - 1
        ring = state.data_ptr(), state.stride(0) * 4, state.shape[1], state.shape[0] * state.shape[1]
    launch_key(
        _key(call.out.device.index, call.compress_ratio, count <= FEW_ROWS[call.compress_ratio]),
        call.out.device.index,
        call.norm_weight,
        call.kv_score.data_ptr(),
        call.kv_score.stride(0) * 4,
        call.out.data_ptr(),
        call.out.stride(0) * 2,
        call.eps,
        count,
        *step,
        *ring,
        call.use_pdl,
    )


KERNEL = OpKernel(launch, why_not, deployment_keys)
