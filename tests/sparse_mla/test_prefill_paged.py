# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from cute_kernels.runtime.ops import OPS
from cute_kernels.runtime.record import record_calls
from cute_kernels.sparse_mla.ops import sparse_mla_prefill_paged
from tests import oracle
from tests.helpers import check_op
from tests.sparse_mla import model
from tests.sparse_mla.model import BF16, FP8, INT_MAX, INT_MIN, SCALE, Pool

NOT_QUANTIZED = (None, "auto", None, 0.0, None, None, None)
"""workspace to out_scale of a call without output_quant."""

POISON_ENTRY = -(10**6)


class Batch:
    """Requests in a paged window cache and, with a ratio, in a compressed one: only rows in use have records.

    Entries of the block tables past the live length are poison, and so are those of pages that have left the window.
    """

    def __init__(
        self,
        query_lens: list[int],
        seq_lens: list[int],
        *,
        window: int = 16,
        ratio: int = 0,
        heads: int = 3,
        rows: int = 64,
        compressed_rows: int = 2,
        kv_format: str = FP8,
        compressed_format: str = FP8,
        first_row: int = 0,
        padding: int = 0,
        seed: int = 1,
    ) -> None:
        rng = np.random.default_rng(seed)
        self.query_lens, self.lens, self.window, self.ratio = query_lens, seq_lens, window, ratio
        requests = len(query_lens)
        self.tokens = sum(query_lens)
        starts = np.concatenate([[0], np.cumsum(query_lens)]) + first_row
        self.query_start_loc, self.seq_lens = model.int32(starts.tolist()), model.int32(seq_lens)
        self.q = model.bf16_query((self.tokens + padding, heads, 512), seed)
        self.pool, self.table = self._cache(rng, kv_format, rows, seq_lens, requests, seed, 1)
        for r, (query, length) in enumerate(zip(query_lens, seq_lens, strict=True)):
            oldest = max(length - query - window + 1, 0)
            self._fill(self.pool, self.table[r], range(oldest, length))
            self.table[r, : oldest // rows] = POISON_ENTRY
        self.compressed = None
        if ratio:
            entries = [length // ratio for length in seq_lens]
            self.compressed, self.compressed_table = self._cache(
                rng, compressed_format, compressed_rows, entries, requests, seed + 1, 0
            )
            for r in range(requests):
                self._fill(self.compressed, self.compressed_table[r], range(entries[r]))

    @staticmethod
    def _cache(rng, kv_format, rows, lens, requests, seed, spare):
        pages = [-(-length // rows) for length in lens]
        order = rng.permutation(sum(pages) + 2)
        table = torch.full((requests, max(pages, default=0) + spare), POISON_ENTRY, dtype=torch.int32)
        taken = 0
        for r, count in enumerate(pages):
            table[r, :count] = torch.from_numpy(order[taken : taken + count]).int()
            taken += count
        return Pool(kv_format, len(order), rows, seed), table

    @staticmethod
    def _fill(pool, table, entries):
        pool.put_all(int(table[e // pool.rows]) * pool.rows + e % pool.rows for e in entries)

    def call(self, **changes):
        kwargs = {"window_size": self.window, "kv_format": self.pool.kv_format}
        if self.compressed is not None:
            kwargs |= {
                "compressed_cache": self.compressed.cache,
                "compressed_block_table": self.compressed_table,
                "compress_ratio": self.ratio,
                "compressed_kv_format": self.compressed.kv_format,
            }
        args = {
            "q": self.q,
            "swa_cache": self.pool.cache,
            "swa_block_table": self.table,
            "query_start_loc": self.query_start_loc,
            "seq_lens": self.seq_lens,
            "sm_scale": SCALE,
        }
        return sparse_mla_prefill_paged(**(args | kwargs | changes))

    def rows(self, picks=None):
        """Records that each row attends to; picks[t] lists request-local entries, None means all visible ones."""
        t = 0
        for r, query in enumerate(self.query_lens):
            for i in range(query):
                pos = self.lens[r] - query + i
                found = []
                if self.compressed is not None:
                    visible = (pos + 1) // self.ratio
                    entries = range(visible) if picks is None else picks[t][:visible]
                    found += model.paged(
                        self.compressed, self.compressed_table[r].tolist(), [e for e in entries if 0 <= e < visible]
                    )
                window = range(max(pos - self.window + 1, 0), pos + 1)
                yield found + model.paged(self.pool, self.table[r].tolist(), window)
                t += 1

    def expect(self, picks=None, sink=None):
        """Oracle results of all rows; rows past the last request attend to nothing."""
        sink = None if sink is None else sink.tolist()
        rows = [*self.rows(picks), *([[]] * (self.q.shape[0] - self.tokens))]
        results = [model.attention(oracle.to_numpy(self.q[t]), rows[t], SCALE, sink) for t in range(len(rows))]
        return tuple(np.stack(part) for part in zip(*results, strict=True))


def assert_matches(got, want):
    model.assert_bf16(got[0], want[0])
    model.assert_fp32(got[1], want[1])
    model.assert_fp32(got[2], want[2])


@pytest.mark.parametrize("rows", [2, 53, 64, 256])
@pytest.mark.parametrize("kv_format", [FP8, BF16])
def test_window_only(rows, kv_format):
    """A new request, one mid-prefix, a decode row, an empty request; padding rows of a CUDA graph behind them."""
    batch = Batch([20, 7, 0, 1], [20, 130, 40, 64], rows=rows, kv_format=kv_format, first_row=37, padding=3)
    sink = model.sink_of("mixed", 3)
    got = batch.call(attn_sink=sink)
    assert_matches(got, batch.expect(sink=sink))
    assert (got[0][batch.tokens :] == 0).all()
    assert (got[1][batch.tokens :] == -torch.inf).all()
    assert (got[2][batch.tokens :] == torch.inf).all()


@pytest.mark.parametrize(
    ("ratio", "compressed_rows", "compressed_format"), [(4, 64, FP8), (4, 53, BF16), (128, 2, FP8), (1, 2, FP8)]
)
def test_all_visible_entries(ratio, compressed_rows, compressed_format):
    lens = [260, 9, 131] if ratio == 128 else [50, 9, 3]
    batch = Batch(
        [5, 9, 3], lens, ratio=ratio, compressed_rows=compressed_rows, compressed_format=compressed_format, padding=1
    )
    assert_matches(batch.call(), batch.expect())


def test_top_k_entries():
    """Entries of any kind: unseen, negative, past the cache, twice; only columns below the visible count matter."""
    batch = Batch([12, 6], [60, 6], ratio=4, compressed_rows=2)
    rng = np.random.default_rng(5)
    picks = rng.integers(0, 16, (18, 9))
    picks[rng.random((18, 9)) < 0.3] = -1
    picks[:, 1] = rng.choice([INT_MIN, INT_MAX, -1, 15], 18)
    wide = torch.full((18, 20), 0, dtype=torch.int32)
    wide[:, 4:13] = torch.from_numpy(picks)
    sink = model.sink_of("finite", 3)
    got = batch.call(topk_indices=wide[:, 4:13], attn_sink=sink)
    assert_matches(got, batch.expect(picks.tolist(), sink))


def test_no_top_k_columns():
    batch = Batch([4], [20], ratio=4)
    got = batch.call(topk_indices=torch.zeros(4, 0, dtype=torch.int32))
    assert_matches(got, batch.expect([[]] * 4))


@pytest.mark.parametrize("ratio", [0, 4])
def test_chunks_give_the_same_bits(ratio):
    """A prompt in one go, in two chunks and token by token."""
    batch = Batch([40], [40], ratio=ratio, heads=8, window=16)
    whole = batch.call()
    for edges in ([0, 13, 40], list(range(41))):
        for first, last in itertools.pairwise(edges):
            part = batch.call(
                q=batch.q[first:last], query_start_loc=model.int32([0, last - first]), seq_lens=model.int32([last])
            )
            for got, want in zip(part, whole, strict=True):
                assert torch.equal(got, want[first:last])


def test_bad_metadata_is_harmless():
    """Contexts shorter than their queries, beyond the table, far away; pages outside the cache; decreasing starts."""
    batch = Batch([4, 4], [4, 30], ratio=4)
    want = batch.call()
    short = batch.call(seq_lens=model.int32([2, 30]))
    assert (short[0][:2] == 0).all()
    assert (short[2][:2] == torch.inf).all()
    assert torch.equal(short[0][4:], want[0][4:])
    for lens in ([INT_MAX, 30], [INT_MIN, 30], [-5, 30]):
        far = batch.call(seq_lens=model.int32(lens))
        assert torch.equal(far[0][4:], want[0][4:])
        assert (far[0][:4] == 0).all() or lens[0] == INT_MAX
    table = batch.table.clone()
    table[0] = INT_MAX
    lost = batch.call(swa_block_table=table, compressed_block_table=torch.full_like(batch.compressed_table, 10**6))
    assert (lost[0][:4] == 0).all()
    assert (lost[2][:4] == torch.inf).all()
    for starts in ([0, -4, 8], [8, 0, 4], [INT_MAX, INT_MIN, 0]):
        batch.call(query_start_loc=model.int32(starts))


def test_window_larger_than_everything():
    batch = Batch([6, 3], [6, 40], window=1000)
    want = batch.expect()
    assert_matches(batch.call(), want)
    assert_matches(batch.call(window_size=2**31 - 1), want)


def test_window_of_one():
    batch = Batch([6], [6], window=1)
    out, _, _ = batch.call()
    own = np.stack([model.paged(batch.pool, batch.table[0].tolist(), [p])[0] for p in range(6)])
    model.assert_bf16(out, np.repeat(own[:, None], 3, axis=1))


@pytest.mark.parametrize("padding", [0, 3])
def test_no_requests(padding):
    batch = Batch([1], [1])
    out, max_logits, lse = batch.call(
        q=model.bf16_query((padding, 3, 512), 1),
        query_start_loc=model.int32([5]),
        seq_lens=torch.zeros(0, dtype=torch.int32),
        swa_block_table=torch.zeros(0, 4, dtype=torch.int32),
    )
    assert out.shape == (padding, 3, 512)
    assert (out == 0).all()
    assert (max_logits == -torch.inf).all()
    assert (lse == torch.inf).all()


def test_out():
    batch = Batch([4], [9])
    padded = torch.full((4, 5, 512), 7.0, dtype=torch.bfloat16)
    top, lse = torch.empty(4, 3), torch.empty(4, 3)
    got = batch.call(out=padded[:, :3], max_logits=top, lse=lse)
    assert got[0].data_ptr() == padded.data_ptr()
    assert got[1] is top
    assert got[2] is lse
    assert_matches(got, batch.expect())
    assert (padded[:, 3:] == 7.0).all()


def arguments(**changes):
    """Arguments of the op, schema order. The copies that opcheck makes drop the padding of pages, so they have none."""
    batch = Batch([2, 3], [9, 20], ratio=4, rows=72, compressed_format=BF16)
    args = {
        "q": batch.q,
        "swa_cache": batch.pool.cache,
        "swa_block_table": batch.table,
        "query_start_loc": batch.query_start_loc,
        "seq_lens": batch.seq_lens,
        "sm_scale": SCALE,
        "window_size": 8,
        "compressed_cache": batch.compressed.cache,
        "compressed_block_table": batch.compressed_table,
        "compress_ratio": 4,
        "topk_indices": model.int32([[0, 1], [1, -1], [3, 2], [9, 0], [4, 4]]),
        "attn_sink": torch.zeros(3),
        "kv_format": FP8,
        "compressed_kv_format": BF16,
        "num_splits": 0,
        "split_tokens": 0,
        "out": torch.zeros(5, 3, 512, dtype=torch.bfloat16),
        "max_logits": torch.zeros(5, 3),
        "lse": torch.zeros(5, 3),
    }
    assert changes.keys() <= args.keys() | {"d_v"}
    return {**args, **changes}


def test_opcheck():
    check_op("sparse_mla_prefill_paged", *arguments().values(), *NOT_QUANTIZED)
    alone = {"compressed_cache": None, "compressed_block_table": None, "topk_indices": None}
    check_op("sparse_mla_prefill_paged", *arguments(**alone, attn_sink=None).values(), *NOT_QUANTIZED)


def test_cost_counts_attended_rows():
    with record_calls() as recording:
        OPS["sparse_mla_prefill_paged"].overload(*arguments().values(), *NOT_QUANTIZED)
    (call,) = recording.calls
    window, entries = 5 * 8, 2 + 1 + 2 + 1 + 2
    assert call.cost.flops == 2 * 3 * (window + entries) * 1024
    # each row moves once: positions 0 to 8 and 10 to 19; entries 0 and 1, and 0, 2, 3 and 4
    assert call.cost.bytes == (9 + 10) * 584 + (2 + 4) * 1024 + 2 * (5 * 3 * 512 * 2)


@pytest.mark.full
def test_compile():
    def step(q, cache, table, starts, lens, compressed, compressed_table, topk):
        return sparse_mla_prefill_paged(
            q * 2,
            cache,
            table,
            starts,
            lens,
            SCALE,
            window_size=8,
            compressed_cache=compressed,
            compressed_block_table=compressed_table,
            compress_ratio=4,
            topk_indices=topk,
        )

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=True)
    for query_lens, lens in (([2, 3], [9, 20]), ([4, 1, 2], [30, 6, 12])):
        batch = Batch(query_lens, lens, ratio=4)
        topk = torch.arange(batch.tokens * 3, dtype=torch.int32).view(-1, 3) % 5
        args = (
            batch.q,
            batch.pool.cache,
            batch.table,
            batch.query_start_loc,
            batch.seq_lens,
            batch.compressed.cache,
            batch.compressed_table,
            topk,
        )
        for got, want in zip(compiled(*args), step(*args), strict=True):
            assert torch.equal(got, want)


@pytest.mark.parametrize("more", [0, 1])
def test_pages_lie_any_distance_apart(more):
    """Kernels ask for more, and say so in `why_not`."""
    want, other = arguments(), arguments()
    for name in ("swa_cache", "compressed_cache"):
        other[name] = model.apart(other[name], other[name][0].numel() + more)
    for each in (want, other):
        OPS["sparse_mla_prefill_paged"].overload(*each.values(), *NOT_QUANTIZED)
    assert want["out"].any()
    assert torch.equal(other["out"], want["out"])


@pytest.mark.parametrize(
    ("changes", "argument", "error"),
    [
        ({"q": torch.zeros(5, 3, 512)}, "q", TypeError),
        ({"q": None, "out": None}, "q", TypeError),
        ({"kv_format": "plain_fp8/1"}, "kv_format", ValueError),
        ({"swa_block_table": model.int32([[1]])}, "swa_block_table", ValueError),
        ({"swa_block_table": torch.zeros(2, 2, dtype=torch.int64)}, "swa_block_table", TypeError),
        ({"query_start_loc": model.int32([0, 5])}, "query_start_loc", ValueError),
        ({"query_start_loc": torch.zeros(3, dtype=torch.int64)}, "query_start_loc", TypeError),
        ({"seq_lens": torch.zeros(2, dtype=torch.int64)}, "seq_lens", TypeError),
        ({"window_size": 0}, "window_size", ValueError),
        ({"compressed_cache": None}, "compressed_block_table", ValueError),
        ({"compressed_cache": None, "compressed_block_table": None}, "topk_indices", ValueError),
        ({"compressed_block_table": None}, "compressed_block_table", TypeError),
        ({"compressed_kv_format": FP8}, "compressed_cache", TypeError),
        ({"compressed_kv_format": "x"}, "compressed_kv_format", ValueError),
        ({"compress_ratio": 0}, "compress_ratio", ValueError),
        ({"topk_indices": model.int32([[1]])}, "topk_indices", ValueError),
        ({"attn_sink": torch.zeros(2)}, "attn_sink", ValueError),
        ({"out": torch.zeros(5, 3, 512)}, "out", TypeError),
        ({"max_logits": torch.zeros(5, 2)}, "max_logits", ValueError),
        ({"lse": torch.zeros(3, 5)}, "lse", ValueError),
    ],
)
def test_bad_arguments(changes, argument, error):
    with pytest.raises(error, match=rf"^sparse_mla_prefill_paged: {argument}: expected "):
        sparse_mla_prefill_paged(**arguments(**changes))
