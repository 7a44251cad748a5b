# SPDX-License-Identifier: Apache-2.0
"""What ptxas makes of Hopper's decode kernels over V4.1's own records."""

from __future__ import annotations

import pytest

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from cute_kernels.formats import FP8_DS_MLA, MXFP8_V41_SPLIT, NVFP4_V41, NVFP4_V41_SPLIT
from cute_kernels.runtime.arch import SMEM_BYTES
from cute_kernels.sparse_mla.hopper import decode_swap_ab
from cute_kernels.sparse_mla.hopper.decode import DecodeKey
from cute_kernels.sparse_mla.hopper.decode_swap_ab import DecodeSwapAbKey
from tests.compile.questions import parts
from tests.compile.reports import compile_report

WHOLE = DecodeSwapAbKey("sm_90a", 8)
SHARED = DecodeSwapAbKey("sm_90a", 16, "dense", FP8_DS_MLA.id, FP8_DS_MLA.id, quantized=True, ctas=2)
SPLIT = DecodeKey("sm_90a", 64, format0=MXFP8_V41_SPLIT.id, format1=NVFP4_V41_SPLIT.id)
KEYS = DecodeKey("sm_90a", 64, format1=NVFP4_V41.id), WHOLE, SHARED, SPLIT


@pytest.mark.parametrize("key", KEYS, ids=lambda key: key.name)
def test_nothing_spills(key: DecodeKey | DecodeSwapAbKey) -> None:
    report = compile_report(key)
    assert (report.spill_stores, report.spill_loads) == (0, 0)
    assert all(report.instructions.get(name) for name in key.instructions)
    assert report.smem <= key.smem_bytes <= SMEM_BYTES["sm_90a"]


def test_registers_are_those_of_the_launch() -> None:
    k = decode_swap_ab
    used = k.PING_PONG * k.SOFTMAX_REGISTERS + k.PV_REGISTERS + k.PRODUCER_REGISTERS
    assert used <= k.WARPGROUPS * (65536 // k.THREADS // 8 * 8)


def test_a_dequantizer_releases_what_it_has_loaded() -> None:
    """An arrival at an mbarrier can overtake loads, so it comes behind a store of what was loaded last."""
    report = compile_report(WHOLE)
    if report.in_sass is None:
        pytest.skip("nvdisasm is not there")
    registers = decode_swap_ab.SOFTMAX_REGISTERS, decode_swap_ab.PV_REGISTERS
    starts = "|".join(rf"USETMAXREG\S* UP\d, {count:#x} ;" for count in registers)
    _, dequantizer, *_ = report.in_sass.ask(parts, starts, r"LDS\.64|LDS\.128|STSM|SYNCS\.ARRIVE")
    work = " ".join(dequantizer)
    stores = " ".join(["STSM"] * (decode_swap_ab.RELEASED + 1) * decode_swap_ab.SLAB_STEPS + ["SYNCS.ARRIVE"] * 2)
    nvfp4, fp8 = 2 * decode_swap_ab.SLABS * ["LDS.64"], 2 * (decode_swap_ab.SLABS + 1) * ["LDS.128"]
    assert f"{' '.join(4 * ['LDS.128'] + nvfp4)} {stores}" in work
    assert f"{' '.join(fp8)} {stores}" in work
