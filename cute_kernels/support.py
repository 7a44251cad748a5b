"""Which op runs how on which architecture: the one table behind `python -m cute_kernels info` and the README's.

measured    the kernel ran on that GPU, and a record in perf/results says how fast
compiled    the kernel is cross-compiled and inspected by the tests (right instructions, no spills, shared memory
            within the limit); nobody ran it there
reference   there is no kernel yet: with CUTE_KERNELS_FALLBACK=reference the reference runs, slowly
no          the op has a kernel, and it does not run there
"""

from __future__ import annotations

from dataclasses import dataclass

ARCHS = ("sm_80", "sm_89", "sm_90a", "sm_100a", "sm_103a", "sm_120a")
"""Columns of the table."""

_E4M3_ARCHS = ("sm_89", "sm_90a", "sm_100a", "sm_103a", "sm_120a")

KERNEL_ARCHS = {
    "dequantize_and_gather_k_cache": _E4M3_ARCHS,
    "quantize_and_insert_k_cache": _E4M3_ARCHS,
    "save_partial_states": ARCHS,
}
"""Op -> architectures its kernel runs on, for the ops that have one."""

RECORDS = {
    ("dequantize_and_gather_k_cache", "sm_90a"): "h200/dequantize_and_gather_k_cache.json",
    ("quantize_and_insert_k_cache", "sm_90a"): "h200/quantize_and_insert_k_cache.json",
    ("save_partial_states", "sm_90a"): "h200/save_partial_states.json",
}
"""(op, arch) -> record of a measurement, below perf/results."""


@dataclass(frozen=True)
class Support:
    """Status of one op on one architecture, and the record behind "measured"."""

    status: str
    record: str | None = None


def support(op: str, arch: str) -> Support:
    """How `op` runs on `arch`."""
    if op not in KERNEL_ARCHS:
        return Support("reference")
    if arch not in KERNEL_ARCHS[op]:
        return Support("no")
    record = RECORDS.get((op, arch))
    return Support("compiled" if record is None else "measured", record)


def markdown(ops: list[str]) -> str:
    """The README's support table for the registered `ops`: a row per op with a kernel, one for all the others."""
    lines = ["| op | CPU | " + " | ".join(ARCHS) + " |", "|---|---|" + "---|" * len(ARCHS)]
    for op in sorted(KERNEL_ARCHS):
        cells = " | ".join(support(op, arch).status for arch in ARCHS)
        lines.append(f"| `{op}` | reference | {cells} |")
    others = [op for op in ops if op not in KERNEL_ARCHS]
    lines.append(f"| the other {len(others)} ops | reference | " + " | ".join(["reference"] * len(ARCHS)) + " |")
    return "\n".join(lines)
