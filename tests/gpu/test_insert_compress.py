# SPDX-License-Identifier: Apache-2.0
"""Everything between the first GEMMs and the scores in one launch: on a GPU the bytes of the four ops."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cute_kernels.insert_compress import ops as _registered  # noqa: F401
from cute_kernels.insert_compress.call import IndexCall
from cute_kernels.insert_compress.verify_cases import difference, random_call
from cute_kernels.runtime.ops import FALLBACK_VARIABLE, OPS
from cute_kernels.runtime.verify import clone_arguments
from tests.helpers import raw_bytes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

OP = "fused_qkv_insert_compress_index"
OUTPUTS = (
    *("q", "k_cache", "state_cache", "entry_cache", "index_state_cache", "index_cache"),
    *("index_q_quant", "index_weights_out"),
)
MIXED = [1, 9, 1, 2, 30, 4, 4, 1, 3, 17, 0, 5, 64, 1, 1, 7]


@pytest.fixture(autouse=True)
def no_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FALLBACK_VARIABLE, raising=False)


def on(call: IndexCall, device: str) -> IndexCall:
    return IndexCall(*clone_arguments(call, torch.device(device)))


def run(call: IndexCall) -> None:
    OPS[OP].overload(*call)


def run_four(call: IndexCall) -> None:
    for _, name, arguments in call.parts():
        OPS[name].overload(*arguments)


def assert_same(one: IndexCall, other: IndexCall, what: Any = "") -> None:
    for name in OUTPUTS:
        got, want = raw_bytes(getattr(one, name)), raw_bytes(getattr(other, name))
        assert torch.equal(got, want), (what, name, int((got != want).sum()))


def check(call: IndexCall, what: Any = "") -> None:
    """The bytes of the four ops on the GPU, gaps included, and near what the reference writes."""
    want, gpu, four = on(call, "cpu"), on(call, "cuda"), on(call, "cuda")
    run(gpu)
    run_four(four)
    assert_same(gpu, four, what)
    OPS[OP].reference(*want)
    assert not (found := difference(on(gpu, "cpu"), want)), (what, found)


@pytest.mark.parametrize("index_hadamard", [False, True])
@pytest.mark.parametrize("fp32_weights", [False, True])
@pytest.mark.parametrize("lengths", [[1], [1] * 7, [1] * 65, [2] * 30, MIXED], ids=lambda x: str(sum(x)))
def test_the_bytes_of_the_four_ops(lengths: list[int], fp32_weights: bool, index_hadamard: bool) -> None:
    for heads, index_heads in ((16, 64), (3, 5)):
        options: dict[str, Any] = {"fp32_weights": fp32_weights, "index_hadamard": index_hadamard}
        call = random_call(lengths, heads, heads=heads, index_heads=index_heads, **options)
        check(call, heads)
        check(call._replace(persist="window", keep_every=8, use_pdl=True), heads)


def test_many_heads_and_long_chunks() -> None:
    """Without the reference, which takes its time."""
    for lengths, heads in (([300, 1], 64), ([1] * 200, 128), ([2] * 300, 64)):
        call = random_call(lengths, heads, heads=heads, bad=False)
        gpu, four = on(call, "cuda"), on(call, "cuda")
        run(gpu._replace(use_pdl=True))
        run_four(four)
        assert_same(gpu, four, lengths)


def test_pages_of_any_size_and_restarts() -> None:
    for state_rows, entry_rows, block_size in ((3, 3, 3), (64, 64, 256), (1, 7, 1)):
        sizes = {"state_rows": state_rows, "entry_rows": entry_rows, "block_size": block_size}
        call = random_call(MIXED, block_size, **sizes)  # type: ignore[arg-type]
        ends = call.query_start_loc[1:].long() - 1
        restart = call.positions[ends.clamp(min=0)].int()
        check(call._replace(min_restart=restart - 2, persist="window"), sizes)


def test_fewer_slots_than_rows_and_none() -> None:
    call = random_call(MIXED, 1)
    rows = call.positions.shape[0]
    for keep in (rows - 5, 1, 0):
        names = ("slot_mapping", "state_slot_mapping", "entry_slot_mapping")
        check(call._replace(**{name: getattr(call, name)[:keep] for name in names}), keep)


def test_every_kernel_and_nan() -> None:
    from cute_kernels.insert_compress.insert_compress_index import SHAPES, InsertCompressIndexKey, launch_with
    from cute_kernels.runtime.arch import arch_of

    call = random_call(MIXED, 2, heads=7, index_heads=9)
    for name in ("q", "kv", "kv_score", "index_kv_score", "index_q", "index_weights"):
        getattr(call, name)[4] = torch.nan
    four = on(call, "cuda")
    run_four(four)
    for shape in SHAPES:
        gpu = on(call, "cuda")
        launch_with(InsertCompressIndexKey(arch_of(0), *shape), gpu)
        assert_same(gpu, four, shape)


def test_columns_of_fused_projections() -> None:
    """fp32 [T, 2624] of one GEMM and bf16 [T, 40960] of another."""
    call = random_call([1] * 33, 3, heads=64, bad=False)
    want = on(call, "cuda")
    run_four(want)
    gpu = on(call, "cuda")
    rows = gpu.q.shape[0]
    sums = torch.full((rows, 2624), torch.nan, device="cuda")
    wide = torch.full((rows, 40960), torch.nan, device="cuda", dtype=torch.bfloat16)
    columns = {
        "kv_score": sums[:, :2048],
        "index_kv_score": sums[:, 2048:2560],
        "index_weights": sums[:, 2560:],
        "q": wide[:, :32768].unflatten(-1, (64, 512)),
        "index_q": wide[:, 32768:].unflatten(-1, (64, 128)),
    }
    for name, view in columns.items():
        view.copy_(getattr(gpu, name)[:rows])
    sliced = gpu._replace(**columns)
    run(sliced)
    assert torch.equal(sliced.q, want.q)
    assert torch.equal(sliced.index_q, want.index_q)
    assert_same(sliced._replace(q=want.q), want)
    # and each of the four takes them too
    again = on(call, "cuda")
    columns["q"].copy_(again.q)
    run_four(again._replace(**columns))
    assert torch.equal(columns["q"], want.q)
    assert_same(again._replace(q=want.q), want)


def test_what_is_not_supported_says_so() -> None:
    call = on(random_call([1, 2], 7), "cuda")
    bad = torch.zeros(call.kv_score.shape[0], 2051, device="cuda")[:, 1:2049]
    with pytest.raises(NotImplementedError, match="rows of kv_score must be 16-byte aligned"):
        run(call._replace(kv_score=bad))
    with pytest.raises(NotImplementedError, match="norm_weight must have 2 bytes"):
        run(call._replace(norm_weight=call.norm_weight.float()))
