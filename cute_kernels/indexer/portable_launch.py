"""What the portable score kernel needs to know of a call of mqa_logits or paged_mqa_logits."""

from __future__ import annotations

from functools import cache
from typing import Any

from cute_kernels.formats import INDEX_DIM, round_up
from cute_kernels.indexer import logits_choice as choice
from cute_kernels.indexer.logits_portable import PortableLogitsKey
from cute_kernels.indexer.portable_plan import HEAD_TILE, ROWS
from cute_kernels.runtime.arch import arch_of, multiprocessors
from cute_kernels.runtime.compile import launch as launch_key


def rows_of_group(rows: int) -> int:
    """That of ROWS which leaves least of the last group empty, the largest of several. One only for single rows: every
    team reads the keys for itself."""
    return min(reversed(ROWS[1:]), key=lambda size: round_up(rows, size)) if rows > 1 else 1


@cache
def key_for(arch: str, heads: int, rows: int, paged: bool, mxfp4: bool) -> PortableLogitsKey:
    """The kernel for requests of so many rows."""
    return PortableLogitsKey(arch, round_up(heads, HEAD_TILE), rows_of_group(rows), paged, mxfp4)


def deployment_keys(config: Any, arch: str, paged: bool) -> list[PortableLogitsKey]:
    """Of either format: for any number of rows of a request, or of pages one for every size of a group."""
    heads = choice.heads_of(config)
    if heads is None:
        return []
    sizes = ROWS if paged else ROWS[-1:]
    return [key_for(arch, heads, rows, paged, mxfp4) for mxfp4 in (False, True) for rows in sizes]


def launch(call: Any, keys: Any, windows: Any, requests: int, rows: int, paged: bool) -> None:
    """Run the kernel for a call, whose `keys` and `windows` are in the order of the kernel's entry point."""
    device_index = call.out.device.index
    heads = call.q.shape[-2]
    # without requests, any number of rows runs the same kernel
    key = key_for(arch_of(device_index), heads, rows if paged else ROWS[-1], paged, call.q_scale is not None)
    blocks = choice.blocks(key, requests, rows, call.out.shape[1], multiprocessors(device_index))
    queries = (*strides(call.q, rows), *(strides(call.q_scale, rows) if call.q_scale is not None else (0,) * 4))
    clean = int(call.clean_logits)
    launch_key(
        key, device_index, call.weights, call.out, *queries, requests, rows, heads, *keys, *windows, clean, blocks
    )


def strides(tensor: Any, rows: int) -> tuple[int, int, int, int]:
    """Address of codes or scales of queries, and their strides in bytes by request, row and head. Without requests, all
    rows are one's. The last axis of codes is dense."""
    size = tensor.element_size()
    axes = tensor.stride()[:-1] if size == 1 else tensor.stride()
    row, head = axes[-2] * size, axes[-1] * size
    return tensor.data_ptr(), axes[0] * size if len(axes) == 3 else row * rows, row, head


def code_bytes(call: Any) -> int:
    """Of a key."""
    return INDEX_DIM if call.q_scale is None else INDEX_DIM // 2
