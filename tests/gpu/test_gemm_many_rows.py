# SPDX-License-Identifier: Apache-2.0
"""The GEMM kernel for many rows on a Hopper GPU, each of its tiles, against float64 products of dequantized operands.

Hopper's tensor cores keep about 14 bits of a sum of e4m3 products, so results differ from the exact ones by a share of
the sum of the products' magnitudes; bits depend neither on the tile nor on the batch.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from cute_kernels import numerics
from cute_kernels.linear.verify_cases import FP32, PRODUCTS, ROUNDING
from cute_kernels.runtime import compile as compile_
from cute_kernels.runtime.arch import arch_of, multiprocessors
from tests.helpers import bits

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from cute_kernels.linear import select
from cute_kernels.linear.hopper.gemm import GemmKey
from tests.gpu.einsum_calls import Call

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

KEYS = select.many_rows_keys("bf16")
ALL = select.many_rows_keys("bf16", may_split=True)
SPLITS = [key for key in ALL if key not in KEYS and not key.halves]
"""With K cut, or of CTAs that share a multiprocessor."""
HALVED = [key for key in ALL if key.halves]
"""Of rows that come as halves."""


def name(key: GemmKey) -> str:
    return f"{key.operands}_{key.output}_{key.rows}x{key.columns}_s{key.stages}k{key.splits}" + "_halves" * key.halves


ALL_BF16 = [key for output in ("fp32", "bf16") for key in select.many_bf16_rows_keys(output)]
BF16 = [key for key in ALL_BF16 if not key.halves]
"""Of bf16 operands."""


SHAPES = [
    (1, 1, 128, 128),
    (3, 2, 136, 256),
    (33, 2, 272, 1152),
    (257, 1, 1024, 4096),
    (300, 3, 264, 640),
    (1000, 1, 1536, 1536),
    (4500, 2, 2176, 384),
]
"""Rows, groups, outputs, K."""


@pytest.fixture(autouse=True)
def hopper() -> None:
    if arch_of(0) != select.HOPPER:
        pytest.skip("the kernel is Hopper's")


def run(
    key: GemmKey, call: Call, out: torch.Tensor, scale: Any = None, *, most: int = 0, use_pdl: bool = False
) -> None:
    tokens, groups, outputs = out.shape
    tiles = select.count_work_tiles(key, tokens, groups, outputs)
    ctas = tiles * key.splits if key.splits > 1 else min(tiles, most or multiprocessors(0))
    compile_.launch(key, 0, call.a, call.a_scale, call.b, call.b_scale, out, scale, ctas, use_pdl)


def run_bf16(
    key: GemmKey, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, *, most: int = 0, use_pdl: bool = False
) -> None:
    tiles = select.count_work_tiles(key, len(a), 1, len(b))
    ctas = tiles * key.splits if key.splits > 1 else min(tiles, most or multiprocessors(0))
    operands = a.unsqueeze(1), None, b.unsqueeze(0), None, out.unsqueeze(1), None
    compile_.launch(key, 0, *operands, ctas, use_pdl)


def nan(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.full(shape, float("nan"), device="cuda").to(dtype)


@pytest.mark.parametrize("key", [*KEYS, *SPLITS], ids=name)
@pytest.mark.parametrize(("tokens", "groups", "outputs", "k"), SHAPES)
def test_results(key: GemmKey, tokens: int, groups: int, outputs: int, k: int) -> None:
    call = Call.make(tokens, groups, outputs, k, seed=tokens)
    want, magnitude = call.expected()
    whole = nan(tokens + 2, groups, outputs + 16)
    out = whole[1:-1, :, 8:-8]
    run(key, call, out)
    assert bool(((out.double() - want).abs() <= ROUNDING * want.abs() + PRODUCTS * magnitude).all())
    first = out.clone()
    for most, use_pdl in ((2, False), (4, True), (0, True)):
        out.fill_(float("nan"))
        run(key, call, out, most=most, use_pdl=use_pdl)
        assert torch.equal(bits(out), bits(first))
    whole[1:-1, :, 8:-8] = float("nan")
    assert whole.isnan().all()


@pytest.mark.parametrize("key", KEYS, ids=name)
def test_bits_depend_on_neither_tile_nor_batch(key: GemmKey) -> None:
    call = Call.make(700, 2, 1032, 1024, seed=7)
    whole = nan(700, 2, 1032)
    run(KEYS[0], call, whole)
    for rows in (slice(0, 700), slice(130, 131), slice(300, 571)):
        part = call.rows(rows)
        out = nan(*part.out.shape)
        run(key, part, out)
        assert torch.equal(bits(out), bits(whole[rows]))


@pytest.mark.parametrize("key", [key for key in [*KEYS, *SPLITS] if key.columns == 128], ids=name)
@pytest.mark.parametrize(
    ("tokens", "groups", "outputs", "k"), [(3, 2, 256, 256), (258, 2, 1024, 1536), (1001, 1, 384, 640)]
)
def test_other_results(key: GemmKey, tokens: int, groups: int, outputs: int, k: int) -> None:
    call = Call.make(tokens, groups, outputs, k, seed=tokens)
    rounded, exact = nan(tokens, groups, outputs), nan(tokens, groups, outputs, dtype=torch.float32)
    run(key, call, rounded)
    run(select.with_output(key, "fp32"), call, exact)
    assert torch.equal(exact.bfloat16(), rounded)
    codes = torch.full((tokens, groups, outputs), 0x7F, dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn)
    scale = nan(groups * outputs // 128, -(-tokens // 4) * 4, dtype=torch.float32)
    if not select.has_result(key, "e4m3"):
        return
    run(select.with_output(key, "e4m3"), call, codes, scale)
    want, byte = numerics.quantize_e4m3(rounded.cpu(), 128, numerics.OUTPUT_FLOOR)
    assert torch.equal(codes.view(torch.uint8).cpu(), want)
    assert torch.equal(scale[:, :tokens].t().cpu(), numerics.ue8m0_scale(byte).float().reshape(tokens, -1))
    assert not scale[:, tokens:].any()


@pytest.mark.parametrize("key", [*HALVED, *(key for key in ALL_BF16 if key.halves)], ids=name)
@pytest.mark.parametrize("tokens", [33, 46, 63])
def test_halves_leave_the_bits_of_whole_work_tiles(key: GemmKey, tokens: int) -> None:
    """Of rows that lie in both halves as well; nothing outside is written. Of several groups, too."""
    groups, outputs, k = 1 if key.operands == "bf16" else 2, 208, 1160 if key.operands == "bf16" else 1152
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[key.output]
    want, whole = nan(tokens, groups, outputs, dtype=dtype), nan(tokens + 2, groups, outputs + 16, dtype=dtype)
    out = whole[1:-1, :, 8:-8]
    if key.operands == "bf16":
        g = torch.Generator(device="cuda").manual_seed(tokens)
        a, b = (torch.randn(count, k, device="cuda", generator=g).bfloat16() for count in (tokens, outputs))
        launch = partial(run_bf16, a=a, b=b)
    else:
        launch = partial(run, call=Call.make(tokens, groups, outputs, k, seed=tokens))
    launch(replace(key, halves=False), out=want if key.operands == "e4m3" else want[:, 0])
    for use_pdl in (False, True):
        out.fill_(float("nan"))
        launch(key, out=out if key.operands == "e4m3" else out[:, 0], use_pdl=use_pdl)
        assert torch.equal(bits(out.contiguous()), bits(want))
    assert not want.isnan().any()
    whole[1:-1, :, 8:-8] = float("nan")
    assert whole.isnan().all()


@pytest.mark.parametrize("key", [*KEYS, *SPLITS], ids=name)
def test_nan_stays_in_its_row(key: GemmKey) -> None:
    call = Call.make(200, 1, 256, 512, seed=1)
    clean, out = nan(200, 1, 256), nan(200, 1, 256)
    run(key, call, clean)
    call.a_scale[77, 0, 2] = float("nan")
    run(key, call, out)
    others = [i for i in range(200) if i != 77]
    assert out[77].isnan().all()
    assert torch.equal(bits(out[others]), bits(clean[others]))


@pytest.mark.parametrize("key", [*KEYS, *SPLITS], ids=name)
def test_in_a_graph_after_the_kernel_that_writes_its_rows(key: GemmKey) -> None:
    """Launched as a dependent it reads no row before it is written."""
    call, other = Call.make(600, 1, 512, 1024, seed=2), Call.make(600, 1, 512, 1024, seed=3)
    want, out = nan(600, 1, 512), nan(600, 1, 512)
    run(key, call, want)
    a, a_scale = call.a.clone(), call.a_scale.clone()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        call.a.copy_(a)
        call.a_scale.copy_(a_scale)
        run(key, call, out, use_pdl=True)
    for _ in range(3):
        call.a.copy_(other.a)
        call.a_scale.copy_(other.a_scale)
        out.fill_(float("nan"))
        torch.cuda.synchronize()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(bits(out), bits(want))


@pytest.mark.parametrize("key", BF16, ids=name)
@pytest.mark.parametrize(
    ("rows", "outputs", "k"),
    [(1, 16, 64), (47, 336, 200), (65, 1024, 4096), (257, 2624, 1000), (130, 208, 72), (700, 1040, 7168)],
)
def test_bf16_operands(key: GemmKey, rows: int, outputs: int, k: int) -> None:
    """Near the float64 product; the same bits whoever walks over the work tiles, and in a graph as a dependent of what
    writes its rows; nothing outside is written."""
    g = torch.Generator(device="cuda").manual_seed(rows)
    a, b = (torch.randn(count, k + 8, device="cuda", generator=g).bfloat16()[:, :-8] for count in (rows, outputs))
    exact, magnitude = a.double() @ b.double().t(), a.double().abs() @ b.double().abs().t()
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[key.output]
    whole = nan(rows + 2, outputs + 16, dtype=dtype)
    out = whole[1:-1, 8:-8]
    run_bf16(key, a, b, out)
    rounding = ROUNDING if key.output == "bf16" else 0.0
    assert bool(((out.double() - exact).abs() <= rounding * exact.abs() + FP32 * magnitude).all())
    first = out.clone()
    for most in (2, 0):
        out.fill_(float("nan"))
        run_bf16(key, a, b, out, most=most, use_pdl=True)
        assert torch.equal(bits(out), bits(first))
    rows_then = a.clone()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        a.copy_(rows_then)
        run_bf16(key, a, b, out, use_pdl=True)
    for _ in range(3):
        a.zero_()
        out.fill_(float("nan"))
        torch.cuda.synchronize()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(bits(out), bits(first))
    whole[1:-1, 8:-8] = float("nan")
    assert whole.isnan().all()
