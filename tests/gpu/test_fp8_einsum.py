# SPDX-License-Identifier: Apache-2.0
"""The kernels of deepseek_v4_fp8_einsum on a GPU, against float64 products of the dequantized operands: Hopper's own,
and the portable one.

Hopper's tensor cores keep about 14 bits of a sum of e4m3 products, so results differ from the exact ones by a share of
the sum of the products' magnitudes; what must be exact is that bits do not depend on the batch, the tiles chosen or the
run.
"""

from __future__ import annotations

import pytest
import torch

from cute_kernels.models import MODELS
from cute_kernels.output.ops import fused_inv_rope_fp8_quant
from cute_kernels.runtime import compile as compile_
from cute_kernels.runtime.arch import arch_of
from cute_kernels.runtime.key import KernelKey
from cute_kernels.runtime.ops import FALLBACK_VARIABLE
from tests import oracle

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from cute_kernels.linear import launch as calls
from cute_kernels.linear.hopper.gemm import GemmKey
from cute_kernels.linear.mma_sync.gemm import PortableGemmKey
from tests.gpu.einsum_calls import Call, close, poison, same_bits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@pytest.fixture(params=["own", "portable"], autouse=True)
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> type[KernelKey]:
    """Which kernel calls run, and no reference."""
    monkeypatch.delenv(FALLBACK_VARIABLE, raising=False)
    if request.param == "portable":
        monkeypatch.setattr(calls, "HOPPER", "")
        return PortableGemmKey
    if arch_of(0) != calls.HOPPER:
        pytest.skip("the kernel is Hopper's")
    return GemmKey


@pytest.mark.parametrize("groups", [1, 3, 8])
@pytest.mark.parametrize("tokens", [1, 2, 63, 64, 65, 127, 128, 129, 255, 257, 500, 1025])
def test_results(tokens: int, groups: int) -> None:
    call = Call.make(tokens, groups, seed=tokens)
    got, (want, magnitude) = call.run(), call.expected()
    assert close(got, (want, magnitude))
    x, y = got.double(), want
    assert 1 - 2 * (x * y).sum() / (x.square().sum() + y.square().sum()) < 1e-5


@pytest.mark.parametrize("width", [128, 256, 384, 512, 1152, 2048])
@pytest.mark.parametrize("rank", [8, 72, 128, 136, 264, 1000])
def test_odd_ranks_and_widths(rank: int, width: int) -> None:
    for tokens in (5, 130, 700):
        call = Call.make(tokens, 2, rank, width, seed=rank + width)
        assert close(call.run(), call.expected())


def test_chunks_are_scaled_one_by_one() -> None:
    """Exact arithmetic: small integers whose sums no accumulator rounds, scales over the whole range of fp32."""
    call = Call.make(70, 2, 136, 1024)
    g = torch.Generator(device="cuda").manual_seed(5)
    for t in (call.a, call.b):
        t.copy_(torch.randint(-2, 3, t.shape, device="cuda", generator=g).float())
    chosen = torch.randint(0, 8, (70, 2, 1), device="cuda", generator=g)
    call.a_scale.zero_().scatter_(2, chosen, torch.exp2(torch.arange(-60.0, 80.0, device="cuda")).view(70, 2, 1))
    call.b_scale.fill_(2.0**-30)
    assert same_bits(call.run(), call.expected()[0].float().bfloat16())


def test_bits_do_not_depend_on_the_batch() -> None:
    """Every kernel that any number of rows or groups chooses sums a row in the same order."""
    call = Call.make(4099, 8, seed=3)
    whole = call.run()
    for first, last in (
        (0, 1),
        (8, 15),
        (9, 17),
        (40, 66),
        (0, 64),
        (17, 82),
        (100, 229),
        (5, 262),
        (1000, 1512),
        (2000, 3025),
        (0, 2049),
    ):
        assert same_bits(call.rows(slice(first, last)).run(), whole[first:last]), (first, last)
    for groups in (1, 2, 4):
        for rows in (3, 200, 4099):
            part = Call(call.a[:rows, :groups], call.a_scale[:rows, :groups], call.b[:groups], call.b_scale[:groups],
                        poison(rows, groups, 1024))  # fmt: skip
            assert same_bits(part.run(), whole[:rows, :groups]), (groups, rows)


def test_sums_over_nothing_are_zero() -> None:
    assert not Call.make(5, 2, width=0).run().any()
    assert Call.make(5, 2, rank=0, width=0).run().shape == (5, 2, 0)


def test_takes_what_the_quantizer_returns() -> None:
    o = torch.randn(7, 16, 512, generator=torch.Generator().manual_seed(1)).bfloat16()
    a, a_scale = fused_inv_rope_fp8_quant(o, torch.arange(7), oracle.cos_sin_table(16), 2, 8)
    weight = Call.make(1, 2)
    call = Call(a.cuda(), a_scale.cuda(), weight.b, weight.b_scale, poison(7, 2, 1024))
    assert close(call.run(), call.expected())


def test_more_than_4_gib_of_rows() -> None:
    """Rows whose bytes lie beyond 2^32, and results beyond 2^31."""
    groups, tokens, width = 1, 2**32 // 512 + 1000, 512
    if torch.cuda.mem_get_info()[0] < 24 * 2**30:
        pytest.skip("needs 24 GiB of GPU memory")
    small = Call.make(1000, groups, 128, width, seed=1)
    a = torch.zeros(tokens, groups, width, dtype=torch.float8_e4m3fn, device="cuda")
    a_scale = torch.zeros(tokens, groups, width // 128, device="cuda")
    a[-1000:], a_scale[-1000:] = small.a, small.a_scale
    out = Call(a, a_scale, small.b, small.b_scale, poison(tokens, groups, 128)).run()
    assert same_bits(out[-1000:], small.run())
    assert not out[:-1000].any()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"a": (slice(None), slice(None), slice(1, 4097))}, "a must be 16-byte"),
        ({"out": (slice(None), slice(None), slice(1, 1025))}, "out must be 16-byte"),
    ],
)
def test_what_it_does_not_take(change: dict, why: str) -> None:
    call = Call.make(4, 2)
    wide = {"a": torch.zeros(4, 2, 4112, dtype=torch.float8_e4m3fn, device="cuda"), "out": poison(4, 2, 1032)}
    for name, where in change.items():
        setattr(call, name, wide[name][where])
    with pytest.raises(NotImplementedError, match=why):
        call.run()


def test_deployments_use_no_other_keys(kernel: type[KernelKey]) -> None:
    known: set[KernelKey] = set()
    for config in MODELS.values():
        for tp in (1, 2, 4, 8):
            known.update(calls.einsum_keys(config, tp, arch_of(0)))
    before = set(compile_._linked)
    for groups in (1, 2, 4, 8, 16):
        for tokens in (1, 17, 64, 65, 128, 129, 256, 512, 1024, 3000, 8192):
            Call.make(tokens, groups).run()
    used = {key for key in set(compile_._linked) - before if isinstance(key, kernel)}
    assert used <= known
