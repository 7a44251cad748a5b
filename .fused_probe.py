import sys, time, os
from functools import partial
import torch
from cute_kernels.indexer import topk, score_top_k_decode, logits_choice
from cute_kernels.indexer.topk import TopKKey, keys_of, share_for, groups_for
SHAPES = {"default": None, "16,8,2": TopKKey("sm_90a", 16, 8, 2, 1), "32,4,2": TopKKey("sm_90a", 32, 4, 2, 1), "8,8,4": TopKKey("sm_90a", 8, 8, 4, 1), "16,16,1": TopKKey("sm_90a", 16, 16, 1, 1), "8,8,1": TopKKey("sm_90a", 8, 8, 1, 1), "8,4,2": TopKKey("sm_90a", 8, 4, 2, 1)}
choose = topk.choose
run = topk.run
def use(name, pdl=True):
    key = SHAPES[name]
    topk.choose = choose if key is None else lambda d, rows, width, k: (key, share_for(key, k), groups_for(key, k))
    topk.run = run if pdl else lambda *a, use_pdl=False: run(*a)
def ahead():
    from cute_kernels.runtime import cache
    from cute_kernels.runtime.precompile import precompile
    keys = [*keys_of("sm_90a"), *(k for k in SHAPES.values() if k)]
    keys += [logits_choice.key_for(h, 4, False) for h in (64, 32, 16)] + [logits_choice.key_for(64, r, True) for r in (1, 2, 4)] + [logits_choice.key_for(48, 3, True)]
    keys += [logits_choice.key_for(48, 3, True, 8)]
    for o in precompile(keys, cache.current().root): pass
    print("ahead done", len(keys))
def peers(s):
    from perf.score_top_k import PEERS, _peer
    found = {}
    for name, kernel in PEERS[s.op].items():
        p = _peer(s.op, kernel)
        if isinstance(p, str): print(name, p)
        else: found[name] = p
    return found
def times(limit):
    from perf import score_top_k as b
    from perf.measure import number_of_sets, time_graphs
    from cute_kernels.runtime.ops import OPS
    begin = time.time()
    cases = [("d", (64, 1, 32768, 512)), ("d", (64, 1, 8192, 512)), ("d", (8, 1, 32768, 512)), ("d", (1, 1, 32768, 512)), ("d", (256, 1, 8192, 512)), ("d", (256, 1, 32768, 512)),
             ("p", (4096, 16384, 512)), ("p", (4096, 65536, 512)), ("p", (1024, 32768, 512)), ("d", (64, 1, 32768, 1024)), ("d", (1, 1, 8192, 512)), ("d", (64, 1, 1024, 512)), ("p", (4096, 4096, 512)), ("p", (4096, 262144, 512))]
    for kind, shape in cases:
        if time.time() - begin > limit: print("out of time"); break
        try:
            make = partial(b.decode if kind == "d" else b.prefill, *shape)
            first = make(0); work = OPS[first.op].cost(*first.args)
            sets = [first, *(make(i) for i in range(1, min(8, number_of_sets(work.bytes))))]
            use("default"); ok = first.right(first.ours)
            def ours(s, name="default", pdl=True): use(name, pdl); s.ours()
            cands = {"scores": lambda s: s.scored.ours(), "topk": lambda s: s.pick(), "pair": lambda s: (use("default"), s.unfused()), "fused": ours, "nopdl": partial(ours, pdl=False)}
            names = ["16,8,2", "32,4,2", "8,8,4", "16,16,1"] if shape[-2] == 32768 else ["8,8,1", "8,4,2"] if shape[-2] == 8192 else []
            for n in names if kind == "d" else []: cands[n] = partial(ours, name=n)
            cands.update(peers(first))
            calls = {}; note = []
            for n, f in cands.items():
                if n not in ("scores", "topk") and "+" not in n and not first.right(partial(f, first)): note.append(n + " WRONG")
                calls[n] = [partial(f, s) for s in sets]
            fails = {}
            t = time_graphs(calls, work.bytes, 9 if shape[-2] > 100000 else 15, failures=fails)
            mem = first.peaks()
            print(kind, shape, f"floor {work.bytes / 4.28e6:.1f}", "right" if ok else "WRONG", *note, " ".join(f"{n}={x.median:.2f}" for n, x in t.items()), mem, fails, flush=True)
            del sets, first, calls, cands
            torch.cuda.empty_cache()
        except Exception as e: print(kind, shape, "failed", repr(e)[:300], flush=True)
globals()[sys.argv[1]](*map(float, sys.argv[2:]))
