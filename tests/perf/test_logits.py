# SPDX-License-Identifier: Apache-2.0
"""The shapes that the indexer's scores are measured in; what is measured in them needs a GPU."""

from __future__ import annotations

import pytest
import torch

from perf import logits
from perf.targets import TARGETS_US


def test_shapes_are_what_the_peers_are_known_by() -> None:
    assert [logits.prefill_name(*shape) for shape in logits.PREFILLS[:4]] == [
        "sq4096 sk4096", "sq4096 sk16384", "sq4096 sk65536", "sq1024 sk32768"
    ]  # fmt: skip
    names = [logits.decode_name(*shape) for shape in logits.DECODES]
    assert len(set(names)) == len(names)
    assert names[:2] == ["b1 ctx8192", "b8 ctx8192"]
    assert "b64 ctx8192 next_n=4" in names


def test_targets_are_of_shapes_that_are_measured() -> None:
    known = {
        logits.CONTIGUOUS: {logits.prefill_name(*shape) for shape in logits.PREFILLS}
        | {logits.prefill_name(*shape, mxfp4=True) for shape in logits.MXFP4_PREFILLS},
        logits.PAGED: {logits.decode_name(*shape) for shape in logits.DECODES}
        | {logits.decode_name(*shape, mxfp4=True) for shape in logits.MXFP4_DECODES},
    }
    for op, names in known.items():
        targets = {case for _, named, case in TARGETS_US if named == op}
        assert targets
        assert targets <= names


def test_what_counts_as_near() -> None:
    g = torch.Generator().manual_seed(0)
    q, k = (torch.randn(n, 128, generator=g).to(torch.float8_e4m3fn) for n in (64, 30))
    weights, scale = torch.randn(64, generator=g), torch.rand(30, generator=g)
    exact = ((q.float() @ k.float().T).relu() * weights[:, None]).sum(0) * scale
    assert logits.is_near(exact, q, k, scale, weights)
    assert not logits.is_near(exact * 1.01 + 0.3, q, k, scale, weights)
    exact[3] = float("nan")
    assert not logits.is_near(exact, q, k, scale, weights)


def test_who_is_measured_beside_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepGEMM's scores of several rows of a request come in two ways; of MXFP4 it has none here."""
    monkeypatch.setattr(logits, "load_peer", lambda name, load: name)
    names = {
        (mxfp4, peers, variants, next_n): set(logits._candidates(logits.PAGED, mxfp4, peers, variants, next_n))
        for mxfp4 in (False, True)
        for peers in (False, True)
        for variants in (False, True)
        for next_n in (1, 2)
    }
    for (mxfp4, peers, variants, next_n), found in names.items():
        assert ("ours portable" in found) == ("ours dependent" in found) == variants
        assert ("deepgemm" in found) == peers
        assert ("deepgemm-flattened" in found) == (peers and not mxfp4 and next_n == 2)
        assert len(found) == 2 * variants + peers * (1 + (not mxfp4 and next_n == 2))
    assert "no MXFP4" in logits._candidates(logits.PAGED, True, True, False)["deepgemm"]


def test_scores_are_checked_where_a_call_leaves_them() -> None:
    """In what it returns or, if it returns nothing, in ours, where none are left of the call before."""
    seen: list[torch.Tensor] = []
    out, theirs = torch.zeros(3), torch.ones(3)
    s = logits.LogitsSet(
        logits.CONTIGUOUS, (*[None] * logits.OUT, out), lambda got: seen.append(got) or bool((got == 1).all())
    )
    assert s.right(lambda: theirs)
    assert seen[-1] is theirs
    assert out.isnan().all()
    assert not s.right(lambda: None)
    assert seen[-1] is out
    assert s.right(lambda: [out.fill_(1.0), None][1])
