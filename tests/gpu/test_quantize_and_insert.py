# SPDX-License-Identifier: Apache-2.0
"""The insert kernel on a GPU, byte for byte: against the CPU implementation and against tests/oracle.py."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from cute_kernels.formats import FP8_DS_MLA
from cute_kernels.kv_cache import insert
from cute_kernels.kv_cache.ops import quantize_and_insert_k_cache
from cute_kernels.runtime import compile as compile_
from cute_kernels.runtime.ops import FALLBACK_VARIABLE, OPS, define_op
from cute_kernels.runtime.record import record_calls
from tests import oracle
from tests.helpers import POISON_BYTE, generator, poisoned_pool, raw_bytes, spread

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

LENGTHS = (0, 1, 2, 3, 7, 64, 257, 1024, 4097)
BLOCK_SIZES = (1, 2, 16, 64, 256)


@pytest.fixture(autouse=True, params=["short", "long"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test with the kernel of short calls and with that of long ones."""
    monkeypatch.delenv(FALLBACK_VARIABLE, raising=False)
    monkeypatch.setattr(insert, "MANY_ROWS", 2**62 if request.param == "short" else 1)


def extra_bytes(stride: str, block_size: int) -> int:
    natural = FP8_DS_MLA.page_bytes(block_size) - FP8_DS_MLA.page_stride(block_size)
    return {"aligned": 0, "natural": natural, "+576": 576, "+64": 64, "+8": 8}[stride]


def flat(cache: torch.Tensor, block_size: int) -> torch.Tensor:
    return cache.as_strided((cache.shape[0], FP8_DS_MLA.page_bytes(block_size)), (cache.stride(0), 1))


def pools(num_blocks: int, block_size: int, extra: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Two equal poisoned pools, on the GPU and on the CPU."""
    return (
        poisoned_pool(FP8_DS_MLA, num_blocks, block_size, extra, device="cuda"),
        poisoned_pool(FP8_DS_MLA, num_blocks, block_size, extra),
    )


def slots_for(rows: int, capacity: int, seed: int) -> torch.Tensor:
    """Distinct slots in random order, every fifth of them replaced by one that names no row."""
    slots = torch.randperm(capacity, generator=generator(seed))[:rows]
    wrong = torch.tensor([-1, capacity, -7, capacity + 1, 2**32 + 1, -(2**62), 2**62, 2**31])
    bad = torch.arange(rows) % 5 == 3
    slots[bad] = wrong[torch.arange(int(bad.sum())) % len(wrong)]
    return slots


def check(
    k: torch.Tensor, slots: torch.Tensor, block_size: int, num_blocks: int, extra: int = 0, view: str = "3-D"
) -> torch.Tensor:
    """Insert on the GPU and on the CPU; every byte of the pools must agree. Returns the pool's bytes."""
    gpu, cpu = pools(num_blocks, block_size, extra)
    target = gpu if view == "3-D" else flat(gpu, block_size)
    with record_calls() as recording:
        quantize_and_insert_k_cache(k.cuda() if k.device.type == "cpu" else k, target, slots.cuda(), block_size)
    assert [call.implementation for call in recording.calls] == ["kernel"]
    quantize_and_insert_k_cache(k.cpu(), cpu, slots, block_size)
    assert torch.equal(raw_bytes(gpu).cpu(), raw_bytes(cpu))
    return raw_bytes(cpu)


def inserted(k: torch.Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(codes [T, 448], scale bytes [T, 8], rope bytes [T, 128]) that the kernel stores for k."""
    rows = k.shape[0]
    cache = poisoned_pool(FP8_DS_MLA, -(-rows // 64), 64, device="cuda")
    slots = torch.arange(rows, device="cuda")
    quantize_and_insert_k_cache(k.cuda(), cache, slots, 64)
    data, scales = FP8_DS_MLA.read_fields(cache, 64, slots)
    data, scales = data.cpu().numpy(), scales.cpu().numpy()
    return data[:, :448], scales, data[:, 448:]


def expected(k: torch.Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The same by the oracle, block by block."""
    x = oracle.to_numpy(k)
    rows = k.shape[0]
    codes, scales = np.zeros((rows, 448), dtype=np.uint8), np.zeros((rows, 8), dtype=np.uint8)
    largest = float(np.finfo(np.float32).max)
    for t in range(rows):
        for b in range(7):
            part = x[t, 64 * b : 64 * b + 64]
            absmax = float(np.max(np.abs(np.nan_to_num(part, nan=0.0, posinf=largest, neginf=-largest))))
            byte = oracle.ue8m0_byte(absmax, 448.0, 1e-4)
            codes[t, 64 * b : 64 * b + 64] = oracle.e4m3_encode(part * 2.0 ** (127 - byte))
            scales[t, b] = byte
    rope = k[:, 448:].cpu().contiguous().view(torch.uint8).numpy()
    return codes, scales, rope


def assert_same(got: tuple[np.ndarray, ...], want: tuple[np.ndarray, ...]) -> None:
    for name, g, w in zip(("codes", "scales", "rope"), got, want, strict=True):
        assert np.array_equal(g, w), f"{name}: {int((g != w).sum())} bytes differ, first at {np.argwhere(g != w)[:3]}"


@pytest.mark.parametrize("view", ["2-D", "3-D"])
@pytest.mark.parametrize("stride", ["aligned", "natural", "+576", "+64", "+8"])
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_every_byte_of_the_pool(block_size: int, stride: str, view: str) -> None:
    for rows in LENGTHS:
        num_blocks = -(-max(rows, 1) // block_size) + 2
        slots = slots_for(rows, num_blocks * block_size, rows)
        check(spread((rows, 512), rows), slots, block_size, num_blocks, extra_bytes(stride, block_size), view)


@pytest.mark.parametrize("block_size", [3, 5, 63, 100, 1000])
def test_block_sizes_that_are_no_power_of_two(block_size: int) -> None:
    num_blocks = -(-2000 // block_size)
    check(spread((1500, 512), 1), slots_for(1500, num_blocks * block_size, 2), block_size, num_blocks)


def test_random_bit_patterns_against_the_oracle() -> None:
    bits = torch.randint(-(2**15), 2**15, (257, 512), generator=generator(3), dtype=torch.int16)
    k = bits.view(torch.bfloat16)
    assert k.isnan().any()
    assert k.isinf().any()
    assert_same(inserted(k), expected(k))


def test_spread_values_against_the_oracle() -> None:
    k = spread((300, 512), 4)
    assert_same(inserted(k), expected(k))


def test_every_tie_of_e4m3() -> None:
    """Every code's value, every midpoint, and the bf16 numbers on both sides of it, at several scales."""
    grid = torch.from_numpy(oracle.E4M3[:0x7F])
    ties = ((grid[1:] + grid[:-1]) / 2).bfloat16()
    assert torch.equal(ties.double(), (grid[1:] + grid[:-1]) / 2)
    bits = ties.view(torch.int16)
    around = torch.cat([bits - 1, bits, bits + 1]).view(torch.bfloat16).double()
    values = torch.cat([grid, around, -grid, -around])
    values = torch.nn.functional.pad(values, (0, -len(values) % 63)).view(-1, 63)
    blocks = torch.nn.functional.pad(values, (0, 1), value=448.0)  # pins the scale of its block
    blocks = torch.cat([blocks * 2.0**e for e in (-22, -1, 0, 5, 60, 111)])
    blocks = torch.nn.functional.pad(blocks, (0, 0, 0, -len(blocks) % 7))
    k = torch.nn.functional.pad(blocks.view(-1, 448), (0, 64))
    assert torch.equal(k.bfloat16().double(), k)
    assert_same(inserted(k.bfloat16()), expected(k.bfloat16()))


def test_every_absmax() -> None:
    """Each finite positive bf16 as the only value of a block, at every column of it in turn."""
    bits = torch.arange(0, 0x7F80, dtype=torch.int16)
    count = bits.numel()
    rows = -(-count // 7)
    blocks = torch.zeros(rows * 7, 64, dtype=torch.bfloat16)
    blocks[torch.arange(count), torch.arange(count) % 64] = bits.view(torch.bfloat16)
    k = torch.zeros(rows, 512, dtype=torch.bfloat16)
    k[:, :448] = blocks.view(rows, 448)
    _, scales, _ = inserted(k)
    values = bits.view(torch.bfloat16).double().tolist()
    want = [oracle.ue8m0_byte(v, 448.0, 1e-4) for v in values]
    assert scales[:, :7].reshape(-1)[:count].tolist() == want
    assert not scales[:, 7].any()


@pytest.mark.parametrize("nan", [0x7FC0, -0x0040, 0x7F81, -0x0001], ids=lambda bits: f"{bits & 0xFFFF:#06x}")
def test_nan(nan: int) -> None:
    """NaN of either sign and any payload: code 0x7F, and no part in the absmax, alone in its block or not."""
    k = torch.randn(9, 512, generator=generator(5)).bfloat16()
    raw = k.view(torch.int16)
    raw[1, 70] = nan
    raw[2, :64] = nan
    raw[3] = nan
    raw[4, 448:] = nan
    raw[5, ::2] = nan
    raw[6, 1::2] = nan
    codes, scales, rope = inserted(k)
    assert_same((codes, scales, rope), expected(k))
    assert (codes[3] == 0x7F).all()
    assert (scales[3, :7] == 105).all()
    assert (codes[1, 64:128] == 0x7F).sum() == 1
    assert (rope.view(np.uint16)[4] == (nan & 0xFFFF)).all()


def test_infinity() -> None:
    k = torch.randn(6, 512, generator=generator(6)).bfloat16()
    k[1, 5] = math.inf
    k[2, 6] = -math.inf
    k[3] = math.inf
    k[4, :64] = torch.finfo(torch.bfloat16).max
    k[4, 3] = -math.inf
    k[5, 0], k[5, 1] = math.inf, math.nan
    codes, scales, rope = inserted(k)
    assert_same((codes, scales, rope), expected(k))
    assert (codes[1, 5], codes[2, 6], codes[5, 0], codes[5, 1]) == (0x7E, 0xFE, 0x7E, 0x7F)
    assert (codes[3] == 0x7E).all()


def test_zeros_and_tiny_values() -> None:
    k = torch.zeros(6, 512, dtype=torch.bfloat16)
    k[1] = -0.0
    k[2] = 1e-7
    k[3] = -3e-5
    k[4].view(torch.int16)[:] = 1  # the smallest subnormal
    k[5, :448] = 1e-4
    codes, scales, rope = inserted(k)
    assert_same((codes, scales, rope), expected(k))
    assert (scales[:5, :7] == 105).all()
    assert (codes[1] == 0x80).all()


def test_rope_is_copied_bit_for_bit() -> None:
    k = torch.zeros(1024, 512, dtype=torch.bfloat16)
    k.view(torch.int16)[:, 448:] = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(1024, 64)
    _, _, rope = inserted(k)
    assert np.array_equal(rope, k[:, 448:].contiguous().view(torch.uint8).numpy())


def test_strided_k() -> None:
    wide = spread((130, 1536), 7).cuda()
    slots = slots_for(130, 256, 8)
    for first in (0, 8, 512, 1024):
        check(wide[:, first : first + 512], slots, 64, 4)
    check(wide.as_strided((3, 512), (0, 1)), slots[:3], 64, 4)
    check(wide[:1].as_strided((1, 512), (513, 1)), slots[:1], 64, 4)
    check(torch.empty(0, 512, dtype=torch.bfloat16, device="cuda"), slots[:0], 64, 4)


def test_fewer_slots_than_rows() -> None:
    k = spread((100, 512), 9)
    k[60:] = math.nan
    for rows in (0, 1, 5, 60):
        check(k, slots_for(rows, 128, rows), 64, 2)


def test_an_empty_pool() -> None:
    check(spread((5, 512), 1), torch.arange(5), 64, 0)


def test_pool_beyond_two_gigabytes() -> None:
    block_size = 64
    stride = FP8_DS_MLA.page_stride(block_size)
    num_blocks = 2**31 // stride + 3000
    cache = poisoned_pool(FP8_DS_MLA, num_blocks, block_size, device="cuda")
    edge = 2**31 // stride
    pages = torch.tensor([0, edge - 1, edge, edge + 1, num_blocks - 1])
    slots = torch.cat([pages * block_size + row for row in (0, 31, 63)])
    k = spread((len(slots), 512), 11)
    quantize_and_insert_k_cache(k.cuda(), cache, slots.cuda(), block_size)
    small = poisoned_pool(FP8_DS_MLA, len(pages), block_size)
    renumbered = torch.cat([torch.arange(len(pages)) * block_size + row for row in (0, 31, 63)])
    quantize_and_insert_k_cache(k, small, renumbered, block_size)
    storage = raw_bytes(cache).view(num_blocks, stride)
    assert torch.equal(storage[pages.cuda()].cpu(), raw_bytes(small).view(-1, stride))
    storage[pages.cuda()] = POISON_BYTE
    assert all(bool((part == POISON_BYTE).all()) for part in storage.split(8192))


def test_k_rows_beyond_two_gigabytes() -> None:
    gap = 2**30 + 8  # elements: row 1 starts past 2^31 bytes, row 2 past 2^32
    wide = torch.empty(2 * gap + 512, dtype=torch.bfloat16, device="cuda").as_strided((3, 512), (gap, 1))
    wide.copy_(spread((3, 512), 12))
    check(wide, torch.tensor([5, 0, 99]), 64, 2)


def test_missing_kernel_during_capture_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    k = spread((4, 512), 16).cuda()
    cache = poisoned_pool(FP8_DS_MLA, 1, 64, device="cuda")
    slots = torch.arange(4, device="cuda")
    monkeypatch.setattr(compile_, "_linked", {})
    monkeypatch.setattr(compile_, "_functions", {})
    before = compile_.compilations()
    with pytest.raises(RuntimeError, match=r"InsertKey.*warmup"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        quantize_and_insert_k_cache(k, cache, slots, 64)
    torch.cuda.synchronize()
    assert compile_.compilations() == before
    assert bool((raw_bytes(cache) == POISON_BYTE).all())


def test_shapes_and_strides_need_no_new_kernel() -> None:
    check(spread((4, 512), 17), torch.arange(4), 64, 1)
    before = compile_.compilations()
    for rows, block_size, extra, view in ((1, 64, 0, "3-D"), (33, 2, 576, "2-D"), (700, 7, 64, "3-D")):
        num_blocks = -(-rows // block_size)
        check(spread((rows, 512), rows), torch.arange(rows), block_size, num_blocks, extra, view)
    assert compile_.compilations() == before


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_runs_on_the_tensors_device() -> None:
    values, slots = spread((100, 512), 19), torch.arange(100)
    want = poisoned_pool(FP8_DS_MLA, 2, 64)
    quantize_and_insert_k_cache(values, want, slots, 64)
    assert torch.cuda.current_device() == 0
    for device in ("cuda:1", "cuda:0", "cuda:1"):
        cache = poisoned_pool(FP8_DS_MLA, 2, 64, device=device)
        quantize_and_insert_k_cache(values.to(device), cache, slots.to(device), 64)
        assert torch.cuda.current_device() == 0
        assert torch.equal(raw_bytes(cache).cpu(), raw_bytes(want))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_torch_compile(backend: str) -> None:
    def step(k: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        quantize_and_insert_k_cache(k * 2, cache, slots, 64)
        return k + 1

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=backend)
    for rows in (5, 130):
        k, slots = spread((rows, 512), rows), slots_for(rows, 256, rows)
        cache, want = pools(4, 64)
        out = compiled(k.cuda(), cache, slots.cuda())
        quantize_and_insert_k_cache(k * 2, want, slots, 64)
        assert torch.equal(raw_bytes(cache).cpu(), raw_bytes(want))
        assert torch.equal(out.cpu(), k + 1)


def test_alignment_that_is_not_supported_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = spread((10, 1024), 21).cuda()
    slots = torch.arange(10, device="cuda")
    memory = torch.full((40000,), POISON_BYTE, dtype=torch.uint8, device="cuda")
    good = memory[8:].as_strided((1, 64, 584), (37440, 584, 1))
    shifted = memory[4:].as_strided((1, 64, 584), (37440, 584, 1))
    odd = memory.as_strided((2, 16, 584), (16 * 584 + 4, 584, 1))
    quantize_and_insert_k_cache(wide[:, :512], good, slots, 64)
    for k, cache, block_size, reason in (
        (wide[:, 1:513], good, 64, "rows of k must be 16-byte aligned"),
        (wide[:, :512], shifted, 64, "pages of k_cache must be 8-byte aligned"),
        (wide[:, :512], odd, 16, "pages of k_cache must be 8-byte aligned"),
    ):
        with pytest.raises(NotImplementedError, match=f"{reason}.*{FALLBACK_VARIABLE}=reference"):
            quantize_and_insert_k_cache(k, cache, slots, block_size)
    monkeypatch.setenv(FALLBACK_VARIABLE, "reference")
    want = poisoned_pool(FP8_DS_MLA, 1, 64)
    quantize_and_insert_k_cache(wide[:, 1:513].cpu(), want, slots.cpu(), 64)
    memory.fill_(POISON_BYTE)
    with record_calls() as recording:
        quantize_and_insert_k_cache(wide[:, 1:513], good, slots, 64)
    assert [call.implementation for call in recording.calls] == ["reference"]
    assert torch.equal(memory[8 : 8 + 37376].cpu(), raw_bytes(want)[:37376])


@pytest.fixture(scope="module")
def op_without_kernel() -> Iterator[Any]:
    class Call(NamedTuple):
        x: torch.Tensor
        y: torch.Tensor

    def reference(call: Call) -> None:
        call.y.copy_(call.x + 1)

    name = "test_op_without_a_kernel"
    op = define_op(f"{name}(Tensor x, Tensor(a!) y) -> ()", Call, check=lambda call: None, reference=reference)
    yield lambda x, y: op(Call(x, y))
    del OPS[name]


def test_op_without_a_kernel_asks_for_the_fallback(op_without_kernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = torch.ones(3, device="cuda"), torch.zeros(3, device="cuda")
    with pytest.raises(NotImplementedError, match=f"no CUDA kernel yet.*{FALLBACK_VARIABLE}=reference"):
        op_without_kernel(x, y)
    assert not y.any()
    monkeypatch.setenv(FALLBACK_VARIABLE, "reference")
    op_without_kernel(x, y)
    assert torch.equal(y, x + 1)
