# SPDX-License-Identifier: Apache-2.0
"""The lightning indexer of C4A layers: scores every compressed entry and keeps the best."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from cute_kernels import numerics
from cute_kernels.indexer.ops import (
    all_visible_entries,
    cp_gather_indexer_k_quant_cache,
    fused_indexer_q_rope_quant,
    score_top_k_decode,
    score_top_k_prefill,
    score_top_k_workspace_size,
)
from cute_kernels.runtime.checks import Checker

from .caches import KV_BLOCK_SIZE, CompressorStateCache, DeepseekV4IndexerCache
from .compressor import DeepseekCompressor
from .config import DeepseekV4Config
from .linear import Linear
from .metadata import DeepseekV4Metadata

SCORE_BYTES = 256_000_000
"""Of scores in memory at a time. Calls with more are scored in chunks, each of which costs about 20 microseconds on an
H200 (perf/notes/score_top_k.md): 2% of a chunk's time."""


def step_columns(entries: int) -> int:
    """Columns of scores that a decode step of so many entries is launched for: rounded up by an eighth at most, so that
    a bound step serves many steps while sequences grow."""
    step = 1 << max(entries.bit_length() - 4, 6)
    return max(-(-entries // step) * step, 1)


Quantized = Any
"""e4m3 [T, heads, 128], or (packed e2m1 uint8 [T, heads, 64], ue8m0 int32 [T, heads])."""


def _rows(q: Quantized, start: int, stop: int, shape: tuple[int, ...] | None = None) -> Quantized:
    """Rows start..stop of quantized queries, with the row dimension unflattened to `shape` if given."""
    if isinstance(q, tuple):
        return tuple(_rows(part, start, stop, shape) for part in q)
    part = q[start:stop]
    return part if shape is None else part.unflatten(0, shape)


class SparseAttnIndexer(nn.Module):
    """Scores and top-k: writes each row's best entries, request-local, into `topk_indices_buffer`.

    topk_tokens           entries kept per row
    compress_ratio        source tokens per entry
    max_total_entries     prefill requests are scored in chunks of at most this many entries (one request may exceed it)
    topk_indices_buffer   int32 [max rows, topk_tokens], shared by all C4A layers; each overwrites it before use

    A row at position p sees entries 0 .. (p + 1) // ratio - 1. When everything a batch can see fits in topk_tokens no
    scores are computed.
    """

    def __init__(
        self,
        topk_tokens: int,
        compress_ratio: int,
        topk_indices_buffer: torch.Tensor,
        max_total_entries: int = 1 << 20,
    ) -> None:
        super().__init__()
        Checker("SparseAttnIndexer").tensor(
            "topk_indices_buffer", topk_indices_buffer, torch.int32, (None, topk_tokens), contiguous=True
        )
        self.topk_tokens, self.compress_ratio = topk_tokens, compress_ratio
        self.topk_indices_buffer = topk_indices_buffer
        self.max_total_entries = max_total_entries

    def forward(
        self,
        q: Quantized,
        weights: torch.Tensor,
        cache: DeepseekV4IndexerCache,
        metadata: DeepseekV4Metadata,
        slots: bool = False,
    ) -> torch.Tensor:
        """Top-k of every row of the step; returns the buffer's rows, int32 [T, topk_tokens].

        slots   decode rows are slots of the compressed cache instead of request-local entries
        """
        m = metadata
        assert m.visible is not None
        assert m.compressed_block_table is not None
        visible, decodes = m.visible, m.num_decode_tokens
        out = self.topk_indices_buffer[: m.num_tokens]
        translation: dict[str, Any] = {}
        if slots and decodes:
            translation["slot_block_table"] = m.decode_block_table()
            translation["slot_rows_per_page"] = KV_BLOCK_SIZE // self.compress_ratio
        if step_columns(m.max_seq_len // self.compress_ratio) <= self.topk_tokens:
            shape = m.decode_batch()
            if decodes:
                lengths = visible[:decodes].view(shape)
                all_visible_entries(lengths, self.topk_tokens, out=out[:decodes], **translation)
            if m.num_prefill_tokens:
                all_visible_entries(visible[decodes:], self.topk_tokens, out=out[decodes:])
            return out
        if decodes:
            self._decode(q, weights, cache, m, visible[:decodes], out, translation)
        first = m.num_decodes
        while first < m.num_decodes + m.num_prefills:
            last, total = first, 0
            while last < m.num_decodes + m.num_prefills:
                entries = m.seq_lens_cpu[last] // self.compress_ratio
                if last > first and total + entries > self.max_total_entries:
                    break
                last, total = last + 1, total + entries
            self._prefill(q, weights, cache, m, out, first, last, total)
            first = last
        return out

    def _decode(
        self,
        q: Quantized,
        weights: torch.Tensor,
        cache: DeepseekV4IndexerCache,
        m: DeepseekV4Metadata,
        visible: torch.Tensor,
        out: torch.Tensor,
        translation: dict[str, Any],
    ) -> None:
        assert m.compressed_block_table is not None
        rows, shape = m.num_decode_tokens, m.decode_batch()
        lengths = visible.view(shape)
        columns = step_columns(m.max_seq_len // self.compress_ratio)
        score_top_k_decode(
            _rows(q, 0, rows, shape),
            cache.data,
            weights[:rows],
            lengths,
            m.decode_block_table(),
            columns,
            self.topk_tokens,
            kv_format=cache.kv_format.id,
            out=out[:rows],
            workspace=self._workspace(shape[0], columns, shape[1], out.device),
            **translation,
        )

    def _prefill(
        self,
        q: Quantized,
        weights: torch.Tensor,
        cache: DeepseekV4IndexerCache,
        m: DeepseekV4Metadata,
        out: torch.Tensor,
        first: int,
        last: int,
        total: int,
    ) -> None:
        assert m.compressed_block_table is not None
        device = out.device
        assert m.prefill_key_starts is not None
        assert m.row_key_starts is not None
        assert m.row_key_ends is not None
        rows = slice(m.query_start_loc_cpu[first], m.query_start_loc_cpu[last])
        own = slice(first - m.num_decodes, last - m.num_decodes + 1)
        starts, row_starts, row_ends = m.prefill_key_starts[own], m.row_key_starts[rows], m.row_key_ends[rows]
        if own.start > 0:
            # of several chunks those after the first count their keys from their own first one
            skipped = starts[:1]
            starts, row_starts, row_ends = starts - skipped, row_starts - skipped, row_ends - skipped
        fp4 = isinstance(q, tuple)
        keys = torch.empty(total, 64 if fp4 else 128, dtype=torch.uint8, device=device)
        scales = torch.empty(total, 4, dtype=torch.uint8, device=device)
        cp_gather_indexer_k_quant_cache(
            cache.data, keys, scales, m.compressed_block_table[first:last], starts, kv_format=cache.kv_format.id
        )
        if fp4:
            kv = (keys, scales.view(torch.int32).squeeze(-1))
        else:
            kv = (keys.view(torch.float8_e4m3fn), scales.view(torch.float32).squeeze(-1))
        most = max(length // self.compress_ratio for length in m.seq_lens_cpu[first:last])
        score_top_k_prefill(
            _rows(q, rows.start, rows.stop),
            kv,
            weights[rows],
            row_starts,
            row_ends,
            self.topk_tokens,
            max_seqlen_k=most,
            out=out[rows],
            workspace=self._workspace(rows.stop - rows.start, most, 1, device),
        )

    def _workspace(self, requests: int, columns: int, next_n: int, device: torch.device) -> torch.Tensor | None:
        """For scores of so many requests of `next_n` rows."""
        size = score_top_k_workspace_size(requests, columns, self.topk_tokens, next_n=next_n, most=SCORE_BYTES)
        return torch.empty(size // 4, device=device) if size else None


class DeepseekV4Indexer(nn.Module):
    """Indexer queries and weights, the indexer's own compressor, and the selection.

    index_cache      "fp8" or "mxfp4": format of queries and cached keys
    index_hadamard   rotate queries and keys by a Hadamard matrix before they are quantized
    Replicated on every tensor-parallel rank.
    """

    def __init__(
        self,
        config: DeepseekV4Config,
        compress_ratio: int,
        topk_indices_buffer: torch.Tensor,
        *,
        quantized: bool,
        index_cache: str = "fp8",
        index_hadamard: bool = False,
        e2m1_rounding: str = "ties_to_lower",
        persist: str = "window",
        keep_every: int = 0,
        batch_invariant: bool = False,
        use_pdl: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        self.use_pdl = use_pdl
        gemm: dict[str, Any] = {"batch_invariant": batch_invariant, "use_pdl": use_pdl, "device": device}
        self.heads, self.head_dim = config.index_n_heads, config.index_head_dim
        self.use_fp4, self.index_hadamard, self.e2m1_rounding = index_cache == "mxfp4", index_hadamard, e2m1_rounding
        self.softmax_scale, self.head_scale = self.head_dim**-0.5, self.heads**-0.5
        self.wq_b = Linear(
            config.q_lora_rank, self.heads * self.head_dim, quantized=quantized, label="indexer.wq_b", **gemm
        )
        self.weights_proj = Linear(
            config.hidden_size, self.heads, quantized=False, label="indexer.weights_proj", **gemm
        )
        self.compressor = DeepseekCompressor(
            config,
            compress_ratio,
            self.head_dim,
            label="indexer.compressor.wkv_wgate",
            persist=persist,
            keep_every=keep_every,
            e2m1_rounding=e2m1_rounding,
            index_hadamard=index_hadamard,
            **gemm,
        )
        self.indexer_op = SparseAttnIndexer(config.index_topk, compress_ratio, topk_indices_buffer)

    def forward(
        self,
        index_q: torch.Tensor,
        compressed_kv_score: torch.Tensor,
        indexer_weights: torch.Tensor,
        metadata: DeepseekV4Metadata,
        state: CompressorStateCache,
        cache: DeepseekV4IndexerCache,
        cos_sin_cache: torch.Tensor,
        capture: dict[str, torch.Tensor] | None = None,
        slots: bool = False,
    ) -> torch.Tensor:
        """Top-k entries of every row, int32 [T, index_topk], request-local, -1 where there are fewer.

        index_q               bf16 [T, heads * 128], `wq_b` of the normalized latent queries
        compressed_kv_score   fp32 [T, 512], the compressor's projection of the hidden states
        indexer_weights       bf16 or fp32 [T, heads], `weights_proj` of the hidden states
        slots                 decode rows are slots of the compressed cache instead
        capture               receives "idx_q", the rotated queries before they are quantized
        """
        self.compressor(compressed_kv_score, metadata, state, cache, cos_sin_cache)
        index_q = self.by_head(index_q)
        q, weights = fused_indexer_q_rope_quant(
            metadata.positions,
            index_q,
            cos_sin_cache,
            indexer_weights,
            self.softmax_scale,
            self.head_scale,
            self.use_fp4,
            e2m1_rounding=self.e2m1_rounding,
            index_hadamard=self.index_hadamard,
            round_weights=True,
            use_pdl=self.use_pdl,
        )
        if capture is not None:
            rotated = numerics.rotate(index_q, metadata.positions, cos_sin_cache).bfloat16()
            capture["idx_q"] = numerics.hadamard(rotated).bfloat16() if self.index_hadamard else rotated
        return self.indexer_op(q, weights, cache, metadata, slots)

    def by_head(self, index_q: torch.Tensor) -> torch.Tensor:
        """Queries [T, heads * 128] as [T, heads, 128]."""
        return index_q.unflatten(-1, (self.heads, self.head_dim))
