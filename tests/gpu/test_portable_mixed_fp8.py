"""The portable kernel of sparse_mla_mixed over e4m3 caches, against float64 over the same values in bf16."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from tests.gpu.decode_cases import SCALE
from tests.gpu.decode_checks import same_bits
from tests.gpu.prefill_checks import assert_results, use_kernel
from tests.gpu.test_mixed import Call, Results, make, run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

E4M3 = torch.float8_e4m3fn


@pytest.fixture(autouse=True)
def kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    from cute_kernels.sparse_mla import mixed

    use_kernel("portable", monkeypatch, mixed)


def as_fp8(call: Call) -> tuple[Call, Call]:
    """The call over e4m3 codes, NaN where it was, and over their values as bf16: of these no bits are lost."""
    query, window = (t.clamp(-448, 448).to(E4M3) for t in (call.query, call.window))
    compressed = None if call.compressed is None else call.compressed.clamp(-448, 448).to(E4M3)
    fp8 = dataclasses.replace(call, query=query, window=window, compressed=compressed)
    wide = None if compressed is None else compressed.bfloat16()
    return fp8, dataclasses.replace(call, query=query.bfloat16(), window=window.bfloat16(), compressed=wide)


def check(call: Call) -> Results:
    fp8, values = as_fp8(call)
    got = run(fp8)
    assert_results(got, values.expected(), values.query, call.scale, call.out_scale)
    return got


@pytest.mark.parametrize("heads", [1, 16, 32, 64, 65, 128])
@pytest.mark.parametrize("width", [None, 200])
def test_heads(heads: int, width: int | None) -> None:
    check(make(heads=heads, width=width, seed=heads))


@pytest.mark.parametrize("first", [1, 53, 64])
@pytest.mark.parametrize("second", [2, 64])
def test_page_sizes(first: int, second: int) -> None:
    check(make(rows=(first, second), seed=first))


@pytest.mark.parametrize("width", [0, 1, 63, 64, 65, 512])
@pytest.mark.parametrize("window_size", [1, 64, 128, 200])
def test_columns_around_tiles(window_size: int, width: int) -> None:
    check(make(seq_lens=(300, window_size + 2, 1, 9, window_size), window_size=window_size, width=width, seed=width))


def test_more_rows_than_multiprocessors() -> None:
    check(make((1, 0, 7, 1, 40) * 20, (30, 5, 90, 200, 50) * 20, width=90, padding=5, capacity=(5000, 4000)))


@pytest.mark.parametrize("scale", [0.0, -SCALE])
@pytest.mark.parametrize("out_scale", [1.0, -2.5])
def test_scales(scale: float, out_scale: float) -> None:
    check(dataclasses.replace(make(sink="finite"), scale=scale, out_scale=out_scale))


def test_every_code() -> None:
    """Each e4m3 code in every place of a row, alone: out is it."""
    call = make((1,) * 254, (1,) * 254, window_size=1, width=None, rows=(64, 64), capacity=(254, 1), padding=0, bad=0.0)
    fp8, _ = as_fp8(dataclasses.replace(call, sink=None, out_scale=1.0))
    codes = torch.tensor([code for code in range(256) if code & 0x7F != 0x7F], dtype=torch.uint8, device="cuda")
    fp8.window.view(torch.uint8).view(-1, 512)[:254] = codes[:, None]
    fp8.indices[:, 0] = torch.arange(254, device="cuda").int()
    fp8.query = torch.zeros_like(fp8.query.float()).to(E4M3)
    out, lse = run(fp8)
    assert (out == codes.view(E4M3).bfloat16()[:, None, None]).all()
    assert (lse == 0).all()
    assert not math.isnan(out.float().sum())


def test_bits_repeat() -> None:
    fp8, _ = as_fp8(make((1,) * 100 + (200, 99), (700,) * 50 + (5,) * 50 + (200, 500), heads=128, width=205))
    want = run(fp8)
    for _ in range(20):
        assert same_bits(run(fp8), want)
