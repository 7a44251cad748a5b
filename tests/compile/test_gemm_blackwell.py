# SPDX-License-Identifier: Apache-2.0
"""The kernel of deepseek_v4_fp8_einsum, compiled for Blackwell, and its geometry. Needs CuTe DSL, no GPU."""

from __future__ import annotations

import re

import pytest

from cute_kernels.dsl.ptx import COLUMNS
from cute_kernels.runtime.arch import BLACKWELL

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from cute_kernels.linear import launch as calls
from cute_kernels.linear.blackwell import gemm
from cute_kernels.linear.blackwell.gemm import (
    MANY_TOTALS,
    REGISTERS,
    ROWS,
    BlackwellGemmKey,
    BlackwellPairGemmKey,
    GemmConfig,
)
from cute_kernels.linear.params import CHUNK
from tests.compile.questions import distinct
from tests.compile.reports import check_fits, compile_report

KEYS = [
    BlackwellGemmKey("sm_100a", 256),
    BlackwellGemmKey("sm_100a", 64),
    BlackwellGemmKey("sm_103a", 128),
    BlackwellGemmKey("sm_100a", 256, True),
    BlackwellGemmKey("sm_103a", 64, True),
    BlackwellPairGemmKey("sm_100a"),
]


@pytest.mark.parametrize("key", KEYS, ids=str)
def test_compiles(key: BlackwellGemmKey) -> None:
    config = key.config
    report = check_fits(key, config.threads)
    has_many = config.width > MANY_TOTALS and not key.packed
    assert ("setmaxnreg" in report.instructions) == has_many
    # no warpgroup waits for registers that nobody gives back
    assert REGISTERS[0] + 2 * REGISTERS[1] <= 3 * 168
    assert report.instructions["tma.load"] == 2
    assert report.instructions["tcgen05.ld"] == config.width // (16 if has_many else 32)
    assert report.instructions["st.global.128"] == config.width // 8


@pytest.mark.parametrize("key", KEYS, ids=str)
def test_tensor_memory_products_and_barriers(key: BlackwellGemmKey) -> None:
    """What the PTX says is what the plan says."""
    ptx, config = compile_report(key).in_ptx, key.config
    kind, chunks = ("mxf8f6f4.block_scale.block32", 4) if key.packed else ("f8f6f4", 1)
    products = rf"tcgen05\.mma\.cta_group::{config.blocks}\.kind::{re.escape(kind)} "
    assert not ptx.has(rf"cta_group::{3 - config.blocks}")
    assert ptx.count(products) == ptx.count(r"tcgen05\.mma\.") == 4 * chunks
    assert ptx.count(r"tcgen05\.commit\.") == (2 + chunks if key.packed else 2)
    assert ptx.count(r"tcgen05\.cp\.") == (1 + config.column_scales if key.packed else 0)
    assert ptx.findall(r"tcgen05\.alloc\.\S+ \[%r\d+\], (\d+);") == [str(config.tensor_columns)]
    assert ptx.findall(r"tcgen05\.dealloc\.\S+ %r\d+, (\d+);") == [str(config.tensor_columns)]
    constants = {int(number) for number in ptx.ask(distinct, r"-?\b\d{5,}\b")}
    instructions = {config.scaled_instruction(part) for part in range(4)} if key.packed else {config.instruction}
    assert {*instructions, config.blocks * (ROWS + config.copied_columns) * CHUNK} <= constants
    assert ptx.count(r"mbarrier\.init\.") == 2 * (config.stages + config.scale_stages + config.buffers)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("columns", gemm.COLUMNS)
def test_plan(columns: int, packed: bool) -> None:
    config = GemmConfig(columns, packed)
    assert config.stages >= 4
    assert config.tensor_columns <= COLUMNS
    assert config.tensor_columns & (config.tensor_columns - 1) == 0
    # of a warpgroup's columns all have the same fp32 scale
    assert CHUNK % config.width == 0
    # the last chunk of a buffer's words is that many before the first one of the words that are copied there again
    assert 4 * (config.scale_buffers - 1) >= config.stages
    # a stage begins where a swizzle does
    assert ROWS * CHUNK % 1024 == columns * CHUNK % 1024 == 0
    with pytest.raises(ValueError, match="columns: expected"):
        GemmConfig(columns + 8)


def test_pairs() -> None:
    """They have tiles of one kind, and so far no call, nor a place among what is compiled ahead."""
    with pytest.raises(ValueError, match="256 columns and fp32 scales, got 128"):
        BlackwellPairGemmKey("sm_100a", 128)
    pair, single = BlackwellPairGemmKey("sm_100a").config, BlackwellGemmKey("sm_100a", 256).config
    assert (pair.stages, single.stages) == (6, 4)
    assert pair.tensor_columns == single.tensor_columns
    for arch in BLACKWELL:
        assert not any(isinstance(key, BlackwellPairGemmKey) for key in calls.einsum_keys(None, 1, arch))
        key, _ = calls.blackwell_choice(arch, 8192, 8, 1024, 148, False)
        assert type(key) is BlackwellGemmKey


def test_pairs_where_they_are_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "PAIR_ARCHS", BLACKWELL)
    choose = calls.blackwell_choice.__wrapped__
    chosen = [type(choose("sm_100a", *call)[0]) for call in ((1, 8, 1024, 148, False), (8192, 8, 1024, 148, False))]
    assert chosen == [BlackwellGemmKey, BlackwellPairGemmKey]
    assert type(choose("sm_100a", 8192, 8, 1024, 148, True)[0]) is BlackwellGemmKey
    assert BlackwellPairGemmKey("sm_100a") in calls.einsum_keys(None, 1, "sm_100a")


def test_choice() -> None:
    """Small calls have small tiles, so that all multiprocessors have some."""
    assert calls.blackwell_choice("sm_100a", 1, 8, 1024, 148, False) == (BlackwellGemmKey("sm_100a", 64), 128)
    assert calls.blackwell_choice("sm_100a", 8192, 8, 1024, 148, True) == (
        BlackwellGemmKey("sm_100a", 256, True),
        148,
    )
    chosen = {calls.blackwell_choice("sm_103a", rows, 8, 1024, 148, False)[0] for rows in range(1, 4000, 9)}
    assert chosen == {BlackwellGemmKey("sm_103a", columns) for columns in gemm.COLUMNS}
    assert all(calls.key_for(arch, 9, 8, 1024, 32, 148, False)[0].arch == arch for arch in BLACKWELL)


def test_work() -> None:
    """Shared memory binds, not products."""
    works = zip(gemm.work(), (*2 * gemm.COLUMNS, 256), (*2 * gemm.COLUMNS, 128), strict=True)
    for work, columns, copied in works:
        assert work.flops == work.mma["e4m3"] == 2 * ROWS * columns * 4096
        assert work.smem["copies"] == work.smem["operands"] == 32 * CHUNK * (ROWS + copied)
