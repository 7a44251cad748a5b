# SPDX-License-Identifier: Apache-2.0
"""What a record of a benchmark holds, read strictly: a record that lacks a fact, or contradicts itself, is refused.

A record is one JSON file: one op on one GPU, `perf/results/<gpu>/<op>.json`. It carries the machine and the versions,
the ceilings measured in the same run, and one cell per shape; a cell has one row per candidate.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

SCHEMA = 1
"""Version of the record format."""

LEAST_REPLAYS = 15

ABSENT = ("cannot be imported", "ImportError", "ModuleNotFoundError")
"""What the reason of a peer begins with that was not there; in older records peers had to be there, with
the error."""

T = TypeVar("T")


class RecordError(ValueError):
    """A file that is no record of this schema, in one line."""


@dataclass(frozen=True)
class Host:
    """Host time of an eager call, microseconds."""

    us: float
    p10: float
    p90: float
    calls: int


@dataclass(frozen=True)
class Row:
    """One candidate's times, microseconds. percent: of the ceiling that binds the cell. apart: what a call takes that
    does not follow another one; None in records older than it."""

    name: str
    kind: str
    implementation: str
    us: float
    p10: float
    p90: float
    least: float
    most: float
    gbs: float
    tflops: float
    percent: float | None
    replays: int
    sets: int
    calls_per_replay: int
    checked: bool
    versions: Mapping[str, str | None]
    host: Host | None
    apart: float | None = None


@dataclass(frozen=True)
class Skipped:
    """A candidate that was not timed, and why."""

    name: str
    kind: str
    reason: str


@dataclass(frozen=True)
class LayerLaunches:
    """What a call of a layer launches, as in LayerStep."""

    launches: float
    gaps_us: float
    kernels: tuple[tuple[str, float, float], ...]


@dataclass(frozen=True)
class LayerStep:
    """A call of a layer, or of all layers of a model, as `perf.layer` saw it. Times in microseconds.

    launches          kernels, copies and fills
    gaps_us           time in which none of them ran
    kernels           (kind, launches, time that they add), in turn
    eager_host_us     host time of an eager call until all is queued
    eager_us          time of an eager call until all is done
    metadata_us       time until the metadata of a step are there
    metadata_host_us  host time of that until all is queued; None in records older than it
    floor_us          of what no such layer can do without
    ops_floor_us      sum of the floors of the ops that ran
    peak_bytes        that a call allocates at most
    workspace_bytes   that the layers keep between calls
    peer              launches, gaps and kernels of the fastest peer, None without one
    """

    launches: float
    gaps_us: float
    kernels: tuple[tuple[str, float, float], ...]
    eager_host_us: float
    eager_us: float
    metadata_us: float
    floor_us: float
    ops_floor_us: float
    peak_bytes: int
    workspace_bytes: int
    metadata_host_us: float | None = None
    peer: LayerLaunches | None = None


@dataclass(frozen=True)
class LeftOut:
    """A case that the GPU's memory does not hold, and how many bytes it would take."""

    case: str
    reason: str
    bytes: int


@dataclass(frozen=True)
class Cell:
    """One op at one shape. `bound`: the ceiling that binds it, None where none is known.

    group    name of cells that the report also sums up together
    padded   share of the FLOPs that a kernel does beyond the op's, to fill up its tiles
    step     what else was found out about a layer
    """

    op: str
    case: str
    rows_of_input: int
    bytes: int
    flops: int
    products: str | None
    tensors: int
    bound: str | None
    rows: tuple[Row, ...]
    skipped: tuple[Skipped, ...]
    group: str | None = None
    padded: float | None = None
    step: LayerStep | None = None

    @property
    def ours(self) -> Row:
        return self.rows[0]

    def of_kind(self, kind: str) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.kind == kind)

    @property
    def best_peer(self) -> Row | None:
        """The fastest peer, even one whose result differs from ours: the bar is not lowered by that."""
        return min(self.of_kind("peer"), key=lambda row: row.us, default=None)

    @property
    def absent(self) -> tuple[str, ...]:
        """Peers that could not be imported: without them the fastest one says nothing."""
        return tuple(s.name for s in self.skipped if s.kind == "peer" and s.reason.startswith(ABSENT))

    @property
    def best_peer_apart(self) -> Row | None:
        """The same of calls that do not follow each other; None where they were not timed."""
        if self.ours.apart is None:
            return None
        timed = [row for row in self.of_kind("peer") if row.apart is not None]
        return min(timed, key=lambda row: row.apart or 0.0, default=None)

    @property
    def gain(self) -> float | None:
        """How many times as fast as the best peer, back to back or apart, whichever is less; None without a peer, and
        where one was absent."""
        best, apart = self.best_peer, self.best_peer_apart
        if best is None or self.absent:
            return None
        gains = [best.us / self.ours.us]
        if apart is not None and apart.apart is not None and self.ours.apart is not None:
            gains.append(apart.apart / self.ours.apart)
        return min(gains)

    @property
    def rejection(self) -> str | None:
        """Why this cell must not be used, or None."""
        for row in self.rows:
            if row.kind != "peer" and row.implementation != "kernel":
                return f"{row.name} ran its {row.implementation} implementation, not a kernel"
            if row.kind != "peer" and not row.checked:
                return f"{row.name} wrote a wrong result"
        return None


@dataclass(frozen=True)
class Ceiling:
    """What the GPU reached in the same run. kind: what it is a ceiling of; value in `unit`."""

    name: str
    kind: str
    unit: str
    value: float
    us: float
    p10: float
    p90: float


@dataclass(frozen=True)
class Yardstick:
    """What percentages refer to: stated for this GPU once and for all, or measured in this run."""

    value: float
    source: str


@dataclass(frozen=True)
class Conditions:
    """The GPU during a run: least, median and largest of some samples."""

    samples: int
    sm_mhz: tuple[float, ...]
    memory_mhz: tuple[float, ...]
    power_w: tuple[float, ...]
    celsius: tuple[float, ...]


@dataclass(frozen=True)
class Record:
    """One op on one GPU. `partial`: it does not have all shapes. `cold_bytes`: what input sets had to exceed."""

    path: Path | None
    op: str
    gpu: str
    cpu: str | None
    driver: str | None
    torch: str
    dsl: str | None
    tvm_ffi: str | None
    python: str
    commit: str | None
    date: str
    partial: bool
    cold_bytes: float
    ceilings: tuple[Ceiling, ...]
    missing_ceilings: tuple[Skipped, ...]
    yardsticks: Mapping[str, Yardstick]
    cells: tuple[Cell, ...]
    left_out: tuple[LeftOut, ...] = ()
    conditions: Conditions | None = None


def gpu_folder(gpu: str) -> str:
    """ "NVIDIA H200" -> "h200": the folder below perf/results."""
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower().removeprefix("nvidia")).strip("-")


def case_of(shape: Mapping[str, Any]) -> str:
    """The name of a cell among its op's."""
    return str(shape["case"]) if "case" in shape else f"T={shape['T']}"


# ---- reading ---------------------------------------------------------------------------------------------------------


class _Reader:
    """Takes typed fields out of a JSON object, and complains about the ones nobody took."""

    def __init__(self, data: Any, where: str) -> None:
        if not isinstance(data, dict):
            raise RecordError(f"{where}: expected an object, got {type(data).__name__}")
        self.data, self.where, self.taken = data, where, set[str]()

    def take(self, key: str, *types: type) -> Any:
        self.taken.add(key)
        if key not in self.data:
            raise RecordError(f"{self.where}: {key} is missing")
        value = self.data[key]
        if type(value) not in types and not (float in types and type(value) is int):
            expected = " or ".join("null" if t is type(None) else t.__name__ for t in types)
            raise RecordError(f"{self.where}: {key}: expected {expected}, got {json.dumps(value)[:60]}")
        return value

    def optional(self, key: str, default: Any, *types: type) -> Any:
        return self.take(key, *types) if key in self.data else default

    def text(self, key: str) -> str:
        return str(self.take(key, str))

    def text_or_null(self, key: str) -> str | None:
        value: str | None = self.take(key, str, type(None))
        return value

    def number(self, key: str) -> float:
        value = float(self.take(key, float))
        self.require(value > 0, key, "a number above 0", value)
        return value

    def count(self, key: str, least: int = 0) -> int:
        value = int(self.take(key, int))
        self.require(value >= least, key, f"an integer >= {least}", value)
        return value

    def one_of(self, key: str, *allowed: str | None) -> Any:
        value = self.take(key, str, type(None))
        self.require(value in allowed, key, f"one of {', '.join(map(str, allowed))}", value)
        return value

    def each(self, key: str, name: Callable[[int], str], read: Callable[[_Reader], T]) -> tuple[T, ...]:
        items = self.take(key, list)
        return tuple(_complete(item, f"{self.where}: {name(i)}", read) for i, item in enumerate(items))

    def require(self, condition: bool, key: str, expected: str, got: Any) -> None:
        if not condition:
            raise RecordError(f"{self.where}: {key}: expected {expected}, got {got}")


def _complete(data: Any, where: str, read: Callable[[_Reader], T]) -> T:
    reader = _Reader(data, where)
    value = read(reader)
    unknown = sorted(set(reader.data) - reader.taken)
    if unknown:
        raise RecordError(f"{where}: unknown fields: {', '.join(unknown)}")
    return value


def _times(r: _Reader) -> tuple[float, float, float]:
    us, p10, p90 = r.number("us"), r.number("p10"), r.number("p90")
    r.require(p10 <= us <= p90, "us", f"a median between p10 = {p10} and p90 = {p90}", us)
    return us, p10, p90


def _host(r: _Reader) -> Host:
    return Host(*_times(r), r.count("calls", 1))


def _kind(r: _Reader) -> str:
    kind: str = r.one_of("kind", "ours", "variant", "peer")
    return kind


def _row(r: _Reader) -> Row | Skipped:
    name, kind = r.text("name"), _kind(r)
    if "skipped" in r.data:
        return Skipped(name, kind, r.text("skipped"))
    allowed = ("peer",) if kind == "peer" else ("kernel", "reference")
    implementation = r.one_of("implementation", *allowed)
    us, p10, p90 = _times(r)
    least, most = r.number("min"), r.number("max")
    r.require(least <= p10 and p90 <= most, "min, max", "times around p10 and p90", (least, most))
    gbs, tflops = float(r.take("gbs", float)), float(r.take("tflops", float))
    percent = r.take("percent", float, type(None))
    counts = r.count("replays", LEAST_REPLAYS), r.count("sets", 2), r.count("calls_per_replay", 2)
    r.require(counts[2] % counts[1] == 0, "calls_per_replay", f"a multiple of sets = {counts[1]}", counts[2])
    checked = bool(r.take("checked", bool))
    versions = dict(r.take("versions", dict)) if kind == "peer" else {}
    for package, version in versions.items():
        r.require(version is None or isinstance(version, str), "versions", f"text or null for {package}", version)
    host = _complete(r.take("host", dict), f"{r.where}: host", _host) if "host" in r.data else None
    apart = r.number("us_apart") if "us_apart" in r.data else None
    times = us, p10, p90, least, most
    return Row(name, kind, implementation, *times, gbs, tflops, percent, *counts, checked, versions, host, apart)


def _layer_step(shape: dict[str, Any], where: str) -> LayerStep | None:
    """What the shape says of a layer's step; older records, without kernels, say nothing."""
    if "kernels" not in shape:
        return None
    r = _Reader(shape, where)
    own = _launches(r)
    host, eager, metadata = (r.number(key) for key in ("eager_host_us", "eager_us", "metadata_us"))
    floor, ops_floor = r.number("floor_us"), r.number("ops_floor_us")
    sizes = r.count("peak_bytes"), r.count("workspace_bytes")
    metadata_host = r.number("metadata_host_us") if "metadata_host_us" in shape else None
    peer = _complete(shape["peer"], f"{where}: peer", _launches) if "peer" in shape else None
    return LayerStep(
        own.launches, own.gaps_us, own.kernels, host, eager, metadata, floor, ops_floor, *sizes, metadata_host, peer
    )


def _launches(r: _Reader) -> LayerLaunches:
    kernels = []
    for kind, found in r.take("kernels", dict).items():
        pair = isinstance(found, list) and len(found) == 2 and all(type(x) in (int, float) and x >= 0 for x in found)
        r.require(pair, "kernels", f"launches and microseconds of {kind}", found)
        kernels.append((kind, float(found[0]), float(found[1])))
    gaps = float(r.take("gaps_us", float))
    launches, counted = r.number("launches"), sum(count for _, count, _ in kernels)
    near = abs(launches - counted) <= 0.01 * (1 + len(kernels))
    r.require(near, "launches", f"{counted}, those of all kinds", launches)
    return LayerLaunches(launches, gaps, tuple(kernels))


def _left_out(r: _Reader) -> LeftOut:
    return LeftOut(r.text("case"), r.text("reason"), r.count("bytes", 1))


def _cell(r: _Reader) -> Cell:
    op, shape = r.text("op"), r.take("shape", dict)
    r.require(type(shape.get("T")) is int, "shape", "a field T, the number of rows", shape)
    r.where += f" ({case_of(shape)})"
    nbytes, flops = r.count("bytes", 1), r.count("flops")
    products = r.one_of("products", None, "bf16", "e4m3")
    tensors, bound = r.count("tensors", 1), r.one_of("bound", None, "copy", "bf16", "e4m3")
    read = r.each("rows", lambda i: f"row {i}", _row)
    rows = tuple(row for row in read if isinstance(row, Row))
    skipped = tuple(row for row in read if isinstance(row, Skipped))
    kinds = [row.kind for row in rows]
    r.require(kinds[:1] == ["ours"] and kinds.count("ours") == 1, "rows", "ours first, and once", kinds)
    names = [row.name for row in read]
    r.require(len(set(names)) == len(names), "rows", "different names", names)
    for row in rows:
        for key, rate, amount, digit in (
            ("gbs", row.gbs, nbytes / 1e3, 0.1),
            ("tflops", row.tflops, flops / 1e6, 0.001),
        ):
            expected = amount / row.us
            near = abs(rate - expected) <= max(digit, 0.01 * expected)
            r.require(near, f"{row.name}: {key}", f"{expected:.3f} from the cell's work and the time", rate)
    between = r.number("between_us") if "between_us" in r.data else None
    timed = [row.apart is not None for row in rows]
    r.require(
        timed == [between is not None] * len(rows), "us_apart", "in all rows with between_us, else in none", timed
    )
    group, padded = shape.get("group"), shape.get("padded")
    r.require(group is None or isinstance(group, str), "shape", "text as group", group)
    share = padded is None or (isinstance(padded, (int, float)) and 0 <= padded < 1)
    r.require(share, "shape", "a share as padded", padded)
    step = _layer_step(shape, f"{r.where}: shape")
    return Cell(
        op, case_of(shape), shape["T"], nbytes, flops, products, tensors, bound, rows, skipped, group, padded, step
    )


def _ceiling(r: _Reader) -> Ceiling | Skipped:
    name, kind = r.text("name"), r.one_of("kind", "copy", "read", "bf16", "e4m3 fast", "e4m3 full", "launch")
    if "skipped" in r.data:
        return Skipped(name, kind, r.text("skipped"))
    unit = r.one_of("unit", "GB/s", "TFLOPS", "us")
    return Ceiling(name, kind, unit, r.number("value"), *_times(r))


def _conditions(r: _Reader) -> Conditions:
    def spread(key: str) -> tuple[float, ...]:
        values = r.take(key, list)
        numbers = len(values) == 3 and all(type(v) in (int, float) for v in values)
        r.require(numbers and values == sorted(values), key, "least, median and largest", values)
        return tuple(float(v) for v in values)

    return Conditions(
        r.count("samples", 1), spread("sm_mhz"), spread("memory_mhz"), spread("power_w"), spread("celsius")
    )


def _yardstick(r: _Reader) -> Yardstick:
    return Yardstick(r.number("value"), r.one_of("source", "stated", "measured"))


def _record(r: _Reader, path: Path | None) -> Record:
    schema = r.optional("schema", None, int)
    r.require(schema == SCHEMA, "schema", str(SCHEMA), schema)
    op = r.text("op")
    gpu, torch, python = r.text("gpu"), r.text("torch"), r.text("python")
    cpu, driver, dsl, tvm_ffi = (r.text_or_null(key) for key in ("cpu", "driver", "dsl", "tvm_ffi"))
    commit, date = r.text_or_null("commit"), r.text("date")
    partial, cold_bytes = bool(r.take("partial", bool)), r.number("cold_bytes")
    ceilings = r.each("ceilings", lambda i: f"ceiling {i}", _ceiling)
    given = r.take("yardsticks", dict)
    yardsticks = {name: _complete(value, f"{r.where}: yardstick {name}", _yardstick) for name, value in given.items()}
    cells = r.each("records", lambda i: f"cell {i}", _cell)
    r.require(len(cells) > 0, "records", "a cell at least", 0)
    r.require(all(cell.op == op for cell in cells), "records", f"cells of {op}", sorted({c.op for c in cells}))
    left_out = r.each("left_out", lambda i: f"left out {i}", _left_out) if "left_out" in r.data else ()
    given = r.take("conditions", dict) if "conditions" in r.data else {}
    conditions = _complete(given, f"{r.where}: conditions", _conditions) if given else None
    cases = [cell.case for cell in cells] + [case.case for case in left_out]
    r.require(len(set(cases)) == len(cases), "records", "different cases", cases)
    for cell in cells:
        for row in cell.rows:
            cold = row.sets * cell.bytes >= cold_bytes or row.calls_per_replay == row.sets
            r.require(cold, f"{cell.case}: {row.name}", "input sets beyond the cache, or each called once", row.sets)
    return Record(
        path, op, gpu, cpu, driver, torch, dsl, tvm_ffi, python, commit, date, partial, cold_bytes,
        tuple(c for c in ceilings if isinstance(c, Ceiling)), tuple(c for c in ceilings if isinstance(c, Skipped)),
        yardsticks, cells, left_out, conditions,
    )  # fmt: skip


def parse(data: Any, where: str = "record", path: Path | None = None) -> Record:
    """The record in decoded JSON; RecordError, with `where` and what is wrong, if it is none."""
    return _complete(data, where, lambda r: _record(r, path))


def load(path: Path) -> Record:
    """The record in a file; RecordError if it cannot be read or is none."""
    try:
        data = json.loads(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text"
        raise RecordError(f"{path}: {reason}") from error
    except json.JSONDecodeError as error:
        raise RecordError(f"{path}: not JSON: {error}") from error
    return parse(data, str(path), path)


def files(path: Path) -> list[Path]:
    """The record files at `path`: itself, or all below it."""
    return sorted(path.rglob("*.json")) if path.is_dir() else [path]


def to_text(data: Mapping[str, Any]) -> str:
    """A record as its file holds it: a line per cell."""
    head = json.dumps({name: value for name, value in data.items() if name != "records"}, indent=1)
    cells = ",\n".join(f"  {json.dumps(cell)}" for cell in data["records"])
    return f'{head[:-2]},\n "records": [\n{cells}\n ]\n}}\n'


# ---- using -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Book:
    """Records that may be shown, and what was rejected on the way, one line each."""

    records: tuple[Record, ...]
    rejected: tuple[str, ...]

    def gpus(self) -> Iterator[tuple[str, Sequence[Record]]]:
        for gpu in sorted({record.gpu for record in self.records}):
            yield gpu, [record for record in self.records if record.gpu == gpu]


def collect(results: Path) -> Book:
    """All records below `results` (`<gpu>/<op>.json`) without the cells that must not be shown."""
    kept, rejected = [], []
    for path in files(results):
        name = path.relative_to(results).as_posix()
        try:
            record = load(path)
        except RecordError as error:
            rejected.append(f"{name}: {str(error).removeprefix(f'{path}: ')}")
            continue
        place = f"{gpu_folder(record.gpu)}/{record.op}.json"
        if name != place:
            rejected.append(f"{name}: a record of {record.op} on {record.gpu} belongs at {place}")
            continue
        if record.partial:
            rejected.append(f"{name}: taken with --quick or --rows")
            continue
        good, bad = usable(record)
        rejected += [f"{name}: {line}" for line in bad]
        if good.cells:
            kept.append(good)
    return Book(tuple(kept), tuple(rejected))


def usable(record: Record) -> tuple[Record, list[str]]:
    """The record without its rejected cells, and why they were rejected."""
    bad = [f"{cell.case}: {cell.rejection}" for cell in record.cells if cell.rejection]
    cells = tuple(cell for cell in record.cells if not cell.rejection)
    return replace(record, cells=cells), bad
