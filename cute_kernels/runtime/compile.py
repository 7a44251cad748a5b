# SPDX-License-Identifier: Apache-2.0
"""From a kernel's key to the function that launches it, and to a report on what the compiler made of it.

A key is a frozen dataclass that names everything the machine code depends on, the architecture first; two calls with
equal keys run the same code. Compiling takes no tensors, so a machine without a GPU takes exactly the path a server
takes: compile, export an object, link the object. What runs is always such an object, from the disk cache
(runtime.cache) if it holds one, so that a kernel compiled ahead and one compiled on the spot are the same bytes.

CuTe DSL is imported when something is compiled or loaded, never before.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch

from cute_kernels.runtime import cache
from cute_kernels.runtime.key import KernelKey
from cute_kernels.runtime.log import logger
from cute_kernels.runtime.report import Facts, Report, find_nvdisasm, make_report

__all__ = [
    "Facts",
    "KernelKey",
    "Report",
    "call",
    "collect",
    "compilations",
    "compile_object",
    "compile_report",
    "disk_loads",
    "find_nvdisasm",
    "function",
    "is_calling",
    "is_ready",
    "launch",
    "prepare",
    "record_launches",
]

JIT_VARIABLE = "CUTE_KERNELS_JIT"

_linked: dict[KernelKey, Callable[..., None]] = {}
_functions: dict[int, dict[KernelKey, Callable[..., None]]] = {}
"""By device: the driver loads code for each of them by itself."""

_collected: dict[KernelKey, None] | None = None
"""Keys that were asked for inside `collect`, or None outside."""

_instead: Mapping[KernelKey, KernelKey] = {}
"""Inside `substitute`, the keys of the kernels that run in the place of others."""

_lock = threading.RLock()
"""Of the tables above; held for moments."""

_key_locks: dict[KernelKey, threading.RLock] = {}
"""Held while a key is looked for on disk, waited for or compiled: other keys go their way."""

_compiler = threading.RLock()
"""CuTe DSL compiles one kernel at a time."""

_linker = threading.Lock()
"""Objects are loaded one at a time, but beside a compilation."""

COMPILER_SECONDS = 1800.0
"""How long a thread waits for kernels that others compile, before it gives up."""

_compilations = 0
_disk_loads = 0


def compilations() -> int:
    """How many kernels this process has compiled for launching or for the disk cache so far (reports do not count)."""
    return _compilations


def disk_loads() -> int:
    """How many kernels this process has taken from the disk cache so far."""
    return _disk_loads


def is_ready(key: KernelKey) -> bool:
    """Whether launching `key` needs neither compiler nor disk."""
    return key in _linked


def function(key: KernelKey, device_index: int = 0) -> Callable[..., None]:
    """The launchable function of `key`: from memory, from the disk cache, or compiled now.

    It takes torch tensors and numbers in the order of the key's fake arguments, without the stream: it runs on torch's
    current stream, on the device of that number. Raises RuntimeError if it is not in memory and the current stream is
    being captured, or if it would have to be compiled and CUTE_KERNELS_JIT=forbid.
    """
    of_device = _functions.get(device_index)
    found = None if of_device is None else of_device.get(key)
    return found if found is not None else _obtain(key, device_index)


class _Recorder(threading.local):
    """The launches of this thread inside `record_launches`, or None; and whether a `call` is running."""

    launches: list[tuple[KernelKey | Callable[..., None], int, tuple[Any, ...]]] | None = None
    is_calling = False


_recorder = _Recorder()


@contextlib.contextmanager
def record_launches() -> Iterator[list[tuple[KernelKey | Callable[..., None], int, tuple[Any, ...]]]]:
    """Inside, this thread's launches run and are noted as well: the arguments of each `launch` and `call`, in order.

    A caller that keeps the tensors of these arguments alive may repeat the launches through `function`, without the ops
    that made them. Not reentrant.
    """
    if _recorder.launches is not None:
        raise RuntimeError("record_launches: a recording is already active in this thread")
    launches: list[tuple[KernelKey | Callable[..., None], int, tuple[Any, ...]]] = []
    _recorder.launches = launches
    try:
        yield launches
    finally:
        _recorder.launches = None


@contextlib.contextmanager
def watch_launches() -> Iterator[list[tuple[KernelKey | Callable[..., None], int, tuple[Any, ...]]]]:
    """As `record_launches`, which may be active: the list has this thread's launches afterwards."""
    if _recorder.launches is None:
        with record_launches() as launches:
            yield launches
        return
    before, seen = len(_recorder.launches), list(_recorder.launches[:0])
    yield seen
    seen += _recorder.launches[before:]


def call(body: Callable[..., None], device_index: int, *args: Any) -> None:
    """Run `body(*args)`, which launches kernels of other libraries on the current stream and allocates nothing, as a
    launch that `record_launches` notes."""
    if _recorder.launches is not None:
        _recorder.launches.append((body, device_index, args))
    before, _recorder.is_calling = _recorder.is_calling, True
    try:
        body(*args)
    finally:
        _recorder.is_calling = before


def is_calling() -> bool:
    """Whether this thread is inside a `call`."""
    return _recorder.is_calling


def launch(key: KernelKey, device_index: int, *args: Any) -> None:
    """Run the kernel of `key` on the current stream of the given device, whichever device is current."""
    if _recorder.launches is not None:
        _recorder.launches.append((key, device_index, args))
    if device_index == torch.cuda.current_device():
        function(key, device_index)(*args)
        return
    with torch.cuda.device(device_index):
        function(key, device_index)(*args)


def hold_tensors(arguments: list[Any], changing: Collection[int] = ()) -> None:
    """Put handles in the place of tensors among a kernel's arguments, which a launch would make for itself each time.
    What changes stays a tensor, and one in any case: by it the launch finds its stream."""
    from tvm_ffi import from_dlpack

    fixed = [i for i, value in enumerate(arguments) if isinstance(value, torch.Tensor) and i not in changing]
    for i in fixed if changing else fixed[1:]:
        arguments[i] = from_dlpack(arguments[i])


@contextlib.contextmanager
def collect() -> Iterator[dict[KernelKey, None]]:
    """Inside, launches do nothing but note the keys of their kernels, in the mapping that is yielded: so the kernels of
    calls can be compiled ahead, without running them. Not thread-safe."""
    global _functions, _collected
    before = _functions, _collected
    _functions, _collected = {}, {}
    try:
        yield _collected
    finally:
        _functions, _collected = before


@contextlib.contextmanager
def substitute(instead: Mapping[KernelKey, KernelKey]) -> Iterator[None]:
    """Inside, launches of some kernels run others, which take the same arguments (KernelKey.tuning). Not
    thread-safe."""
    global _functions, _instead
    before = _functions, _instead
    _functions, _instead = {}, instead
    try:
        yield
    finally:
        _functions, _instead = before


def _do_nothing(*args: Any) -> None:
    """In place of a kernel inside `collect`."""


@contextlib.contextmanager
def use_folder(folder: str) -> Iterator[None]:
    """Inside, kernels come from the kernel cache in another folder and nowhere else, whatever is loaded. Not
    thread-safe."""
    global _functions, _linked
    before = _functions, _linked
    inside = {cache.DIRECTORY_VARIABLE: folder, JIT_VARIABLE: "forbid"}
    outside = {name: os.environ.get(name) for name in inside}
    _functions, _linked = {}, {}
    os.environ.update(inside)
    try:
        yield
    finally:
        _functions, _linked = before
        for name, value in outside.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def jit_forbidden() -> bool:
    """Whether only kernels from the disk cache may run (CUTE_KERNELS_JIT=forbid)."""
    value = os.environ.get(JIT_VARIABLE, "allow")
    if value not in ("allow", "forbid"):
        raise ValueError(f"{JIT_VARIABLE}: expected 'allow' or 'forbid', got {value!r}")
    return value == "forbid"


def prepare(key: KernelKey) -> Facts:
    """Have `key` in the disk cache, compiling it if need be, and say what it is made of. Links and launches nothing."""
    return _entry(key).facts


class _FirstLaunch:
    """A linked function that has not run on a device yet. Its first launch there makes the driver load the code, then
    it steps aside."""

    def __init__(self, key: KernelKey, device_index: int, raw: Callable[..., None]) -> None:
        self.key, self.device_index, self.raw = key, device_index, raw

    def __call__(self, *args: Any) -> None:
        with _relaxed_capture():
            self.raw(*args)
        _functions[self.device_index][self.key] = self.raw


@contextlib.contextmanager
def _relaxed_capture() -> Iterator[None]:
    """Let this thread load code although it, or another thread, captures a CUDA graph: by default that is an error."""
    if not torch.cuda.is_available():
        yield
        return
    import cuda.bindings.driver as driver

    def exchange(mode: Any) -> Any:
        error, before = driver.cuThreadExchangeStreamCaptureMode(mode)
        if error != driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"cuThreadExchangeStreamCaptureMode: {error}")
        return before

    before = exchange(driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)
    try:
        yield
    finally:
        exchange(before)


def _capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _obtain(key: KernelKey, device_index: int) -> Callable[..., None]:
    with _lock:
        if _collected is not None:
            _collected[key] = None
            return _do_nothing
        of_device = _functions.setdefault(device_index, {})
    raw = _link_once(_instead.get(key, key))
    with _lock:
        return of_device.setdefault(key, _FirstLaunch(key, device_index, raw))


@contextlib.contextmanager
def _held(lock: threading.RLock, what: str) -> Iterator[None]:
    if not lock.acquire(timeout=COMPILER_SECONDS):
        raise RuntimeError(f"{what}: another thread of this process has been compiling for {COMPILER_SECONDS:.0f} s")
    try:
        yield
    finally:
        lock.release()


def _lock_of(key: KernelKey) -> contextlib.AbstractContextManager[None]:
    with _lock:
        lock = _key_locks.setdefault(key, threading.RLock())
    return _held(lock, str(key))


def _link_once(key: KernelKey) -> Callable[..., None]:
    if key in _linked:
        return _linked[key]
    if _capturing():
        raise RuntimeError(
            f"{key}: this kernel is not loaded yet, and nothing is compiled or loaded while a CUDA graph is "
            f"captured. Before the capture, call cute_kernels.warmup(config, tp=..., arch={key.arch!r}), or the op "
            "once with the same formats on the same device."
        )
    with _lock_of(key):
        if key in _linked:
            return _linked[key]
        entry = _entry(key)
        start = time.perf_counter()
        try:
            raw = _link(entry)
        except Exception as error:
            if not entry.from_disk:
                raise
            if jit_forbidden():
                raise RuntimeError(f"{key}: its object in the kernel cache does not load: {error}") from error
            raw = _link(_compile_entry(key, cache.current(), f"its object does not load: {error}"))
        logger.info("%s: loaded in %.1f ms", key.identity, 1e3 * (time.perf_counter() - start))
        _linked[key] = raw
        return raw


def _entry(key: KernelKey) -> cache.Entry:
    """The object of `key`, from the disk cache or compiled into it. Of several processes that want it, one compiles."""
    with _lock_of(key):
        store = cache.current()
        miss = "there is no kernel cache"
        if store is not None:
            try:
                return _read(store, key)
            except cache.Miss as error:
                miss = str(error)
        if jit_forbidden():
            elsewhere = "" if store is None else store.explain(key)
            raise RuntimeError(
                f"{key}: {JIT_VARIABLE}=forbid, and the kernel is not in the cache: {miss}. {elsewhere}"
                f"Compile it ahead with python -m cute_kernels precompile --arch {key.arch} --model NAME --tp N "
                f"--out DIR, and set {cache.DIRECTORY_VARIABLE}=DIR."
            )
        lock = None if store is None else store.acquire(key)
        if store is None or lock is None:
            return _compile_entry(key, None, miss)
        try:
            with contextlib.suppress(cache.Miss):
                return _read(store, key)  # another process compiled it while this one waited
            return _compile_entry(key, store, miss)
        finally:
            lock.release()


def _read(store: cache.Store, key: KernelKey) -> cache.Entry:
    global _disk_loads
    entry = store.read(key)
    with _lock:
        _disk_loads += 1
    logger.info("%s: in the kernel cache, %s", key.identity, store.root)
    return entry


def _compile_entry(key: KernelKey, store: cache.Store | None, why: str) -> cache.Entry:
    global _compilations
    logger.info("%s: compiling it: %s", key.identity, why)
    data, report = compile_object(key)
    with _lock:
        _compilations += 1
    logger.info("%s: compiled in %.1f s, %d registers", key.identity, report.seconds, report.registers)
    if store is not None:
        store.write(key, data, report.facts)
    return cache.Entry(data, key.symbol, report.facts, from_disk=False)


def compile_object(key: KernelKey) -> tuple[bytes, Report]:
    """Compile `key`: the object that `_link` loads, and the report. Needs no GPU, keeps nothing."""
    with _held(_compiler, str(key)), tempfile.TemporaryDirectory() as folder:
        compiled, report = _compile(key, folder, cache.COMPILE_FLAGS)
        path = os.path.join(folder, "kernel.o")
        compiled.export_to_c(object_file_path=path, function_name=key.symbol)
        with open(path, "rb") as f:
            return f.read(), report


def compile_report(key: KernelKey) -> Report:
    """Compile the device's code of `key`, without keeping the result, and say what came out. Needs no GPU. The host's
    code, that checks arguments and launches, is not made: a fifth of what a small kernel takes."""
    with _held(_compiler, str(key)), tempfile.TemporaryDirectory() as folder:
        return _compile(key, folder, "")[1]


def _compile(key: KernelKey, folder: str, flags: str) -> tuple[Any, Report]:
    import cutlass.cute as cute

    _silence_dsl()
    remarks = os.path.join(folder, "remarks.yaml")
    options = (
        f"{flags} --gpu-arch {key.arch} --keep-ptx --keep-cubin --dump-dir {folder} "
        f"--remark-filter ptxas --remark-output {remarks}"
    )
    start = time.perf_counter()
    try:
        with _without_locations():
            entry, arguments = key.build()
            compiled = cute.compile(entry, *arguments, options=options)
    except Exception:
        # once more, for a message that names the line
        entry, arguments = key.build()
        compiled = cute.compile(entry, *arguments, options=options)
    seconds = time.perf_counter() - start
    with open(remarks) as f:
        return compiled, make_report(key, f.read(), compiled.__ptx__, compiled.__cubin__, seconds)


@contextlib.contextmanager
def _without_locations() -> Iterator[None]:
    """Inside, the DSL does not look up the source line of every operation it builds, a third of what compiling takes.
    It does so for remarks, though those of ptxas name no line; with CUTE_DSL_LINEINFO lines are wanted. Versions of the
    DSL without this switch compile as ever."""
    import cutlass.base_dsl.dsl as dsl

    switch = getattr(dsl, "_set_enable_frame_filtering", None)
    if switch is None or os.environ.get("CUTE_DSL_LINEINFO"):
        yield
        return
    dsl._set_enable_frame_filtering = lambda enable: switch(False)
    try:
        yield
    finally:
        dsl._set_enable_frame_filtering = switch


def _silence_dsl() -> None:
    """The DSL warns of long loops that are unrolled: ours are meant to be, and who runs a kernel cannot change that. It
    says nothing by default; this holds where the process has reset its filters since."""
    from cutlass.base_dsl.ast_helpers import DSLOptimizationWarning

    if not os.environ.get("CUTE_DSL_ENABLE_OPTIMIZATION_WARNINGS"):
        warnings.filterwarnings("ignore", category=DSLOptimizationWarning)


def _link(entry: cache.Entry) -> Callable[..., None]:
    """The function inside an object: raw, without a wrapper for keyword arguments, which doubles the time of a call."""
    import cutlass.cute as cute

    # a file of our own: nobody can exchange it between the check of its bytes and their use
    with _linker, tempfile.NamedTemporaryFile(suffix=".o") as f:
        f.write(entry.data)
        f.flush()
        function: Callable[..., None] = getattr(cute.runtime.load_module(f.name, enable_tvm_ffi=True), entry.symbol)
    return function
