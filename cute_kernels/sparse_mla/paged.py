"""sparse_mla_prefill_paged on a GPU. Its call: call.py; the choice of a kernel: select.py."""

from __future__ import annotations

from typing import Any

from cute_kernels.formats import FP8_DS_MLA
from cute_kernels.runtime.arch import multiprocessors
from cute_kernels.runtime.compile import launch as launch_key
from cute_kernels.sparse_mla import schedule, select
from cute_kernels.sparse_mla.arguments import MOST_NUMBERS, misaligned
from cute_kernels.sparse_mla.call import PagedCall
from cute_kernels.sparse_mla.prefill import logs_of, misaligned_results, results_of, scale_log2, too_many
from cute_kernels.sparse_mla.select import paged_keys as deployment_keys

__all__ = ["deployment_keys", "launch", "supports"]


def supports(*args: Any) -> tuple[bool, str]:
    """Whether `launch` can take these (checked) arguments, in the schema's order, and if not, why."""
    why = why_not(PagedCall(*args))
    return not why, why


def why_not(call: PagedCall) -> str:
    """Why no kernel can take a call, or nothing."""
    why = misaligned_results(call, _why_not_quantized(call) if call.is_quantized else "")
    why = why or misaligned("heads of q", call.q, (0, 1))
    for name, pool in call.caches.items():
        why = why or misaligned(f"pages of {name}", pool, (0,))
    counts = {"rows of q": 2 * call.q.shape[0], "seq_lens": call.seq_lens.shape[0]}
    counts |= {f"pages of {name}": pool.shape[0] for name, pool in call.caches.items()}
    counts |= {f"columns of {name}": table.shape[1] for name, table in call.tables.items()}
    if call.topk_indices is not None:
        counts["columns of topk_indices"] = call.topk_indices.shape[1]
    return why or too_many(counts) or _why_not_split(call)


def _why_not_quantized(call: PagedCall) -> str:
    """Why the results of a call cannot be stored as codes, or nothing."""
    if call.num_splits > 1 or call.split_tokens:
        return "output_quant: expected rows in one part, num_splits at most 1 and split_tokens 0"
    if not select.has_hoppers_paged(call):
        return f"output_quant is supported on {select.HOPPER} with caches of {FP8_DS_MLA.id} that its own kernel takes"
    return ""


def _why_not_split(call: PagedCall) -> str:
    """Why rows are not split as a call asks for, or nothing."""
    if call.num_splits <= 1 and not call.split_tokens:
        return ""
    splits, split_tiles = schedule.fixed_parts(call.max_tiles, call.num_splits, call.split_tokens)
    most = schedule.CLUSTERS[-1] if select.has_hoppers_paged(call) else 1
    name, given = ("split_tokens", call.split_tokens) if call.split_tokens else ("num_splits", call.num_splits)
    if split_tiles >= MOST_NUMBERS:
        return f"split_tokens: expected less than 2^30 tiles of {schedule.TILE}, got {given}"
    if splits <= most:
        return ""
    return f"{name}: expected what makes at most {most} of a row's parts, got {given}, which makes {splits}"


def launch(*args: Any) -> None:
    """Run the kernel on the current stream of q's device. Arguments in the schema's order, checked and supported."""
    call = PagedCall(*args)
    if call.out.numel() == 0:
        return
    device_index = call.q.device.index
    sms = multiprocessors(device_index)
    is_hoppers = select.has_hoppers_paged(call)
    splits = call.splits(sms) if is_hoppers else (1, 0)
    is_split = schedule.goes_through_workspace(*splits)
    key = select.of_paged(call, is_hoppers, splits[0] if is_split else 0)
    if isinstance(key, select.PortablePagedKey):
        launch_key(key, device_index, *_portable_arguments(call, device_index), sms)
    else:
        launch_key(key, device_index, *_own_arguments(call, device_index), *(splits if is_split else (sms,)))


def _own_arguments(call: PagedCall, device_index: int) -> tuple[Any, ...]:
    """Those of prefill_args (paged) up to the scale."""
    listed = call.topk_indices if call.columns else None
    return (
        call.q,
        *call.pools[0],
        *call.pools[1],
        *results_of(call),
        *logs_of(call, device_index),
        0 if listed is None else listed.data_ptr(),
        0 if listed is None else listed.stride(0) * listed.element_size(),
        call.columns,
        1 if call.compressed_cache is None else min(call.compress_ratio, MOST_NUMBERS),
        *_batch_arguments(call),
        min(call.window_size, MOST_NUMBERS),
        0 if call.attn_sink is None else call.attn_sink.data_ptr(),
        scale_log2(call.sm_scale),
    )


def _portable_arguments(call: PagedCall, device_index: int) -> tuple[Any, ...]:
    """Those of mma_sync's kernel, but for the number of CTAs."""
    return (
        call.q,
        *call.pools[0],
        *call.pools[1],
        call.swa_block_table if call.topk_indices is None else call.topk_indices,
        call.out,
        *logs_of(call, device_index),
        *_batch_arguments(call),
        min(call.window_size, MOST_NUMBERS),
        1 if call.compressed_cache is None else min(call.compress_ratio, MOST_NUMBERS * 2 - 1),
        0 if call.attn_sink is None else call.attn_sink.data_ptr(),
        scale_log2(call.sm_scale),
    )


def _batch_arguments(call: PagedCall) -> tuple[Any, ...]:
    return call.query_start_loc.data_ptr(), call.seq_lens.data_ptr(), call.seq_lens.shape[0]
