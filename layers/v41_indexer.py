# SPDX-License-Identifier: Apache-2.0
"""V4.1's indexer: each row's best entries, of all or of candidate blocks, and the candidate blocks."""

from __future__ import annotations

from typing import Any

import torch

from cute_kernels import numerics
from cute_kernels.indexer.ops import (
    all_visible_entries,
    cp_gather_indexer_k_quant_cache,
    fused_indexer_q_rope_quant,
    mqa_logits,
    paged_mqa_logits,
    score_top_k_decode,
    score_top_k_prefill,
    score_top_k_workspace_size,
    select_candidate_blocks,
    top_k_per_row_decode,
)
from cute_kernels.indices.ops import compute_global_topk_indices_and_lens
from cute_kernels.runtime.arch import arch_of

from .caches import DeepseekV4IndexerCache
from .indexer import SCORE_BYTES, Quantized, _rows, step_columns
from .linear import Linear
from .v41_config import CANDIDATE_BLOCK, DeepseekV41Config
from .v41_step import V41Entries, V41Selection, V41Step

MOST_GATHERED = 1 << 20
"""Keys of prefill requests that are gathered at a time; one request may have more."""

MOST_SHARED = 1 << 15
"""Keys of a prefill's requests up to which rows are scored against all of them: neighbouring rows share keys in such a
product, which they do not in one of their candidates alone."""


def _has_compact_scores(device: torch.device) -> bool:
    """Whether a kernel reads the keys of candidate blocks alone. The reference does so, too."""
    return device.type != "cuda" or arch_of(device.index) == "sm_90a"


def _leave_out_others(logits: torch.Tensor, candidates: torch.Tensor) -> None:
    """Scores of entries [rows, n] outside candidate blocks [rows, C], -1 being none, become -inf."""
    rows, columns = logits.shape
    blocks = -(-columns // CANDIDATE_BLOCK)
    other = torch.ones(rows, blocks + 1, dtype=torch.bool, device=logits.device)
    other.scatter_(1, torch.where(candidates < 0, blocks, candidates).long(), False)
    logits.masked_fill_(other[:, :blocks].repeat_interleave(CANDIDATE_BLOCK, 1)[:, :columns], -torch.inf)


class V41Indexer(torch.nn.Module):
    """Queries and weights of an index source, and its selection. Replicated on every tensor-parallel rank.

    use_fp4   MXFP4 queries, for keys of that format
    """

    def __init__(
        self,
        config: DeepseekV41Config,
        layer_index: int,
        *,
        use_fp4: bool,
        batch_invariant: bool = False,
        use_pdl: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        self.use_pdl = use_pdl
        self.config, self.layer_index, self.use_fp4 = config, layer_index, use_fp4
        self.ratio = config.compress_ratio_of(layer_index)
        self.makes_candidates = layer_index == config.candidate_source_layer_id
        self.takes_candidates = config.takes_candidates(layer_index)
        heads, dim = config.index_n_heads, config.index_head_dim
        how: dict[str, Any] = {"batch_invariant": batch_invariant, "use_pdl": use_pdl}
        gemm = {"quantized": False, "device": device, **how}
        self.wq_b = Linear(config.q_lora_rank, heads * dim, label="indexer.wq_b", **gemm)
        self.weights_proj = Linear(config.hidden_size, heads, label="indexer.weights_proj", **gemm)

    def forward(
        self,
        qr: torch.Tensor,
        hidden_states: torch.Tensor,
        keys: DeepseekV4IndexerCache,
        step: V41Step,
        before: V41Selection | None,
        cos_sin_cache: torch.Tensor,
    ) -> V41Selection:
        """The selection of a step. qr: normed latent queries bf16 [T, q_lora_rank]. before: that of the layers before,
        whose candidates this one may be restricted to, or hands on."""
        config, m, entries = self.config, step.window, step.entries[self.ratio]
        q, weights = self.queries(qr, hidden_states, step, cos_sin_cache)
        device, rows = qr.device, m.num_tokens
        picks = torch.empty(rows, config.index_topk, dtype=torch.int32, device=device)
        of, candidates = (None, None) if before is None else (before.candidate_of, before.candidates)
        if step_columns(entries.longest) <= config.index_topk:
            all_visible_entries(entries.visible, config.index_topk, out=picks)
            if self.makes_candidates:
                of, candidates = self.layer_index, None
        else:
            if self.makes_candidates:
                of = self.layer_index
                candidates = torch.empty(rows, config.candidate_topk_blocks, dtype=torch.int32, device=device)
            chosen = candidates if self.makes_candidates or self.takes_candidates else None
            if m.num_decode_tokens:
                self._decode(q, weights, keys, step, entries, picks, chosen)
            self._prefill(q, weights, keys, step, entries, picks, chosen)
        slots = lens = None
        if m.num_decode_tokens:
            assert step.tables.entries is not None
            slots, lens = compute_global_topk_indices_and_lens(
                picks[: m.num_decode_tokens],
                m.token_to_req_indices,
                step.tables.entries,
                keys.block_size,
                m.is_valid_token,
            )
        return V41Selection(self.layer_index, picks, slots, lens, of, candidates)

    def queries(
        self, qr: torch.Tensor, hidden_states: torch.Tensor, step: V41Step, cos_sin_cache: torch.Tensor
    ) -> tuple[Quantized, torch.Tensor]:
        """Quantized queries of a step's rows, and fp32 weights [T, heads] of their heads."""
        config = self.config
        shape = config.index_n_heads, config.index_head_dim
        return fused_indexer_q_rope_quant(
            step.window.positions,
            self.wq_b(qr).unflatten(-1, shape),
            cos_sin_cache,
            self.weights_proj(hidden_states),
            config.index_head_dim**-0.5,
            config.index_n_heads**-0.5,
            self.use_fp4,
            e2m1_rounding="ties_to_even",
            e2m1_floor=numerics.E2M1_FLOOR,
            round_weights=True,
            use_pdl=self.use_pdl,
        )

    def _decode(
        self,
        q: Quantized,
        weights: torch.Tensor,
        keys: DeepseekV4IndexerCache,
        step: V41Step,
        entries: V41Entries,
        picks: torch.Tensor,
        candidates: torch.Tensor | None,
    ) -> None:
        rows, shape, k = step.window.num_decode_tokens, step.window.decode_batch(), self.config.index_topk
        assert step.entry_table is not None
        lengths, columns = entries.visible[:rows].view(shape), step_columns(entries.longest)
        if not self.makes_candidates and (candidates is None or _has_compact_scores(picks.device)):
            blocks = 0 if candidates is None else candidates.shape[1]
            score_top_k_decode(
                _rows(q, slice(rows), shape),
                keys.data,
                weights[:rows],
                lengths,
                step.entry_table,
                columns,
                k,
                kv_format=keys.kv_format.id,
                out=picks[:rows],
                workspace=self._workspace(shape[0], columns, shape[1], blocks, picks.device),
                candidates=None if candidates is None else candidates[:rows],
            )
            return
        assert candidates is not None
        at_once = max(SCORE_BYTES // (4 * columns * shape[1]), 1)
        for first in range(0, shape[0], at_once):
            requests = slice(first, min(first + at_once, shape[0]))
            part = slice(requests.start * shape[1], requests.stop * shape[1])
            logits = paged_mqa_logits(
                _rows(q, part, (requests.stop - requests.start, shape[1])),
                keys.data,
                weights[part],
                lengths[requests],
                step.entry_table[requests],
                None,
                columns,
                kv_format=keys.kv_format.id,
                use_pdl=self.use_pdl,
            )
            if self.takes_candidates:
                _leave_out_others(logits, candidates[part])
            self._pick(logits, entries.visible[part], picks[part], candidates[part])

    def _prefill(
        self,
        q: Quantized,
        weights: torch.Tensor,
        keys: DeepseekV4IndexerCache,
        step: V41Step,
        entries: V41Entries,
        picks: torch.Tensor,
        candidates: torch.Tensor | None,
    ) -> None:
        m = step.window
        first, end = m.num_decodes, m.num_decodes + m.num_prefills
        while first < end:
            last, total = first, 0
            while last < end:
                count = m.seq_lens_cpu[last] // self.ratio
                if last > first and total + count > MOST_GATHERED:
                    break
                last, total = last + 1, total + count
            self._prefill_requests(q, weights, keys, step, entries, picks, candidates, first, last, total)
            first = last

    def _prefill_requests(
        self,
        q: Quantized,
        weights: torch.Tensor,
        keys: DeepseekV4IndexerCache,
        step: V41Step,
        entries: V41Entries,
        picks: torch.Tensor,
        candidates: torch.Tensor | None,
        first: int,
        last: int,
        total: int,
    ) -> None:
        """Of requests first to last - 1, which have `total` keys."""
        m, k, device = step.window, self.config.index_topk, picks.device
        assert step.tables.entries is not None
        rows = slice(m.query_start_loc_cpu[first], m.query_start_loc_cpu[last])
        starts = entries.key_starts[first - m.num_decodes : last - m.num_decodes + 1]
        skipped = starts[:1]
        starts, row_starts, row_ends = (x - skipped for x in (starts, entries.row_starts[rows], entries.row_ends[rows]))
        codes = torch.empty(total, 64 if self.use_fp4 else 128, dtype=torch.uint8, device=device)
        scales = torch.empty(total, 4, dtype=torch.uint8, device=device)
        cp_gather_indexer_k_quant_cache(
            keys.data, codes, scales, step.tables.entries[first:last], starts, kv_format=keys.kv_format.id
        )
        kv = (
            (codes, scales.view(torch.int32).squeeze(-1))
            if self.use_fp4
            else (codes.view(torch.float8_e4m3fn), scales.view(torch.float32).squeeze(-1))
        )
        most = max(length // self.ratio for length in m.seq_lens_cpu[first:last])
        is_compact = self.takes_candidates and most > MOST_SHARED and _has_compact_scores(device)
        if candidates is None or is_compact:
            blocks = 0 if candidates is None else candidates.shape[1]
            score_top_k_prefill(
                _rows(q, rows),
                kv,
                weights[rows],
                row_starts,
                row_ends,
                k,
                max_seqlen_k=most,
                out=picks[rows],
                workspace=self._workspace(rows.stop - rows.start, most, 1, blocks, device),
                candidates=None if candidates is None else candidates[rows],
            )
            return
        at_once = max(SCORE_BYTES // (4 * max(most, 1)), 1)
        for begin in range(rows.start, rows.stop, at_once):
            part = slice(begin, min(begin + at_once, rows.stop))
            own = slice(part.start - rows.start, part.stop - rows.start)
            logits = mqa_logits(
                _rows(q, part),
                kv,
                weights[part],
                row_starts[own],
                row_ends[own],
                clean_logits=False,
                max_seqlen_k=most,
            )
            if self.takes_candidates:
                _leave_out_others(logits, candidates[part])
            self._pick(logits, entries.visible[part], picks[part], candidates[part])

    def _pick(self, logits: torch.Tensor, visible: torch.Tensor, picks: torch.Tensor, candidates: torch.Tensor) -> None:
        """The best entries of rows with scores, for which column j is entry j; of the candidate source the best blocks,
        too."""
        lengths, k = visible[:, None], picks.shape[1]
        top_k_per_row_decode(logits, 1, lengths, picks, logits.shape[0], logits.stride(0), logits.stride(1), k)
        if self.makes_candidates:
            select_candidate_blocks(logits, lengths, candidates.shape[1], out=candidates)

    def _workspace(
        self, requests: int, columns: int, next_n: int, blocks: int, device: torch.device
    ) -> torch.Tensor | None:
        size = score_top_k_workspace_size(
            requests, columns, self.config.index_topk, next_n=next_n, most=SCORE_BYTES, candidates=blocks
        )
        return torch.empty(size // 4, device=device) if size else None
