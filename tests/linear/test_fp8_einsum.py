# SPDX-License-Identifier: Apache-2.0
"""deepseek_v4_fp8_einsum and pack_block_scales against exact rational arithmetic."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cute_kernels.output.ops import deepseek_v4_fp8_einsum, fused_inv_rope_fp8_quant, pack_block_scales
from tests import helpers, oracle

BLOCK, PACKED = [1, 128, 128], [1, 1, 128]
EQUATION = "bhr,hdr->bhd"


def codes(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """e4m3 values over all finite codes, subnormals and both zeros included."""
    byte = torch.randint(0, 254, shape, generator=helpers.generator(seed), dtype=torch.int32)
    byte = torch.where(byte >= 127, byte + 1, byte)  # leaves out 0x7F; 0xFF is out of range
    return byte.to(torch.uint8).view(torch.float8_e4m3fn)


def powers(shape: tuple[int, ...], seed: int, low: int = -20, high: int = 12) -> torch.Tensor:
    return torch.exp2(torch.randint(low, high, shape, generator=helpers.generator(seed)).float())


def pack_rows(scale: torch.Tensor) -> torch.Tensor:
    """fp32 powers of two [..., 4 n] -> int32 [..., n], by Python integers."""
    words = np.zeros((*scale.shape[:-1], scale.shape[-1] // 4), dtype=np.uint32)
    for where in np.ndindex(*words.shape):
        four = scale[where[:-1]][where[-1] * 4 : where[-1] * 4 + 4].tolist()
        words[where] = sum((int(np.log2(s)) + 127) << 8 * j for j, s in enumerate(four))
    return torch.from_numpy(words.view(np.int32))


def exact(a: torch.Tensor, sa: torch.Tensor, b: torch.Tensor, sb: torch.Tensor) -> np.ndarray:
    """float64 [T, G, R]: the exact rational sum, rounded to fp32 and then to bf16."""
    # Integers in units of 2^-9, the smallest e4m3 step.
    ia, ib = ((oracle.E4M3[t.view(torch.uint8).numpy()] * 512).astype(np.int64) for t in (a, b))
    num_tokens, groups, width = ia.shape
    out = np.zeros((num_tokens, groups, ib.shape[1]))
    for t, g, d in np.ndindex(*out.shape):
        total = Fraction(0)
        for c in range(width // 128):
            dot = int(np.dot(ia[t, g, c * 128 : c * 128 + 128], ib[g, d, c * 128 : c * 128 + 128]))
            total += Fraction(dot, 512 * 512) * Fraction(sa[t, g, c].item()) * Fraction(sb[g, d // 128, c].item())
        out[t, g, d] = np.float32(float(total))
    return oracle.bf16_round(out)


def run(a: torch.Tensor, sa: torch.Tensor, b: torch.Tensor, sb: torch.Tensor, recipe: list[int]) -> torch.Tensor:
    out = torch.full((a.shape[0], a.shape[1], b.shape[1]), float("nan"), dtype=torch.bfloat16)
    deepseek_v4_fp8_einsum(a, sa, b, sb, out, EQUATION, recipe)
    return out


@pytest.mark.parametrize(
    ("num_tokens", "groups", "rows", "width"), [(1, 1, 1, 512), (3, 2, 131, 512), (5, 1, 16, 1024)]
)
def test_both_recipes_are_exact(num_tokens: int, groups: int, rows: int, width: int) -> None:
    a, b = codes((num_tokens, groups, width), 1), codes((groups, rows, width), 2)
    sa = powers((num_tokens, groups, width // 128), 3)
    sb = powers((groups, -(-rows // 128), width // 128), 4)
    want = exact(a, sa, b, sb)
    np.testing.assert_array_equal(oracle.to_numpy(run(a, sa, b, sb, BLOCK)), want)
    packed = run(a, pack_rows(sa), b, pack_block_scales(sb, rows), PACKED)
    np.testing.assert_array_equal(oracle.to_numpy(packed), want)


def test_scales_need_not_be_powers_of_two_and_k_may_be_one_chunk() -> None:
    a, b = codes((4, 2, 128), 1), codes((2, 20, 128), 2)
    sa = torch.rand(4, 2, 1, generator=helpers.generator(3)) + 0.1
    sb = torch.rand(2, 1, 1, generator=helpers.generator(4)) + 0.1
    np.testing.assert_array_equal(oracle.to_numpy(run(a, sa, b, sb, BLOCK)), exact(a, sa, b, sb))


def test_small_terms_survive_between_large_ones() -> None:
    a, b = torch.zeros(1, 1, 512, dtype=torch.float8_e4m3fn), torch.zeros(1, 1, 512, dtype=torch.float8_e4m3fn)
    a[0, 0, ::128], b[0, 0, ::128] = 1.0, 1.0
    a[0, 0, 256] = -1.0
    sa = torch.tensor([2.0**20, 2.0**-10, 2.0**20, 0.0]).view(1, 1, 4)
    assert run(a, sa, b, torch.ones(1, 1, 4), BLOCK).item() == 2.0**-10


def test_result_is_rounded_to_the_nearest_even_bf16() -> None:
    a, b = torch.zeros(4, 1, 128, dtype=torch.float8_e4m3fn), torch.zeros(1, 1, 128, dtype=torch.float8_e4m3fn)
    b[0, 0, :2] = 1.0
    a[:, 0, 0], a[:, 0, 1] = 256.0, torch.tensor([1.0, 1.125, 3.0, 2.75])
    assert run(a, torch.ones(4, 1, 1), b, torch.ones(1, 1, 1), BLOCK).flatten().tolist() == [256.0, 258.0, 260.0, 258.0]


def test_sums_are_rounded_to_fp32_first() -> None:
    """1 + 2^-8 is half a bf16 step above 1; what fp32 drops does not decide such a tie."""
    a, b = torch.zeros(1, 1, 256), torch.zeros(1, 1, 256)
    a[0, 0, [0, 1, 128]], b[0, 0, [0, 1, 128]] = torch.tensor([1.0, 2.0**-4, 1.0]), torch.tensor([1.0, 2.0**-4, 1.0])
    sa = torch.tensor([[[1.0, 2.0**-30]]])
    a, b = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
    assert run(a, sa, b, torch.ones(1, 1, 2), BLOCK).item() == 1.0


def test_strides_are_free() -> None:
    a, b = codes((4, 3, 512), 1), codes((3, 140, 512), 2)
    sa, sb = powers((4, 3, 4), 3), powers((3, 2, 4), 4)
    want = run(a, sa, b, sb, BLOCK)
    wide_a = codes((3, 4, 600), 9)
    wide_a[:, :, 32:544] = a.transpose(0, 1)
    wide_b = codes((3, 150, 520), 9)
    wide_b[:, 3:143, :512] = b
    scale_a = torch.full((3, 4, 8), float("nan"))
    scale_a[:, :, :4] = sa.permute(1, 2, 0)
    scale_b = sb.transpose(1, 2).contiguous().transpose(1, 2)
    pool = torch.full((4, 5, 160), 7.0, dtype=torch.bfloat16)
    out = pool[:, 1:4, 8:148]
    deepseek_v4_fp8_einsum(
        wide_a.transpose(0, 1)[:, :, 32:544],
        scale_a.permute(2, 0, 1)[:4],
        wide_b[:, 3:143, :512],
        scale_b,
        out,
        EQUATION,
        BLOCK,
    )
    assert torch.equal(out, want)
    expected = torch.full_like(pool, 7.0)
    expected[:, 1:4, 8:148] = want
    assert torch.equal(pool, expected)


@pytest.mark.parametrize("packed", [False, True])
def test_row_is_independent_of_its_batch(packed: bool) -> None:
    a, b = codes((33, 2, 1024), 5), codes((2, 130, 1024), 6)
    sa, sb = powers((33, 2, 8), 7), powers((2, 2, 8), 8)
    scales = (pack_rows(sa), pack_block_scales(sb, 130)) if packed else (sa, sb)
    recipe = PACKED if packed else BLOCK
    whole = run(a, scales[0], b, scales[1], recipe)
    for t in (0, 16, 32):
        assert torch.equal(run(a[t : t + 1], scales[0][t : t + 1], b, scales[1], recipe), whole[t : t + 1])


def test_nan_reaches_only_its_row_and_its_column() -> None:
    a, b = codes((3, 2, 512), 5), codes((2, 9, 512), 6)
    sa, sb = powers((3, 2, 4), 7), powers((2, 1, 4), 8)
    clean = run(a, sa, b, sb, BLOCK)
    a.view(torch.uint8)[1, 0, 77] = 0x7F
    b.view(torch.uint8)[1, 4, 300] = 0xFF
    dirty = run(a, sa, b, sb, BLOCK)
    broken = torch.zeros(3, 2, 9, dtype=torch.bool)
    broken[1, 0], broken[:, 1, 4] = True, True
    assert torch.equal(dirty.isnan(), broken)
    assert torch.equal(dirty[~broken], clean[~broken])


@pytest.mark.parametrize("packed", [False, True])
def test_no_rows(packed: bool) -> None:
    a, b = codes((0, 2, 512), 1), codes((2, 8, 512), 2)
    if packed:
        scales = torch.zeros(0, 2, 1, dtype=torch.int32), pack_block_scales(torch.ones(2, 1, 4), 8)
    else:
        scales = torch.zeros(0, 2, 4), torch.ones(2, 1, 4)
    assert run(a, scales[0], b, scales[1], PACKED if packed else BLOCK).shape == (0, 2, 8)


@pytest.mark.parametrize("packed", [False, True])
def test_takes_what_the_quantizer_returns(packed: bool) -> None:
    o = torch.randn(7, 4, 512, generator=helpers.generator(1)).bfloat16()
    weight = torch.randn(2, 64, 1024, generator=helpers.generator(2))
    positions = torch.arange(7)
    table = oracle.cos_sin_table(16)
    a, sa = fused_inv_rope_fp8_quant(o, positions, table, 2, 2, tma_aligned_scales=packed)
    b = weight.to(torch.float8_e4m3fn)
    sb = torch.ones(2, 1, 8)
    z = run(a, sa, b, pack_block_scales(sb, 64) if packed else sb, PACKED if packed else BLOCK)
    rotated, _ = fused_inv_rope_fp8_quant(o, positions, table, 2, 2, quantize=False)
    have, want = oracle.to_numpy(z), np.einsum("tgk,gdk->tgd", oracle.to_numpy(rotated), oracle.to_numpy(weight))
    assert 1 - 2 * (have * want).sum() / ((have**2).sum() + (want**2).sum()) < 2e-3


@pytest.mark.full
@pytest.mark.parametrize("packed", [False, True])
def test_compiles_and_passes_opcheck(packed: bool) -> None:
    b, sb = codes((2, 8, 512), 2), powers((2, 1, 4), 4)
    weight_scale = pack_block_scales(sb, 8) if packed else sb
    recipe = PACKED if packed else BLOCK

    def f(a: torch.Tensor, sa: torch.Tensor) -> torch.Tensor:
        out = torch.empty(a.shape[0], 2, 8, dtype=torch.bfloat16)
        deepseek_v4_fp8_einsum(a, sa, b, weight_scale, out, EQUATION, recipe)
        return out * 2

    compiled = torch.compile(f, fullgraph=True, backend="aot_eager", dynamic=True)
    for num_tokens in (3, 4, 9):
        a, sa = codes((num_tokens, 2, 512), 1), powers((num_tokens, 2, 4), 3)
        sa = pack_rows(sa) if packed else sa
        assert torch.equal(compiled(a, sa), f(a, sa))
    out = torch.empty(9, 2, 8, dtype=torch.bfloat16)
    helpers.check_op("deepseek_v4_fp8_einsum", a, sa, b, weight_scale, out, EQUATION, recipe)


GOOD = {
    "a": codes((3, 2, 512), 1),
    "a_scale": torch.ones(3, 2, 4),
    "b": codes((2, 130, 512), 2),
    "b_scale": torch.ones(2, 2, 4),
    "out": torch.empty(3, 2, 130, dtype=torch.bfloat16),
    "equation": EQUATION,
    "recipe": BLOCK,
}


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"a": torch.zeros(3, 2, 512)}, TypeError),
        ({"a": codes((3, 2, 500), 1)}, ValueError),
        ({"a": codes((3, 512, 2), 1).transpose(1, 2)}, ValueError),
        ({"a_scale": torch.ones(3, 2, 1, dtype=torch.int32)}, TypeError),
        ({"a_scale": torch.ones(3, 2, 3)}, ValueError),
        ({"b": codes((1, 130, 512), 2)}, ValueError),
        ({"b": codes((2, 130, 640), 2)}, ValueError),
        ({"b_scale": torch.ones(2, 1, 4)}, ValueError),
        ({"b_scale": torch.ones(2, 130, 4, dtype=torch.int32)}, TypeError),
        ({"out": torch.empty(3, 2, 130)}, TypeError),
        ({"out": torch.empty(2, 3, 130, dtype=torch.bfloat16)}, ValueError),
        ({"equation": "bhr,hrd->bhd"}, ValueError),
        ({"recipe": [1, 128, 64]}, ValueError),
        ({"a_scale": torch.ones(3, 2, 4), "recipe": PACKED}, TypeError),
        ({"a": codes((3, 2, 384), 1), "b": codes((2, 130, 384), 1), "recipe": PACKED}, ValueError),
    ],
)
def test_bad_arguments(change: dict, error: type[Exception]) -> None:
    name = next(iter(change))
    with pytest.raises(error, match=f"^deepseek_v4_fp8_einsum: {name}: expected"):
        deepseek_v4_fp8_einsum(**{**GOOD, **change})


@settings(deadline=None, max_examples=25)
@given(st.integers(1, 3), st.integers(1, 300), st.integers(1, 3), st.integers(0, 1000))
def test_pack_block_scales(groups: int, rows: int, words: int, seed: int) -> None:
    scale = powers((groups, -(-rows // 128), 4 * words), seed, -127, 128)
    packed = pack_block_scales(scale, rows)
    padded = -(-rows // 4) * 4
    assert packed.dtype == torch.int32
    assert packed.shape == (groups, rows, words)
    assert packed.stride() == (words * padded, 1, padded)
    memory = packed.as_strided((groups, words, padded), (words * padded, padded, 1)).numpy().view(np.uint32)
    for g, w, r in np.ndindex(groups, words, padded):
        want = 0
        if r < rows:
            exponents = [np.log2(scale[g, r // 128, 4 * w + j].double().item()) for j in range(4)]
            want = sum((int(e) + 127) << 8 * j for j, e in enumerate(exponents))
        assert memory[g, w, r] == want


def test_pack_block_scales_of_a_strided_view() -> None:
    scale = powers((2, 8, 3), 1).transpose(1, 2)
    assert torch.equal(pack_block_scales(scale, 300), pack_block_scales(scale.contiguous(), 300))


@pytest.mark.parametrize("bad", [0.0, -1.0, 3.0, 2.0**-128, float("inf"), float("nan")])
def test_pack_block_scales_refuses_what_is_no_power_of_two(bad: float) -> None:
    scale = torch.ones(1, 2, 4)
    scale[0, 1, 2] = bad
    with pytest.raises(ValueError, match=r"^pack_block_scales: scale: expected powers of two"):
        pack_block_scales(scale, 256)


def test_pack_block_scales_bad_arguments() -> None:
    with pytest.raises(ValueError, match=r"^pack_block_scales: scale: expected shape"):
        pack_block_scales(torch.ones(1, 2, 4), 257)
    with pytest.raises(ValueError, match=r"^pack_block_scales: scale: expected K / 128"):
        pack_block_scales(torch.ones(1, 2, 6), 256)
    with pytest.raises(ValueError, match=r"^pack_block_scales: rows: expected a positive"):
        pack_block_scales(torch.ones(1, 0, 4), 0)
    with pytest.raises(TypeError, match=r"^pack_block_scales: scale: expected dtype"):
        pack_block_scales(torch.ones(1, 1, 4).double(), 128)
