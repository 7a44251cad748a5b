# SPDX-License-Identifier: Apache-2.0
"""What the ops run on a GPU: whether kernels can take a call, and its arguments as theirs. An op's call: call.py; which
kernel takes it: select.py.
"""

from __future__ import annotations

from typing import Any

from cute_kernels.dsl import ptx
from cute_kernels.formats import FP8_DS_MLA, HEAD_DIM
from cute_kernels.runtime.arch import grid_size, multiprocessors
from cute_kernels.runtime.compile import launch as launch_key
from cute_kernels.runtime.key import OpKernel
from cute_kernels.sparse_mla import arguments, combine, schedule, select
from cute_kernels.sparse_mla.arguments import MOST_NUMBERS, misaligned, no_logs
from cute_kernels.sparse_mla.call import DecodeCall, MergeCall, MixedCall, PagedCall, PrefillCall
from cute_kernels.sparse_mla.hopper.decode import DecodeKey
from cute_kernels.sparse_mla.hopper.decode_swap_ab import DecodeSwapAbKey
from cute_kernels.sparse_mla.params import COUNT_BITS, LEAST_SCALE, UNIT

MOST_POOL_BYTES = UNIT << 31
"""Of a plain cache: from its first row to the end of the last one."""


# ---- decode


def why_not_decode(call: DecodeCall) -> str:
    """Why no kernel can take a call, or nothing."""
    why = select.why_not_formats_of_decode(call) or select.why_not_halves(call)
    if why:
        return why
    if call.is_quantized:
        why = select.why_not_variant_of_decode(call) or arguments.misaligned_quant(call.out, call.cos_sin_cache)
        if why:
            return why
    tensors = {
        "heads of q": call.q,
        "heads of out": None if call.is_quantized else call.out,
        **{f"pages of {name}": pool for name, pool in call.caches.items()},
        "the workspace": call.workspace,
    }
    for name, tensor in tensors.items():
        if tensor is not None and not _is_aligned(tensor):
            return (
                f"{name} must be 16-byte aligned, got address {tensor.data_ptr():#x} and strides "
                f"{tuple(tensor.stride())}"
            )
    for name, cache in call.caches.items():
        if cache.shape[0] * cache.shape[1] >= MOST_NUMBERS:
            return f"{name} must have fewer than 2^30 rows, got shape {tuple(cache.shape)}"
    if call.max_tiles * schedule.TILE >= MOST_NUMBERS:
        return f"the lists must have fewer than 2^30 columns, got {call.max_tiles} tiles of {schedule.TILE}"
    splits, split_tiles = call.splits(multiprocessors(call.q.device.index))
    work_tiles = call.rows * schedule.head_groups(call.q.shape[2]) * splits
    if work_tiles >= MOST_NUMBERS:
        return f"rows times blocks of heads times parts must be less than 2^30, got {work_tiles}"
    if split_tiles == 0 and call.max_tiles * splits >= 2 * MOST_NUMBERS:
        return f"tiles of a row times parts must be less than 2^31, got {call.max_tiles} times {splits}"
    if split_tiles >= MOST_NUMBERS:
        return f"split_tokens must be less than 2^30 tiles of {schedule.TILE}, got {split_tiles}"
    given = {
        "topk_length": call.topk_length,
        "extra_topk_length": call.extra_topk_length,
        "extra_length": call.extra_length,
    }
    for name, lengths in given.items():
        if lengths is not None and max(lengths.stride(), default=0) >= MOST_NUMBERS:
            return f"strides of {name} must be less than 2^30, got {tuple(lengths.stride())}"
    return ""


def _is_aligned(tensor: Any) -> bool:
    """Whether everything but the last dimension starts at multiples of 16 bytes; the rows of a page need not."""
    multiple = 16 // tensor.element_size()
    axes = range(tensor.dim() - 1) if tensor.dim() != 3 else (0,)
    return tensor.data_ptr() % 16 == 0 and all(
        tensor.shape[axis] <= 1 or tensor.stride(axis) % multiple == 0 for axis in axes
    )


def launch_decode(call: DecodeCall) -> None:
    """Run the kernel, and combine splits if there are several."""
    if call.out.numel() == 0:
        return
    device_index = call.q.device.index
    key = select.of_decode(call)
    ctas = multiprocessors(device_index) * key.ctas_per_sm
    is_whole = isinstance(key, DecodeSwapAbKey)
    splits, split_tiles = (1, 0) if is_whole else call.splits(ctas // key.ctas_per_work_tile)
    is_combined = schedule.goes_through_workspace(splits, split_tiles)
    results: tuple[Any, ...]
    if is_combined:
        out, lse = call.partials(splits)
        key = select.of_decode(call, out_fp32=True)
        results = (out, call.positions, call.cos_sin_cache) if call.is_raw else (out,)
    else:
        lse = no_logs(4, device_index) if call.lse is None else call.lse[None]
        results = call.quant if call.is_quantized else (call.out[None],)
        if not call.is_quantized and call.out.element_size() == 4:
            key = select.of_decode(call, out_fp32=True)
    grid = grid_size(ctas, key.ctas_per_work_tile)
    head_groups, cut = schedule.head_groups(call.q.shape[2]), (call.max_tiles, splits, split_tiles)
    is_halved = not is_combined and select.is_halved(call, key, ctas // key.ctas_per_work_tile, splits)
    clusters = grid // key.ctas_per_work_tile
    is_dealt = not is_halved and schedule.is_dealt(call.rows * head_groups * splits, clusters, *cut)
    if isinstance(key, DecodeKey) and not is_dealt:
        grid = schedule.choose_clusters(call.rows, head_groups, *cut, clusters) * key.ctas_per_work_tile
    key = select.decode_variant(key, call.is_quantized and not is_combined, call.is_raw, is_dealt, is_halved)
    sink = 0 if is_combined or call.attn_sink is None else call.attn_sink.data_ptr()
    cache1, list1, *len1 = _extra_list(call)
    launch_key(
        key,
        device_index,
        call.q,
        *(() if call.q_squares is None else (call.q_squares,)),
        call.k_cache,
        call.indices,
        cache1,
        list1,
        *results,
        lse,
        *_lengths(call.topk_length),
        *len1,
        sink,
        scale_log2(call.softmax_scale) if is_whole else call.softmax_scale * ptx.LOG2_E,
        *(() if call.q_squares is None else (call.q_norm_eps,)),
        splits,
        split_tiles,
        grid,
        *((call.constant_lists,) if key.takes_constant_lists else ()),
        *((call.workspace.data_ptr(),) if is_halved and call.workspace is not None else ()),
    )
    if is_combined and call.is_quantized:
        combine.launch_quantized(out, lse, call.attn_sink, call.quant, call.lse)
    elif is_combined:
        combine.launch(MergeCall(out, lse, call.attn_sink, call.out, call.lse), use_pdl=True)


def _extra_list(call: DecodeCall) -> tuple[Any, Any, int, int, int]:
    """(cache1, list1, len1, len1_batch, len1_token)"""
    if call.extra_k_cache is None:
        return call.k_cache, call.indices, 0, 0, 0
    if call.extra_indices is not None:
        return call.extra_k_cache, call.extra_indices, *_lengths(call.extra_topk_length)
    assert call.extra_block_table is not None
    table = call.extra_block_table[:, None].expand(-1, call.q.shape[1], -1)
    return call.extra_k_cache, table, *_lengths(call.extra_length)


def _lengths(lengths: Any) -> tuple[int, int, int]:
    """(address, stride from request to request, from token to token) of lengths [b] or [b, s_q], or None."""
    if lengths is None:
        return 0, 0, 0
    return lengths.data_ptr(), lengths.stride(0), lengths.stride(1) if lengths.dim() == 2 else 0


# ---- what prefill's three ops have in common


def misaligned_results(call: PrefillCall | PagedCall, why_not_quantized: str) -> str:
    """Why kernels cannot store the results of a call, or nothing."""
    if not call.is_quantized:
        return misaligned("heads of out", call.out, (0, 1))
    return why_not_quantized or arguments.misaligned_quant(call.out, call.cos_sin_cache)


def too_many(counts: dict[str, int]) -> str:
    """What of so many there are more than kernels can count, or nothing."""
    found = ((name, count) for name, count in counts.items() if count >= MOST_NUMBERS)
    return next((f"{name}: expected fewer than 2^30, got {count}" for name, count in found), "")


def results_of(call: PrefillCall | PagedCall) -> tuple[Any, ...]:
    """out, or codes and what comes with them: see quant_output."""
    return (call.out, call.out_scale, call.positions, call.cos_sin_cache) if call.is_quantized else (call.out,)


def logs_of(call: PrefillCall | PagedCall, device_index: int) -> tuple[Any, Any]:
    """max_logits and lse of a call, and what stands for those that nobody asks for."""
    max_logits, lse = (no_logs(2, device_index) if x is None else x for x in (call.max_logits, call.lse))
    return max_logits, lse


def scale_log2(scale: float) -> float:
    """What the kernel multiplies scores with that are powers of two then."""
    return scale * ptx.LOG2_E or LEAST_SCALE


# ---- prefill


def why_not_prefill(call: PrefillCall) -> str:
    """Why no kernel can take a call, or nothing."""
    why = misaligned_results(call, select.why_not_variant_of_prefill(call) if call.is_quantized else "")
    if call.q_squares is not None:
        why = why or misaligned("sums of squares of q_norm", call.q_squares, (0,))
    why = why or misaligned("heads of q", call.q, (0, 1)) or misaligned("rows of kv", call.kv, (0,))
    return why or too_many({"rows of q": 2 * call.q.shape[0], "columns of indices": call.indices.shape[2]})


def launch_prefill(call: PrefillCall) -> None:
    if call.out.numel() == 0:
        return
    device_index = call.q.device.index
    launch_key(
        select.of_prefill(call),
        device_index,
        call.q,
        *(() if call.q_squares is None else (call.q_squares,)),
        call.kv,
        call.indices,
        *results_of(call),
        *logs_of(call, device_index),
        0 if call.topk_length is None else call.topk_length.data_ptr(),
        0 if call.attn_sink is None else call.attn_sink.data_ptr(),
        scale_log2(call.sm_scale),
        *(() if call.q_squares is None else (call.q_norm_eps,)),
        grid_size(multiprocessors(device_index)),
    )


# ---- paged prefill


def why_not_paged(call: PagedCall) -> str:
    """Why no kernel can take a call, or nothing."""
    if not set(call.formats).isdisjoint(select.V41_SPLIT):
        return f"split pages of V4.1's own records are supported on a CPU, got {' and '.join(call.formats)}"
    if call.form == "gathered":
        why = _why_not_gathered(call)
    else:
        why = misaligned_results(call, _why_not_codes(call) if call.is_quantized else "")
    why = why or misaligned("heads of q", call.q, (0, 1))
    for name, pool in call.caches.items():
        why = why or misaligned(f"pages of {name}", pool, (0,))
    counts = {"rows of q": 2 * call.q.shape[0], "seq_lens": call.seq_lens.shape[0]}
    counts |= {f"pages of {name}": pool.shape[0] for name, pool in call.caches.items()}
    counts |= {f"columns of {name}": table.shape[1] for name, table in call.tables.items()}
    if call.topk_indices is not None:
        counts["columns of topk_indices"] = call.topk_indices.shape[1]
    return why or too_many(counts) or _why_not_split(call)


def _why_not_gathered(call: PagedCall) -> str:
    """Why the rows of a call that asks for it cannot be gathered, or results not be stored from there, or nothing."""
    if not call.is_countable:
        return f"form 'gathered' is supported with caches of {FP8_DS_MLA.id}, fewer than 2^29 rows of a request each"
    why = misaligned_results(call, select.why_not_variant_of_prefill(call) if call.is_quantized else "")
    if call.q_squares is not None:
        why = why or misaligned("sums of squares of q_norm", call.q_squares, (0,))
    if call.workspace is not None and call.workspace.data_ptr() % 16:
        why = why or f"workspace must be 16-byte aligned, got address {call.workspace.data_ptr():#x}"
    return why or too_many({"gathered rows": call.gathered_shape.rows})


def _why_not_codes(call: PagedCall) -> str:
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
    splits, split_tiles = schedule.fixed_splits(call.max_tiles, call.num_splits, call.split_tokens)
    most = schedule.CLUSTERS[-1] if select.has_hoppers_paged(call) else 1
    name, given = ("split_tokens", call.split_tokens) if call.split_tokens else ("num_splits", call.num_splits)
    if split_tiles >= MOST_NUMBERS:
        return f"split_tokens: expected less than 2^30 tiles of {schedule.TILE}, got {given}"
    if splits <= most:
        return ""
    return f"{name}: expected what makes at most {most} of a row's parts, got {given}, which makes {splits}"


def launch_paged(call: PagedCall) -> None:
    if call.out.numel() == 0:
        return
    device_index = call.q.device.index
    if select.is_gathered(call):
        launch_gathered(call, device_index)
        return
    sms = multiprocessors(device_index)
    is_hoppers = select.has_hoppers_paged(call)
    splits = call.splits(sms) if is_hoppers else (1, 0)
    is_split = schedule.goes_through_workspace(*splits)
    key = select.of_paged(call, is_hoppers, splits[0] if is_split else 0)
    if isinstance(key, select.PortablePagedKey):
        launch_key(key, device_index, *_portable_arguments(call, device_index), grid_size(sms))
    else:
        last = splits if is_split else (grid_size(sms),)
        launch_key(key, device_index, *_own_arguments(call, device_index), *last)


def launch_gathered(call: PagedCall, device_index: int) -> None:
    """Gather the rows of both caches into the workspace, and run prefill's kernel on them."""
    kv, indices, lengths = call.gathered_tensors()
    launch_key(
        select.of_gather_paged(call),
        device_index,
        kv,
        indices,
        lengths.data_ptr(),
        *call.pools[0],
        *call.pools[1],
        *_list_arguments(call),
        *_batch_arguments(call),
        min(call.window_size, MOST_NUMBERS),
    )
    results, norm = (call.out, call.max_logits, call.lse), (call.q_squares, call.q_norm_eps)
    quant = call.positions, call.cos_sin_cache, call.out_scale
    launch_prefill(PrefillCall(call.q, kv, indices, call.sm_scale, call.attn_sink, lengths, *results, *norm, *quant))


def _list_arguments(call: PagedCall) -> tuple[int, int, int, int]:
    """Address of the lists of entries, or 0, bytes from list to list, columns, and tokens of an entry."""
    listed = call.topk_indices if call.columns else None
    return (
        0 if listed is None else listed.data_ptr(),
        0 if listed is None else listed.stride(0) * listed.element_size(),
        call.columns,
        1 if call.compressed_cache is None else min(call.compress_ratio, MOST_NUMBERS),
    )


def _own_arguments(call: PagedCall, device_index: int) -> tuple[Any, ...]:
    """Those of kernel_args.PagedArgs up to the scale."""
    return (
        call.q,
        *call.pools[0],
        *call.pools[1],
        *results_of(call),
        *logs_of(call, device_index),
        *_list_arguments(call),
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


# ---- mixed


def why_not_mixed(call: MixedCall) -> str:
    """Why no kernel can take a call, or nothing."""
    why = misaligned("heads of query", call.query, (0, 1)) or misaligned("heads of out", call.out, (0, 1))
    for name, pool in call.caches.items():
        why = why or misaligned(f"pages of {name}", pool, (0,))
    if why:
        return why
    if call.sparse_indices.shape[1] >= 1 << COUNT_BITS:
        return f"sparse_indices: expected fewer than 65536 columns, got shape {tuple(call.sparse_indices.shape)}"
    why = too_many({"rows of query": 2 * call.query.shape[0], "seq_lens": call.seq_lens.shape[0]})
    for name, pool in call.caches.items():
        pages, rows, _ = pool.shape
        size = ((pages - 1) * pool.stride(0) + rows * HEAD_DIM) * pool.element_size() if pages else 0
        if size > MOST_POOL_BYTES:
            why = why or f"{name}: expected at most {MOST_POOL_BYTES} bytes from the first row on, got {size}"
    return why or (_why_not_converted(call) if call.form == "converted" else "")


def _why_not_converted(call: MixedCall) -> str:
    """Why the rows of a call that asks for it cannot be converted first, or nothing."""
    arch = select.arch_of(call.query.device.index)
    if arch != select.HOPPER:
        return f"form 'converted' is supported on {select.HOPPER}, got {arch}"
    if call.workspace is not None and call.workspace.data_ptr() % 16:
        return f"workspace must be 16-byte aligned, got address {call.workspace.data_ptr():#x}"
    return ""


def launch_mixed(call: MixedCall) -> None:
    if call.out.numel() == 0:
        return
    device_index = call.query.device.index
    pools = call.pools
    # nothing is launched without CTAs, and the kernel behind reads queries early
    is_converted = select.is_converted(call) and call.cache_rows > 0
    if is_converted:
        pools = call.converted_pools()
        is_other = int(call.compressed_kv_cache is not None)
        launch_key(select.of_convert_mixed(call), device_index, *call.pools, *pools, is_other)
    launch_key(
        select.of_mixed(call, is_converted),
        device_index,
        call.query,
        *pools,
        call.sparse_indices,
        call.out,
        no_logs(2, device_index) if call.lse is None else call.lse,
        call.sparse_topk_lens.data_ptr(),
        call.cum_seq_lens_q.data_ptr(),
        call.seq_lens.data_ptr(),
        call.seq_lens.shape[0],
        call.window_size,
        0 if call.sinks is None else call.sinks.data_ptr(),
        scale_log2(call.bmm1_scale),
        call.bmm2_scale,
        grid_size(multiprocessors(device_index)),
    )


# ---- the ops' kernels

DECODE = OpKernel(launch_decode, why_not_decode, select.decode_keys)
PREFILL = OpKernel(launch_prefill, why_not_prefill, select.prefill_keys)
PAGED = OpKernel(launch_paged, why_not_paged, select.paged_keys)
MIXED = OpKernel(launch_mixed, why_not_mixed, select.mixed_keys)
