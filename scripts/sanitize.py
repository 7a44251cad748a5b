#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""What compute-sanitizer reports of every kernel; what is not accepted, with a reason, fails.

    python scripts/sanitize.py                                  # all tools, all ops: some twenty minutes on 16 cores
    python scripts/sanitize.py --tool racecheck --op sparse_mla_decode
    python scripts/sanitize.py --kernel 'sparse_mla.hopper.*'   # only calls that launch kernels of such names
    python scripts/sanitize.py --compile                        # only what the runs need, into the kernel cache
    python scripts/sanitize.py --accepted                       # the accepted reports and why

Of each op the smallest verified call of every kernel runs, a few in a process; every tensor has memory of its own, so
that memcheck sees the end of each. A report is named by the instructions it is about, which nvdisasm reads out of the
kernel, and printed as soon as a run has it. Ctrl-C ends the runs; what there is by then is summed up as ever.
Exit status: 0 nothing new, 1 a report that is not accepted, or a run that failed or is missing, 2 bad input, no tool.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
CALLS_AT_ONCE = {"racecheck": 3, "memcheck": 12, "synccheck": 12, "initcheck": 12}
"""Of a process: with racecheck some take a minute."""

OPTIONS = {"memcheck": ("--report-api-errors", "no")}
"""cuda.bindings asks the driver for functions that it does not have, and goes on without; calls that fail raise."""

SECONDS = 200
"""After this a process hangs."""

INTERRUPTED = "interrupted"


@dataclass(frozen=True)
class Report:
    """What a tool says, less addresses, threads and counts.

    what       "race", or the tool's words
    kernel     its name in the machine code
    accesses   opcode of the instruction; of a race those of both sides, in the order of letters
    """

    tool: str
    what: str
    kernel: str
    accesses: str

    def __str__(self) -> str:
        return f"{self.tool}: {self.kernel}: {self.what}: {self.accesses}"


@dataclass(frozen=True)
class Accepted:
    """Reports that are no errors: kernels and accesses are patterns of fnmatch."""

    tool: str
    kernels: str
    accesses: tuple[str, ...]
    why: str

    def covers(self, report: Report) -> bool:
        return (
            report.tool == self.tool
            and fnmatchcase(report.kernel, self.kernels)
            and any(fnmatchcase(report.accesses, pattern) for pattern in self.accesses)
        )


ONE_LANE = (
    "a warp barrier, then one lane arrives at an mbarrier for its warp: racecheck does not follow what the other lanes "
    "did (scripts/racecheck_cases.py, one-lane)"
)
IN_ANY_ORDER = "; tests/model runs these kernels in any order that the PTX ISA allows"
NAMED_ARRIVE = (
    "bar.arrive at named barriers: racecheck loses orders, now some and now others (scripts/racecheck_cases.py, "
    "named-arrive)"
)

BLOCK_BARRIER = (
    "BAR.SYNC of all threads lies between, in the machine code too. Reported only of kernels in which groups of warps "
    "meet at named barriers of their own as well (scripts/racecheck_cases.py, pairs)"
)
AHEAD = "loads one step ahead, which behind the last keys find whatever lies there, and nobody uses (multiply_qk)"

ACCEPTED = (
    # scales that all lanes of a consumer warp have read, before the next ones are copied there
    Accepted("racecheck", "gemm_e4m3_*", ("LDGSTS*, LDS*",), ONE_LANE + IN_ANY_ORDER),
    Accepted("racecheck", "gemm_swap_ab_e4m3_*", ("LDGSTS*, LDS*",), ONE_LANE + IN_ANY_ORDER),
    # weights, windows and headers, before those of the next group or tile
    *(
        Accepted(
            "racecheck",
            f"paged_mqa_logits_{kind}b64_h*",
            ("LDGSTS.E, LDS", "LDGSTS.E, LDS.64", "LDS.128, STS.128"),
            why,
        )
        for kind, why in (
            ("", ONE_LANE + IN_ANY_ORDER),
            (
                "mxfp4_",
                f"{ONE_LANE}; the producer and what lets it go on are those of the FP8 kernel, which tests/model runs",
            ),
        )
    ),
    # what a producer has made of keys' scales, and the scales, before those of the next tile
    Accepted(
        "racecheck",
        "paged_mqa_logits_mxfp4_b64_h*",
        ("LDS, STS.64", "LDS.U8, STS.64", "LDS.U8, UBLKCP.S.G"),
        f"{ONE_LANE}: consumer warps meet behind their last read of a stage; clean if every lane releases it",
    ),
    # scales, weights of the own block, maxima, sums, and what one work tile is told of the next
    Accepted(
        "racecheck",
        "sparse_mla_decode_h[136]*",
        (
            "LDGSTS.E, LDS",
            "LDS, STS",
            "LDS, STS.128",
            "LDS, STS.64",
            "LDS.128, STS",
            "LDS.128, STS.128",
            "LDS.128, UBLKCP.S.G",
        ),
        f"{ONE_LANE}, and votes on what lanes have read before one of them changes it{IN_ANY_ORDER} and a vote keeps",
    ),
    # the first words of a header, and a stage of KV that the first half's O comes back to
    Accepted(
        "racecheck",
        "sparse_mla_decode_h[36]*_halves",
        ("LDS.64, STS.128", "STS.128, UBLKCP.S.G"),
        f"{ONE_LANE}: dequantizers fill a stage, PV lets go of it{IN_ANY_ORDER}",
    ),
    # records, their scales and headers, maxima, sums, and what PV is told of a tile
    Accepted(
        "racecheck",
        "sparse_mla_decode_swap_ab_h*",
        (
            "LDGSTS.E.64, LDS.64",
            "LDS.64, STS",
            "LDS.64, STS.64",
            "LDS.64, UBLKCP.S.G",
            "LDS.128, STS.64",
            "LDS.128, STS.128",
            "LDS.128, UBLKCP.S.G",
        ),
        f"{ONE_LANE}; clean if every lane arrives{IN_ANY_ORDER}",
    ),
    # what a warp tells of a tile, and warps that wait for it
    Accepted("racecheck", "sparse_mla_prefill", ("LDS.64, STS.64",), ONE_LANE + IN_ANY_ORDER),
    Accepted("racecheck", "sparse_mla_prefill_quant", ("LDS.64, STS.64",), ONE_LANE + IN_ANY_ORDER),
    Accepted("racecheck", "sparse_mla_prefill_norm_quant", ("LDS.64, STS.64",), ONE_LANE + IN_ANY_ORDER),
    Accepted("racecheck", "sparse_mla_prefill_16*", ("LDS.64, STS",), ONE_LANE + IN_ANY_ORDER),
    Accepted(
        "racecheck", "sparse_mla_prefill_8*", ("LDS, STS", "LDS.64, STS", "LDS.64, STS.64"), ONE_LANE + IN_ANY_ORDER
    ),
    Accepted("racecheck", "sparse_mla_mixed", ("LDS.64, STS.64",), ONE_LANE + IN_ANY_ORDER),
    Accepted("racecheck", "sparse_mla_mixed_16", ("LDS.64, STS", "LDS.64, STS.64"), ONE_LANE + IN_ANY_ORDER),
    Accepted("racecheck", "sparse_mla_mixed_8", ("LDS.64, STS", "LDS.64, STS.64"), ONE_LANE + IN_ANY_ORDER),
    # over e4m3 caches also queries, which products have taken from registers before the warp's lane arrives, and what
    # QK warps have read of a tile's header before they hand over its P
    *(
        Accepted(
            "racecheck",
            kernels,
            ("LDS, STS", "LDS.64, STS.64", "LDS.128, STS", "LDSM*, STS.128", "LDGSTS.E.BYPASS.128, LDSM*"),
            ONE_LANE + IN_ANY_ORDER,
        )
        for kernels in ("sparse_mla_mixed_fp8", "sparse_mla_mixed_fp8_converted")
    ),
    Accepted("racecheck", "sparse_mla_mixed_fp8_[0-9]*", ("LDS.64, STS", "LDS.64, STS.64"), ONE_LANE + IN_ANY_ORDER),
    Accepted(
        "racecheck",
        "sparse_mla_prefill_paged*",
        ("LDS, STS", "LDS, STS.128", "LDS.64, STS.64"),
        ONE_LANE + IN_ANY_ORDER,
    ),
    # what one KV group stores of O, and others add up
    Accepted(
        "racecheck",
        "sparse_mla_decode_teams_h16_*",
        ("LDS.128, STS", "LDS.128, STS.64", "LDS.128, STS.128"),
        BLOCK_BARRIER,
    ),
    Accepted("racecheck", "sparse_mla_decode_portable_*", ("LDGSTS.E.BYPASS.128, LDS*", "LDS.128, STS.64"), AHEAD),
    # tables, parts and sums between producers, consumers and epilogue
    *(
        Accepted(
            "racecheck",
            f"{op}compress_norm_rope_store_c128x*",
            ("LDS, STS", "LDS, STS.128", "LDS.128, STS.128", "LDS.64, STS.64"),
            NAMED_ARRIVE + IN_ANY_ORDER,
        )
        for op in ("", "fused_")
    ),
)


NEVER_END: dict[str, Callable[[Any], bool]] = {
    "racecheck": lambda key: type(key).__name__ == "C128Key" and key.cluster == 2,
}
"""Tool -> kernels, by key, that do not end under it: racecheck holds warps at the cluster's barrier until all threads
of the cluster are there (scripts/racecheck_cases.py, cluster-wait), and these kernels' other warps come there last."""


def accepted(report: Report) -> Accepted | None:
    return next((one for one in ACCEPTED if one.covers(report)), None)


# ---- in a process of its own: calls ----------------------------------------------------------------------------------


Call = tuple[int, tuple[Any, ...]]
"""Of an op: which of the calls that it is verified with, and the keys of all its kernels."""


def examples(name: str) -> tuple[Any, Iterable[Any]]:
    """An op, and the calls that it is verified with, with arguments on the CPU."""
    from cute_kernels.runtime import registry, verify

    op = registry.all_ops()[name]
    offered = verify.examples_of(op)
    assert offered is not None
    return op, offered()


def find_calls(name: str) -> list[Call]:
    """Of an op the smallest verified call of every kernel."""
    import torch

    from cute_kernels.runtime import compile as compile_
    from cute_kernels.runtime import verify

    op, offered = examples(name)
    smallest: dict[Any, tuple[int, int, tuple[Any, ...]]] = {}
    for number, example in enumerate(offered):
        args = verify.clone_arguments(example.args, torch.device("cuda"))
        with contextlib.suppress(NotImplementedError), compile_.collect() as keys:
            op.overload(*args)
        size = sum(value.numel() for value in args if isinstance(value, torch.Tensor))
        for key in keys:
            if key not in smallest or size < smallest[key][0]:
                smallest[key] = size, number, tuple(keys)
    return list({number: (number, keys) for _, number, keys in smallest.values()}.values())


def run_calls(name: str, numbers: Sequence[int]) -> None:
    import torch

    from cute_kernels.runtime import verify

    op, offered = examples(name)
    for example in (example for number, example in enumerate(offered) if number in numbers):
        op.overload(*verify.clone_arguments(example.args, torch.device("cuda")))
        torch.cuda.synchronize()


# ---- machine code ----------------------------------------------------------------------------------------------------

_CUDA = 190
"""Machine of an ELF file with code for a GPU."""

_INSTRUCTION = re.compile(r"^\s*/\*(?P<offset>[0-9a-f]{4,})\*/\s+(?:@!?\w+\s+)?(?P<opcode>[\w.]+)", re.MULTILINE)


def cubins(data: bytes) -> Iterator[bytes]:
    """The GPU's code in an object. Each is an ELF file whose table of sections is its last part but one, and may be
    followed by anything."""
    at = data.find(b"\x7fELF")
    while at >= 0:
        if int.from_bytes(data[at + 18 : at + 20], "little") == _CUDA:
            yield data[at:]
        at = data.find(b"\x7fELF", at + 4)


def disassemble(cubin: bytes) -> str:
    from cute_kernels.runtime.report import find_nvdisasm

    tool = find_nvdisasm()
    assert tool is not None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(cubin)
        f.flush()
        # of Ctrl-C hears this process alone
        command = [tool, "-c", f.name]
        return subprocess.run(command, capture_output=True, text=True, check=True, start_new_session=True).stdout


def read_opcodes(sass: str) -> dict[str, dict[int, str]]:
    """Function -> offset -> opcode."""
    parts = re.split(r"^\s*\.text\.(\S+):", sass, flags=re.MULTILINE)[1:]
    return {
        function: {int(match["offset"], 16): match["opcode"] for match in _INSTRUCTION.finditer(text)}
        for function, text in zip(parts[::2], parts[1::2], strict=True)
    }


@cache
def opcodes_of(key: Any) -> dict[str, dict[int, str]]:
    """Of a kernel in the kernel cache."""
    from cute_kernels.runtime import cache as cache_

    store = cache_.current()
    assert store is not None
    found: dict[str, dict[int, str]] = {}
    for cubin in cubins(store.read(key).data):
        found |= read_opcodes(disassemble(cubin))
    return found


# ---- reports ---------------------------------------------------------------------------------------------------------

_RACE = re.compile(
    r"^=+ \w+: Race reported between \w+ access at (?P<first>\S+\+0x[0-9a-f]+).*(?P<others>(?:\n=+ +and .*)+)",
    re.MULTILINE,
)
_OTHER = re.compile(r"^=+ (?P<what>[A-Z][^\n]*)\n=+ +at (?P<place>[^\n]+?\+0x[0-9a-f]+)", re.MULTILINE)


@dataclass(frozen=True)
class Raw:
    """A report as the tool prints it: what, and the functions and offsets that it is about."""

    what: str
    places: tuple[tuple[str, int], ...]

    def __str__(self) -> str:
        return ", ".join(f"{function}+{offset:#x}" for function, offset in self.places)


def parse(output: str) -> tuple[list[Raw], int]:
    """The reports in a tool's output, and how many errors and warnings the tool counts itself."""
    found = []
    for match in _RACE.finditer(output):
        others = re.findall(r"access at (\S+\+0x[0-9a-f]+)", match["others"])
        found += [Raw("race", (_place(match["first"]), _place(other))) for other in others]
    for match in _OTHER.finditer(output):
        what = re.sub(r"0x[0-9a-f]+|\d+", "N", match["what"]).strip()
        found.append(Raw(what, (_place(match["place"]),)))
    return found, sum(int(n) for n in re.findall(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)", output))


def _place(text: str) -> tuple[str, int]:
    function, _, offset = text.rpartition("+")
    return function, int(offset, 16)


# ---- the runs --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """numbers: of its calls; keys: of their kernels."""

    tool: str
    op: str
    numbers: tuple[int, ...]
    keys: tuple[Any, ...] = ()

    def __str__(self) -> str:
        return f"{self.tool} of {self.op}, calls {', '.join(map(str, self.numbers))}"


class Processes:
    """Runs of this script, each in a session of its own: Ctrl-C in the terminal reaches this process alone, which then
    ends all that it started."""

    def __init__(self) -> None:
        self.running: set[subprocess.Popen[str]] = set()
        self.lock = threading.Lock()
        self.is_stopped = False

    def run(self, *arguments: str, prefix: Sequence[str] = ()) -> tuple[int, str, str]:
        """Status, output, and why there is no status of its own, or ""."""
        environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "CUTE_KERNELS_FALLBACK": "none"}
        environment |= {"OMP_NUM_THREADS": "1"}
        with self.lock:
            if self.is_stopped:
                return 1, "", INTERRUPTED
            process = subprocess.Popen(
                [*prefix, sys.executable, __file__, *arguments],
                env=environment,
                cwd=ROOT,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            self.running.add(process)
        try:
            output, _ = process.communicate(timeout=SECONDS)
            return process.returncode, output, INTERRUPTED if self.is_stopped and process.returncode else ""
        except subprocess.TimeoutExpired:
            self.end(process)
            return 1, process.communicate()[0], f"no end within {SECONDS} s"
        finally:
            with self.lock:
                self.running.discard(process)

    def stop(self) -> None:
        """End all, and start none any more."""
        with self.lock:
            self.is_stopped = True
            for process in self.running:
                self.end(process)

    @contextlib.contextmanager
    def threads(self, count: int) -> Iterator[ThreadPoolExecutor]:
        """To start processes from. An exception ends them."""
        with ThreadPoolExecutor(count) as pool:
            try:
                yield pool
            except BaseException:
                self.stop()
                pool.shutdown(cancel_futures=True)
                raise

    @staticmethod
    def end(process: subprocess.Popen[str]) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def run_job(processes: Processes, sanitizer: str, job: Job) -> tuple[list[tuple[Report, str]], str]:
    """The reports of a run, each with the places in the code, and what went wrong, or ""."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        options = ("--print-limit", "100000", "--log-file", str(log), *OPTIONS.get(job.tool, ()))
        prefix = (sanitizer, "--tool", job.tool, *options)
        status, said, problem = processes.run("--run", job.op, *map(str, job.numbers), prefix=prefix)
        output = log.read_text() if log.exists() else ""
    raws, count = parse(output)
    if not problem:
        if status:
            problem = f"status {status}: {said.strip()[-500:]}"
        elif count and not raws:
            problem = f"{count} reports that are not understood: {output[-1500:]}"
        elif "SUMMARY" not in output:
            problem = f"no summary: {output[-500:]}"
    return [(name_report(job.tool, raw, find_opcodes(job.keys, raw)), str(raw)) for raw in raws], problem


def find_opcodes(keys: Sequence[Any], raw: Raw) -> list[str]:
    """Of the instructions that a report is about: "?" for one that is in none of the kernels."""
    return [
        next((code for key in keys if (code := opcodes_of(key).get(function, {}).get(offset))), "?")
        for function, offset in raw.places
    ]


def name_report(tool: str, raw: Raw, opcodes: Sequence[str]) -> Report:
    return Report(tool, raw.what, re.sub(r"_\d+$", "", raw.places[0][0]), ", ".join(sorted(opcodes)))


def calls_of(processes: Processes, op: str) -> tuple[bytes, str]:
    """An op's calls, pickled, since threads that unpickle import CuTe DSL at the same time and see half of it; and what
    went wrong, or ""."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "calls"
        status, said, problem = processes.run("--find", op, str(path))
        if status:
            return pickle.dumps([]), problem or said.strip()[-500:]
        return path.read_bytes(), ""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tool", action="append", choices=TOOLS, help="only these")
    parser.add_argument("--op", action="append", metavar="NAME", help="only these, in this order")
    parser.add_argument("--kernel", default="*", metavar="GLOB", help="only calls that launch kernels of such names")
    parser.add_argument("--jobs", type=int, help="processes at a time; half as many as there are usable cores")
    parser.add_argument("--compile", action="store_true", help="compile the kernels, and run nothing")
    parser.add_argument("--accepted", action="store_true", help="list what is accepted, and why")
    parser.add_argument("--json", metavar="FILE", help="write the reports")
    parser.add_argument("--run", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--find", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.run:
        op, *numbers = options.run
        run_calls(op, [int(number) for number in numbers])
        return 0
    if options.find:
        op, path = options.find
        Path(path).write_bytes(pickle.dumps(find_calls(op)))
        return 0
    if options.accepted:
        for one in ACCEPTED:
            print(f"{one.tool}: {one.kernels}: {'; '.join(one.accesses)}: {one.why}")
        return 0
    return sanitize(parser, options)


@dataclass
class Results:
    """What came out of the runs so far; printed as it comes.

    named    (op, report) -> how often, by places in the code
    failed   runs, and why
    runs     that ended by themselves
    """

    named: dict[tuple[str, Report], Counter[str]] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)
    runs: int = 0

    def add(self, job: Job, seconds: float, found: Sequence[tuple[Report, str]], problem: str) -> None:
        print(f"{seconds:4.0f} s  {job}: {problem or f'{len(found)} reports'}", flush=True)
        for report, count in Counter(report for report, _ in found).items():
            if (job.op, report) not in self.named:
                print(describe(job.op, report, count), flush=True)
        for report, places in found:
            self.named.setdefault((job.op, report), Counter())[places] += 1
        self.runs += not problem
        if problem:
            self.failed.append(f"{job}: {problem}")


def describe(op: str, report: Report, count: int) -> str:
    return f"{'NEW     ' if accepted(report) is None else 'accepted'} {op}: {report} ({count})"


def sanitize(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    import torch

    from cute_kernels.runtime import cache as cache_
    from cute_kernels.runtime import registry
    from cute_kernels.runtime.precompile import precompile, usable_cores
    from cute_kernels.runtime.report import find_nvdisasm

    names = sorted(registry.all_ops())
    unknown = sorted(set(options.op or ()) - set(names))
    if unknown:
        parser.error(f"--op: expected names among {', '.join(names)}, got {', '.join(unknown)}")
    sanitizer = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    for tool, found in (("compute-sanitizer", sanitizer), ("nvdisasm", find_nvdisasm())):
        if found is None:
            parser.error(f"{tool} is not installed")
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device here")
    folder = cache_.default_directory()
    if folder is None:
        parser.error(f"{cache_.DIRECTORY_VARIABLE}: a kernel cache is needed")
    assert sanitizer is not None
    assert folder is not None
    start, results, processes = time.perf_counter(), Results(), Processes()
    at_once = options.jobs or max(1, usable_cores() // 2)
    with processes.threads(at_once) as pool:
        ops = options.op or names
        said = list(pool.map(lambda op: calls_of(processes, op), ops))
    results.failed += [f"{op}: {problem}" for op, (_, problem) in zip(ops, said, strict=True) if problem]
    of_ops = {op: choose(pickle.loads(calls), options.kernel) for op, (calls, _) in zip(ops, said, strict=True)}
    keys = dict.fromkeys(key for calls in of_ops.values() for _, launched in calls for key in launched)
    outcomes = list(precompile(keys, folder, at_once))
    results.failed += [f"{one.key}: {'; '.join(one.problems)}" for one in outcomes if one.facts is None]
    compiled = sum(one.status == "compiled" for one in outcomes)
    print(f"{len(keys)} kernels, {compiled} of them compiled now: {time.perf_counter() - start:.0f} s", flush=True)
    jobs = [] if options.compile else [job for tool in options.tool or TOOLS for job in jobs_of(tool, of_ops)]
    run_all(processes, sanitizer, jobs, at_once, results)
    new = [report for _, report in results.named if accepted(report) is None]
    for (op, report), places in sorted(results.named.items(), key=str):
        print(describe(op, report, places.total()))
    for problem in results.failed:
        print(f"FAILED   {problem}")
    calls = sum(map(len, of_ops.values()))
    print(f"{torch.cuda.get_device_name()}: {len(ops)} ops, {calls} calls, {results.runs} of {len(jobs)} runs:")
    print(f"{len(new)} new reports, {len(results.named) - len(new)} accepted ones, {len(results.failed)} failures")
    print(f"{time.perf_counter() - start:.0f} s")
    if options.json:
        lines = [{"op": op, **vars(report), "places": places} for (op, report), places in results.named.items()]
        Path(options.json).write_text(json.dumps(lines, indent=1) + "\n")
    return 1 if new or results.failed else 0


def choose(calls: Sequence[Call], glob: str) -> list[Call]:
    """Those that launch kernels of such names."""
    return [call for call in calls if any(fnmatchcase(key.kernel_name, glob) for key in call[1])]


def jobs_of(tool: str, of_ops: Mapping[str, Sequence[Call]]) -> Iterator[Job]:
    """All calls that end under the tool."""
    at_once, never_ends = CALLS_AT_ONCE[tool], NEVER_END.get(tool, lambda key: False)
    for op, calls in of_ops.items():
        ending = [(number, keys) for number, keys in calls if not any(map(never_ends, keys))]
        for first in range(0, len(ending), at_once):
            numbers, keys = zip(*ending[first : first + at_once], strict=True)
            yield Job(tool, op, numbers, tuple(dict.fromkeys(key for some in keys for key in some)))


def run_all(processes: Processes, sanitizer: str, jobs: Sequence[Job], workers: int, results: Results) -> None:
    """Adds to the results. After Ctrl-C, what the runs that were ended had said until then, too."""

    def timed(job: Job) -> tuple[float, list[tuple[Report, str]], str]:
        start = time.perf_counter()
        found, problem = run_job(processes, sanitizer, job)
        return time.perf_counter() - start, found, problem

    with processes.threads(workers) as pool:
        waiting = {pool.submit(timed, job): job for job in jobs}
        try:
            for done in as_completed(waiting):
                results.add(waiting.pop(done), *done.result())
        except KeyboardInterrupt:
            processes.stop()
            pool.shutdown(cancel_futures=True)
            begun = {done: job for done, job in waiting.items() if not done.cancelled()}
            for done, job in begun.items():
                results.add(job, *done.result())
            if len(waiting) > len(begun):
                results.failed.append(f"{INTERRUPTED}: {len(waiting) - len(begun)} runs were not begun")


if __name__ == "__main__":
    sys.exit(main())
