"""all_visible_entries on a GPU: the kernel of the picks of a row, whose rows all have at most k columns."""

from __future__ import annotations

from typing import Any

from cute_kernels.indexer import topk
from cute_kernels.indexer.topk import TopKKey, deployment_keys
from cute_kernels.indexer.topk_decode import bounds, slots
from cute_kernels.runtime.arch import arch_of
from cute_kernels.runtime.compile import launch as launch_key

__all__ = ["deployment_keys", "launch", "supports"]


def supports(visible: Any, out: Any, slot_block_table: Any, slot_rows_per_page: int) -> tuple[bool, str]:
    """Whether `launch` can take these (checked) arguments, and if not, why."""
    if out.shape[0] >= topk.MOST_ROWS:
        return False, f"there must be fewer than {topk.MOST_ROWS} rows, got {out.shape[0]}"
    return True, ""


def launch(visible: Any, out: Any, slot_block_table: Any, slot_rows_per_page: int) -> None:
    """Run the kernel on the current stream of out's device. Arguments in the schema's order, checked, supported."""
    rows, k = out.shape
    if rows == 0:
        return
    # columns without scores: nobody looks at them
    scores = 0, 0, k
    starts, ends = bounds(visible)
    numbers = *scores, *starts, *ends, k, 0, *slots(slot_block_table, slot_rows_per_page), rows, k
    key = TopKKey(arch_of(out.device.index), *topk.SHAPES[0])
    launch_key(key, out.device.index, out, *numbers, 0, 1, 0)
