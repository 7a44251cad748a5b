# SPDX-License-Identifier: Apache-2.0
"""What attention means in float64, how near to it a kernel must come, and which kernel of decode a test runs."""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import pytest
import torch

from cute_kernels.runtime.arch import arch_of
from cute_kernels.runtime.ops import FALLBACK_VARIABLE
from tests.helpers import bits

FP8, BF16 = "fp8_ds_mla/1", "plain_bf16/1"
MXFP8, NVFP4 = "mxfp8_v41/1", "nvfp4_v41/1"
MXFP8_SPLIT, NVFP4_SPLIT = "mxfp8_v41_split/1", "nvfp4_v41_split/1"
KERNELS: dict[str, dict[str, Any]] = {
    "chosen": {},
    "teams": {"BLACKWELL": (), "SMALL_HEADS": (8, 16), "SWAP_AB_HEADS": (), "FEW_ROWS_HEADS": ()},
    "portable": {"HOPPER": "", "BLACKWELL": (), "SMALL_HEADS": ()},
}
"""Kernels to run the tests with -> what to change where one is chosen."""


MOST_ASIDE = 1.1e-5
"""1 - cosine of a head's result and the true one that roundings can come to: 2^-17 if P is rounded up by 2^-8 of itself
for one key and down for another that weighs as much, and 3.3e-6 of out. One key too many or too few among 2048 that
weigh as much comes to 2.4e-4."""

MOST_ASIDE_IN_ALL = 5e-6
"""The same of all heads of a call as one vector."""


def attention(
    q: torch.Tensor, k: torch.Tensor, named: torch.Tensor, scale: float, sink: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """out [n, h, 512] and lse [n, h] of q [n, h, 512] over the `named` [n, c] of k [n, c, 512], all float64.

    The sink [h] is one more logit, whose value is zero. What is not named must be zero in k.
    """
    k, named = torch.nn.functional.pad(k, (0, 0, 0, 1)), torch.nn.functional.pad(named, (0, 1))  # never no column
    scores = (q @ k.transpose(1, 2) * scale).masked_fill(~named[:, None, :], -math.inf)
    lse = scores.logsumexp(dim=-1)
    if sink is not None:
        scores = torch.cat([scores, sink.double()[None, :, None].expand(len(q), -1, 1)], dim=-1)
    weights = scores.softmax(dim=-1)[..., : k.shape[1]]
    nothing = ~named.any(dim=1)[:, None].expand_as(lse)
    if sink is not None:
        nothing = nothing | (sink == math.inf)
    out = (weights @ k).masked_fill(nothing[..., None], 0.0)
    return out, lse.masked_fill(~named.any(dim=1)[:, None], math.inf)


def assert_near(
    got: tuple[torch.Tensor, torch.Tensor], want: tuple[torch.Tensor, torch.Tensor], least: float = 1e-3
) -> None:
    """Every element within `least` or 2.01/128 of itself; the length of every head of every row within 2.01/128 of
    itself, and its direction within MOST_ASIDE, in all within MOST_ASIDE_IN_ALL. lse within 1e-6 + 8.01/65536 of
    itself."""
    (out, lse), (want_out, want_lse) = got, want
    assert (out.shape, lse.shape) == (want_out.shape, want_lse.shape)
    x, y = out.double(), want_out
    off = (x - y).abs()
    wrong = ~(off <= (2.01 / 128 * y.abs()).clamp(min=least))
    assert not wrong.any(), (
        f"out: {int(wrong.sum())} elements by up to {off[wrong].max():.2g}, first at {wrong.nonzero()[0].tolist()}"
    )
    length, want_length = x.norm(dim=-1), y.norm(dim=-1)
    wrong = ~((length - want_length).abs() <= 2.01 / 128 * want_length) & ((want_length > 1e-30) | (want_length == 0))
    assert not wrong.any(), f"out: {int(wrong.sum())} heads have another length, first {wrong.nonzero()[0].tolist()}"
    aside = ((x / length[..., None] - y / want_length[..., None]) ** 2).sum(-1) / 2  # 1 - cosine
    wrong = ~(aside <= MOST_ASIDE) & (want_length > 1e-30)
    assert not wrong.any(), (
        f"out: {int(wrong.sum())} heads are {aside[wrong].max():.2g} aside, first {wrong.nonzero()[0].tolist()}"
    )
    if y.norm() > 0 and not x.isnan().any():
        assert ((x / x.norm() - y / y.norm()) ** 2).sum() / 2 <= MOST_ASIDE_IN_ALL
    wrong = ~((lse == want_lse) | ((lse - want_lse).abs() <= 1e-6 + 8.01 / 65536 * want_lse.abs()))
    assert not wrong.any(), f"lse: {int(wrong.sum())} elements, first at {wrong.nonzero()[0].tolist()}"


def same_bits(a: tuple[torch.Tensor, ...], b: tuple[torch.Tensor, ...]) -> bool:
    return all(torch.equal(bits(x), bits(y)) for x, y in zip(a, b, strict=True))


def use_kernel(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have calls run the kernel of that name, and no reference."""
    from cute_kernels.sparse_mla import select

    monkeypatch.delenv(FALLBACK_VARIABLE, raising=False)
    monkeypatch.setattr(select.trust, "is_trusted", lambda op, kernel, index: True)
    for attribute, value in KERNELS[name].items():
        monkeypatch.setattr(select, attribute, value)
    if KERNELS[name]:
        # what has been chosen is kept
        monkeypatch.setattr(select, "decode_key", select.decode_key.__wrapped__)
    compile_ahead(name)


@functools.cache
def compile_ahead(name: str) -> None:
    """Put what most tests of that kernel run into the kernel cache, with all cores: one key takes seconds."""
    from cute_kernels.runtime import cache
    from cute_kernels.runtime.precompile import precompile
    from cute_kernels.sparse_mla import select

    store = cache.current()
    if store is None:
        return
    blocks = itertools.product((8, 16, 32, 64), ("none", "listed", "dense"), (False, True))
    keys = [select.decode_key(arch_of(0), heads, second, fp32, FP8, FP8) for heads, second, fp32 in blocks]
    for _ in precompile(keys, store.root):
        pass
