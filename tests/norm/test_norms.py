# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cute_kernels.norm.ops import fused_mtp_input_rmsnorm, fused_q_kv_rmsnorm, mtp_shared_head_rmsnorm
from cute_kernels.runtime.record import record_calls
from tests import oracle
from tests.helpers import check_op, generator, spread

BF16, FP32 = torch.bfloat16, torch.float32
EPS = 1e-6
NORMAL = 2.0**-126
POISON = -777.0


def weights(width: int, seed: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    """Weights of both signs, small and large, zeros among them."""
    g = generator(seed)
    w = torch.randn(width, generator=g) * torch.exp2(torch.randint(-6, 5, (width,), generator=g).float())
    w[:: max(width // 7, 1)] = 0.0
    return w.to(dtype)


def poisoned(*shape: int) -> torch.Tensor:
    return torch.full(shape, POISON, dtype=BF16)


def bits(t: torch.Tensor) -> torch.Tensor:
    """bf16 as integers, so that NaN compares equal to itself and -0 differs from 0."""
    return t.contiguous().view(torch.int16)


def assert_norm(got: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float = EPS) -> None:
    """Within one bf16 ulp of the float64 result, and its nearest bf16 unless rounding to fp32 first moves a tie."""
    assert got.dtype == BF16
    assert got.shape == x.shape
    y = oracle.rms_norm(oracle.to_numpy(x), oracle.to_numpy(weight), eps)
    have, nearest = oracle.to_numpy(got), oracle.bf16_round(y)
    assert np.all((np.abs(y) >= NORMAL) | (y == 0)), "the oracle's rounding holds for normal numbers only"
    ulp = 2.0 ** (np.frexp(np.where(nearest == 0, 1.0, nearest))[1] - 8)
    assert np.all(np.abs(have - nearest) <= np.where(nearest == 0, 0.0, ulp))
    off = have != nearest
    middle = (have + nearest) / 2
    assert np.all(np.abs(y - middle)[off] <= np.abs(middle)[off] * 2.0**-24 * 1.001)


CASES = [(1, 8), (3, 512), (2, 1024), (5, 1536), (2, 4096), (2, 7168), (3, 37)]


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize(("rows", "width"), CASES)
def test_values(rows: int, width: int, dtype: torch.dtype) -> None:
    x, w = spread((rows, width), seed=width), weights(width, 1, dtype)
    assert_norm(mtp_shared_head_rmsnorm(x, w, EPS), x, w)

    kv, kv_w = spread((rows, 512), seed=2), weights(512, 3, BF16)
    q_out, kv_out = fused_q_kv_rmsnorm(x, kv, w, kv_w, EPS)
    assert_norm(q_out, x, w)
    assert_norm(kv_out, kv, kv_w)

    previous, h_w = spread((rows, 4, width), seed=4), weights(width, 5, dtype)
    e_out, h_out = fused_mtp_input_rmsnorm(x, torch.arange(1, rows + 1), previous, w, h_w, EPS, 4)
    assert_norm(e_out, x, w)
    assert_norm(h_out, previous, h_w)


@settings(deadline=None, max_examples=20)
@given(
    seed=st.integers(0, 2**31),
    rows=st.integers(1, 6),
    width=st.integers(1, 700),
    eps=st.sampled_from([1e-6, 1e-5, 0.5]),
    exponent=st.integers(-20, 60),
)
def test_random_rows(seed: int, rows: int, width: int, eps: float, exponent: int) -> None:
    x = (torch.randn(rows, width, generator=generator(seed)) * 2.0**exponent).to(BF16)
    w = weights(width, seed + 1, FP32)
    assert_norm(mtp_shared_head_rmsnorm(x, w, eps), x, w, eps)


def test_there_is_no_rounding_before_the_weight() -> None:
    """Rounding x * rsqrt(...) to bf16 first would give other bits for many values."""
    x, w = spread((4, 1024), seed=8), weights(1024, 9, FP32)
    got = mtp_shared_head_rmsnorm(x, w, EPS)
    unweighted = oracle.bf16_round(oracle.rms_norm(oracle.to_numpy(x), None, EPS))
    early = oracle.bf16_round(unweighted * oracle.to_numpy(w))
    assert np.mean(early != oracle.to_numpy(got)) > 0.05


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_embeddings_at_position_0_are_zero_whatever_they_hold(dtype: torch.dtype) -> None:
    x, previous = spread((6, 64), seed=1), spread((6, 4, 64), seed=2)
    w, h_w = weights(64, 3), weights(64, 4)
    positions = torch.tensor([0, 7, 0, -1, 2**20, 0], dtype=dtype)
    zero = positions == 0
    clean_e, clean_h = fused_mtp_input_rmsnorm(x, torch.ones_like(positions), previous, w, h_w, EPS, 4)

    x[0], x[2], x[5, 1] = torch.nan, torch.inf, -torch.inf
    w[3] = -1.0  # a product with the weight would turn 0 into -0
    e_out, h_out = fused_mtp_input_rmsnorm(x, positions, previous, w, h_w, EPS, 4)
    assert torch.equal(bits(e_out[zero]), torch.zeros(3, 64, dtype=torch.int16))
    assert torch.equal(bits(h_out), bits(clean_h))  # residual rows are never masked
    assert_norm(e_out[~zero], x[~zero], w)
    assert h_out[zero].abs().sum() > 0
    assert clean_e[0].abs().sum() > 0


def q_kv_call() -> dict[str, Any]:
    """Column slices of one projection, as the layers have them."""
    qr_kv = spread((5, 96 + 64), seed=1)
    qr, kv = qr_kv.split([96, 64], dim=-1)
    return {"qr": qr, "kv": kv, "q_weight": weights(96, 2), "kv_weight": weights(64, 3, FP32), "eps": 1e-5}


def mtp_call() -> dict[str, Any]:
    return {
        "inputs_embeds": spread((5, 80), seed=1)[:, 8:72],
        "positions": torch.tensor([0, 1, 2, 0, 9]),
        "previous_hidden_states": spread((5, 6, 80), seed=2)[:, 1:4, 16:],
        "enorm_weight": weights(64, 3),
        "hnorm_weight": weights(64, 4, FP32),
        "eps": EPS,
        "hc_mult": 3,
    }


def head_call() -> dict[str, Any]:
    return {"hidden_states": spread((5, 80), seed=1)[:, 16:], "weight": weights(64, 2), "eps": EPS}


def q_kv_rows(call: dict[str, Any], rows: slice) -> dict[str, Any]:
    return {**call, "qr": call["qr"][rows], "kv": call["kv"][rows]}


def mtp_rows(call: dict[str, Any], rows: slice) -> dict[str, Any]:
    names = ("inputs_embeds", "positions", "previous_hidden_states")
    return {**call, **{name: call[name][rows] for name in names}}


def head_rows(call: dict[str, Any], rows: slice) -> dict[str, Any]:
    return {**call, "hidden_states": call["hidden_states"][rows]}


def one(**call: Any) -> tuple[torch.Tensor]:
    """mtp_shared_head_rmsnorm with its result in a tuple, like the others."""
    out = call.pop("out", None)
    return (mtp_shared_head_rmsnorm(**call, out=None if out is None else out[0]),)


OPS: dict[str, tuple[Callable[..., Any], Callable[[], dict[str, Any]], Callable[..., dict[str, Any]]]] = {
    "fused_q_kv_rmsnorm": (fused_q_kv_rmsnorm, q_kv_call, q_kv_rows),
    "fused_mtp_input_rmsnorm": (fused_mtp_input_rmsnorm, mtp_call, mtp_rows),
    "mtp_shared_head_rmsnorm": (one, head_call, head_rows),
}
each_op = pytest.mark.parametrize("name", OPS)


@each_op
def test_a_row_does_not_depend_on_its_batch(name: str) -> None:
    function, make, rows_of = OPS[name]
    whole = function(**make())
    for t in range(5):
        for got, want in zip(function(**rows_of(make(), slice(t, t + 1))), whole, strict=True):
            assert torch.equal(bits(got), bits(want[t : t + 1]))
    poisoned_row = make()
    for tensor in poisoned_row.values():
        if isinstance(tensor, torch.Tensor) and tensor.dim() > 1:
            tensor[2] = torch.nan
    for got, want in zip(function(**poisoned_row), whole, strict=True):
        for t in (0, 1, 3, 4):
            assert torch.equal(bits(got[t]), bits(want[t]))
        assert got[2].isnan().all()


@pytest.mark.parametrize("width", [512, 1536, 7168])
def test_a_row_does_not_depend_on_its_batch_at_model_widths(width: int) -> None:
    x, w = spread((65, width), seed=7), weights(width, 8, FP32)
    whole = mtp_shared_head_rmsnorm(x, w, EPS)
    assert_norm(whole, x, w)
    for t in (0, 1, 31, 64):
        assert torch.equal(bits(mtp_shared_head_rmsnorm(x[t : t + 1], w, EPS)), bits(whole[t : t + 1]))
    assert torch.equal(bits(mtp_shared_head_rmsnorm(x[17:], w, EPS)), bits(whole[17:]))


@each_op
def test_strides_do_not_matter(name: str) -> None:
    function, make, _ = OPS[name]
    dense = {k: v.contiguous() if isinstance(v, torch.Tensor) else v for k, v in make().items()}
    for got, want in zip(function(**make()), function(**dense), strict=True):
        assert got.is_contiguous()
        assert torch.equal(bits(got), bits(want))


def test_both_norms_use_the_eps_of_the_call() -> None:
    call = q_kv_call()
    q_out, kv_out = fused_q_kv_rmsnorm(**call)
    assert_norm(q_out, call["qr"], call["q_weight"], 1e-5)
    assert_norm(kv_out, call["kv"], call["kv_weight"], 1e-5)
    call = {**mtp_call(), "eps": 1e-5, "positions": torch.arange(1, 6)}
    e_out, h_out = fused_mtp_input_rmsnorm(**call)
    assert_norm(e_out, call["inputs_embeds"], call["enorm_weight"], 1e-5)
    assert_norm(h_out, call["previous_hidden_states"], call["hnorm_weight"], 1e-5)


@each_op
def test_no_rows(name: str) -> None:
    function, make, rows_of = OPS[name]
    for got, full in zip(function(**rows_of(make(), slice(0, 0))), function(**make()), strict=True):
        assert got.shape == (0, *full.shape[1:])
        assert got.dtype == BF16


@each_op
def test_writes_given_buffers_and_nothing_else(name: str) -> None:
    function, make, _ = OPS[name]
    fresh = function(**make())
    whole = [poisoned(*(n + 3 for n in t.shape)) for t in fresh]
    inside = [tuple(slice(1, n + 1) for n in t.shape) for t in fresh]
    out = tuple(w[i] for w, i in zip(whole, inside, strict=True))
    for result, got in zip(out, function(**make(), out=out), strict=True):
        assert got is result
    for w, i, t in zip(whole, inside, fresh, strict=True):
        want = torch.full_like(w, POISON)
        want[i] = t
        assert torch.equal(bits(w), bits(want))


@each_op
def test_op_and_compile(name: str) -> None:
    function, make, rows_of = OPS[name]
    outputs = [torch.empty_like(t) for t in function(**make())]
    check_op(name, *make().values(), *outputs, False)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=True)
    # A view's base and sizes that are equal by chance would become guards of their own.
    with torch._dynamo.config.patch(error_on_recompile=True), torch.fx.experimental._config.patch(use_duck_shape=False):
        for call in (make(), rows_of(make(), slice(0, 3))):
            dense = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in call.items()}
            for got, want in zip(compiled(**dense), function(**call), strict=True):
                assert torch.equal(bits(got), bits(want))


@pytest.mark.parametrize(
    ("name", "moved", "flops"),
    [
        ("fused_q_kv_rmsnorm", 2 * 5 * 160 * 2 + 96 * 2 + 64 * 4, 4 * 5 * 160),
        ("fused_mtp_input_rmsnorm", 2 * 5 * 64 * 4 * 2 + 5 * 8 + 64 * 2 + 64 * 4, 4 * 5 * 64 * 4),
        ("mtp_shared_head_rmsnorm", 2 * 5 * 64 * 2 + 64 * 2, 4 * 5 * 64),
    ],
)
def test_recorded_cost(name: str, moved: int, flops: int) -> None:
    function, make, _ = OPS[name]
    with record_calls() as recording:
        function(**make())
    (entry,) = recording.calls
    assert (entry.op, entry.implementation, entry.cost.bytes, entry.cost.flops) == (name, "reference", moved, flops)


@pytest.mark.parametrize(
    ("name", "change", "error", "argument"),
    [
        ("fused_q_kv_rmsnorm", {"qr": torch.zeros(5, 96)}, TypeError, "qr"),
        ("fused_q_kv_rmsnorm", {"qr": poisoned(96)}, ValueError, "qr"),
        ("fused_q_kv_rmsnorm", {"qr": poisoned(96, 5).T}, ValueError, "qr"),
        ("fused_q_kv_rmsnorm", {"kv": poisoned(4, 64)}, ValueError, "kv"),
        ("fused_q_kv_rmsnorm", {"q_weight": poisoned(95)}, ValueError, "q_weight"),
        ("fused_q_kv_rmsnorm", {"q_weight": torch.zeros(96, dtype=torch.float16)}, TypeError, "q_weight"),
        ("fused_q_kv_rmsnorm", {"kv_weight": poisoned(1, 64)}, ValueError, "kv_weight"),
        ("fused_q_kv_rmsnorm", {"eps": -1e-6}, ValueError, "eps"),
        ("fused_q_kv_rmsnorm", {"eps": float("nan")}, ValueError, "eps"),
        ("fused_q_kv_rmsnorm", {"out": (poisoned(5, 95), poisoned(5, 64))}, ValueError, "out"),
        ("fused_q_kv_rmsnorm", {"out": (poisoned(5, 96), torch.zeros(5, 64))}, TypeError, "out"),
        ("fused_q_kv_rmsnorm", {"out": poisoned(5, 96)}, TypeError, "out"),
        ("fused_mtp_input_rmsnorm", {"inputs_embeds": poisoned(5, 63)}, ValueError, "enorm_weight"),
        ("fused_mtp_input_rmsnorm", {"inputs_embeds": poisoned(5, 1, 64)}, ValueError, "inputs_embeds"),
        ("fused_mtp_input_rmsnorm", {"positions": torch.zeros(5)}, TypeError, "positions"),
        ("fused_mtp_input_rmsnorm", {"positions": torch.zeros(4, dtype=torch.int64)}, ValueError, "positions"),
        ("fused_mtp_input_rmsnorm", {"previous_hidden_states": poisoned(5, 192)}, ValueError, "previous_hidden_states"),
        ("fused_mtp_input_rmsnorm", {"hc_mult": 4}, ValueError, "previous_hidden_states"),
        ("fused_mtp_input_rmsnorm", {"hnorm_weight": poisoned(65)}, ValueError, "hnorm_weight"),
        ("fused_mtp_input_rmsnorm", {"eps": -1.0}, ValueError, "eps"),
        ("fused_mtp_input_rmsnorm", {"out": (poisoned(5, 64), poisoned(5, 4, 64))}, ValueError, "out"),
        ("fused_mtp_input_rmsnorm", {"out": []}, TypeError, "out"),
        ("mtp_shared_head_rmsnorm", {"hidden_states": torch.zeros(5, 64)}, TypeError, "hidden_states"),
        ("mtp_shared_head_rmsnorm", {"weight": poisoned(63)}, ValueError, "weight"),
        ("mtp_shared_head_rmsnorm", {"eps": -1.0}, ValueError, "eps"),
        ("mtp_shared_head_rmsnorm", {"out": (poisoned(6, 64),)}, ValueError, "out"),
    ],
)
def test_bad_arguments(name: str, change: dict[str, Any], error: type[Exception], argument: str) -> None:
    function, make, _ = OPS[name]
    with pytest.raises(error, match=rf"{name}: {argument}: expected"):
        function(**{**make(), **change})
