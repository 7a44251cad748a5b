# SPDX-License-Identifier: Apache-2.0
"""What holds for all index builders: they never wait for the device, and recordings know what they move."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from cute_kernels.indices import ops, reference
from cute_kernels.runtime.ops import OPS
from cute_kernels.runtime.record import record_calls
from tests.indices import test_c128a, test_combine, test_decode_swa, test_global_topk, test_mixed
from tests.indices.batches import poisoned

CALLS: dict[str, tuple[Callable[[], dict[str, Any]], tuple[torch.Tensor, ...]]] = {
    "compute_decode_swa_indices": (
        lambda: {**test_decode_swa.small_call(), "window_size": 128},
        (poisoned(6, 1, 128), poisoned(6)),
    ),
    "compute_global_topk_indices_and_lens": (test_global_topk.small_call, (poisoned(4, 4), poisoned(4))),
    "build_c128a_topk_metadata": (test_c128a.small_call, ()),
    "combine_topk_swa_indices": (test_combine.small_call, (poisoned(10, 256), poisoned(10))),
    "build_flashinfer_mixed_sparse_indices": (test_mixed.small_call, (poisoned(13, 136), poisoned(13))),
}


@pytest.mark.parametrize("name", CALLS)
def test_reference_reads_no_data_on_the_host(name: str) -> None:
    """Fake tensors have no data: reading a value, or a shape that depends on one, raises."""
    call, outputs = CALLS[name]
    with FakeTensorMode() as mode:
        args = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in (*call().values(), *outputs)]
        getattr(reference, name)(OPS[name].call_type(*args))


@pytest.mark.parametrize(
    ("name", "moved"),
    [
        # positions, requests, valid flags, the table, which has fewer pages than three a row, slots and lengths
        ("compute_decode_swa_indices", 6 * 8 + 6 * 4 + 6 + 2 * 5 * 4 + 6 * 128 * 4 + 6 * 4),
        # picks in and out, lengths, requests and flags, the table, which has fewer pages than two a row
        ("compute_global_topk_indices_and_lens", 2 * 64 + 16 + 4 * 5 + 2 * 2 * 4),
        # positions; request, slot and length of decode rows; all columns; pages of 200, 2 and 1 entries
        ("build_c128a_topk_metadata", 5 * 8 + 3 * (4 + 8 + 4) + 5 * 256 * 4 + (100 + 1 + 1) * 4),
        # picks, batch, table and lengths
        ("combine_topk_swa_indices", 10 * 8 * 4 + (6 + 5 + 5) * 4 + 10 * 256 * 4 + 10 * 4),
        # decode inputs, batch, results; three window pages and six picks of ten rows; the table of entries, which has
        # fewer pages than there are entries
        (
            "build_flashinfer_mixed_sparse_indices",
            3 * 128 * 4 + 15 * 4 + 9 * 4 + 13 * 137 * 4 + (10 * 3 + 60) * 4 + 4 * 9 * 4,
        ),
    ],
)
def test_recorded_bytes(name: str, moved: int) -> None:
    call, _ = CALLS[name]
    with record_calls() as recording:
        getattr(ops, name)(**call())
    (entry,) = recording.calls
    assert (entry.op, entry.implementation, entry.cost.bytes, entry.cost.flops) == (name, "reference", moved, 0)
