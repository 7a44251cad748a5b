# SPDX-License-Identifier: Apache-2.0
"""What ptxas makes of Blackwell's prefill kernel for pairs of blocks, and whether it is what its plan says."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from cute_kernels.dsl import umma
from cute_kernels.models import MODELS
from cute_kernels.runtime.arch import BLACKWELL, SMEM_BYTES
from cute_kernels.sparse_mla import select
from cute_kernels.sparse_mla.blackwell import decode_2cta
from cute_kernels.sparse_mla.blackwell.decode import HEADS, KEY_ROWS, KEYS, SLAB_BYTES
from cute_kernels.sparse_mla.blackwell.decode_2cta import BLOCKS, SIDE, SLABS, STAGE_BYTES
from cute_kernels.sparse_mla.blackwell.prefill import ALIGNED, group_offset
from cute_kernels.sparse_mla.blackwell.prefill_2cta import (
    PAIR,
    QUERY_SLAB_BYTES,
    QUERY_SLABS,
    QUERY_STAGES,
    BlackwellPairPrefillKey,
    query_copies,
    smem_parts,
    work,
)
from tests.compile.reports import compile_report


@pytest.mark.parametrize("arch", BLACKWELL)
def test_compiles(arch: str) -> None:
    key = BlackwellPairPrefillKey(arch)
    report = compile_report(key)
    assert (report.spill_stores, report.spill_loads, report.stack) == (0, 0, 0)
    assert report.registers <= 65536 // PAIR.threads // 8 * 8
    assert report.smem == key.smem_bytes <= SMEM_BYTES[arch]
    assert set(key.instructions) <= set(report.instructions)
    assert report.instructions["tcgen05.mma"] == SIDE // 16 + 2 * (KEYS // 16)
    assert report.instructions["tcgen05.cp"] == len(list(query_copies()))
    # a pair's instructions are all of one kind
    assert not report.in_ptx.has(r"cta_group::1")
    assert report.in_ptx.count(r"\bmbarrier\.init") == PAIR.barriers
    # both blocks are there before they allocate
    order = report.in_ptx.findall(r"barrier\.cluster\.wait|tcgen05\.alloc")
    assert list(dict.fromkeys(order)) == ["barrier.cluster.wait", "tcgen05.alloc"]
    if report.in_sass is not None:
        assert report.in_sass.count(r"UTCHMMA\.2CTA") == report.instructions["tcgen05.mma"]


def test_shared_memory() -> None:
    place = 0
    for name, size in smem_parts().items():
        assert place % (1024 if name in ALIGNED else 8) == 0, name
        place += size
    assert PAIR.smem_parts["kv"] == PAIR.stages * STAGE_BYTES
    assert PAIR.smem_parts["q"] == 2 * decode_2cta.TRADE_BYTES
    assert PAIR.smem_bytes == place + PAIR.barriers * 8


def test_gathered_rows_and_queries_fill_a_stage() -> None:
    """Each 16 bytes of a stage come from one place, and tensor cores find them there."""
    found = np.full(STAGE_BYTES // 16, -1)
    for group, slab in itertools.product(range(KEYS // 4), range(SLABS)):
        for row, chunk in itertools.product(range(4), range(8)):
            place = umma.swizzled(group_offset(group, slab) + row * 128 + chunk * 16, 128)
            assert found[place // 16] == -1
            found[place // 16] = 0
            assert place == slab * SLAB_BYTES + KEY_ROWS.offset(4 * group + row, chunk * 8)
    assert (found == 0).all()
    assert QUERY_SLABS * QUERY_SLAB_BYTES == STAGE_BYTES
    assert QUERY_STAGES * QUERY_SLABS == SLABS
    for half, row in itertools.product(range(2), range(HEADS)):
        # a copy of 128 rows: those of the second half's columns follow the first's
        assert half * SLAB_BYTES + KEY_ROWS.offset(row, 8) == KEY_ROWS.offset(half * HEADS + row, 8)


def test_copies_of_queries_are_the_steps_of_the_scores() -> None:
    """A product reads 8 columns of tensor memory: two chunks, of the slab and the columns that it multiplies."""
    copies = [(number, copy) for number in range(QUERY_STAGES) for copy in query_copies()]
    columns = [copy.column + number * QUERY_SLABS * decode_2cta.Q_COLUMNS for number, copy in copies]
    assert columns == list(range(decode_2cta.Q_COLUMN, decode_2cta.S_COLUMN, 4))
    for step in decode_2cta.scores_steps():
        first = columns.index(step.a)
        for i in range(2):
            number, copy = copies[first + i]
            slab = number * QUERY_SLABS + copy.offset // QUERY_SLAB_BYTES
            assert slab * SLAB_BYTES + copy.offset % QUERY_SLAB_BYTES == step.b + 16 * i


def test_nobody_takes_it_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {key for model in MODELS.values() for arch in BLACKWELL for key in select.prefill_keys(model, 1, arch)}
    assert not any(isinstance(key, BlackwellPairPrefillKey) for key in keys)
    monkeypatch.setattr(select, "PREFILL_PAIR_ARCHS", BLACKWELL)
    choose = select.prefill_key.__wrapped__
    assert [type(choose("sm_100a", heads)) is BlackwellPairPrefillKey for heads in (8, 64, 65, 128)] == [0, 0, 1, 1]


def test_work_is_of_a_block() -> None:
    (own,) = work()
    assert own.blocks == BLOCKS
    assert sum(own.smem.values()) / 128 == 1216
