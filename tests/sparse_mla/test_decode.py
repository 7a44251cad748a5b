# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cute_kernels import formats
from cute_kernels.runtime.ops import OPS
from cute_kernels.runtime.record import record_calls
from cute_kernels.sparse_mla import reference, selection
from cute_kernels.sparse_mla.ops import merge_attention_states, sparse_mla_decode
from tests import oracle
from tests.helpers import check_op
from tests.sparse_mla import model
from tests.sparse_mla.model import BF16, FP8, INT_MAX, INT_MIN, SCALE, Pool

NOT_QUANTIZED = (0, "auto", None, 0.0, None, None, None)
"""constant_lists and what comes behind it in a call without output_quant."""


def expect(q, rows_of, scale=SCALE, sink=None):
    """Oracle results [b, s, h, 512], [b, h, s] of the rows that rows_of(b, s) lists."""
    b, s, h, _ = q.shape
    out, lse = np.zeros((b, s, h, 512)), np.zeros((b, h, s))
    sink = None if sink is None else sink.tolist()
    for i in range(b):
        for j in range(s):
            out[i, j], _, lse[i, :, j] = model.attention(oracle.to_numpy(q[i, j]), rows_of(i, j), scale, sink)
    return out, lse


def length_at(lengths, i, j):
    if lengths is None:
        return None
    return int(lengths[i, j] if lengths.dim() == 2 else lengths[i])


def random_indices(pool, shape, seed, put=True):
    """Random slots with invalid values among them; the valid ones get records."""
    rng = np.random.default_rng(seed)
    values = rng.integers(0, pool.capacity, shape)
    bad = np.array([-1, INT_MIN, INT_MAX, pool.capacity, -7])
    values = np.where(rng.random(shape) < 0.15, rng.choice(bad, shape), values)
    if put:
        pool.put_all(v for v in np.unique(values) if 0 <= v < pool.capacity)
    return torch.from_numpy(values).int()


@pytest.mark.parametrize(
    ("kv_format", "extra_format", "rows", "extra_rows", "heads", "s_q", "lengths", "sink"),
    [
        (FP8, None, 64, 0, 8, 1, "b", "none"),
        (FP8, FP8, 64, 2, 5, 2, "bs", "mixed"),
        (FP8, BF16, 53, 64, 3, 1, "none", "finite"),
        (BF16, FP8, 2, 256, 16, 3, "b", "plus"),
        (BF16, BF16, 7, 53, 1, 1, "bs", "minus"),
        (FP8, FP8, 64, 64, 128, 1, "b", "mixed"),
    ],
)
@pytest.mark.parametrize("poison", [0x7F, 0xFF])
def test_matches_oracle(kv_format, extra_format, rows, extra_rows, heads, s_q, lengths, sink, poison):
    b, topk = 3, 21
    q = model.bf16_query((b, s_q, heads, 512), 1)
    pool = Pool(kv_format, 5, rows, 2, poison, extra_stride=576)
    indices = random_indices(pool, (b, s_q, topk), 3)
    by_form = {"none": None, "b": [0, 13, 99], "bs": [[0, 21, 1][:s_q], [5, -4, 2][:s_q], [20, 22, 21][:s_q]]}
    topk_length = None if by_form[lengths] is None else model.int32(by_form[lengths])
    sink = model.sink_of(sink, heads)
    extra, kwargs, extra_length = None, {}, None
    if extra_format:
        extra = Pool(extra_format, 4, extra_rows, 4, poison)
        extra_indices = random_indices(extra, (b, s_q, 9), 5)
        extra_length = None if topk_length is None else topk_length.flip(0)
        kwargs = {
            "extra_k_cache": extra.cache,
            "extra_indices": extra_indices,
            "extra_topk_length": extra_length,
            "extra_kv_format": extra_format,
        }
    before = pool.bytes.copy()
    out, lse = sparse_mla_decode(
        q, pool.cache, indices, topk_length=topk_length, attn_sink=sink, kv_format=kv_format, **kwargs
    )

    def rows_of(i, j):
        picked = model.pick(pool, indices[i, j].tolist(), length_at(topk_length, i, j))
        if extra is not None:
            picked += model.pick(extra, extra_indices[i, j].tolist(), length_at(extra_length, i, j))
        return picked

    want, want_lse = expect(q, rows_of, sink=sink)
    model.assert_bf16(out, want)
    model.assert_fp32(lse, want_lse)
    np.testing.assert_array_equal(pool.bytes, before)


@pytest.mark.parametrize("kv_format", [FP8, BF16])
def test_dense_extra(kv_format):
    b, s_q, heads = 3, 2, 4
    q = model.bf16_query((b, s_q, heads, 512), 1)
    pool = Pool(FP8, 4, 64, 2)
    indices = random_indices(pool, (b, s_q, 6), 3)
    extra = Pool(kv_format, 9, 2, 4)
    # Row 0 has pages outside the cache inside its length; the table is a slice of a wider one that is poisoned behind.
    wide = model.int32([[4, -1, 0, 99], [8, 3, 1, 2], [5, 6, 7, 0]])
    table = torch.full((3, 7), -(10**6), dtype=torch.int32)
    table[:, :4] = wide
    length = model.int32([[7, 3], [8, 0], [50, -2]])
    extra.put_all(range(18))
    out, lse = sparse_mla_decode(
        q,
        pool.cache,
        indices,
        extra_k_cache=extra.cache,
        extra_block_table=table[:, :4],
        extra_length=length,
        extra_kv_format=kv_format,
    )

    def rows_of(i, j):
        return model.pick(pool, indices[i, j].tolist()) + model.paged(extra, wide[i].tolist(), range(int(length[i, j])))

    want, want_lse = expect(q, rows_of)
    model.assert_bf16(out, want)
    model.assert_fp32(lse, want_lse)
    named = torch.full((b, s_q, 8), -1, dtype=torch.int32)
    for i in range(b):
        for j in range(s_q):
            for e in range(min(int(length[i, j]), 8)):
                page = int(wide[i, e // 2])
                named[i, j, e] = page * 2 + e % 2 if 0 <= page < 9 else -1
    same = sparse_mla_decode(
        q, pool.cache, indices, extra_k_cache=extra.cache, extra_indices=named, extra_kv_format=kv_format
    )
    assert torch.equal(out, same[0])
    assert torch.equal(lse, same[1])


@pytest.mark.parametrize("length", [0, 1, 63, 64, 65, 130])
def test_lengths_around_tiles(length):
    """Columns at and beyond the length name a record whose bytes are all NaN."""
    q = model.bf16_query((2, 1, 4, 512), 1)
    pool = Pool(FP8, 3, 53, 2, poison=0xFF)
    slots = np.random.default_rng(1).permutation(158)[:130]
    indices = torch.full((2, 1, 130), 158, dtype=torch.int32)
    indices[:, 0, :length] = torch.from_numpy(slots[:length]).int()
    pool.put_all(slots[:length])
    out, lse = sparse_mla_decode(q, pool.cache, indices, topk_length=model.int32([length, length]))
    want, want_lse = expect(q, lambda i, j: model.pick(pool, slots[:length]))
    model.assert_bf16(out, want)
    model.assert_fp32(lse, want_lse)


@pytest.mark.parametrize("sink", ["none", "minus", "finite", "plus", "mixed"])
def test_empty_rows(sink):
    """Rows that attend to nothing, NaN queries among them, whatever makes them empty."""
    q = model.bf16_query((4, 1, 5, 512), 1)
    q[1] = torch.nan
    pool = Pool(FP8, 2, 64, poison=0x7F)
    indices = torch.full((4, 1, 3), -1, dtype=torch.int32)
    indices[2] = 5
    indices[3] = INT_MAX
    sinks = model.sink_of(sink, 5)
    out = torch.full((4, 1, 5, 512), torch.nan, dtype=torch.bfloat16)
    out, lse = sparse_mla_decode(
        q, pool.cache, indices, topk_length=model.int32([3, 3, 0, 3]), attn_sink=sinks, out=out
    )
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.equal(lse, torch.full_like(lse, torch.inf))


def test_duplicates_count_twice():
    q = model.bf16_query((1, 1, 2, 512), 1)
    pool = Pool(FP8, 1, 64, 2)
    pool.put_all([3, 9])
    out, lse = sparse_mla_decode(q, pool.cache, model.int32([[[3, 9, 3, 3]]]))
    row = [pool.row(3), pool.row(9), pool.row(3), pool.row(3)]
    want, want_lse = expect(q, lambda i, j: row)
    model.assert_bf16(out, want)
    model.assert_fp32(lse, want_lse)


def test_nan_stays_in_its_row():
    """A NaN record reaches the query rows that select it and no other; a NaN head of q reaches that head alone."""
    q = model.bf16_query((3, 1, 4, 512), 1)
    pool = Pool(FP8, 2, 64, 2, poison=0xFF)
    pool.put_all([1, 2])
    clean = model.int32([[[1, 2]], [[1, 2]], [[2, 1]]])
    want, want_lse = sparse_mla_decode(q, pool.cache, clean)
    dirty = clean.clone()
    dirty[1, 0, 1] = 77
    q[2, 0, 3] = torch.nan
    out, lse = sparse_mla_decode(q, pool.cache, dirty)
    assert torch.equal(out[0], want[0])
    assert torch.equal(lse[0], want_lse[0])
    assert out[1].isnan().any()
    assert torch.equal(out[2, :, :3], want[2, :, :3])
    assert out[2, :, 3].isnan().all()


def test_wide_selections_are_merged_from_parts(monkeypatch):
    q = model.bf16_query((3, 2, 4, 512), 1)
    pool = Pool(FP8, 4, 64, 2)
    indices = random_indices(pool, (3, 2, 50), 3)
    indices[1, 1] = -1
    indices[2, 0, :30] = -1
    lengths, sink = model.int32([50, 40, 44]), model.sink_of("mixed", 4)
    want = sparse_mla_decode(q, pool.cache, indices, topk_length=lengths, attn_sink=sink)
    monkeypatch.setattr(reference, "ROW_BUDGET", 16)
    monkeypatch.setattr(selection, "SLOT_BUDGET", 100)
    out, lse = sparse_mla_decode(q, pool.cache, indices, topk_length=lengths, attn_sink=sink)
    assert torch.equal(out, want[0])
    torch.testing.assert_close(lse, want[1], rtol=1e-7, atol=0)


def test_row_does_not_depend_on_its_batch():
    q = model.bf16_query((5, 2, 8, 512), 1)
    pool, extra = Pool(FP8, 4, 64, 2), Pool(FP8, 40, 2, 3)
    indices = random_indices(pool, (5, 2, 33), 3)
    lengths = model.int32([33, 1, 20, 0, 7])
    extra.put_all(range(80))
    table = torch.arange(40, dtype=torch.int32).view(5, 8)
    extra_length = model.int32([[3, 4], [16, 0], [1, 9], [0, 0], [5, 12]])

    def run(i, j):
        return sparse_mla_decode(
            q[i, j],
            pool.cache,
            indices[i, j],
            topk_length=lengths[i],
            extra_k_cache=extra.cache,
            extra_block_table=table[i],
            extra_length=extra_length[i, j],
        )

    everything = slice(None)
    out, lse = run(everything, everything)
    for i in range(5):
        for j in range(2):
            one, one_lse = run(slice(i, i + 1), slice(None))
            assert torch.equal(one[0, j], out[i, j])
            assert torch.equal(one_lse[0, :, j], lse[i, :, j])


def test_splits_do_not_change_the_result():
    q = model.bf16_query((2, 1, 4, 512), 1)
    pool = Pool(FP8, 4, 64, 2)
    indices = random_indices(pool, (2, 1, 70), 3)
    want = sparse_mla_decode(q, pool.cache, indices)
    for splits in ({"num_splits": 3}, {"split_tokens": 64}):
        got = sparse_mla_decode(q, pool.cache, indices, **splits)
        assert torch.equal(got[0], want[0])
        assert torch.equal(got[1], want[1])


def test_strided_arguments_and_out():
    """Columns of a wider query, rows of a wider index table, a pool inside a larger one, a slice of padded heads."""
    b, s_q, h = 2, 2, 3
    wide_q = model.bf16_query((b, s_q, h + 2, 600), 1)
    q = wide_q[:, :, 1 : 1 + h, 40:552]
    pool = Pool(FP8, 6, 64, 2)
    inner = pool.cache[1::2]
    table = torch.full((b, s_q, 40), 3 * 64 - 1, dtype=torch.int32)
    indices = table[:, :, 10:20]
    slots = np.random.default_rng(1).integers(0, 191, (b, s_q, 10))
    indices.copy_(torch.from_numpy(slots))
    outer = (slots // 64 * 2 + 1) * 64 + slots % 64
    pool.put_all(np.unique(outer))
    padded = torch.full((b, s_q, h + 5, 520), 7.0, dtype=torch.bfloat16)
    lse = torch.empty(b, h, s_q)
    out = padded[:, :, :h, :512]
    got = sparse_mla_decode(q, inner, indices, softmax_scale=0.03, out=out, lse=lse)
    assert got[0] is out
    assert got[1] is lse
    want, want_lse = expect(q, lambda i, j: model.pick(pool, outer[i, j]), scale=0.03)
    model.assert_bf16(out, want)
    model.assert_fp32(lse, want_lse)
    assert (padded[:, :, h:] == 7.0).all()
    assert (padded[..., 512:] == 7.0).all()


def test_addresses_are_64_bit():
    stride = formats.FP8_DS_MLA.page_stride(64)
    # Never written as a whole: only the touched pages take memory.
    cache = torch.empty(57_500, stride, dtype=torch.uint8).as_strided((57_500, 64, 584), (stride, 584, 1))
    assert cache.stride(0) * (cache.shape[0] - 1) > 2**31
    pool = Pool(FP8, 1, 64, 2)
    pool.put(63)
    cache[-1].copy_(pool.cache[0])
    q = model.bf16_query((1, 1, 2, 512), 1)
    out, _ = sparse_mla_decode(q, cache, model.int32([[[57_500 * 64 - 1]]]))
    model.assert_bf16(out, np.broadcast_to(pool.row(63), (1, 1, 2, 512)))


@pytest.mark.parametrize(("b", "s_q", "topk", "blocks"), [(0, 1, 4, 2), (2, 0, 4, 2), (2, 1, 0, 2), (2, 1, 4, 0)])
def test_nothing_to_do(b, s_q, topk, blocks):
    q = model.bf16_query((b, s_q, 2, 512), 1)
    pool = Pool(FP8, blocks, 64)
    table = torch.zeros(b, 0, dtype=torch.int32)
    out, lse = sparse_mla_decode(
        q,
        pool.cache,
        torch.zeros(b, s_q, topk, dtype=torch.int32)[..., : 0 if blocks else topk],
        extra_k_cache=pool.cache,
        extra_block_table=table,
        extra_length=torch.full((b, s_q), 9, dtype=torch.int32),
    )
    assert out.shape == (b, s_q, 2, 512)
    assert lse.shape == (b, 2, s_q)
    assert (out == 0).all()
    assert (lse == torch.inf).all()


@settings(max_examples=20, deadline=None)
@given(parts=st.lists(st.integers(0, 3), min_size=12, max_size=12), sink=st.sampled_from(["none", "mixed", "plus"]))
def test_partials_merge_to_the_whole(parts, sink):
    """Columns dealt to four calls in any way, some empty; their fp32 partials merge to the one-call result."""
    q = model.bf16_query((2, 1, 5, 512), 1)
    pool = Pool(FP8, 2, 64, 2)
    indices = random_indices(pool, (2, 1, 12), 3)
    sinks = model.sink_of(sink, 5)
    want = sparse_mla_decode(q, pool.cache, indices, attn_sink=sinks)
    outs, lses = torch.full((4, 2, 1, 5, 512), torch.nan), torch.full((4, 2, 5, 1), torch.nan)
    mine = torch.tensor(parts)
    for n in range(4):
        sparse_mla_decode(q, pool.cache, indices.where(mine == n, -1), out=outs[n], lse=lses[n])
    out, lse = merge_attention_states(outs, lses, sinks)
    # The partials are rounded to fp32, so a value on a bf16 boundary may go the other way.
    torch.testing.assert_close(out.float(), want[0].float(), rtol=2**-8, atol=1e-6)
    torch.testing.assert_close(lse, want[1], rtol=1e-6, atol=1e-6)


def test_partial_is_fp32():
    q = model.bf16_query((1, 1, 3, 512), 1)
    pool = Pool(FP8, 2, 64, 2)
    indices = random_indices(pool, (1, 1, 12), 3)
    out, _ = sparse_mla_decode(q, pool.cache, indices, out=torch.empty(1, 1, 3, 512))
    want, _ = expect(q, lambda i, j: model.pick(pool, indices[i, j].tolist()))
    model.assert_fp32(out, want)


def arguments(**changes):
    """Arguments of the op, schema order. The copies that opcheck makes drop the padding of pages, so they have none."""
    pool, extra = Pool(FP8, 3, 72, 2), Pool(BF16, 5, 2, 3)
    pool.put_all(range(72))
    extra.put_all(range(10))
    args = {
        "q": model.bf16_query((2, 1, 4, 512), 1),
        "k_cache": pool.cache,
        "indices": model.int32([[[1, 5, -1]], [[7, 3, 3]]]),
        "topk_length": model.int32([2, 3]),
        "attn_sink": torch.zeros(4),
        "softmax_scale": SCALE,
        "kv_format": FP8,
        "extra_k_cache": extra.cache,
        "extra_indices": model.int32([[[0, 9]], [[-1, 4]]]),
        "extra_topk_length": model.int32([[2], [1]]),
        "extra_block_table": None,
        "extra_length": None,
        "extra_kv_format": BF16,
        "num_splits": 0,
        "split_tokens": 0,
        "out": torch.zeros(2, 1, 4, 512, dtype=torch.bfloat16),
        "lse": torch.zeros(2, 4, 1),
        "workspace": None,
    }
    assert changes.keys() <= args.keys()
    return {**args, **changes}


DENSE = {"extra_indices": None, "extra_topk_length": None}
WORKSPACE = 2 * 8 * (512 * 4 + 4)
"""Bytes of the two parts of the eight heads and rows of `arguments`."""


def test_opcheck():
    check_op("sparse_mla_decode", *arguments().values(), *NOT_QUANTIZED)
    dense = arguments(**DENSE, extra_block_table=model.int32([[0, 4], [2, 2]]), extra_length=model.int32([[3], [4]]))
    check_op("sparse_mla_decode", *dense.values(), *NOT_QUANTIZED)
    split = arguments(num_splits=2, workspace=torch.zeros(WORKSPACE, dtype=torch.uint8))
    check_op("sparse_mla_decode", *split.values(), *NOT_QUANTIZED)


def test_workspace_is_left_to_the_kernels():
    """Any size will do where the number of parts may be chosen; enough of either type where it is given."""
    fp32, bytes_ = torch.full((WORKSPACE // 4,), 7.0), torch.full((WORKSPACE + 100,), 7, dtype=torch.uint8)
    for splits in ({}, {"num_splits": 2}, {"split_tokens": 64}, {"num_splits": 9}):
        for workspace in (fp32, bytes_):
            args = arguments(**splits, workspace=workspace)
            OPS["sparse_mla_decode"].overload(*args.values(), *NOT_QUANTIZED)
            assert (workspace == 7).all()
    small = arguments(workspace=torch.zeros(3))
    OPS["sparse_mla_decode"].overload(*small.values(), *NOT_QUANTIZED)
    whole = arguments(num_splits=1, split_tokens=0)
    OPS["sparse_mla_decode"].overload(*whole.values(), *NOT_QUANTIZED)
    with pytest.raises(ValueError, match=rf"workspace: expected at least {WORKSPACE} bytes .*, got 0"):
        OPS["sparse_mla_decode"].overload(*arguments(num_splits=2).values(), *NOT_QUANTIZED)


def test_cost_counts_attended_rows():
    with record_calls() as recording:
        OPS["sparse_mla_decode"].overload(*arguments().values(), *NOT_QUANTIZED)
    (call,) = recording.calls
    rows = (
        5 + 2
    )  # columns 0, 1 of the first row and all of the second; extra columns 0, 1 of the first, none of the second
    assert call.cost.flops == 2 * 4 * rows * 1024
    assert call.cost.bytes == 4 * 584 + 2 * 1024 + 2 * (2 * 4 * 512 * 2), "one row is named twice"


@pytest.mark.full
def test_compile():
    def step(q, cache, indices, lengths, extra, table, extra_length):
        return sparse_mla_decode(
            q * 2,
            cache,
            indices,
            topk_length=lengths,
            extra_k_cache=extra,
            extra_block_table=table,
            extra_length=extra_length,
        )

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=True)
    extra = Pool(FP8, 6, 2, 3)
    extra.put_all(range(12))
    for b, topk in ((2, 5), (3, 9)):
        pool = Pool(FP8, 3, 64, 2)
        args = (
            model.bf16_query((b, 1, 4, 512), b),
            pool.cache,
            random_indices(pool, (b, 1, topk), 3),
            torch.full((b,), topk - 1, dtype=torch.int32),
            extra.cache,
            torch.arange(2 * b, dtype=torch.int32).view(b, 2),
            torch.full((b, 1), 3, dtype=torch.int32),
        )
        for got, want in zip(compiled(*args), step(*args), strict=True):
            assert torch.equal(got, want)


def plain(*shape, dtype=torch.uint8):
    return torch.zeros(shape, dtype=dtype)


WIDE = plain(3, 64, 600)[..., :584]


@pytest.mark.parametrize("more", [0, 1])
def test_pages_lie_any_distance_apart(more):
    """Kernels ask for more, and say so in `why_not`."""
    args = arguments()
    moved = {name: model.apart(args[name], args[name][0].numel() + more) for name in ("k_cache", "extra_k_cache")}
    other = {**args, **moved, "out": torch.zeros_like(args["out"]), "lse": torch.zeros_like(args["lse"])}
    for each in (args, other):
        OPS["sparse_mla_decode"].overload(*each.values(), *NOT_QUANTIZED)
    assert args["out"].any()
    assert torch.equal(other["out"], args["out"])
    assert torch.equal(other["lse"], args["lse"])


@pytest.mark.parametrize(
    ("changes", "argument", "error"),
    [
        ({"q": torch.zeros(2, 1, 4, 512)}, "q", TypeError),
        ({"q": None, "out": None, "lse": None}, "q", TypeError),
        ({"q": torch.zeros(512, dtype=torch.bfloat16), "out": None, "lse": None}, "q", ValueError),
        ({"q": plain(2, 1, 4, 500, dtype=torch.bfloat16)}, "q", ValueError),
        ({"q": plain(2, 1, 129, 512, dtype=torch.bfloat16)}, "q", ValueError),
        ({"q": plain(2, 1, 0, 512, dtype=torch.bfloat16)}, "q", ValueError),
        ({"k_cache": WIDE}, "k_cache", ValueError),
        ({"k_cache": plain(3, 0, 584)}, "k_cache", ValueError),
        ({"k_cache": plain(3, 64, 512, dtype=torch.bfloat16)}, "k_cache", TypeError),
        ({"kv_format": "plain_fp8/1"}, "kv_format", ValueError),
        ({"kv_format": BF16}, "k_cache", TypeError),
        ({"indices": model.int32([[[1]]])}, "indices", ValueError),
        ({"indices": torch.zeros(2, 1, 4, dtype=torch.int64)}, "indices", TypeError),
        ({"topk_length": model.int32([1, 2, 3])}, "topk_length", ValueError),
        ({"topk_length": model.int32([[1, 2], [1, 2]])}, "topk_length", ValueError),
        ({"attn_sink": torch.zeros(5)}, "attn_sink", ValueError),
        ({"attn_sink": torch.zeros(4, dtype=torch.bfloat16)}, "attn_sink", TypeError),
        ({"extra_k_cache": None}, "extra_indices", ValueError),
        ({"extra_kv_format": "fp8"}, "extra_kv_format", ValueError),
        ({"extra_k_cache": plain(2, 2, 584)}, "extra_k_cache", TypeError),
        (
            {"extra_k_cache": plain(2, 2, 584).as_strided((2, 2, 584), (584, 584, 1)), "extra_kv_format": FP8},
            "extra_k_cache",
            ValueError,
        ),
        ({"extra_block_table": model.int32([[1], [1]])}, "extra_block_table", ValueError),
        ({"extra_length": model.int32([[1], [1]])}, "extra_length", ValueError),
        (DENSE, "extra_indices", ValueError),
        ({**DENSE, "extra_block_table": model.int32([[1], [1]])}, "extra_length", TypeError),
        ({"extra_indices": None}, "extra_topk_length", ValueError),
        ({"extra_topk_length": model.int32([[2, 1]])}, "extra_topk_length", ValueError),
        ({"num_splits": -1}, "num_splits", ValueError),
        ({"split_tokens": 65}, "split_tokens", ValueError),
        ({"split_tokens": -64}, "split_tokens", ValueError),
        ({"num_splits": 2, "split_tokens": 64}, "split_tokens", ValueError),
        ({"out": torch.zeros(2, 1, 4, 512)}, "attn_sink", ValueError),
        ({"out": torch.zeros(2, 1, 5, 512, dtype=torch.bfloat16)}, "out", ValueError),
        ({"out": torch.zeros(2, 1, 4, 512, dtype=torch.float16)}, "out", TypeError),
        ({"lse": torch.zeros(2, 1, 4)}, "lse", ValueError),
        ({"lse": torch.zeros(2, 1, 1).expand(2, 4, 1)}, "lse", ValueError),
        ({"workspace": torch.zeros(9, dtype=torch.int32)}, "workspace", TypeError),
        ({"workspace": torch.zeros(9, 9)}, "workspace", ValueError),
        ({"workspace": torch.zeros(99)[::2]}, "workspace", ValueError),
        ({"workspace": torch.zeros(2 * 8 * 513 - 1), "num_splits": 2}, "workspace", ValueError),
        ({"workspace": torch.zeros(0), "split_tokens": 6400}, "workspace", ValueError),
    ],
)
def test_bad_arguments(changes, argument, error):
    refused(arguments(**changes), argument, error)


@pytest.mark.parametrize(("value", "error"), [(3, ValueError), (-1, ValueError), (0.5, TypeError)])
def test_constant_lists_are_a_number_of_lists(value, error):
    refused(arguments() | {"constant_lists": value}, "constant_lists", error)


@pytest.mark.parametrize(
    ("changes", "argument", "error"),
    [
        ({"long_rows": "long"}, "long_rows", ValueError),
        ({"long_rows": None}, "long_rows", TypeError),
        ({"long_rows": "halves", "num_splits": 1}, "num_splits", ValueError),
        ({"long_rows": "halves", "split_tokens": 64}, "split_tokens", ValueError),
    ],
)
def test_what_long_rows_takes(changes, argument, error):
    refused(arguments() | changes, argument, error)


@pytest.mark.parametrize("long_rows", ["auto", "whole", "halves"])
def test_long_rows_mean_the_same(long_rows):
    given = {k: v for k, v in arguments().items() if k not in ("out", "lse", "workspace")}
    want, got = sparse_mla_decode(**given), sparse_mla_decode(**given, long_rows=long_rows)
    assert all(torch.equal(*both) for both in zip(got, want, strict=True))


def refused(args, argument, error):
    with pytest.raises(error, match=rf"^sparse_mla_decode: {argument}: expected "):
        sparse_mla_decode(
            **{k: v for k, v in args.items() if k not in ("q", "k_cache", "indices")},
            q=args["q"],
            k_cache=args["k_cache"],
            indices=args["indices"],
        )
