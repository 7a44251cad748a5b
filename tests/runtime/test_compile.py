# SPDX-License-Identifier: Apache-2.0
"""From a key to a function: memory, disk, compiler, and the rules between them. No kernel is launched here."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import filelock
import pytest
import torch

from cute_kernels.runtime import cache
from cute_kernels.runtime import compile as compile_
from cute_kernels.runtime.key import KernelKey
from cute_kernels.runtime.report import Report
from tests.runtime.test_cache import ENVIRONMENT

ROOT = Path(__file__).parent.parent.parent


@dataclass(frozen=True)
class Key(KernelKey):
    kernel_name: ClassVar[str] = "tests.compile"
    rows: int = 1


class Compiler:
    """Stands in for CuTe DSL: objects are the keys' names, functions note their calls."""

    def __init__(self) -> None:
        self.compiled: list[KernelKey] = []
        self.linked: list[bytes] = []
        self.calls: list[tuple[bytes, tuple[Any, ...]]] = []
        self.broken: set[bytes] = set()
        self.seconds = 0.0

    def compile_object(self, key: KernelKey) -> tuple[bytes, Report]:
        time.sleep(self.seconds)
        self.compiled.append(key)
        return key.identity.encode(), Report(32, 0, 0, 0, 0, {}, 0.5, key, "ptx", b"cubin")

    def link(self, entry: cache.Entry) -> Any:
        if entry.data in self.broken:
            self.broken.remove(entry.data)
            raise RuntimeError("symbols not found")
        self.linked.append(entry.data)
        return lambda *args: self.calls.append((entry.data, args))


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Compiler:
    """A process that has compiled nothing yet, and an empty cache folder."""
    made = Compiler()
    monkeypatch.setattr(compile_, "compile_object", made.compile_object)
    monkeypatch.setattr(compile_, "_link", made.link)
    monkeypatch.setattr(cache, "environment", lambda: dict(ENVIRONMENT))
    monkeypatch.setattr(cache, "_warned", False)
    monkeypatch.setenv(cache.DIRECTORY_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.delenv(compile_.JIT_VARIABLE, raising=False)
    forget(monkeypatch)
    return made


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a new process knows."""
    monkeypatch.setattr(compile_, "_linked", {})
    monkeypatch.setattr(compile_, "_functions", {})
    monkeypatch.setattr(compile_, "_compilations", 0)
    monkeypatch.setattr(compile_, "_disk_loads", 0)


def counts() -> tuple[int, int]:
    return compile_.compilations(), compile_.disk_loads()


def test_a_key_is_compiled_once_and_then_found(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = Key("sm_90a"), Key("sm_100a")
    assert not compile_.is_ready(one)
    first = compile_.function(one)
    assert compile_.function(one) is first
    assert compile_.is_ready(one)
    compile_.function(other)
    assert compiler.compiled == [one, other]
    assert counts() == (2, 0)
    forget(monkeypatch)
    compile_.function(one)("a", 1)
    compile_.function(one)("b")
    assert counts() == (0, 1)
    assert compiler.calls == [(one.identity.encode(), ("a", 1)), (one.identity.encode(), ("b",))]
    assert compiler.compiled == [one, other]


def test_an_edited_source_is_compiled_again(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    compile_.function(Key("sm_90a"))
    forget(monkeypatch)
    monkeypatch.setattr(cache, "SOURCES", cache.Sources(cache.PACKAGE, {"numerics.py": b"edited"}))
    compile_.function(Key("sm_90a"))
    assert counts() == (1, 0)


def test_without_a_folder_everything_is_compiled(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cache.DIRECTORY_VARIABLE, "")
    compile_.function(Key("sm_90a"))
    forget(monkeypatch)
    compile_.function(Key("sm_90a"))
    assert counts() == (1, 0)


def test_an_unusable_folder_is_no_obstacle(compiler: Compiler, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(cache.DIRECTORY_VARIABLE, str(tmp_path / "file"))
    with pytest.warns(RuntimeWarning, match="cannot keep compiled kernels"):
        compile_.function(Key("sm_90a"))()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compile_.function(Key("sm_100a"))()
    assert counts() == (2, 0)


def test_prepare_fills_the_folder_and_links_nothing(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    assert compile_.prepare(Key("sm_100a")).registers == 32
    assert not compile_.is_ready(Key("sm_100a"))
    assert compiler.linked == []
    forget(monkeypatch)
    assert compile_.prepare(Key("sm_100a")).registers == 32
    assert counts() == (0, 1)


def test_a_damaged_object_is_replaced(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    key = Key("sm_90a")
    compile_.function(key)
    path = cache.Store(cache.default_directory() or Path()).object_path(key)
    path.write_bytes(path.read_bytes()[:-3])
    forget(monkeypatch)
    compile_.function(key)
    assert counts() == (1, 0)
    forget(monkeypatch)
    compile_.function(key)
    assert counts() == (0, 1)


def test_an_object_that_does_not_link_is_replaced(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    key = Key("sm_90a")
    compile_.function(key)
    forget(monkeypatch)
    compiler.broken.add(key.identity.encode())
    compile_.function(key)()
    assert counts() == (1, 1)
    forget(monkeypatch)
    compiler.broken.add(key.identity.encode())
    monkeypatch.setenv(compile_.JIT_VARIABLE, "forbid")
    with pytest.raises(RuntimeError, match=r"Key\(arch='sm_90a', rows=1\): its object .* does not load: symbols"):
        compile_.function(key)


def test_fresh_code_that_does_not_link_is_the_compilers_fault(compiler: Compiler) -> None:
    compiler.broken.add(Key("sm_90a").identity.encode())
    with pytest.raises(RuntimeError, match=r"^symbols not found$"):
        compile_.function(Key("sm_90a"))
    assert len(compiler.compiled) == 1


def test_forbid_runs_from_the_folder_only(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    compile_.function(Key("sm_90a"))
    forget(monkeypatch)
    monkeypatch.setenv(compile_.JIT_VARIABLE, "forbid")
    compile_.function(Key("sm_90a"))
    with pytest.raises(RuntimeError) as caught:
        compile_.function(Key("sm_103a", rows=7))
    for part in (
        "Key(arch='sm_103a', rows=7)",
        "CUTE_KERNELS_JIT=forbid",
        "does not hold it",
        "python -m cute_kernels precompile --arch sm_103a --model NAME --tp N --out DIR",
        "CUTE_KERNELS_CACHE_DIR=DIR",
    ):
        assert part in str(caught.value)
    monkeypatch.setattr(cache, "environment", lambda: {**ENVIRONMENT, "dsl": "4.9.0"})
    forget(monkeypatch)
    with pytest.raises(RuntimeError, match=r"for another environment: dsl 4\.8\.1 \(here 4\.9\.0\)"):
        compile_.function(Key("sm_90a"))
    monkeypatch.setenv(cache.DIRECTORY_VARIABLE, "")
    with pytest.raises(RuntimeError, match="there is no kernel cache"):
        compile_.function(Key("sm_90a"))
    assert counts()[0] == 0


@pytest.mark.parametrize("value", ["", "never", "Forbid"])
def test_a_bad_value_of_the_variable_is_refused(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv(compile_.JIT_VARIABLE, value)
    with pytest.raises(ValueError, match=rf"CUTE_KERNELS_JIT: expected 'allow' or 'forbid', got '{value}'"):
        compile_.function(Key("sm_90a"))


def test_nothing_is_compiled_or_loaded_during_a_capture(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    key = Key("sm_90a")
    with monkeypatch.context() as patch:
        patch.setattr(compile_, "_capturing", lambda: True)
        with pytest.raises(
            RuntimeError, match=r"Key\(arch='sm_90a', rows=1\).*cute_kernels\.warmup\(config, tp=\.\.\."
        ):
            compile_.function(key)
    assert compiler.compiled == []
    ready = compile_.function(key)
    monkeypatch.setattr(compile_, "_capturing", lambda: True)
    assert compile_.function(key) is ready


def test_the_first_launch_may_load_code_during_a_capture(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []

    @contextlib.contextmanager
    def relaxed() -> Iterator[None]:
        events.append("relaxed")
        yield
        events.append("restored")

    monkeypatch.setattr(compile_, "_relaxed_capture", relaxed)
    key = Key("sm_90a")
    compile_.function(key)(1)
    assert events == ["relaxed", "restored"]
    compile_.function(key)(2)
    assert events == ["relaxed", "restored"]
    assert [args for _, args in compiler.calls] == [(1,), (2,)]


def test_every_device_has_its_own_first_launch(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """Linked for one device, a kernel may be launched for the first time on another in a capture."""
    entered: list[int] = []
    monkeypatch.setattr(compile_, "_relaxed_capture", lambda: contextlib.nullcontext(entered.append(len(entered))))
    key = Key("sm_90a")
    compile_.function(key, 0)()
    monkeypatch.setattr(compile_, "_capturing", lambda: True)
    for _ in range(2):
        compile_.function(key, 1)()
        compile_.function(key, 0)()
    assert len(entered) == 2
    assert len(compiler.compiled) == len(compiler.linked) == 1
    assert len(compiler.calls) == 5


def test_the_capture_mode_is_exchanged_and_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = pytest.importorskip("cuda.bindings.driver", reason="cuda-python is not installed")
    modes = driver.CUstreamCaptureMode
    state = {"mode": modes.CU_STREAM_CAPTURE_MODE_GLOBAL}

    def exchange(mode: Any) -> Any:
        before, state["mode"] = state["mode"], mode
        return driver.CUresult.CUDA_SUCCESS, before

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(driver, "cuThreadExchangeStreamCaptureMode", exchange)
    inside = []
    with contextlib.suppress(KeyError), compile_._relaxed_capture():
        inside.append(state["mode"])
        raise KeyError
    assert inside == [modes.CU_STREAM_CAPTURE_MODE_RELAXED]
    assert state["mode"] == modes.CU_STREAM_CAPTURE_MODE_GLOBAL


def test_a_key_that_is_waited_for_stalls_no_other(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process holds the lock of one key: threads that want others, loaded, on disk or new, go their way."""
    loaded, on_disk, new, awaited = (Key("sm_90a", rows=rows) for rows in range(4))
    for key in (on_disk, loaded):
        compile_.function(key)
    compile_._linked.pop(on_disk)
    compile_._functions[0].pop(on_disk)
    store = cache.current()
    assert store is not None
    lock = filelock.FileLock(store.object_path(awaited).with_suffix(".lock"))
    lock.acquire()
    waiting = threading.Thread(target=compile_.function, args=(awaited,))
    waiting.start()
    try:
        others = [threading.Thread(target=compile_.function, args=(key,)) for key in (loaded, on_disk, new)]
        for thread in others:
            thread.start()
        for thread in others:
            thread.join(timeout=10)
        assert not any(thread.is_alive() for thread in others)
        assert all(compile_.is_ready(key) for key in (loaded, on_disk, new))
        assert waiting.is_alive()
        assert not compile_.is_ready(awaited)
    finally:
        lock.release()
        waiting.join()
    assert compile_.is_ready(awaited)


def test_waiting_for_another_thread_ends(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_, "COMPILER_SECONDS", 0.1)
    compiler.seconds = 1.0
    first = threading.Thread(target=compile_.function, args=(Key("sm_90a"),))
    first.start()
    time.sleep(0.3)
    with pytest.raises(RuntimeError, match="another thread of this process has been compiling for 0 s"):
        compile_.function(Key("sm_90a"))
    first.join()
    compile_.function(Key("sm_90a"))


def test_threads_that_want_the_same_key_compile_it_once(compiler: Compiler) -> None:
    compiler.seconds = 0.05
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(compile_.function(Key("sm_90a")))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(compiler.compiled) == 1
    assert len(set(map(id, found))) == 1


def test_collecting_notes_keys_and_runs_nothing(compiler: Compiler) -> None:
    loaded, new = Key("sm_90a"), Key("sm_90a", 2)
    compile_.function(loaded)("before")
    with compile_.collect() as keys:
        for key in (loaded, new, new):
            compile_.function(key)("inside")
            compile_.function(key, 1)("inside")
    assert list(keys) == [loaded, new]
    assert compiler.compiled == [loaded]
    compile_.function(loaded)("after")
    assert [args for _, args in compiler.calls] == [("before",), ("after",)]
    assert not compile_.is_ready(new)


def test_launch_makes_the_tensors_device_current(monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"current": 0}
    seen: list[tuple[int, tuple[Any, ...]]] = []

    class Guard:
        def __init__(self, index: int) -> None:
            self.index, self.before = index, state["current"]

        def __enter__(self) -> None:
            state["current"] = self.index

        def __exit__(self, *_: object) -> None:
            state["current"] = self.before

    key = Key("sm_90a")
    ready = {key: lambda *args: seen.append((state["current"], args))}
    monkeypatch.setattr(compile_, "_functions", {0: ready, 1: ready})
    monkeypatch.setattr(torch.cuda, "current_device", lambda: state["current"])
    monkeypatch.setattr(torch.cuda, "device", Guard)
    compile_.launch(key, 1, "a")
    compile_.launch(key, 0, "b", 2)
    assert seen == [(1, ("a",)), (0, ("b", 2))]
    assert state["current"] == 0


# ---- with the real compiler ------------------------------------------------------------------------------------------

COMPILE = """
import sys, time
from pathlib import Path
import tvm_ffi
from cute_kernels.compressor.save import SaveKey
from cute_kernels.runtime import compile as c
Path(sys.argv[1]).touch()
while sys.argv[2] and not Path(sys.argv[2]).exists():
    time.sleep(0.01)
compile_object = c.compile_object
def slow(key):
    time.sleep(float(sys.argv[3]))
    return compile_object(key)
c.compile_object = slow
function = c.function(SaveKey("sm_90a", width=256))
assert type(function.raw) is tvm_ffi.Function
print(c.compilations(), c.disk_loads())
"""


def start(tree: Path, folder: Path, mine: str, other: str = "", seconds: float = 0.0, **variables: str) -> Any:
    environment = {**os.environ, cache.DIRECTORY_VARIABLE: str(folder), "OMP_NUM_THREADS": "1", **variables}
    arguments = [str(folder.parent / mine), str(folder.parent / other) if other else "", str(seconds)]
    return subprocess.Popen(
        [sys.executable, "-c", COMPILE, *arguments],
        cwd=tree, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def finish(process: Any) -> str:
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert err == ""
    return str(out.strip())


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the package that a test may edit."""
    pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
    copy = tmp_path / "tree"
    shutil.copytree(ROOT / "cute_kernels", copy / "cute_kernels", ignore=shutil.ignore_patterns("__pycache__"))
    return copy


@pytest.mark.full
def test_processes_share_a_folder(tree: Path, tmp_path: Path) -> None:
    """Of two that want a key at once, one compiles; a later one needs no compiler; an edited kernel is a miss."""
    folder = tmp_path / "cache"
    pair = start(tree, folder, "a", "b", 1.0), start(tree, folder, "b", "a", 1.0)
    assert sorted(finish(process) for process in pair) == ["0 1", "1 0"]
    later = start(tree, folder, "c", CUTE_KERNELS_JIT="forbid")
    assert finish(later) == "0 1"
    source = tree / "cute_kernels/compressor/save.py"
    text = source.read_text()
    assert "\nWARPS = 4\n" in text
    source.write_text(text.replace("\nWARPS = 4\n", "\nWARPS = 8\n"))
    assert finish(start(tree, folder, "d")) == "1 0"


def test_the_dsls_advice_on_unrolled_loops_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
    from cutlass.base_dsl.ast_helpers import DSLOptimizationWarning

    for variable, shown in (("", 0), ("1", 1)):
        monkeypatch.setenv("CUTE_DSL_ENABLE_OPTIMIZATION_WARNINGS", variable)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            compile_._silence_dsl()
            warnings.warn("this loop is long", DSLOptimizationWarning, stacklevel=1)
        assert len(caught) == shown
