# SPDX-License-Identifier: Apache-2.0
"""Indices, lengths, tables, slots and positions of either width, whole buffers of slots, and scales as bytes."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from functools import wraps
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cute_kernels import formats
from cute_kernels.compat import deep_gemm, flash_mla, vllm
from cute_kernels.compat.arguments import as_int32, as_int64, key_scales, needs_int64, slots_of
from cute_kernels.kv_cache import ops as kv_cache
from tests import helpers
from tests.compat import (
    test_deep_gemm,
    test_flash_mla,
    test_flashinfer,
    test_vllm,
    test_vllm_compressor,
    test_vllm_indexer,
)
from tests.compat.agreement import bits
from tests.compat.test_pdl import Launches
from tests.goldens.compare import NO_GPU
from tests.goldens.records import on
from tests.sparse_mla import model

INT32, INT64 = torch.int32, torch.int64
WRITTEN = {
    *("out", "raw_topk_indices", "global_decode_buffer", "decode_lens_buffer", "prefill_buffer"),
    *("q", "kv", "a_scale", "b_scale", "schedule_meta", "schedule_metadata"),
}
"""Arguments whose integers are results, codes or packed scales."""

CASES: list[tuple[Callable[..., None], tuple[Any, ...]]] = [
    (test_flash_mla.test_decode_is_attention_over_both_caches, ()),
    (test_flash_mla.test_prefill_is_attention_over_rows, ()),
    (test_flashinfer.test_two_tables, (test_flashinfer.FP8, "auto")),
    (test_flashinfer.test_two_tables_in_other_shapes, ()),
    (test_deep_gemm.test_contiguous_keys, (test_deep_gemm.FP8,)),
    (test_deep_gemm.test_a_length_per_row, (test_deep_gemm.MXFP4,)),
    (test_deep_gemm.test_a_length_per_request_grows_by_one_key_per_row, (test_deep_gemm.FP8, 3)),
    (test_vllm.test_insert, ()),
    (test_vllm.test_gather, (test_vllm.int32([3, 2]),)),
    (test_vllm.test_inserts_that_change_q, (test_vllm.QUANT, formats.FP8_DS_MLA, "k_cache")),
    (test_vllm.test_inserts_that_change_q, (test_vllm.FULL_BF16, formats.PLAIN_BF16, "kv_cache")),
    (test_vllm.test_insert_that_writes_fp8_queries, ()),
    (test_vllm.test_insert_that_returns_padded_queries, (4, True)),
    (test_vllm.test_global_topk, ()),
    (test_vllm.test_c128a, ()),
    (test_vllm.test_combine, (False,)),
    (test_vllm.test_mixed, ()),
    (test_vllm.test_quantized_output, (False,)),
    (test_vllm_indexer.test_queries, ((),)),
    (test_vllm_indexer.test_contiguous_keys, ()),
    (test_vllm_indexer.test_contiguous_keys_in_the_form_of_033, (test_vllm_indexer.MXFP4,)),
    (test_vllm_indexer.test_paged_keys, (test_vllm_indexer.FP8,)),
    (test_vllm_indexer.test_gathered_keys, (test_vllm_indexer.FP8,)),
    (test_vllm_indexer.test_picks, ()),
    (test_vllm_compressor.test_stores_of_records, ("cutedsl", test_vllm_compressor.RECORDS[0])),
    (test_vllm_compressor.test_the_low_level_store_of_ratio_128, ()),
    (test_vllm_compressor.test_saved_states, ()),
    (test_vllm_compressor.test_compressed_slots_by_rows_per_page, (4, 3)),
]
"""Tests that hold calls to what they mean, with integers of the ops' own widths."""


def other_width(value: Any) -> Any:
    """The same numbers as int64 or int32, in memory with gaps."""
    if isinstance(value, SimpleNamespace):
        return SimpleNamespace(**{name: other_width(v) for name, v in vars(value).items()})
    if not isinstance(value, torch.Tensor) or value.dtype not in (INT32, INT64):
        return value
    wide = torch.zeros(*value.shape, 2, dtype=INT64 if value.dtype == INT32 else INT32)
    wide[..., 0] = value
    return wide[..., 0]


def with_other_widths(function: Callable[..., Any], changed: list[str]) -> Callable[..., Any]:
    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(function).bind(*args, **kwargs)
        for name, value in given.arguments.items():
            if name not in WRITTEN:
                given.arguments[name] = other_width(value)
                if given.arguments[name] is not value:
                    changed.append(name)
        return function(*given.args, **given.kwargs)

    return call


@pytest.mark.parametrize(("test", "args"), CASES, ids=[test.__name__ for test, _ in CASES])
def test_other_widths_mean_the_same(
    test: Callable[..., None], args: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    changed: list[str] = []
    home = importlib.import_module(test.__module__)
    for module in ("deep_gemm", "flash_mla", "flashinfer", "vllm"):
        compat = importlib.import_module(f"cute_kernels.compat.{module}")
        for name in compat.__all__:
            function = getattr(compat, name)
            if inspect.isfunction(function):
                monkeypatch.setattr(compat, name, with_other_widths(function, changed))
                if hasattr(home, name):
                    monkeypatch.setattr(home, name, getattr(compat, name))
    if test.__module__ == test_flashinfer.__name__:
        monkeypatch.setattr(home, "attention", with_other_widths(home.attention, changed))
    test(*args)
    assert changed


def test_integers_of_their_own_width_are_not_copied() -> None:
    table, slots = torch.zeros(3, 4, dtype=INT32)[:, :2], torch.zeros(5, dtype=INT64)
    assert as_int32(table) is table
    assert as_int64(slots) is slots
    assert slots_of(torch.zeros(3, 512), slots).data_ptr() == slots.data_ptr()
    for given in (None, "table", torch.zeros(3)):
        assert as_int32(given) is given
        assert as_int64(given) is given


def test_inserts_start_early_only_behind_slots_that_are_there() -> None:
    """What converts slots and positions is the launch before, and they are read ahead of the dependency."""
    slots, starts = torch.arange(5), torch.arange(5)
    for given, waits in (
        ((slots, starts), False),
        ((slots.int(), starts), True),
        ((slots, starts.int()), True),
        ((slots, torch.zeros(5, 2, dtype=INT64)[:, 0]), True),
    ):
        assert needs_int64(*given) == waits
        assert any(as_int64(value) is not value for value in given) == waits
        q, kv, cache, _, _, table = test_vllm.insert_args(formats.FP8_DS_MLA)
        with Launches() as launches:
            vllm.fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert(q[:5], kv[:5], cache, *given, table, 1e-5, 4)
        assert [use_pdl for _, use_pdl in launches.found] == [not waits]


def test_numbers_that_int32_has_not_stay_outside() -> None:
    """Cut to 32 bits they would name rows: 2^32 + 5 would be 5."""
    given = torch.tensor([2**32 + 5, -(2**32) + 5, -1, 2**31, 2**31 - 1, 7])
    assert as_int32(given).tolist() == [2**31 - 1, -1, -1, 2**31 - 1, 2**31 - 1, 7]
    case = test_flash_mla.Decode()
    indices = torch.from_numpy(case.indices).long()
    want, _ = flash_mla.flash_mla_with_kvcache(**case.args())
    outside = (indices < 0) | (indices >= case.pool.capacity)
    far = torch.where(outside, indices + 2**32, indices)
    got, _ = flash_mla.flash_mla_with_kvcache(**case.args(indices=far))
    assert torch.equal(bits(got), bits(want))


def test_a_whole_buffer_of_slots() -> None:
    """Slots behind the rows of the call name rows of others."""
    q, kv, cache, slots, *rest = test_vllm.insert_args(formats.FP8_DS_MLA)
    rows = torch.cat([slots, torch.tensor([11, 12, 13, 14])])
    other_q, other_cache = q.clone(), test_vllm.pool(formats.FP8_DS_MLA)
    kv_cache.fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert(other_q, kv, other_cache, rows[:6], *rest, 1e-5, 4)
    vllm.fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert(q, kv, cache, rows, *rest, 1e-5, 4)
    assert torch.equal(bits(q), bits(other_q))
    assert torch.equal(helpers.raw_bytes(cache), helpers.raw_bytes(other_cache))
    for call in (vllm.quantize_and_insert_k_cache, kv_cache.quantize_and_insert_k_cache):
        cache = test_vllm.pool(formats.FP8_DS_MLA)
        call(kv, cache, rows if call is vllm.quantize_and_insert_k_cache else rows[:6], 4)
        other_cache, cache = cache, other_cache
    assert torch.equal(helpers.raw_bytes(cache), helpers.raw_bytes(other_cache))


@pytest.mark.parametrize("fmt", test_deep_gemm.CONTIGUOUS, ids=test_deep_gemm.ids)
def test_keys_and_scales_as_they_were_gathered(fmt: Any) -> None:
    ranges = test_deep_gemm.Ranges(fmt)
    q, (codes, scales), *rest = ranges.args
    raw = scales[:, None].view(torch.uint8)
    padded = torch.zeros(raw.shape[0], 9, dtype=torch.uint8)
    padded[:, :4] = raw
    for given in (raw, padded[:, :4], scales[:, None], torch.stack([scales, scales], 1)[:, :1]):
        keys = codes.view(torch.uint8), given
        test_deep_gemm.same(deep_gemm.fp8_fp4_mqa_logits(q, keys, *rest), ranges.plain())
        test_deep_gemm.same(deep_gemm.fp8_fp4_mqa_logits(q, keys, *rest, True, 6), ranges.compressed(6))
        got, want = vllm.fp8_fp4_mqa_logits(q, keys, *rest, 6), ranges.compressed(6)
        inside = torch.from_numpy(want != test_deep_gemm.NEG_INF)
        test_deep_gemm.same(got[inside], want[want != test_deep_gemm.NEG_INF])
    codes, view = key_scales(codes, raw)
    assert view.data_ptr() == raw.data_ptr()


def test_results_and_memory_of_the_caller() -> None:
    case = test_flash_mla.Decode()
    want, want_lse = flash_mla.flash_mla_with_kvcache(**case.args())
    lse = torch.zeros(3, 2, test_flash_mla.HEADS).transpose(1, 2)
    got = flash_mla.flash_mla_with_kvcache(**case.args(lse=lse, workspace=torch.empty(1 << 20), use_legacy=True))
    assert got[1] is lse
    assert torch.equal(bits(got[0]), bits(want))
    assert torch.equal(lse, want_lse)
    prefill = test_flash_mla.Prefill()
    prefill.pool.put_all([19])
    logits, lse = torch.zeros(2, 4, test_flash_mla.HEADS)
    _, *got = flash_mla.flash_mla_sparse_fwd(*prefill.args, model.SCALE, max_logits=logits, lse=lse)
    assert got[0] is logits
    assert got[1] is lse
    _, want_max, want_lse = prefill.expect(model.SCALE)
    model.assert_fp32(logits, want_max)
    model.assert_fp32(lse, want_lse)


@pytest.mark.parametrize("argument", ["descale_q", "descale_k", "kv_format"])
def test_what_records_say_themselves_is_refused(argument: str) -> None:
    with pytest.raises(NotImplementedError, match=f"flash_mla_with_kvcache: {argument}: "):
        flash_mla.flash_mla_with_kvcache(**test_flash_mla.Decode().args(**{argument: torch.ones(1)}))


@pytest.mark.gpu
@NO_GPU
def test_int64_indices_in_a_graph() -> None:
    """Captured once; other indices, lengths and slots at the same addresses are what a replay reads."""
    case = test_flash_mla.Decode()
    names = ("indices", "topk_length", "extra_indices_in_kvcache", "extra_topk_length")
    args = on("cuda", case.args())
    own = {name: args[name] for name in names}
    args |= {name: torch.full_like(args[name], -1, dtype=INT64) for name in names}
    out, lse = torch.zeros_like(args["q"]), torch.zeros(3, test_flash_mla.HEADS, 2, device="cuda")
    cache = on("cuda", test_vllm.pool(formats.FP8_DS_MLA))
    k, slots = helpers.spread((6, 512), 4).cuda(), torch.full((9,), -1, dtype=INT32, device="cuda")

    def step() -> None:
        vllm.quantize_and_insert_k_cache(k, cache, slots, 4)
        flash_mla.flash_mla_with_kvcache(**args, out=out, lse=lse)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for name in names:
        args[name].copy_(own[name])
    slots[:3] = torch.tensor([3, 17, 8], dtype=INT32)
    graph.replay()
    torch.cuda.synchronize()
    want, want_lse = flash_mla.flash_mla_with_kvcache(**args | own)
    assert torch.equal(bits(out), bits(want))
    assert torch.equal(lse, want_lse)
    expected = torch.as_tensor(case.expect()[0]).double()
    # few keys: the rounding of a probability to bf16 does not average out
    torch.testing.assert_close(out.cpu().double(), expected, atol=float(expected.abs().max()) / 1024, rtol=2.01 / 128)
    other = test_vllm.pool(formats.FP8_DS_MLA)
    kv_cache.quantize_and_insert_k_cache(k.cpu(), other, torch.tensor([3, 17, 8]), 4)
    assert torch.equal(helpers.raw_bytes(on("cpu", cache)), helpers.raw_bytes(other))
