"""What the benchmarks promise about themselves, as far as it can be seen without a GPU."""

from __future__ import annotations

import pytest
import torch

from cute_kernels.formats import FP8_DS_MLA
from cute_kernels.kv_cache.ops import quantize_and_insert_k_cache
from cute_kernels.runtime import record
from perf import measure


def insert() -> None:
    quantize_and_insert_k_cache(
        torch.zeros(2, 512, dtype=torch.bfloat16), FP8_DS_MLA.allocate(1, 64), torch.arange(2), 64
    )


def test_a_reference_is_never_timed() -> None:
    with pytest.raises(RuntimeError, match=r"quantize_and_insert_k_cache ran its reference implementation"):
        measure.require_kernel(insert)


def test_a_call_without_ops_is_refused() -> None:
    with pytest.raises(RuntimeError, match="ran no op"):
        measure.require_kernel(lambda: None)


def test_a_kernel_passes() -> None:
    def call() -> None:
        recording = record.active()
        assert recording is not None
        recording.run("some_op", "kernel", record.Cost(), torch.device("cpu"), lambda: None)

    measure.require_kernel(call)


@pytest.mark.parametrize("size", [1, 1600, 10**5, 10**6, 5 * 10**7, 10**9])
def test_sets_leave_the_cache_cold(size: int) -> None:
    sets = measure.number_of_sets(size)
    assert 2 <= sets <= measure.MOST_SETS
    assert sets == measure.MOST_SETS or sets * size >= 3 * measure.L2_BYTES


def test_statistics() -> None:
    timing = measure._timing([float(n) for n in range(21, 0, -1)], sets=3, calls=6)
    assert (timing.median, timing.p10, timing.p90, timing.least, timing.most) == (11.0, 3.0, 19.0, 1.0, 21.0)
    assert (timing.replays, timing.sets, timing.calls_per_replay) == (21, 3, 6)


def test_row_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    timing = measure.Timing(10.0, 9.0, 11.0, 8.0, 12.0, 21, 4, 40)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    row = measure.row("ours", timing, 21_400_000, True)
    assert (row["us"], row["gbs"], row["percent_of_copy"], row["checked"]) == (10.0, 2140.0, 50.0, True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "another GPU")
    assert measure.row("ours", timing, 21_400_000, True)["percent_of_copy"] is None
