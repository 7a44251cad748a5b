# SPDX-License-Identifier: Apache-2.0
"""Descriptors of dsl.umma against those that CuTe DSL makes for the same operands. Needs CuTe DSL, no GPU."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from cute_kernels.dsl import umma
from cute_kernels.dsl.umma import Operand
from cute_kernels.isa_probes.meaning import BITS
from tests.compile.atoms_kernel import AtomKey
from tests.compile.reports import compile_report

CASES = [
    (AtomKey("sm_100a", rows=64), "f16", umma.k_major(16)),
    (AtomKey("sm_100a", swizzle=64, depth=32), "f16", umma.k_major(16, 64)),
    (AtomKey("sm_100a", columns=256, b_is_mn=True), "f16", umma.mn_major(16, 64 * 128)),
    (AtomKey("sm_100a", "e4m3", columns=256, depth=64, swizzle=64, b_is_mn=True), "f8f6f4", umma.mn_major(8, 64 * 128)),
    (AtomKey("sm_100a", columns=128, blocks=2), "f16", umma.k_major(16)),
    (AtomKey("sm_103a", rows=256, columns=256, blocks=2, b_is_mn=True), "f16", umma.mn_major(16, 64 * 128)),
    (AtomKey("sm_100a", "e2m1", columns=128, depth=128, swizzle=64, is_scaled=True), "mxf4", umma.k_major(4, 64)),
    (AtomKey("sm_100a", "e4m3", columns=128, depth=128, is_scaled=True), "mxf8f6f4", umma.k_major(8)),
]


@pytest.mark.parametrize(("key", "kind", "b"), CASES, ids=str)
def test_descriptors_are_those_of_the_dsl(key: AtomKey, kind: str, b: Operand) -> None:
    ptx = compile_report(key).ptx
    added = dict(re.findall(r"(?:or|add)\.[bs]64\s+(%rd\d+), %rd\d+, (-?\d{12,});", ptx))
    products = re.findall(r"tcgen05\.mma\S+ \[\S+\], (%rd\d+), (%rd\d+), %r\d+", ptx)
    step = umma.K_BYTES * 8 // BITS[kind]
    a = umma.k_major(BITS[kind], key.swizzle)
    want = [(a.descriptor + a.step(k) // 16, b.descriptor + b.step(k) // 16) for k in range(0, key.depth, step)]
    assert [(int(added[left]), int(added[right])) for left, right in products] == want
    if key.is_scaled:
        instruction = umma.scaled_instruction(kind, key.name, key.name, key.rows, key.columns)
    else:
        instruction = umma.instruction(kind, key.name, key.name, key.rows, key.columns, b_is_mn_major=key.b_is_mn)
    # with the sign of `a` turned or not
    assert re.search(rf"selp\.b32\s+%r\d+, {instruction | 1 << 13}, {instruction}, ", ptx)
