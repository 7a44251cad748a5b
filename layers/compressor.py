# SPDX-License-Identifier: Apache-2.0
"""The compressor: turns groups of 4 or 128 tokens into one cache entry."""

from __future__ import annotations

import torch
from torch import nn

from cute_kernels.compressor.ops import fused_compress_norm_rope_store

from .caches import CompressorStateCache, PagedCache
from .config import DeepseekV4Config
from .linear import Linear
from .metadata import DeepseekV4Metadata


class DeepseekCompressor(nn.Module):
    """Projects hidden states to keys and scores, keeps the state of open groups, stores an entry when a group closes.

    compress_ratio   4 (groups overlap: an entry also sees the group before) or 128
    head_dim         512 (main cache) or 128 (indexer cache)
    persist          "window": the state keeps only the rows that a later step reads; "all": every row
    keep_every       with "window" and ratio 4: also keep the last group before every multiple of this many tokens, so
                     that a prefix cache may fork there; 0 keeps none
    rotate           accepted and ignored, as engines give it to the main compressor too: index_hadamard says it
    e2m1_rounding, index_hadamard   only for the indexer's keys

    The projection's result stays fp32. `ape` is the learned score offset of each position within a group.
    """

    ape: torch.Tensor
    norm_weight: torch.Tensor

    def __init__(
        self,
        config: DeepseekV4Config,
        compress_ratio: int,
        head_dim: int,
        *,
        label: str,
        rotate: bool = False,
        persist: str = "window",
        keep_every: int = 0,
        e2m1_rounding: str = "ties_to_lower",
        index_hadamard: bool = False,
        batch_invariant: bool = False,
        use_pdl: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        if head_dim not in (config.head_dim, config.index_head_dim):
            raise ValueError(f"DeepseekCompressor: head_dim: expected 512 or 128, got {head_dim}")
        if compress_ratio not in (4, 128):
            raise ValueError(f"DeepseekCompressor: compress_ratio: expected 4 or 128, got {compress_ratio}")
        width = head_dim * (2 if compress_ratio == 4 else 1)
        self.compress_ratio, self.head_dim, self.eps = compress_ratio, head_dim, config.rms_norm_eps
        self.persist, self.keep_every, self.use_pdl = persist, keep_every, use_pdl
        self.e2m1_rounding, self.index_hadamard = e2m1_rounding, index_hadamard
        self.fused_wkv_wgate = Linear(
            config.hidden_size,
            2 * width,
            quantized=False,
            label=label,
            out_dtype=torch.float32,
            batch_invariant=batch_invariant,
            use_pdl=use_pdl,
            device=device,
        )
        self.register_buffer("ape", torch.zeros(compress_ratio, width, device=device))
        self.register_buffer("norm_weight", torch.ones(head_dim, dtype=torch.bfloat16, device=device))

    def forward(
        self,
        kv_score: torch.Tensor,
        metadata: DeepseekV4Metadata,
        state: CompressorStateCache,
        cache: PagedCache,
        cos_sin_cache: torch.Tensor,
        fp8_scale: torch.Tensor | None = None,
    ) -> None:
        """Consume kv_score fp32 [T, 2 * width] (`fused_wkv_wgate` of the hidden states): update state, store entries.

        fp8_scale   fp32 [1], only for a per-tensor fp8 cache
        """
        m = metadata
        assert m.state_slot_mapping is not None
        assert m.state_block_table is not None
        assert m.compressed_slot_mapping is not None
        fused_compress_norm_rope_store(
            kv_score,
            self.ape,
            m.positions,
            m.token_to_req_indices,
            m.query_start_loc,
            state.data,
            m.state_slot_mapping,
            m.state_block_table,
            cos_sin_cache,
            cache.data,
            m.compressed_slot_mapping,
            self.norm_weight,
            self.eps,
            self.compress_ratio,
            kv_format=cache.kv_format.id,
            persist=self.persist,
            min_restart=m.min_restart,
            keep_every=self.keep_every,
            index_hadamard=self.index_hadamard,
            e2m1_rounding=self.e2m1_rounding,
            fp8_scale=fp8_scale,
            use_pdl=self.use_pdl,
        )
