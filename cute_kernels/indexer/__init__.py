"""The indexer: quantized queries, gathered keys, scores, and the picks of each row.

ops.py                 what users call; ops_*.py: schemas, checks, costs; reference.py: what they mean
arguments.py           checks that ops share
call.py                calls of the ops that score, by name, and what they are to the kernels
select.py              which kernel scores a call
logits.py, paged_logits.py, score_top_k_*.py, topk_*.py, query_*.py, gather.py
                       what an op runs on a GPU: supports, launch, keys of deployments

params.py              records that score kernels share: groups of rows, windows, keys
tile_scheduler.py      the tiles that a CTA takes
producer.py            producer warps of the kernels below but that of mma_sync/
fill.py                warps that write -inf
hopper/                logits.py (FP8), logits_mxfp4.py: wgmma; epilogue.py of both
blackwell/             logits.py: tcgen05, FP8 and MXFP4
mma_sync/              logits.py: every architecture from sm_80 on
query.py               queries rotated and quantized
topk*.py               picks
"""
