# SPDX-License-Identifier: Apache-2.0
"""Four ops in one launch: what each writes, its checks and its cost."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cute_kernels.insert_compress.call import IndexCall
from cute_kernels.insert_compress.ops import fused_qkv_insert_compress_index
from cute_kernels.insert_compress.verify_cases import difference, random_call
from cute_kernels.runtime.ops import OPS
from cute_kernels.runtime.record import record_calls
from cute_kernels.runtime.verify import clone_arguments
from tests.helpers import check_op, raw_bytes

OP = "fused_qkv_insert_compress_index"
OUTPUTS = (
    *("q", "k_cache", "state_cache", "entry_cache", "index_state_cache", "index_cache"),
    *("index_q_quant", "index_weights_out"),
)
LENGTHS = [1, 2, 1, 4, 0, 1, 3]


def copy(call: IndexCall) -> IndexCall:
    return IndexCall(*clone_arguments(call, torch.device("cpu")))


def arguments(call: IndexCall) -> dict[str, Any]:
    """Of the public function."""
    given = call._asdict()
    out = given.pop("index_q_quant"), given.pop("index_weights_out")
    return {**given, "out": out}


def bytes_of(call: IndexCall) -> dict[str, torch.Tensor]:
    return {name: raw_bytes(getattr(call, name)) for name in OUTPUTS}


@pytest.mark.parametrize("options", [{}, {"index_hadamard": True, "fp32_weights": False, "heads": 3, "index_heads": 5}])
def test_it_writes_what_the_four_ops_write(options: dict[str, Any]) -> None:
    for persist, keep_every in (("all", 0), ("window", 8)):
        one = random_call(LENGTHS, 3, **options)._replace(persist=persist, keep_every=keep_every)
        four = copy(one)
        before = bytes_of(copy(one))
        got = fused_qkv_insert_compress_index(**arguments(one))
        assert got == (one.index_q_quant, one.index_weights_out)
        for _, name, own in reversed(four.parts()):
            OPS[name].overload(*own)
        want = bytes_of(four)
        for name, memory in bytes_of(one).items():
            assert torch.equal(memory, want[name]), name
            assert not torch.equal(memory, before[name]), name


def test_results_are_allocated() -> None:
    call = random_call(LENGTHS, 4)
    given = arguments(copy(call))
    fused_qkv_insert_compress_index(**arguments(call))
    codes, weights = fused_qkv_insert_compress_index(**{**given, "out": None})
    assert torch.equal(codes.view(torch.uint8), call.index_q_quant.view(torch.uint8))
    assert torch.equal(weights, call.index_weights_out)


def test_no_rows() -> None:
    call = random_call(LENGTHS, 5)
    none = {name: getattr(call, name)[:0] for name in ("q", "kv", "positions", "index_q", "index_weights")}
    none |= {name: getattr(call, name)[:0] for name in ("slot_mapping", "state_slot_mapping", "entry_slot_mapping")}
    empty = copy(call)._replace(**none)
    before = {name: raw_bytes(getattr(empty, name)).clone() for name in OUTPUTS if name != "q"}
    codes, weights = fused_qkv_insert_compress_index(**{**arguments(empty), "out": None})
    assert codes.shape == (0, 64, 128)
    assert weights.shape == (0, 64)
    for name, memory in before.items():
        assert torch.equal(raw_bytes(getattr(empty, name)), memory), name


@pytest.mark.full
def test_op_registration_and_compile() -> None:
    call = random_call(LENGTHS, 6, heads=2, index_heads=3)
    # in memory of their own, of which nothing may change
    check_op(OP, *call._replace(index_q=call.index_q.clone()))
    compiled = torch.compile(fused_qkv_insert_compress_index, backend="aot_eager", fullgraph=True, dynamic=True)
    for lengths in (LENGTHS, [1, 1, 5]):
        call = random_call(lengths, 7, heads=2, index_heads=3)
        other = copy(call)
        compiled(**arguments(call))
        fused_qkv_insert_compress_index(**arguments(other))
        for name, memory in bytes_of(call).items():
            assert torch.equal(memory, bytes_of(other)[name]), name


def test_cost_is_that_of_the_four_ops() -> None:
    call = random_call(LENGTHS, 8)
    with record_calls() as recording:
        fused_qkv_insert_compress_index(**arguments(copy(call)))
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
        ("state_block_table", lambda x: x.long(), TypeError, "entries: .*: block_table: expected"),
        ("persist", lambda x: "some", ValueError, "entries: .*: persist: expected"),
        ("keep_every", lambda x: 3, ValueError, "entries: .*: keep_every: expected"),
        ("index_kv_score", lambda x: x[:2], ValueError, "index keys: .*"),
        ("index_cache", lambda x: x[..., :5], ValueError, "index keys: .*: kv_cache"),
        ("index_q", lambda x: x[:, :-1], ValueError, "index queries: .*"),
        ("index_weights", lambda x: x.double(), TypeError, "index queries: .*: index_weights: expected"),
        ("kv_format", lambda x: "plain_bf16/1", ValueError, "kv_format: expected"),
        ("index_format", lambda x: "indexer_mxfp4/1", ValueError, "index_format: expected"),
    ],
)
def test_bad_arguments(name: str, change: Any, error: type[Exception], says: str) -> None:
    call = random_call(LENGTHS, 9)
    with pytest.raises(error, match=f"{OP}: {says}"):
        fused_qkv_insert_compress_index(**arguments(call._replace(**{name: change(getattr(call, name))})))


@pytest.mark.parametrize("index_hadamard", [False, True])
def test_verify_allows_a_step_of_the_norm_and_nothing_else(index_hadamard: bool) -> None:
    want = random_call([1, 3], index_hadamard=index_hadamard)
    got = copy(want)
    got.q.view(torch.int16)[0, 0, 0] += 1
    assert difference(got, want) == ""
    got.q.view(torch.int16)[0, 0, 0] += 2
    assert difference(got, want).startswith("queries:")
    got = copy(want)
    raw_bytes(got.index_q_quant)[3] ^= 1
    assert difference(got, want)
