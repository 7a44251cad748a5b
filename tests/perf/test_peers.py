# SPDX-License-Identifier: Apache-2.0
"""What is asked of peers."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from perf.peers import without_dependent_launch


def test_a_peer_is_told_not_to_launch_as_a_dependent(monkeypatch: pytest.MonkeyPatch) -> None:
    """In that call alone; of the platform it hears everything else."""
    module: Any = ModuleType("a_peer")
    module.current_platform = SimpleNamespace(is_arch_support_pdl=lambda: True, name="a platform")
    monkeypatch.setitem(sys.modules, "a_peer", module)

    def run(number: int) -> tuple[int, bool, str]:
        if number < 0:
            raise ValueError("a bad number")
        return number, module.current_platform.is_arch_support_pdl(), module.current_platform.name

    plain = without_dependent_launch(run, "a_peer")
    assert (run(3), plain(3), run(4)) == ((3, True, "a platform"), (3, False, "a platform"), (4, True, "a platform"))
    with pytest.raises(ValueError, match="a bad number"):
        plain(-1)
    assert run(5)[1]
