# SPDX-License-Identifier: Apache-2.0
"""Rotary tables against float64 formulas: plain, YaRN and its limits, far positions."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from layers import PRESETS, DeepseekV4Config, RotaryEmbedding
from layers.rotary import inverse_frequencies
from tests.layers import meaning

FLASH = PRESETS["v4-flash"]
HALF_ULP = 2.0**-25
"""Half the distance of fp32 numbers just below 1: no sine or cosine that is rounded once is further off."""


def table(angles: np.ndarray) -> np.ndarray:
    """[n, 64] float64 of angles [n, 32]."""
    return np.concatenate([np.cos(angles), np.sin(angles)], axis=1)


def turns(config: DeepseekV4Config) -> np.ndarray:
    """How often each pair turns within the original context, without YaRN."""
    return config.rope_original_max_position * config.compress_rope_theta ** (-np.arange(32) / 32) / (2 * math.pi)


def test_plain_table() -> None:
    got = RotaryEmbedding(FLASH, False, 3000).cos_sin_cache
    assert got.shape == (3000, 64)
    assert got.dtype == torch.float32
    expected = table(np.arange(3000)[:, None] * 10000.0 ** (-np.arange(32) / 32))
    assert np.abs(got.numpy() - expected).max() <= HALF_ULP
    assert torch.equal(got[0], torch.tensor([1.0] * 32 + [0.0] * 32))


def test_yarn_frequencies_of_deepseek() -> None:
    """theta 160000, factor 16, 65536 positions, 32 and 1 turns: the ramp runs over pairs 15 to 25."""
    assert [math.floor(32 * math.log(65536 / (2 * math.pi * 32)) / math.log(160000)),
            math.ceil(32 * math.log(65536 / (2 * math.pi)) / math.log(160000))] == [15, 25]  # fmt: skip
    expected = []
    for i in range(32):
        plain, share = 160000.0 ** (-2 * i / 64), (i - 15) / 10
        if i <= 15:
            expected.append(plain)
        elif i >= 25:
            expected.append(plain / 16)
        else:
            expected.append(plain * (1 - share) + plain / 16 * share)
    np.testing.assert_allclose(inverse_frequencies(FLASH, True).numpy(), expected, rtol=1e-14)


def test_yarn_table_has_no_attention_factor() -> None:
    got = RotaryEmbedding(FLASH, True, 2000).cos_sin_cache.double()
    np.testing.assert_allclose((got[:, :32] ** 2 + got[:, 32:] ** 2).numpy(), 1.0, atol=3e-7)


@pytest.mark.parametrize("compressed", [False, True])
def test_table_is_exact_at_a_million(compressed: bool) -> None:
    last = (1 << 20) - 1
    got = RotaryEmbedding(FLASH, compressed).cos_sin_cache
    assert got.shape[0] == last + 1
    positions = np.array([65535, 65536, 70001, 131072, 10**6, last])
    numbers = (160000.0, 16.0) if compressed else (10000.0, 1.0)
    angles = positions[:, None] * meaning.frequencies(*numbers, 32.0, 1.0, 65536)
    # float64 angles near 10^6 are off by 2^-34, and cos and sin by as much.
    assert np.abs(got[positions].numpy() - table(angles)).max() <= HALF_ULP + 2.0**-33


@pytest.mark.parametrize("factor", [1.0, 4.0, 40.0])
@pytest.mark.parametrize("original", [64, 4096, 65536, 10**7, 10**9])
@pytest.mark.parametrize("betas", [(32.0, 1.0), (16.0, 2.0)])
def test_yarn_keeps_fast_pairs_and_divides_slow_ones(factor: float, original: int, betas: tuple[float, float]) -> None:
    """The paper's conditions: more than beta_fast turns within the original context, no change; fewer than beta_slow,
    the full division; between, something between that falls with the pair's number."""
    config = replace(
        FLASH, rope_factor=factor, rope_original_max_position=original, rope_beta_fast=betas[0], rope_beta_slow=betas[1]
    )
    got = inverse_frequencies(config, True).numpy()
    plain = config.compress_rope_theta ** (-np.arange(32) / 32)
    ratio, turned = plain / got, turns(config)
    # Each end of the ramp is rounded outwards to a whole pair, so its neighbour may still be on the ramp.
    step = config.compress_rope_theta ** (1 / 32)
    assert (np.abs(ratio[turned >= betas[0] * step] - 1) <= 1e-12).all()
    assert (np.abs(ratio[turned <= betas[1] / step] - factor) <= 1e-12 * factor).all()
    assert (np.diff(ratio) >= -1e-12).all()
    assert ratio.min() >= 1 - 1e-12
    assert ratio.max() <= factor * (1 + 1e-12)
    np.testing.assert_allclose(
        got, meaning.frequencies(config.compress_rope_theta, factor, *betas, original), rtol=1e-14
    )


def test_ramp_ends_are_inclusive_and_rounded_outwards() -> None:
    """With theta = e^32 pair i has frequency e^-i; the ends ln(original / (2 pi turns)) are set to 3.5 and 6.5."""
    original = 2 * math.pi * math.exp(10)
    config = replace(
        FLASH,
        compress_rope_theta=math.exp(32),
        rope_original_max_position=round(original),
        rope_beta_fast=math.exp(6.5),
        rope_beta_slow=math.exp(3.5),
    )
    ratio = np.exp(-np.arange(32.0)) / inverse_frequencies(config, True).numpy()
    shares = (1 - 1 / ratio) / (1 - 1 / 16)
    np.testing.assert_allclose(shares[:9], [0, 0, 0, 0, 0.25, 0.5, 0.75, 1, 1], atol=1e-9)


def test_equal_ends_make_a_step() -> None:
    """Both ends rounded to pair 0 (more turns asked for than there are): everything behind it is divided."""
    config = replace(FLASH, rope_original_max_position=6, rope_beta_fast=32.0, rope_beta_slow=1.0)
    got = inverse_frequencies(config, True).numpy()
    plain = 160000.0 ** (-np.arange(32) / 32)
    assert got[0] == 1.0
    np.testing.assert_allclose(got[1:], plain[1:] / 16, rtol=1e-14)


def test_factor_one_is_plain_rotation_with_the_other_theta() -> None:
    config = replace(FLASH, rope_factor=1.0)
    np.testing.assert_allclose(inverse_frequencies(config, True).numpy(), 160000.0 ** (-np.arange(32) / 32), rtol=1e-15)


def test_sliding_window_layers_are_never_scaled() -> None:
    config = replace(FLASH, rope_factor=40.0, rope_theta=5000.0)
    np.testing.assert_allclose(inverse_frequencies(config, False).numpy(), 5000.0 ** (-np.arange(32) / 32), rtol=1e-15)
