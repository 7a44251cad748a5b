"""Which kernel deepseek_v4_fp8_einsum runs: none but on Hopper, and there the one whose tiles suit the call's size."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

from cute_kernels.formats import HEAD_DIM
from cute_kernels.output.einsum_sm90 import CHUNK, EinsumKey
from cute_kernels.runtime.arch import arch_of, multiprocessors
from cute_kernels.runtime.compile import launch as launch_key

ARCH = "sm_90a"
BLOCK_RECIPE = (1, 128, 128)

TILES: tuple[tuple[EinsumKey, float], ...] = (
    (EinsumKey(ARCH, rows=64, columns=32, stages=16, depth=2), 6.8),
    (EinsumKey(ARCH, rows=64, columns=64, stages=12, depth=4), 8.0),
    (EinsumKey(ARCH, rows=64, columns=128, stages=8, depth=2), 11.5),
    (EinsumKey(ARCH, rows=128, columns=64, stages=8, depth=2), 11.0),
    (EinsumKey(ARCH, rows=128, columns=128, stages=6, depth=2), 15.5),
)
"""Kernels, and the microseconds that a multiprocessor of an H200 takes for one of their tiles with K = 4096.

From perf/notes/data/einsum_4.txt, which has these tiles at every size.
"""


@lru_cache(maxsize=4096)
def choose(rows: int, groups: int, columns: int, chunks: int, multiprocessors: int) -> tuple[EinsumKey, int]:
    """The kernel that is through soonest if every round of tiles takes its time, and its number of blocks."""
    best, least, blocks = TILES[-1][0], float("inf"), 1
    for key, cost in TILES:
        tiles = groups * -(-rows // key.rows) * -(-columns // key.columns)
        time = -(-tiles // multiprocessors) * cost
        if time < least:
            best, least, blocks = key, time, min(tiles, multiprocessors)
    return with_depth(best, chunks), blocks


def with_depth(key: EinsumKey, chunks: int) -> EinsumKey:
    """`key`, or without depth if that does not divide the number of chunks."""
    return replace(key, depth=1) if chunks % key.depth else key


def deployment_keys(config: Any, tp: int, arch: str) -> list[EinsumKey]:
    """One kernel per kind of tile: a batch may have any size."""
    if arch != ARCH:
        return []
    width = config.num_attention_heads // config.o_groups * HEAD_DIM
    return [with_depth(key, width // CHUNK) for key, _ in TILES]


def supports(a: Any, a_scale: Any, b: Any, b_scale: Any, out: Any, equation: str, recipe: Any) -> tuple[bool, str]:
    """Whether `launch` can take these (checked) arguments, and if not, why."""
    arch = arch_of(out.device.index)
    if arch != ARCH:
        return False, f"the kernel is for {ARCH}, got {arch}"
    if tuple(recipe) != BLOCK_RECIPE:
        return False, f"on {ARCH} the recipe must be {BLOCK_RECIPE}, got {tuple(recipe)}"
    if a.shape[2] == 0:
        return True, ""
    for name, tensor in (("a", a), ("b", b), ("out", out)):
        strides = [tensor.stride(axis) * tensor.element_size() for axis in (0, 1)]
        if tensor.data_ptr() % 16 or any(stride % 16 for stride in strides):
            return False, (
                f"{name} must be 16-byte aligned row by row, got address {tensor.data_ptr():#x} and strides "
                f"{tuple(tensor.stride())}"
            )
    if out.shape[2] % 8:
        return False, f"R must be a multiple of 8, got {out.shape[2]}"
    return True, ""


def launch(a: Any, a_scale: Any, b: Any, b_scale: Any, out: Any, equation: str, recipe: Any) -> None:
    """Run the kernel on the current stream of out's device. Arguments in the schema's order, checked and supported."""
    rows, groups, columns = out.shape
    if rows == 0 or groups == 0 or columns == 0:
        return
    if a.shape[2] == 0:
        out.zero_()
        return
    device_index = out.device.index
    key, blocks = choose(rows, groups, columns, a.shape[2] // CHUNK, multiprocessors(device_index))
    launch_key(key, device_index, a, a_scale, b, b_scale, out, blocks)
