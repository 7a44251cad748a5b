# SPDX-License-Identifier: Apache-2.0
"""SGLang's DeepSeek-V4 attention over this package's ops: a plug-in of the group `sglang.srt.plugins`.

    decode    what the backend calls FlashMLA for, decode, verification and dense prefill: sparse_mla_decode
    prefill   the sparse prefill on its gathered workspace: sparse_mla_prefill
    indexer   scores and the best of them, as slots of the cache: score_top_k_decode, or score_top_k_prefill where the
              engine gathers the keys of a long request
    compressor   states saved and entries closed, of the layer and the indexer: fused_compress_norm_rope_store, and
              save_partial_states behind it for chunks. States have the engine's bytes: calls of both may alternate

With the first two, a layer has its own number of heads; otherwise the engine pads them to 64 or 128. Caches, metadata
and everything before and after, the indexer's queries and keys too, stay the engine's.

A subclass takes the place of the backend's class when its module is imported; the draft's steps name that class too.
Backends of other caches or kernels keep their own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from cute_kernels import formats
from cute_kernels.compressor.ops import fused_compress_norm_rope_store, save_partial_states
from cute_kernels.indexer.ops import score_top_k_decode, score_top_k_prefill
from cute_kernels.indices.ops import compute_global_topk_indices_and_lens
from cute_kernels.plugins import PARTS, Plugin, on_import, rebind
from cute_kernels.plugins.sglang_plans import PlannedStep, read_plan
from cute_kernels.sparse_mla.ops import sparse_mla_decode, sparse_mla_prefill

if TYPE_CHECKING:
    Engines = Any  # the mixin's base: the engine's class comes behind it
else:
    Engines = object

PLUGIN = Plugin("sglang", ((0, 5, 23), (0, 5, 24)), ("decode", "prefill", "indexer", "compressor"))

BACKEND = "sglang.srt.layers.attention.deepseek_v4_backend"
BACKEND_CLASS = "DeepseekV4AttnBackend"
KERNELS = "sglang.kernels.ops.attention.flash_mla_interface"
INDEXER = "sglang.srt.layers.attention.dsv4.indexer"
MODEL = "sglang.srt.models.deepseek_v4"

DECODE = "_flash_mla_with_kvcache"
"""The backend's attribute that holds FlashMLA's function."""

PREFILL = "flash_mla_sparse_fwd"
"""FlashMLA's other function, which the backend imports at each call."""


class State:
    """What holds for this process.

    serves       a backend whose calls are served has been made
    in_prefill   the call that runs is the sparse prefill of such a backend
    """

    serves = False
    in_prefill = False


def register() -> None:
    """The entry point. May be called often, and imports nothing of the engine."""
    parts = PLUGIN.requested()
    if not parts or Backend.parts == parts:
        return
    Backend.parts = parts
    on_import(BACKEND, PLUGIN.guard(install_backend))
    if "prefill" in parts:
        on_import(KERNELS, PLUGIN.guard(install_prefill))
    if parts >= {"decode", "prefill"}:
        on_import(MODEL, PLUGIN.guard(install_head_count))


def install_backend(module: ModuleType) -> None:
    base = getattr(module, BACKEND_CLASS)
    rebind(module, BACKEND_CLASS, type("CuteKernelsDeepseekV4AttnBackend", (Backend, base), {}))


def install_prefill(module: ModuleType) -> None:
    original: Callable[..., Any] = getattr(module, PREFILL)

    def flash_mla_sparse_fwd(
        q: Any,
        kv: Any,
        indices: Any,
        sm_scale: float,
        d_v: int = formats.HEAD_DIM,
        attn_sink: Any = None,
        topk_length: Any = None,
        **options: Any,
    ) -> tuple[Any, Any, Any]:
        """Statistics are None in the sparse prefill of a backend that is served: it has no use for them."""
        if State.in_prefill and not options:
            return sparse_mla_prefill(q, kv, indices, sm_scale, d_v, attn_sink, topk_length, return_lse=False)
        found: tuple[Any, Any, Any] = original(q, kv, indices, sm_scale, d_v, attn_sink, topk_length, **options)
        return found

    rebind(module, PREFILL, flash_mla_sparse_fwd)


def install_head_count(module: ModuleType) -> None:
    layer = module.MQALayer
    original = layer._kernel_num_heads

    def _kernel_num_heads(self: Any, num_tokens: int) -> int:
        """As many heads as this rank has, without padding."""
        native = State.serves and not getattr(self, "is_dsv41", False)
        return int(self.n_local_heads if native else original(self, num_tokens))

    layer._kernel_num_heads = _kernel_num_heads


def unsupported(backend: Any) -> str:
    """Why a backend keeps its own kernels; "": it need not."""
    if getattr(backend, DECODE, None) is None:
        return "the backend has no FlashMLA"
    if backend.trtllm_attn or backend.mega_attn:
        return "another backend's kernels are chosen"
    layout = backend.token_to_kv_pool.kv_layout
    if backend.is_dsv41 or backend._swa_interleaved or layout.name != "V4":
        return f"records are {layout.name}"
    if backend.hisparse_coordinator is not None:
        return "caches are partly on the host (HiSparse)"
    return PLUGIN.unproven()


class Backend(Engines):
    parts: frozenset[str] = frozenset()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        reason = unsupported(self)
        self._is_served = not reason
        self._states = States()
        if reason:
            PLUGIN.fall_back("all parts", reason)
            return
        State.serves = True
        if "decode" in self.parts:
            setattr(self, DECODE, partial(self._decode, getattr(self, DECODE)))

    def _decode(self, original: Callable[..., Any], *, q: torch.Tensor, k_cache: torch.Tensor, **call: Any) -> Any:
        """FlashMLA's call with keywords, as this backend makes it. Returns (out, None): nobody reads the sums."""
        extra = call.get("extra_k_cache")
        caches = [cache for cache in (k_cache, extra) if cache is not None]
        reason = ""
        if any(cache.shape[-1] != formats.FP8_DS_MLA.row_elements for cache in caches):
            reason = "records are not of 584 bytes"
        unknown = {name for name, value in call.items() if value is not None} - SERVED
        if unknown:
            reason = f"the call has {sorted(unknown)[0]}"
        if reason:
            PLUGIN.fall_back("decode", reason)
            return original(q=q, k_cache=k_cache, **call)
        self._announce(q)
        return sparse_mla_decode(
            q,
            _pages(k_cache),
            call["indices"],
            topk_length=call.get("topk_length"),
            attn_sink=call.get("attn_sink"),
            softmax_scale=call.get("softmax_scale"),
            extra_k_cache=None if extra is None else _pages(extra),
            extra_indices=call.get("extra_indices_in_kvcache"),
            extra_topk_length=call.get("extra_topk_length"),
            return_lse=False,
        )

    def _forward_prefill_sparse(self, q: Any, *args: Any, **kwargs: Any) -> Any:
        if not self._is_served or "prefill" not in self.parts:
            return super()._forward_prefill_sparse(q, *args, **kwargs)
        self._announce(q)
        with _in_prefill():
            return super()._forward_prefill_sparse(q, *args, **kwargs)

    def forward_c4_indexer(
        self,
        x: torch.Tensor,
        q_lora: torch.Tensor,
        c4_indexer: Any,
        forward_batch: Any,
        alt_streams: Any = None,
        enable_multi_stream: bool = False,
        q_lora_ready: Any = None,
        skip_compressor: bool = False,
        q_lora_quant: Any = None,
    ) -> None:
        is_served = self._is_served and "indexer" in self.parts
        reason = self._why_not_indexer(c4_indexer) if is_served else ""
        if reason:
            PLUGIN.fall_back("indexer", reason)
        if not is_served or reason or forward_batch.forward_mode.is_idle():
            streams = alt_streams, enable_multi_stream, q_lora_ready
            super().forward_c4_indexer(x, q_lora, c4_indexer, forward_batch, *streams, skip_compressor, q_lora_quant)
            return
        core = self.forward_metadata.core_metadata
        rows = min(x.shape[0], q_lora.shape[0], core.positions.shape[0])
        inputs = {
            "x": x[:rows],
            "q_lora": q_lora[:rows],
            "c4_indexer": c4_indexer,
            "positions": core.positions[:rows],
            "forward_batch": forward_batch,
        }
        if enable_multi_stream:
            q, weights = self._forward_prepare_multi_stream(
                **inputs, alt_streams=alt_streams, q_lora_ready=q_lora_ready
            )
        else:
            quantized = q_lora_quant if q_lora.shape[0] == rows else None
            q, weights = self._forward_prepare_normal(**inputs, skip_compressor=skip_compressor, q_lora_quant=quantized)
        if self.parts == {"indexer"}:
            self._announce()
        self._score(q, weights, c4_indexer, forward_batch)

    def _why_not_indexer(self, c4_indexer: Any) -> str:
        if c4_indexer.use_fp4_indexer:
            return "keys are MXFP4"
        if not self.dsa_topk_backend.is_sgl_kernel():
            return "another top-k is chosen"
        if self.debug_use_external_c4_sparse_indices or sys.modules[INDEXER].get_global_indexer_capturer() is not None:
            return "picks come from elsewhere or are recorded"
        return ""

    def _score(self, q: torch.Tensor, weights: torch.Tensor, c4_indexer: Any, forward_batch: Any) -> None:
        """Slots of the best entries of each row, and the entries themselves if the metadata has a place for them."""
        core, paged = self.forward_metadata.core_metadata, self.forward_metadata.indexer_metadata
        # rows beyond the metadata's are padding of a graph
        rows = min(q.shape[0], paged.compressed_seq_lens.shape[0], core.c4_sparse_page_indices.shape[0])
        q, weights, top_k = q[:rows], weights.squeeze(2)[:rows], c4_indexer.index_topk
        lens, table = paged.compressed_seq_lens.flatten()[:rows], paged.page_table[:rows]
        slots, picks = core.c4_sparse_page_indices[:rows, :top_k], core.c4_sparse_raw_indices
        plan = self._get_nonpaged_indexer_plan(
            c4_indexer=c4_indexer,
            forward_batch=forward_batch,
            indexer_metadata=paged,
            page_table=table,
            c4_seq_lens=lens,
            query_rows=rows,
        )
        pool = self.token_to_kv_pool
        if plan is not None:
            keys = self._gather_nonpaged_index_k(c4_indexer=c4_indexer, token_to_kv_pool=pool, plan=plan)
            picks = slots.new_empty(slots.shape) if picks is None else picks[:rows, :top_k]
            # the plan's own ends leave out the rows whose entries are all picked
            score_top_k_prefill(q, keys, weights, plan.ks, lens, top_k, max_seqlen_k=plan.max_seqlen_k, out=picks)
        else:
            pages = pool.get_index_k_with_scale_buffer(layer_id=c4_indexer.layer_id)
            pages = pages.view(pages.shape[0], paged.compressed_page_size, formats.INDEXER_FP8.row_elements)
            scored = q[:, None], pages, weights, lens, table, paged.max_compressed_seq_len, top_k
            if picks is None:
                of_slots = {"slot_block_table": table, "slot_rows_per_page": paged.compressed_page_size}
                score_top_k_decode(*scored, out=slots, **of_slots)
                return
            picks = score_top_k_decode(*scored, out=picks[:rows, :top_k])
        row = torch.arange(rows, dtype=torch.int32, device=q.device)
        compute_global_topk_indices_and_lens(
            picks, row, table, paged.compressed_page_size, torch.ones_like(row, dtype=torch.bool), out_indices=slots
        )

    def forward_unified(self, x: Any, forward_batch: Any, layer_id: int, compressor: Any) -> None:
        self._states.layer = layer_id
        super().forward_unified(x, forward_batch, layer_id, compressor)

    # the model's names for it
    forward_indexer_compressor = forward_core_compressor = forward_unified

    def _forward_compress_all_in_one(self, **call: Any) -> None:
        is_served = self._is_served and "compressor" in self.parts
        reason = self._states.why_not(call) if is_served else ""
        if reason:
            PLUGIN.fall_back("compressor", reason)
        if not is_served or reason:
            super()._forward_compress_all_in_one(**call)
            return
        if self.parts == {"compressor"}:
            self._announce()
        self._states.compress(self._get_paged_compress_metadata(call["compress_ratio"]), call)

    def _announce(self, q: torch.Tensor | None = None) -> None:
        if PLUGIN.is_announced:
            return
        heads = "" if q is None else f"; {q.shape[-2]} heads"
        PLUGIN.announce(f"{type(self).__name__} with {', '.join(p for p in PARTS if p in self.parts)}{heads}")


class States:
    """What the compressor keeps between its calls.

    layer   the one that runs
    """

    def __init__(self) -> None:
        self.layer = 0
        self._steps: dict[Any, tuple[Any, bool, int, PlannedStep]] = {}
        self._tables: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._biases: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}

    def why_not(self, call: dict[str, Any]) -> str:
        """Why a call stays the engine's; "": it need not."""
        states, projected = call["kv_score_buffer"], call["kv_score_input"]
        layout = call.get("kv_layout")
        if call.get("use_fp4_indexer") or call.get("bf16_store") or call.get("fp8_2buff"):
            return "entries are of another format"
        if layout is not None and layout.name != "V4":
            return f"entries are {layout.name}"
        if states.dtype != torch.float32 or projected.dtype != torch.float32:
            return f"states are {states.dtype}, projections {projected.dtype}"
        if states.shape[-1] != projected.shape[-1]:
            return "states are sums (online compression)"
        known = self._tables.get(call["freqs_cis_cache"].data_ptr()), self._biases.get(call["ape"].data_ptr())
        if None in known and is_capturing():
            return "its first call is in a graph"
        return ""

    def compress(self, plan: Any, call: dict[str, Any]) -> None:
        states, projected, ratio = call["kv_score_buffer"], call["kv_score_input"], call["compress_ratio"]
        entry_slots, pages, page_rows = call["out_loc"], call["kv_cache"], call["page_size"]
        rows = min(projected.shape[0], entry_slots.shape[0])
        if rows == 0:
            return
        step = self._step(plan, ratio, call["is_indexer"], rows)
        fmt = formats.INDEXER_FP8 if call["is_indexer"] else formats.FP8_DS_MLA
        states = states.view(-1, ratio, states.shape[-1])
        ape, no_ape = self._bias(call["ape"], ratio)
        fused_compress_norm_rope_store(
            projected,
            ape,
            step.positions,
            step.requests,
            step.starts,
            states,
            step.slots,
            step.table,
            self._table(call["freqs_cis_cache"]),
            pages[:, : fmt.row_elements * page_rows].view(pages.shape[0], page_rows, fmt.row_elements),
            entry_slots.long(),
            call["norm"].weight,
            call["norm"].variance_epsilon,
            ratio,
            kv_format=fmt.id,
            persist="all" if step.restart is None else "window",
            min_restart=step.restart,
            index_hadamard=call["is_indexer"],
            cyclic_table=True,
            raw_scores=True,
        )
        if step.kept is None:
            return
        width = projected.shape[1] // 2
        save_partial_states(
            projected[:, :width], projected[:, width:], no_ape, step.positions, states, step.kept, ratio,
            width, ratio,
        )  # fmt: skip

    def _step(self, plan: Any, ratio: int, of_indexer: bool, rows: int) -> PlannedStep:
        """Read once for all layers of a pass. Its tensors belong to the stream of these calls, and a graph computes its
        own: the engine writes its next plan into the same memory."""
        kind = ratio, of_indexer, rows
        found = self._steps.get(kind)
        if found is None or found[0] is not plan[1] or found[1] != is_capturing() or self.layer <= found[2]:
            step = read_plan(plan, ratio, rows)
            self._steps = {k: v for k, v in self._steps.items() if k[:2] != kind[:2]}
        else:
            step = found[3]
        self._steps[kind] = plan[1], is_capturing(), self.layer, step
        return step

    def _table(self, turns: torch.Tensor) -> torch.Tensor:
        """fp32 [positions, 64], cosines then sines, of a complex table."""
        found = self._tables.get(turns.data_ptr())
        if found is None:
            found = self._tables[turns.data_ptr()] = turns, torch.cat([turns.real, turns.imag], dim=-1).float()
        return found[1]

    def _bias(self, ape: torch.Tensor, ratio: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The bias of scores, and as many zeros. Of ratio 4 the engine has the halves of columns one after the other;
        they are put in order wherever no graph is captured, as weights may be loaded again, in place."""
        found = self._biases.get(ape.data_ptr())
        if found is None:
            own = torch.empty_like(ape) if ratio == 4 else ape
            found = self._biases[ape.data_ptr()] = ape, own, torch.zeros_like(ape)
        if ratio == 4 and not is_capturing():
            found[1].view(4, 2, -1).copy_(ape.view(2, 4, -1).transpose(0, 1))
        return found[1:]


def is_capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


SERVED = {
    "head_dim_v", "tile_scheduler_metadata", "softmax_scale", "is_fp8_kvcache", "indices", "topk_length", "attn_sink",
    "extra_k_cache", "extra_indices_in_kvcache", "extra_topk_length",
}  # fmt: skip
"""Arguments of FlashMLA's call that may have a value."""


def _pages(cache: torch.Tensor) -> torch.Tensor:
    """[pages, rows, 1, 584] as uint8 [pages, rows, 584]."""
    return cache.squeeze(2).view(torch.uint8)


@contextmanager
def _in_prefill() -> Iterator[None]:
    State.in_prefill = True
    try:
        yield
    finally:
        State.in_prefill = False
