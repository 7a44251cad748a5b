# SPDX-License-Identifier: Apache-2.0
"""The kernels of save_partial_states, compiled for every architecture they claim. Needs CuTe DSL and no GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from cute_kernels.compressor.call import SaveCall
from cute_kernels.compressor.save import MANY_COLUMNS, SaveKey, key_for, why_not
from tests.compile.reports import compile_report

ARCHS = ("sm_90a", "sm_100a", "sm_103a", "sm_80", "sm_120a")
WIDTHS = (1024, 512, 256, 128)


@pytest.mark.parametrize("arch", ARCHS)
def test_a_row_is_on_its_way_before_anything_waits(arch: str) -> None:
    """The loads of kv and score come before those of position and slot, and so before whatever waits for these."""
    report = compile_report(SaveKey(arch, 1024))
    if report.in_sass is None:
        pytest.skip("nvdisasm is not installed (package nvidia-cuda-nvdisasm)")
    sass = report.in_sass
    loads = sass.places(r"\bLDG\.E")
    rows = sass.places(r"\bLDG\.E.*NA\.128")
    assert len(loads) == 8
    assert rows == loads[:4]
    assert max(rows) < sass.first_place(r"\bEXIT|\bBRA|\bSTG")
    # the bias is 16 bytes a lane too, and the only load that has to wait
    assert set(loads[6:]) <= set(sass.places(r"\bLDG\.E.*\.128"))


@pytest.mark.parametrize("arch", ARCHS)
def test_long_calls_store_kv_before_they_load_score(arch: str) -> None:
    report = compile_report(key_for(arch, 1024, MANY_COLUMNS))
    if report.in_sass is None:
        pytest.skip("nvdisasm is not installed (package nvidia-cuda-nvdisasm)")
    sass = report.in_sass
    stores = sass.places(r"\bSTG\.E\.128")
    rows = sass.places(r"\bLDG\.E\.128\.STRONG")
    assert (len(stores), len(rows)) == (4, 4)
    assert rows[1] < stores[0] < stores[1] < rows[2] < rows[3] < stores[2]


def test_which_calls_are_long() -> None:
    for width in WIDTHS:
        many = (MANY_COLUMNS if width >= 512 else 2 * MANY_COLUMNS) // width
        long = [key_for("sm_90a", width, rows) for rows in (1, many - 1, many, 100 * many)]
        assert [(key.kv_first, key.through_l1) for key in long] == [(False, False)] * 2 + [(True, True)] * 2
        assert len({*long}) == 2


def test_whole_rows_fit_into_a_block() -> None:
    found = {width: key_for("sm_90a", width, 1) for width in (128, 256, 384, 512, 640, 768, 1024, 1536, 2048, 8192)}
    warps = {width: (key.vectors, key.warps) for width, key in found.items()}
    assert warps == {
        128: (1, 4), 256: (2, 4), 384: (1, 3), 512: (2, 4), 640: (1, 5), 768: (2, 3), 1024: (2, 4), 1536: (2, 6),
        2048: (2, 8), 8192: (2, 32),
    }  # fmt: skip
    for width, key in found.items():
        assert key.warps % (width // (128 * key.vectors)) == 0


@pytest.mark.parametrize(("width", "fits"), [(128, True), (8192, True), (3968, True), (192, False), (8448, False)])
def test_widths_that_no_block_can_take_are_refused(width: int, fits: bool) -> None:
    rows, ape, pool = torch.zeros(2, width), torch.zeros(4, width), torch.zeros(1, 4, 2 * width)
    numbers = torch.zeros(2, dtype=torch.int64)
    reason = why_not(SaveCall(rows, rows, ape, numbers, pool, numbers, 4, 4))
    assert (not reason) is fits
    assert ("multiple of 128" in reason) is not fits
