# SPDX-License-Identifier: Apache-2.0
"""What the kernels of sparse_mla_decode are given: the arguments of their entry points, and fake ones to compile for.

All of them have one entry point, with these arguments in this order:

    q            bf16 [b, s_q, h, 512]
    cache0       uint8 [pages, rows, 584] (fp8_ds_mla) or bf16 [pages, rows, 512] (plain_bf16)
    list0        int32 [b, s_q, columns]: slots of cache0
    cache1       the second cache; cache0 where there is none
    list1        int32 [b, s_q, columns]: slots of cache1 ("listed"), a block table of it ("dense"), or list0 ("none")
    out          bf16 or fp32 [splits, b, s_q, h, 512]: the caller's, or fp32 in the workspace to be combined
    lse          fp32 [splits, b, h, s_q], any strides; empty: nobody asks for it
    len0, len0_batch, len0_token
                 address of the live columns of list0, or 0: all are; strides in elements
    len1, len1_batch, len1_token
                 the same of list1; rows of a dense list, never 0 then
    sink         address of fp32 [h], or 0; 0 if results are combined, or fp32
    scale_log2   softmax scale times log2(e)
    splits       of a row
    split_tiles  tiles in a split, or 0: see schedule.part_range
    ctas         of the grid, at most
    stream
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, Uint8
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from cute_kernels.formats import FP8_DS_MLA, HEAD_DIM
from cute_kernels.runtime.compile import KernelKey
from cute_kernels.sparse_mla.params import fake_logs


@dataclass(frozen=True)
class ItemKey(KernelKey):
    """A kernel of the op: a grid of blocks that walks over work items."""

    blocks_per_item: ClassVar[int] = 1
    """Blocks that share one."""

    blocks_per_sm: ClassVar[int] = 1
    """Blocks that a multiprocessor has at a time."""


def fake_arguments(out_fp32: bool, format0: str = FP8_DS_MLA.id, format1: str = FP8_DS_MLA.id) -> tuple[Any, ...]:
    """What a kernel is compiled for: any sizes and strides that `why_not_decode` lets through."""

    def rows(kind: Any, dimensions: int) -> Any:
        multiple = 128 // kind.width
        shape = tuple(cute.sym_int() for _ in range(dimensions))
        strides = tuple(cute.sym_int64(divisibility=multiple) for _ in range(dimensions))
        return make_fake_tensor(kind, (*shape, HEAD_DIM), stride=(*strides, 1), assumed_align=16)

    def cache(kv_format: str) -> Any:
        kind, width = (Uint8, FP8_DS_MLA.row_elements) if kv_format == FP8_DS_MLA.id else (BFloat16, HEAD_DIM)
        stride = cute.sym_int64(divisibility=128 // kind.width)
        return make_fake_tensor(
            kind, (cute.sym_int(), cute.sym_int(), width), stride=(stride, width, 1), assumed_align=16
        )

    def columns() -> Any:
        shape = tuple(cute.sym_int() for _ in range(3))
        return make_fake_tensor(Int32, shape, stride=(cute.sym_int64(), cute.sym_int64(), 1))

    lengths = (Int64(0), Int32(0), Int32(0))
    return (
        rows(BFloat16, 3),
        cache(format0),
        columns(),
        cache(format1),
        columns(),
        rows(Float32 if out_fp32 else BFloat16, 4),
        fake_logs(4),
        *lengths,
        *lengths,
        Int64(0),
        Float32(0),
        Int32(1),
        Int32(0),
        Int32(1),
        make_fake_stream(use_tvm_ffi_env_stream=True),
    )
