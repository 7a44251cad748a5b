# SPDX-License-Identifier: Apache-2.0
"""The indexer: quantized queries, gathered keys, scores, and the picks of each row.

ops.py                 what users call: schemas, checks, costs
reference.py           what it means, in torch; also the CPU implementation
call.py                calls, their arguments by name; arguments.py: their checks, where ops share them
launch.py              calls that score as their kernels' arguments, and whether kernels can take them
candidates.py          the same of calls that score candidate blocks alone
select.py              which kernel scores a call
chunks.py              calls that score and pick at once, cut into chunks whose scores fit into a workspace

params.py              what score kernels share: groups of rows, windows, keys, tile scheduler, warps that write -inf
producer.py            producer warps of the kernels below but that of mma_sync/
hopper/                wgmma: logits.py (FP8), logits_mxfp4.py; epilogue.py of both; logits_candidates.py:
                       the same of candidate blocks alone, FP8 and MXFP4
blackwell/             logits.py: tcgen05, FP8 and MXFP4
mma_sync/              logits.py: every architecture from sm_80 on
query.py               queries rotated and quantized
gather.py              keys gathered from pages
topk.py                picks; topk_held.py: of rows that registers hold, and of those among longer ones;
                       topk_whole.py: of rows that are picked whole; topk_slots.py: picks as slots of a cache;
                       topk_select.py: which kernel picks, and how its ops launch it
block_maxima.py        kernel: the largest score of each block of keys, for candidate blocks; block_picks.py: of long
                       rows, in which only blocks that reach a bound are listed and picked from
picked_keys.py         kernel: picks of a rank as keys, by score and entry
merge_keys.py          kernel: the best keys of several ranks
verify_cases.py        calls that the kernels are verified with
"""
