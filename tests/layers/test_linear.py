# SPDX-License-Identifier: Apache-2.0
"""Linears: block quantization of weights and activations, products rounded once, rows that do not see each other."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cute_kernels.runtime.record import record_calls
from layers.linear import Linear, dequantize_weight, matmul, quantize_activation, quantize_weight
from tests import oracle

FLOOR = 1e-10


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    """Normal values whose blocks differ in magnitude, with zero and tiny blocks and values on rounding ties."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=g)
    x *= torch.exp2(torch.randint(-12, 12, (1, shape[1]), generator=g).float())
    x[:, :128] = 0.0
    x[:, 256:] *= 2.0**-30
    x[-1] *= 2.0**-30
    x[0, 128] = 448.0
    x[0, 129:140] = torch.tensor([1.0625, 1.1875, -1.0625, 17.0, 19.0, 432.0, 2.0**-10, 3 * 2.0**-10, 0.0, -0.0, 449.0])
    return x


def weight_oracle(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Codes and scales of 128 x 128 blocks, one block after the other."""
    codes, scales = np.zeros(weight.shape, dtype=np.uint8), np.zeros([n // 128 for n in weight.shape])
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            block = (slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128))
            scales[i, j] = 2.0 ** (oracle.ue8m0_byte(np.abs(weight[block]).max(), 448.0, FLOOR) - 127)
            codes[block] = oracle.e4m3_encode(weight[block] / scales[i, j])
    return codes, scales


def activation_oracle(x: np.ndarray) -> np.ndarray:
    codes, byte = oracle.quantize_blocks(x, 128, "e4m3", floor=FLOOR)
    return oracle.E4M3[codes] * np.exp2(byte.astype(float) - 127).repeat(128, axis=1)


def test_quantize_weight() -> None:
    weight = numbers(256, 384)
    codes, scale = quantize_weight(weight)
    expected_codes, expected_scale = weight_oracle(weight.double().numpy())
    assert codes.dtype == torch.float8_e4m3fn
    assert scale.dtype == torch.float32
    assert np.array_equal(scale.numpy(), expected_scale)
    assert np.array_equal(codes.view(torch.uint8).numpy(), expected_codes)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_dequantize_weight(dtype: torch.dtype) -> None:
    """Also with a last row of blocks that is not full. Powers of two are exact in every dtype."""
    codes = torch.randint(0, 0x7F, (200, 256), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    scale = torch.tensor([[1.0, 2.0**-9], [8.0, 2.0**5]])
    got = dequantize_weight(codes.view(torch.float8_e4m3fn), scale, dtype)
    assert got.dtype == dtype
    values = oracle.E4M3[codes.numpy()]
    for i in range(200):
        for j in range(256):
            assert float(got[i, j]) == values[i, j] * float(scale[i // 128, j // 128])


def test_quantize_activation() -> None:
    x = numbers(7, 384, seed=2).bfloat16()
    codes, scale = quantize_activation(x)
    assert codes.dtype == torch.float8_e4m3fn
    assert scale.shape == (7, 3)
    got = oracle.E4M3[codes.view(torch.uint8).numpy()] * scale.double().numpy().repeat(128, axis=1)
    assert np.array_equal(got, activation_oracle(oracle.to_numpy(x)))


def fp8_linear(out: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> Linear:
    linear = Linear(columns, out, quantized=True, label="test", out_dtype=dtype)
    codes, scale = quantize_weight(numbers(-(-out // 128) * 128, columns, seed=3) / 64)
    linear.weight.copy_(codes[:out])
    linear.scale.copy_(scale)
    linear.scale[-1, 1] *= 1.3  # scales of a checkpoint need not be powers of two
    return linear


def plain_linear(out: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> Linear:
    linear = Linear(columns, out, quantized=False, label="test", out_dtype=dtype)
    linear.weight.copy_(numbers(out, columns, seed=4) / 64)
    return linear


def rounded(x: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    x = x.astype(np.float32).astype(np.float64)
    return oracle.bf16_round(x) if dtype == torch.bfloat16 else x


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("out", [128, 384, 200])
@pytest.mark.parametrize("rows", [0, 1, 9])
def test_fp8_linear_is_the_product_of_quantized_operands_rounded_once(dtype: torch.dtype, out: int, rows: int) -> None:
    linear = fp8_linear(out, 384, dtype)
    x = numbers(max(rows, 1), 384, seed=5)[:rows].bfloat16()
    spread = linear.scale.double().numpy().repeat(128, axis=0).repeat(128, axis=1)[:out]
    weight = oracle.E4M3[linear.weight.view(torch.uint8).numpy()] * spread
    got = linear(x)
    assert got.dtype == dtype
    expected = rounded(activation_oracle(oracle.to_numpy(x)).reshape(rows, 384) @ weight.T, dtype)
    assert np.array_equal(oracle.to_numpy(got), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_plain_linear_is_the_product_rounded_once(dtype: torch.dtype) -> None:
    """With fp32 output nothing is rounded to bf16 on the way."""
    linear = plain_linear(72, 320, dtype)
    x = numbers(9, 320, seed=6).bfloat16()
    got = linear(x)
    assert got.dtype == dtype
    exact = oracle.to_numpy(x) @ oracle.to_numpy(linear.weight).T
    assert np.array_equal(oracle.to_numpy(got), rounded(exact, dtype))
    if dtype == torch.float32:
        assert not torch.equal(got, got.bfloat16().float())


@pytest.mark.parametrize("quantized", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_row_does_not_see_its_neighbours(quantized: bool, dtype: torch.dtype) -> None:
    linear = (fp8_linear if quantized else plain_linear)(256, 384, dtype)
    x = numbers(65, 384, seed=7).bfloat16()
    whole = linear(x)
    for rows in (slice(0, 1), slice(3, 4), slice(10, 33), slice(64, 65)):
        assert torch.equal(linear(x[rows]), whole[rows])
    wide = torch.full((65, 500), float("nan"), dtype=torch.bfloat16)
    wide[:, 57:441] = x
    assert torch.equal(linear(wide[:, 57:441]), whole), "a column slice of a wider tensor"
    nan = x.clone()
    nan[5] = float("nan")
    rest = [i for i in range(65) if i != 5]
    assert torch.equal(linear(nan)[rest], whole[rest])


def test_fp8_needs_whole_blocks_of_columns() -> None:
    with pytest.raises(ValueError, match=r"Linear wq_b: in_features: expected a multiple of 128, got 192"):
        Linear(192, 128, quantized=True, label="wq_b")


def test_recordings_count_bytes_and_products() -> None:
    linear, x = fp8_linear(200, 384), numbers(9, 384).bfloat16()
    expected = linear(x)
    with record_calls() as recording:
        assert torch.equal(linear(x), expected)
    (call,) = recording.calls
    assert (call.op, call.implementation) == ("linear test", "torch")
    assert call.cost.flops == 2 * 9 * 384 * 200
    assert call.cost.bytes == 200 * 384 + 9 * 384 * 2 + 9 * 200 * 2


@pytest.mark.parametrize("shape", [(3, 256), (2, 3, 256)])
def test_products_of_a_gpu_come_in_the_type_that_is_asked_for(shape: tuple[int, ...]) -> None:
    x = torch.empty(shape, dtype=torch.bfloat16, device="meta")
    weight = torch.empty(*shape[:-2], 128, 256, dtype=torch.bfloat16, device="meta")
    for dtype in (torch.bfloat16, torch.float32):
        out = matmul(x, weight, dtype)
        assert (out.dtype, out.shape) == (dtype, (*shape[:-1], 128))
