# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of the indexer's queries and of the gather of its keys."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import torch

from cute_kernels.formats import INDEX_DIM, INDEXER_FP8, INDEXER_MXFP4
from cute_kernels.indexer import ops as _registered  # noqa: F401
from cute_kernels.numerics import CACHE_FLOOR
from perf.bench import Arguments, Bench, Case, Run
from perf.grid import draw, draw_rows, mark

HEADS = 64
POSITIONS = 65536
BLOCK_SIZE = 64
FACTORS = (INDEX_DIM**-0.5, HEADS**-0.5)
ROWS = (1, 64, 1024, 8192, 32768)
BETWEEN_ROWS = draw_rows("indexer queries", ROWS, 4)
GATHERS = ((1, 16384), (4, 16384), (1, 262144))
BETWEEN_GATHERS = tuple(
    (point["requests"], point["rows"])
    for point in draw("cp_gather_indexer_k_quant_cache", 3, requests=(1, 16), rows=(2000, 60_000))
)
"""(requests, keys of each)."""

QUERY_VARIANTS: tuple[dict[str, Any], ...] = tuple(
    {"groups": groups, "through_l1": through_l1} for groups in (1, 2, 4) for through_l1 in (False, True)
)
"""Fields of QueryKey that differ from the kernel in use."""

GATHER_VARIANTS: tuple[dict[str, Any], ...] = tuple(
    {"rows": rows, "through_l1": through_l1} for rows in (8, 16, 32) for through_l1 in (False, True)
)
"""Fields of GatherKey that differ from the kernel in use."""


def _generator(seed: int) -> torch.Generator:
    return torch.Generator(device="cuda").manual_seed(seed)


@cache
def _table() -> torch.Tensor:
    """cos and sin, fp32 [POSITIONS, 64]."""
    frequencies = 10000.0 ** (-torch.arange(32, device="cuda", dtype=torch.float64) / 32)
    angles = torch.arange(POSITIONS, device="cuda", dtype=torch.float64)[:, None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], dim=1).float()


def _query(fp4: bool, transformed: bool, rows: int, seed: int) -> Arguments:
    """Random queries at random positions."""
    g = _generator(seed)
    q = torch.randn(rows, HEADS, INDEX_DIM, device="cuda", generator=g).bfloat16()
    weights = torch.randn(rows, HEADS, device="cuda", generator=g).bfloat16()
    positions = torch.randint(0, POSITIONS, (rows,), device="cuda", generator=g)
    inputs = positions, q, _table(), weights, *FACTORS
    weights_out = torch.empty(rows, HEADS, device="cuda")
    if fp4:
        codes = torch.empty(rows, HEADS, INDEX_DIM // 2, dtype=torch.uint8, device="cuda")
        scales = torch.empty(rows, HEADS, dtype=torch.int32, device="cuda")
        return *inputs, "ties_to_lower", CACHE_FLOOR, transformed, codes, scales, weights_out, False, False
    return *inputs, transformed, torch.empty_like(q, dtype=torch.float8_e4m3fn), weights_out, False, False


def _plain_queries(fp4: bool, several: tuple[int, ...]) -> tuple[Case, ...]:
    return tuple(Case(f"T={rows}", rows, partial(_query, fp4, False, rows), {"heads": HEADS}) for rows in several)


def _query_cases(fp4: bool) -> tuple[Case, ...]:
    shape = {"heads": HEADS, "hadamard": True}
    return *_plain_queries(fp4, ROWS), Case("hadamard T=4096", 4096, partial(_query, fp4, True, 4096), shape)


def _vllm_triton() -> Run:
    module = importlib.import_module("vllm.models.deepseek_v4.common.ops.fused_indexer_q")
    kernel = module._FUSED_INDEXER_Q_ROPE_QUANT_TRITON_KERNEL

    def run(*args: Any) -> None:
        _refuse_hadamard(args[6])
        kernel(*args[:6], *args[7:-2], fp8_max=448.0, use_fnuz=False)

    return run


def _vllm_cutedsl() -> Run:
    kernel = importlib.import_module("vllm.models.deepseek_v4.nvidia.ops.fused_indexer_q_cutedsl")._INDEXER_Q_FP8_KERNEL
    tvm_ffi = importlib.import_module("tvm_ffi")

    def run(*args: Any) -> None:
        positions, q, table, weights, softmax_scale, head_scale, transformed, codes, out = args[:-2]
        _refuse_hadamard(transformed)
        with tvm_ffi.use_torch_stream():
            kernel(
                positions=positions,
                q=q,
                cos_sin_cache=table,
                weights=weights,
                weights_softmax_scale=softmax_scale,
                weights_head_scale=head_scale,
                q_fp8=codes.view(torch.uint8),
                weights_out=out,
            )

    return run


def _refuse_hadamard(transformed: bool) -> None:
    if transformed:
        raise NotImplementedError("has no Hadamard transform")


def _nearly_right(got: Sequence[torch.Tensor], want: Sequence[torch.Tensor]) -> bool:
    """Products and sums of the rotation may be fused, so a few codes may differ."""
    pairs = zip(got, want, strict=True)
    differing = [g.contiguous().view(torch.uint8) != w.contiguous().view(torch.uint8) for g, w in pairs]
    return all(float(d.float().mean()) < 1e-3 for d in differing)


def _query_variants(fp4: bool) -> dict[str, Run]:
    from cute_kernels.indexer import query
    from cute_kernels.indexer.call import QueryFp8Call, QueryMxfp4Call
    from cute_kernels.indexer.query import QueryKey
    from cute_kernels.runtime.arch import arch_of
    from cute_kernels.runtime.compile import launch

    def run(fields: dict[str, Any], *args: Any) -> None:
        call = QueryMxfp4Call(*args) if fp4 else QueryFp8Call(*args)
        launch(QueryKey(arch_of(0), call.e2m1_rounding, call.index_hadamard, **fields), 0, *query.arguments(call))

    return {_name(fields): partial(run, fields) for fields in QUERY_VARIANTS}


def _name(fields: dict[str, Any]) -> str:
    return "ours " + " ".join(f"{field}={value}" for field, value in fields.items())


def _gather(fmt: Any, requests: int, rows: int, seed: int) -> Arguments:
    """Random keys of requests of so many rows each, pages in random order."""
    g = _generator(seed)
    width = -(-rows // BLOCK_SIZE)
    pages = requests * width
    pool = fmt.allocate(pages, BLOCK_SIZE, "cuda")
    raw = fmt.pages(pool, BLOCK_SIZE)
    raw.copy_(torch.randint(0, 256, raw.shape, device="cuda", generator=g, dtype=torch.uint8))
    table = torch.randperm(pages, device="cuda", generator=g).view(requests, width).int()
    bounds = (torch.arange(requests + 1, device="cuda") * rows).int()
    (_, code_bytes), (_, scale_bytes) = fmt.fields(BLOCK_SIZE)
    codes = torch.empty(requests * rows, code_bytes, dtype=torch.uint8, device="cuda")
    scales = torch.empty(requests * rows, scale_bytes, dtype=torch.uint8, device="cuda")
    return pool, codes, scales, table, bounds, fmt.id


def _gather_cases(fp8_shapes: Sequence[tuple[int, int]], mxfp4_shapes: Sequence[tuple[int, int]]) -> tuple[Case, ...]:
    fp8 = [(INDEXER_FP8, "", *shape) for shape in fp8_shapes]
    mxfp4 = [(INDEXER_MXFP4, "mxfp4 ", *shape) for shape in mxfp4_shapes]
    return tuple(
        Case(f"{prefix}{requests}x{rows}", requests * rows, partial(_gather, fmt, requests, rows))
        for fmt, prefix, requests, rows in [*fp8, *mxfp4]
    )


def _vllm_gather() -> Run:
    importlib.import_module("vllm._C_stable_libtorch")
    kernel = torch.ops._C_cache_ops.cp_gather_indexer_k_quant_cache

    def run(*args: Any) -> None:
        if args[5] != INDEXER_FP8.id:
            raise NotImplementedError("copies FP8 keys only")
        kernel(*args[:5])

    return run


def _gather_variants() -> dict[str, Run]:
    from cute_kernels.indexer import gather
    from cute_kernels.indexer.call import GatherCall
    from cute_kernels.runtime.arch import arch_of
    from cute_kernels.runtime.compile import launch

    def run(fields: dict[str, Any], *args: Any) -> None:
        launch(gather.GatherKey(arch_of(0), args[5], **fields), 0, *gather.arguments(GatherCall(*args)))

    return {_name(fields): partial(run, fields) for fields in GATHER_VARIANTS}


FP8 = Bench(
    op="fused_indexer_q_rope_quant_fp8",
    cases=_query_cases(False),
    quick=(1, 1024, 32768),
    between=mark(_plain_queries(False, BETWEEN_ROWS)),
    peers={"vllm-triton": _vllm_triton, "vllm-cutedsl": _vllm_cutedsl},
    variants=partial(_query_variants, False),
    peer_same=_nearly_right,
)
MXFP4 = Bench(
    op="fused_indexer_q_rope_quant_mxfp4",
    cases=_query_cases(True),
    quick=(1, 1024, 32768),
    between=mark(_plain_queries(True, BETWEEN_ROWS)),
    variants=partial(_query_variants, True),
)
GATHER = Bench(
    op="cp_gather_indexer_k_quant_cache",
    cases=_gather_cases((*GATHERS, (256, 64), (64, 4096)), GATHERS),
    quick=(16384, 262144),
    between=mark(_gather_cases(BETWEEN_GATHERS, BETWEEN_GATHERS[:1])),
    peers={"vllm-cpp": _vllm_gather},
    variants=_gather_variants,
)
BENCHES = (FP8, MXFP4, GATHER)
SWEEPS = {bench.op: bench.sweep for bench in BENCHES}
QUICK = {bench.op: bench.quick for bench in BENCHES}
"""Numbers of rows of a quick look."""
