# SPDX-License-Identifier: Apache-2.0
"""Calls around the caches, norms, index tables and the output projection."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cute_kernels import formats
from cute_kernels.compat import vllm
from cute_kernels.indices import ops as indices
from cute_kernels.kv_cache import ops as kv_cache
from cute_kernels.norm import ops as norm
from cute_kernels.output import ops as output
from cute_kernels.runtime.record import record_calls
from tests import helpers, oracle
from tests.compat.agreement import agree, bits, same_values
from tests.indices.batches import int32, poisoned

TABLE = oracle.cos_sin_table(300)
QUANT = "fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert"
FULL_BF16 = "fused_deepseek_v4_qnorm_rope_kv_rope_full_cache_bf16_insert"
FULL_FP8 = "fused_deepseek_v4_qnorm_rope_kv_rope_full_cache_fp8_insert"


def pool(fmt: Any, blocks: int = 5, rows: int = 4) -> torch.Tensor:
    return helpers.poisoned_pool(fmt, blocks, rows, 512)


def flat(cache: torch.Tensor, rows: int = 4) -> torch.Tensor:
    """The view of whole pages that vLLM hands to its insert ops."""
    return cache.as_strided((cache.shape[0], rows * cache.shape[2]), (cache.stride(0), 1))


def test_insert() -> None:
    k, slots = helpers.spread((7, 512), 1), torch.tensor([3, -1, 17, 0, 8])
    args = (k, flat(pool(formats.FP8_DS_MLA)), slots, 4)
    kwargs = dict(zip(("k", "k_cache", "slot_mapping", "block_size"), args, strict=True))
    agree(vllm.quantize_and_insert_k_cache, args, kv_cache.quantize_and_insert_k_cache, kwargs)
    assert vllm.MXFP4_BLOCK_SIZE == 32


@pytest.mark.parametrize("gather_lens", [None, int32([3, 2])])
def test_gather(gather_lens: torch.Tensor | None) -> None:
    cache = pool(formats.FP8_DS_MLA)
    kv_cache.quantize_and_insert_k_cache(helpers.spread((20, 512), 2), cache, torch.arange(20), 4)
    out = torch.full((3, 9, 512), 7.0, dtype=torch.bfloat16)
    args = (out, cache, int32([6, 3]), gather_lens, int32([[2, 4, -9], [1, -9, -9]]), 4, 2)
    names = ("out", "k_cache", "seq_lens", "gather_lens", "block_table", "block_size", "offset")
    kwargs = dict(zip(names, args, strict=True))
    agree(vllm.dequantize_and_gather_k_cache, args, kv_cache.dequantize_and_gather_k_cache, kwargs)


def insert_args(fmt: Any, heads: int = 3) -> tuple[Any, ...]:
    """(q, kv, cache, slot_mapping, positions, cos_sin_cache)"""
    slots = torch.tensor([3, -1, 17, 0, 8])
    q, kv = helpers.spread((6, heads, 512), 3), helpers.spread((6, 512), 4)
    return q, kv, pool(fmt), slots, torch.tensor([0, 3, 127, 128, 7, 299]), TABLE


@pytest.mark.parametrize(
    ("name", "fmt", "cache"), [(QUANT, formats.FP8_DS_MLA, "k_cache"), (FULL_BF16, formats.PLAIN_BF16, "kv_cache")]
)
def test_inserts_that_change_q(name: str, fmt: Any, cache: str) -> None:
    args = (*insert_args(fmt), 1e-5, 4)
    names = ("q", "kv", cache, "slot_mapping", "positions", "cos_sin_cache", "eps", "block_size")
    agree(getattr(vllm, name), args, getattr(kv_cache, name), dict(zip(names, args, strict=True)))


def test_insert_that_writes_fp8_queries() -> None:
    q, kv, cache, *rest = insert_args(formats.PLAIN_FP8)
    q_fp8 = torch.zeros_like(q, dtype=torch.float8_e4m3fn)
    args = (q, kv, q_fp8, cache, *rest, torch.tensor([0.5]), torch.tensor([3.0]), 1e-5, 4)
    names = ("q", "kv", "q_fp8", "kv_cache", "slot_mapping", "positions", "cos_sin_cache")
    names += ("fp8_kv_scale", "q_scale_inv", "eps", "block_size")
    agree(getattr(vllm, FULL_FP8), args, getattr(kv_cache, FULL_FP8), dict(zip(names, args, strict=True)))


def test_full_cache_inserts_without_the_norm() -> None:
    q, kv, cache, *rest = insert_args(formats.PLAIN_BF16)
    vllm_q = q.clone()
    getattr(vllm, FULL_BF16)(vllm_q, kv, cache, *rest, 1e-5, 4, apply_q_norm=False)
    getattr(kv_cache, FULL_BF16)(q, kv, cache, *rest, 1e-5, 4, apply_q_norm=False)
    assert torch.equal(vllm_q, q)
    q, kv, cache, *rest = insert_args(formats.PLAIN_FP8)
    codes = [torch.zeros_like(q, dtype=torch.float8_e4m3fn) for _ in range(3)]
    for got, module, normed in zip(codes, (vllm, kv_cache, kv_cache), (False, False, True), strict=True):
        getattr(module, FULL_FP8)(q, kv, got, cache, *rest, *torch.ones(2, 1), 1e-5, 4, apply_q_norm=normed)
    same = [torch.equal(codes[0].view(torch.uint8), other.view(torch.uint8)) for other in codes[1:]]
    assert same == [True, False]


@pytest.mark.parametrize("padded", [3, 4, 64])
@pytest.mark.parametrize("apply_q_norm", [True, False])
def test_insert_that_returns_padded_queries(padded: int, apply_q_norm: bool) -> None:
    q, kv, cache, *rest = insert_args(formats.FP8_DS_MLA)
    in_place, other_cache, before = q.clone(), pool(formats.FP8_DS_MLA), q.clone()
    kv_cache.fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert(
        in_place, kv, other_cache, *rest, 1e-5, 4, apply_q_norm=apply_q_norm
    )
    got = vllm.fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert_v033(
        q, kv, flat(cache), *rest, padded, 1e-5, 4, apply_q_norm
    )
    assert got.shape == (6, padded, 512)
    assert torch.equal(bits(got[:, :3]), bits(in_place))
    assert not bits(got[:, 3:]).any()
    assert torch.equal(bits(q), bits(before))
    assert torch.equal(helpers.raw_bytes(cache), helpers.raw_bytes(other_cache))


@pytest.mark.full
def test_padded_insert_compiles() -> None:
    call = torch.compile(
        vllm.fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert_v033,
        fullgraph=True,
        backend="aot_eager",
        dynamic=True,
    )
    args = insert_args(formats.FP8_DS_MLA)
    want = vllm.fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert_v033(*args, 8, 1e-5, 4)
    same_values(call(*args, 8, 1e-5, 4), want)


def test_norms() -> None:
    x, wide = helpers.spread((5, 48), 5), helpers.spread((5, 80), 6)
    weight, other = helpers.spread((48,), 7), helpers.spread((80,), 8)
    args: tuple[Any, ...] = (x, wide, weight, other, 1e-5)
    names: tuple[str, ...] = ("qr", "kv", "q_weight", "kv_weight", "eps")
    agree(vllm.fused_q_kv_rmsnorm, args, norm.fused_q_kv_rmsnorm, dict(zip(names, args, strict=True)))
    previous, hidden = helpers.spread((5, 3, 48), 9), helpers.spread((48,), 10)
    args = (x, torch.tensor([0, 1, 2, 0, 5]), previous, weight, hidden, 1e-5, 3)
    names = ("inputs_embeds", "positions", "previous_hidden_states", "enorm_weight", "hnorm_weight", "eps", "hc_mult")
    agree(vllm.fused_mtp_input_rmsnorm, args, norm.fused_mtp_input_rmsnorm, dict(zip(names, args, strict=True)))
    kwargs = {"hidden_states": x, "weight": weight, "eps": 1e-5}
    agree(vllm.mtp_shared_head_rmsnorm, list(kwargs.values()), norm.mtp_shared_head_rmsnorm, kwargs)


def test_global_topk() -> None:
    args = (int32([[0, 9, 3, -1], [5, 40, -1, -1]]), int32([1, 0]), int32([[7, 2], [4, 11]]), 8)
    args = (*args, torch.tensor([True, False]))
    names = ("topk_indices", "token_to_req_indices", "block_table", "block_size", "is_valid_token")
    kwargs = dict(zip(names, args, strict=True))
    got, lens = agree(
        vllm.compute_global_topk_indices_and_lens, args, indices.compute_global_topk_indices_and_lens, kwargs
    )
    assert got.tolist() == [[32, 89, 35, -1], [61, -1, -1, -1]]
    assert lens.tolist() == [3, 0]


def test_c128a() -> None:
    buffers = poisoned(3, 256), poisoned(3), poisoned(2, 256)
    args = (torch.tensor([255, 400, 700]), 128, 2, int32([1, 0, 0]), int32([[7, 2, 5], [4, 11, 3]]), 2)
    args = (*args, torch.tensor([5, -1, 2]), *buffers, 128)
    names = ("positions", "compress_ratio", "num_decode_tokens", "token_to_req_indices", "block_table", "block_size")
    names += ("slot_mapping", "global_decode_buffer", "decode_lens_buffer", "prefill_buffer", "max_compressed_tokens")
    got = agree(
        vllm.build_c128a_topk_metadata, args, indices.build_c128a_topk_metadata, dict(zip(names, args, strict=True))
    )
    assert got[0][0, :3].tolist() == [8, 9, -1]
    assert got[1].tolist() == [2, 0]
    assert got[2][0, :6].tolist() == [0, 1, 2, 3, 4, -1]


COMBINE = ("topk_indices", "query_start_loc", "seq_lens", "gather_lens")
COMBINE += ("window_size", "compress_ratio", "topk", "M", "N")


def combine_args() -> tuple[Any, ...]:
    picks = int32([[1, 0, -1], [2, 1, 0], [0, -1, -1]])
    return picks, int32([4, 6, 7]), int32([13, 5]), int32([9, 5]), 8, 4, 3, 40, 20


@pytest.mark.parametrize("given", [False, True])
def test_combine(given: bool) -> None:
    args, kwargs = combine_args(), dict(zip(COMBINE, combine_args(), strict=True))
    if given:
        kwargs["out"] = poisoned(3, 128), poisoned(3)
        args = (*args, kwargs["out"])
    agree(vllm.combine_topk_swa_indices, args, indices.combine_topk_swa_indices, kwargs)


MIXED = ("decode_swa_indices", "decode_compressed_indices", "decode_compressed_topk_lens", "prefill_topk_indices")
MIXED += ("query_start_loc", "seq_lens", "token_to_req_indices", "swa_block_table", "swa_block_size")
MIXED += ("compressed_block_table", "compressed_block_size", "window_size", "compress_ratio", "topk")
MIXED += ("decode_compressed_indices_are_local", "decode_is_valid_token")


def mixed_args() -> tuple[Any, ...]:
    decode = int32([[5, 6, 7, -1], [9, -1, -1, -1]]), int32([[3, 0, -1], [1, -1, -1]]), None
    batch = int32([[2, 0, 1]] * 3), int32([0, 1, 2, 5]), int32([9, 2, 13]), int32([0, 1, 2, 2, 2])
    tables = int32([[3, 1, 2]] * 3), 5, int32([[8, 6, 4]] * 3), 2
    return *decode, *batch, *tables, 4, 4, 3, True, torch.tensor([True, False])


def test_mixed() -> None:
    args, kwargs = mixed_args(), dict(zip(MIXED, mixed_args(), strict=True))
    op = indices.build_flashinfer_mixed_sparse_indices
    want = agree(vllm.build_flashinfer_mixed_sparse_indices, args, op, kwargs)
    agree(vllm.build_flashinfer_mixed_sparse_indices, (*args, 5, 2), op, kwargs)
    padded = vllm.build_flashinfer_mixed_sparse_indices(*args, num_rows=9)
    assert [t.shape[0] for t in padded] == [9, 9]
    same_values([t[:5] for t in padded], want)
    same_values(vllm.build_flashinfer_mixed_sparse_indices(*args, num_rows=5), want)


def attention_output() -> tuple[Any, ...]:
    return helpers.spread((5, 6, 512), 11)[:, :4], torch.tensor([0, 4, 9, 299, 17]), TABLE, 2, 2


@pytest.mark.parametrize("packed", [False, True])
def test_quantized_output(packed: bool) -> None:
    args = (*attention_output(), 448, 64, 128, packed)
    names = ("o", "positions", "cos_sin_cache", "n_groups", "heads_per_group", "nope_dim", "rope_dim")
    names += ("quant_group_size", "tma_aligned_scales")
    kwargs = dict(zip(names, args, strict=True))
    agree(vllm.fused_inv_rope_fp8_quant, args, output.fused_inv_rope_fp8_quant, kwargs)
    agree(vllm.fused_inv_rope_fp8_quant, (*args, False), output.fused_inv_rope_fp8_quant, kwargs | {"quantize": False})


@pytest.mark.parametrize("packed", [False, True])
def test_einsum(packed: bool) -> None:
    a, a_scale = output.fused_inv_rope_fp8_quant(*attention_output(), tma_aligned_scales=packed)
    b = helpers.spread((2, 136, 1024), 12).clamp(-400, 400).to(torch.float8_e4m3fn)
    scale = torch.exp2(torch.arange(32).reshape(2, 2, 8) % 7 - 3.0)
    b_scale = output.pack_block_scales(scale, 136) if packed else scale
    out = torch.full((5, 2, 136), 7.0, dtype=torch.bfloat16)
    args = (a, a_scale, b, b_scale, out, "bhr,hdr->bhd", [1, 1, 128] if packed else [1, 128, 128])
    names = ("a", "a_scale", "b", "b_scale", "out", "equation", "recipe")
    agree(vllm.deepseek_v4_fp8_einsum, args, output.deepseek_v4_fp8_einsum, dict(zip(names, args, strict=True)))


TENSOR = torch.ones(3, dtype=torch.int32)


def refused() -> list[Any]:
    k = (helpers.spread((2, 512), 1), pool(formats.FP8_DS_MLA), torch.tensor([0, 1]), 4)
    gather = (torch.zeros(1, 2, 512, dtype=torch.bfloat16), pool(formats.FP8_DS_MLA), int32([1]), None)
    gather = (*gather, int32([[0]]), 4, 0)
    padded = (*insert_args(formats.FP8_DS_MLA), 8, 1e-5, 4)
    combine, mixed = combine_args(), mixed_args()
    not_known: list[Any] = [
        ("quantize_and_insert_k_cache", k, {"use_fnuz": True}),
        ("dequantize_and_gather_k_cache", gather, {"use_fnuz": True}),
        (QUANT + "_v033", padded, {"kv_mxfp8": True}),
        (QUANT + "_v033", padded, {"apply_q_rope": False}),
        (QUANT + "_v033", padded, {"is_q_interleaved": True}),
        ("combine_topk_swa_indices", combine, {"left_visible": TENSOR}),
        ("combine_topk_swa_indices", combine, {"right_visible": TENSOR}),
        ("combine_topk_swa_indices", combine, {"max_image_tokens": 4}),
        ("build_flashinfer_mixed_sparse_indices", mixed, {"swa_block_span": 6}),
        ("build_flashinfer_mixed_sparse_indices", mixed, {"compressed_block_span": 3}),
        ("build_flashinfer_mixed_sparse_indices", mixed, {"prefill_left_visible": TENSOR}),
        ("build_flashinfer_mixed_sparse_indices", mixed, {"prefill_right_visible": TENSOR}),
        ("build_flashinfer_mixed_sparse_indices", mixed, {"max_image_tokens": 4}),
    ]
    wrong: list[Any] = [
        ("quantize_and_insert_k_cache", k, {"is_ue8m0": False}),
        ("build_flashinfer_mixed_sparse_indices", mixed, {"num_rows": 4}),
        (QUANT + "_v033", (*padded[:6], 2, *padded[7:]), {"q_head_padded": None}),
    ]
    return [(*r, NotImplementedError) for r in not_known] + [(*r, ValueError) for r in wrong]


@pytest.mark.parametrize(("name", "args", "change", "error"), refused())
def test_what_is_refused(name: str, args: Any, change: dict[str, Any], error: type[Exception]) -> None:
    argument = next(iter(change))
    named = f"{name.removesuffix('_v033')}: {argument}: "
    keywords = {k: v for k, v in change.items() if v is not None}
    with pytest.raises(error, match=named), record_calls() as record:
        getattr(vllm, name)(*args, **keywords)
    assert not record.calls
