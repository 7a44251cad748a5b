"""Which kernel paged_mqa_logits runs: one of Hopper's, for FP8 or MXFP4 pages whose rows are a multiple of 8."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from cute_kernels.indexer import logits_choice as choice
from cute_kernels.indexer.logits_plan import KEYS
from cute_kernels.indexer.logits_sm90 import LogitsKey
from cute_kernels.runtime.arch import multiprocessors
from cute_kernels.runtime.compile import launch as launch_key

SMALL_BOX = 8
"""Keys that a copy brings out of pages that are no multiple of a tile: rows of one swizzle pattern."""

_key = cache(choice.key_for)


def deployment_keys(config: Any, tp: int, arch: str) -> list[LogitsKey]:
    """One for every format and size of a group, on pages of 64 keys. Every rank has all index heads."""
    heads = choice.heads_of(config, arch)
    if heads is None:
        return []
    forms = [(mxfp4, rows + 1) for mxfp4 in (False, True) for rows in range(choice.most_rows(mxfp4))]
    return [choice.key_for(heads, rows, True, mxfp4=mxfp4) for mxfp4, rows in forms]


def box_of(page_rows: int) -> int:
    return SMALL_BOX if page_rows % KEYS else KEYS


class Call(NamedTuple):
    """The op's arguments, in the schema's order, checked."""

    q: Any
    q_scale: Any
    kv_cache: Any
    weights: Any
    context_lens: Any
    block_tables: Any
    max_model_len: int
    clean_logits: bool
    kv_format: str
    out: Any


def supports(*args: Any) -> tuple[bool, str]:
    """Whether `launch` can take these (checked) arguments, and if not, why."""
    call = Call(*args)
    why = choice.why_not(call.q, call.kv_cache, "kv_cache", call.out)
    page_rows = call.kv_cache.shape[1]
    if not why and page_rows % SMALL_BOX:
        why = f"pages must have a multiple of {SMALL_BOX} rows, got {page_rows}"
    if not why and max(call.max_model_len, page_rows) > 2**31 - 256:
        why = f"there must be fewer than 2^31 - 256 keys, got {call.max_model_len}, and {page_rows} in a page"
    return not why, why


def launch(*args: Any) -> None:
    """Run the kernel on the current stream of out's device. Arguments in the schema's order, checked, supported."""
    call = Call(*args)
    if call.out.numel() == 0:
        return
    if call.kv_cache.shape[0] == 0 or call.block_tables.shape[1] == 0:
        call.out.fill_(float("-inf"))
        return
    device_index = call.out.device.index
    requests, rows = call.q.shape[:2]
    mxfp4 = call.q_scale is not None
    key = _key(call.q.shape[2], choice.rows_of_group(rows, mxfp4), True, box_of(call.kv_cache.shape[1]), mxfp4)
    blocks = choice.blocks(key, requests, rows, call.max_model_len, multiprocessors(device_index))
    launch_key(key, device_index, *arguments(call), blocks)


def arguments(call: Call) -> tuple[Any, ...]:
    """What the kernel's entry point takes but the number of blocks."""
    q, kv_cache, block_tables = call.q, call.kv_cache, call.block_tables
    pages, page_rows = kv_cache.shape[:2]
    pool, row_bytes = kv_cache.data_ptr(), q.shape[3]
    return (
        call.weights,
        call.out,
        q.data_ptr(),
        choice.stride(q, 0),
        choice.stride(q, 1),
        choice.stride(q, 2),
        q.shape[0],
        q.shape[1],
        pool,
        pool + page_rows * row_bytes,
        row_bytes,
        choice.stride(kv_cache, 0),
        page_rows,
        pages,
        block_tables.data_ptr(),
        block_tables.stride(0) * 4,
        block_tables.shape[1],
        0,
        call.context_lens.data_ptr(),
        call.context_lens.stride(0) * 4,
        call.out.shape[1],
        0,
        int(call.clean_logits),
        *choice.scale_arguments(call.q_scale),
    )
