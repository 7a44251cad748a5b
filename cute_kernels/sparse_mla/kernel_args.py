# SPDX-License-Identifier: Apache-2.0
"""What the kernels of the ops are given: the arguments of their entry points, in order (dsl/entry.py), and fake ones to
compile for.

Where results become codes (quant_output), `out` is codes e4m3 [rows, groups, heads of a group * 512], and scales,
positions and table come behind it; they are None else. squares and eps are those of raw queries, or None: sums of
squares fp32 [rows, h * 4], and what is added to a head's mean square. Their positions and table come with them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, Uint8
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from cute_kernels.dsl.paging import Batch
from cute_kernels.dsl.tensor import address, length, stride_bytes
from cute_kernels.formats import FORMATS, FP8_DS_MLA, HEAD_DIM, PLAIN_BF16
from cute_kernels.runtime.compile import KernelKey
from cute_kernels.sparse_mla.params import (
    GatheredKV,
    IndexList,
    KVSources,
    MixedKV,
    Output,
    PagedCache,
    PagedKV,
    PrefillOutput,
    PrefillQuery,
    Query,
    QueryNorm,
    SlotCache,
    fake_logs,
    logs_of,
)
from cute_kernels.sparse_mla.quant_output import Rotation, fake_quant, quant_of

# ---- decode


@dataclass(frozen=True)
class DecodeKernelKey(KernelKey):
    """A kernel of sparse_mla_decode: a persistent grid that takes work tiles."""

    ctas_per_work_tile: ClassVar[int] = 1
    """CTAs that share one: a cluster."""

    ctas_per_sm: ClassVar[int] = 1
    """CTAs that a multiprocessor has at a time."""

    takes_constant_lists: ClassVar[bool] = False
    """Whether it is told what of lists it may read before the kernel ahead has ended."""


class DecodeArgs(NamedTuple):
    """sparse_mla_decode.

    q            bf16 [b, s_q, h, 512]
    cache0       uint8 [pages, rows, bytes of a row], or bf16 [pages, rows, 512] (plain_bf16)
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
    constant_lists
                 as the op's, or None, as the key says
    halves       address of what first halves leave (hopper/decode_halves.py), 16-byte aligned, or None, as the key says
    """

    q: cute.Tensor
    squares: Any
    cache0: cute.Tensor
    list0: cute.Tensor
    cache1: cute.Tensor
    list1: cute.Tensor
    out: cute.Tensor
    scales: Any
    positions: Any
    table: Any
    lse: cute.Tensor
    len0: Int64
    len0_batch: Int32
    len0_token: Int32
    len1: Int64
    len1_batch: Int32
    len1_token: Int32
    sink: Int64
    scale_log2: Float32
    eps: Float32 | None
    splits: Int32
    split_tiles: Int32
    ctas: Int32
    constant_lists: Int32 | None
    halves: Int64 | None
    stream: cuda.CUstream

    @property
    def lengths(self) -> tuple[Any, Any]:
        """Of both lists: address and strides."""
        return (self.len0, self.len0_batch, self.len0_token), (self.len1, self.len1_batch, self.len1_token)

    def query(self) -> Query:
        """On the host's side of the launch, as all below."""
        if self.squares is None:
            return Query.of(self.q)
        rotation = Rotation.of(self.positions, self.table)
        return Query.of(self.q, QueryNorm(address(self.squares), stride_bytes(self.squares, 0), self.eps, rotation))

    def sources(self) -> KVSources:
        return KVSources.of((self.cache0, self.cache1), (self.list0, self.list1), self.lengths)

    def lists(self, second: str) -> tuple[IndexList, IndexList]:
        """Both, a dense one's columns counted in rows."""
        page_rows = length(self.cache1, 1) if second == "dense" else 1
        first, other = self.lengths
        return IndexList.of_rows(self.list0, first, 1), IndexList.of_rows(self.list1, other, page_rows)

    def output(self) -> Output:
        """Heads, and tokens where codes need them, are those of q."""
        quant = quant_of_args(self)
        if quant is None:
            return Output.of(self.out, self.lse, self.sink)
        return Output(None, None, logs_of(self.lse), self.sink, length(self.q, 2), quant, length(self.q, 1))


def fake_decode(
    out_fp32: bool,
    format0: str = FP8_DS_MLA.id,
    format1: str = FP8_DS_MLA.id,
    quantized: bool = False,
    raw: bool = False,
    takes_constant_lists: bool = False,
    halves: bool = False,
) -> DecodeArgs:
    """What a kernel is compiled for: any sizes and strides that `why_not_decode` lets through."""

    def rows(kind: Any, dimensions: int) -> Any:
        multiple = 128 // kind.width
        shape = tuple(cute.sym_int() for _ in range(dimensions))
        strides = tuple(cute.sym_int64(divisibility=multiple) for _ in range(dimensions))
        return make_fake_tensor(kind, (*shape, HEAD_DIM), stride=(*strides, 1), assumed_align=16)

    def cache(kv_format: str) -> Any:
        fmt = FORMATS[kv_format]
        return fake_cache(BFloat16 if kv_format == PLAIN_BF16.id else Uint8, fmt.row_elements)

    def columns() -> Any:
        shape = tuple(cute.sym_int() for _ in range(3))
        return make_fake_tensor(Int32, shape, stride=(cute.sym_int64(), cute.sym_int64(), 1))

    codes, scales, positions, table = fake_quant()
    return DecodeArgs(
        q=rows(BFloat16, 3),
        squares=fake_squares(4) if raw else None,
        cache0=cache(format0),
        list0=columns(),
        cache1=cache(format1),
        list1=columns(),
        out=codes if quantized else rows(Float32 if out_fp32 else BFloat16, 4),
        scales=scales if quantized else None,
        positions=positions if quantized or raw else None,
        table=table if quantized or raw else None,
        lse=fake_logs(4),
        len0=Int64(0),
        len0_batch=Int32(0),
        len0_token=Int32(0),
        len1=Int64(0),
        len1_batch=Int32(0),
        len1_token=Int32(0),
        sink=Int64(0),
        scale_log2=Float32(0),
        eps=Float32(0) if raw else None,
        splits=Int32(1),
        split_tiles=Int32(0),
        ctas=Int32(1),
        constant_lists=Int32(0) if takes_constant_lists else None,
        halves=Int64(0) if halves else None,
        stream=fake_stream(),
    )


# ---- what fakes are made of


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


def fake_squares(align: int) -> Any:
    """Sums of squares; rows and the first one are multiples of so many bytes."""
    shape = cute.sym_int(), cute.sym_int()
    return make_fake_tensor(Float32, shape, stride=(cute.sym_int64(divisibility=align // 4), 1), assumed_align=align)


def fake_stream() -> Any:
    return make_fake_stream(use_tvm_ffi_env_stream=True)


# ---- prefill


class GatheredArgs(NamedTuple):
    """sparse_mla_prefill.

    q, kv, indices, out, max_logits, lse
                 as the op's; strides of q, kv and out are multiples of 16 bytes
    lengths      address of topk_length, or 0: all columns count
    sink         address of fp32 [h], or 0
    scale_log2   softmax scale times log2(e)
    ctas         of the grid, at most
    """

    q: cute.Tensor
    squares: Any
    kv: cute.Tensor
    indices: cute.Tensor
    out: cute.Tensor
    scales: Any
    positions: Any
    table: Any
    max_logits: cute.Tensor
    lse: cute.Tensor
    lengths: Int64
    sink: Int64
    scale_log2: Float32
    eps: Float32 | None
    ctas: Int32
    stream: cuda.CUstream

    def query(self) -> PrefillQuery:
        """On the host's side of the launch, as all below."""
        if self.squares is None:
            return PrefillQuery.of(self.q)
        return PrefillQuery.of(self.q, self.eps, address(self.squares), stride_bytes(self.squares, 0))

    def sources(self) -> GatheredKV:
        return GatheredKV.of(self.kv, self.indices, self.lengths)

    def output(self, policy: Any = None) -> PrefillOutput:
        """policy   L2's, for rows"""
        quant = quant_of_args(self)
        if quant is None:
            return PrefillOutput.of(self.out, self.max_logits, self.lse, policy=policy)
        return PrefillOutput.of_codes(quant, self.max_logits, self.lse)


def fake_gathered(quantized: bool = False, raw: bool = False) -> GatheredArgs:
    codes, scales, positions, table = fake_quant() if quantized else (fake_rows(), None, None, None)
    indices = make_fake_tensor(
        Int32, (cute.sym_int(), 1, cute.sym_int()), stride=(cute.sym_int64(), cute.sym_int64(), 1)
    )
    return GatheredArgs(
        q=fake_rows(),
        squares=fake_squares(16) if raw else None,
        kv=fake_rows(),
        indices=indices,
        out=codes,
        scales=scales,
        positions=positions,
        table=table,
        max_logits=fake_logs(2),
        lse=fake_logs(2),
        lengths=Int64(0),
        sink=Int64(0),
        scale_log2=Float32(0),
        eps=Float32(0) if raw else None,
        ctas=Int32(1),
        stream=fake_stream(),
    )


class PagedArgs(NamedTuple):
    """sparse_mla_prefill_paged.

    q, swa_cache, swa_block_table, compressed_cache, compressed_block_table, out, max_logits, lse
                 as the op's, the window's twice if there is no other cache; strides of q, out and of pages are
                 multiples of 16 bytes
    lists        address of topk_indices, or 0: all visible entries
    list_row     bytes from row to row of them
    columns      of them, or most entries that a query row attends to; 0 without a compressed cache
    starts, seq_lens, requests
                 addresses of query_start_loc and seq_lens, number of requests
    sink, scale_log2, ctas
                 as of GatheredArgs
    splits, split_tiles
                 where rows are split (schedule.split_range), in place of ctas; None else
    """

    q: cute.Tensor
    swa_cache: cute.Tensor
    swa_block_table: cute.Tensor
    compressed_cache: cute.Tensor
    compressed_block_table: cute.Tensor
    out: cute.Tensor
    scales: Any
    positions: Any
    table: Any
    max_logits: cute.Tensor
    lse: cute.Tensor
    lists: Int64
    list_row: Int64
    columns: Int32
    compress_ratio: Int32
    starts: Int64
    seq_lens: Int64
    requests: Int32
    window_size: Int32
    sink: Int64
    scale_log2: Float32
    ctas: Int32 | None
    splits: Int32 | None
    split_tiles: Int32 | None
    stream: cuda.CUstream

    def sources(self) -> PagedKV:
        """On the host's side of the launch, as all below."""
        return paged_sources(self, self.splits, self.split_tiles)

    def output(self, sink: Any = None) -> PrefillOutput:
        """sink   where the results of splits are combined"""
        quant = quant_of_args(self)
        if quant is None:
            return PrefillOutput.of(self.out, self.max_logits, self.lse, sink=sink)
        return PrefillOutput.of_codes(quant, self.max_logits, self.lse)


def paged_sources(args: Any, *splits: Any) -> PagedKV:
    """args: with both caches, their tables, the lists and the batch as PagedArgs has them; splits: of a PagedKV. On the
    host's side of the launch."""
    return PagedKV(
        PagedCache.of(args.swa_cache, args.swa_block_table),
        PagedCache.of(args.compressed_cache, args.compressed_block_table),
        args.window_size,
        args.lists,
        args.list_row,
        args.columns,
        cute.fast_divmod_create_divisor_v2(args.compress_ratio),
        Batch(args.starts, args.seq_lens, args.requests),
        *splits,
    )


def fake_paged(quantized: bool = False, split: bool = False) -> PagedArgs:
    caches = [fake() for _ in range(2) for fake in (lambda: fake_cache(Uint8, FP8_DS_MLA.row_elements), fake_table)]
    results = fake_quant() if quantized else (fake_rows(), None, None, None)
    tensors = (fake_rows(), *caches, *results, fake_logs(2), fake_logs(2))
    scalars = (Int64(0), Int64(0), Int32(0), Int32(1), Int64(0), Int64(0), Int32(0), Int32(1), Int64(0), Float32(0))
    last = (None, Int32(1), Int32(0)) if split else (Int32(1), None, None)
    return PagedArgs._make((*tensors, *scalars, *last, fake_stream()))


class MixedArgs(NamedTuple):
    """sparse_mla_mixed.

    q, window, compressed, indices, out, lse
                 as the op's, window twice if there is no other cache; strides of q, out and of pages are multiples of
                 16 bytes
    lengths      address of sparse_topk_lens
    starts, seq_lens, requests
                 addresses of cum_seq_lens_q and seq_lens, number of requests
    sink         address of fp32 [h], or 0
    scale_log2   scale of the scores times log2(e)
    scale        of out
    ctas         of the grid, at most
    """

    q: cute.Tensor
    window: cute.Tensor
    compressed: cute.Tensor
    indices: cute.Tensor
    out: cute.Tensor
    lse: cute.Tensor
    lengths: Int64
    starts: Int64
    seq_lens: Int64
    requests: Int32
    window_size: Int32
    sink: Int64
    scale_log2: Float32
    scale: Float32
    ctas: Int32
    stream: cuda.CUstream

    def query(self) -> PrefillQuery:
        """On the host's side of the launch, as all below."""
        return PrefillQuery.of(self.q)

    def sources(self, cache_of: Callable[[Any], Any] = SlotCache.of) -> MixedKV:
        """cache_of   what kernels know of a cache"""
        window, compressed = cache_of(self.window), cache_of(self.compressed)
        batch = Batch(self.starts, self.seq_lens, self.requests)
        return MixedKV.of(window, compressed, self.indices, self.window_size, self.lengths, batch)

    def output(self, policy: Any = None) -> PrefillOutput:
        """policy   L2's, for rows"""
        return PrefillOutput.of(self.out, None, self.lse, scale=self.scale, policy=policy)


def fake_mixed(dtype: Any, row_dtype: Any = None) -> MixedArgs:
    """dtype   of queries; row_dtype: of caches, if it is another"""
    caches = [fake_cache(row_dtype or dtype) for _ in range(2)]
    tensors = (fake_rows(dtype), *caches, fake_table(), fake_rows(), fake_logs(2))
    scalars = (Int64(0), Int64(0), Int64(0), Int32(0), Int32(1), Int64(0), Float32(0), Float32(0), Int32(1))
    return MixedArgs._make((*tensors, *scalars, fake_stream()))


def quant_of_args(args: DecodeArgs | GatheredArgs | PagedArgs) -> Any:
    """Where a kernel's results go as codes, or None. On the host's side of the launch."""
    if args.scales is None:
        return None
    return quant_of(args.out, args.scales, args.positions, args.table)
