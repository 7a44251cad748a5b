# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of everything between the first GEMMs and the scores or attention of a layer with a compressor, in one
launch: decode steps in which every fourth, or every 128th, token closes an entry. The ops that they are made of, one
after the other, stand beside them as a variant."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from cute_kernels.formats import FP8_DS_MLA, INDEXER_FP8
from cute_kernels.insert_compress.call import CompressCall, IndexCall
from cute_kernels.runtime.ops import OPS
from perf import compressor_c4, compressor_c128, indexer, qnorm
from perf.bench import Arguments, Bench, Case, Run, not_dependent
from perf.grid import draw_rows, mark

HEADS, INDEX_HEADS = 64, 64
ROWS = (1, 4, 16, 64, 256)
BETWEEN_ROWS = draw_rows("insert_compress", ROWS, 2)
COLUMNS, QUERY_COLUMNS = 2048 + 512 + INDEX_HEADS, HEADS * 512 + INDEX_HEADS * 128
"""Of the fused projections that the arguments are columns of."""

OP = "fused_qkv_insert_compress_index"
COMPRESS = "fused_qkv_insert_compress"


def make(rows: int, seed: int) -> Arguments:
    """A decode step of so many requests, one token each."""
    what = "closing" if rows == 1 else "decode"
    q, kv, pool, slots, *_ = qnorm._make(FP8_DS_MLA, HEADS, rows, seed)
    main, index = (compressor_c4._fused(kind, rows, what, seed) for kind in compressor_c4.KINDS[:2])
    _, index_q, _, weights, *factors, _, codes, out, _, _ = indexer._query(False, False, rows, seed)
    sums = torch.empty(rows, COLUMNS, device="cuda")
    wide = torch.empty(rows, QUERY_COLUMNS, dtype=torch.bfloat16, device="cuda")
    queries = wide[:, : HEADS * 512].unflatten(-1, (HEADS, 512)), wide[:, HEADS * 512 :].unflatten(-1, (-1, 128))
    columns = sums[:, :2048], sums[:, 2048:2560], sums[:, 2560:]
    for view, value in zip((*queries, *columns), (q, index_q, main[0], index[0], weights), strict=True):
        view.copy_(value)
    ape, positions, requests, starts, state, state_slots, table, angles, cache, entry_slots, weight, restart = main[
        1:13
    ]
    numbers: Any = compressor_c4.EPS, qnorm.BLOCK_SIZE, 0, "window", FP8_DS_MLA.id, INDEXER_FP8.id
    return IndexCall(
        *(queries[0], kv, pool, slots, positions, angles, requests, starts, state_slots, table, entry_slots, restart),
        *(columns[0], ape, weight, state, cache, columns[1], index[1], index[11], index[5], index[9]),
        *(queries[1], columns[2], codes, out, *numbers, *factors, False, True, True),
    )


def _four(*args: Any) -> None:
    for _, name, arguments in IndexCall(*args).parts():
        OPS[name].overload(*arguments)


def _variants() -> dict[str, Run]:
    from cute_kernels.insert_compress import insert_compress_index as kernel
    from cute_kernels.runtime.arch import arch_of

    def run(rows: int, groups: int, *args: Any) -> None:
        kernel.launch_with(kernel.InsertCompressIndexKey(arch_of(0), rows, groups), IndexCall(*args))

    shapes = {f"ours rows={rows} groups={groups}": partial(run, rows, groups) for rows, groups in kernel.SHAPES}
    return {"ours four launches": _four, **shapes}


def _same(got: Sequence[torch.Tensor], want: Sequence[torch.Tensor]) -> bool:
    """Rounding steps of a few sums may differ; the GPU tests compare with the four ops byte by byte."""
    pairs = [
        (g.contiguous().view(torch.uint8), w.contiguous().view(torch.uint8)) for g, w in zip(got, want, strict=True)
    ]
    return all(float((g != w).float().mean()) < 1e-3 for g, w in pairs)


def _cases(several: tuple[int, ...]) -> tuple[Case, ...]:
    return tuple(Case(f"T={rows}", rows, partial(make, rows), {"heads": HEADS}) for rows in several)


BENCH = Bench(
    op=OP,
    cases=_cases(ROWS),
    quick=(1, 64),
    between=mark(_cases(BETWEEN_ROWS)),
    variants=_variants,
    apart=not_dependent,
    inputs=("q", "state_cache", "index_state_cache"),
    same=_same,
)


def make_compress(rows: int, what: str, seed: int) -> Arguments:
    """The same of a layer of ratio 128. closing: every token closes an entry."""
    q, kv, pool, slots, *_ = qnorm._make(FP8_DS_MLA, HEADS, rows, seed)
    main = compressor_c128._fused(rows, what, seed)
    scores, ape, positions, requests, starts, state, state_slots, table, angles, cache, entry_slots, weight, restart = (
        main[:13]
    )
    step = pool, slots, positions, angles, requests, starts, state_slots, table, entry_slots, restart
    numbers: Any = compressor_c128.EPS, qnorm.BLOCK_SIZE, "window", FP8_DS_MLA.id, True
    return CompressCall(q, kv, *step, scores, ape, weight, state, cache, *numbers)


def _two(*args: Any) -> None:
    for _, name, arguments in CompressCall(*args).parts():
        OPS[name].overload(*arguments)


def _compress_variants() -> dict[str, Run]:
    from cute_kernels.insert_compress import insert_compress as kernel
    from cute_kernels.runtime.arch import arch_of

    def run(shape: tuple[int, int, int], per_cluster: int, *args: Any) -> None:
        kernel.launch_with(kernel.InsertCompressKey(arch_of(0), *shape), CompressCall(*args), per_cluster)

    shapes = [((rows, 8, 5), per) for rows in (1, 2, 4) for per in (4, 8, 16)] + [((1, 8, 4), 4), ((1, 4, 4), 4)]
    return {"ours two launches": _two} | {
        f"ours rows={shape[0]} cluster={shape[1]} ctas={shape[2]} tokens={per}": partial(run, shape, per)
        for shape, per in shapes
    }


def _compress_cases(several: tuple[int, ...]) -> tuple[Case, ...]:
    return tuple(
        Case(f"{what} T={rows}", rows, partial(make_compress, rows, what), {"heads": HEADS})
        for what in ("decode", "closing")
        for rows in several
    )


COMPRESS_BENCH = Bench(
    op=COMPRESS,
    cases=_compress_cases(ROWS),
    between=mark(_compress_cases(BETWEEN_ROWS)),
    quick=(0, 3),
    variants=_compress_variants,
    apart=not_dependent,
    inputs=("q", "state_cache"),
    same=_same,
)
SWEEPS = {bench.op: bench.sweep for bench in (BENCH, COMPRESS_BENCH)}
QUICK = {bench.op: bench.quick for bench in (BENCH, COMPRESS_BENCH)}
