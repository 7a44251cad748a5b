# SPDX-License-Identifier: Apache-2.0
"""The norms of the prediction layer against float64."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from layers import PRESETS, DeepseekV4MTPNorms
from tests import oracle

CONFIG = replace(PRESETS["v4-flash"].reduced(), hidden_size=384, rms_norm_eps=1e-3, hc_mult=3)


def norms() -> DeepseekV4MTPNorms:
    module = DeepseekV4MTPNorms(CONFIG)
    g = torch.Generator().manual_seed(1)
    for name in ("enorm_weight", "hnorm_weight", "head_norm_weight"):
        assert getattr(module, name).dtype == torch.bfloat16
        assert torch.equal(getattr(module, name), torch.ones(384, dtype=torch.bfloat16))
        getattr(module, name).copy_(torch.randn(384, generator=g))
    return module


def rows(*shape: int) -> torch.Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    return (x * torch.logspace(-3, 2, shape[0]).reshape(-1, *[1] * (len(shape) - 1))).bfloat16()


def check(got: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> None:
    expected = oracle.bf16_round(oracle.rms_norm(oracle.to_numpy(x), oracle.to_numpy(weight), 1e-3))
    assert got.dtype == torch.bfloat16
    difference = np.abs(oracle.to_numpy(got) - expected)
    assert (difference <= 2.0**-8 * np.abs(expected)).all()
    assert (difference > 0).mean() < 1e-3


def test_input_norms() -> None:
    module, embeds, streams = norms(), rows(6, 384), rows(6, 3, 384)
    positions = torch.tensor([5, 0, 1, 7, 0, 100])
    before = embeds.clone(), streams.clone()
    e, h = module(embeds, positions, streams)
    assert h.shape == (6, 3, 384)
    masked = embeds.masked_fill((positions == 0)[:, None], 0.0)
    check(e, masked, module.enorm_weight)
    assert not e[[1, 4]].any()
    check(h, streams, module.hnorm_weight)
    assert h[[1, 4]].all(dim=-1).any(), "the streams are not masked"
    assert torch.equal(embeds, before[0])
    assert torch.equal(streams, before[1])


def test_shared_head_norm() -> None:
    module, hidden = norms(), rows(9, 384)
    check(module.shared_head(hidden), hidden, module.head_norm_weight)


def test_no_rows() -> None:
    module = norms()
    e, h = module(rows(1, 384)[:0], torch.zeros(0, dtype=torch.int64), rows(1, 3, 384)[:0])
    assert e.shape == (0, 384)
    assert h.shape == (0, 3, 384)
    assert module.shared_head(rows(1, 384)[:0]).shape == (0, 384)


def test_weights_follow_the_module() -> None:
    state = norms().state_dict()
    assert sorted(state) == ["enorm_weight", "head_norm_weight", "hnorm_weight"]
