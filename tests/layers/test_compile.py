# SPDX-License-Identifier: Apache-2.0
"""A decode step of every layer kind compiles as one graph, with the same bits and the same cache bytes."""

from __future__ import annotations

import copy

import pytest
import torch

from layers import BlockTables
from tests.helpers import raw_bytes
from tests.layers.engine import KINDS, Engine, Request, hidden_rows, make_layer


@pytest.mark.parametrize("ratio", KINDS)
@pytest.mark.parametrize("kv", ["fp8_ds_mla", "fp8"])
def test_decode_step_is_one_graph(ratio: int, kv: str) -> None:
    layer = make_layer(ratio, kv_cache=kv)
    engine = Engine(layer, seed=1)
    lengths = [131, 200, 3]
    requests = [Request() for _ in lengths]
    engine.step([], [(r, hidden_rows(n, seed=n)) for r, n in zip(requests, lengths, strict=True)], recycle=False)
    for request, length in zip(requests, lengths, strict=True):
        engine._grow(request, length + 1)
    swa = engine._table("swa", requests)
    assert swa is not None
    tables = BlockTables(swa, engine._table("compressed", requests), engine._table("state", requests))
    metadata = engine.builder.build(ratio, [1] * 3, [n + 1 for n in lengths], tables, 3)
    hidden = hidden_rows(3, seed=9)
    copies = copy.deepcopy(engine.caches)
    expected = layer(metadata.positions, hidden, metadata, engine.caches)
    torch._dynamo.reset()
    # code is made of the graph for one kind only: that takes longest and is torch's, which need not find out by a
    # dozen runs of a C++ compiler how wide this CPU's vectors are
    if (ratio, kv) == (4, "fp8_ds_mla"):
        compiled = torch.compile(layer, fullgraph=True, backend="inductor", options={"cpp.vec_isa_ok": False})
    else:
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    out = compiled(metadata.positions, hidden, metadata, copies)
    assert torch.equal(out, expected)
    for name in ("swa", "compressed", "state", "indexer", "indexer_state"):
        cache = getattr(engine.caches, name)
        if cache is not None:
            assert torch.equal(raw_bytes(cache.data), raw_bytes(getattr(copies, name).data)), name
