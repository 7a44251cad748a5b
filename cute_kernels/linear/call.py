# SPDX-License-Identifier: Apache-2.0
"""Calls of the linear layers' ops: their arguments by name, in the order of the schemas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch


class QuantizeCall(NamedTuple):
    """quantize_fp8_1x128."""

    x: torch.Tensor
    out: torch.Tensor
    scale_out: torch.Tensor
    use_pdl: bool


class Fp8GemmCall(NamedTuple):
    """fp8_gemm."""

    a: torch.Tensor
    a_scale: torch.Tensor
    weight: torch.Tensor
    weight_scale: torch.Tensor
    out: torch.Tensor
    out_scale: torch.Tensor | None
    batch_invariant: bool
    use_pdl: bool


class SquaresCall(NamedTuple):
    """fp8_gemm_squares."""

    a: torch.Tensor
    a_scale: torch.Tensor
    weight: torch.Tensor
    weight_scale: torch.Tensor
    out: torch.Tensor
    squares: torch.Tensor
    use_pdl: bool


class Bf16GemmCall(NamedTuple):
    """bf16_gemm."""

    a: torch.Tensor
    weight: torch.Tensor
    out: torch.Tensor
    batch_invariant: bool
    use_pdl: bool


class DualGemmCall(NamedTuple):
    """fp8_bf16_gemm."""

    a: torch.Tensor
    a_scale: torch.Tensor
    weight: torch.Tensor
    weight_scale: torch.Tensor
    out: torch.Tensor
    x: torch.Tensor
    x_weight: torch.Tensor
    x_out: torch.Tensor
    use_pdl: bool


class EinsumCall(NamedTuple):
    """deepseek_v4_fp8_einsum."""

    a: torch.Tensor
    a_scale: torch.Tensor
    b: torch.Tensor
    b_scale: torch.Tensor
    out: torch.Tensor
    equation: str
    recipe: Sequence[int]
