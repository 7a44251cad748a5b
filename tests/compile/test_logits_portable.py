# SPDX-License-Identifier: Apache-2.0
"""The portable kernel of the indexer's scores, compiled for several architectures, and its config. Needs no GPU."""

from __future__ import annotations

import pytest

from cute_kernels.models import MODELS, ModelShape
from cute_kernels.runtime.arch import SMEM_BYTES

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

ARCHS = ("sm_80", "sm_90a", "sm_100a", "sm_120a")
CODE_BYTES = (64, 128)


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
