"""The compressor: save projections in the state cache, close groups of tokens into compressed cache entries."""

from __future__ import annotations

from typing import Any

import torch

from cute_kernels import formats
from cute_kernels.compressor import reference
from cute_kernels.compressor.ops_fused import fused_compress_norm_rope_store
from cute_kernels.compressor.ops_store import RATIOS, compress_norm_rope_store
from cute_kernels.runtime import validate
from cute_kernels.runtime.checks import Checker
from cute_kernels.runtime.ops import Cost, define_op, nbytes

__all__ = [
    "compress_norm_rope_store",
    "fused_compress_norm_rope_store",
    "get_compressed_slot_mapping",
    "save_partial_states",
]


def _check_save(
    kv: torch.Tensor,
    score: torch.Tensor,
    ape: torch.Tensor,
    positions: torch.Tensor,
    state_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    block_size: int,
    compress_ratio: int,
) -> None:
    c = Checker("save_partial_states")
    c.one_of("compress_ratio", compress_ratio, RATIOS)
    c.tensor("kv", kv, torch.float32, ("T", "width"))
    head_dim = kv.shape[1] // (2 if compress_ratio == 4 else 1)
    if head_dim not in (formats.HEAD_DIM, formats.INDEX_DIM) or kv.shape[1] % head_dim:
        widths = " or ".join(str(formats.compressor_state(d, compress_ratio).width) for d in (512, 128))
        c.fail("kv", f"{widths} columns for compress_ratio {compress_ratio}", list(kv.shape))
    c.tensor("score", score, torch.float32, ("T", "width"))
    c.tensor("ape", ape, torch.float32, (compress_ratio, "width"))
    c.require(block_size > 0, "block_size", "a positive number", block_size)
    formats.compressor_state(head_dim, compress_ratio).check(c, "state_cache", state_cache, block_size)
    c.tensor("slot_mapping", slot_mapping, torch.int64, (None,))
    rows = slot_mapping.shape[0]
    c.require(rows <= kv.shape[0], "slot_mapping", f"at most T = {kv.shape[0]} rows", rows)
    c.tensor("positions", positions, torch.int64, (None,))
    c.require(positions.shape[0] >= rows, "positions", f"at least {rows} rows, as in slot_mapping", positions.shape[0])


def _cost_save(kv: torch.Tensor, score: torch.Tensor, ape: torch.Tensor, positions: torch.Tensor, *rest: Any) -> Cost:
    slot_mapping = rest[1]
    rows = int((slot_mapping >= 0).sum())
    width = kv.shape[1]
    return Cost(bytes=rows * (16 * width + 8) + nbytes(ape, slot_mapping), flops=rows * width)


def _validate_save(
    kv: torch.Tensor,
    score: torch.Tensor,
    ape: torch.Tensor,
    positions: torch.Tensor,
    state_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    block_size: int,
    compress_ratio: int,
) -> None:
    validate.distinct_slots("save_partial_states", "slot_mapping", slot_mapping, state_cache.shape[0] * block_size)


_save = define_op(
    "save_partial_states(Tensor kv, Tensor score, Tensor ape, Tensor positions, Tensor(a!) state_cache, "
    "Tensor slot_mapping, SymInt block_size, int compress_ratio) -> ()",
    check=_check_save,
    reference=reference.save_partial_states,
    kernel="cute_kernels.compressor.save",
    cost=_cost_save,
    validate=_validate_save,
)


def save_partial_states(
    kv: torch.Tensor,
    score: torch.Tensor,
    ape: torch.Tensor,
    positions: torch.Tensor,
    state_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    block_size: int,
    state_width: int,
    compress_ratio: int,
    pdl_kwargs: dict[str, Any] | None = None,
) -> None:
    """Store each token's projections in the compressor's state cache; the score gets its position's bias.

    Row t goes to slot slot_mapping[t]: columns 0..width-1 = kv[t], the rest = score[t] + ape[positions[t] mod ratio].
    Copies and one fp32 addition: exact.

    kv, score        fp32 [T, width], rows of any stride (column slices of kv_score)
    ape              fp32 [ratio, width]
    positions        int64 [>= T']
    state_cache      fp32 [num_blocks, block_size, 2 * width], page stride = stride(0); mutated
    slot_mapping     int64 [T'], T' <= T, slots of the state cache: page * block_size + row. Slots outside the cache,
                     negative ones included, are skipped; those inside it must be distinct
    block_size       tokens per state page
    state_width      width: head_dim (512 or 128), twice that for ratio 4
    compress_ratio   4 or 128
    pdl_kwargs       launch options; they never change the result

    Raises ValueError or TypeError on arguments that do not fit. Layout: formats.CompressorStateFormat.
    """
    if not isinstance(kv, torch.Tensor) or kv.dim() != 2 or state_width != kv.shape[1]:
        c = Checker("save_partial_states")
        c.tensor("kv", kv, torch.float32, (None, None))
        c.fail("state_width", f"{kv.shape[1]}, the columns of kv", state_width)
    _save(kv, score, ape, positions, state_cache, slot_mapping, block_size, compress_ratio)


def _check_slots(
    out: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    slot_mapping: torch.Tensor | None,
    num_tokens: int,
    block_size: int,
    compress_ratio: int,
) -> None:
    c = Checker("get_compressed_slot_mapping")
    c.tensor("out", out, torch.int64, (None,))
    c.require(num_tokens >= 0, "num_tokens", "a number >= 0", num_tokens)
    c.require(out.shape[0] >= num_tokens, "out", f"at least num_tokens = {num_tokens} rows", list(out.shape))
    c.tensor("seq_lens", seq_lens, torch.int32, ("R",))
    c.tensor("query_start_loc", query_start_loc, torch.int32, (seq_lens.shape[0] + 1,))
    c.tensor("block_table", block_table, torch.int32, ("R", None))
    c.tensor("slot_mapping", slot_mapping, torch.int64, (None,), optional=True)
    if slot_mapping is not None:
        rows = slot_mapping.shape[0]
        c.require(rows >= num_tokens, "slot_mapping", f"at least num_tokens = {num_tokens} rows", rows)
    c.require(compress_ratio > 0, "compress_ratio", "a positive number", compress_ratio)
    whole = block_size > 0 and block_size % compress_ratio == 0
    c.require(whole, "block_size", f"a positive multiple of compress_ratio = {compress_ratio}", block_size)


def _cost_slots(
    out: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    slot_mapping: torch.Tensor | None,
    num_tokens: int,
    *_: Any,
) -> Cost:
    return Cost(bytes=nbytes(out, query_start_loc, seq_lens, slot_mapping))


def _validate_slots(out: torch.Tensor, query_start_loc: torch.Tensor, *_: Any) -> None:
    validate.ascending("get_compressed_slot_mapping", "query_start_loc", query_start_loc)


_slots = define_op(
    "get_compressed_slot_mapping(Tensor(a!) out, Tensor query_start_loc, Tensor seq_lens, Tensor block_table, "
    "Tensor? slot_mapping, SymInt num_tokens, SymInt block_size, SymInt compress_ratio) -> ()",
    check=_check_slots,
    reference=reference.get_compressed_slot_mapping,
    kernel="cute_kernels.compressor.slots",
    cost=_cost_slots,
    validate=_validate_slots,
)


def get_compressed_slot_mapping(
    num_tokens: int,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    compress_ratio: int,
    out: torch.Tensor | None = None,
    *,
    slot_mapping: torch.Tensor | None = None,
) -> torch.Tensor:
    """Slots of the compressed cache that the tokens of a step fill; -1 for a token that closes no group.

    Token t of request r has position pos = seq_lens[r] - query_start_loc[r + 1] + t. If (pos + 1) mod ratio == 0 it
    closes entry g = pos // ratio, in slot block_table[r, g // rows] * rows + g % rows with rows = block_size // ratio.

    num_tokens        rows of the result; rows outside every request give -1
    query_start_loc   int32 [R + 1], ascending first rows of the requests
    seq_lens          int32 [R], context after this step
    block_table       int32 [R, width] of the compressed cache, row-strided; negative pages and columns outside give -1
    block_size        page size in tokens, a multiple of compress_ratio
    compress_ratio    tokens per entry
    out               int64 [>= num_tokens] or None (allocated); all of it is overwritten, -1 past num_tokens
    slot_mapping      int64 [>= num_tokens] or None; given, tokens whose own slot is negative give -1 too

    Returns int64 [num_tokens], the head of `out`. Raises ValueError or TypeError on arguments that do not fit.
    """
    if out is None:
        c = Checker("get_compressed_slot_mapping")
        c.tensor("query_start_loc", query_start_loc, torch.int32, (None,))
        c.ints(num_tokens=num_tokens)
        c.require(num_tokens >= 0, "num_tokens", "a number >= 0", num_tokens)
        out = torch.empty(num_tokens, dtype=torch.int64, device=query_start_loc.device)
    _slots(out, query_start_loc, seq_lens, block_table, slot_mapping, num_tokens, block_size, compress_ratio)
    return out[:num_tokens]
