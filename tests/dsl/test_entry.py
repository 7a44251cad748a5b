# SPDX-License-Identifier: Apache-2.0
"""Arguments one by one, and by name."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from cute_kernels.dsl.entry import entry_point


class Args(NamedTuple):
    q: Any
    squares: Any
    out: Any
    eps: Any


def test_what_is_none_among_the_fakes_is_no_argument() -> None:
    fakes = Args("q", None, "out", None)
    entry: Any
    entry, arguments = entry_point(lambda args: None, fakes)
    assert arguments == ("q", "out")
    assert entry.record((1, 2)) == Args(q=1, squares=None, out=2, eps=None)
    assert isinstance(entry.record((1, 2)), Args)
    for wrong in ((1,), (1, 2, 3)):
        with pytest.raises(ValueError, match="zip"):
            entry.record(wrong)


def test_every_field_may_be_an_argument() -> None:
    entry: Any
    entry, arguments = entry_point(lambda args: None, Args(*range(4)))
    assert arguments == (0, 1, 2, 3), "0 is no None"
    assert entry.record(tuple("abcd")) == Args(*"abcd")
