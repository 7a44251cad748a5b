# SPDX-License-Identifier: Apache-2.0
"""fused_inv_rope_fp8_quant against the numpy oracle, byte for byte."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cute_kernels.output.ops import fused_inv_rope_fp8_quant, output_scale_shape
from tests import helpers, oracle

TABLE = oracle.cos_sin_table(300)


def positions_of(num_tokens: int) -> torch.Tensor:
    known = [0, 3, 7, 127, 128, 255, 299, 1_000_000, -5]
    return torch.tensor([known[t % len(known)] for t in range(num_tokens)], dtype=torch.int64)


def rotated(o: torch.Tensor, positions: torch.Tensor, table: torch.Tensor = TABLE) -> np.ndarray:
    """fp32 [T, H, 512]: the inverse rotation of each row, positions outside the table moved to its nearest row."""
    x = o.float().numpy().copy()
    for t, position in enumerate(positions.tolist()):
        row = table[min(max(position, 0), table.shape[0] - 1)].numpy()
        x[t, :, 448:] = oracle.rope_f32(x[t, :, 448:], row[:32], row[32:], inverse=True)
    return x


def expected(x: np.ndarray, groups: int, packed: bool) -> tuple[np.ndarray, np.ndarray]:
    """(codes uint8 [G, T, K], scale memory [G, S, Tal] as fp32 or int32) of fp32 [T, H, 512]."""
    num_tokens, heads, _ = x.shape
    per_group = heads // groups
    codes, byte = oracle.quantize_blocks(x.reshape(-1, 512).astype(np.float64), 128, "e4m3", floor=1e-10)
    codes = codes.reshape(num_tokens, heads, 512)
    byte = byte.reshape(num_tokens, heads, 4)
    padded = -(-num_tokens // 4) * 4
    per_head = 1 if packed else 4
    scales = np.zeros((groups, per_group * per_head, padded), dtype=np.int32 if packed else np.float32)
    grouped = np.zeros((groups, num_tokens, per_group * 512), dtype=np.uint8)
    for t in range(num_tokens):
        for h in range(heads):
            g, slot = divmod(h, per_group)
            grouped[g, t, slot * 512 : slot * 512 + 512] = codes[t, h]
            if packed:
                word = sum(int(byte[t, h, j]) << 8 * j for j in range(4))
                scales[g, slot, t] = np.array(word, dtype=np.uint32).view(np.int32)
            else:
                for j in range(4):
                    scales[g, slot * 4 + j, t] = np.float32(2.0 ** (int(byte[t, h, j]) - 127))
    return grouped, scales


def memory_of(scale: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """The whole scale memory [G, S, Tal] behind a logical [T, G, S] tensor, padding included."""
    _, groups, count = scale.shape
    padded = -(-num_tokens // 4) * 4
    return scale.as_strided((groups, count, padded), (count * padded, padded, 1), 0)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("num_tokens", "groups", "per_group"), [(1, 1, 1), (4, 2, 3), (9, 3, 2), (5, 1, 8)])
def test_bytes_and_layout(num_tokens: int, groups: int, per_group: int, packed: bool) -> None:
    heads = groups * per_group
    wide = helpers.spread((num_tokens, heads + 3, 512), seed=num_tokens)
    wide[:, heads:] = float("nan")
    o = wide[:, :heads]
    positions = positions_of(num_tokens)
    q, scale = fused_inv_rope_fp8_quant(o, positions, TABLE, groups, per_group, tma_aligned_scales=packed)

    width, padded = per_group * 512, -(-num_tokens // 4) * 4
    count = per_group if packed else per_group * 4
    assert q.dtype == torch.float8_e4m3fn
    assert scale.dtype == (torch.int32 if packed else torch.float32)
    assert q.shape == (num_tokens, groups, width)
    assert q.stride() == (width, num_tokens * width, 1)
    assert scale.shape == (num_tokens, groups, count)
    assert scale.stride() == (1, count * padded, padded)
    assert output_scale_shape(num_tokens, groups, per_group, packed) == (groups, count, padded)

    codes, scales = expected(rotated(o, positions), groups, packed)
    np.testing.assert_array_equal(q.transpose(0, 1).view(torch.uint8).numpy(), codes)
    np.testing.assert_array_equal(memory_of(scale, num_tokens).numpy(), scales)


@pytest.mark.parametrize("packed", [False, True])
def test_writes_all_of_its_outputs_and_nothing_else(packed: bool) -> None:
    num_tokens, groups, per_group = 6, 2, 2
    o = helpers.spread((num_tokens, 4, 512), seed=3)
    positions = positions_of(num_tokens)
    shape = output_scale_shape(num_tokens, groups, per_group, packed)
    dtype = torch.int32 if packed else torch.float32
    wide = torch.empty(num_tokens, groups + 1, 1024 + 16, dtype=torch.float8_e4m3fn)
    pool = torch.empty(shape[0], shape[1] + 2, shape[2] + 4, dtype=dtype)
    for t in (wide, pool):
        helpers.raw_bytes(t).fill_(helpers.POISON_BYTE)
    before_wide, before_pool = wide.view(torch.uint8).clone(), pool.clone()
    out, scale_out = wide[:, 1:, 16:], pool[:, 2:, : shape[2]]
    q, scale = fused_inv_rope_fp8_quant(
        o, positions, TABLE, groups, per_group, tma_aligned_scales=packed, out=out, scale_out=scale_out
    )
    assert q is out
    assert scale.data_ptr() == scale_out.data_ptr()
    codes, scales = expected(rotated(o, positions), groups, packed)
    np.testing.assert_array_equal(q.transpose(0, 1).view(torch.uint8).numpy(), codes)
    np.testing.assert_array_equal(scale_out.numpy(), scales)
    before_wide[:, 1:, 16:] = torch.from_numpy(codes).transpose(0, 1)
    before_pool[:, 2:, : shape[2]] = torch.from_numpy(scales)
    assert torch.equal(wide.view(torch.uint8), before_wide)
    assert torch.equal(pool.view(torch.int32), before_pool.view(torch.int32))


def test_scale_comes_from_values_that_were_never_rounded_to_bf16() -> None:
    table = torch.zeros(1, 64)
    table[:, :32], table[:, 32:] = 1.0, 0.9
    o = torch.zeros(1, 1, 512, dtype=torch.bfloat16)
    o[0, 0, 448], o[0, 0, 449] = 448.0, 1.0
    # 448 + 0.9 exceeds 448; rounded to bf16 first it would not.
    q, scale = fused_inv_rope_fp8_quant(o, torch.zeros(1, dtype=torch.int64), table, 1, 1)
    assert scale[0, 0, 3].item() == 2.0
    codes, _ = expected(rotated(o, torch.zeros(1, dtype=torch.int64), table), 1, False)
    np.testing.assert_array_equal(q.transpose(0, 1).view(torch.uint8).numpy(), codes)


@pytest.mark.parametrize(
    ("largest", "exponent"),
    [
        (0.0, -42),
        (2.0**-40, -42),
        (1.1e-10, -41),
        (1e-5, -25),
        (448.0, 0),
        (450.0, 1),
        (446.0, 0),
        (448.0 * 2.0**-20, -20),
        (2.0**127, 119),
    ],
)
def test_scale_exponents(largest: float, exponent: int) -> None:
    o = torch.zeros(1, 1, 512, dtype=torch.bfloat16)
    o[0, 0, 130] = -largest
    o[0, 0, 131] = -0.0
    positions = torch.zeros(1, dtype=torch.int64)
    q, scale = fused_inv_rope_fp8_quant(o, positions, TABLE, 1, 1)
    assert scale.flatten().tolist() == [2.0**-42, 2.0**exponent, 2.0**-42, 2.0**-42]
    _, packed = fused_inv_rope_fp8_quant(o, positions, TABLE, 1, 1, tma_aligned_scales=True)
    assert packed.item() == 85 | (exponent + 127) << 8 | 85 << 16 | 85 << 24
    codes = q.view(torch.uint8).flatten()
    assert codes[130] == oracle.e4m3_encode(np.array(-o[0, 0, 130].abs().item() * 2.0**-exponent))
    assert codes[131] == 0x80


def test_top_byte_of_a_word_may_set_the_sign() -> None:
    o = torch.full((1, 1, 512), 2.0**10, dtype=torch.bfloat16)
    _, packed = fused_inv_rope_fp8_quant(o, torch.zeros(1, dtype=torch.int64), TABLE, 1, 1, tma_aligned_scales=True)
    byte = 127 + 2
    assert packed.item() & 0xFFFFFFFF == byte * 0x01010101
    assert packed.item() < 0


def test_rounding_ties_go_to_the_even_code() -> None:
    o = torch.zeros(1, 1, 512, dtype=torch.bfloat16)
    ties = [17.0, 19.0, 21.0, 2.0**-10, 3 * 2.0**-10, 464.0]
    o[0, 0, : len(ties)] = torch.tensor(ties, dtype=torch.bfloat16)
    o[0, 0, len(ties)] = 512.0
    q, scale = fused_inv_rope_fp8_quant(o, torch.zeros(1, dtype=torch.int64), TABLE, 1, 1)
    assert scale[0, 0, 0].item() == 2.0
    np.testing.assert_array_equal(
        q.view(torch.uint8)[0, 0, : len(ties)].numpy(), oracle.e4m3_encode(np.array(ties) / 2)
    )


def test_nan_and_infinity_stay_where_they_are() -> None:
    clean = helpers.spread((2, 2, 512), seed=8)
    clean[0, 0] = torch.randn(512, generator=helpers.generator(1)).bfloat16()
    dirty = clean.clone()
    dirty[0, 0, 5] = float("nan")
    dirty[0, 0, 300] = float("inf")
    dirty[0, 1, 450] = float("nan")  # pair (450, 451) turns into two NaN
    positions = torch.tensor([9, 9])
    q, scale = fused_inv_rope_fp8_quant(dirty, positions, TABLE, 1, 2)
    codes = q.view(torch.uint8).view(2, 2, 512)
    base = clean.clone()
    base[0, 0, 5] = 0.0
    base[0, 1, 450:452] = 0.0
    want, want_scale = fused_inv_rope_fp8_quant(base, positions, TABLE, 1, 2)
    want = want.view(torch.uint8).view(2, 2, 512).clone()
    want[0, 0, 5] = 0x7F
    want[0, 1, 450:452] = 0x7F
    keep = torch.ones(2, 2, 512, dtype=torch.bool)
    keep[0, 0, 256:384] = False  # the chunk scaled for infinity
    assert torch.equal(codes[keep], want[keep])
    chunk = torch.ones(2, 8, dtype=torch.bool)
    chunk[0, 2] = False
    assert torch.equal(scale.view(2, 8)[chunk], want_scale.view(2, 8)[chunk])
    assert codes[0, 0, 300] == 0x7E


@pytest.mark.parametrize("packed", [False, True])
def test_row_is_independent_of_its_batch(packed: bool) -> None:
    o, positions = helpers.spread((11, 4, 512), seed=5), positions_of(11)
    q, scale = fused_inv_rope_fp8_quant(o, positions, TABLE, 2, 2, tma_aligned_scales=packed)
    for t in (0, 3, 10):
        row, row_scale = fused_inv_rope_fp8_quant(
            o[t : t + 1], positions[t : t + 1], TABLE, 2, 2, tma_aligned_scales=packed
        )
        assert torch.equal(helpers.bits(q[t : t + 1]), helpers.bits(row))
        assert torch.equal(helpers.bits(scale[t : t + 1]), helpers.bits(row_scale))


@pytest.mark.parametrize("num_tokens", [0, 1, 6])
def test_without_quantization(num_tokens: int) -> None:
    o, positions = helpers.spread((num_tokens, 6, 512), seed=2), positions_of(num_tokens)
    q, scale = fused_inv_rope_fp8_quant(o, positions, TABLE, 3, 2, quantize=False)
    assert q.dtype == torch.bfloat16
    assert q.stride() == (1024, max(num_tokens, 1) * 1024, 1)
    assert scale.numel() == 0
    x = oracle.bf16_round(rotated(o, positions)).reshape(num_tokens, 3, 1024)
    np.testing.assert_array_equal(oracle.to_numpy(q), x)
    out = torch.full((num_tokens, 3, 1040), float("nan"), dtype=torch.bfloat16)
    given, _ = fused_inv_rope_fp8_quant(o, positions, TABLE, 3, 2, quantize=False, out=out[..., :1024])
    assert torch.equal(given, q)
    assert out[..., 1024:].isnan().all()


@pytest.mark.parametrize("packed", [False, True])
def test_no_rows(packed: bool) -> None:
    o = torch.empty(0, 4, 512, dtype=torch.bfloat16)
    q, scale = fused_inv_rope_fp8_quant(o, torch.empty(0, dtype=torch.int64), TABLE, 2, 2, tma_aligned_scales=packed)
    assert q.shape == (0, 2, 1024)
    assert scale.shape == (0, 2, 2 if packed else 8)


@pytest.mark.full
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("quantize", [False, True])
def test_compiles_once_for_every_length(packed: bool, quantize: bool) -> None:
    def f(o: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return fused_inv_rope_fp8_quant(o, positions, TABLE, 2, 2, tma_aligned_scales=packed, quantize=quantize)

    compiled = torch.compile(f, fullgraph=True, backend="aot_eager", dynamic=True)
    for num_tokens in (5, 6, 9):
        o, positions = helpers.spread((num_tokens, 4, 512), seed=num_tokens), positions_of(num_tokens)
        for have, want in zip(compiled(o, positions), f(o, positions), strict=True):
            assert have.stride() == want.stride()
            assert torch.equal(helpers.bits(have), helpers.bits(want))


@pytest.mark.parametrize("packed", [False, True])
def test_opcheck(packed: bool) -> None:
    o, positions = helpers.spread((5, 4, 512), seed=1), positions_of(5)
    out = torch.empty(2, 5, 1024, dtype=torch.float8_e4m3fn).transpose(0, 1)
    memory = torch.empty(output_scale_shape(5, 2, 2, packed), dtype=torch.int32 if packed else torch.float32)
    helpers.check_op("fused_inv_rope_fp8_quant", o, positions, TABLE, out, memory, 2, 2, packed, False)
    plain = torch.empty(2, 5, 1024, dtype=torch.bfloat16).transpose(0, 1)
    helpers.check_op("fused_inv_rope", o, positions, TABLE, plain, 2, 2, False)


GOOD = {
    "o": torch.zeros(3, 4, 512, dtype=torch.bfloat16),
    "positions": torch.zeros(3, dtype=torch.int64),
    "cos_sin_cache": TABLE,
    "n_groups": 2,
    "heads_per_group": 2,
}


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"o": torch.zeros(3, 4, 512)}, TypeError),
        ({"o": None}, TypeError),
        ({"o": torch.zeros((), dtype=torch.bfloat16)}, ValueError),
        ({"n_groups": 2**31 - 1}, ValueError),
        ({"n_groups": 2**40}, ValueError),
        ({"o": torch.zeros(3, 5, 512, dtype=torch.bfloat16)}, ValueError),
        ({"o": torch.zeros(3, 4, 576, dtype=torch.bfloat16)}, ValueError),
        ({"o": torch.zeros(3, 512, 4, dtype=torch.bfloat16).transpose(1, 2)}, ValueError),
        ({"positions": torch.zeros(4, dtype=torch.int64)}, ValueError),
        ({"positions": torch.zeros(3, dtype=torch.int32)}, TypeError),
        ({"cos_sin_cache": TABLE.bfloat16()}, TypeError),
        ({"cos_sin_cache": TABLE[:, :32]}, ValueError),
        ({"cos_sin_cache": TABLE[:0]}, ValueError),
        ({"n_groups": 0}, ValueError),
        ({"heads_per_group": -2}, ValueError),
        ({"nope_dim": 512}, ValueError),
        ({"rope_dim": 32}, ValueError),
        ({"quant_group_size": 64}, ValueError),
        ({"out": torch.empty(3, 2, 1024, dtype=torch.bfloat16)}, TypeError),
        ({"out": torch.empty(3, 2, 512, dtype=torch.float8_e4m3fn)}, ValueError),
        ({"scale_out": torch.empty(2, 8, 3)}, ValueError),
        ({"scale_out": torch.empty(2, 8, 4, dtype=torch.int32)}, TypeError),
        ({"scale_out": torch.empty(2, 8, 4), "quantize": False}, ValueError),
        ({"out": torch.empty(3, 2, 1024, dtype=torch.float8_e4m3fn), "quantize": False}, TypeError),
    ],
)
def test_bad_arguments(change: dict, error: type[Exception]) -> None:
    name = "o" if change == {"n_groups": 2**31 - 1} else next(iter(change))
    op = "fused_inv_rope" if change.get("quantize") is False and name == "out" else "fused_inv_rope_fp8_quant"
    with pytest.raises(error, match=f"^{op}: {name}: expected"):
        fused_inv_rope_fp8_quant(**{**GOOD, **change})
