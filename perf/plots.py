# SPDX-License-Identifier: Apache-2.0
"""Roofline plots of the records, as PNG. Only drawing needs matplotlib.

What a picture shows is hashed, and the hash written into the PNG, so that a stale picture can be told without drawing.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perf.records import Cell, LayerLaunches, LayerStep, Record, gpu_folder
from perf.targets import LAYER_TARGETS_US, losses

OVERVIEW = "overview"
BARS = "{}_time"
"""Name of the picture that says where an op's time goes."""

DIGEST_KEY = "Source"

INK, MUTED, GRID = "#1f2328", "#6e7781", "#e4e7eb"
OURS, LOSING = "#0b62d6", "#cf222e"
PEERS = ("#e8830c", "#2f9e62", "#8250df", "#bf3989", "#57606a")
OPS = ("#0b62d6", "#e8830c", "#2f9e62", "#8250df", "#cf222e", "#0a9396", "#bf3989", "#9a6700", "#57606a")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")
_ROOF_LINE: dict[str, Any] = {"color": INK, "lw": 1.4, "zorder": 1}
_LAUNCH_LINE: dict[str, Any] = {"color": INK, "lw": 1.4, "ls": (0, (4, 2)), "zorder": 1}
_JOIN_LINE: dict[str, Any] = {"color": MUTED, "lw": 0.7, "alpha": 0.6, "zorder": 2}
PRODUCT_NAMES = {"bf16": "bf16 products", "e4m3": "e4m3 products"}

Look = tuple[str, str]
"""Color and marker."""


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


@dataclass(frozen=True)
class Bars:
    """A picture of where time goes: (case, microseconds in all, (what, microseconds) one after the other)."""

    name: str
    title: str
    bars: tuple[tuple[str, float, tuple[tuple[str, float], ...]], ...]

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps([self.title, self.bars]).encode()).hexdigest()[:32]

    def parts(self) -> list[str]:
        """What the bars are made of, in order of first appearance."""
        return list(dict.fromkeys(what for _, _, parts in self.bars for what, _ in parts))


def file_name(gpu: str, name: str) -> str:
    """Path of a picture below perf/plots."""
    return f"{gpu_folder(gpu)}/{name}.png"


def figures(gpu: str, records: Sequence[Record]) -> list[Figure | Bars]:
    """The pictures of one GPU: one of all ops without peers, one per op, and where time goes where that is known."""
    everything: list[Point] = []
    found: list[Figure] = []
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
    overview = Figure(file_name(gpu, OVERVIEW), title, tuple(everything), _roofs(latest), products)
    return [overview, *found, *(bars for record in records if (bars := _bars(gpu, record)).bars)]


def _bars(gpu: str, record: Record) -> Bars:
    """Time by kind of kernel, and gaps. Of a graph's time, which the profile's parts do not add up to exactly. The
    fastest peer's below ours, in the cells that have a target."""
    bars = []
    for cell in record.cells:
        if cell.step is not None:
            bars.append((cell.case, cell.ours.us, _bar(cell.step)))
            best, peer = cell.best_peer, cell.step.peer
            if best is not None and peer is not None and cell.case in LAYER_TARGETS_US:
                bars.append(("peers", best.us, _bar(peer)))
    return Bars(file_name(gpu, BARS.format(record.op)), f"{record.op} on {gpu}: where time goes", tuple(bars))


def _bar(found: LayerStep | LayerLaunches) -> tuple[tuple[str, float], ...]:
    return (*((kind, us) for kind, _, us in found.kernels), ("gaps", max(found.gaps_us, 0.0)))


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


def digest_of(path: Path) -> str:
    """The hash that `draw` wrote into a PNG, or nothing."""
    data = path.read_bytes()
    at = 8
    while at + 8 <= len(data):
        size, kind = struct.unpack(">I4s", data[at : at + 8])
        key, _, value = data[at + 8 : at + 8 + size].partition(b"\0")
        if kind == b"tEXt" and key == DIGEST_KEY.encode():
            return value.decode("latin-1")
        at += 12 + size
    return ""


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
    "axes.grid.which": "major",
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


def draw(wanted: Sequence[Figure | Bars], folder: Path) -> list[Path]:
    """Draw every figure below `folder`; pictures of the same GPUs that nobody wants any more are removed."""
    import matplotlib

    written = []
    with matplotlib.rc_context(_STYLE):
        for figure in wanted:
            path = folder / figure.name
            path.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(figure, Bars):
                image = _draw_bars(figure)
            else:
                image = _draw_overview(figure) if path.stem == OVERVIEW else _draw_op(figure)
            image.savefig(path, dpi=130, facecolor="white")
            _shrink(path, figure.digest)
            written.append(path)
    for old in set(folder.rglob("*.png")) - set(written):
        old.unlink()
    return written


def _shrink(path: Path, digest: str) -> None:
    """Rewrite a picture with a palette, a third of its size, and the hash of what it shows."""
    from PIL import Image, PngImagePlugin  # matplotlib brings it

    text = PngImagePlugin.PngInfo()
    text.add_text(DIGEST_KEY, digest)
    with Image.open(path) as full:
        small = full.convert("RGB").quantize(64, dither=Image.Dither.NONE)
    small.save(path, optimize=True, pnginfo=text)


def _draw_op(figure: Figure) -> Any:
    cases = len({p.case for p in figure.points})
    image, (left, right) = _new(figure, 11.5, max(4.4, 1.7 + 0.3 * cases), (1.15, 1))
    look = {name: (PEERS[(i - 1) % len(PEERS)], MARKERS[i % len(MARKERS)]) for i, name in enumerate(figure.names())}
    look[figure.names()[0]] = OURS, MARKERS[0]
    draw_roofline = _products_roofline if figure.products else _bytes_roofline
    draw_roofline(left, figure, figure.points, [look[p.name] for p in figure.points])
    _shares(right, figure, look)
    _legend(image, figure, look, 5)
    return image


def _draw_overview(figure: Figure) -> Any:
    ops = dict.fromkeys(p.op for p in figure.points)
    look = {op: (OPS[i % len(OPS)], MARKERS[i % len(MARKERS)]) for i, op in enumerate(ops)}
    moving = [p for p in figure.points if not p.flops]
    computing = [p for p in figure.points if p.flops]
    panels = [(f, points) for f, points in ((_bytes_roofline, moving), (_products_roofline, computing)) if points]
    image, axes = _new(figure, 5.5 + 3.0 * len(panels), 5.0, [1] * len(panels))
    for panel, (draw_roofline, points) in zip(axes, panels, strict=True):
        draw_roofline(panel, figure, points, [look[p.op] for p in points])
    _legend(image, figure, look, 2 + len(panels))
    return image


def _draw_bars(figure: Bars) -> Any:
    """A bar per case, as long as the graph takes, cut up as the profile was."""
    image, (axes,) = _new(figure, 11.5, 1.7 + 0.24 * len(figure.bars), [1])
    names = figure.parts()
    colors = {what: MUTED if what == "gaps" else OPS[i % len(OPS)] for i, what in enumerate(names)}
    for place, (_, us, parts) in enumerate(figure.bars):
        whole, left = sum(part for _, part in parts), 0.0
        for what, part in parts:
            share = 100 * part / whole if whole else 0.0
            axes.barh(place, share, left=left, height=0.72, color=colors[what], zorder=2)
            left += share
        axes.annotate(f"{us:,.4g} µs", (100, place), textcoords="offset points", xytext=(4, -3), color=MUTED)
    axes.set_yticks(range(len(figure.bars)), [case for case, _, _ in figure.bars])
    axes.set_ylim(len(figure.bars) - 0.4, -0.6)
    axes.set_xlim(0, 100)
    axes.set_xlabel("% of the time from the first launch to the end of the last")
    axes.tick_params(axis="y", length=0)
    from matplotlib.patches import Patch

    handles = [Patch(color=colors[what], label=what) for what in names]
    image.legend(handles=handles, loc="outside lower center", ncols=min(5, len(handles)))
    return image


def _new(figure: Figure | Bars, width: float, height: float, ratios: Sequence[float]) -> tuple[Any, list[Any]]:
    from matplotlib.figure import Figure as Image

    image = Image(figsize=(width, height), layout="constrained")
    image.suptitle(figure.title, x=0.008, ha="left", fontsize=12, fontweight="bold")
    return image, list(image.subplots(1, len(ratios), width_ratios=list(ratios), squeeze=False)[0])


def _bytes_roofline(axes: Any, figure: Figure, points: Sequence[Point], looks: Sequence[Look]) -> None:
    """GB/s against the bytes of a call, under the copy rate and what the shortest launch leaves of it."""
    axes.set_title("Rate against size")
    axes.set_xlabel("bytes that must move per call")
    axes.set_ylabel("GB/s")
    low, high = _scatter(axes, points, looks, [(float(p.bytes), p.gbs) for p in points], 2.0, _bytes)
    copy, launch = figure.roof("copy"), figure.roof("launch")
    if copy is None:
        return
    knee = low if launch is None else min(max(low, copy * launch * 1e3), high)
    if launch is not None:
        axes.plot([low, knee], [low / launch / 1e3, knee / launch / 1e3], **_LAUNCH_LINE)
    _ceiling_line(axes, knee, high, copy, f"copy, {copy:,.0f} GB/s")


def _products_roofline(axes: Any, figure: Figure, points: Sequence[Point], looks: Sequence[Look]) -> None:
    """TFLOPS against FLOPs per byte, under the copy rate and the rates of matrix products."""
    axes.set_title("Rate of matrix products")
    axes.set_xlabel("FLOPs per byte that must move")
    axes.set_ylabel("TFLOPS")
    low, high = _scatter(axes, points, looks, [(p.flops / p.bytes, p.tflops) for p in points], 4.0, "{:g}".format)
    copy = figure.roof("copy")
    peaks = [(peak, label) for name, label in PRODUCT_NAMES.items() if (peak := figure.roof(name)) is not None]
    knees = [low if copy is None else min(max(low, peak * 1e3 / copy), high) for peak, _ in peaks]
    for knee, (peak, label) in zip(knees, peaks, strict=True):
        _ceiling_line(axes, knee, high, peak, f"{label}, {peak:,.0f} TFLOPS")
    if copy is not None:
        knee = max(knees, default=high)
        axes.plot([low, knee], [low * copy / 1e3, knee * copy / 1e3], **_ROOF_LINE)
        at = (low * knee) ** 0.5
        text = f"copy, {copy:,.0f} GB/s"
        where = {"textcoords": "offset points", "xytext": (6, -10), "ha": "left"}
        axes.annotate(text, (at, at * copy / 1e3), color=MUTED, **where)


def _scatter(
    axes: Any,
    points: Sequence[Point],
    looks: Sequence[Look],
    places: Sequence[tuple[float, float]],
    margin: float,
    label: Callable[[float], str],
) -> tuple[float, float]:
    """Log-log marks; a thin line joins the candidates of a cell. The ends of the x axis, a factor `margin` outside."""
    from matplotlib.ticker import FuncFormatter, NullFormatter

    axes.set(xscale="log", yscale="log")
    cells: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for p, place, look in zip(points, places, looks, strict=True):
        cells.setdefault((p.op, p.case), []).append(place)
        _mark(axes, p, place, look, ours=p.name == points[0].name)
    for group in cells.values():
        axes.plot(*zip(min(group), max(group), strict=True), **_JOIN_LINE)
    for axis, text in ((axes.xaxis, label), (axes.yaxis, "{:g}".format)):
        axis.set_major_formatter(FuncFormatter(lambda value, _, text=text: text(value)))
        axis.set_minor_formatter(NullFormatter())
    low, high = min(x for x, _ in places) / margin, max(x for x, _ in places) * margin
    axes.set_xlim(low, high)
    axes.set_ylim(min(y for _, y in places) / 1.7)
    return low, high


def _ceiling_line(axes: Any, start: float, end: float, value: float, text: str) -> None:
    """A horizontal part of the roof, named at its right end, with room above it."""
    axes.plot([start, end], [value, value], **_ROOF_LINE)
    axes.annotate(text, (end, value), color=MUTED, textcoords="offset points", xytext=(-2, 5), ha="right")
    axes.set_ylim(top=max(axes.get_ylim()[1], 2 * value))


def _mark(axes: Any, p: Point, place: tuple[float, float], look: Look, ours: bool) -> None:
    """Ours is filled; peers are open and lie above, so that neither hides the other."""
    color, marker = look
    fill, size, order = (color, 7.5, 3) if ours else ("none", 5.5, 4)
    axes.plot(*place, marker, ms=size, mew=1.3, mec=color, mfc=fill, zorder=order)
    if p.losing:
        axes.plot(*place, "o", ms=13, mfc="none", mec=LOSING, mew=1.4, zorder=5)


def _bytes(count: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:g} {unit}"
    return f"{count:g} B"


def _shares(axes: Any, figure: Figure, look: Mapping[str, Look]) -> None:
    """Per case, how much of what the ceilings allow each candidate reaches."""
    cases = list(dict.fromkeys(p.case for p in figure.points))
    for i, case in enumerate(cases):
        shares = [100 * p.attainable / p.us for p in figure.points if p.case == case]
        axes.plot([min(shares), max(shares)], [i, i], **_JOIN_LINE)
    for p in figure.points:
        place = 100 * p.attainable / p.us, float(cases.index(p.case))
        _mark(axes, p, place, look[p.name], ours=p.name == figure.names()[0])
    axes.axvline(100, **_ROOF_LINE)
    axes.set_yticks(range(len(cases)), cases)
    axes.set_ylim(len(cases) - 0.4, -0.6)
    axes.set_xlim(0, max(105.0, *(104 * p.attainable / p.us for p in figure.points)))
    axes.set_xlabel("% of what the ceilings and the shortest launch allow")
    axes.set_title("Share of the attainable, by case")
    axes.tick_params(axis="y", length=0)


def _legend(image: Any, figure: Figure, look: Mapping[str, Look], columns: int) -> None:
    from matplotlib.lines import Line2D

    handles = []
    for name, (color, marker) in look.items():
        filled = name not in figure.names()[1:]
        style = {"marker": marker, "ls": "", "mec": color, "mfc": color if filled else "none", "mew": 1.3, "ms": 7}
        handles.append(Line2D([], [], label=name, **style))
    launch = figure.roof("launch")
    if launch is not None and any(not p.flops for p in figure.points):
        handles.append(Line2D([], [], label=f"shortest launch, {launch:.2f} µs", **_LAUNCH_LINE))
    if any(p.losing for p in figure.points):
        label = "slower than a peer, or over its limit"
        handles.append(Line2D([], [], marker="o", ls="", mec=LOSING, mfc="none", mew=1.4, ms=11, label=label))
    image.legend(handles=handles, loc="outside lower center", ncols=min(columns, len(handles)))
