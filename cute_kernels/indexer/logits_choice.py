"""What the launches of mqa_logits and paged_mqa_logits share: which kernels there are and what they can read."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from cute_kernels.formats import INDEX_DIM
from cute_kernels.indexer.logits_plan import KEYS
from cute_kernels.indexer.logits_sm90 import LogitsKey
from cute_kernels.indexer.logits_sm100 import BlackwellLogitsKey
from cute_kernels.indexer.logits_sm100_plan import PAGE_BOX
from cute_kernels.indexer.logits_sm100_plan import most_rows as blackwells_most_rows
from cute_kernels.indexer.mxfp4_sm90 import Mxfp4LogitsKey
from cute_kernels.runtime import trust
from cute_kernels.runtime.arch import BLACKWELL

ARCH = "sm_90a"
MOST_HEADS, HEAD_STEP = 64, 16
SMALL_BOX = 8
"""Keys that a copy brings out of pages that are no multiple of a tile, on Hopper: rows of one swizzle pattern."""

MOST_ROWS = 4
"""Of a group, on Hopper."""


def most_rows(arch: str, heads: int, mxfp4: bool) -> int:
    """Of a group."""
    if arch in BLACKWELL:
        return blackwells_most_rows(heads, mxfp4)
    return MOST_ROWS


@lru_cache(maxsize=256)
def rows_of_group(rows: int, most: int) -> int:
    """The most even division of a request's rows into as few groups of at most so many as possible."""
    return -(-rows // -(-rows // most))


def key_for(
    arch: str, heads: int, rows: int, paged: bool, page_rows: int = KEYS, mxfp4: bool = False
) -> LogitsKey | BlackwellLogitsKey:
    """The architecture's own kernel for requests of so many rows (contiguous keys: of any number), and pages of so many
    keys: `has_own` knows whether there is one."""
    most = most_rows(arch, heads, mxfp4)
    rows = rows_of_group(rows, most) if paged else most
    if arch in BLACKWELL:
        return BlackwellLogitsKey(arch, heads, rows, paged, mxfp4)
    box = SMALL_BOX if page_rows % KEYS else KEYS
    return (Mxfp4LogitsKey if mxfp4 else LogitsKey)(arch, heads, rows, paged, box)


def own_keys(arch: str, heads: int, paged: bool) -> list[LogitsKey | BlackwellLogitsKey]:
    """Those of every format, and of pages of 64 keys every size of a group."""
    formats = [(mxfp4, most_rows(arch, heads, mxfp4) if paged else 1) for mxfp4 in (False, True)]
    return [key_for(arch, heads, row + 1, paged, mxfp4=mxfp4) for mxfp4, rows in formats for row in range(rows)]


def deployment_keys(config: Any, arch: str, paged: bool, portable: list[Any]) -> list[Any]:
    """Those of own kernels, or `portable` ones; both where own ones run only if they are trusted."""
    heads = heads_of(config)
    own = [] if heads is None or not has_own(arch, heads) else own_keys(arch, heads, paged)
    return own if own and arch == ARCH else [*own, *portable]


def heads_of(config: Any) -> int | None:
    """Index heads of a model that has an indexer, if there are kernels for so many."""
    heads = int(config.index_n_heads)
    return heads if 4 in config.compress_ratios and 0 < heads <= MOST_HEADS else None


def has_own(arch: str, heads: int, page_rows: int = KEYS) -> bool:
    """Whether the architecture's own kernels take queries with so many heads, and pages of so many keys."""
    step = {ARCH: SMALL_BOX, **dict.fromkeys(BLACKWELL, PAGE_BOX)}.get(arch)
    return step is not None and heads % HEAD_STEP == 0 and page_rows % step == 0


def is_safe(op: str, arch: str, device_index: int) -> bool:
    """Whether the architecture's own kernels, where they take a call of this op, may run."""
    return arch == ARCH or trust.is_trusted(op, device_index)


def why_not(q: Any, keys: Any, what: str, out: Any) -> str:
    """Why no kernel can take a call's (checked) queries, keys (named `what`) and scores; empty if one can."""
    heads = q.shape[-2]
    if not 0 < heads <= MOST_HEADS:
        return f"HI must be at least 1 and at most {MOST_HEADS}, got {heads}"
    for name, tensor, axes in (("q", q, range(q.dim() - 1)), (what, keys, range(0, keys.dim() - 1, keys.dim() - 1))):
        strides = [tensor.stride(axis) for axis in axes if tensor.shape[axis] > 1]
        if tensor.data_ptr() % 16 or any(stride % 16 or not 0 <= stride < 2**40 for stride in strides):
            return (
                f"{name} must be 16-byte aligned row by row, got address {tensor.data_ptr():#x} and strides "
                f"{tuple(tensor.stride())}"
            )
    if out.shape[0] * (out.shape[1] // KEYS + 2) >= 2**31:
        return f"there must be fewer than 2^31 tiles of {KEYS} scores, got out of shape {list(out.shape)}"
    return ""


def stride(tensor: Any, axis: int) -> int:
    """In elements; of an axis with one element, what a dense tensor would have: nobody uses it."""
    return int(tensor.stride(axis)) if tensor.shape[axis] > 1 else max(1, int(tensor.numel())) * INDEX_DIM


def scale_arguments(key: Any, q_scale: Any) -> tuple[int, ...]:
    """What Hopper's MXFP4 kernel and Blackwell's take more than Hopper's other one: address of the queries' scales
    [..., row, head] and strides in bytes, by request, if there are several, and row. Zeros where `q_scale` is None."""
    if type(key) is LogitsKey:
        return ()
    if q_scale is None:
        return 0, 0, 0
    strides = [q_scale.stride(axis) * q_scale.element_size() for axis in range(q_scale.dim() - 1)]
    return q_scale.data_ptr(), *([0] * (2 - len(strides))), *strides


def blocks(key: Any, requests: int, rows: int, columns: int, multiprocessors: int) -> int:
    """One for every multiprocessor, if there are that many tiles."""
    tiles = requests * -(-rows // key.rows) * -(-columns // key.plan.keys)
    return max(1, min(multiprocessors, tiles))
