# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of the K-cache ops."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from cute_kernels.formats import FP8_DS_MLA
from cute_kernels.kv_cache import reference
from cute_kernels.kv_cache.call import GatherCall
from cute_kernels.kv_cache.ops import dequantize_and_gather_k_cache, quantize_and_insert_k_cache
from cute_kernels.runtime.ops import OPS
from perf.grid import draw, draw_rows, facts_between
from perf.measure import Call, compare, number_of_sets
from perf.peers import load_peer
from perf.records import case_of

ROWS = (1, 64, 1024, 8192, 32768)
BETWEEN_ROWS = draw_rows("quantize_and_insert_k_cache", ROWS, 4)
BLOCK_SIZE = 64
INSERT_VARIANTS: tuple[dict[str, Any], ...] = (
    {"warps": 8},
    {"warps": 16},
    {"rows": 2},
    {"warps": 8, "rows": 2},
    {"rows": 4},
    {"through_l1": False},
    {"through_l1": True},
)
"""Fields of InsertKey that differ from the kernel in use."""

BULK_VARIANTS: tuple[tuple[dict[str, Any], int], ...] = (
    ({}, 32),
    ({}, 64),
    ({}, 100000),
    ({"stages": 1}, 128),
    ({"warps": 2}, 128),
)
"""(fields of GatherBulkKey that differ from the kernel in use, blocks per multiprocessor)."""

GATHER_VARIANTS: tuple[tuple[dict[str, Any], int], ...] = (
    ({"rows": 1}, 16),
    ({"rows": 1}, 64),
    ({"rows": 2}, 8),
    ({"rows": 2}, 12),
    ({"rows": 2}, 32),
    ({"rows": 2}, 64),
    ({"rows": 2}, 100000),
    ({"rows": 4}, 16),
    ({"rows": 4}, 32),
    ({"rows": 2, "warps": 8}, 8),
)
"""(fields of GatherKey that differ from the kernel in use, blocks per multiprocessor)."""


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

    def arguments(self) -> tuple[Any, ...]:
        return self.k, self.cache, self.slots, BLOCK_SIZE, FP8_DS_MLA.id

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


def _insert_variants() -> dict[str, Callable[[InsertSet], None]]:
    from cute_kernels.kv_cache.insert import InsertKey
    from cute_kernels.runtime.arch import arch_of
    from cute_kernels.runtime.compile import function, launch

    def run(key: InsertKey, s: InsertSet) -> None:
        launch(key, 0, s.k, s.slots, s.cache.data_ptr(), s.cache.stride(0), s.cache.shape[0] * BLOCK_SIZE, BLOCK_SIZE)

    variants: dict[str, Callable[[InsertSet], None]] = {}
    for fields in INSERT_VARIANTS:
        key = InsertKey(arch_of(0), **fields)
        function(key)
        variants[_name(fields)] = partial(run, key)
    return variants


def _name(fields: dict[str, Any], blocks: int | None = None) -> str:
    more = {} if blocks is None else {"blocks": blocks}
    return "ours " + " ".join(f"{name}={value}" for name, value in {**fields, **more}.items())


def _vllm_insert() -> Callable[[InsertSet], None]:
    """vLLM's Triton insert."""
    from vllm.models.deepseek_v4.common.ops import cache_utils

    return lambda s: cache_utils.quantize_and_insert_k_cache(s.k, s.pages, s.slots, block_size=BLOCK_SIZE)


def sweep_insert(
    rows: tuple[int, ...] = (*ROWS, *BETWEEN_ROWS), peers: bool = False, variants: bool = False, replays: int = 21
) -> list[dict[str, Any]]:
    """Records of quantize_and_insert_k_cache per number of rows, its peer and other configurations beside it."""
    candidates: dict[str, Any] = dict(_insert_variants()) if variants else {}
    for rows_of_call in (1, 8192):  # a kernel for few rows, and one for many
        InsertSet.make(rows_of_call, 0).ours()  # compiled before other projects change the DSL
    if peers:
        candidates["vllm-triton"] = load_peer("vllm-triton", _vllm_insert)
    records = []
    for count in rows:
        first = InsertSet.make(count, 0)
        cost = OPS["quantize_and_insert_k_cache"].cost
        assert cost is not None
        work = cost(*first.arguments())
        sets = [first, *(InsertSet.make(count, seed) for seed in range(1, number_of_sets(work.bytes)))]
        shape: dict[str, Any] = {"T": count, "block_size": BLOCK_SIZE, "page_stride": first.cache.stride(0)}
        shape = facts_between({"case": case_of(shape), **shape}) if count in BETWEEN_ROWS else shape
        records.append(compare("quantize_and_insert_k_cache", shape, sets, work, candidates, replays))
    return records


@dataclass(frozen=True)
class GatherCase:
    """requests of seq_len rows each, the last gather_len of them (0: all, and no gather_lens) to be copied."""

    name: str
    requests: int
    seq_len: int
    block_size: int
    gather_len: int = 0

    @property
    def rows(self) -> int:
        return self.requests * (self.gather_len or self.seq_len)


GATHER_CASES = (
    GatherCase("c4 1x1024", 1, 1024, 64),
    GatherCase("c4 1x16384", 1, 16384, 64),
    GatherCase("c4 4x16384", 4, 16384, 64),
    GatherCase("c4 1x262144", 1, 262144, 64),
    GatherCase("c128 4x512", 4, 512, 2),
    GatherCase("c128 1x8192", 1, 8192, 2),
    GatherCase("swa 1x8192 gather4224", 1, 8192, 64, 4224),
    GatherCase("swa 4x8384 gather8320", 4, 8384, 64, 8320),
)

BETWEEN_CASES = tuple(
    GatherCase(f"c4 {point['requests']}x{point['rows']}", point["requests"], point["rows"], 64)
    for point in draw("dequantize_and_gather_k_cache", 3, requests=(1, 8), rows=(1500, 60_000))
)


@dataclass(frozen=True)
class GatherSet:
    """Inputs of one call: pools full of rows, pages in random order."""

    out: torch.Tensor
    cache: torch.Tensor
    seq_lens: torch.Tensor
    gather_lens: torch.Tensor | None
    table: torch.Tensor
    block_size: int

    @classmethod
    def make(cls, case: GatherCase, seed: int) -> GatherSet:
        g = torch.Generator(device="cuda").manual_seed(seed)
        width = -(-case.seq_len // case.block_size)
        pages = case.requests * width
        cache = FP8_DS_MLA.allocate(pages, case.block_size, "cuda")
        k = torch.randn(pages * case.block_size, 512, device="cuda", generator=g).bfloat16()
        quantize_and_insert_k_cache(k, cache, torch.arange(len(k), device="cuda"), case.block_size)
        table = torch.randperm(pages, device="cuda", generator=g).view(case.requests, width).int()

        def lens(value: int) -> torch.Tensor:
            return torch.full((case.requests,), value, dtype=torch.int32, device="cuda")

        out = torch.zeros(case.requests, case.gather_len or case.seq_len, 512, device="cuda", dtype=torch.bfloat16)
        gathered = lens(case.gather_len) if case.gather_len else None
        return cls(out, cache, lens(case.seq_len), gathered, table, case.block_size)

    def arguments(self) -> tuple[Any, ...]:
        return self.out, self.cache, self.seq_lens, self.gather_lens, self.table, self.block_size, 0, FP8_DS_MLA.id

    def ours(self) -> None:
        dequantize_and_gather_k_cache(*self.arguments()[:-1])

    def right(self, call: Call) -> bool:
        """Whether `call` leaves the same bits in `out` as the reference, and writes all of it."""
        self.out.fill_(float("nan"))
        call()
        want = torch.full_like(self.out, float("nan"))
        lens, fmt = (self.seq_lens, self.gather_lens), FP8_DS_MLA.id
        reference.dequantize_and_gather_k_cache(
            GatherCall(want, self.cache, *lens, self.table, self.block_size, 0, fmt)
        )
        return torch.equal(self.out.view(torch.int16), want.view(torch.int16)) and not bool(want.isnan().any())


def _gather_variants() -> dict[str, Callable[[GatherSet], None]]:
    from cute_kernels.kv_cache.gather import CHUNK_ROWS, GatherBulkKey, GatherKey, ctas_per_request
    from cute_kernels.runtime.arch import arch_of, multiprocessors
    from cute_kernels.runtime.compile import function, launch

    def run(keys: dict[bool, Any], blocks_per_sm: int, s: GatherSet) -> None:
        key = keys[s.gather_lens is not None]
        if isinstance(key, GatherBulkKey) and s.block_size % CHUNK_ROWS:
            raise ValueError(f"pages of {s.block_size} rows have no chunks of {CHUNK_ROWS}")
        requests = s.seq_lens.shape[0]
        blocks = ctas_per_request(key, requests, s.out.shape[1], multiprocessors(0), blocks_per_sm)
        lens = s.seq_lens if s.gather_lens is None else s.gather_lens
        pool = (s.cache.data_ptr(), s.cache.stride(0), s.cache.shape[0], s.block_size)
        launch(key, 0, s.out, s.seq_lens, lens, s.table, *pool, 0, blocks)

    variants: dict[str, Callable[[GatherSet], None]] = {}
    for kind, form, configurations in (
        (GatherKey, {}, GATHER_VARIANTS),
        (GatherBulkKey, {"bulk": True}, BULK_VARIANTS),
    ):
        for fields, blocks_per_sm in configurations:
            keys = {gathered: kind(arch_of(0), gathered=gathered, **fields) for gathered in (False, True)}
            for key in keys.values():
                function(key)
            variants[_name({**form, **fields}, blocks_per_sm)] = partial(run, keys, blocks_per_sm)
    return variants


def _vllm_gather_triton() -> Callable[[GatherSet], None]:
    """vLLM's Triton gather."""
    from vllm.models.deepseek_v4.common.ops import cache_utils

    kernel = cache_utils._DEQUANTIZE_AND_GATHER_K_CACHE_KERNEL
    return lambda s: kernel(*s.arguments()[:-1], use_fnuz=False)


def _vllm_gather_cutedsl() -> Callable[[GatherSet], None]:
    """vLLM's CuTe DSL gather."""
    import tvm_ffi
    from vllm.models.deepseek_v4.nvidia.ops import dequant_gather_k_cutedsl

    kernel = dequant_gather_k_cutedsl._DEQUANT_GATHER_K_CACHE_CUTEDSL_KERNEL

    def run(s: GatherSet) -> None:
        with tvm_ffi.use_torch_stream():
            kernel(
                out=s.out,
                k_cache=s.cache,
                seq_lens=s.seq_lens,
                gather_lens=s.gather_lens,
                block_table=s.table,
                block_size=s.block_size,
                offset=0,
            )

    return run


def sweep_gather(
    rows: tuple[int, ...] | None = None, peers: bool = False, variants: bool = False, replays: int = 21
) -> list[dict[str, Any]]:
    """Records of dequantize_and_gather_k_cache per case (or per case with that many rows), peers and other
    configurations beside it."""
    candidates: dict[str, Any] = dict(_gather_variants()) if variants else {}
    for rows_of_case in (64, 16384):  # a kernel for few rows, and one for many
        for gather_len in (0, rows_of_case):
            # compiled before other projects change the DSL
            GatherSet.make(GatherCase("", 1, rows_of_case, 64, gather_len), 0).ours()
    if peers:
        candidates["vllm-triton"] = load_peer("vllm-triton", _vllm_gather_triton)
        candidates["vllm-cutedsl"] = load_peer("vllm-cutedsl", _vllm_gather_cutedsl)
    records = []
    for case in (*GATHER_CASES, *BETWEEN_CASES):
        if rows is not None and case.rows not in rows:
            continue
        first = GatherSet.make(case, 0)
        cost = OPS["dequantize_and_gather_k_cache"].cost
        assert cost is not None
        work = cost(*first.arguments())
        sets = [first, *(GatherSet.make(case, seed) for seed in range(1, number_of_sets(work.bytes)))]
        shape: dict[str, Any] = {
            "case": case.name,
            "T": case.rows,
            "block_size": case.block_size,
            "page_stride": first.cache.stride(0),
        }
        shape = facts_between(shape) if case in BETWEEN_CASES else shape
        records.append(compare("dequantize_and_gather_k_cache", shape, sets, work, candidates, replays))
    return records


SWEEPS = {"quantize_and_insert_k_cache": sweep_insert, "dequantize_and_gather_k_cache": sweep_gather}
QUICK = {"quantize_and_insert_k_cache": (1, 1024, 32768), "dequantize_and_gather_k_cache": (1024, 8192, 16384)}
"""Numbers of rows of a quick look."""
