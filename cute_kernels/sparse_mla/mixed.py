"""sparse_mla_mixed on a GPU. Its call: call.py; the choice of a kernel: select.py."""

from __future__ import annotations

from typing import Any

from cute_kernels.formats import HEAD_DIM
from cute_kernels.runtime.arch import multiprocessors
from cute_kernels.runtime.compile import launch as launch_key
from cute_kernels.sparse_mla import select
from cute_kernels.sparse_mla.arguments import misaligned, no_logs
from cute_kernels.sparse_mla.call import MixedCall
from cute_kernels.sparse_mla.params import COUNT_BITS, UNIT
from cute_kernels.sparse_mla.prefill import scale_log2, too_many
from cute_kernels.sparse_mla.select import mixed_keys as deployment_keys

__all__ = ["deployment_keys", "launch", "supports"]

MOST_POOL_BYTES = UNIT << 31
"""From the first row of a pool to the end of the last one."""


def supports(*args: Any) -> tuple[bool, str]:
    """Whether `launch` can take these (checked) arguments, in the schema's order, and if not, why."""
    why = why_not(MixedCall(*args))
    return not why, why


def why_not(call: MixedCall) -> str:
    """Why no kernel can take a call, or nothing."""
    why = misaligned("heads of query", call.query, (0, 1)) or misaligned("heads of out", call.out, (0, 1))
    for name, pool in call.caches.items():
        why = why or misaligned(f"pages of {name}", pool, (0,))
    if why:
        return why
    if call.sparse_indices.shape[1] >= 1 << COUNT_BITS:
        return f"sparse_indices: expected fewer than 65536 columns, got shape {tuple(call.sparse_indices.shape)}"
    why = too_many({"rows of query": 2 * call.query.shape[0], "seq_lens": call.seq_lens.shape[0]})
    for name, pool in call.caches.items():
        pages, rows, _ = pool.shape
        size = ((pages - 1) * pool.stride(0) + rows * HEAD_DIM) * pool.element_size() if pages else 0
        if size > MOST_POOL_BYTES:
            why = why or f"{name}: expected at most {MOST_POOL_BYTES} bytes from the first row on, got {size}"
    return why


def launch(*args: Any) -> None:
    """Run the kernel on the current stream of query's device. Arguments in the schema's order, checked and
    supported."""
    call = MixedCall(*args)
    if call.out.numel() == 0:
        return
    device_index = call.query.device.index
    launch_key(
        select.of_mixed(call),
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
