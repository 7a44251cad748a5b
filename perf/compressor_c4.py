# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of the ops that store compressed entries, with ratio 4: those of attention and those of the indexer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import torch

from cute_kernels.compressor import ops as _registered  # noqa: F401
from cute_kernels.formats import FORMATS, FP8_DS_MLA, INDEXER_FP8, INDEXER_MXFP4, compressor_state
from perf.bench import Arguments, Bench, Case, Run
from perf.grid import draw_rows, mark

EPS = 1e-6
RATIO = 4
STATE_ROWS = 4
ENTRY_ROWS = 64
LONGEST_CHUNK = 8192
DECODE_CONTEXT = 64
TOKENS_PER_TEAM = (1, 2, 4, 16)
"""Tried beside the number in use."""


@dataclass(frozen=True)
class Kind:
    name: str
    kv_format: str

    @property
    def dim(self) -> int:
        return int(FORMATS[self.kv_format].dim)


KINDS = (
    Kind("c4_512", FP8_DS_MLA.id),
    Kind("idx128_fp8", INDEXER_FP8.id),
    Kind("idx128_mxfp4", INDEXER_MXFP4.id),
)


@cache
def _table(positions: int) -> torch.Tensor:
    angles = torch.arange(positions, device="cuda", dtype=torch.float64)[:, None] * 160000.0 ** (
        -torch.arange(32, device="cuda", dtype=torch.float64) / 32
    )
    return torch.cat([angles.cos(), angles.sin()], dim=1).float()


def _fused(kind: Kind, tokens: int, what: str, seed: int) -> Arguments:
    """Arguments of the fused op.

    closing   decode: every token belongs to a request of its own and closes an entry
    decode    the same at random positions: one in four closes an entry
    open      the same where none does
    window, all   prefill chunks of at most 8192 tokens; what is saved of them
    """
    g = torch.Generator(device="cuda").manual_seed(seed)
    per = min(tokens, LONGEST_CHUNK) if what in ("window", "all") else 1
    requests, context = tokens // per, max(per, DECODE_CONTEXT)
    request = torch.arange(requests, device="cuda", dtype=torch.int32).repeat_interleave(per)
    if per > 1:
        position = torch.arange(per, device="cuda").repeat(requests)
    elif what == "closing":
        position = torch.randint(2, context // RATIO + 1, (tokens,), device="cuda", generator=g) * RATIO - 1
    else:
        position = torch.randint(RATIO, context, (tokens,), device="cuda", generator=g)
        if what == "open":
            position -= (position % RATIO == RATIO - 1).long()
    fmt, state_format = FORMATS[kind.kv_format], compressor_state(kind.dim, RATIO)
    width = state_format.width
    columns = context // STATE_ROWS
    table = torch.randperm(requests * columns, device="cuda", generator=g).view(requests, columns).int()
    slots = table[request.long(), position // STATE_ROWS].long() * STATE_ROWS + position % STATE_ROWS
    state = state_format.allocate(requests * columns, STATE_ROWS, "cuda", state_format.page_bytes(STATE_ROWS))
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
        torch.randn(tokens, 2 * width, device="cuda", generator=g),
        torch.randn(RATIO, width, device="cuda", generator=g),
        position,
        request,
        starts,
        state,
        slots,
        table,
        _table(LONGEST_CHUNK),
        fmt.allocate(requests * pages, ENTRY_ROWS, "cuda"),
        entry_slots,
        (torch.rand(kind.dim, device="cuda", generator=g) + 0.5).bfloat16(),
        (last + 1).int(),
        None,
        EPS,
        RATIO,
        0,
        kind.kv_format,
        "all" if what == "all" else "window",
        "ties_to_lower",
        False,
        False,
        False,
        False,
    )


def _stored(kind: Kind, tokens: int, what: str, seed: int) -> Arguments:
    """Arguments of the op that reads the state: of a step whose own rows are saved already."""
    a = _fused(kind, tokens, what, seed)
    state = a[5].normal_(generator=torch.Generator(device="cuda").manual_seed(seed))
    return state, a[3], a[2], *a[6:12], a[13], EPS, RATIO, kind.kv_format, "ties_to_lower", False


def _cases(make: Any, steps: Sequence[tuple[int, str]]) -> tuple[Case, ...]:
    return tuple(
        Case(f"{kind.name} {what} T={tokens}", tokens, partial(make, kind, tokens, what), {"format": kind.kv_format})
        for kind in KINDS
        for tokens, what in steps
    )


def _differing(tolerated: float) -> Any:
    """Entries agree but for some bytes, and what is saved agrees in all: sums are taken in another order."""

    def same(got: Sequence[torch.Tensor], want: Sequence[torch.Tensor]) -> bool:
        *states, entries = zip(got, want, strict=True)
        exact = all(torch.equal(g.view(torch.int32), w.view(torch.int32)) for g, w in states)
        g, w = (x.view(torch.uint8) for x in entries)
        return exact and float((g != w).float().mean()) <= tolerated

    return same


def _variants(op: str) -> dict[str, Run]:
    from cute_kernels.compressor import ratio4
    from cute_kernels.compressor.call import CompressCall, FusedCall

    record: Any = FusedCall if op == "fused" else CompressCall
    launch: Any = ratio4.launch_fused if op == "fused" else ratio4.launch_compress

    def run(*args: Any, **options: Any) -> None:
        launch(record(*args), **options)

    return {
        f"ours per_team={n} through_l1={through_l1}": partial(run, per_team=n, through_l1=through_l1)
        for n in TOKENS_PER_TEAM
        for through_l1 in (False, True)
    }


def _triton() -> tuple[Any, Any]:
    from vllm.models.deepseek_v4.common.ops.fused_compress_quant_cache import compress_norm_rope_store_triton
    from vllm.models.deepseek_v4.common.ops.save_partial_states import _SAVE_PARTIAL_STATES_KERNEL

    return compress_norm_rope_store_triton, _SAVE_PARTIAL_STATES_KERNEL


def _keywords(*args: Any) -> dict[str, Any]:
    """How vLLM spells the arguments of compress_norm_rope_store."""
    state, request, position, slots, table, cos_sin, cache, entry_slots, weight, _, eps, ratio, kv_format = args[:13]
    fmt = FORMATS[kv_format]
    block, stride, scale = (64, 576, 8) if fmt is FP8_DS_MLA else (128, 128, 4)
    if fmt is INDEXER_MXFP4:
        block, stride = 32, 64
    return {
        "state_cache": state,
        "num_actual": slots.shape[0],
        "token_to_req_indices": request,
        "positions": position,
        "slot_mapping": slots,
        "block_table": table,
        "block_size": state.shape[1],
        "state_width": state.shape[2] // 2,
        "cos_sin_cache": cos_sin,
        "kv_cache": cache,
        "k_cache_metadata": SimpleNamespace(slot_mapping=entry_slots),
        "pdl_kwargs": {"launch_pdl": False},
        "head_dim": fmt.dim,
        "rope_head_dim": 64,
        "compress_ratio": ratio,
        "overlap": ratio == RATIO,
        "use_fp4_cache": fmt is INDEXER_MXFP4,
        "rms_norm_weight": weight,
        "rms_norm_eps": eps,
        "quant_block": block,
        "token_stride": stride,
        "scale_dim": scale,
    }


def vllm_triton() -> Run:
    compress, _ = _triton()
    return lambda *args: compress(**_keywords(*args))


def vllm_cutedsl() -> Run:
    import tvm_ffi
    from vllm.models.deepseek_v4.nvidia.ops.sparse_attn_compress_cutedsl import _SPARSE_ATTN_COMPRESSOR_CUTEDSL_KERNEL

    def run(*args: Any) -> None:
        with tvm_ffi.use_torch_stream():
            _SPARSE_ATTN_COMPRESSOR_CUTEDSL_KERNEL(
                **_keywords(*args), store_full_kv=False, store_full_fp8=False, fp8_scale=None
            )

    return run


def two_steps(loader: Any) -> Run:
    """vLLM's two kernels in place of the fused one; they save every row."""
    compress, (_, save) = loader(), _triton()

    def run(*args: Any) -> None:
        kv_score, ape, position, request, _, state, slots = args[:7]
        kv, score = kv_score.chunk(2, dim=1)
        save(
            kv=kv,
            score=score,
            ape=ape,
            positions=position,
            state_cache=state,
            slot_mapping=slots,
            block_size=state.shape[1],
            state_width=kv.shape[1],
            compress_ratio=args[15],
            pdl_kwargs={"launch_pdl": False},
        )
        compress(state, request, position, slots, *args[7:12], args[13], *args[14:16], args[17])

    return run


def _entries_only(tolerated: float) -> Any:
    """The peers save more rows than "window" asks for: only the entries are compared."""
    same = _differing(tolerated)
    return lambda got, want: same(got[-1:], want[-1:])


DECODE = ((1, "closing"), (64, "closing"), (64, "open"), (64, "decode"), (256, "open"), (256, "decode"))
BETWEEN_DECODE = tuple((rows, "decode") for rows in draw_rows("compressor decode", (1, 256), 2))
BETWEEN_PREFILL = tuple((rows, "window") for rows in draw_rows("compressor prefill", (1024, 8192), 2, 128))
STORE = Bench(
    op="compress_norm_rope_store",
    cases=_cases(_stored, ((1, "closing"), (64, "closing"), (1024, "all"), (8192, "all"), (32768, "all"))),
    quick=(1, 64, 8192),
    between=mark(_cases(_stored, (*BETWEEN_DECODE, *BETWEEN_PREFILL))),
    peers={"vllm-triton": vllm_triton, "vllm-cutedsl": vllm_cutedsl},
    variants=partial(_variants, "compress"),
    same=_differing(1e-3),
    peer_same=_differing(0.02),
)
FUSED = Bench(
    op="fused_compress_norm_rope_store",
    cases=_cases(
        _fused, (*DECODE, (1024, "window"), (8192, "window"), (32768, "window"), (8192, "all"), (32768, "all"))
    ),
    quick=(1, 64, 8192),
    between=mark(_cases(_fused, (*BETWEEN_DECODE, *BETWEEN_PREFILL))),
    peers={
        "vllm-triton": partial(two_steps, vllm_triton),
        "vllm-cutedsl": partial(two_steps, vllm_cutedsl),
    },
    variants=partial(_variants, "fused"),
    inputs=("state_cache",),
    same=_differing(1e-3),
    peer_same=_entries_only(0.02),
)
