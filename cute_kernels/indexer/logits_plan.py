"""What the score kernel on Hopper is made of: its sizes, its shared memory, and, of all score kernels, which rows see
which keys.

Query rows of one request that follow each other form a group, at most `rows` of them. A group walks over the keys that
any of its rows sees, a tile of them at a time. The tiles of all groups, one group after the other, are one long list;
every block takes an equal share of it, so that neither long requests nor few of them leave blocks idle. A score depends
on its row and its key alone, not on the share that it falls into.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from cute_kernels.dsl import barriers, ptx
from cute_kernels.formats import INDEX_DIM, round_up

WARP = 32
KEYS = 64
"""Keys of a tile: the rows of a warpgroup's products."""

QUERIES = 2
"""Groups whose queries a warpgroup has in shared memory: the one in use, and the next."""

CHUNKS = 256
"""That the groups are counted in: each is a multiple of 32 groups."""

STAGES = 8
"""Of the ring of keys, or a few more, so that a stage is always of the same warpgroup. Twice as many make calls of 8 to
64 requests 1 to 2 us slower: perf/notes/indexer.md."""

NOTE = 4
"""int32 that say what a stage holds: the group, or END where a warpgroup has no more tiles; the first key, a multiple
of KEYS, plus CLOSING where the warpgroup has no more tiles of the group; which boxes of keys exist; nothing."""

END, CLOSING = -1, 1

MANY_COLUMNS = 192
"""Of products, from which on a thread needs more registers than its share of a multiprocessor's."""


@dataclass(frozen=True)
class Plan:
    """Sizes of one kernel: `heads` of a query row, at most `rows` of them in a group, keys copied by `box`."""

    heads: int
    rows: int
    box: int

    @property
    def keys(self) -> int:
        """Of a tile."""
        return KEYS

    @property
    def row_bytes(self) -> int:
        """Of a key's codes, and of a query head's."""
        return INDEX_DIM

    @property
    def columns(self) -> int:
        """Of a tile's products."""
        return self.heads * self.rows

    @property
    def scale_rows(self) -> int:
        """Of MXFP4: words that the scales of a buffer's heads take."""
        return self.columns

    @property
    def parts(self) -> int:
        """That a tile's products are computed and added up in, so that one is multiplied while the other is added."""
        return 2 if self.rows == 4 else 1

    @property
    def warpgroups(self) -> int:
        """That multiply, each every second (third, fourth) tile: as many as there are registers for."""
        return {1: 4, 2: 3}.get(self.rows, 2)

    @property
    def walkers(self) -> int:
        """Warps that bring keys and queries, each every second (third, fourth) tile: one for each warpgroup."""
        return self.warpgroups

    @property
    def stages(self) -> int:
        """Of the ring of keys."""
        return round_up(STAGES, self.warpgroups)

    @property
    def helpers(self) -> int:
        """Warps beside: those that bring keys, and one that writes -inf."""
        return self.walkers + 1

    @property
    def threads(self) -> int:
        """Of a block: whole warpgroups."""
        return round_up(self.warpgroups * 4 + self.helpers, 4) * WARP

    @property
    def boxes(self) -> int:
        """Of a tile."""
        return self.keys // self.box

    @property
    def buffers(self) -> int:
        """For queries, of all warpgroups."""
        return self.warpgroups * QUERIES

    @property
    def words(self) -> dict[str, int]:
        """What shared memory holds besides operands and barriers, in words."""
        return {
            "notes": self.stages * NOTE,
            "scales": self.stages * self.keys,
            "weights": self.buffers * self.columns,
            "windows": self.buffers * 2 * self.rows,
            "sums": CHUNKS,
        }

    @property
    def smem_bytes(self) -> int:
        small = (self.stages + self.buffers) * barriers.BYTES_PER_STAGE
        small += sum(round_up(count * 4, 16) for count in self.words.values())
        return round_up(small, 1024) + (self.stages * KEYS + self.buffers * self.columns) * INDEX_DIM


class Groups(NamedTuple):
    """The groups of a call: `requests` times `count` rows, in `per_request` groups each; `blocks` share them."""

    requests: Any
    count: Any
    per_request: Any
    blocks: Any

    @classmethod
    def of(cls, requests: Any, count: Any, rows: int, blocks: Any) -> Groups:
        """Of so many rows each. On the host's side of the launch."""
        divisor = cute.fast_divmod_create_divisor_v2
        return cls(requests, count, divisor(cute.ceil_div(count, rows)), divisor(blocks))

    def total(self) -> Any:
        return self.requests * self.per_request.divisor

    def place(self, group: Any, rows: int) -> tuple[Any, Any]:
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
        """First key of a group's tiles of so many keys, end of its keys and number of tiles."""
        is_group = group < groups.total()
        request, first_row = groups.place(group if is_group else Int32(0), rows)
        low, high = Int32(0x7FFFFFFF), Int32(0)
        for i in cutlass.range_constexpr(rows):
            first, stop, _ = self.load(request, first_row + i, is_group & (first_row + i < groups.count), paged)
            low = cutlass.min(low, first) if first < stop else low
            high = cutlass.max(high, stop)
        low = low & -keys if high > 0 else Int32(0)
        return low, high, (high - low + (keys - 1)) // keys
