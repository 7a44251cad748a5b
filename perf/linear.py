# SPDX-License-Identifier: Apache-2.0
"""Benchmark of quantize_fp8_1x128, launched like the layers do: as a dependent of the kernel before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from cute_kernels import numerics
from cute_kernels.linear.ops import activation_scale_shape
from cute_kernels.linear.scales import BLOCK
from cute_kernels.runtime.ops import OPS
from perf.bench import Arguments, Bench, Case, Run, not_dependent, same_bytes
from perf.grid import draw_rows, mark

OP = "quantize_fp8_1x128"
TOKENS = (1, 64, 1024, 8192)
COLUMNS = (1024, 4096, 7168)
"""The latent query of the small model, and the hidden states of both."""


def make(tokens: int, columns: int, seed: int) -> Arguments:
    g = torch.Generator(device="cuda").manual_seed(seed)
    x = torch.empty(tokens, columns, device="cuda", dtype=torch.bfloat16).normal_(generator=g)
    out = torch.empty(tokens, columns, device="cuda", dtype=torch.float8_e4m3fn)
    return x, out, torch.empty(activation_scale_shape(tokens, columns), device="cuda"), True


def quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes, and scales with tokens innermost, of finite rows that are a multiple of 128 wide: the same bytes in few
    torch calls."""
    blocks = x.float().unflatten(-1, (-1, BLOCK))
    ratio = blocks.abs().amax(dim=-1).clamp(min=numerics.OUTPUT_FLOOR) * (1.0 / numerics.E4M3_MAX)
    exponent = (ratio.view(torch.int32) + 0x007FFFFF) & 0x7F800000
    codes = (blocks * (0x7F000000 - exponent).view(torch.float32)[..., None]).to(torch.float8_e4m3fn)
    return codes.flatten(-2), exponent.view(torch.float32).t().contiguous()


def _inductor() -> Run:
    """torch.compile's kernels of `quantize`; it writes no padding."""
    compiled = torch.compile(quantize, fullgraph=True, dynamic=True)
    return lambda x, *_: list(compiled(x))


def _vllm() -> Run:
    """vLLM's CUDA kernel, allocating its results as its callers do."""
    from vllm.model_executor.layers.quantization.utils.fp8_utils import per_token_group_quant_fp8

    def run(x: torch.Tensor, *_: Any) -> list[torch.Tensor]:
        codes, scales = per_token_group_quant_fp8(x, BLOCK, column_major_scales=True, use_ue8m0=True)
        return [codes, scales.t()]

    return run


def _same_tokens(got: Sequence[torch.Tensor], want: Sequence[torch.Tensor]) -> bool:
    """The same bytes but for the scales of tokens that do not exist, which a peer may leave out."""
    tokens = len(want[0])
    return same_bytes(got[:1], want[:1]) and torch.equal(got[1][:, :tokens], want[1][:, :tokens])


def _variants() -> Mapping[str, Run]:
    return {
        "ours without use_pdl": lambda *args: OPS[OP].overload(*args[:-1], False),
        "ours in torch": OPS[OP].reference,
    }


def _cases(several: tuple[int, ...]) -> tuple[Case, ...]:
    return tuple(
        Case(f"k{columns} T={tokens}", tokens, partial(make, tokens, columns), {"width": columns, "use_pdl": True})
        for columns in COLUMNS
        for tokens in several
    )


QUANTIZE = Bench(
    OP,
    _cases(TOKENS),
    quick=(1, 1024),
    between=mark(_cases(draw_rows(OP, TOKENS))),
    peers={"torch.compile": _inductor, "vllm-cuda": _vllm},
    variants=_variants,
    apart=not_dependent,
    peer_same=_same_tokens,
)

BENCHES = (QUANTIZE,)
SWEEPS = {bench.op: bench.sweep for bench in BENCHES}
QUICK = {bench.op: bench.quick for bench in BENCHES}
"""Numbers of rows of a quick look."""
