"""Choice and launch of the kernel of ratio 128 (c128_kernel.py), for both ops that store entries."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from cute_kernels.compressor import entry
from cute_kernels.compressor.c128_kernel import C128Kernel, smem_bytes
from cute_kernels.compressor.c128_tables import RATIO
from cute_kernels.formats import FP8_DS_MLA, HEAD_DIM, PLAIN_BF16, PLAIN_FP8
from cute_kernels.runtime.arch import SMEM_BYTES, arch_number, arch_of, multiprocessors
from cute_kernels.runtime.compile import KernelKey
from cute_kernels.runtime.compile import launch as launch_key

MINIMUM_ARCH = 90
"""First architecture with clusters."""

CLUSTERS = (8, 4, 2)
"""Blocks that share an entry in calls of few, some and many tokens. Few entries need many multiprocessors each, many
entries need clusters that leave no multiprocessor empty: perf/notes/compressor_c128.md."""

FEW_TOKENS = 1024
MANY_TOKENS = 4096

BY_ENTRIES_TOKENS = 64
"""Tokens per cluster from which on entries save the rows they read."""


@dataclass(frozen=True)
class C128Key(KernelKey):
    """What distinguishes one compiled kernel from another.

    fused     whether rows of the step come from kv_score and are saved
    cluster   blocks that share an entry: 2, 4 or 8
    others    see entry.EntryStore
    """

    kernel_name: ClassVar[str] = "compressor.ratio128"
    kv_format: str = FP8_DS_MLA.id
    fp32_weight: bool = False
    fused: bool = False
    cluster: int = CLUSTERS[0]

    @property
    def smem_bytes(self) -> int:
        return smem_bytes(self.fused)

    @property
    def instructions(self) -> tuple[str, ...]:
        return "cp.async", "ex2", "st.async", "mbarrier", "griddepcontrol"

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        slots = make_fake_tensor(Int64, (cute.sym_int(),), stride=(1,))
        tokens = (Int64(0), Int64(0), Int64(0), Int32(1))
        state = (Int64(0), Int64(0), Int32(0), Int32(1), Int64(0), Int64(0), Int32(0), Int32(0))
        step = (*(Int64(0) for _ in range(6)), Int32(0), Int32(0))
        stream = make_fake_stream(use_tvm_ffi_env_stream=True)
        return self._kernel(), (slots, *tokens, *state, *step, *entry.fake_numbers(), Boolean(False), stream)

    def _kernel(self) -> C128Kernel:
        op = "fused_compress" if self.fused else "compress"
        weight = "_fp32_weight" if self.fp32_weight else ""
        name = f"{op}_norm_rope_store_c128x{self.cluster}_{self.kv_format.split('/')[0]}{weight}"
        store = entry.EntryStore(self.kv_format, self.fp32_weight, "", False, self.arch)
        return C128Kernel(name, self.fused, self.cluster, store)


def deployment_keys(config: Any, tp: int, arch: str, fused: bool) -> list[C128Key]:
    """For a model that has layers with ratio 128: a kernel per size of cluster, in every format of the layers, which
    fuse, and in the usual one if not fused."""
    if RATIO not in config.compress_ratios or not runs_on(arch):
        return []
    formats = (FP8_DS_MLA, PLAIN_BF16, PLAIN_FP8) if fused else (FP8_DS_MLA,)
    return [C128Key(arch, fmt.id, False, fused, cluster) for fmt in formats for cluster in CLUSTERS]


def runs_on(arch: str) -> bool:
    """Whether an architecture has what ratio 128 needs."""
    return arch_number(arch) >= MINIMUM_ARCH and SMEM_BYTES[arch] >= smem_bytes(True)


def blocks_per_entry(count: int) -> int:
    """How many blocks share an entry in a call of `count` tokens."""
    few, some, many = CLUSTERS
    return few if count <= FEW_TOKENS else some if count < MANY_TOKENS else many


def tokens_per_cluster(count: int, multiprocessors: int, cluster: int) -> int:
    """How many tokens a cluster looks at in a call of `count`: so many that all clusters run at once."""
    room = multiprocessors // cluster
    # the blocks of a cluster are neighbours on the chip: where there are more than two, some places stay empty
    at_once = room if cluster == 2 else room * 9 // 10
    return -(-count // max(1, at_once))


@cache
def _key(device_index: int, kv_format: str, fp32_weight: bool, fused: bool, cluster: int) -> C128Key:
    return C128Key(arch_of(device_index), kv_format, fp32_weight, fused, cluster)


def _supports(
    state_cache: Any, block_table: Any, kv_format: str, kv_cache: Any, cos_sin_cache: Any, weight: Any
) -> tuple[bool, str]:
    arch = arch_of(state_cache.device.index)
    if not runs_on(arch):
        return False, f"{arch} has no clusters or less shared memory than {smem_bytes(True)} bytes, sm_90a has both"
    if state_cache.shape[2] != 2 * HEAD_DIM:
        return False, f"ratio {RATIO} needs entries of {HEAD_DIM} columns, {kv_format} has {state_cache.shape[2] // 2}"
    if not _aligned(state_cache):
        return False, _unaligned("pages of state_cache", state_cache)
    for what, rows in (("state_cache", state_cache.shape[0]), ("block_table", block_table.shape[1])):
        if rows * state_cache.shape[1] >= 2**31:
            return False, f"{what} must name fewer than 2^31 rows, got {rows} pages of {state_cache.shape[1]}"
    return entry.supports(kv_cache, cos_sin_cache, weight, kv_format)


def _aligned(matrix: Any) -> bool:
    return matrix.data_ptr() % 16 == 0 and (matrix.shape[0] <= 1 or matrix.stride(0) % 4 == 0)


def _unaligned(what: str, matrix: Any) -> str:
    return f"{what} must be 16-byte aligned, got address {matrix.data_ptr():#x} and strides {tuple(matrix.stride())}"


def supports_compress(
    state_cache: Any,
    token_to_req_indices: Any,
    positions: Any,
    slot_mapping: Any,
    block_table: Any,
    cos_sin_cache: Any,
    kv_cache: Any,
    kv_slot_mapping: Any,
    rms_norm_weight: Any,
    fp8_scale: Any,
    rms_norm_eps: float,
    compress_ratio: int,
    kv_format: str,
    e2m1_rounding: str,
    index_hadamard: bool,
) -> tuple[bool, str]:
    """Whether `launch_compress` can take these (checked) arguments, and if not, why."""
    return _supports(state_cache, block_table, kv_format, kv_cache, cos_sin_cache, rms_norm_weight)


def supports_fused(
    kv_score: Any,
    ape: Any,
    positions: Any,
    token_to_req_indices: Any,
    query_start_loc: Any,
    state_cache: Any,
    slot_mapping: Any,
    block_table: Any,
    cos_sin_cache: Any,
    kv_cache: Any,
    kv_slot_mapping: Any,
    rms_norm_weight: Any,
    min_restart: Any,
    fp8_scale: Any,
    rms_norm_eps: float,
    compress_ratio: int,
    keep_every: int,
    kv_format: str,
    persist: str,
    e2m1_rounding: str,
    index_hadamard: bool,
    use_pdl: bool,
) -> tuple[bool, str]:
    """Whether `launch_fused` can take these (checked) arguments, and if not, why."""
    for name, matrix in (("kv_score", kv_score), ("ape", ape)):
        if not _aligned(matrix):
            return False, _unaligned(f"rows of {name}", matrix)
    return _supports(state_cache, block_table, kv_format, kv_cache, cos_sin_cache, rms_norm_weight)


def _state(state_cache: Any, block_table: Any) -> tuple[int, ...]:
    pages, page_rows, _ = state_cache.shape
    requests, columns = block_table.shape
    page_stride, table_stride = state_cache.stride(0) * 4, block_table.stride(0) * 4
    return (
        state_cache.data_ptr(),
        page_stride,
        pages,
        page_rows,
        block_table.data_ptr(),
        table_stride,
        columns,
        requests,
    )


def launch_compress(
    state_cache: Any,
    token_to_req_indices: Any,
    positions: Any,
    slot_mapping: Any,
    block_table: Any,
    cos_sin_cache: Any,
    kv_cache: Any,
    kv_slot_mapping: Any,
    rms_norm_weight: Any,
    fp8_scale: Any,
    rms_norm_eps: float,
    compress_ratio: int,
    kv_format: str,
    e2m1_rounding: str,
    index_hadamard: bool,
    per_cluster: int | None = None,
    cluster: int | None = None,
) -> None:
    """Run compress_norm_rope_store on the current stream. Arguments in the schema's order, checked and supported.

    per_cluster   tokens that a cluster looks at, and
    cluster       blocks that share an entry, instead of what is best; the result is the same
    """
    count = slot_mapping.shape[0]
    if count == 0:
        return
    device_index = state_cache.device.index
    cluster = cluster or blocks_per_entry(count)
    launch_key(
        _key(device_index, kv_format, rms_norm_weight.element_size() == 4, False, cluster),
        device_index,
        slot_mapping,
        positions.data_ptr(),
        token_to_req_indices.data_ptr(),
        kv_slot_mapping.data_ptr(),
        per_cluster or tokens_per_cluster(count, multiprocessors(device_index), cluster),
        *_state(state_cache, block_table),
        *(0, 0, 0, 0, 0, 0, 0, 0),
        *entry.numbers(kv_cache, cos_sin_cache, rms_norm_weight, fp8_scale, rms_norm_eps),
        False,
    )


def launch_fused(
    kv_score: Any,
    ape: Any,
    positions: Any,
    token_to_req_indices: Any,
    query_start_loc: Any,
    state_cache: Any,
    slot_mapping: Any,
    block_table: Any,
    cos_sin_cache: Any,
    kv_cache: Any,
    kv_slot_mapping: Any,
    rms_norm_weight: Any,
    min_restart: Any,
    fp8_scale: Any,
    rms_norm_eps: float,
    compress_ratio: int,
    keep_every: int,
    kv_format: str,
    persist: str,
    e2m1_rounding: str,
    index_hadamard: bool,
    use_pdl: bool,
    per_cluster: int | None = None,
    cluster: int | None = None,
) -> None:
    """Run fused_compress_norm_rope_store on the current stream. Arguments in the schema's order, checked and supported.

    keep_every makes no difference: at a multiple of it nothing of the group before is read again.

    per_cluster   tokens that a cluster looks at, and
    cluster       blocks that share an entry, instead of what is best; the result is the same
    """
    count = slot_mapping.shape[0]
    if count == 0:
        return
    device_index = state_cache.device.index
    cluster = cluster or blocks_per_entry(count)
    per_cluster = per_cluster or tokens_per_cluster(count, multiprocessors(device_index), cluster)
    launch_key(
        _key(device_index, kv_format, rms_norm_weight.element_size() == 4, True, cluster),
        device_index,
        slot_mapping,
        positions.data_ptr(),
        token_to_req_indices.data_ptr(),
        kv_slot_mapping.data_ptr(),
        per_cluster,
        *_state(state_cache, block_table),
        kv_score.data_ptr(),
        kv_score.stride(0) * 4,
        ape.data_ptr(),
        ape.stride(0) * 4,
        query_start_loc.data_ptr(),
        0 if min_restart is None else min_restart.data_ptr(),
        int(persist == "window"),
        int(per_cluster >= BY_ENTRIES_TOKENS),
        *entry.numbers(kv_cache, cos_sin_cache, rms_norm_weight, fp8_scale, rms_norm_eps),
        use_pdl,
    )
