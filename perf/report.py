# SPDX-License-Identifier: Apache-2.0
"""perf/REPORT.md, and the numbers of the README and of docs/engines.md, written from the records."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from perf import compiled, plots, report_compiled
from perf.compiled import Compiled
from perf.grid import BETWEEN
from perf.records import Book, Cell, Conditions, Record, Row
from perf.tables import table
from perf.targets import (
    BINDS,
    LAYER,
    LAYER_GAIN,
    LAYER_TARGETS_US,
    LAYERS,
    TARGETS_US,
    host_limit_us,
    host_loss,
    limit_us,
    losses,
)

BEGIN, END = "<!-- numbers:begin -->", "<!-- numbers:end -->"
HEADLINE_BEGIN, HEADLINE_END = "<!-- headline:begin -->", "<!-- headline:end -->"
GAIN_BEGIN, GAIN_END = "<!-- gain:begin -->", "<!-- gain:end -->"
README, ENGINES_PAGE, ENGINES = "README.md", "docs/engines.md", "engines"
README_OPS = (
    "bf16_gemm",
    "deepseek_v4_fp8_einsum",
    "dequantize_and_gather_k_cache",
    "fp8_gemm",
    "fused_compress_norm_rope_store",
    "fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert",
    "fused_inv_rope_fp8_quant",
    "mqa_logits",
    "paged_mqa_logits",
    "quantize_and_insert_k_cache",
    "score_top_k_decode",
    "score_top_k_prefill",
    "sparse_mla_decode",
    "sparse_mla_prefill",
    "sparse_mla_prefill_paged",
    "top_k_per_row_decode",
    "top_k_per_row_prefill",
)
"""Ops that have a line in the README: those that most of a layer's time goes to. The report has a line for each op."""
KINDS: dict[str, tuple[str, str]] = {
    "copy": ("copying, bytes read and written", "copy"),
    "read": ("reading", ""),
    "bf16": ("bf16 matrix product", "bf16"),
    "e4m3 fast": ("e4m3 matrix product, fast accumulation", "e4m3"),
    "e4m3 full": ("e4m3 matrix product, full accumulation", ""),
    "launch": ("shortest kernel in a graph", ""),
}
"""Kind of ceiling -> (what it is, the yardstick it stands behind)."""

METHOD = (
    "Times are medians of CUDA graph replays, in microseconds. A graph goes round input sets that together exceed "
    "three times the L2 cache, so inputs come from memory. After the slash: each call timed behind an unrelated short "
    "kernel, whose own time is subtracted. Without it a call that is launched as a dependent of the one before hides "
    "its start behind that one. "
    '"Times as fast" is the smaller of the two ratios, each to the peer that is fastest in it. Records without such '
    "times were taken back to back only. "
    "Candidates take turns replay by replay on the same inputs, "
    "and before anything is timed their results are compared with the reference; † marks a peer whose result differs. "
    'Where a peer could not be imported there is no "times as fast". '
    'Bytes are the fewest that the op must move. "% of ceiling" is the share of the ceiling that binds the cell, '
    "copying unless another is named; it is left out where an older record counts bytes that need not move. "
    f"Cells named {BETWEEN} are drawn with a fixed seed from between those that kernels are tuned for. "
    "A cell whose time was taken with a reference implementation is rejected."
)


def fmt_us(us: float) -> str:
    return f"{us:.2f}" if us < 99.995 else f"{us:.1f}"


def fmt_bytes(count: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} B"


def _wrap(text: str, indent: str = "") -> list[str]:
    """Lines of 120 columns, all but the first one indented."""
    return textwrap.wrap(text, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def fmt_times(row: Row) -> str:
    """Back to back, and apart where that was timed."""
    return fmt_us(row.us) + ("" if row.apart is None else f" / {fmt_us(row.apart)}")


def _percent(cell: Cell) -> str:
    """Our share of the ceiling that binds; copying goes without saying. Above 100 the bytes are counted wrongly."""
    if cell.ours.percent is None or cell.ours.percent > 100:
        return ""
    return f"{cell.ours.percent:.1f}" + ("" if cell.bound == "copy" else f" ({cell.bound})")


# ---- the report ------------------------------------------------------------------------------------------------------


def render_report(book: Book, kernels: Compiled | None = None) -> str:
    """The text of perf/REPORT.md. kernels: those that nobody has run."""
    lines = [
        "# Measurements",
        "",
        "Written by `python -m perf report` from the records in perf/results.",
        "",
        *_wrap(METHOD),
    ]
    if not book.records:
        lines += ["", "No records yet."]
    else:
        lines += ["", "## Every op", "", *_ops(list(book.gpus()))]
    for gpu, records in book.gpus():
        lines += ["", f"## {gpu}", "", *_machines(records), "", "### Ceilings", "", *_ceilings(records)]
        lines += ["", "### Where we lose", "", *_losing(gpu, records)]
        lines += ["", "### Host time of an eager call", "", *_host(records)]
        if any(record.op not in LAYERS for record in records):
            lines += ["", f"![Rates and ceilings](plots/{plots.file_name(gpu, plots.OVERVIEW)})"]
        layers = _layers(records)[:-1]
        lines += ["", "### Whole layers", "", *layers] if layers else []
        for record in records:
            lines += ["", f"### {record.op}", "", *_op(gpu, record)]
    if kernels is not None:
        lines += ["", *report_compiled.render(kernels)]
    if book.rejected:
        lines += ["", "## Rejected", "", *(f"* {line}" for line in book.rejected)]
    return "\n".join(lines) + "\n"


def _machines(records: Sequence[Record]) -> list[str]:
    header = ["op", "driver", "torch", "CuTe DSL", "tvm-ffi", "Python", "CPU", "commit", "date"]
    rows = [
        [
            r.op,
            *(value or "" for value in (r.driver, r.torch, r.dsl, r.tvm_ffi, r.python, r.cpu, r.commit)),
            r.date[:10],
            *_conditions(r.conditions),
        ]
        for r in records
    ]
    return table([*header, "SM MHz", "W", "°C"], rows, (9, 10, 11))


def _conditions(found: Conditions | None) -> list[str]:
    """Median, and least to largest, of clock and power; the highest temperature."""
    if found is None:
        return ["", "", ""]
    spreads = [f"{mid:.0f} ({least:.0f} to {most:.0f})" for least, mid, most in (found.sm_mhz, found.power_w)]
    return [*spreads, f"{found.celsius[-1]:.0f}"]


def _ceilings(records: Sequence[Record]) -> list[str]:
    """The ceilings of all runs, one line each, and which of them percentages refer to."""
    lines = []
    for kind, (what, yardstick) in KINDS.items():
        sticks = [r.yardsticks[yardstick] for r in records if yardstick in r.yardsticks]
        stated = [f"{value:.0f}" for value in sorted({s.value for s in sticks if s.source == "stated"})]
        measured = ["the largest of the run"] * any(s.source == "measured" for s in sticks)
        reference = ", ".join([*stated, *measured])
        for name in dict.fromkeys(c.name for r in records for c in r.ceilings if c.kind == kind):
            same = [c for r in records for c in r.ceilings if c.name == name]
            unit = {"us": "µs"}.get(same[0].unit, same[0].unit)
            ends = [f"{f(c.value for c in same):.{2 if kind == 'launch' else 0}f}" for f in (min, max)]
            lines.append([what, name, " to ".join(dict.fromkeys(ends)), unit, reference])
    found = table(("ceiling", "measured with", "measured", "unit", "percentages refer to"), lines, (2,))
    missing = sorted({f"* {c.name} was not measured: {c.reason}" for r in records for c in r.missing_ceilings})
    return [*found, "", *missing] if missing else found


def losing_cells(gpu: str, records: Sequence[Record]) -> list[tuple[Cell, list[str]]]:
    """Cells slower than their best peer or over their limit, with the reasons."""
    found = []
    for record in records:
        for cell in record.cells:
            reasons = losses(gpu, cell)
            if reasons:
                found.append((cell, reasons))
    return found


def _losing(gpu: str, records: Sequence[Record]) -> list[str]:
    total = sum(len(record.cells) for record in records)
    lost = losing_cells(gpu, records)
    alone = sum(cell.best_peer is None for record in records for cell in record.cells)
    text = (
        f"{len(lost)} of {total} cells. A cell is listed if it is slower than its best peer by however little, or over "
        "its limit: a stated target, else the larger of 1.03 times the best peer and the best peer plus 0.2 µs."
    )
    lines = _wrap(text + (f" Cells without a peer: {alone}." if alone else ""))
    if lost:
        rows = []
        for cell, reasons in lost:
            best, limit, gain = cell.best_peer, limit_us(gpu, cell), cell.gain
            rows.append(
                [
                    cell.op,
                    cell.case,
                    fmt_times(cell.ours),
                    "" if best is None else f"{fmt_times(best)} {best.name}",
                    "" if gain is None else f"{gain:.2f}",
                    "" if limit is None else fmt_us(limit),
                    "; ".join(reasons),
                ]
            )
        header = ("op", "case", "ours µs", "best peer µs", "times as fast", "limit µs", "why")
        lines += ["", *table(header, rows, (2, 3, 4, 5)), "", *_binding({cell.op for cell, _ in lost})]
    slow = [(c, why) for c in _host_cells(records) if (why := host_loss(c, c.ours)) is not None]
    if slow:
        lines += ["", "Host time over its limit:", "", *(f"* {c.op}, {c.tensors} tensors: {why}" for c, why in slow)]
    return lines


def _binding(ops: Collection[str]) -> list[str]:
    """What binds the losing cells of these ops, an item a group."""
    lines = ["What binds them:", ""]
    for group, (what, pages) in BINDS.items():
        if named := ", ".join(op for op in group if op in ops):
            links = ", ".join(f"[{page}](notes/{page}.md)" for page in pages)
            lines += _wrap(f"* {named}: {what} ({links})", "  ")
    return lines


def _host_cells(records: Sequence[Record]) -> list[Cell]:
    """Per op and number of tensors the cell with the least work whose host time is known."""
    chosen: dict[tuple[str, int], Cell] = {}
    for record in records:
        for cell in sorted(record.cells, key=lambda cell: cell.bytes):
            if cell.ours.host is not None:
                chosen.setdefault((cell.op, cell.tensors), cell)
    return sorted(chosen.values(), key=lambda cell: (cell.tensors, cell.op))


def _host(records: Sequence[Record]) -> list[str]:
    cells = _host_cells(records)
    if not cells:
        return ["Not measured."]
    rows = []
    for cell in cells:
        host, limit = cell.ours.host, host_limit_us(cell)
        assert host is not None
        peers = [f"{fmt_us(row.host.us)} {row.name}" for row in cell.of_kind("peer") if row.host is not None]
        rows.append(
            [
                f"mutating op, {cell.tensors} tensors",
                cell.op,
                cell.case,
                fmt_us(host.us),
                f"{fmt_us(host.p10)} to {fmt_us(host.p90)}",
                "" if limit is None else f"{limit:.0f}",
                ", ".join(peers),
            ]
        )
    intro = (
        "CPU time per call of a long row of calls that waits for nothing, on the CPU named above: of the public "
        "function with all results given, in records without times apart of the registered op."
    )
    return [*_wrap(intro), "", *table(("class", "op", "case", "µs", "p10 to p90", "limit", "peers"), rows, (3, 4, 5))]


def _op(gpu: str, record: Record) -> list[str]:
    """One op: all cells with all peers, the picture, skipped candidates, and the fastest other configuration."""
    peers = list(dict.fromkeys(row.name for cell in record.cells for row in cell.of_kind("peer")))
    rows = []
    for cell in record.cells:
        gain, limit = cell.gain, limit_us(gpu, cell)
        by_name = {row.name: row for row in cell.of_kind("peer")}
        rows.append(
            [
                cell.case,
                fmt_bytes(cell.bytes),
                f"**{fmt_us(cell.ours.us)}**" + fmt_times(cell.ours).removeprefix(fmt_us(cell.ours.us)),
                f"{fmt_us(cell.ours.p10)} to {fmt_us(cell.ours.p90)}",
                f"{cell.ours.gbs:.0f}",
                *([f"{cell.ours.tflops:.1f}"] if _has_products(record) else []),
                *(["" if cell.padded is None else f"{100 * cell.padded:.1f}"] if _has_padding(record) else []),
                _percent(cell),
                *(_peer(by_name.get(name)) for name in peers),
                "" if gain is None else f"{gain:.2f}",
                "" if limit is None else fmt_us(limit),
                _verdict(gpu, cell),
            ]
        )
    header = [
        "case", "bytes", "ours µs", "p10 to p90", "GB/s", *(["TFLOPS"] if _has_products(record) else []),
        *(["% padding"] if _has_padding(record) else []),
        "% of ceiling", *(f"{name} µs" for name in peers), "times as fast", "limit µs", "",
    ]  # fmt: skip
    picture = f"plots/{plots.file_name(gpu, record.op)}"
    lines = [*table(header, rows, range(1, len(header) - 1)), *_groups(record), "", f"![{record.op}]({picture})"]
    for name in peers:
        found = next(row for cell in record.cells for row in cell.of_kind("peer") if row.name == name)
        stated = ", ".join(f"{package} {version or '(no version)'}" for package, version in found.versions.items())
        lines += ["", f"{name}: {stated}."]
    skipped = dict.fromkeys(
        f"* {s.name} was not timed: {s.reason}" for cell in record.cells for s in cell.skipped if s.kind == "peer"
    )
    lines += ["", *skipped] if skipped else []
    lines += ["", *(f"* {c.case} was left out: {c.reason}" for c in record.left_out)] if record.left_out else []
    return lines + _targets(gpu, record) + _steps(gpu, record) + _variants(record)


def _verdict(gpu: str, cell: Cell) -> str:
    limit = limit_us(gpu, cell)
    over = limit is not None and cell.ours.us > limit
    return ", ".join(["slower"] * _is_slower(gpu, cell) + ["over limit"] * over)


def _has_products(record: Record) -> bool:
    return any(cell.products for cell in record.cells)


def _has_padding(record: Record) -> bool:
    return any(cell.padded is not None for cell in record.cells)


def _groups(record: Record) -> list[str]:
    """What the groups of cells come to, where all of their cells have a peer."""
    lines = []
    for group in dict.fromkeys(cell.group for cell in record.cells if cell.group is not None):
        gains = [cell.gain for cell in record.cells if cell.group == group]
        known = [gain for gain in gains if gain is not None]
        if len(known) == len(gains):
            mean, ends = _geometric_mean(known), f"{min(known):.2f} to {max(known):.2f}"
            lines += ["", f"{group} ({len(gains)}): {mean:.3f} times as fast in the geometric mean, {ends}."]
    return lines


def _targets(gpu: str, record: Record) -> list[str]:
    """What layers are to reach, and whether they do."""
    cells = [cell for cell in record.cells if (gpu, record.op, cell.case) in TARGETS_US]
    if record.op != LAYER or not cells:
        return []
    rows, met = [], 0
    for cell in cells:
        must, stretch = LAYER_TARGETS_US[cell.case]
        best, gain = cell.best_peer, cell.gain
        misses = [f"{cell.ours.us / must:.3f} of must"] * (cell.ours.us > must)
        misses += [f"not {LAYER_GAIN} times as fast as the peers"] * (gain is not None and gain < LAYER_GAIN)
        met += not misses
        verdict = "; ".join(misses) or ("stretch" if cell.ours.us <= stretch else "met")
        times = fmt_us(cell.ours.us), "" if best is None else fmt_us(best.us), "" if gain is None else f"{gain:.2f}"
        rows.append([cell.case, f"{must:.0f}", f"{stretch:.0f}", *times, verdict])
    header = ("case", "must µs", "stretch µs", "ours µs", "peers µs", "times as fast", "")
    text = (
        f"Targets: {met} of {len(cells)} are met. A cell must take no longer than its first number, and be "
        f"{LAYER_GAIN} times as fast as the peers' chain where that was measured."
    )
    return ["", *_wrap(text), "", *table(header, rows, range(1, 6))]


def _steps(gpu: str, record: Record) -> list[str]:
    """What is known of layers beyond their times in a graph."""
    rows = []
    for cell in record.cells:
        step = cell.step
        if step is not None:
            times = step.floor_us, step.ops_floor_us, cell.ours.us
            eager = step.gaps_us, step.eager_us, step.eager_host_us, step.metadata_us
            host = "" if step.metadata_host_us is None else fmt_us(step.metadata_host_us)
            peer = "" if step.peer is None else f"{step.peer.launches:.4g}"
            sizes = fmt_bytes(step.peak_bytes), fmt_bytes(step.workspace_bytes)
            launches = f"{step.launches:.4g}"
            rows.append([cell.case, *map(fmt_us, times), launches, peer, *map(fmt_us, eager), host, *sizes])
    if not rows:
        return []
    header = (
        "case", "floor µs", "floor of its ops µs", "graph µs", "launches", "peer's", "gaps µs", "eager µs", "host µs",
        "metadata µs", "its host µs", "peak", "kept between calls",
    )  # fmt: skip
    picture = f"plots/{plots.file_name(gpu, plots.BARS.format(record.op))}"
    text = (
        "The floor is what no layer of the kind can do without: weights, the cache rows and keys that it reads, hidden "
        f"states in and out, and its products at the {record.cells[0].products} rate; that of its ops is the sum over "
        "the ops that ran. Launches and gaps are those of the graph, eager times those of a step that has run before, "
        "the host's until all is queued. Metadata are built once a step for all kinds of layers; what the GPU does of "
        "that is in the graphs of whole models, and in no others."
    )
    return ["", *_wrap(text), "", *table(header, rows, range(1, len(header))), "", f"![Where time goes]({picture})"]


def _peer(row: Row | None) -> str:
    return "" if row is None else fmt_times(row) + ("" if row.checked else " †")


def _variants(record: Record) -> list[str]:
    rows = []
    for cell in record.cells:
        best = min(cell.of_kind("variant"), key=lambda row: row.us, default=None)
        if best is not None:
            name = best.name.removeprefix("ours ")
            rows.append(
                [cell.case, fmt_us(cell.ours.us), fmt_us(best.us), f"{best.us / cell.ours.us:.3f}", f"`{name}`"]
            )
    if not rows:
        return []
    count = len({row.name for cell in record.cells for row in cell.of_kind("variant")})
    return [
        "",
        f"<details><summary>The fastest of {count} other configurations per case</summary>",
        "",
        *table(("case", "ours µs", "other µs", "other / ours", "configuration"), rows, (1, 2, 3)),
        "",
        "</details>",
    ]


# ---- the README ------------------------------------------------------------------------------------------------------

TERMS = (
    "Names of shapes: T rows or tokens, b requests, h heads, sq query rows and sk, skv or ctx keys; `c4_128+1024` is "
    f"decode over C4A's caches, 128 keys of the window and 1024 picked entries. One named {BETWEEN} was drawn from "
    "between those that kernels are tuned for. `% of ceiling`: of the fastest rate measured on that GPU for what binds "
    "the shape, copying or the matrix product in parentheses. `host µs`: what an eager call costs the host, of the "
    "cheapest shape."
)


def render_headline(book: Book) -> str:
    """What the README opens with: whole layers beside their peers, on the GPU with most of such cells."""
    gpu, found = _most_gains(book)
    if not found:
        return "No whole layer has been measured beside other kernels yet."
    text = (
        f"On an {gpu} whole attention layers run {_geometric_mean(found):.2f} times as fast as the same layers made "
        f"of FlashMLA's, DeepGEMM's and vLLM's kernels: the geometric mean of {len(found)} measured steps, which range "
        f"from {min(found):.2f} to {max(found):.2f}. The [numbers](#numbers) name single ops that a peer is faster at."
    )
    return "\n".join(_wrap(text))


def _most_gains(book: Book) -> tuple[str, list[float]]:
    """The GPU with most steps of whole layers beside peers, and how many times as fast ours are."""
    gains = {
        gpu: [gain for r in records if r.op == LAYER for cell in r.cells if (gain := cell.gain) is not None]
        for gpu, records in book.gpus()
    }
    return max(gains.items(), key=lambda item: len(item[1]), default=("", []))


def render_numbers(book: Book) -> str:
    """What stands between the README's markers: whole layers of the GPU that they were compared on, a line for the ops
    of README_OPS, and where a peer is faster."""
    lines = ["## Numbers", ""]
    if not book.records:
        return "\n".join([*lines, "No kernel has been measured yet."])
    compared, _ = _most_gains(book)
    gpus = sorted(book.gpus(), key=lambda of: of[0] != compared)  # that one first, the others as they are
    for gpu, records in gpus:
        if gpu == compared or not compared:
            lines += [f"{_facts(gpu, records)}.", "", *_layers(records)]
    lines += [*_wrap(TERMS), "", *_ops(gpus, README_OPS)]
    for gpu, records in gpus:
        lines += [*_wrap(f"{gpu if gpu == compared else _facts(gpu, records)}: {_slower(gpu, records)}"), ""]
    first, records = gpus[0]
    if any(record.op not in LAYERS for record in records):
        lines += [f"![Rates and ceilings, {_short(first)}](perf/plots/{plots.file_name(first, plots.OVERVIEW)})", ""]
    lines += _wrap("[perf/REPORT.md](perf/REPORT.md) has every op, all shapes, ceilings and the method.")
    return "\n".join(lines).rstrip("\n")


def _facts(gpu: str, records: Sequence[Record]) -> str:
    """With what and when a GPU's records were taken."""
    dates = sorted(record.date[:10] for record in records)
    dsl = ", ".join(sorted({f"CuTe DSL {record.dsl}" for record in records if record.dsl}))
    when = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
    return ", ".join(part for part in (gpu, dsl, when) if part)


def _slower(gpu: str, records: Sequence[Record]) -> str:
    """How many shapes of which ops are slower than a peer, most first."""
    total = sum(len(record.cells) for record in records)
    beside = {record.op: [cell for cell in record.cells if cell.best_peer is not None] for record in records}
    slower = {op: [cell for cell in cells if _is_slower(gpu, cell)] for op, cells in beside.items()}
    counts = {op: len(cells) for op, cells in slower.items() if cells}
    lost, compared = len(losing_cells(gpu, records)), sum(map(len, beside.values()))
    if not counts:
        found = f"none of {compared} shapes with a peer is slower than it"
    else:
        found = f"{sum(counts.values())} of {compared} shapes with a peer are slower than it, by however little"
        worst = {op: min(cell.gain or math.inf for cell in slower[op]) for op in counts}
        ops = sorted(counts, key=lambda op: (-counts[op], op))
        found += " (at worst so many times as fast): " + ", ".join(
            f"`{op}` {counts[op]} of {len(beside[op])} ({worst[op]:.2f})" for op in ops
        )
    over = lost - sum(counts.values())
    return f"{found}. Of all {total} shapes {over} more are over the limit set for them." if over else f"{found}."


def _is_slower(gpu: str, cell: Cell) -> bool:
    return any(reason.startswith("slower") for reason in losses(gpu, cell))


FEW = 1 / 4
"""A GPU with a smaller share of the ops that another one has gets lines below a table of ops, and no columns."""


def _ops(gpus: Sequence[tuple[str, Sequence[Record]]], only: Collection[str] | None = None) -> list[str]:
    """A line per op, of all or of some, with columns of each GPU that many ops were measured on."""
    found = {
        gpu: {r.op: r for r in records if r.op not in LAYERS and (only is None or r.op in only)}
        for gpu, records in gpus
    }
    found = {gpu: records for gpu, records in found.items() if records}
    if not found:
        return []
    most = max(map(len, found.values()))
    tabled = {gpu: records for gpu, records in found.items() if len(records) >= FEW * most}
    header = ["op", "largest shape"]
    for gpu in tabled:
        header += [f"{_short(gpu)} µs", "% of ceiling", "best peer µs", "times as fast, mean (range)", "host µs"]
    rows = []
    for op in sorted({op for records in tabled.values() for op in records}):
        several = [records.get(op) for records in tabled.values()]
        case = _largest(several)
        rows.append([f"`{op}`", case, *(text for r in several for text in _numbers_of(r, case))])
    text = (
        "Each shape of an op beside its fastest peer, on the same inputs in the same run. After the slash: each call "
        "timed behind an unrelated short kernel, of our GEMMs without use_pdl, which only costs there. The speed-up "
        "(times as fast) is the smaller of the two ratios. Where there is no slash, calls "
        "were timed back to back only, which flatters those that overlap with the one before:"
    )
    lines = [*_wrap(text), "", *table(header, rows, range(2, len(header))), ""]
    for gpu, records in found.items() if only is None else ():
        if gpu not in tabled:
            lines += [line for op in sorted(records) for line in _alone(gpu, records[op])] + [""]
    return lines


def _largest(records: Sequence[Record | None]) -> str:
    """Name of the case with the most bytes."""
    return max((cell for r in records if r is not None for cell in r.cells), key=lambda cell: cell.bytes).case


def _alone(gpu: str, record: Record) -> list[str]:
    """The same of one op, in words."""
    case = _largest([record])
    us, percent, peer, gains, host = _numbers_of(record, case)
    parts = [f"{case} {us} µs"] + [f"% of ceiling {percent}"] * bool(percent) + [f"best peer {peer}"] * (peer != "none")
    parts += [f"times as fast {gains}"] * bool(gains) + [f"host {host} µs"] * bool(host)
    return _wrap(f"On the {_short(gpu)}, `{record.op}`: {'; '.join(parts)}.")


def _short(gpu: str) -> str:
    """ "NVIDIA H100 80GB HBM3" -> "H100"."""
    return gpu.removeprefix("NVIDIA ").split()[0]


LAYER_STEPS = {
    **{f"decode b{b}": f"decode b{b} ctx8192" for b in (1, 8, 64, 256)},
    **{f"prefill {n}": f"prefill {n} ctx65536" for n in (2048, 4096)},
}
"""Column of the README's table of layers -> end of the names of its cells."""


def _layers(records: Sequence[Record]) -> list[str]:
    """Whole layers, a line per kind, and the steps of whole models."""
    cells = {cell.case: cell for record in records if record.op in LAYERS for cell in record.cells}
    if not cells:
        return []
    kinds = dict.fromkeys(" ".join(case.split()[:2]) for case in cells)
    shown = {
        step: {kind: cells[f"{kind} {end}"] for kind in kinds if f"{kind} {end}" in cells}
        for step, end in LAYER_STEPS.items()
    }
    rows = [
        [kind, *(_beside(of[kind]) if kind in of else "" for of in shown.values())]
        for kind in kinds
        if any(kind in of for of in shown.values())
    ]
    text = "Whole attention layers in a CUDA graph, µs per layer; contexts of 8192 tokens in decode, 65536 in prefill"
    gains = [gain for cell in cells.values() if (gain := cell.gain) is not None]
    if gains:
        text += (
            ". After the slash the same layers from FlashMLA's, DeepGEMM's and vLLM's kernels in the same run, and "
            f"how many times as fast ours are: {_geometric_mean(gains):.2f} in the geometric mean of {len(gains)} "
            f"cells, {min(gains):.2f} to {max(gains):.2f}"
        )
        hidden = len(gains) - sum(cell.gain is not None for of in shown.values() for cell in of.values())
        text += f" ({hidden} of them not shown)" * (hidden > 0)
        alone = [step for step, of in shown.items() if of and all(cell.best_peer is None for cell in of.values())]
        text += f". Run without peers: {', '.join(alone)}" * bool(alone)
    if any(kind.endswith(" model") for kind in kinds):
        text += ". `model`: a decode step of all layers, metadata included"
    return [*_wrap(text + ":"), "", *table(["layer", *LAYER_STEPS], rows, range(1, len(LAYER_STEPS) + 1)), ""]


def _beside(cell: Cell) -> str:
    """Ours, and the best peer where there is one."""
    best, gain = cell.best_peer, cell.gain
    return fmt_us(cell.ours.us) + ("" if best is None else f" / {fmt_us(best.us)} ({gain:.2f})")


def _numbers_of(record: Record | None, case: str) -> list[str]:
    """What the README says of an op on one GPU; times of one case."""
    if record is None:
        return [""] * 5
    cell = next((cell for cell in record.cells if cell.case == case), None)
    gains = [cell.gain for cell in record.cells if cell.gain is not None]
    absent = sorted({name for cell in record.cells for name in cell.absent})
    host = [c.ours.host.us for c in record.cells if c.ours.host is not None]
    spread = ""
    if gains:
        spread = f"{_geometric_mean(gains):.2f} ({min(gains):.2f} to {max(gains):.2f})"
    elif absent:
        spread = f"measured without {', '.join(absent)}"
    best = None if cell is None else cell.best_peer
    return [
        "" if cell is None else fmt_times(cell.ours),
        "" if cell is None else _percent(cell),
        ("" if cell is None else "none") if best is None else f"{fmt_times(best)} {best.name}",
        spread,
        fmt_us(min(host)) if host else "",
    ]


def fill(readme: str, book: Book) -> str:
    """The README with what the records say between its markers. ValueError if it does not have each marker once, in
    order."""
    found = _insert(README, readme, HEADLINE_BEGIN, HEADLINE_END, render_headline(book))
    return _insert(README, found, BEGIN, END, render_numbers(book))


def _insert(page: str, text: str, begin: str, end: str, new: str) -> str:
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ValueError(f"{page}: expected one {begin} and one {end} after it")
    before, rest = text.split(begin)
    return f"{before}{begin}\n{new}\n{end}{rest.split(end)[1]}"


# ---- docs/engines.md -------------------------------------------------------------------------------------------------

_ENGINE_CASE = re.compile(r"\w+ (?P<what>prefill |b)(?P<rows>\d+) ctx(?P<context>\d+) tp(?P<ranks>\d+) (?P<part>\w+)")


def fill_engines(page: str, book: Book) -> str:
    """docs/engines.md, likewise."""
    return _insert(ENGINES_PAGE, page, GAIN_BEGIN, GAIN_END, render_gain(book))


def render_gain(book: Book) -> str:
    """A table of how many times as fast an engine's layers are, decode and prefill apart: between its own linears, and
    whole steps. Of the GPU with most such cells."""
    of_gpus = [record.cells for _, records in book.gpus() for record in records if record.op == ENGINES]
    gains: dict[str, dict[str, list[float]]] = {}
    steps: dict[str, dict[str, dict[str, None]]] = {}
    ranks: dict[str, set[int]] = {}
    for cell in max(of_gpus, key=len, default=()):
        match = _ENGINE_CASE.match(cell.case)
        if match is None:
            raise ValueError(f"{ENGINES}: {cell.case!r} is no step of an engine's layers")
        is_between = BETWEEN in cell.case.split()
        kind = BETWEEN if is_between else "decode" if match["what"] == "b" else f"prefill {match['ranks']}"
        steps.setdefault(kind, {}).setdefault(match["context"], {})[match["rows"]] = None
        ranks.setdefault(kind, set()).add(int(match["ranks"]))
        if cell.gain is not None:
            gains.setdefault(kind, {}).setdefault(match["part"], []).append(cell.gain)
    rows = []
    for kind in sorted(gains, key=lambda kind: (kind == BETWEEN, kind)):
        of_parts = [gains[kind].get(part, []) for part in ("inside", "whole")]
        step = "; ".join(f"{', '.join(numbers)} behind {context}" for context, numbers in steps[kind].items())
        rows.append(
            [
                "of both, drawn between these" if kind == BETWEEN else f"{kind.split()[0]} of {step}",
                ", ".join(map(str, sorted(ranks[kind]))),
                str(max(map(len, of_parts))),
                *(f"{_geometric_mean(of):.2f} ({min(of):.2f} to {max(of):.2f})" if of else "" for of in of_parts),
            ]
        )
    if not rows:
        return "No layer of an engine has been measured yet."
    columns = ["steps", "ranks", "cells", "between the engine's own linears", "the whole step"]
    return "\n".join(table(columns, rows, (2,)))


# ---- files -----------------------------------------------------------------------------------------------------------


def stale(root: Path, book: Book) -> list[str]:
    """What under `root` differs from what `python -m perf report` would write, in words."""
    report = root / "perf/REPORT.md"
    found = []
    if not report.is_file() or report.read_text() != render_report(book, compiled.read(root)):
        found.append("perf/REPORT.md")
    for name, filled in PAGES.items():
        page = (root / name).read_text()
        if filled(page, book) != page:
            found.append(name)
    wanted = {figure.name: figure.digest for gpu, records in book.gpus() for figure in plots.figures(gpu, records)}
    folder = root / "perf/plots"
    there = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*.png")}
    drawn = {name: plots.digest_of(path) for name, path in there.items()}
    return found + [f"perf/plots/{n}" for n in sorted(wanted.keys() | drawn.keys()) if wanted.get(n) != drawn.get(n)]


def write(root: Path, book: Book, *, pictures: bool = True) -> list[Path]:
    """Write the report, the pages' numbers and the plots under `root`; the files that were written."""
    texts = {root / "perf/REPORT.md": render_report(book, compiled.read(root))}
    texts |= {root / name: filled((root / name).read_text(), book) for name, filled in PAGES.items()}
    written = []
    if pictures:
        wanted = [figure for gpu, records in book.gpus() for figure in plots.figures(gpu, records)]
        written = plots.draw(wanted, root / "perf/plots")
    for path, text in texts.items():
        path.write_text(text)
    return [*texts, *written]


PAGES: Mapping[str, Callable[[str, Book], str]] = {README: fill, ENGINES_PAGE: fill_engines}
"""Pages with numbers of the records -> the page with them."""
