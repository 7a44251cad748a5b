# SPDX-License-Identifier: Apache-2.0
"""Records are read strictly, and every committed one passes."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from perf import cli, engines
from perf.records import RecordError, case_of, collect, gpu_folder, load, parse, to_text, usable
from perf.report import LAYER, LAYERS, stale
from tests.perf import synthetic
from tests.perf.synthetic import LEFT_OUT, cell, layer_cell, record, row

ROOT = Path(__file__).parent.parent.parent
RESULTS = ROOT / "perf/results"
COMMITTED = sorted(RESULTS.rglob("*.json"))


# ---- what is committed -----------------------------------------------------------------------------------------------


def test_there_are_records() -> None:
    assert COMMITTED


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: str(path.relative_to(RESULTS)))
def test_every_committed_record_may_be_shown(path: Path) -> None:
    found = load(path)
    assert path.relative_to(RESULTS).as_posix() == f"{gpu_folder(found.gpu)}/{found.op}.json"
    assert found.op in {*cli.MODULES, *LAYERS, engines.OP}
    assert not found.partial
    assert usable(found)[1] == []
    assert None not in (found.commit, found.driver, found.dsl, found.tvm_ffi, found.cpu)
    assert {c.kind for c in found.ceilings} >= {"copy", "bf16", "e4m3 fast", "e4m3 full", "launch"}
    assert all(c.ours.host is not None for c in found.cells if c.ours.us < 10)
    assert all(value for c in found.cells for peer in c.of_kind("peer") for value in peer.versions.values())
    # those of before calls were timed apart count bytes that need not move
    shares = [row.percent for c in found.cells for row in c.rows if row.apart is not None and row.percent is not None]
    assert all(share <= 100 for share in shares)


def test_report_readme_and_plots_are_up_to_date() -> None:
    assert stale(ROOT, collect(RESULTS)) == [], "run `python -m perf report`"


# ---- the schema ------------------------------------------------------------------------------------------------------

GOOD = record([cell(1, 1616, 1.68, {"vllm-triton": 4.38, "other": "not here"}, host=7.0), cell(64, 103424, 1.85)])


def test_a_good_record_is_read() -> None:
    found = parse(GOOD)
    first = found.cells[0]
    assert (found.op, found.gpu, found.commit) == (synthetic.INSERT, synthetic.GPU, "abcdef123456")
    assert (first.case, first.ours.us, first.bytes, first.tensors) == ("T=1", 1.68, 1616, 3)
    assert first.best_peer is not None
    assert first.best_peer.name == "vllm-triton"
    assert first.ours.host is not None
    assert first.ours.host.us == 7.0
    assert [(s.name, s.reason) for s in first.skipped] == [("other", "not here")]
    assert found.cells[1].best_peer is None
    assert [(c.name, c.reason) for c in found.missing_ceilings] == [("e4m3 full matmul 8192", "RuntimeError: not here")]


def test_a_file_has_a_line_per_cell(tmp_path: Path) -> None:
    text = to_text(GOOD)
    assert json.loads(text) == GOOD
    assert list(json.loads(text)) == [*(name for name in GOOD if name != "records"), "records"]
    assert sum(line.startswith('  {"op"') for line in text.splitlines()) == len(GOOD["records"])
    (tmp_path / "x.json").write_text(text)
    assert load(tmp_path / "x.json").cells == parse(GOOD).cells


def test_a_gain_is_the_smaller_of_both_and_none_where_a_peer_was_absent() -> None:
    data = cell(1, 1616, 2.0, {"a": 4.0, "b": 3.0})
    assert parse(record([data])).cells[0].gain == 1.5
    for line, us in zip(data["rows"], (3.0, 3.6, 3.9), strict=True):
        line["us_apart"] = us
    found = parse(record([{**data, "between_us": 1.2}])).cells[0]
    assert found.best_peer_apart is not None
    assert (found.best_peer_apart.name, found.gain) == ("a", pytest.approx(1.2))
    data = cell(1, 1616, 2.0, {"a": 4.0, "b": "cannot be imported: AttributeError: no such op"})
    found = parse(record([data])).cells[0]
    assert (found.absent, found.gain) == (("b",), None)
    data = cell(1, 1616, 2.0, {"a": 4.0, "b": "NotImplementedError: no such shape"})
    assert parse(record([data])).cells[0].gain == 2.0


def test_the_best_peer_is_the_fastest_even_if_its_result_differs() -> None:
    data = cell(1, 1616, 1.68, {"vllm-triton": 4.38, "vllm-cutedsl": 3.0})
    data["rows"][2]["checked"] = False
    best = parse(record([data])).cells[0].best_peer
    assert best is not None
    assert (best.name, best.checked) == ("vllm-cutedsl", False)


def _first_row(data: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = data["records"][0]["rows"][0]
    return found


def _peer(data: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = data["records"][0]["rows"][1]
    return found


BROKEN: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "old schema": (lambda d: d.pop("schema"), "schema: expected 1, got None"),
    "new schema": (lambda d: d.update(schema=2), "schema: expected 1, got 2"),
    "no driver": (lambda d: d.pop("driver"), "driver is missing"),
    "no commit": (lambda d: d.pop("commit"), "commit is missing"),
    "torch": (lambda d: d.update(torch=None), "torch: expected str, got null"),
    "unknown field": (lambda d: d.update(mood="good"), "unknown fields: mood"),
    "no cell": (lambda d: d.update(records=[]), "records: expected a cell at least"),
    "another op": (lambda d: d.update(op="x"), "records: expected cells of x"),
    "same case twice": (lambda d: d["records"].append(d["records"][0]), "records: expected different cases"),
    "no T": (lambda d: d["records"][0].update(shape={}), "shape: expected a field T"),
    "group": (lambda d: d["records"][0]["shape"].update(group=3), "(T=1): shape: expected text as group, got 3"),
    "padded": (lambda d: d["records"][0]["shape"].update(padded=1), "shape: expected a share as padded, got 1"),
    "no bytes": (lambda d: d["records"][0].update(bytes=0), "cell 0 (T=1): bytes: expected an integer >= 1, got 0"),
    "ours missing": (lambda d: d["records"][0]["rows"].pop(0), "rows: expected ours first"),
    "ours twice": (
        lambda d: d["records"][0]["rows"].append(row("cute_kernels", 1.7, 1616)),
        "rows: expected ours first, and once",
    ),
    "same name twice": (
        lambda d: d["records"][0]["rows"].append(row("vllm-triton", 1.7, 1616)),
        "rows: expected different names",
    ),
    "no implementation": (lambda d: _first_row(d).pop("implementation"), "row 0: implementation is missing"),
    "peer as kernel": (lambda d: _peer(d).update(implementation="kernel"), "implementation: expected one of peer"),
    "kind": (lambda d: _first_row(d).update(kind="mine"), "kind: expected one of ours, variant, peer, got mine"),
    "not a number": (lambda d: _first_row(d).update(us="1.68"), 'us: expected float, got "1.68"'),
    "flag": (lambda d: _first_row(d).update(checked=1), "checked: expected bool, got 1"),
    "zero": (lambda d: _first_row(d).update(us=0), "us: expected a number above 0"),
    "median outside": (lambda d: _first_row(d).update(p10=1.7), "us: expected a median between p10 = 1.7"),
    "least": (lambda d: _first_row(d).update(min=1.7), "min, max: expected times around"),
    "rate": (lambda d: d["records"][1]["rows"][0].update(gbs=80.0), "(T=64): cute_kernels: gbs: expected 55.9"),
    "flops": (lambda d: _first_row(d).update(tflops=1.0), "cute_kernels: tflops: expected 0.000"),
    "few replays": (lambda d: _first_row(d).update(replays=14), "replays: expected an integer >= 15, got 14"),
    "one set": (lambda d: _first_row(d).update(sets=1), "sets: expected an integer >= 2"),
    "uneven sets": (lambda d: _first_row(d).update(sets=255), "calls_per_replay: expected a multiple of sets"),
    "warm": (
        lambda d: _first_row(d).update(sets=128),
        "cute_kernels: expected input sets beyond the cache, or each called once",
    ),
    "no versions": (lambda d: _peer(d).pop("versions"), "versions is missing"),
    "versions": (lambda d: _peer(d).update(versions={"vllm": 33}), "versions: expected text or null for vllm"),
    "host": (lambda d: _first_row(d)["host"].pop("p90"), "host: p90 is missing"),
    "apart without the kernel between": (
        lambda d: _first_row(d).update(us_apart=1.7),
        "us_apart: expected in all rows with between_us, else in none, got [True, False]",
    ),
    "apart in some rows": (
        lambda d: (_first_row(d).update(us_apart=1.7), d["records"][0].update(between_us=1.2)),
        "us_apart: expected in all rows with between_us",
    ),
    "apart in no time": (lambda d: _first_row(d).update(us_apart=0), "us_apart: expected a number above 0"),
    "ceiling": (lambda d: d["ceilings"][0].update(kind="speed"), "ceiling 0: kind: expected one of copy"),
    "yardstick": (lambda d: d["yardsticks"]["copy"].pop("source"), "yardstick copy: source is missing"),
    "rows no list": (lambda d: d["records"][0].update(rows={}), "rows: expected list"),
    "cell no object": (lambda d: d.update(records=[1]), "cell 0: expected an object, got int"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_record_is_refused(name: str) -> None:
    change, message = BROKEN[name]
    data = copy.deepcopy(GOOD)
    change(data)
    with pytest.raises(RecordError) as error:
        parse(data, "some file")
    assert message in str(error.value)
    assert str(error.value).startswith("some file: ")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("content", "message"), [(b"{", "not JSON"), (b"[]", "expected an object, got list"), (b"\xff\xfe", "not text")]
)
def test_a_file_that_is_no_record(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(content)
    with pytest.raises(RecordError, match=message):
        load(path)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"x.json: No such file or directory"):
        load(tmp_path / "x.json")


def test_names() -> None:
    assert gpu_folder("NVIDIA H200") == "h200"
    assert gpu_folder("NVIDIA GeForce RTX 4090") == "geforce-rtx-4090"
    assert case_of({"T": 4}) == "T=4"
    assert case_of({"T": 4, "case": "c4 T=4"}) == "c4 T=4"


def test_what_else_is_known_of_a_layer() -> None:
    found = parse(record([layer_cell("v4-flash c128a decode b1 ctx8192")], op=LAYER, left_out=[LEFT_OUT]))
    step = found.cells[0].step
    assert step is not None
    assert step.kernels == (("products", 6.0, 40.5), ("attention", 5.0, 22.25))
    assert (step.launches, step.gaps_us, step.floor_us, step.workspace_bytes) == (11.0, -0.25, 27.6, 1 << 26)
    assert [(c.case, c.bytes) for c in found.left_out] == [(LEFT_OUT["case"], 10)]
    assert parse(GOOD).cells[0].step is None
    assert parse(GOOD).left_out == ()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"launches": 12.0}, r"shape: launches: expected 11.0, those of all kinds, got 12.0"),
        ({"kernels": {"products": [11.0]}}, r"kernels: expected launches and microseconds of products, got \[11.0\]"),
        ({"kernels": [1]}, r"kernels: expected dict"),
        ({"floor_us": 0}, r"floor_us: expected a number above 0, got 0"),
        ({"eager_us": None}, r"eager_us: expected float, got null"),
        ({"peak_bytes": 1.5}, r"peak_bytes: expected int, got 1.5"),
    ],
)
def test_a_layer_that_contradicts_itself_is_refused(change: dict[str, Any], message: str) -> None:
    broken = layer_cell("v4-flash c128a decode b1 ctx8192")
    broken["shape"] |= change
    with pytest.raises(RecordError, match=message):
        parse(record([broken], op=LAYER))


def test_a_case_is_measured_or_left_out() -> None:
    both = record([layer_cell(LEFT_OUT["case"])], op=LAYER, left_out=[LEFT_OUT])
    with pytest.raises(RecordError, match="records: expected different cases"):
        parse(both)


# ---- what must not be shown ------------------------------------------------------------------------------------------


def test_rows_of_a_reference_or_a_wrong_result_are_rejected() -> None:
    cells = [cell(t, 10**6, 5.0, {"vllm-triton": 6.0}, variants={"ours rows=2": 5.5}) for t in (1, 2, 3, 4, 5)]
    cells[0]["rows"][0]["implementation"] = "reference"
    cells[1]["rows"][0]["checked"] = False
    cells[2]["rows"][2]["implementation"] = "reference"
    cells[3]["rows"][1]["checked"] = False
    good, bad = usable(parse(record(cells)))
    assert [c.case for c in good.cells] == ["T=4", "T=5"], "a peer's result may differ"
    assert bad == [
        "T=1: cute_kernels ran its reference implementation, not a kernel",
        "T=2: cute_kernels wrote a wrong result",
        "T=3: ours rows=2 ran its reference implementation, not a kernel",
    ]


def test_collect_takes_what_lies_in_its_place(tmp_path: Path) -> None:
    synthetic.write(tmp_path, GOOD)
    synthetic.write(tmp_path, GOOD, "b200/quantize_and_insert_k_cache.json")
    synthetic.write(tmp_path, {**GOOD, "partial": True, "gpu": "NVIDIA L4"}, "l4/quantize_and_insert_k_cache.json")
    synthetic.write(tmp_path, {**GOOD, "schema": 0}, "h200/old.json")
    reference = copy.deepcopy(GOOD)
    reference["gpu"] = "NVIDIA A100"
    for line in reference["records"]:
        line["rows"][0]["implementation"] = "reference"
    synthetic.write(tmp_path, reference, "a100/quantize_and_insert_k_cache.json")
    book = collect(tmp_path / "perf/results")
    assert [(gpu, [r.op for r in records]) for gpu, records in book.gpus()] == [(synthetic.GPU, [synthetic.INSERT])]
    text = json.dumps(book.rejected)
    assert len(book.rejected) == 5
    assert text.count("ran its reference implementation") == 2
    for part in ("belongs at h200/", "taken with --quick or --rows", "h200/old.json: schema: expected 1, got 0"):
        assert part in text
