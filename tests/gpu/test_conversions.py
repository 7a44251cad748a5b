# SPDX-License-Identifier: Apache-2.0
"""Device conversions on a GPU, exhaustively, against numerics."""

from __future__ import annotations

import pytest
import torch

from cute_kernels import numerics
from cute_kernels.runtime.arch import arch_of
from cute_kernels.runtime.compile import launch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


EVERY_BF16 = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def converted(form: str, source: torch.Tensor, words: int, factor: float = 1.0) -> torch.Tensor:
    """int32 words, on the CPU, that a kernel makes of every 16 bytes of `source`."""
    from tests.gpu.conversion_kernel import THREADS, ConversionKey

    given = source.contiguous().view(torch.uint8).cuda().view(torch.int32)
    threads = len(given) // 4
    found = torch.full((threads * words,), -1, dtype=torch.int32, device="cuda")
    launch(ConversionKey(arch_of(0), form), 0, given, found, factor, threads // THREADS)
    return found.cpu()


@pytest.mark.parametrize("rounding", numerics.E2M1_ROUNDINGS)
def test_e2m1_of_every_bf16_at_every_scale(rounding: str) -> None:
    for byte in range(1, 254):
        factor = 2.0 ** (127 - byte)
        got = numerics.unpack_nibbles(converted(rounding, EVERY_BF16, 1, factor).view(torch.uint8))
        assert torch.equal(got, numerics.to_e2m1(EVERY_BF16.float() * factor, rounding)), byte


def test_e4m3_of_every_bf16_at_every_scale() -> None:
    """Whose block can have that scale: nothing is beyond 448 but infinity."""
    magnitudes = EVERY_BF16.float().abs().nan_to_num(0.0, posinf=0.0)
    for byte in range(1, 254):
        factor = 2.0 ** (127 - byte)
        fits = magnitudes * factor <= 448
        got = converted("e4m3", EVERY_BF16, 2, factor).view(torch.uint8)
        assert torch.equal(got[fits], numerics.to_e4m3(EVERY_BF16.float() * factor)[fits]), byte


def test_bf16_of_every_e4m3_at_every_scale() -> None:
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).repeat(8)
    for byte in range(256):
        scale = numerics.ue8m0_scale(torch.tensor(byte, dtype=torch.uint8))
        want = (numerics.from_e4m3(codes).double() * scale).bfloat16()
        got = converted("of e4m3", codes, 8, float(scale)).view(torch.bfloat16)
        assert torch.equal(got.isnan(), want.isnan()), byte
        numbers = ~want.isnan()
        assert torch.equal(got[numbers].view(torch.int16), want[numbers].view(torch.int16)), byte


@pytest.mark.parametrize(("form", "largest"), [("scale e4m3", numerics.E4M3_MAX), ("scale e2m1", numerics.E2M1_MAX)])
def test_scales_around_every_power_of_two(form: str, largest: float) -> None:
    from tests.gpu.conversion_kernel import FLOOR

    powers = (torch.arange(1, 255, dtype=torch.int32) << 23).view(torch.float32) * largest
    around = powers.nan_to_num(posinf=1.0).view(torch.int32)[:, None] + torch.arange(-2, 3, dtype=torch.int32)
    numbers = torch.cat([EVERY_BF16[: 1 << 15].float(), around.view(torch.float32).flatten(), torch.zeros(2)])
    bounded = numbers.nan_to_num(0.0, posinf=torch.finfo(torch.float32).max)
    used = len(numbers) // 512 * 512
    got = converted(form, numbers[-used:], 4)
    assert torch.equal(got, numerics.ue8m0_from_absmax(bounded, largest, FLOOR)[-used:].int())


def test_a_product_of_a_nan_is_positive() -> None:
    """What conversions rely on: the product of a NaN of either sign, with 0 in place of NaN, is +0."""
    for factor in (2.0**-40, 1.0, 2.0**40):
        got = converted("products", EVERY_BF16, 4, factor).view(torch.bfloat16)
        want = torch.where(EVERY_BF16.isnan(), 0.0, EVERY_BF16 * factor)
        assert torch.equal(got.view(torch.int16), want.bfloat16().view(torch.int16)), factor


@pytest.mark.parametrize("held", [4, 8])
def test_hadamard(held: int) -> None:
    from tests.gpu.conversion_kernel import THREADS, ConversionKey

    g = torch.Generator().manual_seed(held)
    rows = torch.randn(1024, 128, generator=g) * torch.exp2(torch.randint(-20, 20, (1024, 128), generator=g).float())
    rows[3], rows[4, 7], rows[5] = 0.0, torch.inf, -0.0
    source, target = rows.cuda().view(-1), torch.empty(rows.numel(), device="cuda")
    blocks = rows.numel() // (held * THREADS)
    launch(ConversionKey(arch_of(0), "", held), 0, source.view(torch.int32), target.view(torch.int32), 1.0, blocks)
    got, want = target.view(-1, 128).cpu(), numerics.hadamard(rows)
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.nan_to_num().view(torch.int32), want.nan_to_num().view(torch.int32))
