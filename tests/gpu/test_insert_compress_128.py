# SPDX-License-Identifier: Apache-2.0
"""Everything between the GEMMs and attention of a layer of ratio 128 in one launch: on a GPU the bytes of both ops."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cute_kernels.insert_compress import ops as _registered  # noqa: F401
from cute_kernels.insert_compress.call import CompressCall
from cute_kernels.insert_compress.verify_cases import compress_difference, random_compress_call
from cute_kernels.runtime.ops import FALLBACK_VARIABLE, OPS
from cute_kernels.runtime.verify import clone_arguments
from tests.helpers import raw_bytes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

OP = "fused_qkv_insert_compress"
OUTPUTS = ("q", "k_cache", "state_cache", "entry_cache")
MIXED = [1, 9, 1, 2, 130, 4, 4, 1, 3, 17, 0, 5, 64, 1, 1, 7]


@pytest.fixture(autouse=True)
def no_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FALLBACK_VARIABLE, raising=False)


@pytest.fixture(autouse=True)
def needs_clusters() -> None:
    if torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("needs clusters")


def on(call: CompressCall, device: str) -> CompressCall:
    return CompressCall(*clone_arguments(call, torch.device(device)))


def run(call: CompressCall) -> None:
    OPS[OP].overload(*call)


def run_both(call: CompressCall) -> None:
    for _, name, arguments in call.parts():
        OPS[name].overload(*arguments)


def assert_same(one: CompressCall, other: CompressCall, what: Any = "") -> None:
    for name in OUTPUTS:
        got, want = raw_bytes(getattr(one, name)), raw_bytes(getattr(other, name))
        assert torch.equal(got, want), (what, name, int((got != want).sum()))


def check(call: CompressCall, what: Any = "") -> None:
    """The bytes of the two ops on the GPU, gaps included, and near what the reference writes."""
    want, gpu, two = on(call, "cpu"), on(call, "cuda"), on(call, "cuda")
    run(gpu)
    run_both(two)
    assert_same(gpu, two, what)
    OPS[OP].reference(*want)
    assert not (found := compress_difference(on(gpu, "cpu"), want)), (what, found)


@pytest.mark.parametrize("closing", [False, True])
@pytest.mark.parametrize("lengths", [[1], [1] * 7, [1] * 65, [2] * 30, MIXED], ids=lambda x: str(sum(x)))
def test_the_bytes_of_the_two_ops(lengths: list[int], closing: bool) -> None:
    for heads in (16, 3):
        for bad in (False, True):
            call = random_compress_call(lengths, heads, heads=heads, closing=closing, bad=bad)
            check(call, (heads, bad))
            check(call._replace(persist="window", use_pdl=True), (heads, bad))


def test_many_heads_and_long_chunks() -> None:
    """Without the reference, which takes its time."""
    for lengths, heads, closing in (([300, 1], 64, False), ([1] * 200, 128, True), ([2] * 600, 64, True)):
        call = random_compress_call(lengths, heads, heads=heads, closing=closing, bad=False)
        gpu, two = on(call, "cuda"), on(call, "cuda")
        run(gpu._replace(use_pdl=True))
        run_both(two)
        assert_same(gpu, two, lengths)


def test_pages_of_any_size_and_restarts() -> None:
    for state_rows, entry_rows, block_size in ((3, 3, 3), (64, 64, 256), (1, 7, 1)):
        sizes = {"state_rows": state_rows, "entry_rows": entry_rows, "block_size": block_size}
        call = random_compress_call(MIXED, block_size, **sizes)  # type: ignore[arg-type]
        ends = call.query_start_loc[1:].long() - 1
        restart = call.positions[ends.clamp(min=0)].int()
        check(call._replace(min_restart=restart - 2, persist="window"), sizes)


def test_fewer_slots_than_rows_and_none() -> None:
    call = random_compress_call(MIXED, 1)
    rows = call.positions.shape[0]
    for keep in (rows - 5, 1, 0):
        names = ("slot_mapping", "state_slot_mapping", "entry_slot_mapping")
        check(call._replace(**{name: getattr(call, name)[:keep] for name in names}), keep)
    none = random_compress_call([], 2)
    names = ("q", "kv", "positions", "slot_mapping", "state_slot_mapping", "entry_slot_mapping")
    check(none._replace(**{name: getattr(none, name)[:0] for name in names}))


def test_every_kernel_and_nan() -> None:
    from cute_kernels.insert_compress.insert_compress import SHAPES, InsertCompressKey, launch_with
    from cute_kernels.runtime.arch import arch_of

    call = random_compress_call(MIXED, 2, heads=7, closing=True)
    for name in ("q", "kv", "kv_score"):
        getattr(call, name)[4] = torch.nan
    call.state_cache[1, :, :300] = torch.nan
    call.state_cache[2, :, 700:] = -torch.inf
    two = on(call, "cuda")
    run_both(two)
    for rows in SHAPES:
        for per_cluster in (1, 3, 4, 32):
            gpu = on(call, "cuda")
            launch_with(InsertCompressKey(arch_of(0), rows), gpu, per_cluster)
            assert_same(gpu, two, (rows, per_cluster))


def test_columns_of_fused_projections() -> None:
    call = random_compress_call([1] * 33, 3, heads=64, closing=True, bad=False)
    want = on(call, "cuda")
    run_both(want)
    gpu = on(call, "cuda")
    rows = gpu.q.shape[0]
    sums = torch.full((rows, 1100), torch.nan, device="cuda")
    sums[:, 8:1032].copy_(gpu.kv_score[:rows])
    sliced = gpu._replace(kv_score=sums[:, 8:1032])
    run(sliced)
    assert_same(sliced, want)


def test_it_waits_for_a_kernel_that_lets_it_start_early() -> None:
    """The kernel ahead normalizes its rows, and hands them over at once: q, kv, states are its results."""
    from cute_kernels.norm.ops import fused_q_kv_rmsnorm

    call = random_compress_call([1] * 40, 5, heads=2, closing=True, bad=False)
    want, rows = on(call, "cuda"), call.q.shape[0]
    g = torch.Generator().manual_seed(1)
    raw = torch.randn(rows, 1024 + 512, generator=g).bfloat16().cuda()
    norms = torch.ones(1024, dtype=torch.bfloat16).cuda(), torch.ones(512, dtype=torch.bfloat16).cuda()
    q, kv = fused_q_kv_rmsnorm(raw[:, :1024], raw[:, 1024:], *norms, 1e-6)
    want = want._replace(q=q.view(rows, 2, 512), kv=kv)
    run_both(want)
    for _ in range(20):
        gpu = on(call, "cuda")
        torch.cuda.synchronize()
        q, kv = fused_q_kv_rmsnorm(raw[:, :1024], raw[:, 1024:], *norms, 1e-6, use_pdl=True)
        gpu = gpu._replace(q=q.view(rows, 2, 512), kv=kv, use_pdl=True)
        run(gpu)
        assert_same(gpu, want)


def test_what_is_not_supported_says_so() -> None:
    call = on(random_compress_call([1, 2], 7), "cuda")
    bad = torch.zeros(call.kv_score.shape[0], 1027, device="cuda")[:, 1:1025]
    with pytest.raises(NotImplementedError, match="rows of kv_score must be 16-byte aligned"):
        run(call._replace(kv_score=bad))
    with pytest.raises(NotImplementedError, match="norm_weight must have 2 bytes"):
        run(call._replace(norm_weight=call.norm_weight.float()))
