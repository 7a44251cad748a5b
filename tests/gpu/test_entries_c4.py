# SPDX-License-Identifier: Apache-2.0
"""The kernels of ratio 4 on a GPU, against the CPU implementation, the formulas, each other and themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cute_kernels import formats
from cute_kernels.compressor import ratio4
from cute_kernels.compressor.call import CompressCall, FusedCall
from cute_kernels.compressor.verify_cases import compress_arguments, random_step
from cute_kernels.runtime.ops import FALLBACK_VARIABLE, OPS
from tests.compressor.meaning import KINDS, Kind, Scene
from tests.compressor.test_fused import arguments as fused_arguments
from tests.compressor.test_fused import batch, schema_args
from tests.gpu.entries import (
    COMPRESS,
    FUSED,
    Arguments,
    assert_entries,
    check,
    gpu_to_cpu,
    on_gpu,
    run,
    same_bytes,
)
from tests.helpers import raw_bytes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

KINDS_4 = [kind for kind in KINDS if kind.ratio == 4]
FORMATS = [fmt.id for fmt in (formats.FP8_DS_MLA, formats.INDEXER_FP8, formats.INDEXER_MXFP4)]
LENGTHS = [1, 9, 1, 2, 30, 4, 4, 1, 3, 17, 0, 5, 64, 1, 1, 7]


@pytest.fixture(autouse=True)
def no_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FALLBACK_VARIABLE, raising=False)


def scene_arguments(scene: Scene, step: Any, **changes: Any) -> Arguments:
    given = fused_arguments(scene, step, **changes)
    names = [argument.name for argument in OPS[FUSED].overload._schema.arguments]
    a = dict(zip(names, schema_args(given), strict=True))
    # a scene's rows are not aligned, as no GEMM writes them
    return {**a, "kv_score": a["kv_score"].contiguous()}


@pytest.mark.parametrize("kind", KINDS_4, ids=str)
def test_against_the_formulas(kind: Kind) -> None:
    scene, step = batch(kind)
    a = scene_arguments(scene, step)
    gpu = on_gpu(a)
    want = scene.new_entries()
    raw_bytes(want).copy_(scene.entry_bytes(step.closed))
    run(FUSED, gpu)
    assert_entries(kind.format_id, gpu["kv_cache"], want, step.entry_slots)
    run(FUSED, a)
    assert same_bytes(gpu["state_cache"], a["state_cache"])


@pytest.mark.parametrize("state_rows", [1, 3, 4, 8])
@pytest.mark.parametrize("kind", KINDS_4, ids=str)
def test_random_steps(kind: Kind, state_rows: int) -> None:
    options = kind.rounding, kind.turn
    a = random_step(kind.format_id, 4, LENGTHS, state_rows, state_rows=state_rows, entry_rows=3, options=options)
    check(COMPRESS, compress_arguments(on_cpu_copy(a)))
    check(FUSED, a)


@pytest.mark.parametrize(("state_rows", "columns"), [(4, 2), (4, 4), (3, 5), (8, 1)])
@pytest.mark.parametrize("kind", KINDS_4, ids=str)
def test_rings(kind: Kind, state_rows: int, columns: int) -> None:
    options = {"state_rows": state_rows, "columns": columns, "options": (kind.rounding, kind.turn)}
    for lengths in (LENGTHS, [1] * 50):
        for raw in (False, True):
            a = random_step(kind.format_id, 4, lengths, columns, longest_prefix=300, raw_scores=raw, **options)
            check(FUSED, a)


def on_cpu_copy(a: Arguments) -> Arguments:
    return {name: gpu_to_cpu(v) if isinstance(v, torch.Tensor) else v for name, v in a.items()}


@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("lengths", [[], [1], [2], [4], [1] * 64, [257], [700, 3, 1]], ids=str)
def test_sizes(kv_format: str, lengths: list[int]) -> None:
    for seed in range(3):
        a = random_step(kv_format, 4, lengths, seed, bad=False)
        check(COMPRESS, compress_arguments(on_cpu_copy(a)))
        check(FUSED, a)


@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("restart", [None, "last", "middle", "far"])
@pytest.mark.parametrize("keep_every", [0, 4, 8, 32])
def test_what_is_saved(kv_format: str, restart: str | None, keep_every: int) -> None:
    a = random_step(kv_format, 4, LENGTHS, keep_every, longest_prefix=100)
    a.update(persist="window", keep_every=keep_every)
    if restart is not None:
        ends = a["query_start_loc"][1:].long() - 1
        last = a["positions"][ends.clamp(min=0)].int()
        a["min_restart"] = {"last": last + 1, "middle": last - 6, "far": last * 0 - 2**31}[restart].int()
    check(FUSED, a)


@pytest.mark.parametrize("kv_format", FORMATS)
def test_both_ops_and_any_number_of_tokens_per_team_give_the_same_bits(kv_format: str) -> None:
    a = random_step(kv_format, 4, LENGTHS, 3, bad=False)
    results = []
    for per_team, through_l1 in ((None, None), (1, False), (3, True), (4, False), (7, False), (16, True)):
        gpu = on_gpu(a)
        ratio4.launch_fused(FusedCall(*gpu.values()), per_team=per_team, through_l1=through_l1)
        two = on_gpu(compress_arguments(a))
        two["state_cache"] = gpu["state_cache"]
        ratio4.launch_compress(CompressCall(*two.values()), per_team=per_team)
        results.append((gpu["state_cache"], gpu["kv_cache"]))
        assert same_bytes(two["kv_cache"], gpu["kv_cache"])
    for state, cache in results[1:]:
        assert same_bytes(state, results[0][0])
        assert same_bytes(cache, results[0][1])


def test_bits_do_not_depend_on_the_batch() -> None:
    a = on_gpu(random_step("fp8_ds_mla/1", 4, [5] * 40, 1, bad=False))
    run(FUSED, a)
    fmt: Any = formats.FP8_DS_MLA
    for r in (0, 1, 7, 39):
        rows = slice(5 * r, 5 * r + 5)
        alone = {**a, "kv_cache": torch.full_like(a["kv_cache"], 7)}
        for name in ("kv_score", "positions", "slot_mapping", "kv_slot_mapping"):
            alone[name] = a[name][rows]
        alone["token_to_req_indices"] = torch.zeros(5, dtype=torch.int32, device="cuda")
        alone["query_start_loc"] = torch.tensor([0, 5], dtype=torch.int32, device="cuda")
        alone["block_table"] = a["block_table"][r : r + 1]
        run(FUSED, alone)
        slots = alone["kv_slot_mapping"][alone["kv_slot_mapping"] >= 0].cpu()
        mine, theirs = gpu_to_cpu(alone["kv_cache"]), gpu_to_cpu(a["kv_cache"])
        for x, y in zip(fmt.read_fields(mine, 4, slots), fmt.read_fields(theirs, 4, slots), strict=True):
            assert torch.equal(x, y)


def test_positions_far_away_and_negative() -> None:
    a = random_step("fp8_ds_mla/1", 4, [1] * 12, 5, bad=False)
    a["positions"][:12] = torch.tensor(
        [-1, -5, -2, 2**31 - 1, 2**31 + 3, 2**40 + 3, -(2**62), 3, 7, 10**6 + 3, 0, 2**62]
    )
    # windows of positions beyond the table are not readable: only rows of the step count
    for persist, keep_every in (("all", 0), ("window", 0), ("window", 8)):
        check(FUSED, on_cpu_copy({**a, "persist": persist, "keep_every": keep_every}))
    check(COMPRESS, compress_arguments(a))


def test_long_step_at_far_positions() -> None:
    a = random_step("fp8_ds_mla/1", 4, [40], 5, bad=False, longest_prefix=0)
    for first in (1_000_000, 2**31 - 20, 2**33):
        far = on_cpu_copy(a)
        far["positions"][:40] = first + torch.arange(40)
        far["kv_slot_mapping"][3:40:4] = torch.arange(10)
        check(FUSED, far)


@pytest.mark.parametrize("kv_format", FORMATS)
def test_values_that_break_kernels(kv_format: str) -> None:
    a = random_step(kv_format, 4, [64], 2, bad=False, longest_prefix=0)
    kv, score = a["kv_score"].chunk(2, dim=1)
    kv[0:8] = 0.0
    kv[16:24] *= 1e-20
    kv[33, 5::7] = float("nan")
    kv[41, 3::11] = float("inf")
    score[49, 1::5] = float("-inf")
    score[57, ::3] = 80.0
    check(FUSED, a)


def test_nan_in_rows_that_take_no_part_reaches_nothing() -> None:
    scene, step = batch(KINDS[0])
    a = on_gpu(scene_arguments(scene, step))
    run(FUSED, a)
    fmt: Any = formats.FP8_DS_MLA
    slots = step.entry_slots[step.entry_slots >= 0]
    assert not torch.isnan(fmt.read(gpu_to_cpu(a["kv_cache"]), scene.entry_rows, slots).float()).any()


def test_fewer_slots_than_rows_and_fp32_weight() -> None:
    a = random_step("plain_bf16/1", 4, LENGTHS, 9, fp32_weight=True)
    a["slot_mapping"] = a["slot_mapping"][:100]
    check(FUSED, a)


def test_requests_that_do_not_exist() -> None:
    a = random_step("indexer_fp8/1", 4, LENGTHS, 11, bad=False)
    a["token_to_req_indices"][::7] = (
        torch.tensor([-1, 16, 2**31 - 1, -(2**31)]).repeat(10)[: len(a["positions"][::7])].int()
    )
    for persist in ("all", "window"):
        check(FUSED, on_cpu_copy({**a, "persist": persist}))
    check(COMPRESS, compress_arguments(a))


def test_a_start_at_the_end_of_int32() -> None:
    """The first position of such a request lies 2^31 before its tokens: it must not wrap."""
    a = random_step("plain_bf16/1", 4, LENGTHS, 12, bad=False)
    a["query_start_loc"][3] = -(2**31)
    check(FUSED, {**a, "persist": "window"})


def test_no_requests_and_no_pages() -> None:
    a = random_step("fp8_ds_mla/1", 4, [6], 1, bad=False, longest_prefix=0)
    a["block_table"] = a["block_table"][:, :0]
    check(FUSED, on_cpu_copy(a))
    check(COMPRESS, compress_arguments(on_cpu_copy(a)))
    a["block_table"] = a["block_table"][:0]
    a["query_start_loc"] = a["query_start_loc"][:1]
    check(FUSED, a)


@pytest.mark.parametrize("which", ["state_cache", "kv_cache"])
def test_pools_beyond_eight_gigabytes(which: str) -> None:
    if torch.cuda.mem_get_info()[0] < 12 * 2**30:
        pytest.skip("needs 12 GiB of GPU memory")
    a = random_step("fp8_ds_mla/1", 4, LENGTHS, 6, bad=False)
    gpu = on_gpu(a)
    small = gpu[which]
    far = 9 * 2**30 // small.shape[0] // 576 * 576
    memory = torch.empty(small.shape[0] * far, dtype=torch.uint8, device="cuda")
    pool = memory.view(small.dtype).as_strided(small.shape, (far // small.element_size(), *small.stride()[1:]))
    fmt: Any = formats.compressor_state(512, 4) if which == "state_cache" else formats.FP8_DS_MLA
    fmt.pages(pool, small.shape[1]).copy_(fmt.pages(small, small.shape[1]))
    gpu[which] = pool
    run(FUSED, gpu)
    run(FUSED, a)
    fmt.pages(small, small.shape[1]).copy_(fmt.pages(pool, small.shape[1]))
    gpu[which] = small
    assert same_bytes(gpu["state_cache"], a["state_cache"])
    assert_entries("fp8_ds_mla/1", gpu["kv_cache"], a["kv_cache"], a["kv_slot_mapping"])


@pytest.mark.parametrize("name", ["kv_score", "ape", "state_cache", "rms_norm_weight", "kv_cache"])
def test_alignment_that_is_not_supported_says_so(name: str) -> None:
    a = on_gpu(random_step("fp8_ds_mla/1", 4, [4], 6, bad=False))
    old = a[name]
    memory = torch.zeros(old.untyped_storage().nbytes() + 64, dtype=torch.uint8, device="cuda")[4:-60]
    if name == "rms_norm_weight":
        memory = memory[2:]
    base = memory.view(torch.uint8)
    shifted = torch.empty(0, dtype=old.dtype, device="cuda").set_(
        base.untyped_storage(), base.storage_offset() // old.element_size(), old.shape, old.stride()
    )
    a[name] = shifted
    with pytest.raises(Exception, match=name):
        run(FUSED, a)
