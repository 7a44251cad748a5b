# SPDX-License-Identifier: Apache-2.0
"""One whole DeepSeek-V4 attention layer: GEMMs, norms, caches, compressor, indexer, attention, output."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

import torch
from torch import nn

from cute_kernels import __version__, numerics
from cute_kernels.formats import FP8_DS_MLA, INDEXER_FP8
from cute_kernels.insert_compress.ops import fused_qkv_insert_compress, fused_qkv_insert_compress_index
from cute_kernels.linear.ops import fp8_bf16_linear, fp8_linear, fp8_linear_squares
from cute_kernels.norm.ops import fused_q_kv_rmsnorm, fused_q_kv_rmsnorm_quant
from cute_kernels.runtime.arch import LARGE_CLUSTERS, arch_of
from cute_kernels.runtime.checks import Checker
from cute_kernels.sparse_mla.ops import PREFILL_FORMS

from .bound import BoundSteps, bound_key
from .caches import INDEX_CACHES, KV_CACHES, SWA_BLOCK_SIZE, LayerCaches
from .compressor import DeepseekCompressor
from .config import DeepseekV4Config
from .context import ContextParallel
from .context_attention import ContextAttention
from .context_step import ContextStep
from .indexer import ALL, DeepseekV4Indexer
from .linear import MOST_OWN_ROWS, Fp8Rows, Linear, bf16_product
from .metadata import DeepseekV4Metadata
from .mla import DeepseekV4FlashInferMLASparseImpl, DeepseekV4MLAAttention, Workspace
from .output import OutputProjection
from .parallel import TensorParallel, verify_ranks
from .rotary import RotaryEmbedding
from .stacked import StackedLinears
from .streams import graph_streams, run_on_streams, start_on_streams

T = TypeVar("T")

QUANTIZED_LINEARS = frozenset({"wqa_wkv", "wq_b", "wo_a", "wo_b", "indexer.wq_b"})
"""Linears that a published checkpoint stores as FP8."""

AUX_STREAM_MAX_TOKENS = 1024
"""Above this many rows the GEMMs fill the GPU by themselves and run one after the other."""

BOUND_PREFILL_MAX_TOKENS = 4096
"""Steps of more prefill rows keep a GPU busy for longer than their ops take on the host."""

LEAST_RAW_ROWS, LEAST_RAW_DECODE_ROWS = 128, 33
"""From this many rows on a prefill step's attention, or a decode step's, norms and rotates its queries. The product of
fewer decode rows, by swapped operands, stores no sums of squares."""

HEAD_BLOCKS = 4
"""Sums of squares of a head."""

MOST_LATE_INDEXER_ROWS = 32
"""Up to so many rows, and beyond those of our own bf16 GEMM, the hidden states' other product runs beside that of the
queries where there is an indexer; without one only beyond. Else its CTAs take whole multiprocessors for so long that
the queries' product loses more than is hidden (perf/log/layer.md)."""

DUAL_ROWS = range(33, MOST_OWN_ROWS + 1)
"""Of so many rows both products of the hidden states are one launch. On two streams a layer takes longer: behind an
event a kernel starts when that has come, and not while the kernel before ends (perf/log/layer.md)."""

ONE_LAUNCH_MAX_TOKENS = 512
"""Up to this many rows the kernels between the GEMMs and the scores, or attention, of a layer with a compressor are one
launch."""


@dataclass
class AttentionOptions:
    """How a layer runs; every field has the default an engine starts from.

    kv_cache             "fp8_ds_mla", "bf16" or "fp8" (per-tensor): format of the window and compressed caches
    index_cache          "fp8" or "mxfp4": format of indexer queries and keys
    index_hadamard       Hadamard rotation of indexer queries and keys
    e2m1_rounding        tie rule of MXFP4, "ties_to_lower" or "ties_to_even"
    prefill              "gathered", "paged" or "auto", the faster one by measured times (fp8_ds_mla caches)
    batch_invariant      attention gives a row the same bits whatever else is in the step; slower for few rows, and not
                         with prefill "auto" (fp8_ds_mla caches; over others it does so anyway)
    persist, keep_every  which rows of the compressor state are kept (see DeepseekCompressor)
    tma_aligned_scales   packed scales for wo_a (the Blackwell recipe)
    max_model_len        longest sequence; sizes the rotary table and the profiling run's workspace
    max_num_tokens       most rows in a step; sizes the top-k buffer
    use_pdl              kernels are launched as dependents of those before (programmatic dependent launch), so that
                         weights are fetched while the kernel before still runs. Same bits. What writes a weight on the
                         stream of a step must be a launch without it, as any torch operation is
    bind_steps           an eager step keeps its launches and repeats them for the next step of its kind: decode steps
                         from the first time on, those with prefill rows from the second, except a context group's
                         (layers.bound). Same bits
    aux_streams          CUDA streams for the independent GEMMs and the indexer; empty: one stream. None: steps of few
                         rows that are captured in a graph take one that all layers of a thread share, others none. Same
                         bits
    cp                   the ranks that share the context of requests, whose steps are ContextSteps; None: steps are
                         DeepseekV4Metadata
    """

    kv_cache: str = "fp8_ds_mla"
    index_cache: str = "fp8"
    index_hadamard: bool = False
    e2m1_rounding: str = "ties_to_lower"
    prefill: str = "gathered"
    batch_invariant: bool = False
    persist: str = "window"
    keep_every: int = 0
    tma_aligned_scales: bool = False
    max_model_len: int = 65536
    max_num_tokens: int = 8192
    use_pdl: bool = True
    bind_steps: bool = True
    aux_streams: Sequence[torch.cuda.Stream] | None = None
    tp: TensorParallel = field(default_factory=TensorParallel)
    cp: ContextParallel | None = None
    workspace: Workspace | None = None
    topk_indices_buffer: torch.Tensor | None = None

    def __post_init__(self) -> None:
        for name, value, choices in (
            ("kv_cache", self.kv_cache, tuple(KV_CACHES)),
            ("index_cache", self.index_cache, tuple(INDEX_CACHES)),
            ("e2m1_rounding", self.e2m1_rounding, numerics.E2M1_ROUNDINGS),
            ("prefill", self.prefill, PREFILL_FORMS),
            ("persist", self.persist, ("window", "all")),
        ):
            if value not in choices:
                raise ValueError(f"AttentionOptions: {name}: expected one of {choices}, got {value!r}")
        for name, number in (("max_model_len", self.max_model_len), ("max_num_tokens", self.max_num_tokens)):
            if number < 1:
                raise ValueError(f"AttentionOptions: {name}: expected a positive number, got {number}")


_OWN_OPTIONS = frozenset(("aux_streams", "tp", "cp", "workspace", "topk_indices_buffer"))
_OF_CP = ("kv", "prefill", "heads", "q", "wire", "shards", "swa")
"""Options that ranks have objects of their own for."""


def _digest(x: torch.Tensor) -> str:
    """Of a tensor's shape and bytes."""
    content = hashlib.sha256(x.contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes())
    return f"{tuple(x.shape)} {content.hexdigest()[:16]}"


def _stack_again(module: nn.Module, keys: object) -> None:
    """Hook of load_state_dict, which may assign tensors."""
    assert isinstance(module, DeepseekV4MultiHeadLatentAttentionWrapper)
    module._stack_again()


class DeepseekV4MultiHeadLatentAttentionWrapper(nn.Module):
    """Attention layer `layer_index` of a model, any kind (sliding window, C4A, C128A).

    quantized   names among QUANTIZED_LINEARS whose weights are FP8
    options     see AttentionOptions
    rotary_emb  rotary table, shared by the layers of a kind; built if None

    Weights are zero until `layers.checkpoint.load_layer` (or anything else) fills the buffers.
    """

    q_norm_weight: torch.Tensor
    kv_norm_weight: torch.Tensor

    def __init__(
        self,
        config: DeepseekV4Config,
        layer_index: int,
        *,
        quantized: frozenset[str] = QUANTIZED_LINEARS,
        options: AttentionOptions | None = None,
        rotary_emb: RotaryEmbedding | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        options = options or AttentionOptions()
        tp = options.tp
        self.config, self.layer_index, self.options, self.tp = config, layer_index, options, tp
        self.compress_ratio = config.compress_ratio_of(layer_index)
        self.num_heads = tp.shard(config.num_attention_heads, "num_attention_heads")
        if self.num_heads > 128:
            raise ValueError(f"num_attention_heads: expected at most 128 per rank, got {self.num_heads}")
        # heads whose queries the rank computes
        self.query_heads, cp = self.num_heads, options.cp
        if cp is not None and cp.q == "replicate" and self.compress_ratio > 1:
            self.query_heads, _ = cp.split_heads(self.num_heads)
        self.rotary_emb = rotary_emb or RotaryEmbedding(config, self.compress_ratio > 1, options.max_model_len, device)

        hidden, head_dim, q_rank = config.hidden_size, config.head_dim, config.q_lora_rank
        gemm: dict[str, Any] = {
            "batch_invariant": options.batch_invariant,
            "use_pdl": options.use_pdl,
            "device": device,
        }
        self.fused_wqa_wkv = Linear(
            hidden, q_rank + head_dim, quantized="wqa_wkv" in quantized, label="wqa_wkv", **gemm
        )
        self.wq_b = Linear(q_rank, self.query_heads * head_dim, quantized="wq_b" in quantized, label="wq_b", **gemm)
        self.register_buffer("q_norm_weight", torch.ones(q_rank, dtype=torch.bfloat16, device=device))
        self.register_buffer("kv_norm_weight", torch.ones(head_dim, dtype=torch.bfloat16, device=device))
        limits = {"max_model_len": options.max_model_len, "max_num_tokens": options.max_num_tokens}
        if options.kv_cache == "fp8_ds_mla":
            self.mla_attn = DeepseekV4MLAAttention(
                config,
                self.compress_ratio,
                self.num_heads,
                prefill=options.prefill,
                batch_invariant=options.batch_invariant,
                use_pdl=options.use_pdl,
                workspace=options.workspace,
                device=device,
                **limits,
            )
        else:
            self.mla_attn = DeepseekV4FlashInferMLASparseImpl(
                config,
                self.compress_ratio,
                self.num_heads,
                fp8=options.kv_cache == "fp8",
                use_pdl=options.use_pdl,
                device=device,
                **limits,
            )
        self.compressor: DeepseekCompressor | None = None
        self.indexer: DeepseekV4Indexer | None = None
        if self.compress_ratio > 1:
            self.compressor = DeepseekCompressor(
                config,
                self.compress_ratio,
                head_dim,
                label="compressor.wkv_wgate",
                persist=options.persist,
                keep_every=options.keep_every,
                **gemm,
            )
        if self.compress_ratio == 4:
            buffer = options.topk_indices_buffer
            if buffer is None:
                buffer = torch.full((options.max_num_tokens, config.index_topk), -1, dtype=torch.int32, device=device)
            self.indexer = DeepseekV4Indexer(
                config,
                self.compress_ratio,
                buffer,
                quantized="indexer.wq_b" in quantized,
                index_cache=options.index_cache,
                index_hadamard=options.index_hadamard,
                e2m1_rounding=options.e2m1_rounding,
                persist=options.persist,
                keep_every=options.keep_every,
                tp=tp,
                **gemm,
            )
        self.o_proj = OutputProjection(
            config,
            tp,
            wo_a_quantized="wo_a" in quantized,
            wo_b_quantized="wo_b" in quantized,
            tma_aligned_scales=options.tma_aligned_scales,
            **gemm,
        )
        self.context = None if options.cp is None else ContextAttention(self, options.cp)
        self._bound = BoundSteps()
        self._weight_places: list[tuple[dict[str, torch.Tensor | None], str]] = []
        self._stack()
        self.register_load_state_dict_post_hook(_stack_again)

    def _stack(self) -> None:
        """Put the weights that read the same input below each other."""
        self._query_weights: StackedLinears | None = None
        self._hidden_weights: StackedLinears | None = None
        if self.indexer is None:
            return
        assert self.compressor is not None
        if self.wq_b.quantized and self.indexer.wq_b.quantized:
            self._query_weights = StackedLinears([self.wq_b, self.indexer.wq_b])
        self._hidden_weights = StackedLinears(
            [self.compressor.fused_wkv_wgate, self.indexer.compressor.fused_wkv_wgate, self.indexer.weights_proj]
        )

    def _stack_again(self) -> None:
        """After something has put other tensors in the place of weights."""
        stacks = (self._query_weights, self._hidden_weights)
        if not all(stack is None or stack.is_tied for stack in stacks):
            self._stack()

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        super()._apply(fn, recurse)
        self._stack_again()
        return self

    def _streams(self, rows: int, device: torch.device) -> Sequence[torch.cuda.Stream]:
        if rows > AUX_STREAM_MAX_TOKENS or self.compress_ratio == 1:
            return ()
        streams = self.options.aux_streams
        if streams is None:
            return graph_streams(device) if rows <= ONE_LAUNCH_MAX_TOKENS else ()
        return streams

    def _joins_late(self, rows: int) -> bool:
        """Whether the other products of the hidden states may take until that of the queries has ended, and are
        launched behind the first one."""
        return rows > MOST_OWN_ROWS or (self.indexer is not None and rows <= MOST_LATE_INDEXER_ROWS)

    def _other_hidden_weight(self) -> torch.Tensor | None:
        """The bf16 weight that reads the hidden states beside `fused_wqa_wkv`, all of it, if there is one."""
        if self._hidden_weights is not None:
            return self._hidden_weights.weight
        return None if self.compressor is None else self.compressor.fused_wkv_wgate.weight

    def _is_dual(self, rows: int, device: torch.device) -> bool:
        """Whether both products of the hidden states are one launch."""
        other = self._other_hidden_weight()
        if other is None or rows not in DUAL_ROWS or self.options.batch_invariant or device.type != "cuda":
            return False
        first = self.fused_wqa_wkv
        is_fit = first.quantized and first.out_features % 16 == other.shape[0] % 16 == 0
        return is_fit and arch_of(device.index) == "sm_90a"

    def attn_gemm_parallel_execute(
        self, hidden_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, Callable[[], None]]:
        """(qr_kv, kv_score, indexer weights, indexer kv_score, what to call before any of them but the first is used):
        the GEMMs that read the hidden states."""
        device = hidden_states.device
        if self._is_dual(hidden_states.shape[0], device):
            qr_kv, scores = self._dual_products(hidden_states)
            if self._hidden_weights is None:
                return qr_kv, scores, None, None, lambda: None
            kv_score, index_kv_score, index_weights = scores.split(self._hidden_weights.splits, dim=1)
            return qr_kv, kv_score, index_weights, index_kv_score, lambda: None
        streams = self._streams(hidden_states.shape[0], device)

        def run(tasks: Sequence[Callable[[], torch.Tensor]]) -> tuple[list[torch.Tensor], Callable[[], None]]:
            if self._joins_late(hidden_states.shape[0]):
                return start_on_streams(tasks, streams, device, is_first_ahead=True)
            return run_on_streams(tasks, streams, device), lambda: None

        if self._hidden_weights is not None and device.type == "cuda":
            stack, options = self._hidden_weights, self.options
            gemm: dict[str, Any] = {"batch_invariant": options.batch_invariant, "use_pdl": options.use_pdl}
            (qr_kv, scores), join = run(
                [
                    lambda: self.fused_wqa_wkv(hidden_states),
                    lambda: bf16_product(hidden_states, stack.weight, torch.float32, label="hidden", **gemm),
                ]
            )
            kv_score, index_kv_score, index_weights = scores.split(stack.splits, dim=1)
            return qr_kv, kv_score, index_weights, index_kv_score, join
        modules: list[nn.Module] = [self.fused_wqa_wkv]
        if self.compressor is not None:
            modules.append(self.compressor.fused_wkv_wgate)
        if self.indexer is not None:
            modules += [self.indexer.weights_proj, self.indexer.compressor.fused_wkv_wgate]
        tasks = [lambda module=module: module(hidden_states) for module in modules]
        (first, *others), join = run(tasks)
        rest: list[torch.Tensor | None] = [*others, None, None, None]
        return first, rest[0], rest[1], rest[2], join

    def _dual_products(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Both products of the hidden states, by one launch."""
        first, other = self.fused_wqa_wkv, self._other_hidden_weight()
        assert first.scale is not None
        assert other is not None
        rows, use_pdl = first.quantize(hidden_states), self.options.use_pdl
        return fp8_bf16_linear(*rows, first.weight, first.scale, hidden_states, other, use_pdl=use_pdl)

    def forward(
        self,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        metadata: DeepseekV4Metadata | ContextStep | None = None,
        caches: LayerCaches | None = None,
        *,
        capture: dict[str, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """The layer's output, bf16 [T, hidden].

        positions       int64 [T], `metadata.positions`
        hidden_states   bf16 [T, hidden], input after attn_norm; rows past the step's (graph padding) give zeros
        metadata        of DeepseekV4MetadataBuilder, with options.cp of ContextStepBuilder; None: profiling run,
                        reserves workspace, returns zeros
        caches          the layer's caches, mutated; None only in the profiling run
        capture         receives intermediate tensors: kv, q, idx_q, topk, o_raw, o, lse, oa; not with options.cp
        """
        check = self._check_rows(hidden_states)
        if metadata is None:
            self.mla_attn.reserve(hidden_states.device)
            return self._profile(hidden_states)
        caches = self._check_call(check, positions, hidden_states, metadata, caches)
        if capture is not None and self.context is not None:
            check.fail("capture", "None with options.cp", "a dict", TypeError)
        out = torch.empty(hidden_states.shape, dtype=self.o_proj.wo_b.out_dtype, device=hidden_states.device)

        def body(hidden: torch.Tensor, result: torch.Tensor) -> None:
            if isinstance(metadata, ContextStep):
                attended = self._attend_context(hidden, metadata, caches)
                self.o_proj(attended, metadata.positions, self.rotary_emb.cos_sin_cache, None, result)
            else:
                self._forward(hidden, metadata, caches, capture, result)

        def step() -> torch.Tensor:
            self._rows_of_step(hidden_states, metadata, caches, out, body, binds=capture is None)
            return self.tp.sum(out)

        return self._together(step)

    def _together(self, step: Callable[[], T]) -> T:
        """step(), whose collectives are of both groups: if it raises, no rank waits for this one."""
        cp = self.options.cp
        return self.tp.together(step) if cp is None else cp.together(lambda: self.tp.together(step))

    def _attend_context(
        self, hidden: torch.Tensor, step: ContextStep, caches: LayerCaches, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """bf16 [T, heads, 512], in `out` if there is one."""
        assert self.context is not None
        if out is None:
            shape = hidden.shape[0], self.num_heads, self.config.head_dim
            out = torch.empty(shape, dtype=torch.bfloat16, device=hidden.device)
        qr_kv, kv_score, index_weights, index_kv_score, join = self.attn_gemm_parallel_execute(hidden)
        join()
        self.context.attend(qr_kv, (kv_score, index_weights, index_kv_score), step, caches, out[:, : self.num_heads])
        return out

    def attend(
        self,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        metadata: DeepseekV4Metadata | ContextStep | None,
        caches: LayerCaches | None,
        out: torch.Tensor,
    ) -> None:
        """All but the output projection, for an engine that compiles the rest: writes out bf16 [T, heads, 512], which
        `project` takes. Arguments as of `forward`.

        out   may have more heads than the layer has on this rank: those behind stay as they are. Rows past the step's
              (graph padding), and all in the profiling run, are zeros
        """
        check = self._check_rows(hidden_states)
        check.tensor("out", out, torch.bfloat16, (hidden_states.shape[0], None, self.config.head_dim))
        check.require(out.shape[1] >= self.num_heads, "out", f"at least {self.num_heads} heads", list(out.shape))
        if metadata is None:
            self.mla_attn.reserve(hidden_states.device)
            self._profile(hidden_states)
            out.zero_()
            return
        caches = self._check_call(check, positions, hidden_states, metadata, caches)

        def body(hidden: torch.Tensor, result: torch.Tensor) -> None:
            if isinstance(metadata, ContextStep):
                self._attend_context(hidden, metadata, caches, result)
                return
            slots = self.mla_attn.takes_slots
            products = self.attn_gemm_parallel_execute(hidden)
            q, topk, _ = self.attention_front(*products, metadata, caches, slots=slots)
            self.mla_attn(q, caches, metadata, topk, result, slots=slots)

        what = out.shape, out.stride()
        self._together(lambda: self._rows_of_step(hidden_states, metadata, caches, out, body, what=what))

    def project(self, out: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The layer's output, bf16 [T, hidden], from that of `attend`."""
        table = self.rotary_emb.cos_sin_cache
        return self._together(lambda: self.tp.sum(self.o_proj(out[:, : self.num_heads], positions, table)))

    def _check_rows(self, hidden_states: torch.Tensor) -> Checker:
        check = Checker("attention layer")
        check.tensor("hidden_states", hidden_states, torch.bfloat16, (None, self.config.hidden_size))
        return check

    def _check_call(
        self,
        check: Checker,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        metadata: DeepseekV4Metadata | ContextStep,
        caches: LayerCaches | None,
    ) -> LayerCaches:
        if caches is None:
            check.fail("caches", "the layer's caches", "None")
        if isinstance(metadata, ContextStep) != (self.options.cp is not None):
            wanted = "DeepseekV4Metadata" if self.options.cp is None else "a ContextStep with options.cp"
            check.fail("metadata", wanted, type(metadata).__name__)
        parts = metadata.parts if isinstance(metadata, ContextStep) else [metadata]
        for part in parts:
            self._check_step(check, part, caches)
        rows = metadata.num_tokens
        if positions.shape[0] < rows or hidden_states.shape[0] < rows:
            raise ValueError(
                f"attention layer: hidden_states and positions: expected at least {rows} rows as in the metadata, "
                f"got {hidden_states.shape[0]} and {positions.shape[0]}"
            )
        if self.tp.check_steps:
            if isinstance(metadata, ContextStep):
                verify_ranks(metadata.cp.communicator, "step", metadata.numbers)
            if self.tp.size > 1:
                for part in parts:
                    self._verify_step(hidden_states, part)
        return caches

    def verify_ranks(self) -> None:
        """Raise the same ValueError on every rank of a group unless its layers agree in config, options, storage of
        weights and versions. The profiling run does so, too."""
        cp = self.options.cp
        if self.tp.has_collectives or cp is not None:
            options = [f for f in fields(self.options) if f.name not in _OWN_OPTIONS]
            facts = {f.name: str(getattr(self.options, f.name)) for f in options}
            facts |= {f"config.{f.name}": str(getattr(self.config, f.name)) for f in fields(self.config)}
            facts |= {name: f"{buffer.dtype} {tuple(buffer.shape)}" for name, buffer in self.named_buffers()}
            facts |= {f"tp.{name}": str(getattr(self.tp, name)) for name in ("indexer", "partial_dtype", "check_steps")}
            facts |= {f"cp.{name}": str(getattr(cp, name, None)) for name in _OF_CP}
            facts |= {"layer_index": str(self.layer_index), "versions": f"{__version__}, torch {torch.__version__}"}
            if self.tp.has_collectives:
                verify_ranks(self.tp.communicator, "attention layer", facts)
            if cp is not None:
                verify_ranks(cp.communicator, "attention layer", facts)

    def _verify_step(self, hidden_states: torch.Tensor, m: DeepseekV4Metadata) -> None:
        """The same for what a step is given."""
        facts = {"query_start_loc": str(m.query_start_loc_cpu), "num_decodes": str(m.num_decodes)}
        facts |= {"seq_lens": str(m.seq_lens_cpu), "hidden_states": _digest(hidden_states)}
        facts |= {"slots": _digest(m.slot_mapping)}
        if m.compressed_slot_mapping is not None:
            facts["compressed slots"] = _digest(m.compressed_slot_mapping)
        verify_ranks(self.tp.communicator, "step", facts)

    def _profile(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Zeros for every row. The ranks' collectives run once, before a graph is captured: their libraries make
        connections and take memory."""
        self.verify_ranks()
        partial = torch.zeros(hidden_states.shape, dtype=self.o_proj.wo_b.out_dtype, device=hidden_states.device)
        if self.tp.size > 1 and self.tp.indexer != "replicated":
            picks = torch.zeros(self.tp.size, 1, dtype=torch.int32, device=hidden_states.device)
            self.tp.communicator.all_gather(picks, picks[0].clone())
        cp = self.options.cp
        if cp is not None:
            parts = torch.zeros(cp.size, 1, device=hidden_states.device)
            cp.communicator.all_to_all(parts, parts.clone())
        return self.tp.sum(partial)

    def _rows_of_step(
        self,
        hidden_states: torch.Tensor,
        metadata: DeepseekV4Metadata | ContextStep,
        caches: LayerCaches,
        out: torch.Tensor,
        body: Callable[[torch.Tensor, torch.Tensor], None],
        *,
        what: tuple[Any, ...] = (),
        binds: bool = True,
    ) -> None:
        """`body(hidden_states, out)` for the rows of the step; those of `out` behind them are zeros.

        what    what its launches depend on beside step, caches and weights
        binds   they may be kept for other steps
        """
        rows = metadata.num_tokens
        if hidden_states.shape[0] > rows:
            out[rows:].zero_()
            hidden_states, out = hidden_states[:rows], out[:rows]
        key = self._bound_key(hidden_states, metadata) if binds else None
        if key is None:
            body(hidden_states, out)
            return
        key = (key, caches.addresses, self._weight_addresses(), *what)
        has_prefills = isinstance(metadata, DeepseekV4Metadata) and bool(metadata.num_prefill_tokens)
        self._bound.run(key, hidden_states, out, body, has_prefills=has_prefills)

    def _bound_key(self, hidden_states: torch.Tensor, metadata: DeepseekV4Metadata | ContextStep) -> Any:
        """What stands for a step whose launches may be kept for others of its kind, on one stream; None: they may not,
        as those of a context group's prefill rows, whose exchanges lie elsewhere each time."""
        options = self.options
        if not options.bind_steps or not metadata.num_tokens or options.aux_streams:
            return None
        if isinstance(metadata, ContextStep):
            is_kept = metadata.prefills is None
        else:
            is_kept = metadata.num_prefill_tokens <= BOUND_PREFILL_MAX_TOKENS
        if not is_kept or not BoundSteps.apply(hidden_states):
            return None
        return metadata.bound_key if isinstance(metadata, ContextStep) else bound_key(metadata)

    def _weight_addresses(self) -> tuple[int, ...]:
        """Where all weights and buffers of the layer lie: bound steps hold their addresses."""
        if not self._weight_places:
            self._weight_places = [
                (module._buffers, name)
                for module in self.modules()
                for name, buffer in module._buffers.items()
                if buffer is not None
            ]
        found = [buffers[name].data_ptr() for buffers, name in self._weight_places]  # type: ignore[union-attr]
        attention = self.mla_attn
        attention.reserve_parts(self.q_norm_weight.device)
        found += attention.workspace.addresses
        if self.compress_ratio == 4:
            assert self.indexer is not None
            found.append(self.indexer.indexer_op.topk_indices_buffer.data_ptr())
        return tuple(found)

    def _check_step(self, check: Checker, m: DeepseekV4Metadata, caches: LayerCaches) -> None:
        """Refuse metadata and caches of another layer kind or size: they would give numbers, only wrong ones."""
        ratio = self.compress_ratio
        if m.compress_ratio != ratio:
            check.fail("metadata", f"those of compress ratio {ratio}", m.compress_ratio)
        longest = self.rotary_emb.cos_sin_cache.shape[0]
        if m.max_seq_len > longest:
            check.fail("metadata", f"sequences within max_model_len = {longest}", m.max_seq_len)
        compresses, indexes = ratio > 1, ratio == 4
        for name, cache, needed in (
            ("compressed", caches.compressed, compresses), ("state", caches.state, compresses),
            ("indexer", caches.indexer, indexes), ("indexer_state", caches.indexer_state, indexes),
        ):  # fmt: skip
            if (cache is not None) != needed:
                given, expected = ("None", "a cache") if needed else ("a cache", "None")
                check.fail(f"caches.{name}", f"{expected} for compress ratio {ratio}", given)
        if indexes:
            assert self.indexer is not None
            assert caches.indexer is not None
            rows = self.indexer.indexer_op.topk_indices_buffer.shape[0]
            if m.num_tokens > rows:
                check.fail("metadata", f"at most max_num_tokens = {rows} rows", m.num_tokens)
            mine, theirs = INDEX_CACHES[self.options.index_cache], caches.indexer.kv_format
            if not isinstance(theirs, type(mine)):
                check.fail("caches.indexer", f"format {mine.id}", theirs.id)

    def _forward(
        self,
        hidden_states: torch.Tensor,
        m: DeepseekV4Metadata,
        caches: LayerCaches,
        capture: dict[str, torch.Tensor] | None,
        result: torch.Tensor,
    ) -> None:
        """This rank's partial sum, into `result`."""
        qr_kv, kv_score, index_weights, index_kv_score, join = self.attn_gemm_parallel_execute(hidden_states)
        slots = capture is None and self.mla_attn.takes_slots
        device, table = hidden_states.device, self.rotary_emb.cos_sin_cache
        as_codes = capture is None and self.o_proj.takes_codes and m.num_tokens and self.mla_attn.quantizes(device, m)
        squares = None
        if as_codes and self._has_squares(device, m):
            squares = torch.empty(m.num_tokens, self.num_heads * HEAD_BLOCKS, device=device)
        q, topk, kv = self.attention_front(
            qr_kv, kv_score, index_weights, index_kv_score, join, m, caches, capture, slots, squares
        )
        if as_codes:
            codes, memory = self.o_proj.allocate_codes(m.num_tokens, q.device)
            q_norm = None if squares is None else (squares, self.config.rms_norm_eps)
            self.mla_attn(q, caches, m, topk, codes, None, slots, (m.positions, table, memory), q_norm)
            self.o_proj.project(codes, memory.permute(2, 0, 1)[: m.num_tokens], result)
            return
        out = torch.empty(q.shape, dtype=torch.bfloat16, device=q.device)
        lse = None
        if capture is not None:
            lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
            capture["kv"] = numerics.rotate(kv, m.positions, table).bfloat16()
            capture["q"] = q.float() * self.mla_attn.query_scale
        self.mla_attn(q, caches, m, topk, out, lse, slots)
        if capture is not None:
            assert lse is not None
            capture["o_raw"], capture["lse"] = out, lse
            if topk is not None:
                capture["topk"] = topk.clone()
        self.o_proj(out, m.positions, table, capture, result)

    def _has_squares(self, device: torch.device, m: DeepseekV4Metadata) -> bool:
        """Whether the queries' projection leaves their norm and rotation to attention."""
        least = LEAST_RAW_ROWS if m.num_prefill_tokens else LEAST_RAW_DECODE_ROWS
        if self.options.batch_invariant or m.num_tokens < least or not self._is_query_product_fp8(device):
            return False
        return self.mla_attn.takes_raw_queries(device, m)

    def _is_query_product_fp8(self, device: torch.device) -> bool:
        """Whether all queries are one FP8 product of rows that their norm has quantized."""
        if self.indexer is not None and self._query_weights is None:
            return False
        return self.wq_b.quantized and self.wq_b._has_fp8_product(device)

    def _queries(
        self, qr: torch.Tensor, kv: torch.Tensor, squares: torch.Tensor | None, heads: slice = ALL
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """Queries [T, heads, 512], the indexer's [T, heads * 128] if there is one, and the normed kv [T, 512].

        squares   receives the sums of the queries' squares, or None
        heads     those wanted of `query_heads`
        """
        norms = (self.q_norm_weight, self.kv_norm_weight, self.config.rms_norm_eps)
        head_dim, use_pdl = self.config.head_dim, self.options.use_pdl
        shape = -1, head_dim
        stack = self._query_weights
        if not self._is_query_product_fp8(qr.device):
            qr, kv = fused_q_kv_rmsnorm(qr, kv, *norms, use_pdl=use_pdl)
            index_q = None if self.indexer is None else self.indexer.wq_b(qr)
            return self.wq_b(qr).unflatten(-1, shape)[:, heads], index_q, kv
        codes, scale, kv = fused_q_kv_rmsnorm_quant(qr, kv, *norms, use_pdl=use_pdl)
        if heads != ALL:
            rows = slice(heads.start * head_dim, heads.stop * head_dim)
            index_q = None if self.indexer is None else self.indexer.wq_b.multiply(Fp8Rows(codes, scale))
            return self.wq_b.multiply(Fp8Rows(codes, scale), rows=rows).unflatten(-1, shape), index_q, kv
        weight, weight_scale = (stack or self.wq_b).weight, (stack or self.wq_b).scale
        assert weight_scale is not None
        operands = codes, scale, weight, weight_scale
        if squares is not None:
            product, _ = fp8_linear_squares(*operands, squares.shape[1], squares=squares, use_pdl=use_pdl)
        else:
            product = fp8_linear(*operands, batch_invariant=self.options.batch_invariant, use_pdl=use_pdl)
        if stack is None:
            return product.unflatten(-1, shape), None, kv
        q, index_q = product.split(stack.splits, dim=1)
        return q.unflatten(-1, shape), index_q, kv

    def _is_one_launch(self, q: torch.Tensor, caches: LayerCaches) -> bool:
        """Whether everything between the first GEMMs and the scores, or attention, is one launch: few rows, the usual
        formats, and of ratio 128 a GPU with a kernel for it."""
        if self.compressor is None or q.shape[0] > ONE_LAUNCH_MAX_TOKENS:
            return False
        if self.indexer is None and q.is_cuda and arch_of(q.device.index) not in LARGE_CLUSTERS:
            return False
        if caches.swa.kv_format.id != FP8_DS_MLA.id:
            return False
        return caches.indexer is None or caches.indexer.kv_format.id == INDEXER_FP8.id

    def _one_launch(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        kv_score: torch.Tensor,
        index_q: torch.Tensor,
        index_weights: torch.Tensor,
        index_kv_score: torch.Tensor,
        m: DeepseekV4Metadata,
        caches: LayerCaches,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`attention_front` of an indexer's layer behind its GEMMs and before scores, with q in place: the indexer's
        quantized queries and weights."""
        indexer, compressor = self.indexer, self.compressor
        assert indexer is not None
        assert compressor is not None
        assert m.state_slot_mapping is not None
        assert m.state_block_table is not None
        assert m.compressed_slot_mapping is not None
        assert caches.state is not None
        assert caches.compressed is not None
        assert caches.indexer is not None
        assert caches.indexer_state is not None
        return fused_qkv_insert_compress_index(
            q,
            kv,
            caches.swa.data,
            m.slot_mapping,
            m.positions,
            self.rotary_emb.cos_sin_cache,
            m.token_to_req_indices,
            m.query_start_loc,
            m.state_slot_mapping,
            m.state_block_table,
            m.compressed_slot_mapping,
            kv_score,
            compressor.ape,
            compressor.norm_weight,
            caches.state.data,
            caches.compressed.data,
            index_kv_score,
            indexer.compressor.ape,
            indexer.compressor.norm_weight,
            caches.indexer_state.data,
            caches.indexer.data,
            indexer.by_head(index_q),
            index_weights,
            self.config.rms_norm_eps,
            SWA_BLOCK_SIZE,
            indexer.softmax_scale,
            indexer.head_scale,
            min_restart=m.min_restart,
            keep_every=compressor.keep_every,
            persist=compressor.persist,
            kv_format=caches.swa.kv_format.id,
            index_format=caches.indexer.kv_format.id,
            index_hadamard=indexer.index_hadamard,
            round_weights=True,
            use_pdl=self.options.use_pdl,
        )

    def _insert_and_compress(
        self, q: torch.Tensor, kv: torch.Tensor, kv_score: torch.Tensor, m: DeepseekV4Metadata, caches: LayerCaches
    ) -> None:
        """`attention_front` of a layer of ratio 128 behind its GEMMs, in one launch, with q in place."""
        compressor = self.compressor
        assert compressor is not None
        assert m.state_slot_mapping is not None
        assert m.state_block_table is not None
        assert m.compressed_slot_mapping is not None
        assert caches.state is not None
        assert caches.compressed is not None
        fused_qkv_insert_compress(
            q,
            kv,
            caches.swa.data,
            m.slot_mapping,
            m.positions,
            self.rotary_emb.cos_sin_cache,
            m.token_to_req_indices,
            m.query_start_loc,
            m.state_slot_mapping,
            m.state_block_table,
            m.compressed_slot_mapping,
            kv_score,
            compressor.ape,
            compressor.norm_weight,
            caches.state.data,
            caches.compressed.data,
            self.config.rms_norm_eps,
            SWA_BLOCK_SIZE,
            min_restart=m.min_restart,
            persist=compressor.persist,
            kv_format=caches.swa.kv_format.id,
            use_pdl=self.options.use_pdl,
        )

    def attention_front(
        self,
        qr_kv: torch.Tensor,
        kv_score: torch.Tensor | None,
        index_weights: torch.Tensor | None,
        index_kv_score: torch.Tensor | None,
        join: Callable[[], None],
        m: DeepseekV4Metadata,
        caches: LayerCaches,
        capture: dict[str, torch.Tensor] | None = None,
        slots: bool = False,
        squares: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """From the first GEMMs' results to all caches written: (query [T, heads, 512], top-k or None, kv [T, 512]).

        join      called before anything but qr_kv is read of them
        slots     decode rows of top-k are slots of the compressed cache instead of request-local entries
        squares   fp32 [T, heads * 4], receives the sums of the query's squares: it stays as its projection made it, and
                  attention norms and rotates it
        """
        table = self.rotary_emb.cos_sin_cache
        qr, kv = qr_kv.split([self.config.q_lora_rank, self.config.head_dim], dim=-1)
        q, index_q, kv = self._queries(qr, kv, squares)
        # products beside those of the queries may take until here
        join()
        # the kernels that would finish queries which attention finishes get no heads
        unfinished = q if squares is None else q[:, :0]

        def insert_and_compress() -> torch.Tensor:
            query = self.mla_attn.insert(unfinished, kv, caches, m, table)
            if self.compressor is not None:
                assert kv_score is not None
                assert caches.state is not None
                assert caches.compressed is not None
                scale = self.mla_attn.compressor_scale
                self.compressor(kv_score, m, caches.state, caches.compressed, table, scale)
            return query if squares is None else q

        if self.indexer is None:
            if kv_score is not None and self._is_one_launch(q, caches):
                self._insert_and_compress(unfinished, kv, kv_score, m, caches)
                return q, None, kv
            return insert_and_compress(), None, kv
        indexer = self.indexer
        assert index_weights is not None
        assert index_kv_score is not None
        assert caches.indexer is not None
        assert caches.indexer_state is not None
        state, cache = caches.indexer_state, caches.indexer
        if capture is None and self._is_one_launch(q, caches):
            assert kv_score is not None
            assert index_q is not None
            scores = index_q, index_weights, index_kv_score
            scored = self._one_launch(unfinished, kv, kv_score, *scores, m, caches)
            return q, indexer.indexer_op(*scored, cache, m, slots), kv

        def select() -> torch.Tensor:
            assert index_q is not None
            return indexer(index_q, index_kv_score, index_weights, m, state, cache, table, capture, slots=slots)

        query, topk = run_on_streams([insert_and_compress, select], self._streams(q.shape[0], q.device), q.device)
        return query, topk, kv
