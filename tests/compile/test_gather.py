# SPDX-License-Identifier: Apache-2.0
"""The kernels of dequantize_and_gather_k_cache, compiled for every architecture they claim. Needs CuTe DSL, no GPU."""

from __future__ import annotations

import pytest
import torch

from cute_kernels.formats import FP8_DS_MLA

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from cute_kernels.kv_cache.gather import (
    BULK_ROWS,
    GatherBulkKey,
    GatherKey,
    ctas_per_request,
    deployment_keys,
    key_for,
    wants_bulk,
)
from cute_kernels.sparse_mla.convert_mixed import ConvertMixedKey
from cute_kernels.sparse_mla.gather_paged import GatherPagedKey
from tests.compile.reports import compile_report

ARCHS = ("sm_90a", "sm_100a", "sm_103a", "sm_89", "sm_120a")


@pytest.mark.parametrize("key_rows", [2, 4])
@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize("arch", ARCHS)
def test_two_rows_are_on_their_way_before_one_is_used(arch: str, gathered: bool, key_rows: int) -> None:
    report = compile_report(GatherKey(arch, gathered=gathered, rows=key_rows))
    if report.in_sass is None:
        pytest.skip("nvdisasm is not installed (package nvidia-cuda-nvdisasm)")
    sass = report.in_sass
    rows = sass.places(r"\bLDG\.E\S*\.64")
    assert len(rows) == 3 * key_rows
    # of four rows, the assembler starts to convert the first before it asks for the last
    first_use = sass.first_place(r"\bSTG|E4M3")
    assert len([i for i in rows if i < first_use]) >= 6
    assert len(sass.places(r"\bSTG\.E\.128")) == 4 * key_rows


def test_rows_of_mixed_calls_are_on_their_way_before_one_is_used() -> None:
    report = compile_report(ConvertMixedKey("sm_90a"))
    assert report.registers <= 48
    assert report.spill_loads == report.spill_stores == 0
    if report.in_sass is None:
        pytest.skip("nvdisasm is not installed (package nvidia-cuda-nvdisasm)")
    rows = report.in_sass.places(r"\bLDG\.E\S*\.64")
    stores = report.in_sass.places(r"\bSTG\.E\.128")
    # the assembler has a copy of it for either cache
    at_once = 2 * ConvertMixedKey.rows
    assert len(rows) == len(stores) == 2 * at_once
    for first in (0, at_once):
        assert not any(rows[first] < place < rows[first + at_once - 1] for place in stores)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_80"])
def test_rows_of_paged_prefill_are_on_their_way_before_one_is_used(arch: str) -> None:
    report = compile_report(GatherPagedKey(arch, "none"))
    assert report.registers <= 48
    assert report.spill_loads == report.spill_stores == 0
    if report.in_sass is None:
        pytest.skip("nvdisasm is not installed (package nvidia-cuda-nvdisasm)")
    rows = report.in_sass.places(r"\bLDG\.E\S*\.64")
    stores = report.in_sass.places(r"\bSTG\.E\.128")
    # the assembler has copies of it
    at_once = 3 * GatherPagedKey.rows
    assert rows
    assert len(rows) % at_once == 0
    for first in range(0, len(rows), at_once):
        assert not any(rows[first] < place < rows[first + at_once - 1] for place in stores)


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
