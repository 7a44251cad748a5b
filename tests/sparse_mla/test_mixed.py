# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import numpy as np
import pytest
import torch

from cute_kernels.runtime.ops import OPS
from cute_kernels.runtime.record import record_calls
from cute_kernels.sparse_mla.ops import sparse_mla_mixed
from tests import oracle
from tests.helpers import check_op
from tests.sparse_mla import model
from tests.sparse_mla.model import BF16, INT_MAX, INT_MIN, PLAIN_FP8, SCALE, Pool

W = 8


class Case:
    """Requests with a table of window and compressed slots; every record in use is random, the rest are NaN."""

    def __init__(self, kv_format=BF16, *, heads=3, width=6, query_lens=(1, 4, 2, 0), seq_lens=(30, 4, 9, 5), padding=0):
        rng = np.random.default_rng(1)
        self.tokens = sum(query_lens)
        n = self.tokens + padding
        self.query = model.bf16_query((n, heads, 512), 1)
        if kv_format == PLAIN_FP8:
            self.query = self.query.to(torch.float8_e4m3fn)
        self.pool, self.compressed = Pool(kv_format, 5, 53, 2), Pool(kv_format, 6, 7, 3)
        self.query_lens, self.seq_lens = query_lens, seq_lens
        indices = np.concatenate(
            [
                rng.integers(0, self.pool.capacity - 1, (n, W)),
                rng.integers(0, self.compressed.capacity - 1, (n, width)),
            ],
            axis=1,
        )
        bad = rng.choice([-1, INT_MIN, INT_MAX, self.pool.capacity], indices.shape)
        self.indices = np.where(rng.random(indices.shape) < 0.15, bad, indices)
        self.lens = rng.integers(W, W + width + 1, n)
        self.positions = [
            length - query + i for query, length in zip(query_lens, seq_lens, strict=True) for i in range(query)
        ]
        # Columns that must not be looked at name the last row of their pool, which stays NaN.
        for t in range(n):
            count = min(W, self.positions[t] + 1) if t < self.tokens else 0
            self.indices[t, count:W] = self.pool.capacity - 1
            self.indices[t, self.lens[t] if t < self.tokens else W :] = self.compressed.capacity - 1
        for pool, part in ((self.pool, self.indices[:, :W]), (self.compressed, self.indices[:, W:])):
            pool.put_all(v for v in np.unique(part) if 0 <= v < pool.capacity - 1)

    def args(self, **changes):
        args = {
            "query": self.query,
            "swa_kv_cache": self.pool.cache,
            "sparse_indices": torch.from_numpy(self.indices).int(),
            "compressed_kv_cache": self.compressed.cache,
            "sparse_topk_lens": torch.from_numpy(self.lens).int(),
            "seq_lens": model.int32(self.seq_lens),
            "cum_seq_lens_q": model.int32([0, *np.cumsum(self.query_lens).tolist()]),
            "bmm1_scale": 0.05,
            "bmm2_scale": 0.75,
        }
        return args | changes

    def expect(self, sink=None, compressed=True):
        sink = None if sink is None else sink.tolist()
        outs, lses = [], []
        for t in range(self.query.shape[0]):
            rows = []
            if t < self.tokens:
                rows = model.pick(self.pool, self.indices[t, : min(W, self.positions[t] + 1)])
                if compressed:
                    rows += model.pick(self.compressed, self.indices[t, W : self.lens[t]])
            out, _, lse = model.attention(oracle.to_numpy(self.query[t].float()), rows, 0.05, sink)
            outs.append(out * 0.75)
            lses.append(lse)
        return np.stack(outs), np.stack(lses)


@pytest.mark.parametrize("kv_format", [BF16, PLAIN_FP8])
@pytest.mark.parametrize("sink", ["none", "mixed"])
def test_matches_oracle(kv_format, sink):
    case = Case(kv_format, padding=2)
    sinks = model.sink_of(sink, 3)
    out, lse = sparse_mla_mixed(**case.args(), sinks=sinks, window_size=W)
    want, want_lse = case.expect(sinks)
    model.assert_bf16(out, want)
    model.assert_fp32(lse, want_lse)
    assert (out[case.tokens :] == 0).all()
    assert (lse[case.tokens :] == torch.inf).all()


@pytest.mark.parametrize("given", ["none", "no columns"])
def test_window_only(given):
    case = Case(width=0)
    changes = {"compressed_kv_cache": None} if given == "none" else {}
    out, lse = sparse_mla_mixed(**case.args(**changes), window_size=W)
    want, want_lse = case.expect(compressed=False)
    model.assert_bf16(out, want)
    model.assert_fp32(lse, want_lse)


def test_lengths_out_of_range():
    """Fewer than the window: no compressed column. More than the table is wide: all of them."""
    case = Case()
    case.lens[:] = [0, -5, W - 1, W, INT_MAX, 1, INT_MIN]
    case.compressed.put(case.compressed.capacity - 1)
    out, lse = sparse_mla_mixed(**case.args(), window_size=W)
    want, want_lse = case.expect()
    for t in (0, 1, 2, 5, 6):
        case.indices[t, W:] = -1
    case.lens[4] = W + 6
    want, want_lse = case.expect()
    model.assert_bf16(out, want)
    model.assert_fp32(lse, want_lse)


def test_rows_before_their_context_are_empty():
    """A padded decode row of a request without context attends to nothing, compressed columns included."""
    case = Case()
    out, lse = sparse_mla_mixed(**case.args(seq_lens=model.int32([0, 4, 1, -9])), window_size=W)
    want, _ = case.expect()
    assert (out[[0, 5]] == 0).all()
    assert (lse[[0, 5]] == torch.inf).all()
    model.assert_bf16(out[1:5], want[1:5])


def test_starts_are_rebased():
    case = Case()
    want = sparse_mla_mixed(**case.args(), window_size=W)
    got = sparse_mla_mixed(**case.args(cum_seq_lens_q=case.args()["cum_seq_lens_q"] + 100), window_size=W)
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])


def test_default_window_and_scales():
    """128 window columns; the caller's scales are used as they are."""
    query = model.bf16_query((1, 2, 512), 1)
    pool = Pool(BF16, 3, 64, 2)
    pool.put_all(range(140))
    indices = torch.arange(140, dtype=torch.int32)[None]
    batch = (model.int32([200]), model.int32([0, 1]))
    out, lse = sparse_mla_mixed(query, pool.cache, indices, pool.cache, model.int32([130]), *batch, SCALE, 1.0)
    want, _, want_lse = model.attention(oracle.to_numpy(query[0]), [pool.row(i) for i in range(130)], SCALE)
    model.assert_bf16(out[0], want)
    model.assert_fp32(lse[0], want_lse)


def test_row_does_not_depend_on_its_batch():
    case = Case(heads=8)
    whole = sparse_mla_mixed(**case.args(), window_size=W)
    args = case.args()
    for t in range(case.tokens):
        rows = slice(t, t + 1)
        alone = case.args(
            query=args["query"][rows],
            sparse_indices=args["sparse_indices"][rows],
            sparse_topk_lens=args["sparse_topk_lens"][rows],
            seq_lens=model.int32([case.positions[t] + 1]),
            cum_seq_lens_q=model.int32([0, 1]),
        )
        for got, want in zip(sparse_mla_mixed(**alone, window_size=W), whole, strict=True):
            assert torch.equal(got, want[rows])


def test_strided_arguments_and_out():
    case = Case()
    args = case.args()
    wide_q = torch.full((7, 5, 512), torch.nan, dtype=torch.bfloat16)
    wide_q[:, 1:4] = args["query"]
    wide_i = torch.full((7, W + 10), -1, dtype=torch.int32)
    wide_i[:, : W + 6] = args["sparse_indices"]
    padded = torch.full((7, 8, 512), 7.0, dtype=torch.bfloat16)
    lse = torch.empty(7, 3)
    changes = {"query": wide_q[:, 1:4], "sparse_indices": wide_i[:, : W + 6]}
    got = sparse_mla_mixed(**case.args(**changes), window_size=W, out=padded[:, :3], lse=lse)
    assert got[1] is lse
    want, want_lse = case.expect()
    model.assert_bf16(padded[:, :3], want)
    model.assert_fp32(lse, want_lse)
    assert (padded[:, 3:] == 7.0).all()


def test_no_rows():
    case = Case(query_lens=(0,), seq_lens=(3,))
    out, lse = sparse_mla_mixed(**case.args(), window_size=W)
    assert out.shape == (0, 3, 512)
    assert lse.shape == (0, 3)


def arguments(pools=BF16, **changes):
    """Arguments of the op, schema order."""
    case = Case(pools)
    args = case.args(
        sinks=torch.zeros(3),
        window_size=W,
        kv_format=pools,
        out=torch.zeros(7, 3, 512, dtype=torch.bfloat16),
        lse=torch.zeros(7, 3),
        workspace=None,
        form="auto",
    )
    assert changes.keys() <= args.keys()
    return {**args, **changes}


@pytest.mark.parametrize("kv_format", [BF16, PLAIN_FP8])
def test_opcheck(kv_format):
    check_op("sparse_mla_mixed", *arguments(kv_format).values())


def test_cost_counts_attended_rows():
    case = Case()
    case.indices = np.abs(case.indices) % 40
    args = case.args(sinks=None, window_size=W, kv_format=BF16)
    with record_calls() as recording:
        OPS["sparse_mla_mixed"].overload(
            *args.values(), torch.zeros(7, 3, 512, dtype=torch.bfloat16), torch.zeros(7, 3), None, "auto"
        )
    (call,) = recording.calls
    rows = sum(min(W, p + 1) for p in case.positions) + int((case.lens - W).sum())
    assert call.cost.flops == 2 * 3 * rows * 1024
    different = {
        (column < W, case.indices[t, column])
        for t, p in enumerate(case.positions)
        for column in range(case.lens[t])
        if column >= W or column <= p
    }
    assert len(different) < rows
    assert call.cost.bytes == len(different) * 1024 + 2 * (7 * 3 * 512 * 2)


@pytest.mark.full
def test_compile():
    def step(query, cache, indices, compressed, lens, seq_lens, starts):
        return sparse_mla_mixed(
            query * 2, cache, indices, compressed, lens, seq_lens, starts, 0.05, 0.75, window_size=W
        )

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=True)
    for case in (Case(), Case(width=9, query_lens=(3, 2), seq_lens=(4, 20))):
        args = list(case.args().values())[:7]
        for got, want in zip(compiled(*args), step(*args), strict=True):
            assert torch.equal(got, want)


@pytest.mark.parametrize(
    ("changes", "argument", "error"),
    [
        ({"query": torch.zeros(7, 3, 512)}, "query", TypeError),
        ({"query": None, "kv_format": None, "out": None, "lse": None}, "query", TypeError),
        ({"query": torch.zeros(7, 3, 512).to(torch.float8_e4m3fn)}, "query", TypeError),
        ({"query": torch.zeros(7, 3, 256, dtype=torch.bfloat16)}, "query", ValueError),
        ({"kv_format": "fp8_ds_mla/1"}, "kv_format", ValueError),
        ({"kv_format": None, "query": torch.zeros(7, 3, 512).to(torch.float8_e4m3fn)}, "swa_kv_cache", TypeError),
        ({"swa_kv_cache": torch.zeros(4, 8, 512)}, "swa_kv_cache", TypeError),
        ({"swa_kv_cache": torch.zeros(4, 8, 600, dtype=torch.bfloat16)[..., :512]}, "swa_kv_cache", ValueError),
        ({"compressed_kv_cache": torch.zeros(4, 8, 584, dtype=torch.bfloat16)}, "compressed_kv_cache", ValueError),
        ({"compressed_kv_cache": None}, "sparse_indices", ValueError),
        ({"window_size": 15}, "sparse_indices", ValueError),
        ({"window_size": 0}, "window_size", ValueError),
        ({"sparse_indices": torch.zeros(6, 14, dtype=torch.int32)}, "sparse_indices", ValueError),
        ({"sparse_indices": torch.zeros(7, 14)}, "sparse_indices", TypeError),
        ({"sparse_topk_lens": torch.zeros(6, dtype=torch.int32)}, "sparse_topk_lens", ValueError),
        ({"seq_lens": torch.zeros(4)}, "seq_lens", TypeError),
        ({"cum_seq_lens_q": torch.zeros(4, dtype=torch.int32)}, "cum_seq_lens_q", ValueError),
        ({"sinks": torch.zeros(4)}, "sinks", ValueError),
        ({"out": torch.zeros(7, 3, 512)}, "out", TypeError),
        ({"lse": torch.zeros(7, 4)}, "lse", ValueError),
    ],
)
def test_bad_arguments(changes, argument, error):
    with pytest.raises(error, match=rf"^sparse_mla_mixed: {argument}: expected "):
        sparse_mla_mixed(**arguments(**changes))
