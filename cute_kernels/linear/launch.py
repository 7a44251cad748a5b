# SPDX-License-Identifier: Apache-2.0
"""The GEMM ops on a GPU: which kernel a call takes, what the kernels can take, and their launches. What Hopper's
kernels are chosen by is in select.py.

fp8_gemm: on Hopper few rows, and whatever must not depend on their number, take the swapped operands' kernel and many
rows the other one; other architectures the kernels of deepseek_v4_fp8_einsum. That takes Hopper's own kernel where it
takes the call, Blackwell's own where it takes the call and is trusted, the portable one elsewhere, and of each the one
whose work tiles suit the call's size; on Hopper a few rows take the swapped operands' kernel, with K whole.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from cute_kernels.linear import select
from cute_kernels.linear.blackwell.gemm import ROWS, BlackwellGemmKey, BlackwellPairGemmKey
from cute_kernels.linear.call import Bf16GemmCall, DualGemmCall, EinsumCall, Fp8GemmCall, SquaresCall
from cute_kernels.linear.hopper.gemm import SCALE_BLOCK, GemmKey
from cute_kernels.linear.hopper.gemm_dual import DualGemmKey
from cute_kernels.linear.hopper.gemm_swap_ab import SwapAbKey
from cute_kernels.linear.mma_sync.gemm import PortableGemmKey
from cute_kernels.linear.params import CHUNK
from cute_kernels.models import ModelConfig
from cute_kernels.runtime import trust
from cute_kernels.runtime.arch import BLACKWELL, arch_of, grid_size, multiprocessors
from cute_kernels.runtime.compile import KernelKey
from cute_kernels.runtime.compile import launch as launch_key
from cute_kernels.runtime.key import OpKernel

# ---- what the kernels take

HOPPER = select.HOPPER
OUTPUTS = {"torch.bfloat16": "bf16", "torch.float32": "fp32", "torch.float8_e4m3fn": "e4m3"}


def is_aligned(tensor: torch.Tensor) -> bool:
    """Whether bulk tensor copies can move its rows."""
    strides = [tensor.stride(axis) * tensor.element_size() for axis in range(tensor.dim() - 1)]
    return tensor.data_ptr() % 16 == 0 and all(stride % 16 == 0 and 0 < stride < 2**40 for stride in strides)


def misfit(a: tuple[str, torch.Tensor], b: tuple[str, torch.Tensor], out: torch.Tensor) -> str:
    """Why bulk tensor copies cannot bring the operands, or the epilogue store the result; empty if they can."""
    for name, tensor in (a, b):
        if not is_aligned(tensor):
            return (
                f"{name} must be 16-byte aligned row by row, got address {tensor.data_ptr():#x} and strides "
                f"{tuple(tensor.stride())}"
            )
    if out.shape[-1] % 16:
        return f"N must be a multiple of 16, got {out.shape[-1]}"
    strides = [out.stride(axis) for axis in range(out.dim() - 1) if out.shape[axis] > 1]
    unit = 1 if out.element_size() == 4 else 2
    if any(stride % unit for stride in strides) or out.data_ptr() % (unit * out.element_size()):
        return f"out must be aligned to {unit} elements row by row, got strides {tuple(out.stride())}"
    return ""


# ---- deepseek_v4_fp8_einsum

OP = "deepseek_v4_fp8_einsum"
OWN = BlackwellGemmKey.kernel_name
BLOCK_RECIPE = (1, 128, 128)

MAP_STRIDE = 2**40
"""Strides of a tensor that copies know by a descriptor are smaller, in bytes."""

BLACKWELL_TILES: tuple[tuple[int, int, float], ...] = ((ROWS, 64, 6.7), (ROWS, 128, 8.9), (ROWS, 256, 13.3))
"""Rows and columns of Blackwell's tiles, and what they take if shared memory binds: nobody has measured it. A chunk of
256 columns writes and reads 96 KB, at 128 bytes a clock of 1.85 GHz."""

PAIR_ARCHS: tuple[str, ...] = ()
"""Where a pair of CTAs takes what would be tiles of 256 columns with fp32 scales: nowhere, until a GPU has run it."""

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
        few = select.swap_ab_whole("bf16", rows, groups, columns)
        return few or select.many_rows("bf16", rows, groups, columns, chunks, multiprocessors)
    if arch in BLACKWELL:
        return blackwell_choice(arch, rows, groups, columns, multiprocessors, packed)
    return portable_choice(arch, rows, groups, columns, multiprocessors, packed)


@lru_cache(maxsize=4096)
def blackwell_choice(
    arch: str, rows: int, groups: int, columns: int, multiprocessors: int, packed: bool
) -> tuple[BlackwellGemmKey, int]:
    """The one of Blackwell's kernels that is through soonest, and its number of CTAs."""
    number, ctas = _soonest(BLACKWELL_TILES, rows, groups, columns, multiprocessors)
    tile = BLACKWELL_TILES[number]
    if arch in PAIR_ARCHS and tile is BLACKWELL_TILES[-1] and rows > ROWS and not packed:
        return BlackwellPairGemmKey(arch), ctas
    return BlackwellGemmKey(arch, tile[1], packed), ctas


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


def _is_mapped(*operands: torch.Tensor) -> bool:
    """Whether descriptors of tensor copies can tell of operands."""
    return all(0 < operand.stride(axis) < MAP_STRIDE for operand in operands for axis in (0, 1))


def einsum_keys(config: ModelConfig, tp: int, arch: str) -> list[KernelKey]:
    """One kernel per kind of tile: a batch may have any size. On Hopper for fp32 scales, elsewhere for either kind."""
    if arch == HOPPER:
        return [*select.swap_ab_whole_keys("bf16"), *select.many_rows_keys("bf16")]
    keys: list[KernelKey] = []
    for packed in (False, True):
        if arch in BLACKWELL:
            keys += [BlackwellGemmKey(arch, columns, packed) for _, columns, _ in BLACKWELL_TILES]
            keys += [BlackwellPairGemmKey(arch)] * (arch in PAIR_ARCHS and not packed)
        keys += [PortableGemmKey(arch, rows, columns, packed) for rows, columns, _ in PORTABLE_TILES]
    return keys


def why_not_einsum(call: EinsumCall) -> str:
    """Why no kernel can take a (checked) call; empty if one can."""
    if call.a.shape[2] == 0:
        return ""
    for name, tensor in (("a", call.a), ("b", call.b), ("out", call.out)):
        strides = [tensor.stride(axis) * tensor.element_size() for axis in (0, 1)]
        if tensor.data_ptr() % 16 or any(stride % 16 for stride in strides):
            return (
                f"{name} must be 16-byte aligned row by row, got address {tensor.data_ptr():#x} and strides "
                f"{tuple(tensor.stride())}"
            )
    if call.out.shape[2] % 8:
        return f"R must be a multiple of 8, got {call.out.shape[2]}"
    return ""


def launch_einsum(call: EinsumCall, use_pdl: bool = False) -> None:
    """Run the kernel on the current stream of out's device.

    use_pdl   on Hopper, start while the kernel before on the stream still runs, and wait for it
    """
    rows, groups, columns = call.out.shape
    if rows == 0 or groups == 0 or columns == 0:
        return
    if call.a.shape[2] == 0:
        call.out.zero_()
        return
    device_index = call.out.device.index
    arch, processors = arch_of(device_index), multiprocessors(device_index)
    packed = tuple(call.recipe) != BLOCK_RECIPE
    key: KernelKey
    if arch in BLACKWELL and not (_is_mapped(call.a, call.b) and trust.is_trusted(OP, OWN, device_index)):
        key, ctas = portable_choice(arch, rows, groups, columns, processors, packed)
    else:
        key, ctas = key_for(arch, rows, groups, columns, call.a.shape[2] // CHUNK, processors, packed)
    operands = call.a, call.a_scale, call.b, call.b_scale, call.out
    if isinstance(key, GemmKey | SwapAbKey):
        launch_key(key, device_index, *operands, None, grid_size(ctas), use_pdl)
    else:
        launch_key(key, device_index, *operands, grid_size(ctas))


EINSUM = OpKernel(launch_einsum, why_not_einsum, einsum_keys)


# ---- fp8_gemm

EQUATION = "bhr,hdr->bhd"

MOST_SWAPPED_ROWS = 32
"""More rows are faster the other way round on an H200."""


def _swapped(call: Fp8GemmCall) -> tuple[SwapAbKey, int] | None:
    """The swapped operands' kernel for a call and its number of clusters, or None: that for many rows."""
    shape, output = call.out.shape, OUTPUTS[str(call.out.dtype)]
    chunks = call.a.shape[2] // CHUNK
    if call.batch_invariant or shape[0] <= MOST_SWAPPED_ROWS:
        return select.swap_ab("e4m3", output, *shape, chunks)
    return select.swap_ab_codes(*shape, chunks) if output == "e4m3" else None


def fp8_keys(config: ModelConfig, tp: int, arch: str) -> list[KernelKey]:
    """Of every FP8 linear of a model: for few rows one for each way to cut a weight's K, for many one for each tile."""
    if arch != HOPPER:
        return [*einsum_keys(config, tp, arch)]
    outputs = {output for kind, output, *_ in select.layer_gemms(config, tp) if kind == "e4m3"}
    many = [
        key for output in OUTPUTS.values() if output in outputs for key in select.many_rows_keys(output, may_split=True)
    ]
    return list(dict.fromkeys([*select.swap_ab_keys(config, tp, arch, "e4m3"), *select.swap_ab_codes_keys(), *many]))


def _as_einsum(call: Fp8GemmCall) -> EinsumCall:
    """The same product as a call of the other op, whose kernels there are everywhere."""
    return EinsumCall(call.a, call.a_scale, call.weight, call.weight_scale, call.out, EQUATION, BLOCK_RECIPE)


def why_not_fp8(call: Fp8GemmCall) -> str:
    """Why no kernel can take a (checked) call; empty if one can."""
    arch = arch_of(call.out.device.index)
    if arch != HOPPER:
        if OUTPUTS[str(call.out.dtype)] != "bf16":
            return f"a result of {call.out.dtype} has a kernel on {HOPPER} only, this is {arch}"
        return why_not_einsum(_as_einsum(call))
    if _swapped(call) is None and not is_aligned(call.out):
        return (
            f"out must be 16-byte aligned row by row for many rows, got address {call.out.data_ptr():#x} and strides "
            f"{tuple(call.out.stride())}"
        )
    return misfit(("a", call.a), ("b", call.weight), call.out)


def launch_fp8(call: Fp8GemmCall) -> None:
    """Run the kernel on the current stream of out's device."""
    rows, groups, outputs = call.out.shape
    if rows == 0 or groups == 0 or outputs == 0:
        return
    if call.a.shape[2] == 0 and call.out_scale is None:
        call.out.zero_()
        return
    device_index = call.out.device.index
    if arch_of(device_index) != HOPPER:
        launch_einsum(_as_einsum(call), call.use_pdl)
        return
    key: KernelKey
    swapped = _swapped(call)
    if swapped is not None:
        key, number = swapped
        number = grid_size(number)
    else:
        shape = OUTPUTS[str(call.out.dtype)], rows, groups, outputs, call.a.shape[2] // CHUNK
        key, number = select.many_rows(*shape, multiprocessors(device_index), may_split=True)
        number = number if key.splits > 1 else grid_size(number)  # a cluster of splits takes one work tile
    weight = call.weight, call.weight_scale
    launch_key(key, device_index, call.a, call.a_scale, *weight, call.out, call.out_scale, number, call.use_pdl)


FP8_GEMM = OpKernel(launch_fp8, why_not_fp8, fp8_keys)


# ---- fp8_gemm_squares


def squares_keys(config: ModelConfig, tp: int, arch: str) -> list[GemmKey]:
    """One for each work tile: a batch may have any size."""
    return [tile.key for tile in select.SQUARES_TILES] if arch == HOPPER else []


def why_not_squares(call: SquaresCall) -> str:
    """Why no kernel can take a (checked) call; empty if one can."""
    arch = arch_of(call.out.device.index)
    if arch != HOPPER:
        return f"there is a kernel on {HOPPER} only, this is {arch}"
    if not is_aligned(call.out):
        where = f"address {call.out.data_ptr():#x} and strides {tuple(call.out.stride())}"
        return f"out must be 16-byte aligned row by row, got {where}"
    return misfit(("a", call.a), ("weight", call.weight), call.out)


def launch_squares(call: SquaresCall) -> None:
    """Run the kernel on the current stream of out's device."""
    rows, outputs = call.out.shape
    if rows == 0 or outputs == 0:
        return
    if call.a.shape[1] == 0:
        call.out.zero_()
        call.squares.zero_()
        return
    device_index = call.out.device.index
    key, ctas = select.with_squares(rows, outputs, call.a.shape[1] // SCALE_BLOCK, multiprocessors(device_index))
    rows_of = call.a.unsqueeze(1), call.a_scale.unsqueeze(1)
    weight = call.weight.unsqueeze(0), call.weight_scale.unsqueeze(0)
    launch_key(key, device_index, *rows_of, *weight, call.out.unsqueeze(1), call.squares, grid_size(ctas), call.use_pdl)


FP8_GEMM_SQUARES = OpKernel(launch_squares, why_not_squares, squares_keys)


# ---- bf16_gemm

BF16_CHUNK = 64
"""Columns of K: 128 bytes."""


def bf16_keys(config: ModelConfig, tp: int, arch: str) -> list[KernelKey]:
    """Of the linears that read the hidden states and stay bf16: compressors' and the indexer's weights."""
    if arch != HOPPER:
        return []
    outputs = dict.fromkeys(output for kind, output, *_ in select.layer_gemms(config, tp) if kind == "bf16")
    many = [key for output in outputs for key in select.many_bf16_rows_keys(output)]
    return [*select.swap_ab_keys(config, tp, arch, "bf16"), *many]


def why_not_bf16(call: Bf16GemmCall) -> str:
    """Why no kernel can take a (checked) call; empty if one can."""
    arch = arch_of(call.out.device.index)
    if arch != HOPPER:
        return f"it has a kernel on {HOPPER} only, this is {arch}: torch.mm does the same"
    return misfit(("a", call.a), ("b", call.weight), call.out)


def launch_bf16(call: Bf16GemmCall) -> None:
    """Run the kernel on the current stream of out's device."""
    rows, outputs = call.out.shape
    if rows == 0 or outputs == 0:
        return
    shape = OUTPUTS[str(call.out.dtype)], rows
    chunks, device_index = -(-call.a.shape[1] // BF16_CHUNK), call.out.device.index
    a, b, out = call.a.unsqueeze(1), call.weight.unsqueeze(0), call.out.unsqueeze(1)
    key: KernelKey
    if call.batch_invariant or rows <= MOST_SWAPPED_ROWS or not is_aligned(out):
        key, number = select.swap_ab("bf16", *shape, 1, outputs, chunks)
        number = grid_size(number)
    else:
        key, number = select.many_bf16_rows(*shape, outputs, chunks, multiprocessors(device_index))
        number = number if key.splits > 1 else grid_size(number)  # a cluster of splits takes one work tile
    launch_key(key, device_index, a, None, b, None, out, None, number, call.use_pdl)


BF16_GEMM = OpKernel(launch_bf16, why_not_bf16, bf16_keys)


# ---- fp8_bf16_gemm


def dual_keys(config: ModelConfig, tp: int, arch: str) -> list[DualGemmKey]:
    """One takes every call, but those of so few rows that they come as halves."""
    return [DualGemmKey(arch), DualGemmKey(arch, halves=True)] if arch == HOPPER else []


def why_not_dual(call: DualGemmCall) -> str:
    """Why no kernel can take a (checked) call; empty if one can."""
    arch = arch_of(call.out.device.index)
    if arch != HOPPER:
        return f"there is a kernel on {HOPPER} only, this is {arch}"
    for name, result in (("out", call.out), ("x_out", call.x_out)):
        if not is_aligned(result):
            where = f"address {result.data_ptr():#x} and strides {tuple(result.stride())}"
            return f"{name} must be 16-byte aligned row by row, got {where}"
    first = misfit(("a", call.a), ("weight", call.weight), call.out)
    return first or misfit(("x", call.x), ("x_weight", call.x_weight), call.x_out)


def launch_dual(call: DualGemmCall) -> None:
    """Run the kernel on the current stream of out's device."""
    if call.out.shape[0] == 0:
        return
    rows = call.a.unsqueeze(1), call.a_scale.unsqueeze(1)
    weight = call.weight.unsqueeze(0), call.weight_scale.unsqueeze(0)
    bf16 = call.x.unsqueeze(1), call.x_weight.unsqueeze(0), call.x_out.unsqueeze(1)
    key = DualGemmKey(HOPPER, halves=call.out.shape[0] in select.HALVED_ROWS)
    launch_key(key, call.out.device.index, *rows, *weight, call.out.unsqueeze(1), *bf16, call.use_pdl)


DUAL_GEMM = OpKernel(launch_dual, why_not_dual, dual_keys)
