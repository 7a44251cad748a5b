# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from cute_kernels.compressor.ops import compress_norm_rope_store
from cute_kernels.runtime.record import record_calls
from tests import helpers, oracle
from tests.compressor import meaning
from tests.compressor.meaning import KINDS, Kind, Scene

INT64 = torch.iinfo(torch.int64)
SMALL = Kind(128, 4, "indexer_fp8/1")


def arguments(scene: Scene, step: SimpleNamespace, **changes: Any) -> dict[str, Any]:
    """The public call's arguments, in order, for a step of a scene."""
    kind = scene.kind
    fp4 = "mxfp4" in kind.format_id
    geometry = (64, 576, 8) if kind.head_dim == 512 else (32, 64, 4) if fp4 else (128, 128, 4)
    return {
        "state_cache": scene.state_cache,
        "num_actual": step.slot_mapping.shape[0],
        "token_to_req_indices": step.token_to_req_indices,
        "positions": step.positions,
        "slot_mapping": step.slot_mapping,
        "block_table": step.block_table,
        "block_size": scene.state_rows,
        "state_width": kind.width,
        "cos_sin_cache": scene.cos_sin,
        "kv_cache": scene.kv_cache,
        "k_cache_metadata": SimpleNamespace(slot_mapping=step.entry_slots),
        "pdl_kwargs": None,
        "head_dim": kind.head_dim,
        "rope_head_dim": 64,
        "compress_ratio": kind.ratio,
        "overlap": kind.ratio == 4,
        "use_fp4_cache": fp4,
        "rms_norm_weight": scene.weight,
        "rms_norm_eps": meaning.EPS,
        "quant_block": geometry[0],
        "token_stride": geometry[1],
        "scale_dim": geometry[2],
        **kind.options(),
        **changes,
    }


def schema_args(a: dict[str, Any]) -> list[Any]:
    names = [
        "state_cache",
        "token_to_req_indices",
        "positions",
        "slot_mapping",
        "block_table",
        "cos_sin_cache",
        "kv_cache",
    ]
    tail = [
        "rms_norm_weight",
        "fp8_scale",
        "rms_norm_eps",
        "compress_ratio",
        "kv_format",
        "e2m1_rounding",
        "index_hadamard",
    ]
    return [*(a[n] for n in names), a["k_cache_metadata"].slot_mapping, *(a[n] for n in tail)]


def run(scene: Scene, step: SimpleNamespace, **changes: Any) -> torch.Tensor:
    """All bytes of the scene's entry pool after the call, which must not touch the state cache."""
    before = helpers.raw_bytes(scene.state_cache).clone()
    compress_norm_rope_store(**arguments(scene, step, **changes))
    assert torch.equal(helpers.raw_bytes(scene.state_cache), before)
    return helpers.raw_bytes(scene.kv_cache)


def batch(kind: Kind, seed: int = 0, **options: Any) -> tuple[Scene, SimpleNamespace]:
    """Requests from the start, from a prefix inside a group and one token long; all else in the state cache is NaN."""
    r = kind.ratio
    scene = Scene(kind, [2 * r + 3, 3 * r + 1, 2 * r, 2 * r], seed, **options)
    ranges = [(0, 0, 2 * r + 3), (1, r + r // 2, 3 * r + 1), (2, 2 * r - 1, 2 * r), (3, 0, 1)]
    for request, _, stop in ranges:
        scene.fill_state(request, 0, stop)
    return scene, scene.step(ranges, pad=3, pad_before=1)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_bytes(kind: Kind) -> None:
    scene, step = batch(kind, state_rows=8 if kind.ratio == 128 else 4)
    assert torch.equal(run(scene, step), scene.entry_bytes(step.closed))


@pytest.mark.parametrize("rows", [1, 3])
def test_odd_page_sizes_and_fp32_weight(rows: int) -> None:
    scene, step = batch(Kind(), 1, state_rows=rows, entry_rows=rows, weight_dtype=torch.float32)
    assert torch.equal(run(scene, step), scene.entry_bytes(step.closed))


def test_more_entries_than_are_computed_at_once() -> None:
    scene = Scene(Kind(128, 128, "indexer_fp8/1"), [33 * 128], state_rows=8)
    scene.fill_state(0, 0, 33 * 128)
    step = scene.step([(0, 0, 33 * 128)])
    assert torch.equal(run(scene, step), scene.entry_bytes(step.closed))


def test_tiny_entries_take_the_smallest_scale() -> None:
    for kind in (Kind(), SMALL, Kind(128, 4, "indexer_mxfp4/1")):
        scene, step = batch(kind)
        scene.weight = (scene.weight.float() * 1e-6).to(torch.bfloat16)
        scene.weight[:64] = 0.0
        assert torch.equal(run(scene, step), scene.entry_bytes(step.closed))


def test_all_zero_and_huge_rows() -> None:
    scene = Scene(Kind(), [12])
    scene.kv[0][:4] = 0.0
    scene.kv[0][4:] *= 3e18
    scene.fill_state(0, 0, 12)
    step = scene.step([(0, 0, 12)])
    assert torch.equal(run(scene, step), scene.entry_bytes(step.closed))
    first = helpers.raw_bytes(scene.kv_cache)[scene.entry_slot(0, 0) // 4 * scene.kv_cache.stride(0) :]
    assert (first[:576] & 0x7F == 0).all()
    assert (first[4 * 576 : 4 * 576 + 7] == 105).all()


@pytest.mark.parametrize("ratio", [4, 128])
def test_one_hot_scores_are_exact(ratio: int) -> None:
    """With all other scores at -1e30 the mean is one row, bit for bit; each channel has its own."""
    kind = Kind(ratio=ratio, format_id="plain_bf16/1")
    scene = Scene(kind, [3 * ratio])
    g = helpers.generator(3)
    chosen = torch.randint(0, ratio, (3, 512), generator=g)
    scene.ape.zero_()
    scene.score[0][:] = -1e30
    means = np.zeros((3, 512), dtype=np.float32)
    for group in range(3):
        for c in range(512):
            p = group * ratio + int(chosen[group, c])
            column = 512 + c if ratio == 4 else c
            scene.score[0][p, column] = float(c % 7)
            means[group, c] = scene.kv[0][p, column]
    scene.fill_state(0, 0, 3 * ratio)
    run(scene, scene.step([(0, 0, 3 * ratio)]))
    for group in range(3):
        table = scene.cos_sin[group * ratio].numpy()
        want = meaning.entry_values(means[group], oracle.to_numpy(scene.weight), table)
        page, row = divmod(scene.entry_slot(0, group), 4)
        assert np.array_equal(oracle.to_numpy(scene.kv_cache[page, row]), want)


@pytest.mark.parametrize("ratio", [4, 128])
@pytest.mark.parametrize("shift", [1e4, -1e4])
def test_scores_far_from_zero(ratio: int, shift: float) -> None:
    """exp of such scores is infinite, or zero, in float64; their differences are what counts."""
    scene = Scene(Kind(ratio=ratio, format_id="plain_bf16/1"), [2 * ratio])
    scene.score[0][:] += shift
    scene.fill_state(0, 0, 2 * ratio)
    step = scene.step([(0, 0, 2 * ratio)])
    assert torch.equal(run(scene, step), scene.entry_bytes(step.closed))
    assert np.isfinite(stored_means(scene, 2)).all()


def stored_means(scene: Scene, entries: int) -> np.ndarray:
    """Entries [entries, 512] of request 0 of a plain bf16 scene, float64."""
    rows = [divmod(scene.entry_slot(0, g), 4) for g in range(entries)]
    return np.stack([oracle.to_numpy(scene.kv_cache[page, row]) for page, row in rows])


@pytest.mark.parametrize("quiet", ["own", "previous"])
def test_overlap_halves(quiet: str) -> None:
    """Only the previous group's first half, or only the own group's second half, contributes."""
    scene = Scene(Kind(format_id="plain_bf16/1"), [12])
    scene.ape.zero_()
    half = slice(512, 1024) if quiet == "own" else slice(0, 512)
    scene.score[0][:, half] = -1e30
    scene.fill_state(0, 0, 12)
    run(scene, scene.step([(0, 4, 12)]))
    got = stored_means(scene, 3)[1:]
    for g in (1, 2):
        rows = slice(4 * g - 4, 4 * g) if quiet == "own" else slice(4 * g, 4 * g + 4)
        other = slice(0, 512) if quiet == "own" else slice(512, 1024)
        mean = meaning.mean_of_window(scene.kv[0][rows, other], scene.score[0][rows, other])
        want = meaning.entry_values(mean, oracle.to_numpy(scene.weight), scene.cos_sin[4 * g].numpy())
        assert np.array_equal(got[g - 1], want)


def test_unused_halves_may_be_nan() -> None:
    scene = Scene(Kind(format_id="plain_bf16/1"), [8])
    scene.fill_state(0, 0, 8)
    want = scene.entry_bytes([(0, 1)])
    for p in range(8):
        page, row = divmod(scene.state_slot(0, p), 4)
        halves = scene.state_cache[page, row].view(2, 2, 512)
        halves[:, 0 if p >= 4 else 1] = float("nan")
    assert torch.equal(run(scene, scene.step([(0, 7, 8)])), want)


@pytest.mark.parametrize("kind", [Kind(format_id="plain_bf16/1"), Kind(ratio=128, format_id="plain_bf16/1")], ids=str)
def test_only_rotated_columns_know_the_group(kind: Kind) -> None:
    n = kind.ratio
    scene = Scene(kind, [4 * n])
    for x in (scene.kv[0], scene.score[0]):
        x[:] = np.tile(x[:n], (4, 1))
    scene.fill_state(0, 0, 4 * n)
    run(scene, scene.step([(0, n, 4 * n)]))
    _, one, two, three = stored_means(scene, 4)
    assert np.array_equal(one[:448], two[:448])
    assert np.array_equal(one[:448], three[:448])
    assert not np.array_equal(one[448:], two[448:])
    mean = scene.mean(0, 1)
    for g, got in ((1, one), (2, two), (3, three)):
        want = meaning.entry_values(mean, oracle.to_numpy(scene.weight), scene.cos_sin[g * n].numpy())
        assert np.array_equal(got, want)


def test_before_position_zero_nothing_is_read() -> None:
    """The last column of the table, which index -1 would reach, names a page of NaN."""
    scene = Scene(SMALL, [4])
    scene.fill_state(0, 0, 4)
    scene.state_table[0, -1] = int(scene.state_table[0, 0]) + 1
    step = scene.step([(0, 0, 4)])
    assert torch.equal(run(scene, step), scene.entry_bytes([(0, 0)]))


def test_far_positions() -> None:
    """Position 1e6: a wide table whose other columns are garbage, and a rope table with rows one element apart."""
    scene = Scene(SMALL, [8])
    scene.fill_state(0, 0, 8)
    step = scene.step([(0, 7, 8)])
    step.positions[0] = 999_999
    table = torch.full((1, 250_007), meaning.GARBAGE, dtype=torch.int32)
    table[0, 249_998:250_000] = scene.state_table[0, :2]
    step.block_table = table
    rope = torch.randn(1_000_100, generator=helpers.generator(1)).as_strided((1_000_030, 64), (1, 1))
    scene.cos_sin = scene.cos_sin.clone()
    scene.cos_sin[4] = rope[999_996]
    assert torch.equal(run(scene, step, cos_sin_cache=rope), scene.entry_bytes([(0, 1)]))


@pytest.mark.parametrize("page", [meaning.GARBAGE, -1, 10_000, 2**31 - 1])
@pytest.mark.parametrize("column", [0, 1])
def test_window_on_an_invalid_page_skips_the_entry(page: int, column: int) -> None:
    scene = Scene(SMALL, [12, 12])
    scene.fill_state(0, 0, 12)
    scene.fill_state(1, 0, 12)
    step = scene.step([(0, 0, 12), (1, 0, 12)])
    step.block_table[0, column] = page
    kept = (0, 2) if column == 0 else (0, 0)
    assert torch.equal(run(scene, step), scene.entry_bytes([kept, (1, 0), (1, 1), (1, 2)]))


def test_rows_that_do_not_act() -> None:
    scene = Scene(SMALL, [40])
    scene.fill_state(0, 0, 40)
    step = scene.step([(0, 0, 40)])
    capacity = scene.state_cache.shape[0] * 4
    entry_capacity = scene.kv_cache.shape[0] * 4
    for t, slot in ((3, -1), (7, capacity), (11, INT64.min)):
        step.slot_mapping[t] = slot
    for t, slot in ((15, -1), (19, entry_capacity), (23, INT64.max), (25, 0)):
        step.entry_slots[t] = slot
    step.token_to_req_indices[27], step.token_to_req_indices[31] = 1, -1
    step.positions[35] = -1
    assert torch.equal(run(scene, step), scene.entry_bytes([(0, 9)]))


def test_num_actual_cuts_the_step() -> None:
    scene = Scene(SMALL, [12])
    scene.fill_state(0, 0, 12)
    step = scene.step([(0, 0, 12)])
    assert torch.equal(run(scene, step, num_actual=11), scene.entry_bytes([(0, 0), (0, 1)]))
    scene.kv_cache = scene.new_entries()
    short = SimpleNamespace(slot_mapping=step.entry_slots[:4])
    assert torch.equal(run(scene, step, num_actual=4, k_cache_metadata=short), scene.entry_bytes([(0, 0)]))


def test_no_rows_no_requests_no_pages() -> None:
    scene = Scene(SMALL, [12])
    step = scene.step([])
    assert torch.equal(run(scene, step), scene.entry_bytes([]))
    step = scene.step([(0, 0, 12)])
    step.block_table = step.block_table[:0]
    assert torch.equal(run(scene, step), scene.entry_bytes([]))
    run(scene, step, kv_cache=scene.kv_cache[:0], state_cache=scene.state_cache[:0])


def test_nan_stays_in_its_entry() -> None:
    scene = Scene(Kind(), [16])
    scene.fill_state(0, 0, 16)
    page, row = divmod(scene.state_slot(0, 5), 4)
    scene.state_cache[page, row, 512] = float("nan")
    raw, want = run(scene, scene.step([(0, 0, 16)])), scene.entry_bytes([(0, 0), (0, 2), (0, 3)])
    stride = scene.kv_cache.stride(0)
    page, row = divmod(scene.entry_slot(0, 1), 4)
    assert (raw[page * stride + row * 576 :][:448] == 0x7F).all()
    for part in (slice(row * 576, row * 576 + 576), slice(4 * 576 + row * 8, 4 * 576 + row * 8 + 8)):
        raw[page * stride :][part] = want[page * stride :][part] = 0
    assert torch.equal(raw, want)


@pytest.mark.parametrize("kind", [KINDS[0], KINDS[1], KINDS[6]], ids=str)
def test_an_entry_does_not_depend_on_its_batch(kind: Kind) -> None:
    n = 20 * kind.ratio
    scene = Scene(kind, [n], state_rows=8)
    scene.fill_state(0, 0, n)
    together = run(scene, scene.step([(0, 0, n)])).clone()
    scene.kv_cache = scene.new_entries()
    for g in range(20):
        last = (g + 1) * kind.ratio - 1
        run(scene, scene.step([(0, last, last + 1)]))
    assert torch.equal(helpers.raw_bytes(scene.kv_cache), together)


def test_strided_arguments() -> None:
    scene, step = batch(SMALL)
    n = step.positions.shape[0]
    table = torch.full((4, 40), 3, dtype=torch.int32)
    table[:, : step.block_table.shape[1]] = step.block_table
    step.block_table = table[:, : step.block_table.shape[1]]
    wide = torch.full((scene.cos_sin.shape[0], 100), float("nan"))
    wide[:, 5:69] = scene.cos_sin
    pool = torch.full((scene.state_cache.shape[0], 3000), float("nan"))
    state = pool[:, 16:2064].view(-1, 4, 512)
    state.copy_(scene.state_cache)
    requests = torch.cat([step.token_to_req_indices, torch.full((4,), 99, dtype=torch.int32)])
    raw = run(
        scene,
        step,
        state_cache=state,
        cos_sin_cache=wide[:, 5:69],
        token_to_req_indices=requests,
        positions=torch.cat([step.positions, torch.full((2,), 3)]),
        num_actual=n,
    )
    assert torch.equal(raw, scene.entry_bytes(step.closed))


@pytest.mark.parametrize(
    ("head_dim", "fp4", "format_id"),
    [(512, False, "fp8_ds_mla/1"), (128, False, "indexer_fp8/1"), (128, True, "indexer_mxfp4/1")],
)
def test_default_format(head_dim: int, fp4: bool, format_id: str) -> None:
    scene, step = batch(Kind(head_dim, 4, format_id))
    a = arguments(scene, step)
    assert a["use_fp4_cache"] == fp4
    for name in ("kv_format", "e2m1_rounding", "index_hadamard", "fp8_scale"):
        del a[name]
    compress_norm_rope_store(**a)
    assert torch.equal(helpers.raw_bytes(scene.kv_cache), scene.entry_bytes(step.closed))


@pytest.mark.parametrize("kind", [KINDS[3], KINDS[8]], ids=str)
def test_op_registration(kind: Kind) -> None:
    helpers.check_op("compress_norm_rope_store", *schema_args(arguments(*batch(kind))))


@pytest.mark.full
def test_compiles_with_dynamic_shapes() -> None:
    compiled = torch.compile(compress_norm_rope_store, backend="aot_eager", fullgraph=True, dynamic=True)
    for seed, pages in ((0, 4), (1, 5)):
        scene, step = batch(SMALL, seed, entry_rows=pages)
        compiled(**arguments(scene, step))
        assert torch.equal(helpers.raw_bytes(scene.kv_cache), scene.entry_bytes(step.closed))


def test_cost() -> None:
    scene, step = batch(Kind())
    with record_calls() as recording:
        compress_norm_rope_store(**arguments(scene, step))
    entries, rows = len(step.closed), sum(4 if g == 0 else 8 for _, g in step.closed)
    cost = recording.calls[0].cost
    assert cost.bytes == entries * 584 + rows * 2 * 512 * 4 + 3 * 8 * step.slot_mapping.shape[0]
    assert cost.flops > entries * 512 * 8 * 4


@pytest.mark.parametrize(
    ("argument", "value", "error"),
    [
        ("state_cache", torch.zeros(9, 4, 1024), ValueError),
        ("state_cache", torch.zeros(9, 4, 512, dtype=torch.bfloat16), TypeError),
        ("state_cache", torch.zeros(9, 4, 512)[:, :, :256], ValueError),
        ("num_actual", -1, ValueError),
        ("num_actual", 99, ValueError),
        ("token_to_req_indices", torch.zeros(99, dtype=torch.int64), TypeError),
        ("token_to_req_indices", torch.zeros(3, dtype=torch.int32), ValueError),
        ("positions", torch.zeros(3, dtype=torch.int64), ValueError),
        ("slot_mapping", None, TypeError),
        ("slot_mapping", torch.zeros(99, dtype=torch.int32), TypeError),
        ("block_table", torch.zeros(4, 4, dtype=torch.int64), TypeError),
        ("block_size", 8, ValueError),
        ("state_width", 128, ValueError),
        ("cos_sin_cache", torch.zeros(20, 32), ValueError),
        ("cos_sin_cache", torch.zeros(0, 64), ValueError),
        ("cos_sin_cache", torch.zeros(20, 64, dtype=torch.bfloat16), TypeError),
        ("kv_cache", torch.zeros(9, 4, 68, dtype=torch.uint8), ValueError),
        ("kv_cache", torch.zeros(9, 0, 132, dtype=torch.uint8), ValueError),
        ("kv_cache", torch.zeros(9, 4, 132), TypeError),
        ("k_cache_metadata", SimpleNamespace(slot_mapping=torch.zeros(99, dtype=torch.int32)), TypeError),
        ("k_cache_metadata", SimpleNamespace(slot_mapping=torch.zeros(2, dtype=torch.int64)), ValueError),
        ("k_cache_metadata", None, TypeError),
        ("head_dim", 64, ValueError),
        ("rope_head_dim", 32, ValueError),
        ("compress_ratio", 2, ValueError),
        ("overlap", False, ValueError),
        ("use_fp4_cache", True, ValueError),
        ("rms_norm_weight", torch.zeros(512), ValueError),
        ("rms_norm_eps", -1e-6, ValueError),
        ("quant_block", 64, ValueError),
        ("token_stride", 64, ValueError),
        ("scale_dim", 8, ValueError),
        ("kv_format", "fp8_ds_mla/1", ValueError),
        ("kv_format", "indexer_fp8/9", ValueError),
        ("fp8_scale", torch.ones(1), ValueError),
        ("e2m1_rounding", "up", ValueError),
    ],
)
def test_bad_arguments(argument: str, value: Any, error: type[Exception]) -> None:
    a = arguments(*batch(SMALL))
    a[argument] = value
    with pytest.raises(error, match=rf"compress_norm_rope_store: {argument}(\.slot_mapping)?: expected"):
        compress_norm_rope_store(**a)


def test_bad_combinations() -> None:
    scene, step = batch(KINDS[3])
    for name, value in (("fp8_scale", None), ("fp8_scale", torch.ones(2)), ("index_hadamard", True)):
        with pytest.raises(ValueError, match=f"compress_norm_rope_store: {name}: expected"):
            compress_norm_rope_store(**arguments(scene, step, **{name: value}))
    scene, step = batch(KINDS[1], state_rows=8)
    for name, value in (("overlap", True), ("use_fp4_cache", True), ("state_width", 1024)):
        with pytest.raises(ValueError, match=f"compress_norm_rope_store: {name}: expected"):
            compress_norm_rope_store(**arguments(scene, step, **{name: value}))
