# SPDX-License-Identifier: Apache-2.0
"""The kernels that store compressed entries with ratio 128, compiled. Needs CuTe DSL and no GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from cute_kernels.runtime import compile as compile_
from cute_kernels.runtime.report import problems

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

import cutlass.cute as cute
from cutlass.memory import SmemAllocator

from cute_kernels.compressor import ratio128
from cute_kernels.compressor.ratio128 import (
    C128Key,
    ctas_per_entry,
    deployment_keys,
    tokens_per_cluster,
)
from cute_kernels.compressor.ratio128_portable import PortableC128Key
from cute_kernels.formats import round_up
from cute_kernels.models import MODELS
from tests.compile.reports import compile_report


@pytest.mark.parametrize("fused", [False, True])
def test_the_key_knows_what_the_kernel_allocates(fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    allocated: list[int] = []

    class Allocator(SmemAllocator):
        def allocate_tensor(self, element_type: Any, layout: Any, byte_alignment: int) -> Any:
            size = cute.cosize(layout) * element_type.width // 8
            allocated.append(round_up(sum(allocated), byte_alignment) - sum(allocated) + size)
            return super().allocate_tensor(element_type, layout, byte_alignment=byte_alignment)

        def allocate_array(self, element_type: Any, count: int) -> Any:
            size = element_type.width // 8
            allocated.append(round_up(sum(allocated), size) - sum(allocated) + count * size)
            return super().allocate_array(element_type, count)

    monkeypatch.setattr(ratio128, "SmemAllocator", Allocator)
    key = C128Key("sm_90a", "fp8_ds_mla/1", False, fused, 2)
    compile_.compile_report(key)
    assert sum(allocated) == key.smem_bytes


def test_every_kernel_that_a_model_can_need_is_deployed() -> None:
    caches = ("fp8_ds_mla/1", "plain_bf16/1", "plain_fp8/1")
    needed = {C128Key("sm_90a", fmt, False, True, ctas_per_entry(2**i)) for fmt in caches for i in range(20)}
    for config in MODELS.values():
        expected = needed if 128 in config.compress_ratios else set()
        assert set(deployment_keys(config, 1, "sm_90a", True)) == expected
        portable = {PortableC128Key("sm_120a", fmt, False, True) for fmt in caches}
        assert set(deployment_keys(config, 1, "sm_120a", True)) == (portable if expected else set())
    assert deployment_keys(SimpleNamespace(compress_ratios=(1, 4)), 1, "sm_90a", False) == []


def test_tokens_per_cluster() -> None:
    assert [tokens_per_cluster(n, 132, 2) for n in (1, 66, 67, 8192, 32768)] == [1, 1, 2, 125, 497]
    assert [tokens_per_cluster(n, 132, 4) for n in (1, 29, 30, 64, 256, 1024)] == [1, 1, 2, 3, 9, 36]
    assert tokens_per_cluster(100, 1, 8) == 100


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_120a"])
def test_where_there_are_no_large_clusters(arch: str, fused: bool) -> None:
    report = compile_report(PortableC128Key(arch, "fp8_ds_mla/1", False, fused))
    assert problems(report.key, report) == []
    assert report.smem < 2048
    # 5 CTAs and more, each with 16 rows of four columns a thread on their way
    assert report.registers <= 96
