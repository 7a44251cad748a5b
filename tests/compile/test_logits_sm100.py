# SPDX-License-Identifier: Apache-2.0
"""The kernel of the indexer's scores, compiled for Blackwell, and its geometry. Needs CuTe DSL, no GPU."""

from __future__ import annotations

import re
from collections import Counter

import numpy as np
import pytest

from cute_kernels.dsl import umma
from cute_kernels.dsl.ptx import COLUMNS
from cute_kernels.formats import INDEX_DIM
from cute_kernels.models import MODELS, ModelShape
from cute_kernels.runtime.arch import SMEM_BYTES

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from cute_kernels.indexer import launch, select
from cute_kernels.indexer.blackwell.logits import (
    KEY_TILE,
    MOST_BUFFERS,
    PAGE_BOX,
    REGISTERS,
    SCALE_COLUMNS,
    SUMS,
    BlackwellConfig,
    BlackwellLogitsKey,
    most_rows,
    work,
)
from cute_kernels.indexer.mma_sync.logits import PortableLogitsKey
from tests.compile.questions import distinct
from tests.compile.reports import check_fits, compile_report

KEYS = [
    BlackwellLogitsKey("sm_100a", 64, 4, False, False),
    BlackwellLogitsKey("sm_100a", 64, 1, True, True),
    BlackwellLogitsKey("sm_100a", 48, 3, True, False),
    BlackwellLogitsKey("sm_103a", 64, 3, False, True),
]
CONFIGS = [
    BlackwellConfig(heads, rows, box, mxfp4)
    for mxfp4 in (False, True)
    for heads in (16, 32, 48, 64)
    for rows in range(1, most_rows(heads, mxfp4) + 1)
    for box in (PAGE_BOX, KEY_TILE)
]


@pytest.mark.parametrize("key", KEYS, ids=str)
def test_compiles(key: BlackwellLogitsKey) -> None:
    config = key.config
    report = check_fits(key, config.threads)
    assert ("setmaxnreg" in report.instructions) == (config.held * key.heads > 64)
    if "setmaxnreg" in report.instructions:
        # no warpgroup waits for registers that nobody gives back
        assert REGISTERS[0] + config.warpgroups * REGISTERS[1] <= 3 * report.registers
        assert all(number % 8 == 0 for number in REGISTERS)
    # of a group's rows one each, and one of keys: every lane copies its own box
    assert report.instructions["tma.load"] == key.rows + 1
    assert report.instructions.get("bulk.load", 0) == int(key.paged)
    # of uneven halves each has its own code
    traced = key.rows if config.rows % config.row_splits else config.held
    # and each row's sums are in the code once more
    assert report.instructions["tcgen05.ld"] == traced * key.heads // (32 if key.heads % 32 == 0 else 16) + traced


@pytest.mark.parametrize("key", KEYS, ids=str)
def test_tensor_memory_products_and_barriers(key: BlackwellLogitsKey) -> None:
    """What the PTX says is what the config says."""
    ptx, config = compile_report(key).in_ptx, key.config
    kind = "mxf4.block_scale.block32" if key.mxfp4 else "f8f6f4"
    assert ptx.count(rf"tcgen05\.mma\.cta_group::1\.kind::{re.escape(kind)} ") == len(config.steps)
    assert ptx.count(r"tcgen05\.mma\.") == len(config.steps)
    assert ptx.count(r"tcgen05\.commit\.") == 1
    assert ptx.findall(r"tcgen05\.alloc\.\S+ \[%r\d+\], (\d+);") == [str(config.tensor_columns)]
    assert ptx.findall(r"tcgen05\.dealloc\.\S+ %r\d+, (\d+);") == [str(config.tensor_columns)]
    assert ptx.count(r"tcgen05\.cp\.") == (1 + config.scale_tiles if key.mxfp4 else 0)
    constants = {int(number) for number in ptx.ask(distinct, r"-?\b\d{5,}\b")}
    assert {config.operand.descriptor, *(instruction for _, instruction in config.steps)} <= constants
    assert ptx.count(r"mbarrier\.init\.") == config.barriers
    assert ptx.has(r"fence\.proxy\.async\.shared::cta") == key.mxfp4


@pytest.mark.parametrize("key", KEYS, ids=str)
def test_sums_cost_five_instructions_for_four_products(key: BlackwellLogitsKey) -> None:
    report, config = compile_report(key), key.config
    if report.in_sass is None:
        pytest.skip("nvdisasm is not installed (package nvidia-cuda-nvdisasm)")
    found = Counter(report.in_sass.findall(r"\b(UTC[QO]MMA|UTCHMMA|FMNMX\.NAN|FADD2|FFMA2|LDTM|STTM)\b"))
    rows = key.rows if config.rows % config.row_splits else config.held
    products = rows * key.heads
    # the sums that are made again where one is beyond fp32's range are in a loop
    assert found["FMNMX.NAN"] == products // 2 + rows * SUMS
    assert found["FADD2"] == products // 4
    assert found["FFMA2"] == products // 2 + rows * SUMS // 2
    assert found["UTCOMMA" if key.mxfp4 else "UTCQMMA"] == len(config.steps) == sum(found[f"UTC{c}MMA"] for c in "QOH")


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_what_lies_where(config: BlackwellConfig) -> None:
    assert config.smem_bytes <= SMEM_BYTES["sm_100a"] - 1024
    assert config.threads == 384
    assert config.warps_beside + 4 * config.warpgroups == config.threads // 32
    assert config.columns <= 256
    assert config.columns % 16 == 0
    assert sum(config.rows_of_split(split) for split in range(config.row_splits)) == config.rows
    assert config.stages * KEY_TILE * config.row_bytes == 128 * 1024
    # tensor memory
    assert config.buffers == (MOST_BUFFERS if config.columns <= (144 if config.mxfp4 else 160) else 2)
    pieces = [(i * config.columns, config.columns) for i in range(config.buffers)]
    if config.mxfp4:
        pieces += [(config.key_scales_at + i * SCALE_COLUMNS, SCALE_COLUMNS) for i in range(config.buffers)]
        width = config.scale_tiles * SCALE_COLUMNS
        pieces += [(config.q_scales_at + i * width, width) for i in range(2)]
    taken = np.zeros(COLUMNS, np.int64)
    for first, width in pieces:
        taken[first : first + width] += 1
    assert taken.max() == 1
    assert taken[config.used_columns :].sum() == 0
    assert config.used_columns <= config.tensor_columns <= COLUMNS
    assert config.tensor_columns & (config.tensor_columns - 1) == 0
    # nothing that is loaded 16 bytes at a time, or described, is askew
    for name in ("headers", "scales", "weights", "tensor"):
        assert config.words[name] * 4 % 16 == 0
    assert config.heads * config.row_bytes % (8 * config.operand.swizzle) == 0


@pytest.mark.parametrize("mxfp4", [False, True])
def test_products_read_what_copies_write(mxfp4: bool) -> None:
    config = BlackwellConfig(64, 2, KEY_TILE, mxfp4)
    bits, width = config.operand.bits, config.row_bytes
    row, k = np.meshgrid(np.arange(KEY_TILE), np.arange(0, INDEX_DIM, 8 // bits), indexing="ij")
    # a tensor copy: row after row, swizzled
    written = umma.swizzled(row * width + k * bits // 8, config.operand.swizzle)
    assert (config.operand.offset(row, k) == written).all()
    assert len(np.unique(written)) == KEY_TILE * width
    per_step = umma.K_BYTES * 8 // bits
    base = 5 * 8192
    for number, (step, instruction) in enumerate(config.steps):
        inside = np.arange(0, per_step, 8 // bits)
        read = umma.operand_bytes(
            config.operand.at(base) + step // 16, row[:, : inside.size], inside[None], bits, False
        )
        columns = slice(number * inside.size, (number + 1) * inside.size)
        assert (read == base + written[:, columns]).all()
        if mxfp4:
            assert (instruction >> 4 & 3, instruction >> 29 & 3) == (2 * number, 2 * number)
    assert len(config.steps) * per_step == INDEX_DIM


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("arch", ["sm_100a", "sm_103a"])
def test_deployments_have_own_and_portable_kernels(model: str, arch: str) -> None:
    found = [*launch.logits_keys(MODELS[model], 8, arch), *launch.paged_logits_keys(MODELS[model], 8, arch)]
    own = [key for key in found if isinstance(key, BlackwellLogitsKey)]
    most = {False: 4, True: 3 if MODELS[model].index_n_heads == 64 else 4}
    assert {(k.rows, k.mxfp4) for k in own if k.paged} == {(n, m) for m in most for n in range(1, most[m] + 1)}
    assert {(k.rows, k.mxfp4) for k in own if not k.paged} == {(n, m) for m, n in most.items()}
    assert {key.paged for key in found if isinstance(key, PortableLogitsKey)} == {False, True}
    assert launch.logits_keys(ModelShape(compress_ratios=(1, 128)), 1, arch) == []
    assert {select.rows_of_group(n, 3) for n in range(1, 300)} == {1, 2, 3}


def test_work_is_of_the_deployed_kernels() -> None:
    assert {(one.op, one.kernel) for one in work()} == {
        (op, f"{kind}, {rows} row{'s' * (rows > 1)}")
        for op, kinds in (
            ("paged_mqa_logits", {"FP8": range(1, 5), "MXFP4": range(1, 4)}),
            ("mqa_logits", {"FP8": [4], "MXFP4": [3]}),
        )
        for kind, sizes in kinds.items()
        for rows in sizes
    }
