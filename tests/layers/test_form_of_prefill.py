# SPDX-License-Identifier: Apache-2.0
"""Which form of prefill a step takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from layers import mla
from tests.layers.engine import Engine, Request, hidden_rows, make_layer


@pytest.mark.parametrize("ratio", [1, 4, 128])
@pytest.mark.parametrize("form", ["gathered", "paged"])
def test_a_layer_takes_what_is_chosen(monkeypatch: pytest.MonkeyPatch, form: str, ratio: int) -> None:
    asked: list[tuple[Any, ...]] = []

    def choose(*args: Any, **more: Any) -> str:
        asked.append((*args, more["window_size"]))
        return form

    monkeypatch.setattr(mla, "sparse_mla_prefill_paged_form", choose)
    hidden = hidden_rows(440, seed=1)
    outs = []
    for option in ("auto", form):
        layer = make_layer(ratio, prefill=option)
        outs.append(Engine(layer, seed=2).step([], [(Request(), hidden[:30]), (Request(), hidden[30:])])[0])
    assert torch.equal(*outs)
    entries, columns = {1: (0, None), 4: (102, layer.config.index_topk), 128: (3, None)}[ratio]
    assert set(asked) == {(440, 2, layer.mla_attn.num_heads, entries, columns, layer.config.sliding_window)}
