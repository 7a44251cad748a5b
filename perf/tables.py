# SPDX-License-Identifier: Apache-2.0
"""Tables of the report."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(header: Sequence[str], rows: Iterable[Sequence[str]], numbers: Iterable[int] = ()) -> list[str]:
    """A markdown table; the columns `numbers` are aligned to the right."""
    right = set(numbers)
    rule = ["---:" if i in right else "---" for i in range(len(header))]
    return ["| " + " | ".join(line) + " |" for line in (header, rule, *rows)]
