# SPDX-License-Identifier: Apache-2.0
"""Reports of compiled kernels that all tests share: what one test has compiled no other compiles again, in this run or
the next, as long as the sources stay the same. They lie in the cache of pytest, named as objects of a kernel cache are.
Of each kernel the first key is compiled as one that is launched, to an object; of the others the device's code
alone."""

from __future__ import annotations

import functools
import itertools
import pickle
import re
import struct
import subprocess
import tempfile
import zlib
from collections.abc import Sequence
from dataclasses import fields
from functools import cached_property
from pathlib import Path

from cute_kernels.runtime import cache
from cute_kernels.runtime import compile as compile_
from cute_kernels.runtime.arch import SMEM_BYTES
from cute_kernels.runtime.key import KernelKey
from cute_kernels.runtime.report import Report, find_nvdisasm, problems

RESERVED = 1024
"""Bytes of shared memory that the system takes for each block."""

INSTRUCTION_BYTES = 16

folder: Path | None = None
"""Where they are: a conftest.py sets it."""


class KeptReport(Report):
    """A report whose machine code is disassembled once for all tests."""

    @cached_property
    def sass(self) -> str | None:
        path = _path(self.key).with_suffix(".sass")
        if path.exists():
            return zlib.decompress(path.read_bytes()).decode()
        sass = super().sass
        if sass is not None:
            cache.replace_file(path, zlib.compress(sass.encode(), 1))
        return sass


def _path(key: KernelKey) -> Path:
    assert folder is not None, "expected a conftest.py that says where reports are"
    return cache.Store(folder).object_path(key).with_suffix(".report")


def known(key: KernelKey) -> Report | None:
    """The report, if some test has compiled the key."""
    path = _path(key)
    return pickle.loads(zlib.decompress(path.read_bytes())) if path.exists() else None


@functools.lru_cache(maxsize=64)
def compile_report(key: KernelKey) -> Report:
    """As cute_kernels.runtime.compile.compile_report."""
    assert folder is not None
    path, store = _path(key), cache.Store(folder)
    lock = store.acquire(key)
    assert lock is not None, f"{folder}: expected a folder that can be written"
    try:
        found = known(key)
        if found is not None:
            return found
        # says that an object of the kernel has been made
        has_object = folder / f"{key.kernel_name}-{cache.sources_of(key)[:16]}.object"
        plain = compile_.compile_report(key) if has_object.exists() else compile_.compile_object(key)[1]
        has_object.touch()
        report = KeptReport(**{field.name: getattr(plain, field.name) for field in fields(Report)})
        cache.replace_file(path, zlib.compress(pickle.dumps(report), 1))
        return report
    finally:
        lock.release()


def check_fits(key: KernelKey, threads: int) -> Report:
    """The report of a kernel that keeps everything in registers, and of whose blocks, of so many threads, one fits a
    multiprocessor."""
    report = compile_report(key)
    assert problems(key, report) == []
    assert report.stack == 0
    assert not re.search(r"st\.local|ld\.local", report.ptx)
    assert report.smem <= SMEM_BYTES[key.arch] - RESERVED
    assert report.registers <= 65536 // threads
    return report


def disassemble(reports: Sequence[Report]) -> list[list[str]] | None:
    """Instructions of kernels of one architecture, or None where nvdisasm is not installed. In one call of it, which
    takes half a second to begin; without the labels that `Report.sass` has."""
    tool = find_nvdisasm()
    if tool is None:
        return None
    (arch,) = {report.key.arch for report in reports}
    codes = [_machine_code(report.cubin) for report in reports]
    with tempfile.NamedTemporaryFile() as f:
        f.write(b"".join(codes))
        f.flush()
        command = [tool, "-ndf", "-b", arch.replace("sm_", "SM"), f.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    lines = [line for line in text.splitlines() if ";" in line]
    ends = list(itertools.accumulate(len(code) // INSTRUCTION_BYTES for code in codes))
    assert len(lines) == ends[-1]
    return [lines[start:end] for start, end in zip((0, *ends), ends, strict=False)]


def _machine_code(cubin: bytes) -> bytes:
    """The code of the one kernel in an ELF file."""
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names = struct.unpack_from("<3H", cubin, 0x3A)
    # of a section: where its name is, four numbers, and where it is
    sections = [struct.unpack_from("<I20x2Q", cubin, table + i * size) for i in range(count)]
    (found,) = [s for s in sections if cubin.startswith(b".text.", sections[names][1] + s[0])]
    return cubin[found[1] : found[1] + found[2]]
