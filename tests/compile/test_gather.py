"""The kernels of dequantize_and_gather_k_cache, compiled for every architecture they claim. Needs CuTe DSL, no GPU."""

from __future__ import annotations

import re

import pytest

from cute_kernels.runtime.compile import Report, compile_report

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from cute_kernels.kv_cache.gather import FOUR_ROWS_CALLS, GatherKey, blocks_per_request, deployment_keys, rows_per_warp

ARCHS = ("sm_90a", "sm_100a", "sm_103a", "sm_89", "sm_120a")


def check(report: Report) -> None:
    assert report.cubin[:4] == b"\x7fELF"
    assert (report.spill_stores, report.spill_loads, report.stack, report.smem) == (0, 0, 0, 0)
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
    assert len(re.findall(r"ld\.relaxed\.gpu\.global\.L1::no_allocate\.b32", ptx)) == 3 + gathered
    assert len(re.findall(r"cvt\.rn\.f16x2\.e4m3x2", ptx)) == 8 * key.rows
    assert len(re.findall(r"cvt\.rn\.bf16x2\.f32", ptx)) == 8 * key.rows
    assert len(re.findall(r"@%p\d+ st\.global\.v4\.b32", ptx)) == 2 * key.rows
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
    assert len([line for line in code if re.search(r"\bSTG\.E\.128", line)]) == 2 * key_rows


@pytest.mark.parametrize("rows", [1, 2, 4, 8])
def test_other_configurations(rows: int) -> None:
    report = compile_report(GatherKey("sm_90a", rows=rows, warps=8))
    check(report)
    assert ".reqntid 256" in report.ptx


def test_rows_per_warp() -> None:
    few, many = FOUR_ROWS_CALLS.start, FOUR_ROWS_CALLS.stop
    assert [rows_per_warp(rows) for rows in (1, 8192, few - 1, many, 262144, 2**40)] == [2] * 6
    assert [rows_per_warp(rows) for rows in (few, 16384, 33280, 65536, many - 1)] == [4] * 5


def test_every_kernel_that_a_call_can_need_is_deployed() -> None:
    needed = {
        GatherKey("sm_90a", gathered=gathered, rows=rows_per_warp(rows))
        for gathered in (False, True)
        for rows in (1, FOUR_ROWS_CALLS.start, FOUR_ROWS_CALLS.stop)
    }
    keys = deployment_keys(None, 1, "sm_90a")
    assert set(keys) == needed
    assert len(keys) == len(needed) == 4
    assert deployment_keys(None, 1, "sm_80") == []


def test_blocks_per_request() -> None:
    key = GatherKey("sm_90a", warps=4, rows=2)
    assert blocks_per_request(key, requests=1, rows=1, multiprocessors=132, per_multiprocessor=16) == 1
    assert blocks_per_request(key, requests=1, rows=8, multiprocessors=132, per_multiprocessor=16) == 1
    assert blocks_per_request(key, requests=1, rows=9, multiprocessors=132, per_multiprocessor=16) == 2
    assert blocks_per_request(key, requests=1, rows=10**6, multiprocessors=132, per_multiprocessor=16) == 2112
    assert blocks_per_request(key, requests=4, rows=10**6, multiprocessors=132, per_multiprocessor=16) == 528
    assert blocks_per_request(key, requests=5000, rows=10**6, multiprocessors=132, per_multiprocessor=16) == 1
