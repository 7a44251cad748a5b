"""Which kernel sparse_mla_decode runs.

For fp8_ds_mla caches Hopper's own, or for few heads that of mma_sync/; or Blackwell's own, where it can address
the caches and is trusted, with more than 64 heads that for pairs of blocks; for everything else the portable one. With
9 to 16 heads Hopper's is faster as long as it has all rows at once, and the other with more of them; which of the
two depends on the number of rows where the split does, too, and nowhere else.
"""

from __future__ import annotations

import itertools
from functools import cache
from typing import Any

from cute_kernels.formats import FP8_DS_MLA
from cute_kernels.runtime import trust
from cute_kernels.runtime.arch import BLACKWELL, arch_of, multiprocessors
from cute_kernels.runtime.compile import KernelKey
from cute_kernels.sparse_mla import arguments, combine, decode_args
from cute_kernels.sparse_mla.blackwell.decode import BlackwellDecodeKey
from cute_kernels.sparse_mla.blackwell.decode_2cta import BlackwellPairDecodeKey
from cute_kernels.sparse_mla.decode_args import Call, ItemKey
from cute_kernels.sparse_mla.gathered import ungathered
from cute_kernels.sparse_mla.hopper.decode import DecodeKey
from cute_kernels.sparse_mla.mma_sync.decode import PortableDecodeKey
from cute_kernels.sparse_mla.mma_sync.decode_small_heads import ARCHS as SMALL_HEADS_ARCHS
from cute_kernels.sparse_mla.mma_sync.decode_small_heads import SmallHeadsDecodeKey
from cute_kernels.sparse_mla.schedule import block_heads, head_blocks

HOPPER = "sm_90a"

SMALL_HEADS = (8, 16)
"""Heads of a CTA that the kernel for few heads runs with."""

MOST_NORMED_HEADS = SMALL_HEADS[-1]
"""No kernel for that many heads or fewer takes raw queries."""

FEW_ROWS_HEADS = (16,)
"""Those of which Hopper's kernel takes calls with few rows."""

PAIR_ARCHS = BLACKWELL
"""Where more than 64 heads take Blackwell's kernel for pairs of blocks; elsewhere they are two items of its other."""


def key_for(
    arch: str,
    heads: int,
    second: str,
    out_fp32: bool,
    format0: str,
    format1: str,
    has_few_rows: bool = False,
    takes_own: bool = True,
) -> ItemKey:
    """The kernel for so many heads, caches of these formats and a second list of that kind ("none", "listed", "dense").

    format1        format0 if there is no second list
    has_few_rows   whether the call leaves the split to the op, and has no more rows than Hopper's kernel takes at once
    takes_own      whether Blackwell's own kernel may run
    """
    is_fp8 = format0 == format1 == FP8_DS_MLA.id
    if is_fp8 and arch in BLACKWELL and takes_own:
        is_pairs = arch in PAIR_ARCHS and head_blocks(heads) > 1
        return (BlackwellPairDecodeKey if is_pairs else BlackwellDecodeKey)(arch, second, out_fp32)
    is_hoppers = has_few_rows and arch == HOPPER and block_heads(heads) in FEW_ROWS_HEADS
    if is_fp8 and arch in SMALL_HEADS_ARCHS and block_heads(heads) in SMALL_HEADS and not is_hoppers:
        return SmallHeadsDecodeKey(arch, block_heads(heads), second, out_fp32)
    if is_fp8 and arch == HOPPER:
        return DecodeKey(arch, block_heads(heads), second, out_fp32)
    return PortableDecodeKey(arch, block_heads(heads), format0, second, format1, out_fp32)


def deployment_keys(config: Any, tp: int, arch: str) -> list[KernelKey]:
    """The layers' decode steps: one or two lists as the compress ratio says, in one part or several. Of Blackwell its
    own kernels, and those that run before they are trusted."""
    lists = {4: ("listed",), 128: ("dense", "listed")}
    seconds = {second: None for ratio in config.compress_ratios for second in lists.get(ratio, ("none",))}
    heads, fmt = config.num_attention_heads // tp, FP8_DS_MLA.id
    kinds = itertools.product(seconds, (False, True), (False, True), (True, False))
    decode: dict[KernelKey, None] = {
        key_for(arch, heads, second, fp32, fmt, fmt, few, own): None for second, fp32, few, own in kinds
    }
    if arch == HOPPER:
        plain = [
            key_for(arch, heads, *kind) for kind in itertools.product(seconds, (False,), (fmt,), (fmt,), (False, True))
        ]
        decode |= {decode_args.variant(key, quantized=True): None for key in plain}
        if heads > MOST_NORMED_HEADS:
            results = {"out_fp32": True}, {"quantized": True}
            decode |= {decode_args.variant(key, raw=True, **kind): None for key in plain for kind in results}
    return [*decode, *combine.deployment_keys(config, tp, arch)]


@cache
def _key(device_index: int, *rest: Any) -> ItemKey:
    return key_for(arch_of(device_index), *rest)


def _key_of_call(call: Call, out_fp32: bool) -> ItemKey:
    index = call.q.device.index
    is_split_fixed = call.num_splits != 0 or call.split_tokens != 0
    has_few_rows = not is_split_fixed and call.rows * DecodeKey.blocks_per_item <= multiprocessors(index)
    takes_own = arch_of(index) in BLACKWELL and not why_not_own(call) and trust.is_trusted("sparse_mla_decode", index)
    return _key(index, call.q.shape[2], call.second, out_fp32, *call.formats, has_few_rows, takes_own)


def why_not_own(call: Call) -> str:
    """Why Blackwell's own kernel does not take a call, which is left to the portable one then; or nothing."""
    pools = {"k_cache": call.k_cache, "extra_k_cache": call.extra_k_cache}
    for (name, pool), kv_format in zip(pools.items(), call.formats, strict=True):
        if kv_format != FP8_DS_MLA.id:
            return f"{name}: expected records of {FP8_DS_MLA.id}, got {kv_format}"
        why = "" if pool is None else ungathered(name, pool, FP8_DS_MLA.data_bytes)
        if why:
            return why
    return ""


def supports(*args: Any) -> tuple[bool, str]:
    """Whether `launch` can take these (checked) arguments, in the schema's order, and if not, why."""
    call = Call(*args)
    why = _why_not_quantized(call) if call.is_quantized else ""
    return (False, why) if why else decode_args.supports(call)


def _why_not_quantized(call: Call) -> str:
    """Why the results of a call cannot be stored as codes, or nothing."""
    arch = arch_of(call.q.device.index)
    if arch != HOPPER or set(call.formats) != {FP8_DS_MLA.id}:
        caches = " and ".join(dict.fromkeys(call.formats))
        return f"output_quant is supported on {HOPPER} with caches of {FP8_DS_MLA.id}, got {arch} with {caches}"
    heads = call.q.shape[2]
    if call.q_squares is not None and heads <= MOST_NORMED_HEADS:
        return f"q_norm is supported for more than {MOST_NORMED_HEADS} heads, got {heads}"
    return arguments.misaligned_quant(call.out, call.cos_sin_cache)


def launch(*args: Any) -> None:
    """Run the kernel on the current stream of q's device. Arguments in the schema's order, checked and supported."""
    decode_args.launch(_key_of_call, Call(*args))
