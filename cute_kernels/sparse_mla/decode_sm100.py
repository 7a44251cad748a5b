"""sparse_mla_decode on Blackwell (sm_100a, sm_103a): both products on tensor cores, from rows converted once.

Compiled, inspected and run in a model of the GPU; nobody has run it on one.

A block walks over work items (query row, part of its tiles, block of 64 heads or fewer). Its warps share the work:

    scores     four: queries, softmax, results
    front      four: codes become bf16, K and V
    products   one starts Q K^T and P V; O, S and most of Q are in tensor memory
    gathers    two: copies of codes, and of rotary columns
    scout      one finds out which rows a tile is made of

What lies where: decode_sm100_plan.py. perf/notes/blackwell.md has why.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, Uint8, const_expr
from cutlass.memory import SmemAllocator

from cute_kernels.dsl import ptx, tensor_maps
from cute_kernels.dsl.tensor import length, stride_bytes
from cute_kernels.formats import NOPE_DIM
from cute_kernels.sparse_mla import decode_sm100_plan
from cute_kernels.sparse_mla.decode_args import ItemKey, fake_arguments
from cute_kernels.sparse_mla.decode_sm100_front import Front
from cute_kernels.sparse_mla.decode_sm100_plan import (
    CODES_WARP,
    FRONT_WARP,
    HEADS,
    PRODUCTS_WARP,
    ROPE_WARP,
    ROW_BYTES,
    SLAB,
    THREADS,
    Barriers,
)
from cute_kernels.sparse_mla.decode_sm100_products import Products
from cute_kernels.sparse_mla.decode_sm100_scores import Scores
from cute_kernels.sparse_mla.decode_sm100_scout import Gather, Scout
from cute_kernels.sparse_mla.params import EXTRA, IndexList, KVCache, Output, Query, TileScheduler

WORD = 4


@dataclass(frozen=True)
class BlackwellDecodeKey(ItemKey):
    """What distinguishes one compiled kernel from another. Both caches are fp8_ds_mla, whose pages a gathering copy can
    address; any number of heads.

    second     the second list: "none", "listed" (indices) or "dense" (a block table)
    out_fp32   whether out is fp32, else it is bf16
    """

    kernel_name: ClassVar[str] = "sparse_mla.blackwell.decode"
    second: str = "listed"
    out_fp32: bool = False

    def __post_init__(self) -> None:
        if self.second not in EXTRA:
            raise ValueError(f"second: expected one of {EXTRA}, got {self.second!r}")

    @property
    def smem_bytes(self) -> int:
        return decode_sm100_plan.smem_bytes()

    @property
    def instructions(self) -> tuple[str, ...]:
        return "tcgen05.mma", "tcgen05.ld", "tma.gather4", "cp.async", "ex2", "mbarrier", "st.global.128"

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        return DecodeKernel(self), fake_arguments(self.out_fp32)


class DecodeKernel:
    """Entry point: see decode_args.

    plan, barriers   which sizes and places its roles agree on: a module, and its barriers
    roles            of all warps but the scout's
    """

    name = "sparse_mla_decode_blackwell"
    plan: Any = decode_sm100_plan
    barriers: type[Barriers] = Barriers
    roles: Any = (Front, Products, Scores, Gather)

    def __init__(self, key: BlackwellDecodeKey) -> None:
        self.second = key.second
        front, products, scores, gather = self.roles
        self.front, self.products, self.scores = front(), products(), scores(key.out_fp32)
        self.codes, self.rope = (gather(is_rope, key.second) for is_rope in (False, True))
        self.name = f"{self.name}_{key.second}{'_fp32' if key.out_fp32 else ''}"

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        cache0: cute.Tensor,
        list0: cute.Tensor,
        cache1: cute.Tensor,
        list1: cute.Tensor,
        out: cute.Tensor,
        lse: cute.Tensor,
        len0: Int64,
        len0_batch: Int32,
        len0_token: Int32,
        len1: Int64,
        len1_batch: Int32,
        len1_token: Int32,
        sink: Int64,
        scale_log2: Float32,
        parts: Int32,
        part_tiles: Int32,
        ctas: Int32,
        stream: cuda.CUstream,
    ) -> None:
        self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        page_rows = length(cache1, 1) if const_expr(self.second == "dense") else 1
        blocks = const_expr(self.plan.BLOCKS)
        items = TileScheduler.of(q, blocks * HEADS, parts, part_tiles, ctas // blocks)
        caches = (cache0,) if const_expr(self.second == "none") else (cache0, cache1)
        kernel = self.kernel(
            tuple(codes_copy(cache, self.plan.CODES) for cache in caches),
            tuple(rope_copy(cache) for cache in caches),
            Query.of(q),
            tuple(KVCache.of(cache) for cache in caches),
            tuple(pitch_of(cache) for cache in caches),
            (
                IndexList.of_rows(list0, (len0, len0_batch, len0_token), 1),
                IndexList.of_rows(list1, (len1, len1_batch, len1_token), page_rows),
            ),
            Output.of(out, lse, sink),
            scale_log2,
            items,
        )
        kernel.launch(
            grid=[cutlass.min(items.step, items.end) * blocks, 1, 1],
            block=[THREADS, 1, 1],
            cluster=[blocks, 1, 1] if const_expr(blocks > 1) else None,
            min_blocks_per_mp=1,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        codes_copies: Any,
        rope_copies: Any,
        queries: Query,
        caches: Any,
        pitches: Any,
        lists: Any,
        out: Output,
        scale_log2: Float32,
        items: TileScheduler,
    ) -> None:
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        lane = thread % 32
        warp = cute.arch.make_warp_uniform(thread // 32)
        smem = SmemAllocator()
        size = const_expr(sum(self.plan.smem_parts().values()))
        memory = smem.allocate_tensor(Uint8, cute.make_layout(size), byte_alignment=1024)
        at = self.plan.places(memory.iterator.toint())
        ready = self.barriers.allocate(smem)
        if thread == 0:
            ready.initialize()
        if warp == PRODUCTS_WARP:
            # all of it, so it begins at address 0
            ptx.allocate_tensor_memory(at.tensor_memory, ptx.COLUMNS, self.plan.BLOCKS)
            ptx.relinquish_tensor_memory(self.plan.BLOCKS)
        self.synchronize()
        ptx.fence_tensor_after()
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()

        items = self.own(items, block)
        if warp < FRONT_WARP:
            self.scores.run(thread, items, queries, out, scale_log2, ready, at)
        elif warp < PRODUCTS_WARP:
            self.front.run(thread - FRONT_WARP * 32, ready, at)
        else:
            if warp == PRODUCTS_WARP:
                self.products.run(ready, at)
            elif warp == CODES_WARP:
                self.codes.run(tuple(ptx.tensor_map(copy) for copy in codes_copies), ready, at)
            elif warp == ROPE_WARP:
                self.rope.run(tuple(ptx.tensor_map(copy) for copy in rope_copies), ready, at)
            else:
                Scout(self.second, items, caches, pitches, lists, queries).run(lane, ready, at)
        ptx.fence_tensor_before()
        self.synchronize()
        if warp == PRODUCTS_WARP:
            ptx.free_tensor_memory(ptx.load_shared_s32(at.tensor_memory), ptx.COLUMNS, self.plan.BLOCKS)

    def own(self, items: TileScheduler, block: Any) -> TileScheduler:
        """A block's items."""
        return items._replace(first=block)

    def synchronize(self) -> None:
        """All threads that share items."""
        cute.arch.sync_threads()


def pitch_of(cache: cute.Tensor) -> Any:
    """Rows of 576 bytes from page to page. On the host's side of the launch, as all below."""
    return Int32(stride_bytes(cache, 0) // ROW_BYTES)


def rows_of(cache: cute.Tensor) -> Any:
    """Rows of 576 bytes in all pages, data and scales alike."""
    return length(cache, 0) * pitch_of(cache)


def codes_copy(cache: cute.Tensor, codes: int = NOPE_DIM) -> Any:
    """Of so many of a row's codes, as words, one row after the other."""
    stride, width = ROW_BYTES // WORD, NOPE_DIM // WORD
    return tensor_maps.gathered_rows(cache.iterator, Int32, rows_of(cache), codes // WORD, stride, width=width)


def rope_copy(cache: cute.Tensor) -> Any:
    """Of the rotary columns, as tensor cores want them."""
    start: Any = cache.iterator
    return tensor_maps.gathered_rows(start + NOPE_DIM, BFloat16, rows_of(cache), SLAB, ROW_BYTES // 2, swizzle=128)
