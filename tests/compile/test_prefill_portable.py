# SPDX-License-Identifier: Apache-2.0
"""The portable kernels of prefill, compiled for every architecture, and their config. Needs CuTe DSL, no GPU."""

from __future__ import annotations

import itertools

import pytest

from cute_kernels.formats import FP8_DS_MLA, PLAIN_BF16, PLAIN_FP8
from cute_kernels.runtime.arch import SMEM_BYTES

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from cute_kernels.sparse_mla import select
from cute_kernels.sparse_mla.mma_sync.operands import wide_chunk
from cute_kernels.sparse_mla.mma_sync.prefill import (
    CURSOR_BYTES,
    FORMATS,
    HEADS,
    SLAB_ROW,
    PortableMixedKey,
    PortablePagedKey,
    PortablePrefillKey,
    PrefillConfig,
    group_heads,
)
from tests.compile.test_decode_portable import banks

FP8, BF16, E4M3 = FP8_DS_MLA.id, PLAIN_BF16.id, PLAIN_FP8.id
ARCHS = ("sm_80", "sm_89", "sm_90a", "sm_100a", "sm_103a", "sm_120a")


@pytest.mark.parametrize("arch", SMEM_BYTES)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("formats", [*itertools.product(FORMATS, FORMATS), (BF16,)])
def test_config(arch: str, heads: int, formats: tuple[str, ...]) -> None:
    config = PrefillConfig(arch, heads, formats)
    assert config.smem_bytes <= SMEM_BYTES[arch]
    assert config.keys in (16, 32, 64)
    assert 2 <= config.stages <= 4
    assert config.head_groups * config.shares == 8
    assert config.head_groups * config.warp_rows == config.rows == 8 * config.groups
    assert config.shares * config.slabs == 8
    # a warp does the softmax of a row group of its own heads
    assert all(group // config.group_flags == group // config.shares for group in range(config.groups))
    places = {
        "tile": (config.place("tile"), config.stages * config.stage_bytes, 128),
        "shares": (config.place("shares"), 0 if config.is_direct else config.keys * 1024, 128),
        "weights": (config.place("weights"), 8 * config.warp_rows * config.keys * 4, 16),
        "masks": (config.place("masks"), config.rows * config.keys * 2, 16),
        "labels": (config.place("labels"), config.stages * config.keys * 4, 16),
        "factors": (config.place("factors"), 4 * 4, 16),
        "flags": (config.place("flags"), 2 * config.rows * 4, 16),
        "rows": (config.place("rows"), 8 * 4, 16),
        "tops": (config.place("tops"), config.groups * 32 * 8, 16),
        "sinks": (config.place("sinks"), config.groups * 32 * 4, 16),
        "cursors": (config.place("cursors"), 128 * 4, 16),
    }
    place = 0
    for name, (begin, before, alignment) in places.items():
        place += before
        assert begin == place, name
        assert begin % alignment == 0, name
    assert place + 8 * CURSOR_BYTES == config.smem_bytes
    assert config.stage_bytes % 128 == config.slab_bytes % 128 == 0
    assert config.scales_at % 8 == 0
    assert config.share_bytes == config.warp_rows // 8 * config.group_bytes


def test_most_keys_that_fit_are_taken() -> None:
    assert [PrefillConfig(arch, 64, (BF16,)).keys for arch in ARCHS] == [32, 16, 64, 64, 64, 16]
    assert [PrefillConfig(arch, 64, (FP8, FP8)).keys for arch in ARCHS] == [32, 16, 64, 64, 64, 16]


def test_no_two_lanes_read_or_write_the_same_bank() -> None:
    for key in range(0, 64, 8):
        for quarter in range(4):
            # scores, and rows that become bf16: 8 lanes at a time have 16 bytes of two keys
            lanes = [(key + lane // 4, lane % 4) for lane in range(8 * quarter, 8 * quarter + 8)]
            for second in range(2):
                assert len(banks([wide_chunk(k, 2 * c) ^ 16 * second for k, c in lanes], 16)) == 32
            # values: a row of a matrix from each of 8 lanes
            for chunk in range(8):
                assert len(banks([wide_chunk(key + row, chunk) for row in range(8)], 16)) == 32
            # codes of raw rows
            for formats in ((FP8,), (E4M3,), (FP8, BF16)):
                raw = PrefillConfig("sm_90a", 64, formats).raw_row
                assert len(banks([k * raw + c * 16 for k, c in lanes], 16)) == 32


def test_every_chunk_of_a_slab_has_its_place() -> None:
    places = {wide_chunk(key, chunk) for key, chunk in itertools.product(range(64), range(8))}
    assert places == set(range(0, 64 * SLAB_ROW, 16))


def test_keys() -> None:
    assert [group_heads(heads) for heads in (1, 16, 17, 32, 33, 64, 128)] == [16, 16, 32, 32, 64, 64, 64]
    assert select.prefill_key("sm_80", 128) == PortablePrefillKey("sm_80", 64)
    assert select.mixed_key("sm_120a", 8, E4M3) == PortableMixedKey("sm_120a", 16, E4M3)
    assert select.paged_key("sm_120a", 32, "all", FP8, BF16) == PortablePagedKey("sm_120a", 32, "all", FP8, BF16)
    with pytest.raises(ValueError, match=r"heads: expected one of \(16, 32, 64\), got 24"):
        _ = PortablePrefillKey("sm_80", 24).config
    with pytest.raises(ValueError, match=r"compressed: expected one of .*'listed'.*, got 'some'"):
        PortablePagedKey("sm_80", 64, "some")
    with pytest.raises(ValueError, match=r"format: expected one of .*, got 'x/1'"):
        _ = PortableMixedKey("sm_80", 64, "x/1").config
