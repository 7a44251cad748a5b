"""Which kernel sparse_mla_prefill_paged runs: over fp8_ds_mla caches Hopper's own, of which one cuts rows into parts,
or Blackwell's where it takes the call and is trusted; the portable one elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

from cute_kernels.formats import FP8_DS_MLA
from cute_kernels.runtime.arch import BLACKWELL, arch_of, multiprocessors
from cute_kernels.runtime.compile import KernelKey
from cute_kernels.runtime.compile import launch as launch_key
from cute_kernels.sparse_mla import paged_parts, schedule
from cute_kernels.sparse_mla.blackwell.prefill_paged import BlackwellPagedKey
from cute_kernels.sparse_mla.gathered import is_own, ungathered, unmapped
from cute_kernels.sparse_mla.hopper.prefill_paged import PagedKey, QuantPagedKey
from cute_kernels.sparse_mla.hopper.prefill_paged_cluster import PagedClusterKey
from cute_kernels.sparse_mla.mma_sync.prefill import PortablePagedKey, group_heads
from cute_kernels.sparse_mla.prefill import (
    HOPPER,
    MOST_NUMBERS,
    logs_arguments,
    misaligned,
    results_of,
    scale_log2,
    why_not_quantized,
)

MOST_KEYS = 2**29
"""Entries and positions that own kernels take of a query row: what their tables have room for, of each cache."""

MOST_PAGE_BYTES = 2**31
"""Of a page, for own kernels."""


def key_for(
    arch: str, heads: int, compressed: str, format0: str, format1: str, is_cut: bool = False, parts: int = 1
) -> KernelKey:
    """The kernel for so many heads and caches of these formats.

    compressed   which compressed entries count: "none", "all" that a row sees, or "listed"
    format1      format0 if there are none
    is_cut       whether rows are cut into so many parts, which may be 1; never elsewhere than on Hopper
    """
    if arch not in (HOPPER, *BLACKWELL) or {format0, format1} != {FP8_DS_MLA.id}:
        return portable_key(arch, heads, compressed, format0, format1)
    if is_cut:
        return PagedClusterKey(arch, paged_parts.cluster_of(parts))
    return BlackwellPagedKey(arch) if arch in BLACKWELL else PagedKey(arch)


@cache
def portable_key(arch: str, heads: int, compressed: str, format0: str, format1: str) -> KernelKey:
    return PortablePagedKey(arch, group_heads(heads), compressed, format0, format1)


def deployment_keys(config: Any, tp: int, arch: str) -> list[KernelKey]:
    """The layers' prefill steps: the window alone, or with entries as the compress ratio says; where a kernel has to be
    trusted first, the portable one as well."""
    kinds = {4: "listed", 128: "all"}
    chosen = dict.fromkeys(kinds.get(ratio, "none") for ratio in config.compress_ratios)
    heads, fmt = config.num_attention_heads // tp, FP8_DS_MLA.id
    ways: list[Callable[..., KernelKey]] = [key_for, *([portable_key] if arch in BLACKWELL else [])]
    keys = [way(arch, heads, compressed, fmt, fmt) for way in ways for compressed in chosen]
    if arch == HOPPER:
        keys += [PagedClusterKey(arch, blocks) for blocks in paged_parts.CLUSTERS]
        keys.append(QuantPagedKey(arch))
    return list(dict.fromkeys(keys))


@cache
def _key(*args: Any) -> KernelKey:
    return key_for(*args)


class Call(NamedTuple):
    """The op's arguments, in the schema's order, checked."""

    q: Any
    swa_cache: Any
    swa_block_table: Any
    query_start_loc: Any
    seq_lens: Any
    sm_scale: float
    window_size: int
    compressed_cache: Any
    compressed_block_table: Any
    compress_ratio: int
    topk_indices: Any
    attn_sink: Any
    kv_format: str
    compressed_kv_format: str
    num_splits: int
    split_tokens: int
    out: Any
    max_logits: Any
    lse: Any
    positions: Any = None
    cos_sin_cache: Any = None
    out_scale: Any = None

    @property
    def is_quantized(self) -> bool:
        return self.positions is not None

    @property
    def compressed(self) -> str:
        if self.compressed_cache is None:
            return "none"
        return "all" if self.topk_indices is None else "listed"

    @property
    def formats(self) -> tuple[str, str]:
        return self.kv_format, self.kv_format if self.compressed_cache is None else self.compressed_kv_format

    @property
    def pools(self) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
        """Both caches and their block tables, the window's again if there is no other."""
        window = self.swa_cache, self.swa_block_table
        is_single = self.compressed_cache is None
        return window, window if is_single else (self.compressed_cache, self.compressed_block_table)

    @property
    def columns(self) -> int:
        """Most compressed entries that a query row attends to."""
        if self.compressed_cache is None:
            return 0
        if self.topk_indices is not None:
            return int(self.topk_indices.shape[1])
        return int(self.compressed_block_table.shape[1] * self.compressed_cache.shape[1])

    @property
    def max_tiles(self) -> int:
        """Tiles of the longest row that the widths of lists and tables allow."""
        positions = min(self.window_size, self.swa_block_table.shape[1] * self.swa_cache.shape[1])
        return schedule.num_tiles(self.columns + int(positions))

    def is_hoppers(self, arch: str) -> bool:
        """Whether Hopper's own kernels take the call, which alone cut rows."""
        return arch == HOPPER and set(self.formats) == {FP8_DS_MLA.id} and _is_small(self)

    def parts(self, sms: int) -> tuple[int, int]:
        """(parts of a row, tiles in a part or 0) of the call, where rows are cut."""
        if self.is_quantized:
            return 1, 0
        if self.num_splits or self.split_tokens:
            return schedule.fixed_parts(self.max_tiles, self.num_splits, self.split_tokens)
        return paged_parts.choose_parts(self.q.shape[0], self.q.shape[1], self.max_tiles, sms), 0


def supports(*args: Any) -> tuple[bool, str]:
    """Whether `launch` can take these (checked) arguments, in the schema's order, and if not, why."""
    call = Call(*args)
    caches = {"swa_cache": call.swa_cache, "compressed_cache": call.compressed_cache}
    pools = {name: pool for name, pool in caches.items() if pool is not None}
    why = _why_not_quantized(call) if call.is_quantized else misaligned("heads of out", call.out, (0, 1))
    if why:
        return False, why
    for name, tensor, axes in (
        ("heads of q", call.q, (0, 1)),
        *((f"pages of {name}", pool, (0,)) for name, pool in pools.items()),
    ):
        why = misaligned(name, tensor, axes)
        if why:
            return False, why
    tables = {"swa_block_table": call.swa_block_table, "compressed_block_table": call.compressed_block_table}
    counts = {"rows of q": 2 * call.q.shape[0], "seq_lens": call.seq_lens.shape[0]}
    counts |= {f"pages of {name}": pool.shape[0] for name, pool in pools.items()}
    counts |= {f"columns of {name}": table.shape[1] for name, table in tables.items() if table is not None}
    if call.topk_indices is not None:
        counts["columns of topk_indices"] = call.topk_indices.shape[1]
    for name, count in counts.items():
        if count >= MOST_NUMBERS:
            return False, f"{name}: expected fewer than 2^30, got {count}"
    why = _uncut(call)
    return not why, why


def _why_not_quantized(call: Call) -> str:
    """Why the results of a call cannot be stored as codes, or nothing."""
    if call.num_splits > 1 or call.split_tokens:
        return "output_quant: expected rows in one part, num_splits at most 1 and split_tokens 0"
    if not call.is_hoppers(arch_of(call.q.device.index)):
        return f"output_quant is supported on {HOPPER} with caches of {FP8_DS_MLA.id} that its own kernel takes"
    return why_not_quantized(call)


def _uncut(call: Call) -> str:
    """Why rows are not cut into the parts that a call asks for, or nothing."""
    if call.num_splits <= 1 and not call.split_tokens:
        return ""
    parts, part_tiles = schedule.fixed_parts(call.max_tiles, call.num_splits, call.split_tokens)
    most = paged_parts.MOST_PARTS if call.is_hoppers(arch_of(call.q.device.index)) else 1
    name, given = ("split_tokens", call.split_tokens) if call.split_tokens else ("num_splits", call.num_splits)
    if part_tiles >= MOST_NUMBERS:
        return f"split_tokens: expected less than 2^30 tiles of {schedule.TILE}, got {given}"
    if parts <= most:
        return ""
    return f"{name}: expected what makes at most {most} of a row's parts, got {given}, which makes {parts}"


def launch(*args: Any) -> None:
    """Run the kernel on the current stream of q's device. Arguments in the schema's order, checked and supported."""
    call = Call(*args)
    if call.out.numel() == 0:
        return
    device_index = call.q.device.index
    arch = arch_of(device_index)
    sms = multiprocessors(device_index)
    called = call.q.shape[1], call.compressed, *call.formats
    if call.is_hoppers(arch):
        parts, part_tiles = call.parts(sms)
        is_cut = schedule.goes_through_workspace(parts, part_tiles)
        more = (parts, part_tiles) if is_cut else (sms,)
        key = QuantPagedKey(arch) if call.is_quantized else _key(arch, *called, is_cut, parts)
        launch_key(key, device_index, *_own_arguments(call), *more)
    elif _is_blackwells(call, arch, device_index):
        launch_key(_key(arch, *called), device_index, *_own_arguments(call), sms)
    else:
        launch_key(portable_key(arch, *called), device_index, *_portable_arguments(call), sms)


def _is_blackwells(call: Call, arch: str, device_index: int) -> bool:
    """Whether Blackwell's own kernel takes a call, and may."""
    if arch not in BLACKWELL or set(call.formats) != {FP8_DS_MLA.id} or not _is_small(call):
        return False
    caches = {"swa_cache": call.swa_cache, "compressed_cache": call.compressed_cache}
    found = [ungathered(name, pool, FP8_DS_MLA.data_bytes) for name, pool in caches.items() if pool is not None]
    why_not = next(filter(None, found), unmapped("q", call.q, (0, 1)))
    return is_own("sparse_mla_prefill_paged", arch, device_index, why_not)


def _is_small(call: Call) -> bool:
    """Whether Hopper's kernel, and Blackwell's, can count what the call has."""
    return 2 * call.columns < MOST_NUMBERS and all(
        pool.shape[1] * FP8_DS_MLA.row_elements < MOST_PAGE_BYTES and table.shape[1] * pool.shape[1] < MOST_KEYS
        for pool, table in call.pools
    )


def _own_arguments(call: Call) -> tuple[Any, ...]:
    """Those of PagedKernels up to the scale."""
    listed = call.topk_indices if call.columns else None
    return (
        call.q,
        *call.pools[0],
        *call.pools[1],
        *results_of(call),
        *logs_arguments(call, call.q.device.index),
        0 if listed is None else listed.data_ptr(),
        0 if listed is None else listed.stride(0) * listed.element_size(),
        call.columns,
        1 if call.compressed_cache is None else min(call.compress_ratio, MOST_NUMBERS),
        *_batch_arguments(call),
        min(call.window_size, MOST_NUMBERS),
        0 if call.attn_sink is None else call.attn_sink.data_ptr(),
        scale_log2(call.sm_scale),
    )


def _portable_arguments(call: Call) -> tuple[Any, ...]:
    """Those of PortablePaged, but for the grid's blocks."""
    return (
        call.q,
        *call.pools[0],
        *call.pools[1],
        call.swa_block_table if call.topk_indices is None else call.topk_indices,
        call.out,
        *logs_arguments(call, call.q.device.index),
        *_batch_arguments(call),
        min(call.window_size, MOST_NUMBERS),
        1 if call.compressed_cache is None else min(call.compress_ratio, MOST_NUMBERS * 2 - 1),
        0 if call.attn_sink is None else call.attn_sink.data_ptr(),
        scale_log2(call.sm_scale),
    )


def _batch_arguments(call: Call) -> tuple[Any, ...]:
    return call.query_start_loc.data_ptr(), call.seq_lens.data_ptr(), call.seq_lens.shape[0]
