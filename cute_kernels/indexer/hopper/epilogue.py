# SPDX-License-Identifier: Apache-2.0
"""Epilogue of Hopper's score kernels: heads added up in registers, scores stored.

The products of a tile are [64 keys, heads of a group's rows]. A thread holds two keys and, of every 8 heads, two
neighbouring ones, for all rows of the group: it adds its heads of a row, four lanes exchange what they have, and each
is left with one key and every second row. The order of these sums is the same in every kernel here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr, range_constexpr

from cute_kernels.dsl import ptx
from cute_kernels.indexer.params import KEY_TILE, RowGroups, Windows
from cute_kernels.indexer.producer import KeyTile


class RowState(NamedTuple):
    """What a thread has of a group's rows, in rmem tensors.

    weights         of its heads, all rows
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

    own            which of a tile's keys is its
    out            address of the scores; out_stride in bytes
    policy         of L2 for the scores, if it is not the usual one
    bound          a power of two that all products are below, if none can be NaN, or 0: every second one then counts
                   as a share of it, for which relu is a multiplication, so that two pipes have half of these each
    pairs_halves   whether the thread stores, of a single row, one key in half lane % 2 of a tile of 128
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
    policy: Any = None
    bound: float = 0.0
    pairs_halves: bool = False

    @property
    def rows(self) -> int:
        """Of an accumulator."""
        return int(self.config.rows // self.config.accumulators)

    @property
    def held(self) -> int:
        """Rows of an accumulator whose scores the thread stores."""
        return -(-self.rows // 2)

    @property
    def has_holes(self) -> bool:
        """Whether a row may see keys that do not exist, which score -inf."""
        return self.paged

    def is_there(self, tile: KeyTile, own: Any) -> Any:
        """Whether key number `own` of a tile exists."""
        return tile.boxes & (1 << (own // self.config.box)) != 0

    def allocate(self) -> RowState:
        return RowState.allocate(self.config.columns // 4, self.held * self.config.accumulators)

    @cute.jit
    def load_rows(self, state: RowState, group: Any, query_stage: Any) -> None:
        """What belongs to a group's rows: a thread's heads of all of them, of every 8 the two of its products' columns;
        of every second row which keys it sees and where its scores go."""
        config, smem, windows, groups = self.config, self.smem, self.windows, self.groups
        weights, firsts, stops, targets = state
        source = smem.weights + query_stage * (config.columns * 4)
        for eight in range_constexpr(config.columns // 8):
            pair = ptx.load_shared_f32x2(source + (eight * 8 + self.lane % 4 * 2) * 4)
            for i in range_constexpr(2):
                weights[2 * eight + i] = pair[i] * Float32(self.bound) if const_expr(self.is_share(i)) else pair[i]
        request, first_row = groups.coords(group, config.rows)
        for i in range_constexpr(self.held * config.accumulators):
            row = Int32(0) if const_expr(self.pairs_halves) else 2 * i + (self.lane & 1)
            is_row = (row < config.rows) & (first_row + row < groups.count)
            place = smem.windows + (query_stage * 2 * config.rows + (row if is_row else Int32(0))) * 4
            start: Any = 0
            if const_expr(not self.paged):
                start = ptx.load_shared_s32(place)
            first, stop, shift = windows.clip(start, ptx.load_shared_s32(place + config.rows * 4))
            firsts[i] = first
            stops[i] = stop if is_row else first
            number = Int64(request) * Int64(groups.count) + Int64(first_row + row)
            targets[i] = self.out + number * self.out_stride - Int64(shift) * 4

    @cute.jit
    def store_products(
        self, index: cutlass.Constexpr, products: cute.Tensor, state: RowState, tile: KeyTile, scale: Any
    ) -> None:
        """Add up accumulator `index` of a tile and store its scores."""
        self.store(index, self.add_heads(index, products, state.weights), state, tile, scale)

    @cute.jit
    def store(
        self,
        index: cutlass.Constexpr,
        sums: Any,
        state: RowState,
        tile: KeyTile,
        scale: Any,
        is_wanted: Any = None,
        half: Any = 0,
    ) -> None:
        """Write the scores of an accumulator's rows that the thread has, of a half of a tile of 128 keys if it is one,
        if they are wanted."""
        _, firsts, stops, targets = state
        own = self.own + half * KEY_TILE
        key = tile.first_key + own
        for i in range_constexpr(len(sums)):
            row = index * self.held + i
            score = sums[i] * scale
            if const_expr(self.has_holes):
                score = score if self.is_there(tile, own) else Float32(-Float32.inf)
            is_seen = (key >= firsts[row]) & (key < stops[row])
            if const_expr(is_wanted is not None):
                is_seen = is_seen & is_wanted[i]
            ptx.store_global_f32(targets[row] + Int64(key) * 4, score, is_seen, self.policy)

    @cute.jit
    def add_heads(self, index: cutlass.Constexpr, products: cute.Tensor, weights: cute.Tensor) -> Any:
        """Sums over heads: of rows lane % 2, lane % 2 + 2, ... of accumulator `index`, for the thread's key."""
        return self.reduce_quad(self.sum_heads(index, products, weights))

    @cute.jit
    def sum_heads(self, index: cutlass.Constexpr, products: cute.Tensor, weights: cute.Tensor) -> Any:
        """Sums over the thread's heads, for every row its two keys."""
        eights = self.config.heads // 8
        first = index * (self.rows * 2 * eights)
        sums = [[Float32(0.0)] * 2 for _ in range(self.rows)]
        for i in range_constexpr(2 * eights):
            for row in range_constexpr(self.rows):
                column = row * eights + i // 2
                for half in range_constexpr(2):
                    product = self.relu(products[column * 4 + half * 2 + i % 2], i)
                    weight = weights[first + row * 2 * eights + i]
                    if const_expr(i == 0):
                        sums[row][half] = ptx.mul_rn(product, weight)
                    else:
                        sums[row][half] = ptx.fma_rn(product, weight, sums[row][half])
        return sums

    def is_share(self, number: int) -> bool:
        """Whether products of the thread's head of that number count as shares of `bound`."""
        return self.bound > 0 and number % 2 == 0

    def relu(self, product: Any, number: int) -> Any:
        """Of a product, or of its share."""
        if not self.is_share(number):
            return ptx.relu(product)
        return ptx.multiply_saturated(product, Float32(1.0 / self.bound))

    @cute.jit
    def reduce_quad(self, sums: Any) -> Any:
        """Sums over four lanes of what each has of two keys of every row, or of every half of one."""
        is_upper, is_odd = self.lane & 2 != 0, self.lane & 1 != 0
        rows = []
        for low, high in sums:
            got = cute.arch.shuffle_sync_bfly(low if is_upper else high, 2)
            rows.append(ptx.add_rn(high if is_upper else low, got))
        totals = []
        for i in range_constexpr(0, len(rows), 2):
            if const_expr(i + 1 < len(rows)):
                even, odd = rows[i], rows[i + 1]
                got = cute.arch.shuffle_sync_bfly(even if is_odd else odd, 1)
                totals.append(ptx.add_rn(odd if is_odd else even, got))
            else:
                totals.append(ptx.add_rn(rows[i], cute.arch.shuffle_sync_bfly(rows[i], 1)))
        return totals
