# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of the RMS norms. fused_q_kv_rmsnorm is launched like its peer: as a dependent of the kernel before."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from cute_kernels import numerics
from cute_kernels.formats import HEAD_DIM
from cute_kernels.linear.ops import activation_scale_shape
from cute_kernels.linear.scales import BLOCK
from cute_kernels.norm.ops import fused_mtp_input_rmsnorm, fused_q_kv_rmsnorm, mtp_shared_head_rmsnorm
from cute_kernels.runtime.ops import OPS
from perf.bench import Arguments, Bench, Case, Run, close, not_dependent
from perf.grid import draw_rows, mark
from perf.peers import without_dependent_launch

TOKENS = (1, 64, 1024, 8192)
BETWEEN_TOKENS = draw_rows("norm", TOKENS)
Q_RANKS = (1024, 1536)
HIDDEN = (4096, 7168)
STREAMS = 4
EPS = 1e-6
ONE_ULP = close(rtol=2.0**-7, atol=0.0)


def _normal(*shape: int, seed: int) -> torch.Tensor:
    g = torch.Generator(device="cuda").manual_seed(seed)
    return torch.empty(shape, device="cuda", dtype=torch.bfloat16).normal_(generator=g)


def _make_q_kv(tokens: int, rank: int, seed: int) -> Arguments:
    qr, kv = _normal(tokens, rank + HEAD_DIM, seed=seed).split([rank, HEAD_DIM], dim=1)
    weights = _normal(rank, seed=-1), _normal(HEAD_DIM, seed=-2)
    outs = [torch.empty(t.shape, device="cuda", dtype=torch.bfloat16) for t in (qr, kv)]
    return qr, kv, *weights, EPS, *outs, True


def _make_q_kv_quant(tokens: int, rank: int, seed: int) -> Arguments:
    *inputs, query, kv_out, use_pdl = _make_q_kv(tokens, rank, seed)
    codes = torch.empty(query.shape, device="cuda", dtype=torch.float8_e4m3fn)
    scales = torch.empty(activation_scale_shape(tokens, rank), device="cuda")
    return *inputs, codes, scales, kv_out, None, use_pdl


def _make_mtp_input(tokens: int, hidden: int, seed: int) -> Arguments:
    embeds, previous = _normal(tokens, hidden, seed=seed), _normal(tokens, STREAMS, hidden, seed=seed + 1)
    positions = torch.arange(tokens, device="cuda") % 9
    weights = _normal(hidden, seed=-1), _normal(hidden, seed=-2)
    outs = torch.empty_like(embeds), torch.empty_like(previous)
    return embeds, positions, previous, *weights, EPS, STREAMS, *outs, False


def _make_shared_head(tokens: int, hidden: int, seed: int) -> Arguments:
    x = _normal(tokens, hidden, seed=seed)
    return x, _normal(hidden, seed=-1), EPS, torch.empty_like(x), False


def _cases(
    make: Any, name: str, widths: tuple[int, ...], use_pdl: bool, several: tuple[int, ...] = TOKENS
) -> tuple[Case, ...]:
    return tuple(
        Case(f"{name}{width} T={tokens}", tokens, partial(make, tokens, width), {"width": width, "use_pdl": use_pdl})
        for width in widths
        for tokens in several
    )


def _q_kv(*args: Any) -> Any:
    return fused_q_kv_rmsnorm(*args[:5], use_pdl=True)


def _mtp_input(*args: Any) -> Any:
    return fused_mtp_input_rmsnorm(*args[:7])


def _shared_head(*args: Any) -> Any:
    return [mtp_shared_head_rmsnorm(*args[:3])]


def _vllm_q_kv() -> Run:
    """Launched as its caller does: with programmatic dependent launch, and allocating its results."""
    from vllm.models.common.ops import fused_q_kv_rmsnorm

    return lambda qr, kv, q_weight, kv_weight, eps, *_: fused_q_kv_rmsnorm(qr, kv, q_weight, kv_weight, eps)


def _vllm_q_kv_plain() -> Run:
    return without_dependent_launch(_vllm_q_kv(), "vllm.models.common.ops.fused_qk_rmsnorm")


def _vllm_mtp_input() -> Run:
    from vllm.models.deepseek_v4.common.ops.fused_mtp_input_rmsnorm import _FUSED_MTP_INPUT_RMSNORM_KERNEL as kernel

    return lambda *args: kernel(*args[:7])


def _vllm_shared_head() -> Run:
    from vllm.models.deepseek_v4.common.ops.fused_mtp_input_rmsnorm import _MTP_SHARED_HEAD_RMSNORM_KERNEL as kernel

    return lambda x, weight, eps, *_: [kernel(x, weight, eps)]


def _variants(op: str, allocating: Run, use_pdl: bool) -> Mapping[str, Run]:
    """Our kernel launched the other way, and with results that are allocated as the peers' are.

    In a graph, a call that allocates writes to the same memory as the one before it, which then is still in L2.
    """
    other = "ours without use_pdl" if use_pdl else "ours use_pdl"
    return {other: lambda *args: OPS[op].overload(*args[:-1], not use_pdl), "ours allocating": allocating}


def _q_kv_variants() -> Mapping[str, Run]:
    """The kernels for few and for many tokens, whatever their number, and those of `_variants`."""
    from cute_kernels.norm.rms import RmsNormKey
    from cute_kernels.runtime.arch import arch_of
    from cute_kernels.runtime.compile import launch

    def run(spread: bool, qr: Any, kv: Any, q_weight: Any, kv_weight: Any, eps: float, *rest: Any) -> None:
        query, kv_out, use_pdl = rest
        key = RmsNormKey(arch_of(0), qr.shape[1], False, kv.shape[1], False, spread=spread)
        launch(key, 0, qr, q_weight, query, kv, kv_weight, kv_out, None, eps, use_pdl)

    return {
        "ours for few tokens": partial(run, True),
        "ours for many tokens": partial(run, False),
        **_variants("fused_q_kv_rmsnorm", _q_kv, True),
    }


def _bench(
    op: str,
    make: Any,
    name: str,
    widths: tuple[int, ...],
    peers: Mapping[str, Callable[[], Run]],
    variants: Any,
    use_pdl: bool = False,
) -> Bench:
    cases = _cases(make, name, widths, use_pdl)
    between = mark(_cases(make, name, widths, use_pdl, BETWEEN_TOKENS))
    return Bench(
        op,
        cases,
        quick=(1, 1024),
        between=between,
        peers=peers,
        variants=variants,
        apart=not_dependent if use_pdl else None,
        same=ONE_ULP,
    )


def _quantized_close(got: Sequence[torch.Tensor], want: Sequence[torch.Tensor]) -> bool:
    """A normed value may be a bf16 step away from the reference's, and its code the next one; KV as ONE_ULP has it."""
    values, steps = [], []
    for codes, scales, _ in (got, want):
        rows, columns = codes.shape
        steps.append(scales[:, :rows].t().repeat_interleave(BLOCK, dim=1)[:, :columns])
        values.append(numerics.from_e4m3(codes) * steps[-1])
    bound = torch.maximum(torch.maximum(*(v.abs() for v in values)) / 8, torch.maximum(*steps) / 512)
    near = (values[0] - values[1]).abs() <= bound
    padding = got[1][:, got[0].shape[0] :]
    return bool(near.all()) and not bool(padding.any()) and ONE_ULP(got[2:], want[2:])


def _q_kv_then_quant() -> Run:
    """What one launch replaces: the norm alone, and the quantization after it."""
    from cute_kernels.linear import ops  # noqa: F401  it defines the second

    norm, quantize = OPS["fused_q_kv_rmsnorm"], OPS["quantize_fp8_1x128"]

    def run(qr: Any, kv: Any, q_weight: Any, kv_weight: Any, eps: float, *outs: Any) -> None:
        codes, scales, kv_out, _, use_pdl = outs
        query = torch.empty(qr.shape, dtype=qr.dtype, device=qr.device)
        norm.overload(qr, kv, q_weight, kv_weight, eps, query, kv_out, use_pdl)
        quantize.overload(query, codes, scales, use_pdl)

    return run


def _q_kv_quant_variants() -> Mapping[str, Run]:
    """The kernels for few and for many tokens, whatever their number, and the ops one after the other."""
    from cute_kernels.norm.q_kv_quant import keys_of
    from cute_kernels.runtime.arch import arch_of
    from cute_kernels.runtime.compile import launch

    def run(is_many: bool, qr: Any, kv: Any, q_weight: Any, kv_weight: Any, eps: float, *outs: Any) -> None:
        codes, scales, kv_out, query, use_pdl = outs
        key = keys_of(arch_of(0), qr.shape[1], False, kv.shape[1], False, False)[is_many]
        launch(key, 0, qr, q_weight, codes, scales, query, kv, kv_weight, kv_out, eps, use_pdl)

    return {
        "ours without use_pdl": lambda *args: OPS["fused_q_kv_rmsnorm_quant"].overload(*args[:-1], False),
        "ours for few tokens": partial(run, False),
        "ours for many tokens": partial(run, True),
        "ours in two launches": _q_kv_then_quant(),
    }


def _vllm_then_inductor() -> Run:
    """vLLM's norm, and torch.compile's kernels of the quantization after it. They write no padding."""
    from perf.linear import quantize

    norm, compiled = _vllm_q_kv(), torch.compile(quantize, fullgraph=True, dynamic=True)

    def run(*args: Any) -> list[torch.Tensor]:
        query, kv = norm(*args)
        codes, scales = compiled(query)
        return [codes, scales, kv]

    return run


Q_KV_QUANT = Bench(
    "fused_q_kv_rmsnorm_quant",
    _cases(_make_q_kv_quant, "q", Q_RANKS, use_pdl=True),
    quick=(1, 1024),
    between=mark(_cases(_make_q_kv_quant, "q", Q_RANKS, True, BETWEEN_TOKENS)),
    peers={"vllm-triton + torch.compile": _vllm_then_inductor},
    variants=_q_kv_quant_variants,
    apart=not_dependent,
    same=_quantized_close,
)

BENCHES = (
    Q_KV_QUANT,
    _bench(
        "fused_q_kv_rmsnorm",
        _make_q_kv,
        "q",
        Q_RANKS,
        {"vllm-triton": _vllm_q_kv, "vllm-triton-plain": _vllm_q_kv_plain},
        _q_kv_variants,
        use_pdl=True,
    ),
    *(
        _bench(op, make, "hidden", HIDDEN, {"vllm-triton": peer}, partial(_variants, op, allocating, False))
        for op, make, peer, allocating in (
            ("fused_mtp_input_rmsnorm", _make_mtp_input, _vllm_mtp_input, _mtp_input),
            ("mtp_shared_head_rmsnorm", _make_shared_head, _vllm_shared_head, _shared_head),
        )
    ),
)

SWEEPS = {bench.op: bench.sweep for bench in BENCHES}
QUICK = {bench.op: bench.quick for bench in BENCHES}
"""Numbers of rows of a quick look."""
