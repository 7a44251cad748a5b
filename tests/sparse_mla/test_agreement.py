# SPDX-License-Identifier: Apache-2.0
"""The four ways to call sparse attention give the same result on the same data."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cute_kernels.sparse_mla.ops import (
    sparse_mla_decode,
    sparse_mla_mixed,
    sparse_mla_prefill,
    sparse_mla_prefill_paged,
)
from tests.sparse_mla import model
from tests.sparse_mla.model import BF16, FP8, SCALE, Pool

HEADS, WINDOW, RATIO, TOPK = 8, 16, 4, 12


def bf16_copy(pool: Pool) -> Pool:
    """A plain bf16 pool with the same rows."""
    copy = Pool(BF16, pool.capacity // pool.rows, pool.rows)
    for slot in range(pool.capacity):
        copy.store(slot, pool.row(slot))
    return copy


@pytest.mark.parametrize("mode", ["window", "top-k", "dense"])
def test_all_forms_agree(mode):
    """All rows of three requests: by pages, by slots, out of one gathered buffer, over plain caches."""
    rng = np.random.default_rng(1)
    query_lens, lens = [9, 1, 20], [50, 60, 20]
    tokens = sum(query_lens)
    q = model.bf16_query((tokens, HEADS, 512), 1)
    sink = model.sink_of("mixed", HEADS)
    pool, extra = Pool(FP8, 8, 32, 2), Pool(FP8, 12, 5, 3)
    pool.put_all(range(pool.capacity))
    extra.put_all(range(extra.capacity))
    table = torch.from_numpy(rng.permutation(8)[:6].reshape(3, 2)).int()
    extra_table = torch.from_numpy(rng.permutation(12)[:9].reshape(3, 3)).int()
    kv = torch.empty(pool.capacity + extra.capacity, 1, 512, dtype=torch.bfloat16)
    for slot in range(pool.capacity):
        kv[slot, 0] = torch.from_numpy(pool.row(slot)).to(torch.bfloat16)
    for slot in range(extra.capacity):
        kv[pool.capacity + slot, 0] = torch.from_numpy(extra.row(slot)).to(torch.bfloat16)

    window = torch.full((tokens, WINDOW), -1, dtype=torch.int32)
    local = torch.full((tokens, TOPK), -1, dtype=torch.int32)
    named = torch.full((tokens, TOPK), -1, dtype=torch.int32)
    visible = torch.zeros(tokens, dtype=torch.int32)
    request = np.repeat(np.arange(3), query_lens)
    position = np.concatenate([np.arange(n - m, n) for n, m in zip(lens, query_lens, strict=True)])
    for t, (r, p) in enumerate(zip(request, position, strict=True)):
        for j, x in enumerate(range(max(p - WINDOW + 1, 0), p + 1)):
            window[t, j] = int(table[r, x // 32]) * 32 + x % 32
        if mode == "window":
            continue
        count = min((p + 1) // RATIO, 15 if mode == "dense" else TOPK)
        chosen = rng.permutation((p + 1) // RATIO)[:TOPK] if mode == "top-k" else np.arange(count)
        visible[t] = len(chosen)
        if mode == "dense":
            local, named = (x if x.shape[1] == 15 else torch.full((tokens, 15), -1).int() for x in (local, named))
        for j, x in enumerate(chosen):
            local[t, j] = int(x)
            named[t, j] = int(extra_table[r, x // 5]) * 5 + int(x) % 5

    starts, seq_lens = model.int32([0, *np.cumsum(query_lens).tolist()]), model.int32(lens)
    compressed = {} if mode == "window" else {"compressed_cache": extra.cache, "compressed_block_table": extra_table}
    out, top, lse = sparse_mla_prefill_paged(
        q,
        pool.cache,
        table,
        starts,
        seq_lens,
        SCALE,
        window_size=WINDOW,
        compress_ratio=RATIO,
        topk_indices=local if mode == "top-k" else None,
        attn_sink=sink,
        **compressed,
    )
    assert (lse != torch.inf).all()

    rows = torch.cat([named.where(named < 0, named + pool.capacity), window], dim=1)[:, None]
    flat = sparse_mla_prefill(q, kv, rows, SCALE, 512, sink)
    length = torch.from_numpy(np.minimum(position + 1, WINDOW)).int()
    by_slot = sparse_mla_decode(
        q[:, None],
        pool.cache,
        window[:, None],
        topk_length=length,
        attn_sink=sink,
        extra_k_cache=extra.cache,
        extra_indices=named[:, None],
        extra_topk_length=visible,
    )
    by_page = sparse_mla_decode(
        q[:, None],
        pool.cache,
        window[:, None],
        attn_sink=sink,
        extra_k_cache=extra.cache,
        extra_block_table=extra_table[torch.from_numpy(request)],
        extra_length=visible[:, None],
    )
    mixed = sparse_mla_mixed(
        q,
        bf16_copy(pool).cache,
        torch.cat([window, named], dim=1),
        bf16_copy(extra).cache,
        WINDOW + visible,
        seq_lens,
        starts,
        SCALE,
        1.0,
        sink,
        window_size=WINDOW,
    )
    results = [(flat[0], flat[2]), (by_slot[0][:, 0], by_slot[1][..., 0]), mixed]
    if mode != "top-k":
        results.append((by_page[0][:, 0], by_page[1][..., 0]))
    for got, got_lse in results:
        torch.testing.assert_close(got, out, rtol=1e-6, atol=0)
        torch.testing.assert_close(got_lse, lse, rtol=1e-6, atol=0)
    torch.testing.assert_close(flat[1], top, rtol=1e-6, atol=0)
