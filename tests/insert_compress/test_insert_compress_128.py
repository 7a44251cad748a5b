# SPDX-License-Identifier: Apache-2.0
"""Two ops of a layer of ratio 128 in one launch: what each writes, its checks and its cost."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cute_kernels.insert_compress.call import CompressCall
from cute_kernels.insert_compress.ops import fused_qkv_insert_compress
from cute_kernels.insert_compress.verify_cases import random_compress_call
from cute_kernels.runtime.ops import OPS
from cute_kernels.runtime.record import record_calls
from cute_kernels.runtime.verify import clone_arguments
from tests.helpers import check_op, raw_bytes

OP = "fused_qkv_insert_compress"
OUTPUTS = ("q", "k_cache", "state_cache", "entry_cache")
LENGTHS = [1, 2, 1, 130, 0, 1, 3]


def copy(call: CompressCall) -> CompressCall:
    return CompressCall(*clone_arguments(call, torch.device("cpu")))


def bytes_of(call: CompressCall) -> dict[str, torch.Tensor]:
    return {name: raw_bytes(getattr(call, name)) for name in OUTPUTS}


@pytest.mark.parametrize("options", [{"closing": True}, {"heads": 3, "state_rows": 3, "block_size": 5, "bad": False}])
def test_it_writes_what_the_two_ops_write(options: dict[str, Any]) -> None:
    for persist in ("all", "window"):
        one = random_compress_call(LENGTHS, 3, **options)._replace(persist=persist)
        two = copy(one)
        before = bytes_of(copy(one))
        assert fused_qkv_insert_compress(**one._asdict()) is None
        for _, name, own in reversed(two.parts()):
            OPS[name].overload(*own)
        want = bytes_of(two)
        for name, memory in bytes_of(one).items():
            assert torch.equal(memory, want[name]), name
            assert not torch.equal(memory, before[name]), name


def test_data_of_both_ops_are_validated() -> None:
    validate = OPS[OP].validate
    assert validate is not None
    call = random_compress_call([1] * 9, 3, closing=True, bad=False)
    validate(*call)
    for name in ("slot_mapping", "entry_slot_mapping"):
        slots = getattr(call, name).clone()
        slots[1] = slots[0]
        with pytest.raises(ValueError, match=r"slot_mapping\[1\]"):
            validate(*call._replace(**{name: slots}))


def test_no_rows() -> None:
    call = random_compress_call(LENGTHS, 5)
    names = ("q", "kv", "positions", "slot_mapping", "state_slot_mapping", "entry_slot_mapping")
    empty = copy(call)._replace(**{name: getattr(call, name)[:0] for name in names})
    before = {name: raw_bytes(getattr(empty, name)).clone() for name in OUTPUTS if name != "q"}
    fused_qkv_insert_compress(**empty._asdict())
    for name, memory in before.items():
        assert torch.equal(raw_bytes(getattr(empty, name)), memory), name


@pytest.mark.full
def test_op_registration_and_compile() -> None:
    check_op(OP, *random_compress_call(LENGTHS, 6, heads=2))
    compiled = torch.compile(fused_qkv_insert_compress, backend="aot_eager", fullgraph=True, dynamic=True)
    for lengths in (LENGTHS, [1, 1, 5]):
        call = random_compress_call(lengths, 7, heads=2)
        other = copy(call)
        compiled(**call._asdict())
        fused_qkv_insert_compress(**other._asdict())
        for name, memory in bytes_of(call).items():
            assert torch.equal(memory, bytes_of(other)[name]), name


def test_cost_is_that_of_the_two_ops() -> None:
    call = random_compress_call(LENGTHS, 8, closing=True)
    with record_calls() as recording:
        fused_qkv_insert_compress(**copy(call)._asdict())
        for _, name, own in copy(call).parts():
            OPS[name].overload(*own)
    whole, *parts = [done.cost for done in recording.calls]
    assert whole.bytes == sum(part.bytes for part in parts)
    assert whole.flops == sum(part.flops for part in parts)


@pytest.mark.parametrize(
    ("name", "change", "error", "says"),
    [
        ("q", lambda x: x.float(), TypeError, "keys: .*: q: expected"),
        ("k_cache", lambda x: x[:, :5], ValueError, "keys: .*: k_cache: expected"),
        ("positions", lambda x: x[:-1], ValueError, "keys: .*: positions: expected"),
        ("kv_score", lambda x: x[:, :-1], ValueError, "entries: .*: kv_score: expected"),
        ("ape", lambda x: x.double(), TypeError, "entries: .*: ape: expected"),
        ("ape", lambda x: x[:4], ValueError, "entries: .*: ape: expected"),
        ("state_block_table", lambda x: x.long(), TypeError, "entries: .*: block_table: expected"),
        ("persist", lambda x: "some", ValueError, "entries: .*: persist: expected"),
        ("kv_format", lambda x: "plain_bf16/1", ValueError, "kv_format: expected"),
    ],
)
def test_bad_arguments(name: str, change: Any, error: type[Exception], says: str) -> None:
    call = random_compress_call(LENGTHS, 9)
    with pytest.raises(error, match=f"{OP}: {says}"):
        fused_qkv_insert_compress(**call._replace(**{name: change(getattr(call, name))})._asdict())
