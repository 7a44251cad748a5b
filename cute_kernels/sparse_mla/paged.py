"""Which kernel sparse_mla_prefill_paged runs: Hopper's over fp8_ds_mla caches, and none elsewhere."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from cute_kernels import formats
from cute_kernels.runtime.arch import arch_of, multiprocessors
from cute_kernels.runtime.compile import launch as launch_key
from cute_kernels.sparse_mla.paged_sm90 import PagedKey
from cute_kernels.sparse_mla.prefill import ARCH, MOST_NUMBERS, misaligned, scale_log2
from cute_kernels.sparse_mla.prefill_sm90_plan import ROWS

MOST_KEYS = 2**29
"""Entries and positions that a query row's tables have room for, of each cache."""

MOST_PAGE_BYTES = 2**31


def deployment_keys(config: Any, tp: int, arch: str) -> list[PagedKey]:
    """One kernel takes every call with many heads; with few ones that attend to all entries have another."""
    if arch != ARCH:
        return []
    ways = [False, True] if 128 in config.compress_ratios else [False]
    return list(dict.fromkeys(_key(arch, config.num_attention_heads // tp, is_dense) for is_dense in ways))


@cache
def _key(arch: str, heads: int, is_dense: bool) -> PagedKey:
    if heads > ROWS:
        return PagedKey(arch, "heads")
    return PagedKey(arch, "rows" if is_dense else "nothing")


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
    out: Any
    max_logits: Any
    lse: Any

    @property
    def columns(self) -> int:
        """Most compressed entries that a query row attends to."""
        if self.compressed_cache is None:
            return 0
        if self.topk_indices is not None:
            return int(self.topk_indices.shape[1])
        return int(self.compressed_block_table.shape[1] * self.compressed_cache.shape[1])


def supports(*args: Any) -> tuple[bool, str]:
    """Whether `launch` can take these (checked) arguments, in the schema's order, and if not, why."""
    call = Call(*args)
    arch = arch_of(call.q.device.index)
    if arch != ARCH:
        return False, f"the kernel is for {ARCH}, got {arch}"
    kinds = {"kv_format": call.kv_format}
    caches = {"swa": (call.swa_cache, call.swa_block_table)}
    if call.compressed_cache is not None:
        kinds["compressed_kv_format"] = call.compressed_kv_format
        caches["compressed"] = call.compressed_cache, call.compressed_block_table
    for name, kind in kinds.items():
        if kind != formats.FP8_DS_MLA.id:
            return False, f"{name}: the kernel is for {formats.FP8_DS_MLA.id}, got {kind}"
    for name, tensor, axes in (
        ("heads of q", call.q, (0, 1)),
        ("heads of out", call.out, (0, 1)),
        *((f"pages of {name}_cache", pages, (0,)) for name, (pages, _) in caches.items()),
    ):
        why = misaligned(name, tensor, axes)
        if why:
            return False, why
    for name, (pages, table) in caches.items():
        rows = pages.shape[1]
        if rows * formats.FP8_DS_MLA.row_elements >= MOST_PAGE_BYTES:
            return False, f"{name}_cache: expected pages of less than 2^31 bytes, got shape {tuple(pages.shape)}"
        if table.shape[1] * rows >= MOST_KEYS:
            shape = tuple(table.shape)
            return False, f"{name}_block_table: expected pages of fewer than 2^29 rows in all, got shape {shape}"
    counts = {"rows of q": 2 * call.q.shape[0], "seq_lens": call.seq_lens.shape[0], "topk_indices": 2 * call.columns}
    for name, count in counts.items():
        if count >= MOST_NUMBERS:
            return False, f"{name}: expected fewer than 2^30, got {count}"
    return True, ""


def launch(*args: Any) -> None:
    """Run the kernel on the current stream of q's device. Arguments in the schema's order, checked and supported."""
    call = Call(*args)
    if call.out.numel() == 0:
        return
    device_index = call.q.device.index
    has_other = call.compressed_cache is not None
    listed = call.topk_indices if call.columns else None
    is_dense = has_other and call.topk_indices is None
    launch_key(
        _key(arch_of(device_index), call.q.shape[1], is_dense),
        device_index,
        call.q,
        call.swa_cache,
        call.swa_block_table,
        call.compressed_cache if has_other else call.swa_cache,
        call.compressed_block_table if has_other else call.swa_block_table,
        call.out,
        call.max_logits,
        call.lse,
        0 if listed is None else listed.data_ptr(),
        0 if listed is None else listed.stride(0) * listed.element_size(),
        call.columns,
        min(call.compress_ratio, MOST_NUMBERS) if has_other else 1,
        call.query_start_loc.data_ptr(),
        call.seq_lens.data_ptr(),
        call.seq_lens.shape[0],
        min(call.window_size, MOST_NUMBERS),
        0 if call.attn_sink is None else call.attn_sink.data_ptr(),
        scale_log2(call.sm_scale),
        multiprocessors(device_index),
    )
