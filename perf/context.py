# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of what ranks of a context group do beside their layers: keys merged, records packed and unpacked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from cute_kernels.formats import FP8_DS_MLA, INDEXER_FP8, RECORD_FORMATS, compressor_state
from cute_kernels.indexer import ops as _indexer  # noqa: F401
from cute_kernels.indexer.reference import score_keys
from cute_kernels.kv_cache import ops as _kv_cache  # noqa: F401
from cute_kernels.paging import entries_to_slots, own_entries, to_index
from perf.bench import Arguments, Bench, Case, Run
from perf.grid import draw, draw_rows, mark

PAGE_ROWS = 64
BATCHES, PARTS, PICKS = (1, 8, 64, 256), (2, 8, 64), (512, 1024)
CONTEXT = 262144
"""Entries of a request."""

FORMATS = (FP8_DS_MLA, INDEXER_FP8, compressor_state(512, 128))
RECORDS = {FP8_DS_MLA.id: (64, 8192, 65536), INDEXER_FP8.id: (64, 32768, 262144), FORMATS[2].id: (8, 128, 1024)}
"""Format -> numbers of records: few, some 4 MB, and many times as much."""

VARIANTS: tuple[dict[str, int], ...] = (
    {"warps": 8, "each": 16},
    {"warps": 16, "each": 4},
    {"warps": 16, "each": 8},
    {"warps": 16, "each": 16},
    {"warps": 32, "each": 4},
    {"warps": 32, "each": 8},
)
"""Fields of MergeKeysKey."""


def _make_keys(parts: int, rows: int, k: int, is_local: bool, seed: int) -> Arguments:
    """Keys as ranks gather them: of each rank k of its entries, in ascending order, with scores of a tail."""
    g = torch.Generator(device="cuda").manual_seed(seed)
    each = CONTEXT // parts // k
    spread = torch.randint(0, each, (parts, rows, k), device="cuda", generator=g)
    own = torch.arange(k, device="cuda") * each + spread
    pages = own // PAGE_ROWS * parts + torch.arange(parts, device="cuda")[:, None, None]
    scores = 2.5 + torch.empty(parts, rows, k, device="cuda").exponential_(4, generator=g)
    keys = score_keys(scores, pages * PAGE_ROWS + own % PAGE_ROWS)
    out = torch.empty(rows, k, dtype=torch.int32, device="cuda")
    if not is_local:
        return keys, out, None, 0, 1, 0, None, None
    width = -(-CONTEXT // PAGE_ROWS // parts)
    table = torch.randperm(rows * width, device="cuda").view(rows, width).int()
    lens = torch.empty(rows, dtype=torch.int32, device="cuda")
    return keys, None, table, PAGE_ROWS, parts, parts // 2, out, lens


def _make_picks(rows: int, k: int, seed: int) -> Arguments:
    """Of a rank of eight."""
    g = torch.Generator(device="cuda").manual_seed(seed)
    scores = torch.randn(rows, CONTEXT // 8, device="cuda", generator=g)
    picks = torch.randint(0, CONTEXT // 8, (rows, k), device="cuda", generator=g).sort(dim=1).values.int()
    return scores, picks, PAGE_ROWS, 8, 3, torch.empty(rows, k, dtype=torch.int64, device="cuda")


def _key_case(rows: int, k: int) -> Case:
    return Case(f"{rows}x{k}", rows, partial(_make_picks, rows, k), {"k": k})


def _merge_case(rows: int, parts: int, k: int, is_local: bool = False) -> Case:
    name = f"{rows}x{parts} k={k}" + " slots" * is_local
    return Case(name, rows, partial(_make_keys, parts, rows, k, is_local), {"parts": parts, "k": k})


def _merge_cases() -> tuple[Case, ...]:
    cases = [_merge_case(rows, parts, k) for rows in BATCHES for parts in PARTS for k in PICKS]
    return (*cases, *(_merge_case(rows, 8, 512, True) for rows in BATCHES))


def _torch_merge() -> Run:
    """torch's top-k of keys, sorted, and slots by the operators of the reference."""

    def run(keys: Any, out: Any, table: Any, page_rows: int, ranks: int, rank: int, slots: Any, lens: Any) -> Any:
        rows, k = keys.shape[1:]
        best = keys.transpose(0, 1).reshape(rows, -1).topk(k, dim=1, sorted=False).values
        picks = to_index((0xFFFFFFFF - (best & 0xFFFFFFFF)).sort(dim=1).values)
        if table is None:
            return [picks]
        requests = torch.arange(rows, device=keys.device)[:, None]
        own = to_index(entries_to_slots(own_entries(picks, page_rows, ranks, rank), requests, table, page_rows))
        order = (own < 0).int().argsort(dim=1, stable=True)
        return [own.gather(1, order), (own >= 0).sum(dim=1).int()]

    return run


def _merge_variants() -> Mapping[str, Run]:
    from cute_kernels.indexer import merge_keys
    from cute_kernels.indexer.call import MergeKeysCall
    from cute_kernels.runtime.arch import arch_of

    def run(fields: dict[str, int], *args: Any) -> None:
        call = MergeKeysCall(*args)
        k = call.keys.shape[2]
        places = next(places for places in merge_keys.SORTED if k <= places)
        key = merge_keys.MergeKeysKey(arch_of(0), places, width=merge_keys.width_of(call), **fields)
        if key.places < 32 * key.warps or key.tile <= k:
            raise NotImplementedError(f"takes {key.tile} keys a round, and more than {16 * key.warps} picks")
        merge_keys.launch_with(key, call)

    return {
        "ours " + " ".join(f"{name}={value}" for name, value in fields.items()): partial(run, fields)
        for fields in VARIANTS
    }


def _make_records(op: str, kv_format: str, records: int, seed: int) -> Arguments:
    """Records in random order, of a pool a little larger than they need."""
    fmt: Any = RECORD_FORMATS[kv_format]
    g = torch.Generator(device="cuda").manual_seed(seed)
    blocks = -(-records // PAGE_ROWS) + 1
    slots = torch.randperm(blocks * PAGE_ROWS, device="cuda", generator=g)[:records].contiguous()
    rows = torch.randint(0, 256, (records, fmt.record_bytes), device="cuda", dtype=torch.uint8, generator=g)
    cache = fmt.allocate(blocks, PAGE_ROWS, "cuda")
    if op == "unpack_records":
        return rows, cache, slots, kv_format, False
    fmt.write_fields(cache, PAGE_ROWS, slots, *rows.split([width for _, width in fmt.fields(1)], dim=1))
    return cache, slots, kv_format, torch.empty_like(rows), False


def _record_case(op: str, kv_format: str, records: int) -> Case:
    make = partial(_make_records, op, kv_format, records)
    return Case(f"{kv_format} {records}", records, make, {"format": kv_format})


def _record_bench(op: str) -> Bench:
    cases = [_record_case(op, fmt.id, records) for fmt in FORMATS for records in RECORDS[fmt.id]]
    points = draw(op, len(FORMATS), rows=(100, 50_000))
    between = (_record_case(op, fmt.id, point["rows"]) for fmt, point in zip(FORMATS, points, strict=True))
    return Bench(op=op, cases=tuple(cases), quick=(64, 8192), between=mark(between))


def _between() -> tuple[Case, ...]:
    points: Sequence[Mapping[str, int]] = draw("merge_top_k_keys", 4, rows=(2, 250), parts=(2, 48))
    return mark(_merge_case(point["rows"], point["parts"], k) for point, k in zip(points, PICKS * 2, strict=True))


PEERS: Mapping[str, Callable[[], Run]] = {"torch": _torch_merge}

BENCHES = (
    Bench(
        op="merge_top_k_keys",
        cases=_merge_cases(),
        quick=(1, 64),
        between=_between(),
        peers=PEERS,
        variants=_merge_variants,
    ),
    Bench(
        op="top_k_keys",
        cases=tuple(_key_case(rows, k) for rows in BATCHES for k in PICKS),
        quick=(1, 64),
        between=mark(_key_case(rows, 512) for rows in draw_rows("top_k_keys", BATCHES, 2)),
    ),
    _record_bench("pack_records"),
    _record_bench("unpack_records"),
)
SWEEPS = {bench.op: bench.sweep for bench in BENCHES}
QUICK = {bench.op: bench.quick for bench in BENCHES}
"""Numbers of rows of a quick look."""
