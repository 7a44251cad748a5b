# SPDX-License-Identifier: Apache-2.0
"""May an architecture's own kernel of an op run here? Not before somebody saw it do the right thing.

Kernels that were written for a GPU nobody had (tcgen05 on Blackwell) are compiled, inspected and run in a model of the
GPU. Such a kernel has another one beside it, in the end a portable one, which runs until

* `python -m cute_kernels verify` has passed the own kernel on this GPU. It keeps its verdicts in the kernel cache,

      <root>/v3/<arch>/<environment>/verdict-<op>-<kernel>-<number>.json

  one file per op, kernel, GPU (name, compute capability, driver) and state of all sources: a verdict is of these and of
  these versions or it does not count. What cannot be read is no verdict;
* or a record in perf/results says how fast the op is on this architecture. A verdict that is "fail" outweighs it.

The launch path chooses: it asks `is_trusted` of each own kernel that could take the call, the fastest one first, and
runs the first that is. So a kernel for two CTAs that fails leaves the one for one CTA in use.
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
from cute_kernels.runtime import cache, kept
from cute_kernels.runtime.arch import arch_of
from cute_kernels.runtime.bundle import BadBundle
from cute_kernels.runtime.log import logger
from cute_kernels.runtime.ownership import make_folder

FORMAT = 3
KERNEL_MODULE = Path("/proc/driver/nvidia/version")

_known: dict[tuple[str, str, int], bool] = {}
_warned: set[str] = set()
_chosen: bool | str | None = None
_asked: dict[tuple[str, str], None] = {}


def is_trusted(op: str, kernel: str, device_index: int) -> bool:
    """Whether an own kernel of `op` may run on a CUDA device: if not, the next one is asked, or the portable one runs.

    op       name of the op whose call it is, also where several ops share a kernel
    kernel   kernel_name of the kernel's key

    Ask only where the kernel could take the call: a False is followed by a warning, once per process and op. The answer
    is read from disk once and stays for the life of the process. Inside `choose` it is what was chosen, so it must not
    be kept in a cache of the caller's: make it part of that cache's key.
    """
    if _chosen is not None:
        _asked[op, kernel] = None
        return kernel == _chosen if isinstance(_chosen, str) else _chosen
    known = _known.get((op, kernel, device_index))
    return _decide(op, kernel, device_index) if known is None else known


@contextlib.contextmanager
def choose(own: bool | str) -> Iterator[dict[tuple[str, str], None]]:
    """Inside, `is_trusted` says `own` for every op, whatever is known: of all kernels, or True of the one of that name
    alone. Yields (op, kernel) of all that was asked, in order. Not thread-safe."""
    global _chosen, _asked
    before = _chosen, _asked
    _chosen, _asked = own, {}
    try:
        yield _asked
    finally:
        _chosen, _asked = before


def _decide(op: str, kernel: str, device_index: int) -> bool:
    verdict = read(op, kernel, device_index)
    status = None if verdict is None else verdict["status"]
    cell = op, arch_of(device_index)
    is_measured = cell in support.RECORDS and cell not in support.PORTABLE_RECORDS
    trusted = status == "pass" or (status is None and is_measured)
    if not trusted:
        _warn(op, kernel, device_index, verdict)
    seen = "measured" if verdict is None and is_measured else f"verify: {status or 'not run'}"
    logger.info(
        "%s on cuda:%d, %s: %s %s (%s)",
        op,
        device_index,
        arch_of(device_index),
        kernel,
        "may run" if trusted else "does not run",
        seen,
    )
    _known[op, kernel, device_index] = trusted
    return trusted


def _warn(op: str, kernel: str, device_index: int, verdict: dict[str, Any] | None) -> None:
    if op in _warned:
        return
    _warned.add(op)
    gpu = gpu_of(device_index)["name"]
    why = "has not been verified on this GPU" if verdict is None else f"failed on this GPU ({verdict['detail']})"
    where = ""
    if cache.current() is None:
        where = f" It needs a kernel cache to keep its verdict in: set {cache.DIRECTORY_VARIABLE} to a folder."
    warnings.warn(
        f"cute_kernels: {op}: a slower kernel runs: {kernel} {why} ({gpu}). To verify it, and from then on run it if "
        f"it passes: python -m cute_kernels verify --op {op}.{where}",
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


def path_of(store: cache.Store, op: str, kernel: str, device_index: int) -> Path:
    """Where the verdict on a kernel of an op is kept."""
    about = cache.fingerprint({**gpu_of(device_index), "sources": cache.SOURCES.whole})
    return store.folder(arch_of(device_index)) / f"verdict-{op}-{kernel}-{about}.json"


def _expected(op: str, kernel: str, device_index: int) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "op": op,
        "kernel": kernel,
        "arch": arch_of(device_index),
        "gpu": gpu_of(device_index),
        "environment": cache.environment(),
        "sources": cache.SOURCES.whole,
    }


def read(op: str, kernel: str, device_index: int) -> dict[str, Any] | None:
    """The verdict on a kernel of `op`, of these sources on this GPU: "status" is "pass" or "fail", "detail" why. None:
    there is none that can be read."""
    store = cache.current()
    if store is None:
        return None
    try:
        raw = json.loads(store.read_file(path_of(store, op, kernel, device_index)))
    except (OSError, ValueError, RecursionError, BadBundle):
        return None
    if not isinstance(raw, dict) or raw.get("status") not in ("pass", "fail") or not isinstance(raw.get("detail"), str):
        return None
    is_ours = all(raw.get(name) == want for name, want in _expected(op, kernel, device_index).items())
    return raw if is_ours else None


def verdicts(device_index: int) -> dict[str, dict[str, str]]:
    """Op -> kernel -> "pass" or "fail", for the own kernels that have a verdict of these sources on this GPU."""
    store = cache.current()
    files = () if store is None else store.folder(arch_of(device_index)).glob("verdict-*-*-*.json")
    found: dict[str, dict[str, str]] = {}
    for op, kernel in sorted({(parts[1], parts[2]) for parts in (path.stem.split("-") for path in files)}):
        verdict = read(op, kernel, device_index)
        if verdict is not None:
            found.setdefault(op, {})[kernel] = verdict["status"]
    return found


def keep(op: str, kernel: str, device_index: int, status: str, cases: int, detail: str) -> str:
    """Keep verify's verdict on an own kernel of `op`; why it could not be kept, or "".

    status   "pass", with `cases` calls that the kernel took, or "fail". Anything else leaves no verdict
    """
    store = cache.current()
    if store is None:
        return f"there is no kernel cache ({cache.DIRECTORY_VARIABLE})"
    if not cache.SOURCES.is_current():
        return "source files changed while it ran"
    path = path_of(store, op, kernel, device_index)
    try:
        if status not in ("pass", "fail") or (status == "pass" and not cases):
            path.unlink(missing_ok=True)
            return ""
        verdict = {**_expected(op, kernel, device_index), "status": status, "cases": cases, "detail": detail}
        make_folder(path.parent)
        cache.replace_file(path, (json.dumps(verdict, indent=1) + "\n").encode())
    except OSError as error:
        return str(error)
    _known.pop((op, kernel, device_index), None)
    kept.forget()
    return ""
