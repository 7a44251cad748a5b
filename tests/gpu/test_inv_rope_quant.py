# SPDX-License-Identifier: Apache-2.0
"""The kernels of fused_inv_rope_fp8_quant on a GPU, byte for byte, against the CPU implementation and the oracle."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from cute_kernels.output.inv_rope import EARLY_TOKENS, FEW_ROWS, MANY_ROWS
from cute_kernels.output.ops import fused_inv_rope_fp8_quant, output_scale_shape
from cute_kernels.runtime import compile as compile_
from cute_kernels.runtime.ops import FALLBACK_VARIABLE
from cute_kernels.runtime.record import record_calls
from tests import oracle
from tests.helpers import POISON_BYTE, bits, generator, raw_bytes, spread

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

TABLE = oracle.cos_sin_table(3000)
KNOWN = (0, 3, 7, 127, 128, 255, 2999, 3000, 1_000_000, -5, 2**31, 2**32 + 1, -(2**62), 2**62)
KINDS = ("fp32", "packed", "none")


@pytest.fixture(autouse=True)
def no_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FALLBACK_VARIABLE, raising=False)


def positions_of(tokens: int, seed: int = 0) -> torch.Tensor:
    """Random positions, the special ones in front."""
    positions = torch.randint(0, 3000, (tokens,), generator=generator(seed))
    positions[: len(KNOWN)] = torch.tensor(KNOWN)[:tokens]
    return positions


def head_slice(tokens: int, heads: int, seed: int) -> torch.Tensor:
    """The middle heads of a wider buffer; what is around them is NaN."""
    wide = torch.full((tokens, heads + 3, 512), float("nan"), dtype=torch.bfloat16)
    wide[:, 2 : heads + 2] = spread((tokens, heads, 512), seed)
    return wide[:, 2 : heads + 2]


def poisoned_outputs(tokens: int, groups: int, per_group: int, kind: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Views into larger buffers full of poison, on the CPU."""
    dtype = torch.bfloat16 if kind == "none" else torch.float8_e4m3fn
    out = torch.empty(groups + 1, tokens + 2, per_group * 512 + 64, dtype=dtype)
    raw_bytes(out).fill_(POISON_BYTE)
    view = out[1:, 1 : tokens + 1, 32 : 32 + per_group * 512].transpose(0, 1)
    if kind == "none":
        return view, None
    shape = output_scale_shape(tokens, groups, per_group, kind == "packed")
    memory = torch.empty(shape[0], shape[1] + 2, shape[2] + 4, dtype=torch.int32 if kind == "packed" else torch.float32)
    raw_bytes(memory).fill_(POISON_BYTE)
    return view, memory[:, 1:-1, 1 : shape[2] + 1]


def like_on_gpu(t: torch.Tensor) -> torch.Tensor:
    """A copy on the GPU with the same strides, and everything around it."""
    storage = torch.empty(t.untyped_storage().nbytes() // t.element_size(), dtype=t.dtype, device="cuda")
    raw_bytes(storage).copy_(raw_bytes(t))
    return storage.as_strided(t.shape, t.stride(), t.storage_offset())


def call(
    o: torch.Tensor,
    positions: torch.Tensor,
    groups: int,
    kind: str,
    outputs: Any,
    table: torch.Tensor,
    pdl: bool = False,
) -> None:
    out, scale_out = outputs
    fused_inv_rope_fp8_quant(
        o, positions, table, groups, o.shape[1] // groups, tma_aligned_scales=kind == "packed",
        quantize=kind != "none", out=out, scale_out=scale_out, use_pdl=pdl,
    )  # fmt: skip


def on_gpu(o: torch.Tensor, positions: torch.Tensor, groups: int, kind: str, outputs: Any, pdl: bool = False) -> Any:
    """Run the kernel on copies of everything; returns the copies of the outputs."""
    copies = tuple(None if t is None else like_on_gpu(t) for t in outputs)
    with record_calls() as recording:
        call(like_on_gpu(o), like_on_gpu(positions), groups, kind, copies, TABLE.cuda(), pdl)
    assert [entry.implementation for entry in recording.calls] == ["kernel"]
    return copies


def check(o: torch.Tensor, positions: torch.Tensor, groups: int, kind: str, pdl: bool = False) -> None:
    """Every byte of both outputs' buffers, the gaps included."""
    outputs = poisoned_outputs(o.shape[0], groups, o.shape[1] // groups, kind)
    got = on_gpu(o, positions, groups, kind, outputs, pdl)
    call(o, positions, groups, kind, outputs, TABLE)
    for name, mine, want in zip(("out", "scale_out"), got, outputs, strict=True):
        if want is not None:
            assert torch.equal(raw_bytes(mine).cpu(), raw_bytes(want)), name


SHAPES = [
    (1, 1, 1),
    (1, 8, 8),
    (3, 2, 3),
    (4, 5, 1),
    (7, 1, 8),
    (8, 16, 8),
    (9, 3, 2),
    (EARLY_TOKENS, 8, 8),
    (EARLY_TOKENS + 1, 8, 8),
    (33, 16, 2),
    (64, 8, 8),
    (130, 4, 16),
    (257, 1, 33),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("tokens", "groups", "per_group"), SHAPES)
def test_every_byte(tokens: int, groups: int, per_group: int, kind: str) -> None:
    check(head_slice(tokens, groups * per_group, seed=tokens), positions_of(tokens), groups, kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [FEW_ROWS, MANY_ROWS])
@pytest.mark.parametrize("heads", [1, 5, 64])
def test_every_byte_of_calls_with_more_rows(heads: int, rows: int, kind: str) -> None:
    tokens = rows // heads + 5
    check(head_slice(tokens, heads, seed=heads), positions_of(tokens), 1, kind)


def test_against_the_oracle() -> None:
    o, positions = head_slice(9, 6, seed=3), positions_of(9)
    out, scale = on_gpu(o, positions, 2, "fp32", poisoned_outputs(9, 2, 3, "fp32"))
    x = o.float().numpy().copy()
    for t, position in enumerate(positions.tolist()):
        row = TABLE[min(max(position, 0), len(TABLE) - 1)].numpy()
        x[t, :, 448:] = oracle.rope_f32(x[t, :, 448:], row[:32], row[32:], inverse=True)
    codes, byte = oracle.quantize_blocks(x.reshape(-1, 512).astype(np.float64), 128, "e4m3", floor=1e-10)
    np.testing.assert_array_equal(out.cpu().contiguous().view(torch.uint8).numpy().reshape(-1, 512), codes)
    want = np.float32(2.0) ** (byte.astype(np.int32).reshape(9, 2, 12) - 127)
    np.testing.assert_array_equal(scale[:, :, :9].cpu().permute(2, 0, 1).numpy(), want)
    assert not scale[:, :, 9:].any()


def test_every_bf16_number() -> None:
    """Blocks of one magnitude and of all, subnormals, infinities and NaN of both signs."""
    patterns = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    ordered = patterns.view(16, 8, 512)
    shuffled = patterns[torch.randperm(2**16, generator=generator(0))].view(16, 8, 512)
    for o in (ordered, shuffled):
        for kind in ("fp32", "packed"):
            check(o.clone(), positions_of(16, seed=1), 2, kind)


def test_unquantized_numbers_keep_their_bits() -> None:
    """All but NaN, whose bits are nobody's business."""
    patterns = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(16, 8, 512).clone()
    outputs = poisoned_outputs(16, 2, 4, "none")
    (got, _) = on_gpu(patterns, positions_of(16), 2, "none", outputs)
    call(patterns, positions_of(16), 2, "none", outputs, TABLE)
    mine, want = got.cpu(), outputs[0]
    assert torch.equal(mine.isnan(), want.isnan())
    assert torch.equal(bits(mine.nan_to_num(nan=0.0)), bits(want.nan_to_num(nan=0.0)))


def test_ties_floors_and_zeros() -> None:
    o = torch.zeros(6, 4, 512, dtype=torch.bfloat16)
    ties = torch.tensor([17.0, 19.0, 21.0, -23.0, 2.0**-10, 3 * 2.0**-10, 464.0, 448.0, -0.0])
    o[:, 0, :9], o[:, 0, 128:137], o[:, 0, 448:457] = ties, -ties, ties * 2.0**-20
    for t, largest in enumerate((0.0, 2.0**-40, 1.1e-10, 1e-5, 448.0, 450.0)):
        o[t, 1, 5::128] = -largest
    o[:, 2, :] = -0.0
    o[:, 3, :] = 3.38e38
    for kind in KINDS:
        check(o, torch.tensor([0, 0, 1, 2, 2999, 77]), 2, kind)


def test_no_position_reaches_beyond_the_table() -> None:
    """One row, and NaN around it."""
    memory = torch.full((3, 64), float("nan"), device="cuda")
    memory[1, :32], memory[1, 32:] = 0.6, 0.8
    o = spread((len(KNOWN), 2, 512), seed=1)
    positions = torch.tensor(KNOWN)
    outputs = poisoned_outputs(len(KNOWN), 1, 2, "fp32")
    got = tuple(like_on_gpu(t) for t in outputs if t is not None)
    call(o.cuda(), positions.cuda(), 1, "fp32", got, memory[1:2])
    call(o, positions, 1, "fp32", outputs, memory[1:2].cpu())
    assert torch.equal(raw_bytes(got[0]).cpu(), raw_bytes(outputs[0]))


def test_strided_positions_and_table_and_default_outputs() -> None:
    o, positions = head_slice(21, 8, seed=2), positions_of(21)
    wide = torch.zeros(21, 3, dtype=torch.int64)
    wide[:, 1] = positions
    table = torch.full((3000, 72), float("nan"))
    table[:, 4:68] = TABLE
    want = fused_inv_rope_fp8_quant(o, positions, TABLE, 2, 4)
    got = fused_inv_rope_fp8_quant(like_on_gpu(o), like_on_gpu(wide)[:, 1], like_on_gpu(table)[:, 4:68], 2, 4)
    for mine, theirs in zip(got, want, strict=True):
        assert mine.stride() == theirs.stride()
        assert torch.equal(bits(mine.cpu()), bits(theirs))


def test_addresses_beyond_four_gigabytes() -> None:
    """Tokens of o and of out, and rows of the scales, that lie further apart than 32 bits can say."""
    gap = 2**31 + 64  # bytes of e4m3, half of those of bf16
    o, positions = spread((3, 2, 512), seed=4), positions_of(3)
    memory = torch.empty(2 * gap + 1024, dtype=torch.bfloat16, device="cuda")
    wide = memory.as_strided((3, 2, 512), (gap, 512, 1))
    wide.copy_(o)
    out = torch.empty(2 * gap + 1024, dtype=torch.float8_e4m3fn, device="cuda").as_strided((3, 1, 1024), (gap, 1024, 1))
    rows = 2**28 + 4
    scale = torch.empty(7 * rows + 4, device="cuda").as_strided((1, 8, 4), (8 * rows, rows, 1))
    call(wide, positions.cuda(), 1, "fp32", (out, scale), TABLE.cuda())
    want, want_scale = fused_inv_rope_fp8_quant(o, positions, TABLE, 1, 2)
    assert torch.equal(bits(out.cpu()), bits(want))
    assert torch.equal(scale.permute(2, 0, 1)[:3].cpu(), want_scale)


def test_shapes_and_strides_need_no_new_kernel() -> None:
    for kind in KINDS:
        for tokens in (2, EARLY_TOKENS + 1, FEW_ROWS + 1, MANY_ROWS):
            check(head_slice(tokens, 1, 0), positions_of(tokens), 1, kind)
    before = compile_.compilations()
    for kind in KINDS:
        for tokens, groups, per_group in ((1, 2, 3), (10, 1, 7), (33, 16, 2), (129, 8, 8)):
            check(head_slice(tokens, groups * per_group, 1), positions_of(tokens), groups, kind)
    assert compile_.compilations() == before


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_torch_compile(backend: str) -> None:
    def step(o: torch.Tensor, positions: torch.Tensor, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return fused_inv_rope_fp8_quant(o * 2, positions, table, 2, 2)

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=backend)
    for tokens in (5, 9):
        o, positions = spread((tokens, 4, 512), seed=tokens), positions_of(tokens)
        got = compiled(o.cuda(), positions.cuda(), TABLE.cuda())
        for mine, want in zip(got, step(o, positions, TABLE), strict=True):
            assert torch.equal(bits(mine.cpu()), bits(want))


def test_alignment_that_is_not_supported_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    o, positions, table = torch.zeros(3, 4, 520, dtype=torch.bfloat16).cuda(), positions_of(3).cuda(), TABLE.cuda()
    out = torch.zeros(3, 2, 1100, dtype=torch.float8_e4m3fn, device="cuda")
    good = {"o": o[..., :512], "positions": positions, "cos_sin_cache": table, "n_groups": 2, "heads_per_group": 2}
    odd = torch.zeros(3000, 66, device="cuda")
    for change, reason in (
        ({"o": o[..., 4:516]}, "rows of o must be 16-byte aligned"),
        ({"cos_sin_cache": odd[:, :64]}, "rows of cos_sin_cache must be 16-byte aligned"),
        ({"out": out[..., 4:1028]}, "rows of out must be 8-byte aligned"),
    ):
        with pytest.raises(NotImplementedError, match=f"{reason}.*{FALLBACK_VARIABLE}=reference"):
            fused_inv_rope_fp8_quant(**{**good, **change})
    monkeypatch.setenv(FALLBACK_VARIABLE, "reference")
    with record_calls() as recording:
        fused_inv_rope_fp8_quant(**{**good, "o": o[..., 4:516]})
    assert [entry.implementation for entry in recording.calls] == ["reference"]
