# SPDX-License-Identifier: Apache-2.0
"""What `verify --layers` runs of a layer: one request, in chunks and row by row, on pages in another order."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from layers import verify
from layers.caches import KV_BLOCK_SIZE, SWA_BLOCK_SIZE
from tests.layers.engine import KINDS


@pytest.mark.parametrize("ratio", KINDS)
def test_steps_of_one_request(ratio: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A single row is a decode row; every position has a page of its own, and the first page none."""
    given: list[tuple[Any, ...]] = []
    build = verify.DeepseekV4MetadataBuilder.build

    def spy(self: Any, *args: Any) -> Any:
        given.append(args)
        return build(self, *args)

    monkeypatch.setattr(verify.DeepseekV4MetadataBuilder, "build", spy)
    out = verify._run(ratio, "cpu")
    assert out.shape[0] == sum(verify.STEPS)
    assert out.isfinite().all()
    lengths = torch.tensor(verify.STEPS).cumsum(0).tolist()
    assert [(a, b, c, e) for a, b, c, _, e in given] == [
        (ratio, [rows], [length], int(rows == 1)) for rows, length in zip(verify.STEPS, lengths, strict=True)
    ]
    assert {1} < set(verify.STEPS)
    for *_, tables, _ in given:
        for table, page in ((tables.swa, SWA_BLOCK_SIZE), (tables.compressed, KV_BLOCK_SIZE)):
            count = -(-sum(verify.STEPS) // page)
            assert table.dtype == torch.int32
            assert table.tolist() == [list(range(count, 0, -1))]
