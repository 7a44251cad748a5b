# SPDX-License-Identifier: Apache-2.0
"""vLLM's index builders; import them from `cute_kernels.compat.vllm`.

Indices, lengths, block tables, positions and slots may be int32 or int64; results are int32.
"""

from __future__ import annotations

import torch

from cute_kernels.compat.arguments import accept_only, as_int32, as_int64, dense_last
from cute_kernels.indices import ops
from cute_kernels.indices.ops import mixed_width
from cute_kernels.runtime.checks import Checker

__all__ = [
    "build_c128a_topk_metadata",
    "build_flashinfer_mixed_sparse_indices",
    "combine_topk_swa_indices",
    "compute_global_topk_indices_and_lens",
]


def compute_global_topk_indices_and_lens(
    topk_indices: torch.Tensor,
    token_to_req_indices: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    is_valid_token: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`indices.ops.compute_global_topk_indices_and_lens`, the same arguments; the results are allocated.

    An index beyond the block table, or on a negative page, becomes -1 and does not count.
    """
    indices, rows, table = as_int32(topk_indices), as_int32(token_to_req_indices), as_int32(block_table)
    return ops.compute_global_topk_indices_and_lens(indices, rows, table, block_size, is_valid_token)


def build_c128a_topk_metadata(
    positions: torch.Tensor,
    compress_ratio: int,
    num_decode_tokens: int,
    token_to_req_indices: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    slot_mapping: torch.Tensor,
    global_decode_buffer: torch.Tensor,
    decode_lens_buffer: torch.Tensor,
    prefill_buffer: torch.Tensor,
    max_compressed_tokens: int = 8192,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`indices.ops.build_c128a_topk_metadata`, the same arguments; the results are views of the buffers."""
    return ops.build_c128a_topk_metadata(
        dense_last(positions),
        compress_ratio,
        num_decode_tokens,
        as_int32(token_to_req_indices),
        as_int32(block_table),
        block_size,
        as_int64(slot_mapping),
        global_decode_buffer,
        decode_lens_buffer,
        prefill_buffer,
        max_compressed_tokens,
    )


def combine_topk_swa_indices(
    topk_indices: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    gather_lens: torch.Tensor,
    window_size: int,
    compress_ratio: int,
    topk: int,
    M: int,
    N: int,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
    left_visible: torch.Tensor | None = None,
    right_visible: torch.Tensor | None = None,
    max_image_tokens: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`indices.ops.combine_topk_swa_indices`, the same arguments.

    A -1 among the picks stays -1, where vLLM adds the request's offset to it. Windows widened for images are not
    supported: left_visible, right_visible and max_image_tokens raise NotImplementedError.
    """
    op = "combine_topk_swa_indices"
    accept_only(op, None, left_visible=left_visible, right_visible=right_visible)
    accept_only(op, 0, max_image_tokens=max_image_tokens)
    starts, lens, gathered = as_int32(query_start_loc), as_int32(seq_lens), as_int32(gather_lens)
    return ops.combine_topk_swa_indices(
        as_int32(topk_indices), starts, lens, gathered, window_size, compress_ratio, topk, M, N, out=out
    )


def build_flashinfer_mixed_sparse_indices(
    decode_swa_indices: torch.Tensor,
    decode_compressed_indices: torch.Tensor | None,
    decode_compressed_topk_lens: torch.Tensor | None,
    prefill_topk_indices: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    token_to_req_indices: torch.Tensor,
    swa_block_table: torch.Tensor,
    swa_block_size: int,
    compressed_block_table: torch.Tensor | None,
    compressed_block_size: int,
    window_size: int,
    compress_ratio: int,
    topk: int,
    decode_compressed_indices_are_local: bool = False,
    decode_is_valid_token: torch.Tensor | None = None,
    swa_block_span: int | None = None,
    compressed_block_span: int | None = None,
    prefill_left_visible: torch.Tensor | None = None,
    prefill_right_visible: torch.Tensor | None = None,
    max_image_tokens: int = 0,
    num_rows: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`indices.ops.build_flashinfer_mixed_sparse_indices`, the same arguments; the results are allocated.

    swa_block_span, compressed_block_span   None or the block size: indices always count rows of the cache, whatever
        padding lies between its pages. `cute_kernels.compat.flashinfer` takes them so with
        sparse_indices_are_storage_offsets=False
    num_rows   rows of both results, at least the rows of the call; those past them are undefined

    decode_swa_indices has window_size columns. Windows widened for images are not supported: those arguments raise
    NotImplementedError, as do spans other than the block size.
    """
    op = "build_flashinfer_mixed_sparse_indices"
    accept_only(op, None, prefill_left_visible=prefill_left_visible, prefill_right_visible=prefill_right_visible)
    accept_only(op, 0, max_image_tokens=max_image_tokens)
    if swa_block_span is not None:
        accept_only(op, swa_block_size, swa_block_span=swa_block_span)
    if compressed_block_span is not None:
        accept_only(op, compressed_block_size, compressed_block_span=compressed_block_span)
    rows = decode_swa_indices.shape[0] + prefill_topk_indices.shape[0]
    if num_rows is None:
        num_rows = rows
    Checker(op).require(num_rows >= rows, "num_rows", f"at least {rows}, the rows of the call", num_rows)
    width = mixed_width(window_size, topk, decode_compressed_indices)
    indices = torch.empty(num_rows, width, dtype=torch.int32, device=decode_swa_indices.device)
    lens = torch.empty(num_rows, dtype=torch.int32, device=decode_swa_indices.device)
    ops.build_flashinfer_mixed_sparse_indices(
        as_int32(decode_swa_indices),
        as_int32(decode_compressed_indices),
        as_int32(decode_compressed_topk_lens),
        as_int32(prefill_topk_indices),
        as_int32(query_start_loc),
        as_int32(seq_lens),
        as_int32(token_to_req_indices),
        as_int32(swa_block_table),
        swa_block_size,
        as_int32(compressed_block_table),
        compressed_block_size,
        window_size,
        compress_ratio,
        topk,
        decode_compressed_indices_are_local,
        decode_is_valid_token,
        out=(indices[:rows], lens[:rows]),
    )
    return indices, lens
