# SPDX-License-Identifier: Apache-2.0
"""May an architecture's own kernel of an op run here? Not before somebody saw it do the right thing.

Kernels that were written for a GPU nobody had (tcgen05 on Blackwell) are compiled, inspected and run in a model of the
GPU. Such a kernel has a portable one beside it, which runs until

* `python -m cute_kernels verify` has passed the own kernel on this GPU. It keeps its verdicts in the kernel cache,

      <root>/v3/<arch>/<environment>/verdict-<op>-<number>.json

  one file per op, GPU (name, compute capability, driver) and state of all sources: a verdict is of these and of these
  versions or it does not count. What cannot be read is no verdict;
* or a record in perf/results says how fast it is on this architecture. A verdict that is "fail" outweighs it.

The portable kernel is chosen by the launch path: it asks `is_trusted` where the own kernel could take the call.
"""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Iterator
from functools import cache as memoize
from pathlib import Path
from typing import Any

import torch

from cute_kernels import support
from cute_kernels.runtime import cache
from cute_kernels.runtime.arch import arch_of
from cute_kernels.runtime.bundle import BadBundle
from cute_kernels.runtime.log import logger
from cute_kernels.runtime.ownership import make_folder

FORMAT = 2
KERNEL_MODULE = Path("/proc/driver/nvidia/version")

_known: dict[tuple[str, int], bool] = {}
_warned: set[str] = set()
_chosen: bool | None = None
_asked: set[str] = set()


def is_trusted(op: str, device_index: int) -> bool:
    """Whether the own kernel of `op` may run on a CUDA device: if not, the portable kernel runs.

    op   name of the op whose call it is, also where several ops share a kernel

    Ask only where the own kernel could take the call: a False is followed by a warning, once per process and op. The
    answer is read from disk once and stays for the life of the process. Inside `choose` it is what was chosen, so it
    must not be kept in a cache of the caller's: make it part of that cache's key.
    """
    if _chosen is not None:
        _asked.add(op)
        return _chosen
    known = _known.get((op, device_index))
    return _decide(op, device_index) if known is None else known


@contextlib.contextmanager
def choose(own: bool) -> Iterator[set[str]]:
    """Inside, `is_trusted` says `own` for every op, whatever is known. Yields the ops that asked. Not thread-safe."""
    global _chosen, _asked
    before = _chosen, _asked
    _chosen, _asked = own, set()
    try:
        yield _asked
    finally:
        _chosen, _asked = before


def _decide(op: str, device_index: int) -> bool:
    verdict = read(op, device_index)
    status = None if verdict is None else verdict["status"]
    cell = op, arch_of(device_index)
    is_measured = cell in support.RECORDS and cell not in support.PORTABLE_RECORDS
    trusted = status == "pass" or (status is None and is_measured)
    if not trusted:
        _warn(op, device_index, verdict)
    chosen = "its own kernel" if trusted else "the portable kernel"
    seen = "measured" if verdict is None and is_measured else f"verify: {status or 'not run'}"
    logger.info("%s on cuda:%d, %s: %s runs (%s)", op, device_index, arch_of(device_index), chosen, seen)
    _known[op, device_index] = trusted
    return trusted


def _warn(op: str, device_index: int, verdict: dict[str, Any] | None) -> None:
    if op in _warned:
        return
    _warned.add(op)
    gpu, arch = gpu_of(device_index)["name"], arch_of(device_index)
    why = "has not been verified on this GPU" if verdict is None else f"failed on this GPU ({verdict['detail']})"
    where = ""
    if cache.current() is None:
        where = f" It needs a kernel cache to keep its verdict in: set {cache.DIRECTORY_VARIABLE} to a folder."
    warnings.warn(
        f"cute_kernels: {op}: the portable kernel runs, which is slower: the one for {arch} {why} ({gpu}). To verify "
        f"it, and from then on run it if it passes: python -m cute_kernels verify --op {op}.{where}",
        RuntimeWarning,
        stacklevel=3,
    )


# ---- verdicts --------------------------------------------------------------------------------------------------------


@memoize
def gpu_of(device_index: int) -> dict[str, str]:
    """What a verdict is about, beside op and sources: name, compute capability and driver of a CUDA device."""
    import cuda.bindings.driver as driver

    major, minor = torch.cuda.get_device_capability(device_index)
    error, version = driver.cuDriverGetVersion()
    known = [f"CUDA {version // 1000}.{version % 1000 // 10}"] if error == driver.CUresult.CUDA_SUCCESS else []
    with contextlib.suppress(OSError, IndexError):
        known.append(KERNEL_MODULE.read_text(errors="replace").splitlines()[0].strip())
    return {
        "name": torch.cuda.get_device_name(device_index),
        "capability": f"{major}.{minor}",
        "driver": ", ".join(known),
    }


def path_of(store: cache.Store, op: str, device_index: int) -> Path:
    """Where the verdict on an op is kept."""
    about = cache.fingerprint({**gpu_of(device_index), "sources": cache.SOURCES.whole})
    return store.folder(arch_of(device_index)) / f"verdict-{op}-{about}.json"


def _expected(op: str, device_index: int) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "op": op,
        "arch": arch_of(device_index),
        "gpu": gpu_of(device_index),
        "environment": cache.environment(),
        "sources": cache.SOURCES.whole,
    }


def read(op: str, device_index: int) -> dict[str, Any] | None:
    """The verdict on `op` of these sources on this GPU: "status" is "pass" or "fail", "detail" why. None: there is none
    that can be read."""
    store = cache.current()
    if store is None:
        return None
    try:
        raw = json.loads(store.read_file(path_of(store, op, device_index)))
    except (OSError, ValueError, RecursionError, BadBundle):
        return None
    if not isinstance(raw, dict) or raw.get("status") not in ("pass", "fail") or not isinstance(raw.get("detail"), str):
        return None
    is_ours = all(raw.get(name) == want for name, want in _expected(op, device_index).items())
    return raw if is_ours else None


def verdicts(device_index: int) -> dict[str, str]:
    """Op -> "pass" or "fail", for the own kernels that have a verdict of these sources on this GPU."""
    store = cache.current()
    files = () if store is None else store.folder(arch_of(device_index)).glob("verdict-*.json")
    ops = sorted({path.stem.removeprefix("verdict-").rpartition("-")[0] for path in files})
    found = {op: read(op, device_index) for op in ops}
    return {op: verdict["status"] for op, verdict in found.items() if verdict is not None}


def keep(op: str, device_index: int, status: str, cases: int, detail: str) -> str:
    """Keep verify's verdict on the own kernel of `op`; why it could not be kept, or "".

    status   "pass", with `cases` calls that the own kernel took, or "fail". Anything else leaves no verdict
    """
    store = cache.current()
    if store is None:
        return f"there is no kernel cache ({cache.DIRECTORY_VARIABLE})"
    if not cache.SOURCES.is_current():
        return "source files changed while it ran"
    path = path_of(store, op, device_index)
    try:
        if status not in ("pass", "fail") or (status == "pass" and not cases):
            path.unlink(missing_ok=True)
            return ""
        verdict = {**_expected(op, device_index), "status": status, "cases": cases, "detail": detail}
        make_folder(path.parent)
        cache.replace_file(path, (json.dumps(verdict, indent=1) + "\n").encode())
    except OSError as error:
        return str(error)
    _known.pop((op, device_index), None)
    return ""
