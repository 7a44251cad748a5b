# SPDX-License-Identifier: Apache-2.0
"""The kernels of the picks of a row, compiled for every architecture they claim. Needs CuTe DSL and no GPU."""

from __future__ import annotations

import itertools

import pytest

from cute_kernels.runtime.arch import SMEM_BYTES
from cute_kernels.runtime.report import problems

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from cute_kernels.indexer import topk_whole
from cute_kernels.indexer.topk import CLUSTER_ARCHS
from cute_kernels.indexer.topk_held import AnyTopKKey, HeldTopKKey
from cute_kernels.indexer.topk_select import MANY, deployment_keys, groups_for, key_for, keys_of, share_for
from cute_kernels.models import MODELS
from tests.compile.reports import RESERVED, compile_report
from tests.compile.sampling import of_run

MULTIPROCESSOR_BYTES = 228 << 10
"""Of shared memory that blocks of an H200 or a B200 share."""

ARCHS = ("sm_90a", "sm_100a", "sm_103a", "sm_80", "sm_89", "sm_120a")


@pytest.mark.parametrize("arch", ARCHS)
def test_compiles(arch: str, pytestconfig: pytest.Config) -> None:
    keys = keys_of(arch)
    assert deployment_keys(MODELS["v4-flash"], 1, arch) == [*keys, *topk_whole.keys_of(arch)]
    chosen = of_run(keys, pytestconfig) if arch == "sm_90a" else [keys[0], keys[-1]]
    for key in dict.fromkeys((*chosen, AnyTopKKey(arch, *MANY))):
        report = compile_report(key)
        assert problems(key, report) == []
        assert (report.stack, report.smem) == (0, key.smem_bytes)
        assert not key.is_spread or 2 * (report.smem + RESERVED) > MULTIPROCESSOR_BYTES
        assert report.in_ptx.has(rf"\.reqntid {32 * key.warps}\b")
        assert not report.in_ptx.has(r"\bdiv\.|\brem\.|st\.local|ld\.local")
        # orders are unsigned: those of negative numbers have the highest bit set
        assert not report.in_ptx.has(r"redux\.sync\.(min|max)\.s32")
        assert report.in_ptx.has(r"barrier\.cluster") == (key.cluster > 1)
        assert report.in_ptx.has(r"griddepcontrol\.wait") == (arch not in ("sm_80", "sm_89"))
        assert report.in_sass is None or not report.in_sass.has(r"STL|LDL")
        # registers for 32 warps, as far as whole blocks have them, or for a block that shares its row
        warps = max(key.warps, 16) if key.cluster > 1 else 32 // key.warps * key.warps
        assert report.registers * 32 * warps <= 65536
        if report.in_sass is not None:
            sass = report.in_sass
            loads, maxima = sass.places(r"\bLDG\.E\.128"), sass.places("FMNMX")
            # all of a tile, and all of a held row, are on their way before one is waited for
            for number in [key.vectors] + ([key.row.held.vectors] if isinstance(key, AnyTopKKey) else []):
                waits = min(i for i in maxima if i > loads[0])
                assert loads[number - 1] < waits
                loads = [i for i in loads if i > waits]


@pytest.mark.parametrize("arch", ARCHS)
def test_whole_rows_compile(arch: str) -> None:
    for key in topk_whole.keys_of(arch):
        report = compile_report(key)
        assert problems(key, report) == []
        assert (report.stack, report.smem) == (0, 0)
        assert report.in_ptx.has(r"\.reqntid 256\b")
        assert not report.in_ptx.has(r"\bdiv\.|\brem\.|st\.local|ld\.local")
        # two blocks of one multiprocessor's 64 warps each
        assert report.registers * 32 * 64 <= 2 * 65536
        assert report.in_ptx.count(r"st\.global\.v4") == 2 * key.chunks


@pytest.mark.parametrize("arch", sorted(SMEM_BYTES))
def test_every_row_has_its_kernel(arch: str) -> None:
    keys = keys_of(arch)
    assert len(set(keys)) == len(keys)
    assert all(key.smem_bytes <= SMEM_BYTES[arch] for key in keys)
    most = max(key.capacity for key in keys)
    assert most >= 1 << 18
    assert (most >= 1 << 20) == (arch in CLUSTER_ARCHS)
    for rows, k in itertools.product((1, 30, 31, 63, 64, 5000), (1, 512, 1024, 4096)):
        for width in (1, 4096, 4097, 8192, 16384, 16385, 32768, 32771, 65536, most):
            key = key_for(arch, rows, width, k)
            assert key in keys
            assert width <= key.capacity
            assert key.cluster == 1 or rows < 31 or width > 1 << 19
            assert key.is_spread == (rows < 5000 and width <= 24576 and arch in CLUSTER_ARCHS)
        assert key_for(arch, rows, 2 * most, k).capacity == most


def test_few_long_rows_are_shared() -> None:
    shapes = (1, 65536), (14, 65537), (15, 65537), (15, 98305), (8, 1 << 18), (1, 1 << 20), (64, 1 << 20)
    assert [key_for("sm_90a", *shape, 512).cluster for shape in shapes] == [4, 8, 4, 4, 8, 8, 8]
    more = (1, 32768), (8, 32769), (14, 65536), (14, 65537), (30, 32769), (31, 32769), (30, 1 << 19)
    assert [key_for("sm_90a", *shape, 512).cluster for shape in more] == [1, 4, 4, 8, 4, 1, 4]
    assert [key_for("sm_90a", 3, width, 512).warps for width in (65536, 65537, 98304, 98305)] == [16, 24, 24, 16]


@pytest.mark.parametrize(("rows", "columns", "k", "warps"), [
    (1, 4096, 1, 16), (5000, 4096, 1, 8), (5000, 4097, 512, 10), (1, 5120, 1, 20), (263, 5121, 1, 12),
    (264, 6144, 512, 8), (1, 8192, 1, 16), (263, 8192, 512, 16), (264, 8192, 512, 8), (9999, 8192, 4096, 8),
    (9999, 5120, 512, 10), (1, 8193, 4096, 20), (128, 10241, 1, 24), (128, 16384, 512, 32), (128, 16385, 512, 20),
    (1, 20481, 2048, 24), (128, 24577, 512, None), (129, 8193, 512, 12), (263, 16384, 512, 16), (264, 12289, 1025, 16),
    (264, 8193, 1024, None), (129, 16385, 512, None),
])  # fmt: skip
def test_rows_that_registers_hold(rows: int, columns: int, k: int, warps: int | None) -> None:
    key = key_for("sm_90a", rows, columns, k)
    assert (key.warps if isinstance(key, HeldTopKKey) else None) == warps


def test_many_rows_share_multiprocessors() -> None:
    key = key_for("sm_90a", 264, 17408, 512)
    assert key.config.is_streamed
    assert not key.is_spread
    assert 32 // key.warps * (key.smem_bytes + RESERVED) <= MULTIPROCESSOR_BYTES


def test_enough_maxima_for_every_share() -> None:
    for key in keys_of("sm_90a"):
        if isinstance(key, HeldTopKKey):
            continue
        runs = key.warps * key.cluster
        for k in (1, 100, 512, 513, 1024, 2048):
            share, groups = share_for(key, k), groups_for(key, k)
            assert share * runs >= k > (share - 1) * runs
            assert groups in (1, 2, 4, 8)
            assert groups * 32 >= share
            assert groups == 8 or groups * 32 * runs >= 2 * k
            assert groups == 1 or groups // 2 * 32 * runs < 2 * k
