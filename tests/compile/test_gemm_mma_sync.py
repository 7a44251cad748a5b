# SPDX-License-Identifier: Apache-2.0
"""The portable kernel of deepseek_v4_fp8_einsum, compiled for several architectures, and its plan. Needs no GPU."""

from __future__ import annotations

import pytest

from cute_kernels.models import MODELS
from cute_kernels.runtime.arch import SMEM_BYTES

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from cute_kernels.linear import launch as calls
from cute_kernels.linear.mma_sync.gemm import (
    COLUMN_WARPS,
    VECTOR,
    VECTORS,
    GemmConfig,
    PortableGemmKey,
    column_of,
    column_swizzle,
    row_swizzle,
)
from cute_kernels.linear.params import CHUNK

SHAPES = [tile[:2] for tile in calls.PORTABLE_TILES]


@pytest.mark.parametrize("arch", SMEM_BYTES)
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
@pytest.mark.parametrize("packed", [False, True])
def test_plan(arch: str, rows: int, columns: int, packed: bool) -> None:
    config = GemmConfig(arch, rows, columns, packed)
    assert config.smem_bytes <= SMEM_BYTES[arch]
    # one chunk is multiplied, the next one has to be there, another one is on its way
    assert config.stages >= 3
    assert config.row_warps * config.row_tiles * 16 == rows
    assert COLUMN_WARPS * config.column_tiles * 8 == columns
    assert config.column_tiles % 2 == 0
    assert CHUNK % columns == 0
    # every piece and every scale is copied by one thread
    assert rows % config.rows_at_once == columns % config.rows_at_once == 0
    assert config.scales_of_thread * config.threads >= config.scale_count
    assert config.b_at % CHUNK == config.scales_at % CHUNK == config.stage_bytes % CHUNK == 0


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_places(rows: int, columns: int) -> None:
    """Each code has a place of its own, and what eight lanes read at a time is in different banks."""
    width = GemmConfig("sm_90a", rows, columns, False).lane_columns
    warp = columns // COLUMN_WARPS
    turns = {"a": [row_swizzle(row) for row in range(rows)], "b": [column_swizzle(c, width) for c in range(columns)]}
    assert all(
        sorted(piece ^ turn for piece in range(VECTORS)) == list(range(VECTORS)) for t in turns.values() for turn in t
    )
    together: dict[str, list[list[int]]] = {"a": [[*range(row, row + 8)] for row in range(0, rows, 8)], "b": []}
    for first in range(0, columns, warp):
        own = [[first + column_of(n, j, width) for n in range(8)] for j in range(width // 2)]
        assert sorted(column for eight in own for column in eight) == list(range(first, first + warp))
        # a lane has two columns of each product, all neighbours
        for c in range(4):
            assert sorted(eight[2 * c + i] for eight in own for i in range(2)) == [
                first + c * width + i for i in range(width)
            ]
        together["b"] += own
    for operand, groups in together.items():
        for eight in groups:
            assert len({turns[operand][row] for row in eight}) == 8
    assert VECTOR * VECTORS == CHUNK


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("tp", [1, 8])
@pytest.mark.parametrize("arch", ["sm_80", "sm_100a"])
def test_every_call_of_a_deployment_has_its_kernel(model: str, tp: int, arch: str) -> None:
    config = MODELS[model]
    keys = calls.einsum_keys(config, tp, arch)
    assert len(set(keys)) == len(keys)
    for rows in [*range(1, 1200, 7), *range(1200, 40000, 777)]:
        size = rows, config.o_groups // tp, config.o_lora_rank
        for packed in (False, True):
            assert calls.key_for(arch, *size, 32, 108, packed)[0] in keys
            assert calls.portable_choice(arch, *size, 108, packed)[0] in keys


def test_hopper_has_its_own_for_one_kind_of_scales() -> None:
    assert not isinstance(calls.key_for("sm_90a", 100, 8, 1024, 32, 132, False)[0], PortableGemmKey)
    key, blocks = calls.key_for("sm_90a", 1, 2, 1024, 32, 132, True)
    assert key == PortableGemmKey("sm_90a", 16, 64, True)
    assert blocks == 32


def test_no_kernel_is_idle() -> None:
    chosen = {
        calls.portable_choice("sm_90a", rows, groups, 1024, 132, False)[0]
        for groups in (1, 2, 4, 8, 16)
        for rows in range(1, 3000, 5)
    }
    assert chosen == {PortableGemmKey("sm_90a", *shape) for shape in SHAPES}
