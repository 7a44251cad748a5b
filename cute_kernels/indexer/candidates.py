# SPDX-License-Identifier: Apache-2.0
"""What score_candidates_decode and score_candidates_prefill run on a GPU, chunk after chunk: the scores of candidates,
compact, then their picks.

The kernel that picks (topk.py) takes the candidates for a block table of pages of eight rows: what it writes in place
of column 8 m + i is then key i of candidate m.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from cute_kernels.indexer import chunks, launch, select, topk_select
from cute_kernels.indexer.call import CandidatesDecodeCall, CandidatesPrefillCall, stride
from cute_kernels.indexer.chunks import CANDIDATE_BLOCK
from cute_kernels.indexer.hopper.logits_candidates import CandidateLogitsKey
from cute_kernels.models import ModelConfig, latent_ratios
from cute_kernels.runtime.arch import arch_of, grid_size, multiprocessors
from cute_kernels.runtime.compile import KernelKey
from cute_kernels.runtime.compile import launch as launch_key
from cute_kernels.runtime.key import OpKernel


def deployment_keys(config: ModelConfig, tp: int, arch: str, paged: bool) -> list[KernelKey]:
    """Those of scores and picks, of a model with candidates. Every rank has all index heads."""
    if arch != select.HOPPER or not latent_ratios(config):
        return []
    keys = [CandidateLogitsKey(arch, config.index_n_heads, mxfp4, paged) for mxfp4 in (False, True)]
    return [*keys, *topk_select.deployment_keys(config, tp, arch)]


def why_not(call: CandidatesDecodeCall | CandidatesPrefillCall) -> str:
    """Why no kernels can take a (checked) call; empty if they can."""
    arch, heads = arch_of(call.out.device.index), call.q.shape[-2]
    blocks, k = call.candidates.shape[1], call.out.shape[1]
    if isinstance(call, CandidatesDecodeCall):
        name, keys, page_rows, most = "kv_cache", call.kv_cache, call.kv_cache.shape[1], call.max_model_len
    else:
        name, keys, page_rows, most = "kv[0]", call.k, 0, call.k.shape[0]
    if arch != select.HOPPER:
        return f"there is a kernel on {select.HOPPER} only, this is {arch}"
    if heads % select.HEAD_STEP or heads > select.MOST_HEADS:
        return f"HI must be a multiple of {select.HEAD_STEP}, at most {select.MOST_HEADS}, got {heads}"
    if page_rows % CANDIDATE_BLOCK:
        return f"pages must have a multiple of {CANDIDATE_BLOCK} keys, got {page_rows}"
    if CANDIDATE_BLOCK * blocks <= k:
        return f"candidates must have more than k = {k} keys, got {blocks} blocks"
    if most > 2**31 - 256:
        return f"there must be at most 2^31 - 256 keys, got {most}"
    for first, last in chunks_of(call)[:1]:
        scores = scores_of(call, first, last)
        why = launch.why_not(call.q, keys, name, scores)
        return why or topk_select.why_not(scores, scores.shape[0], k)
    return ""


def next_n_of(call: CandidatesDecodeCall | CandidatesPrefillCall) -> int:
    """Rows of a request; a prefill is cut at any row."""
    return int(call.q.shape[1]) if isinstance(call, CandidatesDecodeCall) else 1


def chunks_of(call: CandidatesDecodeCall | CandidatesPrefillCall) -> tuple[tuple[int, int], ...]:
    """(first, last) request, or row of a prefill, of each chunk whose scores fit into the workspace."""
    size = call.workspace.numel() * call.workspace.element_size()
    columns = chunks.candidate_columns(call.candidates.shape[1])
    return chunks.bounds(call.q.shape[0], columns, next_n_of(call), size)


def scores_of(call: CandidatesDecodeCall | CandidatesPrefillCall, first: int, last: int) -> torch.Tensor:
    """fp32 [rows, 8 blocks] of the workspace, for some requests; a row's count is behind its scores."""
    columns = CANDIDATE_BLOCK * call.candidates.shape[1]
    step = chunks.row_bytes(columns + chunks.LENGTH_COLUMNS) // 4
    rows = (last - first) * next_n_of(call)
    return call.workspace.view(call.weights.dtype).as_strided((rows, columns), (step, 1))


def run(call: CandidatesDecodeCall | CandidatesPrefillCall) -> None:
    """Run the kernels on the current stream of out's device."""
    next_n = next_n_of(call)
    if isinstance(call, CandidatesDecodeCall):
        by_request = "q", "context_lens", "block_tables"
    else:
        by_request = "q", "cu_seq_len_k_start", "cu_seq_len_k_end"
    for first, last in chunks_of(call):
        own, rows = slice(first, last), slice(first * next_n, last * next_n)
        cut = {name: getattr(call, name)[own] for name in by_request}
        cut |= {name: getattr(call, name)[rows] for name in ("weights", "candidates", "out")}
        part = call._replace(q_scale=None if call.q_scale is None else call.q_scale[own], **cut)
        run_chunk(part, scores_of(part, 0, last - first))


def run_chunk(call: CandidatesDecodeCall | CandidatesPrefillCall, scores: torch.Tensor) -> None:
    """Of a call whose scores all fit into the workspace."""
    device_index = call.out.device.index
    rows, columns = scores.shape
    q, candidates, k = call.q, call.candidates, call.out.shape[1]
    paged = isinstance(call, CandidatesDecodeCall)
    key = CandidateLogitsKey(select.HOPPER, q.shape[-2], call.q_scale is not None, paged)
    if isinstance(call, CandidatesDecodeCall):
        pool, table, lengths = call.kv_cache, call.block_tables, call.context_lens
        codes, page_rows, size = pool.data_ptr(), pool.shape[1], key.config.row_bytes
        places = codes, codes + page_rows * size, size, stride(pool, 0), page_rows, pool.shape[0]
        pages = table.data_ptr(), table.stride(0) * 4, table.shape[1]
        windows = 0, lengths.data_ptr(), lengths.stride(0) * 4, call.max_model_len, -1
        queries = stride(q, 0), stride(q, 1), stride(q, 2), q.shape[0], q.shape[1]
    else:
        keys = call.k.shape[0]
        places = call.k.data_ptr(), call.k_scale.data_ptr(), stride(call.k, 0), 0, CANDIDATE_BLOCK, 1
        pages = 0, 0, 0
        starts, ends = call.cu_seq_len_k_start.data_ptr(), call.cu_seq_len_k_end.data_ptr()
        windows = starts, ends, 0, keys, call.max_seqlen_k or -1
        queries = stride(q, 0) * rows, stride(q, 0), stride(q, 1), 1, rows
    numbers: tuple[Any, ...] = (
        *(call.weights, q.data_ptr(), *queries, *places, *pages),
        *(candidates.data_ptr(), candidates.stride(0) * 4, candidates.shape[1], *windows, k),
        *(scores.data_ptr(), scores.stride(0) * 4, *launch.scale_arguments(key, call.q_scale)),
    )
    ctas = grid_size(min(multiprocessors(device_index), rows * -(-columns // key.config.keys)))
    launch_key(key, device_index, *numbers, ctas)
    counts = scores.data_ptr() + 4 * columns, scores.stride(0) * 4, 0, 1
    picked = topk_select.slots(candidates, CANDIDATE_BLOCK)
    topk_select.run(scores, (0, 0), counts, call.out, rows, k, slots=picked)


DECODE: OpKernel[CandidatesDecodeCall] = OpKernel(run, why_not, partial(deployment_keys, paged=True))
PREFILL: OpKernel[CandidatesPrefillCall] = OpKernel(run, why_not, partial(deployment_keys, paged=False))
