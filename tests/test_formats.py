# SPDX-License-Identifier: Apache-2.0
"""Byte layouts: explicit bytes at explicit offsets, sizes, checks, and what a write must leave alone."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cute_kernels import formats
from cute_kernels.runtime.checks import Checker
from tests import helpers, oracle

INT64 = torch.iinfo(torch.int64)


def poke(expected: torch.Tensor, offset: int, values: list[int]) -> None:
    expected[offset : offset + len(values)] = torch.tensor(values, dtype=torch.uint8)


def bf16_bytes(*values: float) -> list[int]:
    """Little-endian bf16 bytes of values that bf16 represents."""
    out: list[int] = []
    for v in values:
        bits = int(np.float32(v).view(np.uint32))
        assert bits & 0xFFFF == 0
        out += [bits >> 16 & 0xFF, bits >> 24]
    return out


def slots(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


# ---- sizes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fmt", "block_size", "natural", "stride"),
    [
        (formats.FP8_DS_MLA, 64, 37376, 37440),
        (formats.FP8_DS_MLA, 2, 1168, 1728),
        (formats.FP8_DS_MLA, 256, 149504, 149760),
        (formats.FP8_DS_MLA, 1, 584, 1152),
        (formats.MXFP8_V41, 64, 33792, 33792),
        (formats.MXFP8_V41, 3, 1584, 1584),
        (formats.NVFP4_V41, 64, 18432, 18432),
        (formats.NVFP4_V41, 3, 864, 864),
        (formats.PLAIN_BF16, 64, 65536, 65536),
        (formats.PLAIN_BF16, 1, 1024, 1024),
        (formats.PLAIN_FP8, 2, 1024, 1024),
        (formats.PLAIN_FP8, 3, 1536, 1536),
        (formats.INDEXER_FP8, 64, 8448, 8640),
        (formats.INDEXER_MXFP4, 64, 4352, 4608),
        (formats.INDEXER_MXFP4_WIDE, 64, 8448, 8640),
        (formats.compressor_state(512, 4), 4, 32768, 32832),
        (formats.compressor_state(512, 128), 8, 32768, 32832),
        (formats.compressor_state(128, 4), 4, 8192, 8640),
    ],
)
def test_page_sizes(fmt: Any, block_size: int, natural: int, stride: int) -> None:
    assert fmt.page_bytes(block_size) == natural
    assert fmt.page_stride(block_size) == stride
    pool = fmt.allocate(3, block_size)
    assert pool.shape == (3, block_size, fmt.row_elements)
    assert pool.stride(0) * pool.element_size() == stride
    assert pool.stride()[1:] == (fmt.row_elements, 1)
    assert pool.untyped_storage().nbytes() == 3 * stride  # every page can be addressed over its whole stride
    assert pool.dtype == fmt.dtype
    assert not helpers.raw_bytes(pool).any()


def test_state_widths() -> None:
    for head_dim, ratio, width in ((512, 4, 1024), (512, 128, 512), (128, 4, 256)):
        fmt = formats.compressor_state(head_dim, ratio)
        assert (fmt.width, fmt.row_elements, fmt.dim) == (width, 2 * width, 2 * width)


def test_ids_are_unique_and_versioned() -> None:
    states = [formats.compressor_state(512, 4), formats.compressor_state(512, 128), formats.compressor_state(128, 4)]
    ids = [f.id for f in (*formats.FORMATS.values(), *states)]
    assert len(set(ids)) == len(ids) == 13
    assert all(i.rsplit("/", 1)[1].isdigit() for i in ids)
    assert all(formats.FORMATS[i].id == i for i in formats.FORMATS)


def test_allocate_with_a_page_stride() -> None:
    pool = formats.compressor_state(512, 4).allocate(2, 4, page_stride=37440)
    assert pool.stride(0) == 9360
    with pytest.raises(ValueError, match=r"fp8_ds_mla/1: page_stride: expected .* at least 37376 bytes, got 37375"):
        formats.FP8_DS_MLA.allocate(1, 64, page_stride=37375)
    with pytest.raises(ValueError, match="multiple of 4"):
        formats.compressor_state(128, 4).allocate(1, 4, page_stride=8194)


def test_round_up() -> None:
    assert [formats.round_up(v, 576) for v in (0, 1, 576, 577)] == [0, 576, 576, 1152]


def test_valid_slots() -> None:
    given_slots = slots(-1, 0, 9, 10, INT64.min, INT64.max, 2**32)
    assert formats.valid_slots(given_slots, 10).tolist() == [False, True, True, False, False, False, False]


# ---- golden vectors --------------------------------------------------------------------------------------------------


def golden_mla_row() -> tuple[torch.Tensor, list[int], list[int]]:
    """A row with one special case per block, its 576 data bytes and its 8 scale bytes, worked out by hand."""
    row = torch.zeros(512)
    data, scale = [0] * 576, [0] * 8

    row[0:3] = torch.tensor([448.0, -448.0, 3.0])  # absmax 448: 2^0. 3 = 1.5 * 2^1: exponent field 8, mantissa 4
    data[0:3], scale[0] = [0x7E, 0xFE, 0x44], 127

    row[64:66] = torch.tensor([450.0, 1.0])  # just above: 2^1. 225 -> 224 = 1.75 * 2^7; 0.5 = 2^-1
    data[64:66], scale[1] = [0x76, 0x30], 128

    row[128:130] = torch.tensor([1.0, -0.5])  # log2(1 / 448) = -8.8: 2^-8. 256 = 2^8, -128 = -2^7
    data[128:130], scale[2] = [0x78, 0xF0], 119

    scale[3] = 105  # zeros: the floor 1e-4, log2(1e-4 / 448) = -22.1

    row[256:258] = torch.tensor([-0.0, 5 * 2.0**-19])  # below the floor: 2^-22. -0 keeps its sign, 40 = 1.25 * 2^5
    data[256:258], scale[4] = [0x80, 0x62], 105

    row[320:325] = torch.tensor([math.nan, 2.0, 2.125, -2.125, 2.0**-17])  # absmax 2.125: 2^-7
    # NaN -> 0x7F; 256; 272 is halfway between 256 and 288 and goes to the even mantissa; 2^-10 is half the smallest
    # e4m3 and goes to zero
    data[320:325], scale[5] = [0x7F, 0x78, 0x78, 0xF8, 0x00], 120

    row[384:388] = torch.tensor([6.0 * 2.0**100, 2.0**80, -(2.0**85), 7.0 * 2.0**95])  # 6/448 * 2^100: 2^94
    # 6 * 2^6 = 384; 2^-14 underflows; -2^-9 is the smallest; 14
    data[384:388], scale[6] = [0x7C, 0x00, 0x81, 0x56], 127 + 94

    row[448:452] = torch.tensor([1.0, -2.0, -0.0, 448.0])
    data[448:456] = bf16_bytes(1.0, -2.0, -0.0, 448.0)
    row[511] = 2.0**-130  # a bf16 subnormal survives
    data[574:576] = [0x08, 0x00]
    return row.bfloat16().unsqueeze(0), data, scale


@pytest.mark.parametrize("view", ["rows", "flat"])
def test_fp8_ds_mla_golden(view: str) -> None:
    row, data, scale = golden_mla_row()
    pool = helpers.poisoned_pool(formats.FP8_DS_MLA, 3, 64)
    expected = helpers.raw_bytes(pool).clone()
    poke(expected, 1 * 37440 + 3 * 576, data)
    poke(expected, 1 * 37440 + 64 * 576 + 3 * 8, scale)
    cache = pool if view == "rows" else pool.as_strided((3, 37440), (37440, 1))
    formats.FP8_DS_MLA.write(cache, 64, slots(64 + 3), row)
    assert torch.equal(helpers.raw_bytes(pool), expected)

    back = formats.FP8_DS_MLA.read(cache, 64, slots(64 + 3))
    assert back.dtype == torch.bfloat16
    values = {0: 448, 1: -448, 2: 3, 64: 448, 65: 1, 128: 1, 129: -0.5, 257: 40 * 2.0**-22, 321: 2, 322: 2, 324: 0}
    values |= {384: 6 * 2.0**100, 385: 0, 386: -(2.0**85), 387: 7 * 2.0**95, 448: 1, 449: -2, 451: 448, 511: 2.0**-130}
    for column, value in values.items():
        assert back[0, column] == value
    assert back[0, 320].isnan()
    assert torch.signbit(back[0, 256])
    assert torch.signbit(back[0, 450])


def test_plain_bf16_golden() -> None:
    pool = helpers.poisoned_pool(formats.PLAIN_BF16, 3, 4, extra_stride=512)
    expected = helpers.raw_bytes(pool).clone()
    row = torch.zeros(1, 512)
    row[0, 0], row[0, 1], row[0, 511] = 1.0, 1.0 + 2.0**-8, -3.0  # the second is a tie and goes to 1.0
    base = 2 * (4096 + 512) + 1 * 1024
    poke(expected, base, [0] * 1024)
    poke(expected, base, bf16_bytes(1.0, 1.0))
    poke(expected, base + 1022, bf16_bytes(-3.0))
    formats.PLAIN_BF16.write(pool, 4, slots(9), row)
    assert torch.equal(helpers.raw_bytes(pool), expected)
    assert formats.PLAIN_BF16.read(pool, 4, slots(9))[0, [0, 1, 2, 511]].tolist() == [1.0, 1.0, 0.0, -3.0]


@pytest.mark.parametrize("as_tensor", [False, True])
def test_plain_fp8_golden(as_tensor: bool) -> None:
    pool = helpers.poisoned_pool(formats.PLAIN_FP8, 2, 4, extra_stride=512)
    expected = helpers.raw_bytes(pool).clone()
    row = torch.zeros(1, 512)
    row[0, :5] = torch.tensor([6.0, -6000.0, math.nan, 51.0, -0.0])
    row[0, 511] = 3.0
    # Divided by 3: 2, -2000 (saturates), NaN, 17 (halfway between 16 and 18, to the even mantissa), -0, 1.
    base = 2048 + 512 + 3 * 512
    poke(expected, base, [0] * 512)
    poke(expected, base, [0x40, 0xFE, 0x7F, 0x58, 0x80])
    poke(expected, base + 511, [0x38])
    scale: Any = torch.tensor([3.0]) if as_tensor else 3.0
    formats.PLAIN_FP8.write(pool, 4, slots(7), row, scale)
    assert torch.equal(helpers.raw_bytes(pool), expected)
    back = formats.PLAIN_FP8.read(pool, 4, slots(7), scale)[0]
    assert back[[0, 1, 3, 4, 511]].tolist() == [6.0, -1344.0, 48.0, 0.0, 3.0]
    assert back[2].isnan()


def test_plain_fp8_divides_by_its_scale() -> None:
    """Values whose seventh is a tie between two codes: a product with the rounded 1 / 7 moves some of them."""
    grid = oracle.E4M3[:0x7F]
    x = np.zeros((1, 512), dtype=np.float32)
    x[0, :126] = (grid[:-1] + grid[1:]) / 2 * 7
    want = oracle.e4m3_encode((x / np.float32(7)).astype(np.float64))
    assert (want != oracle.e4m3_encode((x * np.float32(1 / 7)).astype(np.float64))).any()
    np.testing.assert_array_equal(formats.PLAIN_FP8.encode(torch.from_numpy(x), 7.0).view(torch.uint8).numpy(), want)


def test_indexer_fp8_golden() -> None:
    pool = helpers.poisoned_pool(formats.INDEXER_FP8, 2, 64)
    expected = helpers.raw_bytes(pool).clone()
    row = torch.zeros(1, 128)
    row[0, 0], row[0, 1], row[0, 127] = 1.0, -0.25, 0.0017  # 2^-8: 256, -64 and about 0.435 (0.4375 = 1.75 * 2^-2)
    base = 8640 + 5 * 128
    poke(expected, base, [0] * 128)
    poke(expected, base, [0x78, 0xE8])
    poke(expected, base + 127, [0x2E])
    poke(expected, 8640 + 64 * 128 + 5 * 4, [0x00, 0x00, 0x80, 0x3B])  # fp32 2^-8 = 0x3B800000
    formats.INDEXER_FP8.write(pool, 64, slots(64 + 5), row.bfloat16())
    assert torch.equal(helpers.raw_bytes(pool), expected)
    back = formats.INDEXER_FP8.read(pool, 64, slots(64 + 5))
    assert back.dtype == torch.float32
    assert back[0, [0, 1, 2, 127]].tolist() == [1.0, -0.25, 0.0, 0.4375 / 256]


def test_indexer_fp8_reads_any_fp32_scale() -> None:
    codes = torch.full((1, 128), 0x38, dtype=torch.uint8)
    scale = torch.tensor([[3.5]]).view(torch.uint8)
    assert formats.INDEXER_FP8.decode(codes, scale).unique().tolist() == [3.5]


@pytest.mark.parametrize(
    ("fmt", "stride"), [(formats.INDEXER_MXFP4, 4608), (formats.INDEXER_MXFP4_WIDE, 8640)], ids=["68", "132"]
)
def test_indexer_mxfp4_golden(fmt: Any, stride: int) -> None:
    """Both allocations put data at o * 64 and scales at 64 * bs + 4 * o."""
    row = torch.zeros(1, 128)
    row[0, 0:6] = torch.tensor([6.0, 0.75, -1.75, -0.25, -0.0, 3.5])  # scale 2^0
    row[0, 32:34] = torch.tensor([12.5, -3.0])  # above 12: 2^2. 3.125 -> 3, -0.75 is a tie
    row[0, 95] = -1.0  # 1/6 -> 2^-2: -4
    codes = {
        "ties_to_lower": {0: 0x17, 1: 0x0B, 2: 0x50, 16: 0x95, 47: 0xE0},
        "ties_to_even": {0: 0x27, 1: 0x8C, 2: 0x68, 16: 0xA5, 47: 0xE0},
    }
    for rounding, data in codes.items():
        pool = helpers.poisoned_pool(fmt, 2, 64)
        assert pool.stride(0) == stride
        expected = helpers.raw_bytes(pool).clone()
        base = stride + 7 * 64
        poke(expected, base, [0] * 64)
        for byte, value in data.items():
            poke(expected, base + byte, [value])
        poke(expected, stride + 64 * 64 + 7 * 4, [127, 129, 125, 112])  # the last block is zero: 2^-15 from the floor
        fmt.write(pool, 64, slots(64 + 7), row.bfloat16(), rounding)
        assert torch.equal(helpers.raw_bytes(pool), expected)
        back = fmt.read(pool, 64, slots(64 + 7))[0]
        assert back[[0, 32, 95, 127]].tolist() == [6.0, 12.0, -1.0, 0.0]
        assert torch.signbit(back[4]).item() == (rounding == "ties_to_even")


def test_indexer_mxfp4_defaults_to_the_lower_code() -> None:
    row = torch.full((1, 128), 0.75).bfloat16()
    row[0, ::32] = 6.0
    lower = formats.INDEXER_MXFP4.encode(row, "ties_to_lower")
    assert all(torch.equal(a, b) for a, b in zip(formats.INDEXER_MXFP4.encode(row), lower, strict=True))
    pool = formats.INDEXER_MXFP4.allocate(1, 1)
    formats.INDEXER_MXFP4.write(pool, 1, slots(0), row)
    assert helpers.raw_bytes(pool)[:2].tolist() == [0x17, 0x11]


def test_compressor_state_golden() -> None:
    fmt = formats.compressor_state(128, 4)
    pool = helpers.poisoned_pool(fmt, 3, 4)
    expected = helpers.raw_bytes(pool).clone()
    row = torch.zeros(1, 512)
    row[0, 0], row[0, 255], row[0, 256] = 1.0, -2.0, math.pi
    base = 2 * 8640 + 3 * 2048
    poke(expected, base, [0] * 2048)
    poke(expected, base, [0x00, 0x00, 0x80, 0x3F])
    poke(expected, base + 255 * 4, [0x00, 0x00, 0x00, 0xC0])
    poke(expected, base + 256 * 4, [0xDB, 0x0F, 0x49, 0x40])
    fmt.write(pool, 4, slots(11), row)
    assert torch.equal(helpers.raw_bytes(pool), expected)
    assert torch.equal(fmt.read(pool, 4, slots(11)), row)


def test_state_keeps_nan_payloads() -> None:
    fmt = formats.compressor_state(128, 4)
    pool = fmt.allocate(1, 4)
    row = torch.full((1, 512), 0x7FC12345, dtype=torch.int32)
    fmt.write(pool, 4, slots(0), row.view(torch.float32))
    assert torch.equal(fmt.read(pool, 4, slots(0)).view(torch.int32), row)


# ---- what every format promises --------------------------------------------------------------------------------------

ALL = [
    pytest.param(formats.FP8_DS_MLA, 64, id="mla64"),
    pytest.param(formats.FP8_DS_MLA, 2, id="mla2"),
    pytest.param(formats.MXFP8_V41, 3, id="mxfp8_v41"),
    pytest.param(formats.NVFP4_V41, 3, id="nvfp4_v41"),
    pytest.param(formats.PLAIN_BF16, 3, id="bf16"),
    pytest.param(formats.PLAIN_FP8, 3, id="fp8"),
    pytest.param(formats.INDEXER_FP8, 64, id="indexer_fp8"),
    pytest.param(formats.INDEXER_MXFP4, 64, id="mxfp4"),
    pytest.param(formats.INDEXER_MXFP4_WIDE, 5, id="mxfp4_wide"),
    pytest.param(formats.compressor_state(512, 4), 4, id="state_c4"),
    pytest.param(formats.compressor_state(512, 128), 8, id="state_c128"),
    pytest.param(formats.compressor_state(128, 4), 4, id="state_indexer"),
]


def rows_for(fmt: Any, n: int, seed: int = 0) -> torch.Tensor:
    return helpers.spread((n, fmt.dim), seed, torch.float32 if fmt.dtype == torch.float32 else torch.bfloat16)


@pytest.mark.parametrize(("fmt", "block_size"), ALL)
@pytest.mark.parametrize("extra", [0, 64, 1152])
def test_slots_outside_the_pool_are_skipped(fmt: Any, block_size: int, extra: int) -> None:
    pool = helpers.poisoned_pool(fmt, 3, block_size, extra)
    before = helpers.raw_bytes(pool).clone()
    capacity = 3 * block_size
    outside = slots(-1, -(2**31), INT64.min, capacity, capacity + 1, 2**31, 2**32, 2**32 + 1, INT64.max)
    fmt.write(pool, block_size, outside, rows_for(fmt, len(outside)))
    assert torch.equal(helpers.raw_bytes(pool), before)
    fmt.write(pool, block_size, slots(), rows_for(fmt, 0))
    assert torch.equal(helpers.raw_bytes(pool), before)


@pytest.mark.parametrize(("fmt", "block_size"), ALL)
def test_records_neither_overlap_nor_reach_the_padding(fmt: Any, block_size: int) -> None:
    """Each record writes its own bytes: together they are the page, apart they touch nothing of each other."""
    capacity = 2 * block_size
    record = fmt.page_bytes(block_size) // block_size
    if fmt is formats.INDEXER_MXFP4_WIDE:
        record = 68
    owner = np.full(2 * fmt.page_stride(block_size), -1)
    for slot in range(capacity):
        touched = []
        for fill in (0x00, 0xFF):
            pool = fmt.allocate(2, block_size)
            raw = helpers.raw_bytes(pool).fill_(0xFF - fill)
            fields = tuple(torch.full_like(f, fill) for f in fmt.read_fields(pool, block_size, slots(slot)))
            fmt.write_fields(pool, block_size, slots(slot), *fields)
            touched.append(np.flatnonzero(raw.numpy() == fill))
        np.testing.assert_array_equal(*touched)
        assert len(touched[0]) == record
        assert (owner[touched[0]] == -1).all()
        assert (touched[0] // fmt.page_stride(block_size) == slot // block_size).all()
        owner[touched[0]] = slot
    for page in range(2):
        assert (owner[page * fmt.page_stride(block_size) :][: record * block_size] >= 0).all()


@pytest.mark.parametrize(("fmt", "block_size"), ALL)
def test_read_finds_what_write_stored(fmt: Any, block_size: int) -> None:
    """Out of order, some slots outside; the stored values do not depend on the rows stored with them."""
    pool = helpers.poisoned_pool(fmt, 4, block_size, extra_stride=64)
    order = torch.randperm(4 * block_size, generator=helpers.generator(1))[:9]
    order[4] = -1
    rows = rows_for(fmt, len(order), seed=3)
    fmt.write(pool, block_size, order, rows)
    keep = order >= 0
    together = fmt.read(pool, block_size, order[keep])
    for i, slot in enumerate(order[keep].tolist()):
        single = fmt.allocate(1, block_size)
        fmt.write(single, block_size, slots(slot % block_size), rows[keep][i : i + 1])
        alone = fmt.read(single, block_size, slots(slot % block_size))
        assert torch.equal(alone[0].view(torch.uint8), together[i].view(torch.uint8))
        if fmt.dtype in (torch.float32, torch.bfloat16):
            assert torch.equal(alone[0].float(), rows[keep][i].float())
    assert fmt.read(pool, block_size, slots()).shape == (0, fmt.dim)


@pytest.mark.parametrize(("fmt", "block_size"), ALL)
def test_pages_beyond_two_gigabytes(fmt: Any, block_size: int) -> None:
    """Byte offsets past 2^31 with three pages; the memory in between is never touched."""
    stride = formats.round_up(2**30 + 4096, 576 * 4)
    size = fmt.dtype.itemsize
    memory = torch.empty(2 * stride + fmt.page_bytes(block_size), dtype=torch.uint8)
    pool = memory.view(fmt.dtype).as_strided((3, block_size, fmt.row_elements), (stride // size, fmt.row_elements, 1))
    page = memory[2 * stride :]
    page.fill_(helpers.POISON_BYTE)
    near = memory[: fmt.page_bytes(block_size)].fill_(helpers.POISON_BYTE)
    slot = slots(2 * block_size + block_size - 1)
    fmt.write(pool, block_size, slot, rows_for(fmt, 1))
    small = helpers.poisoned_pool(fmt, 1, block_size)
    fmt.write(small, block_size, slots(block_size - 1), rows_for(fmt, 1))
    assert torch.equal(page, helpers.raw_bytes(small)[: len(page)])
    assert (near == helpers.POISON_BYTE).all()
    assert torch.equal(fmt.read(pool, block_size, slot), fmt.read(small, block_size, slots(block_size - 1)))


# ---- encode and decode -----------------------------------------------------------------------------------------------


def test_mla_decodes_every_code_under_every_useful_scale() -> None:
    """e4m3 * 2^e is exact in bf16: table times power of two, no rounding."""
    scale_bytes = np.arange(105, 247)  # the bytes that a bf16 absmax can give
    codes = np.arange(448) % 256
    data = torch.zeros(len(scale_bytes), 576, dtype=torch.uint8)
    data[:, :448] = torch.from_numpy(codes)
    scales = torch.zeros(len(scale_bytes), 8, dtype=torch.uint8)
    scales[:, :7] = torch.from_numpy(scale_bytes)[:, None]
    got = formats.FP8_DS_MLA.decode(data, scales)[:, :448]
    np.testing.assert_array_equal(got.double().numpy(), np.exp2(scale_bytes - 127.0)[:, None] * oracle.E4M3[codes])


def test_mla_decode_uses_the_scale_of_its_block() -> None:
    data = torch.full((1, 576), 0x38, dtype=torch.uint8)
    scales = torch.tensor([[120, 121, 122, 123, 124, 125, 126, 0]], dtype=torch.uint8)
    got = formats.FP8_DS_MLA.decode(data, scales)[0, :448].view(7, 64)
    assert got.unique(dim=1).flatten().tolist() == [2.0 ** (e - 7) for e in range(7)]
    scales[0, 3] = 255
    assert formats.FP8_DS_MLA.decode(data, scales)[0, 192:256].isnan().all()


def test_mla_encode_matches_the_oracle() -> None:
    rows = helpers.spread((64, 512), seed=8)
    rows[5, 70] = math.nan
    rows[6] = torch.randint(0, 0x7F80, (512,), generator=helpers.generator(2)).to(torch.int16).view(torch.bfloat16)
    data, scales = formats.FP8_DS_MLA.encode(rows)
    codes, expected_scales = oracle.quantize_blocks(oracle.to_numpy(rows)[:, :448], 64, "e4m3")
    np.testing.assert_array_equal(data[:, :448].numpy(), codes)
    np.testing.assert_array_equal(scales[:, :7].numpy(), expected_scales)
    assert not scales[:, 7].any()
    assert torch.equal(data[:, 448:].contiguous().view(torch.int16), rows[:, 448:].contiguous().view(torch.int16))


def test_mla_encode_takes_column_slices() -> None:
    wide = helpers.spread((6, 1024), seed=1)
    for a, b in zip(
        formats.FP8_DS_MLA.encode(wide[:, 100:612]), formats.FP8_DS_MLA.encode(wide[:, 100:612].clone()), strict=True
    ):
        assert torch.equal(a, b)


bf16_rows = st.lists(st.integers(0, 0xFFFF), min_size=128, max_size=128).map(
    lambda bits: torch.tensor(bits, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
)


V41 = list(formats.V41_FORMATS)


def quantized_v41(x: np.ndarray, fmt: Any) -> np.ndarray:
    """The record of one row, from the definitions: tables, exact quotients, and the scale of each block on its own."""
    codes, scales = [], []
    for part in x.reshape(-1, fmt.quant_block):
        largest = np.max(np.abs(part))
        is_mxfp8 = fmt in formats.MXFP8_FORMATS
        if np.isnan(part).any():
            code, scale = np.full(len(part), 0x7F if is_mxfp8 else 0), 0xFF if is_mxfp8 else 0x7F
        elif is_mxfp8:
            scale = oracle.ue8m0_byte(largest, 448.0, 1e-4)
            code = oracle.e4m3_encode(part / 2.0 ** (scale - 127))
        else:
            scale = int(oracle.e4m3_encode(np.clip(largest / 6, 2.0**-9, 448.0)))
            code = oracle.e2m1_encode(part / oracle.E4M3[scale], "ties_to_even")
        codes.append(code)
        scales.append(scale)
    flat = np.concatenate(codes)
    data = flat if fmt in formats.MXFP8_FORMATS else flat[0::2] | flat[1::2] << 4
    return np.concatenate([data, np.array(scales)]).astype(np.uint8)


@pytest.mark.parametrize("fmt", V41, ids=lambda fmt: fmt.id)
def test_v41_encode_matches_the_rules(fmt: Any) -> None:
    rows = helpers.spread((40, 512), seed=8)
    rows[1] = 0
    rows[2, ::2] = -0.0
    rows[3, 37] = math.nan
    rows[4] = torch.randint(0, 0x7F80, (512,), generator=helpers.generator(2)).to(torch.int16).view(torch.bfloat16)
    rows[5] = rows[5] * 2.0**-30
    rows[6:] *= torch.exp2(torch.randint(-12, 9, (34, 1), generator=helpers.generator(3)).float()).bfloat16()
    fields = fmt.encode(rows)
    assert len(fields) == (2 if fmt.is_split else 1)
    for row, record in zip(oracle.to_numpy(rows), torch.cat(fields, 1).numpy(), strict=True):
        np.testing.assert_array_equal(record, quantized_v41(row, fmt))


@pytest.mark.parametrize("fmt", [formats.MXFP8_V41_SPLIT, formats.NVFP4_V41_SPLIT], ids=lambda fmt: fmt.id)
def test_split_pages_hold_all_codes_then_all_scales(fmt: Any) -> None:
    rows, block, codes, scales = helpers.spread((9, 512), seed=4), 5, fmt.data_bytes, fmt.scale_bytes
    pool = fmt.allocate(3, block)
    stride = -(-block * (codes + scales) // 512) * 512
    assert pool.stride() == (stride, codes + scales, 1)
    where = slots(14, 0, 3, -1, 7, 15, 2, 6, 11)
    fmt.write(pool, block, where, rows)
    want = np.zeros((3, stride), dtype=np.uint8)
    for row, slot in zip(oracle.to_numpy(rows), where.tolist(), strict=True):
        if 0 <= slot < 15:
            page, inside = divmod(slot, block)
            record = quantized_v41(row, fmt)
            want[page, inside * codes : (inside + 1) * codes] = record[:codes]
            at = block * codes + inside * scales
            want[page, at : at + scales] = record[codes:]
    np.testing.assert_array_equal(helpers.raw_bytes(pool).view(3, stride).numpy(), want)
    kept = (where >= 0) & (where < 15)
    assert torch.equal(fmt.read(pool, block, where[kept]), fmt.decode(*fmt.encode(rows[kept])))


@pytest.mark.parametrize(("one", "other"), [formats.MXFP8_FORMATS, formats.NVFP4_FORMATS], ids=lambda fmt: fmt.id)
def test_split_and_interleaved_forms_convert_byte_by_byte(one: Any, other: Any) -> None:
    """Any bytes, NaN too, there and back."""
    source = one.allocate(2, 4)
    helpers.raw_bytes(source).random_(generator=helpers.generator(1))
    between, back = other.allocate(3, 3), one.allocate(2, 4)
    order, where = torch.arange(8), torch.randperm(9, generator=helpers.generator(2))[:8]
    formats.convert(source, one, between, other, order, where)
    assert torch.equal(torch.cat(other.read_fields(between, 3, where), 1), one.read_fields(source, 4, order)[0])
    formats.convert(between, other, back, one, where, order)
    assert torch.equal(back, source)


def test_nvfp4_v41_record_by_hand() -> None:
    """Blocks of 16: zeros, ties, signs, saturation of the scale, a scale that is rounded, NaN."""
    row = torch.zeros(512)
    data, scale = [0] * 256, [0x01] * 32  # zeros: 2^-9

    # absmax 6: scale 1 (0x38). Ties 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5 go to the even codes 0, 2, 2, 4, 4, 6, 6
    row[16:25] = torch.tensor([6.0, 0.25, -0.75, 1.25, 1.75, 2.5, -3.5, 5.0, -0.0])
    data[8:13] = [0x07, 0x2A, 0x44, 0x6E, 0x08]
    scale[1] = 0x38

    row[32:34] = torch.tensor([1e6, -2688.0])  # scale 448; 1e6 saturates at 6
    data[16], scale[2] = 0xF7, 0x7E

    # 7 / 6 = 1.1667: between 1.125 and 1.25, to 1.125 (0x39). 7 / 1.125 = 6.2: 6. -2.8125 = -2.5 * 1.125: a tie, to 2
    row[48:50] = torch.tensor([7.0, -2.8125])
    data[24], scale[3] = 0xC7, 0x39

    row[64:66] = torch.tensor([math.nan, 3.0])  # no number in the block
    scale[4] = 0x7F

    row[80:82] = torch.tensor([0.0029296875, 2.0**-11])  # 1.5 * 2^-9; 2^-11 / 2^-9 = 0.25: a tie, to 0
    data[40], scale[5] = 0x03, 0x01
    (record,) = formats.NVFP4_V41.encode(row.bfloat16()[None])
    assert record[0].tolist() == data + scale
    back = formats.NVFP4_V41.decode(record)[0].float()
    assert back[16:25].tolist() == [6.0, 0.0, -1.0, 1.0, 2.0, 2.0, -4.0, 4.0, -0.0]
    assert back[32:34].tolist() == [2688.0, -2688.0]
    assert back[48:50].tolist() == [6.75, -2.25]
    assert back[64:80].isnan().all()
    assert not back[96:].any()


def test_mxfp8_v41_record_by_hand() -> None:
    """Blocks of 32, rotated columns like all others."""
    row = torch.zeros(512)
    data, scale = [0] * 512, [105] * 16  # zeros: the floor 1e-4
    row[32:34] = torch.tensor([450.0, 1.0])  # 2^1: 225 -> 224; 0.5
    data[32:34], scale[1] = [0x76, 0x30], 128
    row[64:66] = torch.tensor([math.nan, 2.0])
    data[64:96], scale[2] = [0x7F] * 32, 255
    row[480:482] = torch.tensor([448.0, -3.0])
    data[480:482], scale[15] = [0x7E, 0xC4], 127
    (record,) = formats.MXFP8_V41.encode(row.bfloat16()[None])
    assert record[0].tolist() == data + scale
    back = formats.MXFP8_V41.decode(record)[0].float()
    assert back[32:34].tolist() == [448.0, 1.0]
    assert back[64:96].isnan().all()
    assert back[480:482].tolist() == [448.0, -3.0]


def test_v41_records_decode_exactly() -> None:
    """Every code under every scale is a bf16 number, as tables say."""
    scales, codes = np.arange(0x7F), np.arange(16)
    records = torch.zeros(len(scales), 288, dtype=torch.uint8)
    records[:, :8] = torch.from_numpy(codes[0::2] | codes[1::2] << 4)
    records[:, 256] = torch.from_numpy(scales)
    values = np.concatenate([oracle.E2M1, -oracle.E2M1])[codes]
    got = formats.NVFP4_V41.decode(records)[:, :16].double().numpy()
    np.testing.assert_array_equal(got, oracle.E4M3[scales][:, None] * values)
    scales, codes = np.arange(105, 247), np.arange(512) % 256
    records = torch.zeros(len(scales), 528, dtype=torch.uint8)
    records[:, :512], records[:, 512:] = torch.from_numpy(codes), torch.from_numpy(scales)[:, None]
    got = formats.MXFP8_V41.decode(records).double().numpy()
    np.testing.assert_array_equal(got, np.exp2(scales - 127.0)[:, None] * oracle.E4M3[codes])


@pytest.mark.parametrize("fmt", [formats.FP8_DS_MLA, *V41, formats.PLAIN_BF16], ids=lambda fmt: fmt.id)
def test_convert_keeps_what_the_format_holds(fmt: Any) -> None:
    """Entries that nvfp4_v41/1 holds go through any other cache and back; those of less precise ones are rounded."""
    rows = formats.NVFP4_V41.decode(*formats.NVFP4_V41.encode(helpers.spread((6, 512), seed=2)))
    source = formats.NVFP4_V41.allocate(2, 4)
    order, where = slots(7, 0, 3, 4, 5, 2), slots(1, -1, 0, 5, 2, 3)
    formats.NVFP4_V41.write(source, 4, order, rows)
    target = helpers.poisoned_pool(fmt, 3, 2)
    before = fmt.clone(target)
    formats.convert(source, formats.NVFP4_V41, target, fmt, order, where)
    kept = where >= 0
    fmt.write(before, 2, where, rows)
    assert torch.equal(helpers.raw_bytes(fmt.clone(target)), helpers.raw_bytes(before))
    if fmt not in (formats.FP8_DS_MLA, *formats.MXFP8_FORMATS):
        again = formats.NVFP4_V41.allocate(2, 4)
        formats.convert(target, fmt, again, formats.NVFP4_V41, where[kept], order[kept])
        assert torch.equal(formats.NVFP4_V41.read(again, 4, order[kept]), rows[kept])
    with pytest.raises(ValueError, match="convert: target_format: expected rows of 512 columns"):
        formats.convert(source, formats.NVFP4_V41, target, formats.INDEXER_FP8, order)


def test_a_record_of_another_format_is_refused() -> None:
    c = Checker("op")
    with pytest.raises(ValueError, match="k_cache"):
        formats.MXFP8_V41.check(c, "k_cache", formats.FP8_DS_MLA.allocate(1, 2))
    with pytest.raises(ValueError, match="kv_format"):
        formats.get_format(c, "kv_format", formats.NVFP4_V41.id, formats.FP8_DS_MLA, formats.MXFP8_V41)


@settings(deadline=None, max_examples=25)
@given(bf16_rows, st.sampled_from([formats.FP8_DS_MLA, formats.MXFP8_V41, formats.INDEXER_FP8, formats.INDEXER_MXFP4]))
def test_decoded_values_encode_to_themselves(bits: torch.Tensor, fmt: Any) -> None:
    """Any bf16 pattern: what a cache gives back is stored and read again without a change."""
    row = bits.repeat(fmt.dim // 128).unsqueeze(0)
    finite = row.isfinite() & (row.abs() <= 2.0**120)
    row = row.where(finite, torch.zeros_like(row))
    once = fmt.decode(*fmt.encode(row))
    assert torch.equal(fmt.decode(*fmt.encode(once.bfloat16())), once)


@settings(deadline=None, max_examples=25)
@given(bf16_rows)
def test_stored_error_is_bounded(bits: torch.Tensor) -> None:
    """At most 2^-4 of the value, or half the smallest step of its block; NaN gives NaN, infinity the largest code."""
    row = bits.repeat(4).unsqueeze(0)
    value = oracle.to_numpy(row)[0, :448].reshape(7, 64)
    got = oracle.to_numpy(formats.FP8_DS_MLA.decode(*formats.FP8_DS_MLA.encode(row)))[0, :448].reshape(7, 64)
    for part, back in zip(value, got, strict=True):
        assert np.isnan(back[np.isnan(part)]).all()
        part, back = part[~np.isnan(part)], back[~np.isnan(part)]
        if len(part) and np.abs(part).max() < 2.0**127:  # above, rounding up may leave the range of bf16
            half_step = 2.0 ** (oracle.ue8m0_byte(np.abs(part).max(), 448.0, 1e-4) - 127 - 10)
            assert (np.abs(back - part) <= np.maximum(np.abs(part) / 16, half_step)).all()
        infinite = np.isinf(part)
        np.testing.assert_array_equal(back[infinite], part[infinite])  # 448 * 2^120 is infinite in bf16


# ---- checks ----------------------------------------------------------------------------------------------------------


def complaint(fmt: Any, cache: Any, block_size: int | None = None) -> str:
    with pytest.raises((ValueError, TypeError)) as caught:
        fmt.check(Checker("some_op"), "some_cache", cache, block_size)
    assert str(caught.value).startswith("some_op: some_cache: expected ")
    return str(caught.value)


@pytest.mark.parametrize(("fmt", "block_size"), ALL)
def test_check_accepts_pools(fmt: Any, block_size: int) -> None:
    c = Checker("op")
    fmt.check(c, "cache", fmt.allocate(3, block_size), block_size)
    fmt.check(c, "cache", fmt.allocate(3, block_size, page_stride=fmt.page_stride(block_size) + 64), block_size)
    fmt.check(c, "cache", fmt.allocate(0, block_size), block_size)
    fmt.check(c, "cache", fmt.allocate(3, block_size)[1:2])
    meta = torch.empty(3, block_size, fmt.row_elements, dtype=fmt.dtype, device="meta")
    fmt.check(Checker("op"), "cache", meta, block_size)


@pytest.mark.parametrize(("fmt", "block_size"), ALL)
def test_check_refuses_what_does_not_fit(fmt: Any, block_size: int) -> None:
    pool = fmt.allocate(3, block_size)
    assert "a tensor" in complaint(fmt, None)
    assert "a tensor" in complaint(fmt, "pool")
    assert str(fmt.dtype) in complaint(fmt, torch.zeros(3, block_size, fmt.row_elements, dtype=torch.float64))
    assert str(fmt.row_elements) in complaint(fmt, pool[..., :-4], block_size)
    assert f"pages of {block_size + 1} rows" in complaint(fmt, pool, block_size + 1)
    rows = block_size * fmt.row_elements
    overlapping = pool.as_strided((2, block_size, fmt.row_elements), (rows - 4, fmt.row_elements, 1))
    assert f"pages at least {rows} elements apart" in complaint(fmt, overlapping, block_size)
    loose = torch.zeros(2, block_size, 2 * fmt.row_elements, dtype=fmt.dtype)[..., : fmt.row_elements]
    assert "elements apart" in complaint(fmt, loose, block_size)
    spaced = torch.zeros(2, block_size, 2 * fmt.row_elements, dtype=fmt.dtype)[..., ::2]
    assert "stride 1" in complaint(fmt, spaced, block_size)


def test_mla_flat_view() -> None:
    fmt = formats.FP8_DS_MLA
    fmt.check(Checker("op"), "cache", torch.zeros(3, 1728, dtype=torch.uint8), 2)
    fmt.check(Checker("op"), "cache", torch.zeros(3, 1168, dtype=torch.uint8), 2)
    assert "at least 1168 bytes" in complaint(fmt, torch.zeros(3, 1167, dtype=torch.uint8), 2)
    assert "3 dimensions" in complaint(fmt, torch.zeros(3, 1168, dtype=torch.uint8))
    assert "torch.uint8" in complaint(fmt, torch.zeros(3, 1168), 2)
    overlapping = torch.zeros(4000, dtype=torch.uint8).as_strided((3, 1168), (1000, 1))
    told = "pages at least 1168 elements apart, as formats.FP8_DS_MLA.allocate and .clone make them"
    assert told in complaint(fmt, overlapping, 2)
    assert told in complaint(fmt, torch.zeros(1, 1168, dtype=torch.uint8).expand(3, 1168), 2)


@pytest.mark.parametrize(("fmt", "block_size"), ALL)
def test_clones_keep_the_page_stride(fmt: Any, block_size: int) -> None:
    pool = fmt.allocate(3, block_size, page_stride=fmt.page_stride(block_size) + fmt.alignment)
    pool.view(torch.uint8)[...] = torch.randint(0, 256, pool.view(torch.uint8).shape, dtype=torch.uint8)
    copy = fmt.clone(pool)
    assert copy.stride() == pool.stride() != pool.clone().stride()
    assert torch.equal(copy.view(torch.uint8), pool.view(torch.uint8))
    copy.view(torch.uint8)[1] ^= 1
    assert not torch.equal(copy.view(torch.uint8), pool.view(torch.uint8))
    fmt.check(Checker("op"), "cache", copy, block_size)
    fmt.check(Checker("op"), "cache", pool.clone(), block_size)
    assert fmt.clone(pool[:0]).shape == pool[:0].shape


def test_a_flat_pool_is_cloned_as_one() -> None:
    flat = torch.arange(3 * 1728, dtype=torch.int64).to(torch.uint8).view(3, 1728)[:, :1168]
    copy = formats.FP8_DS_MLA.clone(flat)
    assert copy.stride() == (1728, 1)
    assert torch.equal(copy, flat)


def test_other_formats_take_no_flat_view() -> None:
    assert "3 dimensions" in complaint(formats.INDEXER_FP8, torch.zeros(3, 8640, dtype=torch.uint8), 64)


def test_get_format() -> None:
    c = Checker("some_op")
    allowed = (formats.PLAIN_BF16, formats.PLAIN_FP8)
    assert formats.get_format(c, "kv_format", "plain_fp8/1", *allowed) is formats.PLAIN_FP8
    for wrong in ("fp8_ds_mla/1", "plain_fp8", "plain_fp8/2", ""):
        with pytest.raises(ValueError, match=r"some_op: kv_format: expected one of 'plain_bf16/1', 'plain_fp8/1'"):
            formats.get_format(c, "kv_format", wrong, *allowed)


def test_formats_are_immutable() -> None:
    with pytest.raises(AttributeError):
        formats.FP8_DS_MLA.row_elements = 600  # type: ignore[misc]
