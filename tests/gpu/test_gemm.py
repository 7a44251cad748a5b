# SPDX-License-Identifier: Apache-2.0
"""fp8_gemm and bf16_gemm on a GPU against float64 products, and against themselves in other batches."""

from __future__ import annotations

import itertools

import pytest
import torch

from cute_kernels.linear import reference, select
from cute_kernels.linear.call import QuantizeCall
from cute_kernels.linear.ops import activation_scale_shape, bf16_linear, fp8_grouped_linear
from cute_kernels.linear.verify_cases import FP32, PRODUCTS, ROUNDING
from cute_kernels.runtime.arch import arch_of
from cute_kernels.runtime.ops import FALLBACK_VARIABLE
from tests.helpers import bits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

E4M3 = torch.float8_e4m3fn
ROWS = (1, 7, 8, 9, 16, 33, 64, 65, 130, 300)

SHAPES = (
    (1, 1536, 4096),  # four splits
    (1, 4096, 1024),  # one, several work tiles a CTA with enough rows
    (8, 1024, 4096),  # grouped, two splits
    (1, 7168, 2048),  # eight
    (3, 208, 640),  # outputs and chunks that fill no tile
    (1, 16, 128),
)
"""(groups, N, K)"""


@pytest.fixture(autouse=True)
def hopper_without_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FALLBACK_VARIABLE, raising=False)
    if arch_of(0) != "sm_90a":
        pytest.skip("the kernels with swapped operands are Hopper's")


def operands(tokens: int, groups: int, outputs: int, columns: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    g = torch.Generator(device="cuda").manual_seed(seed + tokens)

    def codes(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, device="cuda", generator=g) * 100).clamp_(-448, 448).to(E4M3)

    def scales(*shape: int) -> torch.Tensor:
        return torch.exp2(torch.randint(-12, 2, shape, device="cuda", generator=g).float()) * 1.1

    a_scale = scales(groups, columns // 128, -(-tokens // 4) * 4).permute(2, 0, 1)[:tokens]
    return (
        codes(groups, tokens, columns).transpose(0, 1),
        a_scale,
        codes(groups, outputs, columns),
        scales(groups, -(-outputs // 128), columns // 128),
    )


def check_near(got: torch.Tensor, arguments: tuple[torch.Tensor, ...]) -> None:
    a, a_scale, b, b_scale = (x.double() for x in arguments)
    a = a * a_scale.repeat_interleave(128, -1)
    b = b * b_scale.repeat_interleave(128, 1)[:, : b.shape[1]].repeat_interleave(128, -1)
    exact, magnitude = (torch.einsum("tgk,gnk->tgn", x, y) for x, y in ((a, b), (a.abs(), b.abs())))
    rounding = ROUNDING if got.dtype == torch.bfloat16 else 0.0
    assert ((got.double() - exact).abs() <= rounding * exact.abs() + PRODUCTS * magnitude).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_fp8(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Near the float64 product; outside of the result nothing is written; a row's bits do not depend on its batch."""
    groups, outputs, _ = shape
    for tokens in ROWS:
        arguments = operands(tokens, *shape)
        wide = torch.full((tokens + 1, groups, outputs + 32), torch.nan, device="cuda", dtype=dtype)
        out = wide[:-1, :, 16:-16]
        fp8_grouped_linear(*arguments, out=out, batch_invariant=True, use_pdl=tokens % 2 == 1)
        check_near(out, arguments)
        wide[:-1, :, 16:-16] = torch.nan
        assert wide.isnan().all()
        again = torch.empty(tokens, groups, outputs, device="cuda", dtype=dtype)
        fp8_grouped_linear(*arguments, out=again, batch_invariant=True)
        for t in {0, tokens // 2, tokens - 1}:
            one = tuple(x[t : t + 1] for x in arguments[:2])
            alone, _ = fp8_grouped_linear(*one, *arguments[2:], out_dtype=dtype, batch_invariant=True)
            assert torch.equal(bits(alone), bits(again[t : t + 1]))


def test_fp8_without_batch_invariance() -> None:
    """Whichever kernel the number of rows asks for."""
    for tokens in (1, 32, 33, 64, 65, 500):
        for shape in SHAPES[:3]:
            arguments = operands(tokens, *shape)
            check_near(fp8_grouped_linear(*arguments, use_pdl=True)[0], arguments)


@pytest.mark.parametrize("shape", [(8, 1024, 4096), (1, 256, 512), (2, 128, 128)], ids=str)
def test_codes_are_those_of_the_rounded_result(shape: tuple[int, int, int]) -> None:
    """Of the result whose K is cut alike: which kernels take K whole may depend on the type of the result."""
    for tokens, batch_invariant in itertools.product((1, 5, 8, 40, 64, 70, 200), (False, True)):
        many = [
            select.many_rows(output, tokens, *shape[:2], shape[2] // 128, may_split=True) for output in ("bf16", "e4m3")
        ]
        if not batch_invariant and tokens > 32 and len({key.splits for key, _ in many}) > 1:
            continue
        arguments = operands(tokens, *shape)
        plain, _ = fp8_grouped_linear(*arguments, batch_invariant=batch_invariant)
        memory = torch.full(activation_scale_shape(tokens, shape[0] * shape[1]), torch.nan, device="cuda")
        codes = torch.empty(tokens, shape[0], shape[1] + 16, dtype=torch.uint8, device="cuda").fill_(0xA5)
        out = codes.view(E4M3)[..., :-16]
        fp8_grouped_linear(*arguments, out=out, out_scale=memory, batch_invariant=batch_invariant, use_pdl=True)
        want = torch.empty(tokens, shape[0] * shape[1], dtype=E4M3)
        want_scale = torch.empty(memory.shape)
        reference.quantize_fp8_1x128(QuantizeCall(plain.flatten(1).cpu(), want, want_scale, False))
        assert torch.equal(bits(out.flatten(1).cpu()), bits(want))
        assert torch.equal(memory.cpu(), want_scale)
        assert (codes[..., -16:] == 0xA5).all()


@pytest.mark.parametrize(("outputs", "columns"), [(2624, 4096), (1024, 4096), (64, 96), (528, 1000)])
def test_bf16(outputs: int, columns: int) -> None:
    g = torch.Generator(device="cuda").manual_seed(outputs)
    b = torch.randn(outputs, columns + 8, device="cuda", generator=g).bfloat16()[:, 8:]
    for tokens in ROWS:
        a = torch.randn(tokens, columns + 8, device="cuda", generator=g).bfloat16()[:, :-8]
        exact, magnitude = a.double() @ b.double().t(), a.double().abs() @ b.double().abs().t()
        for dtype in (torch.float32, torch.bfloat16):
            wide = torch.full((tokens, outputs + 16), torch.nan, device="cuda", dtype=dtype)
            for batch_invariant in (False, True):
                options = {"batch_invariant": batch_invariant, "use_pdl": tokens in (8, 300)}
                got = bf16_linear(a, b, out=wide[:, :-16], **options)
                rounding = ROUNDING if dtype == torch.bfloat16 else 0.0
                assert ((got.double() - exact).abs() <= rounding * exact.abs() + FP32 * magnitude).all()
                assert wide[:, -16:].isnan().all()
                wide[:, :-16] = torch.nan
            got = bf16_linear(a, b, out_dtype=dtype, batch_invariant=True)
            alone = bf16_linear(a[-1:], b, out_dtype=dtype)
            assert torch.equal(bits(alone), bits(got[-1:]))


def test_bf16_rows_that_are_not_aligned() -> None:
    """Only the kernel for few rows stores them."""
    g = torch.Generator(device="cuda").manual_seed(0)
    a, b = (torch.randn(rows, 4096, device="cuda", generator=g).bfloat16() for rows in (200, 1024))
    want = bf16_linear(a, b, out_dtype=torch.float32, batch_invariant=True)
    wide = torch.full((200, 1025), torch.nan, device="cuda")
    bf16_linear(a, b, out=wide[:, 1:])
    assert torch.equal(wide[:, 1:], want)
    assert wide[:, 0].isnan().all()


def test_graph_chain_of_dependents() -> None:
    """Products whose weights are on their way before the product ahead has ended, replayed with other rows."""
    a, a_scale, b, b_scale = operands(8, 1, 4096, 1024)
    second = operands(8, 1, 1536, 4096, seed=1)[2:]
    out = torch.empty(8, 1, 1536, device="cuda")

    def chain() -> None:
        codes, scale = fp8_grouped_linear(a, a_scale, b, b_scale, out_dtype=E4M3, use_pdl=True)
        assert scale is not None
        fp8_grouped_linear(codes, scale.unsqueeze(1), *second, out=out, use_pdl=True)

    chain()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(4):
            chain()
    for seed in (5, 6):
        fresh = operands(8, 1, 4096, 1024, seed=seed)
        a.copy_(fresh[0])
        a_scale.copy_(fresh[1])
        graph.replay()
        got = out.clone()
        codes, scale = fp8_grouped_linear(a, a_scale, b, b_scale, out_dtype=E4M3)
        assert scale is not None
        assert torch.equal(got, fp8_grouped_linear(codes, scale.unsqueeze(1), *second, out_dtype=torch.float32)[0])


def test_a_weight_written_just_before_the_step() -> None:
    """Decision 21: a launch without use_pdl lies between what writes a weight and the kernels that read it."""
    a, a_scale, b, b_scale = operands(4, 1, 32768, 1024)
    for seed in range(5):
        fresh = operands(4, 1, 32768, 1024, seed=seed + 10)
        b.copy_(fresh[2])
        b_scale.copy_(fresh[3])
        got, _ = fp8_grouped_linear(a, a_scale, b, b_scale, use_pdl=True)
        assert torch.equal(got, fp8_grouped_linear(a, a_scale, fresh[2], fresh[3])[0])


@pytest.mark.parametrize("tokens", [0, 3])
def test_no_outputs_or_rows(tokens: int) -> None:
    a, a_scale, b, b_scale = operands(tokens, 1, 64, 128)
    assert fp8_grouped_linear(a, a_scale, b, b_scale)[0].shape == (tokens, 1, 64)
    assert fp8_grouped_linear(a, a_scale, b[:, :0], b_scale[:, :0])[0].shape == (tokens, 1, 0)
