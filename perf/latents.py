# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of V4.1's compressor: latents, and what is stored of them. With up to 64 tokens each is a request's last
one, at an odd position; more are one request's prefill."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from cute_kernels import formats
from cute_kernels.compressor import ops as _registered  # noqa: F401
from perf.bench import Arguments, Bench, Case
from perf.grid import draw_rows, mark

ROWS = (64, 1024, 8192)
BETWEEN_ROWS = draw_rows("latents", ROWS)
EPS, RING, POSITIONS, PAGE_ROWS = 1e-20, 8, 1 << 16, 32


def _generator(seed: int) -> torch.Generator:
    return torch.Generator(device="cuda").manual_seed(seed)


def _positions(rows: int, g: torch.Generator) -> tuple[torch.Tensor, int]:
    """Positions of a step's tokens, and how many requests they are."""
    if rows > 64:
        return torch.arange(rows, device="cuda"), 1
    return torch.randint(0, POSITIONS // 2, (rows,), device="cuda", generator=g) * 2 + 1, rows


def _latent(ratio: int, rows: int, seed: int) -> Arguments:
    g = _generator(seed)
    positions, requests = _positions(rows, g)
    kv_score = torch.randn(rows, formats.HEAD_DIM * ratio, device="cuda", generator=g)
    weight = torch.randn(formats.HEAD_DIM, device="cuda", generator=g).bfloat16()
    out = torch.empty(rows, formats.HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    if ratio == 1:
        return kv_score, positions, None, None, None, None, weight, EPS, ratio, out, False
    per = rows // requests
    owners = torch.arange(requests, device="cuda").repeat_interleave(per)
    starts = torch.arange(requests + 1, device="cuda") * per
    state = formats.compressor_state(formats.HEAD_DIM, ratio).allocate(requests, RING, "cuda")
    ring = owners.int(), starts.int(), state, owners * RING + positions % RING
    return kv_score, positions, *ring, weight, EPS, ratio, out, False


def _stored(fmt: Any, rows: int, seed: int) -> Arguments:
    g = _generator(seed)
    positions, _ = _positions(rows, g)
    x = torch.randn(rows, fmt.dim, device="cuda", generator=g).bfloat16()
    table = torch.randn(POSITIONS, formats.ROPE_DIM, device="cuda", generator=g)
    pages = rows if rows <= 64 else -(-rows // PAGE_ROWS)
    cache = fmt.allocate(pages, PAGE_ROWS, "cuda")
    place = torch.arange(rows, device="cuda") if rows > 64 else positions % PAGE_ROWS
    page = torch.randperm(pages, device="cuda", generator=g)
    page = page.repeat_interleave(PAGE_ROWS)[:rows] if rows > 64 else page
    where = positions, table, cache, page * PAGE_ROWS + place % PAGE_ROWS, 1, fmt.id, False
    if fmt.dim == formats.HEAD_DIM:
        return x, *where
    return x, torch.randn(fmt.dim, device="cuda", generator=g).bfloat16(), EPS, *where


def _near(got: Sequence[torch.Tensor], want: Sequence[torch.Tensor]) -> bool:
    """Rings are the same; latents differ by roundings. Of ratio 2 half of them are anything, the same anything."""
    (*rings, a), (*others, b) = got, want
    a, b = (torch.nan_to_num(x.float()) for x in (a, b))
    bound = 2.0**-6 * b.abs() + 1e-5 * b.abs().amax(dim=1, keepdim=True)
    return all(map(torch.equal, rings, others)) and bool(((a - b).abs() <= bound).all())


def _nearly_same(got: Sequence[torch.Tensor], want: Sequence[torch.Tensor]) -> bool:
    """Norms are rounded otherwise, so a few bytes may differ."""
    differing = [
        a.contiguous().view(torch.uint8) != b.contiguous().view(torch.uint8) for a, b in zip(got, want, strict=True)
    ]
    return all(float(d.float().mean()) < 3e-3 for d in differing)


def _latent_cases(rows: Sequence[int]) -> tuple[Case, ...]:
    return tuple(Case(f"ratio {m} T={n}", n, partial(_latent, m, n), {"ratio": m}) for m in (1, 2) for n in rows)


def _entry_cases(rows: Sequence[int]) -> tuple[Case, ...]:
    return tuple(Case(f"T={n}", n, partial(_stored, formats.FP8_DS_MLA, n)) for n in rows)


def _key_cases(rows: Sequence[int]) -> tuple[Case, ...]:
    kinds = (formats.INDEXER_FP8, formats.INDEXER_MXFP4)
    return tuple(Case(f"{fmt.id} T={n}", n, partial(_stored, fmt, n)) for fmt in kinds for n in rows)


LATENT = Bench(
    op="compress_latent",
    cases=_latent_cases(ROWS),
    quick=(64, 8192),
    inputs=("state_cache",),
    same=_near,
    between=mark(_latent_cases(BETWEEN_ROWS)),
)
ENTRY = Bench(
    op="rope_quant_insert", cases=_entry_cases(ROWS), quick=(64, 8192), between=mark(_entry_cases(BETWEEN_ROWS))
)
KEY = Bench(
    op="k_norm_rope_store",
    cases=_key_cases(ROWS),
    quick=(64, 8192),
    same=_nearly_same,
    between=mark(_key_cases(BETWEEN_ROWS)),
)
BENCHES = (LATENT, ENTRY, KEY)
SWEEPS = {bench.op: bench.sweep for bench in BENCHES}
QUICK = {bench.op: bench.quick for bench in BENCHES}
"""Numbers of rows of a quick look."""
