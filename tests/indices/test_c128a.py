# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cute_kernels.indices.ops import build_c128a_topk_metadata
from tests.helpers import check_op
from tests.indices.batches import (
    INT32_MAX,
    Table,
    check_compiled,
    int32,
    make_table,
    poisoned,
    same,
    slot_of,
    table_tensor,
)


def expected_c128a(
    positions: list[int],
    ratio: int,
    decode: int,
    requests: list[int],
    table: Table,
    bs: int,
    slots: list[int],
    width: int,
) -> tuple[Table, list[int], Table]:
    global_rows: Table = []
    lens: list[int] = []
    local_rows: Table = []
    for t, position in enumerate(positions):
        count = min((position + 1) // ratio, width) if position >= 0 else 0
        if t < decode:
            global_rows.append([slot_of(table, requests[t], j, bs) if j < count else -1 for j in range(width)])
            lens.append(0 if slots[t] < 0 else count)
        else:
            local_rows.append([j if j < count else -1 for j in range(width)])
    return global_rows, lens, local_rows


@settings(deadline=None, max_examples=25)
@given(
    seed=st.integers(0, 2**32),
    block_size=st.sampled_from([1, 2, 3]),
    ratio=st.sampled_from([128, 128, 5]),
    rows=st.integers(0, 7),
    width=st.sampled_from([0, 128, 256]),
    dtype=st.sampled_from([torch.int32, torch.int64]),
)
def test_against_loops(seed: int, block_size: int, ratio: int, rows: int, width: int, dtype: torch.dtype) -> None:
    rnd = random.Random(seed)
    decode = rnd.randint(0, rows)
    table = make_table(rnd, [rnd.randint(0, 150) for _ in range(3)], block_size)
    special = [0, 126, 127, 128, 254, 255, 256, -3, 128 * 128 - 1, 128 * 128, 10**6]
    positions = [rnd.choice([rnd.choice(special), rnd.randrange(128 * 300)]) for _ in range(rows)]
    requests = [rnd.choice([0, 1, 2, -1, 3]) for _ in range(decode + rnd.randint(0, 2))]
    slots = [rnd.choice([-1, -(2**40), 0, 5, 2**40]) for _ in range(decode + rnd.randint(0, 2))]
    buffer, lens_buffer, prefill_buffer = poisoned(9, width + 64), poisoned(9), poisoned(8, width + 1)

    got = build_c128a_topk_metadata(
        torch.tensor(positions, dtype=dtype),
        ratio,
        decode,
        int32(requests),
        table_tensor(table),
        block_size,
        torch.tensor(slots, dtype=torch.int64),
        buffer,
        lens_buffer,
        prefill_buffer,
        width,
    )

    want = expected_c128a(positions, ratio, decode, requests, table, block_size, slots, width)
    for tensor, expected in zip(got, want, strict=True):
        same(tensor, expected)
    assert [t.shape for t in got] == [(decode, width), (decode,), (rows - decode, width)]
    # Views of the buffers, at their start and with their strides; the rest of the buffers keeps its poison.
    for tensor, whole in zip(got, (buffer, lens_buffer, prefill_buffer), strict=True):
        assert tensor.data_ptr() == whole.data_ptr() or tensor.numel() == 0
        assert tensor.stride() == whole.stride()
        outside = torch.ones_like(whole, dtype=torch.bool)
        outside[tuple(slice(n) for n in tensor.shape)] = False
        assert torch.equal(whole[outside], poisoned(int(outside.sum())))


def small_call(width: int = 256) -> dict[str, Any]:
    """Three decode rows (the second invalid) and two prefill rows."""
    return {
        "positions": torch.tensor([128 * 200, 300, 127, 0, 128 * 256 - 1]),
        "compress_ratio": 128,
        "num_decode_tokens": 3,
        "token_to_req_indices": int32([1, 0, 0, 2, 2]),
        "block_table": table_tensor(make_table(random.Random(3), [3, 201, 256], 2)),
        "block_size": 2,
        "slot_mapping": torch.tensor([7, -1, 4, 5, 6]),
        "global_decode_buffer": poisoned(4, width),
        "decode_lens_buffer": poisoned(4),
        "prefill_buffer": poisoned(4, width),
        "max_compressed_tokens": width,
    }


def test_every_entry_at_full_context_and_default_width() -> None:
    """A million tokens of context give 8192 entries, the default width."""
    table = make_table(random.Random(5), [8192], 2)
    buffer = poisoned(2, 8192)
    got, lens, local = build_c128a_topk_metadata(
        torch.tensor([2**20 - 1, 2**20 - 1]), 128, 1, int32([0]), table_tensor(table), 2, torch.tensor([0]),
        buffer, poisoned(1), poisoned(1, 8192),
    )  # fmt: skip
    same(got, [[table[0][j // 2] * 2 + j % 2 for j in range(8192)]])
    same(lens, [8192])
    same(local, [list(range(8192))])


def test_unmapped_pages_leave_the_length() -> None:
    call = small_call(128)
    call["block_table"] = table_tensor([[INT32_MAX, -1], [1, INT32_MAX // 2], [0, 0]])
    got, lens, _ = build_c128a_topk_metadata(**call)
    same(got, [[2, 3, INT32_MAX - 1, INT32_MAX] + [-1] * 124, [-1] * 128, [-1] * 128])
    same(lens, [128, 0, 1])


@pytest.mark.full
def test_op_and_compile() -> None:
    check_op("build_c128a_topk_metadata", *small_call().values())
    roomy = {**small_call(), "global_decode_buffer": poisoned(4, 300), "prefill_buffer": poisoned(4, 300)}
    smaller = {**roomy, "num_decode_tokens": 2, "positions": torch.tensor([5, 700, 900, 1000]), "block_size": 3}
    check_compiled(build_c128a_topk_metadata, roomy, {**smaller, "max_compressed_tokens": 128})


@pytest.mark.parametrize(
    ("change", "error", "argument"),
    [
        ({"positions": torch.zeros(5)}, TypeError, "positions"),
        ({"compress_ratio": 0}, ValueError, "compress_ratio"),
        ({"num_decode_tokens": -1}, ValueError, "num_decode_tokens"),
        ({"num_decode_tokens": 6}, ValueError, "num_decode_tokens"),
        ({"token_to_req_indices": int32([0, 0])}, ValueError, "token_to_req_indices"),
        ({"block_table": torch.zeros(1, 1, dtype=torch.int64)}, TypeError, "block_table"),
        ({"block_size": 0}, ValueError, "block_size"),
        ({"slot_mapping": int32([0, 0, 0])}, TypeError, "slot_mapping"),
        ({"slot_mapping": torch.tensor([0, 0])}, ValueError, "slot_mapping"),
        ({"global_decode_buffer": poisoned(2, 256)}, ValueError, "global_decode_buffer"),
        ({"global_decode_buffer": poisoned(3, 255)}, ValueError, "global_decode_buffer"),
        ({"decode_lens_buffer": poisoned(2)}, ValueError, "decode_lens_buffer"),
        ({"prefill_buffer": poisoned(1, 256)}, ValueError, "prefill_buffer"),
        ({"prefill_buffer": poisoned(2, 128)}, ValueError, "prefill_buffer"),
        ({"max_compressed_tokens": 100}, ValueError, "max_compressed_tokens"),
        ({"max_compressed_tokens": -128}, ValueError, "max_compressed_tokens"),
    ],
)
def test_bad_arguments(change: dict[str, Any], error: type[Exception], argument: str) -> None:
    with pytest.raises(error, match=rf"build_c128a_topk_metadata: {argument}: expected"):
        build_c128a_topk_metadata(**{**small_call(), **change})
