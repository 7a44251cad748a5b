#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""What compute-sanitizer reports of every kernel; what is not accepted, with a reason, fails.

    python scripts/sanitize.py                                  # all tools, all ops: some twenty minutes on 16 cores
    python scripts/sanitize.py --tool racecheck --op sparse_mla_decode
    python scripts/sanitize.py --accepted                       # the accepted reports and why

Of each op the smallest verified call of every kernel runs, a few in a process; every tensor has memory of its own, so
that memcheck sees the end of each. A report is named by the instructions it is about, which nvdisasm reads out of the
kernel. Exit status: 0 nothing new, 1 a report that is not accepted, or a run that failed, 2 bad input, or no tool.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
CALLS_AT_ONCE = {"racecheck": 3, "memcheck": 12, "synccheck": 12, "initcheck": 12}
"""Of a process: with racecheck some take a minute."""

SECONDS = 200
"""After this a process hangs."""


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
    accesses: str
    why: str

    def covers(self, report: Report) -> bool:
        return (
            report.tool == self.tool
            and fnmatchcase(report.kernel, self.kernels)
            and fnmatchcase(report.accesses, self.accesses)
        )


ONE_LANE = (
    "a warp barrier, then one lane arrives at an mbarrier for its warp: racecheck does not follow what the other lanes "
    "did (scripts/racecheck_cases.py, one-lane). tests/model runs these kernels in any order that the PTX ISA allows"
)

ACCEPTED = (
    # scales that all lanes of a consumer warp have read, before the next ones are copied there
    Accepted("racecheck", "gemm_e4m3_*", "LDGSTS*, LDS*", ONE_LANE),
    Accepted("racecheck", "gemm_swap_ab_e4m3_*", "LDGSTS*, LDS*", ONE_LANE),
    # what a warp tells of a tile, and warps that wait for it
    Accepted("racecheck", "sparse_mla_prefill_quant", "LDS.64, STS.64", ONE_LANE),
    Accepted("racecheck", "sparse_mla_prefill_norm_quant", "LDS.64, STS.64", ONE_LANE),
)


NEVER_END: dict[str, Callable[[Any], bool]] = {
    "racecheck": lambda key: type(key).__name__ == "C128Key" and key.cluster == 2,
}
"""Tool -> kernels, by key, that do not end under it: racecheck holds warps at the cluster's barrier until all threads
of the cluster are there (scripts/racecheck_cases.py, cluster-wait), and these kernels' other warps come there last."""


def accepted(report: Report) -> Accepted | None:
    return next((one for one in ACCEPTED if one.covers(report)), None)


# ---- in a process of its own: calls ----------------------------------------------------------------------------------


def cases(name: str) -> list[tuple[Any, list[Any]]]:
    """Of an op the smallest verified call of every kernel: arguments on the CPU, and the keys of all its kernels."""
    import torch

    from cute_kernels.runtime import compile as compile_
    from cute_kernels.runtime import registry, verify

    op = registry.all_ops()[name]
    offered = verify.examples_of(op)
    assert offered is not None
    smallest: dict[Any, tuple[int, Any, list[Any]]] = {}
    for example in offered():
        args = verify.clone_arguments(example.args, torch.device("cuda"))
        with contextlib.suppress(NotImplementedError), compile_.collect() as keys:
            op.overload(*args)
        size = sum(value.numel() for value in args if isinstance(value, torch.Tensor))
        for key in keys:
            if key not in smallest or size < smallest[key][0]:
                smallest[key] = size, example.args, list(keys)
    chosen = {id(args): (args, keys) for _, args, keys in smallest.values()}
    return list(chosen.values())


def run_calls(name: str, first: int, last: int, tool: str = "") -> None:
    import torch

    from cute_kernels.runtime import registry, verify

    op = registry.all_ops()[name]
    for args, keys in cases(name)[first:last]:
        if not any(map(NEVER_END.get(tool, lambda key: False), keys)):
            op.overload(*verify.clone_arguments(args, torch.device("cuda")))
            torch.cuda.synchronize()


def opcodes(name: str, places: Sequence[tuple[str, int]]) -> dict[str, str]:
    """Of instructions of an op's kernels, given by function and offset, the opcodes."""
    from cute_kernels.runtime import cache
    from cute_kernels.runtime import compile as compile_

    keys = dict.fromkeys(key for _, keys in cases(name) for key in keys)
    store = cache.current()
    assert store is not None
    read: dict[str, str] = {}
    for key in keys:
        data = store.read(key).data
        wanted = {function for function, _ in places if function.encode() in data}
        wanted -= {place.rpartition("+")[0] for place in read}
        if wanted:
            sass = compile_.compile_report(key).sass
            assert sass is not None, "nvdisasm"
            for function, offset in places:
                if function in wanted:
                    read |= {f"{function}+{offset:#x}": code for code in _opcode(sass, function, offset)}
    return read


def _opcode(sass: str, function: str, offset: int) -> Iterator[str]:
    text = re.split(rf"^\s*\.text\.{re.escape(function)}:", sass, maxsplit=1, flags=re.MULTILINE)
    if len(text) == 2:
        found = re.search(rf"/\*{offset:04x}\*/\s+(?:@!?\w+\s+)?([\w.]+)", text[1])
        if found is not None:
            yield found[1]


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
    tool: str
    op: str
    first: int
    last: int

    def __str__(self) -> str:
        return f"{self.tool} of {self.op}, calls {self.first} to {self.last - 1}"


def _own(*arguments: str, prefix: Sequence[str] = (), seconds: float = SECONDS) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "CUTE_KERNELS_FALLBACK": "none"}
    environment |= {"OMP_NUM_THREADS": "1"}
    command = [*prefix, sys.executable, __file__, *arguments]
    return subprocess.run(
        command, env=environment, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=seconds
    )


def run_job(sanitizer: str, job: Job) -> tuple[Job, list[Raw], str]:
    """The reports of a run, and what went wrong, or ""."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        prefix = (sanitizer, "--tool", job.tool, "--print-limit", "100000", "--log-file", str(log))
        try:
            done = _own("--run", job.op, str(job.first), str(job.last), job.tool, prefix=prefix)
        except subprocess.TimeoutExpired:
            return job, [], f"no end within {SECONDS} s"
        output = log.read_text() if log.exists() else ""
    found, count = parse(output)
    if done.returncode:
        return job, found, f"status {done.returncode}: {done.stdout.strip()[-500:]}"
    if count and not found:
        return job, found, f"{count} reports that are not understood: {output[-1500:]}"
    if "SUMMARY" not in output:
        return job, found, f"no summary: {output[-500:]}"
    return job, found, ""


def count_cases(op: str) -> tuple[str, int, str]:
    """Compiles what an op's calls need, and counts them; what went wrong, or ""."""
    try:
        done = _own("--prepare", op)
    except subprocess.TimeoutExpired:
        return op, 0, f"no end within {SECONDS} s"
    if done.returncode:
        return op, 0, done.stdout.strip()[-500:]
    return op, int(done.stdout.split()[-1]), ""


def read_opcodes(op: str, reports: Sequence[tuple[Job, Raw]]) -> dict[str, str]:
    places = sorted({place for _, raw in reports for place in raw.places})
    done = _own("--opcodes", op, json.dumps(places))
    codes: dict[str, str] = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {}
    return codes


def name_report(job: Job, raw: Raw, codes: dict[str, str]) -> Report:
    """With opcodes in place of offsets."""
    accesses = [codes.get(f"{function}+{offset:#x}", "?") for function, offset in raw.places]
    return Report(job.tool, raw.what, re.sub(r"_\d+$", "", raw.places[0][0]), ", ".join(sorted(accesses)))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tool", action="append", choices=TOOLS, help="only these")
    parser.add_argument("--op", action="append", metavar="NAME", help="only these")
    parser.add_argument("--jobs", type=int, help="processes at a time; half as many as there are usable cores")
    parser.add_argument("--accepted", action="store_true", help="list what is accepted, and why")
    parser.add_argument("--json", metavar="FILE", help="write the reports")
    parser.add_argument("--run", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--prepare", help=argparse.SUPPRESS)
    parser.add_argument("--opcodes", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.run:
        op, first, last, tool = options.run
        run_calls(op, int(first), int(last), tool)
        return 0
    if options.prepare:
        run_calls(options.prepare, 0, 1 << 20)
        print(len(cases(options.prepare)))
        return 0
    if options.opcodes:
        print(json.dumps(opcodes(options.opcodes[0], [(f, int(o)) for f, o in json.loads(options.opcodes[1])])))
        return 0
    if options.accepted:
        for one in ACCEPTED:
            print(f"{one.tool}: {one.kernels}: {one.accesses}: {one.why}")
        return 0
    return sanitize(parser, options)


def sanitize(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    import torch

    from cute_kernels.runtime import registry
    from cute_kernels.runtime.precompile import usable_cores
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
    assert sanitizer is not None
    start, failed = time.perf_counter(), []
    reports: dict[str, list[tuple[Job, Raw]]] = {}
    with ThreadPoolExecutor(options.jobs or max(1, usable_cores() // 2)) as pool:
        counts = list(pool.map(count_cases, options.op or names))
        failed += [f"{op}: {problem}" for op, _, problem in counts if problem]
        jobs = [
            Job(tool, op, first, min(first + CALLS_AT_ONCE[tool], count))
            for tool in options.tool or TOOLS
            for op, count, _ in counts
            for first in range(0, count, CALLS_AT_ONCE[tool])
        ]
        for job, raws, problem in pool.map(partial(run_job, sanitizer), jobs):
            print(f"{job}: {problem or f'{len(raws)} reports'}", file=sys.stderr)
            if raws:
                reports.setdefault(job.op, []).extend((job, raw) for raw in raws)
            if problem:
                failed.append(f"{job}: {problem}")
        codes = dict(zip(reports, pool.map(lambda op: read_opcodes(op, reports[op]), reports), strict=True))
    named = Counter((op, name_report(*one, codes[op])) for op, found in reports.items() for one in found)
    new = {key: count for key, count in named.items() if accepted(key[1]) is None}
    for (op, report), count in sorted(named.items(), key=str):
        reason = accepted(report)
        print(f"{'NEW     ' if reason is None else 'accepted'} {op}: {report} ({count})")
    for problem in failed:
        print(f"FAILED   {problem}")
    calls = sum(count for _, count, _ in counts)
    print(f"{torch.cuda.get_device_name()}: {len(counts)} ops, {calls} calls, {len(jobs)} runs:")
    print(f"{len(new)} new reports, {len(named) - len(new)} accepted ones, {len(failed)} runs failed")
    print(f"{time.perf_counter() - start:.0f} s")
    if options.json:
        lines = [{"op": op, **vars(report), "count": count} for (op, report), count in named.items()]
        Path(options.json).write_text(json.dumps(lines, indent=1) + "\n")
    return 1 if new or failed else 0


if __name__ == "__main__":
    sys.exit(main())
