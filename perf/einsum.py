# SPDX-License-Identifier: Apache-2.0
"""Benchmark of the output projection's grouped FP8 product."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch

from cute_kernels.linear.verify_cases import PRODUCTS, ROUNDING
from cute_kernels.output.ops import deepseek_v4_fp8_einsum
from cute_kernels.runtime import kept
from cute_kernels.runtime.ops import OPS
from perf.gemm import deepgemm_product
from perf.grid import draw_rows, facts_between
from perf.measure import Call, compare, number_of_sets
from perf.peers import Product, compile_products, load_peer

EQUATION, RECIPE = "bhr,hdr->bhd", [1, 128, 128]
RANK, WIDTH = 1024, 4096
ROWS = (1, 64, 512, 1000, 1024, 5000, 8192, 32768)
BETWEEN_ROWS = draw_rows("einsum", ROWS, 6)
GROUPS = (8, 16, 1)
"""Groups of a rank: V4-Flash whole, V4-Pro whole, V4-Flash split over eight."""

MOST_CODES = 2**30
"""Larger inputs than this are left out."""

PORTABLE = "ours portable"

CHECKED_ROWS = 256


@dataclass(frozen=True)
class EinsumSet:
    """Inputs of one call, laid out as the quantizer and the checkpoint do, with scales that are powers of two."""

    a: torch.Tensor
    a_scale: torch.Tensor
    b: torch.Tensor
    b_scale: torch.Tensor
    out: torch.Tensor

    @classmethod
    def make(cls, tokens: int, groups: int, seed: int) -> EinsumSet:
        g = torch.Generator(device="cuda").manual_seed(seed)

        def codes(rows: int) -> torch.Tensor:
            found = torch.empty(groups, rows, WIDTH, dtype=torch.float8_e4m3fn, device="cuda")
            for group in found:
                group.copy_(torch.randn(rows, WIDTH, device="cuda", generator=g).mul_(100).clamp_(-448, 448))
            return found

        def powers(*shape: int) -> torch.Tensor:
            return torch.exp2(torch.randint(-12, -6, shape, device="cuda", generator=g).float())

        a_scale = powers(groups, WIDTH // 128, -(-tokens // 4) * 4).permute(2, 0, 1)[:tokens]
        out = torch.empty(tokens, groups, RANK, dtype=torch.bfloat16, device="cuda")
        return cls(codes(tokens).transpose(0, 1), a_scale, codes(RANK), powers(groups, RANK // 128, WIDTH // 128), out)

    def arguments(self) -> tuple[Any, ...]:
        """In the order of the op's schema."""
        return self.a, self.a_scale, self.b, self.b_scale, self.out, EQUATION, RECIPE

    def ours(self) -> None:
        deepseek_v4_fp8_einsum(*self.arguments())

    def right(self, call: Call) -> bool:
        """Whether `call` leaves results near the float64 ones in rows all over the output."""
        self.out.fill_(float("nan"))
        call()
        tokens = self.a.shape[0]
        rows = torch.linspace(0, tokens - 1, min(tokens, CHECKED_ROWS), device="cuda").long()
        a = self.a[rows].double() * self.a_scale[rows].double().repeat_interleave(128, -1)
        b = self.b.double() * self.b_scale.double().repeat_interleave(128, -1).repeat_interleave(128, 1)
        a, b = a.transpose(0, 1), b.transpose(1, 2)
        want, magnitude = a @ b, a.abs() @ b.abs()
        error = (self.out[rows].transpose(0, 1).double() - want).abs()
        return bool((error <= ROUNDING * want.abs() + PRODUCTS * magnitude).all()) and not self.out.isnan().any()


def _portable(s: EinsumSet) -> None:
    """The call by the portable kernel, whatever the architecture."""
    from cute_kernels.linear import launch as calls

    try:
        with mock.patch.object(calls, "HOPPER", ""):
            kept.forget()  # plans of such calls run the kernels that were chosen
            s.ours()
    finally:
        kept.forget()


def _variants() -> dict[str, Callable[[EinsumSet], None]]:
    from cute_kernels.linear import select
    from cute_kernels.linear.hopper.gemm import GemmKey
    from cute_kernels.linear.launch import PORTABLE_TILES
    from cute_kernels.linear.mma_sync.gemm import PortableGemmKey
    from cute_kernels.runtime.arch import arch_of, multiprocessors
    from cute_kernels.runtime.compile import function, launch

    def run(key: GemmKey | PortableGemmKey, s: EinsumSet) -> None:
        tokens, groups, rank = s.out.shape
        if isinstance(key, GemmKey):
            ctas = min(select.count_work_tiles(key, tokens, groups, rank), multiprocessors(0))
            launch(key, 0, s.a, s.a_scale, s.b, s.b_scale, s.out, None, ctas, False)
        else:
            tiles = groups * -(-tokens // key.rows) * -(-rank // key.columns)
            launch(key, 0, s.a, s.a_scale, s.b, s.b_scale, s.out, min(tiles, multiprocessors(0)))

    found: dict[str, Callable[[EinsumSet], None]] = {PORTABLE: _portable}
    keys: dict[str, GemmKey | PortableGemmKey] = {}
    if arch_of(0) == select.HOPPER:
        keys = {
            f"ours rows={key.rows} columns={key.columns} stages={key.stages}": key
            for key in select.many_rows_keys("bf16")
        }
    for rows, columns, _ in PORTABLE_TILES:
        keys[f"{PORTABLE} rows={rows} columns={columns}"] = PortableGemmKey(arch_of(0), rows, columns)
    for name, key in keys.items():
        function(key)
        found[name] = partial(run, key)
    return found


def _deepgemm(use_pdl: bool) -> Callable[[EinsumSet], None]:
    product = deepgemm_product(use_pdl)

    def run(s: EinsumSet) -> None:
        product(s.a, s.a_scale, s.b, s.b_scale, s.out)

    return run


def _scaled_mm(s: EinsumSet) -> None:
    """torch's product with block scales, group by group: cuBLAS. It takes numbers of rows that are multiples of 4."""
    for group in range(s.a.shape[1]):
        torch.ops.aten._scaled_mm.out(
            s.a[:, group],
            s.b[group].t(),
            s.a_scale[:, group],
            s.b_scale[group].t(),
            None,
            None,
            torch.bfloat16,
            False,
            out=s.out[:, group],
        )


def sweep(
    rows: tuple[int, ...] = (*ROWS, *BETWEEN_ROWS), peers: bool = False, variants: bool = False, replays: int = 21
) -> list[dict[str, Any]]:
    """Records of deepseek_v4_fp8_einsum per groups of a rank and number of rows, peers and variants beside it."""
    candidates: dict[str, Any] = dict(_variants()) if variants else {}
    for tokens in rows:
        EinsumSet.make(tokens, 1, 0).ours()  # compiled before other projects change the DSL
    if peers:
        compile_products(
            Product(tokens, groups, RANK, WIDTH, groups > 1)
            for groups in GROUPS
            for tokens in rows
            if tokens * groups * WIDTH <= MOST_CODES
        )
        for name, use_pdl in (("deepgemm", False), ("deepgemm-pdl", True)):
            candidates[name] = load_peer(name, partial(_deepgemm, use_pdl))
        candidates["torch-scaled_mm"] = _scaled_mm
    records = []
    for groups in GROUPS:
        for tokens in rows:
            if tokens * groups * WIDTH > MOST_CODES:
                continue
            first = EinsumSet.make(tokens, groups, 0)
            cost = OPS["deepseek_v4_fp8_einsum"].cost
            assert cost is not None
            work = cost(*first.arguments())
            sets = [
                first, *(EinsumSet.make(tokens, groups, seed) for seed in range(1, number_of_sets(work.bytes)))
            ]  # fmt: skip
            shape = {"case": f"G={groups} T={tokens}", "T": tokens, "groups": groups}
            shape = facts_between(shape) if tokens in BETWEEN_ROWS else shape
            records.append(compare("deepseek_v4_fp8_einsum", shape, sets, work, candidates, replays, products="e4m3"))
    return records


SWEEPS = {"deepseek_v4_fp8_einsum": sweep}
QUICK = {"deepseek_v4_fp8_einsum": (64, 1024)}
"""Numbers of rows of a quick look."""
