"""Which kernel paged_mqa_logits runs: that of Hopper, for FP8 pages whose rows are a multiple of 8."""

from __future__ import annotations

from functools import cache
from typing import Any

from cute_kernels.formats import INDEX_DIM, INDEXER_FP8
from cute_kernels.indexer import logits_choice as choice
from cute_kernels.indexer.logits_plan import KEYS
from cute_kernels.indexer.logits_sm90 import LogitsKey
from cute_kernels.runtime.arch import multiprocessors
from cute_kernels.runtime.compile import launch as launch_key

SMALL_BOX = 8
"""Keys that a copy brings out of pages that are no multiple of a tile: rows of one swizzle pattern."""

_key = cache(choice.key_for)


def deployment_keys(config: Any, tp: int, arch: str) -> list[LogitsKey]:
    """One for every size of a group, on pages of 64 keys. Every rank has all index heads."""
    heads = choice.heads_of(config, arch)
    if heads is None:
        return []
    return [choice.key_for(heads, rows, True) for rows in range(1, choice.MOST_ROWS + 1)]


def box_of(page_rows: int) -> int:
    return SMALL_BOX if page_rows % KEYS else KEYS


def supports(
    q: Any,
    q_scale: Any,
    kv_cache: Any,
    weights: Any,
    context_lens: Any,
    block_tables: Any,
    max_model_len: int,
    clean_logits: bool,
    kv_format: str,
    out: Any,
) -> tuple[bool, str]:
    """Whether `launch` can take these (checked) arguments, and if not, why."""
    if kv_format != INDEXER_FP8.id:
        return False, f"the kernel is for {INDEXER_FP8.id}, got {kv_format}"
    why = choice.why_not(q, q_scale, kv_cache, "kv_cache", out)
    page_rows = kv_cache.shape[1]
    if not why and page_rows % SMALL_BOX:
        why = f"pages must have a multiple of {SMALL_BOX} rows, got {page_rows}"
    if not why and max(max_model_len, page_rows) > 2**31 - 256:
        why = f"there must be fewer than 2^31 - 256 keys, got {max_model_len}, and {page_rows} in a page"
    return not why, why


def launch(
    q: Any,
    q_scale: Any,
    kv_cache: Any,
    weights: Any,
    context_lens: Any,
    block_tables: Any,
    max_model_len: int,
    clean_logits: bool,
    kv_format: str,
    out: Any,
) -> None:
    """Run the kernel on the current stream of out's device. Arguments in the schema's order, checked, supported."""
    if out.numel() == 0:
        return
    if kv_cache.shape[0] == 0 or block_tables.shape[1] == 0:
        out.fill_(float("-inf"))
        return
    device_index = out.device.index
    requests, rows = q.shape[:2]
    key = _key(q.shape[2], choice.rows_of_group(rows), True, box_of(kv_cache.shape[1]))
    numbers = arguments(q, kv_cache, weights, context_lens, block_tables, clean_logits, out)
    blocks = choice.blocks(key, requests, rows, max_model_len, multiprocessors(device_index))
    launch_key(key, device_index, *numbers, blocks)


def arguments(
    q: Any, kv_cache: Any, weights: Any, context_lens: Any, block_tables: Any, clean: bool, out: Any
) -> tuple[Any, ...]:
    """What the kernel's entry point takes but the number of blocks."""
    pages, page_rows = kv_cache.shape[:2]
    pool = kv_cache.data_ptr()
    return (
        weights,
        out,
        q.data_ptr(),
        choice.stride(q, 0),
        choice.stride(q, 1),
        choice.stride(q, 2),
        q.shape[0],
        q.shape[1],
        pool,
        pool + page_rows * INDEX_DIM,
        INDEX_DIM,
        choice.stride(kv_cache, 0),
        page_rows,
        pages,
        block_tables.data_ptr(),
        block_tables.stride(0) * 4,
        block_tables.shape[1],
        0,
        context_lens.data_ptr(),
        context_lens.stride(0) * 4,
        out.shape[1],
        0,
        int(clean),
    )
