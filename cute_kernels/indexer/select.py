# SPDX-License-Identifier: Apache-2.0
"""Which kernel scores a call: the one place that chooses, for mqa_logits, paged_mqa_logits and the scores of the ops
that pick from them. Which kernel picks: topk_select.py.

    kernel               arch              heads         keys of a page     formats       may run
    hopper/logits        sm_90a            16 k <= 64    a multiple of 8    FP8           always
    hopper/logits_mxfp4  sm_90a            16 k <= 64    a multiple of 8    MXFP4         always
    blackwell/logits     sm_100a, sm_103a  16 k <= 64    a multiple of 64   FP8, MXFP4    if trusted (runtime.trust)
    mma_sync/logits      all               1 to 64       any                FP8, MXFP4    where no other does

Contiguous keys are in one page, which counts as a multiple of 64.
"""

from __future__ import annotations

from functools import cache, lru_cache

from cute_kernels.formats import round_up
from cute_kernels.indexer.blackwell.logits import PAGE_BOX, BlackwellLogitsKey
from cute_kernels.indexer.blackwell.logits import most_rows as most_blackwell_rows
from cute_kernels.indexer.hopper.logits import LogitsKey
from cute_kernels.indexer.hopper.logits_mxfp4 import Mxfp4LogitsKey
from cute_kernels.indexer.mma_sync.logits import HEAD_TILE, ROWS, PortableLogitsKey
from cute_kernels.indexer.params import KEY_TILE
from cute_kernels.models import ModelConfig, has_indexer
from cute_kernels.runtime import trust
from cute_kernels.runtime.arch import BLACKWELL
from cute_kernels.runtime.key import KernelKey

HOPPER = "sm_90a"
MOST_HEADS, HEAD_STEP = 64, 16

SMALL_BOX = 8
"""Keys that a TMA box brings out of pages that are no multiple of a tile, on Hopper: rows of one swizzle pattern."""

MOST_ROWS = 4
"""Of a group, on Hopper."""

OwnKey = LogitsKey | Mxfp4LogitsKey | BlackwellLogitsKey
"""Of a kernel of the architecture's own."""


def has_own(arch: str, heads: int, page_rows: int = KEY_TILE) -> bool:
    """Whether the architecture's own kernels take queries with so many heads, and pages of so many keys."""
    step = {HOPPER: SMALL_BOX, **dict.fromkeys(BLACKWELL, PAGE_BOX)}.get(arch)
    return step is not None and heads % HEAD_STEP == 0 and page_rows % step == 0


def is_safe(op: str, arch: str, device_index: int) -> bool:
    """Whether the architecture's own kernels, where they take a call of this op, may run."""
    return arch == HOPPER or trust.is_trusted(op, BlackwellLogitsKey.kernel_name, device_index)


@cache
def own_key(arch: str, heads: int, rows: int, paged: bool, page_rows: int = KEY_TILE, mxfp4: bool = False) -> OwnKey:
    """The architecture's own kernel for requests of so many rows (contiguous keys: of any number) and pages of so many
    keys: `has_own` knows whether there is one."""
    most = most_rows(arch, heads, mxfp4)
    rows = rows_of_group(rows, most) if paged else most
    if arch in BLACKWELL:
        return BlackwellLogitsKey(arch, heads, rows, paged, mxfp4)
    box = SMALL_BOX if page_rows % KEY_TILE else KEY_TILE
    return (Mxfp4LogitsKey if mxfp4 else LogitsKey)(arch, heads, rows, paged, box)


@cache
def portable_key(arch: str, heads: int, rows: int, paged: bool, mxfp4: bool) -> PortableLogitsKey:
    """The kernel of every architecture, for requests of so many rows (contiguous keys: of any number)."""
    rows = rows_of_portable_group(rows) if paged else ROWS[-1]
    return PortableLogitsKey(arch, round_up(heads, HEAD_TILE), rows, paged, mxfp4)


def most_rows(arch: str, heads: int, mxfp4: bool) -> int:
    """Of a group."""
    return most_blackwell_rows(heads, mxfp4) if arch in BLACKWELL else MOST_ROWS


@lru_cache(maxsize=256)
def rows_of_group(rows: int, most: int) -> int:
    """The most even division of a request's rows into as few groups of at most so many as possible."""
    return -(-rows // -(-rows // most))


def rows_of_portable_group(rows: int) -> int:
    """That of ROWS which leaves least of the last group empty, the largest of several. One only for single rows: every
    team reads the keys for itself."""
    return min(reversed(ROWS[1:]), key=lambda size: round_up(rows, size)) if rows > 1 else 1


def heads_of(config: ModelConfig) -> int | None:
    """Index heads of a model that has an indexer, if there are kernels for so many."""
    heads = int(config.index_n_heads)
    return heads if has_indexer(config) and 0 < heads <= MOST_HEADS else None


def deployment_keys(config: ModelConfig, arch: str, paged: bool) -> list[KernelKey]:
    """Those of own kernels, or portable ones; both where own ones run only if they are trusted. Of every format, and of
    pages of 64 keys every size of a group. Every rank has all index heads."""
    heads = heads_of(config)
    if heads is None:
        return []
    own: list[KernelKey] = []
    if has_own(arch, heads):
        formats = [(mxfp4, most_rows(arch, heads, mxfp4) if paged else 1) for mxfp4 in (False, True)]
        own = [own_key(arch, heads, row + 1, paged, mxfp4=mxfp4) for mxfp4, rows in formats for row in range(rows)]
    if own and arch == HOPPER:
        return own
    sizes = ROWS if paged else ROWS[-1:]
    return [*own, *(portable_key(arch, heads, rows, paged, mxfp4) for mxfp4 in (False, True) for rows in sizes)]


def ctas(key: OwnKey | PortableLogitsKey, requests: int, rows: int, columns: int, multiprocessors: int) -> int:
    """One for every multiprocessor, if there are that many tiles."""
    tiles = requests * -(-rows // key.rows) * -(-columns // key.config.keys)
    return max(1, min(multiprocessors, tiles))
