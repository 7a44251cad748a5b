"""The picks by maxima, and the scores that come with them, compiled for Hopper. Needs CuTe DSL and no GPU."""

from __future__ import annotations

import re

import pytest

from cute_kernels.runtime.arch import SMEM_BYTES
from cute_kernels.runtime.compile import compile_report
from cute_kernels.runtime.report import problems

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from cute_kernels.indexer import logits_choice
from cute_kernels.indexer.topk import groups_for, share_for
from cute_kernels.indexer.topk_maxima import FEWEST_GROUPS, GROUP, MOST_PICKS, key_for, keys_of


@pytest.mark.parametrize("number", [0, -1])
def test_picks_compile(number: int) -> None:
    # all of them are among those of test_deployments.py
    key = keys_of("sm_90a")[number]
    report = compile_report(key)
    assert problems(key, report) == []
    assert (report.stack, report.smem) == (0, key.smem_bytes)
    assert f".reqntid {32 * key.warps}" in report.ptx
    assert not re.search(r"\bdiv\.|\brem\.|st\.local|ld\.local|barrier\.cluster", report.ptx)
    assert report.registers * 32 * key.warps <= 65536


def test_scores_compile() -> None:
    key = logits_choice.key_for(64, 1, True, maxima=True)
    report = compile_report(key)
    assert problems(key, report) == []
    assert report.registers * key.plan.threads <= 65536
    # three exchanges of lanes for the maxima of a thread's row
    plain = compile_report(logits_choice.key_for(64, 1, True))
    assert len(re.findall("shfl.sync.bfly", report.ptx)) == len(re.findall("shfl.sync.bfly", plain.ptx)) + 3


def test_every_row_has_a_kernel_or_none() -> None:
    keys = keys_of("sm_90a")
    assert [key.capacity for key in keys] == sorted({key.capacity for key in keys})
    assert all(key.smem_bytes <= SMEM_BYTES["sm_90a"] for key in keys)
    assert keys_of("sm_100a") == []
    assert key_for("sm_80", 32768, 512) is None
    for k in (1, 512, 1000, MOST_PICKS):
        for columns in (FEWEST_GROUPS * GROUP * k, 30_000, keys[-1].capacity):
            key = key_for("sm_90a", columns, k)
            assert key is not None
            assert key.capacity >= columns
            # a warp has enough maxima for its share, however many of them bound it
            assert share_for(key, k) <= 32 * groups_for(key, k) <= 128 * (key.vectors // 8)
        assert key_for("sm_90a", FEWEST_GROUPS * GROUP * k - 1, k) is None
        assert key_for("sm_90a", keys[-1].capacity + 1, k) is None
    assert key_for("sm_90a", 32768, MOST_PICKS + 1) is None
