# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks promise about themselves, as far as it can be seen without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any

import pytest
import torch

from cute_kernels.formats import FP8_DS_MLA
from cute_kernels.kv_cache.ops import quantize_and_insert_k_cache
from cute_kernels.runtime import record
from cute_kernels.runtime.record import Cost
from perf import measure, peers
from perf.ceilings import add_percentages, yardsticks
from perf.records import parse
from tests.perf import synthetic


def insert() -> None:
    quantize_and_insert_k_cache(
        torch.zeros(2, 512, dtype=torch.bfloat16), FP8_DS_MLA.allocate(1, 64), torch.arange(2), 64
    )


def kernel() -> None:
    """A call that a recording takes for that of a kernel."""
    recording = record.active()
    if recording is not None:
        recording.run("some_op", "kernel", Cost(), torch.device("cpu"), lambda: None)


def test_a_reference_is_never_timed() -> None:
    with pytest.raises(RuntimeError, match=r"quantize_and_insert_k_cache ran its reference implementation"):
        measure.require_kernel(insert)


def test_a_call_without_ops_is_refused() -> None:
    with pytest.raises(RuntimeError, match="ran no op"):
        measure.require_kernel(lambda: None)


def test_a_kernel_passes() -> None:
    measure.require_kernel(kernel)


@pytest.mark.parametrize("size", [1, 1600, 10**5, 10**6, 5 * 10**7, 10**9])
def test_sets_leave_the_cache_cold(size: int) -> None:
    sets = measure.number_of_sets(size)
    assert 2 <= sets <= measure.MOST_SETS
    assert sets == measure.MOST_SETS or sets * size >= 3 * measure.L2_BYTES


def test_a_larger_cache_needs_more_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        L2_cache_size = 126 * 10**6

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    assert measure.cold_bytes() == 378e6
    assert measure.number_of_sets(10**7) == 38


def test_statistics() -> None:
    timing = measure._timing([float(n) for n in range(21, 0, -1)], sets=3, calls=6)
    assert (timing.median, timing.p10, timing.p90, timing.least, timing.most) == (11.0, 3.0, 19.0, 1.0, 21.0)
    assert (timing.replays, timing.sets, timing.calls_per_replay) == (21, 3, 6)


TIMING = measure.Timing(10.0, 9.0, 11.0, 8.0, 12.0, 21, 4, 40)


@pytest.mark.parametrize(
    ("name", "kind", "implementation"),
    [("cute_kernels", "ours", "kernel"), ("ours rows=2", "variant", "kernel"), ("vllm-triton", "peer", "peer")],
)
def test_row(name: str, kind: str, implementation: str) -> None:
    row = measure.row(name, TIMING, Cost(bytes=21_400_000, flops=5 * 10**9), True)
    assert (row["name"], row["kind"], row["implementation"]) == (name, kind, implementation)
    assert (row["us"], row["gbs"], row["tflops"], row["checked"]) == (10.0, 2140.0, 500.0, True)
    assert ("versions" in row) == (kind == "peer")


# ---- one cell --------------------------------------------------------------------------------------------------------


class Inputs:
    """An input set whose reference wants `state` to be 1."""

    def __init__(self, correct: bool = True) -> None:
        self.state, self.correct = 0, correct

    def arguments(self) -> tuple[Any, ...]:
        return torch.zeros(1), None, torch.zeros(2), 64

    def ours(self) -> None:
        kernel()
        self.state = 1 if self.correct else 2

    def right(self, call: Callable[[], Any]) -> bool:
        self.state = 0
        call()
        return self.state == 1


def right(s: Inputs) -> None:
    s.state = 1


def wrong(s: Inputs) -> None:
    s.state = 3


def broken(s: Inputs) -> None:
    raise ImportError("cannot open /some/folder/of/this-machine/lib.so\nmore lines")


COST = Cost(bytes=10**6)


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replaces the GPU's clock; the names of what was timed, in order."""
    names: list[str] = []

    def time_graphs(
        calls: dict[str, list[measure.Call]],
        nbytes: float,
        replays: int,
        failures: dict[str, str],
        flops_per_set: float,
    ) -> dict[str, measure.Timing]:
        assert (nbytes, flops_per_set) == (COST.bytes, COST.flops)
        names.extend(calls)
        if "no-graph" in calls:
            failures["no-graph"] = "RuntimeError: synchronized"
        return {
            name: measure.Timing(5.0 + i, 4.0, 60.0, 3.0, 61.0, replays, 256, 256)
            for i, name in enumerate(calls)
            if name not in failures
        }

    def time_apart(
        calls: dict[str, list[measure.Call]], nbytes: float, replays: int, flops_per_set: float
    ) -> tuple[dict[str, float], float]:
        assert (nbytes, flops_per_set) == (COST.bytes, COST.flops)
        return {name: 6.0 + i for i, name in enumerate(calls)}, 1.25

    monkeypatch.setattr(measure, "time_graphs", time_graphs)
    monkeypatch.setattr(measure, "time_apart", time_apart)
    monkeypatch.setattr(measure, "bind", lambda op, args: kernel)
    monkeypatch.setattr(measure, "host_cost", lambda calls: {"us": 7.0, "p10": 6.0, "p90": 8.0, "calls": 1800})
    return names


def compare(candidates: dict[str, Any], sets: list[Inputs] | None = None) -> dict[str, Any]:
    return measure.compare("some_op", {"T": 4}, sets or [Inputs(), Inputs()], COST, candidates, 21)


def test_a_cell_is_what_the_schema_says(timed: list[str]) -> None:
    candidates = {"ours rows=2": right, "vllm-triton": right, "other": "ImportError: not here"}
    cell = compare(candidates)
    add_percentages([cell], {"copy": {"value": 4280.0, "source": "stated"}})
    read = parse(synthetic.record([cell], op="some_op")).cells[0]
    assert timed == ["cute_kernels", "ours rows=2", "vllm-triton"]
    assert [row.kind for row in read.rows] == ["ours", "variant", "peer"]
    assert [(s.name, s.reason) for s in read.skipped] == [("other", "ImportError: not here")]
    assert (read.tensors, read.bytes, read.bound) == (2, 10**6, "copy")
    assert read.ours.percent == pytest.approx(100 * 10**6 / 4.28e6 / 5.0, abs=0.05)
    assert [row.host is not None for row in read.rows] == [True, False, True]
    assert (cell["between_us"], [row.apart for row in read.rows]) == (1.25, [6.0, 7.0, 8.0])


def test_ours_may_be_called_otherwise_apart(timed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a kernel that lets nothing start early: checked as well, and timed there alone."""
    ran: list[str] = []

    def time_apart(calls: dict[str, list[measure.Call]], *_: Any, **__: Any) -> tuple[dict[str, float], float]:
        for each in calls.values():
            each[1]()
        return dict.fromkeys(calls, 6.0), 1.25

    def other(s: Inputs) -> None:
        ran.append("other")
        s.ours()

    monkeypatch.setattr(measure, "time_apart", time_apart)
    sets = [Inputs(), Inputs()]
    measure.compare("some_op", {"T": 4}, sets, COST, {"vllm-triton": right}, 21, apart=other)
    assert (timed, ran) == (["cute_kernels", "vllm-triton"], ["other", "other"])
    with pytest.raises(RuntimeError, match="some_op: wrong result"):
        measure.compare("some_op", {"T": 4}, sets, COST, {}, 21, apart=wrong)


def test_nothing_is_timed_when_our_result_is_wrong(timed: list[str]) -> None:
    with pytest.raises(RuntimeError, match=r"some_op: wrong result at \{'T': 4\}"):
        compare({}, [Inputs(correct=False)])
    assert timed == []


def test_nothing_is_timed_when_ours_is_a_reference(timed: list[str]) -> None:
    inputs = Inputs()
    inputs.ours = insert  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="reference implementation"):
        compare({}, [inputs])
    assert timed == []


def test_a_wrong_variant_is_not_timed_and_a_wrong_peer_is_marked(timed: list[str]) -> None:
    rows = {row["name"]: row for row in compare({"ours rows=2": wrong, "vllm-triton": wrong})["rows"]}
    assert rows["ours rows=2"] == {"name": "ours rows=2", "kind": "variant", "skipped": "wrong result"}
    assert rows["vllm-triton"]["checked"] is False
    assert rows["cute_kernels"]["checked"] is True


def test_a_candidate_that_fails_is_skipped_with_a_reason_that_holds_elsewhere(timed: list[str]) -> None:
    rows = {row["name"]: row for row in compare({"vllm-triton": broken, "no-graph": right})["rows"]}
    assert rows["vllm-triton"]["skipped"] == "ImportError: cannot open lib.so"
    assert rows["no-graph"]["skipped"] == "RuntimeError: synchronized"


def test_slow_calls_are_not_timed_on_the_host(timed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "HOST_MOST_US", 5.5)
    rows = compare({"vllm-triton": right})["rows"]
    assert ["host" in row for row in rows] == [True, False]


def test_host_cost_is_per_call(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[int] = []
    done: list[int] = []
    now = iter(range(0, 10**9, 400_000))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waits.append(len(done)))
    monkeypatch.setattr(measure.time, "perf_counter_ns", lambda: next(now))
    host = measure.host_cost([lambda: done.append(0), lambda: done.append(1)])
    assert (host["us"], host["p10"], host["p90"], host["calls"]) == (2.0, 2.0, 2.0, 1800)
    assert (len(done), sum(done)) == (2000, 1000)
    assert set(waits) == set(range(0, 2001, measure.HOST_CALLS)), "no wait within a batch"


# ---- ceilings and versions -------------------------------------------------------------------------------------------

MEASURED = [
    {"kind": "copy", "value": 4000.0},
    {"kind": "read", "value": 4100.0},
    {"kind": "bf16", "value": 700.0},
    {"kind": "bf16", "value": 720.0},
    {"kind": "e4m3 fast", "value": 1250.0},
    {"kind": "e4m3 fast", "skipped": "no"},
    {"kind": "e4m3 full", "value": 1500.0},
]


def test_yardsticks_are_stated_or_the_best_measured() -> None:
    h200 = yardsticks("NVIDIA H200", MEASURED)
    assert h200["copy"] == {"value": 4402.0, "source": "stated"}
    assert h200["bf16"] == {"value": 790.0, "source": "stated"}
    assert h200["e4m3"] == {"value": 1461.0, "source": "stated"}
    faster = yardsticks("NVIDIA H200", [*MEASURED, {"kind": "read", "value": 4410.0}])
    assert faster["copy"] == {"value": 4410.0, "source": "measured"}, "no share of a ceiling is above 100"
    other = yardsticks("another GPU", MEASURED[:4])
    assert other == {
        "copy": {"value": 4100.0, "source": "measured"},
        "bf16": {"value": 720.0, "source": "measured"},
    }
    assert yardsticks("another GPU", []) == {}


def test_percentages_are_of_the_ceiling_that_takes_longest() -> None:
    def cell(flops: int, products: str | None) -> dict[str, Any]:
        return {"bytes": 4_280_000, "flops": flops, "products": products, "rows": [{"us": 2.0}, {"skipped": "no"}]}

    cells = [cell(0, None), cell(10**9, None), cell(79 * 10**7, "bf16"), cell(158 * 10**7, "bf16"), cell(1, "e4m3")]
    add_percentages(cells, {"copy": {"value": 4280.0}, "bf16": {"value": 790.0}})
    assert [c["bound"] for c in cells] == ["copy", "copy", "copy", "bf16", "copy"]
    assert [c["rows"][0]["percent"] for c in cells] == [50.0, 50.0, 50.0, 100.0, 50.0]
    assert cells[0]["rows"][1] == {"skipped": "no"}
    lonely = cell(0, None)
    add_percentages([lonely], {})
    assert (lonely["bound"], lonely["rows"][0]["percent"]) == (None, None)


def test_versions_of_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    class Module:
        __version__ = "0.33.0"

    monkeypatch.setitem(peers.sys.modules, "vllm", Module)  # type: ignore[arg-type]
    assert peers.versions("vllm-triton")["vllm"] == "0.33.0"
    assert set(peers.versions("vllm-cutedsl")) == {"vllm", "nvidia-cutlass-dsl"}
    assert peers.versions("torch-compiled") == {"torch": torch.__version__}
    assert peers.versions("nobody-knows") == {"nobody": None}
    assert set(peers.versions("vllm-triton + torch-compiled")) == {"vllm", "triton", "torch"}


def test_environment_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: synthetic.GPU)
    monkeypatch.setenv("PERF_COMMIT", "abc")
    machine = measure.environment()
    read = parse({**synthetic.record([synthetic.cell(1, 1616, 1.7)]), **machine})
    assert (read.gpu, read.commit, read.torch) == (synthetic.GPU, "abc", torch.__version__)


# ---- what a time is --------------------------------------------------------------------------------------------------


def test_graphs_are_captured_on_one_stream_that_nothing_else_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stream:
        def wait_stream(self, other: Any) -> None:
            pass

        def synchronize(self) -> None:
            pass

    captured = []

    @contextmanager
    def graph(made: Any, stream: Any) -> Iterator[None]:
        captured.append(stream)
        yield

    monkeypatch.setattr(measure, "fixed_streams", cache(measure.fixed_streams.__wrapped__))
    monkeypatch.setattr(measure, "make_stream", lambda index: Stream())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    for _ in range(2):
        assert measure.capture([lambda: None])[1] == 1
    first, *others = measure.fixed_streams()
    assert captured == [first, first]
    assert len({first, *others}) == 4


class Gpu:
    """A clock, and what happened: replays take 100 us at first, then 10, and 5 if nothing has cleared the cache."""

    def __init__(self) -> None:
        self.now, self.log = 0.0, []
        self.is_cold, self.replays = False, {}

    def clear(self) -> None:
        self.log.append("clear")
        self.now, self.is_cold = self.now + 1000, True

    def replay(self, name: str) -> None:
        self.replays[name] = self.replays.get(name, 0) + 1
        self.log.append(name)
        self.now += 100 if self.replays[name] == 1 else 10 if self.is_cold else 5
        self.is_cold = False


class Graph:
    def __init__(self, gpu: Gpu, name: str) -> None:
        self.gpu, self.name = gpu, name

    def replay(self) -> None:
        self.gpu.replay(self.name)


def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    """In place of torch's events and of the memory that is read to clear the cache."""
    gpu = Gpu()

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = gpu.now

        def synchronize(self) -> None: ...

        def elapsed_time(self, stop: Event) -> float:
            return (stop.at - self.at) / 1e3

    class Memory:
        def sum(self) -> None:
            gpu.clear()

    def ones(size: int, dtype: torch.dtype, device: str) -> Memory:
        assert size * dtype.itemsize > measure.cold_bytes()
        return Memory()

    monkeypatch.setattr(measure.torch, "ones", ones)
    monkeypatch.setattr(measure.torch.cuda, "Event", Event)
    return gpu


def test_times_are_of_cold_replays_behind_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = fake_gpu(monkeypatch)
    monkeypatch.setattr(measure, "capture", lambda calls, *rest: (Graph(gpu, calls[0]), 2))
    timings = measure.time_graphs({"a": ["a"], "b": ["b"]}, 1e6, replays=5)
    assert gpu.log == ["clear", "a", "clear", "b"] * 6
    for timing in timings.values():
        assert (timing.median, timing.least, timing.most, timing.replays) == (5.0, 5.0, 5.0, 5)
        assert (timing.sets, timing.calls_per_replay) == (1, 2)


def test_the_gpu_waits_until_a_graph_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as the host took the last time, and ahead of the first event."""
    gpu = fake_gpu(monkeypatch)
    monkeypatch.setattr(measure, "capture", lambda calls, *rest: (Graph(gpu, calls[0]), 2))
    monkeypatch.setattr(measure.time, "perf_counter", lambda: gpu.now * 1e-6)

    def wait(cycles: int) -> None:
        gpu.log.append(f"wait {cycles}")
        gpu.now += cycles // 2000

    monkeypatch.setattr(measure.torch.cuda, "_sleep", wait)
    timing = measure.time_graphs({"a": ["a"]}, 1e6, replays=2, queued=True)["a"]
    assert gpu.log == ["clear", "wait 0", "a", "clear", f"wait {100 * 3000}", "a", "clear", f"wait {10 * 3000}", "a"]
    assert (timing.median, timing.most) == (5.0, 5.0)


def test_calls_apart_follow_a_short_kernel_whose_time_is_subtracted(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    class Numbers:
        def add_(self, value: int) -> None:
            ran.append("short")

    def time_graphs(candidates: dict[str, list[measure.Call]], *_: Any, **__: Any) -> dict[str, measure.Timing]:
        times = {}
        for name, calls in candidates.items():
            ran.clear()
            for call in calls:
                call()
            times[name] = 2.0 if name == measure.BETWEEN else 7.0
            assert ran == (["short"] * 2 if name == measure.BETWEEN else ["short", "call"] * 2)
        return {name: measure.Timing(us, us, us, us, us, 21, 2, 2) for name, us in times.items()}

    monkeypatch.setattr(measure.torch, "zeros", lambda *_, **__: Numbers())
    monkeypatch.setattr(measure, "time_graphs", time_graphs)
    found, between = measure.time_apart({"a": [lambda: ran.append("call")] * 2}, 1e6)
    assert (found, between) == ({"a": 5.0}, 2.0)
