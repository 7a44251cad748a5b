"""Which kernel mqa_logits runs: one of the architecture's own, for FP8 or MXFP4, or the portable one."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from cute_kernels.indexer import logits_choice as choice
from cute_kernels.indexer import portable_launch
from cute_kernels.runtime.arch import arch_of, multiprocessors
from cute_kernels.runtime.compile import KernelKey
from cute_kernels.runtime.compile import launch as launch_key

_key = cache(choice.key_for)


def deployment_keys(config: Any, tp: int, arch: str) -> list[KernelKey]:
    """One for each format: a prefill may have any number of rows. Every rank has all index heads."""
    return choice.deployment_keys(config, arch, False, portable_launch.deployment_keys(config, arch, False))


class Call(NamedTuple):
    """The op's arguments, in the schema's order, checked."""

    q: Any
    q_scale: Any
    k: Any
    k_scale: Any
    weights: Any
    cu_seq_len_k_start: Any
    cu_seq_len_k_end: Any
    clean_logits: bool
    max_seqlen_k: int
    out: Any


def supports(*args: Any) -> tuple[bool, str]:
    """Whether `launch` can take these (checked) arguments, and if not, why."""
    call = Call(*args)
    why = choice.why_not(call.q, call.k, "kv[0]", call.out)
    if not why and call.k.shape[0] > 2**31 - 256:
        why = f"there must be fewer than 2^31 - 256 keys, got {call.k.shape[0]}"
    return not why, why


def launch(*args: Any, skip: int = 0, op: str = "mqa_logits") -> None:
    """Run the kernel on the current stream of out's device, for an op. Arguments in the schema's order, checked,
    supported. Rows that see no more than `skip` keys are not scored."""
    call = Call(*args)
    if call.out.numel() == 0:
        return
    if call.k.shape[0] == 0:
        if call.clean_logits:
            call.out.fill_(float("-inf"))
        return
    device_index = call.out.device.index
    rows, columns = call.out.shape
    arch, heads = arch_of(device_index), call.q.shape[1]
    if not choice.has_own(arch, heads) or not choice.is_safe(op, arch, device_index):
        portable_launch.launch(call, arguments_of_keys(call), arguments_of_windows(call, skip), 1, rows, False)
        return
    key = _key(arch, heads, rows, False, mxfp4=call.q_scale is not None)
    blocks = choice.blocks(key, 1, rows, columns, multiprocessors(device_index))
    launch_key(key, device_index, *arguments(key, call, skip), blocks)


def arguments(key: Any, call: Call, skip: int) -> tuple[Any, ...]:
    """What the entry point of an own kernel takes but the number of blocks: all rows are one request's."""
    q = call.q
    rows = q.shape[0]
    return (
        call.weights,
        call.out,
        q.data_ptr(),
        choice.stride(q, 0) * rows,
        choice.stride(q, 0),
        choice.stride(q, 1),
        1,
        rows,
        *arguments_of_keys(call),
        *arguments_of_windows(call, skip),
        int(call.clean_logits),
        *choice.scale_arguments(key, call.q_scale),
    )


def arguments_of_keys(call: Call) -> tuple[Any, ...]:
    """Those of them that say where keys are: all of them are one page's, and there is no table."""
    k = call.k
    keys = k.shape[0]
    stride = choice.stride(k, 0)
    return (k.data_ptr(), call.k_scale.data_ptr(), stride, stride * keys, keys, 1, 0, 0, 0)


def arguments_of_windows(call: Call, skip: int) -> tuple[Any, ...]:
    """Those of them that say which keys a row sees."""
    starts, ends = call.cu_seq_len_k_start.data_ptr(), call.cu_seq_len_k_end.data_ptr()
    return (starts, ends, 0, call.k.shape[0], -1 if call.max_seqlen_k > 0 else 0, skip)
