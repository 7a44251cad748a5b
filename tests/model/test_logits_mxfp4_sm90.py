# SPDX-License-Identifier: Apache-2.0
"""The MXFP4 score kernels of Hopper, run by the model of the GPU as the op launches them, against float64."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from cute_kernels.formats import INDEXER_MXFP4
from cute_kernels.indexer.hopper.logits_mxfp4 import Mxfp4LogitsKey
from tests.model import test_logits_sm100 as calls
from tests.model import trace
from tests.model.events import Record
from tests.model.replay import Replay
from tests.model.test_logits_sm100 import Rows, check_contiguous, check_pages, many_tiles, program, some_weights

ONE_ROW = Mxfp4LogitsKey("sm_90a", 64, 1, True, 64)
SMALL_BOXES = Mxfp4LogitsKey("sm_90a", 32, 1, True, 8)
TWO_ROWS = Mxfp4LogitsKey("sm_90a", 64, 2, True, 64)
CONTIGUOUS = Mxfp4LogitsKey("sm_90a", 16, 4, False, 64)

NEAR = (112, 127)
"""Scale bytes of rows that become one e4m3 row."""


@pytest.fixture(autouse=True)
def near_and_far(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of keys, rows and requests three quarters are near."""
    make = Rows.make

    def some_near(rng: np.random.Generator, mxfp4: bool, *lead: int) -> Rows:
        rows = make(rng, mxfp4, *lead)
        is_near = rng.random(lead[0]) < 0.75
        rows.scales[is_near] = rng.integers(*NEAR, rows.scales[is_near].shape, dtype=np.uint8)
        return rows

    monkeypatch.setattr(calls.Rows, "make", some_near)


@pytest.mark.parametrize("key", [ONE_ROW, SMALL_BOXES, TWO_ROWS], ids=str)
def test_pages(key: Mxfp4LogitsKey) -> None:
    """Lengths that differ between rows, are none, negative, or longer than the table and the columns; pages that are
    not there."""
    check_pages(key, INDEXER_MXFP4, 64 if key.box == 64 else 24, key.rows == 1, key.rows)


def test_contiguous() -> None:
    """Groups that are not full, ranges of all kinds, NaN in a key and in a query; every column is written once."""
    check_contiguous(CONTIGUOUS, 0, 1, program(CONTIGUOUS))


def test_many_tiles_in_one_block() -> None:
    """All rings go round; rows that see few keys are not scored; a key is NaN. In other orders, too, nothing hangs, and
    nothing meets that has to be kept apart."""
    record = Record(program(ONE_ROW))
    many_tiles(ONE_ROW, INDEXER_MXFP4, program(ONE_ROW), lambda cluster: record, has_short_groups=True)
    steps = trace.make(record)
    for seed in range(3):
        found = Replay(steps, seed, laziness=(0.5, 0.95, 0.05)[seed]).run()
        assert [one for one in found if not one.startswith(calls.STALE)] == []


@pytest.mark.parametrize("key", [ONE_ROW, CONTIGUOUS], ids=str)
def test_weights_that_are_large(key: Mxfp4LogitsKey, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to some 2^106 times what e4m3 codes make of a head: 2^25 times as much is no fp32 number."""
    make = Rows.make

    def small_keys(rng: np.random.Generator, mxfp4: bool, *lead: int) -> Rows:
        rows = make(rng, mxfp4, *lead)
        if len(lead) == 1:
            rows.scales -= 40
        return rows

    def large_weights(rng: np.random.Generator, rows: int, heads: int) -> np.ndarray:
        found = some_weights(rng, rows, heads)
        found[::2] *= np.float32(2.0**112)
        return found

    monkeypatch.setattr(calls.Rows, "make", small_keys)
    monkeypatch.setattr(calls, "some_weights", large_weights)
    if key.paged:
        check_pages(key, INDEXER_MXFP4, 64, True, 5)
    else:
        check_contiguous(key, 0, 5, program(key))
