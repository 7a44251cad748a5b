# SPDX-License-Identifier: Apache-2.0
"""The kernels of the fused query norm, rotation and KV insert on a GPU, in its three forms.

The cache is compared byte for byte with the CPU implementation and with the oracle of tests/kv_cache/test_qnorm.py, the
queries with float64: nearest number or, where the last bits of the norm decide, its neighbour.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from cute_kernels.kv_cache.ops import quantize_and_insert_k_cache
from cute_kernels.kv_cache.verify_cases import query_difference
from cute_kernels.runtime import compile as compile_
from cute_kernels.runtime.ops import FALLBACK_VARIABLE
from cute_kernels.runtime.record import record_calls
from cute_kernels.runtime.verify import clone_arguments
from tests import helpers, oracle
from tests.kv_cache import test_qnorm as meaning
from tests.kv_cache.test_qnorm import MAX_POS, OPS, TABLE, Call, cache_after, cache_of, every_kind, make, q_after

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

DEVICE = "cuda"
WRONG_SLOTS = (-1, -7, 2**31, 2**32 + 1, -(2**62), 2**62, 2**63 - 1, -(2**63))


@pytest.fixture(autouse=True)
def no_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FALLBACK_VARIABLE, raising=False)


def on_gpu(call: Call) -> Call:
    """The same call with all memory behind its tensors on the GPU: views stay views."""
    return dict(zip(call, clone_arguments(tuple(call.values()), torch.device(DEVICE)), strict=True))


def run(kind: str, call: Call) -> None:
    with record_calls() as recording:
        OPS[kind][0](**call)
    assert [done.implementation for done in recording.calls] == ["kernel"]


def out_of(kind: str, call: Call) -> torch.Tensor:
    return call["q_fp8"] if kind == "fp8" else call["q"]


def steps(tensor: torch.Tensor) -> torch.Tensor:
    """Numbers as integers, neighbours one apart; NaN far away from all others and equal to itself."""
    integer = torch.int16 if tensor.dtype == torch.bfloat16 else torch.int8
    bits = tensor.cpu().contiguous().view(integer).int()
    ordered = torch.where(bits < 0, torch.iinfo(integer).min - bits, bits)
    return torch.where(tensor.cpu().float().isnan(), 10**6, ordered)


def assert_queries(kind: str, got: torch.Tensor, want: np.ndarray, scale: torch.Tensor | None = None) -> None:
    """got: what the kernel wrote; want: float64 values before the last rounding.

    One step off at most, or by the last bits of a pair's magnitude where its products cancel; and that seldom.
    """
    if kind == "fp8":
        assert scale is not None
        codes = oracle.e4m3_encode((want.astype(np.float32) * scale.numpy()).astype(np.float64))
        right = torch.from_numpy(codes).view(torch.float8_e4m3fn)
    else:
        right = torch.from_numpy(oracle.bf16_bytes(want)).view(torch.bfloat16)
    pairs = np.hypot(want[..., 448::2], want[..., 449::2]).repeat(2, axis=-1)
    magnitude = np.concatenate([np.zeros_like(want[..., :448]), pairs], axis=-1)
    off = (steps(got) - steps(right)).abs().numpy()
    apart = np.abs(oracle.to_numpy(got) - oracle.to_numpy(right))
    assert ((off <= 1) | (apart <= 2.0**-20 * magnitude)).all()
    assert (off != 0).sum() <= off.size / 1000 + 8


@np.errstate(over="ignore", invalid="ignore", divide="ignore")
def check(kind: str, call: Call) -> Call:
    """Run `call` on the GPU; the cache, the queries and everything else must be as they should. Returns the GPU's."""
    want_q, want_cache = q_after(call), cache_after(kind, call)
    cpu, gpu = call, on_gpu(call)
    before = {name: helpers.raw_bytes(value).clone() for name, value in gpu.items() if isinstance(value, torch.Tensor)}
    run(kind, gpu)
    OPS[kind][0](**cpu)
    cache_bytes = helpers.raw_bytes(cache_of(kind, gpu)).cpu()
    assert torch.equal(cache_bytes, helpers.raw_bytes(cache_of(kind, cpu)))
    assert torch.equal(cache_bytes, want_cache)
    assert_queries(kind, out_of(kind, gpu), want_q, call.get("q_scale_inv"))
    assert query_difference(out_of(kind, gpu).cpu(), out_of(kind, cpu)) == ""
    written = {"q_fp8" if kind == "fp8" else "q", OPS[kind][1]}
    for name in set(before) - written:
        assert torch.equal(helpers.raw_bytes(gpu[name]), before[name]), name
    return gpu


@every_kind
@pytest.mark.parametrize("heads", [0, 1, 2, 3, 5, 8, 13, 64, 127, 128])
def test_every_number_of_heads(kind: str, heads: int) -> None:
    check(kind, make(kind, 5, heads, seed=heads))


@every_kind
@pytest.mark.parametrize("n", [1, 2, 63, 257])
def test_every_number_of_rows(kind: str, n: int) -> None:
    check(kind, make(kind, n, 3, 16, seed=n))


@every_kind
@pytest.mark.parametrize(("block_size", "extra"), [(64, 0), (64, 1536), (2, 512), (1, 0), (100, 576)])
def test_page_sizes(kind: str, block_size: int, extra: int) -> None:
    check(kind, make(kind, 130, 2, block_size, extra if kind == "mla" else extra // 512 * 512))


@every_kind
def test_bad_slots_are_skipped(kind: str) -> None:
    call = make(kind, 12, 3)
    capacity = cache_of(kind, call).shape[0] * 4
    call["slot_mapping"] = torch.tensor([*WRONG_SLOTS, capacity, capacity + 1, 3, 5])
    check(kind, call)
    call = make(kind, 8, 3)
    call["slot_mapping"] = torch.tensor(WRONG_SLOTS)
    check(kind, call)


@every_kind
@pytest.mark.parametrize("rows", [0, 1, 6])
def test_padded_rows_get_their_q_only(kind: str, rows: int) -> None:
    call = make(kind, 9, 5, rows=rows)
    call["kv"][rows:] = math.nan
    call["positions"][rows:] = torch.tensor([-1, 2**62, -(2**63), MAX_POS, 10**6, 2**31, 2**32 + 3, 7, 8])[: 9 - rows]
    check(kind, call)


@every_kind
def test_a_long_table_and_positions_beyond_it(kind: str) -> None:
    call = make(kind, 9, 2)
    call["cos_sin_cache"] = TABLE[torch.arange(1_000_001) % MAX_POS]
    call["positions"] = torch.tensor([0, 999_999, 1_000_000, 1_000_001, 2**31, 2**40, -1, -(2**63), 2**63 - 1])
    check(kind, call)


@every_kind
def test_an_empty_pool_takes_nothing(kind: str) -> None:
    call = make(kind, 3, 2)
    call[OPS[kind][1]] = OPS[kind][2].allocate(0, 4)
    check(kind, call)


@every_kind
def test_extreme_values(kind: str) -> None:
    """Zero rows, negative zeros, the largest and smallest numbers; a table whose products overflow or cancel."""
    call = make(kind, 6, 1, rows=6)
    for x in (call["q"][:, 0], call["kv"]):
        x[0] = 0.0
        x[1] = -0.0
        x[2] = 3e38 if x is call["kv"] else 5e17
        x[3] = 1e-37
        x[4, :448], x[4, 448:] = 1e-5, 448.0
        x[5] = torch.tensor([1.0, -1.0]).repeat(256)
    call["cos_sin_cache"] = TABLE.clone()
    call["cos_sin_cache"][7] = 2.0
    call["cos_sin_cache"][255] = 1.0
    call["positions"][:] = torch.tensor([0, 3, 128, 127, 9, 255])
    call["slot_mapping"] = torch.tensor([0, 1, 2, 3, 4, 5])
    check(kind, call)


@every_kind
def test_nan_and_infinity_stay_in_their_row(kind: str) -> None:
    call, clean = make(kind, 6, 3, rows=6), make(kind, 6, 3, rows=6)
    for c in (call, clean):
        c["slot_mapping"] = torch.arange(6)
    call["q"][1, 1, 5] = math.nan
    call["q"][2, 0, 500] = math.inf
    call["q"][3, 2] = -math.nan
    call["kv"][1, 70] = math.nan
    call["kv"][2, 3] = -math.inf
    call["kv"][4, :448] = math.nan
    call["kv"].view(torch.int16)[5, :448:3] = -0x0040  # NaN with a sign
    call["q"].view(torch.int16)[4, 1] = -0x0001
    want = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in call.items()}
    want[OPS[kind][1]] = make(kind, 6, 3, rows=6)[OPS[kind][1]]
    OPS[kind][0](**want)
    gpu, undisturbed = on_gpu(call), on_gpu(clean)
    run(kind, gpu)
    run(kind, undisturbed)
    out, other = out_of(kind, gpu).cpu(), out_of(kind, undisturbed).cpu()
    assert int((steps(out) - steps(out_of(kind, want))).abs().max()) <= 1
    touched = torch.zeros(6, 3, dtype=torch.bool)
    touched[1, 1] = touched[2, 0] = touched[3, 2] = touched[4, 1] = True
    assert torch.equal(helpers.bits(out[~touched]), helpers.bits(other[~touched]))
    assert bool(out.float()[touched].isnan().any(dim=1).all())
    if kind == "bf16":
        assert torch.equal(steps(cache_of(kind, gpu)), steps(cache_of(kind, want)))
    else:
        assert torch.equal(helpers.raw_bytes(cache_of(kind, gpu)).cpu(), helpers.raw_bytes(cache_of(kind, want)))


@every_kind
def test_every_bf16_number_in_the_cache(kind: str) -> None:
    """All finite numbers in the columns that are not turned; the rope columns turn by a quarter, which is exact."""
    finite = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    finite = finite[finite.isfinite()]
    values = torch.nn.functional.pad(finite, (0, -len(finite) % 448)).view(-1, 448)
    call = make(kind, len(values), 1, 16, rows=len(values))
    call["kv"][:, :448] = values
    call["kv"][:, 448:] = torch.randn(len(values), 64, generator=helpers.generator(3)).bfloat16()
    call["slot_mapping"] = torch.arange(len(values))
    table = torch.zeros(1, 64)
    table[0, 32:] = 1.0
    check(kind, call | {"cos_sin_cache": table})


@pytest.mark.parametrize(("scale", "inverse"), [(1.0, 1.0), (0.013, 77.0), (2.0**-20, 2.0**20), (1e30, 1e-30)])
def test_fp8_scales(scale: float, inverse: float) -> None:
    call = make("fp8", 60, 2, seed=3)
    check("fp8", call | {"fp8_kv_scale": torch.tensor([scale]), "q_scale_inv": torch.tensor([inverse])})


def test_fp8_by_a_zero_scale() -> None:
    call = make("fp8", 3, 1) | {"slot_mapping": torch.arange(3), "fp8_kv_scale": torch.zeros(1)}
    call["kv"][0, :10] = 0.0
    check("fp8", call)


@every_kind
def test_without_the_norm_q_is_rotated_exactly(kind: str) -> None:
    for n, heads in ((9, 4), (70, 3), (2000, 3)):
        call = make(kind, n, heads) | {"apply_q_norm": False}
        gpu = on_gpu(call)
        run(kind, gpu)
        OPS[kind][0](**call)  # the reference
        for name in ("q", *(["q_fp8"] if kind == "fp8" else [])):
            assert torch.equal(helpers.bits(gpu[name].cpu()), helpers.bits(call[name]))


def test_the_cache_is_that_of_the_separate_ops() -> None:
    call = make("mla", 200, 1, 64)
    rows = torch.from_numpy(oracle.bf16_bytes(meaning.kv_after(call))).view(torch.bfloat16)
    together, apart = on_gpu(call), on_gpu(call)
    run("mla", together)
    quantize_and_insert_k_cache(rows.to(DEVICE), apart["k_cache"], apart["slot_mapping"])
    assert torch.equal(helpers.raw_bytes(together["k_cache"]), helpers.raw_bytes(apart["k_cache"]))


def test_flat_cache_view() -> None:
    call = make("mla", 9, 1, 64)
    want = cache_after("mla", call)
    gpu = on_gpu(call)
    pool = gpu["k_cache"]
    gpu["k_cache"] = pool.as_strided((pool.shape[0], pool.stride(0)), (pool.stride(0), 1))
    run("mla", gpu)
    assert torch.equal(helpers.raw_bytes(pool).cpu(), want)


@every_kind
def test_a_row_does_not_depend_on_its_batch(kind: str) -> None:
    """Some tokens alone, some heads alone: the bits of the whole batch."""
    call = make(kind, 90, 37, 16, seed=7)
    whole = on_gpu(call)
    run(kind, whole)
    for t, heads in ((0, slice(0, 37)), (89, slice(36, 37)), (31, slice(1, 3)), (64, slice(5, 37)), (2, slice(0, 1))):
        part = on_gpu(call)
        for name in ("kv", "slot_mapping", "positions"):
            part[name] = part[name][t : t + 1]
        for name in {"q", "q_fp8"} & set(part):
            part[name] = part[name][t : t + 1, heads]
        run(kind, part)
        assert torch.equal(helpers.bits(out_of(kind, part)), helpers.bits(out_of(kind, whole)[t : t + 1, heads]))


@every_kind
def test_same_bits_every_time_and_with_every_number_of_rows_per_warp(kind: str) -> None:
    from cute_kernels.kv_cache import qnorm
    from cute_kernels.runtime.arch import arch_of

    call = make(kind, 200, 13, 16, seed=9)
    first = on_gpu(call)
    run(kind, first)
    for _ in range(20):
        again = on_gpu(call)
        run(kind, again)
        assert torch.equal(helpers.bits(out_of(kind, again)), helpers.bits(out_of(kind, first)))
        assert torch.equal(helpers.raw_bytes(cache_of(kind, again)), helpers.raw_bytes(cache_of(kind, first)))
    for rows in (1, 2, 4):
        c = on_gpu(call)
        key = qnorm.QnormKey(arch_of(0), c["kv_format"], rows=rows)
        where = c["slot_mapping"], c["positions"], c["cos_sin_cache"], c["eps"], c["block_size"]
        out = (0, 0, 0, 0, 0)
        if kind == "fp8":
            scales = c["fp8_kv_scale"].data_ptr(), c["q_scale_inv"].data_ptr()
            out = c["q_fp8"].data_ptr(), c["q_fp8"].stride(0), c["q_fp8"].stride(1), *scales
        qnorm.launch_with(key, c["q"], c["kv"], cache_of(kind, c), *where, False, out)
        assert torch.equal(helpers.bits(out_of(kind, c)), helpers.bits(out_of(kind, first)))
        assert torch.equal(helpers.raw_bytes(cache_of(kind, c)), helpers.raw_bytes(cache_of(kind, first)))


@every_kind
def test_pool_beyond_eight_gigabytes(kind: str) -> None:
    fmt, block_size = OPS[kind][2], 64
    stride = fmt.page_stride(block_size)
    num_blocks = 2**33 // stride + 10
    edges = [size // stride for size in (2**31, 2**32, 2**33)]
    pages = torch.tensor([0, *(page + step for page in edges for step in (-1, 0, 1)), num_blocks - 1])
    slots = torch.cat([pages * block_size + row for row in (0, 31, 63)])
    call = make(kind, len(slots), 2, block_size, 0) | {"slot_mapping": slots}
    cache = torch.empty(num_blocks * stride, dtype=torch.uint8, device=DEVICE)
    cache.fill_(helpers.POISON_BYTE)
    pool = cache.view(fmt.dtype).as_strided(
        (num_blocks, block_size, fmt.row_elements), (stride // fmt.dtype.itemsize, fmt.row_elements, 1)
    )
    run(kind, on_gpu({k: v for k, v in call.items() if k != OPS[kind][1]}) | {OPS[kind][1]: pool})
    call[OPS[kind][1]] = helpers.poisoned_pool(fmt, len(pages), block_size)
    call["slot_mapping"] = torch.cat([torch.arange(len(pages)) * block_size + row for row in (0, 31, 63)])
    OPS[kind][0](**call)
    storage = cache.view(num_blocks, stride)
    want = helpers.raw_bytes(cache_of(kind, call)).view(-1, stride)
    assert torch.equal(storage[pages.to(DEVICE)].cpu(), want)
    storage[pages.to(DEVICE)] = helpers.POISON_BYTE
    assert all(bool((part == helpers.POISON_BYTE).all()) for part in storage.split(16384))


@every_kind
def test_q_and_kv_beyond_four_gigabytes(kind: str) -> None:
    """Token 1 starts past 2^31 bytes, token 2 past 2^32; then the same for heads."""
    gap = 2**30 + 8  # elements
    wide = torch.empty(2 * gap + 8192, dtype=torch.bfloat16, device=DEVICE)
    call = make(kind, 3, 2)
    gpu = on_gpu(call)
    for name, view in (
        ("q", wide.as_strided((3, 2, 512), (gap, 512, 1))),
        ("kv", wide[4096:].as_strided((3, 512), (gap, 1))),
    ):
        gpu[name] = view.copy_(call[name])
    want_q, want_cache = q_after(call), cache_after(kind, call)
    run(kind, gpu)
    assert torch.equal(helpers.raw_bytes(cache_of(kind, gpu)).cpu(), want_cache)
    assert_queries(kind, out_of(kind, gpu), want_q, call.get("q_scale_inv"))
    by_head = wide.as_strided((1, 3, 512), (512, gap, 1))
    call = make(kind, 1, 3)
    by_head.copy_(call["q"])
    gpu = on_gpu(call) | {"q": by_head}
    want_q = q_after(call)
    run(kind, gpu)
    assert_queries(kind, out_of(kind, gpu), want_q, call.get("q_scale_inv"))


def test_shapes_and_strides_need_no_new_kernel() -> None:
    for n in (1, 1025):
        run("mla", on_gpu(make("mla", n, 1)))
    before = compile_.compilations()
    for n, heads, block_size, extra in ((1, 128, 64, 0), (33, 7, 2, 576), (700, 1, 7, 64)):
        check("mla", make("mla", n, heads, block_size, extra))
    assert compile_.compilations() == before


def test_alignment_that_is_not_supported_says_so() -> None:
    def shifted(x: torch.Tensor, elements: int) -> torch.Tensor:
        memory = torch.empty(x.numel() + 64, dtype=x.dtype, device=x.device)
        return memory[elements:].as_strided(x.shape, x.stride()).copy_(x)

    for kind, name, elements in (
        ("mla", "q", 1),
        ("mla", "kv", 4),
        ("mla", "cos_sin_cache", 2),
        ("mla", "k_cache", 4),
        ("bf16", "kv_cache", 4),
        ("fp8", "kv_cache", 4),
        ("fp8", "q_fp8", 4),
    ):
        gpu = on_gpu(make(kind, 3, 2))
        gpu[name] = shifted(gpu[name], elements) if name != OPS[kind][1] else _shifted_pool(kind, elements)
        before = helpers.raw_bytes(cache_of(kind, gpu)).clone()
        with pytest.raises(NotImplementedError, match=f"byte aligned.*{FALLBACK_VARIABLE}=reference"):
            OPS[kind][0](**gpu)
        assert torch.equal(helpers.raw_bytes(cache_of(kind, gpu)), before)


def _shifted_pool(kind: str, elements: int) -> torch.Tensor:
    pool = make(kind, 3, 2)[OPS[kind][1]]
    memory = torch.zeros(pool.untyped_storage().nbytes() + 64, dtype=torch.uint8, device=DEVICE).view(pool.dtype)
    return memory[elements:].as_strided(pool.shape, pool.stride())
