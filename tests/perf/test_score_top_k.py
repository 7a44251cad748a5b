# SPDX-License-Identifier: Apache-2.0
"""The shapes that scores and picks in one op are measured in; what is measured in them needs a GPU."""

from __future__ import annotations

from perf import score_top_k
from perf.cli import MODULES
from perf.targets import TARGETS_US


def test_shapes() -> None:
    named = {
        score_top_k.PREFILL: [score_top_k.prefill_name(*shape) for shape in score_top_k.PREFILLS],
        score_top_k.DECODE: [
            score_top_k.decode_name(*shape, mxfp4)
            for mxfp4, shapes in ((False, score_top_k.DECODES), (True, score_top_k.MXFP4_DECODES))
            for shape in shapes
        ],
    }
    assert named[score_top_k.PREFILL][0] == "sq4096 sk4096 k=512"
    assert "b64 ctx32768 k=512" in named[score_top_k.DECODE]
    assert "b64 ctx8192 next_n=2 k=512" in named[score_top_k.DECODE]
    assert "b64 ctx32768 mxfp4 k=512" in named[score_top_k.DECODE]
    for op, names in named.items():
        assert len(set(names)) == len(names)
        assert MODULES[op] == "perf.score_top_k"
        assert op in score_top_k.PEERS
        assert {case for _, measured, case in TARGETS_US if measured == op} <= set(names)
    rows = {shape[0] for shape in score_top_k.PREFILLS}, {shape[0] for shape in score_top_k.DECODES}
    for op, known in zip(named, rows, strict=True):
        assert set(score_top_k.QUICK[op]) <= known
