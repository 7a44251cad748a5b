# SPDX-License-Identifier: Apache-2.0
"""Compiled kernels on disk: exported objects, each beside a sidecar that says what it must be to be loaded.

    <root>/v3/<arch>/<environment>/<name>.o        the object
                                   <name>.json     its sidecar: key, sources, environment, host, checksum, figures
                                   <name>.lock     held while somebody compiles it

A name is the kernel's, a hash of the key and one of the source files that the kernel depends on (runtime/sources.py):
an edited kernel never runs from a stale object, and an edit leaves the objects of all others as they are. The
environment is a hash of what else the code depends on: versions of DSL, CUDA toolkit, TVM-FFI and Python, the machine
and compile options. Nothing here asks the GPU.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import sys
import warnings
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from cute_kernels.runtime import bundle
from cute_kernels.runtime.key import KernelKey
from cute_kernels.runtime.ownership import ForeignFile, make_folder, read_own
from cute_kernels.runtime.report import Facts
from cute_kernels.runtime.sources import Sources

FORMAT = 3
DIRECTORY_VARIABLE = "CUTE_KERNELS_CACHE_DIR"
LOCK_SECONDS = 600.0
"""How long to wait for a process that compiles the same key; after that it is compiled here too."""

COMPILE_FLAGS = "--enable-tvm-ffi"
"""Options every kernel is compiled with, its architecture aside."""

CODE_VARIABLES = tuple(
    f"CUTE_DSL_{name}"
    for name in (
        "AUTO_M2S", "COMPILER_BACKEND", "COMPILER_OPT", "DEBUG", "DRYRUN", "ENABLE_ASSERTIONS", "ENABLE_PYIR", "LIBS",
        "LINEINFO", "LOC_TRACEBACKS", "TOLERATE_M2M",
    )
)  # fmt: skip
"""Environment variables of the DSL that change the code it makes."""

PACKAGE = Path(__file__).resolve().parent.parent

# psABI levels: LLVM compiles an object's host code for the processor it runs on, so an object needs one as capable.
_X86_LEVELS = (
    ("x86-64-v4", {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}),
    ("x86-64-v3", {"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"}),
    ("x86-64-v2", {"cx16", "lahf_lm", "popcnt", "sse4_1", "sse4_2", "ssse3"}),
)


class Miss(Exception):
    """There is no object that may be loaded; the message says why."""


@dataclass(frozen=True)
class Entry:
    """An object: its bytes, the function inside, the figures of its kernel, and whether it was found on disk."""

    data: bytes
    symbol: str
    facts: Facts
    from_disk: bool


# Read when the first kernel is imported: what is in memory then is what gets compiled, whatever the files become.
SOURCES = Sources.read(PACKAGE)


def host_level(flags: set[str] | None = None, machine: str | None = None) -> str:
    """What the host code of an object may use: an x86-64 level, or else the machine's name."""
    machine = platform.machine() if machine is None else machine
    if machine not in ("x86_64", "AMD64"):
        return machine
    if flags is None:
        flags = set()
        with contextlib.suppress(OSError), open("/proc/cpuinfo") as f:
            flags = next((set(line.split(":", 1)[1].split()) for line in f if line.startswith("flags")), set())
    level = "x86-64-v1"
    for name, needed in reversed(_X86_LEVELS):
        if not needed <= flags:
            break
        level = name
    return level


def runs_on(built: object, here: str) -> bool:
    """Whether host code built for level `built` runs on a host of level `here`."""
    both_x86 = isinstance(built, str) and built.startswith("x86-64-v") and here.startswith("x86-64-v")
    return built <= here if both_x86 else built == here  # type: ignore[operator]


@cache
def _versions() -> dict[str, str]:
    import cutlass
    import tvm_ffi
    from cutlass.base_dsl.version_info import CUDA_VERSION

    toolkit = f"{CUDA_VERSION.major}.{CUDA_VERSION.minor}"
    return {"dsl": cutlass.__version__, "toolkit": toolkit, "tvm_ffi": tvm_ffi.__version__}


def environment() -> dict[str, Any]:
    """Everything but the key and the sources that an object depends on. Imports CuTe DSL."""
    return {
        **_versions(),
        "python": f"{sys.implementation.name}-{sys.version_info.major}.{sys.version_info.minor}",
        "machine": f"{sys.platform}-{platform.machine()}",
        "flags": COMPILE_FLAGS,
        "variables": {name: os.environ[name] for name in CODE_VARIABLES if os.environ.get(name)},
    }


def sources_of(key: KernelKey) -> str:
    """Hash of the source files that the code of `key` depends on."""
    return SOURCES.digest(type(key).__module__)


def fingerprint(values: dict[str, Any]) -> str:
    """Short hash of an environment: the name of its folder."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def default_directory() -> Path | None:
    """The cache folder: CUTE_KERNELS_CACHE_DIR, else cute_kernels in the user's cache folder. None: no disk cache."""
    chosen = os.environ.get(DIRECTORY_VARIABLE)
    if chosen is not None:
        return Path(chosen).expanduser() if chosen else None
    base = os.environ.get("XDG_CACHE_HOME")
    if base and os.path.isabs(base):
        return Path(base) / "cute_kernels"
    try:
        return Path.home() / ".cache" / "cute_kernels"
    except RuntimeError:  # neither HOME nor an entry in the user database
        return None


def current() -> Store | None:
    """The disk cache of this process, or None where there is none."""
    root = default_directory()
    return None if root is None or not SOURCES.files else Store(root)


_warned = False


def _warn(root: Path, error: BaseException | str) -> None:
    """Say once per process that the folder is of no use."""
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(
            f"cute_kernels: cannot keep compiled kernels in {root} ({error}): every process will compile them again. "
            f"Set {DIRECTORY_VARIABLE} to a folder that can be written.",
            RuntimeWarning,
            stacklevel=2,
        )


@dataclass(frozen=True)
class Store:
    """The disk cache below one folder. Making one touches nothing."""

    root: Path

    def folder(self, arch: str) -> Path:
        """Where this process keeps objects for `arch`."""
        return self.root / f"v{FORMAT}" / arch / fingerprint(environment())

    def object_path(self, key: KernelKey) -> Path:
        """The object of `key`; its sidecar and its lock have the same name with other endings."""
        return self.folder(key.arch) / f"{_stem(key)}-{sources_of(key)[:16]}.o"

    def _expected(self, key: KernelKey) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "key": key.identity,
            "arch": key.arch,
            "symbol": key.symbol,
            "sources": sources_of(key),
            "environment": environment(),
        }

    def read(self, key: KernelKey) -> Entry:
        """The object of `key`, verified against its sidecar and this process. Miss if there is none that fits;
        ForeignFile if somebody else could have written it, BadBundle if it is not the one that is demanded."""
        path = self.object_path(key)
        raw = self._read_sidecar(path.with_suffix(".json"))
        for name, want in self._expected(key).items():
            if raw.get(name) != want:
                raise Miss(f"{path}: its sidecar is about something else ({name})")
        if not runs_on(raw.get("host"), host_level()):
            raise Miss(f"{path}: its host code needs {raw.get('host')}, this machine has {host_level()}")
        try:
            data = self.read_file(path)
            facts = Facts.from_json(raw["facts"])
        except (OSError, LookupError, ValueError, TypeError, ArithmeticError, RecursionError) as error:
            raise Miss(f"{path}: cannot be read ({error})") from error
        if raw.get("object") != _checksum(data):
            raise Miss(f"{path}: damaged, its checksum is not the sidecar's")
        return Entry(data, key.symbol, facts, from_disk=True)

    def write(self, key: KernelKey, data: bytes, facts: Facts) -> None:
        """Keep an object. A folder that cannot be written is warned about once and otherwise ignored."""
        if not SOURCES.is_current(type(key).__module__):  # edited under this process: what it was made of is not known
            return
        path = self.object_path(key)
        sidecar = {
            **self._expected(key),
            "host": host_level(),
            "object": _checksum(data),
            "facts": facts.to_json(),
        }
        try:
            make_folder(path.parent)
            replace_file(path, data)
            replace_file(path.with_suffix(".json"), (json.dumps(sidecar, indent=1) + "\n").encode())
        except OSError as error:
            _warn(self.root, error)

    def acquire(self, key: KernelKey) -> Any:
        """The lock of `key`, held; None, after a warning, where it is not to be had."""
        import filelock

        path = self.object_path(key).with_suffix(".lock")
        try:
            make_folder(path.parent)
            lock = filelock.FileLock(path)
            lock.acquire(timeout=LOCK_SECONDS)
        except (OSError, NotImplementedError) as error:  # filelock.Timeout is an OSError
            _warn(self.root, error)
            return None
        return lock

    def read_file(self, path: Path) -> bytes:
        """The bytes of a file of this cache, if nobody else could have written it and it is in the bundle that is
        demanded, if one is."""
        data = read_own(self.root, path)
        bundle.check(self.root, path, data)
        return data

    def _read_sidecar(self, path: Path) -> dict[str, Any]:
        try:
            raw = json.loads(self.read_file(path))
        except FileNotFoundError as error:
            raise Miss(f"{path.parent} does not hold it") from error
        except (OSError, ValueError, RecursionError) as error:
            raise Miss(f"{path}: cannot be read ({error})") from error
        if not isinstance(raw, dict):
            raise Miss(f"{path}: cannot be read (no JSON object)")
        return raw

    def explain(self, key: KernelKey) -> str:
        """What the folder has of `key` for other sources or environments, and how these differ from what is here."""
        here = {**environment(), "sources": sources_of(key)}
        differences: set[str] = set()
        for path in self.root.glob(f"v{FORMAT}/{key.arch}/*/{_stem(key)}-*.json"):
            with contextlib.suppress(Miss, ForeignFile, bundle.BadBundle):
                raw = self._read_sidecar(path)
                environment_there = raw.get("environment")
                if isinstance(environment_there, dict):
                    there = {**environment_there, "sources": raw.get("sources")}
                    names = [n for n in here if there.get(n) != here[n]]
                    if names:
                        differences.add(", ".join(f"{n} {there.get(n)} (here {here[n]})" for n in names))
        if not differences:
            return ""
        return "It is there for another environment: " + "; or ".join(sorted(differences)) + ". "

    def contents(self) -> list[dict[str, Any]]:
        """One line per environment folder: arch, environment, objects, bytes, and whether this process uses it."""
        try:
            here = fingerprint(environment())
        except ImportError:  # without CuTe DSL none is used
            here = ""
        lines = []
        for folder in sorted(self.root.glob("v*/*/*/")):
            objects = [path for path in folder.glob("*.o") if path.is_file()]
            sizes = [p.stat().st_size for p in objects]
            lines.append(
                {
                    "format": folder.parent.parent.name,
                    "arch": folder.parent.name,
                    "environment": folder.name,
                    "objects": len(objects),
                    "bytes": sum(sizes),
                    "current": (folder.parent.parent.name, folder.name) == (f"v{FORMAT}", here),
                }
            )
        return lines


def _stem(key: KernelKey) -> str:
    """What the names of a key's objects begin with."""
    return f"{key.kernel_name}-{key.digest}"


def _checksum(data: bytes) -> dict[str, Any]:
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def _opener(path: str, flags: int) -> int:
    """Others cannot write to the file, whatever the umask."""
    return os.open(path, flags, 0o644)


def replace_file(path: Path, data: bytes) -> None:
    """Write a file as a whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}.tmp")
    try:
        with open(temporary, "xb", opener=_opener) as f:
            f.write(data)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
