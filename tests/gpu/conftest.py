# SPDX-License-Identifier: Apache-2.0
"""Without a GPU, which every test of this folder needs, they are collected where the folder is named, and not in a run
of all tests: there, thousands of skipped tests would take half a minute. test_collection.py sees to it that they could
be."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from cute_kernels.runtime import kept

HERE = Path(__file__).resolve().parent


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if torch.cuda.is_available() or collection_path.name == "test_collection.py":
        return None
    named = [Path(config.invocation_params.dir, argument.partition("::")[0]).resolve() for argument in config.args]
    return None if any(HERE in (path, *path.parents) for path in named) else True


def _forgetting(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def forget(*args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        finally:
            kept.forget()

    return forget


# which kernels run is changed by many tests, and calls that came before would not notice
pytest.MonkeyPatch.setattr = _forgetting(pytest.MonkeyPatch.setattr)  # type: ignore[method-assign]
pytest.MonkeyPatch.undo = _forgetting(pytest.MonkeyPatch.undo)  # type: ignore[method-assign]
