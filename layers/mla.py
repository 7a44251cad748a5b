# SPDX-License-Identifier: Apache-2.0
"""Sparse MLA over paged caches, in the two cache families: fp8_ds_mla pages, and plain bf16 or per-tensor fp8 rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from cute_kernels.formats import round_up
from cute_kernels.indices.ops import (
    build_flashinfer_mixed_sparse_indices,
    compute_global_topk_indices_and_lens,
)
from cute_kernels.kv_cache.ops import (
    fused_deepseek_v4_qnorm_rope_kv_rope_full_cache_bf16_insert,
    fused_deepseek_v4_qnorm_rope_kv_rope_full_cache_fp8_insert,
    fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert,
)
from cute_kernels.runtime.arch import arch_of
from cute_kernels.sparse_mla.ops import (
    PREFILL_FORMS,
    sparse_mla_decode,
    sparse_mla_decode_workspace_size,
    sparse_mla_mixed,
    sparse_mla_prefill_paged,
    sparse_mla_prefill_paged_form,
    sparse_mla_prefill_paged_workspace_size,
)

from .caches import KV_BLOCK_SIZE, SWA_BLOCK_SIZE, LayerCaches
from .config import DeepseekV4Config
from .metadata import DeepseekV4Metadata

PREFILL_CHUNK_SIZE = 4
"""Prefill requests gathered into the workspace at a time."""


LEAST_QUANTIZED_HEADS = 64
"""Prefill's kernels for fewer heads, which are faster there, leave rotation and quantization of the output to a launch
behind."""

LEAST_QUANTIZED_ROWS = 33
"""In decode, of so few heads and of a window alone, fewer rows do so, too: 8 heads of 1 and 8 rows, 25.6 and 25.7 us a
layer so, 26.9 otherwise; of 64 rows 33.4 and 31.6 (H200)."""

LEAST_RAW_HEADS = 17
"""Decode's kernel for fewer heads and many rows takes no raw queries."""

LEAST_RAW_C128A_HEADS = 128
"""The launch that norms and rotates queries of a decode step also compresses, where the ratio is 128, and takes about
as long without them: of 256 rows and 64 heads a layer takes 128.1 us with raw queries and 123.7 without, of 128 heads
255.4 and 257.5 (H100, perf/log/query_norm.md)."""

OutputQuant = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Positions int64 [T], rotary table, and memory of scales: see `sparse_mla_decode`."""


def _first(x: torch.Tensor | None, rows: int) -> torch.Tensor | None:
    return None if x is None else x[:rows]


class Workspace:
    """Scratch memory that is reused, and shared by all layers of a model: for the prefill gather, which may make it
    grow, and for the splits of decode rows, where it stays where it is: all layers ask for the same number of bytes.

    It does not grow while a CUDA graph is captured, and what a captured step was given stays as long as this object."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.bfloat16)
        self._parts = torch.empty(0)
        self._captured: dict[int, torch.Tensor] = {}

    def _at_least(self, memory: torch.Tensor, count: int, device: torch.device) -> torch.Tensor:
        """`memory`, or new memory where it is too small or elsewhere."""
        is_enough = memory.numel() >= count and memory.device == device
        is_captured = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if is_captured and not is_enough:
            need, have = count * memory.element_size(), memory.nbytes
            raise RuntimeError(
                f"Workspace: expected {need} bytes on {device} before a CUDA graph is captured, got {have} on "
                f"{memory.device}: memory made inside would be the graph's. Run the layer with metadata None "
                "(mla_attn.reserve), or the step once, before the capture."
            )
        if is_captured:
            self._captured[memory.data_ptr()] = memory
        return memory if is_enough else torch.empty(count, dtype=memory.dtype, device=device)

    def get(self, rows: int, columns: int, width: int, device: torch.device) -> torch.Tensor:
        """Uninitialized bf16 [rows, columns, width]."""
        size = rows * columns * width
        self._buffer = self._at_least(self._buffer, size, device)
        return self._buffer[:size].view(rows, columns, width)

    @property
    def nbytes(self) -> int:
        """What it holds by now for steps to come."""
        return self._buffer.nbytes + self._parts.nbytes

    @property
    def address(self) -> int:
        """Of the splits of decode rows."""
        return self._parts.data_ptr()

    @property
    def addresses(self) -> tuple[int, int]:
        """Of all that it holds."""
        return self._buffer.data_ptr(), self._parts.data_ptr()

    def bytes(self, size: int, device: torch.device) -> torch.Tensor:
        """Uninitialized uint8 [size], the same memory as of `get`."""
        self._buffer = self._at_least(self._buffer, -(-size // 2), device)
        return self._buffer.view(torch.uint8)[:size]

    def parts(self, size: int, device: torch.device) -> torch.Tensor:
        """`size` bytes of uninitialized fp32, for `sparse_mla_decode`."""
        self._parts = self._at_least(self._parts, size // 4, device)
        return self._parts[: size // 4]


class DeepseekV4MLAAttention(nn.Module):
    """Attention over fp8_ds_mla caches: decode rows straight from the pages, prefill rows gathered or paged.

    num_heads   heads of this rank
    prefill     "gathered": pages are dequantized into a bf16 workspace first; "paged": straight from the pages; "auto":
                what is faster for a step by `sparse_mla_prefill_paged_form`, and as much workspace as "gathered". Bits
                may differ between forms
    batch_invariant
                no row is split, so that its bits depend on nothing else in a step. Few rows take longer: else
                how they are cut follows from how many there are. Not with prefill "auto", which goes by the step too
    attn_sink   fp32 [num_heads], a virtual logit per head
    """

    attn_sink: torch.Tensor
    takes_slots = True
    """Decode rows' picks may come as slots of the compressed cache."""

    def __init__(
        self,
        config: DeepseekV4Config,
        compress_ratio: int,
        num_heads: int,
        *,
        max_model_len: int,
        max_num_tokens: int,
        prefill: str = "gathered",
        batch_invariant: bool = False,
        use_pdl: bool = False,
        workspace: Workspace | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        if prefill not in PREFILL_FORMS:
            raise ValueError(f"DeepseekV4MLAAttention: prefill: expected one of {PREFILL_FORMS}, got {prefill!r}")
        if batch_invariant and prefill == "auto":
            raise ValueError("DeepseekV4MLAAttention: prefill: expected one form with batch_invariant, got 'auto'")
        self.config, self.compress_ratio, self.num_heads = config, compress_ratio, num_heads
        self.max_model_len, self.max_num_tokens = max_model_len, max_num_tokens
        self.scale, self.window, self.prefill = config.softmax_scale, config.sliding_window, prefill
        self.use_pdl = use_pdl
        self.num_splits = 1 if batch_invariant else 0
        self.workspace = workspace or Workspace()
        self._reserved: Workspace | None = None
        self.query_scale = 1.0
        self.register_buffer("attn_sink", torch.zeros(num_heads, device=device))

    def reserve(self, device: torch.device) -> None:
        """Allocate the largest workspace a step can need (profiling run)."""
        self._decode_workspace(device)
        if self.prefill != "paged":
            entries, columns = 0, None
            if self.compress_ratio > 1:
                page = KV_BLOCK_SIZE // self.compress_ratio
                entries = round_up(-(-self.max_model_len // self.compress_ratio), page)
                columns = self.config.index_topk if self.compress_ratio == 4 else None
            size = self._gathered_bytes(self.max_num_tokens, PREFILL_CHUNK_SIZE, entries, columns)
            self.workspace.bytes(size, device)

    def reserve_parts(self, device: torch.device) -> None:
        """Allocate what decode steps need, once."""
        if self._reserved is not self.workspace:
            self._decode_workspace(device)
            self._reserved = self.workspace

    def _decode_workspace(self, device: torch.device) -> torch.Tensor:
        """What a decode step of any layer of this model can need, whatever its kind."""
        entries = max(self.config.index_topk, -(-self.max_model_len // 128))
        size = sparse_mla_decode_workspace_size(
            self.max_num_tokens, 1, self.num_heads, self.window, entries, num_splits=self.num_splits, device=device
        )
        return self.workspace.parts(size, device)

    def insert(
        self, q: torch.Tensor, kv: torch.Tensor, caches: LayerCaches, m: DeepseekV4Metadata, cos_sin_cache: torch.Tensor
    ) -> torch.Tensor:
        """Normalize and rotate q [T, heads, 512] in place, rotate and store kv [T, 512]; returns the final query."""
        fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert(
            q,
            kv,
            caches.swa.data,
            m.slot_mapping,
            m.positions,
            cos_sin_cache,
            self.config.rms_norm_eps,
            SWA_BLOCK_SIZE,
            kv_format=caches.swa.kv_format.id,
            use_pdl=self.use_pdl,
        )
        return q

    @property
    def compressor_scale(self) -> torch.Tensor | None:
        """Scale of the compressed cache, for per-tensor formats."""
        return None

    def forward(
        self,
        q: torch.Tensor,
        caches: LayerCaches,
        metadata: DeepseekV4Metadata,
        topk_indices: torch.Tensor | None,
        out: torch.Tensor,
        lse: torch.Tensor | None = None,
        slots: bool = False,
        output_quant: OutputQuant | None = None,
        q_norm: tuple[torch.Tensor, float] | None = None,
    ) -> None:
        """Attend with q bf16 [T, heads, 512]; writes out bf16 [T, heads, 512] and, if it is given, lse fp32 [T, heads].

        out            may have more heads than q, as engines pad them: those behind stay as they are
        topk_indices   int32 [T, K], request-local entries (C4A); None for the other kinds
        slots          those of decode rows are slots of the compressed cache
        output_quant   (positions, rotary table, memory of scales): out is e4m3 [T, groups, columns], what the output
                       projection reads (`sparse_mla_decode`). Only where `quantizes` says so
        q_norm         q is as its projection made it, with these sums of squares and eps (`sparse_mla_decode`,
                       `sparse_mla_prefill`): only where `takes_raw_queries` says so
        """
        rows = metadata.num_decode_tokens
        if output_quant is None:
            out = out[:, : q.shape[1]]
        if rows:
            decode = q[:rows], caches, metadata, topk_indices, out[:rows], _first(lse, rows), slots, output_quant
            self._decode(*decode, q_norm)
        if metadata.num_prefill_tokens:
            prefill = q, caches, metadata, topk_indices, out, lse, output_quant
            if self._form(q.device, metadata) == "gathered":
                self._prefill_gathered(*prefill, q_norm)
            else:
                self._prefill_paged(*prefill)

    def takes_raw_queries(self, device: torch.device, m: DeepseekV4Metadata) -> bool:
        """Whether `forward` can norm and rotate the queries itself, where it stores codes: of decode rows, or of one
        chunk of gathered rows."""
        if not self.quantizes(device, m):
            return False
        if not m.num_prefill_tokens:
            return self.num_heads >= (LEAST_RAW_C128A_HEADS if self.compress_ratio == 128 else LEAST_RAW_HEADS)
        return self._form(device, m) == "gathered"

    def quantizes(self, device: torch.device, m: DeepseekV4Metadata) -> bool:
        """Whether one attention kernel writes all rows of a step, and can write them as the output projection reads
        them."""
        if device.type != "cuda" or arch_of(device.index) != "sm_90a":
            return False
        if self.num_heads < LEAST_QUANTIZED_HEADS and (
            m.num_prefill_tokens or (self.compress_ratio == 1 and m.num_decode_tokens < LEAST_QUANTIZED_ROWS)
        ):
            return False
        if not m.num_decode_tokens and self._form(device, m) == "gathered":
            return m.num_prefills <= PREFILL_CHUNK_SIZE
        return not m.num_decode_tokens or not m.num_prefill_tokens

    def _form(self, device: torch.device, m: DeepseekV4Metadata) -> str:
        """Of a step's prefill rows."""
        if self.prefill != "auto":
            return self.prefill
        context = max(m.seq_lens_cpu[m.num_decodes : m.num_decodes + m.num_prefills])
        entries = context // self.compress_ratio if self.compress_ratio > 1 else 0
        columns = self.config.index_topk if self.compress_ratio == 4 else None
        step = m.num_prefill_tokens, m.num_prefills, self.num_heads, entries, columns
        # rows whose results are codes are not split
        is_one_call = not m.num_decode_tokens and m.num_prefills <= PREFILL_CHUNK_SIZE
        may_split = not is_one_call or self.num_heads < LEAST_QUANTIZED_HEADS
        return sparse_mla_prefill_paged_form(*step, window_size=self.window, may_split=may_split, device=device)

    def _decode(
        self,
        q: torch.Tensor,
        caches: LayerCaches,
        m: DeepseekV4Metadata,
        topk_indices: torch.Tensor | None,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        slots: bool,
        output_quant: OutputQuant | None,
        q_norm: tuple[torch.Tensor, float] | None,
    ) -> None:
        shape = m.decode_batch()
        rows = m.num_decode_tokens
        extra: dict[str, Any] = {}
        # those of the step's metadata, whose kernel lets no other begin before it has ended
        constant_lists = 2
        if caches.compressed is not None:
            assert m.compressed_block_table is not None
            extra = {"extra_k_cache": caches.compressed.data, "extra_kv_format": caches.compressed.kv_format.id}
            if self.compress_ratio == 4:
                assert topk_indices is not None
                assert m.decode_topk_lens is not None
                indices, lens = topk_indices[:rows], m.decode_topk_lens
                constant_lists = 1 if slots else 0
                if not slots:
                    indices, lens = compute_global_topk_indices_and_lens(
                        indices,
                        m.token_to_req_indices[:rows],
                        m.compressed_block_table,
                        KV_BLOCK_SIZE // self.compress_ratio,
                        m.is_valid_token[:rows],
                    )
                extra |= {"extra_indices": indices.unflatten(0, shape), "extra_topk_length": lens.view(shape)}
            else:
                assert m.c128a_decode_topk_lens is not None
                extra |= {
                    "extra_block_table": m.decode_block_table(),
                    "extra_length": m.c128a_decode_topk_lens.view(shape),
                }
        sparse_mla_decode(
            q.unflatten(0, shape),
            caches.swa.data,
            m.decode_swa_indices.view(*shape, -1),
            topk_length=m.decode_swa_lens.view(shape),
            attn_sink=self.attn_sink,
            softmax_scale=self.scale,
            kv_format=caches.swa.kv_format.id,
            num_splits=self.num_splits,
            out=out.unflatten(0, shape) if output_quant is None else out,
            lse=None if lse is None else lse.unflatten(0, shape).transpose(1, 2),
            return_lse=False,
            workspace=self._decode_workspace(q.device),
            q_norm=q_norm,
            output_quant=output_quant,
            constant_lists=constant_lists,
            **extra,
        )

    def _prefill_paged(
        self,
        q: torch.Tensor,
        caches: LayerCaches,
        m: DeepseekV4Metadata,
        topk_indices: torch.Tensor | None,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        output_quant: OutputQuant | None,
    ) -> None:
        first = m.num_decode_tokens
        compressed = caches.compressed
        table = m.compressed_block_table
        sparse_mla_prefill_paged(
            q[first:],
            caches.swa.data,
            m.swa_block_table[m.num_decodes :],
            m.query_start_loc[m.num_decodes :],
            m.prefill_seq_lens,
            self.scale,
            window_size=self.window,
            compressed_cache=None if compressed is None else compressed.data,
            compressed_block_table=None if table is None else table[m.num_decodes :],
            compress_ratio=self.compress_ratio,
            topk_indices=None if topk_indices is None else topk_indices[first:],
            attn_sink=self.attn_sink,
            kv_format=caches.swa.kv_format.id,
            compressed_kv_format=caches.swa.kv_format.id if compressed is None else compressed.kv_format.id,
            num_splits=self.num_splits,
            out=out[first:],
            lse=None if lse is None else lse[first:],
            return_lse=False,
            form="paged",
            output_quant=output_quant,
        )

    def _prefill_gathered(
        self,
        q: torch.Tensor,
        caches: LayerCaches,
        m: DeepseekV4Metadata,
        topk_indices: torch.Tensor | None,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        output_quant: OutputQuant | None,
        q_norm: tuple[torch.Tensor, float] | None,
    ) -> None:
        end = m.num_decodes + m.num_prefills
        for first in range(m.num_decodes, end, PREFILL_CHUNK_SIZE):
            last = min(first + PREFILL_CHUNK_SIZE, end)
            self._gathered_chunk(q, caches, m, topk_indices, out, lse, output_quant, q_norm, first, last)

    def _gathered_chunk(
        self,
        q: torch.Tensor,
        caches: LayerCaches,
        m: DeepseekV4Metadata,
        topk_indices: torch.Tensor | None,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        output_quant: OutputQuant | None,
        q_norm: tuple[torch.Tensor, float] | None,
        first: int,
        last: int,
    ) -> None:
        starts = m.query_start_loc_cpu
        rows, requests = slice(starts[first], starts[last]), slice(first, last)
        compressed, table, entries = caches.compressed, None, 0
        if compressed is not None:
            assert m.compressed_block_table is not None
            # of what the longest context has
            entries = round_up(max(m.seq_lens_cpu[requests]) // self.compress_ratio, compressed.block_size)
            table = m.compressed_block_table[requests, : entries // compressed.block_size]
        picks = None if topk_indices is None else topk_indices[rows]
        columns = None if picks is None else picks.shape[1]
        size = self._gathered_bytes(rows.stop - rows.start, last - first, entries, columns)
        sparse_mla_prefill_paged(
            q[rows],
            caches.swa.data,
            m.swa_block_table[requests],
            m.query_start_loc[first : last + 1],
            m.seq_lens[requests],
            self.scale,
            window_size=self.window,
            compressed_cache=None if compressed is None else compressed.data,
            compressed_block_table=table,
            compress_ratio=self.compress_ratio,
            topk_indices=picks,
            attn_sink=self.attn_sink,
            kv_format=caches.swa.kv_format.id,
            compressed_kv_format=caches.swa.kv_format.id if compressed is None else compressed.kv_format.id,
            num_splits=self.num_splits,
            out=out[rows],
            lse=None if lse is None else lse[rows],
            return_lse=False,
            workspace=self.workspace.bytes(size, q.device),
            form="gathered",
            q_norm=q_norm,
            output_quant=output_quant,
        )

    def _gathered_bytes(self, rows: int, requests: int, entries: int, columns: int | None) -> int:
        """Workspace for so many rows of requests with so many entries at most; columns: of what names entries."""
        return sparse_mla_prefill_paged_workspace_size(rows, requests, entries, columns, window_size=self.window)


class DeepseekV4FlashInferMLASparseImpl(DeepseekV4MLAAttention):
    """Attention over plain caches: one mixed index matrix for all rows, then one call for decodes and one for prefills.

    The query has the caches' dtype. Per-tensor scales: q_scale (value of one unit of an fp8 query) and kv_scale.
    """

    fp8_kv_scale: torch.Tensor
    q_scale_inv: torch.Tensor
    takes_slots = False

    def __init__(
        self,
        config: DeepseekV4Config,
        compress_ratio: int,
        num_heads: int,
        *,
        max_model_len: int,
        max_num_tokens: int,
        fp8: bool,
        q_scale: float = 1.0,
        kv_scale: float = 1.0,
        use_pdl: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__(
            config,
            compress_ratio,
            num_heads,
            max_model_len=max_model_len,
            max_num_tokens=max_num_tokens,
            prefill="paged",
            use_pdl=use_pdl,
            device=device,
        )
        self.fp8 = fp8
        self.init_layer_buffers(q_scale, kv_scale)

    def reserve(self, device: torch.device) -> None:
        """Steps need no workspace."""

    def reserve_parts(self, device: torch.device) -> None:
        """Nor do decode steps."""

    def quantizes(self, device: torch.device, m: DeepseekV4Metadata) -> bool:
        return False

    def init_layer_buffers(self, q_scale: float = 1.0, kv_scale: float = 1.0) -> None:
        """Set the per-tensor scales: tensors for the insert and the compressor, Python floats for the attention."""
        device = self.attn_sink.device
        self.register_buffer("fp8_kv_scale", torch.tensor([kv_scale], device=device))
        self.register_buffer("q_scale_inv", torch.tensor([1.0 / q_scale], device=device))
        self.query_scale = q_scale if self.fp8 else 1.0
        self.bmm1_scale = self.scale * q_scale * kv_scale if self.fp8 else self.scale
        self.bmm2_scale = kv_scale if self.fp8 else 1.0

    @property
    def compressor_scale(self) -> torch.Tensor | None:
        return self.fp8_kv_scale if self.fp8 else None

    def insert(
        self, q: torch.Tensor, kv: torch.Tensor, caches: LayerCaches, m: DeepseekV4Metadata, cos_sin_cache: torch.Tensor
    ) -> torch.Tensor:
        eps = self.config.rms_norm_eps
        cache = caches.swa.data
        if not self.fp8:
            fused_deepseek_v4_qnorm_rope_kv_rope_full_cache_bf16_insert(
                q, kv, cache, m.slot_mapping, m.positions, cos_sin_cache, eps, SWA_BLOCK_SIZE, use_pdl=self.use_pdl
            )
            return q
        q_fp8 = torch.empty(q.shape, dtype=torch.float8_e4m3fn, device=q.device)
        fused_deepseek_v4_qnorm_rope_kv_rope_full_cache_fp8_insert(
            q,
            kv,
            q_fp8,
            cache,
            m.slot_mapping,
            m.positions,
            cos_sin_cache,
            self.fp8_kv_scale,
            self.q_scale_inv,
            eps,
            SWA_BLOCK_SIZE,
            use_pdl=self.use_pdl,
        )
        return q_fp8

    def _build_sparse_index_metadata(
        self, caches: LayerCaches, m: DeepseekV4Metadata, topk_indices: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """(compressed cache, seq_lens, sparse_indices, sparse_topk_lens) of all rows of the step. A layer that does not
        compress has its window cache in place of the first."""
        decodes = m.num_decode_tokens
        decode_indices = decode_lens = None
        block_size = SWA_BLOCK_SIZE
        if self.compress_ratio == 1:
            prefill_indices = torch.empty(m.num_prefill_tokens, 0, dtype=torch.int32, device=m.positions.device)
            topk = 0
        elif self.compress_ratio == 4:
            assert topk_indices is not None
            decode_indices, prefill_indices, topk = (
                topk_indices[:decodes],
                topk_indices[decodes:],
                topk_indices.shape[1],
            )
            block_size = KV_BLOCK_SIZE // 4
        else:
            assert m.c128a_prefill_topk_indices is not None
            decode_indices, decode_lens = m.c128a_global_decode_topk_indices, m.c128a_decode_topk_lens
            prefill_indices, topk = m.c128a_prefill_topk_indices, m.c128a_prefill_topk_indices.shape[1]
            block_size = KV_BLOCK_SIZE // 128
        indices, lens = build_flashinfer_mixed_sparse_indices(
            m.decode_swa_indices.squeeze(1),
            decode_indices,
            decode_lens,
            prefill_indices,
            m.query_start_loc,
            m.seq_lens,
            m.token_to_req_indices,
            m.swa_block_table,
            SWA_BLOCK_SIZE,
            m.compressed_block_table,
            block_size,
            self.window,
            self.compress_ratio,
            topk,
            self.compress_ratio == 4,
            m.is_valid_token[:decodes],
        )
        compressed = caches.swa if caches.compressed is None else caches.compressed
        return compressed.data, m.seq_lens, indices, lens

    def forward(
        self,
        q: torch.Tensor,
        caches: LayerCaches,
        metadata: DeepseekV4Metadata,
        topk_indices: torch.Tensor | None,
        out: torch.Tensor,
        lse: torch.Tensor | None = None,
        slots: bool = False,
        output_quant: OutputQuant | None = None,
        q_norm: tuple[torch.Tensor, float] | None = None,
    ) -> None:
        m, out = metadata, out[:, : q.shape[1]]
        compressed, seq_lens, indices, lens = self._build_sparse_index_metadata(caches, m, topk_indices)
        requests = m.num_decodes + m.num_prefills
        for first, last in ((0, m.num_decodes), (m.num_decodes, requests)):
            rows = slice(m.query_start_loc_cpu[first], m.query_start_loc_cpu[last])
            if rows.start == rows.stop:
                continue
            starts = m.query_start_loc[first : last + 1]
            sparse_mla_mixed(
                q[rows],
                caches.swa.data,
                indices[rows],
                compressed,
                lens[rows],
                seq_lens[first:last],
                starts - starts[0],
                self.bmm1_scale,
                self.bmm2_scale,
                self.attn_sink,
                window_size=self.window,
                out=out[rows],
                lse=None if lse is None else lse[rows],
            )
