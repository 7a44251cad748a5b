# SPDX-License-Identifier: Apache-2.0
"""The soak's steps and comparisons, with layers that only look like layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from scripts import soak
from scripts.soak import CAPTURED, LONGEST, REQUESTS, Soak, Step


class Copy:
    """A form whose result is what it got, and whose cache is a sum of all results."""

    def __init__(self, name: str, ratio: int, options: dict[str, Any], seed: int) -> None:
        self.name, self.hidden, self.cache = name, torch.zeros(LONGEST, 64), torch.zeros(1)
        self.graphs: dict[Any, None] = {}
        self.steps: list[tuple[Step, list[int]]] = []

    def run(self, step: Step, lengths: Sequence[int], hidden: torch.Tensor) -> torch.Tensor:
        self.steps.append((step, list(lengths)))
        self.graphs.update(dict.fromkeys({step.shape} & CAPTURED))
        self.cache += hidden.sum()
        return hidden.clone()

    def pools(self) -> dict[str, torch.Tensor]:
        return {"swa": self.cache}


@pytest.fixture
def soaked(monkeypatch: pytest.MonkeyPatch) -> Soak:
    monkeypatch.setattr(soak, "DEVICE", "cpu")
    monkeypatch.setattr(soak, "Form", Copy)
    return Soak("C4A", 3)


def test_steps_are_of_every_kind_and_fit(soaked: Soak) -> None:
    assert [soaked.step() for _ in range(300)] == [""] * 300
    assert soaked.has_seen_all
    assert {"decode", "mixed", "prompts"} == set(soaked.count)
    forms: Any = soaked.forms
    assert forms[0].steps == forms[1].steps == forms[2].steps
    before = [0] * REQUESTS
    for step, lengths in forms[0].steps:
        assert len(step.decodes) <= step.rows
        assert not set(step.decodes) & set(step.prompts)
        for request, length in enumerate(lengths):
            assert length <= LONGEST
            if request in step.decodes:
                assert length == before[request] + 1 > 1
            elif request not in step.prompts:
                assert length == before[request]
        before = lengths


@pytest.mark.parametrize("form", [1, 2])
def test_differences_are_told(soaked: Soak, form: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(5):
        assert soaked.step() == ""
    wrong: Any = soaked.forms[form]
    wrong.cache += 1
    assert soaked.compare_caches(5) == f"step 5: the {soak.FORMS[form]} layer's swa cache differs"
    run = wrong.run
    monkeypatch.setattr(wrong, "run", lambda *args: run(*args) + torch.finfo(torch.bfloat16).eps)
    assert f"rows of the {soak.FORMS[form]} layer differ" in soaked.step()


def test_bad_input(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, clue in ((["--seconds", "0"], "--seconds"), (["--layer", "C5A"], "--layer")):
        with pytest.raises(SystemExit) as raised:
            soak.main(arguments)
        assert raised.value.code == 2
        assert clue in capsys.readouterr().err
