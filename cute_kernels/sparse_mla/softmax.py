# SPDX-License-Identifier: Apache-2.0
"""What the attention kernels agree on about softmax while they go through the tiles of a row."""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Float32

from cute_kernels.dsl import ptx

RESCALE_THRESHOLD = 8.0
"""A head's running maximum moves when a score, in powers of two, is more than this above it: O is rarely rescaled,
and weights are at most 2^8."""

NEG_MAX = -3.0e38
"""The running maximum of nothing, where it is a number."""


LEAST_SCALE = 1e-37
"""What a scale of 0 becomes: the scores of what is skipped are infinite, and 0 times that is NaN."""


@cute.jit
def out_scale_of(row_sum: Any, row_max: Any, logit: Any, sink: Any) -> Any:
    """What to multiply a head's row of O with.

    row_sum   of its weights, relative to `row_max`, its running maximum
    logit     bits of its sink; means nothing if `sink` is 0
    """
    whole = row_sum
    if sink != 0:
        whole = row_sum + ptx.exp2(logit.bitcast(Float32) * Float32(ptx.LOG2_E) - row_max)
    return Float32(0.0) if row_sum == Float32(0.0) else ptx.reciprocal(whole)
