# SPDX-License-Identifier: Apache-2.0
"""fp8_gemm_squares on a Hopper GPU: results of fp8_gemm's kernel for many rows, and sums in their order."""

from __future__ import annotations

import pytest
import torch

from cute_kernels.linear.ops import fp8_linear_squares
from cute_kernels.runtime import compile as compile_
from cute_kernels.runtime.arch import arch_of, multiprocessors
from cute_kernels.runtime.ops import FALLBACK_VARIABLE
from tests.gpu.einsum_calls import Call
from tests.gpu.test_attention_codes import assert_raw_queries, sums_of_squares
from tests.helpers import bits

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from cute_kernels.linear import select
from cute_kernels.linear.hopper.gemm import GemmKey

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or arch_of(0) != "sm_90a", reason="the kernel is Hopper's"),
]

KEYS = [tile.key for tile in select.SQUARES_TILES]


def name(key: GemmKey) -> str:
    return f"{key.rows}x{key.columns}"


@pytest.fixture(autouse=True)
def no_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FALLBACK_VARIABLE, raising=False)


def plain(call: Call) -> torch.Tensor:
    """The product by another tile, without sums."""
    key = select.TILES[2].key
    out = torch.full_like(call.out, float("nan"))
    rows, _, outputs = out.shape
    ctas = min(-(-rows // key.rows) * -(-outputs // key.columns), multiprocessors(0))
    compile_.launch(key, 0, call.a, call.a_scale, call.b, call.b_scale, out, None, ctas, False)
    return out


@pytest.mark.parametrize("key", KEYS, ids=name)
@pytest.mark.parametrize(
    ("rows", "outputs", "blocks", "k"),
    [(1, 128, 1, 128), (65, 512, 4, 1024), (300, 1024 + 16, 8, 640), (1000, 2048, 12, 384), (513, 264, 0, 256)],
)
def test_results_and_sums(key: GemmKey, rows: int, outputs: int, blocks: int, k: int) -> None:
    call = Call.make(rows, 1, outputs, k, seed=rows)
    call.a_scale[rows // 3] = 0.0
    call.a_scale[rows // 2] *= 2.0**30
    want = plain(call)
    whole = torch.full((rows + 2, 1, outputs + 16), float("nan"), dtype=torch.bfloat16, device="cuda")
    sums = torch.full((rows + 2, blocks + 5), float("nan"), device="cuda")
    out, squares = whole[1:-1, :, 8:-8], sums[1:-1, 2 : blocks + 2]
    padded = want[:, 0, : blocks * 128].unflatten(1, (blocks, 128))
    heads = torch.zeros(rows, -(-blocks // 4) * 4, 128, dtype=torch.bfloat16, device="cuda")
    heads[:, :blocks] = padded
    expected = sums_of_squares(heads.unflatten(1, (-1, 4)).flatten(2))[:, :blocks] if blocks else squares
    for most, use_pdl in ((0, False), (3, True)):
        out.fill_(float("nan"))
        squares.fill_(float("nan"))
        tiles = -(-rows // key.rows) * -(-outputs // key.columns)
        ctas = min(tiles, most or multiprocessors(0))
        compile_.launch(key, 0, call.a, call.a_scale, call.b, call.b_scale, out, squares, ctas, use_pdl)
        assert torch.equal(bits(out.contiguous()), bits(want))
        assert torch.equal(bits(squares.contiguous()), bits(expected.contiguous()))
    exact = padded.double().square().sum(-1)
    assert bool(((squares.double() - exact).abs() <= 2.0**-20 * exact).all())
    out.fill_(float("nan"))
    squares.fill_(float("nan"))
    assert whole.isnan().all()
    assert sums.isnan().all()


def test_from_the_product_to_attention() -> None:
    """Attention takes product and sums as they come."""
    rows, heads = 700, 64
    call = Call.make(rows, 1, heads * 512 + 256, 1024, seed=9)
    call.a_scale *= 2.0**-6
    operands = call.a[:, 0], call.a_scale[:, 0], call.b[0], call.b_scale[0]
    out, squares = fp8_linear_squares(*operands, heads * 4, use_pdl=True)
    assert_raw_queries(out[:, : heads * 512].unflatten(1, (heads, 512)), squares, 1e-6)


@pytest.mark.parametrize("key", KEYS, ids=name)
def test_in_a_graph_after_the_kernel_that_writes_its_rows(key: GemmKey) -> None:
    """Launched as a dependent it reads no row before it is written."""
    call, other = Call.make(600, 1, 1024, 1024, seed=2), Call.make(600, 1, 1024, 1024, seed=3)
    want, out = (torch.full_like(call.out, float("nan")) for _ in range(2))
    want_squares, squares = (torch.full((600, 8), float("nan"), device="cuda") for _ in range(2))
    ctas = min(-(-600 // key.rows) * 8, multiprocessors(0))
    compile_.launch(key, 0, call.a, call.a_scale, call.b, call.b_scale, want, want_squares, ctas, False)
    a, a_scale = call.a.clone(), call.a_scale.clone()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        call.a.copy_(a)
        call.a_scale.copy_(a_scale)
        compile_.launch(key, 0, call.a, call.a_scale, call.b, call.b_scale, out, squares, ctas, True)
    for _ in range(3):
        call.a.copy_(other.a)
        call.a_scale.copy_(other.a_scale)
        out.fill_(float("nan"))
        squares.fill_(float("nan"))
        torch.cuda.synchronize()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(bits(out), bits(want))
        assert torch.equal(squares, want_squares)
