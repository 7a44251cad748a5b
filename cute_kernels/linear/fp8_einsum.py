"""Which GEMM deepseek_v4_fp8_einsum runs: Hopper's own where it takes the call, Blackwell's own where it takes the call
and is trusted, the portable one elsewhere, and of each the one whose work tiles suit the call's size."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from cute_kernels.linear import select
from cute_kernels.linear.blackwell.gemm import ROWS, BlackwellGemmKey
from cute_kernels.linear.hopper.gemm import GemmKey
from cute_kernels.linear.mma_sync.gemm import PortableGemmKey
from cute_kernels.linear.params import CHUNK
from cute_kernels.runtime import trust
from cute_kernels.runtime.arch import BLACKWELL, arch_of, multiprocessors
from cute_kernels.runtime.compile import KernelKey
from cute_kernels.runtime.compile import launch as launch_key

HOPPER = select.HOPPER
OP = "deepseek_v4_fp8_einsum"
BLOCK_RECIPE = (1, 128, 128)

MAP_STRIDE = 2**40
"""Strides of a tensor that copies know by a descriptor are smaller, in bytes."""

BLACKWELL_TILES: tuple[tuple[int, int, float], ...] = ((ROWS, 64, 6.7), (ROWS, 128, 8.9), (ROWS, 256, 13.3))
"""Rows and columns of Blackwell's tiles, and what they take if shared memory binds: nobody has measured it. A chunk of
256 columns writes and reads 96 KB, at 128 bytes a clock of 1.85 GHz."""

PORTABLE_TILES: tuple[tuple[int, int, float], ...] = (
    (16, 64, 8.2),
    (32, 128, 14.7),
    (64, 128, 26.0),
    (128, 128, 44.4),
)
"""Rows and columns of the portable kernel's tiles, and the same of them. From perf/log/data/einsum_portable_1.txt."""


def key_for(
    arch: str, rows: int, groups: int, columns: int, chunks: int, multiprocessors: int, packed: bool
) -> tuple[KernelKey, int]:
    """The kernel for a call, and its number of CTAs: the architecture's own one, if it has one for such scales."""
    if arch == HOPPER and not packed:
        return select.many_rows("bf16", rows, groups, columns, chunks, multiprocessors)
    if arch in BLACKWELL:
        return blackwell_choice(arch, rows, groups, columns, multiprocessors, packed)
    return portable_choice(arch, rows, groups, columns, multiprocessors, packed)


@lru_cache(maxsize=4096)
def blackwell_choice(
    arch: str, rows: int, groups: int, columns: int, multiprocessors: int, packed: bool
) -> tuple[BlackwellGemmKey, int]:
    """The one of Blackwell's kernels that is through soonest, and its number of CTAs."""
    number, ctas = _soonest(BLACKWELL_TILES, rows, groups, columns, multiprocessors)
    return BlackwellGemmKey(arch, BLACKWELL_TILES[number][1], packed), ctas


@lru_cache(maxsize=4096)
def portable_choice(
    arch: str, rows: int, groups: int, columns: int, multiprocessors: int, packed: bool
) -> tuple[PortableGemmKey, int]:
    """The same of the portable kernels."""
    number, ctas = _soonest(PORTABLE_TILES, rows, groups, columns, multiprocessors)
    return PortableGemmKey(arch, *PORTABLE_TILES[number][:2], packed), ctas


def _soonest(
    tiles: tuple[tuple[int, int, float], ...], rows: int, groups: int, columns: int, multiprocessors: int
) -> tuple[int, int]:
    """Which tiles are through soonest if every round of them takes its time, and how many CTAs run then."""
    best, least, ctas = len(tiles) - 1, float("inf"), 1
    for number, (tile_rows, tile_columns, cost) in enumerate(tiles):
        count = groups * -(-rows // tile_rows) * -(-columns // tile_columns)
        time = -(-count // multiprocessors) * cost
        if time < least:
            best, least, ctas = number, time, min(count, multiprocessors)
    return best, ctas


def deployment_keys(config: Any, tp: int, arch: str) -> list[KernelKey]:
    """One kernel per kind of tile: a batch may have any size. On Hopper for fp32 scales, elsewhere for either kind."""
    if arch == HOPPER:
        return [*select.many_rows_keys("bf16")]
    keys: list[KernelKey] = []
    for packed in (False, True):
        if arch in BLACKWELL:
            keys += [BlackwellGemmKey(arch, columns, packed) for _, columns, _ in BLACKWELL_TILES]
        keys += [PortableGemmKey(arch, rows, columns, packed) for rows, columns, _ in PORTABLE_TILES]
    return keys


def supports(a: Any, a_scale: Any, b: Any, b_scale: Any, out: Any, equation: str, recipe: Any) -> tuple[bool, str]:
    """Whether `launch` can take these (checked) arguments, and if not, why."""
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


def launch(
    a: Any, a_scale: Any, b: Any, b_scale: Any, out: Any, equation: str, recipe: Any, use_pdl: bool = False
) -> None:
    """Run the kernel on the current stream of out's device. Arguments in the schema's order, checked and supported.

    use_pdl   on Hopper, start while the kernel before on the stream still runs, and wait for it
    """
    rows, groups, columns = out.shape
    if rows == 0 or groups == 0 or columns == 0:
        return
    if a.shape[2] == 0:
        out.zero_()
        return
    device_index = out.device.index
    arch, processors = arch_of(device_index), multiprocessors(device_index)
    packed = tuple(recipe) != BLOCK_RECIPE
    key: KernelKey
    if arch in BLACKWELL and not (_is_mapped(a, b) and trust.is_trusted(OP, device_index)):
        key, ctas = portable_choice(arch, rows, groups, columns, processors, packed)
    else:
        key, ctas = key_for(arch, rows, groups, columns, a.shape[2] // CHUNK, processors, packed)
    if isinstance(key, GemmKey):
        launch_key(key, device_index, a, a_scale, b, b_scale, out, None, ctas, use_pdl)
    else:
        launch_key(key, device_index, a, a_scale, b, b_scale, out, ctas)


def _is_mapped(*operands: Any) -> bool:
    """Whether descriptors of tensor copies can tell of operands."""
    return all(0 < operand.stride(axis) < MAP_STRIDE for operand in operands for axis in (0, 1))
