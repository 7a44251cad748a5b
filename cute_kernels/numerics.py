# SPDX-License-Identifier: Apache-2.0
"""The arithmetic that fixes the bytes, in plain torch: number formats, rotation, norms.

Shared by formats and references. Everything here is row-independent: a row's bits depend on that row alone, never on
its neighbours or on the batch. Sums are accumulated in float64 and rounded once, so the order of a reduction cannot
show either.
"""

from __future__ import annotations

import torch

E4M3_MAX = 448.0
E2M1_MAX = 6.0
CACHE_FLOOR = 1e-4
"""Smallest absmax a cache or indexer block is scaled for."""
E2M1_FLOOR = E2M1_MAX * 2.0**-126
"""Smallest absmax a block of e2m1 codes can be scaled for with a normal scale: V4.1's floor of MXFP4 blocks."""
OUTPUT_FLOOR = 1e-10
"""Smallest absmax an output-projection block is scaled for."""

E4M3_LEAST = 2.0**-9
"""The smallest e4m3 number: the scale of an NVFP4 block of zeros."""

E2M1_ROUNDINGS = ("ties_to_lower", "ties_to_even")
_E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E2M1_BOUNDARIES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
_FP32_MAX = torch.finfo(torch.float32).max


def absmax(x: torch.Tensor) -> torch.Tensor:
    """fp32 absolute maximum over the last dimension; NaN is ignored, infinity counts as the largest finite number."""
    return torch.nan_to_num(x.float().abs(), nan=0.0, posinf=_FP32_MAX).amax(dim=-1)


def ue8m0_from_absmax(absmax: torch.Tensor, largest: float, floor: float) -> torch.Tensor:
    """uint8 exponent byte e + 127 of the smallest power of two 2^e with max(absmax, floor) <= largest * 2^e.

    The quotient is taken as a product with fl32(1 / largest); the next power of two comes from the bits: no logarithm.
    """
    ratio = absmax.float().clamp(min=floor) * (1.0 / largest)
    return (((ratio.view(torch.int32) + 0x007FFFFF) >> 23) & 0xFF).to(torch.uint8)


def ue8m0_scale(byte: torch.Tensor) -> torch.Tensor:
    """float64 value 2^(byte - 127) of a ue8m0 byte; 255 is NaN."""
    scale = ((byte.to(torch.int64) + (1023 - 127)) << 52).view(torch.float64)
    return torch.where(byte == 255, torch.full_like(scale, torch.nan), scale)


def ue8m0_inverse(byte: torch.Tensor) -> torch.Tensor:
    """fp32 value 2^(127 - byte) of a ue8m0 byte below 254: what a block is multiplied by before it is rounded."""
    return ((254 - byte.to(torch.int32)) << 23).view(torch.float32)


def to_e4m3(x: torch.Tensor) -> torch.Tensor:
    """e4m3 codes (uint8) of an fp32 tensor: nearest even, saturating at 448, NaN stored as 0x7F."""
    codes = x.float().clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.where(x.isnan(), torch.full_like(codes, 0x7F), codes)


def to_bf16(x: torch.Tensor) -> torch.Tensor:
    """bf16 of an fp32 tensor: nearest even, NaN as 0x7FFF, which is what GPUs make of it."""
    rounded = x.to(torch.bfloat16)
    return torch.where(x.isnan(), torch.full_like(rounded.view(torch.int16), 0x7FFF), rounded.view(torch.int16)).view(
        torch.bfloat16
    )


def from_e4m3(codes: torch.Tensor) -> torch.Tensor:
    """fp32 values of e4m3 codes given as uint8 or float8_e4m3fn; 0x7F and 0xFF give NaN."""
    return codes.view(torch.float8_e4m3fn).float()


def to_e2m1(x: torch.Tensor, rounding: str) -> torch.Tensor:
    """e2m1 codes (uint8, 0..15) of an fp32 tensor, saturating at 6, NaN stored as 0.

    ties_to_lower   a value on a boundary takes the smaller code; no negative zero
    ties_to_even    a value on a boundary takes the even code; the sign of zero is kept
    """
    magnitude = x.float().abs()
    code = torch.zeros_like(x, dtype=torch.uint8)
    for lower, boundary in enumerate(_E2M1_BOUNDARIES):
        up_on_tie = rounding == "ties_to_even" and lower % 2 == 1
        code += magnitude >= boundary if up_on_tie else magnitude > boundary
    if rounding == "ties_to_even":
        negative = torch.signbit(x)
    else:
        negative = (x < 0) & (code != 0)
    code = code | (negative.to(torch.uint8) << 3)
    return torch.where(x.isnan(), torch.zeros_like(code), code)


def from_e2m1(codes: torch.Tensor) -> torch.Tensor:
    """fp32 values of e2m1 codes 0..15."""
    table = torch.tensor(_E2M1_VALUES, dtype=torch.float32, device=codes.device)
    table = torch.cat([table, -table])
    return table[codes.long()]


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """[..., n] codes 0..15 -> [..., n / 2] bytes, even elements in the low nibble."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """[..., n] bytes -> [..., 2 n] codes 0..15."""
    return torch.stack([packed & 0xF, packed >> 4], dim=-1).flatten(-2)


def quantize_e4m3(x: torch.Tensor, block: int, floor: float = CACHE_FLOOR) -> tuple[torch.Tensor, torch.Tensor]:
    """Block-quantize [..., n] to (codes uint8 [..., n], scale bytes uint8 [..., n / block])."""
    blocks = x.float().unflatten(-1, (-1, block))
    byte = ue8m0_from_absmax(absmax(blocks), E4M3_MAX, floor)
    return to_e4m3(blocks * ue8m0_inverse(byte)[..., None]).flatten(-2), byte


def quantize_e2m1(
    x: torch.Tensor, rounding: str, block: int = 32, floor: float = CACHE_FLOOR
) -> tuple[torch.Tensor, torch.Tensor]:
    """Block-quantize [..., n] to (packed uint8 [..., n / 2], scale bytes uint8 [..., n / block])."""
    blocks = x.float().unflatten(-1, (-1, block))
    byte = ue8m0_from_absmax(absmax(blocks), E2M1_MAX, floor)
    return pack_nibbles(to_e2m1(blocks * ue8m0_inverse(byte)[..., None], rounding).flatten(-2)), byte


def quantize_mxfp8(x: torch.Tensor, block: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    """As quantize_e4m3, but a block with a NaN is NaN as a whole: codes 0x7F, scale byte 255."""
    codes, byte = quantize_e4m3(x, block)
    is_nan = x.isnan().unflatten(-1, (-1, block)).any(dim=-1)
    spoiled = is_nan.repeat_interleave(block, dim=-1)
    return codes.where(~spoiled, torch.full_like(codes, 0x7F)), byte.where(~is_nan, torch.full_like(byte, 0xFF))


def quantize_nvfp4(x: torch.Tensor, block: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    """Block-quantize [..., n] to (packed uint8 [..., n / 2], e4m3 scales uint8 [..., n / block]), without a scale of
    the whole tensor: s = e4m3(absmax / 6), from 2^-9 to 448, and codes of the IEEE quotients by the rounded s, ties to
    even. A block with a NaN has the scale NaN and zero codes."""
    blocks = x.float().unflatten(-1, (-1, block))
    is_nan = blocks.isnan().any(dim=-1)
    # a Python divisor becomes a product with its reciprocal on CUDA
    six = torch.full((), E2M1_MAX, device=x.device)
    scale = to_e4m3((absmax(blocks) / six).clamp(E4M3_LEAST, E4M3_MAX))
    codes = to_e2m1(blocks / from_e4m3(scale)[..., None], "ties_to_even")
    codes = codes.where(~is_nan[..., None], torch.zeros_like(codes))
    return pack_nibbles(codes.flatten(-2)), scale.where(~is_nan, torch.full_like(scale, 0x7F))


def dequantize_nvfp4(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """float64 values of e2m1 codes [..., n / 2] with e4m3 scales [..., n / block]: a product has at most six bits."""
    blocks = from_e2m1(unpack_nibbles(packed)).double().unflatten(-1, (scale.shape[-1], -1))
    return (blocks * from_e4m3(scale).double()[..., None]).flatten(-2)


def dequantize_e4m3(codes: torch.Tensor, byte: torch.Tensor) -> torch.Tensor:
    """float64 values of block-quantized e4m3 codes [..., n] with scale bytes [..., n / block]."""
    blocks = from_e4m3(codes).double().unflatten(-1, (byte.shape[-1], -1))
    return (blocks * ue8m0_scale(byte)[..., None]).flatten(-2)


def dequantize_e2m1(packed: torch.Tensor, byte: torch.Tensor) -> torch.Tensor:
    """float64 values of block-quantized e2m1 codes [..., n / 2] with scale bytes [..., n / block]."""
    blocks = from_e2m1(unpack_nibbles(packed)).double().unflatten(-1, (byte.shape[-1], -1))
    return (blocks * ue8m0_scale(byte)[..., None]).flatten(-2)


def rotate(
    x: torch.Tensor, positions: torch.Tensor, cos_sin_cache: torch.Tensor, inverse: bool = False
) -> torch.Tensor:
    """fp32 [T, ..., D]: x with its last 64 columns rotated by the rows' positions [T]; the others pass through.

    Pairs are (x[2i], x[2i+1]); the table [max_pos, 64] holds cos in columns 0..31 and sin in 32..63. Each result is two
    products rounded to fp32 and one rounded sum: no fused multiply-add. A position outside the table takes its nearest
    row.
    """
    row = cos_sin_cache[positions.long().clamp(0, cos_sin_cache.shape[0] - 1)].float()
    row = row.reshape(row.shape[0], *([1] * (x.dim() - 2)), 64)
    cos, sin = row[..., :32], row[..., 32:]
    if inverse:
        sin = -sin
    x = x.float()
    even, odd = x[..., -64::2], x[..., -63::2]
    turned = torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1).flatten(-2)
    return torch.cat([x[..., :-64], turned], dim=-1)


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """fp32 x * rsqrt(mean(x^2) + eps) * weight over the last dimension, computed in float64, rounded once to fp32."""
    x = x.double()
    y = x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps)
    return (y if weight is None else y * weight.double()).float()


def hadamard(x: torch.Tensor) -> torch.Tensor:
    """fp32 Sylvester-Hadamard transform of the last dimension (128): butterflies of stride 1, 2, ... 64, then one
    multiply by fl32(128^-0.5)."""
    n = x.shape[-1]
    x = x.float()
    stride = 1
    while stride < n:
        pairs = x.unflatten(-1, (-1, 2, stride))
        low, high = pairs[..., 0, :], pairs[..., 1, :]
        x = torch.stack([low + high, low - high], dim=-2).flatten(-3)
        stride *= 2
    return x * n**-0.5
