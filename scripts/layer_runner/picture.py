# SPDX-License-Identifier: Apache-2.0
"""The picture of --html: for every layer, where its time and its bytes go. One file, without scripts or fonts."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from layer_runner.report import format_bytes
from layer_runner.run import LayerReport

STYLE = """
body { font: 14px/1.4 system-ui, sans-serif; margin: 2em auto; max-width: 70em; color: #222; }
table { border-collapse: collapse; width: 100%; margin-bottom: 1.5em; }
td, th { padding: 1px 8px; text-align: left; white-space: nowrap; }
td.number { text-align: right; font-variant-numeric: tabular-nums; }
td.bar { width: 45%; }
td.bar div { height: 12px; background: #3b76af; }
.bytes td.bar div { background: #c8803d; }
.fail { color: #b00; font-weight: bold; }
"""


def bars(title: str, kind: str, lines: Sequence[tuple[str, float, str]]) -> str:
    """A table of bars: (name, amount, the amount in words) each; the longest bar is the largest amount."""
    longest = max((amount for _, amount, _ in lines), default=0.0) or 1.0
    rows = "".join(
        f'<tr><td>{escape(name)}</td><td class="bar"><div style="width: {100 * amount / longest:.1f}%"></div></td>'
        f'<td class="number">{escape(words)}</td></tr>\n'
        for name, amount, words in lines
    )
    return f'<table class="{kind}"><tr><th colspan="3">{escape(title)}</th></tr>\n{rows}</table>\n'


def draw_layer(report: LayerReport, on_gpu: bool) -> str:
    parts = [f"<h2>layer {report.layer_index} ({report.kind})</h2>\n"]
    if on_gpu:
        for step in report.steps[-1:]:
            added = step.timeline.added()
            lines = [
                (launch.kind, us, f"{us:.2f} µs") for launch, us in zip(step.timeline.launches, added, strict=True)
            ]
            parts.append(bars(f"launches of a {step.name}: what each adds", "time", lines))
    else:
        times = [(row.op, row.seconds, f"{row.seconds * 1e3:.1f} ms") for row in report.rows]
        parts.append(bars("time on the CPU", "time", times))
    parts.append(bars("bytes", "bytes", [(row.op, row.bytes, format_bytes(row.bytes)) for row in report.rows]))
    for check in report.checks:
        word = '<span class="fail">FAIL</span>' if not check.passed else "PASS"
        parts.append(f"<div>{word} {escape(check.name)} ({escape(check.detail)})</div>\n")
    return "".join(parts)


def draw(introduction: Sequence[str], legend: Sequence[str], reports: Sequence[LayerReport], on_gpu: bool) -> str:
    """The page."""
    meta = f'<meta charset="utf-8"><title>DeepSeek-V4 attention layers</title><style>{STYLE}</style>'
    head = f'<!doctype html>\n<html lang="en"><head>{meta}</head><body>\n<h1>DeepSeek-V4 attention layers</h1>\n'
    intro = "".join(f"<div>{escape(line)}</div>\n" for line in introduction)
    words = "\n".join(legend)
    layers = "".join(draw_layer(report, on_gpu) for report in reports)
    return f"{head}{intro}<pre>{escape(words)}</pre>\n{layers}</body></html>\n"
