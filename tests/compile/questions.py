# SPDX-License-Identifier: Apache-2.0
"""What tests ask about the text of a kernel's PTX or machine code. compiled.lock.json keeps the answers, as JSON."""

from __future__ import annotations

import re
from typing import Any


def count(text: str, pattern: str) -> int:
    """How often a pattern occurs."""
    return len(re.findall(pattern, text))


def findall(text: str, pattern: str) -> list[Any]:
    """All matches, in order."""
    return re.findall(pattern, text)


def places(text: str, pattern: str) -> list[int]:
    """Numbers of the instructions that have the pattern."""
    code = (line for line in text.splitlines() if ";" in line)
    return [i for i, line in enumerate(code) if re.search(pattern, line)]


def first_place(text: str, pattern: str) -> int:
    """The number of the first instruction that has the pattern."""
    code = (line for line in text.splitlines() if ";" in line)
    return next(i for i, line in enumerate(code) if re.search(pattern, line))


def distinct(text: str, pattern: str) -> list[Any]:
    """All different matches."""
    return sorted(set(re.findall(pattern, text)))


def parts(text: str, border: str, pattern: str) -> list[list[Any]]:
    """The matches in each of the parts that a border divides the text into."""
    return [re.findall(pattern, part) for part in re.split(border, text)]


def constants(text: str, pattern: str) -> list[str]:
    """What the pattern matches; of registers that a move gives a constant, the constant."""
    numbers = dict(re.findall(r"mov\.b32\s+(%r\d+), (\d+);", text))
    return [numbers.get(name, name) for name in re.findall(pattern, text)]
