# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cute_kernels.compat import vllm
from cute_kernels.compressor import ops
from cute_kernels.runtime.record import record_calls
from tests import helpers
from tests.compat.agreement import agree
from tests.compressor import meaning
from tests.compressor.meaning import Kind, Scene
from tests.indices.batches import int32

RECORDS = [
    Kind(),
    Kind(ratio=128),
    Kind(128, 4, "indexer_fp8/1"),
    Kind(128, 4, "indexer_mxfp4/1"),
    Kind(128, 4, "indexer_mxfp4_wide/1"),
]
PLAIN = [
    Kind(format_id="plain_bf16/1"),
    Kind(ratio=128, format_id="plain_fp8/1", fp8_scale=0.3),
    Kind(format_id="plain_fp8/1"),
]


def scene_of(kind: Kind) -> tuple[Scene, SimpleNamespace]:
    """A request from its start and one that closes a group with its first token."""
    r = kind.ratio
    scene = Scene(kind, [2 * r + 1, 2 * r], 1, state_rows=8 if r == 128 else 4)
    scene.fill_state(0, 0, 2 * r + 1)
    scene.fill_state(1, 0, 2 * r)
    return scene, scene.step([(0, 0, 2 * r + 1), (1, 2 * r - 1, 2 * r)], pad=2)


def store_args(scene: Scene, step: SimpleNamespace) -> list[Any]:
    """What vLLM's compressor passes, in order."""
    kind = scene.kind
    fp4 = "mxfp4" in kind.format_id
    return [
        scene.state_cache,
        step.slot_mapping.shape[0],
        step.token_to_req_indices,
        step.positions,
        step.slot_mapping,
        step.block_table,
        scene.state_rows,
        kind.width,
        scene.cos_sin,
        scene.kv_cache,
        SimpleNamespace(slot_mapping=step.entry_slots),
        {"launch_pdl": False},
        kind.head_dim,
        64,
        kind.ratio,
        kind.ratio == 4,
        fp4,
        scene.weight,
        meaning.EPS,
        *((64, 576, 8) if kind.head_dim == 512 else (32, 64, 4) if fp4 else (128, 128, 4)),
    ]


def low_level_args(scene: Scene, step: SimpleNamespace) -> dict[str, Any]:
    return {
        "state_cache": scene.state_cache,
        "token_to_req_indices": step.token_to_req_indices,
        "positions": step.positions,
        "slot_mapping": step.slot_mapping,
        "block_table": step.block_table,
        "block_size": scene.state_rows,
        "rms_norm_weight": scene.weight,
        "rms_norm_eps": meaning.EPS,
        "cos_sin_cache": scene.cos_sin,
        "k_cache": scene.kv_cache,
        "kv_slot_mapping": step.entry_slots,
        "kv_cache_block_size": scene.entry_rows,
        "kv_block_stride": scene.kv_cache.stride(0),
    }


def stored(scene: Scene, step: SimpleNamespace) -> None:
    assert step.closed
    assert torch.equal(helpers.raw_bytes(scene.kv_cache), scene.entry_bytes(step.closed))


@pytest.mark.parametrize("kind", RECORDS, ids=str)
@pytest.mark.parametrize("name", ["triton", "cutedsl"])
def test_stores_of_records(name: str, kind: Kind) -> None:
    scene, step = scene_of(kind)
    getattr(vllm, f"compress_norm_rope_store_{name}")(*store_args(scene, step))
    stored(scene, step)


@pytest.mark.parametrize("kind", PLAIN, ids=str)
def test_stores_of_plain_rows(kind: Kind) -> None:
    scene, step = scene_of(kind)
    fp8 = "fp8" in kind.format_id
    vllm.compress_norm_rope_store_cutedsl(*store_args(scene, step), True, fp8, kind.options()["fp8_scale"])
    stored(scene, step)


def test_a_scale_for_other_caches_is_ignored() -> None:
    for kind, full in ((Kind(), False), (PLAIN[0], True)):
        scene, step = scene_of(kind)
        vllm.compress_norm_rope_store_cutedsl(*store_args(scene, step), store_full_kv=full, fp8_scale=torch.ones(1))
        stored(scene, step)


def test_the_low_level_store_of_ratio_4() -> None:
    for kind, full in ((Kind(), {}), (PLAIN[2], {"store_full_kv": True, "store_full_fp8": True})):
        scene, step = scene_of(kind)
        vllm.fused_kv_compress_norm_rope_insert_sparse_attn_cutedsl(**low_level_args(scene, step), **full)
        stored(scene, step)


def test_the_low_level_store_of_ratio_128() -> None:
    full = {"store_full_kv": True, "store_full_fp8": True, "fp8_scale": torch.tensor([0.3])}
    for kind, options in ((RECORDS[1], {}), (PLAIN[1], full)):
        scene, step = scene_of(kind)
        scratch = torch.full((step.slot_mapping.shape[0], 512), 7.0)
        args = low_level_args(scene, step) | options
        vllm.split_kv_compress_norm_rope_insert_sparse_attn_cutedsl(**args, compressed_kv=scratch)
        stored(scene, step)
        assert (scratch == 7).all()


def test_the_scratch_of_ratio_128_says_how_many_rows() -> None:
    scene, step = scene_of(RECORDS[1])
    args = low_level_args(scene, step)
    vllm.split_kv_compress_norm_rope_insert_sparse_attn_cutedsl(**args, compressed_kv=torch.empty(129, 512))
    assert torch.equal(helpers.raw_bytes(scene.kv_cache), scene.entry_bytes([(0, 0)]))


def test_saved_states() -> None:
    scene, step = scene_of(Kind(128, 4, "indexer_fp8/1"))
    n, width = step.slot_mapping.shape[0], scene.kind.width
    kv_score = torch.randn(n, 2 * width, generator=helpers.generator(3))
    args = (kv_score[:, :width], kv_score[:, width:], scene.ape, step.positions, scene.state_cache)
    args = (*args, step.slot_mapping, scene.state_rows, width, 4, {"launch_pdl": False})
    names = ("kv", "score", "ape", "positions", "state_cache", "slot_mapping", "block_size", "state_width")
    kwargs = dict(zip((*names, "compress_ratio", "pdl_kwargs"), args, strict=True))
    agree(vllm.save_partial_states, args, ops.save_partial_states, kwargs)


@pytest.mark.parametrize(("ratio", "rows"), [(4, 64), (4, 3), (128, 2)])
def test_compressed_slots_by_rows_per_page(ratio: int, rows: int) -> None:
    """block_size is what vLLM passes: the rows of a page, not its tokens."""
    query_lens, seq_lens = [3, 300, 1], [8, 900, 256]
    starts = [0, 3, 303, 304]
    table = torch.randint(0, 90, (3, 80), generator=helpers.generator(5), dtype=torch.int32)
    own = torch.arange(306)
    own[150:200] = -1
    want, want_own = [-1] * 306, [-1] * 306
    for r in range(3):
        for i in range(query_lens[r]):
            position, t = seq_lens[r] - query_lens[r] + i, starts[r] + i
            if (position + 1) % ratio == 0:
                entry = position // ratio
                want[t] = int(table[r, entry // rows]) * rows + entry % rows
                want_own[t] = want[t] if own[t] >= 0 else -1
    assert want != want_own
    args = (int32(starts), int32(seq_lens), table, rows, ratio)
    assert vllm.get_compressed_slot_mapping(306, *args).tolist() == want
    out = torch.full((310,), 99)
    got = vllm.get_compressed_slot_mapping_v033(306, own, *args, out=out, cp_interleave=2)
    assert got.tolist() == want_own
    assert out.tolist() == [*want_own, -1, -1, -1, -1]
    assert vllm.get_compressed_slot_mapping(304, *args, out).tolist() == want[:304]


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"kv_cache_block_size": 5}, ValueError),
        ({"head_size": 128}, NotImplementedError),
        ({"fp8_max": 224.0}, NotImplementedError),
        ({"k_cache": torch.zeros(2, 4, dtype=torch.uint8)}, ValueError),
    ],
)
@pytest.mark.parametrize("name", ["fused", "split"])
def test_what_the_low_level_stores_refuse(name: str, change: dict[str, Any], error: type[Exception]) -> None:
    name = f"{name}_kv_compress_norm_rope_insert_sparse_attn_cutedsl"
    scene, step = scene_of(Kind(ratio=128 if "split" in name else 4))
    args = low_level_args(scene, step) | ({"compressed_kv": torch.empty(3, 512)} if "split" in name else {})
    with pytest.raises(error, match=f"{name}: {next(iter(change))}: "), record_calls() as record:
        getattr(vllm, name)(**args | change)
    assert not record.calls


def test_what_else_is_refused() -> None:
    scene, step = scene_of(Kind())
    with pytest.raises(ValueError, match="compress_norm_rope_store_cutedsl: store_full_fp8: "):
        vllm.compress_norm_rope_store_cutedsl(*store_args(scene, step), store_full_fp8=True)
    with pytest.raises(TypeError, match="kv_cache"):
        vllm.compress_norm_rope_store_cutedsl(*store_args(scene, step), store_full_kv=True)
    table = int32([0, 1]), int32([4]), torch.zeros(1, 1, dtype=torch.int32), 2, 4
    with pytest.raises(NotImplementedError, match="get_compressed_slot_mapping: dcp_world_size: "):
        vllm.get_compressed_slot_mapping_v033(1, torch.zeros(1, dtype=torch.int64), *table, dcp_world_size=2)
