# SPDX-License-Identifier: Apache-2.0
"""The contract of arguments on a GPU, where accepted calls are remembered by their metadata."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from cute_kernels import formats
from cute_kernels.indices.ops import compute_global_topk_indices_and_lens
from cute_kernels.kv_cache.ops import quantize_and_insert_k_cache
from cute_kernels.norm.ops import fused_mtp_input_rmsnorm, fused_q_kv_rmsnorm, mtp_shared_head_rmsnorm
from cute_kernels.runtime.ops import FALLBACK_VARIABLE

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

CUDA, BF16 = torch.device("cuda"), torch.bfloat16


@pytest.fixture(autouse=True)
def no_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FALLBACK_VARIABLE, raising=False)


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape))).to(CUDA, BF16)


def test_a_remembered_call_at_addresses_that_overlap_is_refused() -> None:
    memory, weight = randn(8, 1024), randn(1024)
    for _ in range(2):
        mtp_shared_head_rmsnorm(memory[:3], weight, 1e-6, out=memory[3:6])
        mtp_shared_head_rmsnorm(memory[:3], weight, 1e-6, out=memory[4:7])
    before = memory.clone()
    for first in (1, 2):
        with pytest.raises(ValueError, match="mtp_shared_head_rmsnorm: out: expected memory that hidden_states has"):
            mtp_shared_head_rmsnorm(memory[:3], weight, 1e-6, out=memory[first : first + 3])
    assert torch.equal(memory, before)


def test_a_remembered_call_is_refused_with_a_gradient() -> None:
    x, weight = randn(3, 512), randn(512)
    mtp_shared_head_rmsnorm(x, weight, 1e-6)
    weight.requires_grad_()
    with torch.no_grad():
        mtp_shared_head_rmsnorm(x, weight, 1e-6)
    with torch.inference_mode():
        mtp_shared_head_rmsnorm(x, weight, 1e-6)
    with pytest.raises(ValueError, match="mtp_shared_head_rmsnorm: weight: expected a tensor that needs no gradient"):
        mtp_shared_head_rmsnorm(x, weight, 1e-6)


def _shared_head(x: torch.Tensor, place: bool) -> list[torch.Tensor]:
    return [mtp_shared_head_rmsnorm(x, randn(x.shape[1]), 1e-6, out=x if place else None)]


def _q_kv(x: torch.Tensor, place: bool) -> list[torch.Tensor]:
    qr, kv = x[:, : x.shape[1] - 512], x[:, x.shape[1] - 512 :]
    weights = randn(qr.shape[1]), randn(512)
    return list(fused_q_kv_rmsnorm(qr, kv, *weights, 1e-6, out=(qr, kv) if place else None))


def _mtp_input(x: torch.Tensor, place: bool) -> list[torch.Tensor]:
    streams = x.view(-1, 5, x.shape[1])
    embeds, hidden = streams[:, 0], streams[:, 1:]
    positions = torch.arange(len(embeds), device=CUDA)
    weights = randn(x.shape[1]), randn(x.shape[1])
    out = (embeds, hidden) if place else None
    return list(fused_mtp_input_rmsnorm(embeds, positions, hidden, *weights, 1e-6, 4, out=out))


@pytest.mark.parametrize("norm", [_shared_head, _q_kv, _mtp_input])
@pytest.mark.parametrize(("rows", "width"), [(5, 1536), (1285, 1536), (20, 7168), (4000, 7168)])
def test_norms_in_place_have_the_same_bits(norm: Callable[..., list[torch.Tensor]], rows: int, width: int) -> None:
    if norm is _q_kv and width > 2560:
        width = 2048
    x = randn(rows // 5 * 5, width)
    for got, want in zip(norm(x.clone(), True), norm(x.clone(), False), strict=True):
        assert torch.equal(got.view(torch.int16), want.view(torch.int16))


@pytest.mark.parametrize("columns", [1, 31, 128, 512, 513, 1000, 1024, 2048, 5000])
@pytest.mark.parametrize("rows", [1, 300])
@pytest.mark.parametrize("holes", ["none", "few", "many", "all", "front"])
def test_holes_are_closed(columns: int, rows: int, holes: str) -> None:
    g = torch.Generator().manual_seed(columns)
    table = torch.randint(0, 2**20, (2, 64), generator=g).int()
    picks = torch.randint(0, 4096, (rows, columns), generator=g).int()
    chance = {"none": 0.0, "few": 0.02, "many": 0.5, "all": 1.0, "front": 0.0}[holes]
    picks[torch.rand(rows, columns, generator=g) < chance] = -1
    table[:, 7] = -1  # a page that is not there
    if holes == "none":
        picks[picks // 64 == 7] = 0
    if holes == "front":
        picks[:, : columns // 2] = -1
    args = picks, torch.randint(0, 2, (rows,), generator=g).int(), table, 64, torch.rand(rows, generator=g) < 0.9
    want = compute_global_topk_indices_and_lens(*args)
    got = compute_global_topk_indices_and_lens(*(a.to(CUDA) if isinstance(a, torch.Tensor) else a for a in args))
    assert all(torch.equal(a.cpu(), b) for a, b in zip(got, want, strict=True))
    for row, table_row, slots in zip(picks.tolist(), args[1].tolist(), got[0].tolist(), strict=True):
        kept = [int(table[table_row, x // 64]) * 64 + x % 64 for x in row if x >= 0 and x // 64 != 7]
        assert slots == kept + [-1] * (columns - len(kept))


def test_no_rows_of_any_strides() -> None:
    cache = formats.FP8_DS_MLA.allocate(2, 64, CUDA)
    k, slots = torch.empty(0, 512, dtype=BF16, device=CUDA), torch.empty(0, dtype=torch.int64, device=CUDA)
    for strides in ((0, 0), (1027, 2), (512, 1)):
        quantize_and_insert_k_cache(k.as_strided((0, 512), strides), cache, slots)
    assert not cache.any()


def test_threads_and_streams_share_what_is_remembered() -> None:
    x, weight = randn(64, 4096), randn(4096)
    want = mtp_shared_head_rmsnorm(x, weight, 1e-6)
    failed: list[Any] = []

    def work() -> None:
        with torch.cuda.stream(torch.cuda.Stream()), torch.no_grad():
            for _ in range(200):
                out = mtp_shared_head_rmsnorm(x, weight, 1e-6)
                if not torch.equal(out, want):
                    failed.append(out)

    torch.cuda.synchronize()
    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
