# SPDX-License-Identifier: Apache-2.0
"""The arithmetic that fixes the bytes, against tables, exact integers and float64."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cute_kernels import numerics
from tests import helpers, oracle

ALL_BF16 = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
LARGEST = pytest.mark.parametrize("largest", [448.0, 6.0])


def f32(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


def ulp_neighbours(values: np.ndarray) -> np.ndarray:
    """The fp32 values with their neighbours one ulp away on both sides."""
    v = values.astype(np.float32)
    low, high = np.nextafter(v, np.float32(-np.inf)), np.nextafter(v, np.float32(np.inf))
    return np.concatenate([low, v, high])


def test_e4m3_decodes_all_codes() -> None:
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    expected = oracle.E4M3
    np.testing.assert_array_equal(numerics.from_e4m3(codes).double().numpy(), expected)
    np.testing.assert_array_equal(numerics.from_e4m3(codes.view(torch.float8_e4m3fn)).double().numpy(), expected)
    assert [expected[c] for c in (0x00, 0x01, 0x08, 0x38, 0x7E, 0xFE)] == [0, 2**-9, 2**-6, 1, 448, -448]
    assert torch.signbit(numerics.from_e4m3(codes)[0x80])


def test_e4m3_encode_inverts_decode() -> None:
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    expected = codes.clone()
    expected[0xFF] = 0x7F
    assert torch.equal(numerics.to_e4m3(numerics.from_e4m3(codes)), expected)


def test_e4m3_encodes_every_bf16() -> None:
    np.testing.assert_array_equal(numerics.to_e4m3(ALL_BF16).numpy(), oracle.e4m3_encode(oracle.to_numpy(ALL_BF16)))


def test_e4m3_around_every_tie() -> None:
    grid = oracle.E4M3[:0x7F]
    middle = (grid[:-1] + grid[1:]) / 2
    x = ulp_neighbours(np.concatenate([middle, -middle, grid, [464.0, 480.0, 1e38]]))
    np.testing.assert_array_equal(numerics.to_e4m3(torch.from_numpy(x)).numpy(), oracle.e4m3_encode(x))


def test_e4m3_special_values() -> None:
    x = f32(math.nan, -math.nan, math.inf, -math.inf, 0.0, -0.0, 2**-10, -(2**-10), 1e-30, -1e-30, 448.0, 449.0, 1e9)
    codes = [0x7F, 0x7F, 0x7E, 0xFE, 0x00, 0x80, 0x00, 0x80, 0x00, 0x80, 0x7E, 0x7E, 0x7E]
    assert numerics.to_e4m3(x).tolist() == codes


@pytest.mark.parametrize("rounding", numerics.E2M1_ROUNDINGS)
def test_e2m1_encodes_every_bf16(rounding: str) -> None:
    expected = oracle.e2m1_encode(oracle.to_numpy(ALL_BF16), rounding)
    np.testing.assert_array_equal(numerics.to_e2m1(ALL_BF16, rounding).numpy(), expected)
    assert np.isnan(oracle.to_numpy(ALL_BF16)).sum() == 254


@pytest.mark.parametrize("rounding", numerics.E2M1_ROUNDINGS)
def test_e2m1_around_every_tie(rounding: str) -> None:
    boundaries = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    x = ulp_neighbours(np.concatenate([boundaries, -boundaries, oracle.E2M1, -oracle.E2M1]))
    np.testing.assert_array_equal(
        numerics.to_e2m1(torch.from_numpy(x), rounding).numpy(), oracle.e2m1_encode(x, rounding)
    )


def test_e2m1_ties_and_signs_by_hand() -> None:
    x = f32(0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.75, -0.25, -0.0, 0.0, 7.0, -math.inf, math.nan, -0.1)
    lower = [0, 1, 2, 3, 4, 5, 6, 9, 0, 0, 0, 7, 15, 0, 0]
    even = [0, 2, 2, 4, 4, 6, 6, 10, 8, 8, 0, 7, 15, 0, 8]
    assert numerics.to_e2m1(x, "ties_to_lower").tolist() == lower
    assert numerics.to_e2m1(x, "ties_to_even").tolist() == even


def test_e2m1_decodes_all_codes() -> None:
    codes = torch.arange(16).to(torch.uint8)
    values = numerics.from_e2m1(codes)
    assert values.tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]
    assert torch.signbit(values).tolist() == [False] * 8 + [True] * 8
    assert torch.equal(numerics.to_e2m1(values, "ties_to_even"), codes)


def test_nibbles_by_hand() -> None:
    packed = numerics.pack_nibbles(torch.tensor([[1, 2, 15, 0], [8, 9, 3, 12]], dtype=torch.uint8))
    assert packed.tolist() == [[0x21, 0x0F], [0x98, 0xC3]]


def test_nibbles_are_inverse() -> None:
    every = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(2, 128)
    assert torch.equal(numerics.pack_nibbles(numerics.unpack_nibbles(every)), every)


@LARGEST
@pytest.mark.parametrize("floor", [1e-4, 1e-10])
def test_ue8m0_byte_of_every_bf16(largest: float, floor: float) -> None:
    positive = ALL_BF16[:0x7F80]  # 0 .. the largest finite value
    expected = [oracle.ue8m0_byte(v, largest, floor) for v in oracle.to_numpy(positive)]
    assert numerics.ue8m0_from_absmax(positive, largest, floor).tolist() == expected


@LARGEST
def test_ue8m0_byte_around_every_threshold(largest: float) -> None:
    thresholds = largest * np.exp2(np.arange(-21.0, 100.0))
    x = ulp_neighbours(thresholds)
    expected = [oracle.ue8m0_byte(float(v), largest, 1e-4) for v in x]
    assert numerics.ue8m0_from_absmax(torch.from_numpy(x), largest, 1e-4).tolist() == expected


def test_ue8m0_byte_by_hand() -> None:
    x = f32(0.0, 1e-5, 1e-4, 1.0, 448.0, 450.0, 896.0)
    assert numerics.ue8m0_from_absmax(x, 448.0, 1e-4).tolist() == [105, 105, 105, 119, 127, 128, 128]
    x = f32(0.0, 1e-4, 1.0, 6.0, 6.5, 12.0)
    assert numerics.ue8m0_from_absmax(x, 6.0, 1e-4).tolist() == [112, 112, 125, 127, 128, 128]


def test_ue8m0_scale_and_inverse() -> None:
    byte = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    scale = numerics.ue8m0_scale(byte).tolist()
    assert scale[:255] == [2.0 ** (b - 127) for b in range(255)]
    assert math.isnan(scale[255])
    assert numerics.ue8m0_inverse(byte[:254]).tolist() == [2.0 ** (127 - b) for b in range(254)]


def test_absmax_ignores_nan_and_bounds_infinity() -> None:
    x = torch.tensor([[1.0, -3.0, 2.0], [math.nan, -0.5, 0.25], [math.nan] * 3, [1.0, -math.inf, math.nan]])
    assert numerics.absmax(x).tolist() == [3.0, 0.5, 0.0, torch.finfo(torch.float32).max]
    assert numerics.absmax(x.bfloat16()).dtype == torch.float32


@pytest.mark.parametrize("block", [64, 128])
def test_quantize_e4m3_matches_the_oracle(block: int) -> None:
    x = helpers.spread((40, 256), seed=block)
    x[7, 3] = math.nan
    x[8, :block] = -0.0
    codes, scales = numerics.quantize_e4m3(x, block)
    expected_codes, expected_scales = oracle.quantize_blocks(oracle.to_numpy(x), block, "e4m3")
    np.testing.assert_array_equal(codes.numpy(), expected_codes)
    np.testing.assert_array_equal(scales.numpy(), expected_scales)
    decoded = numerics.dequantize_e4m3(codes, scales).numpy()
    np.testing.assert_array_equal(
        decoded, oracle.E4M3[expected_codes] * np.repeat(np.exp2(expected_scales - 127.0), block, axis=1)
    )


def test_quantize_e4m3_uses_the_floor_it_is_given() -> None:
    x = torch.full((1, 128), 1e-9)
    codes, scales = numerics.quantize_e4m3(x, 128, numerics.OUTPUT_FLOOR)
    expected_codes, expected_scales = oracle.quantize_blocks(oracle.to_numpy(x), 128, "e4m3", floor=1e-10)
    np.testing.assert_array_equal(codes.numpy(), expected_codes)
    np.testing.assert_array_equal(scales.numpy(), expected_scales)
    assert scales.tolist() == [[127 - 38]]
    assert numerics.quantize_e4m3(x, 128)[1].tolist() == [[127 - 22]]


@pytest.mark.parametrize("rounding", numerics.E2M1_ROUNDINGS)
def test_quantize_e2m1_matches_the_oracle(rounding: str) -> None:
    x = helpers.spread((40, 128), seed=5)
    steps = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, -0.0])
    x[9] = steps[torch.arange(128) % 9] * torch.where(torch.arange(128) % 2 == 0, 1.0, -1.0)
    x[10, 40] = math.nan
    packed, scales = numerics.quantize_e2m1(x, rounding)
    codes, expected_scales = oracle.quantize_blocks(oracle.to_numpy(x), 32, "e2m1", rounding=rounding)
    np.testing.assert_array_equal(packed.numpy(), codes[:, 0::2] + 16 * codes[:, 1::2])
    np.testing.assert_array_equal(scales.numpy(), expected_scales)
    signed = np.where(codes >= 8, -1.0, 1.0) * oracle.E2M1[codes % 8]
    np.testing.assert_array_equal(
        numerics.dequantize_e2m1(packed, scales).numpy(),
        signed * np.repeat(np.exp2(expected_scales - 127.0), 32, axis=1),
    )


def test_quantize_infinity_saturates_and_keeps_the_rest_finite() -> None:
    x = torch.zeros(2, 64)
    x[0, 0], x[0, 1], x[1, 5] = math.inf, 1.0, -math.inf
    codes, scales = numerics.quantize_e4m3(x, 64)
    assert scales.tolist() == [[247], [247]]  # 2^120 is the smallest power of two with fp32 max <= 448 * 2^e
    assert codes[0, :3].tolist() == [0x7E, 0, 0]
    assert codes[1, 5] == 0xFE
    packed, scales = numerics.quantize_e2m1(x, "ties_to_lower")
    assert scales[0, 0] == 253  # 2^126
    assert packed[0, 0] == 0x07
    assert packed[1, 2] == 0xF0


@settings(deadline=None, max_examples=25)
@given(
    st.lists(
        st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**100), max_value=2.0**100),
        min_size=1,
    ),
    st.sampled_from(["e4m3", "e2m1"]),
)
def test_quantization_error_is_half_a_step(values: list[float], kind: str) -> None:
    """Every element lands within half the distance of its neighbours on the scaled grid, exactly (rational numbers)."""
    x = torch.zeros(1, 32)
    x[0, : len(values[:32])] = f32(*values[:32])
    if kind == "e4m3":
        codes, scales = numerics.quantize_e4m3(x, 32)
        back, grid = numerics.dequantize_e4m3(codes, scales), oracle.E4M3[:0x7F]
    else:
        packed, scales = numerics.quantize_e2m1(x, "ties_to_lower")
        back, grid = numerics.dequantize_e2m1(packed, scales), oracle.E2M1
    scale = Fraction(2) ** (int(scales[0, 0]) - 127)
    points = [Fraction(g) * scale for g in grid]
    for got, want in zip(back[0].tolist(), x[0].tolist(), strict=True):
        best = min(abs(abs(Fraction(want)) - p) for p in points)
        assert abs(Fraction(got) - Fraction(want)) == best
        assert got == 0 or (got < 0) == (want < 0)


def rotated(x: torch.Tensor, positions: list[int], table: torch.Tensor, inverse: bool) -> np.ndarray:
    """The same with numpy: row by row, only the last 64 columns touched."""
    out = x.float().numpy().copy()
    for i, p in enumerate(positions):
        out[i, ..., -64:] = oracle.rope_f32(out[i, ..., -64:], table[p, :32].numpy(), table[p, 32:].numpy(), inverse)
    return out


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("shape", [(7, 512), (7, 3, 512), (7, 64), (7, 2, 2, 128)])
def test_rotate_bit_for_bit(shape: tuple[int, ...], inverse: bool) -> None:
    table = oracle.cos_sin_table(300)
    positions = [0, 3, 7, 127, 128, 255, 299]
    x = helpers.spread(shape, seed=11)
    got = numerics.rotate(x, torch.tensor(positions), table, inverse)
    np.testing.assert_array_equal(got.numpy().view(np.uint32), rotated(x, positions, table, inverse).view(np.uint32))


def test_rotate_by_hand() -> None:
    """Pair i is columns 2i, 2i + 1 of the last 64; a quarter turn takes (a, b) to (-b, a)."""
    table = torch.zeros(2, 64)
    table[0, :32] = 1.0
    table[1, :32], table[1, 32:] = 1.0, 0.0
    table[1, 5], table[1, 37] = 0.0, 1.0
    x = torch.arange(1.0, 101.0).view(1, 100)
    assert torch.equal(numerics.rotate(x, torch.tensor([0]), table), x)
    expected = x.clone()
    expected[0, 46], expected[0, 47] = -48.0, 47.0
    assert torch.equal(numerics.rotate(x, torch.tensor([1]), table), expected)
    expected[0, 46], expected[0, 47] = 48.0, -47.0
    assert torch.equal(numerics.rotate(x, torch.tensor([1]), table, inverse=True), expected)


def test_rotate_does_not_fuse_multiply_add() -> None:
    """With x = 1 + 2^-12 the exact x * x - 1 differs from the one whose product was rounded first."""
    table = torch.zeros(1, 64)
    v = 1.0 + 2.0**-12
    table[0, 0], table[0, 32] = v, 1.0
    x = torch.zeros(1, 64)
    x[0, 0], x[0, 1] = v, 1.0
    assert numerics.rotate(x, torch.tensor([0]), table)[0, 0] == 2.0**-11  # fused: 2^-11 + 2^-24


def test_rotate_takes_the_nearest_row_outside_the_table() -> None:
    table = oracle.cos_sin_table(8)
    x = helpers.spread((4, 64), seed=2)
    inside = numerics.rotate(x, torch.tensor([0, 0, 7, 7]), table)
    outside = numerics.rotate(x, torch.tensor([-1, -(2**62), 8, 2**62]), table)
    assert torch.equal(inside, outside)


def test_rotate_upcasts_a_bf16_table() -> None:
    table = oracle.cos_sin_table(9).bfloat16()
    x = helpers.spread((9, 64), seed=4)
    positions = torch.arange(9)
    assert torch.equal(numerics.rotate(x, positions, table), numerics.rotate(x, positions, table.float()))


def test_rotate_of_no_rows() -> None:
    assert numerics.rotate(torch.zeros(0, 4, 512), torch.zeros(0, dtype=torch.int64), torch.zeros(5, 64)).shape == (
        0,
        4,
        512,
    )


@pytest.mark.parametrize("width", [1, 128, 512, 1536])
@pytest.mark.parametrize("weighted", [False, True])
def test_rms_norm_within_one_ulp(width: int, weighted: bool) -> None:
    x = helpers.spread((16, width), seed=width)
    weight = torch.randn(width, generator=helpers.generator(1)).bfloat16() if weighted else None
    got = numerics.rms_norm(x, weight, 1e-6)
    assert got.dtype == torch.float32
    expected = oracle.rms_norm(oracle.to_numpy(x), None if weight is None else oracle.to_numpy(weight), 1e-6)
    error = np.abs(got.double().numpy() - expected)
    assert (error <= np.spacing(np.abs(expected).astype(np.float32)) * 0.51).all()


def test_rms_norm_of_zeros_and_its_eps() -> None:
    assert numerics.rms_norm(torch.zeros(1, 8), None, 1e-6).tolist() == [[0.0] * 8]
    assert numerics.rms_norm(torch.full((1, 8), 3.0), None, 7.0).tolist() == [[0.75] * 8]


def test_rms_norm_and_rotate_do_not_depend_on_the_batch() -> None:
    x = helpers.spread((33, 5, 512), seed=9)
    table, positions = oracle.cos_sin_table(33), torch.arange(33)
    together = numerics.rotate(numerics.rms_norm(x, None, 1e-6), positions, table)
    wide = torch.full((33, 5, 600), math.nan, dtype=torch.bfloat16)
    wide[..., 13:525] = x
    for i in range(33):
        alone = numerics.rotate(numerics.rms_norm(wide[i : i + 1, :, 13:525], None, 1e-6), positions[i : i + 1], table)
        assert torch.equal(together[i : i + 1], alone)


def test_hadamard_of_integers_is_exact() -> None:
    h = np.array([[1]])
    for _ in range(7):
        h = np.block([[h, h], [h, -h]])
    x = np.random.default_rng(0).integers(-1000, 1000, size=(6, 128))
    expected = (x @ h.T).astype(np.float32) * np.float32(128**-0.5)
    np.testing.assert_array_equal(numerics.hadamard(torch.from_numpy(x)).numpy(), expected)


def test_hadamard_order_of_additions() -> None:
    """Butterflies of stride 1 come first, so that every rounding is fixed."""
    x = helpers.spread((5, 128), seed=3).float().numpy()
    expected = x.copy()
    for level in range(7):
        before = expected.copy()
        for i in range(128):
            partner = i ^ (1 << level)
            first, second = before[:, min(i, partner)], before[:, max(i, partner)]
            expected[:, i] = first + second if i < partner else first - second
    expected *= np.float32(128**-0.5)
    np.testing.assert_array_equal(numerics.hadamard(torch.from_numpy(x)).numpy(), expected)


def test_oracle_rounds_to_bf16_as_the_bits_say() -> None:
    x = torch.randn(4096, generator=helpers.generator(0)) * 100
    as_bits = x.view(torch.int32).long() & 0xFFFFFFFF
    rounded = ((as_bits + 0x7FFF + ((as_bits >> 16) & 1)) >> 16) << 16
    expected = rounded.to(torch.int32).view(torch.float32)
    np.testing.assert_array_equal(oracle.bf16_round(x.double().numpy()), expected.double().numpy())
