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


def codes(values: torch.Tensor, factor: float, rounding: str) -> torch.Tensor:
    """uint8 codes 0 .. 15 of the device's conversion, of a multiple of eight values."""
    pairs = values.view(torch.int16).numpy().view(np.uint16).reshape(-1, 4, 2).astype(np.uint32)
    packed = [words.Word(pairs[:, i, 0] | pairs[:, i, 1] << 16) for i in range(4)]
    with np.errstate(all="ignore"):
        nibbles = convert.e2m1_from_bf16x8(packed, np.float32(factor), rounding).bits
    return numerics.unpack_nibbles(torch.from_numpy(nibbles.view(np.uint8)))


@pytest.mark.parametrize("rounding", numerics.E2M1_ROUNDINGS)
def test_e2m1_of_every_bf16(rounding: str) -> None:
    for byte in (1, 2, 13, 14, 15, 16, *range(17, 237, 20), 237, 238, 239, 240, 241, 252, 253):
        factor = numerics.ue8m0_inverse(torch.tensor(byte, dtype=torch.uint8))
        want = numerics.to_e2m1(EVERY_BF16.float() * factor, rounding)
        assert torch.equal(codes(EVERY_BF16, factor.item(), rounding), want), byte


@pytest.mark.parametrize("rounding", numerics.E2M1_ROUNDINGS)
def test_e2m1_elements_do_not_touch_each_other(rounding: str) -> None:
    numbers = torch.tensor([0.0, -0.0, 0.25, -0.25, 0.75, 1.75, -3.5, 5.0, 6.0, -6.0, torch.inf, -torch.inf, torch.nan])
    chosen = numbers[torch.randint(0, len(numbers), (1 << 16,), generator=torch.Generator().manual_seed(1))].bfloat16()
    assert torch.equal(codes(chosen, 1.0, rounding), numerics.to_e2m1(chosen.float(), rounding))


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
