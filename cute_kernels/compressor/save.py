# SPDX-License-Identifier: Apache-2.0
"""Kernel of save_partial_states: one warp moves some columns of a row, of its kv half and of its score half.

    a row of the state cache    kv: width x fp32                    score + bias: width x fp32
    warp s of the row           columns 256 * s .. + 255            the same columns
    lane                        4 * lane .. + 3 and 128 + 4 * lane .. + 3, in both halves

A row of 1024, 512 or 256 columns takes 4, 2 or 1 warps. Everything is moved 16 bytes a lane. Where the columns are an
odd multiple of 128, as in a row of 128, a warp has 128 of them.

The bias row depends on the position, so its load has to wait for that. In a short call all other loads are under way by
then. A long one stores kv before it asks for score: what counts there is not the way of one row but how many bytes of
all rows are under way in an order that suits the memory, and half a row at a time suits it better.
Stores have a predicate and no branch around them: the assembler would move the loads of a row behind the branch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr, range_constexpr
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from cute_kernels.compressor.call import SaveCall
from cute_kernels.dsl import ptx
from cute_kernels.dsl.tensor import address, length, stride_bytes
from cute_kernels.formats import HEAD_DIM, INDEX_DIM, compressor_state
from cute_kernels.models import ModelConfig
from cute_kernels.runtime.arch import arch_number, arch_of
from cute_kernels.runtime.compile import KernelKey
from cute_kernels.runtime.compile import launch as launch_key
from cute_kernels.runtime.key import OpKernel

VECTOR_BYTES = 512
"""Bytes of a row that a warp moves with one instruction."""

WARPS = 4
"""Per CTA, where whole rows make that many."""

MANY_COLUMNS = 2**21
"""Of all rows of a call together, kv's alone: from here on, or with rows of fewer than 512 from twice as many on, kv is
stored before score is loaded, and both may go through L1. That is faster in long calls and slower in short ones
(perf/log/memory_bound.md)."""

MOST_WARPS = 32
"""What a CTA can have, and so what a row can take."""


@dataclass(frozen=True)
class SaveKey(KernelKey):
    """What distinguishes one compiled kernel from another.

    width         columns of the kv half, and of the score half: a multiple of 128 * vectors
    vectors       of 128 columns per warp: 1 or 2 (the picture above)
    warps         per CTA, a multiple of width / (128 * vectors)
    rows          per warp, all in flight together
    kv_first      whether kv is stored before score is loaded
    through_l1    whether rows may go through L1
    """

    kernel_name: ClassVar[str] = "compressor.save"
    width: int
    vectors: int = 2
    warps: int = WARPS
    rows: int = 1
    kv_first: bool = False
    through_l1: bool = False

    @property
    def instructions(self) -> tuple[str, ...]:
        return "ld.global.128", "st.global.128"

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        def matrix() -> Any:
            return make_fake_tensor(Float32, (cute.sym_int(), self.width), stride=(cute.sym_int64(), 1))

        def vector() -> Any:
            return make_fake_tensor(Int64, (cute.sym_int(),), stride=(1,))

        numbers = (Int64(0), Int64(0), Int32(0), Int32(1), Int32(1))
        stream = make_fake_stream(use_tvm_ffi_env_stream=True)
        return SaveKernel(self), (matrix(), matrix(), matrix(), vector(), vector(), *numbers, stream)


class SaveKernel:
    """Entry point: (kv, score, ape, positions, slots, state cache address, page stride in bytes, rows of the pool, rows
    of a page, compress ratio, stream)."""

    def __init__(self, key: SaveKey) -> None:
        self.segments = key.width // (128 * key.vectors)
        self.half_row = key.width * 4
        self.warps = key.warps
        self.rows = key.rows
        self.vectors = key.vectors
        self.kv_first = key.kv_first
        self.through_l1 = key.through_l1
        self.rows_at_once = key.warps // self.segments
        self.has_dependency = arch_number(key.arch) >= ptx.DEPENDENT_LAUNCH_ARCH
        form = f"v{key.vectors}w{key.warps}r{key.rows}" + "_kv" * key.kv_first + "_l1" * key.through_l1
        self.name = f"save_partial_states_{key.width}_{form}"

    @cute.jit
    def __call__(
        self,
        kv: cute.Tensor,
        score: cute.Tensor,
        ape: cute.Tensor,
        positions: cute.Tensor,
        slots: cute.Tensor,
        pool: Int64,
        page_stride: Int64,
        capacity: Int32,
        block_size: Int32,
        ratio: Int32,
        stream: cuda.CUstream,
    ) -> None:
        self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        count = length(slots, 0)
        page_rows = cute.fast_divmod_create_divisor_v2(block_size)
        kernel = self.kernel(
            address(kv),
            stride_bytes(kv, 0),
            address(score),
            stride_bytes(score, 0),
            address(ape),
            stride_bytes(ape, 0),
            address(positions),
            address(slots),
            count,
            pool,
            page_stride,
            capacity,
            ratio,
            page_rows,
        )
        ctas = cute.ceil_div(count, self.rows_at_once * self.rows)
        kernel.launch(grid=[ctas, 1, 1], block=[self.warps * 32, 1, 1], stream=stream)

    @cute.kernel
    def kernel(
        self,
        kv: Int64,
        kv_stride: Int64,
        score: Int64,
        score_stride: Int64,
        ape: Int64,
        ape_stride: Int64,
        positions: Int64,
        slots: Int64,
        count: Int32,
        pool: Int64,
        page_stride: Int64,
        capacity: Int32,
        ratio: Int32,
        page_rows: cute.FastDivmodDivisorV2,
    ) -> None:
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(thread // 32)
        # where a lane's first four columns lie in a row
        column = Int64((warp % self.segments) * (VECTOR_BYTES * self.vectors) + (thread % 32) * 16)
        if const_expr(self.has_dependency):
            cute.arch.griddepcontrol_wait()

        loaded = []
        for i in range_constexpr(self.rows):
            row = (cta * self.rows + i) * self.rows_at_once + warp // self.segments
            # rows past the end load the last row again, and store nothing
            source = Int64(cutlass.min(row, count - 1))
            kv_row = kv + source * kv_stride + column
            score_row = score + source * score_stride + column
            scores = None
            if const_expr(self.kv_first):
                position, slot = self.load_numbers(positions, slots, source)
                values = self.load_run(kv_row)
            else:
                values, scores = self.load_run(kv_row), self.load_run(score_row)
                # the loads that others wait for come last: what waits cannot hold up a load that is under way
                position, slot = self.load_numbers(positions, slots, source)
            loaded.append((slot if row < count else Int64(-1), position, values, scores, score_row))

        for i in range_constexpr(self.rows):
            slot, position, values, scores, score_row = loaded[i]
            is_inside = slot >= 0 and slot < Int64(capacity)
            page, row = divmod(Int32(slot if is_inside else Int64(0)), page_rows)
            target = pool + Int64(page) * page_stride + Int64(row) * (2 * self.half_row) + column
            # the ratio is a power of two, so this is the remainder that is never negative
            bias_row = Int32(position) & (ratio - 1)
            bias = self.load_bias(ape + Int64(bias_row) * ape_stride + column)
            self.store_run(target, values, is_inside)
            if const_expr(self.kv_first):
                scores = self.load_run(score_row)
            self.store_run(target + self.half_row, self.add(scores, bias), is_inside)

    def load_numbers(self, positions: Any, slots: Any, row: Any) -> Any:
        """Position and slot of a row."""
        return ptx.load_global_s64_in_order(positions + row * 8), ptx.load_global_s64_in_order(slots + row * 8)

    def load_run(self, start: Any) -> Any:
        """A lane's columns of one half of a row, as words."""
        words: list[Any] = []
        for vector in range(self.vectors):
            words += ptx.load_global_128_in_order(start + vector * VECTOR_BYTES, self.through_l1)
        return words

    def load_bias(self, start: Any) -> Any:
        """A lane's columns of a bias row, as words."""
        words: list[Any] = []
        for vector in range(self.vectors):
            words += ptx.load_global_128_again(start + vector * VECTOR_BYTES)
        return words

    def store_run(self, start: Any, words: Any, predicate: Any) -> None:
        for vector in range(self.vectors):
            ptx.store_global_128(start + vector * VECTOR_BYTES, words[4 * vector : 4 * vector + 4], predicate)

    def add(self, words: Any, bias: Any) -> Any:
        """fp32 sums, as words."""
        return [(a.bitcast(Float32) + b.bitcast(Float32)).bitcast(Int32) for a, b in zip(words, bias, strict=True)]


def vectors_for(width: int) -> int:
    """Of 128 columns per warp; width: a multiple of 128."""
    return 2 if width % 256 == 0 else 1


def key_for(arch: str, width: int, rows: int) -> SaveKey:
    """The kernel that serves calls of so many rows of this width.

    A CTA takes whole rows, with at most WARPS warps or with one row.
    """
    vectors = vectors_for(width)
    segments = width // (128 * vectors)
    warps = segments * max(1, WARPS // segments)
    long = is_long(rows, width)
    return SaveKey(arch, width, vectors, warps, kv_first=long, through_l1=long)


def is_long(rows: int, width: int) -> bool:
    """Whether a call of so many rows of this width counts as long."""
    return rows * width >= (MANY_COLUMNS if width >= 512 else 2 * MANY_COLUMNS)


def deployment_keys(config: ModelConfig, tp: int, arch: str) -> list[SaveKey]:
    """For each compressor of the model, ratios 4 and 128 and the indexer's beside ratio 4: few rows or many."""
    compressors = [(HEAD_DIM, ratio) for ratio in sorted(set(config.compress_ratios) - {1})]
    if 4 in config.compress_ratios:
        compressors.append((INDEX_DIM, 4))
    widths = [compressor_state(dim, ratio).width for dim, ratio in compressors]
    return [key_for(arch, width, rows) for width in widths for rows in (1, 2 * MANY_COLUMNS)]


@cache
def _key(device_index: int, width: int, long: bool) -> SaveKey:
    return key_for(arch_of(device_index), width, 2 * MANY_COLUMNS if long else 1)


def _aligned(matrix: Any) -> bool:
    return matrix.data_ptr() % 16 == 0 and (matrix.shape[0] <= 1 or matrix.stride(0) % 4 == 0)


def why_not(call: SaveCall) -> str:
    """Why no kernel can take a (checked) call; empty if one can."""
    width = call.kv.shape[1]
    if width % 128 or width // (128 * vectors_for(width)) > MOST_WARPS:
        return f"the columns of kv must be a multiple of 128 that {MOST_WARPS} warps can take, got {width}"
    for name, matrix, what in (
        ("kv", call.kv, "rows"),
        ("score", call.score, "rows"),
        ("ape", call.ape, "rows"),
        ("state_cache", call.state_cache, "pages"),
    ):
        if not _aligned(matrix):
            return (
                f"{what} of {name} must be 16-byte aligned, got address {matrix.data_ptr():#x} and strides "
                f"{tuple(matrix.stride())}"
            )
    if max(call.state_cache.shape[0], 1) * call.block_size >= 2**31:
        return f"state_cache must have fewer than 2^31 rows, got {call.state_cache.shape[0]} pages of {call.block_size}"
    return ""


def launch(call: SaveCall) -> None:
    """Run the kernel on the current stream of kv's device."""
    rows, width = call.slot_mapping.shape[0], call.kv.shape[1]
    if rows == 0:
        return
    device_index = call.kv.device.index
    launch_key(
        _key(device_index, width, is_long(rows, width)),
        device_index,
        call.kv,
        call.score,
        call.ape,
        call.positions,
        call.slot_mapping,
        call.state_cache.data_ptr(),
        call.state_cache.stride(0) * 4,
        call.state_cache.shape[0] * call.block_size,
        call.block_size,
        call.compress_ratio,
    )


KERNEL = OpKernel(launch, why_not, deployment_keys)
