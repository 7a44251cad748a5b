# SPDX-License-Identifier: Apache-2.0
"""quantize_and_insert_k_cache: every byte of the pool."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cute_kernels import formats
from cute_kernels.kv_cache.ops import quantize_and_insert_k_cache
from cute_kernels.runtime.record import record_calls
from tests import helpers
from tests.kv_cache import expected

FMT = formats.FP8_DS_MLA
OP = "quantize_and_insert_k_cache"


def slots_in(num_blocks: int, block_size: int, n: int, seed: int = 0) -> torch.Tensor:
    return torch.randperm(num_blocks * block_size, generator=helpers.generator(seed))[:n]


@pytest.mark.parametrize("rows", [0, 1, 17, 70])
@pytest.mark.parametrize(("block_size", "extra"), [(64, 0), (64, 64), (64, 1152), (2, 576), (256, 0), (1, 8), (7, 3)])
def test_every_byte(rows: int, block_size: int, extra: int) -> None:
    num_blocks = 120 // block_size + 2
    cache = helpers.poisoned_pool(FMT, num_blocks, block_size, extra)
    k = helpers.spread((rows, 512), seed=rows)
    slots = slots_in(num_blocks, block_size, rows)
    want = expected.insert_mla(cache, block_size, slots, k)
    assert quantize_and_insert_k_cache(k, cache, slots, block_size) is None
    assert torch.equal(helpers.raw_bytes(cache), want)


def special_rows() -> torch.Tensor:
    """Zeros, tiny blocks, negative zero, ties, the largest numbers, NaN."""
    k = torch.zeros(9, 512)
    k[1] = 1e-5
    k[2] = -0.0
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 17.0, 19.0, 22.0, 26.0, 448.0, -17.0, -19.0])
    k[3] = ties[torch.arange(512) % len(ties)]
    k[4] = torch.arange(512) * 448.0
    k[5] = torch.finfo(torch.bfloat16).max
    k[6, ::3], k[6, 1::3] = math.nan, 1.0
    k[7, :448] = math.nan
    k[8] = torch.finfo(torch.bfloat16).tiny
    return k.bfloat16()


def test_special_values() -> None:
    cache = helpers.poisoned_pool(FMT, 1, 16)
    slots = torch.arange(9) + 2
    k = special_rows()
    want = expected.insert_mla(cache, 16, slots, k)
    quantize_and_insert_k_cache(k, cache, slots, 16)
    assert torch.equal(helpers.raw_bytes(cache), want)


def test_bad_slots_and_padded_rows_are_skipped() -> None:
    cache = helpers.poisoned_pool(FMT, 3, 64, 576)
    k = helpers.spread((12, 512), seed=1)
    k[9:] = math.nan
    slots = torch.tensor([5, -1, 191, 192, -(2**63), 2**31 + 5, 2**63 - 1, 64, -1])  # three rows fewer than k
    want = expected.insert_mla(cache, 64, slots, k[:9])
    quantize_and_insert_k_cache(k, cache, slots)
    assert torch.equal(helpers.raw_bytes(cache), want)
    untouched = helpers.raw_bytes(cache).clone()
    quantize_and_insert_k_cache(k, cache, torch.full((12,), -1))
    quantize_and_insert_k_cache(k, cache, torch.empty(0, dtype=torch.int64))
    assert torch.equal(helpers.raw_bytes(cache), untouched)


def test_an_empty_pool_takes_nothing() -> None:
    quantize_and_insert_k_cache(helpers.spread((3, 512), 0), FMT.allocate(0, 64), torch.arange(3))


@pytest.mark.parametrize("view", ["flat", "slice", "one_page"])
def test_views_of_larger_pools(view: str) -> None:
    pool = helpers.poisoned_pool(FMT, 6, 64)
    wide = helpers.spread((5, 1100), seed=4)
    k = wide[:, 77:589]
    slots = torch.tensor([0, 63, 17, 1, 40])
    if view == "flat":
        cache = pool.as_strided((6, 37376), (37440, 1))
        slots = slots + torch.tensor([0, 64, 128, 256, 320])
    elif view == "slice":
        cache = pool[1:5:2]  # pages 1 and 3
        slots = slots + torch.tensor([64, 0, 0, 64, 0])
    else:
        cache = pool[4:5]
    want = expected.insert_mla(cache, 64, slots, k)
    quantize_and_insert_k_cache(k, cache, slots)
    assert torch.equal(helpers.raw_bytes(pool), want)


def test_a_row_does_not_depend_on_its_batch() -> None:
    k = helpers.spread((40, 512), seed=3)
    slots = slots_in(2, 64, 40)
    together, alone = helpers.poisoned_pool(FMT, 2, 64), helpers.poisoned_pool(FMT, 2, 64)
    quantize_and_insert_k_cache(k, together, slots)
    for t in torch.randperm(40, generator=helpers.generator(5)).tolist():
        quantize_and_insert_k_cache(k[t : t + 1], alone, slots[t : t + 1])
    assert torch.equal(helpers.raw_bytes(together), helpers.raw_bytes(alone))


@settings(deadline=None, max_examples=25)
@given(
    st.sampled_from([1, 2, 5, 64]),
    st.integers(0, 4),
    st.lists(st.integers(-3, 300) | st.sampled_from([-(2**63), 2**63 - 1, 2**31]), unique=True, max_size=12),
    st.integers(0, 3),
)
def test_any_mapping(block_size: int, num_blocks: int, mapping: list[int], padding: int) -> None:
    cache = helpers.poisoned_pool(FMT, num_blocks, block_size, 16)
    k = helpers.spread((len(mapping) + padding, 512), seed=len(mapping))
    slots = torch.tensor(mapping, dtype=torch.int64)
    want = expected.insert_mla(cache, block_size, slots, k[: len(mapping)])
    quantize_and_insert_k_cache(k, cache, slots, block_size)
    assert torch.equal(helpers.raw_bytes(cache), want)


def test_opcheck() -> None:
    cache = helpers.poisoned_pool(FMT, 2, 4, 576)
    k = helpers.spread((5, 700), seed=0)[:, 100:612]
    helpers.check_op(OP, k, cache, torch.tensor([7, -1, 0, 99]), 4, FMT.id)
    helpers.check_op(OP, torch.zeros(0, 512, dtype=torch.bfloat16), cache, torch.empty(0, dtype=torch.int64), 4, FMT.id)


def test_compiles_with_dynamic_shapes() -> None:
    compiled = torch.compile(quantize_and_insert_k_cache, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (3, 6):
        cache = helpers.poisoned_pool(FMT, 3, 4, 576)
        k, slots = helpers.spread((rows, 512), seed=rows), slots_in(3, 4, rows)
        want = expected.insert_mla(cache, 4, slots, k)
        compiled(k, cache, slots, 4)
        assert torch.equal(helpers.raw_bytes(cache), want)


def good() -> dict[str, Any]:
    return {
        "k": torch.zeros(4, 512, dtype=torch.bfloat16),
        "k_cache": FMT.allocate(2, 64),
        "slot_mapping": torch.zeros(4, dtype=torch.int64),
        "block_size": 64,
        "is_ue8m0": True,
        "kv_format": FMT.id,
    }


@pytest.mark.parametrize(
    ("argument", "value", "error"),
    [
        ("k", torch.zeros(4, 512), TypeError),
        ("k", torch.zeros(4, 448, dtype=torch.bfloat16), ValueError),
        ("k", torch.zeros(4, 1, 512, dtype=torch.bfloat16), ValueError),
        ("k", torch.zeros(4, 1024, dtype=torch.bfloat16)[:, ::2], ValueError),
        ("k_cache", torch.zeros(2, 64, 584), TypeError),
        ("k_cache", torch.zeros(2, 64, 576, dtype=torch.uint8), ValueError),
        ("k_cache", torch.zeros(2, 32, 584, dtype=torch.uint8), ValueError),
        ("k_cache", torch.zeros(2, 37375, dtype=torch.uint8), ValueError),
        ("k_cache", torch.zeros(2, 64, 584, dtype=torch.uint8, device="meta"), ValueError),
        ("slot_mapping", torch.zeros(4, dtype=torch.int32), TypeError),
        ("slot_mapping", torch.zeros(5, dtype=torch.int64), ValueError),
        ("slot_mapping", torch.zeros(2, 2, dtype=torch.int64), ValueError),
        ("block_size", 0, ValueError),
        ("block_size", -64, ValueError),
        ("is_ue8m0", False, ValueError),
        ("kv_format", "plain_bf16/1", ValueError),
    ],
)
def test_bad_arguments(argument: str, value: Any, error: type[Exception]) -> None:
    arguments = good()
    quantize_and_insert_k_cache(**arguments)
    before = helpers.raw_bytes(arguments["k_cache"]).clone()
    pool = arguments["k_cache"]
    arguments[argument] = value
    with pytest.raises(error, match=f"^{OP}: {argument}: expected "):
        quantize_and_insert_k_cache(**arguments)
    assert torch.equal(helpers.raw_bytes(pool), before)


def test_cost() -> None:
    with record_calls() as recording:
        quantize_and_insert_k_cache(
            torch.zeros(4, 512, dtype=torch.bfloat16), FMT.allocate(1, 64), torch.tensor([0, -1, 3])
        )
    assert recording.calls[0].cost.bytes == 2 * (1024 + 584) + 3 * 8
