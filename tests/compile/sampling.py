# SPDX-License-Identifier: Apache-2.0
"""Few keys that have all pairs of options of many."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import Any

import pytest

from cute_kernels.runtime.key import KernelKey


def by_kind(keys: Iterable[KernelKey]) -> dict[tuple[str, str], list[KernelKey]]:
    """The keys of each kernel and architecture."""
    kinds: dict[tuple[str, str], list[KernelKey]] = {}
    for key in keys:
        kinds.setdefault((key.kernel_name, key.arch), []).append(key)
    return kinds


def pairs(key: KernelKey) -> set[tuple[tuple[str, Any], ...]]:
    """All pairs of values that two of its fields have."""
    values = [(field.name, getattr(key, field.name)) for field in fields(key)]
    return set(itertools.combinations(values, min(2, len(values))))


def all_pairs(keys: Sequence[KernelKey], known: Sequence[KernelKey] = ()) -> list[KernelKey]:
    """Of one kernel's keys, as many as have, with the known ones, every pair that any of them has."""
    missing = set().union(*map(pairs, keys)).difference(*map(pairs, known))
    chosen = []
    while missing:
        best = max(keys, key=lambda key: len(missing & pairs(key)))
        chosen.append(best)
        missing -= pairs(best)
    return chosen


def of_run(keys: Sequence[KernelKey], config: pytest.Config) -> list[KernelKey]:
    """Of each kernel and architecture, all keys with --every-kernel, and otherwise those that have every pair of
    options that any has."""
    if config.getoption("--every-kernel"):
        return list(keys)
    chosen = {key for of_kind in by_kind(keys).values() for key in all_pairs(of_kind)}
    return [key for key in keys if key in chosen]
