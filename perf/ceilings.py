# SPDX-License-Identifier: Apache-2.0
"""What a GPU can reach at most, measured beside the ops: copying, matrix products, and the shortest kernel."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from perf.measure import Call, number_of_sets, time_graphs

STATED: Mapping[str, Mapping[str, float]] = {"NVIDIA H200": {"copy": 4402.0, "bf16": 790.0, "e4m3": 1461.0}}
"""GPU -> kind -> GB/s or TFLOPS that percentages refer to, so that those of different runs compare, unless the run
itself reached more: copy of a product of one token, which read its weights at 4402 where a 4 GB read ran at 4280, bf16
of two square products, and e4m3 of a peer's product that ran at 1461 where the power limit held square ones to 1298."""

COPY_FLOATS = 10**9
SIZES = (4096, 8192)


def measure(replays: int) -> list[dict[str, Any]]:
    """All ceilings of the GPU at hand, each with a name, a kind, a value in its unit, and times in microseconds."""
    x = torch.empty(COPY_FLOATS, device="cuda").normal_()
    y = torch.empty_like(x)
    found = [
        _time("copy 8 GB", "copy", [partial(torch.neg, x, out=y)], 8 * COPY_FLOATS, replays),
        _time("read 4 GB", "read", [x.sum], 4 * COPY_FLOATS, replays),
    ]
    del x, y
    for size in SIZES:
        found.append(_products(f"bf16 matmul {size}", "bf16", size, _bf16, 6 * size**2, replays))
        for kind, fast in (("e4m3 fast", True), ("e4m3 full", False)):
            found.append(_products(f"{kind} matmul {size}", kind, size, partial(_e4m3, fast), 4 * size**2, replays))
    z = torch.zeros(64, device="cuda")
    found.append(_time("add_ of 64 floats", "launch", [partial(z.add_, 1)] * 256, 512, replays))
    return found


def _bf16(size: int) -> Call:
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return partial(torch.mm, a, b, out=torch.empty_like(a))


def _e4m3(fast: bool, size: int) -> Call:
    a, b = (torch.randn(size, size, device="cuda").to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones(1, device="cuda")
    whole = F.ScalingType.TensorWise
    return partial(F.scaled_mm, a, b.t(), one, whole, one, whole, output_dtype=torch.bfloat16, use_fast_accum=fast)


def _products(
    name: str, kind: str, size: int, make: Callable[[int], Call], nbytes: int, replays: int
) -> dict[str, Any]:
    try:
        calls = [make(size) for _ in range(number_of_sets(nbytes))]
        return _time(name, kind, calls, nbytes, replays, flops=2 * size**3)
    except (RuntimeError, NotImplementedError, ValueError, AttributeError) as error:
        return {"name": name, "kind": kind, "skipped": f"{type(error).__name__}: {str(error).splitlines()[0]}"[:200]}


def _time(
    name: str, kind: str, calls: Sequence[Call], nbytes: int, replays: int, flops: int | None = None
) -> dict[str, Any]:
    timing = time_graphs({name: calls}, nbytes, replays)[name]
    times = {"us": round(timing.median, 3), "p10": round(timing.p10, 3), "p90": round(timing.p90, 3)}
    if kind == "launch":
        return {"name": name, "kind": kind, "unit": "us", "value": times["us"], **times}
    if flops is None:
        return {"name": name, "kind": kind, "unit": "GB/s", "value": round(nbytes / timing.median / 1e3, 1), **times}
    return {"name": name, "kind": kind, "unit": "TFLOPS", "value": round(flops / timing.median / 1e6, 1), **times}


def yardsticks(gpu: str, ceilings: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """What percentages refer to on `gpu`: "copy" in GB/s, "bf16" and "e4m3" in TFLOPS, as far as they are known."""
    found = {}
    for name, kinds in (("copy", ("copy", "read")), ("bf16", ("bf16",)), ("e4m3", ("e4m3 fast",))):
        values = [(c["value"], "measured") for c in ceilings if c["kind"] in kinds and "value" in c]
        if name in STATED.get(gpu, {}):
            values.append((STATED[gpu][name], "stated"))
        if values:
            value, source = max(values)
            found[name] = {"value": value, "source": source}
    return found


def add_percentages(cells: Sequence[dict[str, Any]], known: Mapping[str, Mapping[str, Any]]) -> None:
    """Give every cell the ceiling that binds it, the one that takes longest, and its rows their share of that."""
    for cell in cells:
        floors = {}
        if "copy" in known:
            floors["copy"] = cell["bytes"] / known["copy"]["value"] / 1e3
        if cell["products"] in known:
            floors[cell["products"]] = cell["flops"] / known[cell["products"]]["value"] / 1e6
        cell["bound"] = max(floors, key=lambda name: floors[name], default=None)
        for row in cell["rows"]:
            if "us" in row:
                row["percent"] = None if cell["bound"] is None else round(100 * floors[cell["bound"]] / row["us"], 1)
