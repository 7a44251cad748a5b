# SPDX-License-Identifier: Apache-2.0
"""Attention with output_quant on a GPU: byte for byte what the CPU makes of the bf16 results that the same kernel
stores without it. And log-sum-exps of odd strides, or of nobody who asks."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

from cute_kernels.indices.ops import combine_topk_swa_indices
from cute_kernels.kv_cache.ops import dequantize_and_gather_k_cache
from cute_kernels.output import reference
from cute_kernels.output.call import QuantizedCall
from cute_kernels.output.ops import output_scale_shape
from cute_kernels.runtime.arch import arch_of
from cute_kernels.runtime.ops import FALLBACK_VARIABLE
from cute_kernels.sparse_mla.ops import (
    merge_attention_states,
    sparse_mla_decode,
    sparse_mla_prefill,
    sparse_mla_prefill_paged,
)
from tests import oracle
from tests.gpu import decode_cases, paged_cases
from tests.gpu.decode_checks import same_bits
from tests.gpu.prefill_checks import LARGEST
from tests.helpers import POISON_BYTE, bits, raw_bytes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or arch_of(0) != "sm_90a", reason="Hopper's kernels store codes"),
]

TABLE = oracle.cos_sin_table(3000)
KNOWN = (0, 2999, 3000, -5, 2**32 + 1, 127)


@pytest.fixture(autouse=True)
def no_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FALLBACK_VARIABLE, raising=False)


def positions_of(tokens: int) -> torch.Tensor:
    """Some of them special, in every second element of a tensor."""
    positions = torch.randint(0, 3000, (tokens,), generator=torch.Generator().manual_seed(tokens))
    positions[: len(KNOWN)] = torch.tensor(KNOWN)[:tokens]
    wide = torch.full((tokens, 2), 2**62, device="cuda")
    wide[:, 0] = positions
    return wide[:, 0]


@dataclasses.dataclass
class Outputs:
    """Codes and scales in larger buffers full of poison."""

    codes: torch.Tensor
    scales: torch.Tensor
    buffers: tuple[torch.Tensor, torch.Tensor]

    @classmethod
    def make(cls, tokens: int, groups: int, per_group: int) -> Outputs:
        codes = torch.empty(groups + 1, tokens + 2, per_group * 512 + 64, dtype=torch.float8_e4m3fn, device="cuda")
        shape = output_scale_shape(tokens, groups, per_group)
        scales = torch.empty(shape[0], shape[1] + 2, shape[2] + 3, device="cuda")
        for buffer in (codes, scales):
            raw_bytes(buffer).fill_(POISON_BYTE)
        view = codes[1:, 1 : tokens + 1, 32 : 32 + per_group * 512].transpose(0, 1)
        return cls(view, scales[:, 1:-1, 1 : shape[2] + 1], (codes, scales))

    def on_cpu(self) -> Outputs:
        """A copy with the same strides, and everything around it."""
        buffers = tuple(buffer.cpu() for buffer in self.buffers)
        views = (
            buffer.as_strided(t.shape, t.stride(), t.storage_offset())
            for buffer, t in zip(buffers, (self.codes, self.scales), strict=True)
        )
        return Outputs(*views, buffers)

    def assert_same(self, other: Outputs) -> None:
        for mine, want in zip(self.buffers, other.buffers, strict=True):
            wrong = (raw_bytes(mine).cpu() != raw_bytes(want)).nonzero()
            assert not len(wrong), f"{len(wrong)} bytes of {mine.dtype}, first at {wrong[0].tolist()}"


def check(
    rows: int,
    heads: int,
    plain: torch.Tensor,
    attend: Callable[..., Any],
    groups: int = 1,
    times: int = 1,
    table: torch.Tensor = TABLE,
) -> Outputs:
    """attend(out=..., output_quant=...) against bf16 results [rows, heads, 512]."""
    outputs, positions = Outputs.make(rows, groups, heads // groups), positions_of(rows)
    want = outputs.on_cpu()
    where = plain.reshape(rows, heads, 512).cpu(), positions.cpu(), table.cpu()
    results = want.codes, want.scales
    reference.fused_inv_rope_fp8_quant(QuantizedCall(*where, *results, groups, heads // groups, False, False))
    for _ in range(times):
        attend(out=outputs.codes, output_quant=(positions, table.cuda(), outputs.scales))
    outputs.assert_same(want)
    return outputs


def strided_lse(b: int, heads: int, s_q: int) -> torch.Tensor:
    """[b, heads, s_q] as a layer's [tokens, heads] has it, in the midst of NaN."""
    return torch.full((b * s_q, heads + 3), math.nan, device="cuda")[:, 2:-1].unflatten(0, (b, s_q)).transpose(1, 2)


DECODES = [
    # heads, groups, second, requests, tokens, splits
    (64, 8, "listed", 3, 1, {"num_splits": 1}),
    (64, 8, "listed", 3, 1, {}),
    (64, 2, "dense", 5, 3, {"num_splits": 1}),
    (128, 16, "listed", 3, 2, {"num_splits": 1}),
    (128, 16, "listed", 2, 1, {"num_splits": 5}),
    (32, 4, "listed", 4, 1, {"num_splits": 1}),
    (16, 2, "none", 7, 1, {"num_splits": 1}),
    (16, 2, "listed", 140, 1, {}),
    (13, 1, "dense", 3, 2, {"num_splits": 1}),
    (8, 1, "listed", 5, 1, {"num_splits": 1}),
    (5, 5, "listed", 2, 2, {"num_splits": 1}),
    (100, 4, "listed", 1, 1, {"num_splits": 1}),
    (64, 8, "listed", 6, 1, {"num_splits": 3}),
    (64, 8, "listed", 2, 3, {"split_tokens": 128}),
    (64, 8, "listed", 3, 1, {"split_tokens": 64}),
    (8, 1, "dense", 5, 1, {"num_splits": 2}),
    (3, 1, "none", 1, 1, {"num_splits": 2}),
    (64, 8, "none", 150, 1, {"num_splits": 1}),
    (8, 1, "none", 60, 1, {}),
    (8, 1, "listed", 40, 1, {}),
    (16, 2, "listed", 66, 1, {}),
    (5, 1, "listed", 5, 1, {}),
]


@pytest.mark.parametrize(("heads", "groups", "second", "b", "s_q", "splits"), DECODES)
def test_decode(heads: int, groups: int, second: str, b: int, s_q: int, splits: dict[str, int]) -> None:
    call = decode_cases.make(b=b, s_q=s_q, heads=heads, second=second, lengths="bs", extra_topk=1200, **splits)
    call.indices[-1] = -1  # among others, a row that attends to nothing
    if call.extra_indices is not None:
        call.extra_indices[-1] = -1
    plain, lse = decode_cases.run(call)
    strided = strided_lse(b, heads, s_q)

    def attend(**outputs: Any) -> None:
        decode_cases.run(call, lse=strided, **outputs)

    check(b * s_q, heads, plain, attend, groups)
    assert torch.equal(strided, lse)
    assert strided.storage_offset() == 2
    assert strided._base is not None
    assert bool(strided._base.isnan()[:, :2].all() & strided._base.isnan()[:, -1:].all())


def test_decode_with_nan_and_infinity() -> None:
    call = decode_cases.make(b=4, heads=64, topk=64, lengths="none", bad=0.0, sink="none", num_splits=1)
    call.q[0, 0, 3] = math.nan
    call.q[1, 0, :, 511] = math.inf
    plain, _ = decode_cases.run(call)
    assert plain.isnan().any()
    check(4, 64, plain, lambda **outputs: decode_cases.run(call, **outputs), 8)


def test_nobody_asks_for_lse() -> None:
    for splits in ({"num_splits": 1}, {"num_splits": 3}):
        call = decode_cases.make(b=3, heads=64, second="listed", **splits)
        plain, _ = decode_cases.run(call)
        out = torch.full_like(plain, math.nan)
        got, lse = sparse_mla_decode(**call.arguments(), out=out, return_lse=False)
        assert lse is None
        assert got is out
        assert same_bits(out, plain)


def test_merge_without_lse() -> None:
    outs, lses = torch.randn(3, 2, 1, 4, 512, device="cuda"), torch.randn(3, 2, 4, 1, device="cuda")
    want, _ = merge_attention_states(outs, lses)
    got, lse = merge_attention_states(outs, lses, return_lse=False)
    assert lse is None
    assert same_bits(got, want)


@pytest.mark.parametrize(
    ("rows", "heads", "groups", "topk"),
    [
        (5, 64, 8, 200),
        (9, 128, 16, 130),
        (300, 64, 8, 70),
        (3, 17, 1, 65),
        (6, 8, 1, 100),
        (4, 16, 2, 64),
        (300, 16, 2, 70),
        (150, 5, 1, 65),
    ],
)
def test_prefill(rows: int, heads: int, groups: int, topk: int) -> None:
    g = torch.Generator("cuda").manual_seed(rows)
    q = torch.randn(rows, heads, 512, device="cuda", generator=g).bfloat16()
    kv = (torch.randn(500, 1, 512, device="cuda", generator=g).clamp(-4, 4) * LARGEST / 4).bfloat16()
    indices = torch.randint(-20, 520, (rows, 1, topk), device="cuda", generator=g).int()
    length = torch.randint(0, topk + 1, (rows,), device="cuda", generator=g).int()
    length[1] = 0
    sink = torch.randn(heads, device="cuda", generator=g)
    given = {"attn_sink": sink, "topk_length": length}
    plain, top, lse = sparse_mla_prefill(q, kv, indices, 512**-0.5, **given)
    own = [torch.full((heads, rows + 1), math.nan, device="cuda").T[:-1] for _ in range(2)]

    def attend(**outputs: Any) -> None:
        sparse_mla_prefill(q, kv, indices, 512**-0.5, **given, max_logits=own[0], lse=own[1], **outputs)

    check(rows, heads, plain, attend, groups)
    assert torch.equal(own[0], top)
    assert torch.equal(own[1], lse)
    out, *others = sparse_mla_prefill(q, kv, indices, 512**-0.5, **given, return_lse=False)
    assert others == [None, None]
    assert same_bits(out, plain)


def sums_of_squares(q: torch.Tensor) -> torch.Tensor:
    """fp32 [rows, heads * 4] of queries [rows, heads, 512], in the order of cute_kernels/kv_cache/query_norm.py: pairs,
    neighbouring runs of eight columns, then a run's four pairs."""
    low, high = q.float().unflatten(-1, (4, 16, 4, 2)).unbind(-1)
    # a product of bf16 is exact in fp32, and its sum with another number in float64
    sums = (high.double().square() + low.square().double()).float()
    for dim in (3, 3, 3, 3, 4, 4):
        first, second = (sums.index_select(dim, torch.arange(i, sums.shape[dim], 2, device=q.device)) for i in (0, 1))
        sums = first + second
    return sums.flatten(1)


def rotated(x: torch.Tensor, positions: torch.Tensor, table: torch.Tensor = TABLE, way: int = 1) -> torch.Tensor:
    """[rows, heads, 512] with the last 64 columns rotated, or rotated back: way -1. In float64."""
    x = x.double()
    cos, sin = table.double().cuda()[positions.clamp(0, len(table) - 1)][:, None].chunk(2, dim=-1)
    sin = way * sin
    even, odd = x[..., 448::2], x[..., 449::2]
    turned = torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1).flatten(-2)
    return torch.cat([x[..., :448], turned], dim=-1)


QUARTERS = torch.tensor([[1.0, 0.0, -1.0, 0.0], [0.0, 1.0, 0.0, -1.0]])
"""Cosines and sines of quarter turns."""


class Exact(NamedTuple):
    """Raw queries of which nothing is rounded: whole numbers times a power of two for each head, quarter turns, sums of
    squares whose root is a power of two. So bits tell whether each is multiplied with what belongs to it."""

    q: torch.Tensor
    squares: torch.Tensor
    table: torch.Tensor
    finished: torch.Tensor

    @classmethod
    def make(cls, rows: int, heads: int, positions: torch.Tensor, eps: float, g: torch.Generator) -> Exact:
        """eps: 0 or 3."""
        whole = torch.randint(-3, 4, (rows, heads, 512), device="cuda", generator=g).double()
        power = torch.randint(-20, 21, (rows, heads, 1), device="cuda", generator=g).double() * (eps == 0)
        rms = torch.exp2(power)
        shares = torch.tensor([96.0, 224.0, 64.0, 128.0], dtype=torch.float64, device="cuda")
        squares = (shares * rms**2).flatten(1).float()
        turns = torch.randint(0, 4, (len(TABLE), 32), device="cuda", generator=g)
        table = torch.cat([part.cuda()[turns] for part in QUARTERS], dim=-1)
        finished = rotated(whole, positions, table) * (1 + eps) ** -0.5
        return cls((whole * rms).bfloat16(), squares, table, finished.bfloat16())


@pytest.mark.parametrize(
    ("rows", "heads", "groups", "topk", "eps"),
    [
        (5, 64, 8, 200, 0.0),
        (9, 128, 16, 130, 3.0),
        (700, 64, 8, 70, 0.0),
        (301, 128, 8, 128, 0.0),
        (3, 33, 1, 65, 0.0),
        (4, 100, 4, 0, 0.0),
    ],
)
def test_prefill_of_raw_queries(rows: int, heads: int, groups: int, topk: int, eps: float) -> None:
    """Byte for byte the codes of queries that are normed and rotated before, where that rounds nothing."""
    g = torch.Generator("cuda").manual_seed(rows)
    positions = positions_of(rows)
    q, squares, table, finished = Exact.make(rows, heads, positions, eps, g)
    finished[rows - 1, 3, 77] = q[rows - 1, 3, 77] = math.nan
    finished[0, 5] = squares[0, 4 * 5 + 2] = math.nan
    kv = torch.randint(-2, 3, (500, 1, 512), device="cuda", generator=g).bfloat16()
    indices = torch.randint(-20, 520, (rows, 1, topk), device="cuda", generator=g).int()
    length = torch.randint(0, topk + 1, (rows,), device="cuda", generator=g).int()
    length[1] = 0
    sink = torch.randn(heads, device="cuda", generator=g)
    given = {"attn_sink": sink, "topk_length": length}
    plain, top, lse = sparse_mla_prefill(finished, kv, indices, 512**-0.5, **given)
    before = q.clone(), squares.clone()
    own = [torch.full((rows, heads), math.nan, device="cuda") for _ in range(2)]
    wide = torch.full((rows, heads * 4 + 8), math.nan, device="cuda")
    wide[:, 4:-4] = squares

    def attend(**outputs: Any) -> None:
        more = {"q_norm": (wide[:, 4:-4], eps), "max_logits": own[0], "lse": own[1]}
        sparse_mla_prefill(q, kv, indices, 512**-0.5, **given, **more, **outputs)

    check(rows, heads, plain, attend, groups, times=3, table=table)
    assert same_bits(own[0], top)
    assert same_bits(own[1], lse)
    assert same_bits(q, before[0])
    assert same_bits(squares, before[1])


def assert_raw_queries(q: torch.Tensor, squares: torch.Tensor, eps: float, seed: int = 1) -> None:
    """Attention of raw queries [rows, heads, 512] is near float64 norm, rotation and attention.

    A logit is off by what rounding rotary columns to bf16 makes of it, 2^-9 of the sum of magnitudes, and a little for
    sums in fp32. Results, in the codes' scale, are off by as much as their weights, by the rounding of weights to bf16
    and of results to codes.
    """
    rows, heads = q.shape[:2]
    g = torch.Generator("cuda").manual_seed(seed)
    kv = torch.randn(300, 1, 512, device="cuda", generator=g).bfloat16()
    indices = torch.randint(0, 300, (rows, 1, 100), device="cuda", generator=g).int()
    sink = torch.randn(heads, device="cuda", generator=g)
    positions = positions_of(rows)
    outputs = Outputs.make(rows, 1, heads)
    own = [torch.full((rows, heads), math.nan, device="cuda") for _ in range(2)]
    quant = (positions, TABLE.cuda(), outputs.scales)
    given = {"out": outputs.codes, "output_quant": quant, "max_logits": own[0], "lse": own[1], "attn_sink": sink}
    sparse_mla_prefill(q, kv, indices, 512**-0.5, q_norm=(squares, eps), **given)
    for some in torch.arange(rows, device="cuda").split(16):
        x, keys = rotated(q[some], positions[some]), kv.double()[indices[some, 0].long(), 0]
        x /= (q[some].double().square().mean(-1, keepdim=True) + eps).sqrt()
        logits = torch.einsum("thd,tkd->thk", x, keys) * 512**-0.5
        magnitudes = [torch.einsum("thd,tkd->thk", x[..., i:].abs(), keys[..., i:].abs()) for i in (448, 0)]
        off = ((2.0**-9 * magnitudes[0] + 2.0**-18 * magnitudes[1]) * 512**-0.5).amax(-1)
        assert bool(((own[1][some].double() - logits.logsumexp(-1)).abs() <= off + 1e-5).all())
        assert bool(((own[0][some].double() - logits.amax(-1)).abs() <= off + 1e-5).all())
        whole = torch.cat([logits, sink.double().expand(len(some), heads)[..., None]], dim=-1)
        weights = whole.softmax(-1)[..., :-1]
        want = rotated(torch.einsum("thk,tkd->thd", weights, keys), positions[some], way=-1)
        spread = torch.einsum("thk,tkd->thd", weights, keys.abs())
        scales = outputs.scales[0].unflatten(0, (heads, 4))[..., some].permute(2, 0, 1).double()
        got = outputs.codes[some, 0].double().unflatten(-1, (heads, 4, 128)) * scales[..., None]
        allowed = (spread * (2.0**-8 + 2 * off[..., None])).unflatten(-1, (4, 128)).amax(-1, keepdim=True) * 1.5
        allowed = allowed + 2.0**-4 * got.abs() + 2.0**-10 * scales[..., None]
        assert bool(((got - want.unflatten(-1, (4, 128))).abs() <= allowed).all())


@pytest.mark.parametrize(("rows", "heads", "eps"), [(40, 64, 1e-6), (150, 128, 1e-6), (20, 40, 1.0)])
def test_raw_queries_of_float64(rows: int, heads: int, eps: float) -> None:
    """Also those so large that their squares are near the end of fp32, and so small that eps is all there is."""
    g = torch.Generator("cuda").manual_seed(1)
    scale = torch.exp2(torch.randint(-70, 57, (rows, heads, 1), device="cuda", generator=g).float())
    q = (torch.randn(rows, heads, 512, device="cuda", generator=g) * scale).bfloat16()
    assert_raw_queries(q, sums_of_squares(q), eps)


def test_raw_queries_beyond_numbers() -> None:
    """They spoil their own heads at most."""
    rows, heads = 70, 64
    g = torch.Generator("cuda").manual_seed(3)
    positions = positions_of(rows)
    q, kv = (torch.randn(*shape, 512, device="cuda", generator=g).bfloat16() for shape in ((rows, heads), (300, 1)))
    indices = torch.randint(0, 300, (rows, 1, 100), device="cuda", generator=g).int()
    indices[5], indices[:, :, 70:80] = -1, -1

    def attend(q: torch.Tensor) -> tuple[torch.Tensor, ...]:
        outputs = Outputs.make(rows, 1, heads)
        quant = (positions, TABLE.cuda(), outputs.scales)
        _, *logs = sparse_mla_prefill(
            q, kv, indices, 512**-0.5, q_norm=(sums_of_squares(q), 0.0), out=outputs.codes, output_quant=quant
        )
        codes = raw_bytes(outputs.codes.clone()).view(rows, heads, 512)
        return codes, outputs.scales[0, :, :rows].clone().unflatten(0, (heads, 4)).permute(2, 0, 1), *logs

    usual, changed = attend(q), q.clone()
    # of the two heads after those with -1: one whose squares are infinite, one that is zero, and has no norm
    for head, value in enumerate((math.nan, math.inf, -math.inf, 2.0**127)):
        changed[[2, 5, 69], head, 100 * head + 9] = value
    changed[[2, 5, 69], 4], changed[[2, 5, 69], 5] = 2.0**60, 0.0
    got = attend(changed)
    others = torch.ones(rows, heads, dtype=torch.bool, device="cuda")
    others[[2, 69], :6] = False
    for mine, want in zip(got, usual, strict=True):
        assert torch.equal(bits(mine[others]), bits(want[others]))
    codes, _, top, lse = got
    assert bool((top[5] == -math.inf).all() & (lse[5] == math.inf).all() & (codes[5] & 0x7F == 0).all())
    for row in (2, 69):
        assert bool((codes[row, [0, 1, 5]] & 0x7F == 0x7F).all())
        # no norm is left of what is infinite when it is squared: all logits are zero
        assert float(lse[row, 4]) == pytest.approx(math.log(90), abs=1e-5)


def test_raw_queries_of_few_heads_are_refused() -> None:
    outputs = Outputs.make(3, 1, 16)
    q, kv = (torch.zeros(*shape, dtype=torch.bfloat16, device="cuda") for shape in ((3, 16, 512), (5, 1, 512)))
    indices = torch.zeros(3, 1, 4, dtype=torch.int32, device="cuda")
    quant = (positions_of(3), TABLE.cuda(), outputs.scales)
    q_norm = torch.zeros(3, 64, device="cuda"), 1e-6
    with pytest.raises(RuntimeError, match="q_norm is supported for more than"):
        sparse_mla_prefill(q, kv, indices, 1.0, q_norm=q_norm, out=outputs.codes, output_quant=quant)


@pytest.mark.parametrize(
    ("heads", "groups", "changes"),
    [
        (64, 8, {}),
        (128, 16, {"width": None}),
        (8, 1, {"ratio": 0}),
        (33, 3, {"query_lens": (150, 90), "seq_lens": (150, 2000)}),
    ],
)
@pytest.mark.parametrize("form", ["paged", "gathered"])
def test_prefill_paged(heads: int, groups: int, changes: dict[str, Any], form: str) -> None:
    call = paged_cases.make(heads=heads, **changes)
    rows = len(call.q)
    plain, top, lse = sparse_mla_prefill_paged(**call.arguments(), num_splits=1, form=form)
    own = [torch.full((heads, rows + 1), math.nan, device="cuda").T[:-1] for _ in range(2)]

    def attend(**outputs: Any) -> None:
        more = {"max_logits": own[0], "lse": own[1]}
        sparse_mla_prefill_paged(**call.arguments(), form=form, **more, **outputs)

    check(rows, heads, plain, attend, groups)
    assert torch.equal(own[0], top)
    assert torch.equal(own[1], lse)


@pytest.mark.parametrize(("heads", "ratio", "width"), [(64, 4, 200), (128, 128, None), (33, 0, None)])
def test_rows_gathered_by_one_launch(heads: int, ratio: int, width: int | None) -> None:
    """The bits of gathering both caches, combining the indices and attending to the rows, of raw queries."""
    lens = (40, 0, 7, 90), (1300, 70, 7, 100)
    call = paged_cases.make(*lens, heads=heads, ratio=ratio, width=width, bad=0.0, padding=0)
    given, rows, window = call.arguments(), len(call.q), call.window_size
    starts, seq_lens = given["query_start_loc"], given["seq_lens"]
    tail = torch.minimum(seq_lens, starts.diff() + window - 1)
    picks = torch.empty(rows, 0, dtype=torch.int32, device="cuda")
    entries = 0
    if call.compressed is not None:
        assert call.compressed_table is not None
        entries = call.compressed_table.shape[1] * call.compressed.rows
        every = torch.arange(entries, dtype=torch.int32, device="cuda").expand(rows, -1)
        picks = every.contiguous() if call.topk is None else call.topk
    kv = torch.zeros(len(seq_lens), entries + 90 + window, 512, dtype=torch.bfloat16, device="cuda")
    if call.compressed is not None:
        table, page = call.compressed_table, call.compressed.rows
        dequantize_and_gather_k_cache(kv, call.compressed.cache, seq_lens // ratio, None, table, page, 0)
    dequantize_and_gather_k_cache(kv, call.pool.cache, seq_lens, tail, call.table, call.pool.rows, entries)
    sizes = window, max(ratio, 1), picks.shape[1], kv.shape[1], entries
    indices, counts = combine_topk_swa_indices(picks, starts, seq_lens, tail, *sizes)
    squares = call.q.double().unflatten(2, (4, 128)).square().sum(-1).flatten(1).float()
    found = [Outputs.make(rows, 1, heads) for _ in range(2)]
    for outputs, form in zip(found, ("gathered", ""), strict=True):
        more = {"q_norm": (squares, 1e-6), "output_quant": (positions_of(rows), TABLE.cuda(), outputs.scales)}
        if form:
            sparse_mla_prefill_paged(**given, form=form, out=outputs.codes, **more)
        else:
            lists = {"topk_length": counts, "attn_sink": call.sink}
            sparse_mla_prefill(
                call.q, kv.view(-1, 1, 512), indices[:, None], call.scale, **lists, out=outputs.codes, **more
            )
    found[0].assert_same(found[1].on_cpu())
    with pytest.raises(ValueError, match="q_norm: expected None without form 'gathered'"):
        sparse_mla_prefill_paged(**given, out=found[0].codes, **more)


def test_what_is_not_supported_says_so() -> None:
    call = paged_cases.make(heads=64)
    outputs = Outputs.make(len(call.q), 1, 64)
    quant = positions_of(len(call.q)), TABLE.cuda(), outputs.scales
    with pytest.raises(RuntimeError, match="output_quant: expected rows in one part"):
        sparse_mla_prefill_paged(**call.arguments(), num_splits=2, out=outputs.codes, output_quant=quant)
