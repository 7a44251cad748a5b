"""sparse_mla_decode on Hopper: both products on tensor cores, rows converted on the way to them.

A pair of blocks walks over work items (query row, part of its tiles, block of heads). Each block has half of the
columns of queries, rows and results, so nothing is loaded, converted or multiplied twice. They tell each other their
part of the scores, each finds the weights of half of the heads, and they tell each other those. Six warpgroups of a
block share its work:

    scores   two of them, a tile each in turn: queries, Q K^T of the block's columns, softmax of its heads
    back     O += P V of the block's columns, results
    fronts   two of them, a tile each in turn: rows become bf16, K and V
    scout    which rows a tile is made of, their way into shared memory

perf/notes/decode.md has what was tried.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.memory import SmemAllocator
from cutlass.utils import hopper_helpers

from cute_kernels.dsl import ptx, wgmma
from cute_kernels.dsl.tensor import address, length, stride_bytes
from cute_kernels.sparse_mla.decode_args import ItemKey, fake_arguments
from cute_kernels.sparse_mla.decode_sm90_back import Back
from cute_kernels.sparse_mla.decode_sm90_front import Front
from cute_kernels.sparse_mla.decode_sm90_plan import (
    FIRST_BACK_THREAD,
    FIRST_FRONT_THREAD,
    FIRST_SCOUT_THREAD,
    KEYS,
    PAIR,
    ROWS,
    SIDE,
    STAGES,
    THREADS,
    WALK,
    Barriers,
    Cache,
    Lengths,
    Lists,
    Output,
    Places,
    Query,
    Sources,
    Work,
    smem_bytes,
    smem_parts,
)
from cute_kernels.sparse_mla.decode_sm90_scores import Scores
from cute_kernels.sparse_mla.decode_sm90_scout import Scout
from cute_kernels.sparse_mla.logs import logs_of
from cute_kernels.sparse_mla.quant_output import fake_quant, quant_of

SCORES_REGISTERS, BACK_REGISTERS, FRONT_REGISTERS, SCOUT_REGISTERS = 72, 176, 64, 32
"""Per thread, in steps of 8; all six warpgroups together have 480, what they are launched with."""


@dataclass(frozen=True)
class DecodeKey(ItemKey):
    """What distinguishes one compiled kernel from another. Both caches are fp8_ds_mla.

    heads      of a block: 8, 16, 32 or 64; more heads make several blocks, and those of the last may be fewer
    second     how a second list names its rows: "none" (there is none), "listed" by slot, "dense" by page
    out_fp32   results are fp32, not bf16
    quantized  results are turned back and become e4m3 codes, see quant_output; not with out_fp32
    """

    kernel_name: ClassVar[str] = "sparse_mla.hopper.decode"
    blocks_per_item: ClassVar[int] = PAIR
    heads: int = 64
    second: str = "listed"
    out_fp32: bool = False
    quantized: bool = False

    @property
    def smem_bytes(self) -> int:
        return smem_bytes()

    @property
    def instructions(self) -> tuple[str, ...]:
        used = ("wgmma", "bulk.load", "st.async", "mbarrier", "setmaxnreg")
        own = () if self.out_fp32 else ("cvt.e4m3",) if self.quantized else ("stmatrix",)
        return *used, *own

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        if not self.quantized:
            return DecodeKernel(self), fake_arguments(self.out_fp32)
        arguments = fake_arguments(False)
        return QuantDecodeKernel(self), (*arguments[:5], *fake_quant(), *arguments[6:])


class DecodeKernel:
    """Entry point: see decode_args."""

    def __init__(self, key: DecodeKey) -> None:
        self.heads, self.second = key.heads, key.second
        self.front, self.scores = Front(), Scores(key.heads)
        self.back = Back(key.out_fp32)
        self.name = f"sparse_mla_decode_h{key.heads}_{key.second}{'_fp32' if key.out_fp32 else ''}"
        self.name += "_quant" if key.quantized else ""

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
        strides = tuple(stride_bytes(out, axis) for axis in range(4))
        self.launch(
            q,
            Sources(
                self.cache(cache0),
                self.list(list0),
                Lengths(len0, len0_batch, len0_token),
                self.cache(cache1),
                self.list(list1),
                Lengths(len1, len1_batch, len1_token),
            ),
            Output(address(out), strides, logs_of(lse), length(q, 2)),
            sink,
            scale_log2,
            parts,
            part_tiles,
            ctas,
            stream,
        )

    @cute.jit
    def launch(
        self,
        q: cute.Tensor,
        sources: Sources,
        out: Output,
        sink: Int64,
        scale_log2: Float32,
        parts: Int32,
        part_tiles: Int32,
        ctas: Int32,
        stream: cuda.CUstream,
    ) -> None:
        self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        head_blocks = (length(q, 2) + (self.heads - 1)) // self.heads
        items = length(q, 0) * length(q, 1) * head_blocks * parts
        kernel = self.kernel(
            Query(address(q), stride_bytes(q, 0), stride_bytes(q, 1), stride_bytes(q, 2), length(q, 2)),
            sources,
            out,
            sink,
            scale_log2,
            *(cute.fast_divmod_create_divisor_v2(number) for number in (length(q, 1), head_blocks, parts)),
            part_tiles,
            items,
            *self.products(),
            *self.layouts(),
        )
        pairs = cutlass.min(ctas // PAIR, items)
        kernel.launch(
            grid=[pairs * PAIR, 1, 1],
            block=[THREADS, 1, 1],
            cluster=[PAIR, 1, 1],
            min_blocks_per_mp=1,
            stream=stream,
            use_pdl=True,
        )

    def cache(self, tensor: cute.Tensor) -> Cache:
        rows = cute.fast_divmod_create_divisor_v2(length(tensor, 1))
        return Cache(address(tensor), stride_bytes(tensor, 0), length(tensor, 0), rows)

    def list(self, tensor: cute.Tensor) -> Lists:
        return Lists(address(tensor), stride_bytes(tensor, 0), stride_bytes(tensor, 1), length(tensor, 2))

    def products(self) -> tuple[Any, Any, Any]:
        """S = Q K^T, twice: one will accumulate; O = P V, by 64 columns, as an instruction with more would need more
        registers than a thread has before setmaxnreg."""
        keys, dims = OperandMajorMode.K, OperandMajorMode.MN

        def make(major: Any, columns: int, **source: Any) -> Any:
            return hopper_helpers.make_trivial_tiled_mma(
                BFloat16, BFloat16, OperandMajorMode.K, major, Float32, (1, 1, 1), (64, columns), **source
            )

        qk = [make(keys, KEYS) for _ in range(2)]
        return *qk, make(dims, 64, a_source=warpgroup.OperandSource.RMEM)

    def layouts(self) -> tuple[Any, Any]:
        """Of Q and V."""
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, BFloat16)
        return (
            cute.tile_to_shape(atom, (ROWS, SIDE), (0, 1)),
            cute.tile_to_shape(atom, (KEYS, SIDE, STAGES), (0, 1, 2)),
        )

    @cute.kernel
    def kernel(
        self,
        q: Query,
        sources: Sources,
        out: Output,
        sink: Int64,
        scale_log2: Float32,
        tokens: Any,
        head_blocks: Any,
        row_parts: Any,
        part_tiles: Int32,
        items: Int32,
        qk: cute.TiledMma,
        qk_more: cute.TiledMma,
        pv: cute.TiledMma,
        q_layout: cute.ComposedLayout,
        v_layout: cute.ComposedLayout,
    ) -> None:
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        group = cute.arch.make_warp_uniform(thread // 128)
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        smem = SmemAllocator()
        tiles = [
            smem.allocate_tensor(BFloat16, layout.outer, byte_alignment=1024, swizzle=layout.inner)
            for layout in (q_layout, v_layout)
        ]
        q_tile, v_tile = tiles
        parts = smem_parts()
        others = [
            smem.allocate_tensor(Int32, cute.make_layout(size // 4), byte_alignment=16)
            for size in list(parts.values())[len(tiles) :]
        ]
        at = Places(*(tensor.iterator.toint() for tensor in tiles + others))
        ready = Barriers.allocate(smem)
        if thread == 0:
            ready.initialize()
        # of heads that nobody has
        for place, size in ((at.p, parts["p"] + parts["partial"]), (at.note, parts["note"])):
            for i in cutlass.range(thread * 16, size, 16 * THREADS, unroll=1):
                ptx.store_shared_128(place + i, [Int32(0)] * 4)
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()

        wgmma.accumulate(qk_more)
        wgmma.accumulate(pv)
        work = Work(tokens, head_blocks, row_parts, part_tiles, block // PAIR, items, blocks // PAIR)
        if group < FIRST_BACK_THREAD // 128:
            cute.arch.setmaxregister_decrease(SCORES_REGISTERS)
            score = (ready, qk, qk_more, q_tile, v_tile, at)
            self.scores.run(thread % 128, group, rank, work, q, out, sink, scale_log2, *score)
        elif group < FIRST_FRONT_THREAD // 128:
            cute.arch.setmaxregister_increase(BACK_REGISTERS)
            self.back.run(thread % 128, work, out, ready, pv, v_tile, at)
        elif group < FIRST_SCOUT_THREAD // 128:
            cute.arch.setmaxregister_decrease(FRONT_REGISTERS)
            number = cute.arch.make_warp_uniform(group - FIRST_FRONT_THREAD // 128)
            self.front.run(thread % 128, number, rank, ready, at)
        else:
            cute.arch.setmaxregister_decrease(SCOUT_REGISTERS)
            home = at.walk + cute.arch.make_warp_uniform(thread % 128 // 32) * WALK
            Scout(self.heads, self.second, rank, work, q, sources, thread % 128, home).run(ready, at)
        # nobody leaves while the other block may still reach for its barriers
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()


class QuantDecodeKernel(DecodeKernel):
    """Entry point: as DecodeKernel, with codes, scales, positions and the table of cosines and sines in place of out; a
    row is one part."""

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        cache0: cute.Tensor,
        list0: cute.Tensor,
        cache1: cute.Tensor,
        list1: cute.Tensor,
        codes: cute.Tensor,
        scales: cute.Tensor,
        positions: cute.Tensor,
        table: cute.Tensor,
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
        self.launch(
            q,
            Sources(
                self.cache(cache0),
                self.list(list0),
                Lengths(len0, len0_batch, len0_token),
                self.cache(cache1),
                self.list(list1),
                Lengths(len1, len1_batch, len1_token),
            ),
            Output(None, None, logs_of(lse), length(q, 2), quant_of(codes, scales, positions, table)),
            sink,
            scale_log2,
            parts,
            part_tiles,
            ctas,
            stream,
        )
