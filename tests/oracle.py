# SPDX-License-Identifier: Apache-2.0
"""Independent meaning of the number formats, in numpy and float64, from the definitions and not from the package.

Encoders search the table of all code values for the nearest one; nothing here uses bit tricks or torch's casts.
"""

from __future__ import annotations

import math

import numpy as np
import torch


def _e4m3_value(code: int) -> float:
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = (code >> 3) & 0xF, code & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    if exponent == 0:
        return sign * mantissa / 8 * 2.0**-6
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


E4M3 = np.array([_e4m3_value(c) for c in range(256)])
E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def _nearest(x: np.ndarray, grid: np.ndarray, up_on_tie: np.ndarray) -> np.ndarray:
    """Index into the ascending `grid` of the value nearest to each x; up_on_tie[i]: a tie of i and i+1 goes to i+1."""
    low = np.clip(np.searchsorted(grid, x, side="right") - 1, 0, len(grid) - 2)
    below, above = x - grid[low], grid[low + 1] - x
    up = (above < below) | ((above == below) & up_on_tie[low])
    return low + up


def e4m3_encode(x: np.ndarray) -> np.ndarray:
    """uint8 codes: saturating, ties to the even mantissa, NaN -> 0x7F, the sign of zero kept."""
    x = np.asarray(x, dtype=np.float64)
    grid = E4M3[:0x7F]  # 0 .. 448
    magnitude = np.minimum(np.abs(np.nan_to_num(x, nan=0.0, posinf=1e300, neginf=-1e300)), 448.0)
    code = _nearest(magnitude, grid, np.arange(len(grid)) % 2 == 1).astype(np.uint8)
    code = code | (np.signbit(x).astype(np.uint8) << 7)
    return np.where(np.isnan(x), np.uint8(0x7F), code)


def e2m1_encode(x: np.ndarray, rounding: str) -> np.ndarray:
    """uint8 codes 0..15 under either tie rule, NaN -> 0."""
    x = np.asarray(x, dtype=np.float64)
    magnitude = np.minimum(np.abs(np.nan_to_num(x, nan=0.0)), 6.0)
    odd = np.arange(8) % 2 == 1
    code = _nearest(magnitude, E2M1, odd if rounding == "ties_to_even" else np.zeros(8, dtype=bool)).astype(np.uint8)
    negative = np.signbit(x) if rounding == "ties_to_even" else (x < 0) & (code != 0)
    return np.where(np.isnan(x), np.uint8(0), code | (negative.astype(np.uint8) << 3))


def ue8m0_byte(absmax: float, largest: float, floor: float) -> int:
    """Exponent byte of the smallest power of two that brings max(absmax, floor) to at most `largest`."""
    mantissa, exponent = math.frexp(max(float(absmax), floor) / largest)
    return 127 + (exponent - 1 if mantissa == 0.5 else exponent)


def quantize_blocks(
    x: np.ndarray, block: int, kind: str, floor: float = 1e-4, rounding: str = "ties_to_lower"
) -> tuple[np.ndarray, np.ndarray]:
    """float64 [n, w] -> (codes uint8 [n, w], scale bytes uint8 [n, w / block]); kind: 'e4m3' or 'e2m1', not packed."""
    n, width = x.shape
    codes = np.zeros((n, width), dtype=np.uint8)
    scales = np.zeros((n, width // block), dtype=np.uint8)
    largest = 448.0 if kind == "e4m3" else 6.0
    for i in range(n):
        for b in range(width // block):
            part = x[i, b * block : (b + 1) * block]
            byte = ue8m0_byte(np.max(np.abs(np.nan_to_num(part, nan=0.0))), largest, floor)
            scaled = part * 2.0 ** (127 - byte)
            encoded = e4m3_encode(scaled) if kind == "e4m3" else e2m1_encode(scaled, rounding)
            codes[i, b * block : (b + 1) * block] = encoded
            scales[i, b] = byte
    return codes, scales


def to_numpy(t: torch.Tensor) -> np.ndarray:
    """float64 numpy copy of a tensor of any float dtype."""
    return t.detach().cpu().double().numpy()


def bf16_round(x: np.ndarray) -> np.ndarray:
    """float64 values rounded once to bf16, nearest even; NaN and infinity pass. Input: normal bf16 range or 0."""
    x = np.asarray(x, dtype=np.float64)
    out = x.copy()
    finite = np.isfinite(x) & (x != 0)
    mantissa, exponent = np.frexp(x[finite])
    out[finite] = np.ldexp(np.rint(mantissa * 256), exponent - 8)
    return out


def bf16_bytes(x: np.ndarray) -> np.ndarray:
    """uint8 [..., 2 * w]: float values rounded to bf16, little-endian, the sign of zero kept."""
    rounded = bf16_round(np.asarray(x, dtype=np.float64)).astype(np.float32)
    return (rounded.view(np.uint32) >> 16).astype("<u2").view(np.uint8)


def rope_f32(x: np.ndarray, cos: np.ndarray, sin: np.ndarray, inverse: bool = False) -> np.ndarray:
    """Rotate pairs (x[2i], x[2i+1]) of fp32 [..., 64] by fp32 [..., 32]: two rounded products, then one rounded sum."""
    x, cos, sin = (np.asarray(v, dtype=np.float32) for v in (x, cos, sin))
    out = np.empty_like(x)
    sign = np.float32(-1.0 if inverse else 1.0)
    even, odd, s = x[..., 0::2], x[..., 1::2], sign * sin
    out[..., 0::2] = even * cos - odd * s
    out[..., 1::2] = odd * cos + even * s
    return out


def rms_norm(x: np.ndarray, weight: np.ndarray | None, eps: float) -> np.ndarray:
    """float64 x / sqrt(mean(x^2) + eps) * weight over the last axis."""
    y = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)
    return y if weight is None else y * weight


def hadamard(x: np.ndarray) -> np.ndarray:
    """fp32 [..., 128]: butterflies of stride 1, 2, ... 64 with explicit partners, one product with fl32(128^-0.5)."""
    x = x.astype(np.float32)
    stride = 1
    while stride < 128:
        y = x.copy()
        for i in range(128):
            other = x[..., i ^ stride]
            y[..., i] = x[..., i] + other if not i & stride else other - x[..., i]
        x, stride = y, 2 * stride
    return x * np.float32(128**-0.5)


def cos_sin_table(max_pos: int, theta: float = 10000.0) -> torch.Tensor:
    """fp32 [max_pos, 64]: cos in columns 0..31, sin in 32..63."""
    angle = np.arange(max_pos)[:, None] * theta ** (-np.arange(32) / 32.0)[None, :]
    return torch.from_numpy(np.concatenate([np.cos(angle), np.sin(angle)], axis=1).astype(np.float32))
