# SPDX-License-Identifier: Apache-2.0
"""What the portable kernel of deepseek_v4_fp8_einsum alone does, on a GPU: scales in words, and tiles of every size.
test_fp8_einsum.py has the rest."""

from __future__ import annotations

import pytest
import torch

from cute_kernels.output.ops import pack_block_scales
from cute_kernels.runtime import compile as compile_
from cute_kernels.runtime.arch import arch_of
from cute_kernels.runtime.ops import FALLBACK_VARIABLE

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from cute_kernels.linear import launch as calls
from cute_kernels.linear.mma_sync.gemm import PortableGemmKey
from tests.gpu.einsum_calls import Call, close, poison, portable, same_bits, words

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@pytest.fixture(autouse=True)
def no_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FALLBACK_VARIABLE, raising=False)


@pytest.mark.parametrize("tokens", [1, 16, 33, 130, 700])
@pytest.mark.parametrize(("rank", "width"), [(1024, 4096), (136, 512), (72, 1024)])
def test_packed_scales(tokens: int, rank: int, width: int) -> None:
    """The same numbers in words have the same bits as fp32 ones, by the portable kernel on every GPU."""
    call = Call.make(tokens, 3, rank, width, seed=tokens)
    want = portable(call)
    a_scale = words(call.a_scale)
    assert same_bits(call.run_packed(a_scale, pack_block_scales(call.b_scale, rank)), want)
    # words that lie the other way round, between others
    around = torch.full((3, tokens, width // 512 + 1), -1, dtype=torch.int32, device="cuda")
    around[:, :, 1:] = a_scale.transpose(0, 1)
    b_scale = pack_block_scales(call.b_scale, rank).contiguous()
    assert same_bits(call.run_packed(around.transpose(0, 1)[:, :, 1:], b_scale), want)


def test_columns_have_packed_scales_of_their_own() -> None:
    call = Call.make(70, 2, 264, 1024, seed=4)
    g = torch.Generator(device="cuda").manual_seed(4)
    own = torch.exp2(torch.randint(-12, -2, (2, 264, 8), device="cuda", generator=g).float())
    out = call.run_packed(words(call.a_scale), words(own))
    assert close(out, call.expected(own))
    # 0 is the smallest scale and 255 is none
    a_scale, b_scale = words(call.a_scale), words(own)
    a_scale.view(torch.uint8)[3, 1, 5], b_scale.view(torch.uint8)[0, 200, 2] = 255, 255
    dirty, broken = call.run_packed(a_scale, b_scale), torch.zeros_like(out, dtype=torch.bool)
    broken[3, 1], broken[:, 0, 200] = True, True
    assert torch.equal(dirty.isnan(), broken)
    assert same_bits(dirty[~broken], out[~broken])


def test_smallest_packed_scales() -> None:
    call = Call.make(20, 1, 64, 512)
    call.a_scale.fill_(2.0**-127)
    call.b_scale.fill_(2.0**20)
    out = call.run_packed(torch.zeros_like(words(call.a_scale)), pack_block_scales(call.b_scale, 64))
    assert close(out, call.expected())


@pytest.mark.parametrize(("rows", "columns", "_"), calls.PORTABLE_TILES)
@pytest.mark.parametrize("tokens", [1, 16, 17, 129, 600])
def test_portable_tiles_agree(rows: int, columns: int, _: float, tokens: int) -> None:
    """Tiles of every size give the same bits, with one block for many tiles too."""
    call = Call.make(tokens, 2, 264, 640, seed=tokens)
    want = portable(call)
    key = PortableGemmKey(arch_of(0), rows, columns)
    for blocks in (1, 3, 40):
        out = poison(*call.out.shape)
        compile_.launch(key, 0, call.a, call.a_scale, call.b, call.b_scale, out, blocks)
        assert same_bits(out, want)
