# SPDX-License-Identifier: Apache-2.0
"""Plans on a GPU: calls that come again write the same bits, wherever their tensors lie, on whichever stream, captured
or not. tests/runtime/test_plans.py has what plans refuse and follow."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from cute_kernels import formats
from cute_kernels.indexer.ops import cp_gather_indexer_k_quant_cache, top_k_per_row_decode, top_k_per_row_prefill
from cute_kernels.kv_cache.ops import quantize_and_insert_k_cache
from cute_kernels.linear.ops import fp8_linear, quantize_fp8_1x128
from cute_kernels.norm.ops import mtp_shared_head_rmsnorm
from cute_kernels.runtime import kept, plans

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

CUDA, BF16 = torch.device("cuda"), torch.bfloat16

Call = tuple[Callable[..., Any], list[Any]]


def randn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(CUDA)


def norm(seed: int) -> Call:
    return mtp_shared_head_rmsnorm, [randn(seed, 5, 4096).to(BF16), randn(1, 4096).to(BF16), 1e-6]


def linear(seed: int) -> Call:
    def product(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return fp8_linear(*quantize_fp8_1x128(x), weight, scale)

    weight = randn(2, 512, 1024).to(torch.float8_e4m3fn)
    return product, [randn(seed, 9, 1024).to(BF16), weight, randn(3, 4, 8).abs()]


def picks_prefill(seed: int) -> Call:
    starts, ends = (torch.tensor(rows, dtype=torch.int32, device=CUDA) for rows in ([0, 7, 100], [3000, 2000, 4000]))
    out = torch.full((3, 512), -7, dtype=torch.int32, device=CUDA)
    return top_k_per_row_prefill, [randn(seed, 3, 4096), starts, ends, out, 3, 4096, 1, 512]


def picks_decode(seed: int) -> Call:
    lengths, out = (torch.full(shape, 4000, dtype=torch.int32, device=CUDA) for shape in ((3, 1), (3, 512)))
    return top_k_per_row_decode, [randn(seed, 3, 4096), 1, lengths, out, 3, 4096, 1, 512]


def insert(seed: int) -> Call:
    cache = formats.FP8_DS_MLA.allocate(2, 64, CUDA)
    return quantize_and_insert_k_cache, [randn(seed, 5, 512).to(BF16), cache, torch.arange(3, 8, device=CUDA)]


def gather(seed: int) -> Call:
    cache = formats.INDEXER_FP8.allocate(2, 64, CUDA)
    memory = cache.as_strided((cache.untyped_storage().nbytes(),), (1,), 0)
    memory.copy_(torch.randint(0, 256, memory.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8))
    rows, scales = (
        torch.empty(70, 128, dtype=torch.uint8, device=CUDA),
        torch.empty(70, 4, dtype=torch.uint8, device=CUDA),
    )
    table, lengths = (torch.tensor(x, dtype=torch.int32, device=CUDA) for x in ([[1, 0]], [0, 70]))
    return cp_gather_indexer_k_quant_cache, [cache, rows, scales, table, lengths]


CALLS = {f.__name__: f for f in (norm, linear, picks_prefill, picks_decode, insert, gather)}


def left(args: Sequence[Any], result: Any) -> list[torch.Tensor]:
    """All that a call may have written."""
    tensors = [value for value in (*args, result) if isinstance(value, torch.Tensor)]
    return [
        t.as_strided((t.untyped_storage().nbytes() // t.element_size(),), (1,), 0).view(torch.uint8) for t in tensors
    ]


def run(call: Call) -> list[torch.Tensor]:
    function, args = call
    return left(args, function(*args))


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Plans that ran."""
    ran: list[Any] = []
    run_plan = plans._Plan.run

    def noted(self: plans._Plan, *args: Any) -> Any:
        ran.append(self)
        return run_plan(self, *args)

    monkeypatch.setattr(plans._Plan, "run", noted)
    return ran


@pytest.mark.parametrize("name", CALLS)
def test_same_bits_at_other_addresses(name: str, planned: list[Any]) -> None:
    make = CALLS[name]
    want = []
    for seed in range(6):
        kept.forget()
        want.append(run(make(seed)))
    assert planned == []
    run(make(0)), run(make(0))
    for seed in range(6):
        assert all(map(torch.equal, run(make(seed)), want[seed]))
    assert len(planned) >= 6


@pytest.mark.parametrize("name", CALLS)
def test_captured_and_on_other_streams(name: str, planned: list[Any]) -> None:
    calls = [CALLS[name](seed) for seed in (0, 0, 0, 1, 2)]
    for call in calls[:2]:
        want = run(call)
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
        got = run(calls[2])
        torch.cuda.current_stream().synchronize()
    assert all(map(torch.equal, got, want))
    kept.forget()
    want = run(CALLS[name](1))
    for call in calls[:2]:
        run(call)
    ran, graph = len(planned), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run(calls[3])
    assert len(planned) > ran
    graph.replay()
    assert all(map(torch.equal, got, want))


def test_threads_have_plans_in_common() -> None:
    calls = [[norm(seed) for _ in range(50)] for seed in range(4)]
    want: list[Any] = [run(norm(seed)) for seed in range(4)]
    failed: list[int] = []
    kept.forget()

    def work(seed: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
            failed.extend(seed for call in calls[seed] if not all(map(torch.equal, run(call), want[seed])))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []


def test_the_profiler_sees_ops() -> None:
    function, args = norm(0)
    for _ in range(3):
        function(*args)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        function(*args)
    assert any(event.name == "cute_kernels::mtp_shared_head_rmsnorm" for event in profile.events())
