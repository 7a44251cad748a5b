"""Scores and picks of a decode call without all scores in memory: the score kernel keeps only scores that may be among
the best of a row (sieve_sm90), from which another kernel picks (topk_sieved)."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

from cute_kernels.indexer import chunks, paged_logits, topk_sieved
from cute_kernels.indexer import logits_choice as choice
from cute_kernels.indexer.logits_plan import KEYS
from cute_kernels.indexer.sieve_sm90 import Mxfp4SieveKey, SieveKey
from cute_kernels.runtime.arch import arch_of, multiprocessors
from cute_kernels.runtime.compile import launch as launch_key


class Choice(NamedTuple):
    """Both kernels, the blocks of the first, and bytes of workspace."""

    scores: SieveKey | Mxfp4SieveKey
    picks: topk_sieved.SievedKey
    blocks: int
    size: int


def deployment_keys(config: Any, arch: str) -> list[Any]:
    """Both formats' score kernels, and the picks of rows of any length."""
    heads = choice.heads_of(config)
    if heads is None or arch != choice.ARCH or not choice.has_own(arch, heads):
        return []
    return [SieveKey(arch, heads), Mxfp4SieveKey(arch, heads), *topk_sieved.keys_of(arch)]


@lru_cache(maxsize=256)
def choose(
    device_index: int, requests: int, heads: int, page_rows: int, mxfp4: bool, columns: int, k: int
) -> Choice | None:
    """For requests of one row each; None where there are no such kernels, or others are as fast."""
    arch = arch_of(device_index)
    picks = topk_sieved.key_for(arch, columns)
    if arch != choice.ARCH or page_rows % KEYS or not choice.has_own(arch, heads, page_rows):
        return None
    if picks is None or not k < columns or not chunks.is_sieved(requests, columns, 1, k):
        return None
    scores = (Mxfp4SieveKey if mxfp4 else SieveKey)(arch, heads)
    blocks = choice.blocks(scores, requests, 1, columns, multiprocessors(device_index))
    return Choice(scores, picks, blocks, chunks.sieved_bytes(requests, blocks))


def run(call: Any) -> bool:
    """Launch for the arguments of score_top_k_decode, if there are kernels for them and the workspace is large enough;
    otherwise nothing happens, and the answer is False."""
    requests, next_n, heads = call.q.shape[:3]
    if next_n != 1 or call.workspace is None or call.kv_cache.shape[0] == 0 or call.block_tables.shape[1] == 0:
        return False
    device_index, columns, k = call.out.device.index, call.max_model_len, call.out.shape[1]
    chosen = choose(device_index, requests, heads, call.kv_cache.shape[1], call.q_scale is not None, columns, k)
    if chosen is None or call.workspace.numel() * call.workspace.element_size() < chosen.size:
        return False
    memory = call.workspace.view(call.weights.dtype).as_strided((requests, columns), (0, 1))
    scored = paged_logits.Call(*call.scores(memory))
    launch_key(chosen.scores, device_index, *paged_logits.arguments(chosen.scores, scored, k), chosen.blocks)
    ends = call.context_lens
    bounds = ends.data_ptr(), ends.stride(0) * 4, columns
    launch_key(chosen.picks, device_index, call.out, memory.data_ptr(), *bounds, requests, chosen.blocks, k)
    return True
