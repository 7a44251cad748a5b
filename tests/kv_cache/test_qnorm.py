# SPDX-License-Identifier: Apache-2.0
"""The fused query norm, rotation and KV insert in its three forms."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cute_kernels import formats
from cute_kernels.kv_cache.ops import (
    fused_deepseek_v4_qnorm_rope_kv_rope_full_cache_bf16_insert,
    fused_deepseek_v4_qnorm_rope_kv_rope_full_cache_fp8_insert,
    fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert,
    quantize_and_insert_k_cache,
)
from cute_kernels.runtime.record import record_calls
from tests import helpers, oracle
from tests.kv_cache import expected

MLA, BF16, FP8 = formats.FP8_DS_MLA, formats.PLAIN_BF16, formats.PLAIN_FP8
EPS = 1e-6
MAX_POS = 400
TABLE = oracle.cos_sin_table(MAX_POS)
Call = dict[str, Any]
OPS: dict[str, tuple[Callable[..., None], str, Any]] = {
    "mla": (fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert, "k_cache", MLA),
    "bf16": (fused_deepseek_v4_qnorm_rope_kv_rope_full_cache_bf16_insert, "kv_cache", BF16),
    "fp8": (fused_deepseek_v4_qnorm_rope_kv_rope_full_cache_fp8_insert, "kv_cache", FP8),
}
every_kind = pytest.mark.parametrize("kind", list(OPS))


def positions_for(n: int, seed: int = 0) -> torch.Tensor:
    """0, 3, 7, 127, 128, 255 and then any."""
    special = torch.tensor([0, 3, 7, 127, 128, 255])
    more = torch.randint(0, MAX_POS, (n,), generator=helpers.generator(seed))
    return torch.cat([special, more])[:n]


def make(
    kind: str, n: int = 9, heads: int = 3, block_size: int = 4, extra: int = 512, seed: int = 0, rows: int | None = None
) -> Call:
    """Arguments in schema order; slots are a random choice, one of them -1 and one past the end."""
    _, cache_name, fmt = OPS[kind]
    rows = n if rows is None else rows
    num_blocks = n // block_size + 2
    slots = torch.randperm(num_blocks * block_size, generator=helpers.generator(seed + 1))[:rows]
    if rows > 3:
        slots[1], slots[3] = -1, num_blocks * block_size
    call: Call = {"q": helpers.spread((n, heads, 512), seed), "kv": helpers.spread((n, 512), seed + 2)}
    if kind == "fp8":
        q_fp8 = torch.empty(n, heads, 512, dtype=torch.float8_e4m3fn)
        q_fp8.view(torch.uint8).fill_(helpers.POISON_BYTE)
        call["q_fp8"] = q_fp8
    call[cache_name] = helpers.poisoned_pool(fmt, num_blocks, block_size, extra)
    call |= {"slot_mapping": slots, "positions": positions_for(n, seed), "cos_sin_cache": TABLE}
    if kind == "fp8":
        call |= {"fp8_kv_scale": torch.tensor([0.7]), "q_scale_inv": torch.tensor([3.3])}
    return call | {"eps": EPS, "block_size": block_size, "apply_q_norm": True, "kv_format": fmt.id}


def run(kind: str, call: Call) -> None:
    assert OPS[kind][0](**call) is None


def cache_of(kind: str, call: Call) -> torch.Tensor:
    return call[OPS[kind][1]]


def q_after(call: Call) -> np.ndarray:
    """float64 values of the queries before their last rounding; every step in fp32 or better."""
    x = oracle.to_numpy(call["q"])
    if call.get("apply_q_norm", True):
        x = oracle.rms_norm(x, None, call["eps"]).astype(np.float32)
    return expected.turn(x, call["positions"], call["cos_sin_cache"]).astype(np.float64)


def kv_after(call: Call) -> np.ndarray:
    rows = call["slot_mapping"].shape[0]
    return expected.turn(oracle.to_numpy(call["kv"])[:rows], call["positions"][:rows], call["cos_sin_cache"])


def cache_after(kind: str, call: Call) -> torch.Tensor:
    """All bytes of the pool after the call."""
    cache, rows, slots, block_size = cache_of(kind, call), kv_after(call), call["slot_mapping"], call["block_size"]
    if kind == "mla":
        rounded = torch.from_numpy(oracle.bf16_bytes(rows)).view(torch.bfloat16)
        return expected.insert_mla(cache, block_size, slots, rounded)
    if kind == "bf16":
        return expected.insert_plain(cache, block_size, slots, oracle.bf16_bytes(rows))
    codes = oracle.e4m3_encode((rows / call["fp8_kv_scale"].numpy()).astype(np.float64))
    return expected.insert_plain(cache, block_size, slots, codes)


def assert_bf16_close(got: torch.Tensor, want: np.ndarray) -> None:
    """Equal after rounding, up to one step where the last bits of the norm decide."""
    rounded = oracle.bf16_round(want)
    off = oracle.to_numpy(got) != rounded
    assert off.sum() <= off.size / 1000
    step = np.exp2(np.floor(np.log2(np.maximum(np.abs(want), 1e-30))) - 7)
    assert (np.abs(oracle.to_numpy(got) - want) <= 0.502 * step)[off].all()


@np.errstate(over="ignore", invalid="ignore")
def check(kind: str, call: Call) -> None:
    q, want_q, want_cache = call["q"].clone(), q_after(call), cache_after(kind, call)
    kv = call["kv"].clone()
    run(kind, call)
    assert torch.equal(helpers.raw_bytes(cache_of(kind, call)), want_cache)
    assert torch.equal(call["kv"].view(torch.int16), kv.view(torch.int16))
    if kind == "fp8":
        assert torch.equal(call["q"].view(torch.int16), q.view(torch.int16))
        scaled = (want_q.astype(np.float32) * call["q_scale_inv"].numpy()).astype(np.float64)
        got, want = call["q_fp8"].view(torch.uint8).numpy(), oracle.e4m3_encode(scaled)
        # A code may differ by one where a value lies on the border between two.
        assert (got != want).sum() <= want.size / 1000
        assert (np.abs(got.astype(int) - want.astype(int)) <= 1).all()
    else:
        assert_bf16_close(call["q"], want_q)


@every_kind
@pytest.mark.parametrize(("n", "heads"), [(1, 8), (2, 128), (9, 1), (23, 5), (3, 0), (0, 4)])
def test_against_the_oracle(kind: str, n: int, heads: int) -> None:
    check(kind, make(kind, n, heads, seed=n))


@every_kind
@pytest.mark.parametrize(("block_size", "extra"), [(64, 0), (64, 1536), (2, 512), (1, 0)])
def test_page_sizes(kind: str, block_size: int, extra: int) -> None:
    check(kind, make(kind, 7, 2, block_size, extra))


@every_kind
@pytest.mark.parametrize("rows", [0, 1, 6])
def test_padded_rows_get_their_q_only(kind: str, rows: int) -> None:
    """kv rows behind the slot mapping are NaN and their positions senseless; neither reaches the cache."""
    call = make(kind, 9, 2, rows=rows)
    call["kv"][rows:] = math.nan
    call["positions"][rows:] = torch.tensor([-1, 2**62, -(2**63), MAX_POS, 10**6, 5, 6, 7, 8])[: 9 - rows]
    check(kind, call)


@every_kind
def test_bad_slots_are_skipped(kind: str) -> None:
    call = make(kind, 8, 1)
    call["slot_mapping"] = torch.tensor([-1, 2**31, 2**63 - 1, -(2**63), 2**32 + 1, 16, 3, -2])
    assert cache_of(kind, call).shape[0] * 4 == 16
    check(kind, call)
    call["slot_mapping"] = torch.full((8,), -1)
    check(kind, call)


@every_kind
def test_an_empty_pool_takes_nothing(kind: str) -> None:
    call = make(kind, 3, 2)
    call[OPS[kind][1]] = OPS[kind][2].allocate(0, 4)
    check(kind, call)


@every_kind
def test_values_that_break_kernels(kind: str) -> None:
    """Zero rows, negative zeros, the largest and smallest numbers; a table whose products overflow or cancel."""
    call = make(kind, 6, 1, rows=6)
    for x in (call["q"][:, 0], call["kv"]):
        x[0] = 0.0
        x[1] = -0.0
        x[2] = 3e38 if x is call["kv"] else 1e18
        x[3] = 1e-37
        x[4, :448], x[4, 448:] = 1e-5, 448.0
        x[5] = torch.tensor([1.0, -1.0]).repeat(256)
    call["cos_sin_cache"] = TABLE.clone()
    call["cos_sin_cache"][7] = 2.0
    call["cos_sin_cache"][255] = 1.0
    call["positions"][:] = torch.tensor([0, 3, 128, 127, 9, 255])
    call["slot_mapping"] = torch.tensor([0, 1, 2, 3, 4, 5])
    check(kind, call)


def test_a_quarter_turn_by_hand() -> None:
    """Column 448 + 2i with 448 + 2i + 1: (a, b) -> (-b, a); the other 448 columns never turn."""
    table = torch.zeros(2, 64)
    table[1, 32:] = 1.0
    kv = torch.arange(512.0).remainder(64).bfloat16().view(1, 512)
    q = torch.full((1, 1, 512), 2.0).bfloat16()
    cache = BF16.allocate(1, 1)
    fused_deepseek_v4_qnorm_rope_kv_rope_full_cache_bf16_insert(
        q, kv, cache, torch.tensor([0]), torch.tensor([1]), table, 0.0, 1
    )
    turned = torch.arange(64.0).view(32, 2).flip(1)
    turned[:, 0] *= -1
    assert torch.equal(cache[0, 0, :448].float(), kv[0, :448].float())
    assert torch.equal(cache[0, 0, 448:].float(), turned.flatten())
    assert q[0, 0, :448].unique().tolist() == [1.0]
    assert q[0, 0, 448:].view(32, 2).unique(dim=0).tolist() == [[-1.0, 1.0]]


def test_eps_and_the_norm_of_the_rope_columns() -> None:
    """All 512 columns count for the mean: x = 3, eps = 7 gives 3 / sqrt(9 + 7); without the norm nothing changes."""
    call = make("mla", 1, 1)
    call |= {"q": torch.full((1, 1, 512), 3.0).bfloat16(), "eps": 7.0, "positions": torch.tensor([0])}
    run("mla", call)
    assert call["q"].unique().tolist() == [0.75]
    call["q"] = torch.zeros(1, 1, 512).bfloat16()
    call["q"][0, 0, 511] = math.sqrt(512) * 2
    call["eps"] = 0.0
    run("mla", call)
    assert call["q"][0, 0, 511].item() == oracle.bf16_round(np.array([math.sqrt(512)]))[0]


@pytest.mark.parametrize("kind", ["mla", "bf16"])
def test_without_the_norm_q_is_rotated_exactly(kind: str) -> None:
    call = make(kind, 9, 4)
    call["apply_q_norm"] = False
    want = oracle.bf16_round(q_after(call))
    want_cache = cache_after(kind, call)
    before = call["q"].clone()
    run(kind, call)
    np.testing.assert_array_equal(oracle.to_numpy(call["q"]), want)
    assert torch.equal(call["q"][..., :448], before[..., :448])
    assert torch.equal(helpers.raw_bytes(call[OPS[kind][1]]), want_cache)


def test_without_the_norm_fp8_queries_are_rotated_and_scaled() -> None:
    call = make("fp8", 9, 4)
    call["apply_q_norm"] = False
    scaled = q_after(call).astype(np.float32) * call["q_scale_inv"].numpy()
    want = oracle.e4m3_encode(scaled.astype(np.float64))
    run("fp8", call)
    np.testing.assert_array_equal(call["q_fp8"].view(torch.uint8).numpy(), want)


def test_the_cache_is_that_of_the_separate_ops() -> None:
    call = make("mla", 20, 1, 64)
    rows = torch.from_numpy(oracle.bf16_bytes(kv_after(call))).view(torch.bfloat16)
    cache = call["k_cache"]
    apart = torch.empty_like(helpers.raw_bytes(cache)).copy_(helpers.raw_bytes(cache))
    quantize_and_insert_k_cache(rows, apart.as_strided(cache.shape, cache.stride()), call["slot_mapping"])
    run("mla", call)
    assert torch.equal(helpers.raw_bytes(cache), apart)


def test_fp8_is_not_rounded_to_bf16_in_between() -> None:
    """1.0625 + 2^-10 lies just above the tie of 1.0 and 1.125; bf16 would drop the 2^-10."""
    table = torch.zeros(1, 64)
    table[0, :32] = 1.0 + 2.0**-9
    value = 1.0625  # times the cosine: 1.0625 + 2^-9 + 2^-13
    call = make("fp8", 1, 1)
    call |= {"cos_sin_cache": table, "positions": torch.tensor([0]), "slot_mapping": torch.tensor([0])}
    call |= {"fp8_kv_scale": torch.ones(1), "q_scale_inv": torch.ones(1), "eps": 0.0}
    call["kv"] = torch.full((1, 512), value).bfloat16()
    call["q"] = torch.full((1, 1, 512), 17.0).bfloat16()  # normalized: 1
    call["q"][0, 0, 448:] = 17.0
    run("fp8", call)
    row = call["kv_cache"].view(torch.uint8)[0, 0]
    assert row[:448].unique().tolist() == [0x38]  # the tie goes to 1.0
    assert row[448:].unique().tolist() == [0x39]
    assert call["q_fp8"].view(torch.uint8).unique().tolist() == [0x38]


@pytest.mark.parametrize(("scale", "inverse"), [(1.0, 1.0), (0.013, 77.0), (2.0**-20, 2.0**20), (1e30, 1e-30)])
def test_fp8_scales(scale: float, inverse: float) -> None:
    call = make("fp8", 9, 2, seed=3)
    call |= {"fp8_kv_scale": torch.tensor([scale]), "q_scale_inv": torch.tensor([inverse])}
    check("fp8", call)


def test_fp8_special_values() -> None:
    """Saturation, NaN as 0x7F, a zero scale: no row but its own is touched."""
    call = make("fp8", 3, 2)
    call |= {"slot_mapping": torch.tensor([0, 1, 2]), "fp8_kv_scale": torch.tensor([1.0])}
    call["kv"][0], call["kv"][1] = 1000.0, math.nan
    call["q"][1, 0] = math.nan
    call["positions"][:] = 0
    neighbours = make("fp8", 3, 2) | {k: call[k] for k in ("slot_mapping", "fp8_kv_scale", "positions")}
    run("fp8", neighbours)
    run("fp8", call)
    codes = call["kv_cache"].view(torch.uint8)
    assert codes[0, 0].unique().tolist() == [0x7E]
    assert codes[0, 1].unique().tolist() == [0x7F]
    assert torch.equal(codes[0, 2], neighbours["kv_cache"].view(torch.uint8)[0, 2])
    q, other = call["q_fp8"].view(torch.uint8), neighbours["q_fp8"].view(torch.uint8)
    assert q[1, 0].unique().tolist() == [0x7F]
    assert torch.equal(q[1, 1], other[1, 1])
    assert torch.equal(q[[0, 2]], other[[0, 2]])
    call["fp8_kv_scale"] = torch.zeros(1)
    run("fp8", call)
    assert set(codes[0, 2].unique().tolist()) <= {0x7E, 0xFE, 0x7F}


def test_nan_of_rotated_columns() -> None:
    """As bf16 it is 0x7FFF, whatever its sign was; of the pair alone."""
    call = make("mla", 2, 2)
    call |= {"slot_mapping": torch.tensor([0, 1])}
    call["kv"][0, 450] = -math.nan
    run("mla", call)
    fmt, cache = MLA, cache_of("mla", call)
    values = fmt.read_fields(cache, cache.shape[1], torch.tensor([0]))[0][0, 448:].view(torch.int16)
    assert (values == 0x7FFF).nonzero()[:, 0].tolist() == [2, 3]
    assert int(fmt.read(cache, cache.shape[1], torch.tensor([0, 1])).isnan().sum()) == 2


@every_kind
def test_strided_arguments(kind: str) -> None:
    """q and kv are column slices, q_fp8 a head slice, the table has wide rows; all around them stays as it was."""
    call = make(kind, 7, 3)
    plain = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in call.items()}
    plain[OPS[kind][1]] = make(kind, 7, 3)[OPS[kind][1]]
    wide_q = torch.full((7, 5, 700), 5.0, dtype=torch.bfloat16)
    wide_q[:, 1:4, 100:612] = call["q"]
    wide_kv = torch.full((7, 1000), math.nan, dtype=torch.bfloat16)
    wide_kv[:, 488:] = call["kv"]
    wide_table = torch.full((MAX_POS, 100), math.nan)
    wide_table[:, 10:74] = TABLE
    call |= {"q": wide_q[:, 1:4, 100:612], "kv": wide_kv[:, 488:], "cos_sin_cache": wide_table[:, 10:74]}
    if kind == "fp8":
        wide_fp8 = torch.full((7, 8, 512), 1.0).to(torch.float8_e4m3fn)
        call["q_fp8"] = wide_fp8[:, 2:5]
    run(kind, call)
    run(kind, plain)
    assert torch.equal(call["q"].contiguous().view(torch.int16), plain["q"].view(torch.int16))
    assert torch.equal(helpers.raw_bytes(cache_of(kind, call)), helpers.raw_bytes(cache_of(kind, plain)))
    wide_q[:, 1:4, 100:612] = 5.0
    assert (wide_q == 5.0).all()
    if kind == "fp8":
        assert torch.equal(call["q_fp8"].float(), plain["q_fp8"].float())
        assert (wide_fp8.float()[:, [0, 1, 5, 6, 7]] == 1.0).all()


def test_flat_cache_view() -> None:
    call = make("mla", 9, 1, 64)
    pool = call["k_cache"]
    want = cache_after("mla", call)
    call["k_cache"] = pool.as_strided((pool.shape[0], pool.stride(0)), (pool.stride(0), 1))
    run("mla", call)
    assert torch.equal(helpers.raw_bytes(pool), want)


@every_kind
def test_a_row_does_not_depend_on_its_batch(kind: str) -> None:
    """Each token alone, in another order, head by head, gives the bits of the whole batch."""
    whole, alone = make(kind, 12, 4, seed=7), make(kind, 12, 4, seed=7)
    run(kind, whole)
    out = "q_fp8" if kind == "fp8" else "q"
    for t in torch.randperm(12, generator=helpers.generator(0)).tolist():
        for h in range(4):
            part = dict(alone)
            for name in ("kv", "slot_mapping", "positions"):
                part[name] = alone[name][t : t + 1]
            for name in ("q", "q_fp8"):
                if name in alone:
                    part[name] = alone[name][t : t + 1, h : h + 1]
            run(kind, part)
    assert torch.equal(whole[out].view(torch.uint8), alone[out].view(torch.uint8))
    assert torch.equal(helpers.raw_bytes(cache_of(kind, whole)), helpers.raw_bytes(cache_of(kind, alone)))


@settings(deadline=None, max_examples=20)
@given(
    st.sampled_from(list(OPS)),
    st.integers(0, 6),
    st.integers(0, 3),
    st.sampled_from([1, 3, 64]),
    st.integers(0, 6),
    st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(0, 20), min_size=6, max_size=6),
    st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(0, MAX_POS), min_size=6, max_size=6),
)
def test_any_slots_and_positions(
    kind: str, n: int, heads: int, block_size: int, rows: int, slots: list[int], positions: list[int]
) -> None:
    call = make(kind, n, heads, block_size, rows=min(rows, n))
    distinct = list(dict.fromkeys(slots))[: min(rows, n)]
    call |= {"slot_mapping": torch.tensor(distinct, dtype=torch.int64), "positions": torch.tensor(positions)[:n]}
    check(kind, call)


# ---- registration, compilation, arguments ----------------------------------------------------------------------------


@every_kind
def test_opcheck(kind: str) -> None:
    helpers.check_op(OPS[kind][0].__name__, *make(kind, 5, 2).values(), False)
    helpers.check_op(OPS[kind][0].__name__, *make(kind, 0, 2).values(), False)


@pytest.mark.full
@every_kind
def test_compiles_with_dynamic_shapes(kind: str) -> None:
    compiled = torch.compile(OPS[kind][0], fullgraph=True, backend="aot_eager", dynamic=True)
    for n, heads in ((3, 2), (6, 4)):
        call, eager = make(kind, n, heads), make(kind, n, heads)
        compiled(**call)
        run(kind, eager)
        assert torch.equal(helpers.raw_bytes(cache_of(kind, call)), helpers.raw_bytes(cache_of(kind, eager)))
        assert torch.equal(call["q"], eager["q"])
        if kind == "fp8":
            assert torch.equal(call["q_fp8"].view(torch.uint8), eager["q_fp8"].view(torch.uint8))


BAD: list[tuple[str, Any, type[Exception]]] = [
    ("q", torch.zeros(9, 3, 512), TypeError),
    ("q", torch.zeros(9, 512, dtype=torch.bfloat16), ValueError),
    ("q", torch.zeros(9, 3, 576, dtype=torch.bfloat16), ValueError),
    ("q", torch.zeros(9, 512, 3, dtype=torch.bfloat16).transpose(1, 2), ValueError),
    ("kv", torch.zeros(9, 512), TypeError),
    ("kv", torch.zeros(8, 512, dtype=torch.bfloat16), ValueError),
    ("kv", torch.zeros(9, 512, dtype=torch.bfloat16, device="meta"), ValueError),
    ("slot_mapping", torch.zeros(10, dtype=torch.int64), ValueError),
    ("slot_mapping", torch.zeros(9, dtype=torch.int32), TypeError),
    ("positions", torch.zeros(9, dtype=torch.int32), TypeError),
    ("positions", torch.zeros(8, dtype=torch.int64), ValueError),
    ("cos_sin_cache", torch.zeros(5, 64, dtype=torch.bfloat16), TypeError),
    ("cos_sin_cache", torch.zeros(5, 128), ValueError),
    ("cos_sin_cache", torch.zeros(0, 64), ValueError),
    ("cache", torch.zeros(4, 4, 100, dtype=torch.int16), TypeError),
    ("block_size", 5, ValueError),
    ("block_size", 0, ValueError),
    ("eps", -1e-6, ValueError),
    ("eps", math.nan, ValueError),
    ("kv_format", "indexer_fp8/1", ValueError),
]


@every_kind
@pytest.mark.parametrize(("argument", "value", "error"), BAD)
def test_bad_arguments(kind: str, argument: str, value: Any, error: type[Exception]) -> None:
    call = make(kind)
    before = helpers.raw_bytes(cache_of(kind, call)).clone()
    q = call["q"].clone()
    named = OPS[kind][1] if argument == "cache" else argument
    pool = cache_of(kind, call)
    call[named] = value
    if (argument, value) == ("block_size", 5):
        named = OPS[kind][1]  # it is the cache whose pages have another size
    with pytest.raises(error, match=f"^{OPS[kind][0].__name__}: {named}: expected "):
        run(kind, call)
    assert torch.equal(helpers.raw_bytes(pool), before)
    if argument != "q":
        assert torch.equal(call["q"], q)


@pytest.mark.parametrize(
    ("argument", "value", "error"),
    [
        ("q_fp8", torch.zeros(9, 3, 512, dtype=torch.uint8), TypeError),
        ("q_fp8", torch.zeros(9, 4, 512).to(torch.float8_e4m3fn), ValueError),
        ("fp8_kv_scale", 1.0, Exception),
        ("fp8_kv_scale", torch.ones(1, dtype=torch.float64), TypeError),
        ("fp8_kv_scale", torch.ones(()), ValueError),
        ("q_scale_inv", torch.ones(2), ValueError),
    ],
)
def test_bad_fp8_arguments(argument: str, value: Any, error: type[Exception]) -> None:
    call = make("fp8")
    before = call["q_fp8"].view(torch.uint8).clone()
    q_fp8 = call["q_fp8"]
    call[argument] = value
    with pytest.raises(error, match=argument):
        run("fp8", call)
    assert torch.equal(q_fp8.view(torch.uint8), before)


def test_costs() -> None:
    tokens, heads, inserted = 9, 3, 8
    small = tokens * (64 * 4 + 8) + tokens * 8
    q_bytes = {"mla": 4, "bf16": 4, "fp8": 3}
    record = {"mla": 584, "bf16": 1024, "fp8": 512}
    for kind in OPS:
        with record_calls() as recording:
            run(kind, make(kind, tokens, heads))
        (call,) = recording.calls
        assert call.op == OPS[kind][0].__name__
        assert call.cost.bytes == tokens * heads * 512 * q_bytes[kind] + inserted * (1024 + record[kind]) + small
        assert call.cost.flops > tokens * heads * 512 * 3
