# SPDX-License-Identifier: Apache-2.0
"""Steps of a context group: the metadata of a rank's rows, and which records ranks exchange.

Everything that follows from lengths is made once for all layers of a kind, the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from cute_kernels.paging import context_local_lens, entries_to_slots, expand_block_table

from .bound import bound_key
from .caches import KV_BLOCK_SIZE, STATE_BLOCK_SIZE, SWA_BLOCK_SIZE
from .config import AttentionConfig
from .context import BORDER, ContextParallel, PrefillPlan, Segment, plan_prefill, undivided_prefill
from .indexer import step_columns
from .metadata import BlockTables, DeepseekV4Metadata, DeepseekV4MetadataBuilder, Ints

HALO_ROWS = 4
"""Tokens before a segment that its first entry of ratio 4 also sees."""


@dataclass(frozen=True)
class Exchange:
    """Records that go from one place to another, of each rank as many. Slots int64; -1: none.

    own   [n], where this rank reads those that it sends
    all   [N * n], where those of each rank go here
    """

    own: torch.Tensor
    all: torch.Tensor


@dataclass
class DecodeShare:
    """Decode rows, which all ranks of the group have.

    metadata       with the block table of the whole request, which has no pages that are other ranks'
    block_table    int32 [b, pages]: the rank's own, with a row per request of `decode_batch()`
    tables         of each part of a request that is on this rank, its pages among these, and in
    lens           int32 [b, s_q], the entries of it that a row sees
    visible        int32 [b, s_q]: of ratio 4, entries on this rank that a row sees
    columns        more than any of them, as many as scores have
    """

    metadata: DeepseekV4Metadata
    block_table: torch.Tensor | None = None
    tables: list[torch.Tensor] = field(default_factory=list)
    lens: list[torch.Tensor] = field(default_factory=list)
    visible: torch.Tensor | None = None
    columns: int = 0

    @cached_property
    def bound_key(self) -> tuple[Any, ...]:
        """What the launches of a step with these rows depend on, as of layers.bound.bound_key."""
        tensors = [x for x in (self.block_table, *self.tables, *self.lens, self.visible) if x is not None]
        return bound_key(self.metadata), self.columns, *((x.data_ptr(), tuple(x.shape), x.stride()) for x in tensors)


@dataclass
class PrefillShare:
    """This rank's share of a step's prefill rows, as requests of their own: a segment is one.

    metadata      of these; None: the rank has none
    rows          how many they are
    pages         of the step's requests in all, where their entries are gathered
    held          the entries before the step, from their owners into whole requests' pages; None: caches are replicated
    kept          the entries that the step makes and this rank owns, from there into its cache; None as above
    entries       those of each segment
    window        window records of each segment
    state         rows of each request's compressor state that the next step reads
    halo_rows     int64 [n]: this rank's rows that other segments start behind
    halo_slots    int64 [N * n]: where the state has them
    halo_positions
                  int64 [N * n]
    """

    metadata: DeepseekV4Metadata | None
    rows: int
    pages: int = 0
    held: Exchange | None = None
    kept: Exchange | None = None
    entries: Exchange | None = None
    window: Exchange | None = None
    state: Exchange | None = None
    halo_rows: torch.Tensor | None = None
    halo_slots: torch.Tensor | None = None
    halo_positions: torch.Tensor | None = None


@dataclass
class ContextStep:
    """What a layer of a context group takes in place of DeepseekV4Metadata: rows are those of the decode requests, and
    then this rank's of the prefill requests.

    positions   int64 [T]
    numbers     of the whole step, the same on all ranks
    """

    compress_ratio: int
    cp: ContextParallel
    decodes: DecodeShare | None
    prefills: PrefillShare | None
    plan: PrefillPlan
    positions: torch.Tensor
    numbers: dict[str, str]
    gather_index: torch.Tensor | None
    restore_index: torch.Tensor | None

    @property
    def num_decode_tokens(self) -> int:
        return 0 if self.decodes is None else self.decodes.metadata.num_decode_tokens

    @property
    def num_tokens(self) -> int:
        """Rows of this rank."""
        return self.num_decode_tokens + (0 if self.prefills is None else self.prefills.rows)

    @property
    def bound_key(self) -> tuple[Any, ...]:
        """Of a step with decode rows alone."""
        assert self.decodes is not None
        return self.decodes.bound_key

    @property
    def parts(self) -> list[DeepseekV4Metadata]:
        """The metadata of this rank's rows."""
        found = [] if self.decodes is None else [self.decodes.metadata]
        if self.prefills is not None and self.prefills.metadata is not None:
            found.append(self.prefills.metadata)
        return found

    def own_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """This rank's rows [T, ...] of the whole step's."""
        return rows if self.gather_index is None else rows[self.gather_index]

    def whole_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """The whole step's rows from this rank's [T, ...], by a collective."""
        if self.restore_index is None:
            return rows
        decodes, padded = self.num_decode_tokens, self.plan.padded_rows
        own = rows.new_zeros((padded, *rows.shape[1:]))
        own[: rows.shape[0] - decodes] = rows[decodes:]
        gathered = own.new_empty((self.cp.size, *own.shape))
        self.cp.communicator.all_gather(gathered, own)
        return torch.cat([rows[:decodes], gathered.flatten(0, 1)[self.restore_index]])


class _Upload:
    """Lists of numbers that go to the device in one copy."""

    def __init__(self) -> None:
        self._lists: list[npt.NDArray[np.int64]] = []
        self._then: list[Callable[[torch.Tensor], None]] = []

    def add(self, numbers: npt.NDArray[np.int64], then: Callable[[torch.Tensor], None]) -> None:
        """then(the numbers on the device)"""
        self._lists.append(numbers.astype(np.int64, copy=False))
        self._then.append(then)

    def send(self, device: torch.device) -> None:
        if not self._lists:
            return
        numbers = torch.from_numpy(np.concatenate(self._lists)).to(device, non_blocking=True)
        for part, then in zip(numbers.split([len(x) for x in self._lists]), self._then, strict=True):
            then(part)


Range = tuple[int, Iterable[int]]
"""A request, and rows of one of its caches."""


def _padded(ranges: Sequence[Sequence[Range]]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """(requests, rows) int64 [N, n] of each rank's ranges; -1 behind them."""
    none = np.zeros(0, dtype=np.int64)
    rows = [np.concatenate([none, *(np.asarray(numbers, dtype=np.int64) for _, numbers in own)]) for own in ranges]
    requests = [
        np.concatenate([none, *(np.full(len(numbers), r, dtype=np.int64) for r, numbers in own)])  # type: ignore[arg-type]
        for own in ranges
    ]
    most = max(len(own) for own in rows)
    found = np.full((2, len(ranges), most), -1, dtype=np.int64)
    for rank, (of, numbers) in enumerate(zip(requests, rows, strict=True)):
        found[:, rank, : len(of)] = of, numbers
    return found[0], found[1]


class ContextStepBuilder:
    """Builds a layer kind's steps of a context group. Arguments as of DeepseekV4MetadataBuilder, and cp.

    A step's tensors are valid until the kind is built again. Of steps with decode rows alone they lie in the same
    places as long as the shapes of block tables are the same, as a captured step needs.
    """

    def __init__(
        self,
        config: AttentionConfig,
        max_num_tokens: int,
        max_model_len: int,
        cp: ContextParallel,
        device: torch.device | str = "cpu",
        *,
        use_pdl: bool = False,
    ) -> None:
        self.cp, self.device, self.config = cp, torch.device(device), config
        # two steps at a time, of the same kind
        self._decodes, self._prefills = (
            DeepseekV4MetadataBuilder(config, max_num_tokens, max_model_len, device, use_pdl=use_pdl) for _ in range(2)
        )
        self._memory: dict[Any, torch.Tensor] = {}

    def build(
        self,
        compress_ratio: int,
        query_lens: Ints,
        seq_lens: Ints,
        block_tables: BlockTables,
        num_decodes: int,
        *,
        seq_lens_device: torch.Tensor | None = None,
        min_restart: torch.Tensor | Ints | None = None,
    ) -> ContextStep:
        """The step of this rank. Arguments as of `DeepseekV4MetadataBuilder.build`, the same on all ranks but for:

        block_tables      where caches are sharded, those of compressed pages are the rank's own: column i is page
                          i * N + rank of the request
        seq_lens_device   int32 [num_decodes], of the decode requests
        min_restart       of the decode requests; prefill requests go on behind their rows
        """
        cp, ratio = self.cp, compress_ratio
        query, seqs = [int(n) for n in query_lens], [int(n) for n in seq_lens]
        if not 0 <= num_decodes <= len(query) or len(seqs) != len(query):
            raise ValueError(
                f"ContextStepBuilder.build: num_decodes and seq_lens: expected 0..{len(query)} and as many entries as "
                f"query_lens, got {num_decodes} and {len(seqs)}"
            )
        decodes = prefills = None
        if num_decodes:
            decodes = self._decode_share(
                ratio, query[:num_decodes], seqs[:num_decodes], block_tables, seq_lens_device, min_restart
            )
        rest, lengths = query[num_decodes:], seqs[num_decodes:]
        divides = cp.prefill != "off" and cp.size > 1
        plan = plan_prefill(rest, lengths, cp.size) if divides else undivided_prefill(rest, lengths)
        upload = _Upload()
        if sum(rest):
            prefills = self._prefill_share(ratio, rest, lengths, block_tables, num_decodes, plan, upload)
        first = 0 if decodes is None else decodes.metadata.num_decode_tokens
        positions = [p.positions for p in (decodes and decodes.metadata, prefills and prefills.metadata) if p]
        if not positions:
            positions = [torch.zeros(0, dtype=torch.int64, device=self.device)]
        step = ContextStep(
            ratio,
            cp,
            decodes,
            prefills,
            plan,
            # those of decode rows alone stay where they are
            positions[0] if len(positions) == 1 else torch.cat(positions),
            {"query_lens": str(query), "seq_lens": str(seqs), "num_decodes": str(num_decodes)},
            None,
            None,
        )
        if divides and prefills is not None:
            own = np.concatenate([np.arange(first), first + plan.gather_index[cp.rank]])
            upload.add(own, lambda x: setattr(step, "gather_index", x))
            upload.add(plan.restore_index, lambda x: setattr(step, "restore_index", x))
        upload.send(self.device)
        return step

    def _kept(self, name: str, ratio: int, x: torch.Tensor) -> torch.Tensor:
        """x in a place of its own that stays where it is."""
        key = name, ratio, x.shape
        if key not in self._memory:
            self._memory[key] = torch.empty_like(x, memory_format=torch.contiguous_format)
        return self._memory[key].copy_(x)

    def _decode_share(
        self,
        ratio: int,
        query: list[int],
        seqs: list[int],
        tables: BlockTables,
        seq_lens_device: torch.Tensor | None,
        min_restart: torch.Tensor | Ints | None,
    ) -> DecodeShare:
        cp, count = self.cp, len(query)
        own = _rows_of(tables, slice(count))
        local = own.compressed
        if local is not None and cp.is_sharded:
            whole = expand_block_table(local, cp.size, cp.rank, local.shape[1] * cp.size)
            own = replace(own, compressed=self._kept("whole", ratio, whole))
        m = self._decodes.build(
            ratio, query, seqs, own, count, seq_lens_device=seq_lens_device, min_restart=min_restart
        )
        share = DecodeShare(m)
        if local is None or not cp.is_sharded:
            return share
        rows, shape = m.num_decode_tokens, m.decode_batch()
        if m.decode_query_len is None:
            local = local[m.token_to_req_indices[:rows].long()]
        share.block_table = self._kept("local", ratio, local)
        lens = m.visible[:rows] if ratio == 4 else m.c128a_decode_topk_lens  # type: ignore[index]
        assert lens is not None
        lens = lens.view(shape)
        turns = cp.parts // cp.size
        for turn in range(turns):
            table = share.block_table if turns == 1 else self._kept(f"local {turn}", ratio, local[:, turn::turns])
            own_lens = context_local_lens(lens, ratio, cp.parts, turn * cp.size + cp.rank)
            share.tables.append(table)
            share.lens.append(self._kept(f"lens {turn}", ratio, own_lens))
        if ratio == 4:
            share.visible = self._kept("visible", ratio, context_local_lens(lens, ratio, cp.size, cp.rank))
            pages = -(-m.max_seq_len // KV_BLOCK_SIZE)
            share.columns = step_columns(-(-pages // cp.size) * (KV_BLOCK_SIZE // ratio))
        return share

    def _prefill_share(
        self,
        ratio: int,
        query: list[int],
        seqs: list[int],
        tables: BlockTables,
        first: int,
        plan: PrefillPlan,
        upload: _Upload,
    ) -> PrefillShare:
        cp, divides = self.cp, len(plan.segments) > 1
        tables = _rows_of(tables, slice(first, None))
        own = plan.segments[cp.rank if divides else 0]
        share = PrefillShare(None, sum(s.end - s.start for s in own))
        starts = [length - count for length, count in zip(seqs, query, strict=True)]
        gathered = tables.compressed
        if gathered is not None and cp.is_sharded:
            local, counts = gathered, [-(-length // KV_BLOCK_SIZE) for length in seqs]
            share.pages = sum(counts)
            numbers = np.full((len(seqs), max(counts, default=0) + 1), -1, dtype=np.int32)
            page = 0
            for row, count in zip(numbers, counts, strict=True):
                row[:count] = np.arange(page, page + count)
                page += count
            gathered = torch.from_numpy(numbers).to(self.device)
            whole = expand_block_table(local, cp.size, cp.rank, local.shape[1] * cp.size)
            rows = KV_BLOCK_SIZE // ratio
            before = [[(r, _owned(0, start // ratio, ratio, cp, rank)) for r, start in enumerate(starts)]
                      for rank in range(cp.size)]  # fmt: skip
            made = [(r, _owned(start // ratio, length // ratio, ratio, cp, cp.rank))
                    for r, (start, length) in enumerate(zip(starts, seqs, strict=True))]  # fmt: skip
            self._exchange(upload, share, "held", before, (whole, rows), (gathered, rows), keeps_own=True)
            self._exchange(upload, share, "kept", [made], (gathered, rows), (whole, rows), keeps_own=True)
        if own:
            index = torch.tensor([s.request for s in own], device=self.device)
            segment_tables = BlockTables(
                tables.swa[index],
                None if gathered is None else gathered[index],
                None if tables.state is None else tables.state[index],
            )
            share.metadata = self._prefills.build(
                ratio, [s.end - s.start for s in own], [s.end for s in own], segment_tables, 0
            )
        if not divides:
            return share
        segments = plan.segments
        window = [[(s.request, range(_tail(s, cp.swa), s.end)) for s in of] for of in segments]
        at = tables.swa, SWA_BLOCK_SIZE
        self._exchange(upload, share, "window", window, at, at)
        if ratio == 1:
            return share
        made_by = [[(s.request, range(s.start // ratio, s.end // ratio)) for s in of] for of in segments]
        assert gathered is not None
        assert tables.state is not None
        at = gathered, KV_BLOCK_SIZE // ratio
        self._exchange(upload, share, "entries", made_by, at, at)
        last = [[s for s in of if s.end == seqs[s.request]] for of in segments]
        state = [[(s.request, range(_state_from(s.end, ratio), s.end)) for s in of] for of in last]
        at = tables.state, STATE_BLOCK_SIZE[ratio]
        self._exchange(upload, share, "state", state, at, at)
        if ratio == 4:
            self._halo(upload, share, plan, seqs, tables.state)
        return share

    def _exchange(
        self,
        upload: _Upload,
        share: PrefillShare,
        name: str,
        ranges: Sequence[Sequence[Range]],
        source: tuple[torch.Tensor, int],
        target: tuple[torch.Tensor, int],
        keeps_own: bool = False,
    ) -> None:
        """Put an Exchange of each rank's rows under this name, from slots of one block table to those of another.

        source, target   (block table, rows of its pages)
        keeps_own        the rank's own records go to the target too
        """
        requests, rows = _padded(ranges)
        if not rows.shape[1]:
            return
        own = self.cp.rank if len(ranges) > 1 else 0
        others = rows.copy()
        if not keeps_own:
            others[own] = -1
        count = rows.shape[1]

        def make(numbers: torch.Tensor) -> None:
            of, sent = numbers[:count], numbers[count : 2 * count]
            of_all, placed = numbers[2 * count :].view(2, -1)
            setattr(
                share,
                name,
                Exchange(entries_to_slots(sent, of, *source), entries_to_slots(placed, of_all, *target)),
            )

        upload.add(np.concatenate([requests[own], rows[own], requests.ravel(), others.ravel()]), make)

    def _halo(
        self,
        upload: _Upload,
        share: PrefillShare,
        plan: PrefillPlan,
        seqs: list[int],
        table: torch.Tensor,
    ) -> None:
        """The last rows of every segment that another one follows, and where they go on the rank that has it."""
        followers = {(s.request, s.start): rank for rank, of in enumerate(plan.segments) for s in of}
        # of each rank: row, request, position, and the position again where it is this rank's to store
        sent: list[list[tuple[int, int, int, int]]] = []
        for rank, of in enumerate(plan.segments):
            sent.append([])
            row = 0
            for s in of:
                row += s.end - s.start
                if s.end == seqs[s.request]:
                    continue
                is_wanted = followers[s.request, s.end] == self.cp.rank != rank
                for back in range(min(HALO_ROWS, s.end - s.start), 0, -1):
                    position = s.end - back
                    sent[-1].append((row - back, s.request, position, position if is_wanted else -1))
        most = max(len(own) for own in sent)
        if not most:
            return
        padded = np.full((len(sent), most, 4), -1, dtype=np.int64)
        for rank, lines in enumerate(sent):
            padded[rank, : len(lines)] = np.array(lines, dtype=np.int64).reshape(-1, 4)
        rows, *others = (padded[..., column] for column in range(4))

        def make(numbers: torch.Tensor) -> None:
            share.halo_rows = numbers[:most].clamp(min=0)
            of_all, at, placed = numbers[most:].view(3, -1)
            share.halo_positions = at.clamp(min=0)
            share.halo_slots = entries_to_slots(placed, of_all, table, STATE_BLOCK_SIZE[4])

        upload.add(np.concatenate([rows[self.cp.rank], *(x.ravel() for x in others)]), make)


def _rows_of(tables: BlockTables, rows: slice) -> BlockTables:
    return BlockTables(*(None if t is None else t[rows] for t in (tables.swa, tables.compressed, tables.state)))  # type: ignore[arg-type]


def _tail(s: Segment, swa: str) -> int:
    """The first position of a segment whose window record others are sent."""
    return s.start if swa == "all" else max(s.start, s.end - BORDER)


def _state_from(end: int, ratio: int) -> int:
    """The first position whose state a request that goes on at `end` reads: the open group's, and where groups overlap
    those of the one before."""
    return max(end // ratio * ratio - (ratio if ratio == 4 else 0), 0)


def _owned(first: int, end: int, ratio: int, cp: ContextParallel, rank: int) -> npt.NDArray[np.int64]:
    """Entries first .. end - 1 that lie in a rank's pages."""
    entries = np.arange(first, end)
    return entries[entries // (KV_BLOCK_SIZE // ratio) % cp.size == rank]
