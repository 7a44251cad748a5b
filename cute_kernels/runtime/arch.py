# SPDX-License-Identifier: Apache-2.0
"""The one place that asks the device: which architecture it has, and what that architecture offers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from difflib import get_close_matches
from functools import cache

import torch

ARCH_OF_CAPABILITY = {
    (8, 0): "sm_80",
    (8, 6): "sm_86",
    (8, 7): "sm_87",
    (8, 9): "sm_89",
    (9, 0): "sm_90a",
    (10, 0): "sm_100a",
    (10, 3): "sm_103a",
    (12, 0): "sm_120a",
    (12, 1): "sm_121a",
}
"""Compute capability -> the target kernels are compiled for."""

BLACKWELL = ("sm_100a", "sm_103a")
"""Targets with tcgen05 instructions."""

SMEM_BYTES = {
    "sm_80": 166912,
    "sm_86": 101376,
    "sm_87": 166912,
    "sm_89": 101376,
    "sm_90a": 232448,
    "sm_100a": 232448,
    "sm_103a": 232448,
    "sm_120a": 101376,
    "sm_121a": 101376,
}
"""Shared memory, in bytes, that one block may ask for."""


LARGE_CLUSTERS = ("sm_90a", "sm_100a", "sm_103a")
"""Targets with clusters of blocks that have more than 200 KB of shared memory each."""


@cache
def arch_of(device_index: int) -> str:
    """The compile target of a CUDA device, for example "sm_90a". ValueError if no kernel can run there."""
    capability = torch.cuda.get_device_capability(device_index)
    if capability not in ARCH_OF_CAPABILITY:
        known = ", ".join(f"{major}.{minor}" for major, minor in ARCH_OF_CAPABILITY)
        raise ValueError(
            f"arch_of: cuda:{device_index}: expected compute capability {known}, got {capability[0]}.{capability[1]}"
        )
    return ARCH_OF_CAPABILITY[capability]


@cache
def multiprocessors(device_index: int) -> int:
    """How many multiprocessors a CUDA device has."""
    return int(torch.cuda.get_device_properties(device_index).multi_processor_count)


def check_arch(arch: str) -> str:
    """`arch` itself; ValueError on a target that this project does not name."""
    if arch not in SMEM_BYTES:
        digits = arch[3:].rstrip("af")
        old = arch.startswith("sm_") and digits.isdigit() and int(digits) < 80
        close = get_close_matches(arch, SMEM_BYTES, n=1, cutoff=0.8)
        hint = ": kernels need sm_80 or newer" if old else f": did you mean {close[0]}?" if close else ""
        raise ValueError(f"arch: expected one of {', '.join(SMEM_BYTES)}, got {arch!r}{hint}")
    return arch


def arch_number(arch: str) -> int:
    """90 of "sm_90a": architectures compare by it. ValueError on a target that this project does not name."""
    check_arch(arch)
    return int(arch[3:].rstrip("a"))


_most_ctas: int | None = None


def grid_size(ctas: int, cluster: int = 1) -> int:
    """CTAs of a grid that walks over its work tiles: `ctas`, or inside `small_grids` fewer. cluster: CTAs that must be
    there together"""
    return ctas if _most_ctas is None else max(cluster, min(ctas, _most_ctas // cluster * cluster))


@contextlib.contextmanager
def small_grids(most: int | None) -> Iterator[None]:
    """Inside, grids that walk over their work tiles have at most so many CTAs, so that small calls give each of them
    several; None: as many as suit the GPU. How calls are split does not change. Not thread-safe."""
    global _most_ctas
    before, _most_ctas = _most_ctas, most
    try:
        yield
    finally:
        _most_ctas = before
