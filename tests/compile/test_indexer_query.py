# SPDX-License-Identifier: Apache-2.0
"""The query kernels of the indexer, compiled for every architecture they claim. Needs CuTe DSL and no GPU."""

from __future__ import annotations

import re

import pytest

from cute_kernels.runtime.compile import Report

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from cute_kernels.dsl import convert
from cute_kernels.indexer import query
from cute_kernels.indexer.query import QueryKey
from cute_kernels.models import MODELS
from cute_kernels.numerics import E2M1_ROUNDINGS
from tests.compile.reports import compile_report

ARCHS = ("sm_90a", "sm_100a", "sm_103a", "sm_89", "sm_120a")


def check(report: Report) -> None:
    assert report.cubin[:4] == b"\x7fELF"
    assert (report.spill_stores, report.spill_loads, report.stack, report.smem) == (0, 0, 0, 0)
    assert f".target {report.key.arch}" in report.ptx
    assert not re.search(r"\bdiv\.|\brem\.|st\.local|ld\.local|\.ftz", report.ptx)


def count(pattern: str, report: Report) -> int:
    return len(re.findall(pattern, report.ptx))


@pytest.mark.parametrize("rounding", ["", *E2M1_ROUNDINGS])
@pytest.mark.parametrize("arch", ARCHS)
def test_compiles(arch: str, rounding: str) -> None:
    key = query.key_for(arch, rounding, False, query.MANY_HEADS)
    report = compile_report(key)
    check(report)
    groups = key.groups
    # both halves of a lane's columns; the cosines and the sines
    assert count(r"ld\.relaxed\.gpu\.global\.v4\.b32", report) == 2 * groups
    assert count(r"ld\.global\.nc\.v4\.b32", report) == 2
    # nothing of the rotation is fused
    assert count(r"\bmul\.rn\.f32", report) == 16 * groups + (2 if rounding else 3)
    assert count(r"\bsub\.rn\.f32", report) == count(r"\badd\.rn\.f32", report) == 4 * groups
    assert count(r"cvt\.rn\.satfinite\.e4m3x2\.(?:f32|bf16x2)", report) == (0 if rounding else 8 * groups)
    is_blackwells = arch in convert.BLACKWELL
    assert count(r"xorsign\.abs\.f16x2", report) == (16 * groups if rounding and not is_blackwells else 0)
    assert count(r"cvt\.rn\.satfinite\.e2m1x2\.f32", report) == (8 * groups if rounding and is_blackwells else 0)
    assert count(r"cvt\.rp\.satfinite\.ue8m0x2\.f32", report) == (groups if rounding and is_blackwells else 0)
    assert count(r"shfl\.sync\.bfly", report) == 3 * groups
    assert ("griddepcontrol.wait" in report.ptx) == (arch != "sm_89")


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_columns_are_on_their_way_before_anything_waits(arch: str) -> None:
    key = query.key_for(arch, "", False, query.MANY_HEADS)
    report = compile_report(key)
    if report.sass is None:
        pytest.skip("nvdisasm is not installed (package nvidia-cuda-nvdisasm)")
    code = [line for line in report.sass.splitlines() if ";" in line]
    loads = [i for i, line in enumerate(code) if re.search(r"\bLDG\.E", line)]
    columns = [i for i in loads if re.search(r"128\.STRONG", code[i])]
    assert columns == loads[: 2 * key.groups]
    assert max(loads) < min(i for i, line in enumerate(code) if re.search(r"\bEXIT|\bBRA|\bSTG|\bSHFL", line))


@pytest.mark.parametrize("size", query.SIZES)
@pytest.mark.parametrize("rounding", ["", "ties_to_lower"])
def test_hadamard_compiles(rounding: str, size: int) -> None:
    key = query.key_for("sm_90a", rounding, True, size)
    report = compile_report(key)
    check(report)
    groups = key.groups
    # strides 1, 2, 4 and 64 within a lane, 8, 16 and 32 between lanes
    assert count(r"\bfma\.rn\.f32", report) == 3 * 16 * groups
    assert count(r"shfl\.sync\.bfly", report) == (3 + 3 * 16) * groups


def test_other_dtypes_compile() -> None:
    check(compile_report(QueryKey("sm_90a", "", False, True, False, groups=1)))
    check(compile_report(QueryKey("sm_90a", "ties_to_lower", False, True, True, True)))


def test_deployments() -> None:
    config = MODELS["v4-flash"]
    for kernel, forms in ((query.FP8, 2), (query.MXFP4, 4)):
        keys = kernel.deployment_keys(config, 1, "sm_90a")
        assert len(set(keys)) == len(keys) == 2 * forms * len(query.SIZES)
        assert len(kernel.deployment_keys(config, 1, "sm_80")) == len(keys)


def test_sizes() -> None:
    sizes = [query.size_of(64 * tokens) for tokens in (1, 64, 127, 128, 1024, 4095, 4096, 32768)]
    several, many = query.SEVERAL_HEADS, query.MANY_HEADS
    assert sizes == [0, 0, 0, several, several, several, many, many]
