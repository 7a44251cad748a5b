"""What all layers of a step share, of every kind of layer, in one launch."""

from __future__ import annotations

from typing import Any

import torch

from cute_kernels.indices import reference
from cute_kernels.indices.step import Call, StepLayout, of_arguments
from cute_kernels.runtime.checks import Checker
from cute_kernels.runtime.ops import Cost, define_op, nbytes


@of_arguments
def _check(a: Call) -> None:
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
    for name in Call._fields[3:10]:
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


@of_arguments
def _cost(a: Call) -> Cost:
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


_step = define_op(
    "build_step_metadata(Tensor upload, Tensor? seq_lens, Tensor? min_restart, Tensor? swa_block_table, "
    "Tensor? c4_swa_block_table, Tensor? c4_compressed_block_table, Tensor? c4_state_block_table, "
    "Tensor? c128_swa_block_table, Tensor? c128_compressed_block_table, Tensor? c128_state_block_table, "
    "Tensor? key_starts, Tensor(a!) buffer, Tensor(b!)? c128a_decode_buffer, Tensor(c!)? c128a_prefill_buffer, "
    "SymInt num_requests, SymInt num_tokens, SymInt num_decodes, SymInt num_decode_tokens, SymInt max_num_tokens, "
    "SymInt window_size, SymInt index_topk, SymInt c128a_columns, SymInt swa_block_size, SymInt kv_block_size, "
    "SymInt c4_state_block_size, SymInt c128_state_block_size, bool use_pdl) -> ()",
    check=_check,
    reference=of_arguments(reference.build_step_metadata),
    kernel="cute_kernels.indices.step_metadata",
    cost=_cost,
)


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
        *(upload, seq_lens, min_restart, swa_block_table, *c4, *c128, key_starts, out),
        *(c128a_decode_buffer, c128a_prefill_buffer),
        *(num_requests, num_tokens, num_decodes, num_decode_tokens, max_num_tokens, window_size, index_topk),
        *(c128a_columns, swa_block_size, kv_block_size, c4_state_block_size, c128_state_block_size, use_pdl),
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
