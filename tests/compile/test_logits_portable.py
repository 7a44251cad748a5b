# SPDX-License-Identifier: Apache-2.0
"""The portable kernel of the indexer's scores, compiled for several architectures, and its config. Needs no GPU."""

from __future__ import annotations

import re

import pytest

from cute_kernels.models import MODELS, ModelShape
from cute_kernels.runtime.arch import SMEM_BYTES
from tests.compile.reports import compile_report

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from cute_kernels.indexer import launch
from cute_kernels.indexer.mma_sync.logits import (
    ROWS,
    STEP,
    WARPS,
    PortableConfig,
    PortableLogitsKey,
    chunk_at,
    key_of_lane,
)
from cute_kernels.indexer.params import KEY_TILE

# (heads, rows of a group, whether keys are in pages, whether they are MXFP4); what takes most registers on each
CHOSEN = {
    "sm_80": ((64, 1, True, False), (64, 4, True, True)),
    "sm_90a": ((64, 1, True, False), (64, 1, True, True), (16, 4, False, True)),
    "sm_100a": ((64, 2, True, True),),
    "sm_120a": ((64, 1, True, False),),
}
PORTABLE_KEYS = [PortableLogitsKey(arch, *fields) for arch, chosen in CHOSEN.items() for fields in chosen]
ARCHS = tuple(CHOSEN)
CODE_BYTES = (64, 128)


@pytest.mark.parametrize("key", PORTABLE_KEYS, ids=str)
def test_compiles(key: PortableLogitsKey) -> None:
    report = compile_report(key)
    assert report.cubin[:4] == b"\x7fELF"
    assert f".target {key.arch}" in report.ptx
    assert (report.spill_stores, report.spill_loads, report.stack) == (0, 0, 0)
    assert report.smem <= SMEM_BYTES[key.arch]
    assert set(key.instructions) <= set(report.instructions)
    # of every 8 of a step's keys and 16 heads, 8 products of 16 columns
    assert report.instructions["mma.sync"] == STEP // 8 * key.config.tiles * 8
    assert ("griddepcontrol" in report.instructions) == (key.arch not in ("sm_80", "sm_89"))
    assert ("cvt.e4m3" in report.instructions) == (not key.mxfp4 and key.arch != "sm_80")
    assert not re.search(r"st\.local|ld\.local", report.ptx)
    element = "bf16" if key.mxfp4 else "f16"
    assert f"mma.sync.aligned.m16n8k16.row.col.f32.{element}.{element}.f32" in report.ptx


@pytest.mark.parametrize("arch", SMEM_BYTES)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("code_bytes", CODE_BYTES)
def test_plan(arch: str, rows: int, code_bytes: int) -> None:
    config = PortableConfig(arch, 64, rows, code_bytes)
    assert config.smem_bytes <= SMEM_BYTES[arch]
    assert config.stages >= 2
    assert config.teams * rows == WARPS
    assert config.threads * 255 <= 65536
    assert KEY_TILE % STEP == 0
    # every chunk of a step is copied by one lane of the team
    assert config.copies * rows * 32 == STEP * config.chunks
    assert config.scales_at % 16 == config.mask_at % 16 == config.stage_bytes % 16 == config.counts_at % 16 == 0


@pytest.mark.parametrize("code_bytes", CODE_BYTES)
def test_chunks_of_a_step(code_bytes: int) -> None:
    places = [chunk_at(key, chunk, code_bytes) for key in range(STEP) for chunk in range(code_bytes // 16)]
    assert sorted(places) == list(range(0, STEP * code_bytes, 16))
    # what eight lanes read at a time, chunk c or c + 4 of two keys, is in different banks
    for first in range(code_bytes // 64):
        for key in range(0, STEP, 2):
            read = [chunk_at(key + i // 4, i % 4 + 4 * first, code_bytes) for i in range(8)]
            assert len({at // 16 % 8 for at in read}) == 8
    # lanes l // chunks and l % chunks copy to places that follow those of lane 0 by the same in every round
    chunks = code_bytes // 16
    for number in range(STEP * chunks // 32):
        first = number * (32 // chunks)
        for lane in range(32):
            place = chunk_at(first + lane // chunks, lane % chunks, code_bytes)
            assert place == chunk_at(lane // chunks, lane % chunks, code_bytes) + number * 512


def test_lanes_store_all_keys() -> None:
    assert sorted(key_of_lane(lane) for lane in range(32)) == list(range(STEP))


def test_sizes_that_are_none() -> None:
    for heads, rows in ((24, 1), (0, 1), (80, 1), (64, 3), (64, 8)):
        with pytest.raises(ValueError, match="expected"):
            PortableConfig("sm_90a", heads, rows, 128)


@pytest.mark.parametrize("arch", ARCHS)
def test_deployments(arch: str) -> None:
    model = MODELS["v4-flash"]
    # Hopper has kernels of its own
    formats = () if arch == "sm_90a" else (False, True)
    found = launch.logits_keys(model, 1, arch)
    assert [key for key in found if isinstance(key, PortableLogitsKey)] == [
        PortableLogitsKey(arch, 64, 4, False, mxfp4) for mxfp4 in formats
    ]
    found = launch.paged_logits_keys(model, 8, arch)
    assert [key for key in found if isinstance(key, PortableLogitsKey)] == [
        PortableLogitsKey(arch, 64, rows, True, mxfp4) for mxfp4 in formats for rows in ROWS
    ]
    assert launch.logits_keys(ModelShape(compress_ratios=(1, 128)), 1, arch) == []
