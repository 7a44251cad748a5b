# SPDX-License-Identifier: Apache-2.0
"""The kernels of sparse_mla_decode on a GPU: strides, large pools, what is written, and that bits repeat."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

from cute_kernels.runtime.arch import arch_of
from cute_kernels.sparse_mla.ops import sparse_mla_decode
from tests.gpu import decode_cases, decode_checks
from tests.gpu.decode_cases import Pool, check, check_constant_lists, fill, generator, int32, make, run, workspace_for
from tests.gpu.decode_checks import BF16, FP8, assert_near, same_bits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

SECOND = ("none", "listed", "dense")


@pytest.fixture(autouse=True, params=decode_checks.KERNELS)
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    decode_checks.use_kernel(request.param, monkeypatch)
    return request.param


# ---- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["s_q first", "one query for all", "pages apart"])
def test_odd_layouts(order: str) -> None:
    call = make(b=4, s_q=3, heads=16, second="listed", lengths="bs")
    if order == "s_q first":
        call.q = call.q.transpose(0, 1).contiguous().transpose(0, 1)
        call.indices = call.indices.transpose(0, 1).contiguous().transpose(0, 1)
    elif order == "one query for all":
        call.q = call.q[:1, :1].expand(4, 3, -1, -1)
        call.indices = call.indices[:, :1].expand(4, 3, -1)
    else:
        for pool in (call.pool, call.extra):
            assert pool is not None
            pool.cache = pool.cache[::2]
            pool.pages, pool.capacity = pool.cache.shape[0], pool.cache.shape[0] * pool.rows
            pool.data, pool.scales, pool.stride = pool.data[::2], pool.scales[::2], 2 * pool.stride
            pool.bytes.fill_(0xFF)
    fill(call)
    check(call)


@pytest.mark.parametrize("second", ["listed", "dense"])
def test_pools_beyond_eight_gigabytes(second: str) -> None:
    """Rows before and behind 2^31, 2^32 and 2^33 bytes, in either cache."""
    wide = Pool(FP8, 2**33 // 37440 + 12, 64) if second == "listed" else Pool(FP8, 2**33 // 1728 + 12, 2)
    edges = [size // wide.stride for size in (2**31, 2**32, 2**33)]
    pages = torch.tensor([0, *(page + step for page in edges for step in (-1, 0, 1)), wide.pages - 1])
    pages = pages.to(decode_cases.DEVICE)
    call = make(b=2, second=second, extra_topk=len(pages) * wide.rows, extra_rows=wide.rows, bad=0.0)
    slots = (pages[:, None] * wide.rows + torch.arange(wide.rows, device=decode_cases.DEVICE)).flatten().int()
    call.extra = wide
    if second == "listed":
        call.extra_indices = torch.stack([slots, slots.flip(0)])[:, None].contiguous()
        call.pool, call.indices = wide, call.extra_indices[..., :128].contiguous()
    else:
        call.table = torch.stack([pages, pages.flip(0)]).int()
        call.visible = int32([[len(slots)], [len(slots) - 1]])
    fill(call)
    check(call)


def test_queries_and_results_beyond_four_gigabytes() -> None:
    """The second row starts past 2^31 bytes, the third past 2^32."""
    gap = 2**30 + 8
    call = make(b=3, heads=16, num_splits=1)
    want = check(call)
    for name in ("q", "out"):
        wide = torch.empty(2 * gap + 16 * 512, dtype=torch.bfloat16, device=decode_cases.DEVICE)
        view = wide.as_strided((3, 1, 16, 512), (gap, 512, 512, 1))
        if name == "q":
            call.q = view.copy_(call.q)
        else:
            assert same_bits(run(call, out=view), want)


# ---- bits ------------------------------------------------------------------------------------------------------------

CALLS = (
    {"b": 3, "second": "listed", "heads": 64, "num_splits": 1},
    {"b": 140, "second": "dense", "heads": 128, "extra_rows": 2, "num_splits": 1},
    {"b": 7, "s_q": 2, "second": "listed", "heads": 16, "extra_topk": 512, "num_splits": 5},
    {"b": 1, "second": "dense", "heads": 13, "extra_topk": 1000},
    {"b": 5, "kv_format": BF16, "second": "listed", "split_tokens": 128},
)


@pytest.mark.parametrize("call", CALLS, ids=lambda call: "-".join(map(str, call.values())))
def test_every_run_gives_the_same_bits(call: dict[str, Any]) -> None:
    made = make(lengths="bs", **call)
    want = check(made)
    for _ in range(50):
        assert same_bits(run(made), want)


@pytest.mark.parametrize("split_tokens", [64, 192, 1024])
@pytest.mark.parametrize("second", SECOND)
def test_a_row_has_the_same_bits_in_every_batch(second: str, split_tokens: int) -> None:
    """Alone, among a few, in another order, as the only token of its request, in a batch that fills the GPU."""
    call = make(200, 2, 32, 130, second=second, extra_topk=300, lengths="bs", split_tokens=split_tokens)
    out, lse = check(call)
    g = generator(1)
    shuffled = torch.randperm(200, device=decode_cases.DEVICE, generator=g)
    for rows in (slice(0, 1), slice(117, 118), slice(60, 99), shuffled, shuffled[:40]):
        assert same_bits(run(call.take(rows)), (out[rows], lse[rows]))
    for row in (3, 150):
        one = call.take(slice(row, row + 1)).tokens(slice(1, 2))
        assert same_bits(run(one), (out[row : row + 1, 1:], lse[row : row + 1, :, 1:]))


@pytest.mark.parametrize("splits", [{"num_splits": 1}, {"num_splits": 2}, {"split_tokens": 640}])
@pytest.mark.parametrize("heads", [64, 128])
@pytest.mark.parametrize("second", ["listed", "dense"])
def test_a_row_has_the_same_bits_whoever_else_is_long(second: str, heads: int, splits: dict[str, int]) -> None:
    """More rows than run at once: one is long among short ones, none has a key but one, all are as long, any length."""
    rows, columns = 150, 1500
    call = make(rows, 1, heads, 100, second=second, extra_topk=columns, lengths="bs", **splits)
    last = call.extra_length if call.extra_length is not None else call.visible
    assert last is not None
    assert call.length is not None
    long, g = 140, generator(2)
    random = torch.randint(-3, columns + 90, (rows, 1), device=decode_cases.DEVICE, generator=g).int()
    call.length.fill_(100)
    last.fill_(columns)
    fill(call)
    results = []
    for least, most in ((1, 40), (0, 0), (100, columns), (None, None)):
        last.copy_(random) if least is None else last.fill_(most)
        call.length.fill_(100 if least is None else least)
        last[long], call.length[long] = columns, 100
        out, lse = check(call)
        results.append((out[long], lse[long]))
        one = call.take(slice(long - 1, long + 1))
        assert same_bits(run(one), (out[long - 1 : long + 1], lse[long - 1 : long + 1]))
    assert all(same_bits(found, results[0]) for found in results)


def test_calls_in_a_row_share_a_workspace() -> None:
    """A call that is split does not disturb the one before it, nor is it disturbed by what that left behind."""
    shapes = (
        {"b": 2, "heads": 64, "num_splits": 5},
        {"b": 30, "heads": 16, "num_splits": 2},
        {"b": 9, "num_splits": 3},
    )
    calls = [make(second="listed", extra_topk=512, lengths="b", seed=i, **shapes[i % 3]) for i in range(12)]
    want = [check(call) for call in calls]
    workspace = max((workspace_for(call) for call in calls), key=torch.numel)
    got = [tuple(torch.full_like(t, math.nan) for t in results) for results in want]

    def run_all() -> None:
        for call, (out, lse) in zip(calls, got, strict=True):
            sparse_mla_decode(**call.arguments(), out=out, lse=lse, workspace=workspace)

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run_all()
    for repeat in (run_all, graph.replay):
        for _ in range(5):
            repeat()
            assert all(same_bits(g, w) for g, w in zip(got, want, strict=True))
            for results in got:
                for t in results:
                    t.fill_(math.nan)


@pytest.mark.parametrize(
    "shape",
    [
        {"b": 3, "heads": 64},
        {"b": 5, "heads": 8},
        {"b": 40, "heads": 8},
        {"b": 150, "heads": 16},
        {"b": 150, "heads": 64, "extra_topk": 1500, "num_splits": 1},
        {"b": 150, "heads": 64, "extra_topk": 1500, "num_splits": 2},
    ],
    ids=lambda shape: "-".join(map(str, shape.values())),
)
@pytest.mark.parametrize("constant", [1, 2])
@pytest.mark.parametrize("second", SECOND)
def test_constant_lists_are_those_of_the_launch_ahead(second: str, constant: int, shape: dict[str, int]) -> None:
    check_constant_lists(constant, second=second, extra_rows=2, **shape)


# ---- what it takes ---------------------------------------------------------------------------------------------------


def test_any_workspace_is_enough_for_the_default() -> None:
    """Rows are cut into as many parts as fit, the whole where none do."""
    call = make(b=2, s_q=2, heads=64, topk=640, second="listed", extra_topk=512)
    whole = workspace_for(call)
    assert whole.nbytes > 2 * 2 * 64 * 2052
    want = call.expected()
    for size in (0, 16, 2 * 2 * 64 * 2052 * 2, 2 * 2 * 64 * 2052 * 3 + 16, whole.nbytes):
        assert_near(run(call, workspace=whole[: size // 16 * 16]), want)
    assert_near(run(call, workspace=None), want)
    assert_near(run(call, workspace=whole.view(torch.float32)), want)


def test_a_workspace_that_is_too_small() -> None:
    call = make(b=2, num_splits=2)
    whole = workspace_for(call)
    run(call, workspace=whole)
    with pytest.raises(ValueError, match=r"^sparse_mla_decode: workspace: expected at least \d+ bytes"):
        run(call, workspace=whole[:-1])


def shifted(t: torch.Tensor, elements: int) -> torch.Tensor:
    """The same values and strides, `elements` further into their memory."""
    memory = torch.empty(t.untyped_storage().nbytes() // t.element_size() + elements, dtype=t.dtype, device=t.device)
    return memory[elements:].as_strided(t.shape, t.stride(), elements).copy_(t)


@pytest.mark.parametrize("name", ["q", "out", "k_cache", "extra_k_cache", "workspace"])
def test_what_is_not_aligned_is_refused(name: str) -> None:
    call = make(b=2, second="listed", num_splits=2)
    run(call)
    good = {**call.arguments(), "out": torch.empty_like(call.q), "workspace": workspace_for(call)}
    given = good | {name: shifted(good[name], 4)}
    with pytest.raises(NotImplementedError, match=r"must be 16-byte aligned"):
        sparse_mla_decode(**given)


def test_deployments_use_no_other_keys(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the layers call, in one part and in several."""
    if kernel != "chosen":
        pytest.skip("deployments run what is chosen")
    from cute_kernels.models import MODELS
    from cute_kernels.runtime import compile as compile_
    from cute_kernels.sparse_mla.select import decode_keys as deployment_keys

    arch = arch_of(0)
    known = {key for config in MODELS.values() for tp in (1, 2, 4, 8) for key in deployment_keys(config, tp, arch)}
    used, function = set(), compile_.function
    monkeypatch.setattr(compile_, "function", lambda key, *rest: (used.add(key), function(key, *rest))[1])
    for heads in {config.num_attention_heads // tp for config in MODELS.values() for tp in (1, 2, 4, 8)}:
        for second, splits in itertools.product(SECOND, (1, 2)):
            run(make(b=2, heads=heads, second=second, extra_rows=2, lengths="b", num_splits=splits))
    assert used
    assert used <= known
