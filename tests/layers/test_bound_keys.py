# SPDX-License-Identifier: Apache-2.0
"""What stands for a step's tensors and numbers in the keys of bound steps (layers.bound), and what builders keep."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from cute_kernels.runtime.compile import hold_tensors
from layers import BlockTables, DeepseekV4Metadata, DeepseekV4MetadataBuilder
from layers import bound as bound_module
from layers.bound import BoundStep, bound_key
from tests.layers.engine import CONFIG, KINDS

MAX_TOKENS, MAX_LEN = 64, 4096


def tables_of(requests: int, ratio: int) -> BlockTables:
    def table() -> torch.Tensor:
        return torch.arange(requests * 70, dtype=torch.int32).view(requests, 70)

    return BlockTables(table()) if ratio == 1 else BlockTables(table(), table(), table())


def new_builder() -> DeepseekV4MetadataBuilder:
    return DeepseekV4MetadataBuilder(CONFIG, MAX_TOKENS, MAX_LEN)


def key_from_scratch(m: DeepseekV4Metadata) -> int:
    """Without what the builder keeps."""
    return bound_key(copy.copy(m))


@pytest.mark.parametrize("ratio", KINDS)
def test_steps_of_one_shape_share_a_key(ratio: int) -> None:
    builder, tables = new_builder(), tables_of(3, ratio)
    steps = [builder.build(ratio, [1] * 3, [9 + n, 0, 300 + n], tables, 3) for n in range(3)]
    assert len({bound_key(m) for m in steps}) == 1
    assert steps[0] is not steps[1]
    assert all(key_from_scratch(m) == bound_key(m) for m in steps)
    again = builder.build(ratio, np.ones(3, dtype=np.int32), [302, 11, 12], BlockTables(**vars(tables)), 3)
    assert bound_key(again) == bound_key(steps[0])


@pytest.mark.parametrize("ratio", KINDS)
def test_what_makes_another_key(ratio: int) -> None:
    """Each of these steps, coming after all the others, has the key that it would have alone."""
    builder, tables, others = new_builder(), tables_of(3, ratio), tables_of(3, ratio)
    narrow = BlockTables(*(None if t is None else t[:, :60] for t in vars(tables).values()))
    steps: list[Any] = [
        ([1, 1, 1], [9, 8, 7], tables, 3),
        ([1, 1, 1], [9, 8, 7], others, 3),
        ([1, 1, 1], [9, 8, 7], narrow, 3),
        ([1, 1, 1], [9, 8, 4000], tables, 3),
        ([2, 2, 2], [9, 8, 7], tables, 3),
        ([1, 2, 3], [9, 8, 7], tables, 3),
        ([1, 1, 1], [9, 8, 7], tables, 2),
        ([1, 1, 1], [9, 8, 8], tables, 2),
        ([1, 3, 2], [9, 8, 7], tables, 1),
        ([1, 2, 3], [9, 8, 7], tables, 1),
        ([1, 2, 3], [9, 8, 7], tables, 0),
    ]
    keys = []
    for _ in range(2):
        for step in steps:
            m = builder.build(ratio, *step)
            assert bound_key(m) == key_from_scratch(m)
            keys.append(bound_key(m))
    assert len(set(keys)) == len(steps)
    assert keys[: len(steps)] == keys[len(steps) :]


def test_kinds_and_builders_have_their_own() -> None:
    builder = new_builder()
    tables = {ratio: tables_of(2, ratio) for ratio in KINDS}
    together = builder.build_step([1, 1], [5, 6], tables, 2)
    keys = [bound_key(m) for m in together.values()]
    keys += [bound_key(builder.build(ratio, [1, 1], [5, 6], tables[ratio], 2)) for ratio in KINDS]
    keys += [bound_key(new_builder().build(ratio, [1, 1], [5, 6], tables[ratio], 2)) for ratio in KINDS]
    assert len(set(keys)) == 9


def test_metadata_that_somebody_changes() -> None:
    builder, tables = new_builder(), tables_of(2, 4)
    first = builder.build(4, [1, 1], [5, 6], tables, 2)
    key = bound_key(first)
    positions = first.positions.clone()
    moved = replace(first, positions=positions)
    assert bound_key(moved) != key
    assert bound_key(copy.deepcopy(first)) != key
    assert bound_key(copy.copy(first)) == key
    first.positions = positions
    assert bound_key(first) == bound_key(moved)
    # not what the builder makes next
    second = builder.build(4, [1, 1], [6, 7], tables, 2)
    assert second.positions is not positions
    assert bound_key(second) == key


def test_numbers_that_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """No two steps ever get the same one; those with prefill rows push out no others."""
    monkeypatch.setattr(bound_module, "MOST_KEYS", 4)
    monkeypatch.setattr(bound_module, "_numbers", {})
    monkeypatch.setattr(bound_module, "_prefill_numbers", {})
    builder, tables = new_builder(), tables_of(2, 1)
    decode = bound_key(builder.build(1, [1, 1], [5, 6], tables, 2))
    seen, known = set(), set()
    for length in range(10, 30):
        seen.add(bound_key(builder.build(1, [1, 9], [5, length], tables, 1)))
        known.add(len(bound_module._prefill_numbers))
    assert len(seen) == 20
    assert known == {1, 2, 3, 4}
    assert bound_key(builder.build(1, [1, 1], [5, 6], tables, 2)) == decode


@pytest.mark.parametrize(
    "make", [list, tuple, np.array, lambda x: [np.int64(n) for n in x], lambda x: np.array(x, "i4")]
)
def test_numbers_of_any_kind(make: Any) -> None:
    """The same step, whatever its numbers come in, also if an equal one was there before."""
    builder, tables = new_builder(), tables_of(3, 4)
    want = new_builder().build(4, [1, 2, 5], [9, 80, 50], tables, 1)
    builder.build(4, [1, 2, 5], [7, 8, 9], tables, 1)
    got = builder.build(4, make([1, 2, 5]), make([9, 80, 50]), tables, 1)
    assert (got.seq_lens_cpu, got.query_start_loc_cpu) == (want.seq_lens_cpu, want.query_start_loc_cpu)
    assert {type(n) for n in got.seq_lens_cpu + got.query_start_loc_cpu} == {int}
    assert (got.max_seq_len, got.decode_query_len, got.num_prefill_tokens) == (80, 1, 7)
    assert torch.equal(got.positions, want.positions)


def test_numbers_changed_in_place() -> None:
    builder, tables = new_builder(), tables_of(2, 1)
    rows, scalars = np.array([1, 2]), [torch.tensor(1), torch.tensor(2)]
    arrays, lists = [np.array(1), np.array(2)], [1, 2]
    given: list[Any] = [rows, scalars, arrays, lists]
    for lens in given:
        assert builder.build(1, lens, [5, 6], tables, 2).query_start_loc_cpu == (0, 1, 3)
        if lens is scalars or lens is arrays:
            lens[1].fill_(4) if lens is scalars else lens[1].fill(4)
        else:
            lens[1] = 4
        assert builder.build(1, lens, [5, 6], tables, 2).query_start_loc_cpu == (0, 1, 5)


@pytest.mark.parametrize("count", [5, 60])
def test_checks_do_not_wear_off(count: int) -> None:
    """A step that fits does not vouch for others of its shape."""
    builder, tables = new_builder(), tables_of(count, 1)
    for _ in range(2):
        builder.build(1, [1] * count, [5] * count, tables, count)
        with pytest.raises(ValueError, match="at most max_model_len = 4096, got 4097"):
            builder.build(1, [1] * count, [5] * (count - 1) + [4097], tables, count)
        with pytest.raises(ValueError, match="at least the 6 rows of the step, got 5"):
            builder.build(1, [1] * (count - 1) + [6], [5] * count, tables, count)
        with pytest.raises(TypeError, match=r"block_tables\.swa: expected dtype torch\.int32, got torch\.float32"):
            builder.build(1, [1] * count, [5] * count, BlockTables(tables.swa.view(torch.float32)), count)
        with pytest.raises(TypeError, match="seq_lens_device"):
            builder.build(1, [1] * count, [5] * count, tables, count, seq_lens_device=torch.zeros(count))
        lens = torch.zeros(count + 1, dtype=torch.int32)
        with pytest.raises(ValueError, match="seq_lens_device"):
            builder.build(1, [1] * count, [5] * count, tables, count, seq_lens_device=lens)


def test_arguments_that_are_views_are_made_anew() -> None:
    """Of the hidden states and the result, wherever these lie; all other arguments stay."""
    calls: list[tuple[torch.Tensor, ...]] = []
    wide = torch.arange(240.0).view(6, 40)
    other = torch.ones(3)

    def views(hidden: torch.Tensor, out: torch.Tensor) -> list[tuple[Any, ...]]:
        return [
            (hidden, hidden.unsqueeze(1), hidden[1:], hidden[:, 8:], 5, other),
            (hidden.t(), out, out[2:], out.view(-1)[:7], hidden[:0]),
        ]

    def run(*args: Any) -> None:
        calls.append(args)

    first, result = wide[:3, :32], torch.zeros(3, 32)
    step = BoundStep([(run, None, args) for args in views(first, result)], first, result)  # type: ignore[list-item]
    assert step.is_whole
    # in the same rows, and beginning inside of the first tensor's memory
    assert not BoundStep([(run, None, (wide[:3, 4:36],))], first, result).views[0].is_all  # type: ignore[list-item]
    for hidden, out in ((wide[2:5, 3:35], torch.zeros(3, 32)), (wide[1:4, :32], torch.zeros(9, 32)[4:7])):
        calls.clear()
        step.run(hidden, out)
        for got, want in zip(calls, views(hidden, out), strict=True):
            for mine, expected in zip(got, want, strict=True):
                if isinstance(expected, torch.Tensor) and expected.numel():
                    assert (mine.data_ptr(), mine.shape, mine.stride()) == (
                        expected.data_ptr(), expected.shape, expected.stride(),
                    )  # fmt: skip
                elif not isinstance(expected, torch.Tensor):
                    assert mine == expected


def test_held_tensors_are_what_they_were() -> None:
    """A kernel sees the same memory, and one argument is left that says on which stream to launch."""
    tvm_ffi = pytest.importorskip("tvm_ffi")
    codes = torch.zeros(4, 8, dtype=torch.float8_e4m3fn)
    tensors = [torch.arange(24.0).view(4, 6)[1:, ::2], codes, torch.zeros(3, 0), torch.ones(2).bfloat16()]
    arguments = [7, *tensors]
    for changing, kept in (((), [1]), ((2,), [2]), ((1, 4), [1, 4])):
        held = list(arguments)
        hold_tensors(held, changing)
        assert [i for i, value in enumerate(held) if isinstance(value, torch.Tensor)] == kept
        for value, before in zip(held, arguments, strict=True):
            if value is not before:
                assert isinstance(value, tvm_ffi.Tensor)
                got = torch.from_dlpack(value)
                assert (got.data_ptr(), got.dtype, got.shape) == (before.data_ptr(), before.dtype, before.shape)
                assert before.numel() == 0 or got.stride() == before.stride()
        assert held[0] == 7


def test_a_prefill_step_that_failed_was_not_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it did not come to allocate would be made in scratch if the next were recorded."""
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    steps, rows, recorded = bound_module.BoundSteps(), torch.zeros(3), []

    def body(hidden_states: torch.Tensor, out: torch.Tensor) -> None:
        recorded.append(torch._C._len_torch_dispatch_stack() > 0)
        if len(recorded) == 1:
            raise torch.OutOfMemoryError

    with pytest.raises(torch.OutOfMemoryError):
        steps.run("key", rows, rows, body, has_prefills=True)
    steps.run("key", rows, rows, body, has_prefills=True)
    assert recorded == [False, False]
    with pytest.raises(AssertionError):  # scratch is of a GPU
        steps.run("key", rows, rows, body, has_prefills=True)


class Count:
    """A number that may become another one, and stays equal to itself."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __index__(self) -> int:
        return self.value

    def __int__(self) -> int:
        return self.value


def test_counts_that_are_remembered() -> None:
    builder = new_builder()
    for counts in ([1, 2, 5], (1, 2, 6), np.array([1, 2, 5]), np.array([1, 2, 6], "i4"), [np.int64(3)]):
        assert builder._rows_of(counts) is builder._rows_of(copy.copy(counts))
    counts = [Count(1), Count(2)]
    assert builder._rows_of(counts) is not builder._rows_of(counts)
