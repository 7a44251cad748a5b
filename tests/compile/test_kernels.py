# SPDX-License-Identifier: Apache-2.0
"""Compiling itself, and the insert kernel's order of loads. Needs CuTe DSL and no GPU."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys

import pytest
import torch

from cute_kernels.formats import FP8_DS_MLA
from cute_kernels.runtime import compile as compile_
from cute_kernels.runtime.arch import SMEM_BYTES, arch_number, arch_of

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from cute_kernels.kv_cache.insert import MANY_ROWS, InsertKey, key_for


def test_which_inserts_read_through_l1() -> None:
    keys = [key_for("sm_90a", FP8_DS_MLA.id, rows) for rows in (1, MANY_ROWS - 1, MANY_ROWS, 10**6)]
    assert [key.through_l1 for key in keys] == [False, False, True, True]


@pytest.mark.parametrize(("warps", "rows"), [(8, 1), (4, 2), (4, 4)])
def test_insert_with_several_rows_loads_them_all_first(warps: int, rows: int) -> None:
    report = compile_.compile_report(InsertKey("sm_90a", warps=warps, rows=rows))
    assert (report.spill_stores, report.spill_loads) == (0, 0)
    assert f".reqntid {warps * 32}" in report.ptx
    order = re.findall(r"ld\.global\.nc\.L1|shfl\.sync\.bfly", report.ptx)
    assert order[: 2 * rows] == ["ld.global.nc.L1"] * (2 * rows)
    assert len(order) == rows * (2 + 7)


def test_source_locations_change_no_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiling does without them: they take a third of its time. Were the switch gone, it would take that again."""
    import cutlass.base_dsl.dsl as dsl

    assert hasattr(dsl, "_set_enable_frame_filtering")
    without = compile_.compile_report(InsertKey("sm_90a"))
    monkeypatch.setattr(compile_, "_without_locations", contextlib.nullcontext)
    with_ = compile_.compile_report(InsertKey("sm_90a"))
    assert (without.ptx, without.cubin, without.registers) == (with_.ptx, with_.cubin, with_.registers)


def test_what_does_not_compile_is_tried_once_more_with_source_locations(monkeypatch: pytest.MonkeyPatch) -> None:
    import cutlass.base_dsl.dsl as dsl
    import cutlass.cute as cute

    switch, found = dsl._set_enable_frame_filtering, []

    def fails(*args: object, **more: object) -> None:
        found.append(dsl._set_enable_frame_filtering is switch)
        raise RuntimeError(f"attempt {len(found)}")

    monkeypatch.setattr(cute, "compile", fails)
    with pytest.raises(RuntimeError, match="attempt 2"):
        compile_.compile_report(InsertKey("sm_90a"))
    assert found == [False, True]


def test_reports_are_not_counted() -> None:
    before = compile_.compilations()
    compile_.compile_report(InsertKey("sm_90a"))
    assert compile_.compilations() == before
    assert not compile_.is_ready(InsertKey("sm_90a"))


def test_keys_differ_by_everything_the_code_depends_on() -> None:
    keys = [
        InsertKey("sm_90a"),
        InsertKey("sm_100a"),
        InsertKey("sm_90a", kv_format="another/1"),
        InsertKey("sm_90a", warps=8),
        InsertKey("sm_90a", rows=2),
        InsertKey("sm_90a", through_l1=True),
    ]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize(
    ("capability", "arch"),
    [((8, 0), "sm_80"), ((8, 9), "sm_89"), ((9, 0), "sm_90a"), ((10, 0), "sm_100a"), ((10, 3), "sm_103a")],
)
def test_arch_of(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], arch: str) -> None:
    arch_of.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    assert arch_of(0) == arch
    assert arch in SMEM_BYTES
    arch_of.cache_clear()


@pytest.mark.parametrize("capability", [(7, 5), (9, 9), (13, 0)])
def test_unknown_device_is_refused(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    arch_of.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    with pytest.raises(ValueError, match=rf"cuda:3: expected compute capability .*9\.0.*got {capability[0]}\."):
        arch_of(3)
    arch_of.cache_clear()


def test_arch_numbers() -> None:
    assert [arch_number(a) for a in ("sm_89", "sm_90a", "sm_100a", "sm_103a")] == [89, 90, 100, 103]
    with pytest.raises(ValueError, match="sm_90a"):
        arch_number("sm_90")


def test_smem_limits_are_the_compilers_own() -> None:
    from cutlass.memory import get_smem_capacity_in_bytes

    assert {arch: get_smem_capacity_in_bytes(arch.rstrip("a")) for arch in SMEM_BYTES} == SMEM_BYTES


def test_import_takes_no_dsl() -> None:
    code = "import sys, cute_kernels, cute_kernels.runtime.compile; sys.exit('cutlass' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
