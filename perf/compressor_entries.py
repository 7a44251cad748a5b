# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of the ops that store compressed entries, with either ratio."""

from __future__ import annotations

from functools import partial
from typing import Any

from cute_kernels.runtime.ops import OPS
from perf import compressor_c4, compressor_c128
from perf.bench import Bench
from perf.grid import of_rows


def _sweep(
    benches: tuple[Bench, ...],
    rows: tuple[int, ...] | None = None,
    peers: bool = False,
    variants: bool = False,
    replays: int = 21,
) -> list[dict[str, Any]]:
    for bench in benches:
        for case in of_rows((*bench.cases, *bench.between), rows):
            OPS[bench.op].overload(*case.make(0))  # compiled before other projects change the DSL
    return [record for bench in benches for record in bench.sweep(rows, peers, variants, replays)]


_BENCHES = ((compressor_c4.STORE, compressor_c128.STORE), (compressor_c4.FUSED, compressor_c128.FUSED))
SWEEPS = {benches[0].op: partial(_sweep, benches) for benches in _BENCHES}
QUICK = {benches[0].op: benches[0].quick for benches in _BENCHES}
"""Numbers of rows of a quick look."""
