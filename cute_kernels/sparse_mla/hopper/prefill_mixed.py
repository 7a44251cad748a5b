# SPDX-License-Identifier: Apache-2.0
"""sparse_mla_mixed on Hopper for more than 16 heads, or 32 over e4m3 caches: prefill's kernel, with rows of two paged
caches.

The columns that count of a query row are numbered from its window's on, and the compressed ones follow: a tile may have
rows of both caches, and its flags say how many are the window's (params.MixedKV).

Over bf16 caches the producer is prefill's. e4m3 rows and queries become f16 on their way to tensor cores: f16 holds
every e4m3 number, so all products are exact. Columns are multiplied in an order of their own (prefill_codes.py).

    KV   gmem --cp.async--> the stage that they will fill --Fp8Producer: e4m3 -> f16--> the same stage
    Q    gmem --cp.async--> a stage of the KV ring --QK warps: e4m3 -> f16--> registers, or q

Where convert_mixed has made all rows f16 ahead, they are copied as bf16 ones, and only queries become f16 here
(Fp8QueryProducer).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import cutlass.cute as cute
from cutlass import BFloat16, Constexpr, Float8E4M3FN, Float16, Int32, Int64, const_expr, range_constexpr

from cute_kernels.dsl import ptx
from cute_kernels.dsl.entry import entry_point
from cute_kernels.sparse_mla.hopper.prefill import (
    KV_STAGE_BYTES,
    KV_STAGES,
    SLAB,
    SLABS,
    Bars,
    PrefillConfig,
    PrefillKernel,
    PrefillKey,
    Producer,
    Smem,
    store_header,
)
from cute_kernels.sparse_mla.hopper.prefill_codes import CODE_SLABS
from cute_kernels.sparse_mla.hopper.prefill_index_loader import (
    COPIED_ROWS,
    END,
    KEPT_AT,
    LAST,
    IndexLoader,
    own_lane,
)
from cute_kernels.sparse_mla.hopper.prefill_softmax import SLAB_BYTES, SLAB_ROW_BYTES
from cute_kernels.sparse_mla.kernel_args import fake_mixed
from cute_kernels.sparse_mla.params import PrefillQuery

# ---- config

MIXED = PrefillConfig("sparse_mla_mixed")
MIXED_FP8 = PrefillConfig("sparse_mla_mixed_fp8", Float16, codes="all")
MIXED_FP8_CONVERTED = PrefillConfig("sparse_mla_mixed_fp8_converted", Float16, codes="queries")

# ---- producer

CHUNK = 16
"""Columns, and bytes, of a lane's copy: two chunks of 16 bytes as f16."""

PAIR = 2
"""Slabs whose codes lie where one slab will, 128 bytes of each row."""

PAIRS = SLABS // PAIR

GROUP = 8
"""Rows of a group of copies, and of what all lanes convert at a time, each lane 16 columns of a slab: even and odd rows
lie in other banks before as behind."""

READ_AHEAD = 1
"""Steps of a conversion, a group's rows of a slab each, whose codes are read before one is stored; two spill."""


@dataclass(frozen=True)
class Fp8Producer:
    """The producer warpgroup over e4m3 caches: copies codes of queries, and codes of rows of kv, which it makes f16.

    A warp does 16 rows of every tile, alone from the caches to the stages of the ring. It has all of their codes copied
    to the stage that they will fill, at once, and makes them f16 slab by slab as they come. Its cursor keeps what
    Producer's keeps.
    """

    row_dtype: ClassVar[Any] = Float8E4M3FN
    waits_late: ClassVar[bool] = False
    bars: Bars
    smem: Smem
    q: PrefillQuery
    loader: IndexLoader

    @cute.jit
    def run(self) -> None:
        """Fill the KV ring."""
        loader = self.loader
        loader.start()
        loader.keep(loader.scheduler.first)
        flags = Int32(0)
        turn = Int32(0)
        while flags & END == 0:
            self.bars.kv.wait_empty(turn & 3, turn >> 2)
            Producer.give_queries(self, turn & 3)
            turn = self.advance(turn)
            flags = Int32(0)
            while flags & LAST == 0:
                flags = self.give_rows(turn)
                turn = self.advance(turn)
        # no lane ends with copies under way
        cute.arch.cp_async_wait_group(0)

    @cute.jit
    def give_rows(self, turn: Int32) -> Any:
        """Give the next tile's rows. Returns its flags."""
        smem, loader = self.smem, self.loader
        # what it has copied behind rows two tiles before is there
        cute.arch.sync_warp()
        position = loader.position()
        place, flags = loader.rows_of(position.slot)
        stage = turn & 3
        self.bars.kv.wait_empty(stage, turn >> 2)
        store_header(loader, smem.header, stage, place, flags)
        self.copy_rows_async(place, flags, stage)
        loader.copy_indices_async(position)
        loader.advance(position)
        cute.arch.cp_async_commit_group()
        self.convert(stage)
        self.arrive_full(stage)
        return flags

    @cute.jit
    def advance(self, turn: Int32) -> Any:
        """The next stage and its phase, in one number: there is no register for two."""
        following = turn + 1
        return following ^ 7 if following & 3 == KV_STAGES else following

    @cute.jit
    def fill_queries(self, stage_at: Any) -> None:
        """Start to copy the warp's share of the codes of the kept work tile's queries to a stage."""
        loader, q = self.loader, self.q
        for i in range_constexpr(loader.own_rows // COPIED_ROWS):
            # found for each row by itself: there is no register for what they have in common
            query, first = loader.scheduler.coords(ptx.load_shared_s32(loader.cursor + KEPT_AT))
            row, chunk = loader.first_chunk()
            head = first + row + COPIED_ROWS * i
            source = q.base + Int64(query) * q.row + Int64(head) * q.head + (own_lane() & 7) * CHUNK
            # nothing is read of heads that are not there
            size = Int32(CHUNK) if head < q.heads else Int32(0)
            to = stage_at + (chunk ^ (i % 2 * 64)) + i * (COPIED_ROWS * SLAB_ROW_BYTES)
            for pair in range_constexpr(PAIRS):
                at = source + pair * SLAB_ROW_BYTES
                ptx.copy_async_or_zero(to + pair * SLAB_BYTES, at, CHUNK, size, is_read_once=True)

    @cute.jit
    def copy_rows_async(self, place: Any, flags: Any, stage: Any) -> None:
        """Start to copy the codes of the warp's rows of a tile."""
        loader = self.loader
        target = self.copied_at(stage)
        for i in range_constexpr(loader.own_rows // COPIED_ROWS):
            number = COPIED_ROWS * i + (own_lane() >> 3)
            own = cute.arch.shuffle_sync(place, number)
            source = loader.kv.address(own, flags, loader.own_warp() * loader.own_rows + number)
            self.copy_async(i, source, own >= 0, target)

    @cute.jit
    def copy_async(self, i: Constexpr, source: Any, is_there: Any, target: Any) -> None:
        """Start to copy the codes of COPIED_ROWS rows, of which the lane has the one at `source`, or zeros."""
        size = Int32(CHUNK) if is_there else Int32(0)
        source = source + (own_lane() & 7) * CHUNK
        for pair in range_constexpr(PAIRS):
            to = target + pair * SLAB_BYTES + i * (COPIED_ROWS * SLAB_ROW_BYTES)
            ptx.copy_async_or_zero(to, source + pair * SLAB_ROW_BYTES, CHUNK, size)
        if const_expr((i + 1) * COPIED_ROWS % GROUP == 0):
            cute.arch.cp_async_commit_group()

    def codes_at(self, stage: Any) -> Any:
        """Where the warp's codes lie: in the second half of the slabs that they become, where its rows will be. The
        first half can be filled at once, and what another slab takes the place of has been read. Odd rows have the
        halves of their 128 bytes swapped."""
        half_at = self.smem.kv + stage * KV_STAGE_BYTES + PAIRS * SLAB_BYTES
        return half_at + self.loader.own_warp() * (self.loader.own_rows * SLAB_ROW_BYTES)

    def copied_at(self, stage: Any) -> Any:
        """Where the lane's first chunk goes."""
        row, chunk = own_lane() >> 3, own_lane() & 7
        return self.codes_at(stage) + row * SLAB_ROW_BYTES + (chunk ^ ((row & 1) << 2)) * CHUNK

    def convert(self, stage: Any) -> None:
        """Make the warp's rows f16. One group of copies follows those of codes."""
        own_rows = self.loader.own_rows
        row, chunk = own_lane() >> 2, own_lane() & 3
        source = self.codes_at(stage) + row * SLAB_ROW_BYTES + (chunk ^ ((row & 1) << 2)) * CHUNK
        place = self.smem.kv + stage * KV_STAGE_BYTES
        place = place + (self.loader.own_warp() * own_rows + row) * SLAB_ROW_BYTES + ((2 * chunk) ^ row) * 16
        steps = [(first, slab) for first in range(0, own_rows, GROUP) for slab in range(SLABS)]
        loaded: list[Any] = []
        for number in range(len(steps)):
            # some are on their way while others are converted
            while len(loaded) < min(number + 1 + READ_AHEAD, len(steps)):
                first, slab = steps[len(loaded)]
                if slab == 0:
                    self.wait_copies((own_rows - first) // GROUP)
                from_ = (source ^ (slab % PAIR * SLAB)) + slab // PAIR * SLAB_BYTES + first * SLAB_ROW_BYTES
                loaded.append(ptx.load_shared_128_in_order(from_))
            first, slab = steps[number]
            if slab >= PAIRS:
                # all lanes have read what lies where this slab goes
                cute.arch.sync_warp()
            words = [word for four in loaded[number] for word in ptx.f16x2_of_e4m3x4(four)]
            offset = slab * SLAB_BYTES + first * SLAB_ROW_BYTES
            ptx.store_shared_128(place + offset, words[::2])
            ptx.store_shared_128((place ^ 16) + offset, words[1::2])

    def wait_copies(self, behind: int) -> None:
        """Until all copies of the warp but those of the last groups are there."""
        cute.arch.cp_async_wait_group(behind)
        cute.arch.sync_warp()

    @cute.jit
    def arrive_full(self, stage: Any) -> None:
        """The warp has stored its rows of a stage; who reads them makes sure that tensor cores see them."""
        cute.arch.sync_warp()
        if own_lane() == 0:
            cute.arch.mbarrier_arrive(self.bars.kv.full(stage), arrive_count=32 + 1)


@dataclass(frozen=True)
class Fp8QueryProducer(Producer):
    """The producer warpgroup over rows that convert_mixed has made f16: only queries are codes. convert_mixed waits for
    all kernels before it, and lets others start behind that: lists and queries may be read before it has ended."""

    row_dtype: ClassVar[Any] = Float16
    waits_late: ClassVar[bool] = True

    @cute.jit
    def fill_queries(self, stage_at: Any) -> None:
        """Start to copy the warp's share of the codes of the kept work tile's queries to a stage."""
        self.copy_queries_async(stage_at, tuple(range(CODE_SLABS)))


# ---- keys


@dataclass(frozen=True)
class MixedKey(PrefillKey):
    """What distinguishes one compiled kernel from another: nothing but the architecture."""

    kernel_name: ClassVar[str] = "sparse_mla.hopper.prefill_mixed"

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        return entry_point(PrefillKernel(MIXED, Producer).launch, fake_mixed(BFloat16))


@dataclass(frozen=True)
class MixedFp8Key(MixedKey):
    """As MixedKey, over e4m3 caches."""

    kernel_name: ClassVar[str] = "sparse_mla.hopper.prefill_mixed_fp8"

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        return entry_point(PrefillKernel(MIXED_FP8, Fp8Producer).launch, fake_mixed(Float8E4M3FN))


@dataclass(frozen=True)
class MixedFp8ConvertedKey(MixedKey):
    """As MixedKey, over f16 rows that convert_mixed has made of e4m3 caches, and with e4m3 queries."""

    kernel_name: ClassVar[str] = "sparse_mla.hopper.prefill_mixed_fp8_converted"

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        kernel = PrefillKernel(MIXED_FP8_CONVERTED, Fp8QueryProducer)
        return entry_point(kernel.launch, fake_mixed(Float8E4M3FN, Float16))
