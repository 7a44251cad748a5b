# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of the ops that store compressed entries, with ratio 128."""

from __future__ import annotations

import math
from functools import cache, partial
from typing import Any

import torch

from cute_kernels.formats import FP8_DS_MLA, HEAD_DIM, compressor_state
from perf import compressor_c4
from perf.bench import Arguments, Bench, Case, Run
from perf.grid import mark

EPS = 1e-6
RATIO = 128
STATE_ROWS = 8
ENTRY_ROWS = 2
LONGEST_CHUNK = 8192
VARIANTS = ((2, 1), (4, 1), (8, 1), (8, 0.8))
"""Blocks per entry, and by how much the number of clusters is multiplied: tried beside what is in use."""


@cache
def _table(positions: int) -> torch.Tensor:
    angles = torch.arange(positions, device="cuda", dtype=torch.float64)[:, None] * 160000.0 ** (
        -torch.arange(32, device="cuda", dtype=torch.float64) / 32
    )
    return torch.cat([angles.cos(), angles.sin()], dim=1).float()


def _fused(tokens: int, what: str, seed: int) -> Arguments:
    """Arguments of the fused op.

    closing   decode: every token belongs to a request of its own and closes an entry
    decode    the same at random positions: one in 128 closes an entry
    window, all   prefill chunks of at most 8192 tokens; what is saved of them
    """
    g = torch.Generator(device="cuda").manual_seed(seed)
    per = min(tokens, LONGEST_CHUNK) if what in ("window", "all") else 1
    requests, context = tokens // per, max(per, RATIO)
    request = torch.arange(requests, device="cuda", dtype=torch.int32).repeat_interleave(per)
    position = torch.full((tokens,), RATIO - 1, device="cuda")
    if what == "decode":
        position = torch.randint(0, RATIO, (tokens,), device="cuda", generator=g)
    elif per > 1:
        position = torch.arange(per, device="cuda").repeat(requests)
    fmt = compressor_state(HEAD_DIM, RATIO)
    columns = context // STATE_ROWS
    table = torch.randperm(requests * columns, device="cuda", generator=g).view(requests, columns).int()
    slots = table[request.long(), position // STATE_ROWS].long() * STATE_ROWS + position % STATE_ROWS
    state = fmt.allocate(requests * columns, STATE_ROWS, "cuda", fmt.page_bytes(STATE_ROWS))
    if per == 1:
        state.normal_(generator=g)
    pages = -(-context // RATIO // ENTRY_ROWS)
    entry_table = torch.randperm(requests * pages, device="cuda", generator=g).view(requests, pages)
    group = position // RATIO
    entry_slots = entry_table[request.long(), group // ENTRY_ROWS] * ENTRY_ROWS + group % ENTRY_ROWS
    entry_slots = entry_slots.where(position % RATIO == RATIO - 1, torch.full_like(entry_slots, -1))
    starts = torch.arange(0, tokens + 1, per, device="cuda", dtype=torch.int32)
    last = position[starts[1:].long() - 1]
    return (
        torch.randn(tokens, 2 * HEAD_DIM, device="cuda", generator=g),
        torch.randn(RATIO, HEAD_DIM, device="cuda", generator=g),
        position,
        request,
        starts,
        state,
        slots,
        table,
        _table(LONGEST_CHUNK),
        FP8_DS_MLA.allocate(requests * pages, ENTRY_ROWS, "cuda"),
        entry_slots,
        (torch.rand(HEAD_DIM, device="cuda", generator=g) + 0.5).bfloat16(),
        (last + 1).int(),
        None,
        EPS,
        RATIO,
        0,
        FP8_DS_MLA.id,
        "all" if what == "all" else "window",
        "ties_to_lower",
        False,
        False,
        False,
        False,
    )


def _stored(tokens: int, what: str, seed: int) -> Arguments:
    """Arguments of the op that reads the state: of a step whose own rows are saved already."""
    a = _fused(tokens, what, seed)
    state = a[5].normal_(generator=torch.Generator(device="cuda").manual_seed(seed))
    return state, a[3], a[2], *a[6:12], a[13], EPS, RATIO, FP8_DS_MLA.id, "ties_to_lower", False


def _cases(make: Any, *steps: tuple[int, str]) -> tuple[Case, ...]:
    return tuple(Case(f"c128_512 {what} T={tokens}", tokens, partial(make, tokens, what)) for tokens, what in steps)


def _variants(op: str) -> dict[str, Run]:
    from cute_kernels.compressor import ratio128
    from cute_kernels.compressor.call import CompressCall, FusedCall
    from cute_kernels.runtime.arch import multiprocessors

    record: Any = FusedCall if op == "fused" else CompressCall
    launch: Any = ratio128.launch_fused if op == "fused" else ratio128.launch_compress

    def run(blocks: int, clusters: float, *args: Any) -> None:
        call = record(*args)
        usual = ratio128.tokens_per_cluster(call.slot_mapping.shape[0], multiprocessors(0), blocks)
        launch(call, max(1, math.ceil(usual / clusters)), blocks)

    return {f"ours {blocks} blocks, {clusters} x": partial(run, blocks, clusters) for blocks, clusters in VARIANTS}


DECODE = ((1, "closing"), (64, "closing"), (64, "decode"), (256, "decode"))
PREFILL = ((1024, "window"), (8192, "window"), (32768, "window"))
STORE = Bench(
    op="compress_norm_rope_store",
    cases=_cases(_stored, *DECODE, *PREFILL),
    quick=compressor_c4.STORE.quick,
    between=mark(_cases(_stored, *compressor_c4.BETWEEN_DECODE, *compressor_c4.BETWEEN_PREFILL)),
    peers=compressor_c4.STORE.peers,
    variants=partial(_variants, "compress"),
    same=compressor_c4.STORE.same,
    peer_same=compressor_c4.STORE.peer_same,
)
FUSED = Bench(
    op="fused_compress_norm_rope_store",
    cases=_cases(_fused, *DECODE, *PREFILL, (8192, "all"), (32768, "all")),
    quick=compressor_c4.FUSED.quick,
    between=mark(_cases(_fused, *compressor_c4.BETWEEN_DECODE, *compressor_c4.BETWEEN_PREFILL)),
    peers=compressor_c4.FUSED.peers,
    variants=partial(_variants, "fused"),
    inputs=compressor_c4.FUSED.inputs,
    same=compressor_c4.FUSED.same,
    peer_same=compressor_c4.FUSED.peer_same,
)
