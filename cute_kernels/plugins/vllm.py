# SPDX-License-Identifier: Apache-2.0
"""vLLM's DeepSeek-V4 layers over this package's ops: a plug-in of the group `vllm.general_plugins`.

The model asks a function which attention class its layers are of. In its place comes one that returns a subclass of
what was chosen, of FlashMLA's class only, made of a mixin for each part that is asked for. Builders, metadata, caches,
weights and streams stay the engine's.

    decode       _forward_decode: sparse_mla_decode
    prefill      _forward_prefill: sparse_mla_prefill_paged, in the form that is faster
    insert       _fused_qnorm_rope_kv_insert, in place
    norm         _split_qkv_and_norm: fused_q_kv_rmsnorm
    indexer      queries, scores and top-k
    compressor   both compressors in one pass: fused_compress_norm_rope_store
    output       _o_proj: fused_inv_rope_fp8_quant, deepseek_v4_fp8_einsum

With decode, prefill and insert the layer has its own number of heads; otherwise the engine pads them to 64 or 128. A
mixin hands what it does not serve to the engine's own method.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, partial
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from cute_kernels import formats
from cute_kernels.compressor.ops import fused_compress_norm_rope_store, save_partial_states
from cute_kernels.indexer.ops import (
    cp_gather_indexer_k_quant_cache,
    fused_indexer_q_rope_quant,
    score_top_k_decode,
    score_top_k_prefill,
    score_top_k_workspace_size,
)
from cute_kernels.indices.ops import compute_global_topk_indices_and_lens
from cute_kernels.kv_cache.ops import fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert
from cute_kernels.norm.ops import fused_q_kv_rmsnorm
from cute_kernels.output.ops import deepseek_v4_fp8_einsum, fused_inv_rope_fp8_quant
from cute_kernels.plugins import PARTS, Plugin, on_import
from cute_kernels.sparse_mla.ops import (
    sparse_mla_decode,
    sparse_mla_decode_workspace_size,
    sparse_mla_prefill_paged,
    sparse_mla_prefill_paged_form,
    sparse_mla_prefill_paged_workspace_size,
)

if TYPE_CHECKING:
    Engines = Any  # a mixin's base: the engine's class comes behind it
else:
    Engines = object

PLUGIN = Plugin("vllm", ((0, 33), (0, 34)), proven=PARTS, release=(0, 33, 0))

MODEL = "vllm.models.deepseek_v4.nvidia.model"
SELECTOR = "_select_dsv4_attn_cls"
BASE = "DeepseekV4FlashMLAAttention"

SCORE_BYTES = 64 << 20
"""Memory for scores of the indexer at a time, but for a single request that needs more: where the engine's workspace
has less behind the keys of a step, it is allocated, as the engine allocates its scores."""


def register() -> None:
    """The entry point. May be called often, and imports nothing of the engine."""
    parts = PLUGIN.requested()
    if parts:
        on_import(MODEL, PLUGIN.guard(partial(install, parts=parts)))


def install(model: ModuleType, parts: frozenset[str]) -> None:
    """Put a function in the place of the model's, that chooses the attention class."""
    select, base = getattr(model, SELECTOR), getattr(model, BASE)
    if getattr(select, "of_cute_kernels", False):
        return

    def select_attention_class(vllm_config: Any) -> type:
        chosen: type = select(vllm_config)
        reason = unsupported(chosen, base, vllm_config)
        if reason:
            PLUGIN.fall_back("all parts", reason)
            return chosen
        return attention_class(chosen, parts)

    select_attention_class.of_cute_kernels = True  # type: ignore[attr-defined]
    setattr(model, SELECTOR, select_attention_class)


def unsupported(chosen: type, base: type, vllm_config: Any) -> str:
    """Why this model's layers stay the engine's; "": they need not."""
    config, parallel = vllm_config.model_config.hf_config, vllm_config.parallel_config
    if chosen is not base:
        return f"the attention class is {chosen.__name__}, not {base.__name__}"
    if getattr(config, "vision_n_layers", 0) > 0:
        return "windows are widened for images"
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        return "contexts are sharded over ranks"
    if config.head_dim != formats.HEAD_DIM or config.qk_rope_head_dim != formats.ROPE_DIM:
        return f"heads have {config.head_dim} columns, {config.qk_rope_head_dim} of them rotated"
    return PLUGIN.unproven()


@cache
def attention_class(base: type, parts: frozenset[str]) -> type:
    """The engine's attention class with the parts over it."""
    mixins: list[type] = [Announcement]
    if parts >= {"decode", "prefill", "insert"}:
        mixins.append(NativeHeads)
    mixins += [ATTENTION[part] for part in PARTS if part in parts and part in ATTENTION]
    if parts & {"indexer", "compressor"}:
        mixins.append(ChoosesIndexer)
    return type("DeepseekV4CuteKernelsAttention", (*mixins, base), {"cute_kernels_parts": parts})


@cache
def subclass(base: Any, *mixins: Any) -> type:
    """Of an engine's class, with the mixins over it: one for all layers."""
    return type(f"CuteKernels{base.__name__}", (*mixins, base), {})


def forward_metadata() -> Any:
    """Of this step: by layer, None in a dummy run, a list of such where batches are split in two."""
    from vllm.forward_context import get_forward_context

    return get_forward_context().attn_metadata


WORKSPACE_ALIGNMENT = 256
"""Bytes that each tensor of the engine's workspace begins at a multiple of."""


def workspace(*shapes_and_dtypes: tuple[tuple[int, ...], torch.dtype]) -> list[torch.Tensor]:
    """Scratch memory of the engine, which is reserved in its dummy run and locked then."""
    from vllm.v1.worker.workspace import current_workspace_manager

    found: list[torch.Tensor] = current_workspace_manager().get_simultaneous(*shapes_and_dtypes)
    return found


# ---- the attention layer ---------------------------------------------------------------------------------------------


class Announcement(Engines):
    """Says at the first step what is in use."""

    cute_kernels_parts: frozenset[str]

    def forward_mqa(self, q: Any, kv: Any, positions: Any, output: Any) -> None:
        if not PLUGIN.is_announced and isinstance(forward_metadata(), dict):
            parts = ", ".join(part for part in PARTS if part in self.cute_kernels_parts)
            PLUGIN.announce(f"{type(self).__name__} with {parts}; {q.shape[1]} heads for {self.n_local_heads}")
        super().forward_mqa(q, kv, positions, output)


class NativeHeads(Engines):
    @classmethod
    def get_padded_num_q_heads(cls, num_heads: int) -> int:
        return num_heads


class GatherMemory(Engines):
    def _gather_bytes(self) -> int:
        """What the engine's dummy run reserves for a prefill of this layer: rows, lists of them and their lengths."""
        entries = columns = 0
        if self.compress_ratio > 1:
            entries = -(-self.max_model_len // self.compress_ratio)
            columns = self.topk_indices_buffer.shape[1]
        tokens = self.max_num_batched_tokens
        rows = self.PREFILL_CHUNK_SIZE * (entries + self.window_size + tokens)
        return rows * formats.HEAD_DIM * 2 + tokens * (formats.round_up(columns + self.window_size, 128) + 1) * 4


class Decode(GatherMemory):
    def _gather_workspace(self) -> torch.Tensor:
        return workspace(((self._gather_bytes(),), torch.uint8))[0]

    def forward_mqa(self, q: Any, kv: Any, positions: Any, output: Any) -> None:
        super().forward_mqa(q, kv, positions, output)
        if forward_metadata() is None:
            self._gather_workspace()

    def _decode_workspace(self, q: torch.Tensor, *lists: torch.Tensor | None) -> torch.Tensor | None:
        """For splits of rows. None, and the op allocates it as FlashMLA does, where that memory may be too small."""
        columns = [0 if indices is None else indices.shape[-1] for indices in lists]
        needed = sparse_mla_decode_workspace_size(q.shape[0], 1, q.shape[1], *columns, device=q.device)
        memory = self._gather_workspace() if needed else None
        return memory if memory is None or memory.numel() >= needed else None

    def _forward_decode(
        self, q: Any, kv_cache: Any, swa_metadata: Any, attn_metadata: Any, swa_only: bool, output: Any
    ) -> None:
        rows = swa_metadata.num_decode_tokens
        slots = lens = None
        if not swa_only and self.compress_ratio == 4:
            slots, lens = compute_global_topk_indices_and_lens(
                self.topk_indices_buffer[:rows],
                swa_metadata.token_to_req_indices,
                attn_metadata.block_table[: swa_metadata.num_decodes],
                attn_metadata.block_size // self.compress_ratio,
                swa_metadata.is_valid_token[:rows],
            )
            slots = slots[:, None]
        elif not swa_only:
            slots, lens = attn_metadata.c128a_global_decode_topk_indices, attn_metadata.c128a_decode_topk_lens
        sparse_mla_decode(
            q[:, None],
            self.swa_cache_layer.kv_cache,
            swa_metadata.decode_swa_indices,
            topk_length=swa_metadata.decode_swa_lens,
            attn_sink=self.attn_sink,
            softmax_scale=self.scale,
            extra_k_cache=None if swa_only else kv_cache,
            extra_indices=slots,
            extra_topk_length=lens,
            out=output[:, None],
            return_lse=False,
            workspace=self._decode_workspace(q, swa_metadata.decode_swa_indices, slots),
        )


class Prefill(GatherMemory):
    def _forward_prefill(
        self,
        q: Any,
        positions: Any,
        compressed_k_cache: Any,
        swa_k_cache: Any,
        output: Any,
        attn_metadata: Any,
        swa_metadata: Any,
    ) -> None:
        if swa_metadata.prefill_left_visible is not None or swa_metadata.prefill_right_visible is not None:
            PLUGIN.fall_back("prefill", "windows are widened for images")
            super()._forward_prefill(q, positions, compressed_k_cache, swa_k_cache, output, attn_metadata, swa_metadata)
            return
        decodes, window = swa_metadata.num_decodes, self.window_size
        page = None if attn_metadata is None else attn_metadata.block_size // self.compress_ratio
        picks = columns = None
        if page is not None and self.compress_ratio == 4:
            picks = self.topk_indices_buffer[swa_metadata.num_decode_tokens :]
            columns = picks.shape[1]
        end = last = 0
        for form, rows, count, entries in self._calls(swa_metadata, q, page, columns):
            begin, first, end, last = end, last, end + count, last + rows
            requests, tokens = slice(decodes + begin, decodes + end), slice(first, last)
            memory = None
            if form == "gathered":
                size = sparse_mla_prefill_paged_workspace_size(rows, count, entries, columns, window_size=window)
                memory = workspace(((size,), torch.uint8))[0]
            sparse_mla_prefill_paged(
                q[tokens],
                swa_k_cache,
                swa_metadata.block_table[requests],
                swa_metadata.query_start_loc[decodes + begin : decodes + end + 1],
                swa_metadata.prefill_seq_lens[begin:end],
                self.scale,
                window_size=window,
                compressed_cache=compressed_k_cache if page else None,
                compressed_block_table=attn_metadata.block_table[requests, : entries // page] if page else None,
                compress_ratio=self.compress_ratio,
                topk_indices=None if picks is None else picks[tokens],
                attn_sink=self.attn_sink,
                out=output[tokens],
                return_lse=False,
                workspace=memory,
                form=form,
            )

    def _calls(
        self, swa_metadata: Any, q: torch.Tensor, page: int | None, columns: int | None
    ) -> Iterator[tuple[str, int, int, int]]:
        """(form, rows, requests, entries of the longest one, in whole pages): all prefills in one call that reads the
        pages, where that is faster; else as many at a time as can be gathered into what the engine has reserved for
        this layer, and from its pages one that cannot be. page: entries of one; columns: of their lists."""
        starts = swa_metadata.query_start_loc_cpu.tolist()[swa_metadata.num_decodes :]
        lengths, window = swa_metadata.prefill_seq_lens_cpu.tolist(), self.window_size

        def of(begin: int, end: int) -> tuple[int, int, int]:
            entries = formats.round_up(max(lengths[begin:end]) // self.compress_ratio, page) if page else 0
            return starts[end] - starts[begin], end - begin, entries

        def fits(shape: tuple[int, int, int]) -> bool:
            return sparse_mla_prefill_paged_workspace_size(*shape, columns, window_size=window) <= self._gather_bytes()

        rows, requests, entries = of(0, len(lengths))
        step = rows, requests, q.shape[1], entries, columns
        if sparse_mla_prefill_paged_form(*step, window_size=window, device=q.device) == "paged":
            yield "paged", rows, requests, entries
            return
        begin = 0
        for end in range(1, requests + 1):
            if end < requests and fits(of(begin, end + 1)):
                continue
            shape = of(begin, end)
            yield "gathered" if fits(shape) else "paged", *shape
            begin = end


class Insert(Engines):
    def _fused_qnorm_rope_kv_insert(self, q: torch.Tensor, kv: Any, positions: Any, attn_metadata: Any) -> torch.Tensor:
        cache = self.swa_cache_layer.kv_cache
        served = isinstance(attn_metadata, dict) and cache.dtype == torch.uint8
        if served and self.padded_heads != self.n_local_heads:
            PLUGIN.fall_back("insert", "queries are padded unless decode and prefill are replaced too")
            served = False
        if not served:
            padded: torch.Tensor = super()._fused_qnorm_rope_kv_insert(q, kv, positions, attn_metadata)
            return padded
        swa_metadata = attn_metadata[self.swa_cache_layer.prefix]
        fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert(
            q,
            kv,
            cache,
            swa_metadata.slot_mapping,
            positions,
            self.rotary_emb.cos_sin_cache,
            self.eps,
            swa_metadata.block_size,
        )
        return q


class Norm(Engines):
    def _split_qkv_and_norm(self, qr_kv: torch.Tensor) -> tuple[torch.Tensor, None, torch.Tensor]:
        qr, kv = qr_kv.split([self.q_lora_rank, self.head_dim], dim=-1)
        qr, kv = fused_q_kv_rmsnorm(qr, kv, self.q_norm.weight.data, self.kv_norm.weight.data, self.eps)
        return qr, None, kv


class Output(Engines):
    def _o_proj(self, o: Any, positions: Any) -> torch.Tensor:
        weight = self.wo_a.weight
        if weight.dtype != torch.float8_e4m3fn or weight.dim() != 3 or not isinstance(o, torch.Tensor):
            PLUGIN.fall_back("output", f"wo_a is {weight.dtype} {list(weight.shape)}")
            projected: torch.Tensor = super()._o_proj(o, positions)
            return projected
        groups = self.n_local_groups
        codes, scales = fused_inv_rope_fp8_quant(
            o,
            positions,
            self.rotary_emb.cos_sin_cache,
            groups,
            self.n_local_heads // groups,
            tma_aligned_scales=self._tma_aligned_scales,
        )
        weight_scale = self.wo_a.weight_scale if hasattr(self.wo_a, "weight_scale") else self.wo_a.weight_scale_inv
        z = torch.empty(o.shape[0], groups, self.o_lora_rank, dtype=torch.bfloat16, device=o.device)
        deepseek_v4_fp8_einsum(codes, scales, weight, weight_scale, z, "bhr,hdr->bhd", list(self._einsum_recipe))
        result: torch.Tensor = self.wo_b(z.flatten(1))
        return result


# ---- compressors -----------------------------------------------------------------------------------------------------


class Compressor(Engines):
    """Saves projections and closes entries in one launch. `swa_prefix` names the window's cache, whose metadata has the
    first row of every request."""

    swa_prefix = ""

    def forward(self, kv_score: torch.Tensor, positions: torch.Tensor, rotary_emb: Any) -> None:
        metadata = forward_metadata()
        if not isinstance(metadata, dict):
            return
        kv_cache = self._static_forward_context[self.k_cache_prefix].kv_cache
        if self.use_fp4_cache or kv_cache.dtype != torch.uint8:
            PLUGIN.fall_back("compressor", "entries are MXFP4" if self.use_fp4_cache else f"a {kv_cache.dtype} cache")
            super().forward(kv_score, positions, rotary_emb)
            return
        state, state_cache = metadata[self.state_cache.prefix], self.state_cache.kv_cache
        if state.c128_boundary is False and self.compress_ratio == 128 and not _is_capturing(kv_score):
            width = self.coff * self.head_dim
            kv, score = kv_score.split(width, dim=-1)
            save_partial_states(
                kv,
                score,
                self.ape,
                positions,
                state_cache,
                state.slot_mapping,
                state.block_size,
                width,
                self.compress_ratio,
            )
            return
        fused_compress_norm_rope_store(
            kv_score,
            self.ape,
            positions,
            state.token_to_req_indices,
            metadata[self.swa_prefix].query_start_loc,
            state_cache,
            state.slot_mapping,
            state.block_table,
            rotary_emb.cos_sin_cache,
            kv_cache,
            metadata[self.k_cache_prefix].slot_mapping,
            self.norm.weight.data,
            self.rms_norm_eps,
            self.compress_ratio,
            kv_format=(formats.FP8_DS_MLA if self.head_dim == formats.HEAD_DIM else formats.INDEXER_FP8).id,
        )


def _is_capturing(tensor: torch.Tensor) -> bool:
    """A captured graph would repeat this step's decision."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


class ReplacesCompressor(Engines):
    """The layer's compressor is made by a name in the engine's module, which other classes use too: it changes its
    class once it is there."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.compressor is not None:
            own: Any = type(self.compressor)
            self.compressor.__class__ = subclass(own, Compressor)
            self.compressor.swa_prefix = self.swa_cache_layer.prefix
        if self.indexer is not None:
            self.indexer.compressor.swa_prefix = self.swa_cache_layer.prefix


class IndexersCompressor(Engines):
    def _get_compressor_cls(self) -> type:
        return subclass(super()._get_compressor_cls(), Compressor)


# ---- the indexer -----------------------------------------------------------------------------------------------------


class ChoosesIndexer(Engines):
    def _get_indexer_cls(self, vllm_config: Any) -> type:
        mixins = [mixin for part, mixin in INDEXER.items() if part in self.cute_kernels_parts]
        return subclass(super()._get_indexer_cls(vllm_config), *mixins)


class Indexer(Engines):
    def _get_attn_cls(self) -> type:
        return subclass(super()._get_attn_cls(), Scores)

    def _q_rope_quant(self, positions: Any, q: Any, rotary_emb: Any, indexer_weights: Any) -> tuple[Any, torch.Tensor]:
        if self.use_fp4_kv:
            PLUGIN.fall_back("indexer", "keys are MXFP4")
            quantized: tuple[Any, torch.Tensor] = super()._q_rope_quant(positions, q, rotary_emb, indexer_weights)
            return quantized
        return fused_indexer_q_rope_quant(
            positions, q, rotary_emb.cos_sin_cache, indexer_weights, self.softmax_scale, self.n_head**-0.5
        )


class Scores(Engines):
    """Scores and the best of them, in place of the op behind `SparseAttnIndexer`."""

    def forward_native(self, hidden_states: Any, q_quant: Any, k: Any, weights: Any) -> Any:
        return self.forward_cuda(hidden_states, q_quant, k, weights)

    def forward_cuda(self, hidden_states: Any, q_quant: Any, k: Any, weights: Any) -> Any:
        metadata = forward_metadata()
        of_layer = metadata[self.k_cache.prefix] if isinstance(metadata, dict) else None
        reason = self._not_served(q_quant, of_layer)
        if of_layer is None or reason:
            if reason:
                PLUGIN.fall_back("indexer", reason)
            result = super().forward_cuda(hidden_states, q_quant, k, weights)
            if of_layer is None:
                self._key_workspace()
            return result
        picks = self.topk_indices_buffer[: hidden_states.shape[0]]
        if picks.shape[-1] == self.topk_tokens:  # decode writes all of its rows
            picks = picks[of_layer.num_decode_tokens :]
        if picks.numel() > 0:
            picks.fill_(-1)
        if of_layer.num_prefills > 0:
            self._prefill(q_quant, weights, of_layer)
        if of_layer.num_decode_tokens > 0:
            self._decode(q_quant, weights, of_layer)
        return self.topk_indices_buffer

    def _not_served(self, q_quant: Any, of_layer: Any) -> str:
        if self.use_fp4_cache or not isinstance(q_quant, torch.Tensor):
            return "keys are MXFP4"
        if self.dcp_world_size > 1 or self.use_pcp:
            return "contexts are sharded over ranks"
        if self.candidate_blocks is not None:
            return "blocks are chosen ahead of rows"
        if not self.skip_k_cache_insert or self.dense_mha_metadata_layer_name:
            return "the op inserts keys or leaves rows to dense attention"
        decode = None if of_layer is None else of_layer.decode
        if decode is None or of_layer.num_decode_tokens == 0:
            return ""
        if decode.requires_padding or of_layer.num_decode_tokens % decode.decode_lens.shape[0]:
            return "decode requests have unequal numbers of rows"
        if decode.indices is not None or decode.global_seq_lens is not None:
            return "decode rows name their requests"
        return ""

    def _key_workspace(self) -> torch.Tensor:
        """The memory that the engine's own op gathers keys and scales into and its dummy run reserves."""
        parts = (self.max_total_seq_len * size for size in (self.head_dim, 4))
        return workspace(((sum(formats.round_up(part, WORKSPACE_ALIGNMENT) for part in parts),), torch.uint8))[0]

    def _score_memory(self, free: torch.Tensor, requests: int, columns: int, next_n: int = 1) -> torch.Tensor:
        """Of the free memory, or allocated."""
        needed = score_top_k_workspace_size(requests, columns, self.topk_tokens, next_n=next_n, most=SCORE_BYTES)
        return free if free.numel() >= needed else free.new_empty(needed)

    def _prefill(self, q: torch.Tensor, weights: torch.Tensor, of_layer: Any) -> None:
        # a chunk may find there what the one before has gathered: all have their keys in one place
        chunks, memory = of_layer.prefill.chunks, self._key_workspace()
        count = max((chunk.max_local_total_seq_lens for chunk in chunks), default=0)
        split = count * self.head_dim, count * 4, memory.numel() - count * (self.head_dim + 4)
        codes, scale_bytes, free = memory.split(split)
        keys = codes.view(torch.float8_e4m3fn).view(count, self.head_dim)
        scales = scale_bytes.view(count, 4)
        free = free[-free.data_ptr() % WORKSPACE_ALIGNMENT :]
        shard = None
        if getattr(of_layer.prefill, "row_shard_sizes", None) is not None:
            from vllm.model_executor.layers.sparse_attn_indexer import PrefillRowShard

            shard = PrefillRowShard.from_metadata(of_layer.prefill, of_layer.num_decode_tokens)
        for chunk in chunks:
            k, k_scale = keys[: chunk.max_local_total_seq_lens], scales[: chunk.max_local_total_seq_lens]
            if not chunk.skip_kv_gather and chunk.local_total_seq_lens > 0:
                cp_gather_indexer_k_quant_cache(
                    self.k_cache.kv_cache, k, k_scale, chunk.block_table, chunk.local_cu_seq_lens
                )
            window = chunk.token_start, chunk.token_end, chunk.cu_seqlen_ks, chunk.cu_seqlen_ke
            if shard is not None:
                window = shard.narrow(chunk)
                if window is None:
                    continue
            first, last, start, end = window
            out = self.topk_indices_buffer[first:last, : self.topk_tokens]
            if chunk.local_total_seq_lens == 0:
                continue  # the buffer holds -1
            score_top_k_prefill(
                q[first:last],
                (k, k_scale.view(torch.float32).squeeze(-1)),
                weights[first:last],
                start,
                end,
                self.topk_tokens,
                max_seqlen_k=chunk.max_seqlen_k,
                out=out,
                workspace=self._score_memory(free, last - first, chunk.max_seqlen_k),
            )
        if shard is not None:
            shard.exchange_topk(self.topk_indices_buffer, self.topk_tokens)

    def _decode(self, q: torch.Tensor, weights: torch.Tensor, of_layer: Any) -> None:
        rows, decode = of_layer.num_decode_tokens, of_layer.decode
        requests = decode.decode_lens.shape[0]
        queries = q[:rows].view(requests, -1, *q.shape[1:])
        score_top_k_decode(
            queries,
            self.k_cache.kv_cache,
            weights[:rows],
            decode.seq_lens[:requests],
            decode.block_table[:requests],
            self.max_model_len,
            self.topk_tokens,
            out=self.topk_indices_buffer[:rows, : self.topk_tokens],
            workspace=self._score_memory(self._key_workspace(), requests, self.max_model_len, queries.shape[1]),
        )


ATTENTION: dict[str, type] = {
    "decode": Decode,
    "prefill": Prefill,
    "insert": Insert,
    "norm": Norm,
    "compressor": ReplacesCompressor,
    "output": Output,
}
"""The mixin of a part over the attention class."""

INDEXER: dict[str, type] = {"indexer": Indexer, "compressor": IndexersCompressor}
"""The mixin of a part over the indexer class."""
