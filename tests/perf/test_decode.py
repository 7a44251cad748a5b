# SPDX-License-Identifier: Apache-2.0
"""The shapes that decode is measured in; what is measured in them needs a GPU."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from perf import decode
from perf.decode import BETWEEN_SHAPES, GRID, OP, OWN, PLANNED, FlashMLA, block_of
from perf.decode_inputs import SPREAD, DecodeSet, Shape, in_order, near
from perf.targets import TARGETS_US


def test_shapes_are_what_the_peers_are_known_by() -> None:
    names = [shape.name for shape in (*GRID, *OWN, *BETWEEN_SHAPES)]
    assert len(GRID) == 60
    assert len(set(names)) == len(names)
    assert names[:2] == ["b1 h64 swa128", "b8 h64 swa128"]
    assert "b64 h64 c4_128+512 s_q=4" in names
    assert "b256 h64 c128_128+1024 dense" in names
    assert "b32 h64 c4_128+512 split_tokens=256" in names
    assert set(PLANNED) <= set(GRID)
    for kind in ("one-long", "uniform", "zipf"):
        assert {f"b{b} h64 c4_128+1024 {kind}" for b in (16, 48, 192)} <= set(names)
        assert {f"b{b} h64 c128_128+1024 dense {kind}" for b in (16, 48, 192)} <= set(names)


def test_targets_are_of_shapes_that_are_measured() -> None:
    targets = {case for _, op, case in TARGETS_US if op == OP}
    assert targets
    assert targets <= {shape.name for shape in (*GRID, *OWN)}


def test_lengths() -> None:
    assert Shape("c128_128+256", 64, 3).lengths() == [256, 256, 256]
    for batch in (1, 64, 256):
        lengths = Shape("c4_128+512", 64, batch, unequal=SPREAD).lengths()
        assert len(lengths) == batch
        assert min(lengths) == 1
        assert max(lengths) == (512 if batch > 1 else 1)
        assert len(set(lengths)) == batch


def test_padding() -> None:
    assert Shape("c4_128+512", 64, 5).padded(64) == 0
    assert Shape("c4_128+512", 8, 5).padded(16) == 0.5
    assert Shape("c4_128+512", 100, 5).padded(64) == 1 - 100 / 128
    # lengths 1 and 512: 3 tiles and 10
    assert Shape("c4_128+512", 64, 2, unequal=SPREAD).padded(64) == 1 - (129 + 640) / (13 * 64)


def test_blocks_of_heads_come_from_the_kernel() -> None:
    pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
    for shape in (*GRID, *OWN):
        assert block_of(shape, "sm_90a") in (8, 16, 32, 64)


def test_arguments_are_in_the_order_of_the_schema() -> None:
    q, out = torch.zeros(1), torch.ones(1)
    found = in_order({"out": out, "q": q, "split_tokens": 64})
    assert found[0] is q
    assert found[13:16] == (0, 64, out)
    assert found[1] is None


def test_near() -> None:
    want = torch.randn(3, 2, 512, generator=torch.Generator().manual_seed(1)) * 0.05
    assert near(want.bfloat16(), want)
    assert not near(want * 1.004, want)
    assert not near(want.index_fill(2, torch.tensor([7]), 0.3), want)


@dataclass(frozen=True)
class FakeFlashMLA:
    """Takes one new token per request, and answers with numbers of requests and lengths."""

    plans: list[str] = field(default_factory=list)

    def get_mla_metadata(self) -> tuple[str, None]:
        self.plans.append(f"plan {len(self.plans)}")
        return self.plans[-1], None

    def flash_mla_with_kvcache(self, q: torch.Tensor, out: torch.Tensor, **given: Any) -> Any:
        rows, one, heads, _ = q.shape
        assert one == 1
        assert given["indices"].shape == (rows, 1, 2)
        assert given["extra_indices_in_kvcache"].shape == (rows, 1, 3)
        out.copy_(given["indices"][:, :, :1, None])
        lse = given["topk_length"] * 10 + given["extra_topk_length"]
        return out, lse[:, None, None].expand(rows, heads, 1).float()


def test_flattened_rows_come_back_where_they_were() -> None:
    """FlashMLA's answer for requests of several new tokens is that for as many requests of one, put in order."""
    b, s_q, h = 3, 2, 64
    q = torch.zeros(b, s_q, h, 512)
    rows = torch.arange(b * s_q, dtype=torch.int32).view(b, s_q, 1)
    given = {
        "q": q,
        "k_cache": torch.zeros(1, 1, 584),
        "indices": rows.expand(b, s_q, 2).contiguous(),
        "topk_length": torch.tensor([5, 6, 7], dtype=torch.int32),
        "attn_sink": None,
        "softmax_scale": 1.0,
        "extra_k_cache": torch.zeros(1, 1, 584),
        "out": torch.empty_like(q),
    }
    listed, lengths = rows.expand(b, s_q, 3).contiguous(), torch.tensor([1, 2, 3], dtype=torch.int32)
    s = DecodeSet(Shape("c4_128+512", h, b, s_q), given, listed, lengths)
    out, lse = FlashMLA(FakeFlashMLA(), flattening=True)(s)
    assert torch.equal(out, rows[..., None].expand(b, s_q, h, 512).float())
    assert torch.equal(given["out"], out), "written in place"
    for planning, count in ((False, 1), (True, 2)):
        peer = FlashMLA(FakeFlashMLA(), planning=planning, flattening=True)
        for _ in range(2):
            peer(s)
        assert len(peer.module.plans) == count, "once for a shape, or for every call"
    assert torch.equal(lse, torch.tensor([51.0, 62.0, 73.0])[:, None, None].expand(b, h, s_q))


def test_who_is_measured_beside_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Explicit splits are a matter of our own; FlashMLA has one kernel for 64 heads or more."""
    monkeypatch.setattr(decode, "load_peer", lambda name, load: "not here")
    assert any(shape.splits for shape in OWN)
    for shape in (*GRID, *OWN, Shape("c4_128+512", decode.PEER_HEADS, 3)):
        ours = {f"ours {name}={count}" for splits in decode.SPLITS for name, count in splits.items()}
        peer = "flashmla" if shape.heads >= 64 else "flashmla-padded"
        theirs = {peer} | {f"{peer}-flattened" for _ in range(shape.tokens > 1)}
        theirs |= {"flashmla-and-planner" for _ in range(shape in PLANNED)}
        for peers in (False, True):
            for variants in (False, True):
                want = set() if shape.splits else (ours if variants else set()) | (theirs if peers else set())
                work_tiles = shape.rows * (2 if shape.heads > 64 else 1)
                if 33 < work_tiles <= 64 and shape.mode.endswith("+1024") and not shape.splits:
                    want |= {"ours long_rows=whole"}
                assert set(decode._candidates(shape, peers, variants, 132)) == want
