"""From a bf16 row that a warp holds to its fp8_ds_mla record in a page. Lanes and columns: record.py.

A quantization block of 64 columns is eight lanes wide, in both halves of a row, so one sequence of three shuffles finds
the maxima of two blocks. Lane 0 collects the eight scale bytes.

All lanes of a warp must call `encoded`; whether a row is stored may then depend on its slot.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, range_constexpr

from cute_kernels.dsl import convert, ptx
from cute_kernels.formats import FP8_DS_MLA
from cute_kernels.kv_cache import record
from cute_kernels.numerics import CACHE_FLOOR, E4M3_MAX


@cute.jit
def encoded(lane: Any, first: Any, second: Any, rope: Any, arch: cutlass.Constexpr) -> Any:
    """What a lane stores of a row whose words it has: its codes of both halves, its rope pieces, the scale bytes.

    first, second    words of both halves; a rope lane's second ones mean nothing
    rope             a rope lane's words of the second half
    arch             compile target
    """
    byte_first, byte_second = _scale_bytes(first, second, arch)
    scales = _collected(byte_first | (Int32(0) if lane >= record.ROPE_LANE else byte_second) << 16)
    codes = _codes(first, byte_first, arch)
    codes_second = _codes(second, byte_second, arch)
    return codes, codes_second, record.rope_pieces(lane, rope), scales


@cute.jit
def store(lane: Any, start: Any, row: Any, block_size: Any, pieces: Any) -> None:
    """Store what `encoded` made as row `row` of the page at address `start`."""
    codes, codes_second, rope, scales = pieces
    data = start + Int64(row) * FP8_DS_MLA.data_bytes
    scale = start + Int64(block_size) * FP8_DS_MLA.data_bytes + Int64(row) * FP8_DS_MLA.scale_bytes
    is_rope = lane >= record.ROPE_LANE
    ptx.store_global_64(data + Int64(lane * 8), *codes)
    ptx.store_global_64(
        data + Int64(record.second_offset(lane)),
        rope[0] if is_rope else codes_second[0],
        rope[1] if is_rope else codes_second[1],
    )
    if is_rope or lane == 0:
        ptx.store_global_64(
            data + Int64(record.third_offset(lane)) if is_rope else scale,
            rope[2] if is_rope else scales[0],
            rope[3] if is_rope else scales[1],
        )


@cute.jit
def _scale_bytes(first: Any, second: Any, arch: cutlass.Constexpr) -> Any:
    """ue8m0 bytes of the two blocks a lane has columns of."""
    a = convert.absmax_bf16x2(*first)
    b = convert.absmax_bf16x2(*second)
    # one word per lane: maximum of the first half's block below, of the second half's above
    both = ptx.max_bf16x2(ptx.permute_bytes(a, b, 0x5410), ptx.permute_bytes(a, b, 0x7632))
    for step in range_constexpr(3):
        both = ptx.max_bf16x2(both, cute.arch.shuffle_sync_bfly(both, 1 << step))
    halves = (half(both) for half in (convert.bf16_low, convert.bf16_high))
    low, high = convert.ue8m0_from_absmax_each(halves, E4M3_MAX, CACHE_FLOOR, arch)
    return low, high


@cute.jit
def _collected(pair: Any) -> Any:
    """The eight scale bytes as two words, right in lane 0. Bytes 0 and 2 of `pair` belong to the lane's blocks."""
    pair = ptx.permute_bytes(pair, cute.arch.shuffle_sync_bfly(pair, 8), 0x6240)  # blocks 0 1 4 5
    other = cute.arch.shuffle_sync_bfly(pair, 16)  # blocks 2 3 6 7
    return ptx.permute_bytes(pair, other, 0x5410), ptx.permute_bytes(pair, other, 0x7632)


def _codes(words: Any, byte: Any, arch: str) -> Any:
    """A lane's eight codes, as two words."""
    factor = convert.ue8m0_inverse(byte)
    return (
        convert.e4m3_from_bf16x4(words[0], words[1], factor, arch),
        convert.e4m3_from_bf16x4(words[2], words[3], factor, arch),
    )
