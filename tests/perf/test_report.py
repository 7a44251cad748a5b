# SPDX-License-Identifier: Apache-2.0
"""The report, the pages' numbers and the plots, from made-up records."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from perf import plots, report
from perf.records import Book, collect, parse
from perf.targets import BINDS, host_loss, limit_us, losses
from tests.perf import synthetic
from tests.perf.synthetic import GPU, LEFT_OUT, cell, layer_cell, record

ROOT = Path(__file__).parent.parent.parent
GATHER = "dequantize_and_gather_k_cache"
DECODE = "sparse_mla_decode"


def book(*cells: dict[str, Any], **changed: Any) -> Book:
    return Book((parse(record(list(cells), **changed)),), ())


def line(text: str, start: str) -> list[str]:
    """The cells of the table line that starts with the cells in `start`."""
    (found,) = [line for line in text.splitlines() if line.startswith(f"| {start} |")]
    return [part.strip() for part in found.strip("|").split("|")]


def section(text: str, title: str) -> str:
    return text.split(f"### {title}\n")[1].split("\n### ")[0].split("\n## ")[0]


# ---- limits and losing cells -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpu", "data", "limit", "reasons"),
    [
        # a stated target, whatever the peer does
        (GPU, cell(1024, 10**6, 2.7, {"vllm-triton": 8.6}), 2.6, ["over the stated target of 2.60 µs"]),
        (GPU, cell(1024, 10**6, 2.6, {"vllm-triton": 8.6}), 2.6, []),
        (GPU, cell(1024, 10**6, 2.5, {"vllm-triton": 2.4}), 2.6, ["slower than vllm-triton"]),
        (GPU, cell(1024, 10**6, 2.7), 2.6, ["over the stated target of 2.60 µs"]),
        # a GPU without targets, and a case without one: the best peer, 3 % or 0.2 us over it
        ("NVIDIA L4", cell(1024, 10**6, 2.7, {"vllm-triton": 8.6}), 8.858, []),
        (GPU, cell(8, 10**6, 2.0, {"vllm-triton": 2.0}), 2.2, []),
        (GPU, cell(8, 10**6, 2.1, {"vllm-triton": 2.0}), 2.2, ["slower than vllm-triton"]),
        (
            GPU,
            cell(8, 10**6, 2.21, {"a": 9.0, "vllm-triton": 2.0}),
            2.2,
            ["slower than vllm-triton", "over the margin of 2.20 µs"],
        ),
        (GPU, cell(8, 10**6, 103.0, {"vllm-triton": 100.0}), 103.0, ["slower than vllm-triton"]),
        (GPU, cell(8, 10**6, 103.0), None, []),
        (GPU, cell(8, 10**6, 103.0, {"vllm-triton": "not here"}), None, []),
    ],
)
def test_limits(gpu: str, data: dict[str, Any], limit: float | None, reasons: list[str]) -> None:
    (found,) = parse(record([data])).cells
    assert limit_us(gpu, found) == (None if limit is None else pytest.approx(limit))
    assert losses(gpu, found) == reasons


@pytest.mark.parametrize(
    ("tensors", "us", "loses"), [(5, 10.0, False), (5, 10.5, True), (1, 10.5, True), (6, 99, False)]
)
def test_host_limits(tensors: int, us: float, loses: bool) -> None:
    (found,) = parse(record([cell(1, 1616, 1.7, tensors=tensors, host=us)])).cells
    assert (host_loss(found, found.ours) is not None) == loses


# ---- the report ------------------------------------------------------------------------------------------------------


def test_the_report_holds_every_fact() -> None:
    cells = [
        cell(1, 1616, 1.68, {"vllm-triton": 4.38, "vllm-cutedsl": "ValueError: not here"}, host=6.9),
        cell(32768, 52_953_088, 14.8, {"vllm-triton": 110.58}, variants={"ours rows=2": 14.6, "ours rows=4": 17.0}),
    ]
    cells[1]["rows"][1]["checked"] = False
    text = report.render_report(book(*cells))
    assert line(text, synthetic.INSERT)[1:] == [
        "580.1", "2.11.0", "4.8.1", "0.1.15", "3.12.3", "A CPU", "abcdef123456", "2026-11-20", "", "", ""
    ]  # fmt: skip
    assert line(text, "copying, bytes read and written")[1:] == ["copy 8 GB", "4275", "GB/s", "4280"]
    fast = line(text, "e4m3 matrix product, fast accumulation")
    assert fast[1:] == ["e4m3 fast matmul 8192", "1480", "TFLOPS", "the largest of the run"]
    assert line(text, "shortest kernel in a graph")[1:] == ["add_ of 64 floats", "1.17", "µs", ""]
    assert "* e4m3 full matmul 8192 was not measured: RuntimeError: not here" in text
    assert line(text, "T=1")[1:] == [
        "1.62 kB", "**1.68**", "1.66 to 1.70", "1", "0.0", "4.38", "2.61", "1.80", ""
    ]  # fmt: skip
    large = section(text, synthetic.INSERT).split("<details>")[0]
    assert line(large, "T=32768")[2:] == [
        "**14.80**", "14.65 to 14.95", "3578", "83.6", "110.6 †", "7.47", "15.00", ""
    ]  # fmt: skip
    assert "vllm-triton: vllm 0.33.0, triton 3.6.0." in text
    assert "* vllm-cutedsl was not timed: ValueError: not here" in text
    assert line(text.split("<details>")[1], "T=32768") == ["T=32768", "14.80", "14.60", "0.986", "`rows=2`"]
    assert "0 of 2 cells." in section(text, "Where we lose")
    host = line(text, "mutating op, 3 tensors")
    assert host[1:] == [synthetic.INSERT, "T=1", "6.90", "6.21 to 8.28", "10", ""]
    assert f"plots/h200/{synthetic.INSERT}.png" in text
    assert "Rejected" not in text


def test_losing_cells_are_listed() -> None:
    cells = [
        cell(1, 1616, 1.9, {"vllm-triton": 4.38}, host=11.0),
        cell(64, 103_424, 5.0, {"vllm-triton": 4.9}),
        cell(8192, 13_238_272, 5.0, {"vllm-triton": 31.0}),
        cell(99, 13_238_272, 5.0),
    ]
    text = report.render_report(book(*cells))
    lost = " ".join(section(text, "Where we lose").split())
    assert "2 of 4 cells." in lost
    assert "Cells without a peer: 1." in lost
    prefix = f"| {synthetic.INSERT} | T=1 | 1.90 | 4.38 vllm-triton | 2.31 | 1.80 |"
    assert f"{prefix} over the stated target of 1.80 µs |" in lost
    assert f"| {synthetic.INSERT} | T=64 | 5.00 | 4.90 vllm-triton | 0.98 | 5.10 | slower than vllm-triton |" in lost
    assert "* quantize_and_insert_k_cache, 3 tensors: an eager call costs the host 11.00 µs, over 10" in lost
    assert "T=8192" not in lost
    table = section(text, synthetic.INSERT)
    assert [line(table, f"T={t}")[-1] for t in (1, 64, 8192, 99)] == ["over limit", "slower", "", ""]


def test_matrix_products_have_their_own_ceiling() -> None:
    data = cell("b64", 40 * 10**6, 84.0, {"flash_mla": 90.0}, op=DECODE, flops=10**10, products="bf16")
    data["rows"][0]["percent"] = 15.1
    text = report.render_report(book(data, op=DECODE))
    assert line(text, "b64")[4:7] == ["476", "119.0", "15.1 (bf16)"]


def test_padding_and_groups_are_shown() -> None:
    cells = [cell(f"b{n}", 10**6, 10.0, {"flashmla": peer}, op=DECODE) for n, peer in ((1, 20.0), (2, 80.0), (3, 5.0))]
    for one in cells[:2]:
        one["shape"] |= {"group": "FlashMLA's shapes", "padded": 0.125}
    text = section(report.render_report(book(*cells, op=DECODE)), DECODE)
    assert line(text, "case")[5] == "% padding"
    assert [line(text, name)[5] for name in ("b1", "b3")] == ["12.5", ""]
    assert "\n\nFlashMLA's shapes (2): 4.000 times as fast in the geometric mean, 2.00 to 8.00.\n\n" in text
    cells[1]["rows"] = cells[1]["rows"][:1]
    text = report.render_report(book(*cells, op=DECODE))
    assert "geometric mean" not in text, "a mean of all cells but those without a peer means nothing"


def test_every_gpu_has_its_section_and_every_op_its_line(tmp_path: Path) -> None:
    for gpu, op in ((GPU, synthetic.INSERT), (GPU, GATHER), ("NVIDIA B200", GATHER)):
        folder = "h200" if gpu == GPU else "b200"
        synthetic.write(tmp_path, record([cell(8, 10**6, 2.0, op=op)], op=op, gpu=gpu), f"{folder}/{op}.json")
    found = collect(tmp_path / "perf/results")
    text = report.render_report(found)
    sections = [part for part in text.splitlines() if part.startswith("## ")]
    assert sections == ["## Every op", "## NVIDIA B200", "## NVIDIA H200"]
    numbers = report.render_numbers(found)
    assert line(numbers, "op")[2::5] == ["B200 µs", "H200 µs"]
    assert line(numbers, f"`{GATHER}`") == [f"`{GATHER}`", "T=8", *["2.00", "11.7", "none", "", ""] * 2]
    assert line(numbers, f"`{synthetic.INSERT}`")[1:] == ["T=8", *[""] * 5, "2.00", "11.7", "none", "", ""]


def test_a_gpu_with_few_ops_has_a_line_and_no_columns(tmp_path: Path) -> None:
    for number in range(5):
        op = f"op_{number}"
        synthetic.write(tmp_path, record([cell(8, 10**6, 2.0, op=op)], op=op), f"h200/{op}.json")
    one = record([cell(8, 10**6, 2.0, {"a": 3.0}, op=GATHER)], op=GATHER, gpu="NVIDIA B200")
    synthetic.write(tmp_path, one, f"b200/{GATHER}.json")
    every = report.render_report(collect(tmp_path / "perf/results")).split("\n## ")[1]
    assert line(every, "op")[2::5] == ["H200 µs"]
    assert f"| `{GATHER}` |" not in every
    told = "T=8 2.00 µs; % of ceiling 11.7; best peer 3.00 a; times as fast 1.50 (1.50 to 1.50)."
    assert f"On the B200, `{GATHER}`: {told}" in " ".join(every.split())
    readme = report.render_numbers(collect(tmp_path / "perf/results"))
    assert GATHER in report.README_OPS
    assert "op_0" not in readme


def test_rejected_rows_are_named_and_not_used() -> None:
    text = report.render_report(Book((), ("h200/x.json: T=1: cute_kernels ran its reference implementation",)))
    assert "No records yet." in text
    assert "## Rejected\n\n* h200/x.json: T=1: cute_kernels ran its reference" in text


# ---- the README ------------------------------------------------------------------------------------------------------


def test_numbers_of_the_readme() -> None:
    cells = [
        cell(1, 1616, 1.5, {"vllm-triton": 3.0}, host=6.9),
        cell(64, 103_424, 2.0, {"vllm-triton": 16.0}, host=6.7),
        cell(32768, 52_953_088, 14.8, {"vllm-triton": 59.2}),
    ]
    text = report.render_numbers(book(*cells))
    assert line(text, f"`{synthetic.INSERT}`")[1:] == [
        "T=32768", "14.80", "83.6", "59.20 vllm-triton", "4.00 (2.00 to 8.00)", "6.70"
    ]  # fmt: skip
    assert "none of 3 shapes with a peer is slower than it." in text
    cells[1] = cell(64, 103_424, 2.0, {"vllm-triton": 1.9})
    told = " ".join(report.render_numbers(book(*cells)).split())
    assert "1 of 3 shapes with a peer are slower than it, by however little" in told
    assert f"`{synthetic.INSERT}` 1 of 3 (0.95)." in told
    assert report.render_numbers(Book((), ())).endswith("No kernel has been measured yet.")


@pytest.mark.parametrize("error", ["ImportError", "ModuleNotFoundError"])
def test_no_ratio_is_stated_where_a_peer_was_absent(error: str) -> None:
    found = book(cell(1, 1616, 1.5, {"a-loop": 9.0, "vllm-triton": f"{error}: no module"}))
    assert line(report.render_numbers(found), f"`{synthetic.INSERT}`")[-2] == "measured without vllm-triton"
    assert line(section(report.render_report(found), synthetic.INSERT), "T=1")[7] == ""
    there = book(cell(1, 1616, 1.5, {"a-loop": 9.0, "vllm-triton": "NotImplementedError: no such shape"}))
    assert line(report.render_numbers(there), f"`{synthetic.INSERT}`")[-2] == "6.00 (6.00 to 6.00)"


def apart(one: dict[str, Any], *times: float) -> dict[str, Any]:
    """The cell with times of calls that do not follow each other, of all candidates in turn."""
    for row, us in zip(one["rows"], times, strict=True):
        row["us_apart"] = us
    return {**one, "between_us": 1.2}


def test_the_smaller_of_both_ratios_is_stated() -> None:
    cells = [
        apart(cell(1, 1616, 2.0, {"a": 4.0, "b": 3.0}), 3.0, 3.6, 3.9),  # 1.5 back to back, 1.2 apart
        apart(cell(2, 3232, 2.0, {"a": 4.0, "b": 5.0}), 2.1, 8.4, 8.6),  # 2.0 and 4.0
        apart(cell(3, 4848, 2.0, {"a": 2.1}), 3.0, 2.9),
    ]
    text = report.render_report(book(*cells))
    table = section(text, synthetic.INSERT)
    assert line(table, "T=1")[2:] == [
        "**2.00** / 3.00", "1.98 to 2.02", "1", "0.0", "4.00 / 3.60", "3.00 / 3.90", "1.20", "1.80", "over limit"
    ]  # fmt: skip
    assert [line(table, f"T={t}")[8] for t in (2, 3)] == ["2.00", "0.97"]
    assert line(table, "T=3")[-1] == "slower"
    lost = section(text, "Where we lose")
    assert f"| {synthetic.INSERT} | T=3 | 2.00 / 3.00 | 2.10 / 2.90 a | 0.97 | 2.30 | slower than a apart |" in lost
    numbers = line(report.render_numbers(book(*cells)), f"`{synthetic.INSERT}`")
    assert numbers[1:5] == ["T=3", "2.00 / 3.00", "0.1", "2.10 / 2.90 a"]
    assert numbers[5] == "1.32 (0.97 to 2.00)"


def test_what_binds_losing_cells_is_listed() -> None:
    lost = section(report.render_report(book(cell(8, 10**6, 2.1, {"vllm-triton": 2.0}))), "Where we lose")
    named = [line for line in lost.splitlines() if line.startswith("* ")]
    assert named[0].startswith(f"* {synthetic.INSERT}: memory")
    assert "](notes/kv_cache.md)" in lost
    assert len(named) == 1, "only what loses"
    assert "What binds" not in report.render_report(book(cell(8, 10**6, 1.9, {"vllm-triton": 2.0})))


def test_every_op_that_loses_in_the_records_says_what_binds_it() -> None:
    explained = {op for group in BINDS for op in group}
    for gpu, records in collect(ROOT / "perf/results").gpus():
        losing = {found.op for found, _ in report.losing_cells(gpu, records)}
        assert losing <= explained, gpu
    pages = {page for _, pages in BINDS.values() for page in pages}
    assert all((ROOT / f"perf/notes/{page}.md").is_file() for page in pages)


def test_conditions_stand_beside_the_machine() -> None:
    found = {"samples": 9, "sm_mhz": [1500, 1800, 1980], "memory_mhz": [2619] * 3, "power_w": [80, 500.4, 700]}
    text = report.render_report(book(cell(1, 1616, 1.7), conditions={**found, "celsius": [40, 50, 61]}))
    assert line(text, synthetic.INSERT)[9:] == ["1800 (1500 to 1980)", "500 (80 to 700)", "61"]


def test_no_share_of_a_ceiling_is_above_100() -> None:
    one = cell(1, 16_160_000, 1.7)
    assert one["rows"][0]["percent"] > 100
    assert line(section(report.render_report(book(one)), synthetic.INSERT), "T=1")[5] == ""


HEADLINE = f"# Title\n\n{report.HEADLINE_BEGIN}\nfirst\n{report.HEADLINE_END}\n"
README = f"{HEADLINE}\n{report.BEGIN}\nold\n{report.END}\n\nrest\n"


def test_numbers_are_put_between_the_markers() -> None:
    found = book(cell(1, 1616, 1.5))
    new = report.fill(README, found)
    texts = report.render_headline(found), report.render_numbers(found)
    assert new == README.replace("first", texts[0]).replace("old", texts[1])
    assert report.fill(new, found) == new


@pytest.mark.parametrize(
    "numbers", ["", report.BEGIN, f"{report.END}{report.BEGIN}", README + report.BEGIN, README + report.END]
)
def test_a_readme_without_its_markers_is_refused(numbers: str) -> None:
    readme = numbers if numbers.startswith("# Title") else HEADLINE + numbers
    with pytest.raises(ValueError, match=r"README.md: expected one"):
        report.fill(readme, book(cell(1, 1616, 1.5)))
    with pytest.raises(ValueError, match=r"README.md: expected one <!-- headline:begin -->"):
        report.fill(f"{report.BEGIN}{report.END}", book(cell(1, 1616, 1.5)))


# ---- docs/engines.md -------------------------------------------------------------------------------------------------


def engine_cell(case: str, ours: float, engine: float) -> dict[str, Any]:
    return cell(case, 10**6, ours, {"vllm-classes": engine}, op=report.ENGINES, flops=10**9, products="e4m3")


def test_gains_of_an_engines_layers() -> None:
    found = book(
        engine_cell("swa b1 ctx8192 tp1 inside", 10.0, 15.0),
        engine_cell("c4a b1 ctx8192 tp8 inside", 10.0, 24.0),
        engine_cell("swa b8 ctx8192 tp1 whole", 20.0, 22.0),
        engine_cell("swa prefill 2048 ctx8192 tp1 inside", 100.0, 130.0),
        engine_cell("swa prefill 2048 ctx65536 tp8 whole", 100.0, 140.0),
        engine_cell("c4a b3 ctx11810 tp4 whole between", 10.0, 30.0),
        op=report.ENGINES,
    )
    text = report.render_gain(found)
    assert line(text, "decode of 1, 8 behind 8192")[1:] == ["1, 8", "2", "1.90 (1.50 to 2.40)", "1.10 (1.10 to 1.10)"]
    assert line(text, "prefill of 2048 behind 8192")[1:] == ["1", "1", "1.30 (1.30 to 1.30)", ""]
    assert line(text, "prefill of 2048 behind 65536")[1:] == ["8", "1", "", "1.40 (1.40 to 1.40)"]
    assert line(text, "of both, drawn between these")[1:] == ["4", "1", "", "3.00 (3.00 to 3.00)"]
    page = f"before\n{report.GAIN_BEGIN}\nold\n{report.GAIN_END}\nbehind\n"
    assert report.fill_engines(page, found) == page.replace("old", text)


def test_a_page_of_engines_without_its_markers_or_steps_is_refused() -> None:
    with pytest.raises(ValueError, match=r"docs/engines.md: expected one <!-- gain:begin -->"):
        report.fill_engines("", book(cell(1, 1616, 1.5)))
    with pytest.raises(ValueError, match=r"engines: 'swa one' is no step"):
        report.render_gain(book(engine_cell("swa one", 10.0, 15.0), op=report.ENGINES))
    assert report.render_gain(book(cell(1, 1616, 1.5))) == "No layer of an engine has been measured yet."


# ---- files -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "README.md").write_text(README)
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/engines.md").write_text(f"# Engines\n\n{report.GAIN_BEGIN}\n{report.GAIN_END}\n\nrest\n")
    synthetic.write(tmp_path, record([cell(1, 1616, 1.9, {"vllm-triton": 4.38}), cell(64, 103_424, 2.0)]))
    decode = cell("b64", 40 * 10**6, 84.0, {"flash_mla": 90.0}, op=DECODE, flops=10**10, products="bf16")
    synthetic.write(tmp_path, record([decode], op=DECODE))
    return tmp_path


def collected(root: Path) -> Book:
    return collect(root / "perf/results")


def test_what_is_written_is_up_to_date_until_a_record_changes(root: Path) -> None:
    report.write(root, collected(root), pictures=False)
    missing = [f"perf/plots/h200/{name}.png" for name in ("overview", synthetic.INSERT, DECODE)]
    assert report.stale(root, collected(root)) == missing
    assert "No layer of an engine" in (root / "docs/engines.md").read_text()
    synthetic.write(root, record([cell(1, 1616, 1.8, {"vllm-triton": 4.38})]))
    assert report.stale(root, collected(root))[:2] == ["perf/REPORT.md", "README.md"]


def test_plots_are_drawn_with_the_hash_of_what_they_show(root: Path) -> None:
    pytest.importorskip("matplotlib")
    old = root / "perf/plots/h200/gone.png"
    old.parent.mkdir(parents=True)
    old.write_bytes(b"")
    written = report.write(root, collected(root))
    assert report.stale(root, collected(root)) == []
    assert not old.exists()
    drawn = [path for path in written if path.suffix == ".png"]
    assert len(drawn) == 3
    assert all(path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n") for path in drawn)
    synthetic.write(root, record([cell(1, 1616, 1.9, {"vllm-triton": 4.2}), cell(64, 103_424, 2.0)]))
    assert f"perf/plots/h200/{synthetic.INSERT}.png" in report.stale(root, collected(root))
    assert "perf/plots/h200/overview.png" not in report.stale(root, collected(root)), "it shows no peers"


def test_a_picture_without_ceilings_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    bare = record([cell(1, 1616, 1.9), cell(2, 3232, 1.9, op=synthetic.INSERT)], ceilings=[], yardsticks={})
    wanted = plots.figures(GPU, [parse(bare)])
    assert len(plots.draw(wanted, tmp_path)) == 2


def test_what_pictures_show() -> None:
    cells = [cell(1, 1616, 1.9, {"vllm-triton": 4.38}), cell(32768, 52_953_088, 14.8)]
    overview, one = plots.figures(GPU, [parse(record(cells))])
    assert (overview.name, one.name) == ("h200/overview.png", f"h200/{synthetic.INSERT}.png")
    assert [p.name for p in overview.points] == ["cute_kernels", "cute_kernels"]
    assert one.names() == ["cute_kernels", "vllm-triton"]
    assert [p.losing for p in one.points] == [True, False, False]
    launch, copy = one.points[0], one.points[2]
    assert launch.attainable == 1.17, "the shortest launch bounds a small call"
    assert copy.attainable == pytest.approx(52_953_088 / 4.28e6), "copying bounds a large one"
    products = cell("b64", 10**6, 84.0, op=DECODE, flops=79 * 10**9, products="bf16")
    figure = plots.figures(GPU, [parse(record([products], op=DECODE))])[1]
    assert figure.products
    assert figure.points[0].attainable == pytest.approx(100.0), "matrix products bound this one"
    assert plots.figures(GPU, []) == []


def test_the_hash_of_a_file_without_one(tmp_path: Path) -> None:
    path = tmp_path / "x.png"
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"\0\0\0\x03tEXta\0b" + b"crc.")
    assert plots.digest_of(path) == ""
    path.write_bytes(b"")
    assert plots.digest_of(path) == ""


# ---- layers ----------------------------------------------------------------------------------------------------------


def test_where_the_time_of_a_layer_goes(tmp_path: Path) -> None:
    case = "v4-flash c128a decode b1 ctx8192"
    data = record([layer_cell(case)], op="layer", left_out=[LEFT_OUT])
    made = Book((parse(data),), ())
    text = section(report.render_report(made), "layer")
    steps = text.split("The floor is what")[1]
    assert line(steps, case) == [
        case, "27.60", "29.10", "62.50", "11", "", "-0.25", "141.5", "130.0", "900.0", "", "0 B", "67.1 MB"
    ]  # fmt: skip
    assert "* v4-flash c4a decode b256 ctx1048576 was left out: its caches take 10 bytes" in text
    assert "![Where time goes](plots/h200/layer_time.png)" in steps
    readme = report.render_numbers(made)
    assert line(readme, "v4-flash c128a")[1] == "62.50"
    bars = [figure for figure in plots.figures(GPU, made.records) if isinstance(figure, plots.Bars)]
    assert [figure.name for figure in bars] == ["h200/layer_time.png"]
    assert bars[0].bars == ((case, 62.5, (("products", 40.5), ("attention", 22.25), ("gaps", 0.0))),)
    assert bars[0].parts() == ["products", "attention", "gaps"]
    if plots.available():
        (written,) = plots.draw(bars, tmp_path)
        assert plots.digest_of(written) == bars[0].digest


def test_layers_beside_the_peers_and_their_targets() -> None:
    peer = "flashmla + deepgemm + vllm"
    cells = [
        layer_cell("v4-flash c128a decode b1 ctx8192", 62.5, {peer: 100.0, f"{peer}-streams": 93.75}),
        layer_cell("v4-flash c128a decode b8 ctx8192", 50.0, {peer: 40.0}),
        layer_cell("v4-flash c128a decode b64 ctx8192", 53.0, {peer: 60.0}),
        layer_cell("v4-flash swa decode b64 ctx8192", 59.0, {peer: "attention 0.1"}),
        layer_cell("v4-flash model decode b1 ctx8192", 3000.0),
    ]
    made = Book((parse(record(cells, op="layer")),), ())
    text = section(report.render_report(made), "layer")
    assert f"* {peer} was not timed: attention 0.1" in text
    targets, steps = text.split("Targets: 2 of 4 are met.")[1].split("The floor is what")
    assert line(targets, cells[0]["shape"]["case"])[1:] == [
        "62", "49", "62.50", "93.75", "1.50", "1.008 of must"
    ]  # fmt: skip
    assert line(targets, cells[2]["shape"]["case"])[-2:] == ["1.13", "not 1.2 times as fast as the peers"]
    assert line(targets, cells[3]["shape"]["case"])[1:] == ["60", "47", "59.00", "", "", "met"]
    assert line(targets, cells[4]["shape"]["case"])[-1] == "met"
    assert cells[1]["shape"]["case"] not in targets
    assert line(steps, cells[1]["shape"]["case"])[4:7] == ["11", "15", "-0.25"]
    assert line(steps, cells[1]["shape"]["case"])[10] == "30.00"
    readme = report.render_numbers(made)
    assert line(readme, "v4-flash c128a")[1:4] == [
        "62.50 / 93.75 (1.50)",
        "50.00 / 40.00 (0.80)",
        "53.00 / 60.00 (1.13)",
    ]
    assert line(readme, "v4-flash model")[1] == "3000.0"
    assert "1.11 in the geometric mean of 3 cells, 0.80 to 1.50. `model`" in " ".join(readme.split())
    headline = " ".join(report.render_headline(made).split())
    assert headline.startswith("On an NVIDIA H200 whole attention layers run 1.11 times as fast as the same layers")
    assert "the geometric mean of 3 measured steps, which range from 0.80 to 1.50." in headline
    more = [
        layer_cell("v4-flash c128a decode b8 ctx65536", 50.0, {peer: 40.0}),
        layer_cell("v4-flash swa prefill 2048 ctx65536", 90.0),
    ]
    readme = " ".join(report.render_numbers(Book((parse(record([*cells, *more], op="layer")),), ())).split())
    assert "of 4 cells, 0.80 to 1.50 (1 of them not shown). Run without peers: prefill 2048." in readme
    (bars,) = (figure for figure in plots.figures(GPU, made.records) if isinstance(figure, plots.Bars))
    assert [(case, us) for case, us, _ in bars.bars[:3]] == [
        ("v4-flash c128a decode b1 ctx8192", 62.5), ("peers", 93.75), ("v4-flash c128a decode b8 ctx8192", 50.0)
    ]  # fmt: skip
    assert bars.bars[1][2] == (("products", 60.0), ("gaps", 4.5))


def test_layers_of_older_records_have_no_such_picture() -> None:
    made = Book((parse(record([cell("v4-flash swa decode b1 ctx8192", 10**8, 50.0, op="layer")], op="layer")),), ())
    assert "Where time goes" not in report.render_report(made)
    assert not any(isinstance(figure, plots.Bars) for figure in plots.figures(GPU, made.records))


class Axes:
    """Keeps the lines that are drawn."""

    def __init__(self) -> None:
        self.lines: list[list[tuple[float, float]]] = []
        self.styles: list[dict[str, Any]] = []
        self.limits: dict[str, tuple[float, ...]] = {}
        self.xaxis = self.yaxis = self

    def plot(self, xs: Any, ys: Any, *marker: str, **style: Any) -> None:
        self.lines.append(list(zip(*((x if isinstance(x, Sequence) else [x]) for x in (xs, ys)), strict=True)))
        self.styles.append(style)

    def set_xlim(self, *limits: float) -> None:
        self.limits["set_xlim"] = limits

    def set_ylim(self, *limits: float, **one: float) -> None:
        if limits:
            self.limits["set_ylim"] = limits

    def get_ylim(self) -> tuple[float, float]:
        return 0.0, 1.0

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **named: None


@pytest.mark.parametrize("launch", [None, 1.0, 2.0, 64.0])
@pytest.mark.parametrize("copy", [None, 2.0, 0.01])
def test_the_roof_over_rates(launch: float | None, copy: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """GB/s: bytes over the shortest launch, until that is the copy rate."""
    low, high = 1e3, 16e3
    monkeypatch.setattr(plots, "_scatter", lambda *args: (low, high))
    roofs = tuple((name, value) for name, value in (("launch", launch), ("copy", copy)) if value is not None)
    plots._bytes_roofline(axes := Axes(), plots.Figure("", "", (), roofs, False), (), ())
    if copy is None:
        assert axes.lines == []
        return
    *rise, flat = axes.lines
    assert (flat[1], flat[0][1]) == ((high, copy), copy)
    assert len(rise) == (launch is not None)
    assert rise == [] or (rise[0][0][0], rise[0][1][0]) == (low, flat[0][0])
    for x, y in [point for line in rise for point in line]:
        assert y == pytest.approx(x / (launch or 1) / 1e3)
    assert flat[0][0] == pytest.approx(min(max(low, copy * (launch or 0) * 1e3), high))


@pytest.mark.parametrize("copy", [None, 4e3, 1e3, 1e9, 1.0])
@pytest.mark.parametrize("products", [(), ("bf16",), ("bf16", "e4m3")])
def test_the_roof_over_products(copy: float | None, products: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """TFLOPS: what the copies of a byte's FLOPs allow, until that is the rate of products."""
    low, high = 10.0, 1000.0
    monkeypatch.setattr(plots, "_scatter", lambda *args: (low, high))
    rates = {"bf16": 800.0, "e4m3": 1600.0}
    roofs = (*((name, rates[name]) for name in products), *(() if copy is None else (("copy", copy),)))
    plots._products_roofline(axes := Axes(), plots.Figure("", "", (), roofs, True), (), ())
    flat, rise = axes.lines[: len(products)], axes.lines[len(products) :]
    knees = []
    for name, line in zip(products, flat, strict=True):
        knees.append(low if copy is None else min(max(low, rates[name] / copy * 1e3), high))
        assert line == [(pytest.approx(knees[-1]), rates[name]), (high, rates[name])]
    assert len(rise) == (copy is not None)
    for line in rise:
        assert [x for x, _ in line] == [low, pytest.approx(max(knees, default=high))]
        assert [y for _, y in line] == pytest.approx([x * (copy or 0) / 1e3 for x, _ in line])


@pytest.mark.parametrize(("ours", "loses"), [(2.9, False), (3.0, False), (3.1, True)])
def test_calls_apart_are_compared_with_the_best_ones(ours: float, loses: bool) -> None:
    one = cell(1, 1616, 1.0, {"a": 4.0, "b": 5.0})
    times = [ours, 3.5, 3.0]
    for row, us in zip(one["rows"], times, strict=True):
        row["us_apart"] = us
    (known,) = parse(record([{**one, "between_us": 1.2}])).cells
    assert ("slower than b apart" in losses(GPU, known)) == loses


def fake_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    ticker = SimpleNamespace(FuncFormatter=lambda format: format, NullFormatter=lambda: None)
    monkeypatch.setitem(sys.modules, "matplotlib", SimpleNamespace(ticker=ticker))
    monkeypatch.setitem(sys.modules, "matplotlib.ticker", ticker)


def point(case: str, name: str, us: float, losing: bool = False) -> plots.Point:
    return plots.Point("op", case, name, 4000, 0, us, 2.0, losing)


def test_marks_of_a_cell_are_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_matplotlib(monkeypatch)
    points = [point("a", "ours", 1.0), point("a", "peer", 2.0, True), point("b", "ours", 3.0), point("a", "far", 4.0)]
    places = [(2.0, 30.0), (2.0, 10.0), (8.0, 7.0), (2.0, 20.0)]
    axes = Axes()
    assert plots._scatter(axes, points, [("red", "o")] * 4, places, 2.0, plots._bytes) == (1.0, 16.0)
    joins = [line for line in axes.lines if len(line) == 2]
    assert joins == [[(2.0, 10.0), (2.0, 30.0)], [(8.0, 7.0), (8.0, 7.0)]]
    assert axes.limits == {"set_xlim": (1.0, 16.0), "set_ylim": (7.0 / 1.7,)}
    marks = [(line[0], style["mfc"]) for line, style in zip(axes.lines, axes.styles, strict=True) if len(line) == 1]
    assert marks[:2] == [(places[0], "red"), (places[1], "none")], "ours is filled"
    assert marks[2] == (places[1], "none"), "a ring around what loses"
    assert [place for place, _ in marks] == [places[0], places[1], places[1], places[2], places[3]]


def test_shares_of_the_attainable() -> None:
    points = (point("a", "ours", 2.0), point("a", "peer", 4.0), point("b", "ours", 1.0))
    look = {"ours": ("red", "o"), "peer": ("blue", "s")}
    plots._shares(axes := Axes(), plots.Figure("", "", points, (), False), look)
    assert axes.lines[:2] == [[(50.0, 0), (100.0, 0)], [(200.0, 1), (200.0, 1)]]
    assert [line[0] for line in axes.lines[2:]] == [(100.0, 0.0), (50.0, 0.0), (200.0, 1.0)]
    assert axes.limits == {"set_ylim": (1.6, -0.6), "set_xlim": (0, 208.0)}


@pytest.mark.parametrize(("count", "text"), [(999, "999 B"), (1000, "1 kB"), (1.5e6, "1.5 MB"), (1e9, "1 GB")])
def test_sizes(count: float, text: str) -> None:
    assert plots._bytes(count) == text
