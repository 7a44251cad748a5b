# SPDX-License-Identifier: Apache-2.0
"""The kernels of fused_q_kv_rmsnorm_quant, compiled for every architecture they claim. Needs CuTe DSL and no GPU."""

from __future__ import annotations

import pytest

from cute_kernels.models import MODELS

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from cute_kernels.norm import q_kv_quant
from tests.compile.questions import parts
from tests.compile.reports import compile_report


@pytest.mark.parametrize(("arch", "model"), [("sm_90a", "v4-pro"), ("sm_100a", "v4-pro"), ("sm_90a", "v4-flash")])
def test_weights_are_asked_for_before_the_wait(arch: str, model: str) -> None:
    """And rows behind it."""
    for key in q_kv_quant.deployment_keys(MODELS[model], 1, arch):
        of_parts = compile_report(key).in_ptx.ask(parts, r"griddepcontrol\.wait", r"ld\.relaxed\.cta\.global\.v4\.b32")
        assert len(of_parts[0]) == (1 if key.spread else -(-key.width // 256) - (-key.kv_width // 256))
