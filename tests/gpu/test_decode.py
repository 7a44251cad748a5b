# SPDX-License-Identifier: Apache-2.0
"""The kernels of sparse_mla_decode on a GPU, against float64: shapes, heads, pages, lists and splits."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from tests.gpu import decode_checks
from tests.gpu.decode_cases import check, make
from tests.gpu.decode_checks import BF16, FP8

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

HEADS = (1, 8, 13, 16, 32, 64, 100, 128)
PAGES = (2, 53, 61, 64, 69, 256, 576)
SECOND = ("none", "listed", "dense")


@pytest.fixture(autouse=True, params=decode_checks.KERNELS)
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    decode_checks.use_kernel(request.param, monkeypatch)
    return request.param


@pytest.mark.parametrize("second", SECOND)
@pytest.mark.parametrize("heads", HEADS)
def test_heads(heads: int, second: str) -> None:
    for s_q, splits in ((1, {"num_splits": 1}), (2, {"num_splits": 3}), (3, {})):
        check(make(b=5, s_q=s_q, heads=heads, second=second, extra_rows=2, lengths="bs", seed=heads, **splits))


@pytest.mark.parametrize("second", SECOND)
@pytest.mark.parametrize("b", [1, 2, 31, 66, 131, 132, 133, 265, 321])
def test_batches(b: int, second: str) -> None:
    """Around one and two rounds of the grid, whichever way heads make blocks."""
    for heads in (16, 64, 128):
        check(make(b, heads=heads, topk=100, second=second, extra_topk=70, lengths="b", seed=b))


@pytest.mark.parametrize("s_q", [1, 2, 3, 4])
@pytest.mark.parametrize("lengths", ["none", "b", "bs"])
def test_tokens_of_a_row(lengths: str, s_q: int) -> None:
    for second in SECOND:
        check(make(b=7, s_q=s_q, heads=64, second=second, extra_rows=2, lengths=lengths, seed=s_q))


@pytest.mark.parametrize("more_stride", [0, 576, 576 * 64])
@pytest.mark.parametrize("rows", PAGES)
def test_pages(rows: int, more_stride: int) -> None:
    """All rows of a page are used; the second cache has other pages than the first."""
    other = PAGES[PAGES.index(rows) - 1]
    for second in SECOND:
        check(make(b=3, rows=rows, topk=640, second=second, extra_rows=other, extra_topk=600, more_stride=more_stride))


@pytest.mark.parametrize("topk", [1, 2, 63, 64, 65, 127, 128, 129, 448, 500, 512, 640, 1000, 1024, 2047, 2048])
def test_columns(topk: int) -> None:
    for second, extra_topk in (("none", 0), ("listed", 1), ("listed", 129), ("dense", 130)):
        call = {"topk": topk, "second": second, "extra_topk": extra_topk, "extra_rows": 2}
        check(make(b=2, lengths="none", seed=topk, **call))
        check(make(b=6, lengths="b", seed=topk + 1, heads=8, **call))


@pytest.mark.parametrize("extra_topk", [1, 2, 63, 64, 65, 256, 512, 1000, 1024, 2048])
@pytest.mark.parametrize("second", ["listed", "dense"])
def test_columns_of_the_second_list(second: str, extra_topk: int) -> None:
    for extra_rows in (2, 64):
        call = {"second": second, "extra_topk": extra_topk, "extra_rows": extra_rows}
        check(make(b=3, lengths="none", seed=extra_topk, **call))
        check(make(b=9, s_q=2, lengths="bs", heads=16, topk=64, seed=extra_topk + 1, **call))


SPLITS = (*({"num_splits": n} for n in range(8)), *({"split_tokens": n} for n in (64, 128, 192, 512, 4096)))


@pytest.mark.parametrize("splits", SPLITS, ids=lambda splits: "-".join(map(str, *splits.items())))
def test_splits(splits: dict[str, int]) -> None:
    """More parts than tiles, parts of rows that have fewer tiles than others, and none at all."""
    for b, second in ((1, "none"), (3, "listed"), (40, "dense")):
        for heads, topk in ((64, 128), (13, 300), (128, 64)):
            check(make(b, 2, heads, topk, second=second, extra_topk=500, extra_rows=2, lengths="bs", seed=b, **splits))


@pytest.mark.parametrize("splits", [{"num_splits": 1}, {"num_splits": 4}, {"split_tokens": 128}])
def test_partial_results(splits: dict[str, int]) -> None:
    """fp32 out, without a sink."""
    for heads, second in itertools.product((8, 64, 100), SECOND):
        call = make(b=4, s_q=2, heads=heads, second=second, lengths="bs", sink="none", **splits)
        out, _ = check(call, torch.float32)
        assert (out != out.bfloat16()).any()


@pytest.mark.parametrize(("kv_format", "extra_format"), [(FP8, BF16), (BF16, FP8), (BF16, BF16)])
def test_formats(kv_format: str, extra_format: str) -> None:
    """Caches of other formats than the usual one, and of different ones."""
    formats = {"kv_format": kv_format, "extra_format": extra_format}
    for heads, second, lengths in ((8, "none", "b"), (64, "listed", "bs"), (64, "dense", "none"), (100, "listed", "b")):
        for rows, extra_rows in ((64, 2), (53, 256)):
            check(
                make(
                    b=3, s_q=2, heads=heads, topk=200, rows=rows, second=second, extra_rows=extra_rows,
                    lengths=lengths, more_stride=1152, seed=rows, **formats,
                )
            )  # fmt: skip


@pytest.mark.parametrize(
    ("seed", "formats"),
    [*((seed, (FP8, FP8)) for seed in range(40)), *((seed, (FP8, BF16)) for seed in range(40, 50))],
)
def test_any_call(seed: int, formats: tuple[str, str]) -> None:
    """Everything at random."""
    r = random.Random(seed)
    splits = r.choice([{}, {"num_splits": r.randrange(1, 9)}, {"split_tokens": 64 * r.randrange(1, 6)}])
    check(
        make(
            b=r.choice([1, 2, 5, 17, 70, 140]),
            s_q=r.choice([1, 1, 2, 3, 4]),
            heads=r.choice([*HEADS, r.randrange(1, 129)]),
            topk=r.choice([64, 128, r.randrange(1, 700)]),
            rows=r.choice(PAGES),
            kv_format=formats[0],
            second=r.choice(SECOND),
            extra_topk=r.choice([512, 1024, r.randrange(1, 1200)]),
            extra_rows=r.choice(PAGES),
            extra_format=formats[1],
            lengths=r.choice(["none", "b", "bs"]),
            bad=r.choice([0.0, 0.1, 0.9]),
            sink=r.choice(["none", "mixed", "finite"]),
            more_stride=r.choice([0, 576]) * 8,
            poison=r.choice([0x7F, 0xFF]),
            seed=seed,
            **splits,
        )
    )
