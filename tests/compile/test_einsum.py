"""The kernels of deepseek_v4_fp8_einsum, compiled for Hopper. Needs CuTe DSL, no GPU."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from cute_kernels.models import MODELS
from cute_kernels.runtime.arch import SMEM_BYTES

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from cute_kernels.output import einsum
from cute_kernels.output.einsum_sm90 import EinsumKey
from tests.compile.reports import compile_report

KEYS = [key for key, _ in einsum.TILES]


OTHERS = (*(replace(key, depth=1) for key in KEYS if key.depth > 1),)


@pytest.mark.parametrize("key", [*KEYS, *OTHERS], ids=str)
def test_compiles(key: EinsumKey) -> None:
    report = compile_report(key)
    assert report.cubin[:4] == b"\x7fELF"
    assert (report.spill_stores, report.spill_loads, report.stack) == (0, 0, 0)
    assert report.smem <= SMEM_BYTES[key.arch]
    assert set(key.instructions) <= set(report.instructions)
    assert report.instructions["wgmma"] == key.depth * 4
    assert report.instructions["st.global.128"] == key.columns // 16
    assert report.instructions["tma.load"] == 2
    assert ("setmaxnreg" in report.instructions) == (key.rows > 64)
    assert not re.search(r"st\.local|ld\.local", report.ptx)
    # a block of three warpgroups starts with a third of the registers each
    assert report.registers <= (168 if key.rows > 64 else 255)


@pytest.mark.parametrize("key", KEYS, ids=str)
def test_the_assembler_waits_for_no_product_on_its_own(key: EinsumKey) -> None:
    """Where it cannot follow the accumulators, it waits after each instruction."""
    report = compile_report(key)
    if report.sass is None:
        pytest.skip("nvdisasm is not installed (package nvidia-cuda-nvdisasm)")
    order = re.findall(r"QGMMA|WARPGROUP\.DEPBAR", report.sass)
    assert order == ["QGMMA"] * (4 * key.depth) + ["WARPGROUP.DEPBAR"] * key.depth


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_every_batch_size_of_a_deployment_has_its_kernel(model: str, tp: int) -> None:
    config = MODELS[model]
    keys = einsum.deployment_keys(config, tp, "sm_90a")
    assert len(set(keys)) == len(keys)
    chosen = {
        einsum.choose(rows, config.o_groups // tp, config.o_lora_rank, 32, 132)[0]
        for rows in [*range(1, 1200), *range(1200, 40000, 77)]
    }
    assert chosen <= set(keys)


def test_no_kernel_is_idle() -> None:
    chosen = {einsum.choose(rows, groups, 1024, 32, 132)[0] for groups in (1, 2, 4, 8, 16) for rows in range(1, 2000)}
    assert chosen == set(KEYS)


@pytest.mark.parametrize(("rows", "groups", "columns"), [(1, 1, 8), (64, 8, 1024), (129, 3, 136), (10**6, 8, 1024)])
def test_blocks(rows: int, groups: int, columns: int) -> None:
    key, blocks = einsum.choose(rows, groups, columns, 32, 132)
    tiles = groups * -(-rows // key.rows) * -(-columns // key.columns)
    assert blocks == min(132, tiles)


def test_depth_divides_the_chunks() -> None:
    for rows in (1, 100, 300, 5000):
        for chunks in range(1, 40):
            assert chunks % einsum.choose(rows, 8, 1024, chunks, 132)[0].depth == 0
