"""sparse_mla_prefill_paged on Hopper for few query rows: each is cut into parts, that all multiprocessors have some.

The blocks of a cluster have a part of an item each, do what paged_sm90's kernel does, and merge their results through
each other's shared memory: no workspace, and no second launch. A cluster has one item; there may be more blocks in it
than parts.

perf/notes/prefill.md has what was tried.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.runtime import make_fake_stream

from cute_kernels.dsl.paging import Batch
from cute_kernels.dsl.tensor import address, stride_bytes
from cute_kernels.sparse_mla.logs import logs_of
from cute_kernels.sparse_mla.paged_parts import CLUSTERS
from cute_kernels.sparse_mla.paged_sm90 import PagedKernel, PagedKey, fake_arguments
from cute_kernels.sparse_mla.paged_sm90_parts_merge import PartBack, PartScores, meet
from cute_kernels.sparse_mla.paged_sm90_parts_rows import PartRows, PartWalk
from cute_kernels.sparse_mla.paged_sm90_plan import PAGED, Sources, cache_of
from cute_kernels.sparse_mla.prefill_sm90_plan import BACK, ROWS_GROUP, Output, Places, Work


@dataclass(frozen=True)
class PagedPartsKey(PagedKey):
    """What distinguishes one compiled kernel from another.

    blocks   of a cluster: 2, 4 or 8
    """

    kernel_name: ClassVar[str] = "sparse_mla.hopper.prefill_paged_cluster"
    blocks: int = 2

    def __post_init__(self) -> None:
        if self.blocks not in CLUSTERS:
            raise ValueError(f"blocks: expected one of {CLUSTERS}, got {self.blocks!r}")

    @property
    def instructions(self) -> tuple[str, ...]:
        return tuple(name for name in super().instructions if name != "st.global.64")

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        stream = make_fake_stream(use_tvm_ffi_env_stream=True)
        return PagedPartsKernel(self.blocks), (*fake_arguments(), Int32(1), Int32(0), stream)


class PagedPartsKernel(PagedKernel):
    """Entry point: as PagedKernel, but for grid_blocks:

    parts        of a row, at most as many as a cluster has blocks
    part_tiles   tiles in a part, or 0: see schedule.part_range
    """

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks, self.rows = blocks, PartRows()
        self.scores, self.back = PartScores(PAGED), PartBack(PAGED, blocks)
        self.name = f"{self.name}_parts{blocks}"

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        swa_cache: cute.Tensor,
        swa_block_table: cute.Tensor,
        compressed_cache: cute.Tensor,
        compressed_block_table: cute.Tensor,
        out: cute.Tensor,
        max_logits: cute.Tensor,
        lse: cute.Tensor,
        lists: Int64,
        list_row: Int64,
        columns: Int32,
        compress_ratio: Int32,
        starts: Int64,
        seq_lens: Int64,
        requests: Int32,
        window_size: Int32,
        sink: Int64,
        scale_log2: Float32,
        parts: Int32,
        part_tiles: Int32,
        stream: cuda.CUstream,
    ) -> None:
        sources = Sources(
            cache_of(swa_cache, swa_block_table),
            cache_of(compressed_cache, compressed_block_table),
            window_size,
            lists,
            list_row,
            columns,
            cute.fast_divmod_create_divisor_v2(compress_ratio),
            Batch(starts, seq_lens, requests),
            parts,
            part_tiles,
        )
        strides = stride_bytes(out, 0), stride_bytes(out, 1)
        results = Output(address(out), *strides, logs_of(max_logits), logs_of(lse), None, sink=sink)
        # each part is without the sink
        self.launch(q, sources, results, Int64(0), scale_log2, Int32(0), stream)

    def grid(self, blocks: Any, items: Any) -> dict[str, Any]:
        # each block has one item, and there is none behind it
        return {"grid": [items, self.blocks, 1], "cluster": [1, self.blocks, 1]}

    @cute.jit
    def prepare(self, side: Any, work: Work, sources: Any, ready: Any, at: Places) -> None:
        if side == 0:
            PartWalk(work, sources, ready, at).prepare()

    @cute.jit
    def leave(self, group: Any) -> None:
        # the backs have met the others
        if (group < BACK) | (group >= ROWS_GROUP):
            meet()
        # nobody leaves while another block may still read its results; nobody waits for what is on its way to memory
        cute.arch.cluster_arrive_relaxed()
        cute.arch.cluster_wait()
