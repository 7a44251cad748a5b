# SPDX-License-Identifier: Apache-2.0
"""sparse_mla_decode over records of V4.1's own formats on a GPU, against float64; what stores them, byte for byte."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from cute_kernels import formats
from cute_kernels.compressor.ops import rope_quant_insert
from cute_kernels.kv_cache.ops import (
    dequantize_and_gather_k_cache,
    fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert,
)
from cute_kernels.runtime import compile as compile_
from cute_kernels.runtime.arch import multiprocessors
from cute_kernels.sparse_mla import select
from cute_kernels.sparse_mla.hopper.decode_swap_ab import DecodeSwapAbKey
from tests import oracle
from tests.gpu.ahead import compile_ahead
from tests.gpu.decode_cases import (
    DEVICE,
    LARGEST,
    Call,
    Pool,
    check,
    check_constant_lists,
    fill,
    generator,
    int32,
    make,
    run,
)
from tests.gpu.decode_checks import BF16, FP8, MXFP8, MXFP8_SPLIT, NVFP4, NVFP4_SPLIT, assert_near, same_bits
from tests.helpers import poisoned_pool, raw_bytes, spread

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="kernels are Hopper's"
    ),
]

PAIRS = [(FP8, NVFP4), (FP8, MXFP8), (MXFP8, MXFP8), (MXFP8, NVFP4), (MXFP8, FP8)]
SPLIT_PAIRS = [(FP8, NVFP4_SPLIT), (MXFP8_SPLIT, MXFP8_SPLIT), (MXFP8_SPLIT, NVFP4_SPLIT)]
HEADS = (8, 16, 32, 64)


@pytest.mark.parametrize(("first", "second"), PAIRS)
@pytest.mark.parametrize("heads", HEADS)
def test_decode(heads: int, first: str, second: str) -> None:
    """Two rounds of the grid and few rows, odd pages, bad slots, lengths around tiles, rows in splits."""
    both: dict[str, Any] = {"kv_format": first, "extra_format": second, "second": "listed", "heads": heads}
    calls: tuple[tuple[int, int, int, int, dict[str, int]], ...] = (
        (5, 1, 64, 32, {"num_splits": 1}),
        (3, 2, 7, 5, {"num_splits": 3}),
        (2, 3, 32, 64, {"split_tokens": 64}),
        (140, 1, 64, 64, {}),
    )
    for b, s_q, rows, extra_rows, splits in calls:
        sizes: dict[str, Any] = {"rows": rows, "extra_rows": extra_rows, "extra_topk": 200 + b, "seed": b}
        check(make(b, s_q, **sizes, **both, lengths="bs", more_stride=528 * (b % 2), **splits))
    check(make(4, topk=0, extra_topk=130, **both))
    check(make(4, heads=heads, kv_format=MXFP8, lengths="b"))


@pytest.mark.parametrize(("first", "second"), SPLIT_PAIRS)
@pytest.mark.parametrize("heads", [8, 64])
def test_split_pages(heads: int, first: str, second: str) -> None:
    """Codes of all rows of a page, then their scales: by slots and by pages, odd pages and strides."""
    both: dict[str, Any] = {"kv_format": first, "extra_format": second, "heads": heads}
    for b, kind, rows, extra_rows, splits in (
        (5, "listed", 64, 32, {"num_splits": 1}),
        (4, "listed", 7, 5, {"num_splits": 3}),
        (140, "listed", 64, 64, {}),
        (5, "dense", 64, 5, {"num_splits": 1}),
    ):
        sizes: dict[str, Any] = {"rows": rows, "extra_rows": extra_rows, "extra_topk": 200 + b, "seed": b}
        check(make(b, 1, second=kind, **sizes, **both, lengths="bs", more_stride=528 * (b % 2), **splits))
    if first != FP8:
        check(make(4, heads=heads, kv_format=first, lengths="b"))


@pytest.mark.parametrize(("first", "second"), PAIRS)
@pytest.mark.parametrize("heads", [8, 64])
def test_block_tables(heads: int, first: str, second: str) -> None:
    """Every entry of a request's pages, of which some are no pages; odd pages, lengths around tiles, rows in splits."""
    both: dict[str, Any] = {"kv_format": first, "extra_format": second, "second": "dense", "heads": heads}
    for b, s_q, rows, extra_rows, splits in ((5, 1, 64, 32, {"num_splits": 1}), (3, 2, 7, 5, {"num_splits": 3})):
        sizes: dict[str, Any] = {"rows": rows, "extra_rows": extra_rows, "extra_topk": 200 + b, "seed": b}
        check(make(b, s_q, **sizes, **both, lengths="bs", **splits))
    check(make(70, extra_topk=130, extra_rows=64, **both))


LISTS = [*((FP8, FP8, kind) for kind in ("none", "listed", "dense")), *((*pair, "listed") for pair in PAIRS[:3])]


@pytest.mark.parametrize(("first", "extra", "second"), LISTS)
@pytest.mark.parametrize("ctas", [1, 2])
@pytest.mark.parametrize("heads", [8, 13])
def test_ctas_share_a_row(
    heads: int, ctas: int, first: str, extra: str, second: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows by one CTA or by two, of which some have nothing: a row alone, and as many as run at once."""
    monkeypatch.setattr(select, "SHARED_CTAS", ctas)
    monkeypatch.setattr(select, "SHARED_ROWS", 1 << 20)
    both: dict[str, Any] = {"kv_format": first, "extra_format": extra, "second": second, "lengths": "bs"}
    for b in (1, multiprocessors(0) // ctas):
        with compile_.record_launches() as launches:
            check(make(b, 1, heads, 500, extra_topk=200, extra_rows=8, seed=b, **both))
        (key, *_), *_ = launches
        assert isinstance(key, DecodeSwapAbKey)
        assert key.ctas == ctas


MANY_LISTS = [
    *((FP8, FP8, kind) for kind in ("none", "listed", "dense")),
    *((*pair, "listed") for pair in PAIRS[:4]),
    (MXFP8, MXFP8, "none"),
]
UNEVEN = ("random", "nothing", "one tile", "one or two tiles", "a long row among empty ones")
"""Lengths of rows that a CTA has one after the other. Of tiles in turn each softmax warpgroup may see every work tile,
or every second one, or the same one again and again."""


@pytest.fixture(scope="module")
def swap_ab_keys() -> None:
    """Keys of the tests below that no deployment has."""
    every = itertools.product((8, 16), MANY_LISTS, (1, 2))
    compile_ahead(DecodeSwapAbKey("sm_90a", heads, kind, *pair, ctas=n) for heads, (*pair, kind), n in every)


@pytest.fixture
def swap_ab(swap_ab_keys: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Up to 16 heads by decode_swap_ab, whatever the rows and formats, and by nothing else."""
    monkeypatch.setattr(select, "GROUP_HEADS", (0,))
    monkeypatch.setattr(select, "SHARED_ROWS", 1 << 20)
    with compile_.record_launches() as launches:
        yield
    assert launches
    assert all(isinstance(key, DecodeSwapAbKey) for key, *_ in launches)


def set_lengths(call: Call, form: str, columns: int) -> None:
    """Lengths of a call of one query a request: see UNEVEN. columns: of the extra list"""
    rows = torch.arange(len(call.q), device=DEVICE)
    turn = rows // multiprocessors(0)  # of a CTA
    window = {
        "nothing": rows * 0,
        "one tile": rows % 64 + 1,
        "one or two tiles": (turn * 7 + rows) % 128 + 1,
        "a long row among empty ones": torch.where(turn % 3 == 2, 128, 0),
    }[form]
    extra = window
    if form != "one or two tiles":
        extra = torch.where((turn % 2 == 1) & (window > 0), columns, 0)
    call.length = window.int()
    if call.extra_indices is not None:
        call.extra_length = extra.int()
    elif call.table is not None:
        call.visible = extra.int()[:, None]
    fill(call)


@pytest.mark.usefixtures("swap_ab")
@pytest.mark.parametrize(("first", "extra", "second"), MANY_LISTS)
@pytest.mark.parametrize("heads", [8, 13, 16])
def test_many_rows_of_a_cta(heads: int, first: str, extra: str, second: str) -> None:
    """Up to six work tiles of a CTA, one after the other, of any lengths; the same bits again and again, in a batch of
    other rows, and one by one."""
    rows = 5 * multiprocessors(0) + 7
    both: dict[str, Any] = {"kv_format": first, "extra_format": extra, "second": second, "extra_topk": 200}
    for form in UNEVEN:
        call = make(rows, 1, heads, extra_rows=8, **both, lengths="bs", seed=heads, num_splits=1)
        if form != "random":
            set_lengths(call, form, both["extra_topk"])
        out, lse = run(call)
        # so many elements: of some, two keys' P are rounded apart by all that bf16 can, where their columns are largest
        assert_near((out, lse), call.expected(), least=LARGEST * 2**-8)
        for _ in range(3):
            assert same_bits(run(call), (out, lse))
        some = torch.randperm(rows, device=DEVICE, generator=generator(7))[: rows // 3]
        for chosen in (some, some[:1]):
            assert same_bits(run(call.take(chosen)), (out[chosen], lse[chosen]))


@pytest.mark.usefixtures("swap_ab")
@pytest.mark.parametrize(("first", "extra", "second"), MANY_LISTS)
@pytest.mark.parametrize("constant", [1, 2])
@pytest.mark.parametrize("heads", [8, 16])
@pytest.mark.parametrize("b", [40, 500])
def test_constant_lists(b: int, heads: int, constant: int, first: str, extra: str, second: str) -> None:
    """Of rows that two CTAs share, and that are several a CTA."""
    both: dict[str, Any] = {"kv_format": first, "extra_format": extra, "second": second}
    check_constant_lists(constant, b=b, heads=heads, extra_rows=2, **both)


@pytest.mark.parametrize("second", [NVFP4, MXFP8, NVFP4_SPLIT, MXFP8_SPLIT])
def test_rows_are_what_their_bytes_say(second: str) -> None:
    """One key a row: the result is the record, whatever its scales are; a NaN in it reaches no other row."""
    fmt = formats.FORMATS[second]
    call = make(64, topk=1, second="listed", extra_topk=1, extra_format=second, extra_rows=32, sink="none")
    assert call.extra is not None
    assert call.extra_indices is not None
    call.extra = Pool(second, 2, 32)
    call.indices.fill_(-1)
    call.extra_indices.copy_(torch.arange(64, device="cuda")[:, None, None])
    codes, scales = (torch.randint(0, 256, (64, n), device="cuda").byte() for n in (fmt.data_bytes, fmt.scale_bytes))
    if call.extra.kind == NVFP4:
        scales[:] = torch.arange(64 * 32, device="cuda").view(64, 32) % 0x7F
        scales[9, 5] = 0x7F
    else:
        codes &= 0xF7  # no NaN among codes
        scales[:] = (torch.arange(64 * 16, device="cuda") % 130 + 20).view(64, 16)
        scales[9, 3] = 0xFF
    call.extra.write(torch.arange(64, device="cuda"), codes, scales)
    call.q.zero_()
    out, _ = run(call)
    want = fmt.dequantize(codes, scales).bfloat16()[:, None, None].expand_as(out)
    assert out[9].isnan().all()  # its logit is NaN
    others = torch.arange(64, device="cuda") != 9
    assert torch.equal(out[others], want[others])


def test_same_rows_in_another_format() -> None:
    """What nvfp4_v41/1 holds gives nearly the same results from plain rows; the same call twice the same bits."""
    call = make(7, 1, 64, topk=128, second="listed", extra_topk=300, extra_format=NVFP4, lengths="b", sink="finite")
    got = check(call)
    assert same_bits(got, run(call))
    assert call.extra is not None
    plain = formats.PLAIN_BF16.allocate(call.extra.pages, call.extra.rows, "cuda")
    slots = torch.arange(call.extra.capacity, device="cuda")
    formats.convert(call.extra.cache, formats.NVFP4_V41, plain, formats.PLAIN_BF16, slots)
    back = formats.PLAIN_BF16.read(plain, call.extra.rows, slots)
    torch.testing.assert_close(back.double(), call.extra.read(slots), rtol=0, atol=0, equal_nan=True)


def test_what_has_no_kernel_says_so() -> None:
    with pytest.raises(NotImplementedError, match="beside fp8_ds_mla/1"):
        run(make(2, second="listed", extra_format=NVFP4, kv_format=BF16))


@pytest.mark.parametrize("kv_format", [FP8, MXFP8, NVFP4, MXFP8_SPLIT, NVFP4_SPLIT])
def test_rope_quant_insert(kv_format: str) -> None:
    """The bytes of the reference: all bf16 numbers, blocks of every size, NaN, zeros; slots outside."""
    fmt, table = formats.FORMATS[kv_format], oracle.cos_sin_table(300)
    every = torch.arange(1 << 16).to(torch.int32).to(torch.int16).view(torch.bfloat16).view(128, 512)
    g = torch.Generator().manual_seed(1)
    mixed = spread((900, 512), 3) * torch.exp2(torch.randint(-40, 20, (900, 1), generator=g).float()).bfloat16()
    mixed[5, 100] = torch.nan
    # every absmax that bf16 has between 2^-12 and 2^12, with quotients around ties of it
    largest = torch.arange(0x3980, 0x4580).to(torch.int16).view(torch.bfloat16)
    share = torch.tensor([1.0, 1 / 24, 1 / 8, 5 / 24, 7 / 24, 5 / 12, 7 / 12, 5 / 6])
    ties = (largest.float()[:, None] * share).bfloat16().repeat(1, 2).view(-1, 512)
    rows = torch.cat([every, mixed, ties, torch.zeros(2, 512).bfloat16()])
    n = len(rows)
    slots = torch.randperm(n + 40, generator=g)[:n]
    slots[3::50] = -1
    positions = torch.randint(0, 150, (n,), generator=g) * 2 + 1
    want = poisoned_pool(fmt, -(-(n + 40) // 32), 32)
    got = poisoned_pool(fmt, want.shape[0], 32, device="cuda")
    rope_quant_insert(rows, positions, table, want, slots, 2, kv_format=kv_format)
    rope_quant_insert(rows.cuda(), positions.cuda(), table.cuda(), got, slots.cuda(), 2, kv_format=kv_format)
    assert torch.equal(raw_bytes(got).cpu(), raw_bytes(want))


@pytest.mark.parametrize("fmt", formats.MXFP8_FORMATS, ids=lambda fmt: fmt.id)
@pytest.mark.parametrize("heads", [0, 8])
def test_window_insert(heads: int, fmt: formats.V41Format) -> None:
    """Queries as beside fp8_ds_mla, records as the reference has them: of many rows, and of few."""
    table, g = oracle.cos_sin_table(300), torch.Generator().manual_seed(1)
    for n in (3, 700):
        kv = spread((n, 512), 3) * torch.exp2(torch.randint(-40, 20, (n, 1), generator=g).float()).bfloat16()
        kv[1, 100] = torch.nan
        q, positions = spread((n, heads, 512), 4), torch.randint(0, 300, (n,), generator=g)
        slots = torch.randperm(n + 40, generator=g)[:n]
        slots[2::50] = -1
        want = poisoned_pool(fmt, -(-(n + 40) // 64), 64)
        got = poisoned_pool(fmt, want.shape[0], 64, device="cuda")
        given = slots, positions, table, 1e-6, 64
        queries = q.cuda()
        on_gpu = (x.cuda() if isinstance(x, torch.Tensor) else x for x in given)
        more = {"apply_q_norm": False, "kv_format": fmt.id}
        fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert(q, kv, want, *given, **more)
        fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert(queries, kv.cuda(), got, *on_gpu, **more)
        assert torch.equal(raw_bytes(got).cpu(), raw_bytes(want))
        assert torch.equal(queries.cpu(), q)


@pytest.mark.parametrize("kv_format", [FP8, MXFP8, NVFP4, MXFP8_SPLIT, NVFP4_SPLIT])
@pytest.mark.parametrize("is_tail", [False, True])
def test_gather(is_tail: bool, kv_format: str) -> None:
    """The reference's values of any bytes: all codes, scales that NaN is among, pages of 7 rows, some of them none."""
    fmt, g = formats.FORMATS[kv_format], torch.Generator().manual_seed(3)
    pool = poisoned_pool(fmt, 50, 7)
    raw_bytes(pool).copy_(torch.randint(0, 256, raw_bytes(pool).shape, generator=g).byte())
    table = torch.randint(-1, 51, (5, 20), generator=g).int()
    lens = torch.tensor([140, 0, 37, -3, 90]).int()
    tails = torch.tensor([33, 5, 40, 1, 90]).int() if is_tail else None
    want = torch.full((6, 150, 512), 7.0).bfloat16()
    got = want.cuda()
    dequantize_and_gather_k_cache(want, pool, lens, tails, table, 7, 4, kv_format=kv_format)
    on_gpu = poisoned_pool(fmt, 50, 7, device="cuda")
    raw_bytes(on_gpu).copy_(raw_bytes(pool))
    tail_lens = None if tails is None else tails.cuda()
    dequantize_and_gather_k_cache(got, on_gpu, lens.cuda(), tail_lens, table.cuda(), 7, 4, kv_format=kv_format)
    torch.testing.assert_close(got.cpu(), want, rtol=0, atol=0, equal_nan=True)


def test_layers_shapes_at_once() -> None:
    """128 + 512 as layers have it, lengths of each row."""
    call = make(66, 1, 64, topk=128, second="listed", extra_topk=512, extra_format=NVFP4, extra_rows=32, lengths="none")
    call.extra_length = int32([512, 0, 300] * 22)
    fill(call)
    check(call)
