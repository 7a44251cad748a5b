# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cute_kernels.compressor.ops import get_compressed_slot_mapping
from tests import helpers

GARBAGE = -1_000_000


def expected(
    num_tokens: int,
    starts: list[int],
    seq_lens: list[int],
    table: list[list[int]],
    block_size: int,
    ratio: int,
    slots: list[int] | None = None,
) -> list[int]:
    out = [-1] * num_tokens
    rows = block_size // ratio
    for r, seq_len in enumerate(seq_lens):
        query_len = starts[r + 1] - starts[r]
        for t in range(starts[r], min(starts[r + 1], num_tokens)):
            pos = seq_len - query_len + t - starts[r]
            if pos < 0 or (pos + 1) % ratio or (slots is not None and slots[t] < 0):
                continue
            page, row = divmod(pos // ratio, rows)
            if page < len(table[r]) and table[r][page] >= 0:
                out[t] = table[r][page] * rows + row
    return out


def as_args(num_tokens: int, starts: list[int], seq_lens: list[int], table: torch.Tensor, *rest: Any) -> tuple:
    def ints(x: list[int]) -> torch.Tensor:
        return torch.tensor(x, dtype=torch.int32)

    return (num_tokens, ints(starts), ints(seq_lens), table, *rest)


@st.composite
def calls(draw: Any) -> dict[str, Any]:
    ratio, rows = draw(st.sampled_from([(1, 5), (4, 64), (4, 1), (4, 3), (128, 2)]))
    queries = draw(st.lists(st.integers(0, 9), min_size=0, max_size=4))
    prefixes = [draw(st.integers(0, 3 * ratio * rows)) for _ in queries]
    first = draw(st.sampled_from([0, 0, 2]))
    starts = [first]
    for q in queries:
        starts.append(starts[-1] + q)
    num_tokens = max(0, starts[-1] + draw(st.integers(-2, 5)))
    # The table is a column slice; a request may need more columns than it has.
    width = draw(st.integers(0, 5))
    pages = [[draw(st.sampled_from([GARBAGE, -1, 0, 3, 2**31 - 1])) for _ in range(width)] for _ in queries]
    wide = torch.full((len(queries), width + 3), 11, dtype=torch.int32)
    wide[:, :width] = torch.tensor(pages, dtype=torch.int32).view(len(queries), width)
    own = draw(st.none() | st.lists(st.sampled_from([-1, 0, 5, -9]), min_size=num_tokens, max_size=num_tokens + 2))
    return {
        "args": as_args(num_tokens, starts, [p + q for p, q in zip(prefixes, queries, strict=True)], wide[:, :width]),
        "block_size": ratio * rows,
        "ratio": ratio,
        "own": own,
        "extra": draw(st.none() | st.integers(0, 3)),
    }


@settings(deadline=None, max_examples=200)
@given(calls())
def test_against_integer_loops(call: dict[str, Any]) -> None:
    n, starts, seq_lens, table = call["args"]
    own = call["own"]
    want = expected(
        n, starts.tolist(), seq_lens.tolist(), table.tolist(), call["block_size"], call["ratio"], own and own[:]
    )
    out = None if call["extra"] is None else torch.full((n + call["extra"],), 77)
    slots = None if own is None else torch.tensor(own, dtype=torch.int64)
    got = get_compressed_slot_mapping(
        n, starts, seq_lens, table, call["block_size"], call["ratio"], out, slot_mapping=slots
    )
    assert got.dtype == torch.int64
    assert got.tolist() == want
    if out is not None:
        assert got.data_ptr() == out.data_ptr() or n == 0
        assert out.tolist() == want + [-1] * (out.shape[0] - n)


def small() -> dict[str, Any]:
    table = torch.tensor([[5, 2], [7, GARBAGE]], dtype=torch.int32)
    names = ("num_tokens", "query_start_loc", "seq_lens", "block_table", "block_size", "compress_ratio")
    return dict(zip(names, as_args(9, [0, 4, 8], [300, 8], table, 256, 4), strict=True))


def test_known_values() -> None:
    assert get_compressed_slot_mapping(**small()).tolist() == [-1, -1, -1, 2 * 64 + 10, -1, -1, -1, 7 * 64 + 1, -1]


def test_long_contexts_need_64_bits() -> None:
    a = small()
    a["block_table"] = torch.full((2, 2), 2**31 - 1, dtype=torch.int32)
    assert int(get_compressed_slot_mapping(**a)[7]) == (2**31 - 1) * 64 + 1


def test_bad_data_stays_inside() -> None:
    a = small()
    for starts, lens in (([8, 0, 3], [5, 5]), ([-7, 3, 100], [2**31 - 1, -(2**31)]), ([0, 0, 0], [0, 0])):
        a["query_start_loc"], a["seq_lens"] = (torch.tensor(x, dtype=torch.int32) for x in (starts, lens))
        got = get_compressed_slot_mapping(**a)
        assert ((got == -1) | (got >= 0)).all()


def test_op_registration() -> None:
    a = small()
    n, *tensors = a.values()
    own = torch.arange(9)
    helpers.check_op("get_compressed_slot_mapping", torch.zeros(11, dtype=torch.int64), *tensors[:3], own, n, 256, 4)
    helpers.check_op("get_compressed_slot_mapping", torch.zeros(9, dtype=torch.int64), *tensors[:3], None, n, 256, 4)


def test_compiles_with_dynamic_shapes() -> None:
    compiled = torch.compile(get_compressed_slot_mapping, backend="aot_eager", fullgraph=True, dynamic=True)
    a = small()
    for n in (9, 7, 12):
        a["num_tokens"] = n
        assert torch.equal(compiled(**a), get_compressed_slot_mapping(**a))
        out = torch.zeros(20, dtype=torch.int64)
        assert torch.equal(compiled(**a, out=out), get_compressed_slot_mapping(**a))
        assert (out[n:] == -1).all()


@pytest.mark.parametrize(
    ("argument", "value", "error"),
    [
        ("num_tokens", -1, ValueError),
        ("query_start_loc", torch.zeros(2, dtype=torch.int32), ValueError),
        ("query_start_loc", torch.zeros(3, dtype=torch.int64), TypeError),
        ("query_start_loc", None, TypeError),
        ("seq_lens", torch.zeros(2, dtype=torch.int64), TypeError),
        ("block_table", torch.zeros(3, 2, dtype=torch.int32), ValueError),
        ("block_table", torch.zeros(2, dtype=torch.int32), ValueError),
        ("block_size", 254, ValueError),
        ("block_size", 0, ValueError),
        ("compress_ratio", 0, ValueError),
        ("out", torch.zeros(8, dtype=torch.int64), ValueError),
        ("out", torch.zeros(9, dtype=torch.int32), TypeError),
        ("slot_mapping", torch.zeros(8, dtype=torch.int64), ValueError),
    ],
)
def test_bad_arguments(argument: str, value: Any, error: type[Exception]) -> None:
    a = small()
    a[argument] = value
    with pytest.raises(error, match=f"get_compressed_slot_mapping: {argument}: expected"):
        get_compressed_slot_mapping(**a)
