# SPDX-License-Identifier: Apache-2.0
"""Which functions of compat launch dependently, as those they imitate do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cute_kernels import formats
from cute_kernels.compat import vllm
from tests import helpers
from tests.compat.test_vllm import FULL_BF16, FULL_FP8, QUANT, flat, insert_args


class Launches(TorchDispatchMode):
    """The ops that run inside, and their use_pdl."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, bool]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "cute_kernels":
            named = dict(zip((a.name for a in func._schema.arguments), args, strict=True))
            self.found.append((func._schema.name.split("::")[1], named["use_pdl"]))
        return func(*args, **(kwargs or {}))


def quant() -> None:
    getattr(vllm, QUANT)(*insert_args(formats.FP8_DS_MLA), 1e-5, 4)


def padded() -> None:
    q, kv, cache, *rest = insert_args(formats.FP8_DS_MLA)
    getattr(vllm, QUANT + "_v033")(q, kv, flat(cache), *rest, 8, 1e-5, 4)


def full_bf16() -> None:
    getattr(vllm, FULL_BF16)(*insert_args(formats.PLAIN_BF16), 1e-5, 4)


def full_fp8() -> None:
    q, kv, cache, *rest = insert_args(formats.PLAIN_FP8)
    getattr(vllm, FULL_FP8)(
        q, kv, torch.zeros_like(q, dtype=torch.float8_e4m3fn), cache, *rest, *torch.ones(2, 1), 1e-5, 4
    )


def norms() -> None:
    weight = torch.ones(512)
    vllm.fused_q_kv_rmsnorm(helpers.spread((3, 512), 1), helpers.spread((3, 512), 2), weight, weight, 1e-6)


def inv_rope() -> None:
    table = torch.cat([torch.ones(9, 32), torch.zeros(9, 32)], dim=1)
    vllm.fused_inv_rope_fp8_quant(helpers.spread((3, 4, 512), 1), torch.arange(3), table, 2, 2)


@pytest.mark.parametrize("call", [quant, padded, full_bf16, full_fp8, norms, inv_rope])
def test_dependent_launches(call: Callable[[], None]) -> None:
    with Launches() as launches:
        call()
    assert len(launches.found) == 1
    assert all(use_pdl is True for _, use_pdl in launches.found)
