"""Sparse attention over MLA rows: decode, prefill (contiguous, paged, mixed), and the combination of splits.

ops.py                 what users call; ops_*.py: schemas, checks, costs; reference.py: what they mean
arguments.py           checks that ops share
decode.py, prefill.py, paged.py, mixed.py
                       what an op runs on a GPU: which kernel, launch, keys of deployments
decode_args.py         entry arguments of the decode kernels, and the op's call as theirs
prefill_args.py        entry arguments of prefill's kernels
schedule.py            how many splits a row has; selection.py: which rows an index list names

params.py              records that kernels share: query, caches, lists, output, work tiles
softmax.py, logs.py, quant_output.py
                       running maxima, log-sum-exps, results as codes: of all kernels
hopper/                wgmma: decode.py, prefill.py, prefill_mixed.py, prefill_paged.py, prefill_paged_cluster.py (few
                       query rows: split), prefill_swap_ab.py (up to 16 heads; mixed, too), index_loader.py
blackwell/             tcgen05: decode.py, decode_2cta.py (more than 64 heads), prefill.py, prefill_mixed.py,
                       prefill_paged.py
mma_sync/              sm_80 and up: decode.py, prefill.py (all three ops), operands.py (of both);
                       decode_small_heads.py: up to 16 heads, sm_90a, sm_100a, sm_103a
gathered.py            which calls Blackwell's own kernels take, as far as tensors go
combine.py             splits combined
"""
