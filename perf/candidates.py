# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of V4.1's candidate blocks: selected from scores, and scores and picks among them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from cute_kernels.formats import FORMATS, INDEX_DIM, INDEXER_FP8, INDEXER_MXFP4
from cute_kernels.indexer.chunks import CANDIDATE_BLOCK
from cute_kernels.indexer.ops import score_top_k_workspace_size, select_candidate_blocks_workspace_size
from perf.bench import Arguments, Bench, Case
from perf.grid import draw, mark
from perf.topk import same_picks

BLOCKS, HEADS, PICKS, PAGE_ROWS = 2048, 32, 512, 64

SELECTIONS = ((16, 131072), (64, 131072), (64, 1 << 20))
"""(rows, keys of each)"""

DECODES = (
    (1, 1, 131072, INDEXER_FP8.id),
    (64, 1, 131072, INDEXER_FP8.id),
    (16, 6, 131072, INDEXER_FP8.id),
    (64, 1, 1 << 20, INDEXER_FP8.id),
    (64, 1, 1 << 20, INDEXER_MXFP4.id),
)
"""(requests, rows of each, keys of each, format)"""


PREFILLS = ((128, 131072, INDEXER_FP8.id), (128, 1 << 20, INDEXER_FP8.id), (128, 1 << 20, INDEXER_MXFP4.id))
"""(rows, keys of each, format)"""


def _generator(seed: int) -> torch.Generator:
    return torch.Generator(device="cuda").manual_seed(seed)


def _selection(rows: int, keys: int, seed: int) -> Arguments:
    logits = torch.randn(rows, keys, device="cuda", generator=_generator(seed))
    lengths = torch.full((rows, 1), keys - 3, dtype=torch.int32, device="cuda")
    out = torch.empty(rows, BLOCKS, dtype=torch.int32, device="cuda")
    return logits, lengths, out, torch.empty(select_candidate_blocks_workspace_size(rows, keys) // 4, device="cuda")


def _queries(g: torch.Generator, kv_format: str, *shape: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Random codes of heads, and of MXFP4 scales that are alike."""
    if kv_format == INDEXER_FP8.id:
        return torch.randn(*shape, HEADS, INDEX_DIM, device="cuda", generator=g).to(torch.float8_e4m3fn), None
    codes = (*shape, HEADS, INDEX_DIM // 2)
    q = torch.randint(0, 256, codes, device="cuda", generator=g, dtype=torch.uint8)
    scales = torch.randint(121, 128, (*shape, HEADS, 4), device="cuda", generator=g, dtype=torch.uint8)
    return q, scales.view(torch.int32)[..., 0]


def _candidates(g: torch.Generator, rows: int, keys: int) -> torch.Tensor:
    """Random ones with the newest block."""
    newest = keys // CANDIDATE_BLOCK - 1
    older = torch.stack(
        [torch.randperm(newest, device="cuda", generator=g)[: BLOCKS - 1].sort().values for _ in range(rows)]
    )
    return torch.nn.functional.pad(older, (0, 1), value=newest).int()


def _decode(requests: int, next_n: int, keys: int, kv_format: str, seed: int) -> Arguments:
    """Random keys, whose scales are alike; random candidates."""
    g, fmt = _generator(seed), FORMATS[kv_format]
    rows, pages = requests * next_n, requests * (keys // PAGE_ROWS)
    pool = fmt.allocate(pages, PAGE_ROWS, "cuda")
    raw = fmt.pages(pool, PAGE_ROWS)
    raw.random_(generator=g)
    offset = fmt.fields(PAGE_ROWS)[1][0]
    if kv_format == INDEXER_FP8.id:
        raw &= 0x77
        raw[:, offset:] = torch.ones(PAGE_ROWS, device="cuda").view(torch.uint8)
    else:
        raw[:, offset:].random_(121, 128, generator=g)
    q, q_scale = _queries(g, kv_format, requests, next_n)
    table = torch.randperm(pages, device="cuda", generator=g).view(requests, -1).int()
    lengths = torch.full((requests, next_n), keys - 3, dtype=torch.int32, device="cuda")
    weights = torch.randn(rows, HEADS, device="cuda", generator=g)
    size = score_top_k_workspace_size(requests, 0, PICKS, next_n=next_n, candidates=BLOCKS)
    out = torch.empty(rows, PICKS, dtype=torch.int32, device="cuda")
    where = lengths, table, _candidates(g, rows, keys), keys, kv_format
    return q, q_scale, pool, weights, *where, out, torch.empty(size // 4, device="cuda")


def _prefill(rows: int, keys: int, kv_format: str, seed: int) -> Arguments:
    """The last rows of a request."""
    g = _generator(seed)
    q, q_scale = _queries(g, kv_format, rows)
    if q_scale is None:
        k = torch.randn(keys, INDEX_DIM, device="cuda", generator=g).to(torch.float8_e4m3fn)
        k_scale = torch.ones(keys, device="cuda")
    else:
        k = torch.randint(0, 256, (keys, INDEX_DIM // 2), device="cuda", generator=g, dtype=torch.uint8)
        bytes_ = torch.randint(121, 128, (keys, 4), device="cuda", generator=g, dtype=torch.uint8)
        k_scale = bytes_.view(torch.int32)[..., 0]
    start = torch.zeros(rows, dtype=torch.int32, device="cuda")
    weights = torch.randn(rows, HEADS, device="cuda", generator=g)
    size = score_top_k_workspace_size(rows, 0, PICKS, candidates=BLOCKS)
    out = torch.empty(rows, PICKS, dtype=torch.int32, device="cuda")
    windows = start, torch.full_like(start, keys - 3), _candidates(g, rows, keys), 0
    return q, q_scale, k, k_scale, weights, *windows, out, torch.empty(size // 4, device="cuda")


def _same_but_workspace(got: Sequence[torch.Tensor], want: Sequence[torch.Tensor]) -> bool:
    return torch.equal(got[0], want[0])


def _nearly_same_picks(got: Sequence[torch.Tensor], want: Sequence[torch.Tensor]) -> bool:
    """Sums of tensor cores have fewer bits than the reference's."""
    return same_picks(got[:1], want[:1])


def _selection_case(rows: int, keys: int) -> Case:
    return Case(f"b{rows} ctx{keys}", rows, partial(_selection, rows, keys), {"keys": keys})


def _decode_case(requests: int, next_n: int, keys: int, kv_format: str) -> Case:
    return Case(
        f"b{requests} ctx{keys}" + f" next_n={next_n}" * (next_n > 1) + " mxfp4" * (kv_format != INDEXER_FP8.id),
        requests,
        partial(_decode, requests, next_n, keys, kv_format),
        {"next_n": next_n, "keys": keys, "heads": HEADS, "k": PICKS},
        products="e4m3",
    )


def _prefill_case(rows: int, keys: int, kv_format: str) -> Case:
    return Case(
        f"{rows} rows ctx{keys}" + " mxfp4" * (kv_format != INDEXER_FP8.id),
        rows,
        partial(_prefill, rows, keys, kv_format),
        {"keys": keys, "heads": HEADS, "k": PICKS},
        products="e4m3",
    )


SELECT = Bench(
    op="select_candidate_blocks",
    cases=tuple(_selection_case(*shape) for shape in SELECTIONS),
    quick=(64,),
    same=_same_but_workspace,
    between=mark(
        _selection_case(point["rows"], point["keys"])
        for point in draw("select_candidate_blocks", 2, rows=(16, 64), keys=(131072, 1 << 20, 8))
    ),
)
SCORE = Bench(
    op="score_candidates_decode",
    cases=tuple(_decode_case(*shape) for shape in DECODES),
    quick=(64,),
    same=_nearly_same_picks,
    between=mark(
        _decode_case(point["requests"], 1, point["keys"], INDEXER_FP8.id)
        for point in draw("score_candidates_decode", 2, requests=(1, 64), keys=(131072, 1 << 20, PAGE_ROWS))
    ),
)
PREFILL = Bench(
    op="score_candidates_prefill",
    cases=tuple(_prefill_case(*shape) for shape in PREFILLS),
    quick=(128,),
    same=_nearly_same_picks,
    between=mark(
        _prefill_case(point["rows"], point["keys"], INDEXER_FP8.id)
        for point in draw("score_candidates_prefill", 2, rows=(64, 512), keys=(131072, 1 << 20, 8))
    ),
)
SWEEPS = {bench.op: bench.sweep for bench in (SELECT, SCORE, PREFILL)}
QUICK = {bench.op: bench.quick for bench in (SELECT, SCORE, PREFILL)}
"""Numbers of rows of a quick look."""
