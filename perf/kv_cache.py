"""Benchmarks of the K-cache ops."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from cute_kernels.formats import FP8_DS_MLA
from cute_kernels.kv_cache.ops import quantize_and_insert_k_cache
from cute_kernels.runtime.ops import OPS
from perf.measure import Call, number_of_sets, require_kernel, row, time_graphs

ROWS = (1, 64, 1024, 8192, 32768)
BLOCK_SIZE = 64
VARIANTS = ((4, 1), (8, 1), (16, 1), (4, 2), (8, 2), (4, 4))
"""(warps, rows per warp) of the insert kernel to compare."""


@dataclass(frozen=True)
class InsertSet:
    """Inputs of one call: rows of K, a pool a little larger than they need, and their slots in random order."""

    k: torch.Tensor
    cache: torch.Tensor
    slots: torch.Tensor

    @classmethod
    def make(cls, rows: int, seed: int) -> InsertSet:
        g = torch.Generator(device="cuda").manual_seed(seed)
        blocks = -(-rows // BLOCK_SIZE) + 1
        k = torch.randn(rows, 512, device="cuda", generator=g).bfloat16()
        slots = torch.randperm(blocks * BLOCK_SIZE, device="cuda", generator=g)[:rows].contiguous()
        return cls(k, FP8_DS_MLA.allocate(blocks, BLOCK_SIZE, "cuda"), slots)

    @property
    def pages(self) -> torch.Tensor:
        """The pool as [blocks, page stride] bytes."""
        return self.cache.as_strided((self.cache.shape[0], self.cache.stride(0)), (self.cache.stride(0), 1))

    def ours(self) -> None:
        quantize_and_insert_k_cache(self.k, self.cache, self.slots, BLOCK_SIZE)

    def right(self, call: Call) -> bool:
        """Whether `call` leaves the same bytes in this set's pool as the CPU implementation."""
        self.cache.zero_()
        call()
        want = FP8_DS_MLA.allocate(self.cache.shape[0], BLOCK_SIZE)
        quantize_and_insert_k_cache(self.k.cpu(), want, self.slots.cpu(), BLOCK_SIZE)
        natural = FP8_DS_MLA.page_bytes(BLOCK_SIZE)
        return torch.equal(self.pages[:, :natural].cpu(), FP8_DS_MLA.pages(want, BLOCK_SIZE)[:, :natural])


def _variant(warps: int, rows: int, s: InsertSet) -> None:
    from cute_kernels.kv_cache.insert import InsertKey
    from cute_kernels.runtime.arch import arch_of
    from cute_kernels.runtime.compile import launch

    key = InsertKey(arch_of(0), warps=warps, rows=rows)
    launch(key, 0, s.k, s.slots, s.cache.data_ptr(), s.cache.stride(0), s.cache.shape[0] * BLOCK_SIZE, BLOCK_SIZE)


def _vllm() -> Any:
    """vLLM's Triton insert as (k, pages, slots) -> None, or the reason why there is none."""
    try:
        from vllm.models.deepseek_v4.common.ops import cache_utils
    except Exception as error:  # an installation that is not whole fails in many ways
        return f"{type(error).__name__}: {error}"
    return partial(cache_utils.quantize_and_insert_k_cache, block_size=BLOCK_SIZE)


def sweep_insert(
    rows: tuple[int, ...] = ROWS, peers: bool = False, variants: bool = False, replays: int = 21
) -> list[dict[str, Any]]:
    """Records of quantize_and_insert_k_cache per number of rows, its peer and other configurations beside it."""
    records = []
    peer = _vllm() if peers else None
    for count in rows:
        first = InsertSet.make(count, 0)
        cost = OPS["quantize_and_insert_k_cache"].cost
        assert cost is not None
        nbytes = cost(first.k, first.cache, first.slots, BLOCK_SIZE, FP8_DS_MLA.id).bytes
        sets = [first, *(InsertSet.make(count, seed) for seed in range(1, number_of_sets(nbytes)))]
        require_kernel(first.ours)
        candidates: dict[str, list[Call]] = {"cute_kernels": [s.ours for s in sets]}
        skipped = []
        if callable(peer):
            candidates["vllm-triton"] = [partial(peer, s.k, s.pages, s.slots) for s in sets]
        elif peer is not None:
            skipped.append({"name": "vllm-triton", "skipped": peer})
        if variants:
            for warps, per_warp in VARIANTS:
                name = f"cute_kernels warps={warps} rows={per_warp}"
                candidates[name] = [partial(_variant, warps, per_warp, s) for s in sets]
        checked = {name: first.right(calls[0]) for name, calls in candidates.items()}
        if not checked["cute_kernels"]:
            raise RuntimeError(f"quantize_and_insert_k_cache: wrong bytes at T = {count}; nothing was timed")
        timings = time_graphs(candidates, nbytes, replays)
        records.append(
            {
                "op": "quantize_and_insert_k_cache",
                "shape": {"T": count, "block_size": BLOCK_SIZE, "page_stride": first.cache.stride(0)},
                "rows": [row(name, t, nbytes, checked[name]) for name, t in timings.items()] + skipped,
            }
        )
    return records


SWEEPS = {"quantize_and_insert_k_cache": sweep_insert}
