# SPDX-License-Identifier: Apache-2.0
"""The kernels of the index builders, compiled for every architecture they claim. Needs CuTe DSL and no GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from cute_kernels.runtime.compile import KernelKey

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from cute_kernels.compressor.slots import SlotsKey
from cute_kernels.indices.c128a import EntriesKey
from cute_kernels.indices.combine import CombineKey
from cute_kernels.indices.launching import group_width, page_argument, shape_for, shapes_for, too_many_entries
from cute_kernels.indices.mixed import MixedKey
from cute_kernels.indices.step_metadata import StepKey
from cute_kernels.indices.translate import TranslateKey
from cute_kernels.indices.window import WindowKey
from tests.compile.reports import compile_report

KEYS = (
    TranslateKey("", 4),
    TranslateKey("", 4, warps=8),
    TranslateKey("", 4, warps=2, groups=2),
    TranslateKey("", 4, warps=2, groups=2, through_l1=True),
    TranslateKey("", 1, is_shift=False, warps=8),
    CombineKey("", 4),
    CombineKey("", 4, groups=3),
    CombineKey("", 1),
    MixedKey("", 4),
    MixedKey("", 4, warps=8, is_local=True),
    MixedKey("", 4, warps=2, groups=2, is_local=True),
    MixedKey("", 4, warps=2, groups=2, through_l1=True, is_local=True),
    MixedKey("", 1, is_shift=False, warps=8),
    WindowKey("", 4),
    WindowKey("", 1, wide_positions=False, is_shift=False),
    EntriesKey("", 4),
    EntriesKey("", 1, wide_positions=False, is_shift=False),
    SlotsKey(""),
    StepKey("", 4),
    StepKey("", 1),
)


def named(key: KernelKey) -> str:
    return repr(key).replace("arch='', ", "")


@pytest.mark.parametrize(
    "key", [k for k in KEYS if isinstance(k, (TranslateKey, CombineKey)) and k.width == 4], ids=named
)
def test_picks_are_on_their_way_before_anything_waits(key: KernelKey) -> None:
    """All 16-byte loads of a pass come before the ones that name the row's request, and so before whatever waits."""
    report = compile_report(replace(key, arch="sm_90a"))
    if report.in_sass is None:
        pytest.skip("nvdisasm is not installed (package nvidia-cuda-nvdisasm)")
    sass = report.in_sass
    loads, wide = sass.places(r"\bLDG\.E"), sass.places(r"\bLDG\.E.*\.128")
    passes, others = 1, len(loads) - key.groups
    if isinstance(key, TranslateKey):
        loads = loads[1:]  # of the valid token, which nothing waits for before the end
        passes, others = 2, 1 + 4 * key.groups  # in front of the loop and in it: the request, and pages of picks
    picks = [i in wide for i in loads]
    assert picks[: key.groups + others] == [True] * key.groups + [False] * others
    assert picks.count(True) == passes * key.groups
    assert len(sass.places(r"\bSTG\.E\.128")) == passes * key.groups


def test_runs_of_columns_follow_alignment() -> None:
    matrix = torch.zeros(8, 16, dtype=torch.int32)
    assert matrix.data_ptr() % 16 == 0
    assert group_width((8,), matrix, matrix[:, 4:]) == 4
    assert group_width((), matrix[:, :7]) == 4
    assert group_width((8, 6), matrix) == 1
    assert group_width((8,), matrix, matrix[:, 1:]) == 1
    assert group_width((8,), matrix.view(-1)[:120].view(8, 15)) == 1
    assert group_width((8,), matrix.view(-1)[:15].view(1, 15)) == 4, "the stride of a single row does not matter"


@pytest.mark.parametrize(
    ("columns", "width", "shapes"),
    [
        (0, 4, [(1, 1, False), (1, 2, False), (1, 2, True)]),
        (128, 4, [(1, 1, False), (1, 2, False), (1, 2, True)]),
        (132, 4, [(2, 1, False), (1, 2, False), (1, 2, True)]),
        (512, 4, [(4, 1, False), (2, 2, False), (2, 2, True)]),
        (1024, 4, [(8, 1, False), (4, 2, False), (2, 2, True)]),
        (8192, 4, [(8, 1, False), (4, 2, False), (2, 2, True)]),
        (512, 1, [(8, 1, False), (4, 2, False), (2, 2, False)]),
    ],
)
def test_warps_and_groups_of_a_row(columns: int, width: int, shapes: list[tuple[int, int, bool]]) -> None:
    assert shapes_for(columns, width) == shapes
    assert {shape_for(rows, columns, width) for rows in (1, 64, 511, 512, 4095, 4096, 10**6)} == set(shapes)


@pytest.mark.parametrize(
    ("page_rows", "argument"),
    [((64,), (True, (6,))), ((1, 2), (True, (0, 1))), ((64, 3), (False, (64, 3))), ((2**30,), (True, (30,)))],
)
def test_page_sizes(page_rows: tuple[int, ...], argument: tuple[bool, tuple[int, ...]]) -> None:
    assert page_argument(*page_rows) == argument


@pytest.mark.parametrize(
    ("columns", "block_size", "fits"),
    [(4, 64, True), (2**24, 64, True), (2**24 + 1, 64, False), (0, 2**30 + 1, False), (0, 2**30, True)],
)
def test_entries_that_int32_can_number(columns: int, block_size: int, fits: bool) -> None:
    table = torch.empty(1, dtype=torch.int32).expand(2, 1).as_strided((2, columns), (0, 0))
    why = too_many_entries("block_table", table, block_size)
    assert (not why) is fits
    assert ("a row of block_table must have at most 1073741824 entries" in why) is not fits
