# SPDX-License-Identifier: Apache-2.0
"""The kernels of the RMS norms on a GPU, within one bf16 ulp of the oracle's float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from cute_kernels.norm.ops import fused_mtp_input_rmsnorm, fused_q_kv_rmsnorm, mtp_shared_head_rmsnorm
from cute_kernels.norm.rms import FEW_TOKENS
from cute_kernels.runtime import compile as compile_
from cute_kernels.runtime.ops import FALLBACK_VARIABLE
from cute_kernels.runtime.record import record_calls
from tests import oracle
from tests.helpers import generator, raw_bytes, spread

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

BF16, FP32 = torch.bfloat16, torch.float32
EPS = 1e-6

Call = dict[str, Any]
Outputs = tuple[torch.Tensor, ...]


@pytest.fixture(autouse=True)
def no_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FALLBACK_VARIABLE, raising=False)


def weights(width: int, seed: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    """Weights of both signs, small and large, zeros among them."""
    g = generator(seed)
    w = torch.randn(width, generator=g) * torch.exp2(torch.randint(-6, 5, (width,), generator=g).float())
    w[:: max(width // 7, 1)] = 0.0
    return w.to(dtype)


def bits(t: torch.Tensor) -> torch.Tensor:
    return t.contiguous().view(torch.int16)


def assert_norm(got: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float = EPS) -> None:
    """Within one bf16 ulp of the float64 result, and its nearest bf16 but for a few."""
    assert got.shape == x.shape
    y = oracle.rms_norm(oracle.to_numpy(x), oracle.to_numpy(weight), eps)
    have, nearest = oracle.to_numpy(got), oracle.bf16_round(y)
    ulp = 2.0 ** (np.frexp(np.where(nearest == 0, 1.0, nearest))[1] - 8)
    assert np.all(np.abs(have - nearest) <= np.where(nearest == 0, 0.0, ulp))
    assert np.count_nonzero(have != nearest) <= 2 + have.size // 1000


def matrix(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Rows with a gap between them, in which there is NaN."""
    wide = torch.full((*shape[:-1], shape[-1] + 16), float("nan"), dtype=BF16)
    wide[..., 8:-8] = spread(shape, seed)
    return wide[..., 8:-8]


def q_kv(rows: int, width: int = 1024, dtype: torch.dtype = BF16, seed: int = 0) -> Call:
    """Column slices of one projection, as the layers have them."""
    qr_kv = spread((rows, width + 512), seed)
    qr, kv = qr_kv.split([width, 512], dim=1)
    return {"qr": qr, "kv": kv, "q_weight": weights(width, 2, dtype), "kv_weight": weights(512, 3), "eps": EPS}


def mtp_input(rows: int, width: int = 4096, dtype: torch.dtype = BF16, seed: int = 0) -> Call:
    positions = torch.arange(rows) % 3
    positions[1::5] = 2**32  # its low half is 0
    positions[2::5] = -1
    return {
        "inputs_embeds": matrix((rows, width), seed),
        "positions": positions,
        "previous_hidden_states": matrix((rows, 6, width), seed + 1)[:, 1:5],
        "enorm_weight": weights(width, 3),
        "hnorm_weight": weights(width, 4, dtype),
        "eps": EPS,
        "hc_mult": 4,
    }


def shared_head(rows: int, width: int = 4096, dtype: torch.dtype = BF16, seed: int = 0) -> Call:
    return {"hidden_states": matrix((rows, width), seed), "weight": weights(width, 2, dtype), "eps": EPS}


def shared_head_pair(**call: Any) -> Outputs:
    """mtp_shared_head_rmsnorm with its result in a tuple, like the others."""
    out = call.pop("out", None)
    return (mtp_shared_head_rmsnorm(**call, out=None if out is None else out[0]),)


OPS: dict[str, tuple[Callable[..., Outputs], Callable[..., Call]]] = {
    "fused_q_kv_rmsnorm": (fused_q_kv_rmsnorm, q_kv),
    "fused_mtp_input_rmsnorm": (fused_mtp_input_rmsnorm, mtp_input),
    "mtp_shared_head_rmsnorm": (shared_head_pair, shared_head),
}
each_op = pytest.mark.parametrize("name", OPS)
WIDTHS = {
    "fused_q_kv_rmsnorm": (1024, 1536),
    "fused_mtp_input_rmsnorm": (4096, 7168),
    "mtp_shared_head_rmsnorm": (4096, 7168),
}
ODD_WIDTHS = (8, 24, 512, 1000, 2048, 2056, 3000, 5120, 12288)


def like(t: torch.Tensor) -> torch.Tensor:
    """A copy on the GPU with the same strides, and everything around it."""
    storage = torch.empty(t.untyped_storage().nbytes() // t.element_size(), dtype=t.dtype, device="cuda")
    raw_bytes(storage).copy_(raw_bytes(t))
    return storage.as_strided(t.shape, t.stride(), t.storage_offset())


def to_gpu(call: Call) -> Call:
    return {name: like(v) if isinstance(v, torch.Tensor) else v for name, v in call.items()}


def run(name: str, call: Call, **more: Any) -> Outputs:
    with record_calls() as recording:
        got = OPS[name][0](**to_gpu(call), **more)
    assert [entry.implementation for entry in recording.calls] == ["kernel"]
    return got


def check(name: str, call: Call, **more: Any) -> Outputs:
    """Run on the GPU, and compare with the oracle."""
    got = run(name, call, **more)
    if name == "fused_q_kv_rmsnorm":
        assert_norm(got[0], call["qr"], call["q_weight"], call["eps"])
        assert_norm(got[1], call["kv"], call["kv_weight"], call["eps"])
    elif name == "mtp_shared_head_rmsnorm":
        assert_norm(got[0], call["hidden_states"], call["weight"], call["eps"])
    else:
        first = call["positions"] == 0
        assert torch.equal(bits(got[0].cpu()[first]), torch.zeros_like(bits(call["inputs_embeds"][first])))
        kept = ~first
        assert_norm(got[0].cpu()[kept], call["inputs_embeds"][kept], call["enorm_weight"], call["eps"])
        assert_norm(got[1], call["previous_hidden_states"], call["hnorm_weight"], call["eps"])
    return got


@pytest.mark.parametrize("dtype", [BF16, FP32])
@each_op
def test_values(name: str, dtype: torch.dtype) -> None:
    for width in WIDTHS[name]:
        for rows in (1, 2, 3, 9, 65, 258):
            check(name, OPS[name][1](rows, width, dtype, seed=rows))


@pytest.mark.parametrize("width", [24, 1024, 1544, 2048])
def test_bits_do_not_depend_on_the_batch(width: int) -> None:
    many = q_kv(FEW_TOKENS + 1, width)
    few = many | {name: many[name][-3:] for name in ("qr", "kv")}
    for whole, part in zip(check("fused_q_kv_rmsnorm", many), run("fused_q_kv_rmsnorm", few), strict=True):
        assert torch.equal(bits(whole[-3:]), bits(part))


@each_op
def test_any_multiple_of_eight(name: str) -> None:
    for width in ODD_WIDTHS:
        for dtype in (BF16, FP32):
            check(name, OPS[name][1](5, width, dtype, seed=width))


def test_widths_of_both_matrices_are_independent() -> None:
    for width, kv_width in ((8, 4096), (4096, 512), (3000, 12288), (24, 24)):
        call = q_kv(7, width)
        call |= {"kv": matrix((7, kv_width), 1), "kv_weight": weights(kv_width, 5, FP32), "eps": 0.5}
        check("fused_q_kv_rmsnorm", call)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_embeddings_at_position_0_are_zero_whatever_they_hold(dtype: torch.dtype) -> None:
    call = mtp_input(11, 7168)
    call["positions"] = call["positions"].clamp(-1, 2**20).to(dtype)
    clean = run("fused_mtp_input_rmsnorm", call)
    first = call["positions"] == 0
    call["inputs_embeds"][first] = float("nan")
    call["inputs_embeds"][0, 5] = float("inf")
    call["enorm_weight"][3] = -1.0
    dirty = check("fused_mtp_input_rmsnorm", call)
    assert torch.equal(bits(dirty[1]), bits(clean[1]))


@each_op
def test_zero_rows(name: str) -> None:
    call = OPS[name][1](3)
    for tensor in call.values():
        if isinstance(tensor, torch.Tensor) and tensor.dim() > 1:
            tensor.zero_()
    assert all(not got.any() for got in run(name, call))


def test_no_columns() -> None:
    x, weight = torch.zeros(3, 0, dtype=BF16, device="cuda"), torch.zeros(0, dtype=BF16, device="cuda")
    assert run("mtp_shared_head_rmsnorm", {"hidden_states": x, "weight": weight, "eps": EPS})[0].shape == (3, 0)


def test_rows_beyond_four_gigabytes() -> None:
    gap = 2**30 + 8  # elements: row 2 starts past 2^32 bytes
    memory = torch.empty(2 * gap + 4096, dtype=BF16, device="cuda")
    out = torch.empty(2 * gap + 4096, dtype=BF16, device="cuda").as_strided((3, 4096), (gap, 1))
    call = shared_head(3)
    x = memory.as_strided((3, 4096), (gap, 1))
    x.copy_(call["hidden_states"])
    mtp_shared_head_rmsnorm(x, call["weight"].cuda(), EPS, out=out)
    assert_norm(out, call["hidden_states"], call["weight"])
    streams = memory.as_strided((1, 3, 4096), (0, gap, 1))
    embeds = call["hidden_states"][:1].cuda()
    weight = call["weight"].cuda()
    _, got = fused_mtp_input_rmsnorm(embeds, torch.ones(1, dtype=torch.int64).cuda(), streams, weight, weight, EPS, 3)
    assert_norm(got[0], call["hidden_states"], call["weight"])


@each_op
def test_shapes_and_strides_need_no_new_kernel(name: str) -> None:
    for rows in (3, FEW_TOKENS + 1):
        run(name, OPS[name][1](rows))
    before = compile_.compilations()
    for rows in (1, 4, 33, 129, FEW_TOKENS + 70):
        run(name, OPS[name][1](rows), use_pdl=True)
    assert compile_.compilations() == before


@each_op
def test_torch_compile(name: str) -> None:
    function, make = OPS[name]
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, dynamic=True)
    for rows in (5, 9):
        gpu = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in to_gpu(make(rows)).items()}
        for got, want in zip(compiled(**gpu), function(**gpu), strict=True):
            assert torch.equal(bits(got), bits(want))


def test_what_is_not_supported_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    wide, weight = torch.zeros(3, 4104, dtype=BF16, device="cuda"), torch.zeros(4104, dtype=BF16, device="cuda")
    for x, w, reason in (
        (wide[:, 4:4100], weight[:4096], "rows of hidden_states must be 16-byte aligned"),
        (wide[:, :4096], weight[4:4100], "rows of the weight of hidden_states must be 16-byte aligned"),
        (wide[:, :100], weight[:100], "rows of hidden_states must have a multiple of 8 columns"),
    ):
        with pytest.raises(NotImplementedError, match=f"{reason}.*{FALLBACK_VARIABLE}=reference"):
            mtp_shared_head_rmsnorm(x, w, EPS)
    monkeypatch.setenv(FALLBACK_VARIABLE, "reference")
    with record_calls() as recording:
        mtp_shared_head_rmsnorm(wide[:, :100], weight[:100], EPS)
    assert [entry.implementation for entry in recording.calls] == ["reference"]
