# SPDX-License-Identifier: Apache-2.0
"""Makes the cases of vLLM's kernels, and of FlashMLA's and DeepGEMM's as vLLM ships them. Needs a Hopper GPU.

    python -m tests.goldens.make_vllm            # vllm 0.33 must be importable
    python -m tests.goldens.make_vllm --out FOLDER compressor indexer

Arguments have the names of `cute_kernels.compat`. Its MXFP4 kernels need a Blackwell GPU and are left out.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from cute_kernels import formats
from tests import helpers, oracle
from tests.goldens import records
from tests.goldens.inputs import levels, record_pages, repeated
from tests.sparse_mla import model

OPS = "vllm.models.deepseek_v4.common.ops"
TABLE = oracle.cos_sin_table(24)
CODES = 12
"""Different e4m3 codes in what is drawn at random: files are compressed."""


def vllm_op(name: str) -> Any:
    importlib.import_module("vllm._C_stable_libtorch")
    space = torch.ops._C_cache_ops if name.startswith("cp_") else torch.ops._C
    return getattr(space, name)


def int32(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


class Cases:
    """Cases by name. One that vLLM cannot make on this machine is reported and left out."""

    def __init__(self) -> None:
        self.made: dict[str, records.Case] = {}
        self.failed: list[str] = []

    def add(self, name: str, function: Callable[[], Any], by_name: bool = True, **arguments: Any) -> None:
        try:
            self.made[name] = records.call(function(), arguments, "cuda", by_name)
        except Exception as error:
            self.failed.append(f"{name}: {type(error).__name__}: {error}")


def of(module: str, name: str) -> Callable[[], Any]:
    return lambda: getattr(importlib.import_module(module), name)


# ---- caches ----------------------------------------------------------------------------------------------------------


def caches(cases: Cases) -> None:
    pages = record_pages(formats.FP8_DS_MLA, 3, 4)
    slots = torch.tensor([3, -1, 8, 0, 11, 5])
    cases.add(
        "quantize_and_insert_k_cache",
        of(f"{OPS}.cache_utils", "quantize_and_insert_k_cache"),
        k=helpers.spread((7, 512), 1),
        k_cache=pages,
        slot_mapping=slots,
        block_size=4,
    )
    pool = model.Pool(model.FP8, 5, 4, 2)
    pool.put_all(range(8, 20))
    for name, lens in (("", None), (" of a window", int32([3, 2]))):
        cases.add(
            f"dequantize_and_gather_k_cache{name}",
            of(f"{OPS}.cache_utils", "dequantize_and_gather_k_cache"),
            out=torch.full((3, 9, 512), 7.0, dtype=torch.bfloat16),
            k_cache=pool.cache,
            seq_lens=int32([6, 3]),
            gather_lens=lens,
            block_table=int32([[2, 4, 3], [3, 2, 2]]),
            block_size=4,
            offset=2,
        )
    q, kv, positions = helpers.spread((4, 8, 512), 3), helpers.spread((4, 512), 4), torch.tensor([0, 3, 17, 23])
    rest = {"slot_mapping": torch.tensor([3, -1, 8, 0]), "position_ids": positions, "cos_sin_cache": TABLE}
    cases.add(
        "fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert_v033",
        partial(vllm_op, "fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert"),
        by_name=False,
        **{"q_in": q, "kv": kv, "k_cache": pages, **rest, "q_head_padded": 8, "eps": 1e-6, "cache_block_size": 4},
    )


def full_caches(cases: Cases) -> None:
    name = "fused_deepseek_v4_qnorm_rope_kv_rope_full_cache_{}_insert"
    q, kv, positions = helpers.spread((3, 8, 512), 5), helpers.spread((3, 512), 6), torch.tensor([0, 5, 23])
    rest = {"slot_mapping": torch.tensor([6, -1, 1]), "position_ids": positions, "cos_sin_cache": TABLE}
    last = {"eps": 1e-6, "cache_block_size": 4}
    bf16 = torch.full((2, 4, 512), 7.0, dtype=torch.bfloat16)
    cases.add(
        name.format("bf16"), partial(vllm_op, name.format("bf16")), False, q=q, kv=kv, k_cache=bf16, **rest, **last
    )
    codes = torch.zeros(q.shape, dtype=torch.float8_e4m3fn)
    scales = {"fp8_scale": torch.tensor([0.5]), "q_fp8_scale_inv": torch.tensor([3.0])}
    fp8 = torch.zeros(2, 4, 512, dtype=torch.float8_e4m3fn)
    cases.add(
        name.format("fp8"),
        partial(vllm_op, name.format("fp8")),
        by_name=False,
        **{"q": q, "kv": kv, "q_fp8": codes, "k_cache": fp8, **rest, **scales, **last},
    )


# ---- norms, output ---------------------------------------------------------------------------------------------------


def norms(cases: Cases) -> None:
    cases.add(
        "fused_q_kv_rmsnorm",
        of("vllm.models.common.ops", "fused_q_kv_rmsnorm"),
        qr=helpers.spread((4, 448), 7),
        kv=helpers.spread((4, 512), 8),
        q_weight=helpers.spread((448,), 9),
        kv_weight=helpers.spread((512,), 10),
        eps=1e-6,
    )
    cases.add(
        "fused_mtp_input_rmsnorm",
        of(f"{OPS}.fused_mtp_input_rmsnorm", "_FUSED_MTP_INPUT_RMSNORM_KERNEL"),
        by_name=False,
        inputs_embeds=helpers.spread((4, 320), 11),
        positions=torch.tensor([0, 1, 5, 0]),
        previous_hidden_states=helpers.spread((4, 3, 320), 12),
        enorm_weight=helpers.spread((320,), 13),
        hnorm_weight=helpers.spread((320,), 14),
        eps=1e-6,
        hc_mult=3,
    )
    cases.add(
        "mtp_shared_head_rmsnorm",
        of(f"{OPS}.fused_mtp_input_rmsnorm", "_MTP_SHARED_HEAD_RMSNORM_KERNEL"),
        by_name=False,
        hidden_states=helpers.spread((4, 320), 15),
        weight=helpers.spread((320,), 16),
        eps=1e-6,
    )


def output(cases: Cases) -> None:
    o = helpers.spread((3, 4, 512), 17)
    for name, options in (
        ("", {}),
        (" with packed scales", {"tma_aligned_scales": True}),
        (" rotated alone", {"quantize": False}),
    ):
        cases.add(
            f"fused_inv_rope_fp8_quant{name}",
            of(f"{OPS}.fused_inv_rope_fp8_quant", "fused_inv_rope_fp8_quant"),
            o=o,
            positions=torch.tensor([0, 9, 23]),
            cos_sin_cache=TABLE,
            n_groups=2,
            heads_per_group=2,
            **options,
        )


# ---- compressor ------------------------------------------------------------------------------------------------------


def compressor(cases: Cases) -> None:
    for ratio, head_dim, fmt in (
        (4, 512, formats.FP8_DS_MLA),
        (128, 512, formats.FP8_DS_MLA),
        (4, 128, formats.INDEXER_FP8),
    ):
        width, rows = head_dim * (2 if ratio == 4 else 1), 4 if ratio == 4 else 8
        tokens = 12 if ratio == 4 else 128
        pages = -(-tokens // rows)
        state = torch.cat([levels((pages, rows, width), 21, 5), levels((pages, rows, width), 22, 3)], dim=2)
        closing = torch.arange(ratio - 1, tokens, ratio)
        table = torch.arange(pages, dtype=torch.int32).flip(0)[None].contiguous()
        sizes = (64, 576, 8) if head_dim == 512 else (128, 128, 4)
        arguments = {
            "state_cache": state,
            "num_actual": len(closing),
            "token_to_req_indices": torch.zeros(len(closing), dtype=torch.int32),
            "positions": closing,
            "slot_mapping": table[0, closing // rows].long() * rows + closing % rows,
            "block_table": table,
            "block_size": rows,
            "state_width": width,
            "cos_sin_cache": TABLE,
            "kv_cache": fmt.allocate(2, 2),
            "k_cache_metadata": SimpleNamespace(slot_mapping=torch.arange(len(closing)).flip(0).contiguous()),
            "pdl_kwargs": {"launch_pdl": False},
            "head_dim": head_dim,
            "rope_head_dim": 64,
            "compress_ratio": ratio,
            "overlap": ratio == 4,
            "use_fp4_cache": False,
            "rms_norm_weight": (levels((head_dim,), 23, 9) + 3).bfloat16(),
            "rms_norm_eps": 1e-6,
            **dict(zip(("quant_block", "token_stride", "scale_dim"), sizes, strict=True)),
        }
        kind = f"{fmt.id.split('/')[0]} at ratio {ratio}"
        triton = of(f"{OPS}.fused_compress_quant_cache", "compress_norm_rope_store_triton")
        cases.add(f"compress_norm_rope_store_triton of {kind}", triton, **arguments)
        if head_dim == 512:
            store = of("vllm.models.deepseek_v4.nvidia.ops.sparse_attn_compress_cutedsl", _CUTEDSL)
            cases.add(f"compress_norm_rope_store_cutedsl of {kind}", store, **arguments)
    cases.add(
        "save_partial_states",
        of(f"{OPS}.save_partial_states", "_SAVE_PARTIAL_STATES_KERNEL"),
        kv=levels((5, 256), 24, 9),
        score=levels((5, 256), 25, 9),
        ape=levels((4, 256), 26, 9) / 3,
        positions=torch.tensor([0, 1, 2, 3, 7]),
        state_cache=torch.full((3, 4, 512), 7.0),
        slot_mapping=torch.tensor([5, -1, 0, 11, 6]),
        block_size=4,
        state_width=256,
        compress_ratio=4,
        pdl_kwargs={"launch_pdl": False},
    )


_CUTEDSL = "_SPARSE_ATTN_COMPRESSOR_CUTEDSL_KERNEL"


# ---- indexer ---------------------------------------------------------------------------------------------------------


def indexer(cases: Cases) -> None:
    cases.add(
        "fused_indexer_q_rope_quant",
        of(f"{OPS}.fused_indexer_q", "fused_indexer_q_rope_quant"),
        positions=torch.tensor([0, 11, 23]),
        index_q=helpers.spread((3, 8, 128), 31),
        index_q_cos_sin_cache=TABLE,
        index_weights=helpers.spread((3, 8), 32),
        index_weights_softmax_scale=128**-0.5,
        index_weights_head_scale=8**-0.5,
    )
    pages = torch.randint(0, 120, (3, 16, 132), dtype=torch.uint8, generator=helpers.generator(33))
    cases.add(
        "cp_gather_indexer_k_quant_cache",
        partial(vllm_op, "cp_gather_indexer_k_quant_cache"),
        by_name=False,
        kv_cache=pages,
        dst_k=torch.full((27, 128), 9, dtype=torch.uint8),
        dst_scale=torch.full((27, 4), 9, dtype=torch.uint8),
        block_table=int32([[2, 0], [1, 1]]),
        cu_seq_lens=int32([0, 18, 25]),
    )
    g = helpers.generator(34)
    logits = torch.stack([torch.randperm(1200, generator=g) for _ in range(4)]).float() / 4 - 100
    last = {"num_rows": 4, "stride0": 1200, "stride1": 1, "topk_tokens": 512}
    out = torch.full((4, 512), 99, dtype=torch.int32)
    cases.add(
        "top_k_per_row_prefill",
        partial(vllm_op, "top_k_per_row_prefill"),
        by_name=False,
        logits=logits,
        cu_seqlen_ks=int32([0, 3, 100, 600]),
        cu_seqlen_ke=int32([1200, 700, 400, 600]),
        raw_topk_indices=out,
        **last,
    )
    cases.add(
        "top_k_per_row_decode",
        partial(vllm_op, "top_k_per_row_decode"),
        by_name=False,
        **{"logits": logits, "next_n": 2, "seq_lens": int32([[1200, 700], [512, 3]]), "raw_topk_indices": out, **last},
    )


def indices(cases: Cases) -> None:
    cases.add(
        "compute_global_topk_indices_and_lens",
        of(f"{OPS}.cache_utils", "compute_global_topk_indices_and_lens"),
        topk_indices=int32([[0, 9, 3, -1], [5, 14, 2, 1], [7, 6, -1, -1]]),
        token_to_req_indices=int32([1, 0, 1]),
        block_table=int32([[7, 2], [4, 11]]),
        block_size=8,
        is_valid_token=torch.tensor([True, True, False]),
    )
    cases.add(
        "combine_topk_swa_indices",
        of(f"{OPS}.cache_utils", "combine_topk_swa_indices"),
        topk_indices=int32([[1, 0, 2], [2, 1, 0], [0, 3, 1]]),
        query_start_loc=int32([4, 6, 7]),
        seq_lens=int32([13, 5]),
        gather_lens=int32([9, 5]),
        window_size=8,
        compress_ratio=4,
        topk=3,
        M=40,
        N=20,
    )
    mixed = {
        "prefill_topk_indices": int32([[1, 0, 2]] * 3),
        "query_start_loc": int32([0, 1, 2, 5]),
        "seq_lens": int32([9, 2, 13]),
        "token_to_req_indices": int32([0, 1, 2, 2, 2]),
        "swa_block_table": int32([[3, 1, 2]] * 3),
        "swa_block_size": 5,
        "compressed_block_table": int32([[8, 6, 4]] * 3),
        "compressed_block_size": 2,
        "window_size": 4,
        "compress_ratio": 4,
        "topk": 3,
    }
    for name, local in (("", False), (" from local ones", True)):
        cases.add(
            f"build_flashinfer_mixed_sparse_indices{name}",
            of(f"{OPS}.cache_utils", "build_flashinfer_mixed_sparse_indices"),
            decode_swa_indices=int32([[5, 6, 7, -1], [9, -1, -1, -1]]),
            decode_compressed_indices=int32([[3, 0, -1], [1, -1, -1]]),
            decode_compressed_topk_lens=None if local else int32([2, 1]),
            **mixed,
            decode_compressed_indices_are_local=local,
            decode_is_valid_token=torch.tensor([True, False]) if local else None,
        )


# ---- attention, scores and a product ---------------------------------------------------------------------------------

HEADS = 64
"""FlashMLA's kernel has 64 and 128: four heads, each 16 times; four are kept."""


def flash_mla(cases: Cases) -> None:
    module = "vllm.third_party.flashmla.flash_mla_interface"
    pool, extra = model.Pool(model.FP8, 1, 64, 41), model.Pool(model.FP8, 5, 2, 42)
    pool.put_all(range(20))
    extra.put_all(range(8))
    g = helpers.generator(43)
    picks = torch.randint(0, 20, (2, 1, 64), generator=g).int()
    picks[0, 0, 5:9] = -1
    more = torch.randint(0, 8, (2, 1, 64), generator=g).int()
    more[1, 0, 20:] = -1

    def decode(**arguments: Any) -> Any:
        function = of(module, "flash_mla_with_kvcache")()
        metadata = of(module, "get_mla_metadata")()()[0]
        wide = {name: repeated(arguments[name], HEADS) for name in ("q", "attn_sink")}
        out, lse = function(**arguments | wide | {"tile_scheduler_metadata": metadata})
        return first_heads(out, 2), first_heads(lse, 1)

    cases.add(
        "flash_mla_with_kvcache",
        lambda: decode,
        q=model.bf16_query((2, 1, 4, 512), 44),
        k_cache=pool.cache.unsqueeze(2),
        block_table=None,
        cache_seqlens=None,
        head_dim_v=512,
        tile_scheduler_metadata=None,
        softmax_scale=512**-0.5,
        is_fp8_kvcache=True,
        indices=picks,
        attn_sink=torch.tensor([0.5, -1.0, float("-inf"), 2.0]),
        extra_k_cache=extra.cache.unsqueeze(2),
        extra_indices_in_kvcache=more,
        topk_length=int32([64, 40]),
        extra_topk_length=int32([0, 30]),
    )

    def prefill(**arguments: Any) -> Any:
        wide = {name: repeated(arguments[name], HEADS) for name in ("q", "attn_sink")}
        results = of(module, "flash_mla_sparse_fwd")()(**arguments | wide)
        return tuple(first_heads(result, 1) for result in results)

    rows = torch.randint(0, 22, (3, 1, 128), generator=g).int()
    rows[0, 0, 3:7] = int32([-1, 22, 2**31 - 1, -(2**31)])
    cases.add(
        "flash_mla_sparse_fwd",
        lambda: prefill,
        q=model.bf16_query((3, 4, 512), 45),
        kv=helpers.spread((22, 1, 512), 46).clamp(-4, 4),
        indices=rows,
        sm_scale=0.07,
        attn_sink=torch.tensor([0.5, -1.0, float("-inf"), 2.0]),
        topk_length=int32([128, 17, 0]),
    )


def first_heads(result: torch.Tensor, dim: int) -> torch.Tensor:
    """The first four heads, after a look at the others: heads are worked on alike."""
    parts = result.split(4, dim=dim)
    assert all(torch.equal(part, parts[0]) for part in parts)
    return parts[0].contiguous()


def deep_gemm(cases: Cases) -> None:
    from perf.peers import deepgemm

    g = helpers.generator(51)

    def codes(*shape: int) -> torch.Tensor:
        return (torch.randint(0, CODES, shape, generator=g).to(torch.uint8) * 9).view(torch.float8_e4m3fn)

    def visible(logits: torch.Tensor, lens: torch.Tensor) -> torch.Tensor:
        """With the columns that it leaves undefined as clean_logits has them."""
        columns = torch.arange(logits.shape[1], device=logits.device)
        return logits.masked_fill(columns >= lens.view(-1, 1), float("-inf"))

    def ranges(q: Any, kv: Any, weights: Any, clean_logits: bool, max_seqlen_k: int, **where: Any) -> Any:
        starts, ends = where.values()
        scores = deepgemm().fp8_fp4_mqa_logits(q, None, *kv, weights, starts, ends, max_seqlen_k)
        return visible(scores, ends - starts)

    cases.add(
        "fp8_mqa_logits",
        lambda: ranges,
        q=codes(3, 64, 128),
        kv=(codes(40, 128), torch.rand(40, generator=g) + 0.5),
        weights=torch.randn(3, 64, generator=g),
        cu_seq_len_k_start=int32([0, 3, 0]),
        cu_seq_len_k_end=int32([40, 29, 1]),
        clean_logits=True,
        max_seqlen_k=40,
    )

    def paged(schedule_meta: Any, clean_logits: bool, **arguments: Any) -> Any:
        ops, (q, *rest, columns) = deepgemm(), arguments.values()
        multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
        schedule = ops.get_paged_mqa_logits_metadata(arguments["context_lens"], 64, multiprocessors)
        scores = ops.fp8_fp4_paged_mqa_logits(q, None, *rest, schedule, columns)
        return visible(scores, arguments["context_lens"])

    pages = torch.empty(3, 64 * 132, dtype=torch.uint8)
    pages[:, : 64 * 128] = codes(3, 64 * 128).view(torch.uint8)
    pages[:, 64 * 128 :] = (torch.rand(3, 64, generator=g) + 0.5).view(torch.uint8)
    cases.add(
        "fp8_paged_mqa_logits",
        lambda: paged,
        q=codes(2, 1, 64, 128),
        kv_cache=pages.view(3, 64, 1, 132),
        weights=torch.randn(2, 64, generator=g),
        context_lens=int32([[100], [17]]),
        block_table=int32([[2, 0], [1, 1]]),
        max_context_len=128,
        schedule_meta=None,
        clean_logits=True,
    )

    def product(out: Any, equation: str, **arguments: Any) -> None:
        a, a_scale, b, b_scale, recipe = arguments.values()
        deepgemm().fp8_einsum(equation, a, a_scale, b, b_scale, out, None, recipe)

    cases.add(
        "deepseek_v4_fp8_einsum",
        lambda: product,
        a=codes(2, 3, 256).transpose(0, 1),
        a_scale=(torch.rand(2, 2, 4, generator=g) + 0.5).permute(2, 0, 1)[:3],
        b=codes(2, 128, 256),
        b_scale=torch.rand(2, 1, 2, generator=g) + 0.5,
        recipe=[1, 128, 128],
        out=torch.zeros(3, 2, 128, dtype=torch.bfloat16),
        equation="bhr,hdr->bhd",
    )


FILES: dict[str, Callable[[Cases], None]] = {
    "vllm_caches": caches,
    "vllm_full_caches": full_caches,
    "vllm_norms": norms,
    "vllm_output": output,
    "vllm_compressor": compressor,
    "vllm_indexer": indexer,
    "vllm_indices": indices,
    "flash_mla_kernels": flash_mla,
    "deep_gemm_kernels": deep_gemm,
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", nargs="*", choices=[*FILES, []], help="all by default")
    parser.add_argument("--out", type=Path, default=records.FOLDER)
    options = parser.parse_args(arguments)
    about = {
        "project": "vLLM 0.33.0 (its wheel, with FlashMLA and DeepGEMM)",
        "license": "Apache-2.0; FlashMLA and DeepGEMM: MIT",
        "device": torch.cuda.get_device_name(),
    }
    failed = []
    for name in options.files or FILES:
        cases = Cases()
        FILES[name](cases)
        failed += cases.failed
        if cases.made:
            path = options.out / f"{name}.npz"
            records.save(path, about, cases.made)
            print(f"{path.name}: {len(cases.made)} cases, {path.stat().st_size} bytes")
    print(*failed, sep="\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
