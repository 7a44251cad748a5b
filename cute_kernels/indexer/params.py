"""Records that the score kernels share: groups of query rows, the keys that rows see, where keys lie; entry arguments.

Query rows of one request that follow each other form a group, at most `rows` of them. A group is scored against the
keys that any of its rows sees, a tile of keys at a time. A score depends on its row and its key alone, not on the tile
or the CTA that computes it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from cute_kernels.dsl import ptx

WARP = 32

KEY_TILE = 64
"""Keys of a tile on Hopper, the rows of a warpgroup's wgmma, and where mma.sync computes products."""


def fake_arguments(has_q_scales: bool = False) -> tuple[Any, ...]:
    """To compile Hopper's and Blackwell's kernels with; some of them take the queries' scales."""

    def matrix() -> Any:
        return make_fake_tensor(Float32, (cute.sym_int(), cute.sym_int()), stride=(cute.sym_int64(), 1))

    numbers = [Int64(0)] * 4 + [Int32(1)] * 2
    numbers += [Int64(0)] * 4 + [Int32(1)] * 2 + [Int64(0)] * 2 + [Int32(0)]
    numbers += [Int64(0)] * 3 + [Int32(0)] * 4 + [Int64(0)] * (3 if has_q_scales else 0) + [Int32(1)]
    return matrix(), matrix(), *numbers, make_fake_stream(use_tvm_ffi_env_stream=True)


class RowGroups(NamedTuple):
    """The groups of a call: `requests` times `count` rows, in `per_request` groups each; `ctas` share them."""

    requests: Any
    count: Any
    per_request: Any
    ctas: Any

    @classmethod
    def of(cls, requests: Any, count: Any, rows: int, ctas: Any) -> RowGroups:
        """Of at most `rows` rows each. On the host's side of the launch."""
        divisor = cute.fast_divmod_create_divisor_v2
        return cls(requests, count, divisor(cute.ceil_div(count, rows)), divisor(ctas))

    def total(self) -> Any:
        return self.requests * self.per_request.divisor

    def coords(self, group: Any, rows: int) -> tuple[Any, Any]:
        """Request of a group, and the first of its rows among the request's."""
        request, number = divmod(group, self.per_request)
        return request, number * rows


class Windows(NamedTuple):
    """Which keys each row sees: addresses of int32 starts and ends, and bytes from one request's ends to the
    next one's.

    limit     number of keys there are
    columns   of the scores
    shifts    -1 if a row's first column is that of its start, 0 if it is that of key 0
    skip      a row that sees no more keys than these is not scored: it counts as one that sees none
    """

    starts: Any
    ends: Any
    end_request: Any
    limit: Any
    columns: Any
    shifts: Any
    skip: Any

    def start_address(self, row: Any) -> Any:
        return self.starts + Int64(row) * 4

    def end_address(self, request: Any, row: Any) -> Any:
        return self.ends + Int64(request) * self.end_request + Int64(row) * 4

    @cute.jit
    def clip(self, start: Any, end: Any) -> tuple[Any, Any, Any]:
        """First key, end of the keys (both 0 if there are none) and the key of column 0."""
        shift = start & self.shifts
        first = cutlass.max(start, 0)
        stop = Int32(ptx.min_s64(Int64(shift) + Int64(self.columns), Int64(cutlass.min(end, self.limit))))
        is_any = (first < stop) & (stop - first > self.skip)
        return (first if is_any else Int32(0)), (stop if is_any else Int32(0)), shift

    @cute.jit
    def load(self, request: Any, row: Any, is_wanted: Any, paged: cutlass.Constexpr) -> tuple[Any, Any, Any]:
        """As `clip`, of a row; no keys if it is not wanted."""
        end = ptx.load_global_s32_where(is_wanted, self.end_address(request, row), is_shared=True)
        start = Int32(0)
        if const_expr(not paged):
            start = ptx.load_global_s32_where(is_wanted, self.start_address(row), is_shared=True)
        return self.clip(start, end)

    @cute.jit
    def span(
        self, groups: Any, group: Any, rows: cutlass.Constexpr, paged: cutlass.Constexpr, keys: cutlass.Constexpr
    ) -> tuple[Any, Any, Any]:
        """First key of a group's tiles of `keys` keys, end of its keys and number of tiles."""
        is_group = group < groups.total()
        request, first_row = groups.coords(group if is_group else Int32(0), rows)
        low, high = Int32(0x7FFFFFFF), Int32(0)
        for i in cutlass.range_constexpr(rows):
            first, stop, _ = self.load(request, first_row + i, is_group & (first_row + i < groups.count), paged)
            low = cutlass.min(low, first) if first < stop else low
            high = cutlass.max(high, stop)
        low = low & -keys if high > 0 else Int32(0)
        return low, high, (high - low + (keys - 1)) // keys


class KeyCache(NamedTuple):
    """Where keys are, as far as TMA descriptors do not know it: `scales` is the address of the scale of key 0 of
    page 0, `page_boxes` the TMA boxes of a page, as a divisor, `count` the number of contiguous keys, which have no
    block table."""

    scales: Any
    page_stride: Any
    page_boxes: Any
    pages: Any
    count: Any
    table: Any
    table_stride: Any
    table_columns: Any
