# SPDX-License-Identifier: Apache-2.0
"""What the ops that score run on a GPU: whether kernels can take a call, and its arguments as theirs.

score_top_k_prefill and score_top_k_decode run, chunk after chunk, the kernel of mqa_logits or paged_mqa_logits, then
that of the picks. Nothing but the order of the launches makes a chunk's picks wait for its scores, and the next chunk's
scores for these picks.
"""

from __future__ import annotations

import torch

from cute_kernels.indexer import select, topk_select
from cute_kernels.indexer.blackwell.logits import BlackwellLogitsKey
from cute_kernels.indexer.call import LogitsCall, PagedLogitsCall, ScoreTopKDecodeCall, ScoreTopKPrefillCall
from cute_kernels.indexer.hopper.logits import LogitsKey
from cute_kernels.indexer.mma_sync.logits import PortableLogitsKey
from cute_kernels.indexer.params import KEY_TILE
from cute_kernels.indexer.topk_select import decode_bounds, prefill_bounds, slots
from cute_kernels.models import ModelConfig
from cute_kernels.runtime.arch import arch_of, grid_size, multiprocessors
from cute_kernels.runtime.compile import KernelKey
from cute_kernels.runtime.compile import launch as launch_key
from cute_kernels.runtime.key import OpKernel


def launch_call(call: LogitsCall | PagedLogitsCall, op: str, skip: int) -> None:
    """Run a kernel on the current stream of out's device, for an op, on a call that has keys and scores. Rows that see
    no more than `skip` keys are not scored."""
    device_index = call.out.device.index
    arch, heads, mxfp4 = arch_of(device_index), call.q.shape[-2], call.q_scale is not None
    paged = isinstance(call, PagedLogitsCall)
    page_rows = call.kv_cache.shape[1] if isinstance(call, PagedLogitsCall) else KEY_TILE
    if select.has_own(arch, heads, page_rows) and select.is_safe(op, arch, device_index):
        key: select.OwnKey | PortableLogitsKey = select.own_key(arch, heads, call.rows, paged, page_rows, mxfp4)
    else:
        key = select.portable_key(arch, heads, call.rows, paged, mxfp4)
    ctas = grid_size(select.ctas(key, call.requests, call.rows, call.out.shape[1], multiprocessors(device_index)))
    keys_and_windows = (*call.cache_arguments(), *call.window_arguments(skip))
    clean = int(call.clean_logits)
    if isinstance(key, PortableLogitsKey):
        scales = (0,) * 4 if call.q_scale is None else code_strides(call.q_scale, call.rows)
        queries = (*code_strides(call.q, call.rows), *scales)
        numbers = (*queries, call.requests, call.rows, heads, *keys_and_windows, clean)
    else:
        rows = (call.q.data_ptr(), *call.query_strides(), call.requests, call.rows)
        pdl = () if isinstance(key, BlackwellLogitsKey) else (call.use_pdl,)
        numbers = (*rows, *keys_and_windows, clean, *scale_arguments(key, call.q_scale), *pdl)
    launch_key(key, device_index, call.weights, call.out, *numbers, ctas)


def why_not(q: torch.Tensor, keys: torch.Tensor, what: str, out: torch.Tensor) -> str:
    """Why no kernel can take a call's (checked) queries, keys (named `what`) and scores; empty if one can."""
    heads = q.shape[-2]
    if not 0 < heads <= select.MOST_HEADS:
        return f"HI must be at least 1 and at most {select.MOST_HEADS}, got {heads}"
    for name, tensor, axes in (("q", q, range(q.dim() - 1)), (what, keys, range(0, keys.dim() - 1, keys.dim() - 1))):
        strides = [tensor.stride(axis) for axis in axes if tensor.shape[axis] > 1]
        if tensor.data_ptr() % 16 or any(stride % 16 or not 0 <= stride < 2**40 for stride in strides):
            return (
                f"{name} must be 16-byte aligned row by row, got address {tensor.data_ptr():#x} and strides "
                f"{tuple(tensor.stride())}"
            )
    if out.shape[0] * (out.shape[1] // KEY_TILE + 2) >= 2**31:
        return f"there must be fewer than 2^31 tiles of {KEY_TILE} scores, got out of shape {list(out.shape)}"
    return ""


def code_strides(tensor: torch.Tensor, rows: int) -> tuple[int, int, int, int]:
    """Of mma_sync/logits: address of codes or scales of queries, and their strides in bytes by request, row and head.
    Without requests, all rows are one's. The last axis of codes is dense."""
    size = tensor.element_size()
    axes = tensor.stride()[:-1] if size == 1 else tensor.stride()
    row, head = axes[-2] * size, axes[-1] * size
    return tensor.data_ptr(), axes[0] * size if len(axes) == 3 else row * rows, row, head


def scale_arguments(key: KernelKey, q_scale: torch.Tensor | None) -> tuple[int, ...]:
    """What hopper/logits_mxfp4 and blackwell/logits take more than hopper/logits: address of the queries' scales
    [..., row, head] and strides in bytes, by request, if there are several, and row. Zeros where `q_scale` is None."""
    if isinstance(key, LogitsKey):
        return ()
    if q_scale is None:
        return 0, 0, 0
    strides = [q_scale.stride(axis) * q_scale.element_size() for axis in range(q_scale.dim() - 1)]
    return q_scale.data_ptr(), *([0] * (2 - len(strides))), *strides


# ---- mqa_logits


def logits_keys(config: ModelConfig, tp: int, arch: str) -> list[KernelKey]:
    """One for each format: a prefill may have any number of rows. Every rank has all index heads."""
    return select.deployment_keys(config, arch, paged=False)


def why_not_logits(call: LogitsCall) -> str:
    """Why no kernel can take a call; empty if one can."""
    keys = call.k.shape[0]
    why = why_not(call.q, call.k, "kv[0]", call.out)
    return why or (f"there must be at most 2^31 - 256 keys, got {keys}" if keys > 2**31 - 256 else "")


def launch_logits(call: LogitsCall, skip: int = 0, op: str = "mqa_logits") -> None:
    """Run the kernel on the current stream of out's device, for an op. Rows that see no more than `skip` keys are not
    scored."""
    if call.out.numel() == 0:
        return
    if call.k.shape[0] == 0:
        if call.clean_logits:
            call.out.fill_(float("-inf"))
        return
    launch_call(call, op, skip)


MQA_LOGITS = OpKernel(launch_logits, why_not_logits, logits_keys)


# ---- paged_mqa_logits


def paged_logits_keys(config: ModelConfig, tp: int, arch: str) -> list[KernelKey]:
    """One of each format for every size of a group, on pages of 64 keys. Every rank has all index heads."""
    return select.deployment_keys(config, arch, paged=True)


def why_not_paged_logits(call: PagedLogitsCall) -> str:
    """Why no kernel can take a call; empty if one can."""
    keys, page_rows = call.max_model_len, call.kv_cache.shape[1]
    why = why_not(call.q, call.kv_cache, "kv_cache", call.out)
    if not why and max(keys, page_rows) > 2**31 - 256:
        why = f"there must be at most 2^31 - 256 keys, got {keys}, and {page_rows} in a page"
    return why


def launch_paged_logits(call: PagedLogitsCall, skip: int = 0, op: str = "paged_mqa_logits") -> None:
    """Run the kernel on the current stream of out's device, for an op. Rows that see no more than `skip` keys are not
    scored."""
    if call.out.numel() == 0:
        return
    if call.kv_cache.shape[0] == 0 or call.block_tables.shape[1] == 0:
        call.out.fill_(float("-inf"))
        return
    launch_call(call, op, skip)


PAGED_MQA_LOGITS = OpKernel(launch_paged_logits, why_not_paged_logits, paged_logits_keys)


# ---- score_top_k_prefill


def score_top_k_prefill_keys(config: ModelConfig, tp: int, arch: str) -> list[KernelKey]:
    """Those of scores and picks, where there are scores."""
    keys = logits_keys(config, tp, arch)
    return [*keys, *topk_select.deployment_keys(config, tp, arch)] if keys else []


def why_not_score_top_k_prefill(call: ScoreTopKPrefillCall) -> str:
    """Why no kernels can take a call; empty if they can."""
    for first, last, scores, _ in call.walk():
        part = call.rows(first, last).scores(scores)
        return why_not_logits(part) or topk_select.why_not(scores, last - first, call.out.shape[1])
    return ""


def launch_score_top_k_prefill(call: ScoreTopKPrefillCall) -> None:
    """Run the kernels on the current stream of out's device."""
    k, shifts = call.out.shape[1], -1 if call.max_seqlen_k > 0 else 0
    for first, last, scores, is_scored in call.walk():
        part = call.rows(first, last)
        if is_scored:
            launch_logits(part.scores(scores), skip=k, op="score_top_k_prefill")
        starts, ends = prefill_bounds(part.cu_seq_len_k_start, part.cu_seq_len_k_end)
        topk_select.run(scores, starts, ends, part.out, last - first, k, call.k.shape[0], shifts)


SCORE_TOP_K_PREFILL = OpKernel(launch_score_top_k_prefill, why_not_score_top_k_prefill, score_top_k_prefill_keys)


# ---- score_top_k_decode


def score_top_k_decode_keys(config: ModelConfig, tp: int, arch: str) -> list[KernelKey]:
    """Those of scores and picks, where there are scores."""
    keys = paged_logits_keys(config, tp, arch)
    return [*keys, *topk_select.deployment_keys(config, tp, arch)] if keys else []


def why_not_score_top_k_decode(call: ScoreTopKDecodeCall) -> str:
    """Why no kernels can take a call; empty if they can."""
    for first, last, scores, _ in call.walk():
        part = call.requests(first, last).scores(scores)
        return why_not_paged_logits(part) or topk_select.why_not(scores, scores.shape[0], call.out.shape[1])
    return ""


def launch_score_top_k_decode(call: ScoreTopKDecodeCall) -> None:
    """Run the kernels on the current stream of out's device."""
    k = call.out.shape[1]
    for first, last, scores, is_scored in call.walk():
        part = call.requests(first, last)
        if is_scored:
            launch_paged_logits(part.scores(scores), skip=k, op="score_top_k_decode")
        starts, ends = decode_bounds(part.context_lens)
        places = slots(part.slot_block_table, part.slot_rows_per_page)
        topk_select.run(scores, starts, ends, part.out, scores.shape[0], k, slots=places)


SCORE_TOP_K_DECODE = OpKernel(launch_score_top_k_decode, why_not_score_top_k_decode, score_top_k_decode_keys)
