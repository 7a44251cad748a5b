# SPDX-License-Identifier: Apache-2.0
"""Which op runs how on which architecture: the one table behind `python -m cute_kernels info`, docs/support.md and the
README.

measured    the kernel ran on that GPU, and a record in perf/results says how fast
compiled    the kernel is cross-compiled and inspected by the tests (right instructions, no spills, shared memory
            within the limit), without a record of its own; only on sm_90a has it run (tests, layers). Blackwell's own
            tensor-core kernels run only where `python -m cute_kernels verify` has passed them (runtime/trust.py),
            portable ones until then
partly      as compiled, for some of the op's calls only
reference   there is no kernel yet: with CUTE_KERNELS_FALLBACK=reference the reference runs, slowly
no          the op has a kernel, and it does not run there
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

from cute_kernels.runtime.arch import LARGE_CLUSTERS

ARCHS = ("sm_80", "sm_89", "sm_90a", "sm_100a", "sm_103a", "sm_120a")
"""Columns of the table."""

KERNEL_ARCHS = {
    "bf16_gemm": ("sm_90a",),
    "all_visible_entries": ARCHS,
    "build_c128a_topk_metadata": ARCHS,
    "build_flashinfer_mixed_sparse_indices": ARCHS,
    "build_step_metadata": ARCHS,
    "combine_topk_swa_indices": ARCHS,
    "compress_latent": ARCHS,
    "compress_norm_rope_store": ARCHS,
    "compute_decode_swa_indices": ARCHS,
    "compute_global_topk_indices_and_lens": ARCHS,
    "cp_gather_indexer_k_quant_cache": ARCHS,
    "deepseek_v4_fp8_einsum": ARCHS,
    "dequantize_and_gather_k_cache": ARCHS,
    "fp8_bf16_gemm": ("sm_90a",),
    "fp8_gemm": ARCHS,
    "fp8_gemm_squares": ("sm_90a",),
    "fused_compress_norm_rope_store": ARCHS,
    "fused_deepseek_v4_qnorm_rope_kv_rope_full_cache_bf16_insert": ARCHS,
    "fused_deepseek_v4_qnorm_rope_kv_rope_full_cache_fp8_insert": ARCHS,
    "fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert": ARCHS,
    "fused_indexer_q_rope_quant_fp8": ARCHS,
    "fused_indexer_q_rope_quant_mxfp4": ARCHS,
    "fused_inv_rope": ARCHS,
    "fused_inv_rope_fp8_quant": ARCHS,
    "fused_mtp_input_rmsnorm": ARCHS,
    "fused_q_kv_rmsnorm": ARCHS,
    "fused_q_kv_rmsnorm_quant": ARCHS,
    "get_compressed_slot_mapping": ARCHS,
    "fused_qkv_insert_compress": LARGE_CLUSTERS,
    "fused_qkv_insert_compress_index": ARCHS,
    "k_norm_rope_store": ARCHS,
    "merge_attention_states": ARCHS,
    "merge_top_k_keys": ARCHS,
    "mqa_logits": ARCHS,
    "mtp_shared_head_rmsnorm": ARCHS,
    "pack_records": ARCHS,
    "paged_mqa_logits": ARCHS,
    "quantize_and_insert_k_cache": ARCHS,
    "quantize_fp8_1x128": ARCHS,
    "rope_quant_insert": ARCHS,
    "save_partial_states": ARCHS,
    "score_candidates_decode": ("sm_90a",),
    "score_candidates_prefill": ("sm_90a",),
    "score_top_k_decode": ARCHS,
    "score_top_k_prefill": ARCHS,
    "select_candidate_blocks": ARCHS,
    "sparse_mla_decode": ARCHS,
    "sparse_mla_mixed": ARCHS,
    "sparse_mla_prefill": ARCHS,
    "sparse_mla_prefill_paged": ARCHS,
    "top_k_keys": ARCHS,
    "top_k_per_row_decode": ARCHS,
    "top_k_per_row_prefill": ARCHS,
    "unpack_records": ARCHS,
}
"""Op -> architectures its kernel runs on, for the ops that have one."""

PARTLY = frozenset(("fp8_gemm", arch) for arch in ARCHS if arch != "sm_90a")
"""(op, arch) of ops that have kernels for some calls only."""

REASONS = {
    "bf16_gemm": "torch.mm does the same, and layers call that elsewhere",
    "fp8_bf16_gemm": "two products in a launch of Hopper's GEMM; elsewhere layers launch each by itself",
    "fp8_gemm": "bf16 results alone, which is all that layers ask for elsewhere",
    "fp8_gemm_squares": "sums of squares are a by-product of Hopper's GEMM; elsewhere queries are normed by themselves",
    "score_candidates_decode": "it is of Hopper alone so far; elsewhere layers score all keys",
    "score_candidates_prefill": "of Hopper alone so far; elsewhere layers score all keys",
    "fused_qkv_insert_compress": "it takes clusters with 200 KB of shared memory a CTA; layers call what it fuses",
}
"""Op -> why it is "no" or "partly" somewhere, in a line."""

UNRECORDED = {
    "fp8_bf16_gemm": "without a record of its own on sm_90a, where it runs in layers that are measured",
    "fp8_gemm": "without a record of its own on sm_90a, where it runs in every layer that is measured",
}
"""Op -> what is known of its kernel on sm_90a as long as there is no record."""

MEASURED = (
    "all_visible_entries",
    "bf16_gemm",
    "build_c128a_topk_metadata",
    "build_flashinfer_mixed_sparse_indices",
    "build_step_metadata",
    "combine_topk_swa_indices",
    "compress_latent",
    "compress_norm_rope_store",
    "compute_decode_swa_indices",
    "compute_global_topk_indices_and_lens",
    "cp_gather_indexer_k_quant_cache",
    "deepseek_v4_fp8_einsum",
    "dequantize_and_gather_k_cache",
    "fp8_gemm_squares",
    "fused_compress_norm_rope_store",
    "fused_deepseek_v4_qnorm_rope_kv_rope_full_cache_bf16_insert",
    "fused_deepseek_v4_qnorm_rope_kv_rope_full_cache_fp8_insert",
    "fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert",
    "fused_indexer_q_rope_quant_fp8",
    "fused_indexer_q_rope_quant_mxfp4",
    "fused_inv_rope",
    "fused_inv_rope_fp8_quant",
    "fused_mtp_input_rmsnorm",
    "fused_q_kv_rmsnorm",
    "fused_q_kv_rmsnorm_quant",
    "fused_qkv_insert_compress",
    "fused_qkv_insert_compress_index",
    "get_compressed_slot_mapping",
    "k_norm_rope_store",
    "merge_attention_states",
    "merge_top_k_keys",
    "mqa_logits",
    "mtp_shared_head_rmsnorm",
    "pack_records",
    "paged_mqa_logits",
    "quantize_and_insert_k_cache",
    "quantize_fp8_1x128",
    "rope_quant_insert",
    "save_partial_states",
    "score_candidates_decode",
    "score_candidates_prefill",
    "score_top_k_decode",
    "score_top_k_prefill",
    "select_candidate_blocks",
    "sparse_mla_decode",
    "sparse_mla_mixed",
    "sparse_mla_prefill",
    "sparse_mla_prefill_paged",
    "top_k_keys",
    "top_k_per_row_decode",
    "top_k_per_row_prefill",
    "unpack_records",
)
"""Ops with a record of the H200."""

RECORDS = {(op, "sm_90a"): f"h200/{op}.json" for op in MEASURED}
"""(op, arch) -> record of a measurement, below perf/results."""

PORTABLE_RECORDS: frozenset[tuple[str, str]] = frozenset()
"""(op, arch) whose record is of the portable kernel although the architecture has one of its own: such a record says
nothing for that one (runtime/trust.py)."""


@dataclass(frozen=True)
class Support:
    """Status of one op on one architecture, and the record behind "measured"."""

    status: str
    record: str | None = None


def support(op: str, arch: str) -> Support:
    """How `op` runs on `arch`."""
    if op not in KERNEL_ARCHS:
        return Support("reference")
    if arch not in KERNEL_ARCHS[op]:
        return Support("no")
    if (op, arch) in PARTLY:
        return Support("partly")
    record = RECORDS.get((op, arch))
    return Support("compiled" if record is None else "measured", record)


def _row(op: str, cells: list[str]) -> str:
    return "| " + " | ".join([op, *cells]) + " |"


def _reason(op: str) -> str:
    """Why its row is not that of most ops."""
    unrecorded = UNRECORDED.get(op) if support(op, "sm_90a").record is None else None
    return "; ".join(part for part in (REASONS.get(op), unrecorded) if part)


def markdown(ops: list[str]) -> str:
    """The table of docs/support.md for the registered `ops`: a row per op with a kernel, one for all others, and below
    it why not everything runs everywhere."""
    lines = [_row("op", ["CPU", *ARCHS]), "|---" * (2 + len(ARCHS)) + "|"]
    rows = {op: [support(op, arch).status for arch in ARCHS] for op in sorted(KERNEL_ARCHS)}
    lines += [_row(f"`{op}`", ["reference", *cells]) for op, cells in rows.items()]
    others = [op for op in ops if op not in KERNEL_ARCHS]
    if others:
        name = f"`{others[0]}`" if len(others) == 1 else f"the other {len(others)} ops"
        lines.append(_row(name, ["reference"] * (1 + len(ARCHS))))
    reasons = [f"* `{op}`: {reason}." for op in sorted(KERNEL_ARCHS) if (reason := _reason(op))]
    lines += ["", *(line for reason in reasons for line in textwrap.wrap(reason, 120, subsequent_indent="  "))]
    return "\n".join(lines)


def exceptions(ops: list[str]) -> str:
    """What the README says of the registered `ops`: what holds for most of them, and the rows of all others."""
    usual = ["measured" if arch == "sm_90a" else "compiled" for arch in ARCHS]
    found = {op: [support(op, arch).status for arch in ARCHS] for op in sorted({*ops, *KERNEL_ARCHS})}
    unusual = {op: cells for op, cells in found.items() if cells != usual}
    text = (
        f"Of {len(found)} ops {len(found) - len(unusual)} have kernels that are measured on sm_90a and compiled for "
        "all other architectures. The exceptions ([whole table](docs/support.md)):"
    )
    rows = [_row(f"`{op}`", [*cells, _reason(op)]) for op, cells in unusual.items()]
    head = [_row("op", [*ARCHS, "why"]), "|---" * (2 + len(ARCHS)) + "|"]
    return "\n".join([*textwrap.wrap(text, 120), "", *head, *rows])
