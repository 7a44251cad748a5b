# SPDX-License-Identifier: Apache-2.0
"""The kernel of quantize_fp8_1x128, compiled for every architecture it claims. Needs CuTe DSL and no GPU."""

from __future__ import annotations

import pytest

from cute_kernels.models import MODELS

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from cute_kernels.linear import quantize


def test_no_kernel_without_the_conversion() -> None:
    assert quantize.deployment_keys(MODELS["v4-pro"], 1, "sm_80") == []
