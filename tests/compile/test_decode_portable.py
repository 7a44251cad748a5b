# SPDX-License-Identifier: Apache-2.0
"""The portable kernel of sparse_mla_decode, compiled for every architecture, and its plan. Needs CuTe DSL, no GPU."""

from __future__ import annotations

import itertools

import pytest

from cute_kernels.formats import FP8_DS_MLA, NOPE_DIM, PLAIN_BF16
from cute_kernels.runtime.arch import SMEM_BYTES

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from cute_kernels.sparse_mla.mma_sync.decode import HEADS, DecodeConfig, PortableDecodeKey
from cute_kernels.sparse_mla.mma_sync.operands import fp8_chunk, wide_chunk
from cute_kernels.sparse_mla.params import EXTRA

FP8, BF16 = FP8_DS_MLA.id, PLAIN_BF16.id
ARCHS = ("sm_80", "sm_89", "sm_90a", "sm_100a", "sm_103a", "sm_120a")
FORMATS = ((FP8,), (BF16,), (FP8, FP8), (FP8, BF16), (BF16, FP8), (BF16, BF16))


@pytest.mark.parametrize("arch", SMEM_BYTES)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("formats", FORMATS)
def test_plan(arch: str, heads: int, formats: tuple[str, ...]) -> None:
    plan = DecodeConfig(arch, heads, formats)
    assert plan.smem_bytes <= SMEM_BYTES[arch]
    assert plan.rows >= heads
    assert plan.rows % 16 == 0
    assert 64 % plan.keys == 0
    assert plan.keys % 16 == 0
    assert 2 <= plan.stages <= 4
    # places follow one another, with room for what is in them; chunks are told apart by low bits of their addresses
    places = [0, plan.shares_at, plan.weights_at, plan.masks_at, plan.factors_at, plan.flags_at, plan.rows_at]
    places.append(plan.cursors_at)
    sizes = [
        plan.stages * plan.stage_bytes,
        8 * plan.rows * plan.keys * 4,
        plan.rows * plan.keys * 2,
        plan.stages * plan.keys * 4,
        2 * plan.rows * 4,
        8 * 4,
        plan.rows // 8 * 32 * 8,
        8 * 64,
    ]
    ends = [place + size for place, size in zip(places, sizes, strict=True)]
    assert places[1:] == ends[:-1]
    assert ends[-1] == plan.smem_bytes
    assert all(place % 16 == 0 for place in places)
    assert plan.stage_bytes % 128 == plan.rope_at % 128 == plan.plain_bytes % 128 == 0
    assert plan.share_bytes == plan.rows // 8 * plan.group_bytes
    if FP8 in formats:
        assert plan.scales_at == plan.rope_at + plan.keys * 128
        assert plan.scales_at + plan.keys * 8 <= plan.stage_bytes
    if BF16 in formats:
        assert 8 * plan.plain_bytes <= plan.stage_bytes


def test_most_keys_that_fit_are_taken() -> None:
    assert [DecodeConfig(arch, 64, (FP8, FP8)).keys for arch in ARCHS] == [32, 16, 64, 64, 64, 16]
    assert [DecodeConfig(arch, 64, (BF16,)).keys for arch in ARCHS] == [32, 16, 32, 32, 32, 16]
    assert [DecodeConfig("sm_90a", heads, (FP8,)).keys for heads in HEADS] == [64] * 4


def test_every_byte_of_a_key_has_its_place() -> None:
    fp8 = {
        fp8_chunk(key, chunk) + warp * 64 + byte
        for key, chunk, warp, byte in itertools.product(range(64), range(4), range(7), range(16))
    }
    assert fp8 == set(range(64 * NOPE_DIM))
    wide = {wide_chunk(key, chunk) + byte for key, chunk, byte in itertools.product(range(64), range(8), range(16))}
    assert wide == set(range(64 * 128))


def banks(addresses: list[int], size: int) -> set[int]:
    """The 4-byte banks that so many bytes at each address lie in."""
    return {address // 4 % 32 + i for address in addresses for i in range(size // 4)}


def test_no_two_lanes_read_the_same_bank() -> None:
    for warp, key in itertools.product(range(8), range(0, 64, 8)):
        # scores: 8 lanes at a time read 16 bytes of two keys
        for quarter in range(4):
            lanes = [(key + lane // 4, lane % 4) for lane in range(8 * quarter, 8 * quarter + 8)]
            assert len(banks([fp8_chunk(k, c) + 64 * warp for k, c in lanes], 16)) == 32
            for second in range(2):
                assert len(banks([wide_chunk(k, 2 * c) ^ 16 * second for k, c in lanes], 16)) == 32
        # values: the 8 rows of a matrix; or a word of each of 4 keys, all even or all odd, from each of 8 lanes
        for chunk in range(4):
            assert len(banks([fp8_chunk(key + row, chunk) + 64 * warp for row in range(8)], 16)) == 32
            for odd in range(2):
                words = [
                    wide_chunk(key + 2 * c + odd, 2 * chunk + r // 4) + r % 4 * 4 for r in range(8) for c in range(4)
                ]
                assert len(banks(words, 4)) == 32


def test_places_differ_by_single_bits() -> None:
    """The kernel reaches a key's other chunks by an exclusive or with the address of one."""
    for key in range(64):
        for chunk in range(4):
            assert fp8_chunk(key, chunk ^ 2) == fp8_chunk(key, chunk) ^ 32
        for chunk in range(8):
            assert wide_chunk(key, chunk ^ 1) == wide_chunk(key, chunk) ^ 16
            assert wide_chunk(key, chunk ^ 2) == wide_chunk(key, chunk) ^ 32
            assert wide_chunk(key, chunk ^ 4) == wide_chunk(key, chunk) ^ 64


def test_keys() -> None:
    keys = {
        PortableDecodeKey(arch, heads, FP8, second, format1, fp32)
        for arch, heads, second, format1, fp32 in itertools.product(ARCHS, HEADS, EXTRA, (FP8, BF16), (False, True))
    }
    assert len(keys) == 6 * 4 * 3 * 2 * 2
    assert PortableDecodeKey("sm_80", second="none", format1=BF16).formats == (FP8,)
    with pytest.raises(ValueError, match=r"second: expected one of .*'dense'.*, got 'some'"):
        PortableDecodeKey("sm_80", second="some")
    with pytest.raises(ValueError, match=r"heads: expected one of \(8, 16, 32, 64\), got 24"):
        _ = PortableDecodeKey("sm_80", heads=24).config
    with pytest.raises(ValueError, match=r"format: expected one of .*, got 'plain_fp8/1'"):
        _ = PortableDecodeKey("sm_80", format0="plain_fp8/1").config
