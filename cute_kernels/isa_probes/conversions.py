# SPDX-License-Identifier: Apache-2.0
"""Experiments with conversions: all codes of a format, for all scales that there may be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from cute_kernels.isa_probes.meaning import decode, values_of

SCALES = range(64, 135)
"""ue8m0 bytes with which every e4m3 number is one of bf16."""


@dataclass(frozen=True)
class Conversion:
    """What becomes of words of codes. words: of the result, for each of them."""

    name: str
    fact: str
    words: int


CONVERSIONS = (
    Conversion("e4m3_times_scale", "all e4m3 codes times all scales as bf16, exact", 2),
    Conversion("ue8m0", "all ue8m0 scales as bf16", 2),
)

_DEQUANTIZERS = tuple(f"sparse_mla.blackwell.{kernel}" for kernel in ("decode", "decode_2cta", "prefill_paged"))
USED_BY = {"e4m3_times_scale": _DEQUANTIZERS, "ue8m0": _DEQUANTIZERS}
"""Conversion -> the kernels that rest on its fact."""

NAMES = {conversion.name: conversion for conversion in CONVERSIONS}


def source(conversion: Conversion) -> Any:
    """uint32 [n, 2]: four codes, and a word with the scale in byte 1."""
    codes = np.arange(256, dtype=np.uint8)
    if conversion.name == "e4m3_times_scale":
        codes = codes[codes % 128 != 127]  # 254 numbers and two of them again
        words = np.concatenate([codes, codes[:2]]).view(np.uint32)
        scales = np.array(SCALES, np.uint32) << 8 | 0xFF0000FF
        return np.stack(np.broadcast_arrays(words[:, None], scales[None, :]), axis=-1).reshape(-1, 2).astype(np.uint32)
    words = np.random.default_rng(1).permutation(np.tile(codes[:-1], 8)).view(np.uint32)  # the last scale is NaN
    return np.stack([words, np.zeros_like(words)], axis=1)


def expect(conversion: Conversion) -> Any:
    """uint32 [n, words]."""
    given = source(conversion)
    codes = np.ascontiguousarray(given[:, :1]).view(np.uint8)
    if conversion.name == "ue8m0":
        values = values_of("ue8m0")[codes]
    else:
        scale = given[:, 1] >> 8 & 255
        values = decode(codes, "e4m3") * np.exp2(scale.astype(np.float32) - 127)[:, None]
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    if (bits & 0xFFFF).any():
        raise AssertionError(f"{conversion.name}: a number that is not one of bf16")
    return (bits >> 16).astype(np.uint16).view(np.uint32)
