"""Kernel of top_k_per_row_prefill and top_k_per_row_decode: a block, or a cluster of blocks, picks the best of a row.

A row of at most k columns has all of them written, without a look at its scores. What is done with a longer one says
topk_row. The picks come in ascending order, whatever the shape of the block, so a row's result is the same bits in
every call.

Decode rows may have slots of the compressed cache written in place of columns: each pick's page comes from the
request's row of a block table. A warp lists its picks in shared memory first, so that all their pages are under way at
once and neighbouring lanes store neighbours.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from cutlass.memory import SmemAllocator

from cute_kernels.dsl import ptx
from cute_kernels.dsl.tensor import address, stride_bytes
from cute_kernels.indexer.topk_picks import Slots
from cute_kernels.indexer.topk_plan import CHUNK, GROUPS, Here, Part, Plan
from cute_kernels.indexer.topk_row import RowPicks
from cute_kernels.runtime.arch import SMEM_BYTES, arch_number, arch_of
from cute_kernels.runtime.compile import KernelKey
from cute_kernels.runtime.compile import launch as launch_key

CLUSTER_ARCHS = ("sm_90a", "sm_100a", "sm_103a")
"""Where the blocks of a cluster can share a row."""

MOST_PICKS, MOST_ROWS = 2048, 2**28

LOCAL = 0, 0, 0, 1
"""No block table: columns are written as they are."""

SHAPES = ((8, 4, 1, 1), (16, 4, 1, 1), (16, 8, 1, 1), (16, 8, 1, 8), (32, 8, 1, 8), (16, 8, 1, 16), (32, 4, 1, 32))
"""(warps, vectors of a thread, cluster, tiles) of blocks that take whole rows: of up to 4096, 8192 and 16384 columns,
which their registers hold, and of up to 131072, 262144 (the second one where there is less shared memory) and 524288,
which come in tiles."""

SHARED = (
    (17, 16384, (8, 8, 4, 1)),
    (17, 32768, (32, 4, 8, 8)),
)
"""(fewer rows than, more columns than, shape) of clusters, up to their capacity, the first that fits. On an H200 16
rows of 20000 columns take 6.4 us with clusters of four and 7.1 us without, 8 rows of 70000 columns 10.2 and 11.5 us."""

MANY_ROWS, MANY_COLUMNS, MANY = 264, 4096, (8, 4, 1, 8)
"""Rows and columns from which on, and the shape of which, four blocks of a multiprocessor are faster than larger
ones: what one waits for, others use. On an H200 2048 rows of 17408 columns take 58 us (k = 512) and 65 us (k = 1024),
with shapes of 16 warps 71 and 80 us; 4096 rows of 4096 columns 58 us, with blocks whose registers hold them 49 us."""

SPREAD_ROWS, SPREAD = 128, ((8, 4, 1, 1), (16, 4, 1, 1), (16, 8, 1, 1))
"""Calls of at most so many rows, and the shapes of which these take the kernels that are spread. A dependent launch
puts blocks wherever the first multiprocessors become free: 64 rows of 2048 columns behind their scores took 9.3 us,
with one block on each multiprocessor 5.2 us, and 11.9 and 6.1 us for 1024 picks."""

EARLY_BYTES = 4 << 20
"""Of scores in a call, up to which rows are asked for before their bounds are known."""

SPREAD_BYTES = 117 << 10
"""More than half of the shared memory of a multiprocessor that has clusters."""

MOST_CHOICES = 1024
"""Kernels that are remembered by rows, width and k."""


@dataclass(frozen=True)
class TopKKey(KernelKey):
    """What distinguishes one compiled kernel from another.

    warps     of a block, at most 32
    vectors   of four scores that a thread holds at once
    cluster   blocks that share a row
    tiles     how often a thread fills its registers, at most, for a row
    is_spread blocks ask for so much shared memory that a multiprocessor takes only one of them
    """

    kernel_name: ClassVar[str] = "indexer.topk"
    warps: int = 32
    vectors: int = 8
    cluster: int = 1
    tiles: int = 1
    is_spread: bool = False

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.warps, self.vectors, self.cluster, self.tiles

    @property
    def plan(self) -> Plan:
        """What the kernel is cut by."""
        return Plan(self.warps, self.vectors, self.cluster, self.tiles)

    @property
    def smem_bytes(self) -> int:
        return max(self.plan.smem_bytes, SPREAD_BYTES) if self.is_spread else self.plan.smem_bytes

    @property
    def capacity(self) -> int:
        """Most columns of a row, those before it up to a multiple of 16 bytes included."""
        return self.plan.places * self.cluster

    @property
    def instructions(self) -> tuple[str, ...]:
        return "ld.global.128", "atomic"

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        scores, starts, ends = (Int64(0), Int64(4), Int32(1)), (Int64(0), Int64(4)), (Int64(0), Int64(4), Int64(4))
        out = make_fake_tensor(Int32, (cute.sym_int(), cute.sym_int()), stride=(cute.sym_int64(), cute.sym_int64()))
        table = Int64(0), Int64(0), Int32(0), Int32(1)
        numbers = (*scores, *starts, *ends, *(Int32(1) for _ in range(3)), *table, *(Int32(1) for _ in range(5)))
        return TopKKernel(self), (out, *numbers, make_fake_stream(use_tvm_ffi_env_stream=True))


class TopKKernel:
    """Entry point: (result; address of the scores, stride of their rows in bytes, their columns; address of the starts
    or 0, their stride; address of the ends, strides of requests and of their tokens, tokens of a request; what no end
    exceeds, whether a row's first column is that of its start (-1) or not (0); address of the block table or 0, stride
    of its rows in bytes, its columns, rows of a page; rows, k, a warp's share of k, groups of a thread whose maxima
    bound it, 128-byte lines of a row to fetch early; stream)."""

    def __init__(self, key: TopKKey) -> None:
        self.plan = key.plan
        self.row = RowPicks(self.plan)
        self.threads, self.cluster, self.smem_bytes = self.plan.threads, key.cluster, key.smem_bytes
        # so many blocks of a multiprocessor must find registers
        self.resident = 32 // key.warps if key.cluster == 1 else 0
        self.has_dependency = arch_number(key.arch) >= ptx.DEPENDENT_LAUNCH_ARCH
        self.name = f"top_k_per_row_w{key.warps}v{key.vectors}c{key.cluster}t{key.tiles}" + "s" * key.is_spread

    @cute.jit
    def __call__(
        self,
        out: cute.Tensor,
        scores: Int64,
        scores_stride: Int64,
        columns: Int32,
        starts: Int64,
        starts_stride: Int64,
        ends: Int64,
        ends_request: Int64,
        ends_token: Int64,
        tokens: Int32,
        limit: Int32,
        shifts: Int32,
        table: Int64,
        table_stride: Int64,
        table_columns: Int32,
        page_rows: Int32,
        rows: Int32,
        k: Int32,
        share: Int32,
        groups: Int32,
        early_lines: Int32,
        stream: cuda.CUstream,
    ) -> None:
        self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        kernel = self.kernel(
            scores,
            scores_stride,
            columns,
            starts,
            starts_stride,
            ends,
            ends_request,
            ends_token,
            cute.fast_divmod_create_divisor_v2(tokens),
            limit,
            shifts,
            table,
            table_stride,
            table_columns,
            cute.fast_divmod_create_divisor_v2(page_rows),
            Int32(0x7FFFFFFF) // page_rows + 1,
            address(out),
            stride_bytes(out, 0),
            k,
            share,
            groups,
            early_lines,
        )
        kernel.launch(
            grid=[rows * self.cluster, 1, 1],
            block=[self.threads, 1, 1],
            cluster=[self.cluster, 1, 1],
            stream=stream,
            use_pdl=self.has_dependency,
            min_blocks_per_mp=self.resident,
            preferred_smem_carveout=100 if self.resident > 1 else None,
        )

    @cute.kernel
    def kernel(
        self,
        scores: Int64,
        scores_stride: Int64,
        columns: Int32,
        starts: Int64,
        starts_stride: Int64,
        ends: Int64,
        ends_request: Int64,
        ends_token: Int64,
        tokens: cute.FastDivmodDivisorV2,
        limit: Int32,
        shifts: Int32,
        table: Int64,
        table_stride: Int64,
        table_columns: Int32,
        page_rows: cute.FastDivmodDivisorV2,
        named_pages: Int32,
        out: Int64,
        out_stride: Int64,
        k: Int32,
        share: Int32,
        groups: Int32,
        early_lines: Int32,
    ) -> None:
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        memory = SmemAllocator().allocate_tensor(Int32, cute.make_layout(self.smem_bytes // 4), byte_alignment=16)
        at = memory.iterator.toint()
        row, rank, lead = block, Int32(0), at
        if const_expr(self.cluster > 1):
            row = block // self.cluster
            rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
            lead = ptx.map_shared(at, 0)
        here = Here(at, lead, thread, cute.arch.make_warp_uniform(thread // 32), thread % 32, rank)
        # for calls of which little is under way at once: a row comes while its bounds do
        line = rank * self.threads + thread
        ptx.prefetch_l2(scores + Int64(row) * scores_stride + Int64(line) * 128, line < early_lines)
        request, token = divmod(row, tokens)
        place = ends + Int64(request) * ends_request + Int64(token) * ends_token
        ptx.prefetch_l2(place, thread == 0)
        self.row.clear(here)
        if const_expr(self.has_dependency):
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()

        start = ptx.load_global_s32_where(starts != 0, starts + Int64(row) * starts_stride, is_shared=True)
        end = ptx.load_global_s32_in_order(place, is_shared=True)
        shift = start & shifts
        start = cutlass.max(start, Int32(0))
        end = Int32(ptx.min_s64(Int64(shift) + Int64(columns), Int64(cutlass.min(end, limit))))
        size = end - start if end > start else Int32(0)
        slots = Slots(table, table_stride, request, table_columns, page_rows, named_pages)
        if size <= k:
            target = out + Int64(row) * out_stride
            for i in cutlass.range(rank * self.threads + thread, k, self.cluster * self.threads, unroll=1):
                entry = i if i < size else Int32(-1)
                if table != 0:
                    entry = slots.slot(slots.look_up(i, i < size))
                ptx.store_global_s32(target + Int64(i) * 4, entry)
        else:
            source = scores + Int64(row) * scores_stride + Int64(start - shift) * 4
            head = Int32(source & 15) >> 2
            stop = head + size
            width, tiles = stop, 1
            if const_expr(self.cluster > 1):
                width = (stop + (128 * self.cluster - 1)) // (128 * self.cluster) * 128
            if const_expr(self.plan.tiles > 1):
                tiles = (width + (self.plan.tile - 1)) // self.plan.tile
            skipped = rank * width
            stop = cutlass.min(stop - skipped, width)
            step, each = CHUNK * self.plan.warps * tiles, Float32(1.0 / self.plan.warps) * ptx.reciprocal(Int32(tiles))
            base = source + Int64(skipped - head) * 4
            part = Part(base, head - skipped, stop, tiles, skipped - head, step, each)
            self.row.select(here, part, k, share, groups, out + Int64(row) * out_stride, slots)


def keys_of(arch: str) -> list[TopKKey]:
    """All kernels of an architecture: those for which a block is enough, by capacity, then others."""
    shapes = [*SHAPES, MANY, *(shape for *_, shape in SHARED if arch in CLUSTER_ARCHS)]
    keys = [TopKKey(arch, *shape) for shape in shapes]
    spread = [TopKKey(arch, *shape, is_spread=True) for shape in SPREAD] if arch in CLUSTER_ARCHS else []
    return [key for key in (*spread, *keys) if key.smem_bytes <= SMEM_BYTES[arch]]


def key_for(arch: str, rows: int, width: int) -> TopKKey:
    """The kernel for so many rows of such a width; if none is wide enough, the widest."""
    keys = keys_of(arch)
    if arch in CLUSTER_ARCHS:
        keys = [key for key in keys if key.is_spread == (rows <= SPREAD_ROWS) or key.shape not in SPREAD]
        for fewer, more, shape in SHARED:
            key = TopKKey(arch, *shape)
            if rows < fewer and more < width <= key.capacity:
                return key
    many = TopKKey(arch, *MANY)
    if rows >= MANY_ROWS and MANY_COLUMNS < width <= many.capacity:
        return many
    return next((key for key in keys if width <= key.capacity), max(keys, key=lambda key: key.capacity))


def groups_for(key: Any, k: int) -> int:
    """Maxima of a thread: twice as many of all threads as there are picks leave 1.4 k candidates of a random row."""
    groups = 1
    while groups < GROUPS and groups * 32 * key.warps * key.cluster < 2 * k:
        groups *= 2
    return groups


def share_for(key: Any, k: int) -> int:
    """Of k, a warp's."""
    return -(-k // (key.warps * key.cluster))


@lru_cache(MOST_CHOICES)
def choose(device_index: int, rows: int, width: int, k: int) -> tuple[TopKKey, int, int]:
    """(kernel, a warp's share of k, groups of a thread)"""
    key = key_for(arch_of(device_index), rows, width)
    return key, share_for(key, k), groups_for(key, k)


def width_of(logits: Any) -> int:
    """Columns of a row, and those before it up to a multiple of 16 bytes, at most."""
    is_aligned = logits.data_ptr() % 16 == 0 and (logits.shape[0] <= 1 or logits.stride(0) % 4 == 0)
    return int(logits.shape[1]) + (0 if is_aligned else 3)


def deployment_keys(config: Any, tp: int, arch: str) -> list[TopKKey]:
    """Layers with an indexer, with rows of any length."""
    return keys_of(arch) if 4 in config.compress_ratios else []


def check(logits: Any, num_rows: int, k: int) -> tuple[bool, str]:
    """Whether `run` can take these (checked) arguments, and if not, why."""
    if k > MOST_PICKS:
        return False, f"k must be at most {MOST_PICKS}, got {k}"
    if num_rows >= MOST_ROWS:
        return False, f"there must be fewer than {MOST_ROWS} rows, got {num_rows}"
    key = max(keys_of(arch_of(logits.device.index)), key=lambda key: key.capacity)
    if width_of(logits) > key.capacity:
        return False, f"rows must have at most {key.capacity} columns on {key.arch}, got {logits.shape[1]}"
    return True, ""


def run(
    logits: Any,
    starts: tuple[int, int],
    ends: tuple[int, int, int, int],
    out: Any,
    rows: int,
    k: int,
    limit: int | None = None,
    shifts: int = 0,
    slots: tuple[int, int, int, int] = LOCAL,
) -> None:
    """Launch on the current stream of out's device.

    starts   address of the first start, or 0 if all are 0, and stride in bytes
    ends     address of the first end, strides of requests and of their tokens in bytes, and tokens of a request
    limit    what no end exceeds; None: the columns
    shifts   -1 if a row's first column is that of its start, 0 if it is that of key 0
    slots    address of the block table, stride of its rows in bytes, its columns and rows of a page; LOCAL: none
    """
    if rows == 0:
        return
    device_index = out.device.index
    # more rows make no difference
    key, *shares = choose(device_index, min(rows, MANY_ROWS), width_of(logits), k)
    bounds = starts, ends, (logits.shape[1] if limit is None else limit, shifts), slots
    launch_key(key, device_index, *arguments(logits, bounds, out, rows, k, *shares))


def arguments(
    logits: Any,
    bounds: tuple[tuple[int, ...], ...],
    out: Any,
    rows: int,
    k: int,
    share: int,
    groups: int,
) -> tuple[Any, ...]:
    """What the kernel's entry point takes. bounds: starts, ends, (limit, shifts), slots as `run` takes them."""
    columns = logits.shape[1]
    scores = logits.data_ptr(), logits.stride(0) * 4, columns
    early_lines = columns // 32 if rows * columns * 4 <= EARLY_BYTES else 0
    numbers = (number for part in bounds for number in part)
    return out, *scores, *numbers, rows, k, share, groups, early_lines


def launch_with(
    key: TopKKey,
    logits: Any,
    starts: Any,
    ends: Any,
    out: Any,
    rows: int,
    k: int,
    slots: tuple[int, int, int, int] = LOCAL,
) -> None:
    """`run` with a kernel of the caller's choice, wide enough for the rows: for tests and benchmarks."""
    shares = share_for(key, k), groups_for(key, k)
    bounds = starts, ends, (logits.shape[1], 0), slots
    launch_key(key, out.device.index, *arguments(logits, bounds, out, rows, k, *shares))
