# SPDX-License-Identifier: Apache-2.0
"""Which kernel runs a call of a sparse attention op: the one place that chooses.

    op       kernel                           arch              heads          caches        rows, and what else
    decode   hopper/decode                    sm_90a            17 and more    fp8_ds_mla    long ones also in halves
                                                                1 to 16                      few rows, below
             hopper/decode_swap_ab            sm_90a            1 to 16        fp8_ds_mla,   in one split, below;
                                                                               V4.1's        interleaved
             hopper/decode                    sm_90a            all            V4.1's        all others
             mma_sync/decode_small_heads      sm_90a            1 to 16        fp8_ds_mla    all others
                                              sm_100a, sm_103a                               blackwell/ may not run
             blackwell/decode                 sm_100a, sm_103a  1 to 64        fp8_ds_mla    gathered, trusted
             blackwell/decode_2cta            sm_100a, sm_103a  65 and more    fp8_ds_mla    gathered, trusted; if
                                                                                             not, blackwell/decode
             mma_sync/decode                  all               all            all           where no other does
    prefill  hopper/prefill_swap_ab           sm_90a            1 to 16
             hopper/prefill                   sm_90a            17 and more
             blackwell/prefill                sm_100a, sm_103a  all                          mapped, trusted
             blackwell/prefill_2cta           none so far       65 and more                  mapped, trusted
             mma_sync/prefill                 all               all                          where no other does
    paged    hopper/prefill_paged             sm_90a            all            fp8_ds_mla    countable
             hopper/prefill_paged_cluster     sm_90a            all            fp8_ds_mla    countable, rows are split
             blackwell/prefill_paged          sm_100a, sm_103a  all            fp8_ds_mla    countable; as prefill
             mma_sync/prefill                 all               all            all           where no other does
    mixed    hopper/prefill_swap_ab           sm_90a            1 to 16        plain_bf16
             hopper/prefill_mixed_swap_ab     sm_90a            1 to 32        plain_fp8
             hopper/prefill_mixed             sm_90a            all others     both         e4m3 rows as they are or
                                                                                             converted first
             blackwell/prefill_mixed          sm_100a, sm_103a  all            both          gathered, trusted
             mma_sync/prefill                 all               all            both          where no other does

V4.1's: mxfp8_v41 beside itself, fp8_ds_mla or nvfp4_v41, and fp8_ds_mla beside both, the window's first, interleaved
or, in decode, split; other kernels of decode take none. Gathered, mapped: what Blackwell's copies can address
(`ungathered`, `unmapped`); trusted: runtime.trust; countable: `PagedCall.is_countable`. Results as codes and raw
queries (q_norm, not for 16 heads or fewer) are variants of hopper/'s kernels and of mma_sync/decode_small_heads on
sm_90a, with fp8_ds_mla caches, or in decode V4.1's, where there are formats; so are long rows in halves
(`is_halved`) of hopper/decode. Paged calls whose rows are gathered first
(`is_gathered`) are gather_paged's, and then prefill's; mixed ones whose rows are converted first (`is_converted`) are
convert_mixed's, and then prefill_mixed's.

Up to 16 heads: where the op chooses the split (`num_splits` and `split_tokens` are 0), rows choose the kernel, as they
choose the split: few ones are Hopper's decode's, which splits them, more are decode_swap_ab's, by two CTAs or one
(`swap_ab_ctas`); of 8 heads over fp8_ds_mla those of several rounds are decode_small_heads'. One split by the caller
always is decode_swap_ab's, any other one decode_small_heads' or, of V4.1's caches, Hopper's decode's. What
decode_swap_ab does not take for its strides is Hopper's decode's up to `has_few_rows`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from cute_kernels import formats
from cute_kernels.formats import FP8_DS_MLA, HEAD_DIM, PLAIN_BF16, PLAIN_FP8, V41_KV_CACHES
from cute_kernels.models import ModelConfig, latent_ratios
from cute_kernels.runtime import trust
from cute_kernels.runtime.arch import BLACKWELL, arch_of, multiprocessors
from cute_kernels.runtime.compile import KernelKey
from cute_kernels.sparse_mla import combine
from cute_kernels.sparse_mla.blackwell.decode import BlackwellDecodeKey
from cute_kernels.sparse_mla.blackwell.decode_2cta import BlackwellPairClusterDecodeKey, BlackwellPairDecodeKey
from cute_kernels.sparse_mla.blackwell.prefill import BlackwellPrefillKey
from cute_kernels.sparse_mla.blackwell.prefill_2cta import BlackwellPairPrefillKey
from cute_kernels.sparse_mla.blackwell.prefill_mixed import BlackwellMixedFp8Key, BlackwellMixedKey
from cute_kernels.sparse_mla.blackwell.prefill_paged import BlackwellPagedKey
from cute_kernels.sparse_mla.call import DecodeCall, MixedCall, PagedCall, PrefillCall
from cute_kernels.sparse_mla.convert_mixed import ConvertMixedKey
from cute_kernels.sparse_mla.converted import LEAST_HEADS
from cute_kernels.sparse_mla.gather_paged import GatherPagedKey
from cute_kernels.sparse_mla.hopper.decode import DecodeKey
from cute_kernels.sparse_mla.hopper.decode_swap_ab import DecodeSwapAbKey
from cute_kernels.sparse_mla.hopper.prefill import NormQuantPrefillKey, PrefillKey, QuantPrefillKey
from cute_kernels.sparse_mla.hopper.prefill_mixed import MixedFp8ConvertedKey, MixedFp8Key, MixedKey
from cute_kernels.sparse_mla.hopper.prefill_mixed_swap_ab import SwapAbMixedFp8Key
from cute_kernels.sparse_mla.hopper.prefill_paged import PagedKey, QuantPagedKey
from cute_kernels.sparse_mla.hopper.prefill_paged_cluster import PagedClusterKey
from cute_kernels.sparse_mla.hopper.prefill_swap_ab import QuantSwapAbPrefillKey, SwapAbMixedKey, SwapAbPrefillKey
from cute_kernels.sparse_mla.kernel_args import DecodeKernelKey
from cute_kernels.sparse_mla.mma_sync.decode import PortableDecodeKey
from cute_kernels.sparse_mla.mma_sync.decode_small_heads import ARCHS as SMALL_HEADS_ARCHS
from cute_kernels.sparse_mla.mma_sync.decode_small_heads import SmallHeadsDecodeKey
from cute_kernels.sparse_mla.mma_sync.prefill import PortableMixedKey, PortablePagedKey, PortablePrefillKey, group_heads
from cute_kernels.sparse_mla.schedule import CLUSTERS, GROUP_HEADS, cluster_of, head_groups, heads_of_group

HOPPER = "sm_90a"

SMALL_HEADS = (8, 16)
"""Heads of a work tile that kernels for few heads are made for: up to the last, calls are theirs."""

MIXED_FP8_HEADS = (*SMALL_HEADS, 32)
"""The same of sparse_mla_mixed over e4m3 caches."""

MOST_NORMED_HEADS = SMALL_HEADS[-1]
"""No kernel for that many heads or fewer takes raw queries."""

SWAP_AB_HEADS = (8, 16)
"""Those of decode_swap_ab."""

FEW_ROWS_HEADS = (8, 16)
"""Those of which Hopper's decode takes calls with few rows."""

V41_FORMATS = tuple(fmt.id for fmt in formats.V41_FORMATS)
V41_SPLIT = tuple(fmt.id for fmt in formats.V41_FORMATS if fmt.is_split)

LEAST_HOPPER_HEADS = 16
"""Of a work tile of Hopper's decode: with fewer, some are masked."""

MOST_WHOLE_TILES = 4
"""KV tiles of a row of 8 heads that Hopper's decode need not split to be faster. On an H200 with 8 heads, us a layer:
10 tiles, 64 rows 67.5 by it and 66.7 by the other, 8 rows 44.7 and 48.1; 3 tiles, 64 rows 43.7 and 45.1."""

PREFILL_PAIR_ARCHS: tuple[str, ...] = ()
"""Where more than 64 heads take prefill_2cta: nowhere, until a GPU has run it."""

SHARED_CTAS, LEAST_SHARED_TILES, SHARED_ROWS = 2, 4, 5
"""CTAs of decode_swap_ab that share a row where there is room for them; KV tiles of a row from which on they do; where
there is room for so many CTAs a row, hopper/decode in splits is faster."""

MAP_STRIDE, MAP_ROWS = 2**40, 2**31
"""Of a tensor that Blackwell's copies know by a descriptor: strides are smaller, in bytes, and rows fewer."""


# ---- decode


@cache
def decode_key(
    arch: str,
    heads: int,
    extra: str,
    out_fp32: bool,
    format0: str,
    format1: str,
    is_few_rows: bool = False,
    own: str = "",
) -> DecodeKernelKey:
    """The kernel for so many heads, caches of these formats and an extra list of that kind ("none", "listed", "dense").

    format1        format0 if there is no extra list
    is_few_rows    what has_few_rows says of the call
    own            name of the one of `own_decode_kernels` that runs, or ""
    """
    is_fp8 = format0 == format1 == FP8_DS_MLA.id
    if is_fp8 and own:
        return OWN_DECODE[own](arch, extra, out_fp32)
    is_hoppers = is_few_rows and arch == HOPPER and heads_of_group(heads) in FEW_ROWS_HEADS
    if is_fp8 and arch in SMALL_HEADS_ARCHS and heads_of_group(heads) in SMALL_HEADS and not is_hoppers:
        return SmallHeadsDecodeKey(arch, heads_of_group(heads), extra, out_fp32)
    if is_fp8 and arch == HOPPER:
        return DecodeKey(arch, max(heads_of_group(heads), LEAST_HOPPER_HEADS), extra, out_fp32)
    if is_v41((format0, format1)):
        tile_heads = max(heads_of_group(heads), LEAST_HOPPER_HEADS)
        return DecodeKey(arch, tile_heads, extra, out_fp32, format0=format0, format1=format1)
    return PortableDecodeKey(arch, heads_of_group(heads), format0, extra, format1, out_fp32)


def swap_ab_ctas(call: DecodeCall) -> int:
    """CTAs that share a row in decode_swap_ab, or 0 where it does not take a call: few heads, in one split if the
    caller says, results bf16 or codes, rows of q, and of out, equally far apart. Where the op chooses the split, rows
    choose as well: see LEAST_SHARED_TILES, SHARED_ROWS; 8 heads over fp8_ds_mla in several rounds are faster by
    decode_small_heads."""
    index = call.q.device.index
    heads = heads_of_group(call.q.shape[2])
    if heads not in SWAP_AB_HEADS or arch_of(index) != HOPPER:
        return 0
    if not set(call.formats).isdisjoint((PLAIN_BF16.id, *V41_SPLIT)):
        return 0
    if call.split_tokens or call.num_splits > 1 or not (call.is_quantized or call.out.element_size() == 2):
        return 0
    tokens = call.q.shape[1]
    is_even = all(
        tokens == 1 or rows.shape[0] == 1 or rows.stride(0) == tokens * rows.stride(1)
        for rows in ((call.q,) if call.is_quantized else (call.q, call.out))
    )
    if not is_even:
        return 0
    if call.num_splits:
        return 1
    sms = multiprocessors(index)
    if call.rows > sms and heads == GROUP_HEADS[0] and not is_v41(call.formats):
        return 0
    if call.rows * SHARED_CTAS > sms:
        return 1
    if call.rows * SHARED_ROWS <= sms:
        return 0
    return SHARED_CTAS if call.max_tiles >= LEAST_SHARED_TILES else 1


def is_v41(kv_formats: tuple[str, str]) -> bool:
    """Whether one of the caches has a format of V4.1's own."""
    return any(kv_format in V41_FORMATS for kv_format in kv_formats)


def why_not_formats_of_decode(call: DecodeCall) -> str:
    """Why no kernel takes a call with caches of V4.1's own formats, or nothing."""
    if not is_v41(call.formats):
        return ""
    arch = arch_of(call.q.device.index)
    if arch != HOPPER or PLAIN_BF16.id in call.formats:
        return (
            f"caches of V4.1's own records are supported on {HOPPER}, beside {FP8_DS_MLA.id} or each other; "
            f"got {arch} with {' and '.join(call.formats)}"
        )
    return ""


def why_not_halves(call: DecodeCall) -> str:
    """Why no kernel cuts long rows of such a call in halves, which it asks for, or nothing."""
    arch = arch_of(call.q.device.index)
    if call.long_rows != "halves" or (arch == HOPPER and set(call.formats) == {FP8_DS_MLA.id}):
        return ""
    caches = " and ".join(dict.fromkeys(call.formats))
    return f"long_rows 'halves' is supported on {HOPPER} with caches of {FP8_DS_MLA.id}, got {arch} with {caches}"


OWN_DECODE: dict[str, type[BlackwellDecodeKey]] = {
    key.kernel_name: key for key in (BlackwellPairDecodeKey, BlackwellPairClusterDecodeKey, BlackwellDecodeKey)
}
"""Blackwell's own kernels by name, the one to be preferred first."""


def own_decode_kernels(arch: str, heads: int) -> tuple[str, ...]:
    """Names of those for so many heads; none on other architectures."""
    if arch not in BLACKWELL:
        return ()
    return tuple(OWN_DECODE) if head_groups(heads) > 1 else (BlackwellDecodeKey.kernel_name,)


@cache
def decode_variant(
    key: DecodeKernelKey, quantized: bool, raw: bool, dealt: bool = False, halves: bool = False
) -> DecodeKernelKey:
    """The kernel that stores codes in place of bf16 results (quantized), norms and rotates its queries (raw), deals its
    work tiles (dealt, if it is one that can), or cuts long rows in halves (halves)."""
    changes: dict[str, Any] = {name: True for name, value in (("quantized", quantized), ("raw", raw)) if value}
    if dealt and isinstance(key, DecodeKey) and key.second != "none":  # rows of one list, a window, are short
        changes["dealt"] = True
    if halves:
        changes["halves"] = True
    return replace(key, **changes) if changes else key


def of_decode(call: DecodeCall, out_fp32: bool = False) -> DecodeKernelKey:
    """The kernel of a call, but for its variant; out_fp32: whether its results are."""
    index = call.q.device.index
    arch = arch_of(index)
    heads, owns = call.q.shape[2], own_decode_kernels(arch, call.q.shape[2])
    if owns and why_not_own_decode(call):
        owns = ()
    ctas = 0 if out_fp32 else swap_ab_ctas(call)
    if ctas:
        return DecodeSwapAbKey(arch, heads_of_group(heads), call.extra, *call.formats, ctas=ctas)
    is_few_rows = has_few_rows(call, multiprocessors(index))
    own = next((own for own in owns if trust.is_trusted("sparse_mla_decode", own, index)), "")
    return decode_key(arch, heads, call.extra, out_fp32, *call.formats, is_few_rows, own)


def is_halved(call: DecodeCall, key: DecodeKernelKey, at_once: int, splits: int) -> bool:
    """Whether long rows are cut in halves by the kernel of a call, if it takes so many work tiles at a time."""
    is_able = isinstance(key, DecodeKey) and key.heads > LEAST_HOPPER_HEADS
    return is_able and call.is_halved(at_once, splits)


def has_few_rows(call: DecodeCall, sms: int) -> bool:
    """Whether a call leaves the split to the op, and has no more rows than Hopper's decode takes at once: of 8 heads
    and many KV tiles, in two splits each."""
    if call.num_splits or call.split_tokens:
        return False
    is_eight = heads_of_group(call.q.shape[2]) == GROUP_HEADS[0] and set(call.formats) == {FP8_DS_MLA.id}
    is_split = is_eight and call.max_tiles > MOST_WHOLE_TILES
    return call.rows * DecodeKey.ctas_per_work_tile * (1 + is_split) <= sms


def why_not_own_decode(call: DecodeCall) -> str:
    """Why Blackwell's own kernel does not take a call, or nothing."""
    for (name, pool), kv_format in zip(call.caches.items(), call.formats, strict=False):
        if kv_format != FP8_DS_MLA.id:
            return f"{name}: expected records of {FP8_DS_MLA.id}, got {kv_format}"
        why = ungathered(name, pool, FP8_DS_MLA.data_bytes)
        if why:
            return why
    return ""


def why_not_variant_of_decode(call: DecodeCall) -> str:
    """Why no kernel stores the results of a call as codes, or takes its raw queries, or nothing."""
    arch, heads = arch_of(call.q.device.index), call.q.shape[2]
    if arch != HOPPER or PLAIN_BF16.id in call.formats:
        caches = " and ".join(dict.fromkeys(call.formats))
        own = f"{FP8_DS_MLA.id} or of V4.1's formats"
        return f"output_quant is supported on {HOPPER} with caches of {own}, got {arch} with {caches}"
    return why_not_normed(heads) if call.is_raw else ""


def why_not_normed(heads: int) -> str:
    """Why no kernel takes raw queries of so many heads, or nothing."""
    few = f"q_norm is supported for more than {MOST_NORMED_HEADS} heads, got {heads}"
    return few if heads <= MOST_NORMED_HEADS else ""


def decode_keys(config: ModelConfig, tp: int, arch: str) -> list[KernelKey]:
    """Of the layers' decode steps: one or two lists as the compress ratio says, in one split or several. Of Blackwell
    its own kernels, and those that run before they are trusted."""
    lists = {4: ("listed",), 128: ("dense", "listed")}
    extras = {extra: None for ratio in config.compress_ratios for extra in lists.get(ratio, ("none",))}
    if latent_ratios(config):
        extras["listed"] = None
    heads, fmt = config.num_attention_heads // tp, FP8_DS_MLA.id
    owns = (*own_decode_kernels(arch, heads), "")
    kinds = itertools.product(extras, (False, True), (False, True), owns)
    keys: dict[KernelKey, None] = {
        decode_key(arch, heads, extra, fp32, fmt, fmt, few, own): None for extra, fp32, few, own in kinds
    }
    if arch == HOPPER:
        # results as codes, of one split; raw queries, of one split and of several
        variants = [(False, True, False)]
        if heads > MOST_NORMED_HEADS:
            variants += [(True, False, True), (False, True, True)]
        for (fp32, *variant), extra, few in itertools.product(variants, extras, (False, True)):
            keys[decode_variant(decode_key(arch, heads, extra, fp32, fmt, fmt, few), *variant)] = None
        if latent_ratios(config):
            keys |= dict.fromkeys(v41_decode_keys(arch, heads))
        halved = halved_decode_keys(keys)
        keys |= dict.fromkeys(decode_variant(key, False, False, dealt=True) for key in tuple(keys))
        keys |= dict.fromkeys(halved)
        keys |= dict.fromkeys(key for extra in extras for key in swap_ab_keys(arch, heads, extra, fmt, fmt))
        if heads_of_group(heads) == SWAP_AB_HEADS[-1]:
            # whole rows are decode_swap_ab's
            keys = {key: None for key in keys if not isinstance(key, SmallHeadsDecodeKey) or key.out_fp32}
    return [*keys, *combine.deployment_keys(config, tp, arch)]


def halved_decode_keys(keys: Iterable[KernelKey]) -> list[DecodeKey]:
    """Of those for whole rows, the ones for rows that may be cut in halves."""
    return [
        replace(key, halves=True)
        for key in keys
        if isinstance(key, DecodeKey)
        and key.heads > LEAST_HOPPER_HEADS
        and key.second != "none"
        and not key.out_fp32
        and key.format0 == key.format1 == FP8_DS_MLA.id
    ]


def v41_decode_keys(arch: str, heads: int) -> list[DecodeKernelKey]:
    """Over records of V4.1's own: of a window alone, and of a window and picks."""
    keys: list[DecodeKernelKey] = []
    for window, entries in V41_KV_CACHES.values():
        for extra, pair in (("none", (window.id, window.id)), ("listed", (window.id, entries.id))):
            if is_v41(pair):
                keys += [decode_key(arch, heads, extra, fp32, *pair) for fp32 in (False, True)]
                keys += [key for key in swap_ab_keys(arch, heads, extra, *pair) if not key.quantized]
    return keys


def swap_ab_keys(arch: str, heads: int, extra: str, format0: str, format1: str) -> list[DecodeSwapAbKey]:
    """Of decode_swap_ab, if it takes so many heads: bf16 results and codes, of a row by one CTA or by several, which
    share none of a window alone."""
    if heads > SWAP_AB_HEADS[-1]:
        return []
    ways = itertools.product((False, True), (1,) if extra == "none" else (1, SHARED_CTAS))
    return [DecodeSwapAbKey(arch, heads_of_group(heads), extra, format0, format1, *way) for way in ways]


# ---- prefill


@cache
def prefill_key(
    arch: str, heads: int, is_quantized: bool = False, is_raw: bool = False, may_own: bool = True
) -> KernelKey:
    """The kernel for so many heads. is_quantized: that stores codes; is_raw: and norms and rotates its queries first;
    may_own: whether Blackwell's own kernel may run"""
    is_few = heads <= SMALL_HEADS[-1]
    if is_raw:
        return NormQuantPrefillKey(arch)
    if is_quantized:
        return QuantSwapAbPrefillKey(arch, heads_of_group(heads)) if is_few else QuantPrefillKey(arch)
    if arch == HOPPER:
        return SwapAbPrefillKey(arch, heads_of_group(heads)) if is_few else PrefillKey(arch)
    if arch in BLACKWELL and may_own:
        is_pairs = arch in PREFILL_PAIR_ARCHS and head_groups(heads) > 1
        return (BlackwellPairPrefillKey if is_pairs else BlackwellPrefillKey)(arch)
    return PortablePrefillKey(arch, group_heads(heads))


def of_prefill(call: PrefillCall) -> KernelKey:
    """The kernel of a call."""
    index = call.q.device.index
    arch = arch_of(index)
    may_own = arch in BLACKWELL and is_own("sparse_mla_prefill", BlackwellPrefillKey, index, why_not_own_prefill(call))
    return prefill_key(arch, call.q.shape[1], call.is_quantized, call.is_raw, may_own)


def why_not_own_prefill(call: PrefillCall) -> str:
    """Why Blackwell's own kernel does not take a call, or nothing."""
    return unmapped("q", call.q, (0, 1)) or unmapped("kv", call.kv, (0,))


def why_not_variant_of_prefill(call: PrefillCall | PagedCall) -> str:
    """Why no kernel stores the results of a call as codes, or takes its raw queries, or nothing."""
    arch = arch_of(call.q.device.index)
    if arch != HOPPER:
        return f"output_quant is supported on {HOPPER}, got {arch}"
    return why_not_normed(call.q.shape[1]) if call.is_raw else ""


def prefill_keys(config: ModelConfig, tp: int, arch: str) -> list[KernelKey]:
    """One kernel takes every call of a rank, and on Hopper one each what is a variant; on Blackwell the portable one as
    well, for as long as its own is not trusted."""
    heads = config.num_attention_heads // tp
    keys = [prefill_key(arch, heads, may_own=may_own) for may_own in (True, False)]
    if arch == HOPPER:
        raw = [prefill_key(arch, heads, True, True)] if heads > MOST_NORMED_HEADS else []
        keys += [prefill_key(arch, heads, True), *raw]
    return list(dict.fromkeys(keys))


# ---- paged prefill


@cache
def paged_key(
    arch: str, heads: int, compressed: str, format0: str, format1: str, splits: int = 0, may_own: bool = True
) -> KernelKey:
    """The kernel for so many heads and caches of these formats.

    compressed   which compressed entries count: "none", "all" that a row sees, or "listed"
    format1      format0 if there are none
    splits       of a row, which may be 1, or 0: rows are whole. On Hopper only
    may_own      whether Hopper's or Blackwell's own kernel may run
    """
    if may_own and arch in (HOPPER, *BLACKWELL) and {format0, format1} == {FP8_DS_MLA.id}:
        if splits:
            return PagedClusterKey(arch, cluster_of(splits))
        return BlackwellPagedKey(arch) if arch in BLACKWELL else PagedKey(arch)
    return PortablePagedKey(arch, group_heads(heads), compressed, format0, format1)


def of_paged(call: PagedCall, is_hoppers: bool, splits: int) -> KernelKey:
    """The kernel of a call; is_hoppers: `has_hoppers_paged`; splits: as of `paged_key`."""
    index = call.q.device.index
    arch = arch_of(index)
    if call.is_quantized:
        return QuantPagedKey(arch)
    may_own = is_hoppers
    if arch in BLACKWELL and call.is_countable:
        may_own = is_own("sparse_mla_prefill_paged", BlackwellPagedKey, index, why_not_own_paged(call))
    return paged_key(arch, call.q.shape[1], call.compressed, *call.formats, splits, may_own)


def is_gathered(call: PagedCall) -> bool:
    """Whether the rows of a call are gathered into its workspace first, for prefill's kernel."""
    memory, index = call.workspace, call.q.device.index
    if memory is None or memory.data_ptr() % 16:
        return False
    return call.is_gathered(arch_of(index), multiprocessors(index), memory.nbytes)


def of_gather_paged(call: PagedCall) -> GatherPagedKey:
    """The kernel that gathers the rows of a call."""
    listed, width = call.topk_indices, GatherPagedKey.width
    is_wide = listed is None or not (listed.shape[1] % width or listed.stride(0) % width or listed.data_ptr() % 16)
    return gather_paged_key(arch_of(call.q.device.index), call.compressed, width if is_wide else 1)


@cache
def gather_paged_key(arch: str, compressed: str, width: int = GatherPagedKey.width) -> GatherPagedKey:
    """compressed: as of `paged_key`; width: columns of lists that are read at a time"""
    return GatherPagedKey(arch, compressed, width)


def has_hoppers_paged(call: PagedCall) -> bool:
    """Whether Hopper's own kernels take a call, which alone split rows."""
    return arch_of(call.q.device.index) == HOPPER and call.is_countable


def why_not_own_paged(call: PagedCall) -> str:
    """Why Blackwell's own kernel does not take a call, or nothing."""
    found = [ungathered(name, pool, FP8_DS_MLA.data_bytes) for name, pool in call.caches.items()]
    return next(filter(None, found), unmapped("q", call.q, (0, 1)))


def paged_keys(config: ModelConfig, tp: int, arch: str) -> list[KernelKey]:
    """Of the layers' prefill steps: the window alone, or with entries as the compress ratio says; on Blackwell the
    portable ones as well, for as long as its own is not trusted."""
    kinds = {4: "listed", 128: "all"}
    chosen = dict.fromkeys(kinds.get(ratio, "none") for ratio in config.compress_ratios)
    heads, fmt = config.num_attention_heads // tp, FP8_DS_MLA.id
    ways = (True, False) if arch in BLACKWELL else (True,)
    keys = [paged_key(arch, heads, kind, fmt, fmt, may_own=may_own) for may_own in ways for kind in chosen]
    if arch == HOPPER:
        keys += [PagedClusterKey(arch, ctas) for ctas in CLUSTERS]
        keys.append(QuantPagedKey(arch))
    # what they gather for is prefill's
    keys += [gather_paged_key(arch, kind) for kind in chosen]
    return list(dict.fromkeys(keys))


# ---- mixed


@cache
def mixed_key(arch: str, heads: int, kv_format: str, may_own: bool = True) -> KernelKey:
    """The kernel for so many heads and caches of that format. may_own: whether Blackwell's own kernel may run"""
    is_fp8 = kv_format == PLAIN_FP8.id
    if arch == HOPPER:
        few, swap_ab, many = (
            (MIXED_FP8_HEADS, SwapAbMixedFp8Key, MixedFp8Key) if is_fp8 else (SMALL_HEADS, SwapAbMixedKey, MixedKey)
        )
        return swap_ab(arch, heads_of_group(heads)) if heads <= few[-1] else many(arch)
    if arch in BLACKWELL and may_own:
        return BlackwellMixedFp8Key(arch) if is_fp8 else BlackwellMixedKey(arch)
    return PortableMixedKey(arch, group_heads(heads), kv_format)


def of_mixed(call: MixedCall, is_converted: bool = False) -> KernelKey:
    """The kernel of a call; is_converted: over rows that have been converted."""
    index = call.query.device.index
    arch = arch_of(index)
    if is_converted:
        return MixedFp8ConvertedKey(arch)
    own = BlackwellMixedFp8Key if call.kv_format == PLAIN_FP8.id else BlackwellMixedKey
    may_own = arch in BLACKWELL and is_own("sparse_mla_mixed", own, index, why_not_own_mixed(call))
    return mixed_key(arch, call.query.shape[1], call.kv_format, may_own)


def is_converted(call: MixedCall) -> bool:
    """Whether the rows of a call are converted into its workspace first."""
    memory, index = call.workspace, call.query.device.index
    if memory is None or memory.data_ptr() % 16 or arch_of(index) != HOPPER:
        return False
    return call.is_converted(HOPPER, multiprocessors(index), memory.nbytes)


def of_convert_mixed(call: MixedCall) -> ConvertMixedKey:
    """The kernel that converts the rows of a call."""
    return ConvertMixedKey(arch_of(call.query.device.index))


def why_not_own_mixed(call: MixedCall) -> str:
    """Why Blackwell's own kernel does not take a call, or nothing."""
    found = [ungathered(name, pool, HEAD_DIM) for name, pool in call.caches.items()]
    return next(filter(None, found), unmapped("query", call.query, (0, 1)))


def mixed_keys(config: ModelConfig, tp: int, arch: str) -> list[KernelKey]:
    """One kernel for each format takes every call of a rank, and over e4m3 caches others those whose rows are converted
    first; on Blackwell the portable ones as well, for as long as its own are not trusted."""
    heads = config.num_attention_heads // tp
    kinds = itertools.product((PLAIN_BF16.id, PLAIN_FP8.id), (True, False))
    keys = [mixed_key(arch, heads, *kind) for kind in kinds]
    if arch == HOPPER and heads >= LEAST_HEADS:
        keys += [ConvertMixedKey(arch), MixedFp8ConvertedKey(arch)]
    return list(dict.fromkeys(keys))


# ---- what Blackwell's own kernels take


def is_own(op: str, own: type[KernelKey], device_index: int, why_not: str) -> bool:
    """Whether Blackwell's own kernel runs. why_not: what `unmapped` or `ungathered` say of the call's tensors."""
    return not why_not and trust.is_trusted(op, own.kernel_name, device_index)


def ungathered(name: str, cache: torch.Tensor, row_elements: int) -> str:
    """Why rows of so many elements cannot be gathered from a cache [pages, rows, ...], or nothing.

    Its pages have to begin where a row could that is as long as theirs, and may not overlap. Of a single page, too, the
    stride counts: it tells how many rows there are.
    """
    step = cache.stride(0)
    if cache.numel() == 0:
        return f"{name} must have rows, got shape {tuple(cache.shape)}"
    if cache.data_ptr() % 16:
        return f"{name} must be 16-byte aligned, got address {cache.data_ptr():#x}"
    least = cache.shape[1] * row_elements
    if step % row_elements or step < least:
        return f"{name}: expected a page stride that is a multiple of {row_elements} and at least {least}, got {step}"
    rows = cache.shape[0] * (step // row_elements)
    if rows >= MAP_ROWS:
        return f"{name} must be less than 2^31 rows of {row_elements} long, got {rows}"
    return ""


def unmapped(name: str, tensor: torch.Tensor, axes: tuple[int, ...]) -> str:
    """Why no descriptor can tell of a tensor with dense rows and those other axes, or nothing."""
    strides = [tensor.stride(axis) * tensor.element_size() for axis in axes]
    if tensor.numel() == 0:
        return f"{name} must have elements"
    if tensor.data_ptr() % 16 or any(stride % 16 or not 0 < stride < MAP_STRIDE for stride in strides):
        return (
            f"{name} must be 16-byte aligned row by row, got address {tensor.data_ptr():#x} and strides "
            f"{tuple(tensor.stride())}"
        )
    return ""
