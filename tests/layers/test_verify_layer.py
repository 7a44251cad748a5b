# SPDX-License-Identifier: Apache-2.0
"""What `verify --layers` runs of a layer: one request, in chunks and row by row, on pages in another order."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from layers import verify
from layers.caches import KV_BLOCK_SIZE, SWA_BLOCK_SIZE
from layers.v41_config import KINDS as V41_KINDS
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


@pytest.mark.full
def test_layers_of_v41(monkeypatch: pytest.MonkeyPatch) -> None:
    """All kinds, in the same steps, and a block of the draft behind them."""
    given: list[tuple[Any, ...]] = []
    build = verify.V41StepBuilder.build

    def spy(self: Any, rows: Any, lengths: Any, tables: Any, decodes: int, **options: Any) -> Any:
        given.append((rows, lengths, decodes, options.get("is_draft", False)))
        return build(self, rows, lengths, tables, decodes, **options)

    monkeypatch.setattr(verify.V41StepBuilder, "build", spy)
    out, config = verify._run_v41("cpu"), verify._v41_config()
    drafts, total = len(config.draft_layer_ids), sum(verify.STEPS)
    assert {config.kind_of(i) for i in range(len(config.compress_ratios))} == set(V41_KINDS)
    assert out.shape == (config.num_hidden_layers * total + drafts * config.draft_block_size, config.hidden_size)
    assert out.isfinite().all()
    lengths = torch.tensor(verify.STEPS).cumsum(0).tolist()
    steps = [([rows], [length], int(rows == 1), False) for rows, length in zip(verify.STEPS, lengths, strict=True)]
    assert given == [*steps, ([config.draft_block_size], [total + config.draft_block_size], 1, True)]
