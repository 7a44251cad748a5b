# SPDX-License-Identifier: Apache-2.0
"""What ptxas makes of Blackwell's prefill, mixed and paged kernels, and whether it is what their configs say."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from cute_kernels.dsl import umma
from cute_kernels.models import MODELS
from cute_kernels.runtime.arch import SMEM_BYTES
from cute_kernels.sparse_mla import launch
from cute_kernels.sparse_mla.blackwell import decode
from cute_kernels.sparse_mla.blackwell.decode import (
    CODES_BYTES,
    HEADS,
    KEYS,
    Q_SLABS,
    ROPE_BYTES,
    SLAB,
    SLAB_BYTES,
    SLABS,
    STAGE_BYTES,
)
from cute_kernels.sparse_mla.blackwell.prefill import (
    ALIGNED,
    BF16,
    DEQUANT_WARP,
    GROUP_BYTES,
    KV_WARPS,
    BlackwellPrefillKey,
    PrefillConfig,
    group_offset,
    query_copies,
    smem_parts,
)
from cute_kernels.sparse_mla.blackwell.prefill_mixed import (
    FP8,
    LANES_ROWS,
    RAW_BYTES,
    BlackwellMixedFp8Key,
    BlackwellMixedKey,
    code_offset,
    lane_row,
    value_offset,
)
from cute_kernels.sparse_mla.blackwell.prefill_paged import PAGED, BlackwellPagedKey
from tests.compile.questions import constants
from tests.compile.reports import Asked, compile_report

HALF = STAGE_BYTES // KV_WARPS
CONFIGS = {
    BlackwellPrefillKey("sm_100a"): (BF16, 64, 4, {HALF}),
    BlackwellPrefillKey("sm_103a"): (BF16, 64, 4, {HALF}),
    BlackwellMixedKey("sm_100a"): (BF16, 64, 4, {HALF}),
    BlackwellMixedFp8Key("sm_100a"): (FP8, 32, 2, {RAW_BYTES // KV_WARPS}),
    BlackwellPagedKey("sm_100a"): (PAGED, 32, 8, {STAGE_BYTES, CODES_BYTES, ROPE_BYTES}),
}
"""Key -> its config; gathering copies and copies of queries in the code; what barriers are told to expect."""


@pytest.fixture(scope="module", params=CONFIGS, ids=lambda key: f"{type(key).__name__} {key.arch}")
def report(request: pytest.FixtureRequest) -> Asked:
    return compile_report(request.param)


def test_no_spills_and_the_instructions_of_the_config(report: Asked) -> None:
    config, gathers, loads, expected = CONFIGS[report.key]
    assert (report.spill_stores, report.spill_loads, report.stack) == (0, 0, 0)
    assert report.registers <= 65536 // config.threads // 8 * 8
    assert report.smem == report.key.smem_bytes == config.smem_bytes <= SMEM_BYTES[report.key.arch]
    assert set(report.key.instructions) <= set(report.instructions)
    assert report.instructions["tcgen05.mma"] == 512 // 16 + 2 * (KEYS // 16)
    assert report.instructions["tcgen05.cp"] == len(list(query_copies()))
    assert (report.instructions["tma.gather4"], report.instructions["tma.load"]) == (gathers, loads)
    assert report.in_ptx.count(r"\bmbarrier\.init") == config.barriers
    told = report.in_ptx.ask(constants, r"arrive\.expect_tx\S* %\w+, \[[^\]]+\], ([%\w]+);")
    assert {int(number) for number in told} == expected
    if report.in_sass is not None:
        assert report.in_sass.count(r"UTCHMMA\.WS") == report.instructions["tcgen05.mma"]
        assert report.in_sass.count(r"GATHER4") == gathers


def test_p_is_seen_before_anybody_is_told_of_it(report: Asked) -> None:
    """What threads store for tensor cores is fenced before anybody is told of it."""
    fences = report.in_ptx.count(r"fence\.proxy\.async")
    config = CONFIGS[report.key][0]
    # of softmax warps, and of dequantizers
    assert fences >= 1 + config.dequantizes


@pytest.mark.parametrize("config", [BF16, FP8, PAGED])
def test_shared_memory(config: PrefillConfig) -> None:
    place = 0
    for name, size in config.smem_parts.items():
        assert place % (1024 if name in ALIGNED else 8) == 0, name
        place += size
    assert config.smem_parts["kv"] == config.stages * STAGE_BYTES
    assert place + config.barriers * 8 == config.smem_bytes
    assert set(smem_parts()) <= set(config.smem_parts)
    assert config.threads == (DEQUANT_WARP + 4 * config.dequantizes) * 32


def test_gathered_rows_and_queries_fill_a_stage() -> None:
    """Each 16 bytes of a stage come from one place, and tensor cores find them there."""
    operand = decode.KEY_ROWS
    found = np.full(STAGE_BYTES // 16, -1)
    for group, slab in itertools.product(range(KEYS // 4), range(SLABS)):
        start = group_offset(group, slab)
        for row, chunk in itertools.product(range(4), range(8)):
            place = umma.swizzled(start + row * 128 + chunk * 16, 128)
            assert found[place // 16] == -1
            found[place // 16] = (4 * group + row) * 64 + slab * 8 + chunk
            assert place == slab * SLAB_BYTES + operand.offset(4 * group + row, chunk * 8)
    assert sorted(found) == list(range(KEYS * 64))
    assert GROUP_BYTES == 512


def test_copies_of_queries_are_the_steps_of_the_scores() -> None:
    """A product reads 8 columns of tensor memory: two chunks, of the slab and the columns that it multiplies."""
    copied = {copy.column: copy.offset for copy in query_copies()}
    resident = [step for step in decode.scores_steps() if step.is_resident]
    assert [copied[step.a] for step in resident] == [step.b for step in resident]
    assert [copied[step.a + 4] for step in resident] == [step.b + 16 for step in resident]
    assert len(copied) == 2 * len(resident) == Q_SLABS * SLAB // 8


def test_codes_become_stages() -> None:
    """All codes of a tile are loaded once, all chunks of a stage stored once, and no access meets in a bank."""
    loaded, stored = [], []
    lanes = np.arange(32)
    for first, slab in itertools.product(range(0, KEYS, LANES_ROWS), range(SLABS)):
        rows, members = first + lane_row(lanes), lanes & 3
        place = code_offset(rows, slab, members)
        assert (place == slab // 2 * SLAB_BYTES + umma.swizzled(rows * 128 + (slab % 2 * 4 + members) * 16, 128)).all()
        chunks = [value_offset(rows, slab, members, chunk) for chunk in range(2)]
        for chunk, target in enumerate(chunks):
            column = members * 16 + chunk * 8
            assert (target == slab * SLAB_BYTES + decode.KEY_ROWS.offset(rows, column)).all()
        for access in (place, *chunks):
            for served in access.reshape(4, 8):
                assert len(set(served % 128 // 16)) == 8
        loaded += list(place)
        stored += [place for chunk in chunks for place in chunk]
    assert sorted(loaded) == list(range(0, RAW_BYTES, 16))
    assert sorted(stored) == list(range(0, STAGE_BYTES, 16))
    assert HEADS * SLAB * 2 == SLAB_BYTES


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("tp", [1, 8])
def test_deployments(model: str, tp: int) -> None:
    """Both kernels are compiled ahead: which one runs is not known before the GPU is."""
    for kernel, own in (
        (launch.PREFILL, {BlackwellPrefillKey}),
        (launch.MIXED, {BlackwellMixedKey, BlackwellMixedFp8Key}),
        (launch.PAGED, {BlackwellPagedKey}),
    ):
        keys = kernel.deployment_keys(MODELS[model], tp, "sm_103a")
        assert own < {type(key) for key in keys}
        assert len(keys) == len(set(keys))
