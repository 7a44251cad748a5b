# SPDX-License-Identifier: Apache-2.0
"""V4.1's layers on the GPU, made of kernels: rows of a batch and alone, with dependent launches and without."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from cute_kernels.runtime.ops import FALLBACK_VARIABLE
from perf import layer_v41
from perf.layer_v41 import MODEL, V41Case, V41LayerStep
from perf.measure import capture
from tests.perf.test_layer_v41 import SMALL

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]


@pytest.fixture(autouse=True)
def reduced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FALLBACK_VARIABLE, raising=False)
    monkeypatch.setattr(layer_v41, "KINDS", SMALL)
    monkeypatch.setattr(layer_v41, "V41_PRESETS", {MODEL: layer_v41.V41_PRESETS[MODEL].reduced()})


def make_step(case: V41Case) -> V41LayerStep:
    return case.make_step(case.build_layers(max(case.lengths()) + 64))


@pytest.mark.parametrize("kind", SMALL)
def test_rows_alone_and_dependents(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request's rows are right in a batch; three layers in a row give the same bits if each kernel may start before
    the one ahead has ended, eagerly and in a graph."""
    case = V41Case(MODEL, kind, "decode", 5, 5 if kind == "draft" else 1, 300)
    step = make_step(case)
    assert step.is_right()
    monkeypatch.setattr(layer_v41, "V41Options", partial(layer_v41.V41Options, use_pdl=False))
    wanted = [call() for call in make_step(case).calls()]
    got = [call() for call in step.calls()]
    assert all(map(torch.equal, got, wanted))
    kept: list[torch.Tensor] = []
    graph, _ = capture([partial(lambda call: kept.append(call()), call) for call in step.calls()])
    for out in kept:
        out.zero_()
    graph.replay()
    assert all(map(torch.equal, kept[-3:], wanted))


@pytest.mark.parametrize("context", [0, 300])
@pytest.mark.parametrize("kind", ["window", "source2", "source1", "consumer1", "index"])
def test_chunks_of_a_prompt(kind: str, context: int) -> None:
    """Picks are the best of what each row sees; the first rows of a prompt see less than they may pick."""
    assert make_step(V41Case(MODEL, kind, "prefill", 1, 90, context)).is_right()
