# SPDX-License-Identifier: Apache-2.0
"""The kernels of the index builders on a GPU: every integer, against the CPU implementations and against loops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from cute_kernels.runtime import compile as compile_
from cute_kernels.runtime.ops import FALLBACK_VARIABLE, Op
from cute_kernels.runtime.record import record_calls
from cute_kernels.runtime.registry import all_ops
from cute_kernels.runtime.verify import Example, clone_arguments, examples_of, verify_op
from tests.compressor import test_compressed_slots
from tests.indices import test_c128a, test_combine, test_decode_swa, test_global_topk, test_mixed, test_step

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

NAMES = (
    "build_c128a_topk_metadata",
    "build_flashinfer_mixed_sparse_indices",
    "build_step_metadata",
    "combine_topk_swa_indices",
    "compute_decode_swa_indices",
    "compute_global_topk_indices_and_lens",
    "get_compressed_slot_mapping",
)
CUDA = torch.device("cuda")
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def no_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FALLBACK_VARIABLE, raising=False)


def examples(op: Op) -> list[Example]:
    found = examples_of(op)
    assert found is not None
    return list(found())


def check(name: str, *args: Any) -> None:
    """The kernel on these (CPU) arguments: all memory behind them, gaps included, as the reference leaves it."""
    verdict = verify_op(all_ops()[name], CUDA, lambda: [Example(name, args)])
    assert (verdict.status, verdict.detail) == ("pass", "")


@pytest.mark.parametrize("name", NAMES)
def test_examples(name: str) -> None:
    op = all_ops()[name]
    verdict = verify_op(op, CUDA)
    assert (verdict.status, verdict.cases, verdict.detail) == ("pass", len(examples(op)), "")


@pytest.mark.parametrize(
    "meaning",
    [
        test_c128a.test_against_loops,
        test_c128a.test_every_entry_at_full_context_and_default_width,
        test_combine.test_against_loops,
        test_combine.test_nothing_points_outside_its_region,
        test_combine.test_rows_beyond_int32_cannot_be_named,
        test_decode_swa.test_against_loops,
        test_decode_swa.test_pages_without_an_int32_slot_are_unmapped,
        test_global_topk.test_against_loops,
        test_global_topk.test_pages_without_an_int32_slot_are_unmapped_and_not_counted,
        test_mixed.test_against_loops,
        test_mixed.test_pages_without_an_int32_slot_are_unmapped,
        test_step.test_numbers_that_only_the_device_knows,
        test_step.test_lists_of_c128a,
        test_step.test_longest_contexts,
        test_compressed_slots.test_against_integer_loops,
        test_compressed_slots.test_long_contexts_need_64_bits,
        test_compressed_slots.test_bad_data_stays_inside,
    ],
    ids=lambda meaning: f"{meaning.__module__.rpartition('.')[2]}-{meaning.__name__}",
)
def test_meaning(meaning: Callable[[], None]) -> None:
    """What the ops' tests on the CPU ask, asked of the kernels."""
    with CUDA:
        meaning()


@pytest.mark.parametrize("name", NAMES)
def test_shapes_and_strides_need_no_new_kernel(name: str) -> None:
    op = all_ops()[name]
    calls = examples(op)
    for example in calls:
        op.overload(*clone_arguments(example.args, CUDA))
    before = compile_.compilations()
    for example in calls:
        op.overload(*clone_arguments(example.args, CUDA))
    assert compile_.compilations() == before


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_tables_and_outputs_beyond_two_gigabytes() -> None:
    """Rows more than 2^31 bytes apart, on both sides."""
    gap = 2**29 + 4
    wide_table = torch.full((2 * gap + 64,), -1, dtype=torch.int32, device=CUDA)
    wide_out = torch.full((2 * gap + 512,), 7, dtype=torch.int32, device=CUDA)
    table = wide_table.as_strided((3, 8), (gap, 1))
    out = wide_out.as_strided((3, 512), (gap, 1))
    table.copy_(torch.arange(24, dtype=torch.int32).view(3, 8))
    picks = torch.randint(0, 512, (3, 512), generator=torch.Generator().manual_seed(0)).int()
    requests, valid, lens = ints(2, 0, 1), torch.ones(3, dtype=torch.bool), ints(0, 0, 0)
    op = all_ops()["compute_global_topk_indices_and_lens"]
    gpu_lens = lens.to(CUDA)
    op.overload(picks.to(CUDA), requests.to(CUDA), table, 64, valid.to(CUDA), out, gpu_lens)
    want = torch.empty(3, 512, dtype=torch.int32)
    op.overload(picks, requests, table.cpu(), 64, valid, want, lens)
    assert torch.equal(out.cpu(), want)
    assert torch.equal(gpu_lens.cpu(), lens)
    out.fill_(7)
    assert bool((wide_out == 7).all())


@pytest.mark.parametrize("requests", [1, 31, 32, 33, 992, 1023, 1024, 4099])
def test_every_boundary_between_requests(requests: int) -> None:
    """Rows of any number of requests, with one, two and no rows each, and of requests that are all empty."""
    g = torch.Generator().manual_seed(requests)
    for queries in (
        torch.randint(0, 3, (requests,), generator=g),
        torch.ones(requests, dtype=torch.int64),
        torch.zeros(requests, dtype=torch.int64),
        (torch.arange(requests) == requests - 1) * 5,
    ):
        starts = torch.cat([torch.zeros(1, dtype=torch.int64), queries.cumsum(0)]).int()
        rows = int(starts[-1]) + 3
        seq_lens = (queries + torch.randint(0, 300, (requests,), generator=g)).int()
        picks = torch.randint(-1, 80, (rows, 8), generator=g).int()
        out, lens = torch.full((rows, 128), 7, dtype=torch.int32), torch.full((rows,), 7, dtype=torch.int32)
        check("combine_topk_swa_indices", picks, starts, seq_lens, seq_lens, 4, 4, 8, 999, 80, out, lens)
        table = torch.randint(-1, 2**20, (requests, 7), generator=g).int()
        slots = torch.full((rows + 40,), 7)
        check("get_compressed_slot_mapping", slots, starts, seq_lens, table, None, rows, 16, 4)


def test_positions_up_to_a_million() -> None:
    g = torch.Generator().manual_seed(1)
    positions = torch.randint(2**20 - 300, 2**20, (64,), generator=g)
    requests, valid = torch.arange(64).int(), torch.ones(64, dtype=torch.bool)
    table = torch.randint(0, 2**24, (64, 2**20 // 64), generator=g).int()
    out, lens = torch.zeros(64, 1, 128, dtype=torch.int32), torch.zeros(64, dtype=torch.int32)
    check("compute_decode_swa_indices", positions, requests, valid, table, 64, 128, out, lens)
    buffer, local = torch.zeros(64, 8192, dtype=torch.int32), torch.zeros(0, 8192, dtype=torch.int32)
    check("build_c128a_topk_metadata", positions, 128, 64, requests, table, 2, positions, buffer, lens, local, 8192)


def test_empty_tensors_may_have_any_strides() -> None:
    found = 0
    for name in NAMES:
        for example in examples(all_ops()[name]):
            empty = [isinstance(x, torch.Tensor) and x.numel() == 0 for x in example.args]
            if any(empty):
                found += 1
                pairs = zip(example.args, empty, strict=True)
                odd = [_with_odd_strides(x) if is_empty else x for x, is_empty in pairs]
                on_gpu = clone_arguments(odd, CUDA)
                with record_calls() as recording:
                    all_ops()[name].overload(*on_gpu)
                assert [call.implementation for call in recording.calls] == ["kernel"]
                all_ops()[name].overload(*odd)
                for got, want in zip(on_gpu, odd, strict=True):
                    assert not isinstance(want, torch.Tensor) or torch.equal(got.cpu(), want)
    assert found >= 3


def _with_odd_strides(empty: torch.Tensor) -> torch.Tensor:
    return empty.new_empty(64).as_strided(empty.shape, list(range(5, 5 + 2 * empty.dim(), 2)), 1)


def test_what_the_kernels_do_not_take() -> None:
    op = all_ops()["compute_global_topk_indices_and_lens"]
    table = torch.zeros(1, 2, dtype=torch.int32, device=CUDA)
    nobody, valid = torch.zeros(1, dtype=torch.int32, device=CUDA), torch.ones(1, dtype=torch.bool, device=CUDA)
    with pytest.raises(NotImplementedError, match="a row of block_table must have at most 1073741824 entries"):
        op.overload(table[:, :1], nobody, table, 2**30, valid, table[:, :1].clone(), nobody.clone())
