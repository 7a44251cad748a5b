# SPDX-License-Identifier: Apache-2.0
"""Attention of a layer whose context several ranks share: what a rank computes of a step, and what it sends.

Collectives are on the stream of the step, in the same order on all ranks:

    prefill rows   entries before the step (sharded caches)  ->  halo rows (ratio 4)  ->  records
    decode rows    queries (heads "own")  ->  keys of picks (ratio 4)  ->  partial results  ->  results (heads "same")
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from cute_kernels.compressor.ops import save_partial_states
from cute_kernels.formats import HEAD_DIM, round_up
from cute_kernels.indexer.ops import (
    all_visible_entries,
    merge_top_k_keys,
    paged_mqa_logits,
    top_k_keys,
    top_k_per_row_decode,
)
from cute_kernels.kv_cache.ops import pack_records, unpack_records
from cute_kernels.runtime.compile import call
from cute_kernels.sparse_mla.ops import merge_attention_states, sparse_mla_decode

from .caches import KV_BLOCK_SIZE, STATE_BLOCK_SIZE, LayerCaches, PagedCache
from .context import WIRES, ContextParallel
from .context_step import ContextStep, DecodeShare, Exchange, PrefillShare
from .indexer import ALL
from .metadata import DeepseekV4Metadata
from .streams import run_on_streams

if TYPE_CHECKING:
    from .attention import DeepseekV4MultiHeadLatentAttentionWrapper

RECORD_ALIGNMENT = 16
"""Of the records of a cache in a message."""

Products = tuple[torch.Tensor | None, ...]
"""Rows of the hidden states' products: kv_score, the indexer's weights and its kv_score."""

Scored = tuple[Any, torch.Tensor]
"""The indexer's quantized queries and weights."""


class ContextAttention:
    """Attention of one layer over the ranks of its context group."""

    def __init__(self, layer: DeepseekV4MultiHeadLatentAttentionWrapper, cp: ContextParallel) -> None:
        self.layer, self.cp, self.ratio = layer, cp, layer.compress_ratio
        options = layer.options
        if options.persist != "window" or options.keep_every:
            raise ValueError("AttentionOptions: cp: expected persist 'window' and keep_every 0")
        tp = options.tp
        if cp.heads == "own" and (tp.size % cp.size or tp.rank % cp.size != cp.rank):
            raise ValueError(
                f"ContextParallel: group: expected neighbours in the tensor-parallel group, got rank {cp.rank} of "
                f"{cp.size} on its rank {tp.rank} of {tp.size}"
            )
        if cp.is_sharded:
            if options.kv_cache != "fp8_ds_mla":
                raise ValueError(f"AttentionOptions: cp: expected fp8_ds_mla caches to shard, got {options.kv_cache}")
            heads, _ = cp.split_heads(layer.num_heads)
            if heads > 128:
                raise ValueError(f"ContextParallel: group: expected at most 128 heads in all, got {heads}")

    def attend(
        self,
        qr_kv: torch.Tensor,
        products: Products,
        step: ContextStep,
        caches: LayerCaches,
        out: torch.Tensor,
    ) -> None:
        """From the products of the hidden states to out bf16 [T, heads, 512]."""
        layer, cp, decodes = self.layer, self.cp, step.num_decode_tokens
        every = self._rows(qr_kv, products) if layer.query_heads == layer.num_heads else None

        def rows(part: slice, heads: slice) -> Products:
            if every is not None:
                return _slice(every, part)
            return self._rows(qr_kv[part], _slice(products, part), heads)

        if step.decodes is not None and decodes:
            self._decode(rows(slice(decodes), ALL), step.decodes, caches, out[:decodes])
        if step.prefills is not None:
            heads = slice(cp.rank * layer.num_heads, (cp.rank + 1) * layer.num_heads)
            self._prefill(rows(slice(decodes, None), heads), step.prefills, caches, out[decodes:], decodes)

    def _rows(self, qr_kv: torch.Tensor, products: Products, heads: slice = ALL) -> Products:
        """Queries of some heads, kv and the indexer's queries, and the rows' other products."""
        config = self.layer.config
        qr, kv = qr_kv.split([config.q_lora_rank, config.head_dim], dim=-1)
        q, index_q, kv = self.layer._queries(qr, kv, None, heads)
        return q, kv, index_q, *products

    # ---- prefill rows

    def _prefill(
        self, rows: Products, share: PrefillShare, caches: LayerCaches, out: torch.Tensor, first_row: int
    ) -> None:
        layer, m = self.layer, share.metadata
        q, kv, index_q, kv_score, index_weights, index_kv_score = rows
        assert q is not None
        assert kv is not None
        own, table = caches, layer.rotary_emb.cos_sin_cache
        if self.cp.is_sharded and own.compressed is not None:
            caches = self._whole(own, share.pages, q.device)
            self._move(_both(own, caches), share.held)
        if m is not None:
            q = layer.mla_attn.insert(q, kv, caches, m, table)
        if kv_score is not None:
            self._send_halo(kv_score, index_kv_score, share, caches)
            if m is not None:
                self._compress(kv_score, index_kv_score, m, caches)
        self._send_records(share, caches)
        if self.cp.is_sharded and own.compressed is not None and share.kept is not None:
            for source, target in _both(caches, own):
                _copy(source, target, share.kept)
        if m is None:
            return
        topk = None
        if layer.indexer is not None:
            assert index_q is not None
            assert index_weights is not None
            assert caches.indexer is not None
            scored = layer.indexer.quantize(index_q, index_weights, m.positions, table)
            topk = layer.indexer.indexer_op(*scored, caches.indexer, m, first_row=first_row)
        layer.mla_attn(q, caches, m, topk, out)

    def _whole(self, own: LayerCaches, pages: int, device: torch.device) -> LayerCaches:
        """Caches that hold all entries of the step's requests."""

        def whole(cache: Any) -> Any:
            if cache is None:
                return None
            return replace(cache, data=self.cp.pools.pages(cache.kv_format, pages, cache.block_size, device))

        return replace(own, compressed=whole(own.compressed), indexer=whole(own.indexer))

    def _compress(
        self,
        kv_score: torch.Tensor,
        index_kv_score: torch.Tensor | None,
        m: DeepseekV4Metadata,
        caches: LayerCaches,
    ) -> None:
        """New entries, of rows whose state is there."""
        layer, table = self.layer, self.layer.rotary_emb.cos_sin_cache
        assert layer.compressor is not None
        assert caches.state is not None
        assert caches.compressed is not None
        scale = layer.mla_attn.compressor_scale
        layer.compressor(kv_score, m, caches.state, caches.compressed, table, scale)
        if layer.indexer is not None:
            assert index_kv_score is not None
            assert caches.indexer_state is not None
            assert caches.indexer is not None
            layer.indexer.compressor(index_kv_score, m, caches.indexer_state, caches.indexer, table)

    def _send_halo(
        self, kv_score: torch.Tensor, index_kv_score: torch.Tensor | None, share: PrefillShare, caches: LayerCaches
    ) -> None:
        """The rows before each segment, which its first entry sees, into the state of the rank that has the segment."""
        if share.halo_rows is None:
            return
        layer = self.layer
        assert index_kv_score is not None
        assert share.halo_slots is not None
        assert share.halo_positions is not None
        assert layer.compressor is not None
        assert layer.indexer is not None
        assert caches.state is not None
        assert caches.indexer_state is not None
        width = kv_score.shape[1]
        sent = kv_score.new_zeros(len(share.halo_rows), width + index_kv_score.shape[1])
        if kv_score.shape[0]:
            sent[:, :width] = kv_score[share.halo_rows]
            sent[:, width:] = index_kv_score[share.halo_rows]
        received = sent.new_empty((self.cp.size, *sent.shape))
        self.cp.communicator.all_gather(received, sent)
        for compressor, state, columns in (
            (layer.compressor, caches.state, slice(width)),
            (layer.indexer.compressor, caches.indexer_state, slice(width, None)),
        ):
            kv, score = received.flatten(0, 1)[:, columns].chunk(2, dim=1)
            save_partial_states(
                kv,
                score,
                compressor.ape,
                share.halo_positions,
                state.data,
                share.halo_slots,
                STATE_BLOCK_SIZE[4],
                kv.shape[1],
                4,
            )

    def _send_records(self, share: PrefillShare, caches: LayerCaches) -> None:
        """What the ranks made of their segments, to all of them in one message."""
        moved: list[tuple[PagedCache, PagedCache, Exchange]] = []
        for exchange, kinds in (
            (share.window, (caches.swa,)),
            (share.entries, (caches.compressed, caches.indexer)),
            (share.state, (caches.state, caches.indexer_state)),
        ):
            if exchange is not None:
                moved += [(cache, cache, exchange) for cache in kinds if cache is not None]
        self._exchange(moved)

    def _move(self, caches: Sequence[tuple[PagedCache, PagedCache]], exchange: Exchange | None) -> None:
        if exchange is not None:
            self._exchange([(source, target, exchange) for source, target in caches])

    def _exchange(self, moved: Sequence[tuple[PagedCache, PagedCache, Exchange]]) -> None:
        """Records of every rank's sources into the targets of all."""
        if not moved:
            return
        places, size = [], 0
        for source, _, exchange in moved:
            count, width = len(exchange.own), source.kv_format.record_bytes
            places.append((size, count, width))
            size = round_up(size + count * width, RECORD_ALIGNMENT)
        sent = torch.empty(size, dtype=torch.uint8, device=moved[0][2].own.device)
        for (source, _, exchange), (start, count, width) in zip(moved, places, strict=True):
            records = sent[start : start + count * width].view(count, width)
            pack_records(source.data, exchange.own, source.kv_format.id, out=records)
        received = sent.new_empty(self.cp.size, size)
        self.cp.communicator.all_gather(received, sent)
        for (_, target, exchange), (start, count, width) in zip(moved, places, strict=True):
            records = received[:, start : start + count * width].reshape(self.cp.size * count, width)
            unpack_records(records, target.data, exchange.all, target.kv_format.id)

    # ---- decode rows

    def _decode(self, rows: Products, share: DecodeShare, caches: LayerCaches, out: torch.Tensor) -> None:
        layer, m, table = self.layer, share.metadata, self.layer.rotary_emb.cos_sin_cache
        q, kv, index_q, kv_score, index_weights, index_kv_score = rows
        assert q is not None
        assert kv is not None
        scored: Scored | None = None
        if kv_score is None or not layer._is_one_launch(q, caches):
            q = layer.mla_attn.insert(q, kv, caches, m, table)
            if kv_score is not None:
                self._compress(kv_score, index_kv_score, m, caches)
            if layer.indexer is not None:
                assert index_q is not None
                assert index_weights is not None
                scored = layer.indexer.quantize(index_q, index_weights, m.positions, table)
        elif layer.indexer is None:
            layer._insert_and_compress(q, kv, kv_score, m, caches)
        else:
            assert index_q is not None
            assert index_weights is not None
            assert index_kv_score is not None
            scored = layer._one_launch(q, kv, kv_score, index_q, index_weights, index_kv_score, m, caches)
        if caches.compressed is not None and self.cp.is_sharded:
            self._decode_parts(q, scored, share, caches, out)
            return
        topk = None
        if layer.indexer is not None:
            assert scored is not None
            assert caches.indexer is not None
            topk = layer.indexer.indexer_op(*scored, caches.indexer, m)
        layer.mla_attn(q, caches, m, topk, out)

    def _decode_parts(
        self,
        q: torch.Tensor,
        scored: Scored | None,
        share: DecodeShare,
        caches: LayerCaches,
        out: torch.Tensor,
    ) -> None:
        """Attention over the rank's own entries for all heads, exchanged for that of all ranks' entries for its heads.

        A message to a rank is [heads, S]: of each head as many rows of 512 values as there are, their fp32 LSEs and
        padding. The window is the part of the rank that has the heads, and stays there. Scores run beside the exchange
        of queries, and the window beside that of keys, where there are streams for it.
        """
        cp, layer, m = self.cp, self.layer, share.metadata
        attention = layer.mla_attn
        rows, shape = m.num_decode_tokens, m.decode_batch()
        heads, per_rank = cp.split_heads(layer.num_heads)
        wire = WIRES[cp.wire]
        per_lse = 4 // wire.itemsize
        width = HEAD_DIM * rows + per_lse * round_up(rows, 4)
        sent = torch.empty(heads, width, dtype=wire, device=q.device)
        received = torch.empty(cp.parts + 1, per_rank, width, dtype=wire, device=q.device)
        streams, device_index = layer._streams(rows, q.device), q.get_device()

        def views(part: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            """(results [..., b, s_q, h, 512], LSEs [..., b, h, s_q]) of [..., h, S]."""
            results = part[..., : HEAD_DIM * rows].unflatten(-1, (*shape, HEAD_DIM))
            first = HEAD_DIM * rows // per_lse
            lses = part.view(torch.float32)[..., first : first + rows].unflatten(-1, shape)
            return results.movedim(-4, -2), lses.movedim(-3, -2)

        own = slice(cp.rank * per_rank, (cp.rank + 1) * per_rank)
        own_q = q if q.shape[1] == per_rank else q[:, own]
        swa = m.decode_swa_indices.view(*shape, -1)
        common: dict[str, Any] = {
            "softmax_scale": attention.scale,
            "kv_format": caches.swa.kv_format.id,
            "num_splits": 1 if cp.shards else attention.num_splits,
            "return_lse": False,
        }

        def window() -> torch.Tensor:
            result, lse = views(received[cp.parts])
            lens = m.decode_swa_lens.view(shape)
            whole = own_q.unflatten(0, shape)
            sparse_mla_decode(whole, caches.swa.data, swa, topk_length=lens, out=result, lse=lse, **common)
            return result

        def entries() -> torch.Tensor:
            result, lse = views(sent)
            for number, extra in enumerate(self._own_entries(keys, share, caches)):
                whole = every_q.unflatten(0, shape)
                sparse_mla_decode(whole, caches.swa.data, swa[..., :0], out=result, lse=lse, **common, **extra)
                parts = received[number * cp.size : (number + 1) * cp.size]
                call(cp.communicator.all_to_all, device_index, parts, sent.view(cp.size, per_rank, width))
            return received

        every_q, keys = q, None
        tasks: list[Callable[[], torch.Tensor]] = []
        if q.shape[1] != heads:
            tasks.append(lambda: self._gather_heads(q, q.new_empty((rows, heads, HEAD_DIM))))
        if layer.indexer is not None and not layer.indexer.indexer_op.sees_few(m):
            assert scored is not None
            query = scored
            tasks.append(lambda: self._own_keys(query, share, caches))
        done = run_on_streams(tasks, streams, q.device)
        if q.shape[1] != heads:
            every_q = done.pop(0)
        if done:
            (keys,) = done
        run_on_streams([entries, window], streams, q.device)
        results, lses = views(received)
        if cp.heads == "own":
            sink = attention.attn_sink
            merge_attention_states(results, lses, sink, out=out.unflatten(0, shape), return_lse=False)
            return
        merged = torch.empty(rows, per_rank, HEAD_DIM, dtype=torch.bfloat16, device=q.device)
        sink = attention.attn_sink[own]
        merge_attention_states(results, lses, sink, out=merged.unflatten(0, shape), return_lse=False)
        self._gather_heads(merged, out)

    def _gather_heads(self, own: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """All ranks' heads, into out [T, N * h, 512], from the rank's own ones [T, h, 512]."""
        size, heads = self.cp.size, own.shape[1]
        gathered, device_index = own.new_empty((size, *own.shape)), own.get_device()
        if not own.is_contiguous():
            dense = own.new_empty(own.shape)
            call(_copy_into, device_index, dense, own)
            own = dense
        call(self.cp.communicator.all_gather, device_index, gathered, own)
        call(_copy_into, device_index, out.unflatten(1, (size, heads)), gathered.transpose(0, 1))
        return out

    def _own_entries(self, keys: torch.Tensor | None, share: DecodeShare, caches: LayerCaches) -> list[dict[str, Any]]:
        """Arguments of `sparse_mla_decode` that name the entries of each part on this rank, by their order. keys: of
        `_own_keys`; None: all entries count."""
        cp, m, page = self.cp, share.metadata, KV_BLOCK_SIZE // self.ratio
        rows, shape = m.num_decode_tokens, m.decode_batch()
        assert caches.compressed is not None
        common = {"extra_k_cache": caches.compressed.data, "extra_kv_format": caches.compressed.kv_format.id}
        if self.ratio != 4:
            return [
                common | {"extra_block_table": table, "extra_length": lens}
                for table, lens in zip(share.tables, share.lens, strict=True)
            ]
        indexer = self.layer.indexer
        assert indexer is not None
        assert m.visible is not None
        op = indexer.indexer_op
        picks = op.topk_indices_buffer[:rows]
        found = []
        if keys is None:
            all_visible_entries(m.visible[:rows].view(shape), op.topk_tokens, out=picks)
            for table, lens in zip(share.tables, share.lens, strict=True):
                slots = all_visible_entries(lens, op.topk_tokens, slot_block_table=table, slot_rows_per_page=page)
                found.append((slots, lens))
        else:
            call(cp.communicator.all_gather, keys.get_device(), keys[: cp.size], keys[cp.size])
            for turn, table in enumerate(share.tables):
                slots, lens = merge_top_k_keys(
                    keys[: cp.size],
                    out=picks if turn == 0 else None,
                    block_table=table,
                    rows_per_page=page,
                    ranks=cp.parts,
                    rank=turn * cp.size + cp.rank,
                )
                found.append((slots, lens))
        return [
            common | {"extra_indices": slots.unflatten(0, shape), "extra_topk_length": lens.view(shape)}
            for slots, lens in found
        ]

    def _own_keys(self, scored: Scored, share: DecodeShare, caches: LayerCaches) -> torch.Tensor:
        """int64 [N + 1, T, k]: room for the best keys of every rank, and behind it this rank's own."""
        cp, m = self.cp, share.metadata
        indexer, (query, weights) = self.layer.indexer, scored
        assert indexer is not None
        assert caches.indexer is not None
        assert share.block_table is not None
        assert share.visible is not None
        k, rows, shape = indexer.indexer_op.topk_tokens, m.num_decode_tokens, m.decode_batch()
        by_request = (
            tuple(x.unflatten(0, shape) for x in query) if isinstance(query, tuple) else query.unflatten(0, shape)
        )
        logits = paged_mqa_logits(
            by_request,
            caches.indexer.data,
            weights,
            share.visible,
            share.block_table,
            None,
            share.columns,
            kv_format=caches.indexer.kv_format.id,
            use_pdl=self.layer.options.use_pdl,
        )
        picks = torch.empty(rows, k, dtype=torch.int32, device=logits.device)
        top_k_per_row_decode(logits, shape[1], share.visible, picks, rows, logits.stride(0), 1, k)
        keys = torch.empty(cp.size + 1, rows, k, dtype=torch.int64, device=logits.device)
        page = KV_BLOCK_SIZE // self.ratio
        top_k_keys(logits, picks, entries_per_page=page, ranks=cp.size, rank=cp.rank, out=keys[cp.size])
        return keys


def _slice(rows: Products, part: slice) -> Products:
    return tuple(None if x is None else x[part] for x in rows)


def _both(sources: LayerCaches, targets: LayerCaches) -> list[tuple[PagedCache, PagedCache]]:
    """The caches of entries: compressed, and the indexer's if there is one."""
    pairs = (sources.compressed, targets.compressed), (sources.indexer, targets.indexer)
    return [(source, target) for source, target in pairs if source is not None and target is not None]


def _copy_into(out: torch.Tensor, x: torch.Tensor) -> None:
    out.copy_(x)


def _copy(source: PagedCache, target: PagedCache, exchange: Exchange) -> None:
    """Records from one cache of this rank to another."""
    records = pack_records(source.data, exchange.own, source.kv_format.id)
    unpack_records(records, target.data, exchange.all, target.kv_format.id)
