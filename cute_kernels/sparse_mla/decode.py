"""sparse_mla_decode on a GPU, and the combination of splits. Its call: call.py; the choice of a kernel: select.py."""

from __future__ import annotations

from typing import Any

from cute_kernels.dsl import ptx
from cute_kernels.runtime.arch import multiprocessors
from cute_kernels.runtime.compile import launch as launch_key
from cute_kernels.sparse_mla import arguments, combine, schedule, select
from cute_kernels.sparse_mla.arguments import MOST_NUMBERS, no_logs
from cute_kernels.sparse_mla.call import DecodeCall
from cute_kernels.sparse_mla.select import decode_keys as deployment_keys

__all__ = ["deployment_keys", "launch", "supports"]


def supports(*args: Any) -> tuple[bool, str]:
    """Whether `launch` can take these (checked) arguments, in the schema's order, and if not, why."""
    why = why_not(DecodeCall(*args))
    return not why, why


def why_not(call: DecodeCall) -> str:
    """Why no kernel can take a call, or nothing."""
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
    work_tiles = call.rows * schedule.head_blocks(call.q.shape[2]) * splits
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


def launch(*args: Any) -> None:
    """Run the kernel, and combine splits if there are several, on the current stream of q's device. Arguments in the
    schema's order, checked and supported."""
    call = DecodeCall(*args)
    if call.out.numel() == 0:
        return
    device_index = call.q.device.index
    key = select.of_decode(call)
    ctas = multiprocessors(device_index) * key.blocks_per_sm
    splits, split_tiles = call.splits(ctas // key.blocks_per_item)
    is_combined = schedule.goes_through_workspace(splits, split_tiles)
    results: tuple[Any, ...]
    if is_combined:
        out, lse = call.partials(splits)
        key = select.of_decode(call, out_fp32=True)
        results = (out, None, call.positions, call.cos_sin_cache) if call.is_raw else (out,)
    else:
        lse = no_logs(4, device_index) if call.lse is None else call.lse[None]
        results = call.quant if call.is_quantized else (call.out[None],)
        if not call.is_quantized and call.out.element_size() == 4:
            key = select.of_decode(call, out_fp32=True)
    key = select.decode_variant(key, call.is_quantized and not is_combined, call.is_raw)
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
        call.softmax_scale * ptx.LOG2_E,
        *(() if call.q_squares is None else (call.q_norm_eps,)),
        splits,
        split_tiles,
        ctas,
    )
    if is_combined and call.is_quantized:
        combine.launch_quantized(out, lse, call.attn_sink, call.quant, call.lse)
    elif is_combined:
        combine.launch(out, lse, call.attn_sink, call.out, call.lse, use_pdl=True)


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
