"""From a call of one of the three ops to the kernel of qnorm.py that serves it: choice, limits, launch."""

from __future__ import annotations

from functools import cache
from typing import Any

from cute_kernels.dsl.ptx import DEPENDENT_LAUNCH_ARCH
from cute_kernels.formats import FP8_DS_MLA, PLAIN_BF16, PLAIN_FP8
from cute_kernels.kv_cache.qnorm import QnormKey
from cute_kernels.runtime.arch import arch_number, arch_of
from cute_kernels.runtime.compile import launch as launch_key

MINIMUM_ARCH = {FP8_DS_MLA.id: 89, PLAIN_BF16.id: 80, PLAIN_FP8.id: 89}
"""First architecture per format: e4m3 conversion in hardware needs sm_89."""

FEW_ROWS = 4096
"""Up to so many rows of q, all tokens and heads together, one row per warp and angles ahead of the wait are faster;
from there on two, and rows first (perf/notes/memory_bound.md, perf/notes/insert_compress.md)."""


def _shape(query_rows: int) -> tuple[int, bool]:
    """(rows of a warp, whether it reads its angles early)."""
    return (1, True) if query_rows <= FEW_ROWS else (2, False)


def key_for(arch: str, kv_format: str, norm: bool = True, query_rows: int = 0) -> QnormKey:
    """The kernel that serves calls of this kind with so many rows of q."""
    return _key_of_shape(arch, kv_format, norm, *_shape(query_rows))


def _key_of_shape(arch: str, kv_format: str, norm: bool, rows: int, early: bool) -> QnormKey:
    return QnormKey(arch, kv_format, norm, rows, early=early and arch_number(arch) >= DEPENDENT_LAUNCH_ARCH)


def deployment(arch: str, kv_format: str) -> list[QnormKey]:
    """What the layers need: all of them normalize their queries."""
    if arch_number(arch) < MINIMUM_ARCH[kv_format]:
        return []
    return [key_for(arch, kv_format, query_rows=rows) for rows in (FEW_ROWS, FEW_ROWS + 1)]


@cache
def _key(device_index: int, kv_format: str, norm: bool, shape: tuple[int, bool]) -> QnormKey:
    return _key_of_shape(arch_of(device_index), kv_format, norm, *shape)


def key_of(q: Any, kv_format: str, norm: bool = True) -> QnormKey:
    """The kernel that serves a call on this q."""
    return _key(q.device.index, kv_format, norm, _shape(q.shape[0] * q.shape[1]))


def fits(
    q: Any,
    kv: Any,
    cache: Any,
    cos_sin_cache: Any,
    block_size: int,
    kv_format: str,
    q_out: tuple[str, Any] | None = None,
) -> tuple[bool, str]:
    """Whether `run` can take these (checked) arguments, and if not, why. q_out: name and tensor, where it is not q."""
    arch = arch_of(q.device.index)
    if arch_number(arch) < MINIMUM_ARCH[kv_format]:
        return False, f"{arch} has no e4m3 conversion, sm_{MINIMUM_ARCH[kv_format]} and up have"
    page_alignment = 16 if kv_format == PLAIN_BF16.id else 8
    for name, tensor, what, alignment in (
        ("q", q, "rows", 16),
        ("kv", kv, "rows", 16),
        ("cos_sin_cache", cos_sin_cache, "rows", 16),
        ("the cache", cache, "pages", page_alignment),
        *(() if q_out is None else ((*q_out, "rows", 8),)),
    ):
        if not _is_aligned(tensor, alignment):
            return False, (
                f"{what} of {name} must be {alignment}-byte aligned, got address {tensor.data_ptr():#x} and strides "
                f"{tuple(tensor.stride())}"
            )
    if max(cache.shape[0], 1) * block_size >= 2**31:
        return False, f"the cache must have fewer than 2^31 rows, got {cache.shape[0]} pages of {block_size}"
    if q.shape[0] * (q.shape[1] + 1) >= 2**31:
        return False, f"q must have fewer than 2^31 rows, got shape {tuple(q.shape)}"
    return True, ""


def _is_aligned(tensor: Any, alignment: int) -> bool:
    """Whether everything that a row or page can start at is a multiple of `alignment` bytes."""
    elements = alignment // tensor.element_size()
    outer = zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)
    return tensor.data_ptr() % alignment == 0 and all(size <= 1 or stride % elements == 0 for size, stride in outer)


def run(
    key: QnormKey,
    q: Any,
    kv: Any,
    cache: Any,
    slot_mapping: Any,
    positions: Any,
    cos_sin_cache: Any,
    eps: float,
    block_size: int,
    use_pdl: bool,
    out: tuple[int, int, int, int, int] = (0, 0, 0, 0, 0),
) -> None:
    """Run the kernel of `key` on the current stream of q's device, on checked arguments that fit.

    out    for plain_fp8: address of the e4m3 queries, bytes from token to token and from head to head, addresses of the
           KV scale and of the inverse query scale
    """
    if q.shape[0] == 0:
        return
    pool = cache.data_ptr(), cache.stride(0) * cache.element_size(), cache.shape[0] * block_size, block_size
    launch_key(key, q.device.index, q, kv, slot_mapping, positions, cos_sin_cache, *out, *pool, eps, use_pdl)
