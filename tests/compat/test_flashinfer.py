# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from cute_kernels.compat.arguments import accept_only, required
from cute_kernels.compat.flashinfer import trtllm_batch_decode_sparse_mla_dsv4 as attention
from cute_kernels.runtime.record import record_calls
from tests import oracle
from tests.compat.agreement import same_values
from tests.sparse_mla import model
from tests.sparse_mla.model import BF16, FP8, INT_MAX, INT_MIN, PLAIN_FP8, Pool

W = 128
HEADS = 3
SCALE, OUT_SCALE = 0.05, 0.75


class Mixed:
    """Requests with one table for both caches; records that no row may look at are NaN."""

    def __init__(self, kv_format: str = BF16, query_lens: tuple[int, ...] = (2, 1, 3), extra_stride: int = 0) -> None:
        rng = np.random.default_rng(1)
        self.query_lens, self.seq_lens = query_lens, (140, 1, 6)
        n = sum(query_lens)
        self.query = model.bf16_query((n, HEADS, 512), 1)
        if kv_format == PLAIN_FP8:
            self.query = self.query.to(torch.float8_e4m3fn)
        self.pool = Pool(kv_format, 5, 40, 2, extra_stride=extra_stride)
        self.extra = Pool(kv_format, 6, 7, 3, extra_stride=extra_stride)
        window = rng.integers(0, self.pool.capacity - 1, (n, W))
        picks = rng.integers(0, self.extra.capacity - 1, (n, 8))
        window[:, 1], picks[:, 2] = INT_MIN, INT_MAX
        self.lens = rng.integers(W, W + 9, n)
        self.positions = [
            length - count + i for count, length in zip(query_lens, self.seq_lens, strict=True) for i in range(count)
        ]
        for t in range(n):
            window[t, self.positions[t] + 1 :] = self.pool.capacity - 1
            picks[t, self.lens[t] - W :] = self.extra.capacity - 1
        self.indices = np.concatenate([window, picks], axis=1)
        for pool, part in ((self.pool, window), (self.extra, picks)):
            pool.put_all(v for v in np.unique(part) if 0 <= v < pool.capacity - 1)

    def args(self, **changes: Any) -> dict[str, Any]:
        return {
            "query": self.query,
            "swa_kv_cache": self.pool.cache,
            "workspace_buffer": None,
            "sparse_indices": torch.from_numpy(self.indices).int(),
            "compressed_kv_cache": self.extra.cache,
            "sparse_topk_lens": torch.from_numpy(self.lens).int(),
            "seq_lens": model.int32(self.seq_lens),
            "bmm1_scale": SCALE,
            "bmm2_scale": OUT_SCALE,
            "cum_seq_lens_q": model.int32([0, *np.cumsum(self.query_lens).tolist()]),
            "max_q_len": max(self.query_lens),
            **changes,
        }

    def expect(self, sink: Any = None) -> np.ndarray:
        outs = []
        for t, row in enumerate(self.indices):
            rows = model.pick(self.pool, row[:W], self.positions[t] + 1)
            rows += model.pick(self.extra, row[W : self.lens[t]])
            outs.append(model.attention(oracle.to_numpy(self.query[t].float()), rows, SCALE, sink)[0] * OUT_SCALE)
        return np.stack(outs)


@pytest.mark.parametrize("kv_format", [BF16, PLAIN_FP8])
def test_one_table(kv_format: str) -> None:
    case = Mixed(kv_format)
    sinks = model.sink_of("mixed", HEADS)
    assert sinks is not None
    workspace = torch.full((64,), 9, dtype=torch.uint8)
    got = attention(**case.args(sinks=sinks, workspace_buffer=workspace, enable_pdl=True, backend="trtllm-gen"))
    model.assert_bf16(got, case.expect(sinks.tolist()))
    assert (workspace == 9).all()


@pytest.mark.parametrize(("kv_layout", "head"), [("HND", 1), ("NHD", 2)])
def test_both_layouts(kv_layout: str, head: int) -> None:
    case = Mixed()
    caches = {"swa_kv_cache": case.pool.cache, "compressed_kv_cache": case.extra.cache}
    got = attention(**case.args(**{k: v.unsqueeze(head) for k, v in caches.items()}, kv_layout=kv_layout))
    model.assert_bf16(got, case.expect())
    with pytest.raises(ValueError, match="swa_kv_cache"):
        attention(**case.args(swa_kv_cache=case.pool.cache.unsqueeze(3 - head), kv_layout=kv_layout))


def test_dense_queries() -> None:
    case = Mixed(query_lens=(2, 2, 2))
    case.seq_lens = (140, 2, 6)
    case.positions = [138, 139, 0, 1, 4, 5]
    case.lens[:] = W  # the window's columns past a position are not NaN here
    case.pool.put_all(v for v in np.unique(case.indices[:, :W]) if 0 <= v < case.pool.capacity)
    dense = {"query": case.query.view(3, 2, HEADS, 512), "cum_seq_lens_q": None, "seq_lens": model.int32([140, 2, 6])}
    got = attention(**case.args(**dense))
    assert got.shape == (3, 2, HEADS, 512)
    model.assert_bf16(got.flatten(0, 1), case.expect())
    memory = torch.full((3, 2, HEADS + 1, 512), 7.0, dtype=torch.bfloat16)
    out = memory[:, :, :HEADS]
    assert attention(**case.args(**dense, out=out)) is out
    model.assert_bf16(out.flatten(0, 1), case.expect())
    assert (memory[:, :, HEADS:] == 7).all()


def test_window_only() -> None:
    case = Mixed()
    indices = torch.from_numpy(case.indices[:, :W]).int()
    case.lens[:] = W
    lens = model.int32(case.lens.tolist())
    for cache in (None, case.pool.cache):
        got = attention(**case.args(sparse_indices=indices, sparse_topk_lens=lens, compressed_kv_cache=cache))
        model.assert_bf16(got, case.expect())


@pytest.mark.parametrize("kv_format", [BF16, PLAIN_FP8])
def test_padded_pages_by_either_count(kv_format: str) -> None:
    """An index of 0.33 counts rows of memory, padding included; the other counts rows of the cache."""
    row_bytes = 1024 if kv_format == BF16 else 512
    case = Mixed(kv_format, extra_stride=3 * row_bytes)
    want = case.expect()
    model.assert_bf16(attention(**case.args(sparse_indices_are_storage_offsets=False)), want)
    offsets = case.indices.copy()
    for pool, columns in ((case.pool, slice(0, W)), (case.extra, slice(W, None))):
        span = pool.page_stride // row_bytes
        assert span > pool.rows
        part = offsets[:, columns]
        named = (part >= 0) & (part < pool.capacity)
        part[named] = part[named] // pool.rows * span + part[named] % pool.rows
    changes = {"sparse_indices": torch.from_numpy(offsets).int(), "sparse_indices_are_storage_offsets": True}
    model.assert_bf16(attention(**case.args(**changes)), want)
    with pytest.raises(ValueError, match="sparse_indices_are_storage_offsets"):
        attention(**case.args())


def test_dense_pages_need_no_word_about_offsets() -> None:
    case = Mixed()
    for said in (None, False, True):
        model.assert_bf16(attention(**case.args(sparse_indices_are_storage_offsets=said)), case.expect())


def test_padding_must_hold_whole_rows() -> None:
    case = Mixed(extra_stride=512)
    with pytest.raises(ValueError, match="_kv_cache: expected a page stride that is a multiple of 512 elements"):
        attention(**case.args(sparse_indices_are_storage_offsets=True))


class Two:
    """One row per token, a table for each cache."""

    def __init__(self, kv_format: str) -> None:
        rng = np.random.default_rng(6)
        self.query = model.bf16_query((4, HEADS, 512), 6)
        self.pool, self.extra = Pool(kv_format, 3, 64, 7), Pool(kv_format, 9, 2, 8)
        self.indices, self.picks = rng.integers(0, 190, (4, 9)), rng.integers(0, 17, (4, 5))
        self.lens, self.pick_lens = [9, 0, 4, 1], [5, 0, 0, 3]
        for pool, part, lens in ((self.pool, self.indices, self.lens), (self.extra, self.picks, self.pick_lens)):
            pool.put_all(v for t in range(4) for v in part[t, : lens[t]])

    def args(self, **changes: Any) -> dict[str, Any]:
        return {
            "query": self.query,
            "swa_kv_cache": self.pool.cache.unsqueeze(2),
            "workspace_buffer": None,
            "sparse_indices": torch.from_numpy(self.indices).int(),
            "compressed_kv_cache": self.extra.cache.unsqueeze(2),
            "bmm1_scale": SCALE,
            "kv_layout": "NHD",
            "swa_topk_lens": model.int32(self.lens),
            "extra_sparse_indices": torch.from_numpy(self.picks).int(),
            "extra_sparse_topk_lens": model.int32(self.pick_lens),
            **changes,
        }

    def expect(self, extra: bool = True, sink: Any = None) -> np.ndarray:
        outs = []
        for t in range(4):
            rows = model.pick(self.pool, self.indices[t], self.lens[t])
            rows += model.pick(self.extra, self.picks[t], self.pick_lens[t]) if extra else []
            outs.append(model.attention(oracle.to_numpy(self.query[t]), rows, SCALE, sink)[0])
        return np.stack(outs)


@pytest.mark.parametrize("backend", ["auto", "sparse"])
@pytest.mark.parametrize("kv_format", [FP8, BF16])
def test_two_tables(kv_format: str, backend: str) -> None:
    case = Two(kv_format)
    sinks = model.sink_of("mixed", HEADS)
    assert sinks is not None
    out = torch.empty_like(case.query)
    assert attention(**case.args(backend=backend, sinks=sinks, out=out)) is out
    model.assert_bf16(out, case.expect(sink=sinks.tolist()))
    assert (out[1] == 0).all()


def test_two_tables_in_other_shapes() -> None:
    case = Two(FP8)
    by_token = {
        "sparse_indices": torch.from_numpy(case.indices).int()[:, None],
        "extra_sparse_indices": torch.from_numpy(case.picks).int()[:, None],
    }
    model.assert_bf16(attention(**case.args(**by_token)), case.expect())
    dense = {name: value.view(2, 2, -1) for name, value in by_token.items()}
    got = attention(**case.args(**dense, query=case.query.view(2, 2, HEADS, 512)))
    model.assert_bf16(got.flatten(0, 1), case.expect())


def test_one_of_two_tables() -> None:
    case = Two(FP8)
    got = attention(**case.args(extra_sparse_indices=None, extra_sparse_topk_lens=None))
    model.assert_bf16(got, case.expect(extra=False))


TENSOR = torch.ones(4, dtype=torch.int32)


@pytest.mark.parametrize(
    ("argument", "value", "error"),
    [
        ("backend", "cute-dsl", NotImplementedError),
        ("backend", "sparse", (TypeError, NotImplementedError)),
        ("swa_topk_lens", TENSOR, NotImplementedError),
        ("extra_sparse_indices", TENSOR, NotImplementedError),
        ("extra_sparse_topk_lens", TENSOR, NotImplementedError),
        ("hca_swa_indices", TENSOR, NotImplementedError),
        ("hca_compressed_block_tables", TENSOR, NotImplementedError),
        ("hca_seq_lens", TENSOR, NotImplementedError),
        ("hca_is_causal", False, NotImplementedError),
        ("hca_use_persistent", True, NotImplementedError),
        ("hca_sparse_indices_format", "compressed-page-aligned", NotImplementedError),
        ("dsv4_inv_rope_cos_sin_cache", TENSOR, NotImplementedError),
        ("dsv4_output_scale", TENSOR, NotImplementedError),
        ("sparse_topk_lens_offset", 128, NotImplementedError),
        ("kv_cache_format", "nvfp4", NotImplementedError),
        ("bmm1_scale", torch.ones(1), NotImplementedError),
        ("bmm2_scale", torch.ones(1), NotImplementedError),
        ("kv_layout", "NDH", ValueError),
        ("sparse_indices", None, TypeError),
        ("sparse_topk_lens", None, TypeError),
        ("seq_lens", None, TypeError),
        ("cum_seq_lens_q", None, TypeError),
        ("query", torch.zeros(2, 512, dtype=torch.bfloat16), ValueError),
        ("query", torch.zeros(2, 3, 512), TypeError),
        ("swa_kv_cache", None, TypeError),
        ("swa_kv_cache", torch.zeros(2, 3, 584, dtype=torch.uint8), TypeError),
        ("out", torch.zeros(1, HEADS, 512, dtype=torch.bfloat16), ValueError),
    ],
)
def test_what_is_refused(argument: str, value: Any, error: type[Exception]) -> None:
    named = "swa_topk_lens" if argument == "backend" and value == "sparse" else argument
    if argument == "swa_topk_lens":
        changes = {argument: value, "backend": "trtllm-gen"}
    else:
        changes = {argument: value}
    with pytest.raises(error, match=f"trtllm_batch_decode_sparse_mla_dsv4: {named}: "), record_calls() as record:
        attention(**Mixed().args(**changes) | ({"bmm2_scale": 1.0} if named == "swa_topk_lens" else {}))
    assert not record.calls


@pytest.mark.parametrize(
    ("argument", "value", "error"),
    [
        ("bmm2_scale", 0.5, NotImplementedError),
        ("sparse_indices_are_storage_offsets", True, NotImplementedError),
        ("compressed_kv_cache", None, TypeError),
    ],
)
def test_what_two_tables_refuse(argument: str, value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=f"trtllm_batch_decode_sparse_mla_dsv4: {argument}: "):
        attention(**Two(FP8).args(**{argument: value}))


def test_dense_queries_have_no_starts_and_a_mergeable_out() -> None:
    case = Mixed(query_lens=(2, 2, 2))
    query = case.query.view(3, 2, HEADS, 512)
    with pytest.raises(NotImplementedError, match="cum_seq_lens_q"):
        attention(**case.args(query=query))
    out = torch.empty(3, 3, HEADS, 512, dtype=torch.bfloat16)[:, :2]
    with pytest.raises(ValueError, match="out: expected leading dimensions that can be merged"):
        attention(**case.args(query=query, cum_seq_lens_q=None, out=out))


@pytest.mark.full
def test_compiles() -> None:
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager", dynamic=True)
    case = Mixed(extra_stride=1024)
    for said in (False, True):
        args = case.args(sparse_indices_are_storage_offsets=said)
        same_values(compiled(**args), attention(**args))
    two = Two(FP8)
    model.assert_bf16(compiled(**two.args()), two.expect())


def test_arguments_that_must_be_there_may_have_any_strides() -> None:
    lengths = torch.zeros(4, 3, dtype=torch.int32)[:, 1]
    for given in (lengths, lengths.long()):
        got = required("op", "lengths", given)
        assert (got.dtype, got.stride(), got.tolist()) == (torch.int32, (1,), lengths.tolist())
    for wrong in (None, lengths.float()):
        with pytest.raises(TypeError, match=r"^op: lengths: expected "):
            required("op", "lengths", wrong)


def test_one_value_alone_is_accepted() -> None:
    tensor = torch.zeros(1)
    accept_only("op", None, a=None)
    accept_only("op", 0, a=0, b=False)
    accept_only("op", tensor, a=tensor)
    for supported, given in ((None, 0), (0, None), (0, tensor), (0, 1)):
        with pytest.raises(NotImplementedError, match=r"^op: b: expected .*, the only value supported, got "):
            accept_only("op", supported, a=supported, b=given)
