# SPDX-License-Identifier: Apache-2.0
"""Which prefill rows each rank of a context group has, and what steps without layers say of it."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from layers import BlockTables, ContextParallel, ContextStepBuilder, ThreadCommunicator, plan_prefill
from tests.layers.engine import CONFIG

RANKS = (1, 2, 3, 4, 7, 8, 16, 64)


@pytest.mark.parametrize("ranks", RANKS)
def test_every_row_is_on_one_rank(ranks: int) -> None:
    generator = torch.Generator().manual_seed(ranks)
    query = [0, 1, 127, 128, 128 * ranks - 1, 128 * ranks, 256 * ranks - 1, 256 * ranks, 256 * ranks + 1]
    query += torch.randint(1, 700 * ranks, (6,), generator=generator).tolist()
    starts = [0, 70, 1, 128, 131, 0, 255, 4, 127, *torch.randint(0, 1000, (6,), generator=generator).tolist()]
    ends = [start + rows for start, rows in zip(starts, query, strict=True)]
    plan = plan_prefill(query, ends, ranks)
    assert len(plan.segments) == ranks
    rows = sorted(int(row) for own in plan.gather_index for row in own)
    assert rows == list(range(sum(query)))
    assert plan.padded_rows == max(len(own) for own in plan.gather_index)
    hidden = torch.arange(sum(query))
    padded = torch.full((ranks, plan.padded_rows), -1)
    for rank, own in enumerate(plan.gather_index):
        padded[rank, : len(own)] = hidden[torch.from_numpy(own)]
    assert torch.equal(padded.flatten()[torch.from_numpy(plan.restore_index)], hidden)
    for request, (start, end) in enumerate(zip(starts, ends, strict=True)):
        every = sorted((s, rank) for rank, of in enumerate(plan.segments) for s in of if s.request == request)
        assert [s.start for s, _ in every] == [start, *(s.end for s, _ in every[:-1])][: len(every)]
        assert not every or every[-1][0].end == end
        assert all(s.start % 128 == 0 for s, _ in every[1:])
        assert all(a != b for (_, a), (_, b) in pairwise(every)), "neighbours are one segment"
        if end - start < 128 * ranks:
            assert len(every) <= 1
        elif end - start >= 256 * ranks and ranks > 1:
            assert [rank for _, rank in every] == [*range(ranks), *range(ranks - 2, -1, -1)]
            longest = max(s.end - s.start for s, _ in every if s.start // 128 * 128 != s.end)
            assert longest <= 2 * ((end - start) // (2 * ranks) + 128)
        elif ranks > 1:
            assert [rank for _, rank in every] == list(range(ranks))


def test_decode_steps_lie_in_the_same_places() -> None:
    """As a captured step needs, and as a bound one counts on."""
    cp = ContextParallel(group=ThreadCommunicator.group(2)[1], kv="sharded")
    builder, tables = ContextStepBuilder(CONFIG, 64, 2048, cp), [torch.zeros(2, 9, dtype=torch.int32) for _ in range(3)]
    steps = [builder.build(4, [1, 1], [700 + n, 9], BlockTables(*tables), 2) for n in range(2)]
    assert steps[0].bound_key == steps[1].bound_key
    assert len({step.positions.data_ptr() for step in steps}) == 1
    others = builder.build(4, [1, 1], [700, 9], BlockTables(*(x.clone() for x in tables)), 2)
    longer = builder.build(4, [1, 1], [2000, 9], BlockTables(*tables), 2)
    assert len({step.bound_key for step in (steps[0], others, longer)}) == 3


def test_steps_of_no_rows() -> None:
    """Nothing at all, and padded requests: no rank sends anything."""
    for communicator in ThreadCommunicator.group(3):
        cp = ContextParallel(group=communicator, kv="sharded", prefill="zigzag")
        builder = ContextStepBuilder(CONFIG, 64, 512, cp)
        empty = BlockTables(*(torch.zeros(0, 3, dtype=torch.int32) for _ in range(3)))
        step = builder.build(4, [], [], empty, 0)
        assert (step.num_tokens, step.parts, len(step.positions)) == (0, [], 0)
        rows = torch.zeros(0, 5)
        assert step.whole_rows(step.own_rows(rows)).shape == rows.shape
        tables = BlockTables(*(torch.zeros(2, 3, dtype=torch.int32) for _ in range(3)))
        step = builder.build(128, [1, 1], [0, 0], tables, 2)
        assert step.decodes is not None
        assert step.num_tokens == 2
        assert step.decodes.lens[0].tolist() == [[0], [0]]


def test_refused() -> None:
    first, _ = ThreadCommunicator.group(2)
    for options, message in (
        ({"kv": "some"}, r"ContextParallel: kv: expected one of \('replicated', 'sharded'\), got 'some'"),
        ({"prefill": "interleaved"}, "prefill: expected one of"),
        ({"heads": "other"}, "heads: expected one of"),
        ({"wire": "fp8"}, "wire: expected one of"),
        ({"swa": "none"}, "swa: expected one of"),
        ({"shards": 3}, "shards: expected a multiple of the group's 2 ranks, got 3"),
        ({"prefill": "zigzag", "heads": "own"}, "prefill: expected 'off' where ranks have heads of their own"),
        ({"q": "all"}, "q: expected one of"),
        ({"q": "replicate", "kv": "sharded"}, "q: expected 'gather' but with heads 'own' and kv 'sharded'"),
    ):
        with pytest.raises(ValueError, match=message):
            ContextParallel(group=first, **options)  # type: ignore[arg-type]
    builder = ContextStepBuilder(CONFIG, 64, 512, ContextParallel(group=first))
    tables = BlockTables(torch.zeros(1, 3, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"num_decodes and seq_lens: expected 0..1"):
        builder.build(1, [1], [1], tables, 2)
