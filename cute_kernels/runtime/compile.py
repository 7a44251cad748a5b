"""From a kernel's key to the function that launches it, and to a report on what the compiler made of it.

A key is a frozen dataclass that names everything the machine code depends on, the architecture first; two calls with
equal keys run the same code. Compiling takes no tensors, so a machine without a GPU takes exactly the path a server
takes.

Compiled functions live in this process's memory and nowhere else: `cute.compile` neither reads nor writes the DSL's own
disk cache, and this module has none, so an edited kernel can not run from a stale object.

CuTe DSL is imported when something is compiled, never before.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class KernelKey:
    """What the machine code of one kernel depends on. Each kernel derives its own key from it.

    arch   compile target, as runtime.arch names it
    """

    arch: str

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        """The kernel's entry point and the fake arguments it is compiled for, the stream last."""
        raise NotImplementedError

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of one block. The compiler does not check it against the architecture's limit."""
        return 0


_functions: dict[KernelKey, Callable[..., None]] = {}
_owners: list[Any] = []  # what cute.compile returned: it may unload its code when it dies
_lock = threading.RLock()
_compilations = 0


def compilations() -> int:
    """How many kernels this process has compiled for launching so far (reports do not count)."""
    return _compilations


def function(key: KernelKey) -> Callable[..., None]:
    """The launchable function of `key`, compiled at its first use.

    It takes torch tensors and numbers in the order of the key's fake arguments, without the stream: it runs on torch's
    current stream. Raises RuntimeError if it would have to compile while the current stream is being captured.
    """
    found = _functions.get(key)
    return found if found is not None else _compile_for_launch(key)


def launch(key: KernelKey, device_index: int, *args: Any) -> None:
    """Run the kernel of `key` on the current stream of the given device, whichever device is current."""
    if device_index == torch.cuda.current_device():
        function(key)(*args)
        return
    with torch.cuda.device(device_index):
        function(key)(*args)


def _capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _compile_for_launch(key: KernelKey) -> Callable[..., None]:
    global _compilations
    with _lock:
        if key in _functions:
            return _functions[key]
        if _capturing():
            raise RuntimeError(
                f"{key}: this kernel is not compiled yet, and nothing is compiled while a CUDA graph is captured. "
                "Do a warmup before the capture: call the op once with the same formats on the same device."
            )
        compiled = _compile(key, "")
        # the raw function: the Python wrapper around it only serves keyword arguments, and doubles the time of a call
        launchable = compiled.__tvm_ffi_object__()
        if launchable is None:
            raise RuntimeError(f"{key}: {key.arch} is not the architecture of this machine's GPU (or of CUTE_DSL_ARCH)")
        _functions[key] = launchable
        _owners.append(compiled)
        _compilations += 1
        return launchable


def _compile(key: KernelKey, options: str) -> Any:
    import cutlass.cute as cute

    entry, arguments = key.build()
    return cute.compile(entry, *arguments, options=f"--enable-tvm-ffi --gpu-arch {key.arch} {options}")


@dataclass(frozen=True)
class Report:
    """What the compiler made of one key. Sizes are in bytes; of several device functions the largest figure counts.

    sass   disassembly, or None where nvdisasm is not installed (package nvidia-cuda-nvdisasm)
    """

    key: KernelKey
    registers: int
    stack: int
    spill_stores: int
    spill_loads: int
    smem: int
    ptx: str
    cubin: bytes
    sass: str | None


_USAGE = re.compile(
    r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) registers([^\n]*)",
    re.DOTALL,
)


def compile_report(key: KernelKey) -> Report:
    """Compile `key`, without keeping the result, and say what came out. Needs no GPU."""
    with _lock, tempfile.TemporaryDirectory() as folder:
        remarks = os.path.join(folder, "remarks.yaml")
        compiled = _compile(
            key, f"--keep-ptx --keep-cubin --dump-dir {folder} --remark-filter ptxas --remark-output {remarks}"
        )
        with open(remarks) as f:
            usage = _USAGE.findall(f.read())
        if not usage:
            raise RuntimeError(f"{key}: the compiler reported no register usage")
        sass = _disassemble(compiled.__cubin__, folder)
        static = [int(n) for *_, rest in usage for n in re.findall(r"(\d+) bytes smem", rest)]
        return Report(
            key=key,
            stack=max(int(u[0]) for u in usage),
            spill_stores=max(int(u[1]) for u in usage),
            spill_loads=max(int(u[2]) for u in usage),
            registers=max(int(u[3]) for u in usage),
            smem=key.smem_bytes + max(static, default=0),
            ptx=compiled.__ptx__,
            cubin=compiled.__cubin__,
            sass=sass,
        )


def find_nvdisasm() -> str | None:
    """Path of the disassembler, from its Python package or from PATH."""
    spec = importlib.util.find_spec("nvidia")
    for root in (spec.submodule_search_locations or ()) if spec else ():
        for folder, _, files in os.walk(root):
            if "nvdisasm" in files:
                return os.path.join(folder, "nvdisasm")
    return shutil.which("nvdisasm")


def _disassemble(cubin: bytes, folder: str) -> str | None:
    tool = find_nvdisasm()
    if tool is None:
        return None
    path = os.path.join(folder, "kernel.cubin")
    with open(path, "wb") as f:
        f.write(cubin)
    return subprocess.run([tool, "-c", path], capture_output=True, text=True, check=True).stdout
