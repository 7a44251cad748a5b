# SPDX-License-Identifier: Apache-2.0
"""The kernels of sparse_mla_prefill on a GPU, against float64. Rows of kv that no query row selects are NaN."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from cute_kernels.runtime.record import record_calls
from cute_kernels.sparse_mla.ops import sparse_mla_prefill
from tests.gpu.decode_cases import INT_MAX, INT_MIN, SCALE, generator, int32, random_sink
from tests.gpu.decode_checks import attention, same_bits
from tests.gpu.prefill_checks import KERNELS, LARGEST, assert_results, use_kernel

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

DEVICE = "cuda"
ROWS_AT_ONCE = 1 << 17

Results = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@pytest.fixture(autouse=True, params=KERNELS)
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    use_kernel(request.param, monkeypatch)


@dataclasses.dataclass
class Call:
    q: torch.Tensor
    kv: torch.Tensor
    indices: torch.Tensor
    sink: torch.Tensor | None = None
    length: torch.Tensor | None = None
    scale: float = SCALE

    def arguments(self) -> dict[str, Any]:
        return {
            "q": self.q,
            "kv": self.kv,
            "indices": self.indices,
            "sm_scale": self.scale,
            "attn_sink": self.sink,
            "topk_length": self.length,
        }

    def take(self, rows: Any) -> Call:
        length = None if self.length is None else self.length[rows]
        return dataclasses.replace(self, q=self.q[rows], indices=self.indices[rows], length=length)

    def named(self) -> torch.Tensor:
        """Which columns count, bool [s_q, topk]."""
        indices = self.indices[:, 0].long()
        named = (indices >= 0) & (indices < len(self.kv))
        if self.length is not None:
            named &= torch.arange(indices.shape[1], device=DEVICE) < self.length[:, None]
        return named

    def expected(self) -> Results:
        named, indices = self.named(), self.indices[:, 0].long()
        step = max(1, ROWS_AT_ONCE // max(1, indices.shape[1]))
        parts = []
        for first in range(0, len(self.q), step):
            rows = slice(first, first + step)
            chosen, q = named[rows], self.q[rows].double()
            k = torch.zeros(*chosen.shape, 512, dtype=torch.float64, device=DEVICE)
            k[chosen] = self.kv[indices[rows][chosen], 0].double()
            out, lse = attention(q, k, chosen, self.scale, self.sink)
            scores = (q @ k.transpose(1, 2) * self.scale).masked_fill(~chosen[:, None, :], -math.inf)
            parts.append((out, torch.nn.functional.pad(scores, (0, 1), value=-math.inf).amax(-1), lse))
        out, top, lse = (torch.cat(part) for part in zip(*parts, strict=True))
        return out, top, lse


def fill(call: Call, seed: int = 0) -> Call:
    """Give every row of kv that the call selects a value; all others are NaN."""
    rows = torch.unique(call.indices[:, 0][call.named()].long())
    values = torch.randn(len(rows), 512, device=DEVICE, generator=generator(seed)).clamp_(-4, 4) * (LARGEST / 4)
    call.kv.fill_(math.nan)
    call.kv[rows, 0] = values.bfloat16()
    return call


def make(
    s_q: int = 5,
    heads: int = 64,
    topk: int = 200,
    s_kv: int = 700,
    lengths: str = "none",
    bad: float = 0.1,
    sink: str = "mixed",
    seed: int = 0,
) -> Call:
    """A random call. Heads have queries of very different sizes: softmax is flat in some, in others close to a key."""
    g = generator(seed)
    exponents = torch.randint(-4, 7, (s_q, heads, 1), device=DEVICE, generator=g)
    q = torch.randn(s_q, heads, 512, device=DEVICE, generator=g) * torch.exp2(exponents.float())
    indices = torch.randint(0, max(s_kv, 1), (s_q, 1, topk), device=DEVICE, generator=g).int()
    nowhere = int32([-1, INT_MIN, INT_MAX, s_kv, s_kv + 1, -s_kv, -7])
    chosen = nowhere[torch.randint(0, len(nowhere), indices.shape, device=DEVICE, generator=g)]
    indices = indices.where(torch.rand(indices.shape, device=DEVICE, generator=g) >= bad, chosen)
    length = None
    if lengths != "none":
        odd = int32([topk, 0, 1, 63, 64, 65, topk - 1, -1, topk + 1, INT_MIN, INT_MAX, 127, 128])
        length = torch.randint(0, topk + 1, (s_q,), device=DEVICE, generator=g).int()
        some = torch.rand(s_q, device=DEVICE, generator=g) < 0.5
        length = odd[torch.randint(0, len(odd), (s_q,), device=DEVICE, generator=g)].where(some, length)
    kv = torch.empty(s_kv, 1, 512, dtype=torch.bfloat16, device=DEVICE)
    return fill(Call(q.bfloat16(), kv, indices, random_sink(sink, heads), length), seed)


def run(call: Call, **more: Any) -> Results:
    """The kernel's results, over NaN."""
    outputs = {
        "out": torch.full(call.q.shape, math.nan, dtype=torch.bfloat16, device=DEVICE),
        "max_logits": torch.full(call.q.shape[:2], math.nan, device=DEVICE),
        "lse": torch.full(call.q.shape[:2], math.nan, device=DEVICE),
        **more,
    }
    with record_calls() as recording:
        results = sparse_mla_prefill(**call.arguments(), **outputs)
    assert [done.implementation for done in recording.calls] == ["kernel"]
    return results


def assert_near(call: Call, got: Results) -> None:
    assert_results(got, call.expected(), call.q, call.scale)


def check(call: Call, **more: Any) -> Results:
    got = run(call, **more)
    assert_near(call, got)
    return got


@pytest.mark.parametrize("heads", [1, 8, 13, 16, 32, 63, 64, 65, 100, 128])
@pytest.mark.parametrize("lengths", ["none", "some"])
def test_heads(heads: int, lengths: str) -> None:
    check(make(heads=heads, lengths=lengths, seed=heads))


@pytest.mark.parametrize("topk", [0, 1, 7, 63, 64, 65, 127, 128, 129, 191, 192, 193, 640])
def test_columns_around_tiles(topk: int) -> None:
    check(make(s_q=9, topk=topk, bad=0.0, seed=topk))
    for heads in (8, 16, 32, 128):
        check(make(s_q=9, topk=topk, lengths="some", heads=heads, seed=topk + heads))


@pytest.mark.parametrize("heads", [8, 16, 32, 64, 128])
@pytest.mark.parametrize("topk", [40, 130, 300])
def test_more_rows_than_multiprocessors(heads: int, topk: int) -> None:
    """Blocks walk over several items, of one tile, of more than the ring has, and of none."""
    check(make(s_q=701, heads=heads, topk=topk, s_kv=5000, lengths="some", seed=topk))


@pytest.mark.parametrize("heads", [13, 64])
@pytest.mark.parametrize("sink", ["none", "minus", "finite", "plus", "mixed"])
def test_sinks(sink: str, heads: int) -> None:
    out, top, lse = check(make(sink=sink, heads=heads, lengths="some"))
    without = run(make(sink="none", heads=heads, lengths="some"))
    assert same_bits((top, lse), without[1:])
    if sink == "plus":
        assert (out == 0).all()
    if sink in ("none", "minus"):
        assert same_bits((out,), without[:1])


@pytest.mark.parametrize("heads", [8, 32, 64])
@pytest.mark.parametrize("bad", [0.5, 0.9, 1.0])
def test_indices_that_are_none(bad: float, heads: int) -> None:
    got = check(make(s_q=140, heads=heads, topk=260, bad=bad))
    if bad == 1.0:
        assert (got[0] == 0).all()
        assert (got[1] == -math.inf).all()
        assert (got[2] == math.inf).all()


def test_repeated_indices_count_each_time() -> None:
    call = make(topk=200, bad=0.0)
    call.indices = call.indices % 3
    check(fill(call))


@pytest.mark.parametrize("heads", [16, 64])
@pytest.mark.parametrize("head", [1, 64, 100])
def test_lists_of_which_only_the_head_is_valid(head: int, heads: int) -> None:
    call = make(s_q=140, heads=heads, topk=640, bad=0.0)
    call.indices[:, :, head:] = -1
    want = check(fill(call))
    call.length = torch.full((140,), head, dtype=torch.int32, device=DEVICE)
    assert same_bits(run(call), want)
    call.indices[:, :, head:] = 0
    call.kv[0] = math.nan
    call.indices[:, :, :head] = call.indices[:, :, :head].clamp(min=1)
    check(fill(call))


@pytest.mark.parametrize("heads", [8, 16, 32, 128])
def test_all_rows_are_empty(heads: int) -> None:
    for length in (0, -5, INT_MIN):
        call = make(s_q=300, heads=heads, topk=70)
        call.length = torch.full((300,), length, dtype=torch.int32, device=DEVICE)
        out, top, lse = run(fill(call))
        assert (out == 0).all()
        assert (top == -math.inf).all()
        assert (lse == math.inf).all()


@pytest.mark.parametrize("heads", [8, 64])
@pytest.mark.parametrize(("s_q", "topk", "s_kv"), [(0, 4, 3), (3, 0, 3), (3, 70, 0), (200, 0, 0)])
def test_nothing_to_do(s_q: int, topk: int, s_kv: int, heads: int) -> None:
    call = make(s_q=s_q, heads=heads, topk=topk, s_kv=s_kv)
    out, top, lse = run(call) if s_q == 0 else check(call)
    assert out.shape == (s_q, heads, 512)
    assert top.shape == lse.shape == (s_q, heads)


def test_maxima_that_move() -> None:
    """Scores that grow from tile to tile, by more and by less than what the kernel waits for; and that fall."""
    for heads, step in ((64, 3.0), (128, 0.2), (64, -2.0), (8, 3.0), (16, 0.2), (32, 3.0), (13, -2.0)):
        call = make(s_q=6, heads=heads, topk=640, s_kv=640, bad=0.0)
        call.indices[:] = torch.arange(640, device=DEVICE).int()
        fill(call)
        direction = torch.ones(512, device=DEVICE).bfloat16() / 16
        growth = (torch.arange(640, device=DEVICE) // 40 * step / 16 * LARGEST / 2).clamp(-LARGEST, LARGEST)
        call.kv[:, 0] = (call.kv[:, 0] * 0.1 + growth[:, None]).bfloat16()
        call.q = (call.q * 0.01 + direction * 40).bfloat16()
        check(call)


@pytest.mark.parametrize("heads", [8, 32, 64])
@pytest.mark.parametrize("scale", [0.0, -SCALE, 1e-4, 0.3])
def test_scales(scale: float, heads: int) -> None:
    check(dataclasses.replace(make(sink="finite", heads=heads), scale=scale))


@pytest.mark.parametrize("heads", [8, 64])
def test_large_buffers(heads: int) -> None:
    """Rows that lie 2^31 and more bytes behind the first."""
    rows = 4_300_000
    call = make(s_q=4, heads=heads, topk=100, s_kv=50, bad=0.0)
    kv = torch.empty(rows, 1, 512, dtype=torch.bfloat16, device=DEVICE)
    far = torch.cat([torch.arange(50), torch.arange(2**21 - 25, 2**21 + 25), torch.arange(rows - 50, rows)]).to(DEVICE)
    picks = torch.randint(0, len(far), call.indices.shape, device=DEVICE, generator=generator(1))
    call.indices = far[picks].int()
    call.kv = kv
    kv[far, 0] = (
        torch.randn(len(far), 512, device=DEVICE, generator=generator(2)).clamp_(-4, 4) * (LARGEST / 4)
    ).bfloat16()
    check(call)


@pytest.mark.parametrize("heads", [8, 16, 32, 128])
def test_bits_repeat_and_do_not_depend_on_the_batch(heads: int) -> None:
    call = make(s_q=400, heads=heads, topk=333, s_kv=3000, lengths="some")
    want = check(call)
    for _ in range(20):
        assert same_bits(run(call), want)
    for rows in (slice(0, 1), slice(7, 9), slice(100, 399)):
        assert same_bits(run(call.take(rows)), tuple(part[rows] for part in want))
