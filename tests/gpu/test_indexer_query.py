# SPDX-License-Identifier: Apache-2.0
"""The query kernel of the indexer on a GPU, byte for byte: against the CPU implementation and tests/oracle.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from cute_kernels.indexer.ops import fused_indexer_q_rope_quant
from cute_kernels.runtime import compile as compile_
from cute_kernels.runtime.ops import FALLBACK_VARIABLE
from cute_kernels.runtime.record import record_calls
from tests import oracle
from tests.helpers import POISON_BYTE, bits, generator, raw_bytes, spread
from tests.indexer.test_query import expected, rotated

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

MAX_POS = 4099
TABLE = oracle.cos_sin_table(MAX_POS)
SCALES = (128**-0.5, 0.3)
FORMS = ("fp8", "ties_to_lower", "ties_to_even")


@pytest.fixture(autouse=True)
def no_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FALLBACK_VARIABLE, raising=False)


def inputs(tokens: int, heads: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = generator(seed)
    fixed = torch.tensor([0, 3, MAX_POS - 1, MAX_POS, -1, 2**40, -(2**62), 127])
    positions = torch.cat([fixed, torch.randint(0, MAX_POS, (tokens,), generator=g)])[:tokens]
    return positions, spread((tokens, heads, 128), seed), torch.randn(tokens, heads, generator=g).bfloat16()


def outputs(
    form: str, tokens: int, heads: int, device: str, padding: int = 8, dtype: torch.dtype = torch.float32
) -> Any:
    """`out` for a call: views into poisoned tensors, `padding` elements between rows, and the tensors."""
    width, codes = (128, torch.float8_e4m3fn) if form == "fp8" else (64, torch.uint8)
    whole = [torch.empty(tokens + 2, heads + 1, width + padding, dtype=codes, device=device)]
    if form != "fp8":
        whole.append(torch.empty(tokens + 2, heads + padding, dtype=torch.int32, device=device))
    whole.append(torch.empty(tokens + 2, heads + padding, dtype=dtype, device=device))
    for t in whole:
        raw_bytes(t).fill_(POISON_BYTE)
    views = [whole[0][1:-1, :heads, :width], *(t[1:-1, padding // 2 : padding // 2 + heads] for t in whole[1:])]
    return (views[0] if form == "fp8" else (views[0], views[1]), views[-1]), whole


def call(form: str, *args: Any, **more: Any) -> Any:
    rounding = {} if form == "fp8" else {"e2m1_rounding": form}
    return fused_indexer_q_rope_quant(*args, *SCALES, form != "fp8", **rounding, **more)


def check(
    form: str,
    positions: torch.Tensor,
    q: torch.Tensor,
    weights: torch.Tensor,
    table: torch.Tensor = TABLE,
    dtype: torch.dtype = torch.float32,
    **more: Any,
) -> Any:
    """Run on the GPU and on the CPU; every byte of the poisoned outputs must agree. Returns the CPU's outputs."""
    results = []
    for device in ("cuda", "cpu"):
        out, whole = outputs(form, q.shape[0], q.shape[1], device, dtype=dtype)
        args = [t.to(device) for t in (positions, q, table, weights)]
        with record_calls() as recording:
            call(form, *args, out=out, **({"weights_out_dtype": dtype} if form != "fp8" else {}), **more)
        assert [c.implementation for c in recording.calls] == ["kernel" if device == "cuda" else "reference"]
        results.append([raw_bytes(t).cpu() for t in whole])
    for name, got, want in zip(("codes", *(() if form == "fp8" else ("scales",)), "weights"), *results, strict=True):
        assert torch.equal(got, want), f"{name}: {int((got != want).sum())} bytes differ"
    return out


@pytest.mark.parametrize("hadamard", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_every_byte(form: str, hadamard: bool) -> None:
    for tokens in (1, 2, 7, 33):
        for heads in (1, 3, 5, 8, 64, 77):
            check(form, *inputs(tokens, heads, tokens + heads), index_hadamard=hadamard)
    for tokens, heads in ((128, 64), (131, 63), (2000, 5), (90, 100)):
        check(form, *inputs(tokens, heads, tokens), index_hadamard=hadamard)


@pytest.mark.parametrize("form", FORMS)
def test_columns_of_wider_projections(form: str) -> None:
    """Queries and fp32 weights as two fused GEMMs leave them, [T, 40960] and [T, 2624]."""
    for tokens in (1, 65, 300):
        positions, q, weights = inputs(tokens, 64, tokens)
        wide = torch.full((tokens, 40960), torch.nan, dtype=torch.bfloat16, device="cuda")
        view = wide[:, 32768:].unflatten(-1, (64, 128))
        view.copy_(q)
        sums = torch.full((tokens, 2624), torch.nan, device="cuda")
        sums[:, 2560:] = weights.float().cuda() * (1 + 2.0**-10)
        table = TABLE.cuda()
        want = call(form, positions.cuda(), q.cuda(), table, sums[:, 2560:].bfloat16())
        for use_pdl in (False, True):
            options = {"round_weights": True, "use_pdl": use_pdl}
            got = call(form, positions.cuda(), view, table, sums[:, 2560:], **options)
            for a, b in zip(flat(got), flat(want), strict=True):
                assert torch.equal(raw_bytes(a), raw_bytes(b))


def flat(result: Any) -> list[torch.Tensor]:
    codes, weights = result
    return [*codes, weights] if isinstance(codes, tuple) else [codes, weights]


@pytest.mark.parametrize("hadamard", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_every_kernel(form: str, hadamard: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those for long calls too, in short ones with any number of heads."""
    from cute_kernels.indexer import query

    for size in query.SIZES:
        monkeypatch.setattr(query, "size_of", lambda heads, size=size: size)
        for tokens, heads in ((1, 1), (3, 5), (19, 15), (9, 16), (7, 17), (33, 64)):
            check(form, *inputs(tokens, heads, heads), index_hadamard=hadamard)


def test_a_long_call() -> None:
    positions, q, weights = (t.cuda() for t in inputs(4101, 64, 10))
    codes, out = call("fp8", positions, q, TABLE.cuda(), weights)
    rows = torch.cat([torch.arange(9), torch.arange(4090, 4101), torch.randperm(4090, generator=generator(1))[:50]])
    want, want_out = call("fp8", *(t[rows.cuda()].cpu() for t in (positions, q)), TABLE, weights[rows.cuda()].cpu())
    assert torch.equal(bits(codes[rows.cuda()]).cpu(), bits(want))
    assert torch.equal(out[rows.cuda()].cpu(), want_out)


@pytest.mark.parametrize("hadamard", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_random_bit_patterns(form: str, hadamard: bool) -> None:
    patterns = torch.randint(-(2**15), 2**15, (150, 64, 128), generator=generator(1), dtype=torch.int16)
    q = patterns.view(torch.bfloat16)
    assert q.isnan().any()
    assert q.isinf().any()
    positions, _, weights = inputs(150, 64)
    check(form, positions, q, weights, index_hadamard=hadamard)


@pytest.mark.parametrize("hadamard", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_against_the_oracle(form: str, hadamard: bool) -> None:
    positions, q, weights = inputs(40, 9, 2)
    got = call(form, *(t.cuda() for t in (positions, q, TABLE, weights)), index_hadamard=hadamard)
    rounding = "ties_to_lower" if form == "fp8" else form
    want = expected(rotated(positions, q, TABLE, hadamard), weights, SCALES, form != "fp8", rounding)
    codes, out = got
    if form != "fp8":
        codes, scales = codes
        shifts = 8 * np.arange(4)
        np.testing.assert_array_equal((scales.cpu().numpy()[..., None] >> shifts) & 255, want[1])
    np.testing.assert_array_equal(codes.cpu().view(torch.uint8).numpy(), want[0])
    np.testing.assert_array_equal(out.cpu().numpy().view(np.int32), want[2].view(np.int32))


@pytest.mark.parametrize("form", FORMS)
def test_ties_zeros_tiny_and_infinite(form: str) -> None:
    ties = torch.tensor(
        [6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 448.0, 17.0, 19.0, 2.0**-10, 0.125, 0.0, 4.5, -0.0]
    )
    q = torch.cat([ties, -ties]).repeat(4) * torch.exp2(torch.arange(-40.0, 120.0, 2.0))[:, None, None]
    q[3] = 0.0
    q[4] = -0.0
    q[5] = 1e-7
    q[6, :, 32:64] = -3e-5
    q[7, :, 5] = torch.inf
    q[8, :, 101] = -torch.inf
    q[9] = torch.inf
    q[10] = torch.finfo(torch.bfloat16).max
    q[11, :, ::2] = torch.nan
    q[12] = torch.nan
    q[13, :, 64:96] = -torch.nan
    zero = torch.zeros(len(q), dtype=torch.int64)
    check(form, zero, q.bfloat16(), torch.full((len(q), 1), -3.0).bfloat16())
    check(form, zero + 7, q.bfloat16(), torch.full((len(q), 1), -3.0).bfloat16())


@pytest.mark.parametrize("form", FORMS)
def test_dtypes_and_strides(form: str) -> None:
    tokens, heads = 61, 6
    positions, q, _ = inputs(tokens, heads, 3)
    wide = torch.randn(tokens, 40, generator=generator(4))
    view = torch.full((tokens, 8, 200), torch.nan, dtype=torch.bfloat16, device="cuda")[:, 1:7, 40:168]
    view.copy_(q)
    swapped = torch.empty(heads, tokens, 128, dtype=torch.bfloat16, device="cuda").transpose(0, 1)
    swapped.copy_(q)
    tables = [TABLE, TABLE.bfloat16()]
    for dtype in (torch.float32, torch.bfloat16):
        tables.append(torch.full((MAX_POS, 96), torch.nan, dtype=dtype, device="cuda")[:, 16:80])
        tables[-1].copy_(TABLE)
    for tensor in (view, swapped):
        for weights in (wide[:, 11:17], wide.bfloat16()[:, 3:9]):
            for table in tables:
                check(form, positions, tensor, weights.cuda(), table)
    one = q[:1, :1].cuda().as_strided((1, 1, 128), (3, 5, 1))
    check(form, positions[:1], one, wide[:1, :1])
    if form != "fp8":
        check(form, positions, q, wide[:, :6], dtype=torch.bfloat16)


@pytest.mark.parametrize("form", FORMS)
def test_tensors_beyond_two_gigabytes(form: str) -> None:
    gap = 2**30 + 8  # elements: token 1 starts past 2^31 bytes, token 2 past 2^32
    positions, q, weights = inputs(3, 2, 5)
    far = torch.empty(2 * gap + 256, dtype=torch.bfloat16, device="cuda").as_strided((3, 2, 128), (gap, 128, 1))
    far.copy_(q)
    (codes, out), _ = outputs(form, 3, 2, "cuda")
    gap = 2**31 + 8
    width = 128 if form == "fp8" else 64
    memory = torch.empty(2 * gap + 256, dtype=torch.uint8, device="cuda")
    spaced = memory.as_strided((3, 2, width), (gap, width, 1))
    spaced = spaced.view(torch.float8_e4m3fn) if form == "fp8" else spaced
    target = spaced if form == "fp8" else (spaced, codes[1])
    call(form, positions.cuda(), far, TABLE.cuda(), weights.cuda(), out=(target, out))
    want, want_out = call(form, positions, q, TABLE, weights)
    assert torch.equal(bits(spaced).cpu(), bits(want if form == "fp8" else want[0]))
    assert torch.equal(out.cpu(), want_out)


def test_nothing_is_launched_without_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    from cute_kernels.indexer import query

    launches: list[Any] = []
    monkeypatch.setattr(query, "launch_key", lambda *args: launches.append(args))
    for tokens, heads in ((0, 64), (3, 0), (0, 0), (2, 1)):
        for form in FORMS:
            positions, q, weights = inputs(tokens, heads)
            call(form, *(t.cuda() for t in (positions, q, TABLE, weights)))
    assert len(launches) == len(FORMS)


def test_shapes_and_strides_need_no_new_kernel() -> None:
    for form in FORMS:
        check(form, *inputs(1, 64))
        check(form, *inputs(128, 64))
    before = compile_.compilations()
    for form in FORMS:
        for tokens, heads in ((3, 7), (300, 33), (1, 1)):
            check(form, *inputs(tokens, heads))
    assert compile_.compilations() == before


@pytest.mark.parametrize("use_fp4", [False, True])
def test_torch_compile(use_fp4: bool) -> None:
    def step(positions: torch.Tensor, q: torch.Tensor, table: torch.Tensor, weights: torch.Tensor) -> Any:
        return fused_indexer_q_rope_quant(positions, q * 2, table, weights, *SCALES, use_fp4)

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="inductor")
    for tokens in (5, 130):
        positions, q, weights = inputs(tokens, 64, tokens)
        got = compiled(positions.cuda(), q.cuda(), TABLE.cuda(), weights.cuda())
        want = step(positions, q, TABLE, weights)
        for a, b in zip(torch.utils._pytree.tree_leaves(got), torch.utils._pytree.tree_leaves(want), strict=True):
            assert torch.equal(bits(a).cpu(), bits(b))


@pytest.mark.parametrize("use_fp4", [False, True])
def test_alignment_that_is_not_supported_says_so(use_fp4: bool) -> None:
    positions, _, weights = inputs(4, 2)
    wide = torch.zeros(4, 2, 256, dtype=torch.bfloat16, device="cuda")
    odd = torch.zeros(4, 2 * 128 + 4, dtype=torch.bfloat16, device="cuda").as_strided((4, 2, 128), (260, 128, 1))
    table = TABLE.cuda()
    shifted = torch.zeros(10, 80, device="cuda")[:, 1:65]
    for q, rows, reason in (
        (wide[..., 1:129], table, "heads of index_q must be 16-byte aligned"),
        (odd, table, "heads of index_q must be 16-byte aligned"),
        (wide[..., :128], shifted, "rows of index_q_cos_sin_cache must be 16-byte aligned"),
    ):
        with pytest.raises(NotImplementedError, match=f"{reason}.*{FALLBACK_VARIABLE}=reference"):
            fused_indexer_q_rope_quant(positions.cuda(), q, rows, weights.cuda(), *SCALES, use_fp4)
