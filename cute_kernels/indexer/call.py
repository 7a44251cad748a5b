# SPDX-License-Identifier: Apache-2.0
"""Calls of the indexer's ops: their arguments by name, in the order of the schemas, and what follows from them.

score_top_k_prefill and score_top_k_decode are walked chunk after chunk: the scores of a chunk, then its picks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from cute_kernels import numerics
from cute_kernels.formats import INDEX_DIM
from cute_kernels.indexer import chunks


class QueryFp8Call(NamedTuple):
    """fused_indexer_q_rope_quant_fp8."""

    positions: torch.Tensor
    index_q: torch.Tensor
    index_q_cos_sin_cache: torch.Tensor
    index_weights: torch.Tensor
    index_weights_softmax_scale: float
    index_weights_head_scale: float
    index_hadamard: bool
    q_quant: torch.Tensor
    weights_out: torch.Tensor
    round_weights: bool
    use_pdl: bool

    @property
    def e2m1_rounding(self) -> str:
        """None: codes are e4m3, and their scales are factors of the weights."""
        return ""

    @property
    def e2m1_floor(self) -> float:
        return numerics.CACHE_FLOOR

    @property
    def q_scale(self) -> None:
        return None


class QueryMxfp4Call(NamedTuple):
    """fused_indexer_q_rope_quant_mxfp4."""

    positions: torch.Tensor
    index_q: torch.Tensor
    index_q_cos_sin_cache: torch.Tensor
    index_weights: torch.Tensor
    index_weights_softmax_scale: float
    index_weights_head_scale: float
    e2m1_rounding: str
    e2m1_floor: float
    index_hadamard: bool
    q_quant: torch.Tensor
    q_scale: torch.Tensor
    weights_out: torch.Tensor
    round_weights: bool
    use_pdl: bool


class GatherCall(NamedTuple):
    """cp_gather_indexer_k_quant_cache."""

    kv_cache: torch.Tensor
    dst_k: torch.Tensor
    dst_scale: torch.Tensor
    block_table: torch.Tensor
    cu_seq_lens: torch.Tensor
    kv_format: str


class LogitsCall(NamedTuple):
    """mqa_logits: all rows are one request's, all keys one page's."""

    q: torch.Tensor
    q_scale: torch.Tensor | None
    k: torch.Tensor
    k_scale: torch.Tensor
    weights: torch.Tensor
    cu_seq_len_k_start: torch.Tensor
    cu_seq_len_k_end: torch.Tensor
    clean_logits: bool
    max_seqlen_k: int
    out: torch.Tensor

    @property
    def requests(self) -> int:
        return 1

    @property
    def use_pdl(self) -> bool:
        return True

    @property
    def rows(self) -> int:
        return int(self.q.shape[0])

    def query_strides(self) -> tuple[int, int, int]:
        """In elements: by request, row and head."""
        by_row = stride(self.q, 0)
        return by_row * self.rows, by_row, stride(self.q, 1)

    def cache_arguments(self) -> tuple[int, ...]:
        """Where keys are: addresses of key 0 and its scale, strides of keys and pages in bytes; keys of a page, pages;
        address of the block table, its stride in bytes and its columns."""
        keys, by_key = self.k.shape[0], stride(self.k, 0)
        return (self.k.data_ptr(), self.k_scale.data_ptr(), by_key, by_key * keys, keys, 1, 0, 0, 0)

    def window_arguments(self, skip: int) -> tuple[int, ...]:
        """Which keys a row sees: addresses of starts and ends, stride of the ends by request in bytes; number of keys,
        whether a row's columns begin at its start (-1) or not (0), keys up to which a row is not scored."""
        starts, ends = self.cu_seq_len_k_start.data_ptr(), self.cu_seq_len_k_end.data_ptr()
        return (starts, ends, 0, self.k.shape[0], -1 if self.max_seqlen_k > 0 else 0, skip)


class PagedLogitsCall(NamedTuple):
    """paged_mqa_logits: a page has all codes, then all scales."""

    q: torch.Tensor
    q_scale: torch.Tensor | None
    kv_cache: torch.Tensor
    weights: torch.Tensor
    context_lens: torch.Tensor
    block_tables: torch.Tensor
    max_model_len: int
    clean_logits: bool
    kv_format: str
    out: torch.Tensor
    use_pdl: bool

    @property
    def requests(self) -> int:
        return int(self.q.shape[0])

    @property
    def rows(self) -> int:
        return int(self.q.shape[1])

    def query_strides(self) -> tuple[int, int, int]:
        return stride(self.q, 0), stride(self.q, 1), stride(self.q, 2)

    def cache_arguments(self) -> tuple[int, ...]:
        pool, table = self.kv_cache, self.block_tables
        size = INDEX_DIM if self.q_scale is None else INDEX_DIM // 2
        pages, page_rows = pool.shape[:2]
        codes = pool.data_ptr()
        in_pages = (codes, codes + page_rows * size, size, stride(pool, 0), page_rows, pages)
        return (*in_pages, table.data_ptr(), table.stride(0) * 4, table.shape[1])

    def window_arguments(self, skip: int) -> tuple[int, ...]:
        lengths = self.context_lens
        return (0, lengths.data_ptr(), lengths.stride(0) * 4, self.out.shape[1], 0, skip)


class TopKPrefillCall(NamedTuple):
    """top_k_per_row_prefill."""

    logits: torch.Tensor
    row_starts: torch.Tensor
    row_ends: torch.Tensor
    out: torch.Tensor
    num_rows: int
    k: int
    use_pdl: bool


class TopKDecodeCall(NamedTuple):
    """top_k_per_row_decode."""

    logits: torch.Tensor
    seq_lens: torch.Tensor
    out: torch.Tensor
    num_rows: int
    k: int
    slot_block_table: torch.Tensor | None
    slot_rows_per_page: int
    use_pdl: bool


class AllVisibleCall(NamedTuple):
    """all_visible_entries."""

    visible: torch.Tensor
    out: torch.Tensor
    slot_block_table: torch.Tensor | None
    slot_rows_per_page: int


class KeysCall(NamedTuple):
    """top_k_keys."""

    scores: torch.Tensor
    picks: torch.Tensor
    entries_per_page: int
    ranks: int
    rank: int
    out: torch.Tensor


class MergeKeysCall(NamedTuple):
    """merge_top_k_keys."""

    keys: torch.Tensor
    out: torch.Tensor | None
    block_table: torch.Tensor | None
    rows_per_page: int
    ranks: int
    rank: int
    out_slots: torch.Tensor | None
    out_lens: torch.Tensor | None


class ScoreTopKPrefillCall(NamedTuple):
    """score_top_k_prefill."""

    q: torch.Tensor
    q_scale: torch.Tensor | None
    k: torch.Tensor
    k_scale: torch.Tensor
    weights: torch.Tensor
    cu_seq_len_k_start: torch.Tensor
    cu_seq_len_k_end: torch.Tensor
    max_seqlen_k: int
    out: torch.Tensor
    workspace: torch.Tensor | None

    @property
    def columns(self) -> int:
        return self.max_seqlen_k if self.max_seqlen_k > 0 else int(self.k.shape[0])

    def walk(self) -> Iterator[chunks.Chunk]:
        return chunks.walk(self.workspace, self.q.shape[0], self.columns, 1, self.out, self.weights.dtype)

    def rows(self, first: int, last: int) -> ScoreTopKPrefillCall:
        """The call of some rows."""
        if last - first == self.q.shape[0]:
            return self
        rows = slice(first, last)
        cut = {
            name: getattr(self, name)[rows]
            for name in ("q", "weights", "cu_seq_len_k_start", "cu_seq_len_k_end", "out")
        }
        return self._replace(q_scale=None if self.q_scale is None else self.q_scale[rows], **cut)

    def scores(self, out: torch.Tensor) -> LogitsCall:
        """The call of mqa_logits."""
        keys, bounds = (self.k, self.k_scale), (self.cu_seq_len_k_start, self.cu_seq_len_k_end)
        return LogitsCall(self.q, self.q_scale, *keys, self.weights, *bounds, False, self.max_seqlen_k, out)


class ScoreTopKDecodeCall(NamedTuple):
    """score_top_k_decode."""

    q: torch.Tensor
    q_scale: torch.Tensor | None
    kv_cache: torch.Tensor
    weights: torch.Tensor
    context_lens: torch.Tensor
    block_tables: torch.Tensor
    max_model_len: int
    kv_format: str
    out: torch.Tensor
    workspace: torch.Tensor | None
    slot_block_table: torch.Tensor | None
    slot_rows_per_page: int

    def walk(self) -> Iterator[chunks.Chunk]:
        requests, next_n = self.q.shape[:2]
        return chunks.walk(self.workspace, requests, self.max_model_len, next_n, self.out, self.weights.dtype)

    def requests(self, first: int, last: int) -> ScoreTopKDecodeCall:
        """The call of some requests."""
        requests, next_n = self.q.shape[:2]
        if last - first == requests:
            return self
        own, rows = slice(first, last), slice(first * next_n, last * next_n)
        cut = {name: getattr(self, name)[own] for name in ("q", "context_lens", "block_tables")}
        cut |= {name: getattr(self, name)[rows] for name in ("weights", "out")}
        optional = {name: getattr(self, name) for name in ("q_scale", "slot_block_table")}
        cut |= {name: None if value is None else value[own] for name, value in optional.items()}
        return self._replace(**cut)

    def scores(self, out: torch.Tensor) -> PagedLogitsCall:
        """The call of paged_mqa_logits."""
        cache = self.kv_cache, self.weights, self.context_lens, self.block_tables, self.max_model_len
        return PagedLogitsCall(self.q, self.q_scale, *cache, False, self.kv_format, out, True)


class SelectBlocksCall(NamedTuple):
    """select_candidate_blocks."""

    logits: torch.Tensor
    seq_lens: torch.Tensor
    out: torch.Tensor
    workspace: torch.Tensor


class CandidatesDecodeCall(NamedTuple):
    """score_candidates_decode: score_top_k_decode of candidate blocks."""

    q: torch.Tensor
    q_scale: torch.Tensor | None
    kv_cache: torch.Tensor
    weights: torch.Tensor
    context_lens: torch.Tensor
    block_tables: torch.Tensor
    candidates: torch.Tensor
    max_model_len: int
    kv_format: str
    out: torch.Tensor
    workspace: torch.Tensor


class CandidatesPrefillCall(NamedTuple):
    """score_candidates_prefill: score_top_k_prefill of candidate blocks."""

    q: torch.Tensor
    q_scale: torch.Tensor | None
    k: torch.Tensor
    k_scale: torch.Tensor
    weights: torch.Tensor
    cu_seq_len_k_start: torch.Tensor
    cu_seq_len_k_end: torch.Tensor
    candidates: torch.Tensor
    max_seqlen_k: int
    out: torch.Tensor
    workspace: torch.Tensor


def stride(tensor: torch.Tensor, axis: int) -> int:
    """In elements; of an axis with one element, what a dense tensor would have: nobody uses it."""
    return int(tensor.stride(axis)) if tensor.shape[axis] > 1 else max(1, int(tensor.numel())) * INDEX_DIM
