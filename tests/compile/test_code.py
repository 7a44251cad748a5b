# SPDX-License-Identifier: Apache-2.0
"""What the code of each kernel must be: a row of a table for a key, held against its PTX and its machine code.

Of every row: no spills, no stack, nothing in local memory, shared memory that fits, the instructions that its key
declares, and a wait for the kernel ahead wherever there are dependent launches. A row says the rest: how many registers
are allowed, and how often instructions occur. What no count can say is in the tests of the kernels.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from cute_kernels.compressor import epilogue, latent, latent_store, ratio4, ratio128, save
from cute_kernels.compressor.slots import SlotsKey
from cute_kernels.dsl import convert
from cute_kernels.dsl.ptx import DEPENDENT_LAUNCH_ARCH, HAS_BF16_OF_E4M3
from cute_kernels.formats import (
    FP8_DS_MLA,
    HEAD_DIM,
    INDEXER_FP8,
    INDEXER_MXFP4,
    MXFP8_V41,
    NVFP4_V41,
    PLAIN_BF16,
    PLAIN_FP8,
)
from cute_kernels.indexer import block_maxima, block_picks, merge_keys, picked_keys, query
from cute_kernels.indexer import gather as index_gather
from cute_kernels.indexer import launch as scores
from cute_kernels.indexer import select as select_scores
from cute_kernels.indexer.hopper.logits import MANY_COLUMNS, TILES_OF_ROUND, LogitsKey
from cute_kernels.indexer.hopper.logits_candidates import CandidateLogitsKey
from cute_kernels.indexer.hopper.logits_mxfp4 import HALVES
from cute_kernels.indexer.mma_sync.logits import STEP, PortableLogitsKey
from cute_kernels.indices.c128a import EntriesKey
from cute_kernels.indices.combine import CombineKey as CombinePicksKey
from cute_kernels.indices.mixed import MixedKey as MixedIndicesKey
from cute_kernels.indices.step_metadata import StepKey
from cute_kernels.indices.translate import TranslateKey
from cute_kernels.indices.window import WindowKey
from cute_kernels.insert_compress import insert_compress, insert_compress_index
from cute_kernels.kv_cache import gather, insert, pack, qnorm
from cute_kernels.linear import launch as linear
from cute_kernels.linear import quantize
from cute_kernels.linear import select as select_gemm
from cute_kernels.linear.hopper.gemm import SCALED_CHUNKS
from cute_kernels.linear.hopper.gemm_swap_ab import SwapAbKey
from cute_kernels.linear.mma_sync.gemm import VECTORS, PortableGemmKey
from cute_kernels.models import MODELS
from cute_kernels.norm import q_kv_quant, rms
from cute_kernels.numerics import E2M1_ROUNDINGS
from cute_kernels.output import inv_rope
from cute_kernels.runtime.arch import SMEM_BYTES, arch_number
from cute_kernels.runtime.key import KernelKey
from cute_kernels.runtime.report import problems
from cute_kernels.sparse_mla import combine
from cute_kernels.sparse_mla.hopper.decode import DecodeKey
from cute_kernels.sparse_mla.hopper.prefill import NormQuantPrefillKey, PrefillKey, QuantPrefillKey
from cute_kernels.sparse_mla.hopper.prefill_mixed import MixedFp8ConvertedKey, MixedFp8Key, MixedKey
from cute_kernels.sparse_mla.hopper.prefill_mixed_swap_ab import SwapAbMixedFp8Key
from cute_kernels.sparse_mla.hopper.prefill_paged import PagedKey, QuantPagedKey
from cute_kernels.sparse_mla.hopper.prefill_paged_cluster import PagedClusterKey
from cute_kernels.sparse_mla.hopper.prefill_swap_ab import (
    HEADS,
    QUARTERS,
    QuantSwapAbPrefillKey,
    SwapAbMixedKey,
    SwapAbPrefillKey,
)
from cute_kernels.sparse_mla.mma_sync.decode import PortableDecodeKey
from cute_kernels.sparse_mla.mma_sync.decode_small_heads import SmallHeadsDecodeKey
from cute_kernels.sparse_mla.mma_sync.prefill import (
    PortableKey,
    PortableMixedKey,
    PortablePagedKey,
    PortablePrefillKey,
)
from cute_kernels.sparse_mla.schedule import CLUSTERS
from tests.compile.reports import RESERVED, compile_report, disassemble
from tests.compile.sampling import of_run

FP8, BF16, E4M3 = FP8_DS_MLA.id, PLAIN_BF16.id, PLAIN_FP8.id
HOPPER = "sm_90a"
MOVING = (HOPPER, "sm_100a", "sm_89", "sm_120a")
"""Architectures of kernels that move bytes and convert them to e4m3; sm_80 has those that do not convert. sm_103a
compiles them as sm_100a does: test_deployments.py has some."""

DIVISIONS = r"\bdiv\.|\brem\."
ROUNDED = DIVISIONS + r"|\.ftz"
"""What kernels must not have that number their rows without a division, and that keep subnormal numbers."""

LOAD_16, STORE_16, STORE_8 = r"ld\.\S*global\S*\.v4\.b32", r"st\.global\.v4\.b32", r"st\.global\.v2\.b32"
LOAD_ALL, LOAD_CTA = r"ld\.relaxed\.gpu\.global\.v4\.b32", r"ld\.relaxed\.cta\.global\.v4\.b32"
LOAD_ONCE = r"ld\.relaxed\.gpu\.global\.L1::no_allocate\.v4\.b32"
TO_E4M3 = r"cvt\.rn\.satfinite\.e4m3x2\.(?:f32|bf16x2)"
WAIT, NEXT = r"griddepcontrol\.wait", r"griddepcontrol\.launch_dependents"
CLUSTER = r"barrier\.cluster\.arrive\.relaxed"
LOCAL = r"\bSTL|\bLDL"
LOADED, STORED = r"\bLDG\.E\.\S*128", r"\bSTG\.E\.\S*128"


@dataclass(frozen=True)
class Row:
    """What is expected of a key's code.

    registers   of a thread, at most
    ptx, sass   pattern -> how often it occurs in the PTX, in the machine code
    smem        bytes of shared memory; None: as many as the key says
    static      bytes that it may have on top, which no key knows
    present     what is in the PTX, however often
    absent      what is not in it
    threads     of a CTA, as the kernel declares them; 0: any number
    first       machine code (before, after): everything of the first pattern stands before all of the second
    """

    key: KernelKey
    registers: int
    ptx: Mapping[str, int] = field(default_factory=dict)
    sass: Mapping[str, int] = field(default_factory=dict)
    smem: int | None = None
    static: int = 0
    present: tuple[str, ...] = ()
    absent: str = ""
    threads: int = 0
    first: tuple[str, str] | None = None


def waits(arch: str, count: int = 1, starts: int | None = None) -> dict[str, int]:
    """Of kernels that wait so often, and let the next one start as often, or `starts` times."""
    has_dependency = arch_number(arch) >= DEPENDENT_LAUNCH_ARCH
    return {WAIT: count * has_dependency, NEXT: (count if starts is None else starts) * has_dependency}


def of_threads(threads: int) -> int:
    return 65536 // threads


def of_bytes_in_flight(size: int, threads: int, each: int) -> int:
    """Registers that let as many CTAs run as have `size` bytes on their way, `each` of a thread."""
    return 65536 // (-(-size // (threads * each)) * threads)


# ---- caches ----------------------------------------------------------------------------------------------------------


def inserts() -> Iterator[Row]:
    """40 registers keep 48 warps on a multiprocessor, enough bytes in flight. A row is on its way before anything waits
    for its slot."""
    code: dict[str, Any] = {"absent": DIVISIONS, "first": (LOADED, r"\bEXIT|\bBRA|\bSHFL")}
    for arch in MOVING:
        ptx = {r"ld\.global\.nc\.L1::no_allocate\.v4\.b32": 2, TO_E4M3: 8, STORE_8: 3}
        yield Row(insert.InsertKey(arch), 40, ptx, {LOADED: 2, r"F2FP\.\S*E4M3": 8, r"\bSTG\.E\.64": 3}, **code)
        yield Row(insert.key_for(arch, FP8, insert.MANY_ROWS), 40, {LOAD_ALL: 2}, {LOADED: 2}, **code)


def gathers() -> Iterator[Row]:
    """48 registers keep 40 warps with two rows each in flight on a multiprocessor, 64 keep 32 with two to four. Of bulk
    copies twelve CTAs fit, as many as have room in its shared memory."""
    for arch, gathered, rows in itertools.product(MOVING, (False, True), (2, 4)):
        if arch != HOPPER and rows == 4:
            continue
        is_direct = arch in convert.BLACKWELL and HAS_BF16_OF_E4M3
        ptx = {
            r"ld\.relaxed\.gpu\.global\.L1::no_allocate\.v2\.b32": 3 * rows,
            r"ld\.relaxed\.gpu\.global\.L1::no_allocate\.b32": 1 if gathered else 3,
            r"ld\.global\.nc\.b32": 3 * gathered,
            r"cvt\.rn\.b?f16x2\.e4m3x2": 8 * rows,
            r"cvt\.rn\.bf16x2\.f32": 0 if is_direct else 8 * rows,
            r"@%p\d+ st\.global\.v4\.b32": 4 * rows,
        }
        key = gather.GatherKey(arch, gathered=gathered, rows=rows)
        yield Row(key, {2: 48, 4: 64}[rows], ptx, {r"\bLDG\.E\S*\.64": 3 * rows, STORED: 4 * rows}, absent=ROUNDED)
    for rows in (1, 2, 4, 8):
        yield Row(gather.GatherKey(HOPPER, rows=rows, warps=8), 255, absent=ROUNDED, threads=256)
    bulk = gather.GatherBulkKey
    others = ({"rows": 2}, {"rows": 8}, {"stages": 1}, {"warps": 2, "stages": 3})
    for key in (
        *(bulk(arch, gathered=gathered) for arch in (HOPPER, "sm_100a", "sm_120a") for gathered in (False, True)),
        *(bulk(HOPPER, **fields) for fields in others),
    ):
        is_usual = key == bulk(key.arch, gathered=key.gathered)
        ptx = {
            r"cp\.async\.bulk\.shared::cluster\.global": 2 * 2 * key.stages,
            r"mbarrier\.init": key.stages,
            r"mbarrier\.arrive\.expect_tx": 2 * key.stages,
            r"@%p\d+ st\.global\.v4\.b32": 4 * key.rows * key.stages,
        }
        assert not is_usual or SMEM_BYTES[HOPPER] // (key.smem_bytes + RESERVED) >= 11
        few = 40 if key.arch != "sm_120a" else 64
        yield Row(key, few if is_usual else 255, ptx if is_usual else {}, absent=ROUNDED)


def qnorms() -> Iterator[Row]:
    """Nothing of the rotation is fused; and nothing may be read as if no kernel had written it since this one began."""
    for arch, (form, fmt) in itertools.product(MOVING, {"mla": FP8, "bf16": BF16, "fp8": E4M3}.items()):
        key = qnorm.key_for(arch, fmt, query_rows=100_000)
        ptx = {
            LOAD_CTA: 2 * key.rows,
            r"ld\.global\.v4\.b32": 4,
            r"ld\.global\.nc": 0,
            LOAD_ONCE: 2,
            # 16 products of a rotation, of each query row and of kv; the norm's; and those with the query's scale
            r"\bmul\.rn\.f32": 16 * (key.rows + 1) + (48 if form == "fp8" else 24) * key.rows,
            r"\bsub\.rn\.f32": 4 * (key.rows + 1),
            r"rsqrt\.approx\.f32": key.rows,
            r"\brcp\.rn\.f64": int(form == "fp8"),
        }
        yield Row(key, 255, ptx, smem=0, absent=r"\brem\.|\.ftz", threads=32 * key.warps)
    yield Row(qnorm.key_for("sm_80", BF16), 255, smem=0, absent=r"\brem\.|\.ftz")
    for rows in (1, 2, 4):
        yield Row(qnorm.QnormKey(HOPPER, rows=rows, warps=8), 255, smem=0, absent=r"\brem\.|\.ftz")
        plain = qnorm.QnormKey(HOPPER, norm=False, rows=rows)
        yield Row(plain, 255, {"rsqrt": 0}, smem=0, absent=r"\brem\.|\.ftz")


# ---- norms, quantization, rotation -----------------------------------------------------------------------------------


def norms() -> Iterator[Row]:
    """Registers for at least 40 KB in flight on a multiprocessor: all of a row is loaded at once."""
    deployed = [(arch, "v4-pro") for arch in (HOPPER, "sm_100a", "sm_80", "sm_120a")]
    for arch, model in (*deployed, (HOPPER, "v4-flash")):
        for kernel in (rms.Q_KV, rms.MTP_INPUT, rms.SHARED_HEAD):
            for key in kernel.deployment_keys(MODELS[model], 1, arch):
                width = [256 * (key.warps if key.spread or rms.warps_for(n) > 1 else 1) for n in key.widths]
                vectors = sum(-(-columns // step) for columns, step in zip(key.widths, width, strict=True))
                most = of_bytes_in_flight(40_000, 32 * key.warps, 16 * -(-vectors // len(key.widths)))
                if key.spread:
                    most = of_threads(32 * key.warps)
                ptx = {LOAD_CTA: 2 * vectors, STORE_16: vectors}
                yield Row(key, most, ptx | waits(arch, len(key.widths)), absent=ROUNDED, threads=32 * key.warps)
    for fields in (
        *((8, True), (2056, False), (16384, True), (24, True, 4096, True), (3000, False, 12288, True)),
        (5120, True, 5120, False, "int32"),
    ):
        yield Row(rms.RmsNormKey(HOPPER, *fields), 255, absent=ROUNDED)


def norms_with_codes() -> Iterator[Row]:
    """Registers for at least 64 KB in flight on a multiprocessor, if rows are not spread over warps."""
    for arch, model in (*((arch, "v4-pro") for arch in MOVING), (HOPPER, "v4-flash")):
        keys = q_kv_quant.deployment_keys(MODELS[model], 1, arch)
        assert [key.spread for key in keys] == [True, False]
        for key in keys:
            threads = 32 * key.warps
            vectors = [1, 1] if key.spread else [-(-width // 256) for width in (key.width, key.kv_width)]
            most = of_threads(threads) if key.spread else of_bytes_in_flight(64_000, threads, 16 * sum(vectors))
            ptx = {LOAD_CTA: 2 * sum(vectors), STORE_16: vectors[1], STORE_8: vectors[0]}
            yield Row(key, most, ptx | waits(arch, 1 + key.spread, 1), absent=ROUNDED, threads=threads)
    for fields in (
        *((8, True, 2048, True, True, True), (8, True, 2048, True, True, False), (2048, True, 24, False, True, False)),
        *((200, False, 512, True, False, True), (1032, False, 512, True, False, False)),
    ):
        key = q_kv_quant.NormQuantKey(HOPPER, *fields)
        yield Row(key, of_threads(32 * key.warps))


def quantizations() -> Iterator[Row]:
    """Six CTAs and more: 48 KB of loads in flight on a multiprocessor."""
    for arch in MOVING:
        (key,) = quantize.deployment_keys(MODELS["v4-pro"], 1, arch)
        ptx, threads = {LOAD_CTA: quantize.VECTORS} | waits(arch), 32 * quantize.TOKENS
        yield Row(key, 40, ptx, smem=4 * 4 * quantize.TOKENS, absent=ROUNDED, threads=threads)


def rotations() -> Iterator[Row]:
    """48 KB and more in flight on a multiprocessor. A rotation is two products and a sum, each rounded by itself."""
    few, many = inv_rope.FEW_ROWS, inv_rope.MANY_ROWS
    kinds = [*itertools.product((HOPPER, "sm_100a"), ("fp32", "packed", "none"), (1, many), (1,))]
    kinds += [(HOPPER, "fp32", few + 1, 1), ("sm_89", "fp32", 1, 1), ("sm_120a", "packed", many, 1)]
    kinds += [(arch, "fp32", few, inv_rope.EARLY_TOKENS + 1) for arch in (HOPPER, "sm_100a")]
    for arch, scales, rows, tokens in kinds:
        key = inv_rope.key_for(arch, scales, rows, tokens)
        heads = key.heads
        ptx = {LOAD_CTA: 2 * heads + 2, r"\bmul\.rn\.f32": 16 * heads, r"\b(?:add|sub)\.rn\.f32": 8 * heads, "fma": 0}
        ptx |= {STORE_16: 2 * heads} if scales == "none" else {TO_E4M3: 8 * heads, STORE_8: 2 * heads}
        smem = 0 if scales == "none" or key.one_token else 8 * 4 * key.words
        most = 65536 // (-(-48 * 1024 // (key.heads * 1024)) * 32)
        threads = 32 * (inv_rope.ONE_TOKEN_WARPS if key.one_token else inv_rope.TOKENS)
        yield Row(key, most, ptx | waits(arch), smem=smem, absent=ROUNDED, threads=threads)
    for key in inv_rope.ROTATED.deployment_keys(MODELS["v4-pro"], 1, "sm_80"):
        yield Row(key, 255, absent=ROUNDED)


# ---- context groups --------------------------------------------------------------------------------------------------


def packs() -> Iterator[Row]:
    """40 registers keep 48 warps on a multiprocessor. All vectors of a thread are on their way before one is stored."""
    loads = {16: r"gpu\.global\.v4\.b32", 8: r"gpu\.global\.L1::no_allocate\.b64"}
    loads[4] = r"gpu\.global\.L1::no_allocate\.b32"
    stores = {16: STORE_16, 8: STORE_8, 4: r"st\.global\.b32"}
    for arch, sizes, is_unpack in (
        *itertools.product((HOPPER,), ((576, 8, 16), (128, 4, 4), (4096, 0, 16)), (False, True)),
        ("sm_80", (576, 8, 8), False),
    ):
        key = pack.PackKey(arch, *sizes, is_unpack)
        pages, rows = (-(-key.tile * size // (key.vector * pack.THREADS)) for size in (key.data, key.record))
        of_pages, of_rows = Counter({key.vector: pages}), Counter({key.vector: rows})
        of_pages[key.unit] += key.scales // key.unit
        # the last tile's, behind its last whole vector
        of_rows[key.unit] += key.record % key.vector != 0
        source, target = (of_rows, of_pages) if is_unpack else (of_pages, of_rows)
        slots = Counter({8: 1})
        ptx = {rf"ld\.relaxed\.{loads[size]}": count for size, count in (source + slots).items()}
        ptx |= {stores[size]: count for size, count in target.items()}
        yield Row(key, 40, ptx | waits(arch), absent=DIVISIONS, threads=pack.THREADS)


def keys() -> Iterator[Row]:
    """As many as a multiprocessor takes."""
    for arch in (HOPPER, "sm_80"):
        ptx = {r"ld\.relaxed\.gpu\.global\.L1::no_allocate\.b32": 2, STORE_8: 1} | waits(arch)
        yield Row(picked_keys.PickedKeysKey(arch), 32, ptx, absent=DIVISIONS, threads=picked_keys.THREADS)


def merges() -> Iterator[Row]:
    """All keys of a round are on their way before one is used; the network has as many shuffles as steps within warps,
    for each place of a thread."""
    for arch, places, width in ((HOPPER, 512, 2), (HOPPER, 2048, 1), ("sm_80", 1024, 2)):
        for key in merge_keys.keys_of(arch, places, width):
            each = places // (32 * key.warps)
            steps = [distance for _, distance in merge_keys.network(places)]
            shuffles = sum(each <= distance < 32 * each for distance in steps) * each
            loads = {r"ld\.relaxed\.gpu\.global\.L1::no_allocate\.(?:v4\.b32|b64)": key.each // width}
            ptx = loads | {r"shfl\.sync\.bfly": shuffles} | waits(arch)
            yield Row(key, of_threads(32 * key.warps), ptx, absent=DIVISIONS, threads=32 * key.warps)


# ---- index builders --------------------------------------------------------------------------------------------------


def index_builders() -> Iterator[Row]:
    """32 registers let a multiprocessor have all its warps."""
    many, few = {"warps": 2, "groups": 2}, {"wide_positions": False, "is_shift": False}
    for arch in (HOPPER, "sm_100a"):
        for kind, *fields, more in (
            *((TranslateKey, 4, {}), (TranslateKey, 4, {"warps": 8}), (TranslateKey, 4, many)),
            *((TranslateKey, 4, many | {"through_l1": True}), (TranslateKey, 1, {"is_shift": False, "warps": 8})),
            *((CombinePicksKey, 4, {}), (CombinePicksKey, 4, {"groups": 3}), (CombinePicksKey, 1, {})),
            *((MixedIndicesKey, 4, {}), (MixedIndicesKey, 4, {"warps": 8, "is_local": True})),
            (MixedIndicesKey, 4, many | {"is_local": True}),
            (MixedIndicesKey, 4, many | {"through_l1": True, "is_local": True}),
            (MixedIndicesKey, 1, {"is_shift": False, "warps": 8}),
            *((WindowKey, 4, {}), (WindowKey, 1, few), (EntriesKey, 4, {}), (EntriesKey, 1, few), (SlotsKey, {})),
            *((StepKey, 4, {}), (StepKey, 1, {})),
        ):
            key = kind(arch, *fields, **more)
            assert key.smem_bytes <= 64
            yield Row(key, 48 if kind in (EntriesKey, StepKey) else 32, absent=DIVISIONS)


# ---- compressor ------------------------------------------------------------------------------------------------------


def saves() -> Iterator[Row]:
    others = [(arch, 1024, rows) for arch in ("sm_100a", "sm_80", "sm_120a") for rows in (1, 2 * save.MANY_COLUMNS)]
    for arch, width, rows in (
        *itertools.product((HOPPER,), (1024, 512, 256, 128), (1, 2 * save.MANY_COLUMNS)),
        *others,
    ):
        key = save.key_for(arch, width, rows)
        ptx = {
            LOAD_ALL if rows > 1 else LOAD_ONCE: 2 * key.vectors,
            r"ld\.global\.nc\.v4\.b32": key.vectors,
            r"add\.(?:rn\.)?f32": 4 * key.vectors,
            STORE_16: 2 * key.vectors,
        }
        yield Row(key, 40, ptx, smem=0, absent=ROUNDED, threads=128)
    for width, fields in itertools.product((1024, 512, 256), ({"rows": 2}, {"warps": 8}, {"vectors": 1, "warps": 8})):
        count = 2 * fields.get("vectors", 2) * fields.get("rows", 1)
        ptx, threads = {r"ld\.relaxed\.gpu\S*\.v4\.b32": count}, 32 * fields.get("warps", 4)
        yield Row(save.SaveKey(HOPPER, width, **fields), 255, ptx, smem=0, absent=ROUNDED, threads=threads)
    for width in (384, 640, 2048):
        yield Row(save.key_for(HOPPER, width, 1), 255, smem=0, absent=ROUNDED)


def latents() -> Iterator[Row]:
    """Of ratio 1 48 warps of a multiprocessor find registers, of ratio 2 40. The CTA's rows are asked
    for at once, of few rows those before as well; the row before, or one that the ring keeps, may come later."""
    for arch, ratio, rows in itertools.product(MOVING, (1, 2), (1, 1 << 20)):
        key = latent.key_for(arch, ratio, rows)
        own = ratio * (2 if key.pairs else 1)
        # ratio 2: before the first row; before the second, or in the ring; a row that is late
        ptx = {r"ld\.relaxed\.gpu\S*\.v4\.b32": own + (6 if ratio == 2 else 0)} | waits(arch)
        registers = 40 if ratio == 1 else 48
        yield Row(key, registers, ptx, absent=DIVISIONS, threads=latent.THREADS)
    kinds = [*itertools.product(MOVING, (FP8_DS_MLA, INDEXER_FP8, INDEXER_MXFP4))]
    for arch, fmt in (*kinds, *itertools.product((HOPPER, "sm_100a"), (MXFP8_V41, NVFP4_V41))):
        key = latent_store.LatentStoreKey(arch, fmt.id)
        rotated, loads = (4, {r"ld\.relaxed\.gpu\S*\.v4\.b32": 2}) if fmt in (MXFP8_V41, NVFP4_V41) else (2, {})
        ptx = {r"\bsub\.rn\.f32": rotated} | (loads or {r"ld\.relaxed\.gpu\S*\.v2\.b32": fmt.dim // 128}) | waits(arch)
        yield Row(key, 40, ptx, smem=0, absent=ROUNDED, threads=128)


def maxima_of_blocks() -> Iterator[Row]:
    for arch in MOVING:
        key = block_maxima.BlockMaximaKey(arch)
        ptx = {r"shfl\.sync\.bfly": block_maxima.VECTORS // 2} | waits(arch)
        yield Row(key, 40, ptx, smem=0, absent=DIVISIONS, threads=128)


def picks_of_blocks() -> Iterator[Row]:
    bound, marks, picks = block_picks.keys_of(HOPPER)
    found = {r"redux\.sync\.add": 2, r"red\.relaxed\.cta\.shared\.add\.u32": 2}
    yield Row(bound, 64, found | waits(HOPPER), absent=DIVISIONS, threads=block_picks.BOUND_THREADS)
    # loads of scores do not wait for the bound
    ahead = r"\bLDG\.E\.128", r"\bACQBULK"
    threads = 32 * block_picks.WARPS
    yield Row(marks, 40, waits(HOPPER), smem=0, absent=DIVISIONS, threads=threads, first=ahead)
    yield Row(picks, 64, waits(HOPPER), absent=DIVISIONS, threads=1024)


def scores_of_candidates() -> Iterator[Row]:
    for heads, mxfp4 in itertools.product((16, 32, 64), (False, True)):
        key = CandidateLogitsKey(HOPPER, heads, mxfp4, paged=heads == 32)
        yield Row(key, 65536 // key.config.threads, waits(HOPPER), threads=key.config.threads)


def entries_of_ratio_4() -> Iterator[Row]:
    """Four CTAs of 128 threads share a multiprocessor's registers and shared memory. With the bias, a token's row comes
    from two places."""
    formats = (FP8, BF16, E4M3, INDEXER_FP8.id, INDEXER_MXFP4.id)
    usual = [epilogue.store_for(fmt, False, "ties_to_lower", False) for fmt in formats]
    keys = [
        ratio4.C4Key(arch, fused, **fields)
        for arch, fused, fields in itertools.product((HOPPER, "sm_100a"), (False, True), usual)
    ]
    for fmt, through_l1 in itertools.product((INDEXER_FP8.id, "indexer_mxfp4_wide/1"), (False, True)):
        fields = epilogue.store_for(fmt, True, "ties_to_even", True)
        keys.append(ratio4.C4Key(HOPPER, True, **fields, through_l1=through_l1))
    for key in keys:
        through, past = (2 * ratio4.WINDOW, 0) if key.through_l1 else (0, 2 * ratio4.WINDOW)
        ptx = {
            LOAD_CTA: through,
            LOAD_ONCE: past + key.fp32_weight,
            r"cp\.async\.ca\.shared\.global": (ratio4.WINDOW + 4 + 4) * key.fused,
        }
        present, absent = ((STORE_16,), r"\bdiv\.") if key.fused else ((), r"\bdiv\.|st\.global\.v4\.b32")
        yield Row(key, 128, ptx, static=25 * 1024, present=present, absent=absent)


def entries_of_ratio_128() -> Iterator[Row]:
    """Two copies of the code that asks for rows: for the first slice and for the next one."""
    kinds = [(HOPPER, fused, ctas) for fused in (False, True) for ctas in ratio128.CLUSTERS]
    kinds += [("sm_100a", fused, 2) for fused in (False, True)]
    for arch, fused, ctas in kinds:
        ptx = {
            r"cp\.async\.cg\.shared\.global": 2 * 16,
            r"cp\.async\.ca\.shared\.global": 2 * 8 * fused,
            STORE_16: 16 * fused,
        }
        yield Row(
            ratio128.C128Key(arch, FP8, False, fused, ctas), of_threads(ratio128.WARPS * 32), ptx, absent=r"\brem\."
        )
    for fmt, fp32_weight in ((BF16, False), (E4M3, True)):
        key = ratio128.C128Key(HOPPER, fmt, fp32_weight, False, 2)
        yield Row(key, of_threads(ratio128.WARPS * 32), present=(CLUSTER,), absent=r"\brem\.")


def steps_before_attention() -> Iterator[Row]:
    """Four CTAs of four warps fit a multiprocessor, on those of sm_89 and sm_120a three. Every kind of CTA waits for
    the kernel ahead, and lets the next one start; queries and keys are one kind that waits in three places. Of ratio
    128 five CTAs fit one of Hopper's multiprocessors, four Blackwell's; its keys wait in two places."""
    for arch in MOVING:
        for key in insert_compress_index.keys_of(arch)[:2]:
            starts = 4 * (arch != "sm_89")
            ptx = {WAIT: starts and starts + 2, NEXT: starts}
            yield Row(key, 168 if arch in ("sm_89", "sm_120a") else 128, ptx, static=25 * 1024)
    for arch in (HOPPER, "sm_100a"):
        for key in insert_compress.keys_of(arch):
            most = 96 if arch == HOPPER else 128
            yield Row(key, most, {WAIT: 4, NEXT: 2}, static=9 * 1024, present=(r"barrier\.cluster",))


# ---- indexer ---------------------------------------------------------------------------------------------------------


def queries() -> Iterator[Row]:
    """Nothing of the rotation is fused. Of the transform, strides 1, 2, 4 and 64 are within a lane, 8, 16 and 32
    between lanes."""
    for arch, rounding in itertools.product(MOVING, ("", *E2M1_ROUNDINGS)):
        key = query.key_for(arch, rounding, False, query.MANY_HEADS)
        groups, is_blackwells = key.groups, arch in convert.BLACKWELL
        ptx = {
            LOAD_ALL: 2 * groups,
            r"ld\.global\.nc\.v4\.b32": 2,
            r"\bmul\.rn\.f32": 16 * groups + (2 if rounding else 3),
            r"\bsub\.rn\.f32": 4 * groups,
            r"\badd\.rn\.f32": 4 * groups,
            TO_E4M3: 0 if rounding else 8 * groups,
            r"xorsign\.abs\.f16x2": 16 * groups if rounding and not is_blackwells else 0,
            r"cvt\.rn\.satfinite\.e2m1x2\.f32": 8 * groups if rounding and is_blackwells else 0,
            r"cvt\.rp\.satfinite\.ue8m0x2\.f32": groups if rounding and is_blackwells else 0,
            r"shfl\.sync\.bfly": 3 * groups,
        }
        yield Row(key, 255, ptx, smem=0, absent=ROUNDED)
    for rounding, size in itertools.product(("", "ties_to_lower"), query.SIZES):
        key = query.key_for(HOPPER, rounding, True, size)
        ptx = {r"\bfma\.rn\.f32": 3 * 16 * key.groups, r"shfl\.sync\.bfly": (3 + 3 * 16) * key.groups}
        yield Row(key, 255, ptx, smem=0, absent=ROUNDED)
    yield Row(query.QueryKey(HOPPER, "", False, True, False, groups=1), 255, smem=0, absent=ROUNDED)
    yield Row(query.QueryKey(HOPPER, "ties_to_lower", False, True, True, True), 255, smem=0, absent=ROUNDED)


def gathers_of_index_keys() -> Iterator[Row]:
    """A load and a store a step; without 16 bytes a lane the scale's are no different."""
    sizes = index_gather.SIZES[0], index_gather.SIZES[-1]
    for fmt, size in itertools.product((INDEXER_FP8, INDEXER_MXFP4), sizes):
        for arch, aligned in (*((arch, True) for arch in (*MOVING, "sm_80")), (HOPPER, False)):
            key = index_gather.key_for(arch, fmt.id, size, aligned)
            steps = key.rows * key.code_bytes // (32 * key.access)
            accesses = rf"(?:ld\.relaxed\.gpu|st)\.global\.\S*{'v4.b32' if aligned else 'b32'} "
            yield Row(key, 255, {accesses: 2 * steps + 2 * (not aligned)}, smem=0, absent=DIVISIONS)


def hoppers_scores() -> Iterator[Row]:
    """With two accumulators a round has two tiles of both, in pages three. A row of queries is a copy; keys are one, by
    a lane for each box of pages."""
    config = MODELS["v4-flash"]
    deployed = [*scores.logits_keys(config, 1, HOPPER), *scores.paged_logits_keys(config, 1, HOPPER)]
    keys = [key for key in deployed if type(key) is LogitsKey]
    shapes = [(16, 4, False, 64), (48, 4, False, 64), (48, 3, True, 64), (32, 1, True, 8), (48, 4, True, 8)]
    keys += [select_scores.own_key(HOPPER, *shape) for shape in (*shapes, (64, 4, True, 8))]
    for key in keys:
        tiles = TILES_OF_ROUND if key.paged else 2
        count = 4 if key.config.accumulators == 1 else 4 * 2 * tiles
        ptx = {r"\bwgmma\.mma_async\.": count, r"\bsetmaxnreg\.": 2 * (key.config.columns >= MANY_COLUMNS)}
        yield Row(key, of_threads(key.config.threads), ptx | copies(key.rows + 1))
    for shape in ((64, 1, True, 64), (64, 4, False, 64), (48, 2, True, 8)):
        key = select_scores.own_key(HOPPER, *shape, mxfp4=True)
        ptx = {r"\bwgmma\.mma_async\.": 4 * HALVES, r"\bsetmaxnreg\.": 2 * bool(key.config.registers)}
        yield Row(key, of_threads(key.config.threads), ptx | copies(key.rows + 1))


def copies(count: int) -> dict[str, int]:
    return {r"\bcp\.async\.bulk\.tensor\.(?!\S*gather4)\S*shared::\S+\.global": count}


def portable_scores() -> Iterator[Row]:
    """Of every 8 of a step's keys and 16 heads, 8 products of 16 columns. What takes most registers on each."""
    for arch, *fields in (
        *(("sm_80", 64, 1, True, False), ("sm_80", 64, 4, True, True), (HOPPER, 64, 1, True, False)),
        *((HOPPER, 64, 1, True, True), (HOPPER, 16, 4, False, True), ("sm_100a", 64, 2, True, True)),
        ("sm_120a", 64, 1, True, False),
    ):
        key = PortableLogitsKey(arch, *fields)
        element = "bf16" if key.mxfp4 else "f16"
        product = rf"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.{element}\.{element}\.f32"
        ptx = {product: STEP // 8 * key.config.tiles * 8, r"\bmma\.sync": STEP // 8 * key.config.tiles * 8}
        codes = r"cvt\.\S*e4m3"
        present, absent = ((), codes) if key.mxfp4 or arch == "sm_80" else ((codes,), "")
        yield Row(key, of_threads(key.config.threads), ptx, present=present, absent=absent)


# ---- products --------------------------------------------------------------------------------------------------------


def hoppers_gemms() -> Iterator[Row]:
    """Of e4m3 operands four chunks, in some eight first, and one alone where four do not divide their number; of bf16
    ones one in a loop."""
    few = select_gemm.many_rows_keys("bf16", may_split=True)
    keys = [*few, *(tile.key for tile in select_gemm.SQUARES_TILES)]
    keys += [key for output in ("fp32", "bf16") for key in select_gemm.many_bf16_rows_keys(output)]
    for output, key in itertools.product(("fp32", "e4m3"), few):
        if key.columns == 128 and select_gemm.has_result(key, output):
            keys.append(select_gemm.with_output(key, output))
    for key in keys:
        chunks = sum(range(key.unrolled, 0, -SCALED_CHUNKS)) + 1 if key.operands == "e4m3" else 1
        ptx = {r"\bwgmma\.mma_async\.": 4 * chunks}
        has = {r"\bsetmaxnreg\.": key.warpgroups > 1, r"st\.async": key.splits > 1}
        present = tuple(name for name, is_there in has.items() if is_there)
        absent = "|".join(name for name, is_there in has.items() if not is_there)
        # a shuffle among lanes of which some are not there would hang
        sass = {r"WARPSYNC\.COLLECTIVE": 0}
        yield Row(key, of_threads(key.threads), ptx, sass, present=present, absent=absent)


def hoppers_gemms_of_few_rows() -> Iterator[Row]:
    """Where two CTAs of ten warps share a multiprocessor, they fit. The assembler waits for products only where the
    kernel says so."""
    kinds = (("v4-flash", 1), ("v4-pro", 1), ("v4-flash", 8))
    for kernel, (model, tp) in itertools.product((linear.FP8_GEMM, linear.BF16_GEMM), kinds):
        for key in kernel.deployment_keys(MODELS[model], tp, HOPPER):
            if isinstance(key, SwapAbKey):
                is_pair = key.ctas_per_multiprocessor == 2
                assert not is_pair or 2 * (key.smem_bytes + RESERVED) <= 228 * 1024
                depth = 2 if key.operands == "e4m3" else 4
                yield Row(key, 96 if is_pair else 255, sass={r"WARPGROUP\.DEPBAR": depth + 1})


def portable_gemms() -> Iterator[Row]:
    """What takes most registers or shared memory on each."""
    for arch, *fields in (
        *(("sm_80", 128, 128, True), (HOPPER, 128, 128, False), (HOPPER, 32, 128, True), (HOPPER, 16, 64, True)),
        *(("sm_100a", 128, 128, False), ("sm_120a", 128, 128, True)),
    ):
        key = PortableGemmKey(arch, *fields)
        count = key.config.row_tiles * key.config.column_tiles * VECTORS
        ptx = {r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.f16\.f16\.f32": count, r"\bmma\.sync": count}
        codes = r"cvt\.\S*e4m3"
        present, absent = ((), codes) if arch == "sm_80" else ((codes,), "")
        yield Row(key, 255, ptx, present=present, absent=absent)


# ---- attention -------------------------------------------------------------------------------------------------------

IN_FLIGHT = r"HGMMA\S* .*gsb0"
"""The last of products that run together: the assembler ends each of them so where it loses track."""


def hoppers_attention() -> Iterator[Row]:
    """Groups of products are Q K^T, half by half in paged prefill, and P V, of each quarter of a tile where operands
    are swapped. These have Q K^T in three places: a work tile's first tile, and the others, if they are late or not."""
    for heads, second, *kind in (
        *((64, "listed"), (64, "dense", True), (8, "none"), (64, "listed", False, True), (8, "none", False, True)),
        *((64, "listed", False, True, True), (32, "dense", True, False, True)),
    ):
        yield Row(DecodeKey(HOPPER, heads, second, *kind), 255, sass={IN_FLIGHT: 2})
    products = {r"\bwgmma\.mma_async\.": HEAD_DIM // 16 + 64 // 16 * 2}
    for kind in (PrefillKey, MixedKey, MixedFp8Key, MixedFp8ConvertedKey, QuantPrefillKey, NormQuantPrefillKey):
        yield Row(kind(HOPPER), 255, products, {IN_FLIGHT: 2})
    for key in (PagedKey(HOPPER), QuantPagedKey(HOPPER), *(PagedClusterKey(HOPPER, ctas) for ctas in CLUSTERS)):
        yield Row(key, 255, products, {IN_FLIGHT: 3})
    codes = [QuantSwapAbPrefillKey(HOPPER, heads) for heads in HEADS]
    for key in (SwapAbPrefillKey(HOPPER, 8), SwapAbMixedKey(HOPPER, 16), *codes):
        of_v = HEAD_DIM // 64 * (64 // 16)
        ptx, sass = (
            {r"\bwgmma\.mma_async\.": 3 * (HEAD_DIM // 16) + of_v},
            {IN_FLIGHT: 3 + QUARTERS, "HGMMA.*tnspA": of_v},
        )
        yield Row(key, 255, ptx, sass)


def mixed_of_few_heads() -> Iterator[Row]:
    """A warp's products for 8 heads: Q K^T of 16 keys, of a work tile's first tile and of the others, and P V of 128
    columns. Nothing goes to tensor cores through the other proxy. Of 32 heads a group of wgmma's products is Q K^T of a
    slab, or P V of 64 columns."""
    for heads in HEADS:
        products = {r"\bmma\.sync\.": 3 * (HEAD_DIM // 16) * heads // 8}
        yield Row(SwapAbMixedFp8Key(HOPPER, heads), 255, products, absent=r"wgmma|fence\.proxy")
    products = {r"\bwgmma\.mma_async\.": 2 * (HEAD_DIM // 16) + 4 * (64 // 16)}
    yield Row(SwapAbMixedFp8Key(HOPPER, 32), 255, products, {IN_FLIGHT: 2 * (HEAD_DIM // 128) + 4})


def decodes_of_few_heads() -> Iterator[Row]:
    kinds = ((8, "dense", True), (16, "listed", False), (8, "listed", False, True), (16, "dense", False, True))
    keys = [SmallHeadsDecodeKey(HOPPER, *kind) for kind in (*kinds, (16, "dense", True))]
    keys += [SmallHeadsDecodeKey("sm_100a", 8, "listed", False), SmallHeadsDecodeKey("sm_103a", 16, "none", False)]
    for key in keys:
        yield Row(key, 255)


def portable_decodes() -> Iterator[Row]:
    """Per 16 rows, 4 products for 8 keys of scores and 8 for 16 keys of O, for each kind of columns; the loop over the
    latter is unrolled once. 64 heads take most registers: every kind of list, both formats in either, spread over the
    other architectures, which have plans of their own; and each of the other numbers of heads."""
    large: list[dict[str, Any]] = [
        *({"second": "none"}, {"second": "listed"}, {"second": "dense", "out_fp32": True}),
        *({"second": "dense", "format1": BF16}, {"second": "listed", "format0": BF16}),
        {"second": "listed", "format0": BF16, "format1": BF16, "out_fp32": True},
    ]
    small: list[dict[str, Any]] = [
        {"heads": heads, "second": second, "format1": format1}
        for heads, second, format1 in ((8, "listed", FP8), (16, "dense", BF16), (32, "none", FP8))
    ]
    chosen = {"sm_80": large[:1] + large[4:5], "sm_89": large[2:3], HOPPER: large + small, "sm_100a": large[3::2]}
    chosen |= {"sm_103a": large[1:2], "sm_120a": large[2:5:2]}
    for key in (PortableDecodeKey(arch, **fields) for arch, kinds in chosen.items() for fields in kinds):
        products = key.config.rows // 16 * (4 + 8 * min(2, key.config.keys // 16))
        ptx = {r"\bmma\.sync\.": products * (1 if key.config.is_plain else 3)}
        present, absent = ((r"\bldmatrix\.",), "") if FP8 in key.formats else ((), r"|\bldmatrix\.")
        yield Row(key, 255, ptx, present=present, absent=r"cvt\.\S*e4m3" + absent)


def portable_prefills() -> Iterator[Row]:
    """Of 16 keys, Q K^T and P V have as many products; both loops over these are unrolled once. 64 heads take most
    registers; each way to name rows and each format somewhere. Of e4m3, queries alone take conversions, four words for
    each slab and eight heads."""
    keys: list[PortableKey] = [
        *(PortablePrefillKey(arch) for arch in ("sm_80", "sm_89", HOPPER, "sm_100a")),
        *(PortablePrefillKey(HOPPER, 16), PortablePrefillKey("sm_120a", 32), PortableMixedKey("sm_120a", 64, BF16)),
        *(PortableMixedKey("sm_89", 64, E4M3), PortableMixedKey("sm_103a", 64, E4M3)),
        *(PortablePagedKey(arch) for arch in ("sm_80", HOPPER, "sm_103a")),
        PortablePagedKey("sm_100a", 64, "all", FP8, BF16),
        PortablePagedKey("sm_80", 64, "listed", MXFP8_V41.id, NVFP4_V41.id),
    ]
    for key in keys:
        config = key.config
        count = 2 * config.slabs * 8 * config.tiles * min(2, config.keys // 16)
        is_coded = isinstance(key, PortableMixedKey) and E4M3 in key.formats
        codes = 2 * 4 * config.slabs * 2 * config.tiles if is_coded else 0
        yield Row(key, 255, {r"\bmma\.sync\.": count, r"\bcvt\.\S*e4m3": codes})


def combines() -> Iterator[Row]:
    """Registers for at least 48 KB in flight on a multiprocessor. All loads of a head's first parts are on their way
    before any of them is used."""
    for arch in (HOPPER, "sm_100a", "sm_80", "sm_120a"):
        keys = combine.deployment_keys(MODELS["v4-flash"], 1, arch)
        for key in keys if arch == HOPPER else (keys[0], keys[-1]):
            loads = key.held * key.vectors
            ptx = {r"ld\.relaxed\.gpu\.global\.\S*v4\.b32": loads * (1 + key.more)} | waits(arch)
            most = 65536 // (-(-48_000 // (32 * 16 * loads)) * 32)
            yield Row(key, most, ptx, {LOADED: loads * (1 + key.more)}, absent=DIVISIONS, threads=32 * key.warps)
    for parts, fp32_out in itertools.product((1, 4, 5, 8, 9, 16, 17, 1000), (False, True)):
        yield Row(combine.key_for(HOPPER, False, fp32_out, parts), 255, absent=DIVISIONS)


TABLE = {
    row.key: row
    for rows in (
        *(inserts, gathers, qnorms, norms, norms_with_codes, quantizations, rotations, index_builders, saves),
        *(packs, keys, merges),
        *(latents, maxima_of_blocks, picks_of_blocks, scores_of_candidates),
        *(entries_of_ratio_4, entries_of_ratio_128, steps_before_attention, queries, gathers_of_index_keys),
        *(hoppers_scores, portable_scores, hoppers_gemms, hoppers_gemms_of_few_rows, portable_gemms),
        *(hoppers_attention, mixed_of_few_heads, decodes_of_few_heads, portable_decodes, portable_prefills, combines),
    )
    for row in rows()
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Of a kernel's rows, those that have all pairs of options; with --every-kernel all."""
    if not {"row", "rows"} & {*metafunc.fixturenames}:
        return
    keys = of_run(list(TABLE), metafunc.config)
    if "row" in metafunc.fixturenames:
        metafunc.parametrize("row", [TABLE[key] for key in keys], ids=[key.identity for key in keys])
        return
    groups: dict[str, list[Row]] = {}
    for row in map(TABLE.__getitem__, keys):
        if row.sass or row.first is not None:
            groups.setdefault(f"{row.key.kernel_name.partition('.')[0]} {row.key.arch}", []).append(row)
    metafunc.parametrize("rows", groups.values(), ids=list(groups))


def test_code(row: Row) -> None:
    key, arch = row.key, row.key.arch
    report = compile_report(key)
    assert report.in_ptx.has(rf"\.target {arch}\b")
    assert problems(key, report) == []
    assert report.stack == 0
    least = key.smem_bytes if row.smem is None else row.smem
    assert least <= report.smem <= least + row.static
    assert report.smem <= SMEM_BYTES[arch]
    assert report.registers <= row.registers
    ptx = report.in_ptx
    assert not row.threads or ptx.has(rf"\.reqntid {row.threads}\b")
    assert not ptx.has("|".join(filter(None, (r"st\.local|ld\.local", row.absent))))
    assert [pattern for pattern in row.present if not ptx.has(pattern)] == []
    assert ptx.has(r"griddepcontrol\.wait") == (arch_number(arch) >= DEPENDENT_LAUNCH_ARCH)
    assert {pattern: ptx.count(pattern) for pattern in row.ptx} == row.ptx


def test_machine_code(rows: list[Row]) -> None:
    """Of the rows of a package for an architecture that say something about it."""
    if not disassemble({row.key: (LOCAL, *row.sass, *(row.first or ())) for row in rows}):
        pytest.skip("nvdisasm is not installed (package nvidia-cuda-nvdisasm)")
    for row in rows:
        sass = compile_report(row.key).in_sass
        assert sass is not None
        assert sass.places(LOCAL) == [], row.key
        assert {pattern: len(sass.places(pattern)) for pattern in row.sass} == row.sass, row.key
        if row.first is not None:
            before, after = map(sass.places, row.first)
            assert max(before) < min(after), row.key
