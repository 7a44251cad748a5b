# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of the compressor's ops."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from cute_kernels.compressor import reference
from cute_kernels.compressor.call import SaveCall
from cute_kernels.compressor.ops import save_partial_states
from cute_kernels.formats import compressor_state
from cute_kernels.runtime.ops import OPS
from perf.grid import draw_rows, facts_between
from perf.measure import Call, compare, number_of_sets
from perf.peers import load_peer

ROWS = (1, 64, 1024, 8192, 32768)
BETWEEN_ROWS = draw_rows("save_partial_states", ROWS[:-1])
SAVE_VARIANTS: tuple[dict[str, Any], ...] = (
    {"vectors": 1, "warps": 8},
    {"vectors": 2, "warps": 8},
    {"vectors": 2, "rows": 2},
    {"vectors": 2},
    {"vectors": 2, "through_l1": True},
    {"vectors": 2, "kv_first": True, "through_l1": True},
)
"""Fields of SaveKey that differ from the kernel in use."""


@dataclass(frozen=True)
class SaveKind:
    name: str
    head_dim: int
    ratio: int
    block_size: int

    @property
    def width(self) -> int:
        return compressor_state(self.head_dim, self.ratio).width


SAVE_KINDS = (SaveKind("c4_512", 512, 4, 4), SaveKind("c128_512", 512, 128, 8), SaveKind("idx128", 128, 4, 4))


@dataclass(frozen=True)
class SaveSet:
    """Inputs of one call: projections of requests of at most 8192 tokens, whose state pages lie in random order.

    With up to 64 tokens every one belongs to a request of its own, with more they are prefill chunks.
    """

    kind: SaveKind
    kv: torch.Tensor
    score: torch.Tensor
    ape: torch.Tensor
    positions: torch.Tensor
    cache: torch.Tensor
    slots: torch.Tensor

    @classmethod
    def make(cls, kind: SaveKind, tokens: int, seed: int) -> SaveSet:
        g = torch.Generator(device="cuda").manual_seed(seed)
        per = 1 if tokens <= 64 else min(tokens, 8192)
        requests, longest = tokens // per, max(per, 128)
        positions = torch.arange(per, device="cuda").repeat(requests)
        if per == 1:
            positions = torch.randint(0, longest, (tokens,), device="cuda", generator=g)
        request = torch.arange(requests, device="cuda").repeat_interleave(per)
        blocks = -(-longest // kind.block_size)
        table = torch.randperm(requests * blocks, device="cuda", generator=g).view(requests, blocks)
        slots = table[request, positions // kind.block_size] * kind.block_size + positions % kind.block_size
        kv_score = torch.randn(tokens, 2 * kind.width, device="cuda", generator=g)
        kv, score = kv_score.split(kind.width, dim=1)
        ape = torch.randn(kind.ratio, kind.width, device="cuda", generator=g)
        fmt = compressor_state(kind.head_dim, kind.ratio)
        stride = fmt.page_bytes(kind.block_size)
        cache = fmt.allocate(requests * blocks, kind.block_size, "cuda", stride)
        return cls(kind, kv, score, ape, positions, cache, slots)

    def arguments(self) -> tuple[Any, ...]:
        """In the order of the op's schema."""
        kind = self.kind
        tensors = (self.kv, self.score, self.ape, self.positions, self.cache, self.slots)
        return *tensors, kind.block_size, kind.ratio

    def ours(self) -> None:
        kind, tensors = self.kind, (self.kv, self.score, self.ape, self.positions, self.cache, self.slots)
        save_partial_states(*tensors, kind.block_size, kind.width, kind.ratio)

    def right(self, call: Call) -> bool:
        """Whether `call` leaves the same bits in the state cache as the reference."""
        want = self.cache.fill_(7.0).clone()
        call()
        inputs = self.kv, self.score, self.ape, self.positions
        reference.save_partial_states(SaveCall(*inputs, want, self.slots, self.kind.block_size, self.kind.ratio))
        return torch.equal(self.cache.view(torch.int32), want.view(torch.int32))


def _save_variants() -> dict[str, Callable[[SaveSet], None]]:
    from cute_kernels.compressor.save import SaveKey
    from cute_kernels.runtime.arch import arch_of
    from cute_kernels.runtime.compile import function, launch

    def run(keys: dict[int, SaveKey], s: SaveSet) -> None:
        cache, block_size = s.cache, s.kind.block_size
        pool = (cache.data_ptr(), cache.stride(0) * 4, cache.shape[0] * block_size, block_size)
        launch(keys[s.kind.width], 0, s.kv, s.score, s.ape, s.positions, s.slots, *pool, s.kind.ratio)

    variants: dict[str, Callable[[SaveSet], None]] = {}
    for fields in SAVE_VARIANTS:
        keys = {}
        for kind in SAVE_KINDS:
            keys[kind.width] = SaveKey(arch_of(0), kind.width, **fields)
            function(keys[kind.width])
        name = "ours " + " ".join(f"{name}={value}" for name, value in fields.items())
        variants[name] = partial(run, keys)
    return variants


def _vllm_save() -> Callable[[SaveSet], None]:
    """vLLM's Triton kernel."""
    from vllm.models.deepseek_v4.common.ops.save_partial_states import _SAVE_PARTIAL_STATES_KERNEL as kernel

    def run(s: SaveSet) -> None:
        kernel(
            kv=s.kv,
            score=s.score,
            ape=s.ape,
            positions=s.positions,
            state_cache=s.cache,
            slot_mapping=s.slots,
            block_size=s.kind.block_size,
            state_width=s.kind.width,
            compress_ratio=s.kind.ratio,
            pdl_kwargs={"launch_pdl": False},
        )

    return run


def sweep_save(
    rows: tuple[int, ...] = (*ROWS, *BETWEEN_ROWS), peers: bool = False, variants: bool = False, replays: int = 21
) -> list[dict[str, Any]]:
    """Records of save_partial_states per compressor and number of tokens, its peer and our variants beside it."""
    candidates: dict[str, Any] = dict(_save_variants()) if variants else {}
    for kind in SAVE_KINDS:
        for tokens in (1, 32768):  # a kernel for few, and one for many
            SaveSet.make(kind, tokens, 0).ours()  # compiled before other projects change the DSL
    if peers:
        candidates["vllm-triton"] = load_peer("vllm-triton", _vllm_save)
    records = []
    for kind in SAVE_KINDS:
        for tokens in rows:
            first = SaveSet.make(kind, tokens, 0)
            cost = OPS["save_partial_states"].cost
            assert cost is not None
            work = cost(*first.arguments())
            sets = [first, *(SaveSet.make(kind, tokens, seed) for seed in range(1, number_of_sets(work.bytes)))]
            shape: dict[str, Any] = {
                "case": f"{kind.name} T={tokens}",
                "T": tokens,
                "width": kind.width,
                "ratio": kind.ratio,
            }
            shape = facts_between(shape) if tokens in BETWEEN_ROWS else shape
            records.append(compare("save_partial_states", shape, sets, work, candidates, replays))
    return records


SWEEPS = {"save_partial_states": sweep_save}
QUICK = {"save_partial_states": (1, 1024, 32768)}
"""Numbers of rows of a quick look."""
