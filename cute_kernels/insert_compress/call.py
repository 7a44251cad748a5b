# SPDX-License-Identifier: Apache-2.0
"""The arguments of the ops of one launch, and what each of the ops that they are made of takes of them."""

from __future__ import annotations

from typing import Any, NamedTuple

RATIO = 4
COMPRESS_RATIO = 128
"""Of layers without an indexer."""

INSERT = "fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert"
COMPRESS = "fused_compress_norm_rope_store"
QUERY = "fused_indexer_q_rope_quant_fp8"


class Call(NamedTuple):
    """Of fused_qkv_insert_compress_index, in the schema's order."""

    q: Any
    kv: Any
    k_cache: Any
    slot_mapping: Any
    positions: Any
    cos_sin_cache: Any
    token_to_req_indices: Any
    query_start_loc: Any
    state_slot_mapping: Any
    state_block_table: Any
    entry_slot_mapping: Any
    min_restart: Any
    kv_score: Any
    ape: Any
    norm_weight: Any
    state_cache: Any
    entry_cache: Any
    index_kv_score: Any
    index_ape: Any
    index_norm_weight: Any
    index_state_cache: Any
    index_cache: Any
    index_q: Any
    index_weights: Any
    index_q_quant: Any
    index_weights_out: Any
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

    def insert(self) -> tuple[Any, ...]:
        """Arguments of the op that finishes the queries and stores keys."""
        rows = self.q, self.kv, self.k_cache, self.slot_mapping, self.positions, self.cos_sin_cache
        return *rows, self.eps, self.block_size, True, self.kv_format, self.use_pdl

    def compress(self) -> tuple[Any, ...]:
        """Arguments of the op that compresses attention's entries."""
        own = self.kv_score, self.ape, self.norm_weight, self.state_cache, self.entry_cache
        return self._compress(*own, self.kv_format, False)

    def compress_index(self) -> tuple[Any, ...]:
        """Arguments of the op that compresses the indexer's keys."""
        own = self.index_kv_score, self.index_ape, self.index_norm_weight, self.index_state_cache, self.index_cache
        return self._compress(*own, self.index_format, self.index_hadamard)

    def _compress(
        self, kv_score: Any, ape: Any, weight: Any, state: Any, cache: Any, kv_format: str, hadamard: bool
    ) -> tuple[Any, ...]:
        return (
            *(kv_score, ape, self.positions, self.token_to_req_indices, self.query_start_loc, state),
            *(self.state_slot_mapping, self.state_block_table, self.cos_sin_cache, cache, self.entry_slot_mapping),
            *(weight, self.min_restart, None, self.eps, RATIO, self.keep_every, kv_format, self.persist),
            *("ties_to_lower", hadamard, self.use_pdl),
        )

    def query(self) -> tuple[Any, ...]:
        """Arguments of the op that quantizes the indexer's queries."""
        return (
            *(self.positions, self.index_q, self.cos_sin_cache, self.index_weights, self.softmax_scale),
            *(self.head_scale, self.index_hadamard, self.index_q_quant, self.index_weights_out),
            *(self.round_weights, self.use_pdl),
        )

    def parts(self) -> tuple[tuple[str, str, tuple[Any, ...]], ...]:
        """(what a part does, the op that does the same, its arguments): they write different tensors, in any order."""
        return (
            ("keys", INSERT, self.insert()),
            ("entries", COMPRESS, self.compress()),
            ("index keys", COMPRESS, self.compress_index()),
            ("index queries", QUERY, self.query()),
        )


class CompressCall(NamedTuple):
    """Of fused_qkv_insert_compress, in the schema's order."""

    q: Any
    kv: Any
    k_cache: Any
    slot_mapping: Any
    positions: Any
    cos_sin_cache: Any
    token_to_req_indices: Any
    query_start_loc: Any
    state_slot_mapping: Any
    state_block_table: Any
    entry_slot_mapping: Any
    min_restart: Any
    kv_score: Any
    ape: Any
    norm_weight: Any
    state_cache: Any
    entry_cache: Any
    eps: float
    block_size: int
    persist: str
    kv_format: str
    use_pdl: bool

    def insert(self) -> tuple[Any, ...]:
        """Arguments of the op that finishes the queries and stores keys."""
        rows = self.q, self.kv, self.k_cache, self.slot_mapping, self.positions, self.cos_sin_cache
        return *rows, self.eps, self.block_size, True, self.kv_format, self.use_pdl

    def compress(self) -> tuple[Any, ...]:
        """Arguments of the op that compresses attention's entries."""
        return (
            *(self.kv_score, self.ape, self.positions, self.token_to_req_indices, self.query_start_loc),
            *(self.state_cache, self.state_slot_mapping, self.state_block_table, self.cos_sin_cache),
            *(self.entry_cache, self.entry_slot_mapping, self.norm_weight, self.min_restart, None, self.eps),
            *(COMPRESS_RATIO, 0, self.kv_format, self.persist, "ties_to_lower", False, self.use_pdl),
        )

    def parts(self) -> tuple[tuple[str, str, tuple[Any, ...]], ...]:
        """As of `Call`."""
        return ("keys", INSERT, self.insert()), ("entries", COMPRESS, self.compress())
