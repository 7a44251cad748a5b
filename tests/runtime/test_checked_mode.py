# SPDX-License-Identifier: Apache-2.0
"""CUTE_KERNELS_CHECK=1 and CUTE_KERNELS_NVTX=1: what they find and show, and that they are off otherwise."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from cute_kernels.runtime import checks, ops, registry
from cute_kernels.runtime.ops import OPS, Op, define_op

ROOT = Path(__file__).parent.parent.parent
validated: list[str] = []
ran: list[str] = []


class FillCall(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor | None
    out: torch.Tensor


def check_fill(call: FillCall) -> None:
    if call.out.shape != call.x.shape:
        raise ValueError("test_checked: out: expected another shape")


def fill(call: FillCall) -> None:
    ran.append("reference")
    call.out.copy_(call.x)


def validate_fill(call: FillCall) -> None:
    validated.append("validate")
    if bool((call.x < 0).any()):
        raise ValueError("test_checked: x[1]: expected a number >= 0")


def define(name: str) -> Any:
    schema = f"{name}(Tensor x, Tensor? y, Tensor(a!) out) -> ()"
    op = define_op(schema, FillCall, check=check_fill, reference=fill, validate=validate_fill)
    del OPS[name]
    return lambda *args: op(FillCall(*args))


plain = define("test_unchecked")
with pytest.MonkeyPatch.context() as patch:
    patch.setattr(ops, "CHECKED", True)
    checked = define("test_checked")
    patch.setattr(ops, "NVTX", True)
    ranged = define("test_ranged")


@pytest.fixture(autouse=True)
def fresh() -> None:
    validated.clear()
    ran.clear()


def test_unchecked_calls_validate_nothing() -> None:
    x = torch.full((3,), -1.0)
    plain(x, None, torch.zeros(3))
    assert (validated, ran) == ([], ["reference"])


def test_data_is_validated_before_anything_runs() -> None:
    out = torch.zeros(3)
    checked(torch.ones(3), None, out)
    assert (validated, ran) == (["validate"], ["reference"])
    with pytest.raises(ValueError, match=r"x\[1\]"):
        checked(-torch.ones(3), None, out)
    assert ran == ["reference"]
    with pytest.raises(ValueError, match="another shape"):
        checked(-torch.ones(3), None, torch.zeros(4))
    assert validated == ["validate"] * 2, "validation sees checked arguments only"


def test_nothing_is_validated_during_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    checked(-torch.ones(3), None, torch.zeros(3))
    assert (validated, ran) == ([], ["reference"])


def test_ranges_are_pushed_and_popped(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", events.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: events.append("pop"))
    ranged(torch.ones(3), None, torch.zeros(3))
    with pytest.raises(ValueError, match=r"x\[1\]"):
        ranged(-torch.ones(3), None, torch.zeros(3))
    assert events == ["cute_kernels::test_ranged", "pop"] * 2


@pytest.mark.parametrize("variable", [ops.CHECK_VARIABLE, ops.NVTX_VARIABLE])
def test_switches(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(variable, raising=False)
    assert ops._switch(variable) is False
    for value, on in (("0", False), ("", False), ("1", True)):
        monkeypatch.setenv(variable, value)
        assert ops._switch(variable) is on
    monkeypatch.setenv(variable, "yes")
    with pytest.raises(ValueError, match=rf"{variable}: expected '0' or '1', got 'yes'"):
        ops._switch(variable)


@pytest.mark.full
def test_the_variable_reaches_the_ops_of_the_package() -> None:
    code = (
        "import torch\n"
        "from cute_kernels import quantize_and_insert_k_cache, formats\n"
        "cache = formats.FP8_DS_MLA.allocate(2, 64)\n"
        "slots = torch.tensor([5, -1, 7, -1, 5])\n"
        "try:\n"
        "    quantize_and_insert_k_cache(torch.zeros(5, 512, dtype=torch.bfloat16), cache, slots)\n"
        "except ValueError as error:\n"
        "    print(error)\n"
        "quantize_and_insert_k_cache(torch.zeros(4, 512, dtype=torch.bfloat16), cache, slots[:4])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT, env={**os.environ, ops.CHECK_VARIABLE: "1"}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.splitlines() == [
        "quantize_and_insert_k_cache: slot_mapping[4]: expected a slot that no other row of the call has, "
        "got 5, as in row 0"
    ]


# ---- what the ops validate -------------------------------------------------------------------------------------------


def test_every_op_that_scatters_or_splits_rows_validates() -> None:
    for op in registry.all_ops().values():
        names = {argument.name for argument in op.overload._schema.arguments}
        if names & {"query_start_loc", "cum_seq_lens_q", "cu_seq_lens"} or (
            "slot_mapping" in names and op.name not in ("build_c128a_topk_metadata",)
        ):
            assert op.validate is not None, op.name


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_distinct_slots(dtype: torch.dtype) -> None:
    def run(values: list[int], capacity: int = 10) -> None:
        checks.distinct_slots("op", "slots", torch.tensor(values, dtype=dtype), capacity)

    for fine in ([], [3], [3, 2, 9, 0], [-1, -1, 4, -1], [10, 10, 11, 11, 4]):
        run(fine)
    with pytest.raises(ValueError, match=r"^op: slots\[4\]: expected .*, got 2, as in row 1$"):
        run([9, 2, -1, 3, 2, 9])
    for last in (0, 9):
        with pytest.raises(ValueError, match=rf"^op: slots\[1\]: expected .*, got {last}, as in row 0$"):
            run([last, last])


def test_ascending() -> None:
    for fine in ([0], [], [0, 0, 5], [7, 9]):
        checks.ascending("op", "starts", torch.tensor(fine, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"^op: starts\[2\]: expected at least 5, the element before it, got 4$"):
        checks.ascending("op", "starts", torch.tensor([0, 5, 4, 3], dtype=torch.int32))


def test_at_most() -> None:
    checks.at_most("op", "lens", torch.tensor([[1, 4]]), 4, "the table")
    with pytest.raises(ValueError, match=r"^op: lens\[1, 0\]: expected at most 4, the table, got 5$"):
        checks.at_most("op", "lens", torch.tensor([[1, 4], [5, 6]]), 4, "the table")


def call(op: Op, **arguments: Any) -> None:
    """op.validate with None for every argument that is not given."""
    assert op.validate is not None
    op.validate(*(arguments.get(argument.name) for argument in op.overload._schema.arguments))


SLOTS = torch.tensor([1, 0, 1])
DOWN = torch.tensor([0, 3, 2], dtype=torch.int32)
CACHE = torch.zeros(2, 4, 584, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("name", "culprit", "arguments"),
    [
        ("quantize_and_insert_k_cache", "slot_mapping[2]", {"k_cache": CACHE, "block_size": 4}),
        ("save_partial_states", "slot_mapping[2]", {"state_cache": CACHE, "block_size": 4}),
        (
            "fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert", "slot_mapping[2]",
            {"k_cache": CACHE, "block_size": 4},
        ),
        ("fused_deepseek_v4_qnorm_rope_kv_rope_full_cache_bf16_insert", "slot_mapping[2]", {"kv_cache": CACHE}),
        ("fused_deepseek_v4_qnorm_rope_kv_rope_full_cache_fp8_insert", "slot_mapping[2]", {"kv_cache": CACHE}),
        ("compress_norm_rope_store", "kv_slot_mapping[2]", {"kv_cache": CACHE}),
        ("get_compressed_slot_mapping", "query_start_loc[2]", {}),
        ("combine_topk_swa_indices", "query_start_loc[2]", {}),
        ("build_flashinfer_mixed_sparse_indices", "query_start_loc[2]", {}),
        ("sparse_mla_prefill_paged", "query_start_loc[2]", {}),
        ("sparse_mla_mixed", "cum_seq_lens_q[2]", {}),
        ("cp_gather_indexer_k_quant_cache", "cu_seq_lens[2]", {}),
    ],
)  # fmt: skip
def test_validations_name_the_culprit(name: str, culprit: str, arguments: dict[str, Any]) -> None:
    starts = dict.fromkeys(("query_start_loc", "cum_seq_lens_q", "cu_seq_lens"), DOWN)
    slots = {"slot_mapping": SLOTS, "kv_slot_mapping": SLOTS}
    with pytest.raises(ValueError, match=rf"^{name}: {culprit.replace('[', '.').replace(']', '.')}: "):
        call(registry.all_ops()[name], **starts, **slots, **arguments)


def test_a_length_beyond_the_block_table() -> None:
    op = registry.all_ops()["dequantize_and_gather_k_cache"]
    table = torch.zeros(3, 2, dtype=torch.int32)

    def gather(seq_lens: list[int], gather_lens: list[int] | None) -> None:
        tensors = [None if lens is None else torch.tensor(lens, dtype=torch.int32) for lens in (seq_lens, gather_lens)]
        call(op, seq_lens=tensors[0], gather_lens=tensors[1], block_table=table, block_size=64)

    gather([128, 0, -1], None)
    gather([500, 128, 128], [0, 7, 500])
    with pytest.raises(ValueError, match=r"gather_k_cache: seq_lens\[1\]: expected at most 128, .*2 pages.*got 129"):
        gather([128, 129, 0], None)
