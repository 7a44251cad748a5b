# SPDX-License-Identifier: Apache-2.0
"""The kernels of the fused query norm, rotation and KV insert, compiled for every architecture. Needs no GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from cute_kernels.formats import FP8_DS_MLA, MXFP8_V41, PLAIN_BF16, PLAIN_FP8
from cute_kernels.kv_cache import qnorm
from cute_kernels.kv_cache.qnorm import QnormKey, key_for
from cute_kernels.models import ModelShape, V41Shape
from tests.compile.reports import compile_report

FORMS = {"mla": FP8_DS_MLA.id, "bf16": PLAIN_BF16.id, "fp8": PLAIN_FP8.id}
KERNELS = {"mla": qnorm.QUANT_INSERT, "bf16": qnorm.BF16_INSERT, "fp8": qnorm.FP8_INSERT}
ARCHS = ("sm_90a", "sm_100a", "sm_103a", "sm_89", "sm_120a")


@pytest.mark.parametrize("rows", [1, 2, 4])
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a", "sm_103a"])
def test_all_rows_are_on_their_way_before_anything_waits(arch: str, rows: int) -> None:
    """The loads of the queries come first and next to each other; none is sunk to where its row is used."""
    report = compile_report(QnormKey(arch, rows=rows))
    if report.in_sass is None:
        pytest.skip("nvdisasm is not installed (package nvidia-cuda-nvdisasm)")
    sass = report.in_sass
    loads = sass.places(r"\bLDG\.E")
    wide = sass.places(r"\bLDG\.E.*\.128\.STRONG")
    first = loads[: 2 * rows + 1]
    # of one row the position comes first, of several last
    assert [i in wide for i in first] == ([False, True, True] if rows == 1 else [True] * (2 * rows) + [False])
    uses = sass.places(r"\bSHFL|\bFMUL|\bFFMA|\bSTG")
    assert max(first) < min(uses)


def test_the_kernel_follows_the_number_of_rows() -> None:
    chosen = {rows: key_for("sm_90a", FP8_DS_MLA.id, query_rows=rows) for rows in (1, 4096, 4097, 100_000)}
    assert [(key.rows, key.early) for key in chosen.values()] == [(1, True)] * 2 + [(2, False)] * 2
    assert not key_for("sm_89", FP8_DS_MLA.id, query_rows=1).early
    assert set(chosen.values()) == set(qnorm.deployment(ModelShape(), "sm_90a", (FP8_DS_MLA.id,)))


def test_deployments() -> None:
    for form, kernel in KERNELS.items():
        for arch in ("sm_80", *ARCHS):
            keys = kernel.deployment_keys(None, 1, arch)
            assert all(key.kv_format == FORMS[form] and key.norm for key in keys)
            assert keys
            newer = kernel.deployment_keys(V41Shape(), 1, arch)
            windows = {FP8_DS_MLA.id, MXFP8_V41.id} if FORMS[form] == FP8_DS_MLA.id else {FORMS[form]}
            assert {key.kv_format for key in newer} == windows
            assert not any(key.norm for key in newer)


def test_what_the_kernel_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(qnorm, "arch_of", lambda index: "sm_90a")
    q, kv, table = torch.zeros(3, 2, 512).bfloat16(), torch.zeros(3, 512).bfloat16(), torch.zeros(4, 64)

    def why(q: torch.Tensor, pool: torch.Tensor, block_size: int, kv_format: str) -> str:
        return qnorm.misfit(q, kv, pool, table, block_size, kv_format)

    mla = FP8_DS_MLA.allocate(2, 4)
    assert why(q, mla, 4, FP8_DS_MLA.id) == ""
    assert why(torch.zeros(3, 2, 516).bfloat16()[..., :512], mla, 4, FP8_DS_MLA.id).startswith("rows of q")
    assert why(torch.zeros(3, 1, 516).bfloat16()[..., 4:], mla, 4, FP8_DS_MLA.id).startswith("rows of q")
    assert why(q.as_strided((1, 1, 512), (3, 5, 1)), mla, 4, FP8_DS_MLA.id) == ""
    assert why(q, mla.as_strided((2, 4, 584), (2341, 584, 1)), 4, FP8_DS_MLA.id).startswith("pages of the cache")
    assert "2^31 rows" in why(q, mla, 2**30, FP8_DS_MLA.id)
    wide = torch.zeros(512, dtype=torch.bfloat16).as_strided((2**24, 128, 512), (0, 0, 1))
    assert why(wide, mla, 4, FP8_DS_MLA.id).startswith("q must have fewer than 2^31 rows")
