# SPDX-License-Identifier: Apache-2.0
"""Tensor cores read operands where umma says: on Hopper by wgmma, whose layouts and descriptors are Blackwell's."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cute_kernels.dsl import umma
from cute_kernels.dsl.umma import Operand
from cute_kernels.isa_probes import meaning, products
from cute_kernels.runtime.arch import arch_of
from cute_kernels.runtime.compile import launch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

K_MAJOR = [
    *((Operand(16, width, False, 16, 8 * width), width) for width in (128, 64, 32)),
    (Operand(16, 64, False, 16, 2048), 64),
    (Operand(16, 0, False, 1024, 128), 32),
    (Operand(16, 0, False, 128, 512), 32),
]
"""Operands, and the bytes of the summed dimension inside a row."""

MN_MAJOR = [
    *(Operand(16, width, True, leading, 8 * width) for width, leading in ((128, 8192), (64, 4096), (32, 2048))),
    Operand(16, 128, True, 1024, 4096),
    Operand(16, 0, True, 128, 2048),
]


def starts(operand: Operand, line: int = 0) -> list[int]:
    """Where products may begin in a tile at 0."""
    step = umma.K_BYTES * 8 // operand.bits
    if operand.is_mn_major:
        return [operand.step(step * i) for i in range(3)]
    return [operand.step(step * i) for i in range(line // umma.K_BYTES)]


def run(name: str, columns: int, pairs: list[tuple[int, int]], a_is_mn: bool, b_is_mn: bool) -> None:
    """Products of pairs of descriptors, against those of the elements that `meaning` finds at the descriptors."""
    from tests.gpu.wgmma_operands import ROWS, SHARED_BYTES, OperandsKey

    bits = 16 if name == "bf16" else 8
    image = products.noise(np.random.default_rng(columns), SHARED_BYTES, name)
    given = torch.tensor([[x & ~umma.VERSION for x in pair] for pair in pairs], dtype=torch.int64)
    out = torch.full((len(pairs), ROWS, columns), torch.nan, device="cuda")
    key = OperandsKey(arch_of(0), name, columns, a_is_mn, b_is_mn)
    source = torch.from_numpy(image).cuda().view(torch.int32)
    launch(key, 0, source, given.view(-1).cuda(), out.view(torch.int32).view(-1), len(pairs))
    got, depth = out.cpu().numpy(), umma.K_BYTES * 8 // bits
    for number, (a, b) in enumerate(pairs):
        left = meaning.elements(image, a, ROWS, depth, name, bits, a_is_mn).astype(np.float64)
        right = meaning.elements(image, b, columns, depth, name, bits, b_is_mn)
        wrong = int((got[number] != left @ right.T).sum())
        assert not wrong, f"{wrong} of {got[number].size} products of {umma.operand_of(a, bits, a_is_mn)}, {b:#x}"


@pytest.fixture(autouse=True)
def hopper() -> None:
    if arch_of(0) != "sm_90a":
        pytest.skip("wgmma is Hopper's")


def test_k_major() -> None:
    rows = umma.k_major(16).at(32768)
    right = [operand.at(start) for operand, line in K_MAJOR for start in starts(operand, line)]
    run("bf16", 64, [(rows, one) for one in right] + [(one, rows) for one in right], False, False)


def test_mn_major() -> None:
    rows = umma.k_major(16).at(49152)
    right = [operand.at(start) for operand in MN_MAJOR for start in starts(operand)]
    run("bf16", 256, [(rows, one) for one in right], False, True)


def test_mn_major_rows() -> None:
    columns = umma.k_major(16).at(32768)
    left = [operand.at(start) for operand in MN_MAJOR for start in starts(operand)]
    run("bf16", 64, [(one, columns) for one in left], True, False)


def test_codes() -> None:
    rows = umma.k_major(8)
    run("e4m3", 128, [(rows.at(start), rows.at(16384 + start)) for start in starts(rows, 128)], False, False)
