"""Which kernel sparse_mla_mixed runs: Hopper's own for each cache format, over bf16 caches by the number of heads;
Blackwell's own where it takes the call and is trusted; the portable one elsewhere."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from cute_kernels import formats
from cute_kernels.runtime.arch import BLACKWELL, arch_of, multiprocessors
from cute_kernels.runtime.compile import KernelKey
from cute_kernels.runtime.compile import launch as launch_key
from cute_kernels.sparse_mla.arguments import no_logs
from cute_kernels.sparse_mla.blackwell.prefill_mixed import BlackwellMixedFp8Key, BlackwellMixedKey
from cute_kernels.sparse_mla.gathered import is_own, ungathered, unmapped
from cute_kernels.sparse_mla.hopper.prefill_mixed import MixedFp8Key, MixedKey
from cute_kernels.sparse_mla.hopper.prefill_swap_ab import HEADS as SWAP_AB_HEADS
from cute_kernels.sparse_mla.hopper.prefill_swap_ab import SwapAbMixedKey
from cute_kernels.sparse_mla.mma_sync.prefill import PortableMixedKey, group_heads
from cute_kernels.sparse_mla.params import COUNT_BITS, UNIT
from cute_kernels.sparse_mla.prefill import HOPPER, MOST_NUMBERS, misaligned, scale_log2
from cute_kernels.sparse_mla.schedule import block_heads

MOST_POOL_BYTES = UNIT << 31
"""From the first row of a pool to the end of the last one."""


def key_for(arch: str, heads: int, kv_format: str) -> KernelKey:
    """The kernel for so many heads and caches of that format: the architecture's own one, if it has one."""
    if arch in BLACKWELL:
        return BlackwellMixedKey(arch) if kv_format == formats.PLAIN_BF16.id else BlackwellMixedFp8Key(arch)
    if arch != HOPPER:
        return portable_key(arch, heads, kv_format)
    if kv_format == formats.PLAIN_FP8.id:
        return MixedFp8Key(arch)
    return SwapAbMixedKey(arch, block_heads(heads)) if heads <= SWAP_AB_HEADS[-1] else MixedKey(arch)


def portable_key(arch: str, heads: int, kv_format: str) -> KernelKey:
    return PortableMixedKey(arch, group_heads(heads), kv_format)


def deployment_keys(config: Any, tp: int, arch: str) -> list[KernelKey]:
    """One kernel for each format takes every call of a rank; where it has to be trusted first, the portable one as
    well."""
    heads, chosen = config.num_attention_heads // tp, (formats.PLAIN_BF16.id, formats.PLAIN_FP8.id)
    kinds = [key_for, *([portable_key] if arch in BLACKWELL else [])]
    return list(dict.fromkeys(kind(arch, heads, fmt) for fmt in chosen for kind in kinds))


@cache
def _key(*args: Any) -> KernelKey:
    return key_for(*args)


@cache
def _portable_key(*args: Any) -> KernelKey:
    return portable_key(*args)


class Call(NamedTuple):
    """The op's arguments, in the schema's order, checked."""

    query: Any
    swa_kv_cache: Any
    sparse_indices: Any
    compressed_kv_cache: Any
    sparse_topk_lens: Any
    seq_lens: Any
    cum_seq_lens_q: Any
    bmm1_scale: float
    bmm2_scale: float
    sinks: Any
    window_size: int
    kv_format: str
    out: Any
    lse: Any


def supports(*args: Any) -> tuple[bool, str]:
    """Whether `launch` can take these (checked) arguments, in the schema's order, and if not, why."""
    call = Call(*args)
    caches = {"swa_kv_cache": call.swa_kv_cache, "compressed_kv_cache": call.compressed_kv_cache}
    pools = {name: pool for name, pool in caches.items() if pool is not None}
    for name, tensor, axes in (
        ("heads of query", call.query, (0, 1)),
        ("heads of out", call.out, (0, 1)),
        *((f"pages of {name}", pool, (0,)) for name, pool in pools.items()),
    ):
        why = misaligned(name, tensor, axes)
        if why:
            return False, why
    if call.sparse_indices.shape[1] >= 1 << COUNT_BITS:
        return False, f"sparse_indices: expected fewer than 65536 columns, got shape {tuple(call.sparse_indices.shape)}"
    for name, count in (("rows of query", 2 * call.query.shape[0]), ("seq_lens", call.seq_lens.shape[0])):
        if count >= MOST_NUMBERS:
            return False, f"{name}: expected fewer than 2^30, got {count}"
    for name, pool in pools.items():
        pages, rows, _ = pool.shape
        size = ((pages - 1) * pool.stride(0) + rows * formats.HEAD_DIM) * pool.element_size() if pages else 0
        if size > MOST_POOL_BYTES:
            return False, f"{name}: expected at most {MOST_POOL_BYTES} bytes from the first row on, got {size}"
    return True, ""


def launch(*args: Any) -> None:
    """Run the kernel on the current stream of query's device. Arguments in the schema's order, checked and
    supported."""
    call = Call(*args)
    if call.out.numel() == 0:
        return
    device_index = call.query.device.index
    arch, choose = arch_of(device_index), _key
    if arch in BLACKWELL and not is_own("sparse_mla_mixed", arch, device_index, _why_not_own(call)):
        choose = _portable_key
    launch_key(
        choose(arch, call.query.shape[1], call.kv_format),
        device_index,
        call.query,
        call.swa_kv_cache,
        call.swa_kv_cache if call.compressed_kv_cache is None else call.compressed_kv_cache,
        call.sparse_indices,
        call.out,
        no_logs(2, device_index) if call.lse is None else call.lse,
        call.sparse_topk_lens.data_ptr(),
        call.cum_seq_lens_q.data_ptr(),
        call.seq_lens.data_ptr(),
        call.seq_lens.shape[0],
        call.window_size,
        0 if call.sinks is None else call.sinks.data_ptr(),
        scale_log2(call.bmm1_scale),
        call.bmm2_scale,
        multiprocessors(device_index),
    )


def _why_not_own(call: Call) -> str:
    """Why Blackwell's own kernel does not take a call, or nothing."""
    caches = {"swa_kv_cache": call.swa_kv_cache, "compressed_kv_cache": call.compressed_kv_cache}
    found = [ungathered(name, pool, formats.HEAD_DIM) for name, pool in caches.items() if pool is not None]
    return next(filter(None, found), unmapped("query", call.query, (0, 1)))
