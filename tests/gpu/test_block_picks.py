# SPDX-License-Identifier: Apache-2.0
"""Candidate blocks of long rows on a GPU, against a stable sort: rows whose bound is a good guess, and rows whose list
is too short or too long."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from cute_kernels.indexer import block_picks, chunks
from cute_kernels.indexer.ops import select_candidate_blocks, select_candidate_blocks_workspace_size
from cute_kernels.runtime.ops import FALLBACK_VARIABLE

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

INF, NAN, INT = float("inf"), float("nan"), torch.int32
LARGEST = torch.finfo(torch.float32).max
COLUMNS = 8 * chunks.LONG_BLOCKS + 1000

Pattern = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture(autouse=True)
def no_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_picks, "LEAST_ROWS", 1)
    monkeypatch.delenv(FALLBACK_VARIABLE, raising=False)


def normal(rows: int, seed: int) -> torch.Tensor:
    return torch.randn(rows, COLUMNS, device="cuda", generator=torch.Generator("cuda").manual_seed(seed))


def expected(scores: torch.Tensor, length: int, k: int) -> list[int]:
    count = -(-length // 8)
    if count <= k:
        return [*range(count), *[-1] * (k - count)]
    padded = torch.full((8 * count,), NAN, device="cuda")
    padded[:length] = scores[:length]
    is_nan = padded.view(count, 8).isnan()
    maxima = torch.where(is_nan, -INF, padded.view(count, 8)).amax(1).clamp(max=LARGEST) + 0.0
    # behind -inf, and before all
    order = torch.where(is_nan.all(1), -2.0 * LARGEST, maxima.double().clamp(min=-1.5 * LARGEST))
    order[-1] = INF
    return [int(block) for block in order.sort(descending=True, stable=True).indices[:k].sort().values]


def bits(x: torch.Tensor) -> torch.Tensor:
    g = torch.Generator("cuda").manual_seed(9)
    return torch.randint(-(2**31), 2**31, x.shape, device="cuda", generator=g).to(INT).view(torch.float32)


def rising(x: torch.Tensor) -> torch.Tensor:
    return torch.arange(COLUMNS, device="cuda").float().expand_as(x).contiguous()


def periodic(x: torch.Tensor) -> torch.Tensor:
    """Blocks that a sample of every so many pairs misses, or has nothing but."""
    pair = torch.arange(COLUMNS, device="cuda") // 16
    is_sampled = torch.zeros(-(-COLUMNS // 16), dtype=torch.bool, device="cuda")
    is_sampled[torch.arange(2048, device="cuda") * (COLUMNS // 16) // 2048] = True
    signs = torch.tensor([1.0, -1.0], device="cuda").repeat(-(-x.shape[0] // 2))[: x.shape[0], None]
    return torch.where(is_sampled[pair], x + 100 * signs, x)


PATTERNS: dict[str, Pattern] = {
    "normal": lambda x: x,
    "far": lambda x: x * 1e-3 - 1000,
    "rising": rising,
    "falling": lambda x: -rising(x),
    "runs": lambda x: x[:, ::1000].repeat_interleave(1000, 1)[:, :COLUMNS].contiguous(),
    "equal": torch.ones_like,
    "few": lambda x: (x * 2).round(),
    "periodic": periodic,
    "infinite": lambda x: torch.where(x > 3, INF, torch.where(x < 1, -INF, x)),
    "mostly nan": lambda x: torch.where(x < 3.5, NAN, x),
    "all nan": lambda x: torch.full_like(x, NAN),
    "bits": bits,
}


@pytest.mark.parametrize("k", [300, 2048])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns(pattern: str, k: int) -> None:
    scores = PATTERNS[pattern](normal(4, k))
    lengths = torch.tensor([COLUMNS, COLUMNS - 3, 8 * 4096 + 1, 8 * 9000 + 5], device="cuda", dtype=INT)
    size = select_candidate_blocks_workspace_size(4, COLUMNS)
    workspace = torch.full((size // 4,), NAN, device="cuda")
    for _ in range(2):
        got = select_candidate_blocks(scores, lengths, k, workspace=workspace)
        for row, length in enumerate(lengths.tolist()):
            assert got[row].tolist() == expected(scores[row], length, k), row


def test_rows_of_any_length_in_a_wider_matrix() -> None:
    k, scores = 2048, normal(12, 1)
    scores = torch.cat([scores, scores], 1)[:, 16 : COLUMNS + 16]
    lengths = [
        0,
        -5,
        5,
        8 * k,
        8 * k + 1,
        8 * 4096,
        8 * 4096 + 1,
        8 * 8192 + 3,
        100_003,
        COLUMNS - 1,
        COLUMNS,
        2**31 - 1,
    ]
    got = select_candidate_blocks(scores, torch.tensor(lengths, device="cuda", dtype=INT).view(3, 4), k)
    for row, length in enumerate(lengths):
        assert got[row].tolist() == expected(scores[row], min(max(length, 0), COLUMNS), k), (row, length)


def test_behind_what_writes_the_scores() -> None:
    """The kernel that marks loads scores before it waits for the one with the bound."""
    scores, lengths = normal(40, 2), torch.full((40,), COLUMNS, device="cuda", dtype=INT)
    want = select_candidate_blocks(-scores, lengths, 512)
    buffer = torch.empty_like(scores)
    for _ in range(5):
        torch.mul(scores, 1.0, out=buffer)
        select_candidate_blocks(buffer, lengths, 512)
        torch.neg(scores, out=buffer)
        assert torch.equal(select_candidate_blocks(buffer, lengths, 512), want)
