# SPDX-License-Identifier: Apache-2.0
"""The kernels of both ops that store compressed entries, ratio 128, against the CPU implementation.

State rows are compared bit for bit. Entries are sums in fp32 here and in float64 there: now and then one rounds the
other way, so bytes may differ in few places, by one step of the format.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cute_kernels import formats
from cute_kernels.compressor import ratio128, reference
from cute_kernels.compressor.call import SaveCall
from cute_kernels.compressor.ops import compress_norm_rope_store, fused_compress_norm_rope_store
from cute_kernels.compressor.verify_cases import random_step
from cute_kernels.runtime import compile as compile_
from cute_kernels.runtime.ops import FALLBACK_VARIABLE
from cute_kernels.runtime.record import record_calls
from tests import oracle
from tests.helpers import POISON_BYTE, generator, poisoned_pool, raw_bytes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

STATE = formats.compressor_state(512, 128)
FORMATS = ("fp8_ds_mla/1", "plain_bf16/1", "plain_fp8/1")
BOTH = ("compress", "fused")
FLIPS = 1e-3
"""Share of elements that may round the other way. A relative error of 1e-6 in front of a bf16 rounding is 2.6e-4."""

MIXED = ((0, 300), (70, 390), (255, 256), (127, 128), (0, 1), (200, 255), (384, 512))
"""(first position, position after the last) of requests: with and without prefix, closing none, one or more entries."""


@pytest.fixture(autouse=True, params=["clusters", "portable"])
def no_fallback(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every test runs the kernel of this GPU, and the one of GPUs without clusters."""
    monkeypatch.delenv(FALLBACK_VARIABLE, raising=False)
    if request.param == "portable":
        monkeypatch.setattr(ratio128, "runs_on", lambda arch: False)
    ratio128._key.cache_clear()
    yield
    ratio128._key.cache_clear()


@pytest.fixture
def per_cluster(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    return lambda tokens: monkeypatch.setattr(ratio128, "tokens_per_cluster", lambda *_: tokens)


def inputs(
    ranges: tuple[tuple[int, int], ...],
    *,
    kv_format: str = "fp8_ds_mla/1",
    block_size: int = 8,
    entry_rows: int = 2,
    extra: int = 64,
    seed: int = 0,
    fp32_weight: bool = False,
    table_rows: int | None = None,
    pad: int = 3,
    stretch: float = 3.0,
) -> dict[str, Any]:
    """The fused op's arguments, by name, on the CPU: older rows lie in the state cache, the others there are NaN."""
    g = generator(seed)
    fmt = formats.FORMATS[kv_format]
    requests = len(ranges)
    tokens = sum(stop - first for first, stop in ranges)
    rows = tokens + pad
    wide = torch.full((rows + 1, 1024 + 8), float("nan"))
    kv_score = wide[:rows, :1024]
    kv_score[:tokens, :512] = torch.randn(tokens, 512, generator=g)
    kv_score[:tokens, 512:] = torch.randn(tokens, 512, generator=g) * stretch
    ape = torch.randn(128, 512, generator=g)
    pages = [-(-stop // block_size) for _, stop in ranges]
    state_cache = poisoned_pool(STATE, sum(pages) + 2, block_size, extra)
    raw_bytes(state_cache).fill_(0xFF)
    order = (torch.randperm(sum(pages), generator=g) + 1).tolist()
    block_table = torch.full((requests, max([*pages, 0]) + 2), -1_000_000, dtype=torch.int32)
    entries = [stop // 128 for _, stop in ranges]
    kv_cache = poisoned_pool(fmt, -(-sum(entries) // entry_rows) + 2, entry_rows, extra * 8)
    entry_order = torch.randperm(sum(entries), generator=g) + 1
    positions = torch.full((rows,), 127, dtype=torch.int64)
    request_of = torch.zeros(rows, dtype=torch.int32)
    slots, entry_slots = (torch.full((rows,), -1, dtype=torch.int64) for _ in range(2))
    starts, t, e = [0], 0, 0
    for r, (first, stop) in enumerate(ranges):
        block_table[r, : pages[r]] = torch.tensor([order.pop() for _ in range(pages[r])], dtype=torch.int32)
        every = torch.arange(stop)
        slot = block_table[r, every // block_size].long() * block_size + every % block_size
        old = slice(max(0, first - 200), first)
        STATE.write(state_cache, block_size, slot[old], torch.randn(old.stop - old.start, 1024, generator=g) * 2)
        here = slice(t, t + stop - first)
        positions[here], request_of[here], slots[here] = every[first:], r, slot[first:]
        closing = every[first:] % 128 == 127
        entry_slots[here][closing] = entry_order[e + every[first:][closing] // 128]
        t, e = here.stop, e + entries[r]
        starts.append(t)
    longest = max([stop for _, stop in ranges] or [1])
    weight = torch.randn(512, generator=g) * torch.exp2(torch.arange(512) % 9 - 6.0)
    return {
        "kv_score": kv_score,
        "ape": ape,
        "positions": positions,
        "token_to_req_indices": request_of,
        "query_start_loc": torch.tensor(starts, dtype=torch.int32),
        "state_cache": state_cache,
        "slot_mapping": slots,
        "block_table": block_table,
        "cos_sin_cache": oracle.cos_sin_table(longest if table_rows is None else table_rows, 160000.0),
        "kv_cache": kv_cache,
        "kv_slot_mapping": entry_slots,
        "rms_norm_weight": weight if fp32_weight else weight.bfloat16(),
        "rms_norm_eps": 1e-6,
        "compress_ratio": 128,
        "kv_format": kv_format,
        "fp8_scale": torch.tensor([0.037]) if kv_format == "plain_fp8/1" else None,
    }


def saved(a: dict[str, Any]) -> dict[str, Any]:
    """The same arguments once the rows of the step are in the state cache."""
    n = a["slot_mapping"].shape[0]
    kv, score = a["kv_score"].split(512, dim=1)
    cache = a["state_cache"]
    rows = kv, score, a["ape"], a["positions"][:n]
    reference.save_partial_states(SaveCall(*rows, cache, a["slot_mapping"], cache.shape[1], 128))
    return a


def on_gpu(a: dict[str, Any]) -> dict[str, Any]:
    """The same arguments on the GPU, with the same strides and the same bytes between rows and pages."""

    def like(t: torch.Tensor) -> torch.Tensor:
        storage = torch.empty(t.untyped_storage().nbytes() // t.element_size(), dtype=t.dtype, device="cuda")
        raw_bytes(storage).copy_(raw_bytes(t))
        return storage.as_strided(t.shape, t.stride(), t.storage_offset())

    return {name: like(v) if isinstance(v, torch.Tensor) else v for name, v in a.items()}


def call(op: str, a: dict[str, Any]) -> None:
    if op == "fused":
        fused_compress_norm_rope_store(**a)
        return
    ds_mla = (64, 576, 8)
    compress_norm_rope_store(
        a["state_cache"],
        a["slot_mapping"].shape[0],
        a["token_to_req_indices"],
        a["positions"],
        a["slot_mapping"],
        a["block_table"],
        a["state_cache"].shape[1],
        512,
        a["cos_sin_cache"],
        a["kv_cache"],
        SimpleNamespace(slot_mapping=a["kv_slot_mapping"]),
        None,
        512,
        64,
        128,
        False,
        False,
        a["rms_norm_weight"],
        a["rms_norm_eps"],
        *ds_mla,
        kv_format=a["kv_format"],
        fp8_scale=a["fp8_scale"],
    )


def run(op: str, a: dict[str, Any]) -> None:
    with record_calls() as recording:
        call(op, a)
    assert [done.implementation for done in recording.calls] == ["kernel"]


def steps_apart(got: torch.Tensor, want: torch.Tensor, kv_format: str, entry_rows: int, stride: int) -> torch.Tensor:
    """Steps between the elements of two pools, given as all their bytes; bytes that hold no element must agree."""
    pages = got.numel() // stride
    got, want = (x[: pages * stride].view(pages, stride) for x in (got, want))
    kinds = {"fp8_ds_mla/1": ((448, 1), (128, 2)), "plain_bf16/1": ((1024, 2),), "plain_fp8/1": ((512, 1),)}[kv_format]
    ends, apart = [], []
    for row in range(entry_rows):
        start = row * sum(width for width, _ in kinds)
        for width, size in kinds:
            field = [x[:, start : start + width].contiguous() for x in (got, want)]
            bits = [x.view(torch.int8 if size == 1 else torch.int16).int() for x in field]
            if size == 2:  # any NaN is as good as another
                bits = [torch.where(b & 0x7FFF > 0x7F80, 0x7FFF, b) for b in bits]
            # sign and magnitude to a line on which neighbouring numbers are neighbours
            line = [torch.where(b < 0, -(b & (0x7F if size == 1 else 0x7FFF)), b) for b in bits]
            apart.append((line[0] - line[1]).abs().flatten())
            start += width
        ends.append(start)
    assert torch.equal(got[:, ends[-1] :], want[:, ends[-1] :])
    return torch.cat(apart)


def check_entries(got: torch.Tensor, want: torch.Tensor, a: dict[str, Any]) -> None:
    """Both are all bytes of an entry pool."""
    if torch.equal(got, want):
        return
    cache = a["kv_cache"]
    apart = steps_apart(got, want, a["kv_format"], cache.shape[1], cache.stride(0) * cache.element_size())
    assert int(apart.max()) <= 1
    stored = max(1, int((want != POISON_BYTE).sum()))
    assert int((apart > 0).sum()) <= max(2, FLIPS * stored), (int((apart > 0).sum()), stored)


def same_state(got: torch.Tensor, want: torch.Tensor, any_nan: bool) -> bool:
    """Whether all bytes of two state pools agree, or all but the bits of NaN."""
    if torch.equal(got, want):
        return True
    got, want = (x.view(torch.float32) for x in (got, want))
    differ = got.view(torch.int32) != want.view(torch.int32)
    return any_nan and bool((got[differ].isnan() & want[differ].isnan()).all())


def check(op: str, a: dict[str, Any], any_nan: bool = False) -> dict[str, Any]:
    """Run on the GPU and on the CPU and compare everything. Returns the arguments of the GPU."""
    if op == "compress":
        a = {k: v for k, v in saved(a).items() if k not in ("persist", "min_restart", "keep_every")}
    gpu = on_gpu(a)
    run(op, gpu)
    call(op, a)
    for name, value in a.items():
        if name == "state_cache":
            assert same_state(raw_bytes(gpu[name]).cpu(), raw_bytes(value), any_nan)
        elif isinstance(value, torch.Tensor) and name != "kv_cache":
            assert torch.equal(raw_bytes(gpu[name]).cpu(), raw_bytes(value)), name
    check_entries(raw_bytes(gpu["kv_cache"]).cpu(), raw_bytes(a["kv_cache"]), a)
    return gpu


@pytest.mark.parametrize("fp32_weight", [False, True])
@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("op", BOTH)
def test_every_byte_of_the_pools(op: str, kv_format: str, fp32_weight: bool) -> None:
    check(op, inputs(MIXED, kv_format=kv_format, fp32_weight=fp32_weight))


@pytest.mark.parametrize(("block_size", "entry_rows", "extra"), [(1, 1, 0), (3, 5, 16), (8, 2, 4608), (64, 64, 576)])
@pytest.mark.parametrize("op", BOTH)
def test_pages(op: str, block_size: int, entry_rows: int, extra: int) -> None:
    for kv_format in FORMATS:
        check(op, inputs(MIXED, kv_format=kv_format, block_size=block_size, entry_rows=entry_rows, extra=extra))


@pytest.mark.parametrize("tokens", [1, 7, 64, 128, 130, 4000])
@pytest.mark.parametrize("blocks", ratio128.CLUSTERS)
@pytest.mark.parametrize("op", BOTH)
def test_the_clusters_shares_do_not_matter(
    op: str, blocks: int, tokens: int, per_cluster: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    a = inputs(MIXED, kv_format="plain_bf16/1")
    first = raw_bytes(check(op, inputs(MIXED, kv_format="plain_bf16/1"))["kv_cache"])
    per_cluster(tokens)
    monkeypatch.setattr(ratio128, "ctas_per_entry", lambda _: blocks)
    assert torch.equal(raw_bytes(check(op, a)["kv_cache"]), first)
    check(op, {**inputs(MIXED), "persist": "window"})


@pytest.mark.parametrize("tokens", [3, 128, 300])
@pytest.mark.parametrize("with_restart", [False, True])
def test_rows_that_the_window_mode_keeps(tokens: int, with_restart: bool, per_cluster: Callable[[int], None]) -> None:
    per_cluster(tokens)
    for shift in (0, 1, 127, 128, 129, 500):
        a = {**inputs(MIXED, seed=shift), "persist": "window", "keep_every": 256}
        if with_restart:
            stops = torch.tensor([stop for _, stop in MIXED], dtype=torch.int32)
            a["min_restart"] = stops - shift
        check("fused", a)


@pytest.mark.parametrize("tokens", [3, 128, 300])
@pytest.mark.parametrize(("state_rows", "columns"), [(128, 1), (128, 2), (48, 3)])
def test_rings(tokens: int, state_rows: int, columns: int, per_cluster: Callable[[int], None]) -> None:
    per_cluster(tokens)
    ring = {"state_rows": state_rows, "columns": columns, "entry_rows": 2}
    for lengths in ([1] * 40, [1, 300, 128, 2, 129]):
        for raw in (False, True):
            a = random_step("fp8_ds_mla/1", 128, lengths, 3, longest_prefix=900, at_ends=True, raw_scores=raw, **ring)
            names = (*inputs(MIXED), "persist", "min_restart", "cyclic_table", "raw_scores")
            check("fused", {name: a[name] for name in names})


def test_a_start_at_the_end_of_int32(per_cluster: Callable[[int], None]) -> None:
    """The first position of such a request lies 2^31 before its tokens: it must not wrap."""
    for tokens in (3, 300):
        per_cluster(tokens)
        a = {**inputs(MIXED), "persist": "window"}
        a["query_start_loc"][2] = -(2**31)
        check("fused", a)


@pytest.mark.parametrize("tokens", [1, 5, 128])
@pytest.mark.parametrize("op", BOTH)
def test_bad_slots_requests_and_tables(op: str, tokens: int, per_cluster: Callable[[int], None]) -> None:
    per_cluster(tokens)
    wrong = (-1, -7, -(2**62), 2**62, 2**31, 2**32 + 1)
    for seed in range(6):
        a = inputs(MIXED, seed=seed)
        g = generator(seed)
        capacity = a["state_cache"].shape[0] * a["state_cache"].shape[1]
        entries = a["kv_cache"].shape[0] * a["kv_cache"].shape[1]
        n = a["slot_mapping"].shape[0]
        for name, beyond in (("slot_mapping", capacity), ("kv_slot_mapping", entries)):
            at = torch.randperm(n, generator=g)[: n // 3]
            if name == "slot_mapping" and seed % 2:
                at = at[a["positions"][at] % 128 == 127]
            bad = torch.tensor([*wrong, beyond])
            if name == "kv_slot_mapping":
                at = at[a["positions"][at] % 128 == 127][:2]
            a[name][at] = bad[torch.arange(len(at)) % len(bad)]
        if seed == 2:
            a["token_to_req_indices"][torch.randperm(n, generator=g)[:40]] = (
                torch.tensor([-1, 7, 2**31 - 1, -(2**31)]).int().repeat(10)
            )
        if seed == 3:
            a["block_table"][1:4, 3:] = (
                torch.tensor([2**31 - 1, -1, a["state_cache"].shape[0], -(2**31)])
                .int()
                .repeat(40)[: a["block_table"].shape[1] - 3]
            )
        if seed == 4:
            a["block_table"] = a["block_table"][:, :12].clone()
        if seed == 5:
            a["positions"][torch.randperm(n, generator=g)[:60]] -= 5
        check(op, a)


@pytest.mark.parametrize("op", BOTH)
def test_positions_far_out(op: str) -> None:
    """Beyond the rope table, with a prefix of a million tokens, and beyond the block table."""
    check(op, inputs(MIXED, table_rows=100))
    a = inputs(MIXED, table_rows=300)
    a["positions"] += 2**20
    before = torch.full((len(MIXED), 2**20 // 8), -1_000_000, dtype=torch.int32)
    a["block_table"] = torch.cat([before, a["block_table"]], dim=1)
    check(op, a)
    for shift in (2**31, 2**32, 2**40, 2**62, -(2**40), -1024):
        far = inputs(MIXED)
        far["positions"] += shift
        check(op, far)


@pytest.mark.parametrize("op", BOTH)
def test_window_on_a_missing_page_stores_nothing(op: str, per_cluster: Callable[[int], None]) -> None:
    for tokens in (1, 128):
        per_cluster(tokens)
        a = inputs(((60, 300), (130, 256)))
        a["block_table"][0, 3] = -1
        a["block_table"][1, 16] = a["state_cache"].shape[0]
        gpu = check(op, a)
        slots = a["kv_slot_mapping"][a["kv_slot_mapping"] >= 0]
        assert slots.numel() == 3
        scales = gpu["kv_cache"].as_strided((gpu["kv_cache"].shape[0], 16), (gpu["kv_cache"].stride(0), 1), 2 * 576)
        assert int((scales.cpu().reshape(-1, 8)[slots, 7] == 0).sum()) == 1


@pytest.mark.parametrize("kv_format", FORMATS)
def test_one_row_decides(kv_format: str) -> None:
    """Where one score is far above the others, an entry is that row, normalized."""
    a = inputs(((0, 128),), kv_format=kv_format)
    a["ape"].zero_()
    a["kv_score"][:128, 512:] = 0
    a["kv_score"][torch.arange(512) % 128, 512 + torch.arange(512)] = 1e4
    check("fused", a)


def test_tiny_and_zero_entries() -> None:
    for scale in (0.0, 1e-30, 1e-5, 1e15):
        for kv_format in FORMATS:
            a = inputs(((0, 256), (0, 128)), kv_format=kv_format)
            a["kv_score"][:, :512] *= scale
            a["rms_norm_weight"][64:128] *= 1e-6
            check("fused", a)


@pytest.mark.parametrize("op", BOTH)
def test_values_that_are_not_finite(op: str) -> None:
    inf, nan = float("inf"), float("nan")
    for row, column, value in (
        (3, 17, nan),
        (100, 512 + 17, nan),
        (64, 5, inf),
        (64, 500, -inf),
        (0, 512 + 470, inf),
        (127, 512 + 3, -inf),
    ):
        for kv_format in FORMATS:
            a = inputs(((0, 256), (40, 140)), kv_format=kv_format)
            a["kv_score"][row, column] = value
            check(op, a, any_nan=True)
    a = inputs(((0, 128), (0, 128)))
    a["kv_score"][:120, 512:] = -inf
    a["kv_score"][128:256, 700] = -inf
    check(op, a, any_nan=True)


def test_scores_of_any_size() -> None:
    for stretch, offset in ((1e-3, 0.0), (30.0, 1e4), (1e30, 0.0), (1.0, -3e38)):
        a = inputs(((0, 256),), stretch=stretch, kv_format="plain_bf16/1")
        a["kv_score"][:, 512:] += offset
        check("fused", a)


@pytest.mark.parametrize("op", BOTH)
def test_padding_rows_and_short_slot_mappings(op: str) -> None:
    a = inputs(MIXED, pad=200)
    check(op, a)
    a = inputs(MIXED, pad=0)
    a["slot_mapping"] = a["slot_mapping"][:400].clone()
    check(op, a)
    a = inputs(MIXED)
    a["slot_mapping"].fill_(-1)
    gpu = check(op, a)
    assert bool((raw_bytes(gpu["kv_cache"]) == POISON_BYTE).all())


@pytest.mark.parametrize("op", BOTH)
def test_empty_pools_and_tables(op: str) -> None:
    a = inputs(((0, 130),))
    a["kv_cache"] = a["kv_cache"][:0].clone()
    check(op, a)
    a = inputs(((0, 130),))
    a["state_cache"] = a["state_cache"][:0].clone()
    check(op, a)
    b = inputs(((0, 130),))
    b["block_table"], b["query_start_loc"] = b["block_table"][:0], b["query_start_loc"][:1]
    check(op, b)
    c = inputs(((0, 130),))
    c["block_table"] = c["block_table"][:, :0]
    check(op, c)


@pytest.mark.parametrize("op", BOTH)
def test_many_tokens(op: str) -> None:
    """Enough that entries save the rows they read: decoding requests before prefills."""
    decode = tuple((p, p + 1) for p in range(60, 300, 3))
    prefill = ((0, 3000), (100, 1900), (77, 400))
    check(op, inputs((*decode, *prefill), block_size=8))
    many = inputs((*((p % 4, p % 4 + 1) for p in range(4200)), (0, 128), (127, 128)), block_size=1, extra=0)
    check(op, many)


def test_same_bits_as_the_two_ops() -> None:
    a = inputs(MIXED, kv_format="plain_bf16/1")
    fused = on_gpu(a)
    run("fused", fused)
    apart = on_gpu(saved(a))
    run("compress", apart)
    for name in ("kv_cache", "state_cache"):
        assert torch.equal(raw_bytes(fused[name]), raw_bytes(apart[name]))


def test_same_bits_alone_and_in_any_batch() -> None:
    a = inputs(MIXED, kv_format="plain_bf16/1", pad=0)
    whole = on_gpu(a)
    run("fused", whole)
    rows = formats.PLAIN_BF16
    starts = a["query_start_loc"].tolist()
    for r in (0, 1, 2, 6):
        own = slice(starts[r], starts[r + 1])
        gpu = on_gpu(a)
        for name in ("kv_score", "positions", "slot_mapping", "kv_slot_mapping"):
            gpu[name] = gpu[name][own]
        gpu["token_to_req_indices"] = torch.zeros(own.stop - own.start, dtype=torch.int32, device="cuda")
        gpu["query_start_loc"] = torch.tensor([0, own.stop - own.start], dtype=torch.int32, device="cuda")
        gpu["block_table"] = gpu["block_table"][r : r + 1]
        run("fused", gpu)
        slots = a["kv_slot_mapping"][own]
        slots = slots[slots >= 0].cuda()
        assert slots.numel()
        got, want = (rows.read(x["kv_cache"], 2, slots) for x in (gpu, whole))
        assert torch.equal(got, want)


@pytest.mark.parametrize("op", BOTH)
def test_pools_beyond_eight_gigabytes(op: str) -> None:
    a = inputs(((0, 128), (70, 260)), block_size=64)
    if op == "compress":
        saved(a)
    gpu = on_gpu(a)
    for name, stride in (("state_cache", 2**29 + 16), ("kv_cache", 2**32 + 2**28 + 64)):
        small = gpu[name]
        size = small.stride(0) * (small.shape[0] - 1) + small.shape[1] * small.shape[2]
        memory = torch.empty(stride * (small.shape[0] - 1) + size, dtype=small.dtype, device="cuda")
        gpu[name] = memory.as_strided(small.shape, (stride, *small.stride()[1:]))
        for page in range(small.shape[0]):
            gpu[name][page].copy_(small[page])
    run(op, gpu)
    call(op, a)
    assert torch.equal(gpu["state_cache"].cpu().view(torch.int32), a["state_cache"].contiguous().view(torch.int32))
    rows = formats.FP8_DS_MLA
    slots = a["kv_slot_mapping"][a["kv_slot_mapping"] >= 0]
    got = rows.read(gpu["kv_cache"], 2, slots.cuda()).cpu().float()
    assert torch.allclose(got, rows.read(a["kv_cache"], 2, slots).float(), rtol=0.13, atol=1e-2)


def test_shapes_and_strides_need_no_new_kernel() -> None:
    for op in BOTH:
        check(op, inputs(((0, 130),)))
        check(op, inputs(((127, 128),)))
    before = compile_.compilations()
    for op in BOTH:
        check(op, inputs(((0, 700), (3, 5)), block_size=7, entry_rows=3, extra=128))
        check(op, {**inputs(((127, 128),), block_size=64, entry_rows=1), "persist": "window"})
    assert compile_.compilations() == before


def test_what_is_not_supported_says_so() -> None:
    gpu = on_gpu(inputs(((0, 130),)))
    wide = torch.zeros(200, 1026, device="cuda")
    memory = torch.zeros(40_000, device="cuda")
    for name, value, reason in (
        ("kv_score", wide[:133, 1:1025], "rows of kv_score must be 16-byte aligned"),
        ("ape", wide[:128, :512], "rows of ape must be 16-byte aligned"),
        ("state_cache", memory[1:].as_strided((3, 8, 1024), (8192, 1024, 1)), "pages of state_cache must be 16-byte"),
    ):
        with pytest.raises(NotImplementedError, match=reason):
            call("fused", {**gpu, name: value})
    small = formats.INDEXER_FP8.allocate(4, 4, "cuda")
    narrow = {
        **gpu,
        "kv_score": wide[:133, :256].contiguous(),
        "ape": wide[:128, :128].contiguous(),
        "state_cache": formats.compressor_state(128, 128).allocate(20, 8, "cuda"),
        "kv_cache": small,
        "kv_format": "indexer_fp8/1",
        "rms_norm_weight": torch.ones(128, device="cuda"),
    }
    with pytest.raises(NotImplementedError, match="ratio 128 needs entries of 512 columns"):
        call("fused", narrow)
