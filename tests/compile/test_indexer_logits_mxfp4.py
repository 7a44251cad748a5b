"""The kernels of MXFP4 scores, compiled for Hopper. Needs CuTe DSL, no GPU."""

from __future__ import annotations

import re

import pytest

from cute_kernels.runtime.arch import SMEM_BYTES

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from cute_kernels.indexer import logits_choice
from cute_kernels.indexer.logits_sm90 import LogitsKey
from cute_kernels.indexer.mxfp4_plan import Mxfp4Plan
from tests.compile.reports import compile_report

KEYS = [
    logits_choice.key_for("sm_90a", heads, rows, paged, page_rows, mxfp4=True)
    for heads, rows, paged, page_rows in ((64, 1, True, 64), (64, 2, False, 64), (48, 2, True, 8))
]


@pytest.mark.parametrize("key", KEYS, ids=str)
def test_compiles(key: LogitsKey) -> None:
    report = compile_report(key)
    assert report.cubin[:4] == b"\x7fELF"
    assert (report.spill_stores, report.spill_loads, report.stack) == (0, 0, 0)
    assert report.smem <= SMEM_BYTES[key.arch]
    assert set(key.instructions) <= set(report.instructions)
    assert report.instructions["wgmma"] == 4
    assert report.instructions["tma.load"] == key.rows + key.plan.boxes
    assert ("setmaxnreg" in report.instructions) == bool(key.plan.registers)
    assert not re.search(r"st\.local|ld\.local", report.ptx)
    assert report.registers <= 65536 // key.plan.threads
    if key.plan.registers:
        # no warpgroup waits for registers that nobody gives back
        (beside, of_scores), warpgroups = key.plan.registers, key.plan.threads // 128
        more = warpgroups - key.plan.warpgroups
        assert beside * more + key.plan.warpgroups * of_scores <= warpgroups * report.registers
        assert beside % 8 == of_scores % 8 == 0


@pytest.mark.parametrize("key", KEYS, ids=str)
def test_products_and_conversions(key: LogitsKey) -> None:
    """The assembler waits for no product on its own, and a code costs little more than half a byte permute."""
    report = compile_report(key)
    if report.sass is None:
        pytest.skip("nvdisasm is not installed (package nvidia-cuda-nvdisasm)")
    assert re.findall(r"QGMMA|WARPGROUP\.DEPBAR", report.sass) == ["QGMMA"] * 4 + ["WARPGROUP.DEPBAR"]
    # of keys and of queries: 64 codes a thread, two permutes for every four
    assert 64 <= len(re.findall(r"\bPRMT\b", report.sass)) <= 80


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("heads", [16, 32, 48, 64])
@pytest.mark.parametrize("box", [8, 64])
def test_shared_memory(heads: int, rows: int, box: int) -> None:
    plan = Mxfp4Plan(heads, rows, box)
    assert plan.smem_bytes <= SMEM_BYTES["sm_90a"]
    # a stage must always be of the same warpgroup: nobody waits for the others' barriers
    assert plan.stages % plan.warpgroups == 0
    assert plan.columns <= 256
    assert plan.helpers + 4 * plan.warpgroups <= plan.threads // 32
