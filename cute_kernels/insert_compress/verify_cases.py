# SPDX-License-Identifier: Apache-2.0
"""Calls that the kernels of everything between the first GEMMs and the scores or attention are verified with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch

from cute_kernels.compressor.verify_cases import entry_difference, random_step
from cute_kernels.formats import FP8_DS_MLA, HEAD_DIM, INDEX_DIM, INDEXER_FP8
from cute_kernels.insert_compress.call import COMPRESS_RATIO, CompressCall, IndexCall
from cute_kernels.kv_cache.verify_cases import agree_but_for_queries
from cute_kernels.runtime.verify import Example, raw_memory

_POISON = 0xA5


def _poisoned(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    tensor = torch.empty(shape, dtype=dtype)
    raw_memory(tensor).fill_(_POISON)
    return tensor


def random_call(
    lengths: list[int],
    seed: int = 0,
    *,
    heads: int = 8,
    index_heads: int = 64,
    block_size: int = 64,
    state_rows: int = 4,
    entry_rows: int = 4,
    fp32_weights: bool = True,
    index_hadamard: bool = False,
    bad: bool = True,
) -> IndexCall:
    """Arguments on the CPU for requests with so many tokens each behind prefixes of random lengths; with `bad`, some
    slots and pages that do not exist, and rows of nobody. Queries of both kinds lie in one wide tensor."""
    g = torch.Generator().manual_seed(seed)
    step: Any = partial(random_step, bad=bad, state_rows=state_rows, entry_rows=entry_rows)
    main: Any = step(FP8_DS_MLA.id, 4, lengths, seed)
    index: Any = step(INDEXER_FP8.id, 4, lengths, seed)
    rows = main["positions"].shape[0]
    wide = torch.full((rows, heads * HEAD_DIM + index_heads * INDEX_DIM + 8), 7.0, dtype=torch.bfloat16)
    q = wide[:, : heads * HEAD_DIM].unflatten(-1, (heads, HEAD_DIM))
    index_q = wide[:, heads * HEAD_DIM : -8].unflatten(-1, (index_heads, INDEX_DIM))
    kv = torch.randn(rows, HEAD_DIM, generator=g).bfloat16()
    for queries in (q, index_q):
        magnitudes = torch.exp2(torch.randint(-9, 9, (*queries.shape[:2], 1), generator=g).float())
        queries.copy_(torch.randn(queries.shape, generator=g) * magnitudes)
    pages = rows // block_size + 2
    pool = FP8_DS_MLA.allocate(pages, block_size, page_stride=FP8_DS_MLA.page_bytes(block_size) + 8)
    raw_memory(pool).fill_(_POISON)
    slots = torch.randperm(pages * block_size, generator=g)[:rows]
    if bad:
        slots[2::5] = torch.tensor([-1, 2**31, -(2**62), pages * block_size]).repeat(rows)[: len(slots[2::5])]
    weights = torch.randn(rows, index_heads + 4, generator=g)[:, 2:-2]
    numbers: Any = 1e-6, block_size, 0, "all", FP8_DS_MLA.id, INDEXER_FP8.id, 0.3, 0.7
    return IndexCall(
        *(q, kv, pool, slots, main["positions"], main["cos_sin_cache"], main["token_to_req_indices"]),
        *(main["query_start_loc"], main["slot_mapping"], main["block_table"], main["kv_slot_mapping"], None),
        *(main["kv_score"], main["ape"], main["rms_norm_weight"], main["state_cache"], main["kv_cache"]),
        *(index["kv_score"], index["ape"], index["rms_norm_weight"], index["state_cache"], index["kv_cache"]),
        *(index_q, weights if fp32_weights else weights.bfloat16()),
        _poisoned(rows, index_heads, INDEX_DIM + 16, dtype=torch.float8_e4m3fn)[..., :INDEX_DIM],
        _poisoned(rows, index_heads + 4, dtype=torch.float32)[:, :index_heads],
        *(*numbers, index_hadamard, fp32_weights, False),
    )


def difference(got: Sequence[Any], want: Sequence[Any]) -> str:
    """Why arguments on the CPU differ by more than sums in another order explain, or ""."""
    g, w = IndexCall(*got), IndexCall(*want)
    for kv_format, mine, theirs in (
        (w.kv_format, g.entry_cache, w.entry_cache),
        (w.index_format, g.index_cache, w.index_cache),
    ):
        found = entry_difference(kv_format, mine, theirs, w.entry_slot_mapping)
        if found:
            return f"{kv_format}: {found}"
    # both kinds of queries lie in one tensor: its memory is looked at once, with q
    if not torch.equal(g.index_q, w.index_q):
        return "index_q: it was written"
    same = {name: getattr(w, name) for name in ("entry_cache", "index_cache", "index_q")}
    return agree_but_for_queries(0, g._replace(**same), w)


_STEPS: tuple[tuple[list[int], dict[str, Any]], ...] = (
    ([], {}),
    ([1], {"heads": 64}),
    ([1] * 13, {"index_hadamard": True}),
    ([1, 2, 1, 4, 0, 1, 3], {"fp32_weights": False, "state_rows": 3, "entry_rows": 3}),
    ([1, 2, 5], {"fp32_weights": False, "index_hadamard": True}),
    ([1] * 64, {"heads": 5, "index_heads": 6, "block_size": 3}),
    ([30, 1, 9, 1, 64], {"bad": False, "heads": 128}),
)


def fused() -> Iterator[Example]:
    """fused_qkv_insert_compress_index(q, kv, k_cache, slot_mapping, positions, ...)"""
    for seed, (lengths, options) in enumerate(_STEPS):
        call = random_call(lengths, seed, **options)
        yield Example(f"tokens {lengths}, {options}", tuple(call), difference)
        windowed = call._replace(persist="window", keep_every=32, use_pdl=True)
        yield Example(f"tokens {lengths}, {options}, saving what is needed", tuple(windowed), difference)


def random_compress_call(
    lengths: list[int],
    seed: int = 0,
    *,
    heads: int = 8,
    block_size: int = 64,
    state_rows: int = 8,
    entry_rows: int = 2,
    longest_prefix: int = 300,
    closing: bool = False,
    bad: bool = True,
) -> CompressCall:
    """As `random_call`, of a layer of ratio 128. closing: every request's first token is the last of a group."""
    g = torch.Generator().manual_seed(seed)
    sizes: Any = {"longest_prefix": longest_prefix, "state_rows": state_rows, "entry_rows": entry_rows, "bad": bad}
    main = random_step(FP8_DS_MLA.id, COMPRESS_RATIO, lengths, seed, at_ends=closing, **sizes)
    rows = main["positions"].shape[0]
    wide = torch.full((rows, heads * HEAD_DIM + 8), 7.0, dtype=torch.bfloat16)
    q = wide[:, :-8].unflatten(-1, (heads, HEAD_DIM))
    kv = torch.randn(rows, HEAD_DIM, generator=g).bfloat16()
    magnitudes = torch.exp2(torch.randint(-9, 9, (rows, heads, 1), generator=g).float())
    q.copy_(torch.randn(q.shape, generator=g) * magnitudes)
    pages = rows // block_size + 2
    pool = FP8_DS_MLA.allocate(pages, block_size, page_stride=FP8_DS_MLA.page_bytes(block_size) + 8)
    raw_memory(pool).fill_(_POISON)
    slots = torch.randperm(pages * block_size, generator=g)[:rows]
    if bad:
        slots[2::5] = torch.tensor([-1, 2**31, -(2**62), pages * block_size]).repeat(rows)[: len(slots[2::5])]
    return CompressCall(
        *(q, kv, pool, slots, main["positions"], main["cos_sin_cache"], main["token_to_req_indices"]),
        *(main["query_start_loc"], main["slot_mapping"], main["block_table"], main["kv_slot_mapping"], None),
        *(main["kv_score"], main["ape"], main["rms_norm_weight"], main["state_cache"], main["kv_cache"]),
        *(1e-6, block_size, "all", FP8_DS_MLA.id, False),
    )


def compress_difference(got: Sequence[Any], want: Sequence[Any]) -> str:
    """As `difference`."""
    g, w = CompressCall(*got), CompressCall(*want)
    found = entry_difference(w.kv_format, g.entry_cache, w.entry_cache, w.entry_slot_mapping)
    return found or agree_but_for_queries(0, g._replace(entry_cache=w.entry_cache), w)


_COMPRESS_STEPS: tuple[tuple[list[int], dict[str, Any]], ...] = (
    ([], {}),
    ([1], {"heads": 64}),
    ([1] * 7, {"closing": True, "bad": False}),
    ([1] * 65, {"heads": 5, "closing": True, "state_rows": 3, "entry_rows": 3, "block_size": 3}),
    ([1, 2, 1, 4, 0, 1, 3], {"state_rows": 3, "entry_rows": 3}),
    ([1, 300, 128, 2, 129], {"heads": 3}),
    ([30, 1, 9, 1, 64], {"bad": False, "heads": 128}),
)


def fused_compress() -> Iterator[Example]:
    """fused_qkv_insert_compress(q, kv, k_cache, slot_mapping, positions, ...)"""
    for seed, (lengths, options) in enumerate(_COMPRESS_STEPS):
        call = random_compress_call(lengths, seed, **options)
        yield Example(f"tokens {lengths}, {options}", tuple(call), compress_difference)
        windowed = call._replace(persist="window", use_pdl=True)
        yield Example(f"tokens {lengths}, {options}, saving what is needed", tuple(windowed), compress_difference)


def soak_fused_compress() -> Iterator[Example]:
    """fused_qkv_insert_compress of more clusters than run at a time, of which each has several entries to store; by the
    kernels of few heads and of many."""
    for heads in (8, 16):
        call = random_compress_call([3] * 100, heads, heads=heads, longest_prefix=0, closing=True)
        yield Example(f"100 requests of 3 tokens, {heads} heads", tuple(call), compress_difference)


SOAK = {"fused_qkv_insert_compress": soak_fused_compress}

EXAMPLES = {"fused_qkv_insert_compress": fused_compress, "fused_qkv_insert_compress_index": fused}
