# SPDX-License-Identifier: Apache-2.0
"""sparse_mla_decode with q_norm on the CPU: its meaning in float64, what it refuses, what its kernels are given."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from cute_kernels.output.ops import fused_inv_rope_fp8_quant, output_scale_shape
from cute_kernels.sparse_mla.ops import sparse_mla_decode
from tests import oracle
from tests.helpers import bits, check_op
from tests.sparse_mla import model
from tests.sparse_mla.model import FP8, SCALE, Pool

TABLE = oracle.cos_sin_table(50)
B, S_Q, HEADS, EPS = 2, 3, 4, 0.25
POSITIONS = torch.tensor([3, 49, 50, -1, 17, 0])


def results(tokens: int, heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    codes = torch.full((tokens, 2, heads // 2 * 512), 0x55, dtype=torch.uint8).view(torch.float8_e4m3fn)
    return codes, torch.full(output_scale_shape(tokens, 2, heads // 2), torch.nan)


def make() -> tuple[Pool, dict[str, Any]]:
    pool = Pool(FP8, 3, 72)  # rows that fill pages to the last byte
    pool.put_all(range(24))
    g = torch.Generator().manual_seed(3)
    powers = torch.exp2(torch.randint(-9, 9, (B, S_Q, HEADS, 1), generator=g).float())
    squares = torch.rand(B, S_Q, HEADS, 4, generator=g) * 300 * powers**2
    indices = torch.randint(-1, 24, (B, S_Q, 7), generator=g).int()
    indices[1, 2], squares[1, 2, 1, 0] = -1, torch.nan
    q = (torch.randn(B, S_Q, HEADS, 512, generator=g) * powers).bfloat16()
    sink = torch.tensor([0.5, -1.0, -torch.inf, 3.0])
    norm = squares.view(B * S_Q, HEADS * 4), EPS
    return pool, {"q": q, "k_cache": pool.cache, "indices": indices, "attn_sink": sink, "q_norm": norm}


def test_meaning() -> None:
    """The norm is in the logits, and rotary columns are rounded as they are rotated."""
    pool, given = make()
    q, (squares, _), before = given["q"], given["q_norm"], given["q"].clone()
    numbers = oracle.to_numpy(q.flatten(0, 1))
    cos, sin = np.split(TABLE[POSITIONS.clamp(0, 49)][:, None].numpy(), 2, axis=-1)
    numbers[..., 448:] = oracle.bf16_round(oracle.rope_f32(numbers[..., 448:], cos, sin))
    roots = np.sqrt(squares.numpy().astype(np.float64).reshape(6, HEADS, 4).sum(-1, keepdims=True) / 512 + EPS)
    rows = [[pool.row(i) for i in line if i >= 0] for line in given["indices"].flatten(0, 1).tolist()]
    sink = given["attn_sink"].tolist()
    attended = [model.attention(x, keys, SCALE, sink) for x, keys in zip(numbers / roots, rows, strict=True)]
    out, _, lse = (np.stack(part) for part in zip(*attended, strict=True))
    codes, scales = results(6, HEADS)
    got, got_lse = sparse_mla_decode(**given, out=codes, output_quant=(POSITIONS, TABLE, scales))
    assert got is codes
    assert torch.equal(q, before)
    model.assert_fp32(got_lse.transpose(1, 2).flatten(0, 1), lse)
    want, want_scales = results(6, HEADS)
    plain = torch.from_numpy(out).float().bfloat16()
    fused_inv_rope_fp8_quant(plain, POSITIONS, TABLE, 2, HEADS // 2, out=want, scale_out=want_scales)
    assert torch.equal(bits(codes), bits(want))
    assert torch.equal(bits(scales), bits(want_scales))


def test_opcheck() -> None:
    _, given = make()
    codes, scales = results(6, HEADS)
    arguments = (given["q"], given["k_cache"], given["indices"], None, None, SCALE, FP8, *[None] * 5, FP8, 0, 0)
    check_op("sparse_mla_decode", *arguments, codes, None, None, 0, "auto", *given["q_norm"], POSITIONS, TABLE, scales)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"output_quant": None, "out": torch.zeros(B, S_Q, HEADS, 512, dtype=torch.bfloat16)}, ValueError),
        ({"q_norm": 3}, TypeError),
        ({"q_norm": (torch.zeros(6, 16),)}, TypeError),
        ({"q_norm": (torch.zeros(6, 15), EPS)}, ValueError),
        ({"q_norm": (torch.zeros(2, 3, 16), EPS)}, ValueError),
        ({"q_norm": (torch.zeros(6, 16).double(), EPS)}, TypeError),
        ({"q_norm": (torch.zeros(16, 6).T, EPS)}, ValueError),
        ({"q_norm": (torch.zeros(6, 16), -1.0)}, ValueError),
    ],
)
def test_bad_arguments(changes: dict[str, Any], error: type[Exception]) -> None:
    _, given = make()
    codes, scales = results(6, HEADS)
    given |= {"out": codes, "output_quant": (POSITIONS, TABLE, scales)}
    with pytest.raises(error, match=r"^sparse_mla_decode: q_norm: expected "):
        sparse_mla_decode(**(given | changes))


@pytest.mark.parametrize("splits", [1, 2])
def test_what_the_kernel_is_given(monkeypatch: pytest.MonkeyPatch, splits: int) -> None:
    """Rows that are split get angles too, though their codes come from the merge behind. Nothing is launched."""
    pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
    from cute_kernels.sparse_mla import launch
    from cute_kernels.sparse_mla.call import DecodeCall
    from cute_kernels.sparse_mla.hopper.decode import DecodeKey
    from tests.sparse_mla.test_decode_launch import Launches

    _, given = make()
    fakes = Launches(monkeypatch)
    launched: list[tuple[Any, tuple[Any, ...]]] = []
    monkeypatch.setattr(launch, "launch_key", lambda key, _, *args: launched.append((key, args)))
    heads = 24
    q, squares = torch.zeros(B, S_Q, heads, 512, dtype=torch.bfloat16), torch.zeros(6, heads * 4 + 3)[:, 3:]
    codes, scales = results(6, heads)
    call = DecodeCall(
        *(q, given["k_cache"], given["indices"].repeat(1, 1, 20), None, None, SCALE, FP8, *[None] * 5, FP8, splits, 0),
        *(codes, torch.zeros(B, heads, S_Q), torch.zeros(10**6), 0, "auto", squares, EPS),
        *(POSITIONS, TABLE, scales),
    )
    assert launch.why_not_decode(call) == ""
    launch.launch_decode(call)
    ((key, args),) = launched
    assert key == DecodeKey("sm_90a", 32, "none", out_fp32=splits == 2, quantized=splits == 1, raw=True)
    assert key in launch.DECODE.deployment_keys(ThirtyTwoHeads, 1, "sm_90a")
    assert len(args) == len(key.build()[1]) - 1, "all but the stream"
    assert args[1] is squares
    behind = args[7:] if splits == 2 else args[8:]
    assert args[7] is (POSITIONS if splits == 2 else scales)
    assert behind[0] is POSITIONS
    assert behind[1] is TABLE
    assert behind[11] == EPS
    assert len(fakes.merges) == splits - 1
    few = (q[:, :, :16], *call[1:15], results(6, 16)[0], None, *call[17:19], squares[:, :64], *call[20:23])
    why = launch.why_not_decode(DecodeCall(*few, results(6, 16)[1]))
    assert why == "q_norm is supported for more than 16 heads, got 16"


class ThirtyTwoHeads:
    compress_ratios, num_attention_heads = (1,), 32
