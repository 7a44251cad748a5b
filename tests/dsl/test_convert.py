# SPDX-License-Identifier: Apache-2.0
"""Device conversions executed on numpy arrays, against numerics."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cute_kernels import numerics
from tests.dsl import words

convert = pytest.importorskip("cute_kernels.dsl.convert", reason="CuTe DSL is not installed")

EVERY_BF16 = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


@pytest.fixture(autouse=True)
def on_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convert, "ptx", words.PTX)
    monkeypatch.setattr(convert, "Float32", np.float32)
    monkeypatch.setattr(convert, "Int32", lambda value: value)


def pairs_of(values: torch.Tensor, count: int) -> list[words.Word]:
    """bf16 numbers as `count` words each, the first number in the low half of the first one."""
    pairs = values.view(torch.int16).numpy().view(np.uint16).reshape(-1, count, 2).astype(np.uint32)
    return [words.Word(pairs[:, i, 0] | pairs[:, i, 1] << 16) for i in range(count)]


def codes(values: torch.Tensor, factor: float, rounding: str, arch: str = "") -> torch.Tensor:
    """uint8 codes 0 .. 15 of the device's conversion, of a multiple of eight values."""
    with np.errstate(all="ignore"):
        nibbles = convert.e2m1_from_bf16s(pairs_of(values, 4), words.real(factor), rounding, arch).bits
    return numerics.unpack_nibbles(torch.from_numpy(nibbles.view(np.uint8)))


FACTOR_BYTES = (1, 2, 13, 14, 15, 16, *range(17, 237, 20), 237, 238, 239, 240, 241, 252, 253)
"""Scales whose inverses numbers are multiplied with: both ends, where products overflow or are tiny, and between."""


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("rounding", numerics.E2M1_ROUNDINGS)
def test_e2m1_of_every_bf16(rounding: str, arch: str) -> None:
    for byte in FACTOR_BYTES:
        factor = numerics.ue8m0_inverse(torch.tensor(byte, dtype=torch.uint8))
        want = numerics.to_e2m1(EVERY_BF16.float() * factor, rounding)
        assert torch.equal(codes(EVERY_BF16, factor.item(), rounding, arch), want), byte


def test_blackwells_instruction_alone_has_another_rule() -> None:
    """It has the right bytes for neither: it sends ties to the even code, and makes 6 of NaN."""
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.5])
    plain = words.e2m1_code(ties.numpy())
    assert plain.tolist() == numerics.to_e2m1(ties, "ties_to_even").tolist() == [0, 2, 2, 4, 4, 6, 6, 7]
    lower = numerics.to_e2m1(ties, "ties_to_lower").tolist()
    assert [i for i in range(8) if lower[i] != plain[i]] == [1, 3, 5]
    odd = np.array([np.nan, -0.0, -0.25], np.float32)
    assert words.e2m1_code(odd).tolist() == [7, 8, 8]


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_e4m3_of_every_bf16_that_a_block_can_have(arch: str) -> None:
    """Every number with every scale that its own magnitude allows for a block, and beyond: all scales at both ends."""
    largest = EVERY_BF16.float().abs().nan_to_num(0.0, posinf=0.0)
    for byte in FACTOR_BYTES:
        factor = numerics.ue8m0_inverse(torch.tensor(byte, dtype=torch.uint8))
        fits = largest * factor <= 448
        with np.errstate(all="ignore"):
            found = convert.e4m3_from_bf16x4(*pairs_of(EVERY_BF16, 2), words.real(factor.item()), arch).bits
        got = torch.from_numpy(found.view(np.uint8))
        want = numerics.to_e4m3(EVERY_BF16.float() * factor)
        assert torch.equal(got[fits], want[fits]), byte


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_every_e4m3_times_every_scale(arch: str) -> None:
    each = four(np.tile(np.arange(256, dtype=np.uint8), 2), 4)
    scales = numerics.ue8m0_scale(torch.arange(256, dtype=torch.int32).to(torch.uint8))
    values = numerics.from_e4m3(torch.arange(512).to(torch.uint8)).double()
    for byte in range(256):
        with np.errstate(all="ignore"):
            low, high = convert.bf16x4_from_e4m3(each, words.real(scales[byte].item()), arch)
        got = halves([low, high]).reshape(-1).view(np.int16)
        want = (values * scales[byte]).bfloat16().view(torch.int16).numpy()
        numbers = ~np.isnan((values * scales[byte]).numpy())
        assert np.array_equal(got[numbers], want[numbers]), byte
        assert (got[~numbers] == 0x7FFF).all(), byte


@pytest.mark.parametrize(
    ("largest", "floor"), [(numerics.E4M3_MAX, 1e-4), (numerics.E4M3_MAX, 1e-10), (numerics.E2M1_MAX, 1e-4)]
)
def test_scale_of_every_bf16_by_both_ways(largest: float, floor: float) -> None:
    absmax = EVERY_BF16[: 1 << 15].float()
    fp32 = torch.randint(0, 0x7F800000, (1 << 16,), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    near = (torch.arange(1, 255, dtype=torch.int32) << 23).view(torch.float32) * largest
    steps = torch.tensor([-1, 0, 1], dtype=torch.int32)
    around = (near.nan_to_num(posinf=1.0).view(torch.int32)[:, None] + steps).view(torch.float32).flatten()
    absmax = torch.cat([absmax, fp32.view(torch.float32), around])
    numbers = words.real(absmax.numpy())
    with np.errstate(all="ignore"):
        pair = numbers, numbers[::-1].copy()
        plain, by_instruction = (
            list(convert.ue8m0_from_absmax_each(pair, largest, floor, arch)) for arch in ("sm_90a", "sm_100a")
        )
    bounded = absmax.nan_to_num(0.0, posinf=torch.finfo(torch.float32).max)
    want = numerics.ue8m0_from_absmax(bounded, largest, floor).numpy()
    for found in (plain, by_instruction):
        assert np.array_equal(found[0].bits, want)
        assert np.array_equal(found[1].bits, want[::-1])


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("rounding", numerics.E2M1_ROUNDINGS)
def test_e2m1_elements_do_not_touch_each_other(rounding: str, arch: str) -> None:
    numbers = torch.tensor([0.0, -0.0, 0.25, -0.25, 0.75, 1.75, -3.5, 5.0, 6.0, -6.0, torch.inf, -torch.inf, torch.nan])
    chosen = numbers[torch.randint(0, len(numbers), (1 << 16,), generator=torch.Generator().manual_seed(1))].bfloat16()
    assert torch.equal(codes(chosen, 1.0, rounding, arch), numerics.to_e2m1(chosen.float(), rounding))


@pytest.mark.parametrize("entry", range(15))
def test_every_pair_of_e2m1_codes_as_e4m3(entry: int) -> None:
    """All pairs of neighbours at every place: codes times the table's power of two, with the opposite sign."""
    pair = np.arange(256, dtype=np.uint32)
    low, high = (np.array(convert.E2M1_IN_E4M3[entry], dtype=np.uint8).view(np.uint32)[i : i + 1] for i in range(2))
    for place in range(7):
        rest = np.uint32(0x5A3C96E1) & ~np.uint32((0xFF << 4 * place) & 0xFFFFFFFF)
        packed = words.Word(pair << np.uint32(4 * place) | rest)
        sign = words.Word(np.array([convert.E2M1_SIGN]))
        found = convert.e4m3_from_e2m1x8(packed, words.Word(low), words.Word(high), sign)
        got = torch.from_numpy(np.stack([word.bits for word in found], axis=1).view(np.uint8))
        nibbles = numerics.unpack_nibbles(torch.from_numpy(packed.bits[:, None].view(np.uint8)))
        want = -numerics.from_e2m1(nibbles).double() * 2.0 ** (6 - entry)
        assert torch.equal(got.view(torch.float8_e4m3fn).double(), want)


def test_no_other_power_of_two_makes_all_e2m1_numbers_e4m3_numbers() -> None:
    magnitudes = numerics.from_e2m1(torch.arange(8, dtype=torch.uint8))
    exact = [
        e
        for e in range(-20, 20)
        if torch.equal((magnitudes * 2.0**e).to(torch.float8_e4m3fn).float(), magnitudes * 2.0**e)
    ]
    assert exact == list(range(-8, 7))


def four(codes: np.ndarray, count: int) -> words.Word:
    """Codes, `count` in a word, the first one lowest."""
    shifts = np.arange(count, dtype=np.uint32) * (32 // count)
    return words.Word((codes.reshape(-1, count).astype(np.uint32) << shifts).sum(axis=1))


def halves(pairs: list[words.Word]) -> np.ndarray:
    """uint16 [words, pairs, 2], the low half first."""
    return np.stack([np.stack([p.bits & 0xFFFF, p.bits >> 16], axis=-1) for p in pairs], axis=1).astype(np.uint16)


def test_every_e4m3_as_f16_by_bits() -> None:
    each = np.random.default_rng(0).permutation(np.tile(np.arange(256, dtype=np.uint8), 16))
    got = halves(convert.f16x2_of_e4m3x4_by_bits(four(each, 4))).view(np.float16)
    want = numerics.from_e4m3(torch.from_numpy(each).view(torch.float8_e4m3fn)).double().numpy() / 256
    want = want.reshape(-1, 4)[:, [[0, 2], [1, 3]]]
    assert np.array_equal(got.astype(np.float64), want, equal_nan=True)
    assert np.array_equal(np.signbit(got), np.signbit(want))


def test_every_e2m1_as_bf16() -> None:
    each = np.random.default_rng(0).integers(0, 16, 1 << 12)
    got = halves(convert.bf16x2_of_e2m1x8(four(each, 8)))
    want = (numerics.from_e2m1(torch.from_numpy(each).to(torch.uint8)).double() * 2.0**-126).bfloat16()
    want_bits = want.view(torch.int16).numpy().view(np.uint16).reshape(-1, 8)[:, [[0, 4], [1, 5], [2, 6], [3, 7]]]
    assert np.array_equal(got, want_bits)
