# SPDX-License-Identifier: Apache-2.0
"""Recordings of op calls."""

from __future__ import annotations

import contextvars
import threading

import pytest
import torch

from cute_kernels import formats
from cute_kernels.kv_cache import ops
from cute_kernels.runtime import record
from cute_kernels.runtime.record import Cost, record_calls

CPU = torch.device("cpu")


def insert(rows: int) -> None:
    cache = formats.FP8_DS_MLA.allocate(2, 4)
    slots = torch.arange(-1, rows - 1)
    ops.quantize_and_insert_k_cache(torch.zeros(rows, 512, dtype=torch.bfloat16), cache, slots, 4)


def test_records_calls_in_order() -> None:
    with record_calls() as recording:
        assert record.active() is recording
        insert(3)
        insert(1)
    assert record.active() is None
    assert [c.op for c in recording.calls] == ["quantize_and_insert_k_cache"] * 2
    assert [c.implementation for c in recording.calls] == ["reference"] * 2
    assert all(c.seconds > 0 for c in recording.calls)
    assert [c.cost for c in recording.calls] == [Cost(2 * (1024 + 584) + 3 * 8), Cost(8)]


def test_nothing_is_recorded_outside() -> None:
    with record_calls() as recording:
        pass
    insert(1)
    assert recording.calls == []


def test_run_returns_what_the_body_returns() -> None:
    with record_calls() as recording:
        assert recording.run("gemm", "torch", Cost(1, 2), CPU, lambda: 42) == 42
    assert recording.calls[0].op == "gemm"
    assert recording.calls[0].cost == Cost(bytes=1, flops=2)


def test_recordings_do_not_nest_and_the_outer_one_survives_the_attempt() -> None:
    with record_calls() as recording:
        with pytest.raises(RuntimeError, match="already active"), record_calls():
            pass
        insert(1)
    assert len(recording.calls) == 1


def test_other_threads_and_contexts_are_not_recorded() -> None:
    def elsewhere() -> None:
        assert record.active() is None
        insert(1)
        with record_calls() as own:
            insert(2)
        theirs.append(own)

    theirs: list[record.Recording] = []
    with record_calls() as recording:
        insert(3)
        for run in (elsewhere, lambda: contextvars.Context().run(elsewhere)):
            thread = threading.Thread(target=run)
            thread.start()
            thread.join()
        contextvars.copy_context().run(insert, 1)
    assert len(recording.calls) == 2
    assert [len(own.calls) for own in theirs] == [1, 1]


def test_an_exception_ends_the_recording() -> None:
    with pytest.raises(ZeroDivisionError), record_calls():
        raise ZeroDivisionError
    assert record.active() is None
    with record_calls() as recording:
        insert(1)
    assert len(recording.calls) == 1


def test_calls_that_fail_their_checks_are_not_recorded() -> None:
    cache, k = formats.FP8_DS_MLA.allocate(2, 4), torch.zeros(1, 512, dtype=torch.bfloat16)
    with record_calls() as recording, pytest.raises(ValueError, match="slot_mapping"):
        ops.quantize_and_insert_k_cache(k, cache, torch.zeros(2, dtype=torch.int64), 4)
    assert recording.calls == []
