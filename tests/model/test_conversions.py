# SPDX-License-Identifier: Apache-2.0
"""Blackwell's conversions, and those of GPUs that have none, as compiled, in the model of the GPU: order of operands
and packing, for every number."""

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


def converted(form: str, source: torch.Tensor, words: int, factor: float, arch: str = "sm_100a") -> torch.Tensor:
    """int32 words that an architecture's code makes of every 16 bytes."""
    memory, kernel = GlobalMemory(), parse(compile_report(ConversionKey(arch, form)).ptx)
    given = source.contiguous().view(torch.uint8).numpy()
    threads = given.size // 16
    base, out = memory.put(given), memory.reserve(threads * words * 4)
    with np.errstate(all="ignore"):
        run_grid(kernel, pack(kernel, [base, out, factor]), memory, blocks=threads // THREADS, size=0)
    return torch.from_numpy(memory.get(out, (threads * words,), np.int32))


@pytest.mark.parametrize("arch", ["sm_100a", "sm_90a", "sm_80"])
@pytest.mark.parametrize("rounding", numerics.E2M1_ROUNDINGS)
def test_e2m1_of_every_bf16(rounding: str, arch: str) -> None:
    got = numerics.unpack_nibbles(converted(rounding, EVERY_BF16, 1, 4.0, arch).view(torch.uint8))
    # the model's products keep the sign of a NaN, those of GPUs are positive
    is_number = ~EVERY_BF16.isnan() if arch != "sm_100a" else ...
    assert torch.equal(got[is_number], numerics.to_e2m1(EVERY_BF16.float() * 4.0, rounding)[is_number])


@pytest.mark.parametrize("factor", [1.0, 2.0**-13])
def test_e4m3_where_no_instruction_converts(factor: float) -> None:
    """Every bf16 to e4m3 and every code to bf16, bit for bit, NaN of either sign and numbers beyond 448 included."""
    got = converted("e4m3", EVERY_BF16, 2, factor, "sm_80").view(torch.uint8)
    assert torch.equal(got, numerics.to_e4m3(EVERY_BF16.float() * factor).view(torch.uint8))
    codes = torch.arange(1 << 15, dtype=torch.int32).to(torch.uint8)
    values = converted("of e4m3", codes, 8, factor, "sm_80").view(torch.bfloat16)
    want = (numerics.from_e4m3(codes.view(torch.float8_e4m3fn)) * factor).bfloat16()
    assert torch.equal(values.isnan(), want.isnan())
    assert torch.equal(values.nan_to_num(0.0), want.nan_to_num(0.0))


def test_scales() -> None:
    powers = (torch.arange(127 - 20, 127 + 20, dtype=torch.int32) << 23).view(torch.float32) * numerics.E2M1_MAX
    around = powers.view(torch.int32)[:, None] + torch.arange(-6, 7, dtype=torch.int32)
    numbers = around.view(torch.float32).flatten()[:512]
    want = numerics.ue8m0_from_absmax(numbers, numerics.E2M1_MAX, FLOOR)
    assert torch.equal(converted("scale e2m1", numbers, 4, 1.0), want.int())
