"""What the ops are to reach, and what counts as a losing cell."""

from __future__ import annotations

from collections.abc import Mapping

from perf.records import Cell, Row

TARGETS_US: Mapping[tuple[str, str, str], float] = {
    ("NVIDIA H200", "save_partial_states", "c4_512 T=32768"): 133.0,
    ("NVIDIA H200", "quantize_and_insert_k_cache", "T=1"): 1.8,
    ("NVIDIA H200", "quantize_and_insert_k_cache", "T=1024"): 2.6,
    ("NVIDIA H200", "quantize_and_insert_k_cache", "T=32768"): 15.0,
    ("NVIDIA H200", "dequantize_and_gather_k_cache", "c4 1x262144"): 105.0,
    ("NVIDIA H200", "dequantize_and_gather_k_cache", "c128 1x8192"): 5.2,
}
"""(GPU, op, case) -> microseconds. Other cells have the limit that `limit_us` derives from their best peer."""

HOST_TARGETS_US: Mapping[int, float] = dict.fromkeys(range(1, 6), 10.0)
"""Tensors that a mutating op takes -> microseconds of host time of an eager call."""


def limit_us(gpu: str, cell: Cell) -> float | None:
    """What our kernel must not exceed: a stated time, else the best peer's and a little; None without either."""
    stated = TARGETS_US.get((gpu, cell.op, cell.case))
    if stated is not None:
        return stated
    best = cell.best_peer
    return None if best is None else max(1.03 * best.us, best.us + 0.2)


def losses(gpu: str, cell: Cell) -> list[str]:
    """Why a cell is listed as losing: slower than its best peer by however little, or over its limit."""
    best, limit, found = cell.best_peer, limit_us(gpu, cell), []
    if best is not None and cell.ours.us > best.us:
        found.append(f"slower than {best.name}")
    if limit is not None and cell.ours.us > limit:
        stated = (gpu, cell.op, cell.case) in TARGETS_US
        found.append(f"over the {'stated target' if stated else 'margin'} of {limit:.2f} µs")
    return found


def host_limit_us(cell: Cell) -> float | None:
    return HOST_TARGETS_US.get(cell.tensors)


def host_loss(cell: Cell, row: Row) -> str | None:
    """Why the host's cost of a row of ours is listed as losing."""
    limit = host_limit_us(cell)
    if row.host is None or limit is None or row.host.us <= limit:
        return None
    return f"an eager call costs the host {row.host.us:.2f} µs, over {limit:.0f}"
