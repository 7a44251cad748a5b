"""sparse_mla_decode on Hopper: both products on tensor cores, rows converted on the way to them.

A block walks over work items (query row, part of its tiles, block of heads). Four warpgroups share the work:

    front    loads a tile's raw rows into registers one tile ahead, converts them to bf16, and stores them: K and V
    back     two warpgroups, 256 columns of O each: softmax, O += P V, results
    scores   queries, S^T = K Q^T; then addresses and scales of the rows of a later tile into a table for the front

So three tiles are under way: one is converted while the one before is multiplied with Q, and the one before that with
P. Keys are the M side of the first product: fewer heads mean fewer columns. perf/notes/decode.md has what was tried.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.memory import SmemAllocator
from cutlass.utils import hopper_helpers

from cute_kernels.dsl import wgmma
from cute_kernels.dsl.tensor import address, length, stride_bytes
from cute_kernels.runtime.compile import KernelKey
from cute_kernels.sparse_mla.decode_args import fake_arguments
from cute_kernels.sparse_mla.decode_sm90_back import Back
from cute_kernels.sparse_mla.decode_sm90_front import Front
from cute_kernels.sparse_mla.decode_sm90_plan import (
    DIM,
    FIRST_BACK_THREAD,
    FIRST_SCORES_THREAD,
    KEYS,
    ROWS,
    STAGES,
    Cache,
    Lengths,
    Lists,
    Output,
    Places,
    Query,
    Rings,
    Sources,
    Work,
    smem_bytes,
    smem_parts,
)
from cute_kernels.sparse_mla.decode_sm90_scores import Scores

THREADS = 512


def registers(heads: int) -> tuple[int, int, int]:
    """Per thread of the front, the back and the scores; with the back's second warpgroup all 64 K of a multiprocessor,
    in steps of 8. So shared, the assembler spills nothing where no GPU is there (CuTe DSL 4.8.1); beside an H200,
    precompile reported 16 to 80 bytes, for which perf/notes/decode.md has no explanation."""
    return (120, 160, 72) if heads == 64 else (120, 168, 56)


@dataclass(frozen=True)
class DecodeKey(KernelKey):
    """What distinguishes one compiled kernel from another. Both caches are fp8_ds_mla.

    heads      of a block: 8, 16, 32 or 64; more heads make several blocks, and those of the last may be fewer
    second     how a second list names its rows: "none" (there is none), "listed" by slot, "dense" by page
    out_fp32   results are fp32, not bf16
    """

    heads: int = 64
    second: str = "listed"
    out_fp32: bool = False

    @property
    def smem_bytes(self) -> int:
        return smem_bytes(self.heads)

    @property
    def instructions(self) -> tuple[str, ...]:
        return "wgmma", "cp.async", "mbarrier", "setmaxnreg", "stmatrix"

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        return DecodeKernel(self), fake_arguments(self.out_fp32)


class DecodeKernel:
    """Entry point: see decode_args."""

    def __init__(self, key: DecodeKey) -> None:
        self.heads = key.heads
        self.front, self.scores = Front(), Scores(key.heads, key.second)
        self.back = Back(key.heads, key.out_fp32)
        self.name = f"sparse_mla_decode_h{key.heads}_{key.second}{'_fp32' if key.out_fp32 else ''}"

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
        head_blocks = (length(q, 2) + (self.heads - 1)) // self.heads
        items = length(q, 0) * length(q, 1) * head_blocks * parts
        strides = tuple(stride_bytes(out, axis) for axis in range(4))
        kernel = self.kernel(
            Query(address(q), stride_bytes(q, 0), stride_bytes(q, 1), stride_bytes(q, 2), length(q, 2)),
            Sources(
                self.cache(cache0),
                self.list(list0),
                Lengths(len0, len0_batch, len0_token),
                self.cache(cache1),
                self.list(list1),
                Lengths(len1, len1_batch, len1_token),
            ),
            Output(address(out), strides, address(lse), length(q, 2), length(q, 0)),
            sink,
            scale_log2,
            length(q, 1),
            head_blocks,
            parts,
            part_tiles,
            items,
            *self.products(),
            *self.layouts(),
        )
        kernel.launch(grid=[cutlass.min(ctas, items), 1, 1], block=[THREADS, 1, 1], min_blocks_per_mp=1, stream=stream)

    def cache(self, tensor: cute.Tensor) -> Cache:
        return Cache(address(tensor), stride_bytes(tensor, 0), length(tensor, 0), length(tensor, 1))

    def list(self, tensor: cute.Tensor) -> Lists:
        return Lists(address(tensor), stride_bytes(tensor, 0), stride_bytes(tensor, 1), length(tensor, 2))

    def products(self) -> tuple[Any, Any, Any]:
        """S^T = K Q^T, twice: one will accumulate; O = P V, by 128 columns, as an instruction with 256 would need more
        registers than a thread has before setmaxnreg."""
        keys, dims = OperandMajorMode.K, OperandMajorMode.MN

        def make(major: Any, columns: int) -> Any:
            return hopper_helpers.make_trivial_tiled_mma(
                BFloat16, BFloat16, OperandMajorMode.K, major, Float32, (1, 1, 1), (64, columns)
            )

        qk = [make(keys, self.heads) for _ in range(2)]
        return *qk, make(dims, 128)

    def layouts(self) -> tuple[Any, Any, Any]:
        """Of Q, V and P."""
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, BFloat16)
        return (
            cute.tile_to_shape(atom, (self.heads, DIM), (0, 1)),
            cute.tile_to_shape(atom, (KEYS, DIM, STAGES), (0, 1, 2)),
            cute.tile_to_shape(atom, (ROWS, KEYS), (0, 1)),
        )

    @cute.kernel
    def kernel(
        self,
        q: Query,
        sources: Sources,
        out: Output,
        sink: Int64,
        scale_log2: Float32,
        tokens: Int32,
        head_blocks: Int32,
        parts: Int32,
        part_tiles: Int32,
        items: Int32,
        qk: cute.TiledMma,
        qk_more: cute.TiledMma,
        pv: cute.TiledMma,
        q_layout: cute.ComposedLayout,
        v_layout: cute.ComposedLayout,
        p_layout: cute.ComposedLayout,
    ) -> None:
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        group = cute.arch.make_warp_uniform(thread // 128)
        smem = SmemAllocator()
        tiles = [
            smem.allocate_tensor(BFloat16, layout.outer, byte_alignment=1024, swizzle=layout.inner)
            for layout in (q_layout, v_layout, p_layout)
        ]
        q_tile, v_tile, p_tile = tiles
        others = [
            smem.allocate_tensor(Int32, cute.make_layout(size // 4), byte_alignment=16)
            for size in list(smem_parts(self.heads).values())[len(tiles) :]
        ]
        at = Places(*(tensor.iterator.toint() for tensor in tiles + others))
        rings = Rings.allocate(smem)
        if thread == 0:
            rings.initialize()
        cute.arch.sync_threads()
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()

        wgmma.accumulate(qk_more)
        wgmma.accumulate(pv)
        work = Work(tokens, head_blocks, parts, part_tiles, block, items, blocks)
        if group == 0:
            cute.arch.setmaxregister_decrease(registers(self.heads)[0])
            self.front.run(thread, work, rings, at)
        elif group == 3:
            cute.arch.setmaxregister_decrease(registers(self.heads)[2])
            self.scores.run(thread - FIRST_SCORES_THREAD, work, q, sources, rings, qk, qk_more, q_tile, v_tile, at)
        else:
            cute.arch.setmaxregister_increase(registers(self.heads)[1])
            self.back.run(thread - FIRST_BACK_THREAD, work, rings, pv, p_tile, v_tile, out, sink, scale_log2, at)
