# SPDX-License-Identifier: Apache-2.0
"""Work that may hang, crash or spoil the GPU's context, in processes of their own: what breaks there breaks alone."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from cute_kernels.runtime.precompile import usable_cores
from cute_kernels.runtime.verify import Verdict

TIMEOUT_SECONDS = 300.0
"""After this a verification has hung. The first call of an op may compile its kernels."""

START_SECONDS = 120.0
"""How long a new process may take to import what it needs."""

END_SECONDS = 20.0
"""How long a process that was killed may take to end. One that hangs in the driver may never: it is given up then, and
so is what has not begun, since the GPU is not likely to answer others."""

_given_up: list[Any] = []

_idle: list[_Worker] | None = None
"""Processes inside `kept_processes` that have nothing to do."""


def has_given_up() -> bool:
    """Whether a process is left that could not be ended: to wait for it at exit would never end either."""
    return bool(_given_up)


@contextlib.contextmanager
def kept_processes() -> Iterator[None]:
    """Inside, processes that have done all their work wait for the next `run_isolated`: to start one takes longer than
    to verify an op."""
    global _idle
    _idle = []
    try:
        yield
    finally:
        kept, _idle = _idle, None
        for worker in kept:
            worker.stop()


def run_isolated(
    names: Iterable[str], function: Callable[[str], Any], timeout: float = TIMEOUT_SECONDS, workers: int = 1
) -> Iterator[Any]:
    """What function(name), which must be importable, returns for each name, as results come: with one worker in the
    order of the names. A name whose process breaks gets a Verdict that says how, and the process is replaced.

    workers   processes at a time
    """
    names = list(names)
    workers = max(1, min(workers, len(names)))
    pool = _Pool(names, function, timeout, workers)
    threads = [threading.Thread(target=pool.serve, daemon=True) for _ in range(workers)]
    try:
        for thread in threads:
            thread.start()
        for _ in names:
            yield _read(*pool.done.get())
        pool.keep()
    finally:
        pool.stopped.set()
        while True:
            pool.stop()
            if _given_up or not any(thread.is_alive() for thread in threads):
                break
            time.sleep(0.05)
        pool.stop()


def _read(name: str, answer: bytes | Verdict) -> Any:
    """What a process answered. Done by the caller's thread: to read it may import modules, which several threads at a
    time could find half imported."""
    if isinstance(answer, Verdict):
        return answer
    try:
        return pickle.loads(answer)
    except Exception as error:
        return Verdict(name, "fail", detail=f"the answer cannot be read: {error!r}")


class _Pool:
    """Names to be worked on, and the processes that do it, each served by a thread."""

    def __init__(self, names: Iterable[str], function: Callable[[str], Any], timeout: float, workers: int) -> None:
        self.function = function
        self.timeout = timeout
        self.context = multiprocessing.get_context("spawn")
        self.cores = max(1, usable_cores() // workers)
        self.todo, self.done = queue.SimpleQueue[str](), queue.SimpleQueue[tuple[str, bytes | Verdict]]()
        for name in names:
            self.todo.put(name)
        self.workers: list[_Worker] = []
        self.starting = threading.Lock()
        self.stopped = threading.Event()

    def serve(self) -> None:
        worker: _Worker | None = None
        while not self.stopped.is_set():
            try:
                name = self.todo.get_nowait()
            except queue.Empty:
                return
            try:
                if _given_up:
                    self.done.put((name, Verdict(name, "not run", detail="the GPU does not answer any more")))
                    continue
                if worker is None or not worker.process.is_alive():
                    worker = self.start()
                self.done.put((name, worker.ask(self.function, name, self.timeout)))
            except Exception as error:
                self.done.put((name, Verdict(name, "fail", detail=f"no process: {error!r}")))

    def start(self) -> _Worker:
        with self.starting:
            worker = _idle.pop() if _idle else _Worker(self.context)
            self.workers.append(worker)
        worker.cores = self.cores
        return worker

    def keep(self) -> None:
        """All work is done: leave processes that may be kept to others."""
        with self.starting:
            if _idle is not None:
                _idle.extend(worker for worker in self.workers if worker.process.is_alive())
                self.workers.clear()

    def stop(self) -> None:
        with self.starting:
            for worker in self.workers:
                worker.stop()


class _Worker:
    """A process. cores: of the machine's, that it may use"""

    def __init__(self, context: Any) -> None:
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()
        self.ready, self.cores = False, 1

    def ask(self, function: Callable[[str], Any], name: str, timeout: float) -> bytes | Verdict:
        """What the process answers, pickled, or what is wrong with it."""
        try:
            if not self.ready:
                if not self.connection.poll(START_SECONDS):
                    what = f"the process did not start within {START_SECONDS:g} s"
                    return Verdict(name, "fail", detail=f"{what}: {self.stop()}")
                self.ready = self.connection.recv()
            self.connection.send((function, name, self.cores))
            if not self.connection.poll(timeout):
                return Verdict(name, "fail", detail=f"no answer within {timeout:g} s: {self.stop()}")
            answer = self.connection.recv_bytes()
            if not self.connection.recv():
                self.process.join()
            return answer
        except (EOFError, OSError):
            self.process.join()
            if self.process.exitcode in (-signal.SIGTERM, -signal.SIGHUP):  # a scheduler ends all processes at once
                return Verdict(name, "not run", detail="its process was told to end")
            return Verdict(name, "fail", detail=f"the process died with exit code {self.process.exitcode}")

    def stop(self) -> str:
        """End the process. "stopped", or that it could not be."""
        if self in _given_up:
            return "given up"
        self.process.kill()
        self.process.join(END_SECONDS)
        if not self.process.is_alive():
            return "stopped"
        _given_up.append(self)
        return f"given up, process {self.process.pid} does not end"


def _serve(connection: Any) -> None:
    # of Ctrl-C hears the process that asks, which ends this one
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection.send(True)
    while True:
        try:
            function, name, cores = connection.recv()
        except EOFError:
            return
        torch.set_num_threads(cores)
        connection.send(function(name))
        sound = _device_is_sound()
        connection.send(sound)
        if not sound:
            os._exit(1)


def _device_is_sound() -> bool:
    """Whether the GPU still answers this process: after an illegal access it does not."""
    if not torch.cuda.is_initialized():
        return True
    try:
        torch.cuda.synchronize()
        return True
    except Exception:
        return False
