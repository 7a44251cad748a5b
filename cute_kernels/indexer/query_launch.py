"""What the two forms of fused_indexer_q_rope_quant share between op and kernel: checks, choice of a kernel, launch."""

from __future__ import annotations

from functools import cache
from typing import Any

from cute_kernels.indexer.query import E2M1_ARCH, E4M3_ARCH, HEADS_AT_ONCE, QueryKey
from cute_kernels.runtime.arch import arch_number, arch_of
from cute_kernels.runtime.compile import launch as launch_key

SEVERAL_HEADS = 8192
"""Heads of a call, of all its tokens together, from which on a warp takes two groups of four. The bound lies between
calls of 4096 heads and of 65536: perf/notes/memory_bound.md has the times of one, two and four groups."""

MANY_HEADS = 262144
"""Heads from which on queries go through L1, and a warp takes what the longest calls are fastest with; same note. The
bound lies between calls of 65536 heads and of 2097152."""

SIZES = (0, SEVERAL_HEADS, MANY_HEADS)
"""Numbers of heads that have kernels of their own, and all from there to the next."""


def size_of(heads: int) -> int:
    """The one of SIZES that a call with so many heads in all belongs to."""
    return max(size for size in SIZES if size <= heads)


def key_for(
    arch: str, rounding: str, transformed: bool, size: int, formats: tuple[bool, bool, bool] = (False, True, False)
) -> QueryKey:
    """The kernel that serves calls of this size; formats: whether table, weights and scaled weights are bf16."""
    is_long = size == MANY_HEADS
    groups = 1 if size == 0 else 4 if is_long and (rounding or transformed) else 2
    return QueryKey(arch, rounding, transformed, *formats, groups=groups, through_l1=is_long)


def keys(arch: str, rounding: str, transformed: bool) -> list[QueryKey]:
    """The kernels of a model's layers: cosines and sines in fp32, weights in bf16 or as an fp32 GEMM leaves them, few
    tokens or many."""
    if arch_number(arch) < (E2M1_ARCH if rounding else E4M3_ARCH):
        return []
    formats = [(False, weights_bf16, False) for weights_bf16 in (True, False)]
    return [key_for(arch, rounding, transformed, size, each) for each in formats for size in SIZES]


def is_supported(index_q: Any, table: Any, codes: Any, codes_alignment: int, is_mxfp4: bool) -> tuple[bool, str]:
    """Whether the kernel can take these tensors of a checked call, and if not, why."""
    arch = arch_of(index_q.device.index)
    form, first = ("e2m1", E2M1_ARCH) if is_mxfp4 else ("e4m3", E4M3_ARCH)
    if arch_number(arch) < first:
        return False, f"{arch} cannot convert to {form}, sm_{first} and up can"
    for name, tensor, what, alignment in (
        ("index_q", index_q, "heads", 16),
        ("index_q_cos_sin_cache", table, "rows", 4 * table.element_size()),
        ("q_quant", codes, "heads", codes_alignment),
    ):
        size = tensor.element_size()
        strides = [tensor.stride(axis) * size for axis in range(tensor.dim() - 1) if tensor.shape[axis] > 1]
        if tensor.data_ptr() % alignment or any(stride % alignment for stride in strides):
            return False, (
                f"{what} of {name} must be {alignment}-byte aligned, got address {tensor.data_ptr():#x} and strides "
                f"{tuple(tensor.stride())}"
            )
    if index_q.shape[0] * max(index_q.shape[1], HEADS_AT_ONCE) >= 2**31:
        return False, f"there must be fewer than 2^31 heads, got {index_q.shape[0]} x {index_q.shape[1]}"
    return True, ""


@cache
def _key(
    device_index: int, rounding: str, transformed: bool, size: int, table_bytes: int, weight_bytes: int, out_bytes: int
) -> QueryKey:
    formats = (table_bytes == 2, weight_bytes == 2, out_bytes == 2)
    return key_for(arch_of(device_index), rounding, transformed, size, formats)


def run(
    positions: Any,
    index_q: Any,
    table: Any,
    index_weights: Any,
    softmax_scale: float,
    head_scale: float,
    rounding: str,
    transformed: bool,
    codes: Any,
    scales: Any | None,
    weights_out: Any,
    round_weights: bool,
    use_pdl: bool,
) -> None:
    """Run the kernel on the current stream of index_q's device; without tokens or heads there is nothing to run."""
    tokens, heads = index_q.shape[0], index_q.shape[1]
    if tokens * heads == 0:
        return
    device_index = index_q.device.index
    sizes = (table.element_size(), index_weights.element_size(), weights_out.element_size())
    launch_key(
        _key(device_index, rounding, transformed, size_of(tokens * heads), *sizes),
        device_index,
        *arguments(positions, index_q, table, index_weights, softmax_scale, head_scale, codes, scales, weights_out),
        round_weights,
        use_pdl,
    )


def arguments(
    positions: Any,
    index_q: Any,
    table: Any,
    index_weights: Any,
    softmax_scale: float,
    head_scale: float,
    codes: Any,
    scales: Any | None,
    weights_out: Any,
) -> tuple[Any, ...]:
    """What the kernel's entry point takes before its two flags. Rows and heads of one byte per column or less have
    strides in bytes."""
    return (
        positions,
        index_q,
        table.data_ptr(),
        table.stride(0) * table.element_size(),
        table.shape[0],
        index_weights.data_ptr(),
        index_weights.stride(0) * index_weights.element_size(),
        softmax_scale,
        head_scale,
        codes.data_ptr(),
        codes.stride(0),
        codes.stride(1),
        0 if scales is None else scales.data_ptr(),
        0 if scales is None else scales.stride(0) * 4,
        weights_out.data_ptr(),
        weights_out.stride(0) * weights_out.element_size(),
    )
