# SPDX-License-Identifier: Apache-2.0
"""Tensor parallel ranks own slices of the heads; their partial outputs sum to the whole layer's output."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from layers import TensorParallel, random_layer_tensors
from tests.layers.engine import CONFIG, KINDS, Engine, Request, hidden_rows, make_layer, relative, same_bytes

WIDE = replace(CONFIG, num_attention_heads=16, o_groups=8)


@pytest.mark.parametrize("ratio", KINDS)
@pytest.mark.parametrize("quantized", [True, False])
def test_partial_outputs_sum_to_the_same(ratio: int, quantized: bool) -> None:
    tensors = random_layer_tensors(WIDE, WIDE.layer_of_kind(ratio), 3, quantized=quantized, wo_a_quantized=quantized)
    hidden = hidden_rows(150, seed=1)
    sums = {}
    for size in (1, 2, 8):
        total = torch.zeros(150, WIDE.hidden_size)
        for rank in range(size):
            partials: list[torch.Tensor] = []

            def keep(partial: torch.Tensor, partials: list[torch.Tensor] = partials) -> torch.Tensor:
                partials.append(partial)
                return partial

            layer = make_layer(
                ratio,
                config=WIDE,
                tensors=tensors,
                tp=TensorParallel(rank, size, reduce=keep, partial_dtype=torch.float32),
            )
            assert layer.num_heads == WIDE.num_attention_heads // size
            engine, request = Engine(layer, seed=2), Request()
            outs = engine.step([], [(request, hidden[:149])]) + engine.step([(request, hidden[149:])])
            total += torch.cat(partials or outs)
            if (size, rank) == (1, 0):
                reference, whole = engine, request
            assert same_bytes(engine.entries(request), reference.entries(whole)), "caches are replicated"
        sums[size] = total
    for size in (2, 8):
        assert relative(sums[size], sums[2]) < 1e-6
        rounded = sums[size].bfloat16()
        # one rank rounds to bf16 where several round to fp32 and then to bf16: almost every element is the same
        assert (rounded == sums[1].bfloat16()).float().mean() > 0.999
        assert relative(rounded, sums[1]) < 1e-4


def test_the_reduction_is_called_once_with_partial_sums() -> None:
    seen = []

    def reduce(x: torch.Tensor) -> torch.Tensor:
        seen.append(x.dtype)
        return x * 2

    hidden = hidden_rows(5, seed=3)
    tensors = random_layer_tensors(WIDE, 0, 3)
    for dtype in (torch.bfloat16, torch.float32):
        outs = []
        for function in (lambda x: x, reduce):
            tp = TensorParallel(1, 4, reduce=function, partial_dtype=dtype)
            layer = make_layer(1, config=WIDE, tensors=tensors, tp=tp)
            outs += Engine(layer).step([], [(Request(), hidden)])
        assert torch.equal(outs[1], outs[0] * 2)
        assert outs[0].dtype == torch.bfloat16
    assert seen == [torch.bfloat16, torch.float32]


def test_the_profiling_run_sums_too() -> None:
    seen = []

    def reduce(x: torch.Tensor) -> torch.Tensor:
        seen.append(tuple(x.shape))
        return x

    layer = make_layer(1, config=WIDE, tp=TensorParallel(1, 4, reduce=reduce))
    out = layer(torch.zeros(7, dtype=torch.int64), torch.ones(7, WIDE.hidden_size, dtype=torch.bfloat16))
    assert seen == [(7, WIDE.hidden_size)]
    assert out.dtype == torch.bfloat16
    assert not out.any()


def test_sizes_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match=r"divisor of num_attention_heads = 16, got 3"):
        make_layer(1, config=WIDE, tp=TensorParallel(0, 3))
    with pytest.raises(ValueError, match=r"rank: expected 0 <= rank < size, got rank 2 of 2"):
        TensorParallel(2, 2)
