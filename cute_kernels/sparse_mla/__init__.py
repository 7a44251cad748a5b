# SPDX-License-Identifier: Apache-2.0
"""Sparse attention over MLA rows: decode, prefill (contiguous, paged, mixed), and the combination of splits.

ops.py                 what users call: checks, costs, schemas; reference.py: what they mean
arguments.py           checks that ops share
call.py                calls, their arguments by name: what checks, references, select.py and launch.py take
select.py              which kernel runs a call, and the keys of deployments: one table
launch.py              a call as its kernel's arguments, and whether kernels can take it
kernel_args.py         arguments of the kernels, by name
schedule.py            how many splits a row has; selection.py: which rows an index list names
gathered.py            whether paged prefill gathers rows first; converted.py: whether mixed converts them
verify_cases.py        calls that the kernels are verified with

params.py              what kernels share: query, caches, lists, output, logits, work tiles, running maxima
quant_output.py        results as codes; early.py: what decode asks L2 for before the kernel ahead has ended
hopper/                wgmma. Decode: decode.py, with decode_smem.py (its geometry, shared memory, barriers),
                       decode_dequantize.py (its dequantizers), planner.py (which cluster takes what),
                       decode_halves.py (long rows by two clusters); decode_swap_ab.py (up to 16 heads).
                       Prefill: prefill.py, prefill_mixed.py, prefill_paged.py, prefill_paged_cluster.py (few query
                       rows: split), prefill_swap_ab.py (up to 16 heads; mixed, too), prefill_mixed_swap_ab.py (e4m3
                       caches, up to 32 heads); prefill_index_loader.py, prefill_softmax.py (what these share);
                       prefill_codes.py (e4m3 codes become f16)
blackwell/             tcgen05: decode.py, prefill.py, prefill_mixed.py, prefill_paged.py; for more than 64 heads
                       decode_2cta.py and, off so far, prefill_2cta.py
mma_sync/              sm_80 and up: decode.py, prefill.py (all three ops), operands.py (of both);
                       decode_small_heads.py: up to 16 heads, sm_90a, sm_100a, sm_103a
combine.py             splits combined
gather_paged.py        rows of paged caches and lists of them, for prefill.py
convert_mixed.py       e4m3 rows of plain caches as f16, for prefill_mixed.py
"""
