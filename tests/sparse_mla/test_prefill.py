# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import numpy as np
import pytest
import torch

from cute_kernels.runtime.ops import OPS
from cute_kernels.runtime.record import record_calls
from cute_kernels.sparse_mla import reference
from cute_kernels.sparse_mla.ops import sparse_mla_prefill
from tests import oracle
from tests.helpers import check_op
from tests.sparse_mla import model
from tests.sparse_mla.model import INT_MAX, INT_MIN, SCALE

NOT_QUANTIZED = (None, 0.0, None, None, None)
"""q_squares, q_norm_eps, positions, cos_sin_cache and out_scale of a call without output_quant."""


def make_kv(rows, seed, unused=torch.nan):
    """kv whose rows are all `unused`, to be filled row by row."""
    return torch.full((rows, 1, 512), unused, dtype=torch.bfloat16), np.random.default_rng(seed)


def fill(kv, rng, rows):
    for row in rows:
        kv[row, 0] = torch.from_numpy(rng.standard_normal(512)).to(torch.bfloat16)


def expect(q, kv, indices, lengths, scale, sink):
    sink = None if sink is None else sink.tolist()
    results = []
    for t in range(q.shape[0]):
        rows = []
        for column, index in enumerate(indices[t, 0].tolist()):
            if (lengths is None or column < lengths[t]) and 0 <= index < kv.shape[0]:
                rows.append(oracle.to_numpy(kv[index, 0]))
        results.append(model.attention(oracle.to_numpy(q[t]), rows, scale, sink))
    return tuple(np.stack(part) for part in zip(*results, strict=True))


def assert_matches(got, want):
    out, max_logits, lse = got
    model.assert_bf16(out, want[0])
    model.assert_fp32(max_logits, want[1])
    model.assert_fp32(lse, want[2])


@pytest.mark.parametrize("sink", ["none", "mixed", "finite"])
@pytest.mark.parametrize("lengths", [None, [0, 1, 63, 64, 65, 200, -3]])
def test_matches_oracle(sink, lengths):
    """Rows that nobody selects are NaN; so are those that only columns beyond the length or bad values could mean."""
    heads, topk = 3, 70
    q = model.bf16_query((7, heads, 512), 1)
    kv, rng = make_kv(50, 2)
    indices = torch.from_numpy(rng.integers(0, 49, (7, 1, topk))).int()
    indices[rng.random((7, 1, topk)) < 0.2] = INT_MIN
    indices[rng.random((7, 1, topk)) < 0.1] = INT_MAX
    indices[:, :, 5], indices[:, :, 6] = -1, 50
    used = {i for t in range(7) for i in indices[t, 0, : None if lengths is None else max(lengths[t], 0)].tolist()}
    fill(kv, rng, [i for i in used if 0 <= i < 50])
    if lengths is not None:
        for t, length in enumerate(lengths):
            indices[t, 0, max(length, 0) :] = 49
    lengths = None if lengths is None else model.int32(lengths)
    sink = model.sink_of(sink, heads)
    got = sparse_mla_prefill(q, kv, indices, 0.05, 512, sink, lengths)
    assert_matches(got, expect(q, kv, indices, lengths, 0.05, sink))


def test_empty_row():
    q = model.bf16_query((2, 3, 512), 1)
    kv, _ = make_kv(4, 2)
    q[0] = torch.nan
    out, max_logits, lse = sparse_mla_prefill(q, kv, torch.full((2, 1, 3), -1, dtype=torch.int32), SCALE)
    assert (out == 0).all()
    assert (max_logits == -torch.inf).all()
    assert (lse == torch.inf).all()


def test_nan_logits():
    """They spoil out and lse of their head of their row, and count as nothing in max_logits."""
    q = model.bf16_query((3, 2, 512), 1)
    kv, rng = make_kv(5, 2)
    fill(kv, rng, range(4))
    q[1, 1, 7] = torch.nan
    indices = model.int32([[[0, 1, 2]], [[0, 1, 2]], [[3, 4, 0]]])
    out, max_logits, lse = sparse_mla_prefill(q, kv, indices, SCALE)
    spoilt = torch.tensor([[False, False], [False, True], [True, True]])
    assert torch.equal(out.isnan().all(-1), spoilt)
    assert torch.equal(out.isnan().any(-1), spoilt)
    assert torch.equal(lse.isnan(), spoilt)
    without = sparse_mla_prefill(q, kv, model.int32([[[0, 1, 2]], [[0, 1, 2]], [[3, -1, 0]]]), SCALE)[1]
    without[1, 1] = -torch.inf
    assert torch.equal(max_logits, without)
    assert without[2].isfinite().all()


@pytest.mark.parametrize(("s_q", "topk", "s_kv"), [(0, 4, 3), (3, 0, 3), (3, 4, 0)])
def test_nothing_to_do(s_q, topk, s_kv):
    q = model.bf16_query((s_q, 3, 512), 1)
    kv, _ = make_kv(s_kv, 2)
    out, max_logits, lse = sparse_mla_prefill(q, kv, torch.zeros(s_q, 1, topk, dtype=torch.int32), SCALE)
    assert out.shape == (s_q, 3, 512)
    assert (out == 0).all()
    assert (max_logits == -torch.inf).all()
    assert (lse == torch.inf).all()


def test_max_logits_of_large_scores():
    """Scores far beyond what an unshifted exponential holds, of both signs."""
    q = model.bf16_query((2, 2, 512), 1) * 100
    q[1] = -q[1].abs()
    kv, rng = make_kv(6, 2)
    fill(kv, rng, range(6))
    kv[:, :, :] = torch.where(torch.arange(6)[:, None, None] < 3, kv.abs() * 50, kv)
    indices = model.int32([[[0, 1, 2, 3, 4, 5]], [[0, 1, 2, 0, 0, 0]]])
    sink = torch.tensor([1e4, -1e4])
    assert_matches(sparse_mla_prefill(q, kv, indices, 1.0, 512, sink), expect(q, kv, indices, None, 1.0, sink))


def test_wide_selections_are_merged_from_parts(monkeypatch):
    q = model.bf16_query((4, 3, 512), 1)
    kv, rng = make_kv(30, 2)
    fill(kv, rng, range(30))
    indices = torch.from_numpy(rng.integers(-5, 30, (4, 1, 40))).int()
    indices[2] = -1
    want = sparse_mla_prefill(q, kv, indices, SCALE)
    monkeypatch.setattr(reference, "ROW_BUDGET", 7)
    out, max_logits, lse = sparse_mla_prefill(q, kv, indices, SCALE)
    assert torch.equal(out, want[0])
    assert torch.equal(max_logits, want[1])
    torch.testing.assert_close(lse, want[2], rtol=1e-7, atol=0)


def test_strided_arguments_and_out():
    wide = model.bf16_query((5, 4, 530), 1)
    q = wide[:, 1:, 8:520]
    store = torch.full((20, 1, 1028), torch.nan, dtype=torch.bfloat16)
    kv = store[::2, :, 256:768]
    _, rng = make_kv(0, 3)
    fill(kv, rng, range(9))
    table = torch.full((5, 2, 9), 9, dtype=torch.int32)
    indices = table[:, 1:, 2:6]
    indices.copy_(torch.from_numpy(rng.integers(0, 9, (5, 1, 4))))
    padded = torch.full((5, 8, 512), 7.0, dtype=torch.bfloat16)
    top, lse = torch.empty(5, 3), torch.empty(5, 3)
    got = sparse_mla_prefill(q, kv, indices, SCALE, out=padded[:, :3], max_logits=top, lse=lse)
    assert got[0].data_ptr() == padded.data_ptr()
    assert got[1] is top
    assert got[2] is lse
    assert_matches(got, expect(q, kv, indices, None, SCALE, None))
    assert (padded[:, 3:] == 7.0).all()


def test_row_does_not_depend_on_its_batch():
    q = model.bf16_query((40, 16, 512), 1)
    kv, rng = make_kv(300, 2)
    fill(kv, rng, range(300))
    indices = torch.from_numpy(rng.integers(-40, 300, (40, 1, 128))).int()
    lengths = torch.from_numpy(rng.integers(0, 129, 40)).int()
    whole = sparse_mla_prefill(q, kv, indices, SCALE, topk_length=lengths)
    for first, last in ((0, 1), (1, 2), (2, 9), (9, 40)):
        rows = slice(first, last)
        part = sparse_mla_prefill(q[rows], kv, indices[rows], SCALE, topk_length=lengths[rows])
        for got, want in zip(part, whole, strict=True):
            assert torch.equal(got, want[rows])


def arguments(**changes):
    """Arguments of the op, schema order."""
    kv, rng = make_kv(12, 2)
    fill(kv, rng, range(12))
    args = {
        "q": model.bf16_query((3, 4, 512), 1),
        "kv": kv,
        "indices": model.int32([[[0, 1, 12]], [[-1, 3, 3]], [[4, 5, 6]]]),
        "sm_scale": SCALE,
        "attn_sink": torch.zeros(4),
        "topk_length": model.int32([3, 3, 1]),
        "out": torch.zeros(3, 4, 512, dtype=torch.bfloat16),
        "max_logits": torch.zeros(3, 4),
        "lse": torch.zeros(3, 4),
    }
    assert changes.keys() <= args.keys()
    return {**args, **changes}


def test_opcheck():
    check_op("sparse_mla_prefill", *arguments().values(), *NOT_QUANTIZED)
    check_op("sparse_mla_prefill", *arguments(attn_sink=None, topk_length=None).values(), *NOT_QUANTIZED)


def test_cost_counts_attended_rows():
    with record_calls() as recording:
        OPS["sparse_mla_prefill"].overload(*arguments().values(), *NOT_QUANTIZED)
    (call,) = recording.calls
    assert call.cost.flops == 2 * 4 * 5 * 1024
    assert call.cost.bytes == 4 * 1024 + 2 * (3 * 4 * 512 * 2), "one row is named twice"


def test_compile():
    def step(q, kv, indices, sink, lengths):
        return sparse_mla_prefill(q * 2, kv, indices, 0.05, 512, sink, lengths)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=True)
    for s_q, topk in ((3, 5), (6, 9)):
        kv, rng = make_kv(20, 2)
        fill(kv, rng, range(20))
        indices = torch.from_numpy(rng.integers(-3, 24, (s_q, 1, topk))).int()
        args = (model.bf16_query((s_q, 4, 512), 1), kv, indices, torch.zeros(4), torch.full((s_q,), 4).int())
        for got, want in zip(compiled(*args), step(*args), strict=True):
            assert torch.equal(got, want)


def test_rows_lie_any_distance_apart():
    """Kernels ask for more, and say so in `why_not`."""
    want, other = arguments(), arguments(kv=model.apart(arguments()["kv"], 513))
    for each in (want, other):
        OPS["sparse_mla_prefill"].overload(*each.values(), *NOT_QUANTIZED)
    assert want["out"].any()
    assert torch.equal(other["out"], want["out"])


@pytest.mark.parametrize(
    ("changes", "argument", "error"),
    [
        ({"q": torch.zeros(3, 4, 512)}, "q", TypeError),
        ({"q": None, "out": None}, "q", TypeError),
        ({"q": torch.zeros(3, 512, dtype=torch.bfloat16)}, "q", ValueError),
        ({"q": torch.zeros(3, 130, 512, dtype=torch.bfloat16)}, "q", ValueError),
        ({"kv": torch.zeros(9, 2, 512, dtype=torch.bfloat16)}, "kv", ValueError),
        ({"kv": torch.zeros(9, 1, 512)}, "kv", TypeError),
        ({"indices": model.int32([[1], [2], [3]])}, "indices", ValueError),
        ({"indices": model.int32([[[1]], [[2]]])}, "indices", ValueError),
        ({"topk_length": model.int32([1])}, "topk_length", ValueError),
        ({"attn_sink": torch.zeros(3)}, "attn_sink", ValueError),
        ({"d_v": 256}, "d_v", ValueError),
        ({"out": torch.zeros(3, 4, 512)}, "out", TypeError),
        ({"out": torch.zeros(3, 5, 512, dtype=torch.bfloat16)}, "out", ValueError),
        ({"max_logits": torch.zeros(3, 5)}, "max_logits", ValueError),
        ({"lse": torch.zeros(3, 1).expand(3, 4)}, "lse", ValueError),
    ],
)
def test_bad_arguments(changes, argument, error):
    with pytest.raises(error, match=rf"^sparse_mla_prefill: {argument}: expected "):
        sparse_mla_prefill(**{**arguments(), **changes})
