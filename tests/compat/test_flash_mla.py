# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from cute_kernels.compat.flash_mla import (
    FlashMLASchedMeta,
    flash_mla_sparse_fwd,
    flash_mla_with_kvcache,
    get_mla_metadata,
)
from cute_kernels.runtime.record import record_calls
from tests import oracle
from tests.sparse_mla import model
from tests.sparse_mla.model import BF16, FP8, INT_MAX, INT_MIN, SCALE, Pool

HEADS = 5


class Decode:
    """Requests over two caches with different page sizes; every record that no row names is NaN."""

    def __init__(self) -> None:
        rng = np.random.default_rng(3)
        self.q = model.bf16_query((3, 2, HEADS, 512), 3)
        self.pool, self.extra = Pool(FP8, 4, 64, 1), Pool(FP8, 5, 3, 2)
        self.indices = rng.integers(0, 200, (3, 2, 7))
        self.extra_indices = rng.integers(0, 12, (3, 2, 5))
        self.indices[0, 0, :3] = -1, INT_MIN, INT_MAX
        self.lengths, self.extra_lengths = [7, 4, 0], [5, 0, 2]
        for pool, indices in ((self.pool, self.indices), (self.extra, self.extra_indices)):
            pool.put_all(v for v in np.unique(indices) if 0 <= v < pool.capacity)
        self.indices[1, :, 4:] = self.pool.capacity - 1  # NaN, beyond the length

    def args(self, **changes: Any) -> dict[str, Any]:
        return {
            "q": self.q,
            "k_cache": self.pool.cache.unsqueeze(2),
            "block_table": None,
            "cache_seqlens": None,
            "head_dim_v": 512,
            "tile_scheduler_metadata": get_mla_metadata()[0],
            "is_fp8_kvcache": True,
            "indices": torch.from_numpy(self.indices).int(),
            "topk_length": model.int32(self.lengths),
            "extra_k_cache": self.extra.cache.unsqueeze(2),
            "extra_indices_in_kvcache": torch.from_numpy(self.extra_indices).int(),
            "extra_topk_length": model.int32(self.extra_lengths),
            **changes,
        }

    def expect(self, scale: float = SCALE, sink: Any = None, extra: bool = True) -> tuple[np.ndarray, np.ndarray]:
        outs, lses = np.zeros((3, 2, HEADS, 512)), np.zeros((3, HEADS, 2))
        for b in range(3):
            for s in range(2):
                rows = model.pick(self.pool, self.indices[b, s], self.lengths[b])
                if extra:
                    rows += model.pick(self.extra, self.extra_indices[b, s], self.extra_lengths[b])
                outs[b, s], _, lses[b, :, s] = model.attention(oracle.to_numpy(self.q[b, s]), rows, scale, sink)
        return outs, lses


def test_decode_is_attention_over_both_caches() -> None:
    case = Decode()
    sink = model.sink_of("mixed", HEADS)
    assert sink is not None
    out, lse = flash_mla_with_kvcache(**case.args(attn_sink=sink, softmax_scale=0.1))
    want, want_lse = case.expect(0.1, sink.tolist())
    model.assert_bf16(out, want)
    model.assert_fp32(lse, want_lse)


def test_decode_defaults_one_cache_and_out() -> None:
    case = Decode()
    out = torch.full((3, 2, HEADS + 2, 512), 7.0, dtype=torch.bfloat16)
    names = ("extra_k_cache", "extra_indices_in_kvcache", "extra_topk_length")
    result, _ = flash_mla_with_kvcache(**case.args(**dict.fromkeys(names), out=out[:, :, :HEADS]))
    assert result.data_ptr() == out.data_ptr()
    model.assert_bf16(result, case.expect(extra=False)[0])
    assert (out[:, :, HEADS:] == 7).all()


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_caches_of_any_byte_type(dtype: torch.dtype) -> None:
    case = Decode()
    caches = {"k_cache": case.pool.cache, "extra_k_cache": case.extra.cache}
    out, _ = flash_mla_with_kvcache(**case.args(**{k: v.unsqueeze(2).view(dtype) for k, v in caches.items()}))
    model.assert_bf16(out, case.expect()[0])


def test_batch_invariant_means_one_split(monkeypatch: pytest.MonkeyPatch) -> None:
    from cute_kernels.compat import flash_mla

    splits = []
    original = flash_mla.sparse_mla_decode

    def spy(*args: Any, **kwargs: Any) -> Any:
        splits.append(kwargs["num_splits"])
        return original(*args, **kwargs)

    monkeypatch.setattr(flash_mla, "sparse_mla_decode", spy)
    case = Decode()
    flash_mla_with_kvcache(**case.args())
    flash_mla_with_kvcache(**case.args(enable_batch_invariant=True))
    assert splits == [0, 1]


def test_one_schedule_serves_calls_of_any_shape() -> None:
    schedule, nothing = get_mla_metadata(torch.tensor([1]), num_heads_k=1)
    assert isinstance(schedule, FlashMLASchedMeta)
    assert nothing is None
    case = Decode()
    for batch in (3, 1):
        args = case.args(tile_scheduler_metadata=schedule)
        args = {k: v[:batch] if k == "q" or "indices" in k or "length" in k else v for k, v in args.items()}
        out, _ = flash_mla_with_kvcache(**args)
        model.assert_bf16(out, case.expect()[0][:batch])
    assert schedule == FlashMLASchedMeta()


@pytest.mark.parametrize(
    ("argument", "value", "error"),
    [
        ("indices", None, NotImplementedError),
        ("causal", True, NotImplementedError),
        ("is_fp8_kvcache", False, NotImplementedError),
        ("num_splits", torch.zeros(2), NotImplementedError),
        ("head_dim_v", 576, NotImplementedError),
        ("k_cache", torch.zeros(2, 4, 1, 656, dtype=torch.uint8), NotImplementedError),
        ("extra_k_cache", torch.zeros(2, 4, 1, 528, dtype=torch.uint8), NotImplementedError),
        ("k_cache", torch.zeros(2, 4, 584, dtype=torch.uint8), ValueError),
        ("k_cache", torch.zeros(2, 4, 1, 584), TypeError),
    ],
)
def test_what_decode_refuses(argument: str, value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=f"flash_mla_with_kvcache: {argument}: "), record_calls() as record:
        flash_mla_with_kvcache(**Decode().args(**{argument: value}))
    assert not record.calls


@pytest.mark.parametrize("argument", ["extra_k_cache", "extra_indices_in_kvcache"])
def test_a_second_cache_needs_its_indices(argument: str) -> None:
    with pytest.raises((ValueError, TypeError), match="extra_"):
        flash_mla_with_kvcache(**Decode().args(**{argument: None}))


@pytest.mark.full
def test_decode_compiles() -> None:
    case = Decode()
    args = case.args(indices=torch.from_numpy(case.indices))
    assert args["indices"].dtype == torch.int64
    call = torch.compile(flash_mla_with_kvcache, fullgraph=True, backend="aot_eager", dynamic=True)
    model.assert_bf16(call(**args)[0], case.expect()[0])


class Prefill:
    def __init__(self) -> None:
        rng = np.random.default_rng(4)
        self.q = model.bf16_query((4, HEADS, 512), 4)
        self.pool = Pool(BF16, 20, 1, 5)
        self.indices = rng.integers(0, 18, (4, 6))
        self.indices[0, :2] = -1, 20
        self.lengths = [6, 3, 0, 1]
        self.pool.put_all(v for v in np.unique(self.indices) if 0 <= v < 18)
        self.indices[1, 3:] = 19  # NaN, beyond the length
        self.args = (self.q, self.pool.cache, torch.from_numpy(self.indices).int()[:, None])

    def expect(self, scale: float, sink: Any = None, lengths: Any = None) -> list[np.ndarray]:
        parts = [
            model.attention(oracle.to_numpy(self.q[t]), model.pick(self.pool, row, lengths and lengths[t]), scale, sink)
            for t, row in enumerate(self.indices)
        ]
        return [np.stack(p) for p in zip(*parts, strict=True)]


def test_prefill_is_attention_over_rows() -> None:
    case = Prefill()
    sink = model.sink_of("mixed", HEADS)
    assert sink is not None
    result = flash_mla_sparse_fwd(*case.args, 0.07, 512, sink, model.int32(case.lengths))
    want, want_max, want_lse = case.expect(0.07, sink.tolist(), case.lengths)
    model.assert_bf16(result[0], want)
    model.assert_fp32(result[1], want_max)
    model.assert_fp32(result[2], want_lse)


def test_prefill_into_out() -> None:
    case = Prefill()
    case.pool.put_all([19])
    out = torch.full((4, HEADS + 1, 512), 7.0, dtype=torch.bfloat16)
    result, *_ = flash_mla_sparse_fwd(*case.args, SCALE, out=out[:, :HEADS])
    model.assert_bf16(result, case.expect(SCALE)[0])
    assert result.data_ptr() == out.data_ptr()
    assert (out[:, HEADS:] == 7).all()


def test_prefill_refuses_other_value_sizes() -> None:
    with pytest.raises(ValueError, match="d_v"):
        flash_mla_sparse_fwd(*Prefill().args, SCALE, 576)
