# SPDX-License-Identifier: Apache-2.0
"""What the ops are to reach, and what counts as a losing cell."""

from __future__ import annotations

from collections.abc import Mapping

from perf.records import Cell, Row

_QNORM = "fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert"

_FUSED = "fused_compress_norm_rope_store"

_MERGE = "merge_attention_states"
_SHORT_MERGES = (
    *(f"b1 h{heads} parts={n}" for heads in (64, 128) for n in (2, 3, 5, 8, 10, 16, 18)),
    *(f"b8 h64 parts={n}" for n in (2, 3, 5)),
    *(f"b8 h128 parts={n}" for n in (2, 3)),
)
"""Merges of so few bytes, 7.5 MB at most, that reading them and a launch leave room below their target."""

_PREFILLS = ("prefill 2048 ctx65536", "prefill 4096 ctx65536")
_LAYER_STEPS = ("decode b1 ctx8192", "decode b64 ctx8192", "decode b256 ctx8192", *_PREFILLS)
_LAYERS: Mapping[str, tuple[tuple[float, float], ...]] = {
    "v4-flash c4a": ((85, 64), (112, 88), (205, 175), (1560, 1420), (3000, 2750)),
    "v4-flash c128a": ((62, 49), (72, 54), (115, 92), (840, 700), (1620, 1400)),
    "v4-flash swa": ((52, 43), (60, 47), (96, 78), (570, 460), (1100, 900)),
    "v4-pro c4a": ((150, 125), (205, 185), (465, 415), (3000, 2750), (5850, 5400)),
    "v4-pro c128a": ((132, 110), (145, 125), (245, 215), (1850, 1680), (3550, 3200)),
    "v4-pro swa": ((120, 100), (130, 112), (225, 197), (1400, 1200), (2750, 2300)),
}

LAYER = "layer"
"""What perf.layer calls its record."""

LAYERS = (LAYER, "layer_v41")
"""Records of whole layers, those of V4.1 as perf.layer_v41 calls them."""

LAYER_TARGETS_US: Mapping[str, tuple[float, float]] = {
    **{
        f"{kind} {step}": target
        for kind, targets in _LAYERS.items()
        for step, target in zip(_LAYER_STEPS, targets, strict=True)
    },
    "v4-pro c4a decode b64 ctx65536": (250, 220),
    "v4-flash model decode b1 ctx8192": (3150, 2450),
}
"""Whole layers on one H200, and a model's step: case -> microseconds that must be reached, and a stretch."""

LAYER_GAIN = 1.2
"""How many times as fast as the peers' chain those cells must be; all others at least as fast."""

TARGETS_US: Mapping[tuple[str, str, str], float] = {
    **{("NVIDIA H200", LAYER, case): must for case, (must, _) in LAYER_TARGETS_US.items()},
    ("NVIDIA H200", "save_partial_states", "c4_512 T=32768"): 133.0,
    ("NVIDIA H200", "quantize_and_insert_k_cache", "T=1"): 1.8,
    ("NVIDIA H200", "quantize_and_insert_k_cache", "T=1024"): 2.6,
    ("NVIDIA H200", "quantize_and_insert_k_cache", "T=32768"): 15.0,
    ("NVIDIA H200", "dequantize_and_gather_k_cache", "c4 1x262144"): 105.0,
    ("NVIDIA H200", "dequantize_and_gather_k_cache", "c128 1x8192"): 5.2,
    ("NVIDIA H200", _QNORM, "h64 T=1"): 2.15,
    ("NVIDIA H200", _QNORM, "h64 T=64"): 5.0,
    ("NVIDIA H200", _QNORM, "h64 T=1024"): 48.8,
    ("NVIDIA H200", _QNORM, "h64 T=8192"): 270.0,
    ("NVIDIA H200", _QNORM, "h128 T=1"): 2.4,
    ("NVIDIA H200", _QNORM, "h128 T=64"): 12.2,
    ("NVIDIA H200", _QNORM, "h128 T=1024"): 88.0,
    ("NVIDIA H200", _QNORM, "h128 T=8192"): 540.0,
    ("NVIDIA H200", "fused_indexer_q_rope_quant_fp8", "T=1"): 1.9,
    ("NVIDIA H200", "fused_indexer_q_rope_quant_fp8", "T=64"): 3.3,
    ("NVIDIA H200", "fused_indexer_q_rope_quant_fp8", "T=1024"): 8.0,
    ("NVIDIA H200", "fused_indexer_q_rope_quant_fp8", "T=8192"): 55.8,
    ("NVIDIA H200", "fused_indexer_q_rope_quant_fp8", "T=32768"): 196.0,
    ("NVIDIA H200", "fused_indexer_q_rope_quant_mxfp4", "T=1"): 2.5,
    ("NVIDIA H200", "fused_indexer_q_rope_quant_mxfp4", "T=32768"): 175.0,
    ("NVIDIA H200", "cp_gather_indexer_k_quant_cache", "1x16384"): 4.5,
    ("NVIDIA H200", "cp_gather_indexer_k_quant_cache", "4x16384"): 8.8,
    ("NVIDIA H200", "cp_gather_indexer_k_quant_cache", "1x262144"): 19.8,
    ("NVIDIA H200", "mqa_logits", "sq4096 sk4096"): 216.0,
    ("NVIDIA H200", "mqa_logits", "sq4096 sk16384"): 1022.0,
    ("NVIDIA H200", "mqa_logits", "sq4096 sk65536"): 4245.0,
    ("NVIDIA H200", "mqa_logits", "sq4096 sk65536 mxfp4"): 4640.0,
    ("NVIDIA H200", "paged_mqa_logits", "b1 ctx32768"): 4.2,
    ("NVIDIA H200", "paged_mqa_logits", "b8 ctx32768"): 10.5,
    ("NVIDIA H200", "paged_mqa_logits", "b64 ctx8192"): 19.5,
    ("NVIDIA H200", "paged_mqa_logits", "b64 ctx32768"): 71.0,
    ("NVIDIA H200", "paged_mqa_logits", "b64 ctx32768 mxfp4"): 48.0,
    ("NVIDIA H200", "paged_mqa_logits", "b256 ctx32768 mxfp4"): 200.0,
    ("NVIDIA H200", "fused_inv_rope_fp8_quant", "h64 T=1"): 1.55,
    ("NVIDIA H200", "fused_inv_rope_fp8_quant", "h64 T=64"): 3.5,
    ("NVIDIA H200", "fused_inv_rope_fp8_quant", "h64 T=1024"): 30.0,
    ("NVIDIA H200", "fused_inv_rope_fp8_quant", "h64 T=8192"): 205.0,
    ("NVIDIA H200", "fused_inv_rope_fp8_quant", "h128 T=8192"): 410.0,
    ("NVIDIA H200", "fused_q_kv_rmsnorm", "q1024 T=1024"): 3.05,
    ("NVIDIA H200", "fused_q_kv_rmsnorm", "q1024 T=8192"): 13.5,
    ("NVIDIA H200", "fused_mtp_input_rmsnorm", "hidden7168 T=8192"): 291.0,
    ("NVIDIA H200", "combine_topk_swa_indices", "topk512 T=1"): 2.5,
    ("NVIDIA H200", "combine_topk_swa_indices", "topk512 T=64"): 2.9,
    ("NVIDIA H200", "combine_topk_swa_indices", "topk512 T=1024"): 5.8,
    ("NVIDIA H200", "combine_topk_swa_indices", "topk512 T=8192"): 11.0,
    ("NVIDIA H200", "combine_topk_swa_indices", "topk1024 T=8192"): 28.9,
    ("NVIDIA H200", "build_flashinfer_mixed_sparse_indices", "decode topk512 T=8192"): 12.0,
    ("NVIDIA H200", _FUSED, "c4_512 closing T=1"): 2.5,
    ("NVIDIA H200", _FUSED, "c4_512 closing T=64"): 6.0,
    ("NVIDIA H200", _FUSED, "c4_512 open T=64"): 2.5,
    ("NVIDIA H200", _FUSED, "c4_512 decode T=64"): 2.5,
    ("NVIDIA H200", _FUSED, "c4_512 open T=256"): 2.5,
    ("NVIDIA H200", _FUSED, "c4_512 decode T=256"): 2.5,
    ("NVIDIA H200", _FUSED, "c4_512 window T=8192"): 22.0,
    ("NVIDIA H200", _FUSED, "c4_512 window T=32768"): 72.0,
    ("NVIDIA H200", _FUSED, "c4_512 all T=8192"): 37.0,
    ("NVIDIA H200", _FUSED, "c4_512 all T=32768"): 140.0,
    ("NVIDIA H200", _FUSED, "idx128_fp8 closing T=1"): 2.5,
    ("NVIDIA H200", _FUSED, "idx128_fp8 closing T=64"): 4.0,
    ("NVIDIA H200", _FUSED, "idx128_fp8 window T=32768"): 25.0,
    ("NVIDIA H200", "compress_norm_rope_store", "c128_512 closing T=1"): 3.5,
    ("NVIDIA H200", "compress_norm_rope_store", "c128_512 closing T=64"): 13.8,
    ("NVIDIA H200", "compress_norm_rope_store", "c128_512 window T=1024"): 18.9,
    ("NVIDIA H200", "compress_norm_rope_store", "c128_512 window T=8192"): 15.0,
    ("NVIDIA H200", "compress_norm_rope_store", "c128_512 window T=32768"): 45.0,
    ("NVIDIA H200", "fused_compress_norm_rope_store", "c128_512 closing T=64"): 12.0,
    ("NVIDIA H200", "fused_compress_norm_rope_store", "c128_512 decode T=64"): 2.5,
    ("NVIDIA H200", "fused_compress_norm_rope_store", "c128_512 decode T=256"): 2.5,
    ("NVIDIA H200", "fused_compress_norm_rope_store", "c128_512 window T=8192"): 14.0,
    ("NVIDIA H200", "fused_compress_norm_rope_store", "c128_512 window T=32768"): 42.0,
    ("NVIDIA H200", "fused_compress_norm_rope_store", "c128_512 all T=32768"): 71.0,
    **dict.fromkeys((("NVIDIA H200", _MERGE, case) for case in _SHORT_MERGES), 3.0),
    ("NVIDIA H200", "sparse_mla_decode", "b1 h64 c4_128+512"): 11.0,
    ("NVIDIA H200", "sparse_mla_decode", "b8 h64 c4_128+512"): 12.0,
    ("NVIDIA H200", "sparse_mla_decode", "b64 h64 c4_128+512"): 20.0,
    ("NVIDIA H200", "sparse_mla_decode", "b128 h64 c4_128+512"): 29.0,
    ("NVIDIA H200", "sparse_mla_decode", "b256 h64 c4_128+512"): 52.0,
    ("NVIDIA H200", "sparse_mla_decode", "b256 h64 c4_128+1024"): 86.0,
    ("NVIDIA H200", "sparse_mla_decode", "b256 h64 swa128"): 17.0,
    ("NVIDIA H200", "sparse_mla_decode", "b64 h128 c4_128+1024"): 45.0,
    ("NVIDIA H200", "sparse_mla_decode", "b256 h128 c4_128+512"): 105.0,
    ("NVIDIA H200", "sparse_mla_decode", "b256 h128 c4_128+1024"): 170.0,
    ("NVIDIA H200", "sparse_mla_decode", "b256 h8 c4_128+512"): 35.0,
    ("NVIDIA H200", "sparse_mla_decode", "b256 h16 c4_128+512"): 38.0,
    ("NVIDIA H200", "sparse_mla_decode", "b256 h32 c4_128+512"): 42.0,
    ("NVIDIA H200", "sparse_mla_prefill", "sq4096 h64 topk640 skv16384"): 582.0,
    ("NVIDIA H200", "sparse_mla_prefill", "sq4096 h64 topk1152 skv16384"): 998.0,
    ("NVIDIA H200", "sparse_mla_prefill", "sq4096 h64 topk2176 skv16384"): 1825.0,
    ("NVIDIA H200", "sparse_mla_prefill", "sq4096 h128 topk640 skv65536"): 1273.0,
    ("NVIDIA H200", "sparse_mla_prefill", "sq4096 h128 topk1152 skv65536"): 2133.0,
    ("NVIDIA H200", "sparse_mla_prefill", "sq4096 h128 topk2176 skv65536"): 3960.0,
    ("NVIDIA H200", "sparse_mla_prefill", "sq512 h64 topk640 skv16384"): 86.0,
    ("NVIDIA H200", "sparse_mla_prefill", "sq4096 h64 topk128 skv16384"): 208.0,
    ("NVIDIA H200", "top_k_per_row_decode", "64x32768 k=512"): 10.0,
    ("NVIDIA H200", "top_k_per_row_decode", "256x32768 k=512"): 18.0,
    ("NVIDIA H200", "top_k_per_row_prefill", "4096x16384 k=512"): 130.0,
}
"""(GPU, op, case) -> microseconds. Other cells have the limit that `limit_us` derives from their best peer."""

HOST_TARGETS_US: Mapping[int, float] = dict.fromkeys(range(1, 6), 10.0)
"""Tensors that a mutating op takes -> microseconds of host time of an eager call."""

BINDS: Mapping[tuple[str, ...], tuple[str, tuple[str, ...]]] = {
    ("bf16_gemm",): (
        "256 and 512 rows of few outputs: K is cut in two for a CTA each, whose exchange of sums costs 3 µs; from the "
        "first instruction to the first chunk in registers 1.6 µs, which nothing hides apart",
        ("gemm",),
    ),
    ("fp8_gemm", "deepseek_v4_fp8_einsum"): (
        "from 512 rows on the chip's power, of which copies take a sixth, and a second work tile per CTA; up to 256 "
        "rows what lies ahead of the first product",
        ("gemm", "gemm_swap_ab"),
    ),
    ("fp8_gemm_squares",): (
        "as fp8_gemm, and the sums of squares themselves, 4 to 7%, which the peers' time here leaves out",
        ("gemm",),
    ),
    ("fused_inv_rope", "fused_inv_rope_fp8_quant", "fused_q_kv_rmsnorm", "mtp_shared_head_rmsnorm"): (
        "a launch, and the chain from position to angle and store, of norms from row to store; from some hundred rows "
        "on memory",
        ("norms",),
    ),
    (
        "compute_global_topk_indices_and_lens",
        "build_flashinfer_mixed_sparse_indices",
    ): ("a launch and one barrier of a row's CTA; from 8192 rows on memory", ("indices",)),
    ("fused_compress_norm_rope_store", "compress_norm_rope_store"): (
        "memory in long calls; in short ones reads that wait for each other: a token's numbers, its request's, rows",
        ("compressor_ratio4", "compressor_ratio128"),
    ),
    ("save_partial_states", "quantize_and_insert_k_cache", "dequantize_and_gather_k_cache", _QNORM): (
        "memory, with pages in random order; in short calls the chain from slot to store",
        ("save_partial_states", "kv_cache", "memory_bound"),
    ),
    ("cp_gather_indexer_k_quant_cache", "fused_indexer_q_rope_quant_fp8"): (
        "memory; in short calls the chain from position to angles and store",
        ("indexer_query",),
    ),
    ("merge_attention_states",): ("a launch, and two reads that wait for each other", ("decode",)),
    ("mqa_logits", "paged_mqa_logits"): (
        "paged calls memory, four rows a request and prefill products and sums together; MXFP4 no single unit: its "
        "dequantization shares the integer pipe with the sums",
        ("logits", "logits_mxfp4"),
    ),
    ("sparse_mla_decode",): (
        "the path to shared memory, busy for 90% of the time between launch and end; where one row is long and not cut "
        "in halves: its own tiles, which one cluster takes one after the other",
        ("decode", "decode_small_heads"),
    ),
    ("sparse_mla_prefill",): ("the energy of long lists; short ones what lies between work tiles", ("prefill",)),
    ("top_k_per_row_decode", "top_k_per_row_prefill"): (
        "few rows: a chain of short steps, whose warps fill the issue slots; many rows of many columns: reading",
        ("topk",),
    ),
    ("layer", "layer_v41"): ("from 2048 rows on products, and with them the chip's power", ("layer", "gemm")),
}
"""Ops with losing cells -> what binds those, and the pages of perf/notes that have the measurements."""


def limit_us(gpu: str, cell: Cell) -> float | None:
    """What our kernel must not exceed: a stated time, else the best peer's and a little; None without either."""
    stated = TARGETS_US.get((gpu, cell.op, cell.case))
    if stated is not None:
        return stated
    best = cell.best_peer
    return None if best is None else max(1.03 * best.us, best.us + 0.2)


def losses(gpu: str, cell: Cell) -> list[str]:
    """Why a cell is listed as losing: slower than its best peer by however little, or over its limit."""
    best, limit, found = cell.best_peer, limit_us(gpu, cell), []
    if best is not None and cell.ours.us > best.us:
        found.append(f"slower than {best.name}")
    apart = cell.best_peer_apart
    if apart is not None and (cell.ours.apart or 0.0) > (apart.apart or 0.0):
        found.append(f"slower than {apart.name} apart")
    if limit is not None and cell.ours.us > limit:
        stated = (gpu, cell.op, cell.case) in TARGETS_US
        found.append(f"over the {'stated target' if stated else 'margin'} of {limit:.2f} µs")
    return found


def host_limit_us(cell: Cell) -> float | None:
    return HOST_TARGETS_US.get(cell.tensors)


def host_loss(cell: Cell, row: Row) -> str | None:
    """Why the host's cost of a row of ours is listed as losing."""
    limit = host_limit_us(cell)
    if row.host is None or limit is None or row.host.us <= limit:
        return None
    return f"an eager call costs the host {row.host.us:.2f} µs, over {limit:.0f}"
