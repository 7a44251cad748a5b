# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of the fused query norm, rotation and KV insert in its three forms."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch

from cute_kernels.formats import FP8_DS_MLA, HEAD_DIM, PLAIN_BF16, PLAIN_FP8
from cute_kernels.kv_cache.ops import fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert
from cute_kernels.kv_cache.verify_cases import query_difference
from perf.bench import Arguments, Bench, Case, Run, same_bytes
from perf.grid import draw_rows, mark

BLOCK_SIZE = 64
EPS = 1e-6
POSITIONS = 65536
SHAPES = tuple((heads, rows) for heads in (64, 128) for rows in (1, 64, 1024, 8192))
BETWEEN_SHAPES = tuple(zip((64, 128, 64, 128), draw_rows("qnorm", (1, 8192), 4), strict=True))
SMALL_SHAPES = tuple((heads, rows) for heads in (8, 16, 32) for rows in (64, 8192))
"""(heads per rank, rows)."""

VARIANTS: tuple[dict[str, Any], ...] = (
    {"rows": 1},
    {"rows": 2},
    {"rows": 4},
    {"rows": 1, "warps": 8},
    {"rows": 2, "warps": 8},
)
"""Fields of QnormKey: configurations to compare the kernels in use with."""


@cache
def _table() -> torch.Tensor:
    """cos and sin of the layers without compression, fp32 [POSITIONS, 64]."""
    frequencies = 10000.0 ** (-torch.arange(32, device="cuda", dtype=torch.float64) / 32)
    angles = torch.arange(POSITIONS, device="cuda", dtype=torch.float64)[:, None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], dim=1).float()


def _make(fmt: Any, heads: int, rows: int, seed: int) -> Arguments:
    """Rows in random order of slots and at random positions, a pool a little larger than they need; a dependent launch,
    as the peer's."""
    g = torch.Generator(device="cuda").manual_seed(seed)
    blocks = -(-rows // BLOCK_SIZE) + 1
    q = torch.randn(rows, heads, HEAD_DIM, device="cuda", generator=g).bfloat16()
    kv = torch.randn(rows, HEAD_DIM, device="cuda", generator=g).bfloat16()
    pool = fmt.allocate(blocks, BLOCK_SIZE, "cuda")
    slots = torch.randperm(blocks * BLOCK_SIZE, device="cuda", generator=g)[:rows].contiguous()
    positions = torch.randint(0, POSITIONS, (rows,), device="cuda", generator=g)
    where = slots, positions, _table()
    if fmt is FP8_DS_MLA:
        return q, kv, pool, *where, EPS, BLOCK_SIZE, True, fmt.id, True
    if fmt is PLAIN_BF16:
        return q, kv, pool, *where, EPS, BLOCK_SIZE, True, fmt.id, True
    q_fp8 = torch.empty(q.shape, dtype=fmt.dtype, device="cuda")
    scales = torch.tensor([0.02], device="cuda"), torch.tensor([60.0], device="cuda")
    return q, kv, q_fp8, pool, *where, *scales, EPS, BLOCK_SIZE, True, fmt.id, True


def _cases(fmt: Any, shapes: Sequence[tuple[int, int]]) -> tuple[Case, ...]:
    return tuple(
        Case(f"h{heads} T={rows}", rows, partial(_make, fmt, heads, rows), {"heads": heads}) for heads, rows in shapes
    )


def _right(got: Sequence[torch.Tensor], want: Sequence[torch.Tensor]) -> bool:
    """The cache is equal bit for bit, the queries up to the rounding of their norm."""
    return not query_difference(got[0], want[0]) and same_bytes(got[1:], want[1:])


def _nearly_right(got: Sequence[torch.Tensor], want: Sequence[torch.Tensor]) -> bool:
    """As `_right`, but products and sums of the rotation may be fused: some bytes of the cache may differ."""
    pool, right = (tensors[1].contiguous().view(torch.uint8) for tensors in (got, want))
    return torch.allclose(got[0], want[0], rtol=0.01, atol=1e-5) and float((pool != right).float().mean()) < 1e-3


def _vllm() -> Run:
    """vLLM's C++ op; it returns new queries and leaves the old ones as they are."""
    importlib.import_module("vllm._C_stable_libtorch")
    op: Callable[..., torch.Tensor] = torch.ops._C.fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert

    def run(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        q, kv, pool, slots, positions, table = args[:6]
        pages = pool.as_strided((pool.shape[0], pool.stride(0)), (pool.stride(0), 1))
        return op(q, kv, pages, slots, positions, table, q.shape[1], EPS, BLOCK_SIZE), pool

    return run


def _variants(fmt: Any) -> dict[str, Run]:
    from cute_kernels.kv_cache.qnorm import QnormKey
    from cute_kernels.kv_cache.qnorm import launch_with as launch
    from cute_kernels.runtime.arch import arch_of

    def run(key: Any, *args: Any) -> None:
        if fmt is PLAIN_FP8:
            q, kv, q_fp8, pool, slots, positions, table, kv_scale, q_scale_inv = args[:9]
            out = q_fp8.data_ptr(), q_fp8.stride(0), q_fp8.stride(1), kv_scale.data_ptr(), q_scale_inv.data_ptr()
            launch(key, q, kv, pool, slots, positions, table, EPS, BLOCK_SIZE, True, out)
        else:
            q, kv, pool, slots, positions, table = args[:6]
            launch(key, q, kv, pool, slots, positions, table, EPS, BLOCK_SIZE, True)

    def name(fields: dict[str, Any]) -> str:
        return "ours " + " ".join(f"{field}={value}" for field, value in fields.items())

    return {name(fields): partial(run, QnormKey(arch_of(0), fmt.id, **fields)) for fields in VARIANTS}


_NAME = "fused_deepseek_v4_qnorm_rope_kv_rope_"
QUANT = Bench(
    op=fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert.__name__,
    cases=_cases(FP8_DS_MLA, SHAPES + SMALL_SHAPES),
    quick=(1, 64, 8192),
    between=mark(_cases(FP8_DS_MLA, BETWEEN_SHAPES)),
    peers={"vllm-cpp": _vllm},
    variants=partial(_variants, FP8_DS_MLA),
    inputs=("q",),
    same=_right,
    peer_same=_nearly_right,
)
FULL_BF16 = Bench(
    op=f"{_NAME}full_cache_bf16_insert",
    cases=_cases(PLAIN_BF16, SHAPES[:4]),
    quick=(1, 64, 8192),
    between=mark(_cases(PLAIN_BF16, BETWEEN_SHAPES)),
    variants=partial(_variants, PLAIN_BF16),
    inputs=("q",),
    same=_right,
)
FULL_FP8 = Bench(
    op=f"{_NAME}full_cache_fp8_insert",
    cases=_cases(PLAIN_FP8, SHAPES[:4]),
    quick=(1, 64, 8192),
    between=mark(_cases(PLAIN_FP8, BETWEEN_SHAPES)),
    variants=partial(_variants, PLAIN_FP8),
    same=_right,
)
BENCHES = (QUANT, FULL_BF16, FULL_FP8)
SWEEPS = {bench.op: bench.sweep for bench in BENCHES}
QUICK = {bench.op: bench.quick for bench in BENCHES}
"""Numbers of rows of a quick look."""
