# SPDX-License-Identifier: Apache-2.0
"""Clocks, power and temperature of the GPU while something is measured, as nvidia-smi tells them."""

from __future__ import annotations

import contextlib
import csv
import os
import statistics
import subprocess
import tempfile
from collections.abc import Iterator
from typing import Any

QUERIES = {"clocks.sm": "sm_mhz", "clocks.mem": "memory_mhz", "power.draw": "power_w", "temperature.gpu": "celsius"}
"""What nvidia-smi is asked for, and what a record calls it."""

EVERY_MS = 500


def first_gpu() -> str:
    """nvidia-smi's name of the first GPU that this process may use: it does not heed CUDA_VISIBLE_DEVICES."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip() or "0"


@contextlib.contextmanager
def watch() -> Iterator[dict[str, Any]]:
    """A dictionary that holds, when the block has ended, the number of `samples` and of each quantity the least, the
    median and the largest: {"sm_mhz": [1830, 1980, 1980], ...}. Where nvidia-smi says nothing it stays empty."""
    found: dict[str, Any] = {}
    query = f"--query-gpu={','.join(QUERIES)}"
    command = ("nvidia-smi", query, "--format=csv,noheader,nounits", "-i", first_gpu())
    with tempfile.TemporaryFile("w+") as out:
        try:
            watcher = subprocess.Popen([*command, "-lms", str(EVERY_MS)], stdout=out, stderr=subprocess.DEVNULL)
        except OSError:
            yield found
            return
        try:
            yield found
        finally:
            watcher.terminate()
            watcher.wait()
            out.seek(0)
            found |= summary(out.read())


def summary(text: str) -> dict[str, Any]:
    """What `watch` gives, of nvidia-smi's lines. One that is cut off, or without a number, is left out."""
    samples = []
    for line in csv.reader(text.splitlines()):
        with contextlib.suppress(ValueError):
            values = [float(value) for value in line]
            if len(values) == len(QUERIES):
                samples.append(values)
    if not samples:
        return {}
    ends = {
        name: [min(values), statistics.median(values), max(values)]
        for name, values in zip(QUERIES.values(), zip(*samples, strict=True), strict=True)
    }
    return {"samples": len(samples), **ends}
