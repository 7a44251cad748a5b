# SPDX-License-Identifier: Apache-2.0
"""Calls of the ops of one launch: their arguments by name, in the order of the schemas, and the calls of the ops that
they are made of."""

from __future__ import annotations

from typing import NamedTuple

import torch

from cute_kernels.compressor.call import FusedCall
from cute_kernels.indexer.call import QueryFp8Call
from cute_kernels.kv_cache.call import QuantInsertCall

RATIO = 4
COMPRESS_RATIO = 128
"""Of layers without an indexer."""

INSERT = "fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert"
COMPRESS = "fused_compress_norm_rope_store"
QUERY = "fused_indexer_q_rope_quant_fp8"

Part = tuple[str, str, "QuantInsertCall | FusedCall | QueryFp8Call"]
"""(what a part of a call does, the op that does the same, its call)"""


class IndexCall(NamedTuple):
    """fused_qkv_insert_compress_index."""

    q: torch.Tensor
    kv: torch.Tensor
    k_cache: torch.Tensor
    slot_mapping: torch.Tensor
    positions: torch.Tensor
    cos_sin_cache: torch.Tensor
    token_to_req_indices: torch.Tensor
    query_start_loc: torch.Tensor
    state_slot_mapping: torch.Tensor
    state_block_table: torch.Tensor
    entry_slot_mapping: torch.Tensor
    min_restart: torch.Tensor | None
    kv_score: torch.Tensor
    ape: torch.Tensor
    norm_weight: torch.Tensor
    state_cache: torch.Tensor
    entry_cache: torch.Tensor
    index_kv_score: torch.Tensor
    index_ape: torch.Tensor
    index_norm_weight: torch.Tensor
    index_state_cache: torch.Tensor
    index_cache: torch.Tensor
    index_q: torch.Tensor
    index_weights: torch.Tensor
    index_q_quant: torch.Tensor
    index_weights_out: torch.Tensor
    eps: float
    block_size: int
    keep_every: int
    persist: str
    kv_format: str
    index_format: str
    softmax_scale: float
    head_scale: float
    index_hadamard: bool
    round_weights: bool
    use_pdl: bool

    def insert(self) -> QuantInsertCall:
        """The call of the op that finishes the queries and stores keys."""
        rows = self.q, self.kv, self.k_cache, self.slot_mapping, self.positions, self.cos_sin_cache
        return QuantInsertCall(*rows, self.eps, self.block_size, True, self.kv_format, self.use_pdl)

    def compress(self) -> FusedCall:
        """The call of the op that compresses attention's entries."""
        own = self.kv_score, self.ape, self.norm_weight, self.state_cache, self.entry_cache
        return self._compress(*own, self.kv_format, False)

    def compress_index(self) -> FusedCall:
        """The call of the op that compresses the indexer's keys."""
        own = self.index_kv_score, self.index_ape, self.index_norm_weight, self.index_state_cache, self.index_cache
        return self._compress(*own, self.index_format, self.index_hadamard)

    def _compress(
        self,
        kv_score: torch.Tensor,
        ape: torch.Tensor,
        weight: torch.Tensor,
        state: torch.Tensor,
        cache: torch.Tensor,
        kv_format: str,
        hadamard: bool,
    ) -> FusedCall:
        return FusedCall(
            kv_score=kv_score,
            ape=ape,
            positions=self.positions,
            token_to_req_indices=self.token_to_req_indices,
            query_start_loc=self.query_start_loc,
            state_cache=state,
            slot_mapping=self.state_slot_mapping,
            block_table=self.state_block_table,
            cos_sin_cache=self.cos_sin_cache,
            kv_cache=cache,
            kv_slot_mapping=self.entry_slot_mapping,
            rms_norm_weight=weight,
            min_restart=self.min_restart,
            fp8_scale=None,
            rms_norm_eps=self.eps,
            compress_ratio=RATIO,
            keep_every=self.keep_every,
            kv_format=kv_format,
            persist=self.persist,
            e2m1_rounding="ties_to_lower",
            index_hadamard=hadamard,
            use_pdl=self.use_pdl,
        )

    def query(self) -> QueryFp8Call:
        """The call of the op that quantizes the indexer's queries."""
        return QueryFp8Call(
            *(self.positions, self.index_q, self.cos_sin_cache, self.index_weights, self.softmax_scale),
            *(self.head_scale, self.index_hadamard, self.index_q_quant, self.index_weights_out),
            *(self.round_weights, self.use_pdl),
        )

    def parts(self) -> tuple[Part, ...]:
        """They write different tensors, in any order."""
        return (
            ("keys", INSERT, self.insert()),
            ("entries", COMPRESS, self.compress()),
            ("index keys", COMPRESS, self.compress_index()),
            ("index queries", QUERY, self.query()),
        )


class CompressCall(NamedTuple):
    """fused_qkv_insert_compress."""

    q: torch.Tensor
    kv: torch.Tensor
    k_cache: torch.Tensor
    slot_mapping: torch.Tensor
    positions: torch.Tensor
    cos_sin_cache: torch.Tensor
    token_to_req_indices: torch.Tensor
    query_start_loc: torch.Tensor
    state_slot_mapping: torch.Tensor
    state_block_table: torch.Tensor
    entry_slot_mapping: torch.Tensor
    min_restart: torch.Tensor | None
    kv_score: torch.Tensor
    ape: torch.Tensor
    norm_weight: torch.Tensor
    state_cache: torch.Tensor
    entry_cache: torch.Tensor
    eps: float
    block_size: int
    persist: str
    kv_format: str
    use_pdl: bool

    def insert(self) -> QuantInsertCall:
        """The call of the op that finishes the queries and stores keys."""
        rows = self.q, self.kv, self.k_cache, self.slot_mapping, self.positions, self.cos_sin_cache
        return QuantInsertCall(*rows, self.eps, self.block_size, True, self.kv_format, self.use_pdl)

    def compress(self) -> FusedCall:
        """The call of the op that compresses attention's entries."""
        return FusedCall(
            kv_score=self.kv_score,
            ape=self.ape,
            positions=self.positions,
            token_to_req_indices=self.token_to_req_indices,
            query_start_loc=self.query_start_loc,
            state_cache=self.state_cache,
            slot_mapping=self.state_slot_mapping,
            block_table=self.state_block_table,
            cos_sin_cache=self.cos_sin_cache,
            kv_cache=self.entry_cache,
            kv_slot_mapping=self.entry_slot_mapping,
            rms_norm_weight=self.norm_weight,
            min_restart=self.min_restart,
            fp8_scale=None,
            rms_norm_eps=self.eps,
            compress_ratio=COMPRESS_RATIO,
            keep_every=0,
            kv_format=self.kv_format,
            persist=self.persist,
            e2m1_rounding="ties_to_lower",
            index_hadamard=False,
            use_pdl=self.use_pdl,
        )

    def parts(self) -> tuple[Part, ...]:
        """As of `IndexCall`."""
        return ("keys", INSERT, self.insert()), ("entries", COMPRESS, self.compress())
