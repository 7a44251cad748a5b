# SPDX-License-Identifier: Apache-2.0
"""Calls of the sparse attention ops: their arguments by name, in the order of the schemas, and what follows from them.

Checks, costs (ops.py) and references take these records, and so do the choice of a kernel (select.py) and what launches
it (launch.py). All but checks take checked ones.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from cute_kernels.formats import FP8_DS_MLA, HEAD_DIM, PLAIN_FP8
from cute_kernels.sparse_mla import converted, gathered, schedule
from cute_kernels.sparse_mla.arguments import MOST_NUMBERS, as_floats, list_tiles

MOST_KEYS, MOST_COLUMNS, MOST_PAGE_BYTES = 2**29, 2**29, 2**31
"""Paged prefill's kernels but the portable one take calls with fewer than so many: entries and positions that a table
has room for, of each cache; columns of a query row; bytes of a page."""

MOST_CONVERTED_BYTES = 2**35
"""Of rows that sparse_mla_mixed converts first: its kernel can name no more."""


class DecodeCall(NamedTuple):
    """sparse_mla_decode."""

    q: torch.Tensor
    k_cache: torch.Tensor
    indices: torch.Tensor
    topk_length: torch.Tensor | None
    attn_sink: torch.Tensor | None
    softmax_scale: float
    kv_format: str
    extra_k_cache: torch.Tensor | None
    extra_indices: torch.Tensor | None
    extra_topk_length: torch.Tensor | None
    extra_block_table: torch.Tensor | None
    extra_length: torch.Tensor | None
    extra_kv_format: str
    num_splits: int
    split_tokens: int
    out: torch.Tensor
    lse: torch.Tensor | None
    workspace: torch.Tensor | None
    constant_lists: int = 0
    long_rows: str = "auto"
    q_squares: torch.Tensor | None = None
    q_norm_eps: float = 0.0
    positions: torch.Tensor | None = None
    cos_sin_cache: torch.Tensor | None = None
    out_scale: torch.Tensor | None = None

    @property
    def is_quantized(self) -> bool:
        return self.positions is not None

    @property
    def is_raw(self) -> bool:
        """Whether queries are still to be normed and rotated."""
        return self.q_squares is not None

    @property
    def quant(self) -> tuple[torch.Tensor | None, ...]:
        """Codes, and what comes with them: see quant_output."""
        return self.out, self.out_scale, self.positions, self.cos_sin_cache

    @property
    def extra(self) -> str:
        """How the extra list names its rows: "none" (there is none), "listed" by slot, "dense" by page."""
        if self.extra_k_cache is None:
            return "none"
        return "dense" if self.extra_indices is None else "listed"

    @property
    def caches(self) -> dict[str, torch.Tensor]:
        """Those that are there, by name."""
        return _given(k_cache=self.k_cache, extra_k_cache=self.extra_k_cache)

    @property
    def formats(self) -> tuple[str, str]:
        """Of both caches; the first one's twice if there is no extra one."""
        return self.kv_format, self.kv_format if self.extra_k_cache is None else self.extra_kv_format

    @property
    def rows(self) -> int:
        """Query rows."""
        return int(self.q.shape[0] * self.q.shape[1])

    @property
    def max_tiles(self) -> int:
        """Tiles of the longest row that the lists' widths allow."""
        return int(list_tiles(self.indices, self.extra_k_cache, self.extra_indices, self.extra_block_table))

    def splits(self, at_once: int) -> tuple[int, int]:
        """(splits of a row, tiles of a split or 0) of this call, if so many work tiles run at a time."""
        if self.num_splits or self.split_tokens:
            return schedule.fixed_splits(self.max_tiles, self.num_splits, self.split_tokens)
        if self.workspace is None or self.rows == 0:
            return 1, 0
        heads = self.q.shape[2]
        most = self.workspace.nbytes // (self.rows * heads * schedule.SPLIT_BYTES)
        groups = schedule.head_groups(heads)
        return schedule.choose_splits(
            self.rows, groups, self.max_tiles, at_once, schedule.heads_of_group(heads), most
        ), 0

    def wants_halves(self) -> bool:
        """Whether long rows may be cut in halves: where there is a second list, unless the call says that they stay
        whole, or how rows are split."""
        return self.long_rows != "whole" and not (self.num_splits or self.split_tokens or self.extra == "none")

    def is_halved(self, at_once: int, splits: int) -> bool:
        """Whether they are, if so many work tiles run at a time and rows have so many splits."""
        work_tiles = self.rows * schedule.head_groups(self.q.shape[2])
        return (
            self.wants_halves()
            and splits == 1
            and set(self.formats) == {FP8_DS_MLA.id}
            and (self.is_quantized or self.out.element_size() == 2)
            and schedule.may_halve(work_tiles, at_once, self.max_tiles)
            and self.workspace is not None
            and self.workspace.nbytes >= work_tiles * schedule.KEPT_BYTES
        )

    def partials(self, splits: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The workspace as fp32 [splits, b, s_q, h, 512] and [splits, b, h, s_q]."""
        assert self.workspace is not None
        b, s_q, h, dim = self.q.shape
        floats = as_floats(self.workspace, splits * b * s_q * h * schedule.SPLIT_BYTES)
        row, count = s_q * h * dim, splits * b * s_q * h * dim
        start = floats.storage_offset()
        outs = floats.as_strided((splits, b, s_q, h, dim), (b * row, row, h * dim, dim, 1), start)
        lses = floats.as_strided((splits, b, h, s_q), (b * h * s_q, h * s_q, s_q, 1), start + count)
        return outs, lses


class PrefillCall(NamedTuple):
    """sparse_mla_prefill."""

    q: torch.Tensor
    kv: torch.Tensor
    indices: torch.Tensor
    sm_scale: float
    attn_sink: torch.Tensor | None
    topk_length: torch.Tensor | None
    out: torch.Tensor
    max_logits: torch.Tensor | None
    lse: torch.Tensor | None
    q_squares: torch.Tensor | None = None
    q_norm_eps: float = 0.0
    positions: torch.Tensor | None = None
    cos_sin_cache: torch.Tensor | None = None
    out_scale: torch.Tensor | None = None

    @property
    def is_quantized(self) -> bool:
        return self.positions is not None

    @property
    def is_raw(self) -> bool:
        """Whether queries are still to be normed and rotated."""
        return self.q_squares is not None


class PagedCall(NamedTuple):
    """sparse_mla_prefill_paged."""

    q: torch.Tensor
    swa_cache: torch.Tensor
    swa_block_table: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    sm_scale: float
    window_size: int
    compressed_cache: torch.Tensor | None
    compressed_block_table: torch.Tensor | None
    compress_ratio: int
    topk_indices: torch.Tensor | None
    attn_sink: torch.Tensor | None
    kv_format: str
    compressed_kv_format: str
    num_splits: int
    split_tokens: int
    out: torch.Tensor
    max_logits: torch.Tensor | None
    lse: torch.Tensor | None
    workspace: torch.Tensor | None = None
    form: str = "auto"
    q_squares: torch.Tensor | None = None
    q_norm_eps: float = 0.0
    positions: torch.Tensor | None = None
    cos_sin_cache: torch.Tensor | None = None
    out_scale: torch.Tensor | None = None

    @property
    def is_quantized(self) -> bool:
        return self.positions is not None

    @property
    def is_raw(self) -> bool:
        """Whether queries are still to be normed and rotated, from gathered rows."""
        return self.q_squares is not None

    @property
    def compressed(self) -> str:
        """Which compressed entries count: "none", "all" that a row sees, or "listed"."""
        if self.compressed_cache is None:
            return "none"
        return "all" if self.topk_indices is None else "listed"

    @property
    def formats(self) -> tuple[str, str]:
        """Of both caches; the window's twice if there is no other."""
        return self.kv_format, self.kv_format if self.compressed_cache is None else self.compressed_kv_format

    @property
    def caches(self) -> dict[str, torch.Tensor]:
        """Those that are there, by name."""
        return _given(swa_cache=self.swa_cache, compressed_cache=self.compressed_cache)

    @property
    def tables(self) -> dict[str, torch.Tensor]:
        """Block tables that are there, by name."""
        return _given(swa_block_table=self.swa_block_table, compressed_block_table=self.compressed_block_table)

    @property
    def pools(self) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
        """Both caches and their block tables, the window's again if there is no other."""
        window = self.swa_cache, self.swa_block_table
        if self.compressed_cache is None:
            return window, window
        assert self.compressed_block_table is not None
        return window, (self.compressed_cache, self.compressed_block_table)

    @property
    def columns(self) -> int:
        """Most compressed entries that a query row attends to."""
        if self.compressed_cache is None:
            return 0
        if self.topk_indices is not None:
            return int(self.topk_indices.shape[1])
        return self.entries

    @property
    def entries(self) -> int:
        """Compressed entries that a row of the block table has room for."""
        if self.compressed_cache is None:
            return 0
        assert self.compressed_block_table is not None
        return int(self.compressed_block_table.shape[1] * self.compressed_cache.shape[1])

    @property
    def gathered_shape(self) -> gathered.GatheredShape:
        """Of what the rows of both caches are gathered into."""
        rows, requests = int(self.q.shape[0]), int(self.seq_lens.shape[0])
        return gathered.GatheredShape.of(rows, requests, self.window_size, self.entries, self.columns)

    def gathered_tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The workspace as rows bf16 [rows, 1, 512], lists int32 [T, 1, columns] and their lengths int32 [T]."""
        assert self.workspace is not None
        shape, memory = self.gathered_shape, self.workspace.view(torch.uint8)
        ends = shape.row_bytes, shape.row_bytes + shape.list_bytes, shape.nbytes
        kv = memory[: ends[0]].view(torch.bfloat16).view(shape.rows, 1, HEAD_DIM)
        indices = memory[ends[0] : ends[1]].view(torch.int32).view(shape.lists, 1, shape.columns)
        return kv, indices, memory[ends[1] : ends[2]].view(torch.int32)

    def is_gathered(self, arch: str, sms: int, most: int) -> bool:
        """Whether rows are gathered first, on a GPU with so many multiprocessors and into so many bytes at most, of
        which a call that asks for it has enough."""
        if self.form != "auto":
            return self.form == "gathered"
        if self.num_splits or self.split_tokens or arch not in gathered.AUTO_GATHER_ARCHS or not self.is_countable:
            return False
        shape = self.gathered_shape
        if shape.nbytes > most or shape.rows >= MOST_NUMBERS:
            return False
        return gathered.is_gathered_faster(shape, self.q.shape[1], self.max_tiles, sms, not self.is_quantized)

    @property
    def is_countable(self) -> bool:
        """Whether caches have the format of kernels that count what they have in int32."""
        return (
            set(self.formats) == {FP8_DS_MLA.id}
            and self.columns < MOST_COLUMNS
            and all(
                pool.shape[1] * FP8_DS_MLA.row_elements < MOST_PAGE_BYTES and table.shape[1] * pool.shape[1] < MOST_KEYS
                for pool, table in self.pools
            )
        )

    @property
    def max_tiles(self) -> int:
        """Tiles of the longest row that the widths of lists and tables allow."""
        positions = min(self.window_size, self.swa_block_table.shape[1] * self.swa_cache.shape[1])
        return schedule.num_tiles(self.columns + int(positions))

    def splits(self, sms: int) -> tuple[int, int]:
        """(splits of a row, tiles of a split or 0) of this call, where rows are split, on so many multiprocessors."""
        if self.is_quantized:
            return 1, 0
        if self.num_splits or self.split_tokens:
            return schedule.fixed_splits(self.max_tiles, self.num_splits, self.split_tokens)
        return schedule.choose_cluster_splits(self.q.shape[0], self.q.shape[1], self.max_tiles, sms), 0


class MixedCall(NamedTuple):
    """sparse_mla_mixed."""

    query: torch.Tensor
    swa_kv_cache: torch.Tensor
    sparse_indices: torch.Tensor
    compressed_kv_cache: torch.Tensor | None
    sparse_topk_lens: torch.Tensor
    seq_lens: torch.Tensor
    cum_seq_lens_q: torch.Tensor
    bmm1_scale: float
    bmm2_scale: float
    sinks: torch.Tensor | None
    window_size: int
    kv_format: str
    out: torch.Tensor
    lse: torch.Tensor | None
    workspace: torch.Tensor | None = None
    form: str = "auto"

    @property
    def caches(self) -> dict[str, torch.Tensor]:
        """Those that are there, by name."""
        return _given(swa_kv_cache=self.swa_kv_cache, compressed_kv_cache=self.compressed_kv_cache)

    @property
    def pools(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Both caches, the window's again if there is no other."""
        window = self.swa_kv_cache
        return window, window if self.compressed_kv_cache is None else self.compressed_kv_cache

    @property
    def cache_rows(self) -> int:
        """Of the caches that are there, together."""
        return sum(int(pool.shape[0] * pool.shape[1]) for pool in self.caches.values())

    @property
    def converted_bytes(self) -> int:
        """Of what their rows are converted into."""
        return self.cache_rows * converted.CONVERTED_ROW_BYTES

    def converted_pools(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The workspace as `pools`, f16 with dense pages, one behind the other."""
        assert self.workspace is not None
        rows = self.workspace.view(torch.uint8)[: self.converted_bytes].view(torch.float16).view(-1, HEAD_DIM)
        window = self.swa_kv_cache
        first = rows[: window.shape[0] * window.shape[1]].view(window.shape)
        if self.compressed_kv_cache is None:
            return first, first
        return first, rows[window.shape[0] * window.shape[1] :].view(self.compressed_kv_cache.shape)

    def is_converted(self, arch: str, sms: int, most: int) -> bool:
        """Whether rows are converted first, on a GPU with so many multiprocessors and into so many bytes at most, of
        which a call that asks for it has enough."""
        if self.form != "auto":
            return self.form == "converted"
        rows, heads, _ = self.query.shape
        is_able = self.kv_format == PLAIN_FP8.id and arch in converted.CONVERT_ARCHS and heads >= converted.LEAST_HEADS
        if not is_able or self.converted_bytes > min(most, MOST_CONVERTED_BYTES):
            return False
        tiles = schedule.num_tiles(self.sparse_indices.shape[1])
        return converted.is_converted_faster(self.cache_rows, rows, heads, tiles, sms)


class MergeCall(NamedTuple):
    """merge_attention_states."""

    outs: torch.Tensor
    lses: torch.Tensor
    attn_sink: torch.Tensor | None
    out: torch.Tensor
    lse: torch.Tensor | None


def _given(**tensors: torch.Tensor | None) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}
