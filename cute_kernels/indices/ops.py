# SPDX-License-Identifier: Apache-2.0
"""Index tables for the attention ops: which rows of which cache a token attends to."""

from __future__ import annotations

from typing import Any

import torch

from cute_kernels.formats import round_up
from cute_kernels.indices import reference
from cute_kernels.indices.call import C128aCall, CombineCall, MixedCall, StepCall, StepLayout, TranslateCall, WindowCall
from cute_kernels.runtime import checks
from cute_kernels.runtime.checks import Checker
from cute_kernels.runtime.key import OpKernel
from cute_kernels.runtime.ops import Cost, define_op, nbytes
from cute_kernels.runtime.plans import planned

__all__ = [
    "StepLayout",
    "build_c128a_topk_metadata",
    "build_flashinfer_mixed_sparse_indices",
    "build_step_metadata",
    "combine_topk_swa_indices",
    "compute_decode_swa_indices",
    "compute_global_topk_indices_and_lens",
]


# ---- checks that ops share

POSITION_DTYPES = (torch.int64, torch.int32)


def check_rows(c: Checker, argument: str, value: Any, dtype: torch.dtype, rows: Any, optional: bool = False) -> None:
    """A per-token vector that may be longer than the rows of this call (the step's whole vector)."""
    c.tensor(argument, value, dtype, (None,), optional=optional)
    if value is not None:
        c.require(value.shape[0] >= rows, argument, f"at least {rows} elements", value.shape[0])


def check_pages(c: Checker, table: str, block_table: Any, size: str, block_size: int, optional: bool = False) -> None:
    """A block table and the rows of its pages."""
    c.tensor(table, block_table, torch.int32, (None, None), optional=optional)
    if block_table is not None:
        c.require(block_size > 0, size, "a positive number", block_size)


def check_window(c: Checker, window_size: int, compress_ratio: int, topk: int) -> None:
    """Window size, ratio and top-k; without top-k the ratio does not matter."""
    c.require(window_size > 0, "window_size", "a positive number", window_size)
    c.require(topk >= 0, "topk", "a number >= 0", topk)
    c.require(compress_ratio >= 0, "compress_ratio", "a number >= 0", compress_ratio)
    c.require(compress_ratio > 0 or topk == 0, "compress_ratio", "a positive number where topk > 0", compress_ratio)


def check_batch(c: Checker, query_start_loc: Any, seq_lens: Any) -> None:
    """The row range and the context length of R requests."""
    c.tensor("seq_lens", seq_lens, torch.int32, ("R",))
    c.tensor("query_start_loc", query_start_loc, torch.int32, (None,))
    have, want = query_start_loc.shape[0], seq_lens.shape[0] + 1
    c.require(have == want, "query_start_loc", f"R + 1 = {want} elements, R as in seq_lens", have)


def combined_width(topk: int, window_size: int) -> int:
    """Columns of a combined row: what sparse prefill attention reads has a multiple of 128 columns."""
    return round_up(max(topk, 0) + max(window_size, 0), 128)


def mixed_width(window_size: int, topk: int, decode_compressed_indices: torch.Tensor | None) -> int:
    """Columns of a mixed row: the window, then room for both kinds of compressed indices in multiples of 16 bytes."""
    decode_width = 0 if decode_compressed_indices is None else decode_compressed_indices.shape[-1]
    return max(window_size, 0) + round_up(max(topk, decode_width, 0), 4)


# ---- slots


def _check_swa(call: WindowCall) -> None:
    c = Checker("compute_decode_swa_indices")
    c.tensor("positions", call.positions, POSITION_DTYPES, ("D",))
    check_rows(c, "token_to_req_indices", call.token_to_req_indices, torch.int32, call.positions.shape[0])
    check_rows(c, "is_valid_token", call.is_valid_token, torch.bool, call.positions.shape[0])
    check_pages(c, "block_table", call.block_table, "block_size", call.block_size)
    c.require(call.window_size > 0, "window_size", "a positive number", call.window_size)
    c.tensor("out_indices", call.out_indices, torch.int32, ("D", 1, call.window_size))
    c.tensor("out_lens", call.out_lens, torch.int32, ("D",))


def _cost_swa(call: WindowCall) -> Cost:
    rows = call.positions.shape[0]
    pages = 4 * rows * (-(-(call.window_size - 1) // call.block_size) + 1)
    moved = nbytes(call.positions, call.out_indices, call.out_lens) + rows * 5
    return Cost(bytes=moved + min(pages, nbytes(call.block_table)))


def _swa_kernel() -> OpKernel[WindowCall]:
    from cute_kernels.indices.window import KERNEL

    return KERNEL


_swa = define_op(
    "compute_decode_swa_indices(Tensor positions, Tensor token_to_req_indices, Tensor is_valid_token, "
    "Tensor block_table, SymInt block_size, SymInt window_size, Tensor(a!) out_indices, Tensor(b!) out_lens) -> ()",
    WindowCall,
    check=_check_swa,
    reference=reference.compute_decode_swa_indices,
    kernel=_swa_kernel,
    cost=_cost_swa,
)


@planned
def compute_decode_swa_indices(
    positions: torch.Tensor,
    token_to_req_indices: torch.Tensor,
    is_valid_token: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    window_size: int = 128,
    *,
    out_indices: torch.Tensor | None = None,
    out_lens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Slots of the sliding window of each decode token.

    Token t at position p sees positions start .. p, start = max(p - window_size + 1, 0). Column j < lens[t] = p - start
    + 1 holds the slot of position start + j (oldest first, the token itself last), every other column -1.

    positions              int64 or int32 [D]
    token_to_req_indices   int32 [>= D], row of the block table of each token
    is_valid_token         bool [>= D]; an invalid token gets -1 everywhere and length 0, as does a position < 0
    block_table            int32 [R, width], row-strided: pages of the SWA cache
    block_size             rows per page
    window_size            columns of the table
    out_indices            int32 [D, 1, window_size], row-strided, or None: allocated; mutated
    out_lens               int32 [D] or None: allocated; mutated

    A column whose position the block table does not map (outside the table, page < 0, slot beyond int32) is -1; the
    length stays. Returns (out_indices, out_lens). Raises ValueError or TypeError on arguments that do not fit.
    """
    c = Checker("compute_decode_swa_indices")
    c.tensor("positions", positions, POSITION_DTYPES, (None,))
    rows = positions.shape[0]
    if out_indices is None:
        c.ints(window_size=window_size)
        out_indices = torch.empty(rows, 1, max(window_size, 0), dtype=torch.int32, device=positions.device)
    if out_lens is None:
        out_lens = torch.empty(rows, dtype=torch.int32, device=positions.device)
    _swa(
        WindowCall(
            positions, token_to_req_indices, is_valid_token, block_table, block_size, window_size, out_indices, out_lens
        )
    )
    return out_indices, out_lens


def _check_global(call: TranslateCall) -> None:
    c = Checker("compute_global_topk_indices_and_lens")
    c.tensor("topk_indices", call.topk_indices, torch.int32, ("T", "K"))
    check_rows(c, "token_to_req_indices", call.token_to_req_indices, torch.int32, call.topk_indices.shape[0])
    check_pages(c, "block_table", call.block_table, "block_size", call.block_size)
    check_rows(c, "is_valid_token", call.is_valid_token, torch.bool, call.topk_indices.shape[0])
    c.tensor("out_indices", call.out_indices, torch.int32, ("T", "K"))
    c.tensor("out_lens", call.out_lens, torch.int32, ("T",))


def _cost_global(call: TranslateCall) -> Cost:
    rows, table = call.topk_indices.shape[0], call.block_table
    pages = min(nbytes(call.topk_indices), 4 * rows * table.shape[1], nbytes(table))
    return Cost(bytes=nbytes(call.topk_indices, call.out_indices, call.out_lens) + rows * 5 + pages)


def _global_kernel() -> OpKernel[TranslateCall]:
    from cute_kernels.indices.translate import KERNEL

    return KERNEL


_global = define_op(
    "compute_global_topk_indices_and_lens(Tensor topk_indices, Tensor token_to_req_indices, Tensor block_table, "
    "SymInt block_size, Tensor is_valid_token, Tensor(a!) out_indices, Tensor(b!) out_lens) -> ()",
    TranslateCall,
    check=_check_global,
    reference=reference.compute_global_topk_indices_and_lens,
    kernel=_global_kernel,
    cost=_cost_global,
)


@planned
def compute_global_topk_indices_and_lens(
    topk_indices: torch.Tensor,
    token_to_req_indices: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    is_valid_token: torch.Tensor,
    *,
    out_indices: torch.Tensor | None = None,
    out_lens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Translate request-local top-k picks to slots of the compressed cache, and count them.

    Entry x of row t becomes block_table[req, x // block_size] * block_size + x % block_size where x >= 0, its page lies
    inside the table and is >= 0, and the slot fits int32; anything else is invalid. Valid entries move to the left, in
    order, -1 behind them, so that a reader which stops at the length loses none. lens[t] is their number, or 0 for an
    invalid token (its row is still translated).

    topk_indices           int32 [T, K], row-strided
    token_to_req_indices   int32 [>= T], row of the block table of each token
    block_table            int32 [R, width], row-strided: pages of the compressed cache
    block_size             compressed rows per page
    is_valid_token         bool [>= T]
    out_indices            int32 [T, K], row-strided, or None: allocated; mutated
    out_lens               int32 [T] or None: allocated; mutated

    Returns (out_indices, out_lens). Raises ValueError or TypeError on arguments that do not fit.
    """
    c = Checker("compute_global_topk_indices_and_lens")
    c.tensor("topk_indices", topk_indices, torch.int32, (None, None))
    if out_indices is None:
        out_indices = torch.empty(topk_indices.shape, dtype=torch.int32, device=topk_indices.device)
    if out_lens is None:
        out_lens = torch.empty(topk_indices.shape[0], dtype=torch.int32, device=topk_indices.device)
    _global(
        TranslateCall(
            topk_indices, token_to_req_indices, block_table, block_size, is_valid_token, out_indices, out_lens
        )
    )
    return out_indices, out_lens


def _check_c128a(call: C128aCall) -> None:
    c = Checker("build_c128a_topk_metadata")
    c.tensor("positions", call.positions, POSITION_DTYPES, ("T",))
    rows, width = call.positions.shape[0], call.max_compressed_tokens
    c.require(call.compress_ratio > 0, "compress_ratio", "a positive number", call.compress_ratio)
    in_range = 0 <= call.num_decode_tokens <= rows
    c.require(in_range, "num_decode_tokens", f"a number of 0 .. T = {rows}", call.num_decode_tokens)
    check_rows(c, "token_to_req_indices", call.token_to_req_indices, torch.int32, call.num_decode_tokens)
    check_pages(c, "block_table", call.block_table, "block_size", call.block_size)
    check_rows(c, "slot_mapping", call.slot_mapping, torch.int64, call.num_decode_tokens)
    c.require(width >= 0 and width % 128 == 0, "max_compressed_tokens", "a multiple of 128", width)
    check_rows(c, "decode_lens_buffer", call.decode_lens_buffer, torch.int32, call.num_decode_tokens)
    for name, buffer, used in (
        ("global_decode_buffer", call.global_decode_buffer, call.num_decode_tokens),
        ("prefill_buffer", call.prefill_buffer, rows - call.num_decode_tokens),
    ):
        c.tensor(name, buffer, torch.int32, (None, None))
        fits = buffer.shape[0] >= used and buffer.shape[1] >= width
        c.require(fits, name, f"at least {used} rows and {width} columns", list(buffer.shape))


def _cost_c128a(call: C128aCall) -> Cost:
    counts = (call.positions[: call.num_decode_tokens].long().clamp(min=-1) + 1) // call.compress_ratio
    pages = int(-(-counts.clamp(max=call.max_compressed_tokens) // call.block_size).sum())
    written = call.positions.shape[0] * call.max_compressed_tokens * 4
    return Cost(bytes=nbytes(call.positions) + written + call.num_decode_tokens * 16 + pages * 4)


def _c128a_kernel() -> OpKernel[C128aCall]:
    from cute_kernels.indices.c128a import KERNEL

    return KERNEL


_c128a = define_op(
    "build_c128a_topk_metadata(Tensor positions, SymInt compress_ratio, SymInt num_decode_tokens, "
    "Tensor token_to_req_indices, Tensor block_table, SymInt block_size, Tensor slot_mapping, "
    "Tensor(a!) global_decode_buffer, Tensor(b!) decode_lens_buffer, "
    "Tensor(c!) prefill_buffer, SymInt max_compressed_tokens) -> ()",
    C128aCall,
    check=_check_c128a,
    reference=reference.build_c128a_topk_metadata,
    kernel=_c128a_kernel,
    cost=_cost_c128a,
)


@planned
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
    """Index tables of the C128A layers, which attend to every compressed entry: built once a step, shared by all.

    A token at position p sees n = min((p + 1) // compress_ratio, max_compressed_tokens) entries. The first
    num_decode_tokens rows are decode rows: column j < n holds the slot of entry j. The others are prefill rows: column
    j < n holds j. Every other column below max_compressed_tokens is -1. decode_lens = n, or 0 where slot_mapping < 0
    (the row is still built). An entry that the block table does not map (outside the table, page < 0, slot beyond
    int32) is -1; the length stays.

    positions              int64 or int32 [T]
    compress_ratio         tokens per entry (128)
    num_decode_tokens      D, rows at the front that are decode rows
    token_to_req_indices   int32 [>= D], row of the block table of each token
    block_table            int32 [R, width], row-strided: pages of the compressed cache
    block_size             compressed rows per page
    slot_mapping           int64 [>= D], slots of the SWA cache
    global_decode_buffer   int32 [>= D, >= max_compressed_tokens], row-strided; mutated
    decode_lens_buffer     int32 [>= D]; mutated
    prefill_buffer         int32 [>= T - D, >= max_compressed_tokens], row-strided; mutated
    max_compressed_tokens  columns this step uses, a multiple of 128

    Returns views of the buffers: (global_decode [D, max_compressed_tokens], decode_lens [D], prefill_local [T - D,
    max_compressed_tokens]). They start where the buffers start, so addresses and strides hold from step to step; the
    rest of the buffers is not written. Raises ValueError or TypeError on arguments that do not fit.
    """
    _c128a(
        C128aCall(
            positions,
            compress_ratio,
            num_decode_tokens,
            token_to_req_indices,
            block_table,
            block_size,
            slot_mapping,
            global_decode_buffer,
            decode_lens_buffer,
            prefill_buffer,
            max_compressed_tokens,
        )
    )
    return (
        global_decode_buffer[:num_decode_tokens, :max_compressed_tokens],
        decode_lens_buffer[:num_decode_tokens],
        prefill_buffer[: positions.shape[0] - num_decode_tokens, :max_compressed_tokens],
    )


# ---- both caches in one row


def _check_combine(call: CombineCall) -> None:
    c = Checker("combine_topk_swa_indices")
    check_window(c, call.window_size, call.compress_ratio, call.topk)
    c.tensor("topk_indices", call.topk_indices, torch.int32, ("T", None))
    c.require(
        call.topk_indices.shape[1] >= call.topk,
        "topk_indices",
        f"at least topk = {call.topk} columns",
        list(call.topk_indices.shape),
    )
    check_batch(c, call.query_start_loc, call.seq_lens)
    c.tensor("gather_lens", call.gather_lens, torch.int32, ("R",))
    c.require(call.N >= 0, "N", "a number >= 0", call.N)
    c.require(call.M >= call.N, "M", f"at least N = {call.N}", call.M)
    c.tensor("out", call.out_indices, torch.int32, ("T", combined_width(call.topk, call.window_size)))
    c.tensor("out", call.out_lens, torch.int32, ("T",))


def _cost_combine(call: CombineCall) -> Cost:
    picks = call.topk_indices.shape[0] * call.topk * 4
    return Cost(
        bytes=picks + nbytes(call.query_start_loc, call.seq_lens, call.gather_lens, call.out_indices, call.out_lens)
    )


def _validate_combine(call: CombineCall) -> None:
    checks.ascending("combine_topk_swa_indices", "query_start_loc", call.query_start_loc)


def _combine_kernel() -> OpKernel[CombineCall]:
    from cute_kernels.indices.combine import KERNEL

    return KERNEL


_combine = define_op(
    "combine_topk_swa_indices(Tensor topk_indices, Tensor query_start_loc, Tensor seq_lens, Tensor gather_lens, "
    "SymInt window_size, SymInt compress_ratio, SymInt topk, SymInt M, SymInt N, Tensor(a!) out_indices, "
    "Tensor(b!) out_lens) -> ()",
    CombineCall,
    check=_check_combine,
    reference=reference.combine_topk_swa_indices,
    kernel=_combine_kernel,
    cost=_cost_combine,
    validate=_validate_combine,
)


@planned
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
    *,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of the gathered K workspace that each prefill token of a chunk of requests attends to.

    The workspace [R, M, 512] counts as R * M rows. Request b owns rows M*b .. M*b + M - 1: its compressed entries
    first, at most N of them, then from M*b + N its gathered tail, where row i holds position seq_lens[b] -
    gather_lens[b] + i. Token t of request b stands at position p = seq_lens[b] - (rows of b) + (t - first row of b). It
    sees the entries below v = (p + 1) // compress_ratio, and positions start .. p with start = max(p - window_size + 1,
    0). With n_c = min(v, topk):

        columns [0, n_c)         M*b + x, x = topk_indices[t, j], where 0 <= x < min(v, N), else -1
        columns [n_c, lens[t])   the gathered rows of positions start .. p, oldest first; -1 for one not gathered
        the other columns        -1

    and lens[t] = n_c + p - start + 1. A row number beyond int32 is -1 too. Rows past the last request (graph padding)
    get -1 everywhere and length 0.

    topk_indices      int32 [T, >= topk], row-strided, the rows of this chunk
    query_start_loc   int32 [R + 1], ascending; may be a slice of a batch's: rows count from its first element
    seq_lens          int32 [R], context lengths, this step's tokens included
    gather_lens       int32 [R], positions gathered per request, from its end; more than seq_lens counts as seq_lens
    window_size       positions a token sees, itself included
    compress_ratio    tokens per compressed entry; without picks (topk = 0) its value does not matter
    topk              picks per row
    M                 workspace rows per request
    N                 workspace rows per request for compressed entries
    out               (int32 [T, round_up(topk + window_size, 128)], row-strided, int32 [T]) or None: allocated; mutated

    Returns (indices, lens). Raises ValueError or TypeError on arguments that do not fit.
    """
    c = Checker("combine_topk_swa_indices")
    c.tensor("topk_indices", topk_indices, torch.int32, (None, None))
    if out is None:
        c.ints(window_size=window_size, topk=topk)
        rows, device = topk_indices.shape[0], topk_indices.device
        indices = torch.empty(rows, combined_width(topk, window_size), dtype=torch.int32, device=device)
        lens = torch.empty(rows, dtype=torch.int32, device=device)
    else:
        indices, lens = c.pair("out", out, "indices, lens")
    _combine(
        CombineCall(
            topk_indices,
            query_start_loc,
            seq_lens,
            gather_lens,
            window_size,
            compress_ratio,
            topk,
            M,
            N,
            indices,
            lens,
        )
    )
    return indices, lens


def _check_mixed(call: MixedCall) -> None:
    c = Checker("build_flashinfer_mixed_sparse_indices")
    check_window(c, call.window_size, call.compress_ratio, call.topk)
    c.tensor("decode_swa_indices", call.decode_swa_indices, torch.int32, ("Dn", call.window_size))
    c.tensor("decode_compressed_indices", call.decode_compressed_indices, torch.int32, ("Dn", None), optional=True)
    decode = call.decode_swa_indices.shape[0]
    check_rows(c, "decode_compressed_topk_lens", call.decode_compressed_topk_lens, torch.int32, decode, optional=True)
    c.tensor("prefill_topk_indices", call.prefill_topk_indices, torch.int32, (None, None))
    rows = decode + call.prefill_topk_indices.shape[0]
    check_batch(c, call.query_start_loc, call.seq_lens)
    check_rows(c, "token_to_req_indices", call.token_to_req_indices, torch.int32, rows)
    check_pages(c, "swa_block_table", call.swa_block_table, "swa_block_size", call.swa_block_size)
    check_pages(
        c,
        "compressed_block_table",
        call.compressed_block_table,
        "compressed_block_size",
        call.compressed_block_size,
        optional=True,
    )
    decode_is_local = call.decode_compressed_indices_are_local and call.decode_compressed_indices is not None
    if call.compressed_block_table is None and (
        decode_is_local or (call.topk > 0 and call.prefill_topk_indices.shape[1] > 0)
    ):
        c.fail("compressed_block_table", "a tensor: there are request-local indices to translate", "None", TypeError)
    check_rows(c, "decode_is_valid_token", call.decode_is_valid_token, torch.bool, decode, optional=True)
    c.tensor(
        "out",
        call.sparse_indices,
        torch.int32,
        (None, mixed_width(call.window_size, call.topk, call.decode_compressed_indices)),
    )
    c.tensor("out", call.sparse_topk_lens, torch.int32, (None,))
    for result in (call.sparse_indices, call.sparse_topk_lens):
        c.require(result.shape[0] == rows, "out", f"decode and prefill rows, {rows}", result.shape[0])


def _cost_mixed(call: MixedCall) -> Cost:
    prefill, width = call.prefill_topk_indices.shape
    window_pages = 4 * prefill * (-(-(call.window_size - 1) // call.swa_block_size) + 1)
    picks = 4 * prefill * min(call.topk, width)
    local = nbytes(call.decode_compressed_indices) if call.decode_compressed_indices_are_local else 0
    pages = min(picks + local, nbytes(call.compressed_block_table))
    moved = nbytes(call.decode_swa_indices, call.decode_compressed_indices, call.query_start_loc, call.seq_lens)
    moved += nbytes(call.sparse_indices, call.sparse_topk_lens)
    return Cost(bytes=moved + picks + min(window_pages, nbytes(call.swa_block_table)) + pages)


def _validate_mixed(call: MixedCall) -> None:
    checks.ascending("build_flashinfer_mixed_sparse_indices", "query_start_loc", call.query_start_loc)


def _mixed_kernel() -> OpKernel[MixedCall]:
    from cute_kernels.indices.mixed import KERNEL

    return KERNEL


_mixed = define_op(
    "build_flashinfer_mixed_sparse_indices(Tensor decode_swa_indices, Tensor? decode_compressed_indices, "
    "Tensor? decode_compressed_topk_lens, Tensor prefill_topk_indices, Tensor query_start_loc, Tensor seq_lens, "
    "Tensor token_to_req_indices, Tensor swa_block_table, SymInt swa_block_size, Tensor? compressed_block_table, "
    "SymInt compressed_block_size, SymInt window_size, SymInt compress_ratio, SymInt topk, "
    "bool decode_compressed_indices_are_local, Tensor? decode_is_valid_token, Tensor(a!) sparse_indices, "
    "Tensor(b!) sparse_topk_lens) -> ()",
    MixedCall,
    check=_check_mixed,
    reference=reference.build_flashinfer_mixed_sparse_indices,
    kernel=_mixed_kernel,
    cost=_cost_mixed,
    validate=_validate_mixed,
)


def _without_middle(indices: Any) -> Any:
    """[rows, 1, width] as [rows, width]; anything else as it is."""
    if isinstance(indices, torch.Tensor) and indices.dim() == 3 and indices.shape[1] == 1:
        return indices.squeeze(1)
    return indices


@planned
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
    *,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One index table for all rows of a step, over two paged caches: window slots first, compressed slots after them.

    Row t < Dn is a decode row, row Dn <= t < Dn + P a prefill row. Columns [0, window_size) index the SWA cache, the
    columns after them the compressed cache, however many window slots are valid; padding is -1. A row's length counts
    all window columns, valid or not.

    Decode row: window columns are copied from decode_swa_indices, compressed ones come from decode_compressed_indices:
      slots (the default)   copied; lens[t] = window_size + decode_compressed_topk_lens[t] (clamped to 0 .. Kd), or
                            window_size + Kd without these lengths
      request-local         translated, -1 where the block table maps nothing; lens[t] = window_size + the number of
                            entries that are not -1, or window_size for an invalid token (its row is still translated)

    Prefill row at position p = seq_lens[r] - (rows of r) + (t - first row of r), r = token_to_req_indices[t]: column j
    holds the slot of the j-th oldest position in max(p - window_size + 1, 0) .. p. With v = (p + 1) // compress_ratio
    entries visible and n_c = min(v, topk), compressed column j < n_c holds the slot of x = prefill_topk_indices[t - Dn,
    j] where 0 <= x < v and the block table maps x, else -1. lens[t] = window_size + n_c. A row that is not among the
    rows of its request (graph padding) gets -1 everywhere and lens[t] = window_size.

    A block table maps an entry whose page lies inside the table and is >= 0 and whose slot fits int32.

    decode_swa_indices            int32 [Dn, window_size] or [Dn, 1, window_size], row-strided
    decode_compressed_indices     int32 [Dn, Kd] or [Dn, 1, Kd], row-strided, or None: no compressed entries
    decode_compressed_topk_lens   int32 [>= Dn] or None; only for slots
    prefill_topk_indices          int32 [P, Kp], row-strided, request-local; Kp may be 0 or differ from topk
    query_start_loc               int32 [R + 1], decode and prefill requests; rows count from its first element
    seq_lens                      int32 [R], context lengths, this step's tokens included
    token_to_req_indices          int32 [>= Dn + P], request of each row, the row of both block tables
    swa_block_table               int32 [R', width], row-strided
    swa_block_size                rows per page of the SWA cache
    compressed_block_table        int32 [R', width], row-strided; None where nothing is request-local
    compressed_block_size         rows per page of the compressed cache
    window_size                   positions a token sees, itself included
    compress_ratio                tokens per compressed entry; with topk = 0 its value does not matter
    topk                          picks per prefill row
    decode_compressed_indices_are_local   whether decode_compressed_indices are request-local
    decode_is_valid_token         bool [>= Dn] or None: all valid; only for request-local indices
    out                           (int32 [Dn + P, window_size + round_up(max(topk, Kd), 4)], row-strided, int32 [Dn +
                                  P]) or None: allocated; mutated

    Returns (sparse_indices, sparse_topk_lens). Raises ValueError or TypeError on arguments that do not fit.
    """
    c = Checker("build_flashinfer_mixed_sparse_indices")
    c.tensor("decode_swa_indices", decode_swa_indices, torch.int32)
    c.tensor("decode_compressed_indices", decode_compressed_indices, torch.int32, optional=True)
    c.tensor("prefill_topk_indices", prefill_topk_indices, torch.int32, (None, None))
    if out is None:
        c.ints(window_size=window_size, topk=topk)
        rows, device = decode_swa_indices.shape[0] + prefill_topk_indices.shape[0], decode_swa_indices.device
        width = mixed_width(window_size, topk, decode_compressed_indices)
        indices = torch.empty(rows, width, dtype=torch.int32, device=device)
        lens = torch.empty(rows, dtype=torch.int32, device=device)
    else:
        indices, lens = c.pair("out", out, "sparse_indices, sparse_topk_lens")
    _mixed(
        MixedCall(
            _without_middle(decode_swa_indices),
            _without_middle(decode_compressed_indices),
            decode_compressed_topk_lens,
            prefill_topk_indices,
            query_start_loc,
            seq_lens,
            token_to_req_indices,
            swa_block_table,
            swa_block_size,
            compressed_block_table,
            compressed_block_size,
            window_size,
            compress_ratio,
            topk,
            decode_compressed_indices_are_local,
            decode_is_valid_token,
            indices,
            lens,
        )
    )
    return indices, lens


# ---- what all layers of a step share, of every kind of layer, in one launch


def _check_step(a: StepCall) -> None:
    c = Checker("build_step_metadata")
    c.tensor("upload", a.upload, torch.int32, (None,))
    requests, tokens = a.num_requests, a.num_tokens
    c.require(a.max_num_tokens > 0, "max_num_tokens", "a positive number", a.max_num_tokens)
    for name in ("num_requests", "num_tokens"):
        value = getattr(a, name)
        c.require(0 <= value <= a.max_num_tokens, name, f"0..max_num_tokens = {a.max_num_tokens}", value)
    c.require(0 <= a.num_decodes <= requests, "num_decodes", f"0..num_requests = {requests}", a.num_decodes)
    decodes = a.num_decode_tokens
    c.require(0 <= decodes <= tokens, "num_decode_tokens", f"0..num_tokens = {tokens}", decodes)
    have, want = a.upload.shape[0], requests + 1 + (requests if a.seq_lens is None else 0)
    c.require(have >= want, "upload", f"at least {want} elements", have)
    c.tensor("seq_lens", a.seq_lens, torch.int32, (requests,), optional=True)
    c.tensor("min_restart", a.min_restart, torch.int32, (requests,), optional=True)
    for name in StepCall._fields[3:10]:
        c.tensor(name, getattr(a, name), torch.int32, (requests, None), optional=True)
    c.tensor("key_starts", a.key_starts, torch.int32, (requests + 1,), optional=True)
    for prefix in ("c4", "c128"):
        names = [f"{prefix}_{table}_block_table" for table in ("swa", "compressed", "state")]
        given = [getattr(a, name) is not None for name in names]
        c.require(all(given) or not any(given), names[1], f"tables of all three caches of ratio {prefix[1:]}", given)
    is_used = a.key_starts is None or a.c4_compressed_block_table is not None
    c.require(is_used, "key_starts", "None without tables of ratio 4", "a tensor")
    c.require(bool(a.kinds()), "swa_block_table", "block tables of at least one kind of layers", "None")
    for name in ("window_size", "swa_block_size", "c4_state_block_size", "c128_state_block_size"):
        c.require(getattr(a, name) > 0, name, "a positive number", getattr(a, name))
    is_whole = a.kv_block_size > 0 and a.kv_block_size % 128 == 0
    c.require(is_whole, "kv_block_size", "a positive multiple of 128", a.kv_block_size)
    c.require(a.index_topk >= 0, "index_topk", "a number >= 0", a.index_topk)
    is_whole = a.c128a_columns >= 0 and a.c128a_columns % 128 == 0
    c.require(is_whole, "c128a_columns", "a multiple of 128", a.c128a_columns)
    c.tensor("buffer", a.buffer, torch.uint8, (None,), contiguous=True)
    c.require(a.buffer.storage_offset() % 16 == 0, "buffer", "a start at a multiple of 16", a.buffer.storage_offset())
    size = a.layout().nbytes
    c.require(a.buffer.shape[0] >= size, "buffer", f"at least {size} bytes", a.buffer.shape[0])
    for name, rows in (("c128a_decode_buffer", decodes), ("c128a_prefill_buffer", tokens - decodes)):
        table = getattr(a, name)
        c.tensor(name, table, torch.int32, (None, None), optional=True)
        if table is not None:
            c.require(a.c128_swa_block_table is not None, name, "None without tables of ratio 128", "a tensor")
            c.require(table.shape[0] >= rows, name, f"at least {rows} rows", table.shape[0])
            c.require(table.shape[1] >= a.c128a_columns, name, f"at least {a.c128a_columns} columns", table.shape[1])


def _cost_step(a: StepCall) -> Cost:
    tokens, decodes, kinds = a.num_tokens, a.num_decode_tokens, a.kinds()
    written = 4 * (4 * a.num_requests + 1) + 12 * tokens
    read = 4 * (2 * a.num_requests + 1) + nbytes(a.min_restart)
    for kind in kinds:
        written += 9 * tokens + decodes * 4 * (a.window_size + 1)
        read += decodes * 4 * (-(-(a.window_size - 1) // a.swa_block_size) + 1)
        if kind.compressed is not None:
            written += 20 * tokens + 4 * decodes
    if a.key_starts is not None:
        read += nbytes(a.key_starts)
        written += nbytes(a.key_starts) + 8 * tokens
    lists = ((a.c128a_decode_buffer, decodes), (a.c128a_prefill_buffer, tokens - decodes))
    written += sum(4 * rows * a.c128a_columns for table, rows in lists if table is not None)
    return Cost(bytes=read + written)


def _validate_step(a: StepCall) -> None:
    checks.ascending("build_step_metadata", "upload", a.upload[: a.num_requests + 1])


def _step_kernel() -> OpKernel[StepCall]:
    from cute_kernels.indices.step_metadata import KERNEL

    return KERNEL


_step = define_op(
    "build_step_metadata(Tensor upload, Tensor? seq_lens, Tensor? min_restart, Tensor? swa_block_table, "
    "Tensor? c4_swa_block_table, Tensor? c4_compressed_block_table, Tensor? c4_state_block_table, "
    "Tensor? c128_swa_block_table, Tensor? c128_compressed_block_table, Tensor? c128_state_block_table, "
    "Tensor? key_starts, Tensor(a!) buffer, Tensor(b!)? c128a_decode_buffer, Tensor(c!)? c128a_prefill_buffer, "
    "SymInt num_requests, SymInt num_tokens, SymInt num_decodes, SymInt num_decode_tokens, SymInt max_num_tokens, "
    "SymInt window_size, SymInt index_topk, SymInt c128a_columns, SymInt swa_block_size, SymInt kv_block_size, "
    "SymInt c4_state_block_size, SymInt c128_state_block_size, bool use_pdl) -> ()",
    StepCall,
    check=_check_step,
    reference=reference.build_step_metadata,
    kernel=_step_kernel,
    cost=_cost_step,
    validate=_validate_step,
)


@planned
def build_step_metadata(
    upload: torch.Tensor,
    num_requests: int,
    num_tokens: int,
    num_decodes: int,
    num_decode_tokens: int,
    *,
    seq_lens: torch.Tensor | None = None,
    min_restart: torch.Tensor | None = None,
    swa_block_table: torch.Tensor | None = None,
    c4_block_tables: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    c128_block_tables: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    key_starts: torch.Tensor | None = None,
    max_num_tokens: int,
    window_size: int = 128,
    index_topk: int = 512,
    c128a_columns: int = 0,
    c128a_decode_buffer: torch.Tensor | None = None,
    c128a_prefill_buffer: torch.Tensor | None = None,
    swa_block_size: int = 64,
    kv_block_size: int = 256,
    c4_state_block_size: int = 4,
    c128_state_block_size: int = 8,
    out: torch.Tensor | None = None,
    use_pdl: bool = False,
) -> torch.Tensor:
    """What the layers of a step share: rows, positions, slots and windows, of up to three kinds of layers at once.

    Request r has rows starts[r] .. starts[r + 1] - 1 of the step, and its last row is at position seq_lens[r] - 1. A
    row whose request has seq_lens <= 0 (a padded request), or too few tokens for it, has position -1.

    upload             int32 [>= 2 R + 1]: starts [R + 1], ascending from 0, then seq_lens [R], which is not looked at
                       where seq_lens is given
    num_requests       R, decode requests first
    num_tokens         T, rows
    num_decodes        requests that are decodes
    num_decode_tokens  D, rows of decode requests
    seq_lens           int32 [R] or None: tokens of each request, this step included
    min_restart        int32 [R] or None: the first position of the step for decodes, seq_lens for prefills
    swa_block_table    int32 [R, any], row-strided: of layers without compression; None: there are none
    c4_block_tables    of layers of ratio 4: (window, compressed, state), each int32 [R, any], row-strided; or None
    c128_block_tables  the same of ratio 128
    key_starts         int32 [R + 1] or None: where each request's entries of ratio 4 begin among those of all prefill
                       requests, gathered one after the other, and where the last one's end; with c4_block_tables only
    max_num_tokens     most rows and requests of any step: with window_size and the kinds it fixes where results lie
    window_size        columns of the windows' indices
    index_topk         most entries of ratio 4 that a decode row attends to
    c128a_columns      most entries of ratio 128 that a row attends to, and columns of the next two; multiple of 128
    c128a_decode_buffer, c128a_prefill_buffer
                       int32 [>= D or T - D, >= c128a_columns], row-strided, as build_c128a_topk_metadata fills them; or
                       None; mutated
    swa_block_size, kv_block_size, c4_state_block_size, c128_state_block_size
                       tokens per page of the windows' caches, of both compressed ones (a multiple of 128) and of each
                       state cache
    out                uint8 [>= StepLayout(max_num_tokens, window_size, kinds).nbytes], contiguous, 16-byte aligned, or
                       None: allocated; mutated. It shares no byte with any other argument
    use_pdl            whether to launch as a dependent of the kernel before; nothing is declared constant

    Written, as `StepLayout.arrays(kind)` places them (first R, R + 1, T or D rows of each): query_start_loc, seq_lens,
    min_restart, gather_lens (a request's rows and up to window_size - 1 tokens before them), token_to_req_indices (-1
    for a row behind the last request), positions; of each kind slot_mapping (-1 where there is no page), is_valid_token
    (slot_mapping >= 0), decode_swa_indices and decode_swa_lens as compute_decode_swa_indices writes them; of ratio 4
    and 128 state_slot_mapping, compressed_slot_mapping (of rows that close an entry, else -1), visible (entries a row
    sees; 0 if it is not valid) and decode_topk_lens (at most index_topk or c128a_columns of them). With key_starts, of
    ratio 4: key_starts, and of every row the entries it sees among the gathered ones, row_key_starts ..
    row_key_ends - 1; the start is 0 where there is no request.

    Returns the buffer. Raises ValueError or TypeError on arguments that do not fit.
    """
    c = Checker("build_step_metadata")
    c4 = _tables(c, "c4_block_tables", c4_block_tables)
    c128 = _tables(c, "c128_block_tables", c128_block_tables)
    if out is None:
        c.tensor("upload", upload, torch.int32, (None,))
        c.ints(max_num_tokens=max_num_tokens, window_size=window_size)
        kinds = sum(table is not None for table in (swa_block_table, c4[0], c128[0]))
        size = StepLayout(max(max_num_tokens, 0), max(window_size, 0), kinds).nbytes
        out = torch.empty(size, dtype=torch.uint8, device=upload.device)
    _step(
        StepCall(
            *(upload, seq_lens, min_restart, swa_block_table, *c4, *c128, key_starts, out),
            *(c128a_decode_buffer, c128a_prefill_buffer),
            *(num_requests, num_tokens, num_decodes, num_decode_tokens, max_num_tokens, window_size, index_topk),
            *(c128a_columns, swa_block_size, kv_block_size, c4_state_block_size, c128_state_block_size),
            use_pdl,
        )
    )
    return out


def _tables(c: Checker, argument: str, tables: Any) -> tuple[Any, Any, Any]:
    """Tables of windows, entries and states; three times None of a kind that the step has not."""
    if tables is None:
        return None, None, None
    if not isinstance(tables, (tuple, list)) or len(tables) != 3:
        c.fail(argument, "(window, compressed, state)", type(tables).__name__, TypeError)
    window, compressed, state = tables
    return window, compressed, state
