# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of fused_inv_rope_fp8_quant and fused_inv_rope, launched like their peer: as dependents of the kernel
before."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from cute_kernels.formats import round_up
from cute_kernels.output.ops import output_scale_shape
from cute_kernels.runtime.ops import OPS
from perf.bench import Arguments, Bench, Case, Run, close, not_dependent
from perf.grid import draw_rows, mark
from perf.peers import without_dependent_launch

OP = "fused_inv_rope_fp8_quant"
TOKENS = (1, 64, 1024, 8192)
BETWEEN_TOKENS = draw_rows("inv_rope", TOKENS)
GROUPS = {64: 8, 128: 16}
"""Heads -> groups of the output projection, of both models."""

POSITIONS = 65536
VARIANTS: tuple[dict[str, Any], ...] = (
    {"heads": 1},
    {"heads": 1, "one_token": True},
    {"heads": 1, "one_token": True, "late": True},
    {"heads": 2},
    {"heads": 4},
)
"""Fields of InvRopeKey."""


def _rotation(tokens: int, heads: int, dtype: torch.dtype, seed: int) -> tuple[torch.Tensor, ...]:
    """o, positions, table and out, with a result of that dtype, group by group in memory."""
    g = torch.Generator(device="cuda").manual_seed(seed)
    groups = GROUPS[heads]
    o = torch.empty(tokens, heads, 512, device="cuda", dtype=torch.bfloat16).normal_(generator=g)
    positions = torch.randint(0, POSITIONS, (tokens,), device="cuda", generator=g)
    out = torch.empty(groups, tokens, heads // groups * 512, device="cuda", dtype=dtype).transpose(0, 1)
    return o, positions, _table(), out


def make(tokens: int, heads: int, seed: int) -> Arguments:
    groups = GROUPS[heads]
    per_group = heads // groups
    scales = torch.empty(output_scale_shape(tokens, groups, per_group), device="cuda")
    return *_rotation(tokens, heads, torch.float8_e4m3fn, seed), scales, groups, per_group, False, True


def make_plain(tokens: int, heads: int, seed: int) -> Arguments:
    groups = GROUPS[heads]
    return *_rotation(tokens, heads, torch.bfloat16, seed), groups, heads // groups, True


_tables: list[torch.Tensor] = []


def _table() -> torch.Tensor:
    """One for all input sets, as a model has it."""
    if not _tables:
        angle = torch.arange(POSITIONS, device="cuda")[:, None] * 10000.0 ** (-torch.arange(32, device="cuda") / 32)
        _tables.append(torch.cat([angle.cos(), angle.sin()], dim=1))
    return _tables[0]


def _variants() -> Mapping[str, Run]:
    from cute_kernels.output.inv_rope import InvRopeKey
    from cute_kernels.runtime.arch import arch_of
    from cute_kernels.runtime.compile import function, launch

    def run(key: InvRopeKey, *args: Any) -> None:
        *tensors, _, per_group, _, use_pdl = args
        launch(key, 0, *tensors, per_group, use_pdl)

    found: dict[str, Run] = {"ours without use_pdl": lambda *args: OPS[OP].overload(*args[:-1], False)}
    for fields in VARIANTS:
        key = InvRopeKey(arch_of(0), **fields)
        function(key)
        found["ours " + " ".join(f"{name}={value}" for name, value in fields.items())] = partial(run, key)
    return found


def _vllm() -> Run:
    """Launched as its caller does: with programmatic dependent launch, and allocating its results."""
    from vllm.models.deepseek_v4.common.ops.fused_inv_rope_fp8_quant import fused_inv_rope_fp8_quant

    def run(*args: Any) -> list[torch.Tensor]:
        o, positions, table, _, _, groups, per_group, is_packed, _ = args
        q, scale = fused_inv_rope_fp8_quant(o, positions, table, groups, per_group, tma_aligned_scales=is_packed)
        rows, padded = scale.shape[2], round_up(len(o), 4)
        return [q, scale.as_strided((groups, rows, padded), (rows * padded, padded, 1))]

    return run


def _vllm_plain() -> Run:
    """The same kernel, told not to quantize."""
    from vllm.models.deepseek_v4.common.ops.fused_inv_rope_fp8_quant import fused_inv_rope_fp8_quant

    def run(*args: Any) -> list[torch.Tensor]:
        o, positions, table, _, groups, per_group, _ = args
        return [fused_inv_rope_fp8_quant(o, positions, table, groups, per_group, quantize=False)[0]]

    return run


def _plain(loader: Callable[[], Run]) -> Run:
    return without_dependent_launch(loader(), "vllm.models.deepseek_v4.common.ops.fused_inv_rope_fp8_quant")


def _nearly_same(got: Sequence[torch.Tensor], want: Sequence[torch.Tensor]) -> bool:
    """The peer may fuse products and sums of the rotation: few bytes differ, and none by much."""
    codes = got[0].view(torch.uint8) != want[0].view(torch.uint8)
    scales = got[1] != want[1]
    return codes.float().mean().item() < 1e-3 and scales.float().mean().item() < 1e-3


def _cases(arguments: Callable[..., Arguments], several: tuple[int, ...]) -> tuple[Case, ...]:
    return tuple(
        Case(
            f"h{heads} T={tokens}",
            tokens,
            partial(arguments, tokens, heads),
            {"heads": heads, "groups": GROUPS[heads], "use_pdl": True},
        )
        for heads in GROUPS
        for tokens in several
    )


QUANTIZED = Bench(
    OP,
    _cases(make, TOKENS),
    quick=(1, 1024),
    between=mark(_cases(make, BETWEEN_TOKENS)),
    peers={"vllm-triton": _vllm, "vllm-triton-plain": partial(_plain, _vllm)},
    variants=_variants,
    apart=not_dependent,
    peer_same=_nearly_same,
)

PLAIN = Bench(
    "fused_inv_rope",
    _cases(make_plain, TOKENS),
    quick=(1, 1024),
    between=mark(_cases(make_plain, BETWEEN_TOKENS)),
    peers={"vllm-triton": _vllm_plain, "vllm-triton-plain": partial(_plain, _vllm_plain)},
    apart=not_dependent,
    peer_same=close(rtol=2.0**-7, atol=2.0**-18),
)

BENCHES = (QUANTIZED, PLAIN)
SWEEPS = {bench.op: bench.sweep for bench in BENCHES}
QUICK = {bench.op: bench.quick for bench in BENCHES}
"""Numbers of rows of a quick look."""
