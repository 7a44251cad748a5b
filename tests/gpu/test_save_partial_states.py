# SPDX-License-Identifier: Apache-2.0
"""The kernel of save_partial_states on a GPU, byte for byte, against the CPU implementation and a loop over rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from cute_kernels.compressor import save
from cute_kernels.compressor.ops import save_partial_states
from cute_kernels.formats import compressor_state
from cute_kernels.runtime import compile as compile_
from cute_kernels.runtime.ops import FALLBACK_VARIABLE
from cute_kernels.runtime.record import record_calls
from tests.helpers import POISON_BYTE, generator, poisoned_pool, raw_bytes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

KINDS = ((512, 4), (512, 128), (128, 4), (128, 128))
LENGTHS = (0, 1, 2, 3, 5, 64, 257, 2000)


@pytest.fixture(autouse=True, params=["short", "long"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test with the kernel of short calls and with that of long ones."""
    monkeypatch.delenv(FALLBACK_VARIABLE, raising=False)
    monkeypatch.setattr(save, "MANY_COLUMNS", 2**62 if request.param == "short" else 1)


def width_of(head_dim: int, ratio: int) -> int:
    return compressor_state(head_dim, ratio).width


def slots_for(rows: int, capacity: int, seed: int) -> torch.Tensor:
    """Distinct slots in random order, every fifth of them replaced by one that names no row."""
    slots = torch.randperm(capacity, generator=generator(seed))[:rows]
    wrong = torch.tensor([-1, capacity, -7, capacity + 1, 2**32 + 1, -(2**62), 2**62, 2**31])
    bad = torch.arange(rows) % 5 == 3
    slots[bad] = wrong[torch.arange(int(bad.sum())) % len(wrong)]
    return slots


def inputs(head_dim: int, ratio: int, block_size: int, rows: int, extra: int = 0, seed: int = 0) -> dict[str, Any]:
    """Arguments of a call on the CPU; kv and score are column slices of one matrix that has more rows than slots."""
    width = width_of(head_dim, ratio)
    g = generator(seed)
    kv, score = torch.randn(rows + 2, 2 * width, generator=g).split(width, dim=1)
    pages = -(-max(rows, 1) // block_size) + 2
    return {
        "kv": kv,
        "score": score,
        "ape": torch.randn(ratio, width, generator=g),
        "positions": torch.randint(-500_000, 1_000_000, (rows + 1,), generator=g),
        "state_cache": poisoned_pool(compressor_state(head_dim, ratio), pages, block_size, extra),
        "slot_mapping": slots_for(rows, pages * block_size, seed),
        "block_size": block_size,
        "state_width": width,
        "compress_ratio": ratio,
    }


def on_gpu(a: dict[str, Any]) -> dict[str, Any]:
    """The same arguments on the GPU, with the same strides and padding, kv and score in one matrix."""

    def like(t: torch.Tensor) -> torch.Tensor:
        storage = torch.empty(t.untyped_storage().nbytes() // t.element_size(), dtype=t.dtype, device="cuda")
        raw_bytes(storage).copy_(raw_bytes(t))
        return storage.as_strided(t.shape, t.stride(), t.storage_offset())

    copies = {name: like(v) if isinstance(v, torch.Tensor) else v for name, v in a.items()}
    if a["kv"].untyped_storage().data_ptr() == a["score"].untyped_storage().data_ptr():
        score = a["score"]
        copies["score"] = copies["kv"].as_strided(score.shape, score.stride(), score.storage_offset())
    return copies


def run(a: dict[str, Any]) -> None:
    with record_calls() as recording:
        save_partial_states(**a)
    assert [call.implementation for call in recording.calls] == ["kernel"]


def check(a: dict[str, Any]) -> torch.Tensor:
    """Save on the GPU and on the CPU; every byte must agree. Returns the bytes behind the state cache."""
    gpu = on_gpu(a)
    run(gpu)
    save_partial_states(**a)
    for name in ("state_cache", "kv", "score", "ape", "positions", "slot_mapping"):
        assert torch.equal(raw_bytes(gpu[name]).cpu(), raw_bytes(a[name])), name
    return raw_bytes(a["state_cache"])


@pytest.mark.parametrize("extra", [0, 64, 16])
@pytest.mark.parametrize("block_size", [1, 3, 4, 8, 64])
@pytest.mark.parametrize(("head_dim", "ratio"), KINDS)
def test_every_byte_of_the_pool(head_dim: int, ratio: int, block_size: int, extra: int) -> None:
    for rows in LENGTHS:
        check(inputs(head_dim, ratio, block_size, rows, extra, seed=rows))


def test_against_a_loop_over_rows() -> None:
    a = inputs(512, 4, 4, 37)
    want = a["state_cache"].clone()
    for t, slot in enumerate(a["slot_mapping"].tolist()):
        if 0 <= slot < want.shape[0] * 4:
            bias = a["ape"][int(a["positions"][t]) % 4]
            want[slot // 4, slot % 4] = torch.cat([a["kv"][t], a["score"][t] + bias])
    gpu = on_gpu(a)
    run(gpu)
    assert torch.equal(gpu["state_cache"].cpu().view(torch.int32), want.view(torch.int32))


def test_every_position_and_sign() -> None:
    a = inputs(512, 128, 8, 600)
    a["positions"][:600] = torch.arange(-300, 300)
    a["positions"][0], a["positions"][1] = 2**62 + 77, -(2**62) + 5
    check(a)


def test_bits_of_special_values() -> None:
    """kv is copied whatever its bits are; sums of subnormals, zeros and infinities are those of IEEE arithmetic."""
    a = inputs(128, 4, 4, 64)
    bits = torch.tensor([0x7FC00001, -0x80000000, 1, 0x7F800000, 0x7FA55555, -1, 0x00400000], dtype=torch.int32)
    kv = a["kv"].contiguous().view(torch.int32)
    a["kv"].copy_(bits.repeat(kv.numel())[: kv.numel()].view(torch.float32).view(kv.shape))
    a["ape"][0], a["ape"][1], a["ape"][2], a["ape"][3] = 0.0, -0.0, 1e-40, -1e-44
    special = torch.tensor([0.0, -0.0, 1e-40, -1e-45, float("inf"), -float("inf"), 3e38, 1.5])
    a["score"].copy_(special.repeat(a["score"].numel())[: a["score"].numel()].view(a["score"].shape))
    check(a)


def test_rows_that_no_slot_covers_are_not_read() -> None:
    for rows in (0, 1, 4, 60):
        a = inputs(512, 4, 4, rows)
        a["kv"][rows:], a["score"][rows:] = float("nan"), float("nan")
        check(a)
    a = inputs(512, 4, 4, 9)
    a["slot_mapping"].fill_(-1)
    assert bool((check(a) == POISON_BYTE).all())


def test_separate_matrices_and_strides() -> None:
    a = inputs(128, 4, 4, 50)
    g = generator(1)
    a["kv"] = torch.randn(51, 1000, generator=g)[:, 8:264]
    a["score"] = torch.randn(60, 260, generator=g)[:, 4:]
    a["ape"] = torch.randn(4, 512, generator=g)[:, 256:]
    a["score"] = a["score"][:51]
    check(a)
    a["kv"] = torch.randn(1, 256, generator=g).as_strided((51, 256), (0, 1))
    check(a)
    one = inputs(512, 128, 8, 1)
    one["kv"], one["score"] = (torch.randn(1, 512).as_strided((1, 512), (513, 1)) for _ in range(2))
    check(one)


def test_an_empty_pool() -> None:
    a = inputs(512, 4, 4, 5)
    a["state_cache"] = compressor_state(512, 4).allocate(0, 4)
    check(a)


def test_pool_beyond_two_gigabytes() -> None:
    a = inputs(128, 4, 4, 5)
    stride = 300_000_004  # elements: page 2 starts past 2^31 bytes, page 4 past 2^32
    pages = 5
    memory = torch.full((stride * (pages - 1) + 4 * 512,), 7.0, device="cuda")
    a["slot_mapping"] = torch.tensor([0, 6, 9, 15, 19])
    small = torch.full((pages, 4, 512), 7.0)
    gpu = on_gpu({**a, "state_cache": small})
    gpu["state_cache"] = memory.as_strided((pages, 4, 512), (stride, 512, 1))
    run(gpu)
    save_partial_states(**{**a, "state_cache": small})
    assert torch.equal(gpu["state_cache"].cpu(), small)
    gpu["state_cache"].fill_(7.0)
    assert bool((memory == 7.0).all())


def test_rows_beyond_two_gigabytes() -> None:
    a = inputs(128, 4, 4, 3)
    gap = 2**29 + 4  # elements: row 1 starts past 2^31 bytes
    wide = torch.empty(2 * gap + 512, device="cuda")
    gpu = on_gpu(a)
    for name, offset in (("kv", 0), ("score", 256)):
        gpu[name] = wide.as_strided((3, 256), (gap, 1), offset)
        gpu[name].copy_(a[name][:3])
    run(gpu)
    save_partial_states(**a)
    assert torch.equal(raw_bytes(gpu["state_cache"]).cpu(), raw_bytes(a["state_cache"]))


def test_shapes_and_strides_need_no_new_kernel() -> None:
    for head_dim, ratio in KINDS:
        check(inputs(head_dim, ratio, 4, 3))
    before = compile_.compilations()
    for rows, block_size, extra in ((1, 4, 0), (33, 2, 576), (700, 7, 64)):
        for head_dim, ratio in KINDS:
            check(inputs(head_dim, ratio, block_size, rows, extra))
    assert compile_.compilations() == before


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_torch_compile(backend: str) -> None:
    def step(a: dict[str, Any]) -> torch.Tensor:
        save_partial_states(**{**a, "score": a["score"] * 2})
        return a["kv"] + 1

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=backend)
    for rows in (5, 130):
        a = inputs(128, 4, 4, rows)
        gpu = on_gpu(a)
        out = compiled(gpu)
        save_partial_states(**{**a, "score": a["score"] * 2})
        assert torch.equal(raw_bytes(gpu["state_cache"]).cpu(), raw_bytes(a["state_cache"]))
        assert torch.equal(out.cpu(), a["kv"] + 1)


def test_alignment_that_is_not_supported_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    a = inputs(128, 4, 4, 10)
    gpu = on_gpu(a)
    wide = torch.zeros(12, 258, device="cuda")
    memory = torch.zeros(20_000, device="cuda")
    for name, value, reason in (
        ("kv", wide[:, 1:257], "rows of kv must be 16-byte aligned"),
        ("score", wide[:, :256], "rows of score must be 16-byte aligned"),
        ("ape", wide[:4, :256], "rows of ape must be 16-byte aligned"),
        ("state_cache", memory[1:].as_strided((5, 4, 512), (2048, 512, 1)), "pages of state_cache must be 16-byte"),
        ("state_cache", memory.as_strided((5, 4, 512), (2050, 512, 1)), "pages of state_cache must be 16-byte"),
    ):
        with pytest.raises(NotImplementedError, match=f"{reason}.*{FALLBACK_VARIABLE}=reference"):
            save_partial_states(**{**gpu, name: value})
    monkeypatch.setenv(FALLBACK_VARIABLE, "reference")
    with record_calls() as recording:
        save_partial_states(**{**gpu, "kv": wide[:, 1:257]})
    assert [call.implementation for call in recording.calls] == ["reference"]
