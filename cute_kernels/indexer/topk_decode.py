"""top_k_per_row_decode on a GPU: rows start with their first column, and end where the length of a token says."""

from __future__ import annotations

from typing import Any

from cute_kernels.indexer import topk
from cute_kernels.indexer.topk import deployment_keys

__all__ = ["deployment_keys", "launch", "supports"]


def supports(
    logits: Any, seq_lens: Any, out: Any, num_rows: int, k: int, slot_block_table: Any, slot_rows_per_page: int
) -> tuple[bool, str]:
    """Whether `launch` can take these (checked) arguments, and if not, why."""
    return topk.check(logits, num_rows, k)


def launch(
    logits: Any, seq_lens: Any, out: Any, num_rows: int, k: int, slot_block_table: Any, slot_rows_per_page: int
) -> None:
    """Run the kernel on the current stream of out's device. Arguments in the schema's order, checked, supported."""
    topk.run(logits, *bounds(seq_lens), out, num_rows, k, slots=slots(slot_block_table, slot_rows_per_page))


def bounds(seq_lens: Any) -> tuple[tuple[int, int], tuple[int, int, int, int]]:
    """Starts and ends as topk.run takes them."""
    request, token = (4 * stride for stride in seq_lens.stride())
    return (0, 0), (seq_lens.data_ptr(), request, token, seq_lens.shape[1])


def slots(block_table: Any, rows_per_page: int) -> tuple[int, int, int, int]:
    """The block table as topk.run takes it."""
    if block_table is None:
        return topk.LOCAL
    # the address of a table without columns may be 0, which means none; nobody reads from it
    return block_table.data_ptr() or 4, block_table.stride(0) * 4, block_table.shape[1], rows_per_page
