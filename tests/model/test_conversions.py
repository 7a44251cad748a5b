# SPDX-License-Identifier: Apache-2.0
"""Blackwell's conversions, as compiled, in the model of the GPU: order of operands and packing, for every number."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from cute_kernels import numerics
from tests.compile.reports import compile_report
from tests.gpu.conversion_kernel import FLOOR, THREADS, ConversionKey
from tests.model.launch import pack, run_grid
from tests.model.memory import GlobalMemory
from tests.model.ptx import parse

EVERY_BF16 = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def converted(form: str, source: torch.Tensor, words: int, factor: float) -> torch.Tensor:
    """int32 words that Blackwell's code makes of every 16 bytes."""
    memory, kernel = GlobalMemory(), parse(compile_report(ConversionKey("sm_100a", form)).ptx)
    given = source.contiguous().view(torch.uint8).numpy()
    threads = given.size // 16
    base, out = memory.put(given), memory.reserve(threads * words * 4)
    with np.errstate(all="ignore"):
        run_grid(kernel, pack(kernel, [base, out, factor]), memory, blocks=threads // THREADS, size=0)
    return torch.from_numpy(memory.get(out, (threads * words,), np.int32))


@pytest.mark.parametrize("rounding", numerics.E2M1_ROUNDINGS)
def test_e2m1_of_every_bf16(rounding: str) -> None:
    got = numerics.unpack_nibbles(converted(rounding, EVERY_BF16, 1, 4.0).view(torch.uint8))
    assert torch.equal(got, numerics.to_e2m1(EVERY_BF16.float() * 4.0, rounding))


def test_scales() -> None:
    powers = (torch.arange(127 - 20, 127 + 20, dtype=torch.int32) << 23).view(torch.float32) * numerics.E2M1_MAX
    around = powers.view(torch.int32)[:, None] + torch.arange(-6, 7, dtype=torch.int32)
    numbers = around.view(torch.float32).flatten()[:512]
    want = numerics.ue8m0_from_absmax(numbers, numerics.E2M1_MAX, FLOOR)
    assert torch.equal(converted("scale e2m1", numbers, 4, 1.0), want.int())
