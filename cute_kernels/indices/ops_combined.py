"""Index tables that join compressed picks and sliding window in one row."""

from __future__ import annotations

import torch

from cute_kernels.indices import reference
from cute_kernels.indices.arguments import (
    check_batch,
    check_pages,
    check_rows,
    check_window,
    combined_width,
    mixed_width,
)
from cute_kernels.runtime import validate
from cute_kernels.runtime.checks import Checker
from cute_kernels.runtime.ops import Cost, define_op, nbytes


def _check_combine(
    topk_indices: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    gather_lens: torch.Tensor,
    window_size: int,
    compress_ratio: int,
    topk: int,
    M: int,
    N: int,
    out_indices: torch.Tensor,
    out_lens: torch.Tensor,
) -> None:
    c = Checker("combine_topk_swa_indices")
    check_window(c, window_size, compress_ratio, topk)
    c.tensor("topk_indices", topk_indices, torch.int32, ("T", None))
    c.require(
        topk_indices.shape[1] >= topk, "topk_indices", f"at least topk = {topk} columns", list(topk_indices.shape)
    )
    check_batch(c, query_start_loc, seq_lens)
    c.tensor("gather_lens", gather_lens, torch.int32, ("R",))
    c.require(N >= 0, "N", "a number >= 0", N)
    c.require(M >= N, "M", f"at least N = {N}", M)
    c.tensor("out", out_indices, torch.int32, ("T", combined_width(topk, window_size)))
    c.tensor("out", out_lens, torch.int32, ("T",))


def _cost_combine(
    topk_indices: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    gather_lens: torch.Tensor,
    window_size: int,
    compress_ratio: int,
    topk: int,
    M: int,
    N: int,
    out_indices: torch.Tensor,
    out_lens: torch.Tensor,
) -> Cost:
    picks = topk_indices.shape[0] * topk * 4
    return Cost(bytes=picks + nbytes(query_start_loc, seq_lens, gather_lens, out_indices, out_lens))


def _validate_combine(topk_indices: torch.Tensor, query_start_loc: torch.Tensor, *_: object) -> None:
    validate.ascending("combine_topk_swa_indices", "query_start_loc", query_start_loc)


_combine = define_op(
    "combine_topk_swa_indices(Tensor topk_indices, Tensor query_start_loc, Tensor seq_lens, Tensor gather_lens, "
    "SymInt window_size, SymInt compress_ratio, SymInt topk, SymInt M, SymInt N, Tensor(a!) out_indices, "
    "Tensor(b!) out_lens) -> ()",
    check=_check_combine,
    reference=reference.combine_topk_swa_indices,
    kernel="cute_kernels.indices.combine",
    cost=_cost_combine,
    validate=_validate_combine,
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
    return indices, lens


def _check_mixed(
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
    decode_compressed_indices_are_local: bool,
    decode_is_valid_token: torch.Tensor | None,
    sparse_indices: torch.Tensor,
    sparse_topk_lens: torch.Tensor,
) -> None:
    c = Checker("build_flashinfer_mixed_sparse_indices")
    check_window(c, window_size, compress_ratio, topk)
    c.tensor("decode_swa_indices", decode_swa_indices, torch.int32, ("Dn", window_size))
    c.tensor("decode_compressed_indices", decode_compressed_indices, torch.int32, ("Dn", None), optional=True)
    decode = decode_swa_indices.shape[0]
    check_rows(c, "decode_compressed_topk_lens", decode_compressed_topk_lens, torch.int32, decode, optional=True)
    c.tensor("prefill_topk_indices", prefill_topk_indices, torch.int32, (None, None))
    rows = decode + prefill_topk_indices.shape[0]
    check_batch(c, query_start_loc, seq_lens)
    check_rows(c, "token_to_req_indices", token_to_req_indices, torch.int32, rows)
    check_pages(c, "swa_block_table", swa_block_table, "swa_block_size", swa_block_size)
    check_pages(
        c,
        "compressed_block_table",
        compressed_block_table,
        "compressed_block_size",
        compressed_block_size,
        optional=True,
    )
    decode_is_local = decode_compressed_indices_are_local and decode_compressed_indices is not None
    if compressed_block_table is None and (decode_is_local or (topk > 0 and prefill_topk_indices.shape[1] > 0)):
        c.fail("compressed_block_table", "a tensor: there are request-local indices to translate", "None", TypeError)
    check_rows(c, "decode_is_valid_token", decode_is_valid_token, torch.bool, decode, optional=True)
    c.tensor("out", sparse_indices, torch.int32, (None, mixed_width(window_size, topk, decode_compressed_indices)))
    c.tensor("out", sparse_topk_lens, torch.int32, (None,))
    for result in (sparse_indices, sparse_topk_lens):
        c.require(result.shape[0] == rows, "out", f"decode and prefill rows, {rows}", result.shape[0])


def _cost_mixed(
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
    decode_compressed_indices_are_local: bool,
    decode_is_valid_token: torch.Tensor | None,
    sparse_indices: torch.Tensor,
    sparse_topk_lens: torch.Tensor,
) -> Cost:
    prefill, width = prefill_topk_indices.shape
    window_pages = prefill * (-(-(window_size - 1) // swa_block_size) + 1)
    picks = prefill * min(topk, width)
    local = nbytes(decode_compressed_indices) if decode_compressed_indices_are_local else 0
    moved = nbytes(decode_swa_indices, decode_compressed_indices, query_start_loc, seq_lens)
    return Cost(bytes=moved + nbytes(sparse_indices, sparse_topk_lens) + (window_pages + 2 * picks) * 4 + local)


def _validate_mixed(
    decode_swa_indices: torch.Tensor,
    decode_compressed_indices: torch.Tensor | None,
    decode_compressed_topk_lens: torch.Tensor | None,
    prefill_topk_indices: torch.Tensor,
    query_start_loc: torch.Tensor,
    *_: object,
) -> None:
    validate.ascending("build_flashinfer_mixed_sparse_indices", "query_start_loc", query_start_loc)


_mixed = define_op(
    "build_flashinfer_mixed_sparse_indices(Tensor decode_swa_indices, Tensor? decode_compressed_indices, "
    "Tensor? decode_compressed_topk_lens, Tensor prefill_topk_indices, Tensor query_start_loc, Tensor seq_lens, "
    "Tensor token_to_req_indices, Tensor swa_block_table, SymInt swa_block_size, Tensor? compressed_block_table, "
    "SymInt compressed_block_size, SymInt window_size, SymInt compress_ratio, SymInt topk, "
    "bool decode_compressed_indices_are_local, Tensor? decode_is_valid_token, Tensor(a!) sparse_indices, "
    "Tensor(b!) sparse_topk_lens) -> ()",
    check=_check_mixed,
    reference=reference.build_flashinfer_mixed_sparse_indices,
    kernel="cute_kernels.indices.mixed",
    cost=_cost_mixed,
    validate=_validate_mixed,
)


def _without_middle(indices: torch.Tensor | None) -> torch.Tensor | None:
    """[rows, 1, width] as [rows, width]; anything else as it is."""
    if isinstance(indices, torch.Tensor) and indices.dim() == 3 and indices.shape[1] == 1:
        return indices.squeeze(1)
    return indices


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
    return indices, lens
