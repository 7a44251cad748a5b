# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from cute_kernels import formats
from cute_kernels.compat import deep_gemm
from cute_kernels.runtime.record import record_calls
from tests.compat.agreement import bits
from tests.indexer.meaning import NEG_INF, Case, paged

INT = torch.int32
FP8, MXFP4, WIDE = formats.INDEXER_FP8, formats.INDEXER_MXFP4, formats.INDEXER_MXFP4_WIDE
CONTIGUOUS = [FP8, MXFP4]


def same(got: torch.Tensor, want: np.ndarray) -> None:
    """Bitwise equality of fp32."""
    assert got.dtype == torch.float32
    np.testing.assert_array_equal(got.numpy().view(np.int32), np.ascontiguousarray(want).view(np.int32))


def ids(fmt: Any) -> str:
    return str(fmt.id)


def int32(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=INT)


class Ranges:
    """Query rows over ranges of contiguous keys."""

    def __init__(self, fmt: Any) -> None:
        self.case = Case(fmt.id, 5, 3, 21, seed=1)
        self.start, self.end = [0, 4, 20, 7, 9], [21, 9, 21, 7, 30]
        q = self.case.query()
        self.args = (
            q if self.case.mxfp4 else (q, None),
            self.case.kv(),
            self.case.w(),
            int32(self.start),
            int32(self.end),
        )

    def plain(self) -> np.ndarray:
        want = np.full((5, 21), NEG_INF)
        for m in range(5):
            columns = slice(self.start[m], min(self.end[m], 21))
            want[m, columns] = self.case.scores[m, columns]
        return want

    def compressed(self, width: int) -> np.ndarray:
        want = np.full((5, width), NEG_INF)
        for m in range(5):
            for j in range(min(width, min(self.end[m], 21) - self.start[m])):
                want[m, j] = self.case.scores[m, self.start[m] + j]
        return want


@pytest.mark.parametrize("fmt", CONTIGUOUS, ids=ids)
def test_contiguous_keys(fmt: Any) -> None:
    ranges = Ranges(fmt)
    same(deep_gemm.fp8_fp4_mqa_logits(*ranges.args), ranges.plain())
    same(deep_gemm.fp8_fp4_mqa_logits(*ranges.args, True, 6), ranges.compressed(6))
    unclean = deep_gemm.fp8_fp4_mqa_logits(*ranges.args, clean_logits=False, logits_dtype=torch.float32).numpy()
    inside = ranges.plain() != NEG_INF
    np.testing.assert_array_equal(unclean[inside], ranges.plain()[inside])


def test_contiguous_keys_by_the_fp8_name() -> None:
    ranges = Ranges(FP8)
    (q, _), *rest = ranges.args
    logits = deep_gemm.fp8_mqa_logits(q, *rest)
    same(logits, ranges.plain())
    assert logits.stride(0) * 4 % 1024 == 0
    same(deep_gemm.fp8_mqa_logits(q, *rest, max_seqlen_k=6), ranges.compressed(6))


class Pages:
    """Decode rows over paged keys; `lengths` are the lengths of the requests' contexts, in keys."""

    def __init__(self, fmt: Any, lengths: tuple[int, ...] = (11, 3, 0, 6), next_n: int = 3, rows: int = 4) -> None:
        self.fmt, self.lengths, self.next_n = fmt, lengths, next_n
        keys = sum(lengths)
        self.case = Case(fmt.id, len(lengths) * next_n, 3, keys, seed=2)
        self.pool, self.table = paged(self.case, fmt, list(lengths), rows)
        q = self.case.query(slice(None), len(lengths), next_n)
        self.q = q if self.case.mxfp4 else (q, None)

    def args(self, context_lens: Any, columns: int) -> tuple[Any, ...]:
        return self.q, self.pool.unsqueeze(2), self.case.w(), int32(context_lens), self.table, None, columns

    def expect(self, visible: Any, columns: int) -> np.ndarray:
        """visible [B][next_n]: keys each row sees."""
        want, first = np.full((len(self.lengths) * self.next_n, columns), NEG_INF), 0
        for b, length in enumerate(self.lengths):
            for j in range(self.next_n):
                row, n = b * self.next_n + j, max(visible[b][j], 0)
                want[row, :n] = self.case.scores[row, first : first + n]
            first += length
        return want


@pytest.mark.parametrize("fmt", [FP8, MXFP4, WIDE], ids=ids)
def test_a_length_per_row(fmt: Any) -> None:
    pages = Pages(fmt)
    visible = [[11, 2, 7], [3, 0, 1], [0, 0, -4], [6, 6, 5]]
    same(deep_gemm.fp8_fp4_paged_mqa_logits(*pages.args(visible, 13), True), pages.expect(visible, 13))


@pytest.mark.parametrize("next_n", [1, 2, 3])
@pytest.mark.parametrize("fmt", [FP8, MXFP4], ids=ids)
def test_a_length_per_request_grows_by_one_key_per_row(fmt: Any, next_n: int) -> None:
    pages = Pages(fmt, next_n=next_n)
    visible = [[length - next_n + j + 1 for j in range(next_n)] for length in pages.lengths]
    got = deep_gemm.fp8_fp4_paged_mqa_logits(*pages.args(list(pages.lengths), 13), clean_logits=True)
    same(got, pages.expect(visible, 13))


def test_the_smallest_length_sees_nothing() -> None:
    pages = Pages(FP8, (4,), next_n=2)
    got = deep_gemm.fp8_fp4_paged_mqa_logits(*pages.args([torch.iinfo(INT).min], 6), True)
    assert (got == -torch.inf).all()


def test_paged_keys_by_the_fp8_name() -> None:
    pages = Pages(FP8)
    (q, _), *rest = pages.args(list(pages.lengths), 13)
    visible = [[length - 2 + j for j in range(3)] for length in pages.lengths]
    rest[4] = deep_gemm.get_paged_mqa_logits_metadata(rest[2], 4, 132)
    same(deep_gemm.fp8_paged_mqa_logits(q, *rest, clean_logits=True), pages.expect(visible, 13))
    unclean = deep_gemm.fp8_paged_mqa_logits(q, *rest)
    inside = torch.from_numpy(pages.expect(visible, 13) != NEG_INF)
    assert torch.equal(bits(unclean[inside]), bits(torch.from_numpy(pages.expect(visible, 13))[inside]))


@pytest.mark.parametrize("shape", [(4,), (4, 2)])
def test_the_schedule_has_the_shape_of_deep_gemm(shape: tuple[int, ...]) -> None:
    schedule = deep_gemm.get_paged_mqa_logits_metadata(torch.ones(shape, dtype=INT), 64, 78)
    assert (schedule.dtype, tuple(schedule.shape)) == (INT, (79, 2))
    assert not schedule.any()
    assert deep_gemm.get_paged_mqa_logits_metadata(torch.ones(shape, dtype=INT), 64, 1).shape == (2, 2)


LENGTHS = torch.ones(4, dtype=INT)


@pytest.mark.parametrize(
    ("name", "change", "argument", "error"),
    [
        ("fp8_fp4_paged_mqa_logits", {"indices": LENGTHS}, "indices", NotImplementedError),
        ("fp8_fp4_paged_mqa_logits", {"logits_dtype": torch.bfloat16}, "logits_dtype", NotImplementedError),
        ("fp8_fp4_paged_mqa_logits", {"clean_logits": 64}, "clean_logits", TypeError),
        ("fp8_fp4_paged_mqa_logits", {"q": LENGTHS}, "q", TypeError),
        ("fp8_fp4_paged_mqa_logits", {"q": (LENGTHS, None)}, r"q\[0\]", TypeError),
        ("fp8_fp4_paged_mqa_logits", {"context_lens": LENGTHS.float()}, "context_lens", TypeError),
        ("fp8_fp4_mqa_logits", {"logits_dtype": torch.bfloat16}, "logits_dtype", NotImplementedError),
        ("fp8_fp4_mqa_logits", {"clean_logits": 64}, "clean_logits", TypeError),
        ("fp8_mqa_logits", {"clean_logits": 64}, "clean_logits", TypeError),
        ("fp8_paged_mqa_logits", {"indices": LENGTHS}, "indices", NotImplementedError),
        ("get_paged_mqa_logits_metadata", {"indices": LENGTHS}, "indices", NotImplementedError),
        ("get_paged_mqa_logits_metadata", {"num_sms": 0}, "num_sms", ValueError),
        ("get_paged_mqa_logits_metadata", {"context_lens": LENGTHS.float()}, "context_lens", TypeError),
    ],
)
def test_what_is_refused(name: str, change: dict[str, Any], argument: str, error: type[Exception]) -> None:
    if "metadata" in name:
        args: dict[str, Any] = {"context_lens": LENGTHS, "block_kv": 64, "num_sms": 8}
    elif "paged" in name:
        names = ("q", "kv_cache", "weights", "context_lens", "block_table", "schedule_meta", "max_context_len")
        args = dict(zip(names, Pages(FP8).args([1, 1, 0, 1], 5), strict=True))
    else:
        names = ("q", "kv", "weights", "cu_seq_len_k_start", "cu_seq_len_k_end")
        args = dict(zip(names, Ranges(FP8).args, strict=True))
    if "fp4" not in name and "q" in args:
        args["q"] = args["q"][0]
    with pytest.raises(error, match=f"{name}: {argument}: "), record_calls() as record:
        getattr(deep_gemm, name)(**args | change)
    assert not record.calls


def test_scales_of_fp8_codes_are_refused() -> None:
    (q, _), *rest = Ranges(FP8).args
    with pytest.raises(NotImplementedError, match=r"fp8_fp4_mqa_logits: q\[1\]: .*weights"):
        deep_gemm.fp8_fp4_mqa_logits((q, torch.ones(5, 3, dtype=INT)), *rest)


@pytest.mark.full
def test_compiles() -> None:
    pages = Pages(MXFP4)
    call = torch.compile(deep_gemm.fp8_fp4_paged_mqa_logits, fullgraph=True, backend="aot_eager", dynamic=True)
    args = pages.args(list(pages.lengths), 13)
    same(call(*args, clean_logits=True), deep_gemm.fp8_fp4_paged_mqa_logits(*args, clean_logits=True).numpy())
