"""Choice and launch of the kernels of ratio 4 (c4_kernel.py), for both ops that store entries."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from cute_kernels.compressor import entry
from cute_kernels.compressor.c4_kernel import C4Kernel
from cute_kernels.dsl import convert, ptx
from cute_kernels.formats import FORMATS, FP8_DS_MLA, INDEXER_FP8, INDEXER_MXFP4, PLAIN_BF16, PLAIN_FP8
from cute_kernels.numerics import E2M1_ROUNDINGS
from cute_kernels.runtime.arch import arch_number, arch_of
from cute_kernels.runtime.compile import KernelKey
from cute_kernels.runtime.compile import launch as launch_key

LARGEST_INDEX = 2**31 - 16
"""Rows of pools, block tables and rotary tables are numbered below this: 32 bits hold small sums with them."""


@dataclass(frozen=True)
class C4Key(KernelKey):
    """What distinguishes one compiled kernel from another.

    fused        whether rows of the step come from its projections, and are saved
    through_l1   whether window rows may go through L1: faster where all of many rows are saved, slower elsewhere
    others       see entry.EntryStore
    """

    kernel_name: ClassVar[str] = "compressor.ratio4"
    fused: bool
    kv_format: str
    fp32_weight: bool = False
    e2m1_rounding: str = ""
    index_hadamard: bool = False
    through_l1: bool = False

    @property
    def name(self) -> str:
        """The kernel's in a profile."""
        op = "fused_compress_c4" if self.fused else "compress_c4"
        options = (
            self.kv_format.replace("/", "_"),
            "fp32w" * self.fp32_weight,
            self.e2m1_rounding,
            "l1" * self.through_l1,
        )
        return "_".join(filter(None, (op, *options, "hadamard" * self.index_hadamard)))

    @property
    def instructions(self) -> tuple[str, ...]:
        saving = ("st.global.128",) if self.fused else ()
        e4m3 = ("cvt.e4m3",) if self.kv_format in entry.E4M3 else ()
        e2m1 = convert.e2m1_instructions(self.arch) if self.e2m1_rounding else ()
        return ("ld.global.128", *saving, *e4m3, *e2m1)

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        slots = make_fake_tensor(Int64, (cute.sym_int(),), stride=(1,))
        table = make_fake_tensor(Int32, (cute.sym_int(), cute.sym_int()), stride=(cute.sym_int64(), 1))
        tokens = slots, Int64(0), Int64(0), Int64(0), Int32(1)
        state = table, Int64(0), Int64(0), Int32(0), Int32(1)
        step = Int64(0), Int64(0), Int64(0), Int64(0), Int64(0), Int64(0), Int64(0), Int32(0)
        stream = make_fake_stream(use_tvm_ffi_env_stream=True)
        store = entry.EntryStore(self.kv_format, self.fp32_weight, self.e2m1_rounding, self.index_hadamard, self.arch)
        kernel = C4Kernel(
            self.name, self.fused, self.through_l1, store, arch_number(self.arch) >= ptx.DEPENDENT_LAUNCH_ARCH
        )
        return kernel, (*tokens, *state, *step, *entry.fake_numbers(), Boolean(False), stream)


def deployment_keys(config: Any, tp: int, arch: str, fused: bool) -> list[C4Key]:
    """For the entries of attention and those of the indexer, in every format and with every option of the layers, which
    fuse; one for each of the usual formats if not fused."""
    if 4 not in config.compress_ratios or not entry.runs_on(arch, FP8_DS_MLA.id):
        return []
    kinds = [(fmt.id, E2M1_ROUNDINGS[0], False) for fmt in (FP8_DS_MLA, INDEXER_FP8, INDEXER_MXFP4)]
    if fused:
        kinds += [(fmt.id, E2M1_ROUNDINGS[0], False) for fmt in (PLAIN_BF16, PLAIN_FP8)]
        kinds += [(INDEXER_FP8.id, E2M1_ROUNDINGS[0], True)]
        options = [(rounding, turned) for turned in (False, True) for rounding in E2M1_ROUNDINGS]
        kinds += [(INDEXER_MXFP4.id, *option) for option in options[1:]]
    return [
        C4Key(arch, fused, **entry.store_for(kv_format, False, rounding, turned), through_l1=through_l1)
        for kv_format, rounding, turned in kinds
        for through_l1 in ((False, True) if fused else (False,))
    ]


def is_decode(count: int, requests: int) -> bool:
    """Whether a step has few tokens per request: their windows hardly overlap, and each of them is work of its own."""
    return count < 8 * requests


def tokens_per_team(count: int, requests: int, dim: int, most: int) -> int:
    """How many consecutive tokens, a power of two, a team of warps takes in a call with `count`.

    So few that every multiprocessor has teams, so many that their metadata are read seldom; `most` is 16 where little
    is saved and 4 elsewhere (perf/notes/data/c4_3.txt).
    """
    if is_decode(count, requests):
        return 1
    return 1 << max(1, min(most, count * dim >> 18)).bit_length() - 1


@cache
def _key(
    device_index: int,
    fused: bool,
    kv_format: str,
    fp32_weight: bool,
    e2m1_rounding: str,
    index_hadamard: bool,
    through_l1: bool,
) -> C4Key:
    fields = entry.store_for(kv_format, fp32_weight, e2m1_rounding, index_hadamard)
    return C4Key(arch_of(device_index), fused, **fields, through_l1=through_l1)


def _unaligned(**matrices: Any) -> str:
    """Why a matrix cannot be read 16 bytes at a time, if one cannot."""
    for name, matrix in matrices.items():
        if matrix.data_ptr() % 16 or (matrix.shape[0] > 1 and matrix.stride(0) % 4):
            where = f"address {matrix.data_ptr():#x} and strides {tuple(matrix.stride())}"
            return f"rows of {name} must be 16-byte aligned, got {where}"
    return ""


def _supports(
    state_cache: Any,
    block_table: Any,
    cos_sin_cache: Any,
    kv_cache: Any,
    rms_norm_weight: Any,
    kv_format: str,
    **matrices: Any,
) -> tuple[bool, str]:
    reason = _unaligned(state_cache=state_cache, **matrices)
    if reason:
        return False, reason
    pages, rows, _ = state_cache.shape
    columns = block_table.shape[1]
    for name, count in (
        ("state_cache", pages * rows),
        ("block_table", columns * rows),
        ("cos_sin_cache", cos_sin_cache.shape[0]),
    ):
        if count >= LARGEST_INDEX:
            return False, f"{name} must have fewer than {LARGEST_INDEX} rows, got {count}"
    return entry.supports(kv_cache, cos_sin_cache, rms_norm_weight, kv_format)


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
    """As compress.supports, for ratio 4."""
    return _supports(state_cache, block_table, cos_sin_cache, kv_cache, rms_norm_weight, kv_format)


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
    """As fused.supports, for ratio 4."""
    return _supports(
        state_cache, block_table, cos_sin_cache, kv_cache, rms_norm_weight, kv_format, kv_score=kv_score, ape=ape
    )


_NO_STEP = (0,) * 8
"""In place of what only the fused kernel reads."""


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
    *,
    per_team: int | None = None,
    through_l1: bool = False,
) -> None:
    """Run the kernel on the current stream. Arguments in the schema's order, and what measurements change."""
    count = slot_mapping.shape[0]
    if count == 0:
        return
    device_index = slot_mapping.device.index
    fp32_weight = rms_norm_weight.element_size() == 4
    pages, page_rows, _ = state_cache.shape
    launch_key(
        _key(device_index, False, kv_format, fp32_weight, e2m1_rounding, index_hadamard, through_l1),
        device_index,
        slot_mapping,
        kv_slot_mapping.data_ptr(),
        positions.data_ptr(),
        token_to_req_indices.data_ptr(),
        per_team or tokens_per_team(count, block_table.shape[0], FORMATS[kv_format].dim, 4),
        block_table,
        state_cache.data_ptr(),
        state_cache.stride(0) * 4,
        pages,
        page_rows,
        *_NO_STEP,
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
    *,
    per_team: int | None = None,
    through_l1: bool | None = None,
) -> None:
    """Run the kernel on the current stream. Arguments in the schema's order, and what measurements change."""
    count = slot_mapping.shape[0]
    if count == 0:
        return
    device_index = slot_mapping.device.index
    requests, save_all = block_table.shape[0], persist == "all"
    if through_l1 is None:
        through_l1 = save_all and not is_decode(count, requests)
    fp32_weight = rms_norm_weight.element_size() == 4
    pages, page_rows, _ = state_cache.shape
    launch_key(
        _key(device_index, True, kv_format, fp32_weight, e2m1_rounding, index_hadamard, through_l1),
        device_index,
        slot_mapping,
        kv_slot_mapping.data_ptr(),
        positions.data_ptr(),
        token_to_req_indices.data_ptr(),
        per_team or tokens_per_team(count, requests, FORMATS[kv_format].dim, 4 if save_all else 16),
        block_table,
        state_cache.data_ptr(),
        state_cache.stride(0) * 4,
        pages,
        page_rows,
        kv_score.data_ptr(),
        kv_score.stride(0) * 4,
        ape.data_ptr(),
        ape.stride(0) * 4,
        query_start_loc.data_ptr(),
        0 if min_restart is None else min_restart.data_ptr(),
        keep_every,
        save_all,
        *entry.numbers(kv_cache, cos_sin_cache, rms_norm_weight, fp8_scale, rms_norm_eps),
        use_pdl,
    )
