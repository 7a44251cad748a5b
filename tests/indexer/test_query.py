# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from cute_kernels.indexer.ops import fused_indexer_q_rope_quant
from cute_kernels.runtime.record import record_calls
from tests import oracle
from tests.helpers import POISON_BYTE, bits, check_op, raw_bytes, spread

MAX_POS = 4099
TABLE = oracle.cos_sin_table(MAX_POS)
SCALES = (128**-0.5, 32**-0.5)


def rotated(positions: torch.Tensor, q: torch.Tensor, table: torch.Tensor, use_hadamard: bool = False) -> np.ndarray:
    row = oracle.to_numpy(table)[np.clip(positions.numpy(), 0, table.shape[0] - 1)][:, None, :]
    x = oracle.to_numpy(q)
    turned = oracle.bf16_round(oracle.rope_f32(x[..., 64:], row[..., :32], row[..., 32:]))
    x = np.concatenate([x[..., :64], turned], axis=-1)
    return oracle.bf16_round(oracle.hadamard(x)) if use_hadamard else x


def expected(
    x: np.ndarray, weights: torch.Tensor, scales: tuple[float, float], use_fp4: bool, rounding: str = "ties_to_lower"
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(code bytes, scale bytes, fp32 weights)."""
    tokens, heads, _ = x.shape
    block, kind = (32, "e2m1") if use_fp4 else (128, "e4m3")
    codes, byte = oracle.quantize_blocks(x.reshape(-1, 128), block, kind, rounding=rounding)
    w = weights.float().numpy()
    if use_fp4:
        codes = codes[:, 0::2] + 16 * codes[:, 1::2]
    else:
        w = w * np.ldexp(np.float32(1), byte.astype(int) - 127).reshape(tokens, heads)
    w = w * np.float32(scales[0]) * np.float32(scales[1])
    return codes.reshape(tokens, heads, codes.shape[1]), byte.reshape(tokens, heads, byte.shape[1]), w


def inputs(tokens: int, heads: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    fixed = torch.tensor([0, 3, 7, 127, 128, 255, MAX_POS - 1])
    positions = torch.cat([fixed, torch.randint(0, MAX_POS, (tokens,), generator=g)])[:tokens]
    weights = torch.randn(tokens, heads, generator=g).to(torch.bfloat16)
    return positions, spread((tokens, heads, 128), seed), weights


def compare(got: Any, want: tuple[np.ndarray, np.ndarray, np.ndarray], use_fp4: bool) -> None:
    q, weights = got
    if use_fp4:
        q, scale = q
        assert scale.dtype == torch.int32
        shifts = 8 * np.arange(4)
        np.testing.assert_array_equal((scale.numpy()[..., None] >> shifts) & 255, want[1])
    np.testing.assert_array_equal(q.view(torch.uint8).numpy(), want[0])
    np.testing.assert_array_equal(weights.numpy().view(np.int32), want[2].view(np.int32))


@pytest.mark.parametrize("use_hadamard", [False, True])
@pytest.mark.parametrize("use_fp4", [False, True])
@pytest.mark.parametrize(("tokens", "heads"), [(0, 64), (1, 1), (7, 5), (13, 8)])
def test_bytes(tokens: int, heads: int, use_fp4: bool, use_hadamard: bool) -> None:
    positions, q, w = inputs(tokens, heads)
    got = fused_indexer_q_rope_quant(positions, q, TABLE, w, *SCALES, use_fp4, index_hadamard=use_hadamard)
    assert got[0][0].is_contiguous() if use_fp4 else got[0].is_contiguous()
    assert (got[0][0].dtype if use_fp4 else got[0].dtype) == (torch.uint8 if use_fp4 else torch.float8_e4m3fn)
    compare(got, expected(rotated(positions, q, TABLE, use_hadamard), w, SCALES, use_fp4), use_fp4)


@pytest.mark.parametrize("use_fp4", [False, True])
def test_columns_of_wider_projections(use_fp4: bool) -> None:
    """Queries and fp32 weights as two fused GEMMs leave them: the bytes that bf16 weights give."""
    positions, q, w = inputs(9, 6)
    wide = torch.full((9, 6 * 128 + 512), torch.nan, dtype=torch.bfloat16)
    view = wide[:, 512:].unflatten(-1, (6, 128))
    view.copy_(q)
    sums = torch.full((9, 83), torch.nan)
    sums[:, 70:76] = w.float() * (1 + 2.0**-10)
    assert torch.equal(sums[:, 70:76].bfloat16(), w)
    got = fused_indexer_q_rope_quant(positions, view, TABLE, sums[:, 70:76], *SCALES, use_fp4, round_weights=True)
    compare(got, expected(rotated(positions, q, TABLE), w, SCALES, use_fp4), use_fp4)


@pytest.mark.parametrize("use_fp4", [False, True])
def test_strided_inputs_bf16_table_fp32_weights(use_fp4: bool) -> None:
    positions, q, _ = inputs(9, 6)
    wide = torch.randn(9, 40, generator=torch.Generator().manual_seed(3))
    w = wide[:, 11:17]
    view = torch.full((9, 8, 200), torch.nan, dtype=torch.bfloat16)[:, 1:7, 40:168]
    view.copy_(q)
    table = TABLE.bfloat16()
    got = fused_indexer_q_rope_quant(positions, view, table, w, *SCALES, use_fp4)
    compare(got, expected(rotated(positions, q, table), w.contiguous(), SCALES, use_fp4), use_fp4)


def test_positions_outside_the_table_take_its_nearest_row() -> None:
    _, q, w = inputs(4, 2)
    positions = torch.tensor([-5, MAX_POS, 2**40, -(2**62)])
    got = fused_indexer_q_rope_quant(positions, q, TABLE, w, *SCALES)
    compare(got, expected(rotated(positions, q, TABLE), w, SCALES, False), False)


@pytest.mark.parametrize("rounding", ["ties_to_lower", "ties_to_even"])
def test_mxfp4_ties_zeros_and_floor(rounding: str) -> None:
    ties = [6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    block = torch.tensor([*ties, *(-t for t in ties), -0.0, 0.0, 0.125, -0.125, 4.5, -4.5, *([1.0] * 10)])
    powers = torch.tensor([1.0, 2.0**-9, 2.0**30, 2.0**-16])
    q = (block * powers[:, None]).flatten().bfloat16().expand(3, 1, 128).clone()
    q[1] = 0.0
    q[2, :, :64] = 1e-5
    zero = torch.zeros(3, dtype=torch.int64)
    w = torch.ones(3, 1)
    got = fused_indexer_q_rope_quant(zero, q, TABLE, w, *SCALES, True, e2m1_rounding=rounding)
    compare(got, expected(oracle.to_numpy(q), w, SCALES, True, rounding), True)
    (packed, scale), _ = got
    first = packed[0, 0, :4].tolist()
    codes = [n for byte in first for n in (byte & 15, byte >> 4)]
    assert codes == ([7, 0, 1, 2, 3, 4, 5, 6] if rounding == "ties_to_lower" else [7, 0, 2, 2, 4, 4, 6, 6])
    assert packed[0, 0, 8].item() == (0x00 if rounding == "ties_to_lower" else 0x08)
    assert scale[1, 0].item().to_bytes(4, "little") == bytes([127 - 15] * 4)


def test_fp8_extremes() -> None:
    rows = torch.zeros(5, 1, 128)
    rows[0, 0, :8] = torch.tensor([448.0, -448, 432, 17, 19, 2.0**-9, 2.0**-10, -0.0])
    rows[1] = 1e-5
    rows[2] = 3.3e38
    rows[3, 0, 5] = -449.0
    q = rows.bfloat16()
    zero = torch.zeros(5, dtype=torch.int64)
    w = torch.full((5, 1), -3.0)
    got = fused_indexer_q_rope_quant(zero, q, TABLE, w, 1.0, 1.0)
    compare(got, expected(oracle.to_numpy(q), w, (1.0, 1.0), False), False)
    assert got[1][4, 0].item() == -3.0 * 2.0**-22


@pytest.mark.parametrize("use_fp4", [False, True])
def test_nan_and_infinity_stay_in_their_head(use_fp4: bool) -> None:
    positions, q, w = inputs(6, 3)
    clean = fused_indexer_q_rope_quant(positions, q, TABLE, w, *SCALES, use_fp4)
    q[2, 1, 9] = torch.nan
    q[3, 0, 100] = torch.inf
    got = fused_indexer_q_rope_quant(positions, q, TABLE, w, *SCALES, use_fp4)
    codes = [(r[0][0] if use_fp4 else r[0].view(torch.uint8)) for r in (clean, got)]
    same = torch.ones(6, 3, dtype=torch.bool)
    same[2, 1] = same[3, 0] = False
    assert torch.equal(codes[0][same], codes[1][same])
    assert torch.equal(clean[1][same], got[1][same])
    bad = codes[1][2, 1]
    if use_fp4:
        assert (bad[4] >> 4) == 0
        assert torch.equal(bad[:4], codes[0][2, 1, :4])
    else:
        assert bad[9] == 0x7F
        assert got[1].isfinite().all()


def test_weights_multiply_in_order() -> None:
    g = torch.Generator().manual_seed(5)
    w = torch.randn(64, 7, generator=g)
    q = spread((64, 7, 128), 6)
    zero = torch.zeros(64, dtype=torch.int64)
    a, b = 0.1, 7**-0.5
    _, got = fused_indexer_q_rope_quant(zero, q, TABLE, w, a, b, True)
    in_order = (w.numpy() * np.float32(a)) * np.float32(b)
    folded = w.numpy() * np.float32(a * b)
    assert np.array_equal(got.numpy(), in_order)
    assert not np.array_equal(in_order, folded)
    _, rounded = fused_indexer_q_rope_quant(zero, q, TABLE, w, a, b, True, weights_out_dtype=torch.bfloat16)
    np.testing.assert_array_equal(oracle.to_numpy(rounded), oracle.bf16_round(in_order))


@pytest.mark.parametrize("use_hadamard", [False, True])
@pytest.mark.parametrize("use_fp4", [False, True])
def test_row_alone_equals_row_in_batch(use_fp4: bool, use_hadamard: bool) -> None:
    positions, q, w = inputs(11, 3, seed=8)

    def flat(chosen: slice) -> list[torch.Tensor]:
        (codes, weights) = fused_indexer_q_rope_quant(
            positions[chosen], q[chosen], TABLE, w[chosen], *SCALES, use_fp4, index_hadamard=use_hadamard
        )
        return [bits(t) for t in ((*codes, weights) if use_fp4 else (codes, weights))]

    whole = flat(slice(None))
    for t in range(11):
        for a, b in zip(whole, flat(slice(t, t + 1)), strict=True):
            assert torch.equal(a[t], b[0])


@pytest.mark.parametrize("use_fp4", [False, True])
def test_out_is_written_inside_its_rows_only(use_fp4: bool) -> None:
    positions, q, w = inputs(5, 3)
    dtypes = (torch.uint8, torch.int32) if use_fp4 else (torch.float8_e4m3fn,)
    big = [torch.empty(9, 4, 70 if d == torch.uint8 else 130, dtype=d) for d in dtypes if d != torch.int32]
    big += [torch.empty(9, 6, dtype=d) for d in dtypes if d == torch.int32]
    big.append(torch.empty(9, 7))
    for t in big:
        raw_bytes(t).fill_(POISON_BYTE)
    width = 64 if use_fp4 else 128
    views = [big[0][2:7, :3, 1 : 1 + width]] + [t[2:7, 2:5] for t in big[1:]]
    out = ((views[0], views[1]), views[2]) if use_fp4 else (views[0], views[1])
    got = fused_indexer_q_rope_quant(positions, q, TABLE, w, *SCALES, use_fp4, out=out)
    assert got[1] is views[-1]
    fresh = fused_indexer_q_rope_quant(positions, q, TABLE, w, *SCALES, use_fp4)
    fresh_flat = [*fresh[0], fresh[1]] if use_fp4 else list(fresh)
    for view, value, whole in zip(views, fresh_flat, big, strict=True):
        assert torch.equal(bits(view), bits(value))
        view.view(torch.uint8).fill_(POISON_BYTE)
        assert (raw_bytes(whole) == POISON_BYTE).all()


def test_opcheck() -> None:
    positions, q, w = inputs(3, 2)
    q_out = torch.empty(3, 2, 128, dtype=torch.float8_e4m3fn)
    check_op(
        "fused_indexer_q_rope_quant_fp8", positions, q, TABLE, w, *SCALES, False, q_out, torch.empty(3, 2), True, False
    )
    outs = (torch.empty(3, 2, 64, dtype=torch.uint8), torch.empty(3, 2, dtype=torch.int32), torch.empty(3, 2))
    check_op(
        "fused_indexer_q_rope_quant_mxfp4",
        positions,
        q,
        TABLE,
        w,
        *SCALES,
        "ties_to_even",
        1e-4,
        True,
        *outs,
        False,
        True,
    )


@pytest.mark.full
@pytest.mark.parametrize("use_fp4", [False, True])
def test_compile(use_fp4: bool) -> None:
    def f(positions: torch.Tensor, q: torch.Tensor, w: torch.Tensor) -> Any:
        return fused_indexer_q_rope_quant(positions, q, TABLE, w, *SCALES, use_fp4)

    compiled = torch.compile(f, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (5, 12):
        args = inputs(tokens, 4)
        want, got = f(*args), compiled(*args)
        for a, b in zip(torch.utils._pytree.tree_leaves(want), torch.utils._pytree.tree_leaves(got), strict=True):
            assert torch.equal(bits(a), bits(b))


def test_cost() -> None:
    positions, q, w = inputs(5, 3)
    with record_calls() as recording:
        fused_indexer_q_rope_quant(positions, q, TABLE, w, *SCALES)
        fused_indexer_q_rope_quant(positions, q, TABLE, w, *SCALES, True)
    reads = 5 * 8 + 15 * 128 * 2 + 5 * 64 * 4 + 15 * 2
    assert [c.cost.bytes for c in recording.calls] == [reads + 15 * (128 + 4), reads + 15 * (64 + 4 + 4)]


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"positions": torch.zeros(3, dtype=torch.int32)}, TypeError, "positions"),
        ({"positions": torch.zeros(4, dtype=torch.int64)}, ValueError, "index_q"),
        ({"index_q": None}, TypeError, "index_q"),
        ({"index_q": torch.zeros(3, 2, 128)}, TypeError, "index_q"),
        ({"index_q": torch.zeros(3, 2, 127, dtype=torch.bfloat16)}, ValueError, "index_q"),
        ({"index_q": torch.zeros(3, 2, 256, dtype=torch.bfloat16)[..., ::2]}, ValueError, "index_q"),
        ({"index_q_cos_sin_cache": torch.zeros(9, 32)}, ValueError, "index_q_cos_sin_cache"),
        ({"index_q_cos_sin_cache": torch.zeros(0, 64)}, ValueError, "index_q_cos_sin_cache"),
        ({"index_q_cos_sin_cache": torch.zeros(9, 64).double()}, TypeError, "index_q_cos_sin_cache"),
        ({"index_weights": torch.zeros(3, 3)}, ValueError, "index_weights"),
        ({"index_weights": torch.zeros(3, 3), "use_fp4": True}, ValueError, "index_weights"),
        ({"weights_out_dtype": torch.bfloat16}, ValueError, "weights_out_dtype"),
        ({"use_fp4": True, "weights_out_dtype": torch.float16}, ValueError, "weights_out_dtype"),
        ({"use_fp4": True, "e2m1_rounding": "up"}, ValueError, "e2m1_rounding"),
        ({"out": (torch.zeros(3, 2, 128, dtype=torch.uint8), torch.zeros(3, 2))}, TypeError, "q_quant"),
        ({"out": 5}, TypeError, "out"),
        ({"out": (torch.zeros(3),)}, TypeError, "out"),
        ({"use_fp4": True, "out": (torch.zeros(3), torch.zeros(3, 2))}, TypeError, r"out\[0\]"),
        ({"out": (torch.zeros(3), torch.zeros(3, 2).bfloat16())}, TypeError, r"out\[1\]"),
    ],
)
def test_bad_arguments(change: dict[str, Any], error: type[Exception], says: str) -> None:
    positions, q, w = inputs(3, 2)
    good = {
        "positions": positions,
        "index_q": q,
        "index_q_cos_sin_cache": TABLE,
        "index_weights": w,
        "index_weights_softmax_scale": 1.0,
        "index_weights_head_scale": 1.0,
    }
    with pytest.raises(error, match=f"fused_indexer_q_rope_quant.*{says}: expected"):
        fused_indexer_q_rope_quant(**{**good, **change})
