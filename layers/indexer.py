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
from cute_kernels.runtime.arch import arch_of
from cute_kernels.runtime.checks import Checker
from cute_kernels.runtime.compile import call

from .caches import KV_BLOCK_SIZE, CompressorStateCache, DeepseekV4IndexerCache
from .compressor import DeepseekCompressor
from .config import DeepseekV4Config
from .linear import Linear
from .metadata import DeepseekV4Metadata
from .parallel import TensorParallel
from .score_rows import shards_rows

SCORE_BYTES = 256_000_000
"""Of scores in memory at a time. Calls with more are scored in chunks, each of which costs about 20 microseconds on an
H200 (perf/notes/score_top_k.md): 2% of a chunk's time."""


def step_columns(entries: int) -> int:
    """Columns of scores that a decode step of so many entries is launched for: rounded up by an eighth at most, so that
    a bound step serves many steps while sequences grow."""
    step = 1 << max(entries.bit_length() - 4, 6)
    return max(-(-entries // step) * step, 1)


ALL = slice(None)

Quantized = Any
"""e4m3 [T, heads, 128], or (packed e2m1 uint8 [T, heads, 64], ue8m0 int32 [T, heads])."""


def _rows(q: Quantized, rows: slice, shape: tuple[int, ...] | None = None, own: slice = ALL) -> Quantized:
    """Some rows of quantized queries, with the row dimension unflattened to `shape` if given, and of that `own`."""
    if isinstance(q, tuple):
        return tuple(_rows(part, rows, shape, own) for part in q)
    part = q[rows]
    return part if shape is None else part.unflatten(0, shape)[own]


def _deal(parts: torch.Tensor, out: torch.Tensor) -> None:
    """out[i] = parts[i % N, i // N] of parts [N, ceil(rows / N), ...]."""
    whole, rest = divmod(out.shape[0], parts.shape[0])
    rounds = out[: out.shape[0] - rest].unflatten(0, (whole, parts.shape[0]))
    if whole:
        rounds.copy_(parts[:, :whole].transpose(0, 1))
    if rest:
        out[out.shape[0] - rest :].copy_(parts[:rest, whole])


class SparseAttnIndexer(nn.Module):
    """Scores and top-k: writes each row's best entries, request-local, into `topk_indices_buffer`.

    topk_tokens           entries kept per row
    compress_ratio        source tokens per entry
    max_total_entries     prefill requests are scored in chunks of at most this many entries (one request may exceed it)
    topk_indices_buffer   int32 [max rows, topk_tokens], shared by all C4A layers; each overwrites it before use
    tp                    how ranks divide the rows that are scored: of N ranks, rank r takes the decode requests and
                          the prefill rows r, r + N, ... and all gather the picks. Keys are replicated

    A row at position p sees entries 0 .. (p + 1) // ratio - 1. When everything a batch can see fits in topk_tokens no
    scores are computed.
    """

    def __init__(
        self,
        topk_tokens: int,
        compress_ratio: int,
        topk_indices_buffer: torch.Tensor,
        max_total_entries: int = 1 << 20,
        tp: TensorParallel | None = None,
    ) -> None:
        super().__init__()
        Checker("SparseAttnIndexer").tensor(
            "topk_indices_buffer", topk_indices_buffer, torch.int32, (None, topk_tokens), contiguous=True
        )
        self.topk_tokens, self.compress_ratio = topk_tokens, compress_ratio
        self.topk_indices_buffer = topk_indices_buffer
        self.max_total_entries = max_total_entries
        self.tp = tp or TensorParallel()

    def shards(self, device: torch.device, m: DeepseekV4Metadata) -> bool:
        """Whether the ranks divide the rows of a step: the same answer on all of them."""
        form = self.tp.indexer
        if self.tp.size == 1 or form == "replicated" or not m.num_tokens or self.sees_few(m):
            return False
        if form == "rows":
            return True
        arch = arch_of(device.index or 0) if device.type == "cuda" else ""
        requests, next_n = m.decode_batch() if m.num_decode_tokens else (0, 1)
        # a bound step's key tells no more of the lengths
        entries = step_columns(m.max_seq_len // self.compress_ratio)
        return shards_rows(arch, self.tp.size, requests, m.num_prefill_tokens, entries, self.topk_tokens, next_n)

    def sees_few(self, m: DeepseekV4Metadata) -> bool:
        """Whether top-k takes all that any row sees."""
        return step_columns(m.max_seq_len // self.compress_ratio) <= self.topk_tokens

    def forward(
        self,
        q: Quantized,
        weights: torch.Tensor,
        cache: DeepseekV4IndexerCache,
        metadata: DeepseekV4Metadata,
        slots: bool = False,
        first_row: int = 0,
    ) -> torch.Tensor:
        """Top-k of every row of the step; returns the buffer's rows, int32 [T, topk_tokens].

        slots       decode rows are slots of the compressed cache instead of request-local entries
        first_row   of the buffer, for the step's first row
        """
        m = metadata
        assert m.visible is not None
        assert m.compressed_block_table is not None
        visible, decodes = m.visible, m.num_decode_tokens
        out = self.topk_indices_buffer[first_row : first_row + m.num_tokens]
        translation: dict[str, Any] = {}
        if slots and decodes:
            translation["slot_block_table"] = m.decode_block_table()
            translation["slot_rows_per_page"] = KV_BLOCK_SIZE // self.compress_ratio
        if self.sees_few(m):
            shape = m.decode_batch()
            if decodes:
                lengths = visible[:decodes].view(shape)
                all_visible_entries(lengths, self.topk_tokens, out=out[:decodes], **translation)
            if m.num_prefill_tokens:
                all_visible_entries(visible[decodes:], self.topk_tokens, out=out[decodes:])
            return out
        if self.shards(out.device, m):
            self._score_share(q, weights, cache, m, out, translation)
            return out
        if decodes:
            self._decode(q, weights, cache, m, visible[:decodes], out[:decodes], translation)
        if m.num_prefill_tokens:
            self._prefill(q, weights, cache, m, out[decodes:])
        return out

    def _score_share(
        self,
        q: Quantized,
        weights: torch.Tensor,
        cache: DeepseekV4IndexerCache,
        m: DeepseekV4Metadata,
        out: torch.Tensor,
        translation: dict[str, Any],
    ) -> None:
        """This rank's rows, then everyone's from the other ranks."""
        assert m.visible is not None
        rank, size, decodes = self.tp.rank, self.tp.size, m.num_decode_tokens
        requests, next_n = m.decode_batch() if decodes else (0, 1)
        decode_places, prefill_places = -(-requests // size), -(-m.num_prefill_tokens // size)
        rows = decode_places * next_n + prefill_places
        picks = torch.empty(size + 1, rows, self.topk_tokens, dtype=torch.int32, device=out.device)
        own, gathered = picks[size], picks[:size]
        mine = len(range(rank, requests, size)) * next_n
        if mine:
            self._decode(q, weights, cache, m, m.visible[:decodes], own[:mine], translation, slice(rank, None, size))
        if m.num_prefill_tokens:
            self._prefill(q, weights, cache, m, own[decode_places * next_n :], rank, size)
        device_index = out.get_device()
        call(self.tp.communicator.all_gather, device_index, gathered, own)
        if decodes:
            by_request = gathered[:, : decode_places * next_n].unflatten(1, (decode_places, next_n))
            call(_deal, device_index, by_request, out[:decodes].unflatten(0, (requests, next_n)))
        if prefill_places:
            call(_deal, device_index, gathered[:, decode_places * next_n :], out[decodes:])

    def _decode(
        self,
        q: Quantized,
        weights: torch.Tensor,
        cache: DeepseekV4IndexerCache,
        m: DeepseekV4Metadata,
        visible: torch.Tensor,
        out: torch.Tensor,
        translation: dict[str, Any],
        own: slice = ALL,
    ) -> None:
        """Of the decode requests `own`, whose rows `out` has."""
        assert m.compressed_block_table is not None
        rows, shape = m.num_decode_tokens, m.decode_batch()
        lengths = visible.view(shape)[own]
        columns = step_columns(m.max_seq_len // self.compress_ratio)
        if translation and own != ALL:
            translation = translation | {"slot_block_table": translation["slot_block_table"][own]}
        score_top_k_decode(
            _rows(q, slice(rows), shape, own),
            cache.data,
            weights[:rows] if own == ALL else weights[:rows].unflatten(0, shape)[own].flatten(0, 1),
            lengths,
            m.decode_block_table()[own],
            columns,
            self.topk_tokens,
            kv_format=cache.kv_format.id,
            out=out,
            workspace=self._workspace(lengths.shape[0], columns, shape[1], out.device),
            **translation,
        )

    def _prefill(
        self,
        q: Quantized,
        weights: torch.Tensor,
        cache: DeepseekV4IndexerCache,
        m: DeepseekV4Metadata,
        out: torch.Tensor,
        rank: int = 0,
        size: int = 1,
    ) -> None:
        """Of every `size`-th prefill row from number `rank` on, whose picks `out` has one after the other."""
        first = m.num_decodes
        while first < m.num_decodes + m.num_prefills:
            last, total = first, 0
            while last < m.num_decodes + m.num_prefills:
                entries = m.seq_lens_cpu[last] // self.compress_ratio
                if last > first and total + entries > self.max_total_entries:
                    break
                last, total = last + 1, total + entries
            begin, end = m.query_start_loc_cpu[first], m.query_start_loc_cpu[last]
            done = -(-(begin - m.num_decode_tokens - rank) // size)
            rows = slice(m.num_decode_tokens + rank + done * size, end, size)
            count = len(range(rows.start, end, size))
            if count:
                self._prefill_chunk(q, weights, cache, m, out[done : done + count], rows, first, last, total)
            first = last

    def _prefill_chunk(
        self,
        q: Quantized,
        weights: torch.Tensor,
        cache: DeepseekV4IndexerCache,
        m: DeepseekV4Metadata,
        out: torch.Tensor,
        rows: slice,
        first: int,
        last: int,
        total: int,
    ) -> None:
        """Of some rows of the requests first..last, which have `total` entries."""
        assert m.compressed_block_table is not None
        device = out.device
        assert m.prefill_key_starts is not None
        assert m.row_key_starts is not None
        assert m.row_key_ends is not None
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
            _rows(q, rows),
            kv,
            weights[rows],
            row_starts.contiguous(),
            row_ends.contiguous(),
            self.topk_tokens,
            max_seqlen_k=most,
            out=out,
            workspace=self._workspace(out.shape[0], most, 1, device),
        )

    def _workspace(self, requests: int, columns: int, next_n: int, device: torch.device) -> torch.Tensor | None:
        """For scores of so many requests of `next_n` rows."""
        size = score_top_k_workspace_size(requests, columns, self.topk_tokens, next_n=next_n, most=SCORE_BYTES)
        return torch.empty(size // 4, device=device) if size else None


class DeepseekV4Indexer(nn.Module):
    """Indexer queries and weights, the indexer's own compressor, and the selection.

    index_cache      "fp8" or "mxfp4": format of queries and cached keys
    index_hadamard   rotate queries and keys by a Hadamard matrix before they are quantized
    tp               replicated on every tensor-parallel rank, which may divide the rows that they score
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
        tp: TensorParallel | None = None,
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
        self.indexer_op = SparseAttnIndexer(config.index_topk, compress_ratio, topk_indices_buffer, tp=tp)

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
        q, weights = self.quantize(index_q, indexer_weights, metadata.positions, cos_sin_cache)
        if capture is not None:
            rotated = numerics.rotate(self.by_head(index_q), metadata.positions, cos_sin_cache).bfloat16()
            capture["idx_q"] = numerics.hadamard(rotated).bfloat16() if self.index_hadamard else rotated
        return self.indexer_op(q, weights, cache, metadata, slots)

    def quantize(
        self, index_q: torch.Tensor, indexer_weights: torch.Tensor, positions: torch.Tensor, cos_sin_cache: torch.Tensor
    ) -> tuple[Quantized, torch.Tensor]:
        """(rotated and quantized queries, weights) as scores take them."""
        return fused_indexer_q_rope_quant(
            positions,
            self.by_head(index_q),
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

    def by_head(self, index_q: torch.Tensor) -> torch.Tensor:
        """Queries [T, heads * 128] as [T, heads, 128]."""
        return index_q.unflatten(-1, (self.heads, self.head_dim))
