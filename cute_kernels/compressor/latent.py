# SPDX-License-Identifier: Apache-2.0
"""Kernel of compress_latent: a warp takes a row, or two.

    columns of a lane, of each half of a row      128 * i + 4 * lane .. + 3 for i = 0 to 3

Of ratio 1 that is all: a row is loaded, rounded, normed, stored. Of ratio 2 a warp whose row closes a latent needs the
row before as well, from the step or from the request's ring, and a warp whose row the ring keeps stores it there. Rows
are asked for before it is known whether anybody needs them. Of few rows, each may be a request of its own: a warp takes
one, and L2 fetches the row before from the ring as soon as its place is known. Of many rows, most have the row before
beside them: a warp takes two.

The first row of a request may read what one of its last rows overwrites, where a chunk goes round the ring. That row is
stored by the first row's warp, which has read before: a lane reads and writes the same columns. A row without a request
is none of these.
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
"""Per CTA."""

HALF_ROW = HEAD_DIM * 4
"""Bytes from a row's kv half to its gate half."""

VECTORS = HEAD_DIM // 128
"""Of four columns that a lane has of half a row."""

FEW_ROWS = {1: 2048, 2: 512}
"""By ratio: with more, rows of ratio 1 may go through L1, and warps take two rows of ratio 2 (perf/log/latents.md)."""


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
        self.ratio, self.through_l1, self.rows = key.ratio, key.through_l1, 2 if key.pairs else 1
        self.has_dependency = arch_number(key.arch) >= ptx.DEPENDENT_LAUNCH_ARCH
        self.name = f"compress_latent_r{key.ratio}" + "_l1" * key.through_l1 + "_pairs" * key.pairs

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
            grid=[cute.ceil_div(count, WARPS * self.rows), 1, 1],
            block=[WARPS * 32, 1, 1],
            stream=stream,
            use_pdl=use_pdl if const_expr(self.has_dependency) else False,
        )

    @cute.kernel
    def kernel(self, rows: Rows) -> None:
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        row = (cta * WARPS + cute.arch.make_warp_uniform(thread // 32)) * self.rows
        if const_expr(self.has_dependency):
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
        if row < rows.total:
            if const_expr(self.ratio == 1):
                values = self.load_half(self.row_address(rows, row))
                self.store_latent(rows, row, [word.bitcast(Float32) for word in values])
            else:
                self.run_rows(rows, row)

    @cute.jit
    def run_rows(self, rows: Rows, row: Int32) -> None:
        """Of ratio 2: the warp's rows from this one on."""
        numbers = [cutlass.min(row + i, rows.total - 1) for i in range(self.rows)]
        own = [self.load_row(self.row_address(rows, number)) for number in numbers]
        facts = [self.load_facts(rows, number) for number in numbers]
        if const_expr(self.rows == 1):
            self.prefetch_before(rows, facts[0][1])
        bounds = [self.load_bounds(rows, owner) for _, _, owner in facts]
        for i in range_constexpr(self.rows):
            self.run_row(rows, row + i, facts[i], bounds[i], own[i], own[i - 1] if i > 0 else None)

    def load_facts(self, rows: Rows, row: Any) -> tuple[Any, Any, Any]:
        """Position, slot and request of a row."""
        position, slot = (ptx.load_global_s64_in_order(at + Int64(row) * 8) for at in (rows.positions, rows.slots))
        return position, slot, ptx.load_global_s32_in_order(rows.owners + Int64(row) * 4)

    @cute.jit
    def prefetch_before(self, rows: Rows, slot: Any) -> None:
        """Have L2 fetch the row of the ring before a slot's."""
        is_slot = self.is_slot(rows, slot)
        page, number = divmod(Int32(slot if is_slot else Int64(0)), rows.ring)
        before = Int64(number - 1 if number > 0 else rows.ring.divisor - 1) * (2 * HALF_ROW)
        line = rows.state + Int64(page) * rows.page_stride + before + Int64(cute.arch.lane_idx() * 128)
        ptx.prefetch_l2(line, is_slot)

    @cute.jit
    def load_bounds(self, rows: Rows, owner: Any) -> tuple[Any, Any, Any]:
        """Whether there is such a request, its first row, and the end of its rows."""
        is_owned = (owner >= 0) & (owner < rows.requests)
        start = rows.starts + Int64(owner if is_owned else Int32(0)) * 4
        first, last = [ptx.load_global_s32_in_order(start + 4 * i, is_shared=True) for i in range(2)]
        # a negative end would make the number of rows wrap around
        return is_owned, first, cutlass.max(cutlass.min(last, rows.total), Int32(0))

    @cute.jit
    def run_row(
        self,
        rows: Rows,
        row: Int32,
        facts: tuple[Any, Any, Any],
        bounds: tuple[Any, Any, Any],
        own: list[Any],
        beside: Any,
    ) -> None:
        """Close a row's latent with the row before, and keep the row, where that is wanted. own, beside: of the row,
        and of the one before in the step if it has been asked for."""
        position, slot, owner = facts
        is_owned, first, last = bounds
        is_there = self.is_slot(rows, slot) & is_owned & (position >= 0) & (row < rows.total)
        closes = is_there & (Int32(position) & 1 == 1)
        keeps = is_there & (row >= last - rows.ring.divisor) & (row < last)
        # of a chunk that goes round the ring: the row that overwrites what the request's first row reads
        turns = cutlass.max(last - first, Int32(0)) // rows.ring
        late = first - 1 + turns * rows.ring.divisor
        is_late = keeps & (turns > 0) & (row == late) & (first >= 0)
        of_first = ptx.load_global_s32_where(is_late, rows.owners + Int64(first) * 4)
        keeps_own = keeps & ((is_late ^ True) | (of_first != owner))
        page, number = divmod(Int32(slot if is_there else Int64(0)), rows.ring)
        ring = rows.state + Int64(page) * rows.page_stride + Int64(cute.arch.lane_idx() * 16)
        if closes:
            is_first = (row <= first) | (row <= 0)
            in_ring = ring + Int64(number - 1 if number > 0 else rows.ring.divisor - 1) * (2 * HALF_ROW)
            if const_expr(beside is None):
                before = self.load_row(in_ring if is_first else self.row_address(rows, row - 1))
            else:
                before = beside
                if is_first:
                    before = self.load_row(in_ring)
            self.store_latent(rows, row, self.weighted(before, own))
        self.keep_row(ring + Int64(number) * (2 * HALF_ROW), own, keeps_own)
        if (row == first) & is_owned & (turns > 0) & (row < rows.total):
            slot = ptx.load_global_s64_in_order(rows.slots + Int64(late) * 8)
            position = ptx.load_global_s64_in_order(rows.positions + Int64(late) * 8)
            of_late = ptx.load_global_s32_in_order(rows.owners + Int64(late) * 4)
            is_there = self.is_slot(rows, slot) & (position >= 0) & (of_late == owner)
            page, number = divmod(Int32(slot if is_there else Int64(0)), rows.ring)
            ring = rows.state + Int64(page) * rows.page_stride + Int64(cute.arch.lane_idx() * 16)
            words = self.load_row(self.row_address(rows, late))
            self.keep_row(ring + Int64(number) * (2 * HALF_ROW), words, is_there)

    def is_slot(self, rows: Rows, slot: Any) -> Any:
        return (slot >= 0) & (slot < Int64(rows.capacity))

    def row_address(self, rows: Rows, row: Any) -> Any:
        """Of a lane's first columns."""
        return rows.kv_score + Int64(row) * rows.row_stride + Int64(cute.arch.lane_idx() * 16)

    def load_half(self, start: Any) -> list[Any]:
        """A lane's columns of half a row, as words."""
        return [word for i in range(VECTORS) for word in ptx.load_global_128_in_order(start + 512 * i, self.through_l1)]

    def load_row(self, start: Any) -> list[Any]:
        """A lane's columns of a row, of its kv half and then of its gate half, as words."""
        return [*self.load_half(start), *self.load_half(start + HALF_ROW)]

    def keep_row(self, start: Any, words: list[Any], is_wanted: Any) -> None:
        for i in range(2 * VECTORS):
            target = start + (i // VECTORS * HALF_ROW + i % VECTORS * 512)
            ptx.store_global_128(target, words[4 * i : 4 * i + 4], is_wanted)

    def weighted(self, before: list[Any], own: list[Any]) -> list[Any]:
        """Means of the kv halves of two rows, by the softmax of their gate halves."""
        half, means = 4 * VECTORS, []
        for i in range(half):
            gap = ptx.sub_rn(own[half + i].bitcast(Float32), before[half + i].bitcast(Float32))
            # exp of minus the distance, so that nothing overflows
            less = ptx.exp2(ptx.mul_rn((gap.bitcast(Int32) & 0x7FFFFFFF).bitcast(Float32), Float32(-ptx.LOG2_E)))
            most = ptx.reciprocal(ptx.add_rn(less, Float32(1.0)))
            less = ptx.mul_rn(less, most)
            is_newer = gap >= Float32(0.0)
            old, new = before[i].bitcast(Float32), own[i].bitcast(Float32)
            of_new, of_old = cutlass.select_(is_newer, most, less), cutlass.select_(is_newer, less, most)
            means.append(ptx.fma_rn(new, of_new, ptx.mul_rn(old, of_old)))
        return means

    def store_latent(self, rows: Rows, row: Any, values: list[Any]) -> None:
        """Round, norm and store a lane's columns."""
        lane = cute.arch.lane_idx()
        weight = rows.weight + Int64(lane * 8)
        weights = [ptx.load_global_64_again(weight + 256 * i) for i in range(VECTORS)]
        rounded = convert.bf16_floats(convert.bf16_words(values))
        total = reduce.lanes_sum(reduce.square_sum(rounded))
        factor = ptx.rsqrt(ptx.fma_rn(total, Float32(1.0 / HEAD_DIM), rows.eps))
        target = rows.out + Int64(row) * rows.out_stride + Int64(lane * 8)
        for i in range(VECTORS):
            gains = convert.bf16_floats(weights[i])
            normed = [ptx.mul_rn(ptx.mul_rn(rounded[4 * i + j], factor), gains[j]) for j in range(4)]
            ptx.store_global_64(target + 256 * i, *convert.bf16_words(normed))


@dataclass(frozen=True)
class LatentKey(KernelKey):
    """What distinguishes one compiled kernel from another.

    ratio         1 or 2
    through_l1    of ratio 1: whether rows may go through L1
    pairs         of ratio 2: whether a warp takes two rows
    """

    kernel_name: ClassVar[str] = "compressor.latent"
    tuning: ClassVar[tuple[str, ...]] = ("through_l1", "pairs")
    ratio: int = 1
    through_l1: bool = False
    pairs: bool = False

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
    is_many = rows > FEW_ROWS[ratio]
    return LatentKey(arch, ratio, through_l1=ratio == 1 and is_many, pairs=ratio == 2 and is_many)


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
