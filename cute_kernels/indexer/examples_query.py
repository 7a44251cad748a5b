"""Calls that the kernels of the indexer's queries and of the gather of its keys are verified with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from cute_kernels.formats import INDEX_DIM, INDEXER_FP8, INDEXER_MXFP4, INDEXER_MXFP4_WIDE, ROPE_DIM
from cute_kernels.numerics import E2M1_ROUNDINGS
from cute_kernels.runtime.verify import Example, raw_memory

_POISON = 0xA5
_POSITIONS = 500


def _poisoned(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    tensor = torch.empty(shape, dtype=dtype)
    raw_memory(tensor).fill_(_POISON)
    return tensor


def _inputs(tokens: int, heads: int, bf16_table: bool) -> tuple[torch.Tensor, ...]:
    """(positions, queries, table, weights): every bf16 number, at positions inside and outside the table."""
    g = torch.Generator().manual_seed(tokens + heads)
    q = torch.randint(-(2**15), 2**15, (tokens, heads, INDEX_DIM), generator=g, dtype=torch.int16).view(torch.bfloat16)
    q[1::2] = torch.randn(q[1::2].shape, generator=g).bfloat16()
    positions = torch.randint(-9, _POSITIONS + 9, (tokens,), generator=g)
    positions[3::11] = torch.tensor([2**40, -(2**62)]).repeat(tokens)[: len(positions[3::11])]
    angles = torch.rand(_POSITIONS, ROPE_DIM // 2, generator=g) * 6.3
    table = torch.cat([angles.cos(), angles.sin()], dim=1)
    weights = torch.randn(tokens, heads + 3, generator=g)[:, 1:-2]
    return (
        positions,
        q,
        table.bfloat16() if bf16_table else table,
        weights.float() if bf16_table else weights.bfloat16(),
    )


_QUERIES = ((1, 64, False), (37, 5, True), (150, 64, False), (0, 64, False))
"""(tokens, heads, whether the table is bf16 and the weights are fp32)."""


def query_fp8() -> Iterator[Example]:
    """fused_indexer_q_rope_quant_fp8(positions, index_q, table, weights, 2 factors, hadamard, q_quant, weights_out,
    round_weights, use_pdl)"""
    for tokens, heads, bf16_table in _QUERIES:
        for hadamard in (False, True):
            codes = _poisoned(tokens, heads, INDEX_DIM + 16, dtype=torch.float8_e4m3fn)[..., :INDEX_DIM]
            out = _poisoned(tokens, heads + 4, dtype=torch.float32)[:, :heads]
            inputs = _inputs(tokens, heads, bf16_table)
            name = f"{tokens} tokens, {heads} heads" + ", Hadamard" * hadamard
            yield Example(name, (*inputs, 0.3, 0.7, hadamard, codes, out, hadamard, hadamard))


def query_mxfp4() -> Iterator[Example]:
    """fused_indexer_q_rope_quant_mxfp4(positions, index_q, table, weights, 2 factors, rounding, hadamard, 3 outputs,
    round_weights, use_pdl)"""
    for tokens, heads, bf16_table in _QUERIES:
        for rounding in E2M1_ROUNDINGS:
            for hadamard in (False, True):
                codes = _poisoned(tokens, heads, INDEX_DIM // 2 + 4, dtype=torch.uint8)[..., : INDEX_DIM // 2]
                scales = _poisoned(tokens, heads + 4, dtype=torch.int32)[:, :heads]
                out = _poisoned(tokens, heads + 4, dtype=torch.bfloat16 if bf16_table else torch.float32)[:, :heads]
                inputs = _inputs(tokens, heads, bf16_table)
                name = f"{tokens} tokens, {heads} heads, {rounding}" + ", Hadamard" * hadamard
                yield Example(name, (*inputs, 0.3, 0.7, rounding, hadamard, codes, scales, out, not hadamard, hadamard))


def gather() -> Iterator[Example]:
    """cp_gather_indexer_k_quant_cache(kv_cache, dst_k, dst_scale, block_table, cu_seq_lens, kv_format)"""
    for fmt in (INDEXER_FP8, INDEXER_MXFP4, INDEXER_MXFP4_WIDE):
        for block_size, extra, lens in (
            (64, 0, [130, 0, 1, 640]),
            (64, 64, [70000]),
            (3, 4, [9, 1] * 40),
        ):
            name = f"{fmt.id}, {len(lens)} requests, pages of {block_size} and {extra} bytes between them"
            yield Example(name, _gather_arguments(fmt, block_size, extra, lens))


def _gather_arguments(fmt: Any, block_size: int, extra: int, lens: list[int]) -> tuple[Any, ...]:
    g = torch.Generator().manual_seed(block_size + len(lens))
    pages = 23
    pool = fmt.allocate(pages, block_size, page_stride=fmt.page_stride(block_size) + extra)
    raw = raw_memory(pool)
    raw.copy_(torch.randint(0, 256, raw.shape, generator=g, dtype=torch.uint8))
    width = -(-max(lens) // block_size) + 1
    table = torch.randint(0, pages, (len(lens), width), generator=g, dtype=torch.int32)
    table[0, :1] = pages
    table[-1, 1:2] = -1
    bounds = torch.tensor([2, *lens]).cumsum(0).int()
    (_, code_bytes), (_, scale_bytes) = fmt.fields(block_size)
    total = int(bounds[-1]) - 1
    codes = _poisoned(total, code_bytes + 16, dtype=torch.uint8)[:, :code_bytes]
    scales = _poisoned(total, scale_bytes + 4, dtype=torch.uint8)[:, :scale_bytes]
    return pool, codes, scales, table, bounds, fmt.id


EXAMPLES = {
    "fused_indexer_q_rope_quant_fp8": query_fp8,
    "fused_indexer_q_rope_quant_mxfp4": query_mxfp4,
    "cp_gather_indexer_k_quant_cache": gather,
}
