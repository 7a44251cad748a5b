# SPDX-License-Identifier: Apache-2.0
"""Small calls of prefill's ops as parameters of Hopper's kernels: what Blackwell's take, without tensor maps."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from cute_kernels.dsl.ptx import LOG2_E, READ_AGAIN
from tests.model import prefill_problems
from tests.model.launch import pack, run_grid
from tests.model.memory import GlobalMemory
from tests.model.prefill_problems import Problem, Results, bytes_between
from tests.model.problems import put


class OnHopper(Problem):
    policy: tuple[int, ...] = (READ_AGAIN,)
    """L2's for results."""

    def values(self, values: list[Any]) -> list[Any]:
        """Where rows are, of what Blackwell's kernel is told."""
        return values

    def sinks(self, sink: int) -> list[int]:
        """Where they are, of what combines splits and of what makes them."""
        return [sink]

    def grid(self, blocks: int, items: int) -> dict[str, int]:
        """At most so many blocks, of run_grid."""
        return {"blocks": min(blocks, items)}

    def run(self, blocks: int, **options: Any) -> tuple[torch.Tensor, ...]:
        memory, q = GlobalMemory(1 << 25), self.q
        rows, heads, _ = q.shape
        results = Results(memory, (rows, heads), self.numbers)
        values = [put(memory, q), bytes_between(q, 0), bytes_between(q, 1), heads]
        _, sources, behind = self.sources(memory)
        values += [*self.values(sources), results.out, results.row, results.head, *results.logs, *behind]
        bits = int(heads > 64)
        values += [*self.policy, *self.sinks(put(memory, self.call.sink)), self.call.scale * LOG2_E, rows << bits, bits]
        # a kernel for few heads takes no bits; what products are made of are parameters, too
        count = len(self.program.parameters)
        parameters = pack(self.program, (values + [0] * count)[:count])
        run_grid(self.program, parameters, memory, size=self.size, **self.grid(blocks, rows << bits), **options)
        results.assert_written_once()
        return results.get()


class Prefill(OnHopper, prefill_problems.Prefill):
    pass


class Mixed(OnHopper, prefill_problems.Mixed):
    def values(self, values: list[Any]) -> list[Any]:
        """What lies between pages in units of 16 bytes, not in rows."""
        units, gaps = 512 * self.call.window.element_size() // 16, (4, 9)
        return [value * units if i in gaps else value for i, value in enumerate(values)]


def in_pairs(rows: torch.Tensor) -> torch.Tensor:
    """Of every 16 columns the pairs 0, 2, 4, 6, 1, 3, 5, 7, in this order."""
    pairs = rows.unflatten(-1, (-1, 8, 2))
    return torch.cat([pairs[..., ::2, :], pairs[..., 1::2, :]], dim=-2).flatten(-3)


class MixedConverted(Mixed):
    """Over f16 rows, with dense pages, of the same numbers, as convert_mixed leaves them."""

    def sources(self, memory: GlobalMemory) -> tuple[list[Any], list[Any], list[Any]]:
        pools = {name: in_pairs(getattr(self.call, name).half()) for name in ("window", "compressed")}
        call, self.call = self.call, dataclasses.replace(self.call, **pools)
        try:
            return super().sources(memory)
        finally:
            self.call = call

    def values(self, values: list[Any]) -> list[Any]:
        return values


class Paged(OnHopper, prefill_problems.Paged):
    policy = ()

    def values(self, values: list[Any]) -> list[Any]:
        return values[:-2]


@dataclasses.dataclass
class PagedCluster(Paged):
    """Rows in so many splits, each of so many tiles (schedule.split_range), by clusters of so many CTAs."""

    ctas: int = 2
    splits: int = 2
    split_tiles: int = 0

    def values(self, values: list[Any]) -> list[Any]:
        return [*super().values(values), self.splits, self.split_tiles]

    def sinks(self, sink: int) -> list[int]:
        return [sink, 0]

    def grid(self, blocks: int, items: int) -> dict[str, int]:
        """Of every item a cluster."""
        return {"blocks": items * self.ctas, "cluster": self.ctas, "rows": self.ctas}
