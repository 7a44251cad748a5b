# SPDX-License-Identifier: Apache-2.0
"""Kernel of build_step_metadata: all rows, requests, windows and lists of a step in one grid.

CTAs of WARPS warps, in this order; no two of them write the same bytes, and all read only arguments:

    rows       a thread per row      request, position; of each kind slots, valid, visible, lengths
    requests   a thread per request  query_start_loc, seq_lens, min_restart, gather_lens
    windows    a warp per decode row its windows' indices, of one kind after the other
    lists      a warp per row and 512 columns: what a layer of ratio 128 attends to

Whoever needs a row's request finds it by bisection of the starts, which come from L1 after the first few.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, const_expr, range_constexpr
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from cute_kernels.dsl import ptx
from cute_kernels.dsl.paging import LANES, store_run
from cute_kernels.dsl.tensor import address
from cute_kernels.indices.call import KIND_BYTES, KIND_OFFSETS, SHARED_OFFSETS, StepCall
from cute_kernels.indices.launching import MOST_ROWS, WARPS, too_many_entries
from cute_kernels.models import ModelConfig
from cute_kernels.runtime.arch import arch_number, arch_of
from cute_kernels.runtime.compile import KernelKey
from cute_kernels.runtime.compile import launch as launch_key
from cute_kernels.runtime.key import OpKernel

RATIO_BITS = (0, 2, 7)
"""Of each kind: 2^n tokens make an entry."""

KEYS_KIND = 1
"""The kind whose entries an indexer scores."""

THREADS = WARPS * LANES
RUN = 4
"""Neighbouring columns of a list that a lane writes at once."""

GROUPS = 4
"""Of 32 runs that a warp writes of a list."""

SEGMENT = GROUPS * LANES * RUN


@dataclass(frozen=True)
class StepKey(KernelKey):
    """What distinguishes one compiled kernel from another.

    width   neighbouring columns of a window that a lane writes at once: 4 or 1
    """

    kernel_name: ClassVar[str] = "indices.step_metadata"
    width: int = 4

    @property
    def instructions(self) -> tuple[str, ...]:
        return ("st.global.128",)

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        buffer = make_fake_tensor(cutlass.Uint8, (cute.sym_int(),), stride=(1,), assumed_align=16)
        table = Int64(0), Int64(0), Int32(0)
        arrays = *(Int64(0) for _ in range(4)), *(Int64(0) for _ in range(4))
        numbers = (Int32(0),) * 8
        pages = (Int32(0),) * 5
        kinds = (Int64(0), *table), *((Int64(0), *table * 3, Int32(0)) for _ in range(2))
        stream = make_fake_stream(use_tvm_ffi_env_stream=True)
        flat = (number for kind in kinds for number in kind)
        return StepKernel(self), (buffer, *arrays, *numbers, *pages, *flat, Boolean(False), stream)


class Table(NamedTuple):
    """A block table: address, bytes from row to row, rows, columns; pages have 2^bits rows. All zero: there is none."""

    address: Any
    stride: Any
    rows: Any
    columns: Any
    bits: Any

    @cute.jit
    def look_up(self, request: Any, entry: Any, is_wanted: Any) -> tuple[Any, Any]:
        """(page, row of the page) of an int32 entry of a request, which may be any number; the page is negative if
        there is none or it is not wanted. The load may be under way while others are."""
        column = entry >> self.bits
        is_mapped = is_wanted and entry >= 0 and column < self.columns and request >= 0 and request < self.rows
        place = self.address + Int64(request) * self.stride + Int64(column) * 4
        page = ptx.load_global_s32_where(is_mapped, place, is_shared=True)
        return page, entry & ((Int32(1) << self.bits) - 1)

    def slot(self, found: tuple[Any, Any]) -> Any:
        """int64 slot of what `look_up` found, -1 if there is none."""
        page, row = found
        return ptx.max_s64((Int64(page) << Int64(self.bits)) + Int64(row), Int64(-1))

    def slot_index(self, found: tuple[Any, Any]) -> Any:
        """int32 slot of what `look_up` found, -1 if there is none or int32 cannot name it."""
        page, row = found
        named_pages = Int32(Int64(2**31) >> Int64(self.bits))
        return ptx.value_below(page, named_pages, (page << self.bits) + row)


class Kind(NamedTuple):
    """One kind of layers. start: address of its arrays, 0 if the step has no such layers."""

    start: Any
    swa: Table
    compressed: Table
    state: Table
    topk: Any


class Batch(NamedTuple):
    """Addresses of starts [requests + 1] and seq_lens [requests], and of min_restart [requests] and key_starts
    [requests + 1] or 0."""

    starts: Any
    seq_lens: Any
    min_restart: Any
    key_starts: Any
    requests: Any

    @cute.jit
    def find(self, row: Any) -> tuple[Any, Any]:
        """(request, position) of a row: int32, -1 where there is none."""
        first, end = Int32(0), self.requests
        while first < end:
            middle = (first + end) >> 1
            bound = ptx.load_global_s32_in_order(self.starts + Int64(middle + 1) * 4, is_shared=True)
            first = middle + 1 if bound <= row else first
            end = end if bound <= row else middle
        is_known = first < self.requests
        offset = Int64(first) * 4
        begin = ptx.load_global_s32_where(is_known, self.starts + offset, is_shared=True)
        stop = ptx.load_global_s32_where(is_known, self.starts + offset + 4, is_shared=True)
        seq_len = ptx.load_global_s32_where(is_known, self.seq_lens + offset, is_shared=True)
        is_known = is_known and begin <= row
        position = Int32(ptx.max_s64(Int64(seq_len) - Int64(stop) + Int64(row), Int64(-1)))
        return first if is_known else Int32(-1), position if is_known else Int32(-1)


class Sizes(NamedTuple):
    """Numbers of a step. segments: of SEGMENT columns in a list, as a divisor."""

    tokens: Any
    num_decodes: Any
    decode_tokens: Any
    window: Any
    room: Any
    columns: Any
    segments: cute.FastDivmodDivisorV2


class Lists(NamedTuple):
    """Addresses and row strides in bytes of the lists of decode and of prefill rows; address 0: nobody wants them."""

    decode: Any
    decode_stride: Any
    prefill: Any
    prefill_stride: Any


class StepKernel:
    """Entry point: (buffer, addresses of starts, seq_lens, min_restart and key_starts, lists, requests, sizes,
    exponents of the pages' rows [window, compressed 4, state 4, compressed 128, state 128], of each kind start,
    tables as (address, bytes from row to row, columns) and topk, whether to launch as a dependent of the kernel before,
    stream)."""

    def __init__(self, key: StepKey) -> None:
        self.width = key.width
        self.has_dependency = arch_number(key.arch) >= ptx.DEPENDENT_LAUNCH_ARCH
        self.name = f"build_step_metadata_c{key.width}"

    @cute.jit
    def __call__(
        self,
        buffer: cute.Tensor,
        starts: Int64,
        seq_lens: Int64,
        min_restart: Int64,
        key_starts: Int64,
        decode_lists: Int64,
        decode_stride: Int64,
        prefill_lists: Int64,
        prefill_stride: Int64,
        requests: Int32,
        tokens: Int32,
        num_decodes: Int32,
        decode_tokens: Int32,
        window: Int32,
        room: Int32,
        columns: Int32,
        segments: Int32,
        swa_bits: Int32,
        c4_bits: Int32,
        c4_state_bits: Int32,
        c128_bits: Int32,
        c128_state_bits: Int32,
        start: Int64,
        swa: Int64,
        swa_stride: Int64,
        swa_columns: Int32,
        c4_start: Int64,
        c4_swa: Int64,
        c4_swa_stride: Int64,
        c4_swa_columns: Int32,
        c4_compressed: Int64,
        c4_compressed_stride: Int64,
        c4_compressed_columns: Int32,
        c4_state: Int64,
        c4_state_stride: Int64,
        c4_state_columns: Int32,
        c4_topk: Int32,
        c128_start: Int64,
        c128_swa: Int64,
        c128_swa_stride: Int64,
        c128_swa_columns: Int32,
        c128_compressed: Int64,
        c128_compressed_stride: Int64,
        c128_compressed_columns: Int32,
        c128_state: Int64,
        c128_state_stride: Int64,
        c128_state_columns: Int32,
        c128_topk: Int32,
        use_pdl: Boolean,
        stream: cuda.CUstream,
    ) -> None:
        self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        none = Table(Int64(0), Int64(0), Int32(0), Int32(0), Int32(0))
        kinds = (
            Kind(start, Table(swa, swa_stride, requests, swa_columns, swa_bits), none, none, Int32(0)),
            Kind(
                c4_start,
                Table(c4_swa, c4_swa_stride, requests, c4_swa_columns, swa_bits),
                Table(c4_compressed, c4_compressed_stride, requests, c4_compressed_columns, c4_bits),
                Table(c4_state, c4_state_stride, requests, c4_state_columns, c4_state_bits),
                c4_topk,
            ),
            Kind(
                c128_start,
                Table(c128_swa, c128_swa_stride, requests, c128_swa_columns, swa_bits),
                Table(c128_compressed, c128_compressed_stride, requests, c128_compressed_columns, c128_bits),
                Table(c128_state, c128_state_stride, requests, c128_state_columns, c128_state_bits),
                c128_topk,
            ),
        )
        divisor = cute.fast_divmod_create_divisor_v2(cutlass.max(segments, Int32(1)))
        row_ctas = cute.ceil_div(tokens, THREADS)
        request_ctas = cute.ceil_div(requests + 1, THREADS)
        window_ctas = cute.ceil_div(decode_tokens, WARPS)
        list_ctas = cute.ceil_div(tokens * segments, WARPS)
        kernel = self.kernel(
            address(buffer),
            Batch(starts, seq_lens, min_restart, key_starts, requests),
            Sizes(tokens, num_decodes, decode_tokens, window, room, columns, divisor),
            Lists(decode_lists, decode_stride, prefill_lists, prefill_stride),
            *kinds,
            row_ctas,
            row_ctas + request_ctas,
            row_ctas + request_ctas + window_ctas,
        )
        kernel.launch(
            grid=[row_ctas + request_ctas + window_ctas + list_ctas, 1, 1],
            block=[THREADS, 1, 1],
            stream=stream,
            use_pdl=use_pdl if const_expr(self.has_dependency) else False,
        )

    @cute.jit
    def write_row(self, row: Any, buffer: Any, batch: Batch, sizes: Sizes, kinds: Any) -> None:
        """All that a row has in vectors."""
        request, position = batch.find(row)
        room, offset = Int64(sizes.room), Int64(row)
        ptx.store_global_s64(buffer + room * SHARED_OFFSETS["positions"] + offset * 8, Int64(position))
        ptx.store_global_s32(buffer + room * SHARED_OFFSETS["token_to_req_indices"] + offset * 4, request)
        is_decode = row < sizes.decode_tokens
        for number in range_constexpr(3):
            kind = kinds[number]
            if kind.start != 0:
                bits = RATIO_BITS[number]
                entries = (position + 1) >> bits
                closes = position >= 0 and ((position + 1) & ((1 << bits) - 1)) == 0
                own_page = kind.swa.look_up(request, position, True)
                if const_expr(bits > 0):
                    entry_page = kind.compressed.look_up(request, entries - 1, closes)
                    state_page = kind.state.look_up(request, position, True)
                slot = kind.swa.slot(own_page)
                is_valid = slot >= 0
                ptx.store_global_s64(kind.start + room * KIND_OFFSETS["slot_mapping"] + offset * 8, slot)
                place = kind.start + room * KIND_OFFSETS["is_valid_token"] + offset
                ptx.store_global_8(place, Int32(1) if is_valid else Int32(0))
                length = cutlass.min(position, sizes.window - 1) + 1 if is_valid else Int32(0)
                place = kind.start + room * KIND_OFFSETS["decode_swa_lens"] + offset * 4
                ptx.store_global_s32(place, length, is_decode)
                if const_expr(bits > 0):
                    entry = kind.compressed.slot(entry_page)
                    place = kind.start + room * KIND_OFFSETS["compressed_slot_mapping"] + offset * 8
                    ptx.store_global_s64(place, entry if is_valid else Int64(-1))
                    place = kind.start + room * KIND_OFFSETS["state_slot_mapping"] + offset * 8
                    ptx.store_global_s64(place, kind.state.slot(state_page))
                    visible = entries if is_valid else Int32(0)
                    ptx.store_global_s32(kind.start + room * KIND_OFFSETS["visible"] + offset * 4, visible)
                    place = kind.start + room * KIND_OFFSETS["decode_topk_lens"] + offset * 4
                    ptx.store_global_s32(place, cutlass.min(visible, kind.topk), is_decode)
                if const_expr(number == KEYS_KIND):
                    if batch.key_starts != 0:
                        place = batch.key_starts + Int64(request) * 4
                        key = ptx.load_global_s32_where(request >= 0, place, is_shared=True)
                        key = key if request >= 0 else Int32(0)
                        place = kind.start + room * KIND_OFFSETS["row_key_starts"] + offset * 4
                        ptx.store_global_s32(place, key)
                        place = kind.start + room * KIND_OFFSETS["row_key_ends"] + offset * 4
                        ptx.store_global_s32(place, key + visible)

    @cute.jit
    def write_request(self, request: Any, buffer: Any, batch: Batch, sizes: Sizes, kinds: Any) -> None:
        """All that a request has, and behind the last one the end of its rows and keys."""
        room, offset = Int64(sizes.room), Int64(request) * 4
        is_request = request < batch.requests
        begin = ptx.load_global_s32_in_order(batch.starts + offset, is_shared=True)
        stop = ptx.load_global_s32_where(is_request, batch.starts + offset + 4, is_shared=True)
        seq_len = ptx.load_global_s32_where(is_request, batch.seq_lens + offset, is_shared=True)
        is_given = is_request and batch.min_restart != 0
        given = ptx.load_global_s32_where(is_given, batch.min_restart + offset, is_shared=True)
        count = stop - begin
        before = seq_len - count
        restart = cutlass.max(before, Int32(0)) if request < sizes.num_decodes else seq_len
        restart = given if is_given else restart
        gathered = count + cutlass.min(before, sizes.window - 1)
        ptx.store_global_s32(buffer + room * SHARED_OFFSETS["query_start_loc"] + offset, begin)
        ptx.store_global_s32(buffer + room * SHARED_OFFSETS["seq_lens"] + offset, seq_len, is_request)
        ptx.store_global_s32(buffer + room * SHARED_OFFSETS["min_restart"] + offset, restart, is_request)
        ptx.store_global_s32(buffer + room * SHARED_OFFSETS["gather_lens"] + offset, gathered, is_request)
        if batch.key_starts != 0:
            key = ptx.load_global_s32_in_order(batch.key_starts + offset, is_shared=True)
            ptx.store_global_s32(kinds[KEYS_KIND].start + room * KIND_OFFSETS["key_starts"] + offset, key)

    @cute.jit
    def write_windows(self, row: Any, batch: Batch, sizes: Sizes, kinds: Any) -> None:
        """The indices of a decode row's windows, by a warp."""
        request, position = batch.find(row)
        lane, room = cute.arch.lane_idx(), Int64(sizes.room)
        count = cutlass.min(position, sizes.window - 1) + 1
        for number in range_constexpr(3):
            kind = kinds[number]
            if kind.start != 0:
                # what is in no page has no window
                own_page, _ = kind.swa.look_up(request, position, True)
                target = kind.start + room * KIND_BYTES + Int64(row) * Int64(sizes.window) * 4
                for start in range(0, sizes.window, LANES * self.width):
                    column = start + lane * self.width
                    first = position + 1 - count + column
                    found = [kind.swa.look_up(request, first + i, column + i < count) for i in range(self.width)]
                    slots = [(kind.swa.slot_index(one) if own_page >= 0 else Int32(-1)) for one in found]
                    store_run(target + Int64(column) * 4, slots, column < sizes.window)

    @cute.jit
    def write_list(self, item: Any, batch: Batch, sizes: Sizes, lists: Lists, kind: Kind) -> None:
        """A segment of what a row attends to in layers of ratio 128, by a warp: slots of a decode row, entries of a
        prefill row."""
        row, segment = divmod(item, sizes.segments)
        request, position = batch.find(row)
        count = cutlass.min((position + 1) >> RATIO_BITS[2], sizes.columns)
        column = segment * SEGMENT + cute.arch.lane_idx() * RUN
        if row < sizes.decode_tokens:
            if lists.decode != 0:
                target = lists.decode + Int64(row) * lists.decode_stride
                found = []
                for group in range_constexpr(GROUPS):
                    entry = column + group * (LANES * RUN)
                    found.append([kind.compressed.look_up(request, entry + i, entry + i < count) for i in range(RUN)])
                for group in range_constexpr(GROUPS):
                    entry = column + group * (LANES * RUN)
                    slots = [kind.compressed.slot_index(one) for one in found[group]]
                    store_run(target + Int64(entry) * 4, slots, entry < sizes.columns)
        else:
            if lists.prefill != 0:
                target = lists.prefill + Int64(row - sizes.decode_tokens) * lists.prefill_stride
                for group in range_constexpr(GROUPS):
                    entry = column + group * (LANES * RUN)
                    entries = [(entry + i if entry + i < count else Int32(-1)) for i in range(RUN)]
                    store_run(target + Int64(entry) * 4, entries, entry < sizes.columns)

    @cute.kernel
    def kernel(
        self,
        buffer: Int64,
        batch: Batch,
        sizes: Sizes,
        lists: Lists,
        swa: Kind,
        c4: Kind,
        c128: Kind,
        first_of_requests: Int32,
        first_of_windows: Int32,
        first_of_lists: Int32,
    ) -> None:
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(thread // LANES)
        if const_expr(self.has_dependency):
            # nothing behind starts before all is written: kernels read what describes a step ahead of their waits, and
            # those in between may let theirs start at once
            cute.arch.griddepcontrol_wait()

        if cta < first_of_requests:
            row = cta * THREADS + thread
            if row < sizes.tokens:
                self.write_row(row, buffer, batch, sizes, (swa, c4, c128))
        elif cta < first_of_windows:
            request = (cta - first_of_requests) * THREADS + thread
            if request <= batch.requests:
                self.write_request(request, buffer, batch, sizes, (swa, c4, c128))
        elif cta < first_of_lists:
            row = (cta - first_of_windows) * WARPS + warp
            if row < sizes.decode_tokens:
                self.write_windows(row, batch, sizes, (swa, c4, c128))
        else:
            item = (cta - first_of_lists) * WARPS + warp
            if item < sizes.tokens * sizes.segments.divisor:
                self.write_list(item, batch, sizes, lists, c128)


def deployment_keys(config: ModelConfig, tp: int, arch: str) -> list[StepKey]:
    """Every model's step has metadata."""
    return [StepKey(arch, _width(config.sliding_window))]


def _width(window_size: int) -> int:
    return 4 if window_size % 4 == 0 else 1


@cache
def _key(device_index: int, width: int) -> StepKey:
    return StepKey(arch_of(device_index), width)


def why_not(a: StepCall) -> str:
    """Why no kernel can take a (checked) call; empty if one can."""
    sizes = ("swa_block_size", "kv_block_size", "c4_state_block_size", "c128_state_block_size")
    for name in sizes:
        size = getattr(a, name)
        if size & (size - 1):
            return f"{name} must be a power of two, got {size}"
    if a.window_size >= MOST_ROWS:
        return f"window_size must be below {MOST_ROWS}, got {a.window_size}"
    if a.max_num_tokens * max(-(-a.c128a_columns // SEGMENT), 1) >= MOST_ROWS:
        return f"the lists must have fewer than {MOST_ROWS} segments of {SEGMENT} columns"
    if a.buffer.data_ptr() % 16:
        return "buffer must be 16-byte aligned"
    for name in ("c128a_decode_buffer", "c128a_prefill_buffer"):
        table = getattr(a, name)
        if table is not None and (table.data_ptr() % 16 or (table.shape[0] > 1 and table.stride(0) % RUN)):
            return f"rows of {name} must be 16-byte aligned"
    for kind in a.kinds():
        tables = ("swa", kind.swa, a.swa_block_size), ("state", kind.state, kind.state_block_size)
        for name, table, rows in (*tables, ("compressed", kind.compressed, a.kv_block_size // kind.ratio)):
            if table is not None:
                why = too_many_entries(f"the {name} block table of ratio {kind.ratio}", table, rows)
                if why:
                    return why
    return ""


def _bits(size: int) -> int:
    return size.bit_length() - 1


def _place(table: Any) -> tuple[int, int]:
    """Address and bytes from row to row of an int32 matrix; zeros of None."""
    return (0, 0) if table is None else (table.data_ptr(), table.stride(0) * 4)


def _table(table: Any) -> tuple[int, int, int]:
    return (0, 0, 0) if table is None else (table.data_ptr(), table.stride(0) * 4, table.shape[1])


def launch(a: StepCall) -> None:
    """Run the kernel on the current stream of the buffer's device."""
    layout, buffer = a.layout(), a.buffer.data_ptr()
    starts = a.upload.data_ptr()
    seq_lens = starts + 4 * (a.num_requests + 1) if a.seq_lens is None else a.seq_lens.data_ptr()
    has_lists = a.c128a_decode_buffer is not None or a.c128a_prefill_buffer is not None
    kinds: list[int] = []
    number = 0
    for kind in a.every_kind():
        kinds.append(0 if kind.swa is None else buffer + layout.kind_offset(number))
        number += kind.swa is not None
        kinds += _table(kind.swa)
        if kind.ratio > 1:
            kinds += *_table(kind.compressed), *_table(kind.state), kind.topk
    device_index = a.buffer.device.index
    launch_key(
        _key(device_index, _width(a.window_size)),
        device_index,
        a.buffer,
        *(starts, seq_lens, 0 if a.min_restart is None else a.min_restart.data_ptr()),
        0 if a.key_starts is None else a.key_starts.data_ptr(),
        *_place(a.c128a_decode_buffer),
        *_place(a.c128a_prefill_buffer),
        *(a.num_requests, a.num_tokens, a.num_decodes, a.num_decode_tokens, a.window_size, layout.room),
        *(a.c128a_columns, -(-a.c128a_columns // SEGMENT) if has_lists else 0),
        *(_bits(a.swa_block_size), _bits(a.kv_block_size // 4), _bits(a.c4_state_block_size)),
        *(_bits(a.kv_block_size // 128), _bits(a.c128_state_block_size)),
        *kinds,
        a.use_pdl,
    )


KERNEL = OpKernel(launch, why_not, deployment_keys)
