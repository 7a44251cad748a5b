# SPDX-License-Identifier: Apache-2.0
"""fused_q_kv_rmsnorm_quant on a GPU: the bits of fused_q_kv_rmsnorm, and the oracle's codes and scales of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from cute_kernels.linear.ops import activation_scale_shape
from cute_kernels.norm.ops import fused_q_kv_rmsnorm, fused_q_kv_rmsnorm_quant
from cute_kernels.runtime import compile as compile_
from cute_kernels.runtime.ops import FALLBACK_VARIABLE
from cute_kernels.runtime.record import record_calls
from tests import oracle
from tests.helpers import POISON_BYTE, bits, generator, raw_bytes, spread

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

BF16, FP32, E4M3 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
EPS = 1e-6
FEW_AND_MANY = (1, 2, 3, 65, 256, 257, 263, 301)
"""On both sides of the number of tokens at which the kernel changes, and no multiples of a CTA's rows."""

Call = dict[str, Any]


@pytest.fixture(autouse=True)
def no_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FALLBACK_VARIABLE, raising=False)


def weights(width: int, seed: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    """Weights of both signs, small and large, zeros among them."""
    g = generator(seed)
    w = torch.randn(width, generator=g) * torch.exp2(torch.randint(-6, 5, (width,), generator=g).float())
    w[:: max(width // 7, 1)] = 0.0
    return w.to(dtype)


def make(tokens: int, width: int = 1536, kv_width: int = 512, dtype: torch.dtype = BF16, seed: int = 0) -> Call:
    """On the GPU: column slices of one projection, as the layers have them."""
    both = spread((tokens, width + kv_width), seed).cuda()
    qr, kv = both.split([width, kv_width], dim=1)
    q_weight, kv_weight = weights(width, 2, dtype).cuda(), weights(kv_width, 3).cuda()
    return {"qr": qr, "kv": kv, "q_weight": q_weight, "kv_weight": kv_weight, "eps": EPS}


def outputs(tokens: int, width: int, kv_width: int, has_query: bool, gap: int = 0) -> dict[str, torch.Tensor | None]:
    """Poisoned results with `gap` columns between rows."""
    blocks, padded = activation_scale_shape(tokens, width)
    memories = (
        torch.empty(tokens, width + gap, dtype=E4M3, device="cuda"),
        torch.empty(blocks, padded + gap, dtype=FP32, device="cuda"),
        torch.empty(tokens, kv_width + gap, dtype=BF16, device="cuda"),
        torch.empty(tokens, width + gap, dtype=BF16, device="cuda"),
    )
    for memory in memories:
        raw_bytes(memory).fill_(POISON_BYTE)
    sizes = (width, padded, kv_width, width)
    views = [memory[:, :size] for memory, size in zip(memories, sizes, strict=True)]
    return {"out": views[0], "scale_out": views[1], "kv_out": views[2], "qr_out": views[3] if has_query else None}


def run(call: Call, has_query: bool = True, gap: int = 0, use_pdl: bool = False) -> dict[str, Any]:
    """The results, outside of which nothing was written."""
    tokens, width = call["qr"].shape
    got = outputs(tokens, width, call["kv"].shape[1], has_query, gap)
    with record_calls() as recording:
        codes, scale, kv = fused_q_kv_rmsnorm_quant(**call, **got, use_pdl=use_pdl)
    assert [entry.implementation for entry in recording.calls] == ["kernel"]
    assert codes is got["out"]
    assert kv is got["kv_out"]
    assert scale.shape == (tokens, -(-width // 128))
    assert scale.stride(0) == 1 or tokens == 1
    for tensor in got.values():
        if tensor is not None and gap and tokens:
            memory = tensor.as_strided((tensor.shape[0], tensor.stride(0)), (tensor.stride(0), 1))
            assert (bits(memory[:, tensor.shape[1] :]) == POISON_BYTE).all()
    return got


def check(call: Call, **how: Any) -> dict[str, Any]:
    """Norms have the bits of fused_q_kv_rmsnorm; codes and scales are the oracle's of the bf16 query."""
    got = run(call, **how)
    query, kv = fused_q_kv_rmsnorm(**call)
    assert torch.equal(bits(got["kv_out"]), bits(kv))
    tokens, width = query.shape
    padded = np.zeros((tokens, -(-width // 128) * 128))
    padded[:, :width] = oracle.to_numpy(query)
    codes, byte = oracle.quantize_blocks(padded, 128, "e4m3", floor=1e-10)
    assert np.array_equal(bits(got["out"]).cpu().numpy(), codes[:, :width])
    want = np.zeros(got["scale_out"].shape, dtype=np.float32)
    want[:, :tokens] = np.exp2(byte.astype(np.float64) - 127).T
    assert np.array_equal(got["scale_out"].cpu().numpy(), want)
    if got["qr_out"] is not None:
        assert torch.equal(bits(got["qr_out"]), bits(query))
    return got


@pytest.mark.parametrize("width", [1024, 1536])
def test_bytes(width: int) -> None:
    for tokens in FEW_AND_MANY:
        for has_query in (False, True):
            check(make(tokens, width, seed=tokens), has_query=has_query, gap=16 * (tokens % 2))


@pytest.mark.parametrize("tokens", [5, 261])
def test_any_multiples_of_eight(tokens: int) -> None:
    widths = ((8, 2048), (136, 8), (200, 24), (1032, 512), (2048, 1000))
    for width, kv_width in widths:
        check(make(tokens, width, kv_width, FP32, seed=width), gap=16)


def test_floor_of_the_absmax() -> None:
    call = make(9)
    call["qr"].fill_(2.0**-60)
    call["q_weight"].fill_(2.0**-70)
    got = check({**call, "eps": 1.0})
    assert (got["scale_out"][:, :9] == 2.0**-42).all()


@pytest.mark.parametrize("tokens", [9, 300])
def test_rows_of_nan_and_infinity_and_zero(tokens: int) -> None:
    """A NaN spoils its row alone; one infinity makes the others of its row zero, and itself NaN; a weight that
    overflows gives the largest code."""
    call = make(tokens)
    clean = check(call)
    call["qr"][4, 3] = float("inf")
    call["qr"][5] = float("nan")
    call["qr"][6, 7] = float("nan")
    call["qr"][7] = 0.0
    got = run(call)
    query = got["qr_out"]
    assert query[5].isnan().all()
    assert query[6].isnan().all()
    assert (bits(got["out"][5:7]) == 0x7F).all()
    assert not (bits(got["out"][7]) & 0x7F).any()
    assert (got["scale_out"][:, 5:8] == 2.0**-42).all()
    assert torch.equal(bits(got["out"][4])[query[4].isnan()], torch.full((1,), 0x7F, dtype=torch.uint8, device="cuda"))
    others = [0, 1, 2, 3, 8]
    assert torch.equal(bits(got["out"][others]), bits(clean["out"][others]))
    assert torch.equal(got["scale_out"][:, others], clean["scale_out"][:, others])
    assert torch.equal(bits(got["kv_out"]), bits(clean["kv_out"]))

    call = make(tokens)
    call["q_weight"] = call["q_weight"].float()
    call["q_weight"][9] = 3e38
    call["qr"].fill_(1.0)
    call["qr"][:, 9] = 16.0
    got = run(call)
    assert got["qr_out"][:, 9].isinf().all()
    assert (bits(got["out"][:, 9]) == 0x7E).all()


@pytest.mark.parametrize("tokens", [3, 300])
def test_rows_beyond_four_gigabytes(tokens: int) -> None:
    gap = 2**32 // (2 * (tokens - 1)) // 8 * 8 + 4096  # elements: the last row starts past 2^32 bytes
    call = make(tokens, 1024)
    memory = torch.empty((tokens - 1) * gap + 1024, dtype=BF16, device="cuda")
    qr = memory.as_strided((tokens, 1024), (gap, 1))
    qr.copy_(call["qr"])
    check({**call, "qr": qr}, has_query=False)


def test_shapes_and_strides_need_no_new_kernel() -> None:
    run(make(3))
    run(make(300))
    before = compile_.compilations()
    for tokens in (1, 4, 129, 270, 1000):
        run(make(tokens), gap=16, use_pdl=True)
    assert compile_.compilations() == before


def test_torch_compile() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(fused_q_kv_rmsnorm_quant, fullgraph=True, dynamic=True)
    for tokens in (5, 9):
        call = {name: v.clone() if isinstance(v, torch.Tensor) else v for name, v in make(tokens).items()}
        for got, want in zip(compiled(**call), fused_q_kv_rmsnorm_quant(**call), strict=True):
            assert torch.equal(bits(got), bits(want))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"qr": (5, 1028), "q_weight": (1028,)}, "multiple of 8"),
        ({"qr": (5, 2056), "q_weight": (2056,)}, "at most 2048"),
        ({"kv": (5, 4096), "kv_weight": (4096,)}, "at most 2048"),
    ],
)
def test_unsupported_shapes_say_why(change: dict[str, tuple[int, ...]], why: str) -> None:
    new = {name: torch.zeros(shape, dtype=BF16, device="cuda") for name, shape in change.items()}
    with pytest.raises(NotImplementedError, match=why):
        fused_q_kv_rmsnorm_quant(**{**make(5), **new})
