# SPDX-License-Identifier: Apache-2.0
"""Linears that read the same input, multiplied as one: their weights lie one below the other in one memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .linear import WEIGHT_BLOCK, Linear


class StackedLinears:
    """The weights of several `Linear` modules as one [sum of rows, in] matrix, without a second copy of any.

    Each module's `weight` (and `scale`) becomes a view of its rows, so that
    `weight.copy_()` and `load_state_dict` fill the matrix. What replaces a module's tensor (`Module.to`,
    `load_state_dict(assign=True)`) cuts that tie: call `tie()` again afterwards.

    linears   all FP8, each but the last with a multiple of 128 rows, or all bf16
    """

    def __init__(self, linears: Sequence[Linear]) -> None:
        self.linears = tuple(linears)
        self.tie()

    @property
    def splits(self) -> list[int]:
        """Rows of each weight: columns of its part of the product."""
        return [linear.out_features for linear in self.linears]

    def tie(self) -> None:
        """Have the modules' tensors be views of one matrix again, with the values that they hold now."""
        self.weight = torch.cat([linear.weight for linear in self.linears])
        for linear, rows in zip(self.linears, self.weight.split(self.splits), strict=True):
            linear.weight = rows
        self.scale: torch.Tensor | None = None
        if self.linears[0].quantized:
            self.scale = torch.cat([linear.scale for linear in self.linears if linear.scale is not None])
            first = 0
            for linear in self.linears:
                blocks = -(-linear.out_features // WEIGHT_BLOCK)
                linear.scale = self.scale[first : first + blocks]
                first += blocks

    @property
    def is_tied(self) -> bool:
        """Whether the modules' weights still are the rows of the matrix."""
        first = self.weight.data_ptr()
        step = self.weight.stride(0) * self.weight.element_size()
        for linear in self.linears:
            if linear.weight.data_ptr() != first:
                return False
            first += linear.out_features * step
        return True
