# SPDX-License-Identifier: Apache-2.0
"""What V4.1's attention layers compute, from their formulas: dense numpy, one sequence, no caches, pages or steps."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from layers import DeepseekV41Config
from tests import oracle
from tests.layers.meaning import Array, Exact, Rounded, Weights, best, blocks, frequencies, index_scores


class V41Rounded(Rounded):
    """Rounds as either format of keys does, and as 584-byte records or those of `kv`, of windows and of entries; MXFP4
    scales go down to normal numbers."""

    def window_row(self, x: Array) -> Array:
        return self._mxfp8(x) if self.kv.startswith("mxfp8_v41") else Rounded().window_row(x)

    def entry_row(self, x: Array) -> Array:
        if not self.kv.endswith("nvfp4_v41"):
            return self.window_row(x)
        parts = self.bf16(x).reshape(-1, 32, 16)
        scale = oracle.E4M3[oracle.e4m3_encode(np.maximum(np.abs(parts).max(axis=-1) / 6, 2.0**-9))][..., None]
        codes = oracle.e2m1_encode(parts / scale, "ties_to_even")
        return (np.where(codes & 8, -1.0, 1.0) * oracle.E2M1[codes & 7] * scale).reshape(x.shape)

    def _mxfp8(self, x: Array) -> Array:
        values, scale = blocks(self.bf16(x), 32, "e4m3")
        return (values * scale[..., None]).reshape(x.shape)

    def index_key(self, x: Array) -> tuple[Array, Array]:
        if self.index == "fp8":
            return super().index_key(x)
        values, scale = blocks(x, 32, "e2m1", 6 * 2.0**-126, "ties_to_even")
        return (values * scale[..., None]).reshape(x.shape), np.ones(len(x))

    def index_query(self, x: Array) -> tuple[Array, Array | None]:
        if self.index == "fp8":
            return super().index_query(x)
        values, scale = blocks(x, 32, "e2m1", 6 * 2.0**-126, "ties_to_even")
        return (values * scale[..., None]).reshape(x.shape), None


@dataclass
class Shared:
    """What layers leave for those behind them."""

    entries: Array
    keys: tuple[Array, Array]
    picks: list[list[int]]
    blocks: list[list[int]]


@dataclass
class Result:
    """Of one layer: its output; of index sources what they select by their own scores, and candidate blocks."""

    out: Array
    picks: list[list[int]] | None = None
    blocks: list[list[int]] | None = None


class V41Meaning:
    """All layers of a config. weights: of each layer, FP8 ones with scales of 32 x 32 blocks."""

    def __init__(self, config: DeepseekV41Config, weights: list[Weights], rounding: Exact) -> None:
        self.c, self.w, self.r = config, weights, rounding

    def run(self, hidden: list[Array], given: list[tuple[list[list[int]], list[list[int]]] | None]) -> list[Result]:
        """Each layer on its hidden states. given: of layers that select, picks and blocks that go on from there."""
        shared: Shared | None = None
        results = []
        for layer, states in enumerate(hidden):
            result, shared = self._layer(layer, states, shared, given[layer])
            results.append(result)
        return results

    def _weight(self, layer: int, name: str) -> Array:
        weight, scale = self.w[layer][name + ".weight"], self.w[layer].get(name + ".scale")
        return weight if scale is None else weight * np.kron(scale, np.ones((32, 32)))

    def _product(self, layer: int, name: str, x: Array) -> Array:
        return self.r.bf16(x @ self._weight(layer, name).T)

    def _norm(self, layer: int, name: str, x: Array) -> Array:
        return self.r.bf16(oracle.rms_norm(x, self.w[layer][name + ".weight"], self.c.rms_norm_eps))

    def _turn(self, layer: int, x: Array, positions: Array, inverse: bool = False) -> Array:
        c = self.c
        is_far = c.compress_ratios[layer] > 0
        theta, factor = (c.compress_rope_theta, c.rope_factor) if is_far else (c.rope_theta, 1.0)
        found = frequencies(theta, factor, c.rope_beta_fast, c.rope_beta_slow, c.rope_original_max_position)
        return self.r.turn(x, (positions[:, None] * found).reshape(len(x), *[1] * (x.ndim - 2), 32), inverse)

    def _latents(self, layer: int, x: Array, ratio: int) -> Array:
        kv = self.r.fp32(x @ self.w[layer]["compressor.wkv.weight"].T)
        if ratio == 2:
            gate = self.r.fp32(x @ self.w[layer]["compressor.wgate.weight"].T)
            pairs = len(x) // 2
            t = gate[: 2 * pairs].reshape(pairs, 2, -1)
            share = 1 / (1 + np.exp(t[:, 0] - t[:, 1]))
            value = kv[: 2 * pairs].reshape(pairs, 2, -1)
            kv = value[:, 0] * (1 - share) + value[:, 1] * share
        return self._norm(layer, "compressor.norm", self.r.bf16(kv))

    def _layer(
        self, layer: int, x: Array, shared: Shared | None, given: tuple[list[list[int]], list[list[int]]] | None
    ) -> tuple[Result, Shared | None]:
        c, r, ratio = self.c, self.r, self.c.compress_ratios[layer]
        positions = np.arange(len(x))
        qr, q = self._queries(layer, x, positions)
        window = self._window_rows(layer, x, positions)
        visible = (positions + 1) // ratio if ratio else positions * 0
        if layer in c.kv_source_layer_ids:
            latents = self._latents(layer, x, ratio)
            starts = np.arange(len(latents)) * ratio
            entries = r.entry_row(self._turn(layer, latents, starts))
            keys = self._norm(layer, "indexer.k_norm", self._product(layer, "indexer.wk", latents))
            shared = Shared(entries, r.index_key(r.bf16(self._turn(layer, keys, starts))), [], [])
        result = Result(x)
        if layer in c.index_source_layer_ids:
            assert shared is not None
            result.picks, result.blocks = self._select(layer, x, qr, visible, shared)
            picks, candidates = (result.picks, result.blocks) if given is None else given
            shared = Shared(shared.entries, shared.keys, picks, candidates or shared.blocks)
        rows = []
        for t in positions:
            seen = window[max(t - c.sliding_window + 1, 0) : t + 1]
            if ratio:
                assert shared is not None
                seen = np.concatenate([seen, shared.entries[shared.picks[t]]])
            rows.append(self._attend(layer, q[t], seen))
        result.out = self._output(layer, np.stack(rows), positions)
        return result, shared

    def draft_context(self, weights: Weights, states: Array) -> Array:
        """Of a draft's own weights and the hidden states of its target layers, side by side."""
        product = self.r.bf16(states @ (weights["proj.weight"] * np.kron(weights["proj.scale"], np.ones((32, 32)))).T)
        return self.r.bf16(oracle.rms_norm(product, weights["norm.weight"], self.c.rms_norm_eps))

    def draft(self, layer: int, context: Array, block: Array) -> Array:
        """A draft layer on the block of rows behind a sequence, of whose tokens it has the context's rows."""
        before, positions = len(context), np.arange(len(context), len(context) + len(block))
        context_rows = self._window_rows(layer, context, np.arange(before))
        _, q = self._queries(layer, block, positions)
        first = max(before - self.c.sliding_window, 0)
        seen = np.concatenate([context_rows[first:], self._window_rows(layer, block, positions)])
        return self._output(layer, np.stack([self._attend(layer, row, seen) for row in q]), positions)

    def _queries(self, layer: int, x: Array, positions: Array) -> tuple[Array, Array]:
        """(latent queries, rotated queries [rows, heads, 512])."""
        qr = self._norm(layer, "q_norm", self._product(layer, "wq_a", x))
        q = self._product(layer, "wq_b", qr).reshape(len(x), self.c.num_attention_heads, 512)
        return qr, self.r.query(self._turn(layer, q, positions))

    def _window_rows(self, layer: int, x: Array, positions: Array) -> Array:
        kv = self._norm(layer, "kv_norm", self._product(layer, "wkv", x))
        return self.r.window_row(self._turn(layer, kv, positions))

    def _output(self, layer: int, o: Array, positions: Array) -> Array:
        c, r = self.c, self.r
        o = r.bf16(self._turn(layer, r.bf16(o), positions, inverse=True))
        groups = o.reshape(len(o), c.o_groups, -1)
        wo_a = self._weight(layer, "wo_a").reshape(c.o_groups, -1, groups.shape[-1])
        low = r.bf16(np.einsum("tgk,gdk->tgd", groups, wo_a, optimize=True))
        return self._product(layer, "wo_b", low.reshape(len(o), -1))

    def _select(
        self, layer: int, x: Array, qr: Array, visible: Array, shared: Shared
    ) -> tuple[list[list[int]], list[list[int]]]:
        c, r = self.c, self.r
        iq = self._product(layer, "indexer.wq_b", qr).reshape(len(x), c.index_n_heads, 128)
        iq, scale = r.index_query(r.bf16(self._turn(layer, iq, np.arange(len(x)))))
        weights = self._product(layer, "indexer.weights_proj", x)
        weights = weights if scale is None else r.fp32(weights * scale)
        weights = r.fp32(r.fp32(weights * r.fp32(np.array(128**-0.5))) * r.fp32(np.array(c.index_n_heads**-0.5)))
        scores = index_scores(iq, weights, shared.keys, r)
        picks, chosen = [], []
        for t, count in enumerate(visible):
            allowed = scores[t, :count].copy()
            if c.takes_candidates(layer):
                allowed[~np.isin(np.arange(count) // 8, shared.blocks[t])] = -np.inf
            picks.append([j for j in best(allowed, c.index_topk) if allowed[j] > -np.inf])
            if layer == c.candidate_source_layer_id:
                maxima = [scores[t, m : min(m + 8, count)].max() for m in range(0, count, 8)]
                maxima[-1:] = [np.inf] if maxima else []
                chosen.append(best(np.array(maxima), c.candidate_topk_blocks))
        return picks, chosen

    def _attend(self, layer: int, q: Array, rows: Array) -> Array:
        """[heads, 512] of one row: a softmax over the rows that it sees, with a sink that has no value."""
        weight = np.exp(q @ rows.T / math.sqrt(512))
        return (weight @ rows) / (weight.sum(axis=1) + np.exp(self.w[layer]["attn_sink"]))[:, None]
