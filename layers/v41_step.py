# SPDX-License-Identifier: Apache-2.0
"""One step of V4.1's layers: what all of them share, and what they hand to those behind them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from cute_kernels.compressor.ops import get_compressed_slot_mapping
from cute_kernels.indices.ops import compute_decode_swa_indices
from cute_kernels.runtime.checks import Checker

from .caches import SWA_BLOCK_SIZE
from .metadata import BlockTables, DeepseekV4Metadata, DeepseekV4MetadataBuilder
from .v41_caches import ENTRY_BLOCK_SIZE
from .v41_config import DeepseekV41Config

OF_V4_WINDOW = 1
"""The compress ratio of a layer of V4 that has a window alone."""


@dataclass(frozen=True)
class V41Tables:
    """Where a step's requests have their rows, int32.

    windows   [R, width], pages of 64 tokens of the window caches
    entries   [R, width], pages of 128 tokens of every source's entries and keys
    rings     [R], each request's ring in every source's ring cache; negative: none
    """

    windows: torch.Tensor
    entries: torch.Tensor | None = None
    rings: torch.Tensor | None = None


@dataclass(frozen=True)
class V41Entries:
    """Of the layers of one ratio: int64 slots [T] of the entries that rows close, int32 visible [T] entries of each row
    and entry_lens [R] of each request, and, over the prefill requests one after the other, first keys int32 [P + 1] of
    requests, row_starts and row_ends [T] of rows (of decode rows without meaning). longest: of a request."""

    slots: torch.Tensor
    visible: torch.Tensor
    entry_lens: torch.Tensor
    key_starts: torch.Tensor
    row_starts: torch.Tensor
    row_ends: torch.Tensor
    longest: int


@dataclass(frozen=True)
class V41Step:
    """A step of layers that run the same rows. Rows: tokens of decode requests first, then those of prefill requests.

    window           what a window needs, as of a layer of V4 without entries
    window_slots     int32 [D, 1, window]: slots of each decode row's window, -1 where there is no row; of a draft the
                     window in front of its block, and the block
    window_lens      int32 [D]: columns of these
    gather_lens      int32 [P]: tokens of each prefill request that its window reads
    tables           as given
    ring_slots       int64 [T]: where rows' projections are kept
    ring_rows        of a ring
    entries          by ratio
    entry_table      int32: the table of entries, one row for each request of `window.decode_batch()`
    is_draft         rows of a request are a block, for draft layers
    """

    window: DeepseekV4Metadata
    window_slots: torch.Tensor
    window_lens: torch.Tensor
    gather_lens: torch.Tensor
    tables: V41Tables
    ring_slots: torch.Tensor | None
    ring_rows: int
    entries: dict[int, V41Entries]
    entry_table: torch.Tensor | None
    is_draft: bool

    @property
    def num_tokens(self) -> int:
        return self.window.num_tokens


@dataclass(frozen=True)
class V41Selection:
    """What index sources hand to the layers behind them.

    source          the layer whose selection it is
    picks           int32 [T, K]: entries of each row, request-local, then -1
    slots, lens     int32 [D, K] and [D]: those of decode rows as slots of the cache, and how many
    candidate_of    the layer that selected candidate blocks, or None
    candidates      int32 [T, C]: blocks of eight entries, ascending, then -1; None: every row picks all that it sees
    """

    source: int
    picks: torch.Tensor
    slots: torch.Tensor | None = None
    lens: torch.Tensor | None = None
    candidate_of: int | None = None
    candidates: torch.Tensor | None = None

    def of_rows(self, rows: torch.Tensor) -> V41Selection:
        """For layers that run some rows only, int64 [n], ascending, with all decode rows among them."""
        candidates = None if self.candidates is None else self.candidates[rows]
        return replace(self, picks=self.picks[rows], candidates=candidates)


@dataclass(frozen=True)
class LateRows:
    """What layers behind the last source run of a step: rows of each request, the first position whose window row they
    have, and numbers of their rows among all rows of the step."""

    query_lens: list[int]
    replay_start: list[int]
    rows: list[int]


def late_rows(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    num_decodes: int,
    replay_start: Sequence[int] | None = None,
    most: int = 128,
) -> LateRows:
    """Late-layer prefill: behind the last source no layer stores entries, so that of a prefill they run the last rows
    alone. Decode rows stay.

    query_lens, seq_lens   of the step of all rows
    replay_start           of the late layers so far; None: new requests
    most                   rows of a prefill request that they run
    """
    kept: list[int] = []
    starts: list[int] = []
    numbers: list[int] = []
    first = 0
    for request, (rows, length) in enumerate(zip(query_lens, seq_lens, strict=True)):
        count = rows if request < num_decodes else min(rows, most)
        before = 0 if replay_start is None else replay_start[request]
        kept.append(count)
        # rows that follow those of the step before have the same window behind them
        starts.append(before if count == rows else length - count)
        numbers += range(first + rows - count, first + rows)
        first += rows
    return LateRows(kept, starts, numbers)


class V41StepBuilder:
    """Builds steps. A window's metadata are in buffers that the next step uses again, so layers that run other rows
    (`late_rows`) have a builder of their own; what is of entries and rings is made anew.

    max_num_tokens   largest number of rows in a step, and of requests
    max_model_len    largest sequence length
    """

    def __init__(
        self,
        config: DeepseekV41Config,
        max_num_tokens: int,
        max_model_len: int,
        device: torch.device | str = "cpu",
    ) -> None:
        self.config, self.device = config, torch.device(device)
        self._windows = DeepseekV4MetadataBuilder(config, max_num_tokens, max_model_len, device)
        self._ratios = sorted(set(config.compress_ratios) - {0})

    def build(
        self,
        query_lens: Sequence[int],
        seq_lens: Sequence[int],
        tables: V41Tables,
        num_decodes: int,
        *,
        ring_rows: int = 0,
        replay_start: Sequence[int] | None = None,
        is_draft: bool = False,
    ) -> V41Step:
        """A step.

        query_lens     rows of each request, decode requests first
        seq_lens       tokens of each request after this step; 0: a padded request
        tables         without entries: for layers that have a window alone
        num_decodes    how many of the requests are decodes
        ring_rows      rows of a ring (V41Caches), with rings
        replay_start   first position of each request that the layers have in their windows; rows before are not read.
                       None: 0
        is_draft       each request has a block of as many rows as the others, all of them decodes, of which every row
                       sees all; and the rows of a window in front of it

        Raises ValueError or TypeError on arguments that do not fit.
        """
        check = Checker("V41StepBuilder.build")
        window = self._windows.build(OF_V4_WINDOW, query_lens, seq_lens, BlockTables(tables.windows), num_decodes)
        requests = len(window.seq_lens_cpu)
        check.device = window.positions.device
        check.tensor("tables.entries", tables.entries, torch.int32, (requests, None), optional=True)
        check.tensor("tables.rings", tables.rings, torch.int32, (requests,), optional=True)
        slots, lens, gathered = window.decode_swa_indices, window.decode_swa_lens, window.prefill_gather_lens
        last = window.positions[: window.num_decode_tokens]
        if is_draft:
            block = window.decode_query_len
            if window.num_prefills or block is None:
                check.fail("query_lens", "decodes of as many rows each, with is_draft", list(query_lens))
            # every row of a block has the window of its last one, which reaches back further by the block
            last = window.seq_lens[window.token_to_req_indices[: window.num_decode_tokens].long()].long() - 1
            slots, lens = compute_decode_swa_indices(
                last,
                window.token_to_req_indices,
                window.is_valid_token,
                tables.windows,
                SWA_BLOCK_SIZE,
                self.config.sliding_window + block,
            )
        if replay_start is not None:
            check.require(len(replay_start) == requests, "replay_start", f"{requests} entries", len(replay_start))
            for start, rows, length in zip(replay_start, query_lens, seq_lens, strict=True):
                fits = length == 0 or 0 <= start <= length - rows
                check.require(fits, "replay_start", f"0 to {length - rows}, the first row of the step", start)
            slots, gathered = self._clamped(window, slots, last, torch.tensor(replay_start, device=self.device))
        ring_slots = None
        if tables.rings is not None:
            check.require(ring_rows > 0, "ring_rows", "rows of a ring, with tables.rings", ring_rows)
            ring = tables.rings[window.token_to_req_indices.long()].long()
            ring_slots = torch.where(
                (ring >= 0) & (window.positions >= 0), ring * ring_rows + window.positions % ring_rows, -1
            )
        entries, table = {}, tables.entries
        if table is not None and not is_draft:
            entries = {ratio: self._entries(window, table, ratio) for ratio in self._ratios}
            if window.decode_query_len is None:
                table = table[window.token_to_req_indices[: window.num_decode_tokens].long()]
            else:
                table = table[:num_decodes]
        return V41Step(window, slots, lens, gathered, tables, ring_slots, ring_rows, entries, table, is_draft)

    def _clamped(
        self, window: DeepseekV4Metadata, slots: torch.Tensor, last: torch.Tensor, start: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Slots of windows that end with the last positions [D], and gathered tokens, without what lies before `start`
        [R]."""
        rows, width = window.num_decode_tokens, slots.shape[2]
        oldest = (last - width + 1).clamp(min=0)
        column = oldest[:, None] + torch.arange(width, device=self.device)
        exists = column >= start[window.token_to_req_indices[:rows].long()][:, None]
        slots = torch.where(exists[:, None], slots, -1)
        present = window.prefill_seq_lens - start[window.num_decodes :]
        return slots, torch.minimum(window.prefill_gather_lens, present.to(torch.int32))

    @staticmethod
    def _entries(window: DeepseekV4Metadata, table: torch.Tensor, ratio: int) -> V41Entries:
        first = window.num_decodes
        slots = get_compressed_slot_mapping(
            window.num_tokens, window.query_start_loc, window.seq_lens, table, ENTRY_BLOCK_SIZE, ratio
        )
        visible = torch.div(window.positions + 1, ratio, rounding_mode="floor").to(torch.int32)
        lens = torch.div(window.seq_lens, ratio, rounding_mode="floor")
        starts = torch.zeros(window.num_prefills + 1, dtype=torch.int32, device=table.device)
        torch.cumsum(lens[first:], 0, dtype=torch.int32, out=starts[1:])
        own = (window.token_to_req_indices - first).clamp(min=0).long()
        row_starts = starts[own]
        longest = window.max_seq_len // ratio
        return V41Entries(slots, visible, lens, starts, row_starts, row_starts + visible, longest)
