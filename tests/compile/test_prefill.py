# SPDX-License-Identifier: Apache-2.0
"""What ptxas makes of Hopper's prefill kernel, and of mixed's, which are made of it: no spills, and products that run
by themselves."""

from __future__ import annotations

import pytest

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from cute_kernels.formats import ROPE_DIM
from cute_kernels.models import MODELS
from cute_kernels.runtime.key import KernelKey
from cute_kernels.sparse_mla.convert_mixed import ConvertMixedKey
from cute_kernels.sparse_mla.hopper import prefill as kernel
from cute_kernels.sparse_mla.hopper import prefill_index_loader as index_loader
from cute_kernels.sparse_mla.hopper.prefill import NormQuantPrefillKey, PrefillKey, QuantPrefillKey
from cute_kernels.sparse_mla.hopper.prefill_mixed import MixedFp8ConvertedKey, MixedFp8Key, MixedKey
from cute_kernels.sparse_mla.hopper.prefill_mixed_swap_ab import SwapAbMixedFp8Key
from cute_kernels.sparse_mla.hopper.prefill_swap_ab import QuantSwapAbPrefillKey, SwapAbMixedKey, SwapAbPrefillKey
from cute_kernels.sparse_mla.launch import MIXED, PREFILL
from tests.compile.reports import compile_report

"""Of products: Q K^T and P V. The assembler ends each instruction with a wait of its own where it loses track."""


def test_registers_are_those_of_the_launch() -> None:
    used = kernel.SOFTMAX_REGISTERS + 2 * kernel.PV_REGISTERS + kernel.PRODUCER_REGISTERS
    assert used == kernel.WARPGROUPS * (65536 // kernel.THREADS // 8 * 8)


@pytest.mark.parametrize(
    "key",
    [
        *(PrefillKey("sm_90a"), MixedKey("sm_90a"), MixedFp8Key("sm_90a"), MixedFp8ConvertedKey("sm_90a")),
        SwapAbPrefillKey("sm_90a", 8),
        *(SwapAbMixedFp8Key("sm_90a", heads) for heads in (8, 32)),
    ],
    ids=repr,
)
def test_registers_grow_and_shrink_as_instructions_say(key: KernelKey) -> None:
    """setmaxnreg for more registers is an illegal instruction where a thread has as many, and neither ptxas nor the
    host model says so."""
    asked = compile_report(key).in_ptx
    [threads] = asked.findall(r"\.reqntid (\d+)")
    launched = 65536 // int(threads) // 8 * 8
    found = asked.findall(r"setmaxnreg\.(inc|dec)\S*\s+(\d+)")
    assert len(found) >= 3
    assert [how for how, _ in found] == ["inc" if int(count) > launched else "dec" for _, count in found]


def test_tiles_begin_where_swizzles_do() -> None:
    place = 0
    for name, size in kernel.smem_parts().items():
        assert place % (1024 if name in kernel.SWIZZLED else 16) == 0, name
        place += size


def test_queries_fit_the_columns() -> None:
    """In registers and in shared memory; raw ones have all of their rotary columns in registers."""
    parts = kernel.smem_parts()
    assert kernel.HELD + parts["q"] // (kernel.ROWS * 2) == kernel.SLABS * kernel.SLAB
    usual, raw = (kernel.query_slabs(kernel.PrefillQuery(0, 0, 0, 0, eps)) for eps in (None, 1e-6))
    assert sorted(raw) == sorted(usual) == list(usual) == list(range(kernel.SLABS))
    assert raw[: ROPE_DIM // kernel.SLAB] == usual[-(ROPE_DIM // kernel.SLAB) :]


def test_indices_are_copied_no_later_than_a_stage_comes_round() -> None:
    """The producer waits for all copies but those of the AHEAD - 1 stages before: these are on their way while the
    stage before them is released."""
    assert index_loader.AHEAD == kernel.KV_STAGES
    lists = index_loader.LISTS
    assert lists > index_loader.AHEAD
    assert lists & (lists - 1) == 0


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_deployments(model: str, tp: int) -> None:
    heads = MODELS[model].num_attention_heads // tp
    few = SwapAbPrefillKey("sm_90a", heads), SwapAbMixedKey("sm_90a", heads), QuantSwapAbPrefillKey("sm_90a", heads)
    many = PrefillKey("sm_90a"), MixedKey("sm_90a"), QuantPrefillKey("sm_90a")
    one, other, codes = few if heads <= 16 else many
    over_codes = SwapAbMixedFp8Key("sm_90a", heads) if heads <= 32 else MixedFp8Key("sm_90a")
    raw = [NormQuantPrefillKey("sm_90a")] if heads > 16 else []
    assert PREFILL.deployment_keys(MODELS[model], tp, "sm_90a") == [one, codes, *raw]
    converting = [ConvertMixedKey("sm_90a"), MixedFp8ConvertedKey("sm_90a")] if heads > 32 else []
    assert MIXED.deployment_keys(MODELS[model], tp, "sm_90a") == [other, over_codes, *converting]
