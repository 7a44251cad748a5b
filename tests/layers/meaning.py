# SPDX-License-Identifier: Apache-2.0
"""What a whole attention layer computes, from its formulas: dense numpy, one sequence, no caches, pages or steps.

Weights are plain arrays under their published names, dimensions are plain numbers. Two modes: `Exact` computes in
float64 throughout; `Rounded` rounds where the formats and the bf16 and FP8 products round, and nowhere else.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from tests import oracle

Array = np.ndarray
Weights = dict[str, Array]


@dataclass(frozen=True)
class Numbers:
    """Dimensions and constants of one layer; a rope_factor of 1 is plain rotation."""

    ratio: int
    heads: int
    groups: int
    index_heads: int
    index_topk: int
    window: int
    eps: float
    theta: float
    rope_factor: float
    beta_fast: float
    beta_slow: float
    original: int


def frequencies(theta: float, factor: float, beta_fast: float, beta_slow: float, original: int) -> Array:
    """[32] angles per position. YaRN: pair i turns original * f_i / (2 pi) times within the original context; the pairs
    from the one that turns beta_fast times to the one that turns beta_slow times pass from f_i to f_i / factor."""
    result = []

    def pair(turns: float) -> float:
        """The (real) index i at which theta^(-i / 32) * original = 2 pi * turns."""
        return 32 * math.log(original / (2 * math.pi * turns)) / math.log(theta)

    low, high = max(math.floor(pair(beta_fast)), 0), min(math.ceil(pair(beta_slow)), 63)
    for i in range(32):
        plain = theta ** (-i / 32)
        slow = min(max((i - low) / (high - low) if high > low else float(i > low), 0.0), 1.0)
        result.append(plain * (1 - slow) + plain / factor * slow)
    return np.array(result)


class Exact:
    """Nothing is rounded."""

    def bf16(self, x: Array) -> Array:
        return x

    def fp32(self, x: Array) -> Array:
        return x

    def activation(self, x: Array) -> Array:
        """Operand of a product with an FP8 weight: rounded in blocks of 128 columns."""
        return x

    def turn(self, x: Array, angles: Array, inverse: bool) -> Array:
        """Multiply the complex numbers x[2i] + i x[2i+1] of the last 64 columns by exp(+-i angle)."""
        sign = -1 if inverse else 1
        turned = (x[..., -64::2] + 1j * x[..., -63::2]) * np.exp(sign * 1j * angles)
        out = x.copy()
        out[..., -64::2], out[..., -63::2] = turned.real, turned.imag
        return out

    def query(self, x: Array) -> Array:
        """What the attention multiplies, from the rotated query."""
        return x

    def window_row(self, x: Array) -> Array:
        """What the window cache holds, from the rotated row."""
        return x

    def entry_row(self, x: Array) -> Array:
        """What the compressed cache holds, from the rotated entry."""
        return x

    def spread(self, x: Array) -> Array:
        """The indexer's Hadamard transform, if it is on."""
        return x

    def index_key(self, x: Array) -> tuple[Array, Array]:
        """(keys to multiply [n, 128], factor of their scores [n])."""
        return x, np.ones(len(x))

    def index_query(self, x: Array) -> tuple[Array, Array | None]:
        """(queries to multiply [T, heads, 128], factor of the head weights [T, heads] or None)."""
        return x, None


@dataclass
class Rounded(Exact):
    """Rounds as the formats do.

    kv         "fp8_ds_mla", "bf16" or "fp8" (one scale per tensor: q_scale, kv_scale)
    index      "fp8" or "mxfp4" with the tie rule `ties`
    hadamard   whether indexer queries and keys are transformed
    """

    kv: str = "fp8_ds_mla"
    index: str = "fp8"
    ties: str = "ties_to_lower"
    hadamard: bool = False
    q_scale: float = 1.0
    kv_scale: float = 1.0

    def bf16(self, x: Array) -> Array:
        """Sums are fp32 numbers (however exactly they were accumulated) before they become bf16."""
        return oracle.bf16_round(self.fp32(x))

    def fp32(self, x: Array) -> Array:
        return x.astype(np.float32).astype(np.float64)

    def activation(self, x: Array) -> Array:
        values, scale = blocks(x, 128, "e4m3", 1e-10)
        return (values * scale[..., None]).reshape(x.shape)

    def turn(self, x: Array, angles: Array, inverse: bool) -> Array:
        cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        out = self.fp32(x)
        out[..., -64:] = oracle.rope_f32(x[..., -64:], cos, sin, inverse)
        return out

    def query(self, x: Array) -> Array:
        if self.kv != "fp8":
            return self.bf16(x)
        return e4m3(self.fp32(x * np.float32(1 / self.q_scale))) * self.q_scale

    def window_row(self, x: Array) -> Array:
        if self.kv == "fp8":
            return e4m3(self.fp32(x / np.float32(self.kv_scale))) * self.kv_scale
        return self._row(x)

    def entry_row(self, x: Array) -> Array:
        if self.kv == "fp8":
            inverse = np.float32(1) / np.float32(self.kv_scale)
            return e4m3(self.fp32(self.bf16(x) * inverse)) * self.kv_scale
        return self._row(x)

    def _row(self, x: Array) -> Array:
        """bf16, and e4m3 in blocks of 64 for the 448 unrotated columns of an fp8_ds_mla row."""
        out = self.bf16(x)
        if self.kv == "fp8_ds_mla":
            values, scale = blocks(out[:, :448], 64, "e4m3")
            out[:, :448] = (values * scale[..., None]).reshape(-1, 448)
        return out

    def spread(self, x: Array) -> Array:
        if not self.hadamard:
            return x
        signs = np.array([[(-1.0) ** bin(i & j).count("1") for j in range(128)] for i in range(128)])
        return self.bf16(self.fp32(x @ signs) * np.float32(128**-0.5))

    def index_key(self, x: Array) -> tuple[Array, Array]:
        if self.index == "fp8":
            values, scale = blocks(x, 128, "e4m3")
            return values[:, 0], scale[:, 0]
        values, scale = blocks(x, 32, "e2m1", ties=self.ties)
        return (values * scale[..., None]).reshape(x.shape), np.ones(len(x))

    def index_query(self, x: Array) -> tuple[Array, Array | None]:
        if self.index == "fp8":
            values, scale = blocks(x, 128, "e4m3")
            return values[..., 0, :], scale[..., 0]
        values, scale = blocks(x, 32, "e2m1", ties=self.ties)
        return (values * scale[..., None]).reshape(x.shape), None


def e4m3(x: Array) -> Array:
    """Nearest e4m3 values, saturating."""
    return oracle.E4M3[oracle.e4m3_encode(x)]


def blocks(x: Array, size: int, kind: str, floor: float = 1e-4, ties: str = "ties_to_lower") -> tuple[Array, Array]:
    """Values of the codes [..., n, size] and power-of-two scales [..., n]: the smallest that let the block's absmax
    (at least `floor`) fit into the code's range."""
    parts = x.reshape(*x.shape[:-1], -1, size)
    ratio = np.maximum(np.abs(parts).max(axis=-1), floor) / (448.0 if kind == "e4m3" else 6.0)
    mantissa, exponent = np.frexp(ratio)
    scale = np.ldexp(1.0, np.where(mantissa == 0.5, exponent - 1, exponent))
    scaled = parts / scale[..., None]
    if kind == "e4m3":
        return e4m3(scaled), scale
    codes = oracle.e2m1_encode(scaled, ties)
    return np.where(codes & 8, -1.0, 1.0) * oracle.E2M1[codes & 7], scale


@dataclass
class Past:
    """What earlier tokens left behind, already rounded: rows that end right before the first token.

    window        [n, 512] rows of the last n tokens
    entries       [first // ratio, 512]; index_keys: (keys [first // ratio, 128], factors)
    state         projections (kv [m, width], score with its offset [m, width]) of the last m tokens; index_state alike
    """

    window: Array
    entries: Array | None = None
    state: tuple[Array, Array] | None = None
    index_keys: tuple[Array, Array] | None = None
    index_state: tuple[Array, Array] | None = None


@dataclass
class Result:
    """Intermediates by row, named as the layer's `capture` names them, and what the caches must hold."""

    kv: Array
    q: Array
    o_raw: Array
    lse: Array
    o: Array
    oa: Array
    out: Array
    window: Array
    idx_q: Array | None = None
    scores: Array | None = None
    topk: list[list[int]] = field(default_factory=list)
    entries: Array | None = None
    index_keys: tuple[Array, Array] | None = None


class Meaning:
    """The layer with these numbers and weights; a weight `x.weight` with `x.scale` is FP8 in blocks of 128 x 128."""

    def __init__(self, numbers: Numbers, weights: Weights, rounding: Exact | None = None) -> None:
        self.n, self.w, self.r = numbers, weights, rounding or Exact()
        self.frequencies = frequencies(
            numbers.theta, numbers.rope_factor, numbers.beta_fast, numbers.beta_slow, numbers.original
        )

    def _rotate(self, x: Array, positions: Array, inverse: bool = False) -> Array:
        angles = positions[:, None] * self.frequencies
        return self.r.turn(x, angles.reshape(len(x), *[1] * (x.ndim - 2), 32), inverse)

    def _weight(self, name: str) -> Array:
        weight, scale = self.w[name + ".weight"], self.w.get(name + ".scale")
        if scale is None:
            return weight
        spread = np.kron(scale, np.ones((128, 128)))[: weight.shape[0], : weight.shape[1]]
        return weight * spread

    def _linear(self, name: str, x: Array) -> Array:
        return (self.r.activation(x) if name + ".scale" in self.w else x) @ self._weight(name).T

    def _norm(self, x: Array, name: str | None) -> Array:
        return oracle.rms_norm(x, None if name is None else self.w[name], self.n.eps)

    def _compress(
        self, prefix: str, hidden: Array, first: int, past: tuple[Array, Array] | None
    ) -> tuple[Array, list[int]]:
        """(rotated entries [n, head], their numbers) of the groups that close at or after `first`."""
        ratio, r = self.n.ratio, self.r
        kv = r.fp32(hidden @ self.w[prefix + "wkv.weight"].T)
        score = r.fp32(hidden @ self.w[prefix + "wgate.weight"].T)
        offset = self.w[prefix + "ape"]
        score = r.fp32(score + offset[(first + np.arange(len(hidden))) % ratio])
        start = first
        if past is not None:
            kv, score = np.concatenate([past[0], kv]), np.concatenate([past[1], score])
            start = first - len(past[0])
        head = kv.shape[1] // (2 if ratio == 4 else 1)
        groups, means = list(range(first // ratio, (first + len(hidden)) // ratio)), []
        for g in groups:
            own = slice(g * ratio - start, (g + 1) * ratio - start)
            if ratio == 4:
                values, logits = [kv[own, head:]], [score[own, head:]]
                if g > 0:
                    before = slice(own.start - 4, own.start)
                    values, logits = [kv[before, :head], *values], [score[before, :head], *logits]
                value, logit = np.concatenate(values), np.concatenate(logits)
            else:
                value, logit = kv[own], score[own]
            weight = np.exp(logit - logit.max(axis=0))
            means.append((weight * value).sum(axis=0) / weight.sum(axis=0))
        mean = r.fp32(np.array(means).reshape(-1, head))
        normed = r.fp32(self._norm(mean, prefix + "norm.weight"))
        return self._rotate(normed, np.array(groups, dtype=np.int64) * ratio), groups

    def scores(self, hidden: Array, idx_q: Array, keys: tuple[Array, Array]) -> Array:
        """[T, n] scores of all entries, visible or not."""
        q, scale = self.r.index_query(idx_q)
        return index_scores(q, self.head_weights(hidden, scale), keys, self.r)

    def head_weights(self, hidden: Array, scale: Array | None) -> Array:
        """[T, heads] weights of the heads' scores, with the queries' scales in them."""
        r = self.r
        weights = r.bf16(hidden @ self.w["indexer.weights_proj.weight"].T)
        if scale is not None:
            weights = r.fp32(weights * scale)
        for factor in (128**-0.5, self.n.index_heads**-0.5):
            weights = r.fp32(weights * r.fp32(np.array(factor)))
        return weights

    def run(
        self, hidden: Array, first: int = 0, past: Past | None = None, picks: list[list[int]] | None = None
    ) -> Result:
        """Positions first .. first + T - 1 of a sequence; `picks` replaces the indexer's selection."""
        n, r = self.n, self.r
        positions = first + np.arange(len(hidden))
        qr = r.bf16(self._norm(r.bf16(self._linear("wq_a", hidden)), "q_norm.weight"))
        kv = r.bf16(self._norm(r.bf16(self._linear("wkv", hidden)), "kv_norm.weight"))
        q = r.bf16(self._linear("wq_b", qr)).reshape(len(hidden), n.heads, 512)
        q = r.query(self._rotate(r.fp32(self._norm(q, None)), positions))
        turned = self._rotate(kv, positions)
        rows = r.window_row(turned)
        window = rows if past is None else np.concatenate([past.window, rows])

        entries = keys = idx_q = scores = None
        visible = (positions + 1) // n.ratio if n.ratio > 1 else np.zeros_like(positions)
        chosen = [list(range(v)) for v in visible]
        if n.ratio > 1:
            fresh, _ = self._compress("compressor.", hidden, first, None if past is None else past.state)
            entries = r.entry_row(fresh)
            if past is not None:
                entries = np.concatenate([past.entries, entries])
        if n.ratio == 4:
            state = None if past is None else past.index_state
            fresh, _ = self._compress("indexer.compressor.", hidden, first, state)
            keys = r.index_key(r.spread(r.bf16(fresh)))
            if past is not None:
                keys = tuple(np.concatenate(pair) for pair in zip(past.index_keys, keys, strict=True))
            idx_q = r.bf16(self._linear("indexer.wq_b", qr)).reshape(len(hidden), n.index_heads, 128)
            idx_q = r.spread(r.bf16(self._rotate(idx_q, positions)))
            scores = self.scores(hidden, idx_q, keys)
            chosen = [best(row[:v], n.index_topk) for row, v in zip(scores, visible, strict=True)]
            if picks is not None:
                chosen = picks

        oldest = first - (len(window) - len(rows))
        row_positions = oldest + np.arange(len(window))
        near = (row_positions <= positions[:, None]) & (row_positions > positions[:, None] - n.window)
        o_raw, lse = self._attend(q, window, near, entries, chosen)
        o_raw = r.bf16(o_raw)
        o, oa, out = self.project(o_raw, positions)
        return Result(
            kv=r.bf16(turned),
            q=q,
            o_raw=o_raw,
            lse=lse,
            o=o,
            oa=oa,
            out=out,
            window=window,
            idx_q=idx_q,
            scores=scores,
            topk=chosen,
            entries=entries,
            index_keys=keys,
        )

    def project(self, o_raw: Array, positions: Array) -> tuple[Array, Array, Array]:
        """(o, oa, out) of the attention's output [T, heads, 512]: rotated back, by group to the low rank, to hidden."""
        n, r = self.n, self.r
        turned_back = self._rotate(o_raw, positions, inverse=True)
        by_group = turned_back.reshape(len(o_raw), n.groups, -1)
        operand = r.activation(by_group) if "wo_a.scale" in self.w else r.bf16(by_group)
        wo_a = self._weight("wo_a").reshape(n.groups, -1, by_group.shape[-1])
        oa = r.bf16(np.einsum("tgk,gdk->tgd", operand, wo_a, optimize=True))
        return r.bf16(turned_back), oa, self.hidden(oa)

    def hidden(self, oa: Array) -> Array:
        """The layer's output of the low-rank products [T, groups, rank]."""
        return self.r.bf16(self._linear("wo_b", oa.reshape(len(oa), -1)))

    def _attend(
        self, q: Array, window: Array, near: Array, entries: Array | None, chosen: list[list[int]]
    ) -> tuple[Array, Array]:
        """Softmax over the near window rows and the chosen entries, with the sink as one more logit without a value."""
        rows, mask = window, near
        if entries is not None:
            picked = np.zeros((len(q), len(entries)), dtype=bool)
            for t, c in enumerate(chosen):
                picked[t, c] = True
            used = picked.any(axis=0)
            rows, mask = np.concatenate([window, entries[used]]), np.concatenate([near, picked[:, used]], axis=1)
        logits = np.where(mask[:, None], (q @ rows.T) / math.sqrt(512), -np.inf)
        top = logits.max(axis=-1, keepdims=True)
        weight = np.exp(logits - top)
        total = weight.sum(axis=-1, keepdims=True)
        sink = np.exp(self.w["attn_sink"][:, None] - top)
        return (weight @ rows) / (total + sink), (top + np.log(total))[..., 0]


def index_scores(q: Array, weights: Array, keys: tuple[Array, Array], rounding: Exact) -> Array:
    """Key factor * sum over heads of relu(q . k) * weight."""
    total = np.zeros((len(q), len(keys[0])))
    for h in range(q.shape[1]):
        total += np.maximum(q[:, h] @ keys[0].T, 0.0) * weights[:, h, None]
    return rounding.fp32(total * keys[1])


def best(scores: Array, k: int) -> list[int]:
    """The k largest, the lower index first among equals."""
    return sorted(sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:k])
