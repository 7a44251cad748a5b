"""Which kernel sparse_mla_prefill runs: one of Hopper's own by the number of heads, Blackwell's own where it takes the
call and is trusted, the portable one elsewhere."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from cute_kernels.dsl import ptx
from cute_kernels.runtime.arch import BLACKWELL, arch_of, multiprocessors
from cute_kernels.runtime.compile import KernelKey
from cute_kernels.runtime.compile import launch as launch_key
from cute_kernels.sparse_mla.arguments import misaligned_quant, no_logs
from cute_kernels.sparse_mla.blackwell.prefill import BlackwellPrefillKey
from cute_kernels.sparse_mla.gathered import is_own, unmapped
from cute_kernels.sparse_mla.hopper.prefill import NormQuantPrefillKey, PrefillKey, QuantPrefillKey
from cute_kernels.sparse_mla.hopper.prefill_swap_ab import HEADS as SWAP_AB_HEADS
from cute_kernels.sparse_mla.hopper.prefill_swap_ab import QuantSwapAbPrefillKey, SwapAbPrefillKey
from cute_kernels.sparse_mla.mma_sync.prefill import PortablePrefillKey, group_heads
from cute_kernels.sparse_mla.schedule import block_heads
from cute_kernels.sparse_mla.softmax import LEAST_SCALE

HOPPER = "sm_90a"

MOST_NUMBERS = 2**30
"""Rows, columns and work items are counted in int32, with room for what is added to the last of them."""


def misaligned(name: str, tensor: Any, axes: tuple[int, ...]) -> str:
    """Why a tensor's address or its strides along those axes cannot be taken, or nothing."""
    strides = [tensor.stride(axis) * tensor.element_size() for axis in axes if tensor.shape[axis] > 1]
    if tensor.numel() and (tensor.data_ptr() % 16 or any(stride % 16 for stride in strides)):
        return (
            f"{name} must be 16-byte aligned, got address {tensor.data_ptr():#x} and strides {tuple(tensor.stride())}"
        )
    return ""


def logs_arguments(call: Any, device_index: int) -> tuple[Any, Any]:
    """max_logits and lse of a call, and what stands for those that nobody asks for."""
    max_logits, lse = (no_logs(2, device_index) if x is None else x for x in (call.max_logits, call.lse))
    return max_logits, lse


def scale_log2(scale: float) -> float:
    """What the kernel multiplies scores with that are powers of two then."""
    return scale * ptx.LOG2_E or LEAST_SCALE


def key_for(arch: str, heads: int, is_quantized: bool = False, is_raw: bool = False) -> KernelKey:
    """The kernel for so many heads: the architecture's own one, if it has one. is_quantized: that stores codes, which
    Hopper has; is_raw: that norms and rotates its queries first, too"""
    if is_raw:
        return NormQuantPrefillKey(arch)
    if is_quantized:
        is_few = heads <= SWAP_AB_HEADS[-1]
        return QuantSwapAbPrefillKey(arch, block_heads(heads)) if is_few else QuantPrefillKey(arch)
    if arch in BLACKWELL:
        return BlackwellPrefillKey(arch)
    if arch != HOPPER:
        return portable_key(arch, heads)
    return SwapAbPrefillKey(arch, block_heads(heads)) if heads <= SWAP_AB_HEADS[-1] else PrefillKey(arch)


def portable_key(arch: str, heads: int, is_quantized: bool = False, is_raw: bool = False) -> KernelKey:
    return PortablePrefillKey(arch, group_heads(heads))


def deployment_keys(config: Any, tp: int, arch: str) -> list[KernelKey]:
    """One kernel takes every call of a rank; where it has to be trusted first, the portable one as well."""
    heads = config.num_attention_heads // tp
    keys = [key_for(arch, heads), *([portable_key(arch, heads)] if arch in BLACKWELL else [])]
    if arch != HOPPER:
        return keys
    return [
        *keys,
        key_for(arch, heads, True),
        *([key_for(arch, heads, True, True)] if heads > SWAP_AB_HEADS[-1] else []),
    ]


@cache
def _key(*args: Any) -> KernelKey:
    return key_for(*args)


@cache
def _portable_key(*args: Any) -> KernelKey:
    return portable_key(*args)


class Call(NamedTuple):
    """The op's arguments, in the schema's order, checked."""

    q: Any
    kv: Any
    indices: Any
    sm_scale: float
    attn_sink: Any
    topk_length: Any
    out: Any
    max_logits: Any
    lse: Any
    q_squares: Any = None
    q_norm_eps: float = 0.0
    positions: Any = None
    cos_sin_cache: Any = None
    out_scale: Any = None

    @property
    def is_quantized(self) -> bool:
        return self.positions is not None


def why_not_quantized(call: Any) -> str:
    """Why the results of a call cannot be stored as codes, or nothing."""
    arch = arch_of(call.q.device.index)
    if arch != HOPPER:
        return f"output_quant is supported on {HOPPER}, got {arch}"
    return misaligned_quant(call.out, call.cos_sin_cache)


def results_of(call: Any) -> tuple[Any, ...]:
    """out, or codes and what comes with them: see quant_output."""
    return (call.out, call.out_scale, call.positions, call.cos_sin_cache) if call.is_quantized else (call.out,)


def supports(*args: Any) -> tuple[bool, str]:
    """Whether `launch` can take these (checked) arguments, in the schema's order, and if not, why."""
    call = Call(*args)
    why = why_not_quantized(call) if call.is_quantized else misaligned("heads of out", call.out, (0, 1))
    if why:
        return False, why
    if call.q_squares is not None:
        if call.q.shape[1] <= SWAP_AB_HEADS[-1]:
            return False, f"q_norm is supported for more than {SWAP_AB_HEADS[-1]} heads, got {call.q.shape[1]}"
        why = misaligned("sums of squares of q_norm", call.q_squares, (0,))
        if why:
            return False, why
    for name, tensor, axes in (("heads of q", call.q, (0, 1)), ("rows of kv", call.kv, (0,))):
        why = misaligned(name, tensor, axes)
        if why:
            return False, why
    counts = {"rows of q": 2 * call.q.shape[0], "columns of indices": call.indices.shape[2]}
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
    arch, choose = arch_of(device_index), _key
    if arch in BLACKWELL and not is_own("sparse_mla_prefill", arch, device_index, _why_not_own(call)):
        choose = _portable_key
    launch_key(
        choose(arch, call.q.shape[1], call.is_quantized, call.q_squares is not None),
        device_index,
        call.q,
        *(() if call.q_squares is None else (call.q_squares,)),
        call.kv,
        call.indices,
        *results_of(call),
        *logs_arguments(call, device_index),
        0 if call.topk_length is None else call.topk_length.data_ptr(),
        0 if call.attn_sink is None else call.attn_sink.data_ptr(),
        scale_log2(call.sm_scale),
        *(() if call.q_squares is None else (call.q_norm_eps,)),
        multiprocessors(device_index),
    )


def _why_not_own(call: Call) -> str:
    """Why Blackwell's own kernel does not take a call, or nothing."""
    return unmapped("q", call.q, (0, 1)) or unmapped("kv", call.kv, (0,))
