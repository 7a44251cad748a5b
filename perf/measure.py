# SPDX-License-Identifier: Apache-2.0
"""How a GPU time and a host time are taken, and what is written down about the machine they were taken on.

A candidate is a list of calls, one per input set. A CUDA graph replays them all; the time of a call is the replay's
time over the number of calls. Either the sets together touch more than three times the L2 cache and the graph goes
round them as often as fits, or there are as many as are reasonable and each is called once: then reading a large buffer
before every replay leaves nothing of them in the cache. So every call finds its inputs in memory and not in L2.
What calls return is kept until the graph is complete, so a candidate that allocates its results does not write into
memory that its last call has left in L2, as one that is given different outputs for each set does not either.
Candidates take turns, replay by replay, so that a drift of the clock hits them alike.

Every candidate is timed twice: its calls back to back, and apart, each behind a short kernel that depends on nothing.
A call that is launched as a dependent of the one before begins while that one ends: back to back it hides its own
start behind itself, which no engine lets it do, where another op runs in between. Apart, it cannot: the short kernel
ends before anything behind it begins. What a graph of short kernels alone takes is subtracted.

The host's cost of a call is what a CPU timer says over many eager calls of the public function in a row, divided by
their number; nothing waits for the GPU in between, and too few calls are queued for the launch queue to fill.
"""

from __future__ import annotations

import datetime
import gc
import importlib.metadata
import math
import os
import platform
import re
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from cute_kernels.runtime.record import Cost, record_calls
from cute_kernels.runtime.streams import make_stream
from perf.conditions import first_gpu
from perf.peers import versions
from perf.public import bind

OURS = "cute_kernels"
VARIANT = "ours "
"""What the names of this project's other configurations begin with."""

L2_BYTES = 60e6
COLD_BYTES = 3 * L2_BYTES
MOST_SETS = 256
LEAST_REPLAYS = 15

WAIT_CYCLES = 3000
"""Of a GPU that waits for the host, for a microsecond that the host took the last time: half as long again at 2 GHz."""

HOST_CALLS = 200
"""Calls per host timing: below the 1024 launches that may wait for a GPU."""

HOST_BATCHES = 9
HOST_MOST_US = 50.0
"""Calls that take the GPU longer than this are not timed on the host: its cost shows at smaller shapes already."""

Call = Callable[[], Any]


@dataclass(frozen=True)
class Timing:
    """Microseconds per call over the replays of one candidate."""

    median: float
    p10: float
    p90: float
    least: float
    most: float
    replays: int
    sets: int
    calls_per_replay: int


def cold_bytes() -> float:
    """Bytes that push everything else out of L2: three times that of the GPU at hand, and of an H200 at least."""
    if not torch.cuda.is_available():
        return COLD_BYTES
    return max(COLD_BYTES, 3.0 * torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size)


def number_of_sets(bytes_per_set: float) -> int:
    """Input sets to rotate over: enough to pass `cold_bytes()`, at least 2, at most MOST_SETS."""
    return int(min(MOST_SETS, max(2, math.ceil(cold_bytes() / max(bytes_per_set, 1.0)))))


def require_kernel(call: Call) -> None:
    """Run `call` once. RuntimeError unless every op in it ran as a kernel: a reference must never be timed as one."""
    with record_calls() as recording:
        call()
    if not recording.calls:
        raise RuntimeError("require_kernel: the call ran no op of this project")
    for done in recording.calls:
        if done.implementation != "kernel":
            raise RuntimeError(f"require_kernel: {done.op} ran its {done.implementation} implementation, not a kernel")


def peak(call: Call) -> int:
    """Bytes that a call has allocated at most, its result included."""
    call()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = call()
    torch.cuda.synchronize()
    del result
    return torch.cuda.max_memory_allocated() - before


def time_graphs(
    candidates: Mapping[str, Sequence[Call]],
    bytes_per_set: float,
    replays: int = 21,
    target_us: float = 1500.0,
    failures: dict[str, str] | None = None,
    flops_per_set: float = 0.0,
    queued: bool = False,
) -> dict[str, Timing]:
    """Times of all candidates, measured in turns. Each is a list of calls, one per input set.

    target_us   of a replay, if calls were as fast as memory and tensor cores
    failures    takes name -> reason for each candidate that cannot be captured in a graph; without it that raises
    queued      the GPU waits ahead of a replay until the host has launched the whole graph: else calls of many short
                kernels are charged with some of that, which grows with their number
    """
    scrub = torch.ones(int(cold_bytes()) // 4 + 1, dtype=torch.float32, device="cuda")
    graphs: dict[str, tuple[torch.cuda.CUDAGraph, int]] = {}
    for name, calls in candidates.items():
        try:
            graphs[name] = capture(calls, bytes_per_set, flops_per_set, target_us)
        except Exception as error:  # noqa: PERF203 one candidate's failure must not end the others
            if failures is None:
                raise
            failures[name] = f"{type(error).__name__}: {error}"
    times: dict[str, list[float]] = {name: [] for name in graphs}
    host_us = dict.fromkeys(graphs, 0.0)
    for _ in range(replays + 1):
        for name, (graph, count) in graphs.items():
            scrub.sum()
            if queued:
                torch.cuda._sleep(round(host_us[name] * WAIT_CYCLES))
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            begin = time.perf_counter()
            graph.replay()
            host_us[name] = (time.perf_counter() - begin) * 1e6
            stop.record()
            stop.synchronize()
            times[name].append(start.elapsed_time(stop) * 1e3 / count)
    return {name: _timing(t[1:], len(candidates[name]), graphs[name][1]) for name, t in times.items()}


BETWEEN = "between"


def time_apart(
    candidates: Mapping[str, Sequence[Call]],
    bytes_per_set: float,
    replays: int = 21,
    target_us: float = 1500.0,
    flops_per_set: float = 0.0,
    queued: bool = False,
) -> tuple[dict[str, float], float]:
    """(microseconds per call of all candidates with a short kernel ahead of each call, that kernel's own subtracted).
    target_us, queued: as of `time_graphs`.

    The graph of short kernels alone has as many of them as the others: what a replay itself costs is subtracted too.
    """
    numbers = torch.zeros(64, device="cuda")
    between = partial(numbers.add_, 1)

    def behind(call: Call) -> Any:
        between()
        return call()

    apart = {name: [partial(behind, call) for call in calls] for name, calls in candidates.items()}
    alone = {BETWEEN: [between] * max(map(len, candidates.values()))}
    options: Any = {"flops_per_set": flops_per_set, "queued": queued}
    timings = time_graphs({**alone, **apart}, bytes_per_set, replays, target_us, **options)
    own = timings.pop(BETWEEN).median
    return {name: timing.median - own for name, timing in timings.items()}, own


@cache
def fixed_streams() -> tuple[torch.cuda.Stream, ...]:
    """That of captures, and three beside it for what runs side by side. None is of torch's pool: beside a stream that
    captures, work on the same one would run behind it."""
    return tuple(make_stream(torch.cuda.current_device()) for _ in range(4))


def capture(
    calls: Sequence[Call], bytes_per_set: float = 0.0, flops_per_set: float = 0.0, target_us: float = 0.0
) -> tuple[torch.cuda.CUDAGraph, int]:
    """(a graph of the calls, how many it holds): each once, or in turns if what they touch is more than L2 holds, until
    the graph takes `target_us` if calls are as fast as memory and tensor cores."""
    stream = fixed_streams()[0]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    stream.synchronize()
    rounds = 1
    if len(calls) * bytes_per_set >= cold_bytes():
        fastest = max(2.0, bytes_per_set / 4e6, flops_per_set / 1e9)
        rounds = max(1, int(target_us / (len(calls) * fastest)))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        results = [call() for _ in range(rounds) for call in calls]
    torch.cuda.synchronize()
    del results
    return graph, rounds * len(calls)


def _timing(times: list[float], sets: int, calls: int) -> Timing:
    ordered = sorted(times)

    def at(share: float) -> float:
        return ordered[min(len(ordered) - 1, round(share * (len(ordered) - 1)))]

    return Timing(at(0.5), at(0.1), at(0.9), ordered[0], ordered[-1], len(ordered), sets, calls)


def host_cost(calls: Sequence[Call]) -> dict[str, Any]:
    """Microseconds of host time of an eager call, over HOST_BATCHES batches of HOST_CALLS calls in turn."""
    batch = [calls[i % len(calls)] for i in range(HOST_CALLS)]
    times = []
    collecting = gc.isenabled()
    gc.disable()
    try:
        for _ in range(HOST_BATCHES + 1):
            torch.cuda.synchronize()
            begin = time.perf_counter_ns()
            for call in batch:
                call()
            times.append((time.perf_counter_ns() - begin) / 1e3 / HOST_CALLS)
        torch.cuda.synchronize()
    finally:
        if collecting:
            gc.enable()
    timing = _timing(times[1:], len(calls), HOST_CALLS)
    return {
        "us": round(timing.median, 3),
        "p10": round(timing.p10, 3),
        "p90": round(timing.p90, 3),
        "calls": HOST_CALLS * HOST_BATCHES,
    }


_keep: ContextVar[Callable[[dict[str, Any]], None] | None] = ContextVar("what takes each cell", default=None)


@contextmanager
def keep_cells(keep: Callable[[dict[str, Any]], None]) -> Iterator[None]:
    """In the block, `keep` gets every cell as soon as `compare` has measured it."""
    token = _keep.set(keep)
    try:
        yield
    finally:
        _keep.reset(token)


def compare(
    op: str,
    shape: Mapping[str, Any],
    sets: Sequence[Any],
    cost: Cost,
    candidates: Mapping[str, Callable[[Any], Any] | str],
    replays: int,
    *,
    products: str | None = None,
    apart: Callable[[Any], Any] | None = None,
) -> dict[str, Any]:
    """One cell of a record, an op at one shape: every candidate checked on the first input set, then all are timed.

    shape        what tells this cell from the op's others: T (rows) and, where that is not enough, case (a name)
    sets         input sets; each has `arguments()` (of the op, in the schema's order), `ours()` (this project's call)
                 and `right(call)`: does `call` write what it must
    cost         of one call, whatever the candidate moves or computes beyond it
    candidates   by name: what to do with an input set, or the reason why that is not possible here. Names of this
                 project's other configurations begin with "ours ", all others are peers
    products     "bf16" or "e4m3" if the FLOPs are matrix products of that kind, so that they have a ceiling
    apart        what to do with an input set in the place of `ours()` behind a kernel that lets nothing start early

    RuntimeError if this project's call runs a reference or writes anything wrong; a wrong variant is not timed; a wrong
    peer is, and its row says so.
    """
    require_kernel(sets[0].ours)
    behind = [s.ours if apart is None else partial(apart, s) for s in sets]
    if not (sets[0].right(sets[0].ours) and sets[0].right(behind[0])):
        raise RuntimeError(f"{op}: wrong result at {dict(shape)}; nothing was timed")
    calls: dict[str, list[Call]] = {OURS: [s.ours for s in sets]}
    checked, missing = {OURS: True}, []
    for name, candidate in candidates.items():
        why = candidate if isinstance(candidate, str) else ""
        if not isinstance(candidate, str):
            checked[name], why = _attempt(sets[0].right, partial(candidate, sets[0]))
            if kind_of(name) == "variant" and not checked[name]:
                why = why or "wrong result"
        if why:
            missing.append(skipped(name, why))
        elif not isinstance(candidate, str):
            calls[name] = [partial(candidate, s) for s in sets]
    failures: dict[str, str] = {}
    timings = time_graphs(calls, cost.bytes, replays, failures=failures, flops_per_set=cost.flops)
    if OURS in failures:
        raise RuntimeError(f"{op}: cannot be captured in a graph at {dict(shape)}: {failures[OURS]}")
    missing += [skipped(name, why) for name, why in failures.items()]
    timed = {name: behind if name == OURS else calls[name] for name in timings}
    us_apart, between = time_apart(timed, cost.bytes, replays, flops_per_set=cost.flops)
    rows = [row(name, timing, cost, checked[name], us_apart[name]) for name, timing in timings.items()]
    public = [bind(op, s.arguments()) for s in sets]
    for line in rows:
        if line["kind"] != "variant" and line["us"] <= HOST_MOST_US:
            line["host"] = host_cost(public if line["name"] == OURS else calls[line["name"]])
    tensors = sum(isinstance(argument, torch.Tensor) for argument in sets[0].arguments())
    facts = {"bytes": cost.bytes, "flops": cost.flops, "products": products, "tensors": tensors}
    cell = {"op": op, "shape": dict(shape), **facts, "between_us": round(between, 3), "rows": rows + missing}
    keep = _keep.get()
    if keep is not None:
        keep(cell)
    return cell


def _attempt(right: Callable[[Call], bool], call: Call) -> tuple[bool, str]:
    """(right(call), ""), or why it could not be said: another project's kernel may fail in any way."""
    try:
        return right(call), ""
    except Exception as error:
        return False, f"{type(error).__name__}: {error}"


def skipped(name: str, reason: str) -> dict[str, Any]:
    """A row without times: the first line of `reason`, without the folders of paths, which say nothing elsewhere."""
    lines = reason.strip().splitlines() or ["no reason given"]
    return {"name": name, "kind": kind_of(name), "skipped": re.sub(r"(?:/[^\s/'\"()]+)+/", "", lines[0])[:200]}


def kind_of(name: str) -> str:
    """ "ours", "variant" or "peer": what a row of that name holds."""
    return "ours" if name == OURS else "variant" if name.startswith(VARIANT) else "peer"


def row(name: str, timing: Timing, cost: Cost, checked: bool, apart: float | None = None) -> dict[str, Any]:
    """One line of a cell: microseconds, and the rates at which what must move has moved and was computed. apart: the
    same of calls that do not follow each other."""
    kind = kind_of(name)
    line: dict[str, Any] = {
        "name": name,
        "kind": kind,
        "implementation": "peer" if kind == "peer" else "kernel",
        "us": round(timing.median, 3),
        **({} if apart is None else {"us_apart": round(apart, 3)}),
        "p10": round(timing.p10, 3),
        "p90": round(timing.p90, 3),
        "min": round(timing.least, 3),
        "max": round(timing.most, 3),
        "gbs": round(cost.bytes / timing.median / 1e3, 1),
        "tflops": round(cost.flops / timing.median / 1e6, 3),
        "replays": timing.replays,
        "sets": timing.sets,
        "calls_per_replay": timing.calls_per_replay,
        "checked": checked,
    }
    if kind == "peer":
        line["versions"] = versions(name)
    return line


def environment() -> dict[str, Any]:
    """GPU, CPU, driver, versions, commit and date."""
    return {
        "gpu": torch.cuda.get_device_name(),
        "cpu": _cpu(),
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "-i", first_gpu()),
        "torch": str(torch.__version__),
        "dsl": _version("nvidia-cutlass-dsl"),
        "tvm_ffi": _version("apache-tvm-ffi"),
        "python": platform.python_version(),
        "commit": os.environ.get("PERF_COMMIT") or _output("git", "describe", "--always", "--dirty", "--abbrev=12"),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def _cpu() -> str | None:
    """Model name of the CPU, as far as the system says."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or None
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.M)
    return found[1].strip() if found else platform.processor() or None


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _output(*command: str) -> str | None:
    try:
        lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    except (OSError, subprocess.CalledProcessError):
        return None
    return lines[0] if lines else None
