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
        asked.append((*args, more["window_size"], more["may_split"]))
        return form

    monkeypatch.setattr(mla, "sparse_mla_prefill_paged_form", choose)
    hidden = hidden_rows(440, seed=1)
    outs = []
    for option in ("auto", form):
        layer = make_layer(ratio, prefill=option)
        outs.append(Engine(layer, seed=2).step([], [(Request(), hidden[:30]), (Request(), hidden[30:])])[0])
    assert torch.equal(*outs)
    entries, columns = {1: (0, None), 4: (102, layer.config.index_topk), 128: (3, None)}[ratio]
    assert set(asked) == {(440, 2, layer.mla_attn.num_heads, entries, columns, layer.config.sliding_window, True)}


def test_rows_that_become_codes_are_not_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of steps without decode rows, of enough heads."""
    asked: list[bool] = []

    def choose(*args: Any, may_split: bool, **more: Any) -> str:
        asked.append(may_split)
        return "paged"

    monkeypatch.setattr(mla, "sparse_mla_prefill_paged_form", choose)
    layer, hidden = make_layer(4, prefill="auto"), hidden_rows(40, seed=1)
    engine, request = Engine(layer, seed=2), Request()
    for least in (layer.mla_attn.num_heads + 1, layer.mla_attn.num_heads):
        monkeypatch.setattr(mla, "LEAST_QUANTIZED_HEADS", least)
        engine.step([], [(request, hidden[:30])])
        engine.step([(request, hidden[30:31])], [(Request(), hidden[31:])])
    assert list(dict.fromkeys(asked[: len(asked) // 2])) == [True]
    assert list(dict.fromkeys(asked[len(asked) // 2 :])) == [False, True]
