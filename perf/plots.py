"""Roofline plots of the records, as PNG. Only drawing needs matplotlib.

What a picture shows is hashed, and the hash written into the PNG, so that a stale picture can be told without drawing.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perf.records import Cell, Record, gpu_folder
from perf.targets import losses

OVERVIEW = "overview"
DIGEST_KEY = "Source"

INK, MUTED, GRID = "#1f2328", "#6e7781", "#e4e7eb"
OURS, LOSING = "#0b62d6", "#cf222e"
PEERS = ("#e8830c", "#2f9e62", "#8250df", "#bf3989", "#57606a")
OPS = ("#0b62d6", "#e8830c", "#2f9e62", "#8250df", "#cf222e", "#0a9396", "#bf3989", "#9a6700", "#57606a")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")
PRODUCT_NAMES = {"bf16": "bf16 products", "e4m3": "e4m3 products"}


@dataclass(frozen=True)
class Point:
    """One candidate in one cell. attainable: the time that the binding ceiling or the shortest launch allows."""

    op: str
    case: str
    name: str
    bytes: int
    flops: int
    us: float
    attainable: float
    losing: bool

    @property
    def gbs(self) -> float:
        return self.bytes / self.us / 1e3

    @property
    def tflops(self) -> float:
        return self.flops / self.us / 1e6


@dataclass(frozen=True)
class Figure:
    """What one picture shows. roofs: copy in GB/s, bf16 and e4m3 in TFLOPS, launch in microseconds."""

    name: str
    title: str
    points: tuple[Point, ...]
    roofs: tuple[tuple[str, float], ...]
    products: bool

    @property
    def digest(self) -> str:
        shown = [self.title, [list(vars(p).values()) for p in self.points], self.roofs, self.products]
        return hashlib.sha256(json.dumps(shown).encode()).hexdigest()[:32]

    def roof(self, name: str) -> float | None:
        return dict(self.roofs).get(name)

    def names(self) -> list[str]:
        """Candidates, ours first."""
        return list(dict.fromkeys(p.name for p in self.points))


def file_name(gpu: str, name: str) -> str:
    """Path of a picture below perf/plots."""
    return f"{gpu_folder(gpu)}/{name}.png"


def figures(gpu: str, records: Sequence[Record]) -> list[Figure]:
    """The pictures of one GPU: one of all ops without peers, and one per op."""
    everything: list[Point] = []
    found = []
    for record in records:
        points = [p for cell in record.cells for p in _points(gpu, record, cell)]
        products = all(cell.products for cell in record.cells)
        found.append(
            Figure(file_name(gpu, record.op), f"{record.op} on {gpu}", tuple(points), _roofs(record), products)
        )
        everything += [p for p in points if p.name == record.cells[0].ours.name]
    if not records:
        return []
    # ceilings of the latest run stand for all
    latest = max(records, key=lambda record: record.date)
    products = any(figure.products for figure in found)
    title = f"cute_kernels on {gpu}"
    return [Figure(file_name(gpu, OVERVIEW), title, tuple(everything), _roofs(latest), products), *found]


def _roofs(record: Record) -> tuple[tuple[str, float], ...]:
    roofs = {name: stick.value for name, stick in sorted(record.yardsticks.items())}
    launch = [c.value for c in record.ceilings if c.kind == "launch"]
    return (*roofs.items(), *((("launch", launch[0]),) if launch else ()))


def _points(gpu: str, record: Record, cell: Cell) -> list[Point]:
    roofs = dict(_roofs(record))
    floors = [roofs.get("launch", 0.0)]
    if "copy" in roofs:
        floors.append(cell.bytes / roofs["copy"] / 1e3)
    if cell.products in roofs:
        floors.append(cell.flops / roofs[cell.products] / 1e6)
    flops = cell.flops if cell.products else 0
    losing = bool(losses(gpu, cell))
    rows = [cell.ours, *cell.of_kind("peer")]
    return [
        Point(cell.op, cell.case, r.name, cell.bytes, flops, r.us, max(floors), losing and r is cell.ours) for r in rows
    ]


# ---- the hash in a PNG -----------------------------------------------------------------------------------------------


def digest_of(path: Path) -> str | None:
    """The hash that `draw` wrote into a PNG, or None."""
    data = path.read_bytes()
    at = 8
    while at + 8 <= len(data):
        size, kind = struct.unpack(">I4s", data[at : at + 8])
        key, _, value = data[at + 8 : at + 8 + size].partition(b"\0")
        if kind == b"tEXt" and key == DIGEST_KEY.encode():
            return value.decode("latin-1")
        at += 12 + size
    return None


# ---- drawing ---------------------------------------------------------------------------------------------------------

_STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": GRID,
    "text.color": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "legend.frameon": False,
}


def available() -> bool:
    """Whether pictures can be drawn here."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return False
    return True


def draw(wanted: Sequence[Figure], folder: Path) -> list[Path]:
    """Draw every figure below `folder`; pictures of the same GPUs that nobody wants any more are removed."""
    import matplotlib

    written = []
    with matplotlib.rc_context(_STYLE):
        for figure in wanted:
            path = folder / figure.name
            path.parent.mkdir(parents=True, exist_ok=True)
            image = _draw_overview(figure) if path.stem == OVERVIEW else _draw_op(figure)
            image.savefig(path, dpi=130, facecolor="white", metadata={"Software": None, DIGEST_KEY: figure.digest})
            written.append(path)
    for old in set(folder.rglob("*.png")) - set(written):
        old.unlink()
    return written


def _new(width: float, height: float, ratios: Sequence[float]) -> tuple[Any, list[Any]]:
    from matplotlib.figure import Figure as Image

    image = Image(figsize=(width, height), layout="constrained")
    axes = image.subplots(1, len(ratios), width_ratios=list(ratios), squeeze=False)
    return image, list(axes[0])


def _draw_op(figure: Figure) -> Any:
    cases = len({p.case for p in figure.points})
    image, (left, right) = _new(11.5, max(4.2, 1.5 + 0.3 * cases), (1.15, 1))
    image.suptitle(figure.title, x=0.008, ha="left", fontsize=12, fontweight="bold")
    colors = {name: OURS if i == 0 else PEERS[(i - 1) % len(PEERS)] for i, name in enumerate(figure.names())}
    markers = {name: MARKERS[i % len(MARKERS)] for i, name in enumerate(figure.names())}
    _roofline(left, figure, figure.points, colors, markers, by="name")
    _shares(right, figure, colors, markers)
    _legend(image, figure, colors, markers)
    return image


def _draw_overview(figure: Figure) -> Any:
    ops = list(dict.fromkeys(p.op for p in figure.points))
    colors = {op: OPS[i % len(OPS)] for i, op in enumerate(ops)}
    markers = {op: MARKERS[i % len(MARKERS)] for i, op in enumerate(ops)}
    image, axes = _new(11.5 if figure.products else 8.2, 4.6, (1, 1) if figure.products else (1,))
    image.suptitle(figure.title, x=0.008, ha="left", fontsize=12, fontweight="bold")
    moving = [p for p in figure.points if not p.flops]
    _roofline(axes[0], figure, moving, colors, markers, by="op", products=False)
    if figure.products:
        _roofline(axes[1], figure, [p for p in figure.points if p.flops], colors, markers, by="op", products=True)
    _legend(image, figure, colors, markers)
    return image


def _roofline(
    axes: Any,
    figure: Figure,
    points: Sequence[Point],
    colors: dict[str, str],
    markers: dict[str, str],
    *,
    by: str,
    products: bool | None = None,
) -> None:
    """Rates under the roof: bytes against size, or FLOPs against FLOPs per byte for matrix products."""
    products = figure.products if products is None else products
    axes.set_xscale("log")
    axes.set_yscale("log")
    if not points:
        return

    def xy(p: Point) -> tuple[float, float]:
        return (p.flops / p.bytes, p.tflops) if products else (p.bytes, p.gbs)

    xs, ys = zip(*map(xy, points), strict=True)
    low, high = min(xs) / 1.8, max(xs) * 1.8
    tops = _product_roof(axes, figure, low, high) if products else _copy_roof(axes, figure, low, high)
    for first, second in _pairs(points):
        if second is not None:
            axes.plot(*zip(xy(first), xy(second), strict=True), color=MUTED, lw=0.6, alpha=0.6, zorder=2)
    for p in points:
        key = p.name if by == "name" else p.op
        ours = by == "op" or key == figure.names()[0]
        fill = colors[key] if ours else "white"
        style = {"ms": 6.5 if ours else 5.5, "mew": 1.3, "mec": colors[key], "mfc": fill, "zorder": 4 if ours else 3}
        axes.plot(*xy(p), markers[key], **style)
        if p.losing:
            axes.plot(*xy(p), "o", ms=12, mfc="none", mec=LOSING, mew=1.4, zorder=5)
    axes.set_xlim(low, high)
    axes.set_ylim(min(ys) / 1.7, max([*ys, *tops]) * 1.9)
    if products:
        axes.set_xlabel("FLOPs per byte that must move")
        axes.set_ylabel("TFLOPS")
    else:
        from matplotlib.ticker import FuncFormatter

        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _bytes(value)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.set_xlabel("bytes that must move per call")
        axes.set_ylabel("GB/s")
    axes.set_title("Rate")
    axes.grid(which="minor", visible=False)


def _pairs(points: Sequence[Point]) -> list[tuple[Point, Point | None]]:
    """(ours, slowest candidate) of each cell."""
    by_case: dict[tuple[str, str], list[Point]] = {}
    for p in points:
        by_case.setdefault((p.op, p.case), []).append(p)
    return [(group[0], max(group, key=lambda p: p.us) if len(group) > 1 else None) for group in by_case.values()]


def _bytes(count: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:g} {unit}"
    return f"{count:g} B"


def _copy_roof(axes: Any, figure: Figure, low: float, high: float) -> list[float]:
    copy, launch = figure.roof("copy"), figure.roof("launch")
    if copy is None:
        return []
    start = low
    if launch is not None:
        start = min(max(low, copy * launch * 1e3), high)
        axes.plot([low, start], [low / launch / 1e3, start / launch / 1e3], color=INK, lw=1.4, zorder=1)
        text = f"shortest launch, {launch:.2f} µs"
        if low < start:
            at = (low * start) ** 0.5
            axes.annotate(
                text, (at, at / launch / 1e3), xytext=(-4, 4), textcoords="offset points", ha="right", color=MUTED
            )
    if start < high:
        axes.plot([start, high], [copy, copy], color=INK, lw=1.4, zorder=1)
    axes.annotate(
        f"copy, {copy:,.0f} GB/s", (high, copy), xytext=(-2, 5), textcoords="offset points", ha="right", color=MUTED
    )
    return [copy]


def _product_roof(axes: Any, figure: Figure, low: float, high: float) -> list[float]:
    copy, tops = figure.roof("copy"), []
    for name, label in PRODUCT_NAMES.items():
        peak = figure.roof(name)
        if peak is None:
            continue
        tops.append(peak)
        knee = low if copy is None else min(max(low, peak * 1e3 / copy), high)
        axes.plot([knee, high], [peak, peak], color=INK, lw=1.4, zorder=1)
        axes.annotate(
            f"{label}, {peak:,.0f} TFLOPS",
            (high, peak),
            xytext=(-2, 4),
            textcoords="offset points",
            ha="right",
            color=MUTED,
        )
    if copy is not None:
        knee = min(high, max(tops, default=high * copy / 1e3) * 1e3 / copy)
        axes.plot([low, knee], [low * copy / 1e3, knee * copy / 1e3], color=INK, lw=1.4, zorder=1)
    return tops


def _shares(axes: Any, figure: Figure, colors: dict[str, str], markers: dict[str, str]) -> None:
    """Per case, how much of what the ceilings allow each candidate reaches."""
    cases = list(dict.fromkeys(p.case for p in sorted(figure.points, key=lambda p: p.bytes)))
    rows = {case: i for i, case in enumerate(cases)}
    for case, i in rows.items():
        shares = [100 * p.attainable / p.us for p in figure.points if p.case == case]
        axes.plot([min(shares), max(shares)], [i, i], color=MUTED, lw=0.8, alpha=0.6, zorder=2)
    for p in figure.points:
        ours = p.name == figure.names()[0]
        fill = colors[p.name] if ours else "white"
        at = 100 * p.attainable / p.us, rows[p.case]
        axes.plot(
            *at, markers[p.name], ms=7 if ours else 6, mew=1.3, mec=colors[p.name], mfc=fill, zorder=4 if ours else 3
        )
        if p.losing:
            axes.plot(*at, "o", ms=12, mfc="none", mec=LOSING, mew=1.4, zorder=5)
    axes.axvline(100, color=INK, lw=1.4, zorder=1)
    axes.set_yticks(list(rows.values()), list(rows))
    axes.set_ylim(len(cases) - 0.4, -0.6)
    axes.set_xlim(0, max(105.0, *(104 * p.attainable / p.us for p in figure.points)))
    axes.set_xlabel("% of what the ceilings and the shortest launch allow")
    axes.set_title("Share of the attainable, by case")
    axes.tick_params(axis="y", length=0)


def _legend(image: Any, figure: Figure, colors: dict[str, str], markers: dict[str, str]) -> None:
    from matplotlib.lines import Line2D

    handles = []
    for i, (name, color) in enumerate(colors.items()):
        fill = color if i == 0 or name not in figure.names() else "white"
        handles.append(Line2D([], [], marker=markers[name], ls="", mec=color, mfc=fill, mew=1.3, ms=6.5, label=name))
    if any(p.losing for p in figure.points):
        label = "slower than a peer, or over its limit"
        handles.append(Line2D([], [], marker="o", ls="", mec=LOSING, mfc="none", mew=1.4, ms=11, label=label))
    image.legend(handles=handles, loc="outside lower center", ncols=min(4, len(handles)))
