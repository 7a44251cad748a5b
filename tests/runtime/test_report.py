# SPDX-License-Identifier: Apache-2.0
"""What is read out of the assembler's remarks: the largest figure of several functions."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from cute_kernels.runtime.key import KernelKey
from cute_kernels.runtime.report import make_report


@dataclass(frozen=True)
class Key(KernelKey):
    smem_bytes: int = 1024


def remark(stack: int, stores: int, loads: int, registers: int, rest: str) -> str:
    return (
        f"{stack} bytes stack frame, {stores} bytes spill stores, {loads} bytes spill loads\n"
        f"Used {registers} registers, used 1 barriers{rest}\n"
    )


@pytest.mark.parametrize("turned", [False, True])
def test_the_largest_figures_count(turned: bool) -> None:
    functions = [remark(8, 0, 12, 40, ", 256 bytes smem"), remark(16, 4, 0, 32, ", 64 bytes smem, 380 bytes cmem[0]")]
    found = make_report(Key("sm_90a"), "".join(functions[:: -1 if turned else 1]), "", b"", 0.5)
    assert (found.stack, found.spill_stores, found.spill_loads, found.registers) == (16, 4, 12, 40)
    assert found.smem == 1024 + 256
    assert make_report(Key("sm_90a"), remark(0, 0, 0, 9, ""), "", b"", 0.5).smem == 1024
    with pytest.raises(RuntimeError, match="no register usage"):
        make_report(Key("sm_90a"), "", "", b"", 0.5)
