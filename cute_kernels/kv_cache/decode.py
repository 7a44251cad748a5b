"""From a fp8_ds_mla record that a warp holds in pieces to its bf16 row. Lanes and columns: record.py."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int64

from cute_kernels.dsl import convert, ptx
from cute_kernels.kv_cache import record


@cute.jit
def store_decoded(
    target: Any,
    lane: Any,
    codes: Any,
    codes_second: Any,
    rope: Any,
    scales: Any,
    predicate: Any,
    arch: cutlass.Constexpr,
) -> None:
    """Store a lane's eight columns of each half of a row whose first column belongs at `target`, where predicate holds.

    codes, codes_second   two words each; what a rope lane has in the second ones does not matter
    rope                  a rope lane's four words; what others have does not matter
    scales                the eight scale bytes as two words, in every lane
    arch                  compile target
    """
    shift = lane // 8 * 8
    factor = convert.ue8m0_value((scales[0] >> shift) & 0xFF)
    factor_second = convert.ue8m0_value((scales[1] >> shift) & 0xFF)
    words = _values(codes, factor, arch)
    words_second = _values(codes_second, factor_second, arch)
    start = target + Int64(lane * 16)
    ptx.store_global_128(start, words, predicate)
    words_second = _choose(lane >= record.ROPE_LANE, rope, words_second)
    ptx.store_global_128(start + record.HALF_ROW, words_second, predicate)


def _values(codes: Any, factor: Any, arch: str) -> Any:
    return convert.bf16x4_from_e4m3(codes[0], factor, arch) + convert.bf16x4_from_e4m3(codes[1], factor, arch)


@cute.jit
def _choose(condition: Any, a: Any, b: Any) -> Any:
    return (
        a[0] if condition else b[0],
        a[1] if condition else b[1],
        a[2] if condition else b[2],
        a[3] if condition else b[3],
    )
