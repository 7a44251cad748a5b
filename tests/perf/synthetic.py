# SPDX-License-Identifier: Apache-2.0
"""Made-up records for the tests of what reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

GPU = "NVIDIA H200"
INSERT = "quantize_and_insert_k_cache"
COPY, BF16, E4M3 = 4280.0, 790.0, 1480.0


def row(name: str, us: float, nbytes: int, flops: int = 0, **changed: Any) -> dict[str, Any]:
    kind = "ours" if name == "cute_kernels" else "variant" if name.startswith("ours ") else "peer"
    line = {
        "name": name,
        "kind": kind,
        "implementation": "peer" if kind == "peer" else "kernel",
        "us": us,
        "p10": round(us * 0.99, 4),
        "p90": round(us * 1.01, 4),
        "min": round(us * 0.98, 4),
        "max": round(us * 1.1, 4),
        "gbs": round(nbytes / us / 1e3, 1),
        "tflops": round(flops / us / 1e6, 3),
        "percent": round(100 * nbytes / COPY / 1e3 / us, 1),
        "replays": 21,
        "sets": 256,
        "calls_per_replay": 256,
        "checked": True,
    }
    if kind == "peer":
        line["versions"] = {"vllm": "0.33.0", "triton": "3.6.0"}
    return {**line, **changed}


def cell(
    case: str | int,
    nbytes: int,
    ours: float,
    peers: dict[str, float | str] | None = None,
    *,
    op: str = INSERT,
    tensors: int = 3,
    host: float | None = None,
    flops: int = 0,
    products: str | None = None,
    variants: dict[str, float] | None = None,
) -> dict[str, Any]:
    """A cell: `case` is a name or a number of rows, `peers` name -> microseconds or the reason why it was skipped."""
    shape = {"T": case} if isinstance(case, int) else {"case": case, "T": 1024}
    mine = row("cute_kernels", ours, nbytes, flops)
    if host is not None:
        mine["host"] = {"us": host, "p10": round(host * 0.9, 3), "p90": round(host * 1.2, 3), "calls": 1800}
    rows = [mine]
    for name, us in {**(peers or {}), **(variants or {})}.items():
        if isinstance(us, str):
            rows.append({"name": name, "kind": "peer", "skipped": us})
        else:
            rows.append(row(name, us, nbytes, flops))
    work = {"bytes": nbytes, "flops": flops, "products": products, "tensors": tensors, "bound": products or "copy"}
    return {"op": op, "shape": shape, **work, "rows": rows}


def layer_cell(case: str, us: float = 62.5, peers: dict[str, float | str] | None = None) -> dict[str, Any]:
    """As `python -m perf layer` writes it, with `--peers` if there are any."""
    found = cell(case, 118_000_000, us, peers, op="layer", flops=10**9, products="e4m3")
    if any(not isinstance(us, str) for us in (peers or {}).values()):
        found["shape"]["peer"] = {"launches": 15.0, "gaps_us": 4.5, "kernels": {"products": [15.0, 60.0]}}
    if peers:
        found["shape"]["metadata_host_us"] = 30.0
    found["shape"] |= {
        "model": "v4-flash",
        "kind": "c128a",
        "tp": 1,
        "launches": 11.0,
        "gaps_us": -0.25,
        "kernels": {"products": [6.0, 40.5], "attention": [5.0, 22.25]},
        "eager_host_us": 130.0,
        "eager_us": 141.5,
        "metadata_us": 900.0,
        "floor_us": 27.6,
        "ops_floor_us": 29.1,
        "peak_bytes": 0,
        "workspace_bytes": 1 << 26,
        "bound_steps": 1,
    }
    return found


LEFT_OUT = {"case": "v4-flash c4a decode b256 ctx1048576", "reason": "its caches take 10 bytes", "bytes": 10}


def ceiling(name: str, kind: str, unit: str, value: float) -> dict[str, Any]:
    return {"name": name, "kind": kind, "unit": unit, "value": value, "us": 100.0, "p10": 99.0, "p90": 101.0}


def record(cells: list[dict[str, Any]], *, op: str = INSERT, **changed: Any) -> dict[str, Any]:
    data: dict[str, Any] = {
        "schema": 1,
        "op": op,
        "gpu": GPU,
        "cpu": "A CPU",
        "driver": "580.1",
        "torch": "2.11.0",
        "dsl": "4.8.1",
        "tvm_ffi": "0.1.15",
        "python": "3.12.3",
        "commit": "abcdef123456",
        "date": "2026-11-20T12:00:00+00:00",
        "partial": False,
        "cold_bytes": 188743680.0,
        "ceilings": [
            ceiling("copy 8 GB", "copy", "GB/s", 4275.0),
            ceiling("bf16 matmul 4096", "bf16", "TFLOPS", 799.0),
            ceiling("bf16 matmul 8192", "bf16", "TFLOPS", 783.0),
            ceiling("e4m3 fast matmul 8192", "e4m3 fast", "TFLOPS", E4M3),
            ceiling("add_ of 64 floats", "launch", "us", 1.17),
            {"name": "e4m3 full matmul 8192", "kind": "e4m3 full", "skipped": "RuntimeError: not here"},
        ],
        "yardsticks": {
            "copy": {"value": COPY, "source": "stated"},
            "bf16": {"value": BF16, "source": "stated"},
            "e4m3": {"value": E4M3, "source": "measured"},
        },
        "records": cells,
    }
    return {**data, **changed}


def write(root: Path, data: dict[str, Any], name: str | None = None) -> Path:
    """Store a record where it belongs under `root`, or at `name` below perf/results."""
    path = root / "perf/results" / (name or f"h200/{data['op']}.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data))
    return path
