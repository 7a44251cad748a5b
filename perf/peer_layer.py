# SPDX-License-Identifier: Apache-2.0
"""Attention layers from other projects' kernels, to be timed beside ours: FlashMLA, DeepGEMM and vLLM's.

`PeerStep` runs the layers of a step of `perf.layer` with the same weights, over the same caches and block tables, every
op by the kernel that an engine runs for it on Hopper:

    products      FP8: a quantizing kernel (Triton) and DeepGEMM; bf16: cuBLAS, one for each weight
    norms         vLLM (Triton)
    window cache  vLLM (C++): query norm, rotation, insert; fills the query up to 64 or 128 heads
    compressors   vLLM: rows of state (Triton), then entries (CuTe DSL; the indexer's Triton)
    indexer       vLLM (CuTe DSL) for queries, DeepGEMM for scores, vLLM's top-k
    attention     FlashMLA; of prefill rows over pages that vLLM (CuTe DSL) has gathered
    output        vLLM (Triton) for rotation and quantization, DeepGEMM

Metadata, FlashMLA's plans and DeepGEMM's schedules are made once, before anything is timed: an engine makes them once a
step. They and all workspaces belong to the PeerStep, which outlives the graphs that read them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F

from cute_kernels import numerics
from cute_kernels.formats import FP8_DS_MLA, HEAD_DIM, INDEXER_FP8
from cute_kernels.indexer.ops import fused_indexer_q_rope_quant, paged_mqa_logits
from cute_kernels.layers import PRESETS, DeepseekV4MetadataBuilder
from cute_kernels.layers.attention import DeepseekV4MultiHeadLatentAttentionWrapper
from cute_kernels.layers.caches import KV_BLOCK_SIZE, SWA_BLOCK_SIZE, LayerCaches, PagedCache
from cute_kernels.layers.compressor import DeepseekCompressor
from cute_kernels.layers.config import DeepseekV4Config
from cute_kernels.layers.indexer import step_columns
from cute_kernels.layers.linear import Linear, matmul
from cute_kernels.layers.metadata import DeepseekV4Metadata
from cute_kernels.layers.streams import run_on_streams
from cute_kernels.linear.scales import BLOCK
from cute_kernels.norm.ops import fused_q_kv_rmsnorm
from cute_kernels.output.ops import fused_inv_rope_fp8_quant
from perf.compressor_c4 import two_steps, vllm_cutedsl, vllm_triton
from perf.measure import capture
from perf.peers import Product, compile_products, deepgemm
from perf.picks import TIED, largest, shortfall

if TYPE_CHECKING:
    from perf.layer import Case, Step

NAME = "flashmla + deepgemm + vllm"
STREAMS_NAME = "flashmla + deepgemm + vllm-streams"
"""Rows of a record: all launches on one stream, and what does not depend on each other on streams of its own."""

HEADS = (64, 128)
"""FlashMLA has kernels for so many heads: fewer are filled up."""

COOPERATIVE_ROWS = 64
"""Up to so many decode rows vLLM takes cooperative_topk, beyond them persistent_topk."""
COOPERATIVE_PICKS = (512, 1024, 2048)
TOP_K_WORKSPACE = 1 << 20
SCORE_BYTES = 512e6
"""Of a prefill chunk's scores at a time, as vLLM has it."""

PRODUCT, NORM, ATTENTION, BYTES, REORDERED = 0.003, 0.002, 0.004, 0.02, 0.005
"""What may differ between a stage of ours and the peers', from equal inputs: of products, norms and attention the
relative distance (attention: both round probabilities and results to bf16; 0.0028 has been seen); of records, entries
and codes the share of bytes. Between a graph's replay and an eager layer: of attention over the same entries in another
order."""
EDGE = 1e-6
"""Chunks may have other scales where their largest number is so near, relatively, to where the next power of two
begins. One such chunk of 262144, in a row with three keys, was 0.0046 of the norm of all scales (perf/log/layer.md)."""

Layer = DeepseekV4MultiHeadLatentAttentionWrapper


@dataclass(frozen=True)
class Kernels:
    """The peers' entry points."""

    flash: Any
    deepgemm: Any
    quantize: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
    norm: Callable[..., Any]
    insert: Callable[..., torch.Tensor]
    compress: Callable[..., None]
    compress_index: Callable[..., None]
    index_query: Callable[..., None]
    index_gather: Callable[..., None]
    gather: Callable[..., None]
    slots: Callable[..., Any]
    combine: Callable[..., Any]
    inverse_rope: Callable[..., Any]
    top_k: Any
    use_stream: Callable[[], Any]


@cache
def kernels() -> Kernels:
    """All of them, imported. An installation that is not whole fails in many ways."""
    importlib.import_module("vllm._C_stable_libtorch")
    from perf.triton_quantize import quantize

    ops = "vllm.models.deepseek_v4.common.ops"
    utils = importlib.import_module(f"{ops}.cache_utils")
    nvidia = "vllm.models.deepseek_v4.nvidia.ops"
    return Kernels(
        flash=importlib.import_module("vllm.third_party.flashmla.flash_mla_interface"),
        deepgemm=deepgemm(),
        quantize=quantize,
        norm=importlib.import_module("vllm.models.common.ops").fused_q_kv_rmsnorm,
        insert=torch.ops._C.fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert,
        compress=two_steps(vllm_cutedsl),
        compress_index=two_steps(vllm_triton),
        index_query=importlib.import_module(f"{nvidia}.fused_indexer_q_cutedsl")._INDEXER_Q_FP8_KERNEL,
        index_gather=torch.ops._C_cache_ops.cp_gather_indexer_k_quant_cache,
        gather=importlib.import_module(f"{nvidia}.dequant_gather_k_cutedsl")._DEQUANT_GATHER_K_CACHE_CUTEDSL_KERNEL,
        slots=utils.compute_global_topk_indices_and_lens,
        combine=utils.combine_topk_swa_indices,
        inverse_rope=importlib.import_module(f"{ops}.fused_inv_rope_fp8_quant").fused_inv_rope_fp8_quant,
        top_k=torch.ops._C,
        use_stream=importlib.import_module("tvm_ffi").use_torch_stream,
    )


def products_of(case: Case, config: DeepseekV4Config) -> list[Product]:
    """Those of a cell's layers."""
    heads, groups = config.num_attention_heads // case.tp, config.o_groups // case.tp
    rows = case.tokens
    found = [
        Product(rows, 1, config.q_lora_rank + config.head_dim, config.hidden_size),
        Product(rows, 1, heads * config.head_dim, config.q_lora_rank),
        Product(rows, groups, config.o_lora_rank, config.heads_per_group * config.head_dim, is_grouped=True),
        Product(rows, 1, config.hidden_size, groups * config.o_lora_rank),
    ]
    if 4 in case.ratios:
        found.append(Product(rows, 1, config.index_n_heads * config.index_head_dim, config.q_lora_rank))
    return found


def compile_ahead(cases: Sequence[Case]) -> None:
    """Let DeepGEMM compile the products of some cells: what cannot be compiled fails again in its cell."""
    compile_products([product for case in cases for product in products_of(case, PRESETS[case.model])])


class _Prefill:
    """What an engine knows of a prefill chunk of one request before its layers run."""

    def __init__(self, m: DeepseekV4Metadata, ratio: int, window: int) -> None:
        length, rows = m.seq_lens_cpu[0], m.num_prefill_tokens
        self.entries = length // ratio if ratio > 1 else 0
        self.columns = self.entries + rows + min(length - rows, window - 1)
        self.entry_lens = m.seq_lens // ratio
        self.starts = F.pad(self.entry_lens, (1, 0))
        device = m.positions.device
        self.row_starts = torch.zeros(rows, dtype=torch.int32, device=device)
        self.kv = torch.empty(1, self.columns, HEAD_DIM, dtype=torch.bfloat16, device=device)
        self.picks = m.c128a_prefill_topk_indices
        self.topk = 0
        if ratio == 128:
            assert self.picks is not None
            self.topk = self.picks.shape[1]
        elif ratio == 1:  # not read, but there must be columns
            self.picks = torch.full((rows, window), -1, dtype=torch.int32, device=device)
        self.keys = torch.empty(self.entries, 128, dtype=torch.uint8, device=device)
        self.key_scales = torch.empty(self.entries, 4, dtype=torch.uint8, device=device)


class PeerStep:
    """The layers of a step, run by the peers' kernels. Decode steps of requests with equally many rows, or prefill
    chunks of one request.

    streams   for products and for the indexer, as `layers.streams.run_on_streams` takes them
    """

    def __init__(self, step: Step, streams: Sequence[torch.cuda.Stream] = ()) -> None:
        self.k, self.step, self.config, self.streams = kernels(), step, step.config, streams
        self.layers, self.caches = step.layers, step.caches
        case, device = step.case, step.hidden[0].device
        # a builder of its own: attention reads the index lists of C128A, which ours needs none of
        self.builder = DeepseekV4MetadataBuilder(self.config, max(case.tokens, 1), max(case.lengths()), device)
        self.metadata = self.builder.build_step(case.query_lengths(), case.lengths(), step.tables, case.decodes)
        heads = self.layers[0].num_heads
        self.heads, self.padded = heads, next(n for n in HEADS if n >= heads)
        self.sinks = [
            F.pad(layer.mla_attn.attn_sink, (0, self.padded - heads), value=-torch.inf) for layer in self.layers
        ]
        self.plans = {ratio: self.k.flash.get_mla_metadata()[0] for ratio in step.kinds}
        self.schedules: dict[int, torch.Tensor] = {}
        self.top_k_workspace = torch.zeros(TOP_K_WORKSPACE, dtype=torch.uint8, device=device)
        self.picked = torch.full((max(case.tokens, 1), self.config.index_topk), -1, dtype=torch.int32, device=device)
        self.prefill: dict[int, _Prefill] = {}
        for ratio, m in self.metadata.items():
            if m.num_prefill_tokens:
                self.prefill[ratio] = _Prefill(m, ratio, self.config.sliding_window)
            elif ratio == 4:
                self.schedules[ratio] = self._schedule(m)

    def _schedule(self, m: DeepseekV4Metadata) -> torch.Tensor:
        assert m.visible is not None
        lens = m.visible.view(m.decode_batch())
        processors = _multiprocessors(lens.device)
        # four rows of a request are scored by pairs of multiprocessors
        workers = processors // 2 if lens.shape[1] == 4 else processors
        found: torch.Tensor = self.k.deepgemm.get_paged_mqa_logits_metadata(lens, KV_BLOCK_SIZE // 4, workers)
        return found

    # ---- stages ------------------------------------------------------------------------------------------------------

    def multiply(self, x: torch.Tensor, linear: Linear) -> torch.Tensor:
        """A quantized linear."""
        codes, scale = self.k.quantize(x)
        out = torch.empty(x.shape[0], linear.out_features, dtype=torch.bfloat16, device=x.device)
        self.k.deepgemm.fp8_fp4_gemm_nt(codes, scale, linear.weight, linear.scale, out)
        return out

    def products(self, layer: Layer, hidden: torch.Tensor) -> list[torch.Tensor]:
        """(qr_kv, kv_score, indexer weights, indexer kv_score), as many as the layer has."""
        tasks: list[Callable[[], torch.Tensor]] = [partial(self.multiply, hidden, layer.fused_wqa_wkv)]
        if layer.compressor is not None:
            tasks.append(partial(_scores, hidden, layer.compressor))
        if layer.indexer is not None:
            weight = layer.indexer.weights_proj.weight
            tasks += [lambda: torch.mm(hidden, weight.t()), partial(_scores, hidden, layer.indexer.compressor)]
        return run_on_streams(tasks, self.streams, hidden.device)

    def norm(self, layer: Layer, qr_kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        qr, kv = qr_kv.split([self.config.q_lora_rank, self.config.head_dim], dim=-1)
        weights = layer.q_norm_weight, layer.kv_norm_weight
        normed: tuple[torch.Tensor, torch.Tensor] = self.k.norm(qr, kv, *weights, self.config.rms_norm_eps)
        return normed

    def insert(
        self, layer: Layer, q: torch.Tensor, kv: torch.Tensor, caches: LayerCaches, m: DeepseekV4Metadata
    ) -> torch.Tensor:
        """The query, normed, rotated and filled up; kv goes into the window cache."""
        pool = caches.swa.data
        pages = pool.as_strided((pool.shape[0], pool.stride(0)), (pool.stride(0), 1))
        table, eps = layer.rotary_emb.cos_sin_cache, self.config.rms_norm_eps
        return self.k.insert(q, kv, pages, m.slot_mapping, m.positions, table, self.padded, eps, SWA_BLOCK_SIZE)

    def compress(
        self,
        layer: Layer,
        compressor: DeepseekCompressor,
        kv_score: torch.Tensor,
        m: DeepseekV4Metadata,
        state: PagedCache | None,
        cache: PagedCache | None,
    ) -> None:
        assert state is not None
        assert cache is not None
        store = self.k.compress if compressor.head_dim == HEAD_DIM else self.k.compress_index
        store(
            kv_score, compressor.ape, m.positions, m.token_to_req_indices, m.query_start_loc, state.data,
            m.state_slot_mapping, m.state_block_table, layer.rotary_emb.cos_sin_cache, cache.data,
            m.compressed_slot_mapping, compressor.norm_weight, None, None, compressor.eps, compressor.compress_ratio, 0,
            cache.kv_format.id,
        )  # fmt: skip

    def index_query(
        self, layer: Layer, index_q: torch.Tensor, weights: torch.Tensor, m: DeepseekV4Metadata
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(e4m3 [T, heads, 128], fp32 weights)."""
        assert layer.indexer is not None
        q = layer.indexer.by_head(index_q)
        codes = torch.empty_like(q, dtype=torch.float8_e4m3fn)
        scaled = torch.empty(weights.shape, dtype=torch.float32, device=q.device)
        with self.k.use_stream():
            self.k.index_query(
                positions=m.positions,
                q=q,
                cos_sin_cache=layer.rotary_emb.cos_sin_cache,
                weights=weights,
                weights_softmax_scale=layer.indexer.softmax_scale,
                weights_head_scale=layer.indexer.head_scale,
                q_fp8=codes.view(torch.uint8),
                weights_out=scaled,
            )
        return codes, scaled

    def pick(
        self, codes: torch.Tensor, weights: torch.Tensor, cache: PagedCache | None, m: DeepseekV4Metadata
    ) -> torch.Tensor:
        """Top-k entries of every row, request-local."""
        assert cache is not None
        assert m.visible is not None
        assert m.compressed_block_table is not None
        k, out = self.config.index_topk, self.picked
        if m.num_prefill_tokens:
            prefill = self.prefill[4]
            self.k.index_gather(cache.data, prefill.keys, prefill.key_scales, m.compressed_block_table, prefill.starts)
            keys, scales = prefill.keys.view(torch.float8_e4m3fn), prefill.key_scales.view(torch.float32)[:, 0]
            rows = max(1, min(len(codes), int(SCORE_BYTES / 4 / max(prefill.entries, 1))))
            for first in range(0, len(codes), rows):
                part = slice(first, first + rows)
                starts, ends = prefill.row_starts[part], m.visible[part]
                scores = self.k.deepgemm.fp8_fp4_mqa_logits(
                    codes[part], None, keys, scales, weights[part], starts, ends, prefill.entries
                )
                self.k.top_k.top_k_per_row_prefill(scores, starts, ends, out[part], len(scores), *scores.stride(), k)
            return out
        shape = m.decode_batch()
        lens, columns = m.visible.view(shape), step_columns(m.max_seq_len // 4)
        scores = self.k.deepgemm.fp8_fp4_paged_mqa_logits(
            codes.unflatten(0, shape), None, cache.data[:, :, None], weights, lens,
            m.decode_block_table(), self.schedules[4], columns,
        )  # fmt: skip
        few = len(scores) <= COOPERATIVE_ROWS and scores.stride(0) % 4 == 0 and k in COOPERATIVE_PICKS
        kernel = self.k.top_k.cooperative_topk if few else self.k.top_k.persistent_topk
        kernel(scores, lens.reshape(-1), out, self.top_k_workspace, k, columns)
        return out

    def attend(
        self, number: int, q: torch.Tensor, caches: LayerCaches, m: DeepseekV4Metadata, picks: torch.Tensor | None
    ) -> torch.Tensor:
        """[T, padded heads, 512] of a query of as many heads."""
        out = torch.empty_like(q)
        attend = self._attend_prefill if m.num_prefill_tokens else self._attend_decode
        attend(number, q, caches, m, picks, out)
        return out

    def _attend_decode(
        self,
        number: int,
        q: torch.Tensor,
        caches: LayerCaches,
        m: DeepseekV4Metadata,
        picks: torch.Tensor | None,
        out: torch.Tensor,
    ) -> None:
        layer, rows = self.layers[number], m.num_decode_tokens
        extra = lens = pool = None
        if caches.compressed is not None:
            pool = caches.compressed.data.unsqueeze(2)
            extra, lens = m.c128a_global_decode_topk_indices, m.c128a_decode_topk_lens
            if layer.compress_ratio == 4:
                table, page = m.compressed_block_table, KV_BLOCK_SIZE // 4
                extra, lens = self.k.slots(picks, m.token_to_req_indices, table, page, m.is_valid_token)
            assert extra is not None
            extra = extra.view(rows, 1, -1)
        self.k.flash.flash_mla_with_kvcache(
            q=q.unsqueeze(1),
            k_cache=caches.swa.data.unsqueeze(2),
            block_table=None,
            cache_seqlens=None,
            head_dim_v=HEAD_DIM,
            tile_scheduler_metadata=self.plans[layer.compress_ratio],
            softmax_scale=layer.mla_attn.scale,
            is_fp8_kvcache=True,
            indices=m.decode_swa_indices.view(rows, 1, -1),
            attn_sink=self.sinks[number],
            extra_k_cache=pool,
            extra_indices_in_kvcache=extra,
            topk_length=m.decode_swa_lens.view(rows),
            extra_topk_length=lens,
            out=out.unsqueeze(1),
        )

    def _attend_prefill(
        self,
        number: int,
        q: torch.Tensor,
        caches: LayerCaches,
        m: DeepseekV4Metadata,
        picks: torch.Tensor | None,
        out: torch.Tensor,
    ) -> None:
        layer = self.layers[number]
        ratio, window = layer.compress_ratio, self.config.sliding_window
        prefill = self.prefill[ratio]
        parts: list[tuple[PagedCache, torch.Tensor, torch.Tensor | None, torch.Tensor | None, int]] = [
            (caches.swa, m.seq_lens, m.prefill_gather_lens, m.swa_block_table, prefill.entries)
        ]
        if caches.compressed is not None:
            parts.insert(0, (caches.compressed, prefill.entry_lens, None, m.compressed_block_table, 0))
        for pages, lens, gather_lens, table, offset in parts:
            with self.k.use_stream():
                self.k.gather(
                    out=prefill.kv, k_cache=pages.data, seq_lens=lens, gather_lens=gather_lens, block_table=table,
                    block_size=pages.block_size, offset=offset,
                )  # fmt: skip
        indices, counts = self.k.combine(
            prefill.picks if picks is None else picks, m.query_start_loc, m.seq_lens, m.prefill_gather_lens, window,
            ratio, prefill.topk if picks is None else picks.shape[1], prefill.columns, prefill.entries,
        )  # fmt: skip
        self.k.flash.flash_mla_sparse_fwd(
            q=q,
            kv=prefill.kv.view(-1, 1, HEAD_DIM),
            indices=indices[:, None],
            sm_scale=layer.mla_attn.scale,
            attn_sink=self.sinks[number],
            topk_length=counts,
            out=out,
        )

    def rotate_back(
        self, layer: Layer, attended: torch.Tensor, m: DeepseekV4Metadata
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(e4m3 [T, groups, columns], scales) of attention's results."""
        table, o_proj = layer.rotary_emb.cos_sin_cache, layer.o_proj
        codes, scale = self.k.inverse_rope(attended, m.positions, table, o_proj.groups, o_proj.heads_per_group)
        return codes, scale

    def project_a(self, layer: Layer, codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        o_proj = layer.o_proj
        z = torch.empty(len(codes), o_proj.groups, o_proj.rank, dtype=torch.bfloat16, device=codes.device)
        operands = codes, scale, o_proj.wo_a, o_proj.wo_a_scale
        self.k.deepgemm.fp8_einsum("bhr,hdr->bhd", *operands, z, None, [1, 128, 128])
        return z

    # ---- layers ------------------------------------------------------------------------------------------------------

    def run(
        self, number: int, hidden: torch.Tensor | None = None, capture: dict[str, torch.Tensor] | None = None
    ) -> torch.Tensor:
        """One layer. capture receives picks with the queries and weights that they follow from, if there are any, and
        attention's results."""
        layer, caches = self.layers[number], self.caches[number]
        m = self.metadata[layer.compress_ratio]
        qr_kv, *scores = self.products(layer, self.step.hidden[0] if hidden is None else hidden)
        qr, kv = self.norm(layer, qr_kv)

        def insert_and_compress() -> torch.Tensor:
            q = self.multiply(qr, layer.wq_b).unflatten(-1, (self.heads, HEAD_DIM))
            query = self.insert(layer, q, kv, caches, m)
            if layer.compressor is not None:
                self.compress(layer, layer.compressor, scores[0], m, caches.state, caches.compressed)
            return query

        def select() -> torch.Tensor:
            assert layer.indexer is not None
            index_q = self.multiply(qr, layer.indexer.wq_b)
            self.compress(layer, layer.indexer.compressor, scores[2], m, caches.indexer_state, caches.indexer)
            codes, weights = self.index_query(layer, index_q, scores[1], m)
            picks = self.pick(codes, weights, caches.indexer, m)
            if capture is not None:
                capture.update(codes=codes, weights=weights, picks=picks)
            return picks

        tasks = [insert_and_compress] if layer.indexer is None else [insert_and_compress, select]
        q, *picks = run_on_streams(tasks, self.streams, qr_kv.device)
        attended = self.attend(number, q, caches, m, picks[0] if picks else None)
        if capture is not None:
            capture["attended"] = attended
        return self.project(layer, attended, m)

    def project(self, layer: Layer, attended: torch.Tensor, m: DeepseekV4Metadata) -> torch.Tensor:
        """The layer's results from attention's."""
        z = self.project_a(layer, *self.rotate_back(layer, attended[:, : self.heads], m))
        return self.multiply(z.flatten(1), layer.o_proj.wo_b)

    def run_all(self, hidden: torch.Tensor) -> torch.Tensor:
        for number in range(len(self.layers)):
            hidden = self.run(number, hidden)
        return hidden

    def calls(self) -> list[Callable[[], Any]]:
        """What is timed: as of the step."""
        if self.step.case.ratios != tuple(layer.compress_ratio for layer in self.layers):
            raise RuntimeError("PeerStep: the layers are not those of the cell")
        if self.step.is_chained:
            return [partial(self.run_all, hidden) for hidden in self.step.hidden]
        return [partial(self.run, number) for number in range(len(self.layers))]

    # ---- checks ------------------------------------------------------------------------------------------------------

    def disagreements(self) -> list[str]:
        """What of the first layer of each kind differs from ours by more than is stated, stage by stage from equal
        inputs, and its replay in a graph from an eager run; empty if nothing does."""
        found = []
        for ratio in self.step.kinds:
            number = self.step.case.ratios.index(ratio)
            far = [text for text, is_near in self._stages(number) if not is_near]
            found += [f"C{ratio} layer: {text}" if len(self.step.kinds) > 1 else text for text in far]
            if not far and (why := self._replay(number)):
                found.append(why)
        return found

    def stages(self, number: int) -> list[str]:
        """How far each stage of a layer is from ours, in words."""
        return [text for text, _ in self._stages(number)]

    def _replay(self, number: int) -> str:
        """How the replay of a graph differs from an eager layer. Top-k writes its picks in any order and attention sums
        them up in that order: quantized, its results differ by more than it does. So they are compared with those of
        the replay's own attention."""
        layer = self.layers[number]
        m = self.metadata[layer.compress_ratio]
        eager: dict[str, torch.Tensor] = {}
        self.run(number, capture=eager)
        eager = {name: found.clone() for name, found in eager.items()}
        before = self._plan_bits()
        replayed: dict[str, torch.Tensor] = {}

        def call() -> None:
            replayed["result"] = self.run(number, capture=replayed)

        graph, _ = capture([call])
        replayed["attended"].zero_()
        replayed["result"].zero_()
        graph.replay()
        torch.cuda.synchronize()
        if not all(torch.equal(a, b) for a, b in zip(before, self._plan_bits(), strict=True)):
            return "a plan has changed since the capture"
        if "picks" in eager:
            queries = eager["codes"], eager["weights"]
            far = self._shortfall(*queries, self.caches[number].indexer, m, eager["picks"], replayed["picks"])
            if not far <= TIED:
                return f"what a graph's replay or an eager layer has left out scores {far:.2g} more than picks"
        far = _distance(replayed["attended"], eager["attended"])
        if not far <= REORDERED:
            return f"attention in a graph's replay is {far:.2g} from that of an eager layer"
        far = _distance(replayed["result"], self.project(layer, replayed["attended"], m))
        return "" if far <= PRODUCT else f"the results of a graph's replay are {far:.2g} from those of its attention"

    def _shortfall(
        self,
        codes: torch.Tensor,
        weights: torch.Tensor,
        cache: PagedCache | None,
        m: DeepseekV4Metadata,
        *picks: torch.Tensor,
    ) -> float:
        """By how much an entry that one of the picks left out scores better than what it has, as part of the row's
        largest score, by our scores of these queries."""
        assert cache is not None
        assert m.visible is not None
        assert m.compressed_block_table is not None
        columns, found = max(m.max_seq_len // 4, 1), 0.0
        step = max(1, int(SCORE_BYTES / 4 / columns))
        for first in range(0, len(codes), step):
            rows = slice(first, first + step)
            scores = paged_mqa_logits(
                codes[rows, None],
                cache.data,
                weights[rows],
                m.visible[rows, None],
                m.compressed_block_table[m.token_to_req_indices[rows].long()],
                None,
                columns,
                clean_logits=True,
                kv_format=cache.kv_format.id,
            )
            most = largest(scores)
            found = max(found, *(float((shortfall(scores, some[rows]) / most).max()) for some in picks))
        return found

    def _plan_bits(self) -> list[torch.Tensor]:
        plans = [bits for p in self.plans.values() for bits in (p.tile_scheduler_metadata, p.num_splits)]
        return [bits.clone() for bits in (*plans, *self.schedules.values()) if bits is not None]

    def _stages(self, number: int) -> list[tuple[str, bool]]:
        """(stage and how far it is from ours, whether that is within bounds)."""
        layer, caches, hidden = self.layers[number], self.caches[number], self.step.hidden[0]
        m, table, eps = self.metadata[layer.compress_ratio], layer.rotary_emb.cos_sin_cache, self.config.rms_norm_eps
        found: list[tuple[str, bool]] = []

        def note(stage: str, far: float, most: float) -> None:
            found.append((f"{stage} {far:.2g}", far <= most))

        ours = [layer.fused_wqa_wkv(hidden)]
        if layer.compressor is not None:
            ours.append(layer.compressor.fused_wkv_wgate(hidden))
        if layer.indexer is not None:
            ours += [layer.indexer.weights_proj(hidden), layer.indexer.compressor.fused_wkv_wgate(hidden)]
        names = "wqa_wkv", "compressor", "weights_proj", "indexer's compressor"
        for name, theirs, right in zip(names, self.products(layer, hidden), ours, strict=False):
            note(name, _distance(theirs, right), PRODUCT)
        latent, raw_kv = ours[0].split([self.config.q_lora_rank, self.config.head_dim], dim=-1)
        qr, kv = fused_q_kv_rmsnorm(latent, raw_kv, layer.q_norm_weight, layer.kv_norm_weight, eps)
        note("norms", max(map(_distance, self.norm(layer, ours[0]), (qr, kv))), NORM)
        raw = layer.wq_b(qr)
        note("wq_b", _distance(self.multiply(qr, layer.wq_b), raw), PRODUCT)
        raw = raw.unflatten(-1, (self.heads, HEAD_DIM))
        q = layer.mla_attn.insert(raw.clone(), kv, caches, m, table)
        right = _records(caches.swa, m.slot_mapping)
        theirs = self.insert(layer, raw.clone(), kv, caches, m)
        note("query", _distance(theirs[:, : self.heads], q), NORM)
        note("window cache", _differing(_records(caches.swa, m.slot_mapping), right), BYTES)
        stores: list[tuple[str, DeepseekCompressor | None, PagedCache | None, PagedCache | None, int]]
        stores = [("entries", layer.compressor, caches.state, caches.compressed, 1)]
        if layer.indexer is not None:
            stores.append(("keys", layer.indexer.compressor, caches.indexer_state, caches.indexer, 3))
        for name, compressor, state, cache_, place in stores:
            if compressor is not None:
                assert state is not None
                assert cache_ is not None
                assert m.compressed_slot_mapping is not None
                compressor(ours[place], m, state, cache_, table)
                right = _records(cache_, m.compressed_slot_mapping)
                self.compress(layer, compressor, ours[place], m, state, cache_)
                note(name, _differing(_records(cache_, m.compressed_slot_mapping), right), BYTES)
        picks = None
        if layer.indexer is not None:
            assert caches.indexer is not None
            raw = layer.indexer.wq_b(qr)
            note("indexer.wq_b", _distance(self.multiply(qr, layer.indexer.wq_b), raw), PRODUCT)
            scales = layer.indexer.softmax_scale, layer.indexer.head_scale
            rotated = layer.indexer.by_head(raw)
            codes, weights = fused_indexer_q_rope_quant(
                m.positions, rotated, table, ours[2], *scales, False, round_weights=True
            )
            their_codes, their_weights = self.index_query(layer, raw, ours[2], m)
            note("index codes", _differing(their_codes.view(torch.uint8), codes.view(torch.uint8)), BYTES)
            note("index weights", _distance(their_weights, weights), NORM)
            picks = layer.indexer.indexer_op(codes, weights, caches.indexer, m).clone()
            theirs = self.pick(codes, weights, caches.indexer, m)
            note("picks", self._shortfall(codes, weights, caches.indexer, m, picks, theirs), TIED)
        out = torch.empty_like(q)
        layer.mla_attn(q, caches, m, picks, out)
        filled = F.pad(q, (0, 0, 0, self.padded - self.heads))
        theirs = self.attend(number, filled, caches, m, picks)[:, : self.heads]
        note("attention", _distance(theirs, out), ATTENTION)
        o_proj = layer.o_proj
        codes, scale = fused_inv_rope_fp8_quant(out, m.positions, table, o_proj.groups, o_proj.heads_per_group)
        cut = F.pad(out, (0, 0, 0, self.padded - self.heads))[:, : self.heads]  # as FlashMLA leaves it
        their_codes, their_scale = self.rotate_back(layer, cut, m)
        note("output codes", _differing(their_codes.view(torch.uint8), codes.view(torch.uint8)), BYTES)
        note("output scales", _off_edge(their_scale, scale, out, m.positions, table), EDGE)
        z = o_proj.project_a(codes, scale)
        note("wo_a", _distance(self.project_a(layer, codes, scale), z), PRODUCT)
        note("wo_b", _distance(self.multiply(z.flatten(1), o_proj.wo_b), o_proj.wo_b(z.flatten(1))), PRODUCT)
        return found


def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _scores(hidden: torch.Tensor, compressor: DeepseekCompressor) -> torch.Tensor:
    return matmul(hidden, compressor.fused_wkv_wgate.weight, torch.float32)


def _distance(x: torch.Tensor, y: torch.Tensor) -> float:
    """Relative; infinite where something is not finite."""
    far = float((x.double() - y.double()).norm() / y.double().norm().clamp(min=1e-30))
    return far if far == far else float("inf")


def _differing(x: torch.Tensor, y: torch.Tensor) -> float:
    """Share of the bytes that differ."""
    return float((x != y).float().mean()) if x.numel() else 0.0


def _off_edge(
    x: torch.Tensor, y: torch.Tensor, out: torch.Tensor, positions: torch.Tensor, table: torch.Tensor
) -> float:
    """How far, relatively, the largest number of a chunk with different scales x and y is from where the next power of
    two begins, of attention's results `out`; infinite if these are not neighbours.

    Columns that are turned by 1e-6 or so, as in the first rows of a prompt, stay a hair away from bf16 numbers, some of
    which are just where a power of two begins: there a logarithm, or a rotation that rounds otherwise, gives the
    neighbour."""
    rows, heads, dim = out.shape
    x, y = (scales.reshape(rows, heads, dim // BLOCK) for scales in (x, y))
    row, head, chunk = (x != y).nonzero(as_tuple=True)
    if not len(row):
        return 0.0
    turned = numerics.rotate(out[row, head], positions[row], table, inverse=True).unflatten(1, (-1, BLOCK))
    most = turned.abs().amax(dim=2).gather(1, chunk[:, None])[:, 0].double()
    both = torch.stack([x[row, head, chunk], y[row, head, chunk]]).double()
    less, more = both.amin(dim=0), both.amax(dim=0)
    return float(torch.where(more == 2 * less, (most / (numerics.E4M3_MAX * less) - 1).abs(), torch.inf).max())


def _records(cache: PagedCache, slots: torch.Tensor) -> torch.Tensor:
    """Bytes of what lies in the slots that are not negative."""
    slots = slots[slots >= 0]
    rows = cache.block_size
    pages = cache.kv_format.pages(cache.data, rows)
    data, scales = {FP8_DS_MLA.id: (576, 8), INDEXER_FP8.id: (128, 4)}[cache.kv_format.id]
    page, row = slots // rows, slots % rows

    def part(offset: int, size: int) -> torch.Tensor:
        columns = offset + row[:, None] * size + torch.arange(size, device=slots.device)
        found: torch.Tensor = pages[page[:, None], columns]
        return found

    # the last byte of a record's scales means nothing
    return torch.cat([part(0, data), part(rows * data, scales)[:, : 7 if scales == 8 else scales]], dim=1)
