# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from cute_kernels import formats
from cute_kernels.compressor.ops import save_partial_states
from cute_kernels.runtime.record import record_calls
from tests import helpers

INT64 = torch.iinfo(torch.int64)


def inputs(head_dim: int = 512, ratio: int = 4, rows: int = 4, n: int = 9, seed: int = 0) -> dict[str, Any]:
    """Arguments of a call: kv and score are column slices of one wide matrix; some slots are out of range."""
    width = head_dim * (2 if ratio == 4 else 1)
    g = helpers.generator(seed)
    kv_score = torch.randn(n + 2, 2 * width, generator=g)
    kv, score = kv_score[:n].split(width, dim=1)
    pages = 7
    slots = torch.randperm(pages * rows, generator=g)[: n - 1]
    bad = torch.tensor([-1, pages * rows, INT64.min, INT64.max, -5])
    slots[1 : n - 1 : 2] = bad.repeat(n)[: len(slots[1 : n - 1 : 2])]
    positions = torch.randint(0, 1_000_000, (n,), generator=g)
    return {
        "kv": kv,
        "score": score,
        "ape": torch.randn(ratio, width, generator=g),
        "positions": positions,
        "state_cache": helpers.poisoned_pool(formats.compressor_state(head_dim, ratio), pages, rows, 64),
        "slot_mapping": slots,
        "block_size": rows,
        "state_width": width,
        "compress_ratio": ratio,
    }


def expected_bytes(a: dict[str, Any]) -> torch.Tensor:
    """Every byte behind the state cache after the call, by a loop over rows."""
    cache = a["state_cache"]
    raw = helpers.raw_bytes(cache).clone().numpy()
    width, rows = a["state_width"], a["block_size"]
    for t, slot in enumerate(a["slot_mapping"].tolist()):
        if not 0 <= slot < cache.shape[0] * rows:
            continue
        offset = cache.storage_offset() * 4 + (slot // rows) * cache.stride(0) * 4 + (slot % rows) * 8 * width
        bias = a["ape"].numpy()[int(a["positions"][t]) % a["compress_ratio"]]
        row = np.concatenate([a["kv"][t].numpy(), a["score"][t].numpy() + bias]).astype("<f4")
        raw[offset : offset + 8 * width] = row.view(np.uint8)
    return torch.from_numpy(raw)


def check(a: dict[str, Any]) -> None:
    want = expected_bytes(a)
    save_partial_states(**a)
    assert torch.equal(helpers.raw_bytes(a["state_cache"]), want)


@pytest.mark.parametrize(("head_dim", "ratio", "rows"), [(512, 4, 4), (512, 128, 8), (128, 4, 4), (128, 4, 3)])
def test_bytes(head_dim: int, ratio: int, rows: int) -> None:
    check(inputs(head_dim, ratio, rows))


def test_view_of_a_larger_pool() -> None:
    a = inputs()
    pool = torch.full((3, 7, 9000), 7.0)
    a["state_cache"] = pool[1].as_strided((7, 4, 2048), (9000, 2048, 1), pool[1].storage_offset() + 16)
    check(a)


def test_every_bit_is_copied() -> None:
    a = inputs()
    bits = torch.tensor([0x7FC00001, -0x80000000, 1, 0x7F800000, 0x7FA55555], dtype=torch.int32)
    a["kv"][:] = bits.repeat(a["kv"].numel())[: a["kv"].numel()].view(torch.float32).view(a["kv"].shape)
    save_partial_states(**a)
    slot = int(a["slot_mapping"][0])
    stored = a["state_cache"][slot // 4, slot % 4, :1024].view(torch.int32)
    assert torch.equal(stored, a["kv"][0].contiguous().view(torch.int32))


def test_negative_positions_take_the_bias_modulo_the_ratio() -> None:
    a = inputs()
    a["positions"] -= 500_000
    check(a)


def test_no_rows() -> None:
    a = inputs()
    a["slot_mapping"] = a["slot_mapping"][:0]
    check(a)
    a["kv"], a["score"], a["positions"] = a["kv"][:0], a["score"][:0], a["positions"][:0]
    check(a)


def test_all_rows_skipped() -> None:
    a = inputs()
    a["slot_mapping"].fill_(-1)
    check(a)


def test_pages_beyond_two_gigabytes() -> None:
    a = inputs(128, n=3)
    stride = 600_000_000
    # Reserved, not touched: only the two rows written below ever become real memory.
    a["state_cache"] = torch.empty(stride + 4 * 512).as_strided((2, 4, 512), (stride, 512, 1))
    a["slot_mapping"] = torch.tensor([6, 1])
    save_partial_states(**a)
    score = a["score"] + a["ape"][a["positions"] % 4]
    assert torch.equal(a["state_cache"][1, 2], torch.cat([a["kv"][0], score[0]]))
    assert torch.equal(a["state_cache"][0, 1], torch.cat([a["kv"][1], score[1]]))


def schema_args(a: dict[str, Any]) -> list[Any]:
    names = ("kv", "score", "ape", "positions", "state_cache", "slot_mapping", "block_size", "compress_ratio")
    return [a[n] for n in names]


def test_op_registration() -> None:
    helpers.check_op("save_partial_states", *schema_args(inputs(128)))


def test_compiles_with_dynamic_shapes() -> None:
    compiled = torch.compile(save_partial_states, backend="aot_eager", fullgraph=True, dynamic=True)
    for n in (9, 6):
        a = inputs(128, n=n)
        want = expected_bytes(a)
        compiled(*a.values())
        assert torch.equal(helpers.raw_bytes(a["state_cache"]), want)


def test_cost() -> None:
    a = inputs()
    a["slot_mapping"][-1] = 0  # a slot like others
    with record_calls() as recording:
        save_partial_states(**a)
    rows = int((a["slot_mapping"] >= 0).sum())
    assert recording.calls[0].cost.flops == rows * 1024
    assert recording.calls[0].cost.bytes == rows * (16 * 1024 + 8) + 4 * 4 * 1024 + 8 * len(a["slot_mapping"])


@pytest.mark.parametrize(
    ("argument", "value", "error"),
    [
        ("kv", torch.zeros(9, 1024, dtype=torch.bfloat16), TypeError),
        ("kv", None, TypeError),
        ("score", torch.zeros(8, 1024), ValueError),
        ("score", torch.zeros(1024, 9).t(), ValueError),
        ("ape", torch.zeros(128, 1024), ValueError),
        ("positions", torch.zeros(9, dtype=torch.int32), TypeError),
        ("positions", torch.zeros(7, dtype=torch.int64), ValueError),
        ("state_cache", torch.zeros(7, 4, 1024), ValueError),
        ("state_cache", torch.zeros(7, 8, 2048), ValueError),
        ("state_cache", torch.zeros(7, 4, 2048, dtype=torch.float64), TypeError),
        ("slot_mapping", torch.zeros(10, dtype=torch.int64), ValueError),
        ("slot_mapping", torch.zeros(9, dtype=torch.int32), TypeError),
        ("block_size", 0, ValueError),
        ("state_width", 512, ValueError),
        ("compress_ratio", 2, ValueError),
    ],
)
def test_bad_arguments(argument: str, value: Any, error: type[Exception]) -> None:
    a = inputs()
    a[argument] = value
    with pytest.raises(error, match=f"save_partial_states: {argument}: expected"):
        save_partial_states(**a)


@pytest.mark.parametrize("width", [1000, 512, 2048])
def test_a_width_that_is_no_head_size(width: int) -> None:
    a = inputs()
    a["kv"], a["state_width"] = torch.zeros(9, width), width
    with pytest.raises(ValueError, match="save_partial_states: kv: expected 1024 or 256 columns"):
        save_partial_states(**a)
