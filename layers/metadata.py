# SPDX-License-Identifier: Apache-2.0
"""Step metadata: what all layers of one kind share in a step, built on the device without waiting for it.

A step of any number of kinds takes one copy to the device and one launch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from cute_kernels.formats import round_up
from cute_kernels.indices.ops import StepLayout, build_step_metadata
from cute_kernels.runtime import record
from cute_kernels.runtime.checks import Checker
from cute_kernels.runtime.compile import launch, record_launches
from cute_kernels.runtime.ops import CHECKED, NVTX

from .caches import KV_BLOCK_SIZE, STATE_BLOCK_SIZE, SWA_BLOCK_SIZE
from .config import COMPRESS_RATIOS, AttentionConfig

Ints: TypeAlias = "Sequence[int] | npt.NDArray[Any]"

RING_SLOTS = 4
"""Steps whose numbers may be on their way to the device at once; the host waits for the oldest before another."""

MOST_PYTHON_NUMBERS = 48
"""Of so many numbers Python finds the largest in less time than numpy, which takes a microsecond for any few."""

MOST_KEPT = 256
"""Shapes of steps whose views and launches are kept: those of a server's decode steps come again and again."""

MOST_LAUNCHES = 16
"""Of a shape, with lengths or restarts in different places on the device."""


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


class Places:
    """Stands for the addresses and shapes of all tensors of a step, and is the same for steps that agree in them.

    number   for `layers.bound`, which finds it when it first wants it
    """

    number: int | None = None


_OF_ROW_TABLE = frozenset(("compressed_block_table", "token_to_req_indices", "decode_query_len", "num_decode_tokens"))
"""Fields that `row_block_table` is made of."""


@dataclass
class DeepseekV4Metadata:
    """One step of one layer kind. Rows: tokens of decode requests first, then those of prefill requests.

    Host numbers: num_decodes, num_prefills (requests), num_decode_tokens, num_prefill_tokens (rows),
    query_start_loc_cpu, seq_lens_cpu (exact for prefill requests, upper bounds for decodes), max_seq_len,
    decode_query_len (rows per decode request, None when they differ).

    Device: seq_lens int32 [R] (this step included), query_start_loc int32 [R+1], token_to_req_indices int32 [T],
    positions int64 [T] (-1 in padded requests), slot_mapping int64 [T] and is_valid_token bool [T] of the SWA
    cache, decode_swa_indices int32 [D, 1, W] with decode_swa_lens int32 [D], prefill_seq_lens and
    prefill_gather_lens int32 [P], block tables and slot mappings of the compressed and state caches, row_block_table
    int32 [D, pages] (the compressed cache's block table, a row per decode row; only where decode requests differ in
    rows), min_restart int32 [R] (the smallest position a request may be scheduled from again), and the C128A index
    tables. With ratio 4: visible int32 [T], the entries that a row sees, and decode_topk_lens int32 [D], as many of
    them as the indexer picks; in steps with prefill requests also prefill_key_starts int32 [P+1], where the entries
    of each begin among those of all of them, request after request, and row_key_starts and row_key_ends int32 [T],
    the entries among these that a row sees (of decode rows without meaning).

    Attention reads lists, lengths and block tables of decode rows before the kernel ahead of it has ended
    (constant_lists of `sparse_mla_decode`): what writes them must let no other kernel begin before it has ended itself,
    as copies and the builder's kernel do.
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
    row_block_table: torch.Tensor | None = None
    visible: torch.Tensor | None = None
    decode_topk_lens: torch.Tensor | None = None
    prefill_key_starts: torch.Tensor | None = None
    row_key_starts: torch.Tensor | None = None
    row_key_ends: torch.Tensor | None = None
    bound_key: int | None = field(default=None, init=False, compare=False, repr=False)
    places: Places | None = field(default=None, init=False, compare=False, repr=False)

    def __setattr__(self, name: str, value: Any) -> None:
        """What somebody changes is no longer the step that its key was found for."""
        vars(self)[name] = value
        if name != "bound_key":
            vars(self).update(bound_key=None, places=None)
        if name in _OF_ROW_TABLE:
            vars(self)["row_block_table"] = None

    def __getstate__(self) -> dict[str, Any]:
        """A copy may have tensors of its own."""
        return {**vars(self), "bound_key": None, "places": None}

    @property
    def num_tokens(self) -> int:
        """Rows of the step."""
        return self.num_decode_tokens + self.num_prefill_tokens

    def decode_batch(self) -> tuple[int, int]:
        """(requests, rows per request) of the decode rows; rows count one by one when requests differ in length."""
        if self.decode_query_len is None:
            return self.num_decode_tokens, 1
        return self.num_decodes, self.decode_query_len

    def decode_block_table(self) -> torch.Tensor:
        """The compressed cache's block table with one row per request of `decode_batch()`."""
        if self.row_block_table is not None:
            return self.row_block_table
        assert self.compressed_block_table is not None
        if self.decode_query_len is None:  # of a table that came after the step was built
            return self.compressed_block_table[self.token_to_req_indices[: self.num_decode_tokens].long()]
        return self.compressed_block_table[: self.num_decodes]


class UploadRing:
    """Numbers of a step on their way to the device: pinned memory in turns, none of it written while a copy reads it.

    device_buffer   int32 [size] on the device: what the last `send` has brought, once the stream is there
    """

    def __init__(self, size: int, device: torch.device) -> None:
        with torch.inference_mode(False):  # a step outside of it writes them, too
            self.device_buffer = torch.empty(size, dtype=torch.int32, device=device)
        self._is_cuda, self._device_index = device.type == "cuda", self.device_buffer.device.index
        self._pinned: list[torch.Tensor] = []
        self._arrays: list[npt.NDArray[np.int32]] = []
        self._copied: list[Any] = []
        self._copies: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self._turn = -1

    def slot(self) -> npt.NDArray[np.int32]:
        """int32 [size] to be filled with what `send` is to bring."""
        if not self._is_cuda:
            array: npt.NDArray[np.int32] = self.device_buffer.numpy()
            return array
        self._turn = (self._turn + 1) % RING_SLOTS
        if self._turn == len(self._arrays):
            self._pinned.append(torch.empty(self.device_buffer.shape, dtype=torch.int32, pin_memory=True))
            self._arrays.append(self._pinned[-1].numpy())
            self._copied.append(torch.cuda.Event())
        else:
            self._copied[self._turn].synchronize()
        return self._arrays[self._turn]

    def send(self, count: int) -> torch.Tensor:
        """The buffer on the device, into which the current stream copies the first `count` numbers of the last slot."""
        if self._is_cuda:
            ends = self._copies.get((self._turn, count))
            if ends is None:
                if len(self._copies) >= MOST_KEPT:
                    self._copies.clear()
                ends = self.device_buffer[:count], self._pinned[self._turn][:count]
                self._copies[self._turn, count] = ends
            ends[0].copy_(ends[1], non_blocking=True)
            self._copied[self._turn].record(torch.cuda.current_stream(self._device_index))
        return self.device_buffer


class _Shape(NamedTuple):
    """What the shapes of a step's tensors follow from."""

    requests: int
    tokens: int
    num_decodes: int
    decode_rows: int
    c128a_columns: int

    def used(self, name: str) -> slice:
        """The rows of an array that the step uses."""
        if name == "query_start_loc":
            return slice(self.requests + 1)
        if name in ("seq_lens", "min_restart"):
            return slice(self.requests)
        if name == "key_starts":
            return slice(self.num_decodes, self.requests + 1)
        if name == "gather_lens":
            return slice(self.num_decodes, self.requests)
        return slice(self.decode_rows if name.startswith("decode") else self.tokens)


_KEYS = ("key_starts", "row_key_starts", "row_key_ends")
_NO_FIELDS: dict[int, frozenset[str]] = {
    1: frozenset(("state_slot_mapping", "compressed_slot_mapping", "visible", "decode_topk_lens", *_KEYS)),
    4: frozenset(),
    128: frozenset(("visible", *_KEYS)),
}
"""Arrays that are no field of the metadata of layers of a ratio."""


class _StepBuffers:
    """The results of steps that have layers of certain ratios, ascending: always in the same places."""

    def __init__(self, ratios: tuple[int, ...], max_num_tokens: int, window_size: int, device: torch.device) -> None:
        layout = StepLayout(max_num_tokens, window_size, len(ratios))
        self.ratios, self.buffer = ratios, torch.empty(layout.nbytes, dtype=torch.uint8, device=device)
        self._arrays = []
        for number in range(len(ratios)):
            arrays = {}
            for name, (offset, dtype, columns) in layout.arrays(number).items():
                element: torch.dtype = getattr(torch, dtype)
                size = layout.room * max(columns, 1) * element.itemsize
                array = self.buffer[offset : offset + size].view(element)
                arrays[name] = array.view(layout.room, 1, columns) if columns else array
            self._arrays.append(arrays)
        self._views: dict[_Shape, list[dict[str, torch.Tensor]]] = {}
        self.start, self.end = self.buffer.data_ptr(), self.buffer.data_ptr() + layout.nbytes

    def views(self, shape: _Shape, lists: tuple[torch.Tensor, torch.Tensor] | None) -> list[dict[str, Any]]:
        """The metadata's fields that this step fills, of each ratio, behind its launch. lists: C128A's, of decode and
        prefill rows."""
        found = self._views.get(shape)
        if found is None:
            if len(self._views) >= MOST_KEPT:
                self._views.clear()
            shared: dict[str, torch.Tensor] = {}
            used = {name: shape.used(name) for name in self._arrays[0]}
            found = [
                self._fields(shape, used, ratio, arrays, shared, lists)
                for ratio, arrays in zip(self.ratios, self._arrays, strict=True)
            ]
            self._views[shape] = found
        return found

    @staticmethod
    def _fields(
        shape: _Shape,
        used: dict[str, slice],
        ratio: int,
        arrays: dict[str, torch.Tensor],
        shared: dict[str, torch.Tensor],
        lists: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> dict[str, torch.Tensor]:
        """Kinds share the tensors that are the same for all of them."""
        if not shared:
            shared |= {name: arrays[name][used[name]] for name in StepLayout.SHARED}
            shared["prefill_gather_lens"] = shared.pop("gather_lens")
            shared["prefill_seq_lens"] = shared["seq_lens"][shape.num_decodes :]
        own = arrays.keys() - StepLayout.SHARED - _NO_FIELDS[ratio]
        if shape.num_decodes == shape.requests:
            own -= set(_KEYS)
        fields = shared | {name: arrays[name][used[name]] for name in own}
        if "key_starts" in fields:
            fields["prefill_key_starts"] = fields.pop("key_starts")
        if ratio == 128:
            fields["c128a_decode_topk_lens"] = fields.pop("decode_topk_lens")
            if lists is not None:
                (decode, prefill), rows = lists, shape.tokens - shape.decode_rows
                fields["c128a_global_decode_topk_indices"] = decode[: shape.decode_rows, : shape.c128a_columns]
                fields["c128a_prefill_topk_indices"] = prefill[:rows, : shape.c128a_columns]
        return fields


class _Rows:
    """What follows from query_lens alone: the same list comes with every decode step of a batch."""

    def __init__(self, query: npt.NDArray[np.int64]) -> None:
        self.query, self.requests = query, len(query)
        starts = np.zeros(self.requests + 1, dtype=np.int64)
        query.cumsum(out=starts[1:])
        self.total = int(starts[-1])
        self.starts, self.starts_cpu = starts.astype(np.int32), tuple(starts.tolist())
        self.least, self.most = (int(query.min()), int(query.max())) if self.requests else (0, 0)
        others = (query != query[:1]).nonzero()[0]
        self.same = int(others[0]) if len(others) else self.requests
        """How many requests from the first on have as many rows as the first."""

    def decode_query_len(self, num_decodes: int) -> int | None:
        return int(self.query[0]) if 0 < num_decodes <= self.same else None


class _Plan:
    """What all steps of one shape over block tables in the same places have in common.

    of_kinds          by ratio, ascending, the metadata's fields; those that differ from step to step are None
    with_row_tables   by ratio, the places of steps that have `row_block_table` too
    launches          the launch that a step came down to, by all that it takes beside, or None if there is not one that
                      can be repeated. Their arguments have been checked
    """

    def __init__(self, buffers: _StepBuffers, of_kinds: dict[int, dict[str, Any]]) -> None:
        self.buffers, self.of_kinds = buffers, of_kinds
        self.with_row_tables = {ratio: Places() for ratio in of_kinds}
        self.launches: dict[Any, Any] = {}


_FIELDS: dict[str, Any] = dict.fromkeys(f.name for f in fields(DeepseekV4Metadata))
"""Of metadata that have nothing yet."""

_NEW: Any = object()


class DeepseekV4MetadataBuilder:
    """Builds the metadata of each step, into buffers whose addresses do not change.

    The metadata of a layer kind are valid until that kind is built again. Layers of one kind that have different block
    tables need a builder each. A builder's steps are built on one stream, or on streams that wait for each other.

    A step captured in a CUDA graph is replayed with new numbers by building its metadata again in the same way
    (`build`, or `build_step` of the same ratios), with the same query_lens and the same bounds seq_lens (pass the true
    lengths as seq_lens_device), from block tables at the same addresses. Building is not captured.

    max_num_tokens       largest number of rows in a step, and of requests
    max_model_len        largest sequence length
    c128a_lists          whether `c128a_global_decode_topk_indices` and `c128a_prefill_topk_indices` are built, which
                         only attention over plain caches reads (DeepseekV4FlashInferMLASparseImpl); else they are None
    use_pdl              whether the launch is a dependent of the kernel before
    """

    def __init__(
        self,
        config: AttentionConfig,
        max_num_tokens: int,
        max_model_len: int,
        device: torch.device | str = "cpu",
        *,
        c128a_lists: bool = True,
        use_pdl: bool = False,
    ) -> None:
        self.config, self.device = config, torch.device(device)
        self.max_model_len, self.use_pdl = max_model_len, use_pdl
        self.c128a_lists = c128a_lists
        self._c128a_width = round_up(-(-max_model_len // 128), 128)
        self._c128a: tuple[torch.Tensor, torch.Tensor] | None = None
        self._max_num_tokens = max_num_tokens
        self._ring: UploadRing | None = None
        self._buffers: dict[tuple[int, ...], _StepBuffers] = {}
        self._rows: dict[Any, _Rows] = {}
        self._plans: dict[Any, _Plan] = {}
        self._row_tables: dict[tuple[tuple[int, ...], int, int], torch.Tensor] = {}
        self._accepted: set[Any] = set()

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
    ) -> DeepseekV4Metadata:
        """Metadata of one kind of layers in one step.

        query_lens        rows of each request in this step, decode requests first
        seq_lens          tokens of each request after this step; 0 marks a padded request. Upper bounds are enough for
                          decode requests when seq_lens_device holds the true lengths (drafts accepted on the device)
        block_tables      tables of this layer kind
        num_decodes       how many of the requests are decodes
        seq_lens_device   int32 [R] on the device; default: seq_lens
        min_restart       int32 [R] on the device, or numbers: smallest position from which a request may be scheduled
                          after this step. Default: the first position of this step for decodes (drafts may be
                          rejected), the end for prefills

        Raises ValueError or TypeError on arguments that do not fit.
        """
        tables = {compress_ratio: block_tables}
        return self._build("build", query_lens, seq_lens, tables, num_decodes, seq_lens_device, min_restart)[
            compress_ratio
        ]

    def build_step(
        self,
        query_lens: Ints,
        seq_lens: Ints,
        block_tables: Mapping[int, BlockTables],
        num_decodes: int,
        *,
        seq_lens_device: torch.Tensor | None = None,
        min_restart: torch.Tensor | Ints | None = None,
    ) -> dict[int, DeepseekV4Metadata]:
        """Metadata of several kinds of layers in one step, by their ratio: one copy to the device and one launch.

        block_tables   by ratio, the tables of each kind; all other arguments as `build` takes them

        Every field is what `build` gives; tensors that are the same for all kinds are the same tensors. They lie
        elsewhere than those of `build`, and than those of steps of other ratios, but for C128A's index tables, which
        there are once in a builder.
        """
        return self._build("build_step", query_lens, seq_lens, block_tables, num_decodes, seq_lens_device, min_restart)

    def _build(
        self,
        op: str,
        query_lens: Ints,
        seq_lens: Ints,
        block_tables: Mapping[int, BlockTables],
        num_decodes: int,
        seq_lens_device: torch.Tensor | None,
        min_restart: torch.Tensor | Ints | None,
    ) -> dict[int, DeepseekV4Metadata]:
        rows, seqs = self._rows_of(query_lens), np.asarray(seq_lens, dtype=np.int64)
        requests, restart, restarts = rows.requests, None, None
        if min_restart is None or isinstance(min_restart, torch.Tensor):
            restart = min_restart
        else:
            restarts = np.asarray(min_restart, dtype=np.int64)
        lengths = tuple(seqs.tolist())
        longest = self._check_numbers(op, rows, seqs, lengths, restarts, num_decodes)
        columns = self._c128a_columns(longest) if 128 in block_tables else 0
        shape = _Shape(requests, rows.total, num_decodes, rows.starts_cpu[num_decodes], columns)
        ring = self._upload_ring()
        try:
            places = shape, _places(block_tables)
            others = restarts is not None, _place(seq_lens_device), _place(restart)
        except AttributeError:  # of what is no tensor
            self._check_tensors(op, requests, block_tables, seq_lens_device, restart, ring)
            raise
        plan, kept = self._plans.get(places), _NEW
        if plan is not None:
            kept = plan.launches.get(others, _NEW)
        if plan is None or kept is _NEW:
            given = requests, places[1], others[1:]
            if given not in self._accepted:
                self._check_tensors(op, requests, block_tables, seq_lens_device, restart, ring)
                if len(self._accepted) >= MOST_KEPT:
                    self._accepted.clear()
                self._accepted.add(given)
            plan = plan or self._plan(places, block_tables)
            if len(plan.launches) >= MOST_LAUNCHES:
                plan.launches.clear()
            plan.launches[others] = kept = None

        numbers = ring.slot()
        used = 2 * requests + 1
        numbers[: requests + 1] = rows.starts
        numbers[requests + 1 : used] = seqs
        if restarts is not None:
            numbers[used : used + requests] = restarts
            used += requests
        has_keys = 4 in block_tables and num_decodes < requests
        if has_keys:
            keys = numbers[used : used + requests + 1]
            keys[: num_decodes + 1] = 0
            (seqs[num_decodes:] // 4).cumsum(dtype=np.int32, out=keys[num_decodes + 1 :])
            used += requests + 1
        upload = ring.send(used)

        is_plain = record.active() is None and not CHECKED and not NVTX
        if kept is not None and is_plain:
            kernel_key, device_index, args = kept
            launch(kernel_key, device_index, *args)
        else:
            if restarts is not None:
                restart = upload[2 * requests + 1 : 3 * requests + 1]
            key_starts = upload[used - requests - 1 : used] if has_keys else None
            noted = self._launch(shape, plan.buffers, block_tables, upload, seq_lens_device, restart, key_starts)
            if is_plain:
                plan.launches[others] = noted
        query_len = rows.decode_query_len(num_decodes)
        own = {
            "query_start_loc_cpu": rows.starts_cpu,
            "seq_lens_cpu": lengths,
            "max_seq_len": longest,
            "decode_query_len": query_len,
        }
        built = {}
        for ratio, kept_fields in plan.of_kinds.items():
            tables, metadata = block_tables[ratio], object.__new__(DeepseekV4Metadata)
            found = metadata.__dict__
            found.update(kept_fields, **own)
            found["swa_block_table"] = tables.swa
            if ratio > 1:
                found["compressed_block_table"], found["state_block_table"] = tables.compressed, tables.state
                assert tables.compressed is not None
                if query_len is None and shape.decode_rows:
                    request = found["token_to_req_indices"][: shape.decode_rows]
                    found["row_block_table"] = self._row_table(plan.buffers.ratios, ratio, tables.compressed, request)
                    found["places"] = plan.with_row_tables[ratio]
            built[ratio] = metadata
        return built

    def _row_table(
        self, ratios: tuple[int, ...], ratio: int, table: torch.Tensor, request: torch.Tensor
    ) -> torch.Tensor:
        """The rows of a block table that the decode rows of a step of these ratios read, always in the same place: one
        launch for all layers of a kind."""
        rows, pages = len(request), table.shape[1]
        key = ratios, ratio, 1 << max(rows * pages - 1, 0).bit_length()
        memory = self._row_tables.get(key)
        if memory is None:  # earlier ones stay: a captured step may read them
            with torch.inference_mode(False):
                memory = self._row_tables[key] = torch.empty(key[-1], dtype=table.dtype, device=table.device)
        return torch.index_select(table, 0, request, out=memory[: rows * pages].view(rows, pages))

    def _rows_of(self, query_lens: Ints) -> _Rows:
        key: Any
        if isinstance(query_lens, (list, tuple)):
            key, is_plain = tuple(query_lens), False
        else:
            query = np.asarray(query_lens, dtype=np.int64)
            key, is_plain = (query.shape, query.tobytes()), True
        try:
            rows = self._rows.get(key)
        except TypeError:  # numbers in something that cannot be a key
            return _Rows(np.array(query_lens, dtype=np.int64))
        if rows is None:
            rows = _Rows(np.array(query_lens, dtype=np.int64))
            # anything else may change and stay equal to itself
            if is_plain or all(isinstance(count, (int, np.integer)) for count in key):
                if len(self._rows) >= MOST_KEPT:
                    self._rows.clear()
                self._rows[key] = rows
        return rows

    def _plan(self, places: tuple[_Shape, Any], block_tables: Mapping[int, BlockTables]) -> _Plan:
        shape, ratios = places[0], tuple(sorted(block_tables))
        buffers = self._step_buffers(ratios)
        numbers: dict[str, Any] = {
            "num_decodes": shape.num_decodes,
            "num_prefills": shape.requests - shape.num_decodes,
            "num_decode_tokens": shape.decode_rows,
            "num_prefill_tokens": shape.tokens - shape.decode_rows,
        }
        views = buffers.views(shape, self._c128a_buffers(ratios))
        of_kinds = {
            ratio: {**_FIELDS, "compress_ratio": ratio, **numbers, **own, "places": Places()}
            for ratio, own in zip(ratios, views, strict=True)
        }
        if len(self._plans) >= MOST_KEPT:
            self._plans.clear()
        plan = self._plans[places] = _Plan(buffers, of_kinds)
        return plan

    def _launch(
        self,
        shape: _Shape,
        buffers: _StepBuffers,
        block_tables: Mapping[int, BlockTables],
        upload: torch.Tensor,
        seq_lens: torch.Tensor | None,
        min_restart: torch.Tensor | None,
        key_starts: torch.Tensor | None,
    ) -> Any:
        """Fill the buffers by the op: the launch that it came down to, if that may be repeated for the same arguments,
        which are numbers and addresses."""
        lens, restart = _apart(seq_lens, buffers), _apart(min_restart, buffers)
        is_apart = lens is seq_lens and restart is min_restart
        decode_list, prefill_list = self._c128a_buffers(buffers.ratios) or (None, None)
        with record_launches() as launches:
            build_step_metadata(
                upload,
                shape.requests,
                shape.tokens,
                shape.num_decodes,
                shape.decode_rows,
                seq_lens=lens,
                min_restart=restart,
                swa_block_table=block_tables[1].swa if 1 in block_tables else None,
                c4_block_tables=_compressed_tables(block_tables, 4),
                c128_block_tables=_compressed_tables(block_tables, 128),
                key_starts=key_starts,
                max_num_tokens=self._max_num_tokens,
                window_size=self.config.sliding_window,
                index_topk=self.config.index_topk,
                c128a_columns=shape.c128a_columns,
                c128a_decode_buffer=decode_list,
                c128a_prefill_buffer=prefill_list,
                swa_block_size=SWA_BLOCK_SIZE,
                kv_block_size=KV_BLOCK_SIZE,
                c4_state_block_size=STATE_BLOCK_SIZE[4],
                c128_state_block_size=STATE_BLOCK_SIZE[128],
                out=buffers.buffer,
                use_pdl=self.use_pdl,
            )
        return launches[0] if is_apart and len(launches) == 1 else None

    def _check_numbers(
        self,
        op: str,
        rows: _Rows,
        seqs: npt.NDArray[np.int64],
        lengths: tuple[int, ...],
        restarts: npt.NDArray[np.int64] | None,
        num_decodes: int,
    ) -> int:
        """The longest sequence of the step, if its numbers fit."""
        requests, most, limit = rows.requests, self._max_num_tokens, self.max_model_len
        if len(seqs) != requests:
            raise ValueError(f"{op}: seq_lens: expected {requests} entries as in query_lens, got {len(seqs)}")
        check = Checker(op)
        if not 0 <= num_decodes <= requests:
            check.fail("num_decodes", f"0..{requests}", num_decodes)
        if requests > MOST_PYTHON_NUMBERS:
            longest, shortest = int(seqs.max()), int(seqs.min())
        else:
            longest, shortest = max(lengths, default=0), min(lengths, default=0)
        if rows.least < 0 or shortest < rows.most:
            query = rows.query
            wrong = (query < 0) | ((seqs > 0) & (query > seqs))
            if wrong.any():
                first = int(wrong.argmax())
                count, length = int(query[first]), int(seqs[first])
                check.require(count >= 0, "query_lens", "no negative entry", count)
                check.fail("seq_lens", f"at least the {count} rows of the step", length)
        if requests > most:
            check.fail("query_lens", f"at most max_num_tokens = {most}", requests)
        if restarts is not None and restarts.shape != (requests,):
            check.fail("min_restart", f"{requests} entries", restarts.size)
        if longest > limit:
            check.fail("seq_lens", f"at most max_model_len = {limit}", longest)
        if rows.total > most:
            check.fail("query_lens", f"at most {most} rows in all", rows.total)
        return longest

    @staticmethod
    def _check_tensors(
        op: str,
        requests: int,
        block_tables: Mapping[int, BlockTables],
        seq_lens_device: torch.Tensor | None,
        min_restart: torch.Tensor | None,
        ring: UploadRing,
    ) -> None:
        check = Checker(op)
        check.require(block_tables, "block_tables", "tables of at least one kind", "none")
        check.device = ring.device_buffer.device
        for ratio, tables in block_tables.items():
            check.one_of("compress_ratio", ratio, COMPRESS_RATIOS)
            if ratio > 1 and (tables.compressed is None or tables.state is None):
                check.fail("block_tables", f"compressed and state tables for ratio {ratio}", "None")
            for name, table in vars(tables).items():
                check.tensor(f"block_tables.{name}", table, torch.int32, (requests, None), optional=name != "swa")
        check.tensor("seq_lens_device", seq_lens_device, torch.int32, (requests,), optional=True)
        check.tensor("min_restart", min_restart, torch.int32, (requests,), optional=True)

    @property
    def numbers(self) -> torch.Tensor:
        """int32 on the device: the numbers of the last step, query_start_loc and then seq_lens (and min_restart, if it
        was given as numbers). A graph that is to hold the metadata's launch copies them here from pinned memory."""
        return self._upload_ring().device_buffer

    def _upload_ring(self) -> UploadRing:
        if self._ring is None:
            self._ring = UploadRing(4 * self._max_num_tokens + 2, self.device)
        return self._ring

    def _step_buffers(self, ratios: tuple[int, ...]) -> _StepBuffers:
        if ratios not in self._buffers:
            rows, window = self._max_num_tokens, self.config.sliding_window
            self._buffers[ratios] = _StepBuffers(ratios, rows, window, self.device)
        return self._buffers[ratios]

    def _c128a_columns(self, longest: int) -> int:
        """Columns of C128A's index tables in a step: the next power of two of its entries, at least 128."""
        needed = max(longest // 128, 1)
        return min(max(1 << (needed - 1).bit_length(), 128), self._c128a_width)

    def _c128a_buffers(self, ratios: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor] | None:
        """C128A's index tables of decode and of prefill rows, None in steps that have no such layers."""
        if 128 not in ratios or not self.c128a_lists:
            return None
        if self._c128a is None:
            shape = self._max_num_tokens, self._c128a_width
            decode, prefill = (torch.empty(shape, dtype=torch.int32, device=self.device) for _ in range(2))
            self._c128a = decode, prefill
        return self._c128a


def _place(x: torch.Tensor | None) -> Any:
    """All that checks and launches look at in a tensor."""
    return None if x is None else (x.data_ptr(), x.shape, x.stride(), x.dtype)


def _places(block_tables: Mapping[int, BlockTables]) -> Any:
    """The same of the tables of all kinds."""
    found: list[Any] = []
    for ratio, tables in block_tables.items():
        found += ratio, _place(tables.swa), _place(tables.compressed), _place(tables.state)
    return tuple(found)


def _compressed_tables(
    block_tables: Mapping[int, BlockTables], ratio: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    if ratio not in block_tables:
        return None
    tables = block_tables[ratio]
    assert tables.compressed is not None
    assert tables.state is not None
    return tables.swa, tables.compressed, tables.state


def _apart(vector: torch.Tensor | None, buffers: _StepBuffers) -> torch.Tensor | None:
    """A vector that the step does not write: one that lies in its results, from the step before, is copied."""
    if vector is None or not buffers.start <= vector.data_ptr() < buffers.end:
        return vector
    return vector.clone()
