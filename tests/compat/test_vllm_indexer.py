# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from cute_kernels.compat import vllm
from cute_kernels.indexer import ops
from cute_kernels.runtime.record import record_calls
from tests import helpers, oracle
from tests.compat.agreement import agree
from tests.compat.test_deep_gemm import CONTIGUOUS, FP8, MXFP4, WIDE, Pages, Ranges, ids, int32, same
from tests.indexer.meaning import NEG_INF


@pytest.mark.parametrize("options", [(), (False, torch.float32), (True,), (True, torch.bfloat16)])
def test_queries(options: tuple[Any, ...]) -> None:
    q, weights = helpers.spread((6, 4, 128), 1), helpers.spread((6, 4), 2)
    args = (torch.tensor([0, 3, 127, 9, 1, 2]), q, oracle.cos_sin_table(200), weights, 0.25, 0.375)
    names = ("positions", "index_q", "index_q_cos_sin_cache", "index_weights")
    names += ("index_weights_softmax_scale", "index_weights_head_scale")
    kwargs = dict(zip(names, args, strict=True)) | dict(zip(("use_fp4", "weights_out_dtype"), options, strict=False))
    agree(vllm.fused_indexer_q_rope_quant, (*args, *options), ops.fused_indexer_q_rope_quant, kwargs)


def test_contiguous_keys() -> None:
    ranges = Ranges(FP8)
    (q, _), *rest = ranges.args
    same(vllm.fp8_mqa_logits(q, *rest), ranges.plain())
    same(vllm.fp8_mqa_logits(q, *rest, True, 6), ranges.compressed(6))


@pytest.mark.parametrize("fmt", CONTIGUOUS, ids=ids)
def test_contiguous_keys_in_the_form_of_033(fmt: Any) -> None:
    ranges = Ranges(fmt)
    got = vllm.fp8_fp4_mqa_logits(*ranges.args, 6)
    want = ranges.compressed(6)
    assert got.shape == want.shape
    same(got[torch.from_numpy(want != NEG_INF)], want[want != NEG_INF])
    assert vllm.fp8_fp4_mqa_logits(*ranges.args, 1).shape[1] == 1


@pytest.mark.parametrize("fmt", [FP8, MXFP4, WIDE], ids=ids)
def test_paged_keys(fmt: Any) -> None:
    pages = Pages(fmt)
    visible = [[11, 2, 7], [3, 0, 1], [0, 0, -4], [6, 6, 5]]
    args, want = pages.args(visible, 13), pages.expect(visible, 13)
    got = vllm.fp8_fp4_paged_mqa_logits(*args)
    assert got.shape == want.shape
    same(got[torch.from_numpy(want != NEG_INF)], want[want != NEG_INF])
    if fmt is FP8:
        schedule = vllm.get_paged_mqa_logits_metadata(args[3], 64, 132)
        assert schedule.shape == (133, 2)
        same(vllm.fp8_paged_mqa_logits(args[0][0], *args[1:5], schedule, 13, clean_logits=True), want)


@pytest.mark.parametrize("fmt", [FP8, MXFP4, WIDE], ids=ids)
def test_gathered_keys(fmt: Any) -> None:
    pages = Pages(fmt)
    case, total = pages.case, sum(pages.lengths)
    codes = torch.full((total + 2, case.k.shape[1]), 9, dtype=torch.uint8)
    scales = torch.full((total + 2, 4), 9, dtype=torch.uint8)
    starts = int32([0, *np.cumsum(pages.lengths).tolist()])
    vllm.cp_gather_indexer_k_quant_cache(pages.pool, codes, scales, pages.table, starts)
    np.testing.assert_array_equal(codes[:total].numpy(), case.k)
    np.testing.assert_array_equal(scales[:total].numpy(), case.k_byte)
    assert (codes[total:] == 9).all()
    assert (scales[total:] == 9).all()


def test_picks() -> None:
    logits = torch.randn(6, 20, generator=helpers.generator(4))
    out = torch.full((6, 7), 99, dtype=torch.int32)
    args: tuple[Any, ...] = (logits, int32([0, 3, 5, 0, 1, 2]), int32([20, 20, 6, 0, 9, 12]), out, 5, 20, 1, 4)
    names: tuple[str, ...] = ("logits", "row_starts", "row_ends", "out", "num_rows", "stride0", "stride1", "k")
    agree(vllm.top_k_per_row_prefill, args, ops.top_k_per_row_prefill, dict(zip(names, args, strict=True)))
    args = (logits, 2, int32([[20, 19], [3, 4], [11, 0]]), out, 6, 20, 1, 4)
    names = ("logits", "next_n", "seq_lens", "out", "num_rows", "stride0", "stride1", "k")
    agree(vllm.top_k_per_row_decode, args, ops.top_k_per_row_decode, dict(zip(names, args, strict=True)))


def test_one_length_for_several_rows_is_refused() -> None:
    pages = Pages(FP8)
    args = pages.args(list(pages.lengths), 13)
    for name, q in (("fp8_paged_mqa_logits", args[0][0]), ("fp8_fp4_paged_mqa_logits", args[0])):
        with pytest.raises(ValueError, match="context_lens"):
            getattr(vllm, name)(q, *args[1:])
    with pytest.raises(ValueError, match="seq_lens"):
        vllm.top_k_per_row_decode(torch.zeros(4, 9), 2, int32([3, 4]), int32([[0]] * 4), 4, 9, 1, 1)


@pytest.mark.parametrize(
    ("call", "argument", "error"),
    [
        (lambda: vllm.fp8_fp4_mqa_logits(*Ranges(FP8).args, True), "max_seqlen_k", TypeError),
        (lambda: vllm.fp8_fp4_mqa_logits(*Ranges(FP8).args, 0), "max_seqlen_k", ValueError),
        (
            lambda: vllm.fp8_fp4_paged_mqa_logits(*Pages(FP8).args([1, 1, 0, 1], 5), True),
            "indices",
            NotImplementedError,
        ),
        (lambda: vllm.get_paged_mqa_logits_metadata(int32([1]), 64, 8, int32([0])), "indices", NotImplementedError),
    ],
)
def test_what_is_refused(call: Any, argument: str, error: type[Exception]) -> None:
    with pytest.raises(error, match=f": {argument}: "), record_calls() as record:
        call()
    assert not record.calls
