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


@pytest.mark.parametrize("rounding", numerics.E2M1_ROUNDINGS)
def test_e2m1_of_every_bf16_at_every_scale(rounding: str) -> None:
    from tests.gpu.conversion_kernel import THREADS, ConversionKey

    values = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).cuda()
    codes = torch.empty(len(values) // 8, dtype=torch.int32, device="cuda")
    for byte in range(1, 254):
        factor = 2.0 ** (127 - byte)
        launch(ConversionKey(arch_of(0), rounding), 0, values.view(torch.int32), codes, factor, len(codes) // THREADS)
        got = numerics.unpack_nibbles(codes.view(torch.uint8))
        assert torch.equal(got, numerics.to_e2m1(values.float() * factor, rounding)), byte


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
