# SPDX-License-Identifier: Apache-2.0
"""Steps of SGLang's own DeepSeek-V4 backend, made by its constructors: its pools, its metadata, its planner. Three
layers, of a window alone, ratio 4 and ratio 128, take chunks of a prefill, tokens, and tokens in a captured graph,
through the parts that the plug-in replaces: attention, indexer, compressor. Queries and projections are random, keys of
the window are stored by hand.

On a GPU the same steps run by the backend without the plug-in, over pools of its own: attention must agree, states of
compressors must be the same bytes, compressed entries but for single codes, and index keys but for their rounding. On a
CPU, where the engine has no kernels, the planner is that of tests/plugins/test_sglang.py, and decode must agree with
prefill.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from cute_kernels import formats, quantize_and_insert_k_cache
from tests.plugins.fake_vllm import draw

RATIOS = (0, 4, 128)
"""Of the layers."""

REQUESTS, LONGEST, PAGE = 3, 1024, 256
TOP_K = 512
"""Picks: all entries there are, so that no score decides."""

DRAFTS = 3
"""Tokens of a request that are verified at a time; some of them are drafted again."""

ATTENTION, INDEX_KEYS, BYTES = 0.01, 0.05, 0.01
"""What may differ: of attention's result and of index keys, which have other scales, the relative distance, of
compressed entries the share of bytes."""


class World:
    """What both sides share: weights, requests, pages."""

    def __init__(self, heads: int, device: str) -> None:
        self.heads, self.device = heads, device
        g = self.generator = torch.Generator().manual_seed(11)
        angles = torch.arange(LONGEST, device="cpu")[:, None] * 10000.0 ** (-torch.arange(32, device="cpu") / 32)
        self.turns = torch.polar(torch.ones_like(angles), angles).to(device)
        self.sink = draw(g, heads)
        self.compressors = {
            (layer, of_indexer): make_compressor(g, layer, RATIOS[layer], of_indexer, self.turns)
            for layer, of_indexer in ((1, False), (1, True), (2, False))
        }
        columns = LONGEST // PAGE
        pages = torch.randperm(REQUESTS * columns, generator=g, device="cpu").view(REQUESTS, columns) + 1
        at = torch.arange(LONGEST, device="cpu")
        # slot 0 of requests is nobody's, and so is page 0
        self.req_to_token = torch.zeros(REQUESTS + 1, LONGEST, dtype=torch.int32)
        self.req_to_token[1:] = (pages[:, at // PAGE] * PAGE + at % PAGE).int().to(device)
        self.pages = REQUESTS * columns + 1
        moved = torch.arange(self.pages, device="cpu")
        moved[1:] = torch.randperm(self.pages - 1, generator=g, device="cpu") + 1
        full = torch.arange(self.pages * PAGE, device="cpu")
        self.full_to_swa = (moved[full // PAGE] * PAGE + full % PAGE).to(device)


def make_compressor(g: torch.Generator, layer: int, ratio: int, of_indexer: bool, turns: torch.Tensor) -> Any:
    """With what the backend reads of the engine's module."""
    dim = 128 if of_indexer else 512
    width = dim * (2 if ratio == 4 else 1)
    return SimpleNamespace(
        layer_id=layer, is_in_indexer=of_indexer, ratio=ratio, head_dim=dim, rotate=of_indexer, freqs_cis=turns,
        ape=draw(g, ratio, width), norm=SimpleNamespace(weight=1 + 0.1 * draw(g, dim), variance_epsilon=1e-6),
        compute_kv_score=lambda projected, forward_batch: projected,
        get_state_pool=lambda backend: (
            backend.token_to_kv_pool.get_indexer_compress_states(layer)
            if of_indexer
            else backend.token_to_kv_pool.get_attention_compress_states(layer)
        ),
    )  # fmt: skip


def in_engine() -> torch.device:
    """Around the engine's code, which knows of no default device and pins memory."""
    return torch.device("cpu")


def make_backend(kind: Any, world: World) -> Any:
    """By the engine's constructors, with pools of its own."""
    with in_engine():
        return _make_backend(kind, world)


def _make_backend(kind: Any, world: World) -> Any:
    pools = importlib.import_module("sglang.srt.mem_cache.deepseek_v4_memory_pool")
    tokens = world.pages * PAGE
    pool = pools.DeepSeekV4TokenToKVPool(
        max_num_reqs=REQUESTS, swa_size=tokens - PAGE, c4_size=tokens // 4, c128_size=tokens // 128,
        c4_state_pool_size=world.pages * 16, c128_state_pool_size=(REQUESTS + 1) * 256, page_size=PAGE,
        swa_page_size=PAGE, dtype=torch.float8_e4m3fn, c4_state_dtype=torch.float32, c128_state_dtype=torch.float32,
        qk_nope_head_dim=448, qk_rope_head_dim=64, indexer_head_dim=128, layer_num=len(RATIOS), device=world.device,
        enable_memory_saver=False, compression_ratios=list(RATIOS),
    )  # fmt: skip
    pool.register_mapping(world.full_to_swa)
    for cache in caches(pool):
        cache.zero_()
    model = SimpleNamespace(
        context_len=LONGEST, head_dim=512, v_head_dim=512,
        hf_text_config=SimpleNamespace(index_topk=TOP_K, model_type="deepseek_v4"),
    )  # fmt: skip
    runner = SimpleNamespace(
        device=world.device, page_size=PAGE, model_config=model, token_to_kv_pool=pool, hisparse_coordinator=None,
        req_to_token_pool=SimpleNamespace(req_to_token=world.req_to_token), is_draft_worker=False,
        spec_algorithm=SimpleNamespace(is_dspark=lambda: False),
    )  # fmt: skip
    return kind(runner)


def caches(pool: Any) -> list[torch.Tensor]:
    """States of the three compressors, then compressed entries and index keys, as bytes."""
    of_ratio_4 = pool.get_attention_compress_states(1), pool.get_indexer_compress_states(1)
    states = (*of_ratio_4, pool.get_attention_compress_states(2))
    found = [state.kv_score_buffer.kv_score for state in states]
    pages = [pool.get_extra_key_buffer(1), pool.get_extra_key_buffer(2), pool.get_index_k_with_scale_buffer(layer_id=1)]
    return [*found, *(each.view(torch.uint8) for each in pages)]


def make_step(world: World, spans: Sequence[tuple[int, int]], kind: str) -> Any:
    """A forward batch: requests with positions first to stop - 1. kind: DECODE, EXTEND, or TARGET_VERIFY, of drafted
    tokens, which the engine does not count yet."""
    mode = importlib.import_module("sglang.srt.model_executor.forward_batch_info").ForwardMode
    drafted = SimpleNamespace(draft_token_num=DRAFTS, ragged_verify_layout=None)
    is_decode, is_verify = kind == "DECODE", kind == "TARGET_VERIFY"
    counts = [stop - first for first, stop in spans]
    position = torch.cat([torch.arange(first, stop) for first, stop in spans])
    owner = torch.repeat_interleave(torch.arange(1, len(spans) + 1), torch.tensor(counts))
    lengths = torch.tensor([first if is_verify else stop for first, stop in spans])
    starts = torch.tensor([0, *counts]).cumsum(0)[:-1].int()
    return SimpleNamespace(
        forward_mode=mode[kind], batch_size=len(spans), positions=position,
        req_pool_indices=torch.arange(1, len(spans) + 1), seq_lens=lengths, seq_lens_cpu=lengths.cpu(),
        seq_lens_sum=int(lengths.sum()), out_cache_loc=world.req_to_token[owner, position].long(),
        extend_seq_lens=None if is_decode else torch.tensor(counts, dtype=torch.int32),
        extend_seq_lens_cpu=None if is_decode else counts, extend_start_loc=None if is_decode else starts,
        spec_info=drafted if is_verify else None, attn_cp_metadata=None,
        encoder_swa_replay=False, encoder_swa_row_floor=None,
        encoder_swa_compress_rows=None,
        max_seq_len_override=None, input_ids=position, return_logprob=False,
    )  # fmt: skip


class Inputs:
    """Of a step's rows: each layer's queries, keys of the window, projections, the indexer's queries."""

    def __init__(self, world: World, rows: int) -> None:
        g = world.generator
        self.q = [draw(g, rows, world.heads, 512).bfloat16() for _ in RATIOS]
        self.keys = [draw(g, rows, 512).bfloat16() for _ in RATIOS]
        self.projected = {
            key: draw(g, rows, 2 * compressor.ape.shape[1]) for key, compressor in world.compressors.items()
        }
        self.index_q = draw(g, rows, 64, 128).to(torch.float8_e4m3fn)
        self.index_weights = draw(g, rows, 64, 1)

    def copy_(self, other: Inputs) -> None:
        for mine, theirs in zip(self.tensors(), other.tensors(), strict=True):
            mine.copy_(theirs)

    def tensors(self) -> list[torch.Tensor]:
        return [*self.q, *self.keys, *self.projected.values(), self.index_q, self.index_weights]


def init_metadata(backend: Any, step: Any) -> None:
    with in_engine():
        backend.init_forward_metadata(step)


def run_layers(backend: Any, world: World, step: Any, inputs: Inputs) -> list[torch.Tensor]:
    """The backend's part of each layer; attention's results."""
    with in_engine():
        return _run_layers(backend, world, step, inputs)


def _run_layers(backend: Any, world: World, step: Any, inputs: Inputs) -> list[torch.Tensor]:
    pool, results = backend.token_to_kv_pool, []
    slots = backend.get_swa_out_cache_loc(step).long()
    indexer = SimpleNamespace(layer_id=1, index_topk=TOP_K, use_fp4_indexer=False)

    def prepare(**call: Any) -> tuple[torch.Tensor, torch.Tensor]:
        compressor = world.compressors[1, True]
        backend.forward_indexer_compressor(inputs.projected[1, True], step, 1, compressor)
        return inputs.index_q, inputs.index_weights

    backend._forward_prepare_normal = prepare
    for layer, ratio in enumerate(RATIOS):
        pages = pool.get_swa_key_buffer_radix(layer).view(torch.uint8)
        records = pages[:, : 584 * PAGE].view(pages.shape[0], PAGE, formats.FP8_DS_MLA.row_elements)
        quantize_and_insert_k_cache(inputs.keys[layer], records, slots, PAGE)
        if ratio == 4:
            rows = inputs.keys[layer][:, :1]
            backend.forward_c4_indexer(x=rows, q_lora=rows, forward_batch=step, c4_indexer=indexer)
        if ratio:
            compressor = world.compressors[layer, False]
            backend.forward_core_compressor(inputs.projected[layer, False], step, layer, compressor)
        key = inputs.keys[layer]
        results.append(
            backend.forward(
                inputs.q[layer], key, key, SimpleNamespace(layer_id=layer, tp_q_head_num=world.heads, v_head_dim=512),
                step, compress_ratio=ratio, save_kv_cache=False, attn_sink=world.sink,
            ).clone()
        )  # fmt: skip
    return results


def compare(sides: Sequence[Any], results: Sequence[Sequence[torch.Tensor]], what: str) -> list[str]:
    """What is further apart than it may be. Entries are rounded to bf16 by ours before they are quantized, by the
    engine's kernel they are not."""
    apart = {
        f"attention {layer}": (distance(*pair), ATTENTION) for layer, pair in enumerate(zip(*results, strict=True))
    }
    *ours, our_keys = caches(sides[0].token_to_kv_pool)
    *theirs, their_keys = caches(sides[1].token_to_kv_pool)
    for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        differing = int((one != other).sum())
        if number < 3:
            apart[f"states {number}"] = differing, 0
        else:
            apart[f"entries {number - 2}, bytes"] = differing / max(int((other != 0).sum()), 1), BYTES
    apart["index keys"] = distance(index_keys(our_keys), index_keys(their_keys)), INDEX_KEYS
    wrong = [f"{what}: {name}: {value:.2g}" for name, (value, most) in apart.items() if not value <= most]
    said = ", ".join(f"{name} {value:.2g}" for name, (value, _) in apart.items())
    print(f"{what}: {'WRONG: ' if wrong else ''}{said}", flush=True)
    return wrong


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one.double() - other.double()).norm() / other.double().norm().clamp_min(1e-30))


def index_keys(pages: torch.Tensor) -> torch.Tensor:
    """The numbers: scales are the engine's largest number over 448, and the next power of two by ours."""
    codes = pages[:, : PAGE // 4 * 128].view(torch.float8_e4m3fn).float()
    return codes.unflatten(1, (-1, 128)) * pages[:, PAGE // 4 * 128 :].view(torch.float32)[..., None]


def plan_by_hand(compress_ratio: int, *, token_to_kv_pool: Any, req_to_token: Any, seq_lens: Any, **call: Any) -> Any:
    """In the place of the engine's planner, where it has none."""
    from tests.plugins.test_sglang import Rings

    requests = call["req_pool_indices"]
    pages = token_to_kv_pool.full_to_swa_index_mapping[req_to_token[requests, ::PAGE].long()] // PAGE
    rings = Rings(compress_ratio, token_to_kv_pool.get_ring_size(compress_ratio), pages, PAGE, requests)
    if not call["is_prefill"]:
        return rings.decode(seq_lens.tolist())
    counts = call["extend_lens"].tolist()
    return rings.prefill([(n - count, n) for n, count in zip(seq_lens.tolist(), counts, strict=True)], 2)


def spans_of(done: Sequence[int], counts: Sequence[int]) -> list[tuple[int, int]]:
    return [(n, n + count) for n, count in zip(done, counts, strict=True)]


PLAIN = (
    ((260, 131, 5), "EXTEND"), ((1, 1, 1), "DECODE"), ((7, 130, 300), "EXTEND"), ((1, 1, 1), "DECODE"),
    ((1, 1, 1), "DECODE"), ((3, 2, 9), "EXTEND"), *[((1, 1, 1), "DECODE")] * 3,
)  # fmt: skip
DRAFTED = (((260, 131, 9), "EXTEND"), *[((DRAFTS,) * REQUESTS, "TARGET_VERIFY")] * 7, ((1, 2, 3), "EXTEND"))
"""Tokens of each request, and what they are."""


def check_steps(kinds: Sequence[Any], device: str, heads: int, drafts: bool) -> list[str]:
    """What is wrong. kinds: the plug-in's backend, and the engine's own where it has kernels."""
    world = World(heads, device)
    sides = [make_backend(kind, world) for kind in kinds]
    top_k = importlib.import_module("sglang.srt.layers.attention.dsa.dsa_topk_backend").DSATopKBackend
    # the engine's own by torch, ours as if its kernel were chosen, whose plan nobody has to make
    chosen = {"is_sgl_kernel": lambda: True, "is_torch": lambda: False, "should_use_topk_v2": lambda: False}
    for side, kind in zip(sides, (SimpleNamespace(**chosen), top_k.TORCH), strict=False):
        side.dsa_topk_backend = kind
    done, wrong = [0] * REQUESTS, []
    for number, (counts, what) in enumerate(DRAFTED if drafts else PLAIN):
        spans = spans_of(done, counts)
        step, inputs = make_step(world, spans, what), Inputs(world, sum(counts))
        results = []
        for side in sides:
            init_metadata(side, step)
            results.append(run_layers(side, world, step, inputs))
        assert all(result.isfinite().all() and result.any() for found in results for result in found)
        if len(sides) > 1:
            wrong += compare(sides, results, f"{what} of {spans}")
        elif what != "EXTEND":
            check_against_prefill(sides[0], world, spans, inputs, results[0])
        done = [stop - (number % DRAFTS if what == "TARGET_VERIFY" else 0) for _, stop in spans]
    if device == "cuda" and not drafts:
        wrong += check_graph(sides, world, done)
    return wrong


def check_against_prefill(side: Any, world: World, spans: Any, inputs: Inputs, decoded: Any) -> None:
    """The same rows once more, as chunks of one token: what they read of states is still there."""
    step = make_step(world, spans, "EXTEND")
    init_metadata(side, step)
    before = [cache.clone() for cache in caches(side.token_to_kv_pool)]
    for one, other in zip(run_layers(side, world, step, inputs), decoded, strict=True):
        torch.testing.assert_close(one, other, atol=0.01, rtol=0.02)
    for number, (one, other) in enumerate(zip(caches(side.token_to_kv_pool), before, strict=True)):
        assert torch.equal(one, other), f"cache {number}: {int((one != other).sum())} differ"


def check_graph(sides: Sequence[Any], world: World, done: list[int]) -> list[str]:
    """What is wrong. Decode in a graph as the engine's runner captures one: metadata and plans are made in it, for as
    many requests as it was captured with, some of which are padding. Each replay, and the engine's own eager step."""
    ours, theirs = sides
    static = make_step(world, [(0, 1)] * REQUESTS, "DECODE")
    static.seq_lens.fill_(1)
    inputs = Inputs(world, REQUESTS)
    for tensor in (static.req_pool_indices, static.out_cache_loc, static.positions):
        tensor.zero_()
    saved = [cache.clone() for cache in caches(ours.token_to_kv_pool)]
    with in_engine():
        ours.init_cuda_graph_state(REQUESTS, REQUESTS)
        ours.init_forward_metadata_out_graph(static, in_capture=True)

    def run() -> list[torch.Tensor]:
        with in_engine():
            ours.init_forward_metadata_in_graph(static)
        return run_layers(ours, world, static, inputs)

    for _ in range(2):
        run()
        ours.on_after_cuda_graph_warmup()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for cache, copy in zip(caches(ours.token_to_kv_pool), saved, strict=True):
        cache.copy_(copy)
    wrong = []
    for live in (REQUESTS, REQUESTS, REQUESTS - 1, REQUESTS, 1, REQUESTS):
        spans = [(n, n + 1) for n in done[:live]]
        step, fresh = make_step(world, spans, "DECODE"), Inputs(world, REQUESTS)
        inputs.copy_(fresh)
        static.seq_lens.fill_(1)
        for name in ("req_pool_indices", "out_cache_loc", "positions"):
            getattr(static, name).zero_()
            getattr(static, name)[:live] = getattr(step, name)
        static.seq_lens[:live] = step.seq_lens
        static.seq_lens_sum = int(static.seq_lens.sum())
        static.seq_lens_cpu = static.seq_lens.cpu()
        with in_engine():
            ours.init_forward_metadata_out_graph(static)
        for result in captured:
            result.fill_(torch.nan)
        graph.replay()
        for tensor_list in (fresh.q, fresh.keys):
            tensor_list[:] = [tensor[:live] for tensor in tensor_list]
        fresh.projected = {key: tensor[:live] for key, tensor in fresh.projected.items()}
        fresh.index_q, fresh.index_weights = fresh.index_q[:live], fresh.index_weights[:live]
        init_metadata(theirs, step)
        expected = run_layers(theirs, world, step, fresh)
        for side in sides:  # rows that are nobody's
            clear_dummies(side.token_to_kv_pool)
        wrong += compare(sides, ([result[:live] for result in captured], expected), f"replay of {spans}")
        done[:live] = [stop for _, stop in spans]
    return wrong


def clear_dummies(pool: Any) -> None:
    """Rows of page 0 and of the request with number 0."""
    window, index, group, *others = caches(pool)
    for states, rows in ((window, 8), (index, 8), (group, 128)):
        states[:rows] = 0
    for pages in others:
        pages[0] = 0
