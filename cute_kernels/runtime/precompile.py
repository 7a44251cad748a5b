# SPDX-License-Identifier: Apache-2.0
"""Compile many kernels into a folder, in processes that see no GPU: CuTe DSL compiles one at a time in each."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from cute_kernels.runtime import cache
from cute_kernels.runtime import compile as compile_
from cute_kernels.runtime.key import KernelKey
from cute_kernels.runtime.report import Facts, problems

Result = TypeVar("Result")


@dataclass(frozen=True)
class Outcome:
    """What became of one key.

    status     "compiled", "cached" (the folder had it) or "failed"
    facts      figures of the code, None if it failed
    problems   what is wrong with the code, or why there is none
    seconds    what it took this time
    """

    key: KernelKey
    status: str
    facts: Facts | None
    problems: tuple[str, ...]
    seconds: float


def precompile(
    keys: Iterable[KernelKey], folder: Path, workers: int | None = None, delayed: bool = False
) -> Iterator[Outcome]:
    """Compile the keys that `folder` does not hold yet; yields an outcome per key as they come.

    workers   processes; None: one per usable core
    delayed   with the delays of dsl.delays: the folder must be one for such kernels alone
    """
    store = cache.Store(folder)
    todo = []
    for key in dict.fromkeys(keys):
        start = time.perf_counter()
        try:
            facts = store.read(key).facts
        except cache.Miss:
            todo.append(key)
        else:
            yield Outcome(key, "cached", facts, tuple(problems(key, facts)), time.perf_counter() - start)
    for key, result in in_processes(compile_one, todo, str(folder), workers, delayed):
        yield result if isinstance(result, Outcome) else Outcome(key, "failed", None, (result,), 0.0)


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def in_processes(
    work: Callable[[KernelKey], Result],
    keys: Iterable[KernelKey],
    folder: str,
    workers: int | None = None,
    delayed: bool = False,
) -> Iterator[tuple[KernelKey, Result | str]]:
    """Each key once, with what work(key) made of it in a process that sees no GPU, or why there is nothing, as they
    come.

    folder    those processes' kernel cache; empty: they have none
    workers   processes; None: one per usable core
    delayed   as of `precompile`
    """
    keys = list(dict.fromkeys(keys))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["cute_kernels.runtime.compile"])
    for arch in dict.fromkeys(key.arch for key in keys):
        of_arch = [key for key in keys if key.arch == arch]
        count = max(1, min(len(of_arch), usable_cores() if workers is None else workers))
        with ProcessPoolExecutor(count, context, _blind, (arch, folder, delayed)) as pool:
            futures = {_submit(pool, work, key): key for key in of_arch}
            try:
                for future in as_completed(futures):
                    error = future.exception()
                    if error is None:
                        yield futures[future], future.result()
                    else:
                        died = isinstance(error, BrokenProcessPool)
                        yield futures[future], "the compiling process died" if died else repr(error)
            finally:
                # who stops reading does not wait for the rest
                pool.shutdown(cancel_futures=True)


def _submit(pool: ProcessPoolExecutor, work: Callable[[KernelKey], Result], key: KernelKey) -> Future[Result]:
    """The result to come. A pool whose workers have died takes no more work: then that is what the future holds."""
    try:
        return pool.submit(work, key)
    except BrokenProcessPool as error:
        refused: Future[Result] = Future()
        refused.set_exception(error)
        return refused


def _blind(arch: str, folder: str, delayed: bool) -> None:
    """Before anything in this process looks for a GPU: there is none, and the target is `arch`. Of Ctrl-C hears the
    process that asks, which ends this one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ["CUTE_DSL_ARCH"] = arch
    os.environ[compile_.JIT_VARIABLE] = "allow"
    os.environ[cache.DIRECTORY_VARIABLE] = folder
    if delayed:
        from cute_kernels.dsl.delays import add_delays

        add_delays()


def compile_one(key: KernelKey) -> Outcome:
    """Have `key` in the disk cache of this process."""
    start = time.perf_counter()
    before = compile_.compilations()
    store = cache.current()
    try:
        facts = compile_.prepare(key)
        status = "compiled" if compile_.compilations() > before else "cached"
        if store is None:
            raise RuntimeError(f"there is no disk cache ({cache.DIRECTORY_VARIABLE})")
        store.read(key)
        found = problems(key, facts)
    except Exception as error:
        reason = str(error).strip() or type(error).__name__
        return Outcome(key, "failed", None, (reason,), time.perf_counter() - start)
    return Outcome(key, status, facts, tuple(found), time.perf_counter() - start)
