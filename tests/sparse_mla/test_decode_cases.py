# SPDX-License-Identifier: Apache-2.0
"""What the GPU's tests of decode take for the truth, against plain loops and the reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cute_kernels.sparse_mla.ops import sparse_mla_decode
from tests import oracle
from tests.gpu import decode_cases
from tests.gpu.decode_cases import Pool, make
from tests.gpu.decode_checks import BF16, FP8, assert_near
from tests.sparse_mla import model


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_cases, "DEVICE", "cpu")
    decode_cases._codes.cache_clear()


def twin(pool: Pool) -> model.Pool:
    """The same bytes in the pool of the loops."""
    fmt_stride = decode_cases.round_up(pool.rows * 584, 576) if pool.kv_format == FP8 else pool.rows * 1024
    found = model.Pool(pool.kv_format, pool.pages, pool.rows, extra_stride=pool.stride - fmt_stride)
    assert found.cache.shape == pool.cache.shape
    assert found.cache.stride() == pool.cache.stride()
    found.bytes[:] = pool.bytes.numpy()
    return found


@pytest.mark.parametrize("second", ["none", "listed", "dense"])
@pytest.mark.parametrize(("kv_format", "extra_format"), [(FP8, FP8), (FP8, BF16), (BF16, FP8)])
def test_meaning(kv_format: str, extra_format: str, second: str) -> None:
    call = make(
        b=4, s_q=2, heads=6, topk=30, rows=7, kv_format=kv_format, second=second, extra_topk=17, extra_rows=2,
        extra_format=extra_format, lengths="bs", bad=0.2, more_stride=576,
    )  # fmt: skip
    out, lse = call.expected()
    pool, extra = twin(call.pool), None if call.extra is None else twin(call.extra)
    for i in range(4):
        for j in range(2):
            assert call.length is not None
            rows = model.pick(pool, call.indices[i, j].tolist(), int(call.length[i, j]))
            if call.extra_indices is not None:
                assert call.extra_length is not None
                rows += model.pick(extra, call.extra_indices[i, j].tolist(), int(call.extra_length[i, j]))
            elif extra is not None:
                assert call.table is not None
                assert call.visible is not None
                most = call.table.shape[1] * extra.rows
                rows += model.paged(extra, call.table[i].tolist(), range(min(int(call.visible[i, j]), most)))
            assert call.sink is not None
            want, _, want_lse = model.attention(
                oracle.to_numpy(call.q[i, j]), rows, call.scale, call.sink.double().tolist()
            )
            np.testing.assert_allclose(out[i, j], want, rtol=1e-9, atol=1e-12)
            np.testing.assert_allclose(lse[i, :, j], want_lse, rtol=1e-12, atol=1e-12)


def rounded_weights(call: decode_cases.Call, below: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
    """What a kernel may return: P, relative to some score that is not far below the largest, rounded to bf16, results
    too."""
    (pool, slots), *_ = call.slots()
    k, named = decode_cases._records(pool, slots.flatten(0, 1))
    q = call.q.flatten(0, 1).double()
    scores = (q @ k.transpose(1, 2) * call.scale).masked_fill(~named[:, None], -torch.inf)
    p = (scores - scores.amax(-1, keepdim=True) + below).exp()
    out = (p.bfloat16().double() @ k) / p.sum(-1, keepdim=True)
    return out.bfloat16().view(call.q.shape), scores.logsumexp(-1).float().view(*call.rows, -1).transpose(1, 2)


@pytest.mark.parametrize("topk", [1, 2, 3, 64, 700])
def test_rounding_is_allowed(topk: int) -> None:
    for below in (0.0, 0.1, 2.0, 3.7):
        call = make(b=6, heads=40, topk=topk, bad=0.0, sink="none", seed=int(10 * below))
        assert_near(rounded_weights(call, below), call.expected())


@pytest.mark.parametrize("what", ["one key less", "one key twice", "another scale", "another head", "columns swapped"])
def test_mistakes_are_seen(what: str) -> None:
    """One key among 2048, one scale exponent of 64 columns of one key among 100, two heads, two columns."""
    topk = 2048 if what.startswith("one key") else 100
    call = make(b=1, heads=16, topk=topk, bad=0.0, sink="none")
    want = call.expected()
    if what == "one key less":
        call.indices[0, 0, 77] = -1
    elif what == "one key twice":
        call.indices[0, 0, 77] = call.indices[0, 0, 78]
    elif what == "another scale":
        slot = int(call.indices[0, 0, 99])
        call.pool.scales[slot // 64, slot % 64, 6] += 1
    out, lse = rounded_weights(call)
    if what == "another head":
        out[0, 0, [3, 4]] = out[0, 0, [4, 3]]
    elif what == "columns swapped":
        out[0, 0, :, [100, 101]] = out[0, 0, :, [101, 100]]
    with pytest.raises(AssertionError, match=r"^(out|lse): "):
        assert_near((out, lse), want)


def test_empty_rows_must_be_zero() -> None:
    call = make(b=2, heads=3, topk=5, bad=1.0)
    want = call.expected()
    assert_near((want[0].bfloat16(), want[1].float()), want)
    for tiny in (1e-9, float("nan")):
        out = want[0].bfloat16()
        out[1, 0, 2, 9] = tiny
        with pytest.raises(AssertionError, match=r"^out: "):
            assert_near((out, want[1].float()), want)


def test_the_reference_agrees() -> None:
    for seed, second in enumerate(("none", "listed", "dense")):
        call = make(
            b=5, s_q=2, heads=9, topk=70, rows=53, second=second, extra_rows=2, lengths="bs", seed=seed, poison=0x7F
        )
        assert_near(sparse_mla_decode(**call.arguments()), call.expected())
