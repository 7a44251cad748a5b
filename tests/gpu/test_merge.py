# SPDX-License-Identifier: Apache-2.0
"""merge_attention_states on a GPU, against a softmax over the parts' log-sum-exps in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from cute_kernels.runtime import compile as compile_
from cute_kernels.runtime.ops import FALLBACK_VARIABLE
from cute_kernels.runtime.record import record_calls
from cute_kernels.sparse_mla.ops import merge_attention_states
from tests.gpu import decode_cases
from tests.sparse_mla.model import sink_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

BF16, FP32 = torch.bfloat16, torch.float32
Pair = tuple[torch.Tensor, torch.Tensor]


@pytest.fixture(autouse=True)
def no_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FALLBACK_VARIABLE, raising=False)


def parts_of(n: int, b: int, s_q: int, h: int, seed: int = 1, dtype: torch.dtype = FP32, empty: float = 0.3) -> Pair:
    """Random parts; some are empty, with a mark of either sign, and hold NaN then."""
    g = torch.Generator(device="cuda").manual_seed(seed)
    outs = torch.randn(n, b, s_q, h, 512, device="cuda", generator=g).to(dtype)
    lses = torch.randn(n, b, h, s_q, device="cuda", generator=g) * 5
    chosen = torch.rand(lses.shape, device="cuda", generator=g)
    lses[chosen < empty] = math.inf
    lses[chosen < empty / 2] = -math.inf
    outs[lses.isinf().transpose(-1, -2)] = math.nan
    return outs, lses


def expected(outs: torch.Tensor, lses: torch.Tensor, sink: torch.Tensor | None = None) -> Pair:
    """float64 (out, lse): the sink is one more part, of zeros."""
    logits = lses.double().transpose(-1, -2)  # [n, b, s_q, h]
    logits = torch.where(logits.isinf(), -math.inf, logits)
    extra = torch.full_like(logits[:1], -math.inf) if sink is None else sink.double().expand_as(logits[:1])
    weights = torch.cat([logits, extra]).softmax(dim=0)[:-1]
    weights = torch.where(extra == math.inf, 0.0, weights)
    weights = torch.where(logits == -math.inf, 0.0, weights)[..., None]
    out = (weights * torch.where(weights == 0.0, 0.0, outs.double())).sum(dim=0)
    lse = logits.logsumexp(dim=0)
    return out, torch.where(lse == -math.inf, math.inf, lse).transpose(-1, -2)


def assert_close(got: Pair, want: Pair, magnitude: float = 8.0) -> None:
    """Weights are right to 2^-20 of values up to `magnitude`; a bf16 result is rounded once more."""
    out, lse = got[0].double(), got[1].double()
    share = 2.0**-8 if got[0].dtype == BF16 else 2.0**-22
    assert bool(((out - want[0]).abs() <= share * want[0].abs() + 2.0**-20 * magnitude).all())
    assert torch.equal(lse == math.inf, want[1] == math.inf)
    finite = want[1] != math.inf
    difference = (lse - want[1]).abs()[finite]
    assert bool((difference <= 1e-6 + 2.0**-22 * want[1].abs()[finite]).all())


def run(outs: torch.Tensor, lses: torch.Tensor, sink: torch.Tensor | None = None, **more: Any) -> Pair:
    with record_calls() as recording:
        got = merge_attention_states(outs, lses, sink, **more)
    assert [entry.implementation for entry in recording.calls] == ["kernel"]
    return got


def fp32_like(outs: torch.Tensor) -> torch.Tensor:
    return torch.full(outs.shape[1:], math.nan, device="cuda")


def bits(t: torch.Tensor) -> torch.Tensor:
    return t.contiguous().view(torch.uint8)


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 7, 10, 15, 16, 17, 31, 32, 33, 64, 65, 131])
def test_values(n: int, dtype: torch.dtype) -> None:
    for b, s_q, h in ((3, 2, 5), (1, 1, 1), (2, 1, 64), (1, 3, 128)):
        outs, lses = parts_of(n, b, s_q, h, seed=n + h, dtype=dtype, empty=0.3 if n > 1 else 0.1)
        for kind in ("none", "mixed", "finite", "plus", "minus"):
            sink = sink_of(kind, h)
            sink = None if sink is None else sink.cuda()
            want = expected(outs, lses, sink)
            assert_close(run(outs, lses, sink), want)
        assert_close(run(outs, lses, out=fp32_like(outs)), expected(outs, lses))


@pytest.mark.parametrize("mark", [math.inf, -math.inf])
@pytest.mark.parametrize("n", [1, 3, 40])
def test_all_parts_empty(n: int, mark: float) -> None:
    outs = torch.full((n, 2, 2, 5, 512), math.nan, device="cuda")
    lses = torch.full((n, 2, 5, 2), mark, device="cuda")
    for kind in ("none", "mixed"):
        sink = sink_of(kind, 5)
        out, lse = run(outs, lses, None if sink is None else sink.cuda())
        assert bool((out == 0).all())
        assert bool((lse == math.inf).all())


@pytest.mark.parametrize("n", [1, 4, 20, 50])
def test_the_only_part_that_is_not_empty_comes_out_as_it_is(n: int) -> None:
    outs, lses = parts_of(n, 2, 1, 8, empty=0.0)
    for number in {0, n // 2, n - 1}:
        only = torch.full_like(lses, math.inf)
        only[number] = lses[number]
        out, lse = run(outs, only, out=fp32_like(outs))
        assert torch.equal(bits(out), bits(outs[number]))
        assert torch.equal(bits(lse), bits(lses[number]))


def test_parts_far_apart() -> None:
    outs, lses = parts_of(3, 1, 1, 4, empty=0.0)
    lses[:, 0, :, 0] = torch.tensor([[1e4, 3e38, -3e38, 80.0], [-1e4, -3e38, -3e38, -30.0], [0.0, 0.0, -3e38, 0.0]])
    assert_close(run(outs, lses), expected(outs, lses))


@pytest.mark.parametrize(("n", "dtype"), [(3, FP32), (3, BF16), (9, FP32), (40, BF16)])
def test_a_row_has_the_same_bits_in_any_batch_and_run(n: int, dtype: torch.dtype) -> None:
    outs, lses = parts_of(n, 7, 3, 6, dtype=dtype)
    sink = sink_of("finite", 6).cuda()
    want = run(outs, lses, sink)
    for _ in range(20):
        for got, first in zip(merge_attention_states(outs, lses, sink), want, strict=True):
            assert torch.equal(bits(got), bits(first))
    for i, j, k in ((0, 0, 0), (3, 1, 5), (6, 2, 2)):
        rows, tokens, heads = slice(i, i + 1), slice(j, j + 1), slice(k, k + 1)
        out, lse = run(outs[:, rows, tokens, heads], lses[:, rows, heads, tokens], sink[heads])
        assert torch.equal(bits(out), bits(want[0][rows, tokens, heads]))
        assert torch.equal(bits(lse), bits(want[1][rows, heads, tokens]))


@pytest.mark.parametrize("n", [1, 3, 9, 16, 30, 33])
def test_empty_parts_behind_change_no_bit(n: int) -> None:
    outs, lses = parts_of(n, 2, 2, 4)
    want = run(outs, lses)
    for more in (1, 2, 5, 14, 31, 100):
        longer = torch.cat([outs, torch.full((more, *outs.shape[1:]), math.nan, device="cuda")])
        got = run(longer, torch.cat([lses, torch.full((more, *lses.shape[1:]), math.inf, device="cuda")]))
        assert all(torch.equal(bits(x), bits(y)) for x, y in zip(got, want, strict=True)), more


def test_parts_far_apart_in_memory() -> None:
    """Parts, and rows of the result, whose bytes lie beyond 2^32."""
    gap = 2**30 + 64
    memory = torch.empty(2 * gap + 4096, device="cuda")
    outs, lses = parts_of(3, 1, 1, 8, empty=0.0)
    far = memory.as_strided((3, 1, 1, 8, 512), (gap, 0, 0, 512, 1))
    far.copy_(outs)
    assert_close(run(far, lses), expected(outs, lses))
    outs, lses = parts_of(2, 3, 1, 8, empty=0.0)
    far = memory.as_strided((3, 1, 8, 512), (gap, 0, 512, 1))
    assert_close(run(outs, lses, out=far), expected(outs, lses))


@pytest.mark.parametrize(("b", "s_q"), [(1, 70_001), (70_001, 1)])
def test_many_rows(b: int, s_q: int) -> None:
    outs, lses = parts_of(2, b, s_q, 2, dtype=BF16)
    assert_close(run(outs, lses), expected(outs, lses))


@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize("n", [2, 9])
def test_graph_replay_sees_new_data(n: int, pdl: bool) -> None:
    """As a dependent launch, the kernel must still wait for what wrote its parts, and hold up what overwrites them."""
    from cute_kernels.sparse_mla import combine
    from cute_kernels.sparse_mla.call import MergeCall

    (outs, lses), sink = parts_of(n, 40, 1, 64), sink_of("mixed", 64).cuda()
    staging = outs.clone(), lses.clone()
    out, lse = merge_attention_states(outs, lses, sink)
    kept = torch.empty_like(out), torch.empty_like(lse)
    call = MergeCall(outs, lses, sink, out, lse)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            outs.copy_(staging[0])
            lses.copy_(staging[1])
            combine.launch(call, pdl)
            combine.launch(call, pdl)
            kept[0].copy_(out)
            kept[1].copy_(lse)
            outs.zero_()
            lses.zero_()
    for seed in (5, 6):
        fresh = parts_of(n, 40, 1, 64, seed=seed)
        staging[0].copy_(fresh[0])
        staging[1].copy_(fresh[1])
        graph.replay()
        assert_close(kept, expected(*fresh, sink))


def test_shapes_and_strides_need_no_new_kernel() -> None:
    for n in (2, 9):
        run(*parts_of(n, 2, 1, 8))
    before = compile_.compilations()
    for n, b, s_q, h in ((1, 1, 1, 1), (4, 3, 2, 7), (5, 2, 2, 64), (16, 1, 1, 128), (33, 1, 2, 8)):
        run(*parts_of(n, b, s_q, h))
    assert compile_.compilations() == before


def test_torch_compile() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(merge_attention_states, fullgraph=True, dynamic=True)
    for n, b in ((2, 3), (5, 4)):
        outs, lses = parts_of(n, b, 1, 8)
        for got, want in zip(compiled(outs, lses), merge_attention_states(outs, lses), strict=True):
            assert torch.equal(bits(got), bits(want))


def test_what_is_not_supported_says_so() -> None:
    wide = torch.zeros(2, 2, 1, 4, 520, device="cuda")
    lses = torch.zeros(2, 2, 4, 1, device="cuda")
    with pytest.raises(NotImplementedError, match="heads of outs must be 16-byte aligned"):
        merge_attention_states(wide[..., 2:514], lses)
    out = torch.zeros(2, 1, 4, 516, dtype=BF16, device="cuda")[..., :512]
    with pytest.raises(NotImplementedError, match="heads of out must be 16-byte aligned"):
        merge_attention_states(wide[..., :512], lses, out=out)


@pytest.mark.parametrize("heads", [8, 16, 64, 128])
@pytest.mark.parametrize("kv_format", ["fp8_ds_mla/1", "plain_bf16/1"])
@pytest.mark.parametrize("splits", [{"num_splits": 1}, {"num_splits": 3}])
def test_partials_in_the_layout_of_an_exchange(heads: int, kv_format: str, splits: dict[str, int]) -> None:
    """A head's rows of 512 lie before its log-sum-exps: decode writes there, the merge reads it, both with the bits
    that they have of dense tensors, and nothing else is written."""
    ranks, b, s_q, pad = 2, 3, 2, 2
    tokens, own = b * s_q, heads // ranks
    size = 512 * tokens + tokens + pad
    received = torch.full((ranks, ranks, own, size), math.nan, device="cuda")
    outs, lses = torch.empty(ranks, b, s_q, heads, 512, device="cuda"), torch.empty(ranks, b, heads, s_q, device="cuda")
    for rank in range(ranks):
        call = decode_cases.make(
            b, s_q, heads, 200, kv_format=kv_format, lengths="bs", sink="none", seed=rank, **splits
        )
        sent = torch.full((heads, size), math.nan, device="cuda")
        out = sent.as_strided((b, s_q, heads, 512), (s_q * 512, 512, size, 1))
        lse = sent.as_strided((b, heads, s_q), (s_q, size, 1), 512 * tokens)
        decode_cases.run(call, FP32, out=out, lse=lse)
        decode_cases.run(call, FP32, out=outs[rank], lse=lses[rank])
        assert torch.equal(out, outs[rank])
        assert torch.equal(lse, lses[rank])
        assert sent[:, -pad:].isnan().all()
        received[:, rank] = sent.view(ranks, own, size)
    want, want_lse = merge_attention_states(outs, lses)
    for rank in range(ranks):
        mine, start = received[rank], received[rank].storage_offset()
        part = (own * size, s_q * 512, 512, size, 1)
        mine_outs = mine.as_strided((ranks, b, s_q, own, 512), part, start)
        mine_lses = mine.as_strided((ranks, b, own, s_q), (own * size, s_q, size, 1), start + 512 * tokens)
        out, lse = merge_attention_states(mine_outs, mine_lses)
        heads_of = slice(rank * own, (rank + 1) * own)
        assert torch.equal(out, want[:, :, heads_of])
        assert torch.equal(lse, want_lse[:, heads_of])
