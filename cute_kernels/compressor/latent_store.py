# SPDX-License-Identifier: Apache-2.0
"""Kernel of rope_quant_insert and k_norm_rope_store: a warp takes a row.

    columns of a lane      128 * i + 4 * lane .. + 3, i = 0 to 3 of an entry, 0 of an index key
    of V4.1's own records  8 * lane .. + 7 and 256 + 8 * lane .. + 7

That is how the compressor's epilogue has them (epilogue.py), or record.py, which quantize and store. Keys are normed
first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr, range_constexpr
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from cute_kernels.compressor import epilogue
from cute_kernels.compressor.call import KeyStoreCall, RopeInsertCall
from cute_kernels.dsl import convert, ptx, reduce, transforms
from cute_kernels.dsl.tensor import address, length
from cute_kernels.formats import (
    FORMATS,
    FP8_DS_MLA,
    INDEX_DIM,
    INDEXER_FP8,
    INDEXER_MXFP4,
    ROPE_DIM,
    V41_FORMATS,
    V41_KV_CACHES,
)
from cute_kernels.kv_cache import record
from cute_kernels.models import ModelConfig, latent_ratios
from cute_kernels.numerics import E2M1_FLOOR
from cute_kernels.runtime.arch import arch_number, arch_of
from cute_kernels.runtime.compile import KernelKey
from cute_kernels.runtime.compile import launch as launch_key
from cute_kernels.runtime.key import OpKernel

WARPS = 4
"""Per CTA."""

VECTOR = 128
"""Columns that a warp has at once."""

V41 = tuple(fmt.id for fmt in V41_FORMATS)


class Rows(NamedTuple):
    """Rows to store: address and stride in bytes, their number; addresses of positions and slots; ratio - 1."""

    rows: Int64
    stride: Int64
    total: Int32
    positions: Int64
    slots: Int64
    rest: Int32


class LatentStoreKernel:
    """Entry point: (slots, address and row stride of the rows, address of their positions, ratio;
    epilogue.numbers; use_pdl, stream)."""

    def __init__(self, key: LatentStoreKey) -> None:
        fmt = FORMATS[key.kv_format]
        self.arch, self.kv_format = key.arch, key.kv_format
        self.is_v41 = key.kv_format in V41
        self.vectors = fmt.dim // VECTOR
        self.is_key = fmt.dim == INDEX_DIM
        self.store: Any = None
        if not self.is_v41:
            self.store = epilogue.EntryStore(key.kv_format, False, "ties_to_even", False, key.arch, E2M1_FLOOR)
        self.has_dependency = arch_number(key.arch) >= ptx.DEPENDENT_LAUNCH_ARCH
        op = "k_norm_rope_store" if self.is_key else "rope_quant_insert"
        self.name = f"{op}_{key.kv_format.split('/')[0]}"

    @cute.jit
    def __call__(
        self,
        slots: cute.Tensor,
        rows: Int64,
        stride: Int64,
        positions: Int64,
        ratio: Int32,
        pool: Int64,
        page_stride: Int64,
        page_rows: Int32,
        capacity: Int32,
        weight: Int64,
        table: Int64,
        table_stride: Int64,
        table_rows: Int32,
        fp8_scale: Int64,
        eps: Float32,
        use_pdl: Boolean,
        stream: cuda.CUstream,
    ) -> None:
        self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        angles = table, table_stride, table_rows
        cache = epilogue.make_cache(pool, page_stride, page_rows, capacity, weight, *angles, fp8_scale, eps)
        count = length(slots, 0)
        self.kernel(Rows(rows, stride, count, positions, address(slots), ratio - 1), cache).launch(
            grid=[cute.ceil_div(count, WARPS), 1, 1],
            block=[WARPS * 32, 1, 1],
            stream=stream,
            use_pdl=use_pdl if const_expr(self.has_dependency) else False,
        )

    @cute.kernel
    def kernel(self, rows: Rows, cache: epilogue.Cache) -> None:
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        number = cta * WARPS + cute.arch.make_warp_uniform(thread // 32)
        # rows past the end load the last one again, and store nothing
        row = Int64(cutlass.min(number, rows.total - 1))
        lane = cute.arch.lane_idx()
        column = ptx.again(lane * 4)  # whose range nobody knows: no predicate of a store becomes a constant
        if const_expr(self.has_dependency):
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
        source = rows.rows + row * rows.stride
        words = self.load(source, lane)
        slot = ptx.load_global_s64_in_order(rows.slots + row * 8)
        position = ptx.load_global_s64_in_order(rows.positions + row * 8)
        rest = Int64(rows.rest)
        acts = (number < rows.total) & (position >= 0) & (position & rest == rest)
        slot = slot if acts else Int64(-1)
        if const_expr(self.is_v41):
            self.write_v41(cache, words, slot, position - rest, lane)
        else:
            cos, sin = self.load_angles(cache, position - rest, lane)
            if const_expr(self.is_key):
                words[0] = self.norm(cache, words[0], lane)
            for i in range_constexpr(self.vectors):
                low, high = words[i]
                if const_expr(i == self.vectors - 1):
                    low, high = self.rotate(words[i], cos, sin, lane)
                self.store.write(cache, i * VECTOR + column, low, high, slot)

    def load(self, source: Any, lane: Any) -> list[Any]:
        """A lane's words of the row at that address, by vectors or by halves."""
        if self.is_v41:
            halves = (0, record.HALF_ROW)
            return [ptx.load_global_128_in_order(source + Int64(lane * 16) + half) for half in halves]
        source += Int64(lane * 8)
        return [ptx.load_global_64_in_order(source + i * (2 * VECTOR)) for i in range(self.vectors)]

    @cute.jit
    def write_v41(self, cache: epilogue.Cache, words: Any, slot: Any, position: Any, lane: Any) -> None:
        """Rotate a lane's second half, if it has rotated columns, quantize both and store them at `slot`."""
        row = cache.table + transforms.table_row(position, cache.table_rows) * cache.table_stride
        row += Int64(lane % 8 * 16)
        angles = [
            ptx.load_global_64_again(row + half + part) for half in (0, transforms.HALF_TABLE_BYTES) for part in (0, 8)
        ]
        cos, sin = (*angles[0], *angles[1]), (*angles[2], *angles[3])
        is_rope = lane >= record.ROPE_LANE
        turned = []
        for i in range_constexpr(4):
            even, odd = convert.bf16_low(words[1][i]), convert.bf16_high(words[1][i])
            pair = transforms.rotate_pair(even, odd, cos[i].bitcast(Float32), sin[i].bitcast(Float32))
            turned.append(ptx.bf16x2(*pair) if is_rope else words[1][i])
        is_inside = (slot >= 0) & (slot < Int64(cache.capacity))
        page, inside = divmod(Int32(slot if is_inside else Int64(0)), cache.divisor)
        start = cache.pool + Int64(page) * cache.page_stride
        places = record.places_v41(start, inside, cache.page_rows, self.kv_format)
        record.store_v41(lane, places, (*words[0], *turned), is_inside, self.kv_format, self.arch)

    def load_angles(self, cache: epilogue.Cache, position: Any, lane: Any) -> tuple[Any, Any]:
        """Cosines and sines of a lane's last two pairs; lanes whose columns are not rotated read the first ones."""
        row = cache.table + transforms.table_row(position, cache.table_rows) * cache.table_stride
        row += Int64(cutlass.max(lane * 4 - (VECTOR - ROPE_DIM), 0)) * 2
        return ptx.load_global_64_again(row), ptx.load_global_64_again(row + transforms.HALF_TABLE_BYTES)

    def norm(self, cache: epilogue.Cache, words: Any, lane: Any) -> tuple[Any, Any]:
        """Four columns of a key, normed and rounded to bf16."""
        weight = convert.bf16_floats(ptx.load_global_64_again(cache.weight + Int64(lane * 8)))
        x = convert.bf16_floats(words)
        factor = self.store.factor(cache, reduce.lanes_sum(reduce.square_sum(x)))
        normed = [ptx.mul_rn(ptx.mul_rn(x[i], factor), weight[i]) for i in range(4)]
        return ptx.bf16x2(normed[0], normed[1]), ptx.bf16x2(normed[2], normed[3])

    @cute.jit
    def rotate(self, words: Any, cos: Any, sin: Any, lane: Any) -> tuple[Any, Any]:
        """Two pairs rotated and rounded to bf16, in lanes that have rotated columns."""
        turned = []
        for i in range_constexpr(2):
            even, odd = convert.bf16_low(words[i]), convert.bf16_high(words[i])
            pair = transforms.rotate_pair(even, odd, cos[i].bitcast(Float32), sin[i].bitcast(Float32))
            turned.append(ptx.bf16x2(*pair) if lane >= (VECTOR - ROPE_DIM) // 4 else words[i])
        return turned[0], turned[1]


@dataclass(frozen=True)
class LatentStoreKey(KernelKey):
    """What distinguishes one compiled kernel from another: the format of the records."""

    kernel_name: ClassVar[str] = "compressor.latent_store"
    kv_format: str = FP8_DS_MLA.id

    @property
    def instructions(self) -> tuple[str, ...]:
        if self.kv_format in epilogue.MXFP4:
            return convert.e2m1_instructions(self.arch)
        return convert.e4m3_instructions(self.arch)

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        slots = make_fake_tensor(Int64, (cute.sym_int(),), stride=(1,))
        rows = slots, Int64(0), Int64(0), Int64(0), Int32(1)
        stream = make_fake_stream(use_tvm_ffi_env_stream=True)
        return LatentStoreKernel(self), (*rows, *epilogue.fake_numbers(), Boolean(False), stream)


def entry_keys(config: ModelConfig, tp: int, arch: str) -> list[LatentStoreKey]:
    """Of all formats that entries may have."""
    entries = dict.fromkeys(fmt.id for _, fmt in V41_KV_CACHES.values()) if latent_ratios(config) else ()
    return [LatentStoreKey(arch, fmt) for fmt in entries]


def index_keys(config: ModelConfig, tp: int, arch: str) -> list[LatentStoreKey]:
    """Of either format of the indexer's cache."""
    formats = (INDEXER_FP8, INDEXER_MXFP4) if latent_ratios(config) else ()
    return [LatentStoreKey(arch, fmt.id) for fmt in formats]


@cache
def _key(device_index: int, kv_format: str) -> LatentStoreKey:
    return LatentStoreKey(arch_of(device_index), kv_format)


def why_not_insert(call: RopeInsertCall) -> str:
    """Why no kernel can take a (checked) call; empty if one can."""
    return _why_not(call, call.latent, "latent", None)


def why_not_store(call: KeyStoreCall) -> str:
    """Why no kernel can take a (checked) call; empty if one can."""
    return _why_not(call, call.k, "k", call.norm_weight)


def _why_not(call: RopeInsertCall | KeyStoreCall, rows: Any, name: str, weight: Any) -> str:
    least = 16 if call.kv_format in V41 else 8
    if rows.data_ptr() % least or (rows.shape[0] > 1 and rows.stride(0) % (least // 2)):
        return (
            f"rows of {name} must be {least}-byte aligned, got address {rows.data_ptr():#x} and strides "
            f"{tuple(rows.stride())}"
        )
    return epilogue.why_not(call.kv_cache, call.cos_sin_cache, weight, call.kv_format)


def launch_insert(call: RopeInsertCall) -> None:
    """Run the kernel on the current stream of the cache's device."""
    _launch(call, call.latent, None, 0.0)


def launch_store(call: KeyStoreCall) -> None:
    """Run the kernel on the current stream of the cache's device."""
    _launch(call, call.k, call.norm_weight, call.eps)


def _launch(call: RopeInsertCall | KeyStoreCall, rows: Any, weight: Any, eps: float) -> None:
    if call.slot_mapping.shape[0] == 0:
        return
    device_index = call.kv_cache.device.index
    launch_key(
        _key(device_index, call.kv_format),
        device_index,
        call.slot_mapping,
        rows.data_ptr(),
        rows.stride(0) * 2,
        call.positions.data_ptr(),
        call.compress_ratio,
        *epilogue.numbers(call.kv_cache, call.cos_sin_cache, weight, None, eps),
        call.use_pdl,
    )


INSERT = OpKernel(launch_insert, why_not_insert, entry_keys)
STORE = OpKernel(launch_store, why_not_store, index_keys)
