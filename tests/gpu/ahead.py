# SPDX-License-Identifier: Apache-2.0
"""Kernels compiled side by side before the tests that need them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from cute_kernels.runtime import cache
from cute_kernels.runtime.precompile import precompile


def compile_ahead(keys: Iterable[Any]) -> None:
    """Have them in the disk cache, if there is one."""
    folder = cache.default_directory()
    if folder is not None:
        failed = [outcome for outcome in precompile(keys, folder) if outcome.status == "failed"]
        assert not failed, failed
