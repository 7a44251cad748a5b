# SPDX-License-Identifier: Apache-2.0
"""Which form of prefill a step takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from layers import mla, prefill_form
from layers.prefill_form import MOST_TOKENS
from tests.layers.engine import Engine, Request, hidden_rows, make_layer

TABLE = {"sm_90a": {4: {64: {1000: 10, 5000: 300}, 128: {1000: 20}}}}


@pytest.mark.parametrize(
    ("arch", "ratio", "heads", "tokens", "context", "form"),
    [
        ("sm_90a", 4, 64, 10, 1000, "paged"),
        ("sm_90a", 4, 64, 11, 4999, "gathered"),
        ("sm_90a", 4, 100, 300, 5000, "paged"),
        ("sm_90a", 4, 128, 20, 10**6, "paged"),
        ("sm_90a", 4, 128, 21, 10**6, "gathered"),
        # nothing measured: short contexts, few heads, other ratios, other architectures
        ("sm_90a", 4, 64, 1, 999, "gathered"),
        ("sm_90a", 4, 63, 1, 5000, "gathered"),
        ("sm_90a", 1, 64, 1, 5000, "gathered"),
        ("sm_100a", 4, 64, 1, 5000, "gathered"),
        ("", 4, 64, 1, 5000, "gathered"),
    ],
)
def test_by_the_table(
    monkeypatch: pytest.MonkeyPatch, arch: str, ratio: int, heads: int, tokens: int, context: int, form: str
) -> None:
    monkeypatch.setattr(prefill_form, "MOST_TOKENS", TABLE)
    assert prefill_form.prefill_form(arch, ratio, heads, tokens, context) == form


def test_the_table_is_in_order() -> None:
    for by_ratio in MOST_TOKENS.values():
        for by_heads in by_ratio.values():
            for by_context in by_heads.values():
                assert list(by_context) == sorted(by_context)


@pytest.mark.parametrize("form", ["gathered", "paged"])
def test_a_layer_takes_what_is_chosen(monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    asked: list[tuple[Any, ...]] = []

    def choose(*args: Any) -> str:
        asked.append(args)
        return form

    monkeypatch.setattr(mla, "prefill_form", choose)
    hidden = hidden_rows(40, seed=1)
    outs = []
    for option in ("auto", form):
        layer = make_layer(4, prefill=option)
        outs.append(Engine(layer, seed=2).step([], [(Request(), hidden[:30]), (Request(), hidden[30:])])[0])
    assert torch.equal(*outs)
    assert asked == [("", 4, layer.mla_attn.num_heads, 40, 30)]
