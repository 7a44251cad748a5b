# SPDX-License-Identifier: Apache-2.0
"""What the compiler made of a kernel: registers, spills, shared memory, and the instructions that make it fast."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from cute_kernels.runtime.arch import SMEM_BYTES
from cute_kernels.runtime.key import KernelKey

INSTRUCTIONS = {
    "wgmma": r"\bwgmma\.mma_async\.",
    "tcgen05.mma": r"\btcgen05\.mma\.",
    "tcgen05.cp": r"\btcgen05\.cp\.",
    "tcgen05.ld": r"\btcgen05\.ld\.",
    "mma.sync": r"\bmma\.sync\.",
    "tma.gather4": r"\bcp\.async\.bulk\.tensor\.\S*gather4",
    "tma.load": r"\bcp\.async\.bulk\.tensor\.(?!\S*gather4)\S*shared::\S+\.global",
    "tma.store": r"\bcp\.(?:reduce\.)?async\.bulk\.tensor\.(?!\S*gather4)\S*global\.shared",
    "bulk.load": r"\bcp\.async\.bulk\.shared::\S+\.global",
    "bulk.store": r"\bcp\.(?:reduce\.)?async\.bulk\.global\.shared",
    "cp.async": r"\bcp\.async\.c[ag]\.",
    "ldmatrix": r"\bldmatrix\.",
    "stmatrix": r"\bstmatrix\.",
    "ld.global.128": r"\bld\.(?:\w+\.)*global\.(?:\S*\.)?(?:v4\.[bufs]32|v2\.[bufs]64)",
    "ld.global.64": r"\bld\.(?:\w+\.)*global\.(?:\S*\.)?v2\.[bufs]32",
    "st.global.128": r"\bst\.(?:\w+\.)*global\.(?:\S*\.)?(?:v4\.[bufs]32|v2\.[bufs]64)",
    "st.global.64": r"\bst\.(?:\w+\.)*global\.(?:\S*\.)?v2\.[bufs]32",
    "st.async": r"\bst\.async\.",
    "cvt.e4m3": r"\bcvt\.\S*e4m3x2\.b?f(?:16|32)|\bcvt\.\S*f16x2\.e4m3x2",
    "cvt.e2m1": r"\bcvt\.\S*e2m1x2",
    "ex2": r"\bex2\.approx",
    "atomic": r"\b(?:atom|red)\.",
    "barrier.cluster": r"\bbarrier\.cluster\.wait",
    "mbarrier": r"\bmbarrier\.(?:try_wait|test_wait)",
    "setmaxnreg": r"\bsetmaxnreg\.",
    "griddepcontrol": r"\bgriddepcontrol\.wait",
}
"""Instruction families of tensor cores, copies, conversions and synchronisation: name -> pattern of a word of PTX."""

_PATTERNS = {name: re.compile(pattern) for name, pattern in INSTRUCTIONS.items()}

_USAGE = re.compile(
    r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) registers([^\n]*)",
    re.DOTALL,
)


@dataclass(frozen=True)
class Facts:
    """Figures of one compiled key. Sizes are in bytes; of several device functions the largest figure counts.

    smem           dynamic and static shared memory of a block
    instructions   family -> how often it occurs in the PTX, for the families that occur
    seconds        what compiling took
    """

    registers: int
    stack: int
    spill_stores: int
    spill_loads: int
    smem: int
    instructions: Mapping[str, int]
    seconds: float

    def to_json(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(Facts)}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Facts:
        """Inverse of `to_json`; ValueError if something is missing or odd."""
        try:
            numbers = {f.name: int(raw[f.name]) for f in fields(cls) if f.name not in ("instructions", "seconds")}
            found = {str(name): int(count) for name, count in raw["instructions"].items()}
            return cls(**numbers, instructions=found, seconds=float(raw["seconds"]))
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"no figures of a kernel: {error!r}") from error


@dataclass(frozen=True)
class Report(Facts):
    """Figures and code of one compiled key."""

    key: KernelKey
    ptx: str
    cubin: bytes

    @cached_property
    def sass(self) -> str | None:
        """Disassembly, or None where nvdisasm is not installed (package nvidia-cuda-nvdisasm)."""
        tool = find_nvdisasm()
        if tool is None:
            return None
        with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
            f.write(self.cubin)
            f.flush()
            # -ndf: without labels of branches that cubins of the DSL do not have, a quarter quicker
            return subprocess.run([tool, "-c", "-ndf", f.name], capture_output=True, text=True, check=True).stdout

    @property
    def facts(self) -> Facts:
        """The figures alone."""
        return Facts(**{field.name: getattr(self, field.name) for field in fields(Facts)})


def make_report(key: KernelKey, remarks: str, ptx: str, cubin: bytes, seconds: float) -> Report:
    """Read a report out of ptxas's remarks and the PTX."""
    usage = _USAGE.findall(remarks)
    if not usage:
        raise RuntimeError(f"{key}: the compiler reported no register usage")
    static = [int(n) for *_, rest in usage for n in re.findall(r"(\d+) bytes smem", rest)]
    return Report(
        stack=max(int(u[0]) for u in usage),
        spill_stores=max(int(u[1]) for u in usage),
        spill_loads=max(int(u[2]) for u in usage),
        registers=max(int(u[3]) for u in usage),
        smem=key.smem_bytes + max(static, default=0),
        instructions=find_instructions(ptx),
        seconds=seconds,
        key=key,
        ptx=ptx,
        cubin=cubin,
    )


def find_instructions(ptx: str) -> dict[str, int]:
    """Family -> number of occurrences, for the families of INSTRUCTIONS that occur."""
    # No pattern spans a space, and few of the words of a kernel differ: a twentieth of the time of searching the text.
    words = Counter(word for word in ptx.split() if "." in word and not word.startswith("%"))
    counts = dict.fromkeys(INSTRUCTIONS, 0)
    for word, count in words.items():
        for name, pattern in _PATTERNS.items():
            counts[name] += count * len(pattern.findall(word))
    return {name: count for name, count in counts.items() if count}


def problems(key: KernelKey, facts: Facts) -> list[str]:
    """What is wrong with the code of `key`: spills, too much shared memory, instructions that should be there."""
    found = []
    if facts.spill_stores or facts.spill_loads:
        found.append(f"spills: {facts.spill_stores} bytes stored, {facts.spill_loads} loaded")
    if facts.smem > SMEM_BYTES[key.arch]:
        found.append(f"shared memory: {facts.smem} bytes, {key.arch} has {SMEM_BYTES[key.arch]}")
    unknown = [name for name in key.instructions if name not in INSTRUCTIONS]
    if unknown:
        raise ValueError(f"{key}: instructions: expected names among {', '.join(INSTRUCTIONS)}, got {unknown}")
    missing = [name for name in key.instructions if name not in facts.instructions]
    if missing:
        found.append("missing instructions: " + ", ".join(missing))
    return found


def find_nvdisasm() -> str | None:
    """Path of the disassembler, from its Python package or from PATH."""
    spec = importlib.util.find_spec("nvidia")
    for root in (spec.submodule_search_locations or ()) if spec else ():
        for folder, _, files in os.walk(root):
            if "nvdisasm" in files:
                return os.path.join(folder, "nvdisasm")
    return shutil.which("nvdisasm")
