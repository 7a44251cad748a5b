# SPDX-License-Identifier: Apache-2.0
"""sparse_mla_decode on Hopper for up to 16 heads and V4.1's own records, rows whole: keys on the tensor cores' long
side, as in prefill_swap_ab.py, whose products and softmax it shares, over records that are dequantized on their way.

A CTA takes work tiles: a query row with all its heads. Its keys come in tiles of 64. Warpgroups:

    0      QK and softmax     copies Q, S^T = K Q^T, softmax                     prefill_swap_ab.QkSoftmax
    1      PV and epilogue    O^T += V^T P, out                                  prefill_swap_ab.PvEpilogue
    2, 3   dequantizers       records -> bf16, 256 columns each                  HalfDequantizer
    4      producer           indices -> rows, their copies                      decode.Producer

    indices  gmem --> producer (index, then page and row of each key of a tile)
    records  gmem --bulk copy--> raw ring [4 stages of 32 keys] --dequantizers--> KV ring [8 quarters of tiles, bf16]
    scales   gmem --cp.async---> scale, same stages, of fp8_ds_mla; others are in the records     |            |
    Q        gmem --cp.async--> q ---------------------------------------------------wgmma--> S^T |            |
                                                                              p [2] <-- softmax --+            |
                                                                                +----------------------wgmma--> O^T
    out      gmem <---------------------------------------------------------------------------------------------+

A CTA has the whole of a record, so each is copied once and dequantized once; decode.py, which makes work tiles of 64
rows whatever the heads, takes as long for 8 heads as for 64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr, range_constexpr
from cutlass.memory import SmemAllocator

from cute_kernels.dsl import barriers, ptx, wgmma
from cute_kernels.dsl.entry import entry_point
from cute_kernels.dsl.tensor import address, length, stride_bytes
from cute_kernels.formats import FP8_DS_MLA, MXFP8_V41, NVFP4_V41
from cute_kernels.sparse_mla.hopper import index_loader
from cute_kernels.sparse_mla.hopper import prefill_swap_ab as swap_ab
from cute_kernels.sparse_mla.hopper.decode import Producer
from cute_kernels.sparse_mla.hopper.decode_dequantize import CHUNKS, E2M1_WORDS, RowConverter
from cute_kernels.sparse_mla.hopper.decode_smem import (
    CURSOR,
    DIM,
    END,
    EXTRA,
    FP8_KEYS,
    FP8_STAGES,
    HEADER,
    HEADERS,
    LAST,
    LAST_SLAB,
    PARTS,
    SLAB,
    SLAB_BYTES,
    SLABS,
    WARP_KEYS,
    RecordPart,
)
from cute_kernels.sparse_mla.kernel_args import DecodeArgs, DecodeKernelKey, fake_decode
from cute_kernels.sparse_mla.params import (
    KVSources,
    Logs,
    PrefillOutput,
    PrefillQuery,
    PrefillScheduler,
    Query,
    TileScheduler,
    logs_of,
)

# ---- config

KV_STAGES = 8
"""Quarters of tiles: two tiles."""

TILE_STAGES = swap_ab.QUARTERS
HALF_STAGES = TILE_STAGES // 2
"""Of a tile, and of what a dequantizer warpgroup has of it."""

PITCH = FP8_DS_MLA.data_bytes
"""From row to row of a stage, but for the shortest records."""

STAGE_BYTES = FP8_KEYS * PITCH

WHOLE = {
    FP8_DS_MLA.id: RecordPart(
        PITCH, PITCH, 0, None, FP8_DS_MLA.scale_bytes, FP8_DS_MLA.scale_bytes, PITCH, STAGE_BYTES
    ),
    MXFP8_V41.id: RecordPart(528, 528, 0, MXFP8_V41.data_bytes, 528, 0, PITCH, STAGE_BYTES),
    NVFP4_V41.id: RecordPart(288, 288, 0, NVFP4_V41.data_bytes, 288, 0, 288, STAGE_BYTES),
}
"""Records by format, as a CTA has the whole of them. Loads of rows meet in no bank: of PITCH, 16 bytes of two rows at a
time; of 288 bytes, 8 of four."""

PV, DEQUANT, PRODUCER, WARPGROUPS = 1, 2, 4, 5
THREADS = WARPGROUPS * 128

SOFTMAX_REGISTERS, PV_REGISTERS, DEQUANT_REGISTERS, PRODUCER_REGISTERS = 112, 128, 88, 56
"""Per thread, in steps of 8; all five warpgroups together have 480, what they are launched with."""


# ---- shared memory


class Raw(NamedTuple):
    """Addresses in shared memory of what the producer fills; by default sizes in bytes.

    fp8      [4][32 keys][PITCH] records
    scale    [4][32 keys] 8 scale bytes, of fp8_ds_mla
    header   [8] headers of tiles, as decode.py has them
    cursor   [4 producer warps] where it is
    """

    fp8: Any = FP8_STAGES * STAGE_BYTES
    scale: Any = FP8_STAGES * FP8_KEYS * FP8_DS_MLA.scale_bytes
    header: Any = HEADERS * HEADER
    cursor: Any = 4 * CURSOR


def smem_parts(config: swap_ab.SwapAbConfig) -> dict[str, int]:
    """Bytes of everything in shared memory but the barriers, in order: what the producer of prefill does not need of
    swap_ab's, and the raw ring."""
    unused = ("lists", "cursors")
    shared = {name: size for name, size in swap_ab.smem_parts(config).items() if name not in unused}
    return shared | {f"raw_{name}": size for name, size in Raw()._asdict().items()}


def smem_bytes(config: swap_ab.SwapAbConfig) -> int:
    stages = KV_STAGES + swap_ab.P_STAGES + FP8_STAGES
    return sum(smem_parts(config).values()) + stages * barriers.BYTES_PER_STAGE


def allocate(allocator: SmemAllocator, config: swap_ab.SwapAbConfig) -> tuple[swap_ab.Smem, Raw]:
    places = {}
    for name, size in smem_parts(config).items():
        align = 1024 if name in swap_ab.SWIZZLED else 16
        place = allocator.allocate_tensor(Int32, cute.make_layout(size // 4), byte_alignment=align)
        places[name] = place.iterator.toint()
    raw = Raw(*(places.pop(f"raw_{name}") for name in Raw._fields))
    return swap_ab.Smem(**places, lists=None, cursors=None), raw


@dataclass(frozen=True)
class Bars:
    """A CTA's mbarriers, and what completes their phases.

    fp8   full: all bytes of 32 keys' records, and the tile's header are there. empty: dequantizer warps have loaded
          them
    kv    full: a dequantizer warpgroup's warps have stored a quarter of a tile. empty: PV warps are done with it
    p     as in prefill_swap_ab.py
    """

    fp8: barriers.Ring
    kv: barriers.Ring
    p: barriers.Ring

    @classmethod
    def allocate(cls, smem: SmemAllocator) -> Bars:
        return cls(*(barriers.Ring.allocate(smem, stages) for stages in (FP8_STAGES, KV_STAGES, swap_ab.P_STAGES)))

    def initialize(self) -> None:
        """By one thread; the CTA synchronizes afterwards."""
        # of each producer warp that has keys in it one thread, and the threads that have keys' scales
        self.fp8.initialize(2 + FP8_KEYS, 8)
        self.kv.initialize(4, 4)
        self.p.initialize(4, 4)
        cute.arch.mbarrier_init_fence()


# ---- dequantization


@dataclass(frozen=True)
class HalfDequantizer:
    """A dequantizer warpgroup: converts 256 of the columns of every tile, those of number `half`, to bf16.

    A thread has the shares of two rows of a tile that it would have in CTA `half` of decode.py's clusters, and does
    with them what decode_dequantize.RowConverter does.

    formats   of both caches
    kv        address of the KV ring
    header    of the headers that softmax reads
    """

    formats: tuple[str, str]
    bars: Bars
    raw: Raw
    kv: Any
    header: Any
    half: Any
    thread: Any

    @cute.jit
    def run(self) -> None:
        """Fill this half of all tiles in the KV ring."""
        bars, raw_at = self.bars, self.raw
        lane = self.thread % 32
        warp = cute.arch.make_warp_uniform(self.thread // 32)
        quad, member = lane // 4, lane % 4
        row = warp * 8 + quad
        raw = cute.make_rmem_tensor((2 * CHUNKS * 4,), Int32)
        scales = cute.make_rmem_tensor((2,), Int32)
        exact = cute.make_rmem_tensor((2,), Int32)
        # of the thread's first chunk, if it has 2 m and 2 m + 1, or m and m + 4
        row_at = self.kv + self.half * (SLABS * SLAB_BYTES) + row * (SLAB * 2)
        code_at, rope_at = row_at + ((2 * member ^ quad) << 4), row_at + ((member ^ quad) << 4)

        tile, flags = Int32(0), Int32(0)
        while flags & END == 0:
            self.wait_full(tile)
            header_at = raw_at.header + tile % HEADERS * HEADER
            flags = ptx.load_shared_s32(header_at)
            if flags & END == 0:
                skipped = [ptx.load_shared_s32(header_at + 16 + (warp // 2 + 2 * piece) * 4) for piece in range(2)]
                skipped = [word >> (row % WARP_KEYS) for word in skipped]
                is_extra = False
                if const_expr(self.formats[0] != self.formats[1]):
                    is_extra = flags & EXTRA != 0
                kv_stage = tile % 2 * TILE_STAGES
                to = kv_stage * swap_ab.KV_STAGE_BYTES
                at = tile, row, member, code_at + to, rope_at + to
                if is_extra:
                    self.convert_tile(self.formats[1], raw, scales, exact, skipped, at)
                else:
                    self.convert_tile(self.formats[0], raw, scales, exact, skipped, at)
                if self.half == 0 and warp == 0:
                    self.store_header(flags, header_at, tile)
                cute.arch.sync_warp()
                if lane == 0:
                    for quarter in range_constexpr(HALF_STAGES):
                        cute.arch.mbarrier_arrive(bars.kv.full(kv_stage + self.half * HALF_STAGES + quarter))
            tile = tile + 1
        # the producer ends with two tiles that are none
        self.wait_full(tile)

    def wait_full(self, tile: Any) -> None:
        """Until a tile's records are there."""
        for piece in range(2):
            self.bars.fp8.wait_full((2 * tile + piece) % FP8_STAGES, tile // 2 & 1)

    @cute.jit
    def store_header(self, flags: Any, header_at: Any, tile: Any) -> None:
        """Tell the softmax which of a tile's keys are there, and whether it ends a work tile."""
        own_at = self.header + tile % swap_ab.HEADERS * swap_ab.HEADER
        if self.thread < 4:
            valid = ~ptx.load_shared_s32(header_at + 16 + self.thread * 4)
            ptx.store_shared_64(own_at + self.thread * 8, valid & 0xFF, (valid >> 8) & 0xFF)
        if self.thread == 0:
            last = Int32(index_loader.LAST) if flags & LAST != 0 else Int32(0)
            ptx.store_shared_s32(own_at + swap_ab.FLAGS_AT, last)

    @cute.jit
    def convert_tile(
        self, kv_format: cutlass.Constexpr, raw: Any, scales: Any, exact: Any, skipped: Any, at: Any
    ) -> None:
        """Load the thread's shares of a tile's rows, and store them as bf16."""
        tile, row, member, code_at, rope_at = at
        part, own = const_expr(PARTS[kv_format]), RowConverter(self.half)
        for piece in range_constexpr(2):
            stage = (2 * tile + piece) % FP8_STAGES
            self.load(kv_format, raw, exact, piece, stage, row, member, skipped[piece])
        for quarter in range_constexpr(HALF_STAGES):
            kv_stage = tile % 2 * TILE_STAGES + self.half * HALF_STAGES + quarter
            self.bars.kv.wait_empty(kv_stage, tile // 2 & 1)
        # the last slab first, as in decode_dequantize.py
        last_at = LAST_SLAB * SLAB_BYTES
        if const_expr(kv_format == NVFP4_V41.id):
            factors = [own.e2m1_factors(raw, piece, member) for piece in range(2)]
            own.convert_e2m1(raw, factors, LAST_SLAB, code_at + last_at, True)
            self.release(tile)
            for slab in range_constexpr(LAST_SLAB):
                own.convert_e2m1(raw, factors, slab, code_at + slab * SLAB_BYTES, True)
        else:
            is_large = own.set_scales(part, scales, exact)
            if const_expr(part.rotary != 0):
                if self.half != 0:
                    own.move(raw, LAST_SLAB, rope_at + last_at, skipped)
                else:
                    own.convert(raw, scales, LAST_SLAB, code_at + last_at)
            else:
                own.convert(raw, scales, LAST_SLAB, code_at + last_at)
            self.release(tile)
            for slab in range_constexpr(LAST_SLAB):
                own.convert(raw, scales, slab, code_at + slab * SLAB_BYTES)
            if is_large:
                own.scale_again(part, code_at, exact)

    @cute.jit
    def load(
        self,
        kv_format: cutlass.Constexpr,
        raw: Any,
        exact: Any,
        piece: cutlass.Constexpr,
        stage: Any,
        row: Any,
        member: Any,
        skipped: Any,
    ) -> None:
        """Load the thread's share of a row and of its scales. Of a row that is not there scales are 0, whatever there
        is in the stage."""
        part = const_expr(WHOLE[kv_format])
        row_at = self.raw.fp8 + stage * STAGE_BYTES + row * part.pitch
        mask = (skipped & 1) - 1
        if const_expr(kv_format == NVFP4_V41.id):
            first = const_expr(E2M1_WORDS * piece)
            found = ptx.load_shared_128(row_at + NVFP4_V41.data_bytes + self.half * 16)
            for word in range_constexpr(4):
                raw[first + word] = found[word] & mask
            codes_at = row_at + self.half * (DIM // 2) + member * 8
            for slab in range_constexpr(SLABS):
                codes = ptx.load_shared_64(codes_at + slab * (SLAB // 2))
                raw[first + 4 + 2 * slab], raw[first + 5 + 2 * slab] = codes
        else:
            if const_expr(kv_format == MXFP8_V41.id):
                # of the two bytes of each slab, that of the thread's half
                low, high = ptx.load_shared_64(row_at + MXFP8_V41.data_bytes + self.half * 8)
                exact[piece] = ptx.permute_bytes(low, high, 0x6420 + (member // 2) * 0x1111) & mask
            else:
                scale_at = self.raw.scale + (stage * FP8_KEYS + row) * FP8_DS_MLA.scale_bytes
                exact[piece] = ptx.load_shared_s32(scale_at + self.half * 4)
            # the fifth chunk is for the rotary columns of fp8_ds_mla
            for chunk in (*((SLABS,) if PARTS[kv_format].rotary else ()), *range(SLABS)):
                found = ptx.load_shared_128(row_at + self.half * DIM + member * 16 + chunk * SLAB)
                for word in range_constexpr(4):
                    raw[4 * (CHUNKS * piece + chunk) + word] = found[word]

    @cute.jit
    def release(self, tile: Any) -> None:
        """The producer may overwrite what the warp has loaded."""
        cute.arch.sync_warp()
        if self.thread % 32 == 0:
            for piece in range_constexpr(2):
                cute.arch.mbarrier_arrive(self.bars.fp8.empty((2 * tile + piece) % FP8_STAGES))


# ---- kernel


class RowLogs(NamedTuple):
    """As Logs of prefill, by query row and head, of lse [1, b, h, s_q]. tokens: divisor"""

    logs: Logs
    tokens: Any

    def store(self, place: tuple[Any, ...], number: Any, condition: Any) -> None:
        row, head = place
        batch, token = divmod(row, self.tokens)
        self.logs.store((Int32(0), batch, head, token), number, condition)


class DecodeSwapAbKernel:
    """See kernel_args.DecodeArgs; rows are whole, and rows of q, and of out, equally far apart."""

    def __init__(self, key: DecodeSwapAbKey) -> None:
        self.key, self.config = key, key.config
        self.shared = swap_ab.SwapAbKernel(key.config)

    @cute.jit
    def launch(self, args: DecodeArgs) -> None:
        self.kernel.set_name_prefix(self.key.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        q, tokens = args.q, length(args.q, 1)
        rows = length(q, 0) * tokens
        q_row = cutlass.select_(tokens == 1, stride_bytes(q, 0), stride_bytes(q, 1))
        out_row = cutlass.select_(tokens == 1, stride_bytes(args.out, 1), stride_bytes(args.out, 2))
        divisor = cute.fast_divmod_create_divisor_v2
        kernel = self.kernel(
            PrefillQuery(address(q), q_row, stride_bytes(q, 2), length(q, 2)),
            args.query(),
            args.sources(),
            (address(args.out), out_row, stride_bytes(args.out, 3)),
            logs_of(args.lse),
            args.sink,
            args.scale_log2,
            (divisor(tokens), divisor(Int32(1))),
            rows,
            self.shared.tiled_mmas(),
            self.shared.smem_layouts(),
        )
        kernel.launch(
            grid=[cutlass.min(args.ctas, rows), 1, 1],
            block=[THREADS, 1, 1],
            min_blocks_per_mp=1,
            stream=args.stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        q: PrefillQuery,
        query: Query,
        sources: KVSources,
        rows_of_out: tuple[Any, Any, Any],
        lse: Logs,
        sink: Int64,
        scale_log2: Float32,
        divisors: tuple[Any, Any],
        rows: Int32,
        mma: tuple[cute.TiledMma, cute.TiledMma, cute.TiledMma],
        layouts: tuple[cute.ComposedLayout, cute.ComposedLayout, cute.ComposedLayout],
    ) -> None:
        thread, _, _ = cute.arch.thread_idx()
        ctas, _, _ = cute.arch.grid_dim()
        group = cute.arch.make_warp_uniform(thread // wgmma.WARPGROUP)
        config, allocator = self.config, SmemAllocator()
        smem, raw = allocate(allocator, config)
        bars = Bars.allocate(allocator)
        if thread == 0:
            bars.initialize()
        cute.arch.sync_threads()
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()

        for one in mma[1:]:
            wgmma.accumulate(one)
        kv_layout, q_layout, p_layout = layouts
        own, first = thread % wgmma.WARPGROUP, ptx.block_again()
        scheduler = PrefillScheduler(first, rows, ctas, Int32(0))
        tokens, one_divisor = divisors
        if group < PV:
            cute.arch.setmaxregister_increase(SOFTMAX_REGISTERS)
            out = PrefillOutput(*rows_of_out, None, RowLogs(lse, tokens))
            columns = swap_ab.ColumnSoftmax(
                config=config,
                bars=bars,
                smem=smem,
                scheduler=scheduler,
                q=q,
                out=out,
                sink=sink,
                scale_log2=scale_log2,
                thread=own,
                lane=own & 31,
                warp=cute.arch.make_warp_uniform(own >> 5),
            )
            swap_ab.QkSoftmax(columns, mma[:2], (kv_layout, q_layout)).run()
        elif group < DEQUANT:
            cute.arch.setmaxregister_increase(PV_REGISTERS)
            out = PrefillOutput(*rows_of_out, None, RowLogs(lse, tokens))
            lane, warp = own & 31, cute.arch.make_warp_uniform(own >> 5)
            swap_ab.PvEpilogue(
                config, bars, smem, scheduler, q, out, own, lane, warp, mma[2], (p_layout, kv_layout)
            ).run()
        elif group < PRODUCER:
            cute.arch.setmaxregister_decrease(DEQUANT_REGISTERS)
            half = cute.arch.make_warp_uniform(group - DEQUANT)
            HalfDequantizer(self.key.formats, bars, raw, smem.kv, smem.header, half, own).run()
        else:
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            cursor = raw.cursor + cute.arch.make_warp_uniform(own // 32) * CURSOR
            tiles = TileScheduler(first, rows, ctas, one_divisor, one_divisor, tokens, Int32(0))
            Producer(self.key, bars, raw, Int32(0), tiles, query, sources, own, cursor).run()
        # no producer thread leaves before its last copies are there, which dequantizers wait for
        cute.arch.sync_threads()


# ---- key


@dataclass(frozen=True)
class DecodeSwapAbKey(DecodeKernelKey):
    """What distinguishes one compiled kernel from another.

    heads              8 or 16: how many there are at most
    second             how the extra list names its rows: "none" (there is none) or "listed" by slot
    format0, format1   record formats of both caches
    """

    kernel_name: ClassVar[str] = "sparse_mla.hopper.decode_swap_ab"
    heads: int = 8
    second: str = "listed"
    format0: str = FP8_DS_MLA.id
    format1: str = NVFP4_V41.id

    @property
    def formats(self) -> tuple[str, str]:
        return self.format0, self.format1

    @property
    def parts(self) -> tuple[RecordPart, RecordPart]:
        """Of both caches' records, which a CTA has the whole of."""
        return WHOLE[self.format0], WHOLE[self.format1]

    @property
    def has_two_formats(self) -> bool:
        return self.format0 != self.format1

    @property
    def name(self) -> str:
        kinds = "_".join(kv_format.split("_")[0] for kv_format in self.formats)
        return f"sparse_mla_decode_swap_ab_h{self.heads}_{self.second}_{kinds}"

    @property
    def config(self) -> swap_ab.SwapAbConfig:
        return swap_ab.SwapAbConfig(self.name, self.heads, kv_stages=KV_STAGES, fences_kv=True)

    @property
    def smem_bytes(self) -> int:
        return smem_bytes(self.config)

    @property
    def instructions(self) -> tuple[str, ...]:
        return "wgmma", "bulk.load", "mbarrier", "stmatrix", "setmaxnreg", "griddepcontrol", "st.global.128"

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        return entry_point(DecodeSwapAbKernel(self).launch, fake_decode(False, self.format0, self.format1))
