# SPDX-License-Identifier: Apache-2.0
"""Benchmark of the indexer's scores, contiguous and paged."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from operator import itemgetter
from typing import Any

import torch

from cute_kernels import numerics
from cute_kernels.formats import INDEX_DIM, INDEXER_FP8, INDEXER_MXFP4, round_up
from cute_kernels.indexer.chunks import ROW_ALIGNMENT
from cute_kernels.runtime.ops import OPS
from perf.grid import LENGTHS, draw, facts_between, lengths, of_rows
from perf.measure import Call, compare, number_of_sets
from perf.peers import deepgemm, load_peer

CONTIGUOUS, PAGED = "mqa_logits", "paged_mqa_logits"
OUT = 9
"""Position of the scores in both schemas."""

HEADS = 64
BLOCK_SIZE = 64
RATIO = 4
"""Source tokens per key: the last row of a prefill sees all keys, the row that many before it one key less."""

PREFILLS = (
    (4096, 4096, False),
    (4096, 16384, False),
    (4096, 65536, False),
    (1024, 32768, False),
    (4096, 16384, True),
)
"""(rows, keys, whether columns outside the rows' ranges are made -inf)."""

DECODES = (
    *((batch, 1, keys) for keys in (8192, 32768) for batch in (1, 8, 32, 64, 128, 256)),
    *((batch, next_n, 8192) for next_n in (2, 4) for batch in (1, 64)),
    (48, 2, 70000),
    (100, 2, 70000),
)
"""(requests, rows of each, keys of each)."""

UNEQUAL_BATCHES, UNEQUAL_KEYS = (16, 48, 192), 32768
"""Requests of unequal lengths, and the most keys of one."""

BETWEEN_PREFILLS = tuple(
    (point["rows"], point["keys"], False) for point in draw(CONTIGUOUS, 4, rows=(300, 4000), keys=(3000, 80_000))
)
BETWEEN_DECODES = tuple(
    (point["batch"], point["next_n"], point["keys"])
    for point in draw(PAGED, 8, batch=(2, 200), next_n=(1, 4), keys=(2000, 80_000))
)
"""Between the tuned ones."""

MXFP4_PREFILLS = ((4096, 4096, False), (4096, 16384, False), (4096, 65536, False))
MXFP4_DECODES = ((1, 1, 32768), (64, 1, 8192), (64, 1, 32768), (256, 1, 32768), (64, 2, 8192), (64, 4, 8192))
"""The same of MXFP4 queries and keys."""

MOST_SETS = 48
"""Input sets of a paged call: more of the smallest would only take time to make."""

SHARE = 2.0**-12
"""Of the sum of a score's magnitudes, that it may differ by: Hopper's tensor cores keep 14 bits of a sum."""

CHECKED_ROWS = 8
CODES_AT_ONCE = 2**27


def _generator(seed: int) -> torch.Generator:
    return torch.Generator(device="cuda").manual_seed(seed)


def _codes(g: torch.Generator, mxfp4: bool, *lead: int) -> torch.Tensor:
    """Of queries or keys."""
    if mxfp4:
        return torch.randint(0, 256, (*lead, INDEX_DIM // 2), device="cuda", generator=g, dtype=torch.uint8)
    return torch.randn(*lead, INDEX_DIM, device="cuda", generator=g).to(torch.float8_e4m3fn)


def _scales(g: torch.Generator, mxfp4: bool, *lead: int) -> torch.Tensor:
    """Of keys or, of MXFP4, queries."""
    if mxfp4:
        return torch.randint(118, 128, (*lead, 4), device="cuda", generator=g, dtype=torch.uint8).view(torch.int32)[
            ..., 0
        ]
    return torch.rand(lead, device="cuda", generator=g) + 0.5


def _scores(rows: int, columns: int) -> torch.Tensor:
    """To write into, as the op allocates them."""
    return torch.empty(rows, round_up(columns, ROW_ALIGNMENT), device="cuda")[:, :columns]


def is_near(
    got: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    scale: torch.Tensor,
    weights: torch.Tensor,
    q_scale: torch.Tensor | None = None,
) -> bool:
    """Whether the scores [keys] of one query [HEADS, 128] are near the float64 ones. With q_scale [HEADS], they are of
    MXFP4 codes [.., 64] and words of scales."""
    if q_scale is not None:
        q, k = (
            numerics.dequantize_e2m1(codes, words[..., None].contiguous().view(torch.uint8))
            for codes, words in ((q, q_scale), (k, scale))
        )
        scale = torch.ones_like(got)
    q, k, weights, scale = (t.double() for t in (q, k, weights, scale))
    exact = ((q @ k.T).relu() * weights[:, None]).sum(0) * scale
    magnitude = ((q.abs() @ k.abs().T) * weights.abs()[:, None]).sum(0) * scale.abs()
    return bool(((got.double() - exact).abs() <= SHARE * magnitude).all())


@dataclass(frozen=True)
class LogitsSet:
    """Arguments of one call in the schema's order, and how to check its scores."""

    op: str
    args: tuple[Any, ...]
    check: Callable[[torch.Tensor], bool]

    def arguments(self) -> tuple[Any, ...]:
        return self.args

    def ours(self) -> None:
        OPS[self.op].overload(*self.args)

    @cached_property
    def schedule(self) -> torch.Tensor:
        """DeepGEMM's, of a paged call. Kept with the set: another set may come to have its id, and with a schedule of
        more requests than there are DeepGEMM reads beyond the lengths."""
        lens = self.args[4]
        processors = torch.cuda.get_device_properties(0).multi_processor_count
        # four rows of a request are scored by pairs of multiprocessors
        workers = processors // 2 if lens.shape[1] == 4 else processors
        return deepgemm().get_paged_mqa_logits_metadata(lens, BLOCK_SIZE, workers)

    @cached_property
    def flattened(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Lengths, pages and DeepGEMM's schedule of a paged call whose rows are requests of their own."""
        lens, table = self.args[4:6]
        rows = lens.reshape(-1, 1)
        processors = torch.cuda.get_device_properties(0).multi_processor_count
        schedule = deepgemm().get_paged_mqa_logits_metadata(rows, BLOCK_SIZE, processors)
        return rows, table.repeat_interleave(lens.shape[1], dim=0), schedule

    def right(self, call: Call) -> bool:
        """Whether `call`, which returns its scores or None if it writes into ours, leaves them right in some rows."""
        out = self.args[OUT]
        out.fill_(float("nan"))
        got = call()
        return self.check(out if got is None else got)


def prefill_name(rows: int, keys: int, clean: bool, mxfp4: bool = False) -> str:
    return f"sq{rows} sk{keys}" + " clean" * clean + " mxfp4" * mxfp4


def decode_name(batch: int, next_n: int, keys: int, mxfp4: bool = False) -> str:
    return f"b{batch} ctx{keys}" + f" next_n={next_n}" * (next_n > 1) + " mxfp4" * mxfp4


def prefill(rows: int, keys: int, clean: bool, mxfp4: bool, seed: int) -> LogitsSet:
    """A chunk at the end of one request."""
    g = _generator(seed)
    q, k, scale = _codes(g, mxfp4, rows, HEADS), _codes(g, mxfp4, keys), _scales(g, mxfp4, keys)
    q_scale = _scales(g, True, rows, HEADS) if mxfp4 else None
    weights = torch.randn(rows, HEADS, device="cuda", generator=g)
    end = keys - rows // RATIO + torch.arange(rows, device="cuda") // RATIO + 1
    start, end = torch.zeros(rows, dtype=torch.int32, device="cuda"), end.clamp(max=keys).int()

    def check(got: torch.Tensor) -> bool:
        for m in torch.linspace(0, rows - 1, CHECKED_ROWS).long().tolist():
            last = int(end[m])
            own_scale = None if q_scale is None else q_scale[m]
            if not is_near(got[m, :last], q[m], k[:last], scale[:last], weights[m], own_scale):
                return False
            if clean and not bool((got[m, last:keys] == -torch.inf).all()):
                return False
        return True

    return LogitsSet(CONTIGUOUS, (q, q_scale, k, scale, weights, start, end, clean, 0, _scores(rows, keys)), check)


def decode(batch: int, next_n: int, keys: int, mxfp4: bool, seed: int, kind: str = "") -> LogitsSet:
    """Requests of equal lengths, or of lengths of a kind (perf.grid.lengths), pages in random order."""
    g = _generator(seed)
    width, fmt = -(-keys // BLOCK_SIZE), INDEXER_MXFP4 if mxfp4 else INDEXER_FP8
    pool = fmt.allocate(batch * width, BLOCK_SIZE, "cuda")
    pages, codes = fmt.pages(pool, BLOCK_SIZE), fmt.fields(BLOCK_SIZE)[1][0]
    for part in pages.split(CODES_AT_ONCE // codes):
        part[:, :codes] = _codes(g, mxfp4, part.shape[0], BLOCK_SIZE).view(torch.uint8).flatten(1)
        part[:, codes:] = _scales(g, mxfp4, part.shape[0], BLOCK_SIZE).view(torch.uint8)
    q = _codes(g, mxfp4, batch, next_n, HEADS)
    q_scale = _scales(g, True, batch, next_n, HEADS) if mxfp4 else None
    weights = torch.randn(batch * next_n, HEADS, device="cuda", generator=g)
    seen = lengths(kind, batch, keys)
    lens = torch.tensor(seen, dtype=torch.int32, device="cuda")[:, None].repeat(1, next_n)
    table = torch.randperm(batch * width, device="cuda", generator=g).view(batch, width).int()

    def check(got: torch.Tensor) -> bool:
        for row in torch.linspace(0, batch * next_n - 1, CHECKED_ROWS).long().tolist():
            request, number = divmod(row, next_n)
            own = pages[table[request].long()]
            last = seen[request]
            k = own[:, :codes].contiguous().view(q.dtype).view(width * BLOCK_SIZE, -1)[:last]
            scale = own[:, codes:].contiguous().view(torch.int32 if mxfp4 else torch.float32).view(-1)[:last]
            own_scale = None if q_scale is None else q_scale[request, number]
            if not is_near(got[row, :last], q[request, number], k, scale, weights[row], own_scale):
                return False
        return True

    out = _scores(batch * next_n, keys)
    args = (q, q_scale, pool, weights, lens, table, keys, False, fmt.id, out, False)
    return LogitsSet(PAGED, args, check)


def _peer(op: str, is_flattened: bool = False) -> Callable[[LogitsSet], Any]:
    """DeepGEMM's kernel. Its schedule is made beforehand and not timed. is_flattened: every row as a request."""
    ops = deepgemm()
    contiguous, paged = ops.fp8_fp4_mqa_logits, ops.fp8_fp4_paged_mqa_logits
    if op == CONTIGUOUS:

        def run(s: LogitsSet) -> Any:
            q, scale_q, k, scale, weights, start, end, clean, _, _ = s.args
            if clean:
                raise NotImplementedError("leaves columns outside of the ranges undefined")
            return contiguous(q, scale_q, k, scale, weights, start, end, k.shape[0])

        return run

    def run_paged(s: LogitsSet) -> Any:
        q, scale_q, pool, weights, lens, table, columns = s.args[:7]
        return paged(q, scale_q, pool[:, :, None], weights, lens, table, s.schedule, columns)

    def run_flattened(s: LogitsSet) -> Any:
        q, scale_q, pool, weights, _, _, columns = s.args[:7]
        lens, table, schedule = s.flattened
        return paged(q.flatten(0, 1)[:, None], scale_q, pool[:, :, None], weights, lens, table, schedule, columns)

    return run_flattened if is_flattened else run_paged


def _portable(s: LogitsSet) -> None:
    """The call by the portable kernel."""
    select: Any = importlib.import_module("cute_kernels.indexer.select")
    hopper = select.HOPPER
    select.HOPPER = ""
    try:
        s.ours()
    finally:
        select.HOPPER = hopper


def _dependent(s: LogitsSet) -> None:
    """The call, launched as a dependent of the kernel before."""
    OPS[PAGED].overload(*s.args[:-1], True)


def _candidates(op: str, mxfp4: bool, peers: bool, variants: bool, next_n: int = 1) -> dict[str, Any]:
    found: dict[str, Any] = {"ours portable": _portable} if variants else {}
    if variants and op == PAGED:
        found["ours dependent"] = _dependent
    if peers and next_n > 1 and not mxfp4:
        found["deepgemm-flattened"] = load_peer("deepgemm", partial(_peer, op, True))
    if peers:
        found["deepgemm"] = "has no MXFP4 scores on Hopper" if mxfp4 else load_peer("deepgemm", partial(_peer, op))
    return found


def _records(
    op: str, shape: dict[str, Any], make: Callable[[int], LogitsSet], candidates: dict[str, Any], replays: int
) -> dict[str, Any]:
    first = make(0)
    cost = OPS[op].cost
    assert cost is not None
    work = cost(*first.args)
    count = min(MOST_SETS, number_of_sets(work.bytes))
    sets = [first, *(make(seed) for seed in range(1, count))]
    return compare(op, shape, sets, work, candidates, replays, products="e4m3")


def sweep_prefill(
    rows: tuple[int, ...] | None = None, peers: bool = False, variants: bool = False, replays: int = 21
) -> list[dict[str, Any]]:
    """Records of mqa_logits per number of rows and keys."""
    of_fp8 = *PREFILLS, *BETWEEN_PREFILLS
    chosen = [(*shape, mxfp4) for mxfp4, shapes in ((False, of_fp8), (True, MXFP4_PREFILLS)) for shape in shapes]
    chosen = of_rows(chosen, rows, itemgetter(0))
    for mxfp4 in (False, True):
        prefill(4, 64, True, mxfp4, 0).ours()  # compiled before other projects change the DSL
    found = []
    for m, n, clean, mxfp4 in chosen:
        shape = {"case": prefill_name(m, n, clean, mxfp4), "T": m, "keys": n, "heads": HEADS}
        shape = facts_between(shape) if (m, n, clean) in BETWEEN_PREFILLS else shape
        candidates = _candidates(CONTIGUOUS, mxfp4, peers, variants)
        found.append(_records(CONTIGUOUS, shape, partial(prefill, m, n, clean, mxfp4), candidates, replays))
    return found


def sweep_paged(
    rows: tuple[int, ...] | None = None, peers: bool = False, variants: bool = False, replays: int = 21
) -> list[dict[str, Any]]:
    """Records of paged_mqa_logits per number of requests, rows of each and keys of each."""
    chosen = [(*shape, False, "") for shape in (*DECODES, *BETWEEN_DECODES)]
    chosen += [(*shape, True, "") for shape in MXFP4_DECODES]
    chosen += [(batch, 1, UNEQUAL_KEYS, False, kind) for kind in LENGTHS for batch in UNEQUAL_BATCHES]
    chosen = of_rows(chosen, rows, itemgetter(0))
    for next_n, mxfp4 in {(next_n, mxfp4) for _, next_n, _, mxfp4, _ in chosen}:
        decode(1, next_n, BLOCK_SIZE, mxfp4, 0).ours()
    found = []
    for batch, next_n, keys, mxfp4, kind in chosen:
        case = decode_name(batch, next_n, keys, mxfp4) + f" {kind}" * bool(kind)
        shape = {"case": case, "T": batch, "next_n": next_n, "keys": keys, "heads": HEADS}
        shape |= {"group": kind} if kind else {}
        shape = facts_between(shape) if (batch, next_n, keys) in BETWEEN_DECODES else shape
        candidates = _candidates(PAGED, mxfp4, peers, variants, next_n)
        make = partial(decode, batch, next_n, keys, mxfp4, kind=kind)
        found.append(_records(PAGED, shape, make, candidates, replays))
    return found


SWEEPS = {CONTIGUOUS: sweep_prefill, PAGED: sweep_paged}
QUICK = {CONTIGUOUS: (1024,), PAGED: (1, 64)}
"""Numbers of rows, or of requests, of a quick look."""
