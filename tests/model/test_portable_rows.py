# SPDX-License-Identifier: Apache-2.0
"""What the portable prefill kernel makes of raw rows of a cache, as compiled, in the model of the GPU: bf16 columns of
each format, in the tile that its products read."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint8
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from cutlass.memory import SmemAllocator

from cute_kernels.dsl import ptx
from cute_kernels.dsl.tensor import address
from cute_kernels.formats import FP8_DS_MLA, MXFP8_V41, NVFP4_V41
from cute_kernels.runtime.key import KernelKey
from cute_kernels.sparse_mla.mma_sync import prefill
from tests import oracle
from tests.compile.reports import compile_report
from tests.model.launch import pack, run_grid
from tests.model.memory import GlobalMemory
from tests.model.ptx import parse

THREADS = prefill.WARPS * 32


@dataclass(frozen=True)
class RowsKey(KernelKey):
    """A kernel of `convert_step` alone."""

    kernel_name: ClassVar[str] = "tests.portable_rows"
    format0: str = FP8_DS_MLA.id
    format1: str = FP8_DS_MLA.id

    @property
    def config(self) -> prefill.PrefillConfig:
        return prefill.PrefillConfig(self.arch, 64, (self.format0, self.format1))

    @property
    def smem_bytes(self) -> int:
        config = self.config
        return config.stage_bytes + config.keys * (prefill.SLABS * prefill.SLAB_ROW + 4)

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        tensors = [make_fake_tensor(Int32, (cute.sym_int(),), stride=(1,)) for _ in range(3)]
        return Rows(self), (*tensors, make_fake_stream(use_tvm_ffi_env_stream=True))


class Rows:
    """(stage, masks, tile, stream): the bytes of a stage, which cache each key is of, and what becomes of them."""

    def __init__(self, key: RowsKey) -> None:
        self.config, self.size = key.config, key.smem_bytes

    @cute.jit
    def __call__(self, stage: cute.Tensor, masks: cute.Tensor, tile: cute.Tensor, stream: cuda.CUstream) -> None:
        kernel = self.kernel(address(stage), address(masks), address(tile))
        kernel.launch(grid=[1, 1, 1], block=[THREADS, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, stage: Int64, masks: Int64, tile: Int64) -> None:
        thread, _, _ = cute.arch.thread_idx()
        config = self.config
        memory = SmemAllocator().allocate_tensor(Uint8, cute.make_layout(self.size), byte_alignment=128)
        tile_at = memory.iterator.toint()
        tile_bytes = config.keys * prefill.SLABS * prefill.SLAB_ROW
        stage_at, masks_at = tile_at + tile_bytes, tile_at + tile_bytes + config.stage_bytes
        for word in range(thread, config.stage_bytes // 4, THREADS):
            ptx.store_shared_s32(stage_at + word * 4, ptx.load_global_s32_in_order(stage + Int64(word) * 4))
        for key in range(thread, config.keys, THREADS):
            ptx.store_shared_s32(masks_at + key * 4, ptx.load_global_s32_in_order(masks + Int64(key) * 4))
        cute.arch.sync_threads()
        prefill.convert_step(stage_at, tile_at, masks_at, thread // 32, thread % 32, config)
        cute.arch.sync_threads()
        for word in range(thread, tile_bytes // 4, THREADS):
            ptx.store_global_s32(tile + Int64(word) * 4, ptx.load_shared_s32(tile_at + word * 4))


def meaning(fmt: Any, data: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """float64 columns of a record, from tables."""
    if fmt == NVFP4_V41:
        nibbles = np.stack([data & 15, data >> 4], axis=-1).reshape(-1)
        values = np.where(nibbles & 8, -1.0, 1.0) * oracle.E2M1[nibbles & 7]
        return values * np.repeat(oracle.E4M3[scales], 16)
    powers = np.where(scales == 255, np.nan, np.exp2(scales.astype(np.float64) - 127))
    if fmt == MXFP8_V41:
        return oracle.E4M3[data] * np.repeat(powers, 32)
    rope = torch.from_numpy(data[448:].copy()).view(torch.bfloat16)
    return np.concatenate([oracle.E4M3[data[:448]] * np.repeat(powers[:7], 64), oracle.to_numpy(rope)])


PAIRS = list(itertools.product((FP8_DS_MLA, MXFP8_V41), (FP8_DS_MLA, MXFP8_V41, NVFP4_V41)))


@pytest.mark.parametrize("formats", PAIRS, ids=lambda pair: " and ".join(fmt.id for fmt in pair))
def test_columns_of_every_format(formats: tuple[Any, Any]) -> None:
    """Every code, scales of all sizes, NaN; rows of both caches in turn, more bytes around them."""
    key = RowsKey("sm_90a", formats[0].id, formats[1].id)
    config, rng = key.config, np.random.default_rng(0)
    stage = rng.integers(0, 256, config.stage_bytes, dtype=np.uint8)
    which = rng.integers(1, 3, config.keys)
    want = np.zeros((config.keys, 512))
    for number in range(config.keys):
        fmt, at = formats[which[number] - 1], number * config.raw_row
        data = rng.integers(0, 256, fmt.data_bytes, dtype=np.uint8)
        if fmt != NVFP4_V41:
            data[: 512 if fmt == MXFP8_V41 else 448] &= 0xF7  # no NaN among codes
        largest = 0x80 if fmt == NVFP4_V41 else 256
        scales = rng.integers(0 if fmt == NVFP4_V41 else 20, largest, fmt.scale_bytes, dtype=np.uint8)
        scales_at = config.scales_at + number * fmt.scale_bytes if fmt == FP8_DS_MLA else at + fmt.data_bytes
        stage[at : at + fmt.data_bytes] = data
        stage[scales_at : scales_at + fmt.scale_bytes] = scales
        want[number] = meaning(fmt, data, scales)
    memory, program = GlobalMemory(), parse(compile_report(key).ptx)
    tile = memory.reserve(config.keys * 1024)
    places = memory.put(stage), memory.put(which.astype(np.int32).view(np.uint8)), tile
    with np.errstate(all="ignore"):
        run_grid(program, pack(program, list(places)), memory, blocks=1, size=key.smem_bytes)
    words = torch.from_numpy(memory.get(tile, (8, config.keys, 8, 8), np.int16)).view(torch.bfloat16)
    # chunk c of row r of a slab lies at chunk c ^ (r % 8)
    row = torch.arange(config.keys)[:, None]
    chunks = words[:, row, torch.arange(8) ^ row % 8]
    got = oracle.to_numpy(chunks.permute(1, 0, 2, 3).reshape(config.keys, 512))
    rounded = oracle.to_numpy(torch.from_numpy(want).to(torch.bfloat16))
    np.testing.assert_array_equal(got, rounded)
