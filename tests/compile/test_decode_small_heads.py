# SPDX-License-Identifier: Apache-2.0
"""The decode kernel for few heads: what ptxas makes of it, and its config. Needs CuTe DSL, no GPU."""

from __future__ import annotations

import itertools

import pytest

from cute_kernels.formats import FP8_DS_MLA, HEAD_DIM
from cute_kernels.runtime.arch import SMEM_BYTES

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from cute_kernels.sparse_mla import select
from cute_kernels.sparse_mla.mma_sync.decode_small_heads import (
    ARCHS,
    BLOCK,
    CTAS_PER_SM,
    HEADS,
    KEYS,
    LANES,
    WARPS,
    SmallHeadsConfig,
    SmallHeadsDecodeKey,
    code_place,
    first_column,
    rope_place,
)

FP8 = FP8_DS_MLA.id


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("heads", HEADS)
def test_config(arch: str, heads: int) -> None:
    config = SmallHeadsConfig(arch, heads)
    assert CTAS_PER_SM * (config.smem_bytes + 1024) <= SMEM_BYTES[arch] + 1024, "the system takes 1 KB for each CTA"
    assert 2 <= config.stages <= 4
    assert config.ranks * config.columns == HEAD_DIM
    assert config.kv_groups * config.shares == config.blocks, "each KV group converts as many blocks of Q"
    assert config.columns % config.width == 0, "results go out in equal passes"
    parts = config.parts(config.stages)
    assert list(parts) == ["rings", "partials", "queries", "peaks", "results", "maxima", "cursors"]
    places = [config.place(part) for part in parts]
    assert places[0] == 0
    assert places[-1] + WARPS * 64 == config.smem_bytes
    assert all(end - place == parts[part] for part, place, end in zip(parts, places, places[1:], strict=False))
    assert parts["queries"] == heads * HEAD_DIM * 2
    assert parts["maxima"] == config.kv_groups * heads * 8
    # chunks are told apart by low bits of their addresses
    assert all(place % 128 == 0 for place in (config.stage_bytes, config.rope_at, config.ring_bytes))
    assert all(place % 16 == 0 for place in places)
    # the last warp has one block of codes less, and rotated columns twice as wide
    assert config.stage_bytes == KEYS * (config.codes * BLOCK + 2 * BLOCK + 8)


@pytest.mark.parametrize("heads", HEADS)
def test_each_sum_has_a_register(heads: int) -> None:
    config = SmallHeadsConfig("sm_90a", heads)
    triples = list(itertools.product(range(config.blocks), range(4), range(config.groups)))
    assert sorted(config.sums(*triple) for triple in triples) == list(range(0, 128, 4))
    assert sorted(config.query(*triple) for triple in triples) == list(range(0, 64, 2))


def banks(addresses: list[int], size: int) -> set[int]:
    """The 4-byte banks that so many bytes at each address lie in."""
    return {address // 4 % 32 + i for address in addresses for i in range(size // 4)}


def test_no_two_lanes_reach_for_the_same_bank() -> None:
    for first in range(0, 32, 8):
        lanes = [(lane // 4, lane % 4) for lane in range(first, first + 8)]
        # scores: 16 bytes of two keys each
        assert len(banks([code_place(r, c) for r, c in lanes], 16)) == 32
        for second in range(2):
            assert len(banks([rope_place(r, 2 * c) ^ 16 * second for r, c in lanes], 16)) == 32
    # values: the eight rows of a matrix
    for chunk in range(4):
        assert len(banks([code_place(key, chunk) for key in range(8)], 16)) == 32
    for chunk in range(8):
        assert len(banks([rope_place(key, chunk) for key in range(8)], 16)) == 32
    # results: 8 bytes of half of the lanes, or 4 of all
    for heads in HEADS:
        pitch = SmallHeadsConfig("sm_90a", heads).pitch
        for lanes_ in (range(16), range(16, 32)):
            places = [2 * (lane % 4) * pitch + first_column(False, lane // 4)[0] * 4 for lane in lanes_]
            assert len(banks(places, 8)) == 32
        for column in range(2):
            places = [2 * (lane % 4) * pitch + first_column(True, lane // 4)[column] * 4 for lane in range(LANES)]
            assert len(banks(places, 4)) == 32


def test_columns_of_a_chunk_are_all_there() -> None:
    for is_rope in (False, True):
        assert sorted(column for r in range(8) for column in first_column(is_rope, r)) == list(range(16))


def test_keys() -> None:
    with pytest.raises(ValueError, match=r"second: expected one of .*'dense'.*, got 'some'"):
        SmallHeadsDecodeKey("sm_90a", second="some")
    with pytest.raises(ValueError, match=r"heads: expected one of \(8, 16\), got 64"):
        _ = SmallHeadsDecodeKey("sm_90a", heads=64).config
    with pytest.raises(ValueError, match=r"arch: expected one of sm_90a, .*, got 'sm_80'"):
        _ = SmallHeadsDecodeKey("sm_80").config


def test_it_is_chosen_by_heads_formats_and_architecture() -> None:
    for arch, heads, other, is_small in (
        ("sm_90a", 5, FP8, True),
        ("sm_90a", 16, FP8, True),
        ("sm_90a", 17, FP8, False),
        ("sm_90a", 8, "plain_bf16/1", False),
        ("sm_80", 8, FP8, False),
    ):
        key = select.decode_key(arch, heads, "listed", False, FP8, other)
        assert isinstance(key, SmallHeadsDecodeKey) == is_small
    for arch, heads, is_small in (("sm_90a", 8, False), ("sm_90a", 16, False), ("sm_100a", 9, True)):
        key = select.decode_key(arch, heads, "listed", False, FP8, FP8, True)
        assert isinstance(key, SmallHeadsDecodeKey) == is_small
