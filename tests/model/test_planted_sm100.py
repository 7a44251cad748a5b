# SPDX-License-Identifier: Apache-2.0
"""Bugs planted in the order of what Blackwell's kernels do: waits, arrivals, fences, barriers and groups left out or
moved, other counts and parities. What nothing finds is in the tables here, with the reason."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from cute_kernels import formats
from cute_kernels.indexer.blackwell.logits import BlackwellLogitsKey
from cute_kernels.sparse_mla.blackwell import decode
from cute_kernels.sparse_mla.blackwell.decode import BlackwellDecodeKey
from cute_kernels.sparse_mla.blackwell.prefill import (
    DEQUANT_WARP,
    EPILOGUE_WARP,
    INDEX_WARP,
    KV_WARP,
    MMA_WARP,
    BlackwellPrefillKey,
)
from cute_kernels.sparse_mla.blackwell.prefill_2cta import BlackwellPairPrefillKey
from cute_kernels.sparse_mla.blackwell.prefill_mixed import BlackwellMixedFp8Key, BlackwellMixedKey
from cute_kernels.sparse_mla.blackwell.prefill_paged import BlackwellPagedKey
from tests.compile.reports import compile_report
from tests.gpu import test_mixed
from tests.model import test_decode_pair_sm100 as pairs
from tests.model import test_gemm_blackwell as einsum
from tests.model.planted import IS_REPEATED, TELLS_NOTHING, Call, Kernel
from tests.model.prefill_problems import Problem
from tests.model.ptx import Program
from tests.model.test_decode_sm100 import HEADS, Decode, make, with_lengths
from tests.model.test_logits_sm100 import STALE, check_contiguous, many_tiles
from tests.model.test_prefill_sm100 import mixed, paged, pair, prefill

Left = dict[tuple[str, str], tuple[int, str]]
"""(role, what is wrong) -> how many such bugs nothing finds, and why."""

VERSIONS = ("bytes of an operand are of different versions",)
"""A stage that queries had but for their kept columns is an operand's as a whole afterwards."""

# ---- prefill ---------------------------------------------------------------------------------------------------------

ROLES = {
    "softmax": range(EPILOGUE_WARP),
    "epilogue": range(EPILOGUE_WARP, MMA_WARP),
    "MMA": range(MMA_WARP, INDEX_WARP),
    "index loader": range(INDEX_WARP, KV_WARP),
    "KV loaders": range(KV_WARP, DEQUANT_WARP),
    "dequantizers": range(DEQUANT_WARP, DEQUANT_WARP + 4),
}


def problem(make: Callable[..., Problem], order: int, slow: Any = (), **how: Any) -> Call:
    """A call of one cluster, in an order. slow: warps; products are then started in another one."""

    def call(program: Program, events: Any) -> None:
        one = dataclasses.replace(make(**how), program=program)
        one.check(one.cluster, seed=order, slow=slow, events=events)

    return call


def of_mixed(dtype: Any, key: BlackwellPrefillKey) -> Kernel:
    def make(**how: Any) -> Problem:
        with pytest.MonkeyPatch.context() as patch:
            return mixed(dtype, patch, **how)

    rows = {"query_lens": (1, 2, 1), "seq_lens": (300, 30, 3), "window_size": 7, "rows": (53, 2), "heads": 20}
    calls = [
        problem(make, 4, width=130, more_stride=(512, 1024), seed=4, **rows),
        problem(make, 5, ROLES["softmax"], width=65, more_stride=(512, 1024), seed=4, **rows),
    ]
    return Kernel(compile_report(key).ptx, calls, ROLES, VERSIONS)


def of_prefill(name: str) -> Kernel:
    if name == "mixed":
        return of_mixed(test_mixed.BF16, BlackwellMixedKey("sm_100a"))
    if name == "mixed e4m3":
        return of_mixed(test_mixed.FP8, BlackwellMixedFp8Key("sm_100a"))
    if name == "paged":
        many = {"query_lens": (1, 2, 1), "seq_lens": (300, 6, 400), "window_size": 70, "width": 70}
        few = {"query_lens": (2, 2, 1), "seq_lens": (30, 6, 40), "window_size": 30, "width": 0}
        calls = [
            problem(paged, 4, heads=8, more_stride=(576, 0), **many),
            problem(paged, 5, ROLES["softmax"], heads=8, more_stride=(576, 0), **few),
        ]
        return Kernel(compile_report(BlackwellPagedKey("sm_100a")).ptx, calls, ROLES, VERSIONS)
    calls = [
        problem(prefill, 1, s_q=5, heads=9, topk=200, lengths="odd", bad=0.2, seed=5),
        problem(prefill, 2, ROLES["softmax"], s_q=6, heads=9, topk=130, lengths="odd", bad=0.2, seed=5),
    ]
    return Kernel(compile_report(BlackwellPrefillKey("sm_100a")).ptx, calls, ROLES, VERSIONS)


TRADED = "warps that trade parts of scores meet after they have read a tile's list, and before they let go of it"


def of_prefill_pairs() -> Kernel:
    lists = {"heads": 100, "lengths": "odd", "bad": 0.2, "seed": 5}
    calls = [
        problem(pair, 1, s_q=4, topk=200, **lists),
        problem(pair, 2, ROLES["softmax"], s_q=5, topk=130, **lists),
    ]
    text = compile_report(BlackwellPairPrefillKey("sm_100a")).ptx
    return Kernel(text, calls, ROLES, how=pairs.TAKES_FOR_GRANTED)


PREFILL: Left = {("softmax", "no wait"): (1, TELLS_NOTHING)}
"""For P V of the tile before last: S is committed behind it. Phases that nobody waits for are what synccheck
reports."""


# ---- scores ----------------------------------------------------------------------------------------------------------

SCORES_ROLES = {"sums": range(8), "keys": range(8, 9), "products": range(9, 10), "scales": range(10, 11)}

WEIGHTS = "of a group, who adds up needs weights alone; the threads that copy them arrive with a tile's scales, too"

OF_QUERIES: Left = {("keys", bug): (1, TELLS_NOTHING) for bug in ("no wait", "the mbarrier -8 bytes away")}
"""In a call of few short groups who brings queries has waited for stages of keys that are free no sooner."""

SCORES: dict[str, tuple[BlackwellLogitsKey, Any, Left]] = {
    "MXFP4, 1 row": (
        BlackwellLogitsKey("sm_100a", 64, 1, True, True),
        formats.INDEXER_MXFP4,
        {("products", "no wait"): (1, TELLS_NOTHING), **OF_QUERIES},
    ),
    "MXFP4, 3 rows": (
        BlackwellLogitsKey("sm_100a", 64, 3, True, True),
        formats.INDEXER_MXFP4,
        {
            ("products", "no wait"): (1, TELLS_NOTHING),
            ("sums", "no barrier of the warp"): (2, IS_REPEATED),
            **OF_QUERIES,
        },
    ),
    "FP8, 3 rows": (
        BlackwellLogitsKey("sm_100a", 48, 3, True, False),
        formats.INDEXER_FP8,
        {("sums", "no barrier of the warp"): (2, IS_REPEATED), **OF_QUERIES},
    ),
    "FP8, contiguous": (
        BlackwellLogitsKey("sm_100a", 64, 4, False, False),
        None,
        {("sums", "no wait"): (1, WEIGHTS), ("sums", "no barrier of the warp"): (1, IS_REPEATED)},
    ),
}
"""The wait for queries of MXFP4's products: who puts scales in order has waited for them. Warps that add up every tile
meet twice: when they have loaded products, and when they are done with the tile."""


def of_scores(name: str) -> Kernel:
    key, fmt, _ = SCORES[name]
    if fmt is not None:
        calls: list[Call] = [lambda program, events: many_tiles(key, fmt, program, events)]
    else:
        # long groups, so that tiles go round, and short ones, so that queries do
        sizes = {"rows": 9, "count": 1100}, {"rows": 26, "count": 300}
        calls = [
            functools.partial(check_contiguous, key, 0, 1, blocks=1, laziness=0.8, **size)  # type: ignore[arg-type]
            for size in sizes
        ]
    return Kernel(compile_report(key).ptx, calls, SCORES_ROLES, STALE)


# ---- decode ----------------------------------------------------------------------------------------------------------


DECODE_ROLES = {
    "softmax": range(decode.DEQUANT_WARP),
    "dequantizers": range(decode.DEQUANT_WARP, decode.MMA_WARP),
    "MMA": range(decode.MMA_WARP, decode.MMA_WARP + 1),
}


def of_pairs() -> Kernel:
    return Kernel(compile_report(pairs.KEY).ptx, [pairs.run_all_rows], DECODE_ROLES, how=pairs.TAKES_FOR_GRANTED)


def of_decode() -> Kernel:
    key = BlackwellDecodeKey("sm_100a", "listed", False)

    def call(program: Program, events: Any) -> None:
        rows = make(b=2, topk=250, rows=7, second="listed", extra_topk=100, extra_rows=5)
        decode = Decode(with_lengths(rows, [250, 0], [100, 64]), HEADS, ctas=1)
        decode.run(program, seed=3, events=events)
        decode.check()

    return Kernel(compile_report(key).ptx, [call], DECODE_ROLES)


# ---- output projection -----------------------------------------------------------------------------------------------


def of_einsum(packed: bool) -> Kernel:
    return Kernel(compile_report(einsum.key_of_rings(packed)).ptx, [functools.partial(einsum.run_rings, packed)], {})


AT_THE_END = "a pair's threads meet at the end, where those who have used what was copied tell of it"
EINSUM_PAIRS: Left = {("all", bug): (1, AT_THE_END) for bug in ("no group of copies", "no wait for copies")}


def of_einsum_pairs() -> Kernel:
    return Kernel(compile_report(einsum.PAIR).ptx, [einsum.run_pair_rings], {})


# ---- all -------------------------------------------------------------------------------------------------------------

KERNELS: dict[str, tuple[Callable[[], Kernel], Left]] = {
    "decode": (of_decode, {}),
    "decode in pairs": (of_pairs, {}),
    "prefill in pairs": (of_prefill_pairs, PREFILL | {("softmax", "no barrier of the warp"): (1, TRADED)}),
    "einsum in pairs": (of_einsum_pairs, EINSUM_PAIRS),
    "einsum": (functools.partial(of_einsum, False), {}),
    "einsum, packed": (functools.partial(of_einsum, True), {}),
    **{name: (functools.partial(of_prefill, name), PREFILL) for name in ("prefill", "mixed", "mixed e4m3", "paged")},
    **{name: (functools.partial(of_scores, name), left) for name, (_, _, left) in SCORES.items()},
}


@pytest.mark.parametrize(
    ("name", "every"),
    [
        ("decode", 3),
        ("decode in pairs", 4),
        ("einsum", 3),
        ("einsum in pairs", 4),
        ("einsum, packed", 3),
        ("prefill", 4),
        ("prefill in pairs", 5),
        ("mixed e4m3", 4),
        ("paged", 4),
        ("MXFP4, 1 row", 4),
        ("FP8, contiguous", 6),
    ],
)
def test_bugs_are_found(name: str, every: int, thorough: bool) -> None:
    """Of each kind of bug one, with --thorough every so manyth of all; `python -m tests.model.all_bugs` plants all."""
    make, left = KERNELS[name]
    count, _ = make().check(left, every if thorough else 0, len(name) % every if thorough else len(name))
    assert count >= 13
