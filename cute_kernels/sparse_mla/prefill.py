"""sparse_mla_prefill on a GPU. Its call: call.py; the choice of a kernel: select.py."""

from __future__ import annotations

from typing import Any

from cute_kernels.dsl import ptx
from cute_kernels.runtime.arch import multiprocessors
from cute_kernels.runtime.compile import launch as launch_key
from cute_kernels.sparse_mla import arguments, select
from cute_kernels.sparse_mla.arguments import MOST_NUMBERS, misaligned, no_logs
from cute_kernels.sparse_mla.call import PagedCall, PrefillCall
from cute_kernels.sparse_mla.select import prefill_keys as deployment_keys
from cute_kernels.sparse_mla.softmax import LEAST_SCALE

__all__ = ["deployment_keys", "launch", "supports"]


def supports(*args: Any) -> tuple[bool, str]:
    """Whether `launch` can take these (checked) arguments, in the schema's order, and if not, why."""
    why = why_not(PrefillCall(*args))
    return not why, why


def why_not(call: PrefillCall) -> str:
    """Why no kernel can take a call, or nothing."""
    why = misaligned_results(call, select.why_not_variant_of_prefill(call) if call.is_quantized else "")
    if call.q_squares is not None:
        why = why or misaligned("sums of squares of q_norm", call.q_squares, (0,))
    why = why or misaligned("heads of q", call.q, (0, 1)) or misaligned("rows of kv", call.kv, (0,))
    return why or too_many({"rows of q": 2 * call.q.shape[0], "columns of indices": call.indices.shape[2]})


def launch(*args: Any) -> None:
    """Run the kernel on the current stream of q's device. Arguments in the schema's order, checked and supported."""
    call = PrefillCall(*args)
    if call.out.numel() == 0:
        return
    device_index = call.q.device.index
    launch_key(
        select.of_prefill(call),
        device_index,
        call.q,
        *(() if call.q_squares is None else (call.q_squares,)),
        call.kv,
        call.indices,
        *results_of(call),
        *logs_of(call, device_index),
        0 if call.topk_length is None else call.topk_length.data_ptr(),
        0 if call.attn_sink is None else call.attn_sink.data_ptr(),
        scale_log2(call.sm_scale),
        *(() if call.q_squares is None else (call.q_norm_eps,)),
        multiprocessors(device_index),
    )


# What paged.py and mixed.py have in common with it.


def misaligned_results(call: PrefillCall | PagedCall, why_not_quantized: str) -> str:
    """Why kernels cannot store the results of a call, or nothing."""
    if not call.is_quantized:
        return misaligned("heads of out", call.out, (0, 1))
    return why_not_quantized or arguments.misaligned_quant(call.out, call.cos_sin_cache)


def too_many(counts: dict[str, int]) -> str:
    """What of so many there are more than kernels can count, or nothing."""
    found = ((name, count) for name, count in counts.items() if count >= MOST_NUMBERS)
    return next((f"{name}: expected fewer than 2^30, got {count}" for name, count in found), "")


def results_of(call: PrefillCall | PagedCall) -> tuple[Any, ...]:
    """out, or codes and what comes with them: see quant_output."""
    return (call.out, call.out_scale, call.positions, call.cos_sin_cache) if call.is_quantized else (call.out,)


def logs_of(call: PrefillCall | PagedCall, device_index: int) -> tuple[Any, Any]:
    """max_logits and lse of a call, and what stands for those that nobody asks for."""
    max_logits, lse = (no_logs(2, device_index) if x is None else x for x in (call.max_logits, call.lse))
    return max_logits, lse


def scale_log2(scale: float) -> float:
    """What the kernel multiplies scores with that are powers of two then."""
    return scale * ptx.LOG2_E or LEAST_SCALE
