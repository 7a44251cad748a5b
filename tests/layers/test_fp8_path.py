# SPDX-License-Identifier: Apache-2.0
"""The way of a layer with FP8 weights on Hopper, by the references: queries as one FP8 product, results that attention
leaves as codes, norms that it does itself. It comes to what the plain way does, but for the rounding."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from layers import attention, mla, output
from layers.linear import Linear
from layers.mla import DeepseekV4MLAAttention
from layers.output import OutputProjection
from tests.layers.engine import KINDS, Engine, Request, hidden_rows, make_layer

GPU = torch.device("cuda", 0)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How often ops of this way are called."""
    for module in (mla, output):
        monkeypatch.setattr(module, "arch_of", lambda index: "sm_90a")
    monkeypatch.setattr(mla, "LEAST_QUANTIZED_HEADS", 1)
    monkeypatch.setattr(mla, "LEAST_RAW_HEADS", 1)
    monkeypatch.setattr(mla, "LEAST_RAW_C128A_HEADS", 1)
    monkeypatch.setattr(attention, "LEAST_RAW_ROWS", 4)
    monkeypatch.setattr(attention, "LEAST_RAW_DECODE_ROWS", 2)
    quantizes = DeepseekV4MLAAttention.quantizes
    monkeypatch.setattr(DeepseekV4MLAAttention, "quantizes", lambda self, device, m: quantizes(self, GPU, m))
    monkeypatch.setattr(Linear, "_has_fp8_product", lambda self, device: self.scale is not None)
    monkeypatch.setattr(OutputProjection, "_quantizes", lambda self, rotated: self.wo_b.quantized)
    counts: dict[str, int] = {}

    def count(name: str) -> None:
        run = getattr(attention, name)

        def counted(*args: Any, **named: Any) -> Any:
            counts[name] = counts.get(name, 0) + 1
            return run(*args, **named)

        monkeypatch.setattr(attention, name, counted)

    for name in ("fp8_linear", "fp8_linear_squares", "fused_q_kv_rmsnorm_quant"):
        count(name)
    return counts


ROWS = (([], [200, 9]), ([1], []), ([1, 1], []), ([], [3]), ([], [4]))
"""Of steps: decode rows of two requests, then prefill rows."""

RAW = (True, False, True, False, True)
"""Whether attention norms the queries of a step: from as many rows on as there have to be."""


def steps(ratio: int, **options: Any) -> list[torch.Tensor]:
    """What comes out of the steps of ROWS."""
    layer = make_layer(ratio, **options)
    engine, requests, found = Engine(layer, seed=1), (Request(), Request()), []
    for seed, counts in enumerate(ROWS):
        rows = [[(r, hidden_rows(n, seed=seed + n)) for r, n in zip(requests, part, strict=False)] for part in counts]
        found.append(torch.cat(engine.step(*rows)).float())
    return found


def plain_steps(ratio: int, **options: Any) -> list[torch.Tensor]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Linear, "_has_fp8_product", lambda self, device: False)
        patch.setattr(DeepseekV4MLAAttention, "quantizes", lambda self, device, m: False)
        patch.setattr(OutputProjection, "_quantizes", lambda self, rotated: False)
        return steps(ratio, **options)


@pytest.mark.parametrize("ratio", KINDS)
def test_the_layer_comes_to_the_same(ratio: int, hopper: dict[str, int]) -> None:
    want = plain_steps(ratio)
    assert hopper == {}
    got = steps(ratio)
    assert hopper == {"fused_q_kv_rmsnorm_quant": 5, "fp8_linear_squares": sum(RAW), "fp8_linear": 5 - sum(RAW)}
    for g, w, is_raw in zip(got, want, RAW, strict=True):
        # queries that attention norms are not rounded to bf16 in between, and so others of the codes that follow are
        # rounded up: by a step of up to 1/8
        assert is_raw != torch.equal(g, w)
        assert (g - w).square().mean() <= 0.04**2 * w.square().mean()


@pytest.mark.parametrize("ratio", KINDS)
def test_bits_that_no_other_rows_change(ratio: int, hopper: dict[str, int]) -> None:
    """Not by norms in attention, whose queries are another product."""
    got, want = (run(ratio, batch_invariant=True) for run in (steps, plain_steps))
    assert hopper == {"fused_q_kv_rmsnorm_quant": 5, "fp8_linear": 5}
    assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))


def test_few_heads_of_ratio_128_are_normed_before(hopper: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of decode rows."""
    heads = make_layer(128).num_heads
    for least, count in ((heads, 3), (heads + 1, 2)):
        monkeypatch.setattr(mla, "LEAST_RAW_C128A_HEADS", least)
        hopper.clear()
        steps(128)
        assert hopper["fp8_linear_squares"] == count
