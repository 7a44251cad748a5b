# SPDX-License-Identifier: Apache-2.0
"""`python -m cute_kernels verify`: every kernel against its reference on the GPU at hand, and the verdicts kept.

First what all ops need is found out, by calling everything but the kernels, and compiled in many processes. On a
Blackwell, what its kernels take for granted about instructions is tried then, one by one (cute_kernels.isa_probes). Ops
with one kernel are then verified side by side. Where a kernel of the architecture's own, which may never have run, has
a portable one beside it, both are verified, alone on the GPU. Layers come last, with the kernels that are trusted then.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.markup import escape

from cute_kernels.cli import PROGRAM, STYLES, Refusal, print_json, with_progress

OWN_SECONDS = 120.0
"""After this a kernel that may never have run before hangs: what it needs is compiled by then."""

MOST_PROCESSES = 4
"""That use the GPU at a time: each holds a context of some hundred MB, and its references want cores."""


def verify(options: argparse.Namespace) -> int:
    import torch

    from cute_kernels.runtime.arch import arch_of
    from cute_kernels.runtime.registry import all_ops

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
    with _folder_for_kernels() as problem:
        verdicts, kept = _verify(chosen, arch, layers, options.workers)
    status = report_verdicts(verdicts, torch.cuda.get_device_name(), arch, options.json)
    if problem or kept:
        print(f"{PROGRAM} verify: the verdicts were not kept: {problem or kept}", file=sys.stderr)
    return status


def _verify(ops: Sequence[str], arch: str, layers: Any, workers: int | None) -> tuple[list[Any], str]:
    """Verdicts of the facts, the ops and the layers, and why they could not be kept, or ""."""
    from cute_kernels.isa_probes import check
    from cute_kernels.runtime.verify import PORTABLE, Needs, Verdict, needs_by_name, verify_by_name

    processes = max(1, min(MOST_PROCESSES, (os.cpu_count() or 1) // 2))
    what = "finding kernels"
    found = _run(what, ops, needs_by_name, processes)
    needs = [need for need in found if isinstance(need, Needs)]
    # whether such an op has a choice is not known: nothing of it is verified, it has failed
    verdicts = [replace(v, detail=f"{what}: {v.detail}") for v in found if isinstance(v, Verdict)]
    keys = [key for need in needs for key in need.keys]
    _compile([*check.keys(arch), *keys, *(() if layers is None else layers.keys(arch))], workers)
    facts = _run("verifying facts", check.NAMES, check.verify_fact, processes) if arch in check.ARCHS else []
    with_choice = [need.name for need in needs if need.has_choice]
    alone = [need.name for need in needs if not need.has_choice]
    verdicts += _run("verifying ops", alone, verify_by_name, processes)
    both = [op + kernel for op in with_choice for kernel in ("", PORTABLE)]
    verdicts += _run(f"verifying kernels for {arch}", both, verify_by_name, timeout=OWN_SECONDS)
    verdicts.sort(key=lambda verdict: verdict.name)
    problem = _keep(verdict for verdict in verdicts if not verdict.name.endswith(PORTABLE))
    if layers is not None:
        verdicts += _run("verifying layers", list(layers.KINDS), layers.verify_layer, processes)
    return facts + verdicts, problem


def _run(
    what: str, names: Sequence[str], function: Callable[[str], Any], workers: int = 1, timeout: float | None = None
) -> list[Any]:
    """Results of function(name) in the order of the names."""
    from cute_kernels.runtime.isolated import TIMEOUT_SECONDS, run_isolated

    results = run_isolated(names, function, TIMEOUT_SECONDS if timeout is None else timeout, workers)
    found = list(with_progress(results, len(names), what))
    return sorted(found, key=lambda result: names.index(result.name))


def _keep(verdicts: Iterable[Any]) -> str:
    import torch

    from cute_kernels.runtime import trust

    device = torch.cuda.current_device()
    try:
        problems = [trust.keep(v.name, device, v.status, v.own, v.detail) for v in verdicts if v.status != "no kernel"]
    except ImportError as error:
        return str(error)
    return next(filter(None, problems), "")


def _compile(keys: Sequence[Any], workers: int | None) -> None:
    """Have the kernels in the cache. What does not compile fails again where it is verified."""
    from cute_kernels.runtime import cache
    from cute_kernels.runtime.compile import jit_forbidden
    from cute_kernels.runtime.precompile import precompile

    folder = cache.default_directory()
    if folder is None or jit_forbidden():
        return
    # those of tensor cores first: they take longest
    keys = sorted(dict.fromkeys(keys), key=lambda key: not any("mma" in name for name in key.instructions))
    for _ in with_progress(precompile(keys, folder.resolve(), workers), len(keys), "compiling"):
        pass


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


def report_verdicts(verdicts: Sequence[Any], gpu: str, arch: str, as_json: bool) -> int:
    """Print the verdicts; 1 if any is a failure, or an op with a kernel has no examples."""
    bad = [v for v in verdicts if v.status in ("fail", "no examples")]
    if as_json:
        print_json(
            {"gpu": gpu, "arch": arch, "verdicts": [{**vars(v), "seconds": round(v.seconds, 3)} for v in verdicts]}
        )
        return 1 if bad else 0
    console = Console(soft_wrap=True, highlight=False)
    console.print(f"{gpu}, {arch}")
    for v in verdicts:
        cases = f", {v.cases} examples in {v.seconds:.1f} s" if v.cases else ""
        console.print(f"  [{STYLES.get(v.status, 'dim')}]{v.status:11}[/] {v.name}{cases}")
        if v.detail:
            console.print(f"              [dim]{escape(v.detail)}[/]")
    counts = {status: sum(v.status == status for v in verdicts) for status in dict.fromkeys(v.status for v in verdicts)}
    console.print(", ".join(f"{count} {status}" for status, count in counts.items()))
    return 1 if bad else 0
