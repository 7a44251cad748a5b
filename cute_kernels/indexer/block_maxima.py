# SPDX-License-Identifier: Apache-2.0
"""Kernel of select_candidate_blocks: the largest score of each block of eight keys, whose best topk.py then picks.
Calls with long rows, of which most maxima need not be written, are block_picks.py's where it takes them.

    a warp's piece of a row       PIECE columns, VECTORS times 128
    lane, of each 128             columns 4 * lane .. + 3, half a block
    behind the exchange           even lanes have the blocks of the first, third, ... 128, odd ones those of the others

All of a piece is on its way before anything is used. Pieces behind a row's end, and rows of which all blocks are
selected, are not read. The blocks that a row has are counted by the warp of its first piece.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr, range_constexpr
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from cute_kernels.dsl import ptx
from cute_kernels.dsl.tensor import address, length, stride_bytes
from cute_kernels.indexer import block_picks, topk_select
from cute_kernels.indexer.block_picks import as_compared, largest, with_cut_vector
from cute_kernels.indexer.call import SelectBlocksCall
from cute_kernels.indexer.chunks import CANDIDATE_BLOCK, LENGTH_COLUMNS, row_bytes
from cute_kernels.models import ModelConfig, latent_ratios
from cute_kernels.runtime.arch import arch_number, arch_of
from cute_kernels.runtime.compile import KernelKey
from cute_kernels.runtime.compile import launch as launch_key
from cute_kernels.runtime.key import OpKernel

WARPS = 4
"""Per CTA."""

VECTORS = 4
"""Of four columns that a lane has: 2 KB of a warp are under way at once (perf/log/candidates.md)."""

PIECE = 128 * VECTORS
"""Columns of a warp."""


class Rows(NamedTuple):
    """What the kernel takes, in plain numbers; strides in bytes.

    pieces     of a row, as a divisor; units: of all rows
    lengths    address, strides of requests and of their tokens, tokens of a request as a divisor
    maxima     address of the first row's, stride; its blocks are counted at column `blocks`
    selected   blocks, up to which a row is not read
    """

    scores: Int64
    stride: Int64
    columns: Int32
    pieces: cute.FastDivmodDivisorV2
    units: Int32
    lengths: Int64
    lengths_request: Int64
    lengths_token: Int64
    tokens: cute.FastDivmodDivisorV2
    maxima: Int64
    maxima_stride: Int64
    blocks: Int32
    selected: Int32


class BlockMaximaKernel:
    """Entry point: (scores; address and strides of the lengths by request
    and token, tokens of a request; address and row stride of the maxima, their column with the count, blocks that are
    selected; stream)."""

    def __init__(self, key: BlockMaximaKey) -> None:
        self.has_dependency = arch_number(key.arch) >= ptx.DEPENDENT_LAUNCH_ARCH

    @cute.jit
    def __call__(
        self,
        scores: cute.Tensor,
        lengths: Int64,
        lengths_request: Int64,
        lengths_token: Int64,
        tokens: Int32,
        maxima: Int64,
        maxima_stride: Int64,
        blocks: Int32,
        selected: Int32,
        stream: cuda.CUstream,
    ) -> None:
        self.kernel.set_name_prefix("block_maxima", remove_cutlass_symbol=True, keep_mangled_name=False)
        rows, columns = length(scores, 0), length(scores, 1)
        pieces = cutlass.max(cute.ceil_div(columns, PIECE), Int32(1))
        divisor = cute.fast_divmod_create_divisor_v2
        units = rows * pieces
        source = address(scores), stride_bytes(scores, 0), columns, divisor(pieces), units
        seen = lengths, lengths_request, lengths_token, divisor(tokens)
        work = Rows(*source, *seen, maxima, maxima_stride, blocks, selected)
        self.kernel(work).launch(
            grid=[cute.ceil_div(units, WARPS), 1, 1],
            block=[WARPS * 32, 1, 1],
            stream=stream,
            use_pdl=self.has_dependency,
        )

    @cute.kernel
    def kernel(self, rows: Rows) -> None:
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        unit = cta * WARPS + cute.arch.make_warp_uniform(thread // 32)
        lane = cute.arch.lane_idx()
        row, piece = divmod(cutlass.min(unit, rows.units - 1), rows.pieces)
        if const_expr(self.has_dependency):
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
        request, token = divmod(row, rows.tokens)
        place = rows.lengths + Int64(request) * rows.lengths_request + Int64(token) * rows.lengths_token
        length = ptx.load_global_s32_in_order(place, is_shared=True)
        length = cutlass.min(cutlass.max(length, Int32(0)), rows.columns)
        count = (length + (CANDIDATE_BLOCK - 1)) // CANDIDATE_BLOCK
        maxima = rows.maxima + Int64(row) * rows.maxima_stride
        is_first = (piece == 0) & (lane == 0) & (unit < rows.units)
        ptx.store_global_s32(maxima + Int64(rows.blocks) * 4, count, is_first)
        first = piece * PIECE
        if (unit < rows.units) & (first < length) & (count > rows.selected):
            self.reduce(rows.scores + Int64(row) * rows.stride, first, length, count, maxima, lane)

    @cute.jit
    def reduce(self, scores: Int64, first: Int32, length: Int32, count: Int32, maxima: Int64, lane: Int32) -> None:
        """The maxima of a piece, stored."""
        column = first + lane * 4
        source = scores + Int64(column) * 4
        words = [
            ptx.load_global_128_cached_where(column + (128 * i + 4) <= length, source + 512 * i) for i in range(VECTORS)
        ]
        found = [largest(four) for four in words]
        if first + PIECE > length:
            found = with_cut_vector(found, source, column, length)
        is_odd = lane & 1 == 1
        for i in range_constexpr(0, VECTORS, 2):
            own = found[i + 1] if is_odd else found[i]
            sent = found[i] if is_odd else found[i + 1]
            best = ptx.max_f32(own, cute.arch.shuffle_sync_bfly(sent, 1))
            block = first // CANDIDATE_BLOCK + (lane & 1) * 16 + (16 * i + lane // 2)
            best = as_compared(best, block, count)
            ptx.store_global_f32(maxima + Int64(block) * 4, best, block < count)


@dataclass(frozen=True)
class BlockMaximaKey(KernelKey):
    """There is one kernel of an architecture."""

    kernel_name: ClassVar[str] = "indexer.block_maxima"

    @property
    def instructions(self) -> tuple[str, ...]:
        return ("ld.global.128",)

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        scores = make_fake_tensor(Float32, (cute.sym_int(), cute.sym_int()), stride=(cute.sym_int64(), 1))
        lengths = Int64(0), Int64(0), Int64(0), Int32(1)
        maxima = Int64(0), Int64(0), Int32(1), Int32(1)
        return BlockMaximaKernel(self), (scores, *lengths, *maxima, make_fake_stream(use_tvm_ffi_env_stream=True))


def deployment_keys(config: ModelConfig, tp: int, arch: str) -> list[KernelKey]:
    """Of a model with candidates; and the kernels that pick."""
    if not latent_ratios(config):
        return []
    return [BlockMaximaKey(arch), *block_picks.keys_of(arch), *topk_select.deployment_keys(config, tp, arch)]


@cache
def _key(device_index: int) -> BlockMaximaKey:
    return BlockMaximaKey(arch_of(device_index))


def maxima_of(call: SelectBlocksCall) -> Any:
    """fp32 [rows, blocks + LENGTH_COLUMNS] of the workspace: maxima, and how many blocks a row has."""
    rows, columns = call.logits.shape
    blocks = -(-columns // CANDIDATE_BLOCK)
    stride = row_bytes(blocks + LENGTH_COLUMNS) // 4
    return call.workspace.view(call.logits.dtype).as_strided((rows, blocks + LENGTH_COLUMNS), (stride, 1))


def why_not(call: SelectBlocksCall) -> str:
    """Why no kernels can take a (checked) call; empty if they can."""
    logits = call.logits
    if logits.data_ptr() % 16 or (logits.shape[0] > 1 and logits.stride(0) % 4):
        return (
            f"rows of logits must be 16-byte aligned, got address {logits.data_ptr():#x} and strides "
            f"{tuple(logits.stride())}"
        )
    if logits.shape[0] * (logits.shape[1] // PIECE + 1) >= 2**31:
        return f"there must be fewer than 2^31 pieces of {PIECE} scores, got logits of shape {list(logits.shape)}"
    maxima = maxima_of(call)
    return topk_select.why_not(maxima[:, : maxima.shape[1] - LENGTH_COLUMNS], logits.shape[0], call.out.shape[1])


def launch(call: SelectBlocksCall) -> None:
    """Run the kernels on the current stream of out's device."""
    logits, lengths, out = call.logits, call.seq_lens, call.out
    rows = logits.shape[0]
    if rows == 0:
        return
    arch = arch_of(out.device.index)
    if block_picks.takes(arch, rows, logits.shape[1], out.shape[1]):
        block_picks.launch(call, arch)
        return
    maxima = maxima_of(call)
    blocks = maxima.shape[1] - LENGTH_COLUMNS
    request, token = (4 * stride for stride in lengths.stride())
    launch_key(
        _key(out.device.index),
        out.device.index,
        logits,
        *(lengths.data_ptr(), request, token, lengths.shape[1]),
        *(maxima.data_ptr(), maxima.stride(0) * 4, blocks, out.shape[1]),
    )
    counts = maxima.data_ptr() + 4 * blocks, maxima.stride(0) * 4, 0, 1
    topk_select.run(maxima[:, :blocks], (0, 0), counts, out, rows, out.shape[1])


KERNEL = OpKernel(launch, why_not, deployment_keys)
