# SPDX-License-Identifier: Apache-2.0
"""Random scheduling steps and the integer arithmetic of block tables, for the index tests."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

DEAD = -1_000_000
"""What block tables hold past the live pages."""
POISON = -77_777
"""What outputs hold before a call."""
INT32_MAX = 2**31 - 1

Table = list[list[int]]


def slot_of(table: Table, request: int, entry: int, rows_per_page: int) -> int:
    """Slot of an entry of a request, -1 where the table maps nothing or int32 cannot name it."""
    if not 0 <= request < len(table) or entry < 0:
        return -1
    column, row = divmod(entry, rows_per_page)
    if column >= len(table[request]) or table[request][column] < 0:
        return -1
    slot = table[request][column] * rows_per_page + row
    return slot if slot <= INT32_MAX else -1


def make_table(rnd: random.Random, entries: list[int], rows_per_page: int, spare: int = 2, pages: int = 5000) -> Table:
    """Random pages for that many entries per request, then DEAD; `spare` columns more than the longest needs."""
    live = [-(-n // rows_per_page) for n in entries]
    width = max(live, default=0) + spare
    return [[rnd.randrange(pages) for _ in range(n)] + [DEAD] * (width - n) for n in live]


def int32(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def wide(rows: Table, columns: int, extra: int = 3) -> torch.Tensor:
    """int32 [len(rows), columns] as a column slice of a wider tensor whose other columns are poisoned."""
    whole = torch.full((len(rows), columns + extra), POISON, dtype=torch.int32)
    if rows and columns:
        whole[:, 1 : columns + 1] = torch.tensor(rows, dtype=torch.int32)
    return whole[:, 1 : columns + 1]


def table_tensor(table: Table) -> torch.Tensor:
    return wide(table, len(table[0]) if table else 0)


def poisoned(*shape: int) -> torch.Tensor:
    """A poisoned int32 output."""
    return torch.full(shape, POISON, dtype=torch.int32)


def same(got: torch.Tensor, expected: list, shape: tuple[int, ...] | None = None) -> None:
    """The whole int32 tensor equals nested lists."""
    assert got.dtype == torch.int32
    if shape is not None:
        assert tuple(got.shape) == shape
    assert got.tolist() == expected


@dataclass
class Step:
    """The requests of one step: decode requests first, all rows in order, some padded rows at the end."""

    query_lens: list[int]
    seq_lens: list[int]
    padded_rows: int = 0
    first: int = 0

    @property
    def query_start_loc(self) -> list[int]:
        """Cumulative query lengths from `first` (not 0 in a slice of a larger step's array)."""
        total = [self.first]
        for n in self.query_lens:
            total.append(total[-1] + n)
        return total

    @property
    def requests(self) -> list[int]:
        """Request of each row; padded rows name requests that do not exist or that they do not belong to."""
        real = [r for r, n in enumerate(self.query_lens) for _ in range(n)]
        return real + [(INT32_MAX, -(2**31), len(self.query_lens), 0)[i % 4] for i in range(self.padded_rows)]

    @property
    def positions(self) -> list[int | None]:
        """Position of each row, None for padded rows."""
        real = [s - n + i for n, s in zip(self.query_lens, self.seq_lens, strict=True) for i in range(n)]
        return [*real, *[None] * self.padded_rows]

    @property
    def num_rows(self) -> int:
        return sum(self.query_lens) + self.padded_rows


def random_step(
    rnd: random.Random, requests: int, longest_query: int, longest_context: int, padded_rows: int = 0
) -> Step:
    """Requests of 0 .. longest_query rows after contexts that start anywhere, mid-prefix or at 0."""
    query_lens = [rnd.choice([0, 1, rnd.randint(0, longest_query)]) for _ in range(requests)]
    seq_lens = [n + rnd.choice([0, rnd.randint(0, longest_context)]) for n in query_lens]
    return Step(query_lens, seq_lens, padded_rows)


def check_compiled(function: Callable[..., Any], *calls: dict[str, Any]) -> None:
    """One full graph serves all calls, whatever their sizes, and gives what the function gives."""

    def fresh(value: Any) -> Any:  # a view's base would be part of the guards
        if not isinstance(value, torch.Tensor):
            return value
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype).copy_(value)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=True)
    # Sizes that are equal by chance in the first call must not become guards either.
    with torch._dynamo.config.patch(error_on_recompile=True), torch.fx.experimental._config.patch(use_duck_shape=False):
        for call in calls:
            got = compiled(**{name: fresh(value) for name, value in call.items()})
            want = function(**call)
            assert [t.tolist() for t in got] == [t.tolist() for t in want]
