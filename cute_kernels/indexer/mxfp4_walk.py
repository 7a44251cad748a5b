"""The warps that bring the MXFP4 score kernel its keys and queries: as those of the e4m3 one, and scales of queries."""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Int64

from cute_kernels.dsl import ptx
from cute_kernels.indexer.logits_plan import WARP
from cute_kernels.indexer.logits_walk import Walk


class Mxfp4Walk(Walk):
    """The producers' part. The fourth element of what they know about queries: address of the scales of the first head,
    and strides in bytes, by request and row."""

    def bring_scales(self, query_copy: Any, at: Any, request: Any, first_row: Any, rows: Any, buffer: Any) -> None:
        plan = self.plan
        source, by_request, by_row = query_copy[3]
        source = source + Int64(request) * by_request + Int64(first_row) * by_row
        lane = cute.arch.lane_idx()
        for i in range(-(-plan.columns // WARP)):
            number = i * WARP + lane
            row, head = number // plan.heads, number % plan.heads
            place = at.head_scales + (buffer * plan.scale_rows + number) * 4
            ptx.copy_async_32(place, source + Int64(row) * by_row + Int64(head) * 4, row < rows)
