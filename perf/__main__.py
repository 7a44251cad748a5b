"""Command line of the benchmarks."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from perf import compressor, kv_cache
from perf.measure import environment

SWEEPS = {**compressor.SWEEPS, **kv_cache.SWEEPS}


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in text.split(","))


def _table(records: list[dict[str, Any]]) -> str:
    lines = [f"{'op, shape':53}{'what':42}{'us':>9}{'p10':>9}{'p90':>9}{'GB/s':>9}{'% copy':>8}  checked"]
    for record in records:
        shape = record["shape"]
        title = f"{record['op']} {shape.get('case', 'T=' + str(shape['T']))}"
        for r in record["rows"]:
            if "skipped" in r:
                lines.append(f"{title:53}{r['name']:42}skipped: {r['skipped']}")
                continue
            share = "" if r["percent_of_copy"] is None else f"{r['percent_of_copy']:.1f}"
            times = "".join(f"{r[c]:9.2f}" for c in ("us", "p10", "p90"))
            lines.append(f"{title:53}{r['name']:42}{times}{r['gbs']:9.0f}{share:>8}  {r['checked']}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m perf", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    sweep = commands.add_parser("sweep", help="time an op over its shapes")
    sweep.add_argument("--op", required=True, choices=sorted(SWEEPS))
    sweep.add_argument("--rows", type=_numbers, help="numbers of rows, separated by commas")
    sweep.add_argument(
        "--peers", action="store_true", help="time other projects' kernels beside ours, where importable"
    )
    sweep.add_argument("--variants", action="store_true", help="time the kernel's other configurations too")
    sweep.add_argument("--replays", type=int, default=21, help="graph replays per candidate, at least 15")
    sweep.add_argument("--json", type=Path, required=True, help="file the record goes to")
    options = parser.parse_args()
    if options.replays < 15:
        parser.error("--replays: expected at least 15")
    chosen = {} if options.rows is None else {"rows": options.rows}
    records = SWEEPS[options.op](peers=options.peers, variants=options.variants, replays=options.replays, **chosen)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps({**environment(), "records": records}, indent=1) + "\n")
    print(_table(records))


if __name__ == "__main__":
    main()
