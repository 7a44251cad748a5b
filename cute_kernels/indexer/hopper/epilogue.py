# SPDX-License-Identifier: Apache-2.0
"""Epilogue of Hopper's score kernels: heads added up in registers, scores stored.

A warpgroup's products are [64 keys, heads of its rows]: a part of the group's rows, or all. A thread holds two keys
and, of every 8 heads, two neighbouring ones, for all these rows: it adds its heads of a row, four lanes exchange what
they have, and each is left with one key and every second row. The order of these sums is the same in every kernel here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr, range_constexpr

from cute_kernels.dsl import ptx
from cute_kernels.indexer.params import KEY_TILE, RowGroups, Windows
from cute_kernels.indexer.producer import KeyTile


class RowState(NamedTuple):
    """What a thread has of its part of a group's rows, in rmem tensors.

    weights         of its heads, all these rows
    firsts, stops   keys that every second row sees
    targets         addresses of these rows' scores of key 0
    """

    weights: Any
    firsts: Any
    stops: Any
    targets: Any

    @classmethod
    def allocate(cls, weights: int, rows: int) -> RowState:
        of_weights = cute.make_rmem_tensor((weights,), Float32)
        firsts, stops = (cute.make_rmem_tensor((rows,), Int32) for _ in range(2))
        return cls(of_weights, firsts, stops, cute.make_rmem_tensor((rows,), Int64))


@dataclass(frozen=True)
class Epilogue:
    """The epilogue of one thread.

    own    which of 64 keys is its
    out    address of the scores; out_stride in bytes
    part   which of the config's parts of a group's rows is its
    """

    config: Any
    paged: bool
    groups: RowGroups
    windows: Windows
    smem: Any
    out: Any
    out_stride: Any
    lane: Any
    own: Any
    part: Any

    @property
    def rows(self) -> int:
        """Of a part."""
        return int(self.config.rows // self.config.parts)

    @property
    def columns(self) -> int:
        """Of a part."""
        return int(self.config.columns // self.config.parts)

    @property
    def held(self) -> int:
        """Rows whose scores the thread stores."""
        return -(-self.rows // 2)

    def allocate(self) -> RowState:
        return RowState.allocate(self.columns // 4, self.held)

    @cute.jit
    def load_rows(self, state: RowState, group: Any, query_stage: Any) -> None:
        """What belongs to the part's rows of a group: a thread's heads of all of them, of every 8 the two of its
        products' columns; of every second row which keys it sees and where its scores go."""
        config, smem, windows, groups = self.config, self.smem, self.windows, self.groups
        weights, firsts, stops, targets = state
        source = smem.weights + (query_stage * config.parts + self.part) * (self.columns * 4)
        for eight in range_constexpr(self.columns // 8):
            pair = ptx.load_shared_f32x2(source + (eight * 8 + self.lane % 4 * 2) * 4)
            weights[2 * eight], weights[2 * eight + 1] = pair
        request, first_row = groups.coords(group, config.rows)
        for i in range_constexpr(self.held):
            part_row = 2 * i + (self.lane & 1)
            row = self.part * self.rows + part_row
            is_row = (part_row < self.rows) & (first_row + row < groups.count)
            place = smem.windows + (query_stage * 2 * config.rows + (row if is_row else Int32(0))) * 4
            start = Int32(0)
            if const_expr(not self.paged):
                start = ptx.load_shared_s32(place)
            first, stop, shift = windows.clip(start, ptx.load_shared_s32(place + config.rows * 4))
            firsts[i] = first
            stops[i] = stop if is_row else first
            number = Int64(request) * Int64(groups.count) + Int64(first_row + row)
            targets[i] = self.out + number * self.out_stride - Int64(shift) * 4

    @cute.jit
    def store(
        self, sums: Any, state: RowState, tile: KeyTile, scale: Any, is_wanted: Any = None, half: Any = 0
    ) -> None:
        """Write the scores of the rows and the key that the thread has, in a half of the tile, if they are wanted."""
        _, firsts, stops, targets = state
        key = tile.first_key + half * KEY_TILE + self.own
        box = half * (KEY_TILE // self.config.box)
        if const_expr(self.config.box < KEY_TILE):
            box = box + (self.own >> self.config.box.bit_length() - 1)
        for i in range_constexpr(self.held):
            score = sums[i] * scale
            if const_expr(self.paged):
                is_there = tile.boxes & (1 << box) != 0
                score = score if is_there else Float32(-Float32.inf)
            is_seen = key < stops[i]
            if const_expr(not self.paged):
                is_seen = is_seen & (key >= firsts[i])
            if const_expr(is_wanted is not None):
                is_seen = is_seen & is_wanted[i]
            ptx.store_global_f32(targets[i] + Int64(key) * 4, score, is_seen)

    @cute.jit
    def add_heads(self, products: cute.Tensor, weights: cute.Tensor) -> Any:
        """Sums over heads: of rows lane % 2, lane % 2 + 2, ... of the part, for the thread's key."""
        eights = self.config.heads // 8
        sums = [[Float32(0.0)] * 2 for _ in range(self.rows)]
        for i in range_constexpr(2 * eights):
            for row in range_constexpr(self.rows):
                column = row * eights + i // 2
                for half in range_constexpr(2):
                    product = ptx.relu(products[column * 4 + half * 2 + i % 2])
                    weight = weights[row * 2 * eights + i]
                    if const_expr(i == 0):
                        sums[row][half] = ptx.mul_rn(product, weight)
                    else:
                        sums[row][half] = ptx.fma_rn(product, weight, sums[row][half])
        return self.reduce_quad(sums)

    @cute.jit
    def reduce_quad(self, sums: Any) -> Any:
        """Sums over four lanes of what each has of every row's two keys."""
        is_upper, is_odd = self.lane & 2 != 0, self.lane & 1 != 0
        rows = []
        for row in range_constexpr(self.rows):
            low, high = sums[row]
            got = cute.arch.shuffle_sync_bfly(low if is_upper else high, 2)
            rows.append(ptx.add_rn(high if is_upper else low, got))
        totals = []
        for i in range_constexpr(0, self.rows, 2):
            if const_expr(i + 1 < self.rows):
                even, odd = rows[i], rows[i + 1]
                got = cute.arch.shuffle_sync_bfly(even if is_odd else odd, 1)
                totals.append(ptx.add_rn(odd if is_odd else even, got))
            else:
                totals.append(ptx.add_rn(rows[i], cute.arch.shuffle_sync_bfly(rows[i], 1)))
        return totals
