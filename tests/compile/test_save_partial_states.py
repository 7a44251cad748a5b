"""The kernels of save_partial_states, compiled for every architecture they claim. Needs CuTe DSL and no GPU."""

from __future__ import annotations

import re

import pytest

from cute_kernels.runtime.compile import Report, compile_report

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from cute_kernels.compressor.save import SaveKey

ARCHS = ("sm_90a", "sm_100a", "sm_103a", "sm_80", "sm_120a")
WIDTHS = (1024, 512, 256)


def check(report: Report) -> None:
    assert report.cubin[:4] == b"\x7fELF"
    assert (report.spill_stores, report.spill_loads, report.stack, report.smem) == (0, 0, 0, 0)
    assert f".target {report.key.arch}" in report.ptx
    assert not re.search(r"\bdiv\.|\brem\.|st\.local|ld\.local|\.ftz", report.ptx)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("arch", ARCHS)
def test_compiles(arch: str, width: int) -> None:
    report = compile_report(SaveKey(arch, width))
    check(report)
    assert report.registers <= 40
    ptx = report.ptx
    assert len(re.findall(r"ld\.relaxed\.gpu\.global\.L1::no_allocate\.v4\.b32", ptx)) == 4
    assert len(re.findall(r"ld\.global\.nc\.v4\.b32", ptx)) == 2
    assert len(re.findall(r"add\.(?:rn\.)?f32", ptx)) == 8
    assert len(re.findall(r"st\.global\.v4\.b32", ptx)) == 4
    assert ("griddepcontrol.wait" in ptx) == (arch not in ("sm_80",))


@pytest.mark.parametrize("arch", ARCHS)
def test_a_row_is_on_its_way_before_anything_waits(arch: str) -> None:
    """The loads of kv and score come before those of position and slot, and so before whatever waits for these."""
    report = compile_report(SaveKey(arch, 1024))
    if report.sass is None:
        pytest.skip("nvdisasm is not installed (package nvidia-cuda-nvdisasm)")
    code = [line for line in report.sass.splitlines() if ";" in line]
    loads = [i for i, line in enumerate(code) if re.search(r"\bLDG\.E", line)]
    rows = [i for i in loads if re.search(r"NA\.128", code[i])]
    assert len(loads) == 8
    assert rows == loads[:4]
    assert max(rows) < min(i for i, line in enumerate(code) if re.search(r"\bEXIT|\bBRA|\bSTG", line))
    # the bias is 16 bytes a lane too, and the only load that has to wait
    assert all(re.search(r"\.128", code[i]) for i in loads[6:])


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(
    "fields",
    [{"rows": 2}, {"warps": 8}, {"vectors": 1, "warps": 8}, {"evict_first": True}, {"all_biases": True}],
    ids=str,
)
def test_other_configurations(width: int, fields: dict[str, int]) -> None:
    report = compile_report(SaveKey("sm_90a", width, **fields))
    check(report)
    assert f".reqntid {32 * fields.get('warps', 4)}" in report.ptx
    count = 2 * fields.get("vectors", 2) * fields.get("rows", 1)
    biases = 4 * fields.get("vectors", 2) if "all_biases" in fields else 0
    assert len(re.findall(r"ld\.relaxed\.gpu\S*\.v4\.b32", report.ptx)) == count + biases
    assert len(re.findall(r"L2::cache_hint", report.ptx)) == (count if "evict_first" in fields else 0)
