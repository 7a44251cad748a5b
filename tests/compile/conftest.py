# SPDX-License-Identifier: Apache-2.0
"""Where the tests of this folder keep what they compile, and the lock of what they need not compile."""

from __future__ import annotations

import shutil
import time

import pytest

from tests.compile import lock, reports

KEEP_SECONDS = 7 * 86400.0


@pytest.fixture(scope="session", autouse=True)
def kept(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A folder that outlives the run, if pytest's cache is not off, without what is older than a week."""
    cache: pytest.Cache | None = getattr(pytestconfig, "cache", None)
    root = tmp_path_factory.mktemp("cute_kernels") if cache is None else cache.mkdir("cute_kernels")
    old = time.time() - KEEP_SECONDS
    for folder in root.glob("v*/*/*/"):
        if folder.stat().st_mtime < old:
            shutil.rmtree(folder, ignore_errors=True)
    for path in root.glob("*.object"):
        if path.stat().st_mtime < old:
            path.unlink(missing_ok=True)
    reports.folder = root
    if not pytestconfig.getoption("--every-kernel"):
        reports.known = lock.Lock.read()
