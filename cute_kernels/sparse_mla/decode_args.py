"""What the kernels of sparse_mla_decode are given: fake arguments to compile for, and the op's arguments as theirs.

All of them have one entry point, with these arguments in this order:

    q            bf16 [b, s_q, h, 512]
    cache0       uint8 [pages, rows, 584] (fp8_ds_mla) or bf16 [pages, rows, 512] (plain_bf16)
    list0        int32 [b, s_q, columns]: slots of cache0
    cache1       the second cache; cache0 where there is none
    list1        int32 [b, s_q, columns]: slots of cache1 ("listed"), a block table of it ("dense"), or list0 ("none")
    out          bf16 or fp32 [parts, b, s_q, h, 512]: the caller's, or fp32 in the workspace to be merged
    lse          fp32 [parts, b, h, s_q], any strides; empty: nobody asks for it
    len0, len0_batch, len0_token
                 address of the live columns of list0, or 0: all are; strides in elements
    len1, len1_batch, len1_token
                 the same of list1; rows of a dense list, never 0 then
    sink         address of fp32 [h], or 0; 0 if results are merged, or fp32
    scale_log2   softmax scale times log2(e)
    parts        of a row
    part_tiles   tiles in a part, or 0: see schedule.part_range
    ctas         most blocks of the grid
    stream
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, Uint8
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from cute_kernels.dsl import ptx
from cute_kernels.formats import FP8_DS_MLA, HEAD_DIM
from cute_kernels.runtime.arch import multiprocessors
from cute_kernels.runtime.compile import KernelKey
from cute_kernels.runtime.compile import launch as launch_key
from cute_kernels.sparse_mla import combine, schedule
from cute_kernels.sparse_mla.arguments import as_floats, list_tiles, no_logs
from cute_kernels.sparse_mla.logs import fake_logs

MOST_NUMBERS = 2**30
"""Slots, columns and work items are counted in int32, with room for what is added to the last of them."""


@dataclass(frozen=True)
class ItemKey(KernelKey):
    """A kernel of the op: a grid of blocks that walks over work items."""

    blocks_per_item: ClassVar[int] = 1
    """Blocks that share one."""

    blocks_per_sm: ClassVar[int] = 1
    """Blocks that a multiprocessor has at a time."""


def fake_arguments(out_fp32: bool, format0: str = FP8_DS_MLA.id, format1: str = FP8_DS_MLA.id) -> tuple[Any, ...]:
    """What a kernel is compiled for: any sizes and strides that `supports` lets through."""

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


class Call(NamedTuple):
    """The op's arguments, in the schema's order, checked."""

    q: Any
    k_cache: Any
    indices: Any
    topk_length: Any
    attn_sink: Any
    softmax_scale: float
    kv_format: str
    extra_k_cache: Any
    extra_indices: Any
    extra_topk_length: Any
    extra_block_table: Any
    extra_length: Any
    extra_kv_format: str
    num_splits: int
    split_tokens: int
    out: Any
    lse: Any
    workspace: Any
    q_squares: Any = None
    q_norm_eps: float = 0.0
    positions: Any = None
    cos_sin_cache: Any = None
    out_scale: Any = None

    @property
    def is_quantized(self) -> bool:
        return self.positions is not None

    @property
    def quant(self) -> tuple[Any, ...]:
        """Codes, and what comes with them: see quant_output."""
        return self.out, self.out_scale, self.positions, self.cos_sin_cache

    @property
    def second(self) -> str:
        """How the second list names its rows: "none", "listed" or "dense"."""
        if self.extra_k_cache is None:
            return "none"
        return "dense" if self.extra_indices is None else "listed"

    @property
    def formats(self) -> tuple[str, str]:
        """Of both caches; the first one's twice if there is no second."""
        return self.kv_format, self.kv_format if self.extra_k_cache is None else self.extra_kv_format

    @property
    def rows(self) -> int:
        """Query rows."""
        return int(self.q.shape[0] * self.q.shape[1])

    @property
    def max_tiles(self) -> int:
        """Tiles of the longest row that the lists' widths allow."""
        return int(list_tiles(self.indices, self.extra_k_cache, self.extra_indices, self.extra_block_table))

    def parts(self, at_once: int) -> tuple[int, int]:
        """(parts of a row, tiles in a part or 0) of this call, if so many work items run at a time."""
        if self.num_splits or self.split_tokens:
            return schedule.fixed_parts(self.max_tiles, self.num_splits, self.split_tokens)
        if self.workspace is None or self.rows == 0:
            return 1, 0
        heads = self.q.shape[2]
        most = self.workspace.nbytes // (self.rows * heads * schedule.PART_BYTES)
        blocks = schedule.head_blocks(heads)
        return schedule.choose_parts(self.rows, blocks, self.max_tiles, at_once, schedule.block_heads(heads), most), 0

    def partials(self, parts: int) -> tuple[Any, Any]:
        """The workspace as fp32 [parts, b, s_q, h, 512] and [parts, b, h, s_q]."""
        b, s_q, h, dim = self.q.shape
        floats = as_floats(self.workspace, parts * b * s_q * h * schedule.PART_BYTES)
        row, count = s_q * h * dim, parts * b * s_q * h * dim
        start = floats.storage_offset()
        outs = floats.as_strided((parts, b, s_q, h, dim), (b * row, row, h * dim, dim, 1), start)
        lses = floats.as_strided((parts, b, h, s_q), (b * h * s_q, h * s_q, s_q, 1), start + count)
        return outs, lses

    def second_list(self) -> tuple[Any, Any, int, int, int]:
        """(cache1, list1, len1, len1_batch, len1_token)"""
        if self.extra_k_cache is None:
            return self.k_cache, self.indices, 0, 0, 0
        if self.extra_indices is not None:
            return self.extra_k_cache, self.extra_indices, *lengths_argument(self.extra_topk_length)
        table = self.extra_block_table[:, None].expand(-1, self.q.shape[1], -1)
        return self.extra_k_cache, table, *lengths_argument(self.extra_length)


def lengths_argument(lengths: Any) -> tuple[int, int, int]:
    """(address, stride from request to request, from token to token) of lengths [b] or [b, s_q], or None."""
    if lengths is None:
        return 0, 0, 0
    return lengths.data_ptr(), lengths.stride(0), lengths.stride(1) if lengths.dim() == 2 else 0


@functools.cache
def variant(key: Any, **fields: bool) -> Any:
    """The kernel that stores codes in place of bf16 results (quantized), or norms and rotates its queries (raw)."""
    return replace(key, **fields)


def launch(key_of: Callable[[Call, bool], ItemKey], call: Call) -> None:
    """Run a kernel, and the merge if rows are split, on the current stream of q's device.

    key_of   (call, whether the kernel's results are fp32) -> the key of the kernel that takes the call
    """
    if call.out.numel() == 0:
        return
    device_index = call.q.device.index
    sms = multiprocessors(device_index)
    key = key_of(call, False)
    ctas = sms * key.blocks_per_sm
    parts, part_tiles = call.parts(ctas // key.blocks_per_item)
    is_merged = schedule.goes_through_workspace(parts, part_tiles)
    results: tuple[Any, ...]
    if is_merged:
        out, lse = call.partials(parts)
        key, results = key_of(call, True), (out,)
    else:
        lse = no_logs(4, device_index) if call.lse is None else call.lse[None]
        if call.is_quantized:
            key, results = variant(key, quantized=True), call.quant
        else:
            results = (call.out[None],)
            key = key_of(call, True) if call.out.element_size() == 4 else key
    sink = 0 if is_merged or call.attn_sink is None else call.attn_sink.data_ptr()
    cache1, list1, *len1 = call.second_list()
    squares: tuple[Any, ...] = ()
    eps: tuple[float, ...] = ()
    if call.q_squares is not None:
        key, squares, eps = variant(key, raw=True), (call.q_squares,), (call.q_norm_eps,)
        if is_merged:
            results = out, None, call.positions, call.cos_sin_cache
    launch_key(
        key,
        device_index,
        call.q,
        *squares,
        call.k_cache,
        call.indices,
        cache1,
        list1,
        *results,
        lse,
        *lengths_argument(call.topk_length),
        *len1,
        sink,
        call.softmax_scale * ptx.LOG2_E,
        *eps,
        parts,
        part_tiles,
        ctas,
    )
    if is_merged and call.is_quantized:
        combine.launch_quantized(out, lse, call.attn_sink, call.quant, call.lse)
    elif is_merged:
        combine.launch(out, lse, call.attn_sink, call.out, call.lse, use_pdl=True)


def supports(call: Call) -> tuple[bool, str]:
    """Whether all kernels can take the call, and if not, why: what does not depend on formats and architecture."""
    tensors = {
        "heads of q": call.q,
        "heads of out": None if call.is_quantized else call.out,
        "pages of k_cache": call.k_cache,
        "pages of extra_k_cache": call.extra_k_cache,
        "the workspace": call.workspace,
    }
    for name, tensor in tensors.items():
        if tensor is not None and not _is_aligned(tensor):
            return False, (
                f"{name} must be 16-byte aligned, got address {tensor.data_ptr():#x} and strides "
                f"{tuple(tensor.stride())}"
            )
    for name, cache in (("k_cache", call.k_cache), ("extra_k_cache", call.extra_k_cache)):
        if cache is not None and cache.shape[0] * cache.shape[1] >= MOST_NUMBERS:
            return False, f"{name} must have fewer than 2^30 rows, got shape {tuple(cache.shape)}"
    if call.max_tiles * schedule.TILE >= MOST_NUMBERS:
        return False, f"the lists must have fewer than 2^30 columns, got {call.max_tiles} tiles of {schedule.TILE}"
    parts, part_tiles = call.parts(multiprocessors(call.q.device.index))
    items = call.rows * schedule.head_blocks(call.q.shape[2]) * parts
    if items >= MOST_NUMBERS:
        return False, f"rows times blocks of heads times parts must be less than 2^30, got {items}"
    if part_tiles == 0 and call.max_tiles * parts >= 2 * MOST_NUMBERS:
        return False, f"tiles of a row times parts must be less than 2^31, got {call.max_tiles} times {parts}"
    if part_tiles >= MOST_NUMBERS:
        return False, f"split_tokens must be less than 2^30 tiles of {schedule.TILE}, got {part_tiles}"
    given = {
        "topk_length": call.topk_length,
        "extra_topk_length": call.extra_topk_length,
        "extra_length": call.extra_length,
    }
    for name, lengths in given.items():
        if lengths is not None and max(lengths.stride(), default=0) >= MOST_NUMBERS:
            return False, f"strides of {name} must be less than 2^30, got {tuple(lengths.stride())}"
    return True, ""


def _is_aligned(tensor: Any) -> bool:
    """Whether everything but the last dimension starts at multiples of 16 bytes; the rows of a page need not."""
    multiple = 16 // tensor.element_size()
    axes = range(tensor.dim() - 1) if tensor.dim() != 3 else (0,)
    return tensor.data_ptr() % 16 == 0 and all(
        tensor.shape[axis] <= 1 or tensor.stride(axis) % multiple == 0 for axis in axes
    )
