# SPDX-License-Identifier: Apache-2.0
"""Which kernels of a deployment deepseek_v4_fp8_einsum takes on Hopper. Needs CuTe DSL, no GPU."""

from __future__ import annotations

import pytest

from cute_kernels.models import MODELS

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from cute_kernels.linear import launch as calls


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_every_batch_size_of_a_deployment_has_its_kernel(model: str, tp: int) -> None:
    config = MODELS[model]
    keys = calls.einsum_keys(config, tp, "sm_90a")
    assert len(set(keys)) == len(keys)
    chosen = {
        calls.key_for("sm_90a", rows, config.o_groups // tp, config.o_lora_rank, 32, 132, False)[0]
        for rows in [*range(1, 1200), *range(1200, 40000, 77)]
    }
    assert chosen <= set(keys)
