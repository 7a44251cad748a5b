# SPDX-License-Identifier: Apache-2.0
"""`python -m cute_kernels verify`: every kernel against its reference on the GPU at hand, and the verdicts kept.

First what all ops need is found out, by calling everything but the kernels, and compiled in many processes. On a
Blackwell, what its kernels take for granted about instructions is tried then, one by one (cute_kernels.isa_probes). Ops
with one kernel are then verified side by side, and so are the portable ones beside kernels of the architecture's own.
These, which may never have run, are verified one at a time, alone on the GPU, and so are calls that soak kernels whose
CTAs work together. Layers come last, with the kernels that are trusted then. A verdict on an own kernel is kept as soon
as all that concerns it has run.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from cute_kernels.cli import PROGRAM, STYLES, Refusal, print_json, with_progress

OWN_SECONDS = 120.0
"""After this a kernel that may never have run before hangs: what it needs is compiled by then."""

MOST_PROCESSES, BYTES_EACH = 16, 2 << 30
"""That use the GPU at a time, and what each may hold of its memory: a context of some hundred MB, and tensors."""

INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells have it."""


@dataclass
class Run:
    """What a run has found out so far.

    verdicts      of facts, kernels and layers
    seconds       what each phase took
    problem       why verdicts could not be kept, or ""
    deployed      how many kernels models need
    not_run       those of them that no example runs
    interrupted   whether it was, by Ctrl-C
    """

    verdicts: list[Any] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    problem: str = ""
    deployed: int = 0
    not_run: tuple[str, ...] = ()
    interrupted: bool = False

    @contextlib.contextmanager
    def phase(self, what: str) -> Iterator[None]:
        """Notes what a phase takes, and says so on standard error."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[what] = time.perf_counter() - start
            print(f"{PROGRAM} verify: {what}: {self.seconds[what]:.1f} s", file=sys.stderr, flush=True)

    def verify(
        self,
        what: str,
        names: Sequence[str],
        function: Callable[[str], Any],
        workers: int = 1,
        timeout: float | None = None,
    ) -> Iterator[Any]:
        """Verdicts of function(name) as they come, which are noted, and said on standard error if they are bad."""
        from cute_kernels.runtime.isolated import TIMEOUT_SECONDS, run_isolated

        if not names:
            return
        with self.phase(what):
            results = run_isolated(names, function, TIMEOUT_SECONDS if timeout is None else timeout, workers)
            for verdict in with_progress(results, len(names), what):
                self.verdicts.append(verdict)
                if verdict.status in BAD:
                    print(f"{verdict.status}: {verdict.name}: {verdict.detail}", file=sys.stderr, flush=True)
                yield verdict


BAD = ("fail", "no examples", "not run")


def verify(options: argparse.Namespace) -> int:
    import torch

    from cute_kernels.runtime.arch import arch_of
    from cute_kernels.runtime.isolated import has_given_up, kept_processes
    from cute_kernels.runtime.registry import all_ops
    from cute_kernels.runtime.verify import DELAYED_VARIABLE

    names = sorted(all_ops())
    unknown = sorted(set(options.op or ()) - set(names))
    if unknown:
        raise Refusal(f"--op: expected names among {', '.join(names)}, got {', '.join(unknown)}")
    if not torch.cuda.is_available():
        raise Refusal("there is no CUDA device here: nothing was verified")
    try:
        arch = arch_of(torch.cuda.current_device())
    except ValueError as error:
        raise Refusal(str(error)) from error
    layers = _layers() if options.layers else None
    chosen = [name for name in names if not options.op or name in options.op]
    run = Run()
    with _folder_for_kernels() as problem:
        try:
            with _interruptible(), tempfile.TemporaryDirectory() as delayed, kept_processes():
                os.environ[DELAYED_VARIABLE] = delayed
                _verify(run, chosen, arch, layers, options.workers, Path(delayed))
        except KeyboardInterrupt:
            run.interrupted = True
    status = report_verdicts(run, torch.cuda.get_device_name(), arch, options.json)
    problem = problem or run.problem
    if problem:
        print(f"{PROGRAM} verify: the verdicts were not kept: {problem}", file=sys.stderr)
    if run.interrupted:
        print(f"{PROGRAM} verify: interrupted: what is listed has run, and its verdicts are kept", file=sys.stderr)
    if has_given_up():
        sys.stdout.flush()
        os._exit(status)  # at exit, Python would wait for the process that does not end
    return status


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Inside, Ctrl-C and a scheduler's SIGTERM are a KeyboardInterrupt, also where a shell has them ignored."""
    numbers = signal.SIGINT, signal.SIGTERM
    before = [signal.signal(number, signal.default_int_handler) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: not Python's


def _verify(run: Run, ops: Sequence[str], arch: str, layers: Any, workers: int | None, delayed: Path) -> None:
    """Fill in `run`: the facts, the ops and the layers."""
    import torch

    from cute_kernels.isa_probes import check
    from cute_kernels.runtime import verify as verify_
    from cute_kernels.runtime.compile import jit_forbidden
    from cute_kernels.runtime.precompile import usable_cores
    from cute_kernels.runtime.verify import PORTABLE, Needs, Verdict

    memory = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    processes = max(1, min(MOST_PROCESSES, usable_cores(), memory // BYTES_EACH))
    what = "finding kernels"
    with run.phase(what):
        found = list(with_progress(_isolated(ops, verify_.needs_by_name, processes), len(ops), what))
    needs = sorted((need for need in found if isinstance(need, Needs)), key=lambda need: need.name)
    # of such an op it is not known which kernels it has: nothing of it is verified, all of it has failed
    lost = [replace(v, detail=f"{what}: {v.detail}") for v in found if isinstance(v, Verdict)]
    run.verdicts += lost
    if jit_forbidden():  # nothing would compile the soaks' kernels with delays
        needs = [replace(need, soaked=()) for need in needs]
    keeper = Keeper(run, needs, lost)
    keys = [key for need in needs for key in need.keys]
    needed = {key for need in needs for key in need.deployed}
    run.deployed, run.not_run = len(needed), tuple(sorted(key.identity for key in needed - set(keys)))
    soaked = [key for need in needs for key in need.soaked]
    with run.phase(f"compiling {len(set(keys))} kernels, and {len(set(soaked))} with delays"):
        _compile([*check.keys(arch), *keys, *(() if layers is None else layers.keys(arch))], soaked, workers, delayed)
    if arch in check.ARCHS:
        list(run.verify("verifying facts", check.NAMES, check.verify_fact, processes))
    # who has most calls begins first
    tasks = [task for need in sorted(needs, key=lambda need: -need.calls) for task in need.tasks]
    alone = [task.name for task in tasks if task.is_soak or task.kernel not in ("", PORTABLE)]
    others = [task.name for task in tasks if task.name not in alone]
    for verdict in run.verify("verifying ops", others, verify_.verify_by_name, processes):
        keeper.note(verdict)
    for verdict in run.verify(f"verifying kernels for {arch}", alone, verify_.verify_by_name, 1, OWN_SECONDS):
        keeper.note(verdict)
    if layers is not None:
        # processes that are kept have asked runtime.trust nothing yet: ops are verified with what was chosen
        list(run.verify("verifying layers", list(layers.KINDS), layers.verify_layer, processes))


def _isolated(names: Sequence[str], function: Callable[[str], Any], workers: int) -> Iterator[Any]:
    from cute_kernels.runtime.isolated import TIMEOUT_SECONDS, run_isolated

    return run_isolated(names, function, TIMEOUT_SECONDS, workers)


class Keeper:
    """Keeps the verdict on each own kernel once all that concerns it has run: its examples, and its soak."""

    def __init__(self, run: Run, needs: Sequence[Any], lost: Sequence[Any]) -> None:
        import torch

        from cute_kernels.runtime import trust

        self.run, self.device = run, torch.cuda.current_device()
        self.left: dict[tuple[str, str], int] = {}
        self.seen: dict[tuple[str, str], list[Any]] = {}
        for task in (task for need in needs for task in need.tasks):
            self.left[task.op, task.kernel] = self.left.get((task.op, task.kernel), 0) + 1
        try:
            before = trust.verdicts(self.device)
        except ImportError as error:
            run.problem = str(error)
            return
        # what was known of kernels that are not asked for any more, or of ops whose kernels were not found
        failed = {verdict.name: verdict.detail for verdict in lost}
        for op, kernel in ((op, kernel) for op, kernels in before.items() for kernel in kernels):
            if op in failed:
                self.keep(op, kernel, "fail", 0, failed[op])
            elif any(need.name == op for need in needs) and (op, kernel) not in self.left:
                self.keep(op, kernel, "unsupported", 0, "")

    def note(self, verdict: Any) -> None:
        from cute_kernels.runtime.verify import PORTABLE, Task

        task = Task.of(verdict.name)
        if task.kernel in ("", PORTABLE) or verdict.status == "not run":
            return
        which = task.op, task.kernel
        seen = self.seen.setdefault(which, [])
        seen.append(verdict)
        if len(seen) < self.left[which]:
            return
        bad = next((v for v in seen if v.status == "fail"), None)
        decisive = next((v for v in seen if not Task.of(v.name).is_soak), verdict) if bad is None else bad
        self.keep(*which, decisive.status, decisive.cases, decisive.detail)

    def keep(self, op: str, kernel: str, status: str, cases: int, detail: str) -> None:
        from cute_kernels.runtime import trust

        try:
            problem = trust.keep(op, kernel, self.device, status, cases, detail)
        except ImportError as error:
            problem = str(error)
        self.run.problem = self.run.problem or problem


def _compile(keys: Sequence[Any], soaked: Sequence[Any], workers: int | None, delayed: Path) -> None:
    """Have the kernels in the cache, and those that are soaked with delays in a folder. What does not compile fails
    again where it is verified."""
    from cute_kernels.runtime import cache
    from cute_kernels.runtime.compile import jit_forbidden
    from cute_kernels.runtime.precompile import precompile

    folder = cache.default_directory()
    if folder is None or jit_forbidden():
        return
    is_over = threading.Event()

    def with_delays() -> None:
        for _ in precompile(soaked, delayed, workers, True):
            if is_over.is_set():
                return

    # those of tensor cores first: they take longest
    keys = sorted(dict.fromkeys(keys), key=lambda key: not any("mma" in name for name in key.instructions))
    with ThreadPoolExecutor(1) as beside:
        soaks = beside.submit(with_delays)
        try:
            for _ in with_progress(precompile(keys, folder.resolve(), workers, False), len(keys), "compiling"):
                pass
            soaks.result()
        finally:
            is_over.set()


@contextlib.contextmanager
def _folder_for_kernels() -> Iterator[str]:
    """Inside, the kernel cache is a folder that can be written: the user's, or else a temporary one, unless kernels
    must come from the user's. Yields what is wrong with the user's, or ""."""
    from cute_kernels.runtime import cache
    from cute_kernels.runtime.compile import jit_forbidden

    before, problem = os.environ.get(cache.DIRECTORY_VARIABLE), ""
    folder = cache.default_directory()
    try:
        if folder is None:
            raise OSError(f"there is no kernel cache ({cache.DIRECTORY_VARIABLE})")
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        problem = str(error)
    if not problem or jit_forbidden():
        yield problem
        return
    with tempfile.TemporaryDirectory() as instead:
        os.environ[cache.DIRECTORY_VARIABLE] = instead
        try:
            yield problem
        finally:
            if before is None:
                del os.environ[cache.DIRECTORY_VARIABLE]
            else:
                os.environ[cache.DIRECTORY_VARIABLE] = before


def _layers() -> Any:
    """The layers are built on this package: they are looked up by name, and only here."""
    if importlib.util.find_spec("cute_kernels.layers") is None:
        raise Refusal("--layers: the package cute_kernels.layers is not installed")
    return importlib.import_module("cute_kernels.layers.verify")


def report_verdicts(run: Run, gpu: str, arch: str, as_json: bool) -> int:
    """Print the verdicts; 1 if any is a failure, or an op with a kernel has no examples."""
    from cute_kernels.runtime.verify import RANKS

    order = ("fact ", "", "layer ")
    verdicts = sorted(
        run.verdicts, key=lambda v: (max(i for i, prefix in enumerate(order) if v.name.startswith(prefix)), v.name)
    )
    status = 1 if any(v.status in BAD for v in verdicts) else 0
    if run.interrupted:
        status = INTERRUPTED
    if as_json:
        found = [{**vars(v), "seconds": round(v.seconds, 3)} for v in verdicts]
        print_json(
            {
                "gpu": gpu,
                "arch": arch,
                "interrupted": run.interrupted,
                "seconds": {what: round(seconds, 1) for what, seconds in run.seconds.items()},
                "deployment": {"kernels": run.deployed, "not_run": run.not_run},
                "verdicts": found,
            }
        )
        return status
    console = Console(soft_wrap=True, highlight=False)
    console.print(f"{gpu}, {arch}")
    for v in verdicts:
        cases = f", {v.cases} examples in {v.seconds:.1f} s" if v.cases else ""
        console.print(f"  [{STYLES.get(v.status, 'dim')}]{v.status:11}[/] {v.name}{cases}")
        if v.detail:
            console.print(f"              [dim]{escape(v.detail)}[/]")
    if run.deployed:
        ran = run.deployed - len(run.not_run)
        of = f"{run.deployed} kernels that models need on 1 to {RANKS[-1]} ranks"
        console.print(f"{ran} of {of} ran" + " (--json: which not)" * bool(run.not_run))
    counts = {status: sum(v.status == status for v in verdicts) for status in dict.fromkeys(v.status for v in verdicts)}
    console.print(", ".join(f"{count} {status}" for status, count in counts.items()))
    return status
