# SPDX-License-Identifier: Apache-2.0
"""vLLM's layers with the plug-in's parts over them, on the CPU: classes and metadata as seams.py has them.

Prefill over gathered rows and over pages, and decode, agree on rows that are the same; what the parts store is what the
ops store one by one; and what they do not serve goes to the engine.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from cute_kernels import compress_norm_rope_store, fused_indexer_q_rope_quant, save_partial_states
from cute_kernels.plugins import PARTS, Plugin
from cute_kernels.plugins import vllm as plugin
from cute_kernels.sparse_mla.ops import sparse_mla_prefill_paged_workspace_size
from tests.helpers import bits, generator
from tests.plugins import fake_vllm, seams
from tests.plugins.fake_vllm import DECODES, HEADS, MAX_LEN, PREFIX, TOKENS, TOP_K, Step, draw, metadata, mixed

ALL = frozenset(PARTS)
RATIOS = [1, 4, 128]


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(plugin, "PLUGIN", Plugin("vllm", plugin.PLUGIN.supported))
    monkeypatch.setattr(Plugin, "version", lambda self: "0.33.0")
    with torch.no_grad():
        yield


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def step(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Step]]:
    """Everything inside is on a CPU, or on a GPU if there is one."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    with torch.device(request.param):
        yield fake_vllm.make_modules(monkeypatch)


def make_layer(ratio: int, parts: frozenset[str] = ALL) -> Any:
    buffer = torch.full((fake_vllm.MAX_TOKENS, TOP_K), -1, dtype=torch.int32)
    kind = plugin.attention_class(fake_vllm.Attention, parts)
    return kind(SimpleNamespace(ratio=ratio), PREFIX, topk_indices_buffer=buffer)


def test_methods_have_the_engines_arguments() -> None:
    functions = {name: text for file in seams.SIGNATURES["vllm"].values() for name, text in file.items()}
    mixins = {
        "DeepseekV4Attention": [*plugin.ATTENTION.values(), plugin.NativeHeads, plugin.ChoosesIndexer],
        "DeepseekV4FlashMLAAttention": [*plugin.ATTENTION.values(), plugin.Announcement],
        "DeepseekV4Indexer": [*plugin.INDEXER.values()],
        "DeepseekCompressor": [plugin.Compressor],
        "SparseAttnIndexer": [plugin.Scores],
    }
    seen = set()
    for qualified, expected in functions.items():
        owner, _, name = qualified.rpartition(".")
        for mixin in mixins.get(owner, []):
            if name in vars(mixin) and name != "__init__":
                function = getattr(vars(mixin)[name], "__func__", vars(mixin)[name])
                assert ", ".join(inspect.signature(function).parameters) == expected, (mixin, name)
                seen.add((mixin, name))
    overrides = {
        (mixin, name)
        for found in mixins.values()
        for mixin in found
        for name, value in vars(mixin).items()
        if callable(getattr(value, "__func__", value)) and any(key.endswith(f".{name}") for key in functions)
    }
    assert seen == {(mixin, name) for mixin, name in overrides if name != "__init__"}
    assert len(seen) > 12


class Watched:
    """sparse_mla_prefill_paged. A CPU gathers nothing: what is handed over for it is looked at here."""

    def __init__(self, op: Callable[..., Any]) -> None:
        self.op = op
        self.forms: list[str] = []
        self.needed: list[int] = []

    def __call__(self, q: Any, cache: Any, table: Any, starts: Any, lens: Any, *args: Any, **more: Any) -> Any:
        entries, ratio = more["compressed_block_table"], more["compress_ratio"]
        page = 0 if entries is None else more["compressed_cache"].shape[1]
        room = 0 if entries is None else entries.shape[1] * page
        assert room >= (0 if entries is None else int(lens.max()) // ratio)
        columns = None if more["topk_indices"] is None else more["topk_indices"].shape[1]
        needed = sparse_mla_prefill_paged_workspace_size(
            q.shape[0], lens.shape[0], room, columns, window_size=more["window_size"]
        )
        assert (more["form"] == "gathered") == (more["workspace"] is not None)
        assert more["workspace"] is None or more["workspace"].nbytes >= needed
        self.forms.append(more["form"])
        self.needed.append(needed)
        return self.op(q, cache, table, starts, lens, *args, **more)


@pytest.mark.parametrize("ratio", RATIOS)
def test_both_forms_of_prefill_and_decode_agree(ratio: int, step: type[Step], monkeypatch: pytest.MonkeyPatch) -> None:
    layer, g = make_layer(ratio), generator(ratio)
    assert (layer.padded_heads, layer.attn_sink.shape[0]) == (HEADS, HEADS)
    empty = torch.empty(4, HEADS, 512, dtype=torch.bfloat16)
    layer.forward_mqa(empty, None, None, empty)
    step.is_locked = True
    positions = torch.arange(TOKENS)
    step.metadata = metadata(layer, decodes=False)
    q = layer._fused_qnorm_rope_kv_insert(
        draw(g, TOKENS, HEADS, 512).bfloat16(),
        draw(g, TOKENS, 512).bfloat16(),
        positions,
        step.metadata,
    )
    if layer.compressor is not None:
        kv_score = draw(g, TOKENS, layer.compressor.state_cache.kv_cache.shape[2])
        layer.compressor(kv_score, positions, layer.rotary_emb)
    if ratio == 4:
        chosen = draw(g, TOKENS, TOP_K).abs().clamp(max=0.99) * ((positions + 1) // 4)[:, None]
        layer.topk_indices_buffer[:TOKENS] = torch.where(chosen < ((positions + 1) // 4)[:, None], chosen.int(), -1)

    gathered, paged = torch.full((2, TOKENS, HEADS, 512), torch.nan, dtype=torch.bfloat16)
    monkeypatch.setattr(plugin, "sparse_mla_prefill_paged_form", lambda *step, **more: "gathered")
    monkeypatch.setattr(plugin, "sparse_mla_prefill_paged", watched := Watched(plugin.sparse_mla_prefill_paged))
    layer.forward_mqa(q, None, positions, gathered)
    assert watched.forms == ["gathered"]
    monkeypatch.setattr(plugin, "sparse_mla_prefill_paged_form", lambda *step, **more: "paged")
    layer.forward_mqa(q, None, positions, paged)
    assert watched.forms == ["gathered", "paged"]
    torch.testing.assert_close(gathered, paged, atol=0.01, rtol=0.02)

    last = slice(TOKENS - DECODES, TOKENS)
    first_picks = layer.topk_indices_buffer[:DECODES].clone()
    layer.topk_indices_buffer[:DECODES] = layer.topk_indices_buffer[last].clone()
    step.metadata = metadata(layer, decodes=True)
    decoded = torch.full((DECODES, HEADS, 512), torch.nan, dtype=torch.bfloat16)
    layer.forward_mqa(q[last], None, positions[last], decoded)
    torch.testing.assert_close(decoded, paged[last], atol=0.01, rtol=0.02)

    step.metadata = mixed(layer)
    picks = layer.topk_indices_buffer[:TOKENS].clone()
    picks[:DECODES] = first_picks
    layer.topk_indices_buffer[DECODES : DECODES + 2 * TOKENS] = picks.repeat(2, 1)
    both = torch.full((DECODES + 2 * TOKENS, HEADS, 512), torch.nan, dtype=torch.bfloat16)
    layer.forward_mqa(torch.cat([q[last], q, q]), None, positions[last].new_zeros(both.shape[0]), both)
    torch.testing.assert_close(both, torch.cat([decoded, paged, paged]), atol=0.01, rtol=0.02)
    monkeypatch.setattr(plugin, "sparse_mla_prefill_paged_form", lambda *step, **more: "gathered")
    layer.forward_mqa(torch.cat([q[last], q, q]), None, positions[last].new_zeros(both.shape[0]), both)
    torch.testing.assert_close(both, torch.cat([decoded, gathered, gathered]), atol=0.01, rtol=0.02)
    # room for one of two requests at a time, and for none, which is read from its pages
    for most, form in ((watched.needed[-1] - 1, "gathered"), (0, "paged")):
        monkeypatch.setattr(plugin.GatherMemory, "_gather_bytes", lambda self, most=most: most)
        alone = torch.full_like(both, torch.nan)
        watched.forms.clear()
        layer.forward_mqa(torch.cat([q[last], q, q]), None, positions[last].new_zeros(both.shape[0]), alone)
        torch.testing.assert_close(alone, both, atol=0.01, rtol=0.02)
        assert watched.forms == [form, form]

    if q.is_cuda:
        step.metadata = metadata(layer, decodes=True)
        graph, again = torch.cuda.CUDAGraph(), torch.full_like(decoded, torch.nan)
        with torch.cuda.graph(graph):
            layer.forward_mqa(q[last], None, positions[last], again)
        graph.replay()
        assert torch.equal(bits(again), bits(decoded))


@pytest.mark.parametrize("ratio", RATIOS)
def test_a_dummy_run_reserves_what_the_engines_does(ratio: int, step: type[Step]) -> None:
    layer = make_layer(ratio)
    out = torch.full((4, HEADS, 512), torch.nan, dtype=torch.bfloat16)
    layer.forward_mqa(out, None, None, out)
    assert step.reserved == fake_vllm.nbytes(layer.gathered())
    assert not out.any()
    queries = torch.ones(1)
    assert layer._fused_qnorm_rope_kv_insert(queries, None, None, None) == "the engine's insert"
    if layer.compressor is not None:
        layer.compressor(None, None, None)
    if layer.indexer is not None:
        step.reserved = 0
        assert layer.indexer.indexer_op.forward_cuda(None, None, None, None) == "the engine's indexer"
        assert step.reserved == fake_vllm.nbytes(layer.indexer.indexer_op.gathered())


@pytest.mark.parametrize("ratio", RATIOS)
def test_as_many_prefills_are_gathered_together_as_there_is_memory_for(
    ratio: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    forms = ["gathered"]
    monkeypatch.setattr(plugin, "sparse_mla_prefill_paged_form", lambda *step, **more: forms[0])
    layer = make_layer(ratio)
    rows = [100, 3, 90, 7, 11, 60, 5, 64, 30, 1, 80, 25, *[1] * 60]
    lengths = [min(7 * n, MAX_LEN) for n in rows]
    starts = torch.tensor([0, 2, *rows]).cumsum(0)  # a decode of two rows is ahead of them
    swa = SimpleNamespace(num_decodes=1, query_start_loc_cpu=starts, prefill_seq_lens_cpu=torch.tensor(lengths))
    page = fake_vllm.PAGE_TOKENS // ratio if ratio > 1 else None
    columns = TOP_K if ratio == 4 else None

    def bytes_of(first: int, end: int) -> int:
        """bf16 rows of windows, and of whole pages of the longest request's entries; lists of them, and lengths."""
        entries = -(-(max(lengths[first:end]) // ratio) // page) * page if page else 0
        tokens, width = sum(rows[first:end]), 128 + (entries if columns is None else columns)
        return (tokens + (end - first) * (127 + entries)) * 1024 + tokens * (-(-width // 4) * 4 + 1) * 4

    most, first, ends = fake_vllm.nbytes(layer.gathered()), 0, []
    q = torch.zeros(sum(rows), HEADS, 512)
    for form, found_rows, count, entries in layer._calls(swa, q, page, columns):
        assert form == "gathered"
        end = first + count
        assert found_rows == sum(rows[first:end])
        assert entries == (-(-(max(lengths[first:end]) // ratio) // page) * page if page else 0)
        assert bytes_of(first, end) <= most
        assert end == len(rows) or bytes_of(first, end + 1) > most
        ends.append(end)
        first = end
    assert ends[-1] == len(rows)
    assert len(ends) > 1
    # what the engine has not reserved is not asked for
    monkeypatch.setattr(plugin.GatherMemory, "_gather_bytes", lambda self: bytes_of(1, 2))
    found = [(form, count) for form, _, count, _ in layer._calls(swa, q, page, columns)]
    assert ("paged", 1) in found
    assert ("gathered", 1) in found
    forms[:] = ["paged"]
    assert [(form, n) for form, n, *_ in layer._calls(swa, q, page, columns)] == [("paged", sum(rows))]


def test_decode_splits_rows_in_the_engines_memory(step: type[Step], monkeypatch: pytest.MonkeyPatch) -> None:
    """If it is large enough: else the op allocates."""
    layer = make_layer(128)
    q, indices = torch.zeros(3, HEADS, 512), torch.zeros(3, 1, 192)
    reserved = fake_vllm.nbytes(layer.gathered())
    for needed, found in ((0, None), (4096, reserved), (reserved, reserved), (reserved + 1, None)):
        sizes = {(3, 1, HEADS, 192, 0): needed}
        monkeypatch.setattr(plugin, "sparse_mla_decode_workspace_size", lambda *shape, sizes=sizes, **_: sizes[shape])
        memory = layer._decode_workspace(q, indices, None)
        assert (None if memory is None else memory.numel()) == found


@pytest.mark.parametrize("space", ["ample", "scarce"])
def test_scores_lie_behind_the_keys_or_are_allocated(space: str, step: type[Step]) -> None:
    op = make_layer(4).indexer.indexer_op
    free = op._key_workspace()[: None if space == "ample" else 64]
    memory = op._score_memory(free, 5, MAX_LEN // 4)
    assert (memory.data_ptr() == free.data_ptr()) == (space == "ample")
    assert memory.numel() >= 5 * 1024


@pytest.mark.parametrize(("ratio", "whole"), [(4, True), (128, True), (128, False)])
def test_a_compressor_stores_what_two_ops_store(ratio: int, whole: bool, step: type[Step]) -> None:
    """The layer's and the indexer's. No entry of ratio 128 is closed where the metadata says that none can be."""
    layer = make_layer(ratio)
    step.metadata = metadata(layer, decodes=False)
    compressors = [layer.compressor] if ratio == 128 else [layer.compressor, layer.indexer.compressor]
    for compressor in compressors:
        state = step.metadata[compressor.state_cache.prefix]
        state.c128_boundary = whole
        of_cache, cache = step.metadata[compressor.k_cache_prefix], compressor._static_forward_context
        kv_cache = cache[compressor.k_cache_prefix].kv_cache
        states, entries = torch.zeros_like(compressor.state_cache.kv_cache), torch.zeros_like(kv_cache)
        positions, width = torch.arange(TOKENS), states.shape[2] // 2
        kv_score = draw(generator(1), TOKENS, 2 * width)
        compressor(kv_score, positions, layer.rotary_emb)

        rows = states.shape[1]
        save_partial_states(
            *kv_score.split(width, 1), compressor.ape, positions, states, state.slot_mapping, rows, width, ratio
        )
        large = compressor.head_dim == 512
        block, stride, scale = (64, 576, 8) if large else (128, 128, 4)
        if whole:
            compress_norm_rope_store(
                states, TOKENS, state.token_to_req_indices, positions, state.slot_mapping, state.block_table, rows,
                width, layer.rotary_emb.cos_sin_cache, entries, of_cache, None, compressor.head_dim, 64, ratio,
                ratio == 4, False, compressor.norm.weight.data, 1e-6, block, stride, scale,
            )  # fmt: skip
        assert torch.equal(bits(compressor.state_cache.kv_cache), bits(states))
        assert torch.equal(bits(kv_cache), bits(entries))
        assert bool(entries.any()) == whole


def test_the_indexers_prefill_and_decode_agree(step: type[Step]) -> None:
    layer, g = make_layer(4), generator(2)
    indexer, positions = layer.indexer, torch.arange(TOKENS)
    indexer.indexer_op.forward_cuda(None, None, None, None)
    step.is_locked = True
    step.metadata = metadata(layer, decodes=False)
    indexer.compressor(draw(g, TOKENS, 512), positions, layer.rotary_emb)
    raw = draw(g, TOKENS, 64, 128).bfloat16()
    given_weights = draw(g, TOKENS, 64).bfloat16()
    q, weights = indexer._q_rope_quant(positions, raw, layer.rotary_emb, given_weights)
    expected = fused_indexer_q_rope_quant(
        positions, raw, layer.rotary_emb.cos_sin_cache, given_weights, 128**-0.5, 64**-0.5
    )
    assert torch.equal(bits(q), bits(expected[0]))
    assert torch.equal(weights, expected[1])
    buffer = layer.topk_indices_buffer
    assert indexer.indexer_op.forward_cuda(raw, q, None, weights) is buffer
    picks = buffer[:TOKENS].clone()
    entries = (positions + 1) // 4
    assert torch.equal((picks >= 0).sum(1), entries.clamp(max=TOP_K))
    assert (picks < entries[:, None]).all()

    last = slice(TOKENS - DECODES, TOKENS)
    step.metadata = metadata(layer, decodes=True)
    indexer.indexer_op.forward_native(raw[last], q[last], None, weights[last])
    for row, expected in zip(buffer[:DECODES], picks[last], strict=True):
        assert int(torch.isin(row, expected).sum()) >= TOP_K - row.is_cuda  # of scores that are nearly the same, one


def test_prefill_rows_that_ranks_share(step: type[Step], monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank scores its own rows, and the engine's exchange brings the others."""
    layer, g = make_layer(4), generator(2)
    step.metadata = metadata(layer, decodes=False)
    exchanged = []

    class PrefillRowShard:
        @classmethod
        def from_metadata(cls, prefill: Any, num_decode_tokens: int) -> PrefillRowShard:
            assert (prefill.row_shard_sizes, num_decode_tokens) == ([100, 50], 0)
            return cls()

        def narrow(self, chunk: Any) -> Any:
            return 100, TOKENS, chunk.cu_seqlen_ks[100:], chunk.cu_seqlen_ke[100:]

        def exchange_topk(self, topk_buffer: torch.Tensor, width: int) -> None:
            exchanged.append((topk_buffer, width))

    names = seams.INDEXER_OP.removesuffix(".py").split("/")
    for count in range(2, len(names) + 1):
        monkeypatch.setitem(sys.modules, ".".join(names[:count]), ModuleType(names[count - 1]))
    sys.modules[".".join(names)].PrefillRowShard = PrefillRowShard  # type: ignore[attr-defined]
    indexer, buffer = layer.indexer, layer.topk_indices_buffer
    indexer.compressor(draw(g, TOKENS, 512), torch.arange(TOKENS), layer.rotary_emb)
    q = draw(g, TOKENS, 64, 128).to(torch.float8_e4m3fn)
    weights = draw(g, TOKENS, 64)
    indexer.indexer_op.forward_cuda(q, q, None, weights)
    whole = buffer[:TOKENS].clone()
    assert exchanged == []
    step.metadata[indexer.k_cache.prefix].prefill.row_shard_sizes = [100, 50]
    indexer.indexer_op.forward_cuda(q, q, None, weights)
    assert torch.equal(buffer[100:TOKENS], whole[100:])
    assert (buffer[:100] == -1).all()
    ((given, width),) = exchanged
    assert given is buffer
    assert width == TOP_K


def test_norm_and_output(step: type[Step]) -> None:
    layer, g = make_layer(1), generator(3)
    qr, scale, kv = layer._split_qkv_and_norm(draw(g, 5, 256 + 512).bfloat16())
    assert (qr.shape, scale, kv.shape) == ((5, 256), None, (5, 512))
    o = draw(g, 5, HEADS, 512).bfloat16()
    weight = draw(g, 1, 128, HEADS * 512)
    layer.wo_b = lambda z: z
    layer.wo_a = SimpleNamespace(weight=weight.bfloat16())
    assert layer._o_proj(o, torch.zeros(5).long()) == "the engine's projection"
    scales = torch.full((1, 1, HEADS * 4), 0.5)
    layer.wo_a = SimpleNamespace(weight=(weight / 0.5).to(torch.float8_e4m3fn), weight_scale_inv=scales)
    expected = o.flatten(1).float() @ weight[0].T
    got = layer._o_proj(o, torch.zeros(5).long()).float()
    assert ((got - expected).norm() / expected.norm()) < 0.1


def test_what_is_not_served_is_the_engines(step: type[Step], caplog: pytest.LogCaptureFixture) -> None:
    layer = make_layer(4)
    plugin.PLUGIN.is_asked = True
    op, indexer = layer.indexer.indexer_op, layer.indexer
    step.metadata = metadata(layer, decodes=True)
    of_layer = step.metadata[indexer.k_cache.prefix]
    q = torch.zeros(DECODES, 64, 128)
    for owner, field, value in (
        (op, "use_pcp", True),
        (op, "candidate_blocks", q),
        (op, "dense_mha_metadata_layer_name", "a layer"),
        (op, "use_fp4_cache", True),
        (of_layer.decode, "requires_padding", True),
        (of_layer.decode, "indices", q),
    ):
        before = getattr(owner, field)
        setattr(owner, field, value)
        assert op.forward_cuda(q, q, None, None) == "the engine's indexer", field
        setattr(owner, field, before)
    cache = layer.swa_cache_layer
    cache.kv_cache = cache.kv_cache.bfloat16()
    assert layer._fused_qnorm_rope_kv_insert(None, None, None, step.metadata) == "the engine's insert"
    indexer.use_fp4_kv = True
    assert indexer._q_rope_quant(None, None, None, None) == "the engine's queries"
    indexer.compressor.use_fp4_cache = True
    with pytest.raises(AssertionError, match="the engine's compressor"):
        indexer.compressor(q, None, None)
    step.metadata = metadata(layer, decodes=False)
    step.metadata[layer.swa_cache_layer.prefix].prefill_left_visible = q
    with pytest.raises((AssertionError, TypeError)):
        layer.forward_mqa(q, None, q, q)
    reasons = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(reasons) == len(set(reasons)) >= 6


def test_heads_are_padded_unless_all_of_attention_is_replaced(step: type[Step]) -> None:
    layer = make_layer(1, frozenset({"decode", "insert"}))
    assert layer.padded_heads == 64
    step.metadata = metadata(layer, decodes=False)
    assert layer._fused_qnorm_rope_kv_insert(None, None, None, step.metadata) == "the engine's insert"
    assert layer._split_qkv_and_norm(torch.zeros(1)) == "the engine's norm"
    assert make_layer(128, frozenset({"decode", "prefill", "insert"})).padded_heads == HEADS
    for parts, kinds in (
        ({"indexer"}, ("Compressor", "CuteKernelsIndexerOp")),
        ({"compressor"}, ("CuteKernelsCompressor", "IndexerOp")),
    ):
        indexer = make_layer(4, frozenset(parts)).indexer
        assert (type(indexer.compressor).__name__, type(indexer.indexer_op).__name__) == kinds


def config(**parallel: int) -> Any:
    found = {"decode_context_parallel_size": 1, "prefill_context_parallel_size": 1, **parallel}
    sizes = SimpleNamespace(head_dim=512, qk_rope_head_dim=64)
    return SimpleNamespace(model_config=SimpleNamespace(hf_config=sizes), parallel_config=SimpleNamespace(**found))


def test_the_model_gets_the_class(monkeypatch: pytest.MonkeyPatch, step: type[Step]) -> None:
    """The selector is replaced when somebody imports the model, once."""
    model = ModuleType(plugin.MODEL)
    other = type("Other", (), {})
    chosen = [fake_vllm.Attention]
    vars(model).update({plugin.BASE: fake_vllm.Attention, plugin.SELECTOR: lambda vllm_config: chosen[0]})
    monkeypatch.setitem(sys.modules, plugin.MODEL, model)
    monkeypatch.setenv("CUTE_KERNELS_PLUGIN", "all")
    plugin.register()
    selector = getattr(model, plugin.SELECTOR)
    plugin.register()
    assert getattr(model, plugin.SELECTOR) is selector
    kind = selector(config())
    assert issubclass(kind, fake_vllm.Attention)
    assert kind is selector(config())
    assert kind.get_padded_num_q_heads(16) == 16
    assert selector(config(decode_context_parallel_size=2)) is fake_vllm.Attention
    chosen[0] = other
    assert selector(config()) is other


def test_the_first_step_is_announced(step: type[Step], caplog: pytest.LogCaptureFixture) -> None:
    layer = make_layer(1, frozenset({"norm"}))
    step.metadata = {layer.swa_cache_layer.prefix: SimpleNamespace(num_decode_tokens=0, num_prefills=0, num_decodes=0)}
    with caplog.at_level(logging.INFO, "vllm.cute_kernels"):
        for _ in range(2):
            layer.forward_mqa(torch.zeros(1, 64, 512), None, None, None)
    expected = "cute_kernels: in use in vllm 0.33.0: DeepseekV4CuteKernelsAttention with norm; 64 heads for 2"
    assert [record.getMessage() for record in caplog.records] == [expected]
