# SPDX-License-Identifier: Apache-2.0
"""V4.1's sparse attention: decode rows from the pages, prefill rows gathered first."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from cute_kernels.indices.ops import combine_topk_swa_indices
from cute_kernels.kv_cache.ops import dequantize_and_gather_k_cache
from cute_kernels.sparse_mla.ops import sparse_mla_decode, sparse_mla_decode_workspace_size, sparse_mla_prefill

from .caches import SWA_BLOCK_SIZE, DeepseekV4CompressedCache, DeepseekV4SWACache
from .mla import PREFILL_CHUNK_SIZE, Workspace
from .v41_config import DeepseekV41Config
from .v41_step import V41Selection, V41Step


class V41SparseAttention(nn.Module):
    """One softmax over a row's window and its picks, with a sink for each head.

    num_heads         heads of this rank
    batch_invariant   no row is split, so that its bits depend on nothing else in a step
    workspace         shared by the layers of a model
    """

    attn_sink: torch.Tensor

    def __init__(
        self,
        config: DeepseekV41Config,
        compress_ratio: int,
        num_heads: int,
        *,
        max_num_tokens: int,
        batch_invariant: bool = False,
        workspace: Workspace | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        self.config, self.compress_ratio, self.num_heads = config, compress_ratio, num_heads
        self.max_num_tokens, self.num_splits = max_num_tokens, 1 if batch_invariant else 0
        self.workspace = workspace or Workspace()
        self.register_buffer("attn_sink", torch.zeros(num_heads, device=device))

    def forward(
        self,
        q: torch.Tensor,
        window: DeepseekV4SWACache,
        entries: DeepseekV4CompressedCache | None,
        step: V41Step,
        selection: V41Selection | None,
        out: torch.Tensor,
    ) -> None:
        """Attend with q bf16 [T, heads, 512]; writes out, of the same shape. Without entries there is no selection."""
        if step.window.num_decode_tokens:
            self._decode(q, window, entries, step, selection, out)
        end = step.window.num_decodes + step.window.num_prefills
        for first in range(step.window.num_decodes, end, PREFILL_CHUNK_SIZE):
            last = min(first + PREFILL_CHUNK_SIZE, end)
            self._prefill(q, window, entries, step, selection, out, first, last)

    def _decode(
        self,
        q: torch.Tensor,
        window: DeepseekV4SWACache,
        entries: DeepseekV4CompressedCache | None,
        step: V41Step,
        selection: V41Selection | None,
        out: torch.Tensor,
    ) -> None:
        m, rows = step.window, step.window.num_decode_tokens
        shape = m.decode_batch()
        extra: dict[str, Any] = {}
        if entries is not None:
            assert selection is not None
            assert selection.slots is not None
            assert selection.lens is not None
            extra = {
                "extra_k_cache": entries.data,
                "extra_kv_format": entries.kv_format.id,
                "extra_indices": selection.slots.unflatten(0, shape),
                "extra_topk_length": selection.lens.view(shape),
            }
        size = sparse_mla_decode_workspace_size(
            self.max_num_tokens,
            1,
            self.num_heads,
            step.window_slots.shape[2],
            self.config.index_topk,
            num_splits=self.num_splits,
            device=q.device,
        )
        sparse_mla_decode(
            q[:rows].unflatten(0, shape),
            window.data,
            step.window_slots.view(*shape, -1),
            topk_length=step.window_lens.view(shape),
            attn_sink=self.attn_sink,
            softmax_scale=self.config.softmax_scale,
            kv_format=window.kv_format.id,
            num_splits=self.num_splits,
            out=out[:rows].unflatten(0, shape),
            return_lse=False,
            workspace=self.workspace.parts(size, q.device),
            **extra,
        )

    def _prefill(
        self,
        q: torch.Tensor,
        window: DeepseekV4SWACache,
        entries: DeepseekV4CompressedCache | None,
        step: V41Step,
        selection: V41Selection | None,
        out: torch.Tensor,
        first: int,
        last: int,
    ) -> None:
        """Of requests first to last - 1: their entries and windows are gathered, one behind the other."""
        m, ratio, width = step.window, self.compress_ratio, self.config.sliding_window
        starts, lengths = m.query_start_loc_cpu, m.seq_lens_cpu
        count, tail = 0, 0
        for request in range(first, last):
            query = starts[request + 1] - starts[request]
            tail = max(tail, query + min(lengths[request] - query, width - 1))
            count = max(count, lengths[request] // ratio if entries is not None else 0)
        kv = self.workspace.get(last - first, count + tail, self.config.head_dim, q.device)
        rows, requests = slice(starts[first], starts[last]), slice(first, last)
        seq, gathered = m.seq_lens[requests], step.gather_lens[first - m.num_decodes : last - m.num_decodes]
        picks = torch.empty(rows.stop - rows.start, 0, dtype=torch.int32, device=q.device)
        if entries is not None:
            assert selection is not None
            assert step.tables.entries is not None
            picks = selection.picks[rows]
            dequantize_and_gather_k_cache(
                kv,
                entries.data,
                step.entries[ratio].entry_lens[requests],
                None,
                step.tables.entries[requests],
                entries.block_size,
                0,
                kv_format=entries.kv_format.id,
            )
        dequantize_and_gather_k_cache(
            kv,
            window.data,
            seq,
            gathered,
            m.swa_block_table[requests],
            SWA_BLOCK_SIZE,
            count,
            kv_format=window.kv_format.id,
        )
        indices, lens = combine_topk_swa_indices(
            picks,
            m.query_start_loc[first : last + 1],
            seq,
            gathered,
            width,
            max(ratio, 1),
            picks.shape[1],
            count + tail,
            count,
        )
        sparse_mla_prefill(
            q[rows],
            kv.view(-1, 1, self.config.head_dim),
            indices[:, None],
            self.config.softmax_scale,
            attn_sink=self.attn_sink,
            topk_length=lens,
            out=out[rows],
            return_lse=False,
        )
