# SPDX-License-Identifier: Apache-2.0
"""What SGLang's planner says of a step's compression, as fused_compress_norm_rope_store takes it.

The engine's state rows lie in rings: of ratio 4 one for each page of the window's cache, of ratio 128 one for each
request, both cut into groups of `ratio` rows. Its plans name the groups that the window of an entry touches. So each
row of the step is a request of its own here, with a cyclic table of these groups: two with ratio 4, one with 128.

    decode    int32 [rows, 4]: length with the row's token, state slot, group of the window before the own one, own one
    prefill   of closing rows int32 [n, 4]: length, row | rows of the window that are older than the step << 16, groups
              as above, to be read only for older rows; of rows to be kept int32 [m, 2]: row, state slot. What fills
              them up has a length, or a row, of -1

A chunk's slots repeat in a ring, and what it keeps would overwrite what its first entries still read: entries are
closed first, rows are kept by a second call.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

WINDOWS = {4: 8, 128: 128}
"""Ratio -> tokens that an entry is computed from."""

NEVER = torch.iinfo(torch.int32).max
"""As min_restart: no row of the step is saved."""


class PlannedStep(NamedTuple):
    """Rows of a step. kept: state slots of the rows that a second call saves, -1 for the others; None: the first call
    saves all rows."""

    positions: torch.Tensor
    slots: torch.Tensor
    requests: torch.Tensor
    starts: torch.Tensor
    table: torch.Tensor
    restart: torch.Tensor | None
    kept: torch.Tensor | None


def read_plan(plan: Any, ratio: int, rows: int) -> PlannedStep:
    """Of a step with so many rows. Everything is computed on the device: graphs may hold it."""
    if plan.is_decode:
        words = plan.plan_d.view(torch.int32)[:rows]
        positions, slots = words[:, :2].t().to(torch.int64, memory_format=torch.contiguous_format).unbind()
        positions = positions - 1
        starts = torch.arange(len(words) + 1, dtype=torch.int32, device=words.device)
        table = _table(words[:, 2:], positions, ratio)
        return PlannedStep(positions, slots, starts[:-1], starts, table, None, None)
    closing, saving = plan.plan_c.view(torch.int32), plan.plan_w.view(torch.int32)
    length, packed = closing[:, 0], closing[:, 1]
    row, older = packed & 0xFFFF, packed >> 16 & 0xFFFF
    # one row more, for what fills the plans up
    told = torch.full((rows + 1, 4), -1, dtype=torch.int32, device=closing.device)
    first = row + (older - WINDOWS[ratio] + 1)
    told[row.masked_fill(length < 0, rows).long()] = torch.stack([length - 1, first, closing[:, 2], closing[:, 3]], 1)
    told = told[:rows]
    positions = told[:, 0].long()
    starts = torch.full((rows + 1,), rows, dtype=torch.int32, device=closing.device)
    # ascending; those of rows that close nothing do not matter
    starts[:-1] = told[:, 1].clamp(min=0).cummax(0).values
    kept = torch.full((rows + 1,), -1, dtype=torch.int64, device=closing.device)
    kept[saving[:, 0].masked_fill(saving[:, 0] < 0, rows).long()] = saving[:, 1].long()
    requests = torch.arange(rows, dtype=torch.int32, device=closing.device)
    # any slot will do for a row that closes: none is saved here
    slots = positions.clamp(max=0)
    restart = torch.full_like(requests, NEVER)
    return PlannedStep(positions, slots, requests, starts, _table(told[:, 2:], positions, ratio), restart, kept[:rows])


def _table(groups: torch.Tensor, positions: torch.Tensor, ratio: int) -> torch.Tensor:
    """Of [the group before, the own one]: the column of group g is g mod the number of columns."""
    if ratio == 128:
        return groups[:, 1:]
    is_even = (positions & 4 == 0)[:, None]
    return torch.where(is_even, groups.flip(1), groups)
