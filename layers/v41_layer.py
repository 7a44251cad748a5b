# SPDX-License-Identifier: Apache-2.0
"""One attention layer of V4.1, of any kind: projections, window, compressor, indexer, attention, output."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from cute_kernels.compressor.ops import compress_latent, k_norm_rope_store, rope_quant_insert
from cute_kernels.formats import V41_KV_CACHES
from cute_kernels.kv_cache.ops import fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert
from cute_kernels.norm.ops import fused_q_kv_rmsnorm, mtp_shared_head_rmsnorm
from cute_kernels.runtime.checks import Checker

from .caches import INDEX_CACHES, SWA_BLOCK_SIZE, DeepseekV4SWACache
from .linear import Linear, bf16_product
from .mla import Workspace
from .output import OutputProjection
from .parallel import TensorParallel
from .rotary import RotaryEmbedding
from .v41_attention import V41SparseAttention
from .v41_caches import V41Caches, V41SourceCaches
from .v41_config import DRAFT, SOURCE, DeepseekV41Config
from .v41_indexer import V41Indexer
from .v41_step import V41Selection, V41Step


@dataclass
class V41Options:
    """How a layer runs.

    kv_cache          formats of windows and entries, by name: one of formats.V41_KV_CACHES
    index_cache       "fp8" or "mxfp4": format of indexer queries and keys; the model's own is the latter
    batch_invariant   as AttentionOptions has it
    max_model_len     longest sequence; sizes the rotary table
    max_num_tokens    most rows in a step
    use_pdl           as AttentionOptions has it
    workspace         shared by the layers of a model
    """

    kv_cache: str = "fp8_ds_mla"
    index_cache: str = "fp8"
    batch_invariant: bool = False
    max_model_len: int = 65536
    max_num_tokens: int = 8192
    use_pdl: bool = True
    tp: TensorParallel = field(default_factory=TensorParallel)
    workspace: Workspace | None = None

    def __post_init__(self) -> None:
        for name, choices in (("kv_cache", V41_KV_CACHES), ("index_cache", INDEX_CACHES)):
            if getattr(self, name) not in choices:
                got = getattr(self, name)
                raise ValueError(f"V41Options: {name}: expected one of {tuple(choices)}, got {got!r}")
        for name in ("max_model_len", "max_num_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"V41Options: {name}: expected a positive number, got {getattr(self, name)}")


@dataclass(frozen=True)
class WeightBytes:
    """Of a layer's tensors: as a checkpoint stores them, and as the layer keeps them."""

    stored: int
    kept: int


class V41Compressor(nn.Module):
    """A source's compressor: entries and index keys of what the hidden states say about one or two tokens."""

    norm_weight: torch.Tensor
    key_norm_weight: torch.Tensor

    def __init__(
        self,
        config: DeepseekV41Config,
        ratio: int,
        *,
        batch_invariant: bool,
        use_pdl: bool = False,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        self.ratio, self.eps, self.use_pdl = ratio, config.rms_norm_eps, use_pdl
        how: dict[str, Any] = {"batch_invariant": batch_invariant, "use_pdl": use_pdl}
        gemm = {"quantized": False, "device": device, **how}
        self.wkv_wgate = Linear(
            config.hidden_size,
            ratio * config.head_dim,
            label="compressor.wkv_wgate",
            out_dtype=torch.float32,
            **gemm,
        )
        self.wk = Linear(config.head_dim, config.index_head_dim, label="indexer.wk", **gemm)
        for name, width in (("norm_weight", config.head_dim), ("key_norm_weight", config.index_head_dim)):
            self.register_buffer(name, torch.ones(width, dtype=torch.bfloat16, device=device))

    def forward(
        self, hidden_states: torch.Tensor, step: V41Step, caches: V41SourceCaches, cos_sin_cache: torch.Tensor
    ) -> None:
        m, entries, ratio = step.window, step.entries[self.ratio], self.ratio
        ring: dict[str, Any] = {}
        if ratio == 2:
            assert caches.ring is not None
            ring = {
                "state_cache": caches.ring.data,
                "slot_mapping": step.ring_slots,
                "query_start_loc": m.query_start_loc,
                "token_to_req_indices": m.token_to_req_indices,
            }
        projected = self.wkv_wgate(hidden_states)
        latent = compress_latent(
            projected, m.positions, self.norm_weight, self.eps, ratio, use_pdl=self.use_pdl, **ring
        )
        where = m.positions, cos_sin_cache
        rope_quant_insert(
            latent,
            *where,
            caches.entries.data,
            entries.slots,
            ratio,
            kv_format=caches.entries.kv_format.id,
            use_pdl=self.use_pdl,
        )
        k_norm_rope_store(
            self.wk(latent),
            self.key_norm_weight,
            self.eps,
            *where,
            caches.keys.data,
            entries.slots,
            ratio,
            kv_format=caches.keys.kv_format.id,
            use_pdl=self.use_pdl,
        )


class DeepseekV41Attention(nn.Module):
    """Attention layer `layer_index` of a model, all of whose weights are bf16.

    options      see V41Options
    rotary_emb   table of the layer's rotation, shared by those that attend to entries, or by those that do not; built
                 if None

    Weights are zero until `layers.v41_checkpoint.load_v41_layer` (or anything else) fills the buffers.
    """

    q_norm_weight: torch.Tensor
    kv_norm_weight: torch.Tensor
    weight_bytes: WeightBytes | None = None

    def __init__(
        self,
        config: DeepseekV41Config,
        layer_index: int,
        *,
        options: V41Options | None = None,
        rotary_emb: RotaryEmbedding | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        options = options or V41Options()
        tp = options.tp
        self.config, self.layer_index, self.options, self.tp = config, layer_index, options, tp
        self.kind, self.compress_ratio = config.kind_of(layer_index), config.compress_ratio_of(layer_index)
        self.num_heads = tp.shard(config.num_attention_heads, "num_attention_heads")
        self.rotary_emb = rotary_emb or RotaryEmbedding(config, self.compress_ratio > 0, options.max_model_len, device)
        hidden, head_dim, q_rank = config.hidden_size, config.head_dim, config.q_lora_rank
        invariant: dict[str, Any] = {"batch_invariant": options.batch_invariant, "device": device}
        dependent: dict[str, Any] = {"use_pdl": options.use_pdl, **invariant}
        gemm: dict[str, Any] = {"quantized": False, **dependent}
        self.fused_wqa_wkv = Linear(hidden, q_rank + head_dim, label="wqa_wkv", **gemm)
        self.wq_b = Linear(q_rank, self.num_heads * head_dim, label="wq_b", **gemm)
        self.register_buffer("q_norm_weight", torch.ones(q_rank, dtype=torch.bfloat16, device=device))
        self.register_buffer("kv_norm_weight", torch.ones(head_dim, dtype=torch.bfloat16, device=device))
        self.compressor = self.indexer = None
        if self.kind == SOURCE:
            self.compressor = V41Compressor(config, self.compress_ratio, **dependent)
        if layer_index in config.index_source_layer_ids:
            use_fp4 = options.index_cache == "mxfp4"
            self.indexer = V41Indexer(config, layer_index, use_fp4=use_fp4, **dependent)
        self.attention = V41SparseAttention(
            config,
            self.compress_ratio,
            self.num_heads,
            max_num_tokens=options.max_num_tokens,
            workspace=options.workspace,
            **invariant,
        )
        self.o_proj = OutputProjection(config, tp, wo_a_quantized=False, wo_b_quantized=False, **dependent)

    def forward(
        self,
        hidden_states: torch.Tensor,
        step: V41Step,
        caches: V41Caches,
        selection: V41Selection | None = None,
    ) -> tuple[torch.Tensor, V41Selection | None]:
        """(output bf16 [T, hidden], the selection for the next layer).

        hidden_states   bf16 [T, hidden], input after attn_norm
        step            of V41StepBuilder; a draft's layers run its blocks, all others the model's rows
        caches          the layer's window, and what its source stores; mutated
        selection       what the layer before returned in this step
        """
        check = Checker("attention layer")
        check.tensor("hidden_states", hidden_states, torch.bfloat16, (step.num_tokens, self.config.hidden_size))
        source = self._check_step(check, step, caches, selection)
        is_draft = self.kind == DRAFT
        check.require(step.is_draft == is_draft, "step", f"is_draft = {is_draft} of its builder", step.is_draft)
        m, config, table = step.window, self.config, self.rotary_emb.cos_sin_cache
        qr, kv = self.fused_wqa_wkv(hidden_states).split([config.q_lora_rank, config.head_dim], dim=-1)
        norms = self.q_norm_weight, self.kv_norm_weight, config.rms_norm_eps
        qr, kv = fused_q_kv_rmsnorm(qr, kv, *norms, use_pdl=self.options.use_pdl)
        q = self.wq_b(qr).unflatten(-1, (self.num_heads, config.head_dim))
        window = caches.windows[self.layer_index]
        self._rotate_and_store(q, kv, step, window)
        if self.compressor is not None:
            assert source is not None
            self.compressor(hidden_states, step, source, table)
        if self.indexer is not None:
            assert source is not None
            selection = self.indexer(qr, hidden_states, source.keys, step, selection, table)
        out = torch.empty_like(q)
        entries = None if source is None else source.entries
        self.attention(q, window, entries, step, None if source is None else selection, out)
        return self.tp.sum(self.o_proj(out, m.positions, table)), selection

    def store_context(self, context: torch.Tensor, step: V41Step, caches: V41Caches) -> None:
        """Of a draft layer: store window rows of a step of the model, for blocks that are behind them.

        context   bf16 [T, hidden], of the step's rows, as DeepseekV41DraftContext makes it
        step      of the model: its window's table is that of the draft's steps
        caches    the layer's window; mutated
        """
        check, config = Checker("draft layer"), self.config
        check.tensor("context", context, torch.bfloat16, (step.num_tokens, config.hidden_size))
        check.require(self.kind == DRAFT, "layer", "one of the draft", f"layer {self.layer_index}, {self.kind}")
        self._check_step(check, step, caches, None)
        check.require(not step.is_draft, "step", "one of the model", "one of the draft")
        weight = self.fused_wqa_wkv.weight[config.q_lora_rank :]
        how = {"batch_invariant": self.options.batch_invariant, "use_pdl": self.options.use_pdl}
        product = bf16_product(context, weight, torch.bfloat16, label="wkv", **how)
        kv = mtp_shared_head_rmsnorm(product, self.kv_norm_weight, config.rms_norm_eps, use_pdl=self.options.use_pdl)
        no_queries = kv.new_empty(step.num_tokens, 0, config.head_dim)
        self._rotate_and_store(no_queries, kv, step, caches.windows[self.layer_index])

    def _rotate_and_store(self, q: torch.Tensor, kv: torch.Tensor, step: V41Step, window: DeepseekV4SWACache) -> None:
        """Rotate queries in place, and normed rows into the window."""
        fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert(
            q,
            kv,
            window.data,
            step.window.slot_mapping,
            step.window.positions,
            self.rotary_emb.cos_sin_cache,
            self.config.rms_norm_eps,
            SWA_BLOCK_SIZE,
            apply_q_norm=False,
            kv_format=window.kv_format.id,
            use_pdl=self.options.use_pdl,
        )

    def _check_step(
        self, check: Checker, step: V41Step, caches: V41Caches, selection: V41Selection | None
    ) -> V41SourceCaches | None:
        """The source's caches, if the layer reads any. Refuses what would give numbers, only wrong ones."""
        layer, config = self.layer_index, self.config
        longest = self.rotary_emb.cos_sin_cache.shape[0]
        if step.window.max_seq_len > longest:
            check.fail("step", f"sequences within max_model_len = {longest}", step.window.max_seq_len)
        check.require(layer in caches.windows, "caches.windows", f"a window of layer {layer}", sorted(caches.windows))
        (fmt, entry_fmt), given_fmt = V41_KV_CACHES[self.options.kv_cache], caches.windows[layer].kv_format
        check.require(fmt == given_fmt, "caches.windows", f"format {fmt.id}", given_fmt.id)
        if self.compress_ratio == 0:
            return None
        owner = config.source_of(layer)
        check.require(owner in caches.sources, "caches.sources", f"those of layer {owner}", sorted(caches.sources))
        source = caches.sources[owner]
        given_fmt = source.entries.kv_format
        check.require(entry_fmt == given_fmt, "caches.sources", f"entries of format {entry_fmt.id}", given_fmt.id)
        ratio, rows = self.compress_ratio, source.entries.block_size
        if step.tables.entries is None:
            check.fail("step", f"a table of entries, for compress ratio {ratio}", "None")
        if self.kind == SOURCE and ratio == 2:
            have = None if step.ring_slots is None else step.ring_rows
            ring = None if source.ring is None else source.ring.block_size
            check.require(have == ring and ring is not None, "step", f"rings of {ring} rows", have)
        check.require(source.keys.block_size == rows, "caches.keys", f"pages of {rows} rows", source.keys.block_size)
        mine = INDEX_CACHES[self.options.index_cache]
        if self.indexer is not None:
            fits = isinstance(source.keys.kv_format, type(mine))
            check.require(fits, "caches.keys", f"format {mine.id}", source.keys.kv_format.id)
        if self.kind == SOURCE:
            return source
        if self.indexer is None:
            wanted, given = config.index_source_of(layer), None if selection is None else selection.source
        else:
            wanted, given = config.candidate_source_layer_id, None if selection is None else selection.candidate_of
        if self.indexer is None or self.indexer.takes_candidates:
            check.require(given == wanted, "selection", f"that of layer {wanted}", given)
            assert selection is not None
            rows = selection.picks.shape[0]
            check.require(rows == step.num_tokens, "selection", f"{step.num_tokens} rows, those of the step", rows)
        return source
