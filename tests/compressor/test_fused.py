# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cute_kernels.compressor import ops
from cute_kernels.compressor.ops import (
    compress_norm_rope_store,
    fused_compress_norm_rope_store,
    save_partial_states,
)
from cute_kernels.formats import FORMATS
from cute_kernels.runtime.ops import OPS
from cute_kernels.runtime.record import record_calls
from tests import helpers
from tests.compressor import meaning
from tests.compressor.meaning import KINDS, Kind, Scene
from tests.compressor.test_compress_store import arguments as two_step_arguments

INT64 = torch.iinfo(torch.int64)
SMALL = Kind(128, 4, "indexer_fp8/1")
SMALL128 = Kind(128, 128, "indexer_fp8/1")


def arguments(scene: Scene, step: SimpleNamespace, **changes: Any) -> dict[str, Any]:
    """The public call's arguments, in order, for a step of a scene."""
    return {
        "kv_score": step.kv_score,
        "ape": scene.ape,
        "positions": step.positions,
        "token_to_req_indices": step.token_to_req_indices,
        "query_start_loc": step.query_start_loc,
        "state_cache": scene.state_cache,
        "slot_mapping": step.slot_mapping,
        "block_table": step.block_table,
        "cos_sin_cache": scene.cos_sin,
        "kv_cache": scene.kv_cache,
        "kv_slot_mapping": step.entry_slots,
        "rms_norm_weight": scene.weight,
        "rms_norm_eps": meaning.EPS,
        "compress_ratio": scene.kind.ratio,
        **scene.kind.options(),
        **changes,
    }


def schema_args(a: dict[str, Any]) -> list[Any]:
    head = list(a)[:12]
    tail = [
        "fp8_scale",
        "rms_norm_eps",
        "compress_ratio",
        "keep_every",
        "kv_format",
        "persist",
        "e2m1_rounding",
        "index_hadamard",
        "use_pdl",
        "cyclic_table",
        "raw_scores",
    ]
    given = {
        "min_restart": None, "keep_every": 0, "persist": "all", "use_pdl": False, "cyclic_table": False,
        "raw_scores": False, **a,
    }  # fmt: skip
    return [*(given[n] for n in head), given["min_restart"], *(given[n] for n in tail)]


def run(scene: Scene, step: SimpleNamespace, **changes: Any) -> torch.Tensor:
    """All bytes of the scene's entry pool after the call."""
    fused_compress_norm_rope_store(**arguments(scene, step, **changes))
    return helpers.raw_bytes(scene.kv_cache)


def batch(kind: Kind, seed: int = 0, **options: Any) -> tuple[Scene, SimpleNamespace]:
    """Requests from the start, from a prefix inside a group and one token long; prefixes are cached, the rest NaN."""
    r = kind.ratio
    scene = Scene(kind, [2 * r + 3, 3 * r + 1, 2 * r, 2 * r], seed, **options)
    ranges = [(0, 0, 2 * r + 3), (1, r + r // 2, 3 * r + 1), (2, 2 * r - 1, 2 * r), (3, 0, 1)]
    for request, first, _ in ranges:
        scene.fill_state(request, 0, first)
    return scene, scene.step(ranges, pad=3, pad_before=1)


def state_after(scene: Scene, rows: list[tuple[int, int]]) -> torch.Tensor:
    """All bytes of the state pool once these (request, position) rows are added to what it holds now."""
    kept = scene.state_cache
    scene.state_cache = scene.new_state()
    helpers.raw_bytes(scene.state_cache).copy_(helpers.raw_bytes(kept))
    for r, p in rows:
        scene.fill_state(r, p, p + 1)
    want, scene.state_cache = helpers.raw_bytes(scene.state_cache), kept
    return want


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_bytes_and_saved_state(kind: Kind) -> None:
    scene, step = batch(kind, state_rows=8 if kind.ratio == 128 else 4)
    r = kind.ratio
    rows = [(0, p) for p in range(2 * r + 3)] + [(1, p) for p in range(r + r // 2, 3 * r + 1)]
    want = state_after(scene, [*rows, (2, 2 * r - 1), (3, 0)])
    assert torch.equal(run(scene, step), scene.entry_bytes(step.closed))
    assert torch.equal(helpers.raw_bytes(scene.state_cache), want)


@pytest.mark.parametrize("kind", [KINDS[0], KINDS[4], KINDS[8]], ids=str)
def test_same_bits_as_the_two_ops(kind: Kind) -> None:
    scene, step = batch(kind, 5, state_rows=3)
    other, _ = batch(kind, 5, state_rows=3)
    run(scene, step)
    width = kind.width
    kv, score = step.kv_score.split(width, dim=1)
    save_partial_states(
        kv, score, scene.ape, step.positions, other.state_cache, step.slot_mapping, 3, width, kind.ratio
    )
    compress_norm_rope_store(**two_step_arguments(other, step))
    assert torch.equal(helpers.raw_bytes(scene.kv_cache), helpers.raw_bytes(other.kv_cache))
    assert torch.equal(helpers.raw_bytes(scene.state_cache), helpers.raw_bytes(other.state_cache))


@st.composite
def plans(draw: Any) -> dict[str, Any]:
    """Steps (first, stop, drafts, accepted): the last drafts - accepted rows hold junk and are run again."""
    ratio = draw(st.sampled_from([4, 4, 4, 128]))
    length = draw(st.integers(1, 30)) if ratio == 4 else draw(st.integers(120, 300))
    steps, first = [], 0
    while first < length:
        stop = min(length, first + draw(st.sampled_from([1, 1, 2, 3, 4, 5, 9, 40, 130])))
        drafts = draw(st.integers(0, min(3, stop - first - 1)))
        accepted = draw(st.integers(0, drafts))
        if stop == length:
            drafts = accepted = 0
        steps.append((first, stop, drafts, accepted))
        first = stop - drafts + accepted
    return {
        "ratio": ratio,
        "length": length,
        "steps": steps,
        "persist": draw(st.sampled_from(["all", "window"])),
        "tell": draw(st.booleans()),
        "rows": draw(st.sampled_from([1, 3, 4, 8])),
    }


@settings(deadline=None, max_examples=25)
@given(plans())
def test_chunks_with_rejected_drafts_equal_one_shot(plan: dict[str, Any]) -> None:
    """Steps of any size carry their state through the cache; junk drafts leave no trace once they are run again."""
    kind = SMALL if plan["ratio"] == 4 else SMALL128
    n = plan["length"]
    scene = Scene(kind, [n, 5], state_rows=plan["rows"])
    junk = helpers.generator(9)
    for first, stop, drafts, accepted in plan["steps"]:
        step = scene.step([(1, 0, 1), (0, first, stop)])
        rejected = stop - first + 1 - drafts + accepted
        step.kv_score[rejected:] = torch.randn(drafts - accepted, 2 * kind.width, generator=junk) * 10
        restart = torch.tensor([0, stop - drafts], dtype=torch.int32) if plan["tell"] else None
        run(scene, step, persist=plan["persist"], min_restart=restart)
    want = scene.entry_bytes([(0, g) for g in range(n // kind.ratio)])
    assert torch.equal(helpers.raw_bytes(scene.kv_cache), want)


def window_saves(p: int, restart: int, keep_every: int) -> bool:
    """Whether "window" keeps position p of a ratio-4 request, from what later windows reach.

    A request scheduled from position s closes its first entry in the group of s, whose window begins a group earlier.
    """
    if p >= restart // 4 * 4 - 4:
        return True
    resumes = range(keep_every, p + 5, keep_every) if keep_every else range(0)
    return any(s // 4 * 4 - 4 <= p < s for s in resumes)


@pytest.mark.parametrize("keep_every", [0, 4, 16, 256])
@pytest.mark.parametrize("restart", [None, 3, 17, 20, 23, 24, 40])
def test_rows_that_window_saves_ratio_4(restart: int | None, keep_every: int) -> None:
    scene = Scene(SMALL, [270, 41])
    ranges = [(0, 241, 270), (1, 3, 41)]
    for r, first, _ in ranges:
        scene.fill_state(r, 0, first)
    step = scene.step(ranges, pad=2)
    told = None if restart is None else torch.tensor([230 + restart, restart], dtype=torch.int32)
    rows = []
    for i, (r, first, stop) in enumerate(ranges):
        start = first if told is None else int(told[i])
        rows += [(r, p) for p in range(first, stop) if window_saves(p, start, keep_every)]
    want = state_after(scene, rows)
    assert torch.equal(
        run(scene, step, persist="window", min_restart=told, keep_every=keep_every), scene.entry_bytes(step.closed)
    )
    assert torch.equal(helpers.raw_bytes(scene.state_cache), want)


@pytest.mark.parametrize("restart", [None, 100, 127, 128, 255, 256, 300])
def test_rows_that_window_saves_ratio_128(restart: int | None) -> None:
    scene = Scene(SMALL128, [300], state_rows=8)
    scene.fill_state(0, 0, 100)
    step = scene.step([(0, 100, 300)])
    told = None if restart is None else torch.tensor([restart], dtype=torch.int32)
    start = 100 if restart is None else restart
    want = state_after(scene, [(0, p) for p in range(100, 300) if p >= start // 128 * 128])
    run(scene, step, persist="window", min_restart=told, keep_every=256)
    assert torch.equal(helpers.raw_bytes(scene.state_cache), want)


@pytest.mark.parametrize("multiple", [16, 32, 48])
def test_resuming_at_a_prefix_block(multiple: int) -> None:
    """Another request continues from a cached prefix: the rows kept before the block's end are all it needs."""
    scene = Scene(SMALL, [60])
    last = torch.tensor([60], dtype=torch.int32)
    run(scene, scene.step([(0, 0, 60)]), persist="window", min_restart=last, keep_every=16)
    scene.kv_cache = scene.new_entries()
    scene.kv[0][multiple:] += 1.0
    raw = run(scene, scene.step([(0, multiple, 60)]), persist="window", min_restart=last, keep_every=16)
    assert torch.equal(raw, scene.entry_bytes([(0, g) for g in range(multiple // 4, 15)]))


def ring(scene: Scene, step: SimpleNamespace, pages: int) -> None:
    """Make the state pages of request 0 a ring of `pages` pages."""
    table = scene.state_table
    used = scene.lengths[0] // scene.state_rows + 1
    table[0, :used] = torch.arange(used, dtype=torch.int32) % pages
    first = int(step.positions[0])
    step.block_table = table[:1]
    step.slot_mapping[:] = torch.tensor([scene.state_slot(0, first + i) for i in range(step.slot_mapping.shape[0])])


@pytest.fixture
def validated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call's data is validated first, as with CUTE_KERNELS_CHECK=1."""
    op, call = OPS["fused_compress_norm_rope_store"], ops._fused

    def checked(record: Any) -> None:
        assert op.validate is not None
        op.validate(*record)
        call(record)

    monkeypatch.setattr(ops, "_fused", checked)


@pytest.mark.usefixtures("validated")
def test_overwriting_a_row_that_is_still_read_is_found() -> None:
    for pages, fine in ((4, True), (3, False)):
        scene = Scene(SMALL, [40])
        step = scene.step([(0, 18, 26)])
        ring(scene, step, pages)
        scene.fill_state(0, 12, 18)
        if fine:
            run(scene, step)
            continue
        before = helpers.raw_bytes(scene.state_cache).clone()
        with pytest.raises(
            ValueError, match=r"fused_compress_norm_rope_store: slot_mapping: .*got slot 0, .* position 12 of request 0"
        ):
            run(scene, step)
        assert torch.equal(helpers.raw_bytes(scene.state_cache), before)
        assert (helpers.raw_bytes(scene.kv_cache) == helpers.POISON_BYTE).all()
        # A row that is not saved overwrites nothing: with a restart at 30 the step saves 24 and 25 only, at 32 nothing.
        late = torch.tensor([32], dtype=torch.int32)
        assert torch.equal(run(scene, step, persist="window", min_restart=late), scene.entry_bytes([(0, 4), (0, 5)]))
        with pytest.raises(ValueError, match="position 12 of request 0"):
            run(scene, step, persist="window", min_restart=late - 2)


@pytest.mark.usefixtures("validated")
@pytest.mark.parametrize("argument", ["slot_mapping", "kv_slot_mapping"])
def test_a_slot_named_twice_is_found(argument: str) -> None:
    scene = Scene(SMALL, [40])
    step = scene.step([(0, 18, 26)])
    scene.fill_state(0, 12, 18)
    slots = step.slot_mapping if argument == "slot_mapping" else step.entry_slots
    slots[6] = slots[2] = 5
    message = rf"fused_compress_norm_rope_store: {argument}\[6\]: .*got 5, as in row 2"
    with pytest.raises(ValueError, match=message):
        run(scene, step)
    slots[6] = slots[2] = -1
    run(scene, step)


@pytest.mark.usefixtures("validated")
@pytest.mark.parametrize("row", [0, 5])
def test_positions_that_jump_are_found(row: int) -> None:
    """In the window of an entry, its own group or the one before; a row without a slot may say anything."""
    scene = Scene(SMALL, [40])
    step = scene.step([(0, 16, 24)])
    scene.fill_state(0, 12, 16)
    right = int(step.positions[row])
    step.positions[row] = 39
    message = rf"fused_compress_norm_rope_store: positions\[{row}\]: expected {right}, .*row \d+ is at \d+, got 39"
    with pytest.raises(ValueError, match=message):
        run(scene, step)
    step.slot_mapping[row] = -1
    assert torch.equal(run(scene, step), scene.entry_bytes([(0, 4), (0, 5)]))


def test_nan_of_rotated_columns() -> None:
    """As bf16 it is 0x7FFF, whatever its sign was."""
    scene = Scene(Kind(512, 4, "fp8_ds_mla/1"), [4])
    step = scene.step([(0, 0, 4)])
    step.kv_score[1] = -torch.nan
    run(scene, step)
    fmt, slot = FORMATS["fp8_ds_mla/1"], step.entry_slots[-1:]
    values = fmt.read_fields(scene.kv_cache, scene.kv_cache.shape[1], slot)[0][0, 448:]
    assert values.view(torch.int16).unique().tolist() == [0x7FFF]


@pytest.mark.usefixtures("validated")
def test_a_ring_of_pages_equals_one_shot() -> None:
    """Window, largest step and nothing else in the state pool: pages are reused and every entry is right."""
    scene = Scene(SMALL, [60])
    for first in range(0, 60, 6):
        step = scene.step([(0, first, first + 6)])
        ring(scene, step, 4)
        run(scene, step, persist="window")
    assert torch.equal(helpers.raw_bytes(scene.kv_cache), scene.entry_bytes([(0, g) for g in range(15)]))


def make_rings(scene: Scene, step: SimpleNamespace, ranges: list[tuple[int, int, int]], columns: int) -> None:
    """As many state pages for each request, in no order."""
    g = helpers.generator(11)
    pages = torch.randperm(len(scene.lengths) * columns, generator=g).view(-1, columns).int()
    step.block_table = pages[[r for r, _, _ in ranges]]
    rows = [(r, p) for r, a, b in ranges for p in range(a, b)]
    n = scene.state_rows
    step.slot_mapping[:] = torch.tensor([int(pages[r, p // n % columns]) * n + p % n for r, p in rows])
    if scene.state_cache.shape[0] != pages.numel():
        scene.state_cache = torch.full((pages.numel(), n, 2 * scene.kind.width), torch.nan)


@pytest.mark.usefixtures("validated")
@pytest.mark.parametrize(
    ("kind", "rows", "columns"),
    [(SMALL, 4, 2), (SMALL, 4, 4), (SMALL, 8, 3), (SMALL128, 128, 1), (SMALL128, 64, 3)],
    ids=str,
)
def test_rings_equal_one_shot(kind: Kind, rows: int, columns: int) -> None:
    """Chunks whose slots repeat close their entries in one call and save what is left in another; steps of one token,
    and of a few where the ring has room for them, do both in one call."""
    n = 3 * kind.window + 5 if kind.ratio == 128 else 75
    scene = Scene(kind, [n, n], state_rows=rows)
    nothing = torch.full((2,), 2**31 - 1, dtype=torch.int32)
    first, closed = 0, []
    ring = rows * columns
    room = ring - kind.window + 1
    for count in [kind.window + 3, 1, 1, 2, kind.ratio + 1, 1, 1, 1, 3, room, 2 * ring + 1, 1, n]:
        stop = min(n, first + count)
        ranges = [(0, first, stop), (1, first, stop)]
        step = scene.step(ranges)
        make_rings(scene, step, ranges, columns)
        if count <= room:
            run(scene, step, cyclic_table=True)
        else:
            run(scene, step, cyclic_table=True, persist="window", min_restart=nothing)
            last = step.slot_mapping.where(step.positions >= stop - ring, torch.full_like(step.slot_mapping, -1))
            kv, score = step.kv_score.split(kind.width, dim=1)
            save_partial_states(
                kv, score, scene.ape, step.positions, scene.state_cache, last, rows, kind.width, kind.ratio
            )
        closed += step.closed
        first = stop
        if first == n:
            break
    assert first == n
    assert len(closed) == 2 * (n // kind.ratio)
    assert torch.equal(helpers.raw_bytes(scene.kv_cache), scene.entry_bytes(closed))


@pytest.mark.usefixtures("validated")
@pytest.mark.parametrize("kind", [SMALL, SMALL128, KINDS[0], KINDS[1]], ids=str)
def test_raw_scores(kind: Kind) -> None:
    """The same entries; the state cache has the projections themselves."""
    n = 2 * kind.window + 3
    scene = Scene(kind, [n])
    for first, stop in ((0, 1), (1, kind.window + 1), (kind.window + 1, n)):
        step = scene.step([(0, first, stop)])
        run(scene, step, raw_scores=True)
    assert torch.equal(helpers.raw_bytes(scene.kv_cache), scene.entry_bytes([(0, g) for g in range(n // kind.ratio)]))
    for p in (0, 1, kind.window, n - 1):
        page, row = divmod(scene.state_slot(0, p), scene.state_rows)
        want = np.concatenate([scene.kv[0][p], scene.score[0][p]])
        assert np.array_equal(scene.state_cache[page, row].numpy(), want)


@pytest.mark.usefixtures("validated")
def test_window_saves_the_ends_of_rings() -> None:
    """What a later step reads; slots of other rows may repeat."""
    scene = Scene(SMALL, [43])
    ranges = [(0, 0, 43)]
    step = scene.step(ranges)
    make_rings(scene, step, ranges, 2)
    last = torch.tensor([43], dtype=torch.int32)
    raw = run(scene, step, cyclic_table=True, persist="window", min_restart=last)
    assert torch.equal(raw, scene.entry_bytes(step.closed))
    want = torch.full_like(scene.state_cache, torch.nan)
    for p in range(36, 43):
        page, row = divmod(int(step.slot_mapping[p]), 4)
        want[page, row] = torch.from_numpy(np.concatenate([scene.kv[0][p], scene.biased(0, p)]))
    torch.testing.assert_close(scene.state_cache, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.usefixtures("validated")
def test_overwriting_a_ring_that_is_still_read_is_found() -> None:
    scene = Scene(SMALL, [40])
    for stop, is_fine in ((6, True), (13, False)):
        ranges = [(0, 5, stop)]
        step = scene.step(ranges)
        make_rings(scene, step, ranges, 2)
        scene.state_cache.zero_()
        if is_fine:
            run(scene, step, cyclic_table=True)
            continue
        with pytest.raises(ValueError, match="position 0 of request 0"):
            run(scene, step, cyclic_table=True, persist="window", min_restart=torch.tensor([13], dtype=torch.int32))


def test_rows_of_the_step_come_from_the_step() -> None:
    """Neither the table nor the cache is looked at for them, whatever their own slots say."""
    scene = Scene(SMALL, [16])
    step = scene.step([(0, 0, 16)])
    step.block_table.fill_(meaning.GARBAGE)
    step.slot_mapping[4:7] = -1
    want = state_after(scene, [(0, p) for p in range(16) if not 4 <= p < 7])
    assert torch.equal(run(scene, step), scene.entry_bytes([(0, g) for g in range(4)]))
    assert torch.equal(helpers.raw_bytes(scene.state_cache), want)


def test_rows_before_position_zero_are_nobodys() -> None:
    """A request that claims rows of NaN before its position 0 does not read them."""
    scene = Scene(SMALL, [4])
    step = scene.step([(0, 0, 4)], pad_before=5)
    step.query_start_loc[0] = 0
    assert torch.equal(run(scene, step), scene.entry_bytes([(0, 0)]))


def test_rows_that_do_not_act() -> None:
    scene = Scene(SMALL, [40])
    step = scene.step([(0, 0, 40)])
    capacity, entry_capacity = scene.state_cache.shape[0] * 4, scene.kv_cache.shape[0] * 4
    for t, slot in ((3, -1), (7, capacity), (11, INT64.min)):
        step.slot_mapping[t] = slot
    for t, slot in ((15, -1), (19, entry_capacity), (23, INT64.max), (25, 0)):
        step.entry_slots[t] = slot
    step.token_to_req_indices[27], step.token_to_req_indices[31] = 1, -1
    step.positions[35] = -1
    want = state_after(scene, [(0, p) for p in range(40) if p not in (3, 7, 11, 35)])
    page, row = divmod(int(step.slot_mapping[35]), 4)
    raw = run(scene, step)
    scene.state_cache[page, row] = float("nan")
    ours, want = (x.view(torch.float32).nan_to_num(1e9) for x in (helpers.raw_bytes(scene.state_cache), want))
    assert torch.equal(ours, want)
    assert torch.equal(raw, scene.entry_bytes([(0, 9)]))


@pytest.mark.parametrize("column", [0, 1])
def test_older_rows_on_an_invalid_page_skip_the_entry(column: int) -> None:
    for page in (-1, meaning.GARBAGE, 10_000):
        scene = Scene(SMALL, [16])
        scene.fill_state(0, 0, 6)
        step = scene.step([(0, 6, 16)])
        step.block_table[0, column] = page
        assert torch.equal(run(scene, step), scene.entry_bytes([(0, 3)] if column else [(0, 2), (0, 3)]))


def test_padding_saves_and_closes_nothing() -> None:
    scene = Scene(SMALL, [8])
    scene.fill_state(0, 0, 3)
    step = scene.step([(0, 3, 4)], pad=3)
    step.positions[1:] = torch.tensor([3, 7, 0])
    step.entry_slots[1:] = torch.tensor([5, 6, 7])
    want = state_after(scene, [(0, 3)])
    assert torch.equal(run(scene, step), scene.entry_bytes([(0, 0)]))
    assert torch.equal(helpers.raw_bytes(scene.state_cache), want)


def test_no_rows_and_no_requests() -> None:
    scene = Scene(SMALL, [8])
    before = helpers.raw_bytes(scene.state_cache).clone()
    for persist in ("all", "window"):
        assert torch.equal(run(scene, scene.step([]), persist=persist), scene.entry_bytes([]))
        step = scene.step([(0, 0, 8)])
        assert torch.equal(run(scene, step, slot_mapping=step.slot_mapping[:0], persist=persist), scene.entry_bytes([]))
    step.query_start_loc, step.block_table = step.query_start_loc[:1], step.block_table[:0]
    assert torch.equal(run(scene, step, persist="window"), scene.entry_bytes([]))
    assert torch.equal(helpers.raw_bytes(scene.state_cache), before)


@settings(deadline=None, max_examples=25)
@given(st.data())
def test_garbage_metadata_writes_only_named_rows(data: Any) -> None:
    """Whatever the metadata says, only the rows that valid slots name change, and nothing fails."""
    scene = Scene(SMALL, [24])
    step = scene.step([(0, 0, 24)])
    wild = st.sampled_from([-(2**31), -5, -1, 0, 1, 2, 7, 30, 2**31 - 1])
    wilder = st.sampled_from([INT64.min, -1, 0, 3, 7, 11, 19, 23, 1000, INT64.max])

    def fill(t: torch.Tensor, values: Any) -> None:
        t.copy_(torch.tensor(data.draw(st.lists(values, min_size=t.numel(), max_size=t.numel()))).view(t.shape))

    fill(step.token_to_req_indices, wild)
    fill(step.query_start_loc, wild)
    fill(step.block_table, wild)
    fill(step.positions, wilder)
    restart = torch.zeros(1, dtype=torch.int32)
    fill(restart, wild)
    step.slot_mapping[::3] = torch.tensor([-1, 10**6, INT64.max, INT64.min] * 2)
    before, entries_before = scene.state_cache.clone(), scene.entry_bytes([])
    fused_compress_norm_rope_store(
        **arguments(scene, step, persist=data.draw(st.sampled_from(["all", "window"])), min_restart=restart)
    )
    named = torch.zeros(scene.state_cache.shape[0] * 4, dtype=torch.bool)
    named[step.slot_mapping[(step.slot_mapping >= 0) & (step.slot_mapping < named.shape[0])]] = True
    same = ~named.view(-1, 4)
    assert torch.equal(scene.state_cache[same].view(torch.int32), before[same].view(torch.int32))
    changed = (helpers.raw_bytes(scene.kv_cache) != entries_before).nonzero().flatten()
    stride, rows = scene.kv_cache.stride(0), scene.entry_rows
    slots = {divmod(int(s), rows) for s in step.entry_slots if s >= 0}
    for byte in changed.tolist():
        page, offset = divmod(byte, stride)
        row = offset // 128 if offset < rows * 128 else (offset - rows * 128) // 4
        assert (page, row) in slots


@pytest.mark.parametrize("kind", [KINDS[1], KINDS[5]], ids=str)
def test_a_request_does_not_depend_on_its_batch(kind: Kind) -> None:
    scene, _ = batch(kind)
    together, step = batch(kind)
    run(together, step)
    r = kind.ratio
    for part in [(0, 0, 2 * r + 3), (1, r + r // 2, 3 * r + 1), (2, 2 * r - 1, 2 * r), (3, 0, 1)]:
        run(scene, scene.step([part]))
    assert torch.equal(helpers.raw_bytes(scene.kv_cache), helpers.raw_bytes(together.kv_cache))
    assert torch.equal(helpers.raw_bytes(scene.state_cache), helpers.raw_bytes(together.state_cache))


@pytest.mark.parametrize("kind", [KINDS[3], KINDS[8]], ids=str)
def test_op_registration(kind: Kind) -> None:
    scene, step = batch(kind)
    restart = torch.tensor([8, 9, 8, 1], dtype=torch.int32)
    helpers.check_op(
        "fused_compress_norm_rope_store",
        *schema_args(arguments(scene, step, persist="window", min_restart=restart, keep_every=8)),
    )


@pytest.mark.full
def test_compiles_with_dynamic_shapes() -> None:
    compiled = torch.compile(fused_compress_norm_rope_store, backend="aot_eager", fullgraph=True, dynamic=True)
    for seed, pages in ((0, 4), (1, 5)):
        scene, step = batch(SMALL, seed, entry_rows=pages)
        compiled(**arguments(scene, step))
        assert torch.equal(helpers.raw_bytes(scene.kv_cache), scene.entry_bytes(step.closed))


@pytest.mark.parametrize("persist", ["all", "window"])
def test_cost(persist: str) -> None:
    scene = Scene(Kind(), [40])
    scene.fill_state(0, 0, 9)
    step = scene.step([(0, 9, 40)])
    with record_calls() as recording:
        run(scene, step, persist=persist, min_restart=torch.tensor([40], dtype=torch.int32))
    # Read from the cache: entry 2 needs positions 4 .. 7 and 8, entry 3 the first half of 8. One row is 2048 floats.
    state = (5 + 1) * 2 * 512 * 4
    saved = 31 if persist == "all" else 4
    step_bytes = (31 + saved) * 2048 * 4
    assert recording.calls[0].cost.bytes == 8 * 584 + state + step_bytes + 3 * 8 * 31 + 4 * 1024 * 4


@pytest.mark.parametrize(
    ("argument", "value", "error"),
    [
        ("kv_score", torch.zeros(99, 256), ValueError),
        ("kv_score", torch.zeros(99, 512, dtype=torch.bfloat16), TypeError),
        ("ape", torch.zeros(8, 256), ValueError),
        ("positions", torch.zeros(99, dtype=torch.int32), TypeError),
        ("token_to_req_indices", torch.zeros(3, dtype=torch.int32), ValueError),
        ("query_start_loc", torch.zeros(4, dtype=torch.int32), ValueError),
        ("query_start_loc", torch.zeros(5, dtype=torch.int64), TypeError),
        ("state_cache", torch.zeros(9, 4, 1024), ValueError),
        ("state_cache", torch.zeros(9, 0, 512), ValueError),
        ("slot_mapping", torch.zeros(3, dtype=torch.int32), TypeError),
        ("block_table", torch.zeros(4, 4, dtype=torch.int64), TypeError),
        ("kv_cache", torch.zeros(9, 4, 68, dtype=torch.uint8), ValueError),
        ("kv_slot_mapping", torch.zeros(3, dtype=torch.int64), ValueError),
        ("rms_norm_weight", torch.zeros(512), ValueError),
        ("rms_norm_eps", -1e-6, ValueError),
        ("compress_ratio", 1, ValueError),
        ("kv_format", "fp8", ValueError),
        ("persist", "some", ValueError),
        ("min_restart", torch.zeros(3, dtype=torch.int32), ValueError),
        ("min_restart", torch.zeros(4, dtype=torch.int64), TypeError),
        ("keep_every", -4, ValueError),
        ("keep_every", 6, ValueError),
        ("index_hadamard", None, None),
        ("e2m1_rounding", "up", ValueError),
        ("fp8_scale", torch.ones(1), ValueError),
    ],
)
def test_bad_arguments(argument: str, value: Any, error: type[Exception] | None) -> None:
    if error is None:
        a = arguments(*batch(KINDS[0]))
        a[argument], error = True, ValueError
    else:
        a = arguments(*batch(SMALL))
        a[argument] = value
    with pytest.raises(error, match=f"fused_compress_norm_rope_store: {argument}: expected"):
        fused_compress_norm_rope_store(**a)


def test_a_cyclic_table_holds_a_window() -> None:
    scene, step = batch(SMALL)
    step.block_table = step.block_table[:, :1]
    with pytest.raises(ValueError, match=r"block_table: expected columns for 8 tokens or more.* got pages for 4"):
        run(scene, step, cyclic_table=True)


def test_more_slots_than_rows() -> None:
    scene, step = batch(SMALL)
    a = arguments(scene, step, kv_score=step.kv_score[:5])
    with pytest.raises(ValueError, match="fused_compress_norm_rope_store: slot_mapping: expected at most the 5 rows"):
        fused_compress_norm_rope_store(**a)


def test_a_rejected_draft_is_undone_by_the_next_step() -> None:
    scene = Scene(SMALL, [8])
    step = scene.step([(0, 0, 8)])
    step.kv_score[6:] = 5.0
    want = scene.entry_bytes([(0, 0), (0, 1)])
    assert not torch.equal(run(scene, step), want)
    assert torch.equal(run(scene, scene.step([(0, 6, 8)])), want)
