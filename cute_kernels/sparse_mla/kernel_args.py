# SPDX-License-Identifier: Apache-2.0
"""What the kernels of the ops are given: the arguments of their entry points, and fake ones to compile for.

decode (sparse_mla_decode):

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
    split_tiles  tiles in a split, or 0: see schedule.split_range
    ctas         of the grid, at most
    stream

gathered (sparse_mla_prefill):

    q, kv, indices, out, max_logits, lse
                 as the op's; strides of q, kv and out are multiples of 16 bytes
    lengths      address of topk_length, or 0: all columns count
    sink         address of fp32 [h], or 0
    scale_log2   softmax scale times log2(e)
    ctas         of the grid, at most
    stream

paged (sparse_mla_prefill_paged):

    q, swa_cache, swa_block_table, compressed_cache, compressed_block_table, out, max_logits, lse
                 as the op's, the window's twice if there is no other cache; strides of q, out and of pages are
                 multiples of 16 bytes
    lists        address of topk_indices, or 0: all visible entries
    list_row     bytes from row to row of them
    columns      of them, or most entries that a query row attends to; 0 without a compressed cache
    compress_ratio
    starts, seq_lens, requests
                 addresses of query_start_loc and seq_lens, number of requests
    window_size
    sink, scale_log2, ctas, stream
                 as above; where rows are split, splits and split_tiles (schedule.split_range) in place of ctas

mixed (sparse_mla_mixed):

    q, window, compressed, indices, out, lse
                 as the op's, window twice if there is no other cache; strides of q, out and of pages are multiples of
                 16 bytes
    lengths      address of sparse_topk_lens
    starts, seq_lens, requests
                 addresses of cum_seq_lens_q and seq_lens, number of requests
    window_size
    sink         address of fp32 [h], or 0
    scale_log2   scale of the scores times log2(e)
    scale        of out
    ctas, stream
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
class DecodeKernelKey(KernelKey):
    """A kernel of sparse_mla_decode: a persistent grid that takes work tiles."""

    ctas_per_work_tile: ClassVar[int] = 1
    """CTAs that share one: a cluster."""

    ctas_per_sm: ClassVar[int] = 1
    """CTAs that a multiprocessor has at a time."""


def fake_decode(out_fp32: bool, format0: str = FP8_DS_MLA.id, format1: str = FP8_DS_MLA.id) -> tuple[Any, ...]:
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


def fake_rows(dtype: Any = BFloat16) -> Any:
    """[any, any, 512], strides multiples of 16 bytes."""
    row, head = (cute.sym_int64(divisibility=128 // dtype.width) for _ in range(2))
    return make_fake_tensor(dtype, (cute.sym_int(), cute.sym_int(), HEAD_DIM), stride=(row, head, 1), assumed_align=16)


def fake_cache(dtype: Any, width: int = HEAD_DIM) -> Any:
    """Pages of rows of so many elements, their strides multiples of 16 bytes."""
    strides = (cute.sym_int64(divisibility=128 // dtype.width), width, 1)
    return make_fake_tensor(dtype, (cute.sym_int(), cute.sym_int(), width), stride=strides, assumed_align=16)


def fake_table() -> Any:
    """int32 [any, any] with any row stride: a block table, or indices."""
    return make_fake_tensor(Int32, (cute.sym_int(), cute.sym_int()), stride=(cute.sym_int64(), 1))


def fake_stream() -> Any:
    return make_fake_stream(use_tvm_ffi_env_stream=True)


def fake_gathered() -> tuple[Any, ...]:
    indices = make_fake_tensor(
        Int32, (cute.sym_int(), 1, cute.sym_int()), stride=(cute.sym_int64(), cute.sym_int64(), 1)
    )
    results = (fake_rows(), fake_logs(2), fake_logs(2))
    scalars = (Int64(0), Int64(0), Float32(0), Int32(1))
    return fake_rows(), fake_rows(), indices, *results, *scalars, fake_stream()


def fake_paged(*last: Any) -> tuple[Any, ...]:
    """last   between the scale and the stream: the number of CTAs, or splits"""
    caches = [fake() for _ in range(2) for fake in (lambda: fake_cache(Uint8, FP8_DS_MLA.row_elements), fake_table)]
    tensors = (fake_rows(), *caches, fake_rows(), fake_logs(2), fake_logs(2))
    scalars = (Int64(0), Int64(0), Int32(0), Int32(1), Int64(0), Int64(0), Int32(0), Int32(1))
    return *tensors, *scalars, Int64(0), Float32(0), *(last or (Int32(1),)), fake_stream()


def fake_mixed(dtype: Any) -> tuple[Any, ...]:
    """dtype   of queries and caches"""
    tensors = (fake_rows(dtype), fake_cache(dtype), fake_cache(dtype), fake_table(), fake_rows(), fake_logs(2))
    scalars = (Int64(0), Int64(0), Int64(0), Int32(0), Int32(1), Int64(0), Float32(0), Float32(0), Int32(1))
    return *tensors, *scalars, fake_stream()
