# SPDX-License-Identifier: Apache-2.0
"""Arguments one by one, and by name."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import pytest

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from cute_kernels.dsl.entry import entry_point


class Args(NamedTuple):
    q: Any
    squares: Any
    out: Any
    eps: Any


def entry_of(fakes: Args) -> tuple[Any, tuple[Any, ...], list[Args]]:
    """The function before it is compiled, its arguments, and the records that it launches."""
    seen: list[Args] = []
    entry, arguments = entry_point(seen.append, fakes)
    return inspect.unwrap(entry), arguments, seen


def test_what_is_none_among_the_fakes_is_no_argument() -> None:
    entry, arguments, seen = entry_of(Args("q", None, "out", None))
    assert arguments == ("q", "out")
    assert list(inspect.signature(entry).parameters) == ["q", "out"], "the names that a launch's messages have"
    entry(1, 2)
    assert seen == [Args(q=1, squares=None, out=2, eps=None)]
    assert isinstance(seen[0], Args)
    for wrong in ((1,), (1, 2, 3)):
        with pytest.raises(ValueError, match="zip"):
            entry(*wrong)


def test_every_field_may_be_an_argument() -> None:
    entry, arguments, seen = entry_of(Args(*range(4)))
    assert arguments == (0, 1, 2, 3), "0 is no None"
    entry(*"abcd")
    assert seen == [Args(*"abcd")]
