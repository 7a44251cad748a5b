"""Blackwell's decode kernel for pairs of blocks, as compiled, in the model of the GPU: results against float64."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from cute_kernels.sparse_mla.decode_pair_sm100 import BlackwellPairDecodeKey
from tests.model import orders
from tests.model import test_decode_sm100 as single
from tests.model.test_decode_sm100 import MOST, make, program, with_lengths

HEADS = 128


class Decode(single.Decode):
    kind = BlackwellPairDecodeKey
    cluster, codes = 2, 256


CALLS: dict[str, tuple[dict[str, Any], Any, dict[str, Any]]] = {
    "one list, no lengths, 65 heads": ({"b": 2, "heads": 65, "topk": 65, "rows": 2, "sink": "none"}, None, {}),
    "rows without keys, padded pages": (
        {"b": 3, "heads": 128, "topk": 130, "rows": 7, "second": "listed", "extra_topk": 100, "extra_rows": 5,
         "more_stride": 576},
        ([130, 1, 0], [70, -3, 0]),
        {},
    ),
    "lists in turn, most indices bad": (
        {"b": 3, "heads": 100, "topk": 64, "second": "listed", "extra_topk": 64, "extra_rows": 2, "bad": 0.6},
        ([64, 0, -5], [0, 64, MOST]),
        {},
    ),
    "more parts than tiles, two tokens, pages": (
        {"b": 1, "s_q": 2, "heads": 128, "topk": 66, "rows": 3, "second": "dense", "extra_topk": 40, "lengths": "bs"},
        None,
        {"parts": 3, "out_fp32": True},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_results(name: str) -> None:
    how, chosen, parts = CALLS[name]
    call = make(**how)
    if chosen:
        call = with_lengths(call, *chosen)
    decode = Decode(call, HEADS, **parts)
    decode.ctas = 4
    decode.run(seed=len(name), laziness=len(name) % 10 / 10)
    decode.check()
