# SPDX-License-Identifier: Apache-2.0
"""The facts' experiments, compiled for Blackwell. Needs CuTe DSL, no GPU."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from cute_kernels.isa_probes import check, conversions, copies, products
from cute_kernels.isa_probes.products import Copy
from cute_kernels.runtime.arch import SMEM_BYTES
from cute_kernels.runtime.key import _named
from tests.compile.reports import compile_report

SOME = (
    "ws64_rows_twice",
    "mixed_kinds",
    "pair128_mn_major",
    "copied_rows_swizzled",
    "handoff_cta",
    "handoff_cluster",
    "gather_pair",
    "gather_part",
    "box_64",
    "e4m3_times_scale",
)


@pytest.mark.parametrize(
    ("arch", "name"),
    [*(("sm_100a", name) for name in SOME), ("sm_103a", "mxf4_scales"), ("sm_103a", "pair128_results")],
)
def test_compiles(arch: str, name: str) -> None:
    report = compile_report(check.key_of(arch, check.PREFIX + name))
    assert (report.spill_stores, report.spill_loads, report.stack) == (0, 0, 0)
    assert report.smem <= SMEM_BYTES[arch]
    assert set(report.key.instructions) <= set(report.instructions)
    if name not in products.NAMES:
        return
    experiment = products.NAMES[name]
    found = report.in_ptx.findall(r"tcgen05\.(mma|cp)(\.ws)?\.cta_group::(\d)\.(?:kind::(\w+))?")
    want = [
        ("cp", "", str(experiment.blocks), "")
        if isinstance(step, Copy)
        else ("mma", ".ws" if step.weight_stationary else "", str(experiment.blocks), step.kind)
        for step in experiment.steps
    ]
    assert found == want
    assert report.in_ptx.count(r"tcgen05\.commit") == 1


def test_every_instruction_of_the_experiments_is_told_of() -> None:
    assert len(set(check.NAMES)) == len(check.NAMES)
    assert all(check.fact_of(name) for name in check.NAMES)
    assert len(check.keys("sm_100a")) == len(check.NAMES)
    assert check.keys("sm_90a") == []


def test_a_fact_names_the_kernels_that_rest_on_it() -> None:
    from cute_kernels.indexer.blackwell import logits
    from cute_kernels.linear.blackwell import gemm
    from cute_kernels.sparse_mla import select

    assert logits
    assert gemm
    assert select
    users = {kernel for name in check.NAMES for kernel in check.users_of(name)}
    known = {name for name in _named if ".blackwell." in name}
    assert users == known, "each of Blackwell's kernels rests on facts"
    listed = {name for kind in (conversions, copies, products) for name in kind.USED_BY}
    assert listed <= {name.removeprefix(check.PREFIX) for name in check.NAMES}


def test_the_scope_of_arrivals() -> None:
    for scope in ("cta", "cluster"):
        ptx = compile_report(check.key_of("sm_100a", f"{check.PREFIX}handoff_{scope}")).in_ptx
        assert ptx.has(r"mbarrier\.arrive\.release\.cluster") == (scope == "cluster")


@pytest.mark.parametrize("name", products.NAMES)
def test_what_is_expected_of_products(name: str) -> None:
    """Exact numbers, at as many places as the instruction has results; every other word is as it was."""
    experiment = products.NAMES[name]
    before, after = products.memories(experiment), products.expect(experiment)
    again = products.expect(experiment)
    for x, got, repeated in zip(before, after, again, strict=True):
        assert np.array_equal(got, repeated)
        results = got[:, :504].view(np.float32)[got[:, :504] != x.tensor[:, :504]]
        assert len(results) > 400
        if any(not isinstance(step, Copy) for step in experiment.steps):
            # whole numbers of a unit, few enough for fp32 in whatever order they are summed
            units = 1 if experiment.release else 64
            assert np.array_equal(results * units, np.rint(results * units))
            assert np.abs(results).max() * units < 1 << 24


@pytest.mark.parametrize("name", copies.NAMES)
def test_what_is_expected_of_copies(name: str) -> None:
    """The rows, found one by one; what the descriptor does not tell of is zero."""
    transfer = copies.NAMES[name]
    memory, numbers = copies.source(transfer)
    got, line = copies.expect(transfer), transfer.line
    known = copies.KNOWN_ROWS if transfer.is_gathered else copies.KNOWN_PAGES
    if transfer.is_gathered:
        rows = [int(row) if 0 <= row < known else None for row in numbers]
    else:
        rows = [
            page * copies.TILE + first + i if first + i < copies.TILE and page < known else None
            for first, page in numbers.reshape(-1, 2).tolist()
            for i in range(copies.TILE)
        ]
    for at, row in enumerate(rows):
        own = got.reshape(-1, line)[at]
        if transfer.swizzle == 128:
            own = own.reshape(8, 16)[np.arange(8) ^ (at % 8)].ravel()
        if transfer.swizzle == 64:  # two rows in 128 bytes
            own = own.reshape(4, 16)[np.arange(4) ^ (at // 2 % 4)].ravel()
        first = transfer.first + transfer.column * transfer.width
        want = np.zeros(line, np.uint8) if row is None else memory[row, first : first + line]
        assert np.array_equal(own, want), at


def test_what_is_expected_of_conversions() -> None:
    got = conversions.expect(conversions.NAMES["e4m3_times_scale"])
    given = conversions.source(conversions.NAMES["e4m3_times_scale"])
    assert len({(word, scale) for word, scale in given.tolist()}) == len(given) == 64 * len(conversions.SCALES)
    one = int(np.flatnonzero((given[:, 0] == 0x3B3A3938) & (given[:, 1] >> 8 & 255 == 127))[0])
    assert got[one].tolist() == [0x3F903F80, 0x3FB03FA0]  # 1, 1.125, 1.25, 1.375
