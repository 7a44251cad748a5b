# SPDX-License-Identifier: Apache-2.0
"""Step metadata against plain loops over requests and tokens."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from cute_kernels.runtime.record import record_calls
from layers import PRESETS, BlockTables, DeepseekV4Metadata, DeepseekV4MetadataBuilder
from layers import metadata as metadata_module
from layers.metadata import RING_SLOTS, UploadRing
from tests.layers.engine import KINDS

CONFIG = PRESETS["v4-flash"].reduced()
WINDOW = 128
GARBAGE = (-1_000_000, -1, -(2**31))
MAX_TOKENS = 900
MAX_LEN = 40000


@dataclass
class Step:
    """A step of some requests, with page tables as lists: pages[group][request][logical page]."""

    ratio: int
    query_lens: list[int]
    seq_lens: list[int]
    num_decodes: int
    seed: int = 0

    def __post_init__(self) -> None:
        rng = random.Random(self.seed)
        self.pages: dict[str, list[list[int]]] = {}
        for group, tokens in self.page_tokens.items():
            counts = [-(-n // tokens) for n in self.seq_lens]
            free = rng.sample(range(2 * sum(counts) + 1), sum(counts))
            self.pages[group] = [[free.pop() for _ in range(n)] for n in counts]
            if group != "compressed":  # pages that slid out of the window
                keep = WINDOW + max(self.query_lens, default=0)
                for row, n in zip(self.pages[group], self.seq_lens, strict=True):
                    for logical in range(max(n - keep, 0) // tokens):
                        row[logical] = rng.choice(GARBAGE)

    @property
    def page_tokens(self) -> dict[str, int]:
        return {"swa": 64, **({"compressed": 256, "state": {4: 4, 128: 8}[self.ratio]} if self.ratio > 1 else {})}

    def table(self, group: str) -> torch.Tensor:
        rows = self.pages[group]
        width = max([len(r) for r in rows], default=0) + 2
        padded = [r + [GARBAGE[i % 3] for i in range(width - len(r))] for r in rows]
        return torch.tensor(padded, dtype=torch.int32).reshape(len(rows), width)

    def tables(self) -> BlockTables:
        if self.ratio == 1:
            return BlockTables(self.table("swa"))
        return BlockTables(self.table("swa"), self.table("compressed"), self.table("state"))

    def build(self, builder: DeepseekV4MetadataBuilder | None = None, **options: Any) -> DeepseekV4Metadata:
        builder = builder or DeepseekV4MetadataBuilder(CONFIG, MAX_TOKENS, MAX_LEN)
        return builder.build(self.ratio, self.query_lens, self.seq_lens, self.tables(), self.num_decodes, **options)

    @property
    def rows(self) -> list[tuple[int, int]]:
        """(request, position) of every row; position -1 in padded requests."""
        result = []
        for r, (count, length) in enumerate(zip(self.query_lens, self.seq_lens, strict=True)):
            result += [(r, length - count + i if length > 0 else -1) for i in range(count)]
        return result

    def slot(self, group: str, request: int, position: int) -> int:
        tokens = self.page_tokens[group]
        return -1 if position < 0 else self.pages[group][request][position // tokens] * tokens + position % tokens

    def entry_slot(self, request: int, entry: int) -> int:
        rows = 256 // self.ratio
        return self.pages["compressed"][request][entry // rows] * rows + entry % rows

    def c128a_width(self, max_model_len: int) -> int:
        longest = max([*self.seq_lens, 0]) // 128
        power = 1
        while power < longest:
            power *= 2
        cap = -(-max_model_len // 128)
        cap = cap if cap % 128 == 0 else cap - cap % 128 + 128
        return min(max(power, 128), cap)


def padded(values: list[int], width: int) -> list[int]:
    return values + [-1] * (width - len(values))


def same(name: str, got: Any, expected: list[Any], dtype: torch.dtype, shape: tuple[int, ...] | None = None) -> None:
    assert got.dtype == dtype, name
    if shape is not None:
        assert tuple(got.shape) == shape, name
    assert got.tolist() == expected, name


def check(m: DeepseekV4Metadata, s: Step, max_model_len: int = MAX_LEN) -> None:
    """Every field."""
    int32, int64 = torch.int32, torch.int64
    rows, requests = s.rows, len(s.query_lens)
    decode_rows = sum(s.query_lens[: s.num_decodes])
    assert m.compress_ratio == s.ratio
    assert (m.num_decodes, m.num_prefills) == (s.num_decodes, requests - s.num_decodes)
    assert (m.num_decode_tokens, m.num_prefill_tokens) == (decode_rows, len(rows) - decode_rows)
    assert m.num_tokens == len(rows)
    starts = [sum(s.query_lens[:r]) for r in range(requests + 1)]
    assert m.query_start_loc_cpu == tuple(starts)
    assert m.seq_lens_cpu == tuple(s.seq_lens)
    assert m.max_seq_len == max([*s.seq_lens, 0])
    lengths = set(s.query_lens[: s.num_decodes])
    assert m.decode_query_len == (lengths.pop() if len(lengths) == 1 else None)
    same("seq_lens", m.seq_lens, s.seq_lens, int32)
    same("query_start_loc", m.query_start_loc, starts, int32)
    same("token_to_req_indices", m.token_to_req_indices, [r for r, _ in rows], int32)
    same("positions", m.positions, [p for _, p in rows], int64)
    same("slot_mapping", m.slot_mapping, [s.slot("swa", r, p) for r, p in rows], int64)
    same("is_valid_token", m.is_valid_token, [p >= 0 for _, p in rows], torch.bool)

    window = [[s.slot("swa", r, x) for x in range(max(p - WINDOW + 1, 0), p + 1)] for r, p in rows[:decode_rows]]
    indices = [[padded(w, WINDOW)] for w in window]
    same("decode_swa_indices", m.decode_swa_indices, indices, int32, (decode_rows, 1, WINDOW))
    same("decode_swa_lens", m.decode_swa_lens, [len(w) for w in window], int32)

    prefills = list(zip(s.query_lens, s.seq_lens, strict=True))[s.num_decodes :]
    same("prefill_seq_lens", m.prefill_seq_lens, [n for _, n in prefills], int32)
    gathered = [min(count + WINDOW - 1, n) for count, n in prefills]
    same("prefill_gather_lens", m.prefill_gather_lens, gathered, int32)
    restart = [max(n - c, 0) for c, n in list(zip(s.query_lens, s.seq_lens, strict=True))[: s.num_decodes]]
    same("min_restart", m.min_restart, restart + s.seq_lens[s.num_decodes :], int32)
    assert torch.equal(m.swa_block_table, s.table("swa"))

    for name in ("compressed_block_table", "compressed_slot_mapping", "state_block_table", "state_slot_mapping"):
        assert (getattr(m, name) is None) == (s.ratio == 1), name
    c128a = ("c128a_global_decode_topk_indices", "c128a_decode_topk_lens", "c128a_prefill_topk_indices")
    for name in c128a:
        assert (getattr(m, name) is None) == (s.ratio != 128), name
    if s.ratio == 1:
        return
    closes = [s.entry_slot(r, p // s.ratio) if p >= 0 and (p + 1) % s.ratio == 0 else -1 for r, p in rows]
    same("compressed_slot_mapping", m.compressed_slot_mapping, closes, int64)
    same("state_slot_mapping", m.state_slot_mapping, [s.slot("state", r, p) for r, p in rows], int64)
    assert torch.equal(m.compressed_block_table, s.table("compressed"))
    assert torch.equal(m.state_block_table, s.table("state"))
    if s.ratio == 4:
        seen = [(p + 1) // 4 for _, p in rows]
        same("visible", m.visible, seen, int32)
        same("decode_topk_lens", m.decode_topk_lens, [min(n, CONFIG.index_topk) for n in seen[:decode_rows]], int32)
    keys = "prefill_key_starts", "row_key_starts", "row_key_ends"
    has_keys = s.ratio == 4 and s.num_decodes < requests
    assert [getattr(m, name) is not None for name in keys] == [has_keys] * 3
    if has_keys:
        first = {r: sum(n // 4 for n in s.seq_lens[s.num_decodes : r]) for r in range(s.num_decodes, requests + 1)}
        same(keys[0], m.prefill_key_starts, list(first.values()), int32)
        own = [(first[r], first[r] + (p + 1) // 4) for r, p in rows[decode_rows:]]
        same(keys[1], m.row_key_starts[decode_rows:], [start for start, _ in own], int32)
        same(keys[2], m.row_key_ends[decode_rows:], [end for _, end in own], int32)
    if s.ratio != 128:
        return
    width = s.c128a_width(max_model_len)
    visible = [(p + 1) // 128 for _, p in rows]
    decode = [padded([s.entry_slot(r, e) for e in range(v)], width) for (r, _), v in zip(rows, visible, strict=True)]
    same(c128a[0], m.c128a_global_decode_topk_indices, decode[:decode_rows], int32, (decode_rows, width))
    same(c128a[1], m.c128a_decode_topk_lens, visible[:decode_rows], int32)
    prefill = [padded(list(range(v)), width) for v in visible[decode_rows:]]
    same(c128a[2], m.c128a_prefill_topk_indices, prefill, int32, (len(rows) - decode_rows, width))


CASES: list[Callable[[int], Step]] = [
    lambda ratio: Step(ratio, [1, 1, 1], [1, 129, 1000], 3),
    lambda ratio: Step(ratio, [4, 4], [4, 131], 2),
    lambda ratio: Step(ratio, [1, 3, 2], [127, 258, 64], 3),
    lambda ratio: Step(ratio, [300], [300], 0),
    lambda ratio: Step(ratio, [128, 1, 5, 200], [128, 77, 700, 513], 0),
    lambda ratio: Step(ratio, [1, 2, 140, 7], [256, 384, 140, 1031], 2),
    lambda ratio: Step(ratio, [1, 1, 1, 50], [37, 0, 0, 50], 3),
    lambda ratio: Step(ratio, [2, 2, 9, 6], [512, 0, 0, 6], 2),
    lambda ratio: Step(ratio, [0, 3, 0], [64, 130, 200], 1),
    lambda ratio: Step(ratio, [], [], 0),
    lambda ratio: Step(ratio, [1, 8], [33000, 39999], 1),
]


@pytest.mark.parametrize("ratio", KINDS)
@pytest.mark.parametrize("case", CASES)
def test_every_field_of_a_step(ratio: int, case: Callable[[int], Step]) -> None:
    step = case(ratio)
    check(step.build(), step)


@pytest.mark.parametrize("ratio", KINDS)
def test_random_steps_share_a_builder(ratio: int) -> None:
    """What one step left in the buffers does not show in the next."""
    rng = random.Random(ratio)
    builder = DeepseekV4MetadataBuilder(CONFIG, MAX_TOKENS, MAX_LEN)
    for number in range(25):
        count = rng.randint(0, 5)
        decodes = rng.randint(0, count)
        lens = [rng.choice([1, 1, 2, 5]) for _ in range(decodes)]
        lens += [rng.choice([1, 3, 64, 127, 150]) for _ in range(count - decodes)]
        before = [rng.choice([0, 1, 3, 127, 128, 255, 1500]) for _ in lens]
        seqs = [0 if rng.random() < 0.2 else n + b for n, b in zip(lens, before, strict=True)]
        step = Step(ratio, lens, seqs, decodes, seed=number)
        check(step.build(builder), step)


def test_kinds_share_a_builder_with_different_tables() -> None:
    builder = DeepseekV4MetadataBuilder(CONFIG, MAX_TOKENS, MAX_LEN)
    steps = [Step(ratio, [1, 2, 40], [200, 300, 170], 2, seed=ratio) for ratio in KINDS]
    built = [step.build(builder) for step in steps]
    for metadata, step in zip(built, steps, strict=True):
        check(metadata, step)


def step_of(steps: list[Step]) -> dict[str, Any]:
    """What `build_step` takes of steps of several kinds that have the same requests."""
    tables = {step.ratio: step.tables() for step in steps}
    return {**vars_of(steps[0]), "block_tables": tables}


def vars_of(step: Step) -> dict[str, Any]:
    return {"query_lens": step.query_lens, "seq_lens": step.seq_lens, "num_decodes": step.num_decodes}


SHARED = (
    "seq_lens", "query_start_loc", "token_to_req_indices", "positions", "min_restart", "prefill_seq_lens",
    "prefill_gather_lens",
)  # fmt: skip


@pytest.mark.parametrize("ratios", [KINDS, KINDS[::-1], (4, 128), (1,)])
@pytest.mark.parametrize("case", CASES)
def test_all_kinds_of_a_step_at_once(ratios: tuple[int, ...], case: Callable[[int], Step]) -> None:
    """Every field of every kind as of `build`, each with tables of its own; what they share are the same tensors."""
    builder = DeepseekV4MetadataBuilder(CONFIG, MAX_TOKENS, MAX_LEN)
    steps = [replace(case(ratio), seed=ratio) for ratio in ratios]
    built = builder.build_step(**step_of(steps))
    assert sorted(built) == sorted(ratios)
    for step in steps:
        check(built[step.ratio], step)
        for name in SHARED:
            assert getattr(built[step.ratio], name) is getattr(built[ratios[0]], name)


def test_one_kind_does_not_disturb_a_step_of_others() -> None:
    """A step's metadata stay valid while other builds of other kinds go on."""
    builder = DeepseekV4MetadataBuilder(CONFIG, MAX_TOKENS, MAX_LEN)
    pair = [Step(1, [1, 2, 40], [200, 300, 170], 2, seed=1), Step(4, [1, 2, 40], [200, 300, 170], 2, seed=2)]
    built = builder.build_step(**step_of(pair))
    alone = Step(128, [3, 50], [5, 60], 1, seed=3)
    check(alone.build(builder), alone)
    for step in pair:
        check(built[step.ratio], step)


def test_places_of_a_step_of_all_kinds() -> None:
    builder = DeepseekV4MetadataBuilder(CONFIG, MAX_TOKENS, MAX_LEN)
    places = []
    for lens, seqs, decodes in (([1, 5], [10, 20], 1), ([1, 1, 70], [33000, 5, 70], 2), ([3, 3, 2], [100, 200, 9], 2)):
        steps = [Step(ratio, lens, seqs, decodes, seed=ratio) for ratio in KINDS]
        built = builder.build_step(**step_of(steps))
        places.append([addresses(built[ratio]) for ratio in KINDS])
        for step in steps:
            check(built[step.ratio], step)
    assert places[0] == places[1] == places[2]


def test_arrays_in_place_of_lists() -> None:
    step = Step(4, [1, 3, 2], [127, 258, 64], 2)
    arrays = np.array(step.query_lens, dtype=np.int32), np.array(step.seq_lens)
    builder = DeepseekV4MetadataBuilder(CONFIG, MAX_TOKENS, MAX_LEN)
    check(builder.build(4, *arrays, step.tables(), 2), step)


def test_the_numbers_of_a_step_stay_in_one_place() -> None:
    """Where a graph that holds the launch of the metadata copies them to."""
    builder = DeepseekV4MetadataBuilder(CONFIG, MAX_TOKENS, MAX_LEN)
    place = builder.numbers.data_ptr()
    for lens, seqs in (([1, 3, 2], [127, 258, 64]), ([1, 1], [9, 8])):
        Step(4, lens, seqs, 2).build(builder)
        starts = [0, *np.cumsum(lens).tolist()]
        assert builder.numbers[: 2 * len(lens) + 1].tolist() == [*starts, *seqs]
        assert builder.numbers.data_ptr() == place


def test_lists_of_c128a_may_be_left_out() -> None:
    builder = DeepseekV4MetadataBuilder(CONFIG, MAX_TOKENS, MAX_LEN, c128a_lists=False)
    step = Step(128, [1, 200], [1000, 300], 1)
    metadata, whole = step.build(builder), step.build()
    for name in ("c128a_global_decode_topk_indices", "c128a_prefill_topk_indices"):
        assert getattr(metadata, name) is None
        setattr(metadata, name, getattr(whole, name))
    check(metadata, step)


class FakeEvent:
    """Of a copy that ends when the host waits for it."""

    waits: ClassVar[list[int]] = []
    made: ClassVar[int] = 0

    def __init__(self) -> None:
        FakeEvent.made += 1
        self.number, self.is_recorded = FakeEvent.made, False

    def record(self, stream: Any) -> None:
        self.is_recorded = True

    def synchronize(self) -> None:
        assert self.is_recorded
        FakeEvent.waits.append(self.number)


def test_no_number_is_written_while_a_copy_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pinned memory is used in turns; before one is filled again the host waits for the copy that last read it."""
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(FakeEvent, "waits", [])
    monkeypatch.setattr(FakeEvent, "made", 0)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, pin_memory=False, **k: empty(*a, **k))
    ring = UploadRing(8, torch.device("cpu"))
    ring._is_cuda = True
    places = []
    for turn in range(10):
        array = ring.slot()
        assert len(FakeEvent.waits) == max(turn + 1 - RING_SLOTS, 0)
        array[:3] = turn
        places.append(array.ctypes.data)
        assert ring.send(3)[:3].tolist() == [turn] * 3
    assert len(set(places)) == RING_SLOTS
    assert places[RING_SLOTS:] == places[:-RING_SLOTS]
    assert FakeEvent.waits == [1, 2, 3, 4, 1, 2]


def test_a_launch_that_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of the same shape and tables repeats the launch of the first one; others go through the op again."""
    asked: list[int] = []
    repeated: list[Any] = []

    def op(upload: torch.Tensor, requests: int, *args: Any, **kwargs: Any) -> None:
        asked.append(requests)
        metadata_module.launch("key", 0, requests)

    noted: list[Any] = []

    @contextlib.contextmanager
    def recorded() -> Iterator[list[Any]]:
        noted.clear()
        yield noted

    def launch(key: str, device_index: int, *args: Any) -> None:
        repeated.append((key, device_index, *args))
        noted.append((key, device_index, args))

    monkeypatch.setattr(metadata_module, "build_step_metadata", op)
    monkeypatch.setattr(metadata_module, "record_launches", recorded)
    monkeypatch.setattr(metadata_module, "launch", launch)
    builder = DeepseekV4MetadataBuilder(CONFIG, MAX_TOKENS, MAX_LEN)
    two, three = Step(4, [1, 1], [9, 300], 2), Step(4, [1, 1, 1], [9, 300, 7], 3)
    tables = [two.tables(), three.tables()]
    for step, table in ((two, tables[0]), (two, tables[0]), (three, tables[1]), (two, tables[0]), (three, tables[1])):
        builder.build(4, step.query_lens, [n + 1 for n in step.seq_lens], table, step.num_decodes)
    assert asked == [2, 3]
    assert repeated == [("key", 0, n) for n in (2, 2, 3, 2, 3)]
    builder.build(4, two.query_lens, two.seq_lens, two.tables(), 2)
    with record_calls():
        builder.build(4, two.query_lens, two.seq_lens, tables[0], 2)
    assert asked == [2, 3, 2, 2]
    before = builder.build(4, [1, 1], [8, 9], tables[0], 2)
    for _ in range(2):  # lengths that lie in the results are copied, and what reads a copy is not kept
        builder.build(4, [1, 1], [8, 9], tables[0], 2, seq_lens_device=before.seq_lens)
    assert asked == [2, 3, 2, 2, 2, 2]


def addresses(m: DeepseekV4Metadata) -> dict[str, int]:
    """Of all tensors but the engine's block tables and the prefill requests', which start behind the decodes."""
    return {
        name: value.data_ptr()
        for name, value in vars(m).items()
        if isinstance(value, torch.Tensor) and not name.endswith("block_table") and not name.startswith("prefill")
    }


@pytest.mark.parametrize("ratio", KINDS)
def test_tensors_stay_where_they_are(ratio: int) -> None:
    """Graphs replay with the addresses they were captured with, whatever the step's sizes and widths."""
    builder = DeepseekV4MetadataBuilder(CONFIG, MAX_TOKENS, MAX_LEN)
    steps = [
        Step(ratio, [1, 5], [10, 20], 1),
        Step(ratio, [1, 1, 1, 70], [33000, 5, 4, 70], 3),
        Step(ratio, [3, 3, 2], [100, 200, 300], 2),
    ]
    places = []
    for step in steps:
        for other in KINDS:
            replace(step, ratio=other, seed=9).build(builder)
        places.append(addresses(step.build(builder)))
    assert places[0] == places[1] == places[2]


@pytest.mark.parametrize(
    ("max_model_len", "longest", "width"),
    [
        (100, 100, 128),
        (16384, 1, 128),
        (16384, 16384, 128),
        (16385, 16385, 128),
        (16385, 16511, None),
        (16512, 16512, 256),
        (65536, 128 * 129 - 1, 128),
        (65536, 128 * 129, 256),
        (65536, 128 * 256 + 127, 256),
        (65536, 128 * 257, 512),
        (128 * 300, 128 * 300, 384),
        (128 * 300, 128 * 256, 256),
        (1 << 20, 1 << 20, 8192),
        (1 << 20, (1 << 19) + 128, 8192),
    ],
)
def test_width_of_the_c128a_tables(max_model_len: int, longest: int, width: int | None) -> None:
    """The next power of two of the step's entries, at least 128, at most what the longest sequence needs, in 128s."""
    step = Step(128, [1], [longest], 1)
    builder = DeepseekV4MetadataBuilder(CONFIG, 2, max_model_len)
    if width is None:
        with pytest.raises(ValueError, match="max_model_len"):
            step.build(builder)
        return
    assert step.c128a_width(max_model_len) == width
    metadata = step.build(builder)
    assert metadata.c128a_global_decode_topk_indices is not None
    assert metadata.c128a_global_decode_topk_indices.shape == (1, width)
    check(metadata, step, max_model_len)


@pytest.mark.parametrize("ratio", KINDS)
def test_lengths_that_only_the_device_knows(ratio: int) -> None:
    """The host knows upper bounds (all drafts accepted); positions and slots come from the device's lengths."""
    true = Step(ratio, [3, 3, 20], [259, 130, 150], 2)
    builder = DeepseekV4MetadataBuilder(CONFIG, MAX_TOKENS, MAX_LEN)
    device = torch.tensor(true.seq_lens, dtype=torch.int32)
    metadata = builder.build(ratio, [3, 3, 20], [262, 133, 150], true.tables(), 2, seq_lens_device=device)
    assert torch.equal(metadata.seq_lens, device)
    assert metadata.seq_lens_cpu == (262, 133, 150)
    assert metadata.max_seq_len == 262
    metadata.seq_lens_cpu, metadata.max_seq_len = tuple(true.seq_lens), 259
    check(metadata, true)


@pytest.mark.parametrize("ratio", KINDS)
def test_a_token_without_a_page_is_no_token(ratio: int) -> None:
    step = Step(ratio, [1, 1, 128], [384, 256, 128], 2)
    step.pages["swa"][1][-1] = -1
    step.pages["swa"][2][-1] = -1
    metadata = step.build()
    dead = [1, *range(2 + 64, 2 + 128)]
    alive = [t for t in range(130) if t not in dead]
    assert not metadata.is_valid_token[dead].any()
    assert metadata.is_valid_token[alive].all()
    assert (metadata.slot_mapping[dead] == -1).all()
    assert metadata.decode_swa_lens.tolist() == [128, 0]
    assert (metadata.decode_swa_indices[1] == -1).all()
    if metadata.compressed_slot_mapping is not None:
        assert (metadata.compressed_slot_mapping[dead] == -1).all()
        assert metadata.compressed_slot_mapping[0] >= 0
    if metadata.c128a_decode_topk_lens is not None:
        assert metadata.c128a_decode_topk_lens.tolist() == [3, 0]


def test_given_restart_positions_are_kept() -> None:
    restart = torch.tensor([7, 9], dtype=torch.int32)
    assert Step(4, [4, 4], [12, 12], 1).build(min_restart=restart).min_restart.tolist() == [7, 9]
    assert Step(4, [4, 4], [12, 12], 1).build(min_restart=[5, 6]).min_restart.tolist() == [5, 6]


def test_decode_rows_as_a_batch() -> None:
    """Requests of equal length form a [requests, rows] batch; unequal ones count row by row."""
    builder = DeepseekV4MetadataBuilder(CONFIG, MAX_TOKENS, MAX_LEN)
    equal = Step(4, [3, 3, 10], [12, 70, 10], 2)
    metadata, table = equal.build(builder), equal.table("compressed")
    assert metadata.decode_batch() == (2, 3)
    assert torch.equal(metadata.decode_block_table(), table[:2])
    unequal = Step(4, [3, 1, 10], [12, 70, 10], 2)
    metadata = unequal.build(builder)
    assert metadata.decode_batch() == (4, 1)
    assert torch.equal(metadata.decode_block_table(), table[[0, 0, 0, 1]])
    place = metadata.decode_block_table().data_ptr()
    assert Step(1, [3, 1], [12, 70], 2).build().row_block_table is None
    Step(4, [2, 1, 3, 4, 5, 1], [12, 70, 10, 12, 12, 12], 6).build(builder)  # needs more room
    again = Step(4, [1, 3, 10], [12, 70, 10], 2).build(builder)
    assert again.decode_block_table().data_ptr() == place, "a captured step reads it there"
    assert torch.equal(again.decode_block_table(), table[[0, 1, 1, 1]])


def test_block_tables_of_rows_are_the_steps_own() -> None:
    """Of steps of other ratios, of tables of any width, in inference mode and outside, and of a table set later."""
    builder = DeepseekV4MetadataBuilder(CONFIG, MAX_TOKENS, MAX_LEN)
    first, second = Step(4, [3, 1], [12, 70], 2, seed=1), Step(4, [1, 3], [12, 70], 2, seed=2)
    with torch.inference_mode():
        step = builder.build_step([3, 1], [12, 70], {1: BlockTables(first.table("swa")), 4: first.tables()}, 2)[4]
    second.build(builder)
    assert torch.equal(step.decode_block_table(), first.table("compressed")[[0, 0, 0, 1]])
    with torch.inference_mode():
        narrow = builder.build(4, [1, 2], [8, 9], second.tables(), 2)
    assert torch.equal(narrow.decode_block_table(), second.table("compressed")[[0, 1, 1]])
    other = second.table("compressed") + 100
    narrow.compressed_block_table = other
    assert torch.equal(narrow.decode_block_table(), other[[0, 1, 1]])
    for width in range(1, 200):
        table = torch.zeros(2, width, dtype=torch.int32)
        builder.build(4, [1, 2], [2, 2], BlockTables(table, table, table), 2)
    assert len(builder._row_tables) < 20


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"seq_lens": [5]}, r"build: seq_lens: expected 2 entries as in query_lens, got 1"),
        ({"num_decodes": 3}, r"build: num_decodes: expected 0\.\.2, got 3"),
        ({"num_decodes": -1}, r"build: num_decodes: expected 0\.\.2, got -1"),
        ({"seq_lens": [5, 41]}, r"build: seq_lens: expected at most max_model_len = 40, got 41"),
        ({"query_lens": [1, 8]}, r"build: query_lens: expected at most 8 rows in all, got 9"),
        ({"block_tables": BlockTables(torch.zeros(2, 1, dtype=torch.int32))}, r"build: block_tables: .* ratio 4"),
        ({"query_lens": [1, -3]}, r"build: query_lens: expected no negative entry, got -3"),
        ({"query_lens": [6, 3]}, r"build: seq_lens: expected at least the 6 rows of the step, got 5"),
        ({"min_restart": [1]}, r"build: min_restart: expected 2 entries, got 1"),
        ({"min_restart": torch.zeros(3, dtype=torch.int32)}, r"build: min_restart: expected shape \[2\], got \[3\]"),
        ({"seq_lens_device": torch.zeros(1, dtype=torch.int32)}, r"build: seq_lens_device: expected shape \[2\]"),
        (
            {"block_tables": BlockTables(*(torch.zeros(3, 1, dtype=torch.int32),) * 3)},
            r"build: block_tables.swa: expected shape \[2, any\], got \[3, 1\]",
        ),
    ],
)
def test_errors(arguments: dict[str, Any], message: str) -> None:
    builder = DeepseekV4MetadataBuilder(CONFIG, 8, 40)
    tables = Step(4, [1, 3], [5, 9], 1).tables()
    good = {"query_lens": [1, 3], "seq_lens": [5, 9], "block_tables": tables, "num_decodes": 1}
    builder.build(4, **good)
    with pytest.raises(ValueError, match=message):
        builder.build(4, **{**good, **arguments})


def test_errors_of_types_and_kinds() -> None:
    builder = DeepseekV4MetadataBuilder(CONFIG, 8, 40)
    table = torch.zeros(1, 1, dtype=torch.int32)
    with pytest.raises(TypeError, match=r"build: block_tables.swa: expected dtype torch.int32, got torch.int64"):
        builder.build(1, [1], [1], BlockTables(table.long()), 1)
    with pytest.raises(TypeError, match=r"build: block_tables.swa: expected a tensor, got list"):
        builder.build(1, [1], [1], BlockTables([[0]]), 1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"build: compress_ratio: expected one of 1, 4, 128, got 2"):
        builder.build(2, [1], [1], BlockTables(table), 1)
    with pytest.raises(ValueError, match=r"build_step: block_tables: expected tables of at least one kind, got none"):
        builder.build_step([1], [1], {}, 1)
    with pytest.raises(ValueError, match=r"build_step: block_tables: expected compressed and state tables for ratio 4"):
        builder.build_step([1], [1], {1: BlockTables(table), 4: BlockTables(table)}, 1)


def test_more_requests_than_buffers_hold_are_refused() -> None:
    builder = DeepseekV4MetadataBuilder(CONFIG, 4, MAX_LEN)
    tables = BlockTables(torch.zeros(5, 1, dtype=torch.int32))
    with pytest.raises(ValueError, match="query_lens: expected at most max_num_tokens = 4, got 5"):
        builder.build(1, [1, 0, 0, 0, 0], [1, 0, 0, 0, 0], tables, 5)


def test_lengths_may_come_from_the_step_before() -> None:
    builder = DeepseekV4MetadataBuilder(CONFIG, 4, MAX_LEN)
    tables = BlockTables(torch.zeros(3, 1, dtype=torch.int32))
    before = builder.build(1, [1, 1, 1], [5, 7, 9], tables, 3)
    rest = BlockTables(torch.zeros(2, 1, dtype=torch.int32))
    after = builder.build(1, [1, 1], [7, 9], rest, 2, seq_lens_device=before.seq_lens[1:])
    assert after.seq_lens.tolist() == [7, 9]
    assert after.positions.tolist() == [6, 8]
