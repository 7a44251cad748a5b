# SPDX-License-Identifier: Apache-2.0
"""The kernels of sparse_mla_decode on a GPU: data that must not matter, and data that is extreme."""

from __future__ import annotations

import math

import pytest
import torch

from tests.gpu import decode_cases, decode_checks
from tests.gpu.decode_cases import (
    INT_MAX,
    INT_MIN,
    Call,
    Pool,
    check,
    fill,
    generator,
    int32,
    make,
    run,
)
from tests.gpu.decode_checks import BF16, FP8, same_bits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

SECOND = ("none", "listed", "dense")
SINKS = ("none", "minus", "finite", "plus", "mixed")


@pytest.fixture(autouse=True, params=decode_checks.KERNELS)
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    decode_checks.use_kernel(request.param, monkeypatch)
    return request.param


# ---- indices and lengths ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("splits", [{"num_splits": 1}, {"num_splits": 3}])
@pytest.mark.parametrize("bad", [-1, INT_MIN, INT_MAX, "capacity", -7])
def test_values_that_are_no_slots(bad: int | str, splits: dict[str, int]) -> None:
    """Anywhere: first, last, a whole tile, all but one column, the whole first list, the whole row."""
    call = make(b=8, topk=300, second="listed", extra_topk=200, bad=0.0, **splits)
    for pool, indices in ((call.pool, call.indices), (call.extra, call.extra_indices)):
        assert pool is not None
        assert indices is not None
        value = pool.capacity if bad == "capacity" else int(bad)
        indices[0, :, 0] = value
        indices[1, :, -1] = value
        indices[2, :, 64:128] = value
        indices[3, :, :64] = value
        indices[4, :, :77] = value
        indices[4, :, 78:] = value
        indices[6] = value
    call.indices[5] = int32(bad) if bad != "capacity" else call.pool.capacity
    check(call)


@pytest.mark.parametrize("rows", [2, 64, 256])
def test_pages_whose_slots_pass_32_bits(rows: int) -> None:
    """Page numbers outside the cache whose product with the rows of a page wraps round to a slot inside."""
    call = make(b=3, second="dense", extra_topk=6 * rows, extra_rows=rows, bad=0.0)
    assert call.table is not None
    call.table[0, 1], call.table[1, 0], call.table[2, 5] = (2**32 // rows + 1) % 2**31, INT_MAX, INT_MIN
    call.table[0, 3], call.table[1, 4] = 2**31 // rows + 1, -(2**31 // rows) + 1
    call.visible = int32([[6 * rows], [5 * rows], [6 * rows]])
    fill(call)
    check(call)


@pytest.mark.parametrize("form", ["b", "bs"])
@pytest.mark.parametrize("second", ["listed", "dense"])
def test_lengths(second: str, form: str) -> None:
    """Every kind of length with every kind of the other; columns beyond name rows of NaN."""
    kinds = int32([0, -1, INT_MIN, INT_MAX, 1, 63, 64, 65, 127, 128, 129, 192, 193])
    n = len(kinds)
    shape = (n * n,) if form == "b" else (n * n // 13, 13)
    call = make(b=shape[0], s_q=1 if form == "b" else 13, heads=16, topk=192, second=second, extra_topk=192, bad=0.0)
    nan = call.pool.capacity - 1
    call.indices[call.indices == nan] = 0
    call.length = kinds.repeat(n).view(shape)
    lengths = kinds.repeat_interleave(n).view(shape)
    if second == "listed":
        call.extra_length = lengths
    else:
        call.visible = lengths.view(call.rows)
    by_row = call.length.view(shape[0], -1, 1)
    call.indices[torch.arange(192, device=decode_cases.DEVICE) >= by_row] = nan
    fill(call)
    call.pool.bytes.view(-1, call.pool.stride)[-1, 63 * 576 : 64 * 576] = 0xFF
    check(call, num_splits=1)
    check(call, num_splits=4)


@pytest.mark.parametrize("sink", SINKS)
def test_rows_without_anything(sink: str) -> None:
    """Whatever makes them empty; NaN queries among them. Then all rows at once, and no list, cache or row at all."""
    call = make(b=6, s_q=2, topk=70, second="listed", sink=sink, seed=1)
    call.length, call.extra_length = int32([70, 70, 0, -5, 70, 3]), int32([200, 0, 0, 0, 0, 200])
    call.indices[4] = -1
    call.indices[1] = INT_MAX
    call.q[1:3] = math.nan
    for splits in (1, 3):
        out, lse = check(call, num_splits=splits)
        assert not out[1:5].any()
        assert (lse[1:5] == math.inf).all()
    call.length[:], call.extra_length[:] = 0, INT_MIN
    out, lse = run(call)
    assert not out.any()
    assert (lse == math.inf).all()


@pytest.mark.parametrize("second", SECOND)
@pytest.mark.parametrize("kv_format", [FP8, BF16])
def test_nothing_at_all(kv_format: str, second: str) -> None:
    formats = {"kv_format": kv_format, "extra_format": kv_format}
    for sizes in ({"b": 0}, {"s_q": 0}, {"topk": 0}, {"topk": 0, "extra_topk": 0}, {"b": 0, "topk": 0}):
        check(make(**{"heads": 16, "second": second, **formats, **sizes}))
    call = make(second=second, **formats)
    call.pool = Pool(kv_format, 0, 64)
    if call.extra is not None:
        call.extra = Pool(kv_format, 0, 64)
    out, lse = check(call)
    assert not out.any()
    assert (lse == math.inf).all()


def test_slots_that_repeat() -> None:
    call = make(b=3, topk=200, second="listed", bad=0.0)
    assert call.extra_indices is not None
    call.indices[0] = call.indices[0, 0, 5]
    call.indices[1, :, 100:] = call.indices[1, :, :100].clone()
    call.extra_indices[2, :, 1::2] = call.extra_indices[2, :, ::2].clone()
    check(call)


# ---- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("poison", [0x7F, 0xFF, 0x80])
@pytest.mark.parametrize("second", SECOND)
@pytest.mark.parametrize("kv_format", [FP8, BF16])
def test_what_is_not_selected_does_not_matter(kv_format: str, second: str, poison: int) -> None:
    """Unused rows, pages, scales and the gaps between pages hold NaN, or anything else: no bit changes."""
    call = make(second=second, kv_format=kv_format, extra_format=kv_format, lengths="b", more_stride=1152)
    want = check(call)
    for pool in filter(None, (call.pool, call.extra)):
        pool.bytes.fill_(poison)
    fill(call)
    assert same_bits(run(call), want)


def test_nan_stays_in_its_row() -> None:
    """A NaN record reaches the rows that select it, a NaN query its own head, and nothing else."""
    call = make(b=9, s_q=2, topk=128, bad=0.0, sink="none")
    nan = call.pool.capacity - 1
    call.indices[call.indices == nan] = 0
    want = run(call, num_splits=1)
    call.pool.data[-1, -1, 448:] = 0xFF
    call.indices[3, 0, 17], call.indices[7, 1, 127] = nan, nan
    call.q[5, 1, 11] = math.nan
    out, lse = run(call, num_splits=1)
    assert out[3, 0].isnan().any()
    assert out[7, 1].isnan().any()
    assert out[5, 1, 11].isnan().all()
    out[3, 0], out[7, 1], out[5, 1, 11] = want[0][3, 0], want[0][7, 1], want[0][5, 1, 11]
    lse[3, :, 0], lse[7, :, 1], lse[5, 11, 1] = want[1][3, :, 0], want[1][7, :, 1], want[1][5, 11, 1]
    assert same_bits((out, lse), want)


@pytest.mark.parametrize("sink", SINKS)
def test_sinks(sink: str) -> None:
    for second, splits in (("none", 1), ("listed", 1), ("listed", 3), ("dense", 4)):
        call = make(b=4, heads=100, second=second, sink=sink, num_splits=splits)
        out, lse = check(call)
        call.sink = None
        assert same_bits((run(call)[1],), (lse,))
        if sink == "plus":
            assert not out.any()
        if sink == "minus":
            assert same_bits((run(call)[0],), (out,))


@pytest.mark.parametrize("kv_format", [FP8, BF16])
def test_one_key_is_copied(kv_format: str) -> None:
    """Every code with every scale whose product is a normal bf16 number, and any normal bf16 value, bit for bit."""
    pool, g = Pool(kv_format, 4, 64), generator(1)
    slots = torch.arange(256, device=decode_cases.DEVICE)
    sign = torch.randint(0, 2, (256, 512), device=decode_cases.DEVICE, generator=g) << 15
    words = (torch.randint(1 << 7, 254 << 7, sign.shape, device=decode_cases.DEVICE, generator=g) | sign).short()
    data = words.view(torch.uint8)
    if kv_format == FP8:
        codes = (torch.arange(448, device=decode_cases.DEVICE) + slots[:, None]) % 256
        codes[codes % 128 == 127] = 0
        data = torch.cat([codes.to(torch.uint8), data[:, :128]], dim=1)
    scales = (10 + (slots[:, None] + 31 * torch.arange(8, device=decode_cases.DEVICE)) % 237).to(torch.uint8)
    pool.write(slots, data, scales)
    call = Call(torch.zeros(256, 1, 16, 512, device=decode_cases.DEVICE).bfloat16(), pool, slots.int()[:, None, None])
    out, lse = run(call)
    assert torch.equal(out.double(), pool.read(slots)[:, None, None].expand(256, 1, 16, 512))
    assert not lse.any()


@pytest.mark.parametrize("second", SECOND)
@pytest.mark.parametrize("topk", [64, 128, 1024])
def test_equal_weights_give_the_exact_mean(topk: int, second: str) -> None:
    """Queries of zero, small integers as values and a power of two of them: nothing is rounded on the way to bf16."""
    call = make(b=3, s_q=2, heads=64, topk=topk, second=second, extra_topk=topk, bad=0.0, sink="none", num_splits=1)
    for pool in filter(None, (call.pool, call.extra)):
        codes = torch.randint(0x38, 0x44, pool.data.shape, device=decode_cases.DEVICE, generator=generator(topk))
        # rope: 1 or -1
        codes[..., 449::2] = codes[..., 449::2] % 2 * 0x80 + 0x3F
        codes[..., 448::2] = 0x80
        pool.data.copy_(codes)
        pool.scales[..., :7] = 127 + pool.scales[..., :7] % 3
    if second == "dense":
        call.visible = torch.full(call.rows, topk, dtype=torch.int32, device=decode_cases.DEVICE)
    call.q.zero_()
    out, lse = run(call)
    want, want_lse = call.expected()
    assert torch.equal(out, want.bfloat16())
    assert torch.allclose(lse.double(), want_lse, rtol=1e-6, atol=0)


@pytest.mark.parametrize("order", ["rising", "falling", "random"])
def test_scores_far_apart(order: str) -> None:
    """Scores from -3000 to 3000, exact in fp32, whose largest comes first or last: no exponential may overflow."""
    n = 512
    ranks = torch.arange(-n, n, device=decode_cases.DEVICE)
    if order == "random":
        ranks = ranks[torch.randperm(2 * n, device=decode_cases.DEVICE, generator=generator(1))]
    call = make(b=2, heads=64, topk=n, second="listed", extra_topk=n, bad=0.0)
    for part, name in ((ranks[:n], "indices"), (ranks[n:], "extra_indices")):
        pool = call.pool if name == "indices" else call.extra
        assert pool is not None
        slots = torch.arange(n, device=decode_cases.DEVICE)
        setattr(call, name, slots.int().expand(2, 1, n).contiguous())
        pool.put(slots)
        # two values of the rope part, which is bf16
        row = pool.data[slots // 64, slots % 64]
        row[:, 448:].view(torch.bfloat16)[:, 0] = torch.div(part, 16, rounding_mode="floor").bfloat16()
        row[:, 448:].view(torch.bfloat16)[:, 1] = (part % 16).bfloat16()
        pool.data[slots // 64, slots % 64] = row
    call.q.zero_()
    call.q[..., 448], call.q[..., 449] = 16.0, 1.0
    call.q[:, :, ::3] *= 0.25
    call.scale = 2.0**-2 * 23
    if order == "falling":
        call.q.neg_()
    for splits in (1, 4):
        check(call, num_splits=splits)


@pytest.mark.parametrize("scale", [1.0, 1e-3, 0.0])
def test_scales(scale: float) -> None:
    call = make(second="listed")
    call.scale = scale
    check(call)
