# SPDX-License-Identifier: Apache-2.0
"""The kernels of dequantize_and_gather_k_cache, compiled for every architecture they claim. Needs CuTe DSL, no GPU."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from cute_kernels.formats import FP8_DS_MLA
from cute_kernels.runtime.arch import SMEM_BYTES
from cute_kernels.runtime.compile import Report

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from cute_kernels.dsl import convert
from cute_kernels.dsl.ptx import HAS_E4M3_AND_BF16
from cute_kernels.kv_cache.gather import (
    BULK_ROWS,
    GatherBulkKey,
    GatherKey,
    ctas_per_request,
    deployment_keys,
    key_for,
    wants_bulk,
)
from tests.compile.reports import compile_report

ARCHS = ("sm_90a", "sm_100a", "sm_103a", "sm_89", "sm_120a")
BULK_ARCHS = ("sm_90a", "sm_100a", "sm_103a", "sm_120a")


def check(report: Report) -> None:
    assert report.cubin[:4] == b"\x7fELF"
    assert (report.spill_stores, report.spill_loads, report.stack) == (0, 0, 0)
    assert report.smem == report.key.smem_bytes
    assert f".target {report.key.arch}" in report.ptx
    assert not re.search(r"\bdiv\.|\brem\.|st\.local|ld\.local|\.ftz", report.ptx)


@pytest.mark.parametrize("rows", [2, 4])
@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize("arch", ARCHS)
def test_compiles(arch: str, gathered: bool, rows: int) -> None:
    key = GatherKey(arch, gathered=gathered, rows=rows)
    report = compile_report(key)
    check(report)
    # 48 registers keep 40 warps on an SM, each with two rows in flight; 64 keep 32, each with two to four
    assert report.registers <= {2: 48, 4: 64}[rows]
    ptx = report.ptx
    assert len(re.findall(r"ld\.relaxed\.gpu\.global\.L1::no_allocate\.v2\.b32", ptx)) == 3 * key.rows
    assert len(re.findall(r"ld\.relaxed\.gpu\.global\.L1::no_allocate\.b32", ptx)) == (1 if gathered else 3)
    assert len(re.findall(r"ld\.global\.nc\.b32", ptx)) == (3 if gathered else 0)
    is_direct = arch in convert.BLACKWELL and HAS_E4M3_AND_BF16
    assert len(re.findall(r"cvt\.rn\.b?f16x2\.e4m3x2", ptx)) == 8 * key.rows
    assert len(re.findall(r"cvt\.rn\.bf16x2\.f32", ptx)) == (0 if is_direct else 8 * key.rows)
    # a row's values, or zeros
    assert len(re.findall(r"@%p\d+ st\.global\.v4\.b32", ptx)) == 4 * key.rows
    assert ("griddepcontrol.wait" in ptx) == (arch != "sm_89")


@pytest.mark.parametrize("key_rows", [2, 4])
@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize("arch", ARCHS)
def test_two_rows_are_on_their_way_before_one_is_used(arch: str, gathered: bool, key_rows: int) -> None:
    report = compile_report(GatherKey(arch, gathered=gathered, rows=key_rows))
    if report.sass is None:
        pytest.skip("nvdisasm is not installed (package nvidia-cuda-nvdisasm)")
    code = [line for line in report.sass.splitlines() if ";" in line]
    rows = [i for i, line in enumerate(code) if re.search(r"\bLDG\.E\S*\.64", line)]
    assert len(rows) == 3 * key_rows
    # of four rows, the assembler starts to convert the first before it asks for the last
    first_use = min(i for i, line in enumerate(code) if re.search(r"\bSTG|E4M3", line))
    assert len([i for i in rows if i < first_use]) >= 6
    assert len([line for line in code if re.search(r"\bSTG\.E\.128", line)]) == 4 * key_rows


@pytest.mark.parametrize("rows", [1, 2, 4, 8])
def test_other_configurations(rows: int) -> None:
    report = compile_report(GatherKey("sm_90a", rows=rows, warps=8))
    check(report)
    assert ".reqntid 256" in report.ptx


@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize("arch", BULK_ARCHS)
def test_bulk_compiles(arch: str, gathered: bool) -> None:
    key = GatherBulkKey(arch, gathered=gathered)
    report = compile_report(key)
    check(report)
    # twelve blocks on an SM, as many as have room in its shared memory
    assert report.registers <= (40 if arch != "sm_120a" else 64)
    assert SMEM_BYTES["sm_90a"] // (key.smem_bytes + 1024) >= 11
    ptx = report.ptx
    # a chunk and its scales, where the first ones are asked for and where a stage is filled again
    assert len(re.findall(r"cp\.async\.bulk\.shared::cluster\.global", ptx)) == 2 * 2 * key.stages
    assert len(re.findall(r"mbarrier\.init", ptx)) == key.stages
    assert len(re.findall(r"mbarrier\.arrive\.expect_tx", ptx)) == 2 * key.stages
    assert len(re.findall(r"@%p\d+ st\.global\.v4\.b32", ptx)) == 4 * key.rows * key.stages
    assert "griddepcontrol.wait" in ptx


@pytest.mark.parametrize("fields", [{"rows": 2}, {"rows": 8}, {"stages": 1}, {"warps": 2, "stages": 3}], ids=str)
def test_other_bulk_configurations(fields: dict[str, Any]) -> None:
    check(compile_report(GatherBulkKey("sm_90a", **fields)))


def test_which_calls_are_bulk() -> None:
    many = BULK_ROWS[False]

    def wanted(
        block_size: int = 64, page_stride: int = 37440, first: int = 0, arch: str = "sm_90a", rows: int = many
    ) -> bool:
        memory = torch.zeros(4 * page_stride + 64, dtype=torch.uint8)
        first += -memory.data_ptr() % 16
        cache = memory[first:].as_strided((3, block_size, 584), (page_stride, 584, 1))
        return wants_bulk(arch, cache, block_size, False, rows)

    assert wanted()
    assert wanted(4, FP8_DS_MLA.page_stride(4))
    assert wanted(64, 584 * 64)
    assert not wanted(rows=many - 1)
    assert not wanted(2, FP8_DS_MLA.page_stride(2))
    assert not wanted(7, FP8_DS_MLA.page_stride(7))
    assert not wanted(page_stride=37448)
    assert not wanted(first=8)
    assert not wanted(arch="sm_89")
    cache = FP8_DS_MLA.allocate(3, 64)
    assert [wants_bulk("sm_90a", cache, 64, True, BULK_ROWS[True] - i) for i in (0, 1)] == [True, False]


def test_every_kernel_that_a_call_can_need_is_deployed() -> None:
    needed = {key_for("sm_90a", FP8_DS_MLA.id, gathered, bulk) for gathered in (False, True) for bulk in (False, True)}
    keys = deployment_keys(None, 1, "sm_90a")
    assert set(keys) == needed
    assert len(keys) == len(needed) == 4
    assert len(deployment_keys(None, 1, "sm_89")) == 2
    assert len(deployment_keys(None, 1, "sm_80")) == 2


def test_ctas_per_request() -> None:
    key = GatherKey("sm_90a", warps=4, rows=2)
    assert ctas_per_request(key, requests=1, rows=1, multiprocessors=132, per_multiprocessor=16) == 1
    assert ctas_per_request(key, requests=1, rows=8, multiprocessors=132, per_multiprocessor=16) == 1
    assert ctas_per_request(key, requests=1, rows=9, multiprocessors=132, per_multiprocessor=16) == 2
    assert ctas_per_request(key, requests=1, rows=10**6, multiprocessors=132, per_multiprocessor=16) == 2112
    assert ctas_per_request(key, requests=4, rows=10**6, multiprocessors=132, per_multiprocessor=16) == 528
    assert ctas_per_request(key, requests=5000, rows=10**6, multiprocessors=132, per_multiprocessor=16) == 1
    bulk = GatherBulkKey("sm_90a", warps=4, rows=4, stages=2)
    assert ctas_per_request(bulk, requests=1, rows=16384, multiprocessors=132, per_multiprocessor=64) == 512
    assert ctas_per_request(bulk, requests=1, rows=16385, multiprocessors=132, per_multiprocessor=64) == 513
