"""top_k_per_row_prefill on a GPU: a start and an end for each row."""

from __future__ import annotations

from typing import Any

from cute_kernels.indexer import topk
from cute_kernels.indexer.topk import deployment_keys

__all__ = ["deployment_keys", "launch", "supports"]


def supports(logits: Any, row_starts: Any, row_ends: Any, out: Any, num_rows: int, k: int) -> tuple[bool, str]:
    """Whether `launch` can take these (checked) arguments, and if not, why."""
    return topk.check(logits, num_rows, k)


def launch(logits: Any, row_starts: Any, row_ends: Any, out: Any, num_rows: int, k: int) -> None:
    """Run the kernel on the current stream of out's device. Arguments in the schema's order, checked, supported."""
    topk.run(logits, *bounds(row_starts, row_ends), out, num_rows, k)


def bounds(row_starts: Any, row_ends: Any) -> tuple[tuple[int, int], tuple[int, int, int, int]]:
    """Starts and ends as topk.run takes them."""
    starts = row_starts.data_ptr(), row_starts.stride(0) * 4
    return starts, (row_ends.data_ptr(), row_ends.stride(0) * 4, 0, 1)
