# SPDX-License-Identifier: Apache-2.0
"""Descriptors and places of Blackwell's tensor cores, as numbers."""

from __future__ import annotations

import numpy as np
import pytest

from cute_kernels.dsl import umma
from cute_kernels.dsl.umma import Operand


@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
@pytest.mark.parametrize("bits", [4, 8, 16])
def test_a_descriptor_tells_of_its_operand(bits: int, swizzle: int) -> None:
    for operand in (Operand(bits, swizzle, False, 16, 2048), Operand(bits, swizzle, True, 8192, 1024)):
        assert umma.operand_of(operand.at(0x2340), bits, operand.is_mn_major) == (operand, 0x2340)
        assert -(1 << 63) <= operand.descriptor < 1 << 63


@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
@pytest.mark.parametrize("is_mn_major", [False, True])
def test_elements_share_no_byte(swizzle: int, is_mn_major: bool) -> None:
    width = swizzle or 16
    rows, depth = (128, 32) if is_mn_major else (64, width // 2)
    operand = Operand(16, swizzle, is_mn_major, depth * width, 8 * width)
    if swizzle == 0 and is_mn_major:  # the two change roles
        operand = Operand(16, 0, True, 8 * width, depth * width)
    at = operand.offset(np.arange(rows)[:, None], np.arange(depth)[None, :]).ravel()
    assert sorted(at) == list(range(0, rows * depth * 2, 2))


@pytest.mark.parametrize(
    "operand", [umma.k_major(16), umma.k_major(8, 64), umma.mn_major(16, 8192), umma.mn_major(8, 4096)]
)
def test_products_that_begin_further_on(operand: Operand) -> None:
    """A descriptor moved by a step reads what is further on in the summed dimension."""
    step = umma.K_BYTES * 8 // operand.bits
    row, k = np.arange(64)[:, None], np.arange(step)[None, :]
    for number in range(2):
        moved = operand.at(4096 + operand.step(number * step))
        got = umma.operand_bytes(moved, row, k, operand.bits, operand.is_mn_major)
        assert np.array_equal(got, 4096 + operand.offset(row, number * step + k))


def test_a_row_of_a_cache_is_seen_from_both_sides() -> None:
    """Slabs of 64 numbers of 64 keys: key r's number d as K-major row r, as MN-major row d."""
    key, number = np.meshgrid(np.arange(64), np.arange(512), indexing="ij")
    slab = 64 * 128
    written = umma.k_major(16).offset(key, number % 64) + number // 64 * slab
    assert np.array_equal(umma.mn_major(16, slab).offset(number, key), written)


@pytest.mark.parametrize(("form", "m"), [(form, int(form.lstrip("wspairm"))) for form in umma.FORMS])
def test_results_share_no_place(form: str, m: int) -> None:
    n = 64
    row, column = np.arange(m)[:, None], np.arange(n)[None, :]
    block, lane, place = (x.ravel() for x in np.broadcast_arrays(*umma.result_place(form, n, row, column)))
    assert len(set(zip(block, lane, place, strict=True))) == m * n
    assert lane.max() < 128
    assert place.max() == umma.result_columns(form, n) - 1
    assert set(block) == ({0, 1} if form.startswith("pair") else {0})


def test_scales_share_no_byte() -> None:
    at = umma.scale_offset(np.arange(128)[:, None], np.arange(4)[None, :]).ravel()
    assert sorted(at) == list(range(512))


def test_bad_numbers() -> None:
    with pytest.raises(ValueError, match="swizzle"):
        Operand(16, 16)
    with pytest.raises(ValueError, match="leading"):
        Operand(16, leading=1 << 18)
    with pytest.raises(ValueError, match="m, n"):
        umma.instruction("f16", "bf16", "bf16", 96, 64)
    with pytest.raises(ValueError, match=r"Operand\.step"):
        umma.k_major(16).step(64)
