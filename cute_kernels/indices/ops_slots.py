"""Index tables over one paged cache: the sliding window, translated top-k picks, every entry of a C128A layer."""

from __future__ import annotations

import torch

from cute_kernels.indices import reference
from cute_kernels.indices.arguments import POSITION_DTYPES, check_pages, check_rows
from cute_kernels.runtime.checks import Checker
from cute_kernels.runtime.ops import Cost, define_op, nbytes


def _check_swa(
    positions: torch.Tensor,
    token_to_req_indices: torch.Tensor,
    is_valid_token: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    window_size: int,
    out_indices: torch.Tensor,
    out_lens: torch.Tensor,
) -> None:
    c = Checker("compute_decode_swa_indices")
    c.tensor("positions", positions, POSITION_DTYPES, ("D",))
    check_rows(c, "token_to_req_indices", token_to_req_indices, torch.int32, positions.shape[0])
    check_rows(c, "is_valid_token", is_valid_token, torch.bool, positions.shape[0])
    check_pages(c, "block_table", block_table, "block_size", block_size)
    c.require(window_size > 0, "window_size", "a positive number", window_size)
    c.tensor("out_indices", out_indices, torch.int32, ("D", 1, window_size))
    c.tensor("out_lens", out_lens, torch.int32, ("D",))


def _cost_swa(
    positions: torch.Tensor,
    token_to_req_indices: torch.Tensor,
    is_valid_token: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    window_size: int,
    out_indices: torch.Tensor,
    out_lens: torch.Tensor,
) -> Cost:
    rows = positions.shape[0]
    pages = rows * (-(-(window_size - 1) // block_size) + 1)
    return Cost(bytes=nbytes(positions, out_indices, out_lens) + rows * 5 + pages * 4)


_swa = define_op(
    "compute_decode_swa_indices(Tensor positions, Tensor token_to_req_indices, Tensor is_valid_token, "
    "Tensor block_table, SymInt block_size, SymInt window_size, Tensor(a!) out_indices, Tensor(b!) out_lens) -> ()",
    check=_check_swa,
    reference=reference.compute_decode_swa_indices,
    kernel="cute_kernels.indices.window",
    cost=_cost_swa,
)


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
    _swa(positions, token_to_req_indices, is_valid_token, block_table, block_size, window_size, out_indices, out_lens)
    return out_indices, out_lens


def _check_global(
    topk_indices: torch.Tensor,
    token_to_req_indices: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    is_valid_token: torch.Tensor,
    out_indices: torch.Tensor,
    out_lens: torch.Tensor,
) -> None:
    c = Checker("compute_global_topk_indices_and_lens")
    c.tensor("topk_indices", topk_indices, torch.int32, ("T", "K"))
    check_rows(c, "token_to_req_indices", token_to_req_indices, torch.int32, topk_indices.shape[0])
    check_pages(c, "block_table", block_table, "block_size", block_size)
    check_rows(c, "is_valid_token", is_valid_token, torch.bool, topk_indices.shape[0])
    c.tensor("out_indices", out_indices, torch.int32, ("T", "K"))
    c.tensor("out_lens", out_lens, torch.int32, ("T",))


def _cost_global(
    topk_indices: torch.Tensor,
    token_to_req_indices: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    is_valid_token: torch.Tensor,
    out_indices: torch.Tensor,
    out_lens: torch.Tensor,
) -> Cost:
    pages = min(topk_indices.numel(), topk_indices.shape[0] * block_table.shape[1])
    return Cost(bytes=nbytes(topk_indices, out_indices, out_lens) + topk_indices.shape[0] * 5 + pages * 4)


_global = define_op(
    "compute_global_topk_indices_and_lens(Tensor topk_indices, Tensor token_to_req_indices, Tensor block_table, "
    "SymInt block_size, Tensor is_valid_token, Tensor(a!) out_indices, Tensor(b!) out_lens) -> ()",
    check=_check_global,
    reference=reference.compute_global_topk_indices_and_lens,
    kernel="cute_kernels.indices.translate",
    cost=_cost_global,
)


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
    _global(topk_indices, token_to_req_indices, block_table, block_size, is_valid_token, out_indices, out_lens)
    return out_indices, out_lens


def _check_c128a(
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
    max_compressed_tokens: int,
) -> None:
    c = Checker("build_c128a_topk_metadata")
    c.tensor("positions", positions, POSITION_DTYPES, ("T",))
    rows, width = positions.shape[0], max_compressed_tokens
    c.require(compress_ratio > 0, "compress_ratio", "a positive number", compress_ratio)
    in_range = 0 <= num_decode_tokens <= rows
    c.require(in_range, "num_decode_tokens", f"a number of 0 .. T = {rows}", num_decode_tokens)
    check_rows(c, "token_to_req_indices", token_to_req_indices, torch.int32, num_decode_tokens)
    check_pages(c, "block_table", block_table, "block_size", block_size)
    check_rows(c, "slot_mapping", slot_mapping, torch.int64, num_decode_tokens)
    c.require(width >= 0 and width % 128 == 0, "max_compressed_tokens", "a multiple of 128", width)
    check_rows(c, "decode_lens_buffer", decode_lens_buffer, torch.int32, num_decode_tokens)
    for name, buffer, used in (
        ("global_decode_buffer", global_decode_buffer, num_decode_tokens),
        ("prefill_buffer", prefill_buffer, rows - num_decode_tokens),
    ):
        c.tensor(name, buffer, torch.int32, (None, None))
        fits = buffer.shape[0] >= used and buffer.shape[1] >= width
        c.require(fits, name, f"at least {used} rows and {width} columns", list(buffer.shape))


def _cost_c128a(
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
    max_compressed_tokens: int,
) -> Cost:
    counts = (positions[:num_decode_tokens].long().clamp(min=-1) + 1) // compress_ratio
    pages = int(-(-counts.clamp(max=max_compressed_tokens) // block_size).sum())
    written = positions.shape[0] * max_compressed_tokens * 4
    return Cost(bytes=nbytes(positions) + written + num_decode_tokens * 16 + pages * 4)


_c128a = define_op(
    "build_c128a_topk_metadata(Tensor positions, SymInt compress_ratio, SymInt num_decode_tokens, "
    "Tensor token_to_req_indices, Tensor block_table, SymInt block_size, Tensor slot_mapping, "
    "Tensor(a!) global_decode_buffer, Tensor(b!) decode_lens_buffer, "
    "Tensor(c!) prefill_buffer, SymInt max_compressed_tokens) -> ()",
    check=_check_c128a,
    reference=reference.build_c128a_topk_metadata,
    kernel="cute_kernels.indices.c128a",
    cost=_cost_c128a,
)


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
    return (
        global_decode_buffer[:num_decode_tokens, :max_compressed_tokens],
        decode_lens_buffer[:num_decode_tokens],
        prefill_buffer[: positions.shape[0] - num_decode_tokens, :max_compressed_tokens],
    )
