# SPDX-License-Identifier: Apache-2.0
"""A short soak, and that a soak notices one wrong bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cute_kernels.runtime.ops import FALLBACK_VARIABLE
from scripts import soak

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]


@pytest.fixture(autouse=True)
def no_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FALLBACK_VARIABLE, raising=False)


def test_ten_seconds_of_mixed_steps() -> None:
    result = soak.run(tuple(soak.LAYERS), 10, 0)
    assert result["problem"] == ""
    assert all({"decode", "mixed", "prompts"} <= set(counts) for counts in result["steps"].values())


@pytest.mark.parametrize("where", ["result", "cache"])
def test_one_wrong_bit_ends_it(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = soak.Form.run

    def wrong(self: soak.Form, *args: Any) -> torch.Tensor:
        out = run(self, *args)
        if self.name == "captured" and len(self.graphs) == 2:
            bad = out.view(torch.int16) if where == "result" else self.pools()["swa"]
            bad.view(-1)[5] ^= 1
        return out

    monkeypatch.setattr(soak.Form, "run", wrong)
    result = soak.run(("C4A",), 10, 0)
    assert "of the captured layer differ" in result["problem"] or "the captured layer's swa cache" in result["problem"]
