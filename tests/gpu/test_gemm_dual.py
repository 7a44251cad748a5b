# SPDX-License-Identifier: Apache-2.0
"""fp8_bf16_gemm on a Hopper GPU: the bits of two launches that cut K as often, and those of the layer on streams."""

from __future__ import annotations

import pytest
import torch

from cute_kernels.linear.ops import fp8_bf16_linear
from cute_kernels.runtime import compile as compile_
from cute_kernels.runtime.arch import arch_of
from cute_kernels.runtime.ops import FALLBACK_VARIABLE
from cute_kernels.runtime.record import record_calls
from layers import attention
from tests.gpu.einsum_calls import Call
from tests.gpu.test_raw_decode_steps import NEAR, REQUESTS, lengths_at, serve
from tests.helpers import bits
from tests.layers.engine import hidden_rows

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from cute_kernels.linear.hopper.gemm_dual import COLUMNS, ROWS, DualGemmKey

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or arch_of(0) != "sm_90a", reason="the kernel is Hopper's"),
]

KEY = DualGemmKey("sm_90a")


@pytest.fixture(autouse=True)
def no_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FALLBACK_VARIABLE, raising=False)


class Both:
    """Operands of two products of the same number of rows."""

    def __init__(self, rows: int, outputs: int, columns: int, x_outputs: int, x_columns: int, seed: int = 0) -> None:
        g = torch.Generator(device="cuda").manual_seed(seed)
        self.fp8 = Call.make(rows, 1, outputs, columns, seed=seed)
        self.x, self.x_weight = (
            torch.randn(n, x_columns, device="cuda", generator=g).bfloat16() for n in (rows, x_outputs)
        )

    @property
    def operands(self) -> tuple[torch.Tensor, ...]:
        call = self.fp8
        return call.a[:, 0], call.a_scale[:, 0], call.b[0], call.b_scale[0], self.x, self.x_weight

    def apart(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The products by the kernels of one each."""
        call, (fp8, bf16) = self.fp8, KEY.products
        out = torch.full_like(call.out, torch.nan)
        x_out = torch.full((len(self.x), 1, len(self.x_weight)), torch.nan, device="cuda")
        for key, operands, result in (
            (fp8, (call.a, call.a_scale, call.b, call.b_scale), out),
            (bf16, (self.x.unsqueeze(1), None, self.x_weight.unsqueeze(0), None), x_out),
        ):
            ctas = -(-result.shape[0] // ROWS) * -(-result.shape[2] // COLUMNS) * key.splits
            compile_.launch(key, 0, *operands, result, None, ctas, False)
        return out[:, 0], x_out[:, 0]


SHAPES = (
    (64, 1536, 4096, 1024, 4096),
    (33, 1536, 4096, 2624, 4096),
    (64, 2048, 7168, 2624, 7168),
    (1, 16, 128, 16, 8),
    (130, 80, 512, 48, 1000),
)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bits_of_two_launches(shape: tuple[int, ...]) -> None:
    both = Both(*shape)
    rows, outputs, _, x_outputs, _ = shape
    both.fp8.a_scale[rows // 3] = 0.0
    want, x_want = both.apart()
    whole = torch.full((rows + 2, outputs + 16), torch.nan, dtype=torch.bfloat16, device="cuda")
    x_whole = torch.full((rows + 2, x_outputs + 8), torch.nan, device="cuda")
    out, x_out = whole[1:-1, 8:-8], x_whole[1:-1, 4:-4]
    for use_pdl in (False, True):
        out.fill_(torch.nan)
        x_out.fill_(torch.nan)
        fp8_bf16_linear(*both.operands, out=out, x_out=x_out, use_pdl=use_pdl)
        assert torch.equal(bits(out.contiguous()), bits(want.contiguous()))
        assert torch.equal(bits(x_out.contiguous()), bits(x_want.contiguous()))
    exact = both.x.double() @ both.x_weight.double().t()
    magnitude = both.x.double().abs() @ both.x_weight.double().abs().t()
    assert bool(((x_out.double() - exact).abs() <= 2.0**-18 * magnitude).all())
    out.fill_(torch.nan)
    x_out.fill_(torch.nan)
    assert whole.isnan().all()
    assert x_whole.isnan().all()


def test_in_a_graph_after_the_kernels_that_write_its_rows() -> None:
    """Launched as a dependent it reads no row before it is written, of either operand."""
    shape = 64, 1536, 4096, 1024, 4096
    both, other = Both(*shape, seed=2), Both(*shape, seed=3)
    want, x_want = both.apart()
    written = [x.clone() for x in (both.fp8.a, both.fp8.a_scale, both.x)]
    out, x_out = fp8_bf16_linear(*both.operands)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for target, source in zip((both.fp8.a, both.fp8.a_scale, both.x), written, strict=True):
            target.copy_(source)
        fp8_bf16_linear(*both.operands, out=out, x_out=x_out, use_pdl=True)
    for _ in range(3):
        both.fp8.a.copy_(other.fp8.a)
        both.fp8.a_scale.copy_(other.fp8.a_scale)
        both.x.copy_(other.x)
        out.fill_(torch.nan)
        x_out.fill_(torch.nan)
        torch.cuda.synchronize()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(bits(out), bits(want.contiguous()))
        assert torch.equal(x_out, x_want)


@pytest.mark.parametrize("ratio", [4, 128])
def test_steps_of_a_layer(ratio: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Near those of two launches, which round alike and may cut K otherwise."""
    server = serve(ratio, bind_steps=False)
    lengths, hidden = lengths_at(1), hidden_rows(REQUESTS, 1).cuda()
    with record_calls() as recording:
        got = server.decode(lengths, hidden).double()
    ops = [call.op for call in recording.calls]
    assert ops.count("fp8_bf16_gemm") == 1
    assert "bf16_gemm" not in ops
    monkeypatch.setattr(attention, "DUAL_ROWS", range(0))
    with record_calls() as recording:
        want = server.decode(lengths, hidden).double()
    assert "bf16_gemm" in [call.op for call in recording.calls]
    some = torch.arange(REQUESTS, device="cuda") != 5  # the others' rows: that one is padding
    assert bool(((got - want)[some].norm(dim=-1) <= NEAR * want[some].norm(dim=-1)).all())


def test_which_steps_are_two_launches() -> None:
    """Of few rows, of a layer that does not compress, and batch-invariant ones."""
    for ratio, requests, options in (
        (1, REQUESTS, {}),
        (4, REQUESTS - 1, {}),
        (4, REQUESTS, {"batch_invariant": True}),
    ):
        server = serve(ratio, requests, **options)
        with record_calls() as recording:
            server.decode(lengths_at(1, requests), hidden_rows(requests, 1).cuda())
        assert "fp8_bf16_gemm" not in {call.op for call in recording.calls}
