"""What the launches of mqa_logits and paged_mqa_logits share: which kernels there are and what they can read."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from cute_kernels.formats import INDEX_DIM
from cute_kernels.indexer.logits_plan import KEYS
from cute_kernels.indexer.logits_sm90 import LogitsKey
from cute_kernels.indexer.mxfp4_sm90 import Mxfp4LogitsKey

ARCH = "sm_90a"
MOST_HEADS, HEAD_STEP = 64, 16
MOST_ROWS = 4
"""Of a group."""


@lru_cache(maxsize=256)
def rows_of_group(rows: int) -> int:
    """The most even division of a request's rows into as few groups as possible."""
    return -(-rows // -(-rows // MOST_ROWS))


def key_for(heads: int, rows: int, paged: bool, box: int = KEYS, mxfp4: bool = False) -> LogitsKey:
    """Hopper's kernel for groups of so many rows."""
    return (Mxfp4LogitsKey if mxfp4 else LogitsKey)(ARCH, heads, rows, paged, box)


def heads_of(config: Any) -> int | None:
    """Index heads of a model that has an indexer, if there are kernels for so many."""
    heads = int(config.index_n_heads)
    return heads if 4 in config.compress_ratios and 0 < heads <= MOST_HEADS else None


def is_hoppers(arch: str, heads: int) -> bool:
    """Whether Hopper's kernels take queries and keys like these, as far as they are not in pages."""
    return arch == ARCH and heads % HEAD_STEP == 0


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


def scale_arguments(q_scale: Any) -> tuple[int, ...]:
    """What Hopper's MXFP4 kernel takes more than the other: address of the queries' scales [..., row, head] and strides
    in bytes, by request, if there are several, and row. Nothing where `q_scale` is None."""
    if q_scale is None:
        return ()
    strides = [q_scale.stride(axis) * q_scale.element_size() for axis in range(q_scale.dim() - 1)]
    return q_scale.data_ptr(), *([0] * (2 - len(strides))), *strides


def blocks(key: Any, requests: int, rows: int, columns: int, multiprocessors: int) -> int:
    """One for every multiprocessor, if there are that many tiles."""
    tiles = requests * -(-rows // key.rows) * -(-columns // KEYS)
    return max(1, min(multiprocessors, tiles))
