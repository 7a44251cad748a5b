"""Benchmark of the indexer's scores, contiguous and paged."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch

from cute_kernels.formats import INDEX_DIM, INDEXER_FP8, round_up
from cute_kernels.indexer.ops_logits import ROW_ALIGNMENT
from cute_kernels.runtime.ops import OPS
from perf.measure import Call, compare, number_of_sets

CONTIGUOUS, PAGED = "mqa_logits", "paged_mqa_logits"
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
)
"""(requests, rows of each, keys of each)."""

MOST_SETS = 48
"""Input sets of a paged call: more of the smallest would only take time to make."""

SHARE = 2.0**-12
"""Of the sum of a score's magnitudes, that it may differ by: Hopper's tensor cores keep 14 bits of a sum."""

CHECKED_ROWS = 8
CODES_AT_ONCE = 2**27


def _generator(seed: int) -> torch.Generator:
    return torch.Generator(device="cuda").manual_seed(seed)


def _codes(g: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", generator=g).to(torch.float8_e4m3fn)


def _scores(rows: int, columns: int) -> torch.Tensor:
    """To write into, as the op allocates them."""
    return torch.empty(rows, round_up(columns, ROW_ALIGNMENT), device="cuda")[:, :columns]


def is_near(got: torch.Tensor, q: torch.Tensor, k: torch.Tensor, scale: torch.Tensor, weights: torch.Tensor) -> bool:
    """Whether the scores [keys] of one query [HEADS, 128] are near the float64 ones."""
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
        return _deepgemm().get_paged_mqa_logits_metadata(lens, BLOCK_SIZE, workers)

    def right(self, call: Call) -> bool:
        """Whether `call`, which returns its scores or None if it writes into ours, leaves them right in some rows."""
        self.args[-1].fill_(float("nan"))
        got = call()
        return self.check(self.args[-1] if got is None else got)


def prefill_name(rows: int, keys: int, clean: bool) -> str:
    return f"sq{rows} sk{keys}" + " clean" * clean


def decode_name(batch: int, next_n: int, keys: int) -> str:
    return f"b{batch} ctx{keys}" + f" next_n={next_n}" * (next_n > 1)


def prefill(rows: int, keys: int, clean: bool, seed: int) -> LogitsSet:
    """A chunk at the end of one request."""
    g = _generator(seed)
    q, k = _codes(g, rows, HEADS, INDEX_DIM), _codes(g, keys, INDEX_DIM)
    scale = torch.rand(keys, device="cuda", generator=g) + 0.5
    weights = torch.randn(rows, HEADS, device="cuda", generator=g)
    end = keys - rows // RATIO + torch.arange(rows, device="cuda") // RATIO + 1
    start, end = torch.zeros(rows, dtype=torch.int32, device="cuda"), end.clamp(max=keys).int()

    def check(got: torch.Tensor) -> bool:
        for m in torch.linspace(0, rows - 1, CHECKED_ROWS).long().tolist():
            last = int(end[m])
            if not is_near(got[m, :last], q[m], k[:last], scale[:last], weights[m]):
                return False
            if clean and not bool((got[m, last:keys] == -torch.inf).all()):
                return False
        return True

    return LogitsSet(CONTIGUOUS, (q, None, k, scale, weights, start, end, clean, 0, _scores(rows, keys)), check)


def decode(batch: int, next_n: int, keys: int, seed: int) -> LogitsSet:
    """Requests of equal lengths, pages in random order."""
    g = _generator(seed)
    width = keys // BLOCK_SIZE
    pool = INDEXER_FP8.allocate(batch * width, BLOCK_SIZE, "cuda")
    pages, codes = INDEXER_FP8.pages(pool, BLOCK_SIZE), BLOCK_SIZE * INDEX_DIM
    for part in pages.split(CODES_AT_ONCE // codes):
        part[:, :codes] = _codes(g, part.shape[0], codes).view(torch.uint8)
        part[:, codes:] = (torch.rand(part.shape[0], BLOCK_SIZE, device="cuda", generator=g) + 0.5).view(torch.uint8)
    q = _codes(g, batch, next_n, HEADS, INDEX_DIM)
    weights = torch.randn(batch * next_n, HEADS, device="cuda", generator=g)
    lens = torch.full((batch, next_n), keys, dtype=torch.int32, device="cuda")
    table = torch.randperm(batch * width, device="cuda", generator=g).view(batch, width).int()

    def check(got: torch.Tensor) -> bool:
        for row in torch.linspace(0, batch * next_n - 1, CHECKED_ROWS).long().tolist():
            own = pages[table[row // next_n].long()]
            k = own[:, :codes].contiguous().view(torch.float8_e4m3fn).view(-1, INDEX_DIM)
            scale = own[:, codes:].contiguous().view(torch.float32).view(-1)
            if not is_near(got[row, :keys], q[row // next_n, row % next_n], k, scale, weights[row]):
                return False
        return True

    out = _scores(batch * next_n, keys)
    args = (q, None, pool, weights, lens, table, keys, False, INDEXER_FP8.id, out)
    return LogitsSet(PAGED, args, check)


def _deepgemm() -> Any:
    """DeepGEMM's ops, as vLLM registers them."""
    if not hasattr(torch.ops.deep_gemm, "fp8_fp4_mqa_logits"):
        try:
            importlib.import_module("vllm.third_party.deep_gemm")
        except ImportError:
            load = importlib.import_module("vllm._load")
            load.load("deep_gemm/_C_extension.abi3.so")
            torch.ops.deep_gemm.init(os.path.join(load.LIB, "deep_gemm"), "deep_gemm")
    return torch.ops.deep_gemm


def _peer(op: str) -> Callable[[LogitsSet], Any] | str:
    """DeepGEMM's kernel, or the reason why there is none. Its schedule is made beforehand and not timed."""
    try:
        ops = _deepgemm()
        contiguous, paged = ops.fp8_fp4_mqa_logits, ops.fp8_fp4_paged_mqa_logits
    except Exception as error:  # an installation that is not whole fails in many ways
        return f"{type(error).__name__}: {error}"
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

    return run_paged


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
    chosen = [shape for shape in PREFILLS if rows is None or shape[0] in rows]
    prefill(4, 64, True, 0).ours()  # compiled before other projects change the DSL
    candidates = {"deepgemm": _peer(CONTIGUOUS)} if peers else {}
    found = []
    for m, n, clean in chosen:
        shape = {"case": prefill_name(m, n, clean), "T": m, "keys": n, "heads": HEADS}
        found.append(_records(CONTIGUOUS, shape, partial(prefill, m, n, clean), candidates, replays))
    return found


def sweep_paged(
    rows: tuple[int, ...] | None = None, peers: bool = False, variants: bool = False, replays: int = 21
) -> list[dict[str, Any]]:
    """Records of paged_mqa_logits per number of requests, rows of each and keys of each."""
    chosen = [shape for shape in DECODES if rows is None or shape[0] in rows]
    for next_n in {next_n for _, next_n, _ in chosen}:
        decode(1, next_n, BLOCK_SIZE, 0).ours()
    candidates = {"deepgemm": _peer(PAGED)} if peers else {}
    found = []
    for batch, next_n, keys in chosen:
        shape = {"case": decode_name(batch, next_n, keys), "T": batch, "next_n": next_n, "keys": keys, "heads": HEADS}
        found.append(_records(PAGED, shape, partial(decode, batch, next_n, keys), candidates, replays))
    return found


SWEEPS = {CONTIGUOUS: sweep_prefill, PAGED: sweep_paged}
QUICK = {CONTIGUOUS: (1024,), PAGED: (1, 64)}
"""Numbers of rows, or of requests, of a quick look."""
