# SPDX-License-Identifier: Apache-2.0
"""What sparse_mla_mixed runs ahead of its kernel, where rows of e4m3 caches are converted first: one launch that makes
f16 rows of all that both caches have. f16 holds every e4m3 number.

    rows     [0, W)         the window's cache, by slot
             [W, W + C)     the compressed one

Their columns lie as prefill_mixed multiplies them (hopper/prefill_codes.py): of every 16 the pairs 0, 2, 4, 6, 1, 3, 5,
7.

A warp takes `rows` neighbouring rows: the first lanes find where they are, then all lanes move one after the other, of
each half of a row eight columns, so that loads and stores are whole sectors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float8E4M3FN, Float16, Int32, Int64, range_constexpr

from cute_kernels.dsl import ptx
from cute_kernels.dsl.entry import entry_point
from cute_kernels.dsl.paging import LANES
from cute_kernels.dsl.tensor import address, length
from cute_kernels.formats import HEAD_DIM
from cute_kernels.runtime.compile import KernelKey
from cute_kernels.sparse_mla.kernel_args import fake_cache, fake_stream
from cute_kernels.sparse_mla.params import KVCache

WARPS = 8
"""Per CTA."""

HALF = HEAD_DIM // 2
"""Columns that a warp moves at a time, eight a lane."""


class ConvertMixedArgs(NamedTuple):
    """swa, compressed   caches of sparse_mla_mixed, e4m3 [pages, rows of a page, 512]
    swa_rows, compressed_rows
                      f16, likewise, with dense pages: what their rows become
    both              1, or 0: there is no other cache than the window's
    """

    swa: cute.Tensor
    compressed: cute.Tensor
    swa_rows: cute.Tensor
    compressed_rows: cute.Tensor
    both: Int32
    stream: cuda.CUstream


class Rows(NamedTuple):
    """A cache and its number of rows; address of what they become."""

    cache: KVCache
    count: Any
    target: Any

    @classmethod
    def of(cls, cache: cute.Tensor, target: cute.Tensor) -> Rows:
        """On the host's side of the launch."""
        return cls(KVCache.of(cache), length(cache, 0) * length(cache, 1), address(target))


@dataclass(frozen=True)
class ConvertMixedKernel:
    """See ConvertMixedArgs and ConvertMixedKey."""

    key: ConvertMixedKey

    @cute.jit
    def launch(self, args: ConvertMixedArgs) -> None:
        name = f"convert_mixed_r{self.key.rows}"
        self.kernel.set_name_prefix(name, remove_cutlass_symbol=True, keep_mangled_name=False)
        window, compressed = Rows.of(args.swa, args.swa_rows), Rows.of(args.compressed, args.compressed_rows)
        cta_rows = WARPS * self.key.rows
        window_ctas = cute.ceil_div(window.count, cta_rows)
        kernel = self.kernel(window, compressed, window_ctas)
        kernel.launch(
            grid=[window_ctas + args.both * cute.ceil_div(compressed.count, cta_rows), 1, 1],
            block=[WARPS * LANES, 1, 1],
            stream=args.stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, window: Rows, compressed: Rows, window_ctas: Int32) -> None:
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(thread // LANES)
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        if cta < window_ctas:
            self.convert(window, (cta * WARPS + warp) * self.key.rows)
        else:
            self.convert(compressed, ((cta - window_ctas) * WARPS + warp) * self.key.rows)

    @cute.jit
    def convert(self, rows: Rows, first: Any) -> None:
        """Rows of a cache from that one on."""
        lane = cute.arch.lane_idx()
        # rows behind the last one are read as the last
        row = cutlass.min(first + lane % self.key.rows, rows.count - 1)
        page, inside = divmod(row, rows.cache.rows)
        source = rows.cache.base + Int64(page) * rows.cache.page_stride + Int64(inside) * HEAD_DIM
        loaded = []
        for i in range_constexpr(self.key.rows):
            row_at = cute.arch.shuffle_sync(source, i) + lane * 8
            loaded.append([ptx.load_global_64_in_order(row_at + half * HALF) for half in range(2)])
        target = rows.target + Int64(first) * (2 * HEAD_DIM) + lane * 16
        for i in range_constexpr(self.key.rows):
            for half in range_constexpr(2):
                # of two lanes one gets the even pairs of 16 columns, the other the odd ones
                low, high = loaded[i][half]
                even, odd = ptx.permute_bytes(low, high, 0x5410), ptx.permute_bytes(low, high, 0x7632)
                is_upper = lane & 1 != 0
                got = cute.arch.shuffle_sync_bfly(even if is_upper else odd, offset=1)
                both = (got if is_upper else even), (odd if is_upper else got)
                words = [word for codes in both for word in ptx.f16x2_of_e4m3x4(codes)]
                ptx.store_global_128(target + (i * 2 * HEAD_DIM + half * 2 * HALF), words, first + i < rows.count)


@dataclass(frozen=True)
class ConvertMixedKey(KernelKey):
    """What distinguishes one compiled kernel from another.

    rows   per warp, asked for together
    """

    kernel_name: ClassVar[str] = "sparse_mla.convert_mixed"
    tuning: ClassVar[tuple[str, ...]] = ("rows",)
    rows: int = 2

    @property
    def instructions(self) -> tuple[str, ...]:
        return "ld.global.64", "cvt.e4m3", "st.global.128", "griddepcontrol"

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        caches = [fake_cache(dtype) for dtype in (Float8E4M3FN, Float8E4M3FN, Float16, Float16)]
        args = ConvertMixedArgs._make((*caches, Int32(1), fake_stream()))
        return entry_point(ConvertMixedKernel(self).launch, args)
