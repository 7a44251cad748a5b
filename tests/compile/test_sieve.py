"""The kernels of sieved scores and their picks, compiled. Needs CuTe DSL and no GPU."""

from __future__ import annotations

import re
from typing import Any

import pytest

from cute_kernels.models import MODELS
from cute_kernels.runtime.report import problems

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from cute_kernels.indexer import chunks, score_top_k_sieved, sieve_plan, topk_sieved
from cute_kernels.indexer.sieve import KEPT
from cute_kernels.indexer.topk_sieved import SievedKey
from tests.compile.reports import compile_report

KEYS = score_top_k_sieved.deployment_keys(MODELS["v4-flash"], "sm_90a")


@pytest.mark.parametrize("key", KEYS, ids=lambda key: type(key).__name__ + str(getattr(key, "tiles", "")))
def test_compiles(key: Any) -> None:
    # all of them are among those of test_deployments.py
    report = compile_report(key)
    assert problems(key, report) == []
    assert (report.stack, report.smem) == (0, key.smem_bytes)
    assert f".reqntid {key.plan.threads}" in report.ptx
    assert not re.search(r"st\.local|ld\.local", report.ptx)
    # orders are unsigned: those of negative numbers have the highest bit set
    assert not re.search(r"redux\.sync\.(min|max)\.s32", report.ptx)
    assert len(re.findall(r"griddepcontrol\.wait", report.ptx)) == 1


def test_there_is_room_in_a_list_whatever_it_keeps() -> None:
    assert chunks.LENGTH // 2 <= KEPT <= chunks.LENGTH - 64
    assert all(chunks.is_sieved(64, 8192, 1, k) == (2 * k <= chunks.LENGTH) for k in (1, 512, 1024, 1025, 2048))


def test_parts_of_the_workspace_do_not_overlap() -> None:
    for rows, blocks in ((1, 1), (64, 132), (1000, 7)):
        # addresses are numbers here, as they are in the kernel
        lists = rows + blocks - 1
        first = 4096
        at = sieve_plan.Lists(*(int(x) for x in places(first, rows, blocks)))
        assert at.lists == first
        assert at.counts == first + lists * chunks.LENGTH * chunks.ENTRY
        assert at.firsts == at.counts + 4 * lists
        assert at.lasts + 4 * rows == first + chunks.sieved_bytes(rows, blocks)


def places(first: int, rows: int, blocks: int) -> Any:
    from cutlass import Int64

    return (x.value if isinstance(x, Int64) else x for x in sieve_plan.Lists.at(first, rows, blocks))


def test_every_row_has_its_kernel() -> None:
    for columns, tiles in ((1, 2), (32768, 2), (32769, 16), (262144, 16)):
        assert topk_sieved.key_for("sm_90a", columns) == SievedKey("sm_90a", tiles)
    assert topk_sieved.key_for("sm_90a", 262145) is None
