"""Step metadata: what all layers of one kind share in a step, built on the device without waiting for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cute_kernels.compressor.ops import get_compressed_slot_mapping
from cute_kernels.formats import round_up
from cute_kernels.indices.ops import build_c128a_topk_metadata, compute_decode_swa_indices
from cute_kernels.paging import entries_to_slots
from cute_kernels.runtime.checks import Checker
from layers.caches import KV_BLOCK_SIZE, STATE_BLOCK_SIZE, SWA_BLOCK_SIZE
from layers.config import COMPRESS_RATIOS, DeepseekV4Config


@dataclass(frozen=True)
class BlockTables:
    """Block tables int32 [R, width] of one layer kind, in units of its caches' pages.

    swa          pages of 64 tokens
    compressed   pages of 256 source tokens; also the indexer cache's
    state        pages of 4 (ratio 4) or 8 (ratio 128) tokens; also the indexer state's

    Entries past a request's live length, and those of pages that slid out of a window, may hold anything: no address is
    formed from them.
    """

    swa: torch.Tensor
    compressed: torch.Tensor | None = None
    state: torch.Tensor | None = None


@dataclass
class DeepseekV4Metadata:
    """One step of one layer kind. Rows: tokens of decode requests first, then those of prefill requests.

    Host numbers: num_decodes, num_prefills (requests), num_decode_tokens, num_prefill_tokens (rows),
    query_start_loc_cpu, seq_lens_cpu (exact for prefill requests, upper bounds for decodes), max_seq_len,
    decode_query_len (rows per decode request, None when they differ).

    Device: seq_lens int32 [R] (this step included), query_start_loc int32 [R+1], token_to_req_indices int32 [T],
    positions int64 [T] (-1 in padded requests), slot_mapping int64 [T] and is_valid_token bool [T] of the SWA cache,
    decode_swa_indices int32 [D, 1, W] with decode_swa_lens int32 [D], prefill_seq_lens and prefill_gather_lens
    int32 [P], block tables and slot mappings of the compressed and state caches, min_restart int32 [R] (the smallest
    position a request may be scheduled from again), and the C128A index tables. With ratio 4: visible int32 [T], the
    entries that a row sees, and decode_topk_lens int32 [D], as many of them as the indexer picks.
    """

    compress_ratio: int
    num_decodes: int
    num_prefills: int
    num_decode_tokens: int
    num_prefill_tokens: int
    query_start_loc_cpu: tuple[int, ...]
    seq_lens_cpu: tuple[int, ...]
    max_seq_len: int
    decode_query_len: int | None
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    token_to_req_indices: torch.Tensor
    positions: torch.Tensor
    swa_block_table: torch.Tensor
    slot_mapping: torch.Tensor
    is_valid_token: torch.Tensor
    decode_swa_indices: torch.Tensor
    decode_swa_lens: torch.Tensor
    prefill_seq_lens: torch.Tensor
    prefill_gather_lens: torch.Tensor
    min_restart: torch.Tensor
    compressed_block_table: torch.Tensor | None = None
    compressed_slot_mapping: torch.Tensor | None = None
    state_block_table: torch.Tensor | None = None
    state_slot_mapping: torch.Tensor | None = None
    c128a_global_decode_topk_indices: torch.Tensor | None = None
    c128a_decode_topk_lens: torch.Tensor | None = None
    c128a_prefill_topk_indices: torch.Tensor | None = None
    visible: torch.Tensor | None = None
    decode_topk_lens: torch.Tensor | None = None
    bound_key: int | None = None

    @property
    def num_tokens(self) -> int:
        """Rows of the step."""
        return self.num_decode_tokens + self.num_prefill_tokens

    def decode_batch(self) -> tuple[int, int]:
        """(requests, rows per request) of the decode rows; rows count one by one when requests differ in length."""
        if self.decode_query_len is None:
            return self.num_decode_tokens, 1
        return self.num_decodes, self.decode_query_len

    def decode_table(self, table: torch.Tensor) -> torch.Tensor:
        """A block table with one row per request of `decode_batch()`."""
        if self.decode_query_len is None:
            return table[self.token_to_req_indices[: self.num_decode_tokens].long()]
        return table[: self.num_decodes]


class DeepseekV4MetadataBuilder:
    """Builds the metadata of each step, into buffers whose addresses do not change.

    The metadata of a layer kind are valid until the next `build` of that kind. Layers of one kind that have different
    block tables need a builder each.

    A step captured in a CUDA graph is replayed with new numbers by building its metadata again with the same query_lens
    and the same bounds seq_lens (pass the true lengths as seq_lens_device), from block tables at the same addresses.

    max_num_tokens   largest number of rows in a step, and of requests
    max_model_len    largest sequence length
    """

    def __init__(
        self, config: DeepseekV4Config, max_num_tokens: int, max_model_len: int, device: torch.device | str = "cpu"
    ) -> None:
        self.config, self.device = config, torch.device(device)
        self.max_model_len = max_model_len
        self._swa: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._c128a_width = round_up(-(-max_model_len // 128), 128)
        self._c128a: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
        self._max_num_tokens = max_num_tokens
        self._kept: dict[tuple[int, str], torch.Tensor] = {}

    def _keep(self, compress_ratio: int, name: str, value: torch.Tensor) -> torch.Tensor:
        """`value` in a buffer of its own; it may be a slice of what the buffer holds from the step before."""
        return self._buffer(compress_ratio, name, value.shape[0], value.dtype).copy_(value.clone())

    def _buffer(self, compress_ratio: int, name: str, rows: int, dtype: torch.dtype) -> torch.Tensor:
        """The first rows of the buffer of that name, which has room for the largest step."""
        if (compress_ratio, name) not in self._kept:
            self._kept[compress_ratio, name] = torch.empty(self._max_num_tokens + 1, dtype=dtype, device=self.device)
        return self._kept[compress_ratio, name][:rows]

    def _swa_buffers(self, compress_ratio: int) -> tuple[torch.Tensor, torch.Tensor]:
        if compress_ratio not in self._swa:
            rows, window = self._max_num_tokens, self.config.sliding_window
            self._swa[compress_ratio] = (
                torch.empty(rows, 1, window, dtype=torch.int32, device=self.device),
                torch.empty(rows, dtype=torch.int32, device=self.device),
            )
        return self._swa[compress_ratio]

    def _c128a_buffers(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if self._c128a is None:
            rows = self._max_num_tokens

            def table() -> torch.Tensor:
                return torch.empty(rows, self._c128a_width, dtype=torch.int32, device=self.device)

            self._c128a = (table(), torch.empty(rows, dtype=torch.int32, device=self.device), table())
        return self._c128a

    def _host_ints(self, values: Sequence[int]) -> torch.Tensor:
        pinned = self.device.type == "cuda"
        return torch.tensor(values, dtype=torch.int32, pin_memory=pinned).to(self.device, non_blocking=True)

    def build(
        self,
        compress_ratio: int,
        query_lens: Sequence[int],
        seq_lens: Sequence[int],
        block_tables: BlockTables,
        num_decodes: int,
        *,
        seq_lens_device: torch.Tensor | None = None,
        min_restart: torch.Tensor | None = None,
    ) -> DeepseekV4Metadata:
        """Metadata of one step.

        query_lens        rows of each request in this step, decode requests first
        seq_lens          tokens of each request after this step; 0 marks a padded request. Upper bounds are enough for
                          decode requests when seq_lens_device holds the true lengths (drafts accepted on the device)
        block_tables      tables of this layer kind
        num_decodes       how many of the requests are decodes
        seq_lens_device   int32 [R] on the device; default: seq_lens
        min_restart       int32 [R]: smallest position from which a request may be scheduled after this step. Default:
                          the first position of this step for decodes (drafts may be rejected), the end for prefills
        """
        if len(query_lens) != len(seq_lens):
            raise ValueError(
                f"build: seq_lens: expected {len(query_lens)} entries as in query_lens, got {len(seq_lens)}"
            )
        if not 0 <= num_decodes <= len(query_lens):
            raise ValueError(f"build: num_decodes: expected 0..{len(query_lens)}, got {num_decodes}")
        check = Checker("build")
        check.one_of("compress_ratio", compress_ratio, COMPRESS_RATIOS)
        for query, length in zip(query_lens, seq_lens, strict=True):
            check.require(query >= 0, "query_lens", "no negative entry", query)
            check.require(length <= 0 or query <= length, "seq_lens", f"at least the {query} rows of the step", length)
        requests = len(query_lens)
        check.require(
            requests <= self._max_num_tokens, "query_lens", f"at most max_num_tokens = {self._max_num_tokens}", requests
        )
        if compress_ratio > 1 and (block_tables.compressed is None or block_tables.state is None):
            raise ValueError(
                f"build: block_tables: expected compressed and state tables for ratio {compress_ratio}, got None"
            )
        for name, table in vars(block_tables).items():
            check.tensor(f"block_tables.{name}", table, torch.int32, (requests, None), optional=True)
        check.tensor("seq_lens_device", seq_lens_device, torch.int32, (requests,), optional=True)
        check.tensor("min_restart", min_restart, torch.int32, (requests,), optional=True)
        if max(seq_lens, default=0) > self.max_model_len:
            raise ValueError(
                f"build: seq_lens: expected at most max_model_len = {self.max_model_len}, got {max(seq_lens)}"
            )
        starts = [0]
        for length in query_lens:
            starts.append(starts[-1] + length)
        total = starts[-1]
        if total > self._max_num_tokens:
            raise ValueError(f"build: query_lens: expected at most {self._max_num_tokens} rows in all, got {total}")
        decode_rows = starts[num_decodes]
        window = self.config.sliding_window

        def keep(name: str, value: torch.Tensor) -> torch.Tensor:
            return self._keep(compress_ratio, name, value)

        seq = keep("seq_lens", self._host_ints(seq_lens) if seq_lens_device is None else seq_lens_device)
        start = keep("query_start_loc", self._host_ints(starts))
        lens = start.diff()
        request = torch.arange(len(query_lens), dtype=torch.int32, device=self.device)
        token_to_req = keep("token_to_req_indices", torch.repeat_interleave(request, lens, output_size=total))
        owner = token_to_req.long()
        first = (seq - lens).long()
        positions = first[owner] + torch.arange(total, device=self.device) - start[owner].long()
        positions = keep("positions", torch.where(seq[owner] > 0, positions, torch.full_like(positions, -1)))
        slots = entries_to_slots(positions, token_to_req, block_tables.swa, SWA_BLOCK_SIZE)
        slots = keep("slot_mapping", slots)
        valid = keep("is_valid_token", slots >= 0)
        out_indices, out_lens = self._swa_buffers(compress_ratio)
        swa_indices, swa_lens = compute_decode_swa_indices(
            positions[:decode_rows],
            token_to_req[:decode_rows],
            valid[:decode_rows],
            block_tables.swa,
            SWA_BLOCK_SIZE,
            window,
            out_indices=out_indices[:decode_rows],
            out_lens=out_lens[:decode_rows],
        )
        if min_restart is None:
            min_restart = torch.where(request < num_decodes, first.clamp(min=0).int(), seq)
        decode_lens = set(query_lens[:num_decodes])
        metadata = DeepseekV4Metadata(
            compress_ratio=compress_ratio,
            num_decodes=num_decodes,
            num_prefills=len(query_lens) - num_decodes,
            num_decode_tokens=decode_rows,
            num_prefill_tokens=total - decode_rows,
            query_start_loc_cpu=tuple(starts),
            seq_lens_cpu=tuple(seq_lens),
            max_seq_len=max(seq_lens, default=0),
            decode_query_len=decode_lens.pop() if len(decode_lens) == 1 else None,
            seq_lens=seq,
            query_start_loc=start,
            token_to_req_indices=token_to_req,
            positions=positions,
            swa_block_table=block_tables.swa,
            slot_mapping=slots,
            is_valid_token=valid,
            decode_swa_indices=swa_indices,
            decode_swa_lens=swa_lens,
            prefill_seq_lens=seq[num_decodes:],
            prefill_gather_lens=keep("gather_lens", lens + (seq - lens).clamp(max=window - 1))[num_decodes:],
            min_restart=keep("min_restart", min_restart),
        )
        if compress_ratio > 1:
            self._add_compressed(metadata, block_tables)
        return metadata

    def _add_compressed(self, m: DeepseekV4Metadata, tables: BlockTables) -> None:
        ratio = m.compress_ratio
        assert tables.compressed is not None
        assert tables.state is not None
        m.compressed_block_table, m.state_block_table = tables.compressed, tables.state
        state_slots = entries_to_slots(m.positions, m.token_to_req_indices, tables.state, STATE_BLOCK_SIZE[ratio])
        m.state_slot_mapping = self._keep(ratio, "state_slot_mapping", state_slots)
        m.compressed_slot_mapping = get_compressed_slot_mapping(
            m.num_tokens,
            m.query_start_loc,
            m.seq_lens,
            tables.compressed,
            KV_BLOCK_SIZE,
            ratio,
            out=self._buffer(ratio, "compressed_slot_mapping", m.num_tokens, torch.int64),
            slot_mapping=m.slot_mapping,
        )
        if ratio == 4:
            visible = torch.where(m.is_valid_token, (m.positions + 1) // ratio, 0).int()
            m.visible = self._keep(ratio, "visible", visible)
            lens = m.visible[: m.num_decode_tokens].clamp(max=self.config.index_topk)
            m.decode_topk_lens = self._keep(ratio, "decode_topk_lens", lens)
        if ratio != 128:
            return
        needed = max(m.max_seq_len // 128, 1)
        width = min(max(1 << (needed - 1).bit_length(), 128), self._c128a_width)
        global_decode, decode_lens, prefill = self._c128a_buffers()
        (
            m.c128a_global_decode_topk_indices,
            m.c128a_decode_topk_lens,
            m.c128a_prefill_topk_indices,
        ) = build_c128a_topk_metadata(
            m.positions,
            ratio,
            m.num_decode_tokens,
            m.token_to_req_indices,
            tables.compressed,
            KV_BLOCK_SIZE // ratio,
            m.slot_mapping,
            global_decode,
            decode_lens,
            prefill,
            width,
        )
