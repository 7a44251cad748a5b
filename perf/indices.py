# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of the index builders."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from cute_kernels.compressor.call import SlotsCall
from cute_kernels.indices.call import C128aCall, CombineCall, MixedCall, TranslateCall, WindowCall
from cute_kernels.indices.ops import StepLayout
from perf.bench import Arguments, Bench, Case, Run
from perf.grid import draw_rows, mark

ROWS = (1, 64, 1024, 8192)
BETWEEN_ROWS = draw_rows("indices", ROWS[1:], 3, 64)
STEP_ROWS = (1, 64, 256)
PICKS = (512, 1024)
WINDOW, RATIO, BLOCK_SIZE = 128, 4, 64
PAGES = 256
"""Compressed pages of a request: 16384 entries, 65536 tokens."""


class Step:
    """Requests of one step, all of the same lengths: of 64 rows each, or four where there are 4096 rows and more."""

    def __init__(self, rows: int, seed: int) -> None:
        self.g = torch.Generator(device="cuda").manual_seed(seed)
        self.rows = rows
        self.requests = max(1, rows // 64) if rows < 4096 else 4
        self.each = rows // self.requests
        self.starts = torch.arange(self.requests + 1, device="cuda", dtype=torch.int32) * self.each
        self.seq_lens = self.numbers(PAGES * BLOCK_SIZE * RATIO)
        self.owners = torch.arange(self.requests, device="cuda", dtype=torch.int32).repeat_interleave(self.each)
        self.valid = torch.ones(rows, dtype=torch.bool, device="cuda")

    def numbers(self, value: int) -> torch.Tensor:
        """int32 [requests], all the same."""
        return torch.full((self.requests,), value, dtype=torch.int32, device="cuda")

    @property
    def positions(self) -> torch.Tensor:
        """int64 [rows]."""
        last = PAGES * BLOCK_SIZE * RATIO - self.each
        return last + torch.arange(self.rows, device="cuda") % self.each

    def table(self, pages: int = PAGES) -> torch.Tensor:
        """A block table whose pages lie in random order."""
        order = torch.randperm(self.requests * pages, device="cuda", generator=self.g)
        return order.view(self.requests, pages).int()

    def picks(self, columns: int) -> torch.Tensor:
        """Distinct entries that each row sees, in random order."""
        entries = PAGES * BLOCK_SIZE - -(-self.each // RATIO)
        # distinct: entry i of a permutation that every row starts elsewhere in
        order = torch.randperm(entries, device="cuda", generator=self.g)
        start = torch.randint(0, entries, (self.rows, 1), device="cuda", generator=self.g)
        return order[(start + torch.arange(columns, device="cuda")) % entries].int()

    def output(self, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device="cuda")


def translate(rows: int, columns: int, seed: int) -> Arguments:
    s = Step(rows, seed)
    outputs = s.output(rows, columns), s.output(rows)
    return s.picks(columns), s.owners, s.table(), BLOCK_SIZE, s.valid, *outputs


def combine(rows: int, columns: int, seed: int) -> Arguments:
    s = Step(rows, seed)
    entries = PAGES * BLOCK_SIZE
    numbers = WINDOW, RATIO, columns, entries + s.each + WINDOW, entries
    outputs = s.output(rows, columns + WINDOW), s.output(rows)
    return s.picks(columns), s.starts, s.seq_lens, s.numbers(s.each + WINDOW - 1), *numbers, *outputs


def mixed(rows: int, columns: int, decode: bool, seed: int) -> Arguments:
    s = Step(rows, seed)
    window = torch.randint(0, 10**6, (rows if decode else 0, WINDOW), device="cuda", generator=s.g).int()
    picks = s.picks(columns)
    nothing = picks[:0]
    return (
        *(window, picks if decode else nothing, None, nothing if decode else picks, s.starts, s.seq_lens, s.owners),
        *(s.table(PAGES * RATIO), BLOCK_SIZE, s.table(), BLOCK_SIZE, WINDOW, RATIO, columns, True),
        *(s.valid[: len(window)], s.output(rows, WINDOW + columns), s.output(rows)),
    )


def window(rows: int, seed: int) -> Arguments:
    s = Step(rows, seed)
    outputs = s.output(rows, 1, WINDOW), s.output(rows)
    return s.positions, s.owners, s.valid, s.table(PAGES * RATIO), BLOCK_SIZE, WINDOW, *outputs


def slots(rows: int, seed: int) -> Arguments:
    s = Step(rows, seed)
    own = torch.arange(rows, device="cuda")
    out = s.output(rows, dtype=torch.int64)
    return out, s.starts, s.seq_lens, s.table(), own, rows, BLOCK_SIZE * RATIO, RATIO


def step(requests: int, rows: int, seed: int) -> Arguments:
    """All three kinds of a step of requests with `rows` rows each: one row are decodes, more are prefills."""
    g = torch.Generator(device="cuda").manual_seed(seed)
    length, tokens, columns = PAGES * BLOCK_SIZE * RATIO, requests * rows, PAGES * BLOCK_SIZE * RATIO // 128
    decodes, decode_rows = (requests, tokens) if rows == 1 else (0, 0)
    numbers = [*range(0, tokens + 1, rows), *[length] * requests]

    def table(page: int) -> torch.Tensor:
        order = torch.randperm(requests * (length // page), device="cuda", generator=g)
        return order.view(requests, -1).int()

    tables = [table(page) for page in (64, 64, 256, 4, 64, 256, 8)]
    buffer = torch.empty(StepLayout(tokens, WINDOW, 3).nbytes, dtype=torch.uint8, device="cuda")
    lists = [torch.empty(n, columns, dtype=torch.int32, device="cuda") for n in (decode_rows, tokens - decode_rows)]
    upload = torch.tensor(numbers, dtype=torch.int32, device="cuda")
    sizes = requests, tokens, decodes, decode_rows, tokens, WINDOW, PICKS[0], columns, 64, 256, 4, 8
    keys = torch.arange(requests + 1, dtype=torch.int32, device="cuda") * (length // 4) if rows > 1 else None
    return upload, None, None, *tables, keys, buffer, *lists, *sizes, False


def c128a(rows: int, decode: bool, seed: int) -> Arguments:
    s = Step(rows, seed)
    columns = PAGES * BLOCK_SIZE * RATIO // 128
    decodes = rows if decode else 0
    buffers = s.output(decodes, columns), s.output(decodes), s.output(rows - decodes, columns)
    own = torch.arange(rows, device="cuda")
    return s.positions, 128, decodes, s.owners, s.table(PAGES), 2, own, *buffers, columns


# ---- peers -----------------------------------------------------------------------------------------------------------


def _vllm() -> Any:
    from vllm.models.deepseek_v4.common.ops import cache_utils

    return cache_utils


def vllm_translate() -> Run:
    kernel = _vllm().compute_global_topk_indices_and_lens
    return lambda *a: kernel(*a[:5])


def vllm_combine() -> Run:
    kernel = _vllm().combine_topk_swa_indices

    def run(*a: Any) -> None:
        kernel(*a[:9], out=(a[9], a[10]))

    return run


def vllm_mixed() -> Run:
    kernel = _vllm().build_flashinfer_mixed_sparse_indices
    return lambda *a: kernel(*a[:14], decode_compressed_indices_are_local=a[14], decode_is_valid_token=a[15])


# ---- other configurations --------------------------------------------------------------------------------------------


def _variants(call_type: type[Any], module: str, *choices: Mapping[str, Any]) -> Callable[[], Mapping[str, Run]]:
    """Runs of an op whose kernel has other fields than the ones in use."""

    def load() -> Mapping[str, Run]:
        import importlib
        from dataclasses import replace

        from cute_kernels.runtime.compile import launch

        kernel: Any = importlib.import_module(module)

        def run(fields: Mapping[str, Any], *args: Any) -> None:
            original = kernel.launch_key
            kernel.launch_key = lambda key, *rest: launch(replace(key, **fields), *rest)
            try:
                kernel.launch(call_type(*args))
            finally:
                kernel.launch_key = original

        def name(fields: Mapping[str, Any]) -> str:
            return "ours " + " ".join(f"{field}={value}" for field, value in fields.items())

        return {name(fields): partial(run, fields) for fields in choices}

    return load


def _sizes(make: Callable[..., Arguments], rows: Sequence[int]) -> tuple[Case, ...]:
    return tuple(Case(f"topk{k} T={t}", t, partial(make, t, k)) for k in PICKS for t in rows)


def _mixed_cases(rows: Sequence[int], prefill_rows: Sequence[int]) -> tuple[Case, ...]:
    return (
        *(Case(f"decode topk{k} T={t}", t, partial(mixed, t, k, True)) for k in PICKS for t in rows),
        *(Case(f"prefill topk512 T={t}", t, partial(mixed, t, 512, False)) for t in prefill_rows),
    )


def _c128a_cases(rows: Sequence[int], prefill_rows: Sequence[int]) -> tuple[Case, ...]:
    return (
        *(Case(f"decode T={t}", t, partial(c128a, t, True)) for t in rows),
        *(Case(f"prefill T={t}", t, partial(c128a, t, False)) for t in prefill_rows),
    )


def _plain_cases(make: Callable[..., Arguments], rows: Sequence[int], prefix: str = "") -> tuple[Case, ...]:
    return tuple(Case(f"{prefix}T={t}", t, partial(make, t)) for t in rows)


def _step_of_decodes(requests: int, seed: int) -> Arguments:
    return step(requests, 1, seed)


BENCHES = (
    Bench(
        "compute_global_topk_indices_and_lens",
        _sizes(translate, ROWS),
        quick=(1, 1024),
        between=mark(_sizes(translate, BETWEEN_ROWS)),
        peers={"vllm-triton": vllm_translate},
        variants=_variants(
            TranslateCall,
            "cute_kernels.indices.translate",
            {"warps": 1, "groups": 4},
            {"warps": 2, "groups": 2},
            {"warps": 4, "groups": 1},
            {"warps": 4, "groups": 2},
            {"warps": 8, "groups": 1},
        ),
    ),
    Bench(
        "combine_topk_swa_indices",
        _sizes(combine, ROWS),
        quick=(1, 1024),
        between=mark(_sizes(combine, BETWEEN_ROWS)),
        peers={"vllm-triton": vllm_combine},
        variants=_variants(
            CombineCall,
            "cute_kernels.indices.combine",
            {"groups": 2},
            {"groups": 9},
            {"warps": 2},
            {"warps": 8},
        ),
    ),
    Bench(
        "build_flashinfer_mixed_sparse_indices",
        _mixed_cases(ROWS, (1024, 8192)),
        quick=(1, 1024),
        between=mark(_mixed_cases(BETWEEN_ROWS, BETWEEN_ROWS[-1:])),
        peers={"vllm-triton": vllm_mixed},
        variants=_variants(
            MixedCall,
            "cute_kernels.indices.mixed",
            {"warps": 1, "groups": 4},
            {"warps": 2, "groups": 2},
            {"warps": 4, "groups": 1},
            {"warps": 4, "groups": 2},
            {"warps": 8, "groups": 1},
        ),
    ),
    Bench(
        "compute_decode_swa_indices",
        _plain_cases(window, ROWS),
        quick=(1, 1024),
        between=mark(_plain_cases(window, BETWEEN_ROWS)),
        variants=_variants(WindowCall, "cute_kernels.indices.window", {"warps": 1}, {"warps": 2}, {"warps": 8}),
    ),
    Bench(
        "build_c128a_topk_metadata",
        _c128a_cases(ROWS, (1024, 8192)),
        quick=(1, 1024),
        between=mark(_c128a_cases(BETWEEN_ROWS, BETWEEN_ROWS[-1:])),
        variants=_variants(
            C128aCall, "cute_kernels.indices.c128a", {"groups": 1}, {"groups": 2}, {"warps": 2}, {"warps": 8}
        ),
    ),
    Bench(
        "build_step_metadata",
        (
            *_plain_cases(_step_of_decodes, STEP_ROWS, "decode "),
            Case("prefill T=4096", 4096, partial(step, 1, 4096)),
        ),
        quick=(1, 256),
        between=mark(_plain_cases(_step_of_decodes, draw_rows("build_step_metadata", STEP_ROWS, 2), "decode ")),
    ),
    Bench(
        "get_compressed_slot_mapping",
        _plain_cases(slots, ROWS),
        quick=(1, 1024),
        between=mark(_plain_cases(slots, BETWEEN_ROWS)),
        variants=_variants(SlotsCall, "cute_kernels.compressor.slots", {"warps": 2}, {"warps": 4}),
    ),
)
SWEEPS = {bench.op: bench.sweep for bench in BENCHES}
QUICK = {bench.op: bench.quick for bench in BENCHES}
