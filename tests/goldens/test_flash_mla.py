# SPDX-License-Identifier: Apache-2.0
"""Against FlashMLA: its quantizer's bytes, and attention as its tests and its kernels define it."""

from __future__ import annotations

import pytest

from cute_kernels.compat import flash_mla, vllm
from tests.goldens.compare import DEVICES, near, same_bits
from tests.goldens.records import load

FILE = load("flash_mla")
ATTENTION = [name for name in FILE.cases if name.startswith("flash_mla")]


@pytest.mark.parametrize("device", DEVICES)
def test_bytes_of_records(device: str) -> None:
    case = FILE.cases["quantize_and_insert_k_cache"]
    _, after = case.replay(vllm.quantize_and_insert_k_cache, device)
    same_bits(after["k_cache"], case.changed["k_cache"])
    case = FILE.cases["dequantize_and_gather_k_cache"]
    _, after = case.replay(vllm.dequantize_and_gather_k_cache, device)
    same_bits(after["out"], case.changed["out"])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ATTENTION)
def test_attention_as_its_tests_have_it(name: str, device: str) -> None:
    case = FILE.cases[name]
    results, _ = case.replay(getattr(flash_mla, name.split(" ")[0]), device)
    (out, want), *logarithms = zip(results, case.result, strict=True)
    near(out, want, 2**-8 if device == "cpu" else 2**-7)
    for got, wanted in logarithms:
        near(got, wanted, 1e-5)
