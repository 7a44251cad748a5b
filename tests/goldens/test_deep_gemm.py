# SPDX-License-Identifier: Apache-2.0
"""Against DeepGEMM: its casts' bytes, and scores as its tests and its kernels define them."""

from __future__ import annotations

import pytest
import torch

from cute_kernels import numerics
from cute_kernels.compat import deep_gemm
from cute_kernels.linear.ops import quantize_fp8_1x128
from tests.goldens.compare import DEVICES, near, same_bits
from tests.goldens.records import load

FILE = load("deep_gemm")
SCORES = [name for name in FILE.cases if "logits" in name]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", SCORES)
def test_scores(name: str, device: str) -> None:
    case = FILE.cases[name]
    result, _ = case.replay(getattr(deep_gemm, name.split(" ")[0]), device)
    near(result, case.result, 1e-6 if device == "cpu" else 1e-5)


def test_activations_of_a_gemm() -> None:
    """One power of two for 128 columns. DeepGEMM's floor is 1e-4 and this project's 1e-10: a block of zeros has another
    scale, and a tiny one other codes as well."""
    case = FILE.cases["per_token_cast_to_fp8"]
    x, (want, want_scale) = case.arguments["x"], case.result
    codes, scale = quantize_fp8_1x128(x)
    large = x.float().abs().unflatten(1, (-1, 128)).amax(dim=2) >= 1e-4
    assert 0 < int(large.sum()) < large.numel()
    same_bits(codes.unflatten(1, (-1, 128))[large], want.unflatten(1, (-1, 128))[large])
    same_bits(scale[large], want_scale[large])


def test_bytes_of_scales() -> None:
    case = FILE.cases["per_token_cast_to_fp8 packed"]
    codes, exponents = numerics.quantize_e4m3(case.arguments["x"], 128)
    same_bits(codes, case.result[0].view(torch.uint8))
    same_bits(exponents.view(torch.int32), case.result[1])


def test_mxfp4() -> None:
    case = FILE.cases["per_token_cast_to_fp4"]
    packed, exponents = numerics.quantize_e2m1(case.arguments["x"], "ties_to_lower")
    same_bits(packed, case.result[0].view(torch.uint8))
    same_bits(exponents.view(torch.int32), case.result[1])
