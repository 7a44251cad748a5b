# SPDX-License-Identifier: Apache-2.0
"""quantize_fp8_1x128 on a GPU against the reference, byte for byte."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cute_kernels.linear import reference
from cute_kernels.linear.call import QuantizeCall
from cute_kernels.linear.ops import activation_scale_shape, quantize_fp8_1x128
from cute_kernels.runtime import compile as compile_
from cute_kernels.runtime.ops import FALLBACK_VARIABLE
from cute_kernels.runtime.record import record_calls
from tests.helpers import POISON_BYTE, bits, generator, raw_bytes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
GAP = 16


@pytest.fixture(autouse=True)
def no_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FALLBACK_VARIABLE, raising=False)


def rows(tokens: int, columns: int, seed: int) -> torch.Tensor:
    """On the GPU, NaN between the rows: every magnitude, zeros, NaN and infinities among them."""
    g = generator(seed)
    values = torch.randn(tokens, columns, generator=g)
    values *= torch.exp2(torch.randint(-60, 60, (tokens, columns), generator=g).float())
    values[torch.rand(tokens, columns, generator=g) < 0.5] = 0.0
    odd = torch.tensor([torch.nan, torch.inf, -torch.inf, -torch.nan, -0.0, 448.0])
    where = torch.rand(tokens, columns, generator=g) < 0.002
    values[where] = odd[torch.randint(0, len(odd), (int(where.sum()),), generator=g)]
    values[3::7] *= 0.0  # zeros, and NaN of infinities
    wide = torch.full((tokens, columns + GAP), torch.nan, dtype=BF16)
    wide[:, GAP // 2 : -GAP // 2] = values
    return wide.cuda()[:, GAP // 2 : -GAP // 2]


def run(x: torch.Tensor, use_pdl: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes, memory of the scales), outside of which nothing was written."""
    tokens, columns = x.shape
    blocks, padded = activation_scale_shape(tokens, columns)
    out = torch.empty(tokens, columns + GAP, dtype=E4M3, device="cuda")
    scales = torch.empty(blocks, padded + GAP, device="cuda")
    for memory in (out, scales):
        raw_bytes(memory).fill_(POISON_BYTE)
    with record_calls() as recording:
        quantize_fp8_1x128(x, out=out[:, :columns], scale_out=scales[:, :padded], use_pdl=use_pdl)
    assert [entry.implementation for entry in recording.calls] == ["kernel"]
    assert (bits(out[:, columns:]) == POISON_BYTE).all()
    assert (bits(scales[:, padded:]) == POISON_BYTE).all()
    return out[:, :columns], scales[:, :padded]


def check(x: torch.Tensor, **how: Any) -> tuple[torch.Tensor, torch.Tensor]:
    got = run(x, **how)
    codes = torch.empty(x.shape, dtype=E4M3)
    scales = torch.empty(activation_scale_shape(*x.shape))
    reference.quantize_fp8_1x128(QuantizeCall(x.cpu(), codes, scales, False))
    assert torch.equal(bits(got[0].cpu()), bits(codes))
    assert torch.equal(got[1].cpu(), scales)
    return got


@pytest.mark.parametrize("columns", [8, 120, 128, 136, 512, 520, 1024, 1536, 4096, 7168, 16384])
def test_bytes(columns: int) -> None:
    for tokens in (1, 3, 4, 8, 9, 67):
        check(rows(tokens, columns, seed=tokens), use_pdl=tokens == 9)


def test_every_bf16() -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(BF16)
    check(every.reshape(512, 128).cuda())
    # all that e4m3 reaches in blocks whose scale is 1
    x = torch.zeros(1024, 128, dtype=BF16)
    x[:, 0] = 448.0
    x[:, 64:] = torch.where(every.abs() > 448, 0, every).reshape(1024, 64)
    check(x.cuda())


@pytest.mark.parametrize("shape", [(0, 512), (5, 0)])
def test_empty_calls_launch_nothing(shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    from cute_kernels.linear import quantize

    launches: list[Any] = []
    monkeypatch.setattr(quantize, "launch_key", lambda *args: launches.append(args))
    codes, scale = quantize_fp8_1x128(torch.zeros(shape, dtype=BF16, device="cuda"))
    assert codes.shape == shape
    assert scale.shape == (shape[0], shape[1] // 128)
    assert launches == []


def test_rows_beyond_four_gigabytes() -> None:
    gap = 2**30 + 8  # elements: row 2 starts past 2^32 bytes
    x = torch.empty(2 * gap + 4096, dtype=BF16, device="cuda").as_strided((3, 4096), (gap, 1))
    x.copy_(rows(3, 4096, seed=2))
    check(x)


def test_shapes_and_strides_need_no_new_kernel() -> None:
    run(rows(3, 128, seed=1))
    before = compile_.compilations()
    for tokens, columns in ((1, 4096), (65, 1000), (400, 8)):
        run(rows(tokens, columns, seed=2), use_pdl=True)
    assert compile_.compilations() == before


def test_torch_compile() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(quantize_fp8_1x128, fullgraph=True, dynamic=True)
    for tokens in (5, 9):
        x = rows(tokens, 1024, seed=tokens).clone()
        for got, want in zip(compiled(x), quantize_fp8_1x128(x), strict=True):
            assert torch.equal(bits(got), bits(want))


@pytest.mark.parametrize(
    ("shape", "strides", "why"),
    [((3, 12), (16, 1), "multiple of 8"), ((3, 16), (20, 1), "16-byte aligned")],
)
def test_unsupported_shapes_say_why(shape: tuple[int, int], strides: tuple[int, int], why: str) -> None:
    with pytest.raises(NotImplementedError, match=why):
        quantize_fp8_1x128(torch.zeros(128, dtype=BF16, device="cuda").as_strided(shape, strides))
