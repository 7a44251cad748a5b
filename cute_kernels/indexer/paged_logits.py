"""Which kernel paged_mqa_logits runs: one of the architecture's own for pages whose rows are a multiple of 8, of 64 on
Blackwell, the portable one for everything else."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from cute_kernels.indexer import logits_choice as choice
from cute_kernels.indexer import portable_launch
from cute_kernels.runtime.arch import arch_of, multiprocessors
from cute_kernels.runtime.compile import KernelKey
from cute_kernels.runtime.compile import launch as launch_key

_key = cache(choice.key_for)


def deployment_keys(config: Any, tp: int, arch: str) -> list[KernelKey]:
    """One of each format for every size of a group, on pages of 64 keys. Every rank has all index heads."""
    return choice.deployment_keys(config, arch, True, portable_launch.deployment_keys(config, arch, True))


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
    if not why and max(call.max_model_len, page_rows) > 2**31 - 256:
        why = f"there must be fewer than 2^31 - 256 keys, got {call.max_model_len}, and {page_rows} in a page"
    return not why, why


def launch(*args: Any, skip: int = 0, op: str = "paged_mqa_logits") -> None:
    """Run the kernel on the current stream of out's device, for an op. Arguments in the schema's order, checked,
    supported. Rows that see no more than `skip` keys are not scored."""
    call = Call(*args)
    if call.out.numel() == 0:
        return
    if call.kv_cache.shape[0] == 0 or call.block_tables.shape[1] == 0:
        call.out.fill_(float("-inf"))
        return
    device_index = call.out.device.index
    requests, rows, heads = call.q.shape[:3]
    arch, page_rows = arch_of(device_index), call.kv_cache.shape[1]
    if not choice.has_own(arch, heads, page_rows) or not choice.is_safe(op, arch, device_index):
        portable_launch.launch(call, arguments_of_keys(call), arguments_of_windows(call, skip), requests, rows, True)
        return
    key = _key(arch, heads, rows, True, page_rows, call.q_scale is not None)
    blocks = choice.blocks(key, requests, rows, call.max_model_len, multiprocessors(device_index))
    launch_key(key, device_index, *arguments(key, call, skip), blocks)


def arguments(key: Any, call: Call, skip: int) -> tuple[Any, ...]:
    """What the entry point of an own kernel takes but the number of blocks."""
    q = call.q
    return (
        call.weights,
        call.out,
        q.data_ptr(),
        choice.stride(q, 0),
        choice.stride(q, 1),
        choice.stride(q, 2),
        q.shape[0],
        q.shape[1],
        *arguments_of_keys(call),
        *arguments_of_windows(call, skip),
        int(call.clean_logits),
        *choice.scale_arguments(key, call.q_scale),
    )


def arguments_of_keys(call: Call) -> tuple[Any, ...]:
    """Those of them that say where keys are: a page has all codes, then all scales."""
    pool, table, size = call.kv_cache, call.block_tables, portable_launch.code_bytes(call)
    pages, page_rows = pool.shape[:2]
    codes = pool.data_ptr()
    in_pages = (codes, codes + page_rows * size, size, choice.stride(pool, 0), page_rows, pages)
    return (*in_pages, table.data_ptr(), table.stride(0) * 4, table.shape[1])


def arguments_of_windows(call: Call, skip: int) -> tuple[Any, ...]:
    """Those of them that say which keys a row sees."""
    return (0, call.context_lens.data_ptr(), call.context_lens.stride(0) * 4, call.out.shape[1], 0, skip)
