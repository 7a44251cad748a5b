# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from cute_kernels.runtime.ops import OPS
from cute_kernels.runtime.record import record_calls
from cute_kernels.sparse_mla.ops import merge_attention_states, sparse_mla_decode
from tests import oracle
from tests.helpers import check_op
from tests.sparse_mla import model


def parts_of(n, b, s_q, h, seed=1, dtype=torch.float32, empty=0.3):
    """Random partials; the outs of empty parts are NaN."""
    g = torch.Generator().manual_seed(seed)
    outs = torch.randn(n, b, s_q, h, 512, generator=g).to(dtype)
    lses = torch.randn(n, b, h, s_q, generator=g) * 5
    lses[torch.rand(lses.shape, generator=g) < empty] = torch.inf
    outs[(lses == torch.inf).transpose(-1, -2)] = torch.nan
    return outs, lses


def expect(outs, lses, sink):
    n, b, s_q, h, _ = outs.shape
    want, want_lse = np.zeros((b, s_q, h, 512)), np.full((b, h, s_q), np.inf)
    values, logs = oracle.to_numpy(outs), oracle.to_numpy(lses)
    for i in range(b):
        for j in range(s_q):
            for k in range(h):
                mine = [p for p in range(n) if not math.isinf(logs[p, i, k, j])]
                if not mine:
                    continue
                top = max(logs[p, i, k, j] for p in mine)
                weight = {p: math.exp(logs[p, i, k, j] - top) for p in mine}
                want_lse[i, k, j] = top + math.log(math.fsum(weight.values()))
                extra = 0.0 if sink is None or sink[k] == -math.inf else math.exp(min(float(sink[k]) - top, 700.0))
                if sink is not None and sink[k] == math.inf:
                    extra = math.inf
                total = math.fsum(weight.values()) + extra
                want[i, j, k] = sum(weight[p] / total * values[p, i, j, k] for p in mine)
    return want, want_lse


@pytest.mark.parametrize("n", [1, 2, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sink", ["none", "mixed", "plus", "minus"])
def test_matches_oracle(n, dtype, sink):
    outs, lses = parts_of(n, 3, 2, 5, dtype=dtype)
    sinks = model.sink_of(sink, 5)
    out, lse = merge_attention_states(outs, lses, sinks)
    want, want_lse = expect(outs, lses, sinks)
    model.assert_bf16(out, want)
    model.assert_fp32(lse, want_lse)


@pytest.mark.parametrize("mark", [torch.inf, -torch.inf])
def test_empty(mark):
    """Every part empty, whatever its out holds and whatever the sink."""
    outs = torch.full((3, 2, 1, 5, 512), torch.nan)
    out, lse = merge_attention_states(outs, torch.full((3, 2, 5, 1), mark), model.sink_of("mixed", 5))
    assert (out == 0).all()
    assert (lse == torch.inf).all()


def test_far_apart_parts():
    """Parts whose weights differ by more than the range of an exponential."""
    outs, lses = parts_of(3, 1, 1, 2, empty=0.0)
    lses[:, 0, 0, 0] = torch.tensor([1e4, -1e4, 0.0])
    out, lse = merge_attention_states(outs, lses)
    model.assert_bf16(out[0, 0, 0], oracle.to_numpy(outs[0, 0, 0, 0]))
    assert lse[0, 0, 0] == 1e4


def test_nan_stays_in_its_row():
    outs, lses = parts_of(2, 3, 1, 4, empty=0.0)
    want = merge_attention_states(outs, lses)
    lses[1, 1, 2, 0] = torch.nan
    outs[0, 2, 0, 3] = torch.nan
    out, lse = merge_attention_states(outs, lses)
    assert out[1, 0, 2].isnan().all()
    assert lse[1, 2].isnan().all()
    assert out[2, 0, 3].isnan().all()
    clean = torch.ones(3, 1, 4, dtype=torch.bool)
    clean[1, 0, 2] = clean[2, 0, 3] = False
    assert torch.equal(out[clean], want[0][clean])


def test_merge_of_merges():
    outs, lses = parts_of(4, 2, 2, 3)
    sink = model.sink_of("finite", 3)
    want, want_lse = expect(outs, lses, sink)
    halves, half_lses = torch.empty(2, 2, 2, 3, 512), torch.empty(2, 2, 3, 2)
    for i in range(2):
        pair = slice(2 * i, 2 * i + 2)
        merge_attention_states(outs[pair], lses[pair], out=halves[i], lse=half_lses[i])
    out, lse = merge_attention_states(halves, half_lses, sink)
    np.testing.assert_allclose(oracle.to_numpy(out), want, rtol=2**-8, atol=1e-6)
    model.assert_fp32(lse, want_lse)


def test_row_does_not_depend_on_its_batch():
    outs, lses = parts_of(3, 6, 2, 4)
    out, lse = merge_attention_states(outs, lses)
    for i in range(6):
        one, one_lse = merge_attention_states(outs[:, i : i + 1], lses[:, i : i + 1])
        assert torch.equal(one[0], out[i])
        assert torch.equal(one_lse[0], lse[i])


def test_strided_arguments_and_out():
    outs, lses = parts_of(3, 2, 2, 4)
    wide, wide_lses = torch.full((3, 4, 2, 6, 520), torch.nan), torch.full((3, 4, 6, 2), torch.nan)
    wide[:, ::2, :, 1:5, 4:516], wide_lses[:, ::2, 1:5] = outs, lses
    padded = torch.full((2, 2, 9, 512), 7.0, dtype=torch.bfloat16)
    lse = torch.empty(2, 4, 2)
    got = merge_attention_states(wide[:, ::2, :, 1:5, 4:516], wide_lses[:, ::2, 1:5], out=padded[:, :, :4], lse=lse)
    assert got[1] is lse
    want, want_lse = expect(outs, lses, None)
    model.assert_bf16(padded[:, :, :4], want)
    model.assert_fp32(lse, want_lse)
    assert (padded[:, :, 4:] == 7.0).all()


@pytest.mark.parametrize(("b", "s_q"), [(0, 1), (2, 0)])
def test_nothing_to_do(b, s_q):
    out, lse = merge_attention_states(torch.zeros(2, b, s_q, 4, 512), torch.zeros(2, b, 4, s_q))
    assert out.shape == (b, s_q, 4, 512)
    assert lse.shape == (b, 4, s_q)


def arguments(**changes):
    """Arguments of the op, schema order."""
    outs, lses = parts_of(3, 2, 1, 4)
    args = {
        "outs": outs,
        "lses": lses,
        "attn_sink": torch.zeros(4),
        "out": torch.zeros(2, 1, 4, 512, dtype=torch.bfloat16),
        "lse": torch.zeros(2, 4, 1),
    }
    assert changes.keys() <= args.keys()
    return {**args, **changes}


def test_opcheck():
    check_op("merge_attention_states", *arguments().values())
    check_op("merge_attention_states", *arguments(attn_sink=None, out=torch.zeros(2, 1, 4, 512)).values())


def test_cost():
    with record_calls() as recording:
        OPS["merge_attention_states"].overload(*arguments().values())
    (call,) = recording.calls
    assert call.cost.bytes == 3 * 8 * 512 * 4 + 3 * 8 * 4 + 8 * 512 * 2 + 8 * 4


def test_compile():
    def step(outs, lses, sink):
        return merge_attention_states(outs * 2, lses, sink)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=True)
    for n, b in ((2, 3), (4, 5)):
        args = (*parts_of(n, b, 1, 4), torch.zeros(4))
        for got, want in zip(compiled(*args), step(*args), strict=True):
            assert torch.equal(got, want)


@pytest.mark.parametrize(
    ("changes", "argument", "error"),
    [
        ({"outs": torch.zeros(3, 2, 1, 4, 512, dtype=torch.float64)}, "outs", TypeError),
        ({"outs": None, "out": None, "lse": None}, "outs", TypeError),
        ({"outs": torch.zeros(2, 1, 4, 512)}, "outs", ValueError),
        ({"outs": torch.zeros(3, 2, 1, 200, 512)}, "outs", ValueError),
        ({"outs": torch.zeros(0, 2, 1, 4, 512), "lses": torch.zeros(0, 2, 4, 1)}, "outs", ValueError),
        ({"lses": torch.zeros(3, 2, 1, 4)}, "lses", ValueError),
        ({"lses": None, "out": None, "lse": None}, "lses", TypeError),
        ({"lses": torch.zeros(3, 2, 4, 1, dtype=torch.float64)}, "lses", TypeError),
        ({"attn_sink": torch.zeros(2)}, "attn_sink", ValueError),
        ({"out": torch.zeros(2, 1, 4, 512)}, "attn_sink", ValueError),
        ({"out": torch.zeros(2, 1, 4, 256, dtype=torch.bfloat16)}, "out", ValueError),
        ({"lse": torch.zeros(2, 1, 4)}, "lse", ValueError),
    ],
)
def test_bad_arguments(changes, argument, error):
    with pytest.raises(error, match=rf"^merge_attention_states: {argument}: expected "):
        merge_attention_states(**arguments(**changes))


def test_partials_in_the_layout_of_an_exchange():
    """Ranks attend to parts of a row's entries, each head's rows of 512 before its log-sum-exps, and a head's owner
    merges what it receives: no copy between, the same bits as of dense tensors, nothing but results written."""
    ranks, b, s_q, h = 2, 3, 2, 4
    tokens, pad, own = b * s_q, 2, h // ranks
    size = 512 * tokens + tokens + pad
    g = torch.Generator().manual_seed(3)
    q = torch.randn(b, s_q, h, 512, generator=g).bfloat16()
    received = torch.full((ranks, ranks, own, size), torch.nan)
    dense_outs, dense_lses = torch.empty(ranks, b, s_q, h, 512), torch.empty(ranks, b, h, s_q)
    for rank in range(ranks):
        cache = torch.randn(2, 64, 512, generator=g).bfloat16()
        indices = torch.randint(0, 128, (b, s_q, 40), generator=g, dtype=torch.int32)
        length = torch.tensor([40, 0, 7], dtype=torch.int32)
        given = {"topk_length": length, "kv_format": "plain_bf16/1"}
        sent = torch.full((h, size), torch.nan)
        out = sent.as_strided((b, s_q, h, 512), (s_q * 512, 512, size, 1))
        lse = sent.as_strided((b, h, s_q), (s_q, size, 1), 512 * tokens)
        sparse_mla_decode(q, cache, indices, out=out, lse=lse, **given)
        sparse_mla_decode(q, cache, indices, out=dense_outs[rank], lse=dense_lses[rank], **given)
        assert torch.equal(out, dense_outs[rank])
        assert torch.equal(lse, dense_lses[rank])
        assert sent[:, -pad:].isnan().all()
        received[:, rank] = sent.view(ranks, own, size)
    sink = torch.randn(h, generator=g)
    want, want_lse = merge_attention_states(dense_outs, dense_lses, sink)
    for rank in range(ranks):
        heads = slice(rank * own, (rank + 1) * own)
        mine = received[rank]
        outs = mine.as_strided((ranks, b, s_q, own, 512), (own * size, s_q * 512, 512, size, 1), mine.storage_offset())
        lses = outs.as_strided((ranks, b, own, s_q), (own * size, s_q, size, 1), mine.storage_offset() + 512 * tokens)
        out, lse = merge_attention_states(outs, lses, sink[heads].clone())
        assert torch.equal(out, want[:, :, heads])
        assert torch.equal(lse, want_lse[:, heads])
