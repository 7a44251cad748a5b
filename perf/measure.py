"""How a GPU time is taken, and what is written down about the machine it was taken on.

A candidate is a list of calls, one per input set. A CUDA graph replays them all; the time of a call is the replay's
time over the number of calls. Either the sets together touch more than three times the L2 cache and the graph goes
round them as often as fits, or there are as many as are reasonable and each is called once: then reading a large buffer
before every replay leaves nothing of them in the cache. So every call finds its inputs in memory and not in L2.
Candidates take turns, replay by replay, so that a drift of the clock hits them alike.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import math
import os
import platform
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cute_kernels.runtime.record import record_calls

L2_BYTES = 60e6
COLD_BYTES = 3 * L2_BYTES
MOST_SETS = 256
COPY_GBS = {"NVIDIA H200": 4280.0}
"""Rate of a vectorised device copy (bytes read and written), by GPU name: what percentages refer to."""

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


def number_of_sets(bytes_per_set: float) -> int:
    """Input sets to rotate over: enough to pass COLD_BYTES, at least 2, at most MOST_SETS."""
    return int(min(MOST_SETS, max(2, math.ceil(COLD_BYTES / max(bytes_per_set, 1.0)))))


def require_kernel(call: Call) -> None:
    """Run `call` once. RuntimeError unless every op in it ran as a kernel: a reference must never be timed as one."""
    with record_calls() as recording:
        call()
    if not recording.calls:
        raise RuntimeError("require_kernel: the call ran no op of this project")
    for done in recording.calls:
        if done.implementation != "kernel":
            raise RuntimeError(f"require_kernel: {done.op} ran its {done.implementation} implementation, not a kernel")


def time_graphs(
    candidates: Mapping[str, Sequence[Call]],
    bytes_per_set: float,
    replays: int = 21,
    target_us: float = 1500.0,
) -> dict[str, Timing]:
    """Times of all candidates, measured in turns. Each is a list of calls, one per input set."""
    scrub = torch.ones(int(COLD_BYTES) // 4 + 1, dtype=torch.float32, device="cuda")
    graphs = {name: _capture(calls, bytes_per_set, target_us) for name, calls in candidates.items()}
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(replays + 1):
        for name, (graph, count) in graphs.items():
            scrub.sum()
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            stop.record()
            stop.synchronize()
            times[name].append(start.elapsed_time(stop) * 1e3 / count)
    return {name: _timing(t[1:], len(candidates[name]), graphs[name][1]) for name, t in times.items()}


def _capture(calls: Sequence[Call], bytes_per_set: float, target_us: float) -> tuple[torch.cuda.CUDAGraph, int]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    stream.synchronize()
    rounds = 1
    if len(calls) * bytes_per_set >= COLD_BYTES:
        fastest = max(2.0, bytes_per_set / 4e6)
        rounds = max(1, int(target_us / (len(calls) * fastest)))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(rounds):
            for call in calls:
                call()
    torch.cuda.synchronize()
    return graph, rounds * len(calls)


def _timing(times: list[float], sets: int, calls: int) -> Timing:
    ordered = sorted(times)

    def at(share: float) -> float:
        return ordered[min(len(ordered) - 1, round(share * (len(ordered) - 1)))]

    return Timing(at(0.5), at(0.1), at(0.9), ordered[0], ordered[-1], len(ordered), sets, calls)


def environment() -> dict[str, Any]:
    """GPU, driver, versions, commit and date."""
    return {
        "gpu": torch.cuda.get_device_name(),
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "-i", "0"),
        "torch": torch.__version__,
        "dsl": _version("nvidia-cutlass-dsl"),
        "tvm_ffi": _version("apache-tvm-ffi"),
        "python": platform.python_version(),
        "commit": os.environ.get("PERF_COMMIT") or _output("git", "describe", "--always", "--dirty", "--abbrev=12"),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


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


def row(name: str, timing: Timing, nbytes: int, checked: bool) -> dict[str, Any]:
    """One line of a record: times in microseconds, and the rate at which the bytes that must move have moved."""
    rate = nbytes / timing.median / 1e3
    ceiling = COPY_GBS.get(torch.cuda.get_device_name())
    return {
        "name": name,
        "us": round(timing.median, 3),
        "p10": round(timing.p10, 3),
        "p90": round(timing.p90, 3),
        "min": round(timing.least, 3),
        "max": round(timing.most, 3),
        "bytes": nbytes,
        "gbs": round(rate, 1),
        "percent_of_copy": round(100 * rate / ceiling, 1) if ceiling else None,
        "replays": timing.replays,
        "sets": timing.sets,
        "calls_per_replay": timing.calls_per_replay,
        "checked": checked,
    }
