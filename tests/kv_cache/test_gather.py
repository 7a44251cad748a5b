# SPDX-License-Identifier: Apache-2.0
"""dequantize_and_gather_k_cache: exact values, and everything it must leave alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cute_kernels import formats
from cute_kernels.kv_cache.ops import dequantize_and_gather_k_cache, quantize_and_insert_k_cache
from cute_kernels.runtime.record import record_calls
from tests import helpers, oracle
from tests.kv_cache import expected

FMT = formats.FP8_DS_MLA
OP = "dequantize_and_gather_k_cache"
INT32_MAX = 2**31 - 1
SENTINEL = -77.0


def random_pool(num_blocks: int, block_size: int, extra: int = 0, seed: int = 0) -> torch.Tensor:
    """Any codes but NaN, scales around 1, rope of any finite kind: not only what an insert would write."""
    cache = helpers.poisoned_pool(FMT, num_blocks, block_size, extra)
    g = helpers.generator(seed)
    n = num_blocks * block_size
    data = torch.randint(0, 256, (n, 576), generator=g, dtype=torch.uint8)
    data[:, :448][(data[:, :448] & 0x7F) == 0x7F] = 0x38
    data[:, 448:] = torch.randn(n, 64, generator=g).bfloat16().view(torch.uint8)
    scales = torch.randint(105, 140, (n, 8), generator=g, dtype=torch.uint8)
    FMT.write_fields(cache, block_size, torch.arange(n), data, scales)
    return cache


def want(
    out: torch.Tensor,
    cache: torch.Tensor,
    seq_lens: list[int],
    gather_lens: list[int] | None,
    table: list[list[int]],
    block_size: int,
    offset: int,
) -> np.ndarray:
    """float64 image of `out` after the call."""
    image = oracle.to_numpy(out)
    for r, seq_len in enumerate(seq_lens):
        length = seq_len if gather_lens is None else min(gather_lens[r], seq_len)
        for i in range(max(length, 0)):
            row, p = offset + i, seq_len - length + i
            if row >= image.shape[1]:
                break
            page = table[r][p // block_size] if p // block_size < len(table[r]) else -1
            image[r, row] = 0
            if 0 <= page < cache.shape[0]:
                image[r, row] = expected.read_mla(cache, block_size, page * block_size + p % block_size)
    return image


def check(
    cache: torch.Tensor,
    seq_lens: list[int],
    gather_lens: list[int] | None,
    table: list[list[int]],
    block_size: int,
    offset: int = 0,
    shape: tuple[int, int] | None = None,
) -> None:
    rows, width = shape or (len(seq_lens), max([*seq_lens, 0]) + offset)
    out = torch.full((rows, width, 512), SENTINEL, dtype=torch.bfloat16)
    image = want(out, cache, seq_lens, gather_lens, table, block_size, offset)
    before = helpers.raw_bytes(cache).clone()
    block_table = torch.tensor(table, dtype=torch.int32).reshape(len(seq_lens), -1 if seq_lens else 1)
    lens = None if gather_lens is None else torch.tensor(gather_lens, dtype=torch.int32)
    seqs = torch.tensor(seq_lens, dtype=torch.int32)
    assert dequantize_and_gather_k_cache(out, cache, seqs, lens, block_table, block_size, offset) is None
    np.testing.assert_array_equal(oracle.to_numpy(out), image)
    assert torch.equal(helpers.raw_bytes(cache), before)


@pytest.mark.parametrize("extra", [0, 64, 1152])
@pytest.mark.parametrize("block_size", [64, 2, 7])
def test_whole_requests(block_size: int, extra: int) -> None:
    cache = random_pool(200 // block_size + 1, block_size, extra)
    pages = torch.randperm(cache.shape[0], generator=helpers.generator(1)).tolist()
    cut = [5 * cache.shape[0] // 10, 8 * cache.shape[0] // 10]
    table = [pages[: cut[0]], pages[cut[0] : cut[1]], pages[cut[1] :]]
    seq_lens = [len(p) * block_size - 1 for p in table]
    width = max(len(p) for p in table)
    check(cache, seq_lens, None, [p + [-1_000_000] * (width - len(p)) for p in table], block_size)


def test_the_last_rows_at_an_offset() -> None:
    cache = random_pool(6, 64)
    table = [[4, 1, 5], [0, -1_000_000, -1_000_000], [2, 3, -1_000_000]]
    check(cache, [130, 1, 128], [67, 1, 0], table, 64, offset=9, shape=(5, 90))


def test_unused_table_entries_may_be_anything() -> None:
    cache = random_pool(2, 64)
    for poison in (-1_000_000, -1, 2, INT32_MAX, -(2**31)):
        check(cache, [64, 3], None, [[1, poison], [0, poison]], 64)


def test_bad_data_is_harmless() -> None:
    """Pages outside the pool, lengths that are negative, longer than the table or than out."""
    cache = random_pool(2, 4)
    table = [[0, -1, 1], [1, INT32_MAX, 0], [0, 2, -(2**31)], [0, 1, 0]]
    check(cache, [12, 12, 12, 12], None, table, 4)
    check(cache, [INT32_MAX, -5, 0, 14], [3, 4, 5, 14], table, 4, shape=(4, 16))
    check(cache, [9, 9, 9, 9], [-1, -(2**31), INT32_MAX, 20], table, 4, shape=(4, 16))
    check(cache, [12, 5, 12, 1], None, table, 4, offset=6, shape=(4, 9))
    check(cache, [INT32_MAX] * 4, [INT32_MAX] * 4, table, 4, offset=2, shape=(4, 20))
    check(cache, [12, 5, 12, 1], None, table, 4, offset=10, shape=(4, 9))


def test_nothing_to_do() -> None:
    cache = random_pool(1, 4)
    check(cache, [], None, [], 4, shape=(3, 5))
    check(cache, [0, 0], None, [[0], [0]], 4, shape=(2, 3))
    check(cache, [3, 2], None, [[0], [0]], 4, shape=(2, 0))
    out = torch.ones(1, 4, 512, dtype=torch.bfloat16)
    one, no_pages = torch.ones(1, dtype=torch.int32), torch.zeros(1, 0, dtype=torch.int32)
    dequantize_and_gather_k_cache(out, cache, one, None, no_pages, 4, 0)
    assert not out[0, 0].any()
    assert out[0, 1:].eq(1).all()
    dequantize_and_gather_k_cache(out, FMT.allocate(0, 4), one * 2, one, torch.zeros(1, 1, dtype=torch.int32), 4, 1)
    assert not out[0, :2].any()
    assert out[0, 2:].eq(1).all()


def test_no_pages_on_a_gpu() -> None:
    """Without pages there is nothing to launch a kernel for."""
    gather = pytest.importorskip("cute_kernels.kv_cache.gather", reason="CuTe DSL is not installed")
    rows = torch.ones(3, 5, 512, dtype=torch.bfloat16)
    gather._write_zeros(rows, torch.tensor([2, -7, 9], dtype=torch.int32), torch.tensor([1, 3, 9], dtype=torch.int32))
    assert rows[..., 0].tolist() == [[0, 1, 1, 1, 1], [1] * 5, [0] * 5]


def test_nan_outside_the_gathered_rows_stays_there() -> None:
    cache = random_pool(2, 4)
    helpers.raw_bytes(cache)[: cache.stride(0)] = 0xFF  # page 0: every value NaN
    check(cache, [6], [2], [[0, 1]], 4)


def test_nan_inside_is_delivered() -> None:
    cache = random_pool(1, 4)
    page = helpers.raw_bytes(cache)
    page[576 + 5], page[576 + 70], page[576 + 448 : 576 + 450] = 0x7F, 0xFF, torch.tensor([0xC0, 0x7F])
    out = torch.zeros(1, 4, 512, dtype=torch.bfloat16)
    four, table = torch.tensor([4], dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int32)
    dequantize_and_gather_k_cache(out, cache, four, None, table, 4, 0)
    assert out.isnan().nonzero().tolist() == [[0, 1, 5], [0, 1, 70], [0, 1, 448]]


def test_strided_out_table_and_views() -> None:
    pool = random_pool(4, 4)
    cache = pool.as_strided((4, FMT.page_bytes(4)), (pool.stride(0), 1))[1:]
    buffer = torch.full((4, 9, 640), SENTINEL, dtype=torch.bfloat16)
    out = buffer[1:, ::2, 64:576]
    wide = torch.tensor([[9, 2, 0, 9], [9, 1, 2, 9]], dtype=torch.int32)
    seq_lens = torch.tensor([9, 5, 7, 9], dtype=torch.int32)[1:3]
    image = oracle.to_numpy(buffer)
    image[1:, ::2, 64:576] = want(out, cache, [5, 7], None, [[2, 0], [1, 2]], 4, 1)
    dequantize_and_gather_k_cache(out, cache, seq_lens, None, wide[:, 1:3], 4, 1)
    np.testing.assert_array_equal(oracle.to_numpy(buffer), image)


def test_inserted_rows_come_back_within_half_a_step() -> None:
    k = helpers.spread((100, 512), seed=2)
    cache = helpers.poisoned_pool(FMT, 2, 64)
    quantize_and_insert_k_cache(k, cache, torch.arange(100))
    out = torch.zeros(1, 100, 512, dtype=torch.bfloat16)
    table = torch.tensor([[0, 1]], dtype=torch.int32)
    dequantize_and_gather_k_cache(out, cache, torch.tensor([100], dtype=torch.int32), None, table, 64, 0)
    assert torch.equal(out[0, :, 448:], k[:, 448:])
    value, got = oracle.to_numpy(k)[:, :448], oracle.to_numpy(out[0])[:, :448]
    _, scales = oracle.quantize_blocks(value, 64, "e4m3")
    half = np.repeat(np.exp2(scales - 127.0 - 10), 64, axis=1)
    assert (np.abs(got - value) <= np.maximum(np.abs(value) / 16, half)).all()


def test_pages_beyond_two_gigabytes() -> None:
    """57400 pages of 37440 bytes; only the last one is ever touched."""
    num_blocks = 57400
    memory = torch.empty(num_blocks, 37440, dtype=torch.uint8)
    assert memory.nbytes > 2**31
    cache = memory.as_strided((num_blocks, 64, 584), (37440, 584, 1))
    small = helpers.poisoned_pool(FMT, 1, 64)
    memory[-1] = helpers.raw_bytes(small)
    k = helpers.spread((3, 512), seed=0)
    last = (num_blocks - 1) * 64
    quantize_and_insert_k_cache(k, cache, torch.tensor([last + 63, last, last + 5]))
    image = expected.insert_mla(small, 64, torch.tensor([63, 0, 5]), k)
    assert torch.equal(memory[-1], image)
    out = torch.zeros(1, 6, 512, dtype=torch.bfloat16)
    small_out = out.clone()
    six = torch.tensor([6], dtype=torch.int32)
    helpers.raw_bytes(small).copy_(image)
    for target, source, page in ((out, cache, num_blocks - 1), (small_out, small, 0)):
        table = torch.tensor([[page]], dtype=torch.int32)
        dequantize_and_gather_k_cache(target, source, six, None, table, 64, 0)
    assert torch.equal(out.view(torch.int16), small_out.view(torch.int16))
    assert out[0, 5].any()


POOL = random_pool(5, 3)


@settings(deadline=None, max_examples=25)
@given(st.data(), st.integers(0, 3), st.integers(0, 4), st.integers(0, 8), st.integers(0, 5), st.booleans())
def test_any_lengths_and_tables(
    data: st.DataObject, requests: int, width: int, columns: int, offset: int, gathered: bool
) -> None:
    lengths = st.lists(st.integers(-2, 15), min_size=requests, max_size=requests)
    pages = st.lists(st.integers(-2, 6), min_size=width, max_size=width)
    seq_lens = data.draw(lengths)
    gather_lens = data.draw(lengths) if gathered else None
    table = data.draw(st.lists(pages, min_size=requests, max_size=requests))
    out = torch.full((requests + 1, columns, 512), SENTINEL, dtype=torch.bfloat16)
    image = want(out, POOL, seq_lens, gather_lens, table, 3, offset)
    dequantize_and_gather_k_cache(
        out,
        POOL,
        torch.tensor(seq_lens, dtype=torch.int32),
        None if gather_lens is None else torch.tensor(gather_lens, dtype=torch.int32),
        torch.tensor(table, dtype=torch.int32).reshape(requests, width),
        3,
        offset,
    )
    np.testing.assert_array_equal(oracle.to_numpy(out), image)


def good() -> dict[str, Any]:
    return {
        "out": torch.zeros(3, 8, 512, dtype=torch.bfloat16),
        "k_cache": random_pool(2, 4),
        "seq_lens": torch.tensor([5, 3], dtype=torch.int32),
        "gather_lens": torch.tensor([2, 3], dtype=torch.int32),
        "block_table": torch.tensor([[0, 1], [1, 0]], dtype=torch.int32),
        "block_size": 4,
        "offset": 1,
        "kv_format": FMT.id,
    }


def test_opcheck() -> None:
    arguments = good()
    helpers.check_op(OP, *arguments.values())
    helpers.check_op(OP, *(arguments | {"gather_lens": None}).values())


def test_compiles_with_dynamic_shapes() -> None:
    compiled = torch.compile(dequantize_and_gather_k_cache, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows, columns in ((3, 8), (2, 11)):
        arguments = good() | {"out": torch.zeros(rows, columns, 512, dtype=torch.bfloat16)}
        image = want(arguments["out"], arguments["k_cache"], [5, 3], [2, 3], [[0, 1], [1, 0]], 4, 1)
        compiled(**arguments)
        np.testing.assert_array_equal(oracle.to_numpy(arguments["out"]), image)


@pytest.mark.parametrize(
    ("argument", "value", "error"),
    [
        ("out", torch.zeros(3, 8, 512), TypeError),
        ("out", torch.zeros(1, 8, 512, dtype=torch.bfloat16), ValueError),
        ("out", torch.zeros(3, 512, dtype=torch.bfloat16), ValueError),
        ("out", torch.zeros(3, 8, 1024, dtype=torch.bfloat16)[..., ::2], ValueError),
        ("k_cache", torch.zeros(2, 4, 584, dtype=torch.int8), TypeError),
        ("k_cache", torch.zeros(2, 5, 584, dtype=torch.uint8), ValueError),
        ("seq_lens", torch.zeros(2, dtype=torch.int64), TypeError),
        ("gather_lens", torch.zeros(3, dtype=torch.int32), ValueError),
        ("gather_lens", torch.zeros(2, dtype=torch.int64), TypeError),
        ("block_table", torch.zeros(2, 2, dtype=torch.int64), TypeError),
        ("block_table", torch.zeros(3, 2, dtype=torch.int32), ValueError),
        ("block_table", torch.zeros(2, dtype=torch.int32), ValueError),
        ("block_size", 0, ValueError),
        ("offset", -1, ValueError),
        ("kv_format", "fp8_ds_mla", ValueError),
    ],
)
def test_bad_arguments(argument: str, value: Any, error: type[Exception]) -> None:
    arguments = good()
    out = arguments["out"]
    dequantize_and_gather_k_cache(**arguments)
    before = out.clone()
    arguments["seq_lens"] += 1
    arguments[argument] = value
    with pytest.raises(error, match=f"^{OP}: {argument}: expected "):
        dequantize_and_gather_k_cache(**arguments)
    assert torch.equal(out, before)


def test_cost_counts_the_rows_that_move() -> None:
    with record_calls() as recording:
        dequantize_and_gather_k_cache(**good())
        dequantize_and_gather_k_cache(**(good() | {"gather_lens": None, "offset": 4}))
    assert [c.cost.bytes for c in recording.calls] == [5 * (584 + 1024) + 16, 7 * (584 + 1024) + 8]
