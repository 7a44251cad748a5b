# SPDX-License-Identifier: Apache-2.0
"""fp8_gemm and bf16_gemm on the CPU: their meaning in float64, what they refuse, which kernel a call takes."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from cute_kernels.linear.ops import activation_scale_shape, bf16_linear, fp8_grouped_linear, fp8_linear
from tests import oracle

E4M3 = torch.float8_e4m3fn


def codes(*shape: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 0x7F, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)).view(E4M3)


def scales(*shape: int, seed: int) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) / 64


def call(tokens: int, groups: int, outputs: int, columns: int) -> tuple[torch.Tensor, ...]:
    a_scale = scales(groups, columns // 128, -(-tokens // 4) * 4, seed=2).permute(2, 0, 1)[:tokens]
    weight = codes(groups, outputs, columns, seed=3), scales(groups, -(-outputs // 128), columns // 128, seed=4)
    return codes(groups, tokens, columns, seed=1).transpose(0, 1), a_scale, *weight


def exact(a: torch.Tensor, a_scale: torch.Tensor, b: torch.Tensor, b_scale: torch.Tensor) -> np.ndarray:
    """Element by element, from the codes' values."""
    out = np.zeros((a.shape[0], b.shape[0], b.shape[1]))
    values = [oracle.E4M3[x.contiguous().view(torch.uint8).numpy()] for x in (a, b)]
    for chunk in range(a.shape[2] // 128):
        part = slice(128 * chunk, 128 * chunk + 128)
        row = a_scale[:, :, chunk].double().numpy()
        block = b_scale[:, :, chunk].double().numpy().repeat(128, axis=1)[:, : b.shape[1]]
        out += np.einsum("tgk,gnk->tgn", values[0][..., part], values[1][..., part]) * row[:, :, None] * block[None]
    return out


@pytest.mark.parametrize(
    ("tokens", "groups", "outputs", "columns"), [(1, 1, 64, 256), (5, 3, 200, 384), (0, 2, 16, 128)]
)
def test_meaning(tokens: int, groups: int, outputs: int, columns: int) -> None:
    arguments = call(tokens, groups, outputs, columns)
    want = exact(*arguments).astype(np.float32)
    got, scale = fp8_grouped_linear(*arguments, out_dtype=torch.float32)
    assert scale is None
    assert np.allclose(got.numpy(), want, rtol=1e-6, atol=0)
    wide = torch.full((tokens, groups, outputs + 8), torch.nan, dtype=torch.bfloat16)
    fp8_grouped_linear(*arguments, out=wide[..., 8:], batch_invariant=True, use_pdl=True)
    assert np.array_equal(oracle.to_numpy(wide[..., 8:]), oracle.bf16_round(got.double().numpy()))
    assert wide[..., :8].isnan().all()


def test_one_group_is_a_linear() -> None:
    a, a_scale, b, b_scale = call(3, 1, 48, 256)
    got = fp8_linear(a[:, 0], a_scale[:, 0], b[0], b_scale[0])
    assert torch.equal(got, fp8_grouped_linear(a, a_scale, b, b_scale)[0][:, 0])


def test_codes_are_those_of_the_rounded_result() -> None:
    arguments = call(5, 2, 256, 256)
    plain, _ = fp8_grouped_linear(*arguments)
    got, scale = fp8_grouped_linear(*arguments, out_dtype=E4M3)
    assert scale is not None
    want, byte = oracle.quantize_blocks(oracle.to_numpy(plain).reshape(5, 512), 128, "e4m3", floor=1e-10)
    assert np.array_equal(got.reshape(5, 512).view(torch.uint8).numpy(), want)
    assert np.array_equal(scale.numpy(), np.exp2(byte.astype(float) - 127))
    assert scale.stride() == (1, 8)


def test_bf16_meaning() -> None:
    g = torch.Generator().manual_seed(0)
    a, b = torch.randn(5, 96, generator=g).bfloat16(), torch.randn(32, 96, generator=g).bfloat16()
    want = oracle.to_numpy(a) @ oracle.to_numpy(b).T
    assert np.array_equal(bf16_linear(a, b, out_dtype=torch.float32).numpy(), want.astype(np.float32))
    assert np.array_equal(oracle.to_numpy(bf16_linear(a, b)), oracle.bf16_round(want.astype(np.float32).astype(float)))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"a": codes(5, 2, 200, seed=1), "weight": codes(2, 256, 200, seed=1)},
            "a: expected K to be a multiple of 128",
        ),
        ({"weight": codes(2, 256, 128, seed=1)}, "weight: expected shape"),
        ({"a_scale": scales(5, 2, 3, seed=1)}, "a_scale: expected shape"),
        ({"weight_scale": scales(2, 1, 2, seed=1)}, "weight_scale: expected shape"),
        ({"weight_scale": torch.ones(2, 2, 2, dtype=torch.float64)}, "weight_scale: expected dtype"),
        ({"out": torch.empty(5, 2, 256, dtype=torch.float16)}, "out: expected dtype"),
        ({"out": torch.empty(4, 2, 256, dtype=torch.bfloat16)}, "out: expected shape"),
        ({"out_scale": torch.empty(4, 8)}, "out: expected dtype"),
    ],
)
def test_refused(change: dict[str, torch.Tensor], words: str) -> None:
    names = ("a", "a_scale", "weight", "weight_scale")
    given = dict(zip(names, call(5, 2, 256, 256), strict=True)) | change
    more: dict[str, Any] = {k: v for k, v in given.items() if k not in names}
    with pytest.raises((ValueError, TypeError), match=f"fp8_gemm: {words}"):
        fp8_grouped_linear(*(given[name] for name in names), **more)


def test_an_e4m3_result_needs_whole_blocks() -> None:
    with pytest.raises(ValueError, match="N to be a multiple of 128"):
        fp8_grouped_linear(*call(5, 2, 200, 256), out_dtype=E4M3, out_scale=torch.empty(activation_scale_shape(5, 400)))


def test_how_k_is_cut_follows_from_the_weight_alone() -> None:
    pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
    from cute_kernels.linear import select
    from cute_kernels.models import MODELS

    for model in MODELS.values():
        for tp in (1, 2, 4, 8):
            for operands, output, groups, outputs, k in select.layer_gemms(model, tp):
                chunks = k // (128 if operands == "e4m3" else 64)
                found = [select.swap_ab(operands, output, m, groups, outputs, chunks) for m in (1, 8, 9, 64, 65, 8192)]
                assert len({key.splits for key, _ in found}) == 1
                for key, clusters in found:
                    assert chunks // key.splits >= 4 or key.splits == 1
                    assert clusters * key.splits <= select.MULTIPROCESSORS * key.ctas_per_multiprocessor
                    assert clusters <= select.CLUSTERS[key.splits][key.ctas_per_multiprocessor - 1]
                    assert key.smem_bytes <= 232448


def test_grids_of_few_rows() -> None:
    """A cluster for each work tile, of a last one that is not full too, or as many as run at once."""
    pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
    from cute_kernels.linear import select

    for rows, outputs, tiles in ((8, 64, 1), (9, 130, 3), (32, 128, 2), (33, 128, 1), (64, 129, 2), (65, 128, 2)):
        key, clusters = select.swap_ab("e4m3", "fp32", rows, 1, outputs, 1)
        assert (key.splits, clusters) == (1, tiles)
    assert select.swap_ab_whole("fp32", 1, 1, 64 * 99) is None
    for rows, groups, outputs, tiles in ((8, 1, 64 * 99 + 1, 100), (16, 2, 3200, 100), (1, 1, 64 * 300, 264)):
        found = select.swap_ab_whole("fp32", rows, groups, outputs)
        assert found is not None
        assert found[1] == tiles
    assert select.swap_ab_whole("fp32", 33, 1, 64 * 200) is None


def test_k_is_cut_for_many_rows_where_work_tiles_are_few() -> None:
    """Only where a cluster for each work tile runs at once, and never of queries, whose product has the same bits with
    the sums of squares."""
    pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
    from cute_kernels.linear import launch as calls
    from cute_kernels.linear import select
    from cute_kernels.models import MODELS

    used = set()
    for model in MODELS.values():
        for tp in (1, 2, 4, 8):
            declared = set(calls.fp8_keys(model, tp, "sm_90a"))
            for operands, output, groups, outputs, k in select.layer_gemms(model, tp):
                for rows in range(33, 1200, 31) if operands == "e4m3" else ():
                    shape = output, rows, groups, outputs, k // 128
                    key, ctas = select.many_rows(*shape, may_split=True)
                    tiles = groups * -(-rows // key.rows) * -(-outputs // key.columns)
                    assert key in declared
                    if key.splits > 1:
                        used.add((key.rows, key.columns, key.splits))
                        assert ctas == tiles * key.splits
                        assert tiles <= select.CLUSTERS[key.splits][key.ctas_per_multiprocessor - 1]
                        assert k > model.q_lora_rank
                        assert output != "e4m3" or key.splits == 2
                    else:
                        assert ctas == min(tiles, select.MULTIPROCESSORS)
                    assert select.many_rows(*shape)[0].splits == 1
    splits = *select.SPLIT_TILES, *select.MEDIUM_SPLIT_TILES
    assert used == {(tile.key.rows, tile.key.columns, tile.key.splits) for tile in splits}


def test_codes_have_the_sums_of_other_results() -> None:
    """Of grouped weights, but for the few columns that only the swapped operands' kernel cuts into so many."""
    pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
    from cute_kernels.linear import select
    from cute_kernels.models import MODELS

    for model in MODELS.values():
        for tp in (1, 2, 4, 8):
            for operands, output, groups, outputs, k in select.layer_gemms(model, tp):
                for rows in range(33, 1200, 7) if (operands, output) == ("e4m3", "e4m3") else ():
                    if select.swap_ab_codes(rows, groups, outputs, k // 128) is None:
                        splits = {
                            select.many_rows(result, rows, groups, outputs, k // 128, may_split=True)[0].splits
                            for result in ("bf16", "fp32", "e4m3")
                        }
                        assert len(splits) == 1, (tp, groups, rows)


@pytest.mark.parametrize("rows", [33, 40, 47, 48, 63, 64])
def test_rows_of_half_a_box_and_more_come_as_halves(rows: int) -> None:
    """By the work tile of 64 rows that 64 rows take, where nothing lies beyond the last row of a result."""
    pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
    from cute_kernels.linear import launch as calls
    from cute_kernels.linear import select
    from cute_kernels.models import MODELS

    for model in MODELS.values():
        for operands, output, groups, outputs, k in select.layer_gemms(model, 8):
            is_halved = rows < 48 and groups == 1 and output != "e4m3"
            if operands == "bf16":
                key, whole = (select.many_bf16_rows(output, n, outputs, k // 64)[0] for n in (rows, 64))
                assert key in calls.bf16_keys(model, 8, "sm_90a")
            else:
                key, whole = (
                    select.many_rows(output, n, groups, outputs, k // 128, may_split=True)[0] for n in (rows, 64)
                )
                assert key in calls.fp8_keys(model, 8, "sm_90a")
            if is_halved:
                assert replace(key, unrolled=whole.unrolled) == replace(whole, halves=True)
                assert key.unrolled == (whole.unrolled if whole.interleaved else 4)
            assert key.halves == is_halved
            assert not select.many_rows("bf16", rows, groups, outputs, k // 128)[0].halves


@pytest.mark.parametrize(
    ("rows", "outputs", "ctas", "stages"),
    [(128, 1024, 64, 12), (129, 1024, 96, 10), (192, 1024, 96, 10), (193, 1024, 128, 8), (256, 512, 64, 12),
     (257, 512, 80, 10), (385, 512, 112, 8), (192, 768, 72, 12), (64, 2624, 82, 12)],
)  # fmt: skip
def test_the_more_copies_the_fewer_stages(rows: int, outputs: int, ctas: int, stages: int) -> None:
    """Of the bf16 kernel that cuts K in two, by its CTAs; of one box of rows the weight is most of what is copied."""
    pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
    from cute_kernels.linear import select

    key, number = select.many_bf16_rows("fp32", rows, outputs, 4096 // 64)
    assert (key.splits, number, key.stages) == (2, ctas, stages)
    assert key in select.many_bf16_rows_keys("fp32")


def test_rows_that_end_within_a_box_take_the_kernel_of_whole_boxes() -> None:
    """Its work tiles are as many, and are moved back rather than filled with zeros: so no number of rows takes longer
    than the next one that kernels are tuned for."""
    pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
    from cute_kernels.linear import select
    from cute_kernels.models import MODELS

    for model in MODELS.values():
        for operands, output, groups, outputs, k in select.layer_gemms(model, 1):
            for rows in range(65, 520, 13):
                whole = -(-rows // 64) * 64
                if operands == "bf16":
                    one, other = (select.many_bf16_rows(output, n, outputs, k // 64) for n in (rows, whole))
                else:
                    one, other = (
                        select.many_rows(output, n, groups, outputs, k // 128, may_split=True) for n in (rows, whole)
                    )
                assert one == other


def test_codes_of_few_columns_are_cut_into_more() -> None:
    """Into as many as let all work tiles run at once; of more rows or work tiles the kernel for many rows is faster."""
    pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
    from cute_kernels.linear import launch as calls
    from cute_kernels.linear import select
    from cute_kernels.models import MODELS

    for groups, outputs, chunks, splits in (
        (1, 1024, 32, 8),
        (2, 1024, 32, 6),
        (1, 1024, 31, 6),
        (1, 1024, 23, None),
        (3, 1024, 32, None),
    ):
        for rows in (33, 64):
            found = select.swap_ab_codes(rows, groups, outputs, chunks)
            assert (found and found[0].splits) == splits
            if found is not None:
                key, clusters = found
                assert (
                    clusters == groups * outputs // 128 <= select.CLUSTERS[key.splits][key.ctas_per_multiprocessor - 1]
                )
                for model in MODELS.values():
                    assert key in calls.fp8_keys(model, 8, "sm_90a")
        assert select.swap_ab_codes(65, groups, outputs, chunks) is None


def test_every_call_of_a_deployment_has_its_kernel() -> None:
    pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
    from cute_kernels.linear import launch as calls
    from cute_kernels.linear import select
    from cute_kernels.models import MODELS

    for model in MODELS.values():
        for tp in (1, 2, 4, 8):
            kernels = {"e4m3": calls.FP8_GEMM, "bf16": calls.BF16_GEMM}
            declared = {name: set(kernel.deployment_keys(model, tp, "sm_90a")) for name, kernel in kernels.items()}
            for operands, output, groups, outputs, k in select.layer_gemms(model, tp):
                for rows in (1, 7, 8, 9, 16, 17, 33, 64, 65, 100, 4096):
                    chunks = k // (128 if operands == "e4m3" else 64)
                    assert select.swap_ab(operands, output, rows, groups, outputs, chunks)[0] in declared[operands]
                    if operands == "bf16":
                        key, ctas = select.many_bf16_rows(output, rows, outputs, chunks)
                        assert key in declared[operands]
                        tiles = -(-rows // key.rows) * -(-outputs // key.columns)
                        assert key.splits == 1 or tiles <= select.CLUSTERS[key.splits][0]
                        assert ctas == (tiles * key.splits if key.splits > 1 else min(tiles, select.MULTIPROCESSORS))


@pytest.mark.parametrize(("rows", "outputs", "out_dtype"), [(3, 128, torch.bfloat16), (4096, 512, torch.float32)])
def test_calls_as_they_are_launched(
    monkeypatch: pytest.MonkeyPatch, rows: int, outputs: int, out_dtype: torch.dtype
) -> None:
    """K in the chunks that a kernel counts, its grid, and nothing at all for results that are none or zero."""
    pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
    from cute_kernels.linear import launch as calls
    from cute_kernels.linear import select
    from cute_kernels.linear.call import Fp8GemmCall

    kept: list[tuple[Any, ...]] = []
    asked: list[tuple[Any, ...]] = []
    swap_ab, many_rows = select.swap_ab, select.many_rows

    def ask(choose: Any, *args: Any, **more: Any) -> Any:
        asked.append(args)
        return choose(*args, **more)

    monkeypatch.setattr(select, "swap_ab", partial(ask, swap_ab))
    monkeypatch.setattr(select, "many_rows", partial(ask, many_rows))
    monkeypatch.setattr(calls, "arch_of", lambda index: "sm_90a")
    monkeypatch.setattr(calls, "multiprocessors", lambda index: 132)
    monkeypatch.setattr(calls, "launch_key", lambda *args: kept.append(args))
    a, a_scale, weight, weight_scale = call(rows, 2, outputs, 768)
    out = torch.full((rows, 2, outputs), torch.nan, dtype=out_dtype)
    one = Fp8GemmCall(a, a_scale, weight, weight_scale, out, None, False, True)
    assert calls.why_not_fp8(one) == ""
    calls.launch_fp8(one)
    ((key, _, *tensors, grid, use_pdl),) = kept
    assert all(
        given is want for given, want in zip(tensors, (a, a_scale, weight, weight_scale, out, None), strict=True)
    )
    assert use_pdl is True
    shape = calls.OUTPUTS[str(out_dtype)], rows, 2, outputs, 6
    is_few = rows <= calls.MOST_SWAPPED_ROWS
    assert set(asked) == {("e4m3", *shape) if is_few else (*shape, 132)}
    assert (key, grid) == (swap_ab("e4m3", *shape) if is_few else many_rows(*shape, 132, may_split=True))
    for change in ({"a": a[:0], "out": out[:0]}, {"out": out[:, :0]}, {"out": out[..., :0]}):
        calls.launch_fp8(one._replace(**change))
    calls.launch_fp8(one._replace(a=a[..., :0]))
    assert len(kept) == 1
    assert not out.any(), "a sum of nothing"
