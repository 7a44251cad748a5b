"""Attention with output_quant on a GPU: byte for byte what the CPU makes of the bf16 results that the same kernel
stores without it. And log-sum-exps of odd strides, or of nobody who asks."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from cute_kernels.formats import FP8_DS_MLA
from cute_kernels.kv_cache.ops import fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert
from cute_kernels.output import reference
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
    rows: int, heads: int, plain: torch.Tensor, attend: Callable[..., Any], groups: int = 1, times: int = 1
) -> Outputs:
    """attend(out=..., output_quant=...) against bf16 results [rows, heads, 512]."""
    outputs, positions = Outputs.make(rows, groups, heads // groups), positions_of(rows)
    want = outputs.on_cpu()
    reference.fused_inv_rope_fp8_quant(
        plain.reshape(rows, heads, 512).cpu(), positions.cpu(), TABLE, want.codes, want.scales, groups,
        heads // groups, False, False,
    )  # fmt: skip
    for _ in range(times):
        attend(out=outputs.codes, output_quant=(positions, TABLE.cuda(), outputs.scales))
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


def finished_queries(q: torch.Tensor, positions: torch.Tensor, eps: float) -> torch.Tensor:
    """q normed and rotated by the op that stores keys, too."""
    q = q.clone()
    fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert(
        q,
        torch.zeros(q.shape[0], 512, dtype=torch.bfloat16, device="cuda"),
        FP8_DS_MLA.allocate(1, 64, device="cuda"),
        torch.empty(0, dtype=torch.int64, device="cuda"),
        positions.contiguous(),
        TABLE.cuda(),
        eps,
        64,
    )
    return q


@pytest.mark.parametrize(
    ("rows", "heads", "groups", "topk", "eps"),
    [
        (5, 64, 8, 200, 1e-6),
        (9, 128, 16, 130, 1e-6),
        (700, 64, 8, 70, 1e-5),
        (301, 128, 8, 128, 1e-6),
        (3, 33, 1, 65, 1e-6),
        (4, 100, 4, 0, 0.0),
    ],
)
def test_prefill_of_raw_queries(rows: int, heads: int, groups: int, topk: int, eps: float) -> None:
    """The codes of queries that another op has normed and rotated, byte for byte."""
    g = torch.Generator("cuda").manual_seed(rows)
    scale = torch.exp2(torch.randint(-20, 20, (rows, heads, 1), device="cuda", generator=g).float())
    q = (torch.randn(rows, heads, 512, device="cuda", generator=g) * scale).bfloat16()
    q[0, 1] = 0.0 if eps else 1.0
    q[rows // 2, 2] = 2.0**60  # beyond fp32 when squared
    q[rows - 1, 3, 77] = math.nan
    kv = (torch.randn(500, 1, 512, device="cuda", generator=g).clamp(-4, 4) * LARGEST / 4).bfloat16()
    indices = torch.randint(-20, 520, (rows, 1, topk), device="cuda", generator=g).int()
    sink = torch.randn(heads, device="cuda", generator=g)
    finished = finished_queries(q, positions_of(rows), eps)
    plain, top, lse = sparse_mla_prefill(finished, kv, indices, 512**-0.5, attn_sink=sink)
    before = q.clone()
    own = [torch.full((rows, heads), math.nan, device="cuda") for _ in range(2)]

    def attend(**outputs: Any) -> None:
        given = {"attn_sink": sink, "q_norm": (sums_of_squares(q), eps), "max_logits": own[0], "lse": own[1]}
        sparse_mla_prefill(q, kv, indices, 512**-0.5, **given, **outputs)

    check(rows, heads, plain, attend, groups, times=3)
    assert same_bits(own[0], top)
    assert same_bits(own[1], lse)
    assert same_bits(q, before)


def test_raw_queries_of_float64() -> None:
    """Near float64 attention of float64 norms and rotations."""
    rows, heads, topk = 40, 64, 100
    g = torch.Generator("cuda").manual_seed(1)
    q = torch.randn(rows, heads, 512, device="cuda", generator=g).bfloat16() * 30
    kv = torch.randn(300, 1, 512, device="cuda", generator=g).bfloat16()
    indices = torch.randint(0, 300, (rows, 1, topk), device="cuda", generator=g).int()
    positions = positions_of(rows)
    outputs = Outputs.make(rows, 8, 8)
    own = [torch.full((rows, heads), math.nan, device="cuda") for _ in range(2)]
    quant = (positions, TABLE.cuda(), outputs.scales)
    given = {"out": outputs.codes, "output_quant": quant, "max_logits": own[0], "lse": own[1]}
    sparse_mla_prefill(q, kv, indices, 512**-0.5, q_norm=(sums_of_squares(q), 1e-6), **given)
    x = q.double() / (q.double().square().mean(-1, keepdim=True) + 1e-6).sqrt()
    angles = TABLE.double().cuda()[positions.clamp(0, 2999)][:, None]
    cos, sin = angles[..., :32], angles[..., 32:]
    even, odd = x[..., 448::2].clone(), x[..., 449::2].clone()
    x[..., 448::2], x[..., 449::2] = even * cos - odd * sin, odd * cos + even * sin
    logits = torch.einsum("thd,tkd->thk", x, kv.double()[indices[:, 0].long(), 0]) * 512**-0.5
    assert bool(((own[1].double() - logits.logsumexp(-1)).abs() < 0.05).all())
    assert bool(((own[0].double() - logits.amax(-1)).abs() < 0.05).all())


def test_raw_queries_in_a_graph() -> None:
    """Replayed with other queries and positions, behind the kernel that writes them."""
    rows, heads = 200, 64
    g = torch.Generator("cuda").manual_seed(2)
    kv = torch.randn(300, 1, 512, device="cuda", generator=g).bfloat16()
    indices = torch.randint(0, 300, (rows, 1, 70), device="cuda", generator=g).int()
    source, q = (torch.randn(rows, heads, 512, device="cuda", generator=g).bfloat16() for _ in range(2))
    own, squares = (torch.zeros(rows, heads * 4, device="cuda") for _ in range(2))
    positions = torch.zeros(rows, dtype=torch.int64, device="cuda")
    outputs = Outputs.make(rows, 8, 8)
    quant = (positions, TABLE.cuda(), outputs.scales)

    def step() -> None:
        q.copy_(source)
        squares.copy_(own)
        given = {"return_lse": False, "out": outputs.codes, "output_quant": quant}
        sparse_mla_prefill(q, kv, indices, 512**-0.5, q_norm=(squares, 1e-6), **given)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for number in range(3):
        source.normal_(generator=g)
        own.copy_(sums_of_squares(source))
        positions.fill_(100 * number + 1)
        outputs.codes.view(torch.uint8).fill_(0xA5)
        graph.replay()
        torch.cuda.synchronize()
        got = outputs.codes.clone(), outputs.scales.clone()
        step()
        torch.cuda.synchronize()
        assert torch.equal(raw_bytes(got[0]), raw_bytes(outputs.codes.clone()))
        assert torch.equal(got[1], outputs.scales)
        plain, _, _ = sparse_mla_prefill(finished_queries(source, positions, 1e-6), kv, indices, 512**-0.5)
        want = outputs.on_cpu()
        reference.fused_inv_rope_fp8_quant(
            plain.cpu(), positions.cpu(), TABLE, want.codes, want.scales, 8, 8, False, False
        )
        outputs.assert_same(want)


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
def test_prefill_paged(heads: int, groups: int, changes: dict[str, Any]) -> None:
    call = paged_cases.make(heads=heads, **changes)
    rows = len(call.q)
    plain, top, lse = sparse_mla_prefill_paged(**call.arguments(), num_splits=1)
    own = [torch.full((heads, rows + 1), math.nan, device="cuda").T[:-1] for _ in range(2)]

    def attend(**outputs: Any) -> None:
        more = {"max_logits": own[0], "lse": own[1]}
        sparse_mla_prefill_paged(**call.arguments(), **more, **outputs)

    check(rows, heads, plain, attend, groups)
    assert torch.equal(own[0], top)
    assert torch.equal(own[1], lse)


@pytest.mark.parametrize("splits", [{"num_splits": 1}, {"num_splits": 4}])
def test_graphs_and_streams(splits: dict[str, int]) -> None:
    """Captured on another stream and replayed again and again, the same bytes."""
    call = decode_cases.make(b=140, heads=64, second="listed", lengths="bs", **splits)
    plain, _ = decode_cases.run(call)
    workspace = decode_cases.workspace_for(call)

    def attend(**outputs: Any) -> None:
        def step() -> None:
            sparse_mla_decode(**call.arguments(), **outputs, return_lse=False, workspace=workspace)

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(stream)
        # the views' poison must be written anew
        outputs["out"].view(torch.uint8).fill_(POISON_BYTE)
        outputs["output_quant"][2].fill_(math.nan)
        for _ in range(20):
            graph.replay()
        torch.cuda.synchronize()

    outputs = check(140, 64, plain, attend, 8)
    assert bits(outputs.scales).ne(0).any()


def test_what_is_not_supported_says_so() -> None:
    call = paged_cases.make(heads=64)
    outputs = Outputs.make(len(call.q), 1, 64)
    quant = positions_of(len(call.q)), TABLE.cuda(), outputs.scales
    with pytest.raises(RuntimeError, match="output_quant: expected rows in one part"):
        sparse_mla_prefill_paged(**call.arguments(), num_splits=2, out=outputs.codes, output_quant=quant)
