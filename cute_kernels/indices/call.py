# SPDX-License-Identifier: Apache-2.0
"""Calls of the index builders: their arguments by name, in the order of the schemas; and where build_step_metadata
writes its results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch

from cute_kernels.formats import round_up

ROW_ALIGNMENT = 128
"""Every array has room for a multiple of so many rows, so that it starts at a multiple of 128 bytes."""

_SHARED = (
    ("positions", "int64"),
    ("query_start_loc", "int32"),
    ("seq_lens", "int32"),
    ("token_to_req_indices", "int32"),
    ("min_restart", "int32"),
    ("gather_lens", "int32"),
)
_OF_KIND = (
    ("slot_mapping", "int64"),
    ("state_slot_mapping", "int64"),
    ("compressed_slot_mapping", "int64"),
    ("decode_swa_lens", "int32"),
    ("visible", "int32"),
    ("decode_topk_lens", "int32"),
    ("key_starts", "int32"),
    ("row_key_starts", "int32"),
    ("row_key_ends", "int32"),
    ("is_valid_token", "bool"),
)
_SIZES = {"int64": 8, "int32": 4, "bool": 1}


def _row_offsets(arrays: tuple[tuple[str, str], ...]) -> tuple[dict[str, int], int]:
    """(where each array starts, where the last one ends), in bytes per row of room: arrays lie one behind another."""
    offsets, end = {}, 0
    for name, dtype in arrays:
        offsets[name] = end
        end += _SIZES[dtype]
    return offsets, end


SHARED_OFFSETS, SHARED_BYTES = _row_offsets(_SHARED)
KIND_OFFSETS, KIND_BYTES = _row_offsets(_OF_KIND)
"""Of arrays that all kinds share, and of those of one kind: multiplied by the room they are bytes. The windows' indices
lie behind the arrays of their kind."""


@dataclass(frozen=True)
class StepLayout:
    """Where build_step_metadata writes in its buffer.

    max_num_tokens   largest number of rows, and of requests
    window_size      columns of the windows' indices
    kinds            how many kinds of layers there are. They lie in the order of their ratios: number 0 is the first
                     one that the step has tables of
    """

    SHARED: ClassVar[frozenset[str]] = frozenset(SHARED_OFFSETS)
    """Arrays that all kinds share."""

    max_num_tokens: int
    window_size: int
    kinds: int

    @property
    def room(self) -> int:
        """Rows of every array: those of the largest step, and one more for query_start_loc."""
        return round_up(self.max_num_tokens + 1, ROW_ALIGNMENT)

    @property
    def kind_bytes(self) -> int:
        return self.room * (KIND_BYTES + 4 * self.window_size)

    @property
    def nbytes(self) -> int:
        return self.kind_offset(self.kinds)

    def kind_offset(self, kind: int) -> int:
        """Byte at which the arrays of a kind start."""
        return self.room * SHARED_BYTES + kind * self.kind_bytes

    def arrays(self, kind: int) -> dict[str, tuple[int, str, int]]:
        """Name -> (byte offset, dtype, columns) of all arrays of one kind, those it shares with the others included.

        Each has `room` rows; columns 0 means that it is a vector.
        """
        found = {name: (self.room * SHARED_OFFSETS[name], dtype, 0) for name, dtype in _SHARED}
        start = self.kind_offset(kind)
        found |= {name: (start + self.room * KIND_OFFSETS[name], dtype, 0) for name, dtype in _OF_KIND}
        found["decode_swa_indices"] = (start + self.room * KIND_BYTES, "int32", self.window_size)
        return found


class WindowCall(NamedTuple):
    """compute_decode_swa_indices."""

    positions: torch.Tensor
    token_to_req_indices: torch.Tensor
    is_valid_token: torch.Tensor
    block_table: torch.Tensor
    block_size: int
    window_size: int
    out_indices: torch.Tensor
    out_lens: torch.Tensor


class TranslateCall(NamedTuple):
    """compute_global_topk_indices_and_lens."""

    topk_indices: torch.Tensor
    token_to_req_indices: torch.Tensor
    block_table: torch.Tensor
    block_size: int
    is_valid_token: torch.Tensor
    out_indices: torch.Tensor
    out_lens: torch.Tensor


class C128aCall(NamedTuple):
    """build_c128a_topk_metadata."""

    positions: torch.Tensor
    compress_ratio: int
    num_decode_tokens: int
    token_to_req_indices: torch.Tensor
    block_table: torch.Tensor
    block_size: int
    slot_mapping: torch.Tensor
    global_decode_buffer: torch.Tensor
    decode_lens_buffer: torch.Tensor
    prefill_buffer: torch.Tensor
    max_compressed_tokens: int


class CombineCall(NamedTuple):
    """combine_topk_swa_indices."""

    topk_indices: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    gather_lens: torch.Tensor
    window_size: int
    compress_ratio: int
    topk: int
    M: int
    N: int
    out_indices: torch.Tensor
    out_lens: torch.Tensor


class MixedCall(NamedTuple):
    """build_flashinfer_mixed_sparse_indices."""

    decode_swa_indices: torch.Tensor
    decode_compressed_indices: torch.Tensor | None
    decode_compressed_topk_lens: torch.Tensor | None
    prefill_topk_indices: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    token_to_req_indices: torch.Tensor
    swa_block_table: torch.Tensor
    swa_block_size: int
    compressed_block_table: torch.Tensor | None
    compressed_block_size: int
    window_size: int
    compress_ratio: int
    topk: int
    decode_compressed_indices_are_local: bool
    decode_is_valid_token: torch.Tensor | None
    sparse_indices: torch.Tensor
    sparse_topk_lens: torch.Tensor


class Kind(NamedTuple):
    """One kind of layers. Tables are None where there are none.

    topk   most of the entries that a decode row is given; of no meaning without compression
    """

    ratio: int
    swa: torch.Tensor | None
    compressed: torch.Tensor | None
    state: torch.Tensor | None
    state_block_size: int
    topk: int


class StepCall(NamedTuple):
    """build_step_metadata."""

    upload: torch.Tensor
    seq_lens: torch.Tensor | None
    min_restart: torch.Tensor | None
    swa_block_table: torch.Tensor | None
    c4_swa_block_table: torch.Tensor | None
    c4_compressed_block_table: torch.Tensor | None
    c4_state_block_table: torch.Tensor | None
    c128_swa_block_table: torch.Tensor | None
    c128_compressed_block_table: torch.Tensor | None
    c128_state_block_table: torch.Tensor | None
    key_starts: torch.Tensor | None
    buffer: torch.Tensor
    c128a_decode_buffer: torch.Tensor | None
    c128a_prefill_buffer: torch.Tensor | None
    num_requests: int
    num_tokens: int
    num_decodes: int
    num_decode_tokens: int
    max_num_tokens: int
    window_size: int
    index_topk: int
    c128a_columns: int
    swa_block_size: int
    kv_block_size: int
    c4_state_block_size: int
    c128_state_block_size: int
    use_pdl: bool

    def every_kind(self) -> tuple[Kind, Kind, Kind]:
        """All three, whether the step has them or not."""
        c4 = self.c4_swa_block_table, self.c4_compressed_block_table, self.c4_state_block_table
        c128 = self.c128_swa_block_table, self.c128_compressed_block_table, self.c128_state_block_table
        return (
            Kind(1, self.swa_block_table, None, None, 1, 0),
            Kind(4, *c4, self.c4_state_block_size, self.index_topk),
            Kind(128, *c128, self.c128_state_block_size, self.c128a_columns),
        )

    def kinds(self) -> list[Kind]:
        """Those that the step has."""
        return [kind for kind in self.every_kind() if kind.swa is not None]

    def layout(self) -> StepLayout:
        return StepLayout(self.max_num_tokens, self.window_size, len(self.kinds()))
