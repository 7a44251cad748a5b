# SPDX-License-Identifier: Apache-2.0
"""Kernels that nobody has run, in the report: what is kept of them, bounds of their times, and what is stale."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cute_kernels.runtime.work import Shape, Work
from perf import compiled, report, report_compiled, roofline
from perf.compiled import Compiled, Kernel
from perf.records import Book

ROOT = Path(__file__).parent.parent.parent
KERNEL = Kernel(("sparse_mla_decode",), "DecodeKey(heads=64)", "sm_100a", 158, 0, 225504, 512, {"tcgen05.mma": 40})
WORK = Work(
    op="sparse_mla_decode",
    kernel="64 heads",
    tile="64 keys, 64 heads",
    blocks=1,
    hbm=64 * 584,
    mma={"bf16": 2 * 64 * 64 * 1024},
    smem={"in": 100 * 1024, "out": 188 * 1024},
    flops=2 * 64 * 64 * 1024,
    shapes=(Shape("b256 h64 128+512", 2560, 0.129e9),),
)
FOUND = Compiled({"dsl": "4.8.1", "toolkit": "12.9"}, (KERNEL, replace(KERNEL, arch="sm_103a")), (WORK,))


def test_what_is_kept_comes_back(tmp_path: Path) -> None:
    assert compiled.read(tmp_path) is None
    path = tmp_path / compiled.FILE
    path.parent.mkdir(parents=True)
    path.write_text(compiled.to_json(FOUND))
    assert compiled.read(tmp_path) == FOUND
    for odd in ("{}", '{"versions": {}, "kernels": [{}], "work": []}', "[]", "{"):
        path.write_text(odd)
        with pytest.raises(ValueError, match=r"blackwell|Expecting"):
            compiled.read(tmp_path)


def test_bounds_are_the_largest_of_three() -> None:
    found = roofline.bound(WORK)
    assert (round(found.hbm), found.mma, found.smem, found.binding) == (1279, 1024, 2304, "shared memory")
    assert round(roofline.tflops(WORK)) == 997
    assert roofline.microseconds(WORK, WORK.shapes[0]) == pytest.approx(2560 / 148 * 2304 / 1.85e3)
    few = replace(WORK, smem={}, mma={"bf16": 8192, "e4m3": 16384, "e2m1": 32768})
    assert roofline.bound(few).mma == 3
    assert roofline.bound(few).binding == "memory"
    assert roofline.microseconds(few, Shape("", 1, 8e6)) == pytest.approx(1.0)
    pair = replace(WORK, blocks=2)
    assert roofline.tflops(pair) == pytest.approx(roofline.tflops(WORK))
    assert roofline.microseconds(pair, WORK.shapes[0]) == pytest.approx(2560 / 74 * 2304 / 1.85e3)
    with pytest.raises(ValueError, match="mma: expected kinds among bf16, e4m3, e2m1, got fp8"):
        replace(WORK, mma={"fp8": 1})


def test_the_report_keeps_them_apart_from_measurements() -> None:
    text = report.render_report(Book((), ()), FOUND)
    assert "Nothing below is a measurement" in text.split(report_compiled.TITLE)[1]
    (line,) = [line for line in text.splitlines() if "DecodeKey" in line]
    assert "| sm_100a, sm_103a | 158 | 0 | 225504 | 512 | 40 tcgen05.mma |" in line
    assert "| 64 keys, 64 heads | 1279 | 1024 | 2304 |  | shared memory | 997 |" in text
    assert "| b256 h64 128+512 | 2560 | 21.5 | 16.1 |" in text
    assert report_compiled.TITLE not in report.render_report(Book((), ()))
    assert "None." in "\n".join(report_compiled.render(Compiled(FOUND.versions, (), ())))


def test_what_differs_from_the_file_is_named() -> None:
    assert compiled.differences(FOUND, FOUND.kernels) == []
    (found,) = compiled.differences(FOUND, [replace(KERNEL, registers=160)])
    assert found.endswith("is out of date on DecodeKey(heads=64) for sm_100a: run python -m perf compiled")
    assert compiled.differences(None, [KERNEL]) != []


def test_tensor_memory_is_read_from_the_code() -> None:
    ptx = "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1], 256;\n"
    assert compiled.tensor_columns(ptx) == 256
    assert compiled.tensor_columns("mov.b32 %r1, 256;") == 0


def test_the_file_is_of_todays_kernels_and_plans() -> None:
    """As far as that takes no compilation: tests/compile has the rest."""
    pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
    known = compiled.read(ROOT)
    assert known is not None, "run python -m perf compiled"
    keys = [(compiled.name_of(key), key.arch) for key in compiled.own_keys()]
    stale = "out of date: run python -m perf compiled"
    assert [(k.key, k.arch) for k in known.kernels] == keys, stale
    assert list(known.work) == roofline.all_work(), stale
